/* posts.c - posts go out, others' posts come in, and a round of which all posts are there begins.  All under the
 * engine's lock. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "local/control.h"
#include "tally/tally.h"

enum {
    UNSAID = TLY_RING / 8, /* bytes of a ring that have been read and not said so */
    MOST_IDLE = 64,        /* rounds kept for later */
};

/* --- rounds -------------------------------------------------------------------------------------- */

static uint64_t round_id(uint64_t key, uint32_t round)
{
    uint64_t x = key ^ (round + 1) * 0x9e3779b97f4a7c15ull;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93ull;
    return x ^ x >> 32;
}

/* Of which `joins`: those of the rank that posts it, which all its ranks have in common. */
static struct tly_round *round_of(struct tly_local *l, uint64_t key, uint32_t number, uint32_t joins)
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
        if (!r->posts[i].kind && !l->left[i] && !tly_posts_lacks(l, r, i))
            return false;
    return true;
}

/* All ranks have posted it but those that have joined. */
static bool all_posted(const struct tly_local *l, const struct tly_round *r)
{
    uint32_t count = r->arrived;
    if (count == l->count || !l->joined)
        return count == l->count;
    for (uint32_t i = 0; i < l->count; i++)
        count += tly_posts_lacks(l, r, i);
    return count == l->count;
}

/* Zeros can stand for those that have joined: all others' posts are there.  Else the service sees to it. */
static bool does_without(const struct tly_local *l, const struct tly_round *r)
{
    const struct tly_local_op *op = r->op;
    bool pooled = true;
    for (uint32_t i = 0; i < l->count; i++)
        pooled &= !r->posts[i].kind || (~r->posts[i].flags & (TLY_POST_POOL_IN | TLY_POST_POOL_OUT)) == 0;
    return (op->kind == TALLY_BARRIER && !op->root) ||
           (op->kind == TALLY_PUSH_PULL && ((r->posts[l->me].flags & TLY_POST_EAGER) || pooled));
}

/* The posts differ, or one will never come: then no rank looks at the work entry.  One that is late begins even a round
 * that others have ended meanwhile. */
static bool nobody_begins(const struct tly_local *l, const struct tly_round *r)
{
    const struct tly_post *own = &r->posts[l->me];
    for (uint32_t i = 0; i < l->count; i++)
        if (r->posts[i].kind ? (r->posts[i].flags & TLY_POST_SERVICE) || r->posts[i].spec != own->spec
                             : l->left[i])
            return true;
    return r->arrived < l->count && all_posted(l, r); /* it is the service's */
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
        tly_stage_close_window(l, op);
        tly_stage_elect(l, r);
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

static void broken(struct tly_local *l, int err, const char *sentence)
{
    l->calls->broken(l->user, err, sentence);
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

/* Of what goes through windows all ranks had better do the same first, and their priorities may differ. */
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
        tly_stage_elect(l, NULL);
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
    bool sum = op->kind == TALLY_PUSH_PULL, tensor = sum || op->kind == TALLY_BROADCAST;
    if (p->work >= TLY_WORKS || (tensor && (p->flags ^ own->flags) & TLY_POST_EAGER) ||
        ((sum || (tensor && op->root == rank)) && p->bytes != op->bytes))
        return false;
    return (p->flags & TLY_POST_EAGER) ||
           (((~p->flags & TLY_POST_POOL_IN) || in_segment(l, rank, p->input, p->bytes)) &&
            ((~p->flags & TLY_POST_POOL_OUT) || in_segment(l, rank, p->output, op->bytes)));
}

/* All posts of the round are there, and the same. */
static void begin(struct tly_local *l, struct tly_round *r)
{
    struct tly_local_op *op = r->op;
    while (!r->posts[r->lead].kind)
        r->lead++;
    uint32_t work = r->posts[r->lead].work;
    for (uint32_t i = 0; i < l->count; i++)
        if (r->posts[i].kind && !is_sound(l, r, i)) {
            char sentence[100];
            snprintf(sentence, sizeof sentence, "rank %u has posted an operation that cannot be",
                     tly_local_number(l, i));
            broken(l, EPROTO, sentence);
            return;
        }
    if (op->parts) {
        if (!tly_team_begin(l, r)) {
            broken(l, EPROTO, "the ranks of a machine have cut a tensor differently");
            return;
        }
        make_ready(l, r);
        return;
    }
    if (op->kind == TALLY_BARRIER ||
        (op->kind != TALLY_ALLGATHER && (r->posts[l->me].flags & TLY_POST_EAGER))) {
        tly_work_eager(l, r);
        tly_posts_finish(l, r);
        return;
    }
    r->work = &l->at[r->lead].control->work[work];
    r->gen = r->posts[r->lead].gen;
    if (op->kind == TALLY_ALLGATHER) {
        int64_t dims[TLY_LOCAL_RANKS];
        uint64_t bytes[TLY_LOCAL_RANKS];
        for (uint32_t i = 0; i < l->count; i++) {
            dims[i] = r->posts[i].first_dim;
            bytes[i] = r->posts[i].bytes;
        }
        op->output = l->calls->gather(l->user, op, dims, bytes);
        if (!op->output) {
            broken(l, ENOMEM, "no memory for an allgather's result");
            return;
        }
    }
    r->parts = l->count;
    if (op->kind == TALLY_PUSH_PULL && r->arrived == l->count && tly_stage_suits(l, r))
        tly_stage_begin(l, r);
    else if (op->kind == TALLY_PUSH_PULL)
        tly_work_cut(l, r);
    make_ready(l, r);
}

/* Both seq_cst, and a post is visible to all ranks at once, as on x86 and ARM: of two ranks one sees what the other has
 * written, or what it has seen. */
bool tly_posts_no_doubts(const struct tly_local *l)
{
    return atomic_load(&l->at[0].control->doubts) == l->doubts;
}

/* Another post of the round has come, or ours is out. */
static void check(struct tly_local *l, struct tly_round *r)
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
            r->posts[i].kind && ((r->posts[i].flags & TLY_POST_SERVICE) || r->posts[i].spec != own->spec);
    if (differs)
        tly_posts_hand_back(l, tly_posts_let_go(l, r));
    else if (all_posted(l, r) && tly_posts_no_doubts(l)) {
        if (r->arrived == l->count || does_without(l, r))
            begin(l, r);
        else
            tly_posts_hand_back(l, tly_posts_let_go(l, r));
    }
}

/* A rank has taken back its post, or has found that all are there. */
static void settle(struct tly_local *l, struct tly_round *r, uint32_t rank, bool back)
{
    l->doubts++;
    if (r && back) {
        r->posts[rank].flags |= TLY_POST_SERVICE;
        check(l, r);
    }
    for (struct tly_list *n = l->ops.next, *next; n != &l->ops && tly_posts_no_doubts(l); n = next) {
        next = n->next;
        r = tly_list_entry(n, struct tly_local_op, node)->meeting;
        if (!r->work && all_posted(l, r)) /* it waited for this */
            check(l, r);
    }
}

/* --- in ------------------------------------------------------------------------------------------ */

static void out_of_ring(const struct tly_control *c, uint64_t at, void *to, size_t len)
{
    size_t first = TLY_RING - (at & (TLY_RING - 1));
    first = first < len ? first : len;
    memcpy(to, c->ring + (at & (TLY_RING - 1)), first);
    memcpy((uint8_t *)to + first, c->ring, len - first);
}

static uint64_t padded(uint64_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

static uint64_t bytes_behind(uint64_t payload)
{
    return payload <= TLY_TINY ? 0 : padded(payload);
}

/* Of the post `p`, which is at `at` in its rank's ring. */
static bool keep_payload(struct tly_local *l, struct tly_round *r, uint32_t rank, const struct tly_post *p,
                         uint64_t at, uint32_t bytes)
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
        out_of_ring(l->at[rank].control, at + sizeof *p, r->data + (size_t)rank * r->room, bytes);
    else if (bytes)
        memcpy(r->data + (size_t)rank * r->room, p->tiny, bytes);
    return true;
}

/* What is unsaid always leaves the other room for a post, so that it does not wait for the word. */
void tly_posts_say_read(struct tly_local *l, uint32_t rank)
{
    uint64_t at = atomic_load_explicit(&l->at[rank].read, memory_order_relaxed);
    if (at - atomic_load_explicit(&l->own->read[rank].at, memory_order_relaxed) < UNSAID)
        return;
    atomic_store_explicit(&l->own->read[rank].at, at, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&l->at[rank].control->stuck, memory_order_relaxed))
        tly_local_ring(l, rank, TLY_WAKE_THREAD | TLY_WAKE_WAITERS);
}

/* Another rank has posted what this one, which has joined, has not: in a team it is to stand in, else nothing is missed. */
static void miss(struct tly_local *l, struct tly_round *r, uint32_t rank)
{
    const struct tly_post *p = &r->posts[rank];
    if (!l->config.team) {
        r->over = true;
        return;
    }
    if (r->asked || (p->flags & TLY_POST_SERVICE) || p->work >= TLY_WORKS)
        return;
    const struct tly_work *w = &l->at[rank].control->work[p->work];
    struct tly_local_op like = {
        .key = p->key,
        .spec = p->spec,
        .round = p->round,
        .kind = p->kind,
        .dtype = w->what.dtype,
        .reduction = w->what.reduction,
        .priority = w->what.priority,
        .prescale = w->what.prescale,
        .postscale = w->what.postscale,
        .count = w->what.count,
        .bytes = p->bytes,
        .parts = (uint32_t)p->first_dim};
    r->asked = true;
    l->calls->stand_in(l->user, &like);
}

/* A rank has joined: what lacks its post alone need not wait.  False: out of memory, and the job fails. */
static bool take_joined(struct tly_local *l, uint32_t rank)
{
    struct tly_round *r, **all = malloc((l->rounds.count + 1) * sizeof *all);
    uint64_t *ids = malloc((l->rounds.count + 1) * sizeof *ids);
    size_t count = 0;
    l->at[rank].joins++;
    l->joined = true;
    if (!all || !ids) {
        free(all);
        free(ids);
        broken(l, ENOMEM, "out of memory");
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
            if (r->posts[k].kind)
                miss(l, r, k);
        if (!r->work) /* else it has begun */
            check(l, r);
    }
    free(all);
    free(ids);
    l->uneven = false;
    for (uint32_t i = 1; i < l->count; i++)
        l->uneven |= l->at[i].joins != l->at[0].joins;
    return true;
}

static bool read_ring(struct tly_local *l, uint32_t rank)
{
    struct tly_neighbour *n = &l->at[rank];
    uint64_t at = atomic_load_explicit(&n->read, memory_order_relaxed);
    if (!tly_post_is_there(n, at))
        return false;
    do {
        struct tly_post p = *tly_post_at(n->control, at);
        if (p.flags & TLY_POST_JOINED) {
            at += sizeof p;
            atomic_store_explicit(&n->read, at, memory_order_relaxed);
            if (!take_joined(l, rank))
                return false;
            continue;
        }
        if (p.flags & TLY_POST_BACK) {
            at += sizeof p;
            atomic_store_explicit(&n->read, at, memory_order_relaxed);
            settle(l, tly_map_get(&l->rounds, round_id(p.key, p.round)), rank, p.flags & TLY_POST_SERVICE);
            continue;
        }
        uint64_t bytes = p.flags & TLY_POST_EAGER ? p.bytes : 0;
        struct tly_round *r = round_of(l, p.key, p.round, n->joins - !!(p.flags & TLY_POST_LATE));
        if (r && (r->posts[rank].kind || !p.kind || bytes > TLY_EAGER)) {
            char sentence[100];
            snprintf(sentence, sizeof sentence, "rank %u has posted an operation %s",
                     tly_local_number(l, rank), bytes > TLY_EAGER ? "that cannot be" : "twice, or none");
            broken(l, EPROTO, sentence);
            return false;
        }
        if (!r || !keep_payload(l, r, rank, &p, at, (uint32_t)bytes)) {
            broken(l, ENOMEM, "out of memory");
            return false;
        }
        r->order = rank == 0 ? at : r->order;
        at += sizeof p + bytes_behind(bytes);
        atomic_store_explicit(&n->read, at, memory_order_relaxed);
        r->posts[rank] = p;
        r->arrived++;
        if (l->at[l->me].joins > r->joins && !r->posted)
            miss(l, r, rank);
        check(l, r);
    } while (tly_post_is_there(n, at));
    tly_posts_say_read(l, rank);
    return true;
}

/* A rank that has left will not do its part of it. */
static bool is_lost(const struct tly_local *l, const struct tly_round *r, uint32_t rank)
{
    if (!l->left[rank] || !r->posts[rank].kind)
        return l->left[rank];
    if (l->left[rank] < 2)
        return false;
    /* It has given up what has not ended; a payload that came in the post is here all the same. */
    if (r->windowed && r->work)
        return !tly_stage_is_summed(l, r);
    if (r->work)
        return !tly_work_finished(r);
    return r->op->kind == TALLY_ALLGATHER || !(r->posts[rank].flags & TLY_POST_EAGER);
}

/* Take this rank's memory back from a round that cannot be finished.  False: the job fails meanwhile. */
static bool give_up(struct tly_local *l, const struct tly_round *r)
{
    if (r->op->parts)
        return tly_team_give_up(l, r);
    if (!r->work)
        return true;
    return r->windowed ? tly_stage_give_up(l, r) : tly_work_give_up(l, r);
}

static void end_lost(struct tly_local *l)
{
    for (struct tly_list *n = l->ops.next, *next; n != &l->ops; n = next) {
        struct tly_local_op *op = tly_list_entry(n, struct tly_local_op, node);
        struct tly_round *r = op->meeting;
        next = n->next;
        for (uint32_t i = 0; i < l->count; i++)
            if (is_lost(l, r, i)) {
                char sentence[64];
                if (!give_up(l, r))
                    return; /* the failure ends it */
                snprintf(sentence, sizeof sentence, "rank %u has left the job", tly_local_number(l, i));
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
        any |= read_ring(l, i);
        if (left[i] > l->left[i]) {
            l->left[i] = left[i];
            l->lost = lost = true;
        }
    }
    if (lost)
        end_lost(l);
    return any || lost; /* a full ring may have room now */
}

/* --- out ----------------------------------------------------------------------------------------- */

/* Up to where all have read our ring. */
static uint64_t read_by_all(struct tly_local *l)
{
    uint64_t least = l->tail;
    for (uint32_t i = 0; i < l->count; i++) {
        uint64_t at = i == l->me || l->left[i]
                          ? l->tail /* who has left reads no more */
                          : atomic_load_explicit(&l->at[i].control->read[l->me].at, memory_order_acquire);
        least = at < least ? at : least;
    }
    return least;
}

bool tly_posts_has_room(struct tly_local *l, uint64_t bytes)
{
    if (l->tail + bytes - l->room <= TLY_RING)
        return true;
    l->room = read_by_all(l);
    if (l->tail + bytes - l->room <= TLY_RING)
        return true;
    atomic_store(&l->own->stuck, 1);
    atomic_thread_fence(memory_order_seq_cst); /* pairs with that in tly_posts_say_read() */
    l->room = read_by_all(l);
    if (l->tail + bytes - l->room > TLY_RING) {
        for (uint32_t i = 0; i < l->count; i++) /* even those that wait for nothing */
            if (i != l->me)
                tly_local_ring(l, i, TLY_WAKE_THREAD | TLY_WAKE_WAITERS);
        return false;
    }
    return true;
}

static void into_ring(struct tly_local *l, uint64_t at, const void *from, size_t len)
{
    size_t first = TLY_RING - (at & (TLY_RING - 1));
    first = first < len ? first : len;
    memcpy(l->own->ring + (at & (TLY_RING - 1)), from, first);
    memcpy(l->own->ring, (const uint8_t *)from + first, len - first);
}

static bool sends(const struct tly_local *l, const struct tly_local_op *op)
{
    return op->kind != TALLY_BROADCAST || op->root == l->me;
}

static uint64_t address(const void *p)
{
    return (uint64_t)(uintptr_t)p;
}

/* Say where a large tensor lies; stage it where the others cannot reach it.  False: no memory. */
static bool place(struct tly_local *l, struct tly_local_op *op, struct tly_post *p)
{
    bool writes = op->kind == TALLY_PUSH_PULL;
    uint64_t in = sends(l, op) ? tly_segment_place(l->segment, op->input, op->bytes) : 0;
    uint64_t out = writes ? tly_segment_place(l->segment, op->output, op->bytes) : 0;
    p->input = in ? in : address(op->input);
    p->output = out ? out : address(op->output);
    if (writes && !op->parts) { /* as a whole in the pool, or through a window */
        p->flags |= in && out ? TLY_POST_POOL_IN | TLY_POST_POOL_OUT : 0;
        return true;
    }
    bool stage_in = sends(l, op) && !in && !l->direct, stage_out = writes && !out && !l->direct;
    if (stage_in || stage_out) {
        if (tly_pool_borrow(l->segment, op->bytes, &op->borrowed) != 0)
            return false;
        uint64_t at = (uint64_t)((uint8_t *)op->borrowed - tly_segment_base(l->segment));
        if (stage_in) {
            memcpy(op->borrowed, op->input, op->bytes);
            p->input = in = at;
        }
        if (stage_out)
            p->output = out = at;
    }
    p->flags |= (in ? TLY_POST_POOL_IN : 0) | (out ? TLY_POST_POOL_OUT : 0);
    return true;
}

static bool take_work(struct tly_local *l, struct tly_post *p)
{
    if (!l->free_count)
        return false;
    p->work = l->free_work[--l->free_count];
    p->gen = ++l->gens[p->work];
    struct tly_work *w = &l->own->work[p->work];
    /* The post publishes them. */
    atomic_store_explicit(&w->done, (uint64_t)p->gen << 32,
                          memory_order_release); /* who is late reads it as an end */
    atomic_store_explicit(&w->next, (uint64_t)p->gen << 32, memory_order_relaxed);
    return true;
}

/* `there` of the next post is cleared first. */
void tly_posts_show(struct tly_local *l, const struct tly_local_op *op, const struct tly_post *p)
{
    uint64_t payload = p->flags & TLY_POST_EAGER ? p->bytes : 0;
    uint64_t next = l->tail + sizeof *p + bytes_behind(payload);
    atomic_store_explicit(&tly_post_at(l->own, next)->there, 0, memory_order_relaxed);
    struct tly_post *here = tly_post_at(l->own, l->tail);
    memcpy(here, p, offsetof(struct tly_post, there));
    if (payload > TLY_TINY)
        into_ring(l, l->tail + sizeof *p, op->input, payload);
    else if (payload)
        memcpy(here->tiny, op->input, payload);
    atomic_store_explicit(&here->there, 1, memory_order_release);
    l->tail = next;
    tly_local_tell(l);
    /* The lines that are written next are in the others' caches since the ring came round: let them come meanwhile. */
    uint64_t behind = bytes_behind(payload);
    for (uint64_t k = 0; k < behind && k < TLY_AHEAD; k += 64)
        __builtin_prefetch(tly_post_at(l->own, next + sizeof *p + k), 1);
    __builtin_prefetch(tly_post_at(l->own, next + sizeof *p + behind), 1);
}

static void book(struct tly_local *l, struct tly_round *r, struct tly_local_op *op, const struct tly_post *p)
{
    r->op = op;
    op->meeting = r;
    r->posts[l->me] = *p;
}

/* Our post is out, and began at this place of our ring. */
static void posted(struct tly_local *l, struct tly_round *r, uint64_t at)
{
    r->order = l->me == 0 ? at : r->order;
    r->posted = true;
    r->arrived++;
    l->own_posts++;
    tly_list_append(&l->ops, &r->op->node);
    check(l, r);
}

void tly_posts_follow(struct tly_local *l, struct tly_local_op *op, const struct tly_post *p, uint64_t at)
{
    struct tly_round *r = round_of(l, op->key, op->round, l->at[l->me].joins); /* an idle one */
    book(l, r, op, p);
    posted(l, r, at);
}

/* False: no room in the ring, or no memory, and the job fails. */
static bool post(struct tly_local *l, struct tly_local_op *op)
{
    struct tly_post p = {
        .key = op->key, .spec = op->spec, .round = op->round, .kind = op->kind, .first_dim = op->first_dim};
    bool small = op->bytes <= TLY_EAGER && !op->parts;
    uint32_t payload = small && sends(l, op) && !op->mark ? (uint32_t)op->bytes : 0;
    uint64_t need = sizeof p + bytes_behind(payload);
    if (!tly_posts_has_room(l, need + sizeof p) || (op->parts && !l->free_count))
        return false;
    struct tly_round *r = round_of(l, op->key, op->round, l->at[l->me].joins - op->stands_in);
    if (!r) {
        broken(l, ENOMEM, "out of memory");
        return false; /* it stays where the failure will find it */
    }
    p.bytes = sends(l, op) && !op->mark ? op->bytes : 0;
    p.flags = (small ? TLY_POST_EAGER : 0) | (op->patient ? TLY_POST_PATIENT : 0) |
              (op->stands_in ? TLY_POST_LATE : 0);
    bool placed = small || op->mark || place(l, op, &p);
    if (op->parts && !placed) {
        char sentence[300];
        snprintf(sentence, sizeof sentence, "no room to show a tensor to the machine's other ranks: %s",
                 tly_error());
        broken(l, ENOMEM, sentence);
        return false;
    }
    bool works = op->parts || (!small && op->kind == TALLY_PUSH_PULL) ||
                 (l->me == 0 && (!small || op->kind == TALLY_ALLGATHER));
    if (op->mark || !placed || (works && !take_work(l, &p)))
        p.flags |= TLY_POST_SERVICE;
    if (op->kind == TALLY_PUSH_PULL)
        p.first_dim = op->parts ? (int64_t)op->parts : op->priority;
    if (op->parts) {
        op->sums = tly_work_seen(l, l->me, p.output, p.flags & TLY_POST_POOL_OUT);
        struct tly_work *w = &l->own->work[p.work];
        w->what.prescale = op->prescale;
        w->what.postscale = op->postscale;
        w->what.count = op->count;
        w->what.priority = op->priority;
        w->what.dtype = op->dtype;
        w->what.reduction = op->reduction;
    }
    book(l, r, op, &p);
    if (!small && op->kind == TALLY_PUSH_PULL && !op->parts &&
        !(p.flags & (TLY_POST_SERVICE | TLY_POST_POOL_IN)))
        tly_stage_prepare(l, r);
    uint64_t at = l->tail;
    tly_posts_show(l, op, &p);
    posted(l, r, at);
    return true;
}

/* Nobody begins a round while he knows of a doubt and not of its outcome; so if a post is still missing once ours is said,
 * nobody has begun it, nor will.  False: no room in the ring. */
static bool take_back(struct tly_local *l, const struct tly_local_op *op)
{
    struct tly_post p = {.key = op->key, .round = op->round, .kind = op->kind, .flags = TLY_POST_BACK};
    if (!tly_posts_has_room(l, 2 * sizeof p))
        return false;
    atomic_fetch_add(&l->at[0].control->doubts, 1);
    atomic_thread_fence(memory_order_seq_cst); /* the others' posts are not read before */
    tly_posts_read(l);                         /* it may end here */
    struct tly_round *r = tly_map_get(&l->rounds, round_id(p.key, p.round));
    bool back = r && r->op && !all_posted(l, r);
    p.flags |= back ? TLY_POST_SERVICE : 0;
    tly_posts_show(l, op, &p);
    settle(l, r, l->me, back);
    return true;
}

static void take_back_all(struct tly_local *l)
{
    l->unwanted = false;
    for (struct tly_list *n = l->ops.next; n != &l->ops && !l->unwanted; n = n->next) {
        const struct tly_local_op *op = tly_list_entry(n, struct tly_local_op, node);
        if (!op->mark || all_posted(l, op->meeting))
            continue;
        l->unwanted = !take_back(l, op); /* again once there is room */
        n = &l->ops;                     /* from the beginning: others may have ended meanwhile */
    }
}

/* Behind all that this rank has posted.  False: no room in the ring. */
static bool say_joined(struct tly_local *l)
{
    static const struct tly_local_op nothing;
    struct tly_post p = {.flags = TLY_POST_JOINED};
    if (!tly_posts_has_room(l, 2 * sizeof p))
        return false;
    l->said = true;
    tly_posts_show(l, &nothing, &p);
    return take_joined(l, l->me);
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
        full = !post(l, op);
        if (full)
            tly_list_append(l->backlog.next, &op->node); /* back to the front */
        any |= !full;
    }
    if (any && !full && atomic_load_explicit(&l->own->stuck, memory_order_relaxed))
        atomic_store(&l->own->stuck, 0);
    if (l->joining && !l->said && l->own_posts == l->to_post && !full)
        any |= say_joined(l);
    if (l->unwanted && !full)
        take_back_all(l);
    if (any && l->lost)
        end_lost(l);
    return any;
}
