/* op.c - operations in the loop, from the inbox to their end.
 *
 *   tly_op_drain    takes what was submitted: its round begins, and it is cut into parts
 *   tly_op_landed   a part's result is in place
 *   tly_op_settled  and need not be kept; the last one completes the operation
 *   tly_op_end      it ends with an error
 *
 *   tly_op_cancel   it is taken back: home hears of it (CANCEL), or gets a mark in the place of a part 0 that has not been sent
 *                   (tly_queue_cancel).  One in shared memory is taken back there first (src/local/posts_out.c): all ranks
 *                   divert it, or all had begun it
 *
 * comm->active has an operation from the first to the last of these; the loop holds one of its references. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "base/log.h"
#include "base/map.h"
#include "comm/comm.h"
#include "comm/epoch/epoch.h"
#include "comm/epoch/pace.h"
#include "comm/op/active.h"
#include "comm/op/group.h"
#include "comm/op/handle.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/op/tensor.h"
#include "comm/path/chain.h"
#include "comm/path/keep.h"
#include "comm/path/parts.h"
#include "comm/path/peer.h"
#include "comm/path/queue.h"
#include "comm/path/stager.h"
#include "membership/member.h"
#include "plan/cut.h"
#include "plan/plan.h"
#include "trace/timeline.h"
#include "trace/trace.h"
#include "wire/frame.h"

struct tally_op *tly_op_find(tally_comm *c, const struct tly_frame *f)
{
    struct tally_op *op = tly_map_get(&c->active.by_key, f->key);
    return op && op->round == f->round ? op : NULL;
}

/* Where the parts between two ranks begin and end. */
static const uint32_t *op_pair_range(const struct tally_op *op, uint32_t pair)
{
    uint32_t me = (uint32_t)op->comm->rank;
    bool given = tly_pair_from(pair) == me;
    uint32_t other = given ? tly_pair_to(pair) : tly_pair_from(pair);
    if (!(pair & TLY_PAIR) || (!given && tly_pair_to(pair) != me))
        return NULL;
    for (int i = 0; i < op->group->size; i++)
        if (op->group->ranks[i] == other)
            return &op->pairs[2 * i + !given];
    return NULL;
}

struct tly_part *tly_op_find_part(struct tly_peer *peer, const struct tly_frame *f)
{
    struct tally_op *op = tly_op_find(peer->comm, f);
    if (!op)
        return NULL;
    uint32_t at = f->part;
    if (op->pairs && at > 0) {
        const uint32_t *range = op_pair_range(op, f->group);
        if (!range || at - 1 >= range[1] - range[0])
            return NULL;
        at += range[0] - 1;
    }
    struct tly_part *p = at < op->part_count ? &op->parts[at] : NULL;
    return p && p->owner == peer->index && (!op->call->apart || p->came == f->epoch) ? p : NULL;
}

/* failed: not all of it has landed. */
static void op_complete(tally_comm *c, struct tally_op *op, bool failed)
{
    if (!op->mark)
        tly_map_take(&c->active.by_key, op->key);
    tly_stamp(c->trace, TLY_AT_DONE, TLY_NO_PEER, op->key, op->round, TLY_NO_PART, (uint32_t)op->bytes);
    tly_list_remove(&op->node);
    if (op->call->ended && !op->mark)
        op->call->ended(c, op, failed);
    tly_pace_leaves(c, op);
    tly_chain_withdraw(c, op, !failed);
    tly_stager_leave(op, failed);
    tly_op_forget_tensor(c, op->tensor, op->mark);
    op->tensor = NULL;
    tly_active_ended(&c->active, op->bytes);
    tly_epoch_unref(op->epoch);
    op->epoch = NULL;
    tly_op_set_done(op);
    tly_op_unref(op);
    tly_comm_ended(c);
}

/* Nobody waits for its parts any more. */
static void op_forget_keeps(struct tally_op *op)
{
    for (uint32_t i = 0; i < op->part_count; i++)
        if (op->parts[i].keep) {
            op->parts[i].keep->part = NULL;
            op->parts[i].keep = NULL;
        }
}

void tly_op_end(tally_comm *c, struct tally_op *op, int err, const char *sentence)
{
    char text[TLY_SENTENCE];
    char title[TLY_TITLE];
    snprintf(text, sizeof text, "%s: %s", tly_op_title(op, title), sentence);
    tly_handle_say(&op->handle, err, text);
    if (op->alone && err != ESHUTDOWN && !tly_comm_failed(c))
        tly_warn("comm", "%s", text);
    op_forget_keeps(op);
    op_complete(c, op, true);
}

void tly_op_end_all(tally_comm *c, int err, const char *sentence)
{
    struct tally_op *op;
    while ((op = tly_op_oldest(&c->active)))
        tly_op_end(c, op, err, sentence);
}

void tly_op_finish_all(tally_comm *c)
{
    tly_map_finish(&c->active.by_key);
}

void tly_op_stage(const struct tally_op *op, char *out, size_t len)
{
    static const char *const stages[] = {
        [PART_QUEUED] = "waits until other ranks or services have taken more",
        [PART_ADMITTED] = "is not sent yet",
        [PART_SENT] = "has been sent and is not answered",
        [PART_DOUBTED] = "was sent over a connection that broke",
        [PART_SAID] = "was announced again after a connection broke, and nobody has asked for it",
        [PART_LANDED] = "is here, and other ranks do not have it yet",
    };
    uint32_t i = 0;
    while (i < op->part_count && op->parts[i].state == PART_LANDED && !op->parts[i].keep &&
           !tly_chain_holds(&op->parts[i]))
        i++;
    if (i == op->part_count) {
        snprintf(
            out, len,
            "other ranks of this machine have sent or asked for their parts of it, which are not answered");
        return;
    }
    const struct tly_part *p = &op->parts[i];
    bool back = tly_chain_holds(p);
    snprintf(out, len, "part %u of %u, which %.200s sums, %s%s", i + 1, op->part_count,
             op->comm->peers[p->owner].name, back ? "has been summed and " : "",
             back || p->state == PART_IDLE ? tly_chain_does(p) : stages[p->state]);
}

/* Queue what is not queued yet, as far as it may be ahead of what has landed. */
static int op_queue_parts(tally_comm *c, struct tally_op *op)
{
    uint32_t landed = op->part_count - op->progress.left, most = op->part_count;
    if (op->progress.ahead && landed + op->progress.ahead < most)
        most = landed + op->progress.ahead;
    for (; op->progress.queued < most; op->progress.queued++)
        if (tly_chain_out(c, &op->parts[op->progress.queued]) != 0)
            return -ENOMEM;
    return 0;
}

void tly_op_settled(tally_comm *c, struct tly_part *p)
{
    struct tally_op *op = p->op;
    if (p->state == PART_LANDED)
        tly_chain_settled(p);
    if (--op->progress.left == 0)
        op_complete(c, op, false);
    else if (op->progress.ahead && op_queue_parts(c, op) != 0)
        tly_comm_fail(c, ENOMEM, "out of memory");
}

/* The part's result goes inward.  Once all are back at the tensor that is one thing less to wait for. */
static void op_go_in(tally_comm *c, struct tly_part *p)
{
    struct tally_op *op = p->op;
    if (tly_chain_in(c, p))
        tly_op_settled(c, &op->parts[0]);
}

/* Other ranks wait for a part that a stage could not do, and cannot be told. */
static void op_fail_job(tally_comm *c, const struct tally_op *op, int err)
{
    char text[TLY_SENTENCE], title[TLY_TITLE];
    snprintf(text, sizeof text, "%s: %s", tly_op_title(op, title), tly_chain_why(op));
    tly_comm_fail(c, err, text);
}

struct tly_part *tly_op_landed(tally_comm *c, struct tly_part *p)
{
    struct tally_op *op = p->op;
    int spoilt = tly_chain_spoilt(op);
    if (spoilt && p->index == 0) { /* all had begun it when this rank took it back */
        op_fail_job(c, op, spoilt);
        return NULL;
    }
    tly_queue_remove(p); /* it may be queued again when the answer to what was sent before comes */
    tly_part_change(p, PART_LANDED);
    tly_traffic_landed(c, p);
    if (op->call->landed)
        op->call->landed(c, p);
    op->progress.missing -= p->bytes;
    if (!tly_chain_is_empty(&op->chain))
        op_go_in(c, p);
    if (p->index == 0 && op->call->answered) {
        int err = op->call->answered(c, op);
        p = &op->parts[0];
        if (err > 0 && !tly_chain_is_empty(&op->chain) && tly_chain_more(c, op) != 0)
            err = -ENOMEM;
        if (err > 0)
            err = op_queue_parts(c, op);
        if (err) {
            char text[TLY_TITLE + 100], title[TLY_TITLE];
            snprintf(text, sizeof text, "rank %d cannot take the result of %s: %s", c->rank,
                     tly_op_title(op, title), strerror(-err));
            tly_comm_fail(c, -err, text);
            return NULL;
        }
    }
    return p;
}

/* Part 0 takes the reason home, for all ranks, unless that is past. */
void tly_op_cancel(tally_comm *c, struct tally_op *op)
{
    struct tly_part *p = &op->parts[0];
    bool waits = p->state == PART_IDLE; /* in some stage, or not set out */
    if (waits && tly_chain_takes_back(c, op))
        return;
    if (waits)
        tly_chain_stop(c, op);
    tly_queue_cancel(c, op);
    if (waits && tly_queue_part(c, p) != 0)
        tly_comm_fail(c, ENOMEM, "out of memory");
}

/* The operation's round begins: in which epoch, and so who sums its parts, is known now. */
static int op_begin(tally_comm *c, struct tally_op *op)
{
    op->epoch = tly_epoch_begin(c, op->key, op->round);
    tly_debug("comm", "round %u of '%.100s' goes by split no. %u", op->round, op->tensor->name,
              op->epoch->number);
    int err = tly_parts_make(c, op);
    if (!op->credit)
        op->credit = c->params.credit_bytes ? c->params.credit_bytes
                                            : tly_plan_credit(op->epoch->sharing, op->epoch->part_bytes);
    op->progress.missing = 0;
    for (uint32_t i = 0; i < op->part_count && !err; i++) {
        struct tly_part *p = &op->parts[i];
        p->bytes = p->length;
        if (p->state != PART_LANDED)
            op->progress.missing += p->bytes;
    }
    if (err)
        return err;
    bool staged = !tly_chain_is_empty(&op->chain);
    if (staged && tly_chain_begin(c, op) != 0 && !op->reason && !(op->reason = strdup(tly_error())))
        return -ENOMEM;
    if (op->reason) { /* home is all that hears of it */
        tly_chain_stop(c, op);
        tly_queue_cancel(c, op);
        return tly_queue_part(c, &op->parts[0]);
    }
    if (!staged)
        return op_queue_parts(c, op);
    op->progress.queued = op->part_count;
    return tly_chain_start(c, op);
}

void tly_op_drain(tally_comm *c)
{
    struct tly_list mine;
    int failed = tly_comm_failed(c);
    if (tly_epochs_change(&c->epochs) && !failed)
        return; /* nothing begins while an epoch is agreed on */
    if (!tly_inbox_take(&c->inbox, &mine))
        return;
    while (!tly_list_empty(&mine)) {
        struct tally_op *op = tly_list_entry(mine.next, struct tally_op, node);
        tly_list_remove(&op->node);
        tly_list_append(&c->active.by_age, &op->node);
        tly_pace_enters(c, op);
        op->wait.born = c->loop.awake;
        if (failed) {
            tly_op_end(c, op, failed, tly_comm_sentence(c));
        } else if ((!op->mark && tly_map_put(&c->active.by_key, op->key, op) != 0) || op_begin(c, op) != 0) {
            tly_comm_fail(c, ENOMEM, "out of memory");
            failed = ENOMEM;
        }
    }
}

/* A stage has its result, and no service sums it. */
static void op_turn(struct tly_part *p)
{
    struct tally_op *op = p->op;
    tly_part_change(p, PART_LANDED);
    op->progress.missing -= p->bytes;
    op->progress.left--;
}

/* In the direction in which it goes. */
static void op_go_on(tally_comm *c, struct tly_part *p)
{
    struct tally_op *op = p->op;
    if (p->homeward && p->state == PART_IDLE)
        op_turn(p);
    if (op->reason && op->parts[0].state == PART_IDLE) /* it has come back (tly_chain_takes_back) */
        tly_op_cancel(c, op);
    else if (p->homeward)
        op_go_in(c, p);
    else if (tly_chain_out(c, p) != 0)
        tly_comm_fail(c, ENOMEM, "out of memory");
}

/* The stage at this place is over with it.  Parts that have gone no farther have their result from there. */
static void op_turn_back(tally_comm *c, struct tally_op *op, int place)
{
    for (uint32_t i = 0; i < op->part_count; i++) {
        struct tly_part *p = &op->parts[i];
        if (p->stage == place && p->state == PART_IDLE)
            op_turn(p);
    }
    if (tly_chain_come_in(c, op, place))
        tly_op_settled(c, &op->parts[0]);
}

/* A stage could not do its work on a part. */
static void op_fail_part(tally_comm *c, struct tly_part *p)
{
    struct tally_op *op = p->op;
    if (p->homeward || tly_chain_has_more(op)) { /* the other ranks need what this one still has to push */
        if (!tly_handle_status(&op->handle)) {
            char text[TLY_SENTENCE], title[TLY_TITLE];
            snprintf(text, sizeof text, "%s: %s", tly_op_title(op, title), tly_chain_why(op));
            tly_handle_say(&op->handle, p->err, text);
        }
        p->err = 0;
        op_go_on(c, p);
    } else if (op->parts[0].state == PART_IDLE && (op->reason || (op->reason = strdup(tly_chain_why(op))))) {
        tly_op_cancel(c, op);
    } else if (op->reason && op->parts[0].state != PART_LANDED) {
        /* Home knows that this rank has taken it back: a verdict comes, or part 0 lands. */
        tly_chain_spoil(op, p->err);
    } else {
        op_fail_job(c, op, p->err);
    }
}

void tly_op_drain_stages(tally_comm *c)
{
    struct tly_list passed, over[STAGE_NET];
    struct tally_op *op;
    if (!tly_chain_take(c, &passed, over))
        return;
    /* What ends meanwhile takes its parts and itself out of these lists (tly_chain_withdraw). */
    while (!tly_list_empty(&passed)) {
        struct tly_part *p = tly_list_entry(tly_list_take(&passed), struct tly_part, node);
        if (p->err)
            op_fail_part(c, p);
        else
            op_go_on(c, p);
    }
    while ((op = tly_chain_next(over, STAGE_TENSOR)))
        tly_chain_hear_lost(op, c->loop.awake);
    for (int at = STAGE_NET - 1; at > STAGE_TENSOR; at--)
        while ((op = tly_chain_next(over, at)))
            op_turn_back(c, op, at);
}

enum {
    EXPLAIN_MS = 2000, /* a neighbour that has left may only have heard the verdict before us */
    LAST_CALL_S = 5,   /* before TALLY_TIMEOUT: who is late? */
};

void tly_op_tick(tally_comm *c)
{
    for (struct tally_op *op = tly_op_oldest(&c->active), *next; op; op = next) {
        next = tly_op_after(&c->active, op);
        int err;
        int64_t since = tly_chain_lost_since(op, &err);
        if (since && c->loop.awake - since >= EXPLAIN_MS * TLY_MS)
            tly_op_end(c, op, err, tly_chain_why(op));
    }
}

void tly_op_set_late(struct tally_op *op, const char *ranks)
{
    free(op->wait.late);
    op->wait.late = strdup(ranks); /* without memory an error has no list */
}

/* The engine has it, and names the ranks that it waits for (engine.c). */
static bool op_is_in_engine(const struct tally_op *op)
{
    return op->parts[0].stage == STAGE_ENGINE && op->parts[0].state == PART_IDLE;
}

void tly_op_time_out(tally_comm *c)
{
    int64_t now = c->loop.awake;
    const double timeout = c->params.timeout;
    struct tally_op *oldest = tly_op_oldest(&c->active);
    if (tly_joining_is_on(&c->joining))
        c->active.stood_by = now;
    if (!oldest || timeout <= 0 || op_is_in_engine(oldest))
        return;
    int64_t since = oldest->wait.born > c->active.stood_by ? oldest->wait.born : c->active.stood_by;
    double waited = (double)(now - since) / TLY_SEC;
    double last_call = timeout / 2 < LAST_CALL_S ? timeout / 2 : LAST_CALL_S;
    if (waited >= timeout - last_call && !oldest->wait.asked) {
        oldest->wait.asked = true;
        tly_peer_ask_late(&c->peers[oldest->parts[0].owner], oldest);
    }
    if (waited >= timeout && !tly_comm_is_doomed(c)) {
        const char *late = oldest->wait.late ? oldest->wait.late : "";
        char why[TLY_SENTENCE], stage[300], title[TLY_TITLE];
        tly_op_stage(oldest, stage, sizeof stage);
        snprintf(why, sizeof why, "%s has waited %.0f s%s%s (TALLY_TIMEOUT): %s", tly_op_title(oldest, title),
                 waited, late[0] ? " for rank " : "", late, stage);
        tly_comm_doom(c, ETIME, TLY_SEC, why);
    }
}
