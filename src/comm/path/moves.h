/* moves.h - parts of shared tensors go to other services (moves.c).  Owner: the loop. */
#ifndef TLY_COMM_MOVES_H
#define TLY_COMM_MOVES_H

#include <stdbool.h>
#include <stddef.h>

#include "tally/tally.h"

struct tly_begun;
struct tly_frame;
struct tly_part;
struct tly_peer;
struct tly_replica;

/* The replica has its parts: it takes part in changes of owners until it is destroyed. */
void tly_moves_enter(tally_comm *c, struct tly_replica *r);
/* PREPARE: the creates that have ended here and that COMMIT must list all the same.  begun: room for them; NULL: only count them.
 * Returns their number. */
size_t tly_moves_prepare(tally_comm *c, struct tly_begun *begun);
/* Some rank has begun the round and has not ended it (COMMIT). */
void tly_moves_promised(tally_comm *c, const struct tly_begun *b);
/* COMMIT: parts whose service is gone, or has more than its share by now, get other owners.  anew: shares have changed. */
void tly_moves_commit(tally_comm *c, bool anew);
/* Name all parts at this service, with the versions that this rank holds.  DONE follows. */
void tly_moves_say(struct tly_peer *peer);
/* The service has told the state of what lands next.  -EPROTO (*why), -ENOMEM. */
int tly_moves_told(struct tly_peer *peer, const struct tly_frame *f, const void *data, const char **why);
bool tly_moves_is_told(const struct tly_part *p);
/* The part's new owner wants the values that this rank holds. */
void tly_moves_final(struct tly_peer *peer, const struct tly_frame *f);

#endif
