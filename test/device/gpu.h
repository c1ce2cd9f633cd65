/* gpu.h - a rank's GPU and tensors on it, in jobs of tests.  A fake driver carries their copies out (fake_cuda/). */
#ifndef GPU_H
#define GPU_H

#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "tally/tally.h"
#include "test/device/application.h"
#include "test/device/fake_cuda.h"
#include "test/service/job.h"

enum { PAGE = 4096 };

struct gpu {
    int number;
    void *context, *stream;
};

static inline void open_gpu(struct gpu *g, int number, const char *words)
{
    setenv("FAKE_CUDA", words, 1);
    g->number = number;
    CHECK(cuInit(0) == 0 && cuDevicePrimaryCtxRetain(&g->context, number) == 0);
    CHECK(cuCtxPushCurrent_v2(g->context) == 0 && cuStreamCreate(&g->stream, 1) == 0);
}

static inline void close_gpu(struct gpu *g)
{
    CHECK(cuStreamDestroy_v2(g->stream) == 0 && cuCtxPopCurrent_v2(&g->context) == 0);
    CHECK(cuDevicePrimaryCtxRelease_v2(g->number) == 0);
    CHECK(fake_cuda_left() == 0);
}

/* A tensor on the GPU, whose numbers the application's stream brings there some time. */
struct tensor {
    uint8_t *device, *host;
    size_t bytes, room;
};

static inline void make(struct tensor *t, size_t bytes)
{
    unsigned long long device;
    t->bytes = bytes;
    t->room = (bytes + PAGE) / PAGE * PAGE;
    t->host = mmap(NULL, t->room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(t->host != MAP_FAILED && cuMemHostRegister_v2(t->host, t->room, 0) == 0);
    CHECK(cuMemAlloc_v2(&device, t->room) == 0);
    t->device = (uint8_t *)(uintptr_t)device;
}

static inline void unmake(struct tensor *t)
{
    CHECK(cuMemHostUnregister(t->host) == 0 && cuMemFree_v2((uintptr_t)t->device) == 0);
    munmap(t->host, t->room);
}

static inline void upload(const struct gpu *g, const struct tensor *t)
{
    if (t->bytes)
        CHECK(cuMemcpyAsync((uintptr_t)t->device, (uintptr_t)t->host, t->bytes, g->stream) == 0);
}

static inline struct tally_options on_gpu(const struct gpu *g)
{
    return (struct tally_options){.size = sizeof(struct tally_options),
                                  .place = TALLY_PLACE_CUDA,
                                  .stream = g->stream};
}

#endif
