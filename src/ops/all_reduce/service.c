/* service.c - the rules of sums: the result is the reduction of all ranks' data, along the tree of the ranks that take part.
 *
 * The result grows as far as all inputs have come, and takes the memory of one of them.  Inputs that lie in their ranks'
 * memory are read there; if all do, the result has memory of its own.  Ranges are independent of each other, so the
 * crew may share them.  An all-reduce goes on with zeros for ranks that have joined; a reduce and the parts of a
 * reduce-scatter follow `sum`, which does not. */
#include <stddef.h>

#include "ops/rule.h"
#include "reduce/reduce.h"
#include "sum/internal.h"
#include "sum/members.h"
#include "sum/round.h"
#include "sum/session.h"
#include "sum/slot.h"

static const char *sum_check(const struct tly_frame *f, const struct tly_members *who)
{
    struct tly_reduction how = {f->dtype, f->op, who->count, f->prescale, f->postscale};
    const char *why = "unknown reduction";
    return tly_reduce_check(&how, &why) != 0 ? why : NULL;
}

/* An all-reduce goes on with zeros for ranks that have joined. */
static bool sum_spares(const struct tly_frame *f)
{
    return true;
}

static uint8_t *sum_place(const struct tly_round *r)
{
    for (uint32_t i = 0; i < r->who->count; i++) {
        const struct tly_slot *slot = &r->slots[r->who->rank[i]];
        if (!slot->loan && slot->data)
            return slot->data;
    }
    return NULL;
}

/* Do carriers push for their machines?  Then the frame's root is the number of ranks in the sum, less one. */
static bool sum_is_carried(const struct tly_round *r)
{
    return r->rule->carried && r->head.root;
}

/* Is each input the sum of all its machine's ranks, and these a node of the tree over ranks?  Of some machines they always are.
 * Sums of some of a machine's ranks are added up along the tree over machines.  So are those of 16-bit types, which are rounded on
 * each machine. */
static bool sum_has_nodes(const struct tly_job *job, const struct tly_round *r, bool sixteen_bit)
{
    return sum_is_carried(r) && !sixteen_bit && r->who->nodes && r->head.root + 1 == r->who->carried &&
           (r->who->count < job->machines || job->all->tree[0].groups == 1);
}

static void sum_advance(struct tly_job *job, struct tly_round *r, uint32_t from, uint32_t to)
{
    const struct tly_frame *h = &r->head;
    size_t element = tly_reduce_element_size(h->dtype);
    const struct tly_members *who = r->who;
    bool sixteen_bit = h->dtype == TALLY_FLOAT16 || h->dtype == TALLY_BFLOAT16;
    const struct tly_member_tree *t = &who->tree[sixteen_bit];
    struct tly_reduction how = {.dtype = h->dtype,
                                .op = h->op,
                                .divisor = sum_is_carried(r) ? h->root + 1 : who->count,
                                .prescale = h->prescale,
                                .postscale = h->postscale,
                                .from_partials = sum_has_nodes(job, r, sixteen_bit)};
    static _Thread_local const void *inputs[TLY_MAX_RANKS];
    static _Thread_local int ranks[TLY_MAX_RANKS]; /* on each input's machine */
    for (uint32_t i = 0; i < who->count; i++) {
        ranks[i] = job->machine_ranks[job->machine[t->order[i]]];
        /* A slot without data belongs to a rank that has joined.  Its state is not looked at: the loop's thread
         * changes states while a crew sums. */
        const uint8_t *data = r->slots[t->order[i]].data;
        inputs[i] = (data ? data : job->zeros) + from;
    }
    if (how.from_partials)
        tly_reduce_nodes(&how, (int)who->count, ranks, inputs, r->result + from, (to - from) / element);
    else if (t->groups == 1)
        tly_reduce(&how, (int)who->count, inputs, r->result + from, (to - from) / element);
    else
        tly_reduce_grouped(&how, t->groups, t->group_size, inputs, r->result + from, (to - from) / element);
}

const struct tly_rule tly_rule_all_reduce = {
    .name = "all-reduce",
    .streams = true,
    .divides = true,
    .borrows = true,
    .carried = true,
    .check = sum_check,
    .length = tly_rule_part_length,
    .spares = sum_spares,
    .place = sum_place,
    .advance = sum_advance,
};

const struct tly_rule tly_rule_sum = {
    .name = "sum",
    .streams = true,
    .divides = true,
    .borrows = true,
    .carried = true,
    .check = sum_check,
    .length = tly_rule_part_length,
    .place = sum_place,
    .advance = sum_advance,
};
