/* cancels.h - in tests of GPUs: a rank takes back one of two operations in flight, in whatever way they go. */
#ifndef CANCELS_H
#define CANCELS_H

#include <errno.h>
#include <string.h>

#include "test/device/gpu.h"
#include "test/service/job.h"

/* Rank 0 or 1 takes back what waits for the other ranks, or is being copied or summed. */
static inline void cancel_some(tally_comm *c, const struct gpu *g, const struct tensor x[2], int steps)
{
    const int rank = tally_comm_rank(c), size = tally_comm_size(c);
    tally_op *op[2];
    for (int step = 0; step < steps; step++) {
        struct tally_options o = on_gpu(g);
        CHECK(cuStreamSynchronize(g->stream) == 0); /* what was cancelled has not waited for it */
        for (int t = 0; t < 2; t++) {
            memset(x[t].host, 1 + rank, x[t].bytes);
            upload(g, &x[t]);
            CHECK(tally_push_pull(c, t ? "b" : "a", x[t].device, x[t].device, x[t].bytes, TALLY_UINT8,
                                  TALLY_SUM, &o, &op[t]) == 0);
        }
        if (rank == step % 2)
            CHECK(tally_op_cancel(op[1], "no more") == 0);
        for (int t = 0; t < 2; t++) {
            int err = tally_op_wait(op[t], -1);
            const uint8_t *data = fake_cuda_data(x[t].device);
            CHECK(err == 0 || (t == 1 && err == -ECANCELED));
            CHECK(err || (data[0] == size * (size + 1) / 2 && memcmp(data, data + 1, x[t].bytes - 1) == 0));
            tally_op_free(op[t]);
        }
        job_barrier(c);
    }
}

#endif
