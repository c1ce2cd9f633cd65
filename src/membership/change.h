/* change.h - from one epoch to the next, and with whom the job cannot go on.  Owner: the coordinator's loop. */
#ifndef TLY_MEMBERSHIP_CHANGE_H
#define TLY_MEMBERSHIP_CHANGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tly_coordinator_member;
struct tly_coordinator;
struct tly_frame;
struct tly_reader;

/* setback.c */
/* A rank cannot reach this tallyd: its machine waits before it is invited again, longer each time.  True if that is news:
 * it was not the same rank and reason the last time. */
bool tly_setback_note(struct tly_coordinator *c, const struct tly_coordinator_member *m, const char *why);
/* Whether this tallyd may be invited now. */
bool tly_setback_is_over(const struct tly_coordinator *c, const struct tly_coordinator_member *m);
/* All ranks have reached it. */
void tly_setback_forget(struct tly_coordinator *c, const struct tly_coordinator_member *m);

/* change.c */
/* Is it a rank that has not left? */
bool tly_change_concerns(const struct tly_coordinator_member *m);
/* INVITING: all ranks are connected, and some tallyd are out: the first epoch that anybody works in has none of them. */
void tly_change_start_without(struct tly_coordinator *c);
/* RUNNING: whatever step of a change is due. */
void tly_change_go_on(struct tly_coordinator *c);
/* A rank's answer to INVITE or PREPARE; -EPROTO (*why). */
int tly_change_begun(struct tly_coordinator_member *m, bool last, struct tly_reader *r, const char **why);
/* A tallyd is out: the job goes on without it. */
void tly_change_evict(struct tly_coordinator_member *m, const char *why);
/* NULL: it has no place in the roster. */
struct tly_coordinator_member *tly_change_find_tallyd(const struct tly_coordinator *c, uint64_t incarnation);
/* A member has come of a job that runs, and whose coordinator has died; -EPROTO (*why). */
int tly_change_resumed(struct tly_coordinator_member *m, struct tly_reader *r, const char **why);
/* The services of such a job that have not come back in time are out. */
void tly_change_miss_services(struct tly_coordinator *c);

/* judge.c */
/* A rank's COMPLAIN: it cannot reach a service, or cannot go on. */
void tly_judge_complaint(struct tly_coordinator_member *m, const struct tly_frame *f, struct tly_reader *r);
/* Put out each tallyd whose time is up, and fail the job if a complaint's is. */
void tly_judge_tick(struct tly_coordinator *c);
/* A tallyd that is silent to us, whether or not anything waits for it. */
bool tly_judge_is_silent(const struct tly_coordinator_member *m, char *why, size_t len);

#endif
