/* team.c - the way of a team: what the ranks of one machine do for an operation of several machines.
 *
 * Each part has a carrier on this machine.  This file sums and copies between the machine's ranks; the carrier's user sends and
 * receives (comm/path/team.c).
 *
 * All-reduce.  The carrier sums all inputs into its own output, pushes the sum from there, and has the result land there.  Then it
 * copies the result to the other ranks.  Nothing is staged, and one part moves in shared memory while others are on the network.
 *
 * Reduce, reduce-scatter.  Most carriers get no result, so they have no output to sum into.  Their user says where a part's sum
 * is to lie (`place`).  Nothing is copied to other ranks.
 *
 * All-gather, broadcast.  The rank that gives a part copies it to the machine's other ranks and pushes it.  A carrier copies what
 * lands from another machine to the machine's other ranks.
 *
 * An operation may end badly on one rank before the others hear of it.  So a rank that is about to touch another rank's buffers
 * sets `working`, then looks whether all buffers are still lent (team_enter).  A rank whose operation ends takes its buffers back,
 * then waits until no other rank works on this round (tly_work_give_up). */
#include <errno.h>
#include <string.h>

#include "local/way.h"
#include "local/work.h"
#include "reduce/reduce.h"
#include "tally/tally.h"

enum { BLOCK = 64 << 10 }; /* bytes summed at once: the inputs stay in the second cache */

static bool team_suits(const struct tly_local *l, const struct tly_local_round *r, bool all)
{
    return r->op->parts != 0;
}

void tly_team_describe(const struct tly_local_op *op, struct tly_work *w)
{
    w->what.prescale = op->prescale;
    w->what.postscale = op->postscale;
    w->what.count = op->count;
    w->what.priority = op->priority;
    w->what.dtype = op->dtype;
    w->what.reduction = op->reduction;
}

/* Does each rank get the whole result? */
static bool team_is_for_all(const struct tly_local_op *op)
{
    return !op->call->gets;
}

static bool team_prepare(struct tly_local *l, struct tly_local_round *r)
{
    struct tly_local_op *op = r->op;
    struct tly_post *own = &r->posts[l->me];
    if (!tly_work_lend(l, op, own, true))
        tly_work_say_full(l, "such tensors are copied block by block, which is slower");
    if (!tly_work_take_entry(l, own))
        return false;
    op->sums = tly_work_seen(l, l->me, own->output, own->flags & TLY_POST_POOL_OUT);
    tly_team_describe(op, tly_work_entry(l, r, l->me));
    return true;
}

bool tly_team_is_cut_alike(struct tly_local *l, const struct tly_local_round *r)
{
    for (uint32_t i = 0; i < r->group->size; i++) {
        const struct tly_post *p = tly_local_post(r, i);
        if (p->first_dim == r->op->parts && p->work < TLY_WORKS)
            continue;
        l->calls->broken(l->user, EPROTO, "the ranks of a machine have cut a tensor differently");
        return false;
    }
    return true;
}

static enum tly_local_begun team_begin(struct tly_local *l, struct tly_local_round *r)
{
    r->work = tly_work_entry(l, r, l->me);
    r->gen = r->posts[l->me].gen;
    r->chunks = r->op->parts;
    return tly_team_is_cut_alike(l, r) ? TLY_BEGUN : TLY_BEGUN_NEVER;
}

static void team_leave(struct tly_local *l)
{
    atomic_store_explicit(&l->own->working, 0, memory_order_release);
}

/* Are all ranks' buffers lent?  If so they stay lent until team_leave(). */
static bool team_enter(struct tly_local *l, const struct tly_local_round *r)
{
    atomic_store(&l->own->working, tly_work_name(r)); /* pairs with tly_work_give_up() */
    for (uint32_t i = 0; i < r->group->size; i++)
        if (atomic_load(&tly_work_entry(l, r, r->group->rank[i])->next) !=
            (uint64_t)tly_local_post(r, i)->gen << 32) {
            team_leave(l);
            return false;
        }
    if (tly_work_is_given_up(l, r->group)) { /* pairs with local_stop_writers() */
        team_leave(l);
        return false;
    }
    return true;
}

/* Where this process sees `place` of a rank's output.  NULL: in private memory, which only the kernel can write. */
static uint8_t *team_output_of(const struct tly_local *l, const struct tly_local_round *r, uint32_t rank,
                               uint64_t place)
{
    const struct tly_post *p = &r->posts[rank];
    return tly_work_seen(l, rank, p->output + place, p->flags & TLY_POST_POOL_OUT);
}

/* May another piece be summed?  A sum made long before it is sent leaves the caches, and takes cores from more urgent sums. */
static bool team_may_sum(struct tly_local *l, const struct tly_local_op *op, uint64_t before)
{
    if (!op->ahead || before < op->ahead || atomic_load(&l->blocked))
        return true;
    int64_t half = (int64_t)(op->ahead / 2 + 1), awaited = atomic_load(&l->to_wake);
    if (!awaited || half < awaited)
        atomic_store(&l->to_wake, half);
    /* Pairs with tly_local_sent(): it wakes this thread, or this load sees what it has subtracted. */
    return (int64_t)atomic_load(&l->ahead) < half || atomic_load(&l->blocked);
}

/* May another piece be asked for?  If a rank asks for more than its card takes, services send at different speeds, and the slowest
 * delays the end.  Each operation has its own bound, since ranks may begin several in different orders. */
static bool team_may_ask(const struct tly_local_op *op)
{
    return !op->ahead ||
           atomic_load(&op->waiting) < op->ahead; /* tly_local_sent() wakes this thread at half of it */
}

/* Has the piece's sum a place?  Asked last, so that no piece has one that must wait for something else. */
static bool team_has_place(struct tly_local *l, const struct tly_local_op *op, struct tly_local_piece *piece)
{
    if (team_is_for_all(op))
        return true;
    if (!piece->sum)
        piece->sum = l->calls->place(l->user, piece);
    return piece->sum;
}

/* Where this process reads the input of the rank with this place from byte `at` on.  `from`: where its block lies, or NULL if it
 * has not been asked for one.  NULL: its memory cannot be reached any more. */
static const uint8_t *team_input_of(struct tly_local *l, const struct tly_local_round *r, uint32_t place,
                                    const uint8_t *from, uint64_t at, size_t len)
{
    const struct tly_post *p = tly_local_post(r, place);
    uint32_t rank = r->group->rank[place];
    from = from ? from : tly_work_seen(l, rank, p->input + at, p->flags & TLY_POST_POOL_IN);
    if (from)
        return from;
    uint8_t *copy = l->scratch + (size_t)place * TLY_BLOCK;
    return tly_work_read(l, rank, p->input + at, copy, len) ? copy : NULL;
}

struct tly_reduction tly_team_how(const struct tly_local_op *op)
{
    return (struct tly_reduction){.dtype = op->dtype,
                                  .op = op->reduction == TALLY_AVERAGE ? TALLY_SUM : op->reduction,
                                  .divisor = 1,
                                  .prescale = op->prescale,
                                  .postscale = 1};
}

static bool team_sum_block(struct tly_local *l, const struct tly_local_round *r, uint64_t begin,
                           uint32_t length, uint8_t *sum)
{
    const struct tly_local_op *op = r->op;
    const struct tly_reduction how = tly_team_how(op);
    const uint8_t *slot[TLY_LOCAL_RANKS];
    for (uint32_t i = 0; i < r->group->size; i++)
        slot[i] = tly_ferry_slot(l, r, r->group->rank[i], false);
    for (uint32_t at = 0; at < length; at += BLOCK) {
        size_t len = length - at < BLOCK ? length - at : BLOCK;
        const void *in[TLY_LOCAL_RANKS];
        for (uint32_t i = 0; i < r->group->size; i++) {
            in[i] = team_input_of(l, r, i, slot[i] ? slot[i] + at : NULL, begin + at, len);
            if (!in[i])
                return false;
        }
        tly_reduce(&how, (int)r->group->size, in, sum + at, len / tly_reduce_element_size(op->dtype));
    }
    return true;
}

/* The piece's next block, at most as long as the piece's rest. */
static struct tly_ferry_block team_left_of(const struct tly_local_piece *piece, const uint8_t *from)
{
    return (struct tly_ferry_block){.at = piece->place + piece->done,
                                    .length = piece->length - piece->done,
                                    .from = from ? from + piece->done : NULL};
}

/* False: not yet, or never.  A part of it may be done. */
static bool team_sum_piece(struct tly_local *l, const struct tly_local_round *r,
                           struct tly_local_piece *piece)
{
    uint8_t *sum = team_is_for_all(r->op) ? r->op->sums + piece->place : piece->sum;
    while (piece->done < piece->length) {
        struct tly_ferry_block b = team_left_of(piece, NULL);
        if (!tly_ferry_move(l, r, &b) || !team_sum_block(l, r, b.at, b.length, sum + piece->done))
            return false;
        piece->done += b.length;
    }
    piece->done = 0; /* for its result */
    return !tly_work_is_given_up(l, r->group);
}

/* The part is done on this machine.  The rank that counts the last part wakes the others. */
static void team_count_part(struct tly_local *l, const struct tly_local_round *r)
{
    bool last = false;
    for (uint32_t i = 0; i < r->group->size; i++) {
        struct tly_work *w = tly_work_entry(l, r, r->group->rank[i]);
        /* acq_rel: a rank that sees the last count sees all results. */
        uint64_t v = atomic_fetch_add_explicit(&w->done, 1, memory_order_acq_rel) + 1;
        last |= (uint32_t)v == r->chunks;
    }
    if (last)
        tly_local_tell_group(l, r->group);
}

/* Copy to the outputs that this rank reaches by itself. */
static bool team_copy_to_reached(struct tly_local *l, const struct tly_local_round *r,
                                 const struct tly_local_piece *piece, const uint8_t *from)
{
    for (uint32_t i = 0; i < r->group->size; i++) {
        uint32_t rank = r->group->rank[i];
        uint8_t *to = team_output_of(l, r, rank, piece->place);
        if (rank == l->me || (!to && !l->direct))
            continue;
        if (tly_work_is_given_up(l, r->group))
            return false;
        if (to)
            memcpy(to, from, piece->length);
        else if (!tly_work_write(l, rank, r->posts[rank].output + piece->place, from, piece->length))
            return false;
    }
    return true;
}

/* False: not yet, or never.  A part of it may be done. */
static bool team_copy_to_others(struct tly_local *l, const struct tly_local_round *r,
                                struct tly_local_piece *piece, const uint8_t *from)
{
    while (piece->done < piece->length) {
        struct tly_ferry_block b = team_left_of(piece, from);
        if (!tly_ferry_move(l, r, &b))
            return false;
        piece->done += b.length;
    }
    if (!team_copy_to_reached(l, r, piece, from) || tly_work_is_given_up(l, r->group))
        return false;
    team_count_part(l, r);
    return true;
}

bool tly_team_spread(struct tly_local *l, struct tly_local_round *r, struct tly_local_piece *piece)
{
    if (!team_enter(l, r))
        return false; /* this rank will get the verdict, too */
    /* false: another file notices the rank that failed */
    bool ok = team_copy_to_others(l, r, piece, r->op->sums + piece->place);
    team_leave(l);
    return ok;
}

/* Copy this rank's own data to the others.  A staged result is copied back as a whole, so it needs them, too. */
static bool team_give_piece(struct tly_local *l, const struct tly_local_round *r,
                            struct tly_local_piece *piece)
{
    if (r->op->borrowed)
        memcpy(r->op->sums + piece->place, piece->from, piece->length);
    return team_copy_to_others(l, r, piece, piece->from);
}

/* Do what must precede the push of the piece, or the request for it. */
static bool team_prepare_piece(struct tly_local *l, const struct tly_local_round *r,
                               struct tly_local_piece *piece)
{
    if (r->op->call->reduces)
        return team_sum_piece(l, r, piece);
    return !piece->from || team_give_piece(l, r, piece);
}

static bool team_step(struct tly_local *l, struct tly_local_round *r, const struct tly_turn *turn)
{
    struct tly_local_op *op = r->op;
    struct tly_list *landed = op->landed.next, *next = op->pieces.next;
    if (landed != &op->landed &&
        tly_team_spread(l, r, tly_list_entry(landed, struct tly_local_piece, node))) {
        tly_list_remove(landed);
        return true;
    }
    struct tly_local_piece *piece = tly_list_entry(next, struct tly_local_piece, node);
    bool sums = op->call->reduces;
    if (next == &op->pieces || !(sums ? team_may_sum(l, op, turn->before) : team_may_ask(op)) ||
        !team_has_place(l, op, piece) || !team_enter(l, r))
        return false;
    bool ok = team_prepare_piece(l, r, piece);
    if (ok && !team_is_for_all(op))
        team_count_part(l, r);
    team_leave(l);
    if (ok) {
        tly_list_remove(next);
        piece->ahead = true;
        atomic_fetch_add(&op->waiting, piece->length);
        if (sums)
            atomic_fetch_add(&l->ahead, piece->length);
        l->calls->summed(l->user, piece);
    }
    return ok;
}

/* The bounds change at any time, so the thread that asks must try a step. */
static bool team_can_step(const struct tly_local *l, const struct tly_local_round *r,
                          const struct tly_turn *turn)
{
    return true;
}

/* Copy a staged result to the output, without what lies between the ranges. */
static void team_take_results(const struct tly_local_op *op)
{
    size_t element = tly_reduce_element_size(op->dtype);
    if (!op->ranges)
        memcpy(op->output, op->borrowed, op->bytes);
    for (size_t i = 0; op->ranges && i < op->ranges->count; i++) {
        const struct tally_range *r = &op->ranges->list[i];
        memcpy((uint8_t *)op->output + r->begin * element, (uint8_t *)op->borrowed + r->begin * element,
               r->count * element);
    }
}

static void team_finish(const struct tly_local *l, const struct tly_local_round *r)
{
    const struct tly_post *own = &r->posts[l->me];
    const struct tly_local_op *op = r->op;
    if (op->borrowed && (own->flags & TLY_POST_POOL_OUT) && l->own &&
        l->at[l->me].base + own->output == (uint8_t *)op->borrowed)
        team_take_results(op);
}

const struct tly_way tly_way_team = {
    .name = "team",
    .suits = team_suits,
    .prepare = team_prepare,
    .begin = team_begin,
    .step = team_step,
    .can_step = team_can_step,
    .is_finished = tly_work_is_finished,
    .finish = team_finish,
    .give_up = tly_work_give_up};
