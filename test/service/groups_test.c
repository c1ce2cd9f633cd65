/* groups_test.c - ranks that operate among themselves: subsets in orders of their own, overlapping groups, equal names
 * in two groups, groups of one, wrong lists; and the operations whose results only some ranks want. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>

#include "job.h"
#include "reference.h"

#include <cmocka.h>

enum { RANKS = 4, MANY = 300000 };

/* --- sums ---------------------------------------------------------------------------------------- */

/* What rank r brings: not the same in any order of addition. */
static float brings(int r, size_t i)
{
    static const float big[] = {1e8f, 1.25f, -1e8f, 3.5f};
    return big[r] + (float)(i % 7);
}

/* What these ranks, in this order, must get. */
static void reduce(const int *ranks, int n, enum tally_reduction reduction, float *out, size_t count)
{
    static const int one_group[RANKS];
    float *x = malloc((size_t)n * count * sizeof *x);
    const void *inputs[RANKS];
    CHECK(x);
    for (int r = 0; r < n; r++) {
        inputs[r] = x + (size_t)r * count;
        for (size_t i = 0; i < count; i++)
            x[(size_t)r * count + i] = brings(ranks[r], i);
    }
    const struct reference how = {TALLY_FLOAT32,  reduction,   .ranks = n,        .prescale = 1,
                                  .postscale = 1, .groups = 1, .group = one_group};
    reference_reduce(&how, inputs, out, count);
    free(x);
}

static void sums_along(tally_comm *c, tally_group *g, const int *ranks, int n, size_t count)
{
    int rank = tally_comm_rank(c);
    struct tally_options o = job_in(g);
    float *x = malloc(count * sizeof *x), *y = malloc(count * sizeof *y),
          *right = malloc(count * sizeof *right);
    tally_op *op;
    CHECK(x && y && right);
    for (size_t i = 0; i < count; i++)
        x[i] = brings(rank, i);
    CHECK(tally_push_pull(c, "w", x, y, count, TALLY_FLOAT32, TALLY_SUM, &o, &op) == 0 && job_ends(op) == 0);
    reduce(ranks, n, TALLY_SUM, right, count);
    CHECK(memcmp(y, right, count * sizeof *y) == 0);
    CHECK(tally_push_pull(c, NULL, x, y, count, TALLY_FLOAT32, TALLY_AVERAGE, &o, &op) == 0 &&
          job_ends(op) == 0);
    reduce(ranks, n, TALLY_AVERAGE, right, count);
    CHECK(memcmp(y, right, count * sizeof *y) == 0);
    free(x);
    free(y);
    free(right);
}

static int sum_in_groups(int rank, void *arg)
{
    /* Overlapping, out of order, of one, of all. */
    static const struct {
        const char *name;
        int n, ranks[RANKS];
    } lists[] = {{"left", 2, {0, 1}},         {"right", 2, {2, 3}},     {"odd", 3, {3, 1, 0}},
                 {"middle", 2, {2, 1}},       {"alone", 1, {2}},        {"all", 4, {0, 1, 2, 3}},
                 {"turned", 4, {3, 2, 1, 0}}, {"left again", 2, {0, 1}}};
    tally_comm *c = job_open();
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        tally_group *g, *same;
        int place = -1;
        for (int j = 0; j < lists[i].n; j++)
            if (lists[i].ranks[j] == rank)
                place = j;
        if (place < 0) {
            CHECK(tally_group_create(c, lists[i].name, lists[i].ranks, (size_t)lists[i].n, &g) == -EINVAL);
            continue;
        }
        CHECK(tally_group_create(c, lists[i].name, lists[i].ranks, (size_t)lists[i].n, &g) == 0);
        CHECK(tally_group_create(c, lists[i].name, lists[i].ranks, (size_t)lists[i].n, &same) == 0 &&
              same == g);
        CHECK(tally_group_rank(g) == place && tally_group_size(g) == lists[i].n);
        sums_along(c, g, lists[i].ranks, lists[i].n, 5);
        sums_along(c, g, lists[i].ranks, lists[i].n, MANY);
    }
    job_leave(c);
    return 0;
}

static void test_sums(void **state)
{
    job_run(&(struct job){.ranks = RANKS, .tallyds = 1, .main = sum_in_groups});
}

/* One name in two groups and in none of them, all in flight at once. */
static int equal_names(int rank, void *arg)
{
    tally_comm *c = job_open();
    const int low[] = {0, 1, 2}, high[] = {1, 2, 3};
    tally_group *g[3] = {NULL};
    struct tally_options o[3];
    float x[3][100], sum[3] = {0 + 1 + 2, 1 + 2 + 3, 0 + 1 + 2 + 3};
    tally_op *op[3] = {NULL};
    if (rank < 3)
        CHECK(tally_group_create(c, "low", low, 3, &g[0]) == 0);
    if (rank > 0)
        CHECK(tally_group_create(c, "high", high, 3, &g[1]) == 0);
    for (int round = 0; round < 20; round++) {
        for (int k = 0; k < 3; k++) {
            int i = rank % 2 ? 2 - k : k; /* in opposite orders */
            o[i] = job_in(g[i]);
            for (int j = 0; j < 100; j++)
                x[i][j] = (float)(rank * (j + 1));
            if (i == 2 || g[i])
                CHECK(tally_push_pull(c, "w", x[i], x[i], 100, TALLY_FLOAT32, TALLY_SUM, &o[i], &op[i]) == 0);
        }
        for (int i = 0; i < 3; i++)
            if (op[i]) {
                CHECK(job_ends(op[i]) == 0);
                op[i] = NULL;
                for (int j = 0; j < 100; j++)
                    CHECK(x[i][j] == sum[i] * (float)(j + 1));
            }
    }
    job_leave(c);
    return 0;
}

static void test_equal_names(void **state)
{
    job_run(&(struct job){.ranks = RANKS, .main = equal_names});
}

/* The other operations, seen from a group in an order of its own. */
static int other_operations(int rank, void *arg)
{
    tally_comm *c = job_open();
    const int ranks[] = {3, 0, 2};
    tally_group *g;
    tally_op *op;
    if (rank != 1) {
        CHECK(tally_group_create(c, "three", ranks, 3, &g) == 0);
        struct tally_options o = job_in(g);
        int place = tally_group_rank(g);
        int32_t x[4] = {rank, rank, rank, rank};
        CHECK(tally_broadcast(c, NULL, x, 4, TALLY_INT32, 1, &o, &op) == 0 && job_ends(op) == 0);
        CHECK(x[0] == 0 && x[3] == 0);
        CHECK(tally_broadcast(c, NULL, x, 4, TALLY_INT32, 3, &o, &op) == -EINVAL);
        CHECK_HOLDS(tally_error(), "root 3 is no rank from 0 to 2: inside a group ranks count from 0");

        int32_t mine[3] = {10 * rank, 10 * rank + 1, 10 * rank + 2};
        const void *data;
        size_t bytes;
        const int64_t *dims;
        CHECK(tally_allgather(c, NULL, mine, (size_t)place + 1, TALLY_INT32, &o, &op) == 0);
        CHECK(tally_op_wait(op, -1) == 0 && tally_op_gathered(op, &data, &bytes, &dims) == 0);
        static const int32_t gathered[] = {30, 0, 1, 20, 21, 22};
        CHECK(bytes == sizeof gathered && memcmp(data, gathered, sizeof gathered) == 0);
        CHECK(dims[0] == 1 && dims[1] == 2 && dims[2] == 3);
        tally_op_free(op);
        CHECK(tally_barrier(c, NULL, &o, &op) == 0 && job_ends(op) == 0);
    }
    job_leave(c);
    return 0;
}

static void test_other_operations(void **state)
{
    job_run(&(struct job){.ranks = RANKS, .tallyds = 1, .main = other_operations});
}

/* --- disagreement -------------------------------------------------------------------------------- */

static int wrong_lists(int rank, void *arg)
{
    tally_comm *c = job_open();
    const int two[] = {1, 2}, three[] = {1, 2, 3}, turned[] = {2, 1};
    tally_group *g, *other;
    float *x = calloc(MANY, sizeof *x);
    tally_op *op;
    CHECK(x);
    /* Ranks 1 and 2 mean other ranks by one name; 3, which only 1 names, hears of it too. */
    if (rank) {
        CHECK(tally_group_create(c, "g", rank == 2 ? two : three, rank == 2 ? 2 : 3, &g) == 0);
        struct tally_options o = job_in(g);
        for (size_t count = 1; count <= MANY; count = count == 1 ? MANY : MANY + 1) {
            if (rank == 3)
                job_sleep_ms(50);
            CHECK(tally_push_pull(c, "w", x, x, count, TALLY_FLOAT32, TALLY_SUM, &o, &op) == 0);
            CHECK(tally_op_wait(op, -1) == -EINVAL);
            CHECK_HOLDS(tally_op_error(op), "'w': the ranks disagree: ");
            CHECK_HOLDS(tally_op_error(op), ": 'w' in group 'g' of ranks 1-3: tally_push_pull float32 [");
            CHECK_HOLDS(tally_op_error(op),
                        "rank 2: 'w' in group 'g' of ranks 1-2: tally_push_pull float32 [");
            tally_op_free(op);
        }
        CHECK(tally_group_create(c, "g", three + 1, 2, &other) == (rank == 1 ? -EINVAL : -EEXIST));
        /* The same ranks in another order are another group. */
        if (rank < 3) {
            CHECK(tally_group_create(c, "h", rank == 2 ? two : turned, 2, &g) == 0);
            o = job_in(g);
            CHECK(tally_push_pull(c, "w", x, x, 1, TALLY_FLOAT32, TALLY_SUM, &o, &op) == 0);
            CHECK(tally_op_wait(op, -1) == -EINVAL);
            CHECK_HOLDS(tally_op_error(op),
                        "rank 1: 'w' in group 'h' of ranks 2, 1: tally_push_pull float32");
            tally_op_free(op);
        }
    }
    job_barrier(c);
    /* A mark fails a group's call, for the group alone. */
    if (rank == 1 || rank == 2) {
        CHECK(tally_group_create(c, "pair", two, 2, &g) == 0);
        struct tally_options o = job_in(g);
        if (rank == 1) {
            CHECK(tally_refuse(c, "w", TALLY_PUSH_PULL, &o, "a tensor of strings") == 0);
        } else {
            CHECK(tally_push_pull(c, "w", x, x, 1, TALLY_FLOAT32, TALLY_SUM, &o, &op) == 0);
            CHECK(tally_op_wait(op, -1) == -EINVAL);
            CHECK_HOLDS(tally_op_error(op), "rank 1 refuses: a tensor of strings");
            tally_op_free(op);
        }
    }
    CHECK(tally_group_create(c, "", two, 2, &g) == -EINVAL);
    CHECK(tally_group_create(c, "n", (int[]){rank, rank}, 2, &g) == -EINVAL);
    CHECK(tally_group_create(c, "n", (int[]){rank, RANKS}, 2, &g) == -EINVAL);
    CHECK(tally_group_create(c, "n", two, 0, &g) == -EINVAL);
    free(x);
    job_leave(c);
    return 0;
}

static void test_wrong_lists(void **state)
{
    job_run(&(struct job){.ranks = RANKS, .tallyds = 2, .main = wrong_lists});
}

/* --- results that only some want ------------------------------------------------------------------ */

static int reduce_to_one(int rank, void *arg)
{
    tally_comm *c = job_open();
    static int32_t x[MANY], y[MANY];
    tally_op *op;
    for (int root = 0; root < RANKS; root++) {
        for (int i = 0; i < MANY; i++) {
            x[i] = rank + i;
            y[i] = -1;
        }
        CHECK(tally_reduce(c, "r", x, rank == root ? y : NULL, MANY, TALLY_INT32, TALLY_SUM, root, NULL,
                           &op) == 0);
        CHECK(job_ends(op) == 0);
        for (int i = 0; i < MANY; i++)
            CHECK(x[i] == rank + i && y[i] == (rank == root ? 6 + 4 * i : -1));
    }
    CHECK(tally_reduce(c, "r", x, x, 10, TALLY_INT32, TALLY_SUM, rank == 2, NULL, &op) == 0);
    CHECK(tally_op_wait(op, -1) == -EINVAL);
    CHECK_HOLDS(tally_op_error(op), "reduce int32 [10] sum to rank 0 on ranks 0-1, 3, to rank 1 on rank 2");
    tally_op_free(op);
    job_leave(c);
    return 0;
}

static void test_reduce(void **state)
{
    job_run(&(struct job){.ranks = RANKS, .tallyds = 1, .main = reduce_to_one});
}

static int bitwise(int rank, void *arg)
{
    static const enum tally_reduction ways[] = {TALLY_BAND, TALLY_BOR, TALLY_BXOR};
    static const uint8_t results[] = {0x80, 0x8f, 0x8f & 0xf}; /* of 0x81, 0x82, 0x84, 0x88 */
    static const uint8_t truths[] = {0, 1, 1};                 /* of 0, 0, 0, 1 */
    tally_comm *c = job_open();
    tally_op *op;
    for (int i = 0; i < 3; i++) {
        uint8_t x[100], t[100];
        memset(x, 0x80 | 1 << rank, sizeof x);
        memset(t, rank == 3, sizeof t);
        CHECK(tally_push_pull(c, NULL, x, x, 100, TALLY_UINT8, ways[i], NULL, &op) == 0 && job_ends(op) == 0);
        CHECK(tally_push_pull(c, NULL, t, t, 100, TALLY_BOOL, ways[i], NULL, &op) == 0 && job_ends(op) == 0);
        CHECK(x[0] == results[i] && x[99] == results[i] && t[0] == truths[i] && t[99] == truths[i]);
    }
    float f = 0;
    CHECK(tally_push_pull(c, "f", &f, &f, 1, TALLY_FLOAT32, TALLY_BOR, NULL, &op) == -EINVAL);
    job_leave(c);
    return 0;
}

static void test_bitwise(void **state)
{
    job_run(&(struct job){.ranks = RANKS, .main = bitwise});
}

static int scatter_sums(int rank, void *arg)
{
    static const size_t ways[][RANKS] = {
        {1, 1, 1, 1}, {3, 0, 70001, 5}, {50000, 50000, 50000, 50000}, {0, 0, 0, 0}};
    tally_comm *c = job_open();
    static int32_t x[MANY], y[MANY];
    tally_op *op;
    for (int w = 0; w < 4; w++)
        for (int in_place = 0; in_place < 2; in_place++) {
            const size_t *counts = ways[w];
            size_t start = 0, total = 0;
            for (int i = 0; i < RANKS; i++) {
                start += i < rank ? counts[i] : 0;
                total += counts[i];
            }
            for (size_t i = 0; i < total; i++)
                x[i] = (int32_t)i * (rank + 1);
            int32_t *out = in_place ? x + start : y;
            CHECK(tally_reduce_scatter(c, NULL, x, out, counts, TALLY_INT32, TALLY_SUM, NULL, &op) == 0);
            CHECK(job_ends(op) == 0);
            for (size_t i = 0; i < counts[rank]; i++)
                CHECK(out[i] == (int32_t)(start + i) * 10);
        }
    size_t odd[RANKS] = {1, 2, 3, rank == 0 ? 5 : 4};
    CHECK(tally_reduce_scatter(c, "s", x, y, odd, TALLY_INT32, TALLY_SUM, NULL, &op) == 0);
    CHECK(tally_op_wait(op, -1) == -EINVAL);
    CHECK_HOLDS(tally_op_error(op),
                "reduce_scatter int32 [1, 2, 3, 5] sum on rank 0, [1, 2, 3, 4] on ranks 1-3");
    tally_op_free(op);
    job_leave(c);
    return 0;
}

static void test_reduce_scatter(void **state)
{
    static const int machine[] = {0, 0, 1, 1};
    job_run(&(struct job){.ranks = RANKS, .tallyds = 1, .main = scatter_sums});
    job_run(&(struct job){.ranks = RANKS, .machine = machine, .main = scatter_sums});
}

/* Rank i gives rank j (i + 2j) % 5 * scale elements, of value 100i + j. */
static size_t gives(int i, int j, size_t scale)
{
    return (size_t)((i + 2 * j) % 5) * scale;
}

static void exchange(tally_comm *c, tally_group *g, int place, int n, size_t scale)
{
    static int16_t x[MANY], y[MANY];
    size_t give[RANKS], take[RANKS], at = 0;
    struct tally_options o = job_in(g);
    tally_op *op;
    for (int j = 0; j < n; j++) {
        give[j] = gives(place, j, scale);
        take[j] = gives(j, place, scale);
        for (size_t i = 0; i < give[j]; i++)
            x[at++] = (int16_t)(100 * place + j);
    }
    CHECK(tally_alltoall(c, NULL, x, give, y, take, TALLY_INT16, &o, &op) == 0 && job_ends(op) == 0);
    at = 0;
    for (int j = 0; j < n; j++)
        for (size_t i = 0; i < take[j]; i++)
            CHECK(y[at++] == 100 * j + place);
}

static int exchange_all(int rank, void *arg)
{
    tally_comm *c = job_open();
    const int ranks[] = {3, 1, 0};
    tally_group *g;
    tally_op *op;
    for (int i = 0; i < 3; i++) {
        exchange(c, NULL, rank, RANKS, 1);
        exchange(c, NULL, rank, RANKS, 15000);
    }
    if (rank != 2) {
        CHECK(tally_group_create(c, "three", ranks, 3, &g) == 0);
        exchange(c, g, tally_group_rank(g), 3, 1000);
    }
    /* Rank 1 expects one more of rank 3 than it gives: all hear of it, and nothing stays. */
    static int32_t x[MANY], y[MANY];
    size_t give[RANKS] = {40000, 40000, 40000, 40000}, take[RANKS] = {40000, 40000, 40000, 40000};
    take[3] += rank == 1;
    CHECK(tally_alltoall(c, "a", x, give, y, take, TALLY_INT32, NULL, &op) == 0);
    CHECK(tally_op_wait(op, -1) == -EINVAL);
    CHECK_HOLDS(tally_op_error(op), "rank 3 gives rank 1 40000 elements, and 40001 are expected");
    tally_op_free(op);
    take[3] = 40000;
    CHECK(tally_alltoall(c, "a", x, give, y, take, rank == 2 ? TALLY_FLOAT32 : TALLY_INT32, NULL, &op) == 0);
    CHECK(tally_op_wait(op, -1) == -EINVAL);
    CHECK_HOLDS(tally_op_error(op),
                "'a': the ranks disagree: tally_alltoall int32 on ranks 0-1, 3, float32 on rank 2");
    tally_op_free(op);
    CHECK(tally_alltoall(c, "a", x, give, y, take, TALLY_INT32, NULL, &op) == 0 && job_ends(op) == 0);
    job_leave(c);
    return 0;
}

static int to_and_from_root(int rank, void *arg)
{
    tally_comm *c = job_open();
    static int32_t x[MANY], y[MANY];
    const size_t counts[RANKS] = {2, 0, 50000, 30};
    tally_op *op;
    for (int root = 0; root < RANKS; root++) {
        size_t at = 0;
        memset(y, 0, sizeof y);
        for (size_t i = 0; i < counts[rank]; i++)
            x[i] = rank + 1;
        CHECK(tally_gather(c, NULL, x, counts[rank], rank == root ? y : NULL, rank == root ? counts : NULL,
                           TALLY_INT32, root, NULL, &op) == 0 &&
              job_ends(op) == 0);
        for (int j = 0; j < RANKS && rank == root; j++)
            for (size_t i = 0; i < counts[j]; i++)
                CHECK(y[at++] == j + 1);
        memset(x, 0, sizeof x);
        CHECK(tally_scatter(c, NULL, rank == root ? y : NULL, rank == root ? counts : NULL, x, counts[rank],
                            TALLY_INT32, root, NULL, &op) == 0 &&
              job_ends(op) == 0);
        for (size_t i = 0; i < counts[rank]; i++)
            CHECK(x[i] == rank + 1);
    }
    CHECK(tally_gather(c, "g", x, 3, y, counts, TALLY_INT32, 0, NULL, &op) == 0);
    CHECK(tally_op_wait(op, -1) == -EINVAL);
    CHECK_HOLDS(tally_op_error(op), "rank 0 gives rank 0 3 elements, and 2 are expected");
    tally_op_free(op);
    job_leave(c);
    return 0;
}

static void test_exchange(void **state)
{
    static const int machine[] = {0, 0, 1, 1};
    job_run(&(struct job){.ranks = RANKS, .tallyds = 1, .main = exchange_all});
    job_run(&(struct job){.ranks = RANKS, .machine = machine, .main = exchange_all});
    job_run(&(struct job){.ranks = RANKS, .main = to_and_from_root});
}

/* Little memory and small parts: slots are dropped and asked for again, in groups and between two ranks as well. */
static int crowded(int rank, void *arg)
{
    tally_comm *c = job_open();
    const int ranks[] = {1, 3, 2};
    tally_group *g = NULL;
    static float x[4][MANY / 4];
    tally_op *op[4] = {NULL};
    if (rank)
        CHECK(tally_group_create(c, "three", ranks, 3, &g) == 0);
    struct tally_options o = job_in(g);
    for (int round = 0; round < 3; round++) {
        for (int k = 0; k < 4; k++) {
            int i = rank % 2 ? 3 - k : k;
            char name[] = {(char)('a' + i), 0};
            for (int j = 0; j < MANY / 4; j++)
                x[i][j] = 1;
            if (i % 2 == 0 || rank)
                CHECK(tally_push_pull(c, name, x[i], x[i], MANY / 4, TALLY_FLOAT32, TALLY_SUM,
                                      i % 2 ? &o : NULL, &op[i]) == 0);
        }
        exchange(c, NULL, rank, RANKS, 2000);
        for (int i = 0; i < 4; i++)
            if (op[i]) {
                CHECK(job_ends(op[i]) == 0);
                CHECK(x[i][0] == (i % 2 ? 3 : 4) && x[i][MANY / 4 - 1] == x[i][0]);
                op[i] = NULL;
            }
    }
    job_leave(c);
    return 0;
}

static void test_crowded(void **state)
{
    job_run(&(struct job){.ranks = RANKS,
                          .settings = {"TALLY_MEMORY=48K", "TALLY_PART_BYTES=4K", "TALLY_WINDOW_PARTS=1"},
                          .main = crowded});
}

/* --- services that die ------------------------------------------------------------------------------ */

struct board {
    atomic_int stage, stop;
};

/* In every step all of it, in overlapping groups, until rank 0 is told to stop. */
static int go_on(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    const int three[] = {3, 1, 0}, pair[] = {2, 3};
    static const size_t counts[RANKS] = {3000, 0, 10000, 7};
    static int32_t x[MANY], y[MANY];
    tally_group *g = NULL, *h = NULL;
    tally_op *op;
    if (rank != 2)
        CHECK(tally_group_create(c, "three", three, 3, &g) == 0);
    if (rank > 1)
        CHECK(tally_group_create(c, "pair", pair, 2, &h) == 0);
    for (int step = 0;; step++) {
        int32_t stop = atomic_load(&b->stop);
        if (g)
            sums_along(c, g, three, 3, 20000);
        if (h)
            sums_along(c, h, pair, 2, 30000);
        exchange(c, NULL, rank, RANKS, 1000);
        for (int i = 0; i < 13007; i++)
            x[i] = rank + i + step;
        CHECK(tally_reduce(c, NULL, x, y, 13007, TALLY_INT32, TALLY_SUM, step % RANKS, NULL, &op) == 0);
        CHECK(job_ends(op) == 0);
        for (int i = 0; i < 13007 && rank == step % RANKS; i++)
            CHECK(y[i] == 6 + 4 * (i + step));
        CHECK(tally_reduce_scatter(c, NULL, x, y, counts, TALLY_INT32, TALLY_SUM, NULL, &op) == 0 &&
              job_ends(op) == 0);
        CHECK(rank != 2 || y[9999] == 6 + 4 * (3000 + 9999 + step));
        CHECK(tally_send(c, x, 20000, TALLY_INT32, rank ^ 1, 0, NULL, &op) == 0);
        tally_op *received;
        CHECK(tally_recv(c, y, 20000, TALLY_INT32, rank ^ 1, 0, NULL, &received) == 0);
        CHECK(job_ends(received) == 0 && job_ends(op) == 0 && y[13006] == (rank ^ 1) + 13006 + step);
        CHECK(tally_push_pull(c, "stop", &stop, &stop, 1, TALLY_INT32, TALLY_MAX, NULL, &op) == 0 &&
              job_ends(op) == 0);
        if (rank == 0)
            atomic_store(&b->stage, step + 1);
        if (stop)
            break;
    }
    job_leave(c);
    return 0;
}

static void test_services_die(void **state)
{
    struct board *b = job_shared(sizeof *b);
    struct job j = {.ranks = RANKS,
                    .tallyds = 3,
                    .main = go_on,
                    .arg = b,
                    .settings = {"TALLY_PART_BYTES=16K", "TALLY_FRAGMENT_BYTES=4K"}};
    job_start(&j);
    for (int i = 0; i < 3; i++) {
        job_await(&b->stage, atomic_load(&b->stage) + 4);
        kill(j.tallyd_pid[i], SIGKILL);
        job_wait_tallyd(&j, i);
    }
    job_await(&b->stage, atomic_load(&b->stage) + 4);
    atomic_store(&b->stop, 1);
    for (int i = 0; i < RANKS; i++)
        if (job_wait_rank(&j, i) != 0)
            job_finish(&j);
    job_clear(&j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_equal_names),
        cmocka_unit_test(test_other_operations),
        cmocka_unit_test(test_wrong_lists),
        cmocka_unit_test(test_reduce),
        cmocka_unit_test(test_bitwise),
        cmocka_unit_test(test_reduce_scatter),
        cmocka_unit_test(test_exchange),
        cmocka_unit_test(test_crowded),
        cmocka_unit_test(test_services_die),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
