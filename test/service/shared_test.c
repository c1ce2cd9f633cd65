/* shared_test.c - shared tensors: services keep parameters, to which each rank adds differences at its own pace.  Every addition
 * counts once, whatever happens to connections and processes; a bound holds ranks together; what makes no sense is refused. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>

#include "job.h"
#include "raw.h"
#include "shared.h"
#include "transport/transport.h"
#include "wire/frame.h"

#include <cmocka.h>

struct board {
    atomic_int stage, stopped;
    int count, steps, tallyds;
    uint32_t staleness;
};

/* --- exact sums ---------------------------------------------------------------------------------- */

static int run_steps(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    int64_t *first = shared_first(b->count), *mine = shared_differences(rank, b->count), before = -1;
    shared_create(c, "w", first, (size_t)b->count, TALLY_INT64, b->staleness);
    for (int step = 1; step <= b->steps; step++) {
        const int64_t *now = shared_add(c, "w", mine);
        for (int i = 0; i < b->count; i += b->count / 3 + 1)
            CHECK(now[i] >= i + step * shared_difference(rank, i)); /* its own additions are among them */
        CHECK(now[0] > before);
        before = now[0];
    }
    job_barrier(c);
    shared_check(shared_read(c, "w"), tally_comm_size(c), b->count, b->steps);
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    free(first);
    free(mine);
    return 0;
}

static void check_layout(const char *layout, int tallyds, int count, uint32_t staleness)
{
    int machine[JOB_MOST_RANKS];
    struct board *b = job_shared(sizeof *b);
    *b = (struct board){.count = count, .steps = 20, .staleness = staleness};
    job_run(&(struct job){.ranks = job_layout(layout, machine),
                          .machine = machine,
                          .tallyds = tallyds,
                          .main = run_steps,
                          .arg = b,
                          .settings = {"TALLY_PART_BYTES=64K"}});
}

static void test_alone(void **state)
{
    check_layout("a", 0, 1000, 0);
    check_layout("ab", 0, 1, 0);
    check_layout("abc", 0, 100000, 0);
    check_layout("aaa", 0, 50000, 2);
    check_layout("aabb", 0, 50000, 1);
}

static void test_owners(void **state)
{
    check_layout("ab", 1, 100000, 0);
    check_layout("aabc", 2, 100000, 3);
}

static int run_types(int rank, void *arg)
{
    tally_comm *c = job_open();
    const double d[] = {1.5, -2.25, 1e300};
    const float f[] = {1.5f, -2.25f, 1e30f};
    const int32_t i[] = {1, INT32_MAX, -7};
    shared_create(c, "f64", d, 3, TALLY_FLOAT64, 0);
    shared_create(c, "f32", f, 3, TALLY_FLOAT32, 0);
    shared_create(c, "i32", i, 3, TALLY_INT32, 0);
    if (rank == 0) {
        const double *wide = (const void *)shared_add(c, "f64", d);
        const float *narrow = (const void *)shared_add(c, "f32", f);
        const int32_t *whole = (const void *)shared_add(c, "i32", i);
        for (int at = 0; at < 3; at++) {
            CHECK(wide[at] == 2 * d[at] && narrow[at] == 2 * f[at]);
            CHECK(whole[at] == (int32_t)(2 * (uint32_t)i[at]));
        }
    }
    job_barrier(c);
    const double *wide = (const void *)shared_read(c, "f64");
    CHECK(wide[0] == 3 && wide[1] == -4.5 && wide[2] == 2e300);
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_types(void **state)
{
    job_run(&(struct job){.ranks = 2, .tallyds = 1, .main = run_types});
}

/* --- the bound ----------------------------------------------------------------------------------- */

enum { BOUND = 2, STEPS = 6 };

static int run_bound(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    int64_t zero = 0, one = 1;
    tally_op *op;
    shared_create(c, "w", &zero, 1, TALLY_INT64, BOUND);
    if (rank == 0) {
        for (int step = 0; step < BOUND; step++)
            CHECK(*shared_add(c, "w", &one) == step + 1);
        CHECK(tally_shared_add(c, "w", &one, NULL, &op) == 0);
        CHECK(tally_op_wait(op, 300) == -ETIMEDOUT);
        atomic_store(&b->stage, 1);
        CHECK(*shared_values_of(op) == BOUND + 1);
        /* Until the other one has joined. */
        for (int step = 0; step < STEPS; step++)
            shared_add(c, "w", &one);
    } else {
        job_await(&b->stage, 1);
        CHECK(*shared_read(c, "w") == BOUND + 1); /* it was applied at once */
        CHECK(tally_shared_add(c, "w", NULL, NULL, &op) == 0);
        CHECK(*shared_values_of(op) >= BOUND + 1);
    }
    CHECK(tally_join(c, NULL, &op) == 0);
    job_expect(op, 0);
    CHECK(*shared_read(c, "w") == BOUND + 1 + STEPS);
    job_barrier(c);
    /* Level again, whatever they had added: neither is ahead. */
    for (int step = 0; step < BOUND && rank == 1; step++)
        shared_add(c, "w", &one);
    job_barrier(c);
    CHECK(*shared_read(c, "w") == 2 * BOUND + 1 + STEPS);
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_staleness(void **state)
{
    struct board *b = job_shared(sizeof *b);
    for (int tallyds = 0; tallyds < 2; tallyds++) {
        atomic_store(&b->stage, 0);
        job_run(&(struct job){.ranks = 2, .tallyds = tallyds, .main = run_bound, .arg = b});
    }
}

static int run_leaver(int rank, void *arg)
{
    tally_comm *c = job_open();
    int64_t zero = 0, one = 1;
    tally_op *op;
    shared_create(c, "w", &zero, 1, TALLY_INT64, 1);
    shared_create(c, "free", &zero, 1, TALLY_INT64, 0);
    if (rank == 1) {
        CHECK(tally_comm_close(c) == 0);
        return 0;
    }
    shared_add(c, "w", &one);
    CHECK(tally_shared_add(c, "w", &one, NULL, &op) == 0);
    CHECK(tally_op_wait(op, -1) == -ESHUTDOWN);
    CHECK_HOLDS(tally_op_error(op),
                "rank 1 has left the job without tally_join, and is 1 addition too far behind");
    tally_op_free(op);
    CHECK(*shared_read(c, "w") == 2); /* the failed one has been applied */
    for (int step = 0; step < 5; step++)
        CHECK(*shared_add(c, "free", &one) == step + 1);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_leaver(void **state)
{
    job_run(&(struct job){.ranks = 2, .main = run_leaver});
}

static int run_warned(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    int64_t zero = 0, one = 1;
    shared_create(c, "w", &zero, 1, TALLY_INT64, 1);
    if (rank == 0) {
        struct tally_event e = {0};
        tally_op *op;
        CHECK(tally_comm_watch_log(c, 1) == 0);
        shared_add(c, "w", &one);
        CHECK(tally_shared_add(c, "w", &one, NULL, &op) == 0);
        do
            CHECK(tally_comm_next(c, 60000, &e) == 0);
        while (e.kind != TALLY_EVENT_LOG || e.status != TALLY_LOG_WARNING);
        CHECK_HOLDS(e.text, "'w' has waited");
        CHECK_HOLDS(e.text, " s for rank 1 (1 step too far behind)");
        CHECK(tally_comm_watch_log(c, 0) == 0);
        atomic_store(&b->stage, 1);
        job_expect(op, 0);
    } else {
        job_await(&b->stage, 1);
        shared_add(c, "w", &one);
    }
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_warning(void **state)
{
    struct board *b = job_shared(sizeof *b);
    job_run(&(struct job){.ranks = 2,
                          .main = run_warned,
                          .arg = job_shared(sizeof(struct board)),
                          .settings = {"TALLY_LATE_WARNING=0.3"}});
}

/* --- what makes no sense ------------------------------------------------------------------------- */

static int run_refused(int rank, void *arg)
{
    tally_comm *c = job_open();
    int64_t x[8] = {0};
    tally_op *op;
    const void *data;
    CHECK(tally_shared_add(c, "w", x, NULL, &op) == -ENOENT);
    CHECK_HOLDS(tally_error(), "there is no shared tensor 'w': all ranks call tally_shared_create first");
    CHECK(tally_push_pull(c, "w", x, x, 8, TALLY_INT64, TALLY_SUM, NULL, &op) == 0);
    CHECK(tally_shared_values(op, &data) == -EINVAL);
    job_expect(op, 0);
    CHECK(tally_shared_read(c, "w", NULL, &op) == -ENOENT);
    CHECK(tally_shared_create(c, NULL, x, 8, TALLY_INT64, 0, NULL, &op) == -EINVAL);
    CHECK(tally_shared_create(c, "w", x, 8, TALLY_FLOAT16, 0, NULL, &op) == -EINVAL);
    CHECK(tally_shared_create(c, "w", x, 0, TALLY_INT64, 0, NULL, &op) == -EINVAL);
    CHECK(tally_shared_create(c, "w", x, 8, TALLY_INT64, 256, NULL, &op) == -EINVAL);
    if (rank == 0)
        CHECK(tally_shared_create(c, "w", NULL, 8, TALLY_INT64, 0, NULL, &op) == -EINVAL);
    tally_group *g;
    CHECK(tally_group_create(c, "one", (const int[]){rank}, 1, &g) == 0);
    struct tally_options o = job_in(g);
    CHECK(tally_shared_create(c, "w", x, 8, TALLY_INT64, 0, &o, &op) == -EINVAL);
    o = (struct tally_options){.size = sizeof o, .prescale = 2};
    CHECK(tally_shared_create(c, "w", x, 8, TALLY_INT64, 0, &o, &op) == -EINVAL);

    /* Ranks disagree: one sentence on both, and the name is free. */
    CHECK(tally_shared_create(c, "w", x, rank ? 7 : 8, TALLY_INT64, 0, NULL, &op) == 0);
    CHECK(tally_op_wait(op, -1) == -EINVAL);
    CHECK_HOLDS(tally_op_error(op), "[8] on rank 0, [7] on rank 1");
    tally_op_free(op);
    CHECK(tally_shared_create(c, "w", x, 8, TALLY_INT64, rank ? 2 : 3, NULL, &op) == 0);
    CHECK(tally_op_wait(op, -1) == -EINVAL);
    CHECK_HOLDS(tally_op_error(op), "staleness 3 on rank 0, staleness 2 on rank 1");
    tally_op_free(op);
    CHECK(tally_shared_add(c, "w", x, NULL, &op) == -ENOENT);

    /* A rank that cannot create it says so to all. */
    if (rank) {
        CHECK(tally_refuse(c, "w", TALLY_SHARED_CREATE, NULL, "no model") == 0);
    } else {
        CHECK(tally_shared_create(c, "w", x, 8, TALLY_INT64, 0, NULL, &op) == 0);
        CHECK(tally_op_wait(op, -1) == -EINVAL);
        CHECK_HOLDS(tally_op_error(op), "rank 1 refuses: no model");
        tally_op_free(op);
    }

    shared_create(c, "w", x, 8, TALLY_INT64, 0);
    CHECK(tally_shared_create(c, "w", x, 8, TALLY_INT64, 0, NULL, &op) == -EEXIST);
    CHECK(tally_refuse(c, "w", TALLY_SHARED_CREATE, NULL, "no model") == -EEXIST);
    tally_op *other;
    CHECK(tally_shared_add(c, "w", x, NULL, &op) == 0);
    int err = tally_shared_add(c, "w", x, NULL, &other);
    if (err == 0) /* the first one has ended */
        job_expect(other, 0);
    else
        CHECK(err == -EBUSY);
    err = tally_op_cancel(op, "no");
    CHECK(err == -EINVAL || (err == 0 && tally_op_poll(op)));
    job_expect(op, 0);
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_refused(void **state)
{
    job_run(&(struct job){.ranks = 2, .main = run_refused});
}

/* One service is short of memory.  The others keep their parts, which a smaller tensor of that name replaces. */
static int run_short(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    int64_t *x = shared_first(b->count);
    tally_op *op;
    for (int i = 0; i < 2; i++) {
        CHECK(tally_shared_create(c, "w", x, (size_t)b->count, TALLY_INT64, 0, NULL, &op) == 0);
        CHECK(tally_op_wait(op, -1) == -ENOMEM);
        CHECK_HOLDS(tally_op_error(op), "has no memory for a part of 65.5 KB: it keeps");
        CHECK_HOLDS(tally_op_error(op), "(TALLY_MEMORY)");
        tally_op_free(op);
    }
    CHECK(tally_shared_add(c, "w", x, NULL, &op) == -ENOENT);
    shared_create(c, "w", x, 1000, TALLY_INT64, 0);
    CHECK(*shared_add(c, "w", x) == 0);
    /* Sums go on, as large as they are. */
    float *sum = calloc(1 << 20, sizeof *sum);
    CHECK(sum);
    for (int i = 0; i < 3; i++) {
        CHECK(tally_push_pull(c, "sum", sum, sum, 1 << 20, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
        job_expect(op, 0);
    }
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    free(sum);
    free(x);
    return 0;
}

static void test_memory(void **state)
{
    struct board *b = job_shared(sizeof *b);
    b->count = 1 << 20;
    job_run(&(struct job){
        .ranks = 2, .main = run_short, .arg = b, .settings = {"TALLY_PART_BYTES=64K", "TALLY_MEMORY=2M"}});
}

/* One service has room for its parts and another one has none: the create fails, and leaves nothing where there is room. */
static int run_uneven(int rank, void *arg)
{
    tally_comm *c = job_open();
    enum { BIG = 380000, SMALL = 20000, CREATES = 12 };
    int64_t *x = shared_first(BIG);
    char name[8];
    tally_op *op;
    for (int i = 0; i < CREATES; i++) {
        snprintf(name, sizeof name, "big%d", i);
        CHECK(tally_shared_create(c, name, x, BIG, TALLY_INT64, 0, NULL, &op) == 0);
        CHECK(tally_op_wait(op, -1) == -ENOMEM);
        CHECK_HOLDS(tally_op_error(op), "(TALLY_MEMORY)");
        tally_op_free(op);
        job_barrier(c);
    }
    shared_create(c, "small", x, SMALL, TALLY_INT64, 0);
    shared_add(c, "small", x);
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    free(x);
    return 0;
}

static void test_uneven(void **state)
{
    job_run(&(struct job){.ranks = 2,
                          .tallyds = 1,
                          .main = run_uneven,
                          .tallyd_options = {"--memory", "1M"},
                          .settings = {"TALLY_PART_BYTES=32K", "TALLY_MEMORY=8M", "TALLY_SPLIT=optimal"}});
}

/* Additions that wait fill the memory, and the one that they wait for finds some all the same. */
static int run_full(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    int64_t *x = shared_first(b->count), *mine = shared_differences(rank, b->count);
    enum { TENSORS = 4 };
    char name[8];
    tally_op *op[TENSORS];
    for (int i = 0; i < TENSORS; i++) {
        snprintf(name, sizeof name, "w%d", i);
        shared_create(c, name, x, (size_t)b->count, TALLY_INT64, 1);
    }
    for (int step = 0; step < 4; step++) {
        if (rank == 2)
            job_sleep_ms(100);
        for (int i = 0; i < TENSORS; i++) {
            snprintf(name, sizeof name, "w%d", i);
            CHECK(tally_shared_add(c, name, mine, NULL, &op[i]) == 0);
        }
        for (int i = 0; i < TENSORS; i++)
            job_expect(op[i], 0);
    }
    job_barrier(c);
    for (int i = 0; i < TENSORS; i++) {
        snprintf(name, sizeof name, "w%d", i);
        shared_check(shared_read(c, name), 3, b->count, 4);
    }
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    free(x);
    free(mine);
    return 0;
}

static void test_full(void **state)
{
    struct board *b = job_shared(sizeof *b);
    b->count = 1 << 15; /* 256 KB each, of which a third is at each service */
    job_run(&(struct job){
        .ranks = 3, .main = run_full, .arg = b, .settings = {"TALLY_PART_BYTES=64K", "TALLY_MEMORY=1M"}});
}

/* A waiting addition that was dropped for want of memory finds some as soon as no rank is behind it, whatever else waits. */
static int run_dropped(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    enum { BIG = 40000, SMALL = 7000, SUMS = 100000 };
    static int64_t big[BIG], small[SMALL];
    static float sum[SUMS];
    tally_op *waits = NULL, *op;
    shared_create(c, "big", big, BIG, TALLY_INT64, 1);
    shared_create(c, "small", small, SMALL, TALLY_INT64, 1);
    job_barrier(c);
    if (rank == 1)
        job_await(&b->stage, 1);
    shared_add(c, rank ? "small" : "big", rank ? small : big);
    CHECK(tally_shared_add(c, rank ? "small" : "big", rank ? small : big, NULL, &waits) == 0);
    job_sleep_ms(500);
    CHECK(!tally_op_poll(waits));
    if (rank == 0)
        atomic_store(&b->stage, 1);
    for (int i = 0; i < 3; i++) {
        CHECK(tally_push_pull(c, "sum", sum, sum, SUMS, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
        job_expect(op, 0);
    }
    job_sleep_ms(500);
    if (rank == 0) {
        shared_add(c, "small", small);
    } else {
        CHECK(tally_op_wait(waits, 20000) == 0);
        shared_add(c, "big", big);
    }
    shared_values_of(waits);
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_dropped(void **state)
{
    static const int machine[] = {0, 0};
    struct board *b = job_shared(sizeof *b);
    job_run(
        &(struct job){.ranks = 2,
                      .machine = machine,
                      .main = run_dropped,
                      .arg = b,
                      .settings = {"TALLY_PART_BYTES=64K", "TALLY_CREDIT_BYTES=256K", "TALLY_MEMORY=1M"}});
}

/* --- losses -------------------------------------------------------------------------------------- */

static int run_chaos(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    int64_t *first = shared_first(b->count), *mine = shared_differences(rank, b->count);
    uint64_t random = (uint64_t)rank * 77 + (uint64_t)b->steps;
    int losses = 0;
    shared_create(c, "w", first, (size_t)b->count, TALLY_INT64, b->staleness);
    for (int step = 1; step <= b->steps; step++) {
        tally_op *op;
        CHECK(tally_shared_add(c, "w", mine, NULL, &op) == 0);
        if (losses < 5 && job_random(&random) % 4 == 0) {
            losses++;
            shared_lose_a_connection(&random);
        }
        const int64_t *now = shared_values_of(op);
        for (int i = 0; i < b->count; i += 997)
            CHECK(now[i] >= i + step * shared_difference(rank, i));
        if (job_random(&random) % 8 == 0)
            shared_read(c, "w");
        atomic_fetch_add(&b->stage, 1);
    }
    job_barrier(c);
    shared_check(shared_read(c, "w"), tally_comm_size(c), b->count, b->steps);
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    free(first);
    free(mine);
    return 0;
}

/* Processes stop for a while, connections break, and the sums are exact. */
static void test_chaos(void **state)
{
    for (int seed = 0; seed < 4; seed++) {
        struct board *b = job_shared(sizeof *b);
        *b = (struct board){.count = 60000, .steps = 30 + seed, .staleness = seed % 2 ? 3 : 0};
        struct job j = {.ranks = 3,
                        .tallyds = seed / 2,
                        .main = run_chaos,
                        .arg = b,
                        .settings = {"TALLY_PART_BYTES=32K",
                                     seed % 2 ? "TALLY_MEMORY=1M" : "TALLY_CHECKSUM=1"}};
        uint64_t random = (uint64_t)seed + 5;
        job_start(&j);
        for (int i = 0; i < 8; i++) {
            job_await(&b->stage, i * 8);
            uint64_t n = job_random(&random) % (uint64_t)(j.ranks + j.tallyds);
            pid_t pid = n < (uint64_t)j.ranks ? j.rank_pid[n] : j.tallyd_pid[n - (uint64_t)j.ranks];
            kill(pid, SIGSTOP);
            job_sleep_ms(20 + (int)(job_random(&random) % 150));
            kill(pid, SIGCONT);
        }
        job_finish(&j);
    }
}

/* An addition waits for the other rank while a tallyd comes and dies, which keeps nothing of the tensor: the split changes, and
 * sums go on. */
static void await_services(tally_comm *c, int wanted)
{
    float x[2000] = {0};
    while (tally_comm_service_count(c) != wanted) {
        job_sleep_ms(5);
        CHECK(tally_comm_status(c, NULL) == 0);
    }
    job_barrier(c);
    for (int i = 0; i < 3; i++) {
        tally_op *op;
        CHECK(tally_push_pull(c, "sum", x, x, 2000, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
        job_expect(op, 0);
    }
}

static int run_epochs(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    int64_t *first = shared_first(b->count), *mine = shared_differences(rank, b->count);
    tally_op *op = NULL;
    shared_create(c, "w", first, (size_t)b->count, TALLY_INT64, 1);
    if (rank == 0) {
        shared_add(c, "w", mine);
        CHECK(tally_shared_add(c, "w", mine, NULL, &op) == 0);
    }
    atomic_fetch_add(&b->stage, 1);
    await_services(c, 3);
    atomic_fetch_add(&b->stage, 1);
    await_services(c, 2);
    if (rank == 0) {
        CHECK(!tally_op_poll(op));
        atomic_fetch_add(&b->stage, 1);
    } else {
        job_await(&b->stage, 5); /* until then rank 0's second addition waits for this one */
        shared_add(c, "w", mine);
    }
    if (rank == 1)
        shared_add(c, "w", mine);
    if (op)
        shared_values_of(op);
    job_barrier(c);
    shared_check(shared_read(c, "w"), 2, b->count, 2);
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    free(first);
    free(mine);
    return 0;
}

static void test_epochs(void **state)
{
    struct board *b = job_shared(sizeof *b);
    b->count = 100000;
    struct job j = {.ranks = 2, .main = run_epochs, .arg = b, .settings = {"TALLY_PART_BYTES=32K"}};
    job_start(&j);
    job_await(&b->stage, 2);
    j.tallyds = 1;
    job_start_tallyd(&j, 0);
    job_await(&b->stage, 4);
    kill(j.tallyd_pid[0], SIGKILL);
    for (int rank = 0; rank < 2; rank++)
        assert_int_equal(job_wait_rank(&j, rank), 0);
    job_clear(&j);
}

/* --- what no rank says ----------------------------------------------------------------------------- */

enum { KEY = 7, BYTES = 1024 };

static struct tly_frame raw_shared(uint8_t kind, uint32_t rank, uint32_t round)
{
    struct tly_frame f = raw_push(KEY, BYTES);
    bool create = kind == TALLY_SHARED_CREATE;
    f.kind = kind;
    f.round = round;
    f.group = create ? 0 : tly_pair(rank, rank);
    f.root = create ? 0 : rank;
    if (create ? rank > 0 : kind == TALLY_SHARED_READ)
        f.flags = TLY_REQUEST;
    return f;
}

static int raw_set_up(void **state)
{
    return raw_begin(2, NULL);
}

static int raw_tear_down(void **state)
{
    raw_end();
    return 0;
}

static float raw_data[BYTES / sizeof(float)];

static void raw_create(void)
{
    raw_post(0, raw_shared(TALLY_SHARED_CREATE, 0, 0), raw_data, BYTES);
    raw_post(1, raw_shared(TALLY_SHARED_CREATE, 1, 0), NULL, 0);
    raw_until(&raw.rank[0].results, 1);
    raw_until(&raw.rank[1].results, 1);
}

/* An addition that comes again is answered, and counts once.  A rank skips the numbers of operations that it has taken back, and
 * never returns to a lower one. */
static void test_numbers(void **state)
{
    raw_create();
    raw_data[0] = 1;
    raw_post(1, raw_shared(TALLY_SHARED_ADD, 1, 1), raw_data, BYTES);
    raw_until(&raw.rank[1].results, 2);
    raw_settle(1);
    raw_post(1, raw_shared(TALLY_SHARED_ADD, 1, 1), raw_data, BYTES);
    raw_until(&raw.rank[1].results, 3);
    float got;
    memcpy(&got, raw.rank[1].result, sizeof got);
    assert_float_equal(got, 1, 0);
    raw_settle(1);
    raw_post(1, raw_shared(TALLY_SHARED_ADD, 1, 3), raw_data, BYTES);
    raw_until(&raw.rank[1].results, 4);
    raw_settle(1);
    raw_post(1, raw_shared(TALLY_SHARED_ADD, 1, 2), raw_data, BYTES);
    raw_until(&raw.rank[1].verdicts, 1);
    raw_post(0, raw_shared(TALLY_SHARED_READ, 0, 1), NULL, 0);
    raw_until(&raw.rank[0].results, 2);
    memcpy(&got, raw.rank[0].result, sizeof got);
    assert_float_equal(got, 2, 0);
}

/* While an addition waits for another rank, its rank may not begin the next one: the service would fill up with them. */
static void test_flood(void **state)
{
    struct tly_frame f = raw_shared(TALLY_SHARED_CREATE, 0, 0);
    f.op = 1;
    raw_post(0, f, raw_data, BYTES);
    f = raw_shared(TALLY_SHARED_CREATE, 1, 0);
    f.op = 1;
    raw_post(1, f, NULL, 0);
    raw_until(&raw.rank[0].results, 1);
    raw_until(&raw.rank[1].results, 1);
    for (uint32_t round = 1; round <= 4; round++)
        raw_post(1, raw_shared(TALLY_SHARED_ADD, 1, round), raw_data, BYTES);
    raw_until(&raw.rank[1].verdicts, 2);
    assert_int_equal(raw.rank[1].results, 2);
    /* The other one moves on, and the second addition is answered. */
    raw_post(0, raw_shared(TALLY_SHARED_ADD, 0, 1), raw_data, BYTES);
    raw_until(&raw.rank[1].results, 3);
    assert_int_equal(raw.rank[1].verdicts, 2);
}

static int raw_set_up_small(void **state)
{
    static const char *const settings[] = {"TALLY_MEMORY=1M", NULL};
    return raw_begin(2, settings);
}

static struct tly_frame raw_large(uint8_t kind, uint32_t rank, uint32_t part)
{
    struct tly_frame f = raw_shared(kind, rank, kind != TALLY_SHARED_CREATE);
    f.length = RAW_PART;
    f.part = part;
    f.place = (uint64_t)part * RAW_PART;
    return f;
}

/* The copies that ranks read fit into the memory, and those that must wait for it are made when others have arrived. */
static void test_reads(void **state)
{
    enum { PARTS = 10 };
    static float data[RAW_PART / sizeof(float)];
    for (uint32_t part = 0; part < PARTS; part++) {
        raw_post(0, raw_large(TALLY_SHARED_CREATE, 0, part), data, sizeof data);
        raw_post(1, raw_large(TALLY_SHARED_CREATE, 1, part), NULL, 0);
        for (int rank = 0; rank < 2; rank++) {
            raw_until(&raw.rank[rank].results, (int)part + 1);
            raw_settle(rank);
        }
    }
    raw.rank[0].confirms_nothing = raw.rank[1].confirms_nothing = true;
    for (uint32_t part = 0; part < PARTS; part++)
        for (uint32_t rank = 0; rank < 2; rank++)
            raw_post((int)rank, raw_large(TALLY_SHARED_READ, rank, part), NULL, 0);
    raw_settle(0);
    raw_settle(1);
    assert_true(raw.rank[1].facts.bytes_in_use <= raw.rank[1].facts.memory_limit);
    assert_true(raw.rank[1].results < 2 * PARTS);
    for (int rank = 0; rank < 2; rank++) {
        struct raw_rank *r = &raw.rank[rank];
        r->confirms_nothing = false;
        r->received = (uint64_t)r->results;
        tly_link_set_counts(r->link, &(struct tly_counts){.received = r->received}, 0);
    }
    while (raw.rank[0].results < 2 * PARTS || raw.rank[1].results < 2 * PARTS) {
        raw_settle(0);
        raw_settle(1);
    }
}

/* Additions to tensors that were never created, or have another size, are refused. */
static void test_unknown(void **state)
{
    raw_post(0, raw_shared(TALLY_SHARED_ADD, 0, 1), raw_data, BYTES);
    raw_until(&raw.rank[0].verdicts, 1);
    raw_create();
    struct tly_frame f = raw_shared(TALLY_SHARED_READ, 1, 1);
    f.length = BYTES / 2;
    raw_post(1, f, NULL, 0);
    raw_until(&raw.rank[1].verdicts, 1);
    /* A rank says that it has some of an answer that was never given. */
    f = raw_shared(TALLY_SHARED_ADD, 1, 2);
    f.key++;
    f.type = TLY_HAVE;
    f.flags = 0;
    f.offset = BYTES / 2;
    raw_post(1, f, NULL, 0);
    raw_until(&raw.rank[1].again, 1);
    raw_settle(1);
}

/* Another rank's additions, and a create of a type that is not added. */
static void test_strange(void **state)
{
    struct tly_frame f = raw_shared(TALLY_SHARED_ADD, 0, 1);
    f.group = tly_pair(0, 1);
    raw_post(0, f, raw_data, BYTES);
    raw_until(&raw.rank[0].closed, 1);
    f = raw_shared(TALLY_SHARED_CREATE, 1, 0);
    f.dtype = TALLY_FLOAT16;
    raw_post(1, f, NULL, 0);
    raw_until(&raw.rank[1].closed, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_alone),
        cmocka_unit_test(test_owners),
        cmocka_unit_test(test_types),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_staleness),
        cmocka_unit_test(test_leaver),
        cmocka_unit_test(test_warning),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_uneven),
        cmocka_unit_test(test_full),
        cmocka_unit_test(test_dropped),
        cmocka_unit_test(test_epochs),
        cmocka_unit_test(test_chaos),
        cmocka_unit_test_setup_teardown(test_numbers, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_flood, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_reads, raw_set_up_small, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_unknown, raw_set_up, raw_tear_down),
        cmocka_unit_test_setup_teardown(test_strange, raw_set_up, raw_tear_down),
    };
    return cmocka_run_group_tests_name("shared", tests, NULL, NULL);
}
