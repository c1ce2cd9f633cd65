/* traffic.h - what ranks see of their own traffic, as they tell the coordinator, and what that says of each card and each
 * service.  Encoding and sums; no I/O.
 *
 * Rates and backlogs are of the time in which operations were under way, at the rank that had them for the largest part of
 * its time: a rank that computes longer than the others has them for a shorter one, and its card is no slower for that.
 * Each period is of its rank's own clock; no two clocks are compared. */
#ifndef TLY_TRAFFIC_H
#define TLY_TRAFFIC_H

#include <stdbool.h>
#include <stdint.h>

#include "membership/roster.h"
#include "plan/late.h"
#include "plan/replan.h"
#include "wire/pack.h"

/* One direction of a connection in one period. */
struct tly_traffic_way {
    uint64_t bytes;
    uint32_t
        busy_us; /* something was on its way, or waited to be; TLY_TRAFFIC_UNKNOWN: neither figure is known */
};

/* A rank's connection to one service.  All 0 within a machine. */
struct tly_traffic_line {
    struct tly_traffic_way out, in; /* pushes; results */
    uint32_t held_us;               /* something pushed had not been taken off the connection */
};

/* One rank's period. */
struct tly_traffic {
    uint32_t epoch;
    uint32_t epochs;    /* that it still needs, this one among them */
    uint32_t period_us; /* how long it was, */
    uint32_t active_us; /* and for how long of it operations were under way; at most period_us */
    uint64_t moved;     /* bytes of parts that have landed, */
    uint64_t stale;     /* and of them those that an older epoch's split has dealt; at most `moved` */
    uint32_t count;     /* of services */
    struct tly_traffic_line *line; /* owned */
};
#define TLY_TRAFFIC_LONGEST_US 600000000u
/* A rank reports no more often, and only if it was active for so long.  A report of less than half is refused: its rates
 * could be any. */
#define TLY_TRAFFIC_EVERY_US 400000u
#define TLY_TRAFFIC_LEAST_US 100000u
#define TLY_TRAFFIC_UNKNOWN UINT32_MAX

void tly_traffic_write(struct tly_writer *w, const struct tly_traffic *t);
/* -EPROTO: it cannot be read, claims more than a network carries or a period has, or covers less time than any rank reports;
 * -ENOMEM.  *t untouched then. */
int tly_traffic_read(struct tly_reader *r, struct tly_traffic *t);
void tly_traffic_finish(struct tly_traffic *t);

void tly_steps_write(struct tly_writer *w, const struct tly_steps *s);
/* -EPROTO: it cannot be read, or cannot be; *s untouched then. */
int tly_steps_read(struct tly_reader *r, struct tly_steps *s);

/* What the ranks have seen in one period: `of` has an entry for each rank, with count 0 of those that have said nothing,
 * else the roster's.  Sets card and sums of out[], one for each service, and *goodput, bytes/s of a rank.  False: the
 * sample does not show what this split makes cards carry, for one of four reasons:
 *   - most parts that have landed were dealt by an older split;
 *   - no part has landed while all cards had backlogs: the network stood still;
 *   - no part has landed and a rank has said nothing: the others may wait for that rank;
 *   - a rank has said nothing, and all others had operations under way for less than a tenth of the time: that rank may have
 *     had some at other times. */
bool tly_traffic_sum(const struct tly_roster *r, const struct tly_traffic *const *of,
                     struct tly_replan_service *out, double *goodput);

#endif
