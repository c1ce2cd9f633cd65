/* pace_test.c - what the last line says of predicted and reached, and from which ratio on somebody is to blame. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "comm/comm.h"
#include "comm/epoch/epoch.h"
#include "comm/epoch/pace.h"
#include "comm/epoch/traffic.h"
#include "comm/op/op.h"
#include "membership/status.h"
#include "membership/traffic.h"

#include <cmocka.h>

/* The line for 1 GB in so many seconds where the plan says 8, at 1 Gbit/s. */
static const char *line(double seconds)
{
    static char text[400];
    tally_comm *c = calloc(1, sizeof *c);
    assert_non_null(c);
    c->pace = (struct tly_pace){.predicted = 8e-9, .bytes = 1000000000, .ns = (int64_t)(seconds * 1e9)};
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

/* A flight of 50 MB, which the plan gives 50 ms, took so long. */
static void fly(tally_comm *c, int ms)
{
    struct tally_op op = {.call = &tly_call_push_pull};
    c->pace.since = tly_now() - ms * TLY_MS;
    c->pace.flight = 50000000;
    c->pace.counts = true;
    tly_pace_leaves(c, &op);
}

static tally_comm *on_plan(void)
{
    tally_comm *c = calloc(1, sizeof *c);
    struct tly_epoch *e = calloc(1, sizeof *e);
    assert_true(c && e);
    tly_active_init(&c->active);
    c->epoch = e;
    c->pace = (struct tly_pace){.predicted = 1e-9};
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
    assert_true(tly_pace_reached(c) < 1.1e-9);
    forget(c);
}

/* A card that is far slower than was said shows in every flight. */
static void test_what_is_always_slow_counts(void **state)
{
    tally_comm *c = on_plan();
    for (int i = 0; i < 20; i++)
        fly(c, 1000);
    assert_true(tly_pace_reached(c) > 15e-9);
    forget(c);
}

/* The last word of the coordinator counts, also at the end. */
static void test_the_last_word_counts(void **state)
{
    char text[TLY_SENTENCE];
    tally_comm *c = on_plan();
    c->pace.predicted = .8e-9;
    c->pace.bytes = 1000000000;
    c->pace.ns = 1600000000;
    c->member.slow =
        (struct tly_slow){TLY_WHY_CARD, "tallyd 1 (c1)", "carries 0.1 of 0.48 Gbit/s since 12:03:11"};
    tly_pace_sum_up(c, text, sizeof text);
    assert_non_null(
        strstr(text, ", held up by tallyd 1 (c1), which carries 0.1 of 0.48 Gbit/s since 12:03:11"));
    c->pace.ns = 800000000; /* it goes as predicted: the line has nobody to name */
    tly_pace_sum_up(c, text, sizeof text);
    assert_null(strstr(text, "held up"));
    c->pace.ns = 1600000000;
    c->member.slow.why = TLY_WHY_NOBODY;
    tly_pace_sum_up(c, text, sizeof text);
    assert_non_null(strstr(text, ", by which machine is not known"));
    forget(c);
}

/* A flight ends now; the one before ended so long ago, and the newest operation was submitted so long ago. */
static void end_flight(tally_comm *c, int before_ms, int submitted_ms, bool patient)
{
    struct tally_op op = {.call = &tly_call_push_pull,
                          .wait = {.submitted = tly_now() - submitted_ms * TLY_MS, .patient = patient}};
    struct tally_op first = {.call = &tly_call_push_pull,
                             .wait = {.submitted = tly_now() - (before_ms + submitted_ms) / 2 * TLY_MS}};
    c->traffic.over = (uint64_t)(tly_now() - before_ms * TLY_MS) / 1000;
    tly_traffic_enters(c, &first);
    tly_traffic_enters(c, &op);
    tly_traffic_leaves(c, &op);
}

/* A rank computes until it has submitted the last operation of a flight, also where the first is under way long before. */
static void test_what_a_rank_computes_of_a_step(void **state)
{
    tally_comm *c = on_plan();
    const struct tly_steps *s = &c->traffic.steps;
    end_flight(c, 100, 20, false);
    assert_int_equal(s->count, 1);
    assert_in_range(s->own_us, 79000, 81000);
    assert_true(s->us >= 99000 && s->us >= s->own_us + 19000);
    struct tly_steps before = *s;
    end_flight(c, 100, 20,
               true); /* it minded no wait: the flight, and the time before the next, are no step */
    assert_true(s->count == 1 && s->us == before.us);
    assert_int_equal(c->traffic.over, 0);
    struct tally_op op = {.call = &tly_call_push_pull, .wait = {.submitted = tly_now()}};
    tly_traffic_enters(c, &op);
    tly_traffic_leaves(c, &op);
    assert_int_equal(s->count, 1);
    assert_true(c->traffic.over > 0);
    forget(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_last_word_counts),
        cmocka_unit_test(test_pauses_do_not_count),
        cmocka_unit_test(test_what_is_always_slow_counts),
        cmocka_unit_test(test_the_last_line),
        cmocka_unit_test(test_where_it_is_much),
        cmocka_unit_test(test_what_a_rank_computes_of_a_step),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
