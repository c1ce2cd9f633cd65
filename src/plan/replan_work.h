/* replan_work.h - what candidates.c (which values the plan could go by) and replan.c (which of them hold) share. */
#ifndef TLY_REPLAN_WORK_H
#define TLY_REPLAN_WORK_H

#include "plan/replan.h"

/* Deviations in many samples that count: of a card like others, whose split is exact, and of one like no other or clearly
 * busier than its like. */
#define TLY_REPLAN_NEAR_SHARED .12
#define TLY_REPLAN_LESS_BUSY .05 /* fraction of the time: clearly less busy than another */
#define TLY_REPLAN_NEAR .06
#define TLY_REPLAN_CLEARLY .15 /* worse than others, or than planned, by so much */

enum { TLY_GOODPUTS = 24 }; /* samples by which a try that promises little is judged */

/* How a place's part in a try has ended. */
enum tly_replan_outcome { IN_VAIN, WAITED, CARRIED };

struct tly_replan_move {
    int way;     /* -1, 0, 1 */
    uint32_t at; /* samples */
};

/* The memory of a card beside its gauge, whichever service stands for it. */
struct tly_replan_card {
    double peak; /* bytes/s: the most that it was known, or is declared, to carry in this job */
    struct tly_replan_move moved; /* its value's last change */
    bool assumed;                 /* its value was assumed when a service woke, and is not confirmed yet */
    bool eased;       /* its value is half of what it carried, for the process behind it is slow */
    bool falls_short; /* it is busy all the time and carries less than its value */
    uint32_t
        held_until; /* samples: not tried before, for another card of its feeler has more to carry, or it is eased */
    uint32_t asked_until;   /* samples: not tried before for having been measured low, for that was in vain */
    double busy_in_vain;    /* `busy_before` when more was last tried in vain; 0: it was not */
    double refuted;         /* a small deviation to this value was tried in vain: not again, */
    uint32_t refuted_until; /* before so many samples */
};

/* A service.  Fields of a card are valid at the first service behind it alone. */
struct tly_replan_place {
    struct tly_gauge card, sums;
    struct tly_replan_card known;      /* of the card */
    struct tly_replan_move sums_moved; /* the last change of what is known of its sums */
    double next, next_sums;            /* this step's candidates */

    bool used;   /* of a card: some service behind it may have a share and does not rest */
    bool slowed; /* of a card: some such service's sums have a limit */
    bool dealt;  /* of a card: some such service has a share */
    double load; /* of a card: fraction of a step for which the plan keeps it busy; 1: not known */

    bool rests;
    uint32_t rest_left, rest_for; /* samples: of this rest, and of the next one, or hold */
    uint32_t woke_at;             /* samples: when the last one ended, or the hold of a slow process ends */
    bool rested_by_try;           /* the rest is part of the try that is under way */

    bool parts;    /* its candidate parts it from cards that are alike */
    bool eases;    /* its candidate is half of what it carries, for the process behind it is slow */
    bool doubtful; /* of a card: it was measured far below the others and may be tried with what they carry */
    bool tried;    /* it has a part in the try that is under way, */
    enum tly_replan_outcome outcome; /* which has ended so */
    bool felt; /* a feeler's card that has carried what it was tried with: more may be tried at once */
    double before, before_sums;         /* its values before the last change to candidates, */
    bool guess_before, eased_before;    /* and whether the card's was a guess, or eased */
    double busy_before, carried_before; /* fraction of the time, both ways, and bytes/s, of its card then */
};

struct tly_replan {
    struct tly_replan_place *place; /* owned */
    int room;
    bool fixed;
    uint32_t samples, changed_at, interval;
    uint32_t waits_again;         /* samples: before then no other card that falls short makes tries wait */
    uint32_t paced_at;            /* samples: when the interval was last doubled or halved */
    double goodput[TLY_GOODPUTS]; /* ring, of this epoch */
    uint32_t goodputs;
    struct tly_replan_trial {
        uint32_t at, pause; /* samples: not before then, and how long the last one in vain has put it off */
    } more, fine;           /* higher values than gauges know; small deviations that they see */
    struct tly_replan_trial *trying; /* the one under way, or NULL */
    bool feeler;                     /* it is judged by what its cards carry */
    bool expected;                   /* the next epoch is of its own making */
    double before, promised;         /* goodput before the try, and the gain that it promised */
    struct tly_plan_machine machine[TLY_MAX_SERVICES]; /* for one call of the plan */
    uint32_t weight[TLY_MAX_SERVICES], now[TLY_MAX_SERVICES];
    int from[TLY_MAX_SERVICES]; /* their places */
    double sorted[TLY_MAX_SERVICES];
};

/* --- candidates.c ----------------------------------------------------------------------------------- */

/* Is it the first service behind a card that is used?  It may rest itself: its place stands for the card all the same. */
bool tly_candidates_is_card(const struct tly_replan *r, const struct tly_replan_service *s, int i);
/* A sample into the gauges; candidates are what there is. */
void tly_candidates_see(struct tly_replan *r, int count, const struct tly_replan_service *s);
void tly_candidates_forget(struct tly_replan *r);
/* The machines that may have a share, by the candidates, one behind the other: r->machine, r->now, r->from.  Returns how
 * many. */
int tly_candidates_gather(struct tly_replan *r, int count, const struct tly_replan_service *s);
/* What the split that the candidates ask for gains over the one that there is; negative: nothing can be said.  That split
 * is in r->weight then. */
double tly_candidates_gain(struct tly_replan *r, int count, const struct tly_replan_service *s);
/* Which cards fall short: they are busy all the time and carry less than their value.  Once a sample, after its try, if it has
 * one, was judged. */
void tly_candidates_find_short(struct tly_replan *r, int count, const struct tly_replan_service *s);
/* A card falls short, and the last wait that such a card began, TLY_GAUGE_LONG samples, is not over.  The others wait for it,
 * so their idle time says nothing. */
bool tly_candidates_wait(const struct tly_replan *r, int count, const struct tly_replan_service *s);
/* A card of unknown speed counts as one as slow as the slowest that is known.  Where none is known, all become known
 * together: true. */
bool tly_candidates_learn(struct tly_replan *r, int count, const struct tly_replan_service *s);
/* By the gauges.  True: something is another value than before. */
bool tly_candidates_estimate(struct tly_replan *r, int count, const struct tly_replan_service *s);
/* Values to try for those that have time to spare: a step more, or, `far`, what others carry.  Of cards that are alike none is
 * tried unless half of them are idle.  True: there are some. */
bool tly_candidates_raise(struct tly_replan *r, int count, const struct tly_replan_service *s, bool far);
/* A card that may carry what others do, or twice as much and more, is to carry a quarter more first, unless a feeler has come
 * true just now.  A guess up to twice as much may stand.  Sums stay as they are then.  True: some candidate was more. */
bool tly_candidates_restrain(struct tly_replan *r, bool far);

#endif
