/* alone.c - a small operation that is the only one under way: whoever submits it waits for it in a moment, and does it then
 * and there in the rings, without a round.  So a call is little more than the way of a cache line to another core and
 * back. */
#include "base/clock.h"
#include "local/posts.h"
#include "local/way.h"
#include "local/work.h"
#include "ops/local.h"

static bool alone_suits(struct tly_local *l, const struct tly_local_op *op)
{
    return op->bytes <= TLY_EAGER && !op->mark && (op->call->givers == TLY_ALL_GIVE || !op->bytes) &&
           !op->call->gathered && !op->parts && !op->group && !op->gpu && l->rounds.count == 0 &&
           l->idle_count > 0 && tly_list_empty(&l->ops) && tly_list_empty(&l->backlog) && !l->lost &&
           !l->uneven && !atomic_load_explicit(&l->pending, memory_order_relaxed) &&
           !atomic_load_explicit(&l->failed, memory_order_relaxed) &&
           !atomic_load_explicit(&l->own->left, memory_order_relaxed);
}

/* The next post of a rank, which is there: the payload, if it is the same as ours and does not go round the ring's end. */
static const void *alone_payload(const struct tly_neighbour *n, uint64_t at, const struct tly_post *own)
{
    const struct tly_post *p = tly_post_at(n->control, at);
    if (atomic_load_explicit(&p->there, memory_order_relaxed) != TLY_POST_ALL || p->key != own->key ||
        p->spec != own->spec || p->round != own->round || p->bytes != own->bytes || p->call != own->call ||
        (p->flags ^ own->flags) & ~TLY_POST_PATIENT)
        return NULL;
    if (own->bytes <= TLY_TINY)
        return p->tiny;
    at = (at + sizeof *p) & (TLY_RING - 1);
    return at + own->bytes <= TLY_RING ? n->control->ring + at : NULL;
}

/* Wait for the others' posts; false: not all have come, or one is of something else. */
static bool alone_meet(struct tly_local *l, const struct tly_post *own, const void *in[])
{
    int64_t until = 0;
    int spins = 0;
    for (uint32_t i = 0; i < l->count; i++) {
        struct tly_neighbour *n = &l->at[i];
        uint64_t at = atomic_load_explicit(&n->read, memory_order_relaxed);
        if (i == l->me)
            continue;
        while (!tly_post_is_there(n, at)) {
            tly_local_rest(l, 0);
            /* Else a payload would cross only once the post is seen: its lines come together with that. */
            for (uint64_t k = 0; own->bytes > TLY_TINY && k < own->bytes && k < TLY_AHEAD; k += 64)
                __builtin_prefetch(tly_post_at(n->control, at + sizeof *own + k));
            if (atomic_load(&l->claims))
                return false;
            if (++spins % TLY_LOOKS)
                continue;
            int64_t now = tly_now();
            until = until ? until : now + l->linger_ns;
            if (now >= until)
                return false;
        }
        in[i] = alone_payload(n, at, own);
        if (!in[i])
            return false;
    }
    return true;
}

static enum tly_at_once alone_do(struct tly_local *l, const struct tly_local_op *op, struct tly_post *p)
{
    uint64_t length = tly_posts_length(false, op->bytes);
    const void *in[TLY_LOCAL_RANKS];
    if (!alone_suits(l, op) || !tly_posts_has_room(l, length + sizeof(struct tly_post)))
        return TLY_AT_ONCE_NOT;
    *p = (struct tly_post){.key = op->key,
                           .spec = op->spec,
                           .bytes = op->bytes,
                           .first_dim = op->priority,
                           .round = op->round,
                           .call = op->number,
                           .flags = TLY_POST_EAGER | (op->patient ? TLY_POST_PATIENT : 0)};
    tly_posts_show(l, op, p);
    if (!alone_meet(l, p, in) || !tly_posts_no_doubts(l))
        return TLY_AT_ONCE_POSTED;
    in[l->me] = op->input;
    tly_work_make(l, op, in);
    l->own_posts++;
    for (uint32_t i = 0; i < l->count; i++)
        if (i != l->me) {
            atomic_store_explicit(&l->at[i].read, l->at[i].read + length, memory_order_relaxed);
            tly_posts_say_read(l, i);
        }
    atomic_store_explicit(&l->ended_ops, l->ended_ops + 1, memory_order_relaxed);
    atomic_store_explicit(&l->ended_bytes, l->ended_bytes + op->bytes, memory_order_relaxed);
    return TLY_AT_ONCE_ENDED;
}

const struct tly_way tly_way_alone = {.name = "alone", .at_once = alone_do};
