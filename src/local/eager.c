/* eager.c - the way of small operations: all data came in the posts, and each rank makes its own result of them at once.
 *
 * All under the engine's lock. */
#include "local/way.h"
#include "local/work.h"
#include "ops/local.h"

/* Where lengths differ, not all of them need be small. */
static bool eager_suits(const struct tly_local *l, const struct tly_local_round *r, bool all)
{
    return (r->posts[l->me].flags & TLY_POST_EAGER) && !r->op->call->gathered;
}

static enum tly_local_begun eager_begin(struct tly_local *l, struct tly_local_round *r)
{
    const struct tly_local_op *op = r->op;
    const struct tly_local_group *g = r->group;
    const void *in[TLY_LOCAL_RANKS];
    in[g->me] = op->input;
    for (uint32_t i = 0; i < g->size && op->bytes; i++)
        if (i != g->me)
            in[i] = tly_local_post(r, i)->call ? r->data + (size_t)g->rank[i] * r->room : tly_work_zeros;
    tly_work_make(l, op, in);
    return TLY_BEGUN_ENDED;
}

const struct tly_way tly_way_eager = {.name = "eager", .suits = eager_suits, .begin = eager_begin};
