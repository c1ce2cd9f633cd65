/* calls.c - the calls of tally.h that submit: each makes a request of its arguments (submit.h).
 * Also tally_plan, with which the ranks agree on a list of push_pulls.
 *
 * What only one of them checks is checked here, the rest in submit.c. */
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sodium.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/error.h"
#include "comm/comm.h"
#include "comm/op/group.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/op/tensor.h"
#include "comm/submit.h"
#include "reduce/reduce.h"
#include "tally/tally.h"
#include "wire/frame.h"

/* The sender of a message of up to TLY_KEPT_BYTES does not wait, as long as all such copies are no more than this. */
enum { COPIED_BYTES = 16 << 20 };

static int calls_no_reduction(enum tally_reduction reduction)
{
    return tly_fail(EINVAL, "%d is no reduction: pass TALLY_SUM or another of enum tally_reduction",
                    (int)reduction);
}

int tally_push_pull(tally_comm *comm, const char *name, const void *input, void *output, size_t count,
                    enum tally_dtype dtype, enum tally_reduction reduction,
                    const struct tally_options *options, tally_op **op)
{
    struct tly_request r = {.name = name,
                            .kind = TALLY_PUSH_PULL,
                            .dtype = (unsigned)dtype,
                            .reduction = (uint8_t)reduction,
                            .input = input,
                            .output = output,
                            .count = count};
    if ((unsigned)reduction > TALLY_BXOR)
        return calls_no_reduction(reduction);
    return tly_submit(comm, &r, options, op);
}

/* Sum of the counts of ranges in a buffer of such elements.  -EINVAL. */
static int calls_measure_ranges(const struct tally_range ranges[], size_t n, size_t element, uint64_t *count)
{
    enum { ALIGN = 64 }; /* bytes */
    uint64_t end = 0, sum = 0;
    if (n && !ranges)
        return tly_fail(EINVAL, "ranges is NULL and range_count is %zu: pass the address of as many ranges",
                        n);
    if (n > UINT32_MAX / 64)
        return tly_fail(EINVAL, "%zu ranges are too many: pass at most %u", n, UINT32_MAX / 64);
    for (size_t i = 0; i < n; i++) {
        const struct tally_range *r = &ranges[i];
        if (!r->count)
            return tly_fail(EINVAL, "range %zu has no elements: leave it out", i);
        if (r->begin > INT64_MAX / 16 || r->count > INT64_MAX / 16 - r->begin)
            return tly_fail(EINVAL, "range %zu ends behind element %lld: a tensor has less than 2^60 bytes",
                            i, (long long)(INT64_MAX / 16));
        if (r->begin * element % ALIGN)
            return tly_fail(EINVAL,
                            "range %zu begins at element %llu of %zu bytes: pass a multiple of %d bytes", i,
                            (unsigned long long)r->begin, element, ALIGN);
        if (i && r->begin < end)
            return tly_fail(EINVAL,
                            "range %zu begins at element %llu, before range %zu ends, at %llu: pass disjoint "
                            "ranges in ascending order",
                            i, (unsigned long long)r->begin, i - 1, (unsigned long long)end);
        end = r->begin + r->count;
        sum += r->count;
    }
    *count = sum;
    return 0;
}

int tally_push_pullv(tally_comm *comm, const char *name, const void *input, void *output,
                     const struct tally_range ranges[], size_t range_count, enum tally_dtype dtype,
                     enum tally_reduction reduction, const struct tally_options *options, tally_op **op)
{
    struct tly_request r = {.name = name,
                            .kind = TALLY_PUSH_PULLV,
                            .dtype = (unsigned)dtype,
                            .reduction = (uint8_t)reduction,
                            .input = input,
                            .output = output,
                            .ranges = {(struct tally_range *)ranges, range_count}};
    if ((unsigned)reduction > TALLY_BXOR)
        return calls_no_reduction(reduction);
    int err = calls_measure_ranges(ranges, range_count, tly_reduce_element_size((int)dtype), &r.count);
    if (err)
        return err;
    r.digest = XXH3_64bits(ranges, range_count * sizeof *ranges);
    return tly_submit(comm, &r, options, op);
}

int tally_reduce(tally_comm *comm, const char *name, const void *input, void *output, size_t count,
                 enum tally_dtype dtype, enum tally_reduction reduction, int root,
                 const struct tally_options *options, tally_op **op)
{
    struct tly_request r = {.name = name,
                            .kind = TALLY_REDUCE,
                            .dtype = (unsigned)dtype,
                            .reduction = (uint8_t)reduction,
                            .root = (uint32_t)root,
                            .input = input,
                            .output = output,
                            .count = count};
    if ((unsigned)reduction > TALLY_BXOR)
        return calls_no_reduction(reduction);
    return tly_submit(comm, &r, options, op);
}

/* Sum of a group's counts, which are checked; -EINVAL. */
static int calls_add_up(const size_t counts[], int n, uint64_t *sum)
{
    uint64_t s = 0;
    for (int i = 0; counts && i < n; i++)
        if (counts[i] > INT64_MAX / 16 || __builtin_add_overflow(s, counts[i], &s) || s > INT64_MAX / 16)
            return tly_fail(EINVAL, "the counts add up to more than %lld elements",
                            (long long)(INT64_MAX / 16));
    *sum = s;
    return 0;
}

int tally_reduce_scatter(tally_comm *comm, const char *name, const void *input, void *output,
                         const size_t counts[], enum tally_dtype dtype, enum tally_reduction reduction,
                         const struct tally_options *options, tally_op **op)
{
    struct tly_request r = {.name = name,
                            .kind = TALLY_REDUCE_SCATTER,
                            .dtype = (unsigned)dtype,
                            .reduction = (uint8_t)reduction,
                            .input = input,
                            .output = output,
                            .give = counts};
    struct tally_options own;
    if ((unsigned)reduction > TALLY_BXOR)
        return calls_no_reduction(reduction);
    if (!counts)
        return tly_fail(EINVAL, "counts is NULL: pass a count for each rank that takes part");
    int err = tly_comm_check(comm);
    if (!err)
        err = tly_options_take(&options, &own);
    if (err)
        return err;
    const struct tally_group *g = tly_submit_group(comm, options);
    err = calls_add_up(counts, g->size, &r.count);
    if (err)
        return err;
    if (!output && counts[g->rank] == 0)
        r.output = (void *)input; /* nothing will land there */
    return tly_submit(comm, &r, options, op);
}

/* An operation of pieces between two ranks. */
static int calls_exchange(tally_comm *c, struct tly_request *r, const struct tally_options *o, tally_op **op)
{
    struct tally_options own;
    uint64_t given = 0, taken = 0;
    int err = tly_comm_check(c);
    if (!err)
        err = tly_options_take(&o, &own);
    if (err)
        return err;
    const struct tally_group *g = tly_submit_group(c, o);
    err = calls_add_up(r->give, g->size, &given);
    if (!err)
        err = calls_add_up(r->take, g->size, &taken);
    if (err)
        return err;
    if ((given && !r->input) || (taken && !r->output))
        return tly_fail(EINVAL, "a NULL pointer for %llu elements: pass the address of their memory",
                        (unsigned long long)(given && !r->input ? given : taken));
    r->count = given > taken ? given : taken;
    return tly_submit(c, r, o, op);
}

int tally_alltoall(tally_comm *comm, const char *name, const void *input, const size_t give[], void *output,
                   const size_t take[], enum tally_dtype dtype, const struct tally_options *options,
                   tally_op **op)
{
    struct tly_request r = {.name = name,
                            .kind = TALLY_ALLTOALL,
                            .dtype = (unsigned)dtype,
                            .input = input,
                            .output = output,
                            .give = give,
                            .take = take};
    if (!give || !take)
        return tly_fail(EINVAL, "%s is NULL: pass a count for each rank that takes part",
                        give ? "take" : "give");
    return calls_exchange(comm, &r, options, op);
}

/* Between the root, which has counts for all, and each of the others, which has one for the root. */
static int calls_exchange_with_root(tally_comm *c, struct tly_request *r, const size_t counts[], size_t count,
                                    const struct tally_options *o, tally_op **op)
{
    struct tally_options own;
    int err = tly_comm_check(c);
    if (!err)
        err = tly_options_take(&o, &own);
    if (err)
        return err;
    const struct tally_group *g = tly_submit_group(c, o);
    bool root = r->root == (uint32_t)g->rank;
    if (r->root >= (uint32_t)g->size)
        return tly_submit_no_rank(g, "root ", (int)r->root);
    if (root && !counts)
        return tly_fail(EINVAL, "counts is NULL: the root passes a count for each rank that takes part");
    size_t *one = calloc((size_t)g->size, sizeof *one);
    if (!one)
        return tly_fail(ENOMEM, "out of memory");
    one[r->root] = count;
    bool gather = r->kind == TALLY_GATHER;
    r->give = gather ? one : root ? counts : NULL;
    r->take = gather ? root ? counts : NULL : one;
    err = calls_exchange(c, r, o, op);
    free(one);
    return err;
}

int tally_gather(tally_comm *comm, const char *name, const void *input, size_t count, void *output,
                 const size_t counts[], enum tally_dtype dtype, int root, const struct tally_options *options,
                 tally_op **op)
{
    struct tly_request r = {.name = name,
                            .kind = TALLY_GATHER,
                            .dtype = (unsigned)dtype,
                            .root = (uint32_t)root,
                            .input = input,
                            .output = output};
    return calls_exchange_with_root(comm, &r, counts, count, options, op);
}

int tally_scatter(tally_comm *comm, const char *name, const void *input, const size_t counts[], void *output,
                  size_t count, enum tally_dtype dtype, int root, const struct tally_options *options,
                  tally_op **op)
{
    struct tly_request r = {.name = name,
                            .kind = TALLY_SCATTER,
                            .dtype = (unsigned)dtype,
                            .root = (uint32_t)root,
                            .input = input,
                            .output = output};
    return calls_exchange_with_root(comm, &r, counts, count, options, op);
}

int tally_broadcast(tally_comm *comm, const char *name, void *buffer, size_t count, enum tally_dtype dtype,
                    int root, const struct tally_options *options, tally_op **op)
{
    struct tly_request r = {.name = name,
                            .kind = TALLY_BROADCAST,
                            .dtype = (unsigned)dtype,
                            .root = (uint32_t)root,
                            .input = buffer,
                            .output = buffer,
                            .count = count};
    return tly_submit(comm, &r, options, op);
}

int tally_allgather(tally_comm *comm, const char *name, const void *input, size_t count,
                    enum tally_dtype dtype, const struct tally_options *options, tally_op **op)
{
    struct tly_request r = {
        .name = name, .kind = TALLY_ALLGATHER, .dtype = (unsigned)dtype, .input = input, .count = count};
    struct tally_options own;
    int err = tly_options_take(&options, &own);
    r.root = !err && options && options->partial;
    return err ? err : tly_submit(comm, &r, options, op);
}

int tally_allgather_into(tally_comm *comm, const char *name, const void *input, void *output, size_t count,
                         enum tally_dtype dtype, const struct tally_options *options, tally_op **op)
{
    struct tly_request r = {.name = name,
                            .kind = TALLY_ALLGATHER,
                            .dtype = (unsigned)dtype,
                            .input = input,
                            .output = output,
                            .count = count,
                            .even = true};
    return tly_submit(comm, &r, options, op);
}

int tally_barrier(tally_comm *comm, const char *name, const struct tally_options *options, tally_op **op)
{
    struct tly_request r = {.name = name, .kind = TALLY_BARRIER, .dtype = TALLY_UINT8};
    return tly_submit(comm, &r, options, op);
}

int tly_op_submit_barrier(tally_comm *c, const char *name, uint64_t digest, tally_op **op)
{
    struct tly_request r = {
        .name = name, .kind = TALLY_BARRIER, .dtype = TALLY_UINT8, .root = 1, .digest = digest};
    return tly_submit(c, &r, NULL, op);
}

/* A handle of something that has ended. */
static int calls_hand_out_ended(tally_comm *c, uint8_t kind, const struct tally_options *o, tally_op **out)
{
    struct tally_op *op = tly_op_make(c, kind, o);
    if (!op)
        return tly_fail(ENOMEM, "out of memory");
    tly_op_finish(op, 0, NULL);
    *out = op;
    return 0;
}

/* Take the options of a message, and the rank that the caller means by a place in their group. */
static int calls_other_rank(tally_comm *c, const struct tally_options **options, struct tally_options *own,
                            int place, uint32_t *rank)
{
    int err = tly_comm_check(c);
    if (!err)
        err = tly_options_take(options, own);
    if (err)
        return err;
    const struct tally_group *g = tly_submit_group(c, *options);
    if (place < 0 || place >= g->size)
        return tly_submit_no_rank(g, "", place);
    if (place == g->rank)
        return tly_fail(EINVAL, "rank %d sends no messages to itself: copy the data instead", c->rank);
    *rank = g->ranks[place];
    return 0;
}

int tally_send(tally_comm *comm, const void *input, size_t count, enum tally_dtype dtype, int to,
               uint32_t tag, const struct tally_options *options, tally_op **op)
{
    struct tly_request r = {
        .kind = TALLY_MESSAGE, .dtype = (unsigned)dtype, .input = input, .count = count, .tag = tag};
    struct tally_options own;
    int err = calls_other_rank(comm, &options, &own, to, &r.to);
    if (err)
        return err;
    r.from = (uint32_t)comm->rank;
    size_t copied = atomic_load_explicit(&comm->copied, memory_order_relaxed);
    size_t bytes = count <= TLY_KEPT_BYTES ? count * tly_reduce_element_size((int)dtype) : SIZE_MAX;
    if (bytes > TLY_KEPT_BYTES || copied + bytes > COPIED_BYTES || (bytes && !input))
        return tly_submit(comm, &r, options, op);
    struct tally_options quiet = {.size = sizeof quiet};
    if (options)
        quiet = *options;
    quiet.queued = 0;
    r.copy = true;
    err = tly_submit(comm, &r, &quiet, NULL);
    return err || !op ? err : calls_hand_out_ended(comm, TALLY_MESSAGE, options, op);
}

int tally_recv(tally_comm *comm, void *output, size_t count, enum tally_dtype dtype, int from, uint32_t tag,
               const struct tally_options *options, tally_op **op)
{
    struct tly_request r = {
        .kind = TALLY_MESSAGE, .dtype = (unsigned)dtype, .output = output, .count = count, .tag = tag};
    struct tally_options own;
    int err = calls_other_rank(comm, &options, &own, from, &r.from);
    if (err)
        return err;
    r.to = (uint32_t)comm->rank;
    return tly_submit(comm, &r, options, op);
}

int tally_probe(tally_comm *comm, uint32_t tag, const struct tally_options *options, tally_op **op)
{
    struct tly_request r = {.kind = TLY_PROBE, .dtype = TALLY_INT64, .tag = tag};
    int err = tly_comm_check(comm);
    if (err)
        return err;
    r.from = r.to = (uint32_t)comm->rank;
    return tly_submit(comm, &r, options, op);
}

int tally_refuse(tally_comm *comm, const char *name, uint32_t kind, const struct tally_options *options,
                 const char *reason)
{
    if ((kind < TALLY_PUSH_PULL || kind > TALLY_SCATTER) && kind != TALLY_PUSH_PULLV &&
        kind != TALLY_SHARED_CREATE)
        return tly_fail(
            EINVAL,
            "%u is no kind of operation that can be refused: pass one of enum tally_kind, but no message",
            kind);
    struct tly_request r = {.name = name,
                            .kind = (uint8_t)kind,
                            .dtype = TALLY_UINT8,
                            .reason = reason ? reason : "no reason given"};
    struct tally_options own, o = {.size = sizeof o};
    int err = tly_options_take(&options, &own);
    if (err)
        return err;
    if (options) {
        o.space = options->space;
        o.group = options->group;
    }
    return tly_submit(comm, &r, &o, NULL);
}

static uint64_t calls_list_digest(uint32_t space, size_t count, const char *const names[],
                                  const uint64_t bytes[])
{
    crypto_generichash_state s;
    uint64_t digest;
    crypto_generichash_init(&s, NULL, 0, 16);
    crypto_generichash_update(&s, (const uint8_t *)&space, sizeof space);
    for (size_t i = 0; i < count; i++) {
        crypto_generichash_update(&s, (const uint8_t *)names[i], strlen(names[i]) + 1);
        crypto_generichash_update(&s, (const uint8_t *)&bytes[i], sizeof bytes[i]);
    }
    uint8_t hash[16];
    crypto_generichash_final(&s, hash, sizeof hash);
    memcpy(&digest, hash, sizeof digest);
    return digest ? digest : 1;
}

int tally_plan(tally_comm *c, uint32_t space, size_t count, const char *const names[], const uint64_t bytes[])
{
    int err = tly_comm_check(c);
    if (err)
        return err;
    char name[64], busy[120] = "";
    tly_names_lock(&c->names);
    snprintf(name, sizeof name, "plan %llu of this job", (unsigned long long)tly_names_next_plan(&c->names));
    for (size_t i = 0; i < count && !busy[0]; i++) {
        struct tly_tensor *t =
            tly_names_find(&c->names, tly_tensor_key(tly_names_joins(&c->names), tly_comm_all(c)->id,
                                                     TALLY_PUSH_PULL, space, names[i]));
        if (t && atomic_load_explicit(&t->busy, memory_order_acquire))
            snprintf(busy, sizeof busy, "'%.80s' is in flight: wait for it first", names[i]);
    }
    tly_names_unlock(&c->names);
    if (busy[0]) {
        tally_refuse(c, name, TALLY_BARRIER, NULL, busy);
        return tly_fail(EBUSY, "cannot plan: %s", busy);
    }
    tally_op *op;
    err = tly_op_submit_barrier(c, name, calls_list_digest(space, count, names, bytes), &op);
    if (err)
        return err;
    err = tally_op_wait(op, -1);
    tally_op_free(op);
    if (err)
        return err;
    tly_names_lock(&c->names);
    err = tly_tensor_plan(c, TALLY_PUSH_PULL, space, count, names, bytes);
    tly_names_unlock(&c->names);
    return err;
}
