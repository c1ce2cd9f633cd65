/* rank.h - what one rank of the benchmarks goodput.py and collectives.py does whatever moves its tensors: reads the list,
 * fills, times, checks, prints.  The programs bring the barrier and the operations. */
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
    double sent, received; /* bytes of this machine's cards meanwhile, and in the barriers around it */
    size_t wrong;          /* elements that differ from the exact sum */
};

/* From the arguments ITERATIONS WARM_UP LIST; LIST is a file of lines "COUNT NAME".  Exits where they are wrong. */
void rank_start(struct rank *r, int argc, char **argv);

struct rank_calls {
    void (*barrier)(void *user); /* returns when all ranks have called it */
    void (*work)(
        void *user,
        const struct rank *r); /* what is timed; by default every tensor becomes the sum over ranks */
    /* An operation other than a sum of all tensors: makes its inputs, and counts wrong elements.  NULL: sums. */
    void (*fill)(void *user, const struct rank *r, int iteration);
    size_t (*count_wrong)(void *user, const struct rank *r, int iteration);
};

/* All iterations. */
void rank_run(struct rank *r, const struct rank_calls *calls, void *user);

/* Small integers, so that sums are exact; others in each tensor and iteration, so that no result passes for another. */
float rank_input(int rank, size_t tensor, size_t i, int iteration);

/* Zeroed memory, or the end of the program. */
void *rank_allocate(size_t count, size_t size);

/* Prints one JSON object with `report`, JSON itself or NULL. */
void rank_print(const struct rank *r, const char *report);

/* The same, and frees everything.  The program's exit status. */
int rank_finish(struct rank *r, const char *report);

#endif
