/* loop_test.c - the loop's promises: a removed watch or hook is not called again, not even in the batch being handled;
 * wake-ups and stops from other threads are never lost; and the event that threads wait on. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/event.h"
#include "base/loop.h"

#include <cmocka.h>

static struct tly_loop loop;

struct pair {
    struct tly_watch watch;
    struct pair *other;
    int calls;
};

static void remove_both(struct tly_watch *w, uint32_t events)
{
    struct pair *p = tly_list_entry(w, struct pair, watch);
    p->calls++;
    tly_loop_remove(&loop, &p->watch);
    tly_loop_remove(&loop, &p->other->watch);
}

static void test_removed_in_the_batch(void **state)
{
    assert_int_equal(tly_loop_init(&loop), 0);
    struct pair a = {.watch = {.fd = eventfd(1, 0), .ready = remove_both}},
                b = {.watch = {.fd = eventfd(1, 0), .ready = remove_both}};
    a.other = &b;
    b.other = &a;
    tly_loop_lock(&loop);
    assert_int_equal(tly_loop_add(&loop, &a.watch, EPOLLIN), 0);
    assert_int_equal(tly_loop_add(&loop, &b.watch, EPOLLIN), 0);
    tly_loop_unlock(&loop);
    for (int i = 0; i < 5; i++)
        tly_loop_turn(&loop, 1);
    assert_int_equal(a.calls + b.calls, 1);
    close(a.watch.fd);
    close(b.watch.fd);
    tly_loop_finish(&loop);
}

struct counted {
    struct tly_hook hook;
    struct counted *removes; /* in its prepare */
    int prepared, ticked;
};

static int64_t prepare(struct tly_hook *h)
{
    struct counted *c = tly_list_entry(h, struct counted, hook);
    c->prepared++;
    if (c->removes)
        tly_loop_unhook(&loop, &c->removes->hook);
    return INT64_MAX;
}

static void tick(struct tly_hook *h)
{
    tly_list_entry(h, struct counted, hook)->ticked++;
}

/* A hook may take out itself, the one behind it, the one before it, while they are walked. */
static void test_unhooked_in_the_walk(void **state)
{
    for (int who = 0; who < 3; who++)
        for (int whom = 0; whom < 3; whom++) {
            struct counted c[3] = {{.prepared = 0}};
            assert_int_equal(tly_loop_init(&loop), 0);
            for (int i = 0; i < 3; i++) {
                c[i].hook = (struct tly_hook){.prepare = prepare, .tick = tick};
                tly_loop_hook(&loop, &c[i].hook);
            }
            c[who].removes = &c[whom];
            for (int i = 0; i < 3; i++)
                tly_loop_turn(&loop, 0);
            for (int i = 0; i < 3; i++)
                assert_int_equal(c[i].prepared, i == whom ? (whom <= who) : 3);
            while (!c[whom == 0].ticked)
                tly_loop_turn(&loop, -1);
            assert_int_equal(c[whom].ticked, 0);
            tly_loop_finish(&loop);
        }
}

static struct tly_event event;
static atomic_int asked;

static int64_t answer(struct tly_hook *h)
{
    if (atomic_load(&asked))
        tly_event_set(&event);
    return INT64_MAX;
}

static void *run(void *arg)
{
    tly_loop_run(&loop);
    return NULL;
}

/* Each wake-up runs the prepare step, whatever the loop was doing just then. */
static void test_wake(void **state)
{
    struct tly_hook h = {.prepare = answer};
    pthread_t thread;
    assert_int_equal(tly_loop_init(&loop), 0);
    tly_loop_hook(&loop, &h);
    assert_int_equal(pthread_create(&thread, NULL, run, NULL), 0);
    for (int i = 0; i < 2000; i++) {
        event = (struct tly_event){0};
        atomic_store(&asked, 1);
        tly_loop_wake(&loop);
        assert_true(tly_event_wait(&event, -1));
        assert_true(tly_event_is_set(&event));
        tly_loop_lock(&loop);
        atomic_store(&asked, 0);
        tly_loop_unlock(&loop);
    }
    tly_loop_stop(&loop);
    pthread_join(thread, NULL);
    tly_loop_finish(&loop);
}

static void *wait_for_it(void *e)
{
    return tly_event_wait(e, -1) ? e : NULL;
}

static void test_event(void **state)
{
    struct tly_event e = {0};
    pthread_t thread[4];
    assert_false(tly_event_is_set(&e));
    assert_false(tly_event_wait(&e, tly_now() + TLY_MS));
    assert_false(tly_event_wait(&e, 1)); /* long past */
    assert_false(tly_event_is_set(&e));
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, wait_for_it, &e), 0);
    tly_event_set(&e);
    for (int i = 0; i < 4; i++) {
        void *woken;
        pthread_join(thread[i], &woken);
        assert_ptr_equal(woken, &e);
    }
    assert_true(tly_event_wait(&e, 1));
    tly_event_set(&e);
    assert_true(tly_event_is_set(&e));
}

/* A second thread that holds the lock may remove a watch whose event the loop has fetched already. */
struct doomed {
    struct tly_watch watch;
    atomic_bool called;
};

static void must_not_be_called(struct tly_watch *w, uint32_t events)
{
    tly_list_entry(w, struct doomed, watch)->called = true;
}

static void *one_turn(void *arg)
{
    tly_loop_turn(&loop, 1000);
    return NULL;
}

static void test_removed_while_the_loop_waits_for_the_lock(void **state)
{
    pthread_t thread;
    struct doomed gone = {{.fd = eventfd(0, EFD_CLOEXEC), .ready = must_not_be_called}, false};
    assert_int_equal(tly_loop_init(&loop), 0);
    assert_int_equal(tly_loop_add(&loop, &gone.watch, EPOLLIN), 0);
    assert_int_equal(pthread_create(&thread, NULL, one_turn, NULL), 0);
    usleep(50000); /* asleep by then; if not, the test sees less */
    tly_loop_lock(&loop);
    assert_int_equal(eventfd_write(gone.watch.fd, 1), 0);
    usleep(50000); /* awake, and waiting for us */
    tly_loop_remove(&loop, &gone.watch);
    tly_loop_unlock(&loop);
    pthread_join(thread, NULL);
    assert_false(gone.called);
    close(gone.watch.fd);
    tly_loop_finish(&loop);
}

/* Events, times, ticks and wake-ups of a guest come in its host's turns. */
struct lodger {
    struct tly_watch watch;
    struct tly_hook hook;
    int64_t due;
    int events, prepared, on_time, ticked;
};

static void lodger_on_ready(struct tly_watch *w, uint32_t events)
{
    uint64_t n;
    tly_list_entry(w, struct lodger, watch)->events++;
    assert_int_equal(read(w->fd, &n, sizeof n), sizeof n);
}

static int64_t lodger_prepare(struct tly_hook *h)
{
    struct lodger *p = tly_list_entry(h, struct lodger, hook);
    p->prepared++;
    if (tly_now() < p->due)
        return p->due;
    p->on_time++;
    p->due = INT64_MAX;
    return INT64_MAX;
}

static void lodger_tick(struct tly_hook *h)
{
    tly_list_entry(h, struct lodger, hook)->ticked++;
}

static void expect_service_by_turns(struct tly_loop *guest, struct lodger *p)
{
    *p = (struct lodger){.watch = p->watch, .hook = p->hook, .due = tly_now() + 3 * TLY_MS};
    while (!p->on_time)
        tly_loop_turn(&loop, -1);
    int prepared = p->prepared;
    tly_loop_wake(guest);
    while (p->prepared == prepared)
        tly_loop_turn(&loop, -1);
    assert_int_equal(eventfd_write(p->watch.fd, 1), 0);
    while (!p->events)
        tly_loop_turn(&loop, -1);
    while (!p->ticked)
        tly_loop_turn(&loop, -1);
    assert_true(guest->now == loop.now && guest->last_tick == loop.last_tick);
}

static void test_guest(void **state)
{
    struct tly_loop guest;
    struct lodger before = {.watch = {.fd = eventfd(0, EFD_CLOEXEC), .ready = lodger_on_ready},
                            .hook = {.prepare = lodger_prepare, .tick = lodger_tick}},
                  after = {.watch = {.fd = eventfd(0, EFD_CLOEXEC), .ready = lodger_on_ready},
                           .hook = before.hook};
    assert_int_equal(tly_loop_init(&loop), 0);
    assert_int_equal(tly_loop_init(&guest), 0);
    tly_loop_hook(&guest, &before.hook);
    assert_int_equal(tly_loop_add(&guest, &before.watch, EPOLLIN), 0);
    tly_loop_remove(&guest, &after.watch); /* it is not there */
    assert_int_equal(tly_loop_lodge(&guest, &loop), 0);
    assert_true(tly_loop_lodges(&guest) && !tly_loop_lodges(&loop));
    tly_loop_hook(&guest, &after.hook);
    assert_int_equal(tly_loop_add(&guest, &after.watch, EPOLLIN), 0);
    expect_service_by_turns(&guest, &before);
    expect_service_by_turns(&guest, &after);
    tly_loop_remove(&guest, &before.watch);
    tly_loop_unhook(&guest, &before.hook);
    assert_int_equal(eventfd_write(before.watch.fd, 1), 0);
    tly_loop_remove(&guest, &after.watch);
    tly_loop_unhook(&guest, &after.hook);
    before.prepared = after.prepared = 0;
    tly_loop_wake(&guest);
    tly_loop_finish(&guest);
    tly_loop_turn(&loop, 1);
    assert_true(before.events == 1 && before.prepared == 0 && after.prepared == 0);
    close(before.watch.fd);
    close(after.watch.fd);
    tly_loop_finish(&loop);
}

struct posted {
    struct tly_watch watch;
    struct posted *posts, *removes; /* in its call */
    int calls;
};

static void posted_on_ready(struct tly_watch *w, uint32_t events)
{
    struct posted *p = tly_list_entry(w, struct posted, watch);
    p->calls++;
    assert_int_equal(events, EPOLLIN);
    if (p->posts)
        tly_loop_post(&loop, &p->posts->watch);
    if (p->removes)
        tly_loop_remove(&loop, &p->removes->watch);
}

/* A posted watch is called once, without bytes in its descriptor, and not if it is removed before.  Watches that post each
 * other for ever leave the loop time for all others. */
static void test_posted(void **state)
{
    struct posted p[3] = {{.calls = 0}}, read = {.calls = 0};
    assert_int_equal(tly_loop_init(&loop), 0);
    for (int i = 0; i < 3; i++) {
        p[i].watch = (struct tly_watch){.fd = eventfd(0, EFD_CLOEXEC), .ready = posted_on_ready};
        assert_int_equal(tly_loop_add(&loop, &p[i].watch, EPOLLIN), 0);
    }
    p[0].removes = &p[1];
    for (int i = 0; i < 2; i++) {
        tly_loop_post(&loop, &p[i].watch);
        tly_loop_post(&loop, &p[i].watch);
    }
    tly_loop_turn(&loop, 0);
    tly_loop_turn(&loop, 0);
    assert_true(p[0].calls == 1 && p[1].calls == 0 && p[2].calls == 0);
    p[0].removes = NULL;
    p[0].posts = &p[2];
    p[2].posts = &p[0];
    read.watch = (struct tly_watch){.fd = eventfd(1, EFD_CLOEXEC), .ready = posted_on_ready};
    assert_int_equal(tly_loop_add(&loop, &read.watch, EPOLLIN), 0);
    tly_loop_post(&loop, &p[0].watch);
    for (int i = 0; i < 3; i++)
        tly_loop_turn(&loop, -1);
    assert_true(read.calls == 3 && p[0].calls > 3);
    for (int i = 0; i < 3; i++)
        close(p[i].watch.fd);
    close(read.watch.fd);
    tly_loop_finish(&loop);
}

static void posted_set_event(struct tly_watch *w, uint32_t events)
{
    tly_event_set(&event);
}

/* Another thread's post wakes a loop that sleeps.  A tick would do the same 200 ms later, 2000 times. */
static void test_posted_from_another_thread(void **state)
{
    struct tly_watch w = {.fd = eventfd(0, EFD_CLOEXEC), .ready = posted_set_event};
    pthread_t thread;
    assert_int_equal(tly_loop_init(&loop), 0);
    assert_int_equal(tly_loop_add(&loop, &w, EPOLLIN), 0);
    assert_int_equal(pthread_create(&thread, NULL, run, NULL), 0);
    int64_t ticks = 0;
    for (int i = 0; i < 2000; i++) {
        event = (struct tly_event){0};
        tly_loop_lock(&loop);
        int64_t tick = loop.last_tick;
        tly_loop_post(&loop, &w);
        tly_loop_unlock(&loop);
        assert_true(tly_event_wait(&event, -1));
        tly_loop_lock(&loop);
        ticks += loop.last_tick != tick;
        tly_loop_unlock(&loop);
    }
    assert_true(ticks < 1000);
    tly_loop_stop(&loop);
    pthread_join(thread, NULL);
    close(w.fd);
    tly_loop_finish(&loop);
}

static void run_for(int64_t ns)
{
    for (int64_t end = loop.awake + ns; loop.awake < end;)
        tly_loop_turn(&loop, -1);
}

/* A pause is no time that the loop was awake, and is known for a while; and the loop ran without delay since then only. */
static void test_pause(void **state)
{
    assert_int_equal(tly_loop_init(&loop), 0);
    run_for(TLY_SEC);
    assert_true(tly_loop_pause(&loop) == 0 || loop.paused > TLY_SEC);
    int64_t awake = loop.awake;
    usleep(1700000);
    tly_loop_turn(&loop, -1);
    assert_true(loop.awake - awake <= 2 * TLY_TICK_MS * TLY_MS);
    assert_true(loop.smooth_since == loop.awake);
    assert_true(tly_loop_pause(&loop) >= TLY_SEC);
    loop.paused_till -= 10 * TLY_SEC;
    assert_true(tly_loop_pause(&loop) == 0);
    tly_loop_finish(&loop);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_removed_while_the_loop_waits_for_the_lock),
        cmocka_unit_test(test_removed_in_the_batch),
        cmocka_unit_test(test_unhooked_in_the_walk),
        cmocka_unit_test(test_wake),
        cmocka_unit_test(test_event),
        cmocka_unit_test(test_guest),
        cmocka_unit_test(test_posted),
        cmocka_unit_test(test_posted_from_another_thread),
        cmocka_unit_test(test_pause),
    };
    return cmocka_run_group_tests_name("loop", tests, NULL, NULL);
}
