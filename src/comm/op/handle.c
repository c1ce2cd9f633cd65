/* handle.c - a caller's handle of an operation: how it stands, the wait for its end, its references.
 *
 * References: the caller's, the loop's, the completion queue's.  The last to go frees the operation.  Any thread may call
 * these; a forked child is told that the handle is its parent's. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/event.h"
#include "base/fork.h"
#include "comm/comm.h"
#include "comm/op/handle.h"
#include "comm/op/op.h"
#include "comm/op/spec.h"
#include "comm/op/tensor.h"
#include "local/local.h"
#include "local/segment.h"
#include "tally/tally.h"
#include "wire/frame.h"

void tly_op_unref(struct tally_op *op)
{
    /* acq_rel: who frees sees all that the others have written.  The only one left need not subtract. */
    if (atomic_load_explicit(&op->handle.references, memory_order_acquire) != 1 &&
        atomic_fetch_sub_explicit(&op->handle.references, 1, memory_order_acq_rel) != 1)
        return;
    free(op->handle.sentence);
    free(op->reason);
    tly_wait_finish(&op->wait);
    tly_spec_finish(&op->spec);
    free(op->parts);
    if (op->zeros)
        tly_pool_free(op->zeros);
    free(op->pairs);
    if (!op->mark && op->call->release)
        op->call->release(op);
    tly_sharing_release(&op->shared);
    free(op);
}

void tly_handle_say(struct tly_handle *h, int err, const char *sentence)
{
    h->status = -err;
    free(h->sentence);
    h->sentence = sentence ? strdup(sentence) : NULL;
}

int tly_handle_check_fork(const struct tly_handle *h)
{
    if (h->generation == tly_fork_generation())
        return 0;
    return tly_fail(
        ECHILD, "the operation belongs to the parent process: wait for it there, not in the forked child");
}

void tally_op_free(tally_op *op)
{
    if (op && op->handle.generation == tly_fork_generation())
        tly_op_unref(op);
}

int tally_op_poll(const tally_op *op)
{
    return tly_handle_is_done(&op->handle);
}

int tally_op_wait(tally_op *op, int timeout_ms)
{
    int err = tly_handle_check_fork(&op->handle);
    if (err)
        return err;
    int64_t deadline = timeout_ms < 0 ? -1 : tly_now() + timeout_ms * TLY_MS;
    if (tly_sharing_is_direct(&op->shared) && !tly_handle_is_done(&op->handle))
        tly_sharing_wait(&op->shared, &op->handle.done, deadline);
    if (!tly_handle_is_done(&op->handle) && !tly_event_wait(&op->handle.done, deadline))
        return -ETIMEDOUT;
    const struct tly_handle *h = &op->handle;
    return h->status ? tly_fail(-h->status, "%s", h->sentence ? h->sentence : "failed") : 0;
}

const char *tally_op_error(const tally_op *op)
{
    const struct tly_handle *h = &op->handle;
    return tly_handle_is_done(h) && h->status ? tly_handle_sentence(h) : "";
}

int tally_op_source(const tally_op *op)
{
    if (!op->call->finds)
        return tly_fail(EINVAL, "the operation is neither a probe nor a join: only those have a source");
    if (!tly_handle_is_done(&op->handle) || op->handle.status)
        return tly_fail(EAGAIN, "the operation has found nothing: wait for it first");
    return op->handle.source;
}

void tly_op_forget_tensor(tally_comm *c, struct tly_tensor *t, bool mark)
{
    if (!t->unnamed) {
        if (mark)
            return; /* the name was free all the time */
        /* Pairs with the acquire in submission: its next operation sees all that this one wrote. */
        atomic_store_explicit(&t->busy, false, memory_order_release);
        return;
    }
    tly_names_take(&c->names, t->key);
    tly_tensor_destroy(t);
}
