/* gpu_way.c - the way of reductions of which some rank's tensor is on a GPU that sums in a group (gpus.h).
 *
 * Rank 0 lists the operations in the order in which it begins them, in a team part by part.  When a part's result has landed, its
 * carrier tells rank 0 (`landing`), which lists the part once more, for the way back.  Each rank posts the pieces of the list's
 * entries.  An entry says all that a rank must know of it, so a rank on which the operation has ended posts pieces that move nothing.
 *
 * `got` of a round counts the bytes of the result that are in this rank's tensor.
 *
 * All under the engine's lock. */
#include <errno.h>

#include "local/gpus.h"
#include "local/way.h"
#include "local/window.h"
#include "local/work.h"
#include "reduce/reduce.h"

static bool gpu_way_suits(const struct tly_local *l, const struct tly_local_round *r, bool all)
{
    bool gpu = l->gpus && r->posts[l->me].gpu;
    for (uint32_t i = 0; i < r->group->size && all && l->gpus && !gpu; i++)
        gpu = tly_local_post(r, i)->call && tly_local_post(r, i)->gpu;
    return gpu;
}

static bool gpu_way_prepare(struct tly_local *l, struct tly_local_round *r)
{
    if (!tly_work_take_entry(l, &r->posts[l->me]))
        return false;
    if (r->op->parts) {
        r->op->sums = r->op->gpu->host;
        tly_team_describe(r->op, tly_work_entry(l, r, l->me));
    }
    return true;
}

/* A rank whose tensor is on the host has prepared another way. */
static enum tly_local_begun gpu_way_begin(struct tly_local *l, struct tly_local_round *r)
{
    struct tly_post *own = &r->posts[l->me];
    if (r->op->parts && !tly_team_is_cut_alike(l, r))
        return TLY_BEGUN_NEVER;
    if (!own->gen && !tly_work_take_entry(l, own)) {
        l->calls->broken(l->user, ENOMEM, "too many operations are in flight");
        return TLY_BEGUN_NEVER;
    }
    if (r->slots)
        tly_window_let_go(l, r, r->op);
    r->slots = r->staged = r->summed = 0;
    r->work = tly_work_entry(l, r, l->me);
    r->gen = own->gen;
    return TLY_BEGUN;
}

static bool gpu_way_is_finished(const struct tly_local_round *r)
{
    return atomic_load_explicit(&r->got, memory_order_acquire) == r->moved;
}

/* --- the list ------------------------------------------------------------------------------------------------- */

static uint32_t gpu_way_entries(const struct tly_local_round *r)
{
    return r->op->parts ? r->op->parts : 1;
}

/* The first round, in the order of rank 0's posts, of which not all is in the list.  `summed` counts what is. */
static struct tly_local_round *gpu_way_unlisted(const struct tly_local *l)
{
    struct tly_local_round *first = NULL;
    for (struct tly_list *n = l->ready.next; n != &l->ready; n = n->next) {
        struct tly_local_round *r = tly_list_entry(n, struct tly_local_round, node);
        if (r->way == &tly_way_gpu && r->summed < gpu_way_entries(r) && (!first || r->order < first->order))
            first = r;
    }
    return first;
}

/* False: the list is full. */
static bool gpu_way_append(struct tly_local *l, const struct tly_gpus_entry *e)
{
    struct tly_gpus_control *own = &l->own->gpus;
    uint64_t listed = atomic_load_explicit(&own->listed, memory_order_relaxed);
    for (uint32_t i = 0; i < l->count; i++)
        if (listed - atomic_load_explicit(&l->at[i].control->gpus.taken, memory_order_acquire) ==
            TLY_GPUS_LISTED)
            return false;
    own->list[listed % TLY_GPUS_LISTED] = *e;
    atomic_store_explicit(&own->listed, listed + 1, memory_order_release);
    tly_local_tell(l);
    return true;
}

/* Rank 0: list what is to go out next. */
static bool gpu_way_list(struct tly_local *l)
{
    struct tly_local_round *r = gpu_way_unlisted(l);
    if (!r)
        return false;
    struct tly_gpus_entry e = {.round = r->id,
                               .bytes = r->op->bytes,
                               .chunk = tly_gpus_piece_bytes(l, r->op),
                               .carrier = TLY_GPUS_OWNER,
                               .steps = TLY_ORDER_ALL};
    if (r->op->parts) {
        const struct tly_local_part *part = &r->op->cut[r->summed];
        e.at = part->place;
        e.bytes = part->length;
        e.chunk = tly_gpus_share_bytes(l, r->op, part->length);
        e.carrier = part->carrier;
        e.steps = TLY_ORDER_OUTWARD;
    }
    bool listed = gpu_way_append(l, &e);
    r->summed += listed;
    return listed;
}

/* Rank 0: list parts whose results have landed. */
static bool gpu_way_hear(struct tly_local *l)
{
    bool any = false;
    for (uint32_t i = 0; i < l->count; i++) {
        struct tly_gpus_control *other = &l->at[i].control->gpus;
        _Atomic uint64_t *heard = &l->own->gpus.heard[i];
        uint64_t n = atomic_load_explicit(heard, memory_order_relaxed);
        for (; atomic_load_explicit(&other->landed, memory_order_acquire) > n; any = true) {
            if (!gpu_way_append(l, &other->landing[n % TLY_GPUS_LISTED]))
                return any;
            atomic_store_explicit(heard, ++n, memory_order_release);
            tly_local_tell_one(l, i);
        }
    }
    return any;
}

/* Tell rank 0 of results that have landed here. */
static bool gpu_way_report(struct tly_local *l, struct tly_local_round *r)
{
    struct tly_gpus_control *own = &l->own->gpus;
    bool any = false;
    while (r->op->parts && !tly_list_empty(&r->op->landed)) {
        uint64_t n = atomic_load_explicit(&own->landed, memory_order_relaxed);
        if (n - atomic_load_explicit(&l->at[0].control->gpus.heard[l->me], memory_order_acquire) ==
            TLY_GPUS_LISTED)
            break;
        const struct tly_local_piece *piece =
            tly_list_entry(tly_list_take(&r->op->landed), struct tly_local_piece, node);
        own->landing[n % TLY_GPUS_LISTED] = (struct tly_gpus_entry){
            .round = r->id,
            .at = piece->place,
            .bytes = piece->length,
            .chunk = tly_gpus_share_bytes(l, r->op, piece->length),
            .carrier = (uint8_t)l->me,
            .steps = TLY_ORDER_INWARD};
        atomic_store_explicit(&own->landed, n + 1, memory_order_release);
        any = true;
    }
    if (any)
        tly_local_tell_one(l, 0);
    return any;
}

/* --- pieces --------------------------------------------------------------------------------------------------- */

/* The next entry whose pieces this rank can post.  *round is NULL if its operation has ended here.  NULL: none is listed, or it has
 * not begun here. */
static const struct tly_gpus_entry *gpu_way_next(const struct tly_local *l, uint64_t taken,
                                                 struct tly_local_round **round)
{
    const struct tly_gpus_control *first = &l->at[0].control->gpus;
    if (atomic_load_explicit(&first->listed, memory_order_acquire) == taken)
        return NULL;
    const struct tly_gpus_entry *e = &first->list[taken % TLY_GPUS_LISTED];
    struct tly_local_round *r = tly_map_get(&l->rounds, e->round);
    *round = r && !r->over ? r : NULL;
    if (*round && !(r->op && r->way == &tly_way_gpu && r->work))
        return NULL;
    return e;
}

static bool gpu_way_is_sound(const struct tly_gpus_entry *e, const struct tly_local_round *r, uint32_t ranks)
{
    return e->chunk - 1 < TLY_GPUS_SLOT && (e->carrier < ranks || e->carrier == TLY_GPUS_OWNER) &&
           (!r || (e->at <= r->op->bytes && e->bytes <= r->op->bytes - e->at));
}

static bool gpu_way_post(struct tly_local *l)
{
    struct tly_gpus_control *own = &l->own->gpus;
    const struct tly_gpus_entry *e;
    struct tly_local_round *r;
    bool any = false;
    for (uint64_t taken = own->taken; (e = gpu_way_next(l, taken, &r)) != NULL;) {
        if (!gpu_way_is_sound(e, r, l->count)) {
            l->calls->broken(l->user, EPROTO, "the list of the machine's operations on GPUs is malformed");
            return false;
        }
        const uint64_t at = (uint64_t)own->posted * e->chunk, left = e->bytes - at;
        const struct tly_gpus_piece p = {.round = r,
                                         .at = e->at + at,
                                         .bytes = left < e->chunk ? (uint32_t)left : e->chunk,
                                         .number = own->posted,
                                         .carrier = e->carrier,
                                         .steps = e->steps};
        if (!tly_gpus_post(l, &p))
            return any;
        any = true;
        own->posted++;
        if (left <= e->chunk) {
            own->posted = 0;
            atomic_store_explicit(&own->taken, ++taken, memory_order_release);
        }
    }
    return any;
}

static bool gpu_way_step(struct tly_local *l, struct tly_local_round *r, const struct tly_turn *turn)
{
    bool any = gpu_way_report(l, r);
    if (l->me == 0) {
        any |= gpu_way_hear(l);
        any |= gpu_way_list(l);
    }
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
    if (r->work)
        tly_gpus_forget(l, r);
    return true;
}

static void gpu_way_finish(const struct tly_local *l, const struct tly_local_round *r)
{
    tly_gpus_forget(l, r);
}

const struct tly_way tly_way_gpu = {
    .name = "gpu",
    .suits = gpu_way_suits,
    .prepare = gpu_way_prepare,
    .begin = gpu_way_begin,
    .step = gpu_way_step,
    .can_step = gpu_way_can_step,
    .is_finished = gpu_way_is_finished,
    .finish = gpu_way_finish,
    .give_up = gpu_way_give_up};
