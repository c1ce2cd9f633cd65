/* outbox.h - frames that wait for their link to ask for them: control frames with their payloads. */
#ifndef TLY_OUTBOX_H
#define TLY_OUTBOX_H

#include "base/list.h"
#include "transport/transport.h"

/* What may wait for one peer: an honest one is told of a few thousand parts at most, and reads. */
enum { TLY_MOST_LETTER_BYTES = 32 << 20 };

struct tly_outbox {
    struct tly_list letters;
    size_t bytes; /* of the letters, with their bookkeeping */
    bool lost;    /* one could not be kept for want of memory */
};

void tly_outbox_init(struct tly_outbox *o);
/* Copies frame and payload.  `tag` comes back when the frame goes out.  -ENOMEM, and then the connection ends: a peer
 * that waits for what was lost would wait for ever. */
int tly_outbox_post(struct tly_outbox *o, const struct tly_frame *f, const void *data, size_t len, void *tag);
/* True if so much waits that nothing more should be asked: the peer asks and does not read. */
bool tly_outbox_full(const struct tly_outbox *o);
/* What the peer needs could not even be made, for want of memory. */
void tly_outbox_lose(struct tly_outbox *o);
/* The oldest into *out; false if there is none.  tag may be NULL. */
bool tly_outbox_next(struct tly_outbox *o, struct tly_outgoing *out, void **tag);
/* Drop all; `drop` (may be NULL) gets the tags that are not. */
void tly_outbox_finish(struct tly_outbox *o, void (*drop)(void *user, void *tag), void *user);

#endif
