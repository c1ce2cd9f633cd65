/* crowd.c - one rank of a job that has more ranks than cores: it computes, all-reduces and waits, again and again.
 *
 *   tally run -n N -- crowd MICROSECONDS BYTES SECONDS
 *
 * Each step computes for so many microseconds of its thread's processor time, then sums BYTES of float32 in the pool.  Rank 0
 * prints a JSON object for each of TURNS turns: microseconds of a step, and of processor time of this rank in it.  If a rank
 * that waits kept the core from one that computes, a step would take longer than N / cores times the computing. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include <tally/tally.h>

enum { TURNS = 5, BETWEEN = 20 }; /* steps between two questions whether time is up */

static tally_comm *comm;

static void check(int err, const char *what)
{
    if (err) {
        fprintf(stderr, "crowd: %s: %s\n", what, tally_error());
        exit(1);
    }
}

static double seconds(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void sum(const char *name, void *data, size_t count, enum tally_dtype dtype, enum tally_reduction how)
{
    tally_op *op;
    check(tally_push_pull(comm, name, data, data, count, dtype, how, NULL, &op), name);
    check(tally_op_wait(op, -1), name);
    tally_op_free(op);
}

static void compute(double rounds)
{
    volatile double x = 0;
    for (double i = 0; i < rounds; i++)
        x = x + i;
}

/* Rounds of the computing that take a microsecond: the most of any rank, so that all compute as much. */
static double rounds_of_a_microsecond(void)
{
    enum { ROUNDS = 10000000 };
    double begin = seconds(CLOCK_THREAD_CPUTIME_ID);
    compute(ROUNDS);
    double rate = ROUNDS / (seconds(CLOCK_THREAD_CPUTIME_ID) - begin) * 1e-6;
    sum("rate", &rate, 1, TALLY_FLOAT64, TALLY_MAX);
    return rate;
}

static void turn(double rounds, float *data, size_t bytes, double length)
{
    int64_t steps = 0, over = 0;
    double begin = seconds(CLOCK_MONOTONIC), used = seconds(CLOCK_PROCESS_CPUTIME_ID);
    while (!over) {
        for (int i = 0; i < BETWEEN; i++, steps++) {
            compute(rounds);
            sum("data", data, bytes / sizeof *data, TALLY_FLOAT32, TALLY_MAX);
        }
        over = seconds(CLOCK_MONOTONIC) - begin >= length;
        sum("over", &over, 1, TALLY_INT64, TALLY_MAX);
    }
    double took = seconds(CLOCK_MONOTONIC) - begin;
    used = seconds(CLOCK_PROCESS_CPUTIME_ID) - used;
    if (tally_comm_rank(comm) == 0)
        printf("{\"bench\": \"crowd\", \"ranks\": %d, \"bytes\": %zu, \"step_us\": %.2f, \"cpu_us\": %.2f}\n",
               tally_comm_size(comm), bytes, took / (double)steps * 1e6, used / (double)steps * 1e6);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    if (argc != 4) {
        fprintf(stderr, "usage: crowd MICROSECONDS BYTES SECONDS\n");
        return 1;
    }
    void *data;
    size_t bytes = (size_t)strtoull(argv[2], NULL, 10);
    check(tally_comm_open(NULL, &comm), "tally_comm_open");
    check(tally_alloc(comm, bytes, &data), "tally_alloc");
    memset(data, 0, bytes);
    double rounds = strtod(argv[1], NULL) * rounds_of_a_microsecond();
    for (int i = 0; i < TURNS; i++)
        turn(rounds, data, bytes, strtod(argv[3], NULL) / TURNS);
    check(tally_free(data), "tally_free");
    check(tally_comm_close(comm), "tally_comm_close");
    return 0;
}
