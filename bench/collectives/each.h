/* each.h - what one rank of the benchmark collectives.py does with each line of its list, whatever moves the data: buffers,
 * what belongs into them and what must come out.  collectives.c and collectives_mpi.c bring the operations. */
#ifndef EACH_H
#define EACH_H

#include "../goodput/rank.h"

enum each_kind { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL, REDUCE, EACH_KINDS };

/* One operation of `count` float32 in all; `piece` is a rank's.  The root is rank 0. */
struct each {
    enum each_kind kind;
    int rank, of;
    size_t count, piece;
    float *in, *out; /* the same for all-reduce and broadcast */
};

struct each_calls {
    void (*barrier)(void *user);
    void (*perform)(void *user, const struct each *e);
};

/* Runs all lines "COUNT OPERATION" of the list that rank_start() has read, and prints a JSON object for each.  Operations of
 * less than 32 MB are repeated more often than the others, up to eight times.  The program's exit status. */
int each_run(struct rank *r, const struct each_calls *calls, void *user, const char *report);

#endif
