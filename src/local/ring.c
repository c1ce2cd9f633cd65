/* ring.c - posts as bytes in a rank's ring: is there room, put one in, copy a payload out, say how far one has read.
 *
 * Only its owner writes a ring, and all other ranks read it, each at its own pace.  `there` of the next post is cleared
 * before a post is shown, so a reader never takes old bytes for a post.  A reader says rarely how far it is.  A writer
 * that finds its ring full sets `stuck` and is woken when the others have read.
 *
 * All under the engine's lock. */
#include <string.h>

#include "local/posts.h"

enum { UNSAID = TLY_RING / 8 }; /* bytes of a ring that have been read and not said so */

void tly_posts_copy(const struct tly_control *c, uint64_t at, void *to, size_t len)
{
    size_t first = TLY_RING - (at & (TLY_RING - 1));
    first = first < len ? first : len;
    memcpy(to, c->ring + (at & (TLY_RING - 1)), first);
    memcpy((uint8_t *)to + first, c->ring, len - first);
}

void tly_posts_say_read(struct tly_local *l, uint32_t rank)
{
    uint64_t at = atomic_load_explicit(&l->at[rank].read, memory_order_relaxed);
    if (at - atomic_load_explicit(&l->own->read[rank].at, memory_order_relaxed) < UNSAID)
        return;
    atomic_store_explicit(&l->own->read[rank].at, at, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&l->at[rank].control->stuck, memory_order_relaxed))
        tly_local_ring(l, rank, TLY_WAKE_THREAD | TLY_WAKE_WAITERS);
}

/* Up to where all have read our ring. */
static uint64_t ring_read_by_all(struct tly_local *l)
{
    uint64_t least = l->tail;
    for (uint32_t i = 0; i < l->count; i++) {
        uint64_t at = i == l->me || l->left[i]
                          ? l->tail /* who has left reads no more */
                          : atomic_load_explicit(&l->at[i].control->read[l->me].at, memory_order_acquire);
        least = at < least ? at : least;
    }
    return least;
}

bool tly_posts_has_room(struct tly_local *l, uint64_t bytes)
{
    if (l->tail + bytes - l->room <= TLY_RING)
        return true;
    l->room = ring_read_by_all(l);
    if (l->tail + bytes - l->room <= TLY_RING)
        return true;
    atomic_store(&l->own->stuck, 1);
    atomic_thread_fence(memory_order_seq_cst); /* pairs with that in tly_posts_say_read() */
    l->room = ring_read_by_all(l);
    if (l->tail + bytes - l->room > TLY_RING) {
        for (uint32_t i = 0; i < l->count; i++) /* even those that wait for nothing */
            if (i != l->me)
                tly_local_ring(l, i, TLY_WAKE_THREAD | TLY_WAKE_WAITERS);
        return false;
    }
    return true;
}

static void into_ring(struct tly_local *l, uint64_t at, const void *from, size_t len)
{
    size_t first = TLY_RING - (at & (TLY_RING - 1));
    first = first < len ? first : len;
    memcpy(l->own->ring + (at & (TLY_RING - 1)), from, first);
    memcpy(l->own->ring, (const uint8_t *)from + first, len - first);
}

/* g: the operation's group, or NULL.  Inlined twice: what all ranks do takes as long as without groups. */
__attribute__((always_inline)) static inline void ring_show(
    struct tly_local *l, const struct tly_local_op *op, const struct tly_post *p,
    const struct tly_local_group *g)
{
    uint64_t payload = p->flags & TLY_POST_EAGER ? p->bytes : 0;
    uint64_t behind = tly_posts_bytes_behind(payload), next = l->tail + tly_posts_length(g, payload);
    atomic_store_explicit(&tly_post_at(l->own, next)->there, 0, memory_order_relaxed);
    struct tly_post *here = tly_post_at(l->own, l->tail);
    memcpy(here, p, offsetof(struct tly_post, there));
    if (g)
        memcpy(tly_post_at(l->own, l->tail + sizeof *p), &g->bits, sizeof g->bits);
    if (payload > TLY_TINY)
        into_ring(l, next - behind, op->input, payload);
    else if (payload)
        memcpy(here->tiny, op->input, payload);
    atomic_store_explicit(&here->there, g ? TLY_POST_GROUP : TLY_POST_ALL, memory_order_release);
    l->tail = next;
    /* Until a doubt is settled no rank begins anything. */
    if (g && !(p->flags & TLY_POST_BACK))
        tly_local_tell_group(l, g);
    else
        tly_local_tell(l);
    /* The lines that are written next are in the others' caches since the ring came round: let them come meanwhile. */
    for (uint64_t k = 0; k < behind && k < TLY_AHEAD; k += 64)
        __builtin_prefetch(tly_post_at(l->own, next + sizeof *p + k), 1);
    __builtin_prefetch(tly_post_at(l->own, next + sizeof *p + behind), 1);
}

void tly_posts_show(struct tly_local *l, const struct tly_local_op *op, const struct tly_post *p)
{
    if (op->group)
        ring_show(l, op, p, op->group);
    else
        ring_show(l, op, p, NULL);
}
