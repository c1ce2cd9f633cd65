/* work_test.c - cutting a tensor into parts; waiting for a neighbour that is in the midst of one, and does not go on. */
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

/* While a tensor is too small for two parts each, every rank has one, and none is smaller than 8 KB. */
static void test_cut(void **state)
{
    static const struct {
        uint32_t ranks;
        uint64_t bytes;
        uint32_t parts, part_bytes;
    } cases[] = {
        {2, 4100, 1, 8 << 10},      {2, 16 << 10, 2, 8 << 10},          {2, (16 << 10) + 4, 2, 12 << 10},
        {2, 64 << 10, 4, 16 << 10}, {2, 1 << 20, 4, 256 << 10},         {2, 64 << 20, 256, 256 << 10},
        {4, 16 << 10, 2, 8 << 10},  {4, 64 << 10, 4, 16 << 10},         {4, 1 << 20, 8, 128 << 10},
        {64, 64 << 10, 8, 8 << 10}, {2, 1ull << 50, 1u << 30, 1 << 20},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct tly_local_op op = {.bytes = cases[i].bytes};
        struct tly_round r = {.op = &op};
        static struct tly_local l;
        l.count = cases[i].ranks;
        tly_work_cut(&l, &r);
        assert_int_equal(r.parts, cases[i].parts);
        assert_int_equal(r.part_bytes, cases[i].part_bytes);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nobody_there),
        cmocka_unit_test(test_stopped_there),
        cmocka_unit_test(test_failing_meanwhile),
        cmocka_unit_test(test_cut),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
