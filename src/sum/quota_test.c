/* quota_test.c - what one job has reserved is there, whatever another does. */
#include "sum/quota.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

enum { BYTES = 4096 };

static void test_one_has_all(void **state)
{
    struct tly_budget b;
    tly_budget_init(&b, 3 * BYTES);
    struct tly_quota q;
    void *had[3];
    tly_quota_init(&q, &b);
    assert_false(tly_quota_reserve(&q, 2 * BYTES));
    assert_int_equal(tly_quota_room(&q), 3 * BYTES);
    for (int i = 0; i < 3; i++)
        assert_non_null(had[i] = tly_quota_take(&q, BYTES));
    assert_null(tly_quota_take(&q, 1));
    void *past = tly_quota_take_always(&q, BYTES);
    assert_non_null(past);
    assert_int_equal(tly_quota_room(&q), 0);
    assert_int_equal(b.claimed, 4 * BYTES);
    tly_quota_give(&q, past, BYTES);
    for (int i = 0; i < 3; i++)
        tly_quota_give(&q, had[i], BYTES);
    assert_int_equal(q.peak, 4 * BYTES);
    assert_int_equal(b.claimed, 2 * BYTES);
    tly_quota_finish(&q);
    assert_int_equal(b.claimed + b.reserved + b.pool.in_use, 0);
    tly_pool_trim(&b.pool);
}

static void test_what_is_reserved_stays(void **state)
{
    struct tly_budget b;
    tly_budget_init(&b, 5 * BYTES);
    struct tly_quota one, other;
    void *had[3], *own[2];
    tly_quota_init(&one, &b);
    tly_quota_init(&other, &b);
    tly_quota_reserve(&one, 2 * BYTES);
    tly_quota_reserve(&other, 2 * BYTES);
    for (int i = 0; i < 3; i++)
        assert_non_null(had[i] = tly_quota_take(&one, BYTES));
    assert_null(tly_quota_take(&one, 1));
    assert_int_equal(tly_quota_most(&one), 3 * BYTES);
    assert_int_equal(tly_quota_room(&other), 2 * BYTES);
    for (int i = 0; i < 2; i++)
        assert_non_null(own[i] = tly_quota_take(&other, BYTES));
    assert_null(tly_quota_take(&other, 1));
    tly_quota_give(&one, had[0], BYTES); /* what is nobody's own may be anybody's */
    assert_non_null(had[0] = tly_quota_take(&other, BYTES));
    assert_null(tly_quota_take(&one, 1));
    tly_quota_give(&other, had[0], BYTES);
    for (int i = 0; i < 2; i++)
        tly_quota_give(&other, own[i], BYTES);
    tly_quota_finish(&other);
    assert_int_equal(tly_quota_room(&one), 3 * BYTES);
    for (int i = 1; i < 3; i++)
        tly_quota_give(&one, had[i], BYTES);
    tly_quota_finish(&one);
    tly_pool_trim(&b.pool);
}

static void test_comes_late(void **state)
{
    struct tly_budget b;
    tly_budget_init(&b, 4 * BYTES);
    struct tly_quota one, late;
    void *had[4], *own;
    tly_quota_init(&one, &b);
    tly_quota_init(&late, &b);
    tly_quota_reserve(&one, BYTES);
    for (int i = 0; i < 4; i++)
        had[i] = tly_quota_take(&one, BYTES);
    assert_false(tly_quota_over(&one));
    assert_false(tly_quota_reserve(&late, 2 * BYTES));
    assert_true(tly_quota_over(&one));
    assert_false(tly_quota_over(&late));
    assert_int_equal(tly_quota_room(&one), 0);
    assert_non_null(own = tly_quota_take(&late, BYTES));
    tly_quota_give(&one, had[0], BYTES);
    assert_true(tly_quota_over(&one));
    tly_quota_give(&one, had[1], BYTES);
    assert_false(tly_quota_over(&one));
    assert_null(tly_quota_take(&one, 1));
    assert_true(tly_quota_reserve(&late, 4 * BYTES)); /* the limit grows to what is reserved in all */
    assert_int_equal(b.pool.limit, 5 * BYTES);
    tly_quota_give(&late, own, BYTES);
    for (int i = 2; i < 4; i++)
        tly_quota_give(&one, had[i], BYTES);
    tly_quota_finish(&one);
    tly_quota_finish(&late);
    assert_int_equal(b.pool.limit, 4 * BYTES); /* nothing is reserved any more */
    tly_pool_trim(&b.pool);
}

/* Connections hold memory of the budget; what is reserved is there all the same. */
static void test_held_elsewhere(void **state)
{
    struct tly_budget b;
    tly_budget_init(&b, 5 * BYTES);
    struct tly_quota q;
    tly_quota_init(&q, &b);
    tly_quota_reserve(&q, 2 * BYTES);
    tly_budget_hold(&b, 2 * BYTES);
    assert_int_equal(tly_quota_room(&q), 3 * BYTES);
    tly_budget_hold(&b, 2 * BYTES);
    assert_int_equal(tly_quota_room(&q), 2 * BYTES);
    tly_budget_hold(&b, 2 * BYTES); /* more than there is */
    assert_int_equal(tly_quota_room(&q), 2 * BYTES);
    tly_budget_hold(&b, -6 * BYTES);
    assert_int_equal(tly_quota_room(&q), 5 * BYTES);
    tly_quota_finish(&q);
}

/* Connections get a quarter of the budget, and nothing that a job claims. */
static void test_what_may_be_held_elsewhere(void **state)
{
    struct tly_budget b;
    struct tly_quota q;
    tly_budget_init(&b, 8 * BYTES);
    tly_quota_init(&q, &b);
    assert_true(tly_budget_spares(&b, 2 * BYTES));
    assert_false(tly_budget_spares(&b, 2 * BYTES + 1));
    tly_budget_hold(&b, BYTES);
    assert_true(tly_budget_spares(&b, BYTES));
    assert_false(tly_budget_spares(&b, BYTES + 1));
    tly_quota_reserve(&q, 6 * BYTES);
    assert_true(tly_budget_spares(&b, BYTES));
    tly_quota_reserve(&q, 7 * BYTES);
    assert_false(tly_budget_spares(&b, 1));
    tly_quota_finish(&q);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_has_all),
        cmocka_unit_test(test_what_is_reserved_stays),
        cmocka_unit_test(test_comes_late),
        cmocka_unit_test(test_held_elsewhere),
        cmocka_unit_test(test_what_may_be_held_elsewhere),
    };
    return cmocka_run_group_tests_name("quota", tests, NULL, NULL);
}
