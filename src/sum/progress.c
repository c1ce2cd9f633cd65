/* progress.c - from the pushes of all ranks to the result.
 *
 * A round begins its result once all contributors have come, with data, a request or zeros (SLOT_JOINED).  It goes as far
 * as all inputs have come, in steps of at least a fragment, so that results flow while inputs still arrive.  A step is made
 * in the loop, or by the crew in pieces; while the crew has pieces of a round nobody else touches its data.  What a step
 * does is its rule's business (ops/rule.h): here are the conditions, the memory and the order.
 *
 * A step leads to answers (answers.c); the last one ends the round's need for its inputs. */
#include "base/list.h"
#include "ops/rule.h"
#include "sum/crew.h"
#include "sum/internal.h"
#include "sum/kept.h"
#include "sum/members.h"
#include "sum/round.h"
#include "sum/session.h"
#include "sum/slot.h"
#include "trace/trace.h"

enum {
    WORTH_A_THREAD = 512 << 10, /* bytes of input; less is summed sooner than handed over */
    LEAST_PIECE = 64 << 10,     /* bytes of output */
};

/* --- the result ---------------------------------------------------------------------------------- */

/* Bytes of the result that can be made of what is there. */
static uint32_t progress_reach(const struct tly_round *r)
{
    uint32_t least = r->head.length;
    bool all = r->rule->givers == TLY_ALL_GIVE;
    for (uint32_t i = 0; i < r->who->count; i++) {
        uint32_t rank = r->who->rank[i];
        if (r->slots[rank].filled < least && (all || tly_rule_gives(r->rule, &r->head, rank)))
            least = r->slots[rank].filled;
    }
    if (!r->rule->streams)
        return least == r->head.length ? r->length : 0;
    return least == r->length ? least : least - least % TLY_ALIGN;
}

/* The result takes the memory of one of the inputs, or has its own.  Its own is at most what inputs on loan have spared, so
 * the limit does not hold for it.  What one rank gives is its input, or is not there yet. */
static bool progress_place_result(struct tly_job *job, struct tly_round *r)
{
    if (r->result || r->length == 0)
        return true;
    r->result = r->rule->place ? r->rule->place(r) : NULL;
    r->result_room = r->result ? r->head.length : r->length;
    if (!r->result && r->rule->behind) { /* a copy, for which no rank has given memory */
        r->result = tly_memory_take(job, r, r->length);
        job->copies_wait |= !r->result;
    } else if (!r->result && r->rule->givers != TLY_ROOT_GIVES)
        r->result = tly_memory_take_always(job, r->length);
    return r->result != NULL;
}

static void progress_finish(struct tly_job *job, struct tly_round *r)
{
    tly_store_complete(job, r);
    tly_memory_release_inputs(job, r);
    for (uint32_t i = 0; i < r->who->count; i++)
        tly_window_owe(job, r, r->who->rank[i]);
    tly_round_stamp(job, r, TLY_AT_SUMMED, TLY_NO_PEER);
    job->facts.bytes_summed += r->length;
    job->facts.parts_summed++;
    if (r->rule->keep)
        r->rule->keep(job, r);
}

void tly_progress_reached(struct tly_job *job, struct tly_round *r, uint32_t to)
{
    r->summed = to;
    bool whole = to == r->length;
    if (whole)
        progress_finish(job, r);
    tly_answers_queue(job, r);
    if (whole && job->dropped_slots)
        tly_memory_ask_again(job);
}

/* Its rule may have the round wait for an offer, or for ranks that are behind; such rounds are counted. */
static bool progress_must_wait(struct tly_job *job, struct tly_round *r)
{
    bool waits = r->rule->may_start && !r->rule->may_start(job, r);
    for (uint32_t i = 0; r->rule->behind && i < job->ranks && !waits; i++)
        waits = r->rule->behind(job, r, i) > 0;
    job->waiting += (uint32_t)waits - r->waits;
    r->waits = waits;
    return waits;
}

/* --- the crew ------------------------------------------------------------------------------------ */

static void progress_forget_withdrawn(struct tly_job *job, struct tly_round *r)
{
    r->references++;
    for (uint32_t i = 0; i < job->ranks; i++)
        if (r->slots[i].withdrawn)
            tly_round_withdraw(job, r, i);
    tly_store_unref(job, r);
}

/* In a thread of the crew.  The last one gives loans back at once: the loop may wait for that (tly_loan_move). */
static void progress_sum_piece(struct tly_crew_task *t)
{
    struct tly_sum_piece *p = tly_list_entry(t, struct tly_sum_piece, task);
    struct tly_round *r = p->round;
    r->rule->advance(p->job, r, p->from, p->to);
    if (atomic_fetch_sub_explicit(&r->unread, 1, memory_order_acq_rel) == 1)
        tly_memory_drop_loans(p->job, r);
}

static void progress_piece_done(struct tly_crew_task *t)
{
    struct tly_sum_piece *p = tly_list_entry(t, struct tly_sum_piece, task);
    struct tly_round *r = p->round;
    if (--r->pieces_left == 0) {
        if (r->refused) { /* a rank disagrees or has taken its push back */
            tly_memory_break_loans(p->job, r);
            progress_forget_withdrawn(p->job, r);
            return;
        }
        tly_progress_reached(p->job, r, r->summing_to);
        tly_memory_break_loans(p->job, r);
        tly_progress(p->job, r);
    }
}

/* Give [summed, to) to the crew.  False: there is none, or it is not worth it. */
static bool progress_hand_to_crew(struct tly_job *job, struct tly_round *r, uint32_t to)
{
    uint32_t length = to - r->summed, count = (uint32_t)job->house->crew.threads;
    if (!count || !r->rule->divides || (uint64_t)length * r->who->count < WORTH_A_THREAD)
        return false;
    if (count > length / LEAST_PIECE)
        count = length / LEAST_PIECE;
    if (count > PIECES)
        count = PIECES;
    if (count < 1)
        count = 1;
    uint32_t share = (length / count + TLY_ALIGN - 1) / TLY_ALIGN * TLY_ALIGN, from = r->summed;
    r->summing_to = to;
    r->pieces_left = (length + share - 1) / share;
    atomic_store_explicit(&r->unread, r->pieces_left, memory_order_relaxed);
    for (uint32_t i = 0; from < to; i++, from += share) {
        struct tly_sum_piece *p = &r->piece[i];
        *p = (struct tly_sum_piece){.task = {.work = progress_sum_piece, .done = progress_piece_done},
                                    .job = job,
                                    .round = r,
                                    .from = from,
                                    .to = to - from < share ? to : from + share};
        tly_list_init(&p->task.node);
        tly_crew_post(&job->house->crew, &p->task);
    }
    return true;
}

/* --- steps --------------------------------------------------------------------------------------- */

void tly_progress(struct tly_job *job, struct tly_round *r)
{
    if (r->complete || r->pieces_left || r->refused || !tly_round_all_arrived(r) || r->said != r->resolved ||
        r->summed < r->base)
        return;
    uint32_t to = progress_reach(r);
    bool whole = to == r->length && tly_round_is_whole(r);
    if (whole)
        tly_round_stamp(job, r, TLY_AT_GATHERED, TLY_NO_PEER);
    /* Less than a fragment is not worth a frame.  A restored round may be ahead of its inputs.  The last step waits for requests, too:
     * tell() comes before it. */
    if (!whole && (to <= r->summed || to - r->summed < job->fragment_bytes || to == r->length))
        return;
    if (whole && r->rule->tell && !r->had)
        r->rule->tell(job, r);
    if (r->complete || progress_must_wait(job, r))
        return;
    if (!progress_place_result(job, r)) {
        job->redo_waits = true;
        return;
    }
    if (r->summed == 0)
        r->order = job->next_order++;
    if (to > r->summed && r->rule->advance) {
        if ((r->rule->borrows && !tly_memory_hold_loans(job, r)) || progress_hand_to_crew(job, r, to))
            return;
        r->rule->advance(job, r, r->summed, to);
        if (r->rule->borrows)
            tly_memory_drop_loans(job, r);
    }
    tly_progress_reached(job, r, to);
}

/* A waiting round may go on, or its rule finds that it never will.  One that was dropped is asked for once it does not wait. */
static void progress_look_again(struct tly_job *job, struct tly_round *r)
{
    if (r->waits && (!progress_must_wait(job, r) || tly_round_is_whole(r)))
        tly_progress(job, r);
}

void tly_progress_kept(struct tly_job *job, const struct tly_kept *s)
{
    for (uint32_t i = 0; i < job->ranks; i++)
        if (s->rank[i].open)
            progress_look_again(job, s->rank[i].open);
    if (job->dropped_slots)
        tly_memory_ask_again(job);
}

/* The round has moved its rank's clock at a part of a shared tensor, and others' answers may wait for that. */
static void progress_clock_moved(struct tly_job *job, const struct tly_round *r)
{
    const struct tly_kept *s = tly_kept_find(job, &r->head);
    if (s && s->staleness)
        tly_progress_kept(job, s);
}

void tly_progress_landed(struct tly_session *p, struct tly_round *r, const struct tly_frame *f,
                         uint32_t bytes)
{
    struct tly_slot *slot = &r->slots[p->rank];
    if (slot->state != SLOT_COMING || (bytes && !slot->loan && !slot->data))
        return;
    slot->filled += bytes;
    bool whole = false;
    if (slot->filled == f->length || (f->flags & TLY_REQUEST)) {
        tly_slot_change(p->job, r, p->rank, SLOT_WHOLE);
        tly_round_stamp(p->job, r, TLY_AT_ARRIVED, p->rank);
        whole = true;
    }
    tly_progress(p->job, r);
    if (whole && r->rule->behind)
        progress_clock_moved(p->job, r);
}

void tly_progress_waiting(struct tly_job *job)
{
    for (struct tly_list *n = job->incomplete.next, *next; n != &job->incomplete && job->waiting; n = next) {
        struct tly_round *r = tly_list_entry(n, struct tly_round, node);
        next = n->next;
        progress_look_again(job, r);
    }
    if (job->dropped_slots)
        tly_memory_ask_again(job);
}

/* By age, until memory is short again. */
void tly_progress_copies(struct tly_job *job)
{
    if (!job->copies_wait)
        return;
    job->copies_wait = false;
    for (struct tly_list *n = job->incomplete.next, *next; n != &job->incomplete && !job->copies_wait;
         n = next) {
        struct tly_round *r = tly_list_entry(n, struct tly_round, node);
        next = n->next;
        if (r->kept)
            tly_progress(job, r);
    }
}

void tly_progress_all(struct tly_job *job)
{
    for (struct tly_list *n = job->incomplete.next, *next; n != &job->incomplete; n = next) {
        next = n->next;
        tly_progress(job, tly_list_entry(n, struct tly_round, node));
    }
}
