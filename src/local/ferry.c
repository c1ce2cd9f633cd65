/* ferry.c - private memory where no rank may reach into another's, and the pool has no room for a copy: its owner copies it.
 *
 * Each rank of a team has a window in its segment, with a slot for each other rank.  A rank asks the owner to copy a block of its
 * input into the asking rank's slot, or from there into its output.  The owner does so in its next turn (drive.c).  A rank asks all
 * owners of one block at once and looks again later: it never waits, and a block that a more urgent one has pushed out of the slots
 * is asked for again.
 *
 * Only the owner touches its private memory, under its engine's lock.  So nothing has to be taken back when an operation ends: the
 * owner refuses what it no longer has.
 *
 * All under the engine's lock. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "local/posts.h"
#include "local/window.h"
#include "local/work.h"
#include "ops/local.h"

enum { LONGEST = 128 << 10 }; /* bytes of a block: the slots of some ranks stay in the second cache */

int tly_ferry_open(struct tly_local *l)
{
    int err = tly_pool_borrow(l->segment, TLY_WINDOW, &l->slots);
    if (!err)
        l->own->slots = (uint64_t)((uint8_t *)l->slots - tly_segment_base(l->segment));
    return err;
}

void tly_ferry_close(struct tly_local *l)
{
    if (l->slots)
        tly_pool_free(l->slots);
}

static uint32_t ferry_slot_bytes(const struct tly_local *l)
{
    return TLY_WINDOW / l->count / 64 * 64;
}

/* --- the rank that asks ---------------------------------------------------------------------------- */

static bool ferry_is_between(const struct tly_local *l, const struct tly_local_round *r, uint32_t rank,
                             bool writes)
{
    unsigned pool = writes ? TLY_POST_POOL_OUT : TLY_POST_POOL_IN;
    return rank != l->me && !l->direct && !(r->posts[rank].flags & pool);
}

/* The ranks that must copy a block of the round, as bits. */
static uint64_t ferry_owners(const struct tly_local *l, const struct tly_local_round *r, bool writes)
{
    uint64_t owners = 0;
    for (uint32_t i = 0; i < r->group->size; i++) {
        uint32_t rank = r->group->rank[i];
        owners |= (uint64_t)ferry_is_between(l, r, rank, writes) << rank;
    }
    return owners;
}

uint8_t *tly_ferry_slot(struct tly_local *l, const struct tly_local_round *r, uint32_t rank, bool writes)
{
    if (!ferry_is_between(l, r, rank, writes))
        return NULL;
    uint64_t at = l->at[rank].control->slots, all = l->at[rank].bytes;
    if (at >= sizeof(struct tly_control) && at <= all && TLY_WINDOW <= all - at)
        return l->at[rank].base + at + (size_t)l->me * ferry_slot_bytes(l);
    char sentence[100];
    snprintf(sentence, sizeof sentence, "rank %u has written nonsense into shared memory",
             tly_local_number(l, rank));
    l->calls->broken(l->user, EPROTO, sentence);
    return NULL;
}

/* Have all that were asked answered?  Their slots are ours again. */
static bool ferry_is_answered(const struct tly_local *l)
{
    for (uint64_t left = l->ferry.owners; left; left &= left - 1) {
        int rank = __builtin_ctzll(left);
        /* acquire: what lies there */
        if (!l->left[rank] && atomic_load(&l->at[rank].control->asks) >> l->me & 1)
            return false;
    }
    return true;
}

static bool ferry_is_copied(const struct tly_local *l)
{
    bool all = true;
    for (uint64_t left = l->ferry.owners; left; left &= left - 1)
        all &= l->at[__builtin_ctzll(left)].control->ask[l->me].done;
    return all;
}

static bool ferry_ask(struct tly_local *l, const struct tly_local_round *r, uint32_t rank,
                      const struct tly_ferry_block *b)
{
    uint8_t *slot = tly_ferry_slot(l, r, rank, b->from);
    struct tly_control *c = l->at[rank].control;
    if (!slot)
        return false;
    if (b->from)
        memcpy(slot, b->from, b->length);
    c->ask[l->me] =
        (struct tly_ask){.at = b->at,
                         .length = b->length,
                         .gen = r->posts[rank].gen,
                         .work = r->posts[rank].work,
                         .writes = b->from};
    atomic_fetch_or(&c->asks, 1ull << l->me); /* release: the block and the question */
    tly_local_ring(l, rank,
                   TLY_WAKE_THREAD | TLY_WAKE_WAITERS); /* even one that has ended it and waits for nothing */
    return true;
}

bool tly_ferry_move(struct tly_local *l, const struct tly_local_round *r, struct tly_ferry_block *b)
{
    const struct tly_post *own = &r->posts[l->me];
    uint64_t name = (uint64_t)own->gen << 32 | own->work, owners = ferry_owners(l, r, b->from);
    uint32_t most = ferry_slot_bytes(l) < LONGEST ? ferry_slot_bytes(l) : LONGEST;
    if (!owners)
        return true;
    b->length = b->length < most ? b->length : most;
    if (!ferry_is_answered(l))
        return false;
    if (l->ferry.owners == owners && l->ferry.name == name && l->ferry.at == b->at &&
        l->ferry.writes == !!b->from) {
        bool copied = ferry_is_copied(l);
        l->ferry.owners = 0; /* another block's turn */
        return copied;
    }
    l->ferry.name = name;
    l->ferry.at = b->at;
    l->ferry.writes = b->from;
    l->ferry.owners = 0;
    for (uint64_t left = owners; left; left &= left - 1) {
        uint32_t rank = (uint32_t)__builtin_ctzll(left);
        if (!ferry_ask(l, r, rank, b))
            return false;
        l->ferry.owners |= 1ull << rank;
    }
    return false;
}

/* --- the owner ------------------------------------------------------------------------------------- */

/* Our operation with this entry; NULL: it has ended, or has never been. */
static const struct tly_local_op *ferry_op(const struct tly_local *l, const struct tly_ask *ask)
{
    for (const struct tly_list *n = l->ops.next; n != &l->ops; n = n->next) {
        const struct tly_local_op *op = tly_list_entry(n, struct tly_local_op, node);
        const struct tly_post *own = &op->meeting->posts[l->me];
        if (op->parts && own->gen == ask->gen && own->work == ask->work)
            return op;
    }
    return NULL;
}

static bool ferry_copy(const struct tly_local *l, const struct tly_ask *ask, uint8_t *slot)
{
    const struct tly_local_op *op = ferry_op(l, ask);
    if (!op || ask->length > ferry_slot_bytes(l) || ask->at > op->bytes ||
        ask->length > op->bytes - ask->at ||
        (ask->writes ? !tly_work_output_bytes(l, op, tly_local_group_of(l, op)->me) : !op->call->reduces))
        return false;
    if (ask->writes)
        memcpy((uint8_t *)op->output + ask->at, slot, ask->length);
    else
        memcpy(slot, (const uint8_t *)op->input + ask->at, ask->length);
    return true;
}

bool tly_ferry_serve(struct tly_local *l)
{
    uint64_t asks = atomic_load(&l->own->asks) & l->all.bits;
    for (uint64_t left = asks; left; left &= left - 1) {
        uint32_t rank = (uint32_t)__builtin_ctzll(left);
        const struct tly_ask ask = l->own->ask[rank];
        l->own->ask[rank].done =
            ferry_copy(l, &ask, (uint8_t *)l->slots + (size_t)rank * ferry_slot_bytes(l));
        atomic_fetch_and(&l->own->asks, ~(1ull << rank)); /* release: the copy and the answer */
        tly_local_tell_one(l, rank);
    }
    return asks;
}
