/* text_test.c - quantities in words, and texts that a terminal may get. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/text.h"

#include <cmocka.h>

static void says(uint64_t bytes, const char *expected)
{
    char text[TLY_BYTES_TEXT];
    assert_string_equal(tly_bytes_text(bytes, text), expected);
}

static void test_bytes(void **state)
{
    says(0, "0 B");
    says(999, "999 B");
    says(1000, "1 KB");
    says(4096, "4.1 KB");
    says(999499, "999 KB");
    says(999500, "1 MB");
    says(123456789, "123 MB");
    says(3000000000, "3 GB");
    says(UINT64_MAX, "18.4 EB");
}

static void test_numbers(void **state)
{
    static const char *const expected[] = {"0", "0.0123", "1.23", "100", "999", "1000", "1013", "123457"};
    static const double x[] = {0, .01234, 1.234, 99.99, 999.4, 999.6, 1012.6, 123456.7};
    char text[TLY_NUMBER_TEXT];
    for (size_t i = 0; i < sizeof x / sizeof *x; i++)
        assert_string_equal(tly_number_text(x[i], text), expected[i]);
}

static void test_ranges(void **state)
{
    char text[60] = "";
    size_t at = tly_text_append_range(text, sizeof text, 0, 3, 3);
    at = tly_text_append_range(text, sizeof text, at, 5, 7);
    at = tly_text_append_range(text, sizeof text, at, 4000, 4095);
    assert_string_equal(text, "3, 5-7, 4000-4095");
    assert_int_equal(at, 17);
    for (int i = 0; i < 10; i++)
        at = tly_text_append_range(text, sizeof text, at, 4000, 4095);
    assert_int_equal(at, strlen(text));
    assert_string_equal(text, "3, 5-7, 4000-4095, 4000-4095");
}

static void cleans(const char *text, const char *expected)
{
    char copy[64];
    strcpy(copy, text);
    assert_int_equal(tly_text_clean(copy), strcmp(text, expected) != 0);
    assert_string_equal(copy, expected);
}

static void test_control_characters(void **state)
{
    cleans("", "");
    cleans("host-1 \xc3\xa4 \xe2\x80\xa6 \xff", "host-1 \xc3\xa4 \xe2\x80\xa6 \xff");
    cleans("\x1b[31mred\r\n\x7f", "?[31mred???");
    cleans("\xc2\x9b 31m \xc2\xa0\xc2", "?? 31m \xc2\xa0\xc2");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bytes), cmocka_unit_test(test_numbers),
                                       cmocka_unit_test(test_ranges),
                                       cmocka_unit_test(test_control_characters)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
