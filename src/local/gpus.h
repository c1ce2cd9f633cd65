/* gpus.h - the GPUs of a machine's ranks, which sum in groups: each rank's buffer, what it maps of its group, and the pieces that
 * are under way (gpus.c).  gpu_way.c makes pieces of operations.
 *
 * A group is `each` ranks in a row, a node of the tree over ranks, of which some own pieces.  Its GPUs take the steps of device/order.h.  If there are
 * several groups or machines, an owner writes its sum to the host.  There the piece's carrier adds the groups' sums, and gives the
 * result to the owners.  In a team the carrier sends the sum and has the result land.
 *
 * The ranks of a machine post pieces in the order of a list, which rank 0 writes: of operations once it has all ranks' posts, and in a
 * team of parts once their results have landed.  So all ranks give a piece the same number.
 *
 * A rank whose tensor is on the host copies it to its GPU and back, through its staging. */
#ifndef TLY_LOCAL_GPUS_H
#define TLY_LOCAL_GPUS_H

#include <stdbool.h>
#include <stdint.h>

#include "device/device.h"
#include "device/order.h"
#include "local/engine.h"

enum {
    TLY_GPUS_SLOT = 256 << 10, /* most bytes of a piece */
    TLY_GPUS_EACH = TLY_DEVICE_INPUTS,
};

/* At the head of a rank's staging, in its pool. */
struct tly_gpus_shared {
    struct tly_order_board board;
    /* 1 + the last piece of this slot whose sum over groups this rank has made; release */
    _Alignas(64) _Atomic uint64_t hosted[TLY_ORDER_SLOTS];
};

/* A piece that this rank posts. */
struct tly_gpus_piece {
    struct tly_local_round
        *round;             /* counts what has come; NULL: it has ended here, and the piece moves nothing */
    uint64_t at;            /* in the tensor */
    uint32_t bytes, number; /* its number in its entry */
    uint8_t carrier, steps; /* as in its entry */
};

struct tly_gpus;

/* --- the start: all ranks of the machine call these in this order ------------------------------------------- */

/* What a rank of the machine has said, and where its GPU is ("": it has none). */
struct tly_gpus_start *tly_gpus_start(struct tly_local *l, uint32_t rank);
const char *tly_gpus_address(const struct tly_local *l, uint32_t rank);
/* Have a buffer on the GPU of this thread's context.  -errno, with a sentence.  -ENODEV: the GPU is lost, or has not copied for
 * 3 s. */
int tly_gpus_offer(struct tly_local *l, const struct tly_gpus_choice *choice, struct tly_gpus_offer *out);
/* Map the group's buffers, read the nonce through each mapping, and have a kernel add the nonces.  All ranks have offered.
 * Failures as above. */
int tly_gpus_accept(struct tly_local *l);
/* All ranks could: operations may come. */
void tly_gpus_begin(struct tly_local *l);
/* Ranks in a group; once they have begun. */
uint32_t tly_gpus_each(const struct tly_local *l);
/* This rank's GPU; NULL: GPUs do not sum in groups. */
const struct tly_device *tly_gpus_device(const struct tly_local *l);

/* --- pieces; all under the engine's lock ---------------------------------------------------------------------- */

/* Post the next piece.  False: no slot is free. */
bool tly_gpus_post(struct tly_local *l, const struct tly_gpus_piece *p);
/* Begin what can be begun.  True: something was. */
bool tly_gpus_advance(struct tly_local *l);
/* Most bytes of a piece of this operation: its sum must fit into a slot. */
uint32_t tly_gpus_piece_bytes(const struct tly_local *l, const struct tly_local_op *op);
/* Bytes of each piece of a part, but for the last one: owners have equal shares of it. */
uint32_t tly_gpus_share_bytes(const struct tly_local *l, const struct tly_local_op *op, uint64_t part);
/* The round ends on this rank.  When this returns, its pieces move nothing any more, but that inputs may be read for as long as
 * their streams have work from before.  A GPU that hangs is lost, and the job fails. */
void tly_gpus_forget(const struct tly_local *l, const struct tly_local_round *r);

/* --- the end; from any thread -------------------------------------------------------------------------------- */

/* Begin nothing more.  When this returns, this rank's GPU writes to no tensor, or it hangs and is lost.  It may read inputs for as
 * long as their streams have work from before. */
void tly_gpus_stop(struct tly_local *l);
/* Wait until the other ranks have the results of this rank's pieces, then give everything back.  Memory that another rank may still
 * use stays with the process, and all of it if this rank's GPU hangs or reads an input for long. */
void tly_gpus_close(struct tly_local *l);

#endif
