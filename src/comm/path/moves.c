/* moves.c - parts of shared tensors go to other services: theirs has died or left, or shares have changed.
 *
 * Only COMMIT changes owners, on all ranks alike.  This rank names the parts that each service keeps from now on, with the version
 * that it holds of each (HAVE), and says that these are all (DONE, doubt.c).  It lands nothing more from a part's old service.  What
 * is in flight is pushed again, to the new one.  If that asks for the values this rank gives what it holds (FINAL).  Over another
 * connection it says the same again.  The service's side is sum/regain.c.
 *
 * All parts of all shared tensors are shared out together.  A tensor whose create is in flight on some rank stays with the split of
 * its create: there a lost service has a substitute (epoch.c).
 *
 * Ranks deal alike, because COMMIT lists the same creates for all.  If its coordinator dies before all have it, the next one gives
 * it to the others, and must list the same.  So to another coordinator a rank also names the creates that the last COMMIT listed,
 * and which have ended since. */
#include "comm/path/moves.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/list.h"
#include "base/log.h"
#include "comm/comm.h"
#include "comm/epoch/epoch.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/op/replica.h"
#include "comm/path/peer.h"
#include "comm/path/queue.h"
#include "membership/member.h"
#include "plan/plan.h"
#include "wire/frame.h"
#include "wire/kept.h"
#include "wire/pack.h"

static struct tly_replica *moves_at(const tally_comm *c, struct tly_list *node)
{
    return node == &c->replicas ? NULL : tly_list_entry(node, struct tly_replica, node);
}

#define moves_each(c, r) \
    for (struct tly_replica *r = moves_at(c, (c)->replicas.next); r; r = moves_at(c, r->node.next))

void tly_moves_enter(tally_comm *c, struct tly_replica *r)
{
    struct tly_list *before = &c->replicas;
    moves_each(c, other) if (other->key > r->key)
    {
        before = &other->node;
        break;
    }
    tly_list_append(before, &r->node);
    if (r->epoch < c->epoch->number) /* the newest COMMIT has promised the create */
        r->stayed = c->epoch->number;
}

size_t tly_moves_prepare(tally_comm *c, struct tly_begun *begun)
{
    size_t count = 0;
    moves_each(c, r)
    {
        r->awaited = false; /* from a COMMIT that has not come whole */
        if (!c->member.resumed || !r->whole || r->stayed != c->epoch->number)
            continue;
        if (begun)
            begun[count] = (struct tly_begun){r->key, r->round, r->epoch};
        count++;
    }
    return count;
}

void tly_moves_promised(tally_comm *c, const struct tly_begun *b)
{
    moves_each(c, r) if (r->key == b->key && r->round == b->round) r->awaited = true;
}

/* --- COMMIT -------------------------------------------------------------------------------------- */

static bool moves_is_gone(const tally_comm *c, uint16_t service)
{
    return !c->peers[service].incarnation;
}

static bool moves_is_created(const struct tly_replica *r)
{
    return r->whole && !r->awaited;
}

static void moves_move(tally_comm *c, struct tly_replica *r, uint32_t part, uint16_t to, uint64_t *moved)
{
    struct tly_replica_part *p = &r->parts[part];
    *moved += p->length;
    p->owner = to;
    p->came = c->epoch->number;
    tly_replica_expect(r, part, NULL);
    if (r->op && r->op->call->apart)
        tly_queue_move(c, &r->op->parts[part], to, p->came);
    else if (r->op) /* a create: doubt.c moves it */
        r->op->parts[part].came = p->came;
}

/* Take all parts that are shared out together, in the order of their keys.  Returns how many have lost their service. */
static uint32_t moves_collect(const tally_comm *c, struct tly_plan_kept *all)
{
    uint32_t lost = 0, at = 0;
    moves_each(c, r) for (uint32_t i = 0; i < r->part_count && moves_is_created(r); i++)
    {
        const struct tly_replica_part *p = &r->parts[i];
        all[at++] = (struct tly_plan_kept){p->length, p->owner};
        lost += moves_is_gone(c, p->owner);
    }
    return lost;
}

static int moves_deal(tally_comm *c, bool anew, uint64_t *moved)
{
    uint32_t count = 0, at = 0;
    moves_each(c, r) count += moves_is_created(r) ? r->part_count : 0;
    struct tly_plan_kept *all = calloc(count + 1ull, sizeof *all);
    if (!all)
        return -ENOMEM;
    bool deals = moves_collect(c, all) > 0 || (anew && count);
    int err = deals ? tly_plan_redeal(c->epoch->services, c->epoch->weight, count, all) : 0;
    moves_each(c, r) for (uint32_t i = 0; i < r->part_count && moves_is_created(r) && !err;
                          i++, at++) if (all[at].owner != r->parts[i].owner)
        moves_move(c, r, i, all[at].owner, moved);
    free(all);
    return err;
}

void tly_moves_commit(tally_comm *c, bool anew)
{
    uint64_t moved = 0;
    if (moves_deal(c, anew, &moved) != 0)
        tly_comm_fail(c, ENOMEM, "out of memory");
    moves_each(c, r)
    {
        for (uint32_t i = 0; i < r->part_count && !moves_is_created(r); i++)
            if (moves_is_gone(c, r->parts[i].owner))
                moves_move(c, r, i, tly_epoch_substitute(c, r->key, i), &moved);
        r->stayed = r->awaited ? c->epoch->number : r->stayed;
        r->awaited = false;
    }
    if (moved)
        tly_debug("comm", "%llu bytes of shared tensors go to other services", (unsigned long long)moved);
}

/* --- words --------------------------------------------------------------------------------------- */

static struct tly_frame moves_head(const tally_comm *c, const struct tly_replica *r, uint32_t part, int type)
{
    const struct tly_replica_part *p = &r->parts[part];
    return (struct tly_frame){
        .type = (uint8_t)type,
        .kind = TLY_KEPT,
        .key = r->key,
        .part = part,
        .length = p->length,
        .epoch = p->came,
        .dtype = r->dtype,
        .op = r->staleness,
        .round = r->round,
        .rank = (uint32_t)c->rank};
}

void tly_moves_say(struct tly_peer *peer)
{
    tally_comm *c = peer->comm;
    moves_each(c, r) for (uint32_t i = 0; i < r->part_count; i++)
    {
        const struct tly_replica_part *p = &r->parts[i];
        uint8_t version[TLY_VERSION_BYTES];
        if (p->owner != peer->index)
            continue;
        struct tly_frame f = moves_head(c, r, i, TLY_HAVE);
        tly_version_put(version, &p->version);
        tly_peer_post(peer, &f, version, p->version.epoch ? sizeof version : 0);
    }
}

int tly_moves_told(struct tly_peer *peer, const struct tly_frame *f, const void *data, const char **why)
{
    const struct tly_part *p = tly_op_find_part(peer, f);
    if (!p || !p->op->call->apart || p->state == PART_LANDED || p->landed)
        return 0; /* of what is over, or has moved */
    *why = "a malformed state of a shared tensor";
    if (f->payload != tly_state_bytes((uint32_t)peer->comm->size) || tly_version_get(data).epoch != p->came)
        return -EPROTO;
    *why = "out of memory";
    uint8_t *state = malloc(f->payload);
    if (!state)
        return -ENOMEM;
    memcpy(state, data, f->payload);
    tly_replica_expect(p->op->tensor->replica, p->index, state);
    return 0;
}

bool tly_moves_is_told(const struct tly_part *p)
{
    return p->op->tensor->replica->parts[p->index].coming != NULL;
}

/* As the create has left it. */
static void moves_write_first(const tally_comm *c, const struct tly_replica *r,
                              const struct tly_version *version, uint8_t *out)
{
    tly_version_put(out, version);
    out = tly_put32(out + TLY_VERSION_BYTES, 0);
    for (int i = 0; i < c->size; i++)
        out = tly_put32(tly_put32(out, r->round), 0);
}

static void moves_give(struct tly_peer *peer, const struct tly_replica *r, uint32_t part)
{
    tally_comm *c = peer->comm;
    const struct tly_replica_part *p = &r->parts[part];
    struct tly_frame f = moves_head(c, r, part, TLY_HAVE);
    uint32_t bytes = tly_state_bytes((uint32_t)c->size);
    uint8_t *first = p->told ? NULL : malloc(bytes);
    if (!p->told && !first) {
        tly_comm_fail(c, ENOMEM, "out of memory");
        return;
    }
    if (first)
        moves_write_first(c, r, &p->version, first);
    f.flags = TLY_MARK;
    tly_peer_post(peer, &f, first ? first : p->told, bytes);
    free(first);
    f.type = TLY_FINAL;
    for (uint32_t at = 0, n; at < p->length && !tly_comm_failed(c); at += n) {
        n = p->length - at < TLY_MAX_FRAGMENT ? p->length - at : TLY_MAX_FRAGMENT;
        f.offset = at;
        f.flags = at + n == p->length ? TLY_LAST : 0;
        tly_peer_post(peer, &f, r->buffer[p->held] + p->place + at, n);
    }
}

void tly_moves_final(struct tly_peer *peer, const struct tly_frame *f)
{
    moves_each(peer->comm, r)
    {
        if (r->key != f->key || f->part >= r->part_count)
            continue;
        const struct tly_replica_part *p = &r->parts[f->part];
        if (p->owner == peer->index && p->came == f->epoch && p->version.epoch) /* else it has moved on */
            moves_give(peer, r, f->part);
        return;
    }
}
