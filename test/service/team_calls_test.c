/* team_calls_test.c - broadcasts, reduces and reduce-scatters of several machines with several ranks on each: whatever the layout,
 * the root, the lengths, the memory and the order, the bits are those of ranks that push for themselves; who dies, joins or
 * disagrees is named as ever. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>

#include "job.h"

#include <cmocka.h>

enum { OPS = UNDER_SANITIZER ? 36 : 90, ABREAST = 3, MOST_COUNT = 200000, MOST = 60000 };

enum call { BROADCAST, REDUCE, SCATTER, CALLS };

struct board {
    atomic_int stage;
    int run, rounds;
    bool private_only; /* no rank may reach into another's memory */
    uint64_t hash[2][OPS];
};

/* --- the bits ------------------------------------------------------------------------------------ */

/* Operation i of all_calls(). */
struct what {
    enum call call;
    int dtype, reduction, root;
    size_t count, element;
    bool in_place;
    struct tally_options options;
};

static struct what what_of(int i, int ranks)
{
    static const size_t counts[] = {4096, 4097, 16384, 70001, 123457, MOST_COUNT, 9000, 65536};
    struct what w = {.call = (enum call)(i % CALLS),
                     .dtype = i / CALLS % 15,
                     .reduction = i / CALLS % 4 == 3 ? TALLY_SUM : i * 7 % 8,
                     .root = i * 5 % ranks,
                     .count = counts[(i * 5 + i / 8) % 8],
                     .in_place = i / CALLS % 3 == 0};
    bool complex = w.dtype == TALLY_COMPLEX64 || w.dtype == TALLY_COMPLEX128;
    bool whole = w.dtype >= TALLY_INT8 && !complex;
    if (w.reduction >= TALLY_BAND && !whole)
        w.reduction = TALLY_AVERAGE;
    if (complex && (w.reduction == TALLY_MIN || w.reduction == TALLY_MAX))
        w.reduction = TALLY_PRODUCT;
    if (w.dtype == TALLY_BOOL && w.reduction == TALLY_AVERAGE)
        w.reduction = TALLY_SUM;
    w.element = tally_dtype_size((enum tally_dtype)w.dtype);
    w.options = (struct tally_options){.size = sizeof w.options, .priority = i % 3};
    if (w.call != BROADCAST && w.dtype != TALLY_BOOL && w.reduction < TALLY_BAND) {
        w.options.prescale = i % 4 ? 0 : 0.5;
        w.options.postscale = i % 5 ? 0 : 3;
    }
    return w;
}

/* Pieces of a reduce-scatter: alike, unlike, some empty. */
static size_t piece_of(const struct what *w, int i, int rank, int ranks)
{
    if (i % 2)
        return w->count / (size_t)ranks;
    return rank % 3 == i % 3 ? 0 : w->count / (size_t)ranks + (size_t)rank * 37;
}

struct under_way {
    struct what what;
    void *in, *out;
    size_t in_bytes, out_bytes; /* the output's begins at the input's piece, or apart from that */
    bool pooled;
    tally_op *op;
};

static void *memory(tally_comm *c, size_t bytes, bool pooled)
{
    void *m;
    if (pooled)
        CHECK(tally_alloc(c, bytes + 1, &m) == 0);
    else
        CHECK((m = malloc(bytes + 1)));
    return m;
}

static void give_back(void *m, bool pooled)
{
    if (pooled)
        CHECK(tally_free(m) == 0);
    else
        free(m);
}

static void fill(void *at, size_t bytes, int rank, int i)
{
    uint64_t seed = 1000 * (uint64_t)i + (uint64_t)rank;
    for (size_t k = 0; k < bytes; k += 8) {
        uint64_t x = job_random(&seed);
        memcpy((uint8_t *)at + k, &x, bytes - k < 8 ? bytes - k : 8);
    }
}

static void begin(tally_comm *c, struct under_way *u, int rank, int i)
{
    const int ranks = tally_comm_size(c);
    const struct what *w = &u->what;
    size_t counts[JOB_MOST_RANKS], all = 0, before = 0;
    char name[16];
    snprintf(name, sizeof name, "%d", i);
    u->what = what_of(i, ranks);
    u->pooled = (i + rank) % 3 == 0;
    for (int r = 0; r < ranks; r++) {
        before = r == rank ? all : before;
        all += counts[r] = w->call == SCATTER ? piece_of(w, i, r, ranks) : r ? 0 : w->count;
    }
    u->in_bytes = all * w->element;
    u->out_bytes = (w->call == SCATTER ? counts[rank] : all) * w->element;
    u->in = memory(c, u->in_bytes, u->pooled);
    bool wants = w->call != REDUCE || w->root == rank;
    if (w->in_place || w->call == BROADCAST)
        u->out = (uint8_t *)u->in + (w->call == SCATTER ? before * w->element : 0);
    else
        u->out = wants ? memory(c, u->out_bytes, u->pooled) : NULL;
    fill(u->in, u->in_bytes, rank, i);
    enum tally_dtype dtype = (enum tally_dtype)w->dtype;
    enum tally_reduction reduction = (enum tally_reduction)w->reduction;
    const char *called = i % 5 ? name : NULL;
    int err =
        w->call == BROADCAST ? tally_broadcast(c, called, u->in, all, dtype, w->root, &w->options, &u->op)
        : w->call == REDUCE
            ? tally_reduce(c, called, u->in, wants ? u->out : NULL, all, dtype, reduction, w->root,
                           &w->options, &u->op)
            : tally_reduce_scatter(c, called, u->in, u->out, counts, dtype, reduction, &w->options, &u->op);
    CHECK(err == 0);
}

/* The result's hash, of all ranks'. */
static uint64_t end(tally_comm *c, struct under_way *u, int rank, int i)
{
    const struct what *w = &u->what;
    job_expect(u->op, 0);
    uint64_t h[JOB_MOST_RANKS] = {0}, own = 0;
    if (w->call != REDUCE || w->root == rank)
        own = job_hash(u->out, u->out_bytes);
    if (w->call != BROADCAST && !w->in_place) { /* what was given is as it was */
        void *given = memory(c, u->in_bytes, false);
        fill(given, u->in_bytes, rank, i);
        CHECK(memcmp(given, u->in, u->in_bytes) == 0);
        give_back(given, false);
    }
    tally_op *op;
    CHECK(tally_allgather_into(c, "hashes", &own, h, 1, TALLY_INT64, NULL, &op) == 0);
    job_expect(op, 0);
    for (int r = 1; w->call == BROADCAST && r < tally_comm_size(c); r++)
        CHECK(h[r] == h[0]);
    if (!w->in_place && w->call != BROADCAST && u->out)
        give_back(u->out, u->pooled);
    give_back(u->in, u->pooled);
    return job_hash(h, sizeof h);
}

static int all_calls(int rank, void *arg)
{
    struct board *b = arg;
    if (b->private_only)
        job_forbid_reaching();
    tally_comm *c = job_open();
    for (int i = 0; i < OPS; i += ABREAST) {
        struct under_way u[ABREAST];
        for (int k = 0; k < ABREAST; k++)
            begin(c, &u[k], rank, i + k);
        for (int k = 0; k < ABREAST; k++) {
            uint64_t h = end(c, &u[k], rank, i + k);
            if (rank == 0)
                b->hash[b->run][i + k] = h;
        }
    }
    job_leave(c);
    return 0;
}

static void run_layout(struct board *b, const char *layout, int tallyds, const char *setting,
                       const char *part)
{
    int machine[JOB_MOST_RANKS];
    for (int i = 0; layout[i]; i++)
        machine[i] = layout[i];
    struct job j = {.ranks = (int)strlen(layout),
                    .tallyds = tallyds,
                    .machine = machine,
                    .main = all_calls,
                    .arg = b,
                    .settings = {setting, part}};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

static void compare_layout(const char *layout, int tallyds, const char *part, bool private_only)
{
    struct board *b = job_shared(sizeof *b);
    run_layout(b, layout, tallyds, "TALLY_LOCAL=off", part);
    b->run = 1;
    b->private_only = private_only;
    run_layout(b, layout, tallyds, "TALLY_LOCAL=on", part);
    for (int i = 0; i < OPS; i++)
        if (b->hash[0][i] != b->hash[1][i]) {
            struct what w = what_of(i, (int)strlen(layout));
            fail_msg("%s: operation %d (call %d, dtype %d, reduction %d) has other bits", layout, i, w.call,
                     w.dtype, w.reduction);
        }
}

static void test_as_each_for_itself(void **state)
{
    static const char *const layouts[] = {"aabb", "abab", "aaabbb", "aabbc", "aaaabbcc", "aab", "aabbccdd"};
    for (int i = 0; i < (int)(sizeof layouts / sizeof *layouts); i++)
        compare_layout(layouts[i], i % 3, i % 2 ? "TALLY_PART_BYTES=16K" : "TALLY_PART_BYTES=64K", false);
}

static void test_memory_out_of_reach(void **state)
{
    compare_layout("aabb", 1, "TALLY_PART_BYTES=16K", true);
}

static const int pairs[] = {0, 0, 1, 1};

/* The machines begin with those that the others end with, each of more parts than a rank may have ahead. */
static int opposite(int rank, void *arg)
{
    enum { MANY = 12 };
    static float in[MANY][MOST], out[MANY][MOST];
    static const size_t pieces[] = {MOST / 4, MOST / 4, MOST / 4, MOST / 4};
    tally_comm *c = job_open();
    tally_op *op[MANY];
    for (int at = 0; at < MANY; at++) {
        int i = rank < 2 ? at : MANY - 1 - at, root = i % 4;
        char name[8];
        snprintf(name, sizeof name, "%d", i);
        for (int k = 0; k < MOST; k++)
            in[i][k] = (float)((k + i) % 1000 + rank);
        int err =
            i % 3 == 0
                ? tally_reduce(c, name, in[i], out[i], MOST, TALLY_FLOAT32, TALLY_SUM, root, NULL, &op[i])
            : i % 3 == 1 ? tally_broadcast(c, name, in[i], MOST, TALLY_FLOAT32, root, NULL, &op[i])
                         : tally_reduce_scatter(c, name, in[i], out[i], pieces, TALLY_FLOAT32, TALLY_SUM,
                                                NULL, &op[i]);
        CHECK(err == 0);
    }
    for (int i = 0; i < MANY; i++) {
        int root = i % 4;
        job_expect(op[i], 0);
        for (int k = 0; i % 3 == 0 && root == rank && k < MOST; k++)
            CHECK(out[i][k] == (float)(4 * ((k + i) % 1000) + 6));
        for (int k = 0; i % 3 == 1 && k < MOST; k++)
            CHECK(in[i][k] == (float)((k + i) % 1000 + root));
        for (int k = 0; i % 3 == 2 && k < MOST / 4; k++)
            CHECK(out[i][k] == (float)(4 * ((k + rank * (MOST / 4) + i) % 1000) + 6));
    }
    job_leave(c);
    return 0;
}

static void test_opposite_orders(void **state)
{
    job_run(&(struct job){.ranks = 4,
                          .machine = pairs,
                          .main = opposite,
                          .settings = {"TALLY_PART_BYTES=4K", "TALLY_TIMEOUT=60"}});
    job_run(&(struct job){
        .ranks = 4,
        .tallyds = 1,
        .machine = pairs,
        .main = opposite,
        .settings = {"TALLY_PART_BYTES=16K", "TALLY_WINDOW_PARTS=1", "TALLY_MEMORY=1M", "TALLY_TIMEOUT=60"}});
    job_run(&(struct job){.ranks = 4,
                          .machine = pairs,
                          .main = opposite,
                          .settings = {"TALLY_PART_BYTES=4K", "TALLY_CREDIT_BYTES=1", "TALLY_TIMEOUT=60"}});
}

/* --- what goes wrong ----------------------------------------------------------------------------- */

static int submit(tally_comm *c, enum call call, const char *name, float *x, float *y, size_t count, int root,
                  tally_op **op)
{
    const size_t pieces[] = {count / 4, count / 4, count / 4, count - count / 4 * 3};
    if (call == BROADCAST)
        return tally_broadcast(c, name, x, count, TALLY_FLOAT32, root, NULL, op);
    if (call == REDUCE)
        return tally_reduce(c, name, x, y, count, TALLY_FLOAT32, TALLY_AVERAGE, root, NULL, op);
    return tally_reduce_scatter(c, name, x, y, pieces, TALLY_FLOAT32, TALLY_AVERAGE, NULL, op);
}

static void expect_sound(tally_comm *c, enum call call, int rank, int n)
{
    static float x[MOST], y[MOST];
    tally_op *op;
    const int root = n % 4;
    size_t wanted = call == REDUCE ? (rank == root) * MOST : call == SCATTER ? MOST / 4 : 0;
    for (int i = 0; i < MOST; i++)
        x[i] = (float)(rank + i % 512 + n % 16);
    CHECK(submit(c, call, "w", x, y, MOST, root, &op) == 0);
    job_expect(op, 0);
    for (size_t i = 0; i < wanted; i++)
        CHECK(y[i] ==
              (float)((i + (call == SCATTER) * (size_t)rank * (MOST / 4)) % 512) + 1.5f + (float)(n % 16));
    for (int i = 0; call == BROADCAST && i < MOST; i++)
        CHECK(x[i] == (float)(root + i % 512 + n % 16));
}

/* One rank means something else: all hear of it, and go on. */
static int disagree(int rank, void *arg)
{
    static float x[MOST], y[MOST];
    static const uint32_t kinds[] = {TALLY_BROADCAST, TALLY_REDUCE, TALLY_REDUCE_SCATTER};
    tally_comm *c = job_open();
    tally_op *op;
    for (int n = 0; n < 4 * CALLS; n++) {
        const enum call call = (enum call)(n % CALLS);
        const int odd = n / CALLS, root = n % 4;
        /* Of a size at which its ranks are no team, too. */
        static const size_t others[] = {MOST - 4, 12};
        for (int i = 0; i < 2; i++) {
            CHECK(submit(c, call, "w", x, y, rank == odd ? others[i] : MOST, root, &op) == 0);
            CHECK(tally_op_wait(op, -1) == -EINVAL);
            CHECK_HOLDS(tally_op_error(op), "'w': the ranks disagree: ");
            tally_op_free(op);
        }
        if (call != SCATTER) {
            CHECK(submit(c, call, "w", x, y, MOST, rank == odd ? (root + 1) % 4 : root, &op) == 0);
            CHECK(tally_op_wait(op, -1) == -EINVAL);
            CHECK_HOLDS(tally_op_error(op), "the ranks disagree: ");
            tally_op_free(op);
        }
        if (rank == odd) {
            CHECK(tally_refuse(c, "w", kinds[call], NULL, "no tensor") == 0);
        } else {
            CHECK(submit(c, call, "w", x, y, MOST, root, &op) == 0);
            CHECK(tally_op_wait(op, -1) == -EINVAL);
            CHECK_HOLDS(tally_op_error(op), "refuses: no tensor");
            tally_op_free(op);
        }
        /* Taken back before the rank that is late has come. */
        if (rank == odd)
            job_barrier(c);
        CHECK(submit(c, call, "back", x, y, MOST, root, &op) == 0);
        CHECK(rank != (odd + 1) % 4 || tally_op_cancel(op, "not wanted") == 0);
        if (rank != odd)
            job_barrier(c);
        CHECK(tally_op_wait(op, -1) == -ECANCELED);
        CHECK_HOLDS(tally_op_error(op), "not wanted");
        tally_op_free(op);
        expect_sound(c, call, rank, n);
    }
    job_leave(c);
    return 0;
}

static void test_disagreement(void **state)
{
    for (int tallyds = 0; tallyds < 2; tallyds++)
        job_run(&(struct job){.ranks = 4, .tallyds = tallyds, .machine = pairs, .main = disagree});
}

/* Go on until that fails, or until it is enough. */
static int until_failure(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    float *x = malloc(MOST * sizeof *x), *y = malloc(MOST * sizeof *y);
    tally_op *op;
    CHECK(x && y);
    int err = 0;
    for (int n = 0; !err && n < b->rounds; n++) {
        const enum call call = (enum call)(n % CALLS);
        for (int i = 0; i < MOST; i++)
            x[i] = (float)(rank + i % 512);
        err = submit(c, call, "w", x, y, MOST, n % 4, &op);
        if (!err) {
            err = tally_op_wait(op, -1);
            size_t wanted = err               ? 0
                            : call == REDUCE  ? (rank == n % 4) * MOST
                            : call == SCATTER ? MOST / 4
                                              : 0;
            for (size_t i = 0; i < wanted; i++)
                CHECK(y[i] == (float)((i + (call == SCATTER) * (size_t)rank * (MOST / 4)) % 512) + 1.5f);
            tally_op_free(op);
        }
        atomic_fetch_add(&b->stage, 1);
    }
    if (err) {
        CHECK(err == -ECONNRESET);
        CHECK_HOLDS(tally_error(), "rank 1 on");
        memset(y, 0, MOST * sizeof *y); /* ours again */
    }
    CHECK(tally_comm_close(c) == 0);
    for (int i = 0; err && i < MOST; i++)
        CHECK(y[i] == 0);
    free(x);
    free(y);
    return 0;
}

static void test_rank_killed(void **state)
{
    for (int i = 0; i < (UNDER_SANITIZER ? 2 : 6); i++) {
        struct board *b = job_shared(sizeof *b);
        b->rounds = INT32_MAX;
        struct job j = {.ranks = 4, .tallyds = i % 2, .machine = pairs, .main = until_failure, .arg = b};
        job_start(&j);
        job_await(&b->stage, 10 + 7 * i);
        kill(j.rank_pid[1], SIGKILL);
        for (int rank = 0; rank < 4; rank++)
            assert_int_equal(job_wait_rank(&j, rank), rank == 1 ? 128 + SIGKILL : 0);
        job_clear(&j);
    }
}

/* It has part 0 of some names, and sums of reduces, for which the carriers give again what they had given. */
static void test_tallyd_killed(void **state)
{
    for (int i = 0; i < (UNDER_SANITIZER ? 2 : 6); i++) {
        struct board *b = job_shared(sizeof *b);
        b->rounds = 60;
        struct job j = {.ranks = 4,
                        .tallyds = 2,
                        .machine = pairs,
                        .main = until_failure,
                        .arg = b,
                        .settings = {"TALLY_PART_BYTES=4K", i % 2 ? "TALLY_CREDIT_BYTES=16K" : NULL}};
        job_start(&j);
        job_await(&b->stage, 40 + 17 * i);
        kill(j.tallyd_pid[0], SIGKILL);
        for (int rank = 0; rank < 4; rank++)
            assert_int_equal(job_wait_rank(&j, rank), 0);
        job_clear(&j);
    }
}

/* A rank that has joined gives and takes nothing, so these fail with the sentence of ranks that are no team. */
static int one_joins(int rank, void *arg)
{
    static float x[MOST], y[MOST];
    tally_comm *c = job_open();
    tally_op *op, *join = NULL;
    if (rank == 1)
        CHECK(tally_join(c, NULL, &join) == 0);
    for (int n = 0; n < 2 * CALLS && rank != 1; n++) {
        CHECK(submit(c, (enum call)(n % CALLS), NULL, x, y, MOST, n % 4, &op) == 0);
        CHECK(tally_op_wait(op, -1) == -EINVAL);
        CHECK_HOLDS(tally_op_error(op), "rank 1 has joined");
        tally_op_free(op);
    }
    if (rank != 1)
        CHECK(tally_join(c, NULL, &join) == 0);
    job_expect(join, 0);
    for (int n = 0; n < 2 * CALLS; n++)
        expect_sound(c, (enum call)(n % CALLS), rank, n);
    job_leave(c);
    return 0;
}

static void test_rank_joins(void **state)
{
    for (int tallyds = 0; tallyds < 2; tallyds++)
        job_run(&(struct job){.ranks = 4, .tallyds = tallyds, .machine = pairs, .main = one_joins});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_as_each_for_itself), cmocka_unit_test(test_memory_out_of_reach),
        cmocka_unit_test(test_opposite_orders),    cmocka_unit_test(test_disagreement),
        cmocka_unit_test(test_rank_killed),        cmocka_unit_test(test_tallyd_killed),
        cmocka_unit_test(test_rank_joins),
    };
    return cmocka_run_group_tests_name("team_calls", tests, NULL, NULL);
}
