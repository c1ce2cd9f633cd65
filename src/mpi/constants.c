/* constants.c - the symbols that are made of abi.h's lists: constants, versions and absent functions. */
#include <stdio.h>
#include <stdlib.h>

#include "mpi/mpi.h"

TLY_MPI_API extern const int mpiabi_version_major, mpiabi_version_minor, mpiabi_version_patch;
const int mpiabi_version_major = TLY_MPI_ABI_MAJOR, mpiabi_version_minor = TLY_MPI_ABI_MINOR,
          mpiabi_version_patch = TLY_MPI_ABI_PATCH;
/* Only shown, where MPITRAMPOLINE_VERBOSE is set. */
TLY_MPI_API extern const int mpiwrapper_version_major, mpiwrapper_version_minor, mpiwrapper_version_patch;
const int mpiwrapper_version_major = 0, mpiwrapper_version_minor = 1, mpiwrapper_version_patch = 0;

/* Called as we are loaded, to set Fortran's constants: there are none. */
TLY_MPI_API void mpiwrapper_export_fortran_constants_(void);
void mpiwrapper_export_fortran_constants_(void)
{
}

#define X(name, value) \
    TLY_MPI_API extern const int MPIABI_##name; \
    const int MPIABI_##name = value;
TLY_MPI_INTEGERS(X)
#undef X

#define X(name, bytes, dtype) \
    static const struct tly_mpi_type type_##name = {"MPI_" #name, bytes, dtype}; \
    TLY_MPI_API extern const void *const MPIABI_##name; \
    const void *const MPIABI_##name = &type_##name;
TLY_MPI_TYPES(X)
#undef X

#define X(name, reduction) \
    static const struct tly_mpi_op op_##name = {"MPI_" #name, reduction, #name[0] == 'L'}; \
    TLY_MPI_API extern const void *const MPIABI_##name; \
    const void *const MPIABI_##name = &op_##name;
TLY_MPI_OPS(X)
#undef X

#define X(name) \
    TLY_MPI_API extern const void *const MPIABI_##name; \
    const void *const MPIABI_##name = NULL;
TLY_MPI_NULLS(X)
#undef X

#define X(name) \
    static const char mark_##name; \
    TLY_MPI_API extern const void *const MPIABI_##name; \
    const void *const MPIABI_##name = &mark_##name;
TLY_MPI_MARKS(X)
#undef X
const void *const tly_mpi_in_place = &mark_IN_PLACE, *const tly_mpi_errors_return = &mark_ERRORS_RETURN;

TLY_MPI_API extern struct tly_mpi_comm *const MPIABI_COMM_WORLD, *const MPIABI_COMM_SELF;
struct tly_mpi_comm *const MPIABI_COMM_WORLD = &tly_mpi_world, *const MPIABI_COMM_SELF = &tly_mpi_self;

static __attribute__((noreturn)) void constants_absent(const char *function)
{
    fprintf(
        stderr,
        "tally: MPI_%s is not implemented: libtally_mpi.so has only what jaxlib calls and a little more\n",
        function);
    abort();
}

/* Whatever their arguments are: they are not looked at. */
#define X(name) \
    TLY_MPI_API int MPIABI_##name(void); \
    int MPIABI_##name(void) \
    { \
        constants_absent(#name); \
    }
TLY_MPI_ABSENT(X)
#undef X

#define X(name) \
    TLY_MPI_API int MPIXABI_##name(void); \
    int MPIXABI_##name(void) \
    { \
        return 0; /* no */ \
    }
TLY_MPI_EXTENSIONS(X)
#undef X
