/* measure.c - which network cards are measured when, and what is made of the figures (src/membership/measure.h moves the
 * bytes).
 *
 * Pairs would not do: of two cards the slower shows, so the fastest of all could never show more than the second one
 * has.  But that is the one which matters, a spare machine with a card of its own class, on which most sums go.  So each
 * card that is wanted stands once in the middle of a group, and all others of the group stream to it and it to them. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#include "plan/plan.h"
#include "plan/sort.h"

static int measure_count_wanted(int count, const bool *wanted)
{
    int n = 0;
    for (int i = 0; i < count; i++)
        n += wanted[i];
    return n;
}

int tly_plan_measure_turns(int count, const bool *wanted)
{
    int n = measure_count_wanted(count, wanted),
        at_once = (count + TLY_MEASURE_GROUP - 1) / TLY_MEASURE_GROUP;
    if (count < 2 || n == 0)
        return 0;
    return count == 2 ? 1 : (n + at_once - 1) / at_once; /* of two each is the other's middle */
}

/* The fastest that is in no group yet, or -1. */
static int measure_find_fastest(int count, const double *rate, const int *middle)
{
    int best = -1;
    for (int i = 0; i < count; i++)
        if (middle[i] < 0 && (best < 0 || rate[i] > rate[best]))
            best = i;
    return best;
}

void tly_plan_measure_groups(int count, const bool *wanted, const double *rate, int turn, int *middle)
{
    int turns = tly_plan_measure_turns(count, wanted), n = measure_count_wanted(count, wanted);
    assert(turn < turns && turn >= 0);
    int from = (int)((int64_t)n * turn / turns), to = (int)((int64_t)n * (turn + 1) / turns);
    struct {
        int middle, size;
        double around;
    } group[TLY_MAX_SERVICES / TLY_MEASURE_GROUP + 1];
    int groups = 0;
    if (count == 2)
        to = 1;
    for (int i = 0, nth = 0; i < count; i++) {
        middle[i] = -1;
        if (wanted[i] && nth++ >= from && nth <= to) {
            middle[i] = i;
            group[groups].middle = i;
            group[groups].size = 1;
            group[groups++].around = 0;
        }
    }
    for (int left = groups, g = 0; left > 0; g = (g + 1) % groups) {
        int who = measure_find_fastest(count, rate, middle);
        bool full = group[g].size == TLY_MEASURE_GROUP,
             enough =
                 group[g].around > TLY_MEASURE_ENOUGH * rate[group[g].middle] && rate[group[g].middle] > 0;
        if (group[g].size == 0)
            continue;
        if (who < 0 || full || enough) {
            group[g].size = 0; /* complete */
            left--;
            continue;
        }
        middle[who] = group[g].middle;
        group[g].size++;
        group[g].around += rate[who];
    }
}

/* The rate for all of a group whose middle one is `rate`: a known one that it may well be, else itself. */
static double measure_common(int count, const bool *measured, const double *rate, double value)
{
    double best = value, nearest = TLY_MEASURE_SAME_AS_KNOWN * value;
    for (int i = 0; i < count; i++) {
        double off = rate[i] > value ? rate[i] - value : value - rate[i];
        if (!measured[i] && rate[i] > 0 && off <= nearest) {
            nearest = off;
            best = rate[i];
        }
    }
    return best;
}

int tly_plan_measure_settle(int count, const bool *measured, double *rate)
{
    double *sorted = malloc((size_t)count * sizeof *sorted),
           *settled = malloc((size_t)count * sizeof *settled);
    int n = 0, err = sorted && settled ? 0 : -ENOMEM;
    for (int i = 0; i < count && !err; i++) {
        settled[i] = rate[i];
        if (measured[i] && rate[i] > 0)
            sorted[n++] = rate[i];
    }
    if (!err)
        tly_sort(sorted, (size_t)n);
    for (int from = 0, to; from < n && !err; from = to) {
        to = from + 1;
        while (to < n && sorted[to] <= TLY_MEASURE_NEXT * sorted[to - 1] &&
               sorted[to] <= TLY_MEASURE_SPAN * sorted[from])
            to++;
        double value = measure_common(count, measured, rate, sorted[(from + to) / 2]);
        for (int i = 0; i < count; i++)
            if (measured[i] && rate[i] >= sorted[from] && rate[i] <= sorted[to - 1])
                settled[i] = value;
    }
    for (int i = 0; i < count && !err; i++)
        rate[i] = settled[i];
    free(sorted);
    free(settled);
    return err;
}
