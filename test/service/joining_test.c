/* joining_test.c - tally_join(): ranks without input count as zeros in all that the others sum, whatever the layout; all
 * else is refused; and once all have joined everything begins anew. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>

#include "job.h"
#include "reference.h"

#include <cmocka.h>

enum { MOST = 50000, ROUNDS = 6, EPOCHS = 3, PER_STEP = 4 };

struct board {
    atomic_int stage;
    int ranks, tallyds;
    const int *machine;
    int groups;
    bool in_pool;
};

/* The sum of each operation of each step.  The test computes it once for a layout, and ranks inherit it. */
static uint8_t *wanted[EPOCHS][ROUNDS][PER_STEP];

static tally_comm *open_comm(void)
{
    tally_comm *c;
    CHECK(tally_comm_open(NULL, &c) == 0);
    return c;
}

static void ends(tally_op *op, int expected)
{
    int err = tally_op_wait(op, -1);
    if (err != expected)
        fprintf(stderr, "%d, not %d: %s\n", err, expected, tally_op_error(op));
    CHECK(err == expected);
    tally_op_free(op);
}

static int join_all(tally_comm *c)
{
    tally_op *op;
    CHECK(tally_join(c, NULL, &op) == 0);
    int err = tally_op_wait(op, -1);
    if (err)
        fprintf(stderr, "join: %s\n", tally_op_error(op));
    CHECK(err == 0);
    int last = tally_op_source(op);
    tally_op_free(op);
    return last;
}

/* --- the bits ------------------------------------------------------------------------------------ */

struct kind {
    int dtype, reduction;
    size_t count, bytes;
    struct tally_options options;
};

static struct kind kind_of(int i)
{
    static const size_t counts[] = {1, 3000, 40000, MOST, 7, 16384};
    struct kind k = {.dtype = i % REFERENCE_DTYPES,
                     .reduction = (i * 7 + i / REFERENCE_DTYPES) % 8,
                     .count = counts[(i * 5 + i / 8) % 6]};
    bool complex = k.dtype == TALLY_COMPLEX64 || k.dtype == TALLY_COMPLEX128;
    bool real = complex || k.dtype <= TALLY_BFLOAT16;
    if (complex && (k.reduction == TALLY_MIN || k.reduction == TALLY_MAX))
        k.reduction = TALLY_PRODUCT;
    if (k.reduction >= TALLY_BAND && (real || k.dtype == TALLY_BOOL))
        k.reduction = i % 2 ? TALLY_AVERAGE : TALLY_SUM;
    if (k.dtype == TALLY_BOOL && k.reduction == TALLY_AVERAGE)
        k.reduction = TALLY_SUM;
    k.bytes = k.count * tally_dtype_size((enum tally_dtype)k.dtype);
    k.options = (struct tally_options){.size = sizeof k.options, .priority = i % 3};
    if (k.dtype != TALLY_BOOL && k.reduction < TALLY_BAND) {
        k.options.prescale = i % 4 ? 0 : 0.5;
        k.options.postscale = i % 3 ? 0 : 3;
    }
    return k;
}

/* What rank `rank` brings to operation i of a round; random bits, of which some are NaN, and zeros of both signs. */
static void fill(uint8_t *to, const struct kind *k, int rank, int i)
{
    uint64_t seed = (uint64_t)(i * 1000 + rank) + 1;
    for (size_t at = 0; at < k->bytes; at += 8) {
        uint64_t x = job_random(&seed);
        if (x % 5 == 0)
            x = 0x8000000080000000ull;
        memcpy(to + at, &x, k->bytes - at < 8 ? k->bytes - at : 8);
    }
    for (size_t at = 0; k->dtype == TALLY_BOOL && at < k->bytes; at++)
        to[at] &= 1;
}

static void expect(const struct board *b, const struct kind *k, int i, const int *steps, int step,
                   uint8_t *out)
{
    const void *inputs[JOB_MOST_RANKS];
    int each[JOB_MOST_RANKS];
    for (int rank = 0; rank < b->ranks; rank++) {
        uint8_t *in = calloc(1, k->bytes + 8);
        CHECK(in);
        if (step < steps[rank])
            fill(in, k, rank, i);
        inputs[rank] = in;
        each[rank] = b->machine ? b->machine[rank] : rank;
    }
    bool hops = (k->dtype == TALLY_FLOAT16 || k->dtype == TALLY_BFLOAT16) && b->machine && b->groups > 1;
    struct reference r = {.dtype = k->dtype,
                          .reduction = k->reduction,
                          .ranks = b->ranks,
                          .prescale = k->options.prescale != 0 ? k->options.prescale : 1,
                          .postscale = k->options.postscale != 0 ? k->options.postscale : 1,
                          .groups = hops ? b->groups : 1,
                          .group = hops ? each : NULL};
    reference_reduce(&r, inputs, out, k->count);
    for (int rank = 0; rank < b->ranks; rank++)
        free((void *)inputs[rank]);
}

/* Rank i of the n-th epoch does so many steps, each of a few operations. */
static int steps_of(int epoch, int rank, int ranks)
{
    return epoch == 2 ? ROUNDS : (rank * 5 + epoch * 3) % (ranks + 1) % ROUNDS;
}

/* Of the n-th operation of a step. */
static int number(int epoch, int step, int n)
{
    return step * PER_STEP + n + epoch * 100;
}

/* Of all steps that some rank takes. */
static void expect_all(const struct board *b)
{
    for (int epoch = 0; epoch < EPOCHS; epoch++) {
        int steps[JOB_MOST_RANKS], most = 0;
        for (int i = 0; i < b->ranks; i++) {
            steps[i] = steps_of(epoch, i, b->ranks);
            most = steps[i] > most ? steps[i] : most;
        }
        for (int step = 0; step < most; step++)
            for (int n = 0; n < PER_STEP; n++) {
                int i = number(epoch, step, n);
                struct kind k = kind_of(i);
                assert_non_null(wanted[epoch][step][n] = malloc(k.bytes + 8));
                expect(b, &k, i, steps, step, wanted[epoch][step][n]);
            }
    }
}

static void forget_all(void)
{
    for (int i = 0; i < EPOCHS * ROUNDS * PER_STEP; i++)
        free(wanted[i / (ROUNDS * PER_STEP)][i / PER_STEP % ROUNDS][i % PER_STEP]);
    memset(wanted, 0, sizeof wanted);
}

static int train(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = open_comm();
    for (int epoch = 0; epoch < EPOCHS; epoch++) {
        int steps[JOB_MOST_RANKS];
        for (int i = 0; i < b->ranks; i++)
            steps[i] = steps_of(epoch, i, b->ranks);
        for (int step = 0; step < steps[rank]; step++) {
            void *in[PER_STEP];
            tally_op *op[PER_STEP];
            for (int n = 0; n < PER_STEP; n++) {
                int i = number(epoch, step, n);
                struct kind k = kind_of(i);
                char name[16];
                snprintf(name, sizeof name, "t%d", n);
                if (b->in_pool)
                    CHECK(tally_alloc(c, k.bytes, &in[n]) == 0);
                else
                    CHECK((in[n] = malloc(k.bytes + 8)));
                fill(in[n], &k, rank, i);
                CHECK(
                    tally_push_pull(c, n % 2 ? name : NULL, in[n], in[n], k.count, (enum tally_dtype)k.dtype,
                                    (enum tally_reduction)k.reduction, &k.options, &op[n]) == 0);
            }
            for (int n = 0; n < PER_STEP; n++) {
                int i = number(epoch, step, n);
                struct kind k = kind_of(i);
                ends(op[n], 0);
                if (memcmp(wanted[epoch][step][n], in[n], k.bytes) != 0) {
                    fprintf(stderr, "epoch %d, step %d, operation %d of type %d, reduction %d, count %zu\n",
                            epoch, step, i, k.dtype, k.reduction, k.count);
                    CHECK(!"another sum");
                }
                if (b->in_pool)
                    CHECK(tally_free(in[n]) == 0);
                else
                    free(in[n]);
            }
            tally_op *meet;
            CHECK(tally_barrier(c, NULL, NULL, &meet) == 0);
            ends(meet, 0);
        }
        int last = join_all(c), most = 0;
        for (int i = 0; i < b->ranks; i++)
            most = steps[i] > most ? steps[i] : most;
        CHECK(steps[last] == most);
    }
    CHECK(tally_comm_status(c, NULL) == 0);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

/* Jobs of a layout: with so many numbers of tallyd, from none on, in and out of the pool. */
static void run(const char *layout, int tallyds, int pools)
{
    int machine[JOB_MOST_RANKS], groups = 0;
    bool own = false;
    struct board *b = job_shared(sizeof *b);
    b->ranks = (int)strlen(layout);
    for (int i = 0; i < b->ranks; i++) {
        machine[i] = layout[i] - 'a';
        groups = machine[i] >= groups ? machine[i] + 1 : groups;
    }
    own = groups == b->ranks;
    b->machine = own ? NULL : machine;
    b->groups = groups;
    expect_all(b);
    for (int i = 0; i < tallyds * pools; i++) {
        b->in_pool = i / tallyds;
        struct job j = {.ranks = b->ranks,
                        .tallyds = i % tallyds,
                        .machine = own ? NULL : machine,
                        .main = train,
                        .arg = b,
                        .settings = {"TALLY_PART_BYTES=64K"}};
        job_start(&j);
        job_finish(&j);
        job_clear(&j);
    }
    forget_all();
}

static void test_bits_of_machines(void **state)
{
    static const char *const layouts[] = {"a", "ab", "abc", "abcde"};
    for (int i = 0; i < 4; i++)
        run(layouts[i], 3, 1);
}

static void test_bits_in_shared_memory(void **state)
{
    run("aa", 1, 2);
    run("aaaa", 1, 2);
    run("aaaaa", 1, 2);
}

static void test_bits_of_teams(void **state)
{
    run("aabb", 2, 2);
    run("aaaabbbb", 2, 2);
    run("aabbccdd", 2, 2);
    run("aaaabbcc", 2, 1);
    run("aabc", 2, 1);
}

/* --- what else they may do ----------------------------------------------------------------------- */

/* Until no service holds anything: nothing is left of rounds that some ranks took no part in. */
static void expect_nothing_held(tally_comm *c)
{
    for (int i = 0;; i++) {
        char *json;
        unsigned long long sum = 0, v;
        CHECK(tally_comm_report(c, 60000, &json) == 0);
        for (const char *at = json; (at = strstr(at, "\"rounds_open\": ")); at++)
            if (sscanf(at + 15, "%llu", &v) == 1)
                sum += v;
        for (const char *at = json; (at = strstr(at, "\"bytes_in_use\": ")); at++)
            if (sscanf(at + 16, "%llu", &v) == 1)
                sum += v;
        free(json);
        if (!sum)
            return;
        CHECK(i < 2000);
        job_sleep_ms(5);
    }
}

static void refused(tally_op *op, int joined)
{
    char text[40];
    int err = tally_op_wait(op, -1);
    snprintf(text, sizeof text, "rank %d has joined", joined);
    CHECK_HOLDS(tally_op_error(op), text);
    CHECK(err == -EINVAL);
    tally_op_free(op);
}

/* The others' calls of each kind while rank `joined` has joined; what cannot be is refused on each of them. */
static void try_all(tally_comm *c, int joined, tally_group *pair)
{
    int n = tally_comm_size(c), other = (joined + 1) % n;
    float in[64] = {1}, out[64];
    size_t each[JOB_MOST_RANKS];
    tally_op *op;
    for (int i = 0; i < n; i++)
        each[i] = 2;
    CHECK(tally_broadcast(c, "b", in, 4, TALLY_FLOAT32, other, NULL, &op) == 0);
    refused(op, joined);
    CHECK(tally_allgather(c, "g", in, 4, TALLY_FLOAT32, NULL, &op) == 0);
    refused(op, joined);
    float *own = calloc((size_t)(n + 1) * MOST, sizeof *own);
    CHECK(own);
    for (int i = 0; i < 20; i++) { /* its parts are under way before the home says no */
        CHECK(tally_allgather_into(c, "i", own, own + MOST, MOST, TALLY_FLOAT32, NULL, &op) == 0);
        refused(op, joined);
    }
    free(own);
    CHECK(tally_alltoall(c, "a", in, each, out, each, TALLY_FLOAT32, NULL, &op) == 0);
    refused(op, joined);
    CHECK(tally_reduce(c, "r", in, out, 4, TALLY_FLOAT32, TALLY_SUM, other, NULL, &op) == 0);
    refused(op, joined);
    CHECK(tally_reduce_scatter(c, NULL, in, out, each, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
    refused(op, joined);
    CHECK(tally_gather(c, NULL, in, 2, out, each, TALLY_FLOAT32, other, NULL, &op) == 0);
    refused(op, joined);
    CHECK(tally_scatter(c, NULL, in, each, out, 2, TALLY_FLOAT32, other, NULL, &op) == 0);
    refused(op, joined);
    const char *const names[] = {"p"};
    const uint64_t bytes[] = {4};
    CHECK(tally_plan(c, 0, 1, names, bytes) == -EINVAL);
    CHECK_HOLDS(tally_error(), "joined");
    if (pair) {
        struct tally_options o = {.size = sizeof o, .group = pair};
        CHECK(tally_push_pull(c, "s", in, out, 4, TALLY_FLOAT32, TALLY_SUM, &o, &op) == 0);
        refused(op, joined);
        CHECK(tally_barrier(c, NULL, &o, &op) == 0);
        refused(op, joined);
    }
    /* A gathering that says so goes on. */
    struct tally_options o = {.size = sizeof o, .partial = 1};
    const void *data;
    const int64_t *dims;
    size_t length;
    CHECK(tally_allgather(c, NULL, in, 3, TALLY_FLOAT32, &o, &op) == 0);
    CHECK(tally_op_wait(op, -1) == 0 && tally_op_gathered(op, &data, &length, &dims) == 0);
    CHECK(length == 12 * (size_t)(n - 1) && dims[joined] == 0 && dims[other] == 3);
    tally_op_free(op);
    /* A rank that refuses is heard by those that are there. */
    if (tally_comm_rank(c) == other) {
        CHECK(tally_refuse(c, "no", TALLY_PUSH_PULL, NULL, "for a test") == 0);
    } else {
        CHECK(tally_push_pull(c, "no", in, out, 64, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
        ends(op, -EINVAL);
    }
    CHECK(tally_push_pull(c, "s", in, out, 64, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
    ends(op, 0);
    CHECK(out[0] == n - 1);
}

static int refusals(int rank, void *arg)
{
    tally_comm *c = open_comm();
    int n = tally_comm_size(c);
    const char *const names[] = {"s", "big"};
    const uint64_t bytes[] = {256, 4 * MOST};
    CHECK(tally_plan(c, 0, 2, names, bytes) == 0);
    for (int joined = 0; joined < n; joined++) {
        int ranks[] = {joined, (joined + 1) % n};
        tally_group *pair = NULL;
        char name[16];
        snprintf(name, sizeof name, "pair %d", joined);
        if (rank == ranks[0] || rank == ranks[1])
            CHECK(tally_group_create(c, name, ranks, 2, &pair) == 0);
        if (rank != joined)
            try_all(c, joined, pair);
        CHECK(join_all(c) != joined);
        /* And all works again, names and numbers in step. */
        tally_op *op;
        float *big = calloc(MOST, sizeof *big), sum = 0;
        CHECK(big);
        big[MOST - 1] = 1;
        CHECK(tally_push_pull(c, "big", big, big, MOST, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
        ends(op, 0);
        CHECK(big[MOST - 1] == n);
        free(big);
        float one = 1;
        CHECK(tally_push_pull(c, NULL, &one, &sum, 1, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
        ends(op, 0);
        CHECK(sum == n);
        CHECK(tally_broadcast(c, "b", &one, 1, TALLY_FLOAT32, joined, NULL, &op) == 0);
        ends(op, 0);
        if (pair) {
            struct tally_options o = {.size = sizeof o, .group = pair};
            CHECK(tally_push_pull(c, "s", &one, &sum, 1, TALLY_FLOAT32, TALLY_SUM, &o, &op) == 0);
            ends(op, 0);
            CHECK(sum == 2);
        }
    }
    expect_nothing_held(c);
    join_all(c);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

/* Operations that are under way when their rank joins count with what it brings; others' never come. */
static int under_way(int rank, void *arg)
{
    tally_comm *c = open_comm();
    int n = tally_comm_size(c);
    for (int round = 0; round < 30; round++) {
        enum { EACH = 3 };
        static float in[EACH][JOB_MOST_RANKS][40000];
        tally_op *op[EACH * JOB_MOST_RANKS];
        int count = 0;
        /* Of the names that all could use each rank uses some, and in an order of its own. */
        for (int i = 0; i < n; i++)
            for (int k = 0; k < EACH; k++) {
                int of = (i + rank) % n, size = k == 0 ? 1 : k == 1 ? 3000 : 40000;
                char name[16];
                if ((of + k + round) % 3 == rank % 3)
                    continue;
                snprintf(name, sizeof name, "%d.%d", of, k);
                for (int e = 0; e < size; e++)
                    in[k][of][e] = (float)(rank + 1);
                CHECK(tally_push_pull(c, name, in[k][of], in[k][of], (size_t)size, TALLY_FLOAT32, TALLY_SUM,
                                      NULL, &op[count++]) == 0);
            }
        if (rank == round % n)
            job_sleep_ms(round % 3);
        join_all(c);
        for (int i = 0; i < count; i++)
            ends(op[i], 0);
        for (int of = 0; of < n; of++)
            for (int k = 0; k < EACH; k++) {
                float sum = 0;
                for (int r = 0; r < n; r++)
                    sum += (of + k + round) % 3 == r % 3 ? 0 : (float)(r + 1);
                if ((of + k + round) % 3 != rank % 3)
                    CHECK(in[k][of][0] == sum && in[k][of][(k == 0 ? 1 : k == 1 ? 3000 : 40000) - 1] == sum);
            }
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

/* A rank that joins does its part of the broadcasts that it has submitted. */
static int broadcasts_under_way(int rank, void *arg)
{
    enum { COUNT = 40000 };
    tally_comm *c = open_comm();
    int n = tally_comm_size(c);
    void *pool;
    CHECK(tally_alloc(c, COUNT * sizeof(float), &pool) == 0);
    for (int round = 0; round < 30; round++) {
        float *x = pool;
        tally_op *op;
        int root = round % n;
        for (int i = 0; i < COUNT; i++)
            x[i] = (float)(i + rank + round);
        if (rank == round / 3 % n)
            job_sleep_ms(round % 3);
        CHECK(tally_broadcast(c, "b", x, COUNT, TALLY_FLOAT32, root, NULL, &op) == 0);
        join_all(c);
        ends(op, 0);
        for (int i = 0; i < COUNT; i++)
            CHECK(x[i] == (float)(i + root + round));
    }
    CHECK(tally_free(pool) == 0);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

/* Ranks join as soon as they have something that others still work on. */
static int at_once(int rank, void *arg)
{
    tally_comm *c = open_comm();
    uint64_t seed = 5 + (uint64_t)rank;
    enum { COUNT = 60000 };
    float *in;
    CHECK(tally_alloc(c, COUNT * sizeof *in, (void **)&in) == 0);
    for (int round = 0; round < 100; round++) {
        tally_op *op;
        const void *data;
        const int64_t *dims;
        size_t length;
        int n = tally_comm_size(c);
        for (int i = 0; i < COUNT; i++)
            in[i] = (float)rank;
        CHECK(tally_push_pull(c, "x", in, in, COUNT, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
        if (round % 2)
            ends(op, 0);
        tally_op *gather;
        CHECK(tally_allgather(c, NULL, &round, sizeof round, TALLY_UINT8, NULL, &gather) == 0);
        CHECK(tally_op_wait(gather, -1) == 0 && tally_op_gathered(gather, &data, &length, &dims) == 0);
        for (int i = 0; i < n; i++)
            CHECK(memcmp((const char *)data + (size_t)i * sizeof round, &round, sizeof round) == 0);
        tally_op_free(gather);
        if (round % 2 == 0)
            ends(op, 0);
        CHECK(in[0] == (float)(n * (n - 1) / 2) && in[COUNT - 1] == in[0]);
        if (job_random(&seed) % 4 == 0)
            job_sleep_ms(1);
        join_all(c);
    }
    CHECK(tally_free(in) == 0);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static int wrong_use(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = open_comm();
    tally_op *op, *again;
    float one = 1, two = 0;
    if (rank == 0) {
        CHECK(tally_join(c, NULL, &op) == 0);
        CHECK(tally_join(c, NULL, &again) == -EINVAL);
        CHECK_HOLDS(tally_error(), "joined already");
        CHECK(tally_push_pull(c, NULL, &one, &two, 1, TALLY_FLOAT32, TALLY_SUM, NULL, &again) == -EINVAL);
        CHECK_HOLDS(tally_error(), "has joined");
        CHECK(tally_op_source(op) == -EAGAIN && tally_op_poll(op) == 0);
        CHECK(tally_op_wait(op, 50) == -ETIMEDOUT);
        /* Messages go on, over the join. */
        CHECK(tally_send(c, &one, 1, TALLY_FLOAT32, 1, 7, NULL, NULL) == 0);
        atomic_store(&b->stage, 1);
        ends(op, 0);
        CHECK(tally_recv(c, &two, 1, TALLY_FLOAT32, 1, 7, NULL, &op) == 0);
        ends(op, 0);
        CHECK(two == 3);
    } else {
        job_await(&b->stage, 1);
        if (rank == 1) {
            CHECK(tally_recv(c, &two, 1, TALLY_FLOAT32, 0, 7, NULL, &op) == 0);
            ends(op, 0);
            CHECK(two == 1);
            two = 3;
            CHECK(tally_send(c, &two, 1, TALLY_FLOAT32, 0, 7, NULL, NULL) == 0);
        }
        join_all(c);
    }
    /* One that leaves instead ends the others' joins. */
    if (rank == 1) {
        job_await(&b->stage, 2);
        CHECK(tally_comm_close(c) == 0);
        return 0;
    }
    struct tally_options queued = {.size = sizeof queued, .queued = 1, .tag = &one};
    struct tally_event event;
    CHECK(tally_join(c, &queued, &op) == 0);
    atomic_store(&b->stage, rank == 0 ? 2 : atomic_load(&b->stage));
    CHECK(tally_comm_next(c, -1, &event) == 0 && event.op == op && event.tag == &one);
    CHECK(event.status == -ESHUTDOWN);
    CHECK_HOLDS(tally_op_error(op),
                rank == 0 ? "rank 1 has left" : "has left the job"); /* rank 0 may have, too */
    tally_op_free(op);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

/* An operation fails as ever, and so does a join, where the communicator is closed under it. */
static int closed_under_it(int rank, void *arg)
{
    tally_comm *c = open_comm();
    tally_op *op;
    if (rank == 0) {
        CHECK(tally_join(c, NULL, &op) == 0);
        CHECK(tally_comm_close(c) == 0);
        CHECK(tally_op_wait(op, 0) == -ESHUTDOWN);
        tally_op_free(op);
        return 0;
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void run_all(int (*main)(int rank, void *arg), const char *layout, int tallyds)
{
    int machine[JOB_MOST_RANKS];
    struct board *b = job_shared(sizeof *b);
    struct job j = {.ranks = job_layout(layout, machine),
                    .tallyds = tallyds,
                    .machine = machine,
                    .main = main,
                    .arg = b,
                    .settings = {"TALLY_PART_BYTES=64K", "TALLY_TIMEOUT=120"}};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

static void run_everywhere(int (*main)(int rank, void *arg))
{
    run_all(main, "abc", 0);
    run_all(main, "abc", 1);
    run_all(main, "aaa", 0);
    run_all(main, "aabb", 1);
}

static void test_refusals(void **state)
{
    run_everywhere(refusals);
}

static void test_under_way(void **state)
{
    run_everywhere(under_way);
    run_all(under_way, "aaaa", 0);
    run_all(broadcasts_under_way, "aaaa", 0);
    run_all(broadcasts_under_way, "aabb", 1);
}

static void test_at_once(void **state)
{
    run_everywhere(at_once);
}

static void test_wrong_use(void **state)
{
    run_all(wrong_use, "ab", 0);
    run_all(wrong_use, "aaa", 0);
    run_all(closed_under_it, "ab", 1);
    run_all(closed_under_it, "aa", 0);
    run_all(closed_under_it, "aabb", 0);
}

/* Rank 0 of a team takes back what finds no room in shared memory, as rank 1 reads nothing.  It can join all the same. */
enum {
    POSTS = 4100,
    TEAM_BYTES = 16 << 10
}; /* more posts than there is room for; the least that a team does */

static int full(int rank, void *arg)
{
    struct board *b = arg;
    static uint8_t in[TEAM_BYTES], out[POSTS][TEAM_BYTES];
    static tally_op *op[POSTS];
    tally_comm *c = open_comm();
    if (rank == 1) {
        atomic_store(&b->stage, 1);
        raise(SIGSTOP);
    }
    job_await(&b->stage, 1);
    for (int i = 0; i < POSTS; i++) {
        char name[8];
        snprintf(name, sizeof name, "f%d", i);
        CHECK(tally_push_pull(c, name, in, out[i], TEAM_BYTES, TALLY_UINT8, TALLY_SUM, NULL, &op[i]) == 0);
    }
    if (rank == 0)
        CHECK(tally_op_cancel(op[POSTS - 1], "a test") == 0);
    ends(op[POSTS - 1], -ECANCELED);
    if (rank == 0)
        atomic_store(&b->stage, 2);
    for (int i = 0; i < POSTS - 1; i++)
        ends(op[i], 0);
    CHECK(join_all(c) >= 0);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_no_room(void **state)
{
    static const int machine[] = {0, 0, 1};
    struct board *b = job_shared(sizeof *b);
    struct job j = {.ranks = 3, .machine = machine, .main = full, .arg = b};
    job_start(&j);
    job_await(&b->stage, 2);
    kill(j.rank_pid[1], SIGCONT);
    job_finish(&j);
    job_clear(&j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits_of_machines), cmocka_unit_test(test_bits_in_shared_memory),
        cmocka_unit_test(test_bits_of_teams),    cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_under_way),        cmocka_unit_test(test_at_once),
        cmocka_unit_test(test_wrong_use),        cmocka_unit_test(test_no_room)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
