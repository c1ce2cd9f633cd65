/* stress_test.c - jobs by chance: operations of all kinds and sizes, many at once, each rank in an order of its own, so
 * that what the scenarios of other tests have one by one meets here.  Whatever comes, every element is right, all ranks
 * hear the same of an operation, nobody touches a buffer once its operation has ended, and no work entry is lost.
 * TALLY_STRESS=COUNT tries so many seeds in each way.  Each part of the long tests has a seed of its own. */
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <setjmp.h>
#include <string.h>
#include <sys/resource.h>

#include "comm/comm.h"
#include "job.h"
#include "local/engine.h"

#include <cmocka.h>

/* LARGE is several parts; a sanitizer looks at each element that the ranks write and check. */
enum {
    MOST = 64,
    LARGE = UNDER_SANITIZER ? 140000 : 300000,
    POOLED = MOST / 8,
    RANKS = 4,
    TURNS = UNDER_SANITIZER ? 4 : 8
};

/* What makes a way special. */
enum {
    CANCELS = 1,
    MISFITS = 2,    /* now and then a rank's tensor is shorter */
    GROUPS = 4,     /* the first and the last rank have a group */
    FULL_POOL = 8,  /* no memory but for the windows that are kept */
    FEW_WORKS = 16, /* on some ranks */
    SECOND = 32,    /* a second thread sums one by one */
    STAGED = 64,    /* rank 1 cannot be reached into */
    KILLED = 128,   /* one rank, at any time */
    LEAVES = 256,
    ENDS = KILLED | LEAVES,
};

struct way {
    const char *name;
    int flags;
    const int *machine;
    const char *setting;
};

/* Of a job; shared by the test and all ranks. */
struct board {
    const struct way *way;
    uint64_t seed;
    int victim, last, strike; /* the rank that goes, in which turn, and before which operation */
    bool drops;               /* one that leaves begins no more of that turn */
    atomic_int outcome[TURNS][MOST][RANKS];
};

enum { BROADCAST, ALLGATHER, GROUP_SUM, SUM };

/* An operation of a turn: what all ranks know of it, and what this one has. */
struct item {
    int kind, count, root;
    int canceller, odd; /* the rank that takes it back, or whose tensor is shorter; negative: none */
    float *x;
    tally_op *op; /* NULL: not begun */
};

struct rank {
    struct board *board;
    tally_comm *c;
    tally_group *group; /* NULL: not in it */
    int rank, size, flags;
    uint64_t same, own; /* random numbers: the same on all ranks, and others on each */
    int turn, n;
    struct item item[MOST];
    void *pool[POOLED];
    bool over; /* the job ends, as it is to */
};

static float heap[MOST][LARGE];

static int pick(uint64_t *state, int n)
{
    return (int)(job_random(state) % (uint64_t)n);
}

/* 0 to n - 1, at random if there is a `state`. */
static void arrange(int *order, int n, uint64_t *state)
{
    for (int i = 0; i < n; i++)
        order[i] = i;
    for (int i = n - 1; state && i > 0; i--) {
        int k = pick(state, i + 1), t = order[i];
        order[i] = order[k];
        order[k] = t;
    }
}

static void pause_by_chance(struct rank *r, int one_in)
{
    if (pick(&r->own, one_in) == 0)
        usleep((useconds_t)pick(&r->own, 3000));
}

/* --- an operation -------------------------------------------------------------------------------- */

static void plan(struct rank *r)
{
    static const int counts[] = {3, 900, 1025, 20000, 33000, 70000, LARGE * 2 / 3, LARGE};
    for (int i = 0; i < r->n; i++) {
        struct item *t = &r->item[i];
        int kind = pick(&r->same, 10), count = counts[pick(&r->same, 8)], who = pick(&r->same, r->size);
        bool cancels = pick(&r->same, 6) == 0 && r->flags & CANCELS, differs = pick(&r->same, 12) == 0;
        if (kind > SUM || (kind == GROUP_SUM && !(r->flags & GROUPS)))
            kind = SUM;
        *t = (struct item){.kind = kind, .count = count, .root = who, .canceller = -1, .odd = -1};
        if (cancels && kind != GROUP_SUM) /* of which it may be no member */
            t->canceller = pick(&r->same, r->size);
        if (differs && kind == SUM && r->flags & MISFITS)
            t->odd = who;
    }
}

static float value(const struct rank *r, int i, int rank, int k)
{
    return (float)(rank + i + r->turn + k % 7);
}

/* All are whole numbers, so their sum has the same bits in whatever order. */
static float expected(const struct rank *r, int i, int k)
{
    const struct item *t = &r->item[i];
    if (t->kind == BROADCAST)
        return value(r, i, t->root, k);
    return t->kind == SUM ? (float)(r->size * (r->size - 1) / 2) + (float)r->size * value(r, i, 0, k)
                          : (float)(r->size - 1) + 2 * value(r, i, 0, k);
}

static int begin(struct rank *r, int i, int priority)
{
    struct item *t = &r->item[i];
    size_t count = (size_t)t->count;
    struct tally_options o = {.size = sizeof o, .priority = priority};
    char name[16];
    snprintf(name, sizeof name, "%d", i);
    if (t->kind == GROUP_SUM && !r->group)
        return 0;
    t->x = i % 8 == 0 && pick(&r->own, 2) ? r->pool[i / 8] : heap[i];
    for (int k = 0; k < t->count; k++)
        t->x[k] = value(r, i, r->rank, k);
    if (t->kind == BROADCAST)
        return tally_broadcast(r->c, name, t->x, count, TALLY_FLOAT32, t->root, &o, &t->op);
    if (t->kind == ALLGATHER)
        return tally_allgather(r->c, name, t->x, count / ((size_t)r->rank + 1), TALLY_FLOAT32, &o, &t->op);
    o.group = t->kind == GROUP_SUM ? r->group : NULL;
    count -= t->odd == r->rank;
    return tally_push_pull(r->c, name, t->x, t->x, count, TALLY_FLOAT32, TALLY_SUM, &o, &t->op);
}

static void check_result(struct rank *r, int i)
{
    struct item *t = &r->item[i];
    const void *data;
    const int64_t *dims;
    size_t bytes;
    if (t->kind != ALLGATHER) {
        for (int k = 0; k < t->count; k++)
            CHECK(t->x[k] == expected(r, i, k));
        return;
    }
    CHECK(tally_op_gathered(t->op, &data, &bytes, &dims) == 0);
    const float *at = data;
    for (int rank = 0; rank < r->size; rank++) {
        CHECK(dims[rank] == t->count / (rank + 1));
        for (int k = 0; k < dims[rank]; k++)
            CHECK(*at++ == value(r, i, rank, k));
    }
    CHECK(bytes == (size_t)((const char *)at - (const char *)data));
}

static bool is_an_end(int err)
{
    return err == -ECONNRESET || err == -ESHUTDOWN;
}

static bool may_end_so(const struct rank *r, const struct item *t, int err)
{
    if (err == 0)
        return t->odd < 0;
    return (err == -ECANCELED && t->canceller >= 0) || (err == -EINVAL && t->odd >= 0) ||
           (is_an_end(err) && r->turn >= r->board->last);
}

/* What fills a buffer that its rank has back.  Memory is looked at in one piece: a sanitizer takes longer for elements. */
enum { UNTOUCHED = 0xff };

static bool is_untouched(const struct item *t)
{
    const unsigned char *bytes = (const unsigned char *)t->x;
    return bytes[0] == UNTOUCHED && memcmp(bytes, bytes + 1, (size_t)t->count * sizeof *t->x - 1) == 0;
}

/* Wait in one of the ways that there are, and take the buffer back. */
static void finish(struct rank *r, int i)
{
    struct item *t = &r->item[i];
    bool polls = pick(&r->own, 3) == 0;
    int err;
    if (!t->op)
        return;
    do
        err = tally_op_wait(t->op, polls ? 1 : -1);
    while (polls && err == -ETIMEDOUT);
    if (!may_end_so(r, t, err))
        fprintf(stderr, "turn %d, operation %d: %d %s\n", r->turn, i, err, tally_op_error(t->op));
    CHECK(may_end_so(r, t, err));
    if (!err)
        check_result(r, i);
    memset(t->x, UNTOUCHED, (size_t)t->count * sizeof *t->x);
    atomic_store(&r->board->outcome[r->turn][i][r->rank], err);
    r->over |= is_an_end(err);
}

/* --- a turn -------------------------------------------------------------------------------------- */

/* Is this rank to go?  It is not to return, if it is killed. */
static bool goes(struct rank *r, int at)
{
    const struct board *b = r->board;
    if (r->rank != b->victim || r->turn != b->last || at != b->strike % r->n)
        return false;
    pause_by_chance(r, 1);
    if (r->flags & KILLED)
        _exit(0); /* as by a signal: nothing is said, and its other threads may be anywhere */
    return b->drops;
}

static void begin_all(struct rank *r)
{
    enum { RISING, SAME_ORDER, OWN_ORDER, AS_PLANNED, HOW };
    int order[MOST], how = pick(&r->same, r->flags & FULL_POOL ? OWN_ORDER + 1 : HOW);
    arrange(order, r->n, how == SAME_ORDER ? &r->same : how == OWN_ORDER ? &r->own : NULL);
    for (int at = 0; at < r->n && !r->over && !goes(r, at); at++) {
        int i = order[at], err = begin(r, i, how == RISING ? at : pick(&r->own, 5));
        CHECK(err == 0 || (is_an_end(err) && r->turn >= r->board->last));
        r->over |= err != 0;
        pause_by_chance(r, 40);
        if (r->item[i].op && r->item[i].canceller == r->rank && pick(&r->own, 2))
            CHECK(tally_op_cancel(r->item[i].op, "at once") == 0);
    }
}

static void finish_all(struct rank *r)
{
    int order[MOST];
    for (int i = 0; i < r->n; i++)
        if (r->item[i].op && r->item[i].canceller == r->rank)
            CHECK(tally_op_cancel(r->item[i].op, "later") == 0);
    pause_by_chance(r, 2);
    arrange(order, r->n, &r->own);
    for (int at = 0; at < r->n; at++)
        finish(r, order[at]);
}

/* All are here, so no rank can lack anything of this turn when another goes in the next one.  Only of the barrier itself
 * somebody may still lack the answer. */
static void meet(struct rank *r)
{
    tally_op *op = NULL;
    int err = tally_barrier(r->c, NULL, NULL, &op);
    err = err ? err : tally_op_wait(op, -1);
    CHECK(err == 0 || (is_an_end(err) && r->turn + 1 >= r->board->last));
    r->over |= err != 0;
    tally_op_free(op);
}

static void take_turn(struct rank *r)
{
    int few = pick(&r->same, r->turn % 3 ? 12 : MOST);
    r->n = r->flags & FULL_POOL ? MOST - few : 1 + few; /* there they are to wait for windows */
    plan(r);
    begin_all(r);
    finish_all(r);
    if (r->rank == r->board->victim && r->turn == r->board->last)
        r->over = true;
    else if (!r->over)
        meet(r);
    if (r->over)
        job_sleep_ms(30); /* for who touches a buffer all the same */
    for (int i = 0; i < r->n; i++) {
        struct item *t = &r->item[i];
        const atomic_int *outcome = r->board->outcome[r->turn][i];
        if (!t->op)
            continue;
        CHECK(r->over || atomic_load(&outcome[r->rank]) == atomic_load(&outcome[0]));
        CHECK(is_untouched(t));
        tally_op_free(t->op);
    }
}

/* --- a job --------------------------------------------------------------------------------------- */

/* Small sums, each waited for before the next: while the other thread has nothing under way, and once it is done, they go
 * without a round (alone.c). */
static void *sum_one_by_one(void *arg)
{
    enum { CALLS = UNDER_SANITIZER ? 200 : 1000, MOST_COUNT = 70000 };
    static float x[MOST_COUNT];
    const struct rank *r = arg;
    uint64_t same = r->board->seed;
    for (int i = 0; i < CALLS; i++) {
        tally_op *op;
        int n = pick(&same, pick(&same, 20) ? 1030 : MOST_COUNT);
        bool cancels = pick(&same, 50) == 0, mine = pick(&same, r->size) == r->rank;
        for (int k = 0; k < n; k++)
            x[k] = (float)(r->rank + i + k % 5);
        CHECK(tally_push_pull(r->c, "s", x, x, (size_t)n, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
        if (cancels && mine)
            CHECK(tally_op_cancel(op, "second thread") == 0);
        int err = tally_op_wait(op, -1);
        CHECK(err == 0 || (err == -ECANCELED && cancels));
        for (int k = 0; k < n && !err; k++)
            CHECK(x[k] == (float)(r->size * (r->size - 1) / 2 + r->size * (i + k % 5)));
        tally_op_free(op);
    }
    return NULL;
}

static void prepare(struct rank *r)
{
    enum { LITTLE = 96 << 20 };
    static const struct rlimit little = {LITTLE, LITTLE};
    void *at;
    if (r->flags & FULL_POOL)
        CHECK(setrlimit(RLIMIT_FSIZE, &little) == 0);
    if (r->flags & STAGED && r->rank == 1)
        job_forbid_reaching();
    CHECK(tally_comm_open(NULL, &r->c) == 0);
    r->size = tally_comm_size(r->c);
    int members[] = {0, r->size - 1};
    if (r->flags & GROUPS && (r->rank == 0 || r->rank == r->size - 1))
        CHECK(tally_group_create(r->c, "ends", members, 2, &r->group) == 0);
    for (int i = 0; i < POOLED; i++)
        CHECK(tally_alloc(r->c, sizeof heap[i], &r->pool[i]) == 0);
    if (!r->c->local)
        return;
    for (uint64_t bytes = LITTLE; r->flags & FULL_POOL && bytes >= 4096;)
        if (tly_pool_borrow(r->c->local->segment, bytes, &at) != 0)
            bytes /= 2;
    if (r->flags & FEW_WORKS && pick(&r->own, 2))
        r->c->local->free_count = 4 + (uint32_t)pick(&r->own, 12);
    if (r->flags & SECOND)
        r->c->local->linger_ns = TLY_MS; /* or on a busy machine the others hardly ever come in time */
}

static uint32_t free_works(const struct rank *r)
{
    if (!r->c->local)
        return 0;
    pthread_mutex_lock(&r->c->local->lock);
    uint32_t n = r->c->local->free_count;
    pthread_mutex_unlock(&r->c->local->lock);
    return n;
}

static int stress(int rank, void *arg)
{
    struct board *b = arg;
    static struct rank r; /* large */
    pthread_t second;
    r = (struct rank){.board = b, .rank = rank, .flags = b->way->flags, .same = b->seed};
    r.own = b->seed * 1000003 + (uint64_t)rank;
    fprintf(stderr, "%s, seed %d\n", b->way->name, (int)b->seed); /* is shown if it fails */
    prepare(&r);
    uint32_t works = free_works(&r);
    meet(&r); /* nobody goes before all have come */
    if (r.flags & SECOND)
        CHECK(pthread_create(&second, NULL, sum_one_by_one, &r) == 0);
    for (; r.turn < TURNS && !r.over; r.turn++)
        take_turn(&r);
    if (r.flags & SECOND)
        CHECK(pthread_join(second, NULL) == 0);
    CHECK(r.over == !!(r.flags & ENDS));
    CHECK(r.over || free_works(&r) == works); /* at an end those are lost at which somebody may still look */
    CHECK(tally_comm_close(r.c) == 0);
    for (int i = 0; i < POOLED; i++)
        CHECK(tally_free(r.pool[i]) == 0);
    return 0;
}

static void test_way(void **state)
{
    const struct way *way = *state;
    const char *more = getenv("TALLY_STRESS");
    bool part = job_long() > 0 && !more;
    int first = part && UNDER_SANITIZER ? 2 : 1; /* a sanitizer is slow: it gets the part's own seed alone */
    int last = more ? atoi(more) : job_long() == JOB_ALL ? 4 : part ? 2 : 1;
    for (int i = first; i <= last; i++) {
        int seed = i == 2 && part ? 1 + job_long() : i;
        struct board *b = job_shared(sizeof *b);
        uint64_t s = (uint64_t)seed;
        int ranks = way->machine[RANKS - 1] ? RANKS : 2 + pick(&s, RANKS - 1);
        b->way = way;
        b->seed = (uint64_t)seed;
        b->victim = way->flags & ENDS ? pick(&s, ranks) : -1;
        b->last = way->flags & ENDS ? pick(&s, TURNS) : INT_MAX;
        b->strike = pick(&s, MOST);
        b->drops = pick(&s, 2);
        struct job j = {.ranks = ranks,
                        .machine = way->machine,
                        .main = stress,
                        .arg = b,
                        .settings = {"TALLY_TIMEOUT=60", way->setting}};
        job_start(&j);
        job_finish(&j);
        job_clear(&j);
    }
}

int main(void)
{
    enum { CALLS = CANCELS | MISFITS | GROUPS };
    static const int together[JOB_MOST_RANKS], pairs[JOB_MOST_RANKS] = {0, 0, 1, 1};
    static struct way ways[] = {
        {"together", CALLS, together, NULL},
        {"full pool", FULL_POOL, together, NULL},
        {"few work entries", FEW_WORKS | CALLS, together, NULL},
        {"two threads", SECOND | CALLS, together, NULL},
        {"staged", STAGED | CALLS, together, NULL},
        {"all at once", FULL_POOL | FEW_WORKS | SECOND | CALLS, together, NULL},
        {"teams", SECOND | CALLS, pairs, NULL},
        {"through the service", SECOND | CALLS, together, "TALLY_LOCAL=off"},
        {"one is killed", KILLED | CALLS, together, NULL},
        {"one is killed, full pool", KILLED | FULL_POOL, together, NULL},
        {"one of a team is killed", KILLED | CALLS, pairs, NULL},
        {"one leaves", LEAVES | CALLS, together, NULL},
        {"one leaves, full pool", LEAVES | FULL_POOL, together, NULL},
        {"one of a team leaves", LEAVES | CALLS, pairs, NULL},
    };
    enum { WAYS = sizeof ways / sizeof *ways };
    struct CMUnitTest tests[WAYS];
    for (int i = 0; i < WAYS; i++)
        tests[i] =
            (struct CMUnitTest){.name = ways[i].name, .test_func = test_way, .initial_state = &ways[i]};
    return cmocka_run_group_tests_name("stress", tests, NULL, NULL);
}
