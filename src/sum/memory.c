/* memory.c - memory for slots and results, and inputs that are read in their ranks' memory.
 *
 * A slot takes memory when its first fragment arrives, and gives it back when the round has its result.  At the limit
 * rounds with a lesser claim give theirs up: their slots are dropped and asked for again (AGAIN), for the ranks still have
 * their inputs.  The round with the best claim always finds room: a job that has a share reserves a part for each rank
 * and one more.
 *
 * A push from a process of this machine may come as a loan instead: the sum reads it where it lies, and holds it
 * meanwhile.  It ends with its connection.
 *
 * A service that lacks a few bytes for a message to a peer ends the connection to that peer (transport/outbox.h). */
#include "base/list.h"
#include "base/slot.h"
#include "sum/internal.h"
#include "sum/members.h"
#include "sum/quota.h"
#include "sum/round.h"
#include "sum/session.h"
#include "sum/slot.h"
#include "transport/transport.h"

/* --- slots --------------------------------------------------------------------------------------- */

void tly_memory_empty(struct tly_job *job, struct tly_round *r, uint32_t rank)
{
    struct tly_slot *slot = &r->slots[rank];
    if (slot->state == SLOT_COMING && job->by_rank[rank])
        tly_link_sink(job->by_rank[rank]->link, slot);
    if (!slot->loan && slot->data != r->result) /* else it is the round's now */
        tly_quota_give(&job->quota, slot->data, r->head.length);
    tly_loan_return(slot->loan);
    slot->loan = NULL;
    slot->data = NULL;
    slot->filled = slot->start = r->base;
}

void tly_memory_forget_slots(struct tly_job *job, struct tly_round *r)
{
    for (uint32_t i = 0; i < job->ranks; i++) {
        struct tly_slot *slot = &r->slots[i];
        tly_store_unqueue(job, r, i); /* what is ready of the result is not sent after the verdict */
        tly_memory_empty(job, r, i);
        tly_window_give_back(job, i, slot);
        if (tly_slot_has_come(slot))
            tly_slot_change(job, r, i, SLOT_REFUSED);
    }
}

static void memory_give_back(struct tly_job *job, struct tly_round *r, struct tly_slot *slot)
{
    if (slot->data != r->result)
        tly_quota_give(&job->quota, slot->data, r->head.length);
    tly_loan_return(slot->loan);
    slot->loan = NULL;
    slot->data = NULL;
}

void tly_memory_release_inputs(struct tly_job *job, struct tly_round *r)
{
    for (uint32_t i = 0; i < job->ranks; i++) {
        memory_give_back(job, r, &r->slots[i]);
        tly_window_give_back(job, i, &r->slots[i]);
    }
}

void tly_memory_close(struct tly_job *job, struct tly_round *r)
{
    tly_memory_drop_loans(job, r); /* pieces of it may have been left undone */
    for (uint32_t i = 0; i < job->ranks; i++)
        memory_give_back(job, r, &r->slots[i]);
    tly_quota_give(&job->quota, r->result, r->result_room);
    r->result = NULL;
}

/* --- the limit ----------------------------------------------------------------------------------- */

void tly_memory_drop(struct tly_job *job, struct tly_round *r, uint32_t rank)
{
    tly_memory_empty(job, r, rank);
    tly_slot_change(job, r, rank, SLOT_DROPPED);
    job->facts.slots_dropped++;
    tly_window_give_back(job, rank, &r->slots[rank]);
}

/* It needs nothing but memory to end. */
static bool memory_may_end(const struct tly_round *r)
{
    return tly_round_all_arrived(r) && !r->waits;
}

/* Which round has the better claim to memory.  One that needs nothing else has it: another may wait for a rank that waits for
 * the first.  Among equals the older one has it. */
static bool memory_comes_before(const struct tly_round *a, const struct tly_round *b)
{
    bool all_a = memory_may_end(a), all_b = memory_may_end(b);
    return all_a != all_b ? all_a : a->age < b->age;
}

static bool memory_has_data(const struct tly_job *job, const struct tly_round *r)
{
    for (uint32_t i = 0; i < job->ranks; i++)
        if (r->slots[i].data)
            return true;
    return false;
}

/* The round with the least claim, among those that hold memory and have less of a claim than r (NULL: among all).  NULL:
 * there is none.  A round whose sum has begun needs no more memory to end, and is none. */
static struct tly_round *memory_find_victim(struct tly_job *job, const struct tly_round *r)
{
    struct tly_round *victim = NULL;
    for (struct tly_list *n = job->incomplete.next; n != &job->incomplete; n = n->next) {
        struct tly_round *other = tly_list_entry(n, struct tly_round, node);
        if (other->summed > other->base || other->pieces_left)
            continue;
        if ((!r || memory_comes_before(r, other)) && (!victim || memory_comes_before(victim, other)) &&
            memory_has_data(job, other))
            victim = other;
    }
    return victim;
}

static void memory_drop_all(struct tly_job *job, struct tly_round *r)
{
    for (uint32_t i = 0; i < job->ranks; i++)
        if (r->slots[i].data)
            tly_memory_drop(job, r, i);
}

/* No other round that still needs memory has a better claim. */
static bool memory_is_first(const struct tly_job *job, const struct tly_round *r)
{
    for (const struct tly_list *n = job->incomplete.next; n != &job->incomplete; n = n->next) {
        const struct tly_round *other = tly_list_entry(n, struct tly_round, node);
        if (other != r && other->summed <= other->base && !other->pieces_left &&
            memory_comes_before(other, r))
            return false;
    }
    return true;
}

uint8_t *tly_memory_take(struct tly_job *job, struct tly_round *r, uint32_t bytes)
{
    for (;;) {
        uint8_t *data = tly_quota_take(&job->quota, bytes);
        struct tly_round *victim = data ? NULL : memory_find_victim(job, r);
        /* Restored results cannot be dropped, and may be all that other jobs leave to this one: one round may pass the
         * limit, so that they end one after another. */
        if (!data && !victim && job->restored && memory_is_first(job, r))
            return tly_memory_take_always(job, bytes);
        if (!victim)
            return data;
        memory_drop_all(job, victim);
    }
}

void tly_memory_yield(struct tly_job *job)
{
    struct tly_round *victim;
    while (tly_quota_over(&job->quota) && (victim = memory_find_victim(job, NULL)))
        memory_drop_all(job, victim);
}

bool tly_memory_reserve(struct tly_job *job, uint64_t bytes)
{
    bool low = tly_quota_reserve(&job->quota, bytes);
    const struct tly_list *jobs = &job->house->jobs;
    for (struct tly_list *n = jobs->next; n != jobs; n = n->next)
        tly_memory_yield(tly_list_entry(n, struct tly_job, node));
    return low;
}

uint8_t *tly_memory_take_always(struct tly_job *job, uint32_t bytes)
{
    return tly_quota_take_always(&job->quota, bytes);
}

bool tly_memory_take_result(struct tly_job *job, struct tly_round *r)
{
    /* Beside all such results there must be room for one round's slots, or they would wait for each other. */
    uint64_t most = (job->restored + 1ull + r->who->count) * tly_slot_bytes(job->part_most);
    if (!job->restored || most <= tly_quota_most(&job->quota))
        r->result = tly_memory_take(job, r, r->length);
    if (!r->result && !job->restored)
        r->result = tly_memory_take_always(job, r->length); /* one always, whatever holds the memory */
    r->result_room = r->length;
    r->restored = r->result != NULL;
    job->restored += r->restored;
    return r->restored;
}

/* --- asking again -------------------------------------------------------------------------------- */

void tly_memory_ask(struct tly_session *p, struct tly_round *r)
{
    struct tly_frame f = r->head;
    f.type = TLY_AGAIN;
    f.flags = 0;
    f.payload = 0;
    f.offset = r->slots[p->rank].start;
    tly_slot_change(p->job, r, p->rank, SLOT_AGAIN);
    tly_session_post(p, &f, NULL, 0, NULL);
    tly_window_grant(p);
}

/* Ask for what was dropped of a round.  False: memory does not reach. */
static bool memory_ask_for(struct tly_job *job, struct tly_round *r, uint64_t *room, bool always)
{
    uint64_t need = tly_slot_bytes(r->head.length);
    for (uint32_t i = 0; i < job->ranks; i++) {
        if (r->slots[i].state != SLOT_DROPPED || !job->by_rank[i])
            continue;
        if (need > *room && !always)
            return false;
        *room = need > *room ? 0 : *room - need;
        tly_memory_ask(job->by_rank[i], r);
    }
    return true;
}

/* In the order of claims.  The first in that order may always ask, for the others make room for it. */
void tly_memory_ask_again(struct tly_job *job)
{
    uint64_t room = tly_quota_room(&job->quota);
    bool first = true;
    for (int all = 1; all >= 0; all--)
        for (struct tly_list *n = job->incomplete.next; n != &job->incomplete && job->dropped_slots;
             n = n->next) {
            struct tly_round *r = tly_list_entry(n, struct tly_round, node);
            if (memory_may_end(r) != all)
                continue;
            if (!memory_ask_for(job, r, &room, first))
                return;
            first = false;
        }
}

bool tly_memory_want_offers(struct tly_job *job, struct tly_round *r)
{
    bool any = false;
    for (uint32_t i = 0; i < r->who->count; i++) {
        if (r->slots[r->who->rank[i]].state != SLOT_OFFERED)
            continue;
        tly_slot_change(job, r, r->who->rank[i], SLOT_DROPPED);
        any = true;
    }
    return any;
}

/* --- loans --------------------------------------------------------------------------------------- */

void tly_memory_drop_loans(struct tly_job *job, struct tly_round *r)
{
    for (uint32_t i = 0; i < job->ranks; i++)
        if (r->slots[i].loan && r->slots[i].data) {
            tly_loan_drop(r->slots[i].loan);
            r->slots[i].data = NULL;
        }
}

bool tly_memory_hold_loans(struct tly_job *job, struct tly_round *r)
{
    for (uint32_t i = 0; i < job->ranks; i++) {
        struct tly_slot *slot = &r->slots[i];
        if (!slot->loan)
            continue;
        slot->data = (uint8_t *)tly_loan_hold(slot->loan); /* read only: the result never takes its place */
        if (!slot->data) {
            tly_memory_drop_loans(job, r);
            return false;
        }
    }
    return true;
}

/* The rank must push again what has not been read. */
void tly_memory_break_loans(struct tly_job *job, struct tly_round *r)
{
    for (uint32_t i = 0; i < job->ranks && !r->pieces_left; i++) {
        struct tly_slot *slot = &r->slots[i];
        if (slot->state != SLOT_BROKEN || !slot->loan)
            continue;
        tly_loan_return(slot->loan);
        slot->loan = NULL;
        slot->filled = r->summed > r->base ? r->summed : r->base;
        if (job->by_rank[i] && slot->session == job->by_rank[i]->id) {
            slot->start = slot->filled;
            tly_memory_ask(job->by_rank[i], r);
        }
    }
}
