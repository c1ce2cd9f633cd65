/* plain.c - a plan by a given way, and the way that BytePS compares with. */
#include <stdlib.h>

#include "inside/work.h"

int tly_inside_try(const struct tly_machine *m, const struct tly_inside_job *job,
                   const struct tly_inside_way *way, struct tly_inside *out)
{
    int err;
    struct tly_inside_work *w = tly_inside_begin(m, job, TLY_MAY_ALL, out, &err);
    if (!err) {
        tly_inside_look(m, out);
        out->way = *way;
        err = tly_inside_write_steps(w);
    }
    free(w);
    if (err)
        tly_inside_finish(out);
    return err;
}

bool tly_inside_plain(const struct tly_machine *m, struct tly_inside_way *way)
{
    double weight[TLY_MAX_GPUS] = {0};
    bool linked = tly_inside_way(m, TLY_GROUP_NVLINK, TLY_SHARE_EQUAL, false, way) && way->groups == 1;
    int root = 0;
    if (!linked)
        return tly_inside_way(m, TLY_GROUP_ALL, TLY_SHARE_EQUAL, false, way) ||
               tly_inside_way(m, TLY_GROUP_SINGLE, TLY_SHARE_EQUAL, false, way);
    for (int g = m->gpus - 1; g >= 0; g--)
        if (tly_inside_shares_card(m, g))
            root = g;
    weight[root] = 1;
    tly_inside_weigh(m, way, weight);
    return true;
}
