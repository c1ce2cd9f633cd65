/* every_operation.c - a rank that uses every operation of tally.h, from two threads, in an order of its own, and
 * checks each result.  Run by Meson under `tally run` in every build, so that the sanitizers see whole jobs.
 *
 * Values are small integers: exact in every type, whatever the order of the sum. */
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tally/tally.h>

/* A sanitizer looks at each element that the ranks write and check; LARGE is several parts in each type. */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { THREADS = 2, TENSORS = 24, STEPS = 2, LARGE = 150001 };
#else
enum { THREADS = 2, TENSORS = 24, STEPS = 4, LARGE = 600001 };
#endif

static tally_comm *comm;
static int rank, size;

#define require(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "rank %d, %s:%d: does not hold: %s (%s)\n", rank, __FILE__, __LINE__, \
                    #condition, tally_error()); \
            exit(1); \
        } \
    } while (0)

#define EACH_TYPE(X) \
    X(TALLY_FLOAT32, float) \
    X(TALLY_FLOAT64, double) \
    X(TALLY_INT8, int8_t) \
    X(TALLY_UINT8, uint8_t) \
    X(TALLY_INT16, int16_t) \
    X(TALLY_INT32, int32_t) \
    X(TALLY_INT64, int64_t)

static const enum tally_dtype types[] = {
#define TYPE(code, type) code,
    EACH_TYPE(TYPE)};

static void put(void *data, enum tally_dtype dtype, size_t i, int value)
{
    switch (dtype) {
#define PUT(code, type) \
    case code: \
        ((type *)data)[i] = (type)value; \
        break;
        EACH_TYPE(PUT)
    default:
        abort();
    }
}

static int get(const void *data, enum tally_dtype dtype, size_t i)
{
    switch (dtype) {
#define GET(code, type) \
    case code: \
        return (int)((const type *)data)[i];
        EACH_TYPE(GET)
    default:
        abort();
    }
}

struct tensor {
    char name[32];
    size_t count;
    enum tally_dtype dtype;
    enum tally_reduction reduction;
    bool in_place;
    void *input, *output;
    tally_op *op;
};

/* What rank r has in place i of tensor t at a step: 0..2. */
static int value(int r, int t, int step, size_t i)
{
    return (int)((i + (size_t)(r * 5 + t + step)) % 3);
}

static int expected(enum tally_reduction reduction, int t, int step, size_t i)
{
    int y = value(0, t, step, i);
    for (int r = 1; r < size; r++) {
        int x = value(r, t, step, i);
        switch (reduction) {
        case TALLY_MIN:
            y = x < y ? x : y;
            break;
        case TALLY_MAX:
            y = x > y ? x : y;
            break;
        case TALLY_PRODUCT:
            y *= x;
            break;
        default:
            y += x;
        }
    }
    return y;
}

static void submit(struct tensor *t, int number, int step)
{
    struct tally_options options = {.size = sizeof options, .priority = -number};
    for (size_t i = 0; i < t->count; i++)
        put(t->input, t->dtype, i, value(rank, number, step, i));
    require(tally_push_pull(comm, t->name, t->input, t->output, t->count, t->dtype, t->reduction, &options,
                            &t->op) == 0);
}

static void check(struct tensor *t, int number, int step)
{
    require(tally_op_wait(t->op, -1) == 0);
    require(tally_op_poll(t->op) == 1 && tally_op_error(t->op)[0] == '\0');
    for (size_t i = 0; i < t->count; i++)
        require(get(t->output, t->dtype, i) == expected(t->reduction, number, step, i));
    tally_op_free(t->op);
}

/* A thread's share of the tensors, step after step; each rank begins elsewhere in the list. */
static void *train(void *which)
{
    static const size_t counts[] = {0, 1, 7, 1000, 65537, LARGE};
    static const enum tally_reduction reductions[] = {TALLY_SUM, TALLY_MIN, TALLY_MAX, TALLY_PRODUCT};
    int thread = (int)(intptr_t)which;
    struct tensor tensors[TENSORS] = {0};
    for (int n = 0; n < TENSORS; n++) {
        struct tensor *t = &tensors[n];
        int number = thread * TENSORS + n;
        snprintf(t->name, sizeof t->name, "layer %d/weight", number);
        t->count = counts[n % 6];
        t->dtype = types[n % 7];
        t->reduction = reductions[n % 4];
        t->in_place = n % 3 == 0;
        t->input = calloc(t->count + 1, 8);
        t->output = t->in_place ? t->input : calloc(t->count + 1, 8);
        require(t->input && t->output);
    }
    for (int step = 0; step < STEPS; step++) {
        for (int i = 0; i < TENSORS; i++) {
            int n = (i * 5 + rank * 7) % TENSORS;
            submit(&tensors[n], thread * TENSORS + n, step);
        }
        for (int n = 0; n < TENSORS; n++)
            check(&tensors[n], thread * TENSORS + n, step);
    }
    for (int n = 0; n < TENSORS; n++) {
        if (!tensors[n].in_place)
            free(tensors[n].output);
        free(tensors[n].input);
    }
    return NULL;
}

static void run_threads(void)
{
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        require(pthread_create(&threads[i], NULL, train, (void *)(intptr_t)i) == 0);
    for (int i = 0; i < THREADS; i++)
        require(pthread_join(threads[i], NULL) == 0);
}

static void finish(tally_op *op)
{
    require(tally_op_wait(op, -1) == 0);
    tally_op_free(op);
}

/* Ends that are announced, each once. */
static void queue(void)
{
    enum { COUNT = 10 };
    int64_t x[COUNT];
    tally_op *ops[COUNT];
    bool seen[COUNT] = {false};
    struct tally_event event;
    for (int i = 0; i < COUNT; i++) {
        char name[32];
        snprintf(name, sizeof name, "queued %d", i);
        x[i] = i;
        struct tally_options options = {.size = sizeof options, .queued = 1, .tag = &x[i]};
        require(tally_push_pull(comm, name, &x[i], &x[i], 1, TALLY_INT64, TALLY_SUM, &options, &ops[i]) == 0);
    }
    for (int i = 0; i < COUNT; i++) {
        require(tally_comm_next(comm, -1, &event) == 0);
        require(event.kind == TALLY_EVENT_OP && event.status == 0);
        int64_t which = (int64_t *)event.tag - x;
        require(which >= 0 && which < COUNT && !seen[which] && event.op == ops[which]);
        require(x[which] == which * size);
        seen[which] = true;
        tally_op_free(event.op);
    }
    require(tally_comm_next(comm, 0, &event) == -ETIMEDOUT);
}

static void other_operations(void)
{
    tally_op *op;
    int32_t news[1000];
    for (int root = 0; root < size; root++) {
        for (int i = 0; i < 1000; i++)
            news[i] = rank * 1000 + i;
        require(tally_broadcast(comm, "news", news, 1000, TALLY_INT32, root, NULL, &op) == 0);
        finish(op);
        for (int i = 0; i < 1000; i++)
            require(news[i] == root * 1000 + i);
    }

    /* Rank r brings r elements, rank 0 none. */
    const int64_t *dims;
    const void *data;
    size_t bytes, at = 0;
    require(tally_allgather(comm, "who", news, (size_t)rank, TALLY_INT32, NULL, &op) == 0);
    require(tally_op_wait(op, -1) == 0);
    require(tally_op_gathered(op, &data, &bytes, &dims) == 0);
    for (int r = 0; r < size; r++) {
        require(dims[r] == r);
        for (int i = 0; i < r; i++)
            require(((const int32_t *)data)[at++] == (size - 1) * 1000 + i);
    }
    require(bytes == at * sizeof(int32_t));
    tally_op_free(op);

    require(tally_barrier(comm, "all here", NULL, &op) == 0);
    finish(op);
}

/* Ranks that disagree hear so, all of them, and go on. */
static void disagreement(void)
{
    tally_op *op;
    float x[8] = {0};
    if (size == 1)
        return;
    require(tally_push_pull(comm, "odd", x, x, rank == size - 1 ? 7 : 8, TALLY_FLOAT32, TALLY_SUM, NULL,
                            &op) == 0);
    require(tally_op_wait(op, -1) == -EINVAL);
    require(strstr(tally_op_error(op), "odd") != NULL);
    tally_op_free(op);
    require(tally_comm_status(comm, NULL) == 0);
    require(tally_push_pull(comm, "odd", x, x, 8, TALLY_FLOAT32, TALLY_SUM, NULL, &op) == 0);
    finish(op);
}

int main(void)
{
    char *report;
    /* Small parts: more of them, on more services. */
    require(tally_comm_open((const char *const[]){"TALLY_PART_BYTES=64K", "TALLY_FRAGMENT_BYTES=16K", NULL},
                            &comm) == 0);
    rank = tally_comm_rank(comm);
    size = tally_comm_size(comm);
    run_threads();
    queue();
    other_operations();
    disagreement();
    run_threads();
    require(tally_comm_report(comm, 60000, &report) == 0 && report[0] == '{');
    free(report);
    require(tally_comm_close(comm) == 0);
    return 0;
}
