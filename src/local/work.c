/* work.c - what the ways have in common: how data are summed and taken, the count of a round's work entry, private memory,
 * and waiting for neighbours that are at ours. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "local/process.h"
#include "local/work.h"
#include "ops/local.h"
#include "reduce/reduce.h"

const uint8_t tly_work_zeros[TLY_ZEROS];

struct tly_reduction tly_work_how(const struct tly_local *l, const struct tly_local_op *op)
{
    return (struct tly_reduction){.dtype = op->dtype,
                                  .op = op->reduction,
                                  .divisor = tly_local_group_of(l, op)->size,
                                  .prescale = op->prescale,
                                  .postscale = op->postscale};
}

static struct tly_local_view work_view(const struct tly_local *l, const struct tly_local_op *op,
                                       const uint64_t given[])
{
    const struct tly_local_group *g = tly_local_group_of(l, op);
    return (struct tly_local_view){.me = g->me,
                                   .ranks = g->size,
                                   .root = op->root,
                                   .given = given,
                                   .dims = op->dims,
                                   .element = (uint32_t)tly_reduce_element_size(op->dtype)};
}

void tly_work_takes(const struct tly_local *l, const struct tly_local_op *op, const uint64_t given[],
                    struct tly_local_take take[])
{
    const struct tly_local_view view = work_view(l, op, given);
    memset(take, 0, view.ranks * sizeof *take);
    op->call->takes(&view, take);
}

void tly_work_ranges(const struct tly_local *l, const struct tly_local_op *op, struct tly_local_range range[])
{
    uint64_t given[TLY_LOCAL_RANKS];
    const uint32_t ranks = tly_local_group_of(l, op)->size;
    for (uint32_t i = 0; i < ranks; i++) {
        given[i] = op->bytes;
        range[i] = (struct tly_local_range){.bytes = op->call->gets ? 0 : op->bytes};
    }
    const struct tly_local_view view = work_view(l, op, given);
    if (op->call->gets)
        op->call->gets(&view, range);
}

uint64_t tly_work_output_bytes(const struct tly_local *l, const struct tly_local_op *op, uint32_t place)
{
    struct tly_local_range range[TLY_LOCAL_RANKS];
    if (!op->call->gets)
        return op->bytes;
    if (op->parts)
        return 0;
    tly_work_ranges(l, op, range);
    return range[place].bytes;
}

static void work_take_all(const struct tly_local *l, const struct tly_local_op *op, const void *const in[])
{
    uint64_t given[TLY_LOCAL_RANKS];
    struct tly_local_take take[TLY_LOCAL_RANKS];
    const uint32_t ranks = tly_local_group_of(l, op)->size;
    for (uint32_t i = 0; i < ranks; i++)
        given[i] = tly_gives(op->call->givers, op->root, i) ? op->bytes : 0;
    tly_work_takes(l, op, given, take);
    for (uint32_t i = 0; i < ranks; i++) {
        const uint8_t *from = (const uint8_t *)in[i] + take[i].from;
        uint8_t *to = (uint8_t *)op->output + take[i].to;
        if (take[i].bytes && to != from)
            memcpy(to, from, take[i].bytes);
    }
}

/* The range that this rank gets. */
static void work_reduce_range(const struct tly_local *l, const struct tly_local_op *op,
                              const struct tly_reduction *how, const void *const in[])
{
    struct tly_local_range range[TLY_LOCAL_RANKS];
    const void *rows[TLY_LOCAL_RANKS];
    const struct tly_local_group *g = tly_local_group_of(l, op);
    tly_work_ranges(l, op, range);
    const struct tly_local_range own = range[g->me];
    for (uint32_t i = 0; i < g->size; i++)
        rows[i] = (const uint8_t *)in[i] + own.begin;
    if (own.bytes)
        tly_reduce(how, (int)g->size, rows, op->output, own.bytes / tly_reduce_element_size(op->dtype));
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
    if (op->call->gets)
        work_reduce_range(l, op, &how, in);
    else
        tly_reduce(&how, (int)tly_local_group_of(l, op)->size, in, op->output, op->count);
}

bool tly_work_gives(const struct tly_local_op *op, uint32_t place)
{
    bool spreads = op->parts && !op->call->reduces;
    return !spreads && tly_gives(op->call->givers, op->root, place);
}

/* --- other ranks' memory ------------------------------------------------------------------------- */

static bool work_unreachable(struct tly_local *l, uint32_t rank)
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
            return work_unreachable(l, rank);
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
            ok = work_unreachable(l, rank);
        } else {
            from = (const uint8_t *)from + n;
            to += (size_t)n;
            len -= (size_t)n;
        }
    }
    atomic_store_explicit(&l->own->writing, 0, memory_order_release);
    return ok;
}

uint8_t *tly_work_seen(const struct tly_local *l, uint32_t rank, uint64_t at, bool pool)
{
    if (pool)
        return l->at[rank].base + at;
    return rank == l->me ? (uint8_t *)(uintptr_t)at : NULL;
}

bool tly_work_is_given_up(const struct tly_local *l, const struct tly_local_group *g)
{
    /* Pairs with the fence in local_stop_writers(): first it was read; and who says in `working` that he begins, then asks. */
    atomic_thread_fence(memory_order_seq_cst);
    for (uint32_t i = 0; i < g->size; i++)
        if (atomic_load_explicit(&l->at[g->rank[i]].control->failed, memory_order_relaxed))
            return true;
    return false;
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

void tly_work_mark(const struct tly_local *l, const struct tly_local_round *r)
{
    atomic_store(&tly_work_entry(l, r, l->me)->next, (uint64_t)r->posts[l->me].gen << 32 | UINT32_MAX);
    atomic_thread_fence(memory_order_seq_cst); /* the memory changes behind that */
}

bool tly_work_is_marked(const struct tly_local *l, const struct tly_local_round *r, uint32_t rank)
{
    return atomic_load(&tly_work_entry(l, r, rank)->next) ==
           ((uint64_t)r->posts[rank].gen << 32 | UINT32_MAX);
}

bool tly_work_give_up(struct tly_local *l, const struct tly_local_round *r)
{
    if (!r->posts[l->me].gen)
        return true; /* the post names no entry, so no rank works on the round */
    tly_work_mark(l, r);
    return tly_work_await_others(l, tly_work_name(r));
}

bool tly_work_lend(struct tly_local *l, struct tly_local_op *op, struct tly_post *own, bool writes)
{
    return l->direct || tly_work_stage(l, op, own, writes, false);
}

bool tly_work_stage(struct tly_local *l, struct tly_local_op *op, struct tly_post *own, bool writes,
                    bool later)
{
    bool in = own->bytes && !(own->flags & TLY_POST_POOL_IN),
         out = writes && !(own->flags & TLY_POST_POOL_OUT);
    struct tly_local_range range[TLY_LOCAL_RANKS];
    if (!in && !out)
        return true;
    if (tly_pool_borrow(l->segment, op->bytes, &op->borrowed) != 0)
        return false;
    uint64_t at = (uint64_t)((uint8_t *)op->borrowed - tly_segment_base(l->segment));
    if (in) {
        if (!later)
            memcpy(op->borrowed, op->input, op->bytes);
        own->input = at;
        own->flags |= TLY_POST_POOL_IN;
    }
    if (out) {
        tly_work_ranges(l, op, range);
        /* Over this rank's input for what it gets, which is read when that is written. */
        own->output = at + range[tly_local_group_of(l, op)->me].begin;
        own->flags |= TLY_POST_POOL_OUT;
    }
    return true;
}

void tly_work_say_full(struct tly_local *l, const char *instead)
{
    if (!l->said_full)
        tly_warn("comm", "no room to show a tensor to the machine's other ranks: %s; %s", tly_error(),
                 instead);
    l->said_full = true;
}

/* --- the work entry ------------------------------------------------------------------------------ */

bool tly_work_take_entry(struct tly_local *l, struct tly_post *own)
{
    if (!l->free_count)
        return false;
    own->work = l->free_work[--l->free_count];
    own->gen = ++l->gens[own->work];
    struct tly_work *w = &l->own->work[own->work];
    /* The post publishes them. */
    atomic_store_explicit(&w->done, (uint64_t)own->gen << 32,
                          memory_order_release); /* who is late reads it as an end */
    atomic_store_explicit(&w->next, (uint64_t)own->gen << 32, memory_order_relaxed);
    return true;
}

void tly_work_share(struct tly_local *l, struct tly_local_round *r)
{
    r->work = tly_work_entry(l, r, r->lead);
    r->gen = r->posts[r->lead].gen;
}

bool tly_work_count(struct tly_local *l, const struct tly_local_round *r)
{
    if (tly_work_is_given_up(l, r->group))
        return false;
    /* acq_rel: the results of all that came before are there for who sees the last one. */
    uint64_t v = atomic_fetch_add_explicit(&r->work->done, 1, memory_order_acq_rel) + 1;
    if ((uint32_t)v == r->chunks)
        tly_local_tell_group(l, r->group);
    return true;
}

bool tly_work_is_finished(const struct tly_local_round *r)
{
    uint64_t v = atomic_load_explicit(&r->work->done, memory_order_acquire);
    return (uint32_t)(v >> 32) != r->gen || (uint32_t)v >= r->chunks;
}
