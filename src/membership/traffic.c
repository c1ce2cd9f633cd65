/* traffic.c - ranks' reports of their traffic, read with care and summed up by card and by service. */
#include "membership/traffic.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LINE_BYTES = 8 + 4 + 8 + 4 + 4 };

/* Pushes lie at a service that is slow to take them off the connection: its rank waits for that nearly all the time, and the
 * network not even for this part of it. */
#define HELD .9
#define ON_ITS_WAY .6
#define STILL .9  /* share of the time with a backlog */
#define LIVELY .1 /* share of the time with operations; ranks with less may miss each other's traffic */

void tly_traffic_write(struct tly_writer *w, const struct tly_traffic *t)
{
    tly_write32(w, t->epoch);
    tly_write32(w, t->epochs);
    tly_write32(w, t->period_us);
    tly_write32(w, t->active_us);
    tly_write64(w, t->moved);
    tly_write64(w, t->stale);
    tly_write32(w, t->count);
    for (uint32_t i = 0; i < t->count; i++) {
        const struct tly_traffic_line *l = &t->line[i];
        tly_write64(w, l->out.bytes);
        tly_write32(w, l->out.busy_us);
        tly_write64(w, l->in.bytes);
        tly_write32(w, l->in.busy_us);
        tly_write32(w, l->held_us);
    }
}

void tly_traffic_finish(struct tly_traffic *t)
{
    free(t->line);
    *t = (struct tly_traffic){0};
}

/* A period of the connection may be longer than that of the operations, and lag behind it a little. */
static bool traffic_is_sane(const struct tly_traffic *t, const struct tly_traffic_way *s)
{
    return (s->busy_us <= TLY_TRAFFIC_LONGEST_US || s->busy_us == TLY_TRAFFIC_UNKNOWN) &&
           (double)s->bytes * 8e6 <= (double)TLY_MAX_RATE * t->period_us;
}

int tly_traffic_read(struct tly_reader *r, struct tly_traffic *out)
{
    struct tly_traffic t = {.epoch = tly_read32(r)};
    t.epochs = tly_read32(r);
    t.period_us = tly_read32(r);
    t.active_us = tly_read32(r);
    t.moved = tly_read64(r);
    t.stale = tly_read64(r);
    t.count = tly_read32(r);
    if (r->failed || !t.epochs || t.active_us < TLY_TRAFFIC_LEAST_US / 2 || t.active_us > t.period_us ||
        t.period_us < TLY_TRAFFIC_EVERY_US / 2 || t.period_us > TLY_TRAFFIC_LONGEST_US || t.stale > t.moved ||
        !t.count || t.count > TLY_MAX_MACHINES || t.count > r->len / LINE_BYTES ||
        (double)t.moved * 8e6 > (double)TLY_MAX_RATE * t.period_us)
        return -EPROTO;
    t.line = calloc(t.count, sizeof *t.line);
    if (!t.line)
        return -ENOMEM;
    bool sane = true;
    for (uint32_t i = 0; i < t.count; i++) {
        struct tly_traffic_line *l = &t.line[i];
        l->out.bytes = tly_read64(r);
        l->out.busy_us = tly_read32(r);
        l->in.bytes = tly_read64(r);
        l->in.busy_us = tly_read32(r);
        l->held_us = tly_read32(r);
        sane &= traffic_is_sane(&t, &l->out) && traffic_is_sane(&t, &l->in) &&
                l->held_us <= TLY_TRAFFIC_LONGEST_US;
    }
    if (r->failed || !sane) {
        tly_traffic_finish(&t);
        return -EPROTO;
    }
    *out = t;
    return 0;
}

void tly_steps_write(struct tly_writer *w, const struct tly_steps *s)
{
    tly_write32(w, s->count);
    tly_write64(w, s->own_us);
    tly_write64(w, s->waited_us);
    tly_write64(w, s->paged_us);
    tly_write64(w, s->us);
}

int tly_steps_read(struct tly_reader *r, struct tly_steps *out)
{
    struct tly_steps s = {.count = tly_read32(r)};
    s.own_us = tly_read64(r);
    s.waited_us = tly_read64(r);
    s.paged_us = tly_read64(r);
    s.us = tly_read64(r);
    if (r->failed || tly_steps_check(&s) != 0)
        return -EPROTO;
    *out = s;
    return 0;
}

/* --- sums ------------------------------------------------------------------------------------------- */

/* The directions of a card carry about as many bytes: sums of all ranks for all ranks do, and a reduce does not. */
#define ALIKE .8

/* Connections in one direction: the sum of rates, and the mean of the fractions of time, weighted by what the plan has go
 * over each: so a card is busy only if most that is to cross it is, also in a moment in which one rank alone has traffic. */
struct flow {
    double rate, busy, held;
    double weight, known; /* of all, and of those of which something is known */
};

/* If so much is known the rest is taken to be alike; with less the sample says nothing of the whole.  (A service behind a slow
 * card is the one whose answers come too late.) */
#define ENOUGH .6

static const struct tly_sight unseen = {NAN, NAN, NAN, NAN};

/* us: the time that counts; weight: the service's. */
static void traffic_add(struct flow *f, double us, double weight, const struct tly_traffic_way *s,
                        uint32_t held_us)
{
    f->weight += weight;
    if (s->busy_us == TLY_TRAFFIC_UNKNOWN)
        return;
    f->known += weight;
    f->rate += (double)s->bytes * 1e6 / us;
    f->busy += weight * fmin(1, (double)s->busy_us / us);
    f->held += weight * fmin(1, (double)held_us / us);
}

static double traffic_busy(const struct flow *f)
{
    return f->known > 0 ? f->busy / f->known : 0;
}

static bool traffic_is_partial(const struct flow *f)
{
    return f->known < ENOUGH * f->weight;
}

static double traffic_rate(const struct flow *f)
{
    return f->known > 0 ? f->rate * f->weight / f->known : f->rate;
}

/* A card carries in one direction what it carries in the other, so the direction with more bytes tells its rate.  The other
 * direction may be as busy: it waits for other cards, and its acknowledgements queue behind the other direction's data. */
static struct tly_sight traffic_card(const struct flow *out, const struct flow *in)
{
    if (traffic_is_partial(out) || traffic_is_partial(in))
        return unseen;
    bool alike =
        fmin(traffic_rate(out), traffic_rate(in)) > ALIKE * fmax(traffic_rate(out), traffic_rate(in));
    return (struct tly_sight){.rate = fmax(traffic_rate(out), traffic_rate(in)),
                              .busy = fmax(traffic_busy(out), traffic_busy(in)),
                              .both = (traffic_busy(out) + traffic_busy(in)) / 2,
                              .late = alike ? traffic_busy(in) - traffic_busy(out) : 0};
}

static struct tly_sight traffic_sums(const struct flow *f)
{
    double held = f->known > 0 ? f->held / f->known : 0;
    if (traffic_is_partial(f))
        return unseen;
    double waits = held > HELD && traffic_busy(f) < ON_ITS_WAY ? held : 0;
    return (struct tly_sight){.rate = traffic_rate(f), .busy = waits, .both = waits};
}

bool tly_traffic_sum(const struct tly_roster *r, const struct tly_traffic *const *of,
                     struct tly_replan_service *out, double *goodput)
{
    struct flow *flow = calloc(3 * (size_t)r->service_count, sizeof *flow);
    struct flow *cards_out = flow, *cards_in = flow ? flow + r->service_count : NULL,
                *pushes = flow ? flow + 2 * (size_t)r->service_count : NULL;
    double moved = 0, most = 0, landed = 0, stale = 0;
    int ranks = 0;
    for (uint32_t i = 0; i < r->rank_count; i++)
        if (of[i] && of[i]->count == r->service_count)
            most = fmax(most, (double)of[i]->active_us / of[i]->period_us);
    for (uint32_t i = 0; flow && i < r->rank_count; i++) {
        const struct tly_traffic *t = of[i];
        if (!t || t->count != r->service_count)
            continue;
        uint32_t own = r->services[r->ranks[i].machine].card;
        double us = most * t->period_us;
        moved += (double)t->moved * 1e6 / us;
        landed += (double)t->moved;
        stale += (double)t->stale;
        ranks++;
        for (uint32_t s = 0; s < t->count; s++) {
            const struct tly_traffic_line *l = &t->line[s];
            uint32_t theirs = r->services[s].card;
            double weight = r->services[s].weight;
            if (theirs == own)
                continue; /* it crosses no card */
            traffic_add(&cards_out[own], us, weight, &l->out, 0);
            traffic_add(&cards_in[theirs], us, weight, &l->out, 0);
            traffic_add(&cards_out[theirs], us, weight, &l->in, 0);
            traffic_add(&cards_in[own], us, weight, &l->in, 0);
            traffic_add(&pushes[s], us, weight, &l->out, l->held_us);
        }
    }
    bool still = landed == 0, partial = ranks < (int)r->rank_count, waits = still && partial;
    for (uint32_t s = 0; s < r->service_count; s++) {
        out[s].card = flow ? traffic_card(&cards_out[s], &cards_in[s]) : unseen;
        still = still && (waits || !flow || cards_out[s].weight == 0 || !(out[s].card.busy < STILL));
        out[s].sums = flow ? traffic_sums(&pushes[s]) : unseen;
    }
    *goodput = ranks ? moved / ranks : 0;
    free(flow);
    return !still && 2 * stale <= landed && !(partial && most < LIVELY);
}
