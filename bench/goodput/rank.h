/* rank.h - what one rank of the benchmark goodput.py does whatever sums its tensors: reads the list, fills, times,
 * checks, prints.  goodput.c and goodput_mpi.c bring the barrier and the sum. */
#ifndef GOODPUT_RANK_H
#define GOODPUT_RANK_H

#include <stddef.h>

struct tensor {
    char name[120];
    size_t count; /* of float32 */
    float *data;
};

struct rank {
    int number, of; /* set before rank_run */
    int iterations, warm_up;
    size_t count; /* tensors, in the order in which backward makes them: the last is the most urgent */
    struct tensor *tensors;
    double *seconds, *cpu_seconds; /* of each iteration behind the warm-up */
    double busy, ticks;            /* the whole machine's processors meanwhile, in ticks of /proc/stat */
    size_t wrong;                  /* elements that differ from the exact sum */
};

/* From the arguments ITERATIONS WARM_UP LIST; LIST is a file of lines "COUNT NAME".  Exits where they are wrong. */
void rank_start(struct rank *r, int argc, char **argv);

/* All iterations.  `barrier` returns when all ranks have called it; `sum` replaces every tensor by the sum over
 * ranks. */
void rank_run(struct rank *r, void (*barrier)(void *user), void (*sum)(void *user, const struct rank *r),
              void *user);

/* Prints one JSON object with `report`, JSON itself or NULL, and frees everything.  The program's exit status. */
int rank_finish(struct rank *r, const char *report);

#endif
