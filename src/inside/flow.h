/* flow.h - a plan's bytes in virtual time: how long pieces take over the links of a machine (flow.c).
 *
 * GPUs go in the order of device/order.h.  A machine's only GPU stages whole operations, and copies as device/copies.h says.  There
 * a piece is a part that is summed.
 *
 * tly_inside_plan() forecasts that the busiest link never rests.  This says how near the pieces come to that: the first one has to
 * arrive, the last one has to leave, and pieces wait for each other. */
#ifndef TLY_INSIDE_FLOW_H
#define TLY_INSIDE_FLOW_H

#include "inside/inside.h"

struct tly_flow_job {
    uint64_t piece; /* bytes of a piece, at most */
    uint64_t
        operation; /* bytes of an operation of a machine's only GPU, at most; 0: there is one operation */
    double delay;  /* seconds before each step moves bytes */
    /* Steps of one kind that a GPU, or a card, has under way at the same time; 1 to TLY_FLOW_MOST.  A GPU takes those of a kind one
     * after the other, but for OUT, and a step's delay begins when that before it has ended.  An only GPU copies results as
     * device/copies.h says. */
    int most;
};

struct tly_flow {
    double seconds; /* until the last result is in place; links of unknown rate take none */
    uint64_t pieces;
};

/* Every GPU has all its gradients at the beginning.  0; -EINVAL: the plan's groups are not direct, or it copies by brute force;
 * -E2BIG: more than TLY_FLOW_PIECES; -ENOMEM. */
enum { TLY_FLOW_PIECES = 1 << 20, TLY_FLOW_MOST = 64 };
int tly_inside_flow(const struct tly_machine *m, const struct tly_inside *plan,
                    const struct tly_flow_job *job, struct tly_flow *out);

#endif
