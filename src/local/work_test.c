/* work_test.c - cutting a tensor into chunks; which rank gets which range; waiting for a neighbour that is in the midst of one, and does not go on; one
 * whose memory has ended. */
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "local/process.h"
#include "local/work.h"
#include "ops/call.h"
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

static int told[2];

static void *other_thread(void *arg)
{
    pid_t me = (pid_t)syscall(SYS_gettid);
    if (write(told[1], &me, sizeof me) == sizeof me)
        pause();
    return NULL;
}

/* A rank of two threads beside ours, whose main thread may end; the number of its other one. */
static pid_t start_neighbour(struct tly_local *l, bool main_ends)
{
    pid_t other;
    assert_int_equal(pipe(told), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, other_thread, NULL) != 0)
            _exit(1);
        if (main_ends)
            pthread_exit(NULL);
        pause();
    }
    assert_int_equal(read(told[0], &other, sizeof other), sizeof other);
    close(told[0]);
    close(told[1]);
    close(l->at[1].pidfd);
    l->at[1].pid = pid;
    l->at[1].pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    assert_true(l->at[1].pidfd >= 0);
    return other;
}

/* Its main thread is no more than a number to be waited for. */
static void await_end_of_main(pid_t pid)
{
    char path[64], text[256] = "";
    struct timespec moment = {.tv_nsec = 1000000};
    snprintf(path, sizeof path, "/proc/%d/task/%d/stat", pid, pid);
    for (int i = 0; !strstr(text, ") Z"); i++) {
        assert_true(i < 20000);
        FILE *f = fopen(path, "r");
        assert_non_null(f);
        text[fread(text, 1, sizeof text - 1, f)] = '\0';
        fclose(f);
        nanosleep(&moment, NULL);
    }
}

static void end_neighbour(struct tly_local *l)
{
    kill(l->at[1].pid, SIGKILL);
    assert_int_equal(waitpid(l->at[1].pid, NULL, 0), l->at[1].pid);
    separate(l);
}

static void test_main_thread_ended(void **state)
{
    struct tly_local *l = pair(0);
    uint64_t x = 0;
    if (l->at[1].pidfd < 0)
        skip();
    start_neighbour(l, true);
    await_end_of_main(l->at[1].pid);
    assert_false(tly_work_read(l, 1, (uintptr_t)&x, &x, sizeof x));
    assert_non_null(strstr(broken_by, "cannot reach a tensor of rank 5: its main thread has ended"));
    end_neighbour(l);
}

/* Killed, and with so much memory that for seconds its end is not seen otherwise: here its other thread is held up. */
static void test_dying(void **state)
{
    struct tly_local *l = pair(0);
    char path[64], text[1024] = "";
    uint64_t x = 0;
    int status;
    if (l->at[1].pidfd < 0)
        skip();
    pid_t other = start_neighbour(l, false);
    if (ptrace(PTRACE_SEIZE, other, 0, PTRACE_O_TRACEEXIT) != 0) {
        end_neighbour(l);
        skip();
    }
    kill(l->at[1].pid, SIGKILL);
    assert_int_equal(waitpid(other, &status, __WALL), other);
    assert_true(WIFSTOPPED(status));
    await_end_of_main(l->at[1].pid);
    snprintf(path, sizeof path, "/proc/%d/task/%d/stat", l->at[1].pid, other);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    text[fread(text, 1, sizeof text - 1, f)] = '\0';
    fclose(f);
    bool shows = tly_process_life(text) == TLY_DIES; /* from Linux 5.16 on already where it is held up */
    assert_false(tly_work_read(l, 1, (uintptr_t)&x, &x, sizeof x));
    if (shows)
        assert_string_equal(broken_by, "");
    ptrace(PTRACE_DETACH, other, 0, 0);
    end_neighbour(l);
}

/* While a tensor is too small for two chunks each, every rank has one, and none is smaller than 8 KB. */
static void test_cut(void **state)
{
    static const struct {
        uint32_t ranks;
        uint64_t bytes;
        uint32_t chunks, chunk_bytes;
    } cases[] = {
        {2, 4100, 1, 8 << 10},      {2, 16 << 10, 2, 8 << 10},          {2, (16 << 10) + 4, 2, 12 << 10},
        {2, 64 << 10, 4, 16 << 10}, {2, 1 << 20, 4, 256 << 10},         {2, 64 << 20, 256, 256 << 10},
        {4, 16 << 10, 2, 8 << 10},  {4, 64 << 10, 4, 16 << 10},         {4, 1 << 20, 8, 128 << 10},
        {64, 64 << 10, 8, 8 << 10}, {2, 1ull << 50, 1u << 30, 1 << 20},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct tly_local_op op = {.bytes = cases[i].bytes};
        struct tly_local_group all;
        struct tly_local_round r = {.op = &op, .group = &all};
        tly_local_group_make_all(&all, cases[i].ranks, 0);
        tly_pooled_cut(&r);
        assert_int_equal(r.chunks, cases[i].chunks);
        assert_int_equal(r.chunk_bytes, cases[i].chunk_bytes);
    }
}

/* Of 5 elements: all to the root, or 2, 0 and 3 to a rank each, or all to all. */
static void test_ranges(void **state)
{
    static const struct {
        const struct tly_call *call;
        struct tly_local_range range[3];
    } cases[] = {
        {&tly_call_push_pull, {{0, 20}, {0, 20}, {0, 20}}},
        {&tly_call_reduce, {{0, 0}, {0, 20}, {0, 0}}},
        {&tly_call_reduce_scatter, {{0, 8}, {8, 0}, {8, 12}}},
    };
    static const int64_t dims[] = {2, 0, 3};
    static struct tly_local l;
    tly_local_group_make_all(&l.all, 3, 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct tly_local_op op = {
            .call = cases[i].call->local, .dtype = TALLY_FLOAT32, .root = 1, .bytes = 20, .dims = dims};
        struct tly_local_range range[3];
        tly_work_ranges(&l, &op, range);
        for (uint32_t k = 0; k < 3; k++) {
            assert_int_equal(range[k].begin, cases[i].range[k].begin);
            assert_int_equal(range[k].bytes, cases[i].range[k].bytes);
            assert_int_equal(tly_work_output_bytes(&l, &op, k), range[k].bytes);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nobody_there),
        cmocka_unit_test(test_stopped_there),
        cmocka_unit_test(test_failing_meanwhile),
        cmocka_unit_test(test_main_thread_ended),
        cmocka_unit_test(test_dying),
        cmocka_unit_test(test_cut),
        cmocka_unit_test(test_ranges),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
