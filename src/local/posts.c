/* posts.c - rounds: where the posts of all ranks meet.
 *
 * A round begins when all its posts are there and are the same, and goes the way that suits them (way.h).  One that is not
 * done at once goes into the list of ready rounds, and is worked on step by step (drive.c).  What suits no other way is
 * handed back on all ranks.  A round stays until all its posts have come, though its operation has ended here, and is then
 * used again.
 *
 * All under the engine's lock. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "local/posts.h"
#include "local/way.h"
#include "local/work.h"
#include "ops/local.h"

enum { MOST_IDLE = 64 }; /* rounds kept for later */

static uint64_t posts_round_id(uint64_t key, uint32_t round, uint64_t ranks)
{
    uint64_t x = key ^ (round + 1) * 0x9e3779b97f4a7c15ull ^ ranks * 0xc2b2ae3d27d4eb4full;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93ull;
    return x ^ x >> 32;
}

struct tly_local_round *tly_posts_round(struct tly_local *l, uint64_t key, uint32_t number, uint64_t ranks,
                                        uint32_t joins)
{
    uint64_t id = posts_round_id(key, number, ranks);
    struct tly_local_round *r = tly_map_get(&l->rounds, id);
    if (r)
        return r;
    if (l->idle_count) {
        r = tly_list_entry(l->idle.next, struct tly_local_round, node);
        tly_list_remove(&r->node);
        l->idle_count--;
    } else if (!(r = calloc(1, sizeof *r + l->count * sizeof *r->posts))) {
        return NULL;
    }
    r->id = id;
    r->joins = joins;
    r->ranks = ranks ? ranks : l->all.bits;
    r->size = ranks ? (uint32_t)__builtin_popcountll(ranks) : l->count;
    r->grouped = r->unaided = ranks != 0;
    if (tly_map_put(&l->rounds, id, r) != 0) {
        free(r->data);
        free(r);
        return NULL;
    }
    tly_list_init(&r->node);
    return r;
}

struct tly_local_round *tly_posts_find(const struct tly_local *l, uint64_t key, uint32_t number,
                                       uint64_t ranks)
{
    return tly_map_get(&l->rounds, posts_round_id(key, number, ranks));
}

static void posts_drop(struct tly_local *l, struct tly_local_round *r)
{
    tly_map_take(&l->rounds, r->id);
    tly_list_remove(&r->node);
    uint8_t *data = r->data;
    uint32_t room = r->room;
    if (l->idle_count >= MOST_IDLE) {
        free(data);
        free(r);
        return;
    }
    memset(r, 0, sizeof *r + l->count * sizeof *r->posts);
    r->data = data;
    r->room = room;
    tly_list_append(&l->idle, &r->node);
    l->idle_count++;
}

/* All posts of it have come that ever will. */
static bool posts_is_complete(const struct tly_local *l, const struct tly_local_round *r)
{
    for (uint32_t i = 0; i < l->count && r->arrived < r->size; i++)
        if (r->ranks >> i & 1 && !r->posts[i].call && !l->left[i] && !tly_posts_lacks(l, r, i))
            return false;
    return true;
}

/* All its ranks have posted the same.  Their specs contain the group's list. */
static bool posts_have_agreed(const struct tly_local_round *r)
{
    bool same = r->arrived == r->size;
    for (uint32_t i = 1; i < r->size && same; i++)
        same = tly_local_post(r, i)->spec == tly_local_post(r, 0)->spec;
    return same;
}

static void posts_drop_if_complete(struct tly_local *l, struct tly_local_round *r)
{
    if (!posts_is_complete(l, r))
        return;
    if (r->grouped && r->group && !r->group->agreed)
        r->group->agreed = posts_have_agreed(r);
    posts_drop(l, r);
}

bool tly_posts_all_there(const struct tly_local *l, const struct tly_local_round *r)
{
    uint32_t count = r->arrived;
    if (count == r->size || !l->joined)
        return count == r->size;
    for (uint32_t i = 0; i < l->count; i++)
        count += r->ranks >> i & 1 && tly_posts_lacks(l, r, i);
    return count == r->size;
}

/* --- a round ends ------------------------------------------------------------------------------- */

/* The posts differ, or one will never come: then no rank looks at the work entry.  One that is late begins even a round
 * that others have ended meanwhile. */
static bool posts_nobody_begins(const struct tly_local *l, const struct tly_local_round *r)
{
    const struct tly_post *own = &r->posts[l->me];
    for (uint32_t i = 0; i < r->group->size; i++) {
        const struct tly_post *p = tly_local_post(r, i);
        if (p->call ? (p->flags & TLY_POST_SERVICE) || p->spec != own->spec : l->left[r->group->rank[i]])
            return true;
    }
    return r->arrived < r->size && tly_posts_all_there(l, r); /* it is the service's */
}

struct tly_local_op *tly_posts_let_go(struct tly_local *l, struct tly_local_round *r)
{
    struct tly_local_op *op = r->op;
    r->op = NULL;
    r->over = true;
    op->meeting = NULL;
    tly_list_remove(&r->node);
    tly_list_init(&r->node);
    tly_list_remove(&op->node);
    if (r->way->let_go) {
        r->way->let_go(l, r, op);
    } else if (op->borrowed && !op->parts) { /* to look for it takes a lock that the whole process has */
        tly_pool_free(op->borrowed);
        op->borrowed = NULL;
    }
    /* One in which others may still count, or look for what has not come to a good end, is not used again. */
    if (r->posts[l->me].gen && (op->parts || (r->work ? r->way->is_finished(r) : posts_nobody_begins(l, r))))
        l->free_work[l->free_count++] = r->posts[l->me].work;
    r->work = NULL;
    posts_drop_if_complete(l, r);
    return op;
}

void tly_posts_end(struct tly_local *l, struct tly_local_op *op, int err, const char *sentence)
{
    op->held = false;
    if (op->left_behind)
        free(op);
    else
        l->calls->ended(l->user, op, err, sentence);
    atomic_fetch_sub(&l->in_flight, 1); /* who waits for none finds it ended */
    tly_local_tell_sleepers(l);
}

void tly_posts_hand_back(struct tly_local *l, struct tly_local_op *op)
{
    op->held = false;
    atomic_store_explicit(&op->diverted, true, memory_order_release);
    if (op->left_behind)
        free(op);
    else
        l->calls->divert(l->user, op);
    atomic_fetch_sub(&l->in_flight, 1); /* who waits for none finds it handed on */
    tly_local_tell_sleepers(l);
}

void tly_posts_finish(struct tly_local *l, struct tly_local_round *r)
{
    if (r->way->finish)
        r->way->finish(l, r);
    tly_posts_end(l, tly_posts_let_go(l, r), 0, NULL);
}

/* --- a round begins ----------------------------------------------------------------------------- */

/* The ranks' priorities of an operation may differ.  Reductions through windows all ranks take in the order of the lowest one,
 * so that fewer of them wait for a rank that has its window in another one.  Other posts say no priority. */
static int64_t posts_priority(const struct tly_local_round *r)
{
    return r->slots && r->op->call->reduces ? r->posts[0].first_dim : r->op->priority;
}

static bool posts_is_before(const struct tly_local_round *a, const struct tly_local_round *b)
{
    return posts_priority(a) != posts_priority(b)
               ? posts_priority(a) > posts_priority(b)
               : a->order < b->order;
}

static void posts_make_ready(struct tly_local *l, struct tly_local_round *r)
{
    struct tly_list *n = l->ready.prev;
    while (n != &l->ready && posts_is_before(r, tly_list_entry(n, struct tly_local_round, node)))
        n = n->prev;
    tly_list_append(n->next, &r->node);
}

static bool posts_in_segment(const struct tly_local *l, uint32_t rank, uint64_t at, uint64_t bytes)
{
    uint64_t all = l->at[rank].bytes;
    return !bytes || (at >= sizeof(struct tly_control) && at <= all && bytes <= all - at);
}

/* Can what the rank with this place has posted be used?  One that runs wild must not take the others with it. */
static bool posts_is_sound(const struct tly_local *l, const struct tly_local_round *r, uint32_t place)
{
    const struct tly_local_op *op = r->op;
    const struct tly_post *p = tly_local_post(r, place), *own = &r->posts[l->me];
    uint32_t rank = r->group->rank[place];
    uint64_t given = tly_work_gives(op, place) ? op->bytes : 0;
    bool even = !op->call->gathered || op->even, alike = even && !p->gpu && !own->gpu;
    if (p->work >= TLY_WORKS || (alike && (p->flags ^ own->flags) & TLY_POST_EAGER) ||
        (even && p->bytes != given))
        return false;
    if (p->flags & TLY_POST_EAGER)
        return true;
    if (r->grouped && op->call->reduces && !op->parts && !tly_post_is_pooled(p))
        return false;
    return ((~p->flags & TLY_POST_POOL_IN) || posts_in_segment(l, rank, p->input, p->bytes)) &&
           ((~p->flags & TLY_POST_POOL_OUT) ||
            posts_in_segment(l, rank, p->output, tly_work_output_bytes(l, op, place)));
}

/* All posts of the round are there, and the same. */
static void posts_begin(struct tly_local *l, struct tly_local_round *r)
{
    const struct tly_local_group *g = r->group;
    for (uint32_t i = 0; i < g->size; i++)
        if (tly_local_post(r, i)->call && !posts_is_sound(l, r, i)) {
            char sentence[100];
            snprintf(sentence, sizeof sentence, "rank %u has posted a malformed operation",
                     tly_local_number(l, g->rank[i]));
            l->calls->broken(l->user, EPROTO, sentence);
            return;
        }
    uint32_t lead = 0;
    while (!tly_local_post(r, lead)->call)
        lead++;
    r->lead = g->rank[lead];
    r->moved = r->op->bytes;
    enum tly_local_begun begun = r->way->begin(l, r);
    if (begun == TLY_BEGUN)
        posts_make_ready(l, r);
    else if (begun == TLY_BEGUN_ENDED)
        tly_posts_finish(l, r);
}

/* --- what has come ------------------------------------------------------------------------------ */

/* Both seq_cst, and a post is visible to all ranks at once, as on x86 and ARM: of two ranks one sees what the other has
 * written, or what it has seen. */
bool tly_posts_no_doubts(const struct tly_local *l)
{
    return atomic_load(&l->at[0].control->doubts) == l->doubts;
}

void tly_posts_check(struct tly_local *l, struct tly_local_round *r)
{
    if (r->over) {
        posts_drop_if_complete(l, r);
        return;
    }
    if (!r->posted)
        return;
    const struct tly_way *way = tly_way_chosen(l, r, tly_posts_all_there(l, r) && tly_posts_no_doubts(l));
    if (!way)
        return;
    if (!way->begin) {
        tly_posts_hand_back(l, tly_posts_let_go(l, r));
    } else {
        r->way = way;
        posts_begin(l, r);
    }
}

void tly_posts_settle(struct tly_local *l, struct tly_local_round *r, uint32_t rank, bool back)
{
    l->doubts++;
    if (r && back) {
        r->posts[rank].flags |= TLY_POST_SERVICE;
        tly_posts_check(l, r);
    }
    for (struct tly_list *n = l->ops.next, *next; n != &l->ops && tly_posts_no_doubts(l); n = next) {
        next = n->next;
        r = tly_list_entry(n, struct tly_local_op, node)->meeting;
        if (!r->work && tly_posts_all_there(l, r)) /* it waited for this */
            tly_posts_check(l, r);
    }
}
