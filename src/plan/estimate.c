/* estimate.c - a gauge: what one network card, or one service's sums, can carry, by samples of the job's own traffic.
 *
 * Each sample has a rate and a fraction of time in which there was a backlog.  A card that limits the job has one nearly
 * all the time: 0.9 to 1.0 on the emulated cluster, where other cards had 0.2 to 0.76 (4 + 2 and 8 + 8 machines, one card
 * at a quarter or half of the others' rate).  rate / busy is what it carries then, within 3%.  A card that does not limit
 * the job has carried its rate at least. */
#include <math.h>

#include "plan/replan.h"
#include "plan/sort.h"

/* Backlogged for this fraction of the time it is full; below the other one it has time to spare. */
#define FULL .87
#define SPARE .8
#define IDLE .5
/* What it receives is backlogged for so much more of the time than what it sends. */
#define LATE .16
/* More than was thought has been carried. */
#define MORE .05
/* Samples of a card that is just changing differ by more than this from each other. */
#define CALM .15

/* bytes/s; no card carries more, and no service adds more. */
#define MOST_RATE 1.25e14

void tly_gauge_init(struct tly_gauge *g, double value, double most)
{
    *g = (struct tly_gauge){.value = value, .most = most};
}

void tly_gauge_clear(struct tly_gauge *g)
{
    g->count = 0;
}

void tly_gauge_see(struct tly_gauge *g, const struct tly_sight *s)
{
    struct tly_sight sane = {
        .rate = s->rate, .busy = fmin(s->busy, 1), .both = fmin(s->both, 1), .late = s->late};
    if (isfinite(s->busy) && isfinite(s->both) && isfinite(s->late) && s->rate >= 0 && s->rate <= MOST_RATE &&
        s->busy >= 0 && s->both >= 0)
        g->sight[g->count++ % TLY_GAUGE_LONG] = sane;
}

/* The n-th last sample. */
static const struct tly_sight *estimate_last(const struct tly_gauge *g, uint32_t n)
{
    return &g->sight[(g->count - 1 - n) % TLY_GAUGE_LONG];
}

static double estimate_rate_of(const struct tly_sight *s)
{
    return s->rate;
}
static double estimate_busy_of(const struct tly_sight *s)
{
    return s->busy;
}
static double estimate_both_of(const struct tly_sight *s)
{
    return s->both;
}
static double estimate_late_of(const struct tly_sight *s)
{
    return s->late;
}
static double estimate_while_busy(const struct tly_sight *s)
{
    return s->busy > 0 ? s->rate / s->busy : 0;
}

/* The middle of n figures, which are sorted. */
static double estimate_middle_of(double *figures, uint32_t n)
{
    tly_sort(figures, n);
    return n % 2 ? figures[n / 2] : (figures[n / 2 - 1] + figures[n / 2]) / 2;
}

/* The median of a figure over the last n samples; there are as many. */
static double estimate_median(const struct tly_gauge *g, uint32_t n,
                              double (*figure)(const struct tly_sight *s))
{
    double figures[TLY_GAUGE_LONG];
    for (uint32_t i = 0; i < n; i++)
        figures[i] = figure(estimate_last(g, i));
    return estimate_middle_of(figures, n);
}

static bool estimate_is_full(const struct tly_gauge *g, uint32_t n)
{
    return g->count >= n && estimate_median(g, n, estimate_busy_of) > FULL;
}

double tly_gauge_busy(const struct tly_gauge *g)
{
    return g->count >= TLY_GAUGE_SHORT ? estimate_median(g, TLY_GAUGE_SHORT, estimate_busy_of) : 0;
}

double tly_gauge_long_busy(const struct tly_gauge *g)
{
    return g->count >= TLY_GAUGE_LONG ? estimate_median(g, TLY_GAUGE_LONG, estimate_busy_of) : 0;
}

double tly_gauge_carried(const struct tly_gauge *g)
{
    return g->count >= TLY_GAUGE_SHORT ? estimate_median(g, TLY_GAUGE_SHORT, estimate_rate_of) : 0;
}

double tly_gauge_both(const struct tly_gauge *g)
{
    uint32_t n = g->count < TLY_GAUGE_LONG / 2 ? g->count : TLY_GAUGE_LONG / 2;
    return n >= TLY_GAUGE_SHORT ? estimate_median(g, n, estimate_both_of) : 0;
}

bool tly_gauge_is_full(const struct tly_gauge *g)
{
    return estimate_is_full(g, TLY_GAUGE_SHORT);
}

bool tly_gauge_is_long_full(const struct tly_gauge *g)
{
    uint32_t n = g->count < TLY_GAUGE_LONG ? g->count : TLY_GAUGE_LONG;
    return n >= TLY_GAUGE_SHORT && estimate_is_full(g, n);
}

bool tly_gauge_is_late(const struct tly_gauge *g)
{
    return tly_gauge_is_full(g) && estimate_median(g, TLY_GAUGE_SHORT, estimate_late_of) > LATE;
}

/* In most of the last n samples, and in the newest two: what was before another card changed says nothing. */
static bool estimate_is_below(const struct tly_gauge *g, uint32_t n, double limit)
{
    return g->count >= n && estimate_median(g, n, estimate_both_of) < limit &&
           estimate_both_of(estimate_last(g, 0)) < limit && estimate_both_of(estimate_last(g, 1)) < limit;
}

bool tly_gauge_has_slack(const struct tly_gauge *g)
{
    return estimate_is_below(g, TLY_GAUGE_SHORT, SPARE);
}

bool tly_gauge_is_idle(const struct tly_gauge *g)
{
    return estimate_is_below(g, TLY_GAUGE_LONG, IDLE);
}

double tly_gauge_while_busy(const struct tly_gauge *g)
{
    return g->count >= TLY_GAUGE_SHORT ? estimate_median(g, TLY_GAUGE_SHORT, estimate_while_busy) : 0;
}

double tly_gauge_spread(const struct tly_gauge *g)
{
    double away[TLY_GAUGE_LONG];
    double middle = g->count >= TLY_GAUGE_LONG ? estimate_median(g, TLY_GAUGE_LONG, estimate_while_busy) : 0;
    if (!(middle > 0))
        return 0;
    for (uint32_t i = 0; i < TLY_GAUGE_LONG; i++)
        away[i] = fabs(estimate_while_busy(estimate_last(g, i)) / middle - 1);
    return estimate_middle_of(away, TLY_GAUGE_LONG);
}

static double estimate_off(double x, double from)
{
    return x > 0 && from > 0 ? fabs(x / from - 1) : 0; /* nothing at all is no estimate */
}

/* The newest two samples say so, too. */
static bool estimate_is_calm(const struct tly_gauge *g, double value)
{
    return estimate_off(estimate_while_busy(estimate_last(g, 0)), value) < CALM &&
           estimate_off(estimate_while_busy(estimate_last(g, 1)), value) < CALM;
}

double tly_gauge_bound(const struct tly_gauge *g, double value)
{
    return g->most > 0 && value > g->most ? g->most : value;
}

/* By the last n samples, if it was full in them.  It has carried `low` at least, and `high` at most, for backlogs do not all
 * show: a value above both is lowered to `high`, and one that is below the middle is raised to that. */
static double estimate_while_full(const struct tly_gauge *g, uint32_t n)
{
    double low = estimate_median(g, n, estimate_rate_of), high = estimate_median(g, n, estimate_while_busy);
    if (high < g->value)
        return high > 0 ? high : g->value; /* nothing at all is no estimate */
    return fmax(g->value, g->guess ? high : (low + high) / 2);
}

/* What a card carries that has become slower.  `about` is the median of the short samples.  Two of these five are from before
 * the change, so it is the largest of the three new ones.  Too large a share of a slow card makes each step longer by as much.
 * Too small a share costs hardly anything.  Samples that are far from `about` tell of something else. */
static double estimate_least_of_newest(const struct tly_gauge *g, double about)
{
    double least = about;
    for (uint32_t i = 0; i < TLY_GAUGE_SHORT / 2 + 1; i++) {
        double x = estimate_while_busy(estimate_last(g, i));
        if (x > 0 && estimate_off(x, about) < CALM)
            least = fmin(least, x);
    }
    return least;
}

bool tly_gauge_confirms(const struct tly_gauge *g, double near)
{
    if (!estimate_is_full(g, TLY_GAUGE_LONG))
        return false;
    double carried = estimate_median(g, TLY_GAUGE_LONG, estimate_while_busy);
    return carried > 0 && estimate_off(carried, g->value) < near;
}

double tly_gauge_estimate(const struct tly_gauge *g, double near)
{
    if (g->count < TLY_GAUGE_SHORT)
        return g->value;
    double carried = tly_gauge_carried(g), quick = estimate_while_full(g, TLY_GAUGE_SHORT);
    if (tly_gauge_is_full(g) && estimate_off(quick, g->value) > TLY_GAUGE_FAR && estimate_is_calm(g, quick))
        return tly_gauge_bound(g, quick < g->value ? estimate_least_of_newest(g, quick) : quick);
    if (carried > g->value * (1 + MORE))
        return tly_gauge_bound(g, carried);
    if (estimate_is_full(g, TLY_GAUGE_LONG)) {
        double slow =
            fmax(estimate_while_full(g, TLY_GAUGE_LONG), fmin(carried, g->value)); /* not less than now */
        if (estimate_off(slow, g->value) > near)
            return tly_gauge_bound(g, slow);
    }
    return g->value;
}
