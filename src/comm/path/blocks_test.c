/* blocks_test.c - an operation has no block before it needs one, gets a credit's worth at a time, and makes do with what there is. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "comm/path/blocks.h"
#include "local/segment.h"

#include <cmocka.h>

enum { LONG = 4000, SIZE = 4032, CREDIT = 4 * SIZE, PARTS = 1000, MOST = 1 + TLY_BLOCKS_CREDITS * 4 };

static struct tly_segment *pool;
static struct tly_blocks blocks;

static int begin(void **state)
{
    const struct rlimit none = {RLIM_INFINITY, RLIM_INFINITY}, little = {96 << 20, none.rlim_max};
    int err = setrlimit(RLIMIT_FSIZE, &little) || tly_segment_create(4096, &pool) != 0;
    memset(&blocks, 0, sizeof blocks);
    tly_blocks_plan(&blocks, PARTS, LONG, CREDIT);
    return err || setrlimit(RLIMIT_FSIZE, &none) ? -1 : 0;
}

static int end(void **state)
{
    tly_blocks_finish(&blocks);
    tly_segment_unref(pool);
    return 0;
}

static bool is_pooled(const uint8_t *block)
{
    return tly_segment_place(pool, block, SIZE) != 0;
}

/* All that it gets without giving any back; each is written to. */
static int take_all(uint8_t *block[])
{
    int count = 0, err;
    for (; count < PARTS && (block[count] = tly_blocks_take(&blocks, pool, &err)); count++)
        memset(block[count], count, SIZE);
    assert_int_equal(err, 0);
    return count;
}

static void fill_pool(void)
{
    void *at;
    for (uint64_t bytes = 96 << 20; bytes >= TLY_PAGE;)
        if (tly_pool_borrow(pool, bytes, &at) != 0)
            bytes /= 2;
}

static void test_a_credit_at_a_time(void **state)
{
    uint8_t *block[PARTS];
    int err;
    for (int i = 0; i < MOST; i++) {
        assert_int_equal(blocks.taken, (i + 4) / 5);
        block[i] = tly_blocks_take(&blocks, pool, &err);
        assert_int_equal(err, 0);
        assert_non_null(block[i]);
        assert_true(is_pooled(block[i]));
        memset(block[i], i, SIZE);
    }
    for (int i = 0; i < MOST; i++)
        for (int k = 0; k < SIZE; k++)
            assert_int_equal(block[i][k], i);
}

/* Only a taker that has found none is told of one. */
static void test_given_back(void **state)
{
    uint8_t *block[PARTS];
    int err;
    assert_int_equal(take_all(block), MOST);
    assert_true(tly_blocks_give(&blocks, block[3]));
    assert_false(tly_blocks_give(&blocks, block[7]));
    assert_ptr_equal(tly_blocks_take(&blocks, pool, &err), block[7]);
    assert_ptr_equal(tly_blocks_take(&blocks, pool, &err), block[3]);
    assert_false(tly_blocks_give(&blocks, block[1]));
    assert_ptr_equal(tly_blocks_take(&blocks, pool, &err), block[1]);
    assert_null(tly_blocks_take(&blocks, pool, &err));
    assert_int_equal(err, 0);
    assert_true(tly_blocks_give(&blocks, block[1]));
}

static void test_few_parts(void **state)
{
    uint8_t *block[PARTS];
    tly_blocks_plan(&blocks, 2, LONG, CREDIT);
    assert_int_equal(take_all(block), 2);
}

/* However little credit there is, one part can go. */
static void test_little_credit(void **state)
{
    uint8_t *block[PARTS];
    tly_blocks_plan(&blocks, PARTS, 7, 1);
    assert_int_equal(take_all(block), 1);
}

static void test_full_pool(void **state)
{
    uint8_t *block[PARTS];
    fill_pool();
    assert_int_equal(take_all(block), MOST);
    assert_false(is_pooled(block[0]));
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
/* The process may map so many bytes more. */
static void limit_memory(uint64_t more)
{
    unsigned long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%lu", &pages), 1);
    fclose(f);
    assert_int_equal(setrlimit(RLIMIT_AS, &(struct rlimit){pages * TLY_PAGE + more, RLIM_INFINITY}), 0);
}

static void test_no_memory(void **state)
{
    enum { LARGE = 8 << 20 };
    struct rlimit before;
    int err[4];
    uint8_t *block[4];
    assert_int_equal(getrlimit(RLIMIT_AS, &before), 0);
    fill_pool();
    tly_blocks_plan(&blocks, PARTS, LARGE, LARGE); /* two at a time */
    limit_memory(0);
    block[0] = tly_blocks_take(&blocks, pool, &err[0]);
    limit_memory(LARGE + LARGE / 2);
    block[1] = tly_blocks_take(&blocks, pool, &err[1]);
    block[2] = tly_blocks_take(&blocks, pool, &err[2]);
    assert_int_equal(setrlimit(RLIMIT_AS, &before), 0);
    block[3] = tly_blocks_take(&blocks, pool, &err[3]);
    assert_null(block[0]);
    assert_true(err[0] < 0);
    assert_non_null(block[1]);
    assert_int_equal(err[1], 0);
    for (int i = 2; i < 4; i++) { /* the one that it has will come back */
        assert_null(block[i]);
        assert_int_equal(err[i], 0);
    }
    assert_true(tly_blocks_give(&blocks, block[1]));
    assert_ptr_equal(tly_blocks_take(&blocks, pool, &err[0]), block[1]);
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_credit_at_a_time, begin, end),
        cmocka_unit_test_setup_teardown(test_given_back, begin, end),
        cmocka_unit_test_setup_teardown(test_few_parts, begin, end),
        cmocka_unit_test_setup_teardown(test_little_credit, begin, end),
        cmocka_unit_test_setup_teardown(test_full_pool, begin, end),
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
        cmocka_unit_test_setup_teardown(test_no_memory, begin, end),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
