/* collectives_mpi.c - one rank of the benchmark collectives.py, with MPI: collectives.c's arguments and output. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "each.h"

static void barrier(void *user)
{
    MPI_Barrier(MPI_COMM_WORLD);
}

/* MPI's counts are int: so much is no more than 2 GB. */
static void perform(void *user, const struct each *e)
{
    int *counts = user, count = (int)e->count, piece = (int)e->piece;
    switch (e->kind) {
    case ALL_REDUCE:
        MPI_Allreduce(MPI_IN_PLACE, e->in, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        break;
    case REDUCE_SCATTER:
        for (int i = 0; i < e->of; i++)
            counts[i] = piece;
        MPI_Reduce_scatter(e->in, e->out, counts, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        break;
    case ALL_GATHER:
        MPI_Allgather(e->in, piece, MPI_FLOAT, e->out, piece, MPI_FLOAT, MPI_COMM_WORLD);
        break;
    case ALL_TO_ALL:
        MPI_Alltoall(e->in, piece, MPI_FLOAT, e->out, piece, MPI_FLOAT, MPI_COMM_WORLD);
        break;
    case REDUCE:
        MPI_Reduce(e->in, e->out, count, MPI_FLOAT, MPI_SUM, 0, MPI_COMM_WORLD);
        break;
    default:
        MPI_Bcast(e->in, count, MPI_FLOAT, 0, MPI_COMM_WORLD);
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
    MPI_Get_library_version(version, &length);
    version[strcspn(version, ",\"\n")] = 0;
    snprintf(report, sizeof report, "{\"version\": \"%s\"}", version);
    int *counts = rank_allocate((size_t)r.of, sizeof *counts);
    int status = each_run(&r, &(struct each_calls){barrier, perform}, counts, report);
    MPI_Finalize();
    free(counts);
    return status;
}
