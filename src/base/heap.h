/* heap.h - binary heap of pointers with an order (priority, sequence) kept beside each. */
#ifndef TLY_HEAP_H
#define TLY_HEAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Higher priority first; among equals, lower sequence first. */
struct tly_rank_order {
    int32_t priority;
    uint64_t sequence;
};

static inline bool tly_before(struct tly_rank_order a, struct tly_rank_order b)
{
    return a.priority != b.priority ? a.priority > b.priority : a.sequence < b.sequence;
}

struct tly_heap_item {
    struct tly_rank_order order;
    void *value;
};

struct tly_heap {
    struct tly_heap_item *items; /* owned */
    size_t count, room;
};

void tly_heap_finish(struct tly_heap *h);
/* Make room for `more` further items, so that as many pushes cannot fail.  -ENOMEM. */
int tly_heap_reserve(struct tly_heap *h, size_t more);
/* 0 or -ENOMEM (never after a reserve). */
int tly_heap_push(struct tly_heap *h, struct tly_rank_order order, void *value);
/* The first, or NULL. */
static inline struct tly_heap_item *tly_heap_top(struct tly_heap *h)
{
    return h->count ? &h->items[0] : NULL;
}
void *tly_heap_pop(struct tly_heap *h);
/* Take out every item for which `drop` is true.  O(count). */
void tly_heap_filter(struct tly_heap *h, bool (*drop)(void *value, void *user), void *user);

#endif
