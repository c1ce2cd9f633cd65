/* internal.h - the structures of the summation service, and what its files offer each other.
 *
 * A house has jobs.  A job has sessions (connections of its ranks) and rounds.  A round is one part in one round of a
 * tensor; it has a slot and an answer for each rank.  All of it belongs to the loop: it is touched under the loop's lock
 * only.  The crew reads slots' data and writes the result of rounds with pieces_left > 0, which nobody else touches
 * meanwhile.
 *
 * A file may use the files above it in this list (test/checks/test_circles.py):
 *
 *   slot.c      the states of a slot
 *   session.c   what a rank is told
 *   members.c   who takes part in a round
 *   window.c    what a rank may push, and what is kept for its sake
 *   store.c     the rounds of a job
 *   memory.c    memory for slots and results; loans
 *   joined.c    ranks that have joined, in rounds
 *   verdict.c   ranks that disagree, refuse, leave or are late
 *   answers.c   results on their way to the ranks
 *   kinds/      what a part's pushes become
 *   round.c     arrivals and release
 *   progress.c  from all pushes to the result
 *   redo.c      what ranks say after a loss
 *   joining.c   the word of a rank that it has joined
 *   facts.c     how the service stands
 *   frames.c    the frames that come over a session
 *   peers.c     sessions from the handshake to the end
 *   house.c     what jobs share
 *   job.c       a job from the first connection to the end
 *   service.c   a house of one job, for a rank and tallyd
 *
 * crew.c, kind.c, pool.c, quota.c and words.c use none of them. */
#ifndef TLY_SUM_INTERNAL_H
#define TLY_SUM_INTERNAL_H

#include "base/check.h"
#include "base/event.h"
#include "base/heap.h"
#include "base/list.h"
#include "base/map.h"
#include "join/measure.h"
#include "reduce/reduce.h"
#include "sum/crew.h"
#include "sum/house.h"
#include "sum/job.h"
#include "sum/kind.h"
#include "sum/quota.h"
#include "sum/service.h"
#include "trace/trace.h"
#include "transport/outbox.h"
#include "transport/transport.h"

/* ms for which the news of accepted bytes waits for a result that tells it. */
enum { TLY_COUNTS_MS = 20 };

/* The least that a push costs its rank's window, for bookkeeping takes memory too. */
enum { TLY_LEAST_CHARGE = 256 };

static inline uint32_t tly_charge(uint32_t length)
{
    return length < TLY_LEAST_CHARGE ? TLY_LEAST_CHARGE : length;
}

/* Where a rank's push of a round stands.  slot.c draws which state follows which. */
enum slot_state {
    SLOT_ABSENT,  /* nothing has come */
    SLOT_COMING,  /* some fragments are there */
    SLOT_WHOLE,   /* all of it is there, or it was a request */
    SLOT_REFUSED, /* it came and is not kept: an error mark, a mismatch, or the round has a verdict */
    SLOT_DROPPED, /* it was dropped for want of memory, and is to be asked for again */
    SLOT_AGAIN,   /* it has been asked for again */
    SLOT_OFFERED, /* it is to be asked for once all ranks have come */
    SLOT_SAID,    /* no push is here: its rank has said how much of the result it has */
    SLOT_BROKEN,  /* its connection has ended; what had come by then is here */
    SLOT_JOINED,  /* its rank has joined and will not push: zeros stand for it, and it is owed no answer */
    SLOT_STATES
};

/* One rank's push of a round. */
struct slot {
    enum slot_state state;  /* changed by tly_slot_change() alone */
    uint8_t *data;          /* owned, from the pool; of a loan: borrowed, while the loan is held */
    struct tly_loan *loan;  /* owned, instead of data: the push is read in its rank's memory */
    uint32_t start, filled; /* bytes: the push is wanted from start on, and has come up to filled */
    uint32_t charge;        /* bytes of its rank's window; 0 once given back */
    bool quiet;             /* its rank does not want the result */
    bool withdrawn;   /* its rank has taken it back while pieces were being summed: forgotten after them */
    uint32_t have;    /* SLOT_SAID: bytes of the result that its rank has, */
    bool whole;       /* or all of them */
    uint32_t session; /* number of the session over which its rank last spoke of the round */
    uint64_t spec;    /* hash of what the rank means by the tensor */
    char *text;       /* owned: the spec in words, once its rank was asked for it */
};

/* What one rank is to be sent of a round. */
struct answer {
    struct round *round;
    uint32_t sent;   /* bytes */
    uint32_t on_way; /* fragments that the medium has not completed: it may still read them */
    bool queued, done;
    bool held;     /* the connection was lost: its rank must first say what it has */
    bool received; /* its rank has it, or will never ask for it */
    bool owed;     /* counted in its rank's burden */
};

/* A range of a sum, for a thread of the crew. */
struct piece {
    struct tly_task task;
    struct tly_job *job;
    struct round *round;
    uint32_t from, to;
};

enum { PIECES = 8 };

/* The nesting of a sum. */
struct tree {
    int groups;
    int *group_size; /* owned */
    uint32_t *order; /* owned: rank of each leaf */
};

/* The ranks that take part in a round.  One list is one object, which lives as long as the job. */
struct members {
    struct tly_list node; /* in job->lists */
    uint32_t count;
    uint32_t *rank;      /* owned: in the group's order */
    struct tree tree[2]; /* [1] for 16-bit types */
};

/* One part in one round of a tensor.  Allocated with its slots and answers behind it. */
struct round {
    struct tly_list node;  /* in job->incomplete, by age, until it is complete */
    uint64_t id;           /* key of the store */
    struct tly_frame head; /* of the first push; all ranks must agree on it */
    const struct tly_kind *kind;
    const struct members *who;  /* contributors; where ranks disagree about them, all that anybody names */
    uint32_t opener;            /* the rank whose burden it is; TLY_NO_PEER once all have come */
    uint32_t arrived;           /* slots of contributors that are not SLOT_ABSENT, */
    uint32_t joined;            /* and those of them that are SLOT_JOINED */
    uint32_t summed, length;    /* bytes of the result: ready, in all */
    bool complete;              /* the result is whole, or there is a verdict */
    bool waits;                 /* its kind has said that it may not start yet */
    bool refused;               /* a push of it is not kept: a verdict is on the way */
    struct piece piece[PIECES]; /* the crew's share of the work */
    uint32_t
        pieces_left; /* pieces that the crew has not done; until it has, nobody else touches data or result */
    uint32_t summing_to;   /* bytes of the result that are ready then */
    uint8_t *result;       /* one of the slots' data, or owned */
    uint32_t result_room;  /* bytes for which the pool gave it */
    bool restored;         /* a rank had some of it from another service */
    uint64_t order;        /* counts rounds as their results begin; tie-break among answers */
    uint64_t age;          /* counts rounds as they are opened */
    uint32_t received;     /* answers that are received */
    uint32_t references;   /* deliveries and letters that point here, and the store */
    int64_t born, warn_at; /* awake clock */
    int64_t mismatch_at;   /* awake clock: specs differed first; 0: they do not */
    int64_t since;         /* awake clock: a rank that minds has begun to wait for the others; 0: none has */
    bool asked;            /* the ranks have been asked for their specs in words */
    bool said;             /* some slots are, or were, SLOT_SAID */
    bool had;              /* a rank has something of its result, or its verdict */
    bool resolved;         /* after `said`: what is missing has been asked for */
    uint32_t base;         /* bytes of the result that some rank has: they are not summed again */
    uint32_t holder;       /* the lowest rank that has them; it sends them for those who lack them */
    uint32_t told_in;      /* the epoch in which ranks last said so */
    int verdict_err;
    char *verdict;   /* owned */
    int64_t decided; /* awake clock: when it got the verdict */
    struct answer *answers;
    struct slot slots[];
};

/* What the service keeps for a rank's sake.  It is bounded, because an admitted rank may mean ill, and it outlives the rank's
 * connections, because such a rank may connect again and again. */
struct burden {
    uint32_t opened; /* rounds that it has opened and that not all ranks have pushed */
    uint32_t owed;   /* rounds whose answer it has not confirmed */
    uint32_t lists;  /* groups that it was the first to tell, */
    uint32_t named;  /* and the ranks in them */
};

/* What a rank said last about having joined (tally_join).  Outlives its connections. */
struct joined {
    bool on;
    struct tly_map rounds; /* key of a tensor -> how often it had submitted that, as a pointer */
    bool coming;           /* that list is still coming, */
    uint32_t session;      /* over this session */
};

/* One rank's connection. */
struct session {
    struct tly_list node; /* in house->lobby until the secret is proved, then in job->sessions */
    struct tly_house *house;
    struct tly_job *job; /* NULL: not said yet, or unknown here */
    struct tly_link *link;
    uint32_t rank;
    uint32_t id;                /* counts sessions, from 1 */
    uint32_t done_epoch;        /* its rank has said what it has in doubt since this epoch began */
    bool proved;                /* its peer knows the job's secret */
    bool watcher;               /* not a rank: asks for the status, or measures before the job begins */
    struct tly_meter_flow flow; /* of a watcher that measures */
    bool left;                  /* has said goodbye */
    struct tly_map groups;      /* number -> struct members, as its rank has told */
    uint32_t taken;             /* bytes of the fragment under way that are counted already */
    uint64_t pushed, accepted, granted, answered; /* charge bytes */
    uint32_t lacking;          /* its slots that are SLOT_ABSENT or SLOT_AGAIN: they wait for its push */
    struct tly_heap ready;     /* answers with bytes to send */
    struct tly_outbox outbox;  /* a letter's tag: the round whose verdict it is (a reference) */
    struct round **deliveries; /* owned ring of rounds answered and not yet stable (references) */
    uint64_t delivered, received, stable; /* counts; the ring holds [stable, delivered) */
    uint64_t
        told; /* deliveries that the rank says it has; past `received` while the medium still reads them */
    uint32_t ring_room;
};

/* What jobs share: see house.h. */
struct tly_house {
    struct tly_loop *loop, own_loop;
    bool own_thread;
    pthread_t thread;
    struct tly_hook hook;
    struct tly_listener *listener;
    struct tly_crew crew;
    int node; /* the NUMA node of the loop's thread and its data; -1: there is only one */
    struct tly_budget budget;
    struct tly_list jobs;               /* of struct tly_job; borrowed */
    struct tly_list lobby;              /* of struct session: connections that have not proved the secret */
    uint8_t decoy[TLY_FRAME_KEY_BYTES]; /* key of the incarnations of jobs that are not here */
    const struct tly_params *params;    /* borrowed */
};

/* One job's identity and state: see job.h. */
struct tly_job {
    struct tly_list node; /* in house->jobs */
    struct tly_house *house;
    struct tly_loop *loop; /* the house's */
    struct tly_hook hook;
    struct tly_identity identity;
    uint64_t incarnation;
    uint32_t fragment_bytes; /* less of a result is not sent */
    int64_t dead_ns, late_ns;
    struct tly_list sessions;

    bool mortal;                    /* may die alone: a tallyd's */
    bool redo_waits;                /* rounds wait for memory for their results */
    bool restore_waits;             /* so do rounds whose results come from a rank (redo.c) */
    uint32_t sessions_seen;         /* counts sessions of ranks */
    uint32_t ranks;                 /* 0: no epoch yet */
    uint32_t left;                  /* ranks that are gone */
    uint64_t part_bytes, part_most; /* longest part of the newest epoch, and of any */
    bool window_fixed;              /* the user has set the window */
    uint64_t first_window;          /* charge bytes that a new connection may push */
    uint64_t window_bytes;          /* charge bytes that may be pushed and not answered now */
    atomic_ullong news;       /* part_bytes and services with a share << 32 of an epoch that has begun, from
                                       * another thread (release); taken by the loop (acquire); 0: none */
    uint32_t pace_bytes;      /* counts go alone after so many bytes of news */
    struct session **by_rank; /* owned array, borrowed sessions */
    bool *gone;               /* owned array: ranks that have said goodbye, connected or not */
    struct burden *burden;    /* owned array, of each rank */
    struct joined *joined;    /* owned array, of each rank */
    uint32_t joined_count;    /* entries of `joined` that are on */
    uint32_t joins;           /* how often all ranks have joined */
    const uint8_t *zeros;     /* a part of zeros, mapped once a rank has joined; takes no memory */
    uint32_t *machine;        /* owned array: of each rank */
    bool teams;               /* ranks of a machine may push together */
    uint32_t most_opened, most_owed; /* bounds of a burden; past most_owed the rank's window stays shut */
    uint32_t window_rounds;          /* least pushes that fill a window */
    uint32_t watchers;               /* sessions of watchers */
    struct members *all;             /* borrowed from lists */
    struct tly_list lists;           /* of struct members; owned */
    struct tly_map pairs;            /* number -> struct members, borrowed */
    struct tly_meter meter;

    struct tly_map store;       /* rounds by id */
    struct tly_list incomplete; /* rounds by age */
    uint32_t mismatches;        /* rounds with mismatch_at */
    uint32_t dropped_slots;     /* slots that are SLOT_DROPPED */
    uint32_t waiting;           /* rounds with `waits` */
    uint32_t restored;          /* rounds with `restored` */
    uint64_t next_order, next_age;
    struct tly_quota quota;
    struct tly_service_facts facts;
    struct tly_event quiet; /* the last session has ended */

    const struct tly_params *params; /* borrowed */
    struct tly_trace *trace;         /* owned; NULL: no timeline is wanted */
    atomic_bool write_trace;         /* somebody wants it now (release); the loop sees it (acquire) */
};

static inline bool tly_round_all_arrived(const struct round *r)
{
    return r->arrived == r->who->count;
}

/* Its rank has pushed or said something of the round. */
static inline bool tly_slot_has_come(const struct slot *slot)
{
    return slot->state != SLOT_ABSENT && slot->state != SLOT_JOINED;
}

/* A rank's push of a round, or the round itself (TLY_NO_PEER), has come to a stage of the timeline.  Parts between
 * two ranks have numbers of their own, which the timeline could not tell apart. */
static inline void tly_round_stamp(const struct tly_job *job, const struct round *r, enum tly_stage stage,
                                   uint32_t rank)
{
    if (r->head.group & TLY_PAIR)
        return;
    tly_stamp(job->trace, stage, rank, r->head.key, r->head.round, r->head.part, r->head.length);
}

/* --- slot.c --- */
/* The one place where a slot changes its state.  Keeps job->dropped_slots and the sessions' `lacking` true. */
void tly_slot_change(struct tly_job *job, struct round *r, uint32_t rank, enum slot_state to);

/* The slot begins or ceases to count in its session's `lacking`: its rank takes part, or the round goes. */
void tly_slot_enter(struct tly_job *job, const struct round *r, uint32_t rank);
void tly_slot_leave(struct tly_job *job, const struct round *r, uint32_t rank);

/* --- session.c --- */
/* Send a control frame.  verdict: the round whose answer it is, or NULL. */
int tly_session_post(struct session *p, const struct tly_frame *f, const void *data, size_t len,
                     struct round *verdict);
/* Have the next header tell the counts.  bytes: how much of that is news to the rank. */
void tly_session_counts(struct session *p, uint32_t bytes);

/* --- members.c --- */
/* The ranks for which a frame's group stands on this connection; NULL: unknown, or its rank is not among them. */
const struct members *tly_members_of(struct session *p, uint32_t group);
/* GROUP has come.  -EPROTO with *why: it is no list, or one too many; -ENOMEM. */
int tly_members_learn(struct session *p, const struct tly_frame *f, const void *data, const char **why);
int tly_members_begin(struct tly_job *job, const struct tly_roster *roster);
void tly_members_finish(struct tly_job *job);
bool tly_members_have(const struct members *m, uint32_t rank);
/* The ranks of both, as a list that counts among this rank's; NULL: out of memory, or one too many. */
const struct members *tly_members_join(struct session *p, const struct members *a, const struct members *b);

/* --- window.c --- */
/* Has the rank opened so many rounds to which others have not come that it may open no more? */
bool tly_window_crowded(const struct session *p);
/* One rank more has pushed the round or spoken of it. */
void tly_window_arrived(struct tly_job *job, struct round *r);
/* The round is nobody's burden any more. */
void tly_window_lift(struct tly_job *job, struct round *r);
/* The round has an answer that this rank has not confirmed; it has. */
void tly_window_owe(struct tly_job *job, struct round *r, uint32_t rank);
void tly_window_confirm(struct tly_job *job, struct round *r, uint32_t rank);
/* Open the rank's window as far as it may be open. */
void tly_window_grant(struct session *p);
/* The same for all ranks but this one (NULL: for all): they may have waited behind what only a new round can free. */
void tly_window_grant_others(struct tly_job *job, const struct session *p);
/* A push of so many bytes begins and is not wanted: the window is as before. */
void tly_window_pass(struct session *p, uint32_t length);
/* The slot's push needs no window any more. */
void tly_window_give_back(struct tly_job *job, uint32_t rank, struct slot *slot);
/* `bytes` of a part of `length` have been taken off the connection. */
void tly_window_accept(struct session *p, uint32_t bytes, uint32_t length);

/* --- store.c --- */
struct round *tly_store_find(struct tly_job *job, const struct tly_frame *f);
/* A new round for this push, with a reference for the store; NULL: out of memory, or another one has its id. */
struct round *tly_store_add(struct tly_job *job, const struct tly_frame *f, const struct members *who);
void tly_store_unref(struct tly_job *job, struct round *r);
/* The round is complete: it leaves the list of those that are not. */
void tly_store_complete(struct tly_job *job, struct round *r);
/* What is ready of the answer for this rank is not sent. */
void tly_store_unqueue(struct tly_job *job, struct round *r, uint32_t rank);
/* All ranks have the answer, or none wants it: forget the round. */
void tly_store_remove(struct tly_job *job, struct round *r);
/* Look at all rounds; any may go while one looks.  -ENOMEM. */
int tly_store_each(struct tly_job *job, void (*look)(struct tly_job *job, struct round *r, void *arg),
                   void *arg);
/* In checked builds: counts agree with slots. */
void tly_store_check(const struct tly_job *job);

/* --- memory.c --- */
/* Memory for a slot of the round, from rounds with a lesser claim if need be; NULL: there is none now. */
uint8_t *tly_memory_take(struct tly_job *job, struct round *r, uint32_t bytes);
/* The same past the limit, from nobody; NULL: the machine has none. */
uint8_t *tly_memory_take_always(struct tly_job *job, uint32_t bytes);
/* Room for a result that some ranks have from a service that is gone.  False: not now, until others have ended. */
bool tly_memory_take_result(struct tly_job *job, struct round *r);
/* Another job has reserved what this one uses beyond its own reservation: give it up, from rounds with the least claim. */
void tly_memory_yield(struct tly_job *job);
/* Forget what is here of a push, with its memory or loan; its state stays. */
void tly_memory_empty(struct tly_job *job, struct round *r, uint32_t rank);
/* There is no memory for this push: it is to come again. */
void tly_memory_drop(struct tly_job *job, struct round *r, uint32_t rank);
/* The round fails: no data is kept, but every push counts as arrived. */
void tly_memory_forget_slots(struct tly_job *job, struct round *r);
/* The result is whole: inputs are not needed any more. */
void tly_memory_release_inputs(struct tly_job *job, struct round *r);
/* The job ends: nothing is kept of the round. */
void tly_memory_close(struct tly_job *job, struct round *r);
/* Ask a rank for its push from slot->start on. */
void tly_memory_ask(struct session *p, struct round *r);
/* Ask for what was dropped, as far as memory goes. */
void tly_memory_ask_again(struct tly_job *job);
/* All ranks have come: what is only offered is wanted now.  False: nothing was. */
bool tly_memory_want_offers(struct tly_job *job, struct round *r);
/* Inputs that are read in their ranks' memory must not move meanwhile.  False: a rank is gone, and will be missed. */
bool tly_memory_hold_loans(struct tly_job *job, struct round *r);
void tly_memory_drop_loans(struct tly_job *job, struct round *r);
/* Return the loans of connections that have ended, unless the crew reads them. */
void tly_memory_break_loans(struct tly_job *job, struct round *r);

/* --- joined.c --- */
/* Ranks that take no part in the round are in it as SLOT_JOINED. */
void tly_joined_mark(struct tly_job *job, struct round *r);
/* One of them comes all the same, because its machine's ranks do something else than the others. */
void tly_joined_comes(struct session *p, struct round *r);
/* Does the round lack a rank that has joined, and cannot do without it? */
bool tly_joined_is_missed(const struct tly_job *job, const struct round *r, uint32_t rank);
/* Messages wait for a rank that has joined, for it will be there again. */
bool tly_joined_may_miss(const struct round *r);
void tly_joined_forget(struct tly_job *job, uint32_t rank);
void tly_joined_finish(struct tly_job *job);

/* --- verdict.c --- */
/* The round fails with this sentence, unless it has ended; not before the crew has left it. */
void tly_verdict_decide(struct tly_job *job, struct round *r, int err, const char *sentence);
/* Two specs for one round. */
void tly_verdict_differs(struct tly_job *job, struct round *r);
/* A push has come for a round that has failed or is about to. */
void tly_verdict_arrived(struct session *p, struct round *r);
/* A rank's spec in words; owned. */
void tly_verdict_text(struct session *p, struct round *r, char *text);
/* A rank comes to a round that has ended without it: the others' group is another. */
void tly_verdict_too_late(struct session *p, struct round *r);
/* A service that is gone has decided it already. */
void tly_verdict_known(struct session *p, struct round *r, int err, const char *sentence);
void tly_verdict_refused(struct session *p, struct round *r, bool cancelled, const char *reason);
/* A rank takes back what it has pushed: nothing happens if all ranks have. */
void tly_verdict_cancelled(struct session *p, struct round *r, const char *reason);
/* Rounds that lack this rank, which has left. */
void tly_verdict_left(struct tly_job *job, uint32_t rank);
/* The round may lack ranks that have joined, and not go on without them. */
void tly_verdict_joined(struct tly_job *job, struct round *r);
/* Say who is late: to all who wait, or to one who asks. */
void tly_verdict_late(struct tly_job *job, struct round *r, const struct session *asker);
void tly_verdict_tick(struct tly_job *job);
/* For how long (ns of the awake clock) the round that waits longest has waited, and for what; 0 and "" if none. */
int64_t tly_verdict_waits(struct tly_job *job, char *out, size_t len);

/* --- answers.c --- */
/* Bytes of the result that this rank is sent. */
uint32_t tly_answers_length(const struct round *r, uint32_t rank);
/* Queue the answers that have something to send. */
void tly_answers_queue(struct tly_job *job, struct round *r);
/* The next fragment of the most urgent one. */
bool tly_answers_next(struct session *p, struct tly_outgoing *out);
/* Room for one more delivery; false: out of memory. */
bool tly_answers_reserve(struct session *p);
/* The round's answer, a result or a verdict, has gone out whole. */
void tly_answers_delivered(struct session *p, struct round *r);
/* The rank has the answer.  True: it was the last, and the round is no more. */
bool tly_answers_confirmed(struct tly_job *job, struct round *r, uint32_t rank);
/* The rank says that it has so many of its answers.  One that the medium still reads is kept until tly_answers_sent(). */
void tly_answers_received(struct session *p, uint64_t count);
/* The medium has completed a fragment of this answer.  The answer may be gone afterwards. */
void tly_answers_sent(struct session *p, struct answer *a);
/* Forget deliveries that have become stable. */
void tly_answers_settle(struct tly_job *job);

/* --- round.c --- */
/* who: the ranks for which the frame's group stands.  NULL: out of memory. */
struct round *tly_round_open(struct tly_job *job, const struct tly_frame *f, const struct members *who);
/* The rank whose push or word this is waits for the others from now on, unless it is patient. */
void tly_round_awaited(struct tly_job *job, struct round *r, const struct tly_frame *f);
/* The rank names other contributors than those before it did.  False: out of memory, and its connection ends. */
bool tly_round_widen(struct session *p, struct round *r, const struct members *who);
/* The header of a push: a first fragment takes the rank's slot, all say where their payload belongs. */
void tly_round_push(struct session *p, struct round *r, const struct tly_frame *f, const struct members *who,
                    struct tly_landing *land);
/* A rank's push is none any more; the round goes with the last. */
void tly_round_withdraw(struct tly_job *job, struct round *r, uint32_t rank);
/* Contributors' pushes are all there. */
bool tly_round_is_whole(const struct round *r);
/* A rank does not want its push summed any more. */
void tly_round_cancel(struct session *p, struct round *r);
void tly_round_close_all(struct tly_job *job);

/* --- progress.c --- */
/* So many more bytes of a push are in its slot; none, for a request. */
void tly_progress_landed(struct session *p, struct round *r, const struct tly_frame *f, uint32_t bytes);
/* Make what can be made of the result, and send it. */
void tly_progress(struct tly_job *job, struct round *r);
/* The result is there up to byte `to`. */
void tly_progress_reached(struct tly_job *job, struct round *r, uint32_t to);
/* An offer has come, for which rounds may wait. */
void tly_progress_offered(struct tly_job *job);
/* Memory may be there for rounds that wait for it. */
void tly_progress_all(struct tly_job *job);

/* --- redo.c --- */
/* The connection of a rank has ended: what has come of its pushes stays; what it is to be sent waits for its word. */
void tly_redo_detach(struct session *p);
/* HAVE: so much of the result has landed there.  data: of a verdict (MARK). */
int tly_redo_have(struct session *p, const struct tly_frame *f, const void *data, const char **why);
/* DONE: that was all. */
void tly_redo_done(struct session *p, const struct tly_frame *f);
/* FINAL: what it has of the result. */
void tly_redo_final(struct session *p, const struct tly_frame *f, const void *data);
/* A rank has pushed, said something or left: see whether all is known now. */
void tly_redo_look(struct tly_job *job, struct round *r);
void tly_redo_look_at_all(struct tly_job *job);
/* A rank has left the job: nothing more comes of it. */
void tly_redo_left(struct tly_job *job, uint32_t rank);
/* There may be room for results again. */
void tly_redo_restore(struct tly_job *job);

/* --- joining.c --- */
/* JOINED has come.  -EPROTO (*why), -ENOMEM. */
int tly_joining_learn(struct session *p, const struct tly_frame *f, const void *data, const char **why);

/* --- frames.c --- */
/* The link's calls for a frame (transport/transport.h); user: a session. */
int tly_frames_header(void *user, struct tly_link *l, const struct tly_frame *f, struct tly_landing *land,
                      const char **why);
void tly_frames_landed(void *user, struct tly_link *l, const struct tly_frame *f, uint32_t bytes);
int tly_frames_frame(void *user, struct tly_link *l, const struct tly_frame *f, void *data, const char **why);

/* --- peers.c --- */
/* A connection came: make it a session in the house's lobby, which is config->user. */
int tly_peers_accept(struct tly_house *house, struct tly_link_config *config);
/* The job has begun, or a rank has come: it is one of the job's from now on. */
void tly_peers_admit(struct session *p);
void tly_peers_destroy(struct session *p);

/* --- facts.c --- */
/* Count what has gone over the session's connection. */
void tly_facts_add_bytes(struct tly_service_facts *facts, const struct session *p);

/* --- service.c --- */
struct tly_job *tly_service_job(const struct tly_service *s);

#endif
