/* team_calls_test.c - broadcasts, reduces and reduce-scatters of several machines with several ranks on each, and what groups of
 * their ranks do: whatever the layout, the group, the root, the lengths, the memory and the order, the bits are those of ranks that
 * push for themselves. */
#include <assert.h>
#include <setjmp.h>
#include <string.h>
#include <sys/resource.h>

#include "comm/comm.h"
#include "comm/op/group.h"
#include "comm/op/op.h"
#include "job.h"
#include "local/engine.h"
#include "local/segment.h"

#include <cmocka.h>

enum { OPS = UNDER_SANITIZER ? 81 : 240, ABREAST = 3, MOST_COUNT = 200000, MOST = 60000 };
static_assert(OPS % ABREAST == 0, "all have a place in board.hash");

enum call { BROADCAST, REDUCE, SCATTER, CALLS, SUM = CALLS, GATHER, ALL_CALLS };

/* Which memory of another rank a rank reaches; with NO_MEMORY most ranks have none left that is shared. */
enum reach { ALL_MEMORY, ONLY_SHARED, NO_MEMORY };

struct board {
    int run;
    atomic_int shared, partial; /* calls in shared memory alone; of teams of some of their machine's ranks */
    enum reach reach;
    char layout[JOB_MOST_RANKS + 1];
    uint64_t hash[2][OPS];
};

/* Ranks of a group; group 0 is all ranks. */
struct crowd {
    int n, own; /* ranks; our place, or -1 */
    int rank[JOB_MOST_RANKS];
    tally_group *group;
};
enum { CROWDS = 8 };

/* --- the bits ------------------------------------------------------------------------------------ */

/* Operation i of all_calls(). */
struct what {
    enum call call;
    int dtype, reduction, root;
    size_t count, element;
    bool in_place;
    struct tally_options options;
};

static struct what what_of(int i, const struct crowd *crowd)
{
    static const size_t counts[] = {4096, 4097, 16384, 70001, 123457, MOST_COUNT, 9000, 65536};
    struct what w = {.call = (enum call)(i % ALL_CALLS),
                     .dtype = (i / ALL_CALLS * 4 + i) % 15,
                     .reduction = i / ALL_CALLS % 4 == 3 ? TALLY_SUM : i * 7 % 8,
                     .root = i * 7 % crowd->n,
                     .count = counts[(i * 5 + i / 8) % 8],
                     .in_place = i / ALL_CALLS % 3 == 0};
    w.reduction = job_reduction(w.dtype, w.reduction);
    w.element = tally_dtype_size((enum tally_dtype)w.dtype);
    w.options = (struct tally_options){.size = sizeof w.options, .priority = i % 3, .group = crowd->group};
    if (w.call != BROADCAST && w.call != GATHER && w.dtype != TALLY_BOOL && w.reduction < TALLY_BAND) {
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
    bool pooled, wants;
    tally_op *op;
};

static void fill(void *at, size_t bytes, int rank, int i)
{
    uint64_t seed = 1000 * (uint64_t)i + (uint64_t)rank;
    for (size_t k = 0; k < bytes; k += 8) {
        uint64_t x = job_random(&seed);
        memcpy((uint8_t *)at + k, &x, bytes - k < 8 ? bytes - k : 8);
    }
}

static int submit_what(tally_comm *c, const char *name, struct under_way *u, const size_t counts[])
{
    const struct what *w = &u->what;
    enum tally_dtype dtype = (enum tally_dtype)w->dtype;
    enum tally_reduction reduction = (enum tally_reduction)w->reduction;
    size_t all = u->in_bytes / w->element;
    switch (w->call) {
    case BROADCAST:
        return tally_broadcast(c, name, u->in, all, dtype, w->root, &w->options, &u->op);
    case REDUCE:
        return tally_reduce(c, name, u->in, u->wants ? u->out : NULL, all, dtype, reduction, w->root,
                            &w->options, &u->op);
    case SUM:
        return tally_push_pull(c, name, u->in, u->out, all, dtype, reduction, &w->options, &u->op);
    case GATHER:
        return tally_allgather_into(c, name, u->in, u->out, all, dtype, &w->options, &u->op);
    default:
        return tally_reduce_scatter(c, name, u->in, u->out, counts, dtype, reduction, &w->options, &u->op);
    }
}

static void begin(tally_comm *c, const struct crowd *crowd, struct under_way *u, int rank, int i)
{
    const int ranks = crowd->n;
    const struct what *w = &u->what;
    size_t counts[JOB_MOST_RANKS], all = 0, before = 0;
    char name[16];
    snprintf(name, sizeof name, "%d", i);
    u->op = NULL;
    u->what = what_of(i, crowd);
    if (crowd->own < 0)
        return;
    u->pooled = (i + rank) % 3 == 0;
    for (int r = 0; r < ranks; r++) {
        before = r == crowd->own ? all : before;
        all += counts[r] = w->call == SCATTER ? piece_of(w, i, r, ranks) : r ? 0 : w->count;
    }
    u->in_bytes = all * w->element;
    size_t out = w->call == SCATTER ? counts[crowd->own] : w->call == GATHER ? all * (size_t)ranks : all;
    u->out_bytes = out * w->element;
    u->in = job_memory(c, u->in_bytes, u->pooled);
    u->wants = w->call != REDUCE || w->root == crowd->own;
    if ((w->in_place && w->call != GATHER) || w->call == BROADCAST)
        u->out = (uint8_t *)u->in + (w->call == SCATTER ? before * w->element : 0);
    else
        u->out = u->wants ? job_memory(c, u->out_bytes, u->pooled) : NULL;
    fill(u->in, u->in_bytes, rank, i);
    CHECK(submit_what(c, i % 5 ? name : NULL, u, counts) == 0);
}

/* The result's hash, of all ranks'. */
static uint64_t end(tally_comm *c, struct board *b, struct under_way *u, int rank, int i)
{
    const struct what *w = &u->what;
    bool member = u->op, apart = member && w->call != BROADCAST && (!w->in_place || w->call == GATHER);
    uint64_t h[JOB_MOST_RANKS] = {0}, own = 0;
    if (member) {
        CHECK(tally_op_wait(u->op, -1) == 0);
        b->partial +=
            u->op->shared.op.parts && u->op->group->number && u->op->group->here.size < c->local->count;
        b->shared +=
            u->op->shared.engine && !u->op->shared.op.parts && !atomic_load(&u->op->shared.op.diverted);
        tally_op_free(u->op);
    }
    if (member && u->wants)
        own = job_hash(u->out, u->out_bytes);
    if (apart) { /* what was given is as it was */
        void *given = job_memory(c, u->in_bytes, false);
        fill(given, u->in_bytes, rank, i);
        CHECK(memcmp(given, u->in, u->in_bytes) == 0);
        job_give_back(given, false);
    }
    tally_op *op;
    CHECK(tally_allgather_into(c, "hashes", &own, h, 1, TALLY_INT64, NULL, &op) == 0);
    job_expect(op, 0);
    for (int r = 0; member && (w->call == BROADCAST || w->call >= SUM) && r < tally_comm_size(c); r++)
        CHECK(!h[r] || h[r] == own);
    if (apart && u->out)
        job_give_back(u->out, u->pooled);
    if (member)
        job_give_back(u->in, u->pooled);
    return job_hash(h, sizeof h);
}

static void join_crowd(tally_comm *c, struct crowd *crowd, int number)
{
    char name[8];
    snprintf(name, sizeof name, "g%d", number);
    for (int i = 0; i < crowd->n; i++)
        crowd->own = crowd->rank[i] == tally_comm_rank(c) ? i : crowd->own;
    if (number && crowd->own >= 0)
        CHECK(tally_group_create(c, name, crowd->rank, (size_t)crowd->n, &crowd->group) == 0);
}

/* All ranks; those of the first two machines; of the last two, the later one first; of the first and the last; all but rank 0,
 * backwards; those of the first machine, backwards; the last two of these; and the first two of
 * each machine. */
static void make_crowds(tally_comm *c, const char *layout, struct crowd crowd[CROWDS])
{
    const int ranks = tally_comm_size(c);
    const char last = layout[ranks - 1] > 'b' ? layout[ranks - 1] : 'b';
    const char *const machines[] = {"ab", (char[]){last, (char)(last - 1), 0}, (char[]){'a', last, 0}};
    for (int i = 0; i < CROWDS; i++)
        crowd[i] = (struct crowd){.own = -1};
    for (int r = 0; r < ranks; r++)
        crowd[0].rank[crowd[0].n++] = r;
    for (int i = 1; i < 4; i++)
        for (const char *m = machines[i - 1]; *m; m++)
            for (int r = 0; r < ranks; r++)
                if (layout[r] == *m)
                    crowd[i].rank[crowd[i].n++] = r;
    for (int r = ranks; --r > 0;)
        crowd[4].rank[crowd[4].n++] = r;
    for (int r = ranks; r-- > 0;)
        if (layout[r] == 'a')
            crowd[5].rank[crowd[5].n++] = r;
    for (int k = 2; k-- > 0;)
        crowd[6].rank[crowd[6].n++] = crowd[5].rank[k];
    for (char m = 'a'; m <= last; m++)
        for (int r = 0, some = 0; r < ranks && some < 2; r++)
            if (layout[r] == m) {
                crowd[7].rank[crowd[7].n++] = r;
                some++;
            }
    for (int i = 0; i < CROWDS; i++)
        join_crowd(c, &crowd[i], i);
}

static int all_calls(int rank, void *arg)
{
    struct board *b = arg;
    if (b->reach != ALL_MEMORY)
        job_forbid_reaching();
    if (b->reach == NO_MEMORY)
        job_limit_pool();
    tally_comm *c = job_open();
    if (b->reach == NO_MEMORY && c->local && rank % 4)
        job_fill_pool(c);
    struct crowd crowd[CROWDS];
    make_crowds(c, b->layout, crowd);
    for (int i = 0; i < OPS; i += ABREAST) {
        struct under_way u[ABREAST];
        for (int k = 0; k < ABREAST; k++)
            begin(c, &crowd[(i + k) / ALL_CALLS % CROWDS], &u[k], rank, i + k);
        for (int k = 0; k < ABREAST; k++) {
            uint64_t h = end(c, b, &u[k], rank, i + k);
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
    struct job j = {.ranks = job_layout(layout, machine),
                    .tallyds = tallyds,
                    .machine = machine,
                    .main = all_calls,
                    .arg = b,
                    .settings = {setting, part, "TALLY_TIMEOUT=60"}};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

static void compare_layout(const char *layout, int tallyds, const char *part, enum reach reach)
{
    struct board *b = job_shared(sizeof *b);
    snprintf(b->layout, sizeof b->layout, "%s", layout);
    run_layout(b, layout, tallyds, "TALLY_LOCAL=off", part);
    b->run = 1;
    b->reach = reach;
    assert_int_equal(b->shared, 0);
    run_layout(b, layout, tallyds, "TALLY_LOCAL=on", part);
    assert_true(b->shared > (reach == NO_MEMORY ? 0 : OPS / CROWDS)); /* small ones need no memory */
    assert_true(b->partial > 0 || strncmp(layout, "aaa", 3) != 0 || strlen(layout) < 6);
    for (int i = 0; i < OPS; i++)
        if (b->hash[0][i] != b->hash[1][i])
            fail_msg("%s: operation %d (call %d) of group %d has other bits", layout, i, i % ALL_CALLS,
                     i / ALL_CALLS % CROWDS);
}

static void test_as_each_for_itself(void **state)
{
    static const char *const layouts[] = {"aabb", "abab",     "aaabbb",  "aabbc",    "aaaabbcc",
                                          "aab",  "aabbccdd", "aabbccc", "abbaaabb", "aaaaa"};
    for (int i = 0; i < (int)(sizeof layouts / sizeof *layouts); i++)
        compare_layout(layouts[i], i % 3, i % 2 ? "TALLY_PART_BYTES=16K" : "TALLY_PART_BYTES=64K",
                       ALL_MEMORY);
}

static void test_memory_out_of_reach(void **state)
{
    compare_layout("aabb", 1, "TALLY_PART_BYTES=16K", ONLY_SHARED);
    compare_layout("aaaaa", 0, "TALLY_PART_BYTES=16K", ONLY_SHARED);
    compare_layout("aabb", 0, "TALLY_PART_BYTES=256K", NO_MEMORY);
    compare_layout("aaabbb", 1, "TALLY_PART_BYTES=16K", NO_MEMORY);
    compare_layout("aaaaa", 0, "TALLY_PART_BYTES=16K", NO_MEMORY);
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

/* Reduce-scatters, many at once, in ranks with 1 MB of shared memory.  Those that wait for rank 0 hold none of it, so then the rest
 * is taken away, too.  Rank 0 begins with those that the others end with. */
static int little_memory(int rank, void *arg)
{
    enum { MANY = 40, ROOM = 1 << 20 };
    static float in[MANY][MOST], out[MANY][MOST / 4];
    static const size_t pieces[] = {MOST / 4, MOST / 4, MOST / 4, MOST / 4};
    job_limit_pool();
    tally_comm *c = job_open();
    struct tly_segment *pool = c->local->segment;
    tally_op *op[MANY];
    void *room;
    CHECK(tly_pool_borrow(pool, ROOM, &room) == 0);
    job_fill_pool(c);
    CHECK(tly_pool_free(room) == 0);
    for (int turn = 0; turn < 2; turn++) {
        if (turn == (rank == 0))
            for (int k = 0; k < MANY; k++) {
                int i = rank ? k : MANY - 1 - k;
                char name[8];
                snprintf(name, sizeof name, "%d", i);
                for (int e = 0; e < MOST; e++)
                    in[i][e] = (float)((e + i) % 1000 + rank);
                CHECK(tally_reduce_scatter(c, name, in[i], out[i], pieces, TALLY_FLOAT32, TALLY_SUM, NULL,
                                           &op[i]) == 0);
            }
        if (turn == 0) {
            job_barrier(c);
            if (rank < 2)
                CHECK(tly_pool_borrow(pool, ROOM, &room) == 0);
            job_barrier(c);
        }
    }
    for (int i = 0; i < MANY; i++) {
        job_expect(op[i], 0);
        for (int e = 0; e < MOST / 4; e++)
            CHECK(out[i][e] == (float)(4 * ((e + rank * (MOST / 4) + i) % 1000) + 6));
    }
    job_leave(c);
    return 0;
}

static void test_little_memory(void **state)
{
    for (int tallyds = 0; tallyds < 2; tallyds++)
        job_run(
            &(struct job){.ranks = 4,
                          .tallyds = tallyds,
                          .machine = pairs,
                          .main = little_memory,
                          .settings = {"TALLY_PART_BYTES=4K", "TALLY_CREDIT_BYTES=16K", "TALLY_TIMEOUT=60"}});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_as_each_for_itself),
        cmocka_unit_test(test_memory_out_of_reach),
        cmocka_unit_test(test_opposite_orders),
        cmocka_unit_test(test_little_memory),
    };
    return cmocka_run_group_tests_name("team_calls", tests, NULL, NULL);
}
