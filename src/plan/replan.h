/* replan.h - what network cards and services carry, found from the job's own traffic, and when another split pays.
 *
 * A sample is what all ranks have seen in one period.  The caller gives one after the other; nothing here knows the time.
 * A gauge (estimate.c) makes an estimate of the samples of one card, or of one service's sums.  A replanner has a gauge
 * for each, makes candidates of the estimates (candidates.c), and decides which of them hold and whether the split changes
 * (replan.c).  Pure functions, no I/O. */
#ifndef TLY_REPLAN_H
#define TLY_REPLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "plan/plan.h"

/* --- one card, or one service's sums (estimate.c) ----------------------------------------------------- */

enum { TLY_GAUGE_SHORT = 5, TLY_GAUGE_LONG = 24 }; /* samples: for large deviations, and for small ones */

#define TLY_GAUGE_FAR .25 /* a deviation that counts in few samples already */

/* What one sample says of a card or a service. */
struct tly_sight {
    double rate; /* bytes/s while operations were under way; a card's: in the direction that carries more */
    double
        busy; /* fraction of that time in which it was backlogged, 0 to 1; a card's: in its busier direction */
    double both; /* the same, the mean of a card's two directions */
    double
        late; /* of a card that sends as many bytes as it receives: how much larger `busy` is of what it receives; else 0 */
};

struct tly_gauge {
    double value;   /* bytes/s; 0: not known (a card), no limit (sums) */
    double most;    /* never above this, which somebody has declared; 0: no bound */
    bool guess;     /* it carries the value at least; nothing says that it is no more */
    uint32_t count; /* samples so far */
    struct tly_sight sight[TLY_GAUGE_LONG]; /* ring */
};

void tly_gauge_init(struct tly_gauge *g, double value, double most);
/* The value, or what is declared if that is less. */
double tly_gauge_bound(const struct tly_gauge *g, double value);
/* Forget the samples: they were of another epoch. */
void tly_gauge_clear(struct tly_gauge *g);
/* A sample that makes no sense (not finite, negative, more than can be) is ignored. */
void tly_gauge_see(struct tly_gauge *g, const struct tly_sight *s);
/* The value by the samples so far; g->value unless they clearly say otherwise:
 *   - it has carried more than that in most of the last TLY_GAUGE_SHORT samples;
 *   - it was backlogged nearly all the time, and what it carries by that differs by a quarter in the last
 *     TLY_GAUGE_SHORT samples, or by `near` (a fraction) in the last TLY_GAUGE_LONG.  What it carried in the backlogged
 *     time is the most that it carries, for backlogs do not all show. */
double tly_gauge_estimate(const struct tly_gauge *g, double near);
/* Was it backlogged nearly all the time in the last TLY_GAUGE_LONG samples, and is the value what it carried then? */
bool tly_gauge_confirms(const struct tly_gauge *g, double near);
/* For what part of the time it was backlogged; 0 before TLY_GAUGE_SHORT samples. */
double tly_gauge_busy(const struct tly_gauge *g);
double tly_gauge_long_busy(const struct tly_gauge *g); /* in the last TLY_GAUGE_LONG samples; 0 before */
/* The same, the mean of both directions, in up to TLY_GAUGE_LONG / 2 samples. */
double tly_gauge_both(const struct tly_gauge *g);
/* What it carried, backlogged or not; 0 before TLY_GAUGE_SHORT samples. */
double tly_gauge_carried(const struct tly_gauge *g);
/* Is it backlogged nearly all the time?  Has it time to spare?  Neither before TLY_GAUGE_SHORT samples. */
bool tly_gauge_is_full(const struct tly_gauge *g);
bool tly_gauge_has_slack(const struct tly_gauge *g);
/* Is it full by the last TLY_GAUGE_LONG samples, or by as many as there are?  Not before TLY_GAUGE_SHORT. */
bool tly_gauge_is_long_full(const struct tly_gauge *g);
/* Is it backlogged nearly all the time, but clearly less in what it sends?  A slow card has the same backlogs both ways. */
bool tly_gauge_is_late(const struct tly_gauge *g);
/* Has it been idle for much of the time, in the last TLY_GAUGE_LONG samples? */
bool tly_gauge_is_idle(const struct tly_gauge *g);
/* What it carried while it was backlogged; of one with time to spare this is too low, for it waits for others' cards.
 * 0: nothing. */
double tly_gauge_while_busy(const struct tly_gauge *g);
/* The median absolute deviation of that in the last TLY_GAUGE_LONG samples, as a fraction of its median; 0 before, where
 * tly_gauge_estimate() says nothing of small deviations either. */
double tly_gauge_spread(const struct tly_gauge *g);

/* --- the split (replan.c) ------------------------------------------------------------------------------ */

enum {
    TLY_REPLAN_INTERVAL = 5,         /* samples between two changes, doubled at each reversal, */
    TLY_REPLAN_MOST_INTERVAL = 1500, /* up to ten minutes of 0.4 s each */
};
#define TLY_REPLAN_LEAST_GAIN 0.03

/* One service of the roster. */
struct tly_replan_service {
    /* bandwidth: what the split goes by; sum_rate: what was declared and what its memory allows */
    struct tly_plan_machine machine;
    bool active;           /* it may have a share */
    bool spare;            /* a tallyd: it may be left without one */
    uint32_t weight;       /* its share now */
    struct tly_sight card; /* of the sample; at the first service behind each card.  NAN: not seen */
    struct tly_sight sums; /* inputs added; busy: they waited at the service, not in the network */
};

struct tly_replan; /* opaque */

/* fixed: the split is to stay as it is; estimates follow the network all the same.  -ENOMEM. */
int tly_replan_create(bool fixed, struct tly_replan **out);
void tly_replan_destroy(struct tly_replan *r); /* NULL is accepted */
/* Another service has this place.  bandwidth: bytes/s, 0: not known; most: its declared bandwidth, which estimates do not
 * exceed, or 0; sum_rate: what has been found of its sums, 0: no limit; rests: another replanner has put it to rest.
 * -ENOMEM. */
int tly_replan_place(struct tly_replan *r, int place, double bandwidth, double most, double sum_rate,
                     bool rests);
/* The bandwidth that a place has begun with is one that another replanner tried: a guess. */
void tly_replan_doubt(struct tly_replan *r, int place);
/* The first service behind a card was `from` and is `to` now: what is known of the card is known of that one.  What is declared
 * of `to` still bounds it. */
void tly_replan_move(struct tly_replan *r, int from, int to);
/* Another epoch has begun, for whatever reason: samples count anew.  alone: no service has come or gone with it. */
void tly_replan_begin(struct tly_replan *r, bool alone);
/* A sample.  goodput: bytes/s of operations' results, by which a try is judged.  True: the split is to change, to that by
 * tly_replan_bandwidth() and the two below.  At most TLY_MAX_SERVICES services. */
bool tly_replan_step(struct tly_replan *r, int count, const struct tly_replan_service *s, double goodput);

/* The one that holds all others up: its card, or its sums, are all that is busy all the time; or, of several such, the
 * one that carries least of what the split goes by, and clearly less than others.  named: the one that was found before,
 * which gives way only to one that is clearly worse.  -1: there is none. */
int tly_replan_standout(const struct tly_replan *r, int count, const struct tly_replan_service *s, int named);

/* What the plan is to go by: bytes/s; 0: not known. */
double tly_replan_bandwidth(const struct tly_replan *r, int place);
/* Is that what its card was seen to carry, or said to?  Not while more is tried, after a rest until enough was seen, or where
 * it is half of that. */
bool tly_replan_is_sure(const struct tly_replan *r, int place);
/* Does the split go by another value of its card or its sums than was seen, to find out whether that is so? */
bool tly_replan_tries(const struct tly_replan *r, int place);
/* Is the value of the card assumed, since a service behind it woke just now? */
bool tly_replan_assumes(const struct tly_replan *r, int place);
/* Does the process behind its card hold everybody up, and is the value half of what the card carried then? */
bool tly_replan_eases(const struct tly_replan *r, int place);
/* What was found of its sums, bytes/s; 0: no limit. */
double tly_replan_sum_rate(const struct tly_replan *r, int place);
/* Is that a limit now: do inputs wait at the service nearly all the time? */
bool tly_replan_sums_limit(const struct tly_replan *r, int place);
/* It is so slow that it is to have no share; it is tried again after a while. */
bool tly_replan_rests(const struct tly_replan *r, int place);

#endif
