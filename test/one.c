/* one.c - lets one test of a C test program run: TEST_ONE is its name, with * and ? as in a shell. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

__attribute__((constructor)) static void one_choose(void)
{
    const char *name = getenv("TEST_ONE");
    if (name)
        cmocka_set_test_filter(name);
}
