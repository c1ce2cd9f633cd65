/* world.c - begin and end, communicators, errors, and what a program asks about all of it.
 *
 * Until MPI_Init_thread() nothing is done: jaxlib loads the library whether its collectives are wanted or not. */
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "mpi/mpi.h"

enum { SENTENCE = 900, REMEMBERED = 64, MOST_CLASSES = 256 };
_Static_assert((int)SENTENCE < (int)TLY_MPI_MAX_ERROR_STRING,
               "a sentence fits into what callers have for it");

struct tly_mpi_comm tly_mpi_world = {.rank = TLY_MPI_UNDEFINED};
struct tly_mpi_comm tly_mpi_self = {.size = 1, .name = "self"};

/* The job.  `gate` guards the pointer and the state: held for reading while an operation is submitted, for writing by
 * init and finalize. */
static struct {
    pthread_rwlock_t gate;
    tally_comm *comm;
    enum { BEFORE, OPEN, FAILED, OVER } state;
    char why[SENTENCE]; /* FAILED: the sentence */
} job = {.gate = PTHREAD_RWLOCK_INITIALIZER};

/* --- errors ------------------------------------------------------------------------------------------------ */

/* An error's number is its class and, from the second byte on, which sentence it has.  The last sentences are kept;
 * `lost` is that of the last communicator that could not be made, for jaxlib looks at no split's result.
 * Under errors_lock. */
static pthread_mutex_t errors_lock = PTHREAD_MUTEX_INITIALIZER;
static char sentences[REMEMBERED][SENTENCE];
static unsigned sentence_count;
static char lost[SENTENCE];

static int world_remember(int error_class, const char *text)
{
    pthread_mutex_lock(&errors_lock);
    unsigned n = sentence_count++ % ((TLY_MPI_ERR_LASTCODE >> 8) - 1);
    snprintf(sentences[n % REMEMBERED], SENTENCE, "%s", text);
    pthread_mutex_unlock(&errors_lock);
    return error_class | (int)(n + 1) << 8;
}

int tly_mpi_fail(int error_class, const char *function, const char *format, ...)
{
    char text[SENTENCE];
    int n = snprintf(text, sizeof text, "%s: ", function);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + n, sizeof text - (size_t)n, format, arguments);
    va_end(arguments);
    return world_remember(error_class, text);
}

int tly_mpi_error(int err, const char *function)
{
    int error_class = err == -ENOMEM   ? TLY_MPI_ERR_NO_MEM
                      : err == -EINVAL ? TLY_MPI_ERR_ARG
                                       : TLY_MPI_ERR_OTHER;
    return err ? tly_mpi_fail(error_class, function, "%s", tally_error()) : TLY_MPI_SUCCESS;
}

TLY_MPI_API int MPIABI_Error_class(int code, int *error_class);
int MPIABI_Error_class(int code, int *error_class)
{
    *error_class = code & (MOST_CLASSES - 1);
    return TLY_MPI_SUCCESS;
}

static const char *world_class_name(int error_class)
{
    static const struct {
        const char *name;
        int value;
    } integers[] = {
#define X(name, value) {"MPI_" #name, value},
        TLY_MPI_INTEGERS(X)
#undef X
    };
    for (size_t i = 0; i < sizeof integers / sizeof *integers; i++)
        if (integers[i].value == error_class && strncmp(integers[i].name, "MPI_ERR_", 8) == 0)
            return integers[i].name;
    return error_class ? "an unknown error" : "MPI_SUCCESS";
}

TLY_MPI_API int MPIABI_Error_string(int code, char *string, int *length);
int MPIABI_Error_string(int code, char *string, int *length)
{
    unsigned n = (unsigned)(code >> 8) - 1;
    pthread_mutex_lock(&errors_lock);
    bool kept = code >> 8 && sentence_count - 1 - n < REMEMBERED;
    snprintf(string, TLY_MPI_MAX_ERROR_STRING, "%s",
             kept ? sentences[n % REMEMBERED] : world_class_name(code & (MOST_CLASSES - 1)));
    pthread_mutex_unlock(&errors_lock);
    *length = (int)strlen(string);
    return TLY_MPI_SUCCESS;
}

/* --- begin and end ----------------------------------------------------------------------------------------- */

tally_comm *tly_mpi_enter(const char *function, int *error)
{
    pthread_rwlock_rdlock(&job.gate);
    if (job.state == OPEN)
        return job.comm;
    *error = job.state == FAILED ? tly_mpi_fail(TLY_MPI_ERR_OTHER, function, "%s", job.why)
             : job.state == BEFORE
                 ? tly_mpi_fail(TLY_MPI_ERR_OTHER, function, "MPI_Init has not been called")
                 : tly_mpi_fail(TLY_MPI_ERR_OTHER, function, "MPI_Finalize has been called");
    pthread_rwlock_unlock(&job.gate);
    return NULL;
}

void tly_mpi_leave(void)
{
    pthread_rwlock_unlock(&job.gate);
}

TLY_MPI_API int MPIABI_Init_thread(int *argc, char ***argv, int required, int *provided);
int MPIABI_Init_thread(int *argc, char ***argv, int required, int *provided)
{
    int error = TLY_MPI_SUCCESS;
    (void)argc, (void)argv, (void)required;
    if (provided)
        *provided = TLY_MPI_THREAD_MULTIPLE; /* whatever was asked for: any thread may call us */
    pthread_rwlock_wrlock(&job.gate);
    if (job.state == BEFORE) {
        int err = tally_comm_open(NULL, &job.comm);
        job.state = err ? FAILED : OPEN;
        if (err) { /* jaxlib does not look at what we return */
            snprintf(job.why, sizeof job.why, "%s", tally_error());
            fprintf(stderr, "tally: MPI_Init: %s\n", job.why);
            error = tly_mpi_error(err, "MPI_Init");
        } else {
            tly_mpi_world.rank = tally_comm_rank(job.comm);
            tly_mpi_world.size = tally_comm_size(job.comm);
        }
    } else {
        error = tly_mpi_fail(TLY_MPI_ERR_OTHER, "MPI_Init", "it has been called before");
    }
    pthread_rwlock_unlock(&job.gate);
    return error;
}

TLY_MPI_API int MPIABI_Init(int *argc, char ***argv);
int MPIABI_Init(int *argc, char ***argv)
{
    return MPIABI_Init_thread(argc, argv, TLY_MPI_THREAD_SINGLE, NULL);
}

/* Operations of other threads that have not ended by then end with an error. */
TLY_MPI_API int MPIABI_Finalize(void);
int MPIABI_Finalize(void)
{
    pthread_rwlock_wrlock(&job.gate);
    tally_comm *comm = job.comm;
    job.comm = NULL;
    job.state = OVER;
    pthread_rwlock_unlock(&job.gate);
    tly_mpi_drop_letters(&tly_mpi_world);
    tly_mpi_drop_letters(&tly_mpi_self);
    return comm ? tly_mpi_error(tally_comm_close(comm), "MPI_Finalize") : TLY_MPI_SUCCESS;
}

TLY_MPI_API int MPIABI_Initialized(int *flag);
int MPIABI_Initialized(int *flag)
{
    pthread_rwlock_rdlock(&job.gate);
    *flag = job.state == OPEN || job.state == OVER;
    pthread_rwlock_unlock(&job.gate);
    return TLY_MPI_SUCCESS;
}

TLY_MPI_API int MPIABI_Finalized(int *flag);
int MPIABI_Finalized(int *flag)
{
    pthread_rwlock_rdlock(&job.gate);
    *flag = job.state == OVER;
    pthread_rwlock_unlock(&job.gate);
    return TLY_MPI_SUCCESS;
}

TLY_MPI_API int MPIABI_Query_thread(int *provided);
int MPIABI_Query_thread(int *provided)
{
    *provided = TLY_MPI_THREAD_MULTIPLE;
    return TLY_MPI_SUCCESS;
}

/* True on every thread.  What jaxlib wants to know by it is whether a communicator may be made here, and it asks from its
 * pool's threads, too, where it dispatches asynchronously. */
TLY_MPI_API int MPIABI_Is_thread_main(int *flag);
int MPIABI_Is_thread_main(int *flag)
{
    *flag = 1;
    return TLY_MPI_SUCCESS;
}

TLY_MPI_API int MPIABI_Abort(struct tly_mpi_comm *comm, int code);
int MPIABI_Abort(struct tly_mpi_comm *comm, int code)
{
    (void)comm;
    if (tly_mpi_world.size) /* else there is no rank yet */
        fprintf(stderr, "tally: rank %d: MPI_Abort(%d)\n", tly_mpi_world.rank, code);
    else
        fprintf(stderr, "tally: MPI_Abort(%d)\n", code);
    _exit(code ? code : 1);
}

/* --- communicators ----------------------------------------------------------------------------------------- */

int tly_mpi_check_comm(const struct tly_mpi_comm *comm, const char *function)
{
    int error = TLY_MPI_SUCCESS;
    if (comm) {
        if (tly_mpi_enter(function, &error))
            tly_mpi_leave();
        return error;
    }
    pthread_mutex_lock(&errors_lock);
    char why[SENTENCE];
    snprintf(why, sizeof why, "%s", lost);
    pthread_mutex_unlock(&errors_lock);
    return why[0] ? tly_mpi_fail(TLY_MPI_ERR_COMM, function, "there is no communicator: %s", why)
                  : tly_mpi_fail(TLY_MPI_ERR_COMM, function, "MPI_COMM_NULL is no communicator");
}

struct tally_options tly_mpi_options(const struct tly_mpi_comm *comm)
{
    return (struct tally_options){.size = sizeof(struct tally_options),
                                  .space = TALLY_SPACE_ORDERED,
                                  .group = comm->group};
}

int tly_mpi_finish(int err, tally_op *op, const char *function)
{
    if (err)
        return tly_mpi_error(err, function);
    int error = tly_mpi_error(tally_op_wait(op, -1), function);
    tally_op_free(op);
    return error;
}

/* From this size on glibc maps each allocation anew (its largest M_MMAP_THRESHOLD). */
enum { MAPPED_ANEW = 32 << 20, LARGE_PAGE = 2 << 20 };

void tly_mpi_expect_result(void *result, size_t bytes)
{
    uintptr_t begin = ((uintptr_t)result + LARGE_PAGE - 1) & -(uintptr_t)LARGE_PAGE;
    uintptr_t end = ((uintptr_t)result + bytes) & -(uintptr_t)LARGE_PAGE;
    if (bytes >= MAPPED_ANEW)
        (void)madvise((void *)begin, end - begin,
                      MADV_HUGEPAGE); /* advice: where it is not taken nothing changes */
}

int tly_mpi_gather(const struct tly_mpi_comm *comm, const void *piece, size_t bytes, void *all,
                   const char *note, const char *function)
{
    int error = TLY_MPI_SUCCESS;
    if (comm->size == 1) {
        if (bytes && all != piece)
            memmove(all, piece, bytes);
        return error;
    }
    tally_comm *c = tly_mpi_enter(function, &error);
    if (!c)
        return error;
    tally_op *op;
    struct tally_options options = tly_mpi_options(comm);
    options.note = note;
    const unsigned char *from = piece;
    unsigned char *to = all, *own = to + (size_t)comm->rank * bytes;
    if (from + bytes > to && from < to + (size_t)comm->size * bytes) {
        memmove(own, from, bytes); /* libtally takes an overlapping piece only in its own place */
        from = own;
    }
    tly_mpi_expect_result(all, bytes * (size_t)comm->size);
    int err = tally_allgather_into(c, NULL, from, all, bytes, TALLY_UINT8, &options, &op);
    tly_mpi_leave();
    return tly_mpi_finish(err, op, function);
}

int tly_mpi_refuse(const struct tly_mpi_comm *comm, uint32_t kind, int error)
{
    char reason[TLY_MPI_MAX_ERROR_STRING];
    int length, unused;
    tally_comm *c = comm && comm->size > 1 ? tly_mpi_enter("refuse", &unused) : NULL;
    if (!c)
        return error;
    struct tally_options options = tly_mpi_options(comm);
    MPIABI_Error_string(error, reason, &length);
    tally_refuse(c, NULL, kind, &options, reason);
    tly_mpi_leave();
    return error;
}

int tly_mpi_bytes(int count, const struct tly_mpi_type *type, const char *function, size_t *bytes)
{
    if (!type)
        return tly_mpi_fail(TLY_MPI_ERR_TYPE, function, "MPI_DATATYPE_NULL is no type");
    if (count < 0)
        return tly_mpi_fail(
            TLY_MPI_ERR_COUNT, function,
            "%d elements: a call takes 2147483647 at most, so larger arrays must go in pieces", count);
    *bytes = (size_t)count * (size_t)type->bytes;
    return TLY_MPI_SUCCESS;
}

TLY_MPI_API int MPIABI_Comm_rank(struct tly_mpi_comm *comm, int *rank);
int MPIABI_Comm_rank(struct tly_mpi_comm *comm, int *rank)
{
    int error = tly_mpi_check_comm(comm, "MPI_Comm_rank");
    *rank = error ? TLY_MPI_UNDEFINED : comm->rank;
    return error;
}

TLY_MPI_API int MPIABI_Comm_size(struct tly_mpi_comm *comm, int *size);
int MPIABI_Comm_size(struct tly_mpi_comm *comm, int *size)
{
    int error = tly_mpi_check_comm(comm, "MPI_Comm_size");
    *size = error ? 0 : comm->size;
    return error;
}

static void world_destroy(struct tly_mpi_comm *comm)
{
    if (!comm)
        return;
    tly_mpi_drop_letters(comm);
    free(comm->ranks);
    free(comm->name);
    free(comm);
}

static int world_rank_in_job(const struct tly_mpi_comm *comm, int rank)
{
    return comm->ranks ? comm->ranks[rank] : comm->size > 1 ? rank : tly_mpi_world.rank;
}

/* A communicator of the parent's ranks `members`, which are sorted, with a name of its own: the parent's, which of the
 * parent's children it is, and its color. */
static int world_create(struct tly_mpi_comm *parent, unsigned number, int color, const int members[],
                        int size, const char *function, struct tly_mpi_comm **made)
{
    struct tly_mpi_comm *comm = calloc(1, sizeof *comm);
    int error = TLY_MPI_SUCCESS;
    if (comm) {
        comm->size = size;
        comm->ranks = calloc((size_t)size, sizeof *comm->ranks);
    }
    if (!comm || !comm->ranks ||
        asprintf(&comm->name, "%s.%u/%d", parent->name ? parent->name : "mpi", number, color) < 0) {
        world_destroy(comm);
        return tly_mpi_fail(TLY_MPI_ERR_NO_MEM, function, "out of memory");
    }
    for (int i = 0; i < size; i++) {
        comm->ranks[i] = world_rank_in_job(parent, members[i]);
        if (members[i] == parent->rank)
            comm->rank = i;
    }
    tally_comm *c = size > 1 ? tly_mpi_enter(function, &error) : NULL;
    if (c) {
        error = tly_mpi_error(tally_group_create(c, comm->name, comm->ranks, (size_t)size, &comm->group),
                              function);
        tly_mpi_leave();
    }
    if (error)
        world_destroy(comm);
    else
        *made = comm;
    return error;
}

struct place {
    int color, key, rank;
};

static int world_by_key(const void *left, const void *right)
{
    const struct place *a = left, *b = right;
    return a->key != b->key ? (a->key > b->key) - (a->key < b->key)
                            : (a->rank > b->rank) - (a->rank < b->rank);
}

static int world_split(struct tly_mpi_comm *parent, int color, int key, struct tly_mpi_comm **made)
{
    static const char *const function = "MPI_Comm_split";
    struct place own = {color, key, parent->rank}, *all = calloc((size_t)parent->size, sizeof *all);
    int *members = calloc((size_t)parent->size, sizeof *members), size = 0, error;
    unsigned number = atomic_fetch_add(&parent->splits, 1);
    if (!all || !members) {
        free(all);
        free(members);
        error = tly_mpi_fail(TLY_MPI_ERR_NO_MEM, function, "out of memory");
        return tly_mpi_refuse(parent, TALLY_ALLGATHER, error);
    }
    if (color < 0 && color != TLY_MPI_UNDEFINED) {
        error = tly_mpi_fail(TLY_MPI_ERR_ARG, function, "color %d is negative", color);
        tly_mpi_refuse(parent, TALLY_ALLGATHER, error);
    } else {
        error = tly_mpi_gather(parent, &own, sizeof own, all, function, function);
    }
    if (!error && color != TLY_MPI_UNDEFINED) {
        qsort(all, (size_t)parent->size, sizeof *all, world_by_key);
        for (int i = 0; i < parent->size; i++)
            if (all[i].color == color)
                members[size++] = all[i].rank;
        error = world_create(parent, number, color, members, size, function, made);
    }
    free(members);
    free(all);
    return error;
}

TLY_MPI_API int MPIABI_Comm_split(struct tly_mpi_comm *comm, int color, int key, struct tly_mpi_comm **made);
int MPIABI_Comm_split(struct tly_mpi_comm *comm, int color, int key, struct tly_mpi_comm **made)
{
    int length, error = tly_mpi_check_comm(comm, "MPI_Comm_split");
    *made = NULL;
    if (!error)
        error = world_split(comm, color, key, made);
    if (error) {
        char text[TLY_MPI_MAX_ERROR_STRING];
        MPIABI_Error_string(error, text, &length);
        bool waited =
            strstr(text, "(TALLY_TIMEOUT)"); /* a time-out ends the job, so its error number says less */
        pthread_mutex_lock(&errors_lock);
        snprintf(lost, sizeof lost, "%.700s%s", text,
                 waited ? "; every rank takes part in making a communicator: run a collective over these "
                          "devices on all ranks before a program that only some run"
                        : "");
        pthread_mutex_unlock(&errors_lock);
    }
    return error;
}

TLY_MPI_API int MPIABI_Comm_dup(struct tly_mpi_comm *comm, struct tly_mpi_comm **made);
int MPIABI_Comm_dup(struct tly_mpi_comm *comm, struct tly_mpi_comm **made)
{
    int error = tly_mpi_check_comm(comm, "MPI_Comm_dup");
    *made = NULL;
    if (error)
        return error;
    int *members = calloc((size_t)comm->size + 1, sizeof *members);
    if (!members)
        return tly_mpi_fail(TLY_MPI_ERR_NO_MEM, "MPI_Comm_dup", "out of memory");
    for (int i = 0; i < comm->size; i++)
        members[i] = i;
    unsigned number = atomic_fetch_add(&comm->splits, 1);
    error = world_create(comm, number, -1, members, comm->size, "MPI_Comm_dup", made);
    free(members);
    return error;
}

/* Its group stays, as groups do until the job ends.  jaxlib frees its communicators after MPI_Finalize(), and also
 * those that it never got. */
TLY_MPI_API int MPIABI_Comm_free(struct tly_mpi_comm **comm);
int MPIABI_Comm_free(struct tly_mpi_comm **comm)
{
    if (*comm == &tly_mpi_world || *comm == &tly_mpi_self)
        return tly_mpi_fail(TLY_MPI_ERR_COMM, "MPI_Comm_free",
                            "MPI_COMM_WORLD and MPI_COMM_SELF cannot be freed");
    world_destroy(*comm);
    *comm = NULL;
    return TLY_MPI_SUCCESS;
}

TLY_MPI_API int MPIABI_Comm_set_errhandler(struct tly_mpi_comm *comm, const void *handler);
int MPIABI_Comm_set_errhandler(struct tly_mpi_comm *comm, const void *handler)
{
    int error = tly_mpi_check_comm(comm, "MPI_Comm_set_errhandler");
    if (!error && handler != tly_mpi_errors_return)
        error = tly_mpi_fail(TLY_MPI_ERR_ARG, "MPI_Comm_set_errhandler",
                             "pass MPI_ERRORS_RETURN: nothing else is supported");
    return error;
}

/* --- what a program asks ----------------------------------------------------------------------------------- */

/* These have the same answer before MPI_Init() and after MPI_Finalize(), too. */

TLY_MPI_API double MPIABI_Wtime(void);
double MPIABI_Wtime(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

TLY_MPI_API double MPIABI_Wtick(void);
double MPIABI_Wtick(void)
{
    return 1e-9;
}

TLY_MPI_API int MPIABI_Get_version(int *version, int *subversion);
int MPIABI_Get_version(int *version, int *subversion)
{
    *version = 3;
    *subversion = 1;
    return TLY_MPI_SUCCESS;
}

TLY_MPI_API int MPIABI_Get_library_version(char *version, int *length);
int MPIABI_Get_library_version(char *version, int *length)
{
    *length = snprintf(version, TLY_MPI_MAX_VERSION_STRING, "Tally %s, a part of MPI 3.1", tally_version());
    return TLY_MPI_SUCCESS;
}

TLY_MPI_API int MPIABI_Get_processor_name(char *name, int *length);
int MPIABI_Get_processor_name(char *name, int *length)
{
    if (gethostname(name, TLY_MPI_MAX_PROCESSOR_NAME - 1) != 0)
        name[0] = '\0';
    name[TLY_MPI_MAX_PROCESSOR_NAME - 1] = '\0';
    *length = (int)strlen(name);
    return TLY_MPI_SUCCESS;
}

TLY_MPI_API int MPIABI_Type_size(const struct tly_mpi_type *type, int *size);
int MPIABI_Type_size(const struct tly_mpi_type *type, int *size)
{
    size_t bytes = 0;
    int error = tly_mpi_bytes(1, type, "MPI_Type_size", &bytes);
    if (!error)
        *size = (int)bytes;
    return error;
}
