/* posts.c - rounds: where the posts of all ranks meet.
 *
 * A round begins when all its posts are there and are the same.  A small one is done at once (work.c).  A larger one goes
 * into the list of ready rounds and is worked on part by part (work.c), through windows (staging.c), or by a team (team.c).
 * If the posts differ, a rank refuses, or zeros cannot stand for a rank that has joined, all ranks hand the operation
 * back.  A round stays until all its posts have come, though its operation has ended here, and is then used again.
 *
 * All under the engine's lock. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "local/posts.h"
#include "local/work.h"
#include "ops/local.h"

enum { MOST_IDLE = 64 }; /* rounds kept for later */

static uint64_t round_id(uint64_t key, uint32_t round)
{
    uint64_t x = key ^ (round + 1) * 0x9e3779b97f4a7c15ull;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93ull;
    return x ^ x >> 32;
}

struct tly_round *tly_posts_round(struct tly_local *l, uint64_t key, uint32_t number, uint32_t joins)
{
    uint64_t id = round_id(key, number);
    struct tly_round *r = tly_map_get(&l->rounds, id);
    if (r)
        return r;
    if (l->idle_count) {
        r = tly_list_entry(l->idle.next, struct tly_round, node);
        tly_list_remove(&r->node);
        l->idle_count--;
    } else if (!(r = calloc(1, sizeof *r + l->count * sizeof *r->posts))) {
        return NULL;
    }
    r->id = id;
    r->joins = joins;
    if (tly_map_put(&l->rounds, id, r) != 0) {
        free(r->data);
        free(r);
        return NULL;
    }
    tly_list_init(&r->node);
    return r;
}

struct tly_round *tly_posts_find(const struct tly_local *l, uint64_t key, uint32_t number)
{
    return tly_map_get(&l->rounds, round_id(key, number));
}

static void drop(struct tly_local *l, struct tly_round *r)
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
static bool is_complete(const struct tly_local *l, const struct tly_round *r)
{
    for (uint32_t i = 0; i < l->count && r->arrived < l->count; i++)
        if (!r->posts[i].call && !l->left[i] && !tly_posts_lacks(l, r, i))
            return false;
    return true;
}

bool tly_posts_all_there(const struct tly_local *l, const struct tly_round *r)
{
    uint32_t count = r->arrived;
    if (count == l->count || !l->joined)
        return count == l->count;
    for (uint32_t i = 0; i < l->count; i++)
        count += tly_posts_lacks(l, r, i);
    return count == l->count;
}

/* --- a round ends ------------------------------------------------------------------------------- */

/* The posts differ, or one will never come: then no rank looks at the work entry.  One that is late begins even a round
 * that others have ended meanwhile. */
static bool nobody_begins(const struct tly_local *l, const struct tly_round *r)
{
    const struct tly_post *own = &r->posts[l->me];
    for (uint32_t i = 0; i < l->count; i++)
        if (r->posts[i].call ? (r->posts[i].flags & TLY_POST_SERVICE) || r->posts[i].spec != own->spec
                             : l->left[i])
            return true;
    return r->arrived < l->count && tly_posts_all_there(l, r); /* it is the service's */
}

struct tly_local_op *tly_posts_let_go(struct tly_local *l, struct tly_round *r)
{
    struct tly_local_op *op = r->op;
    r->op = NULL;
    r->over = true;
    op->meeting = NULL;
    tly_list_remove(&r->node);
    tly_list_init(&r->node);
    tly_list_remove(&op->node);
    if (r->windowed) {
        tly_staging_give_back(l, op);
        tly_staging_elect(l, r);
    } else if (!op->parts) {
        if (op->borrowed) /* to look for it takes a lock that the whole process has */
            tly_pool_free(op->borrowed);
        op->borrowed = NULL;
    }
    /* One in which others may still count, or look for what has not come to a good end, is not used again. */
    if (r->posts[l->me].gen && (op->parts || (r->work ? tly_work_finished(r) : nobody_begins(l, r))))
        l->free_work[l->free_count++] = r->posts[l->me].work;
    r->work = NULL;
    if (is_complete(l, r))
        drop(l, r);
    return op;
}

void tly_posts_end(struct tly_local *l, struct tly_local_op *op, int err, const char *sentence)
{
    op->held = false;
    l->calls->ended(l->user, op, err, sentence);
    atomic_fetch_sub(&l->in_flight, 1); /* who waits for none finds it ended */
    tly_local_tell_sleepers(l);
}

void tly_posts_hand_back(struct tly_local *l, struct tly_local_op *op)
{
    op->held = false;
    atomic_store_explicit(&op->diverted, true, memory_order_release);
    l->calls->divert(l->user, op);
    atomic_fetch_sub(&l->in_flight, 1); /* who waits for none finds it handed on */
    tly_local_tell_sleepers(l);
}

void tly_posts_finish(struct tly_local *l, struct tly_round *r)
{
    const struct tly_post *own = &r->posts[l->me];
    struct tly_local_op *op = r->op;
    if (op->parts && op->borrowed && (own->flags & TLY_POST_POOL_OUT) && l->own &&
        (uint8_t *)l->at[l->me].base + own->output == (uint8_t *)op->borrowed)
        memcpy(op->output, op->borrowed, op->bytes);
    tly_posts_end(l, tly_posts_let_go(l, r), 0, NULL);
}

/* --- a round begins ----------------------------------------------------------------------------- */

/* All ranks should do the same one first of the operations that go through windows.  Their priorities may differ. */
static int64_t priority(const struct tly_round *r)
{
    return r->windowed ? r->posts[0].first_dim : r->op->priority;
}

static bool is_before(const struct tly_round *a, const struct tly_round *b)
{
    return priority(a) != priority(b) ? priority(a) > priority(b) : a->order < b->order;
}

static void make_ready(struct tly_local *l, struct tly_round *r)
{
    struct tly_list *n = l->ready.prev;
    while (n != &l->ready && is_before(r, tly_list_entry(n, struct tly_round, node)))
        n = n->prev;
    tly_list_append(n->next, &r->node);
    if (r->windowed)
        tly_staging_elect(l, NULL);
}

static bool in_segment(const struct tly_local *l, uint32_t rank, uint64_t at, uint64_t bytes)
{
    uint64_t all = l->at[rank].bytes;
    return !bytes || (at >= sizeof(struct tly_control) && at <= all && bytes <= all - at);
}

/* Can what a rank has posted be used?  One that runs wild must not take the others with it. */
static bool is_sound(const struct tly_local *l, const struct tly_round *r, uint32_t rank)
{
    const struct tly_local_op *op = r->op;
    const struct tly_post *p = &r->posts[rank], *own = &r->posts[l->me];
    uint64_t given = tly_gives(op->call->givers, op->root, rank) ? op->bytes : 0;
    if (p->work >= TLY_WORKS ||
        (!op->call->gathered && ((p->flags ^ own->flags) & TLY_POST_EAGER || p->bytes != given)))
        return false;
    return (p->flags & TLY_POST_EAGER) ||
           (((~p->flags & TLY_POST_POOL_IN) || in_segment(l, rank, p->input, p->bytes)) &&
            ((~p->flags & TLY_POST_POOL_OUT) || in_segment(l, rank, p->output, op->bytes)));
}

/* Have memory for pieces of the lengths that are posted.  False: there is none. */
static bool posts_take_room(struct tly_local *l, struct tly_round *r)
{
    int64_t dims[TLY_LOCAL_RANKS];
    uint64_t bytes[TLY_LOCAL_RANKS];
    r->moved = 0;
    for (uint32_t i = 0; i < l->count; i++) {
        dims[i] = r->posts[i].first_dim;
        bytes[i] = r->posts[i].bytes;
        r->moved += bytes[i];
    }
    r->op->output = l->calls->gather(l->user, r->op, dims, bytes);
    return r->op->output != NULL;
}

/* All posts of the round are there, and the same. */
static void begin(struct tly_local *l, struct tly_round *r)
{
    struct tly_local_op *op = r->op;
    while (!r->posts[r->lead].call)
        r->lead++;
    uint32_t work = r->posts[r->lead].work;
    for (uint32_t i = 0; i < l->count; i++)
        if (r->posts[i].call && !is_sound(l, r, i)) {
            char sentence[100];
            snprintf(sentence, sizeof sentence, "rank %u has posted a malformed operation",
                     tly_local_number(l, i));
            l->calls->broken(l->user, EPROTO, sentence);
            return;
        }
    r->moved = op->bytes;
    if (op->parts) {
        if (!tly_team_begin(l, r)) {
            l->calls->broken(l->user, EPROTO, "the ranks of a machine have cut a tensor differently");
            return;
        }
        make_ready(l, r);
        return;
    }
    if (!op->call->gathered && (r->posts[l->me].flags & TLY_POST_EAGER)) {
        tly_work_eager(l, r);
        tly_posts_finish(l, r);
        return;
    }
    r->work = &l->at[r->lead].control->work[work];
    r->gen = r->posts[r->lead].gen;
    if (op->call->gathered && !posts_take_room(l, r)) {
        l->calls->broken(l->user, ENOMEM, "no memory for an allgather's result");
        return;
    }
    r->parts = l->count;
    if (op->call->reduces && r->arrived == l->count && tly_staging_suits(l, r))
        tly_staging_begin(l, r);
    else if (op->call->reduces)
        tly_work_cut(l, r);
    make_ready(l, r);
}

/* --- what has come ------------------------------------------------------------------------------ */

/* Zeros can stand for those that have joined: all others' posts are there.  Else the service sees to it. */
static bool does_without(const struct tly_local *l, const struct tly_round *r)
{
    const struct tly_local_op *op = r->op;
    bool pooled = true;
    for (uint32_t i = 0; i < l->count; i++)
        pooled &= !r->posts[i].call || (~r->posts[i].flags & (TLY_POST_POOL_IN | TLY_POST_POOL_OUT)) == 0;
    return op->call->spares && op->call->spares(op->root) &&
           ((r->posts[l->me].flags & TLY_POST_EAGER) || pooled);
}

/* Both seq_cst, and a post is visible to all ranks at once, as on x86 and ARM: of two ranks one sees what the other has
 * written, or what it has seen. */
bool tly_posts_no_doubts(const struct tly_local *l)
{
    return atomic_load(&l->at[0].control->doubts) == l->doubts;
}

void tly_posts_check(struct tly_local *l, struct tly_round *r)
{
    if (r->over) {
        if (is_complete(l, r))
            drop(l, r);
        return;
    }
    if (!r->posted)
        return;
    const struct tly_post *own = &r->posts[l->me];
    bool differs = false;
    for (uint32_t i = 0; i < l->count; i++)
        differs |=
            r->posts[i].call && ((r->posts[i].flags & TLY_POST_SERVICE) || r->posts[i].spec != own->spec);
    if (differs)
        tly_posts_hand_back(l, tly_posts_let_go(l, r));
    else if (tly_posts_all_there(l, r) && tly_posts_no_doubts(l)) {
        if (r->arrived == l->count || does_without(l, r))
            begin(l, r);
        else
            tly_posts_hand_back(l, tly_posts_let_go(l, r));
    }
}

void tly_posts_settle(struct tly_local *l, struct tly_round *r, uint32_t rank, bool back)
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
