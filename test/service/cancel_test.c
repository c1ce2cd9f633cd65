/* cancel_test.c - operations that a rank takes back: they fail on all ranks, also on those that come later, and nobody
 * sums what has become of its memory; or all had begun them, and they end well on all. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>

#include "job.h"

#include <cmocka.h>

enum {
    RANKS = 4,
    LAST = RANKS - 1,
    MOST = 300000,
    KINDS = 9,
    MANY = 100,
    RACES = UNDER_SANITIZER ? 60 : 300
};

struct board {
    atomic_int stage, go, outcome[RACES][RANKS];
    int services; /* once one has died */
};

static void fails(tally_op *op, const char *why)
{
    CHECK(tally_op_wait(op, -1) == -ECANCELED);
    CHECK_HOLDS(tally_op_error(op), why);
    tally_op_free(op);
}

static void fill(float *x, size_t count, float value)
{
    for (size_t i = 0; i < count; i++)
        x[i] = value;
}

static bool holds(const float *x, size_t count, float value)
{
    size_t i = 0;
    while (i < count && x[i] == value)
        i++;
    return i == count;
}

/* An operation of each kind on `count` elements; a multiple of RANKS. */
static tally_op *submit(tally_comm *c, int kind, float *x, float *y, size_t count, tally_group *g)
{
    struct tally_options o = {.size = sizeof o, .group = g};
    int rank = tally_comm_rank(c), n = g ? tally_group_size(g) : tally_comm_size(c), err;
    size_t each[RANKS];
    tally_op *op;
    for (int i = 0; i < n; i++)
        each[i] = count / RANKS;
    switch (kind) {
    case 0:
        err = tally_push_pull(c, "w", x, x, count, TALLY_FLOAT32, TALLY_SUM, &o, &op);
        break;
    case 1:
        err = tally_broadcast(c, "w", x, count, TALLY_FLOAT32, 1, &o, &op);
        break;
    case 2:
        err = tally_allgather(c, "w", x, count / (size_t)(rank + 1), TALLY_FLOAT32, &o, &op);
        break;
    case 3:
        err = tally_barrier(c, "w", &o, &op);
        break;
    case 4:
        err = tally_reduce(c, "w", x, y, count, TALLY_FLOAT32, TALLY_SUM, 0, &o, &op);
        break;
    case 5:
        err = tally_reduce_scatter(c, "w", x, y, each, TALLY_FLOAT32, TALLY_SUM, &o, &op);
        break;
    case 6:
        err = tally_alltoall(c, "w", x, each, y, each, TALLY_FLOAT32, &o, &op);
        break;
    case 7:
        err = tally_gather(c, "w", x, each[0], y, each, TALLY_FLOAT32, 1, &o, &op);
        break;
    default:
        err = tally_scatter(c, "w", x, each, y, each[0], TALLY_FLOAT32, 2, &o, &op);
        break;
    }
    CHECK(err == 0);
    return op;
}

/* Wherever the ranks are; `settings` for all. */
static void run_everywhere(int (*main)(int rank, void *arg))
{
    static const int together[RANKS], teams[RANKS] = {0, 0, 1, 1};
    struct job jobs[] = {{.machine = together},
                         {.machine = together, .settings = {"TALLY_LOCAL=off"}},
                         {.machine = teams},
                         {.tallyds = 2, .settings = {"TALLY_PART_BYTES=16384"}}};
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++) {
        jobs[i].ranks = RANKS;
        jobs[i].main = main;
        jobs[i].arg = job_shared(sizeof(struct board));
        job_run(&jobs[i]);
    }
}

/* --- a rank that is late ------------------------------------------------------------------------- */

/* The last rank comes once the first has taken the operation back, and the others write over their memory. */
static void come_late(struct board *b, tally_comm *c, tally_group *g, int others, int *stage)
{
    static const size_t counts[] = {4, 16, 900, 20000, MOST};
    int rank = tally_comm_rank(c);
    for (int i = 0; i < 5 * KINDS; i++) {
        size_t count = counts[i / KINDS];
        void *pool;
        float *y = malloc(count * sizeof *y), *own = malloc(count * sizeof *own);
        CHECK(y && own && tally_alloc(c, count * sizeof *own, &pool) == 0);
        float *x = (i + rank) % 3 ? own : pool;
        fill(x, count, 1);
        *stage += others;
        if (rank == LAST)
            job_await(&b->stage, *stage);
        tally_op *op = submit(c, i % KINDS, x, y, count, g);
        if (rank == 0) {
            job_sleep_ms(i % 3);
            CHECK(tally_op_cancel(op, "no time") == 0);
            CHECK(tally_op_cancel(op, "once more") == 0);
        }
        fails(op, "rank 0 has cancelled it: no time");
        fill(x, count, 1000);
        if (rank != LAST)
            atomic_fetch_add(&b->stage, 1);
        fill(x, count, 1);
        op = submit(c, i % KINDS, x, y, count, g);
        CHECK(tally_op_wait(op, -1) == 0);
        CHECK(tally_op_cancel(op, "it has ended") == 0 && tally_op_poll(op) && !tally_op_error(op)[0]);
        tally_op_free(op);
        CHECK(i % KINDS || holds(x, count, (float)(others + 1)));
        CHECK(tally_free(pool) == 0);
        free(own);
        free(y);
    }
}

static int late(int rank, void *arg)
{
    static const int three[] = {LAST, 0, 1};
    tally_comm *c = job_open();
    tally_group *g;
    int stage = 0;
    come_late(arg, c, NULL, RANKS - 1, &stage);
    if (rank != 2) {
        CHECK(tally_group_create(c, "three", three, 3, &g) == 0);
        come_late(arg, c, g, 2, &stage);
    }
    job_leave(c);
    return 0;
}

static void test_late(void **state)
{
    run_everywhere(late);
}

/* --- all at once --------------------------------------------------------------------------------- */

/* One takes it back just when the last ones come: it ends alike on all ranks. */
static int race(int rank, void *arg)
{
    static const size_t counts[] = {2, 900, 20000, MOST};
    struct board *b = arg;
    tally_comm *c = job_open();
    uint64_t seed = 99 + (uint64_t)rank;
    float *x = malloc(MOST * sizeof *x);
    void *pool;
    CHECK(x && tally_alloc(c, MOST * sizeof *x, &pool) == 0);
    for (int i = 0; i < RACES; i++) {
        float *at = i % 3 ? x : pool;
        size_t count = counts[i % 4];
        fill(at, count, (float)(i + rank));
        usleep((unsigned)(job_random(&seed) % 200));
        tally_op *op = submit(c, 0, at, NULL, count, NULL);
        if (rank == i / 4 % RANKS || (i % 5 == 0 && rank == LAST)) {
            usleep((unsigned)(job_random(&seed) % 200));
            CHECK(tally_op_cancel(op, "why not") == 0);
        }
        int err = tally_op_wait(op, -1);
        CHECK(err == 0 || err == -ECANCELED);
        if (err)
            CHECK_HOLDS(tally_op_error(op), "has cancelled it: why not");
        tally_op_free(op);
        CHECK(err || holds(at, count, (float)(RANKS * i + RANKS * (RANKS - 1) / 2)));
        fill(at, count, -1);
        atomic_store(&b->outcome[i][rank], err);
    }
    job_barrier(c);
    for (int i = 0; i < RACES; i++)
        CHECK(atomic_load(&b->outcome[i][rank]) == atomic_load(&b->outcome[i][0]));
    CHECK(tally_free(pool) == 0);
    free(x);
    job_leave(c);
    return 0;
}

static void test_race(void **state)
{
    run_everywhere(race);
}

/* --- many ---------------------------------------------------------------------------------------- */

static const size_t several[] = {900, 20000, 4};

static void submit_many(tally_comm *c, float *x[], tally_op *op[])
{
    char name[16];
    for (int i = 0; i < MANY; i++) {
        snprintf(name, sizeof name, "m%d", i);
        fill(x[i], several[i % 3], 1);
        CHECK(tally_push_pull(c, name, x[i], x[i], several[i % 3], TALLY_FLOAT32, TALLY_SUM, NULL, &op[i]) ==
              0);
    }
}

/* More than windows and rings have room for: some have not been sent when they are taken back. */
static int many(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    float *x[MANY];
    tally_op *op[MANY];
    for (int i = 0; i < MANY; i++)
        CHECK((x[i] = malloc(several[i % 3] * sizeof **x)));
    if (rank == LAST)
        job_await(&b->stage, 2 * LAST);
    while (rank == LAST && b->services && tally_comm_service_count(c) != b->services)
        job_sleep_ms(1);
    submit_many(c, x, op);
    if (rank != LAST)
        atomic_fetch_add(&b->stage, 1);
    if (rank == 0) {
        job_await(&b->go, 1);
        for (int i = MANY; i-- > 0;)
            CHECK(tally_op_cancel(op[i], "no time") == 0);
    }
    for (int i = 0; i < MANY; i++) {
        fails(op[i], "rank 0 has cancelled it: no time");
        fill(x[i], several[i % 3], 1000);
    }
    if (rank != LAST)
        atomic_fetch_add(&b->stage, 1);
    submit_many(c, x, op);
    for (int i = 0; i < MANY; i++) {
        CHECK(tally_op_wait(op[i], -1) == 0 && holds(x[i], several[i % 3], RANKS));
        tally_op_free(op[i]);
        free(x[i]);
    }
    job_leave(c);
    return 0;
}

static int many_at_once(int rank, void *arg)
{
    atomic_store(&((struct board *)arg)->go, 1);
    return many(rank, arg);
}

static void test_many(void **state)
{
    run_everywhere(many_at_once);
}

/* A service dies, before or when they have been taken back, or long after: who comes then finds what its home has said. */
static void service_dies(bool before, int after_ms)
{
    struct board *b = job_shared(sizeof *b);
    struct job j = {
        .ranks = RANKS, .tallyds = 2, .main = many, .arg = b, .settings = {"TALLY_PART_BYTES=16384"}};
    b->services = RANKS + 1;
    atomic_store(&b->go, !before);
    job_start(&j);
    job_await(&b->stage, before ? LAST : 2 * LAST);
    job_sleep_ms(after_ms);
    kill(j.tallyd_pid[0], SIGKILL);
    job_sleep_ms(2);
    atomic_store(&b->go, 1);
    for (int rank = 0; rank < RANKS; rank++)
        assert_int_equal(job_wait_rank(&j, rank), 0);
    job_clear(&j);
}

static void test_service_dies(void **state)
{
    service_dies(true, 0);
    service_dies(false, 0);
    service_dies(false, 9000); /* a verdict is not kept for late ranks at the expense of what came after it */
}

/* --- messages ------------------------------------------------------------------------------------ */

/* Either end, of small ones and large ones, and who looks for any. */
static int messages(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    float *x = malloc(MOST * sizeof *x);
    tally_op *op;
    CHECK(x);
    for (int i = 0; i < 4 && rank < 2; i++) {
        int first = i / 2; /* the sender, then the receiver */
        size_t count = i % 2 ? MOST : 100;
        bool sends = rank == 0, copied = sends && count == 100, cancelled = i > 0; /* what is copied is not */
        char why[64];
        snprintf(why, sizeof why, "rank %d has cancelled it: no time", first);
        if (rank != first)
            job_await(&b->stage, i + 1);
        fill(x, count, 1);
        CHECK((sends ? tally_send(c, x, count, TALLY_FLOAT32, 1, 7, NULL, &op)
                     : tally_recv(c, x, count, TALLY_FLOAT32, 0, 7, NULL, &op)) == 0);
        CHECK(rank != first || tally_op_cancel(op, "no time") == 0);
        if (!copied && cancelled) {
            fails(op, why);
        } else {
            CHECK(tally_op_wait(op, -1) == 0);
            tally_op_free(op);
        }
        if (rank == first)
            atomic_fetch_add(&b->stage, 1);
    }
    job_barrier(c);
    if (rank == 1) {
        CHECK(tally_probe(c, 9, NULL, &op) == 0);
        CHECK(tally_op_cancel(op, "nobody comes") == 0);
        fails(op, "nobody comes");
        CHECK(tally_probe(c, 9, NULL, &op) == 0);
        job_barrier(c);
        CHECK(tally_op_wait(op, -1) == 0 && tally_op_source(op) == 0);
        tally_op_free(op);
        CHECK(tally_recv(c, x, 100, TALLY_FLOAT32, 0, 9, NULL, &op) == 0 && tally_op_wait(op, -1) == 0);
        CHECK(holds(x, 100, 5));
        tally_op_free(op);
    } else {
        job_barrier(c);
        fill(x, 100, 5);
        CHECK(rank || tally_send(c, x, 100, TALLY_FLOAT32, 1, 9, NULL, NULL) == 0);
    }
    free(x);
    job_leave(c);
    return 0;
}

static void test_messages(void **state)
{
    run_everywhere(messages);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_late),         cmocka_unit_test(test_race),     cmocka_unit_test(test_many),
        cmocka_unit_test(test_service_dies), cmocka_unit_test(test_messages),
    };
    return cmocka_run_group_tests_name("cancel", tests, NULL, NULL);
}
