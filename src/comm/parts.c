/* parts.c - the parts of an operation: which bytes, from whom to whom, through which service.
 *
 * Where it sits in the flow: between submission and queue.  A sum's and a broadcast's parts are the cut of their tensor
 * (tensor.c); what has pieces of its own for each rank is cut here, on all ranks alike. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "comm/comm.h"
#include "comm/epoch.h"
#include "comm/group.h"
#include "comm/op.h"
#include "comm/part.h"
#include "comm/team.h"
#include "comm/tensor.h"
#include "plan/plan.h"
#include "reduce/reduce.h"
#include "wire/frame.h"

/* What only part 0 is cut of here, so that its home is all that is asked for: the other parts are pieces, or there are none. */
static bool meets(const struct tally_op *op)
{
    return op->mark || op->call->pieces;
}

static int simple_parts(tally_comm *c, struct tally_op *op, const struct cut *cut)
{
    bool gather = op->kind == TALLY_ALLGATHER && !op->even, meet = meets(op);
    uint32_t n = meet ? 1 : cut->count;
    op->parts = calloc(n, sizeof *op->parts);
    if (!op->parts)
        return -ENOMEM;
    op->part_count = op->parts_left = n;
    op->credit = cut->credit;
    bool backwards = tly_tensor_line_up(op);
    uint64_t place = 0;
    for (uint32_t i = 0; i < n; i++) {
        struct part *p = &op->parts[i];
        p->op = op;
        p->index = p->number = i;
        p->order = backwards && i
                       ? n - i
                       : i; /* the first is always the first: its service names who does not come */
        p->group = op->group->number;
        p->owner = tly_epoch_owner(c, op->epoch, op->key, i, cut->pieces[i].owner);
        p->dtype = op->dtype;
        p->root = op->root;
        p->mark = op->mark;
        if (op->mark)
            continue;
        if (gather) {
            op->gather.first_dim = op->ndim ? op->shape[0] : 1;
            p->input = (const uint8_t *)&op->gather.first_dim;
            p->landing = (uint8_t *)op->gather.first_dims;
            p->length = sizeof op->gather.first_dim;
            p->result_length = p->length * (uint32_t)op->group->size;
            p->dtype = TALLY_INT64;
            continue;
        }
        static const uint8_t nothing;
        if (meet) {
            const int64_t *table = tly_op_table(op);
            p->input = table ? (const uint8_t *)table : &nothing;
            p->length = table ? (uint32_t)(2 * sizeof *table) * (uint32_t)op->group->size : 0;
            p->dtype = table ? TALLY_INT64 : op->dtype;
            continue;
        }
        p->place = place;
        p->length = cut->pieces[i].length;
        place += p->length;
        p->result_length = p->length;
        p->quiet = op->kind == TALLY_REDUCE && op->root != (uint32_t)c->rank;
        if (p->quiet)
            p->result_length = 0;
        else
            p->landing = op->output + p->place;
        bool receives_only = op->kind == TALLY_BROADCAST && op->root != (uint32_t)c->rank;
        p->input = receives_only ? NULL : op->input ? op->input + p->place : &nothing;
        if (op->kind == TALLY_BROADCAST && !receives_only)
            p->result_length = 0;
    }
    return 0;
}

/* Length of the parts of so many pieces, which are `bytes` together: as in a tensor of that length over as many services. */
static uint32_t part_of_pieces(const struct tally_op *op, uint64_t bytes, int pieces)
{
    struct tly_stretch whole = {.bytes = bytes};
    return tly_plan_largest_part(&whole, op->epoch->part_bytes, pieces); /* on all ranks */
}

static uint32_t chunks(uint64_t bytes, uint32_t part)
{
    return (uint32_t)((bytes + part - 1) / part);
}

/* Length of the part that begins at byte `at` of so many. */
static uint32_t part_at(uint64_t at, uint64_t bytes, uint32_t part)
{
    return bytes - at < part ? (uint32_t)(bytes - at) : part;
}

/* Room for `more` parts behind the first. */
static int more_parts(struct tally_op *op, uint64_t more)
{
    char title[TLY_TITLE];
    if (more > UINT32_MAX / 2)
        return tly_fail(EINVAL, "%s: too many parts: raise TALLY_PART_BYTES", tly_op_title(op, title));
    struct part *all = realloc(op->parts, (1 + more) * sizeof *all);
    if (!all)
        return tly_fail(ENOMEM, "out of memory");
    op->parts = all;
    memset(all + 1, 0, more * sizeof *all);
    op->part_count = op->parts_left = 1 + (uint32_t)more;
    return 0;
}

/* Pieces are cut alike on all ranks.  The n-th parts of all pieces go before any piece's next, so that all machines'
 * cards receive all the time. */
static int scatter_parts(tally_comm *c, struct tally_op *op)
{
    const struct tally_group *g = op->group;
    size_t element = tly_reduce_element_size(op->dtype);
    uint32_t part = part_of_pieces(op, op->bytes, g->size);
    uint64_t total = 0, most = 0;
    for (int i = 0; i < g->size; i++) {
        uint64_t n = chunks((uint64_t)op->shape[i] * element, part);
        total += n;
        most = n > most ? n : most;
    }
    int err = more_parts(op, total);
    if (err)
        return err;
    struct part *p = op->parts + 1;
    for (uint64_t n = 0, at = 0; n < most; n++, at += part) {
        uint64_t start = 0;
        for (int i = 0; i < g->size; i++) {
            uint64_t bytes = (uint64_t)op->shape[i] * element;
            bool mine = i == g->rank;
            if (at < bytes) {
                uint32_t length = part_at(at, bytes, part);
                uint32_t index = (uint32_t)(p - op->parts);
                *p++ = (struct part){
                    .op = op,
                    .landing = mine ? op->output + at : NULL,
                    .input = op->input + start + at,
                    .place = at,
                    .index = index,
                    .order = index,
                    .number = index,
                    .group = g->number,
                    .length = length,
                    .result_length = mine ? length : 0,
                    .owner = tly_service_of(c, g->ranks[i]),
                    .dtype = op->dtype,
                    .quiet = !mine};
            }
            start += bytes;
        }
    }
    return 0;
}

/* A message goes through the receiver's machine.  A large one is offered first, so that one that nobody receives yet
 * takes no memory there. */
static int message_parts(tally_comm *c, struct tally_op *op)
{
    bool probe = op->kind == TLY_PROBE, mine = !probe && op->message.from == (uint32_t)c->rank;
    uint64_t bytes = probe ? sizeof op->message.found : op->bytes;
    uint32_t n = bytes ? chunks(bytes, op->epoch->part_bytes) : 1;
    static const uint8_t nothing;
    op->parts = calloc(n, sizeof *op->parts);
    if (!op->parts)
        return tly_fail(ENOMEM, "out of memory");
    op->part_count = op->parts_left = n;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t at = (uint64_t)i * op->epoch->part_bytes;
        uint32_t length = part_at(at, bytes, op->epoch->part_bytes);
        struct part *p = &op->parts[i];
        *p = (struct part){.op = op,
                           .place = at,
                           .index = i,
                           .order = i,
                           .number = i,
                           .group = tly_pair(op->message.from, op->message.to),
                           .length = length,
                           .owner = tly_service_of(c, op->message.to),
                           .dtype = probe ? TALLY_INT64 : op->dtype,
                           .root = op->message.from};
        if (mine) {
            p->input = op->input ? op->input + at : &nothing;
            p->offer = bytes > TLY_KEPT_BYTES;
        } else {
            p->landing = probe ? (uint8_t *)&op->message.found : op->output + at;
            p->result_length = length;
        }
    }
    return 0;
}

/* Length of the parts that one rank gives another.  If it gives each rank as much, its card sends all of that: this total
 * is cut as a tensor over one service. */
static uint32_t part_of_pair(const struct tally_op *op, uint64_t bytes)
{
    return part_of_pieces(op, bytes * (unsigned)op->group->size, 1);
}

/* The parts that one rank gives another.  They go from rank to rank in turn, beginning with our neighbour, so that not
 * all send to one machine at a time. */
static void pair_parts(tally_comm *c, struct tally_op *op, struct part *p, uint32_t pair, uint64_t bytes,
                       const uint8_t *input, uint8_t *landing, int turn)
{
    uint32_t part = part_of_pair(op, bytes), n = 0;
    for (uint64_t at = 0; at < bytes; at += part, p++, n++) {
        uint32_t length = part_at(at, bytes, part);
        *p = (struct part){
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

/* Bytes that the i-th of the group is given, and that it gives: of an allgather a piece each way. */
static uint64_t given_bytes(const struct tally_op *op, int i)
{
    return tly_op_table(op) ? (uint64_t)op->table[i] * tly_reduce_element_size(op->dtype) : op->bytes;
}

static uint64_t taken_bytes(const struct tally_op *op, int i)
{
    return tly_op_table(op) ? (uint64_t)op->table[op->group->size + i] * tly_reduce_element_size(op->dtype)
                            : op->bytes;
}

/* What each rank gives each other, through the receiver's machine.  Of an allgather all are given the same. */
static int exchange_parts(tally_comm *c, struct tally_op *op)
{
    const struct tally_group *g = op->group;
    uint64_t n = (uint64_t)g->size, total = 0;
    op->pairs = calloc(2 * n + 1, sizeof *op->pairs);
    if (!op->pairs)
        return tly_fail(ENOMEM, "out of memory");
    for (int i = 0; i < g->size; i++) {
        uint64_t given = given_bytes(op, i), taken = taken_bytes(op, i);
        op->pairs[2 * i] = 1 + (uint32_t)total;
        total += i != g->rank ? chunks(given, part_of_pair(op, given)) : 0;
        op->pairs[2 * i + 1] = 1 + (uint32_t)total;
        total += i != g->rank ? chunks(taken, part_of_pair(op, taken)) : 0;
    }
    op->pairs[2 * n] = 1 + (uint32_t)total;
    int err = more_parts(op, total);
    if (err)
        return err;
    uint32_t me = g->ranks[g->rank];
    const uint8_t *input = op->input;
    uint8_t *output = op->output;
    for (int i = 0; i < g->size; i++) {
        uint64_t given = given_bytes(op, i), taken = taken_bytes(op, i);
        int ahead = (i - g->rank + g->size) % g->size, behind = (g->rank - i + g->size) % g->size;
        if (i != g->rank) {
            pair_parts(c, op, op->parts + op->pairs[2 * i], tly_pair(me, g->ranks[i]), given, input, NULL,
                       2 * ahead);
            pair_parts(c, op, op->parts + op->pairs[2 * i + 1], tly_pair(g->ranks[i], me), taken, NULL,
                       output, 2 * behind + 1);
        }
        input += tly_op_table(op) ? given : 0;
        output += taken;
    }
    return 0;
}

/* Plan the services that relay the parts of these pieces.  -ENOMEM. */
static int plan_pieces(const tally_comm *c, const struct tally_op *op, const uint64_t *piece,
                       struct tly_relay *r)
{
    const struct tally_group *g = op->group;
    struct tly_plan_machine *machine = tly_tensor_machines(c, op);
    uint64_t *bytes = calloc((size_t)op->epoch->services, sizeof *bytes);
    for (int i = 0; bytes && i < g->size; i++)
        bytes[tly_service_of(c, g->ranks[i])] += piece[i];
    int err = machine && bytes ? tly_relay_init(r, op->epoch->services, machine, bytes) : -ENOMEM;
    free(machine);
    free(bytes);
    return err;
}

/* Each part is a broadcast from its owner.  As of a scatter, the n-th parts of all pieces go before any piece's next: all
 * machines' cards send and receive all the time. */
static void lay_out(tally_comm *c, struct tally_op *op, const uint64_t *piece, uint32_t part,
                    struct tly_relay *r, uint8_t *to)
{
    const struct tally_group *g = op->group;
    struct part *p = op->parts + 1;
    uint64_t most = 0;
    for (int i = 0; i < g->size; i++)
        most = piece[i] > most ? piece[i] : most;
    for (uint64_t at = 0; at < most; at += part) {
        uint8_t *start = to;
        for (int i = 0; i < g->size; start += piece[i++]) {
            if (at >= piece[i])
                continue;
            uint32_t length = part_at(at, piece[i], part);
            uint32_t index = (uint32_t)(p - op->parts);
            int service = tly_relay_next(r, tly_service_of(c, g->ranks[i]), length);
            bool mine = i == g->rank;
            *p++ = (struct part){
                .op = op,
                .landing = start + at,
                .input = mine ? op->input + at : NULL,
                .place = at,
                .index = index,
                .order = index,
                .number = index,
                .group = g->number,
                .length = length,
                .result_length = mine ? 0 : length,
                .owner = tly_epoch_owner(c, op->epoch, op->key, index, (uint16_t)service),
                .dtype = op->dtype,
                .root = g->ranks[i]};
        }
    }
}

/* So many parts of each piece may be asked for that have not landed.  With less, services run dry for a round trip.  With more
 * they have more to send to each rank than its card takes; then each connection goes at its own speed, some end early, and the
 * cards behind them idle at the end.  What waits there takes memory besides. */
enum { ROWS_AHEAD = 6 }; /* bench/goodput/cards.c has it, too */

/* Cut all ranks' pieces, which belong at `to` one behind the other. */
static int gather_parts(tally_comm *c, struct tally_op *op, const uint64_t *piece, uint8_t *to)
{
    const struct tally_group *g = op->group;
    uint64_t bytes = 0, total = 0, before = 0;
    for (int i = 0; i < g->size; i++) {
        before = i == g->rank ? bytes : before;
        bytes += piece[i];
    }
    uint32_t part = part_of_pieces(op, bytes, g->size);
    for (int i = 0; i < g->size; i++)
        total += chunks(piece[i], part);
    struct tly_relay *r = malloc(sizeof *r);
    int err = r ? plan_pieces(c, op, piece, r) : -ENOMEM;
    if (!err)
        err = more_parts(op, total);
    if (!err)
        lay_out(c, op, piece, part, r, to);
    op->ahead = ROWS_AHEAD * (uint32_t)g->size;
    free(r);
    if (!err && piece[g->rank] && to + before != op->input)
        memcpy(to + before, op->input, piece[g->rank]);
    return err;
}

/* Equal pieces of up to so many bytes go to each rank unasked, as in an alltoall: each card sends as much as it receives,
 * and the round trip of the requests would show.  Of larger pieces it does not, and a part that is asked for lands where it
 * belongs, while one that comes unasked is copied there from the service. */
enum { UNASKED_BYTES = 1 << 20 }; /* bench/goodput/cards.c has it, too */

static int even_parts(tally_comm *c, struct tally_op *op)
{
    uint8_t *own = op->output + (size_t)op->group->rank * op->bytes;
    if (op->bytes <= UNASKED_BYTES) {
        if (op->bytes && own != op->input)
            memcpy(own, op->input, op->bytes);
        return exchange_parts(c, op);
    }
    uint64_t *piece = malloc((size_t)op->group->size * sizeof *piece);
    if (!piece)
        return -ENOMEM;
    for (int i = 0; i < op->group->size; i++)
        piece[i] = op->bytes;
    int err = gather_parts(c, op, piece, op->output);
    free(piece);
    return err;
}

int tly_parts_make(tally_comm *c, struct tally_op *op)
{
    bool meet = meets(op);
    int err = 0;
    pthread_mutex_lock(&c->names_lock);
    if (op->call->message) {
        err = message_parts(c, op);
    } else {
        const struct cut *cut = tly_tensor_cut(c, op, meet ? 0 : op->bytes);
        err = !cut ? -ENOMEM : op->team ? tly_team_cut(c, op, cut) : simple_parts(c, op, cut);
    }
    pthread_mutex_unlock(&c->names_lock);
    if (err || op->mark)
        return err;
    if (op->kind == TALLY_REDUCE_SCATTER)
        return scatter_parts(c, op);
    if (op->even)
        return even_parts(c, op);
    return tly_op_table(op) ? exchange_parts(c, op) : 0;
}

/* Bytes of each rank's piece, by the list of first dimensions.  -EOVERFLOW: they are too many for memory, or for a number
 * of parts.  -ENOMEM. */
static int measure_pieces(struct tally_op *op, uint64_t **out)
{
    const struct tally_group *g = op->group;
    uint64_t row = tly_reduce_element_size(op->dtype), total = 0;
    for (uint32_t i = 1; i < op->ndim; i++)
        row *= (uint64_t)op->shape[i];
    uint64_t *piece = calloc((size_t)g->size, sizeof *piece);
    if (!piece)
        return -ENOMEM;
    for (int i = 0; i < g->size; i++)
        if (op->gather.first_dims[i] < 0 ||
            __builtin_mul_overflow((uint64_t)op->gather.first_dims[i], row, &piece[i]) ||
            __builtin_add_overflow(total, piece[i], &total) || total > SIZE_MAX / 2 ||
            total / op->epoch->part_bytes > UINT32_MAX / 2) {
            free(piece);
            return -EOVERFLOW;
        }
    op->gather.bytes = total;
    *out = piece;
    return 0;
}

int tly_parts_gather(tally_comm *c, struct tally_op *op)
{
    uint64_t *piece;
    int err = measure_pieces(op, &piece);
    if (err)
        return err;
    op->gather.data = malloc(op->gather.bytes ? op->gather.bytes : 1);
    err = op->gather.data ? gather_parts(c, op, piece, op->gather.data) : -ENOMEM;
    for (uint32_t i = 1; i < op->part_count && !err; i++)
        op->missing += op->parts[i].bytes = op->parts[i].length;
    free(piece);
    return err;
}
