/* pool_test.c - slot memory: within its limit, counted, aligned, kept warm and given back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <stdlib.h>
#include <string.h>

#include "base/slot.h"
#include "sum/pool.h"

#include <cmocka.h>

static void test_sizes(void **state)
{
    assert_int_equal(tly_slot_bytes(0), 256);
    assert_int_equal(tly_slot_bytes(256), 256);
    assert_int_equal(tly_slot_bytes(257), 512);
    assert_int_equal(tly_slot_bytes(1 << 20), 1 << 20);
    assert_int_equal(tly_slot_bytes((1 << 20) + 1), 2 << 20);
    assert_int_equal(tly_slot_bytes(64 << 20), 64 << 20);
}

static void test_limit(void **state)
{
    struct tly_pool p = {.limit = 10000};
    void *a = tly_pool_take(&p, 4096), *b = tly_pool_take(&p, 4000);
    assert_non_null(a);
    assert_non_null(b);
    assert_int_equal(p.in_use, 8192);
    assert_null(tly_pool_take(&p, 2049));
    assert_int_equal(p.in_use, 8192);
    void *c = tly_pool_take(&p, 1000);
    assert_non_null(c);
    assert_int_equal(p.peak, 9216);
    tly_pool_give(&p, a, 4096);
    assert_int_equal(p.in_use, 5120);
    /* What is kept of another size makes room. */
    void *d = tly_pool_take(&p, 2048);
    assert_non_null(d);
    assert_true(p.in_use + p.kept <= p.limit);
    tly_pool_give(&p, b, 4000);
    tly_pool_give(&p, c, 1000);
    tly_pool_give(&p, d, 2048);
    tly_pool_give(&p, NULL, 5);
    assert_int_equal(p.in_use, 0);
    tly_pool_trim(&p);
    assert_int_equal(p.kept, 0);
}

static void test_warm(void **state)
{
    struct tly_pool p = {.limit = UINT64_MAX / 2};
    void *a = tly_pool_take(&p, 100000);
    tly_pool_give(&p, a, 100000);
    assert_ptr_equal(tly_pool_take(&p, 70000), a); /* of the same class: the same memory */
    assert_int_equal(p.kept, 0);
    tly_pool_give(&p, a, 70000);
    tly_pool_trim(&p);
}

/* Over a pause it stays warm; not for good. */
static void test_rest(void **state)
{
    const int64_t second = TLY_POOL_REST_NS / 10;
    struct tly_pool p = {.limit = UINT64_MAX / 2};
    void *a = tly_pool_take(&p, 5000);
    tly_pool_look(&p, 100 * second); /* in use, however long */
    tly_pool_give(&p, a, 5000);
    tly_pool_look(&p, 109 * second);
    assert_int_equal(p.kept, 8192);
    assert_ptr_equal(tly_pool_take(&p, 5000), a);
    tly_pool_give(&p, a, 5000);
    tly_pool_look(&p, 115 * second); /* taken and given since the last look */
    tly_pool_look(&p, 124 * second);
    assert_int_equal(p.kept, 8192);
    tly_pool_look(&p, 125 * second);
    assert_int_equal(p.kept, 0);
}

static void test_apart(void **state)
{
    enum { MOST = 400 };
    struct tly_pool p = {.limit = 64 << 20};
    static uint8_t *buffer[MOST];
    static uint32_t bytes[MOST];
    memset(buffer, 0, sizeof buffer);
    srand(3);
    for (int step = 0; step < 5000; step++) {
        int i = rand() % MOST;
        if (buffer[i]) {
            for (uint32_t k = 0; k < bytes[i]; k += 97) /* nobody else has written there */
                assert_int_equal(buffer[i][k], (uint8_t)i);
            tly_pool_give(&p, buffer[i], bytes[i]);
            buffer[i] = NULL;
            continue;
        }
        bytes[i] = (uint32_t)rand() % (rand() % 20 ? 3000 : 300000) + 1;
        buffer[i] = tly_pool_take(&p, bytes[i]);
        if (!buffer[i])
            continue;
        assert_int_equal((uintptr_t)buffer[i] % (bytes[i] > 2048 ? 4096 : 64), 0);
        memset(buffer[i], i, bytes[i]);
        assert_true(p.in_use <= p.limit && p.in_use <= p.peak);
    }
    for (int i = 0; i < MOST; i++)
        tly_pool_give(&p, buffer[i], bytes[i]);
    assert_int_equal(p.in_use, 0);
    tly_pool_trim(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes), cmocka_unit_test(test_limit), cmocka_unit_test(test_warm),
        cmocka_unit_test(test_rest),  cmocka_unit_test(test_apart),
    };
    return cmocka_run_group_tests_name("pool", tests, NULL, NULL);
}
