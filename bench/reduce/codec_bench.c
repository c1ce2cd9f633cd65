/* codec_bench.c - the codecs' kernels beside loops with the same loads and stores.
 *
 *   exponents   reads gradient and error
 *   encode      reads gradient and error, writes error and words
 *   decode      reads words, writes the result
 * `limit` is the fastest of loops that load and store the same bytes and do not compute: ordinary and non-temporal stores of what
 * is not read, each without prefetching and with it line by line.  All take turns on the same memory, round after round, and
 * the median counts.  One thread, its CPU time.  One JSON object a row.
 *
 *   bench_codec [--bytes N,..] [--rounds N] [--variant NAME]       bytes: of the gradient */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "reduce/codec.h"
#include "reduce/reduce.h"

#if defined __x86_64__
#include <immintrin.h>
#endif

enum { MOST_ROUNDS = 101, LINE = 64, BLOCK_BYTES = 4 * TALLY_CODEC_BLOCK, AHEAD = 2048 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Streams of a job: bytes for each block of the gradient's, 0 for none.  `both` is read and written. */
struct job {
    struct tly_codec codec;
    size_t count;
    float *gradient, *error, *result;
    unsigned char *words;
    uint8_t *exponents, *next;
    unsigned char *in, *both, *out;
    size_t in_step, both_step, out_step;
    bool changed; /* both is written, too */
};

static void run_exponents(const struct job *j)
{
    tly_codec_exponents(&j->codec, j->gradient, j->error, j->count, j->next);
}

static void run_encode(const struct job *j)
{
    tly_codec_encode(&j->codec, j->gradient, j->error, j->count, j->exponents, j->words, j->next);
}

static void run_decode(const struct job *j)
{
    tly_codec_decode(&j->codec, j->words, j->exponents, j->next, j->count, 8, j->result);
}

#if defined __x86_64__
#define READ_512(p) __asm__ volatile("vmovups (%0), %%zmm0" ::"r"(p) : "xmm0")
#define READ_256(p) \
    __asm__ volatile("vmovups (%0), %%ymm0\n\tvmovups 32(%0), %%ymm1" ::"r"(p) : "xmm0", "xmm1")
#define WRITE_512(p) \
    __asm__ volatile("vmovups %1, (%0)" ::"r"(p), "v"(_mm512_set1_epi32(0x3f800000)) : "memory")
#define WRITE_256(p) \
    __asm__ volatile("vmovups %1, (%0)\n\tvmovups %1, 32(%0)" ::"r"(p), "x"(_mm256_set1_epi32(0x3f800000)) \
                     : "memory")
#define STREAM_512(p) _mm512_stream_si512((__m512i *)(p), _mm512_set1_epi32(0x3f800000))
#define STREAM_256(p) \
    (_mm256_stream_si256((__m256i *)(p), _mm256_set1_epi32(0x3f800000)), \
     _mm256_stream_si256((__m256i *)((p) + 32), _mm256_set1_epi32(0x3f800000)))
#define LIMIT(bits, isa) \
    __attribute__((target(isa), always_inline)) static inline void pass_##bits(const struct job *j, \
                                                                               bool stream, bool ask) \
    { \
        const unsigned char *in = j->in, *both = j->both; \
        unsigned char *out = j->out; \
        for (size_t left = j->count / TALLY_CODEC_BLOCK; left; left--) { \
            const unsigned char *in_end = in + j->in_step, *both_end = both + j->both_step; \
            while (in < in_end || both < both_end) { \
                if (in < in_end) { \
                    if (ask) \
                        _mm_prefetch((const char *)in + AHEAD, _MM_HINT_T0); \
                    READ_##bits(in); \
                    in += LINE; \
                } \
                if (both < both_end) { \
                    if (ask) \
                        _mm_prefetch((const char *)both + AHEAD, _MM_HINT_T0); \
                    READ_##bits(both); \
                    if (j->changed) \
                        WRITE_##bits(both); \
                    both += LINE; \
                } \
            } \
            for (unsigned char *end = out + j->out_step; out + LINE <= end; out += LINE) { \
                if (stream) { \
                    STREAM_##bits(out); \
                } else { \
                    WRITE_##bits(out); \
                } \
            } \
        } \
        _mm_sfence(); \
    } \
    __attribute__((target(isa))) static void limit_##bits(const struct job *j, bool stream, bool ask) \
    { \
        if (stream && ask) \
            pass_##bits(j, true, true); \
        else if (stream) \
            pass_##bits(j, true, false); \
        else if (ask) \
            pass_##bits(j, false, true); \
        else \
            pass_##bits(j, false, false); \
    }
LIMIT(512, "avx512f")
LIMIT(256, "avx2")

static void limit(const struct job *j, bool stream, bool ask)
{
    if (__builtin_cpu_supports("avx512f"))
        limit_512(j, stream, ask);
    else
        limit_256(j, stream, ask);
}
#else
static void limit(const struct job *j, bool stream, bool ask)
{
    size_t blocks = j->count / TALLY_CODEC_BLOCK;
    for (size_t k = 0; k < blocks * j->in_step; k += 8)
        (void)*(const volatile uint64_t *)(j->in + k);
    for (size_t k = 0; k < blocks * j->both_step; k += 8) {
        (void)*(const volatile uint64_t *)(j->both + k);
        if (j->changed)
            *(volatile uint64_t *)(j->both + k) = 0;
    }
    for (size_t k = 0; k < blocks * j->out_step; k += 8)
        *(volatile uint64_t *)(j->out + k) = 0;
}
#endif

static void run_limit(const struct job *j)
{
    limit(j, false, false);
}

static void run_limit_ask(const struct job *j)
{
    limit(j, false, true);
}

static void run_limit_stream(const struct job *j)
{
    limit(j, true, false);
}

static void run_limit_both(const struct job *j)
{
    limit(j, true, true);
}

/* The kernel comes last: others pay for lines that a method left dirty in the caches. */
typedef void run_fn(const struct job *j);
static run_fn *const limits[] = {run_limit, run_limit_ask, run_limit_stream, run_limit_both};
enum { LIMITS = sizeof limits / sizeof *limits };

static double timed(run_fn *run, const struct job *j, int times)
{
    double start = now();
    for (int i = 0; i < times; i++)
        run(j);
    return (now() - start) / times;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void measure(const char *op, const char *name, run_fn *kernel, const struct job *j, int rounds)
{
    static double sample[LIMITS + 1][MOST_ROUNDS];
    double best = 1e9;
    for (int round = 0; round < rounds; round++)
        for (int m = 0; m <= LIMITS; m++) {
            run_fn *run = m < LIMITS ? limits[m] : kernel;
            double once = timed(run, j, 1);
            sample[m][round] = timed(run, j, once > 2e-3 ? 1 : (int)(2e-3 / once) + 1);
        }
    for (int m = 0; m <= LIMITS; m++) {
        qsort(sample[m], (size_t)rounds, sizeof **sample, ascending);
        if (m < LIMITS && sample[m][rounds / 2] < best)
            best = sample[m][rounds / 2];
    }
    double seconds = sample[LIMITS][rounds / 2];
    printf(
        "{\"bench\": \"codec\", \"method\": \"%s\", \"codec\": \"%s\", \"bytes\": %zu, \"variant\": \"%s\", "
        "\"seconds\": %.9f, \"gradient_GBps\": %.3f, \"fraction_of_limit\": %.4f}\n",
        op, name, j->count * 4, tly_reduce_variant(), seconds, (double)j->count * 4e-9 / seconds,
        best / seconds);
    fflush(stdout);
}

static void measure_size(size_t bytes, int rounds)
{
    static const struct {
        const char *name;
        enum tally_codec codec;
        uint32_t ranks;
        uint8_t exponent; /* 2 <= L * s < 4: what is left of values up to 1 stays below s */
    } codecs[] = {{"int8", TALLY_CODEC_INT8, 8, 127 - 2},
                  {"int4, 4 ranks", TALLY_CODEC_INT4, 4, 127 + 1},
                  {"int4, 8 ranks", TALLY_CODEC_INT4, 8, 127 + 1}};
    size_t unit = BLOCK_BYTES * 6, room = (4 * bytes + (8 << 20)) & ~(size_t)((2 << 20) - 1);
    struct job j = {.count = (bytes + unit - 1) / unit * unit / 4};
    unsigned char *arena = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (arena == MAP_FAILED)
        exit((perror("mmap"), 1));
    madvise(arena, room, MADV_HUGEPAGE);
    size_t stride = (4 * j.count + 4095) / 4096 * 4096, blocks = j.count / TALLY_CODEC_BLOCK;
    j.gradient = (float *)arena;
    j.error = (float *)(arena + stride);
    j.result = (float *)(arena + 2 * stride);
    j.words = arena + 3 * stride;
    j.exponents = malloc(blocks);
    j.next = calloc(blocks, 1);
    if (!j.exponents || !j.next)
        exit((perror("malloc"), 1));
    for (size_t i = 0; i < j.count; i++)
        j.gradient[i] = (float)(int32_t)((uint32_t)i * 2654435761u) * 0x1p-31f;
    for (int k = 0; k < 3; k++) {
        const char *why;
        if (tly_codec_find(codecs[k].codec, codecs[k].ranks, &j.codec, &why) != 0)
            exit((fprintf(stderr, "bench_codec: %s\n", why), 1));
        memset(j.exponents, codecs[k].exponent, blocks);
        size_t words = tly_codec_words(&j.codec, j.count) * tly_reduce_element_size(j.codec.dtype) / blocks;
        struct job encode = j, decode = j, exponents = j;
        encode.in = exponents.in = (unsigned char *)j.gradient;
        encode.both = exponents.both = (unsigned char *)j.error;
        encode.in_step = encode.both_step = exponents.in_step = exponents.both_step = BLOCK_BYTES;
        encode.changed = true;
        encode.out = decode.in = j.words;
        encode.out_step = decode.in_step = words;
        decode.both = j.words;
        decode.out = (unsigned char *)j.result;
        decode.out_step = BLOCK_BYTES;
        if (k == 0)
            measure("exponents", "any", run_exponents, &exponents, rounds);
        measure("encode", codecs[k].name, run_encode, &encode, rounds);
        measure("decode", codecs[k].name, run_decode, &decode, rounds);
    }
    free(j.exponents);
    free(j.next);
    munmap(arena, room);
}

int main(int argc, char **argv)
{
    char sizes[256] = "65536,1048576,16777216,67108864";
    int rounds = 9;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--bytes") == 0) {
            snprintf(sizes, sizeof sizes, "%s", argv[i + 1]);
        } else if (strcmp(argv[i], "--rounds") == 0) {
            rounds = atoi(argv[i + 1]);
        } else if (strcmp(argv[i], "--variant") != 0 || tly_reduce_choose(argv[i + 1]) != 0) {
            fprintf(stderr, "bench_codec: cannot do %s %s\n", argv[i], argv[i + 1]);
            return 2;
        }
    }
    rounds = rounds < 1 ? 1 : rounds > MOST_ROUNDS ? MOST_ROUNDS : rounds;
    for (char *save = NULL, *t = strtok_r(sizes, ",", &save); t; t = strtok_r(NULL, ",", &save))
        measure_size(strtoull(t, NULL, 0), rounds);
    return 0;
}
