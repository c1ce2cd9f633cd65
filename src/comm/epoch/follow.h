/* follow.h - changes of epoch, as the coordinator leads them (follow.c).  Owner: the loop. */
#ifndef TLY_COMM_FOLLOW_H
#define TLY_COMM_FOLLOW_H

#include "membership/member.h"
#include "tally/tally.h"

/* The callbacks of the member. */
void tly_follow_invited(void *comm);
void tly_follow_prepare(void *comm, const struct tly_roster *next);
void tly_follow_promised(void *comm, const struct tly_begun *b);
void tly_follow_committed(void *comm, const struct tly_roster *roster);
/* Has a change taken too long? */
void tly_follow_tick(tally_comm *c);
void tly_follow_finish(tally_comm *c);

#endif
