/* spec.c - what ranks compare of an operation: its hash, which goes with each part, and the words that name it. */
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "comm/comm.h"
#include "comm/op/group.h"
#include "comm/op/op.h"
#include "comm/op/spec.h"
#include "comm/op/tensor.h"
#include "comm/submit.h"
#include "ops/call.h"
#include "ops/local.h"
#include "reduce/reduce.h"
#include "tally/tally.h"
#include "wire/frame.h"

/* The names of operations that the interface above has given, for each name space; NULL: none. */
static _Atomic(const char *const *) given_names[UINT8_MAX + 1];
static const char *const dtypes[] = {"float32",   "float64",    "float16", "bfloat16", "int8",
                                     "uint8",     "int16",      "int32",   "int64",    "bool",
                                     "complex64", "complex128", "uint16",  "uint32",   "uint64"};
static const char *const reductions[] = {"sum", "average", "min", "max", "product", "band", "bor", "bxor"};

const struct tly_ranges *tly_spec_ranges(const struct tally_op *op)
{
    const struct tly_ranges *r = op->call->ranges ? op->call->ranges(op) : NULL;
    return r && r->count ? r : NULL;
}

uint64_t tly_spec_span(const struct tally_op *op)
{
    const struct tly_ranges *r = tly_spec_ranges(op);
    if (!r)
        return op->bytes;
    const struct tally_range *last = &r->list[r->count - 1];
    return (last->begin + last->count) * tly_reduce_element_size(op->dtype);
}

/* The count that ranks compare; 0 where each rank may have its own. */
static uint64_t spec_compared_count(const struct tally_op *op)
{
    return op->spec.uneven || op->call->paired ? 0 : op->count;
}

static uint32_t spec_skipped_dims(const struct tally_op *op)
{
    return op->spec.uneven && op->spec.ndim ? 1 : 0;
}

/* Is it what the tensor's last operation was, whose hash is kept? */
static bool spec_is_as_before(const struct tally_op *op)
{
    const struct tly_spec_before *before = &op->tensor->before;
    const struct tly_spec *s = &op->spec;
    uint32_t skip = spec_skipped_dims(op);
    bool same =
        before->hash && !s->note && before->count == spec_compared_count(op) && before->digest == s->digest &&
        before->list == op->group->list && before->prescale == s->prescale &&
        before->postscale == s->postscale && before->kind == op->kind && before->dtype == op->dtype &&
        before->reduction == op->reduction && before->root == op->root && before->ndim == s->ndim &&
        before->even == op->even;
    for (uint32_t i = skip; i < s->ndim && same; i++)
        same = before->shape[i - skip] == s->shape[i];
    return same;
}

static uint64_t spec_compute(const struct tally_op *op)
{
    struct tly_tensor *t = op->tensor;
    const struct tly_spec *s = &op->spec;
    uint32_t skip = spec_skipped_dims(op), dims = s->ndim - skip;
    struct tly_spec_before compared = {
        .count = spec_compared_count(op),
        .digest = s->digest,
        .list = op->group->list,
        .prescale = s->prescale,
        .postscale = s->postscale,
        .kind = op->kind,
        .dtype = op->dtype,
        .reduction = op->reduction,
        .root = op->root,
        .ndim = s->ndim,
        .even = op->even};
    bool known = dims <= TLY_FEW_DIMS && !s->note;
    for (uint32_t i = 0; i < dims && known; i++)
        compared.shape[i] = s->shape[skip + i];
    uint64_t h = XXH3_64bits_withSeed(t->name, strlen(t->name), op->space);
    h = XXH3_64bits_withSeed(s->shape + skip, dims * sizeof *s->shape, h);
    if (s->note)
        h = XXH3_64bits_withSeed(s->note, strlen(s->note), h);
    h = XXH3_64bits_withSeed(&compared, offsetof(struct tly_spec_before, hash), h);
    if (known) {
        t->before = compared;
        t->before.hash = h;
    }
    return h;
}

void tly_spec_seal(struct tally_op *op)
{
    op->spec.hash = spec_is_as_before(op) ? op->tensor->before.hash : spec_compute(op);
}

/* Ranks compare the caller's shape, or the lengths of all pieces.  Where only two ranks know a length, they compare none. */
static void spec_take_shape(struct tally_op *op, const struct tly_request *r, const struct tally_options *o)
{
    struct tly_spec *s = &op->spec;
    bool pieces = r->give && !op->call->paired;
    bool shaped = op->call->shaped && o && o->shape;
    if (!pieces && !shaped && !op->call->paired) {
        s->ndim = 1;
        s->shape = s->few_dims;
        s->few_dims[0] = (int64_t)r->count;
        return;
    }
    s->ndim = pieces ? (uint32_t)r->group->size : shaped ? o->ndim : 0;
    s->shape = s->ndim <= TLY_FEW_DIMS ? s->few_dims : calloc(s->ndim, sizeof *s->shape);
    for (uint32_t i = 0; s->shape && i < s->ndim; i++)
        s->shape[i] = pieces ? (int64_t)r->give[i] : o->shape[i];
}

int tly_spec_take(struct tally_op *op, const struct tly_request *r, const struct tally_options *o)
{
    struct tly_spec *s = &op->spec;
    s->digest = r->digest;
    s->prescale = o && o->prescale != 0 ? o->prescale : 1;
    s->postscale = o && o->postscale != 0 ? o->postscale : 1;
    s->uneven = op->call->local && op->call->local->gathered && !r->even;
    spec_take_shape(op, r, o);
    if (o && o->note)
        s->note = strdup(o->note);
    return !s->shape || (o && o->note && !s->note) ? -ENOMEM : 0;
}

void tly_spec_copy(struct tly_spec *s, uint64_t hash, double prescale, double postscale, uint64_t count)
{
    s->hash = hash;
    s->prescale = prescale;
    s->postscale = postscale;
    s->shape[0] = (int64_t)count;
}

void tly_spec_finish(struct tly_spec *s)
{
    free(s->note);
    if (s->shape != s->few_dims)
        free(s->shape);
}

void tally_name_calls(uint32_t space, const char *const *names)
{
    if (space <= UINT8_MAX)
        atomic_store_explicit(&given_names[space], names, memory_order_release);
}

/* What the caller calls an operation.  even: all ranks of an allgather give as much. */
static const char *spec_call_of(uint8_t space, uint32_t kind, bool even)
{
    const char *const *names = atomic_load_explicit(&given_names[space], memory_order_acquire);
    const struct tly_call *call = tly_call_of(kind);
    if (names && call->collective)
        return names[kind];
    return even ? call->even_function : call->function;
}

void tly_tensor_title(const struct tly_tensor *t, char *out, size_t len)
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
        snprintf(out, len, "%.60s no. %.20s", spec_call_of(t->space, t->kind, t->even),
                 strrchr(t->name, ' ') + 1);
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

/* Append " of elements 0-4095, 8192-12287".  Returns where the text ends, or would end with more room. */
static size_t spec_append_ranges(const struct tly_ranges *r, uint64_t digest, char *out, size_t len,
                                 size_t at)
{
    enum { FEW = 4 };
    for (size_t i = 0; i < r->count && i < FEW && at < len; i++)
        at += (size_t)snprintf(out + at, len - at, "%s %llu-%llu", i ? "," : " of elements",
                               (unsigned long long)r->list[i].begin,
                               (unsigned long long)(r->list[i].begin + r->list[i].count - 1));
    if (r->count > FEW && at < len)
        at += (size_t)snprintf(out + at, len - at, ", ... (%zu ranges, digest %016llx)", r->count,
                               (unsigned long long)digest);
    return at;
}

/* Append the words about the data.  Returns where the text ends, or would end with more room. */
static size_t spec_append_data(const struct tally_op *op, char *out, size_t len, size_t at)
{
    bool listed = op->mark || !op->call->paired;
    if (at < len)
        at += (size_t)snprintf(out + at, len - at, listed ? " %s [" : " %s", dtypes[op->dtype]);
    for (uint32_t i = 0; i < op->spec.ndim && at + 40 < len && i < 16; i++) {
        if (i == 0 && op->spec.uneven)
            at += (size_t)snprintf(out + at, len - at, "*");
        else
            at += (size_t)snprintf(out + at, len - at, "%s%lld", i ? ", " : "", (long long)op->spec.shape[i]);
    }
    if (at < len && listed)
        at += (size_t)snprintf(out + at, len - at, "]");
    if (tly_spec_ranges(op))
        at = spec_append_ranges(tly_spec_ranges(op), op->spec.digest, out, len, at);
    if (op->call->reduces && at < len)
        at += (size_t)snprintf(out + at, len - at, " %s", reductions[op->reduction]);
    if (op->call->bounded && op->reduction && at < len)
        at += (size_t)snprintf(out + at, len - at, " staleness %u", op->reduction);
    if (op->call->root && at < len)
        at += (size_t)snprintf(out + at, len - at, " %s rank %u", op->call->root, op->root);
    if (op->spec.prescale != 1 && at < len)
        at += (size_t)snprintf(out + at, len - at, " prescale %g", op->spec.prescale);
    if (op->spec.postscale != 1 && at < len)
        at += (size_t)snprintf(out + at, len - at, " postscale %g", op->spec.postscale);
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
        at += (size_t)snprintf(out + at, len - at, " %s", spec_call_of(op->space, op->kind, op->even));
    if (!op->call->empty)
        at = spec_append_data(op, out, len, at);
    else if (op->spec.digest && at < len)
        at += (size_t)snprintf(out + at, len - at, " of list %016llx", (unsigned long long)op->spec.digest);
    if (op->spec.note && at < len)
        at += (size_t)snprintf(out + at, len - at, " (%.80s)", op->spec.note);
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
