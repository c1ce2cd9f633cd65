/* stager.c - the device stage: copies a GPU's tensors to memory of the host, for the stages behind it, and results back.
 *
 * A communicator has a stager for each GPU: memory that the GPU copies to and from (pinned), and two threads, which wait for
 * copies and say that parts have passed.  All of an operation is staged in one piece of memory, input and result in the same
 * place, as if the caller's tensor were there.  The memory is the pool's where ranks share one, so that the machine's other
 * ranks sum what the GPU has written.
 *
 *   submission   notes the stream's work so far
 *   begin        waits for memory, then gives the GPU all copies of the input, in the order of operations
 *   out          when one has been made, the parts that are staged pass
 *   landed       gives the GPU the copy of results in a row; when it has been made, their parts pass
 *   leave        the memory is the next operation's; if the operation has failed, the application's stream waits for the copy
 *
 * In a team whose GPUs sum in groups, the stage only gives memory for the whole tensor.  The parts that this rank carries use
 * theirs, as GPUs sum them and as their results land.
 *
 * All inputs go through one lane.  So an input also waits for the streams of inputs before it (head-of-line blocking).
 * device/copies.h says how long copies are.
 *
 * TALLY_DEVICE_MEMORY bounds the memory of a stager.  Ranks that begin operations in different orders would wait for each
 * other's memory, so the bound gives way by one piece when nothing has moved for a second.
 *
 * Failures: if an input cannot be copied, all ranks hear of it, for the stage vouches.  If a result cannot, the operation fails
 * on this rank alone, with -EIO: the others may have theirs.  If the GPU is lost (-ENODEV), the job fails with this rank's number
 * and the call.  An operation that ends waits for copies to its tensor, which a lost GPU ends.  If they have not ended after
 * TLY_DEVICE_HANGS_S, the GPU hangs and counts as lost; what it may write to is never freed.  A copy of its input goes on, and the
 * memory is kept until it has been made, or for good if the communicator closes and that takes longer.  Nothing depends on what the
 * GPU reads then, and the application's stream waits for it, so that memory which is freed in that stream's order is still there.
 *
 * `lock` of a stager guards it and its works; it is taken under the loop's lock, and the inbox's is taken under it. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "base/log.h"
#include "base/loop.h"
#include "base/thread.h"
#include "comm/comm.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/op/spec.h"
#include "comm/path/chain.h"
#include "comm/path/stage.h"
#include "comm/path/stager.h"
#include "device/copies.h"
#include "device/device.h"
#include "device/order.h"
#include "local/gpus.h"
#include "local/local.h"
#include "local/segment.h"
#include "ops/call.h"

enum { SMALLEST = 16, SIZES = 48 }; /* pieces have 2^16 bytes or more */
enum { LARGE_PAGE = 2 << 20 };
#define PATIENCE (1000 * TLY_MS)

/* A piece of pinned memory. */
struct stager_piece {
    struct stager_piece *next; /* of those of its size that are unused */
    uint8_t *data;
    int size;       /* of its bytes the logarithm, rounded up */
    uint64_t bytes; /* 2^size, or fewer where that is beyond the stager's limit */
};

/* A copy that the GPU has been given. */
struct stager_flight {
    struct tly_list node;
    struct tly_mark *mark;
    struct stager_work *work;   /* NULL: its operation has left */
    uint64_t staged;            /* bytes of the input that are in the piece once this copy has been made */
    uint32_t first, count;      /* parts whose results come in; 0: an input goes out */
    struct stager_piece *piece; /* owned: of an operation that has left before this, its last copy; or NULL */
};

/* What an operation has. */
struct stager_work {
    struct tally_op *op;
    int gpu;
    struct tly_device *device;
    void *stream;               /* the application's */
    struct tly_mark *ready;     /* after which the input is there */
    bool grouped;               /* GPUs sum it in groups */
    struct tly_local_gpu group; /* for them */
    struct tly_stager *stager;  /* from `begin` on, as the rest */
    struct stager_piece *piece;
    struct tly_list node; /* while it waits for memory */
    uint64_t staged;      /* bytes of the input that are in the piece */
    bool stopped;         /* no part may pass any more */
    bool *here;           /* owned: of each part, whether it waits for its input */
    struct tly_copies in; /* owned: its parts */
    uint32_t landing;     /* copies of results that the GPU has yet to make */
    int err;              /* positive: the input could not be copied */
    char why[80];
};

struct tly_stager {
    struct tly_stager *next;
    struct tly_device *device;
    pthread_mutex_t lock;
    pthread_cond_t landed; /* the copies of an operation's results, or one whose operation has left */
    struct stager_piece *unused[SIZES];
    struct stager_piece *kept;   /* a GPU that hangs may still use them */
    struct tly_segment *segment; /* whose pool the pieces are from; NULL: they are private */
    uint64_t bytes, limit;       /* of all pieces */
    uint32_t used;               /* pieces */
    struct tly_list waiting;     /* works, for memory */
    struct tly_copies_lane results;
    int64_t moved; /* when one last got some or gave some back, or could not pin any */
    bool stopping;
    bool hangs; /* a thread may wait for the GPU for ever */
    struct stager_end {
        struct tly_stager *stager;
        enum tly_lane lane;
        struct tly_list flights; /* in the lane's order */
        pthread_cond_t changed;  /* these, what waits for memory, or the stager stops */
        pthread_t thread;
    } out, in;
};

static struct stager_work *stager_work_of(struct tally_op *op)
{
    return *tly_chain_own(&op->chain, STAGE_DEVICE);
}

/* --- memory ---------------------------------------------------------------------------------------------- */

static void stager_free_piece(struct tly_stager *s, struct stager_piece *p)
{
    s->bytes -= p->bytes;
    if (!tly_device_unregister(s->device, p->data)) /* else the GPU is lost, and may still use it */
        tly_pool_free(p->data);
    free(p);
}

/* Memory that is pinned.  Some systems do not pin shared memory, for various reasons. */
static int stager_take_memory(struct tly_stager *s, size_t bytes, void **data)
{
    int err = tly_pool_alloc(s->segment, bytes, data);
    if (err)
        return err;
    err = tly_device_register(s->device, *data, bytes);
    if (!err)
        return 0;
    bool shared = s->segment && tly_segment_place(s->segment, *data, bytes);
    tly_pool_free(*data);
    if (!shared || err == -ENOMEM || err == -ENODEV) /* private memory would not be pinned either */
        return err;
    tly_warn("comm", "memory that ranks share is not pinned, so GPUs' tensors are copied once more: %s",
             tly_error());
    s->segment = NULL;
    return stager_take_memory(s, bytes, data);
}

static int stager_make_piece(struct tly_stager *s, int size, uint64_t bytes, struct stager_piece **out)
{
    struct stager_piece *p = malloc(sizeof *p);
    void *data = NULL;
    int err = p ? stager_take_memory(s, bytes, &data) : tly_fail(ENOMEM, "no memory to stage a GPU's tensor");
    if (err) {
        free(p);
        return err;
    }
    *p = (struct stager_piece){.data = data, .size = size, .bytes = bytes};
    s->bytes += bytes;
    *out = p;
    return 0;
}

/* Free unused pieces until no more than so many bytes are left, or no unused piece. */
static void stager_shrink(struct tly_stager *s, uint64_t left)
{
    for (int i = SMALLEST; i < SIZES; i++)
        while (s->unused[i] && s->bytes > left) {
            struct stager_piece *p = s->unused[i];
            s->unused[i] = p->next;
            stager_free_piece(s, p);
        }
}

/* Make room for so many bytes more. */
static void stager_make_room(struct tly_stager *s, uint64_t bytes)
{
    stager_shrink(s, bytes < s->limit ? s->limit - bytes : 0);
}

/* True: there was something to free. */
static bool stager_drop_unused(struct tly_stager *s)
{
    uint64_t before = s->bytes;
    stager_shrink(s, 0);
    return s->bytes < before;
}

/* Bytes to pin for so many: a power of two, which other tensors can use again, or large pages where that is beyond the limit. */
static uint64_t stager_round(const struct tly_stager *s, uint64_t bytes, int size)
{
    const uint64_t power = 1ull << size, pages = (bytes + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
    return power > s->limit && pages < power ? pages : power;
}

/* beyond: even if that is too much.  -EAGAIN: wait for others to give some back. */
static int stager_take_piece(struct tly_stager *s, uint64_t bytes, bool beyond, struct stager_piece **out)
{
    int size = SMALLEST, err = 0;
    while (1ull << size < bytes)
        size++;
    bytes = stager_round(s, bytes, size);
    struct stager_piece *p = s->unused[size];
    if (p && p->bytes >= bytes) {
        s->unused[size] = p->next;
    } else {
        stager_make_room(s, bytes);
        if (s->used && !beyond && s->bytes + bytes > s->limit)
            return -EAGAIN;
        err = stager_make_piece(s, size, bytes, &p);
        if (err == -ENOMEM && stager_drop_unused(s))
            err = stager_make_piece(s, size, bytes, &p);
    }
    if (err)
        return err == -ENOMEM && s->used ? -EAGAIN : err;
    s->used++;
    s->moved = tly_now();
    *out = p;
    return 0;
}

static void stager_give_piece(struct tly_stager *s, struct stager_piece *p)
{
    s->used--;
    s->moved = tly_now();
    if (s->bytes > s->limit) {
        stager_free_piece(s, p);
    } else {
        p->next = s->unused[p->size];
        s->unused[p->size] = p;
    }
}

/* --- copies ---------------------------------------------------------------------------------------------- */

/* After -ENODEV nothing on the GPU ends any more: the job fails. */
static bool stager_is_lost(tally_comm *c, int err)
{
    if (err != -ENODEV)
        return false;
    tly_inbox_break(&c->inbox, ENODEV, tly_error());
    tly_loop_wake(&c->loop);
    return true;
}

/* The part's stages behind use staged memory, or hear of the failure. */
static void stager_pass(struct stager_work *w, struct tly_part *p)
{
    if (w->err) {
        tly_stage_failed(p, w->err, w->why);
        return;
    }
    p->input = p->landing = w->piece->data + p->place;
    tly_stage_passed(p);
}

/* Its input is in the piece, or never will be. */
static bool stager_has_input(const struct stager_work *w, const struct tly_part *p)
{
    return w->err || p->place + p->length <= w->staged;
}

/* The first bytes of the input are in the piece; err: no more can be copied. */
static void stager_input_is_staged(struct stager_work *w, uint64_t bytes, int err)
{
    if (stager_is_lost(w->op->comm, err) || w->err)
        return;
    if (err) {
        w->err = -err;
        snprintf(w->why, sizeof w->why, "%s", tly_error());
    } else {
        w->staged = bytes;
    }
    for (uint32_t i = 0; i < w->op->part_count && !w->stopped; i++)
        if (w->here[i] && stager_has_input(w, &w->op->parts[i])) {
            w->here[i] = false;
            stager_pass(w, &w->op->parts[i]);
        }
}

static void stager_results_are_in(struct stager_work *w, uint32_t first, uint32_t count, int err)
{
    if (stager_is_lost(w->op->comm, err) || w->stopped)
        return;
    for (struct tly_part *p = w->op->parts + first; count--; p++)
        if (err)
            tly_stage_failed(p, EIO, tly_error());
        else
            tly_stage_passed(p);
}

/* Copy in a lane; the flight is like this one. */
static int stager_copy(struct stager_end *e, const struct stager_flight *like, void *to, const void *from,
                       uint64_t bytes)
{
    struct stager_flight *f = malloc(sizeof *f);
    if (!f)
        return tly_fail(ENOMEM, "no memory to stage a GPU's tensor");
    *f = *like;
    int err = tly_device_copy(e->stager->device, e->lane, to, from, bytes, &f->mark);
    if (err) {
        free(f);
        return err;
    }
    tly_list_append(&e->flights, &f->node);
    pthread_cond_signal(&e->changed);
    return 0;
}

/* All of the input.  If this fails, some copies may go on. */
static int stager_copy_input(struct tly_stager *s, struct stager_work *w)
{
    const struct tally_op *op = w->op;
    int err = tly_device_after(s->device, TLY_LANE_OUT, w->ready);
    for (uint64_t at = 0; at < op->bytes && !err; at += w->in.most) {
        const uint64_t left = op->bytes - at, bytes = left < w->in.most ? left : w->in.most;
        const struct stager_flight f = {.work = w, .staged = at + bytes};
        err = stager_copy(&s->out, &f, w->piece->data + at, op->input + at, bytes);
    }
    return err;
}

/* Give the GPU the copies of results that it may have now. */
static void stager_copy_results(struct tly_stager *s)
{
    struct tly_copies_run run;
    while (tly_copies_next(&s->results, &run)) {
        struct stager_work *w = tly_list_entry(run.of, struct stager_work, in);
        const struct stager_flight f = {.work = w, .first = run.first, .count = run.count};
        int err = stager_copy(&s->in, &f, w->op->output + run.at, w->piece->data + run.at, run.bytes);
        w->landing += !err;
        if (!err)
            continue;
        tly_copies_end(&s->results);
        stager_results_are_in(w, run.first, run.count, err);
    }
}

/* Give the GPU the inputs for which there is memory. */
static void stager_start(struct tly_stager *s, bool beyond)
{
    while (!tly_list_empty(&s->waiting)) {
        struct stager_work *w = tly_list_entry(s->waiting.next, struct stager_work, node);
        struct tally_op *op = w->op;
        int err = stager_take_piece(s, op->bytes, beyond, &w->piece);
        if (err == -EAGAIN && beyond) /* no memory can be pinned: ask again after a while */
            s->moved = tly_now();
        if (err == -EAGAIN)
            return;
        beyond = false;
        tly_list_remove(&w->node);
        if (!err && w->grouped)
            w->group.host = w->piece->data;
        else if (!err)
            err = stager_copy_input(s, w);
        if (err || w->grouped)
            stager_input_is_staged(w, op->bytes, err);
    }
}

/* The lane has carried it out, or err says why not. */
static void stager_end_flight(struct tly_stager *s, struct stager_flight *f, int err)
{
    struct stager_work *w = f->work;
    if (f->count)
        tly_copies_end(&s->results);
    if (!w) {
        if (f->piece)
            stager_give_piece(s, f->piece);
        pthread_cond_broadcast(&s->landed);
    } else if (!f->count) {
        stager_input_is_staged(w, f->staged, err);
    } else {
        if (--w->landing == 0)
            pthread_cond_broadcast(&s->landed);
        stager_results_are_in(w, f->first, f->count, err);
    }
    tly_device_unmark(s->device, f->mark);
    free(f);
}

/* Wait for the first flight, or for some change.  Has nothing moved for too long, while operations wait for memory? */
static bool stager_wait(struct stager_end *e)
{
    struct tly_stager *s = e->stager;
    if (e->lane == TLY_LANE_IN || tly_list_empty(&s->waiting)) {
        pthread_cond_wait(&e->changed, &s->lock);
        return false;
    }
    const struct timespec at = tly_clock_time(s->moved + PATIENCE);
    return pthread_cond_timedwait(&e->changed, &s->lock, &at) == ETIMEDOUT &&
           tly_now() >= s->moved + PATIENCE;
}

static void *stager_main(void *arg)
{
    struct stager_end *e = arg;
    struct tly_stager *s = e->stager;
    pthread_mutex_lock(&s->lock);
    while (!s->stopping || !tly_list_empty(&e->flights)) {
        bool beyond = false;
        if (tly_list_empty(&e->flights)) {
            beyond = stager_wait(e);
        } else {
            struct stager_flight *f = tly_list_entry(e->flights.next, struct stager_flight, node);
            pthread_mutex_unlock(&s->lock);
            int err = tly_device_wait(s->device, f->mark);
            pthread_mutex_lock(&s->lock);
            tly_list_take(&e->flights); /* the same: a lane has one thread */
            stager_end_flight(s, f, err);
        }
        if (e->lane == TLY_LANE_OUT)
            stager_start(s, beyond);
        else
            stager_copy_results(s);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* --- stagers --------------------------------------------------------------------------------------------- */

/* What stays with the process, so that leak checkers find it. */
static _Atomic(struct tly_stager *) stagers_kept;

/* The GPU hangs: its threads, and all that it may still write to or that they use, stay with the process. */
static void stager_abandon(struct tly_stager *s)
{
    s->next = atomic_exchange(&stagers_kept, s);
    pthread_detach(s->out.thread);
    pthread_detach(s->in.thread);
}

/* Wait until the GPU has read the inputs of operations that have left.  Their streams may be held for ever, so not for long. */
static void stager_await_inputs(struct tly_stager *s)
{
    const struct timespec at = tly_clock_time(tly_now() + TLY_DEVICE_HANGS_S * TLY_SEC);
    while (s->out.stager && !s->hangs && !tly_list_empty(&s->out.flights)) {
        if (pthread_cond_timedwait(&s->landed, &s->lock, &at) != ETIMEDOUT || tly_list_empty(&s->out.flights))
            continue;
        s->hangs = true;
        tly_warn("comm", "a GPU has not read an input for %d s; memory to stage it stays with this process",
                 TLY_DEVICE_HANGS_S);
    }
}

static void stager_destroy(struct tly_stager *s)
{
    struct stager_end *ends[] = {&s->out, &s->in};
    pthread_mutex_lock(&s->lock);
    s->stopping = true;
    for (int i = 0; i < 2; i++)
        pthread_cond_signal(&ends[i]->changed);
    stager_await_inputs(s);
    bool hangs = s->hangs;
    pthread_mutex_unlock(&s->lock);
    if (hangs) {
        stager_abandon(s);
        return;
    }
    for (int i = 0; i < 2; i++) {
        if (ends[i]->stager)
            pthread_join(ends[i]->thread, NULL);
        pthread_cond_destroy(&ends[i]->changed);
    }
    stager_shrink(s, 0);
    pthread_cond_destroy(&s->landed);
    pthread_mutex_destroy(&s->lock);
    tly_device_close(s->device);
    free(s);
}

static int stager_begin_end(struct tly_stager *s, struct stager_end *e, enum tly_lane lane, const char *name)
{
    e->lane = lane;
    tly_list_init(&e->flights);
    e->stager = s;
    int err = tly_thread_start(&e->thread, name, stager_main, e);
    if (err)
        e->stager = NULL;
    return err;
}

static struct tly_stager *stager_create(tally_comm *c, int gpu)
{
    struct tly_stager *s = calloc(1, sizeof *s);
    pthread_condattr_t monotonic;
    if (!s)
        return NULL;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->landed, &monotonic);
    pthread_cond_init(&s->out.changed, &monotonic);
    pthread_cond_init(&s->in.changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    tly_list_init(&s->waiting);
    tly_copies_init(&s->results);
    s->limit = c->params.device_memory;
    s->segment = c->local ? tly_local_segment(c->local) : NULL;
    if (tly_device_open(gpu, &s->device) || stager_begin_end(s, &s->out, TLY_LANE_OUT, "tally-gpu-out") ||
        stager_begin_end(s, &s->in, TLY_LANE_IN, "tally-gpu-in")) {
        stager_destroy(s);
        return NULL;
    }
    s->next = c->stagers.first;
    return c->stagers.first = s;
}

static struct tly_stager *stager_of(tally_comm *c, const struct stager_work *w)
{
    struct tly_stager *s = c->stagers.first;
    while (s && s->device != w->device)
        s = s->next;
    return s ? s : stager_create(c, w->gpu);
}

void tly_stager_finish(tally_comm *c)
{
    for (struct tly_stager *s; (s = c->stagers.first);) {
        c->stagers.first = s->next;
        stager_destroy(s);
    }
}

/* --- operations ------------------------------------------------------------------------------------------ */

/* A sum for all ranks, on the GPU that this rank has shown to the others. */
static bool stager_suits_group(const struct tally_op *op, const struct tly_device *device)
{
    const tally_comm *c = op->comm;
    const struct tly_reduction how = {.dtype = op->dtype, .op = op->reduction};
    return c->local && tly_gpus_device(c->local) == device && !op->group->number &&
           tly_call_is_sum_for_all(op->call) && !tly_spec_ranges(op) && tly_device_sums(&how);
}

static int stager_take(struct tally_op *op, void *stream)
{
    int in, out, err = tly_device_find(op->input, op->bytes, &in);
    if (!err)
        err = tly_device_find(op->output, op->bytes, &out);
    if (err)
        return err;
    if (in != out)
        return tly_fail(EINVAL, "the input is on GPU %d, and the output on GPU %d", in, out);
    struct stager_work *w = calloc(1, sizeof *w);
    if (!w)
        return tly_fail(ENOMEM, "out of memory");
    tly_list_init(&w->node);
    tly_list_init(&w->in.node);
    w->op = op;
    w->gpu = in;
    w->stream = stream;
    err = tly_device_open(in, &w->device);
    if (!err)
        err = tly_device_mark_stream(w->device, stream, &w->ready);
    *tly_chain_own(&op->chain, STAGE_DEVICE) = w;
    w->group = (struct tly_local_gpu){.ready = w->ready};
    w->grouped = stager_suits_group(op, w->device);
    if (err)
        tly_stager_leave(op, false);
    return err;
}

int tly_stager_take(struct tally_op *op, void *stream)
{
    int err = op->bytes ? stager_take(op, stream) : 0;
    stager_is_lost(op->comm, err);
    return err;
}

const struct tly_local_gpu *tly_stager_grouped(struct tally_op *op)
{
    struct stager_work *w = stager_work_of(op);
    return w && w->grouped ? &w->group : NULL;
}

void tly_stager_ungroup(struct tally_op *op)
{
    if (tly_stager_grouped(op))
        stager_work_of(op)->grouped = false;
}

/* In which its input is copied. */
static enum tly_lane stager_lane_out(const struct stager_work *w)
{
    return w->grouped ? (enum tly_lane)(TLY_LANE_GROUP + (int)TLY_STEP_IN) : TLY_LANE_OUT;
}

/* The operation's copies of this end go on without it.  Returns the last one, or NULL. */
static struct stager_flight *stager_leave_flights(const struct stager_end *e, const struct stager_work *w)
{
    struct stager_flight *last = NULL;
    for (struct tly_list *n = e->flights.next; n != &e->flights; n = n->next) {
        struct stager_flight *f = tly_list_entry(n, struct stager_flight, node);
        if (f->work == w) {
            f->work = NULL;
            last = f;
        }
    }
    return last;
}

/* The operation's memory is free, or belongs to copies that still go on: of its input, or on a GPU that hangs. */
static void stager_leave_memory(struct stager_work *w)
{
    struct tly_stager *s = w->stager;
    pthread_mutex_lock(&s->lock);
    tly_list_remove(&w->node);
    struct stager_flight *out = stager_leave_flights(&s->out, w), *in = stager_leave_flights(&s->in, w);
    if (in) {
        w->piece->next = s->kept;
        s->kept = w->piece;
    } else if (out) {
        out->piece = w->piece;
    } else if (w->piece) {
        stager_give_piece(s, w->piece);
    }
    stager_start(s, false);
    pthread_mutex_unlock(&s->lock);
}

void tly_stager_leave(struct tally_op *op, bool failed)
{
    if (!tly_chain_has_own(&op->chain, STAGE_DEVICE))
        return;
    struct stager_work *w = stager_work_of(op);
    if (w->stager)
        stager_leave_memory(w);
    if (failed) /* it cannot if the GPU is lost, or the stream is being captured */
        tly_device_follow(w->device, w->stream, stager_lane_out(w));
    if (w->ready)
        tly_device_unmark(w->device, w->ready);
    tly_device_close(w->device);
    free(w->here);
    free(w->in.part);
    free(w);
    *tly_chain_own(&op->chain, STAGE_DEVICE) = NULL;
}

/* --- the stage ------------------------------------------------------------------------------------------- */

/* Where one machine has all ranks, its GPUs need no memory of the operation's. */
static bool stager_suits(const tally_comm *c, const struct tally_op *op)
{
    return tly_chain_has_own(&op->chain, STAGE_DEVICE) &&
           !(c->local_has_all && tly_stager_grouped((struct tally_op *)op));
}

/* GPUs sum for a team, and nothing else. */
static void stager_take_stage(tally_comm *c, struct tally_op *op)
{
    if (!tly_stage_at(STAGE_TEAM)->suits(c, op))
        tly_stager_ungroup(op);
}

static int stager_begin(tally_comm *c, struct tally_op *op)
{
    struct stager_work *w = stager_work_of(op);
    struct tly_stager *s = stager_of(c, w);
    w->here = calloc(op->part_count, sizeof *w->here);
    w->in.part = calloc(op->part_count, sizeof *w->in.part);
    w->in.parts = op->part_count;
    w->in.most = tly_copies_bytes(op->bytes);
    if (!s || !w->here || !w->in.part)
        return tly_fail(ENOMEM, "no memory or thread to stage a GPU's tensor");
    pthread_mutex_lock(&s->lock);
    w->stager = s;
    if (tly_list_empty(&s->waiting))
        s->moved = tly_now();
    tly_list_append(&s->waiting, &w->node);
    stager_start(s, false);
    pthread_cond_signal(&s->out.changed);
    pthread_mutex_unlock(&s->lock);
    return 0;
}

static int stager_ready(tally_comm *c, struct tly_part *p)
{
    struct stager_work *w = stager_work_of(p->op);
    pthread_mutex_lock(&w->stager->lock);
    w->here[p->index] = !stager_has_input(w, p);
    if (!w->here[p->index])
        stager_pass(w, p);
    pthread_mutex_unlock(&w->stager->lock);
    return 0;
}

static bool stager_landed(tally_comm *c, struct tly_part *p)
{
    struct stager_work *w = stager_work_of(p->op);
    struct tly_stager *s = w->stager;
    if (w->grouped || !p->result_length)
        return true;
    pthread_mutex_lock(&s->lock);
    if (w->err) {
        pthread_mutex_unlock(&s->lock);
        return true;
    }
    w->in.part[p->index].at = p->place;
    w->in.part[p->index].bytes = p->result_length;
    tly_copies_landed(&s->results, &w->in, p->index);
    stager_copy_results(s);
    pthread_mutex_unlock(&s->lock);
    return false;
}

/* Copies to the operation's tensor end, or the GPU hangs. */
static void stager_await_landing(struct tly_stager *s, const struct stager_work *w)
{
    const struct timespec at = tly_clock_time(tly_now() + TLY_DEVICE_HANGS_S * TLY_SEC);
    while (w->landing && !s->hangs) {
        if (pthread_cond_timedwait(&s->landed, &s->lock, &at) != ETIMEDOUT || !w->landing)
            continue;
        s->hangs = true;
        stager_is_lost(w->op->comm, tly_device_give_up(s->device));
        tly_warn("comm", "%s", tly_error());
    }
}

static void stager_withdraw(tally_comm *c, struct tally_op *op, bool over)
{
    struct stager_work *w = stager_work_of(op);
    if (!w->stager)
        return;
    pthread_mutex_lock(&w->stager->lock);
    w->stopped = true;
    tly_list_remove(&w->node);
    tly_copies_drop(&w->in);
    stager_await_landing(w->stager, w);
    pthread_mutex_unlock(&w->stager->lock);
}

const struct tly_stage tly_stage_device = {
    .does = "is copied between the GPU and the host",
    .vouches = true,
    .suits = stager_suits,
    .take = stager_take_stage,
    .begin = stager_begin,
    .ready = stager_ready,
    .landed = stager_landed,
    .withdraw = stager_withdraw};
