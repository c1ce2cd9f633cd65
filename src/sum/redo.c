/* redo.c - what ranks say after a loss: of a service, whose rounds come here, or of their connection to this one.
 *
 * A rank says of each part that it has in doubt how much of the result has landed (HAVE), then that this was all (DONE).
 * When all ranks have pushed or said something of a round, H is the most that any of them has.  The result is summed from
 * H on, from what the ranks push from there; up to H it comes from the lowest rank that has it, if another lacks it.
 *
 * A rank has nothing to say of a round that it knows to be stable, or has not begun.  If another has some of the result
 * all had begun the round; so once the first has said that this was all, the round is stable. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "sum/internal.h"

void tly_redo_detach(struct session *p)
{
    struct tly_service *s = p->service;
    struct round *r;
    tly_map_each(&s->store, r)
    {
        struct slot *slot = &r->slots[p->rank];
        r->answers[p->rank].on_way = 0;
        if (slot->state == SLOT_ABSENT || slot->state == SLOT_JOINED)
            continue;
        if (slot->state == SLOT_COMING || slot->state == SLOT_AGAIN || slot->loan)
            slot->state = SLOT_BROKEN;
        slot->charge = 0; /* counts begin at 0 again */
        r->answers[p->rank].held = true;
        r->answers[p->rank].queued = false;
        tly_redo_loans(s, r);
    }
}

/* The rank must push again what has not been read. */
void tly_redo_loans(struct tly_service *s, struct round *r)
{
    for (uint32_t i = 0; i < s->ranks && !r->pieces_left; i++) {
        struct slot *slot = &r->slots[i];
        if (slot->state != SLOT_BROKEN || !slot->loan)
            continue;
        tly_loan_return(slot->loan);
        slot->loan = NULL;
        slot->filled = r->summed > r->base ? r->summed : r->base;
        if (s->by_rank[i] && slot->session == s->by_rank[i]->id) {
            slot->start = slot->filled;
            tly_round_ask(s->by_rank[i], r);
        }
    }
}

static void post(struct session *p, const struct round *r, int type, uint16_t flags)
{
    struct tly_frame f = r->head;
    f.type = (uint8_t)type;
    f.flags = flags;
    f.payload = 0;
    f.length = r->length;
    f.offset = r->base;
    tly_session_post(p, &f, NULL, 0, NULL);
}

static bool pushes(const struct round *r, uint32_t rank)
{
    bool wanted =
        r->length ? r->base < r->length : !r->had; /* of what only meets there is no result to lack */
    return r->head.length && wanted && tly_kind_gives(r->kind, &r->head, rank);
}

/* All ranks have pushed or said what they have. */
static void resolve(struct tly_service *s, struct round *r)
{
    bool lacked = false;
    r->resolved = true;
    for (uint32_t i = 0; i < s->ranks; i++) {
        const struct slot *slot = &r->slots[i];
        uint32_t have = slot->state != SLOT_SAID ? 0 : slot->whole ? r->length : slot->have;
        if (have > r->base) {
            r->base = have;
            r->holder = i;
        }
    }
    for (uint32_t i = 0; i < s->ranks; i++) {
        struct answer *a = &r->answers[i];
        uint32_t length = tly_round_answer_length(r, i);
        if (r->slots[i].state == SLOT_SAID)
            a->sent = r->slots[i].whole || r->slots[i].have > length ? length : r->slots[i].have;
        lacked |= r->slots[i].state != SLOT_ABSENT && r->slots[i].state != SLOT_JOINED && a->sent < r->base &&
                  a->sent < length;
    }
    if (r->base) { /* a result of its own, and not over an input that need not be here */
        if (s->restore_waits ||
            !tly_round_take_result(s, r)) { /* again with the next tick, the oldest first */
            s->restore_waits = true;
            r->resolved = false;
            r->base = 0;
            return;
        }
        r->order = s->next_order++;
    }
    for (uint32_t i = 0; i < s->ranks; i++) {
        struct slot *slot = &r->slots[i];
        if (slot->state != SLOT_SAID)
            continue;
        slot->start = slot->filled = pushes(r, i) ? r->base : r->head.length;
        slot->state = pushes(r, i) ? SLOT_BROKEN : SLOT_WHOLE;
        if (pushes(r, i) && s->by_rank[i])
            tly_round_ask(s->by_rank[i], r);
    }
    if (r->base && lacked) {
        if (s->by_rank[r->holder])
            post(s->by_rank[r->holder], r, TLY_AGAIN, TLY_MARK);
    } else if (r->base) {
        tly_round_advance(s, r, r->base);
    }
    tly_round_progress(s, r);
}

/* Those who have not spoken of it have nothing more to say. */
static bool is_stable(const struct tly_service *s, const struct round *r)
{
    for (uint32_t at = 0; at < r->who->count; at++) {
        uint32_t i = r->who->rank[at];
        const struct slot *slot = &r->slots[i];
        const struct session *p = s->by_rank[i];
        if (slot->state == SLOT_JOINED)
            continue; /* it has never begun it */
        if (slot->state == SLOT_ABSENT ? !s->gone[i] && (!p || p->done_epoch < r->told_in)
                                       : slot->state != SLOT_SAID || !slot->whole)
            return false;
    }
    return true;
}

static void release(struct tly_service *s, struct round *r)
{
    for (uint32_t at = 0; at < r->who->count; at++) {
        uint32_t i = r->who->rank[at];
        struct session *p = s->by_rank[i];
        if (r->slots[i].state == SLOT_JOINED)
            continue;
        if (p && r->slots[i].state != SLOT_ABSENT)
            post(p, r, TLY_DONE, 0);
        else if (p)
            p->lacking--;
    }
    tly_round_remove(s, r);
}

void tly_redo_look(struct tly_service *s, struct round *r)
{
    if (!r->said || r->resolved || r->refused || r->verdict || r->complete)
        return;
    if (r->had && is_stable(s, r))
        release(s, r);
    else if (r->arrived == r->who->count)
        resolve(s, r);
}

/* The rounds for which `is`, in an array to be freed, for they may go while one walks. */
static struct round **collect(struct tly_service *s, const struct session *p,
                              bool (*is)(const struct round *r, const struct session *p), size_t *count)
{
    struct round *r, **all = malloc((s->store.count + 1) * sizeof *all);
    *count = 0;
    if (all)
        tly_map_each(&s->store, r) if (is(r, p)) all[(*count)++] = r;
    return all;
}

static bool is_open(const struct round *r, const struct session *p)
{
    return r->said && !r->resolved;
}

void tly_redo_look_at_all(struct tly_service *s)
{
    size_t count;
    struct round **all = collect(s, NULL, is_open, &count);
    for (size_t i = 0; i < count; i++)
        tly_redo_look(s, all[i]);
    if (!all)
        s->redo_waits = true;
    free(all);
}

void tly_redo_restore(struct tly_service *s)
{
    s->restore_waits = false;
    for (struct tly_list *n = s->incomplete.next, *next; n != &s->incomplete && !s->restore_waits; n = next) {
        next = n->next;
        tly_redo_look(s, tly_list_entry(n, struct round, node));
    }
}

static bool is_unspoken(const struct round *r, const struct session *p)
{
    const struct slot *slot = &r->slots[p->rank];
    bool mark = r->head.rank == p->rank && (r->head.flags & TLY_MARK); /* comes again as a push */
    return slot->state != SLOT_ABSENT && slot->state != SLOT_JOINED && slot->session != p->id && !mark;
}

void tly_redo_done(struct session *p, const struct tly_frame *f)
{
    struct tly_service *s = p->service;
    size_t count = 0;
    p->done_epoch = (uint32_t)f->count;
    struct round **all = f->flags & TLY_RESUMED ? collect(s, p, is_unspoken, &count) : NULL;
    if ((f->flags & TLY_RESUMED) && !all)
        tly_outbox_lose(&p->outbox); /* no memory: over another connection its rank says it again */
    /* The rank has these, or wants them no longer. */
    for (size_t i = 0; all && i < count; i++) {
        if (all[i]->complete)
            tly_round_has_answer(s, all[i], p->rank);
        else {
            all[i]->answers[p->rank].held =
                false; /* one that is about to be complete is answered all the same */
            tly_round_cancel(p, all[i]);
        }
    }
    free(all);
    tly_redo_look_at_all(s);
}

/* It had pushed or spoken before its connection was lost. */
static void speaks_again(struct session *p, struct round *r, const struct tly_frame *f)
{
    struct tly_service *s = p->service;
    struct slot *slot = &r->slots[p->rank];
    struct answer *a = &r->answers[p->rank];
    uint32_t length = tly_round_answer_length(r, p->rank);
    bool whole = f->flags & (TLY_LAST | TLY_MARK);
    slot->session = p->id;
    slot->have = f->offset <= r->length ? f->offset : 0;
    slot->whole = whole;
    a->held = a->done = false;
    a->sent = whole || f->offset > length ? length : f->offset;
    if (a->received) { /* the round stays until the answer that follows is confirmed, too */
        a->received = false;
        r->received--;
        tly_round_owe(s, r, p->rank);
    }
    if (r->verdict)
        tly_verdict_arrived(p, r);
    else if (slot->state == SLOT_BROKEN && !slot->loan && !r->complete) {
        slot->filled -=
            slot->filled % TLY_ALIGN; /* it may have broken inside a block, of which nothing is summed */
        slot->start = slot->filled;
        tly_round_ask(p, r);
    }
    if (!r->verdict && r->resolved && r->holder == p->rank && r->summed < r->base)
        post(p, r, TLY_AGAIN, TLY_MARK);
    if (!r->verdict)
        tly_round_queue_answers(s, r);
}

static int read_verdict(const struct tly_frame *f, const void *data, char *sentence)
{
    struct tly_reader r = {data, f->payload, false};
    int err = (int)tly_read32(&r);
    tly_read_text(&r, sentence, TLY_SENTENCE);
    return err > 0 && err < 4096 ? err : EINVAL;
}

int tly_redo_have(struct session *p, const struct tly_frame *f, const void *data, const char **why)
{
    struct tly_service *s = p->service;
    const struct members *who = tly_members_of(p, f->group);
    struct round *r = tly_round_find(s, f);
    char sentence[TLY_SENTENCE];
    bool whole = f->flags & (TLY_LAST | TLY_MARK);
    if (!r && whole && (f->flags & TLY_RESUMED)) { /* summed here, so stable, or it would be here */
        struct tly_frame done = *f;
        done.type = TLY_DONE;
        done.flags = 0;
        tly_session_post(p, &done, NULL, 0, NULL);
        return 0;
    }
    if (!r && tly_round_crowded(p)) {
        *why = "more rounds opened than a rank may";
        return -EPROTO;
    }
    if (!r) {
        r = tly_round_open(s, f, who);
        if (!r) {
            *why = "out of memory";
            return -ENOMEM;
        }
        r->head.offset = r->head.payload = 0;
    }
    bool marked = (f->flags | r->head.flags) & TLY_MARK;
    if ((!marked && f->spec == r->head.spec && (f->length != r->head.length || f->kind != r->head.kind)) ||
        (f->offset % TLY_ALIGN && f->offset != f->length)) {
        *why = "a HAVE that does not fit its part";
        return -EPROTO;
    }
    struct slot *slot = &r->slots[p->rank];
    tly_joined_comes(p, r);
    if (slot->state != SLOT_ABSENT) {
        if (!r->answers[p->rank].held) {
            *why = "a HAVE of what it has pushed over this connection";
            return -EPROTO;
        }
        speaks_again(p, r, f);
        return 0;
    }
    if (who != r->who)
        tly_round_widen(p, r, who);
    slot->state = SLOT_SAID;
    slot->session = p->id;
    slot->spec = f->spec;
    slot->quiet = f->flags & TLY_QUIET;
    slot->have = f->offset;
    slot->whole = f->flags & TLY_LAST;
    r->said = true;
    r->had |= slot->have || whole;
    r->told_in = (uint32_t)f->count > r->told_in ? (uint32_t)f->count : r->told_in;
    tly_round_awaited(s, r, f);
    tly_round_arrived(s, r);
    p->lacking--;
    for (uint32_t i = 0; i < r->who->count && r->arrived - r->joined == 1; i++)
        if (s->by_rank[r->who->rank[i]])
            tly_round_grant(s->by_rank[r->who->rank[i]]);
    bool mark = (f->flags | r->head.flags) & TLY_MARK;
    if (mark || r->verdict || r->mismatch_at || f->spec != r->head.spec) {
        slot->state = SLOT_REFUSED;
        r->refused = true;
        if (f->flags & TLY_MARK)
            tly_verdict_known(p, r, read_verdict(f, data, sentence), sentence);
        else if (!mark && !r->verdict && !r->mismatch_at)
            tly_verdict_differs(s, r);
        if (!(f->flags & TLY_MARK))
            tly_verdict_arrived(p, r);
        return 0;
    }
    tly_redo_look(s, r);
    return 0;
}

void tly_redo_final(struct session *p, const struct tly_frame *f, const void *data)
{
    struct tly_service *s = p->service;
    struct round *r = tly_round_find(s, f);
    if (!r || !r->resolved || r->holder != p->rank || r->summed >= r->base || r->complete ||
        f->offset > r->base || f->payload > r->base - f->offset)
        return;
    if (f->payload)
        memcpy(r->result + f->offset, data, f->payload);
    if (!(f->flags & TLY_LAST) || f->offset + f->payload != r->base)
        return;
    tly_round_advance(s, r, r->base);
    tly_round_progress(s, r);
}
