/* chain.h - parts on their way through the stages of their operation (chain.c); stage.h is what stages see.
 *
 * Owner: the loop, but for tly_chain_choose. */
#ifndef TLY_COMM_CHAIN_H
#define TLY_COMM_CHAIN_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/list.h"
#include "tally/tally.h"

struct tly_cut;
struct tly_part;
struct tally_op;

/* The places of stages, from the tensor outward (stage.h). */
enum tly_stage_place { STAGE_TENSOR, STAGE_DEVICE, STAGE_ENGINE, STAGE_TEAM, STAGE_CODEC, STAGE_NET };

/* Of an operation.  Owner: chain.c, whose fields these are: the submitting thread until the operation is in the inbox, then the
 * loop, but for `over`, `lost_err` and `lost`: inbox.lock. */
struct tly_chain {
    uint8_t stages;      /* between the tensor and the network: a bit for each place */
    bool later, cut;     /* its parts are cut once part 0 is answered; they have been */
    bool begun, stopped; /* they have begun it; no part enters another stage, and home sends a verdict */
    uint8_t voucher;     /* of these: the last that vouches, or 0 */
    uint8_t ended;       /* of these: which the loop knows to be over with it, a bit for each place */
    int16_t spoilt;      /* positive: a stage could not do a part, and home has yet to decide */
    uint32_t due, away;  /* parts that the voucher has yet to pass; that are not back at the tensor */
    void *own[2];        /* of the stage before the engine and the team, and of the one behind them */
    struct tly_list over[STAGE_NET]; /* nodes of the communicator's lists */
    int lost_err;                    /* of a stage that cannot go on; counts unless home soon says more */
    char lost[80];
    int64_t lost_at; /* since when that is known; awake clock, 0: it is not */
};

/* Reports of a communicator's stages since tly_chain_take.  Owner: chain.c, under inbox.lock. */
struct tly_said {
    struct tly_list passed; /* parts */
    /* Operations: those with which the stage at this place is over; at STAGE_TENSOR those with which one cannot go on. */
    struct tly_list over[STAGE_NET];
    atomic_bool any; /* set (release) after */
};

void tly_chain_init(struct tly_said *said);

/* Has the operation no stage but the network? */
static inline bool tly_chain_is_empty(const struct tly_chain *ch)
{
    return !ch->stages;
}

/* Does the operation have the stage at this place?  Does it have one before this place? */
static inline bool tly_chain_has(const struct tly_chain *ch, enum tly_stage_place place)
{
    return ch->stages >> place & 1;
}

static inline bool tly_chain_has_before(const struct tly_chain *ch, enum tly_stage_place place)
{
    return ch->stages & ((1u << place) - 1);
}

/* The state that the stage at this place keeps in the operation.  The engine and the team keep theirs in struct tly_sharing. */
static inline void **tly_chain_own(struct tly_chain *ch, enum tly_stage_place place)
{
    return &ch->own[place > STAGE_TEAM];
}

static inline bool tly_chain_has_own(const struct tly_chain *ch, enum tly_stage_place place)
{
    return ch->own[place > STAGE_TEAM] != NULL;
}

/* Does the loop know that the stage at this place is over with the operation? */
static inline bool tly_chain_has_ended(const struct tly_chain *ch, enum tly_stage_place place)
{
    return ch->ended >> place & 1;
}

/* Which stages it has; names.lock held, and it is submitted for certain. */
void tly_chain_choose(tally_comm *c, struct tally_op *op);
/* The stage at this place was to do the whole operation (`alone`), and cannot: it has the other stages that suit it now, as on
 * ranks that had one before.  From any thread, before the operation is in the inbox; names.lock held. */
void tly_chain_go_on_without(tally_comm *c, struct tally_op *op, enum tly_stage_place place);
/* In the loop; names.lock held.  Cut a whole tensor as one of its stages wants it.  1: none does; -ENOMEM. */
int tly_chain_cut(tally_comm *c, struct tally_op *op, const struct tly_cut *cut);
/* -errno, with a sentence. */
int tly_chain_begin(tally_comm *c, struct tally_op *op);
/* The answer to part 0 is in place, and the other parts have been cut by it.  -ENOMEM. */
int tly_chain_more(tally_comm *c, struct tally_op *op);
/* Has it?  Then a stage that fails fails this rank's operation alone, and the part goes on as it is. */
bool tly_chain_has_more(const struct tally_op *op);
/* Hand out all parts.  -ENOMEM. */
int tly_chain_start(tally_comm *c, struct tally_op *op);
/* The part goes on from where it is, outward.  -ENOMEM. */
int tly_chain_out(tally_comm *c, struct tly_part *p);
/* The part goes on from where it is, inward.  True: now all parts are back at the tensor. */
bool tly_chain_in(tally_comm *c, struct tly_part *p);
/* The stage at this place is over with the operation: all parts that it has go on inward.  True: now all are back. */
bool tly_chain_come_in(tally_comm *c, struct tally_op *op, int place);
/* The network has admitted the part. */
void tly_chain_admitted(struct tly_part *p);
/* It need not be waited for any longer. */
void tly_chain_settled(struct tly_part *p);
/* What stages have said since, to be gone through by the loop; over: a list for each place, as in struct tly_said.  False:
 * nothing. */
bool tly_chain_take(tally_comm *c, struct tly_list *passed, struct tly_list *over);
/* The next operation of such a list, or NULL. */
struct tally_op *tly_chain_next(struct tly_list *over, int place);
/* From now on (awake clock) the loop knows that a stage cannot go on with the operation. */
void tly_chain_hear_lost(struct tally_op *op, int64_t now);
/* Since when; 0: it can.  *err and tly_chain_why say the rest. */
int64_t tly_chain_lost_since(const struct tally_op *op, int *err);
/* Why the first stage that failed has. */
const char *tly_chain_why(const struct tally_op *op);
/* A stage could not do a part (err is positive), and home has yet to decide what comes of that. */
void tly_chain_spoil(struct tally_op *op, int err);
/* The same err, or 0. */
int tly_chain_spoilt(const struct tally_op *op);
/* This rank takes the operation back.  True: the stage that has part 0 can have it back, and says what comes of it: the part
 * passes, or the stage is over. */
bool tly_chain_takes_back(tally_comm *c, struct tally_op *op);
/* This rank takes the operation back, and home will send a verdict: no stage but the network goes on with it.  A loss that
 * a stage has told and nobody has heard is forgotten, as are later ones: the verdict ends the operation. */
void tly_chain_stop(tally_comm *c, struct tally_op *op);
/* The operation ends: when this returns, nobody is at its buffers any more.  landed: all of it has. */
void tly_chain_withdraw(tally_comm *c, struct tally_op *op, bool landed);
/* What the stage that has this part does with it, or what the part waits for. */
const char *tly_chain_does(const struct tly_part *p);
/* A stage has this part on its way inward.  A shared one does not count: it has its parts until all of them have landed. */
bool tly_chain_holds(const struct tly_part *p);

#endif
