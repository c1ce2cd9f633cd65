/* mpi_jobs_test.c - jobs whose ranks load libtally_mpi.so as MPItrampoline does: by dlopen(), with symbols of its own
 * first, and every name by dlsym().  Under the sanitizers, which that order breaks, it is left out. */
#include <dlfcn.h>
#include <inttypes.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>

#include "job.h"

#include <cmocka.h>

#include "mpi/abi.h"

enum { RANKS = 4, MANY = 300001 };

/* --- the library -------------------------------------------------------------------------------------------- */

typedef void *handle;
static struct {
    int (*init)(int *, char ***, int, int *), (*finalize)(void), (*is_main)(int *);
    int (*rank)(handle, int *), (*size)(handle, int *), (*split)(handle, int, int, handle *),
        (*dup)(handle, handle *), (*free)(handle *);
    int (*allreduce)(const void *, void *, int, handle, handle, handle);
    int (*reduce)(const void *, void *, int, handle, handle, int, handle);
    int (*reduce_scatter)(const void *, void *, const int *, handle, handle, handle);
    int (*allgather)(const void *, int, handle, void *, int, handle, handle);
    int (*alltoall)(const void *, int, handle, void *, int, handle, handle);
    int (*gather)(const void *, int, handle, void *, int, handle, int, handle);
    int (*scatter)(const void *, int, handle, void *, int, handle, int, handle);
    int (*bcast)(void *, int, handle, int, handle), (*barrier)(handle);
    int (*isend)(const void *, int, handle, int, int, handle, handle *);
    int (*irecv)(void *, int, handle, int, int, handle, handle *), (*wait)(handle *, void *);
    int (*sendrecv)(const void *, int, handle, int, int, void *, int, handle, int, int, handle, void *);
    int (*error_string)(int, char *, int *), (*absent)(void);
    handle world, null, in_place, int32, byte, sum, max;
} mpi;

static void *symbol(void *library, const char *name)
{
    void *found = dlsym(library, name);
    if (!found)
        fprintf(stderr, "there is no %s\n", name);
    CHECK(found);
    return found;
}

static void load(void)
{
    int flags = RTLD_LAZY | RTLD_LOCAL | (UNDER_SANITIZER ? 0 : RTLD_DEEPBIND);
    CHECK(getenv("TEST_LIBTALLY_MPI"));
    void *l = dlopen(getenv("TEST_LIBTALLY_MPI"), flags);
    if (!l)
        fprintf(stderr, "%s\n", dlerror());
    CHECK(l);
/* clang-format off */
#define X(name, ...) symbol(l, "MPIABI_" #name);
    TLY_MPI_INTEGERS(X) TLY_MPI_TYPES(X) TLY_MPI_OPS(X) TLY_MPI_NULLS(X) TLY_MPI_MARKS(X) TLY_MPI_PRESENT(X)
    TLY_MPI_ABSENT(X)
#undef X
#define X(name) symbol(l, "MPIXABI_" #name);
    TLY_MPI_EXTENSIONS(X)
#undef X
        /* clang-format on */
        symbol(l, "mpiwrapper_version_major"),
        symbol(l, "mpiwrapper_version_minor");
    CHECK(*(const int *)symbol(l, "mpiabi_version_major") == 2);
    CHECK(*(const int *)symbol(l, "mpiabi_version_minor") >= 9);
    ((void (*)(void))symbol(l, "mpiwrapper_export_fortran_constants_"))();
#define FUNCTION(field, name) *(void **)&mpi.field = symbol(l, "MPIABI_" name)
    FUNCTION(init, "Init_thread"), FUNCTION(finalize, "Finalize"), FUNCTION(is_main, "Is_thread_main");
    FUNCTION(rank, "Comm_rank"), FUNCTION(size, "Comm_size"), FUNCTION(split, "Comm_split");
    FUNCTION(dup, "Comm_dup"), FUNCTION(free, "Comm_free"), FUNCTION(error_string, "Error_string");
    FUNCTION(allreduce, "Allreduce"), FUNCTION(reduce, "Reduce"), FUNCTION(reduce_scatter, "Reduce_scatter");
    FUNCTION(allgather, "Allgather"), FUNCTION(alltoall, "Alltoall"), FUNCTION(gather, "Gather");
    FUNCTION(scatter, "Scatter"), FUNCTION(bcast, "Bcast"), FUNCTION(barrier, "Barrier");
    FUNCTION(isend, "Isend"), FUNCTION(irecv, "Irecv"), FUNCTION(wait, "Wait"),
        FUNCTION(sendrecv, "Sendrecv");
    FUNCTION(absent, "Win_fence");
#define CONSTANT(field, name) mpi.field = *(handle const *)symbol(l, "MPIABI_" name)
    CONSTANT(world, "COMM_WORLD"), CONSTANT(null, "COMM_NULL"), CONSTANT(in_place, "IN_PLACE");
    CONSTANT(int32, "INT32_T"), CONSTANT(byte, "BYTE"), CONSTANT(sum, "SUM"), CONSTANT(max, "MAX");
}

static void begin(void)
{
    int provided = -1;
    load();
    CHECK(mpi.init(NULL, NULL, 1, &provided) == 0 && provided == 3);
}

static void fails_with(int error, const char *part)
{
    char text[1024];
    int length;
    CHECK(error != 0);
    CHECK(mpi.error_string(error, text, &length) == 0);
    CHECK_HOLDS(text, part);
}

static void run_job(int (*program)(int, void *), int tallyds)
{
    struct job j = {
        .ranks = RANKS, .tallyds = tallyds, .main = program, .settings = {"TALLY_PART_BYTES=64K"}};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

/* --- results ------------------------------------------------------------------------------------------------ */

static int32_t *numbers(size_t count)
{
    int32_t *x = malloc(count * sizeof *x);
    CHECK(x);
    return x;
}

/* Where each of `size` ranks has i * (rank + 1). */
static void sums(handle comm, int rank, int size)
{
    int32_t *x = numbers(MANY * 4), *y = numbers(MANY * 4), all = size * (size + 1) / 2;
    int counts[RANKS];
    for (int i = 0; i < MANY; i++)
        x[i] = i * (rank + 1);
    CHECK(mpi.allreduce(x, x, MANY, mpi.int32, mpi.sum, comm) == 0); /* as jaxlib does: in == out */
    for (int i = 0; i < MANY; i++)
        CHECK(x[i] == (int32_t)((int64_t)i * all));
    x[0] = rank;
    CHECK(mpi.allreduce(mpi.in_place, x, 1, mpi.int32, mpi.max, comm) == 0 && x[0] == size - 1);
    x[0] = rank + 1;
    CHECK(mpi.reduce(x, y, 1, mpi.int32, mpi.sum, size - 1, comm) == 0);
    CHECK(rank != size - 1 || y[0] == all);
    for (int to = 0; to < 3; to++) { /* apart, over the input's beginning, over this rank's piece of it */
        int offset = 0, total = 0;
        for (int i = 0; i < size; i++) {
            counts[i] = 5000 + 3 * i;
            offset += i < rank ? counts[i] : 0;
            total += counts[i];
        }
        for (int i = 0; i < total; i++)
            x[i] = i * (rank + 1);
        int32_t *out = to == 0 ? y : to == 1 ? x : x + offset;
        CHECK(mpi.reduce_scatter(x, out, counts, mpi.int32, mpi.sum, comm) == 0);
        for (int i = 0; i < counts[rank]; i++)
            CHECK(out[i] == (offset + i) * all);
    }
    free(x);
    free(y);
}

/* The n-th number that `rank` sends to `to`. */
static int32_t number(int rank, int to, int n)
{
    return rank * 1000003 + to * 7001 + n;
}

static void moves(handle comm, int rank, int size)
{
    enum { PIECE = 20011 };
    int32_t *x = numbers((size_t)PIECE * RANKS), *y = numbers((size_t)PIECE * RANKS);
    for (int r = 0; r < size; r++)
        for (int i = 0; i < PIECE; i++)
            x[r * PIECE + i] = number(rank, r, i);
#define ARRIVED(r, from, to) \
    for (int i = 0; i < PIECE; i++) \
    CHECK(y[(r)*PIECE + i] == number(from, to, i))
    CHECK(mpi.allgather(x, PIECE, mpi.int32, y, PIECE, mpi.int32, comm) == 0);
    for (int r = 0; r < size; r++)
        ARRIVED(r, r, 0);
    for (int at = 0; at < 2; at++) { /* the piece at the result's beginning, and in its own place */
        memset(y, 0xff, (size_t)PIECE * RANKS * sizeof *y);
        int32_t *piece = y + (at ? (size_t)rank * PIECE : 0);
        memcpy(piece, x, PIECE * sizeof *piece);
        CHECK(mpi.allgather(at ? mpi.in_place : piece, PIECE, mpi.int32, y, PIECE, mpi.int32, comm) == 0);
        for (int r = 0; r < size; r++)
            ARRIVED(r, r, 0);
    }
    CHECK(mpi.alltoall(x, PIECE, mpi.int32, y, PIECE * 4, mpi.byte, comm) == 0);
    for (int r = 0; r < size; r++)
        ARRIVED(r, r, rank);
    CHECK(mpi.gather(x, PIECE, mpi.int32, y, PIECE, mpi.int32, size - 1, comm) == 0);
    for (int r = 0; r < size && rank == size - 1; r++)
        ARRIVED(r, r, 0);
    CHECK(mpi.scatter(x, PIECE, mpi.int32, y, PIECE, mpi.int32, 0, comm) == 0);
    ARRIVED(0, 0, rank);
    memcpy(y, x, PIECE * sizeof *y);
    CHECK(mpi.bcast(y, PIECE, mpi.int32, size - 1, comm) == 0);
    ARRIVED(0, size - 1, 0);
    CHECK(mpi.barrier(comm) == 0);
    /* jaxlib's all-to-all: with each distance in turn; and its permutation, in which all send to one. */
    for (int d = 1; d < size; d++) {
        int to = (rank + d) % size, from = (rank + size - d) % size;
        CHECK(mpi.sendrecv(x + to * PIECE, PIECE * 4, mpi.byte, to, 0, y, PIECE * 4, mpi.byte, from, 0, comm,
                           NULL) == 0);
        ARRIVED(0, from, rank);
    }
    handle sent[RANKS], received;
    for (int r = 0; r < size; r++)
        CHECK(mpi.isend(x + r * PIECE, PIECE, mpi.int32, r, 3, comm, &sent[r]) == 0);
    for (int r = size; r-- > 0;) {
        CHECK(mpi.irecv(y, PIECE, mpi.int32, r, 3, comm, &received) == 0);
        CHECK(mpi.wait(&received, NULL) == 0 && received == NULL);
        ARRIVED(0, r, rank);
    }
    for (int r = 0; r < size; r++)
        CHECK(mpi.wait(&sent[r], NULL) == 0);
    free(x);
    free(y);
}

/* All ranks in another order, pairs, and the rank that is in none; twice, so that the second's names are new. */
static int everything(int rank, void *arg)
{
    int n = -1, flag = 0;
    begin();
    CHECK(mpi.is_main(&flag) == 0 && flag);
    CHECK(mpi.rank(mpi.world, &n) == 0 && n == rank);
    CHECK(mpi.size(mpi.world, &n) == 0 && n == RANKS);
    sums(mpi.world, rank, RANKS);
    moves(mpi.world, rank, RANKS);
    for (int again = 0; again < 2; again++) {
        handle turned, pair, rest, twin, child;
        CHECK(mpi.split(mpi.world, 0, -rank, &turned) == 0);
        CHECK(mpi.rank(turned, &n) == 0 && n == RANKS - 1 - rank);
        sums(turned, n, RANKS);
        moves(turned, n, RANKS);
        CHECK(mpi.split(mpi.world, rank % 2, 0, &pair) == 0);
        CHECK(mpi.rank(pair, &n) == 0 && n == rank / 2);
        sums(pair, n, 2);
        CHECK(mpi.dup(pair, &twin) == 0);
        moves(twin, n, 2);
        CHECK(mpi.split(pair, n, 0, &child) == 0);
        sums(child, 0, 1);
        CHECK(mpi.split(turned, rank == 1 ? TLY_MPI_UNDEFINED : 5, 0, &rest) == 0);
        CHECK((rest == mpi.null) == (rank == 1));
        if (rank != 1) {
            CHECK(mpi.rank(rest, &n) == 0 && n == (rank == 0 ? 2 : 3 - rank));
            sums(rest, n, RANKS - 1);
        }
        CHECK(mpi.free(&turned) == 0 && turned == mpi.null);
        CHECK(mpi.free(&pair) == 0 && mpi.free(&twin) == 0 && mpi.free(&child) == 0 && mpi.free(&rest) == 0);
    }
    CHECK(mpi.finalize() == 0);
    return 0;
}

static void test_everything(void **state)
{
    run_job(everything, 0);
}

static void test_everything_with_tallyd(void **state)
{
    run_job(everything, 2);
}

/* --- threads ------------------------------------------------------------------------------------------------ */

struct user {
    pthread_t thread;
    handle comm;
    int rank, calls;
};

static void *use(void *arg)
{
    struct user *u = arg;
    int flag = 0;
    CHECK(mpi.is_main(&flag) == 0 && flag); /* on a thread that has not called MPI_Init */
    for (int i = 0; i < u->calls; i++) {
        int32_t x[100], y[100 * RANKS];
        for (int k = 0; k < 100; k++)
            x[k] = i + k + u->rank;
        CHECK(mpi.allgather(x, 100, mpi.int32, y, 100, mpi.int32, u->comm) == 0);
        CHECK(y[399] == i + 99 + 3);
        CHECK(mpi.allreduce(x, x, 100, mpi.int32, mpi.sum, u->comm) == 0);
        CHECK(x[99] == 4 * (i + 99) + 6);
    }
    return NULL;
}

/* Each has a communicator to itself, made by its own thread's split; nothing of one meets the other's. */
static int threads(int rank, void *arg)
{
    struct user users[3];
    begin();
    for (int i = 0; i < 3; i++) {
        users[i] = (struct user){.rank = rank, .calls = UNDER_SANITIZER ? 40 : 150};
        CHECK(mpi.split(mpi.world, 0, 0, &users[i].comm) == 0);
    }
    for (int i = 0; i < 3; i++)
        CHECK(pthread_create(&users[i].thread, NULL, use, &users[i]) == 0);
    for (int i = 0; i < 3; i++)
        CHECK(pthread_join(users[i].thread, NULL) == 0);
    CHECK(mpi.finalize() == 0);
    for (int i = 0; i < 3; i++)
        CHECK(mpi.free(&users[i].comm) == 0);
    return 0;
}

static void test_threads(void **state)
{
    run_job(threads, 0);
}

/* --- what goes wrong ---------------------------------------------------------------------------------------- */

static int errors(int rank, void *arg)
{
    int32_t x[8] = {0}, y[8 * RANKS];
    handle comm, later;
    begin();
    CHECK(mpi.split(mpi.world, 0, 0, &comm) == 0);
    /* One rank's count has overflowed: all are told, and by whom. */
    fails_with(mpi.allreduce(x, x, rank == 2 ? -4 : 8, mpi.int32, mpi.sum, comm),
               "MPI_Allreduce: -4 elements");
    /* Calls that do not meet. */
    int error = rank == 1 ? mpi.allgather(x, 8, mpi.int32, y, 8, mpi.int32, comm)
                          : mpi.allreduce(x, x, 8, mpi.int32, mpi.sum, comm);
    fails_with(error, "all_gather no. 2: uint8 [32]");
    fails_with(error, "all_reduce no. 2: int32 [8] sum");
    fails_with(mpi.allreduce(x, x, rank == 3 ? 7 : 8, mpi.int32, mpi.sum, comm), "rank 3");
    fails_with(mpi.allgather(x, rank == 0 ? 8 : 4, mpi.int32, y, rank == 0 ? 8 : 4, mpi.int32, comm),
               "all_gather no. 4: the ranks disagree: uint8 [32] (in bytes) on rank 0, [16] on ranks 1-3");
    later = comm;
    fails_with(mpi.split(comm, rank == 3 ? -7 : 0, 0, &later), "color -7 is negative");
    CHECK(later == mpi.null);
    fails_with(mpi.allreduce(x, x, 8, mpi.int32, mpi.sum, later),
               "color -7 is negative"); /* jaxlib goes on with it */
    /* The communicator works as before. */
    x[0] = 1;
    CHECK(mpi.allreduce(x, x, 1, mpi.int32, mpi.sum, comm) == 0 && x[0] == RANKS);
    CHECK(mpi.finalize() == 0);
    CHECK(mpi.finalize() == 0);
    fails_with(mpi.allreduce(x, x, 1, mpi.int32, mpi.sum, comm), "MPI_Finalize has been called");
    fails_with(mpi.split(mpi.world, 0, 0, &later), "MPI_Finalize has been called");
    CHECK(mpi.free(&comm) == 0 && mpi.free(&later) == 0); /* as jaxlib's destructors do, at exit */
    return 0;
}

static void test_errors(void **state)
{
    run_job(errors, 0);
}

/* The error of a call on the communicator that a split has not made.  jaxlib gets no other. */
static void says_why_there_is_none(char text[1024])
{
    int32_t x = 0;
    int length, error = mpi.allreduce(&x, &x, 1, mpi.int32, mpi.sum, mpi.null);
    CHECK(error != 0 && mpi.error_string(error, text, &length) == 0);
    CHECK_HOLDS(text, "rank 1");
}

static int missing(int rank, void *arg)
{
    handle comm = mpi.world;
    char text[1024];
    begin();
    if (rank == 1) {
        job_sleep_ms(UNDER_SANITIZER ? 20000 : 6000);
        return 0;
    }
    fails_with(mpi.split(mpi.world, 0, 0, &comm), "rank 1");
    CHECK(comm == mpi.null);
    says_why_there_is_none(text);
    CHECK_HOLDS(text, "every rank takes part in making a communicator");
    mpi.finalize();
    return 0;
}

static int leaves(int rank, void *arg)
{
    handle comm = mpi.world;
    char text[1024];
    begin();
    if (rank != 1) {
        fails_with(mpi.split(mpi.world, 0, 0, &comm), "rank 1 has left the job");
        says_why_there_is_none(text);
        CHECK(!strstr(text, "every rank takes part")); /* no collective before it would help */
    }
    mpi.finalize();
    return 0;
}

/* Advice that is of use after a time-out alone. */
static void test_a_split_without_a_rank_that_has_left(void **state)
{
    run_job(leaves, 0);
}

static void test_a_split_that_one_rank_lacks(void **state)
{
    struct job j = {.ranks = RANKS, .main = missing, .settings = {"TALLY_TIMEOUT=2"}};
    job_start(&j);
    for (int i = 0; i < RANKS; i++)
        assert_int_equal(job_wait_rank(&j, i), 0);
    job_clear(&j);
}

/* Whether the kernel was advised to use large pages there. */
static bool advised(const void *place)
{
    FILE *maps = fopen("/proc/self/smaps", "r");
    char line[512];
    bool within = false, found = false;
    CHECK(maps);
    while (fgets(line, sizeof line, maps)) {
        uintptr_t from, to;
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " ", &from, &to) == 2)
            within = from <= (uintptr_t)place && (uintptr_t)place < to;
        else if (within && strncmp(line, "VmFlags:", 8) == 0)
            found = strstr(line, " hg") != NULL;
    }
    fclose(maps);
    return found;
}

static int has_large_results(int rank, void *arg)
{
    enum { PIECE = 9 << 20 };
    int32_t *x = numbers(RANKS * PIECE / 4), *y = numbers(RANKS * PIECE / 4);
    void *huge = mmap(NULL, 4 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(huge != MAP_FAILED);
    bool known = madvise(huge, 4 << 20, MADV_HUGEPAGE) == 0; /* a kernel may be built without */
    begin();
    for (int i = 0; i < RANKS * PIECE / 4; i++)
        x[i] = rank + i;
    CHECK(mpi.allreduce(x, y, PIECE / 4, mpi.int32, mpi.sum, mpi.world) == 0);
    CHECK(!advised((unsigned char *)y + PIECE / 2)); /* small ones use what they had before */
    CHECK(mpi.allreduce(x, y, RANKS * PIECE / 4, mpi.int32, mpi.sum, mpi.world) == 0);
    CHECK(advised((unsigned char *)y + RANKS * PIECE / 2) == known);
    for (int i = 0; i < RANKS * PIECE / 4; i++)
        CHECK(y[i] == RANKS * i + RANKS * (RANKS - 1) / 2);
    CHECK(!advised((unsigned char *)x + RANKS * PIECE / 2));
    int32_t *z = numbers(RANKS * PIECE / 4); /* a result on the root alone */
    CHECK(mpi.reduce(x, z, RANKS * PIECE / 4, mpi.int32, mpi.sum, 1, mpi.world) == 0);
    CHECK(advised((unsigned char *)z + RANKS * PIECE / 2) == (known && rank == 1));
    mpi.finalize();
    free(x), free(y), free(z), munmap(huge, 4 << 20);
    return 0;
}

static void test_large_results_come_in_large_pages(void **state)
{
    run_job(has_large_results, 0);
}

static int one_dies(int rank, void *arg)
{
    int32_t *x = calloc(MANY, sizeof *x);
    handle comm;
    begin();
    CHECK(mpi.split(mpi.world, 0, 0, &comm) == 0);
    for (int i = 0;; i++) {
        if (rank == 2 && i == 5)
            raise(SIGKILL);
        int error = mpi.allreduce(x, x, MANY, mpi.int32, mpi.sum, comm);
        if (error) {
            fails_with(error, "rank 2");
            break;
        }
    }
    fails_with(mpi.barrier(comm), "rank 2");
    mpi.finalize();
    CHECK(mpi.free(&comm) == 0);
    free(x);
    return 0;
}

static void test_a_rank_dies(void **state)
{
    struct job j = {.ranks = RANKS, .main = one_dies};
    job_start(&j);
    for (int i = 0; i < RANKS; i++)
        assert_int_equal(job_wait_rank(&j, i), i == 2 ? 128 + SIGKILL : 0);
    job_clear(&j);
}

static int calls_what_is_not_there(int rank, void *arg)
{
    begin();
    mpi.absent();
    return 0;
}

static void test_an_absent_function_names_itself(void **state)
{
    struct job j = {.ranks = 1, .main = calls_what_is_not_there};
    job_start(&j);
    assert_int_equal(job_wait_rank(&j, 0), 128 + SIGABRT);
    job_log_holds(&j, 0, "MPI_Win_fence is not implemented");
    job_clear(&j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_everything),
        cmocka_unit_test(test_everything_with_tallyd),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_large_results_come_in_large_pages),
        cmocka_unit_test(test_a_split_that_one_rank_lacks),
        cmocka_unit_test(test_a_split_without_a_rank_that_has_left),
        cmocka_unit_test(test_a_rank_dies),
        cmocka_unit_test(test_an_absent_function_names_itself),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
