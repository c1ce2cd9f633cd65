/* part.c - the states of a part, and the only function that changes one.
 *
 *   IDLE ──ready──▶ QUEUED ──start──▶ ADMITTED ──all of it is out──▶ SENT ──result──▶ LANDED
 *                     ▲                                                │
 *                     └──────────────── asked for again ──◀────────────┤
 *                     │                                                ▼
 *                   SAID ◀──what has landed of it is said── DOUBTED ◀──its connection or service is gone
 *
 * A lost connection makes DOUBTED of whatever is in a queue or on its way; what the service has never heard of is queued
 * again.  A result that was owed before may land while the part is queued again.  That takes it out of the queue.  What
 * this rank only gives is DOUBTED again after it has LANDED, if its service dies before all ranks have the result.  The
 * end of the operation makes all IDLE.  A shared tensor's part that goes to another service is IDLE before it is QUEUED there.
 *
 * Debug and sanitizer builds assert each transition.
 *
 * Parts of a team that another rank carries are LANDED from the beginning (team_stage_cut).  Where all ranks share one machine, those
 * of an operation that has a stage go from IDLE to LANDED (op_turn_back in op.c). */
#include "comm/op/part.h"

#include "base/check.h"

#define BIT(state) (1u << (state))

/* The states that may follow each. */
static const unsigned follows[] = {
    [PART_IDLE] = BIT(PART_QUEUED) | BIT(PART_LANDED) | BIT(PART_IDLE),
    [PART_QUEUED] = BIT(PART_ADMITTED) | BIT(PART_LANDED) | BIT(PART_DOUBTED) | BIT(PART_IDLE),
    [PART_ADMITTED] =
        BIT(PART_SENT) | BIT(PART_QUEUED) | BIT(PART_LANDED) | BIT(PART_DOUBTED) | BIT(PART_IDLE),
    [PART_SENT] = BIT(PART_LANDED) | BIT(PART_QUEUED) | BIT(PART_DOUBTED) | BIT(PART_IDLE),
    [PART_DOUBTED] = BIT(PART_SAID) | BIT(PART_QUEUED) | BIT(PART_IDLE),
    [PART_SAID] = BIT(PART_LANDED) | BIT(PART_QUEUED) | BIT(PART_DOUBTED) | BIT(PART_IDLE),
    [PART_LANDED] = BIT(PART_DOUBTED) | BIT(PART_IDLE),
};

void tly_part_change(struct tly_part *p, enum tly_part_state to)
{
    tly_check(follows[p->state] & BIT(to));
    p->state = (uint8_t)to;
}
