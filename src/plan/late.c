/* late.c - which rank computes longer than the others.
 *
 * Each rank has a sliding window of samples.  Its figure is the mean of the middle half of them: a pause now and then (a
 * checkpoint, a process that was stopped) does not count, and ranks that are late by turns have the same figure.  Figures
 * are compared with the lower median of all ranks, so one fast rank makes no late ones. */
#include "plan/late.h"
#include "plan/sort.h"

#include <stdbool.h>
#include <stdlib.h>

#define LATE .1   /* of the step, and */
#define STILL .07 /* for one that has been named */
#define LEAST_S 1e-3

void tly_own_see(struct tly_own *o, uint32_t steps, uint64_t own_us, uint64_t us)
{
    if (!steps || !us || own_us > us)
        return;
    o->share[o->count % TLY_LATE_SAMPLES] = (double)own_us / (double)us;
    o->step_s[o->count % TLY_LATE_SAMPLES] = (double)us * 1e-6 / steps;
    o->count++;
}

/* The mean of the middle half of a ring that has had `count` values. */
static double usual(const double *ring, uint32_t count)
{
    double sorted[TLY_LATE_SAMPLES], sum = 0;
    uint32_t n = count < TLY_LATE_SAMPLES ? count : TLY_LATE_SAMPLES, cut = n / 4;
    for (uint32_t i = 0; i < n; i++)
        sorted[i] = ring[i];
    tly_sort(sorted, n);
    for (uint32_t i = cut; i < n - cut; i++)
        sum += sorted[i];
    return sum / (n - 2 * cut);
}

int tly_late_find(int count, const struct tly_own *const *of, int named, struct tly_lateness *out)
{
    double *sorted = calloc((size_t)count + 1, sizeof *sorted), most = 0;
    int known = 0, latest = -1;
    bool enough = sorted;
    for (int i = 0; enough && i < count; i++) {
        if (!of[i])
            continue;
        enough = of[i]->count >= TLY_LATE_ENOUGH;
        double own = enough ? usual(of[i]->share, of[i]->count) : 0;
        sorted[known++] = own;
        if (latest < 0 || own > most) {
            latest = i;
            most = own;
        }
    }
    int found = enough && known > 1 ? 0 : -1;
    if (found == 0) {
        tly_sort(sorted, (size_t)known);
        double share = most - sorted[(known - 1) / 2], step_s = usual(of[latest]->step_s, of[latest]->count);
        found = share > (latest == named ? STILL : LATE) && share * step_s > LEAST_S;
        if (found)
            *out = (struct tly_lateness){latest, share, step_s};
    }
    free(sorted);
    return found;
}
