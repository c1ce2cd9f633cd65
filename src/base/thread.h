/* thread.h - start a thread of ours: all signals blocked, floating point in the default mode, named. */
#ifndef TLY_THREAD_H
#define TLY_THREAD_H

#include <pthread.h>
#include <stdbool.h>

int tly_thread_start(pthread_t *thread, const char *name, void *(*main)(void *), void *arg);
/* Is the thread of this number (gettid) one of them?  Any thread may ask. */
bool tly_thread_is_ours(int id);

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
