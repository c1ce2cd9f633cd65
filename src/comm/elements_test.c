/* elements_test.c - the codecs' calls of tally.h: what they refuse, and a tensor of one block. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "tally/tally.h"

enum { BLOCK = TALLY_CODEC_BLOCK };

static void test_calls(void **state)
{
    static float g[BLOCK] = {1, -2, 0.3f}, e[BLOCK], out[BLOCK];
    uint8_t exponent, after, words[2 * BLOCK];
    enum tally_dtype dtype = TALLY_BOOL;
    size_t n = 7;
    assert_int_equal(tally_codec_words(TALLY_CODEC_INT4, 16, BLOCK, &dtype, &n), -ENOTSUP);
    assert_non_null(strstr(tally_error(), "16 ranks"));
    assert_int_equal(tally_codec_words(TALLY_CODEC_INT4, 8, BLOCK, NULL, &n), -EINVAL);
    assert_int_equal(n, 7);
    assert_int_equal(tally_codec_words(TALLY_CODEC_INT4, 8, BLOCK, &dtype, &n), 0);
    assert_int_equal(dtype, TALLY_INT16);
    assert_int_equal(n, (BLOCK + 2) / 3);
    assert_int_equal(tally_exponents(TALLY_CODEC_INT4, 8, g, NULL, BLOCK, &exponent), -EINVAL);
    assert_int_equal(tally_exponents(TALLY_CODEC_INT4, 8, g, e, BLOCK, &exponent), 0);
    assert_int_equal(exponent, 128);
    assert_int_equal(tally_encode(TALLY_CODEC_INT4, 0, g, e, BLOCK, &exponent, words, &after), -EINVAL);
    assert_int_equal(tally_encode(TALLY_CODEC_INT4, 8, g, e, BLOCK, &exponent, NULL, &after), -EINVAL);
    assert_int_equal(tally_encode(TALLY_CODEC_INT4, 8, g, e, BLOCK, &exponent, words, &after), 0);
    assert_int_equal(after, exponent);
    assert_int_equal(tally_decode(TALLY_CODEC_INT4, 8, words, &exponent, &after, BLOCK, 0, out), -EINVAL);
    assert_int_equal(tally_decode(TALLY_CODEC_INT4, 8, words, &exponent, &after, BLOCK, 128, out), -EINVAL);
    assert_int_equal(tally_decode(TALLY_CODEC_INT4, 8, words, &exponent, &after, BLOCK, 1, out), 0);
    assert_true(out[0] == 0 && out[1] == -2 && out[2] == 0); /* a half is rounded to even */
    assert_true(e[0] == 1 && e[1] == 0 && e[2] == g[2]);
    assert_int_equal(tally_encode(TALLY_CODEC_INT8, 2, NULL, NULL, 0, NULL, NULL, NULL), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_calls)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
