/* team.c - the stage of a team: the ranks of a machine push the sum of their inputs once, and receive other ranks' data once.
 *
 * A carrier acts for its machine.  A list has one carrier of each machine, so to the services it is a group: they sum, answer and
 * redo the carriers' pushes as those of a group's ranks (op/carriers.c).  Each part but part 0 has a list:
 *
 *   all-reduce      the lists in turn, so that all ranks of a machine carry as much
 *   reduce          lists with the root
 *   reduce-scatter  lists with the rank that gets the part
 *   broadcast       lists with the root
 *   all-gather      lists with the rank that gives the part
 *
 * Sums keep the bits that they have without teams.  Each machine's sum is a node of the tree over ranks, or the services add the
 * carriers' sums along the tree over machines in both cases (src/ops/all_reduce/service.c).  A group whose machines are no such
 * nodes pushes once a rank.
 *
 * Part 0 is empty, or has an all-gather's list.  Every rank pushes it for itself: it is a roll call.  So the tensor's home sees
 * all ranks' specs, marks and absences, and all ranks get its verdicts.
 *
 * Sums.  The thread "tally-local" sums the inputs of the machine's ranks, about a credit ahead of what the network has admitted
 * (team_may_sum in src/local/team.c): into the carrier's output, or into a block if the carrier gets no result there (blocks.c).
 * Then the part goes on to the network (tly_team_summed).  The result of an all-reduce lands in the carrier's output, and the
 * engine copies it to the other ranks (tly_local_landed).
 *
 * GPUs in groups.  They sum, and the engine needs no input on the host.  The carrier's memory is the device stage's (stager.c).
 *
 * Broadcasts and gatherings.  The rank that gives a part copies it to its machine's other ranks and pushes it.  A carrier on
 * another machine asks for it, and the engine copies what lands to the machine's other ranks.  An all-gather enters the engine
 * once it is cut.
 *
 * An operation ends once the engine is done with it (team_stage_ended) and this rank need not keep any part that it carries.  If
 * it ends with an error, it takes its buffers back first (tly_local_withdraw). */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/list.h"
#include "base/log.h"
#include "comm/comm.h"
#include "comm/epoch/epoch.h"
#include "comm/op/carriers.h"
#include "comm/op/group.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/op/tensor.h"
#include "comm/path/chain.h"
#include "comm/path/engine.h"
#include "comm/path/stage.h"
#include "comm/path/team.h"
#include "local/gpus.h"
#include "local/local.h"
#include "local/segment.h"
#include "membership/roster.h"
#include "plan/cut.h"

static struct tly_part *team_stage_part(struct tly_local_piece *piece)
{
    return tly_list_entry(piece, struct tly_part, shard.piece);
}

static bool team_stage_carries(const struct tly_part *p)
{
    return p->shard.piece.op != NULL;
}

/* --- opened ---------------------------------------------------------------------------------------- */

int tly_team_begin(tally_comm *c)
{
    const struct tly_roster *r = &c->member.roster;
    struct tly_seats *seats = &c->teams.seats;
    /* A coordinator that is a process of its own has settings of its own. */
    if (c->machines < 2 || c->machines == c->size || strcmp(c->params.local, "on") != 0)
        return 0;
    seats->ranks = (uint32_t)c->size;
    seats->machines = (uint32_t)c->machines;
    seats->rank = calloc(seats->ranks, sizeof *seats->rank);
    for (uint32_t i = 0; seats->rank && i < seats->ranks; i++)
        seats->rank[i] = (struct tly_seat){r->ranks[i].machine, r->ranks[i].local_rank};
    if (!seats->rank || tly_group_have_carriers(c) != 0)
        return tly_fail(ENOMEM, "out of memory");
    c->teams.sums = r->teams;
    return 0;
}

void tly_team_finish(tally_comm *c)
{
    free(c->teams.seats.rank);
}

int tly_team_agree(tally_comm *c)
{
    /* 2: this rank reaches the private memory of its machine's ranks.  1: it shares memory, but must stage whole tensors, for
     * which a gathered result may be too large.  0: it shares no memory. */
    uint8_t able = !c->local ? 0 : tly_local_direct(c->local) ? 2 : 1, all = 0;
    tally_op *op;
    if (!tly_teams_are_listed(&c->teams))
        return 0;
    int err = tally_push_pull(c, "all machines' ranks share memory", &able, &all, 1, TALLY_UINT8, TALLY_MIN,
                              NULL, &op);
    if (err)
        return err;
    err = tally_op_wait(op, -1);
    tally_op_free(op);
    c->teams.on = !err && all > 0;
    c->teams.gathers = !err && all > 1;
    if (!err && !all)
        tly_log(c->rank == 0 ? TALLY_LOG_WARNING : TALLY_LOG_DEBUG, "comm",
                "the ranks of some machine cannot share memory: each rank sends its own tensors over the "
                "network");
    return err;
}

/* --- a stage of an operation -------------------------------------------------------------------------------- */

/* Copies each part to the memory that an earlier stage has for it. */
static void team_stage_spread_pieces(const struct tally_op *op)
{
    for (uint32_t i = 1; i < op->part_count; i++) {
        const struct tly_shard *s = &op->parts[i].shard;
        if (!s->piece.from)
            memcpy(s->landing, op->shared.result + s->piece.place, s->piece.length);
    }
}

static void team_stage_ended(struct tally_op *op, int err, const char *sentence)
{
    if (!err && op->shared.result && !op->call->reduces)
        team_stage_spread_pieces(op);
    if (err)
        tly_stage_lost(op, err, sentence);
    else
        tly_stage_over(op, STAGE_TEAM);
}

/* The home of the tensor knows the reason, too.  Its verdict ends the operation. */
static void team_stage_diverted(struct tally_op *op)
{
}

static const struct tly_engine_user team_user = {.ended = team_stage_ended, .diverted = team_stage_diverted};

/* A group rounds its sum of a 16-bit type once, so its machines must not round sums of their own. */
static bool team_stage_sums(const tally_comm *c, const struct tally_op *op)
{
    bool sixteen_bit = op->dtype == TALLY_FLOAT16 || op->dtype == TALLY_BFLOAT16;
    if (op->group->number == 0)
        return tly_teams_push(&c->teams);
    return c->teams.on && op->group->carriers->sums && !sixteen_bit;
}

static bool team_stage_suits(const tally_comm *c, const struct tally_op *op)
{
    return op->group->carriers && !op->mark && op->call->teams && op->call->teams(op) &&
           (op->call->reduces ? team_stage_sums(c, op) : c->teams.gathers);
}

static void team_stage_take(tally_comm *c, struct tally_op *op)
{
    tly_sharing_take(&op->shared, c->local, &team_user);
    tly_local_ref(c->local);
    tly_names_count_engine_op(&c->names);
    tly_comm_describe_local(op);
    tly_list_init(&op->shared.op.node);
    tly_list_init(&op->shared.op.pieces);
    tly_list_init(&op->shared.op.landed);
}

/* The list of a whole tensor's part, the turn-th that goes to its service.  The ranks of a machine carry parts in turn, so each
 * has an equal share of the work and of the card.  If the tensor has a root, the root carries all parts on its machine. */
static uint32_t team_stage_carriers(const tally_comm *c, const struct tally_op *op, uint32_t turn, bool *ours)
{
    const struct tly_carriers *k = op->group->carriers;
    if (op->call->root)
        return tly_team_carriers(op, op->root, turn, ours);
    unsigned list = turn % (unsigned)k->lists;
    *ours = tly_carriers_have(k, list, (uint32_t)c->rank);
    return k->number[list];
}

/* Credit of an all-reduce: that of each list that this rank is in, so that all machines have as much in flight, however many ranks
 * they have.  A reduce and a broadcast have one credit, as a reduce-scatter has: more would not make them faster (docs/why/comm.md). */
static uint64_t team_stage_credit(const tally_comm *c, const struct tally_op *op, uint64_t credit)
{
    const struct tly_carriers *k = op->group->carriers;
    bool told = c->params.credit_bytes != 0;
    if (told || op->call->root)
        return credit;
    return tly_plan_list_credit(credit, (unsigned)k->lists, op->epoch->part_bytes) *
           tly_carriers_lists_of(k, (uint32_t)c->rank);
}

/* The machine's first rank tells the others in which order GPUs sum parts. */
static bool team_stage_lists_cut(const tally_comm *c, const struct tally_op *op)
{
    return c->local_rank == 0 && c->local && tly_gpus_device(c->local) && tly_call_is_sum_for_all(op->call);
}

static uint8_t team_stage_carrier(const tally_comm *c, const struct tally_op *op, uint32_t turn)
{
    const struct tly_carriers *k = op->group->carriers;
    return (uint8_t)c->teams.seats.rank[tly_carriers_list(k, turn % (unsigned)k->lists)[k->own]].place;
}

/* A part that another rank of this machine carries counts as landed here. */
static int team_stage_cut(tally_comm *c, struct tally_op *op, const struct tly_cut *cut)
{
    static const uint8_t nothing;
    uint32_t *turn = calloc((size_t)op->epoch->services, sizeof *turn), mine = 0;
    op->parts = calloc(1 + (size_t)cut->count, sizeof *op->parts);
    if (team_stage_lists_cut(c, op))
        op->shared.op.cut = op->shared.cut = calloc(cut->count, sizeof *op->shared.cut);
    if (!turn || !op->parts || (team_stage_lists_cut(c, op) && !op->shared.cut)) {
        free(turn);
        return -ENOMEM;
    }
    op->part_count = 1 + cut->count;
    op->credit = team_stage_credit(c, op, cut->credit);
    op->parts[0] =
        (struct tly_part){.op = op,
                          .input = &nothing,
                          .owner = tly_epoch_owner(c, op->epoch, op->key, 0, cut->pieces[0].owner),
                          .group = op->group->number,
                          .dtype = op->dtype,
                          .root = op->call->reduces ? 0 : op->root};
    bool backwards = tly_tensor_line_up(op);
    op->shared.op.priority = op->urgency; /* the engine sums in the order in which the network sends */
    /* All ranks compute the same carriers.  Each sends its parts in its own order. */
    for (uint32_t i = 0; i < cut->count; i++) {
        struct tly_part *p = &op->parts[i + 1];
        const struct tly_cut_piece *piece = &cut->pieces[i];
        bool ours;
        uint32_t at = turn[piece->owner]++ + piece->owner, list = team_stage_carriers(c, op, at, &ours);
        if (op->shared.cut)
            op->shared.cut[backwards ? cut->count - 1 - i : i] = (struct tly_local_part){
                .place = piece->place, .length = piece->length, .carrier = team_stage_carrier(c, op, at)};
        *p = (struct tly_part){
            .op = op,
            .state = ours ? PART_IDLE : PART_LANDED,
            .input = op->input + piece->place,
            .landing = op->output + piece->place,
            .place = piece->place,
            .index = i + 1,
            .order = backwards ? cut->count - i : i + 1,
            .number = i + 1,
            .group = list,
            .length = piece->length,
            .result_length = piece->length,
            .owner = tly_epoch_owner(c, op->epoch, op->key, i + 1, piece->owner),
            .dtype = op->dtype,
            .root = op->call->reduces ? (uint32_t)op->group->size - 1 : op->root,
            .scaled = op->call->reduces};
        tly_team_share(p, piece->place, backwards);
        mine += ours;
    }
    free(turn);
    op->shared.op.parts = cut->count;
    tly_progress_begin(&op->progress, 1 + mine); /* the roll call and ours */
    return 0;
}

int tly_team_machines(const struct tally_op *op)
{
    return op->group->carriers->machines;
}

bool tly_team_gathers(const struct tally_op *op)
{
    return tly_chain_has(&op->chain, STAGE_TEAM) && !op->call->reduces;
}

uint32_t tly_team_carriers(const struct tally_op *op, uint32_t rank, uint32_t turn, bool *ours)
{
    const tally_comm *c = op->comm;
    const struct tly_carriers *k = op->group->carriers;
    unsigned list = tly_carriers_with(k, &c->teams.seats, rank, turn);
    *ours = tly_carriers_have(k, list, (uint32_t)c->rank);
    return k->number[list];
}

void tly_team_share(struct tly_part *p, uint64_t place, bool first)
{
    struct tly_local_op *whole = &p->op->shared.op;
    p->shard.piece = (struct tly_local_piece){.place = place, .length = p->length};
    if (p->state == PART_LANDED)
        return;
    p->shard.piece.op = whole;
    tly_list_init(&p->shard.piece.node);
    tly_list_append(first ? whole->pieces.next : &whole->pieces, &p->shard.piece.node);
}

void tly_team_shared(struct tally_op *op, uint32_t parts, uint64_t bytes, uint64_t ahead)
{
    op->shared.op.parts = parts;
    op->shared.op.bytes = bytes;
    op->shared.op.ahead = ahead;
}

/* --- sums that are not for all ------------------------------------------------------------------------------- */

/* The rank that gets a part of a reduce or reduce-scatter sums into its output.  The carriers on other machines have none: their
 * sums lie in blocks (blocks.c) until no service can ask for them again. */

static bool team_stage_is_for_all(const struct tally_op *op)
{
    return !op->call->reduces || tly_call_is_sum_for_all(op->call);
}

static bool team_stage_lies_in_block(const struct tly_part *p)
{
    return team_stage_carries(p) && p->quiet && !team_stage_is_for_all(p->op);
}

static void team_stage_plan_blocks(struct tally_op *op)
{
    uint32_t count = 0, longest = 0;
    for (uint32_t i = 0; i < op->part_count; i++)
        if (team_stage_lies_in_block(&op->parts[i])) {
            longest = op->parts[i].length > longest ? op->parts[i].length : longest;
            count++;
        }
    tly_blocks_plan(&op->shared.blocks, count, longest, op->credit);
}

static void team_stage_settled(struct tly_part *p)
{
    uint8_t *block = team_stage_lies_in_block(p) ? p->shard.piece.sum : NULL;
    p->shard.piece.sum = NULL;
    if (block && tly_blocks_give(&p->op->shared.blocks, block))
        tly_local_made_room(p->op->shared.engine);
}

/* --- the way out and back ------------------------------------------------------------------------------------ */

static int team_stage_begin(tally_comm *c, struct tally_op *op)
{
    if (op->call->reduces)
        op->shared.op.ahead = op->credit;
    if (!team_stage_is_for_all(op))
        team_stage_plan_blocks(op);
    return 0;
}

/* The all-gather's list is here.  The operation enters the engine with its last part, or never if it is small. */
static int team_stage_more(tally_comm *c, struct tally_op *op)
{
    op->shared.coming = op->shared.op.parts;
    return 0;
}

static void team_stage_enter(struct tally_op *op)
{
    op->shared.entered = true;
    tly_local_enter(op->shared.engine, &op->shared.op);
}

/* Does a stage before this one give each piece's parts memory of their own? */
static bool team_stage_is_scattered(const struct tally_op *op)
{
    return op->call->pieces && tly_chain_has_before(&op->chain, STAGE_TEAM);
}

/* Where the machine's other ranks read the whole input. */
static int team_stage_place_input(struct tally_op *op)
{
    const struct tly_part *first = &op->parts[1];
    op->shared.op.input = first->input - first->shard.piece.place;
    if (!team_stage_is_scattered(op))
        return 0;
    op->shared.result = malloc(op->bytes);
    for (uint32_t i = 1; op->shared.result && i < op->part_count; i++)
        memcpy(op->shared.result + op->parts[i].shard.piece.place, op->parts[i].input, op->parts[i].length);
    op->shared.op.input = op->shared.result;
    return op->shared.result ? 0 : -ENOMEM;
}

/* Part 0 comes last.  Then the whole input is there, the other ranks may read it, and the engine sums parts in its own order. */
static int team_stage_ready_sum(struct tly_part *p)
{
    struct tally_op *op = p->op;
    bool for_all = team_stage_is_for_all(op);
    if (p->index > 0) {
        if (!for_all && team_stage_carries(p) && !p->quiet)
            p->shard.piece.sum = p->landing;
        return 0;
    }
    op->shared.op.input = op->input;
    op->shared.op.output = op->output;
    if (!op->shared.op.gpu) {
        op->shared.op.output = for_all ? op->parts[1].landing - op->parts[1].place : NULL;
        if (team_stage_place_input(op) != 0)
            return -ENOMEM;
    }
    team_stage_enter(op);
    return 1;
}

/* Where the whole result lies. */
static int team_stage_place_pieces(struct tally_op *op)
{
    const struct tly_part *first = &op->parts[1];
    bool staged = team_stage_is_scattered(op);
    if (staged)
        op->shared.result = malloc(op->shared.op.bytes);
    op->shared.op.output = staged ? op->shared.result : first->landing - first->shard.piece.place;
    return op->shared.op.output ? 0 : -ENOMEM;
}

static int team_stage_ready_piece(struct tly_part *p)
{
    struct tally_op *op = p->op;
    bool list = p->index == 0 && op->part_count == 1; /* it goes first */
    if (list || !op->shared.op.parts)
        return 1;
    if (p->index > 0) {
        p->shard.landing = p->landing;
        p->shard.piece.from = p->input;
        if (!op->shared.coming || --op->shared.coming > 0)
            return 0;
    }
    int err = team_stage_place_pieces(op);
    if (!err)
        team_stage_enter(op);
    return err ? err : p->index == 0;
}

static int team_stage_ready(tally_comm *c, struct tly_part *p)
{
    return p->op->call->reduces ? team_stage_ready_sum(p) : team_stage_ready_piece(p);
}

/* The engine may prepare another part once this one is admitted.  A part that was asked for makes room when it lands. */
static void team_stage_admitted(struct tly_part *p)
{
    if (team_stage_carries(p) && (p->op->call->reduces || p->shard.piece.from))
        tly_local_sent(p->op->shared.engine, &p->shard.piece);
}

/* The engine copies a result to the machine's other ranks, unless they have it.  True: the part need not wait for the engine. */
static bool team_stage_landed(tally_comm *c, struct tly_part *p)
{
    struct tly_local *engine = p->op->shared.engine;
    if (p->index == 0 || !p->op->shared.op.parts)
        return true;
    tly_local_sent(engine, &p->shard.piece);
    /* The service has it, or the result is where it belongs, which may be later than all is done here. */
    if (p->shard.piece.from || !team_stage_is_for_all(p->op))
        return tly_chain_has_ended(&p->op->chain, STAGE_TEAM);
    tly_local_landed(engine, &p->shard.piece);
    return false;
}

static void team_stage_withdraw(tally_comm *c, struct tally_op *op, bool over)
{
    if (!over)
        return;                /* the other ranks of the team end it by home's verdict */
    if (!op->shared.entered) { /* a round in shared memory ends once all ranks have posted it */
        op->shared.op.mark |= !op->call->reduces;
        team_stage_enter(op);
    }
    if (!tly_chain_has_ended(&op->chain,
                             STAGE_TEAM)) /* the engine may still work on it, or be about to end it */
        tly_local_withdraw(op->shared.engine, &op->shared.op);
    for (uint32_t i = 0; i < op->part_count; i++)
        if (team_stage_carries(&op->parts[i]))
            tly_local_sent(op->shared.engine, &op->parts[i].shard.piece);
    if (op->shared.op.borrowed)
        tly_pool_free(op->shared.op.borrowed);
    op->shared.op.borrowed = NULL;
    tly_blocks_finish(&op->shared.blocks);
    free(op->shared.result);
    free(op->shared.cut);
    op->shared.result = NULL;
    op->shared.cut = NULL;
}

const struct tly_stage tly_stage_team = {
    .does = "waits for its turn, or for other ranks of this machine",
    .shared = true,
    .suits = team_stage_suits,
    .take = team_stage_take,
    .cut = team_stage_cut,
    .begin = team_stage_begin,
    .more = team_stage_more,
    .ready = team_stage_ready,
    .admitted = team_stage_admitted,
    .landed = team_stage_landed,
    .settled = team_stage_settled,
    .withdraw = team_stage_withdraw};

/* --- said by the engine -------------------------------------------------------------------------- */

void tly_team_summed(void *comm, struct tly_local_piece *piece)
{
    struct tly_part *p = team_stage_part(piece);
    if (team_stage_is_for_all(p->op))
        p->landing = piece->op->sums + piece->place;
    else
        p->input = piece->sum;
    if (tly_call_is_sum_for_all(p->op->call))
        p->input = p->landing;
    else if (
        piece->from) /* a staged result is copied over the caller's data, which services would still read */
        p->input = piece->op->borrowed ? p->landing : piece->from;
    tly_stage_passed(p);
}

uint8_t *tly_team_place(void *comm, struct tly_local_piece *piece)
{
    tally_comm *c = comm;
    int err;
    uint8_t *block =
        tly_blocks_take(&team_stage_part(piece)->op->shared.blocks, tly_local_segment(c->local), &err);
    if (!err)
        return block;
    char sentence[TLY_SENTENCE];
    snprintf(sentence, sizeof sentence, "no room for a sum of this machine's ranks: %s", tly_error());
    tly_inbox_break(&c->inbox, -err, sentence);
    tly_loop_wake(&c->loop);
    return NULL;
}
