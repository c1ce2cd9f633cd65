/* tally.h - all that an application calls.
 *
 * Tally sums tensors over the ranks of a data-parallel job.  A communicator is opened once per
 * process; operations are asynchronous, matched over ranks by name, and give the same bits on every
 * rank and in every run.
 *
 * Functions return 0 (or a non-negative value where said) or -errno.  Output parameters come last and
 * are untouched on failure.  tally_error() has the sentence for the calling thread's last failed call;
 * tally_op_error() the sentence of an operation that failed later.  All functions are safe to call from
 * any thread, except that a handle must not be used while or after it is freed or closed.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef TALLY_H
#define TALLY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TALLY_API __attribute__((visibility("default")))

/* A process's place in a running job.  Opaque. */
typedef struct tally_comm tally_comm;
/* Some of its ranks, in an order of their own.  Opaque; lives as long as its communicator. */
typedef struct tally_group tally_group;
/* One operation in flight or finished.  Opaque; ends with tally_op_free(). */
typedef struct tally_op tally_op;

/* Element types.  The numbers are part of the wire format. */
enum tally_dtype {
    TALLY_FLOAT32 = 0,
    TALLY_FLOAT64 = 1,
    TALLY_FLOAT16 = 2,
    TALLY_BFLOAT16 = 3,
    TALLY_INT8 = 4,
    TALLY_UINT8 = 5,
    TALLY_INT16 = 6,
    TALLY_INT32 = 7,
    TALLY_INT64 = 8,
    TALLY_BOOL = 9,        /* one byte, 0 or 1; sum = max = or, product = min = and, average is refused */
    TALLY_COMPLEX64 = 10,  /* two float32, real and imaginary; min, max and bitwise reductions are refused */
    TALLY_COMPLEX128 = 11, /* two float64 */
    TALLY_UINT16 = 12,
    TALLY_UINT32 = 13,
    TALLY_UINT64 = 14,
};

/* Reductions.  The numbers are part of the wire format. */
enum tally_reduction {
    TALLY_SUM = 0,
    TALLY_AVERAGE =
        1, /* sum divided by the number of ranks that take part, rounded once; integers truncate toward zero */
    TALLY_MIN = 2, /* NaN wins; of equal zeros the lower rank's stays */
    TALLY_MAX = 3,
    TALLY_PRODUCT = 4,
    TALLY_BAND = 5, /* bit by bit; integers and booleans alone */
    TALLY_BOR = 6,
    TALLY_BXOR = 7,
};

/* What an operation may be given besides its data.  Zero the struct, set `size` to sizeof, then what is
 * wanted; a NULL pointer stands for all defaults. */
struct tally_options {
    size_t size;          /* sizeof(struct tally_options) */
    int32_t priority;     /* higher goes first; default 0 */
    uint32_t ndim;        /* number of dimensions in `shape`; 0 with shape NULL: one dimension of `count` */
    const int64_t *shape; /* compared over ranks; its product must be `count` */
    double prescale;      /* each input is multiplied by this first; 0 stands for 1 */
    double postscale;     /* the result is multiplied by this last; 0 stands for 1 */
    uint32_t queued;      /* nonzero: the end of the operation is announced by tally_comm_next() */
    uint32_t space;       /* name space: equal names in different spaces are different tensors; 0..255 */
    void *tag;            /* returned in the event */
    tally_group *group;   /* the ranks that take part; NULL: all */
    const char *note;     /* what else the call means; compared over ranks as the shape is; NULL: nothing */
    uint32_t partial;     /* nonzero, of an allgather: ranks that have joined give nothing to it */
};

/* The first ordered name space.  In it and those above, calls without a name are numbered together, whatever
 * their kind: ranks whose n-th calls are of different kinds disagree, and are told so.  Below, each kind has
 * numbers of its own, and each rank would wait for its kind's n-th call on the others. */
enum { TALLY_SPACE_ORDERED = 128 };

/* What tally_comm_next() returns. */
enum tally_event_kind {
    TALLY_EVENT_OP = 1,      /* `op` ended; `status` is 0 or -errno */
    TALLY_EVENT_LOG = 2,     /* a log line in `text`, of level `status` */
    TALLY_EVENT_CLOSE = 3,   /* the communicator is closing: nothing more will come */
    TALLY_EVENT_LOG_END = 4, /* tally_comm_watch_log() was turned off and all lines have been delivered */
};

enum tally_log_level { TALLY_LOG_ERROR = 1, TALLY_LOG_WARNING = 2, TALLY_LOG_INFO = 3, TALLY_LOG_DEBUG = 4 };

struct tally_event {
    enum tally_event_kind kind;
    int status;
    tally_op *op; /* the handle that the submitting call returned, still to be freed by its owner */
    void *tag;
    char text[1024];
};

/* --- the library ------------------------------------------------------------------------------- */

/* The release, such as "0.1.0". */
TALLY_API const char *tally_version(void);

/* The sentence that says why the calling thread's last failed call failed; "" if none has. */
TALLY_API const char *tally_error(void);

/* Where log lines go (by default standard error).  `sink` may be called from any of Tally's threads; it
 * must not call Tally.  NULL restores the default. */
typedef void tally_log_sink(void *user, enum tally_log_level level, const char *line);
TALLY_API void tally_log_redirect(tally_log_sink *sink, void *user);

/* Bytes of one element of `dtype`, or 0 if there is no such type. */
TALLY_API size_t tally_dtype_size(enum tally_dtype dtype);

/* --- communicators ------------------------------------------------------------------------------ */

/* Join the job and wait until all ranks have, and for tallyd up to TALLY_SERVERS_TIMEOUT longer.  `settings` is NULL
 * or a NULL-terminated list of "NAME=value", which go before the environment and the configuration file (`tally params`
 * lists the names).  Errors: -EINVAL a setting or variable is unknown, out of range or missing; -ETIMEDOUT no
 * coordinator, or a rank is missing (named); -EACCES the secret differs or is needed; -EADDRINUSE; -EEXIST
 * a rank has come twice; -EPROTO versions or agreed settings differ; -ESTALE another job's coordinator;
 * -EAGAIN, -ENOENT its host's name is unknown; -ENODEV no such interface; -ECONNRESET somebody died. */
TALLY_API int tally_comm_open(const char *const settings[], tally_comm **comm);

/* For a launcher whose ranks have another way to tell each other things: rank 0 listens for the job now, and tells the
 * others its port, so that no other process takes it in between.  *port: the port that is wanted, or 0 for any that is
 * free; set to the one that was taken.  The next tally_comm_open() of this process that leads to this port takes the socket
 * over; a second call gives the first one's back, as does NULL for `port`.  `settings` and the environment as there; the
 * port in them does not count.  -EADDRINUSE: tally_error() names the process that holds it; -EINVAL: not rank 0;
 * -EADDRNOTAVAIL: the coordinator's host is another machine; else as tally_comm_open(). */
TALLY_API int tally_comm_listen(const char *const settings[], int *port);

/* Leave the job: wait (at most 10 s) for what was submitted, say goodbye and free the communicator.
 * Unfinished operations fail with -ESHUTDOWN.  Handles of operations stay valid until freed. */
TALLY_API int tally_comm_close(tally_comm *comm);

TALLY_API int tally_comm_rank(const tally_comm *comm);          /* this process's rank, from 0 */
TALLY_API int tally_comm_size(const tally_comm *comm);          /* number of ranks */
TALLY_API int tally_comm_local_rank(const tally_comm *comm);    /* rank among those of this machine */
TALLY_API int tally_comm_local_size(const tally_comm *comm);    /* number of ranks on this machine */
TALLY_API int tally_comm_machine(const tally_comm *comm);       /* this machine's number, from 0 */
TALLY_API int tally_comm_machine_count(const tally_comm *comm); /* number of machines with ranks */
TALLY_API int tally_comm_service_count(const tally_comm *comm); /* summation services: machines + tallyd */

/* 0 while the communicator works, else the -errno with which all operations end now.  `sentence` (may be
 * NULL) is set to a string that lives as long as the communicator. */
TALLY_API int tally_comm_status(const tally_comm *comm, const char **sentence);

/* Leave the job because of an error of this rank's own, such as an exception that nobody catches: it fails on all ranks at
 * once, with "rank R left: REASON", instead of when they next need this one.  `reason` is cut to one line of 399 bytes;
 * a caller that counts its steps says the step there.  Returns at once; tally_comm_close() follows as ever.  -EINVAL: no
 * reason; else what tally_comm_status() has, if the job has failed before. */
TALLY_API int tally_comm_abort(tally_comm *comm, const char *reason);

/* Wait for the next event: a queued operation that ended, or (after tally_comm_watch_log) a log line.
 * timeout_ms < 0 waits for ever.  -ETIMEDOUT: none came. */
TALLY_API int tally_comm_next(tally_comm *comm, int timeout_ms, struct tally_event *event);

/* Deliver this process's log lines through tally_comm_next() instead of the sink.  on: 0 or 1.  Turned off, it
 * ends with TALLY_EVENT_LOG_END, so that a thread that waits for lines knows when to go. */
TALLY_API int tally_comm_watch_log(tally_comm *comm, int on);

/* Facts of the communicator and its services as a JSON object: part size, predicted and reached speed of large
 * push_pulls, and for each service its kind, address, bandwidth, planned share, bytes summed,
 * memory in use and its maximum.  Asks the services; -ETIMEDOUT if one does not answer in time.  `json` is freed with free(). */
TALLY_API int tally_comm_report(tally_comm *comm, int timeout_ms, char **json);

/* --- groups -------------------------------------------------------------------------------------- */

/* Ranks that operate among themselves: ranks[i], i < count, each once and in any order, the caller's own among them.
 * In a group's operations all that is said of ranks (roots, pieces, who takes part) means this list: roots are places
 * in it, pieces come in its order, sums are nested along it, averages divide by `count`; sentences name ranks of the
 * communicator.  Equal names of tensors in two groups are different tensors.
 *
 * Nothing is sent.  `name` says which group it is: groups that exist at the same time need names of their own, and
 * every rank of a group must give the same list under the same name; where two ranks' lists differ, an operation in
 * which they meet fails on both.  The same name and list again is the same group.  Errors: -EINVAL a rank is out of
 * range, there twice or missing; -EEXIST the name has another list; -ENOMEM. */
TALLY_API int tally_group_create(tally_comm *comm, const char *name, const int ranks[], size_t count,
                                 tally_group **group);

TALLY_API int tally_group_rank(const tally_group *group); /* this process's place in it, from 0 */
TALLY_API int tally_group_size(const tally_group *group); /* number of its ranks */

/* --- memory for tensors -------------------------------------------------------------------------- */

/* `bytes` bytes (0 counts as 1) of zeros at a page's beginning, where the other ranks of this machine can read and
 * write them too: tensors there are reduced without being copied first.  Where this machine's ranks do not
 * sum in shared memory (TALLY_LOCAL=off; one machine with a tallyd; one rank on each of several machines, or ranks placed
 * so that it would change sums; more than 64 ranks on it; no room) it is ordinary memory.  After a failure of the job its
 * contents are undefined.  A forked child does not have it.  -ENOMEM: tally_error() names the limit. */
TALLY_API int tally_alloc(tally_comm *comm, size_t bytes, void **memory);

/* 1 where tally_alloc() gives memory that the ranks of this machine share, so that it pays to have tensors there; else 0. */
TALLY_API int tally_comm_has_pool(const tally_comm *comm);

/* Give it back, before or after the communicator is closed; no operation may use it.  NULL is accepted.
 * -EINVAL: not from tally_alloc(). */
TALLY_API int tally_free(void *memory);

/* --- operations --------------------------------------------------------------------------------- */

/* Agree with all ranks on a list of tensors in order of submission, so that the whole list is split
 * over the services exactly by plan.  Every rank must call it with the same list; a difference fails it
 * on all ranks, naming the ranks.  names[i] and bytes[i] for i < count; `space` as in tally_options.
 * A name keeps its place until the communicator closes or a later plan names it again.  Collective and
 * blocking.  -EBUSY: a named tensor is in flight. */
TALLY_API int tally_plan(tally_comm *comm, uint32_t space, size_t count, const char *const names[],
                         const uint64_t bytes[]);

/* y = reduction over all ranks of x, elementwise, on all ranks.  `count` elements; input == output is
 * in place; else they must not overlap.  Neither may be touched before the operation ends.  name NULL:
 * the calls without a name are matched by their order.  -EBUSY: the name is in flight; -EINVAL. */
TALLY_API int tally_push_pull(tally_comm *comm, const char *name, const void *input, void *output,
                              size_t count, enum tally_dtype dtype, enum tally_reduction reduction,
                              const struct tally_options *options, tally_op **op);

/* `buffer` of rank `root` on all ranks.  The services of the other ranks' machines relay it; the root's card sends it once. */
TALLY_API int tally_broadcast(tally_comm *comm, const char *name, void *buffer, size_t count,
                              enum tally_dtype dtype, int root, const struct tally_options *options,
                              tally_op **op);

/* The inputs of all ranks, one behind the other in order of ranks.  Shapes may differ in their first
 * dimension (options->shape; without one the input is a vector).  tally_op_gathered() has the result. */
TALLY_API int tally_allgather(tally_comm *comm, const char *name, const void *input, size_t count,
                              enum tally_dtype dtype, const struct tally_options *options, tally_op **op);

/* The same where all ranks give as much and know it: `output` has room for `count` elements of each rank, in order of ranks,
 * and the ranks do not have to tell each other their first dimensions before they begin.  The input may lie in its own place
 * in the output, else they must not overlap.  Ranks whose shapes differ, or of which some call tally_allgather(), are told,
 * all of them.  tally_op_gathered() knows the result as well. */
TALLY_API int tally_allgather_into(tally_comm *comm, const char *name, const void *input, void *output,
                                   size_t count, enum tally_dtype dtype, const struct tally_options *options,
                                   tally_op **op);

/* Ends when all ranks have called it. */
TALLY_API int tally_barrier(tally_comm *comm, const char *name, const struct tally_options *options,
                            tally_op **op);

/* As tally_push_pull, but rank `root` alone gets the result; the others' `output` is not used.  To them nothing is
 * sent but that the root has been served.  With three machines or more the root's own sums nothing if cards are alike, since
 * its card receives all sums. */
TALLY_API int tally_reduce(tally_comm *comm, const char *name, const void *input, void *output, size_t count,
                           enum tally_dtype dtype, enum tally_reduction reduction, int root,
                           const struct tally_options *options, tally_op **op);

/* The input is a piece for each rank, one behind the other, of counts[i] elements for rank i, the same on all ranks.
 * `output` gets this rank's piece of the reduction: counts[own rank] elements, in the input's place (where that piece
 * lies) or apart from it.  Each piece is summed on the machine of its rank, so that a network card carries no more than
 * all of the input out and the pieces in; spare machines do not make it faster.  options->shape is not used. */
TALLY_API int tally_reduce_scatter(tally_comm *comm, const char *name, const void *input, void *output,
                                   const size_t counts[], enum tally_dtype dtype,
                                   enum tally_reduction reduction, const struct tally_options *options,
                                   tally_op **op);

/* input: give[i] elements for rank i, one behind the other; output: take[i] elements from rank i, likewise.  What
 * rank i gives rank j must be what j takes from i, or it fails on all ranks.  They must not overlap.  Pieces go
 * through the machine of who takes them, and so once out of and once into a network card.  options->shape is not
 * used.  -EINVAL: also for more ranks than a part has room for lengths, 16 bytes a rank. */
TALLY_API int tally_alltoall(tally_comm *comm, const char *name, const void *input, const size_t give[],
                             void *output, const size_t take[], enum tally_dtype dtype,
                             const struct tally_options *options, tally_op **op);

/* The ranks' inputs in the memory of rank `root`, one behind the other in order of ranks: counts[i] elements from rank
 * i.  `output` and `counts` are the root's; as tally_alltoall otherwise. */
TALLY_API int tally_gather(tally_comm *comm, const char *name, const void *input, size_t count, void *output,
                           const size_t counts[], enum tally_dtype dtype, int root,
                           const struct tally_options *options, tally_op **op);

/* The opposite: rank i gets counts[i] elements of the root's input.  `input` and `counts` are the root's. */
TALLY_API int tally_scatter(tally_comm *comm, const char *name, const void *input, const size_t counts[],
                            void *output, size_t count, enum tally_dtype dtype, int root,
                            const struct tally_options *options, tally_op **op);

/* A message from one rank to another: the n-th that `from` sends to `to` with a tag meets the n-th that `to` receives from
 * it with that tag, and must be of the same count and type.  Other operations do not wait for messages.  A tally_recv()
 * ends when the message is there.  A tally_send() of up to 64 KB ends at once: the message has been copied, and where
 * the receiver means another, the sender only warns.  A larger one ends when the receiver's machine has it, which
 * asks for it once the receiver has; with -EINVAL if they disagree.  -EINVAL: no such rank, or the own. */
TALLY_API int tally_send(tally_comm *comm, const void *input, size_t count, enum tally_dtype dtype, int to,
                         uint32_t tag, const struct tally_options *options, tally_op **op);
TALLY_API int tally_recv(tally_comm *comm, void *output, size_t count, enum tally_dtype dtype, int from,
                         uint32_t tag, const struct tally_options *options, tally_op **op);

/* Ends when there is a message with this tag for which this rank has not called tally_recv(); tally_op_source() says of
 * whom the oldest is.  To receive from any rank, call this and then that: with one probe for a tag under way at a time,
 * and no tally_recv() with that tag in between. */
TALLY_API int tally_probe(tally_comm *comm, uint32_t tag, const struct tally_options *options, tally_op **op);

/* Say that this rank has no more input.  The operation ends once all ranks have said so, and all that they had submitted
 * has ended; tally_op_source() names the rank that said it last.  It waits for as long as the others live.
 *
 * Until then this rank submits nothing more but messages (-EINVAL), and takes no part in what the others submit: in
 * their push_pulls of all ranks zeros stand for it, an average's divisor counts it, and their barriers of all ranks do not
 * wait for it.  What it had submitted before goes on.  Any other operation of a group that it is in fails on the ranks
 * that have submitted it, and names it.  When all have joined, names and calls without a name are counted anew on all
 * ranks, and all may join again.  -ESHUTDOWN: a rank has left the job instead. */
TALLY_API int tally_join(tally_comm *comm, const struct tally_options *options, tally_op **op);

/* Push an error mark for `name`: the operation of `kind` (an enum tally_kind) that the other ranks submit
 * under it fails on all ranks with `reason`.  For a rank that must refuse what it
 * was asked to do and cannot submit it.  Of the options, space and group are used.  Not for
 * messages. */
TALLY_API int tally_refuse(tally_comm *comm, const char *name, uint32_t kind,
                           const struct tally_options *options, const char *reason);
enum tally_kind {
    TALLY_PUSH_PULL = 1,
    TALLY_BROADCAST = 2,
    TALLY_ALLGATHER = 3,
    TALLY_BARRIER = 4,
    TALLY_REDUCE = 5,
    TALLY_REDUCE_SCATTER = 6,
    TALLY_ALLTOALL = 7,
    TALLY_GATHER = 8,
    TALLY_SCATTER = 9,
    TALLY_MESSAGE = 10,
};

/* 1: ended, 0: not yet. */
TALLY_API int tally_op_poll(const tally_op *op);

/* Have the end announced by tally_comm_next() after all, as options.queued does from the beginning.  0: it will be, once;
 * 1: the operation has ended already, and nothing is announced.  -EINVAL: that was asked for before; -ECHILD. */
TALLY_API int tally_op_watch(tally_op *op);

/* Take back an operation: it fails with -ECANCELED and `reason` on all ranks, also on those that submit it later, as if
 * this one had refused it (tally_refuse).  Returns at once.  The operation uses its memory until it ends, once its service has
 * heard of it; one that all ranks have submitted, and whose first part is being summed, ends as ever, well or badly.  Nothing
 * happens to one that has ended.
 * -ENOMEM; -ECHILD. */
TALLY_API int tally_op_cancel(tally_op *op, const char *reason);

/* Wait for the end.  timeout_ms < 0: for ever (TALLY_TIMEOUT ends the job all the same).  0: done;
 * -ETIMEDOUT: the waiting ended, not the operation; else the operation's own -errno: -EINVAL the ranks
 * disagree, -ECANCELED a rank has cancelled it, -ECONNRESET a rank is gone, -ETIME a rank was late for
 * longer than TALLY_TIMEOUT, -ESHUTDOWN closed. */
TALLY_API int tally_op_wait(tally_op *op, int timeout_ms);

/* The sentence of a failed operation, "" for one that did not fail; lives as long as the handle. */
TALLY_API const char *tally_op_error(const tally_op *op);

/* A finished allgather's result: `data` of `bytes` bytes and each rank's first dimension, one for each
 * rank of its group.  They live as long as the handle.  -EAGAIN: not finished; -EINVAL: no allgather. */
TALLY_API int tally_op_gathered(const tally_op *op, const void **data, size_t *bytes,
                                const int64_t **first_dims);

/* The rank (its place in the group) whose message a finished tally_probe() has found; the last rank that joined, of a
 * finished tally_join().  -EAGAIN: not finished, or failed; -EINVAL: neither. */
TALLY_API int tally_op_source(const tally_op *op);

/* Let go of the handle.  An operation in flight goes on to its end.  NULL is accepted. */
TALLY_API void tally_op_free(tally_op *op);

#ifdef __cplusplus
}
#endif
#endif
