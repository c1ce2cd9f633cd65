/* slot.c - the states of a slot, and the only function that changes one.
 *
 *   ABSENT ──push──▶ COMING ──all of it──▶ WHOLE           ABSENT ──joined──▶ JOINED (and back, if it comes)
 *     │ ▲              ├── no memory ─────▶ DROPPED ──asked──▶ AGAIN ──push──▶ COMING
 *     │ └─withdrawn─   ├── an offer ──────▶ OFFERED ──wanted─▶ DROPPED
 *     │   (from all)   └── not kept ──────▶ REFUSED
 *     └──HAVE──▶ SAID ──▶ WHOLE, or BROKEN ──asked──▶ AGAIN
 *
 * The end of a connection makes BROKEN of what is coming, asked for or on loan.  Any slot with data may be dropped, and any
 * slot that counts as arrived is refused once its round has a verdict.
 *
 * Debug and sanitizer builds assert each transition, and once a tick that all counts agree with the slots (tly_store_check).
 *
 * Two counts follow from the states, and are kept here: job->dropped_slots, and session->lacking, the slots that wait for a
 * push of the session's rank. */
#include "sum/slot.h"
#include "base/check.h"
#include "sum/internal.h"
#include "sum/members.h"
#include "sum/round.h"
#include "sum/session.h"

#define BIT(state) (1u << (state))

/* The states that may follow each. */
static const unsigned follows[SLOT_STATES] = {
    [SLOT_ABSENT] = BIT(SLOT_COMING) | BIT(SLOT_SAID) | BIT(SLOT_JOINED),
    [SLOT_COMING] = BIT(SLOT_WHOLE) | BIT(SLOT_REFUSED) | BIT(SLOT_OFFERED) | BIT(SLOT_DROPPED) |
                    BIT(SLOT_BROKEN) | BIT(SLOT_ABSENT),
    [SLOT_WHOLE] = BIT(SLOT_REFUSED) | BIT(SLOT_DROPPED) | BIT(SLOT_BROKEN) | BIT(SLOT_ABSENT),
    [SLOT_REFUSED] = BIT(SLOT_REFUSED) | BIT(SLOT_ABSENT),
    [SLOT_DROPPED] = BIT(SLOT_AGAIN) | BIT(SLOT_COMING) | BIT(SLOT_REFUSED) | BIT(SLOT_ABSENT),
    [SLOT_AGAIN] =
        BIT(SLOT_COMING) | BIT(SLOT_DROPPED) | BIT(SLOT_REFUSED) | BIT(SLOT_BROKEN) | BIT(SLOT_ABSENT),
    [SLOT_OFFERED] = BIT(SLOT_DROPPED) | BIT(SLOT_REFUSED) | BIT(SLOT_ABSENT),
    [SLOT_SAID] = BIT(SLOT_WHOLE) | BIT(SLOT_BROKEN) | BIT(SLOT_REFUSED) | BIT(SLOT_ABSENT),
    [SLOT_BROKEN] =
        BIT(SLOT_BROKEN) | BIT(SLOT_AGAIN) | BIT(SLOT_DROPPED) | BIT(SLOT_REFUSED) | BIT(SLOT_ABSENT),
    [SLOT_JOINED] = BIT(SLOT_ABSENT),
};

static bool slot_lacks(enum tly_slot_state state)
{
    return state == SLOT_ABSENT || state == SLOT_AGAIN;
}

void tly_slot_change(struct tly_job *job, struct tly_round *r, uint32_t rank, enum tly_slot_state to)
{
    struct tly_slot *slot = &r->slots[rank];
    struct tly_session *p = job->by_rank[rank];
    tly_check(follows[slot->state] & BIT(to));
    if (p)
        p->lacking += (uint32_t)slot_lacks(to) - (uint32_t)slot_lacks(slot->state);
    job->dropped_slots += (uint32_t)(to == SLOT_DROPPED) - (uint32_t)(slot->state == SLOT_DROPPED);
    slot->state = to;
}

void tly_slot_enter(struct tly_job *job, const struct tly_round *r, uint32_t rank)
{
    if (job->by_rank[rank])
        job->by_rank[rank]->lacking += slot_lacks(r->slots[rank].state);
}

void tly_slot_leave(struct tly_job *job, const struct tly_round *r, uint32_t rank)
{
    if (job->by_rank[rank])
        job->by_rank[rank]->lacking -= slot_lacks(r->slots[rank].state);
}
