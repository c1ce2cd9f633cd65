/* relay.h - what relay.c and bound.c share. */
#ifndef TLY_PLAN_RELAY_H
#define TLY_PLAN_RELAY_H

#include "plan/plan.h"

/* What machine i has of its card each way: machines behind one card have equal parts of it.  A card that is not known is as slow
 * as the slowest that is; 1 if none is. */
double tly_relay_bandwidth(int count, const struct tly_plan_machine *machine, int i);

#endif
