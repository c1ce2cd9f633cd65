/* thread_test.c - what threads of ours have cost, while they run, once they have ended, and in a forked child. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/thread.h"

#include <cmocka.h>

static atomic_int stop;

static void *spin(void *arg)
{
    while (!atomic_load(&stop))
        tly_pause();
    return NULL;
}

/* Until all of ours have cost more than `before`, ns. */
static uint64_t await_more(uint64_t before)
{
    uint64_t now;
    while ((now = tly_thread_cpu()) <= before)
        tly_pause();
    return now;
}

static void test_what_threads_cost(void **state)
{
    pthread_t thread[2];
    int status;
    assert_int_equal(tly_thread_cpu(), 0); /* the caller is the application's */
    atomic_store(&stop, 0);
    for (int i = 0; i < 2; i++)
        assert_int_equal(tly_thread_start(&thread[i], "tally-test", spin, NULL), 0);
    uint64_t cost = await_more(await_more(0) + 1000000);
    pid_t child = fork();
    if (child == 0)
        _exit(tly_thread_cpu() != 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    atomic_store(&stop, 1);
    for (int i = 0; i < 2; i++)
        pthread_join(thread[i], NULL);
    assert_true(tly_thread_cpu() >= cost);
    cost = tly_thread_cpu();
    assert_int_equal(tly_thread_cpu(), cost); /* nobody runs */
    tly_thread_count_me();
    await_more(cost + 1000000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_what_threads_cost)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
