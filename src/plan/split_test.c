/* split_test.c - the split over machines that differ: Eq. 1, 2 where they are alike, the least time by another
 * way of finding it, and what plan.h promises for cards that are shared and services that are slow. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "plan/plan.h"

enum { MOST = 40 };

typedef struct tly_plan_machine machine;

static uint64_t random_state = 88172645463325252u;
static uint64_t rnd(uint64_t limit)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state % limit;
}

/* n machines with a rank each and k without, behind cards of their own. */
static int alike(machine *m, int n, int k, double bandwidth)
{
    for (int i = 0; i < n + k; i++)
        m[i] = (machine){.ranks = i < n, .card = (uint32_t)i, .bandwidth = bandwidth};
    return n + k;
}

static double share(int count, const uint32_t *weight, int i)
{
    double total = 0;
    for (int j = 0; j < count; j++)
        total += weight[j];
    return weight[i] / total;
}

static void near(double a, double b, double tolerance)
{
    if (!(fabs(a - b) <= tolerance * fmax(fabs(a), fabs(b))))
        fail_msg("%.12g is not %.12g", a, b);
}

static void machines_alike_have_eq_1_and_2(void **state)
{
    machine m[2 * MOST];
    uint32_t w[2 * MOST], due[2 * MOST];
    for (int n = 1; n <= MOST; n++) {
        for (int k = 0; k <= MOST; k++) {
            int count = alike(m, n, k, n % 3 ? 1.25e9 : 0), busiest;
            for (int i = 0; i < n; i++)
                m[i].ranks = 1 + (uint32_t)(k % 2); /* as many pushes from each: the same split */
            assert_int_equal(tly_plan_weights(n, k, due), 0);
            assert_int_equal(tly_plan_split(TLY_SPLIT_OPTIMAL, count, m, w), 0);
            assert_memory_equal(w, due, (size_t)count * sizeof *w);
            /* The general way comes to the same. */
            m[n - 1].sum_rate = 1e30;
            assert_int_equal(tly_plan_split(TLY_SPLIT_OPTIMAL, count, m, w), 0);
            for (int i = 0; i < count; i++)
                assert_true(fabs(share(count, w, i) - share(count, due, i)) < 2e-7);
            if (n % 3 && k % 2 == 0)
                near(tly_plan_cost(count, m, due, &busiest) + 1, tly_plan_time(n, k, 1, 1.25e9) + 1, 1e-15);
        }
    }
}

/* Can everything be done in time T?  Each card's share has a least and a most. */
static bool feasible(int count, const machine *m, double t)
{
    double ranks = 0, least = 0, most = 0;
    for (int i = 0; i < count; i++)
        ranks += m[i].ranks;
    for (int c = 0; c < count; c++) {
        double r = 0, b = INFINITY, low = 0, high = 0;
        if (m[c].card != (uint32_t)c)
            continue;
        for (int i = c; i < count; i++)
            if (m[i].card == (uint32_t)c) {
                r += m[i].ranks;
                b = fmin(b, m[i].bandwidth);
                high += m[i].sum_rate > 0 ? t * m[i].sum_rate / ranks : 1;
            }
        high = fmin(high, 1);
        if (2 * r < ranks)
            high = fmin(high, (t * b - r) / (ranks - 2 * r));
        else if (2 * r > ranks)
            low = fmax(0, (r - t * b) / (2 * r - ranks));
        else if (r > t * b)
            return false;
        if (high < low)
            return false;
        least += low;
        most += high;
    }
    return least <= 1 && most >= 1;
}

static double least_time(int count, const machine *m)
{
    double low = 0, high = 1e9;
    if (feasible(count, m, 1e-15))
        return 0;
    for (int i = 0; i < 200; i++) {
        double middle = low > 0 ? sqrt(low * high) : high / 1e4;
        if (middle < 1e-15)
            break;
        if (feasible(count, m, middle))
            high = middle;
        else
            low = middle;
    }
    return high;
}

static int any(machine *m, bool cards, bool caps)
{
    int n = 1 + (int)rnd(cards && rnd(2) ? 4 : 20), k = (int)rnd(20), count = alike(m, n, k, 1);
    for (int i = 0; i < count; i++) {
        m[i].bandwidth = rnd(3) ? 1 + (double)rnd(4) : 0.05 + (double)rnd(1000) / 50;
        if (i < n && rnd(8) == 0)
            m[i].ranks = 1 + (uint32_t)rnd(8);
        if (caps && rnd(3) == 0)
            m[i].sum_rate = 0.1 + (double)rnd(1000) / 50;
        if (cards && rnd(3) == 0)
            m[i].card = m[rnd((uint64_t)i + 1)].card;
    }
    return count;
}

static void no_split_is_faster(void **state)
{
    machine m[2 * MOST];
    uint32_t w[2 * MOST];
    for (int run = 0; run < 20000; run++) {
        int count = any(m, run & 1, run & 2), busiest = -1;
        assert_int_equal(tly_plan_split(TLY_SPLIT_OPTIMAL, count, m, w), 0);
        double best = least_time(count, m), t = tly_plan_cost(count, m, w, &busiest);
        if (!(t <= best * (1 + 1e-4) + 1e-6) || !(t >= best * (1 - 1e-9)))
            fail_msg("run %d, %d machines: %.9g, the least is %.9g", run, count, t, best);
        assert_in_range(busiest, 0, count - 1);
    }
}

/* Without shared cards: all who sum are busy for one time, at the card or in the sum; who does not is as busy
 * with pushes alone.  So nobody can be relieved without another being busier: the split is the only one. */
static void all_who_sum_end_together(void **state)
{
    machine m[2 * MOST];
    uint32_t w[2 * MOST];
    for (int run = 0; run < 5000; run++) {
        int count = any(m, false, run & 1);
        double ranks = 0, level = 0;
        bool special = false;
        for (int i = 0; i < count; i++)
            ranks += m[i].ranks;
        for (int i = 0; i < count; i++)
            special |= 2 * m[i].ranks >= ranks;
        if (special)
            continue;
        tly_plan_split(TLY_SPLIT_OPTIMAL, count, m, w);
        for (int pass = 0; pass < 2; pass++)
            for (int i = 0; i < count; i++) {
                double x = share(count, w, i), b = m[i].bandwidth, r = m[i].ranks;
                double busy = (r + (ranks - 2 * r) * x) / b;
                if (m[i].sum_rate > 0)
                    busy = fmax(busy, x > 0 ? ranks * x / m[i].sum_rate : 0);
                if (pass == 0 && x > 1e-4)
                    level = fmax(level, busy);
                else if (pass == 1)
                    assert_true(x > 1e-4 ? busy > level * (1 - 1e-3) : x > 0 || busy > level * (1 - 1e-3));
            }
    }
}

static void worked_by_hand(void **state)
{
    machine m[8];
    uint32_t w[8];
    int busiest;
    /* Worker machines of 10, a CPU machine of 25.  T: 4 (10 T - 1) / 2 + 25 T / 4 = 1, T = 3 / 26.25. */
    int count = alike(m, 4, 1, 10);
    m[4].bandwidth = 25;
    assert_int_equal(tly_plan_split(TLY_SPLIT_OPTIMAL, count, m, w), 0);
    near(tly_plan_cost(count, m, w, NULL), 3 / 26.25, 1e-6);
    near(share(count, w, 4), 25 * (3 / 26.25) / 4, 1e-6);
    /* A worker machine of 1 is busy with its own pushes for 1; the CPU machine takes its part of the rest. */
    m[2].bandwidth = 1;
    assert_int_equal(tly_plan_split(TLY_SPLIT_OPTIMAL, count, m, w), 0);
    assert_int_equal(w[2], 0);
    near(tly_plan_cost(count, m, w, &busiest), 1, 1e-9);
    assert_int_equal(busiest, 2);
    near(share(count, w, 0), share(count, w, 1), 1e-6);
    near((1 + 2 * share(count, w, 0)) / 10, 4 * share(count, w, 4) / 25, 1e-5); /* equally busy */
    /* With two worker machines a CPU machine brings nothing, whatever it has. */
    count = alike(m, 2, 1, 10);
    m[2].bandwidth = 100;
    tly_plan_split(TLY_SPLIT_OPTIMAL, count, m, w);
    near(tly_plan_cost(count, m, w, NULL), 0.1, 1e-6);
    /* Two alone share, though one is slower: its card carries as much either way. */
    count = alike(m, 2, 0, 10);
    m[1].bandwidth = 1;
    tly_plan_split(TLY_SPLIT_OPTIMAL, count, m, w);
    assert_int_equal(w[0], w[1]);
    near(tly_plan_cost(count, m, w, &busiest), 1, 1e-9);
    assert_int_equal(busiest, 1);
}

static void one_card_for_several(void **state)
{
    machine m[8];
    uint32_t w[8];
    /* A CPU machine behind a worker's card: a container of its host.  They are one machine. */
    int count = alike(m, 4, 1, 10);
    m[4].card = 1;
    tly_plan_split(TLY_SPLIT_OPTIMAL, count, m, w);
    for (int i = 0; i < 4; i++)
        near(share(count, w, i) + (i == 1 ? share(count, w, 4) : 0), 0.25, 1e-6);
    near(share(count, w, 1), 0.125, 1e-6);
    near(tly_plan_traffic(count, m, w, 1), 1 + 2 * 0.25, 1e-6);
    near(tly_plan_traffic(count, m, w, 4), 1 + 2 * 0.25, 1e-6);
    near(tly_plan_cost_all_reduce(count, m), 2 * 3 / 4.0 / 10, 1e-9);
    /* Three of four ranks behind one card: only the fourth's data crosses it when all is summed there. */
    count = alike(m, 4, 2, 10);
    m[1].card = m[2].card = 0;
    tly_plan_split(TLY_SPLIT_OPTIMAL, count, m, w);
    near(share(count, w, 0) + share(count, w, 1) + share(count, w, 2), 1, 1e-9);
    near(tly_plan_traffic(count, m, w, 0), 1, 1e-9);
    near(tly_plan_cost(count, m, w, NULL), 0.1, 1e-9);
    /* The lowest bandwidth of those behind a card counts. */
    m[2].bandwidth = 2;
    near(tly_plan_cost(count, m, w, NULL), 0.5, 1e-9);
    /* All behind one: nothing crosses, and all services sum. */
    for (int i = 0; i < count; i++)
        m[i].card = 0;
    tly_plan_split(TLY_SPLIT_OPTIMAL, count, m, w);
    for (int i = 0; i < count; i++)
        near(share(count, w, i), 1.0 / count, 1e-6);
    assert_true(tly_plan_cost(count, m, w, NULL) == 0);
    assert_true(tly_plan_cost_all_reduce(count, m) == 0);
}

static void slow_sums_are_spared(void **state)
{
    machine m[16];
    uint32_t w[16];
    int busiest, count = alike(m, 8, 8, 10);
    tly_plan_split(TLY_SPLIT_OPTIMAL, count, m, w);
    assert_int_equal(w[8], 1);
    m[8].sum_rate = 5; /* half of what its card brings */
    tly_plan_split(TLY_SPLIT_OPTIMAL, count, m, w);
    double t = tly_plan_cost(count, m, w, &busiest);
    assert_true(t > 0.1 * (1 + 1e-6));
    assert_true(8 * share(count, w, 8) / 5 <= t * (1 + 1e-5));
    near(share(count, w, 8) * 2, share(count, w, 9), 1e-4);
    for (int i = 0; i < count; i++) /* all are slow: the sums rule, and the cards do not matter */
        m[i].sum_rate = 1;
    tly_plan_split(TLY_SPLIT_OPTIMAL, count, m, w);
    near(tly_plan_cost(count, m, w, NULL), 8 / 16.0, 1e-5);
    near(tly_plan_cost_all_reduce(count, m), 1, 1e-12); /* as in equal shares over the ranks' machines */
    tly_plan_split(TLY_SPLIT_ALL_REDUCE, count, m, w);
    near(tly_plan_cost(count, m, w, NULL), 1, 1e-12);
}

static void unknown_is_as_slow_as_the_slowest(void **state)
{
    machine m[6], sure[6];
    uint32_t w[6], v[6];
    int count = alike(m, 4, 2, 10);
    m[1].bandwidth = m[5].bandwidth = 0;
    m[4].bandwidth = 5;
    memcpy(sure, m, sizeof sure);
    sure[1].bandwidth = sure[5].bandwidth = 5;
    tly_plan_split(TLY_SPLIT_OPTIMAL, count, m, w);
    tly_plan_split(TLY_SPLIT_OPTIMAL, count, sure, v);
    assert_memory_equal(w, v, sizeof w);
    assert_true(isnan(tly_plan_cost(count, m, w, NULL)));
    assert_false(isnan(tly_plan_cost(count, sure, w, NULL)));
    assert_true(isnan(tly_plan_cost_all_reduce(count, m)));
}

static void splits_for_comparison(void **state)
{
    machine m[12];
    uint32_t w[12];
    int count = alike(m, 8, 4, 10);
    assert_int_equal(tly_plan_split(TLY_SPLIT_ALL_REDUCE, count, m, w), 0);
    near(tly_plan_cost(count, m, w, NULL), 2.0 * 7 / (8 * 10), 1e-12);
    near(tly_plan_cost_all_reduce(count, m), 2.0 * 7 / (8 * 10), 1e-12);
    assert_true(w[0] == 1 && w[7] == 1 && w[8] == 0);
    assert_int_equal(tly_plan_split(TLY_SPLIT_SERVER, count, m, w), 0);
    near(tly_plan_cost(count, m, w, NULL), 8.0 / (4 * 10), 1e-12);
    assert_true(w[0] == 0 && w[8] == 1 && w[11] == 1);
    assert_int_equal(tly_plan_split(TLY_SPLIT_SERVER, 8, m, w), -ENOENT);
}

static void nonsense_is_refused(void **state)
{
    static machine m[TLY_MAX_SERVICES + 1];
    static uint32_t w[TLY_MAX_SERVICES + 1];
    alike(m, 3, TLY_MAX_SERVICES - 2, 1);
    assert_int_equal(tly_plan_split(TLY_SPLIT_OPTIMAL, 0, m, w), -EINVAL);
    assert_int_equal(tly_plan_split(TLY_SPLIT_OPTIMAL, TLY_MAX_SERVICES + 1, m, w), -EINVAL);
    assert_int_equal(tly_plan_split(TLY_SPLIT_OPTIMAL, 2, m + 3, w), -EINVAL); /* no rank, foreign cards */
    for (int i = 0; i < 6; i++) {
        alike(m, 3, 2, 1);
        switch (i) {
        case 0:
            m[1].bandwidth = -1;
            break;
        case 1:
            m[1].bandwidth = INFINITY;
            break;
        case 2:
            m[4].sum_rate = NAN;
            break;
        case 3:
            m[2].card = 3;
            break;
        case 4:
            m[1].card = 0;
            m[2].card = 1;
            break;
        case 5:
            m[0].ranks = m[1].ranks = m[2].ranks = 0;
            break;
        }
        assert_int_equal(tly_plan_split(TLY_SPLIT_OPTIMAL, 5, m, w), -EINVAL);
    }
    /* A full house of machines that all differ. */
    alike(m, 500, 524, 1);
    for (int i = 0; i < TLY_MAX_SERVICES; i++)
        m[i].bandwidth = 1 + i % 37 + i / 1000.0;
    assert_int_equal(tly_plan_split(TLY_SPLIT_OPTIMAL, TLY_MAX_SERVICES, m, w), 0);
    near(tly_plan_cost(TLY_MAX_SERVICES, m, w, NULL), least_time(TLY_MAX_SERVICES, m), 1e-3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(machines_alike_have_eq_1_and_2),
        cmocka_unit_test(no_split_is_faster),
        cmocka_unit_test(all_who_sum_end_together),
        cmocka_unit_test(worked_by_hand),
        cmocka_unit_test(one_card_for_several),
        cmocka_unit_test(slow_sums_are_spared),
        cmocka_unit_test(unknown_is_as_slow_as_the_slowest),
        cmocka_unit_test(splits_for_comparison),
        cmocka_unit_test(nonsense_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
