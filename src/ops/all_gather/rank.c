/* rank.c - an all-gather, at a rank.
 *
 * If ranks may give pieces of unlike length, part 0 carries the first dimension of each, and the pieces are cut when its answer
 * has come (gather_listed).  Else part 0 is empty, and all is cut at once.
 *
 * Each piece is a broadcast from its rank.  The service of its machine relays it, or others where cards or pieces differ
 * (tly_relay_next).  The n-th parts of all pieces go before any piece's next part.  Equal pieces of up to 1 MB go as those of
 * an all-to-all do: straight to each receiver's machine, unasked.
 *
 * Where the ranks of a machine are a team, one of them asks for a part, and all of them get it (comm/path/team.c).  So each byte
 * crosses the network once a machine, whatever the pieces' size. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "comm/comm.h"
#include "comm/epoch/epoch.h"
#include "comm/op/group.h"
#include "comm/op/handle.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/op/spec.h"
#include "comm/op/tensor.h"
#include "comm/path/parts.h"
#include "comm/path/team.h"
#include "comm/submit.h"
#include "ops/call.h"
#include "ops/local.h"
#include "plan/plan.h"
#include "reduce/reduce.h"

struct gather {
    int64_t first_dim;   /* ours, as it goes out */
    int64_t *first_dims; /* owned: all ranks' */
    uint8_t *data;       /* owned: the result; NULL: the caller has the memory */
    uint64_t bytes;      /* of the result */
    bool listed;         /* the list has come, or is not needed */
};

static int gather_check(const tally_comm *c, const struct tly_request *r)
{
    uint64_t bytes = r->count * tly_reduce_element_size((int)r->dtype);
    if (r->even && bytes > SIZE_MAX / 16 / (unsigned)r->group->size)
        return tly_fail(EINVAL,
                        "%llu elements of each of %d ranks are too many: a result has less than 2^60 bytes",
                        (unsigned long long)r->count, r->group->size);
    return 0;
}

static unsigned gather_needs(const tally_comm *c, const struct tly_request *r)
{
    return TLY_CALL_INPUT | (r->even ? TLY_CALL_OUTPUT : 0);
}

static int gather_furnish(tally_comm *c, struct tally_op *op, const struct tly_request *r)
{
    struct gather *own = tly_op_own(op);
    own->listed = r->even;
    own->bytes = r->even ? op->bytes * (unsigned)r->group->size : 0;
    own->first_dims = calloc((size_t)r->group->size, sizeof *own->first_dims);
    for (int i = 0; own->first_dims && r->even && i < r->group->size; i++)
        own->first_dims[i] = tly_spec_first_dim(&op->spec);
    return own->first_dims ? 0 : -ENOMEM;
}

static void gather_release(struct tally_op *op)
{
    struct gather *own = tly_op_own(op);
    free(own->first_dims);
    free(own->data);
}

/* Plan the services that relay the parts of these pieces.  -ENOMEM. */
static int gather_plan_pieces(const tally_comm *c, const struct tally_op *op, bool team,
                              const uint64_t *piece, struct tly_relay *r)
{
    const struct tally_group *g = op->group;
    struct tly_plan_machine *machine = tly_tensor_machines(c, op, team);
    uint64_t *bytes = calloc((size_t)op->epoch->services, sizeof *bytes);
    for (int i = 0; bytes && i < g->size; i++)
        bytes[tly_service_of(c, g->ranks[i])] += piece[i];
    int err = machine && bytes ? tly_relay_init(r, op->epoch->services, machine, bytes) : -ENOMEM;
    free(machine);
    free(bytes);
    return err;
}

/* Each part is a broadcast from its owner.  As of a scatter, the n-th parts of all pieces go before any piece's next: all
 * machines' cards send and receive all the time.  Returns how many parts this rank sends or asks for. */
static uint32_t gather_lay_out(tally_comm *c, struct tally_op *op, bool team, const uint64_t *piece,
                               uint32_t part, struct tly_relay *r, uint8_t *to)
{
    const struct tally_group *g = op->group;
    const int n = g->size;
    struct tly_part *p = op->parts + 1;
    uint64_t most = 0;
    uint32_t own = 0;
    for (int i = 0; i < n; i++)
        most = piece[i] > most ? piece[i] : most;
    for (uint64_t at = 0; at < most; at += part) {
        uint8_t *start = to;
        for (int i = 0; i < n; start += piece[i++]) {
            if (at >= piece[i])
                continue;
            uint32_t length = tly_parts_length(at, piece[i], part);
            uint32_t index = (uint32_t)(p - op->parts);
            int service = tly_relay_next(r, tly_service_of(c, g->ranks[i]), length);
            bool mine = i == g->rank, ours = true;
            uint32_t list =
                team ? tly_team_carriers(op, g->ranks[i], (uint32_t)(at / part), &ours) : g->number;
            *p = (struct tly_part){
                .op = op,
                .state = ours ? PART_IDLE : PART_LANDED,
                .landing = start + at,
                .input = mine ? op->input + at : NULL,
                .place = at,
                .index = index,
                .order = index,
                .number = index,
                .group = list,
                .length = length,
                .result_length = mine ? 0 : length,
                .owner = tly_epoch_owner(c, op->epoch, op->key, index, (uint16_t)service),
                .dtype = op->dtype,
                .root = g->ranks[i]};
            if (team)
                tly_team_share(p, (uint64_t)(start + at - to), false);
            own += ours;
            p++;
        }
    }
    return own;
}

/* So many parts of each piece may be asked for that have not landed.  With less, services run dry for a round trip.  With more
 * they have more to send to each rank than its card takes; then each connection goes at its own speed, some end early, and the
 * cards behind them idle at the end.  What waits there takes memory besides. */
enum { ROWS_AHEAD = 6 }; /* bench/goodput/cards.c has it, too */

/* Cut all ranks' pieces, which belong at `to` one behind the other. */
static int gather_parts(tally_comm *c, struct tally_op *op, const uint64_t *piece, uint8_t *to)
{
    const struct tally_group *g = op->group;
    const int n = g->size;
    uint64_t bytes = 0, total = 0, before = 0;
    for (int i = 0; i < n; i++) {
        before = i == g->rank ? bytes : before;
        bytes += piece[i];
    }
    const bool team = tly_team_gathers(op) && bytes >= TLY_TEAM_BYTES;
    const int abreast = team ? tly_team_machines(op) : n; /* that send, and receive, a part at a time */
    uint32_t part = tly_parts_choose(op, bytes, abreast);
    for (int i = 0; i < n; i++)
        total += tly_parts_count(piece[i], part);
    struct tly_relay *r = malloc(sizeof *r);
    int err = r ? gather_plan_pieces(c, op, team, piece, r) : -ENOMEM;
    if (!err)
        err = tly_parts_more(op, total);
    uint32_t own = err ? 0 : gather_lay_out(c, op, team, piece, part, r, to);
    if (!err)
        tly_progress_begin(&op->progress, 1 + own);
    if (team && !err) /* own * n / total: of each row */
        tly_team_shared(op, (uint32_t)total, bytes, (ROWS_AHEAD * own * (uint64_t)n / total + 1) * part);
    else if (!team)
        tly_progress_limit(&op->progress, ROWS_AHEAD * (uint32_t)n);
    free(r);
    if (!err && piece[g->rank] && to + before != op->input)
        memcpy(to + before, op->input, piece[g->rank]);
    return err;
}

/* Equal pieces of up to so many bytes go to each rank unasked, as in an alltoall: each card sends as much as it receives,
 * and the round trip of the requests would show.  Of larger pieces it does not, and a part that is asked for lands where it
 * belongs, while one that comes unasked is copied there from the service. */
enum { UNASKED_BYTES = 1 << 20 }; /* bench/goodput/cards.c has it, too */

static int gather_even_parts(tally_comm *c, struct tally_op *op)
{
    uint8_t *own = op->output + (size_t)op->group->rank * op->bytes;
    if (op->bytes <= UNASKED_BYTES && !tly_team_gathers(op)) {
        if (op->bytes && own != op->input)
            memcpy(own, op->input, op->bytes);
        return tly_parts_exchange(c, op, NULL);
    }
    uint64_t *piece = calloc((size_t)op->group->size, sizeof *piece);
    if (!piece)
        return -ENOMEM;
    for (int i = 0; i < op->group->size; i++)
        piece[i] = op->bytes;
    int err = gather_parts(c, op, piece, op->output);
    free(piece);
    return err;
}

/* Bytes of each rank's piece, by the list of first dimensions.  -EOVERFLOW: they are too many for memory, or for a number
 * of parts.  -ENOMEM. */
static int gather_measure_pieces(struct tally_op *op, uint64_t **out)
{
    struct gather *own = tly_op_own(op);
    const struct tally_group *g = op->group;
    uint64_t row = tly_reduce_element_size(op->dtype), total = 0;
    for (uint32_t i = 1; i < tly_spec_dims(&op->spec); i++)
        row *= (uint64_t)tly_spec_dim(&op->spec, i);
    uint64_t *piece = calloc((size_t)g->size, sizeof *piece);
    if (!piece)
        return -ENOMEM;
    for (int i = 0; i < g->size; i++)
        if (own->first_dims[i] < 0 || __builtin_mul_overflow((uint64_t)own->first_dims[i], row, &piece[i]) ||
            __builtin_add_overflow(total, piece[i], &total) || total > SIZE_MAX / 2 ||
            total / op->epoch->part_bytes > UINT32_MAX / 2) {
            free(piece);
            return -EOVERFLOW;
        }
    own->bytes = total;
    *out = piece;
    return 0;
}

/* All first dimensions are known: cut each rank's piece.  -EOVERFLOW, -ENOMEM. */
static int gather_listed(tally_comm *c, struct tally_op *op)
{
    struct gather *own = tly_op_own(op);
    if (own->listed)
        return 0;
    own->listed = true;
    uint64_t *piece;
    int err = gather_measure_pieces(op, &piece);
    if (err)
        return err;
    own->data = malloc(own->bytes ? own->bytes : 1);
    err = own->data ? gather_parts(c, op, piece, own->data) : -ENOMEM;
    for (uint32_t i = 1; i < op->part_count && !err; i++) {
        struct tly_part *p = &op->parts[i];
        p->bytes = p->length;
        if (p->state != PART_LANDED)
            tly_progress_miss(&op->progress, p->bytes);
    }
    free(piece);
    return err ? err : 1;
}

static int gather_cut(tally_comm *c, struct tally_op *op)
{
    struct gather *own = tly_op_own(op);
    int err = tly_parts_roll_call(c, op);
    if (err || op->even)
        return err ? err : gather_even_parts(c, op);
    struct tly_part *p = &op->parts[0];
    own->first_dim = tly_spec_first_dim(&op->spec);
    p->input = (const uint8_t *)&own->first_dim;
    p->landing = (uint8_t *)own->first_dims;
    p->length = sizeof own->first_dim;
    p->result_length = p->length * (uint32_t)op->group->size;
    p->dtype = TALLY_INT64;
    return 0;
}

/* The sizes of unlike pieces are not known before the list has come.  A rank that has joined can carry nothing. */
static bool gather_teams(const struct tally_op *op)
{
    return !op->root && (!op->even || op->bytes * (unsigned)op->group->size >= TLY_TEAM_BYTES);
}

static void *gather_place(struct tally_op *op, const int64_t first_dims[], const uint64_t bytes[])
{
    struct gather *own = tly_op_own(op);
    uint64_t total = 0;
    for (int i = 0; i < op->group->size; i++) {
        if (__builtin_add_overflow(total, bytes[i], &total) || total > SIZE_MAX / 2)
            return NULL;
        own->first_dims[i] = first_dims[i];
    }
    own->bytes = total;
    static uint8_t nothing; /* the caller may have no memory for empty pieces */
    if (op->even)
        return op->output ? op->output : &nothing;
    own->data = malloc(total ? total : 1);
    return own->data;
}

/* All pieces, one behind the other. */
static void gather_takes(const struct tly_local_view *v, struct tly_local_take take[])
{
    uint64_t to = 0;
    for (uint32_t i = 0; i < v->ranks; to += v->given[i++])
        take[i] = (struct tly_local_take){.to = to, .bytes = v->given[i]};
}

static const struct tly_local_call gather_local = {.takes = gather_takes, .gathered = gather_place};

const struct tly_call tly_call_allgather = {
    .own_bytes = sizeof(struct gather),
    .check = gather_check,
    .needs = gather_needs,
    .furnish = gather_furnish,
    .teams = gather_teams,
    .cut = gather_cut,
    .release = gather_release,
    .answered = gather_listed,
    .function = "tally_allgather",
    .even_function = "tally_allgather_into",
    .local = &gather_local,
    .collective = "all_gather",
    .shaped = true,
    .pieces = true,
    .moves = true};

int tally_op_gathered(const tally_op *op, const void **data, size_t *bytes, const int64_t **first_dims)
{
    const struct gather *own = tly_op_own(op);
    if (op->call != &tly_call_allgather)
        return tly_fail(EINVAL, "the operation is no allgather: only an allgather has a gathered result");
    if (!tly_handle_is_done(&op->handle) || tly_handle_status(&op->handle))
        return tly_fail(EAGAIN, "the allgather has no result: wait for it first");
    *data = op->even ? op->output : own->data;
    *bytes = own->bytes;
    *first_dims = own->first_dims;
    return 0;
}
