/* better.c - what another place of a card or a GPU would bring. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "inside/work.h"

/* A move must save so much to be worth a word. */
#define WORTH 0.01

/* Seconds by the best of the ways that are found fast: unequal parts take long to find. */
static int better_quick(const struct tly_machine *m, const struct tly_inside_job *job, double *seconds)
{
    struct tly_inside out;
    int err;
    struct tly_inside_work *w = tly_inside_begin(m, job, TLY_MAY_RELAY, &out, &err);
    if (!err)
        err = tly_inside_choose(w);
    if (!err)
        *seconds = tly_inside_seconds(w, &out.way) * (double)job->bytes;
    free(w);
    tly_inside_finish(&out);
    return err;
}

/* Puts it below switch `to`, or on a port of its own at `node`. */
static void better_move(struct tly_machine *m, bool card, int which, int to, int node)
{
    int *parent = card ? &m->card[which].parent : &m->gpu[which].parent;
    int *at = card ? &m->card[which].node : &m->gpu[which].node;
    *parent = to;
    *at = to >= 0 ? m->sw[to].node : node;
}

static int better_try_places(const struct tly_machine *m, struct tly_machine *copy,
                             const struct tly_inside_job *job, bool card, int which,
                             struct tly_inside_move *best)
{
    int parent = card ? m->card[which].parent : m->gpu[which].parent;
    int node = card ? m->card[which].node : m->gpu[which].node;
    for (int to = 0; to < m->switches + m->nodes; to++) {
        int sw = to < m->switches ? to : -1, at = sw < 0 ? to - m->switches : m->sw[sw].node;
        double seconds;
        if ((sw >= 0 && m->sw[sw].gpu) || (sw == parent && (sw >= 0 || at == node)))
            continue;
        better_move(copy, card, which, sw, at);
        int err = better_quick(copy, job, &seconds);
        if (err)
            return err;
        if (best->which < 0 || seconds < best->seconds)
            *best = (struct tly_inside_move){card, which, sw, at, seconds};
    }
    better_move(copy, card, which, parent, node);
    return 0;
}

/* GPUs of one place are alike: the first of each stands for them. */
static bool better_first_of_its_place(const struct tly_machine *m, int gpu)
{
    for (int g = 0; g < gpu; g++)
        if (m->gpu[g].parent == m->gpu[gpu].parent && m->gpu[g].node == m->gpu[gpu].node)
            return false;
    return m->gpu[gpu].slice < 0;
}

int tly_inside_better(const struct tly_machine *m, const struct tly_inside_job *job, double seconds,
                      struct tly_inside_move found[2])
{
    struct tly_inside_move best[2] = {{.card = true, .which = -1}, {.which = -1}};
    struct tly_machine *copy = malloc(sizeof *copy);
    double now;
    int n = 0, err = copy ? better_quick(m, job, &now) : -ENOMEM;
    if (!err)
        memcpy(copy, m, sizeof *copy);
    for (int c = 0; c < m->cards && !err && job->traffic > 0; c++)
        if (!m->card[c].idle)
            err = better_try_places(m, copy, job, true, c, &best[0]);
    for (int g = 0; g < m->gpus && !err; g++)
        if (better_first_of_its_place(m, g))
            err = better_try_places(m, copy, job, false, g, &best[1]);
    free(copy);
    if (err)
        return err;
    for (int i = 0; i < 2; i++)
        if (best[i].which >= 0 && best[i].seconds < seconds * (1 - WORTH) &&
            best[i].seconds < now * (1 - WORTH))
            found[n++] = best[i];
    if (n == 2 && found[1].seconds < found[0].seconds) {
        struct tly_inside_move t = found[0];
        found[0] = found[1];
        found[1] = t;
    }
    return n;
}
