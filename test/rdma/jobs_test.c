/* jobs_test.c - whole jobs over RDMA, two ranks and a tallyd on the fake card: payloads go that way where they can, else by
 * TCP, with a reason; and what breaks in the middle costs a connection, not a result. */
#include <setjmp.h>
#include <string.h>

#include "test/service/job.h"

#include <cmocka.h>

enum { COUNT = 600000, ROUNDS = 12 };

/* Sums of whole numbers, which no order of adding rounds, of lengths that need a message, a place and several. */
static int sum_well(int rank, void *arg)
{
    static const size_t lengths[] = {10, 900, 3000, COUNT};
    static float x[COUNT];
    tally_comm *c = job_open();
    for (int round = 0; round < ROUNDS; round++) {
        size_t count = lengths[round % 4];
        char name[16];
        tally_op *op;
        snprintf(name, sizeof name, "w%zu", count);
        for (size_t i = 0; i < count; i++)
            x[i] = (float)((int)(i % 1000) * (rank + 1) + round);
        CHECK(tally_push_pull(c, name, x, x, count, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
        job_expect(op, 0);
        for (size_t i = 0; i < count; i++)
            CHECK(x[i] == (float)((int)(i % 1000) * 3 + 2 * round));
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

/* With a card that does as these words say. */
static void run(struct job *j, const char *words)
{
    *j = (struct job){.ranks = 2, .tallyds = 1, .main = sum_well, .settings = {"TALLY_SPLIT=server"}};
    setenv("FAKE_VERBS", words, 1);
    job_start(j);
    job_finish(j);
}

static void test_by_rdma(void **state)
{
    struct job j;
    run(&j, "");
    job_log_holds(&j, 0, "rdma to 2;");
    job_log_lacks(&j, 0, "tcp to");
    job_log_lacks(&j, JOB_MOST_RANKS, "no RDMA");
    job_clear(&j);
}

static void test_turned_off(void **state)
{
    struct job j = {
        .ranks = 2, .tallyds = 1, .main = sum_well, .settings = {"TALLY_SPLIT=server", "TALLY_RDMA=0"}};
    setenv("FAKE_VERBS", "", 1);
    job_run(&j);
}

/* Connections get a quarter of the memory, which is too little for one. */
static void test_little_memory(void **state)
{
    struct job j = {
        .ranks = 2, .tallyds = 1, .main = sum_well, .settings = {"TALLY_SPLIT=server", "TALLY_MEMORY=16M"}};
    setenv("FAKE_VERBS", "", 1);
    job_start(&j);
    job_finish(&j);
    job_log_holds(&j, 0, "tcp to 2;");
    job_log_holds(&j, JOB_MOST_RANKS, "no memory to spare for a connection by rdma");
    job_clear(&j);
}

static void test_without_what_it_needs(void **state)
{
    struct job j;
    run(&j, "devices=0");
    job_log_holds(&j, 0, "tcp to 2;");
    job_log_lacks(&j, 0, "RDMA");
    job_clear(&j);
    run(&j, "down");
    job_log_holds(&j, 0, "tcp to 2;");
    job_log_holds(&j, 0, "no RDMA, TCP takes its place: no port of an RDMA device is up and has a GID");
    job_clear(&j);
    run(&j, "memlock=65536");
    job_log_holds(&j, 0, "tcp to 2;");
    job_log_holds(&j, 0, "(raise the limit of locked memory: ulimit -l, LimitMEMLOCK=)");
    job_clear(&j);
    run(&j, "fail=ibv_modify_qp:EINVAL:1:100");
    job_log_holds(&j, 0, "tcp to 2;");
    job_log_holds(&j, 0, "cannot make a queue pair ready to start: Invalid argument");
    job_clear(&j);
}

/* Each of these breaks connections in the middle of the job. */
static void test_what_breaks(void **state)
{
    static const char *const words[] = {"vanish=30", "fail=post_send:ENOMEM:20", "fail=post_recv:EIO:140",
                                        "fail=poll_cq:EIO:40"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        struct job j;
        run(&j, words[i]);
        if (i == 0)
            job_log_holds(&j, 0, "closing the connection to 127.0.0.1");
        job_clear(&j);
    }
}

static void test_a_slow_card(void **state)
{
    static const char *const words[] = {"seed=1 delay=3000", "seed=2 delay=500 pieces=1000",
                                        "seed=3 delay=20000"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        struct job j;
        run(&j, words[i]);
        job_log_holds(&j, 0, "rdma to 2;");
        job_clear(&j);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_by_rdma),       cmocka_unit_test(test_turned_off),
        cmocka_unit_test(test_little_memory), cmocka_unit_test(test_without_what_it_needs),
        cmocka_unit_test(test_what_breaks),   cmocka_unit_test(test_a_slow_card),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
