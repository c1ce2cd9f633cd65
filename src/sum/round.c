/* round.c - a round's arrivals and its release.
 *
 * The first push, or the first word of a rank after a loss (redo.c), opens a round.  Each contributor's push takes the
 * rank's slot with its first fragment; every fragment is told where its payload belongs.  A push is refused if it does not
 * mean what the first one means, kept as an offer if it brings no data yet, and else lands in memory of the pool or stays
 * on loan.  Ranks may take their pushes back until the sum has all of them; the round goes with the last, or when all
 * ranks have confirmed the answer (answers.c).  What becomes of the pushes meanwhile is in progress.c. */
#include "sum/round.h"
#include "base/list.h"
#include "base/map.h"
#include "ops/rule.h"
#include "sum/internal.h"
#include "sum/members.h"
#include "sum/session.h"
#include "sum/slot.h"
#include "sum/verdict.h"
#include "trace/trace.h"
#include "transport/outbox.h"
#include "transport/transport.h"

/* --- opening ------------------------------------------------------------------------------------- */

void tly_round_awaited(struct tly_job *job, struct tly_round *r, const struct tly_frame *f)
{
    if (r->since || f->flags & TLY_PATIENT)
        return;
    r->since = job->loop->awake;
    r->warn_at = r->since + job->late_ns;
}

struct tly_round *tly_round_open(struct tly_job *job, const struct tly_frame *f,
                                 const struct tly_members *who)
{
    struct tly_round *r = tly_store_add(job, f, who);
    if (!r)
        return NULL;
    tly_round_awaited(job, r, f);
    if (job->joined_count)
        tly_joined_mark(job, r);
    tly_round_stamp(job, r, TLY_AT_OPENED, TLY_NO_PEER);
    return r;
}

/* --- arrivals ------------------------------------------------------------------------------------ */

/* All ranks that anybody names shall hear of the disagreement. */
bool tly_round_widen(struct tly_session *p, struct tly_round *r, const struct tly_members *who)
{
    struct tly_job *job = p->job;
    if (r->complete && !r->verdict)
        tly_verdict_too_late(p, r);
    const struct tly_members *all = tly_members_unite(p, r->who, who);
    if (!all) {
        tly_outbox_lose(&p->outbox);
        return false;
    }
    for (uint32_t i = 0; i < all->count; i++) {
        uint32_t rank = all->rank[i];
        const struct tly_session *q = job->by_rank[rank];
        if (tly_members_have(r->who, rank))
            continue;
        tly_slot_enter(job, r, rank);
        if (r->verdict && (q ? q->left : job->gone[rank]) &&
            !r->answers[rank].received) { /* will never ask */
            r->answers[rank].received = true;
            r->received++;
        }
    }
    r->who = all;
    return true;
}

/* The push's data, unless it was dropped and comes again, finds its place: on loan, or in the pool. */
static void round_make_room(struct tly_session *p, struct tly_round *r)
{
    struct tly_slot *slot = &r->slots[p->rank];
    if (slot->data)
        return;
    slot->loan = r->rule->borrows ? tly_link_loan(p->link) : NULL;
    if (slot->loan)
        tly_loan_keep(slot->loan);
    else
        slot->data = tly_memory_take(p->job, r, r->head.length);
    if (!slot->loan && !slot->data)
        tly_memory_drop(p->job, r, p->rank);
}

/* The push is not kept: it is an error mark, means something else than the first one, or the round has a verdict. */
static void round_refuse(struct tly_session *p, struct tly_round *r, const struct tly_frame *f)
{
    struct tly_slot *slot = &r->slots[p->rank];
    bool marked = (f->flags | r->head.flags) & TLY_MARK;
    tly_slot_change(p->job, r, p->rank, SLOT_REFUSED);
    r->refused = true;
    if (!r->verdict && !r->mismatch_at && !marked)
        tly_verdict_differs(p->job, r);
    tly_verdict_arrived(p, r);
    if (r->verdict)
        tly_window_give_back(p->job, p->rank, slot);
}

static void round_take_slot(struct tly_session *p, struct tly_round *r, const struct tly_frame *f)
{
    struct tly_slot *slot = &r->slots[p->rank];
    tly_slot_change(p->job, r, p->rank, SLOT_COMING);
    slot->spec = f->spec;
    slot->quiet = f->flags & TLY_QUIET;
    slot->session = p->id;
    slot->filled = slot->start;
    slot->charge = tly_charge(f->length);
    p->pushed += slot->charge;
    tly_round_stamp(p->job, r, TLY_AT_ARRIVING, p->rank);
}

/* The rank's first push of the round has begun to come. */
static void round_count_arrival(struct tly_session *p, struct tly_round *r)
{
    struct tly_job *job = p->job;
    tly_window_arrived(job, r);
    if (r->arrived - r->joined == 1)
        tly_window_grant_others(job, p);
}

static void round_begin_push(struct tly_session *p, struct tly_round *r, const struct tly_frame *f)
{
    struct tly_job *job = p->job;
    struct tly_slot *slot = &r->slots[p->rank];
    bool first = slot->state == SLOT_ABSENT, marked = (f->flags | r->head.flags) & TLY_MARK;
    round_take_slot(p, r, f);
    tly_round_awaited(job, r, f);
    if (first)
        round_count_arrival(p, r);
    if (r->verdict || r->mismatch_at || f->spec != r->head.spec || marked) {
        round_refuse(p, r, f);
    } else if (f->flags & TLY_OFFER) {
        tly_slot_change(job, r, p->rank, SLOT_OFFERED);
        tly_window_give_back(job, p->rank, slot);
    } else if (!(f->flags & TLY_REQUEST) && f->length > 0) {
        round_make_room(p, r);
    }
    bool last = first && tly_round_all_arrived(r);
    bool wanted = last && !r->refused && tly_memory_want_offers(job, r);
    /* Once all have come only memory may be missing, unless it was this very push that found none. */
    if (wanted || (last && job->dropped_slots && slot->state != SLOT_DROPPED))
        tly_memory_ask_again(job);
    tly_window_grant(p);
}

void tly_round_push(struct tly_session *p, struct tly_round *r, const struct tly_frame *f,
                    const struct tly_members *who, struct tly_landing *land)
{
    struct tly_slot *slot = &r->slots[p->rank];
    bool begins = f->offset == 0 || (f->flags & TLY_RESUMED);
    if (slot->state == SLOT_JOINED)
        tly_joined_comes(p, r);
    bool awaited = slot->state == SLOT_ABSENT || slot->state == SLOT_AGAIN || slot->state == SLOT_DROPPED;
    if (begins && awaited && f->offset == slot->start) {
        if (who != r->who && !tly_round_widen(p, r, who))
            return;
        round_begin_push(p, r, f);
    } else if (begins) {
        tly_window_pass(p, f->length); /* it was asked for, and is not wanted any more */
    }
    if (slot->state == SLOT_COMING && !slot->loan && slot->data) {
        land->to = slot->data + f->offset;
        land->token = slot;
    }
    land->lent = slot->state == SLOT_COMING && slot->loan;
}

/* --- release ------------------------------------------------------------------------------------- */

void tly_round_withdraw(struct tly_job *job, struct tly_round *r, uint32_t rank)
{
    struct tly_slot *slot = &r->slots[rank];
    tly_memory_empty(job, r, rank);
    tly_window_give_back(job, rank, slot);
    tly_slot_change(job, r, rank, SLOT_ABSENT);
    slot->withdrawn = false;
    tly_store_unqueue(job, r, rank);
    r->answers[rank].sent = 0;
    if (--r->arrived == r->joined)
        tly_store_remove(job, r);
}

bool tly_round_is_whole(const struct tly_round *r)
{
    bool whole = tly_round_all_arrived(r);
    for (uint32_t i = 0; i < r->who->count && whole; i++) {
        enum tly_slot_state state = r->slots[r->who->rank[i]].state;
        whole = state == SLOT_WHOLE || state == SLOT_JOINED;
    }
    return whole;
}

void tly_round_cancel(struct tly_session *p, struct tly_round *r)
{
    struct tly_job *job = p->job;
    struct tly_slot *slot = &r->slots[p->rank];
    bool begun = r->summed || r->pieces_left;
    if (!tly_slot_has_come(slot) || r->complete || (begun && !r->refused && tly_round_is_whole(r)))
        return;          /* it is summed, or about to be: its answer is on the way */
    r->refused |= begun; /* ranks have the beginning of the result, and cannot have the rest */
    slot->withdrawn = true;
    if (!r->pieces_left)
        tly_round_withdraw(job, r, p->rank);
    if (job->dropped_slots)
        tly_memory_ask_again(job);
}

void tly_round_close_all(struct tly_job *job)
{
    struct tly_round *r;
    tly_map_each(&job->store, r)
    {
        tly_memory_close(job, r);
        r->references = 1;
        tly_store_unref(job, r);
    }
    tly_map_finish(&job->store);
    job->store = (struct tly_map){0};
    tly_list_init(&job->incomplete);
}
