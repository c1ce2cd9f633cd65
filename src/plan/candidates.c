/* candidates.c - which values the plan could go by: what gauges say of cards and sums, and what could be tried.
 *
 * Each place has a value (what the plan goes by), a gauge, and in each step a candidate, `next`.
 *
 * Estimates are noisy, and the split of machines that are alike is exact (Eq. 1, 2).  So a candidate differs from the value
 * only when the gauge is sure, and is another machine's value where that is near: machines that are alike stay alike, to
 * the last bit.
 *
 * A tallyd whose process is slow counts as half of what it carries, for its card's rate is no measure then.
 *
 * A value that is too low does not show: the card has time to spare, and so has a card that cannot be used better.  For
 * those there are higher candidates.  A value that was raised is a guess, known as a lower bound alone, until the card was
 * full at it or a try was in vain.  Pure functions, no I/O. */
#include <math.h>

#include "plan/replan_work.h"
#include "plan/sort.h"

#define NEAR_TOGETHER .04 /* of all that are alike: it does not part them */
#define SAME .06          /* nearer than this to another's value it is that */
#define SAME_AT_FIRST .15
/* A small deviation exceeds so many times the samples' median absolute deviation.  The job waits for the slowest card, so
 * cards that all vary carry less than they could.  The least of n normal variables lies 1.27 (n = 6) to 1.77 (16) standard
 * deviations below their mean, and its own median absolute deviation is .43 to .36 of them. */
#define BEYOND_SPREAD 5
#define STEP_ALL 1.25 /* a try where no card is busy as planned, and a feeler, */
#define STEP_ONE 1.5  /* and where some are: then this one holds nobody up */
#define MOST_STEP 2.0
#define WAITS_APART (5 * TLY_GAUGE_LONG) /* samples from one wait for a card that falls short to the next */
#define HYSTERESIS .02 /* a card that falls short has carried so much more again before it does so anew */

/* Which cards are used, which have a share, and behind which of them sums are slow. */
static void candidate_look(struct tly_replan *r, int count, const struct tly_replan_service *s)
{
    for (int i = 0; i < count; i++)
        r->place[i].used = r->place[i].slowed = r->place[i].dealt = false;
    for (int i = 0; i < count; i++) {
        struct tly_replan_place *card = &r->place[s[i].machine.card];
        if (!s[i].active || r->place[i].rests)
            continue;
        card->used = true;
        card->slowed |= r->place[i].sums.value > 0;
        card->dealt |= s[i].weight > 0;
    }
}

bool tly_candidates_is_card(const struct tly_replan *r, const struct tly_replan_service *s, int i)
{
    return s[i].machine.card == (uint32_t)i && r->place[i].used;
}

/* --- a plan by candidates --------------------------------------------------------------------------- */

static double candidate_lower_limit(double a, double b)
{
    return a > 0 && b > 0 ? fmin(a, b) : fmax(a, b);
}

int tly_candidates_gather(struct tly_replan *r, int count, const struct tly_replan_service *s)
{
    int n = 0;
    for (int i = 0; i < count; i++) {
        const struct tly_replan_place *p = &r->place[i];
        if (!s[i].active || p->rests)
            continue;
        struct tly_plan_machine *m = &r->machine[n];
        *m = s[i].machine;
        m->bandwidth = r->place[s[i].machine.card].next;
        m->sum_rate = candidate_lower_limit(s[i].machine.sum_rate, p->next_sums);
        m->card = (uint32_t)n;
        for (int j = 0; j < n; j++)
            if (s[r->from[j]].machine.card == s[i].machine.card) {
                m->card = (uint32_t)j;
                break;
            }
        r->now[n] = s[i].weight;
        r->from[n++] = i;
    }
    return n;
}

static bool candidate_any(int count, const uint32_t *weight)
{
    for (int i = 0; i < count; i++)
        if (weight[i])
            return true;
    return false;
}

double tly_candidates_gain(struct tly_replan *r, int count, const struct tly_replan_service *s)
{
    int n = tly_candidates_gather(r, count, s);
    if (!n || tly_plan_split(TLY_SPLIT_OPTIMAL, n, r->machine, r->weight) != 0)
        return -1;
    double after = tly_plan_cost(n, r->machine, r->weight, NULL);
    double before = candidate_any(n, r->now) ? tly_plan_cost(n, r->machine, r->now, NULL) : INFINITY;
    return after > 0 && before > 0 ? before / after - 1 : -1; /* NAN: not known */
}

/* --- candidates ------------------------------------------------------------------------------------- */

/* Another card's value that is as good as this one, or this one. */
static double candidate_snap(const struct tly_replan *r, int count, const struct tly_replan_service *s,
                             int but, double value, double tolerance)
{
    double best = value, nearest = tolerance;
    for (int i = 0; i < count; i++) {
        double theirs =
            tly_candidates_is_card(r, s, i) && i != but && !r->place[i].known.eased ? r->place[i].next : 0;
        double away = theirs > 0 ? fabs(theirs / value - 1) : INFINITY;
        bool allowed = tly_gauge_bound(&r->place[but].card, theirs) == theirs;
        if (away < nearest && allowed) {
            nearest = away;
            best = theirs;
        }
    }
    return best;
}

void tly_candidates_forget(struct tly_replan *r)
{
    for (int i = 0; i < r->room; i++) {
        r->place[i].next = r->place[i].card.value;
        r->place[i].next_sums = r->place[i].sums.value;
    }
}

/* What it carries while it is busy, over its value. */
static double candidate_of_value(const struct tly_gauge *g)
{
    return g->value > 0 ? tly_gauge_while_busy(g) / g->value : 1;
}

/* A card that begins to fall short makes the others wait, but not again soon, for cards that err by as much would keep them
 * waiting for good.  In a try all cards may be slower, for that alone. */
void tly_candidates_find_short(struct tly_replan *r, int count, const struct tly_replan_service *s)
{
    for (int i = 0; i < count && !r->trying; i++) {
        struct tly_replan_place *p = &r->place[i];
        if (!tly_candidates_is_card(r, s, i) || p->card.count < TLY_GAUGE_SHORT)
            continue;
        double limit = 1 - TLY_REPLAN_NEAR + (p->known.falls_short ? HYSTERESIS : 0);
        bool falls_short = tly_gauge_is_full(&p->card) && candidate_of_value(&p->card) < limit;
        if (falls_short && !p->known.falls_short && r->samples >= r->waits_again)
            r->waits_again = r->samples + WAITS_APART;
        p->known.falls_short = falls_short;
    }
}

/* How busy the plan keeps each card, by the values and the split that hold. */
static void candidate_find_loads(struct tly_replan *r, int count, const struct tly_replan_service *s)
{
    int n = tly_candidates_gather(r, count, s);
    double takes = n && candidate_any(n, r->now) ? tly_plan_cost(n, r->machine, r->now, NULL) : NAN;
    for (int i = 0; i < count; i++)
        r->place[i].load = 1;
    for (int j = 0; j < n; j++) {
        const struct tly_plan_machine *m = &r->machine[j];
        if (m->card == (uint32_t)j && m->bandwidth > 0 && takes > 0)
            r->place[s[r->from[j]].machine.card].load =
                tly_plan_traffic(n, r->machine, r->now, j) / m->bandwidth / takes;
    }
}

void tly_candidates_see(struct tly_replan *r, int count, const struct tly_replan_service *s)
{
    candidate_look(r, count, s);
    for (int i = 0; i < count; i++) {
        struct tly_replan_place *p = &r->place[i];
        if (tly_candidates_is_card(r, s, i))
            tly_gauge_see(&p->card, &s[i].card);
        if (p->card.count >= TLY_GAUGE_SHORT)
            p->known.assumed = false;
        if (tly_gauge_confirms(&p->card, NEAR_TOGETHER)) {
            p->card.guess = false;
            p->known.peak = fmax(p->known.peak, p->card.value);
        }
        if (s[i].active)
            tly_gauge_see(&p->sums, &s[i].sums);
        p->next = p->card.value;
        p->next_sums = p->sums.value;
        p->eases = false;
    }
    candidate_find_loads(r, count, s);
}

bool tly_candidates_wait(const struct tly_replan *r, int count, const struct tly_replan_service *s)
{
    if (r->samples + WAITS_APART >= r->waits_again + TLY_GAUGE_LONG)
        return false;
    for (int i = 0; i < count; i++) {
        const struct tly_replan_place *p = &r->place[i];
        if (tly_candidates_is_card(r, s, i) && p->known.falls_short)
            return true;
    }
    return false;
}

bool tly_candidates_learn(struct tly_replan *r, int count, const struct tly_replan_service *s)
{
    double slowest = INFINITY;
    bool ready = true, missing = false;
    for (int i = 0; i < count; i++) {
        const struct tly_gauge *g = &r->place[i].card;
        if (!tly_candidates_is_card(r, s, i))
            continue;
        if (!(g->value > 0))
            missing = true;
        else if (!r->place[i].known.eased) /* that is no card's speed */
            slowest = fmin(slowest, g->value);
        ready &= g->count >= TLY_GAUGE_SHORT && tly_gauge_while_busy(g) > 0;
    }
    if (!missing || (isinf(slowest) && !ready))
        return false;
    for (int i = 0; i < count; i++) {
        struct tly_replan_place *p = &r->place[i];
        if (!tly_candidates_is_card(r, s, i) || p->card.value > 0)
            continue;
        double value = isinf(slowest) ? tly_gauge_while_busy(&p->card) : slowest;
        p->card.value = p->next = candidate_snap(r, count, s, i, value, SAME_AT_FIRST);
        p->card.guess = true;
    }
    return isinf(slowest);
}

/* Has another card backlogs for clearly more of the time, which explain this one's?  That is a card of another value that
 * carries less of its value, or one that carries about its value and that the plan keeps busy for clearly longer. */
static bool candidate_waits_for_another(const struct tly_replan *r, int count,
                                        const struct tly_replan_service *s,
                                        const struct tly_replan_place *own)
{
    double limit = fmin(candidate_of_value(&own->card), 1 - TLY_REPLAN_CLEARLY),
           busy = tly_gauge_busy(&own->card);
    for (int i = 0; i < count; i++) {
        const struct tly_replan_place *p = &r->place[i];
        const struct tly_gauge *g = &p->card;
        bool refuted = r->samples < p->known.refuted_until;
        bool slower = g->value != own->card.value && candidate_of_value(g) < limit && !refuted;
        bool planned =
            p->load > own->load + TLY_REPLAN_CLEARLY && candidate_of_value(g) >= 1 - TLY_REPLAN_CLEARLY;
        if (tly_candidates_is_card(r, s, i) && (slower || planned) && tly_gauge_is_full(g) &&
            tly_gauge_busy(g) > busy + TLY_REPLAN_LESS_BUSY)
            return true;
    }
    return false;
}

/* What a card's gauge says.  A card that waits for another one is no slower. */
static double candidate_by_gauge(const struct tly_replan *r, int count, const struct tly_replan_service *s,
                                 const struct tly_replan_place *p, double near)
{
    double value = tly_gauge_estimate(&p->card, near);
    return value < p->card.value && candidate_waits_for_another(r, count, s, p) ? p->card.value : value;
}

/* Does another card have the same value?  Then a small deviation is no reason to part them. */
static bool candidate_is_shared(const struct tly_replan *r, int count, const struct tly_replan_service *s,
                                int but)
{
    for (int i = 0; i < count; i++)
        if (i != but && tly_candidates_is_card(r, s, i) && r->place[i].card.value == r->place[but].card.value)
            return true;
    return false;
}

/* The card's backlogs have clearly exceeded those of all others of its value and kind, workers or tallyds, for TLY_GAUGE_LONG
 * samples: it holds them up. */
static bool candidate_is_busiest_of_role(const struct tly_replan *r, int count,
                                         const struct tly_replan_service *s, int i)
{
    const struct tly_replan_place *p = &r->place[i];
    if (!tly_gauge_is_full(&p->card))
        return false;
    double limit = tly_gauge_long_busy(&p->card) - TLY_REPLAN_LESS_BUSY;
    bool others = false;
    for (int j = 0; j < count && limit > 0; j++) {
        const struct tly_replan_place *q = &r->place[j];
        if (j == i || !tly_candidates_is_card(r, s, j) || q->card.value != p->card.value ||
            s[j].spare != s[i].spare || !q->dealt || q->card.count < TLY_GAUGE_LONG)
            continue;
        if (tly_gauge_long_busy(&q->card) >= limit)
            return false;
        others = true;
    }
    return others;
}

/* Is every full card of this value a guess?  Then nobody knows that any of them carries it. */
static bool candidate_is_guessed(const struct tly_replan *r, int count, const struct tly_replan_service *s,
                                 double value)
{
    for (int i = 0; i < count; i++) {
        const struct tly_gauge *g = &r->place[i].card;
        if (tly_candidates_is_card(r, s, i) && g->value == value && tly_gauge_is_full(g) && !g->guess)
            return false;
    }
    return true;
}

/* Cards that share a value move together, to the median of those gauges that say another one, if most of them do.  Where the
 * value is but a guess, only full cards have a voice, and the others follow.  A card that is far from the median moves
 * alone. */
static void candidate_estimate_class(struct tly_replan *r, int count, const struct tly_replan_service *s,
                                     int first)
{
    double value = r->place[first].card.value;
    int members = 0, known = 0;
    bool guessed = candidate_is_guessed(r, count, s, value);
    for (int i = first; i < count; i++) {
        const struct tly_gauge *g = &r->place[i].card;
        bool silent = guessed && g->guess && !tly_gauge_is_full(g);
        if (!tly_candidates_is_card(r, s, i) || g->value != value || silent)
            continue;
        double own = candidate_by_gauge(r, count, s, &r->place[i], 0);
        members++;
        if (own != value)
            r->sorted[known++] = own;
    }
    if (2 * known <= members || members < 2)
        return;
    tly_sort(r->sorted, (size_t)known);
    double middle = r->sorted[known / 2];
    if (fabs(middle / value - 1) <= NEAR_TOGETHER)
        return;
    for (int i = first; i < count; i++) {
        struct tly_replan_place *p = &r->place[i];
        if (!tly_candidates_is_card(r, s, i) || p->card.value != value)
            continue;
        double own = candidate_by_gauge(r, count, s, p, 0);
        if (own == value || fabs(own / middle - 1) <= TLY_REPLAN_NEAR_SHARED)
            p->next = tly_gauge_bound(&p->card, middle);
    }
}

static bool candidate_is_first_of_class(const struct tly_replan *r, const struct tly_replan_service *s, int i)
{
    for (int j = 0; j < i; j++)
        if (tly_candidates_is_card(r, s, j) && r->place[j].card.value == r->place[i].card.value)
            return false;
    return tly_candidates_is_card(r, s, i) && r->place[i].card.value > 0;
}

/* Gauges err in the same way again and again: a small deviation that a try has refuted is no news. */
static bool candidate_is_refuted(const struct tly_replan *r, const struct tly_replan_place *p, double value)
{
    return r->samples < p->known.refuted_until &&
           fabs(value / p->known.refuted - 1) < TLY_REPLAN_NEAR_SHARED &&
           fabs(value / p->card.value - 1) <= TLY_GAUGE_FAR;
}

/* Bytes/s of inputs that tallyd i would receive if the job went as fast as the plan says; 0: not known. */
static double candidate_planned_inputs(struct tly_replan *r, int count, const struct tly_replan_service *s,
                                       int i)
{
    int n = tly_candidates_gather(r, count, s);
    double total = 0, ranks = 0, takes = n ? tly_plan_cost(n, r->machine, r->now, NULL) : NAN;
    for (int j = 0; j < n; j++) {
        total += r->now[j];
        ranks += r->machine[j].ranks;
    }
    return takes > 0 && total > 0 ? ranks * s[i].weight / total / takes : 0;
}

/* Does the process of the tallyd behind card i hold everybody up?  Inputs wait before it and results do not, its card is busier
 * than every other, and the job falls short of the plan.  A processor that is short does that (cpu.max). */
static bool candidate_is_slow_process(struct tly_replan *r, int count, const struct tly_replan_service *s,
                                      int i)
{
    const struct tly_replan_place *p = &r->place[i];
    double limit = tly_gauge_busy(&p->card) - TLY_REPLAN_LESS_BUSY, carried = tly_gauge_carried(&p->card);
    if (r->fixed || !s[i].spare || !s[i].weight || p->slowed || !(carried > 0) ||
        !tly_gauge_is_late(&p->card))
        return false;
    for (int j = 0; j < count; j++) {
        const struct tly_gauge *g = &r->place[j].card;
        bool shares = s[j].machine.card == (uint32_t)i && s[j].active && !r->place[j].rests;
        bool is_other = tly_candidates_is_card(r, s, j);
        if (j != i && (shares || (is_other && (g->count < TLY_GAUGE_SHORT || tly_gauge_busy(g) > limit))))
            return false;
    }
    return carried < candidate_planned_inputs(r, count, s, i) * (1 - TLY_REPLAN_CLEARLY);
}

/* A tallyd whose process is slow counts as half of what it carries.  True: there is one. */
static bool candidate_find_slow_process(struct tly_replan *r, int count, const struct tly_replan_service *s)
{
    for (int i = 0; i < count; i++) {
        struct tly_replan_place *p = &r->place[i];
        if (!tly_candidates_is_card(r, s, i) || !candidate_is_slow_process(r, count, s, i))
            continue;
        p->next = tly_gauge_carried(&p->card) / 2;
        p->eases = true;
        return true;
    }
    return false;
}

bool tly_candidates_estimate(struct tly_replan *r, int count, const struct tly_replan_service *s)
{
    bool moved = false, busy = false;
    if (candidate_find_slow_process(r, count, s))
        return true; /* the others wait for it, so their gauges say nothing */
    for (int i = 0; i < count; i++)
        busy |= tly_candidates_is_card(r, s, i) && tly_gauge_is_full(&r->place[i].card);
    for (int i = 0; i < count; i++)
        if (candidate_is_first_of_class(r, s, i))
            candidate_estimate_class(r, count, s, i);
    for (int i = 0; i < count; i++) {
        struct tly_replan_place *p = &r->place[i];
        p->parts = false;
        if (tly_candidates_is_card(r, s, i) && p->card.value > 0 && p->next == p->card.value) {
            bool shared = candidate_is_shared(r, count, s, i),
                 alike = shared && !candidate_is_busiest_of_role(r, count, s, i);
            double near = alike ? TLY_REPLAN_NEAR_SHARED : TLY_REPLAN_NEAR;
            double value =
                candidate_by_gauge(r, count, s, p, fmax(near, BEYOND_SPREAD * tly_gauge_spread(&p->card)));
            if (value != p->card.value && !candidate_is_refuted(r, p, value))
                p->next = candidate_snap(r, count, s, i, value, SAME);
            p->parts = shared && fabs(p->next / p->card.value - 1) <= TLY_GAUGE_FAR;
        }
        /* Where a card is busy all the time inputs wait for what crosses that one, wherever they lie. */
        bool limits = p->sums.value > 0 || (!busy && tly_gauge_is_full(&p->sums));
        if (s[i].active && !p->rests && limits && s[i].weight)
            p->next_sums = p->sums.value > 0 ? tly_gauge_estimate(&p->sums, TLY_REPLAN_NEAR)
                                             : tly_gauge_while_busy(&p->sums);
        moved |= p->next != p->card.value || p->next_sums != p->sums.value;
    }
    return moved;
}

/* Has the card carried more by far in this job? */
static bool candidate_has_lost(const struct tly_replan_place *p)
{
    return tly_gauge_carried(&p->card) > 0 && p->known.peak > p->card.value * (1 + TLY_GAUGE_FAR);
}

/* Has a card that carried more become clearly less busy than the busiest, for long?  Without a share it has its machine's own
 * gradient alone, and by its value the job waits for that: nothing is found to gain elsewhere.  Then a small loss will do. */
static bool candidate_has_recovered(const struct tly_replan_place *p, double long_busiest)
{
    double busy = tly_gauge_long_busy(&p->card);
    bool lost = p->dealt ? candidate_has_lost(p) : p->known.peak > p->card.value * (1 + TLY_REPLAN_NEAR);
    return lost && busy > 0 && busy < long_busiest - 2 * TLY_REPLAN_LESS_BUSY;
}

/* A card with time to spare, of which nobody has declared that it carries no more.  (Behind slow sums it has that, too.)  A
 * guess need only be less busy than the busiest. */
static bool candidate_has_spare(const struct tly_gauge *g, double busiest)
{
    double busy = tly_gauge_busy(g);
    return tly_gauge_has_slack(g) || (g->guess && busy > 0 && busy < busiest - TLY_REPLAN_LESS_BUSY);
}

/* The median of the values of those cards that are busy all the time and have lost nothing; 0: there is none.  carried: of what
 * they carry, which is less where one falls short.  The two medians may be of different cards. */
static double candidate_usual(struct tly_replan *r, int count, const struct tly_replan_service *s,
                              bool carried)
{
    int full = 0;
    for (int i = 0; i < count; i++) {
        const struct tly_replan_place *p = &r->place[i];
        double carries = p->known.falls_short ? tly_gauge_while_busy(&p->card) : p->card.value;
        if (tly_candidates_is_card(r, s, i) && tly_gauge_is_full(&p->card) && carries > 0 &&
            !candidate_has_lost(p))
            r->sorted[full++] = carried ? carries : p->card.value;
    }
    tly_sort(r->sorted, (size_t)full);
    return full ? r->sorted[full / 2] : 0;
}

/* It was measured far below what others carry, perhaps because something else was on its way, and was not tried in vain for
 * that lately. */
static bool candidate_is_doubtful(const struct tly_replan *r, const struct tly_replan_place *p, double others)
{
    return r->samples >= p->known.asked_until && !candidate_has_lost(p) && (p->felt || !p->card.guess) &&
           p->card.most == 0 && tly_gauge_carried(&p->card) > 0 &&
           p->card.value < others * (1 - TLY_REPLAN_CLEARLY);
}

/* Whether it carries more need not show: with a share of half an equal one, a card has something on its way all the time.
 * Without a share that is the machine's own gradient alone, and what carries that shows. */
static bool candidate_may_hide(const struct tly_replan_place *p)
{
    return p->dealt && (candidate_has_lost(p) || p->doubtful);
}

/* Has it this value, which is no guess, and has it never carried more by far?  Such cards are alike. */
static bool candidate_is_known_as(const struct tly_replan *r, const struct tly_replan_service *s, int i,
                                  double value)
{
    const struct tly_replan_place *p = &r->place[i];
    return tly_candidates_is_card(r, s, i) && !p->card.guess && p->card.value == value &&
           !candidate_has_lost(p);
}

/* If fewer than half of the cards that are alike seem idle, none of them is tried. */
static void candidate_keep_alike(struct tly_replan *r, int count, const struct tly_replan_service *s)
{
    for (int i = 0; i < count; i++) {
        if (!candidate_is_first_of_class(r, s, i))
            continue;
        double value = r->place[i].card.value;
        int alike = 0, raised = 0;
        for (int j = 0; j < count; j++)
            if (candidate_is_known_as(r, s, j, value)) {
                alike++;
                raised += r->place[j].next > value;
            }
        for (int j = 0; j < count && 2 * raised < alike; j++)
            if (candidate_is_known_as(r, s, j, value))
                r->place[j].next = value;
    }
}

/* others: the usual value of cards that are busy all the time; 0: there are none.  most: what any card was known to carry.
 * hides: it is busy all the time itself. */
static double candidate_value_to_try(const struct tly_replan_place *p, double others, double most, bool far,
                                     bool hides)
{
    double now = p->card.value, step = (others > 0 ? STEP_ONE : STEP_ALL) * now;
    double seen =
        others > 0 ? fmin(tly_gauge_while_busy(&p->card), most) : 0; /* short backlogs overrate it */
    double value = far ? fmax(step, others) : fmin(fmax(step, seen), MOST_STEP * now);
    if (p->card.guess && others > now)
        value = others; /* it may be like them again */
    if (hides)
        value = fmin(value, candidate_has_lost(p) ? p->known.peak : others);
    return tly_gauge_bound(&p->card, value);
}

/* Does the job wait for this card, now or most of the time?  Cards that vary are busy by turns. */
static bool candidate_holds_up(const struct tly_gauge *g)
{
    return tly_gauge_is_full(g) || tly_gauge_is_long_full(g);
}

bool tly_candidates_raise(struct tly_replan *r, int count, const struct tly_replan_service *s, bool far)
{
    double others = candidate_usual(r, count, s, true), planned = candidate_usual(r, count, s, false),
           busiest = 0, most = 0, long_busiest = 0;
    int busy = 0;
    bool some = false;
    candidate_look(r, count, s);
    for (int i = 0; i < count; i++)
        if (tly_candidates_is_card(r, s, i)) {
            busiest = fmax(busiest, tly_gauge_busy(&r->place[i].card));
            long_busiest = fmax(long_busiest, tly_gauge_long_busy(&r->place[i].card));
            most = fmax(most, r->place[i].known.peak);
            busy += candidate_holds_up(&r->place[i].card);
        }
    for (int i = 0; i < count; i++) {
        struct tly_replan_place *p = &r->place[i];
        /* A card like the busy ones that has lost no speed must have been idle for long.  So must any card that waits for
         * others which have lost speed, or which are busy most of the time but not now. */
        bool alike = others > 0 ? p->card.value > others * (1 - TLY_REPLAN_NEAR) &&
                                      p->card.value < planned * (1 + TLY_GAUGE_FAR)
                                : busy > (candidate_holds_up(&p->card) ? 1 : 0);
        bool allowed = (!alike || candidate_has_lost(p) || tly_gauge_is_idle(&p->card)) &&
                       r->samples >= p->known.held_until;
        p->doubtful = far && p->dealt && candidate_is_doubtful(r, p, others);
        bool spare = candidate_has_spare(&p->card, busiest);
        bool recovers = !spare && candidate_has_recovered(p, long_busiest),
             hides = far && !spare && candidate_may_hide(p);
        if (tly_candidates_is_card(r, s, i) && allowed && (spare || recovers || hides) && p->card.value > 0 &&
            !p->slowed) {
            double value = candidate_value_to_try(p, others, most, far, hides);
            if (recovers)
                value = fmin(value, p->known.peak); /* more would make it slow, and seem to be in vain */
            p->next = fmax(p->card.value, candidate_snap(r, count, s, i, value, SAME_AT_FIRST));
        }
        if (s[i].active && !p->rests && p->sums.value > 0 && s[i].weight && tly_gauge_has_slack(&p->sums)) {
            p->next_sums = far ? 0 : STEP_ONE * p->sums.value;
            some = true;
        }
    }
    candidate_keep_alike(r, count, s);
    for (int i = 0; i < count; i++)
        some |= r->place[i].next > r->place[i].card.value;
    return some;
}

bool tly_candidates_restrain(struct tly_replan *r, bool far)
{
    bool some = false;
    for (int i = 0; i < r->room; i++) {
        struct tly_replan_place *p = &r->place[i];
        double bound = STEP_ALL * p->card.value;
        double limit = far && !p->card.guess ? bound : MOST_STEP * p->card.value;
        if (p->felt || !(p->card.value > 0) || p->next <= limit * (1 + SAME))
            continue;
        p->next = bound;
        some = true;
    }
    for (int i = 0; i < r->room && some; i++)
        r->place[i].next_sums = r->place[i].sums.value;
    return some;
}
