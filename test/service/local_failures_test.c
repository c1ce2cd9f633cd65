/* local_failures_test.c - ranks that all share one machine: one that dies, leaves, is late, disagrees or runs wild is named as
 * where services sum. */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/uio.h>

#include "job.h"
#include "local/engine.h"

#include <cmocka.h>

static const int together[JOB_MOST_RANKS];

struct board {
    atomic_int stage, child[4];
    int run;
};

static struct board *new_board(void)
{
    return job_shared(sizeof(struct board));
}

static int disagree(int rank, void *arg)
{
    static float x[20000];
    tally_comm *c = job_open();
    tally_op *op;
    for (int i = 0; i < 4; i++) {
        size_t count = i % 2 ? 20000 : 10;
        CHECK(tally_push_pull(c, "w", x, x, rank == 1 ? count - 1 : count, TALLY_FLOAT32, TALLY_SUM, NULL,
                              &op) == 0);
        CHECK(tally_op_wait(op, -1) == -EINVAL);
        char part[100];
        snprintf(part, sizeof part,
                 "'w': the ranks disagree: tally_push_pull float32 [%zu] sum on ranks 0, 2, [%zu] on rank 1",
                 count, count - 1);
        CHECK_HOLDS(tally_op_error(op), part);
        tally_op_free(op);
        struct tally_options o = {.size = sizeof o, .note = rank == 1 ? "complex64" : NULL};
        CHECK(tally_push_pull(c, "w", x, x, count, TALLY_FLOAT32, TALLY_SUM, &o, &op) == 0);
        CHECK(tally_op_wait(op, -1) == -EINVAL);
        CHECK_HOLDS(tally_op_error(op), "] sum on ranks 0, 2, (complex64) on rank 1");
        tally_op_free(op);
        o.note = "complex64";
        CHECK(tally_push_pull(c, "w", x, x, count, TALLY_FLOAT32, TALLY_SUM, &o, &op) == 0);
        job_expect(op, 0);
        if (rank == 2)
            CHECK(tally_refuse(c, "w", TALLY_PUSH_PULL, 0, "no gradient") == 0);
        else {
            CHECK(tally_push_pull(c, "w", x, x, count, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
            CHECK(tally_op_wait(op, -1) == -EINVAL);
            CHECK_HOLDS(tally_op_error(op), "rank 2 refuses: no gradient");
            tally_op_free(op);
        }
    }
    CHECK(tally_barrier(c, NULL, NULL, &op) == 0);
    job_expect(op, 0);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_disagreement(void **state)
{
    struct job j = {.ranks = 3, .machine = together, .main = disagree};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

enum { MIXED, SPREAD_IN_POOL, MIXTURES };

/* Sum and broadcast, or only broadcast in the pool, until that fails; the sizes make it likely to be in the middle of
 * something.  Then no other rank writes into this one's memory. */
static int until_failure(int rank, void *arg)
{
    struct board *b = arg;
    enum { COUNT = 1 << 20 };
    tally_comm *c = job_open();
    void *pool;
    float *mine = calloc(COUNT, sizeof *mine);
    tally_op *op;
    CHECK(tally_alloc(c, COUNT * sizeof(float), &pool) == 0);
    int err = 0;
    for (int i = 0; !err; i++) {
        bool spread = b->run == SPREAD_IN_POOL;
        float *x = spread || i % 2 ? pool : mine;
        size_t count = spread || i % 3 ? COUNT : 10;
        err = spread || i % 5 == 4
                  ? tally_broadcast(c, "b", x, count, TALLY_FLOAT32, i / 5 % 3, NULL, &op)
                  : tally_push_pull(c, "w", x, x, count, TALLY_FLOAT32, TALLY_AVERAGE, NULL, &op);
        if (!err) {
            err = tally_op_wait(op, -1);
            tally_op_free(op);
        }
        atomic_fetch_add(&b->stage, 1);
    }
    CHECK(err == -ECONNRESET);
    CHECK_HOLDS(tally_error(), "rank 1 on");
    for (int i = 0; i < COUNT; i++)
        mine[i] = ((float *)pool)[i] = (float)(i + rank); /* ours again */
    job_sleep_ms(20);
    CHECK(memcmp(mine, pool, COUNT * sizeof *mine) == 0);
    CHECK(tally_comm_close(c) == 0);
    for (int i = 0; i < COUNT; i++)
        CHECK(mine[i] == (float)(i + rank) && ((float *)pool)[i] == mine[i]);
    CHECK(tally_free(pool) == 0);
    free(mine);
    return 0;
}

static void test_rank_killed(void **state)
{
    for (int i = 0; i < (UNDER_SANITIZER ? 2 : 6) * MIXTURES; i++) {
        struct board *b = new_board();
        b->run = i % MIXTURES;
        struct job j = {.ranks = 3, .machine = together, .main = until_failure, .arg = b};
        job_kill_rank(&j, 1, &b->stage, 10 + 7 * (i / MIXTURES));
    }
}

/* Mostly in the middle of a copy into a neighbour's memory: that one does not wait until it goes on. */
static void test_rank_stopped(void **state)
{
    for (int i = 0; i < (UNDER_SANITIZER ? 2 : 4); i++) {
        struct board *b = new_board();
        b->run = i % MIXTURES;
        struct job j = {.ranks = 3,
                        .machine = together,
                        .main = until_failure,
                        .arg = b,
                        .settings = {"TALLY_DEAD_TIMEOUT=2"}};
        job_start(&j);
        job_await(&b->stage, 10 + 7 * i);
        kill(j.rank_pid[1], SIGSTOP);
        assert_int_equal(job_wait_rank(&j, 0), 0);
        assert_int_equal(job_wait_rank(&j, 2), 0);
        job_clear(&j);
    }
}

/* A rank with living children, as of a DataLoader, is killed: its peers must notice all the same. */
static int with_children(int rank, void *arg)
{
    struct board *b = arg;
    if (rank != 1)
        return until_failure(rank, arg);
    tally_comm *c = job_open();
    void *pool;
    float x[10] = {0};
    tally_op *op;
    CHECK(tally_alloc(c, 1 << 20, &pool) == 0);
    for (int i = 0; i < 4; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            CHECK(tally_push_pull(c, "w", x, x, 10, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == -ECHILD);
            CHECK(tally_comm_close(c) == 0);
            atomic_fetch_add(&b->stage, 1000);
            job_sleep_ms(600000);
            _exit(0);
        }
        atomic_store(&b->child[i], child);
    }
    job_await(&b->stage, 4000);
    CHECK(tally_push_pull(c, "w", x, x, 10, TALLY_FLOAT32, TALLY_AVERAGE, NULL, &op) == 0);
    job_expect(op, 0);
    atomic_fetch_add(&b->stage, 1000);
    job_sleep_ms(600000);
    return 1;
}

static void test_killed_with_children(void **state)
{
    struct board *b = new_board();
    struct job j = {.ranks = 3, .machine = together, .main = with_children, .arg = b};
    job_start(&j);
    job_await(&b->stage, 5000);
    kill(j.rank_pid[1], SIGKILL);
    assert_int_equal(job_wait_rank(&j, 0), 0);
    assert_int_equal(job_wait_rank(&j, 2), 0);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(kill(atomic_load(&b->child[i]), 0), 0); /* they still lived */
        kill(atomic_load(&b->child[i]), SIGKILL);
    }
    job_wait_rank(&j, 1);
    job_clear(&j);
}

/* Of tensors of fewer blocks than there are ranks, too, each rank hears that one has left. */
static int leaves_in_between(int rank, void *arg)
{
    enum { OPS = 8, EACH = 2048 };
    struct board *b = arg;
    static float x[OPS][EACH];
    tally_op *op[OPS];
    tally_comm *c = job_open();
    for (int turn = 0; turn < 2; turn++) {
        if (turn == 1 && rank < 2)
            job_await(&b->stage, 1);
        for (int i = 0; i < OPS; i++) {
            char name[16];
            snprintf(name, sizeof name, "%d", i);
            CHECK(tally_push_pull(c, name, x[i], x[i], EACH, TALLY_FLOAT32, TALLY_SUM, NULL, &op[i]) == 0);
        }
        for (int i = 0; i < OPS && turn == 0; i++)
            job_expect(op[i], 0);
    }
    if (rank == 3) {
        CHECK(tally_comm_close(c) == 0);
        atomic_store(&b->stage, 1);
    }
    for (int i = 0; i < OPS; i++)
        job_expect(op[i], -ESHUTDOWN);
    if (rank == 2)
        atomic_store(&b->stage, 2);
    if (rank < 2)
        job_await(&b->stage, 2);
    if (rank != 3)
        CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_one_leaves_in_between(void **state)
{
    struct job j = {.ranks = 4,
                    .machine = together,
                    .main = leaves_in_between,
                    .arg = new_board(),
                    .settings = {"TALLY_TIMEOUT=15"}};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

static int one_leaves(int rank, void *arg)
{
    float x[3000] = {0};
    tally_op *op;
    tally_comm *c = job_open();
    CHECK(tally_push_pull(c, "w", x, x, 3000, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
    job_expect(op, 0);
    for (int i = 0; i < 3 && rank != 1; i++) {
        CHECK(tally_push_pull(c, i ? "v" : "w", x, x, i ? 3000 : 2, TALLY_FLOAT32, TALLY_SUM, NULL, &op) ==
              0);
        CHECK(tally_op_wait(op, -1) == -ESHUTDOWN);
        CHECK_HOLDS(tally_op_error(op), "rank 1 has left the job");
        tally_op_free(op);
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_rank_leaves(void **state)
{
    struct job j = {.ranks = 3, .machine = together, .main = one_leaves};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

static tally_op *begin_large(tally_comm *c, const char *name)
{
    static float x[3000];
    tally_op *op;
    CHECK(tally_push_pull(c, name, x, x, 3000, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
    return op;
}

/* Rank 2 begins an operation and leaves, rank 0 goes on to the next; rank 1 comes to the first only then, and finds all
 * posts of it there, and the entry by which its parts were to be shared out in use for another. */
static int one_is_late(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    if (rank == 1)
        job_await(&b->stage, 1);
    tally_op *op = begin_large(c, "w");
    if (rank == 2) {
        CHECK(tally_comm_close(c) == 0);
        tally_op_free(op);
        return 0;
    }
    job_expect(op, -ESHUTDOWN);
    if (rank == 0) {
        job_expect(begin_large(c, "v"), -ESHUTDOWN);
        atomic_store(&b->stage, 1);
        job_await(&b->stage, 2);
    }
    atomic_store(&b->stage, 2);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_late_after_one_has_left(void **state)
{
    struct job j = {.ranks = 3, .machine = together, .main = one_is_late, .arg = new_board()};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

/* More than a ring holds, to a rank that reads it no more. */
static int far_ahead(int rank, void *arg)
{
    enum { AHEAD = 5000 };
    static float x[AHEAD][3];
    static tally_op *op[AHEAD];
    struct board *b = arg;
    tally_comm *c = job_open();
    if (rank == 1) {
        CHECK(tally_comm_close(c) == 0);
        atomic_store(&b->stage, 1);
        return 0;
    }
    job_await(&b->stage, 1);
    for (int i = 0; i < AHEAD; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        CHECK(tally_push_pull(c, name, x[i], x[i], 3, TALLY_FLOAT32, TALLY_SUM, NULL, &op[i]) == 0);
    }
    for (int i = 0; i < AHEAD; i++)
        job_expect(op[i], -ESHUTDOWN);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_far_ahead_of_who_leaves(void **state)
{
    struct job j = {.ranks = 3, .machine = together, .main = far_ahead, .arg = new_board()};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

/* Threads that submit, wait and submit again, whatever is said to them, until it is that all is over. */
struct submitter {
    tally_comm *c;
    struct board *board;
    int number;
};

static void *submit_until_failure(void *arg)
{
    const struct submitter *s = arg;
    enum { AT_ONCE = 8 };
    float x[AT_ONCE][100] = {{0}};
    tally_op *op[AT_ONCE];
    for (int err = 0; !err;) {
        int n = 0;
        for (char name[16]; n < AT_ONCE && !err; n += !err) {
            snprintf(name, sizeof name, "%d %d", s->number, n);
            err = tally_push_pull(s->c, name, x[n], x[n], 100, TALLY_FLOAT32, TALLY_SUM, NULL, &op[n]);
        }
        while (n-- > 0) {
            int ended = tally_op_wait(op[n], -1);
            err = err ? err : ended;
            tally_op_free(op[n]);
        }
        CHECK(err == 0 || err == -ECONNRESET);
        atomic_fetch_add(&s->board->stage, 1);
    }
    return NULL;
}

static int many_submitters(int rank, void *arg)
{
    enum { THREADS = 4 };
    tally_comm *c = job_open();
    pthread_t thread[THREADS];
    struct submitter s[THREADS];
    for (int i = 0; i < THREADS; i++) {
        s[i] = (struct submitter){.c = c, .board = arg, .number = i};
        CHECK(pthread_create(&thread[i], NULL, submit_until_failure, &s[i]) == 0);
    }
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(thread[i], NULL) == 0);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_submitted_while_one_is_killed(void **state)
{
    for (int i = 0; i < 3; i++) {
        struct board *b = new_board();
        struct job j = {.ranks = 2, .machine = together, .main = many_submitters, .arg = b};
        job_start(&j);
        job_await(&b->stage, 100 + 30 * i);
        kill(j.rank_pid[1], SIGKILL);
        assert_int_equal(job_wait_rank(&j, 0), 0);
        assert_int_equal(job_wait_rank(&j, 1), 128 + SIGKILL);
        job_clear(&j);
    }
}

static int is_late(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    tally_op *op;
    float x[2000] = {0};
    if (rank == 2) {
        job_await(&b->stage, 1);
        while (tally_comm_status(c, NULL) == 0)
            job_sleep_ms(10);
    } else {
        CHECK(tally_push_pull(c, "w", x, x, 2000, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
        atomic_fetch_add(&b->stage, 1);
        job_expect(op, -ETIME);
        CHECK_HOLDS(tally_error(), "for rank 2 (TALLY_TIMEOUT)");
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_late(void **state)
{
    struct job j = {.ranks = 3,
                    .machine = together,
                    .main = is_late,
                    .arg = new_board(),
                    .settings = {"TALLY_LATE_WARNING=0.5", "TALLY_TIMEOUT=3"}};
    job_start(&j);
    job_finish(&j);
    job_log_holds(&j, 0, "for rank 2");
    job_log_holds(&j, 0, "warning rank 0 comm: 'w' has waited");
    job_log_lacks(&j, 1, "warning rank 1 comm: 'w' has waited");
    job_clear(&j);
}

/* --- a rank that runs wild ------------------------------------------------------------------------ */

enum { OUTSIDE, OUTSIDE_SPREAD, LONGER, NOT_HERE, NO_ENTRY, GATHERED, UNEVEN, WINDOW, ROOTS_WINDOW, WAYS };

/* The segments that this process has mapped: its own one and the other rank's. */
static void find_segments(struct tly_control **mine, struct tly_control **other)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[400];
    CHECK(maps);
    *mine = *other = NULL;
    while (fgets(line, sizeof line, maps)) {
        uintptr_t from = strtoull(line, NULL, 16);
        if (!strstr(line, "memfd:tally") || !strstr(line, " 00000000 "))
            continue;
        struct tly_control *c;
        memcpy(&c, &from, sizeof c);
        uint64_t probe = 0;
        struct iovec here = {&probe, sizeof probe}, there = {NULL, sizeof probe};
        uintptr_t at = (uintptr_t)c->probe_at;
        memcpy(&there.iov_base, &at, sizeof at);
        ssize_t n = process_vm_readv(getpid(), &here, 1, &there, 1, 0);
        *(n == sizeof probe && probe == c->probe ? mine : other) = c;
    }
    fclose(maps);
    CHECK(*mine && *other);
}

static struct tly_post *first_post(struct tly_control *c)
{
    return (struct tly_post *)c->ring;
}

/* Rank 0 answers rank 1's first post by a malformed one. */
static int run_wild(int rank, void *arg)
{
    struct board *b = arg;
    static float x[1 << 16];
    tally_comm *c = job_open();
    tally_op *op;
    if (rank == 1) {
        size_t count = b->run == NOT_HERE ? 100 : sizeof x / sizeof *x;
        if (b->run == LONGER || b->run == ROOTS_WINDOW)
            CHECK(tally_broadcast(c, "t", x, count, TALLY_FLOAT32, 0, NULL, &op) == 0);
        else if (b->run == OUTSIDE_SPREAD) {
            void *pool;
            CHECK(tally_alloc(c, sizeof x, &pool) == 0);
            CHECK(tally_broadcast(c, "t", pool, count, TALLY_FLOAT32, 1, NULL, &op) == 0);
        } else if (b->run == GATHERED)
            CHECK(tally_allgather(c, "t", x, 2, TALLY_FLOAT32, NULL, &op) == 0);
        else if (b->run == UNEVEN)
            CHECK(tally_allgather_into(c, "t", x + count / 2, x, count / 2, TALLY_FLOAT32, NULL, &op) == 0);
        else
            CHECK(tally_push_pull(c, "t", x, x, count, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
        atomic_store(&b->stage, 1);
        int err = tally_op_wait(op, -1);
        CHECK(err == -EPROTO);
        CHECK_HOLDS(tally_op_error(op), b->run >= WINDOW ? "has written nonsense into shared memory"
                                                         : "has posted a malformed operation");
        tally_op_free(op);
        atomic_store(&b->stage, 2);
        return 0;
    }
    struct tly_control *mine, *other;
    find_segments(&mine, &other);
    job_await(&b->stage, 1);
    struct tly_post *out = first_post(mine), p;
    for (int i = 0; !atomic_load(&first_post(other)->there) && i < 1000; i++)
        job_sleep_ms(1);
    memcpy(&p, first_post(other), sizeof p);
    p.work = b->run == NO_ENTRY ? 0xffff : 7;
    p.gen = 1;
    p.flags = b->run <= OUTSIDE_SPREAD ? TLY_POST_POOL_IN | TLY_POST_POOL_OUT
              : b->run == LONGER       ? TLY_POST_POOL_IN
                                       : 0;
    if (b->run <= OUTSIDE_SPREAD)
        p.input = p.output = 0x7000000000000;
    if (b->run == OUTSIDE_SPREAD)
        p.bytes = 0;
    if (b->run == LONGER)
        p.input = sizeof *mine, p.bytes = 64 << 20;
    if (b->run == GATHERED)
        p.flags = TLY_POST_EAGER, p.bytes = (1ull << 32) + 8;
    if (b->run == UNEVEN || b->run == ROOTS_WINDOW)
        p.bytes = sizeof x;
    if (b->run >= WINDOW) {
        atomic_store(&mine->work[p.work].window, 0x7000000000000);
        atomic_store(&mine->work[p.work].next, 1ull << 32 | 1000);
    }
    atomic_store(&p.there, 0);
    atomic_store(&out[1].there, 0);
    memcpy(out, &p, sizeof p);
    atomic_store(&out[0].there, 1);
    atomic_fetch_add(&other->bell, 1);
    job_await(&b->stage, 2);
    _exit(0); /* it could not say goodbye */
}

static void test_a_rank_that_runs_wild(void **state)
{
    for (int way = 0; way < WAYS; way++) {
        struct board *b = new_board();
        b->run = way;
        struct job j = {.ranks = 2, .machine = together, .main = run_wild, .arg = b};
        job_start(&j);
        job_finish(&j);
        job_clear(&j);
    }
}

static struct board *threads_board;

static void *sum_and_receive(void *arg)
{
    static const int pair[] = {0, 1};
    static float x[1 << 20];
    tally_group *g;
    tally_op *op;
    CHECK(tally_push_pull(arg, "t", x, x, 1 << 20, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
    job_expect(op, 0); /* through windows, which need not the kernel */
    CHECK(tally_broadcast(arg, "t", x, 1 << 20, TALLY_FLOAT32, 1, NULL, &op) == 0);
    job_expect(op, 0);
    if (tally_comm_rank(arg) == 2) {
        job_await(&threads_board->stage, 2);
        _exit(0);
    }
    CHECK(tally_group_create(arg, "pair", pair, 2, &g) == 0);
    struct tally_options o = job_in(g);
    CHECK(tally_barrier(arg, "first", &o, &op) ==
          0); /* by services; then all know that they mean the same list */
    job_expect(op, 0);
    CHECK(tally_broadcast(arg, "t", x, 1 << 20, TALLY_FLOAT32, 1, &o, &op) == 0);
    CHECK(tally_op_wait(op, -1) == -EFAULT);
    CHECK_HOLDS(tally_op_error(op), "its main thread has ended");
    atomic_fetch_add(&threads_board->stage, 1);
    job_await(&threads_board->stage, 2);
    _exit(0);
}

/* The kernel shows no memory of a process whose main thread has ended, though the process lives. */
static int main_thread_ends(int rank, void *arg)
{
    tally_comm *c = job_open();
    pthread_t thread;
    if (rank != 1) {
        job_sleep_ms(300);
        return sum_and_receive(c) != NULL;
    }
    CHECK(pthread_create(&thread, NULL, sum_and_receive, c) == 0);
    pthread_exit(NULL);
}

static void test_main_thread_ends(void **state)
{
    threads_board = new_board();
    struct job j = {.ranks = 3, .machine = together, .main = main_thread_ends};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_disagreement),
        cmocka_unit_test(test_one_leaves_in_between),
        cmocka_unit_test(test_rank_killed),
        cmocka_unit_test(test_rank_stopped),
        cmocka_unit_test(test_killed_with_children),
        cmocka_unit_test(test_rank_leaves),
        cmocka_unit_test(test_late_after_one_has_left),
        cmocka_unit_test(test_far_ahead_of_who_leaves),
        cmocka_unit_test(test_submitted_while_one_is_killed),
        cmocka_unit_test(test_late),
        cmocka_unit_test(test_a_rank_that_runs_wild),
        cmocka_unit_test(test_main_thread_ends),
    };
    return cmocka_run_group_tests_name("local_failures", tests, NULL, NULL);
}
