/* local.c - operations that go through shared memory: where all ranks share one machine and no tallyd sums with them, they
 * go to src/local/ instead of the services.
 *
 * engine.c has the engine itself and what it calls.  An operation on which ranks disagree, or which one refuses, goes to
 * the service all the same: it tells all ranks what is wrong.  Also the pool: memory that all ranks of the machine see. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/loop.h"
#include "comm/active.h"
#include "comm/comm.h"
#include "comm/engine.h"
#include "comm/events.h"
#include "comm/group.h"
#include "comm/handle.h"
#include "comm/op.h"
#include "comm/spec.h"
#include "comm/tensor.h"
#include "local/local.h"
#include "local/segment.h"
#include "tally/tally.h"
#include "trace/timeline.h"
#include "trace/trace.h"

static void finish(tally_comm *c, struct tally_op *op)
{
    tly_stamp(c->trace, TLY_AT_DONE, TLY_NO_PEER, op->key, op->round, TLY_NO_PART, (uint32_t)op->bytes);
    tly_op_forget_tensor(c, op->tensor, op->mark);
    op->tensor = NULL;
}

void tly_comm_describe_local(struct tally_op *op)
{
    struct tly_local_op *l = &op->shared.op; /* clear, as the whole operation */
    l->key = op->key;
    l->spec = tly_spec_hash(&op->spec);
    l->round = op->round;
    l->number = op->kind;
    l->call = op->call->local;
    l->dtype = op->dtype;
    l->reduction = op->reduction;
    l->mark = op->mark || !op->call->local;
    l->patient = tly_wait_is_patient(&op->wait);
    l->root = op->root;
    l->priority = op->priority;
    l->prescale = tly_spec_prescale(&op->spec);
    l->postscale = tly_spec_postscale(&op->spec);
    l->count = op->count;
    l->bytes = op->bytes;
    l->input = op->input;
    l->output = op->output;
    l->first_dim = tly_spec_first_dim(&op->spec);
}

static void local_ended(struct tally_op *op, int err, const char *sentence)
{
    tally_comm *c = op->comm;
    if (err) {
        char text[TLY_SENTENCE], title[TLY_TITLE];
        snprintf(text, sizeof text, "%s: %s", tly_op_title(op, title), sentence);
        tly_handle_say(&op->handle, err, text);
    }
    finish(c, op);
    tly_active_ended(&c->active, op->bytes);
    tly_op_set_done(op);
    tly_op_unref(op);
}

static void local_diverted(struct tally_op *op)
{
    tally_comm *c = op->comm;
    tly_wait_begin(&op->wait);
    tly_inbox_put(&c->inbox, &op->node);
    tly_loop_wake(&c->loop);
}

static const struct tly_engine_user local_user = {
    .direct = true, .ended = local_ended, .diverted = local_diverted};

bool tly_comm_take_local(struct tally_op *op, bool ordered)
{
    tally_comm *c = op->comm;
    /* What may meet another kind must at least be told of. */
    if (!c->local || c->machines != 1 || op->group->number != 0 || !op->call->collective ||
        !(op->call->local || ordered))
        return false;
    tly_shared_take(&op->shared, c->local, &local_user);
    tly_names_count_engine_op(&c->names);
    return true;
}

void tly_comm_submit_local(tally_comm *c, struct tally_op *op)
{
    tly_comm_describe_local(op);
    if (!tly_local_submit(c->local, &op->shared.op))
        return;
    op->shared.engine = NULL;
    finish(c, op);
    if (tly_completion_is_wanted(&op->completion)) {
        tly_op_set_done(op);
        tly_op_unref(op);
    } else { /* nobody has the handle yet */
        tly_handle_end_alone(&op->handle);
    }
}

void tly_comm_count(const tally_comm *c, uint64_t *ops, uint64_t *bytes)
{
    *ops = *bytes = 0;
    if (c->local)
        tly_local_count(c->local, ops, bytes);
    tly_active_count(&c->active, ops, bytes);
}

/* --- the pool ------------------------------------------------------------------------------------ */

int tally_alloc(tally_comm *c, size_t bytes, void **memory)
{
    int err = tly_comm_check(c);
    return err ? err : tly_pool_alloc(c->local ? tly_local_segment(c->local) : NULL, bytes, memory);
}

int tally_comm_has_pool(const tally_comm *c)
{
    return c && c->local;
}

int tally_free(void *memory)
{
    int err = memory ? tly_pool_free(memory) : 0;
    return err ? tly_fail(-err, "%p is not from tally_alloc()", memory) : 0;
}
