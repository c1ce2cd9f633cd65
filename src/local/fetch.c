/* fetch.c - the way of what is not reduced and does not fit into posts: each rank takes from the others what the operation's
 * table says (src/ops/local.h).
 *
 * Each rank's data are cut into blocks, which go round the places: block b is number b / ranks of the place b % ranks.  A rank
 * takes them in this order, each from where it lies: in a post, in the pool, or in the window of a rank whose memory is private
 * (window.h).  A group's ranks have no windows, so private memory is read by process_vm_readv.
 *
 * A rank is done with the blocks that it has taken, or that hold nothing for it.  Until all ranks are done with all, memory is
 * lent.
 *
 * All under the engine's lock. */
#include <errno.h>
#include <string.h>

#include "local/way.h"
#include "local/window.h"
#include "local/work.h"
#include "ops/local.h"

enum {
    BLOCK = 64 << 10,  /* through windows */
    PIECE = 1 << 20,   /* else: a caller that has waited long enough goes between two */
    EARLY = 256 << 10, /* so long ones are put in before the others have come */
};

struct fetch_block {
    uint32_t place;        /* of the rank that gives it */
    uint32_t number;       /* of that rank's blocks */
    uint64_t from, length; /* in its data, in bytes */
};

static bool fetch_suits(const struct tly_local *l, const struct tly_local_round *r, bool all)
{
    return !r->op->call->reduces;
}

/* Does the rank's data go through a window? */
static bool fetch_is_windowed(const struct tly_local_round *r, uint32_t place)
{
    const struct tly_post *p = tly_local_post(r, place);
    return p->bytes && !(p->flags & (TLY_POST_EAGER | TLY_POST_POOL_IN)) && !r->grouped;
}

static uint32_t fetch_blocks_of(const struct tly_local_round *r, uint32_t place)
{
    return (uint32_t)((tly_local_post(r, place)->bytes + r->chunk_bytes - 1) / r->chunk_bytes);
}

static struct fetch_block fetch_block(const struct tly_local_round *r, uint32_t block)
{
    struct fetch_block b = {.place = block % r->group->size, .number = block / r->group->size};
    uint64_t given = tly_local_post(r, b.place)->bytes;
    b.from = (uint64_t)b.number * r->chunk_bytes;
    b.from = b.from < given ? b.from : given;
    b.length = given - b.from < r->chunk_bytes ? given - b.from : r->chunk_bytes;
    return b;
}

/* --- this rank's window --------------------------------------------------------------------------- */

/* How many of this rank's blocks another one is done with. */
static uint32_t fetch_own_done_by(const struct tly_local *l, const struct tly_local_round *r, uint32_t rank)
{
    uint32_t done = tly_window_done_by(l, r, rank), size = r->group->size;
    return done / size + (done % size > r->group->me);
}

static bool fetch_can_put_in(const struct tly_local *l, const struct tly_local_round *r, bool first)
{
    if (!fetch_is_windowed(r, r->group->me) || r->staged == fetch_blocks_of(r, r->group->me) ||
        !tly_window_can_open(l, r, first))
        return false;
    for (uint32_t i = 0; i < r->group->size && r->staged >= r->slots; i++)
        if (i != r->group->me && fetch_own_done_by(l, r, r->group->rank[i]) <= r->staged - r->slots)
            return false;
    return true;
}

static bool fetch_put_in(struct tly_local *l, struct tly_local_round *r, bool first)
{
    if (!fetch_can_put_in(l, r, first) || !tly_window_open(l, r))
        return false;
    uint32_t number = r->staged++;
    struct fetch_block b = fetch_block(r, number * r->group->size + r->group->me);
    tly_window_put(l, tly_window_slot(r, number), (const uint8_t *)r->op->input + b.from, b.length);
    tly_window_say_staged(l, r);
    return true;
}

/* --- what this rank takes ------------------------------------------------------------------------- */

static bool fetch_can_take(const struct tly_local *l, const struct tly_local_round *r)
{
    if (r->copied == r->chunks)
        return false;
    struct fetch_block b = fetch_block(r, r->copied);
    return b.place == r->group->me || !fetch_is_windowed(r, b.place) ||
           tly_window_staged_by(l, r, r->group->rank[b.place]) > b.number;
}

/* Copy a range of another rank's data, which lies in this block. */
static bool fetch_copy(struct tly_local *l, const struct tly_local_round *r, const struct fetch_block *b,
                       uint64_t from, void *to, uint64_t bytes)
{
    uint32_t rank = r->group->rank[b->place];
    const struct tly_post *p = &r->posts[rank];
    const uint8_t *at = r->op->input;
    if (b->place != r->group->me && fetch_is_windowed(r, b->place)) {
        at = tly_window_seen(l, r, rank, b->number, b->length);
        if (!at)
            return false;
        memcpy(to, at + (from - b->from), bytes);
        return true;
    }
    if (rank != l->me)
        at = p->flags & TLY_POST_EAGER ? r->data + (size_t)rank * r->room
                                       : tly_work_seen(l, rank, p->input, p->flags & TLY_POST_POOL_IN);
    if (!at)
        return tly_work_read(l, rank, p->input + from, to, bytes);
    if (to != at + from)
        memcpy(to, at + from, bytes);
    return true;
}

/* What this rank takes of a block. */
static bool fetch_take_from(struct tly_local *l, const struct tly_local_round *r, const struct fetch_block *b)
{
    uint64_t given[TLY_LOCAL_RANKS];
    struct tly_local_take takes[TLY_LOCAL_RANKS];
    for (uint32_t i = 0; i < r->group->size; i++)
        given[i] = tly_local_post(r, i)->bytes;
    tly_work_takes(l, r->op, given, takes);
    const struct tly_local_take *take = &takes[b->place];
    uint64_t from = take->from > b->from ? take->from : b->from, end = take->from + take->bytes;
    end = end < b->from + b->length ? end : b->from + b->length;
    return end <= from ||
           fetch_copy(l, r, b, from, (uint8_t *)r->op->output + take->to + (from - take->from), end - from);
}

/* This rank is done with all blocks before this one, and with the empty ones behind them. */
static void fetch_pass(struct tly_local *l, struct tly_local_round *r, uint32_t block)
{
    while (block < r->chunks && !fetch_block(r, block).length)
        block++;
    r->copied = block;
    tly_window_say_done(l, r, r->copied);
    if (r->copied == r->chunks)
        tly_local_tell_group(l, r->group);
}

static bool fetch_take(struct tly_local *l, struct tly_local_round *r)
{
    if (!fetch_can_take(l, r))
        return false;
    struct fetch_block b = fetch_block(r, r->copied);
    uint32_t rank = r->group->rank[b.place];
    if (!fetch_take_from(l, r, &b) || tly_work_is_given_up(l, r->group) || tly_work_is_marked(l, r, rank))
        return false;
    fetch_pass(l, r, r->copied + 1);
    if (rank != l->me && fetch_is_windowed(r, b.place))
        tly_local_tell_one(l, rank); /* a slot may be free */
    return true;
}

/* --- the round ------------------------------------------------------------------------------------ */

static void fetch_cut(struct tly_local_round *r, bool windowed)
{
    r->chunk_bytes = windowed ? BLOCK : PIECE;
    r->slots = windowed ? TLY_WINDOW / BLOCK : 0;
}

static bool fetch_prepare(struct tly_local *l, struct tly_local_round *r)
{
    struct tly_post *own = &r->posts[l->me];
    if (r->grouped && !(own->flags & TLY_POST_EAGER) && !tly_work_lend(l, r->op, own, false)) {
        tly_work_say_full(l, TLY_DIVERTED);
        return false;
    }
    if (!tly_work_take_entry(l, own))
        return false;
    if (!fetch_is_windowed(r, r->group->me))
        return true;
    fetch_cut(r, true);
    while (own->bytes <= EARLY && fetch_put_in(l, r, false))
        ;
    return true;
}

/* Have memory for pieces of the lengths that are posted.  False: there is none. */
static bool fetch_take_room(struct tly_local *l, struct tly_local_round *r)
{
    int64_t dims[TLY_LOCAL_RANKS];
    uint64_t bytes[TLY_LOCAL_RANKS];
    r->moved = 0;
    for (uint32_t i = 0; i < r->group->size; i++) {
        dims[i] = tly_local_post(r, i)->first_dim;
        bytes[i] = tly_local_post(r, i)->bytes;
        r->moved += bytes[i];
    }
    r->op->output = l->calls->gather(l->user, r->op, dims, bytes);
    return r->op->output != NULL;
}

static enum tly_local_begun fetch_begin(struct tly_local *l, struct tly_local_round *r)
{
    uint32_t most = 0;
    bool windowed = false;
    for (uint32_t i = 0; i < r->group->size; i++)
        windowed |= fetch_is_windowed(r, i);
    fetch_cut(r, windowed);
    for (uint32_t i = 0; i < r->group->size; i++)
        most = fetch_blocks_of(r, i) > most ? fetch_blocks_of(r, i) : most;
    if ((uint64_t)most * r->group->size > UINT32_MAX / 2) {
        l->calls->broken(l->user, EOVERFLOW, "what the ranks of a machine gather or broadcast is too large");
        return TLY_BEGUN_NEVER;
    }
    r->chunks = most * r->group->size;
    r->work = tly_work_entry(l, r, l->me);
    r->gen = r->posts[l->me].gen;
    if (r->op->call->gathered && !fetch_take_room(l, r)) {
        l->calls->broken(l->user, ENOMEM, "no memory for an allgather's result");
        return TLY_BEGUN_NEVER;
    }
    if (r->slots)
        tly_window_begin(l, r);
    fetch_pass(l, r, 0);
    return TLY_BEGUN;
}

/* Are all ranks done with all blocks? */
static bool fetch_is_over(const struct tly_local *l, const struct tly_local_round *r)
{
    bool over = r->copied == r->chunks;
    for (uint32_t i = 0; i < r->group->size && over; i++)
        over = tly_window_done_by(l, r, r->group->rank[i]) >= r->chunks;
    return over;
}

static bool fetch_can_step(const struct tly_local *l, const struct tly_local_round *r,
                           const struct tly_turn *turn)
{
    return !(r->slots && tly_window_is_passed_over(l, r, turn)) &&
           (fetch_can_put_in(l, r, turn->windowed == 0) || fetch_can_take(l, r) || fetch_is_over(l, r));
}

static bool fetch_step(struct tly_local *l, struct tly_local_round *r, const struct tly_turn *turn)
{
    if (r->slots && tly_window_is_passed_over(l, r, turn))
        return false;
    if (fetch_put_in(l, r, turn->windowed == 0)) {
        tly_local_tell(l);
        return true;
    }
    if (fetch_take(l, r))
        return true;
    r->counted = fetch_is_over(l, r);
    return r->counted;
}

static bool fetch_is_finished(const struct tly_local_round *r)
{
    return r->counted;
}

/* At any time: the others only read, and see that what they have read counts for nothing. */
static bool fetch_give_up(struct tly_local *l, const struct tly_local_round *r)
{
    if (r->posts[l->me].gen)
        tly_work_mark(l, r);
    return true;
}

static void fetch_let_go(struct tly_local *l, struct tly_local_round *r, struct tly_local_op *op)
{
    if (r->slots) {
        tly_window_let_go(l, r, op);
    } else if (op->borrowed) {
        tly_pool_free(op->borrowed);
        op->borrowed = NULL;
    }
}

const struct tly_way tly_way_fetch = {
    .name = "fetch",
    .suits = fetch_suits,
    .prepare = fetch_prepare,
    .begin = fetch_begin,
    .step = fetch_step,
    .can_step = fetch_can_step,
    .is_finished = fetch_is_finished,
    .needs_none = fetch_is_over,
    .give_up = fetch_give_up,
    .let_go = fetch_let_go};
