/* adapt_test.c - what the roster and the log have of cards. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "membership/adapt.h"
#include "membership/internal.h"

#include <cmocka.h>

/* Of two services behind one card, a line compares with what was said of that card. */
static void test_a_card_is_compared_with_what_was_said_of_it(void **state)
{
    struct tly_roster_service s[] = {{.said = 800000000}, {.said = 200000000, .bandwidth = 400000000}};
    struct tly_coordinator c = {.roster = {.service_count = 2, .services = s}};
    char text[100];
    assert_int_equal(tly_replan_create(false, &c.adapt.replan), 0);
    tly_adapt_speed(&c, 1, &s[1], false, text, sizeof text);
    assert_ptr_equal(strstr(text, "carries 0.4 of 0.8 Gbit/s since "), text);
    s[1].card = 1;
    tly_adapt_speed(&c, 1, &s[1], false, text, sizeof text);
    assert_ptr_equal(strstr(text, "carries 0.4 Gbit/s since "), text);
    tly_replan_destroy(c.adapt.replan);
}

/* A guess is marked in the roster at all services behind its card, whatever it is a guess for; the other cards are not. */
static void test_a_guess_is_marked(void **state)
{
    enum { COUNT = 3 };
    struct tly_roster_service s[COUNT];
    struct tly_coordinator c = {.roster = {.machine_count = COUNT, .service_count = COUNT, .services = s}};
    for (uint32_t i = 0; i < COUNT; i++)
        s[i] = (struct tly_roster_service){.state = TLY_SERVICE_ACTIVE,
                                           .incarnation = 7 + i,
                                           .card = i ? 1 : 0,
                                           .bandwidth = 800000000,
                                           .measured = 1,
                                           .weight = 1};
    assert_int_equal(tly_replan_create(false, &c.adapt.replan), 0);
    tly_adapt_apply(&c);
    assert_int_equal(s[0].tried + s[1].tried + s[2].tried, 0);
    tly_replan_doubt(c.adapt.replan, 1);
    tly_adapt_apply(&c);
    assert_int_equal(s[0].tried, 0);
    assert_int_equal(s[1].tried + s[2].tried, 2);
    assert_true(tly_adapt_sure(&c, 0) == 800000000 && tly_adapt_sure(&c, 2) == 0);
    tly_adapt_finish(&c);
}

static char line[400];

static void keep(void *user, enum tally_log_level level, const char *text)
{
    snprintf(line, sizeof line, "%s", text);
}

/* Nothing was known of any card.  By the job's traffic those of a rank's machine and of a tallyd carry as little, for the one
 * has the other's backlogs.  What the job then waits for is the rank's own gradient. */
static void test_where_nothing_was_known_the_card_that_all_wait_for_is_named(void **state)
{
    enum { RANKS = 4, COUNT = 6, SLOW = 2 };
    static const uint32_t before[COUNT] = {2, 2, 2, 2, 6, 6}, after[COUNT] = {12, 12, 0, 12, 48, 16};
    static struct tly_roster_service s[COUNT];
    static struct tly_roster_rank rank[RANKS];
    static char ids[COUNT][64];
    struct tly_adapt_place place[COUNT] = {0};
    struct tly_coordinator c = {
        .adapt = {.place = place, .places = COUNT, .pending = true, .takes = 446e-9, .standout = -1},
        .host_id = ids,
        .roster = {.rank_count = RANKS,
                   .machine_count = RANKS,
                   .service_count = COUNT,
                   .ranks = rank,
                   .services = s}};
    tly_list_init(&c.members);
    assert_int_equal(tly_replan_create(false, &c.adapt.replan), 0);
    for (uint32_t i = 0; i < COUNT; i++) {
        char where[40];
        s[i] = (struct tly_roster_service){
            .role = i < RANKS ? TLY_ROLE_RANK : TLY_ROLE_TALLYD,
            .rank = i < RANKS ? i : 0,
            .state = TLY_SERVICE_ACTIVE,
            .incarnation = 7 + i,
            .card = i,
            .bandwidth = i == SLOW || i == COUNT - 1 ? 21500000 : 60000000,
            .weight = after[i]};
        snprintf(s[i].host, sizeof s[i].host, "h%u", i);
        snprintf(ids[i], sizeof ids[i], "id%u", i);
        snprintf(where, sizeof where, "10.0.0.%u:1000", i + 1);
        tly_endpoints_add(&s[i].at, "tcp", where);
        place[i] =
            (struct tly_adapt_place){.incarnation = 7 + i, .weight = before[i], .card = i, .active = true};
        if (i < RANKS)
            rank[i].machine = i;
        assert_int_equal(tly_replan_place(c.adapt.replan, (int)i, (double)s[i].bandwidth / 8, 0, 0, false),
                         0);
    }
    tally_log_redirect(keep, NULL);
    tly_adapt_begin(&c);
    tally_log_redirect(NULL, NULL);
    assert_ptr_equal(strstr(line, "join: the machine of rank 2 (h2) carries 0.0215 Gbit/s since "), line);
    assert_non_null(strstr(line, ": its share is now 0% (was 10%), 1 GB takes 372 s (was 446)"));
    tly_replan_destroy(c.adapt.replan);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_guess_is_marked),
        cmocka_unit_test(test_where_nothing_was_known_the_card_that_all_wait_for_is_named),
        cmocka_unit_test(test_a_card_is_compared_with_what_was_said_of_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
