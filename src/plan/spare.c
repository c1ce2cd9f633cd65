/* spare.c - which CPU machines bring nothing: the split without them takes as long.
 *
 * They are left out in the order of their weights in the split of all, the least first.  The fewer there are, the longer
 * the split takes, so the largest number that costs nothing is found by bisection: even a thousand machines take ten
 * splits. */
#include <math.h>
#include <stdlib.h>

#include "plan/plan.h"

/* A split that takes so many times as long counts as taking as long. */
#define AS_LONG 1.01

struct candidate {
    int machine;
    uint32_t weight;
};

struct spare_trial {
    enum tly_split split;
    int count, spare_count;
    struct tly_plan_machine machine[TLY_MAX_SERVICES]; /* all, with the bandwidths that count */
    struct candidate spare[TLY_MAX_SERVICES]; /* those without ranks, in the order in which they go */
    /* without some: */
    struct tly_plan_machine kept[TLY_MAX_SERVICES];
    int place[TLY_MAX_SERVICES]; /* of a card in `kept`; -1: none of its machines is there yet */
    bool dropped[TLY_MAX_SERVICES];
    uint32_t weight[TLY_MAX_SERVICES];
};

/* The least weight first, of equal ones the last machine. */
static int spare_compare(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    if (x->weight != y->weight)
        return x->weight < y->weight ? -1 : 1;
    return y->machine - x->machine;
}

/* Each machine gets its card's bandwidth, so that it stays when another one behind that card goes. */
static void spare_set_bandwidths(struct spare_trial *t)
{
    double slowest = INFINITY;
    for (int i = 0; i < t->count; i++)
        if (t->machine[i].bandwidth > 0)
            slowest = fmin(slowest, t->machine[i].bandwidth);
    for (int i = 0; i < t->count; i++) {
        struct tly_plan_machine *m = &t->machine[i], *first = &t->machine[m->card];
        if (m->bandwidth > 0 && !(first->bandwidth > 0 && first->bandwidth < m->bandwidth))
            first->bandwidth = m->bandwidth;
    }
    for (int i = 0; i < t->count; i++) {
        double *card = &t->machine[t->machine[i].card].bandwidth;
        if (!(*card > 0))
            *card = isinf(slowest) ? 1 : slowest;
        t->machine[i].bandwidth = *card;
    }
}

/* The time of the split without the first `drop` candidates; their weights are in t->weight. */
static double spare_time_without(struct spare_trial *t, int drop)
{
    int n = 0;
    for (int i = 0; i < t->count; i++) {
        t->dropped[i] = false;
        t->place[i] = -1;
    }
    for (int i = 0; i < drop; i++)
        t->dropped[t->spare[i].machine] = true;
    for (int i = 0; i < t->count; i++) {
        int *first = &t->place[t->machine[i].card];
        if (t->dropped[i])
            continue;
        if (*first < 0)
            *first = n;
        t->kept[n] = t->machine[i];
        t->kept[n++].card = (uint32_t)*first;
    }
    if (tly_plan_split(t->split, n, t->kept, t->weight) != 0)
        return INFINITY;
    return tly_plan_cost(n, t->kept, t->weight, NULL);
}

int tly_plan_spare(enum tly_split split, int count, const struct tly_plan_machine *machine)
{
    struct spare_trial *t = malloc(sizeof *t);
    int spare = 0;
    if (!t)
        return 0;
    *t = (struct spare_trial){.split = split, .count = count};
    if (tly_plan_split(split, count, machine, t->weight) != 0) /* else they are sound */
        goto out;
    for (int i = 0; i < count; i++) {
        t->machine[i] = machine[i];
        if (!machine[i].ranks)
            t->spare[t->spare_count++] = (struct candidate){i, t->weight[i]};
    }
    spare_set_bandwidths(t);
    qsort(t->spare, (size_t)t->spare_count, sizeof *t->spare, spare_compare);
    double most = AS_LONG * spare_time_without(t, 0);
    for (int more = t->spare_count; spare < more;) {
        int middle = spare + (more - spare + 1) / 2;
        if (spare_time_without(t, middle) <= most)
            spare = middle;
        else
            more = middle - 1;
    }
out:
    free(t);
    return spare;
}
