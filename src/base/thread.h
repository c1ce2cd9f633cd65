/* thread.h - start a thread of ours: all signals blocked, floating point in the default mode, named. */
#ifndef TLY_THREAD_H
#define TLY_THREAD_H

#include <pthread.h>

int tly_thread_start(pthread_t *thread, const char *name, void *(*main)(void *), void *arg);

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
