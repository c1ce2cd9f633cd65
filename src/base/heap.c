/* heap.c - binary heap of pointers by (priority, sequence). */
#include "base/heap.h"

#include <errno.h>
#include <stdlib.h>

void tly_heap_finish(struct tly_heap *h)
{
    if (h)
        free(h->items);
}

int tly_heap_reserve(struct tly_heap *h, size_t more)
{
    size_t need = h->count + more;
    if (need <= h->room)
        return 0;
    size_t room = h->room ? h->room : 16;
    while (room < need)
        room *= 2;
    struct tly_heap_item *items = realloc(h->items, room * sizeof *items);
    if (!items)
        return -ENOMEM;
    h->items = items;
    h->room = room;
    return 0;
}

static void heap_sift_down(struct tly_heap *h, size_t i)
{
    struct tly_heap_item item = h->items[i];
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= h->count)
            break;
        if (child + 1 < h->count && tly_before(h->items[child + 1].order, h->items[child].order))
            child++;
        if (!tly_before(h->items[child].order, item.order))
            break;
        h->items[i] = h->items[child];
        i = child;
    }
    h->items[i] = item;
}

int tly_heap_push(struct tly_heap *h, struct tly_rank_order order, void *value)
{
    int err = tly_heap_reserve(h, 1);
    if (err)
        return err;
    size_t i = h->count++;
    while (i > 0 && tly_before(order, h->items[(i - 1) / 2].order)) {
        h->items[i] = h->items[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    h->items[i] = (struct tly_heap_item){order, value};
    return 0;
}

void *tly_heap_pop(struct tly_heap *h)
{
    if (h->count == 0)
        return NULL;
    void *value = h->items[0].value;
    h->items[0] = h->items[--h->count];
    if (h->count)
        heap_sift_down(h, 0);
    return value;
}

void tly_heap_filter(struct tly_heap *h, bool (*drop)(void *value, void *user), void *user)
{
    size_t kept = 0;
    for (size_t i = 0; i < h->count; i++)
        if (!drop(h->items[i].value, user))
            h->items[kept++] = h->items[i];
    h->count = kept;
    for (size_t i = kept / 2; i-- > 0;)
        heap_sift_down(h, i);
}
