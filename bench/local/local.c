/* local.c - one rank of the benchmark local.py in C: all-reduces among the ranks of one machine, by Tally and, where the
 * build has found it, by OpenMPI in the same processes.
 *
 *   mpirun -n N local FROM TO SECONDS ROUNDS [GROUP]     (without OpenMPI: tally run -n N -- local …)
 *
 * Sizes are FROM, 4 x FROM … up to TO bytes of float32.  Ways take turns, ROUNDS times for SECONDS / ROUNDS each:
 *   mpi    MPI_Allreduce, ordinary memory, in place
 *   heap   tally_push_pull, the same memory, in place
 *   pool   tally_push_pull, memory from tally_alloc(), in place
 * each in two modes:
 *   hot       calls follow each other on the same buffer: a sample is a batch of calls by its length
 *   refilled  each rank writes its buffer before each call, then all meet at a barrier: a sample is one call
 * GROUP: the first so many ranks are a group, which does all of it but `mpi`; the others wait.  A sample is the slowest rank's.  Rank 0 prints a JSON object for each size, mode and way. */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <tally/tally.h>

#ifdef HAVE_MPI
#include <mpi.h>
#endif

enum { MOST_SAMPLES = 20000, MOST_BATCH = 1000, BATCH_US = 200, LEAST_SAMPLES = 3, PAGE = 2 << 20 };

enum way { MPI, HEAP, POOL, WAYS };
static const char *const names[WAYS] = {"mpi", "heap", "pool"};

struct series {
    double *samples; /* of the slowest rank, in seconds a call */
    int count;
    long wrong; /* elements, of all ranks */
};

static tally_comm *comm;
static int rank, size;
static struct tally_options in_group = {.size = sizeof in_group}; /* all ranks, or those of GROUP */

static void check(int err, const char *what)
{
    if (err) {
        fprintf(stderr, "local: %s: %s\n", what, tally_error());
        exit(1);
    }
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void push_pull(const char *name, void *data, size_t count, enum tally_dtype dtype,
                      enum tally_reduction how)
{
    tally_op *op;
    check(tally_push_pull(comm, name, data, data, count, dtype, how, &in_group, &op), name);
    check(tally_op_wait(op, -1), name);
    tally_op_free(op);
}

static void call(enum way way, float *data, size_t count)
{
#ifdef HAVE_MPI
    if (way == MPI) {
        MPI_Allreduce(MPI_IN_PLACE, data, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        return;
    }
#endif
    push_pull(way == HEAP ? "heap" : "pool", data, count, TALLY_FLOAT32, TALLY_SUM);
}

/* The way's own: another's would leave its threads and caches in another state. */
static void barrier(enum way way)
{
    tally_op *op;
#ifdef HAVE_MPI
    if (way == MPI) {
        MPI_Barrier(MPI_COMM_WORLD);
        return;
    }
#endif
    check(tally_barrier(comm, NULL, &in_group, &op), "barrier");
    check(tally_op_wait(op, -1), "barrier");
    tally_op_free(op);
}

/* Small integers, so that any order of adding gives the same. */
static void fill(float *data, size_t count, int value)
{
    for (size_t i = 0; i < count; i++)
        data[i] = (float)(value + (int)(i % 7));
}

static long count_wrong(const float *data, size_t count)
{
    long wrong = 0;
    for (size_t i = 0; i < count; i++)
        wrong += data[i] != (float)(size * (size + 1) / 2 + size * (int)(i % 7));
    return wrong;
}

static void try_one(enum way way, float *data, size_t count, struct series *s)
{
    fill(data, count, rank + 1);
    call(way, data, count);
    int64_t wrong = count_wrong(data, count);
    push_pull("wrong", &wrong, 1, TALLY_INT64, TALLY_SUM);
    s->wrong += wrong;
}

/* How many samples, by rank 0: all must do as many. */
static int agree(int64_t n)
{
    push_pull("agree", &n, 1, TALLY_INT64, TALLY_MAX);
    return (int)n;
}

static void measure(enum way way, bool hot, float *data, size_t count, double seconds, struct series *s)
{
    static double mine[MOST_SAMPLES];
    try_one(way, data, count, s);
    memset(data, 0, count * sizeof *data); /* the sums of zeros stay what they are */
    barrier(way);
    double begin = now();
    for (int i = 0; i < LEAST_SAMPLES; i++)
        call(way, data, count);
    double each = (now() - begin) / LEAST_SAMPLES;
    int batch = hot ? agree((int64_t)(BATCH_US * 1e-6 / each)) : 1;
    batch = batch < 1 ? 1 : batch > MOST_BATCH ? MOST_BATCH : batch;
    /* Refilling and the barrier take about as long again. */
    int samples = agree((int64_t)(seconds / (each * batch * (hot ? 1 : 2) + 2e-6)));
    samples = samples < LEAST_SAMPLES ? LEAST_SAMPLES : samples;
    samples = samples > MOST_SAMPLES - s->count ? MOST_SAMPLES - s->count : samples;
    for (int i = 0; i < samples; i++) {
        if (!hot)
            fill(data, count, rank + 1);
        if (!hot || i == 0)
            barrier(way);
        begin = now();
        for (int j = 0; j < batch; j++)
            call(way, data, count);
        mine[i] = (now() - begin) / batch;
        if (!hot)
            barrier(way); /* or who shares a core refills while the other is still in the call */
    }
    push_pull("slowest", mine, (size_t)samples, TALLY_FLOAT64, TALLY_MAX);
    memcpy(s->samples + s->count, mine, (size_t)samples * sizeof *mine);
    s->count += samples;
    try_one(way, data, count, s);
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void print(const struct series *s, enum way way, bool hot, size_t bytes)
{
    qsort(s->samples, (size_t)s->count, sizeof *s->samples, ascending);
    if (rank == 0)
        printf("{\"bench\": \"local\", \"language\": \"C\", \"ranks\": %d, \"bytes\": %zu, \"mode\": \"%s\", "
               "\"way\": \"%s\", \"median_us\": %.3f, \"least_us\": %.3f, \"samples\": %d, \"wrong\": %ld}\n",
               size, bytes, hot ? "hot" : "refilled", names[way], s->samples[s->count / 2] * 1e6,
               s->samples[0] * 1e6, s->count, s->wrong);
}

static void compare(size_t bytes, bool hot, float *data[WAYS], double seconds, int rounds)
{
    struct series s[WAYS] = {0};
    for (int i = 0; i < WAYS; i++)
        if (data[i] && !(s[i].samples = calloc(MOST_SAMPLES, sizeof(double))))
            exit(1);
    for (int round = 0; round < rounds; round++)
        for (int i = 0; i < WAYS; i++) {
            int way = (i + round) % WAYS;
            if (data[way])
                measure((enum way)way, hot, data[way], bytes / sizeof(float), seconds / rounds, &s[way]);
        }
    for (int i = 0; i < WAYS; i++) {
        if (data[i])
            print(&s[i], (enum way)i, hot, bytes);
        free(s[i].samples);
    }
    fflush(stdout);
}

/* The first ranks alone: false, if this rank is none of them. */
static bool make_group(int count)
{
    int *ranks = calloc((size_t)count, sizeof *ranks);
    check(!ranks, "no memory");
    for (int i = 0; i < count; i++)
        ranks[i] = i;
    size = count;
    if (rank < count)
        check(tally_group_create(comm, "first", ranks, (size_t)count, &in_group.group), "tally_group_create");
    free(ranks);
    return rank < count;
}

int main(int argc, char **argv)
{
    if (argc != 5 && argc != 6) {
        fprintf(stderr, "usage: local FROM TO SECONDS ROUNDS [GROUP]   (bench/local/local.py does it)\n");
        return 1;
    }
    size_t from = (size_t)strtoull(argv[1], NULL, 10), to = (size_t)strtoull(argv[2], NULL, 10);
    double seconds = strtod(argv[3], NULL);
    int rounds = atoi(argv[4]);
    float *data[WAYS] = {0};
    void *pool;
#ifdef HAVE_MPI
    MPI_Init(&argc, &argv);
#endif
    check(tally_comm_open(NULL, &comm), "tally_comm_open");
    rank = tally_comm_rank(comm);
    size = tally_comm_size(comm);
    data[HEAP] = aligned_alloc(PAGE, (to + PAGE - 1) / PAGE * PAGE);
    check(!data[HEAP], "no memory");
    check(tally_alloc(comm, to, &pool), "tally_alloc");
    data[POOL] = pool;
#ifdef HAVE_MPI
    data[MPI] = data[HEAP];
#endif
    bool takes_part = argc == 5 || make_group(atoi(argv[5]));
    if (argc == 6)
        data[MPI] = NULL;
    for (size_t bytes = from; bytes <= to && takes_part; bytes *= 4)
        for (int hot = 1; hot >= 0; hot--)
            compare(bytes, hot, data, seconds, rounds);
    in_group.group = NULL;
    barrier(HEAP); /* of all ranks */
    free(data[HEAP]);
    tally_free(pool);
    tally_comm_close(comm);
#ifdef HAVE_MPI
    MPI_Finalize();
#endif
    return 0;
}
