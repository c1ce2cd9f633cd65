/* cost.c - what tensors of a GPU cost beside tensors of the host: a job on a GPU that is not there (fake_cuda/).
 *
 *   build/bin/tally run --no-prefix -n 2 -k 0 --machines 2 -- build/meson/test/device/device_cost
 *
 * Three ways take turns, each begun by all ranks at a time, with 64 MB in pieces of 8 MB:
 *   host    push_pull of memory of the host
 *   copies  the pieces from the GPU to pinned memory, and then back
 *   gpu     push_pull of memory of the GPU
 * Rank 0 prints the medians in milliseconds, and by how many copies gpu is slower than host. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "tally/tally.h"
#include "test/device/application.h"

enum { BYTES = 64 << 20, PIECE = 8 << 20, PIECES = BYTES / PIECE, ROUNDS = 21 };
enum way { HOST, COPIES, GPU, WAYS };

static tally_comm *comm;
static void *stream;
static uint8_t *host, *device;

static void check(int ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "device_cost: %s: %s\n", what, tally_error());
    exit(1);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static void end(tally_op *op)
{
    check(tally_op_wait(op, -1) == 0, "wait");
    tally_op_free(op);
}

static void copy_all(const uint8_t *from, uint8_t *to)
{
    for (size_t at = 0; at < BYTES; at += PIECE)
        check(cuMemcpyAsync((uintptr_t)to + at, (uintptr_t)from + at, PIECE, stream) == 0, "copy");
    check(cuStreamSynchronize(stream) == 0, "copy");
}

static void push_pull_all(uint8_t *at, const struct tally_options *o)
{
    tally_op *op[PIECES];
    for (int i = 0; i < PIECES; i++) {
        char name[32];
        snprintf(name, sizeof name, "%s %d", o ? "gpu" : "host", i);
        uint8_t *piece = at + (size_t)i * PIECE;
        check(tally_push_pull(comm, name, piece, piece, PIECE / sizeof(float), TALLY_FLOAT32, TALLY_SUM, o,
                              &op[i]) == 0,
              name);
    }
    for (int i = 0; i < PIECES; i++)
        end(op[i]);
}

static double measure(enum way way)
{
    const struct tally_options o = {.size = sizeof o, .place = TALLY_PLACE_CUDA, .stream = stream};
    tally_op *op;
    check(tally_barrier(comm, "begin", NULL, &op) == 0, "barrier");
    end(op);
    double begin = now();
    if (way == COPIES) {
        copy_all(device, host);
        copy_all(host, device);
    } else {
        push_pull_all(way == HOST ? host : device, way == GPU ? &o : NULL);
    }
    return now() - begin;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(void)
{
    void *context;
    unsigned long long address;
    double time[WAYS][ROUNDS];
    setenv("FAKE_CUDA", "gpus=1 silent", 1);
    check(cuInit(0) == 0 && cuDevicePrimaryCtxRetain(&context, 0) == 0, "GPU");
    check(cuCtxPushCurrent_v2(context) == 0 && cuStreamCreate(&stream, 1) == 0, "stream");
    host = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(host != MAP_FAILED && cuMemHostRegister_v2(host, BYTES, 0) == 0, "memory");
    check(cuMemAlloc_v2(&address, BYTES) == 0, "memory");
    device = (uint8_t *)(uintptr_t)address;
    memset(host, 0, BYTES);
    check(tally_comm_open(NULL, &comm) == 0, "open");
    for (int i = -2; i < ROUNDS; i++) /* two to warm up */
        for (enum way way = 0; way < WAYS; way++)
            time[way][i < 0 ? 0 : i] = measure(way);
    for (enum way way = 0; way < WAYS; way++)
        qsort(time[way], ROUNDS, sizeof time[way][0], compare);
    double of_host = time[HOST][ROUNDS / 2], copies = time[COPIES][ROUNDS / 2], gpu = time[GPU][ROUNDS / 2];
    if (tally_comm_rank(comm) == 0)
        printf("host %.1f ms, copies %.1f ms, gpu %.1f ms: host + %.2f x copies\n", of_host, copies, gpu,
               (gpu - of_host) / copies);
    tally_comm_close(comm);
    return 0;
}
