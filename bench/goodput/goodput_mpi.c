/* goodput_mpi.c - one rank of the benchmark goodput.py, with MPI's all-reduce: goodput.c's arguments and output.
 *
 * The tensors are summed one after the other, as Horovod does with its fused buffers: goodput.py has already put small
 * ones together. */
#include <limits.h>
#include <mpi.h>
#include <stdio.h>
#include <string.h>

#include "rank.h"

static void barrier(void *user)
{
    MPI_Barrier(MPI_COMM_WORLD);
}

static void sum(void *user, const struct rank *r)
{
    for (size_t i = 0; i < r->count; i++) {
        const struct tensor *t = &r->tensors[i];
        for (size_t at = 0; at < t->count; at += INT_MAX) { /* its counts are int */
            size_t n = t->count - at < INT_MAX ? t->count - at : INT_MAX;
            MPI_Allreduce(MPI_IN_PLACE, t->data + at, (int)n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        }
    }
}

int main(int argc, char **argv)
{
    char report[MPI_MAX_LIBRARY_VERSION_STRING + 32], version[MPI_MAX_LIBRARY_VERSION_STRING];
    struct rank r = {0};
    int length;
    MPI_Init(&argc, &argv);
    rank_start(&r, argc, argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &r.number);
    MPI_Comm_size(MPI_COMM_WORLD, &r.of);
    rank_run(&r, &(struct rank_calls){.barrier = barrier, .work = sum}, NULL);
    MPI_Get_library_version(version, &length);
    version[strcspn(version, ",\"\n")] = 0;
    snprintf(report, sizeof report, "{\"version\": \"%s\"}", version);
    MPI_Finalize();
    return rank_finish(&r, report);
}
