/* wake.c - how ranks wake each other: a bell for each rank, and a word that says whom it is to wake.
 *
 * The bell is a futex in the rank's segment.  Two kinds of threads sleep on it: callers that wait, and "tally-local".
 * `wanted` says which of them a change is to wake.  It is 0 while a thread of the rank spins, because that thread looks
 * by itself.  All of it is Dekker's pattern: write what you have, fence, read what the other has.
 *
 * Any thread may call these, with or without the engine's lock. */
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/thread.h"
#include "local/engine.h"

enum { PAUSES = 50 }; /* before it lets others have the core, if they want it */

void tly_local_ring(struct tly_local *l, uint32_t rank, uint32_t whom)
{
    struct tly_control *c = l->at[rank].control;
    atomic_fetch_add_explicit(&c->bell, 1, memory_order_seq_cst);
    syscall(SYS_futex, &c->bell, FUTEX_WAKE_BITSET, INT32_MAX, NULL, NULL, whom);
}

static void wake_rank(struct tly_local *l, uint32_t rank)
{
    uint32_t whom =
        rank == l->me ? 0 : atomic_load_explicit(&l->at[rank].control->wanted, memory_order_relaxed);
    if (whom)
        tly_local_ring(l, rank, whom);
}

void tly_local_tell(struct tly_local *l)
{
    atomic_thread_fence(memory_order_seq_cst);
    for (uint32_t i = 0; i < l->count; i++)
        wake_rank(l, i);
}

void tly_local_tell_group(struct tly_local *l, const struct tly_local_group *g)
{
    atomic_thread_fence(memory_order_seq_cst);
    for (uint32_t i = 0; i < g->size; i++)
        wake_rank(l, g->rank[i]);
}

void tly_local_tell_one(struct tly_local *l, uint32_t rank)
{
    atomic_thread_fence(memory_order_seq_cst);
    wake_rank(l, rank);
}

void tly_local_tell_sleepers(struct tly_local *l)
{
    if (atomic_load(&l->sleeping))
        tly_local_ring(l, l->me, TLY_WAKE_WAITERS);
}

static uint32_t whom_to_wake(struct tly_local *l)
{
    if (atomic_load(&l->spinning))
        return 0;
    if (atomic_load(&l->sleeping))
        return TLY_WAKE_WAITERS;
    return atomic_load(&l->in_flight) ? TLY_WAKE_THREAD : 0;
}

void tly_local_set_wanted(struct tly_local *l)
{
    for (;;) {
        uint32_t whom = whom_to_wake(l);
        if (atomic_load_explicit(&l->own->wanted, memory_order_relaxed) != whom)
            atomic_store(&l->own->wanted, whom);
        if (whom == whom_to_wake(l))
            return;
    }
}

void tly_local_call_own(struct tly_local *l)
{
    tly_local_set_wanted(l);
    uint32_t whom = atomic_load(&l->own->wanted);
    if (whom)
        tly_local_ring(l, l->me, whom);
}

void tly_local_sleep(struct tly_local *l, uint32_t bell, uint32_t as, int ms, int64_t deadline)
{
    int64_t until = tly_now() + ms * TLY_MS;
    if (deadline >= 0 && deadline < until)
        until = deadline;
    struct timespec t = tly_clock_time(until);
    syscall(SYS_futex, &l->own->bell, FUTEX_WAIT_BITSET, bell, &t, NULL, as);
}

void tly_local_rest(const struct tly_local *l, unsigned spins)
{
    if (l->crowded || spins > PAUSES)
        sched_yield();
    else
        tly_pause();
}
