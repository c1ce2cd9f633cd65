/* fake.h - what the files of the fake driver share.  It stands in for libcuda.so.1, in an order that is as bad as CUDA allows.
 *
 *   calls.c     how each call begins and ends: the lock, the settings and the faults
 *   contexts.c  the GPUs, which of them this process sees, and their contexts
 *   memory.c    memory of the GPUs, and of the host that is registered
 *   ipc.c       memory of GPUs that another process has
 *   streams.c   streams, their work and events
 *   kernels.c   modules and kernels
 *
 * Streams: work is carried out when something waits for it, and no earlier: cuEventSynchronize or
 * cuStreamSynchronize.  Only what it depends on is carried out.  So a copy reads its source as late as
 * possible, and what comes from the wrong stream is missing.  A test can hold a stream, as a long kernel would.
 *
 * Memory: an address of a GPU cannot be read by the host.  It has noise when it is allocated, when a result is on its way to
 * it, and after it is freed.  It lies in a memfd, so that other processes map it.  Copies want registered memory of the host,
 * which CUDA only likes better.  Kernels use that by addresses of its own, as on GPUs that do not know the host's.
 *
 * FAKE_CUDA is a list of words:
 *   gpus=N                 how many; CUDA_VISIBLE_DEVICES hides and orders them as in CUDA
 *   peers=A:B              these GPUs read each other's memory
 *   pci=A:ADDRESS          where GPU A is on the PCI bus
 *   pinned=BYTES           how much of the host's memory can be registered
 *   unshared               memory that processes share cannot
 *   silent                 no noise where a copy is on its way to, which takes time
 *   fail=CALL:CODE[:N[:M]] M calls (1) of this name, or "copy-to-GPU", fail from the N-th on (1); -9: kills the process
 *   count=FILE             bytes moved, a uint64_t [FAKE_PLACES][FAKE_PLACES] of all processes (fake_cuda.h)
 *
 * What CUDA leaves undefined ends the process with a sentence.  One lock guards everything; copies and functions that a stream
 * calls run without it, and meanwhile their stream is busy. */
#ifndef FAKE_H
#define FAKE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "device/sums.h"
#include "test/device/fake_cuda.h"

#define EXPORT __attribute__((visibility("default")))

enum { FAKE_GPUS = FAKE_PLACES - 1, FAKE_NOISE = 0xab };
enum {
    KILLED = -9,
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    ALREADY_MAPPED = 208,
    PEERS_UNSUPPORTED = 217,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURED = 906,
};

/* --- what there is ------------------------------------------------------------------------------------------ */

enum fake_kind { HOST, OWN, MAPPED, MANAGED };

struct fake_memory {
    struct fake_memory *next;
    enum fake_kind kind;
    int gpu;
    uint8_t *address, *data; /* the application's; ours */
    uint8_t *reached;        /* HOST: the kernels' */
    size_t bytes;
    bool mapped;    /* HOST: kernels may use it */
    int fd, serial; /* OWN */
    pid_t pid;      /* MAPPED: whose it is, with its serial */
};

struct fake_range {
    const uint8_t *at; /* the application's address */
    size_t bytes;
};

struct fake_stream {
    struct fake_stream *next;
    int gpu;
    bool blocking; /* it waits for the default stream */
    bool gone, capturing, held, busy;
    uint64_t given, done; /* works */
    struct fake_work *first, **last;
};

struct fake_work {
    struct fake_work *next;
    enum { COPY, SUM, WAIT, CALL } what;
    struct fake_range in[TLY_FOLD_MAX], out;
    int inputs;
    void (*kernel)(struct tly_sums);
    struct tly_sums sums;
    void (*function)(void *);
    void *argument;
    struct fake_stream *other; /* WAIT for so many works of it */
    uint64_t until;
};

struct fake_event {
    struct fake_event *next;
    struct fake_stream *stream; /* NULL: not recorded */
    uint64_t until;
    int gpu;
};

struct fake_gpu {
    int retained, number;
    struct fake_stream by_default;
    bool peers[FAKE_GPUS];
    char address[24]; /* on the PCI bus; "": some */
};

/* --- calls.c ------------------------------------------------------------------------------------------------ */

extern pthread_mutex_t fake_lock;
extern struct fake_settings {
    int present; /* GPUs */
    bool unshared, silent;
    size_t pinned;
} fake_set;
extern int fake_fatal;                      /* the code of the failure after which nothing works, or 0 */
extern uint64_t (*fake_moved)[FAKE_PLACES]; /* bytes, from and to */

/* End the process with a sentence. */
void fake_die(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
/* What a call of this name returns this time, beside what it does. */
int fake_fault(const char *call);
/* Every call begins with this.  OK: the lock is held, until fake_leave(), which returns its code. */
int fake_enter(const char *call, bool in_context);
int fake_leave(int code);

#define ENTER(call, in_context) \
    do { \
        int code = fake_enter(call, in_context); \
        if (code) \
            return code; \
    } while (0)

/* --- contexts.c --------------------------------------------------------------------------------------------- */

extern struct fake_gpu fake_gpus[FAKE_GPUS];

/* This process sees the GPUs that are present, or those of CUDA_VISIBLE_DEVICES. */
void fake_show_gpus(void);
/* A GPU's number in this process; -2: it is hidden. */
int fake_ordinal(int gpu);
/* Is this thread in a context, and in which GPU's? */
bool fake_in_context(void);
struct fake_gpu *fake_gpu(void);
/* Has this thread said that its calls are no part of a graph? */
bool fake_is_relaxed(void);
int fake_contexts_left(void);
void fake_forget_contexts(void);

/* --- memory.c ----------------------------------------------------------------------------------------------- */

/* The memory in which these bytes are, or NULL. */
struct fake_memory *fake_find(const void *at, size_t bytes);
/* An allocation of another process, which this one maps by its serial number. */
struct fake_memory *fake_find_mapped(pid_t pid, int serial);
/* Where the bytes of an address are, or NULL. */
uint8_t *fake_data_of(const void *at);
/* 0: the host; 1 + i: GPU i. */
int fake_place_of(const void *at);
/* Can a GPU copy from and to this memory? */
bool fake_reaches(int gpu, struct fake_range r);
/* Can its kernels use this address?  Then it becomes the application's. */
bool fake_reaches_by_kernel(int gpu, struct fake_range *r);
struct fake_memory *fake_add(enum fake_kind kind, int gpu, size_t bytes);
/* Map it by its memfd: the bytes, and the application's address, where nothing can be read. */
void fake_show(struct fake_memory *m, int fd);
/* The name of its memfd. */
void fake_memory_name(char name[64], pid_t pid, int serial);
/* Give back what begins there.  error: nothing of such a kind does. */
int fake_drop_at(const void *at, bool (*of)(enum fake_kind), int error);
int fake_memory_left(void);
void fake_forget_memory(void);

/* --- streams.c ---------------------------------------------------------------------------------------------- */

extern pthread_cond_t fake_changed; /* a stream is busy or held no longer */

struct fake_stream *fake_stream_of(void *handle);
void fake_begin_stream(struct fake_stream *s, int gpu);
/* Append work to a stream. */
void fake_give(struct fake_stream *s, struct fake_work w);
/* Does work that has not been carried out read or write there? */
bool fake_is_pending(struct fake_range r);
bool fake_any_captures(void);
int fake_streams_left(void);
void fake_forget_streams(void);

/* --- kernels.c ---------------------------------------------------------------------------------------------- */

int fake_kernels_left(void);
void fake_forget_kernels(void);

#endif
