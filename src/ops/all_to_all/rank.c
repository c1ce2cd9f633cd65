/* rank.c - an all-to-all, gather or scatter, at a rank.
 *
 * Part 0 carries the amounts that each rank gives and expects, which home compares.  The other parts are broadcasts between two
 * ranks (tly_parts_exchange).  A piece that one rank alone wants goes to the service of that rank's machine. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "comm/comm.h"
#include "comm/op/group.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/path/parts.h"
#include "comm/submit.h"
#include "ops/call.h"
#include "reduce/reduce.h"

struct exchange {
    int64_t *table; /* owned: elements for each rank of the group, then from each */
};

static int exchange_check(const tally_comm *c, const struct tly_request *r)
{
    if (16ull * (unsigned)r->group->size > c->part_least)
        return tly_fail(EINVAL,
                        "%d ranks are too many for parts of %u bytes: set TALLY_PART_BYTES to %u or more",
                        r->group->size, c->part_least, (16u * (unsigned)r->group->size + 63) / 64 * 64);
    return 0;
}

/* calls.c looks at the pieces. */
static unsigned exchange_needs(const tally_comm *c, const struct tly_request *r)
{
    return 0;
}

static int exchange_furnish(tally_comm *c, struct tally_op *op, const struct tly_request *r)
{
    struct exchange *own = tly_op_own(op);
    size_t n = (size_t)r->group->size;
    own->table = calloc(2 * n, sizeof *own->table);
    for (size_t i = 0; own->table && i < n; i++) {
        own->table[i] = r->give ? (int64_t)r->give[i] : 0;
        own->table[n + i] = r->take ? (int64_t)r->take[i] : 0;
    }
    return own->table ? 0 : -ENOMEM;
}

static void exchange_release(struct tally_op *op)
{
    struct exchange *own = tly_op_own(op);
    free(own->table);
}

/* Copy what the rank gives itself. */
static void exchange_keep(const struct tally_op *op, const int64_t *table)
{
    const struct tally_group *g = op->group;
    uint64_t element = tly_reduce_element_size(op->dtype);
    const uint8_t *input = op->input;
    uint8_t *output = op->output;
    for (int i = 0; i < g->rank; i++) {
        input += (uint64_t)table[i] * element;
        output += (uint64_t)table[g->size + i] * element;
    }
    uint64_t given = (uint64_t)table[g->rank] * element;
    if (table[g->rank] == table[g->size + g->rank] && given && output != input)
        memmove(output, input, given);
}

/* Part 0 carries the table, which home compares with the others'. */
static int exchange_cut(tally_comm *c, struct tally_op *op)
{
    const struct exchange *own = tly_op_own(op);
    int err = tly_parts_roll_call(c, op);
    if (err)
        return err;
    struct tly_part *p = &op->parts[0];
    p->input = (const uint8_t *)own->table;
    p->length = (uint32_t)(2 * sizeof *own->table) * (uint32_t)op->group->size;
    p->dtype = TALLY_INT64;
    exchange_keep(op, own->table);
    return tly_parts_exchange(c, op, own->table);
}

/* Facts that the three calls share. */
#define EXCHANGE \
    .own_bytes = sizeof(struct exchange), .check = exchange_check, .needs = exchange_needs, \
    .furnish = exchange_furnish, .release = exchange_release, .cut = exchange_cut, .pieces = true, \
    .paired = true, .moves = true

const struct tly_call tly_call_alltoall = {EXCHANGE, .function = "tally_alltoall",
                                           .collective = "all_to_all"};

const struct tly_call tly_call_gather = {EXCHANGE, .function = "tally_gather", .collective = "gather",
                                         .root = "to"};

const struct tly_call tly_call_scatter = {EXCHANGE, .function = "tally_scatter", .collective = "scatter",
                                          .root = "from"};
