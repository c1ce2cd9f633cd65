/* thread.h - start a thread of ours: all signals blocked, floating point in the default mode, named. */
#ifndef TLY_THREAD_H
#define TLY_THREAD_H

#include <pthread.h>

int tly_thread_start(pthread_t *thread, const char *name, void *(*main)(void *), void *arg);

#endif
