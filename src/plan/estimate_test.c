/* estimate_test.c - what gauges say of samples. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>

#include "plan/replan.h"

static void see(struct tly_gauge *g, int times, double rate, double busy)
{
    for (int i = 0; i < times; i++)
        tly_gauge_see(g, &(struct tly_sight){rate, busy, busy});
}

static void a_gauge_follows_a_full_card_both_ways(void **state)
{
    struct tly_gauge g;
    tly_gauge_init(&g, 100, 0);
    see(&g, TLY_GAUGE_LONG, 96, .97);
    assert_true(tly_gauge_estimate(&g, .08) == 100); /* within 8% */
    see(&g, 2, 20, 1);
    assert_true(tly_gauge_estimate(&g, .08) == 100); /* two of five samples */
    see(&g, 1, 20, 1);
    assert_true(tly_gauge_estimate(&g, .08) == 20);
    tly_gauge_init(&g, 100, 0);
    see(&g, TLY_GAUGE_LONG, 80, .9); /* 88.9 */
    assert_true(fabs(tly_gauge_estimate(&g, .08) - 88.9) < .1);
    tly_gauge_init(&g, 50, 0);
    see(&g, 5, 90, .95);
    assert_true(tly_gauge_estimate(&g, .08) > 90);
}

static void a_gauge_says_how_far_samples_differ(void **state)
{
    struct tly_gauge g;
    tly_gauge_init(&g, 100, 0);
    for (int i = 0; i < TLY_GAUGE_LONG; i++) {
        assert_true(tly_gauge_spread(&g) == 0);
        see(&g, 1, i % 2 ? 45 : 55, i == 0 ? .1 : i == 1 ? 1 : .5); /* 550, 45, else 110 and 90 */
    }
    assert_true(fabs(tly_gauge_spread(&g) - .1) < 1e-9);
    tly_gauge_clear(&g);
    see(&g, TLY_GAUGE_LONG, 50, 0);
    assert_true(tly_gauge_spread(&g) == 0); /* nothing has waited */
}

static void a_gauge_waits_until_few_samples_agree(void **state)
{
    struct tly_gauge g;
    tly_gauge_init(&g, 100, 0);
    see(&g, 4, 97, 1);
    see(&g, 1, 60, 1); /* it drops in the middle of this one */
    see(&g, 2, 20, 1);
    assert_true(tly_gauge_estimate(&g, .08) == 100); /* the median is 60, and nobody carries that */
    see(&g, 1, 20, 1);
    assert_true(tly_gauge_estimate(&g, .08) == 20);
}

static void a_gauge_takes_the_least_of_what_a_slower_card_carries(void **state)
{
    struct tly_gauge g;
    tly_gauge_init(&g, 100, 0);
    see(&g, 2, 97, 1);
    see(&g, 1, 22, 1);
    see(&g, 1, 20, 1);
    see(&g, 1, 21, 1);
    assert_true(tly_gauge_estimate(&g, .08) == 20); /* the median is 22 */
    tly_gauge_init(&g, 100, 0);
    see(&g, 2, 50, .95);
    see(&g, 1, 50, 0); /* sums that nothing waited for */
    see(&g, 2, 50, .95);
    assert_true(fabs(tly_gauge_estimate(&g, .08) - 50 / .95) < .1);
    tly_gauge_init(&g, 100, 0);
    see(&g, 2, 50, 1);
    see(&g, 1, 5, 1); /* something stood still */
    see(&g, 2, 50, 1);
    assert_true(tly_gauge_estimate(&g, .08) == 50);
    tly_gauge_init(&g, 20, 0);
    see(&g, 2, 19, 1);
    see(&g, 1, 98, 1);
    see(&g, 1, 100, 1);
    see(&g, 1, 99, 1);
    assert_true(tly_gauge_estimate(&g, .08) == 98); /* a faster one: the median */
}

static void a_gauge_knows_what_was_carried_without_being_full(void **state)
{
    struct tly_gauge g;
    tly_gauge_init(&g, 50, 0);
    see(&g, 5, 70, .5);
    assert_true(tly_gauge_estimate(&g, .08) == 70);
    see(&g, 5, 10, .3);
    g.value = 70;
    assert_true(tly_gauge_estimate(&g, .08) == 70); /* nobody wanted more */
    assert_true(tly_gauge_has_slack(&g));
    assert_false(tly_gauge_is_full(&g));
}

/* What a card would carry if it were always backlogged is a guess, for backlogs do not all show. */
static void a_gauge_rises_only_when_the_guess_is_far_off(void **state)
{
    struct tly_gauge g;
    tly_gauge_init(&g, 100, 0);
    see(&g, TLY_GAUGE_LONG, 97, .9); /* 107.8 while it was busy: 102 in the middle */
    assert_true(tly_gauge_estimate(&g, .04) == 100);
    see(&g, TLY_GAUGE_LONG, 102, .9); /* 113.3: 107.7 */
    assert_true(tly_gauge_estimate(&g, .08) == 100);
    assert_true(fabs(tly_gauge_estimate(&g, .06) - 107.7) < .1);
    g.guess = true; /* nobody has said that it carries 100 */
    assert_true(fabs(tly_gauge_estimate(&g, .08) - 113.3) < .1);
}

/* It carries more by now than in most of the many samples. */
static void a_gauge_does_not_fall_below_what_is_carried(void **state)
{
    struct tly_gauge g;
    tly_gauge_init(&g, 50, 0);
    see(&g, TLY_GAUGE_LONG, 49, .98);
    see(&g, 5, 75, .95);
    g.value = 75;
    assert_true(tly_gauge_estimate(&g, .06) == 75);
}

/* It had time to spare while it waited for another card; what it has now is said by the newest samples. */
static void a_card_that_waited_has_no_slack_any_more(void **state)
{
    struct tly_gauge g;
    tly_gauge_init(&g, 100, 0);
    see(&g, TLY_GAUGE_LONG, 50, .45);
    assert_true(tly_gauge_has_slack(&g) && tly_gauge_is_idle(&g));
    see(&g, 2, 95, .9);
    assert_false(tly_gauge_has_slack(&g) || tly_gauge_is_idle(&g));
}

/* Noise makes all cards but one idle for some samples. */
static void a_card_is_idle_only_after_long(void **state)
{
    struct tly_gauge g;
    tly_gauge_init(&g, 100, 0);
    see(&g, TLY_GAUGE_LONG / 2 - 1, 95, .9);
    see(&g, TLY_GAUGE_LONG / 2, 50, .45);
    assert_true(tly_gauge_has_slack(&g));
    assert_false(tly_gauge_is_idle(&g));
    see(&g, 2, 50, .45);
    assert_true(tly_gauge_is_idle(&g));
}

static void a_declared_rate_is_not_exceeded(void **state)
{
    struct tly_gauge g;
    tly_gauge_init(&g, 100, 100);
    see(&g, TLY_GAUGE_LONG, 150, 1);
    assert_true(tly_gauge_estimate(&g, .08) == 100);
    see(&g, TLY_GAUGE_LONG, 40, 1);
    assert_true(tly_gauge_estimate(&g, .08) == 40);
    g.value = 40;
    see(&g, TLY_GAUGE_LONG, 300, 1);
    assert_true(tly_gauge_estimate(&g, .08) == 100);
}

static void a_service_is_late_if_only_inputs_wait(void **state)
{
    struct tly_gauge g;
    tly_gauge_init(&g, 100, 0);
    for (int i = 0; i < 4; i++)
        tly_gauge_see(&g, &(struct tly_sight){60, .95, .86, .18});
    assert_false(tly_gauge_is_late(&g)); /* too few samples */
    tly_gauge_see(&g, &(struct tly_sight){60, .95, .86, .18});
    assert_true(tly_gauge_is_late(&g));
    see(&g, 3, 60, .95);
    assert_false(tly_gauge_is_late(&g)); /* most of the last five have them both ways */
    for (int i = 0; i < 5; i++)
        tly_gauge_see(&g, &(struct tly_sight){60, .8, .5, .6});
    assert_false(tly_gauge_is_late(&g)); /* it has time to spare */
}

static void nonsense_is_ignored(void **state)
{
    struct tly_gauge g;
    static const struct tly_sight bad[] = {{INFINITY, 1, 1},   {-1, 1, 1},       {NAN, .5, .5},
                                           {10, NAN, .5},      {10, -.1, .5},    {10, .5, -1},
                                           {10, .5, INFINITY}, {10, 1, .5, NAN}, {10, 1, .5, INFINITY}};
    tly_gauge_init(&g, 100, 0);
    for (size_t i = 0; i < 10 * sizeof bad / sizeof *bad; i++)
        tly_gauge_see(&g, &bad[i % (sizeof bad / sizeof *bad)]);
    assert_int_equal(g.count, 0);
    see(&g, TLY_GAUGE_LONG, 0, 1); /* nothing comes through: no estimate of zero */
    assert_true(tly_gauge_estimate(&g, .08) == 100);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_gauge_follows_a_full_card_both_ways),
        cmocka_unit_test(a_gauge_says_how_far_samples_differ),
        cmocka_unit_test(a_gauge_waits_until_few_samples_agree),
        cmocka_unit_test(a_gauge_takes_the_least_of_what_a_slower_card_carries),
        cmocka_unit_test(a_gauge_knows_what_was_carried_without_being_full),
        cmocka_unit_test(a_gauge_rises_only_when_the_guess_is_far_off),
        cmocka_unit_test(a_gauge_does_not_fall_below_what_is_carried),
        cmocka_unit_test(a_card_that_waited_has_no_slack_any_more),
        cmocka_unit_test(a_card_is_idle_only_after_long),
        cmocka_unit_test(a_declared_rate_is_not_exceeded),
        cmocka_unit_test(a_service_is_late_if_only_inputs_wait),
        cmocka_unit_test(nonsense_is_ignored),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
