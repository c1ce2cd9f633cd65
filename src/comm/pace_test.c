/* pace_test.c - what the last line says of predicted and reached, and from which ratio on somebody is to blame. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

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

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_the_last_line),
                                       cmocka_unit_test(test_where_it_is_much)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
