/* thread.c - threads that do not disturb the application. */
#include "base/thread.h"

#include <errno.h>
#include <fenv.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/error.h"

/* The numbers of our threads; 0: free.  One for which there is no room counts as the application's. */
static atomic_int ours[256];

struct start {
    void *(*main)(void *);
    void *arg;
    char name[16];
};

/* In a forked child, which has one thread: the application's. */
static void thread_forget_all(void)
{
    for (size_t i = 0; i < sizeof ours / sizeof *ours; i++)
        atomic_store_explicit(&ours[i], 0, memory_order_relaxed);
}

static void thread_install(void)
{
    pthread_atfork(NULL, NULL, thread_forget_all);
}

/* Put `to` where `from` is. */
static void thread_replace(int from, int to)
{
    for (size_t i = 0; i < sizeof ours / sizeof *ours; i++) {
        int expected = from;
        if (atomic_compare_exchange_strong(&ours[i], &expected, to))
            return;
    }
}

bool tly_thread_is_ours(int id)
{
    for (size_t i = 0; i < sizeof ours / sizeof *ours; i++)
        if (atomic_load_explicit(&ours[i], memory_order_relaxed) == id)
            return true;
    return false;
}

static void *thread_enter(void *arg)
{
    struct start s = *(struct start *)arg;
    free(arg);
    pthread_setname_np(pthread_self(), s.name);
    /* MXCSR is inherited through clone: an application that flushes subnormals must not make us do so. */
    fesetenv(FE_DFL_ENV);
    int id = (int)syscall(SYS_gettid);
    thread_replace(0, id);
    void *result = s.main(s.arg);
    thread_replace(id, 0);
    return result;
}

int tly_thread_start(pthread_t *thread, const char *name, void *(*main)(void *), void *arg)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, thread_install);
    struct start *s = calloc(1, sizeof *s);
    if (!s)
        return tly_fail(ENOMEM, "out of memory");
    s->main = main;
    s->arg = arg;
    strncpy(s->name, name, sizeof s->name - 1);
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int err = pthread_create(thread, NULL, thread_enter, s);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (err) {
        free(s);
        return tly_fail(err, "cannot start thread %s: %s", name, strerror(err));
    }
    return 0;
}
