/* internal.h - what the files of the summation service share: service.c (life, sessions, frames), members.c (who
 * takes part), round.c (arrivals to release), redo.c (what is said after a loss) and verdict.c (disagreement, lateness).
 */
#ifndef TLY_SUM_INTERNAL_H
#define TLY_SUM_INTERNAL_H

#include "base/event.h"
#include "base/heap.h"
#include "base/list.h"
#include "base/map.h"
#include "join/measure.h"
#include "reduce/reduce.h"
#include "sum/crew.h"
#include "sum/kind.h"
#include "sum/pool.h"
#include "sum/service.h"
#include "sum/straggler.h"
#include "trace/trace.h"
#include "transport/outbox.h"
#include "transport/transport.h"

/* A push costs its window at least this: bookkeeping is memory too. */
enum { TLY_LEAST_CHARGE = 256 };

static inline uint32_t tly_charge(uint32_t length)
{
    return length < TLY_LEAST_CHARGE ? TLY_LEAST_CHARGE : length;
}

enum slot_state {
    SLOT_ABSENT,  /* nothing has come */
    SLOT_COMING,  /* some fragments are there */
    SLOT_WHOLE,   /* all of it, or a request */
    SLOT_REFUSED, /* came, but is not kept: mark, mismatch, verdict */
    SLOT_DROPPED, /* was dropped for want of memory: to be asked for again */
    SLOT_AGAIN,   /* has been asked for again */
    SLOT_OFFERED, /* to be asked for once all have come */
    SLOT_SAID,    /* its rank has said how much of the result it has; no push of it is here */
    SLOT_BROKEN,  /* its connection ended; what had come by then is here */
    SLOT_JOINED,  /* its rank has joined and will not push: zeros stand for it, and it is owed no answer */
};

/* One rank's part of a round. */
struct slot {
    enum slot_state state;
    uint8_t *data;          /* owned, from the pool; of a loan: while it is held */
    struct tly_loan *loan;  /* owned, instead of data: it is read where its rank has it */
    uint32_t start, filled; /* the push is wanted from start on, and has come up to filled */
    uint32_t charge;        /* of its window; 0 once given back */
    bool quiet;             /* its rank does not want the result */
    bool withdrawn;         /* it does not send the rest: to be forgotten once no piece is being summed */
    uint32_t have;          /* SAID: so much of the result, */
    bool whole;             /* or all of it */
    uint32_t session;       /* in which its rank has last spoken of the round */
    uint64_t spec;
    int64_t busy; /* how long its rank's pushes had been under way when the round was opened */
    char *text;   /* owned: its spec in words, once asked for */
};

/* What one rank is to be sent of a round. */
struct answer {
    struct round *round;
    uint32_t sent;
    uint32_t on_way; /* fragments of which the kernel does not have all */
    bool queued, done;
    bool held;     /* the connection was lost: its rank must first say what it has */
    bool received; /* by its rank */
    bool owed;     /* counted in its rank's burden */
};

/* A range of a sum, for a thread of the crew. */
struct piece {
    struct tly_task task;
    struct tly_service *service;
    struct round *round;
    uint32_t from, to;
};

enum { PIECES = 8 };

/* How a sum is nested. */
struct tree {
    int groups;
    int *group_size; /* owned */
    uint32_t *order; /* owned: rank of each leaf */
};

/* The ranks that take part in a round.  One list is one object, which lives as long as the job. */
struct members {
    struct tly_list node; /* in service->lists */
    uint32_t count;
    uint32_t *rank;      /* owned: in the group's order */
    struct tree tree[2]; /* [1] for 16-bit types */
};

/* One part in one round of a tensor.  Allocated with its slots and answers behind it. */
struct round {
    struct tly_list node;  /* in service->incomplete by age while not summed */
    uint64_t id;           /* key of the store */
    struct tly_frame head; /* of the first push: what all must agree on */
    const struct tly_kind *kind;
    const struct members *who; /* contributors; where ranks disagree about them, all that anybody names */
    uint32_t opener;           /* the rank whose burden it is; TLY_NO_PEER once all have come */
    uint32_t arrived; /* ranks whose push has begun to come, refused ones too; and those that have joined: */
    uint32_t joined;  /* slots that are SLOT_JOINED */
    uint32_t summed, length; /* of the result: bytes ready, bytes in all */
    bool complete;
    bool waits;                       /* its kind has said that it may not start yet */
    bool refused;                     /* a push of it is not kept: its verdict is on the way */
    struct piece piece[PIECES];       /* the crew's share of the work */
    uint32_t pieces_left, summing_to; /* pieces not done: the slots may not be touched; then summed is this */
    uint8_t *result;                  /* one of the slots' data, or own */
    uint32_t result_room;             /* what the pool gave for it */
    bool restored;                    /* a rank had some of it from another service */
    uint64_t order;                   /* of the first byte summed */
    uint64_t age;                     /* of its first push, in order */
    uint32_t received;                /* ranks that have the answer */
    uint32_t references;              /* deliveries that point here, and the store */
    int64_t opened;                   /* monotonic; 0: no push_pull */
    int64_t born, warn_at, mismatch_at; /* awake clock; 0: not */
    int64_t since;                      /* likewise: a rank waits for the others that minds it; 0: none */
    bool asked;                         /* for texts */
    bool said;                          /* some slots are, or were, SLOT_SAID */
    bool had;                           /* a rank has something of its result, or its verdict */
    bool resolved;                      /* all has been asked for */
    uint32_t base;                      /* up to here ranks have the result: it is not summed again */
    uint32_t holder;                    /* the lowest of them; it sends what others lack */
    uint32_t told_in;                   /* the epoch in which that was said */
    int verdict_err;
    char *verdict;   /* owned */
    int64_t decided; /* awake clock: when it got that */
    struct answer *answers;
    struct slot slots[];
};

/* What is kept for a rank's sake.  Bounded, for a rank that was admitted may mean ill; outlives its connections, for it
 * may come again and again. */
struct burden {
    uint32_t opened; /* rounds that it has opened, and to which not all have come */
    uint32_t owed;   /* rounds of which it has not confirmed the answer */
    uint32_t lists;  /* of groups, which it was the first to tell, */
    uint32_t named;  /* and the ranks in them */
};

/* A rank that has joined (tally_join), as it said last.  Outlives its connections. */
struct joined {
    bool on;
    struct tly_map rounds; /* of the tensors that it had submitted: key -> how often, as a pointer */
    bool coming;           /* the list of these is still coming, over this session */
    uint32_t session;
};

/* One rank's connection. */
struct session {
    struct tly_list node;
    struct tly_service *service;
    struct tly_link *link;
    uint32_t rank;
    uint32_t id;                /* counts sessions, from 1 */
    uint32_t done_epoch;        /* its rank has said all that is in doubt since this epoch began */
    bool watcher;               /* no rank: asks how the service stands, or measures before the job begins */
    struct tly_meter_flow flow; /* of one that measures */
    bool left;                  /* has said goodbye */
    struct tly_map groups;      /* number -> struct members, as this rank has told */
    uint32_t taken;             /* bytes of the push under way that are counted already */
    uint64_t pushed, accepted, granted, answered; /* in charge bytes */
    uint32_t lacking;                     /* slots that wait for a push of this rank: absent or asked again */
    struct tly_heap ready;                /* of answers with bytes to send */
    struct tly_outbox outbox;             /* tags: rounds whose verdict a letter is (references) */
    struct round **deliveries;            /* owned ring of those sent whole and not yet stable; references */
    uint64_t delivered, received, stable; /* counts; the ring holds [stable, delivered) */
    uint32_t ring_room;
};

struct tly_service {
    struct tly_loop *loop, own_loop;
    bool own_thread;
    pthread_t thread;
    struct tly_hook hook;
    struct tly_listener *listener;
    struct tly_identity identity;
    uint64_t incarnation;
    uint32_t fragment_bytes;
    int64_t dead_ns, late_ns;
    struct tly_list sessions;

    bool mortal;                    /* may die alone: a tallyd's */
    bool redo_waits;                /* for memory */
    bool restore_waits;             /* a result that ranks have from a service that is gone finds no room */
    uint32_t sessions_seen;         /* of ranks */
    uint32_t ranks;                 /* 0: no epoch yet */
    uint32_t left;                  /* ranks that have said goodbye */
    uint64_t part_bytes, part_most; /* longest part of the newest epoch, and of any */
    bool window_fixed;
    uint64_t first_window,
        window_bytes;   /* of a new connection; and what may be pushed and not answered now */
    atomic_ullong news; /* part_bytes and services with a share << 32 of an epoch that has begun, from another
                                        * thread (release); taken by the loop (acquire); 0: none */
    uint32_t pace_bytes;      /* counts go alone after so much news */
    struct session **by_rank; /* owned array, borrowed sessions */
    bool *gone;               /* owned array: ranks that have said goodbye, connected or not */
    struct burden *burden;    /* owned array: of each rank */
    struct joined *joined;    /* owned array: of each rank */
    uint32_t joined_count;    /* of them are on */
    uint32_t joins;           /* how often all ranks have joined */
    const uint8_t *zeros;     /* a part of them, mapped once the first rank has joined; takes no memory */
    uint32_t *machine;        /* owned array: of each rank, */
    bool teams;               /* whose ranks may push together */
    uint32_t most_opened;     /* what that may reach */
    uint32_t most_owed;       /* past this its window stays shut */
    uint32_t window_rounds;   /* as many as a window has room for */
    uint32_t watchers;        /* sessions of such */
    struct members *all;      /* borrowed from lists */
    struct tly_list lists;    /* of struct members; owned */
    struct tly_map pairs;     /* number -> struct members, likewise */
    struct tly_meter meter;
    struct tly_straggler straggler;
    char held_up[300];  /* what it found last, in words */
    int64_t held_up_at; /* awake clock; 0: nothing yet */
    struct tly_crew crew;
    int home; /* the NUMA node of the loop's thread and its data; -1: there is only one */

    struct tly_map store;                        /* rounds by id */
    struct tly_list incomplete;                  /* rounds by age */
    uint32_t mismatches, dropped_slots, waiting; /* waiting: rounds that wait for an offer */
    uint32_t restored;                           /* rounds that hold such a result */
    uint64_t next_order, next_age;
    struct tly_pool pool;
    struct tly_service_facts facts;
    struct tly_event quiet;

    const struct tly_params *params; /* borrowed */
    struct tly_trace *trace;         /* owned; NULL: no timeline is wanted */
    atomic_bool write_trace;         /* somebody wants it now (release); the loop sees it (acquire) */
};

/* A rank's push of a round, or the round itself (TLY_NO_PEER), has come to a stage of the timeline.  Parts between
 * two ranks have numbers of their own, which the timeline could not tell apart. */
static inline void tly_round_stamp(const struct tly_service *s, const struct round *r, enum tly_stage stage,
                                   uint32_t rank)
{
    if (r->head.group & TLY_PAIR)
        return;
    tly_stamp(s->trace, stage, rank, r->head.key, r->head.round, r->head.part, r->head.length);
}

/* members.c */
/* Those for which a frame's group stands on this connection, or NULL: unknown, or without the rank. */
const struct members *tly_members_of(struct session *p, uint32_t group);
/* A list has come.  -EPROTO with *why: it is none, or one too many; -ENOMEM. */
int tly_members_learn(struct session *p, const struct tly_frame *f, const void *data, const char **why);
int tly_members_begin(struct tly_service *s, const struct tly_roster *roster);
void tly_members_finish(struct tly_service *s);
bool tly_members_have(const struct members *m, uint32_t rank);
/* Those of both, a list of this rank's making; NULL: out of memory, or one too many. */
const struct members *tly_members_join(struct session *p, const struct members *a, const struct members *b);

/* joined.c: ranks that have joined take no part in rounds that they had not submitted by then.  Sums and barriers of all
 * ranks go on with zeros for them. */
/* JOINED has come.  -EPROTO (*why), -ENOMEM. */
int tly_joined_learn(struct session *p, const struct tly_frame *f, const void *data, const char **why);
/* A round has been opened: ranks that take no part are in it as SLOT_JOINED. */
void tly_joined_mark(struct tly_service *s, struct round *r);
/* One of them comes all the same, as its machine's ranks do something else than the others. */
void tly_joined_comes(struct session *p, struct round *r);
/* Does it lack a rank that has joined, and cannot do without? */
bool tly_joined_is_missed(const struct tly_service *s, const struct round *r, uint32_t rank);
void tly_joined_finish(struct tly_service *s);

/* round.c */
struct round *tly_round_find(struct tly_service *s, const struct tly_frame *f);
/* Has the rank opened so many rounds to which others have not come that it may open no more? */
bool tly_round_crowded(const struct session *p);
/* who: those for which the frame's group stands.  NULL: out of memory. */
struct round *tly_round_open(struct tly_service *s, const struct tly_frame *f, const struct members *who);
void tly_round_push(struct session *p, struct round *r, const struct tly_frame *f, const struct members *who,
                    struct tly_landing *land);
void tly_round_landed(struct session *p, struct round *r, const struct tly_frame *f, uint32_t bytes);
void tly_round_progress(struct tly_service *s, struct round *r);
void tly_round_cancel(struct session *p, struct round *r);
void tly_round_forget_slots(struct tly_service *s, struct round *r);
/* Whose push or word this is waits for the others from now on, unless it is patient. */
void tly_round_awaited(struct tly_service *s, struct round *r, const struct tly_frame *f);
/* One rank more has pushed it or spoken of it. */
void tly_round_arrived(struct tly_service *s, struct round *r);
/* It has an answer, which this rank has not confirmed. */
void tly_round_owe(struct tly_service *s, struct round *r, uint32_t rank);
void tly_round_unref(struct tly_service *s, struct round *r);
bool tly_round_answer(struct session *p, struct tly_outgoing *out);
void tly_round_received(struct session *p, uint64_t count);
void tly_round_settle(struct tly_service *s);
bool tly_round_reserve(struct session *p); /* room for one more delivery; false: out of memory */
void tly_round_delivered(struct session *p, struct round *r);
void tly_round_ask_again(struct tly_service *s);
void tly_round_grant(struct session *p);
/* Room for a result that some ranks have from a service that is gone.  False: not now, until others have ended. */
bool tly_round_take_result(struct tly_service *s, struct round *r);
void tly_round_close_store(struct tly_service *s);
/* The rank names other contributors than those before it did. */
void tly_round_widen(struct session *p, struct round *r, const struct members *who);
/* The result is there up to byte `to`. */
void tly_round_advance(struct tly_service *s, struct round *r, uint32_t to);
/* Its answer to this rank is due again, as far as it is ready. */
void tly_round_queue_answers(struct tly_service *s, struct round *r);
/* Ask a rank for its push from slot->start on. */
void tly_round_ask(struct session *p, struct round *r);
uint32_t tly_round_answer_length(const struct round *r, uint32_t rank);
/* The rank has the answer.  True: it was the last, and the round is no more. */
bool tly_round_has_answer(struct tly_service *s, struct round *r, uint32_t rank);
/* All ranks have it, or none wants it: forget it. */
void tly_round_remove(struct tly_service *s, struct round *r);

/* redo.c */
/* The connection of a rank has ended: what has come of its pushes stays; what it is to be sent waits for its word. */
void tly_redo_detach(struct session *p);
/* Loans of connections that have ended are no more; while the crew read them they had to stay. */
void tly_redo_loans(struct tly_service *s, struct round *r);
/* HAVE: so much of the result has landed there.  `data`: of a verdict (MARK). */
int tly_redo_have(struct session *p, const struct tly_frame *f, const void *data, const char **why);
/* DONE: that was all. */
void tly_redo_done(struct session *p, const struct tly_frame *f);
/* FINAL: what it has of the result. */
void tly_redo_final(struct session *p, const struct tly_frame *f, const void *data);
/* A rank has pushed, said something or left: see whether all is known now. */
void tly_redo_look(struct tly_service *s, struct round *r);
void tly_redo_look_at_all(struct tly_service *s);
/* There may be room for results again. */
void tly_redo_restore(struct tly_service *s);

/* verdict.c */
/* The round fails with this sentence, unless it has ended.  Not before the crew has left it. */
void tly_verdict_decide(struct tly_service *s, struct round *r, int err, const char *sentence);
void tly_verdict_differs(struct tly_service *s, struct round *r);
void tly_verdict_arrived(struct session *p, struct round *r);
void tly_verdict_text(struct session *p, struct round *r, char *text);
/* A rank comes to a round that has ended without it: the others' group is another. */
void tly_verdict_too_late(struct session *p, struct round *r);
/* It has been decided already, by a service that is gone. */
void tly_verdict_known(struct session *p, struct round *r, int err, const char *sentence);
void tly_verdict_refused(struct session *p, struct round *r, bool cancelled, const char *reason);
/* It takes back what it has pushed: nothing if all ranks have. */
void tly_verdict_cancelled(struct session *p, struct round *r, const char *reason);
void tly_verdict_left(struct tly_service *s, uint32_t rank);
/* It may lack ranks that have joined, and be none that goes on without. */
void tly_verdict_joined(struct tly_service *s, struct round *r);
/* Say who is late: to all who wait, or to one who asks. */
void tly_verdict_late(struct tly_service *s, struct round *r, const struct session *asker);
void tly_verdict_tick(struct tly_service *s);
/* For how long (ns of the awake clock) the round that waits longest has waited, and for what; 0 and "" if none. */
int64_t tly_verdict_waits(struct tly_service *s, char *out, size_t len);
void tly_verdict_straggler(struct tly_service *s, const struct tly_finding *f);

/* service.c */
int tly_session_post(struct session *p, const struct tly_frame *f, const void *data, size_t len,
                     struct round *verdict);
void tly_session_counts(struct session *p, uint32_t bytes);

#endif
