/* shared_test.c - shared segments: what is passed cannot shrink nor be written by others, and forked children do not
 * have it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/error.h"
#include "base/shared.h"

#include <cmocka.h>

static void test_pages_are_there(void **state)
{
    static const uint64_t sizes[] = {1, 4096, 5000, 2 << 20, (2 << 20) + 1};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        struct tly_shared *s;
        assert_int_equal(tly_shared_create(sizes[i], false, &s), 0);
        assert_true(s->size >= sizes[i] && s->size % 4096 == 0);
        assert_int_equal((uintptr_t)s->data % 4096, 0);
        for (uint64_t k = 0; k < s->size; k += 1000)
            assert_int_equal(s->data[k], 0);
        memset(s->data, 0xab, s->size);
        tly_shared_destroy(s);
    }
}

static void test_what_others_may(void **state)
{
    for (int writable = 0; writable < 2; writable++) {
        struct tly_shared *s;
        void *theirs;
        uint64_t size;
        assert_int_equal(tly_shared_create(10000, writable, &s), 0);
        assert_int_equal(ftruncate(s->fd, 100), -1);
        assert_int_equal(ftruncate(s->fd, 1 << 20), -1);
        assert_int_equal(tly_shared_map(s->fd, false, &theirs, &size), 0);
        assert_int_equal(size, s->size);
        strcpy((char *)s->data + 5000, "here");
        assert_string_equal((char *)theirs + 5000, "here");
        tly_shared_destroy(s); /* who has mapped it keeps it */
        assert_string_equal((char *)theirs + 5000, "here");
        munmap(theirs, size);

        assert_int_equal(tly_shared_create(10000, writable, &s), 0);
        assert_int_equal(tly_shared_map(s->fd, true, &theirs, &size), writable ? 0 : -EPERM);
        if (writable)
            munmap(theirs, size);
        tly_shared_destroy(s);
    }
}

/* What could shrink under its reader, or is no memory at all, is not mapped. */
static void test_strangers(void **state)
{
    void *data;
    uint64_t size;
    int fd = memfd_create("stranger", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(fd, 4096), 0);
    assert_int_equal(tly_shared_map(fd, false, &data, &size), -EPROTO);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_GROW), 0);
    assert_int_equal(tly_shared_map(fd, false, &data, &size), -EPROTO);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    assert_int_equal(tly_shared_map(fd, false, &data, &size), 0);
    munmap(data, size);
    close(fd);
    int pipes[2];
    assert_int_equal(pipe(pipes), 0);
    assert_int_equal(tly_shared_map(pipes[0], false, &data, &size), -EPROTO);
    assert_int_equal(tly_shared_map(-1, false, &data, &size), -EPROTO);
    close(pipes[0]);
    close(pipes[1]);
}

static void test_fork(void **state)
{
    struct tly_shared *s;
    assert_int_equal(tly_shared_create(8192, false, &s), 0);
    pid_t child = fork();
    if (child == 0) {
        unsigned char resident;
        _exit(mincore(s->data, 4096, &resident) == -1 && errno == ENOMEM && fcntl(s->fd, F_GETFD) == -1
                  ? 0
                  : 1);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    tly_shared_destroy(s);
}

static void test_no_descriptor_left(void **state)
{
    struct rlimit before, none;
    struct tly_shared *s;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    none = before;
    none.rlim_cur = 3;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    int err = tly_shared_create(4096, false, &s);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_int_equal(err, -EMFILE);
    assert_non_null(strstr(tly_error(), "open files"));
}

static void test_small_files(void **state)
{
    struct rlimit before, small;
    struct tly_shared *s;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    small = before;
    small.rlim_cur = 8192;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    int err = tly_shared_create(8193, false, &s); /* else a SIGXFSZ */
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    assert_int_equal(err, -EFBIG);
    assert_non_null(strstr(tly_error(), "ulimit -f"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pages_are_there),    cmocka_unit_test(test_what_others_may),
        cmocka_unit_test(test_strangers),          cmocka_unit_test(test_fork),
        cmocka_unit_test(test_no_descriptor_left), cmocka_unit_test(test_small_files),
    };
    return cmocka_run_group_tests_name("shared", tests, NULL, NULL);
}
