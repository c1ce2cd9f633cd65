/* members.h - a coordinator in its thread, and members of the test's own: links over which it answers when and what it
 * wants.  They say by hand what src/membership/member.c says for a real one. */
#ifndef MEMBERS_H
#define MEMBERS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/loop.h"
#include "base/param.h"
#include "membership/coordinator.h"
#include "membership/roster.h"
#include "membership/status.h"
#include "membership/traffic.h"
#include "transport/outbox.h"
#include "transport/transport.h"

#include <cmocka.h>

enum {
    RANKS = 2,
    FIRST = RANKS,
    GUEST,
    ANOTHER,
    WATCHER,
    MEMBERS
}; /* two ranks, a tallyd from the start, two that come later, one who only asks */

/* One member: what it has been told. */
struct member {
    struct tly_link *link;
    struct tly_outbox outbox;
    uint32_t number;
    int opened, closed, invited, prepared, committed, failed;
    uint32_t rounds;          /* begun, in the last COMMIT */
    int gone;                 /* how many ranks it heard have left, */
    int ended;                /* and how often that all have */
    struct tly_roster roster; /* the last that came */
    char verdict[TLY_SENTENCE];
    int judged;
    struct tly_slow slow;        /* who holds the job up, */
    struct tly_currents current; /* what cards carry, */
    struct tly_change change;    /* and what has changed the split */
    int told;                    /* how often it has heard of these */
    struct tly_status status;    /* the answer to its last question, */
    int answered;                /* and how many came */
};

extern struct coordinated {
    struct tly_loop loop;
    struct tly_params params;
    struct tly_place place;
    struct tly_coordinator *coordinator;
    struct member member[MEMBERS];
    uint32_t ranks;         /* the first so many members; RANKS unless a test has more */
    uint32_t host[MEMBERS]; /* of each member; one of its own unless a test says otherwise */
    uint64_t bandwidth;     /* of each, bit/s; 0: nobody says, and all are on this machine */
    bool unknown;           /* ... which measuring must tell: cards do not say it */
    bool contained;         /* each in a container: not one machine with others of its host */
    bool apart;             /* members seem to come from other machines */
    /* Where the job has lost its coordinator: */
    bool guest_rests; /* the guest is its second tallyd, at rest; */
    uint32_t other;   /* of this tallyd another value is in the roster than it says, */
    uint64_t found;   /* bit/s, found of its card and its sums, */
    uint64_t tried;   /* or, of its card alone, tried; 0: neither */
} x;

enum seen { FINE, SLOW, LATE, HALF, ALONE, HELD, STUCK };

void post(struct member *m, int type, uint16_t flags, struct tly_writer *w);
void turn_until(const int *what, int value);
/* Connect as number `i`, and wait for no answer. */
struct member *knock(uint32_t i);
struct member *enter(uint32_t i);
/* Say who it is. */
void announce(struct member *m);
struct member *join(uint32_t i);
/* To the invitation or preparation of this number: so many rounds are begun in an epoch, from this one on. */
void answer_in(struct member *m, uint32_t number, uint32_t epoch, uint32_t from, uint32_t count, bool last);
/* The last `ended` of them have ended: they are creates that the last COMMIT listed. */
void answer_ended(struct member *m, uint32_t number, uint32_t epoch, uint32_t from, uint32_t count,
                  uint32_t ended, bool last);
void answer(struct member *m, uint32_t number, uint32_t from, uint32_t count, bool last);
uint32_t state_of(const struct member *teller, uint32_t member);
int set_up_with(const char *setting, const char *another);
int set_up(void **state);
void leave(struct member *m);
/* The first so many members are all connected: the job runs. */
void run(uint32_t count);
/* With two ranks and a tallyd. */
int start(void **state);
int tear_down(void **state);
/* What a rank sees.  Cards say 800 Mbit/s.  SLOW: that of the tallyds carries a fifth of it; LATE: the same, but what they send
 * hardly waits, for their processes are slow; FINE, HALF: nobody holds anybody up, and each card carries nearly all of that, or
 * half; ALONE: as SLOW, and the tallyds sum all.  HELD, STUCK: no card is busy, and pushes lie at the tallyds, whose
 * processors add 0.2 Gbit/s of inputs, or a thousandth of that. */
struct tly_traffic sight(const struct member *m, enum seen seen, struct tly_traffic_line line[GUEST + 1]);
/* epochs: how many it still needs */
void report_in(struct member *m, uint32_t epoch, uint32_t epochs, enum seen seen);
void report(struct member *m, uint32_t epoch, enum seen seen);
/* So many ranks report again and again, until *what. */
void some_report_until(uint32_t ranks, const int *what, int value, enum seen seen);
void report_until(const int *what, int value, enum seen seen);
int start_apart_with(const char *setting);
int start_apart(void **state);
int start_fixed(void **state);
int start_measured(void **state);
/* A change of epoch, the nth that is prepared. */
void let_it_change(int nth);
/* The first tallyd leaves: a change of epoch that waits for both ranks.  Its number. */
uint32_t let_first_leave(void);
/* What `tally status` gets. */
const struct tly_status *ask(void);
/* Come to another coordinator, from a job that is in this epoch; with the tallyd, or not any more. */
struct member *resume_without(uint32_t left, uint32_t i, uint32_t committed, enum tly_service_state tallyd);
/* Until all is sent that was said. */
void say_all(struct member *m);
struct member *resume(uint32_t i, uint32_t committed, enum tly_service_state tallyd);
uint32_t change_all(int nth);

/* A tallyd comes; so many changes there were before. */
struct member *let_come(uint32_t number, int changes);

#endif
