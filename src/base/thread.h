/* thread.h - start a thread of ours: all signals blocked, floating point in the default mode, named; and what all have cost. */
#ifndef TLY_THREAD_H
#define TLY_THREAD_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

int tly_thread_start(pthread_t *thread, const char *name, void *(*main)(void *), void *arg);
/* Is the thread of this number (gettid) one of them?  Any thread may ask. */
bool tly_thread_is_ours(int id);

/* Processor time of our threads in this process so far, those that have ended included, ns.  Any thread may ask. */
uint64_t tly_thread_cpu(void);
/* The same since it was `before`.  A thread that is just ending may be missing for a moment. */
static inline uint64_t tly_thread_cpu_since(uint64_t before)
{
    uint64_t now = tly_thread_cpu();
    return now > before ? now - before : 0;
}
/* The calling thread counts as well: a program of ours has a loop in its main thread. */
void tly_thread_count_me(void);

/* Tell the processor that this is a short spin. */
static inline void tly_pause(void)
{
#if defined __x86_64__
    __builtin_ia32_pause();
#elif defined __aarch64__
    __asm__ volatile("yield");
#endif
}

#endif
