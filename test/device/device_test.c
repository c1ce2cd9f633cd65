/* device_test.c - src/device on a driver that is not there (fake_cuda.c): order, and every failure of a call. */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "base/error.h"
#include "device/device.h"
#include "test/device/application.h"
#include "test/device/fake_cuda.h"

enum { PAGE = 4096, BYTES = 16 * PAGE };

static struct tly_device *open_with(const char *words, int number)
{
    struct tly_device *d;
    assert_int_equal(fake_cuda_left(), 0);
    fake_cuda_reset();
    setenv("FAKE_CUDA", words, 1);
    assert_int_equal(tly_device_open(number, &d), 0);
    return d;
}

static void close_all(struct tly_device *d)
{
    tly_device_close(d);
    assert_int_equal(fake_cuda_left(), 0);
}

static uint8_t *pages(size_t bytes)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(at, MAP_FAILED);
    return at;
}

/* The application's memory on a GPU. */
static void *alloc(int gpu, size_t bytes)
{
    unsigned long long at;
    void *context;
    assert_int_equal(cuDevicePrimaryCtxRetain(&context, gpu) | cuCtxPushCurrent_v2(context), 0);
    assert_int_equal(cuMemAlloc_v2(&at, bytes), 0);
    assert_int_equal(cuCtxPopCurrent_v2(&context) | cuDevicePrimaryCtxRelease_v2(gpu), 0);
    return (void *)(uintptr_t)at;
}

static void give_back(int gpu, void *at)
{
    void *context;
    assert_int_equal(cuDevicePrimaryCtxRetain(&context, gpu) | cuCtxPushCurrent_v2(context), 0);
    assert_int_equal(cuMemFree_v2((uintptr_t)at), 0);
    assert_int_equal(cuCtxPopCurrent_v2(&context) | cuDevicePrimaryCtxRelease_v2(gpu), 0);
}

static bool says(const char *piece)
{
    if (strstr(tly_error(), piece))
        return true;
    print_error("\"%s\" lacks \"%s\"\n", tly_error(), piece);
    return false;
}

/* --- pointers ------------------------------------------------------------------------------------------- */

static void pointers(void **state)
{
    struct tly_device *d = open_with("gpus=3", 1);
    uint8_t *host = pages(PAGE), *x = alloc(1, 100);
    unsigned long long managed;
    void *context;
    int number = -1;
    assert_int_equal(tly_device_find(x, 100, &number), 0);
    assert_int_equal(number, 1);
    assert_int_equal(tly_device_find(x + 100, 0, &number), -EINVAL);
    assert_int_equal(tly_device_find(x + 50, 51, &number), -EINVAL);
    assert_true(says("freed"));
    assert_int_equal(tly_device_find(host, 1, &number), -EINVAL);
    assert_int_equal(tly_device_register(d, host, PAGE), 0);
    assert_int_equal(tly_device_find(host, 1, &number), -EINVAL);
    assert_int_equal(tly_device_unregister(d, host), 0);
    give_back(1, x);
    assert_int_equal(tly_device_find(x, 1, &number), -EINVAL);
    assert_int_equal(cuDevicePrimaryCtxRetain(&context, 0), 0);
    assert_int_equal(cuCtxPushCurrent_v2(context), 0);
    assert_int_equal(cuMemAllocManaged(&managed, 64, 1), 0);
    assert_int_equal(tly_device_find((void *)(uintptr_t)managed, 64, &number), -EINVAL);
    assert_true(says("managed"));
    assert_int_equal(cuMemFree_v2(managed), 0);
    assert_int_equal(cuCtxPopCurrent_v2(&context), 0);
    assert_int_equal(cuDevicePrimaryCtxRelease_v2(0), 0);
    close_all(d);
    munmap(host, PAGE);
}

static void gpus_that_are_hidden(void **state)
{
    struct tly_device *d;
    int number;
    setenv("CUDA_VISIBLE_DEVICES", "2,0", 1);
    d = open_with("gpus=3", 0);
    void *x = alloc(0, 8);
    assert_int_equal(tly_device_find(x, 8, &number), 0);
    assert_int_equal(number, 0);
    give_back(0, x);
    close_all(d);
    assert_int_equal(tly_device_open(2, &d), -EIO);
    assert_true(says("GPU 2: cuDeviceGet failed"));
    unsetenv("CUDA_VISIBLE_DEVICES");
}

static void one_of_each_gpu(void **state)
{
    struct tly_device *d = open_with("gpus=2", 1), *again, *other;
    assert_int_equal(tly_device_open(1, &again), 0);
    assert_int_equal(tly_device_open(0, &other), 0);
    assert_true(again == d && other != d);
    tly_device_close(d);
    tly_device_close(other);
    uint8_t *host = pages(PAGE);
    assert_int_equal(tly_device_register(again, host, PAGE), 0);
    assert_int_equal(tly_device_unregister(again, host), 0);
    munmap(host, PAGE);
    close_all(again);
}

static void no_gpu(void **state)
{
    struct tly_device *d;
    fake_cuda_reset();
    setenv("FAKE_CUDA", "", 1);
    assert_int_equal(tly_device_open(0, &d), -ENOTSUP);
    assert_true(says("cuInit"));
}

/* --- order ---------------------------------------------------------------------------------------------- */

/* A copy out and back, behind what the application's stream does first. */
static void copies_follow_a_stream(void **state)
{
    for (int follow = 0; follow < 2; follow++) {
        struct tly_device *d = open_with("gpus=1", 0);
        uint8_t *host = pages(3 * BYTES), *x = alloc(0, BYTES), *first = host + BYTES,
                *back = host + 2 * BYTES;
        struct tly_mark *out, *in;
        void *context, *stream;
        assert_int_equal(tly_device_register(d, host, 3 * BYTES), 0);
        memset(first, 7, BYTES);
        assert_int_equal(cuDevicePrimaryCtxRetain(&context, 0), 0);
        assert_int_equal(cuCtxPushCurrent_v2(context), 0);
        assert_int_equal(cuStreamCreate(&stream, 1), 0);
        assert_int_equal(cuMemcpyAsync((uintptr_t)x, (uintptr_t)first, BYTES, stream), 0);
        if (follow) {
            assert_int_equal(tly_device_mark_stream(d, stream, &out), 0);
            assert_int_equal(tly_device_after(d, TLY_LANE_OUT, out), 0);
            tly_device_unmark(d, out);
        }
        assert_int_equal(tly_device_copy(d, TLY_LANE_OUT, host, x, BYTES, &out), 0);
        assert_int_equal(tly_device_wait(d, out), 0);
        assert_int_equal(host[0] == 7 && memcmp(host, first, BYTES) == 0, follow);
        /* back, in another lane */
        memset(host, 9, BYTES);
        assert_int_equal(tly_device_copy(d, TLY_LANE_IN, x, host, BYTES, &in), 0);
        assert_int_equal(tly_device_after(d, TLY_LANE_OUT, in), 0);
        tly_device_unmark(d, out);
        assert_int_equal(tly_device_copy(d, TLY_LANE_OUT, back, x, BYTES, &out), 0);
        assert_int_equal(tly_device_wait(d, out), 0);
        assert_memory_equal(back, host, BYTES);
        assert_int_equal(fake_cuda_moved(1, 0), 2 * BYTES);
        assert_int_equal(fake_cuda_moved(0, 1), (1 + follow) * BYTES);
        tly_device_unmark(d, in);
        tly_device_unmark(d, out);
        assert_int_equal(cuStreamDestroy_v2(stream), 0);
        assert_int_equal(cuCtxPopCurrent_v2(&context), 0);
        assert_int_equal(cuDevicePrimaryCtxRelease_v2(0), 0);
        assert_int_equal(tly_device_unregister(d, host), 0);
        give_back(0, x);
        close_all(d);
        munmap(host, 3 * BYTES);
    }
}

static void captured_streams(void **state)
{
    struct tly_device *d = open_with("gpus=1", 0);
    void *context, *stream, *graph;
    struct tly_mark *mark;
    assert_int_equal(cuDevicePrimaryCtxRetain(&context, 0), 0);
    assert_int_equal(cuCtxPushCurrent_v2(context), 0);
    assert_int_equal(cuStreamCreate(&stream, 0), 0);
    assert_int_equal(cuStreamBeginCapture_v2(stream, 0), 0);
    assert_int_equal(tly_device_mark_stream(d, stream, &mark), -EINVAL);
    assert_true(says("captured"));
    assert_int_equal(tly_device_mark_stream(d, NULL, &mark), -EINVAL);
    assert_int_equal(cuStreamEndCapture(stream, &graph), 0);
    assert_int_equal(tly_device_mark_stream(d, stream, &mark), 0);
    tly_device_unmark(d, mark);
    assert_int_equal(tly_device_mark_stream(d, NULL, &mark), 0);
    tly_device_unmark(d, mark);
    assert_int_equal(cuStreamDestroy_v2(stream), 0);
    assert_int_equal(cuCtxPopCurrent_v2(&context), 0);
    assert_int_equal(cuDevicePrimaryCtxRelease_v2(0), 0);
    close_all(d);
}

/* --- failures ------------------------------------------------------------------------------------------- */

/* Everything once.  The first failure's result; all is given back as far as the driver lets it. */
static int everything(void)
{
    uint8_t *host = pages(2 * PAGE);
    struct tly_device *d;
    struct tly_mark *ready = NULL, *copied = NULL;
    int number, err = tly_device_open(0, &d);
    if (err) {
        munmap(host, 2 * PAGE);
        return err;
    }
    err = tly_device_register(d, host, 2 * PAGE);
    bool registered = !err;
    if (!err && (err = tly_device_find(host, 1, &number)) == -EINVAL && says("not a GPU's"))
        err = 0;
    if (!err)
        err = tly_device_mark_stream(d, NULL, &ready);
    if (!err)
        err = tly_device_after(d, TLY_LANE_IN, ready);
    if (!err)
        err = tly_device_copy(d, TLY_LANE_IN, host, host + PAGE, PAGE, &copied);
    if (!err)
        err = tly_device_wait(d, copied);
    tly_device_unmark(d, ready);
    tly_device_unmark(d, copied);
    char why[TLY_SENTENCE];
    snprintf(why, sizeof why, "%s", tly_error());
    if (copied) /* so that no work uses the memory */
        tly_device_wait(d, copied);
    int later = registered ? tly_device_unregister(d, host) : 0;
    if (!err)
        err = later;
    else
        tly_fail(-err, "%s", why);
    tly_device_close(d);
    munmap(host, 2 * PAGE);
    return err;
}

static const char *const calls[] = {
    "cuInit",
    "cuPointerGetAttributes",
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuStreamCreate",
    "cuStreamIsCapturing",
    "cuStreamWaitEvent",
    "cuMemcpyAsync",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
};

static void each_call_fails(void **state)
{
    static const struct {
        int code, error;
    } kinds[] = {{2, -ENOMEM}, {999, -EIO}, {700, -ENODEV}};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
            for (int at = 1, more = 1; more; at++) {
                char words[128], said[64];
                snprintf(words, sizeof words, "gpus=1 fail=%s:%d:%d", calls[i], kinds[k].code, at);
                fake_cuda_reset();
                setenv("FAKE_CUDA", words, 1);
                int err = everything();
                more = fake_cuda_calls() >= at;
                snprintf(said, sizeof said, "%s failed: ", calls[i]);
                if (!more)
                    assert_int_equal(err, 0);
                else if (err == 0)
                    assert_true(at > 1); /* while all is given back */
                else if (err != kinds[k].error || !says(said))
                    fail_msg("%s: %d (%s)", words, err, tly_error());
                if (!more)
                    assert_int_equal(fake_cuda_left(), 0);
                assert_true(more || at > 1);
            }
    fake_cuda_reset();
}

/* All calls after it say the same. */
static void a_failure_that_lasts(void **state)
{
    struct tly_device *d = open_with("gpus=2 fail=cuMemcpyAsync:700", 1);
    char first[TLY_SENTENCE];
    uint8_t *host = pages(PAGE);
    struct tly_mark *mark;
    assert_int_equal(tly_device_register(d, host, PAGE), 0);
    assert_int_equal(tly_device_copy(d, TLY_LANE_IN, host, host + 8, 8, &mark), -ENODEV);
    assert_true(says("GPU 1: cuMemcpyAsync") && says("ILLEGAL_ADDRESS (700)"));
    assert_true(says("cannot use the GPU any more"));
    snprintf(first, sizeof first, "%s", tly_error());
    assert_int_equal(tly_device_unregister(d, host), -ENODEV);
    assert_string_equal(tly_error(), first);
    assert_int_equal(tly_device_mark_stream(d, NULL, &mark), -ENODEV);
    assert_string_equal(tly_error(), first);
    tly_device_close(d);
    fake_cuda_reset();
    munmap(host, PAGE);
}

static void too_little_memory_to_pin(void **state)
{
    struct tly_device *d = open_with("gpus=1 pinned=8192", 0);
    uint8_t *host = pages(3 * PAGE);
    assert_int_equal(tly_device_register(d, host, 3 * PAGE), -ENOMEM);
    assert_int_equal(tly_device_register(d, host, 2 * PAGE), 0);
    assert_int_equal(tly_device_register(d, host + PAGE, PAGE), -EIO);
    assert_int_equal(tly_device_unregister(d, host), 0);
    assert_int_equal(tly_device_unregister(d, host), -EIO);
    close_all(d);
    munmap(host, 3 * PAGE);
}

/* --- threads -------------------------------------------------------------------------------------------- */

struct turn {
    struct tly_device *d;
    uint8_t *host, *x;
    int number;
};

static void *copy_to_and_fro(void *arg)
{
    struct turn *t = arg;
    for (int i = 0; i < 50; i++) {
        struct tly_mark *there, *back;
        memset(t->host, t->number + i, PAGE);
        int err = tly_device_copy(t->d, TLY_LANE_IN, t->x, t->host, PAGE, &there);
        err |= tly_device_copy(t->d, TLY_LANE_IN, t->host, t->x, PAGE, &back);
        err |= tly_device_wait(t->d, back);
        tly_device_unmark(t->d, there);
        tly_device_unmark(t->d, back);
        for (int at = 0; at < PAGE && !err; at++)
            err = t->host[at] != (uint8_t)(t->number + i);
        if (err)
            return t;
    }
    return NULL;
}

static void threads(void **state)
{
    enum { THREADS = 4 };
    struct tly_device *d = open_with("gpus=1", 0);
    uint8_t *host = pages(THREADS * PAGE), *x = alloc(0, THREADS * PAGE);
    struct turn turn[THREADS];
    pthread_t thread[THREADS];
    void *failed;
    assert_int_equal(tly_device_register(d, host, THREADS * PAGE), 0);
    for (int i = 0; i < THREADS; i++) {
        turn[i] = (struct turn){d, host + i * PAGE, x + i * PAGE, 31 * i};
        assert_int_equal(pthread_create(&thread[i], NULL, copy_to_and_fro, &turn[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(thread[i], &failed);
        assert_null(failed);
    }
    assert_int_equal(tly_device_unregister(d, host), 0);
    give_back(0, x);
    close_all(d);
    munmap(host, THREADS * PAGE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pointers),
        cmocka_unit_test(gpus_that_are_hidden),
        cmocka_unit_test(one_of_each_gpu),
        cmocka_unit_test(no_gpu),
        cmocka_unit_test(copies_follow_a_stream),
        cmocka_unit_test(captured_streams),
        cmocka_unit_test(each_call_fails),
        cmocka_unit_test(a_failure_that_lasts),
        cmocka_unit_test(too_little_memory_to_pin),
        cmocka_unit_test(threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
