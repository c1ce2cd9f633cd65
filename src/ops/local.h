/* local.h - what ranks that share memory do with an operation there: a table of facts and functions for a call.
 *
 * Each rank posts its call, with its data or with the place where they lie.  Once all posts have met, the data are reduced,
 * or the root's are spread to all ranks, or each rank takes its own from the others' data.  src/local/ knows several ways to do
 * that.  It reads this table and never asks which operation it is.  The operation's rank.c defines the table (`local` in struct
 * tly_call).
 *
 * The tables do not change while there is a communicator, so any thread reads them. */
#ifndef TLY_OPS_LOCAL_H
#define TLY_OPS_LOCAL_H

#include <stdbool.h>
#include <stdint.h>

#include "ops/givers.h"

struct tally_op;

/* An operation that all ranks have posted, as one of them sees it. */
struct tly_local_view {
    uint32_t me, ranks, root;
    const uint64_t *given; /* bytes that each rank gives */
    const int64_t *dims;   /* of the caller's tensor; of a call with pieces: elements of each rank's */
    uint32_t element;      /* bytes of an element */
};

/* The range of another rank's data that a rank takes. */
struct tly_local_take {
    uint64_t from;  /* begins at this byte of the other's data */
    uint64_t to;    /* goes to this byte of its own output */
    uint64_t bytes; /* 0: it takes nothing */
};

/* The range of a reduction's result that a rank gets: its output is that range alone. */
struct tly_local_range {
    uint64_t begin, bytes; /* bytes 0: it gets nothing */
};

struct tly_local_call {
    enum tly_givers givers;
    bool reduces; /* all data are reduced */
    bool spreads; /* each rank gets all of the root's data */
    /* Of a reduction: fill in the range of each rank.  range[] is clear.  Two ranges are the same or disjoint.
     * NULL: each rank gets the whole result. */
    void (*gets)(const struct tly_local_view *v, struct tly_local_range range[]);
    /* Of another call: fill in what this rank takes of each rank.  take[] is clear.  NULL: nothing. */
    void (*takes)(const struct tly_local_view *v, struct tly_local_take take[]);
    /* Do all go on without the ranks that have joined?  Zeros stand for their data.  NULL: no. */
    bool (*spares)(uint32_t root);
    /* Each rank has a length of its own, which the others learn by its post.  Given each one's first dimension and bytes, in
     * any thread: returns the memory of the result; NULL: out of memory.  No function: each rank that gives has as many bytes
     * as the caller's tensor, and the result goes to the caller's output. */
    void *(*gathered)(struct tally_op *op, const int64_t first_dims[], const uint64_t bytes[]);
};

#endif
