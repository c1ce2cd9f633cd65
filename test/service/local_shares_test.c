/* local_shares_test.c - reduce and reduce-scatter among ranks that all share one machine: they go through shared memory, and
 * their bits are those of the services, whatever the tensors lie in.  What is refused has the services' sentence. */
#include <errno.h>
#include <setjmp.h>
#include <string.h>

#include "comm/comm.h"
#include "comm/op/op.h"
#include "job.h"
#include "local/engine.h"

#include <cmocka.h>

static const int together[JOB_MOST_RANKS];

enum { REACHING, THROUGH_SERVICE, STAGED, RUNS };
enum { CASES = 60, MOST = 300000 };

struct board {
    uint64_t hash[RUNS][JOB_MOST_RANKS][CASES];
    int run;
};

/* --- the bits ------------------------------------------------------------------------------------ */

/* One operation: a reduce to each rank in turn, or a reduce-scatter. */
struct trial {
    int dtype, reduction, root;
    bool scatters, in_place;
    size_t count, counts[JOB_MOST_RANKS];
    struct tally_options options;
};

/* How a tensor is divided among the ranks: evenly, unevenly, with empty pieces, or all to one rank. */
static void divide(struct trial *t, int i, int size)
{
    size_t left = t->count;
    memset(t->counts, 0, sizeof t->counts);
    for (int r = 0; r < size - 1; r++) {
        t->counts[r] = i % 4 == 0            ? t->count / (size_t)size
                       : i % 4 == 1          ? left / 3
                       : i % 4 == 2 && r % 2 ? left / 2
                                             : 0;
        left -= t->counts[r];
    }
    t->counts[size - 1] = left;
}

static struct trial trial_of(int i, int size)
{
    static const size_t counts[] = {1, 17, 500, 1025, 5000, 70001, MOST};
    struct trial t = {.dtype = i % 15,
                      .reduction = (i * 7 + i / 15) % 5,
                      .root = i % size,
                      .scatters = i / 2 % 2,
                      .in_place = i % 5 < 2,
                      .count = counts[(i * 5 + i / 7) % 7]};
    bool complex = t.dtype == TALLY_COMPLEX64 || t.dtype == TALLY_COMPLEX128;
    if (t.dtype == TALLY_BOOL && t.reduction == TALLY_AVERAGE)
        t.reduction = TALLY_SUM;
    if (complex && (t.reduction == TALLY_MIN || t.reduction == TALLY_MAX))
        t.reduction = TALLY_PRODUCT;
    t.options.size = sizeof t.options;
    if (t.dtype != TALLY_BOOL) {
        t.options.prescale = i % 4 ? 0 : 0.5;
        t.options.postscale = i % 3 ? 0 : 3;
    }
    divide(&t, i, size);
    return t;
}

static void *take_memory(tally_comm *c, bool pool, size_t bytes)
{
    void *p = NULL;
    if (pool)
        CHECK(tally_alloc(c, bytes, &p) == 0);
    else
        CHECK((p = malloc(bytes + 1)));
    return p;
}

static void give_memory(bool pool, void *p)
{
    if (pool)
        CHECK(tally_free(p) == 0);
    else
        free(p);
}

/* It has gone through shared memory, as far as that can be seen: of one that ended at once there is nothing left. */
static bool is_shared(const tally_op *op)
{
    return !op->shared.engine || !atomic_load(&op->shared.op.diverted);
}

/* The hash of what this rank gets.  What it does not get stays as it is. */
static uint64_t attempt(tally_comm *c, const struct trial *t, int rank, bool pool_in, bool pool_out,
                        uint64_t *seed)
{
    size_t element = (size_t)tally_dtype_size((enum tally_dtype)t->dtype), before = 0;
    for (int r = 0; r < rank; r++)
        before += t->counts[r] * element;
    size_t bytes = t->count * element;
    bool root = rank == t->root;
    size_t begin = t->scatters ? before : 0,
           gets = t->scatters ? t->counts[rank] * element
                  : root      ? bytes
                              : 0;
    uint8_t *in = take_memory(c, pool_in, bytes), *apart = take_memory(c, pool_out, bytes);
    for (size_t at = 0; at < bytes; at += 8) {
        uint64_t x = job_random(seed);
        memcpy(in + at, &x, bytes - at < 8 ? bytes - at : 8);
    }
    memset(apart, 0x5a, bytes);
    uint64_t other = job_hash(in, begin) ^ job_hash(in + begin + gets, bytes - begin - gets);
    uint8_t *out = t->in_place ? in + begin : gets || t->scatters ? apart : NULL;
    tally_op *op;
    if (t->scatters)
        CHECK(tally_reduce_scatter(c, NULL, in, out, t->counts, (enum tally_dtype)t->dtype,
                                   (enum tally_reduction)t->reduction, &t->options, &op) == 0);
    else
        CHECK(tally_reduce(c, NULL, in, out, t->count, (enum tally_dtype)t->dtype,
                           (enum tally_reduction)t->reduction, t->root, &t->options, &op) == 0);
    CHECK(tally_op_wait(op, -1) == 0 && is_shared(op));
    tally_op_free(op);
    CHECK(other == (job_hash(in, begin) ^ job_hash(in + begin + gets, bytes - begin - gets)));
    for (size_t at = t->in_place ? 0 : gets; at < bytes; at++)
        CHECK(apart[at] == 0x5a);
    uint64_t h = job_hash(out, gets);
    give_memory(pool_in, in);
    give_memory(pool_out, apart);
    return h;
}

static int all_kinds(int rank, void *arg)
{
    struct board *b = arg;
    if (b->run == STAGED)
        job_forbid_reaching();
    tally_comm *c = job_open();
    uint64_t seed = 77 + (uint64_t)rank;
    CHECK((c->local != NULL) == (b->run != THROUGH_SERVICE));
    for (int i = 0; i < CASES; i++) {
        struct trial t = trial_of(i, tally_comm_size(c));
        bool all = i % 3 == 0, none = i % 3 == 1; /* the rest: another memory on each rank */
        bool pool_in = all || (!none && (i + rank) % 3 == 0),
             pool_out = all || (!none && (i + rank) % 2 == 0);
        b->hash[b->run][rank][i] = attempt(c, &t, rank, pool_in, pool_out, &seed);
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_same_bits(void **state)
{
    for (int ranks = 2; ranks <= 5; ranks++) {
        struct board *b = job_shared(sizeof *b);
        for (b->run = 0; b->run < RUNS; b->run++)
            job_run(&(
                struct job){.ranks = ranks,
                            .machine = together,
                            .main = all_kinds,
                            .arg = b,
                            .settings = {b->run == THROUGH_SERVICE ? "TALLY_LOCAL=off" : "TALLY_LOCAL=on"}});
        for (int at = 0; at < (RUNS - 1) * ranks * CASES; at++) {
            int run = at % (RUNS - 1) ? STAGED : REACHING, rank = at / (RUNS - 1) % ranks,
                i = at / (RUNS - 1) / ranks;
            if (b->hash[run][rank][i] != b->hash[THROUGH_SERVICE][rank][i])
                fail_msg("%d ranks: case %d has other bits at rank %d in run %d", ranks, i, rank, run);
        }
    }
}

/* --- in flight ----------------------------------------------------------------------------------- */

/* Many at once, each rank in an order of its own, with all-reduces among them. */
static int many(int rank, void *arg)
{
    enum { OPS = 30, EACH = 60000 };
    static float x[OPS][EACH], y[OPS][EACH];
    static tally_op *op[OPS];
    tally_comm *c = job_open();
    int size = tally_comm_size(c);
    size_t counts[JOB_MOST_RANKS] = {0};
    for (int i = 0; i < EACH; i++)
        counts[i % size]++;
    for (int turn = 0; turn < (UNDER_SANITIZER ? 2 : 6); turn++) {
        for (int n = 0; n < OPS; n++) {
            int i = (n * (rank % 2 ? 7 : 11) + rank + turn) % OPS;
            char name[16];
            snprintf(name, sizeof name, "%d", i);
            for (int k = 0; k < EACH; k++)
                x[i][k] = (float)(rank + i + k % 7);
            if (i % 3 == 0)
                CHECK(tally_reduce(c, name, x[i], y[i], EACH, TALLY_FLOAT32, TALLY_SUM, i % size, NULL,
                                   &op[i]) == 0);
            else if (i % 3 == 1)
                CHECK(tally_reduce_scatter(c, name, x[i], y[i], counts, TALLY_FLOAT32, TALLY_SUM, NULL,
                                           &op[i]) == 0);
            else
                CHECK(tally_push_pull(c, name, x[i], y[i], EACH, TALLY_FLOAT32, TALLY_SUM, NULL, &op[i]) ==
                      0);
        }
        for (int i = 0; i < OPS; i++) {
            size_t begin = 0, count = i % 3 == 0 && i % size != rank ? 0 : EACH;
            for (int r = 0; i % 3 == 1 && r < rank; r++)
                begin += counts[r];
            job_expect(op[i], 0);
            for (size_t k = 0; k < (i % 3 == 1 ? counts[rank] : count); k++)
                CHECK(y[i][k] == (float)(size * (size - 1) / 2 + size * (i + (int)((begin + k) % 7))));
        }
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_many_at_once(void **state)
{
    for (int ranks = 2; ranks <= 3; ranks++)
        job_run(&(
            struct job){.ranks = ranks, .machine = together, .main = many, .settings = {"TALLY_TIMEOUT=15"}});
}

/* --- refused ------------------------------------------------------------------------------------- */

static int disagree(int rank, void *arg)
{
    enum { COUNT = 50000 };
    static int32_t x[COUNT], y[COUNT];
    tally_comm *c = job_open();
    tally_op *op;
    CHECK(tally_reduce(c, "r", x, y, COUNT, TALLY_INT32, TALLY_SUM, rank == 2, NULL, &op) == 0);
    CHECK(tally_op_wait(op, -1) == -EINVAL);
    CHECK_HOLDS(tally_op_error(op), "reduce int32 [50000] sum to rank 0 on ranks 0-1, to rank 1 on rank 2");
    tally_op_free(op);
    size_t counts[3] = {1, 20000, rank == 0 ? 5 : 4};
    CHECK(tally_reduce_scatter(c, "s", x, y, counts, TALLY_INT32, TALLY_SUM, NULL, &op) == 0);
    CHECK(tally_op_wait(op, -1) == -EINVAL);
    CHECK_HOLDS(tally_op_error(op),
                "reduce_scatter int32 [1, 20000, 5] sum on rank 0, [1, 20000, 4] on ranks 1-2");
    tally_op_free(op);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_disagreement(void **state)
{
    job_run(&(struct job){.ranks = 3, .machine = together, .main = disagree});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_many_at_once),
        cmocka_unit_test(test_disagreement),
    };
    return cmocka_run_group_tests_name("local_shares", tests, NULL, NULL);
}
