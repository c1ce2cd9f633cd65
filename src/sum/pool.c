/* pool.c - slot memory. */
#include "sum/pool.h"

#include <stdlib.h>
#include <string.h>

#include "base/slot.h"

_Static_assert(1 << TLY_POOL_SMALLEST == TLY_LEAST_SLOT, "the smallest class is the smallest slot");

static int pool_class_of(uint32_t bytes)
{
    int c = TLY_POOL_SMALLEST;
    while (c < TLY_POOL_SMALLEST + TLY_POOL_CLASSES - 1 && (1u << c) < bytes)
        c++;
    return c;
}

void *tly_pool_take(struct tly_pool *p, uint32_t bytes)
{
    return p->in_use + tly_slot_bytes(bytes) > p->limit ? NULL : tly_pool_take_past(p, bytes);
}

void *tly_pool_take_past(struct tly_pool *p, uint32_t bytes)
{
    int c = pool_class_of(bytes);
    uint64_t size = 1ull << c;
    void **head = &p->free[c - TLY_POOL_SMALLEST], *buffer = *head;
    if (buffer) {
        memcpy(head, buffer, sizeof *head);
        p->kept -= size;
    } else {
        if (p->in_use + p->kept + size > p->limit)
            tly_pool_trim(p);
        buffer = aligned_alloc(size < 4096 ? 64 : 4096, size);
        if (!buffer)
            return NULL;
    }
    p->taken = true;
    p->in_use += size;
    if (p->in_use > p->peak)
        p->peak = p->in_use;
    return buffer;
}

void tly_pool_give(struct tly_pool *p, void *buffer, uint32_t bytes)
{
    if (!buffer)
        return;
    int c = pool_class_of(bytes);
    void **head = &p->free[c - TLY_POOL_SMALLEST];
    memcpy(buffer, head, sizeof *head);
    *head = buffer;
    p->in_use -= 1ull << c;
    p->kept += 1ull << c;
}

void tly_pool_trim(struct tly_pool *p)
{
    for (int i = 0; i < TLY_POOL_CLASSES; i++)
        while (p->free[i]) {
            void *buffer = p->free[i];
            memcpy(&p->free[i], buffer, sizeof buffer);
            free(buffer);
        }
    p->kept = 0;
}

void tly_pool_look(struct tly_pool *p, int64_t now)
{
    if (p->taken || p->in_use)
        p->idle_since = now;
    else if (p->kept && now - p->idle_since >= TLY_POOL_REST_NS)
        tly_pool_trim(p);
    p->taken = false;
}
