/* shared_moves_test.c - shared tensors whose services die, leave, come and get other shares.  Parts go to other services, every
 * addition counts once. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>

#include "comm/comm.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/path/doubt.h"
#include "comm/path/peer.h"
#include "job.h"
#include "shared.h"

#include <cmocka.h>

struct board {
    atomic_int stage, services; /* additions that have ended; as rank 0 sees it */
    atomic_bool enough;         /* stop, whatever `steps` says */
    int count, steps, losses, idle;
    uint32_t staleness;
    int made[JOB_MOST_RANKS]; /* additions of each rank */
};

/* All additions are in the values. */
static void check(const struct board *b, const int64_t *values, int ranks)
{
    for (int i = 0; i < b->count; i++) {
        int64_t wanted = i;
        for (int rank = 0; rank < ranks; rank++)
            wanted += b->made[rank] * shared_difference(rank, i);
        CHECK(values[i] == wanted);
    }
}

/* Add until all steps are made, whatever happens to services meanwhile. */
static int run_adding(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    int64_t *first = shared_first(b->count), *mine = shared_differences(rank, b->count), one = 1;
    uint64_t random = (uint64_t)rank * 131 + (uint64_t)b->steps;
    int lost = 0;
    shared_create(c, "w", first, (size_t)b->count, TALLY_INT64, b->staleness);
    shared_create(c, "small", first, 1, TALLY_INT64, 0);
    for (int step = 1; step <= b->steps && !atomic_load(&b->enough); step++) {
        tally_op *op;
        CHECK(tally_shared_add(c, "w", mine, NULL, &op) == 0);
        if (lost < b->losses && job_random(&random) % 4 == 0) {
            lost++;
            shared_lose_a_connection(&random);
        }
        const int64_t *now = shared_values_of(op);
        for (int i = 0; i < b->count; i += b->count / 50 + 1)
            CHECK(now[i] >= i + step * shared_difference(rank, i));
        shared_add(c, "small", &one);
        b->made[rank] = step;
        if (rank == 0)
            atomic_store(&b->services, tally_comm_service_count(c));
        atomic_fetch_add(&b->stage, 1);
        if (b->idle && step == b->steps / 2 &&
            rank % 2) /* all that happens until then finds this rank between operations */
            job_await(&b->stage, b->idle);
    }
    job_barrier(c);
    check(b, shared_read(c, "w"), tally_comm_size(c));
    int64_t all = 0;
    for (int i = 0; i < tally_comm_size(c); i++)
        all += b->made[i];
    CHECK(*shared_read(c, "small") == all);
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    free(first);
    free(mine);
    return 0;
}

static struct board *board_of(int count, int steps, uint32_t staleness)
{
    struct board *b = job_shared(sizeof *b);
    *b = (struct board){.count = count, .steps = steps, .staleness = staleness};
    return b;
}

static void end_ranks(struct job *j)
{
    for (int rank = 0; rank < j->ranks; rank++)
        assert_int_equal(job_wait_rank(j, rank), 0);
    job_clear(j);
}

static void await_services(struct board *b, int services)
{
    while (atomic_load(&b->services) != services)
        job_sleep_ms(2);
}

/* --- death --------------------------------------------------------------------------------------- */

/* Each of two tallyd dies, after so many additions: the second one may have parts of the first. */
static void test_death(void **state)
{
    static const int at[][2] = {{3, 4}, {10, 60}, {30, 31}};
    for (size_t i = 0; i < sizeof at / sizeof at[0]; i++) {
        struct board *b = board_of(60000, 40, i == 1 ? 2 : 0);
        struct job j = {
            .ranks = 3, .tallyds = 2, .main = run_adding, .arg = b, .settings = {"TALLY_PART_BYTES=32K"}};
        job_start(&j);
        for (int t = 0; t < 2; t++) {
            job_await(&b->stage, at[i][t]);
            kill(j.tallyd_pid[(i + (size_t)t) % 2], SIGKILL);
        }
        end_ranks(&j);
    }
}

/* Ranks 1 and 3 have nothing in flight while services die: they hold values all the same, and go on afterwards. */
static void test_death_between_operations(void **state)
{
    enum { STEPS = 20, KILL_AT = 4 * STEPS / 2 };
    struct board *b = board_of(50000, STEPS, 0);
    b->idle = 2 * STEPS / 2 + 2 * STEPS; /* rank 0 and 2 have made all steps */
    struct job j = {
        .ranks = 4, .tallyds = 2, .main = run_adding, .arg = b, .settings = {"TALLY_PART_BYTES=32K"}};
    job_start(&j);
    job_await(&b->stage, KILL_AT);
    kill(j.tallyd_pid[0], SIGKILL);
    job_await(&b->stage, b->idle);
    kill(j.tallyd_pid[1], SIGKILL);
    end_ranks(&j);
}

/* One that stands still is put out, and takes over its share anew when it comes again. */
static void test_stopped(void **state)
{
    struct board *b = board_of(40000, 1 << 20, 0);
    struct job j = {.ranks = 2,
                    .tallyds = 1,
                    .tallyd_stays = true,
                    .main = run_adding,
                    .arg = b,
                    .settings = {"TALLY_PART_BYTES=32K"}};
    job_start(&j);
    job_await(&b->stage, 20);
    kill(j.tallyd_pid[0], SIGSTOP);
    await_services(b, 2);
    kill(j.tallyd_pid[0], SIGCONT);
    await_services(b, 3);
    job_sleep_ms(50);
    atomic_store(&b->enough, true);
    end_ranks(&j);
}

/* --- leaving and coming -------------------------------------------------------------------------- */

static void test_drain(void **state)
{
    for (int staleness = 0; staleness < 3; staleness += 2) {
        struct board *b = board_of(60000, 60, (uint32_t)staleness);
        struct job j = {
            .ranks = 3, .tallyds = 2, .main = run_adding, .arg = b, .settings = {"TALLY_PART_BYTES=32K"}};
        job_start(&j);
        job_await(&b->stage, 20);
        kill(j.tallyd_pid[1], SIGTERM);
        assert_int_equal(job_wait_tallyd(&j, 1), 0);
        job_await(&b->stage, 100);
        kill(j.tallyd_pid[0], SIGTERM);
        end_ranks(&j);
    }
}

/* A tallyd that comes takes over its share.  It has additions in flight when it dies or leaves, and others take that over. */
static void test_come_and_go(void **state)
{
    struct board *b = board_of(60000, 1 << 20, 0);
    b->losses = 2;
    struct job j = {
        .ranks = 3, .main = run_adding, .arg = b, .settings = {"TALLY_PART_BYTES=32K", "TALLY_LOG=debug"}};
    job_start(&j);
    for (int i = 0; i < 3; i++) {
        await_services(b, 3);
        j.tallyds = i + 1;
        job_start_tallyd(&j, i);
        await_services(b, 4);
        job_sleep_ms(50);
        kill(j.tallyd_pid[i], i == 1 ? SIGTERM : SIGKILL);
    }
    await_services(b, 3);
    atomic_store(&b->enough, true);
    for (int rank = 0; rank < j.ranks; rank++)
        assert_int_equal(job_wait_rank(&j, rank), 0);
    const char *log = job_log(&j, 0); /* three have come, and three have gone */
    for (int i = 0; i < 6; i++) {
        log = strstr(log, "bytes of shared tensors go to other services");
        assert_non_null(log);
        log++;
    }
    job_clear(&j);
}

/* --- create -------------------------------------------------------------------------------------- */

enum { TENSORS = 60, LENGTH = 9000 };

/* Create tensors one after another, ranks at different times, and add to each as soon as it is there. */
static int run_creating(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    int64_t *first = shared_first(LENGTH), *mine = shared_differences(rank, LENGTH);
    uint64_t random = (uint64_t)(rank + 1) * 17;
    char name[16];
    for (int i = 0; i < TENSORS; i++) {
        snprintf(name, sizeof name, "w%d", i);
        if (job_random(&random) % 3 == 0)
            job_sleep_ms((int)(job_random(&random) % 12));
        shared_create(c, name, first, LENGTH, TALLY_INT64, 0);
        for (int step = 0; step <= i % 3; step++)
            shared_add(c, name, mine);
        if (rank == 0)
            atomic_store(&b->services, tally_comm_service_count(c));
        atomic_fetch_add(&b->stage, 1);
    }
    job_barrier(c);
    for (int i = 0; i < TENSORS; i++) {
        snprintf(name, sizeof name, "w%d", i);
        shared_check(shared_read(c, name), tally_comm_size(c), LENGTH, i % 3 + 1);
    }
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    free(first);
    free(mine);
    return 0;
}

/* Services come and go while creates are in flight on some ranks, have ended on others, and have not begun on others. */
static void test_creating(void **state)
{
    for (int seed = 0; seed < 4; seed++) {
        struct board *b = board_of(0, 0, 0);
        uint64_t random = (uint64_t)seed + 3;
        struct job j = {
            .ranks = 3, .tallyds = 2, .main = run_creating, .arg = b, .settings = {"TALLY_PART_BYTES=16K"}};
        job_start(&j);
        for (int i = 0; i < 4; i++) {
            job_await(&b->stage, (i + 1) * 35 + (int)(job_random(&random) % 15));
            if (i == 1)
                job_start_tallyd(&j, j.tallyds++);
            else
                kill(j.tallyd_pid[i == 3 ? 2 : i / 2], (seed + i) % 3 ? SIGKILL : SIGTERM);
        }
        end_ranks(&j);
    }
}

/* Another rank creates it long after its first rank, and a service of that split has died meanwhile. */
static int run_late(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    int64_t *first = shared_first(LENGTH), *mine = shared_differences(rank, LENGTH);
    int services = tally_comm_service_count(c);
    tally_op *op;
    if (rank == 2) {
        job_await(&b->stage, 1);
        while (tally_comm_service_count(c) == services)
            job_sleep_ms(2);
    }
    CHECK(tally_shared_create(c, "w", first, LENGTH, TALLY_INT64, 0, NULL, &op) == 0);
    if (rank == 0)
        atomic_store(&b->stage, 1);
    job_expect(op, 0);
    shared_add(c, "w", mine);
    atomic_fetch_add(&b->services, 1);
    job_await(&b->services, 3);
    atomic_fetch_add(&b->stage, rank == 0); /* now the other tallyd dies */
    while (tally_comm_service_count(c) != 3)
        job_sleep_ms(2);
    shared_add(c, "w", mine);
    job_barrier(c);
    shared_check(shared_read(c, "w"), tally_comm_size(c), LENGTH, 2);
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    free(first);
    free(mine);
    return 0;
}

static void test_late_create(void **state)
{
    struct board *b = board_of(0, 0, 0);
    struct job j = {
        .ranks = 3, .tallyds = 2, .main = run_late, .arg = b, .settings = {"TALLY_PART_BYTES=16K"}};
    job_start(&j);
    for (int t = 0; t < 2; t++) {
        job_await(&b->stage, 1 + t);
        job_sleep_ms(50);
        kill(j.tallyd_pid[t], SIGKILL);
    }
    end_ranks(&j);
}

/* --- memory -------------------------------------------------------------------------------------- */

/* A tallyd with much memory dies, and the ranks' services have none for its parts: the ranks hear how much is missing, and where. */
static int run_short(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    enum { COUNT = 380000 };
    int64_t *x = shared_first(COUNT);
    int err = 0;
    shared_create(c, "w", x, COUNT, TALLY_INT64, 0);
    while (!err) {
        tally_op *op;
        CHECK(tally_shared_add(c, "w", x, NULL, &op) == 0);
        err = tally_op_wait(op, -1);
        if (err) {
            CHECK_HOLDS(tally_op_error(op), "has no memory for a part of");
            CHECK_HOLDS(tally_op_error(op), "that has moved to it: it keeps");
            CHECK_HOLDS(tally_op_error(op), "(TALLY_MEMORY)");
        }
        tally_op_free(op);
        atomic_fetch_add(&b->stage, 1);
    }
    CHECK(err == -ENOMEM);
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    free(x);
    return 0;
}

static void test_short(void **state)
{
    struct board *b = board_of(0, 0, 0);
    struct job j = {.ranks = 2,
                    .tallyds = 1,
                    .main = run_short,
                    .arg = b,
                    .tallyd_options = {"--memory", "64M"},
                    .settings = {"TALLY_PART_BYTES=32K", "TALLY_MEMORY=1M", "TALLY_SPLIT=optimal"}};
    job_kill_tallyd(&j, &b->stage, 20);
}

enum { TALLYD = 2, REFUSER = 1, SENT = 1, REFUSED = 2, KILLED = 3 };

/* Has the create's part for the tallyd been sent?  It is home of none. */
static bool is_sent(const tally_op *op)
{
    bool sent = false;
    for (uint32_t i = 1; i < op->part_count; i++)
        sent |= op->parts[i].owner == TALLYD && op->parts[i].state == PART_SENT && !op->parts[i].frames;
    return sent;
}

/* Rank 1 does not hear from the tallyd that it refuses the create, and the tallyd dies. */
static void lose_a_verdict(tally_comm *c, struct board *b, const tally_op *op)
{
    struct tly_peer *p = &c->peers[TALLYD];
    tly_loop_lock(&c->loop);
    for (; !is_sent(op); tly_loop_lock(&c->loop)) {
        tly_loop_unlock(&c->loop);
        job_sleep_ms(2);
    }
    atomic_store(&b->stage, SENT); /* now rank 0 pushes */
    job_await(&b->stage, KILLED);
    p->gone = true;
    tly_doubt_begin(p);
    tly_peer_drop(p);
    tly_loop_unlock(&c->loop);
}

/* Creates that the tallyd has no memory for fail on all ranks, also if it dies before all have heard of it. */
static int run_refused(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    enum { COUNT = 3 * 4096 }; /* a part for each service */
    int64_t *x = shared_first(COUNT);
    tally_op *op = NULL;
    char name[16];
    int err = 0;
    for (int i = 0; !err; i++) {
        snprintf(name, sizeof name, "w%d", i);
        CHECK(tally_shared_create(c, name, x, COUNT, TALLY_INT64, 0, NULL, &op) == 0);
        err = job_ends(op);
        job_barrier(c);
    }
    CHECK(err == -ENOMEM);
    if (rank == 0)
        job_await(&b->stage, SENT);
    CHECK(tally_shared_create(c, "last", x, COUNT, TALLY_INT64, 0, NULL, &op) == 0);
    if (rank == REFUSER)
        lose_a_verdict(c, b, op);
    CHECK(tally_op_wait(op, -1) == -ENOMEM);
    CHECK_HOLDS(tally_op_error(op), "has no memory for a part of");
    tally_op_free(op);
    if (rank == 0)
        atomic_store(&b->stage, REFUSED);
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    free(x);
    return 0;
}

static void test_refused(void **state)
{
    struct board *b = board_of(0, 0, 0);
    struct job j = {.ranks = 2,
                    .tallyds = 1,
                    .main = run_refused,
                    .arg = b,
                    .tallyd_options = {"--memory", "1M"},
                    .settings = {"TALLY_PART_BYTES=32K", "TALLY_MEMORY=8M", "TALLY_SPLIT=optimal"}};
    job_start(&j);
    job_await(&b->stage, REFUSED);
    kill(j.tallyd_pid[0], SIGKILL);
    atomic_store(&b->stage, KILLED);
    end_ranks(&j);
}

/* --- chaos --------------------------------------------------------------------------------------- */

/* Services die, leave, come and stand still, connections break, and the sums are exact. */
static void chaos(int seed)
{
    uint64_t random = (uint64_t)seed + 77;
    struct board *b = board_of(40000, 120, seed % 3 ? 0 : 2);
    b->losses = 4;
    struct job j = {.ranks = 4,
                    .tallyds = 2 + seed % 2,
                    .main = run_adding,
                    .arg = b,
                    .settings = {"TALLY_PART_BYTES=16K", seed % 2 ? "TALLY_CHECKSUM=1" : "TALLY_MEMORY=4M"}};
    int tallyds = j.tallyds;
    job_start(&j);
    for (int i = 0; i < 6; i++) {
        job_await(&b->stage, 5 + i * 70 + (int)(job_random(&random) % 20));
        uint64_t what = job_random(&random) % 4;
        int t = (int)(job_random(&random) % (uint64_t)tallyds);
        bool lives = j.tallyd_status[t] == -1 && kill(j.tallyd_pid[t], 0) == 0;
        if (what == 0 && lives) {
            kill(j.tallyd_pid[t], SIGKILL);
        } else if (what == 1 && lives) {
            kill(j.tallyd_pid[t], SIGTERM);
        } else if (what == 2 && tallyds < JOB_MOST_TALLYDS) {
            j.tallyds = ++tallyds;
            job_start_tallyd(&j, tallyds - 1);
        } else {
            pid_t pid = lives && what == 3 ? j.tallyd_pid[t] : j.rank_pid[t % j.ranks];
            kill(pid, SIGSTOP);
            job_sleep_ms(20 + (int)(job_random(&random) % 200));
            kill(pid, SIGCONT);
        }
    }
    end_ranks(&j);
}

static void test_chaos(void **state)
{
    for (int seed = 0; seed < 8; seed++)
        chaos(seed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_death),       cmocka_unit_test(test_death_between_operations),
        cmocka_unit_test(test_stopped),     cmocka_unit_test(test_drain),
        cmocka_unit_test(test_come_and_go), cmocka_unit_test(test_creating),
        cmocka_unit_test(test_late_create), cmocka_unit_test(test_short),
        cmocka_unit_test(test_refused),     cmocka_unit_test(test_chaos),
    };
    return cmocka_run_group_tests_name("shared_moves", tests, NULL, NULL);
}
