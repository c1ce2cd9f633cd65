/* inputs_test.c - tensors of GPUs that are unusual or refused, and memory that cannot be pinned, on GPUs that are not there
 * (fake_cuda/). */
#include <errno.h>
#include <setjmp.h>
#include <string.h>
#include <unistd.h>

#include "test/device/application.h"
#include "test/device/fake_cuda.h"
#include "test/device/gpu.h"
#include "test/service/job.h"

#include <cmocka.h>

static const int together[] = {0, 0};

static int refuse(int rank, void *arg)
{
    struct gpu g;
    struct tensor x;
    unsigned long long managed;
    void *graph;
    float host[4] = {1, 2, 3, 4};
    tally_op *op;
    open_gpu(&g, 0, "gpus=2");
    tally_comm *c = job_open();
    make(&x, 16);
    memset(x.host, 0, 16);
    struct tally_options o = on_gpu(&g);
    CHECK(tally_push_pull(c, "x", host, host, 4, TALLY_FLOAT32, TALLY_SUM, &o, &op) == -EINVAL);
    CHECK_HOLDS(tally_error(), "not a GPU's");
    CHECK(tally_push_pull(c, "x", x.device, host, 4, TALLY_FLOAT32, TALLY_SUM, &o, &op) == -EINVAL);
    CHECK(cuMemAllocManaged(&managed, 64, 1) == 0);
    CHECK(tally_push_pull(c, "x", (void *)(uintptr_t)managed, x.device, 4, TALLY_FLOAT32, TALLY_SUM, &o,
                          &op) == -EINVAL);
    CHECK_HOLDS(tally_error(), "managed");
    CHECK(tally_push_pull(c, "x", x.device, (void *)(uintptr_t)managed, 4, TALLY_FLOAT32, TALLY_SUM, &o,
                          &op) == -EINVAL);
    CHECK_HOLDS(tally_error(), "managed");
    CHECK(cuMemFree_v2(managed) == 0);
    CHECK(tally_push_pull(c, "x", x.device, x.device, x.room / 4 + 1, TALLY_FLOAT32, TALLY_SUM, &o, &op) ==
          -EINVAL); /* it runs beyond its memory */
    CHECK_HOLDS(tally_error(), "not a GPU's");
    CHECK(tally_broadcast(c, "x", x.device, 4, TALLY_FLOAT32, 0, &o, &op) == -EINVAL);
    CHECK_HOLDS(tally_error(), "tally_broadcast takes memory of the host");
    CHECK(cuStreamBeginCapture_v2(g.stream, 0) == 0);
    CHECK(tally_push_pull(c, "x", x.device, x.device, 4, TALLY_FLOAT32, TALLY_SUM, &o, &op) == -EINVAL);
    CHECK_HOLDS(tally_error(), "captured");
    CHECK(cuStreamEndCapture(g.stream, &graph) == 0);
    void *waiting; /* for the default stream, of which no work may be looked at while it is captured */
    CHECK(cuStreamCreate(&waiting, 0) == 0 && cuStreamBeginCapture_v2(waiting, 0) == 0);
    o.stream = NULL;
    CHECK(tally_push_pull(c, "x", x.device, x.device, 4, TALLY_FLOAT32, TALLY_SUM, &o, &op) == -EINVAL);
    CHECK_HOLDS(tally_error(), "cuStreamIsCapturing failed");
    CHECK(cuStreamEndCapture(waiting, &graph) == 0 && cuStreamDestroy_v2(waiting) == 0);
    o.stream = (void *)(uintptr_t)2;
    CHECK(tally_push_pull(c, "x", x.device, x.device, 4, TALLY_FLOAT32, TALLY_SUM, &o, &op) == -EINVAL);
    CHECK_HOLDS(tally_error(), "CU_STREAM_PER_THREAD");
    o.stream = g.stream;
    struct gpu other = {0};
    unsigned long long elsewhere, gone;
    CHECK(cuDevicePrimaryCtxRetain(&other.context, 1) == 0 && cuCtxPushCurrent_v2(other.context) == 0);
    CHECK(cuStreamCreate(&other.stream, 1) == 0 && cuMemAlloc_v2(&elsewhere, 64) == 0);
    CHECK(tally_push_pull(c, "x", x.device, (void *)(uintptr_t)elsewhere, 4, TALLY_FLOAT32, TALLY_SUM, &o,
                          &op) == -EINVAL);
    CHECK_HOLDS(tally_error(), "the input is on GPU 0, and the output on GPU 1");
    o.stream = other.stream;
    CHECK(tally_push_pull(c, "x", x.device, x.device, 4, TALLY_FLOAT32, TALLY_SUM, &o, &op) == -EINVAL);
    CHECK_HOLDS(tally_error(), "not one of GPU 0");
    o.stream = g.stream;
    CHECK(cuMemFree_v2(elsewhere) == 0 && cuStreamDestroy_v2(other.stream) == 0);
    CHECK(cuCtxPopCurrent_v2(&other.context) == 0 && cuDevicePrimaryCtxRelease_v2(1) == 0);
    CHECK(cuMemAlloc_v2(&gone, 64) == 0 && cuMemFree_v2(gone) == 0);
    CHECK(tally_push_pull(c, "x", (void *)(uintptr_t)gone, x.device, 4, TALLY_FLOAT32, TALLY_SUM, &o, &op) ==
          -EINVAL);
    CHECK_HOLDS(tally_error(), "freed");
    CHECK(tally_push_pull(c, "x", x.device, (void *)(uintptr_t)gone, 4, TALLY_FLOAT32, TALLY_SUM, &o, &op) ==
          -EINVAL);
    CHECK_HOLDS(tally_error(), "freed");
    struct tally_options no_gpu = {.size = sizeof no_gpu}; /* of the host, which it is not */
    CHECK(tally_push_pull(c, "x", NULL, x.device, 4, TALLY_FLOAT32, TALLY_SUM, &no_gpu, &op) == -EINVAL);
    CHECK(tally_push_pull(c, "x", NULL, x.device, 4, TALLY_FLOAT32, TALLY_SUM, &o, &op) == -EINVAL);
    o.place = 2;
    CHECK(tally_push_pull(c, "x", x.device, x.device, 4, TALLY_FLOAT32, TALLY_SUM, &o, &op) == -EINVAL);
    o.place = TALLY_PLACE_CUDA;
    CHECK(tally_push_pull(c, "x", x.device, x.device, 4, TALLY_FLOAT32, TALLY_BAND, &o, &op) == -EINVAL);
    /* the name is free, and what was refused has left nothing */
    upload(&g, &x);
    CHECK(tally_push_pull(c, "x", x.device, x.device, 4, TALLY_FLOAT32, TALLY_SUM, &o, &op) == 0);
    job_expect(op, 0);
    CHECK(tally_comm_close(c) == 0);
    unmake(&x);
    close_gpu(&g);
    return 0;
}

/* A tensor of PyTorch's expandable segments. */
static int expand(int rank, void *arg)
{
    enum { COUNT = 4 * PAGE / sizeof(float) };
    struct gpu g;
    tally_op *op;
    unsigned long long at;
    open_gpu(&g, 0, "gpus=1");
    tally_comm *c = job_open();
    struct tally_options o = on_gpu(&g);
    CHECK(fake_cuda_expand(&at, 4 * PAGE) == 0);
    float *x = (float *)(uintptr_t)at, *data = fake_cuda_data(x);
    for (int i = 0; i < COUNT; i++)
        data[i] = (float)(i + rank);
    CHECK(tally_push_pull(c, "x", x, x, COUNT, TALLY_FLOAT32, TALLY_SUM, &o, &op) == 0);
    job_expect(op, 0);
    for (int i = 0; i < COUNT; i++)
        CHECK(data[i] == (float)(2 * i + 1));
    CHECK(tally_comm_close(c) == 0);
    CHECK(cuMemFree_v2(at) == 0 && cuMemFree_v2(at + 2 * PAGE) == 0);
    close_gpu(&g);
    return 0;
}

/* An operation is in flight while the application captures another stream. */
static int capture(int rank, void *arg)
{
    struct gpu g;
    struct tensor x;
    tally_op *op;
    void *other, *graph;
    open_gpu(&g, 0, "gpus=1");
    tally_comm *c = job_open();
    make(&x, 100000);
    memset(x.host, 0, x.bytes);
    upload(&g, &x);
    CHECK(cuStreamCreate(&other, 1) == 0 && cuStreamBeginCapture_v2(other, 0) == 0);
    struct tally_options o = on_gpu(&g);
    for (int by_default = 0; by_default < 2; by_default++) {
        o.stream = by_default ? NULL : g.stream;
        CHECK(tally_push_pull(c, "x", x.device, x.device, 25000, TALLY_FLOAT32, TALLY_SUM, &o, &op) == 0);
        job_expect(op, 0);
    }
    CHECK(tally_comm_close(c) == 0);
    CHECK(cuStreamEndCapture(other, &graph) == 0 && cuStreamDestroy_v2(other) == 0);
    unmake(&x);
    close_gpu(&g);
    return 0;
}

static void another_stream_is_captured(void **state)
{
    struct job j = {.ranks = 2, .main = capture};
    job_run(&j);
}

static void expandable_segments(void **state)
{
    struct job j = {.ranks = 2, .main = expand};
    job_run(&j);
}

/* Rank 1 cannot pin memory. */
static int pin_nothing(int rank, void *arg)
{
    struct gpu g;
    struct tensor x;
    open_gpu(&g, 0, rank == 1 ? "gpus=1 pinned=8192" : "gpus=1");
    tally_comm *c = job_open();
    make(&x, 16);
    for (int step = 0; step < 3; step++) {
        struct tally_options o = on_gpu(&g);
        tally_op *op;
        CHECK(tally_push_pull(c, "x", x.device, x.device, 4, TALLY_FLOAT32, TALLY_SUM, &o, &op) == 0);
        CHECK(tally_op_wait(op, -1) == -ECANCELED);
        CHECK_HOLDS(tally_op_error(op), "rank 1");
        CHECK_HOLDS(tally_op_error(op), "GPU 0: cuMemHostRegister failed: CUDA_ERROR_OUT_OF_MEMORY");
        tally_op_free(op);
    }
    CHECK(tally_comm_close(c) == 0);
    unmake(&x);
    close_gpu(&g);
    return 0;
}

static void no_memory_can_be_pinned(void **state)
{
    for (int together_too = 0; together_too < 2; together_too++) {
        struct job j = {.ranks = 2, .main = pin_nothing, .machine = together_too ? together : NULL};
        job_run(&j);
    }
}

/* Rank 0 can pin memory for one tensor.  The second waits for it, and asks for memory once a second. */
static int pin_one(int rank, void *arg)
{
    struct gpu g;
    unsigned long long x[2];
    tally_op *op[2];
    open_gpu(&g, 0, rank == 0 ? "gpus=1 pinned=150000 fail=cuMemHostRegister:2:1000000" : "gpus=1");
    tally_comm *c = job_open();
    struct tally_options o = on_gpu(&g);
    if (rank == 1)
        sleep(3);
    for (int t = 0; t < 2; t++) {
        CHECK(cuMemAlloc_v2(&x[t], 100000) == 0);
        CHECK(tally_push_pull(c, t ? "b" : "a", (void *)(uintptr_t)x[t], (void *)(uintptr_t)x[t], 25000,
                              TALLY_FLOAT32, TALLY_SUM, &o, &op[t]) == 0);
    }
    for (int t = 0; t < 2; t++)
        job_expect(op[t], 0);
    CHECK(fake_cuda_calls() < 20);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void memory_for_one_tensor_can_be_pinned(void **state)
{
    struct job j = {.ranks = 2, .main = pin_one};
    job_run(&j);
}

/* Rank 1 cannot pin memory the first time.  Later it stages in memory that ranks share, as before. */
static int pin_later(int rank, void *arg)
{
    struct gpu g;
    struct tensor x;
    tally_op *op;
    open_gpu(&g, 0, rank == 1 ? "gpus=1 fail=cuMemHostRegister:2:2" : "gpus=1");
    tally_comm *c = job_open();
    make(&x, 16);
    for (int step = 0; step < 2; step++) {
        struct tally_options o = on_gpu(&g);
        memset(x.host, 0, 16);
        upload(&g, &x);
        CHECK(tally_push_pull(c, "x", x.device, x.device, 4, TALLY_FLOAT32, TALLY_SUM, &o, &op) == 0);
        job_expect(op, step == 0 ? -ECANCELED : 0);
        CHECK(cuStreamSynchronize(g.stream) == 0);
    }
    CHECK(fake_cuda_is_shared(fake_cuda_staged()));
    CHECK(tally_comm_close(c) == 0);
    unmake(&x);
    close_gpu(&g);
    return 0;
}

static void shared_memory_is_pinned_later(void **state)
{
    struct job j = {.ranks = 2, .main = pin_later, .machine = together};
    job_run(&j);
}

static void bad_input_is_refused(void **state)
{
    struct job j = {.ranks = 2, .main = refuse};
    job_run(&j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_input_is_refused),
        cmocka_unit_test(another_stream_is_captured),
        cmocka_unit_test(expandable_segments),
        cmocka_unit_test(no_memory_can_be_pinned),
        cmocka_unit_test(memory_for_one_tensor_can_be_pinned),
        cmocka_unit_test(shared_memory_is_pinned_later),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
