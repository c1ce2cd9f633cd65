/* gpu_way.c - the way of reductions whose tensors are on GPUs that sum in groups (gpus.h).
 *
 * Rank 0 lists the operations in the order in which it begins them.  Each rank posts the pieces of an operation
 * that is listed and has begun there.  Its own work entry counts the pieces whose result is in its tensor.
 *
 * All under the engine's lock. */
#include "local/gpus.h"
#include "local/way.h"
#include "local/work.h"

static bool gpu_way_suits(const struct tly_local *l, const struct tly_local_round *r, bool all)
{
    return r->op->gpu != NULL;
}

static bool gpu_way_prepare(struct tly_local *l, struct tly_local_round *r)
{
    return tly_work_take_entry(l, &r->posts[l->me]);
}

static enum tly_local_begun gpu_way_begin(struct tly_local *l, struct tly_local_round *r)
{
    r->work = tly_work_entry(l, r, l->me);
    r->gen = r->posts[l->me].gen;
    r->chunk_bytes = tly_gpus_piece_bytes(l, r->op->dtype);
    r->chunks = (uint32_t)((r->op->bytes + r->chunk_bytes - 1) / r->chunk_bytes);
    return TLY_BEGUN;
}

/* The first round, in the order of rank 0's posts, that is not in the list.  `summed` says which are. */
static struct tly_local_round *gpu_way_unlisted(const struct tly_local *l)
{
    struct tly_local_round *first = NULL;
    for (struct tly_list *n = l->ready.next; n != &l->ready; n = n->next) {
        struct tly_local_round *r = tly_list_entry(n, struct tly_local_round, node);
        if (r->op->gpu && !r->summed && (!first || r->order < first->order))
            first = r;
    }
    return first;
}

/* Rank 0: put a round into the list. */
static bool gpu_way_list(struct tly_local *l)
{
    struct tly_gpus_control *own = &l->at[0].control->gpus;
    uint64_t listed = atomic_load_explicit(&own->listed, memory_order_relaxed);
    struct tly_local_round *r = l->me ? NULL : gpu_way_unlisted(l);
    if (!r)
        return false;
    for (uint32_t i = 0; i < l->count; i++)
        if (listed - atomic_load_explicit(&l->at[i].control->gpus.taken, memory_order_acquire) ==
            TLY_GPUS_LISTED)
            return false;
    own->list[listed % TLY_GPUS_LISTED] = r->id;
    atomic_store_explicit(&own->listed, listed + 1, memory_order_release);
    r->summed = 1;
    tly_local_tell(l);
    return true;
}

/* The round whose pieces are posted next.  NULL: none is listed, or it has not begun here. */
static struct tly_local_round *gpu_way_next(const struct tly_local *l, uint64_t taken)
{
    const struct tly_gpus_control *first = &l->at[0].control->gpus;
    if (atomic_load_explicit(&first->listed, memory_order_acquire) == taken)
        return NULL;
    struct tly_local_round *r = tly_map_get(&l->rounds, first->list[taken % TLY_GPUS_LISTED]);
    return r && r->op && r->op->gpu && r->work ? r : NULL;
}

static bool gpu_way_post(struct tly_local *l)
{
    struct tly_gpus_control *own = &l->own->gpus;
    struct tly_local_round *r;
    bool any = false;
    for (uint64_t taken = own->taken; (r = gpu_way_next(l, taken)) != NULL;) {
        uint64_t at = (uint64_t)r->staged * r->chunk_bytes, left = r->op->bytes - at;
        const struct tly_gpus_piece p = {.op = r->op,
                                         .work = r->work,
                                         .at = at,
                                         .bytes = left < r->chunk_bytes ? (uint32_t)left : r->chunk_bytes};
        if (!tly_gpus_post(l, &p))
            return any;
        any = true;
        if (++r->staged == r->chunks)
            atomic_store_explicit(&own->taken, ++taken, memory_order_release);
    }
    return any;
}

static bool gpu_way_step(struct tly_local *l, struct tly_local_round *r, const struct tly_turn *turn)
{
    bool any = gpu_way_list(l);
    any |= gpu_way_post(l);
    any |= tly_gpus_advance(l);
    return any;
}

/* A step tries whatever other ranks have made possible. */
static bool gpu_way_can_step(const struct tly_local *l, const struct tly_local_round *r,
                             const struct tly_turn *turn)
{
    return true;
}

static bool gpu_way_give_up(struct tly_local *l, const struct tly_local_round *r)
{
    if (r->work) /* else it has no pieces, and others go on */
        tly_gpus_stop(l);
    return true;
}

const struct tly_way tly_way_gpu = {
    .name = "gpu",
    .suits = gpu_way_suits,
    .prepare = gpu_way_prepare,
    .begin = gpu_way_begin,
    .step = gpu_way_step,
    .can_step = gpu_way_can_step,
    .is_finished = tly_work_is_finished,
    .give_up = gpu_way_give_up};
