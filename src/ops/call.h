/* call.h - what a rank does with an operation: a table of functions and facts for each call of tally.h.
 *
 * Each operation's room, src/ops/NAME/, has a rank.c that defines the calls of the operation.  call.c lists them by the number
 * that frames carry (enum tally_kind, TLY_PROBE, TLY_JOIN).  A service needs none of this: tallyd links rule.c alone.
 *
 * The tables are constant, so any thread reads them.  Functions run in the loop. */
#ifndef TLY_OPS_CALL_H
#define TLY_OPS_CALL_H

#include <stdbool.h>
#include <stdint.h>

struct tally_comm;
struct tally_op;

struct tly_call {
    const char *function; /* as C calls it: "tally_push_pull" */
    const char *
        collective; /* where all collectives of a group share one sequence of numbers: "all_reduce"; NULL: never there */
    const char *root; /* "from" or "to", before the root in texts; NULL: it has no root */
    bool reduces;     /* its result is a reduction */
    bool shaped;      /* ranks compare the caller's shape */
    bool
        pieces; /* parts behind part 0 are pieces of one rank, or there are none; part 0 is the ranks' roll call */
    bool paired;  /* pieces between two ranks, whose lengths only these know */
    bool message; /* between two ranks, and outside the order of collectives */
    bool moves;   /* data crosses the network cards as soon as all ranks have submitted it */

    /* Its epoch is known: cut it into parts, the same on all ranks (comm/parts.h).  -errno. */
    int (*cut)(struct tally_comm *c, struct tally_op *op);
    /* The answer to part 0 is in place.  1: this cut more parts, which may have moved all of them; 0; -errno.  NULL: nothing
     * follows from it. */
    int (*answered)(struct tally_comm *c, struct tally_op *op);
};

/* The call with this number; NULL: there is none. */
const struct tly_call *tly_call_of(unsigned kind);

/* NAME/rank.c */
extern const struct tly_call tly_call_push_pull, tly_call_reduce, tly_call_reduce_scatter;
extern const struct tly_call tly_call_broadcast;
extern const struct tly_call tly_call_allgather;
extern const struct tly_call tly_call_alltoall, tly_call_gather, tly_call_scatter;
extern const struct tly_call tly_call_message, tly_call_probe;
extern const struct tly_call tly_call_barrier;
extern const struct tly_call tly_call_join;

#endif
