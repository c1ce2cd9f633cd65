/* epoch.h - epochs as a rank knows them: what decides which service sums which part.
 *
 * Owner: the loop; comm->epoch changes under names_lock.  An epoch does not change once it is adopted, but for `listed`. */
#ifndef TLY_COMM_EPOCH_H
#define TLY_COMM_EPOCH_H

#include <stdint.h>

#include "base/list.h"
#include "plan/plan.h"
#include "tally/tally.h"

/* What decides which service sums a part, the same on all ranks.  References: operations, promised rounds, and the
 * communicator, of the newest. */
struct epoch {
    struct tly_list node; /* comm->epochs */
    uint32_t number, references;
    int services, sharing; /* sharing: services with a share */
    uint32_t part_bytes;   /* longest part */
    uint64_t credit_bytes;
    uint64_t *incarnation;            /* owned: of each service; 0: none has this place */
    uint32_t *weight;                 /* owned */
    struct tly_plan_machine *machine; /* owned: of each service, with the ranks that push from it */
    uint32_t *listed;                 /* owned: of the list that was dealt last (tly_plan_late); the loop's */
};

int tly_epoch_init(tally_comm *c); /* once the roster is known: the first epoch */
/* The newest roster holds from now on.  -ENOMEM. */
int tly_epoch_adopt(tally_comm *c);
/* The epoch of a round that begins now. */
struct epoch *tly_epoch_begin(tally_comm *c, uint64_t key, uint32_t round);
void tly_epoch_unref(struct epoch *e);
/* What stands for a round in comm->promised. */
uint64_t tly_epoch_round(uint64_t key, uint32_t round);
/* The service that sums a part which was dealt to service `dealt`: that one, or its substitute. */
uint16_t tly_epoch_owner(tally_comm *c, const struct epoch *e, uint64_t key, uint32_t part, uint16_t dealt);
uint16_t tly_epoch_substitute(const tally_comm *c, uint64_t key, uint32_t part);
/* A verdict ends the operation.  A rank that begins its round later must ask the same home. */
void tly_epoch_decided(tally_comm *c, const struct tally_op *op);

#endif
