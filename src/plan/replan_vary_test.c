/* replan_vary_test.c - what a replanner makes of cards that vary or fall short, and of those that wait for them, in the model
 * of a cluster (cluster.h). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>

#include "plan/replan_work.h"
#include "test/plan/cluster.h"

/* As seen where all cards vary, each for itself: the job waits for the slowest, so a tallyd's card that is busy all the time
 * carries some per cent less than it could, now more and now less.  A card that carries as much less all the time is slower. */
static void a_deviation_within_the_samples_spread_is_not_tried(void **state)
{
    for (int varies = 0; varies < 2; varies++) {
        struct cluster c;
        cluster_start(&c, 4, 2, NULL, 0);
        for (int i = 0; i < 6; i++)
            c.lie[i] = i == 4 ? .99 : .88;
        bool tried = false;
        for (int i = 0; i < 200; i++) {
            c.bias[4] = varies ? (i % 5 - 2) * .025 - .09 : -.09;
            cluster_step(&c);
            tried |= c.r->trying == &c.r->fine && c.r->place[4].tried;
        }
        assert_true(tried == !varies);
        cluster_finish(&c);
    }
}

/* As seen where a start had measured 0.543 on one card of 0.478: the others waited for it, and had carried less than it was
 * said to carry. */
static void what_a_card_falls_short_of_is_no_measure_for_others(void **state)
{
    static const double said[] = {114, 100, 100, 100, 100, 100};
    struct cluster c;
    cluster_start(&c, 4, 2, said, 0);
    c.r->waits_again = 90; /* a wait for another card has just ended */
    for (int i = 0; i < 6; i++)
        c.lie[i] = i ? .7 : .99;
    for (int i = 0; i < 300; i++) {
        cluster_step(&c);
        for (int j = 1; j < 6; j++)
            assert_false(tly_replan_tries(c.r, j));
    }
    assert_true(fabs(tly_replan_bandwidth(c.r, 0) - 100) < 4);
    cluster_finish(&c);
}

/* As seen where all cards wander: one falls short by a fifth, and a small deviation was tried in vain just now.  The others
 * wait for it, and are as fast as it is said to be. */
static void nobody_is_tried_for_a_card_that_falls_short_by_a_fifth(void **state)
{
    struct cluster c;
    cluster_start(&c, 4, 2, NULL, 0);
    c.real[4] = 79;
    c.r->fine.at = 10000;  /* small deviations were tried in vain */
    c.r->waits_again = 90; /* a wait for another card has just ended */
    for (int i = 0; i < 6; i++)
        c.lie[i] = i == 4 ? .99 : .7;
    for (int i = 0; i < 300; i++) {
        cluster_step(&c);
        assert_null(c.r->trying);
    }
    cluster_finish(&c);
}

/* As seen where all cards vary: two tallyds' cards hold the others up for most of the time, and for a moment neither does. */
static void nobody_is_tried_while_cards_are_busy_by_turns(void **state)
{
    struct cluster c;
    cluster_start(&c, 4, 2, NULL, 0);
    for (int i = 0; i < 300; i++) {
        for (int j = 0; j < 6; j++)
            c.lie[j] = j >= 4 && (i + 12 + 4 - j) % 12 < 8 ? .99 : .7;
        cluster_step(&c);
        assert_null(c.r->trying);
    }
    cluster_finish(&c);
}

/* A card was measured while something else was on its way, and has been busy all the time.  Once that ends nobody limits the
 * job, and what it was itself does not count. */
static void a_card_that_was_busy_itself_is_tried_at_once(void **state)
{
    static const double said[] = {50, 100, 100, 100, 100, 100};
    struct cluster c;
    cluster_start(&c, 4, 2, said, 0);
    c.real[0] = 50;
    for (int i = 0; i < 6; i++)
        c.lie[i] = i == 0 ? .99 : .85;
    cluster_run(&c, 60);
    c.real[0] = 100;
    c.lie[0] = .6;
    for (int i = 0; i < 6 && !c.r->trying; i++)
        cluster_step(&c);
    assert_true(tly_replan_tries(c.r, 0));
    cluster_finish(&c);
}

/* Where processors are short all gauges err by as much.  What was measured far below the others is tried all the same. */
static void a_card_measured_too_low_is_tried_though_all_fall_short(void **state)
{
    static const double said[] = {100, 100, 100, 100, 100, 64};
    struct cluster c;
    cluster_start(&c, 4, 2, said, 0);
    for (int i = 0; i < 6; i++) {
        c.bias[i] = -.07;
        c.lie[i] = .99;
    }
    bool tried = false;
    for (int i = 0; i < 300; i++) {
        cluster_step(&c);
        tried |= tly_replan_tries(c.r, 5);
    }
    assert_true(tried && tly_replan_bandwidth(c.r, 5) > 90);
    cluster_finish(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_deviation_within_the_samples_spread_is_not_tried),
        cmocka_unit_test(what_a_card_falls_short_of_is_no_measure_for_others),
        cmocka_unit_test(nobody_is_tried_for_a_card_that_falls_short_by_a_fifth),
        cmocka_unit_test(nobody_is_tried_while_cards_are_busy_by_turns),
        cmocka_unit_test(a_card_that_was_busy_itself_is_tried_at_once),
        cmocka_unit_test(a_card_measured_too_low_is_tried_though_all_fall_short),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
