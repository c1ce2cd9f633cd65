/* loop.h - an epoll loop with one owner lock.
 *
 * All callbacks run with the loop's lock held; it is released only while the loop sleeps.  So a second
 * thread may take the lock (tly_loop_lock) and do what a callback may do, and tly_loop_wake() makes a
 * sleeping loop run its prepare step again.
 *
 * Two clocks: `now` is the monotonic clock at the last wake-up; `awake` counts only the time in which this
 * loop ran (a tick that comes late counts as one tick), so a peer is never judged for our own pause.  It starts at 1 s, so
 * that 0 can stand for "never".
 *
 * The loop also knows since when it has run without delay, and how long it last stood still: whoever judges a peer within
 * a second or two asks the first, and who was judged itself explains that by the second.
 *
 * A loop may lodge in another one, its host: then the host's turns are its turns, and the host's lock is its lock.  Watches,
 * hooks and the awake clock stay its own. */
#ifndef TLY_LOOP_H
#define TLY_LOOP_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/epoll.h>

#include "base/list.h"

struct tly_watch {
    int fd; /* borrowed */
    void (*ready)(struct tly_watch *w, uint32_t events);
    /* the loop's */
    struct tly_list node;   /* in its `watches` */
    struct tly_list posted; /* in its host's `posted` */
    uint32_t events;
};

/* Called before each sleep and once a tick. */
struct tly_hook {
    struct tly_list node;
    /* Do deferred work; return the monotonic time (ns) at which to be called again, INT64_MAX for none. */
    int64_t (*prepare)(struct tly_hook *h);
    void (*tick)(struct tly_hook *h);
};

struct tly_loop {
    int epoll_fd, wake_fd;
    struct tly_loop *host;  /* borrowed: whose lock, epoll and turns it uses; itself, unless it lodges */
    pthread_mutex_t lock;   /* guards all below, and what the callbacks own */
    struct tly_loop *guest; /* borrowed: it lodges here; NULL: none does */
    struct tly_list hooks, watches;
    int64_t now, awake, last_tick;
    int64_t smooth_since; /* awake clock: from here on no tick came late */
    int64_t paused;       /* ns by which a tick was last more than a second late, */
    int64_t paused_till;  /* and when it came; monotonic */
    bool stop;
    bool sleeps; /* its thread looks at no list until something wakes it */
    struct tly_watch wake;
    struct epoll_event *batch; /* being handled: the rest of it, so that a removed watch can be taken out */
    int batch_left;
    uint64_t removals;          /* of watches, ever */
    struct tly_list posted;     /* watches to be handled without a look at the kernel, the guest's too */
    struct tly_list *next_hook; /* of the walk in progress */
};

enum {
    TLY_TICK_MS = 200,
    TLY_TICK_LATE_MS = 100, /* a tick that is later than that was delayed */
};

int tly_loop_init(struct tly_loop *l);
/* Let one loop lodge in another until it is finished, so that one thread serves both.  Negative: it stays as it was.  The
 * host's lock is held by the thread that turns it; no other thread uses the guest meanwhile but to wake it. */
int tly_loop_lodge(struct tly_loop *guest, struct tly_loop *host);
static inline bool tly_loop_lodges(const struct tly_loop *l)
{
    return l->host != l;
}
/* Free it.  The host of a guest goes on. */
void tly_loop_finish(struct tly_loop *l);

static inline void tly_loop_lock(struct tly_loop *l)
{
    pthread_mutex_lock(&l->host->lock);
}
static inline void tly_loop_unlock(struct tly_loop *l)
{
    pthread_mutex_unlock(&l->host->lock);
}
/* From any thread. */
void tly_loop_wake(struct tly_loop *l);

/* events: EPOLLIN, EPOLLOUT; level-triggered.  Lock held. */
int tly_loop_add(struct tly_loop *l, struct tly_watch *w, uint32_t events);
int tly_loop_change(struct tly_loop *l, struct tly_watch *w, uint32_t events);
/* The loop's thread calls `ready` with EPOLLIN soon, without a look at the descriptor.  Lock held; the watch has been added. */
void tly_loop_post(struct tly_loop *l, struct tly_watch *w);
/* The first watch of this loop, its host and its guest for which is() is true; NULL: there is none.  Lock held. */
struct tly_watch *tly_loop_find(const struct tly_loop *l, bool (*is)(struct tly_watch *w, const void *arg),
                                const void *arg);
/* After this `ready` is not called again, not even in the batch being handled.  A watch that was never added is no error. */
void tly_loop_remove(struct tly_loop *l, struct tly_watch *w);

void tly_loop_hook(struct tly_loop *l, struct tly_hook *h);
void tly_loop_unhook(struct tly_loop *l, struct tly_hook *h);

/* One turn: prepare, sleep, handle.  max_ms bounds the sleep (negative: the next tick does).  Takes the lock. */
void tly_loop_turn(struct tly_loop *l, int max_ms);
/* For how long (ns) this loop stood still, if that ended within the last ten seconds; else 0.  A second at least. */
int64_t tly_loop_pause(const struct tly_loop *l);
/* Turns until `stop`. */
void tly_loop_run(struct tly_loop *l);
/* Make run return.  From any thread. */
void tly_loop_stop(struct tly_loop *l);

#endif
