/* straggler_test.c - a rank that computes a fifth longer than the other (twice as long under a sanitizer, which is slow at
 * odd moments) is named by rank 0.  (Who is not to be named is tested beside src/plan/late.c, where no machine's load can
 * disturb it.) */
#include <setjmp.h>
#include <string.h>

#include "job.h"

#include <cmocka.h>

enum { COUNT = 50000, STEP_MS = 40, LONGER_MS = UNDER_SANITIZER ? 80 : 48, PATIENCE_MS = 120000 };

struct board {
    atomic_int stop;
    int slow;
};

/* Steps until all have heard that it is enough. */
static int train(int rank, void *arg)
{
    struct board *b = arg;
    static float x[COUNT];
    tally_comm *c;
    CHECK(tally_comm_open(NULL, &c) == 0);
    do {
        job_sleep_ms(rank == b->slow ? LONGER_MS : STEP_MS);
        for (size_t i = 0; i < COUNT; i++)
            x[i] = (float)atomic_load(&b->stop);
        tally_op *op;
        CHECK(tally_push_pull(c, "gradient", x, x, COUNT, TALLY_FLOAT32, TALLY_MAX, NULL, &op) == 0);
        CHECK(tally_op_wait(op, -1) == 0);
        tally_op_free(op);
    } while (x[0] == 0);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void must_be_named(int ranks, int tallyds, int slow)
{
    struct board *b = job_shared(sizeof *b);
    char sentence[64];
    struct job j = {.ranks = ranks, .tallyds = tallyds, .main = train, .arg = b};
    b->slow = slow;
    snprintf(sentence, sizeof sentence, "the job is held up by rank %d (", slow);
    job_start(&j);
    for (int waited = 0; !strstr(job_log(&j, 0), sentence) && waited < PATIENCE_MS; waited += 100)
        job_sleep_ms(100);
    atomic_store(&b->stop, 1);
    job_finish(&j);
    job_log_holds(&j, 0, sentence);
    job_log_holds(&j, 0, "), which computes longer than the others since ");
    job_clear(&j);
}

static void test_between_two_ranks(void **state)
{
    must_be_named(2, 0, 1);
    must_be_named(2, 0, 0);
}

static void test_seen_by_a_tallyd_too(void **state)
{
    must_be_named(3, 1, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_between_two_ranks),
        cmocka_unit_test(test_seen_by_a_tallyd_too),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
