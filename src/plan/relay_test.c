/* relay_test.c - who relays an all-gather and a broadcast, and who sums a reduce: bounds are reached for cards that differ,
 * shares add up, spare machines relay nothing, and what is dealt part by part stays within a part of the plan. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <string.h>

#include "plan/plan.h"

enum { MOST = 24, RUNS = 5000 };

typedef struct tly_plan_machine machine;

static uint64_t random_state = 88172645463325252u;
static uint64_t rnd(uint64_t limit)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state % limit;
}

struct job {
    int n, count;
    machine m[MOST];
    uint64_t bytes[MOST], all;
};

/* One rank a machine, some spare machines, in any order of speeds; pieces of any size, some empty. */
static void any(struct job *j, bool alike)
{
    j->n = 2 + (int)rnd(10);
    j->count = j->n + (int)rnd(10);
    j->all = 0;
    for (int i = 0; i < j->count; i++) {
        double b = alike ? 3 : rnd(2) ? 1 + (double)rnd(4) : 0.2 + (double)rnd(1000) / 100;
        j->m[i] = (machine){.ranks = i < j->n, .card = (uint32_t)i, .bandwidth = b};
        j->bytes[i] = i >= j->n ? 0 : alike ? 7777777 : rnd(4) ? 1 + rnd(20000000) : rnd(2) * 1000;
        j->all += j->bytes[i];
    }
}

/* The least seconds of a broadcast of so many bytes. */
static double least_of_broadcast(const struct job *j, int root, uint64_t bytes)
{
    struct tly_plan_load least[MOST];
    uint64_t at[MOST] = {0};
    at[root] = bytes;
    return tly_plan_least_gather(j->count, j->m, at, least);
}

/* What a worker's card sends in an all-gather: its piece once, and n - 2 copies of what its service relays. */
static double sends(const struct job *j, const uint64_t *through, int i)
{
    return (double)j->bytes[i] + (double)(j->n - 2) * (double)through[i];
}

static void all_gather_reaches_its_bound(void **state)
{
    struct job j;
    struct tly_plan_load least[MOST];
    uint64_t share[MOST];
    for (int run = 0; run < RUNS; run++) {
        any(&j, run % 10 == 0);
        double t = tly_plan_least_gather(j.count, j.m, j.bytes, least);
        assert_int_equal(tly_plan_all_gather(j.count, j.m, j.bytes, share), 0);
        uint64_t sum = 0;
        for (int i = 0; i < j.count; i++) {
            sum += share[i];
            if (i >= j.n)
                assert_int_equal(share[i], 0);
            else if (sends(&j, share, i) > t * j.m[i].bandwidth + j.count * (double)j.n)
                fail_msg("run %d: machine %d of %d sends %.0f, %.0f are allowed", run, i, j.n,
                         sends(&j, share, i), t * j.m[i].bandwidth);
            if (run % 10 == 0)
                assert_int_equal(share[i], j.bytes[i]); /* machines alike keep to their own */
        }
        assert_int_equal(sum, j.all);
    }
}

/* Those who relay are equally busy, and nobody else is less so: the shares are the only ones. */
static void all_gather_levels_cards(void **state)
{
    struct job j;
    uint64_t share[MOST];
    for (int run = 0; run < RUNS; run++) {
        any(&j, false);
        if (j.n == 2 || j.all < 1000000)
            continue;
        tly_plan_all_gather(j.count, j.m, j.bytes, share);
        double level = 0;
        for (int i = 0; i < j.n; i++)
            if (share[i] > 100)
                level = fmax(level, sends(&j, share, i) / j.m[i].bandwidth);
        for (int i = 0; i < j.n; i++)
            assert_true(sends(&j, share, i) / j.m[i].bandwidth > level * (1 - 1e-3));
    }
}

/* n-th parts of all pieces before any piece's next, as they are sent. */
static void all_gather_is_dealt_as_planned(void **state)
{
    static struct tly_relay r;
    struct job j;
    struct tly_plan_load least[MOST];
    const uint32_t part = 32 << 10;
    for (int run = 0; run < RUNS; run++) {
        any(&j, run % 10 == 0);
        uint64_t share[MOST], through[MOST] = {0}, most = 0;
        bool own = true;
        tly_plan_all_gather(j.count, j.m, j.bytes, share);
        assert_int_equal(tly_relay_init(&r, j.count, j.m, j.bytes), 0);
        for (int i = 0; i < j.n; i++)
            most = j.bytes[i] > most ? j.bytes[i] : most;
        for (uint64_t at = 0; at < most; at += part)
            for (int i = 0; i < j.n; i++) {
                if (at >= j.bytes[i])
                    continue;
                uint32_t length = (uint32_t)(j.bytes[i] - at < part ? j.bytes[i] - at : part);
                int to = tly_relay_next(&r, i, length);
                assert_in_range(to, 0, j.n - 1);
                own &= to == i;
                through[to] += length;
            }
        double t = tly_plan_least_gather(j.count, j.m, j.bytes, least);
        for (int i = 0; i < j.n; i++)
            if (sends(&j, through, i) > t * j.m[i].bandwidth + (double)(j.n - 1) * part)
                fail_msg("run %d: machine %d of %d sends %.0f, %.0f are allowed and a part's %d", run, i, j.n,
                         sends(&j, through, i), t * j.m[i].bandwidth, (j.n - 2) * (int)part);
        assert_true(own || run % 10);
    }
}

static void broadcast_leaves_out_the_root(void **state)
{
    struct job j;
    uint32_t w[MOST];
    for (int run = 0; run < RUNS; run++) {
        any(&j, run % 10 == 0);
        int root = (int)rnd((uint64_t)j.n);
        double total = 0, t = least_of_broadcast(&j, root, 1);
        assert_int_equal(tly_plan_broadcast(j.count, j.m, root, w), 0);
        for (int i = 0; i < j.count; i++)
            total += w[i];
        assert_true(total > 0);
        for (int i = 0; i < j.count; i++) {
            if (i == root || i >= j.n)
                assert_int_equal(w[i], 0);
            else if (run % 10 == 0)
                assert_int_equal(w[i], 1);
            else
                assert_true((j.n - 2) * w[i] / total <= t * j.m[i].bandwidth * (1 + 1e-6));
        }
    }
}

/* And part by part, wherever its name lets it begin. */
static void broadcast_is_dealt_as_planned(void **state)
{
    static struct tly_dealer d;
    struct job j;
    uint32_t w[MOST];
    const uint32_t part = 32 << 10;
    for (int run = 0; run < RUNS; run++) {
        any(&j, run % 10 == 0);
        uint64_t through[MOST] = {0}, parts = 1 + rnd(2000);
        int root = (int)rnd((uint64_t)j.n);
        tly_plan_broadcast(j.count, j.m, root, w);
        tly_dealer_init_at(&d, j.count, w, (uint64_t)run * 0x9e3779b97f4a7c15u);
        for (uint64_t i = 0; i < parts; i++)
            through[tly_dealer_next(&d, part)] += part;
        double t = least_of_broadcast(&j, root, parts * part);
        for (int i = 0; i < j.n; i++)
            assert_true((double)(j.n - 2) * (double)through[i] <=
                        t * j.m[i].bandwidth + (double)(j.n - 1) * part);
    }
}

/* Bytes each way of machine i's card for one byte of a reduce. */
static double reduces(const struct job *j, const double *x, int root, int i)
{
    if (i >= j->n)
        return j->n * x[i];
    if (i == root)
        return 1 + (j->n - 2) * x[i]; /* all sums of others, all inputs of its own */
    return fmax(1, (j->n - 1) * x[i]);
}

/* Can it be done in t?  The most that each may sum then. */
static bool feasible(const struct job *j, int root, const uint32_t *spare, double t)
{
    double sum = 0;
    for (int i = 0; i < j->count; i++) {
        double b = j->m[i].bandwidth;
        if (i < j->n && t * b < 1)
            return false;
        if (i == root)
            sum += j->n == 2 ? 1 : (t * b - 1) / (j->n - 2);
        else if (i < j->n || spare[i])
            sum += t * b / (i < j->n ? j->n - 1 : j->n);
    }
    return sum >= 1;
}

static void no_reduce_is_faster(void **state)
{
    struct job j;
    uint32_t w[MOST], spare[MOST];
    for (int run = 0; run < RUNS; run++) {
        any(&j, run % 10 == 0);
        int root = (int)rnd((uint64_t)j.n);
        for (int i = 0; i < j.count; i++)
            spare[i] = i >= j.n && rnd(4);
        assert_int_equal(tly_plan_reduce(j.count, j.m, root, spare, w), 0);
        double x[MOST], total = 0, t = 0, low = 0, high = 1000;
        for (int i = 0; i < j.count; i++)
            total += w[i];
        for (int i = 0; i < j.count; i++) {
            x[i] = w[i] / total;
            t = fmax(t, reduces(&j, x, root, i) / j.m[i].bandwidth);
            assert_true(i < j.n || spare[i] || w[i] == 0);
        }
        for (int i = 0; i < 100; i++) {
            double middle = (low + high) / 2;
            if (feasible(&j, root, spare, middle))
                high = middle;
            else
                low = middle;
        }
        if (!(t <= high * (1 + 1e-5)))
            fail_msg("run %d, %d ranks, %d machines: %.9g, the least is %.9g", run, j.n, j.count, t, high);
        if (run % 10 == 0 && j.n > 2) {
            assert_int_equal(w[root], 0);
            assert_true(fabs(t * 3 - 1) < 1e-6); /* one tensor through one card */
        }
    }
}

/* Where each rank gets a copy of its own, what leaves the cards if unit u of all goes through service relay[u]: the copies to
 * the ranks of other machines than the sender's. */
static double busiest(const struct job *j, const int *relay)
{
    double out[MOST] = {0}, t = 0;
    int unit = 0;
    for (int owner = 0; owner < j->count; owner++)
        for (uint64_t i = 0; i < j->bytes[owner]; i++, unit++) {
            out[owner] += relay[unit] != owner; /* to its relay */
            for (int to = 0; to < j->count; to++)
                out[relay[unit]] += to == relay[unit] ? 0 : j->m[to].ranks - (to == owner);
        }
    for (int i = 0; i < j->count; i++)
        t = fmax(t, out[i] / j->m[i].bandwidth);
    return t;
}

/* Of all choices of a worker machine's service for each unit, none is faster than the plan's shares, which are fractions of units. */
static void no_relays_are_faster(void **state)
{
    struct job j;
    uint64_t share[MOST];
    enum { UNIT = 1 << 20, UNITS = 6 };
    for (int run = 0, runs = 0; runs < RUNS / 50; run++) {
        double ranks = 0, t = 0;
        bool relays = true;
        j = (struct job){.n = 2 + (int)rnd(3), .all = UNITS};
        j.count = j.n + (int)rnd(2);
        for (int i = 0; i < j.count; i++) {
            j.m[i] = (machine){.ranks = i < j.n ? 1 + (uint32_t)rnd(3) : 0, .card = (uint32_t)i};
            j.m[i].bandwidth = 1 + (double)rnd(4);
            ranks += j.m[i].ranks;
        }
        for (int i = 0; i < j.n; i++)
            relays &= ranks - j.m[i].ranks > 1;
        if (!relays)
            continue;
        runs++;
        for (int u = 0; u < UNITS; u++)
            j.bytes[rnd((uint64_t)j.n)]++;
        int relay[UNITS] = {0}, choices = 1;
        double best = INFINITY;
        for (int u = 0; u < UNITS; u++)
            choices *= j.n;
        for (int choice = 0; choice < choices; choice++) {
            for (int u = 0, rest = choice; u < UNITS; u++, rest /= j.n)
                relay[u] = rest % j.n;
            best = fmin(best, busiest(&j, relay));
        }
        for (int i = 0; i < j.count; i++)
            j.bytes[i] *= UNIT;
        tly_plan_all_gather(j.count, j.m, j.bytes, share);
        for (int i = 0; i < j.count; i++)
            t = fmax(t, ((double)j.bytes[i] + (ranks - j.m[i].ranks - 1) * (double)share[i]) / UNIT /
                            j.m[i].bandwidth);
        if (!(t <= best * (1 + 1e-5)))
            fail_msg("run %d: %.9g, the least is %.9g", run, t, best);
    }
}

/* Ranks that share a machine, or machines that share a card, leave something to do for all the rest. */
static void odd_jobs_have_shares_too(void **state)
{
    uint64_t share[MOST], bytes[MOST] = {0};
    uint32_t w[MOST], spare[MOST] = {0};
    machine m[4] = {{.ranks = 2, .card = 0}, {.ranks = 2, .card = 1}, {.ranks = 0, .card = 2}};
    bytes[0] = bytes[1] = 1000;
    assert_int_equal(tly_plan_all_gather(3, m, bytes, share), 0); /* no bandwidth is known: all are alike */
    assert_true(share[0] == 1000 && share[1] == 1000 && share[2] == 0);
    tly_plan_broadcast(3, m, 0, w);
    assert_true(w[0] == 0 && w[1] == 1 && w[2] == 0);
    tly_plan_reduce(3, m, 0, spare, w);
    assert_true(w[1] > 0 && w[2] == 0);
    m[1].ranks = 0; /* all ranks of one machine */
    tly_plan_broadcast(3, m, 0, w);
    assert_true(w[0] == 1 && w[1] == 0);
    tly_plan_reduce(3, m, 0, spare, w);
    assert_true(w[0] == 1 && w[1] == 0);
    m[0] = (machine){.ranks = 1,
                     .card = 0,
                     .bandwidth = 4}; /* two containers behind one card, and a machine of its own */
    m[1] = (machine){.ranks = 1, .card = 0, .bandwidth = 4};
    m[2] = (machine){.ranks = 1, .card = 2, .bandwidth = 4};
    m[3] = (machine){.ranks = 1, .card = 3, .bandwidth = 4};
    tly_plan_broadcast(4, m, 3, w);
    assert_int_equal(w[0], w[1]);
    assert_true(fabs(2.0 * w[0] / w[2] - 1) < 1e-6 && w[3] == 0);
    memset(bytes, 0, sizeof bytes);
    assert_int_equal(tly_plan_all_gather(4, m, bytes, share), 0); /* nothing to gather */
    for (int i = 0; i < 4; i++)
        assert_int_equal(share[i], 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_gather_reaches_its_bound),   cmocka_unit_test(all_gather_levels_cards),
        cmocka_unit_test(all_gather_is_dealt_as_planned), cmocka_unit_test(broadcast_leaves_out_the_root),
        cmocka_unit_test(broadcast_is_dealt_as_planned),  cmocka_unit_test(no_reduce_is_faster),
        cmocka_unit_test(no_relays_are_faster),           cmocka_unit_test(odd_jobs_have_shares_too),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
