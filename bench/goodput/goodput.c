/* goodput.c - one rank of the benchmark goodput.py: sums a list of tensors again and again and times it.
 *
 *   goodput ITERATIONS WARM_UP COUNT...
 *
 * Each COUNT is a tensor's number of float32.  An iteration starts behind a barrier and submits all tensors, the
 * first most urgent, as backward would; it ends when the last sum has come.  Prints one JSON object: seconds and
 * seconds of this process's CPU of each iteration behind the warm-up, elements that were wrong, and the report of
 * the communicator (rank 0). */
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>

#include <tally/tally.h>

static void check(int err)
{
    if (err < 0) {
        fprintf(stderr, "%s\n", tally_error());
        exit(1);
    }
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double cpu_seconds(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

struct tensor {
    char name[24];
    size_t count;
    float *data;
};

/* Integers, so that the sum is exact, and others in each iteration. */
static float input(int rank, size_t i, int iteration)
{
    return (float)(rank + 1 + (int)(i % 11) + iteration % 5);
}

static void fill(const struct tensor *t, int rank, int iteration)
{
    for (size_t i = 0; i < t->count; i++)
        t->data[i] = input(rank, i, iteration);
}

static size_t count_wrong(const struct tensor *t, int size, int iteration)
{
    size_t wrong = 0;
    float ranks = (float)(size * (size - 1)) / 2;
    for (size_t i = 0; i < t->count; i++)
        wrong += t->data[i] != ranks + (float)size * input(0, i, iteration);
    return wrong;
}

/* All ranks are here. */
static void barrier(tally_comm *comm)
{
    tally_op *op;
    check(tally_barrier(comm, "start", NULL, &op));
    check(tally_op_wait(op, -1));
    tally_op_free(op);
}

static void sum_all(tally_comm *comm, const struct tensor *tensors, int count, tally_op **ops)
{
    for (int i = 0; i < count; i++) {
        struct tally_options o = {.size = sizeof o, .priority = count - i};
        const struct tensor *t = &tensors[i];
        check(tally_push_pull(comm, t->name, t->data, t->data, t->count, TALLY_FLOAT32, TALLY_SUM, &o,
                              &ops[i]));
    }
    for (int i = 0; i < count; i++) {
        check(tally_op_wait(ops[i], -1));
        tally_op_free(ops[i]);
    }
}

/* So that the whole list is split over the services as planned. */
static void plan(tally_comm *comm, const struct tensor *tensors, size_t count)
{
    const char **names = calloc(count, sizeof *names);
    uint64_t *bytes = calloc(count, sizeof *bytes);
    if (!names || !bytes)
        exit(1);
    for (size_t i = 0; i < count; i++) {
        names[i] = tensors[i].name;
        bytes[i] = tensors[i].count * sizeof(float);
    }
    check(tally_plan(comm, 0, count, names, bytes));
    free(names);
    free(bytes);
}

int main(int argc, char **argv)
{
    if (argc < 4) {
        fprintf(stderr, "usage: goodput ITERATIONS WARM_UP COUNT...\n");
        return 2;
    }
    int iterations = atoi(argv[1]), warm_up = atoi(argv[2]), count = argc - 3;
    struct tensor *tensors = calloc((size_t)count, sizeof *tensors);
    tally_op **ops = calloc((size_t)count, sizeof *ops);
    double *times = calloc(2 * (size_t)(iterations + 1), sizeof *times);
    if (!tensors || !ops || !times)
        return 1;
    for (int i = 0; i < count; i++) {
        struct tensor *t = &tensors[i];
        t->count = strtoull(argv[3 + i], NULL, 10);
        snprintf(t->name, sizeof t->name, "tensor.%d", i);
        if (!(t->data = malloc(t->count * sizeof *t->data)))
            return 1;
    }

    tally_comm *comm;
    check(tally_comm_open(NULL, &comm));
    int rank = tally_comm_rank(comm), size = tally_comm_size(comm);
    plan(comm, tensors, (size_t)count);
    size_t wrong = 0;
    for (int it = -warm_up; it < iterations; it++) {
        for (int i = 0; i < count; i++)
            fill(&tensors[i], rank, it + warm_up);
        barrier(comm);
        double begin = seconds(), cpu = cpu_seconds();
        sum_all(comm, tensors, count, ops);
        if (it >= 0) {
            times[2 * it] = seconds() - begin;
            times[2 * it + 1] = cpu_seconds() - cpu;
        }
        barrier(comm); /* who is done early must not take the cores from the others by looking */
        for (int i = 0; i < count; i++)
            wrong += count_wrong(&tensors[i], size, it + warm_up);
    }
    char *report = NULL;
    if (rank == 0)
        check(tally_comm_report(comm, 10000, &report));
    check(tally_comm_close(comm));

    printf("{\"rank\": %d, \"wrong\": %zu, \"report\": %s", rank, wrong, report ? report : "null");
    for (int column = 0; column < 2; column++) {
        printf(", \"%s\": [", column ? "cpu_seconds" : "seconds");
        for (int it = 0; it < iterations; it++)
            printf("%s%.6f", it ? ", " : "", times[2 * it + column]);
        printf("]");
    }
    printf("}\n");
    free(report);
    for (int i = 0; i < count; i++)
        free(tensors[i].data);
    free(tensors);
    free(ops);
    free(times);
    return wrong != 0;
}
