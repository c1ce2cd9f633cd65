/* ranks_test.c - ranks that disagree, refuse, come in other orders, ask for too much, wait with a deadline, fork.
 * After each of these the communicator must be as good as before, and the services must hold nothing. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>

#include "job.h"

#include <cmocka.h>

/* Shared by a job's ranks and the test. */
struct board {
    atomic_int stage;
    atomic_int pid;
};

/* Sum ones under `name` and look at the result. */
static void sums_well(tally_comm *c, const char *name, size_t count)
{
    float *x = malloc(count * sizeof *x + 1);
    tally_op *op;
    CHECK(x);
    for (size_t i = 0; i < count; i++)
        x[i] = (float)(i % 100 + 1);
    CHECK(tally_push_pull(c, name, x, x, count, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
    CHECK(tally_op_wait(op, -1) == 0);
    for (size_t i = 0; i < count; i++)
        CHECK(x[i] == (float)(i % 100 + 1) * (float)tally_comm_size(c));
    tally_op_free(op);
    free(x);
}

static void barrier(tally_comm *c)
{
    tally_op *op;
    CHECK(tally_barrier(c, NULL, NULL, &op) == 0);
    CHECK(tally_op_wait(op, -1) == 0);
    tally_op_free(op);
}

/* Sum over the services of one of the report's numbers. */
static unsigned long long reported(tally_comm *c, const char *field)
{
    char *json, key[64];
    unsigned long long sum = 0, v;
    CHECK(tally_comm_report(c, 60000, &json) == 0);
    snprintf(key, sizeof key, "\"%s\": ", field);
    CHECK(strstr(json, key));
    for (const char *at = json; (at = strstr(at, key)); at++)
        if (sscanf(at + strlen(key), "%llu", &v) == 1)
            sum += v;
    free(json);
    return sum;
}

/* Counts of what has been received ride with later frames: it takes a moment. */
static void services_hold_nothing(tally_comm *c)
{
    barrier(c);
    for (int i = 0; reported(c, "bytes_in_use"); i++) {
        CHECK(i < 2000);
        job_sleep_ms(5);
    }
    barrier(c); /* or somebody goes on and pushes while others still look */
}

/* --- disagreement -------------------------------------------------------------------------------- */

static int different_sizes(int rank, void *arg)
{
    enum { LARGE = 10000000, SMALL = 5000000 };
    tally_comm *c = job_open();
    size_t count = rank == 0 ? LARGE : SMALL;
    float *x = calloc(LARGE, sizeof *x);
    tally_op *op;
    CHECK(x && tally_comm_service_count(c) == 4);
    CHECK(tally_push_pull(c, "w", x, x, count, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
    CHECK(tally_op_wait(op, -1) == -EINVAL);
    CHECK_HOLDS(tally_op_error(op), "'w'");
    CHECK_HOLDS(tally_op_error(op), "'w': the ranks disagree: "
                                    "tally_push_pull float32 [10000000] sum on rank 0, [5000000] on rank 1");
    tally_op_free(op);
    free(x);
    sums_well(c, "w", SMALL);
    services_hold_nothing(c);
    CHECK(tally_comm_status(c, NULL) == 0);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_different_sizes(void **state)
{
    job_run(&(struct job){.ranks = 2, .tallyds = 2, .main = different_sizes});
}

enum way { DTYPE, OP, COUNT, SHAPE, SCALE, NOTE, NO_NOTE, ROOT, GATHER_SHAPE, WAYS };

/* Ranks 0 and 1 agree, the last one has its own idea; sizes of one part and of many. */
static void disagree(tally_comm *c, int rank, enum way way, size_t count)
{
    static const char *const says[WAYS][2] = {
        {"tally_push_pull float32 [", "] sum on ranks 0-1, int32 on rank 2"},
        {"tally_push_pull float32 [", "] sum on ranks 0-1, max on rank 2"},
        {"tally_push_pull float32 [", "] sum on ranks 0-1, ["},
        {"tally_push_pull float32 [", ", 4] on rank 2"},
        {"tally_push_pull float32 [", "] sum on ranks 0-1, prescale 0.5 on rank 2"},
        {"tally_push_pull float32 [", "] sum (uint32) on ranks 0-1, (complex64) on rank 2"},
        {"tally_push_pull float32 [", "] sum on ranks 0-1, (complex64) on rank 2"},
        {"tally_broadcast float32 [", "] from rank 0 on ranks 0-1, from rank 1 on rank 2"},
        {"tally_allgather float32 [*, 2] on ranks 0-1, ", ", [*, 4] on rank 2"}};
    static float x[400000];
    bool odd = rank == 2;
    char name[32], part[128];
    tally_op *op = NULL;
    int64_t shape[2] = {(int64_t)(count / (odd ? 4 : 2)), odd ? 4 : 2};
    struct tally_options o = {.size = sizeof o, .prescale = way == SCALE && odd ? 0.5 : 1};
    int err;
    if (way == NOTE || (way == NO_NOTE && odd))
        o.note = odd ? "complex64" : "uint32";
    if (way == SHAPE || way == GATHER_SHAPE) {
        o.ndim = 2;
        o.shape = shape;
    }
    snprintf(name, sizeof name, "t%d.%zu", way, count);
    if (way == ROOT)
        err = tally_broadcast(c, name, x, count, TALLY_FLOAT32, odd, &o, &op);
    else if (way == GATHER_SHAPE)
        err = tally_allgather(c, name, x, count, TALLY_FLOAT32, &o, &op);
    else
        err = tally_push_pull(c, name, x, x, way == COUNT && odd ? count / 2 : count,
                              way == DTYPE && odd ? TALLY_INT32 : TALLY_FLOAT32,
                              way == OP && odd ? TALLY_MAX : TALLY_SUM, &o, &op);
    CHECK(err == 0);
    CHECK(tally_op_wait(op, -1) == -EINVAL);
    CHECK_HOLDS(tally_error(), name);
    snprintf(part, sizeof part, "'%s': the ranks disagree: %s", name, says[way][0]);
    CHECK_HOLDS(tally_op_error(op), part);
    CHECK_HOLDS(tally_op_error(op), " on rank 2");
    CHECK_HOLDS(tally_op_error(op), way == SHAPE ? ", 2] sum on ranks 0-1, [" : " on ranks 0-1, ");
    CHECK_HOLDS(tally_op_error(op), says[way][1]);
    tally_op_free(op);
    if (way != ROOT && way != GATHER_SHAPE)
        sums_well(c, name, count);
}

static int in_every_way(int rank, void *arg)
{
    tally_comm *c = job_open();
    static const size_t counts[] = {4, 400000};
    for (enum way w = 0; w < WAYS; w++)
        for (int i = 0; i < 2; i++)
            disagree(c, rank, w, counts[i]);
    services_hold_nothing(c);
    CHECK(reported(c, "rounds_open") <= (unsigned)tally_comm_service_count(c)); /* the last barrier may be */
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_every_disagreement(void **state)
{
    job_run(&(
        struct job){.ranks = 3, .tallyds = 1, .main = in_every_way, .settings = {"TALLY_PART_BYTES=65536"}});
    job_run(
        &(struct job){.ranks = 3, .tallyds = 1, .main = in_every_way, .settings = {"TALLY_SUM_THREADS=2"}});
}

/* The verdict does not wait for ever for the third rank, which gets the same one when it comes, and which must push
 * all that it has without harm. */
static int late_third(int rank, void *arg)
{
    struct board *b = arg;
    static float x[300000];
    tally_comm *c = job_open();
    tally_op *op;
    if (rank == 2)
        job_await(&b->stage, 2);
    CHECK(tally_push_pull(c, "w", x, x, rank ? 300000 : 200000, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
    CHECK(tally_op_wait(op, -1) == -EINVAL);
    atomic_fetch_add(&b->stage, 1);
    CHECK_HOLDS(tally_op_error(op), "tally_push_pull float32 [200000] sum on rank 0, [300000] on rank 1");
    tally_op_free(op);
    sums_well(c, "w", 300000);
    services_hold_nothing(c);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_late_third(void **state)
{
    struct board *b = job_shared(sizeof *b);
    job_run(&(struct job){
        .ranks = 3, .tallyds = 1, .main = late_third, .arg = b, .settings = {"TALLY_PART_BYTES=65536"}});
}

/* What messages call operations: the functions, or what an interface over them has. */
static void call_differs(tally_comm *c, int rank, const char *name, bool gather, const char *said)
{
    static float x[4], y[8];
    size_t count = rank ? 4 : 3;
    tally_op *op;
    int err = gather ? tally_allgather_into(c, name, x, y, count, TALLY_FLOAT32, NULL, &op)
                     : tally_push_pull(c, name, x, x, count, TALLY_FLOAT32, TALLY_SUM, NULL, &op);
    CHECK(err == 0 && tally_op_wait(op, -1) == -EINVAL);
    CHECK(strcmp(tally_op_error(op), said) == 0);
    tally_op_free(op);
}

static int call_names(int rank, void *arg)
{
    static const char *const names[TALLY_SCATTER + 1] = {
        [TALLY_PUSH_PULL] = "allreduce", [TALLY_ALLGATHER] = "allgather"};
    tally_comm *c = job_open();
    call_differs(c, rank, NULL, false,
                 "tally_push_pull no. 1: the ranks disagree: float32 [3] sum on rank 0, [4] on rank 1");
    call_differs(c, rank, NULL, true,
                 "tally_allgather_into no. 1: the ranks disagree: float32 [3] on rank 0, [4] on rank 1");
    tally_name_calls(0, names);
    call_differs(c, rank, NULL, false,
                 "allreduce no. 2: the ranks disagree: float32 [3] sum on rank 0, [4] on rank 1");
    call_differs(c, rank, "w", true,
                 "'w': the ranks disagree: allgather float32 [3] on rank 0, [4] on rank 1");
    tally_name_calls(0, NULL);
    tally_name_calls(1, names); /* of another name space */
    call_differs(c, rank, "w", false,
                 "'w': the ranks disagree: tally_push_pull float32 [3] sum on rank 0, [4] on rank 1");
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_call_names(void **state)
{
    job_run(&(struct job){.ranks = 2, .tallyds = 1, .main = call_names});
    job_run(&(struct job){.ranks = 2, .main = call_names});
}

/* Without names, in an ordered space: the n-th call meets the n-th, and of another kind disagrees with it. */
static int other_kinds(int rank, void *arg)
{
    static float x[100000];
    tally_comm *c = job_open();
    struct tally_options o = {.size = sizeof o, .space = TALLY_SPACE_ORDERED + 3};
    for (int i = 0; i < 12; i++) {
        size_t count = i % 2 ? 100000 : 10;
        int kind = i / 4 == 2 ? TALLY_BARRIER : (i + (rank == 1 && i / 4 == 1)) % 3 + 1;
        tally_op *op;
        if (kind == TALLY_PUSH_PULL)
            CHECK(tally_push_pull(c, NULL, x, x, count, TALLY_FLOAT32, TALLY_SUM, &o, &op) == 0);
        else if (kind == TALLY_BROADCAST)
            CHECK(tally_broadcast(c, NULL, x, count, TALLY_FLOAT32, 0, &o, &op) == 0);
        else if (kind == TALLY_ALLGATHER)
            CHECK(tally_allgather(c, NULL, x, count, TALLY_FLOAT32, &o, &op) == 0);
        else if (i == 11 && rank == 1)
            CHECK(tally_refuse(c, NULL, TALLY_PUSH_PULL, &o, "a tensor of strings") == 0);
        else
            CHECK(tally_barrier(c, NULL, &o, &op) == 0);
        if (i == 11 && rank == 1)
            break;
        CHECK(tally_op_wait(op, -1) == (i / 4 == 1 || i == 11 ? -EINVAL : 0));
        if (i / 4 == 1) {
            static const char *const words[] = {"?", "all_reduce", "broadcast", "all_gather"};
            char part[80];
            snprintf(part, sizeof part, "%s no. %d: the ranks disagree: ", words[kind], i + 1);
            CHECK_HOLDS(tally_op_error(op), part);
            snprintf(part, sizeof part, "ranks 0, 2: %s no. %d: float32 [", words[i % 3 + 1], i + 1);
            CHECK_HOLDS(tally_op_error(op), part);
            snprintf(part, sizeof part, "; rank 1: %s no. %d: float32 [", words[(i + 1) % 3 + 1], i + 1);
            CHECK_HOLDS(tally_op_error(op), part);
        }
        if (i == 11)
            CHECK_HOLDS(tally_op_error(op), "rank 1 refuses: a tensor of strings");
        tally_op_free(op);
    }
    sums_well(c, NULL, 10);
    services_hold_nothing(c);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_other_kinds(void **state)
{
    job_run(
        &(struct job){.ranks = 3, .tallyds = 1, .main = other_kinds, .settings = {"TALLY_PART_BYTES=16384"}});
}

/* How much a rank has under way is its own affair: all deal a list alike, whatever their credits. */
static int other_credits(int rank, void *arg)
{
    enum { ELEMENTS = 1 << 20 };
    static const char *const credits[] = {"64K", "200K", "1M"};
    static const char *const names[] = {"list"};
    static float x[ELEMENTS];
    const uint64_t bytes[] = {sizeof x};
    tally_op *op;
    setenv("TALLY_CREDIT_BYTES", credits[rank], 1);
    tally_comm *c = job_open();
    CHECK(tally_plan(c, 0, 1, names, bytes) == 0);
    for (int turn = 0; turn < 3; turn++) {
        for (int i = 0; i < ELEMENTS; i++)
            x[i] = (float)(rank + i % 100);
        CHECK(tally_push_pull(c, "list", x, x, ELEMENTS, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
        CHECK(tally_op_wait(op, 20000) == 0);
        tally_op_free(op);
        for (int i = 0; i < ELEMENTS; i++)
            CHECK(x[i] == (float)(3 + 3 * (i % 100)));
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_other_credits(void **state)
{
    job_run(&(
        struct job){.ranks = 3, .tallyds = 1, .main = other_credits, .settings = {"TALLY_PART_BYTES=16384"}});
}

static int refuse(int rank, void *arg)
{
    static float x[100000];
    tally_comm *c = job_open();
    tally_op *op;
    static const char *const names[] = {"first", "second"};
    const uint64_t bytes[] = {sizeof x, 4000};
    CHECK(tally_plan(c, 0, 2, names, bytes) == 0);
    for (int i = 0; i < 4; i++) {
        const char *name = i % 2 ? "first" : "unplanned";
        if (rank == 1) {
            CHECK(tally_refuse(c, name, TALLY_PUSH_PULL, NULL, "a tensor of strings") == 0);
        } else {
            CHECK(tally_push_pull(c, name, x, x, 100000, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
            CHECK(tally_op_wait(op, -1) == -EINVAL);
            CHECK_HOLDS(tally_op_error(op), "rank 1 refuses: a tensor of strings");
            tally_op_free(op);
        }
        barrier(c);
        sums_well(c, name, 100000);
        sums_well(c, name, 10);
        sums_well(c, name, 100000);
    }
    services_hold_nothing(c);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_refuse(void **state)
{
    job_run(&(struct job){.ranks = 3, .tallyds = 2, .main = refuse, .settings = {"TALLY_PART_BYTES=16384"}});
}

/* A rank refuses a count that parts of 32 KB cannot number, even while parts have 512 KB.  Otherwise the answer would depend on
 * the moment. */
static int too_many_for_small_parts(int rank, void *arg)
{
    static float x[10];
    tally_comm *c = job_open();
    tally_op *op;
    CHECK(tally_push_pull(c, "x", x, x, 1ull << 39, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == -EINVAL);
    CHECK_HOLDS(tally_error(), "too many for parts of 32768 bytes: raise TALLY_PART_BYTES");
    sums_well(c, "x", 10);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_too_many_elements(void **state)
{
    struct job j = {.ranks = 2, .tallyds = 1, .main = too_many_for_small_parts};
    job_start(&j);
    job_finish(&j);
    job_log_holds(&j, 0, "parts of 512 KB");
    job_clear(&j);
}

/* Rank 2 never comes for these verdicts, some of which are a tallyd's: what that sums later is not held up for ever. */
static int refuse_to_some(int rank, void *arg)
{
    enum { LARGE = 4 << 20 };
    static float x[LARGE];
    tally_comm *c = job_open();
    tally_op *op;
    for (int i = 0; i < 16; i++) {
        char name[16];
        snprintf(name, sizeof name, "t%d", i);
        if (rank == 0) {
            CHECK(tally_refuse(c, name, TALLY_PUSH_PULL, NULL, "a tensor of strings") == 0);
        } else if (rank == 1) {
            CHECK(tally_push_pull(c, name, x, x, 10, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
            CHECK(tally_op_wait(op, -1) == -EINVAL);
            tally_op_free(op);
        }
    }
    barrier(c);
    for (int i = 0; i < LARGE; i++)
        x[i] = (float)(rank + i % 100);
    CHECK(tally_push_pull(c, "large", x, x, LARGE, TALLY_FLOAT32, TALLY_MAX, NULL, &op) == 0);
    CHECK(tally_op_wait(op, 60000) == 0);
    for (int i = 0; i < LARGE; i++)
        CHECK(x[i] == (float)(2 + i % 100));
    tally_op_free(op);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_refuse_to_some(void **state)
{
    job_run(&(struct job){.ranks = 3, .tallyds = 2, .main = refuse_to_some});
}

static int plans(int rank, void *arg)
{
    tally_comm *c = job_open();
    static const char *const names[] = {"a", "b", "c"};
    const uint64_t bytes[] = {400000, 0, 1200000}, others[] = {400000, 4, 1200000};
    CHECK(tally_plan(c, 0, 3, names, rank == 1 ? others : bytes) == -EINVAL);
    CHECK_HOLDS(tally_error(), "disagree");
    CHECK_HOLDS(tally_error(), "rank 1");
    for (int i = 0; i < 3; i++) {
        sums_well(c, "a", 100000);
        CHECK(tally_plan(c, 0, 3, names, bytes) == 0);
        sums_well(c, "c", 300000);
        sums_well(c, "b", 0);
        sums_well(c, "b", 70000);
        sums_well(c, "a", 100000);
        sums_well(c, "a", 50000);
        sums_well(c, "a", 100000);
    }
    CHECK(tally_plan(c, 0, 0, NULL, NULL) == 0);
    /* A plan of what is in flight is refused, on all ranks. */
    static float x[1000];
    tally_op *op = NULL;
    if (rank == 0)
        CHECK(tally_push_pull(c, "b", x, x, 1000, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
    int err = tally_plan(c, 0, 3, names, bytes);
    CHECK(rank == 0 ? err == -EBUSY : err == -EINVAL);
    CHECK_HOLDS(tally_error(), "'b' is in flight");
    if (rank != 0)
        CHECK(tally_push_pull(c, "b", x, x, 1000, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
    CHECK(tally_op_wait(op, -1) == 0);
    tally_op_free(op);
    CHECK(tally_plan(c, 0, 3, names, bytes) == 0);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_plans(void **state)
{
    job_run(&(struct job){.ranks = 2, .tallyds = 2, .main = plans, .settings = {"TALLY_PART_BYTES=16384"}});
}

/* --- order, windows, memory ---------------------------------------------------------------------- */

enum { TENSORS = 6, ELEMENTS = 20000 };

/* All ranks submit the same tensors, each in an order of its own; some of them disagree now and then. */
static void shuffle_rounds(tally_comm *c, int rank, int rounds, bool quarrel)
{
    static float x[TENSORS][ELEMENTS];
    uint64_t s = 77 + (uint64_t)rank, common = 5;
    for (int round = 0; round < rounds; round++) {
        int order[TENSORS];
        bool bad[TENSORS], mine[TENSORS];
        tally_op *op[TENSORS];
        for (int i = 0; i < TENSORS; i++) {
            order[i] = rank % 2 ? TENSORS - 1 - i : i;
            bad[i] = quarrel && job_random(&common) % 3 == 0;
            mine[i] = bad[i] && (int)(job_random(&common) % (unsigned)tally_comm_size(c)) == rank;
            for (int k = 0; k < ELEMENTS; k++)
                x[i][k] = (float)(round + i + k % 7);
        }
        for (int i = 0; i < TENSORS && round; i++) {
            int j = (int)(job_random(&s) % TENSORS), t = order[i];
            order[i] = order[j];
            order[j] = t;
        }
        for (int i = 0; i < TENSORS; i++) {
            int t = order[i];
            char name[16];
            snprintf(name, sizeof name, "t%d", t);
            struct tally_options o = {.size = sizeof o, .priority = (int32_t)(job_random(&s) % 3)};
            CHECK(tally_push_pull(c, name, x[t], x[t], mine[t] ? ELEMENTS / 2 : ELEMENTS, TALLY_FLOAT32,
                                  TALLY_SUM, &o, &op[t]) == 0);
            if (quarrel && job_random(&s) % 4 == 0)
                job_sleep_ms(1);
        }
        for (int i = 0; i < TENSORS; i++) {
            CHECK(tally_op_wait(op[i], -1) == (bad[i] ? -EINVAL : 0));
            for (int k = 0; k < ELEMENTS && !bad[i]; k++)
                CHECK(x[i][k] == (float)(round + i + k % 7) * (float)tally_comm_size(c));
            tally_op_free(op[i]);
        }
    }
}

static int opposite_orders(int rank, void *arg)
{
    tally_comm *c = job_open();
    shuffle_rounds(c, rank, UNDER_SANITIZER ? 6 : 30, false);
    services_hold_nothing(c);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_opposite_orders(void **state)
{
    job_run(&(struct job){.ranks = 2,
                          .main = opposite_orders,
                          .settings = {"TALLY_PART_BYTES=4096", "TALLY_WINDOW_PARTS=1",
                                       "TALLY_CREDIT_BYTES=4096"}});
    job_run(&(struct job){
        .ranks = 3,
        .tallyds = 2,
        .main = opposite_orders,
        .settings = {"TALLY_PART_BYTES=4096", "TALLY_WINDOW_PARTS=1", "TALLY_CREDIT_BYTES=4096"}});
}

static int quarrel(int rank, void *arg)
{
    tally_comm *c = job_open();
    shuffle_rounds(c, rank, UNDER_SANITIZER ? 8 : 40, true);
    services_hold_nothing(c);
    shuffle_rounds(c, rank, 2, false);
    services_hold_nothing(c);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

/* Verdicts while windows are shut. */
static void test_quarrel_in_small_windows(void **state)
{
    job_run(&(struct job){
        .ranks = 3,
        .tallyds = 1,
        .main = quarrel,
        .settings = {"TALLY_PART_BYTES=4096", "TALLY_WINDOW_PARTS=1", "TALLY_CREDIT_BYTES=4096"}});
}

/* Verdicts while slots are dropped and asked for again. */
static void test_quarrel_in_little_memory(void **state)
{
    job_run(&(struct job){.ranks = 3,
                          .tallyds = 1,
                          .main = quarrel,
                          .settings = {"TALLY_PART_BYTES=4096", "TALLY_WINDOW_PARTS=64",
                                       "TALLY_CREDIT_BYTES=1M", "TALLY_MEMORY=1K"}});
}

/* What a rank has pushed before the others stays at the services, and does not keep it from pushing what is next. */
static int ahead(int rank, void *arg)
{
    enum { PARTS = 200, PART = 4096 };
    static float x[PARTS * PART / sizeof(float)];
    tally_comm *c = job_open();
    tally_op *op = NULL;
    for (int phase = 0; phase < 2; phase++) {
        if (phase == rank)
            CHECK(tally_push_pull(c, "x", x, x, PARTS * PART / sizeof *x, TALLY_FLOAT32, TALLY_SUM, NULL,
                                  &op) == 0);
        for (int i = 0; rank == 0 && phase == 0 && reported(c, "bytes_in_use") < PARTS * PART; i++) {
            CHECK(i < 2000);
            job_sleep_ms(5);
        }
        barrier(c);
    }
    CHECK(tally_op_wait(op, -1) == 0);
    tally_op_free(op);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_ahead(void **state)
{
    job_run(&(struct job){
        .ranks = 2, .tallyds = 2, .main = ahead, .settings = {"TALLY_PART_BYTES=4K", "TALLY_LOCAL=off"}});
}

/* --- what a caller may do wrong ------------------------------------------------------------------ */

#define REFUSED(call, sentence) \
    do { \
        CHECK((call) == -EINVAL && op == NULL); \
        CHECK_HOLDS(tally_error(), sentence); \
    } while (0)

static void refuses_no_comm(void)
{
    static float x[2];
    const size_t one[] = {1, 1};
    const char *why = "the communicator is NULL: open one first";
    tally_op *op = NULL;
    REFUSED(tally_push_pull(NULL, "x", x, x, 2, TALLY_FLOAT32, TALLY_SUM, NULL, &op), why);
    REFUSED(tally_reduce(NULL, "x", x, x, 2, TALLY_FLOAT32, TALLY_SUM, 0, NULL, &op), why);
    REFUSED(tally_reduce_scatter(NULL, "x", x, x, one, TALLY_FLOAT32, TALLY_SUM, NULL, &op), why);
    REFUSED(tally_broadcast(NULL, "x", x, 2, TALLY_FLOAT32, 0, NULL, &op), why);
    REFUSED(tally_allgather(NULL, "x", x, 2, TALLY_FLOAT32, NULL, &op), why);
    REFUSED(tally_allgather_into(NULL, "x", x, x, 1, TALLY_FLOAT32, NULL, &op), why);
    REFUSED(tally_alltoall(NULL, "x", x, one, x, one, TALLY_FLOAT32, NULL, &op), why);
    REFUSED(tally_gather(NULL, "x", x, 1, x, one, TALLY_FLOAT32, 0, NULL, &op), why);
    REFUSED(tally_scatter(NULL, "x", x, one, x, 1, TALLY_FLOAT32, 0, NULL, &op), why);
    REFUSED(tally_barrier(NULL, "x", NULL, &op), why);
    REFUSED(tally_join(NULL, NULL, &op), why);
    REFUSED(tally_send(NULL, x, 2, TALLY_FLOAT32, 0, 1, NULL, &op), why);
    REFUSED(tally_recv(NULL, x, 2, TALLY_FLOAT32, 0, 1, NULL, &op), why);
    REFUSED(tally_probe(NULL, 1, NULL, &op), why);
    REFUSED(tally_refuse(NULL, "x", TALLY_PUSH_PULL, NULL, "why"), why);
    CHECK(tally_comm_has_pool(NULL) == 0);
}

static int bad_calls(int rank, void *arg)
{
    tally_comm *c = job_open();
    static float x[100];
    tally_op *op = NULL, *twin = NULL;
    const size_t one_each[] = {1, 1};
    int64_t shape[] = {10, 11}, wraps[] = {1ll << 32, 1ll << 32}, negative[] = {-1, -100};
    struct tally_options o = {.size = sizeof o};
#define SUM_REFUSED(in, out, count, type, sum, options, sentence) \
    REFUSED(tally_push_pull(c, "x", in, out, count, type, sum, options, &op), sentence)
    SUM_REFUSED(NULL, x, 100, TALLY_FLOAT32, TALLY_SUM, NULL,
                "NULL pointer for 100 elements: pass the address");
    SUM_REFUSED(x, NULL, 100, TALLY_FLOAT32, TALLY_SUM, NULL,
                "NULL pointer for 100 elements: pass the address");
    SUM_REFUSED(x, x, 100, (enum tally_dtype)15, TALLY_SUM, NULL,
                "15 is no dtype: pass TALLY_FLOAT32 or another");
    SUM_REFUSED(x, x, 100, (enum tally_dtype)256, TALLY_SUM, NULL, "256 is no dtype");
    SUM_REFUSED(x, x, 100, TALLY_FLOAT32, (enum tally_reduction)50, NULL,
                "50 is no reduction: pass TALLY_SUM or another");
    SUM_REFUSED(x, x, 100, TALLY_FLOAT32, (enum tally_reduction)5, NULL, "bitwise reductions need integers");
    SUM_REFUSED(x, x, 100, TALLY_BOOL, TALLY_AVERAGE, NULL, "booleans have no average");
    SUM_REFUSED(x, x, 10, TALLY_COMPLEX64, TALLY_MAX, NULL, "complex numbers have no maximum");
    SUM_REFUSED(x, x, SIZE_MAX, TALLY_FLOAT32, TALLY_SUM, NULL, "a tensor has less than 2^60 bytes");
    REFUSED(tally_broadcast(c, "x", x, 100, TALLY_FLOAT32, 2, NULL, &op), "root 2 is no rank from 0 to 1");
    REFUSED(tally_broadcast(c, "x", x, 100, TALLY_FLOAT32, -1, NULL, &op), "root -1 is no rank from 0 to 1");
    REFUSED(tally_reduce_scatter(c, "x", x, x, NULL, TALLY_FLOAT32, TALLY_SUM, NULL, &op),
            "counts is NULL: pass a count for each rank");
    REFUSED(tally_alltoall(c, "x", x, one_each, x, NULL, TALLY_FLOAT32, NULL, &op),
            "take is NULL: pass a count");
    REFUSED(tally_alltoall(c, "x", x, one_each, NULL, one_each, TALLY_FLOAT32, NULL, &op),
            "NULL pointer for 2 elements");
    o.prescale = NAN;
    SUM_REFUSED(x, x, 100, TALLY_FLOAT32, TALLY_SUM, &o, "a scale factor is not finite");
    o.prescale = INFINITY;
    SUM_REFUSED(x, x, 100, TALLY_FLOAT32, TALLY_SUM, &o, "a scale factor is not finite");
    o = (struct tally_options){.size = sizeof o, .ndim = 2, .shape = shape};
    SUM_REFUSED(x, x, 100, TALLY_FLOAT32, TALLY_SUM, &o, "the shape do not multiply to the count, 100");
    o.shape = wraps;
    SUM_REFUSED(x, x, 0, TALLY_FLOAT32, TALLY_SUM, &o, "the shape do not multiply to the count, 0");
    o.shape = negative;
    SUM_REFUSED(x, x, 100, TALLY_FLOAT32, TALLY_SUM, &o, "dimension 0 of the shape is -1: pass 0 or more");
    o.shape = NULL;
    SUM_REFUSED(x, x, 100, TALLY_FLOAT32, TALLY_SUM, &o, "shape is NULL and ndim is 2: pass the lengths");
    o = (struct tally_options){.size = 0};
    SUM_REFUSED(x, x, 100, TALLY_FLOAT32, TALLY_SUM, &o, "set it to sizeof(struct tally_options)");
    o = (struct tally_options){.size = sizeof o, .space = 256};
    SUM_REFUSED(x, x, 100, TALLY_FLOAT32, TALLY_SUM, &o, "space 256 is not from 0 to 255");
    REFUSED(tally_refuse(c, "x", 0, NULL, "why"),
            "0 is no kind of operation that can be refused: pass one of enum tally_kind, but no message");
    REFUSED(tally_refuse(c, "x", TALLY_SCATTER + 1, NULL, "why"), "is no kind of operation");
    refuses_no_comm();
    /* None of these has counted as a round. */
    sums_well(c, "x", 100);
    /* In flight twice: rank 1 comes only when rank 0 has tried. */
    if (rank == 0) {
        CHECK(tally_push_pull(c, "y", x, x, 100, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
        CHECK(tally_push_pull(c, "y", x, x, 100, TALLY_FLOAT32, TALLY_SUM, NULL, &twin) == -EBUSY && !twin);
        CHECK_HOLDS(tally_error(), "'y' is in flight");
        const void *data;
        size_t bytes;
        const int64_t *dims;
        CHECK(tally_op_gathered(op, &data, &bytes, &dims) == -EINVAL);
    }
    barrier(c);
    if (rank == 1)
        CHECK(tally_push_pull(c, "y", x, x, 100, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
    CHECK(tally_op_wait(op, -1) == 0);
    tally_op_free(op);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_bad_calls(void **state)
{
    job_run(&(struct job){.ranks = 2, .main = bad_calls});
}

/* A gathered result that fits into no memory ends the job with a sentence, not with a crash. */
static int gather_too_much(int rank, void *arg)
{
    tally_comm *c = job_open();
    static float x[16];
    tally_op *op;
    const char *why;
    size_t count = rank == 1 ? (size_t)1 << 52 : 16;
    CHECK(tally_allgather(c, "all", x, count, TALLY_FLOAT32, NULL, &op) == 0);
    int err = tally_op_wait(op, -1);
    CHECK(err < 0 && err != -EINVAL && err != -ETIMEDOUT);
    CHECK_HOLDS(tally_op_error(op), "cannot take the result of 'all'");
    CHECK(tally_comm_status(c, &why) < 0);
    CHECK_HOLDS(why, "cannot take the result of 'all'");
    tally_op_free(op);
    CHECK(tally_barrier(c, NULL, NULL, &op) < 0);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_gather_too_much(void **state)
{
    job_run(&(struct job){.ranks = 2, .main = gather_too_much});
}

static int with_deadline(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    static double x[1000];
    tally_op *op;
    struct tally_event e;
    x[7] = rank + 1;
    if (rank == 1)
        job_await(&b->stage, 1);
    CHECK(tally_push_pull(c, "x", x, x, 1000, TALLY_FLOAT64, TALLY_AVERAGE, NULL, &op) == 0);
    if (rank == 0) {
        CHECK(tally_op_poll(op) == 0);
        CHECK(tally_op_wait(op, 0) == -ETIMEDOUT);
        CHECK(tally_op_wait(op, 30) == -ETIMEDOUT);
        CHECK(strcmp(tally_op_error(op), "") == 0);
        CHECK(tally_comm_next(c, 10, &e) == -ETIMEDOUT);
        atomic_store(&b->stage, 1);
    }
    CHECK(tally_op_wait(op, -1) == 0);
    CHECK(x[7] == 1.5);
    tally_op_free(op);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_deadline(void **state)
{
    struct board *b = job_shared(sizeof *b);
    job_run(&(struct job){.ranks = 2, .main = with_deadline, .arg = b});
}

/* Names and unnamed calls from several threads' worth of spaces: equal names in other spaces and kinds are others. */
static int spaces(int rank, void *arg)
{
    tally_comm *c = job_open();
    float x[5][8];
    tally_op *op[5];
    for (int i = 0; i < 5; i++)
        for (int k = 0; k < 8; k++)
            x[i][k] = (float)i;
    for (int j = 0; j < 4; j++) {
        int i = rank ? 3 - j : j;
        struct tally_options o = {.size = sizeof o, .space = (uint32_t)i * 85};
        CHECK(tally_push_pull(c, "same", x[i], x[i], 8, TALLY_FLOAT32, TALLY_SUM, &o, &op[i]) == 0);
    }
    CHECK(tally_broadcast(c, "same", x[4], 8, TALLY_FLOAT32, 1, NULL, &op[4]) == 0);
    for (int i = 0; i < 5; i++) {
        CHECK(tally_op_wait(op[i], -1) == 0);
        CHECK(x[i][3] == (float)i * (i < 4 ? 2.0f : 1.0f));
        tally_op_free(op[i]);
    }
    /* Handles let go of early, and no handle at all. */
    static float y[51][3000];
    for (int i = 0; i < 50; i++) {
        CHECK(tally_push_pull(c, NULL, y[i], y[i], 3000, TALLY_FLOAT32, TALLY_MAX, NULL, &op[0]) == 0);
        tally_op_free(op[0]);
        barrier(c);
    }
    CHECK(tally_push_pull(c, NULL, y[50], y[50], 3000, TALLY_FLOAT32, TALLY_MAX, NULL, NULL) == 0);
    services_hold_nothing(c);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_spaces(void **state)
{
    job_run(&(struct job){.ranks = 2, .tallyds = 1, .main = spaces});
}

/* --- fork ---------------------------------------------------------------------------------------- */

static int forks(int rank, void *arg)
{
    tally_comm *c = job_open();
    static float x[1000];
    char pid[32];
    tally_op *op, *other;
    struct tally_event e;
    CHECK(tally_barrier(c, "before", NULL, &op) == 0);
    snprintf(pid, sizeof pid, "process %d", (int)getpid());
    fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(tally_push_pull(c, "x", x, x, 1000, TALLY_FLOAT32, TALLY_SUM, NULL, &other) == -ECHILD);
        CHECK_HOLDS(tally_error(), pid);
        CHECK(tally_op_wait(op, -1) == -ECHILD);
        CHECK(tally_comm_next(c, -1, &e) == -ECHILD);
        CHECK_HOLDS(tally_error(), pid);
        CHECK(tally_comm_report(c, -1, &(char *){NULL}) == -ECHILD);
        CHECK(tally_plan(c, 0, 0, NULL, NULL) == -ECHILD);
        tally_op_free(op);
        CHECK(tally_comm_close(c) == 0);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(tally_op_wait(op, -1) == 0);
    tally_op_free(op);
    sums_well(c, "x", 100000);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_fork(void **state)
{
    job_run(&(struct job){.ranks = 2, .tallyds = 1, .main = forks});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_different_sizes),
        cmocka_unit_test(test_every_disagreement),
        cmocka_unit_test(test_late_third),
        cmocka_unit_test(test_call_names),
        cmocka_unit_test(test_other_kinds),
        cmocka_unit_test(test_refuse),
        cmocka_unit_test(test_too_many_elements),
        cmocka_unit_test(test_refuse_to_some),
        cmocka_unit_test(test_plans),
        cmocka_unit_test(test_other_credits),
        cmocka_unit_test(test_opposite_orders),
        cmocka_unit_test(test_quarrel_in_small_windows),
        cmocka_unit_test(test_quarrel_in_little_memory),
        cmocka_unit_test(test_ahead),
        cmocka_unit_test(test_bad_calls),
        cmocka_unit_test(test_gather_too_much),
        cmocka_unit_test(test_deadline),
        cmocka_unit_test(test_spaces),
        cmocka_unit_test(test_fork),
    };
    return cmocka_run_group_tests_name("ranks", tests, NULL, NULL);
}
