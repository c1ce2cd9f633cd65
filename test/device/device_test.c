/* device_test.c - src/device on a driver that is not there (fake_cuda/): order, bits, and every failure of a call. */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
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

static void *alloc(struct tly_device *d, size_t bytes)
{
    void *at;
    assert_int_equal(tly_device_alloc(d, bytes, &at), 0);
    return at;
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
    uint8_t *host = pages(PAGE), *x = alloc(d, 100);
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
    assert_int_equal(tly_device_free(d, x), 0);
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
    void *x = alloc(d, 8);
    assert_int_equal(tly_device_find(x, 8, &number), 0);
    assert_int_equal(number, 0);
    assert_int_equal(tly_device_free(d, x), 0);
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
    void *x = alloc(again, 8);
    assert_int_equal(tly_device_free(again, x), 0);
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
        uint8_t *host = pages(3 * BYTES), *x = alloc(d, BYTES), *first = host + BYTES,
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
        assert_int_equal(cuStreamSynchronize(stream), 0);
        assert_int_equal(cuStreamDestroy_v2(stream), 0);
        assert_int_equal(cuCtxPopCurrent_v2(&context), 0);
        assert_int_equal(cuDevicePrimaryCtxRelease_v2(0), 0);
        assert_int_equal(tly_device_unregister(d, host), 0);
        assert_int_equal(tly_device_free(d, x), 0);
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
    for (unsigned non_blocking = 0; non_blocking < 2; non_blocking++) {
        assert_int_equal(cuStreamCreate(&stream, non_blocking), 0);
        assert_int_equal(cuStreamBeginCapture_v2(stream, 0), 0);
        assert_int_equal(tly_device_mark_stream(d, stream, &mark), -EINVAL);
        assert_true(says("captured"));
        int err = tly_device_mark_stream(d, NULL, &mark);
        assert_int_equal(err, non_blocking ? 0 : -EINVAL);
        if (!err)
            tly_device_unmark(d, mark);
        assert_int_equal(cuStreamEndCapture(stream, &graph), 0);
        assert_int_equal(tly_device_mark_stream(d, stream, &mark), 0);
        tly_device_unmark(d, mark);
        assert_int_equal(tly_device_mark_stream(d, NULL, &mark), 0);
        tly_device_unmark(d, mark);
        assert_int_equal(cuStreamDestroy_v2(stream), 0);
    }
    assert_int_equal(cuCtxPopCurrent_v2(&context), 0);
    assert_int_equal(cuDevicePrimaryCtxRelease_v2(0), 0);
    close_all(d);
}

/* Handles that are no streams. */
static void default_streams(void **state)
{
    struct tly_device *d = open_with("gpus=1", 0);
    void *legacy = (void *)(uintptr_t)1, *per_thread = (void *)(uintptr_t)2;
    struct tly_mark *mark;
    assert_int_equal(tly_device_mark_stream(d, legacy, &mark), 0);
    tly_device_unmark(d, mark);
    assert_int_equal(tly_device_mark_stream(d, per_thread, &mark), -EINVAL);
    assert_true(says("CU_STREAM_PER_THREAD"));
    close_all(d);
}

/* A lane waits for a stream that is held until the device has been closed. */
static void a_close_waits_for_no_stream(void **state)
{
    struct tly_device *d = open_with("gpus=1", 0);
    void *context, *stream;
    struct tly_mark *mark;
    assert_int_equal(cuDevicePrimaryCtxRetain(&context, 0), 0);
    assert_int_equal(cuCtxPushCurrent_v2(context), 0);
    assert_int_equal(cuStreamCreate(&stream, 1), 0);
    void *x = alloc(d, BYTES), *y = alloc(d, BYTES);
    assert_int_equal(cuMemcpyAsync((uintptr_t)x, (uintptr_t)y, BYTES, stream), 0);
    fake_cuda_hold(stream, 1);
    assert_int_equal(tly_device_mark_stream(d, stream, &mark), 0);
    assert_int_equal(tly_device_after(d, TLY_LANE_OUT, mark), 0);
    tly_device_unmark(d, mark);
    tly_device_close(d);
    fake_cuda_hold(stream, 0);
    assert_int_equal(cuStreamSynchronize(stream), 0);
    assert_int_equal(cuMemFree_v2((uintptr_t)x), 0);
    assert_int_equal(cuMemFree_v2((uintptr_t)y), 0);
    assert_int_equal(cuStreamDestroy_v2(stream), 0);
    assert_int_equal(cuCtxPopCurrent_v2(&context), 0);
    assert_int_equal(cuDevicePrimaryCtxRelease_v2(0), 0);
    assert_int_equal(fake_cuda_left(), 0);
}

/* The GPU is given up because a lane waits for a stream that is held.  What another lane copies can be awaited nevertheless. */
static void other_lanes_go_on_after_a_give_up(void **state)
{
    struct tly_device *d = open_with("gpus=1", 0);
    uint8_t *host = pages(PAGE), *x = alloc(d, PAGE);
    void *context, *stream, *y;
    struct tly_mark *held, *mark;
    assert_int_equal(cuDevicePrimaryCtxRetain(&context, 0), 0);
    assert_int_equal(cuCtxPushCurrent_v2(context), 0);
    assert_int_equal(cuStreamCreate(&stream, 1), 0);
    assert_int_equal(tly_device_register(d, host, PAGE), 0);
    memset(host, 7, PAGE);
    fake_cuda_hold(stream, 1);
    assert_int_equal(cuMemcpyAsync((uintptr_t)x, (uintptr_t)x, PAGE, stream), 0);
    assert_int_equal(tly_device_mark_stream(d, stream, &held), 0);
    assert_int_equal(tly_device_after(d, TLY_LANE_OUT, held), 0);
    tly_device_unmark(d, held);
    assert_int_equal(tly_device_copy(d, TLY_LANE_IN, x, host, PAGE, &mark), 0);
    assert_int_equal(tly_device_give_up(d), -ENODEV);
    assert_int_equal(tly_device_alloc(d, 64, &y), -ENODEV);
    assert_int_equal(tly_device_wait(d, mark), 0);
    assert_memory_equal(fake_cuda_data(x), host, PAGE);
    tly_device_unmark(d, mark);
    fake_cuda_hold(stream, 0);
    assert_int_equal(cuCtxPopCurrent_v2(&context), 0);
    assert_int_equal(cuDevicePrimaryCtxRelease_v2(0), 0);
    tly_device_close(d);
    fake_cuda_reset();
    munmap(host, PAGE);
}

/* --- bits ----------------------------------------------------------------------------------------------- */

static uint64_t seed = 88172645463325252u;

static uint64_t random64(void)
{
    seed ^= seed >> 12;
    seed ^= seed << 25;
    seed ^= seed >> 27;
    return seed * 2685821657736338717u;
}

/* Bits at random have NaNs, infinities and subnormals.  A part of float32's numbers are near one another. */
static void fill(uint8_t *at, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        at[i] = (uint8_t)(random64() >> 40);
    if (random64() % 2)
        for (size_t i = 0; i + 4 <= bytes; i += 4) {
            float x = (float)(int32_t)(random64() >> 32) * 1e-9f;
            memcpy(at + i, &x, 4);
        }
}

static struct tly_reduction random_reduction(void)
{
    static const double factors[] = {1, 1, 0.5, -3.7, 1e30};
    struct tly_reduction r = {.dtype = (uint8_t)(random64() % TLY_DTYPE_COUNT),
                              .op = random64() % 2 ? TALLY_SUM : TALLY_AVERAGE,
                              .divisor = 1 + (uint32_t)(random64() % 9),
                              .prescale = factors[random64() % 5],
                              .postscale = factors[random64() % 5],
                              .to_partial = random64() % 4 == 0};
    if (r.dtype == TALLY_BOOL) {
        r.op = TALLY_SUM;
        r.prescale = r.postscale = 1;
    }
    return r;
}

static size_t partial_size(int dtype)
{
    return dtype == TALLY_FLOAT16 || dtype == TALLY_BFLOAT16 ? 4 : tly_reduce_element_size(dtype);
}

static void sum_now(struct tly_device *d, const struct tly_reduction *r, int n, const void *const in[],
                    void *out, size_t count)
{
    struct tly_mark *mark;
    assert_int_equal(tly_device_sum(d, TLY_LANE_GROUP, r, n, in, out, count, &mark), 0);
    assert_int_equal(tly_device_wait(d, mark), 0);
    tly_device_unmark(d, mark);
}

/* Groups of the tree reduce to partials, and these to the result: as one sum on the host. */
static void sums_have_the_hosts_bits(void **state)
{
    enum { COUNT = 300, MOST = 16 };
    static uint8_t host[MOST][COUNT * 16], expected[COUNT * 16];
    struct tly_device *d = open_with("gpus=1", 0);
    uint8_t *x[MOST],
        *partial[2] = {alloc(d, sizeof host[0]), alloc(d, sizeof host[0])}, *out = alloc(d, sizeof host[0]);
    const void *inputs[MOST], *rows[MOST];
    for (int j = 0; j < MOST; j++) {
        inputs[j] = x[j] = alloc(d, sizeof host[0]);
        rows[j] = host[j];
    }
    for (int turn = 0; turn < 2000; turn++) {
        struct tly_reduction r = random_reduction();
        int n = 1 + (int)(random64() % MOST);
        size_t count = random64() % 2 ? COUNT : 1 + random64() % 4;
        size_t bytes = count * (r.to_partial ? partial_size(r.dtype) : tly_reduce_element_size(r.dtype));
        assert_int_equal(tly_reduce_check(&r, NULL), 0);
        assert_true(tly_device_sums(&r));
        for (int j = 0; j < n; j++) {
            fill(host[j], sizeof host[j]);
            memcpy(fake_cuda_data(x[j]), host[j], sizeof host[j]);
        }
        tly_reduce(&r, n, rows, expected, count);
        if (n <= TLY_DEVICE_INPUTS) {
            sum_now(d, &r, n, inputs, out, count);
        } else {
            struct tly_reduction low = r, high = r;
            low.to_partial = high.from_partials = true;
            sum_now(d, &low, 8, inputs, partial[0], count);
            sum_now(d, &low, n - 8, inputs + 8, partial[1], count);
            sum_now(d, &high, 2, (const void *const *)partial, out, count);
        }
        if (memcmp(fake_cuda_data(out), expected, bytes))
            fail_msg("turn %d: type %d, %d inputs, %zu elements, factors %g, %g", turn, r.dtype, n, count,
                     r.prescale, r.postscale);
    }
    for (int j = 0; j < MOST; j++)
        assert_int_equal(tly_device_free(d, x[j]), 0);
    for (int j = 0; j < 2; j++)
        assert_int_equal(tly_device_free(d, partial[j]), 0);
    assert_int_equal(tly_device_free(d, out), 0);
    close_all(d);
}

/* A kernel writes to the host's memory by the address that the GPU has for it. */
static void sums_reach_the_host(void **state)
{
    struct tly_reduction r = {.dtype = TALLY_INT32, .op = TALLY_SUM, .prescale = 1, .postscale = 1};
    struct tly_device *d = open_with("gpus=1", 0);
    int32_t *host = (int32_t *)(void *)pages(PAGE), *x = alloc(d, PAGE);
    const void *twice[] = {x, x};
    void *reached;
    assert_int_equal(tly_device_reach(d, host, &reached), -EINVAL);
    assert_int_equal(tly_device_register(d, host, PAGE), 0);
    assert_int_equal(tly_device_reach(d, host, &reached), 0);
    for (int i = 0; i < 100; i++)
        ((int32_t *)fake_cuda_data(x))[i] = i;
    sum_now(d, &r, 2, twice, (int32_t *)reached + 7, 100);
    for (int i = 0; i < 100; i++)
        assert_int_equal(host[7 + i], 2 * i);
    assert_int_equal(tly_device_unregister(d, host), 0);
    assert_int_equal(tly_device_free(d, x), 0);
    close_all(d);
    munmap(host, PAGE);
}

static void other_reductions_are_the_hosts(void **state)
{
    for (int op = 0; op < TLY_REDUCTION_COUNT; op++)
        assert_int_equal(tly_device_sums(&(struct tly_reduction){.op = (uint8_t)op}),
                         op == TALLY_SUM || op == TALLY_AVERAGE);
}

/* --- failures ------------------------------------------------------------------------------------------- */

/* Everything once.  The first failure's result; all is given back as far as the driver lets it. */
static int everything(void)
{
    struct tly_reduction r = {.dtype = TALLY_FLOAT32, .op = TALLY_SUM, .prescale = 1, .postscale = 1};
    uint8_t *host = pages(PAGE);
    struct tly_device *d;
    struct tly_device_ticket ticket;
    struct tly_mark *mark = NULL, *summed = NULL;
    void *x = NULL, *mapped, *reached;
    bool registered = false;
    int number, err = tly_device_open(0, &d);
    if (err) {
        munmap(host, PAGE);
        return err;
    }
    if (!err)
        err = tly_device_register(d, host, PAGE);
    registered = !err;
    if (!err)
        err = tly_device_reach(d, host, &reached);
    if (!err)
        err = tly_device_alloc(d, PAGE, &x);
    if (!err)
        err = tly_device_find(x, PAGE, &number);
    if (!err)
        err = tly_device_export(d, x, &ticket);
    if (!err && (err = tly_device_map(d, &ticket, &mapped)) == -EIO &&
        strstr(tly_error(), "cuIpcOpenMemHandle"))
        err = 0; /* our own memory cannot be mapped */
    if (!err)
        err = tly_device_mark_stream(d, NULL, &mark);
    if (!err)
        err = tly_device_after(d, TLY_LANE_IN, mark);
    tly_device_unmark(d, mark);
    mark = NULL;
    if (!err)
        err = tly_device_copy(d, TLY_LANE_IN, x, host, PAGE, &mark);
    if (!err)
        err = tly_device_after(d, TLY_LANE_GROUP, mark);
    if (!err)
        err = tly_device_sum(d, TLY_LANE_GROUP, &r, 1, (const void *const *)&x, x, 10, &summed);
    if (!err)
        err = tly_device_wait(d, summed);
    if (mark) /* so that no work uses the memory */
        tly_device_wait(d, mark);
    if (summed)
        tly_device_wait(d, summed);
    tly_device_unmark(d, mark);
    tly_device_unmark(d, summed);
    char why[512];
    snprintf(why, sizeof why, "%s", tly_error());
    int late = x ? tly_device_free(d, x) : 0;
    if (registered && !late)
        late = tly_device_unregister(d, host);
    if (!err && late)
        err = late;
    else if (err)
        tly_fail(-err, "%s", why);
    tly_device_close(d);
    munmap(host, PAGE);
    return err;
}

static const char *const calls[] = {
    "cuInit",
    "cuPointerGetAttributes",
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuMemAlloc",
    "cuMemFree",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuIpcGetMemHandle",
    "cuStreamCreate",
    "cuStreamIsCapturing",
    "cuStreamWaitEvent",
    "cuMemcpyAsync",
    "cuMemHostGetDevicePointer",
    "cuLaunchKernel",
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
                /* the first marks a stream of the application, the next ones work that the lane has been given */
                const bool unmarked = at > 1 && strcmp(calls[i], "cuEventRecord") == 0;
                if (!more)
                    assert_int_equal(err, 0);
                else if (err == 0)
                    assert_true(at > 1); /* while all is given back */
                else if (err != (unmarked ? -ENODEV : kinds[k].error) || !says(said))
                    fail_msg("%s: %d (%s)", words, err, tly_error());
                if (!more)
                    assert_int_equal(fake_cuda_left(), 0);
                assert_true(more || at > 1);
            }
    fake_cuda_reset();
}

/* After some failures the process must be started anew. */
static void failures_that_last(void **state)
{
    static const struct {
        int code;
        bool lasts;
    } codes[] = {{1, false},   {2, false},   {4, true},    {100, false}, {214, true}, {220, true},
                 {226, true},  {400, false}, {700, true},  {702, true},  {709, true}, {710, true},
                 {712, false}, {714, true},  {719, true},  {720, false}, {721, true}, {800, false},
                 {801, false}, {810, true},  {900, false}, {908, false}, {911, true}, {999, false}};
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++) {
        struct tly_device *d = open_with("gpus=1", 0);
        char what[32];
        void *x;
        snprintf(what, sizeof what, "cuMemAlloc:%d", codes[i].code);
        fake_cuda_fail(what);
        int err = tly_device_alloc(d, 64, &x), later = tly_device_alloc(d, 64, &x);
        if ((err == -ENODEV) != codes[i].lasts || later != (codes[i].lasts ? -ENODEV : 0))
            fail_msg("%d: %d, then %d", codes[i].code, err, later);
        if (!later)
            assert_int_equal(tly_device_free(d, x), 0);
        tly_device_close(d);
        fake_cuda_reset();
    }
}

/* An illegal address of a kernel: the next call says it, and all calls after that say the same. */
static void a_failure_that_lasts(void **state)
{
    struct tly_reduction r = {.dtype = TALLY_INT32, .op = TALLY_SUM, .prescale = 1, .postscale = 1};
    struct tly_device *d = open_with("gpus=2", 1);
    char first[TLY_SENTENCE];
    void *x = alloc(d, 64), *y;
    const void *wrong = (char *)x + 32;
    struct tly_mark *mark;
    assert_int_equal(tly_device_sum(d, TLY_LANE_GROUP, &r, 1, &wrong, x, 16, &mark), -ENODEV);
    assert_true(says("GPU 1: ") && says("ILLEGAL_ADDRESS (700)") && says("cannot use the GPU any more"));
    snprintf(first, sizeof first, "%s", tly_error());
    assert_int_equal(tly_device_alloc(d, 64, &y), -ENODEV);
    assert_string_equal(tly_error(), first);
    assert_int_equal(tly_device_mark_stream(d, NULL, &mark), -ENODEV);
    assert_string_equal(tly_error(), first);
    tly_device_close(d);
    fake_cuda_reset();
}

/* Calls that belong to no GPU report it, too. */
static void a_failure_that_lasts_names_the_gpu(void **state)
{
    struct tly_device *d = open_with("gpus=2", 1);
    void *x = alloc(d, 64);
    int number;
    fake_cuda_fail("cuPointerGetAttributes:700");
    assert_int_equal(tly_device_find(x, 64, &number), -ENODEV);
    assert_true(says("GPU 1: cuPointerGetAttributes failed: "));
    tly_device_close(d);
    fake_cuda_reset();
    setenv("FAKE_CUDA", "gpus=2 fail=cuInit:719", 1);
    assert_int_equal(tly_device_open(1, &d), -ENODEV);
    assert_true(says("GPU 1: cuInit failed: "));
    fake_cuda_reset();
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
    uint8_t *host = pages(THREADS * PAGE), *x = alloc(d, THREADS * PAGE);
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
    assert_int_equal(tly_device_free(d, x), 0);
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
        cmocka_unit_test(default_streams),
        cmocka_unit_test(a_close_waits_for_no_stream),
        cmocka_unit_test(other_lanes_go_on_after_a_give_up),
        cmocka_unit_test(sums_have_the_hosts_bits),
        cmocka_unit_test(sums_reach_the_host),
        cmocka_unit_test(other_reductions_are_the_hosts),
        cmocka_unit_test(each_call_fails),
        cmocka_unit_test(failures_that_last),
        cmocka_unit_test(a_failure_that_lasts),
        cmocka_unit_test(a_failure_that_lasts_names_the_gpu),
        cmocka_unit_test(too_little_memory_to_pin),
        cmocka_unit_test(threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
