/* posts_out.c - posts what this rank submits, takes posts back, and says that it has joined.
 *
 * Operations come from the inbox into the backlog and from there into the rank's ring, as far as there is room.  A small
 * tensor travels in the post.  A large one's post says where it lies.  The way that it takes (way.h) prepares it for the
 * other ranks, and may name an entry for the work, which is free again once the round has ended here.
 *
 * All under the engine's lock. */
#include <errno.h>

#include "local/posts.h"
#include "local/way.h"
#include "local/work.h"
#include "ops/local.h"

static bool posts_out_gives(const struct tly_local *l, const struct tly_local_op *op)
{
    return !op->mark && tly_work_gives(op, tly_local_group_of(l, op)->me);
}

/* The ranks that take part, as bits; 0: all. */
static uint64_t posts_out_ranks(const struct tly_local_op *op)
{
    return op->group ? op->group->bits : 0;
}

static uint64_t posts_out_address(const void *p)
{
    return (uint64_t)(uintptr_t)p;
}

/* Say where a large tensor lies: in the pool, or at an address of this process. */
static void posts_out_locate(struct tly_local *l, const struct tly_local_op *op, struct tly_post *p)
{
    bool gives = posts_out_gives(l, op), written = op->call->reduces || op->call->spreads || op->parts;
    uint64_t in = gives ? tly_segment_place(l->segment, op->input, op->bytes) : 0;
    uint64_t bytes = written ? tly_work_output_bytes(l, op, tly_local_group_of(l, op)->me) : 0;
    uint64_t out = bytes ? tly_segment_place(l->segment, op->output, bytes) : 0;
    bool unread = !gives && !op->parts, unwritten = written && !bytes;
    p->input = in ? in : posts_out_address(op->input);
    p->output = out ? out : posts_out_address(op->output);
    p->flags |= (in || unread ? TLY_POST_POOL_IN : 0) | (out || unwritten ? TLY_POST_POOL_OUT : 0);
}

static void posts_out_book(struct tly_local *l, struct tly_local_round *r, struct tly_local_op *op,
                           const struct tly_post *p)
{
    r->op = op;
    r->group = op->group ? op->group : &l->all;
    op->meeting = r;
    r->posts[l->me] = *p;
    r->unaided = r->grouped || (op->call && !op->call->spares);
    if (~r->ranks & 1) /* rank 0 posts none of it */
        r->order = atomic_load_explicit(&l->at[0].read, memory_order_relaxed);
    r->way = tly_way_expected(l, r);
}

/* Our post is out, and began at this place of our ring. */
static void posts_out_posted(struct tly_local *l, struct tly_local_round *r, uint64_t at)
{
    r->order = l->me == 0 ? at : r->order;
    r->posted = true;
    r->arrived++;
    l->own_posts++;
    tly_list_append(&l->ops, &r->op->node);
    tly_posts_check(l, r);
}

void tly_posts_follow(struct tly_local *l, struct tly_local_op *op, const struct tly_post *p, uint64_t at)
{
    struct tly_local_round *r =
        tly_posts_round(l, op->key, op->round, posts_out_ranks(op), l->at[l->me].joins); /* an idle one */
    posts_out_book(l, r, op, p);
    posts_out_posted(l, r, at);
}

/* Ranks that mean other lists by a group's name would wait for posts of each other.  Services compare lists, so all that a
 * group does goes there until its ranks have posted the same once. */
static void posts_out_look_at_group(struct tly_local *l, struct tly_local_op *op)
{
    if (!op->group || op->parts || op->group->agreed)
        return;
    tly_posts_read(l);
    op->mark |= !op->group->agreed;
}

/* False: no room in the ring, or no memory, and the job fails. */
static bool posts_out_post(struct tly_local *l, struct tly_local_op *op)
{
    posts_out_look_at_group(l, op);
    bool small = op->bytes <= TLY_EAGER && !op->parts && !op->gpu, gives = posts_out_gives(l, op);
    uint64_t need = tly_posts_length(op->group, small && gives ? op->bytes : 0);
    if (!tly_posts_has_room(l, need + sizeof(struct tly_post)) || (op->parts && !l->free_count))
        return false;
    struct tly_local_round *r =
        tly_posts_round(l, op->key, op->round, posts_out_ranks(op), l->at[l->me].joins - op->stands_in);
    if (!r) {
        l->calls->broken(l->user, ENOMEM, "out of memory");
        return false; /* it stays where the failure will find it */
    }
    bool sums = !op->mark && op->call->reduces;
    struct tly_post p = {
        .key = op->key,
        .spec = op->spec,
        .round = op->round,
        .call = op->number,
        .bytes = gives ? op->bytes : 0,
        .first_dim = op->parts ? (int64_t)op->parts
                     : sums    ? op->priority
                               : op->first_dim,
        .flags = (small ? TLY_POST_EAGER : 0) | (op->mark ? TLY_POST_SERVICE : 0) |
                 (op->patient ? TLY_POST_PATIENT : 0) | (op->stands_in ? TLY_POST_LATE : 0),
        .gpu = op->gpu && !op->mark};
    if (!small && !op->mark && !op->gpu)
        posts_out_locate(l, op, &p);
    posts_out_book(l, r, op, &p);
    if (r->way->prepare && !r->way->prepare(l, r))
        r->posts[l->me].flags |= TLY_POST_SERVICE;
    uint64_t at = l->tail;
    tly_posts_show(l, op, &r->posts[l->me]);
    posts_out_posted(l, r, at);
    return true;
}

/* --- taking back -------------------------------------------------------------------------------- */

/* Nobody begins a round while he knows of a doubt and not of its outcome; so if a post is still missing once ours is said,
 * nobody has begun it, nor will.  False: no room in the ring. */
static bool posts_out_take_back(struct tly_local *l, const struct tly_local_op *op)
{
    const struct tly_local_op back = {.group = op->group}; /* the operation may end below, and be gone */
    struct tly_post p = {.key = op->key, .round = op->round, .call = op->number, .flags = TLY_POST_BACK};
    if (!tly_posts_has_room(l, tly_posts_length(op->group, 0) + sizeof p))
        return false;
    atomic_fetch_add(&l->at[0].control->doubts, 1);
    atomic_thread_fence(memory_order_seq_cst); /* the others' posts are not read before */
    tly_posts_read(l);
    struct tly_local_round *r = tly_posts_find(l, p.key, p.round, posts_out_ranks(&back));
    bool taken = r && r->op && !tly_posts_all_there(l, r);
    p.flags |= taken ? TLY_POST_SERVICE : 0;
    tly_posts_show(l, &back, &p);
    tly_posts_settle(l, r, l->me, taken);
    return true;
}

static void posts_out_take_back_all(struct tly_local *l)
{
    l->unwanted = false;
    for (struct tly_list *n = l->ops.next; n != &l->ops && !l->unwanted; n = n->next) {
        const struct tly_local_op *op = tly_list_entry(n, struct tly_local_op, node);
        if (!op->mark || tly_posts_all_there(l, op->meeting))
            continue;
        l->unwanted = !posts_out_take_back(l, op); /* again once there is room */
        n = &l->ops;                               /* from the beginning: others may have ended meanwhile */
    }
}

/* --- all of it ---------------------------------------------------------------------------------- */

/* Behind all that this rank has posted.  False: no room in the ring. */
static bool posts_out_say_joined(struct tly_local *l)
{
    static const struct tly_local_op nothing;
    struct tly_post p = {.flags = TLY_POST_JOINED};
    if (!tly_posts_has_room(l, 2 * sizeof p))
        return false;
    l->said = true;
    tly_posts_show(l, &nothing, &p);
    return tly_posts_take_joined(l, l->me);
}

bool tly_posts_send(struct tly_local *l)
{
    bool any = false, full = false;
    if (atomic_load_explicit(&l->pending, memory_order_relaxed) > 0) {
        pthread_mutex_lock(&l->inbox_lock);
        while (!tly_list_empty(&l->inbox)) {
            struct tly_list *n = l->inbox.next;
            tly_list_remove(n);
            tly_list_append(&l->backlog, n);
        }
        while (!tly_list_empty(&l->landed)) {
            struct tly_list *n = l->landed.next;
            struct tly_local_op *op = tly_list_entry(n, struct tly_local_piece, node)->op;
            tly_list_remove(n);
            if (op->held)
                tly_list_append(&op->landed, n);
            any = true;
        }
        atomic_store(&l->pending, 0);
        pthread_mutex_unlock(&l->inbox_lock);
    }
    if (atomic_load_explicit(&l->own->left, memory_order_relaxed))
        return false; /* as we have told the others */
    while (!tly_list_empty(&l->backlog) && !full) {
        struct tly_local_op *op = tly_list_entry(l->backlog.next, struct tly_local_op, node);
        tly_list_remove(&op->node);
        full = !posts_out_post(l, op);
        if (full)
            tly_list_append(l->backlog.next, &op->node); /* back to the front */
        any |= !full;
    }
    if (any && !full && atomic_load_explicit(&l->own->stuck, memory_order_relaxed))
        atomic_store(&l->own->stuck, 0);
    if (l->joining && !l->said && l->own_posts == l->to_post && !full)
        any |= posts_out_say_joined(l);
    if (l->unwanted && !full)
        posts_out_take_back_all(l);
    if (any && l->lost)
        tly_posts_end_lost(l);
    return any;
}
