/* replan.c - which candidates hold, and when the split changes.
 *
 * A step looks, in this order: has a tallyd rested long enough (wake)?  Has the try that is under way brought what it promised
 * (replan_judge_try)?  Do gauges say another value (tly_candidates_estimate, follow)?  Could somebody do more than gauges can see
 * (replan_try_out)?  The first that finds something changes the split.  What gauges say must promise 3% or more for that; a value
 * whose change promises less is kept quietly.
 *
 * A try is taken back, and tallyds that it has put to rest with it, unless at least half of the promised gain comes.  A feeler,
 * a try with little more of a card that may carry several times as much, is judged by what that card carries.  Small deviations
 * are tried in the same way, for gauges err by a few per cent where processors are short.  If somebody else's change is part of
 * the same epoch, what the try has brought cannot be told, and it stands.
 *
 * A tallyd whose process holds everybody up gets half of what it carries.  It is late by as much whatever its share, so what
 * its card carries is no measure, and too small a share costs hardly anything.  For a while it is not tried with more.
 *
 * A tallyd whose share would be next to nothing rests.  After a while it is tried with a quarter of what the others carry. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "plan/replan_work.h"
#include "plan/sort.h"

#define MUCH .1 /* a gain that shows in few samples */
#define LEAST_GAIN_SEEN .01
#define EXACT .02             /* what a card that is busy all the time may carry too little */
#define IDLER .15             /* fraction of the time: clearly less busy than another card */
#define IDLER_THAN_BEFORE .07 /* of what it was: clearly less busy than before */
#define LEAST_SHARE (1 / 32.) /* of an equal one; less is not worth the parts it takes */

enum {
    FIRST_PAUSE = 10,      /* samples between two tries; four times as long after one in vain */
    FIRST_FINE_PAUSE = 60, /* the same of small deviations */
    FIRST_REST = 64,       /* samples; twice as long after each */
    FLAPPING = 40,         /* samples, or two intervals, within which a change back counts as a reversal */
    DOUBT_PAUSE =
        2 * TLY_REPLAN_MOST_INTERVAL, /* samples between two tries of a card measured far below others */
    FEW_GOODPUTS = TLY_GAUGE_SHORT,   /* samples by which a try that promises much is judged */
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

int tly_replan_place(struct tly_replan *r, int place, double bandwidth, double most, double sum_rate,
                     bool rests)
{
    if (place >= r->room) {
        struct tly_replan_place *more = realloc(r->place, (size_t)(place + 1) * sizeof *more);
        if (!more)
            return -ENOMEM;
        memset(more + r->room, 0, (size_t)(place + 1 - r->room) * sizeof *more);
        r->place = more;
        r->room = place + 1;
    }
    struct tly_replan_place *p = &r->place[place];
    *p = (struct tly_replan_place){.rests = rests, .rest_left = FIRST_REST, .rest_for = FIRST_REST};
    p->known.peak = fmax(bandwidth, most);
    tly_gauge_init(&p->card, bandwidth, most);
    tly_gauge_init(&p->sums, sum_rate, 0);
    return 0;
}

void tly_replan_doubt(struct tly_replan *r, int place)
{
    struct tly_replan_place *p = &r->place[place];
    p->card.guess = true;
    p->known.peak = p->card.most;
}

void tly_replan_move(struct tly_replan *r, int from, int to)
{
    if (from >= r->room || to >= r->room)
        return;
    const struct tly_replan_place *p = &r->place[from];
    struct tly_replan_place *q = &r->place[to];
    double most = q->card.most;
    q->card = p->card;
    q->card.most = most;
    q->card.value = tly_gauge_bound(&q->card, q->card.value);
    q->known = p->known;
    q->known.peak = tly_gauge_bound(&q->card, q->known.peak);
}

static void replan_clear(struct tly_replan *r)
{
    for (int i = 0; i < r->room; i++) {
        tly_gauge_clear(&r->place[i].card);
        tly_gauge_clear(&r->place[i].sums);
    }
    r->goodputs = 0;
    r->changed_at = r->samples;
}

void tly_replan_begin(struct tly_replan *r, bool alone)
{
    replan_clear(r);
    if (!r->expected || !alone)
        r->trying = NULL;
    if (!alone) { /* tries in vain were of other services */
        r->more.pause = FIRST_PAUSE;
        if (r->more.at > r->samples + FIRST_PAUSE)
            r->more.at = r->samples + FIRST_PAUSE;
    }
    r->expected = false;
}

double tly_replan_bandwidth(const struct tly_replan *r, int place)
{
    return place < r->room ? r->place[place].card.value : 0;
}

bool tly_replan_tries(const struct tly_replan *r, int place)
{
    return place < r->room && r->trying && r->place[place].tried;
}

bool tly_replan_assumes(const struct tly_replan *r, int place)
{
    return place < r->room && r->place[place].known.assumed;
}

bool tly_replan_eases(const struct tly_replan *r, int place)
{
    return place < r->room && r->place[place].known.eased;
}

bool tly_replan_is_sure(const struct tly_replan *r, int place)
{
    const struct tly_replan_place *p = place < r->room ? &r->place[place] : NULL;
    return p && !p->card.guess && !p->known.assumed && !tly_replan_tries(r, place);
}

double tly_replan_sum_rate(const struct tly_replan *r, int place)
{
    return place < r->room ? r->place[place].sums.value : 0;
}

bool tly_replan_rests(const struct tly_replan *r, int place)
{
    return place < r->room && r->place[place].rests;
}

/* The median of the last samples; 0: there are fewer. */
static double replan_median_goodput(const struct tly_replan *r, uint32_t count)
{
    double sorted[TLY_GOODPUTS];
    if (r->goodputs < count)
        return 0;
    for (uint32_t i = 0; i < count; i++)
        sorted[i] = r->goodput[(r->goodputs - 1 - i) % TLY_GOODPUTS];
    tly_sort(sorted, count);
    return sorted[count / 2];
}

/* --- decisions -------------------------------------------------------------------------------------- */

static double replan_sums_or_no_limit(double rate)
{
    return rate > 0 ? rate : INFINITY;
}

static uint32_t replan_reversal_window(const struct tly_replan *r)
{
    return 2 * r->interval > FLAPPING ? 2 * r->interval : FLAPPING;
}

/* way: -1, 0, 1.  True: the last move was the other way, and not long ago. */
static bool replan_turns_back(const struct tly_replan *r, struct tly_replan_move *last, int way)
{
    bool back = way && way == -last->way && r->samples - last->at < replan_reversal_window(r);
    if (way)
        *last = (struct tly_replan_move){way, r->samples};
    return back;
}

/* A card, or sums, that go back and forth are followed more and more slowly.  A value that does so while the split stays
 * (quiet) is noise: no small deviation is tried for a while, and large ones are followed as before. */
static void replan_pace(struct tly_replan *r, bool quiet)
{
    bool reversal = false;
    for (int i = 0; i < r->room; i++) {
        struct tly_replan_place *p = &r->place[i];
        double next = replan_sums_or_no_limit(p->next_sums), now = replan_sums_or_no_limit(p->sums.value);
        reversal |=
            replan_turns_back(r, &p->known.moved, (p->next > p->card.value) - (p->next < p->card.value));
        reversal |= replan_turns_back(r, &p->sums_moved, (next > now) - (next < now));
    }
    if (reversal && quiet && r->fine.at < r->samples + FIRST_FINE_PAUSE)
        r->fine.at = r->samples + FIRST_FINE_PAUSE;
    if (!reversal || quiet)
        return;
    r->interval = r->interval < TLY_REPLAN_MOST_INTERVAL / 2 ? 2 * r->interval : TLY_REPLAN_MOST_INTERVAL;
    r->paced_at = r->samples;
}

/* Faster again with each such time in which the split has not changed. */
static void replan_relax(struct tly_replan *r)
{
    uint32_t since = r->changed_at > r->paced_at ? r->changed_at : r->paced_at;
    if (r->interval <= TLY_REPLAN_INTERVAL || r->samples - since <= 4 * replan_reversal_window(r))
        return;
    r->interval = r->interval / 2 > TLY_REPLAN_INTERVAL ? r->interval / 2 : TLY_REPLAN_INTERVAL;
    r->paced_at = r->samples;
}

/* The candidates hold.  undone: they are what was before. */
static void replan_take(struct tly_replan *r, bool undone)
{
    for (int i = 0; i < r->room; i++) {
        struct tly_replan_place *p = &r->place[i];
        if (p->next != p->card.value && !undone)
            p->card.guess = p->eases || p->next > p->card.value; /* it carries so much at least */
        p->card.value = p->next;
        p->sums.value = p->next_sums;
    }
}

/* Neither a feeler nor its end is a card that goes back and forth. */
static bool replan_change(struct tly_replan *r, bool undone)
{
    if (!undone && !(r->trying && r->feeler))
        replan_pace(r, false);
    replan_take(r, undone);
    replan_clear(r);
    r->expected = true;
    return true;
}

/* The samples of a rest that begins now: twice as many as the last time, but few again after a longer time awake. */
static uint32_t replan_begin_rest(const struct tly_replan *r, struct tly_replan_place *p)
{
    bool long_awake = r->samples > p->woke_at && r->samples - p->woke_at > p->rest_for;
    uint32_t rest = long_awake ? FIRST_REST : p->rest_for;
    p->rest_for = rest < TLY_REPLAN_MOST_INTERVAL / 2 ? 2 * rest : TLY_REPLAN_MOST_INTERVAL;
    return rest;
}

/* A tallyd that would have next to nothing has nothing, for it gets whole parts. */
static void replan_lay_to_rest(struct tly_replan *r, const struct tly_replan_service *s, int n)
{
    double total = 0;
    if (n == 1)
        return;
    for (int j = 0; j < n; j++)
        total += r->weight[j];
    for (int j = 0; j < n; j++) {
        struct tly_replan_place *p = &r->place[r->from[j]];
        if (!s[r->from[j]].spare || r->weight[j] > LEAST_SHARE / n * total)
            continue;
        p->rests = true;
        p->rested_by_try = r->trying;
        p->rest_left = replan_begin_rest(r, p);
    }
}

/* A tallyd that has less for its slow process is not tried with more for as long as it would rest. */
static void replan_hold(const struct tly_replan *r, struct tly_replan_place *p)
{
    p->woke_at = p->known.held_until = r->samples + replan_begin_rest(r, p);
}

/* Those that have rested long enough, with a quarter of what the median of the others carries unless their card is used by
 * others.  True: there are some. */
static bool replan_wake(struct tly_replan *r, int count, const struct tly_replan_service *s)
{
    int n = 0;
    bool some = false;
    for (int i = 0; i < count; i++)
        if (tly_candidates_is_card(r, s, i) && r->place[i].card.value > 0)
            r->sorted[n++] = r->place[i].card.value;
    tly_sort(r->sorted, (size_t)n);
    for (int i = 0; i < count; i++) {
        struct tly_replan_place *p = &r->place[i], *card = &r->place[s[i].machine.card];
        if (!s[i].active || !p->rests || (p->rest_left && --p->rest_left) || !n)
            continue;
        double quarter = r->sorted[n / 2] / 4;
        if (!card->used) {
            card->card.value = card->next = tly_gauge_bound(&card->card, quarter);
            card->known.assumed = true;
            card->known.eased = false;
        }
        p->sums.value = p->next_sums = 0;
        p->rests = false;
        p->woke_at = r->samples;
        some = true;
    }
    return some;
}

/* Does a card that is tried carry as much more as it was tried with?  One that is busy all the time must do so without
 * doubt. */
static bool replan_has_carried(const struct tly_replan_place *p)
{
    double due = p->carried_before * p->card.value / p->before;
    return tly_gauge_carried(&p->card) >=
           due * (tly_gauge_is_full(&p->card) ? 1 - EXACT : 1 - TLY_REPLAN_NEAR);
}

/* poor: less than half of the promised gain has come.  A card of a feeler that is clearly idler than the busiest of them has
 * only waited for that one, if it has carried anything. */
static enum tly_replan_outcome replan_judge_place(const struct tly_replan *r,
                                                  const struct tly_replan_place *p, bool poor, double busiest)
{
    double carried = tly_gauge_carried(&p->card);
    if (!r->feeler)
        return poor ? IN_VAIN : CARRIED;
    if (replan_has_carried(p))
        return CARRIED;
    return carried > 0 && tly_gauge_busy(&p->card) <= busiest - IDLER ? WAITED : IN_VAIN;
}

/* Judge each place of the try.  Returns the best outcome. */
static enum tly_replan_outcome replan_judge_places(struct tly_replan *r, bool poor)
{
    enum tly_replan_outcome best = IN_VAIN;
    double busiest = 0;
    for (int i = 0; i < r->room; i++)
        if (r->place[i].tried)
            busiest = fmax(busiest, tly_gauge_busy(&r->place[i].card));
    for (int i = 0; i < r->room; i++) {
        struct tly_replan_place *p = &r->place[i];
        if (!p->tried)
            continue;
        p->outcome = replan_judge_place(r, p, poor, busiest);
        best = p->outcome > best ? p->outcome : best;
    }
    return best;
}

/* Are there samples enough of all that is tried?  A card of which nothing is seen for long is not waited for. */
static bool replan_can_judge(const struct tly_replan *r, uint32_t count)
{
    if (!(replan_median_goodput(r, count) > 0))
        return false;
    for (int i = 0; i < r->room && r->feeler && r->goodputs < TLY_GOODPUTS; i++)
        if (r->place[i].tried && !(tly_gauge_carried(&r->place[i].card) > 0))
            return false;
    return true;
}

/* Tallyds that the try has put to rest go on as before.  True: there were some. */
static bool replan_wake_from_try(struct tly_replan *r)
{
    bool some = false;
    for (int i = 0; i < r->room; i++) {
        struct tly_replan_place *p = &r->place[i];
        if (!p->rests || !p->rested_by_try)
            continue;
        p->rests = false;
        p->rest_for = p->rest_left;
        some = true;
    }
    return some;
}

/* A card keeps what it has carried, and gets its old value back otherwise.  One that is busy all the time says itself what it
 * carries, and estimates follow that; after a feeler that is too near to tell.  others: another card of the try has more to
 * carry.  True: it has its old value again. */
static bool replan_settle(struct tly_replan *r, struct tly_replan_place *p, bool others)
{
    bool more = r->trying == &r->more, vain = p->outcome == IN_VAIN;
    bool stays = !r->feeler && more && p->card.value != p->before && tly_gauge_is_full(&p->card);
    p->felt = r->feeler && p->outcome == CARRIED;
    p->known.busy_in_vain = vain && more ? p->busy_before : 0;
    if (vain && more && p->doubtful)
        p->known.asked_until = r->samples + DOUBT_PAUSE;
    if (p->outcome == CARRIED || stays)
        return false;
    p->next = p->before;
    p->next_sums = p->before_sums;
    p->known.eased = p->eased_before;
    p->card.guess = !vain && p->guess_before;
    p->known.moved.way = p->sums_moved.way = 0;
    p->known.held_until = vain && others ? r->samples + FLAPPING : 0;
    if (vain && p->known.eased)
        replan_hold(r, p);
    if (!more) {
        p->known.refuted = p->card.value;
        p->known.refuted_until = r->samples + TLY_REPLAN_MOST_INTERVAL;
    }
    return true;
}

/* Has the try brought at least half of what it promised?  Has each card of a feeler carried what it was tried with?  What has
 * not gets its old value back; true if anything does.  A try in vain puts the next one off. */
static bool replan_judge_try(struct tly_replan *r)
{
    struct tly_replan_trial *t = r->trying;
    bool small = t == &r->fine || (!r->feeler && r->promised < MUCH), undone = false;
    uint32_t count = small ? TLY_GOODPUTS : FEW_GOODPUTS;
    if (!t || !replan_can_judge(r, count))
        return false;
    enum tly_replan_outcome best =
        replan_judge_places(r, replan_median_goodput(r, count) < r->before * (1 + r->promised / 2));
    if (best == IN_VAIN) {
        t->pause = t->pause < TLY_REPLAN_MOST_INTERVAL / 4 ? 4 * t->pause : TLY_REPLAN_MOST_INTERVAL;
        undone = replan_wake_from_try(r);
    } else if (best == CARRIED)
        t->pause = t == &r->fine ? FIRST_FINE_PAUSE : FIRST_PAUSE;
    t->at = best == IN_VAIN ? r->samples + t->pause : r->samples;
    for (int i = 0; i < r->room; i++) {
        struct tly_replan_place *p = &r->place[i];
        undone |= p->tried && replan_settle(r, p, best != IN_VAIN);
    }
    r->trying = NULL;
    return undone;
}

/* The split need not follow, but keep what is known; only cards that are alike are not parted for it, and no
 * tallyd is taken for slow. */
static void replan_take_quietly(struct tly_replan *r)
{
    for (int i = 0; i < r->room; i++)
        if (r->place[i].parts || r->place[i].eases)
            r->place[i].next = r->place[i].card.value;
    replan_pace(r, true);
    replan_take(r, false);
}

/* Is some candidate another value by far? */
static bool replan_is_far(const struct tly_replan *r)
{
    for (int i = 0; i < r->room; i++) {
        const struct tly_replan_place *p = &r->place[i];
        bool sums = p->next_sums != p->sums.value;
        if (sums || (p->card.value > 0 && fabs(p->next / p->card.value - 1) > TLY_GAUGE_FAR))
            return true;
    }
    return false;
}

/* Another split, for candidates that are to be tried (`t`), or for sure (NULL). */
static bool replan_begin_change(struct tly_replan *r, int count, const struct tly_replan_service *s,
                                struct tly_replan_trial *t, bool feeler, double worth)
{
    for (int i = 0; i < r->room; i++) {
        struct tly_replan_place *p = &r->place[i];
        p->before = p->card.value;
        p->before_sums = p->sums.value;
        p->guess_before = p->card.guess;
        p->eased_before = p->known.eased;
        if (p->next != p->before)
            p->known.eased = p->eases;
        p->tried = t && (p->next != p->before || p->next_sums != p->before_sums);
        p->busy_before = tly_gauge_both(&p->card);
        p->carried_before = tly_gauge_carried(&p->card);
        p->rested_by_try = false;
        p->felt = false;
    }
    r->trying = t;
    r->before = replan_median_goodput(r, t == &r->fine ? TLY_GOODPUTS : FEW_GOODPUTS);
    r->promised = worth;
    r->feeler = feeler;
    replan_lay_to_rest(r, s, tly_candidates_gather(r, count, s));
    for (int i = 0; i < r->room; i++)
        if (r->place[i].eases && !r->place[i].rests)
            replan_hold(r, &r->place[i]);
    return replan_change(r, false);
}

/* What a change must promise: less where a card has been seen to carry more by far than the split goes by, for that is no
 * noise, and where one was measured far below the others, for that is tried but rarely. */
static double replan_least_gain(const struct tly_replan *r, int count, const struct tly_replan_service *s)
{
    for (int i = 0; i < count; i++) {
        const struct tly_replan_place *p = &r->place[i];
        double planned = s[i].machine.bandwidth;
        bool seen = planned > 0 && p->card.value > planned * (1 + TLY_GAUGE_FAR);
        if (tly_candidates_is_card(r, s, i) && (seen || (p->doubtful && p->next > p->card.value)))
            return LEAST_GAIN_SEEN;
    }
    return TLY_REPLAN_LEAST_GAIN;
}

/* Has a candidate for more become idler since that was tried in vain?  A card with a small share has few backlogs, and only
 * a few less once it carries more. */
static bool replan_is_idler(const struct tly_replan *r)
{
    for (int i = 0; i < r->room; i++) {
        const struct tly_replan_place *p = &r->place[i];
        if (p->next > p->card.value && p->card.count >= TLY_GAUGE_LONG / 2 &&
            tly_gauge_both(&p->card) < p->known.busy_in_vain * (1 - IDLER_THAN_BEFORE))
            return true;
    }
    return false;
}

/* Has a step become slower just now?  Then gauges soon tell why, and cards that wait for the slow one seem idle. */
static bool replan_has_slowed(const struct tly_replan *r)
{
    return replan_median_goodput(r, 1) <
           (1 - MUCH) * replan_median_goodput(r, r->goodputs < TLY_GOODPUTS ? r->goodputs : TLY_GOODPUTS);
}

/* Perhaps somebody can do more than gauges know.  What others carry is tried by a feeler first: a card that carries no more
 * costs a fifth of the speed then, and not most of it. */
static bool replan_try_out(struct tly_replan *r, int count, const struct tly_replan_service *s)
{
    if (r->trying || replan_median_goodput(r, FEW_GOODPUTS) == 0 || replan_has_slowed(r) ||
        tly_candidates_wait(r, count, s))
        return false;
    for (int far = 0; far < 2; far++) {
        tly_candidates_forget(r);
        if (!tly_candidates_raise(r, count, s, far) || (r->samples < r->more.at && !replan_is_idler(r)))
            continue;
        double worth = tly_candidates_gain(r, count, s);
        if (!(worth >= replan_least_gain(r, count, s)))
            continue;
        bool feeler = tly_candidates_restrain(r, far);
        if (feeler)
            tly_candidates_gain(r, count, s);
        return replan_begin_change(r, count, s, &r->more, feeler, worth);
    }
    tly_candidates_forget(r);
    return false;
}

/* What gauges say. */
static bool replan_follow(struct tly_replan *r, int count, const struct tly_replan_service *s, bool learnt)
{
    double worth = tly_candidates_gain(r, count, s);
    if (!(worth >= TLY_REPLAN_LEAST_GAIN)) {
        replan_take_quietly(r);
        return replan_try_out(r, count, s);
    }
    if (learnt || replan_is_far(r))
        return replan_begin_change(r, count, s, NULL, false, worth);
    if (r->trying || r->samples < r->fine.at || replan_median_goodput(r, TLY_GOODPUTS) == 0)
        return replan_try_out(r, count, s);
    return replan_begin_change(r, count, s, &r->fine, false, worth);
}

bool tly_replan_step(struct tly_replan *r, int count, const struct tly_replan_service *s, double goodput)
{
    if (count > r->room || count > TLY_MAX_SERVICES)
        return false;
    tly_candidates_see(r, count, s);
    r->samples++;
    replan_relax(r);
    if (isfinite(goodput) && goodput > 0)
        r->goodput[r->goodputs++ % TLY_GOODPUTS] = goodput;
    bool learnt = tly_candidates_learn(r, count, s);
    if (!r->fixed && !r->trying && replan_wake(r, count, s))
        return replan_change(r, false);
    if (replan_judge_try(r))
        return replan_change(r, true);
    tly_candidates_find_short(r, count, s);
    if (r->samples - r->changed_at < r->interval)
        return false;
    bool moved = tly_candidates_estimate(r, count, s) || learnt;
    if (r->fixed) {
        replan_take(r, false);
        return false;
    }
    return moved ? replan_follow(r, count, s, learnt) : replan_try_out(r, count, s);
}

bool tly_replan_sums_limit(const struct tly_replan *r, int place)
{
    const struct tly_replan_place *p = place < r->room ? &r->place[place] : NULL;
    return p && p->sums.value > 0 && !p->rests && tly_gauge_is_full(&p->sums);
}

/* What card i carries over what the split goes by; 0: its service's sums limit it. */
static double replan_of_planned(const struct tly_replan *r, int i, const struct tly_replan_service *s)
{
    const struct tly_replan_place *p = &r->place[i];
    if (tly_replan_sums_limit(r, i))
        return 0;
    return s->machine.bandwidth > 0 && p->card.value > 0 ? p->card.value / s->machine.bandwidth : 1;
}

int tly_replan_standout(const struct tly_replan *r, int count, const struct tly_replan_service *s, int named)
{
    int found = -1, busy = 0;
    double least = INFINITY, most = 0, busiest = 0, busiest_slow = 0;
    for (int i = 0; i < count && i < r->room; i++)
        if (tly_candidates_is_card(r, s, i)) {
            most = fmax(most, replan_of_planned(r, i, &s[i]));
            busiest = fmax(busiest, tly_gauge_busy(&r->place[i].card));
        }
    double slow = (1 - TLY_REPLAN_CLEARLY) * fmin(1, most);
    for (int i = 0; i < count && i < r->room; i++)
        if (tly_candidates_is_card(r, s, i) && replan_of_planned(r, i, &s[i]) < slow)
            busiest_slow = fmax(busiest_slow, tly_gauge_busy(&r->place[i].card));
    for (int i = 0; i < count && i < r->room; i++) {
        const struct tly_replan_place *p = &r->place[i];
        /* A card that is less busy than a slow one may only have that one's backlogs.  So may a card to which the plan leaves
         * time, if any card is busier. */
        double limit = p->load < 1 - TLY_REPLAN_CLEARLY ? busiest : busiest_slow;
        bool full = tly_candidates_is_card(r, s, i) && tly_gauge_is_full(&p->card) &&
                    tly_gauge_busy(&p->card) > limit - TLY_REPLAN_LESS_BUSY;
        full |= s[i].active && !p->rests && s[i].weight && tly_gauge_is_full(&p->sums);
        double ratio = replan_of_planned(r, i, &s[i]),
               counts = i == named ? ratio * (1 - TLY_REPLAN_CLEARLY) : ratio;
        busy += full;
        if (full && counts < least) {
            least = counts;
            found = i;
        }
    }
    /* Where all carry as little, as two machines alone always do, nobody can tell whose card it is. */
    return busy <= 1 || least < slow ? found : -1;
}
