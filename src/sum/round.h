/* round.h - one part in one round of a tensor, from the first push to the result.  Owner: the loop, but for what the
 * crew sums (crew.h). */
#ifndef TLY_SUM_ROUND_H
#define TLY_SUM_ROUND_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/list.h"
#include "ops/rule.h"
#include "sum/crew.h"
#include "sum/internal.h"
#include "sum/members.h"
#include "sum/slot.h"
#include "trace/timeline.h"
#include "trace/trace.h"
#include "wire/frame.h"

struct tly_kept;
struct tly_session;
struct tly_landing;

/* What one rank is to be sent of a round. */
struct tly_answer {
    struct tly_round *round;
    uint32_t sent;   /* bytes */
    uint32_t on_way; /* fragments that the medium has not completed: it may still read them */
    bool queued, done;
    bool held;     /* the connection was lost: its rank must first say what it has */
    bool received; /* its rank has it, or will never ask for it */
    bool owed;     /* counted in its rank's burden */
    bool told;     /* the state of its values has gone out (wire/kept.h) */
};

/* A range of a sum, for a thread of the crew. */
struct tly_sum_piece {
    struct tly_crew_task task;
    struct tly_job *job;
    struct tly_round *round;
    uint32_t from, to;
};

enum { PIECES = 8 };

/* One part in one round of a tensor.  Allocated with its slots and answers behind it. */
struct tly_round {
    struct tly_list node;  /* in job->incomplete, by age, until it is complete */
    uint64_t id;           /* key of the store */
    struct tly_frame head; /* of the first push; all ranks must agree on it */
    const struct tly_rule *rule;
    struct tly_kept
        *kept; /* borrowed: its part of a shared tensor, from its application until it is complete */
    const struct tly_members *who; /* contributors; where ranks disagree about them, all that anybody names */
    uint32_t opener;               /* the rank whose burden it is; TLY_NO_PEER once all have come */
    uint32_t arrived;              /* slots of contributors that are not SLOT_ABSENT, */
    uint32_t joined;               /* and those of them that are SLOT_JOINED */
    uint32_t summed, length;       /* bytes of the result: ready, in all */
    bool complete;                 /* the result is whole, or there is a verdict */
    bool waits;                    /* its rule says that it may not start yet */
    bool refused;                  /* a push of it is not kept: a verdict is on the way */
    struct tly_sum_piece piece[PIECES]; /* the crew's share of the work */
    uint32_t
        pieces_left; /* pieces that the crew has not done; until it has, nobody else touches data or result */
    atomic_uint unread;  /* pieces whose inputs the crew still reads (acq_rel) */
    uint32_t summing_to; /* bytes of the result that are ready then */
    uint8_t *result;     /* one of the slots' data, or owned */
    uint8_t *state;      /* owned: of a shared tensor's values, that of the result (wire/kept.h); else NULL */
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
    struct tly_answer *answers;
    struct tly_slot slots[];
};

static inline bool tly_round_all_arrived(const struct tly_round *r)
{
    return r->arrived == r->who->count;
}

/* A rank's push of a round, or the round itself (TLY_NO_PEER), has come to a moment of the timeline.  Parts between
 * two ranks have numbers of their own, which the timeline could not tell apart. */
static inline void tly_round_stamp(const struct tly_job *job, const struct tly_round *r,
                                   enum tly_moment stage, uint32_t rank)
{
    if (r->head.group & TLY_PAIR)
        return;
    tly_stamp(job->trace, stage, rank, r->head.key, r->head.round, r->head.part, r->head.length);
}

/* store.c */
struct tly_round *tly_store_find(struct tly_job *job, const struct tly_frame *f);
/* A new round for this push, with a reference for the store; NULL: out of memory, or another one has its id. */
struct tly_round *tly_store_add(struct tly_job *job, const struct tly_frame *f,
                                const struct tly_members *who);
void tly_store_unref(struct tly_job *job, struct tly_round *r);
/* The round is complete: it leaves the list of those that are not. */
void tly_store_complete(struct tly_job *job, struct tly_round *r);
/* Do not send what is ready of this rank's answer. */
void tly_store_unqueue(struct tly_job *job, struct tly_round *r, uint32_t rank);
/* All ranks have the answer, or none wants it: forget the round. */
void tly_store_remove(struct tly_job *job, struct tly_round *r);
/* Look at all rounds; any may go while one looks.  -ENOMEM. */
int tly_store_each(struct tly_job *job, void (*look)(struct tly_job *job, struct tly_round *r, void *arg),
                   void *arg);
/* In checked builds: counts agree with slots. */
void tly_store_check(const struct tly_job *job);

/* joined.c */
/* Ranks that take no part in the round are in it as SLOT_JOINED. */
void tly_joined_mark(struct tly_job *job, struct tly_round *r);
/* One of them comes all the same, because its machine's ranks do something else than the others. */
void tly_joined_comes(struct tly_session *p, struct tly_round *r);
/* Does the round lack a rank that has joined, and cannot do without it? */
bool tly_joined_is_missed(const struct tly_job *job, const struct tly_round *r, uint32_t rank);
/* Messages wait for a rank that has joined, for it will be there again. */
bool tly_joined_may_miss(const struct tly_round *r);
void tly_joined_forget(struct tly_job *job, uint32_t rank);
void tly_joined_finish(struct tly_job *job);

/* round.c */
/* who: the ranks for which the frame's group stands.  NULL: out of memory. */
struct tly_round *tly_round_open(struct tly_job *job, const struct tly_frame *f,
                                 const struct tly_members *who);
/* The rank whose push or word this is waits for the others from now on, unless it is patient. */
void tly_round_awaited(struct tly_job *job, struct tly_round *r, const struct tly_frame *f);
/* The rank names other contributors than those before it did.  False: out of memory, and its connection ends. */
bool tly_round_widen(struct tly_session *p, struct tly_round *r, const struct tly_members *who);
/* The header of a push: a first fragment takes the rank's slot, all say where their payload belongs. */
void tly_round_push(struct tly_session *p, struct tly_round *r, const struct tly_frame *f,
                    const struct tly_members *who, struct tly_landing *land);
/* A rank's push is none any more; the round goes with the last. */
void tly_round_withdraw(struct tly_job *job, struct tly_round *r, uint32_t rank);
/* Contributors' pushes are all there. */
bool tly_round_is_whole(const struct tly_round *r);
/* A rank does not want its push summed any more. */
void tly_round_cancel(struct tly_session *p, struct tly_round *r);
void tly_round_close_all(struct tly_job *job);

/* progress.c */
/* So many more bytes of a push are in its slot; none, for a request. */
void tly_progress_landed(struct tly_session *p, struct tly_round *r, const struct tly_frame *f,
                         uint32_t bytes);
/* Make what can be made of the result, and send it. */
void tly_progress(struct tly_job *job, struct tly_round *r);
/* The result is there up to byte `to`. */
void tly_progress_reached(struct tly_job *job, struct tly_round *r, uint32_t to);
/* An offer has come, or a rank has joined or left: look at all rounds that wait. */
void tly_progress_waiting(struct tly_job *job);
/* The values of a part of a shared tensor have come, or a clock there has moved: look at its rounds that wait. */
void tly_progress_kept(struct tly_job *job, const struct tly_kept *s);
/* Memory may be there for copies that wait for it. */
void tly_progress_copies(struct tly_job *job);
/* The same for all rounds that wait for it. */
void tly_progress_all(struct tly_job *job);

#endif
