/* rank.c - shared tensors, at a rank: create, add and read.
 *
 * A create is cut and dealt as a push_pull is.  All later operations go to the services that the replica names (comm/op/replica.h), in
 * rounds of this rank alone.  Values land in that one of the replica's two buffers that does not hold the last whole ones. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/list.h"
#include "comm/comm.h"
#include "comm/epoch/epoch.h"
#include "comm/op/handle.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/op/replica.h"
#include "comm/op/tensor.h"
#include "comm/path/moves.h"
#include "comm/path/parts.h"
#include "comm/submit.h"
#include "ops/call.h"
#include "tally/tally.h"
#include "wire/frame.h"

/* --- create -------------------------------------------------------------------------------------- */

static unsigned create_needs(const tally_comm *c, const struct tly_request *r)
{
    return c->rank == 0 ? TLY_CALL_INPUT : 0;
}

static int create_check(const tally_comm *c, const struct tly_request *r)
{
    if (r->reason)
        return 0;
    if (r->dtype != TALLY_FLOAT32 && r->dtype != TALLY_FLOAT64 && r->dtype != TALLY_INT32 &&
        r->dtype != TALLY_INT64)
        return tly_fail(EINVAL,
                        "a shared tensor is of type float32, float64, int32 or int64: convert it first");
    return r->count ? 0 : tly_fail(EINVAL, "a shared tensor has at least one element");
}

static int create_furnish(tally_comm *c, struct tally_op *op, const struct tly_request *r)
{
    struct tly_shared_op *own = tly_op_own(op);
    own->made = tly_replica_make(op->count, op->bytes, op->dtype);
    if (!own->made)
        return -ENOMEM;
    own->values = op->output = own->made->buffer[0];
    if (c->rank == 0)
        memcpy(op->output, r->input, op->bytes);
    return 0;
}

/* Remember how the create was cut and dealt. */
static int create_take_parts(tally_comm *c, struct tly_replica *r, struct tally_op *op)
{
    r->parts = calloc(op->part_count, sizeof *r->parts);
    if (!r->parts)
        return -ENOMEM;
    tly_names_lock(&c->names);
    const struct tly_cut *cut = tly_tensor_cut(c, op, op->bytes);
    for (uint32_t i = 0; cut && i < op->part_count; i++) {
        struct tly_part *p = &op->parts[i];
        p->came = tly_epoch_came(op->epoch, cut->pieces[i].owner);
        r->parts[i] = (struct tly_replica_part){
            .place = p->place, .length = p->length, .owner = p->owner, .came = p->came};
    }
    tly_names_unlock(&c->names);
    if (!cut)
        return -ENOMEM;
    r->part_count = op->part_count;
    r->credit = op->credit;
    r->key = op->key;
    r->round = op->round;
    r->epoch = op->epoch->number;
    r->staleness = op->reduction;
    r->op = op;
    tly_moves_enter(c, r);
    return 0;
}

/* Rank 0 pushes its values and wants nothing back; the others ask. */
static int create_cut(tally_comm *c, struct tally_op *op)
{
    int err = tly_parts_whole(c, op);
    for (uint32_t i = 0; i < op->part_count && !err; i++) {
        struct tly_part *p = &op->parts[i];
        p->input = c->rank == 0 ? p->landing : NULL;
        p->result_length = c->rank == 0 ? 0 : p->length;
    }
    return err ? err : create_take_parts(c, ((struct tly_shared_op *)tly_op_own(op))->made, op);
}

static void create_landed(tally_comm *c, const struct tly_part *p)
{
    struct tly_replica *r = ((struct tly_shared_op *)tly_op_own(p->op))->made;
    r->parts[p->index].version.epoch = r->epoch;
}

static void create_ended(tally_comm *c, struct tally_op *op, bool failed)
{
    struct tly_shared_op *own = tly_op_own(op);
    own->made->op = NULL;
    if (failed) {
        tly_list_remove(&own->made->node); /* the operation frees it, in any thread */
        return;
    }
    own->made->whole = true;
    tly_names_lock(&c->names);
    op->tensor->replica = own->made; /* it had none: a name is created once */
    tly_names_unlock(&c->names);
    own->made = NULL;
}

static void create_release(struct tally_op *op)
{
    struct tly_shared_op *own = tly_op_own(op);
    tly_replica_destroy(own->made);
}

/* --- add and read -------------------------------------------------------------------------------- */

static unsigned add_needs(const tally_comm *c, const struct tly_request *r)
{
    return TLY_CALL_INPUT;
}

static unsigned read_needs(const tally_comm *c, const struct tly_request *r)
{
    return 0;
}

static int shared_cut(tally_comm *c, struct tally_op *op)
{
    struct tly_shared_op *own = tly_op_own(op);
    struct tly_replica *r = op->tensor->replica;
    uint32_t me = (uint32_t)c->rank;
    uint8_t *landing = r->buffer[!r->newest];
    own->values = landing;
    op->parts = calloc(r->part_count, sizeof *op->parts);
    if (!op->parts)
        return -ENOMEM;
    op->part_count = r->part_count;
    op->credit = r->credit;
    r->op = op;
    tly_progress_begin(&op->progress, r->part_count);
    for (uint32_t i = 0; i < r->part_count; i++) {
        const struct tly_replica_part *p = &r->parts[i];
        op->parts[i] = (struct tly_part){
            .op = op,
            .landing = landing + p->place,
            .input = op->input ? op->input + p->place : NULL,
            .place = p->place,
            .index = i,
            .order = i,
            .number = i,
            .group = tly_pair(me, me),
            .length = p->length,
            .result_length = p->length,
            .owner = p->owner,
            .came = p->came,
            .dtype = r->dtype,
            .root = me};
    }
    return 0;
}

static void shared_landed(tally_comm *c, const struct tly_part *p)
{
    tly_replica_landed(p->op->tensor->replica, p->index);
}

static void shared_ended(tally_comm *c, struct tally_op *op, bool failed)
{
    op->tensor->replica->op = NULL;
    tly_replica_settle(op->tensor->replica, failed);
}

/* Facts that all three share. */
#define SHARED .own_bytes = sizeof(struct tly_shared_op), .names = TALLY_SHARED_CREATE, .kept = true

const struct tly_call tly_call_shared_create = {
    SHARED,
    .needs = create_needs,
    .check = create_check,
    .furnish = create_furnish,
    .cut = create_cut,
    .landed = create_landed,
    .ended = create_ended,
    .release = create_release,
    .function = "tally_shared_create",
    .bounded = true,
    .shaped = true,
    .moves = true};

const struct tly_call tly_call_shared_add = {
    SHARED,
    .needs = add_needs,
    .cut = shared_cut,
    .landed = shared_landed,
    .ended = shared_ended,
    .apart = true,
    .function = "tally_shared_add"};

const struct tly_call tly_call_shared_read = {
    SHARED,
    .needs = read_needs,
    .cut = shared_cut,
    .landed = shared_landed,
    .ended = shared_ended,
    .apart = true,
    .function = "tally_shared_read"};
