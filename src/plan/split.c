/* split.c - the optimal split over machines that differ; in the flow before the dealer: the coordinator makes the
 * weights of the roster with it.
 *
 * At a level T, the time that a machine may be busy for one unit of gradients, each card can take so much that its
 * traffic r + (R - 2r) X and its services' inputs stay within T: its supply, a function of T that never falls and
 * has at most two corners.  The level at which all supplies add up to 1 is found among the corners and, between
 * two, by a straight line; a card's share is its supply there.  Who has ranks may be busy for longer than that
 * level, with pushes alone (supply 0): then no split is faster, and the others' level is the lowest.
 *
 * Two kinds of cards are special.  With half of the ranks (n = 2) traffic does not depend on X: a jump, from
 * nothing to all that the services can add, where its pushes are through; what is left to such cards they share.
 * With more than half, traffic falls as X grows: such a card takes at least so much that its traffic is no longer
 * than its services' sums, all if those have no limit. */
#include "plan/plan.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

/* Shares as integers: fine enough for 1024 services, and small enough for the dealer's credits. */
#define WHOLE (1 << 24)

struct split_card {
    bool is;              /* the entry is the first machine's of a card */
    double ranks, others; /* r, R - 2r */
    double bandwidth;
    double cap;  /* sum of sum_rate / R: the services take cap x T at most; INFINITY */
    double from; /* level of the jump, or of the least share */
    double least;
};

static double split_all_ranks(int count, const struct tly_plan_machine *m)
{
    double ranks = 0;
    for (int i = 0; i < count; i++)
        ranks += m[i].ranks;
    return ranks;
}

static double split_cap_of(const struct tly_plan_machine *m, double ranks)
{
    return m->sum_rate > 0 ? m->sum_rate / ranks : INFINITY;
}

/* card[i] of those machines that are the first behind theirs. */
static void split_make_cards(int count, const struct tly_plan_machine *m, struct split_card *card)
{
    double ranks = split_all_ranks(count, m), slowest = INFINITY;
    for (int i = 0; i < count; i++) {
        card[i] = (struct split_card){.is = m[i].card == (uint32_t)i, .bandwidth = INFINITY};
        if (m[i].bandwidth > 0)
            slowest = fmin(slowest, m[i].bandwidth);
    }
    for (int i = 0; i < count; i++) {
        struct split_card *c = &card[m[i].card];
        c->ranks += m[i].ranks;
        c->cap += split_cap_of(&m[i], ranks);
        if (m[i].bandwidth > 0)
            c->bandwidth = fmin(c->bandwidth, m[i].bandwidth);
    }
    double jump = INFINITY;
    for (int i = 0; i < count; i++) {
        struct split_card *c = &card[i];
        if (!c->is)
            continue;
        if (isinf(c->bandwidth))
            c->bandwidth = isinf(slowest) ? 1 : slowest;
        c->others = ranks - 2 * c->ranks;
        if (c->others == 0) {
            jump = fmin(jump, c->ranks / c->bandwidth);
        } else if (c->others < 0) {
            /* r - (2r - R) cap T = T bandwidth */
            c->from = isinf(c->cap) ? 0 : c->ranks / (c->bandwidth - c->others * c->cap);
            c->least = isinf(c->cap) ? 1 : fmin(1, c->cap * c->from);
        }
    }
    /* To the slower of two halves a share costs nothing either: both jump where the faster does. */
    for (int i = 0; i < count; i++)
        if (card[i].is && card[i].others == 0)
            card[i].from = jump;
}

/* What the services behind a card add within T. */
static double split_sums(const struct split_card *c, double t)
{
    return isinf(c->cap) ? INFINITY : c->cap * t;
}

/* `jumped`: with what begins at T itself. */
static double split_supply(const struct split_card *c, double t, bool jumped)
{
    if (c->others > 0)
        return fmin(fmax(0, (t * c->bandwidth - c->ranks) / c->others), split_sums(c, t));
    if (c->others < 0)
        return fmax(c->least, fmin(1, split_sums(c, t)));
    return t > c->from || (jumped && t == c->from) ? split_sums(c, t) : 0;
}

static double split_supplies(int count, const struct split_card *card, double t, bool jumped)
{
    double sum = 0;
    for (int i = 0; i < count; i++)
        if (card[i].is)
            sum += split_supply(&card[i], t, jumped);
    return sum;
}

static int split_compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* All levels at which a supply has a corner, and one at which a card alone could take all; sorted.  `at` has room
 * for 2 count + 2.  Returns how many. */
static int split_corners(int count, const struct split_card *card, double *at)
{
    int n = 0;
    double enough = INFINITY;
    at[n++] = 0;
    for (int i = 0; i < count; i++) {
        const struct split_card *c = &card[i];
        if (!c->is)
            continue;
        double sums_all = isinf(c->cap) ? 0 : 1 / c->cap, carries_all = c->from;
        if (c->others > 0) {
            carries_all = (c->ranks + c->others) / c->bandwidth;
            at[n++] = c->ranks / c->bandwidth;
            if (c->bandwidth > c->others * c->cap) /* from there on the sums bind */
                at[n++] = c->ranks / (c->bandwidth - c->others * c->cap);
        } else {
            at[n++] = c->from;
            if (c->others < 0)
                at[n++] = sums_all;
        }
        enough = fmin(enough, fmax(sums_all, carries_all));
    }
    at[n++] = enough;
    qsort(at, (size_t)n, sizeof *at, split_compare);
    return n;
}

/* The lowest level at which the supplies reach 1; *jumps: what begins there is needed in part. */
static double split_level(int count, const struct split_card *card, double *at, bool *jumps)
{
    int n = split_corners(count, card, at), low = 0, high = n - 1;
    *jumps = false;
    while (low < high) {
        int middle = (low + high) / 2;
        if (split_supplies(count, card, at[middle], true) >= 1)
            high = middle;
        else
            low = middle + 1;
    }
    double before = split_supplies(count, card, at[high], false);
    if (before < 1) {
        *jumps = true; /* or it is 1 but for rounding, and there is nothing to share */
        return at[high];
    }
    if (high == 0)
        return at[0];
    double from = split_supplies(count, card, at[high - 1], true);
    return at[high - 1] + (at[high] - at[high - 1]) * (1 - from) / (before - from);
}

/* total over `count` takers in equal parts, none above its cap: the others have the more. */
static void split_fill(int count, const double *cap, double total, double *part)
{
    int open = count;
    for (int i = 0; i < count; i++)
        part[i] = -1;
    for (bool again = true; again && open;) {
        double each = fmax(0, total / open);
        again = false;
        for (int i = 0; i < count; i++)
            if (part[i] < 0 && cap[i] < each) {
                part[i] = cap[i];
                total -= cap[i];
                open--;
                again = true;
            }
    }
    for (int i = 0; i < count; i++)
        if (part[i] < 0)
            part[i] = fmax(0, total / open);
}

/* Room for what follows; too much for a stack of unknown size. */
struct work {
    struct split_card card[TLY_MAX_SERVICES];
    double at[2 * TLY_MAX_SERVICES + 2];
    double x[TLY_MAX_SERVICES]; /* of the cards, then of the services */
    double cap[TLY_MAX_SERVICES], part[TLY_MAX_SERVICES];
    int who[TLY_MAX_SERVICES];
};

/* The rest that jumps leave open, over the cards that jump. */
static void split_share_jump(int count, struct work *w, double t)
{
    int n = 0;
    double rest = 1;
    for (int i = 0; i < count; i++) {
        if (!w->card[i].is)
            continue;
        if (w->card[i].others == 0) {
            w->cap[n] = split_sums(&w->card[i], t);
            w->who[n++] = i;
        } else {
            rest -= w->x[i];
        }
    }
    split_fill(n, w->cap, rest, w->part);
    for (int i = 0; i < n; i++)
        w->x[w->who[i]] = w->part[i];
}

/* A card's share, over the services behind it. */
static void split_share_card(int count, const struct tly_plan_machine *m, struct work *w, double t, int card)
{
    int n = 0;
    double ranks = split_all_ranks(count, m),
           until = fmax(t, w->card[card].others < 0 ? w->card[card].from : 0);
    for (int i = card; i < count; i++)
        if (m[i].card == (uint32_t)card) {
            double cap = split_cap_of(&m[i], ranks);
            w->cap[n] = isinf(cap) ? INFINITY : cap * until;
            w->who[n++] = i;
        }
    split_fill(n, w->cap, w->x[card], w->part);
    for (int i = 0; i < n; i++)
        w->x[w->who[i]] = w->part[i];
}

static int split_solve(int count, const struct tly_plan_machine *m, uint32_t *weight)
{
    struct work *w = malloc(sizeof *w);
    bool jumps;
    double sum = 0;
    if (!w)
        return -ENOMEM;
    split_make_cards(count, m, w->card);
    double t = split_level(count, w->card, w->at, &jumps);
    for (int i = 0; i < count; i++)
        w->x[i] = w->card[i].is ? split_supply(&w->card[i], t, false) : 0;
    if (jumps)
        split_share_jump(count, w, t);
    for (int i = 0; i < count; i++)
        if (w->card[i].is)
            split_share_card(count, m, w, t, i);
    for (int i = 0; i < count; i++)
        sum += w->x[i];
    for (int i = 0; i < count; i++)
        weight[i] = (uint32_t)(w->x[i] / sum * WHOLE + 0.5);
    free(w);
    return 0;
}

/* Eq. 1, 2 hold: n and k are set. */
static bool split_alike(int count, const struct tly_plan_machine *m, int *n, int *k)
{
    const struct tly_plan_machine *first = NULL;
    double known = 0;
    *n = *k = 0;
    for (int i = 0; i < count; i++) {
        if (m[i].card != (uint32_t)i || m[i].sum_rate > 0)
            return false;
        if (m[i].bandwidth > 0 && known > 0 && m[i].bandwidth != known)
            return false;
        if (m[i].bandwidth > 0)
            known = m[i].bandwidth;
        if (!m[i].ranks) {
            ++*k;
            continue;
        }
        if (*k || (first && m[i].ranks != first->ranks))
            return false;
        first = &m[i];
        ++*n;
    }
    return true;
}

static bool split_sound(int count, const struct tly_plan_machine *m)
{
    if (count < 1 || count > TLY_MAX_SERVICES || split_all_ranks(count, m) < 1)
        return false;
    for (int i = 0; i < count; i++)
        if (m[i].card > (uint32_t)i || m[m[i].card].card != m[i].card || !isfinite(m[i].bandwidth) ||
            !isfinite(m[i].sum_rate) || m[i].bandwidth < 0 || m[i].sum_rate < 0)
            return false;
    return true;
}

int tly_plan_split(enum tly_split split, int count, const struct tly_plan_machine *m, uint32_t *weight)
{
    int n, k, with = 0;
    if (!split_sound(count, m))
        return -EINVAL;
    if (split == TLY_SPLIT_OPTIMAL)
        return split_alike(count, m, &n, &k) ? tly_plan_weights(n, k, weight) : split_solve(count, m, weight);
    bool ranks = split == TLY_SPLIT_ALL_REDUCE;
    for (int i = 0; i < count; i++)
        with += (m[i].ranks > 0) == ranks;
    if (!with)
        return -ENOENT;
    for (int i = 0; i < count; i++)
        weight[i] = (m[i].ranks > 0) == ranks;
    return 0;
}

/* --- predictions ----------------------------------------------------------------------------------- */

static bool split_same_card(const struct tly_plan_machine *m, int i, int j)
{
    return m[i].card == m[j].card;
}

/* 0: not known. */
static double split_bandwidth(int count, const struct tly_plan_machine *m, int card)
{
    double least = 0;
    for (int i = card; i < count; i++)
        if (split_same_card(m, i, card) && m[i].bandwidth > 0 && (least == 0 || m[i].bandwidth < least))
            least = m[i].bandwidth;
    return least;
}

static double split_total_of(int count, const uint32_t *weight)
{
    double total = 0;
    for (int i = 0; i < count; i++)
        total += weight[i];
    return total;
}

double tly_plan_traffic(int count, const struct tly_plan_machine *m, const uint32_t *weight, int i)
{
    double r = 0, x = 0, all = split_all_ranks(count, m);
    for (int j = 0; j < count; j++)
        if (split_same_card(m, i, j)) {
            r += m[j].ranks;
            x += weight[j];
        }
    return r + (all - 2 * r) * x / split_total_of(count, weight);
}

double tly_plan_cost(int count, const struct tly_plan_machine *m, const uint32_t *weight, int *busiest)
{
    double worst = -1, total = split_total_of(count, weight), all = split_all_ranks(count, m);
    int who = 0;
    for (int i = 0; i < count; i++) {
        double t = m[i].sum_rate > 0 ? all * weight[i] / total / m[i].sum_rate : 0;
        if (m[i].card == (uint32_t)i) {
            double b = split_bandwidth(count, m, i);
            if (b == 0)
                return NAN;
            t = fmax(t, tly_plan_traffic(count, m, weight, i) / b);
        }
        if (t > worst) {
            worst = t;
            who = i;
        }
    }
    if (busiest)
        *busiest = who;
    return worst;
}
