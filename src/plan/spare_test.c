/* spare_test.c - which CPU machines bring nothing, against Eq. 6 and against leaving out each number of them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>

#include "plan/plan.h"

enum { MOST = 24 };

typedef struct tly_plan_machine machine;

static int alike(machine *m, int n, int k, double bandwidth)
{
    for (int i = 0; i < n + k; i++)
        m[i] = (machine){.ranks = i < n, .card = (uint32_t)i, .bandwidth = bandwidth};
    return n + k;
}

static int spare(int n, int k)
{
    machine m[2 * MOST];
    return tly_plan_spare(TLY_SPLIT_OPTIMAL, alike(m, n, k, 1.25e9), m);
}

static void two_machines_need_none(void **state)
{
    assert_int_equal(spare(2, 0), 0);
    for (int k = 1; k <= 5; k++)
        assert_int_equal(spare(2, k), k);
    assert_int_equal(spare(1, 3), 3); /* nothing crosses the network */
}

static void more_than_the_workers_are_too_many(void **state)
{
    assert_int_equal(spare(3, 3), 0);
    assert_int_equal(spare(3, 5), 2);
    assert_int_equal(spare(4, 12), 8);
    assert_int_equal(spare(4, 2), 0);
}

/* For all n and k: as many as can go before Eq. 6 gives 1% more. */
static void as_equation_6_has_it(void **state)
{
    for (int n = 1; n <= MOST; n++)
        for (int k = 0; k <= MOST; k++) {
            int due = 0;
            while (due < k && tly_plan_time(n, k - due - 1, 1, 1) <= 1.01 * tly_plan_time(n, k, 1, 1))
                due++;
            assert_int_equal(spare(n, k), due);
        }
}

/* A card that is not known is as slow as the slowest; if none is known all are alike. */
static void unknown_bandwidths(void **state)
{
    machine m[2 * MOST];
    assert_int_equal(tly_plan_spare(TLY_SPLIT_OPTIMAL, alike(m, 3, 5, 0), m), 2);
    m[1].bandwidth = 5;
    assert_int_equal(tly_plan_spare(TLY_SPLIT_OPTIMAL, 8, m), 2);
}

/* A card of a tenth of the others' speed is worth less than 1% where it is one of many; it goes, not a fast one. */
static void the_slow_one_goes(void **state)
{
    machine m[2 * MOST];
    int count = alike(m, 8, 4, 10);
    m[8].bandwidth = .2;
    assert_int_equal(tly_plan_spare(TLY_SPLIT_OPTIMAL, count, m), 1);
    m[8].bandwidth = 10;
    assert_int_equal(tly_plan_spare(TLY_SPLIT_OPTIMAL, count, m), 0);
}

/* Two tallyd in containers of one host share its card: the second brings nothing, and the first stays. */
static void two_behind_one_card(void **state)
{
    machine m[2 * MOST];
    int count = alike(m, 4, 2, 10);
    m[5].card = 4;
    m[4].bandwidth = 0; /* the other one knows it */
    assert_int_equal(tly_plan_spare(TLY_SPLIT_OPTIMAL, count, m), 1);
}

/* Where sums bind, two machines do need others. */
static void slow_sums_need_help(void **state)
{
    machine m[2 * MOST];
    int count = alike(m, 2, 1, 10);
    m[0].sum_rate = m[1].sum_rate = 4;
    assert_int_equal(tly_plan_spare(TLY_SPLIT_OPTIMAL, count, m), 0);
}

static void other_splits(void **state)
{
    machine m[2 * MOST];
    int count = alike(m, 3, 5, 1);
    assert_int_equal(tly_plan_spare(TLY_SPLIT_ALL_REDUCE, count, m), 5);
    assert_int_equal(tly_plan_spare(TLY_SPLIT_SERVER, count, m), 2);
    assert_int_equal(tly_plan_spare(TLY_SPLIT_SERVER, alike(m, 3, 0, 1), m), 0);
    assert_int_equal(tly_plan_spare(TLY_SPLIT_OPTIMAL, 0, m), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_machines_need_none), cmocka_unit_test(more_than_the_workers_are_too_many),
        cmocka_unit_test(as_equation_6_has_it),   cmocka_unit_test(unknown_bandwidths),
        cmocka_unit_test(the_slow_one_goes),      cmocka_unit_test(two_behind_one_card),
        cmocka_unit_test(slow_sums_need_help),    cmocka_unit_test(other_splits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
