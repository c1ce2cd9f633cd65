/* call.h - what a rank does with an operation: a table of functions and facts for each call of tally.h.
 *
 * Each operation's room, src/ops/NAME/, has a rank.c that defines the calls of the operation.  call.c lists them by the number
 * that frames carry (enum tally_kind, TLY_PROBE, TLY_JOIN).  A service needs none of this: it has rules (rule.h).
 *
 * The tables do not change while there is a communicator, so any thread reads them. */
#ifndef TLY_OPS_CALL_H
#define TLY_OPS_CALL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ops/ranges.h"

struct tally_comm;
struct tally_op;
struct tly_local_call;
struct tly_part;
struct tly_request;

/* The caller's memory that a call must have, if it has elements. */
enum { TLY_CALL_INPUT = 1, TLY_CALL_OUTPUT = 2 };

struct tly_call {
    /* As C calls it: "tally_push_pull". */
    const char *function;
    /* The same where all ranks give as much (tly_request.even). */
    const char *even_function;
    /* Where all collectives of a group share one sequence of numbers: "all_reduce".  NULL: never there. */
    const char *collective;
    /* "from" or "to", before the root in texts.  NULL: it has no root. */
    const char *root;
    bool reduces;  /* its result is a reduction */
    bool shaped;   /* ranks compare the caller's shape */
    bool placed;   /* its tensor may be on a GPU (tally_options.place) */
    bool pieces;   /* part 0 is the ranks' roll call, and each other part is of one rank's piece */
    bool paired;   /* pieces between two ranks, whose lengths only these know */
    bool message;  /* between two ranks, and outside the order of collectives */
    bool moves;    /* data crosses the network cards as soon as all ranks have submitted it */
    bool finds;    /* its result is a rank: tally_op_source() */
    bool empty;    /* it has no data */
    bool kept;     /* of a shared tensor: its parts go straight to services, any of which may end it */
    bool bounded;  /* its reduction is a staleness */
    bool apart;    /* its parts' services belong to no epoch: BEGUN does not list it */
    uint8_t names; /* the kind under whose names it is; 0: its own */
    /* How ranks that share memory do it there; NULL: they cannot. */
    const struct tly_local_call *local;
    /* Size of the operation's own state (tly_op_own), clear at first. */
    uint16_t own_bytes;

    /* In the submitting thread, as the next four.  What is wrong with the request beside what is wrong with any: -EINVAL with
     * a sentence.  NULL: nothing. */
    int (*check)(const struct tally_comm *c, const struct tly_request *r);
    /* Which of the caller's memory this rank needs.  NULL: input and output. */
    unsigned (*needs)(const struct tally_comm *c, const struct tly_request *r);
    /* Make the own state of an operation that is no error mark.  -ENOMEM.  NULL: it is clear. */
    int (*furnish)(struct tally_comm *c, struct tally_op *op, const struct tly_request *r);
    /* Write the name of an operation to which its caller gives none; names.lock held.  -ENOMEM, with a sentence.  NULL: its
     * number among the group's calls of this kind is its name. */
    int (*name)(struct tally_op *op, const struct tly_request *r, char *name, size_t len);

    /* From any thread.  Where in the caller's buffer its elements lie; an error mark has no list.  NULL: one behind the
     * other, from its begin. */
    const struct tly_ranges *(*ranges)(const struct tally_op *op);

    /* From any thread.  Is it large enough for the ranks of each machine to do it together (comm/path/team.c)?  The same on all
     * ranks.  NULL: never. */
    bool (*teams)(const struct tally_op *op);

    /* In the loop, as the next.  The epoch is known: cut the operation into parts, the same on all ranks (comm/path/parts.h).
     * -errno. */
    int (*cut)(struct tally_comm *c, struct tally_op *op);
    /* The answer to part 0 is in place.  1: this cut more parts, which may have moved all of them; 0; -errno.  NULL: nothing
     * follows from it. */
    int (*answered)(struct tally_comm *c, struct tally_op *op);

    /* In the loop.  The result of a part is in place.  NULL: nothing follows. */
    void (*landed)(struct tally_comm *c, const struct tly_part *p);

    /* In the loop.  It is about to end; failed: without its result.  NULL: nothing follows. */
    void (*ended)(struct tally_comm *c, struct tally_op *op, bool failed);

    /* From any thread.  The last reference is gone: free what the own state owns.  NULL: nothing. */
    void (*release)(struct tally_op *op);
};

/* Does each rank give a whole tensor, and want the whole sum? */
static inline bool tly_call_is_sum_for_all(const struct tly_call *call)
{
    return call->reduces && !call->root && !call->pieces;
}

/* The call with this number; NULL: there is none. */
const struct tly_call *tly_call_of(unsigned kind);

/* One more, with the number `number` (1 to TLY_KINDS - 1), before any communicator is opened.  -EEXIST, -EINVAL. */
int tly_call_register(unsigned number, const struct tly_call *call);

/* NAME/rank.c */
extern const struct tly_call tly_call_push_pull, tly_call_push_pullv, tly_call_reduce,
    tly_call_reduce_scatter;
extern const struct tly_call tly_call_broadcast;
extern const struct tly_call tly_call_allgather;
extern const struct tly_call tly_call_alltoall, tly_call_gather, tly_call_scatter;
extern const struct tly_call tly_call_message, tly_call_probe;
extern const struct tly_call tly_call_barrier;
extern const struct tly_call tly_call_join;
extern const struct tly_call tly_call_shared_create, tly_call_shared_add, tly_call_shared_read;

#endif
