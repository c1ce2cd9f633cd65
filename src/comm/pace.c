/* pace.c - how fast the job goes beside what the plan predicts, and who holds it up.
 *
 * A flight is a time in which operations were under way without a pause.  One that moves nothing but push_pulls, and
 * so much of them that the plan gives it FLIGHT_MS, is bound by the network, not by latency: these are counted.
 *
 * When they take much longer than predicted, each rank tells the coordinator once how long they took, how full its credit
 * was on average, and which service's parts took by far the longest, if one's did, else where by far most of its credit
 * lay.  A card that is slower than the plan has it shows so: the ranks behind it have their credit handed over all the
 * time, while the others wait for them with theirs given back; a service behind it keeps all ranks' alike, and their
 * parts.  (So does a rank that computes longer, but its flights are shorter than the others', who wait for it in theirs.)
 * Without tallyd the card is a rank's and a service's: all parts wait for that rank's pushes, and the others' credit lies
 * at that service.  The coordinator compares (src/join/judge.c, judge_pace) and tells all. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "comm/internal.h"

enum {
    FLIGHT_MS = 10,
    ENOUGH_MS = 200,
    TELL_MS = 500,
    LEAST_PARTS = 8,
    PAUSE_MS = 100,  /* so much longer, and so many times as long as usual, takes a flight with a pause; */
    PAUSE_TIMES = 4, /* what is shorter than PAUSE_MS does not make TELL_MS look slow */
    MOST_PAUSES = 1, /* in a row; two are a slow card */
};

/* Times predicted, over reached: what is between these goes as predicted. */
#define FAST 1.2
#define SLOW (1 / FAST)

int tly_pace_init(tally_comm *c)
{
    struct pace *p = &c->pace;
    free(p->machine); /* figures are of one epoch */
    *p = (struct pace){.slow = -1, .machine = calloc(c->member.roster.service_count, sizeof *p->machine)};
    if (!p->machine)
        return tly_fail(ENOMEM, "out of memory");
    for (int i = 0; i < c->services; i++) {
        struct peer *peer = &c->peers[i];
        peer->waited = peer->parts = 0;
        peer->held = 0;
    }
    tly_roster_machines(&c->member.roster, p->machine);
    double cost = tly_plan_cost(c->services, p->machine, c->weight, NULL);
    p->predicted = isnan(cost) ? 0 : cost;
    return 0;
}

void tly_pace_finish(tally_comm *c)
{
    free(c->pace.machine);
    c->pace.machine = NULL;
}

static int64_t predicted_ns(const struct pace *p, uint64_t bytes)
{
    return (int64_t)(p->predicted * (double)bytes * (double)TLY_SEC);
}

static double gbits(double seconds_per_byte)
{
    return 8e-9 / seconds_per_byte;
}

double tly_pace_reached(const tally_comm *c)
{
    const struct pace *p = &c->pace;
    bool enough = p->bytes && predicted_ns(p, p->bytes) >= ENOUGH_MS * TLY_MS;
    return enough ? (double)p->ns / (double)TLY_SEC / (double)p->bytes : 0;
}

int tly_pace_suspect(const tally_comm *c)
{
    double wait[TLY_MAX_SERVICES], lies[TLY_MAX_SERVICES];
    for (int i = 0; i < c->services; i++) {
        const struct peer *peer = &c->peers[i];
        bool enough = peer->parts >= LEAST_PARTS && c->weight[i] > 0; /* else it has left */
        wait[i] = enough ? (double)peer->waited / (double)peer->parts : -1;
        lies[i] = enough ? peer->held / c->weight[i] : -1; /* it sends in proportion */
    }
    int who = tly_plan_standout(c->services, wait);
    /* Else all parts wait for the same machine's pushes, too. */
    return who < 0 ? tly_plan_standout(c->services, lies) : who;
}

/* How it has gone here, to the coordinator. */
static void tell(tally_comm *c)
{
    struct pace *p = &c->pace;
    double took = (double)p->ns / (double)predicted_ns(p, p->bytes);
    double held = p->held * 1000 / (double)p->ns / (double)c->credit_bytes;
    int who = tly_pace_suspect(c);
    p->told = true;
    tly_member_tell_pace(&c->member, c->epoch->number, (uint32_t)(fmin(took, 1e6) * 1000),
                         (uint32_t)(fmin(held, 1) * 1000), who < 0 ? TLY_NO_SERVICE : (uint32_t)who);
}

static void machine_name(const tally_comm *c, int i, char *out, size_t len)
{
    const struct tly_roster_service *s = &c->member.roster.services[i];
    if (s->role == TLY_ROLE_RANK)
        snprintf(out, len, "the machine of rank %u (%s)", s->rank, s->host);
    else
        snprintf(out, len, "tallyd %d on %s", i - c->machines, s->host);
}

/* Bytes/s that have crossed a machine's card each way. */
static double carried_by(const tally_comm *c, int machine)
{
    const struct pace *p = &c->pace;
    return tly_plan_traffic(c->services, p->machine, c->weight, machine) * (double)p->bytes /
           ((double)p->ns / (double)TLY_SEC);
}

/* All cards are as slow.  The figures are those of the card that the plan gives most to do. */
static void judge_all(tally_comm *c)
{
    struct pace *p = &c->pace;
    int busiest = 0;
    tly_plan_cost(c->services, p->machine, c->weight, &busiest);
    p->half = true;
    double carried = carried_by(c, busiest);
    double said = tly_plan_traffic(c->services, p->machine, c->weight, busiest) / p->predicted;
    if (c->rank == 0)
        tly_warn("comm",
                 "all network cards carry about half of what was said or measured: %.3g Gbit/s each way "
                 "instead of %.3g, and no machine holds the others up; is TALLY_BANDWIDTH right, and does "
                 "anything else use the network?",
                 carried * 8e-9, said * 8e-9);
}

void tly_pace_judged(void *user, uint32_t machine)
{
    tally_comm *c = user;
    struct pace *p = &c->pace;
    if (p->slow >= 0 || p->half || !p->ns)
        return;
    if (machine == TLY_NO_SERVICE)
        judge_all(c);
    if (machine >= (uint32_t)c->services)
        return;
    p->slow = (int)machine;
    char name[200];
    double carried = carried_by(c, p->slow);
    machine_name(c, p->slow, name, sizeof name);
    if (c->rank == 0) /* the others see the same */
        tly_warn("comm",
                 "%s is slower than it said: of %.3g Gbit/s each way it carries %.3g, and all wait for it; "
                 "TALLY_BANDWIDTH there (or TALLY_SUM_RATE) would leave more to others",
                 name, p->machine[p->slow].bandwidth * 8e-9, carried * 8e-9);
}

void tly_pace_enters(tally_comm *c, const struct tally_op *op)
{
    struct pace *p = &c->pace;
    if (p->predicted == 0)
        return;
    if (c->active_ops.next->next == &c->active_ops) { /* the first of a flight */
        p->since = tly_now();
        p->flight_held = -(c->in_flight * ((uint64_t)p->since / 1000));
        p->flight = 0;
        p->counts = true;
        for (int i = 0; i < c->services; i++) {
            struct peer *peer = &c->peers[i];
            peer->flight = (struct stay){0};
            peer->flight_held = -(peer->in_flight * ((uint64_t)p->since / 1000));
        }
    }
    p->flight += op->bytes;
    p->counts &= op->kind == TALLY_PUSH_PULL && op->group->size == c->size && !op->mark;
}

/* Did some process stand still in this flight, ours or another (SIGSTOP, swapped out, suspended)?  Then it took several times
 * as long as usual, and the flights around it did not. */
static bool is_pause(struct pace *p, int64_t took)
{
    double usual = p->bytes ? (double)p->ns / (double)predicted_ns(p, p->bytes) : 1;
    double due = (usual > 1 ? usual : 1) * (double)predicted_ns(p, p->flight);
    bool odd = (double)took > PAUSE_TIMES * due && (double)took > due + PAUSE_MS * TLY_MS;
    p->pauses = odd ? p->pauses + 1 : 0;
    return odd && p->pauses <= MOST_PAUSES;
}

void tly_pace_leaves(tally_comm *c, const struct tally_op *op)
{
    struct pace *p = &c->pace;
    p->counts &= op->status == 0;
    if (p->predicted == 0 || !tly_list_empty(&c->active_ops) || !p->counts ||
        predicted_ns(p, p->flight) < FLIGHT_MS * TLY_MS)
        return;
    int64_t now = tly_now();
    uint64_t us = (uint64_t)now / 1000;
    if (is_pause(p, now - p->since))
        return;
    p->bytes += p->flight;
    p->ns += now - p->since;
    p->held += (double)(p->flight_held + c->in_flight * us);
    for (int i = 0; i < c->services; i++) {
        struct peer *peer = &c->peers[i];
        peer->held += (double)(peer->flight_held + peer->in_flight * us);
        if (peer->flight.came != peer->flight.went) /* some were asked for again */
            continue;
        peer->waited += peer->flight.us;
        peer->parts += peer->flight.went;
    }
    int64_t due = predicted_ns(p, p->bytes);
    if (!p->told && due >= TELL_MS * TLY_MS && (double)due < SLOW * (double)p->ns)
        tell(c);
}

void tly_pace_foretell(const tally_comm *c, char *out, size_t len)
{
    double s = c->pace.predicted;
    out[0] = '\0';
    if (s > 0)
        snprintf(out, len, "; at best %.3g s for 1 GB, %.3g Gbit/s", s * 1e9, gbits(s));
}

void tly_pace_sum_up(const tally_comm *c, char *out, size_t len)
{
    const struct pace *p = &c->pace;
    double reached = tly_pace_reached(c);
    char who[240] = "";
    out[0] = '\0';
    if (!(reached > 0))
        return;
    double ratio = p->predicted / reached;
    if (ratio > FAST)
        snprintf(who, sizeof who, ", cards are faster than was said or measured");
    else if (ratio < SLOW && p->slow >= 0) {
        snprintf(who, sizeof who, ", held up by ");
        machine_name(c, p->slow, who + strlen(who), sizeof who - strlen(who));
    } else if (ratio < SLOW && c->named_at)
        snprintf(who, sizeof who, ", held up by rank %u", c->straggler); /* a warning has said why */
    else if (ratio < SLOW && p->half)
        snprintf(who, sizeof who, ", all cards carry about half");
    else if (ratio < SLOW)
        snprintf(who, sizeof who, ", by which machine is not known");
    snprintf(out, len, "; large tensors at %.3g s for 1 GB, %.3g Gbit/s (predicted %.3g s, %.3g Gbit/s)%s",
             reached * 1e9, gbits(reached), p->predicted * 1e9, gbits(p->predicted), who);
}
