/* merge.c - many clocks to one.
 *
 * A message that leaves at s by u's clock and comes at r by v's tells that v's clock is ahead of u's by at
 * most r - s: it cannot have come before it left. The least of all messages from u to v bounds the difference
 * from above, those from v to u from below. All pairs together are difference constraints
 *
 *     x[v] <= x[u] + w(u, v),    w(u, v) = min over messages of (r - s)
 *
 * whose tightest bounds against the first clock are shortest paths, from it and to it. Each clock is put into
 * the middle of its bounds, half their distance is the uncertainty. Both bounds satisfy all constraints,
 * hence so does the middle: after merging no message comes before it left, between any two processes.
 *
 * Clocks that do not run alike contradict themselves in long traces. Then all constraints are loosened by the
 * least slack with which they can be met.
 *
 * Messages are the first bytes of pushes and of results. Processes of one kernel have one clock. A rank's slices
 * do not say which of two services it was that had one place, one after the other; but no part of a round goes to both,
 * so the one that has the other end of it is meant. */
#include "trace/timeline.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static const int64_t far = INT64_MAX / 4; /* no bound */

/* Sums of many differences, whatever a file says. */
__extension__ typedef __int128 length;

struct graph {
    size_t count;
    int64_t *least; /* owned: count x count, far: no message */
    size_t *clock;  /* owned: of each process, the process whose clock stands for it */
};

/* The slices of one row and peer; sorted by part. */
struct run {
    const struct tly_slice *from, *to;
};

static struct run merge_find_run(const struct tly_process *p, enum tly_row row, uint32_t peer)
{
    size_t edge[2];
    for (int upper = 0; upper < 2; upper++) {
        size_t low = 0, high = p->slice_count;
        while (low < high) {
            size_t mid = low + (high - low) / 2;
            const struct tly_slice *s = &p->slices[mid];
            bool before = s->row < row || (s->row == row && (upper ? s->peer <= peer : s->peer < peer));
            if (before)
                low = mid + 1;
            else
                high = mid;
        }
        edge[upper] = low;
    }
    return p->slice_count ? (struct run){p->slices + edge[0], p->slices + edge[1]} : (struct run){NULL, NULL};
}

static int merge_compare(const struct tly_slice *a, const struct tly_slice *b)
{
    if (a->key != b->key)
        return a->key < b->key ? -1 : 1;
    if (a->round != b->round)
        return a->round < b->round ? -1 : 1;
    return (a->part > b->part) - (a->part < b->part);
}

/* Take the slices of one part from the front of a run; NULL if it was there more than once (sent again: which
 * of them met which of the other end's is not known). */
static const struct tly_slice *merge_take(struct run *r)
{
    const struct tly_slice *first = r->from++;
    bool alone = true;
    for (; r->from < r->to && merge_compare(first, r->from) == 0; r->from++)
        alone = false;
    return alone ? first : NULL;
}

static int64_t merge_least_delay(struct run sent, struct run came)
{
    int64_t least = far;
    while (sent.from < sent.to && came.from < came.to) {
        int c = merge_compare(sent.from, came.from);
        const struct tly_slice *s = c <= 0 ? merge_take(&sent) : NULL, *r = c >= 0 ? merge_take(&came) : NULL;
        if (s && r && r->from - s->from < least)
            least = r->from - s->from;
    }
    return least;
}

int tly_timeline_check(const struct tly_timeline *t, size_t *which, char *why, size_t why_len)
{
    const struct tly_process *a = t->processes;
    for (size_t i = 1; i < t->count; i++) {
        const struct tly_process *b = &t->processes[i];
        *which = i;
        if (strcmp(a->job, b->job) != 0 || a->start != b->start) {
            snprintf(why, why_len,
                     "is of another job: '%s', start %016" PRIx64 ", not '%s', start %016" PRIx64, b->job,
                     b->start, a->job, a->start);
            return -EINVAL;
        }
        for (size_t j = 0; j < i; j++)
            if (t->processes[j].service == b->service && t->processes[j].index == b->index &&
                t->processes[j].incarnation == b->incarnation) {
                snprintf(why, why_len, "has %s %u, and so has another file", b->service ? "service" : "rank",
                         b->index);
                return -EINVAL;
            }
    }
    return 0;
}

static void merge_note(struct graph *g, size_t u, size_t v, int64_t delay)
{
    int64_t *w = &g->least[g->clock[u] * g->count + g->clock[v]];
    if (delay < *w)
        *w = delay;
}

static int merge_make_graph(struct graph *g, struct tly_timeline *t)
{
    g->count = t->count;
    g->least = malloc(t->count * t->count * sizeof *g->least);
    g->clock = malloc(t->count * sizeof *g->clock);
    if (!g->least || !g->clock)
        return -ENOMEM;
    for (size_t i = 0; i < t->count * t->count; i++)
        g->least[i] = far;
    for (size_t i = 0; i < t->count; i++) {
        g->clock[i] = i;
        for (size_t j = 0; j < i && g->clock[i] == i; j++)
            if (strcmp(t->processes[i].clock, t->processes[j].clock) == 0)
                g->clock[i] = g->clock[j];
        tly_process_sort(&t->processes[i], false);
    }
    for (size_t i = 0; i < t->count; i++)
        for (size_t j = 0; j < t->count; j++) {
            const struct tly_process *rank = &t->processes[i], *service = &t->processes[j];
            if (rank->service || !service->service || g->clock[i] == g->clock[j])
                continue;
            merge_note(g, i, j,
                       merge_least_delay(merge_find_run(rank, TLY_ROW_SEND, service->index),
                                         merge_find_run(service, TLY_ROW_PUSH, rank->index)));
            merge_note(g, j, i,
                       merge_least_delay(merge_find_run(service, TLY_ROW_ANSWER, rank->index),
                                         merge_find_run(rank, TLY_ROW_RESULT, service->index)));
        }
    return 0;
}

/* Shortest paths from clock `root`, or to it.  False: a cycle is negative. */
static bool merge_paths(const struct graph *g, size_t root, bool backwards, int64_t slack, length *from)
{
    for (size_t i = 0; i < g->count; i++)
        from[i] = far;
    from[root] = 0;
    bool changed = true;
    for (size_t turn = 0; turn <= g->count && changed; turn++) {
        changed = false;
        for (size_t u = 0; u < g->count; u++)
            for (size_t v = 0; v < g->count && from[u] < far; v++) {
                int64_t w = backwards ? g->least[v * g->count + u] : g->least[u * g->count + v];
                if (w < far && from[u] + w + slack < from[v]) {
                    from[v] = from[u] + w + slack;
                    changed = true;
                }
            }
    }
    return !changed;
}

/* The least slack without a negative cycle: by halving, to the nanosecond. */
static int64_t merge_find_slack(const struct graph *g, size_t root, length *from)
{
    if (merge_paths(g, root, false, 0, from))
        return 0;
    int64_t low = 0, high = 0;
    for (size_t i = 0; i < g->count * g->count; i++)
        if (g->least[i] < far && -g->least[i] > high)
            high = -g->least[i];
    while (high - low > 1) {
        int64_t mid = low + (high - low) / 2;
        if (merge_paths(g, root, false, mid, from))
            high = mid;
        else
            low = mid;
    }
    return high;
}

static void merge_shift(struct tly_process *p, int64_t by)
{
    p->from += by;
    p->to += by;
    for (size_t i = 0; i < p->slice_count; i++) {
        p->slices[i].from += by;
        p->slices[i].to += by;
    }
    for (size_t i = 0; i < p->sample_count; i++)
        p->samples[i].at += by;
}

static int64_t merge_earliest(const struct tly_timeline *t)
{
    int64_t first = INT64_MAX;
    for (size_t i = 0; i < t->count; i++) {
        for (size_t n = 0; n < t->processes[i].slice_count; n++)
            if (t->processes[i].slices[n].from < first)
                first = t->processes[i].slices[n].from;
        for (size_t n = 0; n < t->processes[i].sample_count; n++)
            if (t->processes[i].samples[n].at < first)
                first = t->processes[i].samples[n].at;
    }
    return first == INT64_MAX ? 0 : first;
}

int tly_timeline_merge(struct tly_timeline *t, int64_t *slack, size_t *which, char *why, size_t why_len)
{
    struct graph g = {0};
    size_t first = 0;
    int err = tly_timeline_check(t, which, why, why_len);
    if (err)
        return err;
    assert(t->count > 0);
    for (size_t i = 0; i < t->count; i++)
        if (!t->processes[i].service && t->processes[i].index == 0)
            first = i;
    length *upper = malloc(t->count * sizeof *upper), *lower = malloc(t->count * sizeof *lower);
    err = upper && lower ? merge_make_graph(&g, t) : -ENOMEM;
    if (err)
        snprintf(why, why_len, "out of memory");
    if (!err) {
        size_t root = g.clock[first];
        *slack = merge_find_slack(&g, root, upper);
        merge_paths(&g, root, false, *slack, upper);
        merge_paths(&g, root, true, *slack, lower);
    }
    for (size_t i = 0; i < t->count && !err; i++) {
        length high = upper[g.clock[i]], low = -lower[g.clock[i]];
        if (high < far && low > -far && high > -far && low < far)
            continue;
        char title[128];
        tly_process_title(&t->processes[first], title, sizeof title);
        snprintf(why, why_len,
                 "has no messages in common, both ways, with %s, nor with a process that has: its clock is "
                 "unknown",
                 title);
        *which = i;
        err = -EINVAL;
    }
    for (size_t i = 0; i < t->count && !err; i++) {
        struct tly_process *p = &t->processes[i];
        int64_t high = (int64_t)upper[g.clock[i]], low = -(int64_t)lower[g.clock[i]];
        p->offset = low + (high - low) / 2;
        p->error = (high - low + 1) / 2;
        merge_shift(p, -p->offset);
    }
    if (!err) {
        int64_t start = merge_earliest(t);
        for (size_t i = 0; i < t->count; i++)
            merge_shift(&t->processes[i], -start);
    }
    free(g.least);
    free(g.clock);
    free(upper);
    free(lower);
    return err;
}
