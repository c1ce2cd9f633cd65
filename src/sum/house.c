/* house.c - what the jobs of one process share.
 *
 * The house owns the loop, the listener, the pool with its budget (quota.h) and the crew; jobs (job.c) are in its list while
 * they live.  Its lobby holds connections whose handshake is under way.  A connection's first message names the job:
 * house_choose() finds that, and has the handshake go on with the job's identity.  For an unknown job it goes on with a decoy:
 * a secret that nobody knows, and an incarnation that is always the same for that name.  So the peer's proof fails where a
 * wrong secret fails, and until then this house looks the same to it.  Two limits: a peer that names no job is told the
 * name of the only one, and a job's incarnation is the same in all its houses, a decoy's is not.
 *
 * All of it belongs to the loop. */
#include "sum/house.h"

#include <errno.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysinfo.h>

#include "base/check.h"
#include "base/error.h"
#include "base/list.h"
#include "base/thread.h"
#include "membership/place.h"
#include "sum/crew.h"
#include "sum/internal.h"
#include "sum/members.h"
#include "sum/quota.h"
#include "sum/session.h"
#include "sum/slot.h"
#include "topo/topo.h"
#include "transport/transport.h"

/* --- the job of a peer --------------------------------------------------------------------------- */

/* A peer that names no job wants the only one.  Of several starts of a job it means the one whose incarnation it names, or
 * the newest. */
static struct tly_job *house_find_job(const struct tly_session *p, const struct tly_identity *peer)
{
    const struct tly_house *h = p->house;
    struct tly_job *found = NULL;
    for (struct tly_list *n = h->jobs.next; n != &h->jobs; n = n->next) {
        struct tly_job *job = tly_list_entry(n, struct tly_job, node);
        bool only = !peer->job[0] && h->jobs.next == h->jobs.prev;
        if (!only && strcmp(job->identity.job, peer->job) != 0)
            continue;
        if (!found || found->identity.incarnation != peer->incarnation)
            found = job;
    }
    return found;
}

static void house_choose(void *user, const struct tly_identity *peer, struct tly_identity *me)
{
    struct tly_session *p = user;
    p->job = house_find_job(p, peer);
    if (p->job) {
        *me = p->job->identity;
        return;
    }
    *me = (struct tly_identity){.role = TLY_ROLE_SERVICE, .rank = TLY_NO_RANK};
    snprintf(me->job, sizeof me->job, "%s", peer->job);
    randombytes_buf(me->secret, sizeof me->secret);
    crypto_shorthash((uint8_t *)&me->incarnation, (const uint8_t *)me->job, sizeof me->job, p->house->decoy);
}

static int house_accepting(void *user, struct tly_link_config *config)
{
    config->choose = house_choose;
    config->identity = (struct tly_identity){.role = TLY_ROLE_SERVICE, .rank = TLY_NO_RANK}; /* until then */
    return tly_peers_accept(user, config);
}

/* --- life ---------------------------------------------------------------------------------------- */

static void house_tick(struct tly_hook *hook)
{
    struct tly_house *h = tly_list_entry(hook, struct tly_house, hook);
    tly_pool_look(&h->budget.pool, h->loop->awake);
}

/* Half of what the machine or this process's cgroup allows. */
static uint64_t house_default_memory(void)
{
    struct sysinfo info;
    uint64_t all = tly_topo_memory("").limit;
    if (sysinfo(&info) == 0 && (uint64_t)info.totalram * info.mem_unit < all)
        all = (uint64_t)info.totalram * info.mem_unit;
    return all / 2;
}

/* How many threads sum.  A tallyd has its machine to itself; inside a rank most cores are the training's. */
static int house_crew_size(const struct tly_params *params, bool alone)
{
    if (params->sum_threads >= 0)
        return (int)params->sum_threads;
    int cores = tly_topo_cores();
    if (alone)
        return cores >= 4 ? cores - 1 : 0;
    return cores / 8;
}

static void *house_serve(void *arg)
{
    struct tly_house *h = arg;
    tly_topo_place(h->node, 0);
    tly_loop_run(h->loop);
    return NULL;
}

/* In the loop. */
static int open_house(struct tly_house *h, const struct sockaddr_storage *address)
{
    bool alone = h->loop != &h->own_loop;
    struct tly_listener_config listen = {
        .address = *address, .params = h->params, .accepting = house_accepting, .user = h};
    int err = tly_place_ports(h->params->ports, &listen.first_port, &listen.last_port);
    if (err)
        return err;
    tly_loop_hook(h->loop, &h->hook);
    /* Arriving data is written by the loop's thread first, and so lies on its node: the network card's. */
    h->node = tly_topo_node(tly_topo_card((const struct sockaddr *)address), 0);
    if (alone)
        tly_topo_place(h->node, 0);
    err = tly_crew_start(&h->crew, h->loop, house_crew_size(h->params, alone), h->node);
    return err ? err : tly_listen(h->loop, &listen, &h->listener);
}

int tly_house_create(struct tly_loop *loop, const struct tly_params *params,
                     const struct sockaddr_storage *address, struct tly_house **out)
{
    struct tly_house *h = calloc(1, sizeof *h);
    if (!h)
        return tly_fail(ENOMEM, "out of memory");
    h->own_loop.epoll_fd = -1;
    h->loop = loop ? loop : &h->own_loop;
    h->params = params;
    tly_budget_init(&h->budget, params->memory ? params->memory : house_default_memory());
    h->hook.tick = house_tick;
    tly_list_init(&h->hook.node);
    tly_list_init(&h->jobs);
    tly_list_init(&h->lobby);
    randombytes_buf(h->decoy, sizeof h->decoy);
    int err = loop ? 0 : tly_loop_init(&h->own_loop);
    if (!err) {
        tly_loop_lock(h->loop);
        err = open_house(h, address);
        tly_loop_unlock(h->loop);
    }
    if (err) {
        tly_house_destroy(h);
        return err;
    }
    *out = h;
    return 0;
}

int tly_house_start(struct tly_house *h)
{
    if (h->loop != &h->own_loop)
        return 0;
    int err = tly_thread_start(&h->thread, "tally-sum", house_serve, h);
    h->own_thread = !err;
    return err;
}

static void house_end_thread(struct tly_house *h)
{
    tly_loop_stop(h->loop);
    pthread_join(h->thread, NULL);
    h->own_thread = false;
}

int tly_house_lodge(struct tly_house *h, struct tly_loop *host)
{
    if (h->node >= 0)
        return 0;
    house_end_thread(h);
    tly_loop_lock(host);
    int err = tly_loop_lodge(h->loop, host);
    tly_loop_unlock(host);
    return err;
}

bool tly_house_is_turned(const struct tly_house *h)
{
    return h->own_thread || tly_loop_lodges(h->loop);
}

void tly_house_endpoints(const struct tly_house *h, struct tly_endpoints *out)
{
    tly_listener_endpoints(h->listener, out);
}

void tly_house_shut(struct tly_house *h)
{
    if (h->loop->epoll_fd < 0)
        return;
    tly_loop_lock(h->loop);
    while (!tly_list_empty(&h->lobby)) /* before their listener, which counts them */
        tly_peers_destroy(tly_list_entry(h->lobby.next, struct tly_session, node));
    tly_listener_destroy(h->listener);
    h->listener = NULL;
    tly_loop_unlock(h->loop);
}

void tly_house_destroy(struct tly_house *h)
{
    if (!h)
        return;
    tly_check(tly_list_empty(&h->jobs));
    if (h->own_thread)
        house_end_thread(h);
    tly_house_shut(h);
    if (h->loop->epoll_fd >= 0) {
        tly_loop_lock(h->loop);
        tly_crew_stop(&h->crew);
        tly_loop_unhook(h->loop, &h->hook);
        tly_loop_unlock(h->loop);
    }
    tly_loop_finish(&h->own_loop);
    tly_pool_trim(&h->budget.pool);
    free(h);
}
