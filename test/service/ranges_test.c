/* ranges_test.c - tally_push_pullv(): ranges of a buffer have the bits that a push_pull of the whole buffer gives them, and
 * nothing else of the buffer is touched, whatever the layout; ranks that mean other ranges hear of it. */
#include <errno.h>
#include <setjmp.h>
#include <string.h>

#include "job.h"

#include <cmocka.h>

enum { COUNT = 200000, MOST_RANGES = 500, LISTS = 8 };

struct board {
    atomic_int stage;
    bool private_only; /* no rank may reach into another's memory */
};

/* One of the lists of ranges that all ranks mean, of elements of so many bytes.  Returns how many ranges it has. */
static size_t list_of(int which, size_t element, struct tally_range *out)
{
    uint64_t random = 7 + (uint64_t)which, unit = 64 / element, at = 0;
    size_t n = 0;
    if (which == 0) /* none */
        return 0;
    if (which == 1) { /* all */
        out[0] = (struct tally_range){0, COUNT};
        return 1;
    }
    if (which == 2) { /* the last element */
        out[0] = (struct tally_range){(COUNT - 1) / unit * unit, COUNT - (COUNT - 1) / unit * unit};
        return 1;
    }
    uint64_t most = which == 3 ? unit : which == 4 ? 100 * unit : 3000 * unit; /* elements of a range */
    bool gaps = which != 5;
    while (n < MOST_RANGES) {
        uint64_t begin = (at + unit - 1) / unit * unit + (gaps ? job_random(&random) % 4 * unit : 0);
        uint64_t count = gaps ? 1 + job_random(&random) % most : most;
        if (begin + count > COUNT)
            break;
        out[n++] = (struct tally_range){begin, count};
        at = begin + count;
    }
    return n;
}

static bool listed(const struct tally_range *list, size_t n, uint64_t i)
{
    for (size_t k = 0; k < n; k++)
        if (i >= list[k].begin && i < list[k].begin + list[k].count)
            return true;
    return false;
}

static void fill(void *buffer, enum tally_dtype dtype, int rank, uint64_t seed)
{
    uint64_t random = seed * 64 + (uint64_t)rank + 1;
    for (size_t i = 0; i < COUNT; i++)
        if (dtype == TALLY_FLOAT32)
            ((float *)buffer)[i] = (float)((double)job_random(&random) / 1e18 - 9);
        else
            ((int64_t *)buffer)[i] = (int64_t)(job_random(&random) % 1000003);
}

/* The dense sum and that of ranges, side by side under names of their own. */
static void compare(tally_comm *c, int rank, int which, enum tally_dtype dtype, bool in_place,
                    uint8_t *memory)
{
    enum tally_reduction reduction = which % 2 && dtype == TALLY_FLOAT32 ? TALLY_AVERAGE : TALLY_SUM;
    size_t element = tally_dtype_size(dtype), bytes = COUNT * element;
    uint8_t *input = memory, *output = in_place ? input : memory + bytes, *dense = memory + 2 * bytes;
    uint8_t *before = memory + 3 * bytes;
    struct tally_range list[MOST_RANGES];
    size_t n = list_of(which, element, list);
    tally_op *one, *other;
    fill(input, dtype, rank, (uint64_t)which);
    if (!in_place)
        memset(output, 0x5a, bytes);
    memcpy(before, output, bytes);
    CHECK(tally_push_pull(c, "dense", input, dense, COUNT, dtype, reduction, NULL, &one) == 0);
    job_expect(one, 0); /* what follows may write into its input */
    CHECK(tally_push_pullv(c, "ranges", input, output, list, n, dtype, reduction, NULL, &other) == 0);
    memset(list, 0xff, sizeof list); /* the call has its own copy */
    job_expect(other, 0);
    n = list_of(which, element, list);
    for (size_t i = 0, k = 0; i < COUNT; i++) {
        while (k < n && i >= list[k].begin + list[k].count)
            k++;
        bool in = k < n && i >= list[k].begin;
        CHECK(memcmp(output + i * element, (in ? dense : before) + i * element, element) == 0);
    }
}

static int all_lists(int rank, void *arg)
{
    struct board *b = arg;
    if (b->private_only)
        job_forbid_reaching();
    tally_comm *c = job_open();
    void *pool = NULL, *heap = malloc(4 * COUNT * sizeof(int64_t));
    CHECK(heap && tally_alloc(c, 4 * COUNT * sizeof(int64_t), &pool) == 0);
    for (int which = 0; which < LISTS; which++)
        for (int how = 0; how < 4; how++)
            compare(c, rank, which, how % 2 ? TALLY_INT64 : TALLY_FLOAT32, how < 2,
                    (which + how) % 3 ? heap : pool);
    free(heap);
    CHECK(tally_free(pool) == 0);
    job_leave(c);
    return 0;
}

static void run_layout(const char *layout, int tallyds, const char *setting, bool private_only)
{
    struct board *b = job_shared(sizeof *b);
    b->private_only = private_only;
    int machine[JOB_MOST_RANKS];
    job_run(&(struct job){.ranks = job_layout(layout, machine),
                          .tallyds = tallyds,
                          .machine = machine,
                          .main = all_lists,
                          .arg = b,
                          .settings = {"TALLY_PART_BYTES=16K", setting}});
}

static void test_bits(void **state)
{
    run_layout("ab", 0, NULL, false);
    run_layout("abc", 1, NULL, false);
    run_layout("abcd", 2, "TALLY_CHECKSUM=1", false);
    run_layout("aaa", 0, NULL, false);
    run_layout("a", 0, NULL, false);
}

static void test_bits_of_teams(void **state)
{
    run_layout("aabb", 0, NULL, false);
    run_layout("aabb", 1, NULL, true);
    run_layout("aab", 1, "TALLY_LOCAL=off", false);
}

/* --- the same name, again and again -------------------------------------------------------------- */

/* Other ranges in each round, as where the largest chunks change. */
static int rounds(int rank, void *arg)
{
    struct board *b = arg;
    static float x[COUNT], sum[COUNT];
    tally_comm *c = job_open();
    struct tally_range list[MOST_RANGES];
    int ranks = tally_comm_size(c);
    for (int round = 0; round < 40; round++) {
        size_t n = list_of(3 + round % 5, sizeof *x, list);
        tally_op *op;
        for (size_t i = 0; i < COUNT; i++)
            x[i] = (float)(rank + round % 3), sum[i] = -1;
        CHECK(tally_push_pullv(c, "w", x, sum, list, n, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
        job_expect(op, 0);
        for (size_t i = 0; i < COUNT; i += 97)
            CHECK(sum[i] ==
                  (listed(list, n, i) ? (float)(ranks * (ranks - 1) / 2 + ranks * (round % 3)) : -1));
        atomic_fetch_add(&b->stage, 1);
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_tallyd_killed(void **state)
{
    static const int pairs[] = {0, 0, 1, 1};
    for (int i = 0; i < 2; i++) {
        struct board *b = job_shared(sizeof *b);
        struct job j = {.ranks = 4,
                        .tallyds = 2,
                        .machine = i ? pairs : NULL,
                        .main = rounds,
                        .arg = b,
                        .settings = {"TALLY_PART_BYTES=16K"}};
        job_kill_tallyd(&j, &b->stage, 30);
    }
}

/* --- ranks disagree, join, refuse ---------------------------------------------------------------- */

static int disagree(int rank, void *arg)
{
    static float x[COUNT];
    tally_comm *c = job_open();
    struct tally_range list[6] = {{0, 64}, {128, 64}, {256, 64}, {384, 64}, {512, 64}, {640, 64}};
    tally_op *op;
    for (int i = 0; i < 3; i++) { /* one range; a few; more than are told */
        size_t n = i == 0 ? 1 : i == 1 ? 3 : 6;
        if (rank == 1)
            list[n - 1].begin += 16;
        CHECK(tally_push_pullv(c, "w", x, x, list, n, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
        CHECK(tally_op_wait(op, -1) == -EINVAL);
        const char *error = tally_op_error(op);
        CHECK_HOLDS(error, "'w': the ranks disagree: ");
        if (i == 0) {
            CHECK_HOLDS(error, "of elements 0-63");
            CHECK_HOLDS(error, "16-79 on rank 1");
        } else if (i == 1) {
            CHECK_HOLDS(error, "0-63, 128-191, 256-319");
            CHECK_HOLDS(error, "272-335 on rank 1");
        } else {
            CHECK_HOLDS(error, "(6 ranges, digest ");
        }
        tally_op_free(op);
        if (rank == 1)
            list[n - 1].begin -= 16;
    }
    CHECK(tally_push_pullv(c, "w", x, x, list, rank == 1 ? 2 : 3, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
    CHECK(tally_op_wait(op, -1) == -EINVAL);
    CHECK_HOLDS(tally_op_error(op), "[192]");
    CHECK_HOLDS(tally_op_error(op), "[128]");
    tally_op_free(op);
    if (rank == 1)
        CHECK(tally_refuse(c, "w", TALLY_PUSH_PULLV, NULL, "no such buffer") == 0);
    else
        CHECK(tally_push_pullv(c, "w", x, x, list, 3, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
    if (rank != 1) {
        CHECK(tally_op_wait(op, -1) == -EINVAL);
        CHECK_HOLDS(tally_op_error(op), "no such buffer");
        tally_op_free(op);
    }
    CHECK(tally_push_pullv(c, "w", x, x, list, 3, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
    job_expect(op, 0);
    job_leave(c);
    return 0;
}

static void test_disagreement(void **state)
{
    static const int one[] = {0, 0, 0}, two[] = {0, 0, 1};
    const int *machines[] = {NULL, one, two};
    for (int i = 0; i < 3; i++)
        job_run(&(struct job){.ranks = 3, .machine = machines[i], .main = disagree});
}

/* Rank 1 has joined.  Services have zeros for it; in a team it would have to know the ranges. */
static int joins(int rank, void *arg)
{
    static float x[COUNT];
    const bool *teams = arg;
    tally_comm *c = job_open();
    const struct tally_range list[] = {{64, 30000}, {60032, 5000}};
    tally_op *op;
    for (int i = 0; i < COUNT; i++)
        x[i] = (float)(1 + rank);
    for (int i = 0; i < 2 && rank != 1; i++) {
        CHECK(tally_push_pullv(c, i ? "v" : "w", x, x, list, 2, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
        if (*teams) {
            CHECK(tally_op_wait(op, -1) == -ECANCELED);
            CHECK_HOLDS(tally_op_error(op),
                        "rank 1 has cancelled it: it has joined, and nothing can stand for it");
            tally_op_free(op);
            continue;
        }
        job_expect(op, 0);
        CHECK(x[63] == (float)(1 + rank) && x[60032 + 5000] == (float)(1 + rank));
        CHECK(x[64] == (i ? 24.0f : 8.0f) && x[60032 + 4999] == (i ? 24.0f : 8.0f));
    }
    CHECK(tally_join(c, NULL, &op) == 0);
    job_expect(op, 0);
    CHECK(tally_push_pullv(c, "w", x, x, list, 2, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
    job_expect(op, 0);
    job_leave(c);
    return 0;
}

static void test_joined(void **state)
{
    static const int pairs[] = {0, 0, 1, 1}, one[] = {0, 0, 0, 0};
    static bool no = false, yes = true;
    job_run(&(struct job){.ranks = 4, .main = joins, .arg = &no});
    job_run(&(struct job){.ranks = 4, .machine = one, .main = joins, .arg = &no});
    job_run(&(struct job){.ranks = 4, .machine = pairs, .main = joins, .arg = &yes});
}

/* --- bad input ----------------------------------------------------------------------------------- */

static void refused(tally_comm *c, const struct tally_range *list, size_t n, const char *why)
{
    static double x[1000];
    tally_op *op = NULL;
    CHECK(tally_push_pullv(c, "w", x, x, list, n, TALLY_FLOAT64, TALLY_SUM, NULL, &op) == -EINVAL);
    CHECK_HOLDS(tally_error(), why);
    CHECK(!op);
}

static int bad_input(int rank, void *arg)
{
    static double x[1000];
    tally_comm *c = job_open();
    tally_op *op;
    refused(c, NULL, 2, "ranges is NULL and range_count is 2");
    refused(c, (struct tally_range[]){{0, 8}, {8, 0}}, 2, "range 1 has no elements");
    refused(c, (struct tally_range[]){{0, 8}, {9, 8}}, 2,
            "range 1 begins at element 9 of 8 bytes: pass a multiple of 64");
    refused(c, (struct tally_range[]){{16, 8}, {0, 8}}, 2,
            "range 1 begins at element 0, before range 0 ends, at 24");
    refused(c, (struct tally_range[]){{0, 9}, {8, 8}}, 2,
            "range 1 begins at element 8, before range 0 ends, at 9");
    refused(c, (struct tally_range[]){{0, UINT64_MAX}}, 1, "range 0 ends behind element");
    refused(c, (struct tally_range[]){{UINT64_MAX / 64 * 64, 8}}, 1, "range 0 ends behind element");
    const struct tally_range one = {0, 8};
    CHECK(tally_push_pullv(c, "w", NULL, x, &one, 1, TALLY_FLOAT64, TALLY_SUM, NULL, &op) == -EINVAL);
    CHECK_HOLDS(tally_error(), "a NULL pointer for 8 elements");
    CHECK(tally_push_pullv(c, "w", x, x, &one, 1, (enum tally_dtype)99, TALLY_SUM, NULL, &op) == -EINVAL);
    CHECK(tally_push_pullv(c, "w", x, x, &one, 1, TALLY_FLOAT64, (enum tally_reduction)99, NULL, &op) ==
          -EINVAL);
    CHECK(tally_push_pullv(c, NULL, x, x, &one, 1, TALLY_FLOAT64, TALLY_BXOR, NULL, &op) == -EINVAL);
    CHECK_HOLDS(tally_error(), "push_pullv no. 1");
    CHECK(tally_push_pullv(c, "w", NULL, NULL, NULL, 0, TALLY_FLOAT64, TALLY_SUM, NULL, &op) == 0);
    job_expect(op, 0);
    for (int i = 0; i < 3; i++) { /* without a name, also in a space of order */
        struct tally_options o = {.size = sizeof o, .space = i ? TALLY_SPACE_ORDERED : 0};
        CHECK(tally_push_pullv(c, NULL, x, x, &one, 1, TALLY_FLOAT64, TALLY_SUM, &o, &op) == 0);
        job_expect(op, 0);
    }
    job_leave(c);
    return 0;
}

static void test_bad_input(void **state)
{
    job_run(&(struct job){.ranks = 2, .main = bad_input});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits),          cmocka_unit_test(test_bits_of_teams),
        cmocka_unit_test(test_tallyd_killed), cmocka_unit_test(test_disagreement),
        cmocka_unit_test(test_joined),        cmocka_unit_test(test_bad_input),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
