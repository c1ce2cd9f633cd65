/* goodput.c - one rank of the benchmark goodput.py, with Tally: sums a list of tensors again and again and times it.
 *
 *   goodput ITERATIONS WARM_UP LIST
 *
 * LIST has lines "COUNT NAME", a tensor each, in the order in which backward would make them.  An iteration starts
 * behind a barrier and submits all of them in that order, the last (nearest to the model's input) most urgent; it
 * ends when the last sum has come.  rank.c does all but the summing. */
#include <stdio.h>
#include <stdlib.h>

#include <tally/tally.h>

#include "rank.h"

struct job {
    tally_comm *comm;
    tally_op **ops; /* one for each tensor */
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

static void sum(void *user, const struct rank *r)
{
    struct job *job = user;
    for (size_t i = 0; i < r->count; i++) {
        struct tally_options o = {.size = sizeof o, .priority = (int32_t)i};
        const struct tensor *t = &r->tensors[i];
        check(tally_push_pull(job->comm, t->name, t->data, t->data, t->count, TALLY_FLOAT32, TALLY_SUM, &o,
                              &job->ops[i]));
    }
    for (size_t i = 0; i < r->count; i++)
        finish(job->ops[i]);
}

/* So that the whole list is split over the services as planned. */
static void plan(tally_comm *comm, const struct rank *r)
{
    const char **names = calloc(r->count, sizeof *names);
    uint64_t *bytes = calloc(r->count, sizeof *bytes);
    if (!names || !bytes)
        exit(1);
    for (size_t i = 0; i < r->count; i++) {
        names[i] = r->tensors[i].name;
        bytes[i] = r->tensors[i].count * sizeof(float);
    }
    check(tally_plan(comm, 0, r->count, names, bytes));
    free(names);
    free(bytes);
}

int main(int argc, char **argv)
{
    struct rank r = {0};
    rank_start(&r, argc, argv);
    struct job job = {.ops = calloc(r.count, sizeof(tally_op *))};
    if (!job.ops)
        return 1;
    check(tally_comm_open(NULL, &job.comm));
    r.number = tally_comm_rank(job.comm);
    r.of = tally_comm_size(job.comm);
    plan(job.comm, &r);
    rank_run(&r, &(struct rank_calls){.barrier = barrier, .work = sum}, &job);
    char *report = NULL;
    if (r.number == 0)
        check(tally_comm_report(job.comm, 10000, &report));
    check(tally_comm_close(job.comm));
    int status = rank_finish(&r, report);
    free(report);
    free(job.ops);
    return status;
}
