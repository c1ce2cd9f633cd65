/* event.h - a one-shot event on a futex: set once, waited for by any number of threads. */
#ifndef TLY_EVENT_H
#define TLY_EVENT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* 0: not set; 1: set; 2: not set, somebody sleeps on it. */
struct tly_event {
    _Atomic uint32_t state; /* seq_cst in set and is_set, acquire in wait */
};

static inline bool tly_event_is_set(const struct tly_event *e)
{
    return atomic_load(&((struct tly_event *)e)->state) == 1;
}

void tly_event_set(struct tly_event *e);

/* Sleep until it is set or the monotonic clock passes `deadline` (ns; negative: for ever). */
bool tly_event_wait(struct tly_event *e, int64_t deadline);

#endif
