/* events.h - the completion queue (events.c).
 *
 * Owner: its lock, unless a struct says otherwise. */
#ifndef TLY_COMM_EVENTS_H
#define TLY_COMM_EVENTS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/list.h"
#include "base/log.h"
#include "tally/tally.h"

/* What tally_comm_next() hands out.  The lock guards all of it but `diversion`. */
struct tly_completions {
    pthread_mutex_t lock;
    pthread_cond_t more;
    struct tly_list ended; /* operations */
    struct tly_list logs;
    uint32_t log_count;
    bool closed, watching, log_ended;
    struct tly_log_diversion diversion; /* of log lines, while they are watched; the log's lock */
    int waiting;                        /* threads inside tally_comm_next() */
};

/* An operation's place there.  Owner: any thread, but for `node`, which the lock guards. */
struct tly_completion {
    struct tly_list node;
    atomic_bool wanted, announced; /* its end is wanted there; and is there */
    void *tag;                     /* the caller's */
};

static inline void tly_completion_init(struct tly_completion *e, bool wanted, void *tag)
{
    tly_list_init(&e->node);
    atomic_init(&e->wanted, wanted);
    e->tag = tag;
}

static inline bool tly_completion_is_wanted(const struct tly_completion *e)
{
    return e->wanted;
}

void tly_events_init(tally_comm *c);
void tly_events_finish(tally_comm *c);
void tly_events_close(tally_comm *c);

#endif
