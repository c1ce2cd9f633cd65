/* submit.c - submission, in the caller's thread: a request is checked, becomes an operation, is named and handed over.
 *
 * names.lock is held from the name to the inbox, so that operations come to the loop in the order of their names.  A small
 * operation is sent by the caller itself if the loop is asleep: that saves a change of threads. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "base/loop.h"
#include "base/thread.h"
#include "comm/comm.h"
#include "comm/op/active.h"
#include "comm/op/events.h"
#include "comm/op/group.h"
#include "comm/op/handle.h"
#include "comm/op/op.h"
#include "comm/op/spec.h"
#include "comm/op/tensor.h"
#include "comm/path/chain.h"
#include "comm/path/engine.h"
#include "comm/path/peer.h"
#include "comm/path/queue.h"
#include "comm/path/stager.h"
#include "comm/submit.h"
#include "local/local.h"
#include "ops/call.h"
#include "reduce/reduce.h"
#include "tally/tally.h"
#include "trace/timeline.h"
#include "trace/trace.h"
#include "transport/transport.h"
#include "wire/frame.h"

enum { SEND_BY_CALLER = 64 << 10, LOCK_TRIES = 64 };
enum { MOST_REASON = 600 }; /* bytes of a refusal's */

static char *submit_copy_reason(const char *reason)
{
    return strndup(reason ? reason : "no reason given", MOST_REASON);
}

struct tally_group *tly_submit_group(tally_comm *c, const struct tally_options *o)
{
    return o && o->group ? o->group : tly_comm_all(c);
}

int tly_submit_no_rank(const struct tally_group *g, const char *what, int place)
{
    return tly_fail(EINVAL, "%s%d is no rank from 0 to %d%s", what, place, g->size - 1,
                    g->name ? ": inside a group ranks count from 0" : "");
}

static int submit_check_request(const tally_comm *c, const struct tly_request *r,
                                const struct tally_options *o, bool out)
{
    if (r->dtype >= TLY_DTYPE_COUNT)
        return tly_fail(EINVAL, "%d is no dtype: pass TALLY_FLOAT32 or another of enum tally_dtype",
                        (int)r->dtype);
    const struct tly_call *call = tly_call_of(r->kind);
    size_t element = tly_reduce_element_size((int)r->dtype);
    uint64_t bytes; /* nothing is divided by what the compiler does not know: that takes as long as a lock */
    if (__builtin_mul_overflow(r->count, element, &bytes) || bytes > UINT64_MAX / 16)
        return tly_fail(EINVAL, "%llu elements are too many: a tensor has less than 2^60 bytes",
                        (unsigned long long)r->count);
    unsigned needs = call->needs ? call->needs(c, r) : TLY_CALL_INPUT | TLY_CALL_OUTPUT;
    if (r->count && ((needs & TLY_CALL_INPUT && !r->input) || (needs & TLY_CALL_OUTPUT && !r->output)))
        return tly_fail(EINVAL, "a NULL pointer for %llu elements: pass the address of their memory",
                        (unsigned long long)r->count);
    if (r->group->comm != c)
        return tly_fail(EINVAL, "the group is another communicator's: make one of this communicator's ranks");
    if (call->root && r->root >= (uint32_t)r->group->size)
        return tly_submit_no_rank(r->group, "root ", (int)r->root);
    int err = call->check ? call->check(c, r) : 0;
    if (err)
        return err;
    /* The parts of some are counted once the answer to part 0 is here. */
    if (!call->answered && bytes / (UINT32_MAX / 64 + 1u) >= c->part_least)
        return tly_fail(EINVAL, "%llu elements are too many for parts of %u bytes: raise TALLY_PART_BYTES",
                        (unsigned long long)r->count, c->part_least);
    if (!o)
        return 0;
    if (o->place > TALLY_PLACE_CUDA)
        return tly_fail(EINVAL, "%llu is no place: pass TALLY_PLACE_HOST or TALLY_PLACE_CUDA",
                        (unsigned long long)o->place);
    if (o->place && !call->placed)
        return tly_fail(EINVAL, "%s takes memory of the host: copy the tensor, or use tally_push_pull",
                        call->function);
    if (o->queued && !out)
        return tly_fail(EINVAL, "a queued operation needs a handle: pass a place for it");
    if (o->ndim > 64)
        return tly_fail(EINVAL, "a shape has at most 64 dimensions, not %u", o->ndim);
    if (o->ndim && !o->shape)
        return tly_fail(EINVAL, "shape is NULL and ndim is %u: pass the lengths of the dimensions", o->ndim);
    if (o->space > 255)
        return tly_fail(EINVAL, "space %u is not from 0 to 255", o->space);
    if (o->shape && call->shaped) {
        uint64_t product = 1;
        bool overflow = false, empty = false;
        for (uint32_t i = 0; i < o->ndim; i++) {
            if (o->shape[i] < 0)
                return tly_fail(EINVAL, "dimension %u of the shape is %lld: pass 0 or more", i,
                                (long long)o->shape[i]);
            empty |= o->shape[i] == 0;
            overflow |= __builtin_mul_overflow(product, (uint64_t)o->shape[i], &product);
        }
        if (empty)
            product = 0;
        if ((overflow && !empty) || product != r->count)
            return tly_fail(EINVAL, "the lengths in the shape do not multiply to the count, %llu",
                            (unsigned long long)r->count);
    }
    return 0;
}

static int submit_check_reduction(const struct tally_op *op)
{
    const char *why = "unknown";
    struct tly_reduction r = {op->dtype, op->reduction, (uint32_t)op->group->size,
                              tly_spec_prescale(&op->spec), tly_spec_postscale(&op->spec)};
    char title[TLY_TITLE];
    if (op->call->reduces && tly_reduce_check(&r, &why) != 0)
        return tly_fail(EINVAL, "%s: %s", op->tensor ? tly_op_title(op, title) : "?", why);
    return 0;
}

/* What few operations have.  False: no memory. */
static bool submit_furnish(tally_comm *c, struct tally_op *op, const struct tly_request *r)
{
    if (r->reason) {
        op->mark = true;
        op->reason = submit_copy_reason(r->reason);
        return op->reason != NULL;
    }
    return !op->call->furnish || op->call->furnish(c, op, r) == 0;
}

static struct tally_op *submit_make_op(tally_comm *c, const struct tly_request *r,
                                       const struct tally_options *o)
{
    const struct tly_call *call = tly_call_of(r->kind);
    size_t size = sizeof(struct tally_op) + call->own_bytes;
    struct tally_op *op = malloc(size);
    if (!op)
        return NULL;
    /* Not calloc(), which passes by the thread's cache of what was freed, in many a libc; and the compiler must not make it
     * one, nor a slow string instruction. */
    __asm__("" : "+r"(size));
    memset(op, 0, size);
    tly_handle_init(&op->handle, o && o->queued ? 3 : 2);
    op->comm = c;
    op->group = r->group;
    op->kind = r->kind;
    op->call = call;
    op->dtype = (uint8_t)r->dtype;
    op->reduction = r->reduction;
    op->root = call->root ? r->group->ranks[r->root] : r->root;
    op->count = r->count;
    op->bytes = r->count * tly_reduce_element_size((int)r->dtype);
    op->even = r->even;
    op->input = r->input;
    op->output = r->output;
    tly_completion_init(&op->completion, o && o->queued, o ? o->tag : NULL);
    tly_list_init(&op->node);
    op->priority =
        o && !op->call->message ? o->priority : 0; /* a probe comes behind what was asked for before */
    op->urgency = op->priority;
    op->space = o ? (uint8_t)o->space : 0;
    tly_wait_init(&op->wait, tly_joining_is_on(&c->joining));
    if (tly_spec_take(op, r, o) != 0 || !submit_furnish(c, op, r)) {
        tly_handle_leave_one(&op->handle);
        tly_op_unref(op);
        return NULL;
    }
    return op;
}

static char *submit_prepend(char *to, const char *text)
{
    size_t length = strlen(text);
    return memcpy(to - length, text, length);
}

/* "barrier no. 17", or without a kind "no. 17", to be read before `end`.  A formatter takes as long as a small operation. */
static const char *submit_make_name(char *end, const char *kind, uint64_t number)
{
    char *at = end;
    *--at = 0;
    do
        *--at = (char)('0' + number % 10);
    while (number /= 10);
    at = submit_prepend(at, "no. ");
    return kind ? submit_prepend(submit_prepend(at, " "), kind) : at;
}

/* Give the operation its name and round.  names.lock held. */
static int submit_name_op(tally_comm *c, const struct tly_request *r, struct tally_op *op)
{
    char made[96];
    const char *name = r->name;
    bool message = op->call->message;
    if (tly_names_are_closed(&c->names))
        return tly_fail(ESHUTDOWN, "the communicator is closing");
    if (tly_joining_is_on(&c->joining) && !message)
        return tly_fail(EINVAL, "this rank has joined: wait until all ranks have, and submit then");
    /* In an ordered space the number alone is the name: calls of different kinds shall meet, and be compared. */
    bool ordered = !name && op->call->collective && op->space >= TALLY_SPACE_ORDERED;
    struct tally_group *g = op->group;
    uint64_t *number = NULL;
    if (op->call->name) {
        int err = op->call->name(op, r, made, sizeof made);
        if (err)
            return err;
        name = made;
    } else if (!name) {
        number = ordered ? &g->ordered[op->space - TALLY_SPACE_ORDERED] : &g->unnamed[r->kind];
        name = submit_make_name(made + sizeof made, ordered ? NULL : op->call->function + strlen("tally_"),
                                *number + 1);
    }
    struct tly_tensor *t =
        tly_tensor_get(c, g,
                       ordered           ? 0
                       : op->call->names ? op->call->names
                                         : r->kind,
                       op->space, name);
    if (!t)
        return -ENOMEM;
    if (t->replica && !op->call->apart) /* a create, or a refusal of one */
        return tly_fail(EEXIST, "'%.100s' has been created already: use another name", name);
    /* Pairs with the release in tly_op_forget_tensor(). */
    if (!r->reason && atomic_load_explicit(&t->busy, memory_order_acquire))
        return tly_fail(EBUSY, "'%s' is in flight already: wait for it, or use another name", name);
    op->tensor = t;
    if (!r->name)
        t->called = (uint8_t)r->kind, t->even = r->even;
    int err = submit_check_reduction(op);
    if (err)
        return err;
    if (!r->name) {
        t->unnamed = true;
        if (number)
            ++*number;
    }
    op->key = t->key;
    op->round = t->round++;
    op->sequence = tly_names_next(&c->names);
    tly_spec_seal(op);
    tly_chain_choose(c, op);
    if (!r->reason)
        atomic_store_explicit(&t->busy, true, memory_order_relaxed);
    return 0;
}

/* The loop's lock, unless the loop is busy for longer than the few microseconds in which it goes back to sleep
 * after it has woken us. */
static bool submit_take_loop(tally_comm *c)
{
    for (int i = 0; i < LOCK_TRIES; i++) {
        if (pthread_mutex_trylock(&c->loop.lock) == 0)
            return true;
        tly_pause();
    }
    return false;
}

static void submit_hand_over(tally_comm *c, uint64_t bytes)
{
    bool taken = bytes <= SEND_BY_CALLER && submit_take_loop(c);
    bool waits = taken && tly_active_is_empty(&c->active); /* else the caller has more to do than to wait */
    if (taken && !waits)
        tly_loop_unlock(&c->loop);
    if (!waits) {
        tly_loop_wake(&c->loop);
        return;
    }
    c->loop.now = tly_now();
    tly_op_drain(c);
    tly_queue_admit(c);
    for (int i = 0; i < c->services; i++)
        if (c->peers[i].link && c->peers[i].first)
            tly_link_flush(c->peers[i].link);
    tly_loop_unlock(&c->loop);
}

int tly_submit(tally_comm *c, struct tly_request *r, const struct tally_options *o, tally_op **out)
{
    struct tally_options own;
    int err = tly_comm_check(c);
    if (!err)
        err = tly_options_take(&o, &own);
    if (err)
        return err;
    r->group = tly_submit_group(c, o);
    err = submit_check_request(c, r, o, out != NULL);
    if (err)
        return err;
    struct tally_op *op = submit_make_op(c, r, o);
    if (!op)
        return tly_fail(ENOMEM, "out of memory");
    if (o && o->place && !r->reason)
        err = tly_stager_take(op, o->stream);
    tly_names_lock(&c->names);
    if (!err)
        err = submit_name_op(c, r, op);
    uint64_t bytes = op->bytes;
    bool local = tly_sharing_is_direct(&op->shared);
    if (!err)
        tly_stamp(c->trace, TLY_AT_SUBMITTED, TLY_NO_PEER, op->key, op->round, TLY_NO_PART, (uint32_t)bytes);
    if (!err && !local) { /* before anybody can ask how far the name has come */
        tly_wait_begin(&op->wait);
        tly_inbox_put(&c->inbox, &op->node);
    }
    tly_names_unlock(&c->names);
    if (err) {
        tly_stager_leave(op, false);
        tly_handle_leave_one(&op->handle);
        tly_op_unref(op);
        return err;
    }
    if (local)
        tly_comm_submit_local(c, op);
    else
        submit_hand_over(c, bytes);
    if (out)
        *out = op;
    else
        tly_op_unref(op);
    return 0;
}

struct tally_op *tly_op_make(tally_comm *c, uint8_t kind, const struct tally_options *o)
{
    struct tly_request handle = {.group = tly_submit_group(c, o), .kind = kind, .dtype = TALLY_UINT8};
    return submit_make_op(c, &handle, o);
}

void tly_op_finish(struct tally_op *op, int err, const char *sentence)
{
    tly_handle_say(&op->handle, err, err ? sentence : NULL);
    tly_op_set_done(op);
    tly_op_unref(op);
}

int tally_op_cancel(tally_op *op, const char *reason)
{
    int err = tly_handle_check_fork(&op->handle);
    if (err)
        return err;
    if (tly_handle_is_done(&op->handle))
        return 0;
    if (op->call->apart)
        return tly_fail(EINVAL, "what was added to a shared tensor cannot be taken back: wait for it");
    tally_comm *c = op->comm;
    char *text = submit_copy_reason(reason);
    if (!text)
        return tly_fail(ENOMEM, "out of memory");
    tly_loop_lock(&c->loop);
    bool first = !op->reason;
    if (first)
        op->reason = text; /* who begins it from now on finds it */
    else
        free(text);
    if (first && op->epoch)
        tly_op_cancel(c, op);
    tly_loop_unlock(&c->loop);
    tly_loop_wake(&c->loop);
    if (tly_sharing_is_direct(&op->shared))
        tly_sharing_take_back(&op->shared);
    return 0;
}
