/* epoch_test.c - whole jobs whose tallyd die, stop, come late and leave while it runs.  The ranks notice nothing but the
 * time it takes: in every step every sum is the reference's, bit for bit. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>

#include "job.h"
#include "reference.h"

#include <cmocka.h>

struct board {
    atomic_int stage, stop, services;
    bool uneven;           /* ranks' cards are slow, as they say, and all kinds of parts are made: */
    atomic_int part_bytes; /* of this size */
    int together;          /* let all tensors of a step be under way at once */
};

static struct board *new_board(void)
{
    return job_shared(sizeof(struct board));
}

enum { LARGE = 100003, TENSORS = 5 };
static const int counts[TENSORS] = {LARGE, 3, 7000, 0, 20000};

/* What rank `rank` has at place i of tensor t in a step. */
static float value(int rank, int step, int t, int i)
{
    uint32_t x = (uint32_t)i * 2654435761u ^ (uint32_t)(rank * 40503 + step * 9973 + t * 131);
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    return (float)(int32_t)x * 1e-3f;
}

static void check(const float *x, int ranks, int step, int t)
{
    static float in[JOB_MOST_RANKS][LARGE], out[LARGE];
    const void *inputs[JOB_MOST_RANKS];
    struct reference r = {.dtype = TALLY_FLOAT32,
                          .reduction = TALLY_SUM,
                          .ranks = ranks,
                          .prescale = 1,
                          .postscale = 1,
                          .groups = 1};
    for (int k = 0; k < ranks; k++) {
        for (int i = 0; i < counts[t]; i++)
            in[k][i] = value(k, step, t, i);
        inputs[k] = in[k];
    }
    reference_reduce(&r, inputs, out, (size_t)counts[t]);
    for (int i = 0; i < counts[t]; i++)
        if (memcmp(&x[i], &out[i], sizeof out[i]) != 0) {
            fprintf(stderr, "step %d, tensor %d, element %d: %.9g, not %.9g\n", step, t, i, (double)x[i],
                    (double)out[i]);
            CHECK(!"the same bits");
        }
}

/* One step: sums in place, a broadcast, an allgather, a barrier. */
static void take_step(tally_comm *c, int step)
{
    static float x[TENSORS][LARGE], y[5000];
    static const char *const names[TENSORS] = {"a", "b", "c", "d", "e"};
    int rank = tally_comm_rank(c), ranks = tally_comm_size(c);
    tally_op *op[TENSORS], *other[3];
    for (int t = 0; t < TENSORS; t++) {
        for (int i = 0; i < counts[t]; i++)
            x[t][i] = value(rank, step, t, i);
    }
    for (int t = 0; t < TENSORS; t++)
        CHECK(tally_push_pull(c, names[t], x[t], x[t], (size_t)counts[t], TALLY_FLOAT32, TALLY_SUM, NULL,
                              &op[t]) == 0);
    for (int i = 0; i < 5000; i++)
        y[i] = rank == step % ranks ? value(rank, step, 9, i) : -1;
    CHECK(tally_broadcast(c, "y", y, 5000, TALLY_FLOAT32, step % ranks, NULL, &other[0]) == 0);
    int64_t mine[2] = {rank, step};
    CHECK(tally_allgather(c, "g", mine, 2, TALLY_INT64, NULL, &other[1]) == 0);
    CHECK(tally_barrier(c, "z", NULL, &other[2]) == 0);
    for (int t = 0; t < TENSORS; t++) {
        CHECK(tally_op_wait(op[t], -1) == 0);
        tally_op_free(op[t]);
        check(x[t], ranks, step, t);
        memset(x[t], 0x5a, sizeof x[t]); /* nobody may still need it */
    }
    for (int i = 0; i < 3; i++)
        CHECK(tally_op_wait(other[i], -1) == 0);
    for (int i = 0; i < 5000; i++)
        CHECK(y[i] == value(step % ranks, step, 9, i));
    const void *data;
    size_t bytes;
    const int64_t *first;
    CHECK(tally_op_gathered(other[1], &data, &bytes, &first) == 0 && bytes == (size_t)ranks * 16);
    for (int i = 0; i < ranks; i++)
        CHECK(((const int64_t *)data)[2 * i] == i && ((const int64_t *)data)[2 * i + 1] == step);
    for (int i = 0; i < 3; i++)
        tally_op_free(other[i]);
}

enum { PIECE = 40000 };

/* What is cut by parts' size alone: a reduce_scatter, an alltoall, messages and an allgather of many parts. */
static void take_large_step(tally_comm *c, int step)
{
    static int32_t x[JOB_MOST_RANKS * PIECE], y[PIECE], give[JOB_MOST_RANKS * PIECE],
        taken[JOB_MOST_RANKS * PIECE], message[PIECE];
    int rank = tally_comm_rank(c), ranks = tally_comm_size(c), next = (rank + 1) % ranks;
    int before = (rank + ranks - 1) % ranks;
    size_t pieces[JOB_MOST_RANKS];
    tally_op *op[5];
    for (int i = 0; i < ranks; i++)
        pieces[i] = PIECE;
    for (int i = 0; i < ranks * PIECE; i++) {
        x[i] = rank + i + step;
        give[i] = rank * 1000 + i % 977 + step;
    }
    CHECK(tally_reduce_scatter(c, "rs", x, y, pieces, TALLY_INT32, TALLY_SUM, NULL, &op[0]) == 0);
    CHECK(tally_alltoall(c, "a2a", give, pieces, taken, pieces, TALLY_INT32, NULL, &op[1]) == 0);
    CHECK(tally_allgather(c, "large", give, PIECE, TALLY_INT32, NULL, &op[2]) == 0);
    CHECK(tally_send(c, give, PIECE, TALLY_INT32, next, 7, NULL, &op[3]) == 0);
    CHECK(tally_recv(c, message, PIECE, TALLY_INT32, before, 7, NULL, &op[4]) == 0);
    for (int i = 0; i < 5; i++)
        CHECK(tally_op_wait(op[i], -1) == 0);
    const void *data;
    size_t bytes;
    const int64_t *first;
    CHECK(tally_op_gathered(op[2], &data, &bytes, &first) == 0 &&
          bytes == sizeof(int32_t) * (size_t)ranks * PIECE);
    const int32_t *gathered = data;
    for (int i = 0; i < PIECE; i++) {
        CHECK(y[i] == ranks * (rank * PIECE + i + step) + ranks * (ranks - 1) / 2);
        CHECK(message[i] == before * 1000 + i % 977 + step);
        for (int k = 0; k < ranks; k++) {
            CHECK(taken[k * PIECE + i] == k * 1000 + (rank * PIECE + i) % 977 + step);
            CHECK(gathered[k * PIECE + i] == k * 1000 + i % 977 + step);
        }
    }
    for (int i = 0; i < 5; i++)
        tally_op_free(op[i]);
}

static void look_at_parts(tally_comm *c, struct board *b)
{
    char *json;
    CHECK(tally_comm_report(c, 10000, &json) == 0);
    const char *at = strstr(json, "\"part_bytes\": ");
    CHECK(at);
    atomic_store(&b->part_bytes, atoi(at + strlen("\"part_bytes\": ")));
    free(json);
}

/* How much a rank has under way is its own affair, also while parts change their size. */
static void set_up_unevenly(int rank)
{
    static const char *const credits[] = {"0", "4K", "200K", "16M"};
    setenv("TALLY_BANDWIDTH", "1G", 1);
    setenv("TALLY_CREDIT_BYTES", credits[rank], 1);
}

static int train(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c;
    if (b->uneven)
        set_up_unevenly(rank);
    static const char *const planned[] = {"a", "c"};
    static const uint64_t sizes[] = {LARGE * 4, 7000 * 4};
    CHECK(tally_comm_open(NULL, &c) == 0);
    CHECK(tally_plan(c, 0, 2, planned, sizes) == 0);
    static int64_t stop[1];
    for (int step = 0;; step++) {
        take_step(c, step);
        if (b->uneven)
            take_large_step(c, step);
        if (b->uneven && rank == 0)
            look_at_parts(c, b);
        tally_op *op;
        stop[0] = atomic_load(&b->stop);
        CHECK(tally_push_pull(c, "stop", stop, stop, 1, TALLY_INT64, TALLY_MAX, NULL, &op) == 0);
        CHECK(tally_op_wait(op, -1) == 0);
        tally_op_free(op);
        if (rank == 0) {
            atomic_store(&b->services, tally_comm_service_count(c));
            atomic_store(&b->stage, step + 1);
        }
        if (stop[0])
            break;
    }
    CHECK(tally_comm_status(c, NULL) == 0);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

#define SETTINGS \
    { \
        "TALLY_PART_BYTES=16K", "TALLY_FRAGMENT_BYTES=4K" \
    }

static void some_steps(struct board *b, int steps)
{
    job_await(&b->stage, atomic_load(&b->stage) + steps);
}

static void kill_tallyd(struct job *j, int i, int signal)
{
    kill(j->tallyd_pid[i], signal);
    if (signal == SIGKILL)
        job_wait_tallyd(j, i);
}

/* All ranks end well, and those tallyd that are left. */
static void end(struct job *j, struct board *b)
{
    some_steps(b, 3);
    atomic_store(&b->stop, 1);
    for (int i = 0; i < j->ranks; i++)
        if (job_wait_rank(j, i) != 0)
            job_finish(j);
    job_clear(j);
}

static void await_services(struct board *b, int count)
{
    for (int i = 0; atomic_load(&b->services) != count; i++) {
        if (i > 60000)
            fail_msg("%d services, not %d", atomic_load(&b->services), count);
        job_sleep_ms(2);
    }
}

/* --- kill -9 --------------------------------------------------------------------------------------- */

static void test_one_killed(void **state)
{
    struct board *b = new_board();
    struct job j = {.ranks = 3, .tallyds = 2, .main = train, .arg = b, .settings = SETTINGS};
    job_start(&j);
    some_steps(b, 5);
    kill_tallyd(&j, 1, SIGKILL);
    await_services(b, 4);
    some_steps(b, 5);
    kill_tallyd(&j, 0, SIGKILL);
    await_services(b, 3);
    end(&j, b);
}

/* All at once, and so one during the change that another has caused. */
static void test_all_killed(void **state)
{
    for (int i = 0; i < 4; i++) {
        struct board *b = new_board();
        struct job j = {.ranks = 2 + i, .tallyds = 4, .main = train, .arg = b, .settings = SETTINGS};
        job_start(&j);
        some_steps(b, 3 + i);
        for (int t = 0; t < 4; t++) {
            if (i > 1)
                job_sleep_ms(t * i % 3);
            kill_tallyd(&j, t, SIGKILL);
        }
        await_services(b, 2 + i);
        end(&j, b);
    }
}

/* --- join, leave, stop ----------------------------------------------------------------------------- */

static void test_join_and_drain(void **state)
{
    struct board *b = new_board();
    struct job j = {.ranks = 3, .tallyds = 1, .main = train, .arg = b, .settings = SETTINGS};
    job_start(&j);
    some_steps(b, 3);
    j.tallyds = 3;
    for (int round = 0; round < 3; round++) {
        job_start_tallyd(&j, 1);
        if (round)
            job_start_tallyd(&j, 2);
        await_services(b, round ? 6 : 5);
        some_steps(b, 3);
        for (int t = 1; t < (round ? 3 : 2); t++) {
            kill_tallyd(&j, t, SIGTERM);
            assert_int_equal(job_wait_tallyd(&j, t), 0);
        }
        await_services(b, 4);
        some_steps(b, 3);
    }
    job_log_lacks(&j, 0, "is out:");
    job_log_holds(&j, 0, "tally warning rank 0 join: tallyd 1 on ");
    job_log_holds(&j, 0, ") is in; the job goes on with it");
    job_log_holds(&j, 0, ") has left; the job goes on without it");
    end(&j, b);
}

/* Those that come go again at once, and others die meanwhile. */
static void await_parts(struct board *b, int bytes)
{
    for (int i = 0; atomic_load(&b->part_bytes) != bytes; i++) {
        if (i > 60000)
            fail_msg("parts of %d bytes, not %d", atomic_load(&b->part_bytes), bytes);
        job_sleep_ms(2);
    }
}

/* All gradients go to a tallyd with a fast card, in large parts; without it what is left are slow cards and small parts.
 * Rounds under way keep the parts that they have begun with. */
static void test_parts_change_their_size(void **state)
{
    struct board *b = new_board();
    struct job j = {.ranks = 4, .tallyds = 1, .main = train, .arg = b, .settings = {"TALLY_BANDWIDTH=16G"}};
    b->uneven = true;
    job_start(&j);
    await_parts(b, 512 << 10);
    some_steps(b, 3);
    for (int round = 0; round < 3; round++) {
        kill_tallyd(&j, 0, round == 1 ? SIGTERM : SIGKILL);
        if (round == 1)
            job_wait_tallyd(&j, 0);
        await_parts(b, 60 << 10);
        some_steps(b, 3);
        job_start_tallyd(&j, 0);
        await_parts(b, 512 << 10);
        some_steps(b, 3);
    }
    end(&j, b);
}

static void test_all_together(void **state)
{
    struct board *b = new_board();
    struct job j = {.ranks = 2, .tallyds = 1, .main = train, .arg = b, .settings = SETTINGS};
    uint64_t s = 99;
    job_start(&j);
    some_steps(b, 3);
    j.tallyds = 4;
    for (int i = 0; i < (UNDER_SANITIZER ? 8 : 20); i++) {
        int t = (int)(job_random(&s) % 4);
        bool runs = j.tallyd_pid[t] && j.tallyd_status[t] == -1;
        if (!runs)
            job_start_tallyd(&j, t);
        else
            kill_tallyd(&j, t, job_random(&s) % 3 ? SIGKILL : SIGTERM);
        if (runs && j.tallyd_status[t] == -1)
            assert_int_equal(job_wait_tallyd(&j, t), 0);
        job_sleep_ms((int)(job_random(&s) % 60));
    }
    end(&j, b);
}

/* Silent for 5 s: it is out.  When it goes on it finds its connections closed, drops what it had and comes again. */
static void test_stopped(void **state)
{
    struct board *b = new_board();
    struct job j = {
        .ranks = 3, .tallyds = 2, .tallyd_stays = true, .main = train, .arg = b, .settings = SETTINGS};
    job_start(&j);
    some_steps(b, 5);
    kill_tallyd(&j, 0, SIGSTOP);
    await_services(b, 4);
    some_steps(b, 5);
    kill_tallyd(&j, 0, SIGCONT);
    await_services(b, 5);
    some_steps(b, 5);
    end(&j, b);
}

/* --- the coordinator ------------------------------------------------------------------------------- */

static void await_log(struct job *j, int index, const char *part)
{
    for (int i = 0; !strstr(job_log(j, index), part); i++) {
        if (i > 60000)
            job_log_holds(j, index, part);
        job_sleep_ms(2);
    }
}

static void lose_coordinator(struct job *j, pid_t coordinator)
{
    kill(coordinator, SIGKILL);
    waitpid(coordinator, NULL, 0);
    await_log(j, 0, "the job goes on, and looks for it");
}

/* Without it rounds go on; services come and go once there is another. */
static void test_coordinator_killed(void **state)
{
    struct board *b = new_board();
    struct job j = {.ranks = 3, .tallyds = 2, .main = train, .arg = b, .settings = SETTINGS};
    j.port = job_free_port();
    pid_t coordinator = job_start_coordinator(j.port);
    job_start(&j);
    /* This coordinator has no TALLY_SERVERS, so it starts the job without waiting for tallyd. */
    await_services(b, 5);
    some_steps(b, 3);
    j.tallyds = 3;
    for (int i = 0; i < 2; i++) {
        lose_coordinator(&j, coordinator);
        some_steps(b, 10);
        if (i == 1)
            kill_tallyd(&j, 0, SIGKILL); /* while there is nobody to say what becomes of it */
        coordinator = job_start_coordinator(j.port);
        if (i == 0)
            job_start_tallyd(&j, 2);
        await_services(b, i == 0 ? 6 : 5);
        some_steps(b, 3);
    }
    job_log_holds(&j, 0, " is gone (");
    job_log_holds(&j, 0, " is back: services come and go again");
    end(&j, b);
    kill(coordinator, SIGKILL);
    waitpid(coordinator, NULL, 0);
}

static int leaves_unheard(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c;
    CHECK(tally_comm_open(NULL, &c) == 0);
    take_step(c, 0);
    if (rank == 0)
        atomic_store(&b->stage, 1);
    job_await(&b->stage, rank == 1 ? 2 : 4);
    if (rank == 1)
        atomic_store(&b->stage, 3);
    CHECK(tally_comm_status(c, NULL) == 0);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

/* A rank says goodbye while there is nobody to hear it, and stays for a while; the coordinator that comes hears it, and
 * does not take it for dead when it goes. */
static void test_rank_leaves_without_coordinator(void **state)
{
    struct board *b = new_board();
    static const int machine[] = {0, 0, 1}; /* of rank 1 nobody needs a service */
    struct job j = {.ranks = 3, .main = leaves_unheard, .arg = b, .machine = machine, .settings = SETTINGS};
    j.port = job_free_port();
    pid_t coordinator = job_start_coordinator(j.port);
    job_start(&j);
    job_await(&b->stage, 1);
    lose_coordinator(&j, coordinator);
    job_sleep_ms(100); /* so has rank 1 noticed, */
    atomic_store(&b->stage, 2);
    job_await(&b->stage, 3);
    job_sleep_ms(100); /* and said goodbye */
    coordinator = job_start_coordinator(j.port);
    assert_int_equal(job_wait_rank(&j, 1), 0);
    job_sleep_ms(500); /* what there is to be said of it is said */
    atomic_store(&b->stage, 4);
    job_finish(&j);
    job_clear(&j);
    kill(coordinator, SIGKILL);
    waitpid(coordinator, NULL, 0);
}

static int goes_on_until_told(int rank, void *arg)
{
    struct board *b = arg;
    const char *why;
    tally_comm *c;
    float x = 1;
    CHECK(tally_comm_open(NULL, &c) == 0);
    if (rank == 0)
        atomic_store(&b->stage, 1);
    job_await(&b->stage, 2);
    for (int err = 0; !err;) {
        tally_op *op;
        CHECK(tally_push_pull(c, "x", &x, &x, 1, TALLY_FLOAT32, TALLY_MAX, NULL, &op) == 0);
        err = tally_op_wait(op, -1);
        tally_op_free(op);
    }
    CHECK(tally_comm_status(c, &why) == -ECONNRESET);
    CHECK(strstr(why, "rank 1 on ") && strstr(why, " has died"));
    tally_comm_close(c);
    return 0;
}

/* There is nobody whom its sockets would tell, but its neighbours see it. */
static void test_rank_killed_without_coordinator(void **state)
{
    struct board *b = new_board();
    static const int machine[3] = {0};
    struct job j = {.ranks = 3, .main = goes_on_until_told, .arg = b, .machine = machine};
    j.port = job_free_port();
    pid_t coordinator = job_start_coordinator(j.port);
    job_start(&j);
    job_await(&b->stage, 1);
    lose_coordinator(&j, coordinator);
    atomic_store(&b->stage, 2);
    job_sleep_ms(20);
    kill(j.rank_pid[1], SIGKILL);
    assert_int_not_equal(job_wait_rank(&j, 1), 0);
    for (int rank = 0; rank < 3; rank += 2)
        if (job_wait_rank(&j, rank) != 0)
            job_finish(&j);
    job_clear(&j);
}

/* Some of many are killed, and all start again at once: until the coordinator is done with the first start they stand at
 * its door and knock. */
static void test_coordinator_serves_the_restarted_job(void **state)
{
    enum { MANY = 12 };
    struct board *b = new_board();
    struct job j = {.ranks = MANY,
                    .main = train,
                    .arg = b,
                    .settings = {"TALLY_PART_BYTES=16K", "TALLY_LOCAL=off", "TALLY_JOIN_TIMEOUT=60"}};
    j.port = job_free_port();
    pid_t coordinator = job_start_coordinator(j.port);
    job_start(&j);
    for (int i = 0; i < 3; i++) {
        some_steps(b, 2);
        kill(j.rank_pid[i], SIGKILL);
        for (int rank = 0; rank < MANY; rank++)
            assert_int_not_equal(job_wait_rank(&j, rank), 0);
        atomic_store(&b->stage, 0);
        for (int rank = 0; rank < MANY; rank++)
            job_start_rank(&j, rank);
    }
    end(&j, b);
    kill(coordinator, SIGKILL);
    waitpid(coordinator, NULL, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_killed),
        cmocka_unit_test(test_all_killed),
        cmocka_unit_test(test_join_and_drain),
        cmocka_unit_test(test_parts_change_their_size),
        cmocka_unit_test(test_all_together),
        cmocka_unit_test(test_stopped),
        cmocka_unit_test(test_coordinator_killed),
        cmocka_unit_test(test_rank_leaves_without_coordinator),
        cmocka_unit_test(test_rank_killed_without_coordinator),
        cmocka_unit_test(test_coordinator_serves_the_restarted_job),
    };
    return cmocka_run_group_tests_name("epoch", tests, NULL, NULL);
}
