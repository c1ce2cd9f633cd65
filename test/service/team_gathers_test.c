/* team_gathers_test.c - all-gathers of several machines with several ranks on each, whose ranks gather together: every rank gets
 * every piece, whatever the layout, the lengths, the memory and the order; who dies, joins or disagrees is named as ever. */
#include <errno.h>
#include <setjmp.h>
#include <string.h>

#include "job.h"

#include <cmocka.h>

enum { MOST = 120000, PART = 16 << 10 };

struct board {
    atomic_int stage;
    int rounds;
    bool private_only; /* no rank may reach into another's memory */
};

/* Element i of a rank's piece. */
static int32_t gives(int rank, size_t i, int round)
{
    return (int32_t)i * 7 + rank * 100003 + round * 17;
}

static void fill(int32_t *piece, int rank, size_t count, int round)
{
    for (size_t i = 0; i < count; i++)
        piece[i] = gives(rank, i, round);
}

static bool holds(const int32_t *piece, int rank, size_t count, int round)
{
    for (size_t i = 0; i < count; i++)
        if (piece[i] != gives(rank, i, round))
            return false;
    return true;
}

/* --- results ------------------------------------------------------------------------------------- */

/* One that is under way. */
struct gathering {
    tally_op *op;
    int32_t *in, *out; /* of equal pieces; in place `in` lies in `out` */
    bool pooled, in_place;
};

/* Of unlike pieces some are empty. */
static size_t count_of(int rank, int n)
{
    static const size_t counts[] = {1, 4095, PART / 4 + 3, MOST, 0, 70001, 30000};
    return n % 5 == 4 ? 0 : counts[((unsigned)rank * 3 + (unsigned)n) % 7];
}

static void begin_equal(tally_comm *c, struct gathering *g, const char *name, int rank, size_t count, int n)
{
    g->pooled = (n + rank) % 3 == 0;
    g->in_place = n % 2;
    g->out = job_memory(c, count * (size_t)tally_comm_size(c) * sizeof *g->out, g->pooled);
    g->in = g->in_place ? g->out + (size_t)rank * count : job_memory(c, count * sizeof *g->in, g->pooled);
    fill(g->in, rank, count, n);
    CHECK(tally_allgather_into(c, name, g->in, g->out, count, TALLY_INT32, NULL, &g->op) == 0);
}

static void end_equal(tally_comm *c, struct gathering *g, size_t count, int n)
{
    job_expect(g->op, 0);
    for (int r = 0; r < tally_comm_size(c); r++)
        CHECK(holds(g->out + (size_t)r * count, r, count, n));
    if (!g->in_place)
        job_give_back(g->in, g->pooled);
    job_give_back(g->out, g->pooled);
}

static void gather_unlike(tally_comm *c, int rank, int n)
{
    size_t count = count_of(rank, n), at = 0, bytes;
    int32_t *in = job_memory(c, count * sizeof *in, false);
    const int64_t *firsts;
    const void *data;
    tally_op *op;
    fill(in, rank, count, n);
    CHECK(tally_allgather(c, n % 3 ? "unlike" : NULL, in, count, TALLY_INT32, NULL, &op) == 0);
    CHECK(tally_op_wait(op, -1) == 0);
    CHECK(tally_op_gathered(op, &data, &bytes, &firsts) == 0);
    for (int r = 0; r < tally_comm_size(c); at += count_of(r++, n)) {
        CHECK(firsts[r] == (int64_t)count_of(r, n));
        CHECK(holds((const int32_t *)data + at, r, count_of(r, n), n));
    }
    CHECK(bytes == at * sizeof *in);
    tally_op_free(op);
    job_give_back(in, false);
}

/* Three at a time, behind a reduction. */
static int gather_all(int rank, void *arg)
{
    static const size_t counts[] = {0, 1, 1000, PART / 4, PART / 4 + 1, 20011, MOST};
    enum { COUNTS = sizeof counts / sizeof *counts, ABREAST = 3, ROUNDS = UNDER_SANITIZER ? 12 : 30 };
    static const char *const names[ABREAST] = {"a", NULL, "c"};
    const struct board *b = arg;
    if (b->private_only)
        job_forbid_reaching();
    tally_comm *c = job_open();
    static float x[20000];
    for (int n = 0; n < ROUNDS; n++) {
        struct gathering g[ABREAST];
        tally_op *sum;
        for (int i = 0; i < 20000; i++)
            x[i] = 1;
        CHECK(tally_push_pull(c, "sum", x, x, 20000, TALLY_FLOAT32, TALLY_SUM, NULL, &sum) == 0);
        for (int k = 0; k < ABREAST; k++)
            begin_equal(c, &g[k], names[k], rank, counts[(n + 2 * k) % COUNTS], n + k);
        gather_unlike(c, rank, n);
        for (int k = 0; k < ABREAST; k++)
            end_equal(c, &g[k], counts[(n + 2 * k) % COUNTS], n + k);
        job_expect(sum, 0);
        CHECK(x[0] == (float)tally_comm_size(c) && x[19999] == (float)tally_comm_size(c));
    }
    job_leave(c);
    return 0;
}

static void run_layout(const char *layout, int tallyds, bool private_only)
{
    struct board *b = job_shared(sizeof *b);
    int machine[JOB_MOST_RANKS];
    b->private_only = private_only;
    struct job j = {.ranks = job_layout(layout, machine),
                    .tallyds = tallyds,
                    .machine = machine,
                    .main = gather_all,
                    .arg = b,
                    .settings = {"TALLY_PART_BYTES=16K"}};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

static void test_layouts(void **state)
{
    /* In the last two each rank pushes for itself, since a machine's sum would change the whole one. */
    static const char *const layouts[] = {"aabb",   "abab",     "aaab",     "aabbc",
                                          "aaabbb", "aabbccdd", "aaaabbcc", "aab"};
    for (int i = 0; i < (int)(sizeof layouts / sizeof *layouts); i++)
        run_layout(layouts[i], i % 3, false);
}

static void test_memory_out_of_reach(void **state)
{
    run_layout("aabb", 1, true);
    run_layout("aaab", 0, true);
}

static const int pairs[] = {0, 0, 1, 1};

/* The machines begin with those that the others end with, each of more parts than may be asked for at once. */
static int opposite(int rank, void *arg)
{
    enum { MANY = 12 };
    tally_comm *c = job_open();
    struct gathering g[MANY];
    for (int at = 0; at < MANY; at++) {
        int i = rank < 2 ? at : MANY - 1 - at;
        char name[8];
        snprintf(name, sizeof name, "%d", i);
        begin_equal(c, &g[i], name, rank, MOST, i);
    }
    for (int i = 0; i < MANY; i++)
        end_equal(c, &g[i], MOST, i);
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
        .machine = pairs,
        .main = opposite,
        .settings = {"TALLY_PART_BYTES=16K", "TALLY_WINDOW_PARTS=1", "TALLY_MEMORY=1M", "TALLY_TIMEOUT=60"}});
}

/* --- what goes wrong ----------------------------------------------------------------------------- */

/* One rank means something else: all hear of it, and go on. */
static int disagree(int rank, void *arg)
{
    static int32_t x[MOST], y[4 * MOST];
    tally_comm *c = job_open();
    tally_op *op;
    for (int odd = 0; odd < 4; odd++) {
        /* Of a size at which its ranks are no team. */
        static const size_t others[] = {MOST - 1, 10};
        for (int i = 0; i < 2; i++) {
            CHECK(tally_allgather_into(c, "w", x, y, rank == odd ? others[i] : MOST, TALLY_INT32, NULL,
                                       &op) == 0);
            CHECK(tally_op_wait(op, -1) == -EINVAL);
            CHECK_HOLDS(tally_op_error(op), "'w': the ranks disagree: ");
            tally_op_free(op);
        }
        CHECK(tally_allgather(c, "w", x, MOST, rank == odd ? TALLY_FLOAT32 : TALLY_INT32, NULL, &op) == 0);
        CHECK(tally_op_wait(op, -1) == -EINVAL);
        CHECK_HOLDS(tally_op_error(op), "the ranks disagree: tally_allgather ");
        tally_op_free(op);
        if (rank == odd) {
            CHECK(tally_refuse(c, "w", TALLY_ALLGATHER, NULL, "no tensor") == 0);
        } else {
            CHECK(tally_allgather_into(c, "w", x, y, MOST, TALLY_INT32, NULL, &op) == 0);
            CHECK(tally_op_wait(op, -1) == -EINVAL);
            CHECK_HOLDS(tally_op_error(op), "refuses: no tensor");
            tally_op_free(op);
        }
        if (rank != odd) {
            CHECK(tally_allgather(c, "late", x, MOST, TALLY_INT32, NULL, &op) == 0);
            CHECK(rank != (odd + 1) % 4 || tally_op_cancel(op, "not wanted") == 0);
            CHECK(tally_op_wait(op, -1) == -ECANCELED);
            CHECK_HOLDS(tally_op_error(op), "not wanted");
            tally_op_free(op);
        }
        job_barrier(c);
        if (rank == odd) {
            CHECK(tally_allgather(c, "late", x, MOST, TALLY_INT32, NULL, &op) == 0);
            CHECK(tally_op_wait(op, -1) == -ECANCELED);
            tally_op_free(op);
        }
        /* Equal pieces for some, unlike ones for others. */
        if (rank == odd)
            CHECK(tally_allgather(c, "w", x, MOST, TALLY_INT32, NULL, &op) == 0);
        else
            CHECK(tally_allgather_into(c, "w", x, y, MOST, TALLY_INT32, NULL, &op) == 0);
        CHECK(tally_op_wait(op, -1) == -EINVAL);
        CHECK_HOLDS(tally_op_error(op), "the ranks disagree: ");
        tally_op_free(op);
        /* Taken back before the rank that is late has come; it is heard of where that had not. */
        if (rank == odd)
            job_barrier(c);
        CHECK(tally_allgather_into(c, "back", x, y, MOST, TALLY_INT32, NULL, &op) == 0);
        CHECK(rank != (odd + 1) % 4 || tally_op_cancel(op, "not wanted") == 0);
        if (rank != odd)
            job_barrier(c);
        CHECK(tally_op_wait(op, -1) == -ECANCELED);
        CHECK_HOLDS(tally_op_error(op), "not wanted");
        tally_op_free(op);
        struct gathering g;
        begin_equal(c, &g, "w", rank, MOST, odd);
        end_equal(c, &g, MOST, odd);
        gather_unlike(c, rank, odd);
    }
    job_leave(c);
    return 0;
}

static void test_disagreement(void **state)
{
    for (int tallyds = 0; tallyds < 2; tallyds++)
        job_run(&(struct job){.ranks = 4, .tallyds = tallyds, .machine = pairs, .main = disagree});
}

/* Gather until that fails, or until it is enough. */
static int until_failure(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    int32_t *x = malloc(MOST * sizeof *x), *y = malloc(4 * MOST * sizeof *y);
    tally_op *op;
    CHECK(x && y);
    int err = 0;
    for (int n = 0; !err && n < b->rounds; n++) {
        fill(x, rank, MOST, n);
        if (n % 3 == 2)
            err = tally_allgather(c, "unlike", x, MOST - (size_t)rank, TALLY_INT32, NULL, &op);
        else
            err = tally_allgather_into(c, "w", x, y, MOST, TALLY_INT32, NULL, &op);
        if (!err) {
            err = tally_op_wait(op, -1);
            for (int r = 0; !err && n % 3 != 2 && r < 4; r++)
                CHECK(holds(y + (size_t)r * MOST, r, MOST, n));
            tally_op_free(op);
        }
        atomic_fetch_add(&b->stage, 1);
    }
    job_close_after_kill(c, err, 1, y, 4 * MOST * sizeof *y);
    free(x);
    free(y);
    return 0;
}

static void test_rank_killed(void **state)
{
    for (int i = 0; i < (UNDER_SANITIZER ? 2 : 5); i++) {
        struct board *b = job_shared(sizeof *b);
        b->rounds = INT32_MAX;
        struct job j = {.ranks = 4, .tallyds = i % 2, .machine = pairs, .main = until_failure, .arg = b};
        job_kill_rank(&j, 1, &b->stage, 10 + 7 * i);
    }
}

/* It has part 0 of some names, and no piece of any. */
static void test_tallyd_killed(void **state)
{
    for (int i = 0; i < (UNDER_SANITIZER ? 1 : 3); i++) {
        struct board *b = job_shared(sizeof *b);
        b->rounds = 40;
        struct job j = {.ranks = 4,
                        .tallyds = 2,
                        .machine = pairs,
                        .main = until_failure,
                        .arg = b,
                        .settings = {"TALLY_PART_BYTES=16K"}};
        job_kill_tallyd(&j, &b->stage, 40 + 9 * i);
    }
}

/* A rank that has joined gives nothing, so what the others gather fails with the sentence of ranks that are no team. */
static int one_joins(int rank, void *arg)
{
    static int32_t x[MOST], y[4 * MOST];
    tally_comm *c = job_open();
    tally_op *op, *join = NULL;
    if (rank == 1)
        CHECK(tally_join(c, NULL, &join) == 0);
    for (int n = 0; n < 4 && rank != 1; n++) {
        if (n % 2)
            CHECK(tally_allgather(c, NULL, x, MOST, TALLY_INT32, NULL, &op) == 0);
        else
            CHECK(tally_allgather_into(c, NULL, x, y, MOST, TALLY_INT32, NULL, &op) == 0);
        CHECK(tally_op_wait(op, -1) == -EINVAL);
        CHECK_HOLDS(tally_op_error(op), "rank 1 has joined");
        tally_op_free(op);
    }
    for (int n = 0; n < 2 && rank != 1; n++) { /* it goes on with those that can do without a piece of it */
        struct tally_options o = {.size = sizeof o, .partial = 1};
        const int64_t *firsts;
        const void *data;
        size_t bytes;
        fill(x, rank, MOST, n);
        CHECK(tally_allgather(c, NULL, x, MOST, TALLY_INT32, &o, &op) == 0);
        CHECK(tally_op_wait(op, -1) == 0);
        CHECK(tally_op_gathered(op, &data, &bytes, &firsts) == 0);
        CHECK(firsts[1] == 0 && bytes == 3 * MOST * sizeof *x);
        for (int r = 0, at = 0; r < 4; r++)
            CHECK(r == 1 || holds((const int32_t *)data + (size_t)at++ * MOST, r, MOST, n));
        tally_op_free(op);
    }
    if (rank != 1)
        CHECK(tally_join(c, NULL, &join) == 0);
    job_expect(join, 0);
    struct gathering g;
    begin_equal(c, &g, "w", rank, MOST, 1);
    end_equal(c, &g, MOST, 1);
    gather_unlike(c, rank, 2);
    job_leave(c);
    return 0;
}

static void test_rank_joins(void **state)
{
    job_run(&(struct job){.ranks = 4, .machine = pairs, .main = one_joins});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layouts),         cmocka_unit_test(test_memory_out_of_reach),
        cmocka_unit_test(test_opposite_orders), cmocka_unit_test(test_disagreement),
        cmocka_unit_test(test_rank_killed),     cmocka_unit_test(test_tallyd_killed),
        cmocka_unit_test(test_rank_joins),
    };
    return cmocka_run_group_tests_name("team_gathers", tests, NULL, NULL);
}
