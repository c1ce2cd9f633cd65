/* text_test.c - quantities in words. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

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

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bytes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
