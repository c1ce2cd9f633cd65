/* pace_test.c - what the last line says of predicted and reached, and from which ratio on somebody is to blame. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "comm/internal.h"

#include <cmocka.h>

/* The line for 1 GB in so many seconds where the plan says 8, at 1 Gbit/s. */
static const char *line(double seconds)
{
    static char text[400];
    tally_comm *c = calloc(1, sizeof *c);
    assert_non_null(c);
    c->pace =
        (struct pace){.predicted = 8e-9, .bytes = 1000000000, .ns = (int64_t)(seconds * 1e9), .slow = -1};
    tly_pace_sum_up(c, text, sizeof text);
    free(c);
    return text;
}

static void test_the_last_line(void **state)
{
    assert_string_equal(line(8), "; large tensors at 8 s for 1 GB, 1 Gbit/s (predicted 8 s, 1 Gbit/s)");
    assert_string_equal(line(10), "; large tensors at 10 s for 1 GB, 0.8 Gbit/s (predicted 8 s, 1 Gbit/s), "
                                  "by which machine is not known");
    assert_string_equal(line(5), "; large tensors at 5 s for 1 GB, 1.6 Gbit/s (predicted 8 s, 1 Gbit/s), "
                                 "cards are faster than was said or measured");
    assert_string_equal(line(0), "");
}

/* By a fifth of the time, either way. */
static void test_where_it_is_much(void **state)
{
    assert_null(strstr(line(8 * 1.19), "not known"));
    assert_non_null(strstr(line(8 * 1.21), "not known"));
    assert_null(strstr(line(8 / 1.19), "faster"));
    assert_non_null(strstr(line(8 / 1.21), "faster"));
}

enum { SERVICES = 3 };

/* Parts take 1 ms at each service, at one of them 5; at another most of the credit lies. */
static tally_comm *held_up(struct peer peers[SERVICES], uint32_t weight[SERVICES], int slow, int full)
{
    tally_comm *c = calloc(1, sizeof *c);
    assert_non_null(c);
    c->services = SERVICES;
    c->peers = peers;
    c->weight = weight;
    for (int i = 0; i < SERVICES; i++) {
        peers[i] =
            (struct peer){.parts = 10, .waited = i == slow ? 50000 : 10000, .held = i == full ? 1e9 : 1e8};
        weight[i] = 1;
    }
    return c;
}

static void test_which_service_holds_us_up(void **state)
{
    struct peer peers[SERVICES];
    uint32_t weight[SERVICES];
    tally_comm *c = held_up(peers, weight, 2, 1);
    assert_int_equal(tly_pace_suspect(c), 2);
    free(c);
    c = held_up(peers, weight, -1, 1); /* no part takes long */
    assert_int_equal(tly_pace_suspect(c), 1);
    weight[1] = 10; /* it has so much more to sum */
    assert_int_equal(tly_pace_suspect(c), -1);
    free(c);
    c = held_up(peers, weight, -1, -1);
    assert_int_equal(tly_pace_suspect(c), -1);
    free(c);
}

static void test_who_has_left_the_split_is_not_suspected(void **state)
{
    struct peer peers[SERVICES];
    uint32_t weight[SERVICES];
    tally_comm *c = held_up(peers, weight, 2, 2);
    weight[2] = 0;
    assert_int_equal(tly_pace_suspect(c), -1);
    free(c);
}

static void test_figures_are_of_one_epoch(void **state)
{
    struct peer peers[SERVICES];
    uint32_t weight[SERVICES];
    tally_comm *c = held_up(peers, weight, 2, 1);
    struct tly_roster_service service[SERVICES] = {0};
    c->member.roster.services = service;
    c->member.roster.service_count = SERVICES;
    assert_int_equal(tly_pace_init(c), 0);
    for (int i = 0; i < SERVICES; i++)
        assert_true(peers[i].parts == 0 && peers[i].waited == 0 && peers[i].held == 0);
    assert_int_equal(tly_pace_suspect(c), -1);
    tly_pace_finish(c);
    free(c);
}

/* A flight of 50 MB, which the plan gives 50 ms, took so long. */
static void fly(tally_comm *c, int ms)
{
    struct tally_op op = {0};
    c->pace.since = tly_now() - ms * TLY_MS;
    c->pace.flight = 50000000;
    c->pace.counts = true;
    tly_pace_leaves(c, &op);
}

static tally_comm *on_plan(void)
{
    tally_comm *c = calloc(1, sizeof *c);
    struct epoch *e = calloc(1, sizeof *e);
    assert_true(c && e);
    tly_list_init(&c->active_ops);
    c->epoch = e;
    c->credit_bytes = 1;
    c->pace = (struct pace){.predicted = 1e-9, .slow = -1};
    return c;
}

static void forget(tally_comm *c)
{
    free(c->epoch);
    free(c);
}

/* Some process stood still for three seconds in some flights, the first among them: nobody's card is slow for that. */
static void test_pauses_do_not_count(void **state)
{
    tally_comm *c = on_plan();
    fly(c, 3050);
    for (int i = 0; i < 30; i++)
        fly(c, i % 7 == 3 ? 3050 : 51);
    assert_false(c->pace.told);
    assert_true(tly_pace_reached(c) < 1.1e-9);
    forget(c);
}

/* A card that is far slower than was said shows in every flight. */
static void test_what_is_always_slow_counts(void **state)
{
    tally_comm *c = on_plan();
    for (int i = 0; i < 20; i++)
        fly(c, 1000);
    assert_true(c->pace.told);
    assert_true(tly_pace_reached(c) > 15e-9);
    forget(c);
    c = on_plan();
    for (int i = 0; i < 20; i++)
        fly(c, 100);
    assert_true(c->pace.told);
    forget(c);
}

static char warned[600];

static void listen_to_log(void *user, enum tally_log_level level, const char *text)
{
    snprintf(warned, sizeof warned, "%s", text);
}

/* Two machines of 10 Gbit/s each, whose sums take twice as long as predicted: both figures are told, once. */
static void test_all_cards_carry_half(void **state)
{
    struct tly_plan_machine machine[2] = {{.ranks = 1, .card = 0, .bandwidth = 1.25e9},
                                          {.ranks = 1, .card = 1, .bandwidth = 1.25e9}};
    uint32_t weight[2] = {1, 1};
    char text[400];
    tally_comm *c = on_plan();
    c->services = c->machines = 2;
    c->weight = weight;
    c->pace.machine = machine;
    c->pace.predicted = .8e-9;
    c->pace.bytes = 1000000000;
    c->pace.ns = 1600000000;
    tally_log_redirect(listen_to_log, NULL);
    tly_pace_judged(c, TLY_NO_SERVICE);
    assert_non_null(strstr(warned, "all network cards carry about half of what was said or measured: "
                                   "5 Gbit/s each way instead of 10"));
    warned[0] = '\0';
    tly_pace_judged(c, TLY_NO_SERVICE);
    tly_pace_judged(c, 1);
    tally_log_redirect(NULL, NULL);
    assert_string_equal(warned, "");
    tly_pace_sum_up(c, text, sizeof text);
    assert_non_null(strstr(text, ", all cards carry about half"));
    forget(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_cards_carry_half),
        cmocka_unit_test(test_pauses_do_not_count),
        cmocka_unit_test(test_what_is_always_slow_counts),
        cmocka_unit_test(test_the_last_line),
        cmocka_unit_test(test_where_it_is_much),
        cmocka_unit_test(test_which_service_holds_us_up),
        cmocka_unit_test(test_who_has_left_the_split_is_not_suspected),
        cmocka_unit_test(test_figures_are_of_one_epoch)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
