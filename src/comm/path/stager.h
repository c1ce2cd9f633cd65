/* stager.h - operations whose tensor is in a GPU's memory: the stage between the GPU and the host (stager.c).
 *
 * Owner: the submitting thread until the operation is in the inbox, then the loop. */
#ifndef TLY_COMM_STAGER_H
#define TLY_COMM_STAGER_H

#include <stdbool.h>

#include "tally/tally.h"

struct tally_op;
struct tly_local_gpu;
struct tly_stager;

/* The stagers of a communicator.  stager.c owns this. */
struct tly_stagers {
    struct tly_stager *first; /* owned: a list, one for each GPU with tensors */
};

/* At submission: the input is there after the work so far in this stream.  -EINVAL: the tensor is not on one GPU. */
int tly_stager_take(struct tally_op *op, void *stream);
/* Where the tensor is, if GPUs sum it in groups (local/gpus.h) instead of the stage's copies; else NULL. */
const struct tly_local_gpu *tly_stager_grouped(struct tally_op *op);
/* They cannot: the stage copies it. */
void tly_stager_ungroup(struct tally_op *op);
/* The operation has ended, or has not been submitted: give back what it has, if it has anything.  failed: the GPU may still read
 * the input, and the application's stream waits for that. */
void tly_stager_leave(struct tally_op *op, bool failed);
/* No operation is left: end the threads and free the memory. */
void tly_stager_finish(tally_comm *c);

#endif
