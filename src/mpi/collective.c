/* collective.c - the collective operations.
 *
 * Data that are only moved go as bytes, so the ranks may call them by different types.  jaxlib gives the same buffer as
 * input and output where it can; for libtally that is "in place", and where it means another place a copy is made.
 * A rank that cannot take part says so (tly_mpi_refuse), because the others would wait. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "mpi/mpi.h"

/* What a reduction is for libtally. */
struct reduction {
    enum tally_dtype dtype;
    enum tally_reduction how;
};

static int collective_find_reduction(const struct tly_mpi_type *type, const struct tly_mpi_op *op,
                                     const char *function, struct reduction *r)
{
    if (!op)
        return tly_mpi_fail(TLY_MPI_ERR_OP, function, "MPI_OP_NULL is no operation");
    if (type->dtype == TLY_MPI_NONE)
        return tly_mpi_fail(TLY_MPI_ERR_TYPE, function, "%s cannot be reduced", type->name);
    if (op->reduction == TLY_MPI_NONE || (op->logical && type->dtype != TALLY_BOOL))
        return tly_mpi_fail(TLY_MPI_ERR_OP, function, "%s of %s is not supported", op->name, type->name);
    *r = (struct reduction){(enum tally_dtype)type->dtype, (enum tally_reduction)op->reduction};
    return TLY_MPI_SUCCESS;
}

static int collective_check_root(const struct tly_mpi_comm *comm, int root, const char *function)
{
    if (root >= 0 && root < comm->size)
        return TLY_MPI_SUCCESS;
    return tly_mpi_fail(TLY_MPI_ERR_ROOT, function, "root %d is no rank from 0 to %d", root, comm->size - 1);
}

static void collective_copy(void *to, const void *from, size_t bytes)
{
    if (bytes && to != from)
        memmove(to, from, bytes);
}

/* `bytes` for each rank. */
static size_t *collective_even(const struct tly_mpi_comm *comm, size_t bytes)
{
    size_t *counts = malloc((size_t)comm->size * sizeof *counts);
    for (int i = 0; counts && i < comm->size; i++)
        counts[i] = bytes;
    return counts;
}

/* The size that both sides of a call with two counts give: bytes for each rank. */
static int collective_agree(int send_count, const struct tly_mpi_type *send_type, int take_count,
                            const struct tly_mpi_type *take_type, const char *function, size_t *bytes)
{
    size_t take;
    int error = tly_mpi_bytes(send_count, send_type, function, bytes);
    if (!error)
        error = tly_mpi_bytes(take_count, take_type, function, &take);
    if (!error && take != *bytes)
        error = tly_mpi_fail(TLY_MPI_ERR_COUNT, function, "%zu bytes a rank on one side and %zu on the other",
                             *bytes, take);
    return error;
}

TLY_MPI_API int MPIABI_Barrier(struct tly_mpi_comm *comm);
int MPIABI_Barrier(struct tly_mpi_comm *comm)
{
    static const char *const function = "MPI_Barrier";
    int error = tly_mpi_check_comm(comm, function);
    if (error || comm->size == 1)
        return error;
    tally_comm *c = tly_mpi_enter(function, &error);
    if (!c)
        return error;
    tally_op *op;
    struct tally_options options = tly_mpi_options(comm);
    int err = tally_barrier(c, NULL, &options, &op);
    tly_mpi_leave();
    return tly_mpi_finish(err, op, function);
}

TLY_MPI_API int MPIABI_Bcast(void *buffer, int count, const struct tly_mpi_type *type, int root,
                             struct tly_mpi_comm *comm);
int MPIABI_Bcast(void *buffer, int count, const struct tly_mpi_type *type, int root,
                 struct tly_mpi_comm *comm)
{
    static const char *const function = "MPI_Bcast";
    size_t bytes;
    int error = tly_mpi_check_comm(comm, function);
    if (!error && !(error = tly_mpi_bytes(count, type, function, &bytes)))
        error = collective_check_root(comm, root, function);
    if (error)
        return tly_mpi_refuse(comm, TALLY_BROADCAST, error);
    if (comm->size == 1)
        return error;
    tally_comm *c = tly_mpi_enter(function, &error);
    if (!c)
        return error;
    tally_op *op;
    struct tally_options options = tly_mpi_options(comm);
    int err = tally_broadcast(c, NULL, buffer, bytes, TALLY_UINT8, root, &options, &op);
    tly_mpi_leave();
    return tly_mpi_finish(err, op, function);
}

/* MPI_Allreduce, and with a root MPI_Reduce. */
static int collective_reduce(const void *send, void *take, int count, const struct tly_mpi_type *type,
                             const struct tly_mpi_op *mpi_op, int root, struct tly_mpi_comm *comm,
                             const char *function)
{
    size_t bytes;
    struct reduction r = {0};
    int error = tly_mpi_check_comm(comm, function);
    if (!error && !(error = tly_mpi_bytes(count, type, function, &bytes)))
        error = collective_find_reduction(type, mpi_op, function, &r);
    if (!error && root != TLY_MPI_NONE)
        error = collective_check_root(comm, root, function);
    if (error)
        return tly_mpi_refuse(comm, root == TLY_MPI_NONE ? TALLY_PUSH_PULL : TALLY_REDUCE, error);
    if (send == tly_mpi_in_place)
        send = take;
    if (comm->size == 1) {
        collective_copy(take, send, bytes);
        return error;
    }
    tally_comm *c = tly_mpi_enter(function, &error);
    if (!c)
        return error;
    tally_op *op;
    struct tally_options options = tly_mpi_options(comm);
    if (take != send && (root == TLY_MPI_NONE || root == comm->rank))
        tly_mpi_expect_result(take, bytes);
    int err = root == TLY_MPI_NONE
                  ? tally_push_pull(c, NULL, send, take, (size_t)count, r.dtype, r.how, &options, &op)
                  : tally_reduce(c, NULL, send, take, (size_t)count, r.dtype, r.how, root, &options, &op);
    tly_mpi_leave();
    return tly_mpi_finish(err, op, function);
}

TLY_MPI_API int MPIABI_Allreduce(const void *send, void *take, int count, const struct tly_mpi_type *type,
                                 const struct tly_mpi_op *op, struct tly_mpi_comm *comm);
int MPIABI_Allreduce(const void *send, void *take, int count, const struct tly_mpi_type *type,
                     const struct tly_mpi_op *op, struct tly_mpi_comm *comm)
{
    return collective_reduce(send, take, count, type, op, TLY_MPI_NONE, comm, "MPI_Allreduce");
}

TLY_MPI_API int MPIABI_Reduce(const void *send, void *take, int count, const struct tly_mpi_type *type,
                              const struct tly_mpi_op *op, int root, struct tly_mpi_comm *comm);
int MPIABI_Reduce(const void *send, void *take, int count, const struct tly_mpi_type *type,
                  const struct tly_mpi_op *op, int root, struct tly_mpi_comm *comm)
{
    if (root == TLY_MPI_NONE)
        root = TLY_MPI_PROC_NULL; /* refused, too */
    return collective_reduce(send, take, count, type, op, root, comm, "MPI_Reduce");
}

/* libtally puts the piece where it lies in the input, or apart from the input; jaxlib may want it elsewhere in there. */
static int collective_scatter_sum(const void *input, void *output, const size_t counts[], size_t total,
                                  size_t before, size_t element, struct reduction r,
                                  struct tly_mpi_comm *comm, const char *function)
{
    uintptr_t in = (uintptr_t)input, out = (uintptr_t)output;
    size_t bytes = counts[comm->rank] * element;
    bool overlaps = bytes && out < in + total * element && in < out + bytes;
    void *place = (unsigned char *)output, *aside = NULL;
    int error = TLY_MPI_SUCCESS;
    if (overlaps && out != in + before * element && !(place = aside = malloc(bytes)))
        return tly_mpi_refuse(comm, TALLY_REDUCE_SCATTER,
                              tly_mpi_fail(TLY_MPI_ERR_NO_MEM, function, "no memory for %zu KB",
                                           bytes / 1000 + 1));
    tally_comm *c = tly_mpi_enter(function, &error);
    if (c) {
        tally_op *op;
        struct tally_options options = tly_mpi_options(comm);
        if (!overlaps)
            tly_mpi_expect_result(place, bytes);
        int err = tally_reduce_scatter(c, NULL, input, place, counts, r.dtype, r.how, &options, &op);
        tly_mpi_leave();
        error = tly_mpi_finish(err, op, function);
        if (aside && !error)
            memcpy(output, aside, bytes);
    }
    free(aside);
    return error;
}

/* take_counts NULL: `count` for each. */
static int collective_reduce_scatter(const void *send, void *take, const int take_counts[], int count,
                                     const struct tly_mpi_type *type, const struct tly_mpi_op *op,
                                     struct tly_mpi_comm *comm, const char *function)
{
    struct reduction r = {0};
    int error = tly_mpi_check_comm(comm, function);
    if (error)
        return error;
    size_t *counts = collective_even(comm, 0), bytes, total = 0, before = 0;
    if (!counts)
        return tly_mpi_refuse(comm, TALLY_REDUCE_SCATTER,
                              tly_mpi_fail(TLY_MPI_ERR_NO_MEM, function, "out of memory"));
    for (int i = 0; i < comm->size && !error; i++) {
        int n = take_counts ? take_counts[i] : count;
        error = tly_mpi_bytes(n, type, function, &bytes);
        before = i == comm->rank ? total : before;
        total += counts[i] = (size_t)n;
    }
    if (!error)
        error = collective_find_reduction(type, op, function, &r);
    const void *input = send == tly_mpi_in_place ? take : send;
    if (error)
        tly_mpi_refuse(comm, TALLY_REDUCE_SCATTER, error);
    else if (comm->size == 1)
        collective_copy(take, input, total * (size_t)type->bytes);
    else
        error = collective_scatter_sum(input, take, counts, total, before, (size_t)type->bytes, r, comm,
                                       function);
    free(counts);
    return error;
}

TLY_MPI_API int MPIABI_Reduce_scatter(const void *send, void *take, const int counts[],
                                      const struct tly_mpi_type *type, const struct tly_mpi_op *op,
                                      struct tly_mpi_comm *comm);
int MPIABI_Reduce_scatter(const void *send, void *take, const int counts[], const struct tly_mpi_type *type,
                          const struct tly_mpi_op *op, struct tly_mpi_comm *comm)
{
    return collective_reduce_scatter(send, take, counts, 0, type, op, comm, "MPI_Reduce_scatter");
}

TLY_MPI_API int MPIABI_Reduce_scatter_block(const void *send, void *take, int count,
                                            const struct tly_mpi_type *type, const struct tly_mpi_op *op,
                                            struct tly_mpi_comm *comm);
int MPIABI_Reduce_scatter_block(const void *send, void *take, int count, const struct tly_mpi_type *type,
                                const struct tly_mpi_op *op, struct tly_mpi_comm *comm)
{
    return collective_reduce_scatter(send, take, NULL, count, type, op, comm, "MPI_Reduce_scatter_block");
}

TLY_MPI_API int MPIABI_Allgather(const void *send, int send_count, const struct tly_mpi_type *send_type,
                                 void *take, int take_count, const struct tly_mpi_type *take_type,
                                 struct tly_mpi_comm *comm);
int MPIABI_Allgather(const void *send, int send_count, const struct tly_mpi_type *send_type, void *take,
                     int take_count, const struct tly_mpi_type *take_type, struct tly_mpi_comm *comm)
{
    static const char *const function = "MPI_Allgather";
    size_t piece;
    bool in_place = send == tly_mpi_in_place;
    int error = tly_mpi_check_comm(comm, function);
    if (!error && in_place)
        error = tly_mpi_bytes(take_count, take_type, function, &piece);
    else if (!error)
        error = collective_agree(send_count, send_type, take_count, take_type, function, &piece);
    if (error)
        return tly_mpi_refuse(comm, TALLY_ALLGATHER, error);
    if (in_place)
        send = (const unsigned char *)take + (size_t)comm->rank * piece;
    return tly_mpi_gather(comm, send, piece, take, "in bytes", function);
}

/* The arguments of a gather or a scatter.  own: the piece of this rank, which is `in_place` at the root at most; each: the
 * root's pieces, of which others give nothing.  piece: bytes; counts: at the root, all ranks' pieces, owned by the caller. */
static int collective_check_pieces(const struct tly_mpi_comm *comm, int root, bool in_place, int own_count,
                                   const struct tly_mpi_type *own_type, int each_count,
                                   const struct tly_mpi_type *each_type, const char *function, size_t *piece,
                                   size_t **counts)
{
    int error = tly_mpi_check_comm(comm, function);
    if (!error)
        error = collective_check_root(comm, root, function);
    if (error)
        return error;
    bool is_root = root == comm->rank;
    if (in_place && !is_root)
        return tly_mpi_fail(TLY_MPI_ERR_BUFFER, function, "only the root may pass MPI_IN_PLACE");
    if (in_place)
        error = tly_mpi_bytes(each_count, each_type, function, piece);
    else if (is_root)
        error = collective_agree(own_count, own_type, each_count, each_type, function, piece);
    else
        error = tly_mpi_bytes(own_count, own_type, function, piece);
    if (!error && is_root && !(*counts = collective_even(comm, *piece)))
        error = tly_mpi_fail(TLY_MPI_ERR_NO_MEM, function, "out of memory");
    return error;
}

TLY_MPI_API int MPIABI_Gather(const void *send, int send_count, const struct tly_mpi_type *send_type,
                              void *take, int take_count, const struct tly_mpi_type *take_type, int root,
                              struct tly_mpi_comm *comm);
int MPIABI_Gather(const void *send, int send_count, const struct tly_mpi_type *send_type, void *take,
                  int take_count, const struct tly_mpi_type *take_type, int root, struct tly_mpi_comm *comm)
{
    static const char *const function = "MPI_Gather";
    size_t piece = 0, *counts = NULL;
    bool in_place = send == tly_mpi_in_place;
    int error = collective_check_pieces(comm, root, in_place, send_count, send_type, take_count, take_type,
                                        function, &piece, &counts);
    if (error)
        return tly_mpi_refuse(comm, TALLY_GATHER, error);
    if (in_place)
        send = (const unsigned char *)take + (size_t)comm->rank * piece;
    if (comm->size == 1)
        collective_copy(take, send, piece);
    tally_comm *c = comm->size > 1 ? tly_mpi_enter(function, &error) : NULL;
    if (c) {
        tally_op *op;
        struct tally_options options = tly_mpi_options(comm);
        int err = tally_gather(c, NULL, send, piece, take, counts, TALLY_UINT8, root, &options, &op);
        tly_mpi_leave();
        error = tly_mpi_finish(err, op, function);
    }
    free(counts);
    return error;
}

TLY_MPI_API int MPIABI_Scatter(const void *send, int send_count, const struct tly_mpi_type *send_type,
                               void *take, int take_count, const struct tly_mpi_type *take_type, int root,
                               struct tly_mpi_comm *comm);
int MPIABI_Scatter(const void *send, int send_count, const struct tly_mpi_type *send_type, void *take,
                   int take_count, const struct tly_mpi_type *take_type, int root, struct tly_mpi_comm *comm)
{
    static const char *const function = "MPI_Scatter";
    size_t piece = 0, *counts = NULL;
    bool in_place = take == tly_mpi_in_place;
    int error = collective_check_pieces(comm, root, in_place, take_count, take_type, send_count, send_type,
                                        function, &piece, &counts);
    if (error)
        return tly_mpi_refuse(comm, TALLY_SCATTER, error);
    if (in_place)
        take = (unsigned char *)(uintptr_t)send + (size_t)comm->rank * piece;
    if (comm->size == 1)
        collective_copy(take, send, piece);
    tally_comm *c = comm->size > 1 ? tly_mpi_enter(function, &error) : NULL;
    if (c) {
        tally_op *op;
        struct tally_options options = tly_mpi_options(comm);
        int err = tally_scatter(c, NULL, send, counts, take, piece, TALLY_UINT8, root, &options, &op);
        tly_mpi_leave();
        error = tly_mpi_finish(err, op, function);
    }
    free(counts);
    return error;
}

TLY_MPI_API int MPIABI_Alltoall(const void *send, int send_count, const struct tly_mpi_type *send_type,
                                void *take, int take_count, const struct tly_mpi_type *take_type,
                                struct tly_mpi_comm *comm);
int MPIABI_Alltoall(const void *send, int send_count, const struct tly_mpi_type *send_type, void *take,
                    int take_count, const struct tly_mpi_type *take_type, struct tly_mpi_comm *comm)
{
    static const char *const function = "MPI_Alltoall";
    size_t piece = 0, *counts = NULL;
    void *aside = NULL;
    bool in_place = send == tly_mpi_in_place;
    int error = tly_mpi_check_comm(comm, function);
    if (!error && in_place)
        error = tly_mpi_bytes(take_count, take_type, function, &piece);
    else if (!error)
        error = collective_agree(send_count, send_type, take_count, take_type, function, &piece);
    if (!error && (!(counts = collective_even(comm, piece)) ||
                   (in_place && !(aside = malloc((size_t)comm->size * piece + 1)))))
        error = tly_mpi_fail(TLY_MPI_ERR_NO_MEM, function, "out of memory");
    if (error) {
        free(counts);
        return tly_mpi_refuse(comm, TALLY_ALLTOALL, error);
    }
    if (aside)
        send = memcpy(aside, take, (size_t)comm->size * piece);
    if (comm->size == 1)
        collective_copy(take, send, piece);
    tally_comm *c = comm->size > 1 ? tly_mpi_enter(function, &error) : NULL;
    if (c) {
        tally_op *op;
        struct tally_options options = tly_mpi_options(comm);
        int err = tally_alltoall(c, NULL, send, counts, take, counts, TALLY_UINT8, &options, &op);
        tly_mpi_leave();
        error = tly_mpi_finish(err, op, function);
    }
    free(aside);
    free(counts);
    return error;
}
