/* ladder.c - one rung: steps of many gradients through push_pull, in a rank that bench/ladder/ladder.py has started.
 *
 *   tally run --no-prefix -n 2 -- ladder MEMORY BYTES TENSORS SECONDS
 *
 * A step submits TENSORS tensors of BYTES / TENSORS bytes, float32, summed in place, and waits for all.  MEMORY:
 *   heap   as malloc gives it, off a page's beginning
 *   pages  page aligned, in huge pages where the kernel has them
 *   pool   from tally_alloc()
 * Rank 0 prints a JSON object: the median and the least time of a step, of the slowest rank by a barrier around it, and
 * how many elements of all ranks are not the exact sum after the last step. */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include <tally/tally.h>

enum { MOST_TENSORS = 1024, MOST_STEPS = 4096, HUGE_PAGE = 2 << 20, OFF_A_PAGE = 64, WARM_UP = 3 };

static tally_comm *comm;

static void check(int err, const char *what)
{
    if (err) {
        fprintf(stderr, "ladder: %s: %s\n", what, tally_error());
        exit(1);
    }
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static float *take_memory(const char *kind, size_t bytes)
{
    void *memory = NULL;
    if (strcmp(kind, "pool") == 0) {
        int (*alloc)(tally_comm *, size_t, void **) = NULL;
        *(void **)&alloc = dlsym(RTLD_DEFAULT, "tally_alloc");
        if (!alloc) {
            fprintf(stderr, "ladder: this library has no tally_alloc()\n");
            exit(2);
        }
        check(alloc(comm, bytes, &memory), "tally_alloc");
    } else if (strcmp(kind, "pages") == 0) {
        size_t room = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
        memory = aligned_alloc(HUGE_PAGE, room);
        if (memory)
            madvise(memory, room, MADV_HUGEPAGE);
    } else {
        char *block = malloc(bytes + 4096 + OFF_A_PAGE);
        if (block) {
            block += OFF_A_PAGE;
            if ((size_t)block % 4096 == 0)
                block += OFF_A_PAGE;
        }
        memory = block;
    }
    if (!memory)
        check(-1, "no memory");
    memset(memory, 0, bytes);
    return memory;
}

static void barrier(void)
{
    tally_op *op;
    check(tally_barrier(comm, NULL, NULL, &op), "barrier");
    check(tally_op_wait(op, -1), "barrier");
    tally_op_free(op);
}

static void step(float *gradients, size_t count, int tensors)
{
    static tally_op *ops[MOST_TENSORS];
    for (int i = 0; i < tensors; i++) {
        char name[32];
        struct tally_options o = {.size = sizeof o, .priority = i};
        snprintf(name, sizeof name, "gradient %d", i);
        float *at = gradients + (size_t)i * count;
        check(tally_push_pull(comm, name, at, at, count, TALLY_FLOAT32, TALLY_AVERAGE, &o, &ops[i]),
              "push_pull");
    }
    for (int i = 0; i < tensors; i++) {
        check(tally_op_wait(ops[i], -1), "push_pull");
        tally_op_free(ops[i]);
    }
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

int main(int argc, char **argv)
{
    static double seconds[MOST_STEPS];
    if (argc != 5) {
        fprintf(stderr,
                "usage: ladder heap|pages|pool BYTES TENSORS SECONDS   (bench/ladder/ladder.py does it)\n");
        return 2;
    }
    int tensors = atoi(argv[3]), steps = 0;
    size_t count = strtoull(argv[2], NULL, 10) / sizeof(float) / (size_t)(tensors > 0 ? tensors : 1);
    double patience = atof(argv[4]);
    if (tensors < 1 || tensors > MOST_TENSORS || count == 0)
        check(-1, "BYTES or TENSORS");
    check(tally_comm_open(NULL, &comm), "open");
    int rank = tally_comm_rank(comm), size = tally_comm_size(comm);
    float *gradients = take_memory(argv[1], (size_t)tensors * count * sizeof *gradients);
    size_t all = (size_t)tensors * count;
    for (size_t i = 0; i < all; i++)
        gradients[i] = (float)((int)(i % 1000) + rank);
    double end = 0, go_on = 1;
    for (int i = 0; go_on && steps < MOST_STEPS; i++) {
        barrier();
        double begin = now();
        step(gradients, count, tensors);
        barrier();
        if (i >= WARM_UP)
            seconds[steps++] = now() - begin;
        else
            end = now() + patience;
        float mine = rank == 0 && now() > end && steps > 4 ? 0 : 1,
              least = 0; /* rank 0's clock decides for all */
        tally_op *op;
        check(tally_push_pull(comm, "go on", &mine, &least, 1, TALLY_FLOAT32, TALLY_MIN, NULL, &op), "go on");
        check(tally_op_wait(op, -1), "go on");
        tally_op_free(op);
        go_on = least;
    }
    /* All ranks have had the same since the first step: the average of what they began with. */
    double wrong = 0, total = 0;
    for (size_t i = 0; i < all; i++)
        wrong += fabs((double)gradients[i] - ((double)(i % 1000) + (size - 1) / 2.0)) > 1e-3;
    tally_op *op;
    check(tally_push_pull(comm, "wrong", &wrong, &total, 1, TALLY_FLOAT64, TALLY_SUM, NULL, &op), "wrong");
    check(tally_op_wait(op, -1), "wrong");
    tally_op_free(op);
    qsort(seconds, (size_t)steps, sizeof *seconds, ascending);
    if (rank == 0)
        printf("{\"ranks\": %d, \"memory\": \"%s\", \"bytes\": %zu, \"tensors\": %d, \"steps\": %d, "
               "\"time_s\": %.6f, "
               "\"least_s\": %.6f, \"wrong\": %.0f, \"tally\": \"%s\"}\n",
               size, argv[1], all * sizeof *gradients, tensors, steps, seconds[steps / 2], seconds[0], total,
               tally_version());
    tally_comm_close(comm);
    return total != 0;
}
