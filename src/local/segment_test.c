/* segment_test.c - memory that ranks share: what is handed out is zero, whatever was there before. */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "local/segment.h"

#include <cmocka.h>

enum { HEAD = 4096, STAGED = 1 << 20 };

static void take(struct tly_segment *s, size_t bytes, void **out)
{
    assert_int_equal(tly_pool_alloc(s, bytes, out), 0);
    for (size_t i = 0; i < bytes; i++)
        assert_int_equal(((uint8_t *)*out)[i], 0);
    memset(*out, 0xa5, bytes);
}

/* Staging is borrowed and given back as it is; it may be cut, and joined with what was never used. */
static void test_zero_after_staging(void **state)
{
    struct tly_segment *s;
    void *staged[2], *p[3];
    assert_int_equal(tly_segment_create(HEAD, &s), 0);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 2; i++) {
            assert_int_equal(tly_pool_borrow(s, STAGED, &staged[i]), 0);
            memset(staged[i], 0x5a, STAGED);
        }
        for (int i = 0; i < 2; i++)
            assert_int_equal(tly_pool_free(staged[round % 2 ? i : 1 - i]), 0);
        const size_t sizes[] = {1000, STAGED, 3 * STAGED};
        for (int i = 0; i < 3; i++)
            take(s, sizes[i], &p[i]);
        for (int i = 0; i < 3; i++)
            assert_int_equal(tly_pool_free(p[i]), 0);
    }
    tly_segment_unref(s);
}

static size_t pages(struct tly_segment *s)
{
    struct stat st;
    assert_int_equal(fstat(tly_segment_fd(s), &st), 0);
    return (size_t)st.st_blocks * 512;
}

/* Staging keeps its pages when it is given back; what was never used has none, and gets them when it is handed out. */
static void test_pages_of_staging(void **state)
{
    struct tly_segment *s;
    void *small, *large;
    assert_int_equal(tly_segment_create(HEAD, &s), 0);
    size_t head = pages(s);
    for (int round = 0; round < 3; round++) {
        assert_int_equal(tly_pool_borrow(s, STAGED, &small), 0);
        assert_true(pages(s) >= head + STAGED);
        assert_int_equal(tly_pool_free(small), 0);
        assert_true(pages(s) >= head + STAGED);
        assert_int_equal(tly_pool_borrow(s, 8 * STAGED, &large), 0);
        assert_true(pages(s) >= head + 8 * STAGED);
        assert_int_equal(tly_pool_borrow(s, STAGED, &small), 0);
        assert_true(pages(s) >= head + 9 * STAGED);
        assert_int_equal(tly_pool_free(large), 0);
        assert_int_equal(tly_pool_free(small), 0);
    }
    tly_segment_unref(s);
}

/* ... but not all that there ever was. */
static void test_most_pages_of_staging(void **state)
{
    enum { COUNT = 5, EACH = 64 << 20 };
    struct tly_segment *s;
    void *staged[COUNT];
    assert_int_equal(tly_segment_create(HEAD, &s), 0);
    size_t head = pages(s);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < COUNT; i++)
            assert_int_equal(tly_pool_borrow(s, EACH, &staged[i]), 0);
        assert_true(pages(s) >= head + (size_t)COUNT * EACH);
        for (int i = 0; i < COUNT; i++)
            assert_int_equal(tly_pool_free(staged[i]), 0);
        assert_int_equal(pages(s), head + (size_t)4 * EACH);
    }
    tly_segment_unref(s);
}

/* What is locked is zero and gives its pages back all the same; and a segment is not there as a whole at once. */
static void test_locked(void **state)
{
    struct tly_segment *s;
    void *p;
    if (geteuid() != 0 || mlockall(MCL_FUTURE) != 0)
        skip(); /* a plain user's limit would be met by all else, too */
    assert_int_equal(tly_segment_create(HEAD, &s), 0);
    assert_true(pages(s) < tly_segment_bytes(s) / 2);
    assert_int_equal(munlockall(), 0);
    size_t head = pages(s);
    for (int round = 0; round < 2; round++) {
        take(s, STAGED, &p);
        assert_int_equal(mlock(p, STAGED), 0);
        assert_int_equal(tly_pool_free(p), 0);
        assert_true(pages(s) <= head);
    }
    tly_segment_unref(s);
}

/* Nobody can have others meet a SIGBUS. */
static void test_sound(void **state)
{
    struct tly_segment *s;
    assert_int_equal(tly_segment_create(HEAD, &s), 0);
    int fd = tly_segment_fd(s), other = memfd_create("unsealed", MFD_CLOEXEC);
    assert_true(tly_segment_is_sound(fd, tly_segment_bytes(s)));
    assert_false(tly_segment_is_sound(fd, tly_segment_bytes(s) + 1));
    assert_int_equal(ftruncate(fd, 0), -1);
    assert_int_equal(ftruncate(other, 1 << 20), 0);
    assert_false(tly_segment_is_sound(other, 1 << 20));
    close(other);
    /* Its pages may not be there when they are touched. */
    other = memfd_create("huge", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);
    if (other >= 0) {
        assert_int_equal(ftruncate(other, 64 << 20), 0);
        assert_int_equal(fcntl(other, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
        assert_false(tly_segment_is_sound(other, 64 << 20));
        close(other);
    }
    tly_segment_unref(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_zero_after_staging),
                                       cmocka_unit_test(test_pages_of_staging),
                                       cmocka_unit_test(test_most_pages_of_staging),
                                       cmocka_unit_test(test_locked), cmocka_unit_test(test_sound)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
