/* rank.c - sums, at a rank: all-reduce, also of ranges of a buffer, reduce, reduce-scatter.
 *
 * A rank that pushes and does not want the result says so (TLY_QUIET), and its answer is empty: in a reduce, and in a
 * reduce-scatter for the parts that belong to another rank.
 *
 * In a team, one rank of each machine pushes the sum of its machine's inputs for a part (comm/path/team.c).  The root
 * of a reduce pushes all parts of its machine, to all services.  The rank that gets a part of a reduce-scatter pushes it for its
 * machine. */
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "comm/comm.h"
#include "comm/op/group.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/op/spec.h"
#include "comm/path/parts.h"
#include "comm/path/team.h"
#include "comm/submit.h"
#include "ops/call.h"
#include "ops/local.h"
#include "reduce/reduce.h"

static bool reduce_sum_spares(uint32_t root)
{
    return true;
}

static const struct tly_local_call sum_local = {.reduces = true, .spares = reduce_sum_spares};

static bool reduce_teams(const struct tally_op *op)
{
    return op->bytes >= TLY_TEAM_BYTES;
}

const struct tly_call tly_call_push_pull = {
    .teams = reduce_teams,
    .cut = tly_parts_whole,
    .function = "tally_push_pull",
    .local = &sum_local,
    .collective = "all_reduce",
    .reduces = true,
    .shaped = true,
    .placed = true,
    .moves = true};

/* --- of ranges ------------------------------------------------------------------------------------ */

/* The operation's own state is a copy of the caller's list. */
static int ranges_furnish(tally_comm *c, struct tally_op *op, const struct tly_request *r)
{
    struct tly_ranges *own = tly_op_own(op);
    size_t bytes = r->ranges.count * sizeof *own->list;
    if (!bytes)
        return 0;
    own->list = malloc(bytes);
    if (!own->list)
        return -ENOMEM;
    memcpy(own->list, r->ranges.list, bytes);
    own->count = r->ranges.count;
    return 0;
}

static void ranges_release(struct tally_op *op)
{
    struct tly_ranges *own = tly_op_own(op);
    free(own->list);
}

static const struct tly_ranges *ranges_of(const struct tally_op *op)
{
    return tly_op_own(op);
}

/* A team's way in shared memory is all that it has there: it is no collective of one machine's ranks. */
const struct tly_call tly_call_push_pullv = {
    .local = &sum_local,
    .furnish = ranges_furnish,
    .release = ranges_release,
    .ranges = ranges_of,
    .teams = reduce_teams,
    .cut = tly_parts_whole,
    .own_bytes = sizeof(struct tly_ranges),
    .function = "tally_push_pullv",
    .reduces = true,
    .moves = true};

/* --- to one rank, or a piece to each ------------------------------------------------------------- */

static void reduce_gets(const struct tly_local_view *v, struct tly_local_range range[])
{
    range[v->root].bytes = v->given[v->root];
}

static const struct tly_local_call reduce_local = {.reduces = true, .gets = reduce_gets};

/* Only the root wants the result. */
static unsigned reduce_needs(const tally_comm *c, const struct tly_request *r)
{
    return TLY_CALL_INPUT | (r->root == (uint32_t)r->group->rank ? TLY_CALL_OUTPUT : 0);
}

static int reduce_cut(tally_comm *c, struct tally_op *op)
{
    int err = tly_parts_whole(c, op);
    for (uint32_t i = 0; i < op->part_count && !err && op->root != (uint32_t)c->rank; i++) {
        struct tly_part *p = &op->parts[i];
        p->quiet = p->length > 0; /* in a team the first is a roll call, of which all want the answer */
        p->result_length = 0;
        p->landing = NULL;
    }
    return err;
}

const struct tly_call tly_call_reduce = {
    .teams = reduce_teams,
    .needs = reduce_needs,
    .cut = reduce_cut,
    .function = "tally_reduce",
    .local = &reduce_local,
    .collective = "reduce",
    .root = "to",
    .reduces = true,
    .shaped = true,
    .moves = true};

static void reduce_scatter_gets(const struct tly_local_view *v, struct tly_local_range range[])
{
    uint64_t at = 0;
    for (uint32_t i = 0; i < v->ranks; at += range[i++].bytes)
        range[i] = (struct tly_local_range){.begin = at, .bytes = (uint64_t)v->dims[i] * v->element};
}

static const struct tly_local_call reduce_scatter_local = {.reduces = true, .gets = reduce_scatter_gets};

/* Pieces are cut alike on all ranks.  The n-th parts of all pieces go before any piece's next, so that all machines'
 * cards receive all the time. */
static int reduce_scatter_pieces(tally_comm *c, struct tally_op *op)
{
    const struct tally_group *g = op->group;
    const bool team = tly_chain_has(&op->chain, STAGE_TEAM);
    size_t element = tly_reduce_element_size(op->dtype);
    uint32_t part = tly_parts_choose(op, op->bytes, team ? tly_team_machines(op) : g->size), own = 0;
    uint64_t total = 0, most = 0;
    for (int i = 0; i < g->size; i++) {
        uint64_t n = tly_parts_count((uint64_t)tly_spec_dim(&op->spec, (uint32_t)i) * element, part);
        total += n;
        most = n > most ? n : most;
    }
    int err = tly_parts_more(op, total);
    if (err)
        return err;
    struct tly_part *p = op->parts + 1;
    for (uint64_t n = 0, at = 0; n < most; n++, at += part) {
        uint64_t start = 0;
        for (int i = 0; i < g->size; i++) {
            uint64_t bytes = (uint64_t)tly_spec_dim(&op->spec, (uint32_t)i) * element;
            bool mine = i == g->rank, ours = true;
            if (at < bytes) {
                uint32_t length = tly_parts_length(at, bytes, part);
                uint32_t index = (uint32_t)(p - op->parts);
                uint32_t list = team ? tly_team_carriers(op, g->ranks[i], (uint32_t)n, &ours) : g->number;
                *p = (struct tly_part){
                    .op = op,
                    .state = ours ? PART_IDLE : PART_LANDED,
                    .landing = mine ? op->output + at : NULL,
                    .input = op->input + start + at,
                    .place = at,
                    .index = index,
                    .order = index,
                    .number = index,
                    .group = list,
                    .length = length,
                    .result_length = mine ? length : 0,
                    .owner = tly_service_of(c, g->ranks[i]),
                    .dtype = op->dtype,
                    .root = team ? (uint32_t)g->size - 1 : 0,
                    .scaled = team,
                    .quiet = !mine};
                if (team)
                    tly_team_share(p, start + at, false);
                own += ours;
                p++;
            }
            start += bytes;
        }
    }
    if (team)
        tly_team_shared(op, (uint32_t)total, op->bytes, 0);
    tly_progress_begin(&op->progress, 1 + own);
    return 0;
}

static int reduce_scatter_cut(tally_comm *c, struct tally_op *op)
{
    int err = tly_parts_roll_call(c, op);
    return err ? err : reduce_scatter_pieces(c, op);
}

const struct tly_call tly_call_reduce_scatter = {
    .teams = reduce_teams,
    .cut = reduce_scatter_cut,
    .function = "tally_reduce_scatter",
    .local = &reduce_scatter_local,
    .collective = "reduce_scatter",
    .reduces = true,
    .pieces = true,
    .moves = true};
