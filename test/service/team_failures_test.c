/* team_failures_test.c - teams and groups when something goes wrong: a rank that dies, joins or disagrees is named
 * as it is without teams, and a tallyd that dies changes no result. */
#include <errno.h>
#include <setjmp.h>
#include <string.h>
#include <sys/resource.h>

#include "comm/comm.h"
#include "comm/op/group.h"
#include "job.h"
#include "local/engine.h"
#include "local/segment.h"

#include <cmocka.h>

enum { MOST = 60000 };

enum call { BROADCAST, REDUCE, SCATTER, CALLS, SUM = CALLS, GATHER, ALL_CALLS };

struct board {
    atomic_int stage;
    int rounds;
    bool grouped, full; /* full: the pools of ranks 1 and 2 */
};

/* mixed: the first four ranks are two of each machine's three. */
static const int pairs[] = {0, 0, 1, 1}, three[] = {0, 0, 1, 1, 2, 2}, mixed[] = {0, 0, 1, 1, 0, 1};

/* --- of all ranks -------------------------------------------------------------------------------- */

/* g NULL: of all ranks.  There are four ranks; the last piece of a reduce-scatter has what is left. */
static int submit_in(tally_comm *c, tally_group *g, enum call call, const char *name, float *x, float *y,
                     size_t count, int root, tally_op **op)
{
    const size_t pieces[] = {count / 4, count / 4, count / 4, count - count / 4 * 3};
    struct tally_options o = job_in(g);
    switch (call) {
    case BROADCAST:
        return tally_broadcast(c, name, x, count, TALLY_FLOAT32, root, &o, op);
    case REDUCE:
        return tally_reduce(c, name, x, y, count, TALLY_FLOAT32, TALLY_AVERAGE, root, &o, op);
    case SCATTER:
        return tally_reduce_scatter(c, name, x, y, pieces, TALLY_FLOAT32, TALLY_AVERAGE, &o, op);
    case SUM:
        return tally_push_pull(c, name, x, y, count, TALLY_FLOAT32, TALLY_AVERAGE, &o, op);
    default:
        return tally_allgather_into(c, name, x, y, count / 4, TALLY_FLOAT32, &o, op);
    }
}

static int submit(tally_comm *c, enum call call, const char *name, float *x, float *y, size_t count, int root,
                  tally_op **op)
{
    return submit_in(c, NULL, call, name, x, y, count, root, op);
}

static float gives(int rank, int i, int n)
{
    return (float)(rank + i % 512 + n % 16);
}

/* The n-th operation: how it ends.  If well, the result is right. */
static int attempt(tally_comm *c, tally_group *g, enum call call, int rank, int n, float *x, float *y)
{
    enum { PIECE = MOST / 4 };
    const int root = n % 4;
    tally_op *op;
    for (int i = 0; i < MOST; i++)
        x[i] = gives(rank, i, n);
    int err = submit_in(c, g, call, "w", x, y, MOST, root, &op);
    if (!err) {
        err = tally_op_wait(op, -1);
        tally_op_free(op);
    }
    for (int i = 0; i < MOST && !err; i++) {
        if (call == SUM || (call == REDUCE && rank == root))
            CHECK(y[i] == gives(0, i, n) + 1.5f);
        if (call == SCATTER && i < PIECE)
            CHECK(y[i] == gives(0, i + rank * PIECE, n) + 1.5f);
        if (call == GATHER)
            CHECK(y[i] == gives(i / PIECE, i % PIECE, n));
        if (call == BROADCAST)
            CHECK(x[i] == gives(root, i, n));
    }
    return err;
}

static void expect_sound(tally_comm *c, tally_group *g, enum call call, int rank, int n)
{
    static float x[MOST], y[MOST];
    CHECK(attempt(c, g, call, rank, n, x, y) == 0);
}

/* No rank reaches into another's memory, and these have no room in the pool to show a tensor. */
static tally_comm *open_with_full_pools(int rank, unsigned ranks)
{
    job_forbid_reaching();
    job_limit_pool();
    tally_comm *c = job_open();
    if (ranks >> rank & 1)
        job_fill_pool(c);
    return c;
}

/* One rank means something else: all hear of it, and go on. */
static int disagree(int rank, void *arg)
{
    static float x[MOST], y[MOST];
    static const uint32_t kinds[] = {TALLY_BROADCAST, TALLY_REDUCE, TALLY_REDUCE_SCATTER};
    tally_comm *c = arg ? open_with_full_pools(rank, 6) : job_open();
    tally_op *op;
    for (int n = 0; n < 4 * CALLS; n++) {
        const enum call call = (enum call)(n % CALLS);
        const int odd = n / CALLS, root = n % 4;
        /* Also a size at which its ranks are no team. */
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
        /* Taken back before the rank that is late has come; that hears of it. */
        if (rank == odd)
            job_barrier(c);
        CHECK(submit(c, call, "back", x, y, MOST, root, &op) == 0);
        CHECK(rank != (odd + 1) % 4 || tally_op_cancel(op, "not wanted") == 0);
        CHECK(tally_op_wait(op, -1) == -ECANCELED);
        CHECK_HOLDS(tally_op_error(op), "not wanted");
        tally_op_free(op);
        if (rank != odd)
            job_barrier(c);
        expect_sound(c, NULL, call, rank, n);
    }
    job_leave(c);
    return 0;
}

static void test_disagreement(void **state)
{
    static int full;
    for (int tallyds = 0; tallyds < 2; tallyds++)
        job_run(&(struct job){.ranks = 4, .tallyds = tallyds, .machine = pairs, .main = disagree});
    job_run(&(struct job){.ranks = 4, .machine = pairs, .main = disagree, .arg = &full});
}

/* Go on until that fails, or until it is enough: all ranks, or a group of the first four, beside one of the others. */
static int until_failure(int rank, void *arg)
{
    static const int first[] = {0, 1, 2, 3}, others[] = {4, 5};
    struct board *b = arg;
    tally_comm *c = b->full ? open_with_full_pools(rank, 6) : job_open();
    tally_group *g = NULL;
    float *x = malloc(MOST * sizeof *x), *y = malloc(MOST * sizeof *y);
    tally_op *op;
    CHECK(x && y);
    if (b->grouped)
        CHECK(tally_group_create(c, "g", rank < 4 ? first : others, rank < 4 ? 4 : 2, &g) == 0);
    job_barrier(c); /* all have begun before a rank is killed */
    int err = 0;
    for (int n = 0; !err && n < b->rounds; n++) {
        if (rank < 4) {
            err = attempt(c, g, (enum call)(n % ALL_CALLS), rank, n, x, y);
        } else {
            struct tally_options o = job_in(g);
            err = tally_push_pull(c, "v", x, y, MOST, TALLY_FLOAT32, TALLY_SUM, &o, &op);
            err = err ? err : job_ends(op);
        }
        atomic_fetch_add(&b->stage, 1);
    }
    job_close_after_kill(c, err, 1, y, MOST * sizeof *y);
    free(x);
    free(y);
    return 0;
}

static void kill_ranks(bool grouped)
{
    for (int i = 0; i < (UNDER_SANITIZER ? 2 : 6); i++) {
        struct board *b = job_shared(sizeof *b);
        b->rounds = INT32_MAX;
        b->grouped = grouped;
        b->full = i % 3 == 1;
        struct job j = {.ranks = grouped ? 6 : 4,
                        .tallyds = i % 2,
                        .machine = grouped && i / 2 % 2 ? mixed : three,
                        .main = until_failure,
                        .arg = b};
        job_kill_rank(&j, 1, &b->stage, (grouped ? 15 : 10) + 7 * i);
    }
}

static void test_rank_killed(void **state)
{
    kill_ranks(false);
}

/* It has part 0 of some names, and sums of reduces, for which the carriers give again what they had given. */
static void kill_tallyds(bool grouped)
{
    for (int i = 0; i < (UNDER_SANITIZER ? 2 : 6); i++) {
        struct board *b = job_shared(sizeof *b);
        b->rounds = 60;
        b->grouped = grouped;
        struct job j = {.ranks = grouped ? 6 : 4,
                        .tallyds = 2,
                        .machine = grouped && i / 2 % 2 ? mixed : three,
                        .main = until_failure,
                        .arg = b,
                        .settings = {"TALLY_PART_BYTES=4K", i % 2 ? "TALLY_CREDIT_BYTES=16K" : NULL}};
        job_kill_tallyd(&j, &b->stage, 40 + 17 * i);
    }
}

static void test_tallyd_killed(void **state)
{
    kill_tallyds(false);
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
    for (int n = 0; n < CALLS && rank != 1; n++) { /* it is refused when the list has come */
        CHECK(tally_allgather(c, NULL, x, MOST, TALLY_FLOAT32, NULL, &op) == 0);
        CHECK(tally_op_wait(op, -1) == -EINVAL);
        CHECK_HOLDS(tally_op_error(op), "rank 1 has joined");
        tally_op_free(op);
    }
    if (rank != 1)
        CHECK(tally_join(c, NULL, &join) == 0);
    job_expect(join, 0);
    for (int n = 0; n < 2 * CALLS; n++)
        expect_sound(c, NULL, (enum call)(n % CALLS), rank, n);
    CHECK(c->local->rounds.count < CALLS); /* of those that have failed none is left, nor of all the others */
    job_leave(c);
    return 0;
}

static void test_rank_joins(void **state)
{
    for (int tallyds = 0; tallyds < 2; tallyds++)
        job_run(&(struct job){.ranks = 4, .tallyds = tallyds, .machine = pairs, .main = one_joins});
}

/* --- groups ---------------------------------------------------------------------------------------- */

/* One has joined, which has others of its machine stand for it in no group; one means another group by the name. */
static int some_machines(int rank, void *arg)
{
    float *x, *y; /* where zeros could stand for the rank that has joined, if it were all ranks' sum */
    static const int ranks[] = {0, 1, 2, 3}, others[] = {2, 3, 4, 5};
    tally_comm *c = job_open();
    tally_group *g = NULL, *odd = NULL;
    tally_op *op, *join = NULL;
    CHECK(tally_alloc(c, MOST * sizeof *x, (void **)&x) == 0);
    CHECK(tally_alloc(c, MOST * sizeof *y, (void **)&y) == 0);
    if (rank < 4) {
        CHECK(tally_group_create(c, "some", ranks, 4, &g) == 0);
        for (int call = 0; call < ALL_CALLS; call++)
            expect_sound(c, g, (enum call)call, rank, call);
    }
    if (rank < 3)
        CHECK(tally_group_create(c, "odd", ranks, 4, &odd) == 0);
    else if (rank == 3)
        CHECK(tally_group_create(c, "odd", others, 4, &odd) == 0);
    for (int call = 0; odd && call < ALL_CALLS; call++) {
        CHECK(submit_in(c, odd, (enum call)call, "g", x, y, MOST, 1, &op) == 0);
        CHECK(tally_op_wait(op, -1) == -EINVAL);
        CHECK_HOLDS(tally_op_error(op), "the ranks disagree: ");
        tally_op_free(op);
    }
    job_barrier(c);
    if (rank == 1)
        CHECK(tally_join(c, NULL, &join) == 0);
    for (int call = 0; g && rank != 1 && call < ALL_CALLS; call++) {
        CHECK(submit_in(c, g, (enum call)call, "g", x, y, MOST, 1, &op) == 0);
        CHECK(tally_op_wait(op, -1) == -EINVAL);
        CHECK_HOLDS(tally_op_error(op), "rank 1 has joined");
        tally_op_free(op);
    }
    if (rank != 1)
        CHECK(tally_join(c, NULL, &join) == 0);
    job_expect(join, 0);
    for (int call = 0; g && call < ALL_CALLS; call++)
        expect_sound(c, g, (enum call)call, rank, call);
    pthread_mutex_lock(&c->local->lock);
    uint64_t rounds = c->local->rounds.count;
    pthread_mutex_unlock(&c->local->lock);
    CHECK(rounds < CALLS || c->machines == 2); /* where `odd` has others of a machine, its rounds wait */
    CHECK(tally_free(x) == 0 && tally_free(y) == 0);
    job_leave(c);
    return 0;
}

static void test_some_machines(void **state)
{
    for (int i = 0; i < 4; i++)
        job_run(&(struct job){.ranks = 6,
                              .tallyds = i % 2,
                              .machine = i / 2 ? mixed : three,
                              .main = some_machines,
                              .settings = {"TALLY_TIMEOUT=30"}});
}

/* Ranks in different numbers of groups agree on what a group does. */
static int many_groups(int rank, void *arg)
{
    enum { MANY = 4096 }; /* each has two lists of carriers */
    static float x[MOST], y[MOST];
    static const int ranks[] = {2, 3, 0, 1}, first[] = {0, 1, 2};
    tally_comm *c = job_open();
    tally_group *g;
    tally_op *op;
    for (int i = 0; i < MANY && rank != 3; i++) {
        char name[16];
        snprintf(name, sizeof name, "g%d", i);
        CHECK(tally_group_create(c, name, first, 3, &g) == 0 && g->carriers);
    }
    CHECK(tally_group_create(c, "all", ranks, 4, &g) == 0 && g->carriers);
    for (int i = 0; i < 2; i++) {
        CHECK(submit_in(c, g, SUM, "w", x, y, MOST, 0, &op) == 0);
        job_expect(op, 0);
    }
    job_leave(c);
    return 0;
}

static void test_many_groups(void **state)
{
    job_run(&(struct job){.ranks = 4, .machine = pairs, .main = many_groups});
}

static void test_rank_killed_in_a_group(void **state)
{
    kill_ranks(true);
}

static void test_tallyd_killed_in_a_group(void **state)
{
    kill_tallyds(true);
}

/* --- machines whose ranks cannot be teams ---------------------------------------------------------- */

static int without_teams(int rank, void *arg)
{
    static const struct rlimit little = {1 << 20, 1 << 20};
    CHECK(rank != 3 || setrlimit(RLIMIT_FSIZE, &little) == 0);
    tally_comm *c = job_open();
    for (int call = 0; call < ALL_CALLS; call++)
        expect_sound(c, NULL, (enum call)call, rank, call);
    job_leave(c);
    return 0;
}

static int times(const char *text, const char *part)
{
    int count = 0;
    for (; (text = strstr(text, part)); text++)
        count++;
    return count;
}

static void test_one_shares_no_memory(void **state)
{
    struct job j = {.ranks = 4, .machine = pairs, .main = without_teams};
    job_start(&j);
    job_finish(&j);
    assert_int_equal(times(job_log(&j, 0), "share memory"), 1);
    job_log_holds(&j, 0, "the ranks of some machine cannot share memory: each rank sends its own tensors");
    assert_int_equal(times(job_log(&j, 2), "share memory"), 1);
    job_log_holds(&j, 2, "the ranks cannot share memory: rank 3 cannot");
    job_clear(&j);
}

static int full_pool(int rank, void *arg)
{
    tally_comm *c = open_with_full_pools(rank, *(const unsigned *)arg);
    for (int n = 0; n < 4 * ALL_CALLS; n++)
        expect_sound(c, NULL, (enum call)(n % ALL_CALLS), rank, n);
    job_leave(c);
    return 0;
}

static void test_no_room_to_show_a_tensor(void **state)
{
    static unsigned full[] = {2, 6, 15};
    for (int i = 0; i < 3; i++) {
        struct job j = {.ranks = 4, .machine = pairs, .main = full_pool, .arg = &full[i]};
        job_start(&j);
        job_finish(&j);
        for (int rank = 0; rank < 4; rank++)
            assert_int_equal(times(job_log(&j, rank), "block by block"), full[i] >> rank & 1);
        job_log_holds(&j, 1, "no room to show a tensor to the machine's other ranks: ");
        job_clear(&j);
    }
}

/* One rank more on a machine than can share memory. */
enum { CROWD = TLY_LOCAL_RANKS + 1 };

static int crowded(int rank, void *arg)
{
    enum { EACH = 300 };
    static float x[(CROWD + 1) * EACH], y[(CROWD + 1) * EACH];
    size_t counts[CROWD + 1];
    tally_comm *c = job_open();
    const int ranks = tally_comm_size(c);
    tally_op *op;
    CHECK(rank == CROWD || !c->local);
    for (int r = 0; r < ranks; r++)
        counts[r] = EACH;
    for (int i = 0; i < ranks * EACH; i++)
        x[i] = (float)(rank + i % 100);
    CHECK(tally_push_pull(c, "s", x, y, (size_t)ranks * EACH, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
    job_expect(op, 0);
    for (int i = 0; i < ranks * EACH; i++)
        CHECK(y[i] == (float)(ranks * (i % 100) + ranks * (ranks - 1) / 2));
    CHECK(tally_reduce_scatter(c, "r", x, y, counts, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
    job_expect(op, 0);
    for (int i = 0; i < EACH; i++)
        CHECK(y[i] == (float)(ranks * ((i + rank * EACH) % 100) + ranks * (ranks - 1) / 2));
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_crowded_machines(void **state)
{
    for (int machines = 1; machines <= 2; machines++) {
        static int machine[CROWD + 1];
        machine[CROWD] = 1;
        struct job j = {.ranks = CROWD + machines - 1, .machine = machine, .main = crowded};
        job_start(&j);
        job_finish(&j);
        job_log_holds(&j, 0, "65 ranks are on one machine, and at most 64 can share memory");
        job_log_lacks(&j, 1, "share memory");
        job_clear(&j);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_disagreement),           cmocka_unit_test(test_rank_killed),
        cmocka_unit_test(test_tallyd_killed),          cmocka_unit_test(test_rank_joins),
        cmocka_unit_test(test_some_machines),          cmocka_unit_test(test_many_groups),
        cmocka_unit_test(test_rank_killed_in_a_group), cmocka_unit_test(test_tallyd_killed_in_a_group),
        cmocka_unit_test(test_one_shares_no_memory),   cmocka_unit_test(test_no_room_to_show_a_tensor),
        cmocka_unit_test(test_crowded_machines),
    };
    return cmocka_run_group_tests_name("team_failures", tests, NULL, NULL);
}
