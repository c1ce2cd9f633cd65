/* mpi_test.c - the table of names, errors and what one rank alone can do, without a job. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "mpi/mpi.h"

#define X(name, ...) +1
/* As many as MPItrampoline asks for. */
_Static_assert(0 TLY_MPI_PRESENT(X) TLY_MPI_ABSENT(X) TLY_MPI_EXTENSIONS(X) == 374, "functions");
_Static_assert(0 TLY_MPI_INTEGERS(X) == 140, "integers");
_Static_assert(0 TLY_MPI_TYPES(X) TLY_MPI_OPS(X) TLY_MPI_NULLS(X) TLY_MPI_MARKS(X) + 2 == 120, "pointers");
#undef X

int MPIABI_Error_class(int code, int *error_class);
int MPIABI_Error_string(int code, char *string, int *length);
int MPIABI_Init(int *argc, char ***argv);
int MPIABI_Finalize(void);
int MPIABI_Initialized(int *flag);
int MPIABI_Finalized(int *flag);
int MPIABI_Is_thread_main(int *flag);
int MPIABI_Comm_split(struct tly_mpi_comm *comm, int color, int key, struct tly_mpi_comm **made);
int MPIABI_Comm_dup(struct tly_mpi_comm *comm, struct tly_mpi_comm **made);
int MPIABI_Comm_free(struct tly_mpi_comm **comm);
int MPIABI_Comm_rank(struct tly_mpi_comm *comm, int *rank);
int MPIABI_Comm_size(struct tly_mpi_comm *comm, int *size);
int MPIABI_Type_size(const struct tly_mpi_type *type, int *size);
int MPIABI_Allreduce(const void *send, void *take, int count, const struct tly_mpi_type *type,
                     const struct tly_mpi_op *op, struct tly_mpi_comm *comm);
int MPIABI_Allgather(const void *send, int send_count, const struct tly_mpi_type *send_type, void *take,
                     int take_count, const struct tly_mpi_type *take_type, struct tly_mpi_comm *comm);
int MPIABI_Reduce_scatter(const void *send, void *take, const int counts[], const struct tly_mpi_type *type,
                          const struct tly_mpi_op *op, struct tly_mpi_comm *comm);
int MPIABI_Isend(const void *buffer, int count, const struct tly_mpi_type *type, int to, int tag,
                 struct tly_mpi_comm *comm, struct tly_mpi_request **request);
int MPIABI_Irecv(void *buffer, int count, const struct tly_mpi_type *type, int from, int tag,
                 struct tly_mpi_comm *comm, struct tly_mpi_request **request);
int MPIABI_Wait(struct tly_mpi_request **request, struct tly_mpi_status *status);
int MPIABI_Waitall(int count, struct tly_mpi_request *requests[], struct tly_mpi_status statuses[]);
int MPIABI_Barrier(struct tly_mpi_comm *comm);
int MPIABI_Test(struct tly_mpi_request **request, int *flag, struct tly_mpi_status *status);
int MPIABI_Get_count(const struct tly_mpi_status *status, const struct tly_mpi_type *type, int *count);
extern const struct tly_mpi_type *const MPIABI_INT32_T,
    *const MPIABI_BYTE, *const MPIABI_C_COMPLEX, *const MPIABI_LONG_DOUBLE;
extern const struct tly_mpi_op *const MPIABI_SUM, *const MPIABI_LAND, *const MPIABI_MAXLOC, *const MPIABI_MAX;

static const char *text_of(int error)
{
    static char text[TLY_MPI_MAX_ERROR_STRING];
    int length = -1;
    assert_int_equal(MPIABI_Error_string(error, text, &length), 0);
    assert_int_equal(length, strlen(text));
    return text;
}

static void fails(int error, int error_class, const char *part)
{
    int found = -1;
    assert_int_equal(MPIABI_Error_class(error, &found), 0);
    assert_int_equal(found, error_class);
    if (!strstr(text_of(error), part))
        fail_msg("'%s' lacks '%s'", text_of(error), part);
}

static void test_types(void **state)
{
    static const struct {
        const char *name;
        int bytes, dtype;
    } types[] = {
#define X(name, bytes, dtype) {#name, bytes, dtype},
        TLY_MPI_TYPES(X)
#undef X
    };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (types[i].dtype != TLY_MPI_NONE &&
            tally_dtype_size((enum tally_dtype)types[i].dtype) != (size_t)types[i].bytes)
            fail_msg("%s has %d bytes", types[i].name, types[i].bytes);
    int bytes = 0;
    assert_int_equal(MPIABI_Type_size(MPIABI_C_COMPLEX, &bytes), 0);
    assert_int_equal(bytes, 8);
    fails(MPIABI_Type_size(NULL, &bytes), TLY_MPI_ERR_TYPE, "MPI_Type_size: MPI_DATATYPE_NULL");
}

/* Each sentence stays until 63 others have come; then the class is what is left of it. */
static void test_errors(void **state)
{
    int first = tly_mpi_fail(TLY_MPI_ERR_COUNT, "MPI_X", "the %s", "first"), last = first;
    for (int i = 1; i < 64; i++)
        last = tly_mpi_fail(TLY_MPI_ERR_RANK, "MPI_X", "number %d", i);
    fails(first, TLY_MPI_ERR_COUNT, "MPI_X: the first");
    fails(last, TLY_MPI_ERR_RANK, "MPI_X: number 63");
    tly_mpi_fail(TLY_MPI_ERR_RANK, "MPI_X", "one more");
    fails(first, TLY_MPI_ERR_COUNT, "MPI_ERR_COUNT");
    fails(TLY_MPI_ERR_TAG, TLY_MPI_ERR_TAG, "MPI_ERR_TAG");
    assert_string_equal(text_of(0), "MPI_SUCCESS");
    char large[5000];
    memset(large, 'x', sizeof large - 1);
    large[sizeof large - 1] = '\0';
    assert_true(strlen(text_of(tly_mpi_fail(TLY_MPI_ERR_RANK, "MPI_X", "%s", large))) < 1000);
}

/* Calls that name a communicator or wait, while there is no job. */
static void nothing_works(const char *why)
{
    struct tly_mpi_comm *both[] = {&tly_mpi_world, &tly_mpi_self}, *made = &tly_mpi_self;
    struct tly_mpi_request *request = NULL;
    struct tly_mpi_status status;
    int n, x = 1, y = 0;
    for (int i = 0; i < 2; i++) {
        n = 7;
        fails(MPIABI_Comm_size(both[i], &n), TLY_MPI_ERR_OTHER, why);
        assert_int_equal(n, 0);
        fails(MPIABI_Comm_rank(both[i], &n), TLY_MPI_ERR_OTHER, why);
        assert_int_equal(n, TLY_MPI_UNDEFINED);
        fails(MPIABI_Comm_split(both[i], 0, 0, &made), TLY_MPI_ERR_OTHER, why);
        assert_null(made);
        fails(MPIABI_Comm_dup(both[i], &made), TLY_MPI_ERR_OTHER, why);
        assert_null(made);
        fails(MPIABI_Barrier(both[i]), TLY_MPI_ERR_OTHER, why);
        fails(MPIABI_Allreduce(&x, &y, 1, MPIABI_INT32_T, MPIABI_SUM, both[i]), TLY_MPI_ERR_OTHER, why);
        fails(MPIABI_Allgather(&x, 1, MPIABI_INT32_T, &y, 1, MPIABI_INT32_T, both[i]), TLY_MPI_ERR_OTHER,
              why);
        fails(MPIABI_Isend(&x, 1, MPIABI_INT32_T, 0, 0, both[i], &request), TLY_MPI_ERR_OTHER, why);
        fails(MPIABI_Irecv(&x, 1, MPIABI_INT32_T, 0, 0, both[i], &request), TLY_MPI_ERR_OTHER, why);
        assert_null(request);
        assert_int_equal(y, 0);
    }
    fails(MPIABI_Wait(&request, &status), TLY_MPI_ERR_OTHER, why);
    fails(MPIABI_Test(&request, &n, &status), TLY_MPI_ERR_OTHER, why);
    fails(MPIABI_Waitall(1, &request, &status), TLY_MPI_ERR_OTHER, why);
}

static void test_nothing_before_init(void **state)
{
    int flag = -1, x = 1;
    struct tly_mpi_comm *made = &tly_mpi_self;
    assert_int_equal(MPIABI_Initialized(&flag), 0);
    assert_int_equal(flag, 0);
    assert_int_equal(MPIABI_Finalized(&flag), 0);
    assert_int_equal(flag, 0);
    assert_int_equal(MPIABI_Is_thread_main(&flag), 0);
    assert_int_equal(flag, 1);
    nothing_works("MPI_Init has not been called");
    fails(MPIABI_Comm_split(&tly_mpi_world, 0, 0, &made), TLY_MPI_ERR_OTHER, "MPI_Init has not been called");
    assert_null(made);
    /* What jaxlib does with a communicator that it did not get. */
    fails(MPIABI_Allreduce(&x, &x, 1, MPIABI_INT32_T, MPIABI_SUM, made), TLY_MPI_ERR_COMM,
          "no communicator: MPI_Comm_split: MPI_Init has not been called");
    fails(MPIABI_Comm_rank(made, &flag), TLY_MPI_ERR_COMM, "MPI_Comm_rank");
    assert_int_equal(MPIABI_Comm_free(&made), 0);
}

static void test_refused(void **state)
{
    int x = 1;
    struct tly_mpi_comm *self = &tly_mpi_self;
    struct tly_mpi_request *request;
    fails(MPIABI_Allreduce(&x, &x, -1, MPIABI_INT32_T, MPIABI_SUM, self), TLY_MPI_ERR_COUNT, "2147483647");
    fails(MPIABI_Allreduce(&x, &x, 1, MPIABI_INT32_T, MPIABI_LAND, self), TLY_MPI_ERR_OP,
          "MPI_LAND of MPI_INT32_T");
    fails(MPIABI_Allreduce(&x, &x, 1, MPIABI_INT32_T, MPIABI_MAXLOC, self), TLY_MPI_ERR_OP, "MPI_MAXLOC");
    fails(MPIABI_Allreduce(&x, &x, 1, MPIABI_LONG_DOUBLE, MPIABI_SUM, self), TLY_MPI_ERR_TYPE,
          "MPI_LONG_DOUBLE");
    fails(MPIABI_Allgather(&x, 1, MPIABI_INT32_T, &x, 3, MPIABI_BYTE, self), TLY_MPI_ERR_COUNT,
          "4 bytes a rank on one side and 3 on the other");
    fails(MPIABI_Isend(&x, 1, MPIABI_INT32_T, 1, 0, self, &request), TLY_MPI_ERR_RANK,
          "1 is no rank from 0 to 0");
    fails(MPIABI_Irecv(&x, 1, MPIABI_INT32_T, TLY_MPI_ANY_SOURCE, 0, self, &request), TLY_MPI_ERR_RANK,
          "ANY_SOURCE");
    fails(MPIABI_Irecv(&x, 1, MPIABI_INT32_T, 0, TLY_MPI_ANY_TAG, self, &request), TLY_MPI_ERR_TAG,
          "ANY_TAG");
    assert_int_equal(x, 1);
}

static void test_alone(void **state)
{
    int x[] = {1, 2, 3}, y[3] = {0}, n = -1, counts[] = {3};
    struct tly_mpi_comm *child, *twin, *other;
    assert_int_equal(MPIABI_Comm_split(&tly_mpi_self, 5, 0, &child), 0);
    assert_int_equal(MPIABI_Comm_dup(child, &twin), 0);
    assert_string_not_equal(child->name, twin->name);
    assert_int_equal(MPIABI_Comm_size(twin, &n), 0);
    assert_int_equal(n, 1);
    assert_int_equal(MPIABI_Allreduce(x, y, 3, MPIABI_INT32_T, MPIABI_MAX, child), 0);
    assert_memory_equal(x, y, sizeof x);
    x[0] = 7;
    assert_int_equal(MPIABI_Reduce_scatter(x, y, counts, MPIABI_INT32_T, MPIABI_SUM, twin), 0);
    assert_memory_equal(x, y, sizeof x);
    assert_int_equal(MPIABI_Allgather(tly_mpi_in_place, 0, NULL, y, 3, MPIABI_INT32_T, child), 0);
    assert_memory_equal(x, y, sizeof x);
    assert_int_equal(MPIABI_Comm_split(&tly_mpi_self, TLY_MPI_UNDEFINED, 0, &other), 0);
    assert_null(other);
    assert_int_equal(MPIABI_Comm_free(&twin), 0);
    assert_int_equal(MPIABI_Comm_free(&child), 0);
    assert_null(child);
}

/* A rank's messages to itself meet by tag, in order, and one that is too large is an error. */
static void test_own_messages(void **state)
{
    struct tly_mpi_comm *self = &tly_mpi_self;
    struct tly_mpi_request *sent, *got[3];
    struct tly_mpi_status status;
    int one = 1, two = 2, three = 3, into[3] = {0}, flag = -1, count = -1;
    assert_int_equal(MPIABI_Irecv(&into[0], 1, MPIABI_INT32_T, 0, 8, self, &got[0]), 0);
    assert_int_equal(MPIABI_Test(&got[0], &flag, &status), 0);
    assert_int_equal(flag, 0);
    assert_int_equal(MPIABI_Isend(&one, 1, MPIABI_INT32_T, 0, 7, self, &sent), 0);
    assert_int_equal(MPIABI_Wait(&sent, NULL), 0);
    assert_int_equal(MPIABI_Test(&got[0], &flag, &status), 0);
    assert_int_equal(flag, 0);
    assert_int_equal(MPIABI_Isend(&two, 1, MPIABI_INT32_T, 0, 8, self, &sent), 0);
    assert_int_equal(MPIABI_Wait(&sent, NULL), 0);
    assert_int_equal(MPIABI_Isend(&three, 1, MPIABI_INT32_T, 0, 8, self, &sent), 0);
    assert_int_equal(MPIABI_Wait(&sent, NULL), 0);
    assert_null(sent);
    assert_int_equal(MPIABI_Wait(&got[0], &status), 0);
    assert_int_equal(into[0], 2);
    assert_int_equal(status.source, 0);
    assert_int_equal(status.tag, 8);
    assert_int_equal(MPIABI_Get_count(&status, MPIABI_INT32_T, &count), 0);
    assert_int_equal(count, 1);
    assert_int_equal(MPIABI_Irecv(&into[1], 2, MPIABI_INT32_T, 0, 8, self, &got[1]), 0);
    fails(MPIABI_Wait(&got[1], &status), TLY_MPI_ERR_TRUNCATE, "4 bytes, where 8");
    assert_int_equal(MPIABI_Irecv(&into[2], 1, MPIABI_INT32_T, TLY_MPI_PROC_NULL, 8, self, &got[2]), 0);
    assert_int_equal(MPIABI_Wait(&got[2], &status), 0);
    assert_int_equal(status.source, TLY_MPI_PROC_NULL);
    tly_mpi_drop_letters(self); /* the one with tag 7 */
}

static int begin(void **state)
{
    char text[16];
    int port = 0;
    setenv("RANK", "0", 1);
    setenv("WORLD_SIZE", "1", 1);
    if (tally_comm_listen(NULL, &port) != 0)
        return -1;
    snprintf(text, sizeof text, "%d", port);
    setenv("TALLY_PORT", text, 1);
    return MPIABI_Init(NULL, NULL);
}

static int end(void **state)
{
    return MPIABI_Finalize();
}

static void test_nothing_after_finalize(void **state)
{
    int flag = -1;
    struct tly_mpi_comm *child = calloc(1, sizeof *child);
    assert_non_null(child);
    nothing_works("MPI_Finalize has been called");
    assert_int_equal(MPIABI_Finalized(&flag), 0);
    assert_int_equal(flag, 1);
    assert_int_equal(MPIABI_Comm_free(&child), 0); /* jaxlib does so */
    fails(MPIABI_Init(NULL, NULL), TLY_MPI_ERR_OTHER, "called before");
}

int main(void)
{
    const struct CMUnitTest outside[] = {cmocka_unit_test(test_nothing_before_init)};
    const struct CMUnitTest after[] = {cmocka_unit_test(test_nothing_after_finalize)};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_types), cmocka_unit_test(test_errors),       cmocka_unit_test(test_refused),
        cmocka_unit_test(test_alone), cmocka_unit_test(test_own_messages),
    };
    int failed = cmocka_run_group_tests(outside, NULL, NULL);
    failed += cmocka_run_group_tests(tests, begin, end);
    return failed + cmocka_run_group_tests(after, NULL, NULL);
}
