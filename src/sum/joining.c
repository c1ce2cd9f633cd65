/* joining.c - the word of a rank that it has joined (JOINED): a list of tensors and how often it had submitted each.
 *
 * The list may come in several frames over one connection.  Once it is whole all rounds are looked at: the rank's slots
 * there become SLOT_JOINED where it takes no part (joined.c), and rounds that lacked it alone go on.
 *
 * When all ranks have joined, the next word of any rank has a higher count `joins`: what was said before is void.  Nothing
 * of that time is under way then, but verdicts that ranks will not come for. */
#include <errno.h>
#include <sys/mman.h>

#include "base/map.h"
#include "sum/internal.h"
#include "sum/kept.h"
#include "sum/members.h"
#include "sum/round.h"
#include "sum/session.h"
#include "sum/slot.h"
#include "sum/verdict.h"
#include "transport/outbox.h"
#include "wire/pack.h"

enum { MOST_ROUNDS = 1 << 20 }; /* tensors in one rank's word */

/* A rank more has joined. */
static void joining_look(struct tly_job *job, struct tly_round *r, void *arg)
{
    uint32_t before = r->joined;
    tly_joined_mark(job, r);
    if (r->joined == before) {
        if (r->head.part == 0 && !r->complete)
            tly_verdict_joined(job, r);
        return;
    }
    if (r->received == r->who->count) { /* a verdict that all others have */
        tly_store_remove(job, r);
        return;
    }
    tly_redo_look(job, r);
    if (job->dropped_slots && r->arrived == r->who->count)
        tly_memory_ask_again(job);
    tly_progress(job, r);
}

/* Nobody comes any more for a verdict of the time that is past. */
static void joining_release(struct tly_job *job, struct tly_round *r, void *arg)
{
    if (!r->verdict || !tly_joined_may_miss(r))
        return;
    for (uint32_t i = 0; i < r->who->count; i++) {
        struct tly_answer *a = &r->answers[r->who->rank[i]];
        if (r->slots[r->who->rank[i]].state == SLOT_ABSENT && !a->received) {
            a->received = true;
            r->received++;
        }
    }
    if (r->received == r->who->count)
        tly_store_remove(job, r);
}

/* Without memory for that the ranks' connections end, and over others they say it again. */
static void joining_look_at_all(struct tly_job *job,
                                void (*look_at)(struct tly_job *job, struct tly_round *r, void *arg))
{
    if (tly_store_each(job, look_at, NULL) == 0) {
        tly_answers_settle(job);
        return;
    }
    for (uint32_t i = 0; i < job->ranks; i++)
        if (job->by_rank[i])
            tly_outbox_lose(&job->by_rank[i]->outbox);
}

/* All ranks have joined, for the time before `joins`: those who have since say so anew. */
static void joining_begin_anew(struct tly_job *job, uint32_t joins)
{
    joining_look_at_all(job, joining_release);
    for (uint32_t i = 0; i < job->ranks; i++)
        tly_joined_forget(job, i);
    tly_kept_level(job, joins);
    job->joins = joins;
}

static bool joining_map_zeros(struct tly_job *job)
{
    if (!job->zeros) {
        void *at = mmap(NULL, job->part_most, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        job->zeros = at == MAP_FAILED ? NULL : at;
    }
    return job->zeros != NULL;
}

int tly_joining_learn(struct tly_session *p, const struct tly_frame *f, const void *data, const char **why)
{
    struct tly_job *job = p->job;
    struct tly_joined *j = &job->joined[p->rank];
    struct tly_reader r = {data, f->payload, false};
    uint32_t joins = tly_read32(&r), on = tly_read32(&r), count = tly_read32(&r);
    *why = "a malformed join";
    if (r.failed || on > 1 || count > f->payload / 12)
        return -EPROTO;
    if (joins < job->joins)
        return 0; /* it has not heard yet that all have */
    if (joins > job->joins)
        joining_begin_anew(job, joins);
    if (!on)
        return 0;
    if (!j->coming || j->session != p->id) {
        tly_joined_forget(job, p->rank);
        j->coming = true;
        j->session = p->id;
    }
    *why = "out of memory";
    if (!joining_map_zeros(job))
        return -ENOMEM;
    while (count--) {
        uint64_t key = tly_read64(&r);
        uintptr_t rounds = tly_read32(&r);
        if (r.failed || !rounds || j->rounds.count >= MOST_ROUNDS) {
            *why = "a malformed join";
            return -EPROTO;
        }
        if (tly_map_put(&j->rounds, key, (void *)rounds) != 0)
            return -ENOMEM;
    }
    if (!(f->flags & TLY_LAST))
        return 0;
    j->coming = false;
    j->on = true;
    job->joined_count++;
    joining_look_at_all(job, joining_look);
    tly_progress_waiting(job);
    return 0;
}
