/* words_test.c - sentences about ranks that disagree. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "sum/words.h"

#include <cmocka.h>

static void says(const char *first, const char *second, const char *expected)
{
    char text[200];
    bool whole = !tly_words_same_title(first, second);
    size_t at = tly_words_append(text, sizeof text, 0, NULL, first, "rank 0", whole);
    at = tly_words_append(text, sizeof text, at, first, second, "ranks 1-2", whole);
    assert_string_equal(text, expected);
    assert_int_equal(at, strlen(expected));
}

static void test_only_what_differs(void **state)
{
    says("t|float32 [3] sum", "t|float32 [4] sum", "float32 [3] sum on rank 0, [4] on ranks 1-2");
    says("t|float32 [3] sum", "t|int32 [3] sum", "float32 [3] sum on rank 0, int32 on ranks 1-2");
    says("t|float32 [3, 2] sum", "t|float32 [3, 4] sum", "float32 [3, 2] sum on rank 0, [3, 4] on ranks 1-2");
    says("t|float32 [3] sum", "t|float32 [3] max", "float32 [3] sum on rank 0, max on ranks 1-2");
    says("t|float32 [3] from rank 0", "t|float32 [3] from rank 1",
         "float32 [3] from rank 0 on rank 0, from rank 1 on ranks 1-2");
}

static void test_one_says_more(void **state)
{
    says("t|float32 [3] sum", "t|float32 [3] sum prescale 0.5",
         "float32 [3] sum on rank 0, prescale 0.5 on ranks 1-2");
    says("t|float32 [3] sum (of one)", "t|float32 [3] sum",
         "float32 [3] sum (of one) on rank 0, float32 [3] sum on ranks 1-2");
    says("t|float32 [3] [3] sum", "t|float32 [3] sum", "float32 [3] [3] sum on rank 0, sum on ranks 1-2");
}

static void test_other_titles(void **state)
{
    says("a|float32 [3] sum", "b|float32 [3] sum",
         "rank 0: a: float32 [3] sum; ranks 1-2: b: float32 [3] sum");
    says("a|", "b|list", "rank 0: a; ranks 1-2: b: list");
    says("a|int8 [1]", "refuses: no", "rank 0: a: int8 [1]; ranks 1-2: refuses: no");
    says("refuses: no", "refuses: never", "rank 0: refuses: no; ranks 1-2: refuses: never");
}

static void test_no_room(void **state)
{
    char text[8];
    memset(text, 'x', sizeof text);
    size_t at = tly_words_append(text, 7, 0, NULL, "t|float32 [3]", "rank 0", false);
    assert_int_equal(at, strlen("float32 [3] on rank 0"));
    assert_memory_equal(text, "float3\0x", 8);
    assert_int_equal(tly_words_append(text, 7, at, "t|a", "t|b", "rank 1", false), at);
}

static void test_many_words(void **state)
{
    char first[400] = "t|", second[400] = "t|", text[1000];
    for (int i = 0; i < 100; i++) {
        strcat(first, "a ");
        strcat(second, i == 99 ? "b" : "a ");
    }
    tly_words_append(text, sizeof text, 0, first, second, "rank 1", false);
    assert_non_null(strstr(text, "a b on rank 1"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_only_what_differs), cmocka_unit_test(test_one_says_more),
        cmocka_unit_test(test_other_titles),      cmocka_unit_test(test_no_room),
        cmocka_unit_test(test_many_words),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
