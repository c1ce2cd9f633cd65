/* latency.c - latency of a 4-byte push_pull through the C API, inside the process that bench/latency.py has
 * opened the communicator in. */
#include <errno.h>
#include <time.h>

#include <tally/tally.h>

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* One float after the other, `count` times; seconds[i] is from the call to the end of the wait.  0, -errno, or
 * -EBADMSG: a sum was wrong. */
TALLY_API int bench_latency(tally_comm *comm, int count, double *seconds)
{
    const float expected = (float)tally_comm_size(comm);
    for (int i = 0; i < count; i++) {
        const float x = 1;
        float y = 0;
        tally_op *op;
        double begin = now();
        int err = tally_push_pull(comm, "bench.latency", &x, &y, 1, TALLY_FLOAT32, TALLY_SUM, NULL, &op);
        if (err < 0)
            return err;
        err = tally_op_wait(op, -1);
        seconds[i] = now() - begin;
        tally_op_free(op);
        if (err < 0)
            return err;
        if (y != expected)
            return -EBADMSG;
    }
    return 0;
}
