/* pace.c - how fast the job goes beside what the plan predicts.
 *
 * A flight is a time in which operations were under way without a pause.  One that moves nothing but push_pulls, and
 * so much of them that the plan gives it FLIGHT_MS, is bound by the network, not by latency: these are counted.  The
 * coordinator says who holds the job up (src/membership/slow.c).
 *
 * A pause is no sample.  A rank that was stopped for 3 s made the pace of 0.5 s of traffic look like a slow card.  So a
 * flight that takes PAUSE_TIMES as long as usual, and PAUSE_MS more, is left out, but not two in a row: a card that is slow
 * is slow in the second, too.  pace_test.c shows it (commit 54c0b93).  Rejected: each rank tells the others of its pauses (a
 * rank beside a machine's first is behind no connection that others see); medians over several flights (large models have
 * too few). */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/text.h"
#include "comm/comm.h"
#include "comm/epoch/epoch.h"
#include "comm/epoch/pace.h"
#include "comm/epoch/traffic.h"
#include "comm/op/active.h"
#include "comm/op/group.h"
#include "comm/op/handle.h"
#include "comm/op/op.h"
#include "membership/roster.h"
#include "membership/status.h"
#include "plan/plan.h"

enum {
    FLIGHT_MS = 10,
    ENOUGH_MS = 200,
    PAUSE_MS = 100, /* so much longer, and so many times as long as usual, takes a flight with a pause */
    PAUSE_TIMES = 4,
    MOST_PAUSES = 1, /* in a row; two are a slow card */
};

/* Times predicted, over reached: what is between these goes as predicted. */
#define FAST 1.2
#define SLOW (1 / FAST)

int tly_pace_init(tally_comm *c)
{
    struct tly_pace *p = &c->pace;
    free(p->machine); /* figures are of one epoch */
    *p = (struct tly_pace){.machine = calloc(c->member.roster.service_count, sizeof *p->machine)};
    if (!p->machine)
        return tly_fail(ENOMEM, "out of memory");
    tly_roster_machines(&c->member.roster, p->machine);
    double cost = tly_plan_cost(c->services, p->machine, c->epoch->weight, NULL);
    p->predicted = isnan(cost) ? 0 : cost;
    return 0;
}

void tly_pace_finish(tally_comm *c)
{
    free(c->pace.machine);
    c->pace.machine = NULL;
}

static int64_t pace_predicted_ns(const struct tly_pace *p, uint64_t bytes)
{
    return (int64_t)(p->predicted * (double)bytes * (double)TLY_SEC);
}

static double pace_gbits(double seconds_per_byte)
{
    return 8e-9 / seconds_per_byte;
}

double tly_pace_reached(const tally_comm *c)
{
    const struct tly_pace *p = &c->pace;
    bool enough = p->bytes && pace_predicted_ns(p, p->bytes) >= ENOUGH_MS * TLY_MS;
    return enough ? (double)p->ns / (double)TLY_SEC / (double)p->bytes : 0;
}

void tly_pace_enters(tally_comm *c, const struct tally_op *op)
{
    struct tly_pace *p = &c->pace;
    bool first = tly_active_is_one(&c->active);
    tly_traffic_enters(c, op);
    if (p->predicted == 0)
        return;
    if (first) {
        p->since = tly_now();
        p->flight = 0;
        p->counts = true;
    }
    p->flight += op->bytes;
    p->counts &= tly_call_is_sum_for_all(op->call) && op->group->size == c->size && !op->mark;
}

/* Did some process stand still in this flight, ours or another (SIGSTOP, swapped out, suspended)?  Then it took several times
 * as long as usual, and the flights around it did not. */
static bool pace_is_pause(struct tly_pace *p, int64_t took)
{
    double usual = p->bytes ? (double)p->ns / (double)pace_predicted_ns(p, p->bytes) : 1;
    double due = (usual > 1 ? usual : 1) * (double)pace_predicted_ns(p, p->flight);
    bool odd = (double)took > PAUSE_TIMES * due && (double)took > due + PAUSE_MS * TLY_MS;
    p->pauses = odd ? p->pauses + 1 : 0;
    return odd && p->pauses <= MOST_PAUSES;
}

void tly_pace_leaves(tally_comm *c, const struct tally_op *op)
{
    struct tly_pace *p = &c->pace;
    bool last = tly_active_is_empty(&c->active);
    tly_traffic_leaves(c, op);
    p->counts &= tly_handle_status(&op->handle) == 0;
    if (p->predicted == 0 || !last || !p->counts || pace_predicted_ns(p, p->flight) < FLIGHT_MS * TLY_MS)
        return;
    int64_t took = tly_now() - p->since;
    if (pace_is_pause(p, took))
        return;
    p->bytes += p->flight;
    p->ns += took;
}

void tly_pace_foretell(const tally_comm *c, char *out, size_t len)
{
    double s = c->pace.predicted;
    char takes[TLY_NUMBER_TEXT];
    out[0] = '\0';
    if (s > 0)
        snprintf(out, len, "; at best %s s for 1 GB, %.3g Gbit/s", tly_number_text(s * 1e9, takes),
                 pace_gbits(s));
}

void tly_pace_sum_up(const tally_comm *c, char *out, size_t len)
{
    const struct tly_pace *p = &c->pace;
    double reached = tly_pace_reached(c);
    char who[TLY_SENTENCE] = "", slow[TLY_SENTENCE - 32];
    out[0] = '\0';
    if (!(reached > 0))
        return;
    double ratio = p->predicted / reached;
    if (ratio > FAST)
        snprintf(who, sizeof who, ", cards are faster than was said or measured");
    else if (ratio < SLOW && c->member.slow.why) {
        tly_slow_text(&c->member.slow, slow, sizeof slow);
        snprintf(who, sizeof who, ", held up by %s", slow);
    } else if (ratio < SLOW)
        snprintf(who, sizeof who, ", by which machine is not known");
    char took[TLY_NUMBER_TEXT], foretold[TLY_NUMBER_TEXT];
    snprintf(out, len, "; large tensors at %s s for 1 GB, %.3g Gbit/s (predicted %s s, %.3g Gbit/s)%s",
             tly_number_text(reached * 1e9, took), pace_gbits(reached),
             tly_number_text(p->predicted * 1e9, foretold), pace_gbits(p->predicted), who);
}
