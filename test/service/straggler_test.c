/* straggler_test.c - a rank that keeps the others waiting is named by rank 0, and why it does: it computes longer, or
 * waits for a processor.  (Who is not to be named is tested beside src/plan/late.c, where no machine's
 * load can disturb it.) */
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

#include "job.h"

#include <cmocka.h>

enum { COUNT = 50000, STEP_MS = 40, LONGER_MS = UNDER_SANITIZER ? 80 : 48, PATIENCE_MS = 120000 };
enum { OTHERS = 3 };

struct board {
    atomic_int stop;
    int slow;
    void (*compute)(bool slow); /* for a step */
};

static void sleep_longer(bool slow)
{
    job_sleep_ms(slow ? LONGER_MS : STEP_MS);
}

static void compute_ms(int ms)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    for (int64_t end = t.tv_sec * 1000000000 + t.tv_nsec + ms * 1000000ll;
         t.tv_sec * 1000000000 + t.tv_nsec < end;)
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
}

/* Whatever else runs on the machine, each of them waits by the same factor for it. */
static void compute_longer(bool slow)
{
    compute_ms(slow ? 3 * STEP_MS : STEP_MS);
}

static void compute_alike(bool slow)
{
    compute_ms(STEP_MS / 2);
}

/* Steps until all have heard that it is enough. */
static void take_steps(int rank, const struct board *b)
{
    static float x[COUNT];
    tally_comm *c;
    CHECK(tally_comm_open(NULL, &c) == 0);
    do {
        b->compute(rank == b->slow);
        for (size_t i = 0; i < COUNT; i++)
            x[i] = (float)atomic_load(&b->stop);
        tally_op *op;
        CHECK(tally_push_pull(c, "gradient", x, x, COUNT, TALLY_FLOAT32, TALLY_MAX, NULL, &op) == 0);
        CHECK(tally_op_wait(op, -1) == 0);
        tally_op_free(op);
    } while (x[0] == 0);
    CHECK(tally_comm_close(c) == 0);
}

static int train(int rank, void *arg)
{
    take_steps(rank, arg);
    return 0;
}

/* This process, and those that it makes, on one processor: the last that there is, or the first. */
static void stay_on_a_processor(bool last)
{
    cpu_set_t all, one;
    int which = -1;
    CHECK(sched_getaffinity(0, sizeof all, &all) == 0);
    for (int i = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET(i, &all) && (last || which < 0))
            which = i;
    CPU_ZERO(&one);
    CPU_SET(which, &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
}

/* The slow rank has a processor to itself and others that compute all the time. */
static int train_among_others(int rank, void *arg)
{
    const struct board *b = arg;
    pid_t other[OTHERS];
    stay_on_a_processor(rank == b->slow);
    for (int i = 0; i < OTHERS && rank == b->slow; i++)
        if ((other[i] = fork()) == 0)
            for (;;)
                compute_ms(1000);
    take_steps(rank, b);
    for (int i = 0; i < OTHERS && rank == b->slow; i++) {
        kill(other[i], SIGKILL);
        waitpid(other[i], NULL, 0);
    }
    return 0;
}

static void must_be_named(struct job *j, const struct board *what, const char *why)
{
    struct board *b = job_shared(sizeof *b);
    char sentence[64];
    *b = *what;
    j->arg = b;
    snprintf(sentence, sizeof sentence, "the job is held up by rank %d (", b->slow);
    job_start(j);
    for (int waited = 0; !strstr(job_log(j, 0), sentence) && waited < PATIENCE_MS; waited += 100)
        job_sleep_ms(100);
    atomic_store(&b->stop, 1);
    job_finish(j);
    job_log_holds(j, 0, sentence);
    job_log_holds(j, 0, why);
    job_clear(j);
}

static void test_between_two_ranks(void **state)
{
    for (int slow = 0; slow < 2; slow++)
        must_be_named(&(struct job){.ranks = 2, .main = train},
                      &(struct board){.slow = slow, .compute = sleep_longer},
                      "), which computes longer than the others since ");
}

static void test_seen_by_a_tallyd_too(void **state)
{
    must_be_named(&(struct job){.ranks = 3, .tallyds = 1, .main = train},
                  &(struct board){.slow = 2, .compute = sleep_longer},
                  "), which computes longer than the others since ");
}

static void test_it_computes_on_a_busy_machine(void **state)
{
    must_be_named(&(struct job){.ranks = 2, .main = train},
                  &(struct board){.slow = 1, .compute = compute_longer},
                  "), which computes longer than the others since ");
}

static void test_it_waits_for_a_processor(void **state)
{
    cpu_set_t all;
    if (sched_getaffinity(0, sizeof all, &all) != 0 || CPU_COUNT(&all) < 2)
        skip();
    must_be_named(&(struct job){.ranks = 2, .main = train_among_others},
                  &(struct board){.slow = 1, .compute = compute_alike},
                  "), which waits for a processor longer than the others since ");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_between_two_ranks),
        cmocka_unit_test(test_seen_by_a_tallyd_too),
        cmocka_unit_test(test_it_computes_on_a_busy_machine),
        cmocka_unit_test(test_it_waits_for_a_processor),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
