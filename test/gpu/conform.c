/* conform.c - the bits of push_pull from a GPU are those of push_pull from the host, and what cannot be is refused.
 *
 *   gpu_conform BYTES             under `tally run`; the GPU copies so much before it writes a tensor
 *
 * Each tensor is written by the application's stream just before its push_pull, behind other work, and read by that stream
 * afterwards.  All tensors are in flight at once. */
#include <errno.h>

#include "test/gpu/program.h"

enum { STEPS = 3, LARGE = 32 << 20 };

static const struct kind {
    enum tally_dtype dtype;
    size_t count, size;
    enum tally_reduction op;
    double prescale, postscale;
} kinds[] = {
    {TALLY_FLOAT32, 6553601, 4, TALLY_SUM, 1, 1},    {TALLY_FLOAT32, 300001, 4, TALLY_AVERAGE, 0.3, 0.7},
    {TALLY_FLOAT64, 700001, 8, TALLY_AVERAGE, 1, 1}, {TALLY_FLOAT16, 200001, 2, TALLY_AVERAGE, 1, 1},
    {TALLY_FLOAT16, 4001, 2, TALLY_SUM, 0.3, 3},     {TALLY_BFLOAT16, 150001, 2, TALLY_SUM, 1, 1},
    {TALLY_INT8, 1001, 1, TALLY_SUM, 1, 1},          {TALLY_UINT8, 1001, 1, TALLY_AVERAGE, -1.5, 0.3},
    {TALLY_INT16, 300003, 2, TALLY_AVERAGE, 1, 1},   {TALLY_INT32, 17, 4, TALLY_SUM, 1, 1},
    {TALLY_UINT32, 70001, 4, TALLY_AVERAGE, 1, 1},   {TALLY_INT64, 200000, 8, TALLY_SUM, 1, 1},
    {TALLY_UINT64, 1000, 8, TALLY_AVERAGE, 1, 1},    {TALLY_COMPLEX64, 40000, 8, TALLY_SUM, 1, 0.5},
    {TALLY_FLOAT32, 4000, 4, TALLY_MAX, 1, 1},       {TALLY_FLOAT32, 1, 4, TALLY_SUM, 1, 1},
    {TALLY_FLOAT32, 0, 4, TALLY_SUM, 1, 1},
};
enum { KINDS = sizeof kinds / sizeof *kinds };

struct tensor {
    uint8_t *gpu, *host, *back;
    size_t bytes;
};

/* Any bits: numbers, NaNs, infinities and subnormals. */
static void fill(struct tensor *t, uint64_t seed)
{
    uint64_t x = seed * 0x9e3779b97f4a7c15 + 1;
    for (size_t at = 0; at < t->bytes; at++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        t->host[at] = (uint8_t)(x >> 24);
    }
}

static void name_of(char name[32], const char *place, int kind)
{
    snprintf(name, 32, "%s %d", place, kind);
}

static void push_pull(const char *place, int k, uint8_t *at, struct tally_options o, tally_op **op)
{
    char name[32];
    name_of(name, place, k);
    o.prescale = kinds[k].prescale;
    o.postscale = kinds[k].postscale;
    CHECK(tally_push_pull(comm, name, at, at, kinds[k].count, kinds[k].dtype, kinds[k].op, &o, op) == 0);
}

/* How many bytes differ. */
static size_t take_step(struct tensor *t, int step, uint8_t *busy, size_t busy_bytes)
{
    tally_op *op[KINDS], *same;
    size_t wrong = 0;
    for (int i = 0; i < KINDS; i++) {
        int k = (i + tally_comm_rank(comm)) % KINDS; /* ranks begin in different orders */
        fill(&t[k], (uint64_t)(1 + step) * 1000003 + (uint64_t)tally_comm_rank(comm) * 1009 + (uint64_t)k);
        copy(busy, busy + busy_bytes, busy_bytes, stream);
        if (t[k].bytes)
            copy(t[k].gpu, t[k].host, t[k].bytes, stream);
        push_pull("gpu", k, t[k].gpu, gpu_options(), &op[k]);
    }
    for (int k = 0; k < KINDS; k++) {
        end(op[k]);
        if (t[k].bytes)
            copy(t[k].back, t[k].gpu, t[k].bytes, stream);
        CHECK(cuStreamSynchronize(stream) == 0);
        push_pull("host", k, t[k].host, (struct tally_options){.size = sizeof(struct tally_options)}, &same);
        end(same);
        size_t differ = 0;
        for (size_t at = 0; at < t[k].bytes; at++)
            differ += t[k].back[at] != t[k].host[at];
        if (differ)
            fprintf(stderr, "step %d, tensor %d: %zu of %zu bytes differ from the host's\n", step, k, differ,
                    t[k].bytes);
        wrong += differ;
    }
    return wrong;
}

/* Refused with this piece of a sentence, and the name stays free. */
static void refuse(const void *in, void *out, struct tally_options o, const char *says)
{
    tally_op *op;
    CHECK(tally_push_pull(comm, "refused", in, out, 16, TALLY_FLOAT32, TALLY_SUM, &o, &op) == -EINVAL);
    CHECK(strstr(tally_error(), says));
}

static void refuse_what_cannot_be(void)
{
    struct tally_options o = gpu_options();
    uint8_t *x = on_gpu(LARGE), *host = pinned(PAGE);
    unsigned long long managed;
    void *graph;
    tally_op *op;
    refuse(host, host, o, "not a GPU's");
    refuse(x, host, o, "not a GPU's");
    CHECK(cuMemAllocManaged(&managed, PAGE, 1) == 0);
    refuse((void *)(uintptr_t)managed, x, o, "managed");
    CHECK(cuMemFree_v2(managed) == 0);
    CHECK(cuStreamBeginCapture_v2(stream, 1) == 0);
    refuse(x, x, o, "captured");
    CHECK(cuStreamEndCapture(stream, &graph) == 0); /* still whole */
    copy(x, host, 64, stream);
    CHECK(tally_push_pull(comm, "refused", x, x, 16, TALLY_FLOAT32, TALLY_SUM, &o, &op) == 0);
    end(op);
    CHECK(cuMemFree_v2((uintptr_t)x) == 0);
    refuse(x, x, o, "freed");
    CHECK(cuMemHostUnregister(host) == 0);
}

/* Another stream is captured while an operation is in flight: neither disturbs the other. */
static void capture_beside(void)
{
    enum { COUNT = 4 << 20 };
    struct tally_options o = gpu_options();
    uint8_t *x = on_gpu(COUNT * sizeof(float)), *host = pinned(COUNT * sizeof(float));
    void *other, *graph;
    tally_op *op;
    memset(host, 0, COUNT * sizeof(float));
    copy(x, host, COUNT * sizeof(float), stream);
    CHECK(cuStreamCreate(&other, 1) == 0 && cuStreamBeginCapture_v2(other, 0) == 0);
    CHECK(tally_push_pull(comm, "beside", x, x, COUNT, TALLY_FLOAT32, TALLY_SUM, &o, &op) == 0);
    end(op);
    CHECK(cuStreamEndCapture(other, &graph) == 0 && cuStreamDestroy_v2(other) == 0);
    CHECK(cuMemFree_v2((uintptr_t)x) == 0 && cuMemHostUnregister(host) == 0);
}

int main(int argc, char **argv)
{
    struct tensor t[KINDS];
    size_t wrong = 0, busy_bytes = argc == 2 ? strtoul(argv[1], NULL, 10) : 0;
    CHECK(busy_bytes);
    open_rank();
    uint8_t *busy = on_gpu(2 * busy_bytes);
    for (int k = 0; k < KINDS; k++) {
        size_t bytes = kinds[k].count * kinds[k].size, room = bytes ? bytes : PAGE;
        t[k] = (struct tensor){on_gpu(room), pinned(room), pinned(room), bytes};
    }
    for (int step = 0; step < STEPS; step++)
        wrong += take_step(t, step, busy, busy_bytes);
    refuse_what_cannot_be();
    capture_beside();
    barrier();
    CHECK(tally_comm_close(comm) == 0);
    return wrong ? 1 : 0;
}
