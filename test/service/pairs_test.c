/* pairs_test.c - two jobs that begin at the same moment on one machine, again and again: none is lost.
 *
 * Both want the same port first, as hook and backend do; rank 0 binds before it says which one it has got.  TEST_PAIRS: how
 * many pairs. */
#include <errno.h>
#include <setjmp.h>
#include <string.h>
#include <unistd.h>

#include "job.h"

#include <cmocka.h>

enum { PAIRS = 4, RANKS = 2, COUNT = 1000 };

/* What the processes of a pair share. */
struct board {
    int wanted; /* the port that both jobs want */
    atomic_int ready;
    atomic_int taken; /* jobs that have got it */
    atomic_int port[2];
};

struct job_of_pair {
    struct board *board;
    int number;
};

static int take_port(struct board *b)
{
    int port = b->wanted, err = tally_comm_listen(NULL, &port);
    if (!err) {
        atomic_fetch_add(&b->taken, 1);
    } else {
        CHECK(err == -EADDRINUSE);
        port = 0;
        CHECK(tally_comm_listen(NULL, &port) == 0);
    }
    return port;
}

static int sums(int rank, void *arg)
{
    struct job_of_pair *j = arg;
    struct board *b = j->board;
    char address[64];
    float x[COUNT];
    tally_comm *c;
    tally_op *op;
    atomic_fetch_add(&b->ready, 1);
    while (atomic_load(&b->ready) < 2 * RANKS) /* without a pause, so that they begin within microseconds */
        ;
    if (j->number == 0)
        close(STDIN_FILENO); /* as a daemon may: the socket gets its number */
    if (rank == 0)
        atomic_store(&b->port[j->number], take_port(b));
    job_await(&b->port[j->number], 1);
    snprintf(address, sizeof address, "127.0.0.1:%d", atomic_load(&b->port[j->number]));
    CHECK(setenv("TALLY_COORD", address, 1) == 0);
    CHECK(tally_comm_open(NULL, &c) == 0);
    CHECK(tally_comm_size(c) == RANKS);
    for (int i = 0; i < COUNT; i++)
        x[i] = (float)(10 * j->number + rank);
    CHECK(tally_push_pull(c, "x", x, x, COUNT, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
    CHECK(tally_op_wait(op, -1) == 0);
    tally_op_free(op);
    for (int i = 0; i < COUNT; i++)
        CHECK(x[i] == (float)(20 * j->number + 1));
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_no_job_of_a_pair_is_lost(void **state)
{
    const char *text = getenv("TEST_PAIRS");
    int pairs = text ? atoi(text) : PAIRS;
    assert_true(pairs > 0);
    for (int i = 0; i < pairs; i++) {
        struct board *b = job_shared(sizeof *b);
        struct job_of_pair of[2] = {{b, 0}, {b, 1}};
        struct job j[2];
        b->wanted = job_free_port();
        for (int k = 0; k < 2; k++) {
            j[k] = (struct job){.ranks = RANKS, .main = sums, .arg = &of[k]};
            job_start(&j[k]);
        }
        for (int k = 0; k < 2; k++)
            job_finish(&j[k]);
        assert_int_equal(atomic_load(&b->taken), 1);
        for (int k = 0; k < 2; k++)
            job_clear(&j[k]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_no_job_of_a_pair_is_lost)};
    return cmocka_run_group_tests_name("pairs", tests, NULL, NULL);
}
