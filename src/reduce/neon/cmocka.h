/* cmocka.h - stands in for cmocka where neon_test.sh cross-compiles this folder's tests: cross compilers come
 * without the library.  Only what those tests use; a failure ends the program. */
#ifndef TLY_NEON_CMOCKA_H
#define TLY_NEON_CMOCKA_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct CMUnitTest {
    const char *name;
    void (*run)(void **state);
};

#define cmocka_unit_test(f) \
    { \
#f, f \
    }
#define fail_msg(...) (printf(__VA_ARGS__), printf(" (%s:%d)\n", __FILE__, __LINE__), exit(1))
#define assert_true(x) ((x) ? (void)0 : fail_msg("not so: %s", #x))
#define assert_null(x) assert_true(!(x))
#define assert_non_null(x) assert_true(x)
#define assert_int_equal(x, y) assert_true((x) == (y))
#define assert_memory_equal(x, y, bytes) assert_true(memcmp(x, y, bytes) == 0)
#define skip() return

#define cmocka_run_group_tests_name(name, tests, up, down) \
    run_group(name, tests, sizeof(tests) / sizeof *(tests), up, down)
#define cmocka_run_group_tests(tests, up, down) cmocka_run_group_tests_name("tests", tests, up, down)

static int run_group(const char *name, const struct CMUnitTest *test, size_t count, int (*up)(void **),
                     int (*down)(void **))
{
    void *state = NULL;
    if (up && up(&state) != 0)
        return 1;
    for (size_t i = 0; i < count; i++) {
        test[i].run(&state);
        printf("%s: %s passed\n", name, test[i].name);
    }
    return down && down(&state) != 0;
}

#endif
