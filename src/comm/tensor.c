/* tensor.c - what follows from a name: home, parts and the services that sum them, spec. */
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/error.h"
#include "comm/comm.h"
#include "comm/epoch.h"
#include "comm/group.h"
#include "comm/op.h"
#include "comm/tensor.h"
#include "ops/call.h"
#include "plan/plan.h"
#include "tally/tally.h"
#include "wire/frame.h"

/* Services that sum or relay a tensor's parts. */
struct dealt {
    struct tly_dealer *home, *others; /* part 0's, and all that follow; the same, but where a root decides */
    int active;                       /* services with a share */
};

/* By the plan, unless told; of a list's own parts, where they are shorter, but never less than four full ones, which
 * cover the time in which a process wakes up.  What is hardly more than a credit is sent at once. */
static uint64_t credit(const tally_comm *c, const struct tly_stretch *s, const struct epoch *e,
                       const struct dealt *d)
{
    bool sums = d->home == d->others;
    uint64_t bytes = s->before + s->bytes + s->behind;
    uint64_t longest = tly_plan_largest_part(s, e->part_bytes, d->active);
    uint64_t usual = tly_plan_credit(d->active, e->part_bytes);
    uint64_t all = sums ? tly_plan_sum_credit(d->active, e->part_bytes) : usual;
    if (c->params.credit_bytes)
        return c->params.credit_bytes;
    if (bytes < 2 * usual)
        return all;
    uint64_t suits = sums ? tly_plan_sum_credit(d->active, longest) : tly_plan_credit(d->active, longest);
    uint64_t least = 4ull * e->part_bytes < all ? 4ull * e->part_bytes : all;
    return suits > least ? suits : least;
}

/* Cut a tensor into parts and deal them.  -ENOMEM. */
static int make_cut(tally_comm *c, const struct tly_stretch *s, const struct epoch *e, const struct dealt *d,
                    struct cut *out)
{
    uint64_t count = 0, at = 0;
    do {
        at += tly_plan_part(s, at, e->part_bytes, d->active);
        count++;
    } while (at < s->bytes);
    struct piece *pieces = malloc(count * sizeof *pieces);
    if (!pieces)
        return -ENOMEM;
    at = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t length = tly_plan_part(s, at, e->part_bytes, d->active);
        pieces[i] = (struct piece){length, (uint16_t)tly_dealer_next(i ? d->others : d->home, length)};
        at += length;
    }
    free(out->pieces);
    *out = (struct cut){.bytes = s->bytes,
                        .epoch = e->number,
                        .pieces = pieces,
                        .count = (uint32_t)count,
                        .credit = credit(c, s, e, d)};
    return 0;
}

/* Deal the whole list in one sequence, for this epoch.  What a later plan has taken over keeps its place in it. */
static int deal_plan(tally_comm *c, const struct plan *plan, struct epoch *e)
{
    struct tly_dealer d;
    struct dealt dealt = {&d, &d, e->sharing};
    struct tly_stretch s = {0};
    struct cut elsewhere = {0};
    int err = 0;
    for (size_t i = 0; i < plan->count; i++)
        s.behind += plan->item[i].bytes;
    /* Not credit(): of that a rank may have its own, and all ranks must deal alike. */
    uint64_t lag = tly_plan_credit(e->sharing, tly_plan_largest_part(&s, e->part_bytes, e->sharing));
    tly_plan_late(c->machines, e->services, e->weight, s.behind, lag, e->listed);
    tly_dealer_init(&d, c->machines, e->services, e->listed);
    for (size_t i = 0; i < plan->count && !err; i++) {
        const struct planned *p = &plan->item[i];
        s.behind -= s.bytes = p->bytes;
        err = make_cut(c, &s, e, &dealt, p->tensor->plan_list == plan ? &p->tensor->plan : &elsewhere);
        s.before += p->bytes;
    }
    free(elsewhere.pieces);
    return err;
}

/* Is there a plan of its own for it?  TALLY_SPLIT says for comparison who sums, whatever is summed. */
static bool root_decides(const tally_comm *c, const struct tally_op *op)
{
    const struct tly_call *call = op->call;
    return call->root && !call->paired && (!call->reduces || strcmp(c->params.split, "optimal") == 0);
}

struct tly_plan_machine *tly_tensor_machines(const tally_comm *c, const struct tally_op *op)
{
    size_t bytes = (size_t)op->epoch->services * sizeof(struct tly_plan_machine);
    struct tly_plan_machine *machine = malloc(bytes);
    if (!machine)
        return NULL;
    memcpy(machine, op->epoch->machine, bytes);
    for (int i = 0; i < op->epoch->services; i++)
        machine[i].ranks = 0;
    for (int i = 0; i < op->group->size; i++)
        machine[tly_service_of(c, op->group->ranks[i])].ranks++;
    return machine;
}

/* Who relays a broadcast from its root, or sums for it, over the machines of the group.  -ENOMEM. */
static int plan_for_root(tally_comm *c, const struct tally_op *op, struct dealt *d)
{
    const struct epoch *e = op->epoch;
    struct tly_plan_machine *machine = tly_tensor_machines(c, op);
    uint32_t *weight = calloc((size_t)e->services, sizeof *weight);
    int root = tly_service_of(c, op->root), err = machine && weight ? 0 : -ENOMEM;
    if (!err && !op->call->reduces)
        err = tly_plan_broadcast(e->services, machine, root, weight);
    else if (!err)
        err = tly_plan_reduce(e->services, machine, root, e->weight, weight);
    d->active = 0;
    for (int i = 0; i < e->services && !err; i++)
        d->active += weight[i] > 0;
    if (!err)
        tly_dealer_init_at(d->others, e->services, weight, op->key);
    free(machine);
    free(weight);
    return err;
}

/* The home depends on the name alone (or on its place in a plan), never on the spec: ranks that disagree on
 * the spec must meet there.  The rest depends on the size, the root and the epoch too, and on nothing that this rank did
 * before. */
const struct cut *tly_tensor_cut(tally_comm *c, const struct tally_op *op, uint64_t bytes)
{
    struct tensor *t = op->tensor;
    struct epoch *e = op->epoch;
    uint32_t root = root_decides(c, op) ? op->root + 1 : 0;
    if (t->plan_list && (!t->plan.pieces || t->plan.epoch != e->number) && deal_plan(c, t->plan_list, e) != 0)
        return NULL;
    if (t->plan_list && t->plan.bytes == bytes)
        return &t->plan;
    if (t->cut.pieces && t->cut.bytes == bytes && t->cut.epoch == e->number && t->cut.root == root)
        return &t->cut;
    struct tly_dealer d, others;
    struct dealt dealt = {&d, root ? &others : &d, e->sharing};
    struct tly_stretch alone = {.bytes = bytes};
    tly_dealer_init_at(&d, e->services, e->weight, t->key);
    if ((root && plan_for_root(c, op, &dealt) != 0) || make_cut(c, &alone, e, &dealt, &t->cut) != 0)
        return NULL;
    t->cut.root = root;
    if (t->plan_list)
        t->cut.pieces[0].owner = t->plan.pieces[0].owner;
    return &t->cut;
}

/* A tensor is of the block in whose sixteenth of the list's bytes it begins.  A block's tensors have one urgency, and so go in
 * the order in which they are submitted. */
enum { BLOCKS = 16 };

/* The highest priority in this item's block. */
static int32_t of_block(const struct plan *list, size_t item)
{
    const struct planned *p = list->item;
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
    struct tensor *t = op->tensor;
    const struct plan *list = t->plan_list;
    if (!op->mark) /* a refusal has no priority */
        t->priority = op->priority;
    bool backwards = list && list->item[0].tensor->priority < list->item[list->count - 1].tensor->priority;
    op->urgency = backwards ? of_block(list, t->item) : op->priority;
    return backwards;
}

int tly_tensor_plan(tally_comm *c, uint32_t kind, uint32_t space, size_t count, const char *const names[],
                    const uint64_t bytes[])
{
    struct plan *plan = calloc(1, sizeof *plan + count * sizeof *plan->item);
    if (!plan)
        return tly_fail(ENOMEM, "out of memory");
    for (; plan->count < count; plan->count++) {
        struct planned *p = &plan->item[plan->count];
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
        struct tensor *t = plan->item[i].tensor;
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
        t->plan = t->cut = (struct cut){0};
    }
    if (--plan->users == 0)
        free(plan); /* of no tensors */
    return 0;
}

/* Of operations, for each name space, by the interface over us; NULL: none. */
static _Atomic(const char *const *) given_names[UINT8_MAX + 1];
static const char *const dtypes[] = {"float32",   "float64",    "float16", "bfloat16", "int8",
                                     "uint8",     "int16",      "int32",   "int64",    "bool",
                                     "complex64", "complex128", "uint16",  "uint32",   "uint64"};
static const char *const reductions[] = {"sum", "average", "min", "max", "product", "band", "bor", "bxor"};

/* What is hashed of an operation's lengths, which may all differ between the ranks of a table. */
static uint64_t compared_count(const struct tally_op *op)
{
    return op->uneven || op->call->paired ? 0 : op->count;
}

static uint32_t skipped_dims(const struct tally_op *op)
{
    return op->uneven && op->ndim ? 1 : 0;
}

/* Is it what the tensor's last operation was, whose hash is kept? */
static bool is_as_before(const struct tally_op *op)
{
    const struct spec *s = &op->tensor->spec;
    uint32_t skip = skipped_dims(op);
    bool same =
        op->tensor->spec_hash && !op->note && s->count == compared_count(op) && s->digest == op->digest &&
        s->list == op->group->list && s->prescale == op->prescale && s->postscale == op->postscale &&
        s->kind == op->kind && s->dtype == op->dtype && s->reduction == op->reduction &&
        s->root == op->root && s->ndim == op->ndim && s->even == op->even;
    for (uint32_t i = skip; i < op->ndim && same; i++)
        same = s->shape[i - skip] == op->shape[i];
    return same;
}

static uint64_t hash_spec(const struct tally_op *op)
{
    struct tensor *t = op->tensor;
    uint32_t skip = skipped_dims(op), dims = op->ndim - skip;
    struct spec s = {.count = compared_count(op),
                     .digest = op->digest,
                     .list = op->group->list,
                     .prescale = op->prescale,
                     .postscale = op->postscale,
                     .kind = op->kind,
                     .dtype = op->dtype,
                     .reduction = op->reduction,
                     .root = op->root,
                     .ndim = op->ndim,
                     .even = op->even};
    bool known = dims <= TLY_FEW_DIMS && !op->note;
    for (uint32_t i = 0; i < dims && known; i++)
        s.shape[i] = op->shape[skip + i];
    uint64_t h = XXH3_64bits_withSeed(t->name, strlen(t->name), op->space);
    h = XXH3_64bits_withSeed(op->shape + skip, dims * sizeof *op->shape, h);
    if (op->note)
        h = XXH3_64bits_withSeed(op->note, strlen(op->note), h);
    h = XXH3_64bits_withSeed(&s, sizeof s, h);
    if (known) {
        t->spec = s;
        t->spec_hash = h;
    }
    return h;
}

uint64_t tly_spec_hash(const struct tally_op *op)
{
    return is_as_before(op) ? op->tensor->spec_hash : hash_spec(op);
}

void tally_name_calls(uint32_t space, const char *const *names)
{
    if (space <= UINT8_MAX)
        atomic_store_explicit(&given_names[space], names, memory_order_release);
}

/* What the caller calls an operation.  even: all ranks of an allgather give as much. */
static const char *call_of(uint8_t space, uint32_t kind, bool even)
{
    const char *const *names = atomic_load_explicit(&given_names[space], memory_order_acquire);
    const struct tly_call *call = tly_call_of(kind);
    if (names && call->collective)
        return names[kind];
    return even ? call->even_function : call->function;
}

void tly_tensor_title(const struct tensor *t, char *out, size_t len)
{
    if (!*t->name)
        snprintf(out, len, "an operation");
    else if (!t->called)
        snprintf(out, len, "'%.100s'", t->name);
    else if (t->kind == 0)
        snprintf(out, len, "%s %.80s", tly_call_of(t->called)->collective, t->name);
    else if (tly_tensor_is_message(t))
        snprintf(out, len, "%.100s", t->name);
    else /* "push_pull no. 7" */
        snprintf(out, len, "%.60s no. %.20s", call_of(t->space, t->kind, t->even), strrchr(t->name, ' ') + 1);
}

const char *tly_op_title(const struct tally_op *op, char out[TLY_TITLE])
{
    tly_tensor_title(op->tensor, out, TLY_TITLE);
    if (op->tensor->called && op->group->size < op->comm->size && !op->call->message) {
        char ranks[100];
        size_t at = strlen(out);
        tly_group_text(op->group, ranks, sizeof ranks);
        snprintf(out + at, TLY_TITLE - at, " of ranks %s", ranks);
    }
    return out;
}

/* Of its data; where the text ends, or would. */
static size_t data_text(const struct tally_op *op, char *out, size_t len, size_t at)
{
    bool listed = op->mark || !op->call->paired;
    if (at < len)
        at += (size_t)snprintf(out + at, len - at, listed ? " %s [" : " %s", dtypes[op->dtype]);
    for (uint32_t i = 0; i < op->ndim && at + 40 < len && i < 16; i++) {
        if (i == 0 && op->uneven)
            at += (size_t)snprintf(out + at, len - at, "*");
        else
            at += (size_t)snprintf(out + at, len - at, "%s%lld", i ? ", " : "", (long long)op->shape[i]);
    }
    if (at < len && listed)
        at += (size_t)snprintf(out + at, len - at, "]");
    if (op->call->reduces && at < len)
        at += (size_t)snprintf(out + at, len - at, " %s", reductions[op->reduction]);
    if (op->call->root && at < len)
        at += (size_t)snprintf(out + at, len - at, " %s rank %u", op->call->root, op->root);
    if (op->prescale != 1 && at < len)
        at += (size_t)snprintf(out + at, len - at, " prescale %g", op->prescale);
    if (op->postscale != 1 && at < len)
        at += (size_t)snprintf(out + at, len - at, " postscale %g", op->postscale);
    return at;
}

void tly_spec_text(const struct tally_op *op, char *out, size_t len)
{
    char title[TLY_TITLE];
    bool named = !op->tensor->called;
    size_t at = (size_t)snprintf(out, len, "%s", tly_op_title(op, title));
    if (named && op->group->name && at < len) {
        char ranks[100];
        tly_group_text(op->group, ranks, sizeof ranks);
        at += (size_t)snprintf(out + at, len - at, " in group '%.60s' of ranks %s", op->group->name, ranks);
    }
    size_t end = at;
    if (named && at < len)
        at += (size_t)snprintf(out + at, len - at, " %s", call_of(op->space, op->kind, op->even));
    if (!op->call->empty)
        at = data_text(op, out, len, at);
    else if (op->digest && at < len)
        at += (size_t)snprintf(out + at, len - at, " of list %016llx", (unsigned long long)op->digest);
    if (op->note && at < len)
        at += (size_t)snprintf(out + at, len - at, " (%.80s)", op->note);
    if (end < len && out[end]) {
        char *separator = out + end;
        *separator = TLY_TITLE_END;
        while ((separator = strchr(separator + 1, TLY_TITLE_END)))
            *separator = '/';
    } else if (at + 1 < len) {
        out[at] = TLY_TITLE_END;
        out[at + 1] = '\0';
    }
}
