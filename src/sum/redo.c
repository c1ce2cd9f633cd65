/* redo.c - what ranks say after a loss: of a service, whose rounds come here, or of their connection to this one.
 *
 * A rank says of each part that it has in doubt how much of the result has landed (HAVE), then that this was all (DONE).
 * When all ranks have pushed or said something of a round, H is the most that any of them has.  The result is summed from
 * H on, from what the ranks push from there; up to H it comes from the lowest rank that has it, if another lacks it, or if
 * the service is to keep the result.
 *
 * A rank has nothing to say of a round that it knows to be stable, or has not begun.  If another has some of the result
 * all had begun the round; so once the first has said that this was all, the round is stable. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/list.h"
#include "base/map.h"
#include "ops/rule.h"
#include "sum/internal.h"
#include "sum/members.h"
#include "sum/round.h"
#include "sum/session.h"
#include "sum/slot.h"
#include "sum/verdict.h"
#include "transport/outbox.h"

void tly_redo_detach(struct tly_session *p)
{
    struct tly_job *job = p->job;
    struct tly_round *r;
    tly_map_each(&job->store, r)
    {
        struct tly_slot *slot = &r->slots[p->rank];
        r->answers[p->rank].on_way = 0;
        r->answers[p->rank].told = false;
        if (!tly_slot_has_come(slot))
            continue;
        if (slot->state == SLOT_COMING || slot->state == SLOT_AGAIN || slot->loan)
            tly_slot_change(job, r, p->rank, SLOT_BROKEN);
        slot->charge = 0; /* counts begin at 0 again */
        r->answers[p->rank].held = true;
        r->answers[p->rank].queued = false;
        tly_memory_break_loans(job, r);
    }
}

static void redo_post(struct tly_session *p, const struct tly_round *r, int type, uint16_t flags)
{
    struct tly_frame f = r->head;
    f.type = (uint8_t)type;
    f.flags = flags;
    f.payload = 0;
    f.length = r->length;
    f.offset = r->base;
    tly_session_post(p, &f, NULL, 0, NULL);
}

static bool redo_pushes(const struct tly_round *r, uint32_t rank)
{
    bool wanted =
        r->length ? r->base < r->length : !r->had; /* of what only meets there is no result to lack */
    return r->head.length && wanted && tly_rule_gives(r->rule, &r->head, rank);
}

/* All ranks have pushed or said what they have: find out who has most, and ask for the rest. */
static void redo_resolve(struct tly_job *job, struct tly_round *r)
{
    bool lacked = false;
    r->resolved = true;
    for (uint32_t i = 0; i < job->ranks; i++) {
        const struct tly_slot *slot = &r->slots[i];
        uint32_t have = slot->state != SLOT_SAID ? 0 : slot->whole ? r->length : slot->have;
        if (have > r->base) {
            r->base = have;
            r->holder = i;
        }
    }
    for (uint32_t i = 0; i < job->ranks; i++) {
        struct tly_answer *a = &r->answers[i];
        uint32_t length = tly_answers_length(r, i);
        if (r->slots[i].state == SLOT_SAID)
            a->sent = r->slots[i].whole || r->slots[i].have > length ? length : r->slots[i].have;
        lacked |= tly_slot_has_come(&r->slots[i]) && a->sent < r->base && a->sent < length;
    }
    if (r->rule->keep) { /* ranks may have all of the result, so no push may come that asks whether it fits */
        lacked = true;
        r->rule->tell(job, r);
    }
    if (r->verdict)
        return;
    if (r->base) { /* a result of its own, and not over an input that need not be here */
        if (job->restore_waits ||
            !tly_memory_take_result(job, r)) { /* again with the next tick, the oldest first */
            job->restore_waits = true;
            r->resolved = false;
            r->base = 0;
            return;
        }
        r->order = job->next_order++;
    }
    for (uint32_t i = 0; i < job->ranks; i++) {
        struct tly_slot *slot = &r->slots[i];
        if (slot->state != SLOT_SAID)
            continue;
        slot->start = slot->filled = redo_pushes(r, i) ? r->base : r->head.length;
        tly_slot_change(job, r, i, redo_pushes(r, i) ? SLOT_BROKEN : SLOT_WHOLE);
        if (redo_pushes(r, i) && job->by_rank[i])
            tly_memory_ask(job->by_rank[i], r);
    }
    if (r->base && lacked) {
        if (job->by_rank[r->holder])
            redo_post(job->by_rank[r->holder], r, TLY_AGAIN, TLY_MARK);
    } else if (r->base) {
        tly_progress_reached(job, r, r->base);
    }
    tly_progress(job, r);
}

/* Those who have not spoken of it have nothing more to say. */
static bool redo_is_stable(const struct tly_job *job, const struct tly_round *r)
{
    for (uint32_t at = 0; at < r->who->count; at++) {
        uint32_t i = r->who->rank[at];
        const struct tly_slot *slot = &r->slots[i];
        const struct tly_session *p = job->by_rank[i];
        if (slot->state == SLOT_JOINED)
            continue; /* it has never begun it */
        if (slot->state == SLOT_ABSENT ? !job->gone[i] && (!p || p->done_epoch < r->told_in)
                                       : slot->state != SLOT_SAID || !slot->whole)
            return false;
    }
    return true;
}

static void redo_release(struct tly_job *job, struct tly_round *r)
{
    for (uint32_t at = 0; at < r->who->count; at++) {
        uint32_t i = r->who->rank[at];
        struct tly_session *p = job->by_rank[i];
        if (p && tly_slot_has_come(&r->slots[i]))
            redo_post(p, r, TLY_DONE, 0);
    }
    tly_store_remove(job, r);
}

void tly_redo_look(struct tly_job *job, struct tly_round *r)
{
    if (!r->said || r->resolved || r->refused || r->verdict || r->complete)
        return;
    if (r->had && redo_is_stable(job, r))
        redo_release(job, r);
    else if (tly_round_all_arrived(r))
        redo_resolve(job, r);
}

static void redo_look(struct tly_job *job, struct tly_round *r, void *arg)
{
    tly_redo_look(job, r);
}

void tly_redo_look_at_all(struct tly_job *job)
{
    if (tly_store_each(job, redo_look, NULL) != 0)
        job->redo_waits = true;
}

void tly_redo_left(struct tly_job *job, uint32_t rank)
{
    job->left += !job->gone[rank];
    job->gone[rank] = true;
    tly_verdict_left(job, rank);
    tly_redo_look_at_all(job);
    tly_progress_waiting(job);
}

void tly_redo_restore(struct tly_job *job)
{
    job->restore_waits = false;
    for (struct tly_list *n = job->incomplete.next, *next; n != &job->incomplete && !job->restore_waits;
         n = next) {
        next = n->next;
        tly_redo_look(job, tly_list_entry(n, struct tly_round, node));
    }
}

/* A round of which the rank has not spoken since its connection was mended: the rank has its answer, or wants it no
 * longer.  An error mark comes again as a push. */
static void redo_settle(struct tly_job *job, struct tly_round *r, void *session)
{
    struct tly_session *p = session;
    const struct tly_slot *slot = &r->slots[p->rank];
    bool mark = r->head.rank == p->rank && (r->head.flags & TLY_MARK);
    if (!tly_slot_has_come(slot) || slot->session == p->id || mark)
        return;
    if (r->complete) {
        tly_answers_confirmed(job, r, p->rank);
        return;
    }
    r->answers[p->rank].held = false; /* if it is about to be complete it is answered all the same */
    tly_round_cancel(p, r);
}

void tly_redo_done(struct tly_session *p, const struct tly_frame *f)
{
    struct tly_job *job = p->job;
    p->done_epoch = (uint32_t)f->count;
    if ((f->flags & TLY_RESUMED) && tly_store_each(job, redo_settle, p) != 0)
        tly_outbox_lose(&p->outbox); /* over another connection its rank says it again */
    tly_redo_look_at_all(job);
}

/* It had pushed or spoken before its connection was lost. */
static void redo_speaks_again(struct tly_session *p, struct tly_round *r, const struct tly_frame *f)
{
    struct tly_job *job = p->job;
    struct tly_slot *slot = &r->slots[p->rank];
    struct tly_answer *a = &r->answers[p->rank];
    uint32_t length = tly_answers_length(r, p->rank);
    bool whole = f->flags & (TLY_LAST | TLY_MARK);
    slot->session = p->id;
    slot->have = f->offset <= r->length ? f->offset : 0;
    slot->whole = whole;
    a->held = a->done = false;
    a->sent = whole || f->offset > length ? length : f->offset;
    if (a->received) { /* the round stays until the answer that follows is confirmed, too */
        a->received = false;
        r->received--;
        tly_window_owe(job, r, p->rank);
    }
    if (r->verdict)
        tly_verdict_arrived(p, r);
    else if (slot->state == SLOT_BROKEN && !slot->loan && !r->complete) {
        slot->filled -=
            slot->filled % TLY_ALIGN; /* it may have broken inside a block, of which nothing is summed */
        slot->start = slot->filled;
        tly_memory_ask(p, r);
    }
    if (!r->verdict && r->resolved && r->holder == p->rank && r->summed < r->base)
        redo_post(p, r, TLY_AGAIN, TLY_MARK);
    if (!r->verdict)
        tly_answers_queue(job, r);
}

static int redo_read_verdict(const struct tly_frame *f, const void *data, char *sentence)
{
    struct tly_reader r = {data, f->payload, false};
    int err = (int)tly_read32(&r);
    tly_read_text(&r, sentence, TLY_SENTENCE);
    return err > 0 && err < 4096 ? err : EINVAL;
}

/* The first word of its rank about the round. */
static void redo_take_slot(struct tly_session *p, struct tly_round *r, const struct tly_frame *f)
{
    struct tly_job *job = p->job;
    struct tly_slot *slot = &r->slots[p->rank];
    tly_slot_change(job, r, p->rank, SLOT_SAID);
    slot->session = p->id;
    slot->spec = f->spec;
    slot->quiet = f->flags & TLY_QUIET;
    slot->have = f->offset;
    slot->whole = f->flags & TLY_LAST;
    r->said = true;
    r->had |= slot->have || (f->flags & (TLY_LAST | TLY_MARK));
    r->told_in = (uint32_t)f->count > r->told_in ? (uint32_t)f->count : r->told_in;
    tly_round_awaited(job, r, f);
    tly_window_arrived(job, r);
    if (r->arrived - r->joined == 1)
        tly_window_grant_others(job, NULL);
}

/* It tells of a verdict, means something else than others, or the round has a verdict. */
static void redo_refuse(struct tly_session *p, struct tly_round *r, const struct tly_frame *f,
                        const void *data)
{
    char sentence[TLY_SENTENCE];
    tly_slot_change(p->job, r, p->rank, SLOT_REFUSED);
    r->refused = true;
    if (f->flags & TLY_MARK) {
        int err = redo_read_verdict(f, data, sentence);
        tly_verdict_known(p, r, err, sentence);
        return;
    }
    if (!(r->head.flags & TLY_MARK) && !r->verdict && !r->mismatch_at)
        tly_verdict_differs(p->job, r);
    tly_verdict_arrived(p, r);
}

/* The round of which a rank speaks, opened if need be; NULL: *err, *why. */
static struct tly_round *redo_find_or_open(struct tly_session *p, const struct tly_frame *f,
                                           const struct tly_members *who, int *err, const char **why)
{
    struct tly_round *r = tly_store_find(p->job, f);
    if (r)
        return r;
    *err = -EPROTO;
    *why = "it has begun more operations than a rank may";
    if (tly_window_crowded(p))
        return NULL;
    r = tly_round_open(p->job, f, who);
    if (r) {
        r->head.offset = r->head.payload = 0;
        return r;
    }
    *err = -ENOMEM;
    *why = "out of memory";
    return NULL;
}

static bool redo_fits(const struct tly_round *r, const struct tly_frame *f)
{
    bool marked = (f->flags | r->head.flags) & TLY_MARK, same = f->spec == r->head.spec;
    if (!marked && same && (f->length != r->head.length || f->kind != r->head.kind))
        return false;
    return f->offset % TLY_ALIGN == 0 || f->offset == f->length;
}

int tly_redo_have(struct tly_session *p, const struct tly_frame *f, const void *data, const char **why)
{
    struct tly_job *job = p->job;
    const struct tly_members *who = tly_members_of(p, f->group);
    bool whole = f->flags & (TLY_LAST | TLY_MARK);
    if (whole && (f->flags & TLY_RESUMED) && !tly_store_find(job, f)) {
        struct tly_frame done = *f; /* it was summed here, so it is stable, or it would be here */
        done.type = TLY_DONE;
        done.flags = 0;
        tly_session_post(p, &done, NULL, 0, NULL);
        return 0;
    }
    int err;
    struct tly_round *r = redo_find_or_open(p, f, who, &err, why);
    if (!r)
        return err;
    *why = "a count of received bytes that does not fit the tensor";
    if (!redo_fits(r, f))
        return -EPROTO;
    tly_joined_comes(p, r);
    if (r->slots[p->rank].state != SLOT_ABSENT) {
        *why = "a count of received bytes for data that it has sent over this connection";
        if (!r->answers[p->rank].held)
            return -EPROTO;
        redo_speaks_again(p, r, f);
        return 0;
    }
    if (who != r->who && !tly_round_widen(p, r, who))
        return 0;
    redo_take_slot(p, r, f);
    bool mark = (f->flags | r->head.flags) & TLY_MARK;
    if (mark || r->verdict || r->mismatch_at || f->spec != r->head.spec)
        redo_refuse(p, r, f, data);
    else
        tly_redo_look(job, r);
    return 0;
}

void tly_redo_final(struct tly_session *p, const struct tly_frame *f, const void *data)
{
    struct tly_job *job = p->job;
    struct tly_round *r = tly_store_find(job, f);
    if (!r || !r->resolved || r->holder != p->rank || r->summed >= r->base || r->complete ||
        f->offset > r->base || f->payload > r->base - f->offset)
        return;
    if (f->payload)
        memcpy(r->result + f->offset, data, f->payload);
    if (!(f->flags & TLY_LAST) || f->offset + f->payload != r->base)
        return;
    tly_progress_reached(job, r, r->base);
    tly_progress(job, r);
}
