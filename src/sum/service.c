/* service.c - the life of a summation service: its thread, its listener, its one job from the first connection to the
 * end, its sizes and its timeline. */
#include "sum/service.h"

#include <errno.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/sysinfo.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"
#include "join/place.h"
#include "sum/internal.h"
#include "topo/topo.h"

enum {
    FRAGMENT = 128 << 10,
    SEGMENT = 64 << 10, /* what the kernel sends and receives as one */
    /* Of one rank: bytes of rounds that it may have kept beyond those that its window allows, and the least number. */
    MOST_ROUND_BYTES = 128 << 20,
    LEAST_ROUNDS = 1024,
    LARGEST_WINDOW = 1 << 30,
};

/* A service has one job, and is that. */
struct tly_job *tly_service_job(const struct tly_service *s)
{
    return (struct tly_job *)s;
}

static int accepting(void *user, struct tly_link_config *config)
{
    return tly_peers_accept(user, config);
}

static void tick(struct tly_hook *h)
{
    struct tly_job *job = tly_list_entry(h, struct tly_job, hook);
    if (!job->ranks)
        return;
    tly_verdict_tick(job);
    tly_answers_settle(job);
    if (job->redo_waits) {
        job->redo_waits = false;
        tly_redo_look_at_all(job);
        tly_progress_all(job);
    }
    if (job->restore_waits)
        tly_redo_restore(job);
    if (job->dropped_slots)
        tly_memory_ask_again(job); /* memory that was short may be there again, without any news */
    tly_pool_look(&job->pool, job->loop->awake);
    tly_store_check(job);
}

/* Half of what the machine or this process's cgroup allows. */
static uint64_t default_memory(void)
{
    struct sysinfo info;
    uint64_t all = tly_topo_memory("").limit;
    if (sysinfo(&info) == 0 && (uint64_t)info.totalram * info.mem_unit < all)
        all = (uint64_t)info.totalram * info.mem_unit;
    return all / 2;
}

/* How many threads sum.  A tallyd has its machine to itself; inside a rank most cores are the training's. */
static int crew_size(const struct tly_params *params, bool alone)
{
    if (params->sum_threads >= 0)
        return (int)params->sum_threads;
    int cores = tly_topo_cores();
    if (alone)
        return cores >= 4 ? cores - 1 : 0;
    return cores / 8;
}

/* Which of the roster's services this is; their count: none. */
static uint32_t find_own(const struct tly_job *job, const struct tly_roster *roster)
{
    uint32_t i = 0;
    while (i < roster->service_count && roster->services[i].incarnation != job->incarnation)
        i++;
    return i;
}

static void start_trace(struct tly_job *job, const struct tly_roster *roster)
{
    struct tly_process who = {.service = true,
                              .index = find_own(job, roster),
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

/* A window for twice the credit that ranks have for such parts, if memory lasts for that; it is this service's own
 * business, and each connection hears of it by its counts.  Smaller ones come to be as answers open them no further. */
static void set_sizes(struct tly_job *job, uint64_t part_bytes, uint64_t sharing)
{
    uint64_t suits = 4 * sharing * part_bytes, room = job->pool.limit / (job->ranks + 1ull);
    job->part_bytes = part_bytes;
    if (!job->window_fixed) {
        suits = suits < room ? suits : room;
        suits = suits < LARGEST_WINDOW ? suits : LARGEST_WINDOW;
        job->window_bytes = suits > job->part_most ? suits : job->part_most;
    }
    uint64_t half = part_bytes / 2 < FRAGMENT ? part_bytes / 2 : FRAGMENT;
    uint64_t fragment = job->params->fragment_bytes ? job->params->fragment_bytes
                        : half < SEGMENT            ? SEGMENT
                                                    : half;
    job->fragment_bytes = (uint32_t)(fragment < part_bytes ? fragment : part_bytes);
    /* Results tell what was accepted.  Where they keep a rank waiting, it hears so when three quarters of its credit
     * for this service are back; the credit is half a window, two parts for each service, unless told. */
    uint64_t news = 3 * job->window_bytes / (8 * sharing), most = 3 * part_bytes / 2;
    job->pace_bytes = (uint32_t)(news < most ? news : most);
    tly_straggler_begin_anew(&job->straggler);
    for (uint32_t i = 0; i < job->ranks; i++) {
        struct session *p = job->by_rank[i];
        if (!p)
            continue;
        tly_link_set_pace(p->link, job->pace_bytes, TLY_COUNTS_MS);
        tly_window_grant(p);
    }
}

static int64_t prepare(struct tly_hook *h)
{
    struct tly_job *job = tly_list_entry(h, struct tly_job, hook);
    /* Pairs with the release in tly_service_write_trace(). */
    if (atomic_load_explicit(&job->write_trace, memory_order_acquire))
        tly_trace_write(job->trace, NULL, NULL);
    uint64_t news = atomic_exchange_explicit(&job->news, 0, memory_order_acquire);
    if (news && job->ranks)
        set_sizes(job, news & UINT32_MAX, news >> 32);
    return INT64_MAX;
}

void tly_service_write_trace(struct tly_service *s)
{
    struct tly_job *job = tly_service_job(s);
    if (!job)
        return;
    atomic_store_explicit(&job->write_trace, true, memory_order_release);
    tly_loop_wake(job->loop);
}

static void *serve(void *arg)
{
    struct tly_job *job = arg;
    tly_topo_place(job->home, 0);
    tly_loop_run(job->loop);
    return NULL;
}

int tly_service_create(struct tly_loop *loop, const struct tly_params *params,
                       const struct tly_identity *identity, const struct sockaddr_storage *address,
                       struct tly_service **out)
{
    struct tly_job *job = calloc(1, sizeof *job);
    if (!job)
        return tly_fail(ENOMEM, "out of memory");
    job->own_loop.epoll_fd = -1;
    job->loop = loop ? loop : &job->own_loop;
    job->mortal = loop != NULL;
    tly_list_init(&job->sessions);
    tly_list_init(&job->incomplete);
    tly_list_init(&job->lists);
    tly_list_init(&job->hook.node);
    job->hook.tick = tick;
    job->hook.prepare = prepare;
    job->params = params;
    job->identity = *identity;
    job->identity.role = TLY_ROLE_SERVICE;
    job->identity.rank = TLY_NO_RANK;
    randombytes_buf(&job->incarnation, sizeof job->incarnation);
    job->fragment_bytes = (uint32_t)params->fragment_bytes;
    job->dead_ns = (int64_t)(params->dead_timeout * (double)TLY_SEC);
    job->late_ns = (int64_t)(params->late_warning * (double)TLY_SEC);
    job->pool.limit = params->memory ? params->memory : default_memory();
    int err = loop ? 0 : tly_loop_init(&job->own_loop);
    struct tly_listener_config listen = {
        .address = *address, .params = params, .accepting = accepting, .user = job};
    if (!err)
        err = tly_place_ports(params->ports, &listen.first_port, &listen.last_port);
    if (!err) {
        tly_loop_lock(job->loop);
        tly_loop_hook(job->loop, &job->hook);
        /* Arriving data is written by the loop's thread first, and so lies on its node: the network card's. */
        job->home = tly_topo_node(tly_topo_card((const struct sockaddr *)address), 0);
        if (loop)
            tly_topo_place(job->home, 0);
        err = tly_crew_start(&job->crew, job->loop, crew_size(params, loop != NULL), job->home);
        if (!err)
            err = tly_listen(job->loop, &listen, &job->listener);
        tly_loop_unlock(job->loop);
    }
    if (!err && !loop) {
        err = tly_thread_start(&job->thread, "tally-sum", serve, job);
        job->own_thread = !err;
    }
    if (err) {
        tly_service_destroy((struct tly_service *)job, 0);
        return err;
    }
    *out = (struct tly_service *)job;
    return 0;
}

uint16_t tly_service_port(const struct tly_service *s)
{
    struct tly_job *job = tly_service_job(s);
    return tly_listener_port(job->listener);
}

void tly_service_endpoints(const struct tly_service *s, struct tly_endpoints *out)
{
    struct tly_job *job = tly_service_job(s);
    tly_listener_endpoints(job->listener, out);
}

uint64_t tly_service_memory(const struct tly_service *s)
{
    struct tly_job *job = tly_service_job(s);
    return job->pool.limit;
}

uint64_t tly_service_incarnation(const struct tly_service *s)
{
    struct tly_job *job = tly_service_job(s);
    return job->incarnation;
}

void tly_service_resize(struct tly_service *s, const struct tly_roster *roster)
{
    struct tly_job *job = tly_service_job(s);
    if (!job)
        return;
    /* Pairs with the acquire in prepare(). */
    atomic_store_explicit(&job->news, roster->part_bytes | (uint64_t)tly_roster_active(roster) << 32,
                          memory_order_release);
    tly_loop_wake(job->loop);
}

static void change(struct tly_job *job, const struct tly_roster *roster)
{
    set_sizes(job, roster->part_bytes, tly_roster_active(roster));
    for (uint32_t i = 0; i < roster->rank_count && i < job->ranks; i++)
        if (roster->ranks[i].left && !job->gone[i])
            tly_redo_left(job, i);
}

void tly_service_change(struct tly_service *s, const struct tly_roster *roster)
{
    change(tly_service_job(s), roster);
}

void tly_service_facts(struct tly_service *s, struct tly_service_facts *out)
{
    tly_job_facts(tly_service_job(s), out);
}

int tly_service_begin(struct tly_service *s, const struct tly_roster *roster)
{
    struct tly_job *job = tly_service_job(s);
    tly_loop_lock(job->loop);
    job->part_most = roster->part_most;
    job->first_window = job->window_bytes = roster->window_bytes;
    job->window_fixed = roster->window_fixed;
    job->by_rank = calloc(roster->rank_count, sizeof *job->by_rank);
    job->gone = calloc(roster->rank_count, sizeof *job->gone);
    job->burden = calloc(roster->rank_count, sizeof *job->burden);
    job->joined = calloc(roster->rank_count, sizeof *job->joined);
    job->machine = calloc(roster->rank_count, sizeof *job->machine);
    job->teams = roster->teams;
    bool room = job->by_rank && job->gone && job->burden && job->joined && job->machine;
    int err = room ? 0 : -ENOMEM;
    for (uint32_t i = 0; i < roster->rank_count && room; i++)
        job->machine[i] = roster->ranks[i].machine;
    size_t round = sizeof(struct round) + roster->rank_count * (sizeof(struct slot) + sizeof(struct answer));
    job->most_owed =
        MOST_ROUND_BYTES / round > LEAST_ROUNDS ? (uint32_t)(MOST_ROUND_BYTES / round) : LEAST_ROUNDS;
    job->window_rounds = (uint32_t)(job->window_bytes / TLY_LEAST_CHARGE);
    job->most_opened = job->most_owed + job->window_rounds;
    if (!err)
        err = tly_members_begin(job, roster);
    if (!err)
        err = tly_straggler_init(&job->straggler, roster->rank_count);
    /* The first services are the machines' own, in their order. */
    for (uint32_t i = 0; i < roster->rank_count && !err; i++)
        job->straggler.pace[i].here = roster->ranks[i].machine == find_own(job, roster);
    /* The oldest round must always find room: one part from each rank, and a result. */
    uint64_t least = (roster->rank_count + 1) * tly_pool_size((uint32_t)roster->part_most);
    if (!err && job->pool.limit < least) {
        tly_warn("sum", "%llu bytes of memory (TALLY_MEMORY) are too few for %u ranks: using %llu",
                 (unsigned long long)job->pool.limit, roster->rank_count, (unsigned long long)least);
        job->pool.limit = least;
    }
    if (!err) {
        start_trace(job, roster);
        job->ranks = roster->rank_count;
        set_sizes(job, roster->part_bytes, tly_roster_active(roster));
        for (struct tly_list *n = job->sessions.next, *next_node; n != &job->sessions; n = next_node) {
            next_node = n->next;
            struct session *p = tly_list_entry(n, struct session, node);
            if (p->rank != TLY_NO_RANK)
                tly_peers_admit(p);
        }
        change(job, roster);
    }
    tly_loop_unlock(job->loop);
    return err ? tly_fail(ENOMEM, "out of memory") : 0;
}

void tly_service_destroy(struct tly_service *s, int64_t deadline)
{
    struct tly_job *job = tly_service_job(s);
    if (!job)
        return;
    if (job->own_thread) {
        tly_loop_lock(job->loop);
        bool wait = !tly_list_empty(&job->sessions);
        if (wait)
            job->quiet = (struct tly_event){0};
        tly_loop_unlock(job->loop);
        if (wait && deadline > tly_now())
            tly_event_wait(&job->quiet, deadline);
        tly_loop_stop(job->loop);
        pthread_join(job->thread, NULL);
    }
    tly_crew_stop(&job->crew);
    bool inside = job->loop->epoll_fd >= 0;
    if (inside)
        tly_loop_lock(job->loop);
    while (!tly_list_empty(&job->sessions))
        tly_peers_destroy(tly_list_entry(job->sessions.next, struct session, node));
    tly_round_close_all(job);
    tly_listener_destroy(job->listener);
    tly_loop_unhook(job->loop, &job->hook);
    if (inside)
        tly_loop_unlock(job->loop);
    tly_loop_finish(&job->own_loop);
    tly_trace_write(job->trace, NULL, NULL);
    tly_trace_destroy(job->trace);
    tly_pool_trim(&job->pool);
    tly_members_finish(job);
    tly_straggler_finish(&job->straggler);
    tly_joined_finish(job);
    free(job->by_rank);
    free(job->gone);
    free(job->burden);
    free(job);
}
