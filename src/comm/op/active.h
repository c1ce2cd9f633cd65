/* active.h - the operations in the loop's hands (op.c).
 *
 * Owner: the loop, but for what has ended, which is the engine's too. */
#ifndef TLY_COMM_ACTIVE_H
#define TLY_COMM_ACTIVE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/list.h"
#include "base/map.h"

struct tly_active {
    struct tly_map by_key;  /* key -> struct tally_op; without error marks */
    struct tly_list by_age; /* all; op.h has a way through them */
    int64_t stood_by;       /* awake clock: when this rank last did; no operation has waited for longer */
    _Atomic uint64_t ended_ops, ended_bytes; /* ever; no order with anything else */
};

static inline void tly_active_init(struct tly_active *a)
{
    tly_list_init(&a->by_age);
}

static inline bool tly_active_is_empty(const struct tly_active *a)
{
    return tly_list_empty(&a->by_age);
}

static inline bool tly_active_is_one(const struct tly_active *a)
{
    return !tly_list_empty(&a->by_age) && a->by_age.next->next == &a->by_age;
}

/* An operation of so many bytes has ended.  From any thread. */
static inline void tly_active_ended(struct tly_active *a, uint64_t bytes)
{
    atomic_fetch_add_explicit(&a->ended_ops, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&a->ended_bytes, bytes, memory_order_relaxed);
}

/* Add what has ended. */
static inline void tly_active_count(const struct tly_active *a, uint64_t *ops, uint64_t *bytes)
{
    *ops += atomic_load_explicit(&a->ended_ops, memory_order_relaxed);
    *bytes += atomic_load_explicit(&a->ended_bytes, memory_order_relaxed);
}

#endif
