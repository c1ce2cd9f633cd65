/* blame_test.c - what rank 0 makes of what services say: most of them name a cause, and a single one is heard in time. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "comm/internal.h"

#include <cmocka.h>

enum { SERVICES = 8, WINDOW_S = 9, HOLD_MS = 450, MOST_HOLD_S = 600 };

static tally_comm *c;
static uint32_t weight[SERVICES];
static char named[TLY_SENTENCE]; /* what has been said last */

static void note(void *user, enum tally_log_level level, const char *line)
{
    snprintf(named, sizeof named, "%s", line);
}

static void send_to_all(void)
{
    for (int i = 0; i < SERVICES; i++)
        c->peers[i].watched_at = c->loop.awake;
}

/* All services sum, and rank 0 has just sent to all. */
static int start(void **state)
{
    c = calloc(1, sizeof *c);
    assert_non_null(c);
    c->peers = calloc(SERVICES, sizeof *c->peers);
    assert_non_null(c->peers);
    c->services = SERVICES;
    c->weight = weight;
    c->loop.awake = 1000 * TLY_SEC;
    for (int i = 0; i < SERVICES; i++) {
        weight[i] = 1;
        c->peers[i].comm = c;
    }
    send_to_all();
    tly_log_divert(note, NULL);
    named[0] = 0;
    return 0;
}

static int end(void **state)
{
    tly_log_divert(NULL, NULL);
    free(c->peers);
    free(c);
    return 0;
}

static void say(int service, uint32_t rank, bool network)
{
    tly_blame_heard(&c->peers[service], rank, network, WINDOW_S * TLY_SEC, network ? "network" : "computes");
}

static void assert_named(uint32_t rank, const char *why)
{
    assert_true(c->named_at);
    assert_int_equal(c->straggler, rank);
    assert_non_null(strstr(named, why));
}

static void wait_ms(int64_t ms)
{
    c->loop.awake += ms * TLY_MS;
    tly_blame_tick(c);
}

static void test_a_single_service_does_not_outvote_the_others(void **state)
{
    say(0, 2, false);
    for (int i = 1; i < 4; i++)
        say(i, 2, true);
    assert_int_equal(c->named_at, 0);
    say(4, 2, true);
    assert_named(2, "network");
}

/* More than say the other, but too few to be sure: the log says how many, for `tally status` shows it too. */
static void test_a_few_are_counted(void **state)
{
    say(0, 2, false);
    for (int i = 1; i < 4; i++)
        say(i, 2, true);
    assert_int_equal(c->named_at, 0);
    wait_ms(HOLD_MS);
    assert_named(2, "network (3 of 8 services say so)");
    assert_int_equal(c->blame.since, 0);
}

/* Nothing is kept for the next window, and a few that see another cause right after do not take turns in the log. */
static void test_a_few_are_not_heard_by_turns(void **state)
{
    say(0, 2, true);
    wait_ms(HOLD_MS);
    assert_named(2, "network (1 of 8 services say so)");
    wait_ms(WINDOW_S * 1000);
    send_to_all();
    say(4, 3, true);
    wait_ms(HOLD_MS);
    assert_named(2, "network");
    wait_ms(60 * 1000);
    send_to_all();
    say(4, 3, true);
    wait_ms(HOLD_MS);
    assert_named(3, "network (1 of 8 services say so)");
}

/* ... but once most see another cause it is said at once. */
static void test_what_has_changed_is_said(void **state)
{
    say(0, 2, true);
    wait_ms(HOLD_MS);
    assert_named(2, "network (1 of 8 services say so)");
    wait_ms(WINDOW_S * 1000);
    send_to_all();
    for (int i = 0; i < SERVICES; i++)
        say(i, 2, false);
    wait_ms(HOLD_MS);
    assert_named(2, "computes");
    assert_null(strstr(named, "say so"));
}

static void test_most_say_that_it_computes_longer(void **state)
{
    say(0, 2, true);
    for (int i = 1; i < 5; i++)
        say(i, 2, false);
    assert_int_equal(c->named_at, 0);
    say(5, 2, false);
    assert_named(2, "computes");
}

/* Some see its pushes only when they have waited for others. */
static void test_one_service_alone_is_heard(void **state)
{
    say(3, 5, false);
    wait_ms(HOLD_MS / 2);
    assert_int_equal(c->named_at, 0);
    wait_ms(HOLD_MS / 2);
    assert_named(5, "computes");
}

/* A window that nobody can have looked for holds no warning back until the job ends. */
static void test_a_service_that_lies_about_its_window(void **state)
{
    tly_blame_heard(&c->peers[3], 5, false, INT64_MAX / 4, "computes");
    wait_ms((int64_t)MOST_HOLD_S * 1000);
    assert_named(5, "computes");
}

static void test_the_job_ends_meanwhile(void **state)
{
    say(3, 5, false);
    tly_blame_settle(c);
    assert_named(5, "computes");
}

/* Tensors of one part have one service; and one that has left the split does not count. */
static void test_only_who_judges_counts(void **state)
{
    for (int i = 2; i < SERVICES; i++)
        c->peers[i].watched_at -= 2 * WINDOW_S * TLY_SEC;
    weight[1] = 0;
    say(0, 2, true);
    assert_named(2, "network");
}

static void test_the_same_rank_is_named_less_and_less_often(void **state)
{
    int said = 0;
    for (int window = 0; window < 50; window++) { /* 0, 63, 189, 432 s */
        int64_t before = c->named_at;
        send_to_all();
        for (int i = 0; i < SERVICES; i++)
            say(i, 2, true);
        said += c->named_at != before;
        wait_ms(WINDOW_S * 1000);
    }
    assert_int_equal(said, 4);
    for (int i = 0; i < SERVICES; i++)
        say(i, 3, true);
    assert_int_equal(c->straggler, 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_single_service_does_not_outvote_the_others, start, end),
        cmocka_unit_test_setup_teardown(test_a_few_are_counted, start, end),
        cmocka_unit_test_setup_teardown(test_a_few_are_not_heard_by_turns, start, end),
        cmocka_unit_test_setup_teardown(test_what_has_changed_is_said, start, end),
        cmocka_unit_test_setup_teardown(test_most_say_that_it_computes_longer, start, end),
        cmocka_unit_test_setup_teardown(test_one_service_alone_is_heard, start, end),
        cmocka_unit_test_setup_teardown(test_a_service_that_lies_about_its_window, start, end),
        cmocka_unit_test_setup_teardown(test_the_job_ends_meanwhile, start, end),
        cmocka_unit_test_setup_teardown(test_only_who_judges_counts, start, end),
        cmocka_unit_test_setup_teardown(test_the_same_rank_is_named_less_and_less_often, start, end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
