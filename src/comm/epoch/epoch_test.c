/* epoch_test.c - which epochs share the sums out alike. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/epoch/epoch.h"

#include <cmocka.h>

static void expect(bool alike, int services, const uint32_t *weight, int others, const uint32_t *other)
{
    uint32_t a[4], b[4];
    struct tly_epoch x = {.services = services, .weight = a}, y = {.services = others, .weight = b};
    for (int i = 0; i < 4; i++) {
        a[i] = weight[i];
        b[i] = other[i];
    }
    assert_true(tly_epoch_shares_as(&x, &y) == alike);
    assert_true(tly_epoch_shares_as(&y, &x) == alike);
}

/* A rank that has got its COMMIT from another coordinator may know of one service more, which was invited and is gone. */
static void test_shares(void **state)
{
    static const uint32_t one[4] = {3, 2, 0, 0}, other[4] = {3, 2, 1, 0};
    expect(true, 2, one, 2, one);
    expect(true, 2, one, 4, one);
    expect(true, 2, one, 2, other);
    expect(false, 2, one, 3, other);
    expect(false, 3, one, 3, other);
    expect(true, 3, other, 4, other);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_shares)};
    return cmocka_run_group_tests_name("epoch", tests, NULL, NULL);
}
