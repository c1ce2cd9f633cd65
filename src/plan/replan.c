/* replan.c - which estimates hold, and when the split changes.
 *
 * Each place has a value (what the plan goes by), a gauge, and in each step a candidate, `next`.  A step looks, in this
 * order: has the try that is under way brought what it promised (judge_try)?  Do gauges say another value (estimate,
 * follow)?  Could somebody do more than gauges can see (try_out)?  The first that finds a split that promises 3% or more
 * changes it; a value whose change promises less is kept quietly.
 *
 * Estimates are noisy, and the split of machines that are alike is exact (Eq. 1, 2).  So a value changes only when its gauge
 * is sure, and takes another machine's value where that is near: machines that are alike stay alike, to the last bit.
 *
 * A value that is too low does not show: the card has time to spare, and so has a card that cannot be used better.  If the
 * plan would gain by a higher value, that is tried, and taken back unless at least half of the promised gain comes.  Small
 * deviations are tried in the same way, for gauges err by a few per cent where processors are short.
 *
 * A tallyd whose share would be next to nothing rests.  After a while it is tried with a quarter of what the others carry. */
#include "plan/replan.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Deviations in many samples that count: of a card like others, whose split is exact, and of one like no other. */
#define NEAR_SHARED .12
#define NEAR .06
#define NEAR_TOGETHER .04 /* of all that are alike: it does not part them */
#define SAME .06          /* nearer than this to another's value it is that */
#define SAME_AT_FIRST .15
#define STEP_ALL 1.25 /* a try, where no card is busy as planned, */
#define STEP_ONE 1.5  /* and where some are: then this one holds nobody up */
#define MOST_STEP 2.0
#define CLEARLY .15           /* worse than others, or than planned, by so much */
#define LEAST_SHARE (1 / 32.) /* of an equal one; less is not worth the parts it takes */

enum {
    FIRST_PAUSE = 10,      /* samples between two tries; four times as long after one in vain */
    FIRST_FINE_PAUSE = 60, /* the same of small deviations */
    FIRST_REST = 64,       /* samples; twice as long after each */
    FLAPPING = 40,         /* samples, or two intervals, within which a change back counts as a reversal */
    GOODPUTS = 24,         /* samples by which a try for a small deviation is judged, */
    FEW_GOODPUTS = TLY_GAUGE_SHORT, /* and one that promises more */
};

struct place {
    struct tly_gauge card, sums;
    int moved;         /* the way of its card's last change: -1, 0, 1 */
    uint32_t moved_at; /* and when, in samples */
    bool rests;
    uint32_t rest_left, rest_for;
    bool parts;                 /* its candidate parts it from cards that are alike */
    bool tried;                 /* it has a part in the try that is under way */
    double before, before_sums; /* its values before the last change */
    double next, next_sums;     /* this step's candidates */
    double refuted;             /* a small deviation to this value was tried in vain: not again, */
    uint32_t refuted_until;     /* before so many samples */
};

struct tly_replan {
    struct place *place; /* owned */
    int room;
    bool fixed;
    uint32_t samples, changed_at, interval;
    double goodput[GOODPUTS]; /* ring, of this epoch */
    uint32_t goodputs;
    struct
    try {
        uint32_t at, pause; /* samples: not before then, and how long the last one in vain has put it off */
    }
    more, fine;              /* higher values than gauges know; small deviations that they see */
    struct try *trying;      /* the one under way, or NULL */
    bool expected;           /* the next epoch is of its own making */
    double before, promised; /* goodput before the try, and the gain that it promised */
    struct tly_plan_machine machine[TLY_MAX_SERVICES]; /* for one call of the plan */
    uint32_t weight[TLY_MAX_SERVICES], now[TLY_MAX_SERVICES];
    int from[TLY_MAX_SERVICES]; /* their places */
    double sorted[TLY_MAX_SERVICES];
};

int tly_replan_create(bool fixed, struct tly_replan **out)
{
    struct tly_replan *r = calloc(1, sizeof *r);
    if (!r)
        return -ENOMEM;
    r->fixed = fixed;
    r->interval = TLY_REPLAN_INTERVAL;
    r->more.pause = FIRST_PAUSE;
    r->fine.pause = FIRST_FINE_PAUSE;
    *out = r;
    return 0;
}

void tly_replan_destroy(struct tly_replan *r)
{
    if (!r)
        return;
    free(r->place);
    free(r);
}

int tly_replan_place(struct tly_replan *r, int place, double bandwidth, double most, double sum_rate)
{
    if (place >= r->room) {
        struct place *more = realloc(r->place, (size_t)(place + 1) * sizeof *more);
        if (!more)
            return -ENOMEM;
        memset(more + r->room, 0, (size_t)(place + 1 - r->room) * sizeof *more);
        r->place = more;
        r->room = place + 1;
    }
    struct place *p = &r->place[place];
    *p = (struct place){.rest_for = FIRST_REST};
    tly_gauge_init(&p->card, bandwidth, most);
    tly_gauge_init(&p->sums, sum_rate, 0);
    return 0;
}

static void clear(struct tly_replan *r)
{
    for (int i = 0; i < r->room; i++) {
        tly_gauge_clear(&r->place[i].card);
        tly_gauge_clear(&r->place[i].sums);
    }
    r->goodputs = 0;
    r->changed_at = r->samples;
}

void tly_replan_begin(struct tly_replan *r)
{
    clear(r);
    if (!r->expected)
        r->trying = NULL;
    r->expected = false;
}

double tly_replan_bandwidth(const struct tly_replan *r, int place)
{
    return place < r->room ? r->place[place].card.value : 0;
}

static double lower_limit(double a, double b)
{
    return a > 0 && b > 0 ? fmin(a, b) : fmax(a, b);
}

double tly_replan_sum_rate(const struct tly_replan *r, int place)
{
    return place < r->room ? r->place[place].sums.value : 0;
}

bool tly_replan_rests(const struct tly_replan *r, int place)
{
    return place < r->room && r->place[place].rests;
}

/* --- a plan by candidates --------------------------------------------------------------------------- */

static bool is_card(const struct tly_replan_service *s, int i)
{
    return s[i].active && s[i].machine.card == (uint32_t)i;
}

/* The machines that may have a share, by the candidates, one behind the other.  Returns how many. */
static int gather(struct tly_replan *r, int count, const struct tly_replan_service *s)
{
    int n = 0;
    for (int i = 0; i < count; i++) {
        const struct place *p = &r->place[i];
        if (!s[i].active || p->rests)
            continue;
        struct tly_plan_machine *m = &r->machine[n];
        *m = s[i].machine;
        m->bandwidth = r->place[s[i].machine.card].next;
        m->sum_rate = lower_limit(s[i].machine.sum_rate, p->next_sums);
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

static bool any(int count, const uint32_t *weight)
{
    for (int i = 0; i < count; i++)
        if (weight[i])
            return true;
    return false;
}

/* What the split that the candidates ask for gains over the one that there is; negative: nothing can be said. */
static double gain(struct tly_replan *r, int count, const struct tly_replan_service *s)
{
    int n = gather(r, count, s);
    if (!n || tly_plan_split(TLY_SPLIT_OPTIMAL, n, r->machine, r->weight) != 0)
        return -1;
    double after = tly_plan_cost(n, r->machine, r->weight, NULL);
    double before = any(n, r->now) ? tly_plan_cost(n, r->machine, r->now, NULL) : INFINITY;
    return after > 0 && before > 0 ? before / after - 1 : -1; /* NAN: not known */
}

/* --- candidates ------------------------------------------------------------------------------------- */

/* Another card's value that is as good as this one, or this one. */
static double snap(const struct tly_replan *r, int count, const struct tly_replan_service *s, int but,
                   double value, double tolerance)
{
    double best = value, nearest = tolerance;
    for (int i = 0; i < count; i++) {
        double theirs = is_card(s, i) && i != but ? r->place[i].next : 0;
        double away = theirs > 0 ? fabs(theirs / value - 1) : INFINITY;
        bool allowed = !(r->place[but].card.most > 0 && theirs > r->place[but].card.most);
        if (away < nearest && allowed) {
            nearest = away;
            best = theirs;
        }
    }
    return best;
}

static void see(struct tly_replan *r, int count, const struct tly_replan_service *s, double goodput)
{
    for (int i = 0; i < count; i++) {
        struct place *p = &r->place[i];
        if (is_card(s, i))
            tly_gauge_see(&p->card, &s[i].card);
        if (s[i].active)
            tly_gauge_see(&p->sums, &s[i].sums);
        p->next = p->card.value;
        p->next_sums = p->sums.value;
    }
    r->samples++;
    if (isfinite(goodput) && goodput > 0)
        r->goodput[r->goodputs++ % GOODPUTS] = goodput;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median of as many of the last samples as this try is judged by; 0: too few. */
static double goodput(const struct tly_replan *r, const struct try *t)
{
    uint32_t count = t == &r->fine ? GOODPUTS : FEW_GOODPUTS;
    double sorted[GOODPUTS];
    if (r->goodputs < count)
        return 0;
    for (uint32_t i = 0; i < count; i++)
        sorted[i] = r->goodput[(r->goodputs - 1 - i) % GOODPUTS];
    qsort(sorted, count, sizeof *sorted, by_value);
    return sorted[count / 2];
}

/* A card of unknown speed counts as one as slow as the slowest that is known.  Where none is known, all become known
 * together: true. */
static bool learn(struct tly_replan *r, int count, const struct tly_replan_service *s)
{
    double slowest = INFINITY;
    bool ready = true, missing = false;
    for (int i = 0; i < count; i++) {
        const struct tly_gauge *g = &r->place[i].card;
        if (!is_card(s, i) || r->place[i].rests)
            continue;
        if (g->value > 0)
            slowest = fmin(slowest, g->value);
        else
            missing = true;
        ready &= g->count >= TLY_GAUGE_SHORT && tly_gauge_while_busy(g) > 0;
    }
    if (!missing || (isinf(slowest) && !ready))
        return false;
    for (int i = 0; i < count; i++) {
        struct place *p = &r->place[i];
        if (!is_card(s, i) || p->card.value > 0)
            continue;
        double value = isinf(slowest) ? tly_gauge_while_busy(&p->card) : slowest;
        p->card.value = p->next = value > 0 ? snap(r, count, s, i, value, SAME_AT_FIRST) : 0;
    }
    return isinf(slowest);
}

/* Does another card have the same value?  Then a small deviation is no reason to part them. */
static bool is_shared(const struct tly_replan *r, int count, const struct tly_replan_service *s, int but)
{
    for (int i = 0; i < count; i++)
        if (i != but && is_card(s, i) && r->place[i].card.value == r->place[but].card.value)
            return true;
    return false;
}

/* Cards that share a value move together, to the median of those gauges that say another one, if most of them do.  A card
 * that is far from the median moves alone. */
static void estimate_class(struct tly_replan *r, int count, const struct tly_replan_service *s, int first)
{
    double value = r->place[first].card.value;
    int members = 0, known = 0;
    for (int i = first; i < count; i++) {
        if (!is_card(s, i) || r->place[i].rests || r->place[i].card.value != value)
            continue;
        double own = tly_gauge_estimate(&r->place[i].card, 0);
        members++;
        if (own != value)
            r->sorted[known++] = own;
    }
    if (2 * known <= members || members < 2)
        return;
    qsort(r->sorted, (size_t)known, sizeof *r->sorted, by_value);
    double middle = r->sorted[known / 2];
    if (fabs(middle / value - 1) <= NEAR_TOGETHER)
        return;
    for (int i = first; i < count; i++) {
        struct place *p = &r->place[i];
        if (!is_card(s, i) || p->rests || p->card.value != value)
            continue;
        double own = tly_gauge_estimate(&p->card, 0);
        if (own == value || fabs(own / middle - 1) <= NEAR_SHARED)
            p->next = p->card.most > 0 ? fmin(middle, p->card.most) : middle;
    }
}

static bool is_first_of_class(const struct tly_replan *r, const struct tly_replan_service *s, int i)
{
    for (int j = 0; j < i; j++)
        if (is_card(s, j) && r->place[j].card.value == r->place[i].card.value)
            return false;
    return is_card(s, i) && r->place[i].card.value > 0;
}

/* Gauges err in the same way again and again: a small deviation that a try has refuted is no news. */
static bool is_refuted(const struct tly_replan *r, const struct place *p, double value)
{
    return p->refuted > 0 && r->samples < p->refuted_until && fabs(value / p->refuted - 1) < NEAR_SHARED &&
           fabs(value / p->card.value - 1) <= TLY_GAUGE_FAR;
}

/* By the gauges.  True: something is another value than before. */
static bool estimate(struct tly_replan *r, int count, const struct tly_replan_service *s)
{
    bool moved = false, busy = false;
    for (int i = 0; i < count; i++)
        busy |= is_card(s, i) && !r->place[i].rests && tly_gauge_is_full(&r->place[i].card);
    for (int i = 0; i < count; i++)
        if (is_first_of_class(r, s, i))
            estimate_class(r, count, s, i);
    for (int i = 0; i < count; i++) {
        struct place *p = &r->place[i];
        p->parts = false;
        if (p->rests)
            continue;
        moved |= p->next != p->card.value;
        if (is_card(s, i) && p->card.value > 0 && p->next == p->card.value) {
            bool shared = is_shared(r, count, s, i);
            double value = tly_gauge_estimate(&p->card, shared ? NEAR_SHARED : NEAR);
            if (value != p->card.value && !is_refuted(r, p, value))
                p->next = snap(r, count, s, i, value, SAME);
            p->parts = shared && fabs(p->next / p->card.value - 1) <= TLY_GAUGE_FAR;
            moved |= p->next != p->card.value;
        }
        /* Where a card is busy all the time inputs wait for what crosses that one, wherever they lie. */
        bool limits = p->sums.value > 0 || (!busy && tly_gauge_is_full(&p->sums));
        if (s[i].active && limits && s[i].weight)
            p->next_sums =
                p->sums.value > 0 ? tly_gauge_estimate(&p->sums, NEAR) : tly_gauge_while_busy(&p->sums);
        moved |= p->next_sums != p->sums.value;
    }
    return moved;
}

/* A card with time to spare, of which nobody has declared that it carries no more.  (Behind slow sums it has that, too.) */
static bool may_be_more(const struct tly_gauge *g)
{
    bool capped = g->most > 0 && g->value >= g->most;
    return g->value > 0 && !capped && tly_gauge_has_slack(g);
}

/* The median of the values of those cards that are busy all the time; 0: there is none. */
static double usual(struct tly_replan *r, int n, const struct tly_replan_service *s)
{
    int full = 0;
    for (int j = 0; j < n; j++)
        if (is_card(s, r->from[j]) && tly_gauge_is_full(&r->place[r->from[j]].card))
            r->sorted[full++] = r->place[r->from[j]].card.value;
    qsort(r->sorted, (size_t)full, sizeof *r->sorted, by_value);
    return full ? r->sorted[full / 2] : 0;
}

/* Values to try for those that have time to spare: a step more, or, `far`, what others carry.  True: there
 * are some. */
static bool try_more(struct tly_replan *r, int count, const struct tly_replan_service *s, bool far)
{
    int n = gather(r, count, s);
    double others = usual(r, n, s);
    bool found = false;
    for (int j = 0; j < n; j++) {
        int i = r->from[j];
        struct place *p = &r->place[i];
        /* One that is taken to carry as much as those that are busy must have been idle for long. */
        bool alike = p->card.value > others * (1 - NEAR) && p->card.value < others * (1 + TLY_GAUGE_FAR);
        bool worth = !alike || tly_gauge_is_idle(&p->card);
        if (is_card(s, i) && worth && may_be_more(&p->card) && !(p->sums.value > 0)) {
            double seen = others > 0 ? tly_gauge_while_busy(&p->card) : 0;
            double step = (others > 0 ? STEP_ONE : STEP_ALL) * p->card.value;
            double value = far ? fmax(step, others) : fmin(fmax(step, seen), MOST_STEP * p->card.value);
            value = p->card.most > 0 ? fmin(value, p->card.most) : value;
            p->next = snap(r, count, s, i, value, SAME_AT_FIRST);
            found = true;
        }
        if (p->sums.value > 0 && s[i].weight && tly_gauge_has_slack(&p->sums)) {
            p->next_sums = far ? 0 : STEP_ONE * p->sums.value;
            found = true;
        }
    }
    return found;
}

/* --- decisions -------------------------------------------------------------------------------------- */

static void forget_candidates(struct tly_replan *r)
{
    for (int i = 0; i < r->room; i++) {
        r->place[i].next = r->place[i].card.value;
        r->place[i].next_sums = r->place[i].sums.value;
    }
}

static uint32_t soon(const struct tly_replan *r)
{
    return 2 * r->interval > FLAPPING ? 2 * r->interval : FLAPPING;
}

/* A card that goes back and forth is followed more and more slowly. */
static void pace(struct tly_replan *r, bool reversal)
{
    uint32_t quiet = r->samples - r->changed_at;
    if (reversal)
        r->interval = r->interval < TLY_REPLAN_MOST_INTERVAL / 2 ? 2 * r->interval : TLY_REPLAN_MOST_INTERVAL;
    else if (quiet > 4 * soon(r) && r->interval > TLY_REPLAN_INTERVAL)
        r->interval /= 2;
}

/* The candidates hold.  undone: they are what was before. */
static void take(struct tly_replan *r, bool undone)
{
    bool reversal = false;
    for (int i = 0; i < r->room; i++) {
        struct place *p = &r->place[i];
        int way = (p->next > p->card.value) - (p->next < p->card.value);
        p->before = p->card.value;
        p->before_sums = p->sums.value;
        if (way && !undone) {
            reversal |= way == -p->moved && r->samples - p->moved_at < soon(r);
            p->moved = way;
            p->moved_at = r->samples;
        }
        p->card.value = p->next;
        p->sums.value = p->next_sums;
    }
    pace(r, reversal);
}

static bool change(struct tly_replan *r, bool undone)
{
    take(r, undone);
    clear(r);
    r->expected = true;
    return true;
}

/* A tallyd that would have next to nothing has nothing, for it gets whole parts.  True: there is one. */
static bool lay_to_rest(struct tly_replan *r, const struct tly_replan_service *s, int n)
{
    double total = 0;
    bool some = false;
    for (int j = 0; j < n; j++)
        total += r->weight[j];
    for (int j = 0; j < n && n > 1; j++) {
        struct place *p = &r->place[r->from[j]];
        if (!s[r->from[j]].spare || r->weight[j] > LEAST_SHARE / n * total)
            continue;
        some = p->rests = true;
        p->rest_left = p->rest_for;
        p->rest_for = p->rest_for < TLY_REPLAN_MOST_INTERVAL / 2 ? 2 * p->rest_for : TLY_REPLAN_MOST_INTERVAL;
    }
    return some;
}

/* Those that have rested long enough, with a quarter of what the median of the others carries.  True: there are some. */
static bool wake(struct tly_replan *r, int count, const struct tly_replan_service *s)
{
    int n = 0;
    bool some = false;
    for (int i = 0; i < count; i++)
        if (is_card(s, i) && !r->place[i].rests && r->place[i].card.value > 0)
            r->sorted[n++] = r->place[i].card.value;
    qsort(r->sorted, (size_t)n, sizeof *r->sorted, by_value);
    for (int i = 0; i < count; i++) {
        struct place *p = &r->place[i];
        if (!s[i].active || !p->rests || (p->rest_left && --p->rest_left) || !n)
            continue;
        double quarter = r->sorted[n / 2] / 4;
        p->card.value = p->next = p->card.most > 0 ? fmin(quarter, p->card.most) : quarter;
        p->sums.value = p->next_sums = 0;
        p->rests = false;
        some = true;
    }
    return some;
}

static void wait_longer(struct try *t)
{
    t->pause = t->pause < TLY_REPLAN_MOST_INTERVAL / 4 ? 4 * t->pause : TLY_REPLAN_MOST_INTERVAL;
}

/* Has the try brought at least half of what it promised?  True: it has not, and the candidates are what was before. */
static bool judge_try(struct tly_replan *r)
{
    struct try *t = r->trying;
    double now = t ? goodput(r, t) : 0;
    if (now == 0)
        return false;
    r->trying = NULL;
    bool vain = now < r->before * (1 + r->promised / 2), undone = false;
    if (vain)
        wait_longer(t);
    else
        t->pause = t == &r->fine ? FIRST_FINE_PAUSE : FIRST_PAUSE;
    t->at = vain ? r->samples + t->pause : r->samples;
    for (int i = 0; i < r->room && vain; i++) {
        struct place *p = &r->place[i];
        /* What was tried in vain and is busy all the time tells by that what it carries; what is another value by far
         * than before the try and after has changed meanwhile. */
        bool far = fabs(tly_gauge_estimate(&p->card, NEAR) / p->card.value - 1) > TLY_GAUGE_FAR;
        if (!p->tried || far || (t == &r->more && tly_gauge_is_full(&p->card)))
            continue;
        p->next = p->before;
        p->next_sums = p->before_sums;
        p->refuted = t == &r->fine ? p->card.value : 0;
        p->refuted_until = r->samples + TLY_REPLAN_MOST_INTERVAL;
        undone = true;
    }
    return undone;
}

/* The split need not follow, but keep what is known; only cards that are alike are not parted for it. */
static void take_quietly(struct tly_replan *r)
{
    for (int i = 0; i < r->room; i++)
        if (r->place[i].parts)
            r->place[i].next = r->place[i].card.value;
    take(r, false);
}

/* Is some candidate another value by far? */
static bool is_far(const struct tly_replan *r)
{
    for (int i = 0; i < r->room; i++) {
        const struct place *p = &r->place[i];
        bool sums = p->next_sums != p->sums.value;
        if (sums || (p->card.value > 0 && fabs(p->next / p->card.value - 1) > TLY_GAUGE_FAR))
            return true;
    }
    return false;
}

/* Another split, for candidates that are to be tried (`t`), or for sure (NULL). */
static bool begin_change(struct tly_replan *r, int count, const struct tly_replan_service *s, struct try *t,
                         double worth)
{
    for (int i = 0; i < r->room; i++)
        r->place[i].tried = t && (r->place[i].next != r->place[i].card.value ||
                                  r->place[i].next_sums != r->place[i].sums.value);
    r->trying = t;
    r->before = goodput(r, t);
    r->promised = worth;
    if (lay_to_rest(r, s, gather(r, count, s)))
        gain(r, count, s);
    return change(r, false);
}

/* Perhaps somebody can do more than gauges know. */
static bool try_out(struct tly_replan *r, int count, const struct tly_replan_service *s)
{
    if (r->trying || r->samples < r->more.at || goodput(r, &r->more) == 0)
        return false;
    for (int far = 0; far < 2; far++) {
        forget_candidates(r);
        double worth = try_more(r, count, s, far) ? gain(r, count, s) : -1;
        if (worth >= TLY_REPLAN_LEAST_GAIN)
            return begin_change(r, count, s, &r->more, worth);
    }
    forget_candidates(r);
    return false;
}

/* What gauges say. */
static bool follow(struct tly_replan *r, int count, const struct tly_replan_service *s, bool learnt)
{
    double worth = gain(r, count, s);
    if (!(worth >= TLY_REPLAN_LEAST_GAIN)) {
        take_quietly(r);
        return try_out(r, count, s);
    }
    if (learnt || is_far(r))
        return begin_change(r, count, s, NULL, worth);
    if (r->trying || r->samples < r->fine.at || goodput(r, &r->fine) == 0)
        return try_out(r, count, s);
    return begin_change(r, count, s, &r->fine, worth);
}

bool tly_replan_step(struct tly_replan *r, int count, const struct tly_replan_service *s, double goodput)
{
    if (count > r->room || count > TLY_MAX_SERVICES)
        return false;
    see(r, count, s, goodput);
    bool learnt = learn(r, count, s);
    if (!r->fixed && wake(r, count, s))
        return change(r, false);
    if (r->samples - r->changed_at < r->interval)
        return false;
    if (judge_try(r))
        return change(r, true);
    bool moved = estimate(r, count, s) || learnt;
    if (r->fixed) {
        take(r, false);
        return false;
    }
    return moved ? follow(r, count, s, learnt) : try_out(r, count, s);
}

/* What it carries over what the split goes by; 0: its sums limit it. */
static double of_planned(const struct place *p, const struct tly_replan_service *s)
{
    if (p->sums.value > 0)
        return 0;
    return s->machine.bandwidth > 0 && p->card.value > 0 ? p->card.value / s->machine.bandwidth : 1;
}

int tly_replan_standout(const struct tly_replan *r, int count, const struct tly_replan_service *s, int named)
{
    int found = -1, busy = 0;
    double least = INFINITY, most = 0;
    for (int i = 0; i < count && i < r->room; i++) {
        const struct place *p = &r->place[i];
        bool full = is_card(s, i) && !p->rests && tly_gauge_is_full(&p->card);
        full |= s[i].active && s[i].weight && tly_gauge_is_full(&p->sums);
        double ratio = of_planned(p, &s[i]), counts = i == named ? ratio * (1 - CLEARLY) : ratio;
        busy += full;
        if (is_card(s, i) && !p->rests)
            most = fmax(most, ratio);
        if (full && counts < least) {
            least = counts;
            found = i;
        }
    }
    /* Where all carry as little, as two machines alone always do, nobody can tell whose card it is. */
    return busy <= 1 || least < (1 - CLEARLY) * fmin(1, most) ? found : -1;
}
