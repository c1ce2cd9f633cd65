/* teams_test.c - several machines with several ranks on each: whatever the layout, the bits are those of ranks that push
 * for themselves, each machine pushes once, and whoever dies, leaves or disagrees is named as ever. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>

#include "job.h"

#include <cmocka.h>

enum { COUNT = 200000, OPS = 48, MOST_COUNT = 300000, RUNS = 6 };

struct board {
    atomic_int stage;
    int run;
    bool private_only; /* no rank may reach into another's memory */
    int kill_at;       /* stage at which a tallyd is killed; 0: none */
    uint64_t hash[RUNS][OPS];
};

static const char once[] = "pushed once a machine";

/* --- the bits ------------------------------------------------------------------------------------ */

/* Operation i of all_kinds(). */
struct kind {
    int dtype, reduction;
    size_t count, bytes;
    struct tally_options options;
};

static struct kind kind_of(int i)
{
    static const size_t counts[] = {1000, 4097, 16384, 70001, 123456, MOST_COUNT, 9000, 65536};
    struct kind k = {.dtype = i % 15,
                     .reduction = (i * 7 + i / 15) % 8,
                     .count = counts[(i * 5 + i / 8) % 8]};
    k.reduction = job_reduction(k.dtype, k.reduction);
    k.bytes = k.count * tally_dtype_size((enum tally_dtype)k.dtype);
    k.options = (struct tally_options){.size = sizeof k.options, .priority = i % 3};
    if (k.dtype != TALLY_BOOL && k.reduction < TALLY_BAND) {
        k.options.prescale = i % 4 ? 0 : 0.5;
        k.options.postscale = i % 3 ? 0 : 3;
    }
    return k;
}

/* Four at a time, of all types and reductions, in the pool and not, in place and not. */
static int all_kinds(int rank, void *arg)
{
    struct board *b = arg;
    if (b->private_only)
        job_forbid_reaching();
    tally_comm *c = job_open();
    uint64_t seed = 77 + (uint64_t)rank;
    for (int from = 0; from < OPS; from += 4) {
        void *in[4], *out[4];
        tally_op *op[4];
        for (int n = 0; n < 4; n++) {
            int i = from + n;
            struct kind k = kind_of(i);
            bool in_pool = (i + rank) % 3 == 0, in_place = i % 5 < 2;
            in[n] = job_memory(c, k.bytes, in_pool);
            out[n] = in_place ? in[n] : job_memory(c, k.bytes, false);
            for (size_t at = 0; at < k.bytes; at += 8) {
                uint64_t x = job_random(&seed);
                memcpy((uint8_t *)in[n] + at, &x, k.bytes - at < 8 ? k.bytes - at : 8);
            }
            char name[16];
            snprintf(name, sizeof name, "t%d", i);
            CHECK(tally_push_pull(c, i % 6 ? name : NULL, in[n], out[n], k.count, (enum tally_dtype)k.dtype,
                                  (enum tally_reduction)k.reduction, &k.options, &op[n]) == 0);
        }
        for (int n = 0; n < 4; n++) {
            int i = from + n;
            struct kind k = kind_of(i);
            job_expect(op[n], 0);
            uint64_t h = job_hash(out[n], k.bytes), all = h, least = h;
            CHECK(tally_push_pull(c, "most", &h, &all, 1, TALLY_INT64, TALLY_MAX, NULL, &op[n]) == 0);
            job_expect(op[n], 0);
            CHECK(tally_push_pull(c, "least", &h, &least, 1, TALLY_INT64, TALLY_MIN, NULL, &op[n]) == 0);
            job_expect(op[n], 0);
            CHECK(all == least); /* all had the same */
            if (rank == 0)
                b->hash[b->run][i] = h;
            if (out[n] != in[n])
                job_give_back(out[n], false);
            job_give_back(in[n], (i + rank) % 3 == 0);
        }
        atomic_fetch_add(&b->stage, 1);
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void run_layout(struct board *b, const char *layout, int tallyds, const char *setting, bool teams)
{
    int machine[JOB_MOST_RANKS];
    struct job j = {.ranks = job_layout(layout, machine),
                    .tallyds = tallyds,
                    .machine = machine,
                    .main = all_kinds,
                    .arg = b,
                    .settings = {setting, "TALLY_PART_BYTES=16K"}};
    job_start(&j);
    if (b->kill_at) {
        job_await(&b->stage, b->kill_at);
        kill(j.tallyd_pid[0], SIGKILL);
        for (int rank = 0; rank < j.ranks; rank++)
            assert_int_equal(job_wait_rank(&j, rank), 0);
    } else {
        job_finish(&j);
    }
    if (teams)
        job_log_holds(&j, 0, once);
    else
        job_log_lacks(&j, 0, once);
    job_clear(&j);
}

static void compare(const struct board *b, int one, int other, bool sixteen, const char *what)
{
    for (int i = 0; i < OPS; i++) {
        int dtype = kind_of(i).dtype;
        if ((sixteen || (dtype != TALLY_FLOAT16 && dtype != TALLY_BFLOAT16)) &&
            b->hash[one][i] != b->hash[other][i])
            fail_msg("%s: operation %d (dtype %d, reduction %d) has other bits", what, i, dtype,
                     kind_of(i).reduction);
    }
}

/* Floats of 16 bits are rounded once more on each machine. */
static void test_layouts(void **state)
{
    static const char *const layouts[RUNS] = {"abcdefgh", "aaaaaaaa", "aabbccdd",
                                              "aaaabbbb", "aaaabbcc", "aabcdddd"};
    struct board *b = job_shared(sizeof *b);
    for (b->run = 0; b->run < RUNS; b->run++) {
        run_layout(b, layouts[b->run], 0, "TALLY_LOCAL=on", b->run > 1);
        compare(b, b->run, 0, false, layouts[b->run]);
    }
}

static void compare_with_each_for_itself(const char *layout, int tallyds)
{
    struct board *b = job_shared(sizeof *b);
    run_layout(b, layout, tallyds, "TALLY_LOCAL=on", true);
    b->run = 1;
    run_layout(b, layout, tallyds, "TALLY_LOCAL=off", false);
    compare(b, 0, 1, true, layout);
}

static void test_as_each_for_itself(void **state)
{
    static const struct {
        const char *layout;
        int tallyds;
    } cases[] = {{"aabb", 1}, {"aaabbb", 0},   {"abab", 0},     {"aabbc", 2}, {"abb", 0},
                 {"aaab", 0}, {"aaaabbcc", 0}, {"aaaabbcd", 1}, {"aabc", 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        compare_with_each_for_itself(cases[i].layout, cases[i].tallyds);
}

static void test_random_layouts(void **state)
{
    uint64_t seed = 20;
    for (int i = 0; i < (UNDER_SANITIZER ? 2 : 4); i++) {
        char layout[9] = "a";
        int ranks = 3 + (int)(job_random(&seed) % 6);
        bool apart = job_random(&seed) % 2; /* a machine's ranks need not be neighbours */
        for (int rank = 1, machines = 1; rank < ranks; rank++) {
            bool fresh = rank == ranks / 2 || (machines < ranks - 2 && job_random(&seed) % 3 == 0);
            uint64_t known = apart ? job_random(&seed) % (uint64_t)machines : (uint64_t)machines - 1;
            layout[rank] = (char)('a' + (fresh ? (uint64_t)machines++ : known));
        }
        compare_with_each_for_itself(layout, (int)(job_random(&seed) % 2));
    }
}

/* What it had of the sums is made again, along the same tree. */
static void test_bits_after_a_tallyd_died(void **state)
{
    struct board *b = job_shared(sizeof *b);
    run_layout(b, "aaaabbcc", 2, "TALLY_LOCAL=off", false);
    b->run = 1;
    b->stage = 0;
    b->kill_at = 30;
    run_layout(b, "aaaabbcc", 2, "TALLY_LOCAL=on", true);
    compare(b, 0, 1, true, "a tallyd died");
}

static float number(int rank, int i)
{
    uint64_t seed = (uint64_t)rank * 1000003 + (uint64_t)i + 1;
    return (float)((double)(job_random(&seed) >> 40) / 0x1p20 - 8);
}

/* A group of the very ranks that carry a part for their machines adds along its own tree. */
static int group_of_carriers(int rank, void *arg)
{
    static const int carriers[] = {0, 4, 6};
    bool inside = rank == 0 || rank == 4 || rank == 6;
    static float x[COUNT], all[COUNT], some[COUNT];
    tally_comm *c = job_open();
    tally_group *g = NULL;
    tally_op *op[2];
    for (int i = 0; i < COUNT; i++)
        x[i] = number(rank, i);
    if (inside)
        CHECK(tally_group_create(c, "carriers", carriers, 3, &g) == 0);
    for (int step = 0; step < 3; step++) {
        struct tally_options o = {.size = sizeof o, .group = g};
        CHECK(tally_push_pull(c, "all", x, all, COUNT, TALLY_FLOAT32, TALLY_SUM, NULL, &op[0]) == 0);
        if (inside)
            CHECK(tally_push_pull(c, "some", x, some, COUNT, TALLY_FLOAT32, TALLY_SUM, &o, &op[1]) == 0);
        job_expect(op[0], 0);
        if (inside)
            job_expect(op[1], 0);
        for (int i = 0; i < COUNT; i++) {
            float v[8];
            for (int r = 0; r < 8; r++)
                v[r] = number(r, i);
            CHECK(all[i] == ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7])));
            CHECK(!inside || some[i] == (v[0] + v[4]) + v[6]);
        }
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

/* A group of all ranks in another order, whose machines are nodes of its own tree. */
static int all_in_another_order(int rank, void *arg)
{
    static const int order[] = {0, 3, 4, 5, 1, 2, 6, 7};
    static float x[COUNT], all[COUNT], some[COUNT];
    tally_comm *c = job_open();
    tally_group *g;
    tally_op *op[2];
    for (int i = 0; i < COUNT; i++)
        x[i] = number(rank, i);
    CHECK(tally_group_create(c, "sorted", order, 8, &g) == 0);
    struct tally_options o = {.size = sizeof o, .group = g};
    CHECK(tally_push_pull(c, "all", x, all, COUNT, TALLY_FLOAT32, TALLY_SUM, NULL, &op[0]) == 0);
    CHECK(tally_push_pull(c, "some", x, some, COUNT, TALLY_FLOAT32, TALLY_SUM, &o, &op[1]) == 0);
    job_expect(op[0], 0);
    job_expect(op[1], 0);
    for (int i = 0; i < COUNT; i++) {
        float v[8];
        for (int r = 0; r < 8; r++)
            v[r] = number(order[r], i);
        float a = (v[0] + v[1]) + (v[2] + v[3]), b = v[4] + v[5], e = v[6] + v[7];
        CHECK(all[i] == (a + b) + e);
        CHECK(some[i] == a + (b + e));
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_all_in_another_order(void **state)
{
    static const int machine[] = {0, 1, 1, 0, 0, 0, 2, 2};
    struct job j = {.ranks = 8, .machine = machine, .main = all_in_another_order};
    job_start(&j);
    job_finish(&j);
    job_log_holds(&j, 0, once);
    job_clear(&j);
}

static void test_group_of_carriers(void **state)
{
    static const int machine[] = {0, 0, 0, 0, 1, 1, 2, 2};
    for (int tallyds = 0; tallyds < 2; tallyds++) {
        struct job j = {.ranks = 8,
                        .tallyds = tallyds,
                        .machine = machine,
                        .main = group_of_carriers,
                        .settings = {"TALLY_PART_BYTES=64K"}};
        job_start(&j);
        job_finish(&j);
        job_log_holds(&j, 0, once);
        job_clear(&j);
    }
}

static void test_memory_out_of_reach(void **state)
{
    struct board *b = job_shared(sizeof *b);
    run_layout(b, "aabb", 1, "TALLY_LOCAL=off", false);
    b->run = 1;
    b->private_only = true;
    run_layout(b, "aabb", 1, "TALLY_LOCAL=on", true);
    compare(b, 0, 1, true, "staged");
}

/* --- what goes wrong ----------------------------------------------------------------------------- */

static const int pairs[] = {0, 0, 1, 1};
static const int uneven[] = {0, 0, 1, 2}; /* 0 + (1 + 2) along the tree over ranks */

/* One rank means something else: on every machine the others hear of it, and go on. */
static int disagree(int rank, void *arg)
{
    static float x[COUNT];
    static const char *const others[] = {" on ranks 1-3", "] sum on ranks 0, 2-3, [",
                                         "] sum on ranks 0-1, 3, [", "] sum on ranks 0-2, ["};
    tally_comm *c = job_open();
    tally_op *op;
    for (int odd = 0; odd < 4; odd++) {
        char text[60];
        CHECK(tally_push_pull(c, "w", x, x, rank == odd ? COUNT - 1 : COUNT, TALLY_FLOAT32, TALLY_SUM, NULL,
                              &op) == 0);
        CHECK(tally_op_wait(op, -1) == -EINVAL);
        snprintf(text, sizeof text, "] %son rank %d", odd ? "" : "sum ", odd); /* the first says all */
        CHECK_HOLDS(tally_op_error(op), text);
        CHECK_HOLDS(tally_op_error(op), others[odd]);
        tally_op_free(op);
        /* Of a size at which it pushes for itself: its neighbours wait for a post that never comes. */
        CHECK(tally_push_pull(c, "w", x, x, rank == odd ? 4095 : 4096, TALLY_FLOAT32, TALLY_SUM, NULL, &op) ==
              0);
        CHECK(tally_op_wait(op, -1) == -EINVAL);
        CHECK_HOLDS(tally_op_error(op), text);
        CHECK_HOLDS(tally_op_error(op), others[odd]);
        tally_op_free(op);
        /* Of two machines: all ranks of one. */
        CHECK(tally_push_pull(c, "w", x, x, COUNT, rank < 2 ? TALLY_FLOAT32 : TALLY_INT32, TALLY_SUM, NULL,
                              &op) == 0);
        CHECK(tally_op_wait(op, -1) == -EINVAL);
        CHECK_HOLDS(tally_op_error(op), "'w': the ranks disagree: tally_push_pull float32 [");
        CHECK_HOLDS(tally_op_error(op), "] sum on ranks 0-1, int32 on ranks 2-3");
        tally_op_free(op);
        if (rank == odd) {
            CHECK(tally_refuse(c, "w", TALLY_PUSH_PULL, 0, "no gradient") == 0);
        } else {
            CHECK(tally_push_pull(c, "w", x, x, COUNT, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
            CHECK(tally_op_wait(op, -1) == -EINVAL);
            snprintf(text, sizeof text, "rank %d refuses: no gradient", odd);
            CHECK_HOLDS(tally_op_error(op), text);
            tally_op_free(op);
        }
        for (int i = 0; i < COUNT; i++)
            x[i] = (float)(i % 100 + rank);
        CHECK(tally_push_pull(c, "w", x, x, COUNT, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
        job_expect(op, 0);
        for (int i = 0; i < COUNT; i++)
            CHECK(x[i] == (float)(4 * (i % 100) + 6));
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_disagreement(void **state)
{
    for (int tallyds = 0; tallyds < 2; tallyds++) {
        struct job j = {.ranks = 4, .tallyds = tallyds, .machine = pairs, .main = disagree};
        job_start(&j);
        job_finish(&j);
        job_clear(&j);
    }
}

/* Many at once, each rank in an order of its own, of sizes that go both ways. */
static int many(int rank, void *arg)
{
    enum { MANY = 200, LARGEST = 40000 };
    static float *x[MANY];
    static tally_op *op[MANY];
    static int order[MANY];
    tally_comm *c = job_open();
    uint64_t s = (uint64_t)rank;
    for (int i = 0; i < MANY; i++) {
        order[i] = i;
        CHECK((x[i] = malloc(LARGEST * sizeof(float))));
    }
    for (int turn = 0; turn < 4; turn++) {
        for (int i = MANY - 1; i > 0; i--) {
            int k = (int)(job_random(&s) % (unsigned)(i + 1)), t = order[i];
            order[i] = order[k];
            order[k] = t;
        }
        for (int at = 0; at < MANY; at++) {
            int i = order[at], count = (i * 7919) % LARGEST;
            struct tally_options o = {.size = sizeof o, .priority = i % 5};
            char name[16];
            snprintf(name, sizeof name, "%d", i);
            for (int k = 0; k < count; k++)
                x[i][k] = (float)(i + rank + k % 7);
            CHECK(tally_push_pull(c, name, x[i], x[i], (size_t)count, TALLY_FLOAT32, TALLY_SUM, &o, &op[i]) ==
                  0);
        }
        for (int i = 0; i < MANY; i++) {
            job_expect(op[i], 0);
            for (int k = 0; k < (i * 7919) % LARGEST; k++)
                CHECK(x[i][k] == (float)(4 * (i + k % 7) + 6));
        }
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_many_at_once(void **state)
{
    struct job j = {.ranks = 4, .tallyds = 1, .machine = pairs, .main = many};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

/* So many that neither machine's ranks come to those which the other's have begun with before any of them is at its end:
 * an engine with room for a few thousand would wait for ever. */
static int opposite(int rank, void *arg)
{
    enum { MANY = 9000, LENGTH = 4096 };
    static tally_op *op[MANY];
    static float one[LENGTH];
    float *x = calloc(MANY, sizeof one);
    tally_comm *c = job_open();
    CHECK(x);
    for (int i = 0; i < LENGTH; i++)
        one[i] = 1;
    for (int at = 0; at < MANY; at++) {
        int i = rank < 2 ? at : MANY - 1 - at;
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        CHECK(tally_push_pull(c, name, one, x + (size_t)i * LENGTH, LENGTH, TALLY_FLOAT32, TALLY_SUM, NULL,
                              &op[i]) == 0);
    }
    for (int i = 0; i < MANY; i++) {
        job_expect(op[i], 0);
        CHECK(x[(size_t)i * LENGTH] == 4 && x[(size_t)i * LENGTH + LENGTH - 1] == 4);
    }
    CHECK(tally_comm_close(c) == 0);
    free(x);
    return 0;
}

static void test_opposite_orders(void **state)
{
    if (UNDER_SANITIZER)
        skip();
    struct job j = {.ranks = 4, .machine = pairs, .main = opposite};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

/* One machine's ranks begin with a large tensor, the other's wait for small ones first: of the large one all windows that
 * need nothing from the other machine fill, and what is behind must be summed all the same. */
static int behind(int rank, void *arg)
{
    enum { FEW = 16, LENGTH = 4096, LARGE = 4 << 20 };
    static float x[LARGE], y[FEW][LENGTH];
    tally_op *large, *small[FEW];
    tally_comm *c = job_open();
    for (int i = 0; i < LARGE; i++)
        x[i] = 1;
    if (rank < 2)
        CHECK(tally_push_pull(c, "x", x, x, LARGE, TALLY_FLOAT32, TALLY_SUM, NULL, &large) == 0);
    for (int i = 0; i < FEW; i++) {
        char name[8];
        snprintf(name, sizeof name, "y%d", i);
        for (int k = 0; k < LENGTH; k++)
            y[i][k] = 1;
        CHECK(tally_push_pull(c, name, y[i], y[i], LENGTH, TALLY_FLOAT32, TALLY_SUM, NULL, &small[i]) == 0);
        if (rank >= 2)
            job_expect(small[i], 0);
    }
    if (rank >= 2)
        CHECK(tally_push_pull(c, "x", x, x, LARGE, TALLY_FLOAT32, TALLY_SUM, NULL, &large) == 0);
    for (int i = 0; i < FEW && rank < 2; i++)
        job_expect(small[i], 0);
    job_expect(large, 0);
    for (int i = 0; i < FEW; i++)
        CHECK(y[i][0] == 4 && y[i][LENGTH - 1] == 4);
    CHECK(x[0] == 4 && x[LARGE - 1] == 4);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_behind_a_full_window(void **state)
{
    struct job j = {.ranks = 4,
                    .machine = pairs,
                    .main = behind,
                    .settings = {"TALLY_PART_BYTES=128K", "TALLY_TIMEOUT=20"}};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

/* Sum until that fails, or until it is enough. */
static int until_failure(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    void *pool;
    float *mine = malloc(COUNT * sizeof *mine);
    tally_op *op;
    CHECK(tally_alloc(c, COUNT * sizeof(float), &pool) == 0);
    int err = 0;
    for (int i = 0; !err && i < b->run; i++) {
        float *x = i % 2 ? pool : mine;
        for (int k = 0; k < COUNT; k++)
            x[k] = (float)(rank + i % 10 + k % 7);
        err = tally_push_pull(c, "w", x, x, i % 3 ? COUNT : 10, TALLY_FLOAT32, TALLY_SUM, NULL, &op);
        if (!err) {
            err = tally_op_wait(op, -1);
            tally_op_free(op);
        }
        for (int k = 0; !err && k < (i % 3 ? COUNT : 10); k++)
            CHECK(x[k] == (float)(4 * (i % 10 + k % 7) + 6));
        atomic_fetch_add(&b->stage, 1);
    }
    if (err) {
        CHECK(err == -ECONNRESET);
        CHECK_HOLDS(tally_error(), "rank 1 on");
        memset(mine, 0, COUNT * sizeof *mine); /* ours again */
        memset(pool, 0, COUNT * sizeof *mine);
    }
    CHECK(tally_comm_close(c) == 0);
    for (int i = 0; err && i < COUNT; i++)
        CHECK(mine[i] == 0 && ((float *)pool)[i] == 0);
    CHECK(tally_free(pool) == 0);
    free(mine);
    return 0;
}

static void test_rank_killed(void **state)
{
    for (int i = 0; i < (UNDER_SANITIZER ? 3 : 6); i++) {
        struct board *b = job_shared(sizeof *b);
        b->run = INT32_MAX;
        struct job j = {.ranks = 4,
                        .tallyds = i % 2,
                        .machine = i / 2 % 2 ? uneven : pairs,
                        .main = until_failure,
                        .arg = b};
        job_kill_rank(&j, 1, &b->stage, 10 + 7 * i);
    }
}

/* Also in the middle of what it does with its neighbours' memory: these do not wait until it goes on. */
static void test_rank_stopped(void **state)
{
    for (int i = 0; i < (UNDER_SANITIZER ? 1 : 2); i++) {
        struct board *b = job_shared(sizeof *b);
        b->run = INT32_MAX;
        struct job j = {.ranks = 4,
                        .machine = pairs,
                        .main = until_failure,
                        .arg = b,
                        .settings = {"TALLY_DEAD_TIMEOUT=2"}};
        job_start(&j);
        job_await(&b->stage, 10 + 7 * i);
        kill(j.rank_pid[1], SIGSTOP);
        for (int rank = 0; rank < 4; rank++)
            if (rank != 1)
                assert_int_equal(job_wait_rank(&j, rank), 0);
        job_clear(&j);
    }
}

/* Pushes of teams are redone as those of ranks are. */
static void test_tallyd_killed(void **state)
{
    for (int i = 0; i < (UNDER_SANITIZER ? 2 : 4); i++) {
        struct board *b = job_shared(sizeof *b);
        b->run = 60;
        struct job j = {.ranks = 4,
                        .tallyds = 2,
                        .machine = i % 2 ? uneven : pairs,
                        .main = until_failure,
                        .arg = b,
                        .settings = {"TALLY_PART_BYTES=16K"}};
        job_kill_tallyd(&j, &b->stage, 40 + 9 * i);
    }
}

static int one_leaves(int rank, void *arg)
{
    static float x[COUNT];
    tally_op *op;
    tally_comm *c = job_open();
    CHECK(tally_push_pull(c, "w", x, x, COUNT, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
    job_expect(op, 0);
    for (int i = 0; i < 3 && rank != 1; i++) {
        CHECK(tally_push_pull(c, i ? "v" : "w", x, x, COUNT, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
        CHECK(tally_op_wait(op, -1) == -ESHUTDOWN);
        CHECK_HOLDS(tally_op_error(op), "rank 1 has left the job");
        tally_op_free(op);
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_rank_leaves(void **state)
{
    struct job j = {.ranks = 4, .machine = pairs, .main = one_leaves};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

/* Closing without waiting for what is under way. */
static int not_waited_for(int rank, void *arg)
{
    static float x[COUNT], y[COUNT];
    tally_comm *c = job_open();
    for (int i = 0; i < COUNT; i++)
        x[i] = (float)rank;
    CHECK(tally_push_pull(c, "x", x, y, COUNT, TALLY_FLOAT32, TALLY_SUM, NULL, NULL) == 0);
    CHECK(tally_comm_close(c) == 0);
    for (int i = 0; i < COUNT; i++)
        CHECK(y[i] == 6);
    return 0;
}

static void test_closed_at_once(void **state)
{
    struct job j = {.ranks = 4, .machine = pairs, .main = not_waited_for};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

static int is_late(int rank, void *arg)
{
    struct board *b = arg;
    static float x[COUNT];
    tally_comm *c = job_open();
    tally_op *op;
    if (rank == 3) {
        job_await(&b->stage, 1);
        while (tally_comm_status(c, NULL) == 0)
            job_sleep_ms(10);
    } else {
        CHECK(tally_push_pull(c, "w", x, x, COUNT, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
        atomic_fetch_add(&b->stage, 1);
        job_expect(op, -ETIME);
        CHECK_HOLDS(tally_error(), "for rank 3 (TALLY_TIMEOUT)");
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_late(void **state)
{
    struct job j = {.ranks = 4,
                    .machine = pairs,
                    .main = is_late,
                    .arg = job_shared(sizeof(struct board)),
                    .settings = {"TALLY_LATE_WARNING=0.5", "TALLY_TIMEOUT=3"}};
    job_start(&j);
    job_finish(&j);
    job_log_holds(&j, 0, "for rank 3");
    job_clear(&j);
}

/* A planned list of rising priorities.  In the first step each machine's second rank submits it from its end; or all submit
 * it in one order, but one of them refuses the last tensor once. */
enum { OPPOSITE, REFUSED, LISTS };

static int listed(int rank, void *arg)
{
    enum { LISTED = 6, EACH = 300000, STEPS = 3 };
    static const char *const names[LISTED] = {"a", "b", "c", "d", "e", "f"};
    static float x[LISTED][EACH];
    uint64_t bytes[LISTED];
    int how = *(int *)arg;
    tally_op *op[LISTED];
    tally_comm *c = job_open();
    for (int i = 0; i < LISTED; i++)
        bytes[i] = sizeof x[i];
    CHECK(tally_plan(c, 0, LISTED, names, bytes) == 0);
    for (int step = 0; step < STEPS; step++) {
        bool refused = how == REFUSED && step == 1;
        for (int at = 0; at < LISTED; at++) {
            int i = how == OPPOSITE && rank % 2 ? LISTED - 1 - at : at;
            struct tally_options o = {.size = sizeof o, .priority = i};
            for (int k = 0; k < EACH; k++)
                x[i][k] = (float)(i + rank + k % 7);
            op[i] = NULL;
            if (refused && rank == 1 && i == LISTED - 1)
                CHECK(tally_refuse(c, names[i], TALLY_PUSH_PULL, NULL, "no gradient") == 0);
            else
                CHECK(tally_push_pull(c, names[i], x[i], x[i], EACH, TALLY_FLOAT32, TALLY_SUM, &o, &op[i]) ==
                      0);
        }
        for (int i = 0; i < LISTED; i++) {
            bool failed = refused && i == LISTED - 1;
            if (op[i])
                job_expect(op[i], failed ? -EINVAL : 0);
            for (int k = 0; k < EACH && !failed; k++)
                CHECK(x[i][k] == (float)(4 * (i + k % 7) + 6));
        }
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_listed(void **state)
{
    for (int how = 0; how < LISTS; how++) {
        struct job j = {.ranks = 4,
                        .tallyds = 1,
                        .machine = pairs,
                        .main = listed,
                        .arg = &how,
                        .settings = {"TALLY_TIMEOUT=60", "TALLY_PART_BYTES=64K"}};
        job_start(&j);
        job_finish(&j);
        job_clear(&j);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layouts),
        cmocka_unit_test(test_as_each_for_itself),
        cmocka_unit_test(test_random_layouts),
        cmocka_unit_test(test_bits_after_a_tallyd_died),
        cmocka_unit_test(test_group_of_carriers),
        cmocka_unit_test(test_all_in_another_order),
        cmocka_unit_test(test_memory_out_of_reach),
        cmocka_unit_test(test_disagreement),
        cmocka_unit_test(test_many_at_once),
        cmocka_unit_test(test_opposite_orders),
        cmocka_unit_test(test_behind_a_full_window),
        cmocka_unit_test(test_rank_killed),
        cmocka_unit_test(test_rank_stopped),
        cmocka_unit_test(test_tallyd_killed),
        cmocka_unit_test(test_rank_leaves),
        cmocka_unit_test(test_closed_at_once),
        cmocka_unit_test(test_late),
        cmocka_unit_test(test_listed),
    };
    return cmocka_run_group_tests_name("teams", tests, NULL, NULL);
}
