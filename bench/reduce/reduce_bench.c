/* reduce_bench.c - what src/reduce/ reaches beside what memory allows and beside other ways to add.
 *
 * For each row of (type, inputs, bytes of an input, threads) it times, in turn and round after round so that
 * a disturbance meets all of them alike, and takes the median of:
 *   tally     tly_reduce()
 *   limit     a loop that reads the n streams and writes one, without arithmetic: the fastest of ordinary and
 *             non-temporal stores, each without prefetching, with it line by line, and by blocks as Tally does
 *   ordinary  the same loop with ordinary stores alone: the fastest of the three
 *   pairwise  the first input copied, each further one added to it as it arrives, as BytePS's server does,
 *             with the same kernels
 *   norms     of two inputs of float32: their sum, and the L1 norm of each 32,768 elements of it (tly_reduce_add_norms)
 *   mpi       as pairwise, with OpenMPI's MPI_Reduce_local (where libmpi is installed)
 * Threads split the elements evenly.  Prints one JSON object a row; reduce.py beside this file
 * makes the table.
 *
 *   bench_reduce [--types float32,..] [--inputs 2,4,..] [--bytes N,..] [--threads 1,..] [--rounds N]
 *                [--variant NAME] [--skew BYTES] [--most BYTES]
 * --skew: bytes by which each input starts later than a whole number of pages after the one before.
 * --most: rows whose inputs need more memory are left out. */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "reduce/reduce.h"

#if defined __x86_64__
#include <immintrin.h>
#endif

enum { MOST_INPUTS = 64, MOST_THREADS = 256, MOST_ROUNDS = 101 };

/* One thread's time is its own CPU time: what neighbours on a shared machine take from it does not count. */
static clockid_t clock_used = CLOCK_MONOTONIC;

static double now(void)
{
    struct timespec t;
    clock_gettime(clock_used, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* --- ways to add ------------------------------------------------------------------------------------- */

struct job {
    struct tly_reduction r;
    int n;
    const unsigned char *in[MOST_INPUTS];
    unsigned char *out;
    size_t bytes; /* of each; a multiple of 64 */
};

static void run_tally(const struct job *j)
{
    tly_reduce(&j->r, j->n, (const void *const *)j->in, j->out,
               j->bytes / tly_reduce_element_size(j->r.dtype));
}

static void run_pairwise(const struct job *j)
{
    memcpy(j->out, j->in[0], j->bytes);
    for (int i = 1; i < j->n; i++) {
        const void *pair[] = {j->out, j->in[i]};
        tly_reduce(&j->r, 2, pair, j->out, j->bytes / tly_reduce_element_size(j->r.dtype));
    }
}

static void run_norms(const struct job *j)
{
    enum { CHUNK = 32768, MOST_CHUNKS = 1 << 16 };
    static __thread float norms[MOST_CHUNKS];
    size_t count = j->bytes / sizeof(float);
    if (count / CHUNK >= MOST_CHUNKS)
        exit((fprintf(stderr, "bench_reduce: too large for norms: %zu bytes\n", j->bytes), 2));
    tly_reduce_add_norms((const float *)j->in[0], (const float *)j->in[1], (float *)j->out, count, CHUNK,
                         norms);
}

static int (*mpi_reduce_local)(const void *, void *, int, void *, void *);
static char mpi_version[256]; /* "Open MPI v4.1.4" */
static void *mpi_float, *mpi_double, *mpi_int, *mpi_sum;

static void *mpi_type(int dtype)
{
    return dtype == TALLY_FLOAT32   ? mpi_float
           : dtype == TALLY_FLOAT64 ? mpi_double
           : dtype == TALLY_INT32   ? mpi_int
                                    : NULL;
}

static void run_mpi(const struct job *j)
{
    memcpy(j->out, j->in[0], j->bytes);
    for (int i = 1; i < j->n; i++)
        mpi_reduce_local(j->in[i], j->out, (int)(j->bytes / tly_reduce_element_size(j->r.dtype)),
                         mpi_type(j->r.dtype), mpi_sum);
}

/* OpenMPI's names; other MPIs lack them and are left out. */
static void open_mpi(void)
{
    void *mpi = dlopen("libmpi.so.40", RTLD_NOW | RTLD_GLOBAL);
    int (*init)(int *, char ***);
    if (!mpi || !(init = (int (*)(int *, char ***))dlsym(mpi, "MPI_Init")))
        return;
    mpi_float = dlsym(mpi, "ompi_mpi_float");
    mpi_double = dlsym(mpi, "ompi_mpi_double");
    mpi_int = dlsym(mpi, "ompi_mpi_int");
    mpi_sum = dlsym(mpi, "ompi_mpi_op_sum");
    int (*version)(char *, int *) = (int (*)(char *, int *))dlsym(mpi, "MPI_Get_library_version");
    char text[4096] = ""; /* MPI_MAX_LIBRARY_VERSION_STRING is 256 there */
    int length;
    if (version && version(text, &length) == 0)
        snprintf(mpi_version, sizeof mpi_version, "%.*s", (int)strcspn(text, ",\""), text);
    if (mpi_float && mpi_double && mpi_int && mpi_sum && init(NULL, NULL) == 0)
        mpi_reduce_local = (int (*)(const void *, void *, int, void *, void *))dlsym(mpi, "MPI_Reduce_local");
}

/* The limit's loop: a cache line of each input, then one of the output; for the usual n without counters. */
enum ask { NOTHING, LINES, BLOCKS };

#if defined __x86_64__
enum { BLOCK = 512 };

/* As src/reduce/fold_vector.c asks for float32. */
static void ask_blocks(const struct job *j, size_t at)
{
    for (int i = 0; i < j->n; i++)
        for (uintptr_t p = (uintptr_t)(j->in[i] + at), end = p + BLOCK; p < end; p += 64)
            __asm__ volatile("prefetcht1 1536(%0)\n\tprefetcht0 1024(%0)" ::"r"(p));
}

#define READ_512(p) __asm__ volatile("vmovups (%0), %%zmm0" ::"r"(p) : "xmm0")
#define READ_256(p) \
    __asm__ volatile("vmovups (%0), %%ymm0\n\tvmovups 32(%0), %%ymm1" ::"r"(p) : "xmm0", "xmm1")
#define LIMIT(bits, isa) \
    __attribute__((target(isa), always_inline)) static inline void pass_##bits( \
        const struct job *j, const int n, bool stream, enum ask ask) \
    { \
        const unsigned char *in[MOST_INPUTS]; \
        memcpy(in, j->in, sizeof in); \
        __m256i zero = _mm256_setzero_si256(); \
        for (size_t at = 0; at < j->bytes; at += 64) { \
            if (ask == BLOCKS && at % BLOCK == 0) \
                ask_blocks(j, at); \
            _Pragma("GCC unroll 8") for (int i = 0; i < n; i++) \
            { \
                if (ask == LINES) \
                    _mm_prefetch((const char *)((uintptr_t)in[i] + at + 2048), _MM_HINT_T0); \
                READ_##bits(in[i] + at); \
            } \
            __m256i *out = (__m256i *)(j->out + at); \
            if (stream) { \
                _mm256_stream_si256(out, zero); \
                _mm256_stream_si256(out + 1, zero); \
            } else { \
                _mm256_store_si256(out, zero); \
                _mm256_store_si256(out + 1, zero); \
            } \
        } \
        _mm_sfence(); \
    } \
    __attribute__((target(isa))) static void limit_##bits(const struct job *j, bool stream, enum ask ask) \
    { \
        if (j->n == 2) \
            pass_##bits(j, 2, stream, ask); \
        else if (j->n == 4) \
            pass_##bits(j, 4, stream, ask); \
        else if (j->n == 8) \
            pass_##bits(j, 8, stream, ask); \
        else \
            pass_##bits(j, j->n, stream, ask); \
    }
LIMIT(512, "avx512f")
LIMIT(256, "avx2")

static void limit(const struct job *j, bool stream, enum ask ask)
{
    if (__builtin_cpu_supports("avx512f"))
        limit_512(j, stream, ask);
    else
        limit_256(j, stream, ask);
}
#else
static void limit(const struct job *j, bool stream, enum ask ask)
{
    for (size_t at = 0; at < j->bytes; at += 64) {
        for (int i = 0; i < j->n; i++)
            for (size_t k = 0; k < 64; k += 8)
                (void)*(const volatile uint64_t *)(j->in[i] + at + k);
        for (size_t k = 0; k < 64; k += 8)
            *(volatile uint64_t *)(j->out + at + k) = 0;
    }
}
#endif

#define RUN_LIMIT(stream, ask) \
    static void run_limit_##stream##_##ask(const struct job *j) \
    { \
        limit(j, stream, ask); \
    }
RUN_LIMIT(false, NOTHING)
RUN_LIMIT(false, LINES)
RUN_LIMIT(false, BLOCKS)
RUN_LIMIT(true, NOTHING)
RUN_LIMIT(true, LINES)
RUN_LIMIT(true, BLOCKS)

/* The limit is the fastest of its ways, `ordinary` the fastest of the first three.  Methods that leave a dirty output in the
 * caches come first, for the next one pays for it. */
enum {
    PAIRWISE,
    MPI,
    LIMIT_FIRST,
    ORDINARY,
    ORDINARY_LAST,
    LIMIT_LAST = LIMIT_FIRST + 5,
    NORMS,
    TALLY,
    METHODS
};

static const struct {
    const char *name;
    void (*run)(const struct job *);
} methods[METHODS] = {
    {"pairwise", run_pairwise},
    {"mpi", run_mpi},
    {"limit", run_limit_false_NOTHING},
    {"ordinary", run_limit_false_LINES},
    {"limit", run_limit_false_BLOCKS},
    {"limit", run_limit_true_NOTHING},
    {"limit", run_limit_true_LINES},
    {"limit", run_limit_true_BLOCKS},
    {"norms", run_norms},
    {"tally", run_tally},
};

static bool can_run(int m, const struct job *j)
{
    if (m == NORMS)
        return j->n == 2 && j->r.dtype == TALLY_FLOAT32;
    return m != MPI || (mpi_reduce_local && mpi_type(j->r.dtype));
}

/* --- threads ----------------------------------------------------------------------------------------- */

/* Worker k runs its share of the job whenever the barrier opens; the main thread is worker 0. */
static pthread_barrier_t barrier;
static struct job shares[MOST_THREADS];
static int method, repeats;
static bool stop;

static void pin(int k)
{
    cpu_set_t all, one;
    CPU_ZERO(&one);
    if (sched_getaffinity(0, sizeof all, &all) != 0)
        return;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &all) && k-- == 0) {
            CPU_SET(cpu, &one);
            pthread_setaffinity_np(pthread_self(), sizeof one, &one);
        }
}

static void run_share(int k)
{
    for (int i = 0; i < repeats; i++)
        methods[method].run(&shares[k]);
}

static void *work(void *argument)
{
    int k = (int)(intptr_t)argument;
    pin(k);
    for (;;) {
        pthread_barrier_wait(&barrier);
        if (stop)
            return NULL;
        run_share(k);
        pthread_barrier_wait(&barrier);
    }
}

static double timed(int m, int times)
{
    method = m;
    repeats = times;
    pthread_barrier_wait(&barrier);
    double start = now();
    run_share(0);
    pthread_barrier_wait(&barrier);
    return (now() - start) / times;
}

/* --- a row ------------------------------------------------------------------------------------------- */

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void measure(const struct job *whole, int threads, int rounds, double seconds[METHODS])
{
    pthread_t id[MOST_THREADS];
    static double sample[METHODS][MOST_ROUNDS];
    size_t share = whole->bytes / (size_t)threads / 64 * 64;

    stop = false;
    clock_used = threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
    pthread_barrier_init(&barrier, NULL, (unsigned)threads);
    for (int k = 0; k < threads; k++) {
        shares[k] = *whole;
        for (int i = 0; i < whole->n; i++)
            shares[k].in[i] += share * (size_t)k;
        shares[k].out += share * (size_t)k;
        shares[k].bytes = k == threads - 1 ? whole->bytes - share * (size_t)k : share;
        if (k > 0 && pthread_create(&id[k], NULL, work, (void *)(intptr_t)k) != 0)
            exit((perror("pthread_create"), 1));
    }
    for (int m = 0; m < METHODS; m++) {
        seconds[m] = 0;
        if (can_run(m, whole))
            timed(m, 1);
    }
    for (int round = 0; round < rounds; round++)
        for (int m = 0; m < METHODS; m++) {
            if (!can_run(m, whole))
                continue;
            /* The first run meets what the method before left: an output that is dirty in the caches delays
             * non-temporal stores. */
            double once = timed(m, 1);
            sample[m][round] = timed(m, once > 2e-3 ? 1 : (int)(2e-3 / once) + 1);
        }
    for (int m = 0; m < METHODS; m++) {
        if (!can_run(m, whole))
            continue;
        qsort(sample[m], (size_t)rounds, sizeof **sample, ascending);
        seconds[m] = sample[m][rounds / 2];
    }
    stop = true;
    pthread_barrier_wait(&barrier);
    for (int k = 1; k < threads; k++)
        pthread_join(id[k], NULL);
    pthread_barrier_destroy(&barrier);
}

static void print_row(const char *type, const struct job *j, int threads, const double seconds[METHODS])
{
    double input = (double)j->bytes * j->n;
    double best = seconds[LIMIT_FIRST];
    double ordinary = seconds[LIMIT_FIRST];
    for (int m = LIMIT_FIRST; m <= LIMIT_LAST; m++) {
        best = seconds[m] < best ? seconds[m] : best;
        ordinary = m <= ORDINARY_LAST && seconds[m] < ordinary ? seconds[m] : ordinary;
    }
    for (int m = 0; m < METHODS; m++) {
        if (seconds[m] == 0 || (m > ORDINARY && m <= LIMIT_LAST))
            continue;
        double s = m == LIMIT_FIRST ? best : m == ORDINARY ? ordinary : seconds[m];
        printf(
            "{\"bench\": \"reduce\", \"method\": \"%s\", \"dtype\": \"%s\", \"inputs\": %d, \"bytes\": %zu, "
            "\"threads\": %d, \"variant\": \"%s\", \"seconds\": %.9f, \"input_GBps\": %.3f, "
            "\"Gbitps_per_core\": %.2f, \"fraction_of_limit\": %.4f, \"tally_over_this\": %.3f}\n",
            methods[m].name, type, j->n, j->bytes, threads, m == MPI ? mpi_version : tly_reduce_variant(), s,
            input / s * 1e-9, input / s * 8e-9 / threads, best / s, s / seconds[TALLY]);
    }
    fflush(stdout);
}

/* Numbers whose sums stay ordinary: 1.5 and 0.75 by turns in any float type, small integers else. */
static void fill(int dtype, unsigned char *p, size_t bytes)
{
    size_t size = tly_reduce_element_size(dtype);
    for (size_t i = 0; i < bytes / size; i++) {
        float f = i % 2 ? 0.75f : 1.5f;
        double d = f;
        uint64_t bits = i % 5;
        if (dtype == TALLY_FLOAT16)
            bits = i % 2 ? 0x3a00 : 0x3e00;
        else if (dtype == TALLY_BFLOAT16)
            bits = i % 2 ? 0x3f40 : 0x3fc0;
        else if (dtype == TALLY_FLOAT32)
            memcpy(&bits, &f, 4);
        else if (dtype == TALLY_FLOAT64)
            memcpy(&bits, &d, 8);
        memcpy(p + i * size, &bits, size);
    }
}

static const char *const type_name[] = {"float32", "float64", "float16", "bfloat16", "int8",
                                        "uint8",   "int16",   "int32",   "int64"};

static int find_type(const char *name)
{
    for (int i = 0; i < (int)(sizeof type_name / sizeof *type_name); i++)
        if (!strcmp(name, type_name[i]))
            return i;
    fprintf(stderr, "bench_reduce: no type %s\n", name);
    exit(2);
}

static int parse_list(char *text, const char *item[], int most)
{
    int n = 0;
    for (char *save = NULL, *t = strtok_r(text, ",", &save); t && n < most; t = strtok_r(NULL, ",", &save))
        item[n++] = t;
    return n;
}

int main(int argc, char **argv)
{
    char types_text[256] = "float32,float16,bfloat16", inputs_text[256] = "2,4,8,16,32";
    char bytes_text[256] = "65536,1048576,16777216,268435456", threads_text[256] = "1";
    const char *types[16], *inputs[32], *sizes[32], *threads[32];
    size_t skew = 0, most = (size_t)9 << 30;
    int rounds = 9;

    for (int i = 1; i + 1 < argc; i += 2) {
        const char *value = argv[i + 1];
        if (!strcmp(argv[i], "--types"))
            snprintf(types_text, sizeof types_text, "%s", value);
        else if (!strcmp(argv[i], "--inputs"))
            snprintf(inputs_text, sizeof inputs_text, "%s", value);
        else if (!strcmp(argv[i], "--bytes"))
            snprintf(bytes_text, sizeof bytes_text, "%s", value);
        else if (!strcmp(argv[i], "--threads"))
            snprintf(threads_text, sizeof threads_text, "%s", value);
        else if (!strcmp(argv[i], "--rounds"))
            rounds = atoi(value);
        else if (!strcmp(argv[i], "--skew"))
            skew = strtoull(value, NULL, 0) / 64 * 64;
        else if (!strcmp(argv[i], "--most"))
            most = strtoull(value, NULL, 0);
        else if (strcmp(argv[i], "--variant") || tly_reduce_choose(value) != 0) {
            fprintf(stderr, "bench_reduce: cannot do %s %s\n", argv[i], value);
            return 2;
        }
    }
    rounds = rounds < 1 ? 1 : rounds > MOST_ROUNDS ? MOST_ROUNDS : rounds;
    int type_count = parse_list(types_text, types, 16), input_count = parse_list(inputs_text, inputs, 32);
    int size_count = parse_list(bytes_text, sizes, 32), thread_count = parse_list(threads_text, threads, 32);

    open_mpi();
    pin(0);
    for (int t = 0; t < type_count; t++)
        for (int s = 0; s < size_count; s++) {
            struct job j = {.r = {(uint8_t)find_type(types[t]), TALLY_SUM, 1, 1, 1}};
            j.bytes = strtoull(sizes[s], NULL, 0) / 64 * 64;
            size_t stride = (j.bytes + 4095) / 4096 * 4096 + skew;
            int widest = 0;
            for (int k = 0; k < input_count; k++) {
                int n = atoi(inputs[k]);
                if (n < 2 || n > MOST_INPUTS || n % 2) {
                    fprintf(stderr, "bench_reduce: inputs must be even, 2 to %d\n", MOST_INPUTS);
                    return 2;
                }
                if ((size_t)(n + 1) * stride <= most && n > widest)
                    widest = n;
            }
            if (widest == 0)
                continue;
            size_t room = ((size_t)(widest + 1) * stride + (2 << 20)) & ~(size_t)((2 << 20) - 1);
            unsigned char *arena =
                mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (arena == MAP_FAILED)
                exit((perror("mmap"), 1));
            madvise(arena, room, MADV_HUGEPAGE);
            for (int i = 0; i <= widest; i++)
                fill(j.r.dtype, arena + (size_t)i * stride, j.bytes);
            j.out = arena + (size_t)widest * stride;
            for (int i = 0; i < widest; i++)
                j.in[i] = arena + (size_t)i * stride;
            for (int k = 0; k < input_count; k++)
                for (int w = 0; w < thread_count; w++) {
                    double seconds[METHODS];
                    int workers = atoi(threads[w]);
                    j.n = atoi(inputs[k]);
                    if (j.n > widest || workers < 1 || workers > MOST_THREADS)
                        continue;
                    measure(&j, workers, rounds, seconds);
                    print_row(types[t], &j, workers, seconds);
                }
            munmap(arena, room);
        }
    return 0;
}
