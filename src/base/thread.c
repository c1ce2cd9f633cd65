/* thread.c - threads that do not disturb the application. */
#include "base/thread.h"

#include <errno.h>
#include <fenv.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

struct start {
    void *(*main)(void *);
    void *arg;
    char name[16];
};

static void *enter(void *arg)
{
    struct start s = *(struct start *)arg;
    free(arg);
    pthread_setname_np(pthread_self(), s.name);
    /* MXCSR is inherited through clone: an application that flushes subnormals must not make us do so. */
    fesetenv(FE_DFL_ENV);
    return s.main(s.arg);
}

int tly_thread_start(pthread_t *thread, const char *name, void *(*main)(void *), void *arg)
{
    struct start *s = calloc(1, sizeof *s);
    if (!s)
        return tly_fail(ENOMEM, "out of memory");
    s->main = main;
    s->arg = arg;
    strncpy(s->name, name, sizeof s->name - 1);
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int err = pthread_create(thread, NULL, enter, s);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (err) {
        free(s);
        return tly_fail(err, "cannot start thread %s: %s", name, strerror(err));
    }
    return 0;
}
