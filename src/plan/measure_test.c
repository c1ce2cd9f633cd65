/* measure_test.c - every card that is to be measured is, with others around it; and cards alike come out alike. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>

#include "plan/plan.h"

enum { MOST = 130 };

static const double nothing[TLY_MAX_SERVICES];

/* Each wanted card is in a middle exactly once, has as many others around it as can be spared, and nobody is in two
 * places. */
static void each_is_once_in_the_middle(void **state)
{
    bool wanted[MOST];
    int middle[MOST], times[MOST], around[MOST];
    for (int count = 3; count <= MOST; count++) {
        for (int every = 1; every <= 9; every += 4) {
            for (int i = 0; i < count; i++) {
                wanted[i] = i % every == 0;
                times[i] = 0;
            }
            int turns = tly_plan_measure_turns(count, wanted);
            assert_in_range(turns, 1, 8);
            for (int t = 0; t < turns; t++) {
                int groups = 0, idle = 0;
                for (int i = 0; i < count; i++)
                    middle[i] = -7, around[i] = 0;
                tly_plan_measure_groups(count, wanted, nothing, t, middle);
                for (int i = 0; i < count; i++) {
                    assert_in_range(middle[i] + 1, 0, count);
                    groups += middle[i] == i;
                    times[i] += middle[i] == i;
                    idle += middle[i] == -1;
                    if (middle[i] >= 0 && middle[i] != i) {
                        assert_int_equal(middle[middle[i]], middle[i]);
                        around[middle[i]]++;
                    }
                }
                assert_true(groups > 0);
                for (int i = 0; i < count; i++)
                    if (middle[i] == i) {
                        int fair = (count - groups) / groups;
                        assert_in_range(around[i], fair < 7 ? fair : 7, 7);
                    }
                assert_true(idle == 0 || idle == count - 8 * groups);
            }
            for (int i = 0; i < count; i++)
                assert_int_equal(times[i], wanted[i]);
        }
    }
}

static void small_and_large_numbers(void **state)
{
    static bool wanted[TLY_MAX_SERVICES];
    static int middle[TLY_MAX_SERVICES];
    assert_int_equal(tly_plan_measure_turns(3, wanted), 0); /* all is known */
    wanted[1] = true;
    assert_int_equal(tly_plan_measure_turns(1, wanted + 1), 0); /* with whom? */
    for (int all = 0; all < 2; all++) {
        wanted[0] = all;
        assert_int_equal(tly_plan_measure_turns(2, wanted), 1);
        tly_plan_measure_groups(2, wanted, nothing, 0, middle);
        assert_int_equal(middle[0], middle[1]);
    }
    for (int i = 0; i < TLY_MAX_SERVICES; i++)
        wanted[i] = true;
    assert_int_equal(tly_plan_measure_turns(TLY_MAX_SERVICES, wanted), 8);
    tly_plan_measure_groups(TLY_MAX_SERVICES, wanted, nothing, 7, middle);
    for (int i = 0; i < TLY_MAX_SERVICES; i++)
        assert_in_range(middle[i], TLY_MAX_SERVICES * 7 / 8, TLY_MAX_SERVICES - 1);
}

/* Those first that are faster, and no more than it takes. */
static void around_the_middle_are_the_fastest(void **state)
{
    static const double rate[] = {50, 147, 100, 25, 100, 90};
    bool wanted[6] = {false, true};
    int middle[6];
    assert_int_equal(tly_plan_measure_turns(6, wanted), 1);
    tly_plan_measure_groups(6, wanted, rate, 0, middle);
    const int some[] = {-1, 1, 1, -1, 1, 1};
    assert_memory_equal(middle, some, sizeof some);
    tly_plan_measure_groups(6, wanted, (const double[]){50, 1000, 100, 25, 100, 90}, 0, middle);
    for (int i = 0; i < 6; i++)
        assert_int_equal(middle[i], 1);
}

static void settle(int count, const int *measured, const double *rate, const double *wants)
{
    bool m[16];
    double r[16];
    for (int i = 0; i < count; i++) {
        m[i] = measured[i];
        r[i] = rate[i];
    }
    assert_int_equal(tly_plan_measure_settle(count, m, r), 0);
    for (int i = 0; i < count; i++)
        assert_true(r[i] == wants[i]);
}

static void cards_alike_come_out_alike(void **state)
{
    /* Neighbours of one group, in any order; a fifth is another card. */
    settle(6, (int[]){1, 1, 1, 1, 1, 1}, (double[]){941, 95, 850, 938, 94, 930},
           (double[]){938, 95, 938, 938, 95, 938});
    settle(2, (int[]){1, 1}, (double[]){100, 120}, (double[]){100, 120});
    /* What is known stands, and is what the measured ones are if they may well be. */
    settle(5, (int[]){1, 0, 1, 0, 1}, (double[]){930, 1000, 941, 10000, 9400},
           (double[]){1000, 1000, 1000, 10000, 10000});
    settle(3, (int[]){1, 0, 0}, (double[]){700, 1000, 500}, (double[]){700, 1000, 500});
    settle(3, (int[]){1, 0, 0}, (double[]){960, 1000, 900}, (double[]){1000, 1000, 900});
    /* Nothing came of one, and nothing is known of another. */
    settle(3, (int[]){1, 1, 0}, (double[]){0, 500, 0}, (double[]){0, 500, 0});
    /* A chain ends. */
    double rate[16], wants[16];
    int measured[16];
    for (int i = 0; i < 9; i++) {
        measured[i] = 1;
        rate[i] = i ? rate[i - 1] * 1.125 : 1024;
    }
    for (int i = 0; i < 9; i++)
        wants[i] = rate[i < 3 ? 1 : i < 6 ? 4 : 7];
    settle(9, measured, rate, wants);
    settle(0, measured, rate, wants);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_is_once_in_the_middle),
        cmocka_unit_test(small_and_large_numbers),
        cmocka_unit_test(around_the_middle_are_the_fastest),
        cmocka_unit_test(cards_alike_come_out_alike),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
