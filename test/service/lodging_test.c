/* lodging_test.c - on a slow card one thread runs a rank's loop and its service's; on a fast one each loop has a thread.  Sums,
 * cancellations, failures and closes do not show it. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/comm.h"
#include "job.h"
#include "sum/internal.h"

#include <cmocka.h>

enum { RANKS = 3, MOST = 1 << 20, TURNS = UNDER_SANITIZER ? 60 : 300 };

#define SLOW "TALLY_BANDWIDTH=500M"

static bool lodges(const tally_comm *c)
{
    const struct tly_house *h = c->service->house;
    CHECK(tly_loop_lodges(h->loop) != h->own_thread);
    CHECK(!c->service->job->mortal); /* no rank asks it what is stable */
    CHECK(h->loop->host == (h->own_thread ? h->loop : &c->loop));
    return !h->own_thread;
}

/* --- which loops share a thread ------------------------------------------------------------------ */

static int all_lodge(int rank, void *arg)
{
    const bool *expected = arg;
    tally_comm *c = job_open();
    if (tally_comm_local_rank(c) == 0)
        CHECK(lodges(c) == *expected);
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_card_decides(void **state)
{
    static const int one[] = {0, 0};
    static bool yes = true, no = false;
    struct job jobs[] = {
        {.settings = {SLOW}, .arg = &yes},
        {.settings = {"TALLY_BANDWIDTH=2500M"}, .arg = &yes},
        {.settings = {"TALLY_BANDWIDTH=2600M"}, .arg = &no},
        {.settings = {SLOW, "TALLY_LOCAL=off"}, .machine = one, .arg = &no},
    };
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++) {
        jobs[i].ranks = 2;
        jobs[i].main = all_lodge;
        job_run(&jobs[i]);
    }
}

/* --- operations ---------------------------------------------------------------------------------- */

static float x[MOST], y[MOST];

static void add_up(tally_comm *c, int rank, int turn, size_t count)
{
    tally_op *op;
    int size = tally_comm_size(c);
    for (size_t i = 0; i < count; i++)
        x[i] = (float)(rank + turn % 50 + (int)(i % 11));
    CHECK(tally_push_pull(c, "sum", x, y, count, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
    job_expect(op, 0);
    for (size_t i = 0; i < count; i++)
        CHECK(y[i] == (float)(size * (size - 1) / 2 + size * (turn % 50 + (int)(i % 11))));
}

static int sums(int rank, void *arg)
{
    tally_comm *c = job_open();
    CHECK(lodges(c));
    for (int turn = 0; turn < TURNS; turn++)
        add_up(c, rank, turn, turn % 10 ? 100 : MOST / 4);
    job_leave(c);
    return 0;
}

static void test_sums(void **state)
{
    static const char *const threads[] = {"TALLY_SUM_THREADS=0", "TALLY_SUM_THREADS=2"};
    for (int i = 0; i < 2; i++)
        job_run(&(struct job){.ranks = RANKS, .tallyds = i, .main = sums, .settings = {SLOW, threads[i]}});
}

/* An input that the crew reads is taken back: the caller waits for the crew, and the loop's thread may wait for the caller. */
static int cancels(int rank, void *arg)
{
    tally_comm *c = job_open();
    uint64_t random = 7;
    int cancelled = 0;
    CHECK(lodges(c));
    for (int turn = 0; turn < TURNS; turn++) {
        tally_op *op;
        job_barrier(c);
        CHECK(tally_push_pull(c, "often", x, y, MOST, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
        usleep((useconds_t)(job_random(&random) % 3000));
        if (rank == turn % RANKS)
            CHECK(tally_op_cancel(op, "a test") == 0);
        int err = job_ends(op);
        CHECK(err == 0 || err == -ECANCELED);
        cancelled += err != 0;
    }
    CHECK(cancelled > 0);
    add_up(c, rank, 0, MOST);
    job_leave(c);
    return 0;
}

static void test_cancelled_while_the_crew_reads(void **state)
{
    job_run(&(struct job){
        .ranks = RANKS, .main = cancels, .settings = {SLOW, "TALLY_SUM_THREADS=2", "TALLY_PART_BYTES=1M"}});
}

/* --- ends ---------------------------------------------------------------------------------------- */

/* The one that leaves first serves the others until they have left, too. */
static int leaves_early(int rank, void *arg)
{
    tally_comm *c = job_open();
    CHECK(lodges(c));
    add_up(c, rank, 0, MOST);
    job_sleep_ms(100 * rank);
    tally_op *op;
    tally_group *g;
    if (rank > 0) {
        CHECK(tally_group_create(c, "later", (const int[]){1, 2}, 2, &g) == 0);
        struct tally_options o = job_in(g);
        CHECK(tally_push_pull(c, "without 0", x, y, MOST, TALLY_FLOAT32, TALLY_SUM, &o, &op) == 0);
        job_expect(op, 0);
    }
    int64_t began = tly_now();
    CHECK(tally_comm_close(c) == 0);
    CHECK(tly_now() - began < 5 * TLY_SEC);
    return 0;
}

static void test_leaves_early(void **state)
{
    job_run(&(struct job){.ranks = RANKS, .main = leaves_early, .settings = {SLOW}});
}

static int dies(int rank, void *arg)
{
    atomic_int *stage = arg;
    tally_comm *c = job_open();
    CHECK(lodges(c));
    add_up(c, rank, 0, 1000);
    atomic_fetch_add(stage, 1);
    int err = 0;
    while (!err) {
        tally_op *op;
        err = tally_push_pull(c, "sum", x, y, MOST, TALLY_FLOAT32, TALLY_SUM, NULL, &op);
        if (!err)
            err = job_ends(op);
    }
    int64_t began = tly_now();
    job_close_after_kill(c, err, RANKS - 1, y, sizeof y);
    CHECK(tly_now() - began < 5 * TLY_SEC);
    return 0;
}

static void test_a_rank_dies(void **state)
{
    atomic_int *stage = job_shared(sizeof *stage);
    struct job j = {.ranks = RANKS, .main = dies, .arg = stage, .settings = {SLOW}};
    job_kill_rank(&j, RANKS - 1, stage, RANKS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_card_decides),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_cancelled_while_the_crew_reads),
        cmocka_unit_test(test_leaves_early),
        cmocka_unit_test(test_a_rank_dies),
    };
    return cmocka_run_group_tests_name("lodging", tests, NULL, NULL);
}
