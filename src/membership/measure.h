/* measure.h - what network cards carry that do not say it, found out between PROVING and INVITING, before the split is
 * made.  A few rounds (plan/plan.h says who with whom), in each of which some members stream to others' services.  No card
 * sends and receives in one round: a stream's acknowledgements would queue behind another's data, and a stream that is kept
 * from growing so shows a part of what the card carries.
 *
 * coordinator                         member                               service
 *   MEASURE (MEET, whom)        ->      connects, as a watcher
 *                               <-      MEASURE (MET)
 *   MEASURE (GO)                ->      MEASURE, one after the other  ->   counts for a while
 *                                                                     <-   MEASURE (COUNTED, rate)
 *                               <-      MEASURE (COUNTED, rates)
 *
 * Nobody waits for long: who has not answered in time has measured nothing. */
#ifndef TLY_MEASURE_H
#define TLY_MEASURE_H

#include <stdbool.h>
#include <stdint.h>

#include "membership/roster.h"
#include "plan/plan.h"
#include "transport/transport.h"
#include "wire/pack.h"

/* --- what is said ---------------------------------------------------------------------------------- */

enum tly_measure_step { TLY_MEASURE_MEET, TLY_MEASURE_MET, TLY_MEASURE_GO, TLY_MEASURE_COUNTED };
enum { TLY_MEASURE_MOST = TLY_MEASURE_GROUP - 1 };

struct tly_measure {
    uint32_t step, round; /* enum tly_measure_step; rounds count from 1 */
    uint32_t count;       /* of `to` (MEET) or `rate` (COUNTED) */
    struct tly_endpoints to[TLY_MEASURE_MOST];
    uint64_t rate[TLY_MEASURE_MOST]; /* of what has come there, bit/s, in the order of `to`; 0: not known */
};

void tly_measure_write(struct tly_writer *w, const struct tly_measure *m);
int tly_measure_read(struct tly_reader *r, struct tly_measure *m); /* -EPROTO */

/* --- the service's side: counting -------------------------------------------------------------------- */

/* All that comes in a round is counted over one stretch of time, so that rates of streams that meet here add up.  The kernel
 * counts: a process that gets no processor for a while reads at once what has come meanwhile. */
struct tly_meter {
    uint32_t round;
    int64_t began, since; /* when the first of the round came, and from when it counts; 0: not yet */
    uint64_t counted;     /* bytes of all streams until then, by which is settled */
    int64_t span, passed; /* how long it counts; and how long it did: 0: it does */
};
/* One stream. */
struct tly_meter_flow {
    uint32_t round;
    uint64_t seen; /* bytes, when it last came or counting began */
    uint64_t rate; /* bit/s, when counting has ended */
    bool told;
};

/* The step for all streams: nothing; note the bytes of each (tly_meter_begin); find the rate of each (tly_meter_end). */
enum tly_meter_due { TLY_METER_NOTHING, TLY_METER_BEGINS, TLY_METER_ENDS };

/* Some of this round has come in this stream, in which `bytes` have arrived until now (monotonic).  The sender has so many
 * streams at once. */
enum tly_meter_due tly_meter_take(struct tly_meter *m, struct tly_meter_flow *f, uint32_t round,
                                  uint32_t streams, uint64_t bytes, int64_t now);
void tly_meter_begin(struct tly_meter_flow *f, uint64_t bytes);
void tly_meter_end(const struct tly_meter *m, struct tly_meter_flow *f, uint64_t bytes);
/* True once a round, when the rate of a stream that came in it is known. */
bool tly_meter_tell(const struct tly_meter *m, struct tly_meter_flow *f);

/* --- the member's side: streaming --------------------------------------------------------------------- */

/* Owner: the loop. */
struct tly_streams {
    struct tly_loop *loop; /* borrowed */
    uint32_t round, count;
    bool going;
    int64_t until; /* monotonic */
    struct tly_measure_stream {
        struct tly_streams *all;
        struct tly_link *link; /* owned; NULL: it has ended */
        bool met, counted;
        uint64_t rate;
    } stream[TLY_MEASURE_MOST];
    /* All connections stand, or all rates are known, or will never. */
    void (*say)(void *user, const struct tly_measure *m);
    void *user;
};

/* MEET: drop the last round's streams and connect.  `say` may be called before it returns. */
void tly_streams_meet(struct tly_streams *s, const struct tly_identity *me, const struct tly_measure *m);
/* GO, if it is for this round. */
void tly_streams_go(struct tly_streams *s, const struct tly_measure *m);
void tly_streams_close(struct tly_streams *s);

/* --- the coordinator's side: who with whom -------------------------------------------------------------- */

struct tly_survey; /* opaque */

/* Survey the cards of a roster whose bandwidth is not known, or all cards.  *out is NULL if there is nothing to measure.
 * -ENOMEM. */
int tly_survey_create(const struct tly_roster *r, bool all, struct tly_survey **out);
void tly_survey_destroy(struct tly_survey *s); /* NULL is accepted */
/* The place of a service's card in the survey; the service that stands for it streams and counts. */
uint32_t tly_survey_card(const struct tly_survey *s, uint32_t service);
bool tly_survey_stands(const struct tly_survey *s, uint32_t service);

/* The first round or the next, from 1 on; 0 when there are no more. */
uint32_t tly_survey_next(struct tly_survey *s);
/* What the card has to do in this round; false: nothing. */
bool tly_survey_meet(const struct tly_survey *s, uint32_t card, struct tly_measure *m);
/* The rates that the card has counted in it. */
void tly_survey_counted(struct tly_survey *s, uint32_t card, const struct tly_measure *m);
/* The card has no part in further rounds. */
void tly_survey_drop(struct tly_survey *s, uint32_t card);
/* No more rounds: what has come of them is all. */
void tly_survey_end(struct tly_survey *s);
/* Then: was the card to be measured?  *rate: what it carries both ways, bit/s; 0: that could not be found out.  *once: only
 * one look has found so little, and no other card is like that: it may carry more. */
bool tly_survey_result(const struct tly_survey *s, uint32_t card, uint64_t *rate, bool *once);

#endif
