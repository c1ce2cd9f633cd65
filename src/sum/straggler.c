/* straggler.c - which rank keeps the others waiting.
 *
 * A service sees when each rank's push of a part begins to come, and when it ends; and the rank says whether
 * it sent it as soon as it was submitted. A step is the time from one round of some part to its next. Two
 * figures a rank and step:
 *
 *   late  how long after the first rank's push of a part its own began, if that was sent at once, less the time
 *         in which others of its pushes were under way.  Of what had to wait for its turn nobody knows whether it
 *         was late.  The most of all parts.  As long as it has not received the answers of the
 *         step before, it is not late.
 *   busy  how long its pushes were under way.
 *
 * Who is late by more than a tenth of the step computes longer; whose pushes are under way longer by more than a
 * tenth of the step, and twice as long, has a slow network.  Longer than the (lower) median rank's, so that
 * one fast rank makes no late ones; and as to the network a rank on the service's own machine, which has none to
 * cross, counts as no faster than the fastest of the others.  One step says little on shared machines: a rank is
 * named when two thirds of a window of steps say so. */
#include "sum/straggler.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

enum { WINDOW = 30, ENOUGH = 20 };
static const double share_limit = 0.1;
static const int64_t least_ns = TLY_MS; /* of nobody's concern */
static const int64_t forget_ns = 10 * TLY_SEC;

int tly_straggler_init(struct tly_straggler *w, uint32_t ranks)
{
    *w = (struct tly_straggler){.ranks = ranks};
    w->pace = calloc(ranks, sizeof *w->pace);
    w->sorted = calloc(ranks, sizeof *w->sorted);
    return w->pace && w->sorted ? 0 : -ENOMEM;
}

void tly_straggler_finish(struct tly_straggler *w)
{
    free(w->pace);
    free(w->sorted);
    *w = (struct tly_straggler){0};
}

void tly_straggler_begin_anew(struct tly_straggler *w)
{
    w->marked = false;
}

int64_t tly_straggler_busy(const struct tly_straggler *w, uint32_t rank, int64_t now)
{
    const struct tly_pace *p = &w->pace[rank];
    return p->busy + (p->coming_since ? now - p->coming_since : 0);
}

void tly_straggler_began(struct tly_straggler *w, uint32_t rank, int64_t opened, int64_t busy, bool prompt,
                         int64_t now)
{
    struct tly_pace *p = &w->pace[rank];
    int64_t from = p->answered > opened ? p->answered : opened;
    int64_t late = now - from - (tly_straggler_busy(w, rank, now) - busy);
    if (prompt && late > p->late)
        p->late = late;
    /* What came before has ended, or was dropped. */
    tly_straggler_ended(w, rank, now);
    p->coming_since = now;
}

void tly_straggler_ended(struct tly_straggler *w, uint32_t rank, int64_t now)
{
    struct tly_pace *p = &w->pace[rank];
    p->busy = tly_straggler_busy(w, rank, now);
    p->coming_since = 0;
}

void tly_straggler_answered(struct tly_straggler *w, uint32_t rank, int64_t opened, int64_t now)
{
    if (opened < w->began)
        w->pace[rank].answered = now;
}

/* --- a step -------------------------------------------------------------------------------------- */

static int by_size(const void *x, const void *y)
{
    int64_t a = *(const int64_t *)x, b = *(const int64_t *)y;
    return (a > b) - (a < b);
}

/* The figure of the lower median rank.  favoured: those on the service's own machine have an advantage. */
static int64_t median(struct tly_straggler *w, int64_t (*figure)(const struct tly_pace *p), bool favoured)
{
    int64_t fastest = INT64_MAX;
    for (uint32_t i = 0; i < w->ranks; i++)
        if (!w->pace[i].here && figure(&w->pace[i]) < fastest)
            fastest = figure(&w->pace[i]);
    for (uint32_t i = 0; i < w->ranks; i++) {
        int64_t own = figure(&w->pace[i]);
        w->sorted[i] = favoured && w->pace[i].here && own < fastest && fastest < INT64_MAX ? fastest : own;
    }
    qsort(w->sorted, w->ranks, sizeof *w->sorted, by_size);
    return w->sorted[(w->ranks - 1) / 2];
}

static int64_t late(const struct tly_pace *p)
{
    return p->late;
}

static int64_t busy(const struct tly_pace *p)
{
    return p->busy - p->busy_before;
}

static void begin_step(struct tly_straggler *w, int64_t now)
{
    w->began = now;
    for (uint32_t i = 0; i < w->ranks; i++) {
        struct tly_pace *p = &w->pace[i];
        p->busy = tly_straggler_busy(w, i, now);
        p->coming_since = p->coming_since ? now : 0;
        p->busy_before = p->busy;
        p->late = 0;
    }
}

static void begin_window(struct tly_straggler *w, int64_t now)
{
    w->steps = 0;
    w->window_began = now;
    for (uint32_t i = 0; i < w->ranks; i++) {
        struct tly_pace *p = &w->pace[i];
        p->late_steps = p->slow_steps = 0;
        p->late_share = p->slow_share = 0;
    }
}

static void judge_step(struct tly_straggler *w, int64_t now)
{
    double length = (double)(now - w->began);
    int64_t usual_late = median(w, late, false), usual_busy = median(w, busy, true);
    for (uint32_t i = 0; i < w->ranks; i++) {
        struct tly_pace *p = &w->pace[i];
        int64_t more_late = late(p) - usual_late, more_busy = busy(p) - usual_busy;
        bool is_late = more_late > least_ns && (double)more_late > share_limit * length;
        /* In what order a rank serves its connections makes more than half of a difference at one of them. */
        bool is_slow =
            more_busy > least_ns && (double)more_busy > share_limit * length && more_busy > usual_busy;
        /* Who is slow is late too, with what waits behind what is under way.  Who is late is slow too, as its pushes
         * share its card with the answers to the others: by half of what it is late (.45 to .52 in the lab;
         * behind a card of a quarter of the others' .78 to 1.2). */
        if (is_slow && more_busy >= more_late / 3 * 2) {
            p->slow_steps++;
            p->slow_share += (double)more_busy / length;
        } else if (is_late) {
            p->late_steps++;
            p->late_share += (double)more_late / length;
        }
    }
    w->steps++;
}

static bool judge_window(struct tly_straggler *w, int64_t now, struct tly_finding *out)
{
    struct tly_finding worst = {.steps = w->steps,
                                .step_s = (double)(now - w->window_began) / TLY_SEC / w->steps};
    for (uint32_t i = 0; i < w->ranks; i++) {
        const struct tly_pace *p = &w->pace[i];
        uint32_t count = p->late_steps + p->slow_steps;
        double share = (p->late_share + p->slow_share) / w->steps;
        if (count >= ENOUGH && share > worst.share) {
            worst.rank = i;
            worst.count = count;
            worst.network = p->slow_steps > p->late_steps;
            worst.share = share;
        }
    }
    if (!worst.count)
        return false;
    *out = worst;
    return true;
}

bool tly_straggler_opened(struct tly_straggler *w, uint64_t key, uint32_t part, int64_t now,
                          struct tly_finding *out)
{
    bool mine = w->marked && key == w->key && part == w->part;
    bool found = false;
    if (mine) {
        judge_step(w, now);
        w->length = now - w->began;
        begin_step(w, now);
        if (w->steps == WINDOW) {
            found = judge_window(w, now, out);
            begin_window(w, now);
        }
    } else if (!w->marked || now - w->began > forget_ns + 4 * w->length) {
        /* The first, or the old one is used no more. */
        w->key = key;
        w->part = part;
        w->marked = true;
        w->length = 0;
        begin_step(w, now);
        begin_window(w, now);
    }
    return found;
}
