/* member.h - a member's connection to the coordinator: a rank's or a tallyd's.
 *
 * The calls that wait turn the loop themselves; use them before a thread runs it.  Afterwards the member works
 * by callbacks under the loop's lock. */
#ifndef TLY_MEMBER_H
#define TLY_MEMBER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/param.h"
#include "membership/measure.h"
#include "membership/place.h"
#include "membership/proof.h"
#include "membership/roster.h"
#include "membership/status.h"
#include "membership/traffic.h"
#include "transport/outbox.h"
#include "transport/transport.h"

enum tly_member_state {
    TLY_MEMBER_CONNECTING,
    TLY_MEMBER_KNOWN,
    TLY_MEMBER_INVITED,
    TLY_MEMBER_RUNNING,
    TLY_MEMBER_OVER
};

/* Owner: the loop. */
struct tly_member {
    struct tly_loop *loop;           /* borrowed */
    const struct tly_place *place;   /* borrowed */
    const struct tly_params *params; /* borrowed */
    struct tly_link *link;           /* owned */
    struct tly_identity identity;    /* with the job's incarnation once KNOWN */
    enum tly_member_state state;
    struct tly_roster roster;     /* once INVITED */
    uint32_t committed;           /* its epoch, when it was last committed; once RUNNING */
    struct tly_member_info info;  /* what we have said of ourselves */
    struct tly_hook hook;         /* looks for a coordinator that is gone, */
    bool away;                    /* for ours is, and the job goes on; */
    int64_t retry_at;             /* then, on the awake clock */
    struct tly_addresses to;      /* where the coordinator may be */
    struct sockaddr_storage at;   /* where it is, or is being looked for */
    struct sockaddr_storage here; /* our address as the coordinator sees it */
    uint32_t holder;              /* the rank in whose process it is, or TLY_NO_RANK; once KNOWN */
    char coordinator[384];        /* its address and name, for messages */
    struct tly_proof_door door;
    struct tly_streams streams; /* while network cards are measured */
    bool leaving;    /* we have said goodbye: the next coordinator, if one comes, must hear it too */
    bool left;       /* the coordinator has said goodbye: all ranks have */
    bool joining;    /* we have joined, and not all ranks have, */
    bool drained;    /* and nothing of ours is under way; the next coordinator must hear both too */
    bool lost;       /* it ended without a word */
    bool resumed;    /* since the last COMMIT another coordinator has taken the job over */
    int error;       /* errno of what ended it */
    int64_t unheard; /* ns without news from the coordinator shortly before that; 0: nothing unusual */
    char sentence[TLY_SENTENCE];
    struct tly_slow slow;        /* who holds the job up now, as the coordinator says, */
    struct tly_currents current; /* what cards carry now, */
    struct tly_change change;    /* and the last change of the split */
    struct tly_outbox outbox;
    bool (*cancelled)(void *user);                           /* asked while waiting; may be NULL */
    void (*over)(void *user, int err, const char *sentence); /* the job failed; may be NULL */
    void (*goodbye)(void *user);                             /* all ranks have left; may be NULL */
    /* All ranks have joined for the `joins`-th time, `last` the last; or err: it will never be, for `sentence`. */
    void (*placed)(void *user); /* this rank has its place among those that join */
    void (*joined)(void *user, uint32_t joins, uint32_t last, int err, const char *sentence);
    /* Changes of epoch, once RUNNING; each may be NULL.  invited: `roster` has a service to connect to; prepare: begin
     * nothing new, close the connections to services that are gone, then call tly_member_begun(); promised: this round has begun
     * elsewhere, in that epoch; changed: `roster`, ours, holds for all other rounds. */
    void (*invited)(void *user);
    void (*prepare)(void *user, const struct tly_roster *next);
    void (*promised)(void *user, const struct tly_begun *round);
    void (*changed)(void *user, const struct tly_roster *roster);
    void *user;
};

void tly_member_init(struct tly_member *m, struct tly_loop *loop, const struct tly_place *place,
                     const struct tly_params *params, bool is_rank);
void tly_member_finish(struct tly_member *m);

/* Look up where the coordinator may be, again and again until `timeout_s` has passed (negative: for ever). */
int tly_member_find(struct tly_member *m, double timeout_s);
/* Then connect to it, in the same way; its addresses take turns, and a name is looked up anew for each attempt.
 * 0 or -errno with a sentence. */
int tly_member_connect(struct tly_member *m, double timeout_s);
/* Seconds for which rank 0 looks for a coordinator at its own address, if another process holds the port there. */
enum { TLY_HELD_S = 2 };
/* The address at which our service should listen, any port: TALLY_IFACE's, else that by which the coordinator sees
 * us; all of this machine's if the coordinator, known by name, is on it as well: others see other addresses. */
int tly_member_service_address(const struct tly_member *m, struct sockaddr_storage *at);
/* Say who we are (rank, machine, the service at `service`) and wait for the roster. */
int tly_member_announce(struct tly_member *m, const struct tly_endpoints *service, uint64_t incarnation,
                        uint64_t memory);
/* All connections are made: wait until all others say so too. */
int tly_member_begin(struct tly_member *m);

/* To INVITE (all connections stand; no rounds) and PREPARE (these rounds are begun and not complete, but for the last `ended`, which
 * the newest COMMIT listed): `epoch` is the one of the roster that came with it. */
void tly_member_begun(struct tly_member *m, uint32_t epoch, const struct tly_begun *rounds, size_t count,
                      size_t ended);

/* This rank has joined for the time after the last that all have; drained: all that it had submitted has ended, too.
 * `joined` is called once all ranks have said both. */
void tly_member_join(struct tly_member *m, bool drained);

/* A rank leaves the job; a tallyd leaves the split. */
void tly_member_goodbye(struct tly_member *m);
/* What this rank has seen of its traffic. */
void tly_member_tell_traffic(struct tly_member *m, const struct tly_traffic *t);
/* This rank has no traffic to tell of, until it tells of some.  epochs: number of those that it still needs. */
void tly_member_tell_quiet(struct tly_member *m, uint32_t epochs);
/* How much of its steps it has computed. */
void tly_member_tell_steps(struct tly_member *m, const struct tly_steps *t);
/* Something makes the job impossible.  err: fail at once with it; 0: give a better explanation a moment. */
void tly_member_complain(struct tly_member *m, int err, const char *sentence);
/* This rank leaves because of an error of its own. */
void tly_member_abort(struct tly_member *m, const char *reason);
/* Service `index` of the roster cannot be reached. */
void tly_member_accuse(struct tly_member *m, uint32_t index, const char *sentence);

/* For connect.c: dial m->at with this identity, lock held; -errno, with a sentence. */
int tly_member_dial(struct tly_member *m, const struct tly_identity *as);
/* Turn the loop until `state` or later, the end, or the deadline (monotonic; negative: none).  -EINTR, -ETIMEDOUT. */
int tly_member_wait(struct tly_member *m, enum tly_member_state state, int64_t deadline);

#endif
