/* doubt.h - parts whose service is gone or was out of reach (doubt.c).  Owner: the loop. */
#ifndef TLY_COMM_DOUBT_H
#define TLY_COMM_DOUBT_H

#include <stdbool.h>
#include <stdint.h>

#include "tally/tally.h"
#include "wire/frame.h"

struct tly_peer;

/* The connection is no more: what it has brought is final, what was under way is in doubt. */
void tly_doubt_begin(struct tly_peer *p);
/* The connection is mended: say what has landed. */
void tly_doubt_mended(struct tly_peer *p);
/* All that is in doubt at this service.  resumed: TLY_RESUMED, or 0. */
void tly_doubt_say(struct tly_peer *p, uint16_t resumed);
/* The service has answered what was said of something that its rank no longer waits for.  False: it was not. */
bool tly_doubt_confirmed(struct tly_peer *p, const struct tly_frame *f, bool delivered);
/* The service wants what has landed, bytes [0, f->offset). */
void tly_doubt_final(struct tly_peer *p, const struct tly_frame *f);
/* What a service that is gone had goes to the substitutes. */
void tly_doubt_hand_on(tally_comm *c, struct tly_peer *from);

#endif
