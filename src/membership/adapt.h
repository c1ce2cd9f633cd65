/* adapt.h - the plan follows the network; who holds the job up.  Owner: the coordinator's loop. */
#ifndef TLY_MEMBERSHIP_ADAPT_H
#define TLY_MEMBERSHIP_ADAPT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

struct tly_coordinator_member;
struct tly_coordinator;
struct tly_currents;
struct tly_reader;
struct tly_roster;
struct tly_roster_service;

/* adapt.c */
/* An epoch holds. */
void tly_adapt_begin(struct tly_coordinator *c);
/* Into the roster, before it is split: what is known of cards and services by now. */
void tly_adapt_apply(struct tly_coordinator *c);
/* For `tally status` and the members: name the tallyds that leave the split (before the new one is computed) and those that
 * join it (after). */
void tly_adapt_tell_gone(struct tly_coordinator *c);
void tly_adapt_tell_come(struct tly_coordinator *c);
/* A rank's report of its traffic.  An impossible report is dropped, for it is no reason to end a job. */
void tly_adapt_heard(struct tly_coordinator_member *m, struct tly_reader *r);
/* A rank's word that it has no traffic. */
void tly_adapt_heard_quiet(struct tly_coordinator_member *m, struct tly_reader *r);
void tly_adapt_tick(struct tly_coordinator *c);
void tly_adapt_finish(struct tly_coordinator *c);
/* What this service's card carries, bit/s; 0: nothing was seen of it, or the figure is a guess. */
uint64_t tly_adapt_sure(const struct tly_coordinator *c, uint32_t service);
/* For words.  The time of day; "the machine of rank 0 (w0)", "tallyd 1 (c1)"; a service with what it is seen to carry and to
 * add, which is not yet in the roster; "carries 0.1 of 0.48 Gbit/s since 12:03:11", or "seems to carry", if that is tried, or
 * "is tried with", if it is assumed after a rest, or "reads its inputs late", if its process holds everybody up. */
void tly_adapt_time(time_t when, char out[16]);
void tly_adapt_name(const struct tly_roster *r, uint32_t i, char *out, size_t len);
void tly_adapt_see(const struct tly_coordinator *c, uint32_t i, struct tly_roster_service *out);
void tly_adapt_speed(const struct tly_coordinator *c, uint32_t i, const struct tly_roster_service *s,
                     bool tried, char *out, size_t len);
/* A card that carries more or less than was said by this fraction is news. */
#define TLY_ADAPT_NEWS .15
/* What each card is seen to carry; the caller frees it.  Count 0: nothing is known, or memory lacks. */
void tly_adapt_currents(const struct tly_coordinator *c, struct tly_currents *out);
/* Does some card carry more or less than all members were told, by TLY_ADAPT_MOVED?  From then on that is told. */
bool tly_adapt_moved(struct tly_coordinator *c);
#define TLY_ADAPT_MOVED .05

/* slow.c */
/* A rank's report of its steps.  An impossible report is dropped. */
void tly_slow_heard(struct tly_coordinator_member *m, struct tly_reader *r);
/* A rank has left: what the others have told of their steps is of steps with it. */
void tly_slow_left(struct tly_coordinator *c);
/* Has the rank left that was last said to compute longer?  The job's last line still names it. */
bool tly_slow_is_past(const struct tly_coordinator *c);
/* Judge by what has come, and tell all members and the log if that is news. */
void tly_slow_tick(struct tly_coordinator *c);
/* Another epoch holds. */
void tly_slow_forget(struct tly_coordinator *c);

#endif
