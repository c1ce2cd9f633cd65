/* message.c - messages between two ranks, and the requests that stand for those under way.
 *
 * libtally's messages meet by group, ranks and tag, and both sides must name the same number of bytes: a receive with
 * room to spare is refused.  A rank's messages to itself stay here, in a list of their communicator. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "mpi/mpi.h"

/* A message under way; the application's until MPI_Wait() or MPI_Test() has ended it. */
struct tly_mpi_request {
    tally_op *op;              /* NULL: nothing to wait for but `comm` */
    struct tly_mpi_comm *comm; /* a receive of a message to itself: where it will be; else NULL */
    void *buffer;
    size_t bytes;
    int source, tag;
};

static pthread_mutex_t letters_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t letter_came = PTHREAD_COND_INITIALIZER;

void tly_mpi_drop_letters(struct tly_mpi_comm *comm)
{
    pthread_mutex_lock(&letters_lock);
    while (comm->letters) {
        struct tly_mpi_letter *letter = comm->letters;
        comm->letters = letter->next;
        free(letter);
    }
    pthread_mutex_unlock(&letters_lock);
}

static int message_keep_letter(struct tly_mpi_comm *comm, const void *buffer, size_t bytes, int tag,
                               const char *function)
{
    struct tly_mpi_letter *letter = malloc(sizeof *letter + bytes), **last = &comm->letters;
    if (!letter)
        return tly_mpi_fail(TLY_MPI_ERR_NO_MEM, function, "no memory for %zu KB", bytes / 1000 + 1);
    *letter = (struct tly_mpi_letter){.tag = tag, .bytes = bytes};
    if (bytes)
        memcpy(letter->data, buffer, bytes);
    pthread_mutex_lock(&letters_lock);
    while (*last)
        last = &(*last)->next;
    *last = letter;
    pthread_cond_broadcast(&letter_came);
    pthread_mutex_unlock(&letters_lock);
    return TLY_MPI_SUCCESS;
}

/* The oldest letter with the tag, taken out; NULL: there is none, and `block` is false. */
static struct tly_mpi_letter *message_take_letter(struct tly_mpi_comm *comm, int tag, bool block)
{
    struct tly_mpi_letter *found = NULL;
    pthread_mutex_lock(&letters_lock);
    for (;;) {
        struct tly_mpi_letter **at = &comm->letters;
        while (*at && (*at)->tag != tag)
            at = &(*at)->next;
        found = *at;
        if (found)
            *at = found->next;
        if (found || !block)
            break;
        pthread_cond_wait(&letter_came, &letters_lock);
    }
    pthread_mutex_unlock(&letters_lock);
    return found;
}

/* --- begin ------------------------------------------------------------------------------------------------- */

static int message_check(const struct tly_mpi_comm *comm, int count, const struct tly_mpi_type *type,
                         int peer, int tag, const char *function, size_t *bytes)
{
    int error = tly_mpi_check_comm(comm, function);
    if (!error)
        error = tly_mpi_bytes(count, type, function, bytes);
    if (!error && peer == TLY_MPI_PROC_NULL)
        return error;
    if (!error && peer == TLY_MPI_ANY_SOURCE)
        return tly_mpi_fail(TLY_MPI_ERR_RANK, function, "MPI_ANY_SOURCE is not supported: name the rank");
    if (!error && (peer < 0 || peer >= comm->size))
        return tly_mpi_fail(TLY_MPI_ERR_RANK, function, "%d is no rank from 0 to %d", peer, comm->size - 1);
    if (!error && tag < 0)
        return tly_mpi_fail(TLY_MPI_ERR_TAG, function,
                            tag == TLY_MPI_ANY_TAG ? "MPI_ANY_TAG is not supported: name the tag"
                                                   : "tag %d is negative",
                            tag);
    return error;
}

static int message_begin(struct tly_mpi_comm *comm, bool sends, void *buffer, int count,
                         const struct tly_mpi_type *type, int peer, int tag, const char *function,
                         struct tly_mpi_request **request)
{
    size_t bytes;
    int error = message_check(comm, count, type, peer, tag, function, &bytes);
    *request = NULL;
    if (error || peer == TLY_MPI_PROC_NULL)
        return error;
    struct tly_mpi_request *r = malloc(sizeof *r);
    if (!r)
        return tly_mpi_fail(TLY_MPI_ERR_NO_MEM, function, "out of memory");
    *r = (struct tly_mpi_request){
        .buffer = buffer, .bytes = bytes, .source = sends ? comm->rank : peer, .tag = tag};
    if (peer == comm->rank) {
        if (sends)
            error = message_keep_letter(comm, buffer, bytes, tag, function);
        else
            r->comm = comm;
    } else {
        tally_comm *c = tly_mpi_enter(function, &error);
        struct tally_options options = tly_mpi_options(comm);
        if (c) {
            int err =
                sends ? tally_send(c, buffer, bytes, TALLY_UINT8, peer, (uint32_t)tag, &options, &r->op)
                      : tally_recv(c, buffer, bytes, TALLY_UINT8, peer, (uint32_t)tag, &options, &r->op);
            tly_mpi_leave();
            error = tly_mpi_error(err, function);
        }
    }
    if (error)
        free(r);
    else
        *request = r;
    return error;
}

/* --- end --------------------------------------------------------------------------------------------------- */

static void message_describe(struct tly_mpi_status *status, int source, int tag, size_t bytes, int error)
{
    if (status)
        *status =
            (struct tly_mpi_status){.bytes = (int64_t)bytes, .source = source, .tag = tag, .error = error};
}

/* What to do with a letter that has come. */
static int message_open_letter(const struct tly_mpi_request *r, struct tly_mpi_letter *letter,
                               const char *function)
{
    int error = TLY_MPI_SUCCESS;
    if (letter->bytes != r->bytes)
        error = tly_mpi_fail(TLY_MPI_ERR_TRUNCATE, function, "a message of %zu bytes, where %zu are expected",
                             letter->bytes, r->bytes);
    else if (r->bytes)
        memcpy(r->buffer, letter->data, r->bytes);
    free(letter);
    return error;
}

/* Frees the request if it has ended.  block: until it has. */
static int message_end(struct tly_mpi_request **request, bool block, bool *ended,
                       struct tly_mpi_status *status, const char *function)
{
    struct tly_mpi_request *r = *request;
    int error = TLY_MPI_SUCCESS;
    *ended = true;
    if (!r) {
        error = tly_mpi_check_comm(&tly_mpi_self, function);
        message_describe(status, TLY_MPI_PROC_NULL, TLY_MPI_ANY_TAG, 0, error);
        return error;
    }
    if (r->comm) {
        struct tly_mpi_letter *letter = message_take_letter(r->comm, r->tag, block);
        *ended = letter != NULL;
        if (letter)
            error = message_open_letter(r, letter, function);
    } else if (r->op) {
        *ended = block || tally_op_poll(r->op);
        if (*ended)
            error = tly_mpi_finish(0, r->op, function);
    }
    if (!*ended)
        return error;
    message_describe(status, r->source, r->tag, r->bytes, error);
    free(r);
    *request = NULL;
    return error;
}

TLY_MPI_API int MPIABI_Wait(struct tly_mpi_request **request, struct tly_mpi_status *status);
int MPIABI_Wait(struct tly_mpi_request **request, struct tly_mpi_status *status)
{
    bool ended;
    return message_end(request, true, &ended, status, "MPI_Wait");
}

TLY_MPI_API int MPIABI_Test(struct tly_mpi_request **request, int *flag, struct tly_mpi_status *status);
int MPIABI_Test(struct tly_mpi_request **request, int *flag, struct tly_mpi_status *status)
{
    bool ended;
    int error = message_end(request, false, &ended, status, "MPI_Test");
    *flag = ended;
    return error;
}

TLY_MPI_API int MPIABI_Waitall(int count, struct tly_mpi_request *requests[],
                               struct tly_mpi_status statuses[]);
int MPIABI_Waitall(int count, struct tly_mpi_request *requests[], struct tly_mpi_status statuses[])
{
    int first = TLY_MPI_SUCCESS;
    for (int i = 0; i < count; i++) {
        bool ended;
        int error = message_end(&requests[i], true, &ended, statuses ? &statuses[i] : NULL, "MPI_Waitall");
        first = first ? first : error;
    }
    return first;
}

TLY_MPI_API int MPIABI_Get_count(const struct tly_mpi_status *status, const struct tly_mpi_type *type,
                                 int *count);
int MPIABI_Get_count(const struct tly_mpi_status *status, const struct tly_mpi_type *type, int *count)
{
    size_t bytes = 1;
    int error = tly_mpi_bytes(1, type, "MPI_Get_count", &bytes);
    if (!error)
        *count = status->bytes % (int64_t)bytes ? TLY_MPI_UNDEFINED : (int)(status->bytes / (int64_t)bytes);
    return error;
}

/* --- calls ------------------------------------------------------------------------------------------------- */

TLY_MPI_API int MPIABI_Isend(const void *buffer, int count, const struct tly_mpi_type *type, int to, int tag,
                             struct tly_mpi_comm *comm, struct tly_mpi_request **request);
int MPIABI_Isend(const void *buffer, int count, const struct tly_mpi_type *type, int to, int tag,
                 struct tly_mpi_comm *comm, struct tly_mpi_request **request)
{
    return message_begin(comm, true, (void *)(uintptr_t)buffer, count, type, to, tag, "MPI_Isend", request);
}

TLY_MPI_API int MPIABI_Irecv(void *buffer, int count, const struct tly_mpi_type *type, int from, int tag,
                             struct tly_mpi_comm *comm, struct tly_mpi_request **request);
int MPIABI_Irecv(void *buffer, int count, const struct tly_mpi_type *type, int from, int tag,
                 struct tly_mpi_comm *comm, struct tly_mpi_request **request)
{
    return message_begin(comm, false, buffer, count, type, from, tag, "MPI_Irecv", request);
}

TLY_MPI_API int MPIABI_Send(const void *buffer, int count, const struct tly_mpi_type *type, int to, int tag,
                            struct tly_mpi_comm *comm);
int MPIABI_Send(const void *buffer, int count, const struct tly_mpi_type *type, int to, int tag,
                struct tly_mpi_comm *comm)
{
    struct tly_mpi_request *request;
    bool ended;
    int error =
        message_begin(comm, true, (void *)(uintptr_t)buffer, count, type, to, tag, "MPI_Send", &request);
    return error ? error : message_end(&request, true, &ended, NULL, "MPI_Send");
}

TLY_MPI_API int MPIABI_Recv(void *buffer, int count, const struct tly_mpi_type *type, int from, int tag,
                            struct tly_mpi_comm *comm, struct tly_mpi_status *status);
int MPIABI_Recv(void *buffer, int count, const struct tly_mpi_type *type, int from, int tag,
                struct tly_mpi_comm *comm, struct tly_mpi_status *status)
{
    struct tly_mpi_request *request;
    bool ended;
    int error = message_begin(comm, false, buffer, count, type, from, tag, "MPI_Recv", &request);
    return error ? error : message_end(&request, true, &ended, status, "MPI_Recv");
}

TLY_MPI_API int MPIABI_Sendrecv(const void *send, int send_count, const struct tly_mpi_type *send_type,
                                int to, int send_tag, void *take, int take_count,
                                const struct tly_mpi_type *take_type, int from, int take_tag,
                                struct tly_mpi_comm *comm, struct tly_mpi_status *status);
int MPIABI_Sendrecv(const void *send, int send_count, const struct tly_mpi_type *send_type, int to,
                    int send_tag, void *take, int take_count, const struct tly_mpi_type *take_type, int from,
                    int take_tag, struct tly_mpi_comm *comm, struct tly_mpi_status *status)
{
    static const char *const function = "MPI_Sendrecv";
    struct tly_mpi_request *sent, *received;
    size_t bytes;
    bool ended;
    int error = message_check(comm, send_count, send_type, to, send_tag, function, &bytes);
    if (!error)
        error = message_begin(comm, false, take, take_count, take_type, from, take_tag, function, &received);
    if (error)
        return error;
    error = message_begin(comm, true, (void *)(uintptr_t)send, send_count, send_type, to, send_tag, function,
                          &sent);
    if (!error)
        error = message_end(&sent, true, &ended, NULL, function);
    else if (received && received->op) /* it would write into the caller's memory later */
        tally_op_cancel(received->op, "the message that goes the other way cannot be sent");
    int other = message_end(&received, !error || !received || received->op, &ended, status, function);
    if (!ended)
        free(received); /* a letter that will not come */
    return error ? error : other;
}
