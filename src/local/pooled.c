/* pooled.c - the way of large reductions and broadcasts whose tensors all lie in the pool, and of a group's reductions, which
 * copies its tensors there.
 *
 * The tensor is cut into chunks.  Whoever is free takes the next one, reads it from all ranks (of a broadcast from the root)
 * and writes the result to all ranks that get it, so a rank that computes delays nobody: the others do its share.  The work
 * entry of the first place whose rank has posted counts the chunks that are taken, and those that are done.
 *
 * A group's long tensors are copied some chunks at a time once the round begins, so that no call takes as long as its copy.
 * Each rank copies its own, so there the others do wait for a rank that is stopped or gets no core.  `window` of a rank's own
 * work entry counts its chunks that are there.
 *
 * All under the engine's lock. */
#include <string.h>

#include "local/posts.h"
#include "local/way.h"
#include "local/work.h"
#include "ops/local.h"
#include "reduce/reduce.h"

enum {
    LEAST_CHUNK = 8 << 10,
    HANDY_CHUNK = 16 << 10, /* smaller only where ranks would be idle */
    MOST_CHUNK = 256 << 10,
    BLOCK = TLY_ZEROS, /* results are copied to the other ranks while the first cache has them */
    CHUNKS_EACH = 2,   /* for each rank, at least, of a large tensor */
    LONG = 4 << 20, /* bytes of a group's tensor that are copied at once: memcpy is faster if it is longer */
};

static bool pooled_suits(const struct tly_local *l, const struct tly_local_round *r, bool all)
{
    const struct tly_local_call *call = r->op->call;
    bool pooled = (r->grouped && call->reduces) ||
                  ((call->reduces || call->spreads) && tly_post_is_pooled(&r->posts[l->me]));
    for (uint32_t i = 0; i < r->group->size && all && pooled; i++) {
        const struct tly_post *p = tly_local_post(r, i);
        pooled = !p->call || tly_post_is_pooled(p);
    }
    return pooled;
}

void tly_pooled_cut(struct tly_local_round *r)
{
    uint64_t bytes = r->op->bytes, one = bytes / r->group->size, chunk = one / CHUNKS_EACH;
    chunk = chunk < HANDY_CHUNK ? HANDY_CHUNK : chunk > MOST_CHUNK ? MOST_CHUNK : chunk;
    chunk = one > chunk ? chunk : one < LEAST_CHUNK ? LEAST_CHUNK : one;
    chunk = (chunk + TLY_PAGE - 1) / TLY_PAGE * TLY_PAGE;
    while ((bytes + chunk - 1) / chunk > UINT32_MAX / 2)
        chunk *= 2;
    r->chunk_bytes = (uint32_t)chunk;
    r->chunks = (uint32_t)((bytes + chunk - 1) / chunk);
}

/* The range of the result that this rank gets. */
static struct tly_local_range pooled_own_range(const struct tly_local *l, const struct tly_local_round *r)
{
    struct tly_local_range range[TLY_LOCAL_RANKS];
    tly_work_ranges(l, r->op, range);
    return range[r->group->me];
}

/* Is this rank's result made in memory that was borrowed for it? */
static bool pooled_result_is_staged(const struct tly_local *l, const struct tly_local_round *r)
{
    const uint8_t *at = l->at[l->me].base + r->posts[l->me].output;
    return r->op->borrowed && at == (const uint8_t *)r->op->borrowed + pooled_own_range(l, r).begin;
}

static bool pooled_input_is_staged(const struct tly_local *l, const struct tly_local_round *r)
{
    return r->op->borrowed && l->at[l->me].base + r->posts[l->me].input == (const uint8_t *)r->op->borrowed;
}

/* So much of this rank's input is in the pool. */
static void pooled_show_staged(struct tly_local *l, const struct tly_local_round *r)
{
    atomic_store_explicit(&tly_work_entry(l, r, l->me)->window,
                          (uint64_t)r->posts[l->me].gen << 32 | r->staged, memory_order_release);
}

/* Say how much of a long tensor is to be copied later. */
static void pooled_plan_copies(struct tly_local *l, struct tly_local_round *r)
{
    bool is_long = r->op->bytes > LONG;
    tly_pooled_cut(r);
    r->staged = is_long && pooled_input_is_staged(l, r) ? 0 : r->chunks;
    if (is_long && pooled_result_is_staged(l, r))
        r->to_copy = (uint32_t)((pooled_own_range(l, r).bytes + r->chunk_bytes - 1) / r->chunk_bytes);
    pooled_show_staged(l, r);
}

static bool pooled_prepare(struct tly_local *l, struct tly_local_round *r)
{
    struct tly_post *own = &r->posts[l->me];
    if (r->grouped && !tly_work_stage(l, r->op, own, true, r->op->bytes > LONG)) {
        tly_work_say_full(l, TLY_DIVERTED);
        return false;
    }
    if (!tly_work_take_entry(l, own))
        return false;
    if (r->grouped)
        pooled_plan_copies(l, r);
    return true;
}

static enum tly_local_begun pooled_begin(struct tly_local *l, struct tly_local_round *r)
{
    tly_work_share(l, r);
    tly_pooled_cut(r);
    return TLY_BEGUN;
}

/* A block lies in a rank's range or beside it. */
static void pooled_make_block(struct tly_local *l, const struct tly_local_round *r,
                              const struct tly_local_range range[], const struct tly_reduction *h,
                              uint64_t from, size_t len)
{
    const struct tly_local_group *g = r->group;
    const void *in[TLY_LOCAL_RANKS];
    for (uint32_t i = 0; i < g->size; i++) {
        const struct tly_post *p = tly_local_post(r, i);
        in[i] = p->call ? l->at[g->rank[i]].base + p->input + from : tly_work_zeros;
    }
    const uint8_t *made = r->op->call->spreads ? in[r->op->root] : NULL;
    for (uint32_t i = 0; i < g->size; i++) {
        const struct tly_post *p = tly_local_post(r, i);
        uint8_t *out = l->at[g->rank[i]].base + p->output + (from - range[i].begin);
        if (!p->call || !tly_work_is_in(&range[i], from) || out == made)
            continue;
        if (made) {
            memcpy(out, made, len);
        } else {
            tly_reduce(h, (int)g->size, in, out, len / tly_reduce_element_size(h->dtype));
            made = out;
        }
    }
}

/* Where the block that begins here ends. */
static uint64_t pooled_end_of(const struct tly_local_round *r, const struct tly_local_range range[],
                              uint64_t from, uint64_t to)
{
    uint64_t end = to - from < BLOCK ? to : from + BLOCK;
    for (uint32_t i = 0; i < r->group->size; i++) {
        uint64_t last = range[i].begin + range[i].bytes;
        end = last > from && last < end ? last : end;
    }
    return end;
}

/* Has no rank given the round up, and are all inputs of this chunk in the pool?  A rank that uses its entry for something else
 * has ended the round. */
static bool pooled_is_open(const struct tly_local *l, const struct tly_local_round *r, uint32_t chunk)
{
    for (uint32_t i = 0; i < r->group->size; i++) {
        uint32_t rank = r->group->rank[i];
        uint64_t v = atomic_load_explicit(&tly_work_entry(l, r, rank)->window, memory_order_acquire);
        if (tly_work_is_marked(l, r, rank) ||
            (r->grouped && (uint32_t)(v >> 32) == r->posts[rank].gen && (uint32_t)v <= chunk))
            return false;
    }
    return true;
}

static bool pooled_is_left(const struct tly_local *l, const struct tly_local_round *r, uint64_t next)
{
    return (uint32_t)(next >> 32) == r->gen && (uint32_t)next < r->chunks &&
           pooled_is_open(l, r, (uint32_t)next);
}

static bool pooled_can_make(const struct tly_local *l, const struct tly_local_round *r)
{
    return pooled_is_left(l, r, atomic_load_explicit(&r->work->next, memory_order_relaxed));
}

static bool pooled_can_copy_out(const struct tly_local_round *r)
{
    return r->copied < r->to_copy && tly_work_is_finished(r);
}

static bool pooled_can_copy_in(const struct tly_local_round *r)
{
    return r->grouped && r->staged < r->chunks;
}

static bool pooled_can_step(const struct tly_local *l, const struct tly_local_round *r,
                            const struct tly_turn *turn)
{
    return pooled_can_make(l, r) || pooled_can_copy_in(r) || pooled_can_copy_out(r);
}

static bool pooled_is_finished(const struct tly_local_round *r)
{
    return r->copied == r->to_copy && tly_work_is_finished(r);
}

/* A copy of its own result is left at most. */
static bool pooled_needs_none(const struct tly_local *l, const struct tly_local_round *r)
{
    return tly_work_is_finished(r);
}

static bool pooled_take_chunk(const struct tly_local *l, const struct tly_local_round *r, uint32_t *chunk)
{
    uint64_t v = atomic_load_explicit(&r->work->next, memory_order_relaxed);
    do
        if (!pooled_is_left(l, r, v))
            return false;
    while (!atomic_compare_exchange_weak(&r->work->next, &v, v + 1));
    *chunk = (uint32_t)v;
    return true;
}

static bool pooled_make_range(struct tly_local *l, const struct tly_local_round *r, uint64_t from,
                              uint64_t to)
{
    struct tly_reduction h = tly_work_how(l, r->op);
    struct tly_local_range range[TLY_LOCAL_RANKS];
    tly_work_ranges(l, r->op, range);
    for (uint64_t end; from < to; from = end) {
        if (atomic_load_explicit(&l->failed, memory_order_relaxed) || tly_work_is_given_up(l, r->group))
            return false; /* the communicator fails: the memory is its user's again */
        end = pooled_end_of(r, range, from, to);
        pooled_make_block(l, r, range, &h, from, end - from);
    }
    return true;
}

static bool pooled_make(struct tly_local *l, struct tly_local_round *r)
{
    uint32_t chunk;
    if (!pooled_can_make(l, r))
        return false;
    /* A rank that gives the round up marks its entry, or sets `failed`, then looks at `working`. */
    atomic_store(&l->own->working, tly_work_name(r));
    bool ok = !tly_work_is_given_up(l, r->group) && pooled_take_chunk(l, r, &chunk);
    if (ok) {
        uint64_t from = (uint64_t)chunk * r->chunk_bytes, to = from + r->chunk_bytes;
        ok = pooled_make_range(l, r, from, to < r->op->bytes ? to : r->op->bytes);
    }
    atomic_store_explicit(&l->own->working, 0, memory_order_release);
    return ok && tly_work_count(l, r);
}

/* Copy what follows these chunks, as many as are copied at once.  Returns how many. */
static uint32_t pooled_copy(const struct tly_local_round *r, uint8_t *to, const uint8_t *from, uint64_t bytes,
                            uint32_t copied)
{
    uint32_t most = (LONG + r->chunk_bytes - 1) / r->chunk_bytes;
    uint64_t at = (uint64_t)copied * r->chunk_bytes, len = (uint64_t)most * r->chunk_bytes;
    len = len < bytes - at ? len : bytes - at;
    memcpy(to + at, from + at, len);
    return (uint32_t)((len + r->chunk_bytes - 1) / r->chunk_bytes);
}

static void pooled_copy_in(struct tly_local *l, struct tly_local_round *r)
{
    const struct tly_local_op *op = r->op;
    r->staged += pooled_copy(r, op->borrowed, op->input, op->bytes, r->staged);
    pooled_show_staged(l, r);
    tly_local_tell_group(l, r->group);
}

static void pooled_copy_out(const struct tly_local *l, struct tly_local_round *r)
{
    const struct tly_local_op *op = r->op;
    const struct tly_local_range own = pooled_own_range(l, r);
    r->copied += pooled_copy(r, op->output, (const uint8_t *)op->borrowed + own.begin, own.bytes, r->copied);
}

/* A rank that makes results before its own input is there keeps the others from the next chunks. */
static bool pooled_step(struct tly_local *l, struct tly_local_round *r, const struct tly_turn *turn)
{
    if (pooled_can_copy_in(r))
        pooled_copy_in(l, r);
    else if (pooled_can_copy_out(r))
        pooled_copy_out(l, r);
    else
        return pooled_make(l, r);
    return true;
}

/* Take a short result out of the pool. */
static void pooled_finish(const struct tly_local *l, const struct tly_local_round *r)
{
    if (!r->op->borrowed || r->to_copy)
        return;
    const struct tly_local_range own = pooled_own_range(l, r);
    if (own.bytes && pooled_result_is_staged(l, r))
        memcpy(r->op->output, (const uint8_t *)r->op->borrowed + own.begin, own.bytes);
}

const struct tly_way tly_way_pooled = {
    .name = "pooled",
    .suits = pooled_suits,
    .prepare = pooled_prepare,
    .begin = pooled_begin,
    .step = pooled_step,
    .can_step = pooled_can_step,
    .is_finished = pooled_is_finished,
    .needs_none = pooled_needs_none,
    .finish = pooled_finish,
    .give_up = tly_work_give_up};
