/* epoch.h - epochs as a rank knows them: what decides which service sums which part (epoch.c), and changes of them
 * (follow.c).
 *
 * Owner: the loop; comm->epoch changes under names.lock.  An epoch does not change once it is adopted, but for `listed` and
 * `left`. */
#ifndef TLY_COMM_EPOCH_H
#define TLY_COMM_EPOCH_H

#include <stdbool.h>
#include <stdint.h>

#include "base/list.h"
#include "base/map.h"
#include "membership/member.h"
#include "plan/plan.h"
#include "tally/tally.h"

/* What decides which service sums a part, the same on all ranks.  References: operations, promised rounds, and the
 * communicator, of the newest. */
struct tly_epoch {
    struct tly_list node; /* comm->epochs.all */
    uint32_t number, references;
    int services, sharing; /* sharing: services with a share */
    bool spares, far;      /* some of these are on machines without ranks; all are */
    uint32_t part_bytes;   /* unit of parts and credit */
    uint32_t part_most;    /* longest part */
    uint64_t credit_bytes;
    uint64_t *incarnation; /* owned: of each service; 0: none has this place */
    uint32_t *left;   /* owned: number of the epoch in which each of these left the job; 0: it is there */
    uint32_t *weight; /* owned */
    struct tly_plan_machine *machine; /* owned: of each service, with the ranks that push from it */
    uint32_t *listed;                 /* owned: of the list that was dealt last (tly_plan_late); the loop's */
};

/* Failed rounds whose epoch is kept, and whose reason is kept for each tallyd. */
enum { TLY_VERDICTS = 8192 };

/* The epochs that some round needs, and the change to the next one. */
struct tly_epochs {
    struct tly_list all;
    /* Ring: the last rounds that ended here by a verdict.  Another rank may begin one of them later. */
    struct tly_begun verdicts[TLY_VERDICTS];
    uint64_t verdict_count;
    /* Rounds that another rank has begun in an older epoch, and this one has not: hash of key and round -> epoch. */
    struct tly_map promised;
    struct tly_map promising; /* the next `promised`, while the COMMIT that lists them comes in */
    uint32_t preparing;       /* the epoch that is being agreed on: nothing new begins; 0: none */
    int64_t preparing_since;  /* awake clock */
    uint32_t prepared;        /* the epoch that was asked for first, since the last COMMIT */
    uint32_t meeting;         /* the invitation to be answered once all services are met; 0: none */
};

/* Is another epoch being agreed on?  Then no round begins. */
static inline bool tly_epochs_change(const struct tly_epochs *e)
{
    return e->preparing != 0;
}

void tly_epochs_init(struct tly_epochs *e);
/* How many epochs some round needs. */
uint32_t tly_epochs_count(const struct tly_epochs *e);
/* A service that was invited has been met or is gone: answer the invitation once none is missing. */
void tly_epoch_met(tally_comm *c);
int tly_epoch_init(tally_comm *c); /* once the roster is known: the first epoch */
/* The newest roster holds from now on.  -ENOMEM. */
int tly_epoch_adopt(tally_comm *c);
/* The epoch of a round that begins now. */
struct tly_epoch *tly_epoch_begin(tally_comm *c, uint64_t key, uint32_t round);
void tly_epoch_unref(struct tly_epoch *e);
/* The hash of a round among those that are promised. */
uint64_t tly_epoch_round(uint64_t key, uint32_t round);
/* The service that sums a part which was dealt to service `dealt`: that one, or its substitute. */
uint16_t tly_epoch_owner(tally_comm *c, const struct tly_epoch *e, uint64_t key, uint32_t part,
                         uint16_t dealt);
/* The epoch in which a part that was dealt to service `dealt` came to its owner. */
uint32_t tly_epoch_came(const struct tly_epoch *e, uint16_t dealt);
/* The service of this place leaves the job with the newest epoch. */
void tly_epoch_lose(tally_comm *c, uint32_t service);
/* Do two epochs share the sums out alike?  Ranks may not all know of a service without a share. */
bool tly_epoch_shares_as(const struct tly_epoch *a, const struct tly_epoch *b);
uint16_t tly_epoch_substitute(const tally_comm *c, uint64_t key, uint32_t part);
/* A verdict ends the operation.  A rank that begins its round later must ask the same home. */
void tly_epoch_decided(tally_comm *c, const struct tally_op *op);

#endif
