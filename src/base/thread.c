/* thread.c - threads that do not disturb the application. */
#include "base/thread.h"

#include <errno.h>
#include <fenv.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"

enum { MOST = 256, FREE = 0, TAKEN = -1 };

/* Our threads.  One for which there is no room counts as the application's. */
static struct {
    atomic_int id; /* FREE, TAKEN while the clock is written, or the thread's number */
    _Atomic(clockid_t) clock;
} ours[MOST];
static atomic_ullong ended_ns; /* processor time of those that have ended */

struct start {
    void *(*main)(void *);
    void *arg;
    char name[16];
};

/* In a forked child, which has one thread: the application's. */
static void thread_forget_all(void)
{
    for (size_t i = 0; i < MOST; i++)
        atomic_store_explicit(&ours[i].id, FREE, memory_order_relaxed);
    atomic_store_explicit(&ended_ns, 0, memory_order_relaxed);
}

static void thread_install(void)
{
    pthread_atfork(NULL, NULL, thread_forget_all);
}

/* The calling thread's place, or MOST. */
static size_t thread_register(int id)
{
    for (size_t i = 0; i < MOST; i++) {
        int expected = FREE;
        if (atomic_compare_exchange_strong(&ours[i].id, &expected, TAKEN)) {
            clockid_t clock;
            pthread_getcpuclockid(pthread_self(), &clock);
            atomic_store_explicit(&ours[i].clock, clock, memory_order_relaxed);
            atomic_store_explicit(&ours[i].id, id, memory_order_release);
            return i;
        }
    }
    return MOST;
}

static uint64_t thread_read(clockid_t clock)
{
    struct timespec t;
    return clock_gettime(clock, &t) == 0 ? (uint64_t)t.tv_sec * TLY_SEC + (uint64_t)t.tv_nsec : 0;
}

bool tly_thread_is_ours(int id)
{
    for (size_t i = 0; i < MOST; i++)
        if (atomic_load_explicit(&ours[i].id, memory_order_relaxed) == id)
            return true;
    return false;
}

uint64_t tly_thread_cpu(void)
{
    uint64_t ns = atomic_load_explicit(&ended_ns, memory_order_relaxed);
    for (size_t i = 0; i < MOST; i++)
        if (atomic_load_explicit(&ours[i].id, memory_order_acquire) > 0)
            ns += thread_read(
                atomic_load_explicit(&ours[i].clock, memory_order_relaxed)); /* 0 if it has just ended */
    return ns;
}

void tly_thread_count_me(void)
{
    thread_register((int)syscall(SYS_gettid));
}

static void *thread_enter(void *arg)
{
    struct start s = *(struct start *)arg;
    free(arg);
    pthread_setname_np(pthread_self(), s.name);
    /* MXCSR is inherited through clone: an application that flushes subnormals must not make us do so. */
    fesetenv(FE_DFL_ENV);
    size_t place = thread_register((int)syscall(SYS_gettid));
    void *result = s.main(s.arg);
    if (place < MOST)
        atomic_store(&ours[place].id, FREE);
    atomic_fetch_add(&ended_ns, thread_read(CLOCK_THREAD_CPUTIME_ID));
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
