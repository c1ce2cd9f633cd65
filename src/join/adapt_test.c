/* adapt_test.c - what the roster and the log have of cards. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "join/adapt.h"
#include "join/internal.h"

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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_guess_is_marked),
        cmocka_unit_test(test_a_card_is_compared_with_what_was_said_of_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
