/* map_test.c - the map against a plain array, with keys that collide and deletions in the middle of a run. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <stdlib.h>

#include "base/map.h"

#include <cmocka.h>

enum { KEYS = 300 };

/* kind 0: spread; 1: neighbours; 2: all in one place of any small table; 3: at its end, so that runs wrap. */
static uint64_t key_of(int kind, uint64_t i)
{
    switch (kind) {
    case 0:
        return (i + 1) * 0x9e3779b97f4a7c15ull;
    case 1:
        return i;
    case 2:
        return i << 32;
    default:
        return i << 32 | 0xfffffffe;
    }
}

static void compare(const struct tly_map *m, void *const *values, int kind)
{
    size_t count = 0, walked = 0;
    for (int i = 0; i < KEYS; i++) {
        assert_ptr_equal(tly_map_get(m, key_of(kind, (uint64_t)i)), values[i]);
        count += values[i] != NULL;
    }
    assert_int_equal(m->count, count);
    char *v;
    tly_map_each(m, v) walked++;
    assert_int_equal(walked, count);
}

static void test_against_an_array(void **state)
{
    static char things[KEYS];
    srand(11);
    for (int kind = 0; kind < 4; kind++) {
        struct tly_map m = {0};
        void *values[KEYS] = {NULL};
        assert_null(tly_map_get(&m, 5));
        assert_null(tly_map_take(&m, 5));
        for (int step = 0; step < 6000; step++) {
            int i = rand() % KEYS;
            if (rand() % 2) {
                values[i] = &things[rand() % KEYS];
                assert_int_equal(tly_map_put(&m, key_of(kind, (uint64_t)i), values[i]), 0);
            } else {
                assert_ptr_equal(tly_map_take(&m, key_of(kind, (uint64_t)i)), values[i]);
                values[i] = NULL;
            }
            if (step % 100 == 0)
                compare(&m, values, kind);
        }
        compare(&m, values, kind);
        for (int i = 0; i < KEYS; i++)
            assert_ptr_equal(tly_map_take(&m, key_of(kind, (uint64_t)i)), values[i]);
        assert_int_equal(m.count, 0);
        tly_map_finish(&m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_against_an_array)};
    return cmocka_run_group_tests_name("map", tests, NULL, NULL);
}
