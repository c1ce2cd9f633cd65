/* joining.c - tally_join(): this rank has no more input, and waits for the others.
 *
 * It submits nothing more, so what it has submitted is known: of each tensor how often.  Every service hears that once on
 * each connection (rounds.c), and has zeros for it in all other rounds (sum/joined.c).  The coordinator orders the ranks that
 * join (membership/join.c), before anybody does without them; when all have, and nothing of theirs is under way, it tells all.
 * In shared memory a post says it (TLY_POST_JOINED, src/local/posts_in.c), and the other ranks read zeros.  In a team the
 * joined rank stands in: it submits zeros for what another rank of its machine has posted (tly_joining_stand_in).
 *
 * Then names have new keys, their rounds and the numbers of calls without a name begin at 0, and services hear that the
 * join is past before they see anything of what follows. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "base/loop.h"
#include "comm/comm.h"
#include "comm/op/handle.h"
#include "comm/op/joining.h"
#include "comm/op/op.h"
#include "comm/op/spec.h"
#include "comm/op/tensor.h"
#include "comm/path/chain.h"
#include "comm/path/peer.h"
#include "comm/submit.h"
#include "local/local.h"
#include "local/segment.h"
#include "membership/member.h"
#include "tally/tally.h"
#include "wire/frame.h"

enum { LOOK_MS = 1 }; /* while operations in shared memory are still to end: none of them wakes the loop */

static void joining_tell_all(tally_comm *c)
{
    for (int i = 0; i < c->services && !tly_comm_failed(c); i++)
        tly_rounds_tell(&c->peers[i]);
}

/* --- standing in ----------------------------------------------------------------------------------- */

/* A large push_pull of this machine's team, which this rank has not submitted: without its share of the parts, and its
 * post, the others could not push theirs.  So it does what they do, with zeros.  Home refuses a team's other calls, and
 * a group's, once a rank has joined. */
struct wanted {
    struct tly_list node;
    struct tly_local_op like;
};

bool tly_joining_stand_in(void *comm, const struct tly_local_op *like)
{
    tally_comm *c = comm;
    const struct tly_call *call = tly_call_of(like->number);
    if (!call || !tly_call_is_sum_for_all(call))
        return false;
    struct wanted *w = malloc(sizeof *w);
    if (w) {
        w->like = *like;
        tly_inbox_want(&c->inbox, &w->node);
    } else {
        tly_inbox_break(&c->inbox, ENOMEM, "out of memory");
    }
    tly_loop_wake(&c->loop);
    return true;
}

/* The tensor of a stand-in, which is free; names.lock held.  NULL: *err is 0, and this rank has submitted that itself, or
 * -EBUSY: it still does the round before; or -ENOMEM. */
static struct tly_tensor *joining_take_tensor(tally_comm *c, const struct tly_local_op *like, int *err)
{
    struct tly_tensor *t = tly_names_find(&c->names, like->key);
    *err = 0;
    if (t && (int32_t)(t->round - like->round) > 0)
        return NULL;
    if (t && atomic_load_explicit(&t->busy, memory_order_acquire)) {
        *err = -EBUSY;
        return NULL;
    }
    if (!t) {
        t = calloc(1, sizeof *t + 1);
        *err = t && tly_names_put(&c->names, like->key, t) == 0 ? 0 : -ENOMEM;
        if (*err) {
            free(t);
            return NULL;
        }
        t->key = like->key;
        t->kind = like->number;
        t->unnamed = true;
    }
    t->round = like->round + 1;
    atomic_store_explicit(&t->busy, true, memory_order_relaxed);
    return t;
}

static void joining_fill_in(tally_comm *c, struct tally_op *op, struct tly_tensor *t,
                            const struct tly_local_op *like)
{
    op->tensor = t;
    op->dtype = like->dtype;
    op->reduction = like->reduction;
    op->priority = op->urgency = like->priority;
    op->count = like->count;
    op->bytes = like->bytes;
    op->key = like->key;
    op->round = like->round;
    tly_spec_copy(&op->spec, like->spec, like->prescale, like->postscale, like->count);
    op->sequence = tly_names_next(&c->names);
    tly_wait_begin(&op->wait);
    op->input = op->output = op->zeros;
    tly_chain_choose(c, op); /* the team, as on the rank that has submitted it */
    tly_sharing_stand_in(&op->shared);
}

/* 0: it has begun, or need not; -EBUSY: not yet; -ENOMEM. */
static int joining_stand_in(tally_comm *c, const struct tly_local_op *like)
{
    struct tally_op *op = tly_op_make(c, like->number, NULL);
    int err = 0;
    if (!op || tly_pool_alloc(tly_local_segment(c->local), like->bytes, &op->zeros) != 0)
        err = -ENOMEM;
    /* This rank does not know which ranges of a buffer the others mean. */
    if (!err && op->call->ranges &&
        !(op->reason = strdup("it has joined, and nothing can stand for it in ranges of a buffer")))
        err = -ENOMEM;
    tly_names_lock(&c->names);
    struct tly_tensor *t = err ? NULL : joining_take_tensor(c, like, &err);
    if (t)
        joining_fill_in(c, op, t, like);
    tly_names_unlock(&c->names);
    if (op && !t)
        tly_handle_leave_one(&op->handle);
    if (t)
        tly_inbox_put(&c->inbox, &op->node);
    if (op)
        tly_op_unref(op); /* nobody has the handle */
    return err;
}

static void joining_stand_in_for_all(tally_comm *c)
{
    struct tly_list later = TLY_LIST_INIT(later), *n;
    bool any = false;
    while ((n = tly_inbox_wanted(&c->inbox))) {
        struct wanted *w = tly_list_entry(n, struct wanted, node);
        int err = joining_stand_in(c, &w->like);
        any |= !err;
        if (err == -EBUSY) {
            tly_list_append(&later, n);
            continue;
        }
        free(w);
        if (err) {
            tly_comm_fail(c, ENOMEM, "out of memory");
            break;
        }
    }
    tly_inbox_want_again(&c->inbox, &later);
    if (any)
        tly_op_drain(c);
}

static void joining_stand_in_no_more(tally_comm *c)
{
    struct tly_list *n;
    while ((n = tly_inbox_wanted(&c->inbox)))
        free(tly_list_entry(n, struct wanted, node));
}

/* All others have what they wanted of it. */
static void joining_end_stand_ins(tally_comm *c)
{
    joining_stand_in_no_more(c);
    for (struct tally_op *op = tly_op_oldest(&c->active), *next; op; op = next) {
        next = tly_op_after(&c->active, op);
        if (op->zeros)
            tly_op_end(c, op, ECANCELED, "all ranks have joined");
    }
}

/* --- the end --------------------------------------------------------------------------------------- */

/* Nothing of what this rank had submitted is under way, and nobody may still need what it has of it. */
static bool joining_is_drained(tally_comm *c)
{
    for (const struct tally_op *op = tly_op_oldest(&c->active); op; op = tly_op_after(&c->active, op))
        if (!op->call->message)
            return false;
    for (int i = 0; i < c->services; i++)
        if (!tly_list_empty(&c->peers[i].kept) || !tly_list_empty(&c->peers[i].doubted))
            return false;
    if (c->local && !tly_local_is_idle(c->local))
        return false;
    return tly_inbox_is_empty(&c->inbox);
}

/* All ranks have joined: this one goes on. */
static void joining_go_on(tally_comm *c)
{
    struct tly_joining *j = &c->joining;
    struct tally_op *op = j->op;
    if (c->local)
        tly_local_joined_all(c->local);
    tly_names_lock(&c->names);
    int err = tly_names_begin_anew(&c->names, c->member.roster.joins, c->trace != NULL);
    atomic_store(&j->on, false);
    j->op = NULL;
    tly_names_unlock(&c->names);
    if (err) {
        tly_op_finish(op, ENOMEM, "out of memory");
        tly_comm_fail(c, ENOMEM, "out of memory");
        return;
    }
    joining_tell_all(c);
    tly_handle_found(&op->handle, (int)j->last);
    tly_op_finish(op, 0, NULL);
}

int64_t tly_joining_look(tally_comm *c)
{
    struct tly_joining *j = &c->joining;
    if (!j->op)
        return INT64_MAX;
    if (j->complete)
        joining_end_stand_ins(c);
    else
        joining_stand_in_for_all(c);
    if (!j->op || !j->placed) /* it has failed meanwhile, or others still wait for this rank */
        return INT64_MAX;
    bool drained = joining_is_drained(c);
    if (drained && !j->drained) {
        j->drained = true;
        tly_member_join(&c->member, true);
    }
    if (drained && j->complete)
        joining_go_on(c);
    return drained || !c->local ? INT64_MAX : tly_now() + LOOK_MS * TLY_MS;
}

void tly_joining_placed(void *comm)
{
    tally_comm *c = comm;
    if (!c->joining.op || c->joining.placed)
        return;
    c->joining.placed = true;
    if (c->local)
        tly_local_join(c->local, tly_names_engine_ops(&c->names));
    joining_tell_all(c);
}

void tly_joining_over(void *comm, uint32_t joins, uint32_t last, int err, const char *sentence)
{
    tally_comm *c = comm;
    if (err) {
        tly_joining_end(c, err, sentence);
    } else if (c->joining.op) {
        c->joining.complete = true;
        c->joining.last = last;
    }
}

void tly_joining_end(tally_comm *c, int err, const char *sentence)
{
    struct tally_op *op = c->joining.op;
    c->joining.op = NULL;
    if (op)
        tly_op_finish(op, err, sentence);
}

void tly_joining_finish(tally_comm *c)
{
    free(c->joining.rounds);
    joining_stand_in_no_more(c);
}

/* --- the beginning --------------------------------------------------------------------------------- */

static int joining_begin(tally_comm *c, struct tally_op *op)
{
    struct tly_joining *j = &c->joining;
    tly_names_lock(&c->names);
    int err = 0;
    if (tly_names_are_closed(&c->names))
        err = tly_fail(ESHUTDOWN, "the communicator is closing");
    else if (atomic_load(&j->on))
        err = tly_fail(EINVAL, "this rank has joined already: wait until all ranks have");
    else if (tly_rounds_list(c) != 0)
        err = tly_fail(ENOMEM, "out of memory");
    else
        atomic_store(&j->on, true);
    tly_names_unlock(&c->names);
    if (err)
        return err;
    j->op = op;
    j->placed = j->drained = j->complete = false;
    tly_member_join(&c->member, false);
    return 0;
}

int tally_join(tally_comm *c, const struct tally_options *options, tally_op **op)
{
    struct tally_options own;
    int err = tly_comm_check(c);
    if (!err)
        err = tly_options_take(&options, &own);
    if (err)
        return err;
    struct tally_op *made = tly_op_make(c, TLY_JOIN, options);
    if (!made)
        return tly_fail(ENOMEM, "out of memory");
    tly_loop_lock(&c->loop);
    err = tly_comm_check(c);
    err = err ? err : joining_begin(c, made);
    tly_loop_unlock(&c->loop);
    if (err) {
        tly_handle_leave_one(&made->handle);
        tly_op_unref(made);
        return err;
    }
    tly_loop_wake(&c->loop);
    *op = made;
    return 0;
}
