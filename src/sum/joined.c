/* joined.c - ranks that have joined (tally_join), in rounds: they submit nothing more until all ranks have joined.
 *
 * A rank says of each tensor how often it had submitted that when it joined (joining.c).  In those rounds it may still push,
 * or say what it has.  In all others it takes no part, whichever service they come to and whatever connections or services
 * are lost meanwhile; so its word holds in any order with its pushes.
 *
 * Its slot in such a round is SLOT_JOINED: landed, with zeros for its data, and owed no answer.  Sums and barriers of all
 * ranks, and allgathers that say so, go on.  For anything else home says that it cannot be (tly_verdict_joined).
 *
 * The ranks of a machine that push together (comm/path/team.c) need each other.  One that has joined stands in with zeros
 * where another of its machine takes part (comm/op/joining.c), so it is missed only where all of them have joined. */
#include <stdlib.h>
#include <sys/mman.h>

#include "base/map.h"
#include "ops/rule.h"
#include "sum/internal.h"
#include "sum/members.h"
#include "sum/round.h"
#include "sum/session.h"
#include "sum/slot.h"

/* The rank had not submitted it, and will not. */
static bool joined_sits_out(const struct tly_job *job, const struct tly_round *r, uint32_t rank)
{
    const struct tly_joined *j = &job->joined[rank];
    return j->on && r->head.round >= (uintptr_t)tly_map_get(&j->rounds, r->head.key);
}

/* The pushes, or the refusals, are those of machines, not of ranks. */
static bool joined_is_teams(const struct tly_job *job, const struct tly_round *r)
{
    const struct tly_frame *f = &r->head;
    if (!job->teams || !r->rule->carried || !r->rule->spares)
        return false;
    bool meets = f->part == 0 && f->group == 0 && f->length == 0 && (f->count || (f->flags & TLY_MARK));
    return f->root || meets;
}

static bool joined_takes_no_part(const struct tly_job *job, const struct tly_round *r, uint32_t rank)
{
    if (!joined_is_teams(job, r))
        return joined_sits_out(job, r, rank);
    for (uint32_t i = 0; i < job->ranks; i++)
        if (job->machine[i] == job->machine[rank] && !joined_sits_out(job, r, i))
            return false;
    return true;
}

/* Can it do without some rank? */
static bool joined_goes_on(const struct tly_job *job, const struct tly_round *r)
{
    if (joined_is_teams(job, r))
        return true;
    return r->head.group == 0 && r->rule->spares && r->rule->spares(&r->head);
}

bool tly_joined_may_miss(const struct tly_round *r)
{
    return !(r->head.group & TLY_PAIR);
}

bool tly_joined_is_missed(const struct tly_job *job, const struct tly_round *r, uint32_t rank)
{
    return r->slots[rank].state == SLOT_ABSENT && tly_joined_may_miss(r) && !joined_goes_on(job, r) &&
           tly_members_have(r->who, rank) && joined_sits_out(job, r, rank);
}

static bool joined_mark(struct tly_job *job, struct tly_round *r, uint32_t rank)
{
    struct tly_slot *slot = &r->slots[rank];
    struct tly_answer *a = &r->answers[rank];
    if (slot->state != SLOT_ABSENT || !tly_members_have(r->who, rank) || !joined_takes_no_part(job, r, rank))
        return false;
    if (r->rule->givers == TLY_ROOT_GIVES && rank == r->head.root)
        return false; /* nothing can be given to the others: they cancel it once they hear from home */
    tly_slot_change(job, r, rank, SLOT_JOINED);
    slot->filled = r->head.length;
    r->joined++;
    if (!a->received) {
        a->received = true;
        r->received++;
    }
    tly_window_arrived(job, r);
    return true;
}

/* Nor does a round that has failed wait for ranks that will not come. */
static bool joined_may_mark(const struct tly_job *job, const struct tly_round *r)
{
    return joined_goes_on(job, r) || (r->verdict && tly_joined_may_miss(r));
}

void tly_joined_mark(struct tly_job *job, struct tly_round *r)
{
    for (uint32_t i = 0; i < job->ranks && joined_may_mark(job, r); i++)
        joined_mark(job, r, i);
}

void tly_joined_comes(struct tly_session *p, struct tly_round *r)
{
    struct tly_slot *slot = &r->slots[p->rank];
    bool begun = r->complete || r->summed || r->pieces_left; /* zeros stand for it in the sum */
    if (slot->state != SLOT_JOINED || (begun && !r->verdict))
        return;
    tly_slot_change(p->job, r, p->rank, SLOT_ABSENT);
    slot->filled = slot->start;
    r->joined--;
    r->arrived--;
    r->answers[p->rank].received = false;
    r->received--;
}

void tly_joined_forget(struct tly_job *job, uint32_t rank)
{
    struct tly_joined *j = &job->joined[rank];
    job->joined_count -= j->on;
    j->on = false;
    tly_map_finish(&j->rounds);
    j->rounds = (struct tly_map){0};
}

void tly_joined_finish(struct tly_job *job)
{
    for (uint32_t i = 0; i < job->ranks && job->joined; i++)
        tly_joined_forget(job, i);
    if (job->zeros)
        munmap((void *)job->zeros, job->part_most);
    free(job->joined);
    free(job->machine);
    free(job->machine_ranks);
}
