/* staged_test.c - operations whose input goes out in several copies, on a driver that is not there (fake_cuda/): results come in while
 * other parts go out, and an operation ends in the midst of that. */
#include <errno.h>
#include <setjmp.h>
#include <string.h>

#include "test/device/gpu.h"
#include "test/service/job.h"

#include <cmocka.h>

enum { COUNT = 2 << 20, BYTES = COUNT * sizeof(float), PIECE = 768 << 10, COPIES = 11 };

static const int together[] = {0, 0};

static void begin(tally_comm *c, const struct gpu *g, const struct tensor *x, const char *name, tally_op **op)
{
    struct tally_options o = on_gpu(g);
    CHECK(tally_push_pull(c, name, x->device, x->device, COUNT, TALLY_FLOAT32, TALLY_SUM, &o, op) == 0);
}

/* The numbers of this rank. */
static void write_numbers(const struct gpu *g, struct tensor *x, int rank)
{
    for (int i = 0; i < COUNT; i++)
        ((float *)(void *)x->host)[i] = (float)(i % 1000 + rank);
    upload(g, x);
    CHECK(cuStreamSynchronize(g->stream) == 0);
}

static void expect_sum(tally_comm *c, const struct tensor *x)
{
    const float *data = fake_cuda_data(x->device);
    const int n = tally_comm_size(c), ranks = n * (n - 1) / 2;
    for (int i = 0; i < COUNT; i++)
        CHECK(data[i] == (float)(n * (i % 1000) + ranks));
}

/* --- both ways at once ------------------------------------------------------------------------------------- */

/* So many copies out have been made, and no more: results of nearly as many bytes come in. */
static int overlap(int rank, void *arg)
{
    struct gpu g;
    struct tensor x;
    tally_op *op;
    open_gpu(&g, 0, "gpus=1");
    tally_comm *c = job_open();
    make(&x, BYTES);
    write_numbers(&g, &x, rank);
    const uint64_t out = fake_cuda_moved(1, 0), in = fake_cuda_moved(0, 1);
    fake_cuda_read(0);
    begin(c, &g, &x, "x", &op);
    for (int copies = 1; copies < COPIES; copies++) {
        fake_cuda_read(1);
        while (fake_cuda_moved(1, 0) < out + (uint64_t)copies * PIECE)
            job_sleep_ms(1);
        /* but for the first part, and the one that is not wholly there */
        while (fake_cuda_moved(0, 1) + (1 << 20) < in + (uint64_t)copies * PIECE)
            job_sleep_ms(1);
        CHECK(fake_cuda_moved(1, 0) == out + (uint64_t)copies * PIECE);
    }
    fake_cuda_read(-1);
    job_expect(op, 0);
    CHECK(fake_cuda_moved(1, 0) == out + BYTES && fake_cuda_moved(0, 1) == in + BYTES);
    expect_sum(c, &x);
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    unmake(&x);
    close_gpu(&g);
    return 0;
}

static void results_come_in_while_parts_go_out(void **state)
{
    for (int ranks = 1; ranks <= 2; ranks++) {
        struct job j = {.ranks = ranks, .main = overlap};
        job_run(&j);
    }
}

/* --- ends in the midst ------------------------------------------------------------------------------------- */

struct end {
    const char *fault; /* of rank 0's driver, once the communicator is open */
    int err;           /* with which the operation ends on rank 0 */
};

/* What rank 0's driver does ends the operation on all ranks, or on rank 0.  The next one is whole. */
static int fail_midway(int rank, void *arg)
{
    const struct end *end = arg;
    struct gpu g;
    struct tensor x;
    tally_op *op;
    open_gpu(&g, 0, "gpus=1");
    tally_comm *c = job_open();
    make(&x, BYTES);
    for (int step = 0; step < 3; step++) {
        write_numbers(&g, &x, rank);
        if (rank == 0 && step == 1)
            fake_cuda_fail(end->fault);
        begin(c, &g, &x, "x", &op);
        int err = tally_op_wait(op, -1);
        if (step == 1 && rank == 0)
            CHECK(err == end->err);
        else
            CHECK(err == 0 || (step == 1 && end->err == -ECANCELED && err == -ECANCELED));
        if (!err)
            expect_sum(c, &x);
        else
            CHECK_HOLDS(tally_op_error(op), "GPU 0: cu");
        tally_op_free(op);
        CHECK(cuStreamSynchronize(g.stream) == 0); /* what has failed has not waited for it */
    }
    CHECK(tally_comm_close(c) == 0);
    unmake(&x);
    close_gpu(&g);
    return 0;
}

static void inputs_fail_midway(void **state)
{
    static struct end ends[] = {{"cuMemcpyAsync:999:1", -ECANCELED},
                                {"cuMemcpyAsync:999:4", -ECANCELED},
                                {"cuMemcpyAsync:999:11", -ECANCELED},
                                {"copy-to-GPU:999:1", -EIO},
                                {"copy-to-GPU:999:3", -EIO}};
    for (size_t i = 0; i < 3 * sizeof ends / sizeof *ends; i++) {
        struct job j = {.ranks = i % 3 ? 2 : 1,
                        .machine = i % 3 == 2 ? together : NULL,
                        .main = fail_midway,
                        .arg = &ends[i / 3]};
        job_run(&j);
    }
}

/* Rank 0 takes the operation back while some of its input has yet to go out.  The memory is used again only once it has. */
static int cancel_midway(int rank, void *arg)
{
    struct gpu g;
    struct tensor x[2];
    tally_op *op;
    open_gpu(&g, 0, "gpus=1");
    tally_comm *c = job_open();
    for (int t = 0; t < 2; t++)
        make(&x[t], BYTES);
    for (int copies = 0; copies < COPIES; copies += 3) {
        write_numbers(&g, &x[0], rank);
        write_numbers(&g, &x[1], rank);
        if (rank == 0) {
            const uint64_t out = fake_cuda_moved(1, 0);
            fake_cuda_read(copies);
            begin(c, &g, &x[0], "a", &op);
            while (fake_cuda_moved(1, 0) < out + (uint64_t)copies * PIECE)
                job_sleep_ms(1);
            CHECK(tally_op_cancel(op, "no more") == 0);
            CHECK(tally_op_wait(op, -1) == -ECANCELED);
        } else {
            begin(c, &g, &x[0], "a", &op);
            CHECK(tally_op_wait(op, -1) == -ECANCELED);
        }
        tally_op_free(op);
        begin(c, &g, &x[1], "b", &op);
        fake_cuda_read(-1);
        job_expect(op, 0);
        expect_sum(c, &x[1]);
    }
    CHECK(tally_comm_close(c) == 0);
    CHECK(cuStreamSynchronize(g.stream) == 0);
    for (int t = 0; t < 2; t++)
        unmake(&x[t]);
    close_gpu(&g);
    return 0;
}

static void operations_are_cancelled_midway(void **state)
{
    for (int i = 0; i < 3; i++) {
        struct job j = {.ranks = i ? 2 : 1, .machine = i == 2 ? together : NULL, .main = cancel_midway};
        job_run(&j);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(results_come_in_while_parts_go_out),
        cmocka_unit_test(inputs_fail_midway),
        cmocka_unit_test(operations_are_cancelled_midway),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
