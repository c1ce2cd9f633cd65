/* events.h - the completion queue (events.c).
 *
 * Owner: its lock. */
#ifndef TLY_COMM_EVENTS_H
#define TLY_COMM_EVENTS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/list.h"
#include "tally/tally.h"

/* What tally_comm_next() hands out.  The lock guards all of it. */
struct tly_completions {
    pthread_mutex_t lock;
    pthread_cond_t more;
    struct tly_list ended; /* operations */
    struct tly_list logs;
    uint32_t log_count;
    bool closed, watching, log_ended;
    int waiting; /* threads inside tally_comm_next() */
};

void tly_events_init(tally_comm *c);
void tly_events_finish(tally_comm *c);
void tly_events_close(tally_comm *c);

#endif
