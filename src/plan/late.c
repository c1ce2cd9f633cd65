/* late.c - which rank keeps the others waiting by itself, and why.
 *
 * Each rank has a sliding window of samples.  Its figure is the mean of the middle half of them: a pause now and then (a
 * checkpoint, a process that was stopped) does not count, and ranks that are late by turns have the same figure.  Figures
 * are compared with the lower median of all ranks, so one fast rank makes no late ones.
 *
 * What the late rank takes longer than the median is taken apart.  Waiting for a processor makes a rank's own time longer by
 * some factor, and on busy processors it does so on all ranks.  Only what exceeds the median factor is this rank's waiting;
 * the same holds for memory that comes from a disk.  The rest is computing. */
#include "plan/late.h"
#include "plan/sort.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#define LATE .1   /* of the step, and */
#define STILL .07 /* for one that has been named */
#define LEAST_S 1e-3
#define MOST_OF_IT .5 /* of what it takes longer, and */
#define STILL_MOST .35
#define LONGEST_FACTOR 100 /* by which waiting makes a time longer */

int tly_steps_check(const struct tly_steps *s)
{
    bool sane = s->count && s->us && s->own_us <= s->us && s->waited_us <= s->own_us &&
                s->paged_us <= s->own_us - s->waited_us;
    return sane ? 0 : -EPROTO;
}

void tly_own_see(struct tly_own *o, const struct tly_steps *s)
{
    if (tly_steps_check(s) != 0)
        return;
    uint32_t at = o->count++ % TLY_LATE_SAMPLES;
    double us = (double)s->us;
    o->ring[TLY_OWN_SHARE][at] = (double)s->own_us / us;
    o->ring[TLY_OWN_WAITED][at] = (double)s->waited_us / us;
    o->ring[TLY_OWN_PAGED][at] = (double)s->paged_us / us;
    o->ring[TLY_OWN_STEP_S][at] = us * 1e-6 / s->count;
}

/* The mean of the middle half of its samples. */
static double late_usual(const struct tly_own *o, enum tly_own_figure figure)
{
    double sorted[TLY_LATE_SAMPLES], sum = 0;
    uint32_t n = o->count < TLY_LATE_SAMPLES ? o->count : TLY_LATE_SAMPLES, cut = n / 4;
    for (uint32_t i = 0; i < n; i++)
        sorted[i] = o->ring[figure][i];
    tly_sort(sorted, n);
    for (uint32_t i = cut; i < n - cut; i++)
        sum += sorted[i];
    return sum / (n - 2 * cut);
}

static double late_share(const struct tly_own *o)
{
    return late_usual(o, TLY_OWN_SHARE);
}
static double late_paged(const struct tly_own *o)
{
    return late_usual(o, TLY_OWN_PAGED);
}
/* What it would take if it waited for no processor. */
static double late_unwaited(const struct tly_own *o)
{
    return fmax(late_share(o) - late_usual(o, TLY_OWN_WAITED), late_share(o) / LONGEST_FACTOR);
}
/* How much longer waiting for processors makes that. */
static double late_factor(const struct tly_own *o)
{
    return late_share(o) > 0 ? late_share(o) / late_unwaited(o) : 1;
}

/* The lower median of the ranks that have not left. */
static double late_median(int count, const struct tly_own *const *of,
                          double (*figure)(const struct tly_own *), double *room)
{
    int n = 0;
    for (int i = 0; i < count; i++)
        if (of[i])
            room[n++] = figure(of[i]);
    tly_sort(room, (size_t)n);
    return room[(n - 1) / 2];
}

/* The reason for the largest part of the time by which this rank takes longer than the others. */
static enum tly_late_why late_reason(int count, const struct tly_own *const *of,
                                     const struct tly_lateness *late, const struct tly_lateness *named,
                                     double *room)
{
    const struct tly_own *o = of[late->rank];
    double waits = late_share(o) - late_unwaited(o) * late_median(count, of, late_factor, room);
    double pages = late_paged(o) - late_median(count, of, late_paged, room);
    enum tly_late_why why = waits > pages ? TLY_LATE_WAITS : TLY_LATE_PAGES;
    bool again = named && named->rank == late->rank && named->why == why;
    return fmax(waits, pages) > late->share * (again ? STILL_MOST : MOST_OF_IT) ? why : TLY_LATE_COMPUTES;
}

int tly_late_find(int count, const struct tly_own *const *of, const struct tly_lateness *named,
                  struct tly_lateness *out)
{
    double *room = calloc((size_t)count + 1, sizeof *room), most = 0;
    int known = 0, latest = -1;
    bool enough = room;
    for (int i = 0; enough && i < count; i++) {
        if (!of[i])
            continue;
        known++;
        enough = of[i]->count >= TLY_LATE_ENOUGH;
        if (enough && (latest < 0 || late_share(of[i]) > most)) {
            latest = i;
            most = late_share(of[i]);
        }
    }
    int found = enough && known > 1 ? 0 : -1;
    if (found == 0) {
        struct tly_lateness late = {.rank = latest,
                                    .share = most - late_median(count, of, late_share, room),
                                    .step_s = late_usual(of[latest], TLY_OWN_STEP_S)};
        found = late.share > (named && latest == named->rank ? STILL : LATE) &&
                late.share * late.step_s > LEAST_S;
        if (found) {
            late.why = late_reason(count, of, &late, named, room);
            *out = late;
        }
    }
    free(room);
    return found;
}
