/* tally.h - Tally's C interface.
 *
 * Tally sums tensors over the ranks of a data-parallel job.  A process opens a communicator for each job that it is in.
 * Most processes are in one job.  Operations are asynchronous.  Tally matches them over ranks by name, and they give
 * the same bits on every rank and in every run.
 *
 * Functions return -errno on failure, else 0 or the non-negative value that their comment names.  Output parameters
 * come last and keep their values on failure.  tally_error() explains the calling thread's last failed call,
 * tally_op_error() an operation that failed later.  Any thread may call any function, but must not use a handle during
 * or after its free or close.
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
/* A list of ranks of a communicator.  Opaque; lives as long as its communicator. */
typedef struct tally_group tally_group;
/* One operation, in flight or finished.  Opaque; freed by tally_op_free(). */
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
    TALLY_AVERAGE = 1, /* sum divided by the number of ranks, rounded once; integers truncate toward zero */
    TALLY_MIN = 2,     /* NaN wins; between equal zeros the lower rank's wins */
    TALLY_MAX = 3,
    TALLY_PRODUCT = 4,
    TALLY_BAND = 5, /* bitwise; integers and booleans only */
    TALLY_BOR = 6,
    TALLY_BXOR = 7,
};

/* An operation's options.  Zero the struct, set `size`, then set what you need.  A NULL pointer stands for all
 * defaults.  Later versions append fields.  A program built for an older library runs with a newer one.  A program built
 * for a newer library runs with an older one if it sets no field unknown to that one. */
struct tally_options {
    size_t size;          /* sizeof(struct tally_options) */
    int32_t priority;     /* higher goes first; default 0 */
    uint32_t ndim;        /* dimensions in `shape`; 0 with shape NULL: one dimension of `count` */
    const int64_t *shape; /* compared over ranks; its product must be `count` */
    double prescale;      /* factor for each input before the reduction; 0 stands for 1 */
    double postscale;     /* factor for the result after the reduction; 0 stands for 1 */
    uint32_t queued;      /* nonzero: tally_comm_next() announces the operation's end */
    uint32_t space;       /* name space: equal names in different spaces are different tensors; 0..255 */
    void *tag;            /* copied to the event */
    tally_group *group;   /* participating ranks; NULL: all */
    const char *note;     /* text that must be equal on all ranks, as the shape must; NULL: none */
    uint32_t partial;     /* nonzero, for an allgather: ranks that have joined contribute nothing */
    uint32_t unused;      /* never read: padding in earlier headers */
    uint64_t place;       /* enum tally_place: where input and output are; default the host's memory */
    void *stream;         /* TALLY_PLACE_CUDA: a CUstream; the input is ready after its work so far */
};

/* Where a tensor is.  TALLY_PLACE_CUDA, for tally_push_pull() alone: input and output are in one GPU's memory, and are the
 * operation's until it ends.  Then the result is there, for every stream.  If it fails or is cancelled, the GPU may still read
 * the input.  What `stream` is given after the end comes after that, so the stream must exist until then.  tally_comm_close()
 * waits for it, too, up to 3 s.  NULL is the legacy default stream.  CU_STREAM_PER_THREAD means another stream in each thread, so it is
 * refused.  The operation copies through pinned memory, of which a rank uses TALLY_DEVICE_MEMORY.  It takes memory for
 * the whole tensor at once, so large tensors go in pieces.  -EINVAL: the memory is not on one GPU, is managed, or the stream is
 * being captured or CU_STREAM_PER_THREAD; -ENOTSUP: there is no driver. */
enum tally_place { TALLY_PLACE_HOST = 0, TALLY_PLACE_CUDA = 1 };

/* The first ordered name space.  In it and above, calls without a name share one count over all kinds.  If the n-th
 * calls of two ranks differ in kind, both fail with an error that says so.  Below, each kind has a count of its own, so
 * each rank would wait for the n-th call of its kind on the others. */
enum { TALLY_SPACE_ORDERED = 128 };

/* What tally_comm_next() returns. */
enum tally_event_kind {
    TALLY_EVENT_OP = 1,      /* `op` ended; `status` is 0 or -errno */
    TALLY_EVENT_LOG = 2,     /* a log line in `text`, of level `status` */
    TALLY_EVENT_CLOSE = 3,   /* the communicator is closing; no event follows */
    TALLY_EVENT_LOG_END = 4, /* tally_comm_watch_log() was turned off, and all lines have been delivered */
};

enum tally_log_level { TALLY_LOG_ERROR = 1, TALLY_LOG_WARNING = 2, TALLY_LOG_INFO = 3, TALLY_LOG_DEBUG = 4 };

struct tally_event {
    enum tally_event_kind kind;
    int status;
    tally_op *op; /* the handle from the submitting call; its owner still frees it */
    void *tag;
    char text[1024];
};

/* --- the library ------------------------------------------------------------------------------- */

/* The release, such as "0.1.0". */
TALLY_API const char *tally_version(void);

/* The reason for the calling thread's last failed call; "" if none has failed. */
TALLY_API const char *tally_error(void);

/* Send log lines to `sink` instead of standard error.  Any of Tally's threads may call `sink`, and `sink` must not call
 * Tally.  NULL restores the default. */
typedef void tally_log_sink(void *user, enum tally_log_level level, const char *line);
TALLY_API void tally_log_redirect(tally_log_sink *sink, void *user);

/* Set the names that error messages use for operations in one name space, 0..255.  An interface over this header has
 * names of its own.  names[kind], for kinds up to TALLY_SCATTER, as in "names[TALLY_PUSH_PULL] no. 7"; names[0] is not
 * used.  The array and its strings must stay.  NULL restores the default, "tally_push_pull" and so on.  In ordered name
 * spaces calls without a name have torch's names. */
TALLY_API void tally_name_calls(uint32_t space, const char *const *names);

/* sum[i] = a[i] + b[i] for i < count float32 elements, and norms[k] = the L1 norm of the sum's k-th chunk of `chunk` elements;
 * the last chunk may have fewer.  norms has room for count / chunk, rounded up.  sum may equal a or b.  The same bits on
 * every machine; a NaN is stored as the canonical one.  In the calling thread, at the speed of its memory.  -EINVAL: chunk
 * is 0, or a pointer is NULL. */
TALLY_API int tally_add_norms(const float *a, const float *b, float *sum, size_t count, size_t chunk,
                              float *norms);

/* Codecs: float32 gradients as small integers that add up.  All ranks of an operation share a scale, and the sum of their codes
 * fits its word, so the words go through tally_push_pull() with TALLY_SUM.
 *
 *     codec               ranks n   word           digits a word   largest code L
 *     TALLY_CODEC_INT8    to 127    TALLY_INT8     1               127 / n, rounded down
 *     TALLY_CODEC_INT4    to 7      TALLY_INT8     2, base 16      7 / n
 *     TALLY_CODEC_INT4    8 to 15   TALLY_INT16    3, base 32      15 / n
 *
 * A block is TALLY_CODEC_BLOCK neighbours; the last may have fewer.  Its exponent is one uint8: b = 1 .. 247 stands for the
 * scale s = 2^(b - 127), any other for none: then nothing is sent and all stays in the error. */
enum tally_codec { TALLY_CODEC_INT8 = 0, TALLY_CODEC_INT4 = 1 };
enum { TALLY_CODEC_BLOCK = 256 };

/* The word's type, and the number of words for `count` elements: count / digits, rounded up.  -EINVAL: no such codec, or 0
 * ranks; -ENOTSUP: more ranks than the codec takes.  The three functions below fail for the same reasons, and with -EINVAL
 * for a NULL pointer. */
TALLY_API int tally_codec_words(enum tally_codec codec, uint32_t ranks, size_t count, enum tally_dtype *dtype,
                                size_t *words);

/* The exponents for the next tally_encode(), one for each block of x[i] = gradient[i] + error[i]: the smallest with L * s >=
 * max |x|, at most 247; 0 if all x are 0, 255 if one is not finite.  TALLY_MAX over the ranks makes them equal everywhere. */
TALLY_API int tally_exponents(enum tally_codec codec, uint32_t ranks, const float *gradient,
                              const float *error, size_t count, uint8_t *exponents);

/* Encode with error feedback (Seide et al. 2014) and a shared scale (Sapio et al. 2021), for x = gradient[i] + error[i]:
 *
 *     c = x / s, rounded half to even, held to -L .. L, and 0 if |x| >= 2^24 * s
 *     error[i] = x - c * s
 *
 * The new error and c * s are together x, exactly.  `exponents` must be equal on all ranks.  `next`, unless NULL, gets
 * what tally_exponents() would have got before.  If an x is not finite, its block's codes are 0 and its error stays.  The error
 * starts as zeros and overlaps nothing else.  The same bits on every machine. */
TALLY_API int tally_encode(enum tally_codec codec, uint32_t ranks, const float *gradient, float *error,
                           size_t count, const uint8_t *exponents, void *words, uint8_t *next);

/* output[i] = S / divisor, rounded, times s, for the sums S of codes in `words` and the exponents that tally_encode() took.
 * divisor: 1 for a sum, the ranks for an average, up to 127; else -EINVAL.  `next`, unless NULL, is the maximum over the ranks of
 * tally_encode()'s: blocks for which it is 255 become NaN. */
TALLY_API int tally_decode(enum tally_codec codec, uint32_t ranks, const void *words,
                           const uint8_t *exponents, const uint8_t *next, size_t count, uint32_t divisor,
                           float *output);

/* Bytes of one element of `dtype`, or 0 if there is no such type. */
TALLY_API size_t tally_dtype_size(enum tally_dtype dtype);

/* --- communicators ------------------------------------------------------------------------------ */

/* Join the job.  Waits until all ranks have joined, and up to TALLY_SERVERS_TIMEOUT longer for missing tallyd.
 * `settings` is NULL or a NULL-terminated list of "NAME=value"; `tally params` lists the names.  These override the
 * environment, which overrides the configuration file.
 *   -EINVAL            a setting or variable is unknown, out of range or missing
 *   -ETIMEDOUT         no coordinator, or a rank is missing; tally_error() names it
 *   -EACCES            the secret differs, or the job needs one
 *   -EADDRINUSE        another process holds the coordinator's port
 *   -EEXIST            two processes have the same rank
 *   -EPROTO            releases or agreed settings differ
 *   -ESTALE            the coordinator belongs to another job
 *   -EAGAIN, -ENOENT   the coordinator's host name is unknown
 *   -ENODEV            no such interface
 *   -ECONNRESET        a process died */
TALLY_API int tally_comm_open(const char *const settings[], tally_comm **comm);

/* Listen for the job on rank 0, before tally_comm_open().  A launcher whose ranks can already exchange messages uses
 * this: rank 0 tells the others its port, and no other process can take the port in between.  *port: the wanted port, 0
 * for any free one, or -1 for that of the settings; set to the port that was taken.  With -1 a port that a coordinator
 * may hold already is no error: tally_comm_open() joins that one, or waits for its end.  The next tally_comm_open() of
 * this process that leads to this port takes the socket over.  Each call has a socket of its own, so several threads can
 * be rank 0 of jobs of their own; a thread may ask again for a port that it holds.  NULL for `port` closes the sockets
 * that no communicator has taken over.  The port of `settings` and the environment counts only with -1; the rest is as
 * for tally_comm_open().
 *   -EADDRINUSE        tally_error() names the process that holds the port
 *   -EINVAL            this process is not rank 0
 *   -EADDRNOTAVAIL     the coordinator's host is another machine
 *   others             as for tally_comm_open() */
TALLY_API int tally_comm_listen(const char *const settings[], int *port);

/* Leave the job and free the communicator.  Waits at most 10 s for submitted operations; unfinished ones fail with
 * -ESHUTDOWN.  Handles of operations stay valid until freed. */
TALLY_API int tally_comm_close(tally_comm *comm);

TALLY_API int tally_comm_rank(const tally_comm *comm);          /* this process's rank, from 0 */
TALLY_API int tally_comm_size(const tally_comm *comm);          /* number of ranks */
TALLY_API int tally_comm_local_rank(const tally_comm *comm);    /* place among the ranks of this machine */
TALLY_API int tally_comm_local_size(const tally_comm *comm);    /* number of ranks on this machine */
TALLY_API int tally_comm_machine(const tally_comm *comm);       /* this machine's number, from 0 */
TALLY_API int tally_comm_machine_count(const tally_comm *comm); /* number of machines with ranks */
TALLY_API int tally_comm_service_count(const tally_comm *comm); /* summation services: machines + tallyd */

/* 0 while the communicator works, else the -errno with which every operation now ends.  If `sentence` is not NULL, it
 * gets the reason, a string that lives as long as the communicator. */
TALLY_API int tally_comm_status(const tally_comm *comm, const char **sentence);

/* Fail the job because of an error on this rank, such as an uncaught exception.  All ranks fail at once with "rank R
 * left: REASON", instead of when they next need this rank.  `reason` is cut to one line of 399 bytes; a caller that
 * counts its steps puts the step there.  Returns at once; on the rank that holds the coordinator once the others have
 * been told, within a second.  tally_comm_close() is still needed.  With TALLY_ABORT=0 the call does nothing.
 *   -EINVAL            no reason
 *   others             the job has failed before: as tally_comm_status() */
TALLY_API int tally_comm_abort(tally_comm *comm, const char *reason);

/* Wait for the next event: the end of a queued operation or, after tally_comm_watch_log(), a log line.  timeout_ms < 0
 * waits for ever.  -ETIMEDOUT: no event came. */
TALLY_API int tally_comm_next(tally_comm *comm, int timeout_ms, struct tally_event *event);

/* Deliver this process's log lines through tally_comm_next() instead of the sink.  on: 0 or 1.  Turning it off queues
 * TALLY_EVENT_LOG_END after the last line, so that a thread that waits for lines can stop. */
TALLY_API int tally_comm_watch_log(tally_comm *comm, int on);

/* Describe the communicator and its services as a JSON object: part size, predicted and reached speed of large
 * push_pulls, and for each service its kind, address, bandwidth, planned share, bytes summed, memory in use and its
 * maximum.  Free `json` with free().  -ETIMEDOUT: a service did not answer in time. */
TALLY_API int tally_comm_report(tally_comm *comm, int timeout_ms, char **json);

/* --- groups -------------------------------------------------------------------------------------- */

/* Create a group: ranks that operate among themselves.  ranks[i], i < count, holds each of them once, in any order, the
 * caller's rank included.  A group's operations see only this list.  Roots are places in it, pieces come in its order,
 * sums follow the tree over it, averages divide by `count`.  Error sentences name ranks of the communicator.  The same
 * tensor name in two groups means two tensors.
 *
 * Nothing is sent.  `name` identifies the group.  Groups that exist at the same time need different names, and all
 * ranks of a group must give the same list under the same name.  If two ranks' lists differ, an operation in which they
 * meet fails on both; but if the others share a machine and have operated before, the late rank waits (TALLY_TIMEOUT).  The same name and list again give the same group.
 *   -EINVAL            a rank is out of range, there twice, or the caller's is missing
 *   -EEXIST            the name has another list
 *   -ENOMEM */
TALLY_API int tally_group_create(tally_comm *comm, const char *name, const int ranks[], size_t count,
                                 tally_group **group);

TALLY_API int tally_group_rank(const tally_group *group); /* this process's place in the group, from 0 */
TALLY_API int tally_group_size(const tally_group *group); /* number of ranks in the group */

/* --- memory for tensors -------------------------------------------------------------------------- */

/* Allocate `bytes` bytes (0 counts as 1) of zeros that the other ranks of this machine can read and write too.  Tensors
 * there are reduced without a copy first.  The memory begins at a page.
 *
 * It is ordinary memory where the ranks of this machine do not sum in shared memory: TALLY_LOCAL=off; one rank on each of
 * several machines; ranks placed so that it would change sums; more than 64 ranks on the machine; no room.  After a failure
 * of the job its contents are undefined.  A forked child does not have it.
 *   -ENOMEM            tally_error() names the limit */
TALLY_API int tally_alloc(tally_comm *comm, size_t bytes, void **memory);

/* 1 if tally_alloc() gives memory that the ranks of this machine share, so that all ranks' tensors there are faster; else 0.
 * 0 also on one machine with a tallyd, where only groups use it. */
TALLY_API int tally_comm_has_pool(const tally_comm *comm);

/* Free memory from tally_alloc(), before or after the communicator is closed.  No operation may still use it.  NULL is
 * accepted.  -EINVAL: the memory is not from tally_alloc(). */
TALLY_API int tally_free(void *memory);

/* --- operations --------------------------------------------------------------------------------- */

/* Agree with all ranks on a list of tensors in their order of submission.  Tally then splits the whole list over the
 * services exactly by plan, instead of each tensor alone.  If the last one has a higher priority than the first,
 * tensors overtake each other in sixteen blocks of equal size.  names[i] and bytes[i], i < count,
 * describe tensor i; `space` is as in tally_options.  A name keeps its place until the communicator closes or a later
 * plan names it again.  Collective and blocking: every rank calls it with the same list.  If lists differ, it fails on
 * all ranks, with an error that names the ranks.  -EBUSY: a named tensor is in flight. */
TALLY_API int tally_plan(tally_comm *comm, uint32_t space, size_t count, const char *const names[],
                         const uint64_t bytes[]);

/* All-reduce: reduce `count` elements over all ranks, elementwise; every rank gets the result.  input == output works
 * in place; otherwise the two must not overlap.  Touch neither before the operation ends.  name NULL: calls without a
 * name are matched by their order.  -EBUSY: the name is in flight; -EINVAL. */
TALLY_API int tally_push_pull(tally_comm *comm, const char *name, const void *input, void *output,
                              size_t count, enum tally_dtype dtype, enum tally_reduction reduction,
                              const struct tally_options *options, tally_op **op);

/* Elements begin to begin + count - 1 of a buffer. */
struct tally_range {
    uint64_t begin, count;
};

/* tally_push_pull() of parts of a buffer: of the elements in `ranges` alone, each of which begins at a multiple of 64 bytes
 * and behind the end of the one before it.  The same on all ranks; they may change from call to call.  `input` and `output`
 * are where element 0 would be; all other elements are left as they are, and may be used meanwhile.  The ranges are one
 * operation, with one name and one priority.  Shapes are not compared.  It goes through the services, also where all ranks
 * share one machine.  Where the ranks of a machine send together, nothing can stand for one that has joined (tally_join):
 * all ranks get -ECANCELED.  -EBUSY: the name is in flight; -EINVAL. */
TALLY_API int tally_push_pullv(tally_comm *comm, const char *name, const void *input, void *output,
                               const struct tally_range ranges[], size_t range_count, enum tally_dtype dtype,
                               enum tally_reduction reduction, const struct tally_options *options,
                               tally_op **op);

/* Copy `buffer` of rank `root` to all ranks.  The root's card sends it once; the services of the other ranks' machines
 * relay it. */
TALLY_API int tally_broadcast(tally_comm *comm, const char *name, void *buffer, size_t count,
                              enum tally_dtype dtype, int root, const struct tally_options *options,
                              tally_op **op);

/* Concatenate the inputs of all ranks, in order of ranks.  Shapes may differ in their first dimension (options->shape;
 * without one the input is a vector).  tally_op_gathered() returns the result. */
TALLY_API int tally_allgather(tally_comm *comm, const char *name, const void *input, size_t count,
                              enum tally_dtype dtype, const struct tally_options *options, tally_op **op);

/* tally_allgather() for inputs of the same shape, into the caller's memory.  `output` has room for `count` elements of
 * each rank, in order of ranks.  This saves the exchange of first dimensions.  The input may lie in its own place in
 * the output; otherwise the two must not overlap.  If shapes differ, or some ranks call tally_allgather(), all ranks
 * get an error.  tally_op_gathered() returns the result too. */
TALLY_API int tally_allgather_into(tally_comm *comm, const char *name, const void *input, void *output,
                                   size_t count, enum tally_dtype dtype, const struct tally_options *options,
                                   tally_op **op);

/* Ends when all ranks have called it. */
TALLY_API int tally_barrier(tally_comm *comm, const char *name, const struct tally_options *options,
                            tally_op **op);

/* As tally_push_pull(), but only rank `root` gets the result.  The other ranks' `output` is not used; they receive only
 * the news that the root has been served.  With three machines or more and equal cards, the root's machine sums
 * nothing, because its card receives all sums. */
TALLY_API int tally_reduce(tally_comm *comm, const char *name, const void *input, void *output, size_t count,
                           enum tally_dtype dtype, enum tally_reduction reduction, int root,
                           const struct tally_options *options, tally_op **op);

/* Reduce, and give each rank its piece.  The input holds counts[i] elements for rank i, in order of ranks; `counts` is
 * the same on all ranks.  `output` gets this rank's piece of the reduction, counts[own rank] elements.  It may lie
 * where that piece lies in the input, or apart from the input.  Each rank's machine sums that rank's piece.  So a
 * network card sends all that its ranks give to other machines' pieces, and receives what other machines give to its own.  Each
 * machine gives one sum if its ranks send together, else each rank its input.  Spare machines do not make it faster.
 * options->shape is not used. */
TALLY_API int tally_reduce_scatter(tally_comm *comm, const char *name, const void *input, void *output,
                                   const size_t counts[], enum tally_dtype dtype,
                                   enum tally_reduction reduction, const struct tally_options *options,
                                   tally_op **op);

/* Exchange pieces between all ranks.  `input` holds give[i] elements for rank i, in order of ranks; `output` receives
 * take[i] elements from rank i.  The two must not overlap.  If rank i gives rank j another number than j takes from i,
 * the operation fails on all ranks.  A piece goes through the receiver's machine: once out of and once into a network
 * card.  options->shape is not used.  -EINVAL also if a part has no room for the lengths, 16 bytes a rank. */
TALLY_API int tally_alltoall(tally_comm *comm, const char *name, const void *input, const size_t give[],
                             void *output, const size_t take[], enum tally_dtype dtype,
                             const struct tally_options *options, tally_op **op);

/* Collect the inputs of all ranks on rank `root`, in order of ranks: counts[i] elements from rank i.  Only the root
 * uses `output` and `counts`.  Otherwise as tally_alltoall(). */
TALLY_API int tally_gather(tally_comm *comm, const char *name, const void *input, size_t count, void *output,
                           const size_t counts[], enum tally_dtype dtype, int root,
                           const struct tally_options *options, tally_op **op);

/* Distribute the input of rank `root`: rank i gets counts[i] elements.  Only the root uses `input` and `counts`. */
TALLY_API int tally_scatter(tally_comm *comm, const char *name, const void *input, const size_t counts[],
                            void *output, size_t count, enum tally_dtype dtype, int root,
                            const struct tally_options *options, tally_op **op);

/* Send a message from one rank to another.  The n-th tally_send() from a rank to another with a tag meets the n-th
 * tally_recv() there from that rank with that tag.  Both must have the same count and type.  Other operations do not
 * wait for messages.  -EINVAL: no such rank, or the caller's own.
 *
 * A tally_recv() ends when the message is there.  A tally_send() of up to 64 KB ends at once, because the message has
 * been copied; if count or type differ, the sender only logs a warning.  A larger tally_send() waits until the receiver
 * asks, and ends when the receiver's machine has the message, with -EINVAL if they disagree. */
TALLY_API int tally_send(tally_comm *comm, const void *input, size_t count, enum tally_dtype dtype, int to,
                         uint32_t tag, const struct tally_options *options, tally_op **op);
TALLY_API int tally_recv(tally_comm *comm, void *output, size_t count, enum tally_dtype dtype, int from,
                         uint32_t tag, const struct tally_options *options, tally_op **op);

/* Wait for a message with this tag for which this rank has not called tally_recv().  tally_op_source() returns the
 * sender of the oldest one.  To receive from any rank, probe and then receive from that sender.  Only one probe for a
 * tag may be in flight, and no tally_recv() with that tag may come in between. */
TALLY_API int tally_probe(tally_comm *comm, uint32_t tag, const struct tally_options *options, tally_op **op);

/* Shared tensors, for asynchronous training: services keep parameters, to which each rank adds differences at its own pace.  No
 * rank waits for another, unless there is a bound.  Each addition is applied exactly once, also over connections that break.
 *
 * Create a shared tensor.  All ranks call it with the same name, count, type and staleness; rank 0's `values` count, and the
 * other ranks' are not read.  Types: float32, float64, int32, int64.  `staleness`: by how many additions a rank may be ahead of
 * the slowest, 1 to 255; 0: no bound.  Services keep the values until the communicator is closed, within TALLY_MEMORY; each rank
 * has two copies.  If a tallyd that keeps values leaves the job, dies, or gets another share, other services take them over.
 * Where one has no memory for that, operations of the tensor fail with -ENOMEM.  options->shape is compared; group and scale
 * factors are not allowed.  -EEXIST: it has been created; -EBUSY; -EINVAL.  The operation fails with -ENOMEM if a service is
 * short of memory. */
TALLY_API int tally_shared_create(tally_comm *comm, const char *name, const void *values, size_t count,
                                  enum tally_dtype dtype, uint32_t staleness,
                                  const struct tally_options *options, tally_op **op);

/* Add `difference` to a shared tensor and get the newest values, which have this addition and all that came to their service before
 * it.  NULL adds nothing and counts as an addition.  Values of different parts may be of different moments.  With a bound, the
 * addition is applied at once, and the operation ends when no rank that has not joined is too far behind.  A rank without more
 * input calls tally_join(); when all have joined, all count as level.  It cannot be cancelled.
 *   -EBUSY             this rank has an operation of the tensor in flight
 *   -ENOENT            it has not been created
 * The operation fails with -ESHUTDOWN if a rank has left without joining, and others would wait for it.  The difference of an
 * operation that fails may have been applied, to all parts or to some. */
TALLY_API int tally_shared_add(tally_comm *comm, const char *name, const void *difference,
                               const struct tally_options *options, tally_op **op);

/* Get the newest values of a shared tensor, and wait for no rank.  Otherwise as tally_shared_add(). */
TALLY_API int tally_shared_read(tally_comm *comm, const char *name, const struct tally_options *options,
                                tally_op **op);

/* The values that a finished operation of a shared tensor has brought, in the library's memory.  Nothing writes there until this
 * rank's next operation but one of that tensor is submitted.  tally_comm_close() frees them.  They must not be written to.
 * -EAGAIN: not finished, or failed; -EINVAL: not of a shared tensor. */
TALLY_API int tally_shared_values(const tally_op *op, const void **data);

/* Declare that this rank has no more input.  The operation ends when all ranks have declared it and everything that
 * they had submitted has ended.  tally_op_source() returns the rank that joined last.  The operation waits as long as
 * the others live.
 *
 * Until it ends this rank may submit only messages (else -EINVAL).  What it submitted before continues.  It takes no
 * part in what the others submit:
 *   - In push_pulls over all ranks, zeros stand for it, and the divisor of an average counts it.
 *   - Barriers over all ranks do not wait for it.
 *   - Any other operation of a group with this rank fails on the ranks that submit it; the error names this rank.
 * When all have joined, all ranks count names and unnamed calls anew, and may join again.  -ESHUTDOWN: a rank has left
 * the job instead of joining. */
TALLY_API int tally_join(tally_comm *comm, const struct tally_options *options, tally_op **op);

/* Refuse an operation that this rank was asked for and cannot submit.  The operation of `kind` (an enum tally_kind)
 * that the other ranks submit under `name` fails on all ranks with `reason`.  Only the options space and group are
 * used.  Not for messages.  -EEXIST: a shared tensor of that name has been created. */
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
    TALLY_PUSH_PULLV = 13,
    TALLY_SHARED_CREATE = 14,
    TALLY_SHARED_ADD = 15,
    TALLY_SHARED_READ = 16,
};

/* 1: ended, 0: not yet. */
TALLY_API int tally_op_poll(const tally_op *op);

/* Have tally_comm_next() announce the operation's end, as options.queued does from the start.  0: one event will come.
 * 1: the operation has ended already, and no event comes.  -EINVAL: asked for before; -ECHILD: in a forked child. */
TALLY_API int tally_op_watch(tally_op *op);

/* Cancel an operation.  It fails with -ECANCELED and `reason` on all ranks, also on those that submit it later, as if
 * this rank had refused it (tally_refuse).  Returns at once; the operation uses its memory until it ends, which it does
 * when its service has heard of the cancellation.  If all ranks have submitted the operation and its first part is
 * being summed, it ends as if nothing had happened.  An operation that has ended is not affected. -ENOMEM; -ECHILD: in
 * a forked child. */
TALLY_API int tally_op_cancel(tally_op *op, const char *reason);

/* Wait for the operation's end.  timeout_ms < 0 waits for ever; TALLY_TIMEOUT still ends the job.  0: success.
 *   -ETIMEDOUT         this wait ended; the operation goes on
 *   others             the operation failed:
 *     -EINVAL            the ranks disagree
 *     -ECANCELED         a rank has cancelled it
 *     -ECONNRESET        a rank is gone
 *     -ETIME             a rank was late for longer than TALLY_TIMEOUT
 *     -ESHUTDOWN         the communicator was closed
 *     -EIO               the result could not be copied to this rank's GPU; other ranks may have theirs
 *     -ENODEV            a rank's process cannot use its GPU any more, which ends the job; all ranks get this */
TALLY_API int tally_op_wait(tally_op *op, int timeout_ms);

/* The reason for an operation's failure, "" if it has not failed; lives as long as the handle. */
TALLY_API const char *tally_op_error(const tally_op *op);

/* The result of a finished allgather: `bytes` bytes at `data`, and one first dimension for each rank of its group.
 * Both live as long as the handle.  -EAGAIN: not finished; -EINVAL: not an allgather. */
TALLY_API int tally_op_gathered(const tally_op *op, const void **data, size_t *bytes,
                                const int64_t **first_dims);

/* For a finished tally_probe(): the sender of the message, as a place in the group.  For a finished tally_join(): the
 * rank that joined last.  -EAGAIN: not finished, or failed; -EINVAL: neither of these. */
TALLY_API int tally_op_source(const tally_op *op);

/* Free the handle.  An operation in flight goes on to its end.  NULL is accepted. */
TALLY_API void tally_op_free(tally_op *op);

#ifdef __cplusplus
}
#endif
#endif
