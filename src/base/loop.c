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

enum { MOST_ROUNDS = 4, MOST_POSTED = 64 }; /* of posted watches in one turn, and watches in a round */

static void loop_drain_wake(struct tly_watch *w, uint32_t events)
{
    uint64_t n;
    while (read(w->fd, &n, sizeof n) < 0 && errno == EINTR)
        ;
}

int tly_loop_init(struct tly_loop *l)
{
    memset(l, 0, sizeof *l);
    l->host = l;
    tly_list_init(&l->hooks);
    tly_list_init(&l->watches);
    tly_list_init(&l->posted);
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
    if (tly_loop_lodges(l)) {
        tly_loop_lock(l);
        tly_loop_remove(l, &l->wake);
        l->host->guest = NULL;
        tly_loop_unlock(l);
    }
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

static int loop_control(int epoll_fd, int what, struct tly_watch *w)
{
    struct epoll_event e = {.events = w->events, .data.ptr = w};
    return epoll_ctl(epoll_fd, what, w->fd, &e) < 0 ? -errno : 0;
}

int tly_loop_add(struct tly_loop *l, struct tly_watch *w, uint32_t events)
{
    w->events = events;
    tly_list_init(&w->posted);
    int err = loop_control(l->host->epoll_fd, EPOLL_CTL_ADD, w);
    if (err)
        return tly_fail(-err, "cannot watch a descriptor: %s", strerror(-err));
    tly_list_append(&l->watches, &w->node);
    return 0;
}

int tly_loop_change(struct tly_loop *l, struct tly_watch *w, uint32_t events)
{
    w->events = events;
    return loop_control(l->host->epoll_fd, EPOLL_CTL_MOD, w);
}

void tly_loop_remove(struct tly_loop *l, struct tly_watch *w)
{
    struct tly_loop *host = l->host;
    if (!w->node.next)
        return;
    loop_control(host->epoll_fd, EPOLL_CTL_DEL, w);
    tly_list_remove(&w->node);
    tly_list_remove(&w->posted);
    host->removals++;
    for (int i = 0; i < host->batch_left; i++)
        if (host->batch[i].data.ptr == w)
            host->batch[i].data.ptr = NULL;
}

void tly_loop_post(struct tly_loop *l, struct tly_watch *w)
{
    tly_list_remove(&w->posted);
    tly_list_append(&l->host->posted, &w->posted);
    if (l->host->sleeps)
        tly_loop_wake(l->host);
}

struct tly_watch *tly_loop_find(const struct tly_loop *l, bool (*is)(struct tly_watch *w, const void *arg),
                                const void *arg)
{
    for (l = l->host; l; l = l->guest)
        for (struct tly_list *n = l->watches.next; n != &l->watches; n = n->next) {
            struct tly_watch *w = tly_list_entry(n, struct tly_watch, node);
            if (is(w, arg))
                return w;
        }
    return NULL;
}

static int loop_control_all(const struct tly_loop *l, int epoll_fd, int what)
{
    int err = 0;
    for (struct tly_list *n = l->watches.next; n != &l->watches && !err; n = n->next)
        err = loop_control(epoll_fd, what, tly_list_entry(n, struct tly_watch, node));
    return err;
}

int tly_loop_lodge(struct tly_loop *guest, struct tly_loop *host)
{
    int err = loop_control_all(guest, host->epoll_fd, EPOLL_CTL_ADD);
    loop_control_all(guest, err ? host->epoll_fd : guest->epoll_fd, EPOLL_CTL_DEL);
    if (err)
        return tly_fail(-err, "cannot watch a descriptor: %s", strerror(-err));
    guest->last_tick = host->last_tick; /* they tick in the same turns */
    guest->host = host;
    host->guest = guest;
    return 0;
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
    int64_t guests = l->guest ? loop_prepare(l->guest) : INT64_MAX;
    return guests < due ? guests : due;
}

/* False: no watch was posted. */
static bool loop_handle_posted(struct tly_loop *l)
{
    int i = 0;
    for (; i < MOST_POSTED && !tly_list_empty(&l->posted); i++) {
        struct tly_watch *w = tly_list_entry(tly_list_take(&l->posted), struct tly_watch, posted);
        w->ready(w, EPOLLIN);
    }
    return i > 0;
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
    if (l->guest)
        loop_tick(l->guest);
}

static void loop_look_at_clock(struct tly_loop *l)
{
    l->now = tly_now();
    if (l->guest)
        l->guest->now = l->now;
}

void tly_loop_turn(struct tly_loop *l, int max_ms)
{
    struct epoll_event events[64];
    const int room = sizeof events / sizeof *events;

    tly_loop_lock(l);
    loop_look_at_clock(l);
    int64_t due = loop_prepare(l);
    for (int i = 0; i < MOST_ROUNDS && loop_handle_posted(l); i++)
        due = loop_prepare(l);
    int64_t now = tly_now();
    int64_t wait = l->last_tick + TLY_TICK_MS * TLY_MS - now;
    if (due - now < wait)
        wait = due - now;
    if (max_ms >= 0 && max_ms * TLY_MS < wait)
        wait = max_ms * TLY_MS;
    if (wait < 0 || l->stop || !tly_list_empty(&l->posted))
        wait = 0;
    uint64_t removals = l->removals;
    l->sleeps = true;
    tly_loop_unlock(l);

    struct timespec t = tly_clock_time(wait);
    int n = epoll_pwait2(l->epoll_fd, events, room, &t, NULL);
    if (n < 0 &&
        (errno == ENOSYS || errno == EPERM)) /* before Linux 5.11, or a container's filter older than that */
        n = epoll_wait(l->epoll_fd, events, room, (int)((wait + TLY_MS - 1) / TLY_MS));

    tly_loop_lock(l);
    l->sleeps = false;
    loop_look_at_clock(l);
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
