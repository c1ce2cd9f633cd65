/* measure.c - measuring network cards when a job starts: what is said, counting, and who with whom; no I/O.  streams.c
 * sends. */
#include "membership/measure.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

/* What a token bucket lets pass at once, and TCP's slow start, are over after SKIP_MS.  Then so long and so much is
 * counted that single packets and the moments in which a processor is busy elsewhere do not matter, but not longer than
 * MOST_MS: that is short beside what a slow network takes for a step. */
enum { SKIP_MS = 15, LEAST_MS = 20, MOST_MS = 60, ENOUGH_BYTES = 2 << 20 };

/* A card that no card of another group is like may be so, or a busy machine has spoilt its rounds: it is measured again, in
 * at most so many groups one after the other. */
enum { SECOND_LOOK = 3 };
#define ONE_WAY 1.5

void tly_measure_write(struct tly_writer *w, const struct tly_measure *m)
{
    tly_write32(w, m->step);
    tly_write32(w, m->round);
    tly_write32(w, m->count);
    for (uint32_t i = 0; i < m->count; i++) {
        if (m->step == TLY_MEASURE_MEET) {
            tly_endpoints_write(w, &m->to[i]);
        } else {
            tly_write64(w, m->rate[i]);
        }
    }
}

int tly_measure_read(struct tly_reader *r, struct tly_measure *m)
{
    struct tly_measure x = {.step = tly_read32(r)};
    x.round = tly_read32(r);
    x.count = tly_read32(r);
    bool lists = x.step == TLY_MEASURE_MEET || x.step == TLY_MEASURE_COUNTED;
    if (r->failed || x.step > TLY_MEASURE_COUNTED || !x.round || x.count > (lists ? TLY_MEASURE_MOST : 0))
        return -EPROTO;
    for (uint32_t i = 0; i < x.count; i++) {
        int err = 0;
        if (x.step == TLY_MEASURE_MEET)
            err = tly_endpoints_read(r, &x.to[i]);
        else
            x.rate[i] = tly_read64(r);
        if (err || r->failed || x.rate[i] > TLY_MAX_RATE)
            return -EPROTO;
    }
    *m = x;
    return 0;
}

static uint64_t measure_since_seen(const struct tly_meter_flow *f, uint64_t bytes)
{
    return bytes > f->seen ? bytes - f->seen : 0; /* where the kernel ceases to say it, there may be less */
}

enum tly_meter_due tly_meter_take(struct tly_meter *m, struct tly_meter_flow *f, uint32_t round,
                                  uint32_t streams, uint64_t bytes, int64_t now)
{
    if (round > m->round)
        *m = (struct tly_meter){.round = round, .began = now};
    if (!round || round < m->round) /* none; or what was under way when the next round began */
        return TLY_METER_NOTHING;
    if (f->round != round) {
        f->round = round;
        f->told = false;
        f->seen = m->since ? f->seen : bytes;
    }
    if (m->since) {
        bool ends = !m->passed && now - m->since >= m->span;
        m->passed = ends ? now - m->since : m->passed;
        return ends ? TLY_METER_ENDS : TLY_METER_NOTHING;
    }
    int64_t passed = now - m->began;
    m->counted += measure_since_seen(f, bytes);
    f->seen = bytes;
    if (passed < SKIP_MS * TLY_MS)
        return TLY_METER_NOTHING;
    /* How long is settled before: to stop as soon as enough has come would prefer what came fast. */
    double need = (double)passed * ENOUGH_BYTES / ((double)m->counted * streams + 1);
    need = need < MOST_MS * TLY_MS ? need : MOST_MS * TLY_MS;
    m->span = need > LEAST_MS * TLY_MS ? (int64_t)need : LEAST_MS * TLY_MS;
    m->since = now;
    return TLY_METER_BEGINS;
}

void tly_meter_begin(struct tly_meter_flow *f, uint64_t bytes)
{
    f->seen = bytes;
}

void tly_meter_end(const struct tly_meter *m, struct tly_meter_flow *f, uint64_t bytes)
{
    double found = (double)measure_since_seen(f, bytes) * 8 * (double)TLY_SEC / (double)m->passed;
    f->rate = found < (double)TLY_MAX_RATE ? (uint64_t)found : TLY_MAX_RATE;
}

bool tly_meter_tell(const struct tly_meter *m, struct tly_meter_flow *f)
{
    bool first = m->passed && f->round == m->round && !f->told;
    f->told |= first;
    return first;
}

/* --- who with whom --------------------------------------------------------------------------------- */

struct ways {
    double sent, received; /* bit/s, all streams of a round together */
};

struct measure_card {
    struct tly_endpoints at;
    uint32_t service;         /* stands for it */
    uint32_t round;           /* the first in which it was in a middle; 0: none */
    struct ways now, look[2]; /* in this round; at best in the first look, in the second */
    bool dropped;
};

struct tly_survey {
    int count;
    int groups, at; /* groups one after the other in this look; those under way, from 0 */
    bool back;      /* the middles stream to the others; before, these have streamed to them */
    uint32_t round; /* rounds begun in all: two of each group */
    bool second_look;
    uint32_t services;
    uint32_t *card_of;         /* owned: of each service */
    struct measure_card *card; /* owned, as what follows */
    bool *wanted, *again;      /* the second look's */
    double *rate, *so_far;
    int *middle;
};

void tly_survey_destroy(struct tly_survey *s)
{
    if (!s)
        return;
    free(s->card_of);
    free(s->card);
    free(s->wanted);
    free(s->again);
    free(s->rate);
    free(s->so_far);
    free(s->middle);
    free(s);
}

int tly_survey_create(const struct tly_roster *r, bool all, struct tly_survey **out)
{
    uint32_t n = r->service_count;
    struct tly_survey *s = calloc(1, sizeof *s);
    if (!s)
        return -ENOMEM;
    s->services = n;
    s->at = -1;
    s->card_of = calloc(n, sizeof *s->card_of);
    s->card = calloc(n, sizeof *s->card);
    s->wanted = calloc(n, sizeof *s->wanted);
    s->again = calloc(n, sizeof *s->again);
    s->rate = calloc(n, sizeof *s->rate);
    s->so_far = calloc(n, sizeof *s->so_far);
    s->middle = calloc(n, sizeof *s->middle);
    if (!s->card_of || !s->card || !s->wanted || !s->again || !s->rate || !s->so_far || !s->middle) {
        tly_survey_destroy(s);
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < n; i++) {
        const struct tly_roster_service *x = &r->services[i];
        if (x->card == i) {
            struct measure_card *c = &s->card[s->count];
            *c = (struct measure_card){.at = x->at, .service = i};
            s->card_of[i] = (uint32_t)s->count++;
        }
        uint32_t at = s->card_of[i] = s->card_of[x->card];
        double said = (double)x->bandwidth; /* the lowest counts, as in the split */
        if (!all && said > 0 && (s->rate[at] == 0 || said < s->rate[at]))
            s->rate[at] = said;
    }
    for (int i = 0; i < s->count; i++)
        s->wanted[i] = s->rate[i] == 0;
    s->groups = tly_plan_measure_turns(s->count, s->wanted);
    if (s->groups == 0) {
        tly_survey_destroy(s);
        s = NULL;
    }
    *out = s;
    return 0;
}

uint32_t tly_survey_card(const struct tly_survey *s, uint32_t service)
{
    return s->card_of[service];
}

bool tly_survey_stands(const struct tly_survey *s, uint32_t service)
{
    return s->card[s->card_of[service]].service == service;
}

/* A busy machine makes figures too low, never too high: the better direction counts.  But one may be another's speed, as
 * what comes in is of many clouds' cards. */
static double measure_both_ways(struct ways w)
{
    double low = fmin(w.sent, w.received), high = fmax(w.sent, w.received);
    return low > 0 && high > ONE_WAY * low ? low : high;
}

static struct ways measure_best(struct ways a, struct ways b)
{
    return (struct ways){fmax(a.sent, b.sent), fmax(a.received, b.received)};
}

static void measure_take_stock(struct tly_survey *s)
{
    for (int i = 0; i < s->count; i++) {
        struct measure_card *c = &s->card[i];
        struct ways *best = &c->look[s->second_look];
        *best = measure_best(*best, c->now);
        c->now = (struct ways){0};
        if (s->wanted[i])
            s->rate[i] = measure_both_ways(measure_best(c->look[0], c->look[1]));
    }
}

static bool measure_alike(double a, double b)
{
    return a > 0 && b > 0 && fmax(a, b) <= TLY_MEASURE_NEXT * fmin(a, b);
}

/* Rates are settled.  Has a card the rate of another one that was measured at another time, or is known?  What spoils a round
 * spoils it for all that are measured in it.  Two cards have the same streams, one way and then the other. */
static bool measure_is_shared(const struct tly_survey *s, int card)
{
    const struct measure_card *c = &s->card[card];
    bool shared = false;
    if (s->count == 2) {
        struct ways w = measure_best(c->look[0], c->look[1]);
        return measure_alike(w.sent, w.received);
    }
    for (int i = 0; i < s->count && s->rate[card] > 0; i++)
        shared |= i != card && s->rate[i] == s->rate[card] && (!s->wanted[i] || s->card[i].round != c->round);
    return shared;
}

static void measure_look_again(struct tly_survey *s)
{
    s->second_look = true;
    tly_plan_measure_settle(s->count, s->wanted, s->rate); /* without memory rates stay as they are */
    for (int i = 0; i < s->count; i++)
        s->again[i] = s->wanted[i] && !measure_is_shared(s, i);
    int groups = tly_plan_measure_turns(s->count, s->again);
    s->groups = groups < SECOND_LOOK ? groups : SECOND_LOOK;
    s->at = 0;
}

/* The groups that are next. */
static void measure_make_groups(struct tly_survey *s)
{
    for (int i = 0; i < s->count; i++) /* of a part in another's group says little */
        s->so_far[i] = s->wanted[i] && !s->second_look ? 0 : s->rate[i];
    tly_plan_measure_groups(s->count, s->second_look ? s->again : s->wanted, s->so_far, s->at, s->middle);
    for (int i = 0; i < s->count; i++)
        if (s->middle[i] == i && !s->card[i].round)
            s->card[i].round = s->round + 1;
}

uint32_t tly_survey_next(struct tly_survey *s)
{
    if (s->second_look && s->at >= s->groups)
        return 0;
    measure_take_stock(s);
    s->back = s->at >= 0 && !s->back;
    if (!s->back) {
        if (++s->at >= s->groups && !s->second_look)
            measure_look_again(s);
        if (s->at >= s->groups)
            return 0;
        measure_make_groups(s);
    }
    for (int i = 0; i < s->count; i++)
        if (s->card[i].dropped || (s->middle[i] >= 0 && s->card[s->middle[i]].dropped))
            s->middle[i] = -1;
    return ++s->round;
}

void tly_survey_end(struct tly_survey *s)
{
    measure_take_stock(s);
    tly_plan_measure_settle(s->count, s->wanted, s->rate);
}

/* The j-th to which a card streams in this round: its middle or, on the way back, a middle the others of its group; -1: no
 * more. */
static int measure_stream_to(const struct tly_survey *s, int card, uint32_t j)
{
    bool middle = s->middle[card] == card;
    if (middle != s->back)
        return -1;
    if (!middle)
        return j == 0 ? s->middle[card] : -1;
    for (int i = 0; i < s->count; i++)
        if (i != card && s->middle[i] == card && j-- == 0)
            return i;
    return -1;
}

bool tly_survey_meet(const struct tly_survey *s, uint32_t card, struct tly_measure *m)
{
    *m = (struct tly_measure){.step = TLY_MEASURE_MEET, .round = s->round};
    for (int to; m->count < TLY_MEASURE_MOST && (to = measure_stream_to(s, (int)card, m->count)) >= 0;
         m->count++)
        m->to[m->count] = s->card[to].at;
    return m->count > 0;
}

void tly_survey_drop(struct tly_survey *s, uint32_t card)
{
    s->card[card].dropped = true;
}

void tly_survey_counted(struct tly_survey *s, uint32_t card, const struct tly_measure *m)
{
    for (uint32_t i = 0; i < m->count && m->round == s->round; i++) {
        int to = measure_stream_to(s, (int)card, i);
        if (to < 0)
            break;
        s->card[card].now.sent += (double)m->rate[i];
        s->card[to].now.received += (double)m->rate[i];
    }
}

bool tly_survey_result(const struct tly_survey *s, uint32_t card, uint64_t *rate, bool *once)
{
    const struct measure_card *c = &s->card[card];
    double found = s->rate[card];
    *once = !measure_is_shared(s, (int)card) &&
            !measure_alike(measure_both_ways(c->look[0]), measure_both_ways(c->look[1]));
    *rate = found < (double)TLY_MAX_RATE ? (uint64_t)found : TLY_MAX_RATE;
    return s->wanted[card];
}
