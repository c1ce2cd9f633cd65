/* no_driver_test.c - a machine without NVIDIA's driver: every way in says so.  test/device/ has one. */
#include <dlfcn.h>
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/error.h"
#include "device/device.h"

static void no_driver(void **state)
{
    struct tly_device *d;
    int number;
    if (dlopen("libcuda.so.1", RTLD_NOW))
        skip();
    assert_int_equal(tly_device_find(state, 1, &number), -ENOTSUP);
    assert_int_equal(tly_device_open(0, &d), -ENOTSUP);
    assert_non_null(strstr(tly_error(), "no NVIDIA driver"));
    assert_non_null(strstr(tly_error(), "libcuda.so.1"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(no_driver)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
