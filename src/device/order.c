/* order.c - order.h.
 *
 * Piece n has slot n modulo TLY_ORDER_SLOTS on every GPU.  The slot is free again once nobody reads it: the owner has added it,
 * and if it is the owner's, all GPUs have the result.  The host may keep it longer. */
#include "device/order.h"

static uint64_t order_slot(uint64_t piece)
{
    return piece % TLY_ORDER_SLOTS;
}

static int order_owner(const struct tly_order *o, uint64_t piece)
{
    return o->slot[order_slot(piece)].owner;
}

static bool order_has(const struct tly_order *o, enum tly_order_step step, uint64_t piece)
{
    return o->slot[order_slot(piece)].steps >> step & 1;
}

static bool order_ended(const struct tly_order *o, int member, enum tly_order_step step, uint64_t piece)
{
    return atomic_load_explicit(&o->board[member]->ended[step][order_slot(piece)], memory_order_acquire) >
           piece;
}

static bool order_all_ended(const struct tly_order *o, enum tly_order_step step, uint64_t piece)
{
    bool all = true;
    for (int i = 0; i < o->members && all; i++)
        all = order_ended(o, i, step, piece);
    return all;
}

/* Has the piece ended here, and is its slot free? */
static bool order_has_left(const struct tly_order *o, uint64_t piece)
{
    int owner = order_owner(o, piece);
    if (o->slot[order_slot(piece)].kept && !o->slot[order_slot(piece)].result)
        return false;
    if (!order_has(o, TLY_STEP_OUT, piece))
        return order_ended(o, owner, TLY_STEP_SUM, piece);
    return owner == o->me ? order_all_ended(o, TLY_STEP_OUT, piece)
                          : order_ended(o, o->me, TLY_STEP_OUT, piece);
}

bool tly_order_post(struct tly_order *o, int owner, unsigned steps, bool kept)
{
    while (o->oldest < o->posted && order_has_left(o, o->oldest))
        o->oldest++;
    if (o->posted - o->oldest == TLY_ORDER_SLOTS)
        return false;
    uint64_t slot = order_slot(o->posted++);
    o->slot[slot].owner = (uint8_t)owner;
    o->slot[slot].steps = (uint8_t)steps;
    o->slot[slot].begun = 0;
    o->slot[slot].kept = kept;
    o->slot[slot].result = false;
    atomic_store_explicit(&o->board[o->me]->posted, o->posted, memory_order_release);
    return true;
}

void tly_order_result(struct tly_order *o, uint64_t piece)
{
    o->slot[order_slot(piece)].result = true;
}

static bool order_is_ready(const struct tly_order *o, enum tly_order_step step, uint64_t piece)
{
    int owner = order_owner(o, piece);
    switch (step) {
    case TLY_STEP_IN:
        return true;
    case TLY_STEP_SUM:
        return owner == o->me && order_all_ended(o, TLY_STEP_IN, piece);
    case TLY_STEP_BACK:
        return owner == o->me && o->slot[order_slot(piece)].result;
    default:
        return order_ended(o, owner, TLY_STEP_BACK, piece);
    }
}

bool tly_order_begin(struct tly_order *o, enum tly_order_step step, uint64_t *piece)
{
    for (uint64_t n = o->oldest; n < o->posted && o->under_way[step] < o->most; n++) {
        uint8_t *begun = &o->slot[order_slot(n)].begun;
        if (!order_has(o, step, n) || (*begun >> step & 1) || !order_is_ready(o, step, n))
            continue;
        *begun |= (uint8_t)(1u << step);
        o->under_way[step]++;
        *piece = n;
        return true;
    }
    return false;
}

void tly_order_end(struct tly_order *o, enum tly_order_step step, uint64_t piece)
{
    o->under_way[step]--;
    atomic_store_explicit(&o->board[o->me]->ended[step][order_slot(piece)], piece + 1, memory_order_release);
}
