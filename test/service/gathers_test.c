/* gathers_test.c - allgathers into the caller's memory, and through which services data of allgathers, broadcasts and
 * reduces goes: worker machines' alone, by what their cards carry; what ranks that disagree are told. */
#include <errno.h>
#include <setjmp.h>
#include <string.h>

#include "job.h"

#include <cmocka.h>

enum { RANKS = 4, SERVICES = 6, MOST = 300000, PART = 16 << 10 };

static int32_t x[MOST], y[RANKS * MOST];

static void leave(tally_comm *c)
{
    job_barrier(c);
    CHECK(tally_comm_status(c, NULL) == 0);
    CHECK(tally_comm_close(c) == 0);
}

static int32_t gives(int rank, size_t i, int round)
{
    return (int32_t)i * 7 + rank * 100003 + round * 17;
}

/* --- into the caller's memory --------------------------------------------------------------------- */

static void gather(tally_comm *c, const char *name, tally_group *g, int place, int n, size_t count, int round)
{
    struct tally_options o = job_in(g);
    bool in_place = round % 2;
    int32_t *from = in_place ? y + (size_t)place * count : x;
    const int64_t *firsts;
    const void *data;
    size_t bytes;
    tally_op *op;
    memset(y, 0xa5, (size_t)n * count * sizeof *y);
    for (size_t i = 0; i < count; i++)
        from[i] = gives(place, i, round);
    CHECK(tally_allgather_into(c, name, from, y, count, TALLY_INT32, &o, &op) == 0);
    CHECK(tally_op_wait(op, -1) == 0);
    for (int r = 0; r < n; r++)
        for (size_t i = 0; i < count; i++)
            CHECK(y[(size_t)r * count + i] == gives(r, i, round));
    CHECK(tally_op_gathered(op, &data, &bytes, &firsts) == 0);
    CHECK(data == y && bytes == (size_t)n * count * sizeof *y);
    for (int r = 0; r < n; r++)
        CHECK(firsts[r] == (int64_t)count);
    tally_op_free(op);
}

static int gather_all(int rank, void *arg)
{
    tally_comm *c = job_open();
    /* A sanitizer looks at each element that the ranks write and check. */
    static const size_t counts[] = {0, 1, 1000, PART / 4, PART + 3, UNDER_SANITIZER ? 60000 : MOST};
    const int ranks[] = {3, 0, 1};
    static const int place[] = {1, 2, -1, 0};
    tally_group *g;
    for (int round = 0; round < 4; round++)
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
            gather(c, round < 2 ? NULL : "again", NULL, rank, RANKS, counts[i], round);
    if (place[rank] >= 0) {
        CHECK(tally_group_create(c, "three", ranks, 3, &g) == 0);
        for (int round = 0; round < 2; round++)
            gather(c, NULL, g, place[rank], 3, PART * 3 + 1, round);
    }
    leave(c);
    return 0;
}

static void test_into(void **state)
{
    static const int pairs[] = {0, 0, 1, 1}, one[] = {0, 0, 0, 0};
    job_run(&(struct job){.ranks = RANKS, .main = gather_all, .settings = {"TALLY_PART_BYTES=16K"}});
    job_run(&(
        struct job){.ranks = RANKS, .tallyds = 2, .main = gather_all, .settings = {"TALLY_PART_BYTES=16K"}});
    job_run(&(struct job){
        .ranks = RANKS, .machine = pairs, .main = gather_all, .settings = {"TALLY_PART_BYTES=16K"}});
    job_run(&(struct job){.ranks = RANKS, .machine = one, .main = gather_all});
    job_run(&(struct job){.ranks = RANKS,
                          .machine = one,
                          .main = gather_all,
                          .settings = {"TALLY_LOCAL=off", "TALLY_PART_BYTES=16K"}});
    job_run(&(struct job){.ranks = RANKS,
                          .main = gather_all,
                          .settings = {"TALLY_PART_BYTES=16K", "TALLY_WINDOW_PARTS=1",
                                       "TALLY_CREDIT_BYTES=4096", "TALLY_MEMORY=1M"}});
}

/* --- who disagrees is told ------------------------------------------------------------------------- */

static void disagree(tally_comm *c, int rank, int way, size_t count)
{
    static const char *const says[][2] = {
        {" float32 [", "] on ranks 0-1, 3, ["},
        {" float32 [", "] on ranks 0-1, 3, int32 on rank 2"},
        {" float32 [", "] on ranks 0-1, 3, tally_allgather float32 [*] on rank 2"},
        {" float32 [", "] on ranks 0-1, 3, [2, "},
    };
    bool odd = rank == 2;
    int64_t shape[] = {2, (int64_t)count / 2};
    struct tally_options o = job_in(NULL);
    tally_op *op;
    int err;
    if (odd && way == 3) {
        o.shape = shape;
        o.ndim = 2;
    }
    if (odd && way == 2)
        err = tally_allgather(c, "d", x, count, TALLY_FLOAT32, &o, &op);
    else
        err = tally_allgather_into(c, "d", x, y, odd && way == 0 ? count / 2 : count,
                                   odd && way == 1 ? TALLY_INT32 : TALLY_FLOAT32, &o, &op);
    CHECK(err == 0);
    CHECK(tally_op_wait(op, -1) == -EINVAL);
    CHECK_HOLDS(tally_op_error(op), "'d': the ranks disagree: tally_allgather");
    CHECK_HOLDS(tally_op_error(op), " on rank 2");
    CHECK_HOLDS(tally_op_error(op), says[way][0]);
    CHECK_HOLDS(tally_op_error(op), says[way][1]);
    tally_op_free(op);
}

static int disagree_in_every_way(int rank, void *arg)
{
    tally_comm *c = job_open();
    tally_op *op;
    for (int way = 0; way < 4; way++) {
        disagree(c, rank, way, 4);
        disagree(c, rank, way, MOST);
    }
    gather(c, "d", NULL, rank, RANKS, 20000, 0); /* the name is as good as before */
    if (rank == 1)
        CHECK(tally_refuse(c, "d", TALLY_ALLGATHER, NULL, "a tensor of strings") == 0);
    else {
        CHECK(tally_allgather_into(c, "d", x, y, 20000, TALLY_INT32, NULL, &op) == 0);
        CHECK(tally_op_wait(op, -1) == -EINVAL);
        CHECK_HOLDS(tally_op_error(op), "rank 1 refuses: a tensor of strings");
        tally_op_free(op);
    }
    CHECK(tally_allgather_into(c, "e", NULL, y, 1, TALLY_INT32, NULL, &op) == -EINVAL);
    CHECK(tally_allgather_into(c, "e", x, NULL, 1, TALLY_INT32, NULL, &op) == -EINVAL);
    CHECK(tally_allgather_into(c, "e", x, y, (size_t)1 << 57, TALLY_INT32, NULL, &op) == -EINVAL);
    leave(c);
    return 0;
}

static void test_disagreement(void **state)
{
    static const int one[] = {0, 0, 0, 0};
    job_run(&(struct job){
        .ranks = RANKS, .tallyds = 1, .main = disagree_in_every_way, .settings = {"TALLY_PART_BYTES=16K"}});
    job_run(&(struct job){.ranks = RANKS, .machine = one, .main = disagree_in_every_way});
}

/* --- through which services ------------------------------------------------------------------------ */

static const char *const mbits[] = {"400M", "200M", "300M",
                                    "100M"}; /* of the ranks' cards, where they differ */

/* Bytes that each service has relayed or summed so far, as it says. */
static void look(tally_comm *c, int services, uint64_t *bytes)
{
    char *json;
    int n = 0;
    job_barrier(c);
    CHECK(tally_comm_report(c, 60000, &json) == 0);
    for (const char *at = json; (at = strstr(at, "\"bytes_summed\": ")); at++) {
        CHECK(n < services);
        bytes[n++] = strtoull(at + 16, NULL, 10);
    }
    CHECK(n == services);
    free(json);
    job_barrier(c);
}

/* Since the last look: `due` and no more than `slack` off. */
static void went(tally_comm *c, int services, uint64_t *before, const double *due, double slack)
{
    uint64_t now[SERVICES];
    look(c, services, now);
    for (int i = 0; i < services; i++) {
        double off = (double)(now[i] - before[i]) - due[i];
        if (off > slack || off < -slack)
            fprintf(stderr, "service %d: %llu bytes, not %.0f\n", i, (unsigned long long)(now[i] - before[i]),
                    due[i]);
        CHECK(off <= slack && off >= -slack);
        before[i] = now[i];
    }
}

static int count_bytes(int rank, void *arg)
{
    bool alike = *(const bool *)arg;
    if (!alike)
        setenv("TALLY_BANDWIDTH", mbits[rank], 1);
    tally_comm *c = job_open();
    int services = tally_comm_service_count(c);
    static const size_t uneven[] = {280000, 100000, 250000, 60000};
    const double whole = MOST * sizeof *x, speed[] = {4, 2, 3, 1};
    uint64_t seen[SERVICES];
    tally_op *op;
    look(c, services, seen);
    double own[SERVICES] = {whole, whole, whole, whole}, mixed[SERVICES] = {0};
    /* m + 2 c = T b, where c adds up to 4 m: T = 12 m / 10 m. */
    for (int i = 0; i < RANKS && !alike; i++)
        own[i] = (speed[i] * 1.2 - 1) / 2 * whole;
    gather(c, NULL, NULL, rank, RANKS, MOST, 0);
    went(c, services, seen, own, alike ? 0 : 2 * PART);
    for (int root = 0; root < RANKS; root++) {
        double relays[SERVICES] = {0}, all = 10 - speed[root];
        for (int i = 0; i < RANKS; i++)
            relays[i] = i == root ? 0 : alike ? whole / 3 : whole * speed[i] / all;
        CHECK(tally_broadcast(c, NULL, x, MOST, TALLY_INT32, root, NULL, &op) == 0 && job_ends(op) == 0);
        went(c, services, seen, relays, 2.5 * PART); /* part 0's service depends on its name alone */
    }
    /* The same through the list of first dimensions; each piece's own service, where cards are alike, has too much of the
     * larger ones: they are spread.  (m + 2 c) / b is the same for all: c = (T b - m) / 2. */
    double all = 0, level = 0;
    for (int i = 0; i < RANKS; i++)
        all += (double)uneven[i] * sizeof *x;
    level = 3 * all / (alike ? 4 : 10);
    for (int i = 0; i < RANKS; i++)
        mixed[i] = (level * (alike ? 1 : speed[i]) - (double)uneven[i] * sizeof *x) / 2;
    for (size_t i = 0; i < uneven[rank]; i++)
        x[i] = gives(rank, i, 5);
    CHECK(tally_allgather(c, NULL, x, uneven[rank], TALLY_INT32, NULL, &op) == 0 &&
          tally_op_wait(op, -1) == 0);
    const void *data;
    const int64_t *firsts;
    size_t bytes;
    CHECK(tally_op_gathered(op, &data, &bytes, &firsts) == 0);
    const int32_t *at = data;
    for (int r = 0; r < RANKS; r++)
        for (size_t i = 0; i < uneven[r]; i++)
            CHECK(*at++ == gives(r, i, 5));
    tally_op_free(op);
    went(c, services, seen, mixed, 2.5 * PART);
    leave(c);
    return 0;
}

static void test_relays(void **state)
{
    bool alike = true;
    struct job j = {.ranks = RANKS,
                    .tallyds = 2,
                    .main = count_bytes,
                    .arg = &alike,
                    .settings = {"TALLY_PART_BYTES=16K", "TALLY_BANDWIDTH=400M"}};
    job_run(&j);
    alike = false;
    job_run(&j);
}

/* The root's card receives every sum: its service sums nothing. */
static int count_sums(int rank, void *arg)
{
    tally_comm *c = job_open();
    int services = tally_comm_service_count(c);
    const double whole = MOST * sizeof *x;
    uint64_t seen[SERVICES];
    tally_op *op;
    look(c, services, seen);
    for (int root = 0; root < RANKS; root++) {
        double sums[SERVICES] = {0};
        for (int i = 0; i < RANKS; i++)
            sums[i] = i == root ? 0 : whole / 3;
        for (size_t i = 0; i < MOST; i++)
            x[i] = gives(rank, i, root);
        CHECK(tally_reduce(c, NULL, x, y, MOST, TALLY_INT32, TALLY_SUM, root, NULL, &op) == 0 &&
              job_ends(op) == 0);
        for (size_t i = 0; i < MOST && rank == root; i++)
            CHECK(y[i] == gives(0, i, root) + gives(1, i, root) + gives(2, i, root) + gives(3, i, root));
        went(c, services, seen, sums, 2.5 * PART);
    }
    leave(c);
    return 0;
}

static void test_reduce(void **state)
{
    job_run(&(struct job){
        .ranks = RANKS, .main = count_sums, .settings = {"TALLY_PART_BYTES=16K", "TALLY_BANDWIDTH=400M"}});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_into),
        cmocka_unit_test(test_disagreement),
        cmocka_unit_test(test_relays),
        cmocka_unit_test(test_reduce),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
