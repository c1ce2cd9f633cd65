/* stalls_test.c - what the application's threads wait for: a processor that others use, and not Tally's own threads. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/stalls.h"
#include "base/thread.h"

#include <cmocka.h>

static uint64_t cpu_us(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

static void compute(uint64_t us)
{
    for (uint64_t from = cpu_us(CLOCK_THREAD_CPUTIME_ID); cpu_us(CLOCK_THREAD_CPUTIME_ID) - from < us;)
        ;
}

/* All threads of this process and its children share one processor from now on. */
static void share_a_processor(void)
{
    cpu_set_t all, one;
    CPU_ZERO(&one);
    assert_int_equal(sched_getaffinity(0, sizeof all, &all), 0);
    for (int i = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET(i, &all)) {
            CPU_SET(i, &one);
            break;
        }
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
}

static atomic_int stop;

static void *spin(void *arg)
{
    while (!atomic_load_explicit(&stop, memory_order_relaxed))
        ;
    return NULL;
}

/* What a thread of Tally's does is not the application's. */
static void test_a_thread_of_ours_does_not_count(void **state)
{
    struct tly_stalls before = {0}, now = {0};
    pthread_t thread;
    share_a_processor();
    atomic_store(&stop, 0);
    tly_stalls_read(&before);
    assert_int_equal(tly_thread_start(&thread, "tally-test", spin, NULL), 0);
    compute(100000);
    tly_stalls_read(&now);
    uint64_t whole = cpu_us(CLOCK_PROCESS_CPUTIME_ID), mine = cpu_us(CLOCK_THREAD_CPUTIME_ID);
    atomic_store(&stop, 1);
    pthread_join(thread, NULL);
    assert_true(whole > mine + 20000); /* it has run */
    assert_true(now.run_us - before.run_us < 150000);
    assert_true(now.wait_us - before.wait_us > 20000); /* and the application has waited for it */
}

static void *say_number(void *number)
{
    atomic_store((atomic_int *)number, gettid());
    return spin(NULL);
}

/* A forked child has none of its parent's threads, so their numbers may be those of the application's threads there. */
static void test_a_forked_child_has_no_threads_of_ours(void **state)
{
    atomic_int number = 0;
    pthread_t thread;
    int status;
    atomic_store(&stop, 0);
    assert_int_equal(tly_thread_start(&thread, "tally-test", say_number, &number), 0);
    while (!atomic_load(&number))
        tly_pause();
    assert_true(tly_thread_is_ours(number));
    pid_t child = fork();
    if (child == 0)
        _exit(tly_thread_is_ours(number));
    assert_int_equal(waitpid(child, &status, 0), child);
    atomic_store(&stop, 1);
    pthread_join(thread, NULL);
    assert_int_equal(status, 0);
}

static void *compute_and_pause(void *done)
{
    compute(200000);
    atomic_store((atomic_int *)done, 1);
    while (!atomic_load(&stop))
        usleep(1000);
    return NULL;
}

/* It takes its past with it, and neither more nor less of the others' time counts. */
static void test_a_thread_ends(void **state)
{
    static struct tly_stalls before, now; /* of the application's threads */
    atomic_int done = 0;
    pthread_t thread;
    atomic_store(&stop, 0);
    assert_int_equal(pthread_create(&thread, NULL, compute_and_pause, &done), 0);
    while (!atomic_load(&done))
        usleep(1000);
    tly_stalls_read(&now);
    before = now;
    atomic_store(&stop, 1);
    pthread_join(thread, NULL);
    compute(300000);
    tly_stalls_read(&now);
    assert_in_range(now.run_us - before.run_us, 290000, 400000);
}

/* A job that computes nothing else, beside three others. */
static void test_a_busy_processor(void **state)
{
    struct tly_stalls before = {0}, now = {0};
    pid_t others[3];
    share_a_processor();
    for (int i = 0; i < 3; i++)
        if ((others[i] = fork()) == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL); /* if the test dies */
            alarm(60);
            for (;;)
                ;
        }
    tly_stalls_read(&before);
    compute(100000);
    tly_stalls_read(&now);
    for (int i = 0; i < 3; i++) {
        kill(others[i], SIGKILL);
        waitpid(others[i], NULL, 0);
    }
    struct tly_stalled s = tly_stalls_between(&before, &now, 400000);
    assert_in_range(s.waited_us, 200000, 400000);
    assert_true(s.waited_us + s.paged_us <= 400000);
}

static void test_of_a_time(void **state)
{
    const struct tly_stalls none = {0}, half = {.run_us = 1000, .wait_us = 1000},
                            paged = {.faults = 7, .fault_us = 200};
    assert_int_equal(tly_stalls_between(&none, &half, 2000).waited_us, 1000);
    assert_int_equal(tly_stalls_between(&none, &half, 1000).waited_us, 500);  /* threads side by side */
    assert_int_equal(tly_stalls_between(&none, &half, 9000).waited_us, 1000); /* the rest waited for a GPU */
    assert_int_equal(tly_stalls_between(&none, &paged, 90000).paged_us, 1400);
    assert_int_equal(tly_stalls_between(&none, &paged, 900).paged_us, 900);
    assert_int_equal(tly_stalls_between(&paged, &paged, 90000).paged_us, 0);
}

/* Pages from compressed memory take no time that the kernel counts: a later reading must not guess again. */
static void test_pages_that_take_no_time(void **state)
{
    struct tly_stalls s = {0};
    tly_stalls_read(&s);
    assert_int_equal(s.fault_us, 100); /* a guess */
    s.disk_us = 1;
    s.disk_faults = 0;
    s.faults = UINT32_MAX; /* more than this process has, so the next reading has nothing to compare with */
    tly_stalls_weigh(&s, 2);
    assert_int_equal(s.fault_us, 0);
    tly_stalls_read(&s);
    assert_int_equal(s.fault_us, 0);
}

/* The machine's time is counted every 2 s; other processes' is in it. */
static void test_how_long_a_page_takes(void **state)
{
    struct tly_stalls s = {.fault_us = 100, .faults = 10};
    tly_stalls_weigh(&s, 50000);
    assert_int_equal(s.fault_us, 100); /* nothing to compare with */
    s.faults = 20;
    tly_stalls_weigh(&s, 50000);
    s.faults = 110;
    tly_stalls_weigh(&s, 80000);
    assert_int_equal(s.fault_us, 300); /* 30 ms, 100 pages */
    tly_stalls_weigh(&s, 90000);       /* others' alone */
    assert_int_equal(s.fault_us, 300);
    s.faults++;
    tly_stalls_weigh(&s, 990000); /* mostly others' */
    assert_int_equal(s.fault_us, 10000);
    s.faults += 1000;
    tly_stalls_weigh(&s, 990001); /* from compressed memory */
    assert_int_equal(s.fault_us, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_thread_of_ours_does_not_count),
        cmocka_unit_test(test_a_forked_child_has_no_threads_of_ours),
        cmocka_unit_test(test_a_thread_ends),
        cmocka_unit_test(test_a_busy_processor),
        cmocka_unit_test(test_of_a_time),
        cmocka_unit_test(test_how_long_a_page_takes),
        cmocka_unit_test(test_pages_that_take_no_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
