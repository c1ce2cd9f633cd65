/* order.h - the order of copies and kernels in a group of GPUs, as one GPU of it sees them (order.c).
 *
 * Gradients go in pieces.  Every GPU of a group posts the same pieces in the same order.  A piece has one owner in the group, and
 * takes four steps:
 *
 *   IN    each GPU copies its gradients to its slot, a place in a buffer that the others may read
 *   SUM   the owner adds the slots of all GPUs, and writes the sum to the host
 *   BACK  once the result is on the host (tly_order_result), the owner copies it to its slot
 *   OUT   each GPU copies the result from the owner's slot to where it belongs
 *
 * With several machines a piece is posted twice.  IN and SUM take it out.  Once its result is here, BACK and OUT bring it in.  So no
 * slot is taken while other machines are waited for.
 *
 * So a GPU writes its own memory alone.  GPUs tell each other of steps that have ended by boards, in memory that all of them see.
 * No step waits for another once it has begun.  No piece waits for one that was posted later, so nothing can deadlock.
 *
 * Pure: what a step does is the caller's business.  One thread uses a struct tly_order; boards are read by all. */
#ifndef TLY_DEVICE_ORDER_H
#define TLY_DEVICE_ORDER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum tly_order_step { TLY_STEP_IN, TLY_STEP_SUM, TLY_STEP_BACK, TLY_STEP_OUT, TLY_STEPS };
/* The steps of a post: a bit for each. */
enum {
    TLY_ORDER_OUTWARD = 1 << TLY_STEP_IN | 1 << TLY_STEP_SUM,
    TLY_ORDER_INWARD = 1 << TLY_STEP_BACK | 1 << TLY_STEP_OUT,
    TLY_ORDER_ALL = TLY_ORDER_OUTWARD | TLY_ORDER_INWARD,
};
enum { TLY_ORDER_SLOTS = 64, TLY_ORDER_MEMBERS = 64 };

/* Of one GPU, which writes it; all zeros at the beginning. */
struct tly_order_board {
    /* 1 + the last piece of this slot whose step has ended here; release, so that a reader sees what the step has written */
    _Atomic uint64_t ended[TLY_STEPS][TLY_ORDER_SLOTS];
    _Atomic uint64_t posted; /* pieces; release: their slots are free */
};

struct tly_order {
    int members, me;                                  /* GPUs of the group; our place among them */
    struct tly_order_board *board[TLY_ORDER_MEMBERS]; /* borrowed: of each; ours is written */
    int most; /* steps of one kind that may be under way at the same time */
    /* ------ order.c's */
    uint64_t posted, oldest; /* pieces; the first one that may have steps left here */
    int under_way[TLY_STEPS];
    struct {
        uint8_t owner, steps, begun; /* its place; bits */
        bool kept, result;
    } slot[TLY_ORDER_SLOTS];
};

/* Post the next piece, number o->posted; `owner` is a place in the group.  kept: its slot is not free before tly_order_result().
 * False: its slot is not free yet. */
bool tly_order_post(struct tly_order *o, int owner, unsigned steps, bool kept);
/* The host is done with the piece.  If this GPU owns it, the result is where BACK reads it. */
void tly_order_result(struct tly_order *o, uint64_t piece);
/* Begin a step of this kind, of the first piece that is ready for it.  False: there is none, or too many are under way. */
bool tly_order_begin(struct tly_order *o, enum tly_order_step step, uint64_t *piece);
/* It has ended. */
void tly_order_end(struct tly_order *o, enum tly_order_step step, uint64_t piece);

#endif
