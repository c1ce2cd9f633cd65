/* tensor.c - what follows from a name: home, parts and the services that sum them. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "comm/comm.h"
#include "comm/epoch/epoch.h"
#include "comm/op/group.h"
#include "comm/op/op.h"
#include "comm/op/tensor.h"
#include "ops/call.h"
#include "plan/cut.h"
#include "plan/plan.h"
#include "reduce/reduce.h"
#include "tally/tally.h"
#include "wire/frame.h"

/* Services that sum or relay a tensor's parts. */
struct dealt {
    struct tly_dealer *home, *others; /* part 0's, and all that follow; the same, but where a root decides */
    struct tly_cutting cutting;
};

/* By the plan, unless told; of a list's own parts, shorter or longer than the unit, but never less than four units, which
 * cover the time in which a process wakes up.  What is hardly more than a credit is sent at once. */
static uint64_t tensor_credit(const tally_comm *c, const struct tly_stretch *s, const struct dealt *d)
{
    bool sums = d->home == d->others;
    const struct tly_cutting *cut = &d->cutting;
    uint64_t bytes = s->before + s->bytes + s->behind, longest = tly_plan_largest_part(s, cut);
    uint64_t usual = tly_plan_credit(cut->active, cut->unit);
    uint64_t all = sums ? tly_plan_sum_credit(cut->active, cut->far, cut->unit, cut->unit) : usual;
    if (c->params.credit_bytes)
        return c->params.credit_bytes;
    if (bytes < 2 * usual)
        return all;
    uint64_t suits = sums ? tly_plan_sum_credit(cut->active, cut->far, longest, cut->unit)
                          : tly_plan_credit(cut->active, longest);
    uint64_t least = 4ull * cut->unit < all ? 4ull * cut->unit : all;
    return suits > least ? suits : least;
}

/* Where a tensor lies: `ranges` of elements of so many bytes; NULL: it lies in one piece. */
struct placed {
    const struct tly_ranges *ranges;
    uint64_t element;
};

/* On the way through a tensor: bytes behind us, of which so many are in range `range`. */
struct walk {
    uint64_t at, inside;
    size_t range;
};

/* The next part, which ends where its range does. */
static struct tly_cut_piece tensor_next_piece(const struct tly_stretch *s, const struct placed *placed,
                                              const struct tly_cutting *c, struct walk *w)
{
    struct tly_cut_piece p = {.place = w->at, .length = tly_plan_part(s, w->at, c)};
    if (placed->ranges) {
        const struct tally_range *r = &placed->ranges->list[w->range];
        uint64_t left = r->count * placed->element - w->inside;
        p.place = r->begin * placed->element + w->inside;
        w->inside += p.length;
        if (p.length >= left) {
            p.length = (uint32_t)left;
            w->range++;
            w->inside = 0;
        }
    }
    w->at += p.length;
    return p;
}

/* Cut a tensor into parts and deal them.  -ENOMEM. */
static int tensor_make_cut(tally_comm *c, const struct tly_stretch *s, const struct placed *placed,
                           const struct tly_epoch *e, const struct dealt *d, struct tly_cut *out)
{
    uint64_t count = 0;
    struct walk w = {0};
    do {
        tensor_next_piece(s, placed, &d->cutting, &w);
        count++;
    } while (w.at < s->bytes);
    struct tly_cut_piece *pieces = malloc(count * sizeof *pieces);
    if (!pieces)
        return -ENOMEM;
    w = (struct walk){0};
    for (uint64_t i = 0; i < count; i++) {
        pieces[i] = tensor_next_piece(s, placed, &d->cutting, &w);
        pieces[i].owner = (uint16_t)tly_dealer_next(i ? d->others : d->home, pieces[i].length);
    }
    free(out->pieces);
    *out = (struct tly_cut){.bytes = s->bytes,
                            .epoch = e->number,
                            .pieces = pieces,
                            .count = (uint32_t)count,
                            .credit = tensor_credit(c, s, d)};
    return 0;
}

/* How an all-reduce is cut. */
static struct tly_cutting tensor_cutting(const struct tly_epoch *e)
{
    return (struct tly_cutting){.unit = e->part_bytes,
                                .most = e->part_most,
                                .active = e->sharing,
                                .far = e->far,
                                .fewest = e->spares ? TLY_SPARES : TLY_FEW};
}

/* Deal the whole list in one sequence, for this epoch.  What a later plan has taken over keeps its place in it. */
static int tensor_deal_plan(tally_comm *c, const struct tly_list_plan *plan, struct tly_epoch *e)
{
    struct tly_dealer d;
    struct dealt dealt = {&d, &d, tensor_cutting(e)};
    struct tly_stretch s = {0};
    struct tly_cut elsewhere = {0};
    struct placed whole = {0};
    int err = 0;
    if (plan->count > 1) /* its tensors overtake each other, with long parts too late */
        dealt.cutting.most = dealt.cutting.unit;
    for (size_t i = 0; i < plan->count; i++)
        s.behind += plan->item[i].bytes;
    /* Not tensor_credit(): of that a rank may have its own, and all ranks must deal alike. */
    uint64_t lag = tly_plan_credit(e->sharing, tly_plan_largest_part(&s, &dealt.cutting));
    tly_plan_late(c->machines, e->services, e->weight, s.behind, lag, e->listed);
    tly_dealer_init(&d, c->machines, e->services, e->listed);
    for (size_t i = 0; i < plan->count && !err; i++) {
        const struct tly_list_item *p = &plan->item[i];
        s.behind -= s.bytes = p->bytes;
        err = tensor_make_cut(c, &s, &whole, e, &dealt,
                              p->tensor->plan_list == plan ? &p->tensor->plan : &elsewhere);
        s.before += p->bytes;
    }
    free(elsewhere.pieces);
    return err;
}

/* Is there a plan of its own for it?  TALLY_SPLIT says for comparison who sums, whatever is summed. */
static bool tensor_root_decides(const tally_comm *c, const struct tally_op *op)
{
    const struct tly_call *call = op->call;
    return call->root && !call->paired && (!call->reduces || strcmp(c->params.split, "optimal") == 0);
}

struct tly_plan_machine *tly_tensor_machines(const tally_comm *c, const struct tally_op *op, bool teams)
{
    size_t bytes = (size_t)op->epoch->services * sizeof(struct tly_plan_machine);
    struct tly_plan_machine *machine = malloc(bytes);
    if (!machine)
        return NULL;
    memcpy(machine, op->epoch->machine, bytes);
    for (int i = 0; i < op->epoch->services; i++)
        machine[i].ranks = 0;
    for (int i = 0; i < op->group->size; i++) {
        struct tly_plan_machine *m = &machine[tly_service_of(c, op->group->ranks[i])];
        m->ranks = teams ? 1 : m->ranks + 1;
    }
    return machine;
}

/* Plan which services relay a broadcast from its root, or sum for the root, over the group's machines.  -ENOMEM. */
static int tensor_plan_for_root(tally_comm *c, const struct tally_op *op, struct dealt *d)
{
    const struct tly_epoch *e = op->epoch;
    struct tly_plan_machine *machine = tly_tensor_machines(c, op, tly_chain_has(&op->chain, STAGE_TEAM));
    uint32_t *weight = calloc((size_t)e->services, sizeof *weight);
    int root = tly_service_of(c, op->root), err = machine && weight ? 0 : -ENOMEM;
    if (!err && !op->call->reduces)
        err = tly_plan_broadcast(e->services, machine, root, weight);
    else if (!err)
        err = tly_plan_reduce(e->services, machine, root, e->weight, weight);
    d->cutting.active = 0;
    for (int i = 0; i < e->services && !err; i++)
        d->cutting.active += weight[i] > 0;
    d->cutting.fewest = TLY_MANY;
    if (!err && !op->call->reduces)
        d->cutting.fewest = tly_plan_broadcast_fewest(op->bytes, d->cutting.active);
    if (!err)
        tly_dealer_init_at(d->others, e->services, weight, op->key);
    free(machine);
    free(weight);
    return err;
}

/* The home depends on the name alone (or on its place in a plan), never on the spec: ranks that disagree on
 * the spec must meet there.  The rest depends on the size, the root and the epoch too, and on nothing that this rank did
 * before. */
const struct tly_cut *tly_tensor_cut(tally_comm *c, const struct tally_op *op, uint64_t bytes)
{
    struct tly_tensor *t = op->tensor;
    struct tly_epoch *e = op->epoch;
    uint32_t root = tensor_root_decides(c, op) ? op->root + 1 : 0;
    if (t->plan_list && (!t->plan.pieces || t->plan.epoch != e->number) &&
        tensor_deal_plan(c, t->plan_list, e) != 0)
        return NULL;
    if (t->plan_list && t->plan.bytes == bytes)
        return &t->plan;
    uint64_t digest = tly_spec_digest(&op->spec);
    if (t->cut.pieces && t->cut.bytes == bytes && t->cut.digest == digest && t->cut.epoch == e->number &&
        t->cut.root == root)
        return &t->cut;
    struct tly_dealer d, others;
    struct dealt dealt = {&d, root ? &others : &d, tensor_cutting(e)};
    struct tly_stretch alone = {.bytes = bytes};
    struct placed placed = {bytes ? tly_spec_ranges(op) : NULL, tly_reduce_element_size(op->dtype)};
    tly_dealer_init_at(&d, e->services, e->weight, t->key);
    if ((root && tensor_plan_for_root(c, op, &dealt) != 0) ||
        tensor_make_cut(c, &alone, &placed, e, &dealt, &t->cut) != 0)
        return NULL;
    t->cut.digest = digest;
    t->cut.root = root;
    if (t->plan_list)
        t->cut.pieces[0].owner = t->plan.pieces[0].owner;
    return &t->cut;
}

/* A tensor is of the block in whose sixteenth of the list's bytes it begins.  A block's tensors have one urgency, and so go in
 * the order in which they are submitted. */
enum { BLOCKS = 16 };

/* The highest priority in this item's block. */
static int32_t tensor_of_block(const struct tly_list_plan *list, size_t item)
{
    const struct tly_list_item *p = list->item;
    size_t from = item, to = item;
    while (from > 0 && p[from - 1].block == p[item].block)
        from--;
    while (to + 1 < list->count && p[to + 1].block == p[item].block)
        to++;
    int32_t most = p[from].tensor->priority;
    for (size_t i = from + 1; i <= to; i++)
        most = p[i].tensor->priority > most ? p[i].tensor->priority : most;
    return most;
}

/* Gradients are: the last of a list, which the next step needs first, is the most urgent, so that of all that waits it goes
 * first.  Then a tensor's parts go from their end, too, and the list's small ones are again the first and the last. */
bool tly_tensor_line_up(struct tally_op *op)
{
    struct tly_tensor *t = op->tensor;
    const struct tly_list_plan *list = t->plan_list;
    if (!op->mark) /* a refusal has no priority */
        t->priority = op->priority;
    bool backwards = list && list->item[0].tensor->priority < list->item[list->count - 1].tensor->priority;
    op->urgency = backwards ? tensor_of_block(list, t->item) : op->priority;
    return backwards;
}

int tly_tensor_plan(tally_comm *c, uint32_t kind, uint32_t space, size_t count, const char *const names[],
                    const uint64_t bytes[])
{
    struct tly_list_plan *plan = calloc(1, sizeof *plan + count * sizeof *plan->item);
    if (!plan)
        return tly_fail(ENOMEM, "out of memory");
    for (; plan->count < count; plan->count++) {
        struct tly_list_item *p = &plan->item[plan->count];
        p->bytes = bytes[plan->count];
        p->tensor = tly_tensor_get(c, tly_comm_all(c), kind, space, names[plan->count]);
        if (!p->tensor) {
            free(plan);
            return -ENOMEM;
        }
    }
    double all = 0, before = 0; /* the caller's numbers may be of any size */
    for (size_t i = 0; i < count; i++)
        all += (double)bytes[i];
    plan->users = 1; /* while it is made */
    for (size_t i = 0; i < count; i++) {
        struct tly_tensor *t = plan->item[i].tensor;
        plan->item[i].block = all > 0 ? (uint32_t)(before / all * BLOCKS) : 0;
        before += (double)bytes[i];
        t->item = i;
        if (t->plan_list != plan) {
            tly_tensor_leave_plan(t);
            t->plan_list = plan;
            plan->users++;
        }
        free(t->plan.pieces);
        free(t->cut.pieces); /* its home may have moved */
        t->plan = t->cut = (struct tly_cut){0};
    }
    if (--plan->users == 0)
        free(plan); /* of no tensors */
    return 0;
}
