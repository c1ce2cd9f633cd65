/* local.c - operations that go through shared memory: where all their ranks share one machine, they go to src/local/ instead of
 * the services.  Such are those of a group on one machine.  Those of all ranks are if the job has one machine
 * and no tallyd helped it at its start.
 *
 * engine.c has the engine itself and what it calls.  An operation on which ranks disagree, or which one refuses, goes to
 * the service all the same: it tells all ranks what is wrong.  Also the pool: memory that all ranks of the machine see.
 *
 * An operation without a stage goes to the engine past the loop (tly_comm_submit_local).  Of one with a stage the loop brings the
 * parts here (tly_stage_engine).  If this rank is alone in the operation's group, each part turns back at once, so that it comes in
 * while others go out.  Else parts wait until all are there, and the engine gets the operation as a whole.  When it has
 * ended, the parts turn back (op_turn_back in op.c); if it is diverted, they go on to the network.  Other ranks need not have a
 * stage.  A rank that takes the operation back before the engine has it posts a mark, later it asks for it back
 * (tly_chain_takes_back). */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/loop.h"
#include "comm/comm.h"
#include "comm/op/active.h"
#include "comm/op/events.h"
#include "comm/op/group.h"
#include "comm/op/handle.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/op/spec.h"
#include "comm/op/tensor.h"
#include "comm/path/chain.h"
#include "comm/path/engine.h"
#include "comm/path/stage.h"
#include "comm/path/stager.h"
#include "local/local.h"
#include "local/segment.h"
#include "ops/call.h"
#include "ops/local.h"
#include "reduce/reduce.h"
#include "tally/tally.h"
#include "trace/timeline.h"
#include "trace/trace.h"

static void local_finish(tally_comm *c, struct tally_op *op)
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
    if (op->group->number) {
        l->group = &op->group->here;
        l->root = op->call->root ? tly_group_place(op->group, op->root) : op->root;
    }
    l->priority = op->priority;
    l->prescale = tly_spec_prescale(&op->spec);
    l->postscale = tly_spec_postscale(&op->spec);
    l->count = op->count;
    l->bytes = tly_spec_span(op);
    l->ranges = tly_spec_ranges(op);
    l->input = op->input;
    l->output = op->output;
    l->even = op->even;
    l->first_dim = tly_spec_first_dim(&op->spec);
    l->dims = tly_spec_shape(&op->spec);
    l->gpu = l->mark || !l->call ? NULL : tly_stager_grouped(op);
}

static void local_ended(struct tally_op *op, int err, const char *sentence)
{
    tally_comm *c = op->comm;
    if (err) {
        char text[TLY_SENTENCE], title[TLY_TITLE];
        snprintf(text, sizeof text, "%s: %s", tly_op_title(op, title), sentence);
        tly_handle_say(&op->handle, err, text);
    }
    tly_stager_leave(op, err != 0);
    local_finish(c, op);
    tly_active_ended(&c->active, op->bytes);
    tly_op_set_done(op);
    tly_op_unref(op);
}

static void local_diverted(struct tally_op *op)
{
    tally_comm *c = op->comm;
    tly_names_lock(&c->names);
    tly_stager_ungroup(op);
    tly_chain_go_on_without(c, op, STAGE_ENGINE);
    tly_names_unlock(&c->names);
    tly_wait_begin(&op->wait);
    tly_inbox_put(&c->inbox, &op->node);
    tly_loop_wake(&c->loop);
}

static const struct tly_engine_user local_user = {
    .direct = true, .ended = local_ended, .diverted = local_diverted};

/* What may meet another kind, in a space where the tensor has none, must at least be told of. */
static bool local_suits(const tally_comm *c, const struct tally_op *op)
{
    bool shared = op->group->number ? tly_group_shares_memory(op->group) : c->local_has_all;
    return c->local && shared && op->call->collective && (op->call->local || !op->tensor->kind);
}

/* It is cut into parts only if it must go to the service after all. */
static void local_take_alone(tally_comm *c, struct tally_op *op)
{
    tly_sharing_take(&op->shared, c->local, &local_user);
    tly_names_count_engine_op(&c->names);
}

void tly_comm_submit_local(tally_comm *c, struct tally_op *op)
{
    tly_comm_describe_local(op);
    if (!tly_local_submit(c->local, &op->shared.op))
        return;
    op->shared.engine = NULL;
    local_finish(c, op);
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

/* --- a stage of an operation ---------------------------------------------------------------------- */

/* Where each part of an allgather belongs. */
static void local_spread_pieces(const struct tally_op *op)
{
    for (uint32_t i = 1; i < op->part_count; i++) {
        const struct tly_part *p = &op->parts[i];
        if (p->result_length)
            memcpy(p->landing, op->shared.result + tly_group_place(op->group, p->root) * op->bytes + p->place,
                   p->result_length);
    }
}

static void local_staged_ended(struct tally_op *op, int err, const char *sentence)
{
    if (op->shared.mute)
        return;
    if (err) {
        tly_stage_lost(op, err, sentence);
        return;
    }
    if (op->shared.result)
        local_spread_pieces(op);
    tly_stage_over(op, STAGE_ENGINE);
}

/* The answer to part 0 may come before this returns, and more parts with it: these are not the engine's. */
static void local_staged_diverted(struct tally_op *op)
{
    uint32_t count = op->shared.mute ? 0 : op->part_count;
    for (uint32_t i = 0; i < count; i++)
        tly_stage_passed(&op->parts[i]);
}

static const struct tly_engine_user staged_user = {.ended = local_staged_ended,
                                                   .diverted = local_staged_diverted};

/* A sum of this rank's input alone, which has a stage before: not the engine's. */
static bool local_is_own(const struct tally_op *op)
{
    return op->group->size == 1 && tly_call_is_sum_for_all(op->call) && !op->mark &&
           tly_chain_has_before(&op->chain, STAGE_ENGINE);
}

static void local_take(tally_comm *c, struct tally_op *op)
{
    if (local_is_own(op))
        return;
    tly_sharing_take(&op->shared, c->local, &staged_user);
    tly_local_ref(c->local);
    tly_names_count_engine_op(&c->names);
    tly_comm_describe_local(op);
    /* The stage has a memory for each piece: the network takes them. */
    const struct tly_local_call *call = op->shared.op.call;
    op->shared.op.mark |= call && op->call->pieces && !call->gathered;
    tly_list_init(&op->shared.op.node);
}

static int local_begin(tally_comm *c, struct tally_op *op)
{
    return 0;
}

/* mark: the others are to take the way through the service. */
static void local_enter(struct tally_op *op, bool mark)
{
    struct tly_sharing *s = &op->shared;
    s->mute = mark;
    s->op.mark |= mark;
    s->entered = true;
    tly_local_enter(s->engine, &s->op);
}

/* The operation's own input and output, or what stages have put in their place. */
static int local_place_pieces(struct tally_op *op)
{
    struct tly_local_op *l = &op->shared.op;
    l->input = op->input;
    if (op->part_count == 1)
        return 0;
    for (uint32_t i = 1; i < op->part_count; i++)
        if (op->parts[i].input)
            l->input = op->parts[i].input - op->parts[i].place;
    op->shared.result = malloc(op->bytes * (unsigned)op->group->size);
    return op->shared.result ? 0 : -ENOMEM;
}

static void local_sum_own(struct tly_part *p)
{
    const struct tally_op *op = p->op;
    const void *in[] = {p->input};
    const struct tly_reduction how = {.dtype = op->dtype,
                                      .op = op->reduction,
                                      .divisor = 1,
                                      .prescale = tly_spec_prescale(&op->spec),
                                      .postscale = tly_spec_postscale(&op->spec)};
    tly_reduce(&how, 1, in, p->landing, p->length / tly_reduce_element_size(op->dtype));
    tly_stage_turned(p);
}

/* The whole operation goes in with part 0.  The others wait here, but for those that are cut once the engine has diverted it. */
static int local_ready(tally_comm *c, struct tly_part *p)
{
    struct tally_op *op = p->op;
    if (local_is_own(op)) {
        local_sum_own(p);
        return 0;
    }
    if (p->index > 0)
        return tly_chain_has_more(op);
    op->shared.op.input = p->input;
    op->shared.op.output = p->landing;
    int err = op->shared.op.call && op->shared.op.call->gathered ? local_place_pieces(op) : 0;
    if (!err)
        local_enter(op, false);
    return err;
}

/* What is said of it comes first (local_diverted) or is in nobody's hands any more. */
static bool local_take_back(tally_comm *c, struct tally_op *op)
{
    /* Pairs with the release in tly_posts_hand_back(). */
    if (local_is_own(op) || atomic_load_explicit(&op->shared.op.diverted, memory_order_acquire))
        return false;
    tly_local_take_back(op->shared.engine, &op->shared.op);
    return true;
}

static bool local_landed(tally_comm *c, struct tly_part *p)
{
    return true; /* it was diverted */
}

/* The others wait for this rank's post, whatever comes of the operation here. */
static void local_withdraw(tally_comm *c, struct tally_op *op, bool over)
{
    struct tly_sharing *s = &op->shared;
    if (local_is_own(op))
        return;
    if (!s->entered)
        local_enter(op, true);
    if (!over)
        return;
    if (!tly_chain_has_ended(&op->chain, STAGE_ENGINE))
        tly_local_withdraw(s->engine, &s->op);
    free(s->result);
    s->result = NULL;
}

const struct tly_stage tly_stage_engine = {
    .does = "waits for other ranks of this machine",
    .shared = true,
    .suits = local_suits,
    .take = local_take,
    .alone = local_take_alone,
    .begin = local_begin,
    .ready = local_ready,
    .landed = local_landed,
    .take_back = local_take_back,
    .withdraw = local_withdraw};

/* --- the pool ------------------------------------------------------------------------------------ */

int tally_alloc(tally_comm *c, size_t bytes, void **memory)
{
    int err = tly_comm_check(c);
    return err ? err : tly_pool_alloc(c->local ? tly_local_segment(c->local) : NULL, bytes, memory);
}

int tally_comm_has_pool(const tally_comm *c)
{
    return c && c->local && (c->local_has_all || tly_teams_are_listed(&c->teams));
}

int tally_free(void *memory)
{
    int err = memory ? tly_pool_free(memory) : 0;
    return err ? tly_fail(-err, "%p is not from tally_alloc()", memory) : 0;
}
