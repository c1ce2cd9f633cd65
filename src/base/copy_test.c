/* copy_test.c - copies around the caches: each length and alignment beside memcpy, and nothing beside them is touched. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/copy.h"

enum { MOST = 400, SHIFTS = 64, ROOM = MOST + 2 * SHIFTS };

static void try_one(size_t to, size_t from, size_t n)
{
    _Alignas(64) uint8_t source[ROOM], wanted[ROOM], got[ROOM];
    for (size_t i = 0; i < ROOM; i++)
        source[i] = (uint8_t)(i * 7 + 1);
    memset(wanted, 0xee, ROOM);
    memset(got, 0xee, ROOM);
    memcpy(wanted + to, source + from, n);
    tly_copy_streaming(got + to, source + from, n);
    assert_memory_equal(got, wanted, ROOM);
}

static void test_any_length(void **state)
{
    for (size_t n = 0; n <= MOST; n++)
        for (size_t to = 0; to < SHIFTS; to += n < 200 ? 1 : 13)
            try_one(to, (to * 5 + n) % SHIFTS, n);
}

static void test_long(void **state)
{
    enum { LONG = (1 << 20) + 3 };
    uint8_t *source = malloc(LONG), *got = malloc(LONG + 1);
    assert_true(source && got);
    for (size_t i = 0; i < LONG; i++)
        source[i] = (uint8_t)(i ^ i >> 8);
    tly_copy_streaming(got + 1, source, LONG);
    assert_memory_equal(got + 1, source, LONG);
    free(source);
    free(got);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_length),
        cmocka_unit_test(test_long),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
