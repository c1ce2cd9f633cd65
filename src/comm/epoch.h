/* epoch.h - epochs: which service sums which part, and what becomes of parts while services come and go.  A part of
 * internal.h, for the files that have to do with it. */
#ifndef TLY_COMM_EPOCH_H
#define TLY_COMM_EPOCH_H

#include "comm/internal.h"

/* epoch.c */
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

/* keep.c */
/* A service that can die alone has delivered a part. */
void tly_keep_part(struct peer *p, struct part *part);
/* ... or a verdict on this operation, which is about to end with it. */
void tly_keep_verdict(struct peer *p, const struct tally_op *op, int err, const char *sentence);
/* ... or what no operation here waits for: it has its place in the order of deliveries, and is never passed on. */
void tly_keep_unasked(struct peer *p, const struct tly_frame *f);
/* All ranks have the first `stable` deliveries of this service. */
void tly_keep_stable(struct peer *p, uint64_t stable);
/* What the part's result is: of a root that has nothing to receive, its input. */
const uint8_t *tly_keep_result(const struct part *p, uint32_t *length);
/* All that others may have to be told of this is elsewhere now: its operation need not wait for it. */
void tly_keep_settle(tally_comm *c, struct keep *k);
void tly_keep_drop(tally_comm *c, struct keep *k);
void tly_keep_drop_all(struct peer *p);

/* doubt.c */
/* The connection is no more: what it has brought is final, what was under way is in doubt. */
void tly_doubt_begin(struct peer *p);
/* The connection is mended: say what has landed. */
void tly_doubt_mended(struct peer *p);
/* All that is in doubt at this service.  resumed: TLY_RESUMED, or 0. */
void tly_doubt_say(struct peer *p, uint16_t resumed);
/* The service has answered what was said of something that its rank no longer waits for.  False: it was not. */
bool tly_doubt_confirmed(struct peer *p, const struct tly_frame *f, bool delivered);
/* The service wants what has landed, bytes [0, f->offset). */
void tly_doubt_final(struct peer *p, const struct tly_frame *f);
/* What a service that is gone had goes to the substitutes. */
void tly_doubt_hand_on(tally_comm *c, struct peer *from);

/* follow.c */
/* The callbacks of the member. */
void tly_follow_invited(void *comm);
void tly_follow_prepare(void *comm, const struct tly_roster *next);
void tly_follow_promised(void *comm, const struct tly_begun *b);
void tly_follow_committed(void *comm, const struct tly_roster *roster);
void tly_follow_finish(tally_comm *c);

#endif
