/* staging.c - the way of large reductions whose tensors are not all in the pool.
 *
 * Other processes' private memory is reached through the kernel only, which copies at a fraction of the speed of a core
 * that copies what it has in its cache.  So each rank has a window in its segment, of a few blocks, through which its tensor
 * goes: it puts blocks of its input in, each block's owner (blocks go round the ranks) sums it and writes the sum into the
 * windows of the ranks that get it, and each of these takes its own out.  What lies in the pool is read and written where it
 * lies.  Where each rank gets a piece of its own, it owns the blocks of its piece.
 *
 * A rank's work entry says how far it is, in blocks: `next` those that can be read of its input, `done` those of its own
 * that are summed.  Only the rank itself writes them.  A slot of a window is free again once its rank has taken out what
 * lay there, and nobody else has to be asked.
 *
 * A rank has memory for some windows only, and a round with a window here may wait for a rank where it has none.  So that
 * ranks never wait for each other in a circle, the lowest one elects one round after the other, each once the one before
 * has ended there (what is then left of that elsewhere needs no other rank), and each rank keeps a window for the elected. */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "local/posts.h"
#include "local/way.h"
#include "local/work.h"
#include "ops/local.h"
#include "reduce/reduce.h"

enum {
    WINDOW = 512 << 10, /* at most: with what it comes from and goes to it stays in the second cache */
    EARLY = 256 << 10,  /* so long ones are put in before the others have come */
    SUMMED = 16 << 10,  /* at once: the sum is copied to the other ranks while the first cache has it */
    MOST_WINDOWS = 4,   /* of operations under way at once: more would push each other out of the cache */
    MOST_LOOKED_AT = 8, /* rounds at a turn; then only those with a window, and the elected */
};

static struct tly_work *staging_work_of(const struct tly_local *l, const struct tly_local_round *r,
                                        uint32_t rank)
{
    return &l->at[rank].control->work[r->posts[rank].work];
}

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

/* In blocks. */
static uint32_t staging_slots(const struct tly_local_round *r)
{
    uint32_t most = WINDOW / r->chunk_bytes;
    return r->chunks < most ? r->chunks : most;
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

/* How far a rank is; one that uses its entry for something else has ended the round, and it ended well. */
static uint32_t staging_count_in(uint64_t value, uint32_t gen)
{
    return (uint32_t)(value >> 32) != gen ? UINT32_MAX : (uint32_t)value == UINT32_MAX ? 0 : (uint32_t)value;
}

/* acquire: the blocks are there; seq_cst: pairs with staging_give_up(). */
static uint32_t staged_by(const struct tly_local *l, const struct tly_local_round *r, uint32_t rank)
{
    return staging_count_in(atomic_load(&staging_work_of(l, r, rank)->next), r->posts[rank].gen);
}

static uint32_t staging_summed_by(const struct tly_local *l, const struct tly_local_round *r, uint32_t rank)
{
    return staging_count_in(atomic_load_explicit(&staging_work_of(l, r, rank)->done, memory_order_acquire),
                            r->posts[rank].gen);
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
    uint64_t most = WINDOW / (2 * ranks) / TLY_PAGE * TLY_PAGE; /* twice round the ranks */
    block = block > most ? most : block;
    r->chunk_bytes = block < TLY_PAGE ? TLY_PAGE : (uint32_t)block;
    r->chunks = (uint32_t)((most_gotten + r->chunk_bytes - 1) / r->chunk_bytes) * (r->pieces ? l->count : 1);
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
        if (i != l->me && staged_by(l, r, i) <= block)
            return false;
    return true;
}

static uint64_t staging_name_of(const struct tly_local_round *r)
{
    return (uint64_t)r->posts[0].gen << 32 | (r->posts[0].work + 1u);
}

/* Is it the one for which each rank keeps a window? */
static bool staging_is_elected(const struct tly_local *l, const struct tly_local_round *r)
{
    return atomic_load_explicit(&l->at[0].control->elected, memory_order_relaxed) == staging_name_of(r);
}

/* May it have a window? */
static bool staging_can_open(const struct tly_local *l, const struct tly_local_round *r, bool first)
{
    return ((first || l->windows < MOST_WINDOWS) && (!l->no_more || l->window[0].is_free)) ||
           (l->window[1].is_free && staging_is_elected(l, r));
}

static bool staging_can_put_in(const struct tly_local *l, const struct tly_local_round *r, bool first)
{
    return r->staged < r->chunks && r->staged < r->copied + staging_slots(r) &&
           (r->op->borrowed || staging_can_open(l, r, first));
}

static bool staging_can_take_out(const struct tly_local *l, const struct tly_local_round *r)
{
    if (r->copied == r->chunks)
        return false;
    uint32_t owner = staging_owner_of(l, r, r->copied);
    if (owner != l->me && r->copied >= r->staged) /* nobody can have summed it, whatever he says */
        return false;
    return (owner == l->me ? r->summed : staging_summed_by(l, r, owner)) > r->copied / l->count;
}

/* Of many rounds, those far behind cannot get a window soon.  One that has a window is to give it back all the same: the
 * elected one may wait for it. */
static bool staging_is_passed_over(const struct tly_local *l, const struct tly_local_round *r,
                                   const struct tly_turn *turn)
{
    return turn->in_order >= MOST_LOOKED_AT && !r->op->borrowed && !staging_is_elected(l, r);
}

static bool staging_can_step(const struct tly_local *l, const struct tly_local_round *r,
                             const struct tly_turn *turn)
{
    return !staging_is_passed_over(l, r, turn) &&
           (staging_can_sum(l, r) || staging_can_put_in(l, r, turn->in_order == 0) ||
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
        if ((i == l->me ? r->summed : staging_summed_by(l, r, i)) < share)
            return false;
    }
    return true;
}

/* Where in this process a block of a rank's input or output can be read and written, or its sum put; NULL: it says what
 * cannot be. */
static uint8_t *staging_seen(struct tly_local *l, const struct tly_local_round *r, uint32_t rank,
                             uint32_t block)
{
    uint64_t length = staging_block(l, r, block).bytes;
    uint64_t window = atomic_load_explicit(&staging_work_of(l, r, rank)->window, memory_order_relaxed);
    uint64_t place = window + (uint64_t)(block % staging_slots(r)) * r->chunk_bytes, all = l->at[rank].bytes;
    if (window >= sizeof(struct tly_control) && window <= all && place <= all && length <= all - place)
        return l->at[rank].base + place;
    char sentence[100];
    snprintf(sentence, sizeof sentence, "rank %u has written nonsense into shared memory",
             tly_local_number(l, rank));
    l->calls->broken(l->user, EPROTO, sentence);
    return NULL;
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
        } else if (!(in[i] = to = staging_seen(l, r, i, block))) {
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
            memcpy(out[i] + at, out[0] + at, n);
    }
    return true;
}

static bool staging_sum(struct tly_local *l, struct tly_local_round *r)
{
    if (!staging_can_sum(l, r))
        return false;
    /* A rank that gives the round up takes its blocks back, or sets `failed`, then looks at `working`. */
    atomic_store(&l->own->working, r->posts[0].work + 1u);
    bool ok = !tly_work_is_given_up(l, r->group) && staging_can_sum(l, r) &&
              staging_sum_block(l, r, (uint32_t)staging_next_sum(l, r));
    atomic_store_explicit(&l->own->working, 0, memory_order_release);
    if (!ok || tly_work_is_given_up(l, r->group))
        return false;
    atomic_store_explicit(&r->work->done, (uint64_t)r->gen << 32 | ++r->summed, memory_order_release);
    tly_local_tell(l);
    return true;
}

/* One of those that are there from the start; NULL: it is taken. */
static void *staging_kept_window(struct tly_local *l, int i)
{
    if (!l->window[i].is_free)
        return NULL;
    l->window[i].is_free = false;
    return l->window[i].at;
}

static bool staging_open_window(struct tly_local *l, struct tly_local_round *r)
{
    struct tly_local_op *op = r->op;
    if (op->borrowed)
        return true;
    op->borrowed = staging_kept_window(l, 0);
    if (!op->borrowed && !l->no_more &&
        tly_pool_borrow(l->segment, (uint64_t)staging_slots(r) * r->chunk_bytes, &op->borrowed) != 0) {
        op->borrowed = NULL;
        l->no_more = true; /* until one is given back */
    }
    if (!op->borrowed && staging_is_elected(l, r))
        op->borrowed = staging_kept_window(l, 1);
    if (!op->borrowed)
        return false;
    l->windows++;
    uint64_t place = (uint64_t)((uint8_t *)op->borrowed - tly_segment_base(l->segment));
    /* `next` publishes it. */
    atomic_store_explicit(&staging_work_of(l, r, l->me)->window, place, memory_order_relaxed);
    return true;
}

/* Each rank keeps a window for this one.  NULL: for none. */
static void staging_elect(struct tly_local *l, const struct tly_local_round *r)
{
    atomic_store_explicit(&l->own->elected, r ? staging_name_of(r) : 0, memory_order_relaxed);
    if (r)
        tly_local_tell(l);
}

/* The elected round has ended here: the next one. */
static void staging_elect_next(struct tly_local *l)
{
    const struct tly_local_round *next = NULL;
    for (struct tly_list *n = l->ready.next; n != &l->ready && !next; n = n->next) {
        const struct tly_local_round *r = tly_list_entry(n, struct tly_local_round, node);
        next = r->way == &tly_way_staging ? r : NULL;
    }
    staging_elect(l, next);
}

static void staging_close_window(struct tly_local *l, struct tly_local_op *op)
{
    if (!op->borrowed)
        return;
    l->windows--;
    l->no_more = false;
    if (op->borrowed == l->window[0].at)
        l->window[0].is_free = true;
    else if (op->borrowed == l->window[1].at)
        l->window[1].is_free = true;
    else
        tly_pool_free(op->borrowed);
    op->borrowed = NULL;
}

static void staging_let_go(struct tly_local *l, struct tly_local_round *r, struct tly_local_op *op)
{
    staging_close_window(l, op);
    if (l->me == 0 && staging_is_elected(l, r))
        staging_elect_next(l);
}

int tly_staging_open(struct tly_local *l)
{
    for (int i = 0; i < 2; i++) {
        int err = tly_pool_borrow(l->segment, WINDOW, &l->window[i].at);
        if (err)
            return err;
        l->window[i].is_free = true;
    }
    return 0;
}

void tly_staging_close(struct tly_local *l)
{
    for (int i = 0; i < 2; i++)
        if (l->window[i].at)
            tly_pool_free(l->window[i].at);
}

static uint8_t *staging_slot(const struct tly_local_round *r, uint32_t block)
{
    return (uint8_t *)r->op->borrowed + (uint64_t)(block % staging_slots(r)) * r->chunk_bytes;
}

static bool staging_put_in(struct tly_local *l, struct tly_local_round *r, bool first)
{
    if (!staging_can_put_in(l, r, first) || !staging_open_window(l, r))
        return false;
    uint32_t block = r->staged++;
    struct tly_local_range b = staging_block(l, r, block);
    if (staging_owner_of(l, r, block) != l->me)
        memcpy(staging_slot(r, block), (const uint8_t *)r->op->input + b.begin, b.bytes);
    atomic_store_explicit(&staging_work_of(l, r, l->me)->next,
                          (uint64_t)r->posts[l->me].gen << 32 | r->staged, memory_order_release);
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
        memcpy((uint8_t *)r->op->output + (b.begin - range[l->me].begin), staging_slot(r, block), b.bytes);
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
    r->work = staging_work_of(l, r, l->me);
    r->gen = r->posts[l->me].gen;
    if (tly_post_is_pooled(&r->posts[l->me])) {
        r->staged = r->chunks;
        atomic_store_explicit(&r->work->next, (uint64_t)r->gen << 32 | r->staged, memory_order_release);
        tly_local_tell(l);
    }
    if (l->me == 0 && !atomic_load(&l->own->elected))
        staging_elect(l, r);
    return TLY_BEGUN;
}

static bool staging_step(struct tly_local *l, struct tly_local_round *r, const struct tly_turn *turn)
{
    if (staging_is_passed_over(l, r, turn))
        return false;
    if (staging_sum(l, r))
        return true;
    if (!staging_put_in(l, r, turn->in_order == 0))
        return staging_take_out(l, r);
    tly_local_tell_one(l, staging_owner_of(l, r, r->staged - 1)); /* the others look for sums */
    return true;
}

static bool staging_give_up(struct tly_local *l, const struct tly_local_round *r)
{
    if (!r->work)
        return true;
    atomic_store(&r->work->next, (uint64_t)r->gen << 32 | UINT32_MAX);
    return tly_work_await_others(l, r->posts[0].work + 1u);
}

const struct tly_way tly_way_staging = {
    .name = "staging",
    .in_order = true,
    .suits = staging_suits,
    .prepare = staging_prepare,
    .begin = staging_begin,
    .step = staging_step,
    .can_step = staging_can_step,
    .is_finished = staging_is_finished,
    .needs_none = staging_is_summed,
    .give_up = staging_give_up,
    .let_go = staging_let_go};
