/* regain.h - parts of shared tensors that come to this service from another one (regain.c).  Owner: the loop. */
#ifndef TLY_SUM_REGAIN_H
#define TLY_SUM_REGAIN_H

#include <stdbool.h>
#include <stdint.h>

struct tly_frame;
struct tly_job;
struct tly_kept;
struct tly_session;

/* HAVE of kind TLY_KEPT: which version of a part its rank holds, or the state of the values that it is about to give.  -EPROTO,
 * -ENOMEM: *why. */
int tly_regain_have(struct tly_session *p, const struct tly_frame *f, const void *data, const char **why);
/* DONE: its rank has named all parts that are here, in this epoch. */
void tly_regain_done(struct tly_session *p, uint32_t epoch);
/* CANCEL: if the frame names the part's create, that has failed, and its rank gives the part up. */
void tly_regain_cancelled(struct tly_session *p, const struct tly_frame *f);
/* An operation has come for the part.  Is there memory for its values?  If there is now, and was not before, ask for them. */
bool tly_regain_has_memory(struct tly_job *job, struct tly_kept *s);
/* Ask for the values of parts that wait for them, a few at a time. */
void tly_regain_look(struct tly_job *job);
/* The part's create has ended here with these values, as long as the part.  They count unless the part's values are here. */
void tly_regain_created(struct tly_job *job, struct tly_kept *s, const uint8_t *values);
/* FINAL of kind TLY_KEPT: a fragment of the values.  -EPROTO: *why. */
int tly_regain_final(struct tly_session *p, const struct tly_frame *f, const void *data, const char **why);
/* The rank's connection has ended: it says all that again over the next one. */
void tly_regain_detach(struct tly_session *p);
/* The rank has left the job: it gives nothing. */
void tly_regain_left(struct tly_job *job, uint32_t rank);

#endif
