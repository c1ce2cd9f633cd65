/* internal.h - the structures of the coordinator, and what its files offer each other.
 *
 * A file may use the files above it in this list (test/checks/test_circles.py):
 *
 *   tell.c         what is said to members; the end of the job
 *   setback.c      tallyd that may not come again yet
 *   start.c        up to the first epoch
 *   adapt.c        the plan follows the network
 *   slow.c         who holds the job up
 *   change.c       from one epoch to the next
 *   judge.c        with whom the job cannot go on
 *   join.c         tally_join()
 *   coordinator.c  what members say, and time
 *
 * coordinator.c looks after each event, and does whatever a change of the state asks for.  start.h, adapt.h and change.h
 * declare the files' functions, but for those of tell.c and join.c. */
#ifndef TLY_MEMBERSHIP_INTERNAL_H
#define TLY_MEMBERSHIP_INTERNAL_H

#include <time.h>

#include "base/error.h"
#include "base/event.h"
#include "base/map.h"
#include "membership/coordinator.h"
#include "membership/measure.h"
#include "membership/status.h"
#include "membership/traffic.h"
#include "plan/late.h"
#include "plan/replan.h"
#include "transport/outbox.h"
#include "transport/transport.h"

enum tly_coordinator_state {
    GATHERING = TLY_JOB_GATHERING,
    PROVING = TLY_JOB_PROVING,
    MEASURING = TLY_JOB_MEASURING,
    INVITING = TLY_JOB_INVITING,
    RUNNING = TLY_JOB_RUNNING,
    FAILED = TLY_JOB_FAILED,
    ENDED = TLY_JOB_ENDED
};

enum {
    TALLYD_SILENCE_S = 5,  /* ranks that wait for one judge it sooner (src/comm/path/peer.c) */
    MEASURE_STEP_MS = 300, /* longer than a round takes; who has not answered by then is not waited for */
};

#define TLY_COORDINATOR_NO_MEMORY \
    "the coordinator is out of memory: free some on its machine, or give its cgroup more"

/* One connection.  Owner: the coordinator's loop. */
struct tly_coordinator_member {
    struct tly_list node;
    struct tly_coordinator *c;
    struct tly_link *link;
    struct tly_outbox outbox;
    struct tly_member_info info;
    bool known; /* waited for at the end: has shown the secret, or is about to; does not only watch */
    bool entered, proved, begun, left;
    bool drained;  /* a rank that has joined as tally_join() has it: all that it had submitted has ended */
    bool stranded; /* ... and has been told that another one has left instead */
    uint64_t nonce_seen;
    uint32_t service;       /* a tallyd's place in the roster, or TLY_NO_SERVICE */
    bool waiting;           /* a tallyd that came while the job ran: not yet invited, */
    bool invited;           /* or not yet met by all ranks, */
    bool welcome;           /* or, met by all, not yet part of an epoch */
    uint32_t met, answered; /* a rank: the last INVITE, the last PREPARE that it has answered */
    uint32_t saying, said;  /* a rank: the PREPARE that it answers, and how many rounds it has named by now */
    uint32_t committed;     /* a rank that has resumed: its epoch then */
    bool watcher;
    int64_t
        accused_at; /* a tallyd that a rank cannot reach: when it said so, on the awake clock; 0: nobody has */
    uint32_t accuser;     /* that rank, */
    char accusation[300]; /* ... and its sentence */
    bool said_before;     /* a tallyd: it was put out for the same reason when it came last */
    uint32_t accuses;     /* a rank: how many services it cannot reach, in this epoch */
    int64_t quiet_at;     /* a rank: awake clock when it last said that it has no traffic */
    uint32_t epochs; /* a rank: number that it still needs, by its last word in this sample; 0: no word yet */
    bool doubted;    /* it has sent an impossible report of its traffic */
    bool measured;   /* what is known of its card was measured here, */
    bool once;       /* ... and nothing confirms it: it may carry more */
    struct tly_traffic
        traffic;          /* owned: a rank's last report in this epoch, not yet looked at; count 0: none */
    struct tly_own own;   /* a rank: how long its steps take, and waits of them */
    uint32_t card;        /* MEASURING: its card's place in the survey, */
    bool stands, awaited; /* whether it streams for it, and is about to answer, */
    bool silent;          /* and has said nothing in this round */
};

enum { TLY_SLOW_TURNS = 4 }; /* a holder, and three that have followed it */

/* All fields but the first three belong to the loop. */
struct tly_coordinator {
    pthread_t thread;
    bool started;
    struct tly_listener *listener;
    struct tly_loop loop;
    struct tly_hook hook;
    struct tly_identity identity;
    uint32_t servers;
    int64_t servers_ns, join_ns, dead_ns;
    uint64_t part_bytes, credit_bytes;
    uint32_t window_parts;
    enum tly_split split;
    bool teams; /* ranks of a machine may share memory */
    enum { MEASURE_NONE, MEASURE_UNKNOWN, MEASURE_ALL } measure;
    char *given; /* owned: figures that count as measured ("HOST=RATE,..."), for tests; or NULL */
    struct tly_survey *survey; /* owned: MEASURING */
    struct tly_measure step;   /* of it, the one under way */
    struct tly_found_host {
        char host_id[64];
        uint64_t bandwidth; /* of its card, bit/s, as measured at the start; 0: it was not */
        bool once;          /* ... and nothing confirms it: it may carry more */
        uint64_t last;      /* bit/s, as it was last seen to carry when a tallyd there ended; 0: not known */
    } * found;              /* owned: what is known of hosts */
    uint32_t found_count;
    int64_t measuring_at, step_at, inviting_at; /* awake clock */
    struct tly_list members;
    enum tly_coordinator_state state;
    bool telling;  /* FAILED: the rank of this process is told once the others have been */
    uint32_t size; /* ranks; 0 until the first has joined */
    struct tly_coordinator_member **ranks; /* owned array of size, of borrowed */
    struct tly_roster roster;              /* from INVITING on */
    char (*host_id)[64];                   /* owned: of each service of it */
#define TLY_HOST_AWAY '\1' /* stands before its card's number instead, until somebody behind that is back */
    /* A change of epoch.  Invitations and preparations are numbered in one sequence, from the first epoch's 1. */
    uint32_t number;         /* the last one given */
    uint32_t invitation;     /* the one under way; 0: none */
    int64_t invited_at;      /* awake clock */
    bool wanted;             /* the roster has changed: a new epoch is due */
    uint32_t preparing;      /* the epoch for which ranks are asked what they have begun; 0: none */
    struct tly_begun *begun; /* owned: what they have said */
    size_t begun_count, begun_room;
    /* The plan follows the network (adapt.c). */
    bool fixed; /* TALLY_REPLAN=0, or a TALLY_SPLIT that leaves no choice */
    struct tly_adapt {
        struct tly_replan *replan; /* owned; NULL: no traffic crosses cards */
        struct tly_adapt_place {
            uint64_t incarnation; /* whose estimates these are */
            uint64_t bandwidth;   /* bit/s, as the last line about a change had it */
            uint64_t told;        /* bit/s that it carries now, as all members were told last */
            uint32_t weight;      /* before the change that is under way */
            uint32_t card;        /* the first service behind its card in the last epoch */
            struct tly_adapt_since {
                uint64_t rate; /* bit/s, */
                time_t at;     /* and when it became about that */
            } carries, adds;   /* its card, if it is the first behind it; its sums */
            bool active;       /* the service had a part in the last epoch */
        } * place;             /* owned */
        uint32_t places;
        bool pending;     /* a change of its making is under way */
        double takes;     /* seconds for a byte before that */
        int64_t since;    /* awake clock: first report of the sample; 0: none */
        uint32_t crowded; /* samples in a row in which some rank needed four older epochs */
        int standout; /* the service whose card or sums were busy all the time in the last sample; -1: none */
    } adapt;
    struct tly_last_change {
        struct tly_change last; /* of the split, whoever has made it */
        uint32_t epoch;         /* that began with it */
        bool fresh;             /* members have not been told yet */
    } changed;
    struct tly_slow_found {
        struct tly_slow told;     /* to all members */
        uint32_t who;             /* a service, or a rank that takes longer by itself */
        struct tly_lateness late; /* of that rank */
        struct tly_slow_turns {
            int role;                     /* of the newest holder; 0: there was none yet */
            uint64_t last;                /* its rank, or the incarnation of its service */
            uint32_t count;               /* of holders, each another one than the one before, */
            int64_t at[TLY_SLOW_TURNS];   /* ring: since when, awake clock, */
            char who[TLY_SLOW_TURNS][64]; /* and its name */
        } turns;
        double figure;       /* bit/s that it carried or added then; 0: it is not about that */
        bool fresh;          /* there is a sample that has not been looked at */
        bool is_logged;      /* what was told is in the log */
        enum tly_why logged; /* the last line there, */
        uint32_t logged_who;
        int64_t logged_at; /* awake clock, */
        int64_t pause_s;   /* and for how long the same is not said again */
    } slow;
    uint32_t watchers, known;
    struct setback
        *setbacks; /* owned: machines whose tallyd a rank could not reach; src/membership/setback.c */
    uint32_t setback_count;
    bool standalone;
    bool local_only; /* no secret, so only this machine's processes can join, and the job may have others */
    bool resuming;   /* GATHERING: the members of a job that runs */
    uint32_t committed;        /* ... the newest epoch that one of them is in, */
    struct tly_roster settled; /* ... and its roster: others may be in the one before */
    int64_t resumed_at; /* awake clock; tallyd that do not come back soon are gone; 0: none is missed */
    struct tly_map begun_seen; /* hash of key and round -> anything */
    uint32_t ranks_here, tallyds_here;
    int64_t born, waiting_since, complete_at, proving_at, asked_missing; /* awake clock */
    char verdict[TLY_SENTENCE];                                          /* FAILED: why */
    int verdict_err;
    int64_t over_at; /* awake clock: when all were told that the job has failed or ended; 0: not yet */
    char complaint[TLY_SENTENCE];
    int64_t complaint_due;  /* awake clock; 0: none */
    struct tly_event quiet; /* set when the last one that is known has gone */
};

/* --- tell.c -------------------------------------------------------------------------------------- */

/* To one member; out of memory: its connection ends. */
void tly_coordinator_post(struct tly_coordinator_member *m, int type, uint16_t flags, const void *data,
                          size_t len);
void tly_coordinator_post_verdict(struct tly_coordinator_member *m, int err, const char *sentence);
/* To all members. */
void tly_coordinator_post_all(struct tly_coordinator *c, int type, const void *data, size_t len);
/* End the job with a sentence that all members get; the first one counts.  err: an errno.  The loop's next prepare step
 * sends it, by tly_coordinator_tell_last(). */
void tly_coordinator_fail(struct tly_coordinator *c, int err, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void tly_coordinator_tell_last(struct tly_coordinator *c);
/* Its first rank is there: the others' time begins, however long a coordinator apart has stood idle. */
void tly_coordinator_await(struct tly_coordinator *c, uint32_t size);
/* How messages call a member. */
void tly_coordinator_name(const struct tly_coordinator_member *m, char *out, size_t len);

/* --- join.c -------------------------------------------------------------------------------------- */

/* A rank has joined: it needs no more of the others but that they join; -EPROTO (*why). */
int tly_join_heard(struct tly_coordinator_member *m, struct tly_reader *r, const char **why);
/* Have all ranks joined, or has one left that will not? */
void tly_join_look(struct tly_coordinator *c);

#endif
