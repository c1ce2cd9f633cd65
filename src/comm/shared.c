/* shared.c - the calls of tally.h for shared tensors: parameters that services keep (docs/why/shared.md).
 *
 * This file checks what one rank can know of a call: whether there is such a tensor to add to, and the options.  submit.c finds
 * a create that comes twice, as it gives operations their names. */
#include <errno.h>
#include <stdatomic.h>

#include "base/error.h"
#include "comm/comm.h"
#include "comm/op/group.h"
#include "comm/op/handle.h"
#include "comm/op/op.h"
#include "comm/op/replica.h"
#include "comm/op/tensor.h"
#include "comm/submit.h"
#include "ops/call.h"
#include "tally/tally.h"
#include "wire/frame.h"

enum { MOST_STALENESS = 255 }; /* a byte of the header */

/* Take the options, and check what only shared tensors mind. */
static int shared_take_options(tally_comm *c, const char *name, const struct tally_options **options,
                               struct tally_options *own)
{
    int err = tly_comm_check(c);
    if (!err)
        err = tly_options_take(options, own);
    if (err)
        return err;
    const struct tally_options *o = *options;
    if (!name)
        return tly_fail(EINVAL, "a shared tensor needs a name");
    if (o && o->group && o->group != tly_comm_all(c))
        return tly_fail(EINVAL, "'%.100s': a shared tensor belongs to all ranks: pass no group", name);
    if (o && ((o->prescale != 0 && o->prescale != 1) || (o->postscale != 0 && o->postscale != 1)))
        return tly_fail(EINVAL, "'%.100s': a shared tensor is not scaled: scale the difference", name);
    return 0;
}

int tally_shared_create(tally_comm *comm, const char *name, const void *values, size_t count,
                        enum tally_dtype dtype, uint32_t staleness, const struct tally_options *options,
                        tally_op **op)
{
    struct tally_options own;
    int err = shared_take_options(comm, name, &options, &own);
    if (err)
        return err;
    if (staleness > MOST_STALENESS)
        return tly_fail(EINVAL, "a staleness of %u is too much: pass 1 to %d, or 0 for no limit", staleness,
                        MOST_STALENESS);
    struct tly_request r = {.name = name,
                            .kind = TALLY_SHARED_CREATE,
                            .dtype = (unsigned)dtype,
                            .reduction = (uint8_t)staleness,
                            .input = values,
                            .count = count};
    return tly_submit(comm, &r, options, op);
}

/* An addition or a read: its count and type are those of the tensor. */
static int shared_submit(tally_comm *c, const char *name, struct tly_request *r,
                         const struct tally_options *options, tally_op **op)
{
    struct tally_options own;
    int err = shared_take_options(c, name, &options, &own);
    if (err)
        return err;
    bool there = false, busy = false;
    tly_names_lock(&c->names);
    const struct tly_tensor *t =
        tly_names_find(&c->names, tly_tensor_key(0, tly_comm_all(c)->id, TALLY_SHARED_CREATE,
                                                 options ? options->space : 0, name));
    if (t && t->replica) {
        there = true;
        r->count = t->replica->count;
        r->dtype = t->replica->dtype;
    } else if (t) {
        busy = atomic_load_explicit(&t->busy, memory_order_acquire);
    }
    tly_names_unlock(&c->names);
    if (!there)
        return busy ? tly_fail(EBUSY, "'%.100s' is being created: wait for that", name)
                    : tly_fail(ENOENT,
                               "there is no shared tensor '%.100s': all ranks call tally_shared_create first",
                               name);
    r->name = name;
    return tly_submit(c, r, options, op);
}

int tally_shared_add(tally_comm *comm, const char *name, const void *difference,
                     const struct tally_options *options, tally_op **op)
{
    struct tly_request r = {.kind = difference ? TALLY_SHARED_ADD : TALLY_SHARED_READ,
                            .reduction = !difference, /* a read that moves the clock */
                            .input = difference};
    return shared_submit(comm, name, &r, options, op);
}

int tally_shared_read(tally_comm *comm, const char *name, const struct tally_options *options, tally_op **op)
{
    struct tly_request r = {.kind = TALLY_SHARED_READ};
    return shared_submit(comm, name, &r, options, op);
}

int tally_shared_values(const tally_op *op, const void **data)
{
    if (!op->call->kept)
        return tly_fail(EINVAL, "the operation is not of a shared tensor: only those have values");
    if (!tly_handle_is_done(&op->handle) || tly_handle_status(&op->handle))
        return tly_fail(EAGAIN, "the operation has no values: wait for it first");
    *data = ((const struct tly_shared_op *)tly_op_own(op))->values;
    return 0;
}
