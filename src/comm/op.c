/* op.c - operations from submission to completion.
 *
 * Submission checks and names in the caller's thread, then hands over through the inbox; the loop cuts.  A small
 * operation is sent by the caller itself if the loop is asleep: that saves a change of threads. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/thread.h"
#include "comm/internal.h"
#include "reduce/reduce.h"

/* The sender of a message of up to TLY_KEPT_BYTES does not wait, as long as all such copies are no more than this. */
enum { COPIED_BYTES = 16 << 20 };
enum { SEND_BY_CALLER = 64 << 10, LOCK_TRIES = 64 };
enum { MOST_REASON = 600 }; /* bytes of a refusal's */
static const char no_reason[] = "no reason given";

/* --- handles ------------------------------------------------------------------------------------- */

void tly_op_unref(struct tally_op *op)
{
    /* acq_rel: who frees sees all that the others have written.  The only one left need not subtract. */
    if (atomic_load_explicit(&op->references, memory_order_acquire) != 1 &&
        atomic_fetch_sub_explicit(&op->references, 1, memory_order_acq_rel) != 1)
        return;
    free(op->sentence);
    free(op->note);
    free(op->reason);
    if (op->shape != op->few_dims)
        free(op->shape);
    free(op->parts);
    free(op->first_dims);
    free(op->gathered);
    if (op->copy)
        atomic_fetch_sub_explicit(&op->comm->copied, op->bytes, memory_order_relaxed);
    free(op->copy);
    if (op->zeros)
        tly_pool_free(op->zeros);
    free(op->table);
    free(op->pairs);
    tly_local_unref(op->engine);
    free(op);
}

void tally_op_free(tally_op *op)
{
    if (op && op->generation == tly_fork_generation())
        tly_op_unref(op);
}

int tally_op_poll(const tally_op *op)
{
    return tly_event_is_set(&op->done);
}

int tally_op_wait(tally_op *op, int timeout_ms)
{
    if (op->generation != tly_fork_generation())
        return tly_fail(ECHILD, "the operation belongs to a parent process");
    int64_t deadline = timeout_ms < 0 ? -1 : tly_now() + timeout_ms * TLY_MS;
    if (op->engine && !op->team &&
        !tly_event_is_set(&op->done)) /* of a team it is for the network that all wait */
        tly_local_wait(op->engine, &op->local, &op->done, deadline);
    if (!tly_event_is_set(&op->done) && !tly_event_wait(&op->done, deadline))
        return -ETIMEDOUT;
    return op->status ? tly_fail(-op->status, "%s", op->sentence ? op->sentence : "failed") : 0;
}

void tly_op_set_done(struct tally_op *op)
{
    tly_event_set(&op->done);
    /* Pairs with tally_op_watch(), all of it seq_cst: one of the two sees what the other has written. */
    if (atomic_load(&op->queued) && !atomic_exchange(&op->announced, true))
        tly_events_op(op->comm, op);
}

int tally_op_watch(tally_op *op)
{
    if (op->generation != tly_fork_generation())
        return tly_fail(ECHILD, "the operation belongs to a parent process");
    atomic_fetch_add(&op->references, 1); /* the completion queue's */
    if (atomic_exchange(&op->queued, true)) {
        tly_op_unref(op);
        return tly_fail(EINVAL, "the operation's end was asked for before");
    }
    if (!tly_event_is_set(&op->done) || atomic_exchange(&op->announced, true))
        return 0;
    tly_op_unref(op);
    return 1;
}

static char *copy_reason(const char *reason)
{
    return strndup(reason ? reason : no_reason, MOST_REASON);
}

int tally_op_cancel(tally_op *op, const char *reason)
{
    if (op->generation != tly_fork_generation())
        return tly_fail(ECHILD, "the operation belongs to a parent process");
    if (tly_event_is_set(&op->done))
        return 0;
    tally_comm *c = op->comm;
    char *text = copy_reason(reason);
    if (!text)
        return tly_fail(ENOMEM, "out of memory");
    tly_loop_lock(&c->loop);
    bool first = !op->reason;
    if (first)
        op->reason = text; /* who begins it from now on finds it */
    else
        free(text);
    if (first && op->epoch)
        tly_queue_cancel(c, op);
    tly_loop_unlock(&c->loop);
    tly_loop_wake(&c->loop);
    if (op->engine && !op->team)
        tly_local_take_back(op->engine, &op->local);
    return 0;
}

const char *tally_op_error(const tally_op *op)
{
    return tly_event_is_set(&op->done) && op->status && op->sentence ? op->sentence : "";
}

int tally_op_gathered(const tally_op *op, const void **data, size_t *bytes, const int64_t **first_dims)
{
    if (op->kind != TALLY_ALLGATHER)
        return tly_fail(EINVAL, "the operation is no allgather");
    if (!tly_event_is_set(&op->done) || op->status)
        return tly_fail(EAGAIN, "the allgather has no result");
    *data = op->even ? op->output : op->gathered;
    *bytes = op->gathered_bytes;
    *first_dims = op->first_dims;
    return 0;
}

/* --- completion (in the loop) -------------------------------------------------------------------- */

struct tally_op *tly_op_find(tally_comm *c, const struct tly_frame *f)
{
    struct tally_op *op = tly_map_get(&c->active, f->key);
    return op && op->round == f->round ? op : NULL;
}

void tly_op_forget_tensor(tally_comm *c, struct tensor *t, bool mark)
{
    if (!t->unnamed) {
        if (mark)
            return; /* the name was free all the time */
        /* Pairs with the acquire in submission: its next operation sees all that this one wrote. */
        atomic_store_explicit(&t->busy, false, memory_order_release);
        return;
    }
    pthread_mutex_lock(&c->names_lock);
    tly_map_take(&c->names, t->key);
    pthread_mutex_unlock(&c->names_lock);
    tly_tensor_destroy(t);
}

static void complete(tally_comm *c, struct tally_op *op)
{
    if (!op->mark)
        tly_map_take(&c->active, op->key);
    tly_stamp(c->trace, TLY_AT_DONE, TLY_NO_PEER, op->key, op->round, TLY_NO_PART, (uint32_t)op->bytes);
    tly_list_remove(&op->node);
    tly_pace_leaves(c, op);
    tly_team_withdraw(c, op);
    tly_op_forget_tensor(c, op->tensor, op->mark);
    op->tensor = NULL;
    c->ops_done++;
    c->bytes_done += op->bytes;
    tly_epoch_unref(op->epoch);
    op->epoch = NULL;
    tly_op_set_done(op);
    tly_op_unref(op);
    tly_comm_ended(c);
}

void tly_op_end(tally_comm *c, struct tally_op *op, int err, const char *sentence)
{
    char text[TLY_SENTENCE];
    char title[TLY_TITLE];
    snprintf(text, sizeof text, "%s: %s", tly_op_title(op, title), sentence);
    op->status = -err;
    op->sentence = strdup(text);
    if (op->copy && err != ESHUTDOWN && !atomic_load_explicit(&c->failed, memory_order_relaxed))
        tly_warn("comm", "%s", text); /* nobody waits for it */
    tly_epoch_forget(op);
    tly_queue_withdraw(c, op);
    complete(c, op);
}

void tly_op_stage(const struct tally_op *op, char *out, size_t len)
{
    static const char *const stages[] = {
        [PART_IDLE] = "is not summed on this machine yet",
        [PART_QUEUED] = "has no credit or window to be sent yet",
        [PART_ADMITTED] = "is not sent yet",
        [PART_SENT] = "has been sent and is not answered",
        [PART_DOUBTED] = "was sent over a connection that is lost",
        [PART_SAID] = "was told again after a connection was lost, and is not asked for",
        [PART_LANDED] = "has landed, and not all ranks have it",
    };
    uint32_t i = 0;
    while (i < op->part_count && op->parts[i].state == PART_LANDED && !op->parts[i].keep)
        i++;
    if (i == op->part_count) {
        snprintf(out, len, "what other ranks of this machine have sent of it is not answered");
        return;
    }
    snprintf(out, len, "part %u of %u, which %.200s sums, %s", i + 1, op->part_count,
             op->comm->peers[op->parts[i].owner].name, stages[op->parts[i].state]);
}

/* Queue what is not queued yet, as far as it may be ahead of what has landed. */
static int queue_parts(tally_comm *c, struct tally_op *op)
{
    uint32_t landed = op->part_count - op->parts_left, most = op->part_count;
    if (op->ahead && landed + op->ahead < most)
        most = landed + op->ahead;
    for (; op->queued_parts < most; op->queued_parts++)
        if (tly_queue_part(c, &op->parts[op->queued_parts]) != 0)
            return -ENOMEM;
    return 0;
}

void tly_op_landed(tally_comm *c, struct part *p)
{
    struct tally_op *op = p->op;
    struct peer *peer = &c->peers[p->owner];
    p->state = PART_LANDED;
    c->traffic.moved += p->result_length;
    if (tly_team_carries(p))
        tly_local_landed(op->engine, &p->shard);
    op->missing -= p->length;
    if (op->kind == TALLY_ALLGATHER && !op->listed) {
        op->listed = true;
        int err = tly_parts_gather(c, op);
        err = err ? err : queue_parts(c, op);
        if (err) {
            char text[TLY_TITLE + 100], title[TLY_TITLE];
            snprintf(text, sizeof text, "rank %d cannot take the result of %s: %s", c->rank,
                     tly_op_title(op, title), strerror(-err));
            tly_member_complain(&c->member, -err, text);
            tly_comm_fail(c, -err, text);
            return;
        }
        p = &op->parts[0]; /* they have moved */
    }
    for (int i = 0; op->kind == TLY_PROBE && i < op->group->size; i++)
        if (op->group->ranks[i] == (uint32_t)op->found)
            op->source = i;
    if (peer->mortal)
        tly_epoch_keep(peer, p);
    else
        tly_op_settled(c, p);
}

void tly_op_settled(tally_comm *c, struct part *p)
{
    struct tally_op *op = p->op;
    if (--op->parts_left == 0)
        complete(c, op);
    else if (op->ahead && queue_parts(c, op) != 0)
        tly_comm_fail(c, ENOMEM, "out of memory");
}

/* The operation's round begins: in which epoch, and so who sums its parts, is known now. */
static int begin(tally_comm *c, struct tally_op *op)
{
    op->epoch = tly_epoch_begin(c, op->key, op->round);
    tly_debug("comm", "round %u of '%.100s' is of epoch %u", op->round, op->tensor->name, op->epoch->number);
    int err = tly_parts_make(c, op);
    if (!op->credit)
        op->credit = c->credit_bytes;
    op->missing = 0;
    for (uint32_t i = 0; i < op->part_count && !err; i++)
        op->missing += op->parts[i].length;
    if (err)
        return err;
    if (op->team) { /* if it is to fail, too: the others' rounds there end when all posts have come */
        op->local.ahead = op->credit;
        tly_local_enter(op->engine, &op->local);
    }
    if (op->reason)
        tly_queue_cancel(c, op);
    if (op->reason ||
        op->team) /* home is all that hears of it; or the others' parts follow once they are summed */
        return tly_queue_part(c, &op->parts[0]);
    return queue_parts(c, op);
}

void tly_op_drain(tally_comm *c)
{
    struct tly_list mine;
    int failed = atomic_load_explicit(&c->failed, memory_order_relaxed);
    if (c->preparing && !failed)
        return; /* nothing begins while an epoch is agreed on */
    pthread_mutex_lock(&c->inbox_lock);
    if (tly_list_empty(&c->inbox)) {
        pthread_mutex_unlock(&c->inbox_lock);
        return;
    }
    mine = c->inbox;
    mine.next->prev = mine.prev->next = &mine;
    tly_list_init(&c->inbox);
    pthread_mutex_unlock(&c->inbox_lock);
    while (!tly_list_empty(&mine)) {
        struct tally_op *op = tly_list_entry(mine.next, struct tally_op, node);
        tly_list_remove(&op->node);
        tly_list_append(&c->active_ops, &op->node);
        tly_pace_enters(c, op);
        op->born = c->loop.awake;
        if (failed) {
            tly_op_end(c, op, failed, c->sentence);
        } else if ((!op->mark && tly_map_put(&c->active, op->key, op) != 0) || begin(c, op) != 0) {
            tly_comm_fail(c, ENOMEM, "out of memory");
            failed = ENOMEM;
        }
    }
}

/* --- submission (in the caller's thread) --------------------------------------------------------- */

/* What the caller asked for, before it is an operation. */
struct request {
    struct tally_group *group;
    const char *name;
    uint8_t kind, reduction;
    unsigned dtype;
    uint32_t
        root; /* in the group; of a barrier: it needs all ranks, also those that have joined; of an allgather: it does not */
    const void *input;
    void *output;
    uint64_t count, digest;
    uint32_t from, to, tag;    /* of a message: ranks of the communicator */
    bool copy;                 /* the caller does not wait */
    bool even;                 /* an allgather into the caller's memory: all ranks give as much */
    const size_t *give, *take; /* elements for each rank of the group and from each; NULL: none for any */
    const char *reason;        /* an error mark */
};

static bool has_root(uint8_t kind)
{
    return kind == TALLY_BROADCAST || kind == TALLY_REDUCE || kind == TALLY_GATHER || kind == TALLY_SCATTER;
}

static struct tally_group *group_of(tally_comm *c, const struct tally_options *o)
{
    return o && o->size == sizeof *o && o->group ? o->group : &c->all;
}

static int check_request(const tally_comm *c, const struct request *r, const struct tally_options *o,
                         bool out)
{
    if (r->dtype >= TLY_DTYPE_COUNT)
        return tly_fail(EINVAL, "%d is no dtype", (int)r->dtype);
    size_t element = tly_reduce_element_size((int)r->dtype);
    uint64_t bytes; /* nothing is divided by what the compiler does not know: that takes as long as a lock */
    if (__builtin_mul_overflow(r->count, element, &bytes) || bytes > UINT64_MAX / 16)
        return tly_fail(EINVAL, "%llu elements are too many", (unsigned long long)r->count);
    bool gives = r->kind != TALLY_BROADCAST;
    bool gets =
        r->kind == TALLY_ALLGATHER ? r->even : r->kind != TALLY_REDUCE || r->root == (uint32_t)r->group->rank;
    if (r->kind == TALLY_MESSAGE)
        gets = !(gives = r->from == (uint32_t)c->rank);
    if (r->count && !tly_kind_is_exchange(r->kind) && ((gives && !r->input) || (gets && !r->output)))
        return tly_fail(EINVAL, "a NULL pointer for %llu elements", (unsigned long long)r->count);
    if (r->group->comm != c)
        return tly_fail(EINVAL, "the group is another communicator's");
    if (r->even && bytes > SIZE_MAX / 16 / (unsigned)r->group->size)
        return tly_fail(EINVAL, "%llu elements of each of %d ranks are too many",
                        (unsigned long long)r->count, r->group->size);
    if (has_root(r->kind) && r->root >= (uint32_t)r->group->size)
        return tly_fail(EINVAL, "root %d is no rank from 0 to %d", (int)r->root, r->group->size - 1);
    if (tly_kind_is_exchange(r->kind) && 16ull * (unsigned)r->group->size > c->part_least)
        return tly_fail(EINVAL, "%d ranks are too many for parts of %u bytes", r->group->size, c->part_least);
    if (r->kind != TALLY_ALLGATHER && bytes / (UINT32_MAX / 64 + 1u) >= c->part_least)
        return tly_fail(EINVAL, "%llu elements are too many for parts of %u bytes",
                        (unsigned long long)r->count, c->part_least);
    if (!o)
        return 0;
    if (o->size != sizeof *o)
        return tly_fail(EINVAL, "tally_options.size is %zu, this library knows %zu", o->size, sizeof *o);
    if (o->queued && !out)
        return tly_fail(EINVAL, "a queued operation needs a handle");
    if (o->ndim > 64 || (o->ndim && !o->shape))
        return tly_fail(EINVAL, "a shape of %u dimensions", o->ndim);
    if (o->space > 255)
        return tly_fail(EINVAL, "space %u is not from 0 to 255", o->space);
    if (o->shape && tly_kind_takes_shape(r->kind) && r->kind != TALLY_BARRIER) {
        uint64_t product = 1;
        bool overflow = false, empty = false;
        for (uint32_t i = 0; i < o->ndim; i++) {
            if (o->shape[i] < 0)
                return tly_fail(EINVAL, "dimension %u is %lld", i, (long long)o->shape[i]);
            empty |= o->shape[i] == 0;
            overflow |= __builtin_mul_overflow(product, (uint64_t)o->shape[i], &product);
        }
        if (empty)
            product = 0;
        if ((overflow && !empty) || product != r->count)
            return tly_fail(EINVAL, "the shape does not hold %llu elements", (unsigned long long)r->count);
    }
    return 0;
}

static int check_reduction(const struct tally_op *op)
{
    const char *why = "unknown";
    struct tly_reduction r = {op->dtype, op->reduction, (uint32_t)op->group->size, op->prescale,
                              op->postscale};
    char title[TLY_TITLE];
    if (tly_op_is_sum(op) && tly_reduce_check(&r, &why) != 0)
        return tly_fail(EINVAL, "%s: %s", op->tensor ? tly_op_title(op, title) : "?", why);
    return 0;
}

static int64_t *make_table(const struct request *r)
{
    size_t n = (size_t)r->group->size;
    int64_t *table = calloc(2 * n, sizeof *table);
    for (size_t i = 0; table && i < n; i++) {
        table[i] = r->give ? (int64_t)r->give[i] : 0;
        table[n + i] = r->take ? (int64_t)r->take[i] : 0;
    }
    return table;
}

/* What is compared of lengths: the caller's shape, or those of all pieces; nothing, where only two ranks know them. */
static void take_shape(struct tally_op *op, const struct request *r, const struct tally_options *o)
{
    bool pieces = r->kind == TALLY_REDUCE_SCATTER && r->give;
    bool shaped = !pieces && tly_kind_takes_shape(r->kind) && o && o->shape;
    op->ndim = pieces ? (uint32_t)r->group->size : tly_kind_is_exchange(r->kind) ? 0 : shaped ? o->ndim : 1;
    op->shape = op->ndim <= TLY_FEW_DIMS ? op->few_dims : calloc(op->ndim, sizeof *op->shape);
    for (uint32_t i = 0; op->shape && i < op->ndim; i++)
        op->shape[i] = pieces ? (int64_t)r->give[i] : shaped ? o->shape[i] : (int64_t)r->count;
}

/* What few operations have.  False: no memory. */
static bool furnish(tally_comm *c, struct tally_op *op, const struct request *r,
                    const struct tally_options *o)
{
    if (o && o->note && !(op->note = strdup(o->note)))
        return false;
    if (r->reason) {
        op->mark = true;
        op->reason = copy_reason(r->reason);
        if (!op->reason)
            return false;
    } else if (tly_kind_is_exchange(r->kind) && !(op->table = make_table(r))) {
        return false;
    }
    if (r->kind == TALLY_ALLGATHER &&
        !(op->first_dims = calloc((size_t)r->group->size, sizeof *op->first_dims)))
        return false;
    for (int i = 0; r->even && i < r->group->size; i++)
        op->first_dims[i] = op->ndim ? op->shape[0] : 1;
    op->gathered_bytes = r->even ? op->bytes * (unsigned)r->group->size : 0;
    if (!r->copy)
        return true;
    op->copy = malloc(op->bytes + 1);
    if (!op->copy)
        return false;
    if (op->bytes)
        memcpy(op->copy, r->input, op->bytes);
    op->input = op->copy;
    atomic_fetch_add_explicit(&c->copied, op->bytes, memory_order_relaxed);
    return true;
}

static struct tally_op *make_op(tally_comm *c, const struct request *r, const struct tally_options *o)
{
    struct tally_op *op = malloc(sizeof *op);
    if (!op)
        return NULL;
    /* Not calloc(), which passes by the thread's cache of what was freed, in many a libc; and the compiler must not make it
     * one, nor a slow string instruction. */
    size_t size = sizeof *op;
    __asm__("" : "+r"(size));
    memset(op, 0, size);
    atomic_init(&op->references, 2);
    op->generation = c->generation;
    op->comm = c;
    op->group = r->group;
    op->kind = r->kind;
    op->dtype = (uint8_t)r->dtype;
    op->reduction = r->reduction;
    op->root = has_root(r->kind) ? r->group->ranks[r->root] : r->root;
    op->count = r->count;
    op->bytes = r->count * tly_reduce_element_size((int)r->dtype);
    op->digest = r->digest;
    op->from = r->from;
    op->to = r->to;
    op->even = op->listed = r->even;
    op->input = r->input;
    op->output = r->output;
    op->prescale = o && o->prescale != 0 ? o->prescale : 1;
    op->postscale = o && o->postscale != 0 ? o->postscale : 1;
    atomic_init(&op->queued, o && o->queued);
    tly_list_init(&op->node);
    tly_list_init(&op->event);
    op->priority = o && !tly_kind_is_message(r->kind)
                       ? o->priority
                       : 0; /* a probe comes behind what was asked for before */
    op->space = o ? (uint8_t)o->space : 0;
    op->tag = o ? o->tag : NULL;
    op->patient = atomic_load_explicit(&c->stands_by, memory_order_relaxed);
    take_shape(op, r, o);
    if (o && o->queued)
        atomic_init(&op->references, 3);
    if (!op->shape || !furnish(c, op, r, o)) {
        atomic_store_explicit(&op->references, 1, memory_order_relaxed);
        tly_op_unref(op);
        return NULL;
    }
    return op;
}

/* The n-th message from one rank to another with a tag; and the mailbox in which a probe looks.  names_lock held. */
static int number_message(const struct request *r, struct tally_op *op, char *name, size_t len)
{
    struct tally_group *g = op->group;
    const uint32_t mailbox[] = {op->space, r->tag};
    const uint32_t box[] = {op->space, r->tag, op->kind, r->from, r->to};
    uint64_t key = XXH3_64bits_withSeed(box, sizeof box, 5);
    uintptr_t n = (uintptr_t)tly_map_get(&g->messages, key);
    op->mailbox = XXH3_64bits_withSeed(mailbox, sizeof mailbox, g->id) | 1;
    if (r->kind == TLY_PROBE)
        snprintf(name, len, "probe no. %llu of rank %u, tag %u", (unsigned long long)n + 1, r->to, r->tag);
    else
        snprintf(name, len, "message no. %llu from rank %u to rank %u, tag %u", (unsigned long long)n + 1,
                 r->from, r->to, r->tag);
    return tly_map_put(&g->messages, key, (void *)(n + 1)) ? tly_fail(ENOMEM, "out of memory") : 0;
}

/* What the rank gives itself. */
static void keep_own_piece(const struct tally_op *op)
{
    const struct tally_group *g = op->group;
    uint64_t element = tly_reduce_element_size(op->dtype);
    const uint8_t *input = op->input;
    uint8_t *output = op->output;
    for (int i = 0; i < g->rank; i++) {
        input += (uint64_t)op->table[i] * element;
        output += (uint64_t)op->table[g->size + i] * element;
    }
    uint64_t given = (uint64_t)op->table[g->rank] * element;
    if (op->table[g->rank] == op->table[g->size + g->rank] && given && output != input)
        memmove(output, input, given);
}

static char *prepend(char *to, const char *text)
{
    size_t length = strlen(text);
    return memcpy(to - length, text, length);
}

/* "barrier no. 17", or without a kind "no. 17", to be read before `end`.  A formatter takes as long as a small operation. */
static const char *make_name(char *end, const char *kind, uint64_t number)
{
    char *at = end;
    *--at = 0;
    do
        *--at = (char)('0' + number % 10);
    while (number /= 10);
    at = prepend(at, "no. ");
    return kind ? prepend(prepend(at, " "), kind) : at;
}

/* Give the operation its name and round.  names_lock held. */
static int name_op(tally_comm *c, const struct request *r, struct tally_op *op)
{
    char made[96];
    const char *name = r->name;
    bool message = tly_kind_is_message(r->kind);
    static const char *const kinds[] = {"?",      "push_pull",      "broadcast", "allgather", "barrier",
                                        "reduce", "reduce_scatter", "alltoall",  "gather",    "scatter"};
    if (c->closing)
        return tly_fail(ESHUTDOWN, "the communicator is closing");
    if (atomic_load_explicit(&c->joining.on, memory_order_relaxed) && !message)
        return tly_fail(EINVAL, "this rank has joined: it submits nothing more until all ranks have");
    /* In an ordered space the number alone is the name: calls of different kinds shall meet, and be compared. */
    bool ordered = !name && !message && op->space >= TALLY_SPACE_ORDERED;
    struct tally_group *g = op->group;
    uint64_t *number = NULL;
    if (message) {
        int err = number_message(r, op, made, sizeof made);
        if (err)
            return err;
        name = made;
    } else if (!name) {
        number = ordered ? &g->ordered[op->space - TALLY_SPACE_ORDERED] : &g->unnamed[r->kind];
        name = make_name(made + sizeof made, ordered ? NULL : kinds[r->kind], *number + 1);
    }
    struct tensor *t = tly_tensor_get(c, g, ordered ? 0 : r->kind, op->space, name);
    if (!t)
        return -ENOMEM;
    /* Pairs with the release in tly_op_forget_tensor(). */
    if (!r->reason && atomic_load_explicit(&t->busy, memory_order_acquire))
        return tly_fail(EBUSY, "'%s' is in flight already: wait for it, or use another name", name);
    op->tensor = t;
    if (!r->name)
        t->called = (uint8_t)r->kind, t->even = r->even;
    int err = check_reduction(op);
    if (err)
        return err;
    if (op->table && !op->mark)
        keep_own_piece(op);
    bool local = tly_comm_is_local(op, ordered), team = tly_team_suits(c, op);
    if (local || team) {
        op->engine = c->local; /* it is cut into parts only if it must go to the service after all */
        if (team)
            tly_local_ref(op->engine); /* else tly_local_submit() does */
        c->engine_ops++;
    }
    if (!r->name) {
        t->unnamed = true;
        if (number)
            ++*number;
    }
    op->key = t->key;
    op->round = t->round++;
    op->sequence = c->sequence++;
    op->spec = tly_spec_hash(op);
    if (team)
        tly_team_prepare(c, op);
    if (!r->reason)
        atomic_store_explicit(&t->busy, true, memory_order_relaxed);
    return 0;
}

/* The loop's lock, unless the loop is busy for longer than the few microseconds in which it goes back to sleep
 * after it has woken us. */
static bool take_loop(tally_comm *c)
{
    for (int i = 0; i < LOCK_TRIES; i++) {
        if (pthread_mutex_trylock(&c->loop.lock) == 0)
            return true;
        tly_pause();
    }
    return false;
}

static void hand_over(tally_comm *c, uint64_t bytes)
{
    bool taken = bytes <= SEND_BY_CALLER && take_loop(c);
    bool waits = taken && tly_list_empty(&c->active_ops); /* else the caller has more to do than to wait */
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

static int submit(tally_comm *c, struct request *r, const struct tally_options *o, tally_op **out)
{
    int err = tly_comm_check(c);
    r->group = group_of(c, o);
    if (!err)
        err = check_request(c, r, o, out != NULL);
    if (err)
        return err;
    struct tally_op *op = make_op(c, r, o);
    if (!op)
        return tly_fail(ENOMEM, "out of memory");
    pthread_mutex_lock(&c->names_lock);
    err = name_op(c, r, op);
    uint64_t bytes = op->bytes;
    bool local = op->engine && !op->team;
    if (!err)
        tly_stamp(c->trace, TLY_AT_SUBMITTED, TLY_NO_PEER, op->key, op->round, TLY_NO_PART, (uint32_t)bytes);
    if (!err && !local) { /* before anybody can ask how far the name has come */
        op->submitted = tly_now();
        pthread_mutex_lock(&c->inbox_lock);
        tly_list_append(&c->inbox, &op->node);
        pthread_mutex_unlock(&c->inbox_lock);
    }
    pthread_mutex_unlock(&c->names_lock);
    if (err) {
        op->references = 1;
        tly_op_unref(op);
        return err;
    }
    if (local)
        tly_comm_submit_local(c, op);
    else
        hand_over(c, bytes);
    if (out)
        *out = op;
    else
        tly_op_unref(op);
    return 0;
}

int tally_push_pull(tally_comm *comm, const char *name, const void *input, void *output, size_t count,
                    enum tally_dtype dtype, enum tally_reduction reduction,
                    const struct tally_options *options, tally_op **op)
{
    struct request r = {.name = name,
                        .kind = TALLY_PUSH_PULL,
                        .dtype = (unsigned)dtype,
                        .reduction = (uint8_t)reduction,
                        .input = input,
                        .output = output,
                        .count = count};
    if ((unsigned)reduction > TALLY_BXOR)
        return tly_fail(EINVAL, "%d is no reduction", (int)reduction);
    return submit(comm, &r, options, op);
}

int tally_reduce(tally_comm *comm, const char *name, const void *input, void *output, size_t count,
                 enum tally_dtype dtype, enum tally_reduction reduction, int root,
                 const struct tally_options *options, tally_op **op)
{
    struct request r = {.name = name,
                        .kind = TALLY_REDUCE,
                        .dtype = (unsigned)dtype,
                        .reduction = (uint8_t)reduction,
                        .root = (uint32_t)root,
                        .input = input,
                        .output = output,
                        .count = count};
    if ((unsigned)reduction > TALLY_BXOR)
        return tly_fail(EINVAL, "%d is no reduction", (int)reduction);
    return submit(comm, &r, options, op);
}

/* Sum of a group's counts, which are checked; -EINVAL. */
static int add_up(const size_t counts[], int n, uint64_t *sum)
{
    uint64_t s = 0;
    for (int i = 0; counts && i < n; i++)
        if (counts[i] > INT64_MAX / 16 || __builtin_add_overflow(s, counts[i], &s) || s > INT64_MAX / 16)
            return tly_fail(EINVAL, "too many elements");
    *sum = s;
    return 0;
}

int tally_reduce_scatter(tally_comm *comm, const char *name, const void *input, void *output,
                         const size_t counts[], enum tally_dtype dtype, enum tally_reduction reduction,
                         const struct tally_options *options, tally_op **op)
{
    struct request r = {.name = name,
                        .kind = TALLY_REDUCE_SCATTER,
                        .dtype = (unsigned)dtype,
                        .reduction = (uint8_t)reduction,
                        .input = input,
                        .output = output,
                        .give = counts};
    const struct tally_group *g = group_of(comm, options);
    if ((unsigned)reduction > TALLY_BXOR)
        return tly_fail(EINVAL, "%d is no reduction", (int)reduction);
    if (!counts)
        return tly_fail(EINVAL, "no counts");
    int err = add_up(counts, g->size, &r.count);
    if (err)
        return err;
    if (!output && counts[g->rank] == 0)
        r.output = (void *)input; /* nothing will land there */
    return submit(comm, &r, options, op);
}

/* An operation of pieces between two ranks. */
static int exchange(tally_comm *c, struct request *r, const struct tally_options *o, tally_op **op)
{
    const struct tally_group *g = group_of(c, o);
    uint64_t given = 0, taken = 0;
    int err = add_up(r->give, g->size, &given);
    if (!err)
        err = add_up(r->take, g->size, &taken);
    if (err)
        return err;
    if ((given && !r->input) || (taken && !r->output))
        return tly_fail(EINVAL, "a NULL pointer for %llu elements", (unsigned long long)given + taken);
    r->count = given > taken ? given : taken;
    return submit(c, r, o, op);
}

int tally_alltoall(tally_comm *comm, const char *name, const void *input, const size_t give[], void *output,
                   const size_t take[], enum tally_dtype dtype, const struct tally_options *options,
                   tally_op **op)
{
    struct request r = {.name = name,
                        .kind = TALLY_ALLTOALL,
                        .dtype = (unsigned)dtype,
                        .input = input,
                        .output = output,
                        .give = give,
                        .take = take};
    if (!give || !take)
        return tly_fail(EINVAL, "no counts");
    return exchange(comm, &r, options, op);
}

/* Between the root, which has counts for all, and each of the others, which has one for the root. */
static int exchange_with_root(tally_comm *c, struct request *r, const size_t counts[], size_t count,
                              const struct tally_options *o, tally_op **op)
{
    const struct tally_group *g = group_of(c, o);
    bool root = r->root == (uint32_t)g->rank;
    if (r->root >= (uint32_t)g->size)
        return tly_fail(EINVAL, "root %d is no rank from 0 to %d", (int)r->root, g->size - 1);
    if (root && !counts)
        return tly_fail(EINVAL, "no counts");
    size_t *one = calloc((size_t)g->size, sizeof *one);
    if (!one)
        return tly_fail(ENOMEM, "out of memory");
    one[r->root] = count;
    bool gather = r->kind == TALLY_GATHER;
    r->give = gather ? one : root ? counts : NULL;
    r->take = gather ? root ? counts : NULL : one;
    int err = exchange(c, r, o, op);
    free(one);
    return err;
}

int tally_gather(tally_comm *comm, const char *name, const void *input, size_t count, void *output,
                 const size_t counts[], enum tally_dtype dtype, int root, const struct tally_options *options,
                 tally_op **op)
{
    struct request r = {.name = name,
                        .kind = TALLY_GATHER,
                        .dtype = (unsigned)dtype,
                        .root = (uint32_t)root,
                        .input = input,
                        .output = output};
    return exchange_with_root(comm, &r, counts, count, options, op);
}

int tally_scatter(tally_comm *comm, const char *name, const void *input, const size_t counts[], void *output,
                  size_t count, enum tally_dtype dtype, int root, const struct tally_options *options,
                  tally_op **op)
{
    struct request r = {.name = name,
                        .kind = TALLY_SCATTER,
                        .dtype = (unsigned)dtype,
                        .root = (uint32_t)root,
                        .input = input,
                        .output = output};
    return exchange_with_root(comm, &r, counts, count, options, op);
}

int tally_broadcast(tally_comm *comm, const char *name, void *buffer, size_t count, enum tally_dtype dtype,
                    int root, const struct tally_options *options, tally_op **op)
{
    struct request r = {.name = name,
                        .kind = TALLY_BROADCAST,
                        .dtype = (unsigned)dtype,
                        .root = (uint32_t)root,
                        .input = buffer,
                        .output = buffer,
                        .count = count};
    return submit(comm, &r, options, op);
}

int tally_allgather(tally_comm *comm, const char *name, const void *input, size_t count,
                    enum tally_dtype dtype, const struct tally_options *options, tally_op **op)
{
    struct request r = {
        .name = name, .kind = TALLY_ALLGATHER, .dtype = (unsigned)dtype, .input = input, .count = count};
    r.root = options && options->size == sizeof *options && options->partial;
    return submit(comm, &r, options, op);
}

int tally_allgather_into(tally_comm *comm, const char *name, const void *input, void *output, size_t count,
                         enum tally_dtype dtype, const struct tally_options *options, tally_op **op)
{
    struct request r = {.name = name,
                        .kind = TALLY_ALLGATHER,
                        .dtype = (unsigned)dtype,
                        .input = input,
                        .output = output,
                        .count = count,
                        .even = true};
    return submit(comm, &r, options, op);
}

int tally_barrier(tally_comm *comm, const char *name, const struct tally_options *options, tally_op **op)
{
    struct request r = {.name = name, .kind = TALLY_BARRIER, .dtype = TALLY_UINT8};
    return submit(comm, &r, options, op);
}

int tly_op_submit_barrier(tally_comm *c, const char *name, uint64_t digest, tally_op **op)
{
    struct request r = {
        .name = name, .kind = TALLY_BARRIER, .dtype = TALLY_UINT8, .root = 1, .digest = digest};
    return submit(c, &r, NULL, op);
}

struct tally_op *tly_op_make(tally_comm *c, uint8_t kind, const struct tally_options *o)
{
    struct request handle = {.group = group_of(c, o), .kind = kind, .dtype = TALLY_UINT8};
    return make_op(c, &handle, o);
}

void tly_op_finish(struct tally_op *op, int err, const char *sentence)
{
    op->status = -err;
    op->sentence = err ? strdup(sentence) : NULL;
    tly_op_set_done(op);
    tly_op_unref(op);
}

/* A handle of something that has ended. */
static int hand_out_ended(tally_comm *c, uint8_t kind, const struct tally_options *o, tally_op **out)
{
    struct tally_op *op = tly_op_make(c, kind, o);
    if (!op)
        return tly_fail(ENOMEM, "out of memory");
    tly_op_finish(op, 0, NULL);
    *out = op;
    return 0;
}

static int other_rank(const struct tally_group *g, int place, uint32_t *rank)
{
    if (place < 0 || place >= g->size)
        return tly_fail(EINVAL, "%d is no rank from 0 to %d", place, g->size - 1);
    if (place == g->rank)
        return tly_fail(EINVAL, "a message of rank %d to itself", place);
    *rank = g->ranks[place];
    return 0;
}

int tally_send(tally_comm *comm, const void *input, size_t count, enum tally_dtype dtype, int to,
               uint32_t tag, const struct tally_options *options, tally_op **op)
{
    struct request r = {.kind = TALLY_MESSAGE,
                        .dtype = (unsigned)dtype,
                        .input = input,
                        .count = count,
                        .from = (uint32_t)comm->rank,
                        .tag = tag};
    int err = other_rank(group_of(comm, options), to, &r.to);
    if (err)
        return err;
    size_t copied = atomic_load_explicit(&comm->copied, memory_order_relaxed);
    size_t bytes = count <= TLY_KEPT_BYTES ? count * tly_reduce_element_size((int)dtype) : SIZE_MAX;
    if (bytes > TLY_KEPT_BYTES || copied + bytes > COPIED_BYTES || (bytes && !input))
        return submit(comm, &r, options, op);
    struct tally_options quiet = {.size = sizeof quiet};
    if (options)
        quiet = *options;
    quiet.queued = 0;
    r.copy = true;
    err = submit(comm, &r, &quiet, NULL);
    return err || !op ? err : hand_out_ended(comm, TALLY_MESSAGE, options, op);
}

int tally_recv(tally_comm *comm, void *output, size_t count, enum tally_dtype dtype, int from, uint32_t tag,
               const struct tally_options *options, tally_op **op)
{
    struct request r = {.kind = TALLY_MESSAGE,
                        .dtype = (unsigned)dtype,
                        .output = output,
                        .count = count,
                        .to = (uint32_t)comm->rank,
                        .tag = tag};
    int err = other_rank(group_of(comm, options), from, &r.from);
    return err ? err : submit(comm, &r, options, op);
}

int tally_probe(tally_comm *comm, uint32_t tag, const struct tally_options *options, tally_op **op)
{
    struct request r = {.kind = TLY_PROBE,
                        .dtype = TALLY_INT64,
                        .from = (uint32_t)comm->rank,
                        .to = (uint32_t)comm->rank,
                        .tag = tag};
    return submit(comm, &r, options, op);
}

int tally_op_source(const tally_op *op)
{
    if (op->kind != TLY_PROBE && op->kind != TLY_JOIN)
        return tly_fail(EINVAL, "the operation is neither a probe nor a join");
    if (!tly_event_is_set(&op->done) || op->status)
        return tly_fail(EAGAIN, "the operation has found nothing");
    return op->source;
}

int tally_refuse(tally_comm *comm, const char *name, uint32_t kind, const struct tally_options *options,
                 const char *reason)
{
    if (kind < TALLY_PUSH_PULL || kind > TALLY_SCATTER)
        return tly_fail(EINVAL, "%u is no kind of operation", kind);
    struct request r = {
        .name = name, .kind = (uint8_t)kind, .dtype = TALLY_UINT8, .reason = reason ? reason : no_reason};
    struct tally_options o = {.size = sizeof o};
    if (options && options->size == sizeof o) {
        o.space = options->space;
        o.group = options->group;
    }
    return submit(comm, &r, &o, NULL);
}
