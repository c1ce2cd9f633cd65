/* local_groups_test.c - groups whose ranks share one machine, in jobs of one machine and of several: they go through shared
 * memory, whatever other groups do, and the ranks that are not in them.  Bits: team_calls_test.c. */
#include <errno.h>
#include <setjmp.h>
#include <string.h>
#include <sys/mman.h>

#include "comm/comm.h"
#include "comm/op/group.h"
#include "comm/op/op.h"
#include "job.h"
#include "local/engine.h"
#include "membership/roster.h"

#include <cmocka.h>

enum { RANKS = 4, MOST = 70000 };

/* All ranks on one machine, alone and with a tallyd; three on the first, one on the second; the same the other way round. */
static const struct layout {
    int machine[RANKS], tallyds;
} layouts[] = {{{0}, 0}, {{0}, 1}, {{0, 0, 0, 1}, 0}, {{1, 0, 0, 0}, 0}};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

struct board {
    atomic_int open; /* ranks */
    atomic_int stage;
    int run;
};

/* The ranks that share a machine in each layout. */
static void three_of(const tally_comm *c, int rank[3])
{
    const struct tly_roster *r = &c->member.roster;
    int first = r->ranks[0].machine != r->ranks[1].machine;
    for (int i = 0; i < 3; i++)
        rank[i] = first + i;
}

static void run_with(const struct layout *layout, int (*main)(int rank, void *arg), const char *setting)
{
    job_run(&(struct job){.ranks = RANKS,
                          .tallyds = layout->tallyds,
                          .machine = layout->machine,
                          .main = main,
                          .arg = job_shared(sizeof(struct board)),
                          .settings = {"TALLY_TIMEOUT=30", setting}});
}

/* With TALLY_LOCAL=off all is as without shared memory. */
static void run_either_way(const struct layout *layout, int (*main)(int rank, void *arg))
{
    run_with(layout, main, NULL);
    run_with(layout, main, "TALLY_LOCAL=off");
}

static bool is_shared(const tally_op *op)
{
    return op->shared.engine && !atomic_load(&op->shared.op.diverted);
}

static tally_op *begin_sum(tally_comm *c, tally_group *g, const char *name, float *x, float *y, size_t count)
{
    struct tally_options o = job_in(g);
    tally_op *op;
    CHECK(tally_push_pull(c, name, x, y, count, TALLY_FLOAT32, TALLY_SUM, &o, &op) == 0);
    return op;
}

static void expect_shared(tally_op *op)
{
    CHECK(tally_op_wait(op, -1) == 0 && is_shared(op) == (op->comm->local != NULL));
    tally_op_free(op);
}

/* From here on all its ranks know that they mean the same list. */
static tally_group *make_group(tally_comm *c, const char *name, const int ranks[], size_t count)
{
    tally_group *g;
    float x = 1;
    CHECK(tally_group_create(c, name, ranks, count, &g) == 0);
    job_expect(begin_sum(c, g, "first", &x, &x, 1), 0);
    CHECK(x == (float)count);
    return g;
}

/* --- orders --------------------------------------------------------------------------------------- */

/* All pairs of three ranks, and the three backwards: each rank begins what it takes part in in an order of its own. */
static int opposite(int rank, void *arg)
{
    enum { GROUPS = 4, EACH = 8, OPS = GROUPS * EACH };
    static float x[OPS][MOST], y[OPS][MOST];
    static const size_t counts[] = {1, 900, 5000, MOST};
    tally_comm *c = job_open();
    int three[3];
    three_of(c, three);
    const int members[GROUPS][3] = {
        {three[0], three[1]}, {three[2], three[1]}, {three[0], three[2]}, {three[2], three[1], three[0]}};
    tally_group *group[GROUPS] = {0};
    for (int g = 0; g < GROUPS; g++) {
        char name[8];
        snprintf(name, sizeof name, "g%d", g);
        for (int i = 0; i < 2 + (g == GROUPS - 1); i++)
            if (members[g][i] == rank)
                group[g] = make_group(c, name, members[g], g == GROUPS - 1 ? 3 : 2);
    }
    for (int turn = 0; turn < (UNDER_SANITIZER ? 2 : 5) && group[GROUPS - 1]; turn++) {
        tally_op *op[OPS] = {0};
        for (int n = 0; n < OPS; n++) {
            int i = (n * (rank % 2 ? 7 : 11) + rank * 5 + turn) % OPS, g = i % GROUPS;
            size_t count = counts[(i / GROUPS + turn) % 4];
            char name[8];
            if (!group[g])
                continue;
            snprintf(name, sizeof name, "%d", i);
            for (size_t k = 0; k < count; k++)
                x[i][k] = (float)(rank + i) + (float)(k % 7);
            op[i] = begin_sum(c, group[g], name, x[i], y[i], count);
        }
        for (int i = 0; i < OPS; i++) {
            int g = i % GROUPS, ranks = 0, sum = 0;
            if (!op[i])
                continue;
            for (int k = 0; k < tally_group_size(group[g]); k++) {
                sum += members[g][k];
                ranks++;
            }
            expect_shared(op[i]);
            for (size_t k = 0; k < counts[(i / GROUPS + turn) % 4]; k++)
                CHECK(y[i][k] == (float)(sum + ranks * i) + (float)ranks * (float)(k % 7));
        }
    }
    job_leave(c);
    return 0;
}

static void test_opposite_orders(void **state)
{
    for (int i = 0; i < LAYOUTS; i++)
        run_with(&layouts[i], opposite, NULL);
}

/* --- ranks that are not in it ----------------------------------------------------------------------- */

/* More posts than a ring has room for, while the third rank calls nothing, and once it has left. */
static int without_one(int rank, void *arg)
{
    enum { MANY = 3 * TLY_RING / 128 };
    struct board *b = arg;
    static float x[MOST], y[MOST];
    tally_comm *c = job_open();
    int three[3];
    three_of(c, three);
    tally_group *pair = rank == three[0] || rank == three[1] ? make_group(c, "pair", three, 2) : NULL;
    if (pair) {
        float sum = 1;
        for (int i = 0; i < MANY; i++) {
            sum = 1;
            expect_shared(begin_sum(c, pair, "w", &sum, &sum, 1));
            CHECK(sum == 2);
        }
        expect_shared(begin_sum(c, pair, "w", x, y, MOST));
        atomic_fetch_add(&b->stage, 1);
        job_await(&b->stage, 3);
        for (int i = 0; i < 20; i++)
            expect_shared(begin_sum(c, pair, "w", x, y, i % 2 ? 10 : MOST));
        atomic_fetch_add(&b->stage, 1);
    } else {
        job_await(&b->stage, 2);
    }
    if (rank == three[2]) {
        CHECK(tally_comm_close(c) == 0);
        atomic_fetch_add(&b->stage, 1);
        return 0;
    }
    job_await(&b->stage, 5);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_others_do_something_else(void **state)
{
    for (int i = 0; i < LAYOUTS; i++)
        run_with(&layouts[i], without_one, NULL);
}

/* --- long tensors ------------------------------------------------------------------------------------- */

/* The call of a rank neither reads its tensor nor waits until all its ranks have come. */
static int is_patient(int rank, void *arg)
{
    enum { LONG = 2 << 20, BYTES = LONG * 4 };
    struct board *b = arg;
    tally_comm *c = job_open();
    int three[3];
    three_of(c, three);
    const int ranks[] = {three[0], three[2]};
    bool in = rank == ranks[0] || rank == ranks[1];
    tally_group *pair = in ? make_group(c, "pair", ranks, 2) : NULL;
    float *x = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(x != MAP_FAILED);
    for (int i = 0; i < LONG; i++)
        x[i] = (float)(i % 1000 + rank);
    if (rank == ranks[0]) {
        CHECK(mprotect(x, BYTES, PROT_NONE) == 0);
        tally_op *op = begin_sum(c, pair, "w", x, x, LONG);
        CHECK(mprotect(x, BYTES, PROT_READ | PROT_WRITE) == 0);
        atomic_fetch_add(&b->stage, 1);
        expect_shared(op);
    } else if (in) {
        job_await(&b->stage, 1);
        expect_shared(begin_sum(c, pair, "w", x, x, LONG));
    }
    for (int i = 0; i < LONG && in; i++)
        CHECK(x[i] == (float)(2 * (i % 1000) + ranks[0] + ranks[1]));
    job_leave(c);
    return 0;
}

static void test_a_call_reads_no_long_tensor(void **state)
{
    for (int i = 0; i < LAYOUTS; i++)
        run_with(&layouts[i], is_patient, NULL);
}

/* Long ones of three ranks: each call in a rank's own memory and in the pool, in place and not, two at a time. */
static int long_ones(int rank, void *arg)
{
    enum { LONG = 2500001, TURNS = 6 };
    static const size_t pieces[] = {LONG - 300000, 0, 300000};
    static float own[2][2][LONG];
    float *pool[2];
    tally_comm *c = job_open();
    int three[3];
    three_of(c, three);
    bool in = rank == three[0] || rank == three[1] || rank == three[2];
    tally_group *g = in ? make_group(c, "three", three, 3) : NULL;
    int place = rank - three[0];
    for (int k = 0; k < 2; k++)
        CHECK(tally_alloc(c, LONG * sizeof(float), (void **)&pool[k]) == 0);
    for (int turn = 0; turn < TURNS && in; turn++) {
        struct tally_options o = job_in(g);
        tally_op *op[2];
        float *out[2];
        for (int k = 0; k < 2; k++) {
            int i = 2 * turn + k, root = i % 3;
            float *x = (i + rank) % 3 ? own[k][0] : pool[k];
            out[k] = i % 4                         ? own[k][1]
                     : turn % 3 == 2 && place == 2 ? x + pieces[0]
                                                   : x; /* or where its piece lies */
            for (int at = 0; at < LONG; at++)
                x[at] = (float)(at % 1000 + rank + i);
            const char *name = k ? "a" : "b";
            int err =
                turn % 3 == 0
                    ? tally_push_pull(c, name, x, out[k], LONG, TALLY_FLOAT32, TALLY_SUM, &o, &op[k])
                : turn % 3 == 1
                    ? tally_reduce(c, name, x, out[k], LONG, TALLY_FLOAT32, TALLY_SUM, root, &o, &op[k])
                    : tally_reduce_scatter(c, name, x, out[k], pieces, TALLY_FLOAT32, TALLY_SUM, &o, &op[k]);
            CHECK(err == 0);
        }
        for (int k = 0; k < 2; k++) {
            int i = 2 * turn + k, from = turn % 3 == 2 && place == 2 ? (int)pieces[0] : 0;
            int count = turn % 3 == 0 ? LONG : turn % 3 == 1 ? (place == i % 3) * LONG : (int)pieces[place];
            expect_shared(op[k]);
            for (int at = 0; at < count; at++)
                CHECK(out[k][at] == (float)(3 * ((at + from) % 1000 + i) + 3 * three[1]));
        }
    }
    for (int k = 0; k < 2; k++)
        CHECK(tally_free(pool[k]) == 0);
    job_leave(c);
    return 0;
}

static void test_long_tensors(void **state)
{
    for (int i = 0; i < LAYOUTS; i++)
        run_with(&layouts[i], long_ones, NULL);
}

/* Broadcasts of three ranks whose tensors all lie in the pool, or only some. */
static int broadcasts(int rank, void *arg)
{
    enum { LONG = 300001 };
    static float own[LONG];
    void *pool;
    tally_comm *c = job_open();
    int three[3];
    three_of(c, three);
    bool in = rank == three[0] || rank == three[1] || rank == three[2];
    tally_group *g = in ? make_group(c, "three", three, 3) : NULL;
    CHECK(tally_alloc(c, sizeof own, &pool) == 0);
    for (int i = 0; i < 12 && in; i++) {
        struct tally_options o = job_in(g);
        tally_op *op;
        int count = i % 2 ? LONG : TLY_EAGER, root = i % 3;
        float *x = i % 4 < 2 || rank != three[i / 4] ? pool : own;
        for (int at = 0; at < count; at++)
            x[at] = (float)(at % 1000 + rank + i);
        CHECK(tally_broadcast(c, "b", x, (size_t)count, TALLY_FLOAT32, root, &o, &op) == 0);
        expect_shared(op);
        for (int at = 0; at < count; at++)
            CHECK(x[at] == (float)(at % 1000 + three[root] + i));
    }
    CHECK(tally_free(pool) == 0);
    job_leave(c);
    return 0;
}

static void test_broadcasts(void **state)
{
    for (int i = 0; i < LAYOUTS; i++)
        run_with(&layouts[i], broadcasts, NULL);
}

/* --- how calls come to shared memory ------------------------------------------------------------------ */

/* The first goes through the services, and maybe what follows before all have posted it.  TALLY_LOCAL=off: all. */
static int at_first(int rank, void *arg)
{
    tally_comm *c = job_open();
    int three[3];
    three_of(c, three);
    bool in = rank == three[0] || rank == three[2];
    tally_group *pair = NULL;
    float x[2] = {1, 1};
    if (in) {
        const int ranks[] = {three[2], three[0]};
        CHECK(tally_group_create(c, "pair", ranks, 2, &pair) == 0);
        tally_op *op[2];
        for (int i = 0; i < 2; i++)
            op[i] = begin_sum(c, pair, NULL, &x[i], &x[i], 1);
        for (int i = 0; i < 2; i++) {
            CHECK(tally_op_wait(op[i], -1) == 0 && (i || !is_shared(op[i])));
            tally_op_free(op[i]);
        }
        tally_op *next = begin_sum(c, pair, NULL, x, x, 1);
        CHECK(tally_op_wait(next, -1) == 0 && is_shared(next) == (c->local != NULL));
        tally_op_free(next);
        /* One rank is a group, too. */
        const int own = rank;
        CHECK(tally_group_create(c, rank == three[0] ? "own" : "my own", &own, 1, &pair) == 0);
        job_expect(begin_sum(c, pair, NULL, x, x, 1), 0);
        CHECK(x[0] == 4 && x[1] == 2);
    }
    CHECK(!c->local || c->local->rounds.count < 4);
    job_leave(c);
    return 0;
}

static void test_the_first_goes_through_services(void **state)
{
    for (int i = 0; i < LAYOUTS; i++) {
        run_with(&layouts[i], at_first, NULL);
        run_with(&layouts[i], at_first, "TALLY_LOCAL=off");
    }
}

/* --- what goes wrong ----------------------------------------------------------------------------------- */

/* Sentences as of services.  The third rank means other ranks by a name. */
static int disagree(int rank, void *arg)
{
    struct board *b = arg;
    static float x[MOST];
    tally_comm *c = job_open();
    int three[3];
    char part[120];
    three_of(c, three);
    bool in = rank == three[0] || rank == three[1];
    tally_group *pair = in ? make_group(c, "pair", three, 2) : NULL, *odd;
    tally_op *op;
    for (int i = 0; i < 6 && in; i++) {
        size_t count = i % 2 ? MOST : 10;
        op = begin_sum(c, pair, "w", x, x, rank == three[1] ? count - 1 : count);
        CHECK(tally_op_wait(op, -1) == -EINVAL);
        snprintf(part, sizeof part,
                 "'w': the ranks disagree: tally_push_pull float32 [%zu] sum on rank %d, [%zu]", count,
                 three[0], count - 1);
        CHECK_HOLDS(tally_op_error(op), part);
        tally_op_free(op);
        struct tally_options o = job_in(pair);
        if (rank == three[1]) {
            CHECK(tally_refuse(c, "w", TALLY_PUSH_PULL, &o, "no gradient") == 0);
        } else {
            op = begin_sum(c, pair, "w", x, x, count);
            CHECK(tally_op_wait(op, -1) == -EINVAL);
            snprintf(part, sizeof part, "rank %d refuses: no gradient", three[1]);
            CHECK_HOLDS(tally_op_error(op), part);
            tally_op_free(op);
        }
        CHECK(tally_reduce(c, "r", x, x, count, TALLY_FLOAT32, TALLY_SUM, rank == three[1], &o, &op) == 0);
        CHECK(tally_op_wait(op, -1) == -EINVAL);
        CHECK_HOLDS(tally_op_error(op), "'r': the ranks disagree");
        tally_op_free(op);
        expect_shared(begin_sum(c, pair, "w", x, x, count));
    }
    job_barrier(c);
    if (rank == three[0] || rank == three[1] || rank == three[2]) {
        const int other[] = {three[1], three[2]};
        CHECK(tally_group_create(c, "odd", rank == three[0] ? three : other, 2, &odd) == 0);
        for (int i = 0; i < 3 && rank != three[2]; i++) {
            op = begin_sum(c, odd, "w", x, x, i % 2 ? MOST : 10);
            CHECK(tally_op_wait(op, -1) == -EINVAL);
            snprintf(part, sizeof part, "rank %d: 'w' in group 'odd' of ranks %d-%d: ", three[0], three[0],
                     three[1]);
            CHECK_HOLDS(tally_op_error(op), part);
            tally_op_free(op);
        }
    }
    atomic_fetch_add(&b->stage, 1);
    job_await(&b->stage, RANKS); /* who leaves is another reason to fail */
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_disagreement(void **state)
{
    for (int i = 0; i < LAYOUTS; i++)
        run_either_way(&layouts[i], disagree);
}

/* One rank is late, another one takes its call back; then both submit, and one of them takes it back at once. */
static int cancels(int rank, void *arg)
{
    enum { RACES = 40 };
    static float x[MOST];
    struct board *b = arg;
    tally_comm *c = job_open();
    int three[3];
    three_of(c, three);
    bool in = rank == three[0] || rank == three[2];
    const int ranks[] = {three[0], three[2]};
    tally_group *pair = in ? make_group(c, "pair", ranks, 2) : NULL;
    for (int i = 0; i < 4 && in; i++) {
        size_t count = i % 2 ? MOST : 10;
        if (rank == three[2])
            job_await(&b->stage, i + 1);
        tally_op *op = begin_sum(c, pair, "w", x, x, count);
        CHECK(rank == three[2] || tally_op_cancel(op, "not wanted") == 0);
        CHECK(tally_op_wait(op, -1) == -ECANCELED);
        CHECK_HOLDS(tally_op_error(op), "not wanted");
        tally_op_free(op);
        if (rank == three[0])
            atomic_fetch_add(&b->stage, 1);
    }
    for (int i = 0; i < RACES && in; i++) {
        tally_op *op = begin_sum(c, pair, "w", x, x, i % 2 ? MOST : 10);
        CHECK(rank == ranks[i / 2 % 2] || tally_op_cancel(op, "a race") == 0);
        int err = tally_op_wait(op, -1), other = err;
        CHECK(err == 0 || err == -ECANCELED);
        tally_op_free(op);
        struct tally_options o = job_in(pair);
        CHECK(tally_push_pull(c, "same", &err, &other, 1, TALLY_INT32, TALLY_MIN, &o, &op) == 0);
        job_expect(op, 0);
        CHECK(err == other);
    }
    job_leave(c);
    return 0;
}

static void test_cancel(void **state)
{
    for (int i = 0; i < LAYOUTS; i++)
        run_either_way(&layouts[i], cancels);
}

/* A rank closes while its partner has not submitted yet: the operation ends well on both. */
static int closes_early(int rank, void *arg)
{
    struct board *b = arg;
    static float x[MOST], y[MOST];
    tally_comm *c = job_open();
    int three[3];
    three_of(c, three);
    if (rank == three[0] || rank == three[1]) {
        tally_group *pair = make_group(c, "pair", three, 2);
        if (rank == three[1]) {
            job_await(&b->stage, 1);
            job_sleep_ms(200); /* the other one is closing */
        }
        tally_op *op = begin_sum(c, pair, "w", x, y, MOST);
        if (rank == three[0]) {
            CHECK(is_shared(op) == (c->local != NULL));
            atomic_store(&b->stage, 1);
            CHECK(tally_comm_close(c) == 0);
        }
        job_expect(op, 0);
        if (rank == three[0])
            return 0;
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_closed_early(void **state)
{
    for (int i = 0; i < LAYOUTS; i++)
        run_either_way(&layouts[i], closes_early);
}

/* A pair goes on until a rank of it, or the third one, is killed. */
static int until_killed(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    atomic_fetch_add(&b->open, 1);
    job_await(&b->open, RANKS); /* nobody is killed before */
    int three[3], err = 0;
    three_of(c, three);
    float *x = calloc(MOST, sizeof *x), *y = calloc(MOST, sizeof *y);
    CHECK(x && y);
    tally_group *pair = rank == three[0] || rank == three[1] ? make_group(c, "pair", three, 2) : NULL;
    for (int i = 0; pair && !err; i++) {
        struct tally_options o = job_in(pair);
        tally_op *op;
        err = tally_push_pull(c, "w", x, y, i % 3 ? MOST : 10, TALLY_FLOAT32, TALLY_AVERAGE, &o, &op);
        if (!err) {
            err = tally_op_wait(op, -1);
            tally_op_free(op);
        }
        atomic_fetch_add(&b->stage, 1);
    }
    while (!pair && !err) {
        err = tally_comm_status(c, NULL);
        job_sleep_ms(5);
    }
    job_close_after_kill(c, pair ? err : 0, three[b->run], y, MOST * sizeof *y);
    free(x);
    free(y);
    return 0;
}

static void test_rank_killed(void **state)
{
    for (int i = 0; i < (UNDER_SANITIZER ? 6 : 12); i++) {
        struct board *b = job_shared(sizeof *b);
        b->run = 1 + i % 2;
        const struct layout *layout = &layouts[i / 2 % (LAYOUTS - 1)];
        struct job j = {.ranks = RANKS,
                        .tallyds = layout->tallyds,
                        .machine = layout->machine,
                        .main = until_killed,
                        .arg = b};
        job_kill_rank(&j, b->run, &b->stage, 10 + 7 * i);
    }
}

/* A rank that has joined has no part in a group's calls, and those of a group without it go on. */
static int one_joins(int rank, void *arg)
{
    static float x[MOST];
    tally_comm *c = job_open();
    int three[3];
    three_of(c, three);
    const int ranks[][2] = {{three[0], three[1]}, {three[1], three[2]}};
    tally_group *with = rank == three[0] || rank == three[1] ? make_group(c, "with", ranks[0], 2) : NULL,
                *without =
                    rank == three[1] || rank == three[2] ? make_group(c, "without", ranks[1], 2) : NULL;
    tally_op *op, *join;
    if (rank == three[0])
        CHECK(tally_join(c, NULL, &join) == 0);
    for (int i = 0; i < 4 && rank == three[1]; i++) {
        op = begin_sum(c, with, NULL, x, x, i % 2 ? MOST : 10);
        CHECK(tally_op_wait(op, -1) == -EINVAL);
        char part[40];
        snprintf(part, sizeof part, "rank %d has joined", three[0]);
        CHECK_HOLDS(tally_op_error(op), part);
        tally_op_free(op);
    }
    for (int i = 0; i < 4 && without; i++)
        expect_shared(begin_sum(c, without, NULL, x, x, i % 2 ? MOST : 10));
    if (rank != three[0])
        CHECK(tally_join(c, NULL, &join) == 0);
    job_expect(join, 0);
    for (int i = 0; i < 4; i++) {
        if (with)
            expect_shared(begin_sum(c, with, NULL, x, x, i % 2 ? MOST : 10));
        if (without)
            expect_shared(begin_sum(c, without, NULL, x, x, i % 2 ? MOST : 10));
    }
    CHECK(!c->local || c->local->rounds.count < 4); /* of those that have failed none is left */
    job_leave(c);
    return 0;
}

static void test_rank_joins(void **state)
{
    for (int i = 0; i < LAYOUTS; i++)
        run_with(&layouts[i], one_joins, NULL);
}

/* A late rank is named by its number in the job, also where no service sums. */
static int is_late(int rank, void *arg)
{
    struct board *b = arg;
    static float x[MOST];
    tally_comm *c = job_open();
    int three[3];
    three_of(c, three);
    tally_group *g =
        rank == three[0] || rank == three[2] ? make_group(c, "pair", (int[]){three[0], three[2]}, 2) : NULL;
    if (rank == three[0]) {
        tally_op *op = begin_sum(c, g, "w", x, x, MOST);
        atomic_fetch_add(&b->stage, 1);
        job_expect(op, -ETIME);
        char part[60];
        snprintf(part, sizeof part, "for rank %d (TALLY_TIMEOUT)", three[2]);
        CHECK_HOLDS(tally_error(), part);
    } else {
        job_await(&b->stage, 1);
        while (tally_comm_status(c, NULL) == 0)
            job_sleep_ms(10);
    }
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_late(void **state)
{
    for (int i = 0; i < LAYOUTS; i++) {
        struct job j = {.ranks = RANKS,
                        .tallyds = layouts[i].tallyds,
                        .machine = layouts[i].machine,
                        .main = is_late,
                        .arg = job_shared(sizeof(struct board)),
                        .settings = {"TALLY_LATE_WARNING=0.5", "TALLY_TIMEOUT=3"}};
        job_start(&j);
        for (int rank = 0; rank < RANKS; rank++) /* a tallyd ends with the job's failure */
            assert_int_equal(job_wait_rank(&j, rank), 0);
        bool last = i == LAYOUTS - 1;
        job_log_holds(&j, last ? 1 : 0, last ? "has waited 1 s for rank 3" : "has waited 1 s for rank 2");
        job_clear(&j);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_opposite_orders),
        cmocka_unit_test(test_others_do_something_else),
        cmocka_unit_test(test_a_call_reads_no_long_tensor),
        cmocka_unit_test(test_long_tensors),
        cmocka_unit_test(test_broadcasts),
        cmocka_unit_test(test_the_first_goes_through_services),
        cmocka_unit_test(test_disagreement),
        cmocka_unit_test(test_cancel),
        cmocka_unit_test(test_closed_early),
        cmocka_unit_test(test_rank_killed),
        cmocka_unit_test(test_rank_joins),
        cmocka_unit_test(test_late),
    };
    return cmocka_run_group_tests_name("local_groups", tests, NULL, NULL);
}
