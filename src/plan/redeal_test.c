/* redeal_test.c - which kept parts move when shares change. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "plan/plan.h"

#include <cmocka.h>

enum { PARTS = 400, SERVICES = 5 };

static uint64_t random_state;

static uint32_t any(uint32_t below)
{
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(random_state >> 33) % below;
}

static uint64_t has(const struct tly_plan_kept *part, uint32_t count, int service)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < count; i++)
        sum += part[i].owner == service ? part[i].length : 0;
    return sum;
}

/* Parts dealt by one split go over to another: no more moves than the two differ by, and the new split is nearly met. */
static void test_shares_change(void **state)
{
    for (int seed = 0; seed < 200; seed++) {
        random_state = (uint64_t)seed;
        struct tly_plan_kept part[PARTS], before[PARTS];
        uint32_t weight[SERVICES], longest = 1 + any(1 << 20), weights = 0, count = 1 + any(PARTS);
        uint64_t all = 0, moved = 0, excess = 0;
        for (int i = 0; i < SERVICES; i++)
            weights += weight[i] = any(4) ? 1 + any(50) : 0;
        if (!weights)
            weights = weight[0] = 1;
        for (uint32_t i = 0; i < count; i++) {
            part[i] = (struct tly_plan_kept){1 + any(longest), (uint16_t)any(SERVICES)};
            all += part[i].length;
        }
        memcpy(before, part, sizeof part);
        assert_int_equal(tly_plan_redeal(SERVICES, weight, count, part), 0);
        for (uint32_t i = 0; i < count; i++)
            moved += part[i].owner != before[i].owner ? part[i].length : 0;
        for (int i = 0; i < SERVICES; i++) {
            uint64_t due = (uint64_t)((double)all * weight[i] / weights), had = has(before, count, i),
                     now = has(part, count, i);
            excess += had > due ? had - due : 0;
            if (!weight[i])
                assert_int_equal(now, 0);
            else if (had > due) /* it has not fallen below its due, and has come near it */
                assert_in_range(now, due, due + 3ull * longest);
            else
                assert_in_range(now, had, due + 2ull * longest);
        }
        assert_true(moved <= excess);
    }
}

/* What moves is spread over all that a service has, not its first parts alone. */
static void test_spread(void **state)
{
    struct tly_plan_kept part[PARTS];
    static const uint32_t weight[] = {3, 1};
    for (uint32_t i = 0; i < PARTS; i++)
        part[i] = (struct tly_plan_kept){1000, 0};
    assert_int_equal(tly_plan_redeal(2, weight, PARTS, part), 0);
    for (uint32_t at = 0; at < PARTS; at += 40)
        assert_in_range(has(part + at, 40, 1), 9000, 11000);
}

/* One part cannot be shared out: it stays where it is, unless its owner has no share at all. */
static void test_one_part(void **state)
{
    static const uint32_t some[] = {1, 9}, none[] = {0, 1};
    struct tly_plan_kept part = {1000, 0};
    assert_int_equal(tly_plan_redeal(2, some, 1, &part), 0);
    assert_int_equal(part.owner, 0);
    assert_int_equal(tly_plan_redeal(2, none, 1, &part), 0);
    assert_int_equal(part.owner, 1);
    assert_int_equal(tly_plan_redeal(2, some, 0, NULL), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shares_change),
        cmocka_unit_test(test_spread),
        cmocka_unit_test(test_one_part),
    };
    return cmocka_run_group_tests_name("redeal", tests, NULL, NULL);
}
