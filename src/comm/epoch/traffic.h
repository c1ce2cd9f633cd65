/* traffic.h - what is told to the coordinator of this rank's traffic (traffic.c).  Owner: the loop. */
#ifndef TLY_COMM_TRAFFIC_H
#define TLY_COMM_TRAFFIC_H

#include <stdbool.h>
#include <stdint.h>

#include "base/stalls.h"
#include "membership/member.h"
#include "tally/tally.h"
#include "transport/transport.h"

struct tly_part;
struct tly_peer;
struct tally_op;

/* What is told to the coordinator.  Owner: the loop; times are monotonic. */
struct tly_own_traffic {
    uint32_t open;                    /* operations under way that go by the plan */
    uint64_t active_us, active_since; /* for how long there were some in all; 0: none is */
    uint64_t moved, stale;            /* bytes of parts that have landed, and of them those of older epochs */
    uint64_t active_seen, active_before, moved_seen, moved_before, stale_seen,
        stale_before;             /* at the last glances */
    uint64_t seen_at, before_at;  /* when these were, us */
    int64_t looked_at, asked_at;  /* asked_at: services' answers are awaited; 0: not */
    int64_t quiet_at;             /* when it last looked whether there is no traffic, */
    uint64_t active_before_quiet; /* and `active` then */
    bool is_blind;                /* some kernel does not say how busy connections are: it was said */
    bool begun;                   /* there are two glances of this epoch */
    uint64_t submitted,
        over;     /* us: the newest operation; the end of the last flight, 0: of one that does not count */
    bool patient; /* the flight has an operation whose rank minds no wait */
    struct tly_steps steps; /* since the coordinator was told last, */
    int64_t told_at;
    struct tly_stalls stalls; /* and what was read then */
};

/* One reading of a connection's counters; each counts since the connection was opened. */
struct tly_glance {
    struct tly_link_load out; /* pushes */
    uint64_t received;        /* bytes that have come over the connection: results */
    uint64_t
        sending_us; /* for which the service had some on their way, as it says; UINT64_MAX: it does not know */
    uint64_t held_us; /* something was handed over and not accepted */
};

/* The last two readings of a connection's counters.  Owner: the loop. */
struct tly_glances {
    struct tly_glance seen, before; /* the last and the one before */
    bool any, answered;             /* `seen` is one, and has the service's answer; */
    bool comparable;                /* so has `before`, on the same connection */
    uint64_t held_us, held_since;   /* monotonic, us; 0: nothing is in flight there */
};

/* The connection is no more. */
static inline void tly_glances_end(struct tly_glances *g)
{
    g->any = false;
}

/* Another epoch holds: what is seen from now on is compared with nothing before. */
void tly_traffic_begin(tally_comm *c);
/* An operation has been put into comm->active; has been taken out. */
void tly_traffic_enters(tally_comm *c, const struct tally_op *op);
void tly_traffic_leaves(tally_comm *c, const struct tally_op *op);
/* A part has landed. */
void tly_traffic_landed(tally_comm *c, const struct tly_part *p);
/* Something is in flight to this service; something is so no longer. */
void tly_traffic_admitted(struct tly_peer *p);
void tly_traffic_accepted(struct tly_peer *p);
/* The service says for how long it has had results for us on their way; UINT64_MAX: its kernel does not tell. */
void tly_traffic_answered(struct tly_peer *p, uint64_t sending_us);
void tly_traffic_tick(tally_comm *c);

#endif
