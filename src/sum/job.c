/* job.c - one job of a house, from its first connection to its end: its identity, its epoch, its sizes, its timeline.
 *
 * A job is created when the house shall serve it: from then on connections may come for it (peers.c).  It begins with the
 * first roster, which says who pushes and how long parts are.  It then reserves memory for the round with the best claim,
 * a part of each rank and a result, so that no other job of the house can keep that round from ending.  A tallyd without
 * memory for that has no share in any epoch, so it gets no input and reserves nothing.  A later epoch changes the length of
 * parts, and with it windows and fragments.
 *
 * Its tick settles what waits for time or for memory.  Its end cancels the crew's pieces of its rounds and leaves the house
 * and its other jobs as they are. */
#include "sum/job.h"

#include <errno.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/event.h"
#include "base/list.h"
#include "base/log.h"
#include "base/slot.h"
#include "base/text.h"
#include "base/thread.h"
#include "membership/place.h"
#include "sum/crew.h"
#include "sum/internal.h"
#include "sum/kept.h"
#include "sum/members.h"
#include "sum/quota.h"
#include "sum/regain.h"
#include "sum/round.h"
#include "sum/session.h"
#include "sum/slot.h"
#include "sum/verdict.h"
#include "trace/trace.h"
#include "transport/transport.h"

enum {
    FRAGMENT = 128 << 10,
    SEGMENT = 64 << 10, /* what the kernel sends and receives as one */
    /* For one rank: bytes of rounds that may be kept beyond those that its window allows, and the least number. */
    MOST_ROUND_BYTES = 128 << 20,
    LEAST_ROUNDS = 1024,
    LARGEST_WINDOW = 1 << 30,
};

/* --- timeline ------------------------------------------------------------------------------------ */

/* Which of the roster's services this is; their count: none. */
static uint32_t job_find_own(const struct tly_job *job, const struct tly_roster *roster)
{
    uint32_t i = 0;
    while (i < roster->service_count && roster->services[i].incarnation != job->incarnation)
        i++;
    return i;
}

static void job_start_trace(struct tly_job *job, const struct tly_roster *roster)
{
    struct tly_process who = {.service = true,
                              .index = job_find_own(job, roster),
                              .rank = TLY_NO_PEER,
                              .start = job->identity.incarnation,
                              .incarnation = job->incarnation};
    if (!job->params->trace || who.index == roster->service_count)
        return;
    const struct tly_roster_service *me = &roster->services[who.index];
    if (me->role == TLY_ROLE_RANK)
        who.rank = me->rank;
    struct tly_place here = {0};
    tly_place_machine(&here, job->params);
    snprintf(who.machine, sizeof who.machine, "%s", here.host_id);
    snprintf(who.job, sizeof who.job, "%s", job->identity.job);
    snprintf(who.host, sizeof who.host, "%s", me->host);
    job->trace = tly_trace_create(job->params->trace, job->params->trace_bytes, &who);
}

/* --- sizes --------------------------------------------------------------------------------------- */

/* A window that suits the job's parts, if memory lasts for that. */
static uint64_t job_find_window(const struct tly_job *job)
{
    uint64_t most = tly_quota_most(&job->quota), free = most > job->kept_bytes ? most - job->kept_bytes : 0;
    uint64_t suits = tly_roster_window((int)job->sharing, job->part_bytes, free, job->ranks);
    suits = suits < LARGEST_WINDOW ? suits : LARGEST_WINDOW;
    return job->window_fixed ? job->window_bytes : suits > job->part_most ? suits : job->part_most;
}

/* The service decides its window alone, and each connection hears of it by its counts.  A smaller one takes effect as answers
 * come: until then nothing more is granted. */
static void job_set_sizes(struct tly_job *job, uint64_t part_bytes, uint64_t sharing)
{
    job->part_bytes = part_bytes;
    job->sharing = sharing;
    job->window_bytes = job_find_window(job);
    uint32_t rounds = (uint32_t)(job->window_bytes / TLY_LEAST_CHARGE);
    job->window_rounds =
        rounds > job->window_rounds ? rounds : job->window_rounds; /* larger ones may be full still */
    job->most_opened = job->most_owed + job->window_rounds;
    uint64_t half = part_bytes / 2 < FRAGMENT ? part_bytes / 2 : FRAGMENT;
    uint64_t fragment = job->params->fragment_bytes ? job->params->fragment_bytes
                        : half < SEGMENT            ? SEGMENT
                                                    : half;
    job->fragment_bytes = (uint32_t)(fragment < job->part_most ? fragment : job->part_most);
    /* Results tell what was accepted.  Where they are late, counts go alone once three quarters of a rank's credit for
     * this service are back: of two parts, or of this service's share of half a small window. */
    uint64_t news = 3 * job->window_bytes / (8 * sharing), most = 3 * part_bytes / 2;
    job->pace_bytes = (uint32_t)(news < most ? news : most);
    for (uint32_t i = 0; i < job->ranks; i++) {
        struct tly_session *p = job->by_rank[i];
        if (!p)
            continue;
        tly_link_set_pace(p->link, job->pace_bytes, TLY_COUNTS_MS);
        tly_window_grant(p);
    }
}

static int64_t job_prepare(struct tly_hook *h)
{
    struct tly_job *job = tly_list_entry(h, struct tly_job, hook);
    uint64_t news = atomic_exchange_explicit(&job->news, 0, memory_order_acquire);
    if (news && job->ranks)
        job_set_sizes(job, news & UINT32_MAX, news >> 32);
    return INT64_MAX;
}

void tly_job_resize(struct tly_job *job, const struct tly_roster *roster)
{
    /* Pairs with the acquire in job_prepare(). */
    atomic_store_explicit(&job->news, roster->part_bytes | (uint64_t)tly_roster_active(roster) << 32,
                          memory_order_release);
    tly_loop_wake(job->loop);
}

/* The round with the best claim must always find room: one part from each rank, and a result. */
static void job_reserve(struct tly_job *job, uint32_t ranks)
{
    struct tly_house *h = job->house;
    uint64_t least = (ranks + 1ull) * tly_slot_bytes(job->part_most), before = h->budget.pool.limit;
    char had[TLY_BYTES_TEXT], now[TLY_BYTES_TEXT];
    if (tly_memory_reserve(job, least))
        tly_warn("sum", "%s of memory (TALLY_MEMORY) are too few for %u ranks: using %s",
                 tly_bytes_text(before, had), ranks, tly_bytes_text(h->budget.pool.limit, now));
}

/* --- epochs -------------------------------------------------------------------------------------- */

void tly_job_change(struct tly_job *job, const struct tly_roster *roster)
{
    job_set_sizes(job, roster->part_bytes, tly_roster_active(roster));
    for (uint32_t i = 0; i < roster->rank_count && i < job->ranks; i++)
        if (roster->ranks[i].left && !job->gone[i]) {
            tly_redo_left(job, i);
            tly_regain_left(job, i);
        }
}

/* How much the service keeps for one rank's sake. */
static void job_set_bounds(struct tly_job *job, uint32_t ranks)
{
    size_t bytes = sizeof(struct tly_round) + ranks * (sizeof(struct tly_slot) + sizeof(struct tly_answer));
    size_t rounds = MOST_ROUND_BYTES / bytes;
    job->most_owed = rounds > LEAST_ROUNDS ? (uint32_t)rounds : LEAST_ROUNDS;
}

/* -ENOMEM. */
static int job_make_room(struct tly_job *job, const struct tly_roster *roster)
{
    uint32_t ranks = roster->rank_count;
    job->by_rank = calloc(ranks, sizeof *job->by_rank);
    job->gone = calloc(ranks, sizeof *job->gone);
    job->burden = calloc(ranks, sizeof *job->burden);
    job->joined = calloc(ranks, sizeof *job->joined);
    job->machine = calloc(ranks, sizeof *job->machine);
    job->machines = roster->machine_count;
    job->machine_ranks = calloc(job->machines, sizeof *job->machine_ranks);
    if (!job->by_rank || !job->gone || !job->burden || !job->joined || !job->machine || !job->machine_ranks)
        return -ENOMEM;
    for (uint32_t i = 0; i < ranks; i++)
        job->machine_ranks[job->machine[i] = roster->ranks[i].machine]++;
    return tly_members_begin(job, roster);
}

/* Ranks whose connections were open before the job began. */
static void job_admit_all(struct tly_job *job)
{
    for (struct tly_list *n = job->sessions.next, *next; n != &job->sessions; n = next) {
        next = n->next;
        struct tly_session *p = tly_list_entry(n, struct tly_session, node);
        if (p->rank != TLY_NO_RANK)
            tly_peers_admit(p);
    }
}

int tly_job_begin(struct tly_job *job, const struct tly_roster *roster)
{
    tly_loop_lock(job->loop);
    job->part_most = roster->part_most;
    job->first_window = job->window_bytes = roster->window_bytes;
    job->window_rounds = (uint32_t)(job->first_window / TLY_LEAST_CHARGE);
    job->window_fixed = roster->window_fixed;
    job->teams = roster->teams;
    job_set_bounds(job, roster->rank_count);
    int err = job_make_room(job, roster);
    if (!err) {
        uint32_t own = job_find_own(job, roster);
        if (own == roster->service_count || !tly_roster_lacks_memory(roster, own))
            job_reserve(job, roster->rank_count);
        if (own < roster->service_count)
            tly_service_name(roster, own, job->name, sizeof job->name);
        job_start_trace(job, roster);
        job->ranks = roster->rank_count;
        job_set_sizes(job, roster->part_bytes, tly_roster_active(roster));
        job_admit_all(job);
        tly_job_change(job, roster);
    }
    tly_loop_unlock(job->loop);
    return err ? tly_fail(ENOMEM, "out of memory") : 0;
}

/* --- life ---------------------------------------------------------------------------------------- */

static void job_tick(struct tly_hook *h)
{
    struct tly_job *job = tly_list_entry(h, struct tly_job, hook);
    if (!job->ranks)
        return;
    uint64_t suits = job_find_window(job); /* changes as other jobs take memory and give it back */
    if (suits > job->window_bytes || suits < job->window_bytes / 2)
        job_set_sizes(job, job->part_bytes, job->sharing);
    tly_verdict_tick(job);
    tly_answers_settle(job);
    if (job->redo_waits) {
        job->redo_waits = false;
        tly_redo_look_at_all(job);
        tly_progress_all(job);
    }
    if (job->restore_waits)
        tly_redo_restore(job);
    tly_progress_waiting(job);
    if (job->dropped_slots)
        tly_memory_ask_again(job); /* memory that was short may be there again, without any news */
    tly_store_check(job);
}

int tly_job_create(struct tly_house *h, const struct tly_params *params, const struct tly_identity *identity,
                   struct tly_job **out)
{
    struct tly_job *job = calloc(1, sizeof *job);
    if (!job)
        return tly_fail(ENOMEM, "out of memory");
    job->house = h;
    job->loop = h->loop;
    job->mortal = h->loop != &h->own_loop;
    job->params = params;
    job->cpu_before = tly_thread_cpu();
    job->identity = *identity;
    job->identity.role = TLY_ROLE_SERVICE;
    job->identity.rank = TLY_NO_RANK;
    randombytes_buf(&job->incarnation, sizeof job->incarnation);
    job->fragment_bytes = (uint32_t)params->fragment_bytes;
    job->dead_ns = (int64_t)(params->dead_timeout * (double)TLY_SEC);
    job->late_ns = (int64_t)(params->late_warning * (double)TLY_SEC);
    job->hook.tick = job_tick;
    job->hook.prepare = job_prepare;
    tly_list_init(&job->sessions);
    tly_list_init(&job->incomplete);
    tly_list_init(&job->lists);
    tly_quota_init(&job->quota, &h->budget);
    tly_loop_lock(job->loop);
    tly_loop_hook(job->loop, &job->hook);
    tly_list_append(&h->jobs, &job->node);
    tly_loop_unlock(job->loop);
    *out = job;
    return 0;
}

uint64_t tly_job_incarnation(const struct tly_job *job)
{
    return job->incarnation;
}

void tly_job_wait(struct tly_job *job, int64_t deadline)
{
    tly_loop_lock(job->loop);
    bool wait = !tly_list_empty(&job->sessions);
    if (wait)
        job->quiet = (struct tly_event){0};
    tly_loop_unlock(job->loop);
    if (wait && deadline > tly_now())
        tly_event_wait(&job->quiet, deadline);
}

static bool is_of_job(const struct tly_crew_task *t, const void *job)
{
    return tly_list_entry(t, struct tly_sum_piece, task)->job == job;
}

/* Connections that have named this job and not proved its secret stay: their end would tell a stranger that it was here. */
static void job_close_sessions(struct tly_job *job)
{
    struct tly_list *lobby = &job->house->lobby;
    while (!tly_list_empty(&job->sessions))
        tly_peers_destroy(tly_list_entry(job->sessions.next, struct tly_session, node));
    for (struct tly_list *n = lobby->next; n != lobby; n = n->next) {
        struct tly_session *p = tly_list_entry(n, struct tly_session, node);
        if (p->job == job)
            p->job = NULL;
    }
}

void tly_job_destroy(struct tly_job *job)
{
    if (!job)
        return;
    tly_loop_lock(job->loop);
    tly_crew_cancel(&job->house->crew, is_of_job, job);
    job_close_sessions(job);
    tly_round_close_all(job);
    tly_kept_finish(job);
    tly_loop_unhook(job->loop, &job->hook);
    tly_list_remove(&job->node);
    tly_check(!job->quota.in_use);
    tly_quota_finish(&job->quota);
    tly_loop_unlock(job->loop);
    tly_trace_write(job->trace, NULL, NULL);
    tly_trace_destroy(job->trace);
    tly_members_finish(job);
    tly_joined_finish(job);
    free(job->by_rank);
    free(job->gone);
    free(job->burden);
    free(job);
}
