/* answers.c - results on their way to the ranks, until each has confirmed them.
 *
 * A session's answers that have bytes to send wait in a heap, by priority and then in the order in which their results
 * began.  An answer that has gone out whole, or a verdict, is a delivery: the session's ring keeps these in the order in
 * which they left.  The rank's count `received` confirms a prefix of them.  It may come before the medium has completed
 * them, and counts from then on.  A round that all its ranks have confirmed is stable: it goes, and the count `stable`
 * tells each rank up to where that holds. */
#include <stdlib.h>

#include "base/clock.h"
#include "base/heap.h"
#include "ops/rule.h"
#include "sum/internal.h"
#include "sum/members.h"
#include "sum/round.h"
#include "sum/session.h"
#include "sum/slot.h"
#include "trace/trace.h"
#include "transport/outbox.h"
#include "transport/transport.h"
#include "wire/kept.h"

/* Seconds for which a verdict can be fetched again; longer than the 5 s after which a silent service counts as dead. */
enum { VERDICT_S = 8 };

uint32_t tly_answers_length(const struct tly_round *r, uint32_t rank)
{
    return r->slots[rank].quiet ? 0 : r->rule->length(&r->head, r->who, rank);
}

static bool answer_ready(const struct tly_job *job, const struct tly_round *r, uint32_t rank)
{
    uint32_t length = tly_answers_length(r, rank), summed = r->summed < length ? r->summed : length;
    const struct tly_answer *a = &r->answers[rank];
    return !a->done && !a->held && (a->sent < length ? a->sent < summed : r->complete);
}

void tly_answers_queue(struct tly_job *job, struct tly_round *r)
{
    struct tly_rank_order order = {r->head.priority, r->order};
    for (uint32_t i = 0; i < r->who->count; i++) {
        uint32_t rank = r->who->rank[i];
        struct tly_answer *a = &r->answers[rank];
        struct tly_session *p = job->by_rank[rank];
        if (!p || a->queued || !tly_slot_has_come(&r->slots[rank]) || !answer_ready(job, r, rank))
            continue;
        a->queued = tly_heap_push(&p->ready, order, a) == 0;
        if (!a->queued)
            tly_outbox_lose(&p->outbox);
    }
}

/* Before a shared tensor's values goes what their rank must know of them (wire/kept.h). */
static void answers_tell_state(const struct tly_job *job, const struct tly_round *r, struct tly_outgoing *out)
{
    out->frame.type = TLY_HAVE;
    out->frame.flags = 0;
    out->frame.offset = 0;
    out->frame.payload = tly_state_bytes(job->ranks);
    out->payload = r->state;
    out->stays = false;
}

bool tly_answers_next(struct tly_session *p, struct tly_outgoing *out)
{
    struct tly_job *job = p->job;
    struct tly_heap_item *top = tly_heap_top(&p->ready);
    if (!top)
        return false;
    struct tly_answer *a = top->value;
    struct tly_round *r = a->round;
    uint32_t length = tly_answers_length(r, p->rank), summed = r->summed < length ? r->summed : length;
    uint32_t n = summed - a->sent < TLY_MAX_FRAGMENT ? summed - a->sent : TLY_MAX_FRAGMENT;
    *out = (struct tly_outgoing){.frame = r->head, .payload = r->result + a->sent, .token = a, .stays = true};
    if (r->state && a->sent == 0 && !a->told) {
        answers_tell_state(job, r, out);
        a->told = true;
        a->on_way++;
        return true;
    }
    if (a->sent == 0)
        tly_round_stamp(job, r, TLY_AT_ANSWERING, p->rank);
    out->frame.type = TLY_RESULT;
    out->frame.length = length;
    out->frame.offset = a->sent;
    out->frame.payload = n;
    a->sent += n;
    out->frame.flags = a->sent == length ? TLY_LAST : 0;
    a->on_way++;
    if (a->sent == length) {
        a->done = true;
        a->queued = false;
        tly_heap_pop(&p->ready);
        tly_answers_delivered(p, r);
    } else if (!answer_ready(job, r, p->rank)) {
        a->queued = false;
        tly_heap_pop(&p->ready);
    }
    return true;
}

bool tly_answers_reserve(struct tly_session *p)
{
    if (p->delivered - p->stable < p->ring_room)
        return true;
    uint32_t room = p->ring_room ? p->ring_room * 2 : 64;
    struct tly_round **ring = malloc(room * sizeof *ring);
    if (!ring)
        return false;
    for (uint64_t i = p->stable; p->ring_room && i < p->delivered; i++)
        ring[i % room] = p->deliveries[i % p->ring_room];
    free(p->deliveries);
    p->deliveries = ring;
    p->ring_room = room;
    return true;
}

void tly_answers_delivered(struct tly_session *p, struct tly_round *r)
{
    p->deliveries[p->delivered++ % p->ring_room] = r;
    r->references++;
}

/* All ranks have the answer: nobody can ask for it any more. */
static void answers_become_stable(struct tly_job *job, struct tly_round *r)
{
    tly_store_remove(job, r);
    if (job->dropped_slots)
        tly_memory_ask_again(job);
}

bool tly_answers_confirmed(struct tly_job *job, struct tly_round *r, uint32_t rank)
{
    if (r->answers[rank].received)
        return false;
    r->answers[rank].received = true;
    tly_window_confirm(job, r, rank);
    if (++r->received < r->who->count)
        return false;
    answers_become_stable(job, r);
    return true;
}

void tly_answers_received(struct tly_session *p, uint64_t count)
{
    struct tly_job *job = p->job;
    bool any = false;
    if (count > p->told)
        p->told = count < p->delivered ? count : p->delivered; /* it cannot have more */
    while (p->received < p->told) {
        struct tly_round *r = p->deliveries[p->received % p->ring_room];
        if (r->answers[p->rank].on_way && tly_link_is_open(p->link))
            break; /* a medium may complete a frame after the peer has read it */
        p->received++;
        any |= tly_answers_confirmed(job, r, p->rank);
    }
    if (any)
        tly_answers_settle(job);
}

void tly_answers_asked(struct tly_session *p)
{
    if (p->stable >= p->asked)
        p->asked = p->told;
    p->asked_last = p->told;
    if (p->stable >= p->asked)
        tly_session_counts(p, UINT32_MAX);
}

void tly_answers_sent(struct tly_session *p, struct tly_answer *a)
{
    if (--a->on_way || !a->done)
        return;
    tly_round_stamp(p->job, a->round, TLY_AT_ANSWERED, p->rank);
    if (p->told > p->received)
        tly_answers_received(p, p->told);
}

/* Nobody else will ask for the round.  Ranks may never come for a verdict: later deliveries do not wait for them for
 * ever. */
static bool answers_is_settled(const struct tly_job *job, const struct tly_round *r)
{
    return r->received == r->who->count ||
           (r->verdict && job->loop->awake - r->decided > VERDICT_S * TLY_SEC);
}

/* Any rank's oldest answers may have become stable, by another's word or by age. */
void tly_answers_settle(struct tly_job *job)
{
    for (uint32_t i = 0; i < job->ranks; i++) {
        struct tly_session *q = job->by_rank[i];
        uint64_t before = q ? q->stable : 0;
        bool gave = false;
        while (q && q->stable < q->received &&
               answers_is_settled(job, q->deliveries[q->stable % q->ring_room])) {
            struct tly_round *r = q->deliveries[q->stable++ % q->ring_room];
            gave = r->slots[q->rank].quiet;
            tly_store_unref(job, r);
        }
        if (!q || !job->mortal || q->stable == before)
            continue;
        /* A rank's operation may wait for this news.  That of a rank that only gives does, with its last part. */
        bool answered = before < q->asked && q->stable >= q->asked;
        bool urgent = answered || (gave && q->stable == q->delivered);
        if (answered)
            q->asked = q->asked_last;
        tly_session_counts(q, urgent ? UINT32_MAX : (uint32_t)job->part_bytes / 4);
    }
}
