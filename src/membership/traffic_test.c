/* traffic_test.c - what ranks say of their connections, by card and by service; and what cannot be is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "membership/traffic.h"

enum { MACHINES = 2, SERVICES = 3, S = 1000000 };

static struct tly_roster_rank ranks[MACHINES] = {{.machine = 0}, {.machine = 1}};
static struct tly_roster_service services[SERVICES];
static const struct tly_roster roster = {.rank_count = MACHINES,
                                         .machine_count = MACHINES,
                                         .service_count = SERVICES,
                                         .ranks = ranks,
                                         .services = services};

static int set_up(void **state)
{
    for (uint32_t i = 0; i < SERVICES; i++)
        services[i] = (struct tly_roster_service){.card = i, .weight = i == 2 ? 2 : 1};
    return 0;
}

static bool near(double x, double y)
{
    return fabs(x - y) < 1e-6 * (1 + fabs(y));
}

/* Each rank over its own time: to whom it is 2 s, the same bytes are half of the rate. */
static void rates_add_up_by_card(void **state)
{
    struct tly_traffic_line a[SERVICES] = {{{0}}, {{100, S / 2}, {40, S / 4}, 0}, {{300, S}, {60, S}, S}};
    struct tly_traffic_line b[SERVICES] = {{{200, S}, {20, S}, 0}, {{0}}, {{600, 2 * S}, {120, S}, 2 * S}};
    struct tly_traffic of_a = {.period_us = S, .active_us = S, .moved = 500, .count = SERVICES, .line = a};
    struct tly_traffic of_b = {
        .period_us = 2 * S, .active_us = 2 * S, .moved = 500, .count = SERVICES, .line = b};
    const struct tly_traffic *of[MACHINES] = {&of_a, &of_b};
    struct tly_replan_service s[SERVICES];
    double goodput;
    tly_traffic_sum(&roster, of, s, &goodput);
    assert_true(near(goodput, (500 + 250) / 2.));
    /* The tallyd gets 300/s all the time from a and as much from b, and sends 60 all the time and 60 half of it. */
    assert_true(near(s[2].card.rate, 600) && near(s[2].card.busy, 1));
    assert_true(near(s[2].card.both, (1 + .75) / 2));
    /* a's card sends 400 to services, for 1/2 and for all the time, and its service's results to b, 10, for half of it. */
    assert_true(near(s[0].card.rate, 410) && near(s[0].card.busy, (.5 + 2 * 1 + .5) / 4));
    /* (The plan has as much go to the tallyd as to all others, and results as inputs.)
     * What lies there may also be on its way: no fault of the service's. */
    assert_true(s[2].sums.rate == s[2].card.rate && s[2].sums.busy == 0);
}

/* A step that was under way when the split changed goes on by the old one. */
static void what_an_older_split_has_dealt_is_no_sample(void **state)
{
    struct tly_traffic_line line[SERVICES] = {{{0}}, {{100, S}, {100, S}, 0}, {{100, S}, {100, S}, 0}};
    struct tly_traffic a = {.period_us = S, .active_us = S, .moved = 100, .count = SERVICES, .line = line};
    struct tly_traffic b = a;
    const struct tly_traffic *of[MACHINES] = {&a, &b};
    struct tly_replan_service s[SERVICES];
    double goodput;
    assert_true(tly_traffic_sum(&roster, of, s, &goodput));
    a.stale = b.stale = 40; /* most is of this one */
    assert_true(tly_traffic_sum(&roster, of, s, &goodput));
    a.stale = 100;
    assert_false(tly_traffic_sum(&roster, of, s, &goodput));
    b.moved = b.stale = 0; /* as a rank that wants no results reports */
    a.stale = 40;
    assert_true(tly_traffic_sum(&roster, of, s, &goodput));
}

/* It begins late and has all its traffic in half of the others' time: its card is busy for half of that. */
static void who_computes_longer_is_not_slow(void **state)
{
    struct tly_traffic_line a[SERVICES] = {
        {{0}}, {{100, S / 2}, {100, S / 2}, 0}, {{100, S / 2}, {100, S / 2}, S}};
    struct tly_traffic_line b[SERVICES] = {
        {{100, S / 2}, {100, S / 2}, 0}, {{0}}, {{100, S / 2}, {100, S / 2}, 0}};
    struct tly_traffic waits = {.period_us = S, .active_us = S, .count = SERVICES, .line = a};
    struct tly_traffic late = {.period_us = S, .active_us = S / 2, .count = SERVICES, .line = b};
    const struct tly_traffic *of[MACHINES] = {&waits, &late};
    struct tly_replan_service s[SERVICES];
    double goodput;
    tly_traffic_sum(&roster, of, s, &goodput);
    for (int i = 0; i < SERVICES; i++)
        assert_true(near(s[i].card.busy, .5));
}

/* Of two ranks, which have told of a second in which operations were under way. */
static void sum_up(struct tly_traffic_line *a, struct tly_traffic_line *b, struct tly_replan_service *out)
{
    struct tly_traffic of_a = {.period_us = S, .active_us = S, .count = SERVICES, .line = a};
    struct tly_traffic of_b = {.period_us = S, .active_us = S, .count = SERVICES, .line = b};
    const struct tly_traffic *of[MACHINES] = {&of_a, &of_b};
    double goodput;
    tly_traffic_sum(&roster, of, out, &goodput);
}

/* What little has moved says nothing of any card.  Where one card alone has a backlog, that one holds all up. */
static void a_network_that_stands_still_gives_no_sample(void **state)
{
    struct tly_traffic_line line[SERVICES] = {{{9, S}, {9, S}, 0}, {{9, S}, {9, S}, 0}, {{9, S}, {9, S}, 0}};
    struct tly_traffic t = {.period_us = S, .active_us = S, .count = SERVICES, .line = line};
    const struct tly_traffic *of[MACHINES] = {&t, &t};
    struct tly_replan_service s[SERVICES];
    double goodput;
    assert_false(tly_traffic_sum(&roster, of, s, &goodput));
    t.moved = 1;
    assert_true(tly_traffic_sum(&roster, of, s, &goodput));
    t.moved = 0;
    for (int i = 0; i < 2; i++)
        line[i].out.busy_us = line[i].in.busy_us = 0;
    assert_true(tly_traffic_sum(&roster, of, s, &goodput));
}

/* The others may wait for a rank that says nothing. */
static void where_a_rank_is_silent_something_must_move(void **state)
{
    struct tly_traffic_line line[SERVICES] = {{{0}}, {{9, S}, {9, S}, 0}, {{0}}};
    struct tly_traffic t = {.period_us = S, .active_us = S, .count = SERVICES, .line = line};
    const struct tly_traffic *of[MACHINES] = {&t, NULL};
    struct tly_replan_service s[SERVICES];
    double goodput;
    assert_false(tly_traffic_sum(&roster, of, s, &goodput));
    t.moved = 1;
    assert_true(tly_traffic_sum(&roster, of, s, &goodput));
    t.active_us = S / 20; /* the silent rank's operations may be at other times */
    assert_false(tly_traffic_sum(&roster, of, s, &goodput));
    of[1] = &t;
    assert_true(tly_traffic_sum(&roster, of, s, &goodput));
}

/* In a broadcast rank 0 sends and hardly receives.  Both directions of its card are busy. */
static void the_direction_with_more_tells_the_rate(void **state)
{
    struct tly_traffic_line a[SERVICES] = {{{0}}, {{300, S - 1}, {1, S}, 0}, {{300, S - 1}, {1, S}, 0}};
    struct tly_traffic_line b[SERVICES] = {{{0}}, {{0}}, {{0}}};
    struct tly_replan_service s[SERVICES];
    sum_up(a, b, s);
    assert_true(near(s[0].card.rate, 600) && near(s[1].card.rate, 300));
}

/* A service is late where inputs wait for it and as many results do not.  Those of a reduce are fewer. */
static void a_service_is_late_by_the_backlog_of_its_inputs(void **state)
{
    struct tly_traffic_line even[SERVICES] = {[2] = {{300, S}, {270, S / 2}, S}};
    struct tly_traffic_line fewer[SERVICES] = {[2] = {{300, S}, {100, S / 2}, S}};
    struct tly_traffic_line slow[SERVICES] = {[2] = {{300, S}, {300, S}, S}};
    struct tly_traffic_line sends[SERVICES] = {[2] = {{300, S / 2}, {300, S}, S}};
    struct tly_replan_service s[SERVICES];
    sum_up(even, even, s);
    assert_true(near(s[2].card.late, .5));
    sum_up(fewer, fewer, s);
    assert_true(s[2].card.late == 0);
    sum_up(slow, slow, s);
    assert_true(s[2].card.late == 0);
    sum_up(sends, sends, s);
    assert_true(near(s[2].card.late, -.5));
}

/* Of half of what crosses two cards nothing is known: nor is it of these cards. */
static void what_is_not_known_is_no_sample(void **state)
{
    struct tly_traffic_line a[SERVICES] = {
        {{0}}, {{100, S}, {100, S}, 0}, {{100, S}, {0, TLY_TRAFFIC_UNKNOWN}, S}};
    struct tly_traffic_line b[SERVICES] = {{{100, S}, {100, S}, 0}, {{0}}, {{100, S}, {100, S}, 0}};
    struct tly_replan_service s[SERVICES];
    sum_up(a, b, s);
    assert_true(isnan(s[0].card.rate) && isnan(s[2].card.rate) && near(s[1].card.busy, 1));
    struct tly_gauge g;
    tly_gauge_init(&g, 1, 0);
    tly_gauge_see(&g, &s[0].card);
    assert_int_equal(g.count, 0);
}

/* What two ranks see of cards that are half idle, and of a tallyd that claims to be busy for so long. */
static void sum_claim(uint32_t claim, uint32_t workers_weight, uint32_t its_weight,
                      struct tly_replan_service *out)
{
    const struct tly_traffic_line to = {{100, S / 2}, {100, S / 2}, 0};
    struct tly_traffic_line a[SERVICES] = {{{0}}, to, to}, b[SERVICES] = {to, {{0}}, to};
    services[0].weight = services[1].weight = workers_weight;
    services[2].weight = its_weight;
    a[2].in = b[2].in = (struct tly_traffic_way){claim == TLY_TRAFFIC_UNKNOWN ? 0 : 100, claim};
    sum_up(a, b, out);
}

/* With a fifth, and with half, of what comes in at each worker. */
static void a_liar_moves_others_by_its_part_at_most(void **state)
{
    for (uint32_t heavy = 0; heavy < 2; heavy++) {
        double part = heavy ? .5 : .2;
        struct tly_replan_service honest[SERVICES], always[SERVICES], never[SERVICES];
        sum_claim(S / 2, 2 - heavy, 1 + heavy, honest);
        sum_claim(S, 2 - heavy, 1 + heavy, always);
        sum_claim(0, 2 - heavy, 1 + heavy, never);
        for (int i = 0; i < SERVICES; i++) {
            assert_true(near(honest[i].card.busy, .5) && near(honest[i].card.both, .5));
            assert_true(always[i].card.rate == honest[i].card.rate);
            assert_true(never[i].card.rate == honest[i].card.rate);
            assert_true(near(never[i].card.busy, .5)); /* pushes and results of others show that */
        }
        for (int i = 0; i < MACHINES; i++) {
            assert_true(near(always[i].card.busy, .5 + .5 * part));
            assert_true(near(always[i].card.both, .5 + .25 * part));
            assert_true(near(never[i].card.both, .5 - .25 * part));
        }
        assert_true(near(always[2].card.busy, 1) && near(never[2].card.both, .25));
    }
}

/* A tallyd that does not say hides its own card, and workers' cards if more than 40% of what comes in there is its. */
static void a_silent_service_hides_workers_only_above_40_percent(void **state)
{
    struct tly_replan_service honest[SERVICES], light[SERVICES], heavy[SERVICES];
    sum_claim(S / 2, 2, 1, honest);
    sum_claim(TLY_TRAFFIC_UNKNOWN, 2, 1, light);
    sum_claim(TLY_TRAFFIC_UNKNOWN, 1, 2, heavy);
    for (int i = 0; i < MACHINES; i++) {
        assert_true(near(light[i].card.busy, .5) && near(light[i].card.both, .5));
        assert_true(near(light[i].card.rate, honest[i].card.rate));
        assert_true(isnan(heavy[i].card.rate) && isnan(heavy[i].card.busy));
        assert_true(near(heavy[i].sums.rate, honest[i].sums.rate));
    }
    assert_true(isnan(light[2].card.busy) && near(light[2].sums.rate, honest[2].sums.rate));
}

static void what_is_taken_late_is_the_services(void **state)
{
    struct tly_traffic_line line[SERVICES] = {{{0}}, {{0}}, {{300, S / 10}, {60, S / 10}, S}};
    struct tly_traffic t = {.period_us = S, .active_us = S, .count = SERVICES, .line = line};
    const struct tly_traffic *of[MACHINES] = {&t, &t};
    struct tly_replan_service s[SERVICES];
    double goodput;
    tly_traffic_sum(&roster, of, s, &goodput);
    assert_true(near(s[2].sums.busy, 1) && near(s[2].sums.rate, 600));
    assert_true(s[2].card.busy < .2);
}

static void within_a_card_nothing_counts(void **state)
{
    struct tly_traffic_line line[SERVICES] = {{{0}}, {{0}}, {{300, S}, {60, S}, S}};
    struct tly_traffic t = {.period_us = S, .active_us = S, .count = SERVICES, .line = line};
    const struct tly_traffic *of[MACHINES] = {&t, NULL};
    struct tly_replan_service s[SERVICES];
    double goodput;
    services[2].card = 0; /* a tallyd beside rank 0 */
    tly_traffic_sum(&roster, of, s, &goodput);
    for (int i = 0; i < SERVICES; i++)
        assert_true(s[i].card.rate == 0 && s[i].card.busy == 0 && s[i].sums.rate == 0);
}

static int read_back(const struct tly_traffic *t, size_t cut)
{
    struct tly_writer w = {0};
    struct tly_traffic back;
    tly_traffic_write(&w, t);
    struct tly_reader r = {w.data, w.len - cut, false};
    int err = tly_traffic_read(&r, &back);
    if (!err)
        tly_traffic_finish(&back);
    free(w.data);
    return err;
}

static void what_cannot_be_is_refused(void **state)
{
    struct tly_traffic_line line[2] = {{{1000, 10}, {1000, 10}, 10}, {{0}}};
    const struct tly_traffic good = {
        .epoch = 1, .epochs = 1, .period_us = S, .active_us = S, .moved = 9, .count = 2, .line = line};
    struct tly_traffic t = good;
    assert_int_equal(read_back(&t, 0), 0);
    for (size_t cut = 1; cut <= 24; cut++)
        assert_int_equal(read_back(&t, cut), -EPROTO);
    t.active_us = 0;
    assert_int_equal(read_back(&t, 0), -EPROTO);
    t.active_us = TLY_TRAFFIC_LEAST_US / 2 - 1; /* its rates could be any */
    assert_int_equal(read_back(&t, 0), -EPROTO);
    t.active_us = TLY_TRAFFIC_LEAST_US / 2;
    assert_int_equal(read_back(&t, 0), 0);
    t.period_us = TLY_TRAFFIC_EVERY_US / 2 - 1;
    assert_int_equal(read_back(&t, 0), -EPROTO);
    t = good;
    t.active_us = S + 1;
    assert_int_equal(read_back(&t, 0), -EPROTO);
    t.period_us = t.active_us = TLY_TRAFFIC_LONGEST_US + 1;
    assert_int_equal(read_back(&t, 0), -EPROTO);
    t = good;
    t.moved = TLY_MAX_RATE; /* bytes in a second */
    assert_int_equal(read_back(&t, 0), -EPROTO);
    t = good;
    t.stale = t.moved + 1;
    assert_int_equal(read_back(&t, 0), -EPROTO);
    t = good;
    line[0].in.bytes = TLY_MAX_RATE;
    assert_int_equal(read_back(&t, 0), -EPROTO);
    line[0].in.bytes = 0;
    line[1].held_us = TLY_TRAFFIC_LONGEST_US + 1;
    assert_int_equal(read_back(&t, 0), -EPROTO);
    line[1].held_us = 0;
    assert_int_equal(read_back(&t, 0), 0);
    t.count = 0;
    assert_int_equal(read_back(&t, 0), -EPROTO);
}

static void impossible_steps_are_refused(void **state)
{
    static const struct tly_steps good = {3, 20, 12, 8, 100},
                                  bad[] = {{0, 20, 0, 0, 100},  {3, 0, 0, 0, 0},
                                           {3, 101, 0, 0, 100}, {3, 20, 21, 0, 100},
                                           {3, 20, 12, 9, 100}, {3, 20, 0, UINT64_MAX, 100}};
    enum { BAD = sizeof bad / sizeof *bad };
    for (int i = 0; i <= BAD; i++) {
        struct tly_writer w = {0};
        struct tly_steps found = {7, 7, 7, 7, 7};
        tly_steps_write(&w, i < BAD ? &bad[i] : &good);
        assert_false(w.failed);
        for (size_t len = 0; len <= w.len; len++) { /* cut short, then whole */
            struct tly_reader r = {w.data, len, false};
            bool fine = i == BAD && len == w.len;
            assert_int_equal(tly_steps_read(&r, &found), fine ? 0 : -EPROTO);
            assert_true(found.count == (fine ? 3 : 7) && found.own_us == (fine ? 20 : 7) &&
                        found.waited_us == (fine ? 12 : 7) && found.paged_us == (fine ? 8 : 7) &&
                        found.us == (fine ? 100 : 7));
        }
        free(w.data);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(rates_add_up_by_card, set_up),
        cmocka_unit_test_setup(what_an_older_split_has_dealt_is_no_sample, set_up),
        cmocka_unit_test_setup(a_network_that_stands_still_gives_no_sample, set_up),
        cmocka_unit_test_setup(where_a_rank_is_silent_something_must_move, set_up),
        cmocka_unit_test_setup(who_computes_longer_is_not_slow, set_up),
        cmocka_unit_test_setup(the_direction_with_more_tells_the_rate, set_up),
        cmocka_unit_test_setup(a_service_is_late_by_the_backlog_of_its_inputs, set_up),
        cmocka_unit_test_setup(what_is_not_known_is_no_sample, set_up),
        cmocka_unit_test_setup(a_liar_moves_others_by_its_part_at_most, set_up),
        cmocka_unit_test_setup(a_silent_service_hides_workers_only_above_40_percent, set_up),
        cmocka_unit_test_setup(what_is_taken_late_is_the_services, set_up),
        cmocka_unit_test_setup(within_a_card_nothing_counts, set_up),
        cmocka_unit_test(what_cannot_be_is_refused),
        cmocka_unit_test(impossible_steps_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
