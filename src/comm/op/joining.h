/* joining.h - tally_join(): a rank that has no more input (joining.c), and what services are told of it (rounds.c).
 *
 * Owner: the loop, unless a field says otherwise. */
#ifndef TLY_COMM_JOINING_H
#define TLY_COMM_JOINING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/list.h"
#include "local/local.h"
#include "membership/member.h"
#include "tally/tally.h"

struct tly_peer;
struct tally_op;

/* tally_join().  Owner: the loop, unless it says otherwise. */
struct tly_joining {
    /* This rank has joined: its operations wait as long as the others live.  Set and cleared under names.lock, too; no order
     * with anything else. */
    atomic_bool on;
    struct tally_op *op;      /* until it ends; NULL: this rank has not joined, or never will be done */
    struct tly_begun *rounds; /* owned: how often each tensor had been submitted by then, its epoch unused */
    size_t count;
    bool placed; /* among those that join: from now on nobody waits for this rank */
    bool drained,
        complete; /* that nothing of ours is under way has been said; all ranks have joined, and `last` last */
    uint32_t last;
};

/* From any thread. */
static inline bool tly_joining_is_on(const struct tly_joining *j)
{
    return atomic_load_explicit(&j->on, memory_order_relaxed);
}

/* rounds.c */
/* List how often each tensor has been submitted, and results that are kept: a service that takes another's place may
 * still be told of an operation without a name that has ended.  names.lock held.  -ENOMEM. */
int tly_rounds_list(tally_comm *c);
/* A connection has been made, or this rank has joined or goes on: its service may have to know. */
void tly_rounds_tell(struct tly_peer *p);

/* joining.c */
/* The callbacks of the member. */
void tly_joining_placed(void *comm);
void tly_joining_over(void *comm, uint32_t joins, uint32_t last, int err, const char *sentence);
/* The engine's callback; from any thread. */
bool tly_joining_stand_in(void *comm, const struct tly_local_op *like);
/* In the loop, before each sleep, if this rank has joined: is it done?  When to look again, or INT64_MAX. */
int64_t tly_joining_look(tally_comm *c);
/* The communicator fails, or is closed. */
void tly_joining_end(tally_comm *c, int err, const char *sentence);
void tly_joining_finish(tally_comm *c);

#endif
