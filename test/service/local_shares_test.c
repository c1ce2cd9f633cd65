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

enum { REACHING, THROUGH_SERVICE, STAGED, APART, RUNS };
enum { CASES = 60, MOST = 300000 };

struct board {
    atomic_int stage;
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
    t.reduction = job_reduction(t.dtype, t.reduction);
    t.options.size = sizeof t.options;
    if (t.dtype != TALLY_BOOL) {
        t.options.prescale = i % 4 ? 0 : 0.5;
        t.options.postscale = i % 3 ? 0 : 3;
    }
    divide(&t, i, size);
    return t;
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
    uint8_t *in = job_memory(c, bytes, pool_in), *apart = job_memory(c, bytes, pool_out);
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
    job_give_back(in, pool_in);
    job_give_back(apart, pool_out);
    return h;
}

static int all_kinds(int rank, void *arg)
{
    struct board *b = arg;
    if (b->run == STAGED)
        job_forbid_reaching();
    bool apart = b->run == APART && job_move_apart(rank);
    tally_comm *c = job_open();
    CHECK(!c->local || c->local->far == apart);
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
        for (int at = 0; at < RUNS * ranks * CASES; at++) {
            int run = at % RUNS, rank = at / RUNS % ranks, i = at / RUNS / ranks;
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

/* --- a rank dies, or joins ------------------------------------------------------------------------- */

enum { THREE = 3, SHORT = 1200, LONG = 150000 }; /* ranks; floats, neither of which travel in posts */

/* The n-th reduce or reduce-scatter, and its buffers: in private memory, in the pool, or one here and one there. */
struct share {
    float *in, *out;
    size_t count;
    bool pooled_in, pooled_out;
    int n;
    tally_op *op;
};

static void prepare_share(tally_comm *c, struct share *s, int rank, int n)
{
    *s = (struct share){
        .count = n / 3 % 2 ? SHORT : LONG, .pooled_in = (n + rank) % 4 > 1, .pooled_out = n % 4 > 1, .n = n};
    s->in = job_memory(c, s->count * sizeof *s->in, s->pooled_in);
    s->out = job_memory(c, s->count * sizeof *s->out, s->pooled_out);
    for (size_t i = 0; i < s->count; i++)
        s->in[i] = (float)(rank + (int)((i + (size_t)n) % 100));
}

static int submit_share(tally_comm *c, struct share *s)
{
    const size_t piece = s->count / THREE, pieces[] = {piece, piece, piece};
    s->op = NULL;
    if (s->n % 2)
        return tally_reduce_scatter(c, NULL, s->in, s->out, pieces, TALLY_FLOAT32, TALLY_SUM, NULL, &s->op);
    return tally_reduce(c, NULL, s->in, s->out, s->count, TALLY_FLOAT32, TALLY_SUM, s->n % THREE, NULL,
                        &s->op);
}

static void check_share(const struct share *s, int rank)
{
    size_t piece = s->count / THREE, begin = s->n % 2 ? (size_t)rank * piece : 0;
    size_t wanted = s->n % 2 ? piece : rank == s->n % THREE ? s->count : 0;
    for (size_t i = 0; i < wanted; i++)
        CHECK(s->out[i] == (float)(THREE * ((begin + i + (size_t)s->n) % 100) + 3));
}

static void forget_share(struct share *s)
{
    job_give_back(s->in, s->pooled_in);
    job_give_back(s->out, s->pooled_out);
}

static int until_failure(int rank, void *arg)
{
    enum { KINDS = 12 };
    struct board *b = arg;
    tally_comm *c = job_open();
    struct share shares[KINDS], *s = shares;
    int err = 0;
    for (int n = 0; n < KINDS; n++) /* a job that has failed gives no memory */
        prepare_share(c, &shares[n], rank, n);
    for (int n = 0; !err; n++) {
        s = &shares[n % KINDS];
        err = submit_share(c, s);
        err = err ? err : tally_op_wait(s->op, -1);
        if (s->op)
            tally_op_free(s->op);
        if (!err)
            check_share(s, rank);
        atomic_fetch_add(&b->stage, 1);
    }
    job_close_after_kill(c, err, 1, s->out, s->count * sizeof *s->out);
    for (int n = 0; n < KINDS; n++)
        forget_share(&shares[n]);
    return 0;
}

static void test_rank_killed(void **state)
{
    for (int i = 0; i < (UNDER_SANITIZER ? 2 : 8); i++) {
        struct board *b = job_shared(sizeof *b);
        struct job j = {.ranks = THREE, .machine = together, .main = until_failure, .arg = b};
        job_kill_rank(&j, 1, &b->stage, 20 + 11 * i);
    }
}

/* Rank 1 joins while what it has submitted is under way: that ends well.  What it has not submitted is refused. */
static int one_joins(int rank, void *arg)
{
    enum { BEFORE = 12, BEHIND = 6, TURNS = UNDER_SANITIZER ? 2 : 6 };
    static struct share s[BEFORE + BEHIND];
    tally_comm *c = job_open();
    tally_op *join;
    for (int turn = 0; turn < TURNS; turn++) {
        const int count = rank == 1 ? BEFORE : BEFORE + BEHIND;
        for (int n = 0; n < count; n++) {
            prepare_share(c, &s[n], rank, n + turn);
            CHECK(submit_share(c, &s[n]) == 0);
        }
        if (rank == 1)
            CHECK(tally_join(c, NULL, &join) == 0);
        for (int n = 0; n < count; n++) {
            int err = tally_op_wait(s[n].op, -1);
            CHECK(err == (n < BEFORE ? 0 : -EINVAL));
            if (err)
                CHECK_HOLDS(tally_op_error(s[n].op), "rank 1 has joined");
            else
                check_share(&s[n], rank);
            tally_op_free(s[n].op);
            forget_share(&s[n]);
        }
        if (rank != 1)
            CHECK(tally_join(c, NULL, &join) == 0);
        job_expect(join, 0);
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_rank_joins(void **state)
{
    job_run(&(struct job){
        .ranks = THREE, .machine = together, .main = one_joins, .settings = {"TALLY_TIMEOUT=60"}});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),    cmocka_unit_test(test_many_at_once),
        cmocka_unit_test(test_disagreement), cmocka_unit_test(test_rank_killed),
        cmocka_unit_test(test_rank_joins),
    };
    return cmocka_run_group_tests_name("local_shares", tests, NULL, NULL);
}
