/* local_test.c - ranks that all share one machine: the bits are those of the services, whatever the tensors lie in, and the
 * pool's memory. */
#include <errno.h>
#include <setjmp.h>
#include <string.h>
#include <sys/resource.h>

#include "comm/comm.h"
#include "job.h"
#include "local/engine.h"

#include <cmocka.h>

static const int together[JOB_MOST_RANKS];

/* Runs of the same operations: reaching into each other's memory, through the service, and where all ranks, or some,
 * cannot be reached into, so that what does not lie in the pool is staged there. */
enum { REACHING, THROUGH_SERVICE, STAGED, SOME_STAGED, APART, RUNS };

struct board {
    uint64_t hash[RUNS][64];
    char way[2][8];
    int run;
};

static struct board *new_board(void)
{
    return job_shared(sizeof(struct board));
}

/* --- the bits ------------------------------------------------------------------------------------ */

static uint32_t element(int dtype)
{
    return (uint32_t)tally_dtype_size((enum tally_dtype)dtype);
}

/* Tensors of all types and reductions, in the pool and not, in place and not; the hash of each result. */
static int all_kinds(int rank, void *arg)
{
    struct board *b = arg;
    static const size_t counts[] = {0, 1, 17, 1000, 1025, 5000, 70001, 300000};
    if (b->run == STAGED || (b->run == SOME_STAGED && rank % 2))
        job_forbid_reaching();
    bool apart = b->run == APART && job_move_apart(rank);
    tally_comm *c = job_open();
    CHECK(!c->local || c->local->far == apart);
    uint64_t seed = 77 + (uint64_t)rank;
    for (int i = 0; i < 60; i++) {
        int dtype = i % 15, reduction = (i * 7 + i / 15) % 5;
        size_t count = counts[(i * 5 + i / 8) % 8], bytes = count * element(dtype);
        if (dtype == TALLY_BOOL && reduction == TALLY_AVERAGE)
            reduction = TALLY_SUM;
        if ((dtype == TALLY_COMPLEX64 || dtype == TALLY_COMPLEX128) &&
            (reduction == TALLY_MIN || reduction == TALLY_MAX))
            reduction = TALLY_PRODUCT;
        struct tally_options o = {.size = sizeof o, .prescale = i % 4 ? 0 : 0.5, .postscale = i % 3 ? 0 : 3};
        if (dtype == TALLY_BOOL)
            o.prescale = o.postscale = 0;
        void *in, *out;
        bool all_pool = i % 7 == 3, in_place = i % 5 < 2;
        bool pool_in = all_pool || (i + rank) % 3 == 0, pool_out = all_pool || (i + rank) % 2 == 0;
        if (pool_in)
            CHECK(tally_alloc(c, bytes, &in) == 0);
        else
            CHECK((in = malloc(bytes + 1)));
        if (in_place)
            out = in;
        else if (pool_out)
            CHECK(tally_alloc(c, bytes, &out) == 0);
        else
            CHECK((out = malloc(bytes + 1)));
        for (size_t at = 0; at < bytes; at += 8) {
            uint64_t x = job_random(&seed);
            memcpy((uint8_t *)in + at, &x, bytes - at < 8 ? bytes - at : 8);
        }
        char name[16];
        tally_op *op;
        snprintf(name, sizeof name, "t%d", i);
        CHECK(tally_push_pull(c, i % 6 ? name : NULL, in, out, count, (enum tally_dtype)dtype,
                              (enum tally_reduction)reduction, &o, &op) == 0);
        job_expect(op, 0);
        uint64_t h = job_hash(out, bytes);
        if (rank != i % tally_comm_size(c))
            memset(out, 0, bytes);
        CHECK(tally_broadcast(c, name, out, count, (enum tally_dtype)dtype, i % tally_comm_size(c), NULL,
                              &op) == 0);
        job_expect(op, 0);
        CHECK(job_hash(out, bytes) == h); /* all had the same */
        size_t mine = count / (size_t)(rank + 1);
        const void *data;
        size_t all;
        const int64_t *dims;
        CHECK(tally_allgather(c, name, out, mine, (enum tally_dtype)dtype, NULL, &op) == 0);
        CHECK(tally_op_wait(op, -1) == 0 && tally_op_gathered(op, &data, &all, &dims) == 0);
        size_t at = 0;
        for (int r = 0; r < tally_comm_size(c); r++) {
            CHECK(dims[r] == (int64_t)(count / (size_t)(r + 1)));
            CHECK(memcmp((const uint8_t *)data + at, out, (size_t)dims[r] * element(dtype)) == 0);
            at += (size_t)dims[r] * element(dtype);
        }
        CHECK(at == all);
        tally_op_free(op);
        CHECK(tally_barrier(c, name, NULL, &op) == 0);
        job_expect(op, 0);
        if (rank == 0)
            b->hash[b->run][i] = h;
        if (pool_in)
            CHECK(tally_free(in) == 0);
        else
            free(in);
        if (!in_place && pool_out)
            CHECK(tally_free(out) == 0);
        else if (!in_place)
            free(out);
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_same_bits(void **state)
{
    for (int ranks = 2; ranks <= 5; ranks += 3) {
        struct board *b = new_board();
        for (b->run = 0; b->run < RUNS; b->run++) {
            struct job j = {.ranks = ranks,
                            .machine = together,
                            .main = all_kinds,
                            .arg = b,
                            .settings = {b->run == THROUGH_SERVICE ? "TALLY_LOCAL=off" : "TALLY_LOCAL=on"}};
            job_start(&j);
            job_finish(&j);
            if (b->run == THROUGH_SERVICE)
                job_log_lacks(&j, 0, "shared memory");
            else
                job_log_holds(&j, 0, "shared memory");
            job_clear(&j);
        }
        for (int run = 1; run < RUNS; run++)
            for (int i = 0; i < 60; i++)
                if (b->hash[0][i] != b->hash[run][i])
                    fail_msg("%d ranks: push_pull %d has other bits in run %d", ranks, i, run);
    }
}

/* Many at once, each rank in an order of its own, some waited for and some announced. */
enum { MANY = 3000 };

static int many(int rank, void *arg)
{
    static float x[MANY][3], *large[20];
    static tally_op *op[MANY], *big[20];
    static int order[MANY];
    tally_comm *c = job_open();
    uint64_t s = (uint64_t)rank;
    enum { LARGE = 100000 };
    for (int i = 0; i < MANY; i++)
        order[i] = i;
    for (int i = 0; i < 20; i++) {
        void *p;
        CHECK(tally_alloc(c, LARGE * sizeof(float), &p) == 0);
        large[i] = i % 2 ? p : malloc(LARGE * sizeof(float));
    }
    for (int turn = 0; turn < (UNDER_SANITIZER ? 2 : 6); turn++) {
        for (int i = MANY - 1; i > 0; i--) {
            int k = (int)(job_random(&s) % (unsigned)(i + 1)), t = order[i];
            order[i] = order[k];
            order[k] = t;
        }
        for (int at = 0; at < MANY; at++) {
            int i = order[at];
            char name[16];
            snprintf(name, sizeof name, "%d", i);
            x[i][0] = x[i][1] = x[i][2] = (float)(i + rank);
            CHECK(tally_push_pull(c, name, x[i], x[i], 3, TALLY_FLOAT32, TALLY_SUM, NULL, &op[i]) == 0);
            if (i < 20) {
                snprintf(name, sizeof name, "large %d", i);
                for (int k = 0; k < LARGE; k++)
                    large[i][k] = (float)(rank + k % 7);
                CHECK(tally_push_pull(c, name, large[i], large[i], LARGE, TALLY_FLOAT32, TALLY_MAX, NULL,
                                      &big[i]) == 0);
            }
        }
        for (int i = 0; i < MANY; i++) {
            job_expect(op[i], 0);
            for (int k = 0; k < 3; k++)
                CHECK(x[i][k] == (float)(3 * i + 3));
        }
        for (int i = 0; i < 20; i++) {
            job_expect(big[i], 0);
            for (int k = 0; k < LARGE; k++)
                CHECK(large[i][k] == (float)(2 + k % 7));
        }
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_many_at_once(void **state)
{
    struct job j = {.ranks = 3, .machine = together, .main = many};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

/* Small ones, each waited for before the next: the rings go round many times, with payloads across their ends, ranks are
 * now and then late, two operations are under way, or they disagree. */
static int one_by_one(int rank, void *arg)
{
    enum { CALLS = UNDER_SANITIZER ? 2000 : 8000, MOST = TLY_EAGER / sizeof(float) };
    static float in[MOST + 2], out[MOST + 2];
    static const char *const names[] = {"x", "y", NULL};
    tally_comm *c = job_open();
    int size = tally_comm_size(c);
    uint64_t same = 1, own = (uint64_t)rank;
    c->local->linger_ns = 2 * TLY_MS; /* or on a busy machine the others hardly ever come in time */
    for (size_t k = 0; k < MOST + 2; k++)
        in[k] = (float)(size * (rank + (int)(k % 7)));
    for (int i = 0; i < CALLS; i++) {
        size_t count = job_random(&same) % 3 ? job_random(&same) % 20 : job_random(&same) % (MOST + 2);
        bool in_place = job_random(&same) % 2, disagree = job_random(&same) % 200 == 0 && size > 1;
        bool mean = job_random(&same) % 2;
        const char *name = names[job_random(&same) % 3];
        if (job_random(&own) % 300 == 0)
            job_sleep_ms(4);
        tally_op *op, *other = NULL;
        if (job_random(&same) % 100 == 0)
            CHECK(tally_barrier(c, NULL, NULL, &other) == 0);
        if (in_place)
            memcpy(out, in, count * sizeof *in);
        CHECK(tally_push_pull(c, name, in_place ? out : in, out, count + (disagree && rank == 1),
                              TALLY_FLOAT32, mean ? TALLY_AVERAGE : TALLY_SUM, NULL, &op) == 0);
        job_expect(op, disagree ? -EINVAL : 0);
        for (size_t k = 0; k < count && !disagree; k++)
            CHECK(out[k] == (float)((mean ? 1 : size) * (size * (size - 1) / 2 + size * (int)(k % 7))));
        if (other)
            job_expect(other, 0);
    }
    uint64_t ops, bytes;
    tly_local_count(c->local, &ops, &bytes);
    CHECK(ops > CALLS / 10 && bytes > CALLS);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_one_by_one(void **state)
{
    for (int ranks = 1; ranks <= 3; ranks++) {
        struct job j = {.ranks = ranks, .machine = together, .main = one_by_one};
        job_start(&j);
        job_finish(&j);
        job_clear(&j);
    }
}

/* Ranks that hold other things urgent do not wait for each other's windows. */
static int other_priorities(int rank, void *arg)
{
    enum { OPS = 12, EACH = 75000 };
    static float x[OPS][EACH];
    tally_op *op[OPS];
    tally_comm *c = job_open();
    for (int i = 0; i < OPS; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        for (int k = 0; k < EACH; k++)
            x[i][k] = (float)(rank + i + k % 7);
        struct tally_options o = {.size = sizeof o, .priority = rank ? i : -i};
        CHECK(tally_push_pull(c, name, x[i], x[i], EACH, TALLY_FLOAT32, TALLY_SUM, &o, &op[i]) == 0);
    }
    for (int i = 0; i < OPS; i++) {
        job_expect(op[i], 0);
        for (int k = 0; k < EACH; k++)
            CHECK(x[i][k] == (float)(1 + 2 * (i + k % 7)));
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_other_priorities(void **state)
{
    struct job j = {
        .ranks = 2, .machine = together, .main = other_priorities, .settings = {"TALLY_TIMEOUT=15"}};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

struct pool_way {
    int ops;     /* under way at once */
    bool rising; /* each is more urgent than all before it; else each rank has its own order */
    bool mixed;  /* sums, broadcasts and all-gathers in turn */
};

enum { POOL_EACH = 300000 };

static int begin_in_pool_way(tally_comm *c, const struct pool_way *way, int which, int priority, float *x,
                             tally_op **op)
{
    struct tally_options o = {.size = sizeof o, .priority = priority};
    char name[16];
    snprintf(name, sizeof name, "%d", which);
    if (way->mixed && which % 3 == 1)
        return tally_broadcast(c, name, x, POOL_EACH, TALLY_FLOAT32, which % c->size, &o, op);
    if (way->mixed && which % 3 == 2) /* in place */
        return tally_allgather_into(c, name, x + c->rank * (POOL_EACH / c->size), x,
                                    (size_t)(POOL_EACH / c->size), TALLY_FLOAT32, &o, op);
    return tally_push_pull(c, name, x, x, POOL_EACH, TALLY_FLOAT32, TALLY_SUM, &o, op);
}

/* An element of its result. */
static float expected_in_pool_way(tally_comm *c, const struct pool_way *way, int which, int k)
{
    int size = c->size, pattern = which + k % 7;
    if (way->mixed && which % 3 == 1)
        return (float)(which % size + pattern);
    if (way->mixed && which % 3 == 2)
        return (float)(k / (POOL_EACH / size) + pattern);
    return (float)(size * (size - 1) / 2 + size * pattern);
}

/* Large tensors under way at once, in another order and with other priorities on each rank, and no memory but for the two
 * windows that are there from the start. */
static int full_pool(int rank, void *arg)
{
    enum { MOST = 60, EACH = POOL_EACH, TURNS = UNDER_SANITIZER ? 2 : 6 };
    static const struct rlimit little = {96 << 20, 96 << 20};
    static float x[MOST][EACH];
    tally_op *op[MOST];
    void *at;
    const struct pool_way *way = arg;
    CHECK(setrlimit(RLIMIT_FSIZE, &little) == 0);
    tally_comm *c = job_open();
    for (uint64_t bytes = little.rlim_cur; bytes >= 4096;)
        if (tly_pool_borrow(c->local->segment, bytes, &at) != 0)
            bytes /= 2;
    uint64_t own = (uint64_t)rank;
    for (int turn = 0; turn < TURNS; turn++) {
        for (int i = 0; i < way->ops; i++)
            for (int k = 0; k < EACH; k++)
                x[i][k] = (float)(rank + i + k % 7);
        for (int i = 0; i < way->ops; i++) {
            int which = way->rising ? i : (i * (rank % 2 ? 5 : 1) + rank + turn) % way->ops;
            int priority = way->rising ? i : (int)(job_random(&own) % (uint64_t)way->ops);
            CHECK(begin_in_pool_way(c, way, which, priority, x[which], &op[which]) == 0);
        }
        for (int i = 0; i < way->ops; i++) {
            job_expect(op[i], 0);
            for (int k = 0; k < EACH; k++)
                CHECK(x[i][k] == expected_in_pool_way(c, way, i, k));
        }
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_full_pool(void **state)
{
    static const struct pool_way ways[] = {
        {6, true},
        {6, false},
        {60, true},
        {12, true, .mixed = true},
        {12, false, .mixed = true},
        {60, true, .mixed = true}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) { /* 60: more than are looked at */
        struct pool_way way = ways[i];
        struct job j = {.ranks = way.ops < 60 ? 3 : 2,
                        .machine = together,
                        .main = full_pool,
                        .arg = &way,
                        .settings = {"TALLY_TIMEOUT=15"}};
        job_start(&j);
        job_finish(&j);
        job_clear(&j);
    }
}

/* --- the pool ------------------------------------------------------------------------------------ */

static int pool(int rank, void *arg)
{
    tally_comm *c = job_open();
    void *p[50], *q;
    int local;
    CHECK(tally_free(NULL) == 0 && tally_free(&local) == -EINVAL);
    for (int turn = 0; turn < 3; turn++) {
        for (int i = 0; i < 50; i++) {
            size_t bytes = (size_t)(i * 7919 % 200) * 1000;
            CHECK(tally_alloc(c, bytes, &p[i]) == 0);
            CHECK((uintptr_t)p[i] % 4096 == 0);
            for (size_t k = 0; k < bytes; k++)
                CHECK(((uint8_t *)p[i])[k] == 0);
            memset(p[i], i + 1, bytes);
        }
        for (int i = 0; i < 50; i++) {
            size_t bytes = (size_t)(i * 7919 % 200) * 1000;
            for (size_t k = 0; k < bytes; k++)
                CHECK(((uint8_t *)p[i])[k] == i + 1);
        }
        for (int i = 0; i < 50; i++)
            CHECK(tally_free(p[(i * 7 + turn) % 50]) == 0);
    }
    CHECK(tally_free(p[0]) == -EINVAL); /* it is gone */
    CHECK(tally_alloc(c, SIZE_MAX / 4, &q) == -ENOMEM);
    CHECK_HOLDS(tally_error(), "memory");
    CHECK(tally_alloc(c, 100, &q) == 0);
    CHECK(tally_comm_close(c) == 0);
    *(char *)q = 1;
    CHECK(tally_free(q) == 0);
    return 0;
}

static void test_pool(void **state)
{
    for (int i = 0; i < 2; i++) {
        struct job j = {.ranks = 2, .machine = i ? NULL : together, .main = pool};
        job_start(&j);
        job_finish(&j);
        job_clear(&j);
    }
}

/* One may make no files as large: whoever tells of it says which rank it is, and not the reason of another. */
static int small_files(int rank, void *arg)
{
    struct rlimit limit = {1 << 20, 1 << 20};
    float x[100] = {1};
    tally_op *op;
    CHECK(rank != 1 || setrlimit(RLIMIT_FSIZE, &limit) == 0);
    tally_comm *c = job_open();
    CHECK(!tally_comm_has_pool(c));
    CHECK(tally_push_pull(c, "t", x, x, 100, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
    job_expect(op, 0);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_one_cannot(void **state)
{
    struct job j = {.ranks = 3, .machine = together, .main = small_files, .settings = {"TALLY_LOG=debug"}};
    job_start(&j);
    for (int rank = 0; rank < 3; rank++)
        assert_int_equal(job_wait_rank(&j, rank), 0);
    job_log_holds(&j, 0, "cannot share memory: rank 1 cannot");
    job_log_holds(&j, 1, "cannot share memory: a file of 64 MB is not allowed (ulimit -f)");
    job_log_holds(&j, 2, "cannot share memory: rank 1 cannot");
    job_clear(&j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),  cmocka_unit_test(test_many_at_once),
        cmocka_unit_test(test_one_by_one), cmocka_unit_test(test_other_priorities),
        cmocka_unit_test(test_full_pool),  cmocka_unit_test(test_pool),
        cmocka_unit_test(test_one_cannot),
    };
    return cmocka_run_group_tests_name("local", tests, NULL, NULL);
}
