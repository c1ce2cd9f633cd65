/* closing_test.c - ranks whose GPU fails or is held, and which then close: the close ends, and the other ranks hear why. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>

#include "test/device/application.h"
#include "test/device/fake_cuda.h"
#include "test/device/groups.h"
#include "test/service/job.h"

#include <cmocka.h>

static int begin(const struct gpu *g, tally_comm *c, const struct tensor *x, tally_op **op)
{
    struct tally_options o = on_gpu(g);
    return tally_push_pull(c, "x", x->device, x->device, x->bytes / 4, TALLY_FLOAT32, TALLY_SUM, &o, op);
}

struct behind {
    bool grouped;
    const char *fault; /* of each rank's driver, once the communicator is open */
    bool lost;         /* the GPU counts as lost, and still has the copy */
    atomic_int open;   /* ranks */
};

/* The application's stream is held until all have closed.  A lane waits for it, and the copy behind that has failed. */
static int close_behind_a_stream(int rank, void *arg)
{
    struct behind *b = arg;
    struct gpu g;
    struct tensor x;
    tally_op *op;
    open_gpu(&g, b->grouped ? rank : 0, "gpus=2 peers=0:1");
    tally_comm *c = job_open();
    atomic_fetch_add(&b->open, 1);
    job_await(&b->open, 2); /* no GPU is lost while the other rank still opens its communicator */
    make(&x, 100000);
    memset(x.host, 0, x.bytes);
    upload(&g, &x);
    fake_cuda_hold(g.stream, 1);
    fake_cuda_fail(b->fault);
    int err = begin(&g, c, &x, &op);
    CHECK(!err || b->lost); /* the other rank's GPU has been lost already */
    if (!err)
        err = job_ends(op);
    CHECK(b->lost ? err == -ENODEV : err != 0);
    if (b->lost)
        CHECK_HOLDS(tally_error(), "cuEventRecord failed");
    CHECK(tally_comm_close(c) == 0);
    fake_cuda_hold(g.stream, 0);
    CHECK(cuStreamSynchronize(g.stream) == 0);
    if (b->lost)
        return 0;
    unmake(&x);
    close_gpu(&g);
    return 0;
}

static void streams_are_held_for_ever(void **state)
{
    struct behind *b = job_shared(sizeof *b);
    for (int grouped = 0; grouped < 2; grouped++)
        for (int lost = 0; lost < 2; lost++) {
            /* the first event is that of the submission */
            const char *fault = lost ? "cuEventRecord:2:2" : "cuMemcpyAsync:1";
            *b = (struct behind){.grouped = grouped, .lost = lost, .fault = fault};
            struct job j = {.ranks = 2,
                            .machine = grouped ? together : NULL,
                            .main = close_behind_a_stream,
                            .arg = b,
                            .settings = {"TALLY_GPU_GROUP=2"}};
            job_run(&j);
        }
}

/* Rank 1's submission finds that its GPU is lost, and the rank closes at once. */
static int close_with_a_lost_gpu(int rank, void *arg)
{
    atomic_int *have_first = arg; /* ranks */
    struct gpu g;
    struct tensor x;
    tally_op *op;
    open_gpu(&g, 0, "gpus=1");
    tally_comm *c = job_open();
    make(&x, 100000);
    CHECK(begin(&g, c, &x, &op) == 0);
    job_expect(op, 0);
    atomic_fetch_add(have_first, 1);
    job_await(have_first, 2);
    if (rank == 1)
        fake_cuda_lose(719);
    int err = begin(&g, c, &x, &op);
    if (rank == 0 && !err)
        err = job_ends(op);
    CHECK(err == -ENODEV);
    CHECK_HOLDS(tally_error(), "GPU 0: cu");
    CHECK_HOLDS(tally_error(), "cannot use the GPU any more");
    if (rank == 0)
        CHECK_HOLDS(tally_error(), "rank 1");
    tally_comm_close(c);
    return 0;
}

static void others_hear_of_a_lost_gpu(void **state)
{
    atomic_int *have_first = job_shared(sizeof *have_first);
    for (int joint = 0; joint < 2; joint++) {
        atomic_store(have_first, 0);
        struct job j = {.ranks = 2,
                        .machine = joint ? together : NULL,
                        .main = close_with_a_lost_gpu,
                        .arg = have_first,
                        .settings = {"TALLY_GPU_GROUP=1"}};
        job_run(&j);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(streams_are_held_for_ever),
        cmocka_unit_test(others_hear_of_a_lost_gpu),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
