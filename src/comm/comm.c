/* comm.c - opening and closing a communicator, its thread, and its failure. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sodium.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "base/log.h"
#include "base/loop.h"
#include "base/param.h"
#include "base/text.h"
#include "base/thread.h"
#include "comm/comm.h"
#include "comm/epoch/epoch.h"
#include "comm/epoch/follow.h"
#include "comm/epoch/pace.h"
#include "comm/epoch/report.h"
#include "comm/epoch/traffic.h"
#include "comm/listen.h"
#include "comm/op/active.h"
#include "comm/op/events.h"
#include "comm/op/group.h"
#include "comm/op/joining.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/op/tensor.h"
#include "comm/path/engine.h"
#include "comm/path/gpus.h"
#include "comm/path/keep.h"
#include "comm/path/peer.h"
#include "comm/path/queue.h"
#include "comm/path/stage.h"
#include "comm/path/team.h"
#include "comm/submit.h"
#include "local/local.h"
#include "membership/coordinator.h"
#include "membership/member.h"
#include "membership/place.h"
#include "membership/roster.h"
#include "plan/plan.h"
#include "sched/sched.h"
#include "sum/service.h"
#include "tally/tally.h"
#include "topo/topo.h"
#include "trace/timeline.h"
#include "trace/trace.h"
#include "transport/address.h"
#include "transport/transport.h"
#include "wire/frame.h"

enum { CLOSE_S = 10, CONNECT_S = 20, HOLDER_S = 15 };

/* The fastest card, bit/s, on which one thread runs both the rank's loop and its service's.  Both together take a third of a
 * core while such a card is full, so neither waits long for the other.  On a faster card they have to work at the same
 * time. */
static const uint64_t ONE_THREAD_RATE = 2500000000;

/* --- timeline ------------------------------------------------------------------------------------ */

static void comm_start_trace(tally_comm *c)
{
    if (!c->params.trace)
        return;
    struct tly_process who = {.index = (uint32_t)c->rank,
                              .rank = (uint32_t)c->rank,
                              .start = c->member.identity.incarnation};
    snprintf(who.job, sizeof who.job, "%s", c->member.identity.job);
    snprintf(who.host, sizeof who.host, "%s", c->running.place.host);
    snprintf(who.machine, sizeof who.machine, "%s", c->running.place.host_id);
    c->trace = tly_trace_create(c->params.trace, c->params.trace_bytes, &who);
}

static void comm_name_tensor(void *user, uint64_t key, char *out, size_t len)
{
    tally_comm *c = user;
    tly_names_text(&c->names, key, out, len);
}

/* --- failure ------------------------------------------------------------------------------------- */

/* The communicator fails (state.c).  Connections end first, so that nothing touches a buffer once its operation has ended. */
static void comm_fail(tally_comm *c, int err)
{
    if (c->member.state != TLY_MEMBER_OVER) /* else the coordinator has said it to all */
        tly_member_complain(&c->member, err, tly_comm_sentence(c));
    for (int i = 0; i < c->services; i++) {
        tly_link_destroy(c->peers[i].link);
        c->peers[i].link = NULL;
        c->peers[i].open = false;
    }
    /* First, because the application may end the process once it knows. */
    tly_service_write_trace(c->service);
    tly_trace_write(c->trace, comm_name_tensor, c);
    if (c->local)
        tly_local_fail(c->local, err, tly_comm_sentence(c));
    tly_op_end_all(c, err, tly_comm_sentence(c));
    tly_joining_end(c, err, tly_comm_sentence(c));
    tly_report_give_up(&c->reports);
}

static void comm_on_over(void *user, int err, const char *sentence)
{
    tally_comm *c = user;
    if (!tly_comm_leaves(c) || !tly_comm_have_all_left(c))
        tly_comm_fail(c, err, sentence);
}

static void comm_on_goodbye(void *user)
{
    tly_comm_all_left(user);
}

/* --- the thread ---------------------------------------------------------------------------------- */

/* Fail if another thread has found that the job cannot go on. */
static void comm_hear(tally_comm *c)
{
    const char *reason;
    int err = tly_inbox_broken(&c->inbox, &reason);
    if (err && !tly_comm_is_doomed(c))
        tly_comm_fail(c, err, reason);
}

static int64_t comm_prepare(struct tly_hook *h)
{
    tally_comm *c = tly_list_entry(h, tally_comm, running.hook);
    comm_hear(c);
    tly_op_drain(c);
    tly_op_drain_stages(c);
    tly_queue_admit(c);
    return tly_joining_look(c);
}

static void comm_tick(struct tly_hook *h)
{
    tally_comm *c = tly_list_entry(h, tally_comm, running.hook);
    tly_comm_tick(c);
    for (int i = 0; i < c->services && !tly_comm_failed(c); i++)
        tly_peer_tick(&c->peers[i]);
    if (!tly_comm_is_doomed(c) && !tly_comm_failed(c))
        tly_op_tick(c);
    tly_engine_tick(c);
    tly_traffic_tick(c);
    tly_follow_tick(c);
    tly_op_time_out(c);
}

static void *comm_run(void *arg)
{
    tally_comm *c = arg;
    tly_topo_place(c->running.home, 0);
    tly_loop_run(&c->loop);
    return NULL;
}

/* --- open ---------------------------------------------------------------------------------------- */

/* Rank 0 coordinates, unless somebody does already.  *own: its own address, if one of `to` is that. */
static int comm_coordinate(tally_comm *c, struct tly_addresses *to, bool *own)
{
    struct sockaddr_storage address;
    *own = false;
    if (c->running.place.rank != 0 || !tly_place_take_own(&c->running.place, to, &address))
        return 0;
    *own = true;
    if (c->coordinator) {
        tly_address_set_port(&to->at[0], tly_coordinator_port(c->coordinator));
        return 0;
    }
    int err = tly_coordinator_create(&c->running.place, &c->params, &address,
                                     tly_listen_take(tly_address_port(&address)), false, &c->coordinator);
    if (err == -EADDRINUSE && c->running.place.coord_host[0])
        return 0; /* join the one that is there */
    if (!err)
        tly_address_set_port(&to->at[0], tly_coordinator_port(c->coordinator));
    return err;
}

static int comm_start_service(tally_comm *c, struct tly_endpoints *endpoints)
{
    struct sockaddr_storage at;
    int err = tly_member_service_address(&c->member, &at);
    if (!err)
        err = tly_service_create(NULL, &c->params, &c->member.identity, &at, &c->service);
    if (!err)
        tly_service_endpoints(c->service, endpoints);
    else
        tly_member_complain(&c->member, -err, tly_error()); /* the others would wait for us in vain */
    return err;
}

static int comm_take_roster(tally_comm *c)
{
    const struct tly_roster *r = &c->member.roster;
    if (c->running.place.rank >= r->rank_count)
        return tly_fail(EPROTO, "rank %u is not among the %u ranks of the job", c->running.place.rank,
                        r->rank_count);
    c->rank = (int)c->running.place.rank;
    c->size = (int)r->rank_count;
    c->machine = (int)r->ranks[c->rank].machine;
    c->local_rank = (int)r->ranks[c->rank].local_rank;
    c->machines = (int)r->machine_count;
    c->services = (int)r->service_count;
    for (int i = 0; i < c->size; i++)
        c->local_size += r->ranks[i].machine == (uint32_t)c->machine;
    c->part_least = (uint32_t)r->part_least;
    c->peers = calloc(TLY_MAX_SERVICES, sizeof *c->peers); /* most of it is never touched */
    if (!c->peers) {
        c->services = 0;
        return tly_fail(ENOMEM, "out of memory");
    }
    for (int i = 0; i < c->services; i++)
        tly_peer_init(&c->peers[i], c, (uint32_t)i);
    tly_keep_begin(c);
    int err = tly_group_begin(c);
    if (!err)
        err = tly_team_begin(c);
    if (!err)
        err = tly_epoch_init(c);
    return err ? err : tly_pace_init(c);
}

static int comm_connect_peers(tally_comm *c)
{
    int err = 0, met = 0;
    tly_loop_lock(&c->loop);
    for (int i = 0; i < c->services; i++)
        if (tly_peer_connect(&c->peers[i]) != 0)
            tly_peer_give_up(&c->peers[i], tly_error());
    tly_loop_unlock(&c->loop);
    int64_t deadline = tly_now() + CONNECT_S * TLY_SEC;
    while (!err && met < c->services) {
        tly_loop_turn(&c->loop, 100);
        if (tly_comm_failed(c))
            return tly_fail(tly_comm_failed(c), "%s", tly_comm_sentence(c));
        met = 0; /* a tallyd that cannot be reached is no obstacle */
        for (int i = 0; i < c->services; i++)
            met += c->peers[i].known || (c->peers[i].mortal && c->peers[i].accused);
        for (int i = 0; i < c->services && tly_now() > deadline && !err; i++)
            if (!c->peers[i].known && !(c->peers[i].mortal && c->peers[i].accused))
                err = tly_fail(ETIMEDOUT,
                               "cannot reach %s within %d s: does a firewall shut its port (TALLY_PORTS)?",
                               c->peers[i].name, CONNECT_S);
    }
    return err;
}

/* "memory to 1 service, tcp to 3" */
static void comm_list_media(const tally_comm *c, char *out, size_t len)
{
    size_t at = 0;
    const char *name;
    for (int m = 0; (name = tly_media_name(m)); m++) {
        int count = 0;
        for (int i = 0; i < c->services; i++)
            count += c->peers[i].link && strcmp(tly_link_medium(c->peers[i].link), name) == 0;
        if (count && at < len)
            at += (size_t)snprintf(out + at, len - at, "%s%s to %d%s", at ? ", " : "", name, count,
                                   at           ? ""
                                   : count == 1 ? " service"
                                                : " services");
    }
}

/* Tallyd that may have a share. */
static int comm_count_tallyd(const struct tly_roster *r)
{
    int count = 0;
    for (uint32_t i = r->machine_count; i < r->service_count; i++)
        count += tly_roster_shares(r, i);
    return count;
}

/* "; 2 of 5 tallyd bring nothing: 3 machines are as fast with 3"; "" if each brings something.  If a card may carry more
 * than the plan goes by, that is said instead. */
static void comm_tell_spare(const tally_comm *c, char *out, size_t len)
{
    const struct tly_roster *r = &c->member.roster;
    int all = comm_count_tallyd(r), spare = (int)tly_roster_spare(r, tly_roster_split_named(c->params.split));
    char some[40] = "", with[40] = "alone";
    const char *host;
    uint32_t doubtful = tly_roster_doubtful(r, &host);
    out[0] = '\0';
    if (doubtful == 1)
        snprintf(out, len, "; the card on %s was measured once and may carry more", host);
    else if (doubtful)
        snprintf(out, len, "; %u cards were measured once and may carry more", doubtful);
    if (doubtful || !spare)
        return;
    if (spare < all) {
        snprintf(some, sizeof some, "%d of ", spare);
        snprintf(with, sizeof with, "with %d", all - spare);
    }
    snprintf(out, len, "; %s%d tallyd bring%s nothing: %d machine%s as fast %s", some, all,
             spare == 1 ? "s" : "", c->machines, c->machines == 1 ? " is" : "s are", with);
}

static void comm_greet(tally_comm *c)
{
    char text[TLY_SENTENCE], best[80], spare[160], media[80] = "", gpus[200], here[TLY_HOST_TEXT];
    struct tly_roster *r = &c->member.roster;
    int groups, *sizes = calloc((size_t)c->size, sizeof *sizes);
    uint32_t *order = calloc((size_t)c->size, sizeof *order);
    tly_loop_lock(&c->loop); /* services may come and go already, and each time the roster is another */
    tly_endpoints_host(&r->services[c->machine].at, here);
    bool flat = sizes && order && tly_roster_tree(r, false, &groups, sizes, order);
    tly_pace_foretell(c, best, sizeof best);
    comm_tell_spare(c, spare, sizeof spare);
    tly_gpus_text(c, gpus, sizeof gpus);
    if (c->local_has_all)
        snprintf(media, sizeof media, "%s",
                 tly_local_direct(c->local) ? "shared memory" : "shared memory, through copies");
    else
        comm_list_media(c, media, sizeof media);
    snprintf(text, sizeof text,
             "Tally %s: rank %d of %d at %s, machine %d of %d, %d tallyd; coordinator %s, %s%s; "
             "parts of %u KB, %ssums along the tree over %s%s%s",
             TALLY_VERSION, c->rank, c->size, here, c->machine, c->machines, comm_count_tallyd(r),
             c->member.coordinator, media, gpus, c->epoch->part_bytes >> 10,
             tly_teams_push(&c->teams) ? "pushed once a machine, " : "", flat ? "ranks" : "machines", best,
             spare);
    tly_loop_unlock(&c->loop);
    free(sizes);
    free(order);
    tly_log(c->rank == 0 ? TALLY_LOG_INFO : TALLY_LOG_DEBUG, "comm", "%s", text);
}

/* Free all of a communicator, whatever of it there is.  Until the service is gone the thread goes on, which may run it. */
static void comm_destroy(tally_comm *c, int64_t deadline)
{
    if (c->loop.epoll_fd >= 0) {
        tly_loop_lock(&c->loop);
        tly_loop_unhook(&c->loop, &c->running.hook);
        for (int i = 0; i < c->services; i++)
            tly_peer_finish(&c->peers[i]);
        tly_member_finish(&c->member);
        tly_loop_unlock(&c->loop);
    }
    tly_local_stop(c->local, ESHUTDOWN, "the communicator was closed");
    tly_local_unref(c->local);
    tly_service_destroy(c->service, deadline);
    if (c->running.started) {
        tly_loop_stop(&c->loop);
        pthread_join(c->running.thread, NULL);
    }
    tly_coordinator_destroy(c->coordinator, deadline);
    tly_loop_finish(&c->loop);
    tly_events_finish(c);
    tly_trace_write(c->trace, comm_name_tensor, c);
    tly_trace_destroy(c->trace);
    tly_joining_finish(c);
    tly_group_finish(c);
    tly_team_finish(c);
    tly_stager_finish(c);
    tly_op_finish_all(c);
    tly_names_finish(&c->names);
    tly_inbox_finish(&c->inbox);
    tly_params_finish(&c->params);
    tly_pace_finish(c);
    tly_keep_finish(c);
    tly_follow_finish(c);
    tly_engine_finish(c);
    free(c->peers);
    if (c->running.named)
        tly_log_release_rank();
    free(c);
}

/* Leave what an attempt has made, before the next one. */
static void comm_step_back(tally_comm *c)
{
    tly_service_destroy(c->service, 0);
    c->service = NULL;
    tly_loop_lock(&c->loop);
    tly_member_finish(&c->member);
    tly_loop_unlock(&c->loop);
    struct timespec pause = {.tv_nsec = 50 * TLY_MS};
    nanosleep(&pause, NULL);
}

/* Never below 0, which would be no deadline. */
static double comm_seconds_until(int64_t deadline)
{
    int64_t left = deadline - tly_now();
    return left > 0 ? (double)left / TLY_SEC : 0;
}

/* Become known to the coordinator and learn the roster.  An earlier start that is about to end is waited for:
 * its coordinator holds the address, or says that it is not done yet (-EAGAIN). */
static int comm_meet_coordinator(tally_comm *c)
{
    struct tly_endpoints service;
    int64_t start = tly_now(), patience = start + HOLDER_S * TLY_SEC;
    int64_t deadline = start + (int64_t)(c->params.join_timeout * (double)TLY_SEC);
    for (bool told = false;;) {
        bool own;
        tly_member_init(&c->member, &c->loop, &c->running.place, &c->params, true);
        int err = tly_member_find(&c->member, comm_seconds_until(deadline));
        if (!err)
            err = comm_coordinate(c, &c->member.to, &own);
        if (err)
            return err;
        bool held = own && !c->coordinator;
        char holder[TLY_HOLDER] = "", at[80];
        if (c->running.place.rank == 0 && !own)
            tly_warn("join",
                     "%s (%s) is no address of rank 0's machine: looking for a coordinator of its own there",
                     c->running.place.coord_host, c->running.place.coord_from);
        err = tly_member_connect(&c->member, held ? TLY_HELD_S : comm_seconds_until(deadline));
        if (err && held) {
            tly_address_text(&c->member.to.at[0], at, sizeof at);
            if (!tly_address_holder(&c->member.to.at[0], holder) && err == -ETIMEDOUT)
                return tly_fail(EADDRINUSE,
                                "rank 0 cannot have the coordinator's port, %s%s: end what holds it, or set "
                                "TALLY_PORT",
                                at, holder);
        }
        if (err == -ETIMEDOUT && held && !told) {
            told = true;
            tly_warn("join",
                     "rank 0 cannot have the coordinator's port, %s%s; trying for %d s more, as it may be an "
                     "earlier start's that ends",
                     at, holder, HOLDER_S - TLY_HELD_S);
        }
        if (err && held && (err != -ETIMEDOUT || tly_now() > patience))
            return tly_fail(EADDRINUSE,
                            "%s is in use, and not by a coordinator of this job (%s)%s: end what holds it, "
                            "or set TALLY_PORT",
                            c->member.coordinator, tly_error(), holder);
        if (err && !held)
            return err;
        if (!err)
            err = comm_start_service(c, &service);
        if (!err)
            err = tly_member_announce(&c->member, &service, tly_service_incarnation(c->service),
                                      tly_service_memory(c->service));
        if (!err)
            return 0;
        bool gone =
            held && c->member.lost && tly_now() < patience; /* an earlier start's: its place is free now */
        if (!(held && err == -ETIMEDOUT) && err != -EAGAIN && !gone)
            return err;
        if (tly_now() > deadline)
            return err;
        comm_step_back(c);
    }
}

static int comm_enter_job(tally_comm *c)
{
    int err = comm_meet_coordinator(c);
    if (!err)
        err = comm_take_roster(c);
    if (err)
        return err;
    comm_start_trace(c);
    if (c->local_rank == 0) {
        err = tly_service_begin(c->service, &c->member.roster);
    } else {
        tly_service_destroy(c->service, 0);
        c->service = NULL;
    }
    if (err)
        return err;
    c->member.over = comm_on_over;
    c->member.goodbye = comm_on_goodbye;
    c->member.placed = tly_joining_placed;
    c->member.joined = tly_joining_over;
    c->member.invited = tly_follow_invited;
    c->member.prepare = tly_follow_prepare;
    c->member.promised = tly_follow_promised;
    c->member.changed = tly_follow_committed;
    c->member.user = c;
    err = comm_connect_peers(c);
    if (!err)
        err = tly_engine_open(c);
    return err ? err : tly_member_begin(&c->member);
}

/* Where one machine has all ranks, data may reach the service through shared memory alone, faster than through a card. */
static bool comm_runs_service(const tally_comm *c)
{
    uint64_t rate = c->member.roster.services[c->machine].bandwidth;
    return c->service && c->machines > 1 && rate > 0 && rate <= ONE_THREAD_RATE;
}

int tally_comm_open(const char *const settings[], tally_comm **comm)
{
    char why[TLY_SENTENCE];
    if (sodium_init() < 0)
        return tly_fail(ENOSYS, "libsodium cannot be initialised");
    tally_comm *c = calloc(1, sizeof *c);
    if (!c)
        return tly_fail(ENOMEM, "out of memory");
    c->loop.epoll_fd = -1;
    tly_comm_begin(c, comm_fail);
    tly_inbox_init(&c->inbox);
    tly_chain_init(tly_inbox_said(&c->inbox));
    tly_active_init(&c->active);
    tly_sched_init(&c->sched, 0); /* until the first epoch */
    tly_epochs_init(&c->epochs);
    tly_keep_init(c);
    tly_list_init(&c->replicas);
    tly_names_init(&c->names);
    tly_events_init(c);
    c->running.hook = (struct tly_hook){.prepare = comm_prepare, .tick = comm_tick};
    int err = tly_params_load(&c->params, settings, why, sizeof why);
    if (err)
        err = tly_fail(-err, "%s", why);
    if (!err)
        err = tly_log_set_level(c->params.log);
    if (!err)
        err = tly_place_find(&c->running.place, &c->params, true);
    if (!err) {
        c->running.named = tly_log_claim_rank((int)c->running.place.rank);
        err = tly_loop_init(&c->loop);
    }
    if (!err) {
        tly_loop_lock(&c->loop);
        tly_loop_hook(&c->loop,
                      &c->running.hook); /* before the links': what it admits, they send in the same turn */
        tly_loop_unlock(&c->loop);
        err = comm_enter_job(c);
    }
    if (!err && comm_runs_service(c))
        err = tly_service_lodge(c->service, &c->loop);
    if (!err) {
        tly_comm_opened(c);
        /* The loop copies this process's tensors in and out; they lie on its node if the process is bound to one. */
        c->running.home = tly_topo_node(-1, 0);
        err = tly_thread_start(&c->running.thread, "tally-comm", comm_run, c);
    }
    if (!err) {
        c->running.started = true;
        err = tly_team_agree(c);
        if (!err)
            err = tly_gpus_agree(c);
    }
    if (err) {
        char sentence[TLY_SENTENCE];
        snprintf(sentence, sizeof sentence, "%s", tly_error());
        /* Give the coordinator a moment to tell the others why. */
        comm_destroy(c, c->coordinator ? tly_now() + TLY_SEC : 0);
        return tly_fail(-err, "%s", sentence);
    }
    comm_greet(c);
    *comm = c;
    return 0;
}

/* --- close --------------------------------------------------------------------------------------- */

static void comm_say_goodbye(tally_comm *c)
{
    struct tly_frame f = {.type = TLY_GOODBYE};
    tly_comm_leave(c);
    for (int i = 0; i < c->services; i++)
        if (c->peers[i].link)
            tly_peer_post(&c->peers[i], &f, NULL, 0);
    tly_member_goodbye(&c->member);
}

/* What Tally's threads in this process have cost since it opened, for each 10^9 bytes of its operations. */
static void comm_sum_up_cost(const tally_comm *c, uint64_t bytes, char *out, size_t len)
{
    char seconds[TLY_NUMBER_TEXT];
    out[0] = '\0';
    if (bytes >= 1 << 20)
        snprintf(out, len, "; %s s of processor time for 1 GB on this rank",
                 tly_number_text((double)tly_comm_cpu(c) / (double)bytes, seconds));
}

/* Has nothing failed, so that this rank may leave? */
static bool comm_is_well(tally_comm *c)
{
    tly_loop_lock(&c->loop);
    comm_hear(c);
    tly_loop_unlock(&c->loop);
    return !tly_comm_failed(c);
}

int tally_comm_close(tally_comm *c)
{
    if (!c || tly_comm_is_forked(c))
        return 0; /* a forked child has nothing to close */
    int64_t deadline = tly_now() + CLOSE_S * TLY_SEC;
    tly_names_close(&c->names);

    /* After a failure this rank does not leave: ranks that have not heard of it would take that for a close. */
    if (c->local)
        tly_local_drain(c->local, deadline);
    bool local =
        c->local_has_all && !tly_stage_follows(STAGE_ENGINE); /* else the loop may have some for the engine */
    if (local && comm_is_well(c))
        tly_local_leave(c->local);
    tly_loop_lock(&c->loop);
    tly_op_drain(c);
    bool busy = tly_comm_drain(c);
    tly_loop_unlock(&c->loop);
    if (busy)
        tly_comm_wait_idle(c, deadline);
    if (c->local && !local && comm_is_well(c))
        tly_local_leave(c->local); /* operations of the loop's had to end first */

    tly_loop_lock(&c->loop);
    comm_hear(c);
    if (c->local)
        tly_local_fail(c->local, ESHUTDOWN, "the communicator was closed");
    tly_op_end_all(c, ESHUTDOWN, "the communicator was closed");
    tly_joining_end(c, ESHUTDOWN, "the communicator was closed");
    comm_hear(c); /* what these have found */
    bool failed = tly_comm_failed(c) != 0;
    if (!failed)
        comm_say_goodbye(c);
    bool stays = c->service || c->coordinator || c->member.away;
    uint64_t ops, bytes;
    tly_comm_count(c, &ops, &bytes);
    char pace[TLY_SENTENCE + 200], moved[TLY_BYTES_TEXT], cost[TLY_NUMBER_TEXT + 60];
    tly_pace_sum_up(c, pace, sizeof pace);
    comm_sum_up_cost(c, bytes, cost, sizeof cost);
    tly_loop_unlock(&c->loop);
    tly_loop_wake(&c->loop);
    /* Others may still need our service or the coordinator; and the goodbye must get out, to the next coordinator if there
     * is none now. */
    if (!failed)
        tly_comm_wait_left(c, stays ? deadline : tly_now() + TLY_SEC);
    tly_log(c->rank == 0 ? TALLY_LOG_INFO : TALLY_LOG_DEBUG, "comm",
            "the job %s after %.1f s on %d rank%s: %" PRIu64 " operation%s, %s%s%s",
            failed ? "has failed" : "is done", tly_comm_age(c), c->size, c->size == 1 ? "" : "s", ops,
            ops == 1 ? "" : "s", tly_bytes_text(bytes, moved), cost, pace);
    tly_events_close(c);
    comm_destroy(c, tly_now() + TLY_SEC);
    return 0;
}
