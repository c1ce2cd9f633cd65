/* store.c - the rounds of a job: found by their part's key, number and round, kept until all ranks have the answer.
 *
 * A round is in job->store while anything may be asked about it, and in job->incomplete, by age, until it has a result or a
 * verdict.  References keep its memory: one of the store, one of each delivery and each letter that points to it. */
#include <errno.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/heap.h"
#include "base/list.h"
#include "base/map.h"
#include "ops/rule.h"
#include "sum/internal.h"
#include "sum/kept.h"
#include "sum/members.h"
#include "sum/quota.h"
#include "sum/round.h"
#include "sum/session.h"
#include "sum/slot.h"
#include "transport/transport.h"

static bool store_is_kept(const struct tly_frame *f)
{
    const struct tly_rule *rule = tly_rule_of(f);
    return rule && rule->behind;
}

static uint64_t store_round_id(const struct tly_frame *f)
{
    /* A key belongs to one group already.  Only parts between two ranks may have the same number for several pairs. */
    uint32_t pair = f->group & TLY_PAIR ? f->group : 0;
    /* Once a shared tensor's part has come here anew, the same round is another one. */
    uint32_t epoch = store_is_kept(f) ? f->epoch : 0;
    return tly_map_mix(f->key ^ tly_map_mix((uint64_t)f->part << 32 | f->round) ^
                       tly_map_mix(~((uint64_t)epoch << 32 | pair)));
}

static bool store_same_pair(const struct tly_frame *a, const struct tly_frame *b)
{
    return a->group == b->group || !((a->group | b->group) & TLY_PAIR);
}

struct tly_round *tly_store_find(struct tly_job *job, const struct tly_frame *f)
{
    struct tly_round *r = tly_map_get(&job->store, store_round_id(f));
    if (r && (r->head.key != f->key || r->head.part != f->part || r->head.round != f->round ||
              !store_same_pair(&r->head, f) || (store_is_kept(f) && r->head.epoch != f->epoch)))
        return NULL; /* two names with one hash: tly_store_add() refuses the newer one's push */
    return r;
}

struct tly_round *tly_store_add(struct tly_job *job, const struct tly_frame *f, const struct tly_members *who)
{
    uint64_t id = store_round_id(f);
    if (tly_map_get(&job->store, id))
        return NULL;
    struct tly_round *r = calloc(1, sizeof *r + job->ranks * (sizeof *r->slots + sizeof *r->answers));
    if (!r)
        return NULL;
    if (tly_map_put(&job->store, id, r) != 0) {
        free(r);
        return NULL;
    }
    r->id = id;
    r->head = *f;
    r->rule = tly_rule_of(f);
    r->who = who;
    r->opener = f->rank;
    job->burden[f->rank].opened++;
    r->length = r->rule->length(f, who, TLY_NO_PEER);
    r->references = 1;
    r->born = job->loop->awake;
    r->age = job->next_age++;
    r->answers = (struct tly_answer *)(r->slots + job->ranks);
    for (uint32_t i = 0; i < job->ranks; i++)
        r->answers[i].round = r;
    for (uint32_t i = 0; i < who->count; i++)
        tly_slot_enter(job, r, who->rank[i]);
    tly_list_append(&job->incomplete, &r->node);
    return r;
}

void tly_store_unref(struct tly_job *job, struct tly_round *r)
{
    if (--r->references)
        return;
    for (uint32_t i = 0; i < job->ranks; i++)
        free(r->slots[i].text);
    free(r->verdict);
    free(r->state);
    free(r);
}

void tly_store_complete(struct tly_job *job, struct tly_round *r)
{
    if (r->complete)
        return;
    r->complete = true;
    job->mismatches -= r->mismatch_at != 0;
    r->mismatch_at = 0;
    job->waiting -= r->waits;
    r->waits = false;
    if (r->kept)
        tly_kept_close(r);
    tly_list_remove(&r->node);
}

static bool store_is_answer(void *value, void *answer)
{
    return value == answer;
}

void tly_store_unqueue(struct tly_job *job, struct tly_round *r, uint32_t rank)
{
    struct tly_answer *a = &r->answers[rank];
    if (job->by_rank[rank] && a->queued)
        tly_heap_filter(&job->by_rank[rank]->ready, store_is_answer, a);
    a->queued = false;
}

void tly_store_remove(struct tly_job *job, struct tly_round *r)
{
    tly_check(!r->pieces_left);
    tly_store_complete(job, r);
    tly_window_lift(job, r);
    for (uint32_t i = 0; i < r->who->count; i++)
        tly_slot_leave(job, r, r->who->rank[i]);
    for (uint32_t i = 0; i < job->ranks; i++) {
        tly_check(r->slots[i].state != SLOT_DROPPED);
        tly_window_confirm(job, r, i);
        tly_store_unqueue(job, r, i);
        if (r->answers[i].on_way && job->by_rank[i]) /* its rank has taken its push back, or left */
            tly_link_detach(job->by_rank[i]->link, &r->answers[i]);
        r->answers[i].on_way = 0;
    }
    job->restored -= r->restored;
    r->restored = false;
    tly_quota_give(&job->quota, r->result, r->result_room);
    r->result = NULL;
    tly_map_take(&job->store, r->id);
    tly_store_unref(job, r);
}

int tly_store_each(struct tly_job *job, void (*look)(struct tly_job *job, struct tly_round *r, void *arg),
                   void *arg)
{
    struct tly_round *r, **all = malloc((job->store.count + 1) * sizeof *all);
    size_t count = 0;
    if (!all)
        return -ENOMEM;
    tly_map_each(&job->store, r)
    {
        all[count++] = r;
        r->references++;
    }
    for (size_t i = 0; i < count; i++) {
        if (tly_map_get(&job->store, all[i]->id) == all[i])
            look(job, all[i], arg);
        tly_store_unref(job, all[i]);
    }
    free(all);
    return 0;
}

/* In checked builds a job with more rounds is not looked at, for it would have time for nothing else. */
enum { MOST_CHECKED = 4096 };

/* Counts of the slots of all rounds. */
struct counts {
    uint32_t dropped, waiting, restored;
    uint32_t lacking[TLY_MAX_RANKS];
};

static void store_check_round(const struct tly_round *r, struct counts *c)
{
    uint32_t arrived = 0, joined = 0;
    for (uint32_t i = 0; i < r->who->count; i++) {
        uint32_t rank = r->who->rank[i];
        const struct tly_slot *slot = &r->slots[rank];
        arrived += slot->state != SLOT_ABSENT;
        joined += slot->state == SLOT_JOINED;
        c->dropped += slot->state == SLOT_DROPPED;
        c->lacking[rank] += slot->state == SLOT_ABSENT || slot->state == SLOT_AGAIN;
        tly_check(r->base || slot->filled <= r->head.length);
    }
    c->waiting += r->waits;
    c->restored += r->restored;
    tly_check(r->arrived == arrived && r->joined == joined);
    tly_check(r->summed <= r->length && r->base <= r->length && r->received <= r->who->count);
    tly_check(!r->verdict || r->complete);
    tly_check(!r->waits || !r->complete);
}

void tly_store_check(const struct tly_job *job)
{
    static _Thread_local struct counts c;
    struct tly_round *r;
    if (!TLY_CHECKS || job->store.count > MOST_CHECKED)
        return;
    c = (struct counts){0};
    tly_map_each(&job->store, r) store_check_round(r, &c);
    tly_check(job->dropped_slots == c.dropped && job->waiting == c.waiting && job->restored == c.restored);
    for (uint32_t i = 0; i < job->ranks; i++) {
        const struct tly_session *p = job->by_rank[i];
        if (!p)
            continue;
        tly_check(p->lacking == c.lacking[i]);
        tly_check(p->answered <= p->pushed && p->stable <= p->received && p->received <= p->delivered);
    }
}
