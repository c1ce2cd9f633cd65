/* moves.c - one rank of the benchmark moves.py: collectives among the ranks of one machine by Tally, beside a loop that moves
 * the same bytes between the same processes.
 *
 *   tally run -n N -- moves FROM TO SECONDS ROUNDS
 *
 * Sizes are FROM, 4 x FROM … up to TO bytes of float32: of a reduction's input, of a broadcast, of an all-gather's result.
 * Ways take turns, ROUNDS times for SECONDS / ROUNDS each:
 *   kernel   the loop in ordinary memory: process_vm_readv
 *   heap     Tally, the same memory
 *   copy     the loop in memory that all processes map: memcpy
 *   pool     Tally, memory from tally_alloc()
 * In a loop each process that gets data copies them from the others, in blocks.  Of a reduction it adds each block to what it
 * has, while the cache has it.
 *
 * Each rank writes its input before each call, then all meet at a barrier.  A sample is the time from when the first rank
 * begins until the last has its result: where ranks outnumber cores, a turn that a rank waits for counts.  Before each turn
 * rank 0 measures how far two processors are from each other.  It prints a JSON object for each size, operation and way. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <tally/tally.h>

enum { MOST_RANKS = 64, MOST_SAMPLES = 4000, LEAST_SAMPLES = 3, PAGE = 2 << 20, BLOCK = 128 << 10 };

enum way { KERNEL, HEAP, COPY, POOL, WAYS };
static const char *const way_names[WAYS] = {"kernel", "heap", "copy", "pool"};

enum operation { ALL_GATHER, BROADCAST, REDUCE_SCATTER, REDUCE, OPERATIONS };
static const char *const operation_names[OPERATIONS] = {"all-gather", "broadcast", "reduce-scatter",
                                                        "reduce"};

struct series {
    double *samples; /* from the first rank's begin to the last one's end, in seconds */
    int count;
    long wrong;  /* elements, of all ranks */
    double ping; /* longest time of a cache line to another processor and back, in seconds */
};

static tally_comm *comm;
static int rank, size;
static float *in[WAYS], *out[WAYS];
static struct place {
    uint64_t pid, in;
} places[MOST_RANKS]; /* of the ordinary memory */
static float *shared; /* all ranks' inputs, TO bytes each */
static size_t room;   /* TO */

static void check(int err, const char *what)
{
    if (err) {
        fprintf(stderr, "moves: %s: %s\n", what, tally_error());
        exit(1);
    }
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void finish(tally_op *op, const char *name)
{
    check(tally_op_wait(op, -1), name);
    tally_op_free(op);
}

static void barrier(void)
{
    tally_op *op;
    check(tally_barrier(comm, NULL, NULL, &op), "barrier");
    finish(op, "barrier");
}

static void push_pull(const char *name, void *data, size_t count, enum tally_dtype dtype,
                      enum tally_reduction how)
{
    tally_op *op;
    check(tally_push_pull(comm, name, data, data, count, dtype, how, NULL, &op), name);
    finish(op, name);
}

/* --- the loops ------------------------------------------------------------------------------------ */

/* Bytes of another rank's input: to `to`, or in the shared memory where they are. */
static const void *read_block(enum way way, int from, size_t at, size_t n, void *to)
{
    if (way == COPY)
        return (const uint8_t *)shared + (size_t)from * room + at;
    struct iovec mine = {to, n}, theirs = {(void *)(uintptr_t)(places[from].in + at), n};
    if (process_vm_readv((pid_t)places[from].pid, &mine, 1, &theirs, 1, 0) != (ssize_t)n) {
        perror("moves: process_vm_readv");
        exit(1);
    }
    return to;
}

static void copy_range(enum way way, int from, size_t at, size_t bytes, float *to)
{
    for (size_t end = at + bytes, n; at < end; at += n, to += n / sizeof *to) {
        n = end - at < BLOCK ? end - at : BLOCK;
        const void *seen = read_block(way, from, at, n, to);
        if (seen != to)
            memcpy(to, seen, n);
    }
}

static void add(const float *a, const float *b, float *to, size_t count)
{
    for (size_t i = 0; i < count; i++)
        to[i] = a[i] + b[i];
}

/* This rank's input and all others' in a range. */
static void sum_range(enum way way, size_t at, size_t bytes, float *to)
{
    static float block[BLOCK / sizeof(float)];
    for (size_t end = at + bytes, n; at < end; at += n, to += n / sizeof *to) {
        const float *have = in[way] + at / sizeof *to;
        n = end - at < BLOCK ? end - at : BLOCK;
        for (int k = 1; k < size; k++, have = to)
            add(have, read_block(way, (rank + k) % size, at, n, block), to, n / sizeof *to);
    }
}

static void move(enum way way, enum operation what, size_t bytes)
{
    size_t piece = bytes / sizeof(float) / (size_t)size * sizeof(float);
    for (int k = 1; k < size; k++) {
        int from = (rank + k) % size;
        if (what == ALL_GATHER)
            copy_range(way, from, 0, piece, out[way] + (size_t)from * piece / sizeof(float));
        else if (what == BROADCAST && from == 0)
            copy_range(way, from, 0, bytes, out[way]);
    }
    if (what == ALL_GATHER)
        memcpy(out[way] + (size_t)rank * piece / sizeof(float), in[way], piece);
    else if (what == REDUCE_SCATTER)
        sum_range(way, (size_t)rank * piece, piece, out[way]);
    else if (what == REDUCE && rank == 0)
        sum_range(way, 0, bytes, out[way]);
}

/* --- Tally ---------------------------------------------------------------------------------------- */

static void call(enum way way, enum operation what, size_t bytes)
{
    const char *name = way_names[way];
    size_t count = bytes / sizeof(float), counts[MOST_RANKS];
    tally_op *op;
    for (int i = 0; i < size; i++)
        counts[i] = count / (size_t)size;
    if (what == ALL_GATHER)
        check(tally_allgather_into(comm, name, in[way], out[way], counts[0], TALLY_FLOAT32, NULL, &op), name);
    else if (what == BROADCAST)
        check(tally_broadcast(comm, name, rank ? out[way] : in[way], count, TALLY_FLOAT32, 0, NULL, &op),
              name);
    else if (what == REDUCE_SCATTER)
        check(tally_reduce_scatter(comm, name, in[way], out[way], counts, TALLY_FLOAT32, TALLY_SUM, NULL,
                                   &op),
              name);
    else
        check(tally_reduce(comm, name, in[way], out[way], count, TALLY_FLOAT32, TALLY_SUM, 0, NULL, &op),
              name);
    finish(op, name);
}

/* --- how far processors are ----------------------------------------------------------------------- */

enum { TRIPS = 1000 };

static _Alignas(128) atomic_int there;
static _Alignas(128) atomic_int back;

static void keep_on(int cpu)
{
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET((size_t)cpu, &one);
    sched_setaffinity(0, sizeof one, &one);
}

static void *answer(void *arg)
{
    keep_on(*(int *)arg);
    for (int i = 1; i <= TRIPS; i++) {
        while (atomic_load(&there) != i)
            ;
        atomic_store(&back, i);
    }
    return NULL;
}

/* How long a cache line takes to the second processor and back, in seconds.  0: there is one processor.  A hypervisor may move
 * them from time to time, within a socket or to another one, and everything that goes from cache to cache changes with it. */
static double ping(void)
{
    cpu_set_t all;
    pthread_t other;
    int cpus[2], found = 0;
    sched_getaffinity(0, sizeof all, &all);
    for (int cpu = 0; cpu < CPU_SETSIZE && found < 2; cpu++)
        if (CPU_ISSET((size_t)cpu, &all))
            cpus[found++] = cpu;
    if (found < 2)
        return 0;
    atomic_store(&there, 0);
    check(pthread_create(&other, NULL, answer, &cpus[1]), "no thread");
    keep_on(cpus[0]);
    double begin = 0;
    for (int i = 1; i <= TRIPS; i++) {
        begin = i == TRIPS / 2 ? now() : begin; /* the thread runs by now */
        atomic_store(&there, i);
        while (atomic_load(&back) != i)
            ;
    }
    double took = (now() - begin) / (TRIPS / 2 + 1);
    pthread_join(other, NULL);
    sched_setaffinity(0, sizeof all, &all);
    return took;
}

/* --- measured ------------------------------------------------------------------------------------- */

/* Small integers, so that any order of adding gives the same. */
static float value(int of, size_t i)
{
    return (float)(of + 1 + (int)(i % 7));
}

static void fill(float *data, size_t count)
{
    for (size_t i = 0; i < count; i++)
        data[i] = value(rank, i);
}

/* Elements of the result that are wrong. */
static int64_t count_wrong(enum way way, enum operation what, size_t count)
{
    size_t piece = count / (size_t)size, first = what == REDUCE_SCATTER ? (size_t)rank * piece : 0;
    size_t results = what == REDUCE_SCATTER ? piece : rank == 0 && what == REDUCE ? count : 0;
    int64_t wrong = 0;
    for (size_t i = 0; i < results; i++)
        wrong += out[way][i] != (float)(size * (size + 1) / 2 + size * (int)((first + i) % 7));
    for (size_t i = 0; what == ALL_GATHER && i < piece * (size_t)size; i++)
        wrong += out[way][i] != value((int)(i / piece), i % piece);
    for (size_t i = 0; what == BROADCAST && rank && i < count; i++)
        wrong += out[way][i] != value(0, i);
    return wrong;
}

struct span {
    double begin, end; /* of one call, by the clock that all processes of a machine share */
};

static struct span one(enum way way, enum operation what, size_t bytes)
{
    fill(in[way], bytes / sizeof(float) / (what == ALL_GATHER ? (size_t)size : 1));
    barrier();
    struct span mine = {.begin = now()};
    if (way == KERNEL || way == COPY)
        move(way, what, bytes);
    else
        call(way, what, bytes);
    mine.end = now();
    barrier();
    return mine;
}

static void try_one(enum way way, enum operation what, size_t bytes, struct series *s)
{
    memset(out[way], 0, bytes);
    one(way, what, bytes);
    int64_t wrong = count_wrong(way, what, bytes / sizeof(float));
    push_pull("wrong", &wrong, 1, TALLY_INT64, TALLY_SUM);
    s->wrong += wrong;
}

static void measure(enum way way, enum operation what, size_t bytes, double seconds, struct series *s)
{
    static double first[MOST_SAMPLES], last[MOST_SAMPLES];
    double far = rank == 0 ? ping() : 0;
    s->ping = far > s->ping ? far : s->ping;
    try_one(way, what, bytes, s);
    double begin = now();
    for (int i = 0; i < LEAST_SAMPLES; i++)
        one(way, what, bytes);
    int64_t samples = (int64_t)(seconds * LEAST_SAMPLES / (now() - begin));
    push_pull("agree", &samples, 1, TALLY_INT64, TALLY_MAX);
    samples = samples < LEAST_SAMPLES ? LEAST_SAMPLES : samples;
    samples = samples > MOST_SAMPLES - s->count ? MOST_SAMPLES - s->count : samples;
    for (int64_t i = 0; i < samples; i++) {
        struct span mine = one(way, what, bytes);
        first[i] = mine.begin;
        last[i] = mine.end;
    }
    push_pull("first", first, (size_t)samples, TALLY_FLOAT64, TALLY_MIN);
    push_pull("last", last, (size_t)samples, TALLY_FLOAT64, TALLY_MAX);
    for (int64_t i = 0; i < samples; i++)
        s->samples[s->count++] = last[i] - first[i];
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void compare(enum operation what, size_t bytes, double seconds, int rounds)
{
    struct series s[WAYS] = {0};
    for (int i = 0; i < WAYS; i++)
        check(!(s[i].samples = calloc(MOST_SAMPLES, sizeof(double))), "no memory");
    for (int round = 0; round < rounds; round++)
        for (int i = 0; i < WAYS; i++) {
            int way = (i + round) % WAYS;
            measure((enum way)way, what, bytes, seconds / rounds, &s[way]);
        }
    for (int i = 0; i < WAYS; i++) {
        qsort(s[i].samples, (size_t)s[i].count, sizeof(double), ascending);
        if (rank == 0)
            printf("{\"bench\": \"moves\", \"ranks\": %d, \"operation\": \"%s\", \"bytes\": %zu, \"way\": "
                   "\"%s\", "
                   "\"median_us\": %.3f, \"least_us\": %.3f, \"samples\": %d, \"wrong\": %ld, \"ping_ns\": "
                   "%.0f}\n",
                   size, operation_names[what], bytes, way_names[i], s[i].samples[s[i].count / 2] * 1e6,
                   s[i].samples[0] * 1e6, s[i].count, s[i].wrong, s[i].ping * 1e9);
        free(s[i].samples);
    }
    fflush(stdout);
}

/* --- memory --------------------------------------------------------------------------------------- */

static void *heap(size_t bytes)
{
    void *p = aligned_alloc(PAGE, (bytes + PAGE - 1) / PAGE * PAGE);
    check(!p, "no memory");
    memset(p, 0, bytes);
    return p;
}

static void *pool(size_t bytes)
{
    void *p;
    check(tally_alloc(comm, bytes, &p), "tally_alloc");
    return p;
}

/* One file of rank 0's, which all ranks map; it has no name. */
static float *map_shared(size_t bytes)
{
    uint64_t from[2] = {(uint64_t)getpid(), 0};
    char path[64];
    if (rank == 0)
        check((int)(from[1] = (uint64_t)memfd_create("moves", 0)) < 0 ||
                  ftruncate((int)from[1], (off_t)bytes) != 0,
              "no shared memory");
    tally_op *op;
    check(tally_broadcast(comm, "file", from, 2, TALLY_UINT64, 0, NULL, &op), "file");
    finish(op, "file");
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)from[0], (int)from[1]);
    FILE *file = fopen(path, "r+");
    check(!file, "rank 0's shared memory cannot be opened");
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0);
    check(p == MAP_FAILED, "no shared memory");
    fclose(file);
    return p;
}

static void take_memory(void)
{
    tally_op *op;
    in[KERNEL] = in[HEAP] = heap(room);
    out[KERNEL] = out[HEAP] = heap(room);
    in[POOL] = pool(room);
    out[POOL] = pool(room);
    shared = map_shared(room * (size_t)size);
    in[COPY] = (float *)((uint8_t *)shared + (size_t)rank * room);
    out[COPY] = out[POOL];
    prctl(PR_SET_PTRACER,
          PR_SET_PTRACER_ANY); /* where the kernel lets only parents read a process's memory */
    struct place own = {(uint64_t)getpid(), (uint64_t)(uintptr_t)in[KERNEL]};
    check(tally_allgather_into(comm, "places", &own, places, 2, TALLY_UINT64, NULL, &op), "places");
    finish(op, "places");
}

int main(int argc, char **argv)
{
    if (argc != 5) {
        fprintf(stderr, "usage: moves FROM TO SECONDS ROUNDS   (bench/local/moves.py does it)\n");
        return 1;
    }
    size_t from = (size_t)strtoull(argv[1], NULL, 10);
    room = (size_t)strtoull(argv[2], NULL, 10);
    double seconds = strtod(argv[3], NULL);
    int rounds = atoi(argv[4]);
    check(tally_comm_open(NULL, &comm), "tally_comm_open");
    rank = tally_comm_rank(comm);
    size = tally_comm_size(comm);
    check(size > MOST_RANKS, "at most 64 ranks");
    take_memory();
    for (int what = 0; what < OPERATIONS; what++)
        for (size_t bytes = from; bytes <= room; bytes *= 4)
            compare((enum operation)what, bytes, seconds, rounds);
    barrier();
    free(in[HEAP]);
    free(out[HEAP]);
    tally_free(in[POOL]);
    tally_free(out[POOL]);
    tally_comm_close(comm);
    return 0;
}
