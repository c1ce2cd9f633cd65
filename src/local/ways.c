/* ways.c - the list of ways, in the order in which they are asked, and the choice among them.
 *
 * All under the engine's lock. */
#include <stddef.h>

#include "local/way.h"

/* The ways of a round, in the order in which they are tried.  tly_way_alone needs no round. */
static const struct tly_way *const ways[] = {&tly_way_divert,  &tly_way_gpu,    &tly_way_eager, &tly_way_team,
                                             &tly_way_staging, &tly_way_pooled, &tly_way_fetch};
enum { LAST = sizeof ways / sizeof *ways - 1 };

static const struct tly_way *ways_first(const struct tly_local *l, const struct tly_local_round *r, bool all)
{
    size_t i = 0;
    while (i < LAST && !ways[i]->suits(l, r, all))
        i++;
    return ways[i]; /* the last one for a malformed post, which keeps the round from beginning */
}

enum tly_at_once tly_way_at_once(struct tly_local *l, const struct tly_local_op *op, struct tly_post *p)
{
    return tly_way_alone.at_once(l, op, p);
}

const struct tly_way *tly_way_expected(const struct tly_local *l, const struct tly_local_round *r)
{
    return ways_first(l, r, false);
}

const struct tly_way *tly_way_chosen(const struct tly_local *l, const struct tly_local_round *r,
                                     bool complete)
{
    if (tly_way_divert.suits(l, r, true))
        return &tly_way_divert;
    if (!complete)
        return NULL;
    if (tly_way_gpu.suits(l, r, true))
        return &tly_way_gpu;
    return r->way->suits(l, r, true) ? r->way : ways_first(l, r, true);
}
