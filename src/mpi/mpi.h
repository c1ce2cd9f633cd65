/* mpi.h - what the files of libtally_mpi.so share: communicators, types, errors, and the one job that all stand on.
 *
 * The library serves programs that load their MPI through MPItrampoline; jaxlib is one.  It is a client of libtally like any
 * other: an MPI communicator is a group of Tally's with an ordered name space, so that calls on it are matched by their order
 * and ranks whose calls differ are told so.  MPI_Comm_split() gathers color and key of all ranks and sorts them by key.  The
 * new group's name holds the parent's name and the number of the split, so equal splits have different names.
 *
 * A call that cannot take part refuses (tly_mpi_refuse), so that the other ranks fail instead of waiting.  A function that is
 * not implemented ends the process and names itself.  An error number holds its class and the place of its sentence, which
 * MPI_Error_string() finds.
 *
 * No lock is held between submission and wait.  MPI_Finalize() waits for submissions alone (job.gate). */
#ifndef TLY_MPI_H
#define TLY_MPI_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "mpi/abi.h"
#include "tally/tally.h"

#define TLY_MPI_API __attribute__((visibility("default")))

/* A message of a rank to itself, which libtally does not carry. */
struct tly_mpi_letter {
    struct tly_mpi_letter *next;
    int tag;
    size_t bytes;
    unsigned char data[];
};

/* A communicator.  Its owner is the application, from the split that makes it to MPI_Comm_free(); `splits` may be
 * counted by any thread, `letters` are under the lock of message.c. */
struct tly_mpi_comm {
    tally_group *group; /* NULL: all ranks, or the own one alone */
    int rank, size;
    int *ranks;         /* of the job, in order; NULL: all, or the own one alone */
    char *name;         /* the same on all its ranks, and no other communicator's; NULL: the world's */
    atomic_uint splits; /* communicators made of it so far */
    struct tly_mpi_letter *letters;
};

struct tly_mpi_request; /* message.c */

struct tly_mpi_type {
    const char *name;
    int bytes;
    int dtype; /* enum tally_dtype, or TLY_MPI_NONE */
};

struct tly_mpi_op {
    const char *name;
    int reduction; /* enum tally_reduction, or TLY_MPI_NONE */
    bool logical;
};

extern struct tly_mpi_comm tly_mpi_world, tly_mpi_self;
extern const void *const tly_mpi_in_place, *const tly_mpi_errors_return;

/* --- world.c ----------------------------------------------------------------------------------------------- */

/* The job's communicator, which MPI_Finalize() leaves alone until tly_mpi_leave(); NULL, with *error set, where there
 * is none.  Between the two nothing may wait. */
tally_comm *tly_mpi_enter(const char *function, int *error);
void tly_mpi_leave(void);

/* An error of `error_class`, with a sentence that MPI_Error_string() finds. */
int tly_mpi_fail(int error_class, const char *function, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* The error for a negative number that a function of libtally has returned in this thread; 0 for 0. */
int tly_mpi_error(int err, const char *function);
/* Wait for the operation and free it; `err` is what the call that made it has returned. */
int tly_mpi_finish(int err, tally_op *op, const char *function);

/* 0, or the error of a handle that is no communicator, and of every communicator while there is no job: before
 * MPI_Init() and after MPI_Finalize(). */
int tly_mpi_check_comm(const struct tly_mpi_comm *comm, const char *function);
/* Bytes of `count` elements; or an error. */
int tly_mpi_bytes(int count, const struct tly_mpi_type *type, const char *function, size_t *bytes);
/* What operations on the communicator are given. */
struct tally_options tly_mpi_options(const struct tly_mpi_comm *comm);

/* The pieces of all ranks, `bytes` each, one behind the other.  note: as in tally_options. */
int tly_mpi_gather(const struct tly_mpi_comm *comm, const void *piece, size_t bytes, void *all,
                   const char *note, const char *function);

/* A collective call is about to write its result there.  What is large the allocator has mapped anew, and a page of it
 * comes with the first touch.  These faults take longer than the call; with large pages there are 512 times fewer. */
void tly_mpi_expect_result(void *result, size_t bytes);

/* Tell the other ranks of a collective call that this one refuses it, so that they do not wait; returns `error`. */
int tly_mpi_refuse(const struct tly_mpi_comm *comm, uint32_t kind, int error);

/* --- message.c --------------------------------------------------------------------------------------------- */

/* Throw away what a communicator's rank has sent to itself and not received. */
void tly_mpi_drop_letters(struct tly_mpi_comm *comm);

#endif
