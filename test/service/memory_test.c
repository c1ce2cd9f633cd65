/* memory_test.c - out of memory for a few bytes, anywhere on the way of an operation through a rank and a service: the
 * job ends with an error that says so on all ranks, or goes on; nobody crashes, nobody hangs, no sum is wrong.
 *
 * malloc() and its kin of this program stand in front of libc's: in one rank, of one allocation after the other, the
 * n-th fails once the job runs.  The other rank must be told. */
#include <errno.h>
#include <setjmp.h>
#include <string.h>

#include "job.h"

#include <cmocka.h>

enum { COUNT = 30000, ATTEMPTS = UNDER_SANITIZER ? 0 : 80, OPS = 6 };

static atomic_int countdown; /* 0: all is well; n: the n-th allocation from now on fails */
static atomic_int failures;

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *old, size_t size);

static bool fails(void)
{
    int left = atomic_load(&countdown);
    while (left > 0 && !atomic_compare_exchange_weak(&countdown, &left, left - 1))
        ;
    if (left != 1)
        return false;
    atomic_fetch_add(&failures, 1);
    errno = ENOMEM;
    return true;
}

void *malloc(size_t size)
{
    return fails() ? NULL : __libc_malloc(size);
}

void *calloc(size_t n, size_t size)
{
    return fails() ? NULL : __libc_calloc(n, size);
}

void *realloc(void *old, size_t size)
{
    return fails() ? NULL : __libc_realloc(old, size);
}
#endif

struct board {
    atomic_int ready, closed; /* ranks that are or have, in all attempts */
    atomic_int failed_jobs, whole_jobs, wrong, injected, unclear;
};

/* All that a rank does in a round of everything; the first error, or 0. */
static int work(tally_comm *c, int rank, struct board *b)
{
    static float x[COUNT], small[4], all[COUNT];
    tally_op *op[OPS] = {0};
    int err[OPS], first = 0;
    for (int i = 0; i < COUNT; i++)
        x[i] = (float)(rank + 1), all[i] = (float)rank;
    for (int i = 0; i < 4; i++)
        small[i] = 1;
    err[0] = tally_push_pull(c, "large", x, x, COUNT, TALLY_FLOAT32, TALLY_SUM, NULL, &op[0]);
    err[1] = tally_push_pull(c, "small", small, small, 4, TALLY_FLOAT32, TALLY_SUM, NULL, &op[1]);
    err[2] = tally_broadcast(c, "all", all, COUNT, TALLY_FLOAT32, 0, NULL, &op[2]);
    err[3] = tally_barrier(c, "meet", NULL, &op[3]);
    /* One about which the ranks disagree: a verdict, in words. */
    static double odd[8];
    err[4] = tally_push_pull(c, "odd", odd, odd, 4 + (size_t)rank, TALLY_FLOAT64, TALLY_SUM, NULL, &op[4]);
    if (rank == 0)
        err[5] = tally_push_pull(c, "refused", odd, odd, 4, TALLY_FLOAT64, TALLY_SUM, NULL, &op[5]);
    else
        err[5] = tally_refuse(c, "refused", TALLY_PUSH_PULL, NULL, "this rank cannot");
    for (int i = 0; i < OPS; i++) {
        if (!err[i] && op[i])
            err[i] = tally_op_wait(op[i], -1);
        bool verdict = i >= 4 && err[i] == -EINVAL;
        if (err[i] && !verdict && !first) {
            first = err[i];
            const char *why = tally_error();
            if (!strstr(why, "out of memory") && !strstr(why, "lost the connection") &&
                !strstr(why, "rank ") && !strstr(why, "failed"))
                atomic_fetch_add(&b->unclear, 1);
        }
    }
    int wrong = 0;
    for (int i = 0; i < COUNT; i++)
        wrong += (!err[0] && x[i] != 3) + (!err[2] && all[i] != 0);
    wrong += !err[1] && small[3] != 2;
    atomic_fetch_add(&b->wrong, wrong);
    for (int i = 0; i < OPS; i++)
        tally_op_free(op[i]);
    return first;
}

static int attempts(int rank, void *arg)
{
    struct board *b = arg;
    for (int attempt = 1; attempt <= ATTEMPTS; attempt++) {
        tally_comm *c;
        CHECK(tally_comm_open(NULL, &c) == 0);
        CHECK(work(c, rank, b) == 0);
        atomic_fetch_add(&b->ready, 1);
        job_await(&b->ready, 2 * attempt); /* what fails from here on ends nothing that began before */
        if (rank == attempt % 2)
            atomic_store(&countdown, 1 + attempt * 3 / 2);
        int err = 0;
        for (int round = 0; round < 3 && !err; round++)
            err = work(c, rank, b);
        if (atomic_exchange(&countdown, 0) == 0)
            atomic_fetch_add(&b->injected, atomic_exchange(&failures, 0));
        atomic_fetch_add(err ? &b->failed_jobs : &b->whole_jobs, 1);
        CHECK(tally_comm_close(c) == 0);
        atomic_fetch_add(&b->closed, 1);
        job_await(&b->closed, 2 * attempt);
    }
    return 0;
}

static void test_each_allocation(void **state)
{
    struct board *b = job_shared(sizeof *b);
    struct job j = {.ranks = 2,
                    .main = attempts,
                    .arg = b,
                    .settings = {"TALLY_PART_BYTES=16K", "TALLY_LOG=off", "TALLY_SUM_THREADS=0"}};
    if (ATTEMPTS == 0)
        skip();
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
    print_message("# %d allocations failed, %d of %d ended their job\n", b->injected, b->failed_jobs / 2,
                  ATTEMPTS);
    assert_int_equal(b->wrong, 0);
    assert_int_equal(b->unclear, 0);
    assert_true(b->injected > ATTEMPTS / 2);
    assert_true(b->failed_jobs > 0);
    assert_int_equal(b->failed_jobs + b->whole_jobs, 2 * ATTEMPTS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_each_allocation)};
    return cmocka_run_group_tests_name("memory", tests, NULL, NULL);
}
