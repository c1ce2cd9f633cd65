/* verdict.h - rounds that fail, or wait: ranks that disagree, refuse, leave or are late; what ranks say after a loss.
 * Owner: the loop. */
#ifndef TLY_SUM_VERDICT_H
#define TLY_SUM_VERDICT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tly_round;
struct tly_session;
struct tly_frame;
struct tly_job;

/* verdict.c */
/* The round fails with this sentence, unless it has ended; not before the crew has left it. */
void tly_verdict_decide(struct tly_job *job, struct tly_round *r, int err, const char *sentence);
/* Two specs for one round. */
void tly_verdict_differs(struct tly_job *job, struct tly_round *r);
/* A push has come for a round that has failed or is about to. */
void tly_verdict_arrived(struct tly_session *p, struct tly_round *r);
/* A rank's spec in words; owned. */
void tly_verdict_text(struct tly_session *p, struct tly_round *r, char *text);
/* A rank comes to a round that has ended without it: the others' group is another. */
void tly_verdict_too_late(struct tly_session *p, struct tly_round *r);
/* A service that is gone has decided it already. */
void tly_verdict_known(struct tly_session *p, struct tly_round *r, int err, const char *sentence);
void tly_verdict_refused(struct tly_session *p, struct tly_round *r, bool cancelled, const char *reason);
/* A rank takes back what it has pushed: nothing happens if all ranks have. */
void tly_verdict_cancelled(struct tly_session *p, struct tly_round *r, const char *reason);
/* Rounds that lack this rank, which has left. */
void tly_verdict_left(struct tly_job *job, uint32_t rank);
/* The round may lack ranks that have joined, and not go on without them. */
void tly_verdict_joined(struct tly_job *job, struct tly_round *r);
/* Say who is late: to all who wait, or to one who asks. */
void tly_verdict_late(struct tly_job *job, struct tly_round *r, const struct tly_session *asker);
void tly_verdict_tick(struct tly_job *job);
/* For how long (ns of the awake clock) the round that waits longest has waited, and for what; 0 and "" if none. */
int64_t tly_verdict_waits(struct tly_job *job, char *out, size_t len);

/* redo.c */
/* The connection of a rank has ended: what has come of its pushes stays; what it is to be sent waits for its word. */
void tly_redo_detach(struct tly_session *p);
/* HAVE: so much of the result has landed there.  data: of a verdict (MARK). */
int tly_redo_have(struct tly_session *p, const struct tly_frame *f, const void *data, const char **why);
/* DONE: that was all. */
void tly_redo_done(struct tly_session *p, const struct tly_frame *f);
/* FINAL: what it has of the result. */
void tly_redo_final(struct tly_session *p, const struct tly_frame *f, const void *data);
/* A rank has pushed, said something or left: see whether all is known now. */
void tly_redo_look(struct tly_job *job, struct tly_round *r);
void tly_redo_look_at_all(struct tly_job *job);
/* A rank has left the job: nothing more comes of it. */
void tly_redo_left(struct tly_job *job, uint32_t rank);
/* There may be room for results again. */
void tly_redo_restore(struct tly_job *job);

#endif
