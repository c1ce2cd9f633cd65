/* divert.c - the way of what cannot be done here: it is given back on all ranks, and goes to the service, which ends it or
 * says what is wrong.
 *
 * That is so if the posts differ, if a rank refuses or has no memory for it, or if zeros cannot stand for a rank that has
 * joined.  All ranks read the same posts, so all give it back.
 *
 * All under the engine's lock. */
#include "local/posts.h"
#include "local/way.h"
#include "ops/local.h"

static bool divert_is_refused(const struct tly_local *l, const struct tly_local_round *r)
{
    const struct tly_post *own = &r->posts[l->me];
    for (uint32_t i = 0; i < r->group->size; i++) {
        const struct tly_post *p = tly_local_post(r, i);
        if (p->call && ((p->flags & TLY_POST_SERVICE) || p->spec != own->spec))
            return true;
    }
    return false;
}

/* Can zeros stand for those that have joined?  They can in posts and in the pool, and not in windows, on GPUs, nor in a team. */
static bool divert_can_spare(const struct tly_local *l, const struct tly_local_round *r)
{
    const struct tly_local_op *op = r->op;
    bool pooled = true, gpu = false;
    for (uint32_t i = 0; i < r->group->size; i++) {
        const struct tly_post *p = tly_local_post(r, i);
        pooled &= !p->call || tly_post_is_pooled(p);
        gpu |= p->call && p->gpu;
    }
    return !r->unaided && !gpu && op->call->spares && op->call->spares(op->root) &&
           ((r->posts[l->me].flags & TLY_POST_EAGER) || pooled);
}

static bool divert_suits(const struct tly_local *l, const struct tly_local_round *r, bool all)
{
    if (!all)
        return r->posts[l->me].flags & TLY_POST_SERVICE;
    if (divert_is_refused(l, r))
        return true;
    return r->arrived < r->size && tly_posts_all_there(l, r) && tly_posts_no_doubts(l) &&
           !divert_can_spare(l, r);
}

const struct tly_way tly_way_divert = {.name = "divert", .suits = divert_suits};
