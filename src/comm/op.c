/* op.c - operations in the loop, from the inbox to their end.
 *
 *   tly_op_drain    takes what was submitted: its round begins, and it is cut into parts
 *   tly_op_landed   a part's result is in place
 *   tly_op_settled  and need not be kept; the last one completes the operation
 *   tly_op_end      it ends with an error
 *
 * comm->active has an operation from the first to the last of these; the loop holds one of its references. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "comm/epoch.h"
#include "comm/internal.h"

struct tally_op *tly_op_find(tally_comm *c, const struct tly_frame *f)
{
    struct tally_op *op = tly_map_get(&c->active, f->key);
    return op && op->round == f->round ? op : NULL;
}

/* Where the parts between two ranks begin and end. */
static const uint32_t *pair_range(const struct tally_op *op, uint32_t pair)
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

struct part *tly_op_find_part(struct peer *peer, const struct tly_frame *f)
{
    struct tally_op *op = tly_op_find(peer->comm, f);
    if (!op)
        return NULL;
    uint32_t at = f->part;
    if (op->pairs && at > 0) {
        const uint32_t *range = pair_range(op, f->group);
        if (!range || at - 1 >= range[1] - range[0])
            return NULL;
        at += range[0] - 1;
    }
    struct part *p = at < op->part_count ? &op->parts[at] : NULL;
    return p && p->owner == peer->index ? p : NULL;
}

static void complete(tally_comm *c, struct tally_op *op)
{
    if (!op->mark)
        tly_map_take(&c->active, op->key);
    tly_stamp(c->trace, TLY_AT_DONE, TLY_NO_PEER, op->key, op->round, TLY_NO_PART, (uint32_t)op->bytes);
    tly_list_remove(&op->node);
    tly_pace_leaves(c, op);
    tly_team_withdraw(c, op);
    tly_op_forget_tensor(c, op->tensor, op->mark);
    op->tensor = NULL;
    c->ops_done++;
    c->bytes_done += op->bytes;
    tly_epoch_unref(op->epoch);
    op->epoch = NULL;
    tly_op_set_done(op);
    tly_op_unref(op);
    tly_comm_ended(c);
}

/* Nobody waits for its parts any more. */
static void forget_keeps(struct tally_op *op)
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
    op->status = -err;
    op->sentence = strdup(text);
    if (op->copy && err != ESHUTDOWN && !atomic_load_explicit(&c->failed, memory_order_relaxed))
        tly_warn("comm", "%s", text); /* nobody waits for it */
    forget_keeps(op);
    tly_queue_withdraw(c, op);
    complete(c, op);
}

void tly_op_stage(const struct tally_op *op, char *out, size_t len)
{
    static const char *const stages[] = {
        [PART_IDLE] = "is not summed on this machine yet",
        [PART_QUEUED] = "has no credit or window to be sent yet",
        [PART_ADMITTED] = "is not sent yet",
        [PART_SENT] = "has been sent and is not answered",
        [PART_DOUBTED] = "was sent over a connection that is lost",
        [PART_SAID] = "was told again after a connection was lost, and is not asked for",
        [PART_LANDED] = "has landed, and not all ranks have it",
    };
    uint32_t i = 0;
    while (i < op->part_count && op->parts[i].state == PART_LANDED && !op->parts[i].keep)
        i++;
    if (i == op->part_count) {
        snprintf(out, len, "what other ranks of this machine have sent of it is not answered");
        return;
    }
    snprintf(out, len, "part %u of %u, which %.200s sums, %s", i + 1, op->part_count,
             op->comm->peers[op->parts[i].owner].name, stages[op->parts[i].state]);
}

/* Queue what is not queued yet, as far as it may be ahead of what has landed. */
static int queue_parts(tally_comm *c, struct tally_op *op)
{
    uint32_t landed = op->part_count - op->parts_left, most = op->part_count;
    if (op->ahead && landed + op->ahead < most)
        most = landed + op->ahead;
    for (; op->queued_parts < most; op->queued_parts++)
        if (tly_queue_part(c, &op->parts[op->queued_parts]) != 0)
            return -ENOMEM;
    return 0;
}

struct part *tly_op_landed(tally_comm *c, struct part *p)
{
    struct tally_op *op = p->op;
    p->state = PART_LANDED;
    c->traffic.moved += p->result_length;
    if (tly_team_carries(p))
        tly_local_landed(op->engine, &p->shard);
    op->missing -= p->length;
    if (op->kind == TALLY_ALLGATHER && !op->listed) {
        op->listed = true;
        int err = tly_parts_gather(c, op);
        err = err ? err : queue_parts(c, op);
        if (err) {
            char text[TLY_TITLE + 100], title[TLY_TITLE];
            snprintf(text, sizeof text, "rank %d cannot take the result of %s: %s", c->rank,
                     tly_op_title(op, title), strerror(-err));
            tly_member_complain(&c->member, -err, text);
            tly_comm_fail(c, -err, text);
            return NULL;
        }
        p = &op->parts[0]; /* they have moved */
    }
    for (int i = 0; op->kind == TLY_PROBE && i < op->group->size; i++)
        if (op->group->ranks[i] == (uint32_t)op->found)
            op->source = i;
    return p;
}

void tly_op_settled(tally_comm *c, struct part *p)
{
    struct tally_op *op = p->op;
    if (--op->parts_left == 0)
        complete(c, op);
    else if (op->ahead && queue_parts(c, op) != 0)
        tly_comm_fail(c, ENOMEM, "out of memory");
}

/* The operation's round begins: in which epoch, and so who sums its parts, is known now. */
static int begin(tally_comm *c, struct tally_op *op)
{
    op->epoch = tly_epoch_begin(c, op->key, op->round);
    tly_debug("comm", "round %u of '%.100s' is of epoch %u", op->round, op->tensor->name, op->epoch->number);
    int err = tly_parts_make(c, op);
    if (!op->credit)
        op->credit = op->epoch->credit_bytes;
    op->missing = 0;
    for (uint32_t i = 0; i < op->part_count && !err; i++)
        op->missing += op->parts[i].length;
    if (err)
        return err;
    if (op->team) { /* if it is to fail, too: the others' rounds there end when all posts have come */
        op->local.ahead = op->credit;
        tly_local_enter(op->engine, &op->local);
    }
    if (op->reason)
        tly_queue_cancel(c, op);
    if (op->reason ||
        op->team) /* home is all that hears of it; or the others' parts follow once they are summed */
        return tly_queue_part(c, &op->parts[0]);
    return queue_parts(c, op);
}

void tly_op_drain(tally_comm *c)
{
    struct tly_list mine;
    int failed = atomic_load_explicit(&c->failed, memory_order_relaxed);
    if (c->preparing && !failed)
        return; /* nothing begins while an epoch is agreed on */
    pthread_mutex_lock(&c->inbox_lock);
    if (tly_list_empty(&c->inbox)) {
        pthread_mutex_unlock(&c->inbox_lock);
        return;
    }
    mine = c->inbox;
    mine.next->prev = mine.prev->next = &mine;
    tly_list_init(&c->inbox);
    pthread_mutex_unlock(&c->inbox_lock);
    while (!tly_list_empty(&mine)) {
        struct tally_op *op = tly_list_entry(mine.next, struct tally_op, node);
        tly_list_remove(&op->node);
        tly_list_append(&c->active_ops, &op->node);
        tly_pace_enters(c, op);
        op->born = c->loop.awake;
        if (failed) {
            tly_op_end(c, op, failed, c->sentence);
        } else if ((!op->mark && tly_map_put(&c->active, op->key, op) != 0) || begin(c, op) != 0) {
            tly_comm_fail(c, ENOMEM, "out of memory");
            failed = ENOMEM;
        }
    }
}
