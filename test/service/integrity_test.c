/* integrity_test.c - bits that flip on their way, where TCP's own checksum does not see it.  With TALLY_CHECKSUM no
 * rank ever gets a wrong sum; without it they do, which shows that the flip is one.
 *
 * The flip is made in readv(), which stands in front of libc's in this program: all that the ranks and the services in
 * them receive passes through it. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#include "job.h"

#include <cmocka.h>

enum { COUNT = 100000, ROUNDS = 12, LARGE = 8192 /* nothing but a payload is received at once by so much */ };

static atomic_int flips_left; /* in this process */
static atomic_uint flip_seed;
static atomic_bool flip_behind; /* what follows a payload: its checksum, or the next header */

ssize_t readv(int fd, const struct iovec *iov, int count)
{
    ssize_t n = syscall(SYS_readv, fd, iov, count);
    int before = atomic_load(&flips_left);
    bool behind = atomic_load(&flip_behind);
    if (n < LARGE || iov[0].iov_len < LARGE || before == 0 ||
        (behind && (count < 2 || (size_t)n <= iov[0].iov_len)) ||
        !atomic_compare_exchange_strong(&flips_left, &before, before - 1))
        return n;
    unsigned at = atomic_load(&flip_seed) * 2654435761u;
    uint8_t *where = behind ? iov[1].iov_base : iov[0].iov_base;
    size_t length = behind ? (size_t)n - iov[0].iov_len : LARGE;
    where[at % length] ^= (uint8_t)(1u << (at >> 29));
    return n;
}

struct board {
    atomic_int wrong, failed;
    int victim; /* the rank that receives a flipped bit */
    unsigned seed;
    bool behind;
};

static int rounds(int rank, void *arg)
{
    struct board *b = arg;
    static int32_t x[COUNT];
    tally_comm *c;
    CHECK(tally_comm_open(NULL, &c) == 0);
    for (int round = 0; round < ROUNDS; round++) {
        tally_op *op;
        int32_t wrong = 0;
        if (round == 3 && rank == b->victim) {
            atomic_store(&flip_seed, b->seed);
            atomic_store(&flip_behind, b->behind);
            atomic_store(&flips_left, 1);
        }
        for (int i = 0; i < COUNT; i++)
            x[i] = i * (rank + 1) + round;
        int err = tally_push_pull(c, "x", x, x, COUNT, TALLY_INT32, TALLY_SUM, NULL, &op);
        if (!err) {
            err = tally_op_wait(op, -1);
            tally_op_free(op);
        }
        if (err) {
            CHECK_HOLDS(tally_error(), "lost the connection to "); /* and whose */
            atomic_fetch_add(&b->failed, 1);
            break;
        }
        for (int i = 0; i < COUNT; i++)
            wrong += x[i] != i * 3 + 2 * round;
        atomic_fetch_add(&b->wrong, wrong);
    }
    CHECK(rank != b->victim || atomic_load(&flips_left) == 0);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void flip(struct board *b, bool checksum)
{
    struct job j = {.ranks = 2,
                    .tallyds = 1,
                    .main = rounds,
                    .arg = b,
                    .settings = {checksum ? "TALLY_CHECKSUM=1" : "TALLY_CHECKSUM=0", "TALLY_PART_BYTES=64K"}};
    job_start(&j);
    assert_int_equal(job_wait_rank(&j, 0), 0);
    assert_int_equal(job_wait_rank(&j, 1), 0);
    if (checksum)
        job_log_holds(&j, b->victim,
                      b->behind ? "closing the connection" : "a payload was altered on its way");
    job_clear(&j);
}

static void test_without_checksums(void **state)
{
    struct board *b = job_shared(sizeof *b);
    b->victim = 1;
    flip(b, false);
    assert_true(b->wrong > 0);
    assert_int_equal(b->failed, 0);
}

static void test_with_checksums(void **state)
{
    for (unsigned seed = 1; seed <= (UNDER_SANITIZER ? 4 : 12); seed++) {
        struct board *b = job_shared(sizeof *b);
        b->victim = seed % 2;
        b->behind = seed % 4 > 1;
        b->seed = seed;
        flip(b, true);
        assert_int_equal(b->wrong, 0);
        assert_int_equal(b->failed, 0); /* the connection was mended, and what was altered came again */
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_without_checksums),
        cmocka_unit_test(test_with_checksums),
    };
    return cmocka_run_group_tests_name("integrity", tests, NULL, NULL);
}
