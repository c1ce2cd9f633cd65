/* work_test.c - waiting for a neighbour that is in the midst of a part, and does not go on. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "local/control.h"
#include "tally/tally.h"

#include <cmocka.h>

enum { PART = 3 };

static char broken_by[128];

static void broken(void *user, int err, const char *sentence)
{
    snprintf(broken_by, sizeof broken_by, "%d %s", err, sentence);
}

/* Rank 4 of the job, and beside it rank 5, a live process that works at `at`. */
static struct tly_local *pair(uint32_t at)
{
    static const struct tly_local_user calls = {.broken = broken};
    static const uint32_t numbers[] = {4, 5};
    static struct tly_local l;
    static struct tly_control control[2];
    memset(&l, 0, sizeof l);
    memset(control, 0, sizeof control);
    broken_by[0] = '\0';
    l.count = 2;
    l.calls = &calls;
    l.config.numbers = numbers;
    l.config.stuck_ms = 100;
    l.own = &control[0];
    for (int i = 0; i < 2; i++)
        l.at[i] = (struct tly_neighbour){.control = &control[i],
                                         .pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0)};
    control[1].working = at;
    return &l;
}

static void separate(struct tly_local *l)
{
    for (int i = 0; i < 2; i++)
        if (l->at[i].pidfd >= 0)
            close(l->at[i].pidfd);
}

static void test_nobody_there(void **state)
{
    struct tly_local *l = pair(PART + 1);
    assert_true(tly_work_await_others(l, PART));
    assert_string_equal(broken_by, "");
    separate(l);
}

static void test_stopped_there(void **state)
{
    struct tly_local *l = pair(PART);
    if (l->at[1].pidfd < 0)
        skip();
    assert_false(tly_work_await_others(l, PART));
    assert_non_null(strstr(broken_by, "rank 5 has stopped in the midst of a copy into the memory of rank 4"));
    separate(l);
}

static void test_failing_meanwhile(void **state)
{
    struct tly_local *l = pair(PART);
    atomic_store(&l->failed, true);
    assert_false(tly_work_await_others(l, PART));
    assert_string_equal(broken_by, "");
    separate(l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nobody_there),
        cmocka_unit_test(test_stopped_there),
        cmocka_unit_test(test_failing_meanwhile),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
