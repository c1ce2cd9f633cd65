/* slot.h - a rank's place in a round, and its memory.  Owner: the loop; the crew reads data while it sums. */
#ifndef TLY_SUM_SLOT_H
#define TLY_SUM_SLOT_H

#include <stdbool.h>
#include <stdint.h>

struct tly_round;
struct tly_session;
struct tly_job;
struct tly_loan;

/* Where a rank's push of a round stands.  slot.c draws which state follows which. */
enum tly_slot_state {
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
struct tly_slot {
    enum tly_slot_state state; /* changed by tly_slot_change() alone */
    uint8_t *data;             /* owned, from the pool; of a loan: borrowed, while the loan is held */
    struct tly_loan *loan;     /* owned, instead of data: the push is read in its rank's memory */
    uint32_t start, filled;    /* bytes: the push is wanted from start on, and has come up to filled */
    uint32_t charge;           /* bytes of its rank's window; 0 once given back */
    bool quiet;                /* its rank does not want the result */
    bool withdrawn;   /* its rank has taken it back while pieces were being summed: forgotten after them */
    uint32_t have;    /* SLOT_SAID: bytes of the result that its rank has, */
    bool whole;       /* or all of them */
    uint32_t session; /* number of the session over which its rank last spoke of the round */
    uint64_t spec;    /* hash of what the rank means by the tensor */
    char *text;       /* owned: the spec in words, once its rank was asked for it */
};

/* Its rank has pushed or said something of the round. */
static inline bool tly_slot_has_come(const struct tly_slot *slot)
{
    return slot->state != SLOT_ABSENT && slot->state != SLOT_JOINED;
}

/* slot.c */
/* The one place where a slot changes its state.  Keeps job->dropped_slots and the sessions' `lacking` true. */
void tly_slot_change(struct tly_job *job, struct tly_round *r, uint32_t rank, enum tly_slot_state to);

/* The slot begins or ceases to count in its session's `lacking`: its rank takes part, or the round goes. */
void tly_slot_enter(struct tly_job *job, const struct tly_round *r, uint32_t rank);
void tly_slot_leave(struct tly_job *job, const struct tly_round *r, uint32_t rank);

/* memory.c */
/* Memory for a slot of the round, from rounds with a lesser claim if need be; NULL: there is none now. */
uint8_t *tly_memory_take(struct tly_job *job, struct tly_round *r, uint32_t bytes);
/* Have so many bytes reserved for the job from now on, as tly_quota_reserve().  All jobs give up what that takes of them. */
bool tly_memory_reserve(struct tly_job *job, uint64_t bytes);
/* The same past the limit, from nobody; NULL: the machine has none. */
uint8_t *tly_memory_take_always(struct tly_job *job, uint32_t bytes);
/* Room for a result that some ranks have from a service that is gone.  False: not now, until others have ended. */
bool tly_memory_take_result(struct tly_job *job, struct tly_round *r);
/* Another job has reserved what this one uses beyond its own reservation: give it up, from rounds with the least claim. */
void tly_memory_yield(struct tly_job *job);
/* Forget what is here of a push, with its memory or loan; its state stays. */
void tly_memory_empty(struct tly_job *job, struct tly_round *r, uint32_t rank);
/* There is no memory for this push: it is to come again. */
void tly_memory_drop(struct tly_job *job, struct tly_round *r, uint32_t rank);
/* The round fails: no data is kept, but every push counts as arrived. */
void tly_memory_forget_slots(struct tly_job *job, struct tly_round *r);
/* The result is whole: inputs are not needed any more. */
void tly_memory_release_inputs(struct tly_job *job, struct tly_round *r);
/* The job ends: nothing is kept of the round. */
void tly_memory_close(struct tly_job *job, struct tly_round *r);
/* Ask a rank for its push from slot->start on. */
void tly_memory_ask(struct tly_session *p, struct tly_round *r);
/* Ask for what was dropped, as far as memory goes. */
void tly_memory_ask_again(struct tly_job *job);
/* All ranks have come: what is only offered is wanted now.  False: nothing was. */
bool tly_memory_want_offers(struct tly_job *job, struct tly_round *r);
/* Inputs that are read in their ranks' memory must not move meanwhile.  False: a rank is gone, and will be missed. */
bool tly_memory_hold_loans(struct tly_job *job, struct tly_round *r);
void tly_memory_drop_loans(struct tly_job *job, struct tly_round *r);
/* Return the loans of connections that have ended, unless the crew reads them. */
void tly_memory_break_loans(struct tly_job *job, struct tly_round *r);

#endif
