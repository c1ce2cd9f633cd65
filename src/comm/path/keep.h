/* keep.h - what a rank keeps of a service that may die alone, until all ranks have it (keep.c).
 *
 * Owner: the loop.  keep.c makes and drops keeps; each is in one list of a peer. */
#ifndef TLY_COMM_KEEP_H
#define TLY_COMM_KEEP_H

#include <stdbool.h>
#include <stdint.h>

#include "base/list.h"
#include "sum/pool.h"
#include "tally/tally.h"
#include "wire/frame.h"

struct tly_part;
struct tly_peer;
struct tally_op;

/* Something that a service has delivered which may die alone: kept until all ranks have it (the service's `stable`),
 * since after the service's death this rank may be the only one that has it. */
struct tly_keep {
    struct tly_list node;  /* peer->kept, in the order of delivery; peer->doubted, after the service has gone;
                        * peer->decided */
    struct tly_part *part; /* whose operation waits for this; NULL: it does not */
    struct tly_frame head;
    uint8_t *data; /* copy, from comm->keeps; NULL: the data are in the tensor, or there are none any more */
    uint32_t length;
    char *verdict; /* owned: it was one */
    int err;
    bool said;             /* among the doubted: the service has been told */
    struct tly_peer *from; /* who gave it, if nothing here has waited for it; else NULL */
};

/* Keeps that are free, and the memory of all copies. */
struct tly_keeps {
    struct tly_list spare;
    struct tly_pool copies;
};

void tly_keep_init(tally_comm *c);
/* The roster is known. */
void tly_keep_begin(tally_comm *c);
/* With all that peers have. */
void tly_keep_finish(tally_comm *c);
/* A service that can die alone has delivered a part.  True: the operation waits until all ranks have it. */
bool tly_keep_part(struct tly_peer *p, struct tly_part *part);
/* ... or a verdict on the part's operation, which is about to end with it. */
void tly_keep_verdict(struct tly_peer *p, const struct tly_part *part, int err, const char *sentence);
/* ... or what no operation here waits for: it has its place in the order of deliveries, and is never passed on. */
void tly_keep_unasked(struct tly_peer *p, const struct tly_frame *f);
/* All ranks have the first `stable` deliveries of this service. */
void tly_keep_stable(struct tly_peer *p, uint64_t stable);
/* What the part's result is: of a root that has nothing to receive, its input. */
const uint8_t *tly_keep_result(const struct tly_part *p, uint32_t *length);
/* All that others may have to be told of this is elsewhere now: its operation need not wait for it. */
void tly_keep_settle(tally_comm *c, struct tly_keep *k);
void tly_keep_drop(tally_comm *c, struct tly_keep *k);
void tly_keep_drop_all(struct tly_peer *p);

#endif
