/* pace.h - how fast the job goes beside what the plan predicts (pace.c).  Owner: the loop. */
#ifndef TLY_COMM_PACE_H
#define TLY_COMM_PACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "plan/plan.h"
#include "tally/tally.h"

struct tally_op;

/* How fast the job goes.  Owner: the loop; the first two are fixed in an epoch. */
struct tly_pace {
    struct tly_plan_machine *machine; /* owned: of each service */
    double predicted;                 /* seconds for a byte of a large push_pull; 0: no telling */
    int64_t since;                    /* monotonic: the flight's begin */
    uint64_t flight;                  /* its bytes */
    bool counts;                      /* as far as it has come */
    uint64_t bytes;                   /* of all flights that count, and so on */
    int64_t ns;
    int pauses; /* flights in a row that took several times as long as usual */
};

int tly_pace_init(tally_comm *c); /* of each epoch, once its weights are known; -ENOMEM, sentence set */
void tly_pace_finish(tally_comm *c);
/* An operation has been put into comm->active, has been taken out. */
void tly_pace_enters(tally_comm *c, const struct tally_op *op);
void tly_pace_leaves(tally_comm *c, const struct tally_op *op);
/* Seconds for a byte of a large push_pull, as the plan has it; 0: no telling. */
static inline double tly_pace_predicted(const struct tly_pace *p)
{
    return p->predicted;
}

/* Seconds for a byte over the flights that count; 0: too few. */
double tly_pace_reached(const tally_comm *c);
/* "; at best ..." for the line at the start, "; large tensors at ..." for that at the end; or "". */
void tly_pace_foretell(const tally_comm *c, char *out, size_t len);
void tly_pace_sum_up(const tally_comm *c, char *out, size_t len);

#endif
