/* report.h - the services' answers to tally_comm_report() (report.c).
 *
 * Owner: the loop. */
#ifndef TLY_COMM_REPORT_H
#define TLY_COMM_REPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/event.h"

struct tly_reports {
    uint32_t missing;
    struct tly_event *done; /* borrowed: of the thread that has asked; NULL: none has */
};

/* A service has answered, or will not.  answered: whether it has before. */
static inline void tly_report_came(struct tly_reports *r, bool *answered)
{
    if (*answered || !r->missing)
        return;
    *answered = true;
    if (--r->missing == 0 && r->done)
        tly_event_set(r->done);
}

/* All has failed: nobody waits any longer. */
static inline void tly_report_give_up(struct tly_reports *r)
{
    if (r->done)
        tly_event_set(r->done);
}

#endif
