/* chain.c - the way of parts through the stages of their operation (stage.h).
 *
 * tly_chain_choose() asks at submission which stages suit the operation.  Parts go out through `ready` and come back through
 * `landed`.  If a stage fails before part 0 has set out, this rank takes the operation back, and home tells all ranks
 * (tly_op_cancel).  From then on no part enters another stage.
 *
 * part->stage is the stage that has the part; STAGE_TENSOR before it sets out, and once its result is back.  What a stage
 * says from another thread goes into comm->inbox, under its lock, and the loop takes it from there (op.c).  `due` counts
 * the parts that the stage is not done with after which part 0 sets out (chain_last_voucher): it does when there are none. */
#include <stdio.h>

#include "base/check.h"
#include "base/list.h"
#include "base/loop.h"
#include "comm/comm.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/path/chain.h"
#include "comm/path/stage.h"

void tly_chain_init(struct tly_said *said)
{
    tly_list_init(&said->passed);
    for (int at = 0; at < STAGE_NET; at++)
        tly_list_init(&said->over[at]);
}

static bool chain_has(const struct tally_op *op, int place)
{
    return place == STAGE_NET || op->chain.stages >> place & 1;
}

void tly_chain_choose(tally_comm *c, struct tally_op *op)
{
    for (unsigned left = op->call->message || op->call->kept ? 0 : tly_stages_between; left;
         left &= left - 1) {
        int at = __builtin_ctz(left);
        const struct tly_stage *s = tly_stage_at(at);
        if (!s->suits(c, op))
            continue;
        if (s->alone && !op->chain.stages) {
            s->alone(c, op);
            return;
        }
        op->chain.stages |= (uint8_t)(1u << at);
        if (s->take)
            s->take(c, op);
    }
}

void tly_chain_go_on_without(tally_comm *c, struct tally_op *op, enum tly_stage_place place)
{
    for (int at = STAGE_TENSOR + 1; at < STAGE_NET; at++) {
        const struct tly_stage *s = tly_stage_at(at);
        if (at == (int)place || !s || !s->suits(c, op))
            continue;
        op->chain.stages |= (uint8_t)(1u << at);
        if (s->take)
            s->take(c, op);
    }
}

int tly_chain_cut(tally_comm *c, struct tally_op *op, const struct tly_cut *cut)
{
    for (int at = STAGE_TENSOR + 1; at < STAGE_NET && op->chain.stages; at++)
        if (chain_has(op, at) && tly_stage_at(at)->cut)
            return tly_stage_at(at)->cut(c, op, cut);
    return 1;
}

/* Part 0 of pieces is no part of the tensor, and passes by the stage at this place. */
static bool chain_passes_by(const struct tly_part *p, int at)
{
    return p == p->op->parts && p->op->call->pieces && at != STAGE_NET && !tly_stage_at(at)->shared;
}

/* The stage that is to be done with all other parts before part 0 sets out: the last that vouches, or the one before a shared
 * stage.  0: there is none. */
static int chain_last_voucher(const struct tally_op *op)
{
    int last = 0, before = 0;
    for (int at = STAGE_TENSOR + 1; at < STAGE_NET; at++) {
        if (!chain_has(op, at))
            continue;
        if (tly_stage_at(at)->shared)
            return before;
        before = at;
        last = tly_stage_at(at)->vouches ? at : last;
    }
    return last;
}

int tly_chain_begin(tally_comm *c, struct tally_op *op)
{
    int err = 0;
    op->chain.begun = true;
    op->chain.later = op->call->answered && op->part_count == 1;
    for (int at = 0; at < STAGE_NET; at++)
        tly_list_init(&op->chain.over[at]);
    for (uint32_t i = 0; i < op->part_count; i++)
        tly_list_init(&op->parts[i].node);
    op->chain.voucher = (uint8_t)chain_last_voucher(op);
    op->chain.due = op->chain.voucher ? op->part_count - 1 : 0;
    op->chain.away = op->part_count;
    tly_progress_await_more(&op->progress); /* until all are back */
    /* All of them, even if one fails: each is told of the end, too. */
    for (int at = STAGE_TENSOR + 1; at < STAGE_NET; at++)
        if (chain_has(op, at)) {
            int this = tly_stage_at(at)->begin(c, op);
            err = err ? err : this;
        }
    return err;
}

int tly_chain_more(tally_comm *c, struct tally_op *op)
{
    for (uint32_t i = 0; i < op->part_count; i++)
        tly_list_init(&op->parts[i].node);
    op->chain.cut = true;
    op->chain.voucher = 0;
    op->chain.away = op->part_count - 1;
    if (op->chain.away)
        tly_progress_await_more(&op->progress); /* until all are back */
    int err = 0;
    for (int at = STAGE_TENSOR + 1; at < STAGE_NET && !err; at++)
        if (chain_has(op, at) && tly_stage_at(at)->more)
            err = tly_stage_at(at)->more(c, op);
    return err;
}

bool tly_chain_has_more(const struct tally_op *op)
{
    return op->chain.cut;
}

int tly_chain_out(tally_comm *c, struct tly_part *p)
{
    struct tally_op *op = p->op;
    int at = p->stage, done = !op->chain.stopped;
    while (done == 1) {
        bool vouched = at && at == op->chain.voucher && p != op->parts;
        do
            at++;
        while (!chain_has(op, at) || (!op->chain.later && chain_passes_by(p, at)));
        p->stage = (uint8_t)at;
        done = tly_stage_at(at)->ready(c, p);
        if (vouched && --op->chain.due == 0 && done >= 0) {
            int first = tly_chain_out(c, op->parts);
            done = first < 0 ? first : done;
        }
    }
    return done < 0 ? done : 0;
}

int tly_chain_start(tally_comm *c, struct tally_op *op)
{
    int err = 0;
    bool now = !op->chain.due;
    for (uint32_t i = 1; i < op->part_count && !err; i++)
        err = tly_chain_out(c, &op->parts[i]);
    return err || !now ? err : tly_chain_out(c, op->parts);
}

/* True: it is back at the tensor. */
static bool chain_inward(tally_comm *c, struct tly_part *p)
{
    const struct tally_op *op = p->op;
    if (op->chain.stopped)
        return false;
    p->homeward = true;
    for (int at = p->stage - 1; at > STAGE_TENSOR; at--) {
        p->stage = (uint8_t)at;
        if (chain_has(op, at) && !chain_passes_by(p, at) && !tly_stage_at(at)->landed(c, p))
            return false;
    }
    p->stage = STAGE_TENSOR;
    return true;
}

bool tly_chain_in(tally_comm *c, struct tly_part *p)
{
    return chain_inward(c, p) && --p->op->chain.away == 0;
}

bool tly_chain_come_in(tally_comm *c, struct tally_op *op, int place)
{
    uint32_t back = 0;
    op->chain.ended |= (uint8_t)(1u << place);
    if (op->chain.lost_at)
        return false;
    for (uint32_t i = 0; i < op->part_count; i++)
        back += op->parts[i].stage == place && chain_inward(c, &op->parts[i]);
    op->chain.away -= back;
    return back && !op->chain.away;
}

void tly_chain_admitted(struct tly_part *p)
{
    for (int at = STAGE_NET - 1; at > STAGE_TENSOR; at--)
        if (chain_has(p->op, at) && tly_stage_at(at)->admitted)
            tly_stage_at(at)->admitted(p);
}

void tly_chain_settled(struct tly_part *p)
{
    for (int at = STAGE_NET - 1; at > STAGE_TENSOR; at--)
        if (chain_has(p->op, at) && tly_stage_at(at)->settled)
            tly_stage_at(at)->settled(p);
}

/* --- said by stages ------------------------------------------------------------------------------ */

static void chain_tell(tally_comm *c, struct tly_list *list, struct tly_list *node)
{
    struct tly_said *said = tly_inbox_said(&c->inbox);
    bool first = !atomic_load_explicit(&said->any, memory_order_relaxed);
    tly_check(tly_list_empty(node)); /* a stage says one thing at a time */
    tly_list_append(list, node);
    atomic_store_explicit(&said->any, true, memory_order_release);
    tly_inbox_unlock(&c->inbox);
    if (first)
        tly_loop_wake(&c->loop);
}

void tly_stage_passed(struct tly_part *p)
{
    tally_comm *c = p->op->comm;
    tly_inbox_lock(&c->inbox);
    chain_tell(c, &tly_inbox_said(&c->inbox)->passed, &p->node);
}

static void chain_explain(struct tally_op *op, const char *sentence)
{
    if (!op->chain.lost[0])
        snprintf(op->chain.lost, sizeof op->chain.lost, "%s", sentence);
}

void tly_stage_failed(struct tly_part *p, int err, const char *sentence)
{
    tally_comm *c = p->op->comm;
    tly_inbox_lock(&c->inbox);
    p->err = (int16_t)err;
    chain_explain(p->op, sentence);
    chain_tell(c, &tly_inbox_said(&c->inbox)->passed, &p->node);
}

void tly_stage_turned(struct tly_part *p)
{
    p->homeward = true;
    tly_stage_passed(p);
}

void tly_stage_over(struct tally_op *op, enum tly_stage_place place)
{
    tally_comm *c = op->comm;
    tly_inbox_lock(&c->inbox);
    chain_tell(c, &tly_inbox_said(&c->inbox)->over[place], &op->chain.over[place]);
}

void tly_stage_lost(struct tally_op *op, int err, const char *sentence)
{
    tally_comm *c = op->comm;
    tly_inbox_lock(&c->inbox);
    if (op->chain.lost_err) {
        tly_inbox_unlock(&c->inbox);
        return;
    }
    op->chain.lost_err = err;
    chain_explain(op, sentence);
    chain_tell(c, &tly_inbox_said(&c->inbox)->over[STAGE_TENSOR], &op->chain.over[STAGE_TENSOR]);
}

static void chain_move(struct tly_list *from, struct tly_list *to)
{
    tly_list_init(to);
    while (!tly_list_empty(from))
        tly_list_append(to, tly_list_take(from));
}

bool tly_chain_take(tally_comm *c, struct tly_list *passed, struct tly_list *over)
{
    struct tly_said *said = tly_inbox_said(&c->inbox);
    if (!atomic_load_explicit(&said->any, memory_order_acquire))
        return false;
    tly_inbox_lock(&c->inbox);
    atomic_store_explicit(&said->any, false, memory_order_relaxed);
    chain_move(&said->passed, passed);
    for (int at = 0; at < STAGE_NET; at++)
        chain_move(&said->over[at], &over[at]);
    tly_inbox_unlock(&c->inbox);
    return true;
}

struct tally_op *tly_chain_next(struct tly_list *over, int place)
{
    if (tly_list_empty(&over[place]))
        return NULL;
    return tly_list_entry(tly_list_take(&over[place]) - place, struct tally_op, chain.over);
}

void tly_chain_hear_lost(struct tally_op *op, int64_t now)
{
    op->chain.lost_at = now;
}

int64_t tly_chain_lost_since(const struct tally_op *op, int *err)
{
    if (op->chain.lost_at)
        *err = op->chain.lost_err;
    return op->chain.lost_at;
}

const char *tly_chain_why(const struct tally_op *op)
{
    return op->chain.lost;
}

void tly_chain_spoil(struct tally_op *op, int err)
{
    op->chain.spoilt = (int16_t)err;
}

int tly_chain_spoilt(const struct tally_op *op)
{
    return op->chain.spoilt;
}

static void chain_withdraw(tally_comm *c, struct tally_op *op, bool over)
{
    if (!op->chain.begun)
        return;
    for (int at = STAGE_NET - 1; at > STAGE_TENSOR; at--)
        if (chain_has(op, at))
            tly_stage_at(at)->withdraw(c, op, over);
    tly_inbox_lock(&c->inbox);
    for (int at = 0; at < STAGE_NET; at++)
        tly_list_remove(&op->chain.over[at]);
    for (uint32_t i = 0; i < op->part_count; i++)
        tly_list_remove(&op->parts[i].node);
    tly_inbox_unlock(&c->inbox);
}

bool tly_chain_takes_back(tally_comm *c, struct tally_op *op)
{
    const struct tly_stage *s = tly_stage_at(op->parts[0].stage);
    return s && s->take_back && s->take_back(c, op);
}

void tly_chain_stop(tally_comm *c, struct tally_op *op)
{
    op->chain.stopped = true;
    chain_withdraw(c, op, false);
}

void tly_chain_withdraw(tally_comm *c, struct tally_op *op, bool landed)
{
    if (!landed)
        tly_stage_at(STAGE_NET)->withdraw(c, op, true);
    chain_withdraw(c, op, true);
}

const char *tly_chain_does(const struct tly_part *p)
{
    const struct tly_stage *s = tly_stage_at(p->stage);
    if (s)
        return s->does;
    return p->op->chain.stages ? "waits until all other parts can be sent"
                               : "waits until earlier parts have been summed";
}

bool tly_chain_holds(const struct tly_part *p)
{
    const struct tly_stage *s = tly_stage_at(p->stage);
    return p->homeward && s && !s->shared;
}
