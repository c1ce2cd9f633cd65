/* staging.c - the way of large reductions whose tensors are not all in the pool.
 *
 * Each rank's tensor goes through a window (window.h): the rank puts blocks of its input in, each block's owner (blocks go
 * round the ranks) sums it and writes the sum into the windows of the ranks that get it, and each of these takes its own
 * out.  What lies in the pool is read and written where it lies.  Where each rank gets a piece of its own, it owns the blocks
 * of its piece.
 *
 * A rank is done with the blocks of its own that it has summed.  A slot of a window is free again once its rank has taken out
 * what lay there, and nobody else has to be asked. */
#include <assert.h>
#include <string.h>

#include "local/posts.h"
#include "local/way.h"
#include "local/window.h"
#include "local/work.h"
#include "ops/local.h"
#include "reduce/reduce.h"

enum {
    EARLY = 256 << 10, /* so long ones are put in before the others have come */
    SUMMED = 16 << 10, /* at once: the sum is copied to the other ranks while the first cache has it */
};

/* The first block of a rank; then every n-th.  Of small tensors it is not always the same ranks that sum. */
static uint32_t staging_first_of(const struct tly_local *l, const struct tly_local_round *r, uint32_t rank)
{
    return r->pieces ? rank : (uint32_t)((rank + (r->id >> 32)) % l->count);
}

static uint32_t staging_owner_of(const struct tly_local *l, const struct tly_local_round *r, uint32_t block)
{
    return (block % l->count + l->count - staging_first_of(l, r, 0)) % l->count;
}

/* Zeros, for a rank that has joined, are in no window. */
static bool staging_suits(const struct tly_local *l, const struct tly_local_round *r, bool all)
{
    bool pooled = tly_post_is_pooled(&r->posts[l->me]);
    if (!r->op->call->reduces || r->grouped)
        return false;
    for (uint32_t i = 0; i < l->count && all; i++) {
        if (tly_posts_lacks(l, r, i))
            return false;
        pooled &= !r->posts[i].call || tly_post_is_pooled(&r->posts[i]);
    }
    return !pooled;
}

/* Where a block lies in the tensor.  Of shorter pieces the last blocks are empty. */
static struct tly_local_range staging_block(const struct tly_local *l, const struct tly_local_round *r,
                                            uint32_t block)
{
    struct tly_local_range range[TLY_LOCAL_RANKS], whole = {.bytes = r->op->bytes};
    uint64_t from = (uint64_t)block * r->chunk_bytes;
    if (r->pieces) {
        tly_work_ranges(l, r->op, range);
        whole = range[block % l->count];
        from = (uint64_t)(block / l->count) * r->chunk_bytes;
    }
    from = from < whole.bytes ? from : whole.bytes;
    uint64_t left = whole.bytes - from;
    return (struct tly_local_range){whole.begin + from, left < r->chunk_bytes ? left : r->chunk_bytes};
}

static void staging_cut(const struct tly_local *l, struct tly_local_round *r)
{
    struct tly_local_range range[TLY_LOCAL_RANKS];
    uint64_t most_gotten = 0;
    tly_work_ranges(l, r->op, range);
    for (uint32_t i = 0; i < l->count; i++)
        most_gotten = range[i].bytes > most_gotten ? range[i].bytes : most_gotten;
    r->pieces = most_gotten < r->op->bytes;
    const uint32_t ranks = l->count ? l->count : 1; /* as the static analyser does not know */
    uint64_t block = (r->op->bytes / ranks + TLY_PAGE - 1) / TLY_PAGE * TLY_PAGE;
    uint64_t most = TLY_WINDOW / (2 * ranks) / TLY_PAGE * TLY_PAGE; /* twice round the ranks */
    block = block > most ? most : block;
    r->chunk_bytes = block < TLY_PAGE ? TLY_PAGE : (uint32_t)block;
    r->chunks = (uint32_t)((most_gotten + r->chunk_bytes - 1) / r->chunk_bytes) * (r->pieces ? l->count : 1);
    r->slots = TLY_WINDOW / r->chunk_bytes;
    r->slots = r->chunks < r->slots ? r->chunks : r->slots;
}

/* --- steps --------------------------------------------------------------------------------------- */

/* The next block that this rank sums; no less than r->chunks: there is none. */
static uint64_t staging_next_sum(const struct tly_local *l, const struct tly_local_round *r)
{
    return (uint64_t)r->summed * l->count + staging_first_of(l, r, l->me);
}

static bool staging_can_sum(const struct tly_local *l, const struct tly_local_round *r)
{
    uint64_t block = staging_next_sum(l, r);
    if (block >= r->chunks)
        return false;
    for (uint32_t i = 0; i < l->count; i++)
        if (i != l->me && tly_window_staged_by(l, r, i) <= block)
            return false;
    return true;
}

static bool staging_can_put_in(const struct tly_local *l, const struct tly_local_round *r, bool first)
{
    return r->staged < r->chunks && r->staged < r->copied + r->slots && tly_window_can_open(l, r, first);
}

static bool staging_can_take_out(const struct tly_local *l, const struct tly_local_round *r)
{
    if (r->copied == r->chunks)
        return false;
    uint32_t owner = staging_owner_of(l, r, r->copied);
    if (owner != l->me && r->copied >= r->staged) /* nobody can have summed it, whatever he says */
        return false;
    return (owner == l->me ? r->summed : tly_window_done_by(l, r, owner)) > r->copied / l->count;
}

static bool staging_can_step(const struct tly_local *l, const struct tly_local_round *r,
                             const struct tly_turn *turn)
{
    return !tly_window_is_passed_over(l, r, turn) &&
           (staging_can_sum(l, r) || staging_can_put_in(l, r, turn->windowed == 0) ||
            staging_can_take_out(l, r));
}

static bool staging_is_finished(const struct tly_local_round *r)
{
    return r->copied == r->chunks;
}

/* Is all of it summed? */
static bool staging_is_summed(const struct tly_local *l, const struct tly_local_round *r)
{
    for (uint32_t i = 0; i < l->count; i++) {
        uint32_t first = staging_first_of(l, r, i),
                 share = r->chunks > first ? (r->chunks - first - 1) / l->count + 1 : 0;
        if ((i == l->me ? r->summed : tly_window_done_by(l, r, i)) < share)
            return false;
    }
    return true;
}

static bool staging_sum_block(struct tly_local *l, const struct tly_local_round *r, uint32_t block)
{
    const struct tly_local_op *op = r->op;
    struct tly_reduction how = tly_work_how(l, op);
    struct tly_local_range range[TLY_LOCAL_RANKS], b = staging_block(l, r, block);
    const uint8_t *in[TLY_LOCAL_RANKS];
    uint8_t *out[TLY_LOCAL_RANKS] = {0}; /* of those that get it; this rank's first */
    uint32_t outs = 0;
    tly_work_ranges(l, op, range);
    for (uint32_t k = 0; k < l->count; k++) {
        uint32_t i = (l->me + k) % l->count;
        const struct tly_post *p = &r->posts[i];
        uint8_t *to;
        if (i == l->me) {
            in[i] = (const uint8_t *)op->input + b.begin;
            to = (uint8_t *)op->output + (b.begin - range[i].begin);
        } else if (tly_post_is_pooled(p)) {
            in[i] = l->at[i].base + p->input + b.begin;
            to = l->at[i].base + p->output + (b.begin - range[i].begin);
        } else if (!(in[i] = to = tly_window_seen(l, r, i, block, b.bytes))) {
            return false;
        }
        if (tly_work_is_in(&range[i], b.begin))
            out[outs++] = to;
    }
    for (uint64_t at = 0; at < b.bytes; at += SUMMED) {
        if (tly_work_is_given_up(l, r->group))
            return false;
        size_t n = b.bytes - at < SUMMED ? b.bytes - at : SUMMED;
        const void *rows[TLY_LOCAL_RANKS];
        for (uint32_t i = 0; i < l->count; i++)
            rows[i] = in[i] + at;
        tly_reduce(&how, (int)l->count, rows, out[0] + at, n / tly_reduce_element_size(op->dtype));
        for (uint32_t i = 1; i < outs; i++)
            tly_window_put(l, out[i] + at, out[0] + at, n);
    }
    return true;
}

static bool staging_sum(struct tly_local *l, struct tly_local_round *r)
{
    if (!staging_can_sum(l, r))
        return false;
    /* A rank that gives the round up takes its blocks back, or sets `failed`, then looks at `working`. */
    atomic_store(&l->own->working, tly_work_name(r));
    bool ok = !tly_work_is_given_up(l, r->group) && staging_can_sum(l, r) &&
              staging_sum_block(l, r, (uint32_t)staging_next_sum(l, r));
    atomic_store_explicit(&l->own->working, 0, memory_order_release);
    if (!ok || tly_work_is_given_up(l, r->group))
        return false;
    tly_window_say_done(l, r, ++r->summed);
    tly_local_tell(l);
    return true;
}

static bool staging_put_in(struct tly_local *l, struct tly_local_round *r, bool first)
{
    if (!staging_can_put_in(l, r, first) || !tly_window_open(l, r))
        return false;
    uint32_t block = r->staged++;
    struct tly_local_range b = staging_block(l, r, block);
    if (staging_owner_of(l, r, block) != l->me)
        tly_window_put(l, tly_window_slot(r, block), (const uint8_t *)r->op->input + b.begin, b.bytes);
    tly_window_say_staged(l, r);
    return true;
}

static bool staging_take_out(struct tly_local *l, struct tly_local_round *r)
{
    if (!staging_can_take_out(l, r))
        return false;
    uint32_t block = r->copied++;
    struct tly_local_range range[TLY_LOCAL_RANKS], b = staging_block(l, r, block);
    if (staging_owner_of(l, r, block) == l->me || tly_post_is_pooled(&r->posts[l->me]))
        return true;         /* it was summed in place */
    assert(r->op->borrowed); /* it has put that block in */
    tly_work_ranges(l, r->op, range);
    if (tly_work_is_in(&range[l->me], b.begin))
        memcpy((uint8_t *)r->op->output + (b.begin - range[l->me].begin), tly_window_slot(r, block), b.bytes);
    return true;
}

/* The beginning of this rank's tensor is there when the others come. */
static bool staging_prepare(struct tly_local *l, struct tly_local_round *r)
{
    if (!tly_work_take_entry(l, &r->posts[l->me]))
        return false;
    staging_cut(l, r);
    while (r->op->bytes <= EARLY && staging_put_in(l, r, false))
        ;
    return true;
}

static enum tly_local_begun staging_begin(struct tly_local *l, struct tly_local_round *r)
{
    staging_cut(l, r);
    r->work = tly_work_entry(l, r, l->me);
    r->gen = r->posts[l->me].gen;
    if (tly_post_is_pooled(&r->posts[l->me])) {
        r->staged = r->chunks;
        tly_window_say_staged(l, r);
        tly_local_tell(l);
    }
    tly_window_begin(l, r);
    return TLY_BEGUN;
}

static bool staging_step(struct tly_local *l, struct tly_local_round *r, const struct tly_turn *turn)
{
    if (tly_window_is_passed_over(l, r, turn))
        return false;
    if (staging_sum(l, r))
        return true;
    if (!staging_put_in(l, r, turn->windowed == 0))
        return staging_take_out(l, r);
    tly_local_tell_one(l, staging_owner_of(l, r, r->staged - 1)); /* the others look for sums */
    return true;
}

const struct tly_way tly_way_staging = {
    .name = "staging",
    .suits = staging_suits,
    .prepare = staging_prepare,
    .begin = staging_begin,
    .step = staging_step,
    .can_step = staging_can_step,
    .is_finished = staging_is_finished,
    .needs_none = staging_is_summed,
    .give_up = tly_work_give_up,
    .let_go = tly_window_let_go};
