/* round.c - a round from its first arrival to its release: slots, the sum, the answers, the window. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "sum/internal.h"

/* --- store --------------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t x)
{
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdull;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ull;
    return x ^ x >> 33;
}

static uint64_t round_id(const struct tly_frame *f)
{
    /* A key is of one group already; only between two ranks there are parts of the same number for each pair. */
    uint32_t pair = f->group & TLY_PAIR ? f->group : 0;
    return mix(f->key ^ mix((uint64_t)f->part << 32 | f->round) ^ mix(~(uint64_t)pair));
}

static bool same_pair(const struct tly_frame *a, const struct tly_frame *b)
{
    return a->group == b->group || !((a->group | b->group) & TLY_PAIR);
}

struct round *tly_round_find(struct tly_service *s, const struct tly_frame *f)
{
    struct round *r = tly_map_get(&s->store, round_id(f));
    if (r && (r->head.key != f->key || r->head.part != f->part || r->head.round != f->round ||
              !same_pair(&r->head, f)))
        return NULL; /* two names with one hash: the newer one's push is refused by tly_round_open() */
    return r;
}

uint32_t tly_round_answer_length(const struct round *r, uint32_t rank)
{
    return r->slots[rank].quiet ? 0 : r->kind->length(&r->head, r->who, rank);
}

static bool all_arrived(const struct round *r)
{
    return r->arrived == r->who->count;
}

static void watch_stragglers(struct tly_service *s, struct round *r)
{
    struct tly_finding f;
    if (!r->kind->marks || r->who != s->all || r->head.type != TLY_PUSH)
        return;
    r->opened = tly_now();
    if (tly_straggler_opened(&s->straggler, r->head.key, r->head.part, r->opened, &f))
        tly_verdict_straggler(s, &f);
    for (uint32_t i = 0; i < s->ranks; i++)
        r->slots[i].busy = tly_straggler_busy(&s->straggler, i, r->opened);
}

/* --- burdens ------------------------------------------------------------------------------------- */

bool tly_round_crowded(const struct session *p)
{
    return p->service->burden[p->rank].opened >= p->service->most_opened;
}

static void lift_burden(struct tly_service *s, struct round *r)
{
    if (r->opener != TLY_NO_PEER)
        s->burden[r->opener].opened--;
    r->opener = TLY_NO_PEER;
}

void tly_round_arrived(struct tly_service *s, struct round *r)
{
    r->arrived++;
    /* What was only spoken of takes no window, and may stay for as long as its rank likes. */
    if (all_arrived(r) && !r->said)
        lift_burden(s, r);
}

void tly_round_owe(struct tly_service *s, struct round *r, uint32_t rank)
{
    struct answer *a = &r->answers[rank];
    if (r->slots[rank].state == SLOT_ABSENT || a->received || a->owed)
        return;
    a->owed = true;
    s->burden[rank].owed++;
}

static void confirm(struct tly_service *s, struct round *r, uint32_t rank)
{
    if (!r->answers[rank].owed)
        return;
    r->answers[rank].owed = false;
    if (s->burden[rank].owed-- == s->most_owed + 1 && s->by_rank[rank])
        tly_round_grant(s->by_rank[rank]);
}

/* --- life ---------------------------------------------------------------------------------------- */

void tly_round_awaited(struct tly_service *s, struct round *r, const struct tly_frame *f)
{
    if (r->since || f->flags & TLY_PATIENT)
        return;
    r->since = s->loop->awake;
    r->warn_at = r->since + s->late_ns;
}

struct round *tly_round_open(struct tly_service *s, const struct tly_frame *f, const struct members *who)
{
    uint64_t id = round_id(f);
    if (tly_map_get(&s->store, id))
        return NULL;
    struct round *r = calloc(1, sizeof *r + s->ranks * (sizeof *r->slots + sizeof *r->answers));
    if (!r)
        return NULL;
    if (tly_map_put(&s->store, id, r) != 0) {
        free(r);
        return NULL;
    }
    r->id = id;
    r->head = *f;
    r->kind = tly_kind_of(f);
    r->who = who;
    r->opener = f->rank;
    s->burden[f->rank].opened++;
    r->length = r->kind->length(f, who, TLY_NO_PEER);
    r->references = 1;
    r->born = s->loop->awake;
    r->age = s->next_age++;
    tly_round_awaited(s, r, f);
    r->answers = (struct answer *)(r->slots + s->ranks);
    for (uint32_t i = 0; i < s->ranks; i++)
        r->answers[i].round = r;
    for (uint32_t i = 0; i < who->count; i++)
        if (s->by_rank[who->rank[i]])
            s->by_rank[who->rank[i]]->lacking++;
    tly_list_append(&s->incomplete, &r->node);
    if (s->joined_count)
        tly_joined_mark(s, r);
    tly_round_stamp(s, r, TLY_AT_OPENED, TLY_NO_PEER);
    if (!(f->flags & TLY_PATIENT))
        watch_stragglers(s, r); /* else it has waited for the others, who knows how long */
    return r;
}

void tly_round_unref(struct tly_service *s, struct round *r)
{
    if (--r->references)
        return;
    for (uint32_t i = 0; i < s->ranks; i++)
        free(r->slots[i].text);
    free(r->verdict);
    free(r);
}

static void leave_incomplete(struct tly_service *s, struct round *r)
{
    if (r->complete)
        return;
    r->complete = true;
    if (r->mismatch_at)
        s->mismatches--;
    s->waiting -= r->waits;
    r->waits = false;
    tly_list_remove(&r->node);
}

static bool is_answer(void *value, void *answer)
{
    return value == answer;
}

static void unqueue(struct tly_service *s, struct round *r, uint32_t rank)
{
    struct answer *a = &r->answers[rank];
    if (s->by_rank[rank] && a->queued)
        tly_heap_filter(&s->by_rank[rank]->ready, is_answer, a);
    a->queued = false;
}

void tly_round_remove(struct tly_service *s, struct round *r)
{
    leave_incomplete(s, r);
    lift_burden(s, r);
    for (uint32_t i = 0; i < s->ranks; i++) {
        confirm(s, r, i);
        unqueue(s, r, i);
        if (r->answers[i].on_way && s->by_rank[i]) /* of who has taken its push back, or left */
            tly_link_detach(s->by_rank[i]->link, &r->answers[i]);
        r->answers[i].on_way = 0;
    }
    s->restored -= r->restored;
    r->restored = false;
    tly_pool_give(&s->pool, r->result, r->result_room);
    r->result = NULL;
    tly_map_take(&s->store, r->id);
    tly_round_unref(s, r);
}

/* --- window -------------------------------------------------------------------------------------- */

/* What has been answered opens the window again; and as long as a round waits for this rank, it stays open
 * for one part more, or two ranks that submit in different orders would wait for each other. */
void tly_round_grant(struct session *p)
{
    struct tly_service *s = p->service;
    if (s->burden[p->rank].owed > s->most_owed)
        return; /* until it says that it has answers, which it does whatever others do */
    uint64_t granted = p->answered + s->window_bytes;
    if (p->lacking && granted < p->pushed + s->part_most)
        granted = p->pushed + s->part_most;
    if (granted > p->granted) {
        /* Where a part did not fit into the window it may be waited for, however little it is. */
        bool awaited = p->granted < p->pushed + s->part_most;
        uint64_t more = granted - p->granted;
        p->granted = granted;
        tly_session_counts(p, awaited || more > UINT32_MAX ? UINT32_MAX : (uint32_t)more);
    }
}

static void give_back(struct tly_service *s, uint32_t rank, struct slot *slot)
{
    if (!slot->charge)
        return;
    struct session *p = s->by_rank[rank];
    if (p) {
        p->answered += slot->charge;
        tly_round_grant(p);
    }
    slot->charge = 0;
}

static void free_slot_data(struct tly_service *s, struct round *r, uint32_t rank)
{
    struct slot *slot = &r->slots[rank];
    if (slot->state == SLOT_COMING && s->by_rank[rank])
        tly_link_sink(s->by_rank[rank]->link, slot);
    if (!slot->loan && slot->data != r->result) /* else it is the round's now */
        tly_pool_give(&s->pool, slot->data, r->head.length);
    tly_loan_return(slot->loan);
    slot->loan = NULL;
    slot->data = NULL;
    slot->filled = slot->start = r->base;
    if (slot->state == SLOT_DROPPED)
        s->dropped_slots--;
}

/* The round fails: no data is kept, but every push counts as arrived. */
void tly_round_forget_slots(struct tly_service *s, struct round *r)
{
    for (uint32_t i = 0; i < s->ranks; i++) {
        struct slot *slot = &r->slots[i];
        unqueue(s, r, i); /* what is ready of the result is not sent after the verdict */
        free_slot_data(s, r, i);
        give_back(s, i, slot);
        if (slot->state == SLOT_AGAIN && s->by_rank[i])
            s->by_rank[i]->lacking--;
        if (slot->state != SLOT_ABSENT && slot->state != SLOT_JOINED)
            slot->state = SLOT_REFUSED;
    }
}

/* --- arrivals ------------------------------------------------------------------------------------ */

static void drop_slot(struct tly_service *s, struct round *r, uint32_t rank)
{
    free_slot_data(s, r, rank);
    r->slots[rank].state = SLOT_DROPPED;
    s->dropped_slots++;
    s->facts.slots_dropped++;
    give_back(s, rank, &r->slots[rank]);
}

/* Who has the better claim to memory.  A round for which all ranks have pushed needs nothing but memory to end;
 * another may wait for a rank that waits for the first.  Among equals the older one. */
static bool comes_before(const struct round *a, const struct round *b)
{
    bool all_a = all_arrived(a), all_b = all_arrived(b);
    return all_a != all_b ? all_a : a->age < b->age;
}

static bool has_data(const struct tly_service *s, const struct round *r)
{
    for (uint32_t i = 0; i < s->ranks; i++)
        if (r->slots[i].data)
            return true;
    return false;
}

/* The round with the least claim, among those that hold memory and have less of a claim than r; or NULL. */
static struct round *find_victim(struct tly_service *s, const struct round *r)
{
    struct round *victim = NULL;
    for (struct tly_list *n = s->incomplete.next; n != &s->incomplete; n = n->next) {
        struct round *other = tly_list_entry(n, struct round, node);
        if (other->summed > other->base || other->pieces_left)
            continue; /* its sum has begun: it needs no more memory to end */
        if (comes_before(r, other) && (!victim || comes_before(victim, other)) && has_data(s, other))
            victim = other;
    }
    return victim;
}

/* At the limit those with the better claim keep what they have, the others give theirs back. */
static uint8_t *take_memory(struct tly_service *s, struct round *r, uint32_t bytes)
{
    for (;;) {
        uint8_t *data = tly_pool_take(&s->pool, bytes);
        struct round *victim = data ? NULL : find_victim(s, r);
        if (!victim)
            return data;
        for (uint32_t i = 0; i < s->ranks; i++)
            if (victim->slots[i].data)
                drop_slot(s, victim, i);
    }
}

void tly_round_ask(struct session *p, struct round *r)
{
    struct slot *slot = &r->slots[p->rank];
    struct tly_frame f = r->head;
    f.type = TLY_AGAIN;
    f.flags = 0;
    f.payload = 0;
    f.offset = slot->start;
    slot->state = SLOT_AGAIN;
    p->lacking++;
    tly_session_post(p, &f, NULL, 0, NULL);
    tly_round_grant(p);
}

/* Ask for what was dropped of a round.  False: memory does not reach. */
static bool ask_for(struct tly_service *s, struct round *r, uint64_t *room, bool always)
{
    uint64_t need = tly_pool_size(r->head.length);
    for (uint32_t i = 0; i < s->ranks; i++) {
        struct slot *slot = &r->slots[i];
        if (slot->state != SLOT_DROPPED || !s->by_rank[i])
            continue;
        if (need > *room && !always)
            return false;
        *room = need > *room ? 0 : *room - need;
        s->dropped_slots--;
        tly_round_ask(s->by_rank[i], r);
    }
    return true;
}

/* Ask for what was dropped, in the order of claims, as far as memory goes.  The first in that order may always
 * ask: the others make room for it. */
void tly_round_ask_again(struct tly_service *s)
{
    uint64_t room = s->pool.limit > s->pool.in_use ? s->pool.limit - s->pool.in_use : 0;
    bool first = true;
    for (int all = 1; all >= 0; all--)
        for (struct tly_list *n = s->incomplete.next; n != &s->incomplete && s->dropped_slots; n = n->next) {
            struct round *r = tly_list_entry(n, struct round, node);
            if (all_arrived(r) != all)
                continue;
            if (!ask_for(s, r, &room, first))
                return;
            first = false;
        }
}

/* All have come: now what is only offered is wanted. */
static bool take_offers(struct tly_service *s, struct round *r)
{
    bool any = false;
    for (uint32_t i = 0; i < r->who->count; i++) {
        struct slot *slot = &r->slots[r->who->rank[i]];
        if (slot->state != SLOT_OFFERED)
            continue;
        slot->state = SLOT_DROPPED;
        s->dropped_slots++;
        any = true;
    }
    return any;
}

static bool wants_data(const struct round *r, const struct tly_frame *f)
{
    return !(f->flags & TLY_REQUEST) && f->length > 0;
}

/* Ranks do not agree on who takes part: all whom anybody names shall hear of it. */
void tly_round_widen(struct session *p, struct round *r, const struct members *who)
{
    struct tly_service *s = p->service;
    if (r->complete && !r->verdict)
        tly_verdict_too_late(p, r);
    const struct members *all = tly_members_join(p, r->who, who);
    if (!all) {
        tly_outbox_lose(&p->outbox);
        return;
    }
    for (uint32_t i = 0; i < all->count; i++) {
        uint32_t rank = all->rank[i];
        const struct session *q = s->by_rank[rank];
        if (tly_members_have(r->who, rank))
            continue;
        if (q)
            s->by_rank[rank]->lacking++;
        if (r->verdict && (q ? q->left : s->gone[rank]) && !r->answers[rank].received) { /* will never ask */
            r->answers[rank].received = true;
            r->received++;
        }
    }
    r->who = all;
}

static void wake_waiting(struct tly_service *s);

/* The header of a push: its first fragment takes a slot, all say where the payload belongs. */
void tly_round_push(struct session *p, struct round *r, const struct tly_frame *f, const struct members *who,
                    struct tly_landing *land)
{
    struct tly_service *s = p->service;
    struct slot *slot = &r->slots[p->rank];
    bool begins = f->offset == 0 || (f->flags & TLY_RESUMED);
    if (slot->state == SLOT_JOINED)
        tly_joined_comes(p, r);
    if (begins && f->offset == slot->start &&
        (slot->state == SLOT_ABSENT || slot->state == SLOT_AGAIN || slot->state == SLOT_DROPPED)) {
        bool first = slot->state == SLOT_ABSENT;
        if (who != r->who)
            tly_round_widen(p, r, who);
        if (slot->state == SLOT_DROPPED)
            s->dropped_slots--;
        else
            p->lacking--;
        slot->spec = f->spec;
        slot->quiet = f->flags & TLY_QUIET;
        slot->session = p->id;
        slot->filled = slot->start;
        slot->charge = tly_charge(f->length);
        slot->state = SLOT_COMING;
        p->pushed += slot->charge;
        tly_round_stamp(s, r, TLY_AT_ARRIVING, p->rank);
        if (first && r->opened)
            tly_straggler_began(&s->straggler, p->rank, r->opened, slot->busy, f->flags & TLY_PROMPT,
                                tly_now());
        tly_round_awaited(s, r, f);
        if (first) {
            tly_round_arrived(s, r);
            /* Who lacks a new round may have been waiting for window behind what only that round can free. */
            for (uint32_t i = 0; i < s->ranks && r->arrived - r->joined == 1; i++)
                if (s->by_rank[i] && s->by_rank[i] != p)
                    tly_round_grant(s->by_rank[i]);
        }
        if (r->verdict || r->mismatch_at || f->spec != r->head.spec ||
            ((f->flags | r->head.flags) & TLY_MARK)) {
            slot->state = SLOT_REFUSED;
            r->refused = true;
            if (!r->verdict && !r->mismatch_at && f->spec != r->head.spec &&
                !((f->flags | r->head.flags) & TLY_MARK))
                tly_verdict_differs(s, r);
            tly_verdict_arrived(p, r);
            if (r->verdict)
                give_back(s, p->rank, slot);
        } else if (f->flags & TLY_OFFER) {
            slot->state = SLOT_OFFERED;
            give_back(s, p->rank, slot);
        } else if (wants_data(r, f)) {
            /* What others are to be sent must outlive its rank's operation: that is copied. */
            if (!slot->data)
                slot->loan = r->kind->borrows ? tly_link_loan(p->link) : NULL;
            if (slot->loan)
                tly_loan_keep(slot->loan);
            else if (!slot->data)
                slot->data = take_memory(s, r, r->head.length);
            if (!slot->loan && !slot->data)
                drop_slot(s, r, p->rank);
        }
        bool offered = first && all_arrived(r) && !r->refused && take_offers(s, r);
        /* The last to come: now only memory may be missing, unless it was just this one that found none. */
        if (offered || (first && all_arrived(r) && s->dropped_slots && slot->state != SLOT_DROPPED))
            tly_round_ask_again(s);
        tly_round_grant(p);
        if (first && s->waiting && r->kind->offers && f->part == 0)
            wake_waiting(s);
        if (r->said)
            tly_redo_look(s, r);
    } else if (begins) {
        /* It was asked for, but is not wanted any more: nothing is kept, the window is as before. */
        p->pushed += tly_charge(f->length);
        p->answered += tly_charge(f->length);
        tly_round_grant(p);
    }
    if (slot->state == SLOT_COMING && slot->data) {
        land->to = slot->data + f->offset;
        land->token = slot;
    }
    land->lent = slot->state == SLOT_COMING && slot->loan;
}

/* So many more bytes of a push are in its slot; none, for a request. */
void tly_round_landed(struct session *p, struct round *r, const struct tly_frame *f, uint32_t bytes)
{
    struct slot *slot = &r->slots[p->rank];
    if (slot->state != SLOT_COMING || (bytes && !slot->data && !slot->loan))
        return;
    slot->filled += bytes;
    if (slot->filled == f->length || (f->flags & TLY_REQUEST)) {
        slot->state = SLOT_WHOLE;
        tly_round_stamp(p->service, r, TLY_AT_ARRIVED, p->rank);
        tly_straggler_ended(&p->service->straggler, p->rank, tly_now());
    }
    tly_round_progress(p->service, r);
}

/* A rank's push is none any more; the round goes with the last. */
static void withdraw(struct tly_service *s, struct round *r, uint32_t rank)
{
    struct session *p = s->by_rank[rank];
    struct slot *slot = &r->slots[rank];
    struct answer *a = &r->answers[rank];
    free_slot_data(s, r, rank);
    give_back(s, rank, slot);
    if (p && slot->state != SLOT_AGAIN)
        p->lacking++;
    slot->state = SLOT_ABSENT;
    slot->withdrawn = false;
    unqueue(s, r, rank);
    a->sent = 0;
    if (--r->arrived > r->joined)
        return;
    for (uint32_t i = 0; i < r->who->count; i++) {
        struct session *of = s->by_rank[r->who->rank[i]];
        if (of && r->slots[r->who->rank[i]].state != SLOT_JOINED)
            of->lacking--;
    }
    tly_round_remove(s, r);
}

static bool is_whole(const struct round *r)
{
    bool whole = all_arrived(r);
    for (uint32_t i = 0; i < r->who->count && whole; i++)
        whole =
            r->slots[r->who->rank[i]].state == SLOT_WHOLE || r->slots[r->who->rank[i]].state == SLOT_JOINED;
    return whole;
}

void tly_round_cancel(struct session *p, struct round *r)
{
    struct tly_service *s = p->service;
    struct slot *slot = &r->slots[p->rank];
    bool begun = r->summed || r->pieces_left;
    if (slot->state == SLOT_ABSENT || slot->state == SLOT_JOINED || r->complete ||
        (begun && !r->refused && is_whole(r)))
        return;          /* summed already, or about to be: its answer is on the way */
    r->refused |= begun; /* of what ranks have had the beginning of, and cannot have the rest */
    slot->withdrawn = true;
    if (!r->pieces_left)
        withdraw(s, r, p->rank);
    if (s->dropped_slots)
        tly_round_ask_again(s);
}

/* --- the sum ------------------------------------------------------------------------------------- */

static void drop_loans(struct tly_service *s, struct round *r)
{
    for (uint32_t i = 0; i < s->ranks; i++)
        if (r->slots[i].loan && r->slots[i].data) {
            tly_loan_drop(r->slots[i].loan);
            r->slots[i].data = NULL;
        }
}

/* What is read where it lies must not move meanwhile.  False: its rank is gone, and will be missed. */
static bool hold_loans(struct tly_service *s, struct round *r)
{
    for (uint32_t i = 0; i < s->ranks; i++) {
        struct slot *slot = &r->slots[i];
        if (!slot->loan)
            continue;
        slot->data = (uint8_t *)tly_loan_hold(slot->loan); /* read only: the result never takes its place */
        if (!slot->data) {
            drop_loans(s, r);
            return false;
        }
    }
    return true;
}

enum {
    VERDICT_S = 8
}; /* so long a verdict can be had again after its service has died, which a silent one is taken
                          * for after 5 s */

enum {
    WORTH_A_THREAD = 512 << 10, /* bytes of input; less is summed sooner than handed over */
    LEAST_PIECE = 64 << 10,     /* bytes of output */
};

static void forget_withdrawn(struct tly_service *s, struct round *r)
{
    r->references++;
    for (uint32_t i = 0; i < s->ranks; i++)
        if (r->slots[i].withdrawn)
            withdraw(s, r, i);
    tly_round_unref(s, r);
}

/* In a thread of the crew. */
static void sum_piece(struct tly_task *t)
{
    struct piece *p = tly_list_entry(t, struct piece, task);
    p->round->kind->advance(p->service, p->round, p->from, p->to);
}

static void piece_done(struct tly_task *t)
{
    struct piece *p = tly_list_entry(t, struct piece, task);
    struct round *r = p->round;
    if (--r->pieces_left == 0) {
        drop_loans(p->service, r);
        if (r->refused) { /* somebody disagrees: a verdict is on its way, or was */
            tly_redo_loans(p->service, r);
            forget_withdrawn(p->service, r);
            return;
        }
        tly_round_advance(p->service, r, r->summing_to);
        tly_redo_loans(p->service, r);
        tly_round_progress(p->service, r);
    }
}

/* Leave [summed, to) to the crew, if there is one and that is worth it. */
static bool hand_to_crew(struct tly_service *s, struct round *r, uint32_t to)
{
    uint32_t length = to - r->summed, count = (uint32_t)s->crew.threads;
    if (!count || !r->kind->divides || (uint64_t)length * r->who->count < WORTH_A_THREAD)
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
    for (uint32_t i = 0; from < to; i++, from += share) {
        struct piece *p = &r->piece[i];
        *p = (struct piece){.task = {.work = sum_piece, .done = piece_done},
                            .service = s,
                            .round = r,
                            .from = from,
                            .to = to - from < share ? to : from + share};
        tly_list_init(&p->task.node);
        tly_crew_post(&s->crew, &p->task);
    }
    return true;
}

/* How far the result can be had with what is there. */
static uint32_t reach(const struct round *r)
{
    uint32_t least = r->head.length;
    bool all = r->kind->givers == TLY_ALL_GIVE;
    for (uint32_t i = 0; i < r->who->count; i++) {
        uint32_t rank = r->who->rank[i];
        if (r->slots[rank].filled < least && (all || tly_kind_gives(r->kind, &r->head, rank)))
            least = r->slots[rank].filled;
    }
    if (!r->kind->streams)
        return least == r->head.length ? r->length : 0;
    return least == r->length ? least : least - least % TLY_ALIGN;
}

static uint8_t *take_little(struct tly_service *s, uint32_t bytes)
{
    uint64_t limit = s->pool.limit;
    s->pool.limit = UINT64_MAX;
    uint8_t *data = tly_pool_take(&s->pool, bytes);
    s->pool.limit = limit;
    return data;
}

bool tly_round_take_result(struct tly_service *s, struct round *r)
{
    /* Beside all such results there must be room for one round's slots, lest they wait for each other. */
    uint64_t most = (s->restored + 1ull + r->who->count) * tly_pool_size((uint32_t)s->part_most);
    if (!s->restored || most <= s->pool.limit)
        r->result = take_memory(s, r, r->length);
    if (!r->result && !s->restored)
        r->result = take_little(s, r->length); /* one always, whoever else has the memory */
    r->result_room = r->length;
    r->restored = r->result != NULL;
    s->restored += r->restored;
    return r->restored;
}

/* The result takes the memory of one of the inputs, or has its own: that of a list, or of a sum whose inputs all lie
 * in their ranks' memory.  What one rank gives is its input, or is not there yet. */
static bool place_result(struct tly_service *s, struct round *r)
{
    if (r->result || r->length == 0)
        return true;
    r->result = r->kind->place ? r->kind->place(r) : NULL;
    r->result_room = r->result ? r->head.length : r->length;
    if (!r->result && r->kind->givers != TLY_ROOT_GIVES)
        r->result = take_little(s, r->length); /* at most what inputs that lie elsewhere have spared */
    return r->result != NULL;
}

static bool answer_ready(const struct tly_service *s, const struct round *r, uint32_t rank)
{
    uint32_t length = tly_round_answer_length(r, rank), summed = r->summed < length ? r->summed : length;
    const struct answer *a = &r->answers[rank];
    return !a->done && !a->held && (a->sent < length ? a->sent < summed : r->complete);
}

void tly_round_queue_answers(struct tly_service *s, struct round *r)
{
    struct tly_rank_order order = {r->head.priority, r->order};
    for (uint32_t i = 0; i < r->who->count; i++) {
        uint32_t rank = r->who->rank[i];
        struct answer *a = &r->answers[rank];
        struct session *p = s->by_rank[rank];
        if (!p || a->queued || r->slots[rank].state == SLOT_ABSENT || r->slots[rank].state == SLOT_JOINED ||
            !answer_ready(s, r, rank))
            continue;
        a->queued = tly_heap_push(&p->ready, order, a) == 0;
        if (!a->queued)
            tly_outbox_lose(&p->outbox);
    }
}

static void finish_sum(struct tly_service *s, struct round *r)
{
    leave_incomplete(s, r);
    for (uint32_t i = 0; i < s->ranks; i++) {
        struct slot *slot = &r->slots[i];
        if (slot->data != r->result)
            tly_pool_give(&s->pool, slot->data, r->head.length);
        tly_loan_return(slot->loan);
        slot->loan = NULL;
        slot->data = NULL;
        give_back(s, i, slot);
    }
    for (uint32_t i = 0; i < r->who->count; i++)
        tly_round_owe(s, r, r->who->rank[i]);
    tly_round_stamp(s, r, TLY_AT_SUMMED, TLY_NO_PEER);
    s->facts.bytes_summed += r->length;
    s->facts.parts_summed++;
}

/* The result reaches as far as `to`. */
void tly_round_advance(struct tly_service *s, struct round *r, uint32_t to)
{
    r->summed = to;
    bool whole = to == r->length;
    if (whole)
        finish_sum(s, r);
    tly_round_queue_answers(s, r);
    if (whole && s->dropped_slots)
        tly_round_ask_again(s);
}

/* An offer has come, for which some rounds wait. */
static void wake_waiting(struct tly_service *s)
{
    for (struct tly_list *n = s->incomplete.next, *next; n != &s->incomplete; n = next) {
        struct round *r = tly_list_entry(n, struct round, node);
        next = n->next;
        if (r->waits)
            tly_round_progress(s, r);
    }
}

/* Has the round to wait for another?  Counted, so that an offer looks for it. */
static bool must_wait(struct tly_service *s, struct round *r)
{
    bool waits = r->kind->may_start && !r->kind->may_start(s, r);
    s->waiting += (uint32_t)waits - r->waits;
    r->waits = waits;
    return waits;
}

/* Make what can be made of the result, and send it. */
void tly_round_progress(struct tly_service *s, struct round *r)
{
    if (r->complete || r->pieces_left || r->refused || !all_arrived(r) || r->said != r->resolved ||
        r->summed < r->base || must_wait(s, r))
        return;
    uint32_t to = reach(r);
    bool whole = to == r->length && is_whole(r);
    if (whole)
        tly_round_stamp(s, r, TLY_AT_GATHERED, TLY_NO_PEER);
    /* Less than a fragment is not worth a frame of its own. */
    if (!whole && to - r->summed < s->fragment_bytes)
        return;
    if (whole && r->kind->tell && !r->had)
        r->kind->tell(s, r);
    if (r->complete)
        return;
    if (!place_result(s, r)) {
        s->redo_waits = true;
        return;
    }
    if (r->summed == 0)
        r->order = s->next_order++;
    if (to > r->summed && r->kind->advance) {
        if ((r->kind->borrows && !hold_loans(s, r)) || hand_to_crew(s, r, to))
            return;
        r->kind->advance(s, r, r->summed, to);
        if (r->kind->borrows)
            drop_loans(s, r);
    }
    tly_round_advance(s, r, to);
}

/* --- answers ------------------------------------------------------------------------------------- */

/* The next fragment of the most urgent result. */
bool tly_round_answer(struct session *p, struct tly_outgoing *out)
{
    struct tly_service *s = p->service;
    struct tly_heap_item *top = tly_heap_top(&p->ready);
    if (!top)
        return false;
    struct answer *a = top->value;
    struct round *r = a->round;
    uint32_t length = tly_round_answer_length(r, p->rank), summed = r->summed < length ? r->summed : length;
    uint32_t n = summed - a->sent < TLY_MAX_FRAGMENT ? summed - a->sent : TLY_MAX_FRAGMENT;
    *out = (struct tly_outgoing){.frame = r->head, .payload = r->result + a->sent, .stays = true};
    if (a->sent == 0)
        tly_round_stamp(s, r, TLY_AT_ANSWERING, p->rank);
    out->frame.type = TLY_RESULT;
    out->frame.length = length;
    out->frame.offset = a->sent;
    out->frame.payload = n;
    a->sent += n;
    out->frame.flags = a->sent == length ? TLY_LAST : 0;
    out->token = a;
    a->on_way++;
    if (a->sent == length) {
        a->done = true;
        a->queued = false;
        tly_heap_pop(&p->ready);
        tly_round_delivered(p, r);
    } else if (!answer_ready(s, r, p->rank)) {
        a->queued = false;
        tly_heap_pop(&p->ready);
    }
    return true;
}

bool tly_round_reserve(struct session *p)
{
    if (p->delivered - p->stable < p->ring_room)
        return true;
    uint32_t room = p->ring_room ? p->ring_room * 2 : 64;
    struct round **ring = malloc(room * sizeof *ring);
    if (!ring)
        return false;
    for (uint64_t i = p->stable; p->ring_room && i < p->delivered; i++)
        ring[i % room] = p->deliveries[i % p->ring_room];
    free(p->deliveries);
    p->deliveries = ring;
    p->ring_room = room;
    return true;
}

/* The answer of this round has gone out whole: remember in which order. */
void tly_round_delivered(struct session *p, struct round *r)
{
    p->deliveries[p->delivered++ % p->ring_room] = r;
    r->references++;
}

/* All ranks have the answer: nobody can ask for it any more. */
static void become_stable(struct tly_service *s, struct round *r)
{
    tly_round_remove(s, r);
    if (s->dropped_slots)
        tly_round_ask_again(s);
}

bool tly_round_has_answer(struct tly_service *s, struct round *r, uint32_t rank)
{
    if (r->answers[rank].received)
        return false;
    r->answers[rank].received = true;
    confirm(s, r, rank);
    if (++r->received < r->who->count)
        return false;
    become_stable(s, r);
    return true;
}

void tly_round_received(struct session *p, uint64_t count)
{
    struct tly_service *s = p->service;
    bool any = false;
    while (p->received < count && p->received < p->delivered) {
        struct round *r = p->deliveries[p->received % p->ring_room];
        if (r->answers[p->rank].on_way && tly_link_is_open(p->link))
            break; /* it cannot have what is not sent yet */
        p->received++;
        if (r->opened)
            tly_straggler_answered(&s->straggler, p->rank, r->opened, tly_now());
        any |= tly_round_has_answer(s, r, p->rank);
    }
    if (any)
        tly_round_settle(s);
}

/* Nobody else will ask for it.  A verdict may concern ranks that never come for it: what was answered after it does not
 * wait for them for ever. */
static bool is_settled(const struct tly_service *s, const struct round *r)
{
    return r->received == r->who->count || (r->verdict && s->loop->awake - r->decided > VERDICT_S * TLY_SEC);
}

/* Any rank's oldest answers may have become stable, by another's word or by age. */
void tly_round_settle(struct tly_service *s)
{
    for (uint32_t i = 0; i < s->ranks; i++) {
        struct session *q = s->by_rank[i];
        uint64_t before = q ? q->stable : 0;
        while (q && q->stable < q->received && is_settled(s, q->deliveries[q->stable % q->ring_room]))
            tly_round_unref(s, q->deliveries[q->stable++ % q->ring_room]);
        if (q && s->mortal && q->stable != before)
            tly_session_counts(q, (uint32_t)s->part_bytes / 4); /* somebody may wait for that */
    }
}

void tly_round_close_store(struct tly_service *s)
{
    struct round *r;
    tly_map_each(&s->store, r)
    {
        drop_loans(s, r); /* pieces of it may have been left undone */
        for (uint32_t i = 0; i < s->ranks; i++) {
            if (r->slots[i].data && r->slots[i].data != r->result)
                tly_pool_give(&s->pool, r->slots[i].data, r->head.length);
            tly_loan_return(r->slots[i].loan);
        }
        if (r->result)
            tly_pool_give(&s->pool, r->result, r->result_room);
        r->references = 1;
        tly_round_unref(s, r);
    }
    tly_map_finish(&s->store);
    s->store = (struct tly_map){0};
    tly_list_init(&s->incomplete);
}
