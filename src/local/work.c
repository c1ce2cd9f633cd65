/* work.c - moving and reducing the data of a round whose posts are all there.
 *
 * A large reduction in the pool is cut into parts.  Whoever is free takes the next one, reads it from all ranks and writes
 * the sum to all ranks, so a rank that computes delays nobody: the others do its share.  (One of private memory: staging.c.)
 * What is not reduced, each rank takes from the others for itself: private memory by process_vm_readv. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>

#include "base/clock.h"
#include "local/process.h"
#include "local/work.h"
#include "ops/local.h"
#include "reduce/reduce.h"

enum {
    LEAST_PART = 8 << 10,
    HANDY_PART = 16 << 10, /* smaller only where ranks would be idle */
    MOST_PART = 256 << 10,
    BLOCK = TLY_ZEROS, /* of pool memory: sums are copied to the other ranks while the first cache has them */
    PARTS_EACH = 2,    /* for each rank, at least, of a large tensor */
};

static const uint8_t zeros[TLY_ZEROS]; /* what stands for a rank that has joined */

void tly_work_cut(const struct tly_local *l, struct tly_round *r)
{
    uint64_t bytes = r->op->bytes, one = bytes / l->count, part = one / PARTS_EACH;
    part = part < HANDY_PART ? HANDY_PART : part > MOST_PART ? MOST_PART : part;
    part = one > part ? part : one < LEAST_PART ? LEAST_PART : one;
    part = (part + TLY_PAGE - 1) / TLY_PAGE * TLY_PAGE;
    while ((bytes + part - 1) / part > UINT32_MAX / 2)
        part *= 2;
    r->part_bytes = (uint32_t)part;
    r->parts = (uint32_t)((bytes + part - 1) / part);
}

struct tly_reduction tly_work_how(const struct tly_local *l, const struct tly_local_op *op)
{
    return (struct tly_reduction){.dtype = op->dtype,
                                  .op = op->reduction,
                                  .divisor = l->count,
                                  .prescale = op->prescale,
                                  .postscale = op->postscale};
}

/* What this rank takes of each rank, of so many bytes that each gives. */
static void work_takes(const struct tly_local *l, const struct tly_local_op *op, const uint64_t given[],
                       struct tly_local_take take[])
{
    const struct tly_local_view view = {.me = l->me, .ranks = l->count, .root = op->root, .given = given};
    memset(take, 0, l->count * sizeof *take);
    op->call->takes(&view, take);
}

static void work_take_all(const struct tly_local *l, const struct tly_local_op *op, const void *const in[])
{
    uint64_t given[TLY_LOCAL_RANKS];
    struct tly_local_take take[TLY_LOCAL_RANKS];
    for (uint32_t i = 0; i < l->count; i++)
        given[i] = tly_gives(op->call->givers, op->root, i) ? op->bytes : 0;
    work_takes(l, op, given, take);
    for (uint32_t i = 0; i < l->count; i++) {
        const uint8_t *from = (const uint8_t *)in[i] + take[i].from;
        uint8_t *to = (uint8_t *)op->output + take[i].to;
        if (take[i].bytes && to != from)
            memcpy(to, from, take[i].bytes);
    }
}

void tly_work_make(const struct tly_local *l, const struct tly_local_op *op, const void *const in[])
{
    if (!op->bytes)
        return;
    if (!op->call->reduces) {
        if (op->call->takes)
            work_take_all(l, op, in);
        return;
    }
    struct tly_reduction how = tly_work_how(l, op);
    tly_reduce(&how, (int)l->count, in, op->output, op->count);
}

void tly_work_eager(struct tly_local *l, struct tly_round *r)
{
    const struct tly_local_op *op = r->op;
    const void *in[TLY_LOCAL_RANKS];
    if (!op->bytes)
        return;
    for (uint32_t i = 0; i < l->count; i++)
        in[i] = i == l->me ? op->input : r->posts[i].call ? r->data + (size_t)i * r->room : zeros;
    tly_work_make(l, op, in);
}

/* --- private memory ------------------------------------------------------------------------------ */

static bool unreachable(struct tly_local *l, uint32_t rank)
{
    char sentence[160];
    int err = errno;
    /* Else it has died, or is about to, and the coordinator says so; or it has given up, and its memory may be gone. */
    if ((err != ESRCH || !tly_process_has_died(l->at[rank].pidfd)) &&
        !atomic_load(&l->at[rank].control->failed)) {
        snprintf(sentence, sizeof sentence, "rank %u cannot reach a tensor of rank %u: %s",
                 tly_local_number(l, l->me), tly_local_number(l, rank),
                 err == ESRCH ? "its main thread has ended" : strerror(err));
        l->calls->broken(l->user, EFAULT, sentence);
    }
    return false;
}

bool tly_work_read(struct tly_local *l, uint32_t rank, uint64_t from, void *to, size_t len)
{
    while (len) {
        struct iovec mine = {to, len}, theirs = {(void *)(uintptr_t)from, len};
        ssize_t n = process_vm_readv(l->at[rank].pid, &mine, 1, &theirs, 1, 0);
        if (n <= 0)
            return unreachable(l, rank);
        to = (uint8_t *)to + n;
        from += (size_t)n;
        len -= (size_t)n;
    }
    return true;
}

bool tly_work_write(struct tly_local *l, uint32_t rank, uint64_t to, const void *from, size_t len)
{
    bool ok = true;
    /* A rank that fails looks at `writing` once it has set its `failed`. */
    atomic_store(&l->own->writing, rank + 1);
    while (len && ok && !atomic_load(&l->at[rank].control->failed)) {
        struct iovec mine = {(void *)(uintptr_t)from, len}, theirs = {(void *)(uintptr_t)to, len};
        ssize_t n = process_vm_writev(l->at[rank].pid, &mine, 1, &theirs, 1, 0);
        if (n <= 0) {
            ok = unreachable(l, rank);
        } else {
            from = (const uint8_t *)from + n;
            to += (size_t)n;
            len -= (size_t)n;
        }
    }
    atomic_store_explicit(&l->own->writing, 0, memory_order_release);
    return ok;
}

/* --- parts --------------------------------------------------------------------------------------- */

uint8_t *tly_work_seen(const struct tly_local *l, uint32_t rank, uint64_t at, bool pool)
{
    if (pool)
        return l->at[rank].base + at;
    return rank == l->me ? (uint8_t *)(uintptr_t)at : NULL;
}

static void reduce_block(struct tly_local *l, struct tly_round *r, const struct tly_reduction *h,
                         uint64_t from, size_t len)
{
    const void *in[TLY_LOCAL_RANKS];
    for (uint32_t i = 0; i < l->count; i++)
        in[i] = r->posts[i].call ? l->at[i].base + r->posts[i].input + from : zeros;
    uint8_t *sum = l->at[r->lead].base + r->posts[r->lead].output + from;
    tly_reduce(h, (int)l->count, in, sum, len / tly_reduce_element_size(h->dtype));
    for (uint32_t i = r->lead + 1; i < l->count; i++)
        if (r->posts[i].call)
            memcpy(l->at[i].base + r->posts[i].output + from, sum, len);
}

bool tly_work_is_given_up(const struct tly_local *l)
{
    /* Pairs with the fence in stop_writers(): first it was read; and who says in `working` that he begins, then asks. */
    atomic_thread_fence(memory_order_seq_cst);
    for (uint32_t i = 0; i < l->count; i++)
        if (atomic_load_explicit(&l->at[i].control->failed, memory_order_relaxed))
            return true;
    return false;
}

static bool done(struct tly_local *l, struct tly_round *r)
{
    if (tly_work_is_given_up(l))
        return false;
    /* acq_rel: the results of all that came before are there for who sees the last one. */
    uint64_t v = atomic_fetch_add_explicit(&r->work->done, 1, memory_order_acq_rel) + 1;
    if ((uint32_t)v == r->parts)
        tly_local_tell(l);
    return true;
}

static bool is_left(const struct tly_round *r, uint64_t next)
{
    return (uint32_t)(next >> 32) == r->gen && (uint32_t)next < r->parts;
}

bool tly_work_left(const struct tly_round *r)
{
    return r->op->call->reduces ? is_left(r, atomic_load_explicit(&r->work->next, memory_order_relaxed))
                                : !r->counted;
}

static bool take_part(struct tly_round *r, uint32_t *part)
{
    uint64_t v = atomic_load_explicit(&r->work->next, memory_order_relaxed);
    do
        if (!is_left(r, v))
            return false;
    while (!atomic_compare_exchange_weak(&r->work->next, &v, v + 1));
    *part = (uint32_t)v;
    return true;
}

static bool reduce_range(struct tly_local *l, struct tly_round *r, uint64_t from, uint64_t to)
{
    struct tly_reduction h = tly_work_how(l, r->op);
    for (; from < to; from += BLOCK) {
        if (atomic_load_explicit(&l->failed, memory_order_relaxed) || tly_work_is_given_up(l))
            return false; /* the communicator fails: the memory is its user's again */
        reduce_block(l, r, &h, from, to - from < BLOCK ? to - from : BLOCK);
    }
    return true;
}

static bool reduce_part(struct tly_local *l, struct tly_round *r)
{
    uint32_t part;
    if (!is_left(r, atomic_load_explicit(&r->work->next, memory_order_relaxed)))
        return false;
    /* A rank that gives the round up takes all parts, or sets `failed`, then looks at `working`. */
    atomic_store(&l->own->working, r->posts[r->lead].work + 1u);
    bool ok = !tly_work_is_given_up(l) && take_part(r, &part);
    if (ok) {
        uint64_t from = (uint64_t)part * r->part_bytes, to = from + r->part_bytes;
        ok = reduce_range(l, r, from, to < r->op->bytes ? to : r->op->bytes);
    }
    atomic_store_explicit(&l->own->working, 0, memory_order_release);
    return ok && done(l, r);
}

bool tly_work_await_others(struct tly_local *l, uint32_t at)
{
    int64_t patience = tly_now() + l->config.stuck_ms * TLY_MS;
    for (uint32_t i = 0; i < l->count; i++) {
        struct pollfd gone = {.fd = l->at[i].pidfd, .events = POLLIN};
        while (i != l->me && atomic_load(&l->at[i].control->working) == at && poll(&gone, 1, 1) <= 0) {
            if (atomic_load(&l->failed))
                return false;
            if (tly_now() < patience)
                continue;
            char sentence[100];
            snprintf(sentence, sizeof sentence,
                     "rank %u has stopped in the midst of a copy into the memory of rank %u",
                     tly_local_number(l, i), tly_local_number(l, l->me));
            l->calls->broken(l->user, ETIMEDOUT, sentence);
            return false;
        }
    }
    return true;
}

bool tly_work_give_up(struct tly_local *l, const struct tly_round *r)
{
    if (!r->op->call->reduces)
        return true; /* the others only read, and what they have read counts for nothing */
    uint64_t v = atomic_load(&r->work->next);
    while ((uint32_t)(v >> 32) == r->gen && !atomic_compare_exchange_weak(&r->work->next, &v, v | UINT32_MAX))
        ;
    return tly_work_await_others(l, r->posts[r->lead].work + 1u);
}

/* What this rank takes of one rank's data, into our memory. */
static bool work_fetch(struct tly_local *l, struct tly_round *r, uint32_t rank,
                       const struct tly_local_take *take)
{
    const struct tly_post *p = &r->posts[rank];
    uint8_t *to = (uint8_t *)r->op->output + take->to;
    const uint8_t *from = r->op->input;
    if (rank != l->me)
        from = p->flags & TLY_POST_EAGER ? r->data + (size_t)rank * r->room
                                         : tly_work_seen(l, rank, p->input, p->flags & TLY_POST_POOL_IN);
    if (!from)
        return tly_work_read(l, rank, p->input + take->from, to, take->bytes);
    if (to != from + take->from)
        memcpy(to, from + take->from, take->bytes);
    return true;
}

static bool work_fetch_all(struct tly_local *l, struct tly_round *r)
{
    uint64_t given[TLY_LOCAL_RANKS];
    struct tly_local_take take[TLY_LOCAL_RANKS];
    for (uint32_t i = 0; i < l->count; i++)
        given[i] = r->posts[i].bytes;
    work_takes(l, r->op, given, take);
    for (uint32_t i = 0; i < l->count; i++)
        if (take[i].bytes && !work_fetch(l, r, i, &take[i]))
            return false;
    return true;
}

bool tly_work_do(struct tly_local *l, struct tly_round *r)
{
    if (r->op->call->reduces)
        return reduce_part(l, r);
    if (r->counted)
        return false;
    r->counted = true;
    return work_fetch_all(l, r) && done(l, r);
}
