/* submit.h - what a caller asks for, before it is an operation (op.h).
 *
 * Owner: the submitting thread. */
#ifndef TLY_SUBMIT_H
#define TLY_SUBMIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ops/ranges.h"
#include "tally/tally.h"

struct tally_group;
struct tally_op;

/* What the caller asked for, before it is an operation. */
struct tly_request {
    struct tally_group *group;
    const char *name;
    uint8_t kind, reduction;
    unsigned dtype;
    uint32_t root; /* in the group; nonzero, of a barrier: it needs all ranks, also those that have joined; of
                            * an allgather: it does not */
    const void *input;
    void *output;
    uint64_t count, digest;
    uint32_t from, to, tag;    /* of a message: ranks of the communicator */
    bool copy;                 /* the caller does not wait */
    bool even;                 /* an allgather into the caller's memory: all ranks give as much */
    const size_t *give, *take; /* elements for each rank of the group and from each; NULL: none for any */
    const char *reason;        /* an error mark */
    struct tly_ranges
        ranges; /* the caller's, of an all-reduce of ranges; checked, and `count` is their sum */
};

/* Check the request, make an operation of it, and hand that to the loop or to shared memory.  r->group is filled in.  out: its
 * handle, or NULL: the caller wants none.  -errno, with a sentence. */
int tly_submit(tally_comm *c, struct tly_request *r, const struct tally_options *o, tally_op **out);

/* Make *options what this library knows: NULL or a whole struct, the caller's or, if that has another size, `own`.
 * -EINVAL with a sentence.  Once is enough for a call; twice does no harm. */
int tly_options_take(const struct tally_options **options, struct tally_options *own);

/* The ranks that an operation with these options, which were taken, is for. */
struct tally_group *tly_submit_group(tally_comm *c, const struct tally_options *o);

/* -EINVAL, with a sentence: what, "root " say, with this place is not in the group. */
int tly_submit_no_rank(const struct tally_group *g, const char *what, int place);

/* A handle of no tensor, which neither the loop nor a queue has.  NULL: out of memory. */
struct tally_op *tly_op_make(tally_comm *c, uint8_t kind, const struct tally_options *options);
/* Such a one ends; err is positive, or 0. */
void tly_op_finish(struct tally_op *op, int err, const char *sentence);

int tly_op_submit_barrier(tally_comm *c, const char *name, uint64_t digest, tally_op **op);

#endif
