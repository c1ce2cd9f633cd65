/* collectives.c - one rank of the benchmark collectives.py, with Tally.
 *
 *   collectives ITERATIONS WARM_UP LIST
 *
 * LIST has lines "COUNT OPERATION": one operation of so many float32 in all, each timed by itself from behind a barrier until
 * it has ended on all ranks.  each.c does all but the operations. */
#include <stdio.h>
#include <stdlib.h>

#include <tally/tally.h>

#include "each.h"

struct job {
    tally_comm *comm;
    size_t *counts; /* of each rank, a piece */
};

static void check(int err)
{
    if (err < 0) {
        fprintf(stderr, "%s\n", tally_error());
        exit(1);
    }
}

static void finish(tally_op *op)
{
    if (tally_op_wait(op, -1) < 0) {
        fprintf(stderr, "%s\n", tally_op_error(op));
        exit(1);
    }
    tally_op_free(op);
}

static void barrier(void *user)
{
    struct job *job = user;
    tally_op *op;
    check(tally_barrier(job->comm, "start", NULL, &op));
    finish(op);
}

static void perform(void *user, const struct each *e)
{
    struct job *job = user;
    tally_comm *c = job->comm;
    tally_op *op;
    for (int i = 0; i < e->of; i++)
        job->counts[i] = e->piece;
    switch (e->kind) {
    case REDUCE_SCATTER:
        check(tally_reduce_scatter(c, NULL, e->in, e->out, job->counts, TALLY_FLOAT32, TALLY_SUM, NULL, &op));
        break;
    case ALL_GATHER:
        check(tally_allgather_into(c, NULL, e->in, e->out, e->piece, TALLY_FLOAT32, NULL, &op));
        break;
    case BROADCAST:
        check(tally_broadcast(c, NULL, e->in, e->count, TALLY_FLOAT32, 0, NULL, &op));
        break;
    case ALL_TO_ALL:
        check(tally_alltoall(c, NULL, e->in, job->counts, e->out, job->counts, TALLY_FLOAT32, NULL, &op));
        break;
    case REDUCE:
        check(tally_reduce(c, NULL, e->in, e->out, e->count, TALLY_FLOAT32, TALLY_SUM, 0, NULL, &op));
        break;
    default: {
        const char *name = "all-reduce";
        uint64_t bytes = e->count * sizeof(float);
        check(tally_plan(c, 0, 1, &name, &bytes)); /* as for gradients */
        check(tally_push_pull(c, name, e->in, e->out, e->count, TALLY_FLOAT32, TALLY_SUM, NULL, &op));
    }
    }
    finish(op);
}

int main(int argc, char **argv)
{
    struct rank r = {0};
    struct job job;
    char *report = NULL;
    rank_start(&r, argc, argv);
    check(tally_comm_open(NULL, &job.comm));
    r.number = tally_comm_rank(job.comm);
    r.of = tally_comm_size(job.comm);
    job.counts = rank_allocate((size_t)r.of, sizeof *job.counts);
    if (r.number == 0)
        check(tally_comm_report(job.comm, 10000, &report));
    int status = each_run(&r, &(struct each_calls){barrier, perform}, &job, report);
    check(tally_comm_close(job.comm));
    free(report);
    free(job.counts);
    return status;
}
