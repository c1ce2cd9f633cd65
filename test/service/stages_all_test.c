/* stages_all_test.c - a stage between the tensor and the network, under all operations, on all routes: services, teams, and the
 * shared memory of one machine.  Results are right; a stage that fails on the way out fails the operation on all ranks, one
 * that fails on the way in on its own; ranks die and join meanwhile.  The stage is later.c's. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>

#include "base/loop.h"
#include "comm/comm.h"
#include "comm/op/op.h"
#include "comm/path/chain.h"
#include "job.h"
#include "later.h"
#include "ops/local.h"

#include <cmocka.h>

enum { MOST_RANKS = 4, COUNT = UNDER_SANITIZER ? 6000 : 20000, STEPS = UNDER_SANITIZER ? 2 : 4 };
/* Elements of a piece that goes asked for, in an allgather of equal pieces. */
enum { MANY = 140000 };

static const int pairs[] = {0, 0, 1, 1}, together[] = {0, 0, 0, 0};

static const struct layout {
    int ranks, tallyds;
    const int *machine;
} layouts[] = {{3, 0}, {2, 1}, {4, 0, pairs}, {3, 0, together}};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

struct board {
    int only;   /* the only rank that has a stage; -1: all have */
    bool codec; /* all have one behind the engine */
    bool dies;  /* rank 1 */
    atomic_int at, err[MOST_RANKS];
};

static bool staged(const struct board *b, int rank)
{
    return b->only < 0 || rank == b->only;
}

static tally_comm *open_with_stage(const struct board *b, int rank)
{
    later_use(staged(b, rank), b->codec);
    atomic_store(&later_device.suits_all, true);
    return job_open();
}

/* All is given back. */
static int leave(tally_comm *c)
{
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    CHECK(later_device.begun == later_device.ended && !later_device.count);
    return 0;
}

/* --- the operations ------------------------------------------------------------------------------ */

static int64_t in[MOST_RANKS * MANY], out[MOST_RANKS * MANY];
static size_t give[MOST_RANKS], take[MOST_RANKS];

static int64_t value(int rank, size_t i, int step)
{
    return (rank + 1) * (int64_t)(1 + (i * 31 + (size_t)step) % 1000);
}

static void fill(int rank, size_t count, int step)
{
    for (size_t i = 0; i < count; i++)
        in[i] = value(rank, i, step);
    memset(out, 0xff, sizeof out);
}

static int64_t sum(int ranks, size_t i, int step)
{
    return value(0, i, step) * ranks * (ranks + 1) / 2;
}

struct call {
    const char *name;
    /* All ranks submit it. */
    int (*submit)(tally_comm *c, const char *name, int rank, int n, int step, tally_op **op);
    /* Its result is right. */
    void (*check)(tally_op *op, int rank, int n, int step);
};

static int submit_push_pull(tally_comm *c, const char *name, int rank, int n, int step, tally_op **op)
{
    fill(rank, COUNT, step);
    return tally_push_pull(c, name, in, out, COUNT, TALLY_INT64, TALLY_SUM, NULL, op);
}

static void check_push_pull(tally_op *op, int rank, int n, int step)
{
    for (size_t i = 0; i < COUNT; i++)
        CHECK(out[i] == sum(n, i, step));
}

static int submit_reduce(tally_comm *c, const char *name, int rank, int n, int step, tally_op **op)
{
    fill(rank, COUNT, step);
    return tally_reduce(c, name, in, rank == 0 ? out : NULL, COUNT, TALLY_INT64, TALLY_SUM, 0, NULL, op);
}

static void check_reduce(tally_op *op, int rank, int n, int step)
{
    for (size_t i = 0; i < COUNT && rank == 0; i++)
        CHECK(out[i] == sum(n, i, step));
}

/* Rank r's piece has r shares of all. */
static size_t piece(int rank, int n, size_t *start)
{
    size_t share = 2 * (size_t)COUNT / (size_t)(n * (n + 1));
    *start = share * (size_t)(rank * (rank + 1) / 2);
    return share * (size_t)(rank + 1);
}

static int submit_reduce_scatter(tally_comm *c, const char *name, int rank, int n, int step, tally_op **op)
{
    size_t start;
    fill(rank, COUNT, step);
    for (int i = 0; i < n; i++)
        give[i] = piece(i, n, &start);
    return tally_reduce_scatter(c, name, in, out, give, TALLY_INT64, TALLY_SUM, NULL, op);
}

static void check_reduce_scatter(tally_op *op, int rank, int n, int step)
{
    size_t start, count = piece(rank, n, &start);
    for (size_t i = 0; i < count; i++)
        CHECK(out[i] == sum(n, start + i, step));
}

static int submit_broadcast(tally_comm *c, const char *name, int rank, int n, int step, tally_op **op)
{
    fill(rank, COUNT, step);
    return tally_broadcast(c, name, in, COUNT, TALLY_INT64, 0, NULL, op);
}

static void check_broadcast(tally_op *op, int rank, int n, int step)
{
    for (size_t i = 0; i < COUNT; i++)
        CHECK(in[i] == value(0, i, step));
}

static int submit_allgather(tally_comm *c, const char *name, int rank, int n, int step, tally_op **op)
{
    size_t start, count = piece(rank, n, &start);
    fill(rank, count, step);
    return tally_allgather(c, name, in, count, TALLY_INT64, NULL, op);
}

static void check_allgather(tally_op *op, int rank, int n, int step)
{
    const void *data;
    const int64_t *counts;
    size_t bytes, start;
    CHECK(tally_op_gathered(op, &data, &bytes, &counts) == 0);
    const int64_t *all = data;
    for (int r = 0; r < n; r++) {
        CHECK((size_t)counts[r] == piece(r, n, &start));
        for (size_t i = 0; i < (size_t)counts[r]; i++)
            CHECK(*all++ == value(r, i, step));
    }
    CHECK(bytes == (size_t)((const uint8_t *)all - (const uint8_t *)data));
}

static void check_equal(size_t count, int n, int step)
{
    for (int r = 0; r < n; r++)
        for (size_t i = 0; i < count; i++)
            CHECK(out[(size_t)r * count + i] == value(r, i, step));
}

/* Pieces that go to each rank unasked, and larger ones. */
static int submit_small_into(tally_comm *c, const char *name, int rank, int n, int step, tally_op **op)
{
    fill(rank, COUNT, step);
    return tally_allgather_into(c, name, in, out, COUNT, TALLY_INT64, NULL, op);
}

static void check_small_into(tally_op *op, int rank, int n, int step)
{
    check_equal(COUNT, n, step);
}

static int submit_large_into(tally_comm *c, const char *name, int rank, int n, int step, tally_op **op)
{
    fill(rank, MANY, step);
    return tally_allgather_into(c, name, in, out, MANY, TALLY_INT64, NULL, op);
}

static void check_large_into(tally_op *op, int rank, int n, int step)
{
    check_equal(MANY, n, step);
}

/* Rank `from` gives rank `to` so much. */
static size_t between(int from, int to)
{
    return (size_t)COUNT / 8 * (size_t)(1 + (from + 2 * to) % 3);
}

static int submit_alltoall(tally_comm *c, const char *name, int rank, int n, int step, tally_op **op)
{
    fill(rank, COUNT * 2, step);
    for (int i = 0; i < n; i++) {
        give[i] = between(rank, i);
        take[i] = between(i, rank);
    }
    return tally_alltoall(c, name, in, give, out, take, TALLY_INT64, NULL, op);
}

static void check_alltoall(tally_op *op, int rank, int n, int step)
{
    const int64_t *got = out;
    for (int from = 0; from < n; from++) {
        size_t start = 0;
        for (int to = 0; to < rank; to++)
            start += between(from, to);
        for (size_t i = 0; i < between(from, rank); i++)
            CHECK(*got++ == value(from, start + i, step));
    }
}

static int submit_gather(tally_comm *c, const char *name, int rank, int n, int step, tally_op **op)
{
    size_t start, count = piece(rank, n, &start);
    fill(rank, count, step);
    for (int i = 0; i < n; i++)
        take[i] = piece(i, n, &start);
    return tally_gather(c, name, in, count, out, rank == 0 ? take : NULL, TALLY_INT64, 0, NULL, op);
}

static void check_gather(tally_op *op, int rank, int n, int step)
{
    for (int r = 0; r < n && rank == 0; r++) {
        size_t start, count = piece(r, n, &start);
        for (size_t i = 0; i < count; i++)
            CHECK(out[start + i] == value(r, i, step));
    }
}

static int submit_scatter(tally_comm *c, const char *name, int rank, int n, int step, tally_op **op)
{
    size_t start, count = piece(rank, n, &start);
    fill(rank, COUNT, step);
    for (int i = 0; i < n; i++)
        give[i] = piece(i, n, &start);
    return tally_scatter(c, name, in, rank == 0 ? give : NULL, out, count, TALLY_INT64, 0, NULL, op);
}

static void check_scatter(tally_op *op, int rank, int n, int step)
{
    size_t start, count = piece(rank, n, &start);
    for (size_t i = 0; i < count; i++)
        CHECK(out[i] == value(0, start + i, step));
}

static int submit_barrier(tally_comm *c, const char *name, int rank, int n, int step, tally_op **op)
{
    return tally_barrier(c, name, NULL, op);
}

static void check_barrier(tally_op *op, int rank, int n, int step)
{
}

static const struct call calls[] = {
    {"push_pull", submit_push_pull, check_push_pull},
    {"reduce", submit_reduce, check_reduce},
    {"reduce_scatter", submit_reduce_scatter, check_reduce_scatter},
    {"broadcast", submit_broadcast, check_broadcast},
    {"allgather", submit_allgather, check_allgather},
    {"small_into", submit_small_into, check_small_into},
    {"large_into", submit_large_into, check_large_into},
    {"alltoall", submit_alltoall, check_alltoall},
    {"gather", submit_gather, check_gather},
    {"scatter", submit_scatter, check_scatter},
    {"barrier", submit_barrier, check_barrier},
};
enum { CALLS = sizeof calls / sizeof *calls, BARRIER = CALLS - 1, ALLGATHER = 4 };

/* A stage has a memory for each piece of a reduce_scatter, and the network takes them. */
static bool is_shared(const struct tly_call *call)
{
    return call->local && (!call->pieces || call->local->gathered);
}

static void call_once(tally_comm *c, int which, int step)
{
    int rank = tally_comm_rank(c), n = tally_comm_size(c);
    tally_op *op;
    CHECK(calls[which].submit(c, calls[which].name, rank, n, step, &op) == 0);
    int err = tally_op_wait(op, -1);
    if (err)
        fprintf(stderr, "%s: %d: %s\n", calls[which].name, err, tally_op_error(op));
    CHECK(err == 0);
    calls[which].check(op, rank, n, step);
    if (tally_comm_machine_count(c) == 1 &&
        !tly_chain_is_empty(&op->chain)) /* no rank has had to divert it */
        CHECK(tly_chain_has_ended(&op->chain, STAGE_ENGINE) == is_shared(op->call));
    tally_op_free(op);
}

/* In each layout, where all ranks have the stage, and where one has. */
static void run_all(int (*main)(int rank, void *arg))
{
    struct board *b = job_shared(sizeof *b);
    for (int i = 0; i < 2 * LAYOUTS; i++) {
        const struct layout *l = &layouts[i % LAYOUTS];
        b->only = i < LAYOUTS ? -1 : 1;
        atomic_store(&b->at, 0);
        job_run(&(struct job){.ranks = l->ranks,
                              .tallyds = l->tallyds,
                              .machine = l->machine,
                              .main = main,
                              .arg = b,
                              .settings = {"TALLY_PART_BYTES=16K"}});
    }
}

/* --- results ------------------------------------------------------------------------------------- */

static int results(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = open_with_stage(b, rank);
    for (int step = 0; step < STEPS; step++)
        for (int i = 0; i < CALLS; i++) {
            int before = later_device.out + later_device.in;
            call_once(c, i, step);
            CHECK(i == BARRIER || i == ALLGATHER || !staged(b, rank) ||
                  later_device.out + later_device.in > before);
        }
    return leave(c);
}

static void test_results(void **state)
{
    run_all(results);
}

/* A group that shares memory has its ranks in an order of its own. */
static int gathers_in_group(int rank, void *arg)
{
    struct board *b = arg;
    static const int backwards[] = {2, 1};
    tally_comm *c = open_with_stage(b, rank);
    tally_group *g;
    if (rank == 1 || rank == 2)
        CHECK(tally_group_create(c, "backwards", backwards, 2, &g) == 0);
    for (int step = 0; step < 4 && (rank == 1 || rank == 2); step++) {
        struct tally_options o = job_in(g);
        tally_op *op;
        fill(rank, MANY, step);
        CHECK(tally_allgather_into(c, NULL, in, out, MANY, TALLY_INT64, &o, &op) == 0);
        CHECK(tally_op_wait(op, -1) == 0);
        for (size_t i = 0; i < MANY; i++)
            CHECK(out[i] == value(2, i, step) && out[MANY + i] == value(1, i, step));
        CHECK(step < 2 || !atomic_load(&op->shared.op.diverted));
        tally_op_free(op);
    }
    return leave(c);
}

static void test_group(void **state)
{
    static const int three_and_one[] = {0, 0, 0, 1};
    for (int i = 0; i < 4; i++) {
        struct board *b = job_shared(sizeof *b);
        b->only = i / 2 ? 1 : -1;
        job_run(&(struct job){
            .ranks = 4, .machine = i % 2 ? three_and_one : together, .main = gathers_in_group, .arg = b});
    }
}

/* --- failures ------------------------------------------------------------------------------------ */

/* Rank 1's stage fails part `part`, and how the operation ends on each rank is on the board.  It has failed: true. */
static bool fail_once(tally_comm *c, struct board *b, int which, int part, bool back)
{
    int rank = tally_comm_rank(c), n = tally_comm_size(c);
    atomic_int *request = back ? &later_device.fail_in : &later_device.fail_out;
    tally_op *op;
    if (rank == 1)
        atomic_store(request, part);
    CHECK(calls[which].submit(c, "bad", rank, n, 0, &op) == 0);
    int err = tally_op_wait(op, -1);
    if (err)
        CHECK_HOLDS(tally_op_error(op), "the stage fails on request");
    else
        calls[which].check(op, rank, n, 0);
    tally_op_free(op);
    atomic_store(&b->err[rank], err);
    if (rank == 1)
        atomic_store(&b->at, atomic_exchange(request, -1) < 0);
    job_barrier(c);
    bool has_failed = atomic_load(&b->at);
    if (rank == 1)
        CHECK((err != 0) == has_failed);
    else if (back)
        CHECK(err == 0);
    else if (!(which == ALLGATHER && part > 0)) /* then its pieces have been cut */
        CHECK((err != 0) == has_failed);
    else
        CHECK(err == 0);
    job_barrier(c);
    call_once(c, which, part);
    return has_failed;
}

static int failures(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = open_with_stage(b, rank);
    for (int i = 0; i < BARRIER; i++) {
        int failed = 0;
        for (int part = 0; part < 12; part += UNDER_SANITIZER ? 3 : 1)
            failed += fail_once(c, b, i, part, false);
        CHECK(failed > 0);
        for (int part = 0; part < 12; part += 5)
            fail_once(c, b, i, part, true);
    }
    return leave(c);
}

static void test_failures(void **state)
{
    run_all(failures);
}

/* --- who dies, and who joins --------------------------------------------------------------------- */

/* One that dies with parts in its stage ends the job on all. */
static int dies(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = open_with_stage(b, rank);
    const char *why;
    tally_op *op;
    call_once(c, 0, 0);
    job_barrier(c);
    if (rank == 1) {
        int begun = later_device.begun;
        later_hold(&later_device, LATER_ALL);
        CHECK(submit_push_pull(c, "last", rank, tally_comm_size(c), 1, &op) == 0);
        for (int i = 0; i < 60000; i++) {
            if (later_device.begun > begun && atomic_load(&b->at) == tally_comm_size(c) - 1)
                break;
            job_sleep_ms(1);
        }
        kill(getpid(), SIGKILL);
    }
    CHECK(submit_push_pull(c, "last", rank, tally_comm_size(c), 1, &op) == 0);
    atomic_fetch_add(&b->at, 1);
    CHECK(tally_op_wait(op, -1) < 0);
    tally_op_free(op);
    CHECK(tally_comm_status(c, &why) != 0);
    CHECK_HOLDS(why, "rank 1");
    CHECK(tally_comm_close(c) == 0);
    CHECK(later_device.begun == later_device.ended && !later_device.count);
    return 0;
}

static void test_dies(void **state)
{
    struct board *b = job_shared(sizeof *b);
    for (int i = 0; i < 2 * LAYOUTS; i++) {
        const struct layout *l = &layouts[i % LAYOUTS];
        struct job j = {
            .ranks = l->ranks, .tallyds = l->tallyds, .machine = l->machine, .main = dies, .arg = b};
        b->only = i < LAYOUTS ? -1 : 1;
        atomic_store(&b->at, 0);
        j.settings[0] = "TALLY_PART_BYTES=16K";
        job_start(&j);
        assert_int_equal(job_wait_rank(&j, 1), 128 + SIGKILL);
        for (int r = 0; r < l->ranks; r++)
            if (r != 1)
                assert_int_equal(job_wait_rank(&j, r), 0);
        job_clear(&j);
    }
}

/* A rank whose stage has done its work names the late rank, too. */
static int is_late(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = open_with_stage(b, rank);
    tally_op *op;
    if (rank == 2) {
        while (tally_comm_status(c, NULL) == 0)
            job_sleep_ms(10);
    } else {
        CHECK(submit_push_pull(c, "w", rank, tally_comm_size(c), 0, &op) == 0);
        CHECK(tally_op_wait(op, -1) == -ETIME);
        CHECK_HOLDS(tally_op_error(op), "for rank 2 (TALLY_TIMEOUT)");
        tally_op_free(op);
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_late(void **state)
{
    struct board *b = job_shared(sizeof *b);
    b->only = -1;
    for (int i = 0; i < 2; i++)
        job_run(&(struct job){.ranks = 3,
                              .machine = i ? together : NULL,
                              .main = is_late,
                              .arg = b,
                              .settings = {"TALLY_TIMEOUT=2"}});
}

static void join_all(tally_comm *c)
{
    tally_op *op;
    CHECK(tally_join(c, NULL, &op) == 0);
    CHECK(tally_op_wait(op, -1) == 0);
    tally_op_free(op);
}

/* Zeros stand for rank 0, also where the others must go to the service for that. */
static int joins(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = open_with_stage(b, rank);
    int n = tally_comm_size(c);
    for (int again = 0; again < 2; again++) {
        call_once(c, 0, again);
        for (int step = 0; step < STEPS && rank > 0; step++) {
            tally_op *op;
            CHECK(submit_push_pull(c, "w", rank, n, step, &op) == 0);
            CHECK(tally_op_wait(op, -1) == 0);
            if (tally_comm_machine_count(c) == 1) /* its memory is no pool's */
                CHECK(!tly_chain_has_ended(&op->chain, STAGE_ENGINE));
            tally_op_free(op);
            for (size_t i = 0; i < COUNT; i++)
                CHECK(out[i] == sum(n, i, step) - value(0, i, step));
        }
        join_all(c);
    }
    return leave(c);
}

static void test_joins(void **state)
{
    run_all(joins);
}

/* All submit while some ranks' stages hold theirs, and close once all has ended. */
static int overlaps(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = open_with_stage(b, rank);
    enum { FLIGHTS = 6 };
    static int64_t x[FLIGHTS][COUNT];
    tally_op *op[FLIGHTS];
    int n = tally_comm_size(c);
    for (int step = 0; step < STEPS; step++) {
        for (int i = 0; i < FLIGHTS; i++) {
            char name[8];
            int which = rank % 2 ? FLIGHTS - 1 - i : i; /* in opposite orders */
            snprintf(name, sizeof name, "f%d", which);
            for (size_t k = 0; k < COUNT; k++)
                x[which][k] = value(rank, k, which);
            CHECK(tally_push_pull(c, name, x[which], x[which], COUNT, TALLY_INT64, TALLY_SUM, NULL,
                                  &op[which]) == 0);
        }
        for (int i = 0; i < FLIGHTS; i++) {
            CHECK(tally_op_wait(op[i], -1) == 0);
            tally_op_free(op[i]);
            for (size_t k = 0; k < COUNT; k++)
                CHECK(x[i][k] == sum(n, k, i));
        }
    }
    return leave(c);
}

static void test_overlaps(void **state)
{
    run_all(overlaps);
}

/* Rank 1 reads no posts, so rank 0's mark has no room.  Rank 0's loop goes on all the same: it hears that rank 1 has died, or
 * the mark arrives once rank 1 reads again. */
static int full(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = open_with_stage(b, rank);
    enum { POSTS = 80 }; /* of 4 KB: the ring has 256 KB */
    static int8_t small[POSTS][4096];
    tally_op *op[POSTS], *last;
    const char *why;
    if (rank == 1) {
        atomic_store(&b->at, 1);
        raise(SIGSTOP);
    }
    job_await(&b->at, 1);
    for (int i = 0; i < POSTS; i++) {
        char name[8];
        snprintf(name, sizeof name, "s%d", i);
        CHECK(tally_push_pull(c, name, small[i], small[i], sizeof small[i], TALLY_INT8, TALLY_SUM, NULL,
                              &op[i]) == 0);
    }
    if (rank == 0)
        atomic_store(&later_device.fail_begin, 0);
    CHECK(submit_push_pull(c, "last", rank, 2, 0, &last) == 0);
    CHECK(tally_op_wait(last, -1) == -ECANCELED);
    CHECK_HOLDS(tally_op_error(last), "the stage cannot begin");
    tally_op_free(last);
    atomic_store(&b->at, 2);
    for (int i = 0; i < POSTS; i++) {
        CHECK(tally_op_wait(op[i], -1) == (b->dies ? -ECONNRESET : 0));
        tally_op_free(op[i]);
    }
    if (!b->dies)
        return leave(c);
    CHECK(tally_comm_status(c, &why) != 0);
    CHECK_HOLDS(why, "rank 1");
    CHECK(tally_comm_close(c) == 0);
    CHECK(later_device.begun == later_device.ended && !later_device.count);
    return 0;
}

static void test_full(void **state)
{
    struct board *b = job_shared(sizeof *b);
    b->only = 0;
    for (int i = 0; i < 2; i++) {
        struct job j = {.ranks = 2, .machine = together, .main = full, .arg = b};
        b->dies = i == 0;
        atomic_store(&b->at, 0);
        job_start(&j);
        job_await(&b->at, 2);
        kill(j.rank_pid[1], b->dies ? SIGKILL : SIGCONT);
        assert_int_equal(job_wait_rank(&j, 1), b->dies ? 128 + SIGKILL : 0);
        assert_int_equal(job_wait_rank(&j, 0), 0);
        job_clear(&j);
    }
}

/* A rank has no room in shared memory for what its stage has prepared: all go to the service with it. */
static int diverted(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = open_with_stage(b, rank);
    int n = tally_comm_size(c);
    for (int i = 0; i < BARRIER; i++) {
        int begun = later_device.begun;
        tally_op *op;
        if (rank == 1)
            later_hold(&later_device, LATER_ALL);
        CHECK(calls[i].submit(c, calls[i].name, rank, n, i, &op) == 0);
        if (rank == 1) {
            while (later_device.begun == begun)
                job_sleep_ms(1);
            tly_loop_lock(&c->loop);
            op->shared.op.mark = true;
            tly_loop_unlock(&c->loop);
            later_hold(&later_device, LATER_NONE);
        }
        CHECK(tally_op_wait(op, -1) == 0);
        calls[i].check(op, rank, n, i);
        CHECK(!tly_chain_has_ended(&op->chain, STAGE_ENGINE));
        tally_op_free(op);
    }
    CHECK(!b->codec || later_codec.changed > 0);
    return leave(c);
}

static void test_diverted(void **state)
{
    struct board *b = job_shared(sizeof *b);
    for (int i = 0; i < 4; i++) {
        b->only = i & 1 ? 1 : -1;
        b->codec = i & 2;
        job_run(&(struct job){.ranks = 3,
                              .machine = together,
                              .main = diverted,
                              .arg = b,
                              .settings = {"TALLY_PART_BYTES=16K"}});
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_results), cmocka_unit_test(test_failures), cmocka_unit_test(test_dies),
        cmocka_unit_test(test_joins),   cmocka_unit_test(test_overlaps), cmocka_unit_test(test_diverted),
        cmocka_unit_test(test_full),    cmocka_unit_test(test_late),     cmocka_unit_test(test_group),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
