/* fetch.c - the way of what is not reduced and does not fit into posts: each rank takes from the others' memory what the
 * operation's table says (src/ops/local.h).
 *
 * The work entry of the rank with the first place counts the ranks that have all they take.  Until then all memory is lent.
 * Private memory is read by process_vm_readv.
 *
 * All under the engine's lock. */
#include <errno.h>
#include <string.h>

#include "local/way.h"
#include "local/work.h"
#include "ops/local.h"

static bool fetch_suits(const struct tly_local *l, const struct tly_local_round *r, bool all)
{
    return !r->op->call->reduces;
}

static bool fetch_prepare(struct tly_local *l, struct tly_local_round *r)
{
    struct tly_post *own = &r->posts[l->me];
    return ((own->flags & TLY_POST_EAGER) || tly_work_lend(l, r->op, own, false)) &&
           (r->group->me != 0 || tly_work_take_entry(l, own));
}

/* Have memory for pieces of the lengths that are posted.  False: there is none. */
static bool fetch_take_room(struct tly_local *l, struct tly_local_round *r)
{
    int64_t dims[TLY_LOCAL_RANKS];
    uint64_t bytes[TLY_LOCAL_RANKS];
    r->moved = 0;
    for (uint32_t i = 0; i < r->group->size; i++) {
        dims[i] = tly_local_post(r, i)->first_dim;
        bytes[i] = tly_local_post(r, i)->bytes;
        r->moved += bytes[i];
    }
    r->op->output = l->calls->gather(l->user, r->op, dims, bytes);
    return r->op->output != NULL;
}

static enum tly_local_begun fetch_begin(struct tly_local *l, struct tly_local_round *r)
{
    tly_work_share(l, r);
    r->chunks = r->group->size;
    if (!r->op->call->gathered || fetch_take_room(l, r))
        return TLY_BEGUN;
    l->calls->broken(l->user, ENOMEM, "no memory for an allgather's result");
    return TLY_BEGUN_NEVER;
}

/* The range of one rank's data that this rank copies into its own memory. */
static bool fetch_from(struct tly_local *l, const struct tly_local_round *r, uint32_t rank,
                       const struct tly_local_take *take)
{
    const struct tly_post *p = &r->posts[rank];
    uint8_t *to = (uint8_t *)r->op->output + take->to;
    const uint8_t *from = r->op->input;
    if (rank != l->me)
        from = p->flags & TLY_POST_EAGER ? r->data + (size_t)rank * r->room
                                         : tly_work_seen(l, rank, p->input, p->flags & TLY_POST_POOL_IN);
    if (!from)
        return tly_work_read(l, rank, p->input + take->from, to, take->bytes);
    if (to != from + take->from)
        memcpy(to, from + take->from, take->bytes);
    return true;
}

static bool fetch_step(struct tly_local *l, struct tly_local_round *r, const struct tly_turn *turn)
{
    uint64_t given[TLY_LOCAL_RANKS];
    struct tly_local_take take[TLY_LOCAL_RANKS];
    if (r->counted)
        return false;
    r->counted = true;
    for (uint32_t i = 0; i < r->group->size; i++)
        given[i] = tly_local_post(r, i)->bytes;
    tly_work_takes(l, r->op, given, take);
    for (uint32_t i = 0; i < r->group->size; i++)
        if (take[i].bytes && !fetch_from(l, r, r->group->rank[i], &take[i]))
            return false;
    return tly_work_count(l, r);
}

static bool fetch_can_step(const struct tly_local *l, const struct tly_local_round *r,
                           const struct tly_turn *turn)
{
    return !r->counted;
}

/* It can be given up at any time: the others only read, and what they have read counts for nothing. */
const struct tly_way tly_way_fetch = {
    .name = "fetch",
    .suits = fetch_suits,
    .prepare = fetch_prepare,
    .begin = fetch_begin,
    .step = fetch_step,
    .can_step = fetch_can_step,
    .is_finished = tly_work_is_finished};
