/* log.c - where log lines go. */
#include "base/log.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/list.h"
#include "base/text.h"

/* The lock guards all sinks and is held while one runs, so that a sink is never called again after tally_log_redirect() or
 * tly_log_end_diversion() has returned.  A sink must therefore not log. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static tally_log_sink *application;
static void *application_user;
static struct tly_list diversions = TLY_LIST_INIT(diversions); /* those that began last are first */
/* The rank in lines, and the process that claimed it: pid << 32 | rank + 1; 0: none.  A forked child's lines have its
 * parent's rank until the child claims one.  Read without the lock, as the level: a line late is no harm. */
static atomic_ullong claimed;
static atomic_int threshold = TALLY_LOG_INFO;

static const char *const level_names[] = {"off", "error", "warning", "info", "debug"};

/* Another thread may have held the lock when this process was forked; the queues are its parent's. */
static void log_in_child(void)
{
    pthread_mutex_init(&lock, NULL);
    tly_list_init(&diversions);
}

static void log_install(void)
{
    pthread_atfork(NULL, NULL, log_in_child);
}

static void log_take_lock(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, log_install);
    pthread_mutex_lock(&lock);
}

int tly_log_set_level(const char *name)
{
    for (int i = 0; i < 5; i++)
        if (strcmp(name, level_names[i]) == 0) {
            atomic_store_explicit(&threshold, i, memory_order_relaxed);
            return 0;
        }
    return -EINVAL;
}

bool tly_log_claim_rank(int rank)
{
    unsigned long long was = atomic_load_explicit(&claimed, memory_order_relaxed), own = (unsigned)getpid();
    return was >> 32 != own &&
           atomic_compare_exchange_strong(&claimed, &was, own << 32 | ((unsigned)rank + 1));
}

void tly_log_release_rank(void)
{
    atomic_store_explicit(&claimed, 0, memory_order_relaxed);
}

void tally_log_redirect(tally_log_sink *sink, void *user)
{
    log_take_lock();
    application = sink;
    application_user = user;
    pthread_mutex_unlock(&lock);
}

void tly_log_diversion_init(struct tly_log_diversion *d, tally_log_sink *sink, void *user)
{
    *d = (struct tly_log_diversion){.sink = sink, .user = user};
    tly_list_init(&d->node);
}

void tly_log_divert(struct tly_log_diversion *d)
{
    log_take_lock();
    tly_list_remove(&d->node);
    tly_list_append(diversions.next, &d->node); /* before the first */
    pthread_mutex_unlock(&lock);
}

void tly_log_end_diversion(struct tly_log_diversion *d)
{
    log_take_lock();
    tly_list_remove(&d->node);
    pthread_mutex_unlock(&lock);
}

void tly_log(enum tally_log_level level, const char *topic, const char *format, ...)
{
    if ((int)level > atomic_load_explicit(&threshold, memory_order_relaxed))
        return;
    char line[1024];
    int rank = (int)(atomic_load_explicit(&claimed, memory_order_relaxed) & UINT32_MAX) - 1, n = 0;
    if (rank >= 0)
        n = snprintf(line, sizeof line, "rank %d ", rank);
    n += snprintf(line + n, sizeof line - (size_t)n, "%s: ", topic);
    va_list args;
    va_start(args, format);
    vsnprintf(line + n, sizeof line - (size_t)n, format, args);
    va_end(args);
    tly_text_clean(line);
    log_take_lock();
    const struct tly_log_diversion *d = tly_list_entry(diversions.next, struct tly_log_diversion, node);
    if (!tly_list_empty(&diversions))
        d->sink(d->user, level, line);
    else if (application)
        application(application_user, level, line);
    else
        fprintf(stderr, "tally %s %s\n", level_names[level], line);
    pthread_mutex_unlock(&lock);
}
