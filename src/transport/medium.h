/* medium.h - the contract between a link and a medium: what an implementer of a medium fills in and calls.
 *
 * A medium moves packets over channels.  A packet is a header, a payload and perhaps a trailer; the link (link/) makes and
 * checks them.  The link keeps sequence numbers, counts, checksums, the handshake and silence; a medium knows none of that.
 *
 *   struct tly_medium        what the medium can do; one constant of this type, and one line in media.c
 *   struct tly_door          where channels come in
 *   struct tly_channel       one connection; the first member of the medium's own struct
 *   struct tly_channel_user  what the channel calls: the link, or a test
 *
 * Promises of a medium:
 *   - Packets arrive whole, in the order in which they were sent, or the channel ends.
 *   - A payload stays where it is until completed().  To hand a packet over (send()) does not complete it.
 *   - A medium that needs to know memory reads payloads from, and lands them in, memory that was announced.  For memory
 *     that was not, and for packets that the link makes itself (control frames), it uses buffers of its own, at the cost of
 *     a copy.
 *   - Bytes of a payload land in any order, unless the medium says `in_order`.
 *   - A medium writes nowhere but where begin() says, and never once close() has returned.
 *   - Once close() or detach() has returned nobody reads this end's memory any more.
 *
 * All calls and callbacks run under the loop's lock.  Between enter() and leave() the channel stays allocated, though
 * it may be closed in any callback. */
#ifndef TLY_MEDIUM_H
#define TLY_MEDIUM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#include "base/param.h"
#include "transport/strangers.h"
#include "transport/transport.h"

/* What goes behind a header instead of a payload that is shown; its meaning is the medium's. */
enum { TLY_REFERENCE_BYTES = 24 };

/* A frame on its way out.  Owner: the link, which changes `payload` only in a packet that is not handed over. */
struct tly_packet {
    uint8_t header[TLY_FRAME_BYTES];
    uint8_t trailer[TLY_TRAILER_BYTES];
    uint8_t reference[TLY_REFERENCE_BYTES];
    const uint8_t *payload; /* borrowed until completed(), or the link's own: `owned` or `reference` */
    uint32_t head, len, trailer_len; /* bytes of header, payload, trailer */
    /* the link's own: */
    uint32_t type;
    void *token, *owned;
};

/* A frame that comes in.  Owner: the link; the medium moves `landed`. */
struct tly_arrival {
    void *to; /* where the payload belongs; NULL: it is dropped.  May become NULL at any time (sink) */
    uint32_t follows; /* bytes behind the header */
    uint32_t
        landed; /* of these, bytes that are in place, a prefix; a medium that is not in_order sets it at the end */
    uint32_t trailer; /* bytes behind those, for arrived() */
    bool in_blocks;   /* whole 64-byte blocks alone, but for the end */
    bool coming;      /* begin() has returned it, and arrived() has not been called */
    bool users;       /* `to` is the user's memory, which it may have announced; else the link's */
};

struct tly_channel_user {
    /* Around all callbacks of one event.  After leave() the channel may be gone. */
    void (*enter)(void *user);
    void (*leave)(void *user);
    /* Dialled channels: the connection stands. */
    void (*connected)(void *user);
    /* The connection is over; close() has been called when this returns.  why: a sentence's end, or NULL: it ended. */
    void (*ended)(void *user, int err, const char *why);
    /* There is room again, after send() has said -EAGAIN. */
    void (*room)(void *user);
    /* The medium has taken the next `packets` whole, and `bytes` in all since the last call. */
    void (*handed)(void *user, uint32_t packets, size_t bytes);
    /* The oldest `packets` that were handed over are read no more. */
    void (*completed)(void *user, uint32_t packets);
    /* Something has come. */
    void (*heard)(void *user, size_t bytes);
    /* A header, tly_frame_size() bytes, unchecked.  NULL: it was refused, and the channel is closed. */
    struct tly_arrival *(*begin)(void *user, const uint8_t *header);
    /* In-order media: more of the payload is in place, and not yet all. */
    void (*progress)(void *user);
    /* All of it is in place, and here is its trailer (arrival.trailer bytes). */
    void (*arrived)(void *user, const uint8_t *trailer);
};

/* Owner: the loop. */
struct tly_channel {
    const struct tly_medium *medium;
    const char *name;                  /* one of medium->names */
    const struct tly_channel_user *up; /* borrowed; set before start(), and then `user` */
    void *user;
};

struct tly_dial {
    struct tly_loop *loop;
    const char *where;               /* of the endpoint */
    const struct tly_params *params; /* borrowed; NULL: defaults */
    bool copies;                     /* as tly_link_config */
};

/* Owner: the loop. */
struct tly_door {
    const struct tly_medium *medium;
    char where[TLY_ENDPOINT]; /* where it can be dialled; the host may stand for any */
    uint16_t port;            /* 0: none */
    struct tly_strangers strangers;
};

struct tly_door_config {
    struct tly_loop *loop;
    const struct sockaddr_storage *address; /* by_address media */
    uint16_t first_port, last_port;
    int reserved;                    /* descriptor from reserve(), taken over also on failure; -1: none */
    const struct tly_params *params; /* as in tly_dial */
    bool copies;
    /* A channel has come; takes it over.  Its name, for messages, is copied. */
    void (*accepted)(void *user, struct tly_door *d, struct tly_channel *c, const char *name);
    void *user;
};

/* Payloads that are shown instead of sent: a reference goes behind the header, and says where the payload lies. */
struct tly_lending {
    /* True: `reference` goes instead of the payload. */
    bool (*show)(struct tly_channel *c, const struct tly_outgoing *o, uint8_t reference[TLY_REFERENCE_BYTES]);
    /* The payload of this frame: *loan, with a reference that done() gives back, and the place in it.  -EPROTO with
     * *why: it lies nowhere.  -ECONNRESET: the peer has closed meanwhile. */
    int (*resolve)(struct tly_channel *c, const uint8_t reference[TLY_REFERENCE_BYTES],
                   const struct tly_frame *f, struct tly_loan **loan, uint32_t *at, const char **why);
    void (*done)(struct tly_channel *c, struct tly_loan *loan, const struct tly_frame *f);
    /* A loan that has been read is to be told to the peer; false: none.  And one that the peer has read. */
    bool (*next_return)(struct tly_channel *c, uint64_t *id);
    void (*returned)(struct tly_channel *c, uint64_t id);
};

/* How a channel goes on after the handshake, for a medium that needs words with the peer before it carries frames.  They go as
 * the handshake did, keyed as all frames are.  Each end proposes, accepts what the other has proposed, and says that it is
 * ready.  Once both are, begin() is called, and the link opens when a frame has come by the new way.  Each returns a negative errno with *why, a static
 * string, if the medium cannot go on; the peer is told. */
enum { TLY_SETUP_BYTES = 256 };
struct tly_setup {
    /* What the peer has to know.  Returns its bytes. */
    int (*propose)(struct tly_channel *c, uint8_t out[TLY_SETUP_BYTES], const char **why);
    /* The peer's proposal.  On success this end takes what the peer sends by the new way. */
    int (*accept)(struct tly_channel *c, const uint8_t *in, uint32_t bytes, const char **why);
    /* All packets go the new way from here on. */
    int (*begin)(struct tly_channel *c, const char **why);
};

/* What is between the two ends of a channel, if anything is.  Each function may be called at any time before close(). */
struct tly_network {
    void (*address)(const struct tly_channel *c, bool remote, struct sockaddr_storage *out);
    int (*load)(const struct tly_channel *c, struct tly_link_load *out); /* -ENOTSUP */
    /* Bytes that this end still holds for the peer; negative: not known. */
    int64_t (*queued)(const struct tly_channel *c);
    /* For how long (ns) the peer's machine has not answered; 0: not known. */
    int64_t (*unanswered)(const struct tly_channel *c);
};

struct tly_medium {
    const char *scheme;       /* of its endpoints */
    const char *const *names; /* of its channels, for reports: best first, NULL at the end */
    bool by_address; /* who knows a process's HOST:PORT alone can dial it; else its endpoint must be known */
    bool in_order;   /* bytes of a payload land in their order */
    bool inside;     /* what it moves never leaves the machine: it needs no checksum */

    bool (*allowed)(const struct tly_params *params); /* NULL: always */
    int (*listen)(const struct tly_door_config *c, struct tly_door **out);
    void (*shut)(struct tly_door *d);
    /* A port that listens already, for a later listen(); NULL: it cannot. */
    int (*reserve)(const struct tly_door_config *c, int *fd, uint16_t *port);
    /* Begin to connect.  connected() or ended() follows after start(). */
    int (*dial)(const struct tly_dial *d, struct tly_channel **out);
    int (*start)(struct tly_channel *c);
    /* Hand over up to n packets, in their order, which handed() reports.  -EAGAIN: there is no room for more now. */
    int (*send)(struct tly_channel *c, struct tly_packet *packet, uint32_t n);
    /* At once.  No callback follows but completed() for nobody: all memory is the owner's again. */
    void (*close)(struct tly_channel *c);
    void (*destroy)(struct tly_channel *c); /* after close() */

    /* May be NULL. */
    int (*detach)(struct tly_channel *c, const void *token); /* read this payload no more; -ENOMEM */
    int (*announce)(const void *base, size_t bytes, void **out);
    void (*withdraw)(void *announced);
    const struct tly_setup *setup; /* NULL: the link is open when the handshake is over */
    uint64_t memory;               /* bytes that a channel holds once it is set up */
    uint32_t tries; /* connections that may break before its users turn to a worse medium; 0: one */
    const struct tly_lending *lending; /* NULL: all payloads are sent */
    const struct tly_network *network; /* NULL: nothing is between the ends */
};

/* The media, best first, NULL at the end (media.c).  A test may set it to others. */
extern const struct tly_medium *const *tly_media;

#endif
