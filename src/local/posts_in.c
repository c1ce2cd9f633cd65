/* posts_in.c - reads what the other ranks have posted, and notices who has joined or left.
 *
 * Each rank's ring is read from where the last look ended.  A post goes into its round (posts.c).  Two kinds of posts are
 * not calls: a rank has joined, or takes a post back.  A post of a group without this rank is passed over.  A rank that
 * leaves is noticed before its ring is read, so all that it had posted counts.  Then operations end that it will not do its
 * part of.
 *
 * All under the engine's lock. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "local/posts.h"
#include "local/way.h"
#include "ops/local.h"

/* The payload of post `p` lies at offset `at` of its rank's ring, or in the post. */
static bool posts_in_keep_payload(struct tly_local *l, struct tly_local_round *r, uint32_t rank,
                                  const struct tly_post *p, uint64_t at, uint32_t bytes)
{
    if (bytes > r->room) {
        uint32_t room = bytes <= 64 ? 64 : bytes <= 512 ? 512 : TLY_EAGER;
        uint8_t *data = malloc((size_t)l->count * room);
        if (!data)
            return false;
        for (uint32_t i = 0; i < l->count && r->data; i++)
            memcpy(data + (size_t)i * room, r->data + (size_t)i * r->room, r->room);
        free(r->data);
        r->data = data;
        r->room = room;
    }
    if (bytes > TLY_TINY)
        tly_posts_copy(l->at[rank].control, at, r->data + (size_t)rank * r->room, bytes);
    else if (bytes)
        memcpy(r->data + (size_t)rank * r->room, p->tiny, bytes);
    return true;
}

/* Another rank has posted what this one, which has joined, has not: in a team it is to stand in, else nothing is missed. */
static void posts_in_miss(struct tly_local *l, struct tly_local_round *r, uint32_t rank)
{
    const struct tly_post *p = &r->posts[rank];
    if (!l->config.team) {
        r->over = true;
        return;
    }
    if (r->asked)
        return;
    if (r->grouped || (p->flags & TLY_POST_SERVICE) || p->work >= TLY_WORKS) {
        r->over = r->unaided = true; /* unless another one means it */
        return;
    }
    const struct tly_work *w = &l->at[rank].control->work[p->work];
    struct tly_local_op like = {
        .key = p->key,
        .spec = p->spec,
        .round = p->round,
        .number = p->call,
        .dtype = w->what.dtype,
        .reduction = w->what.reduction,
        .priority = w->what.priority,
        .prescale = w->what.prescale,
        .postscale = w->what.postscale,
        .count = w->what.count,
        .bytes = p->bytes,
        .parts = (uint32_t)p->first_dim};
    r->asked = true;
    r->over = r->unaided = !l->calls->stand_in(l->user, &like);
}

bool tly_posts_take_joined(struct tly_local *l, uint32_t rank)
{
    struct tly_local_round *r, **all = malloc((l->rounds.count + 1) * sizeof *all);
    uint64_t *ids = malloc((l->rounds.count + 1) * sizeof *ids);
    size_t count = 0;
    l->at[rank].joins++;
    l->joined = true;
    if (!all || !ids) {
        free(all);
        free(ids);
        l->calls->broken(l->user, ENOMEM, "out of memory");
        return false;
    }
    tly_map_each(&l->rounds, r)
    {
        all[count] = r;
        ids[count++] = r->id;
    }
    for (size_t i = 0; i < count; i++) {
        r = all[i];
        if (tly_map_get(&l->rounds, ids[i]) != r) /* it has ended with one before */
            continue;
        for (uint32_t k = 0; k < l->count && rank == l->me && !r->posted && r->joins < l->at[rank].joins; k++)
            if (r->posts[k].call)
                posts_in_miss(l, r, k);
        if (!r->work) /* else it has begun */
            tly_posts_check(l, r);
    }
    free(all);
    free(ids);
    l->uneven = false;
    for (uint32_t i = 1; i < l->count; i++)
        l->uneven |= l->at[i].joins != l->at[0].joins;
    return true;
}

/* The ranks that take part, as bits; 0: all.  A group's are never 0, so a malformed one of no ranks has all bits. */
static uint64_t posts_in_ranks(const struct tly_neighbour *n, const struct tly_post *p, uint64_t at)
{
    uint64_t ranks = 0;
    if (atomic_load_explicit(&p->there, memory_order_relaxed) != TLY_POST_GROUP)
        return 0;
    tly_posts_copy(n->control, at + sizeof *p, &ranks, sizeof ranks);
    return ranks ? ranks : UINT64_MAX;
}

/* Always false: the job fails. */
static bool posts_in_blame(struct tly_local *l, uint32_t rank, const char *what)
{
    char sentence[100];
    snprintf(sentence, sizeof sentence, "rank %u has posted %s", tly_local_number(l, rank), what);
    l->calls->broken(l->user, EPROTO, sentence);
    return false;
}

/* A call of a rank, at this place of its ring, which is passed over if this rank has no part in it.  False: the job fails. */
static bool posts_in_take_call(struct tly_local *l, uint32_t rank, const struct tly_post *p, uint64_t ranks,
                               uint64_t *at)
{
    struct tly_neighbour *n = &l->at[rank];
    uint64_t bytes = p->flags & TLY_POST_EAGER ? p->bytes : 0;
    if (bytes > TLY_EAGER || (ranks && (~ranks >> rank & 1 || ranks & ~l->all.bits)))
        return posts_in_blame(l, rank, "a malformed operation");
    uint64_t next = *at + tly_posts_length(ranks, bytes), behind = next - tly_posts_bytes_behind(bytes);
    if (ranks && ~ranks >> l->me & 1) {
        *at = next;
        atomic_store_explicit(&n->read, next, memory_order_relaxed);
        return true;
    }
    struct tly_local_round *r =
        tly_posts_round(l, p->key, p->round, ranks, n->joins - !!(p->flags & TLY_POST_LATE));
    if (r && (r->posts[rank].call || !p->call))
        return posts_in_blame(l, rank, "an operation twice, or none");
    if (!r || !posts_in_keep_payload(l, r, rank, p, behind, (uint32_t)bytes)) {
        l->calls->broken(l->user, ENOMEM, "out of memory");
        return false;
    }
    r->order = rank == 0 ? *at : r->order;
    *at = next;
    atomic_store_explicit(&n->read, next, memory_order_relaxed);
    r->posts[rank] = *p;
    r->arrived++;
    if (l->at[l->me].joins > r->joins && !r->posted)
        posts_in_miss(l, r, rank);
    tly_posts_check(l, r);
    return true;
}

static bool posts_in_read_ring(struct tly_local *l, uint32_t rank)
{
    struct tly_neighbour *n = &l->at[rank];
    uint64_t at = atomic_load_explicit(&n->read, memory_order_relaxed);
    if (!tly_post_is_there(n, at))
        return false;
    do {
        struct tly_post p = *tly_post_at(n->control, at);
        uint64_t ranks = posts_in_ranks(n, &p, at);
        if (p.flags & TLY_POST_JOINED) {
            at += sizeof p;
            atomic_store_explicit(&n->read, at, memory_order_relaxed);
            if (!tly_posts_take_joined(l, rank))
                return false;
        } else if (p.flags & TLY_POST_BACK) {
            at += tly_posts_length(ranks, 0);
            atomic_store_explicit(&n->read, at, memory_order_relaxed);
            tly_posts_settle(l, tly_posts_find(l, p.key, p.round, ranks), rank, p.flags & TLY_POST_SERVICE);
        } else if (!posts_in_take_call(l, rank, &p, ranks, &at)) {
            return false;
        }
    } while (tly_post_is_there(n, at));
    tly_posts_say_read(l, rank);
    return true;
}

/* A rank that has left will not do its part of it. */
static bool posts_in_is_lost(const struct tly_local *l, const struct tly_local_round *r, uint32_t rank)
{
    if (!l->left[rank] || !r->posts[rank].call)
        return l->left[rank];
    if (l->left[rank] < 2)
        return false;
    /* It has given up what has not ended; a payload that came in the post is here all the same. */
    if (r->work)
        return !(r->way->needs_none ? r->way->needs_none(l, r) : r->way->is_finished(r));
    return r->op->call->gathered || !(r->posts[rank].flags & TLY_POST_EAGER);
}

bool tly_posts_give_up(struct tly_local *l, const struct tly_local_round *r)
{
    return !r->way->give_up || r->way->give_up(l, r);
}

void tly_posts_end_lost(struct tly_local *l)
{
    for (struct tly_list *n = l->ops.next, *next; n != &l->ops; n = next) {
        struct tly_local_op *op = tly_list_entry(n, struct tly_local_op, node);
        struct tly_local_round *r = op->meeting;
        next = n->next;
        for (uint32_t i = 0; i < r->group->size; i++)
            if (posts_in_is_lost(l, r, r->group->rank[i])) {
                char sentence[64];
                if (!tly_posts_give_up(l, r))
                    return; /* the failure ends it */
                snprintf(sentence, sizeof sentence, "rank %u has left the job",
                         tly_local_number(l, r->group->rank[i]));
                tly_posts_end(l, tly_posts_let_go(l, r), ESHUTDOWN, sentence);
                break;
            }
    }
}

bool tly_posts_read(struct tly_local *l)
{
    bool any = false, lost = false;
    if (atomic_load_explicit(&l->own->left, memory_order_relaxed))
        return false; /* nobody minds any more what we have not read */
    const uint32_t count = l->count;
    uint8_t left[TLY_LOCAL_RANKS];
    for (uint32_t i = 0; i < count; i++) /* before the rings: what was posted before is read then */
        left[i] = (uint8_t)atomic_load_explicit(&l->at[i].control->left, memory_order_acquire);
    for (uint32_t i = 0; i < count; i++) {
        if (i == l->me)
            continue;
        any |= posts_in_read_ring(l, i);
        if (left[i] > l->left[i]) {
            l->left[i] = left[i];
            l->lost = lost = true;
        }
    }
    if (lost)
        tly_posts_end_lost(l);
    return any || lost; /* a full ring may have room now */
}
