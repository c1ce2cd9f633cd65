/* event.c - the futex behind struct tly_event. */
#include "base/event.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"

void tly_event_set(struct tly_event *e)
{
    if (atomic_exchange(&e->state, 1) == 2)
        syscall(SYS_futex, &e->state, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

bool tly_event_wait(struct tly_event *e, int64_t deadline)
{
    struct timespec until = tly_clock_time(deadline);
    for (;;) {
        uint32_t seen = 0;
        if (!atomic_compare_exchange_strong_explicit(&e->state, &seen, 2, memory_order_acquire,
                                                     memory_order_acquire) &&
            seen == 1)
            return true;
        /* FUTEX_WAIT_BITSET takes an absolute time. */
        long r = syscall(SYS_futex, &e->state, FUTEX_WAIT_BITSET_PRIVATE, 2, deadline < 0 ? NULL : &until,
                         NULL, FUTEX_BITSET_MATCH_ANY);
        if (r < 0 && errno == ETIMEDOUT)
            return tly_event_is_set(e);
    }
}
