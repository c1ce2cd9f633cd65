/* link.h - the inside of a link: what all media have in common.
 *
 *   session.c     the callbacks of channel and loop, dial and accept; uses all below
 *   in.c          frames in: sequence, keyed check, landing, checksums, payloads that are shown
 *   handshake.c   HELLO, and the medium's set-up, until the link is open
 *   alive.c       signs of life, asked for and given
 *   out.c         frames out: the ring of packets, counts, detach
 *   life.c        state, end, what users ask of any link
 *
 * Each may use what is below it, never what is above.  A channel (medium.h) moves the packets. */
#ifndef TLY_LINK_H
#define TLY_LINK_H

#include "transport/medium.h"

enum {
    TLY_PACKETS = 32,            /* in the ring */
    TLY_BATCH_BYTES = 256 << 10, /* made ahead of the medium, about */
    TLY_GAP_MS = 2000,           /* a silence that is remembered */
};

enum tly_link_state {
    TLY_LINK_CONNECTING,
    TLY_LINK_SHAKING,
    TLY_LINK_SETTING_UP, /* the handshake is over, and the medium has words with the peer */
    TLY_LINK_OPEN,
    TLY_LINK_CLOSED
};

/* Owner: the loop. */
struct tly_link {
    struct tly_loop *loop; /* borrowed */
    struct tly_hook hook;
    struct tly_channel *channel; /* owned; NULL until it is dialled */
    const struct tly_link_user *calls;
    void *user;
    char name[128];
    enum tly_link_state state;
    bool destroyed; /* by its user, inside a callback; freed when the callback has returned */
    int depth;      /* callbacks in progress */

    struct tly_hello hello;
    uint32_t setups;                 /* of the peer's words on the medium's set-up: how many have come */
    struct tly_strangers *strangers; /* borrowed: the door's, while this link counts as shaking there */
    int64_t deadline;                /* of the handshake, on the loop's awake clock */
    int64_t silence_ns;
    int64_t last_heard; /* awake clock */
    int64_t asked_at;   /* awake clock: since when a sign of life is asked for in vain; 0: it is not */
    uint64_t arrived;   /* bytes that our kernel had received at the last look in this silence; 0: none yet */
    uint64_t acked;     /* bytes that the peer's kernel had confirmed by the last question */
    int64_t gap, gap_at; /* the last long time in which nothing was heard, and when that ended; awake clock */
    int64_t last_spoken; /* monotonic clock */

    struct tly_arrival in;
    struct tly_frame frame; /* that comes in */
    struct tly_landing land;
    uint8_t reference[TLY_REFERENCE_BYTES]; /* what follows, if frame.flags has TLY_SHOWN */
    struct tly_loan *loan;                  /* borrowed: of the frame that is being taken */
    uint32_t receive_seq;
    struct tly_context received;
    uint8_t *control; /* owned: payload that has no other place */
    uint8_t *beside;  /* owned: where a fragment lies until it may move; NULL until the first */
    void *moves_to;   /* where it belongs then; NULL: it is there already */
    bool checksum;    /* what is sent has one */

    /* Packets by number, modulo TLY_PACKETS: [completed, handed) are the medium's, [handed, made) wait for it. */
    struct tly_packet packet[TLY_PACKETS];
    uint32_t completed, handed, made;
    uint32_t send_seq;
    struct tly_context sent;
    bool wants_room; /* the medium was full */

    struct tly_counts counts;
    uint32_t owed_bytes; /* landed since the peer last heard of counts */
    bool owes;
    int64_t owed_since;
    uint32_t pace_bytes;
    int64_t pace_ns;
    uint64_t bytes_sent, bytes_received;
};

/* --- life.c -------------------------------------------------------------------------------------- */

struct tly_link *tly_link_create(struct tly_loop *loop, const struct tly_link_config *c, bool connector);
/* The one place where a link's state changes. */
void tly_link_become(struct tly_link *l, enum tly_link_state state);
void tly_link_enter(struct tly_link *l);
/* Returns false if the link is gone. */
bool tly_link_leave(struct tly_link *l);
/* Close the channel, and tell the user. */
void tly_link_end(struct tly_link *l, int err, const char *why);
void tly_link_end_handshake(struct tly_link *l);
/* Free one that has no channel, or whose channel is closed. */
void tly_link_release(struct tly_link *l);

static inline const struct tly_medium *tly_link_via(const struct tly_link *l)
{
    return l->channel->medium;
}

/* --- out.c --------------------------------------------------------------------------------------- */

/* Made, and not yet taken by the medium. */
static inline uint32_t tly_link_waiting(const struct tly_link *l)
{
    return l->made - l->handed;
}
static inline bool tly_link_is_full(const struct tly_link *l)
{
    return l->made - l->completed == TLY_PACKETS;
}
/* Make a packet of it; the ring is not full. */
void tly_link_append(struct tly_link *l, struct tly_outgoing *o);
/* Send until there is nothing to send, or no room. */
void tly_link_push(struct tly_link *l);
/* A frame without a payload.  It is left out if the ring is full: the frames in it tell the counts just as well. */
void tly_link_say(struct tly_link *l, int type, uint16_t flags);
void tly_link_on_handed(struct tly_link *l, uint32_t packets, size_t bytes);
void tly_link_on_completed(struct tly_link *l, uint32_t packets);
/* Counts that went with no frame; when to look again, monotonic. */
int64_t tly_link_send_counts(struct tly_link *l);
void tly_link_checksum(uint8_t out[TLY_TRAILER_BYTES], const void *payload, uint32_t len, uint32_t seq);

/* --- alive.c ------------------------------------------------------------------------------------- */

void tly_link_note_heard(struct tly_link *l);
void tly_link_look_alive(struct tly_link *l); /* once a tick */

/* --- handshake.c --------------------------------------------------------------------------------- */

/* Send the message whose turn it is. */
void tly_link_shake(struct tly_link *l);
/* The peer's message, TLY_HELLO_BYTES in l->control, has come. */
void tly_link_on_hello(struct tly_link *l);
/* The peer's words on the medium's set-up, `payload` bytes in l->control, have come.  -EPROTO with *why. */
int tly_link_on_setup(struct tly_link *l, const char **why);

/* --- in.c ---------------------------------------------------------------------------------------- */

struct tly_arrival *tly_link_begin(struct tly_link *l, const uint8_t *header);
void tly_link_progress(struct tly_link *l);
void tly_link_arrived(struct tly_link *l, const uint8_t *trailer);

/* --- session.c ----------------------------------------------------------------------------------- */

/* Have the link use this channel, and start it; the link's from here on.  strangers: the door's it came by, or NULL. */
int tly_link_start(struct tly_link *l, struct tly_channel *c, struct tly_strangers *strangers);

#endif
