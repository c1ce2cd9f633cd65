/* parts.c - the parts of an operation: which bytes, from whom to whom, through which service.
 *
 * Where it sits in the flow: between submission and queue.  Each operation's room says how it is cut (cut of struct tly_call),
 * the same on all ranks.  Here is what several of them need: the parts of a whole tensor, a roll call, and pieces between two
 * ranks. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "comm/comm.h"
#include "comm/epoch/epoch.h"
#include "comm/op/group.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/op/tensor.h"
#include "comm/path/chain.h"
#include "comm/path/parts.h"
#include "ops/call.h"
#include "plan/cut.h"
#include "plan/plan.h"
#include "reduce/reduce.h"
#include "wire/frame.h"

static const uint8_t nothing;

/* The first `n` parts of a cut; lengths are the caller's. */
static int parts_of_cut(tally_comm *c, struct tally_op *op, const struct tly_cut *cut, uint32_t n)
{
    op->parts = calloc(n, sizeof *op->parts);
    if (!op->parts)
        return -ENOMEM;
    op->part_count = n;
    tly_progress_begin(&op->progress, n);
    op->credit = cut->credit;
    bool backwards = tly_tensor_line_up(op);
    for (uint32_t i = 0; i < n; i++)
        op->parts[i] = (struct tly_part){
            .op = op,
            .index = i,
            .number = i,
            .order = backwards && i
                         ? n - i
                         : i, /* the first stays first: its service names the ranks that do not come */
            .group = op->group->number,
            .owner = tly_epoch_owner(c, op->epoch, op->key, i, cut->pieces[i].owner),
            .dtype = op->dtype,
            .root = op->call->reduces ? 0 : op->root}; /* in a sum it counts a team's ranks */
    return 0;
}

int tly_parts_roll_call(tally_comm *c, struct tally_op *op)
{
    tly_names_lock(&c->names);
    const struct tly_cut *cut = tly_tensor_cut(c, op, 0);
    int err = cut ? parts_of_cut(c, op, cut, 1) : -ENOMEM;
    tly_names_unlock(&c->names);
    if (!err)
        op->parts[0].input = &nothing;
    return err;
}

static int whole_parts(tally_comm *c, struct tally_op *op, const struct tly_cut *cut)
{
    int err = parts_of_cut(c, op, cut, cut->count);
    for (uint32_t i = 0; i < cut->count && !err; i++) {
        struct tly_part *p = &op->parts[i];
        uint64_t place = cut->pieces[i].place;
        p->place = place;
        p->length = p->result_length = cut->pieces[i].length;
        p->input = op->input ? op->input + place : &nothing;
        p->landing = op->output + place;
    }
    return err;
}

int tly_parts_whole(tally_comm *c, struct tally_op *op)
{
    tly_names_lock(&c->names);
    const struct tly_cut *cut = tly_tensor_cut(c, op, op->bytes);
    int err = cut ? tly_chain_cut(c, op, cut) : -ENOMEM;
    if (err > 0)
        err = whole_parts(c, op, cut);
    tly_names_unlock(&c->names);
    return err;
}

/* On all ranks the same. */
static uint32_t parts_longest(const struct tally_op *op, uint64_t bytes, int pieces, uint32_t fewest)
{
    const struct tly_epoch *e = op->epoch;
    struct tly_stretch whole = {.bytes = bytes};
    return tly_plan_largest_part(
        &whole, &(struct tly_cutting){
                    .unit = e->part_bytes, .most = e->part_most, .active = pieces, .fewest = fewest});
}

/* Two parts for each that `abreast` are on their way to. */
static void parts_set_credit(struct tally_op *op, int abreast, uint32_t part)
{
    const tally_comm *c = op->comm;
    uint64_t usual = tly_plan_credit(op->epoch->sharing, op->epoch->part_bytes),
             suits = tly_plan_credit(abreast, part);
    op->credit = c->params.credit_bytes ? c->params.credit_bytes : suits > usual ? suits : usual;
}

uint32_t tly_parts_choose(struct tally_op *op, uint64_t bytes, int pieces)
{
    uint32_t part = parts_longest(op, bytes, pieces, TLY_MANY);
    parts_set_credit(op, pieces, part);
    return part;
}

uint32_t tly_parts_count(uint64_t bytes, uint32_t part)
{
    assert(part > 0);
    return (uint32_t)((bytes + part - 1) / part);
}

uint32_t tly_parts_length(uint64_t at, uint64_t bytes, uint32_t part)
{
    return bytes - at < part ? (uint32_t)(bytes - at) : part;
}

int tly_parts_more(struct tally_op *op, uint64_t more)
{
    char title[TLY_TITLE];
    if (more > UINT32_MAX / 2)
        return tly_fail(EINVAL, "%s: too many parts: raise TALLY_PART_BYTES", tly_op_title(op, title));
    struct tly_part *all = realloc(op->parts, (1 + more) * sizeof *all);
    if (!all)
        return tly_fail(ENOMEM, "out of memory");
    op->parts = all;
    memset(all + 1, 0, more * sizeof *all);
    op->part_count = 1 + (uint32_t)more;
    tly_progress_begin(&op->progress, op->part_count);
    return 0;
}

/* Length of the parts that one rank gives another.  If it gives each rank as much, its card sends all of that: this total
 * is cut as a tensor over one service. */
static uint32_t part_of_pair(const struct tally_op *op, uint64_t bytes)
{
    uint32_t size = (uint32_t)op->group->size;
    return parts_longest(op, bytes * size, 1, TLY_MANY * size);
}

/* The parts that one rank gives another.  They go from rank to rank in turn, beginning with our neighbour, so that not
 * all send to one machine at a time. */
static void pair_parts(tally_comm *c, struct tally_op *op, struct tly_part *p, uint32_t pair, uint64_t bytes,
                       const uint8_t *input, uint8_t *landing, int turn)
{
    uint32_t part = part_of_pair(op, bytes), n = 0;
    for (uint64_t at = 0; at < bytes; at += part, p++, n++) {
        uint32_t length = tly_parts_length(at, bytes, part);
        *p = (struct tly_part){
            .op = op,
            .landing = landing ? landing + at : NULL,
            .input = input ? input + at : NULL,
            .place = at,
            .piece = bytes,
            .index = (uint32_t)(p - op->parts),
            .order = 1 + n * 2 * (uint32_t)op->group->size + (uint32_t)turn,
            .number = 1 + n,
            .group = pair,
            .length = length,
            .result_length = landing ? length : 0,
            .owner = tly_service_of(c, tly_pair_to(pair)),
            .dtype = op->dtype,
            .root = tly_pair_from(pair)};
    }
}

/* Bytes of the piece at a place of the table; without one all pieces are as long as the input. */
static uint64_t parts_piece_bytes(const struct tally_op *op, const int64_t *table, int at)
{
    return table ? (uint64_t)table[at] * tly_reduce_element_size(op->dtype) : op->bytes;
}

int tly_parts_exchange(tally_comm *c, struct tally_op *op, const int64_t *table)
{
    const struct tally_group *g = op->group;
    uint64_t n = (uint64_t)g->size, total = 0;
    uint32_t longest = 0;
    op->pairs = calloc(2 * n + 1, sizeof *op->pairs);
    if (!op->pairs)
        return tly_fail(ENOMEM, "out of memory");
    for (int i = 0; i < g->size; i++) {
        uint64_t given = parts_piece_bytes(op, table, i), taken = parts_piece_bytes(op, table, g->size + i);
        uint32_t part = part_of_pair(op, given);
        longest = part > longest ? part : longest;
        op->pairs[2 * i] = 1 + (uint32_t)total;
        total += i != g->rank ? tly_parts_count(given, part) : 0;
        op->pairs[2 * i + 1] = 1 + (uint32_t)total;
        total += i != g->rank ? tly_parts_count(taken, part_of_pair(op, taken)) : 0;
    }
    op->pairs[2 * n] = 1 + (uint32_t)total;
    int err = tly_parts_more(op, total);
    if (err)
        return err;
    parts_set_credit(op, g->size, longest);
    uint32_t me = g->ranks[g->rank];
    const uint8_t *input = op->input;
    uint8_t *output = op->output;
    for (int i = 0; i < g->size; i++) {
        uint64_t given = parts_piece_bytes(op, table, i), taken = parts_piece_bytes(op, table, g->size + i);
        int ahead = (i - g->rank + g->size) % g->size, behind = (g->rank - i + g->size) % g->size;
        if (i != g->rank) {
            pair_parts(c, op, op->parts + op->pairs[2 * i], tly_pair(me, g->ranks[i]), given, input, NULL,
                       2 * ahead);
            pair_parts(c, op, op->parts + op->pairs[2 * i + 1], tly_pair(g->ranks[i], me), taken, NULL,
                       output, 2 * behind + 1);
        }
        input += table ? given : 0;
        output += taken;
    }
    return 0;
}

int tly_parts_make(tally_comm *c, struct tally_op *op)
{
    if (!op->mark)
        return op->call->cut(c, op);
    int err = tly_parts_roll_call(c, op);
    if (!err) {
        op->parts[0].input = NULL;
        op->parts[0].mark = true;
    }
    return err;
}
