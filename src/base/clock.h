/* clock.h - monotonic time. */
#ifndef TLY_CLOCK_H
#define TLY_CLOCK_H

#include <stdint.h>
#include <time.h>

#define TLY_MS 1000000ll
#define TLY_SEC 1000000000ll

/* Nanoseconds of the monotonic clock. */
static inline int64_t tly_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * TLY_SEC + t.tv_nsec;
}

/* The same for calls that wait. */
static inline struct timespec tly_clock_time(int64_t ns)
{
    return (struct timespec){.tv_sec = ns / TLY_SEC, .tv_nsec = ns % TLY_SEC};
}

#endif
