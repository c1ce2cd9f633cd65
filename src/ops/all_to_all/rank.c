/* rank.c - an all-to-all, gather or scatter, at a rank. */
#include "comm/comm.h"
#include "comm/group.h"
#include "comm/op.h"
#include "comm/part.h"
#include "comm/parts.h"
#include "ops/call.h"

/* Part 0 carries the table, which home compares with the others'. */
static int table_cut(tally_comm *c, struct tally_op *op)
{
    int err = tly_parts_roll_call(c, op);
    if (err)
        return err;
    op->parts[0].input = (const uint8_t *)op->table;
    op->parts[0].length = (uint32_t)(2 * sizeof *op->table) * (uint32_t)op->group->size;
    op->parts[0].dtype = TALLY_INT64;
    return tly_parts_exchange(c, op, op->table);
}

const struct tly_call tly_call_alltoall = {
    .cut = table_cut,
    .function = "tally_alltoall",
    .collective = "all_to_all",
    .pieces = true,
    .paired = true,
    .moves = true};

const struct tly_call tly_call_gather = {
    .cut = table_cut,
    .function = "tally_gather",
    .collective = "gather",
    .root = "to",
    .pieces = true,
    .paired = true,
    .moves = true};

const struct tly_call tly_call_scatter = {
    .cut = table_cut,
    .function = "tally_scatter",
    .collective = "scatter",
    .root = "from",
    .pieces = true,
    .paired = true,
    .moves = true};
