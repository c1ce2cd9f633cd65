/* shm_test.c - jobs whose ranks reach the service of their machine in memory: the same sums, whatever way each takes;
 * memory that goes away under an operation; a rank that is killed or stopped; no descriptors left. */
#include <errno.h>
#include <glob.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>

#include "base/param.h"
#include "job.h"

#include <cmocka.h>

/* A sanitizer looks at each element that the ranks write and check. */
enum { COUNT = UNDER_SANITIZER ? 140000 : 400000, ROUNDS = UNDER_SANITIZER ? 4 : 6 };

struct board {
    atomic_int stage;
};

static tally_comm *join(const char *setting)
{
    const char *settings[] = {setting ? setting : "TALLY_SHM=1", "TALLY_LOCAL=off", NULL};
    struct tly_params p;
    char why[300];
    tally_comm *c;
    /* Ranks that sum among themselves would need no service; but not every build can. */
    if (tly_params_load(&p, settings, why, sizeof why) == 0)
        tly_params_finish(&p);
    else
        settings[1] = NULL;
    CHECK(tally_comm_open(settings, &c) == 0);
    return c;
}

/* Sums of numbers that no order of adding rounds; both in place and out of it. */
static void sum_well(tally_comm *c, size_t count, int round)
{
    float *x = malloc(count * sizeof *x), *y = round % 2 ? x : malloc(count * sizeof *y);
    int n = tally_comm_size(c), rank = tally_comm_rank(c);
    tally_op *op;
    for (size_t i = 0; i < count; i++)
        x[i] = (float)((int)(i % 1000) * (rank + 1) + round);
    CHECK(tally_push_pull(c, "w", x, y, count, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
    CHECK(tally_op_wait(op, -1) == 0);
    tally_op_free(op);
    for (size_t i = 0; i < count; i++)
        CHECK(y[i] == (float)((int)(i % 1000) * n * (n + 1) / 2 + n * round));
    for (size_t i = 0; x != y && i < count; i++)
        CHECK(x[i] == (float)((int)(i % 1000) * (rank + 1) + round));
    if (y != x)
        free(y);
    free(x);
}

static int mixed(int rank, void *arg)
{
    static const size_t counts[] = {1, 2047, 2048, 2049, 65536, 131073, COUNT, 3 * COUNT};
    tally_comm *c = join(rank == 3 ? "TALLY_SHM=0" : NULL);
    for (int round = 0; round < ROUNDS; round++)
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
            sum_well(c, counts[i], round);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

/* In one process, in another one, over TCP by choice, and over TCP to other machines. */
static void test_every_way(void **state)
{
    static const int machine[] = {0, 0, 1, 1};
    static const char *const settings[][2] = {{"TALLY_PART_BYTES=64K", "TALLY_SUM_THREADS=0"},
                                              {"TALLY_PART_BYTES=1M", "TALLY_SUM_THREADS=2"}};
    for (int i = 0; i < 2; i++) {
        struct job j = {.ranks = 4,
                        .tallyds = 1,
                        .machine = machine,
                        .main = mixed,
                        .settings = {settings[i][0], settings[i][1]}};
        job_start(&j);
        job_finish(&j);
        job_log_holds(&j, 0, "memory to 1 service, tcp to 2");
        job_clear(&j);
    }
}

/* An error ends an operation at once, and its buffers are gone the moment after. */
static int disagree(int rank, void *arg)
{
    tally_comm *c = join(NULL);
    for (int round = 0; round < ROUNDS; round++) {
        tally_op *op;
        float *x = calloc(COUNT, sizeof *x);
        enum tally_dtype dtype = rank == round % 3 ? TALLY_INT32 : TALLY_FLOAT32;
        CHECK(tally_push_pull(c, "w", x, x, COUNT, dtype, TALLY_SUM, NULL, &op) == 0);
        CHECK(tally_op_wait(op, -1) == -EINVAL);
        CHECK_HOLDS(tally_error(), "int32");
        tally_op_free(op);
        memset(x, 0xff, COUNT * sizeof *x);
        free(x);
        sum_well(c, COUNT, round);
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_memory_goes_away(void **state)
{
    static const int machine[] = {0, 0, 1};
    struct job j = {.ranks = 3, .machine = machine, .main = disagree};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

static int until_failure(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = join(NULL);
    for (int err = 0; !err;) {
        enum { MANY = 4 };
        tally_op *op[MANY];
        float *x[MANY];
        int started = 0;
        for (; started < MANY && !err; started++) {
            char name[16];
            snprintf(name, sizeof name, "w%d", started);
            x[started] = calloc(COUNT, sizeof **x);
            err = tally_push_pull(c, name, x[started], x[started], COUNT, TALLY_FLOAT32, TALLY_SUM, NULL,
                                  &op[started]);
            if (err) {
                free(x[started]);
                break;
            }
        }
        for (int i = 0; i < started; i++) {
            int ended = tally_op_wait(op[i], -1);
            err = err ? err : ended;
            tally_op_free(op[i]);
            memset(x[i], 0xff, COUNT * sizeof **x);
            free(x[i]);
        }
        if (err) {
            CHECK(err == -ECONNRESET);
            CHECK_HOLDS(tally_error(), "rank 1 on");
        }
        atomic_fetch_add(&b->stage, 1);
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_killed(void **state)
{
    static const int machine[] = {0, 0, 0};
    for (int i = 0; i < 3; i++) {
        struct board *b = job_shared(sizeof *b);
        struct job j = {.ranks = 3, .machine = machine, .main = until_failure, .arg = b};
        job_start(&j);
        job_await(&b->stage, 10 + 7 * i);
        kill(j.rank_pid[1], SIGKILL);
        for (int r = 0; r < 3; r++)
            assert_int_equal(job_wait_rank(&j, r), r == 1 ? 128 + SIGKILL : 0);
        job_clear(&j);
    }
    glob_t left;
    assert_int_equal(glob("/dev/shm/*tally*", 0, NULL, &left), GLOB_NOMATCH);
}

static int steadily(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = join(NULL);
    for (int round = 0; round < 60; round++) {
        sum_well(c, COUNT, round);
        atomic_fetch_add(&b->stage, 1);
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_stopped_for_a_while(void **state)
{
    static const int machine[] = {0, 0};
    struct board *b = job_shared(sizeof *b);
    struct job j = {.ranks = 2, .machine = machine, .main = steadily, .arg = b};
    job_start(&j);
    for (int i = 0; i < 2; i++) {
        job_await(&b->stage, 10 + 40 * i);
        kill(j.rank_pid[i], SIGSTOP);
        job_sleep_ms(500);
        kill(j.rank_pid[i], SIGCONT);
    }
    job_finish(&j);
    job_clear(&j);
}

/* Without a descriptor for the segment payloads go through the socket. */
static int poorly(int rank, void *arg)
{
    tally_comm *c = join(NULL);
    if (rank == 1) {
        struct rlimit files;
        int next = dup(0);
        CHECK(getrlimit(RLIMIT_NOFILE, &files) == 0);
        files.rlim_cur = (rlim_t)next;
        close(next);
        CHECK(setrlimit(RLIMIT_NOFILE, &files) == 0);
    }
    for (int round = 0; round < ROUNDS; round++)
        sum_well(c, COUNT, round);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_no_descriptors(void **state)
{
    static const int machine[] = {0, 0};
    struct job j = {.ranks = 2, .machine = machine, .main = poorly};
    job_start(&j);
    job_finish(&j);
    job_log_holds(&j, 1, "the limit of open files: payloads go through a socket");
    job_clear(&j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_way),      cmocka_unit_test(test_memory_goes_away),
        cmocka_unit_test(test_killed),         cmocka_unit_test(test_stopped_for_a_while),
        cmocka_unit_test(test_no_descriptors),
    };
    return cmocka_run_group_tests_name("shm", tests, NULL, NULL);
}
