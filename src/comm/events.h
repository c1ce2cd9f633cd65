/* events.h - the completion queue (events.c).  Its lock: events_lock. */
#ifndef TLY_COMM_EVENTS_H
#define TLY_COMM_EVENTS_H

#include "tally/tally.h"

void tly_events_init(tally_comm *c);
void tly_events_finish(tally_comm *c);
void tly_events_close(tally_comm *c);

#endif
