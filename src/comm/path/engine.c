/* engine.c - the engine of src/local/: opened with the other ranks of this machine, what it calls, and what it waits for.
 *
 * The engine calls from any thread and holds its lock meanwhile.  So a callback takes no loop's lock: what the loop has to
 * do goes into a list or a field under inbox.lock, and the loop is woken.  The tick says whom the oldest operation waits
 * for, and looks for ranks of this machine that have died. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "base/log.h"
#include "base/loop.h"
#include "comm/comm.h"
#include "comm/op/joining.h"
#include "comm/op/op.h"
#include "comm/op/tensor.h"
#include "comm/path/engine.h"
#include "comm/path/team.h"
#include "device/device.h"
#include "local/local.h"
#include "membership/member.h"
#include "membership/roster.h"
#include "ops/local.h"

enum { MEET_MS = 20000 };

static struct tally_op *engine_op_of(struct tly_local_op *local)
{
    return tly_list_entry(local, struct tally_op, shared.op);
}

/* --- called by the engine, under its lock -------------------------------------------------------- */

static void engine_ended(void *user, struct tly_local_op *local, int err, const char *sentence)
{
    struct tally_op *op = engine_op_of(local);
    op->shared.user->ended(op, err, sentence);
}

static void engine_divert(void *user, struct tly_local_op *local)
{
    struct tally_op *op = engine_op_of(local);
    op->shared.user->diverted(op);
}

static void *engine_gather(void *user, struct tly_local_op *local, const int64_t first_dims[],
                           const uint64_t bytes[])
{
    struct tally_op *op = engine_op_of(local);
    void *to = local->call->gathered(op, first_dims, bytes);
    return to && op->shared.result ? op->shared.result : to;
}

/* The loop fails us: the engine's lock is held here, and it would be taken again. */
static void engine_broken(void *user, int err, const char *sentence)
{
    tally_comm *c = user;
    tly_inbox_break(&c->inbox, err, sentence);
    tly_loop_wake(&c->loop);
}

static int engine_turn(void *user, int ms)
{
    tally_comm *c = user;
    tly_loop_turn(&c->loop, ms);
    int err = tly_comm_failed(c);
    return err ? tly_fail(err, "%s", tly_comm_sentence(c)) : 0;
}

static const struct tly_local_user calls = {
    .ended = engine_ended,
    .divert = engine_divert,
    .stand_in = tly_joining_stand_in,
    .summed = tly_team_summed,
    .place = tly_team_place,
    .gather = engine_gather,
    .broken = engine_broken,
    .turn = engine_turn};

/* --- opened, and watched ------------------------------------------------------------------------- */

int tly_engine_open(tally_comm *c)
{
    bool one = c->machines == 1 && strcmp(c->params.local, "on") == 0;
    if (!(one || tly_teams_are_listed(&c->teams)))
        return 0;
    if (c->local_size > TLY_LOCAL_RANKS) {
        tly_log(
            c->local_rank == 0 ? TALLY_LOG_WARNING : TALLY_LOG_DEBUG, "comm",
            "%d ranks are on one machine, and at most %d can share memory; they go through the network stack",
            c->local_size, TLY_LOCAL_RANKS);
        return 0;
    }
    uint32_t n = 0;
    c->watched.neighbours = calloc((size_t)c->local_size, sizeof *c->watched.neighbours);
    if (!c->watched.neighbours)
        return tly_fail(ENOMEM, "out of memory");
    for (int i = 0; i < c->size; i++)
        if (c->member.roster.ranks[i].machine == (uint32_t)c->machine)
            c->watched.neighbours[n++] = (uint32_t)i;
    char gpu[TLY_DEVICE_ADDRESS] = "";
    if (c->params.gpu_group != 1)
        tly_device_address(gpu);
    struct tly_local_config config = {
        .calls = &calls,
        .user = c,
        .rank = (uint32_t)c->local_rank,
        .ranks = n,
        .numbers = c->watched.neighbours,
        .team = c->machines > 1,
        .job = c->member.identity.incarnation,
        .secret = c->member.identity.secret,
        .gpu = gpu,
        .patience_ms = MEET_MS,
        /* Waiting for that one our loop is silent, and must not be for as long as a rank may be. */
        .stuck_ms = (int)(1000 * (c->params.dead_timeout < 10 ? c->params.dead_timeout / 2 : 5))};
    int err = tly_local_open(&config, &c->local);
    if (!err && !c->local)
        tly_log(c->local_rank == 0 ? TALLY_LOG_WARNING : TALLY_LOG_DEBUG, "comm",
                "the ranks cannot share memory: %s; they go through the network stack", tly_error());
    c->local_has_all = c->local && one && c->services == 1;
    return err;
}

/* For whom the oldest operation waits.  The lowest rank that waits says it aloud. */
static void engine_watch_oldest(tally_comm *c)
{
    struct tly_local_late l;
    struct tly_watched *w = &c->watched;
    int64_t now = c->loop.awake;
    int oldest = tly_local_late(c->local, false, &l);
    if (oldest == 0 || tly_joining_is_on(&c->joining)) {
        w->since = 0;
        return;
    }
    if (oldest < 0)
        return;
    if (!w->since || w->key != l.key || w->round != l.round) {
        w->key = l.key;
        w->round = l.round;
        w->since = now;
        w->warn_after = (int64_t)(c->params.late_warning * (double)TLY_SEC);
    }
    double seconds = (double)(now - w->since) / TLY_SEC;
    bool warn = now - w->since >= w->warn_after;
    bool over = c->params.timeout > 0 && seconds >= c->params.timeout;
    if (!warn && !over)
        return;
    char title[TLY_TITLE] = "an operation";
    tly_names_lock(&c->names);
    const struct tly_tensor *t = tly_names_find(&c->names, l.key);
    if (t)
        tly_tensor_title(t, title, sizeof title);
    tly_names_unlock(&c->names);
    if (warn) {
        w->warn_after *= 2;
        if (l.lowest == (uint32_t)c->rank && l.ranks[0])
            tly_warn("comm", "%s has waited %.0f s for rank %s", title, seconds, l.ranks);
    }
    if (over) {
        char why[TLY_SENTENCE];
        snprintf(why, sizeof why, "%s has waited %.0f s%s%s (TALLY_TIMEOUT)", title, seconds,
                 l.ranks[0] ? " for rank " : "", l.ranks);
        tly_comm_doom(c, ETIME, TLY_SEC, why);
    }
}

/* A rank of this machine that has died while an operation waits: its sockets tell of it only once it has given its memory
 * back, seconds later if that is much, and to a coordinator that is away they do not. */
static void engine_look_for_dead(tally_comm *c)
{
    struct tly_local_late oldest = {0};
    struct tly_watched *w = &c->watched;
    bool any = tly_local_late(c->local, true, &oldest) > 0;
    bool stuck = any && oldest.key == w->oldest_key && oldest.round == w->oldest_round;
    w->oldest_key = oldest.key;
    w->oldest_round = oldest.round;
    int dead = stuck ? tly_local_dead(c->local) : -1;
    if (dead < 0)
        return;
    const struct tly_roster *r = &c->member.roster;
    uint32_t rank = w->neighbours[dead];
    char why[TLY_SENTENCE];
    snprintf(why, sizeof why, "rank %u on %s has died", rank, r->services[r->ranks[rank].machine].host);
    tly_comm_doom(c, ECONNRESET, TLY_SEC, why);
}

void tly_engine_finish(tally_comm *c)
{
    free(c->watched.neighbours);
}

void tly_engine_tick(tally_comm *c)
{
    if (!c->local || tly_comm_is_doomed(c) || tly_comm_failed(c))
        return;
    engine_look_for_dead(c);
    if (!tly_comm_is_doomed(c))
        engine_watch_oldest(c); /* a team's: its home does */
}
