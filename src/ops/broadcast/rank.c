/* rank.c - a broadcast, at a rank.
 *
 * It goes the way of an all-reduce.  A rank that only receives pushes an empty frame for each part (TLY_REQUEST), and the
 * service answers it with the root's data.  The services of the receivers' machines relay (tly_plan_broadcast).
 *
 * Where the ranks of a machine are a team, one of them asks for a part, and all of them get it (comm/path/team.c). */
#include <stddef.h>

#include "comm/comm.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/path/parts.h"
#include "comm/path/team.h"
#include "ops/call.h"
#include "ops/local.h"

/* Its one buffer is the output. */
static unsigned broadcast_needs(const tally_comm *c, const struct tly_request *r)
{
    return TLY_CALL_OUTPUT;
}

/* The root pushes and wants nothing back; the others ask. */
static int broadcast_cut(tally_comm *c, struct tally_op *op)
{
    int err = tly_parts_whole(c, op);
    for (uint32_t i = 0; i < op->part_count && !err; i++) {
        if (op->root == (uint32_t)c->rank)
            op->parts[i].result_length = 0;
        else
            op->parts[i].input = NULL;
    }
    return err;
}

/* A smaller one is there before a team has met (docs/why/comm.md). */
enum { BROADCAST_TEAM_BYTES = 64 << 10 };

static bool broadcast_teams(const struct tally_op *op)
{
    return op->bytes >= BROADCAST_TEAM_BYTES;
}

static void broadcast_takes(const struct tly_local_view *v, struct tly_local_take take[])
{
    if (v->me != v->root)
        take[v->root].bytes = v->given[v->root];
}

static const struct tly_local_call broadcast_local = {
    .givers = TLY_ROOT_GIVES, .spreads = true, .takes = broadcast_takes};

const struct tly_call tly_call_broadcast = {
    .needs = broadcast_needs,
    .teams = broadcast_teams,
    .cut = broadcast_cut,
    .function = "tally_broadcast",
    .local = &broadcast_local,
    .collective = "broadcast",
    .root = "from",
    .shaped = true,
    .moves = true};
