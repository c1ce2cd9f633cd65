/* gpus.c - gpus.h.
 *
 * Each kind of step (device/order.h) has a stream, or several for OUT, and a thread, which waits for the first step that is under
 * way.  When that has ended, the thread writes it on the rank's board and wakes the other ranks.  Steps begin in a turn of the
 * engine.  A failure of the GPU ends the job.  A GPU hangs if a step that must end has not ended after TLY_DEVICE_HANGS_S.  Then
 * the threads that wait for it, and all that it may use, stay with the process.  The same threads wait for what is tried before the
 * first operation.
 *
 * `lock` guards all but what is fixed once begun; it is taken under the engine's. */
#include "local/gpus.h"

#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"
#include "local/process.h"
#include "local/work.h"

enum {
    UNDER_WAY = 4,     /* steps of a kind */
    SETTLE_MS = 10000, /* longest wait for ranks without the results of this rank's pieces */
    LEAVE_MS = 1000,   /* the same for ranks that still map this rank's buffer */
    BLOCK = 16 << 10,  /* bytes of a result that the host sums at once */
    BUFFER = TLY_ORDER_SLOTS * TLY_GPUS_SLOT,
    HEAD = (sizeof(struct tly_gpus_shared) + TLY_PAGE - 1) / TLY_PAGE * TLY_PAGE,
};

_Static_assert(TLY_LANES - TLY_LANE_GROUP == TLY_STEP_OUT + UNDER_WAY,
               "a lane for each step, and each of OUT");

struct gpus_lane {
    struct tly_gpus *gpus;
    enum tly_order_step step;
    struct {
        struct tly_mark *mark;
        uint64_t piece;
    } flight[UNDER_WAY]; /* in the order in which they were given, from `first` on, around */
    unsigned first, count;
    pthread_t thread;
    bool started, waiting; /* waiting: the thread is in the driver */
};

struct tly_gpus {
    struct tly_gpus *kept; /* before this one */
    struct tly_local *local;
    struct tly_device *device;
    uint32_t each, group, groups; /* ranks in a group; ours; how many */
    uint32_t owners;              /* as in struct tly_gpus_choice, as the next */
    uint8_t owner[TLY_LOCAL_RANKS];
    struct tly_gpus_shared *own,
        *of[TLY_LOCAL_RANKS];        /* of each rank; ours in the pool, with the staging behind it */
    struct tly_gpus_shared *reached; /* `own`, as the GPU's kernels address it */
    bool registered;
    bool begun;                  /* set under the lock */
    void *buffer;                /* owned, on the GPU: a slot for each piece */
    void *mapped[TLY_GPUS_EACH]; /* of each of the group; ours is the buffer */
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a lane has a flight, or one less, or is to end */
    bool stopped, ending;
    struct {
        int err;
        char why[TLY_SENTENCE];
    } tried;    /* what was tried last, before `begun`, has failed */
    bool hangs; /* the threads that wait for the GPU use nothing but this structure any more */
    struct tly_order order;
    struct {
        struct tly_gpus_piece of;
        uint8_t owner; /* its owners' place */
        bool result;   /* the host is done with it */
    } piece[TLY_ORDER_SLOTS];
    struct gpus_lane lane[TLY_STEPS];
};

static size_t gpus_slot(uint64_t piece)
{
    return piece % TLY_ORDER_SLOTS;
}

/* A piece's slot in a buffer, or behind the head of shared memory. */
static uint8_t *gpus_in_buffer(void *buffer, uint64_t piece)
{
    return (uint8_t *)buffer + gpus_slot(piece) * TLY_GPUS_SLOT;
}

static uint8_t *gpus_staging(struct tly_gpus_shared *s, uint64_t piece)
{
    return (uint8_t *)s + HEAD + gpus_slot(piece) * TLY_GPUS_SLOT;
}

static bool gpus_is_half(int dtype)
{
    return dtype == TALLY_FLOAT16 || dtype == TALLY_BFLOAT16;
}

/* A group's sum of 16-bit floats is in float32. */
uint32_t tly_gpus_piece_bytes(const struct tly_local *l, const struct tly_local_op *op)
{
    return l->gpus->groups > 1 && gpus_is_half(op->dtype) ? TLY_GPUS_SLOT / 2 : TLY_GPUS_SLOT;
}

uint32_t tly_gpus_share_bytes(const struct tly_local *l, const struct tly_local_op *op, uint64_t part)
{
    const uint64_t element = tly_reduce_element_size(op->dtype), owners = l->gpus->owners;
    const uint64_t most = tly_gpus_piece_bytes(l, op) / element, count = part / element;
    const uint64_t pieces = (count + owners * most - 1) / (owners * most) * owners;
    return (uint32_t)((count + pieces - 1) / pieces * element);
}

uint32_t tly_gpus_each(const struct tly_local *l)
{
    return l->gpus->each;
}

const struct tly_device *tly_gpus_device(const struct tly_local *l)
{
    return l->gpus && l->gpus->begun ? l->gpus->device : NULL;
}

/* --- steps --------------------------------------------------------------------------------------------------- */

static void gpus_break(struct tly_gpus *g, int err)
{
    struct tly_local *l = g->local;
    g->stopped = true;
    l->calls->broken(l->user, -err, tly_error()); /* the job's failure names the rank */
}

static enum tly_lane gpus_lane_of(enum tly_order_step step)
{
    return (enum tly_lane)(TLY_LANE_GROUP + (int)step);
}

/* The rank of a group that owns the piece. */
static uint32_t gpus_owner(const struct tly_gpus *g, uint32_t group, uint64_t n)
{
    return g->owner[group * g->owners + g->piece[gpus_slot(n)].owner];
}

/* Does the owner's kernel write the result itself? */
static bool gpus_is_whole(const struct tly_gpus *g, const struct tly_gpus_piece *p)
{
    return p->steps == TLY_ORDER_ALL && g->groups == 1;
}

static struct tly_reduction gpus_how(const struct tly_gpus *g, const struct tly_gpus_piece *p)
{
    const struct tly_local_op *op = p->round->op;
    return p->steps == TLY_ORDER_ALL ? tly_work_how(g->local, op) : tly_team_how(op);
}

static int gpus_give_in(struct tly_gpus *g, const struct tly_gpus_piece *p, uint8_t *slot, uint8_t *staged,
                        struct tly_mark **mark)
{
    const struct tly_local_op *op = p->round->op;
    const enum tly_lane lane = gpus_lane_of(TLY_STEP_IN);
    const uint8_t *from = (const uint8_t *)op->input + p->at;
    int err = op->gpu ? tly_device_after(g->device, lane, op->gpu->ready) : 0;
    if (!op->gpu)
        from = memcpy(staged, from, p->bytes);
    return err ? err : tly_device_copy(g->device, lane, slot, from, p->bytes, mark);
}

/* Give the step to its stream.  at: its place among those under way.  Results that several owners have are copied at the same time:
 * in one stream all GPUs would copy from the same owner, then from the next one. */
static int gpus_give(struct tly_gpus *g, enum tly_order_step step, uint64_t n, unsigned at,
                     struct tly_mark **mark)
{
    const struct tly_gpus_piece *p = &g->piece[gpus_slot(n)].of;
    const struct tly_local_op *op = p->round->op;
    uint8_t *slot = gpus_in_buffer(g->buffer, n), *staged = gpus_staging(g->own, n);
    struct tly_reduction how = gpus_how(g, p);
    const enum tly_lane lane = gpus_lane_of(step);
    const void *in[TLY_GPUS_EACH];
    switch (step) {
    case TLY_STEP_IN:
        return gpus_give_in(g, p, slot, staged, mark);
    case TLY_STEP_SUM:
        how.to_partial = g->groups > 1;
        for (uint32_t i = 0; i < g->each; i++)
            in[i] = gpus_in_buffer(g->mapped[i], n);
        return tly_device_sum(g->device, lane, &how, (int)g->each, in,
                              gpus_is_whole(g, p) ? slot : gpus_staging(g->reached, n),
                              p->bytes / tly_reduce_element_size(op->dtype), mark);
    case TLY_STEP_BACK:
        return tly_device_copy(g->device, lane, slot, staged, p->bytes, mark);
    default:
        return tly_device_copy(g->device, (enum tly_lane)(lane + at),
                               op->gpu ? (uint8_t *)op->output + p->at : staged,
                               gpus_in_buffer(g->mapped[gpus_owner(g, g->group, n) % g->each], n), p->bytes,
                               mark);
    }
}

/* The result is in this rank's tensor, or in its staging if that is on the host. */
static void gpus_came_out(struct tly_gpus *g, const struct tly_gpus_piece *p, uint64_t n)
{
    const struct tly_local_op *op = p->round->op;
    if (!op->gpu)
        memcpy((uint8_t *)op->output + p->at, gpus_staging(g->own, n), p->bytes);
    /* release: whoever sees the last byte sees the result */
    atomic_fetch_add_explicit(&p->round->got, p->bytes, memory_order_release);
}

static void gpus_ended(struct tly_gpus *g, enum tly_order_step step, uint64_t n)
{
    const struct tly_gpus_piece *p = &g->piece[gpus_slot(n)].of;
    if (step == TLY_STEP_OUT && p->round) /* before the staging is free */
        gpus_came_out(g, p, n);
    tly_order_end(&g->order, step, n);
    if (step == TLY_STEP_SUM && gpus_is_whole(g, p))
        tly_order_result(&g->order, n);
}

/* Does the step move nothing on this GPU? */
static bool gpus_is_void(const struct tly_gpus *g, enum tly_order_step step, uint64_t n)
{
    const struct tly_gpus_piece *p = &g->piece[gpus_slot(n)].of;
    return !p->round || (step == TLY_STEP_BACK && gpus_is_whole(g, p));
}

static bool gpus_begin_step(struct tly_gpus *g, enum tly_order_step step)
{
    struct gpus_lane *lane = &g->lane[step];
    struct tly_mark *mark;
    uint64_t n;
    if (!tly_order_begin(&g->order, step, &n))
        return false;
    if (gpus_is_void(g, step, n)) {
        gpus_ended(g, step, n);
        tly_local_tell(g->local);
        return true;
    }
    const unsigned at = (lane->first + lane->count) % UNDER_WAY;
    int err = gpus_give(g, step, n, at, &mark);
    if (err) {
        gpus_break(g, err);
        return false;
    }
    lane->count++;
    lane->flight[at].mark = mark;
    lane->flight[at].piece = n;
    pthread_cond_broadcast(&g->changed);
    return true;
}

static int gpus_wait_for(struct tly_gpus *g, struct tly_mark *mark)
{
    int err = tly_device_wait(g->device, mark);
    tly_device_unmark(g->device, mark);
    return err;
}

static void gpus_tried(struct tly_gpus *g, int err)
{
    g->tried.err = err;
    if (err)
        snprintf(g->tried.why, sizeof g->tried.why, "%s", tly_error());
}

/* The lane's thread: wait for what was given first. */
static void *gpus_wait(void *arg)
{
    struct gpus_lane *lane = arg;
    struct tly_gpus *g = lane->gpus;
    pthread_mutex_lock(&g->lock);
    while (!g->hangs && (lane->count || !g->ending)) {
        if (!lane->count) {
            pthread_cond_wait(&g->changed, &g->lock);
            continue;
        }
        struct tly_mark *mark = lane->flight[lane->first].mark;
        uint64_t piece = lane->flight[lane->first].piece;
        lane->waiting = true;
        pthread_mutex_unlock(&g->lock);
        int err = gpus_wait_for(g, mark);
        pthread_mutex_lock(&g->lock);
        lane->waiting = false;
        if (g->hangs)
            break;
        lane->first = (lane->first + 1) % UNDER_WAY;
        lane->count--;
        if (!g->begun)
            gpus_tried(g, err);
        else if (err)
            gpus_break(g, err);
        else
            gpus_ended(g, lane->step, piece);
        pthread_cond_broadcast(&g->changed);
        pthread_mutex_unlock(&g->lock);
        tly_local_tell(g->local);
        tly_local_call_own(g->local);
        pthread_mutex_lock(&g->lock);
    }
    pthread_mutex_unlock(&g->lock);
    return NULL;
}

/* --- on the host --------------------------------------------------------------------------------------------- */

static uint32_t gpus_carrier(const struct tly_gpus *g, uint64_t n)
{
    uint8_t carrier = g->piece[gpus_slot(n)].of.carrier;
    return carrier == TLY_GPUS_OWNER ? gpus_owner(g, 0, n) : carrier;
}

static bool gpus_all_summed(const struct tly_gpus *g, uint64_t n)
{
    bool all = true;
    for (uint32_t i = 0; i < g->groups && all; i++)
        all = atomic_load_explicit(&g->of[gpus_owner(g, i, n)]->board.ended[TLY_STEP_SUM][gpus_slot(n)],
                                   memory_order_acquire) > n;
    return all;
}

/* Has every owner posted the piece, so that its staging is free for the result? */
static bool gpus_all_posted(const struct tly_gpus *g, uint64_t n)
{
    bool all = true;
    for (uint32_t i = 0; i < g->groups && all; i++)
        all = atomic_load_explicit(&g->of[gpus_owner(g, i, n)]->board.posted, memory_order_acquire) > n;
    return all;
}

/* Sum a block of the groups' sums. */
static void gpus_sum_block(struct tly_gpus *g, uint64_t n, uint32_t at, uint32_t bytes, uint8_t *sum)
{
    const struct tly_gpus_piece *p = &g->piece[gpus_slot(n)].of;
    const struct tly_local_op *op = p->round->op;
    const uint32_t wider = gpus_is_half(op->dtype) ? 2 : 1;
    struct tly_reduction how = gpus_how(g, p);
    const void *in[TLY_LOCAL_RANKS];
    how.from_partials = true;
    for (uint32_t i = 0; i < g->groups; i++)
        in[i] = gpus_staging(g->of[gpus_owner(g, i, n)], n) + (size_t)at * wider;
    tly_reduce(&how, (int)g->groups, in, sum, bytes / tly_reduce_element_size(op->dtype));
}

/* Into the owners' staging, over the groups' sums: a result is no longer than those. */
static void gpus_sum_for_owners(struct tly_gpus *g, uint64_t n)
{
    const struct tly_gpus_piece *p = &g->piece[gpus_slot(n)].of;
    _Alignas(64) uint8_t sum[BLOCK];
    for (uint32_t at = 0; at < p->bytes; at += BLOCK) {
        uint32_t bytes = p->bytes - at < BLOCK ? p->bytes - at : BLOCK;
        gpus_sum_block(g, n, at, bytes, sum);
        for (uint32_t i = 0; i < g->groups; i++)
            memcpy(gpus_staging(g->of[gpus_owner(g, i, n)], n) + at, sum, bytes);
    }
}

/* The part of the operation in which the carrier's piece lies; it waits for its sum. */
static struct tly_local_piece *gpus_part_of(const struct tly_gpus_piece *p)
{
    struct tly_local_op *op = p->round->op;
    for (struct tly_list *n = op->pieces.next; n != &op->pieces; n = n->next) {
        struct tly_local_piece *part = tly_list_entry(n, struct tly_local_piece, node);
        if (p->at - part->place < part->length)
            return part;
    }
    return NULL;
}

/* Into memory of the operation, from where the sum is sent once all of its part is there. */
static void gpus_sum_to_send(struct tly_gpus *g, uint64_t n)
{
    const struct tly_gpus_piece *p = &g->piece[gpus_slot(n)].of;
    struct tly_local_piece *part = gpus_part_of(p);
    uint8_t *sum = p->round->op->sums + p->at;
    if (g->groups > 1)
        gpus_sum_block(g, n, 0, p->bytes, sum);
    else
        memcpy(sum, gpus_staging(g->of[gpus_owner(g, 0, n)], n), p->bytes);
    part->done += p->bytes;
    if (part->done < part->length)
        return;
    part->done = 0;
    tly_list_remove(&part->node);
    g->local->calls->summed(g->local->user, part);
}

/* To the owners' staging. */
static void gpus_hand_out(struct tly_gpus *g, uint64_t n)
{
    const struct tly_gpus_piece *p = &g->piece[gpus_slot(n)].of;
    for (uint32_t i = 0; i < g->groups; i++)
        memcpy(gpus_staging(g->of[gpus_owner(g, i, n)], n), p->round->op->sums + p->at, p->bytes);
}

/* The carrier's work.  False: not yet. */
static bool gpus_carry(struct tly_gpus *g, uint64_t n)
{
    const struct tly_gpus_piece *p = &g->piece[gpus_slot(n)].of;
    bool sums = p->steps & 1 << TLY_STEP_SUM;
    if (!(sums ? gpus_all_summed(g, n) : gpus_all_posted(g, n)))
        return false;
    if (p->round && !sums)
        gpus_hand_out(g, n);
    else if (p->round && p->steps == TLY_ORDER_ALL)
        gpus_sum_for_owners(g, n);
    else if (p->round)
        gpus_sum_to_send(g, n);
    atomic_store_explicit(&g->own->hosted[gpus_slot(n)], n + 1, memory_order_release);
    tly_local_tell(g->local);
    return true;
}

/* Does this rank carry or own the piece, so that it minds the host's share of it? */
static bool gpus_minds_host(const struct tly_gpus *g, uint64_t n)
{
    return (gpus_owner(g, g->group, n) == g->local->me || gpus_carrier(g, n) == g->local->me) &&
           !gpus_is_whole(g, &g->piece[gpus_slot(n)].of);
}

/* Do the host's share of pieces that this rank carries, and see what other carriers have done of those that it owns.  True: some
 * went on. */
static bool gpus_look_on_host(struct tly_gpus *g)
{
    bool any = false;
    for (uint64_t n = g->order.oldest; n < g->order.posted; n++) {
        const size_t slot = gpus_slot(n);
        if (g->piece[slot].result || !gpus_minds_host(g, n))
            continue;
        uint32_t carrier = gpus_carrier(g, n);
        bool done = carrier == g->local->me
                        ? gpus_carry(g, n)
                        : atomic_load_explicit(&g->of[carrier]->hosted[slot], memory_order_acquire) > n;
        if (!done)
            continue;
        g->piece[slot].result = any = true;
        tly_order_result(&g->order, n);
    }
    return any;
}

bool tly_gpus_post(struct tly_local *l, const struct tly_gpus_piece *p)
{
    struct tly_gpus *g = l->gpus;
    pthread_mutex_lock(&g->lock);
    const uint64_t n = g->order.posted;
    /* in turn, so that all own as much */
    const uint32_t turn = (uint32_t)((p->carrier == TLY_GPUS_OWNER ? n : p->number) % g->owners);
    const uint32_t owner = g->owner[g->group * g->owners + turn];
    const bool kept = p->carrier == l->me || (owner == l->me && p->steps == TLY_ORDER_OUTWARD);
    bool posted = tly_order_post(&g->order, (int)(owner % g->each), p->steps, kept);
    if (posted) {
        g->piece[gpus_slot(n)].of = *p;
        g->piece[gpus_slot(n)].owner = (uint8_t)turn;
        g->piece[gpus_slot(n)].result = false;
    }
    pthread_mutex_unlock(&g->lock);
    return posted;
}

/* Is some step of the round under way that writes, or reads the host?  NULL: of any round. */
static bool gpus_moves(const struct tly_gpus *g, const struct tly_local_round *r)
{
    for (int step = TLY_STEP_SUM; step < TLY_STEPS; step++) {
        const struct gpus_lane *lane = &g->lane[step];
        for (unsigned i = 0; i < lane->count; i++)
            if (!r || g->piece[gpus_slot(lane->flight[(lane->first + i) % UNDER_WAY].piece)].of.round == r)
                return true;
    }
    return false;
}

/* Wait until such steps have ended, or the GPU hangs. */
static void gpus_await_steps(struct tly_gpus *g, const struct tly_local_round *r)
{
    const struct timespec at = tly_clock_time(tly_now() + TLY_DEVICE_HANGS_S * TLY_SEC);
    while (!g->hangs && gpus_moves(g, r)) {
        if (pthread_cond_timedwait(&g->changed, &g->lock, &at) != ETIMEDOUT || !gpus_moves(g, r))
            continue;
        g->hangs = true;
        gpus_break(g, tly_device_give_up(g->device));
        tly_warn("comm", "%s", tly_error());
        pthread_cond_broadcast(&g->changed);
    }
}

void tly_gpus_forget(const struct tly_local *l, const struct tly_local_round *r)
{
    struct tly_gpus *g = l->gpus;
    pthread_mutex_lock(&g->lock);
    gpus_await_steps(g, r);
    for (size_t slot = 0; slot < TLY_ORDER_SLOTS; slot++)
        if (g->piece[slot].of.round == r)
            g->piece[slot].of.round = NULL;
    pthread_mutex_unlock(&g->lock);
}

bool tly_gpus_advance(struct tly_local *l)
{
    struct tly_gpus *g = l->gpus;
    bool any = false;
    pthread_mutex_lock(&g->lock);
    if (!g->stopped)
        any = gpus_look_on_host(g);
    for (int step = TLY_STEPS - 1; step >= 0; step--)
        while (!g->stopped && gpus_begin_step(g, (enum tly_order_step)step))
            any = true;
    pthread_mutex_unlock(&g->lock);
    return any;
}

/* --- the start ----------------------------------------------------------------------------------------------- */

/* The head and the staging; every rank of the machine reads it. */
static int gpus_make_shared(struct tly_gpus *g, uint64_t *place)
{
    const size_t bytes = HEAD + BUFFER;
    void *memory;
    int err = tly_pool_alloc(g->local->segment, bytes, &memory);
    if (err)
        return err;
    g->own = memory;
    *place = tly_segment_place(g->local->segment, memory, bytes);
    if (!*place)
        return tly_fail(ENOMEM, "no shared memory for the sums of GPUs");
    memset(memory, 0, HEAD);
    err = tly_device_register(g->device, memory, bytes);
    g->registered = !err;
    if (!err && (err = tly_device_reach(g->device, memory, &memory)) == 0)
        g->reached = memory;
    return err;
}

static int gpus_start_lanes(struct tly_gpus *g)
{
    static const char *const names[] = {"tally-gpu-put", "tally-gpu-sum", "tally-gpu-back", "tally-gpu-get"};
    int err = 0;
    for (int i = 0; i < TLY_STEPS && !err; i++) {
        g->lane[i].gpus = g;
        g->lane[i].step = (enum tly_order_step)i;
        err = tly_thread_start(&g->lane[i].thread, names[i], gpus_wait, &g->lane[i]);
        g->lane[i].started = !err;
    }
    return err;
}

/* Wait for the first work of a lane.  Takes the mark.  -ENODEV: the GPU hangs, or is lost. */
static int gpus_await_try(struct tly_gpus *g, enum tly_order_step step, struct tly_mark *mark)
{
    struct gpus_lane *lane = &g->lane[step];
    const struct timespec at = tly_clock_time(tly_now() + TLY_DEVICE_HANGS_S * TLY_SEC);
    pthread_mutex_lock(&g->lock);
    lane->flight[lane->first].mark = mark;
    lane->count = 1;
    pthread_cond_broadcast(&g->changed);
    while (lane->count && pthread_cond_timedwait(&g->changed, &g->lock, &at) != ETIMEDOUT)
        ;
    g->hangs = lane->count > 0;
    int err = g->hangs       ? tly_device_give_up(g->device)
              : g->tried.err ? tly_fail(-g->tried.err, "%s", g->tried.why)
                             : 0;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
    return err;
}

/* Copy a nonce and wait for that. */
static int gpus_copy_nonce(struct tly_gpus *g, void *to, const void *from)
{
    struct tly_mark *mark;
    int err = tly_device_copy(g->device, gpus_lane_of(TLY_STEP_IN), to, from, sizeof(uint64_t), &mark);
    return err ? err : gpus_await_try(g, TLY_STEP_IN, mark);
}

struct tly_gpus_start *tly_gpus_start(struct tly_local *l, uint32_t rank)
{
    return &l->at[rank].control->gpus.start;
}

const char *tly_gpus_address(const struct tly_local *l, uint32_t rank)
{
    return l->at[rank].control->gpus.address;
}

int tly_gpus_offer(struct tly_local *l, const struct tly_gpus_choice *choice, struct tly_gpus_offer *out)
{
    struct tly_gpus *g = calloc(1, sizeof *g);
    pthread_condattr_t monotonic;
    int number;
    if (!g)
        return tly_fail(ENOMEM, "out of memory");
    pthread_mutex_init(&g->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&g->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    g->local = l;
    g->each = choice->each;
    g->group = l->me / g->each;
    g->groups = l->count / g->each;
    g->owners = choice->owners;
    memcpy(g->owner, choice->owner, sizeof g->owner);
    pthread_mutex_lock(&l->lock); /* the job may be failing just now */
    l->gpus = g;
    pthread_mutex_unlock(&l->lock);
    *out = (struct tly_gpus_offer){.nonce = (uint64_t)tly_now() << 8 | l->me};
    int err = tly_device_current(&number);
    if (!err)
        err = tly_device_open(number, &g->device);
    if (!err)
        err = tly_device_add_lanes(g->device);
    if (!err)
        err = gpus_start_lanes(g);
    if (!err)
        err = tly_device_alloc(g->device, BUFFER, &g->buffer);
    uint64_t place = 0;
    if (!err)
        err = gpus_make_shared(g, &place);
    if (!err) {
        memcpy(gpus_staging(g->own, 0), &out->nonce, sizeof out->nonce);
        err = gpus_copy_nonce(g, g->buffer, gpus_staging(g->own, 0));
    }
    if (!err)
        err = tly_device_export(g->device, g->buffer, &out->ticket);
    out->place = err ? 0 : place;
    return err;
}

/* What the mapping shows must be what its rank has written. */
static int gpus_map(struct tly_gpus *g, uint32_t place, const struct tly_gpus_offer *offer)
{
    uint32_t rank = g->group * g->each + place;
    int err = rank == g->local->me ? 0 : tly_device_map(g->device, &offer->ticket, &g->mapped[place]);
    if (rank == g->local->me)
        g->mapped[place] = g->buffer;
    if (!err)
        err = gpus_copy_nonce(g, gpus_staging(g->own, 0), g->mapped[place]);
    if (!err && memcmp(gpus_staging(g->own, 0), &offer->nonce, sizeof offer->nonce) != 0)
        err = tly_fail(EIO, "the memory of rank %u's GPU is not what it should be",
                       tly_local_number(g->local, rank));
    return err;
}

/* Have a kernel add the group's nonces through the mappings, so a driver that refuses kernels shows it before an operation does. */
static int gpus_try_sum(struct tly_gpus *g)
{
    const struct tly_reduction how = {.dtype = TALLY_UINT64, .op = TALLY_SUM, .prescale = 1, .postscale = 1};
    const void *in[TLY_GPUS_EACH];
    uint64_t sum = 0, found;
    struct tly_mark *mark;
    for (uint32_t i = 0; i < g->each; i++) {
        in[i] = g->mapped[i];
        sum += tly_gpus_start(g->local, g->group * g->each + i)->offer.nonce;
    }
    int err = tly_device_sum(g->device, gpus_lane_of(TLY_STEP_SUM), &how, (int)g->each, in,
                             gpus_staging(g->reached, 0), 1, &mark);
    if (!err)
        err = gpus_await_try(g, TLY_STEP_SUM, mark);
    memcpy(&found, gpus_staging(g->own, 0), sizeof found);
    return err || found == sum ? err : tly_fail(EIO, "a sum on the GPU is wrong");
}

int tly_gpus_accept(struct tly_local *l)
{
    struct tly_gpus *g = l->gpus;
    const size_t bytes = HEAD + BUFFER;
    int err = 0;
    for (uint32_t i = 0; i < l->count; i++) {
        uint64_t place = tly_gpus_start(l, i)->offer.place;
        if (place % TLY_PAGE || l->at[i].bytes < bytes || place > l->at[i].bytes - bytes)
            return tly_fail(EPROTO, "rank %u shows memory that it does not have", tly_local_number(l, i));
        g->of[i] = (struct tly_gpus_shared *)(l->at[i].base + place);
    }
    for (uint32_t i = 0; i < g->each && !err; i++)
        err = gpus_map(g, i, &tly_gpus_start(l, g->group * g->each + i)->offer);
    return err ? err : gpus_try_sum(g);
}

void tly_gpus_begin(struct tly_local *l)
{
    struct tly_gpus *g = l->gpus;
    struct tly_order *o = &g->order;
    *o = (struct tly_order){.members = (int)g->each, .me = (int)(l->me % g->each), .most = UNDER_WAY};
    for (uint32_t i = 0; i < g->each; i++)
        o->board[i] = &g->of[g->group * g->each + i]->board;
    pthread_mutex_lock(&g->lock);
    g->begun = true;
    pthread_mutex_unlock(&g->lock);
}

/* --- the end ------------------------------------------------------------------------------------------------- */

void tly_gpus_stop(struct tly_local *l)
{
    struct tly_gpus *g = l->gpus;
    if (!g)
        return;
    pthread_mutex_lock(&g->lock);
    g->stopped = true;
    gpus_await_steps(g, NULL);
    if (!atomic_load(&l->own->gpus.end))
        atomic_store(&l->own->gpus.end, TLY_GPUS_STOPPED);
    pthread_mutex_unlock(&g->lock);
}

static bool gpus_has_ended(const struct tly_gpus *g, uint32_t rank, uint32_t end)
{
    const struct tly_local *l = g->local;
    return rank == l->me || atomic_load(&l->at[rank].control->gpus.end) >= end ||
           tly_process_has_died(l->at[rank].pidfd);
}

static bool gpus_has_taken(const struct tly_gpus *g, uint32_t rank, enum tly_order_step step, uint64_t n)
{
    return atomic_load_explicit(&g->of[rank]->board.ended[step][gpus_slot(n)], memory_order_acquire) > n ||
           gpus_has_ended(g, rank, TLY_GPUS_STOPPED);
}

static bool gpus_is_hosted(const struct tly_gpus *g, uint64_t n)
{
    uint32_t carrier = gpus_carrier(g, n);
    return atomic_load_explicit(&g->of[carrier]->hosted[gpus_slot(n)], memory_order_acquire) > n ||
           gpus_has_ended(g, carrier, TLY_GPUS_STOPPED);
}

/* Do the others need nothing more of the pieces that this rank owns?  Then its group has the results, and so have the owners in the
 * other groups, or the carrier has the sum. */
static bool gpus_are_settled(const struct tly_gpus *g)
{
    bool all = true;
    for (uint64_t n = g->order.oldest; n < g->order.posted; n++) {
        const size_t slot = gpus_slot(n);
        if (gpus_owner(g, g->group, n) != g->local->me)
            continue;
        if (g->piece[slot].of.steps == TLY_ORDER_OUTWARD) {
            all &= gpus_is_hosted(g, n);
            continue;
        }
        for (uint32_t i = 0; i < g->each; i++)
            all &= gpus_has_taken(g, g->group * g->each + i, TLY_STEP_OUT, n);
        for (uint32_t i = 0; i < g->groups; i++)
            all &= gpus_has_taken(g, gpus_owner(g, i, n), TLY_STEP_BACK, n);
    }
    return all;
}

/* Has every other rank of the group unmapped this rank's buffer? */
static bool gpus_all_left(const struct tly_gpus *g)
{
    bool all = true;
    for (uint32_t i = 0; i < g->each; i++)
        all &= gpus_has_ended(g, g->group * g->each + i, TLY_GPUS_LEFT);
    return all;
}

static bool gpus_await(const struct tly_gpus *g, bool (*is)(const struct tly_gpus *g), int64_t ms)
{
    int64_t until = tly_now() + ms * TLY_MS;
    while (!is(g) && tly_now() < until)
        poll(NULL, 0, 1);
    return is(g);
}

/* Wait until the GPU has read all inputs.  Their streams may be held for ever, so not for long. */
static void gpus_await_inputs(struct tly_gpus *g)
{
    const struct timespec at = tly_clock_time(tly_now() + TLY_DEVICE_HANGS_S * TLY_SEC);
    while (!g->hangs && g->lane[TLY_STEP_IN].count) {
        if (pthread_cond_timedwait(&g->changed, &g->lock, &at) != ETIMEDOUT || !g->lane[TLY_STEP_IN].count)
            continue;
        g->hangs = true;
        tly_warn("comm",
                 "a GPU has not read an input for %d s; the memory of its group stays with this process",
                 TLY_DEVICE_HANGS_S);
    }
}

/* End the lanes' threads.  False: some stay in the driver. */
static bool gpus_end_lanes(struct tly_gpus *g)
{
    bool stays[TLY_STEPS], hangs;
    pthread_mutex_lock(&g->lock);
    gpus_await_inputs(g);
    g->ending = true;
    hangs = g->hangs;
    for (int i = 0; i < TLY_STEPS; i++)
        stays[i] = hangs && g->lane[i].waiting;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
    for (int i = 0; i < TLY_STEPS; i++)
        if (g->lane[i].started && stays[i])
            pthread_detach(g->lane[i].thread);
        else if (g->lane[i].started)
            pthread_join(g->lane[i].thread, NULL);
    return !hangs;
}

/* What stays with the process, so that leak checkers find it. */
static _Atomic(struct tly_gpus *) gpus_kept;

/* Forget the GPUs; the job may be failing just now. */
static void gpus_detach(struct tly_local *l)
{
    pthread_mutex_lock(&l->lock);
    l->gpus = NULL;
    pthread_mutex_unlock(&l->lock);
}

void tly_gpus_close(struct tly_local *l)
{
    struct tly_gpus *g = l->gpus;
    if (!g)
        return;
    tly_gpus_stop(l);
    if (!gpus_end_lanes(g)) {
        gpus_detach(l);
        g->kept = atomic_exchange(&gpus_kept, g);
        return;
    }
    for (uint32_t i = 0; i < g->each; i++)
        if (g->mapped[i] && g->mapped[i] != g->buffer)
            tly_device_unmap(g->device, g->mapped[i]);
    atomic_store(&l->own->gpus.end, TLY_GPUS_LEFT);
    bool settled = gpus_await(g, gpus_are_settled, SETTLE_MS),
         left = settled && gpus_await(g, gpus_all_left, LEAVE_MS);
    if (g->buffer && settled && left)
        tly_device_free(g->device, g->buffer);
    bool apart = !g->registered || tly_device_unregister(g->device, g->own) == 0; /* else a sum may go on */
    if (g->own && settled && apart)
        tly_pool_free(g->own);
    tly_device_close(g->device);
    gpus_detach(l);
    pthread_cond_destroy(&g->changed);
    pthread_mutex_destroy(&g->lock);
    free(g);
}
