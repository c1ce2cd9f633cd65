/* replan_process_test.c - a replanner in the model of a cluster (cluster.h): tallyds whose process, not whose card, is slow. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>

#include "test/plan/cluster.h"

static void start_with_slow_process(struct cluster *c, int workers, int spare, double rate)
{
    cluster_start(c, workers, spare, NULL, 0);
    c->noise = .02;
    cluster_run(c, 30);
    c->process[c->count - 1] = rate;
}

/* As seen with cpu.max on the emulated cluster.  It gets half of what it carries, and the job hardly misses that. */
static void a_tallyd_with_a_slow_process_gets_half(void **state)
{
    EACH_SHAPE(shape)
    {
        struct cluster c;
        int workers = cluster_shapes[shape][0], spare = cluster_shapes[shape][1], last = workers + spare - 1;
        if (spare < 2 || cluster_is_long(shape))
            continue;
        start_with_slow_process(&c, workers, spare, 70);
        cluster_run(&c, 12);
        assert_int_equal(c.changes, 1);
        assert_true(tly_replan_eases(c.r, last) && !tly_replan_is_sure(c.r, last));
        assert_true(tly_replan_bandwidth(c.r, last) > 30 && tly_replan_bandwidth(c.r, last) < 40);
        assert_true(cluster_fraction(&c) > .91);
        cluster_run(&c, 40);
        assert_int_equal(c.changes, 1);
        c.process[last] = 0;
        cluster_run(&c, 80);
        assert_false(tly_replan_eases(c.r, last));
        assert_int_equal(c.s[last].weight, c.s[workers].weight);
        cluster_finish(&c);
    }
}

/* While it stays slow each try with more is in vain and the next one comes later. */
static void a_slow_process_is_tried_more_and_more_rarely(void **state)
{
    struct cluster c;
    start_with_slow_process(&c, 4, 2, 60);
    cluster_run(&c, 600);
    assert_true(c.changes >= 4 && c.changes <= 10);
    uint32_t before = c.changes;
    cluster_run(&c, 2000);
    assert_true(c.changes > before && c.changes <= before + 9);
    assert_true(tly_replan_eases(c.r, 5));
    cluster_finish(&c);
}

/* The second one is as busy, so neither alone is late.  What both carry is followed, as it is of cards. */
static void two_slow_processes_are_followed_like_cards(void **state)
{
    struct cluster c;
    start_with_slow_process(&c, 4, 3, 60);
    c.process[5] = 60;
    cluster_run(&c, 5);
    assert_int_equal(c.changes, 1);
    assert_false(tly_replan_eases(c.r, 5) || tly_replan_eases(c.r, 6));
    assert_true(tly_replan_bandwidth(c.r, 6) > 55 && tly_replan_bandwidth(c.r, 6) < 65);
    cluster_finish(&c);
}

/* A worker cannot do without its gradients, and one that is a little slower than planned holds nobody up by much. */
static void neither_a_worker_nor_a_little_lateness_is_halved(void **state)
{
    struct cluster c;
    start_with_slow_process(&c, 4, 2, 87);
    c.noise = 0;
    for (int i = 0; i < 20; i++) {
        cluster_step(&c);
        assert_false(tly_replan_eases(c.r, 5));
    }
    cluster_finish(&c);
    start_with_slow_process(&c, 4, 2, 0);
    c.process[1] = 60;
    for (int i = 0; i < 20; i++) {
        cluster_step(&c);
        assert_false(tly_replan_eases(c.r, 1));
    }
    cluster_finish(&c);
}

/* Nobody knows which of two tallyds behind one card is late, or whether one is where the kernel of another does not tell. */
static void nobody_is_halved_by_guess(void **state)
{
    struct cluster c;
    for (int unseen = 0; unseen < 2; unseen++) {
        start_with_slow_process(&c, 4, 3, 0);
        if (unseen)
            c.bias[0] = NAN;
        else
            c.s[6].machine.card = 5;
        cluster_split(&c);
        c.process[5] = unseen ? 60 : 20; /* two behind one card have half as much each */
        for (int i = 0; i < 20; i++) {
            cluster_step(&c);
            assert_false(tly_replan_eases(c.r, 5));
        }
        cluster_finish(&c);
    }
}

/* Where the split is to stay, nothing is gained by less than what was seen. */
static void a_fixed_split_halves_nothing(void **state)
{
    struct cluster c;
    cluster_start(&c, 4, 2, NULL, 0);
    tly_replan_destroy(c.r);
    assert_int_equal(tly_replan_create(true, &c.r), 0);
    for (int i = 0; i < c.count; i++)
        assert_int_equal(tly_replan_place(c.r, i, 100, 0, 0, false), 0);
    c.process[5] = 60;
    for (int i = 0; i < 40; i++) {
        cluster_step(&c);
        assert_false(tly_replan_eases(c.r, 5));
        assert_true(tly_replan_bandwidth(c.r, 5) > 55);
    }
    assert_int_equal(c.changes, 0);
    cluster_finish(&c);
}

/* Its feeler is in vain, so it goes back, is still one with a slow process, and is held for longer. */
static void a_slow_process_stays_one_after_a_try_in_vain(void **state)
{
    struct cluster c;
    start_with_slow_process(&c, 4, 2, 60);
    c.noise = 0;
    cluster_run(&c, 50);
    assert_int_equal(c.changes, 1);
    c.process[5] = 1.1 * tly_replan_bandwidth(c.r, 5);
    for (int i = 0; i < 60 && c.changes < 3; i++)
        cluster_step(&c);
    assert_int_equal(c.changes, 3);
    assert_true(tly_replan_eases(c.r, 5));
    cluster_run(&c, 100);
    assert_int_equal(c.changes, 3);
    cluster_finish(&c);
}

/* With next to nothing it rests, and wakes with what was assumed. */
static void a_process_that_stands_still_rests(void **state)
{
    struct cluster c;
    start_with_slow_process(&c, 4, 2, 1);
    cluster_run(&c, 8);
    assert_true(tly_replan_eases(c.r, 5) && tly_replan_rests(c.r, 5));
    for (int i = 0; i < 60 && tly_replan_rests(c.r, 5); i++)
        cluster_step(&c);
    assert_true(tly_replan_assumes(c.r, 5) && !tly_replan_eases(c.r, 5));
    c.process[5] = 0;
    cluster_run(&c, 50);
    assert_int_equal(c.s[5].weight, c.s[4].weight);
    cluster_finish(&c);
}

/* Halved again before it may be tried with more, it is held for twice as long. */
static void a_process_that_gets_slower_is_held_for_longer(void **state)
{
    struct cluster c;
    start_with_slow_process(&c, 4, 2, 60);
    cluster_run(&c, 20);
    assert_int_equal(c.changes, 1);
    c.process[5] = 12;
    cluster_run(&c, 20);
    assert_int_equal(c.changes, 2);
    assert_true(tly_replan_eases(c.r, 5));
    c.process[5] = 0;
    cluster_run(&c, 95);
    assert_int_equal(c.changes, 2);
    cluster_run(&c, 60);
    assert_true(c.changes > 2);
    cluster_finish(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_tallyd_with_a_slow_process_gets_half),
        cmocka_unit_test(a_slow_process_is_tried_more_and_more_rarely),
        cmocka_unit_test(two_slow_processes_are_followed_like_cards),
        cmocka_unit_test(neither_a_worker_nor_a_little_lateness_is_halved),
        cmocka_unit_test(nobody_is_halved_by_guess),
        cmocka_unit_test(a_fixed_split_halves_nothing),
        cmocka_unit_test(a_slow_process_stays_one_after_a_try_in_vain),
        cmocka_unit_test(a_process_that_stands_still_rests),
        cmocka_unit_test(a_process_that_gets_slower_is_held_for_longer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
