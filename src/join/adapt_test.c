/* adapt_test.c - the words for what a card carries. */
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_card_is_compared_with_what_was_said_of_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
