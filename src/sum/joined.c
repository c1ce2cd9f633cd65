/* joined.c - ranks that have joined (tally_join): they submit nothing more until all ranks have.
 *
 * With JOINED a rank says of each tensor how often it had submitted it by then.  Of those rounds it may still push, or
 * say what it has; in all others it takes no part, whatever service they come to and whichever connections or services
 * are lost meanwhile.  So its word holds in any order with its pushes.  Its slot in such a round is SLOT_JOINED: landed,
 * with zeros for its data, and owed no answer.  Sums and barriers of all ranks, and gatherings that say so, go on; of
 * anything else the home says that it cannot be (tly_verdict_joined).
 *
 * The ranks of a machine that push together (comm/team.c) need each other: one that has joined stands in with zeros
 * where another one of its machine takes part (comm/joining.c).  So it is missed only where all of them have joined.
 *
 * All ranks have joined, and nothing of that time is under way, before any says that it is past (a higher `joins`). */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "sum/internal.h"
#include "wire/pack.h"

enum { MOST_ROUNDS = 1 << 20 }; /* tensors in one rank's word */

/* Neither has the rank submitted it, nor will it. */
static bool sits_out(const struct tly_service *s, const struct round *r, uint32_t rank)
{
    const struct joined *j = &s->joined[rank];
    return j->on && r->head.round >= (uintptr_t)tly_map_get(&j->rounds, r->head.key);
}

/* Pushed, or refused, by machines of which each is one. */
static bool is_teams(const struct tly_service *s, const struct round *r)
{
    const struct tly_frame *f = &r->head;
    if (!s->teams || !r->kind->carried)
        return false;
    bool meets = f->part == 0 && f->group == 0 && f->length == 0 && (f->count || (f->flags & TLY_MARK));
    return f->root || meets;
}

static bool takes_no_part(const struct tly_service *s, const struct round *r, uint32_t rank)
{
    if (!is_teams(s, r))
        return sits_out(s, r, rank);
    for (uint32_t i = 0; i < s->ranks; i++)
        if (s->machine[i] == s->machine[rank] && !sits_out(s, r, i))
            return false;
    return true;
}

/* Can it do without some rank? */
static bool goes_on(const struct tly_service *s, const struct round *r)
{
    if (is_teams(s, r))
        return true;
    return r->head.group == 0 && r->kind->spares && r->kind->spares(&r->head);
}

/* Messages wait: the rank will be there again. */
static bool may_be_missed(const struct tly_frame *f)
{
    return !(f->group & TLY_PAIR);
}

bool tly_joined_is_missed(const struct tly_service *s, const struct round *r, uint32_t rank)
{
    return r->slots[rank].state == SLOT_ABSENT && may_be_missed(&r->head) && !goes_on(s, r) &&
           tly_members_have(r->who, rank) && sits_out(s, r, rank);
}

static bool mark(struct tly_service *s, struct round *r, uint32_t rank)
{
    struct slot *slot = &r->slots[rank];
    struct answer *a = &r->answers[rank];
    if (slot->state != SLOT_ABSENT || !tly_members_have(r->who, rank) || !takes_no_part(s, r, rank))
        return false;
    if (r->kind->givers == TLY_ROOT_GIVES && rank == r->head.root)
        return false; /* there is nothing to give the others; their cancels end it once they hear from home */
    slot->state = SLOT_JOINED;
    slot->filled = r->head.length;
    r->joined++;
    if (s->by_rank[rank])
        s->by_rank[rank]->lacking--;
    if (!a->received) {
        a->received = true;
        r->received++;
    }
    tly_round_arrived(s, r);
    return true;
}

/* What has failed lacks nobody who will not come, either. */
static bool may_mark(const struct tly_service *s, const struct round *r)
{
    return goes_on(s, r) || (r->verdict && may_be_missed(&r->head));
}

void tly_joined_mark(struct tly_service *s, struct round *r)
{
    for (uint32_t i = 0; i < s->ranks && may_mark(s, r); i++)
        mark(s, r, i);
}

void tly_joined_comes(struct session *p, struct round *r)
{
    struct slot *slot = &r->slots[p->rank];
    bool begun = r->complete || r->summed || r->pieces_left; /* zeros stand for it in the sum */
    if (slot->state != SLOT_JOINED || (begun && !r->verdict))
        return;
    slot->state = SLOT_ABSENT;
    slot->filled = slot->start;
    r->joined--;
    r->arrived--;
    r->answers[p->rank].received = false;
    r->received--;
    p->lacking++;
}

/* A rank more has joined. */
static void look(struct tly_service *s, struct round *r)
{
    uint32_t before = r->joined;
    tly_joined_mark(s, r);
    if (r->joined == before) {
        if (r->head.part == 0 && !r->complete)
            tly_verdict_joined(s, r);
        return;
    }
    if (r->received == r->who->count) { /* a verdict that all others have */
        tly_round_remove(s, r);
        return;
    }
    tly_redo_look(s, r);
    if (s->dropped_slots && r->arrived == r->who->count)
        tly_round_ask_again(s);
    tly_round_progress(s, r);
}

/* The rounds may go while one looks. */
static void look_at_all(struct tly_service *s, void (*look_at)(struct tly_service *s, struct round *r))
{
    struct round *r, **all = malloc((s->store.count + 1) * sizeof *all);
    size_t count = 0;
    if (!all) {
        for (uint32_t i = 0; i < s->ranks; i++)
            if (s->by_rank[i])
                tly_outbox_lose(&s->by_rank[i]->outbox);
        return;
    }
    tly_map_each(&s->store, r)
    {
        all[count++] = r;
        r->references++;
    }
    for (size_t i = 0; i < count; i++) {
        if (tly_map_get(&s->store, all[i]->id) == all[i])
            look_at(s, all[i]);
        tly_round_unref(s, all[i]);
    }
    free(all);
    tly_round_settle(s);
}

static void forget(struct tly_service *s, uint32_t rank)
{
    struct joined *j = &s->joined[rank];
    s->joined_count -= j->on;
    j->on = false;
    tly_map_finish(&j->rounds);
    j->rounds = (struct tly_map){0};
}

/* Nobody comes any more for what has failed in the time that is past. */
static void release(struct tly_service *s, struct round *r)
{
    if (!r->verdict || !may_be_missed(&r->head))
        return;
    for (uint32_t i = 0; i < r->who->count; i++) {
        struct answer *a = &r->answers[r->who->rank[i]];
        if (r->slots[r->who->rank[i]].state == SLOT_ABSENT && !a->received) {
            a->received = true;
            r->received++;
        }
    }
    if (r->received == r->who->count)
        tly_round_remove(s, r);
}

/* All ranks have joined, for the time before `joins`: those who have since say so anew. */
static void begin_anew(struct tly_service *s, uint32_t joins)
{
    look_at_all(s, release);
    for (uint32_t i = 0; i < s->ranks; i++)
        forget(s, i);
    s->joins = joins;
}

static bool map_zeros(struct tly_service *s)
{
    if (!s->zeros) {
        void *at = mmap(NULL, s->part_most, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        s->zeros = at == MAP_FAILED ? NULL : at;
    }
    return s->zeros != NULL;
}

int tly_joined_learn(struct session *p, const struct tly_frame *f, const void *data, const char **why)
{
    struct tly_service *s = p->service;
    struct joined *j = &s->joined[p->rank];
    struct tly_reader r = {data, f->payload, false};
    uint32_t joins = tly_read32(&r), on = tly_read32(&r), count = tly_read32(&r);
    *why = "a join that cannot be";
    if (r.failed || on > 1 || count > f->payload / 12)
        return -EPROTO;
    if (joins < s->joins)
        return 0; /* it has not heard yet that all have */
    if (joins > s->joins)
        begin_anew(s, joins);
    if (!on)
        return 0;
    if (!j->coming || j->session != p->id) {
        forget(s, p->rank);
        j->coming = true;
        j->session = p->id;
    }
    *why = "out of memory";
    if (!map_zeros(s))
        return -ENOMEM;
    while (count--) {
        uint64_t key = tly_read64(&r);
        uintptr_t rounds = tly_read32(&r);
        if (r.failed || !rounds || j->rounds.count >= MOST_ROUNDS) {
            *why = "a join that cannot be";
            return -EPROTO;
        }
        if (tly_map_put(&j->rounds, key, (void *)rounds) != 0)
            return -ENOMEM;
    }
    if (!(f->flags & TLY_LAST))
        return 0;
    j->coming = false;
    j->on = true;
    s->joined_count++;
    look_at_all(s, look);
    return 0;
}

void tly_joined_finish(struct tly_service *s)
{
    for (uint32_t i = 0; i < s->ranks && s->joined; i++)
        forget(s, i);
    if (s->zeros)
        munmap((void *)s->zeros, s->part_most);
    free(s->joined);
    free(s->machine);
}
