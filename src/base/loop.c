/* loop.c - epoll loop. */
#include "base/loop.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/fork.h"

static void loop_drain_wake(struct tly_watch *w, uint32_t events)
{
    uint64_t n;
    while (read(w->fd, &n, sizeof n) < 0 && errno == EINTR)
        ;
}

int tly_loop_init(struct tly_loop *l)
{
    memset(l, 0, sizeof *l);
    tly_list_init(&l->hooks);
    l->wake_fd = -1;
    l->epoll_fd = tly_fd_own(epoll_create1(EPOLL_CLOEXEC));
    if (l->epoll_fd < 0)
        return tly_fail(errno, "cannot create an epoll descriptor: %s", strerror(errno));
    l->wake_fd = tly_fd_own(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (l->wake_fd < 0) {
        int err = tly_fail(errno, "cannot create an eventfd: %s", strerror(errno));
        tly_fd_close(l->epoll_fd);
        l->epoll_fd = -1;
        return err;
    }
    pthread_mutex_init(&l->lock, NULL);
    l->wake = (struct tly_watch){.fd = l->wake_fd, .ready = loop_drain_wake};
    l->now = l->last_tick = tly_now();
    l->awake = l->smooth_since = TLY_SEC; /* never 0: users take 0 for "not yet" */
    int err = tly_loop_add(l, &l->wake, EPOLLIN);
    if (err)
        tly_loop_finish(l);
    return err;
}

void tly_loop_finish(struct tly_loop *l)
{
    if (!l || l->epoll_fd < 0)
        return;
    tly_fd_close(l->wake_fd);
    tly_fd_close(l->epoll_fd);
    l->epoll_fd = l->wake_fd = -1;
    pthread_mutex_destroy(&l->lock);
}

void tly_loop_wake(struct tly_loop *l)
{
    uint64_t one = 1;
    ssize_t r = write(l->wake_fd, &one, sizeof one); /* full means awake already */
    (void)r;
}

int tly_loop_add(struct tly_loop *l, struct tly_watch *w, uint32_t events)
{
    struct epoll_event e = {.events = events, .data.ptr = w};
    if (epoll_ctl(l->epoll_fd, EPOLL_CTL_ADD, w->fd, &e) < 0)
        return tly_fail(errno, "cannot watch a descriptor: %s", strerror(errno));
    return 0;
}

int tly_loop_change(struct tly_loop *l, struct tly_watch *w, uint32_t events)
{
    struct epoll_event e = {.events = events, .data.ptr = w};
    return epoll_ctl(l->epoll_fd, EPOLL_CTL_MOD, w->fd, &e) < 0 ? -errno : 0;
}

void tly_loop_remove(struct tly_loop *l, struct tly_watch *w)
{
    struct epoll_event e = {0};
    epoll_ctl(l->epoll_fd, EPOLL_CTL_DEL, w->fd, &e);
    l->removals++;
    for (int i = 0; i < l->batch_left; i++)
        if (l->batch[i].data.ptr == w)
            l->batch[i].data.ptr = NULL;
}

void tly_loop_hook(struct tly_loop *l, struct tly_hook *h)
{
    tly_list_append(&l->hooks, &h->node);
}

void tly_loop_unhook(struct tly_loop *l, struct tly_hook *h)
{
    if (l->next_hook == &h->node)
        l->next_hook = h->node.next;
    tly_list_remove(&h->node);
}

/* The next hook of a walk in which hooks may be removed; NULL at the end. */
static struct tly_hook *loop_walk(struct tly_loop *l, bool first)
{
    struct tly_list *n = first ? l->hooks.next : l->next_hook;
    if (n == &l->hooks) {
        l->next_hook = NULL;
        return NULL;
    }
    l->next_hook = n->next;
    return tly_list_entry(n, struct tly_hook, node);
}

static int64_t loop_prepare(struct tly_loop *l)
{
    int64_t due = INT64_MAX;
    for (struct tly_hook *h = loop_walk(l, true); h; h = loop_walk(l, false))
        if (h->prepare) {
            int64_t t = h->prepare(h);
            if (t < due)
                due = t;
        }
    return due;
}

static void loop_tick(struct tly_loop *l)
{
    int64_t passed = l->now - l->last_tick;
    if (passed < TLY_TICK_MS * TLY_MS)
        return;
    l->last_tick = l->now;
    /* What was late by more than a tick was our own pause. */
    l->awake += passed < 2 * TLY_TICK_MS * TLY_MS ? passed : TLY_TICK_MS * TLY_MS;
    int64_t late = passed - TLY_TICK_MS * TLY_MS;
    if (late > TLY_TICK_LATE_MS * TLY_MS)
        l->smooth_since = l->awake;
    if (late > TLY_SEC) {
        l->paused = late;
        l->paused_till = l->now;
    }
    for (struct tly_hook *h = loop_walk(l, true); h; h = loop_walk(l, false))
        if (h->tick)
            h->tick(h);
}

void tly_loop_turn(struct tly_loop *l, int max_ms)
{
    struct epoll_event events[64];
    const int room = sizeof events / sizeof *events;

    tly_loop_lock(l);
    l->now = tly_now();
    int64_t due = loop_prepare(l);
    int64_t now = tly_now();
    int64_t wait = l->last_tick + TLY_TICK_MS * TLY_MS - now;
    if (due - now < wait)
        wait = due - now;
    if (max_ms >= 0 && max_ms * TLY_MS < wait)
        wait = max_ms * TLY_MS;
    if (wait < 0 || l->stop)
        wait = 0;
    uint64_t removals = l->removals;
    tly_loop_unlock(l);

    struct timespec t = {.tv_sec = wait / TLY_SEC, .tv_nsec = wait % TLY_SEC};
    int n = epoll_pwait2(l->epoll_fd, events, room, &t, NULL);
    if (n < 0 &&
        (errno == ENOSYS || errno == EPERM)) /* before Linux 5.11, or a container's filter older than that */
        n = epoll_wait(l->epoll_fd, events, room, (int)((wait + TLY_MS - 1) / TLY_MS));

    tly_loop_lock(l);
    l->now = tly_now();
    /* While we waited for the lock its holder may have removed, even freed, a watch of this batch: forget the batch,
     * what is still ready is reported again. */
    if (l->removals != removals)
        n = 0;
    l->batch = events;
    for (l->batch_left = n; l->batch_left > 0;) {
        struct epoll_event e = *l->batch++;
        l->batch_left--;
        struct tly_watch *w = e.data.ptr;
        if (w)
            w->ready(w, e.events);
    }
    loop_tick(l);
    tly_loop_unlock(l);
}

int64_t tly_loop_pause(const struct tly_loop *l)
{
    return l->paused && l->now - l->paused_till < 10 * TLY_SEC ? l->paused : 0;
}

void tly_loop_run(struct tly_loop *l)
{
    for (;;) {
        tly_loop_lock(l);
        bool stop = l->stop;
        tly_loop_unlock(l);
        if (stop)
            return;
        tly_loop_turn(l, -1);
    }
}

void tly_loop_stop(struct tly_loop *l)
{
    tly_loop_lock(l);
    l->stop = true;
    tly_loop_unlock(l);
    tly_loop_wake(l);
}
