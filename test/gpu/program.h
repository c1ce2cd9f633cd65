/* program.h - what the programs of this folder share: a rank of `tally run`, its GPU, and memory on either side.
 *
 * Nothing here knows the tests' driver.  The programs find libcuda.so.1 as every program does. */
#ifndef GPU_PROGRAM_H
#define GPU_PROGRAM_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "tally/tally.h"
#include "test/device/application.h"

enum { PAGE = 4096 };

static tally_comm *comm;
static void *stream; /* the application's */

/* End the process if the condition does not hold; Tally's own sentence is the last one it has. */
#define CHECK(cond) \
    do { \
        if (!(cond)) { \
            fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #cond, tally_error()); \
            exit(1); \
        } \
    } while (0)

static inline double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* The rank's GPU is that of its number, around TEST_GPUS (1), and this thread is in its context from here on. */
static inline void open_rank(void)
{
    const char *gpus = getenv("TEST_GPUS"), *rank = getenv("RANK");
    int count = gpus ? atoi(gpus) : 1;
    void *context;
    CHECK(count > 0 && rank);
    CHECK(cuInit(0) == 0 && cuDevicePrimaryCtxRetain(&context, atoi(rank) % count) == 0);
    CHECK(cuCtxPushCurrent_v2(context) == 0 && cuStreamCreate(&stream, 1) == 0);
    CHECK(tally_comm_open(NULL, &comm) == 0);
}

/* Memory of the host that GPUs copy from and to. */
static inline uint8_t *pinned(size_t bytes)
{
    size_t room = (bytes + PAGE - 1) / PAGE * PAGE;
    void *at = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED && cuMemHostRegister_v2(at, room, 0) == 0);
    return at;
}

static inline uint8_t *on_gpu(size_t bytes)
{
    unsigned long long address;
    CHECK(cuMemAlloc_v2(&address, bytes) == 0);
    return (uint8_t *)(uintptr_t)address;
}

static inline void copy(void *to, const void *from, size_t bytes, void *in)
{
    CHECK(cuMemcpyAsync((uintptr_t)to, (uintptr_t)from, bytes, in) == 0);
}

static inline struct tally_options gpu_options(void)
{
    return (struct tally_options){.size = sizeof(struct tally_options),
                                  .place = TALLY_PLACE_CUDA,
                                  .stream = stream};
}

static inline void end(tally_op *op)
{
    if (tally_op_wait(op, -1) != 0) {
        fprintf(stderr, "%s\n", tally_op_error(op));
        exit(1);
    }
    tally_op_free(op);
}

static inline void barrier(void)
{
    tally_op *op;
    CHECK(tally_barrier(comm, "meet", NULL, &op) == 0);
    end(op);
}

#endif
