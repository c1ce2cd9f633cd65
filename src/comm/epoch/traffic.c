/* traffic.c - reports of this rank's traffic to the coordinator, which plans by them (src/membership/adapt.c).
 *
 * A rank is active while an operation that goes by the plan is under way: not by a barrier alone, nor by a receive that
 * waits for its message.  Every 400 ms, if it was active for at least 100 ms, the rank takes a glance: it reads from the kernel
 * how much each connection has sent and for how long it had something to send.  It counts itself how much has come, and
 * asks each service for how long results were on their way.  When all have answered, the difference to the glance before
 * goes to the coordinator.  A glance costs a system call and two small frames for each connection.  A service that
 * lies changes how busy its own card seems and, by its part of the inflow, this rank's.  It changes no rate (docs/why/membership.md).
 *
 * A rank that has taken no glance for five seconds says every 400 ms that it has no traffic, unless it has some just then.  A
 * sample that has begun before does not wait for it.
 *
 * Every 400 ms it also says how much of its steps it has taken for itself.  A step is a flight (pace.c) and the time before
 * it.  The rank's own time is that from the end of the flight before to the last submission of this one.  All ranks' steps
 * take equally long, so own times compare without a common clock.  A slow network delays a rank's results and its next
 * submissions alike, and does not count as its own time.  The kernel says how much of it the application did not compute but
 * waited for a processor or for memory (base/stalls.c).
 *
 * All of it belongs to the rank's loop. */
#include <stdlib.h>

#include "base/clock.h"
#include "base/log.h"
#include "comm/comm.h"
#include "comm/epoch/epoch.h"
#include "comm/epoch/traffic.h"
#include "comm/op/active.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/path/peer.h"
#include "membership/member.h"
#include "membership/traffic.h"
#include "transport/transport.h"
#include "wire/frame.h"

enum {
    EVERY_MS = TLY_TRAFFIC_EVERY_US / 1000,
    PATIENCE_MS = 1000, /* for services' answers */
    QUIET_MS = 5000,    /* without a glance */
    LITTLE_US = TLY_TRAFFIC_LEAST_US * EVERY_MS / QUIET_MS,
};

static uint64_t traffic_us_now(void)
{
    return (uint64_t)tly_now() / 1000;
}

void tly_traffic_enters(tally_comm *c, const struct tally_op *op)
{
    struct tly_own_traffic *t = &c->traffic;
    uint64_t submitted = (uint64_t)tly_wait_since(&op->wait) / 1000;
    if (op->call->moves && t->open++ == 0)
        t->active_since = traffic_us_now();
    if (submitted > t->submitted)
        t->submitted = submitted;
    t->patient |= tly_wait_is_patient(&op->wait);
}

/* The flight is over: with the time before it, it is a step. */
static void traffic_count_step(struct tly_own_traffic *t, uint64_t now)
{
    if (t->over && !t->patient) {
        t->steps.count++;
        t->steps.own_us += t->submitted > t->over ? t->submitted - t->over : 0;
        t->steps.us += now - t->over;
    }
    t->over = t->patient ? 0 : now;
    t->patient = false;
}

void tly_traffic_leaves(tally_comm *c, const struct tally_op *op)
{
    struct tly_own_traffic *t = &c->traffic;
    uint64_t now = traffic_us_now();
    if (op->call->moves && --t->open == 0) {
        t->active_us += now - t->active_since;
        t->active_since = 0;
    }
    if (tly_active_is_empty(&c->active))
        traffic_count_step(t, now);
}

void tly_traffic_landed(tally_comm *c, const struct tly_part *p)
{
    c->traffic.moved += p->result_length;
    if (p->op->epoch != c->epoch)
        c->traffic.stale += p->result_length;
}

void tly_traffic_admitted(struct tly_peer *p)
{
    struct tly_glances *g = &p->glances;
    if (!g->held_since)
        g->held_since = traffic_us_now();
}

void tly_traffic_accepted(struct tly_peer *p)
{
    struct tly_glances *g = &p->glances;
    if (p->queue.in_flight || !g->held_since)
        return;
    g->held_us += traffic_us_now() - g->held_since;
    g->held_since = 0;
}

void tly_traffic_begin(tally_comm *c)
{
    c->traffic.asked_at = 0;
    c->traffic.begun = false;
    for (int i = 0; i < c->services; i++)
        c->peers[i].glances.any = c->peers[i].glances.comparable = false;
}

/* Rank 0 is connected to every machine, and says it for all. */
static void traffic_say_blind(tally_comm *c, const char *who)
{
    if (c->rank == 0 && !c->traffic.is_blind)
        tly_warn(
            "comm",
            "the kernel of %s does not tell how busy a connection is (Linux 4.10 and newer do): the split "
            "does not follow network cards there, and none of them is named if it holds the job up",
            who);
    c->traffic.is_blind = true;
}

/* A connection that is new cannot be compared with what the one before has sent. */
static void traffic_glance(struct tly_peer *p, uint64_t now)
{
    struct tly_glances *g = &p->glances;
    struct tly_glance seen = {.received = p->link ? tly_link_bytes(p->link, false) : 0,
                              .held_us = g->held_us + (g->held_since ? now - g->held_since : 0)};
    bool crosses = p->open && tly_link_is_open(p->link) && !tly_link_is_inside(p->link);
    bool can = crosses && tly_link_load(p->link, &seen.out) == 0;
    if (crosses && !can)
        traffic_say_blind(p->comm, "this host");
    g->comparable = can && g->any && g->answered && seen.out.bytes >= g->seen.out.bytes &&
                    seen.out.busy_us >= g->seen.out.busy_us && seen.held_us >= g->seen.held_us &&
                    seen.received >= g->seen.received;
    g->before = g->seen;
    g->seen = seen;
    g->any = can;
    g->answered = false;
    if (!can)
        return;
    struct tly_frame f = {.type = TLY_PACE, .flags = TLY_REQUEST};
    tly_peer_post(p, &f, NULL, 0);
}

void tly_traffic_answered(struct tly_peer *p, uint64_t sending_us)
{
    struct tly_glances *g = &p->glances;
    g->seen.sending_us = sending_us;
    g->answered = true;
    if (sending_us == UINT64_MAX)
        traffic_say_blind(p->comm, p->name);
}

static uint32_t traffic_since(uint64_t now, uint64_t before)
{
    uint64_t passed = now > before ? now - before : 0;
    return passed < TLY_TRAFFIC_LONGEST_US ? (uint32_t)passed : TLY_TRAFFIC_LONGEST_US;
}

static void traffic_fill(const struct tly_peer *p, struct tly_traffic_line *l)
{
    const struct tly_glance *now = &p->glances.seen, *then = &p->glances.before;
    if (!p->glances.comparable) {
        bool within =
            p->link && tly_link_is_open(p->link) && tly_link_is_inside(p->link); /* it crosses no card */
        l->out.busy_us = l->in.busy_us = within ? 0 : TLY_TRAFFIC_UNKNOWN;
        return;
    }
    l->in.busy_us = TLY_TRAFFIC_UNKNOWN;
    l->out = (struct tly_traffic_way){now->out.bytes - then->out.bytes,
                                      traffic_since(now->out.busy_us, then->out.busy_us)};
    l->held_us = traffic_since(now->held_us, then->held_us);
    if (p->glances.answered && now->sending_us != UINT64_MAX && now->sending_us >= then->sending_us)
        l->in = (struct tly_traffic_way){now->received - then->received,
                                         traffic_since(now->sending_us, then->sending_us)};
}

static void traffic_tell(tally_comm *c)
{
    struct tly_own_traffic *t = &c->traffic;
    struct tly_traffic told = {
        .epoch = c->epoch->number,
        .epochs = tly_epochs_count(&c->epochs),
        .period_us = traffic_since(t->seen_at, t->before_at),
        .active_us = traffic_since(t->active_seen, t->active_before),
        .moved = t->moved_seen - t->moved_before,
        .stale = t->stale_seen - t->stale_before,
        .count = (uint32_t)c->services,
        .line = calloc((size_t)c->services, sizeof *told.line)};
    for (int i = 0; told.line && i < c->services; i++)
        traffic_fill(&c->peers[i], &told.line[i]);
    if (told.active_us > told.period_us)
        told.active_us = told.period_us;
    if (told.line && told.active_us)
        tly_member_tell_traffic(&c->member, &told);
    free(told.line);
}

static bool traffic_all_answered(const tally_comm *c)
{
    for (int i = 0; i < c->services; i++)
        if (c->peers[i].glances.any && !c->peers[i].glances.answered)
            return false;
    return true;
}

static void traffic_look(tally_comm *c, int64_t now, uint64_t active)
{
    struct tly_own_traffic *t = &c->traffic;
    t->looked_at = t->asked_at = now;
    t->before_at = t->seen_at;
    t->seen_at = (uint64_t)now / 1000;
    t->active_before = t->active_seen;
    t->active_seen = active;
    t->moved_before = t->moved_seen;
    t->moved_seen = t->moved;
    t->stale_before = t->stale_seen;
    t->stale_seen = t->stale;
    for (int i = 0; i < c->services; i++)
        traffic_glance(&c->peers[i], (uint64_t)now / 1000);
}

static void traffic_tell_steps(tally_comm *c, int64_t now)
{
    struct tly_own_traffic *t = &c->traffic;
    struct tly_stalls before = t->stalls;
    tly_stalls_read(&t->stalls);
    if (t->told_at) {
        struct tly_stalled part = tly_stalls_between(&before, &t->stalls, t->steps.own_us);
        t->steps.waited_us = part.waited_us;
        t->steps.paged_us = part.paged_us;
        tly_member_tell_steps(&c->member, &t->steps);
    }
    t->steps = (struct tly_steps){0};
    t->told_at = now;
}

void tly_traffic_tick(tally_comm *c)
{
    struct tly_own_traffic *t = &c->traffic;
    int64_t now = tly_now();
    uint64_t active = t->active_us + (t->active_since ? (uint64_t)now / 1000 - t->active_since : 0);
    if (tly_comm_failed(c))
        return;
    if (t->steps.count && now - t->told_at >= EVERY_MS * TLY_MS)
        traffic_tell_steps(c, now);
    if (c->machines < 2)
        return;
    if (!t->looked_at)
        t->looked_at = now;
    if (t->asked_at) {
        if (!traffic_all_answered(c) && now - t->asked_at < PATIENCE_MS * TLY_MS)
            return;
        if (t->begun)
            traffic_tell(c);
        t->begun = true;
        t->asked_at = 0;
    }
    if (now - t->looked_at >= EVERY_MS * TLY_MS && active - t->active_seen >= TLY_TRAFFIC_LEAST_US)
        traffic_look(c, now, active);
    if (now - t->quiet_at >= EVERY_MS * TLY_MS) {
        if (now - t->looked_at >= QUIET_MS * TLY_MS && active - t->active_before_quiet < LITTLE_US)
            tly_member_tell_quiet(&c->member, tly_epochs_count(&c->epochs));
        t->quiet_at = now;
        t->active_before_quiet = active;
    }
}
