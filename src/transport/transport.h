/* transport.h - the contract between a transport and its users: frames over one connection to one peer.
 *
 * A link is driven by its loop.  Incoming: for each header the user says where the payload belongs, then is
 * told when all of it is there.  Outgoing: the link asks its user for the next frame whenever the medium has
 * room, so that what is urgent is decided as late as possible.
 *
 * A user names no medium.  A listener says at which endpoints it can be reached, others dial that list, and the best
 * medium that connects is taken (media.c).  medium.h is the other side of this contract.
 *
 * Memory of the user's:
 *   - It may be announced before payloads are sent from it or land in it, and is then withdrawn afterwards
 *     (tly_memory_announce).  What is not announced goes by way of the medium's own buffers, where the medium needs to
 *     know.
 *   - A payload may be changed or freed after sent(), which means that nobody reads it any more.  That the medium has
 *     taken the frame is not enough.
 *   - A payload lands where header() says.
 *   - When tly_link_destroy() has returned nothing lands any more, and nobody reads the user's memory.
 *
 * Announcements are for RDMA, and nothing outside src/transport/ makes them yet.
 *
 * All calls and callbacks run under the loop's lock. */
#ifndef TLY_TRANSPORT_H
#define TLY_TRANSPORT_H

#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#include "base/loop.h"
#include "transport/endpoint.h"
#include "wire/frame.h"
#include "wire/hello.h"

struct tly_link; /* opaque */
struct tly_params;

/* Where a payload belongs. */
struct tly_landing {
    void *to;    /* NULL: nobody wants it, it is read and dropped */
    void *token; /* for tly_link_sink() */
    /* What lies at `to` is still needed as long as nothing has landed over it, and no element may be torn.  A medium
     * that lands bytes in order lands whole 64-byte blocks there (but for the payload's end); otherwise the payload
     * lands beside, and moves when all of it is there and verified. */
    bool in_blocks;
    bool control; /* in a buffer of the link's own, there until frame() returns; instead of `to` */
    bool lent;    /* nowhere: it stays where tly_link_loan() says; instead of `to` */
};

/* A frame to send. */
struct tly_outgoing {
    struct tly_frame frame; /* seq and counts are filled in by the link */
    const void *payload;    /* frame.payload bytes; must stay as they are until sent() or tly_link_detach() */
    void *token;            /* given back to sent(); NULL: not reported */
    void *owned;            /* free()d by the link when sent; for payloads made for this frame */
    /* Until the peer needs it no more the payload stays as it is, longer than until sent(), unless this end takes it
     * back by tly_link_detach() or tly_link_destroy(): so a peer on this machine may read it where it lies. */
    bool stays;
    bool
        whole; /* ... and so does all of its part, in one piece: frame.length bytes from payload - frame.offset */
    bool lost; /* no frame: there was no memory for one that the peer needs; the connection ends */
};

struct tly_link_user {
    /* The handshake is done. */
    void (*opened)(void *user, struct tly_link *l);
    /* May be NULL.  The peer has proved the secret, and the medium is about to take so many bytes of memory, which it has
     * until the link is destroyed.  False: it may not, and the link ends; a worse medium takes none. */
    bool (*spare)(void *user, struct tly_link *l, uint64_t bytes);
    /* A checked header.  Fill `land` if it has a payload.  Nonzero: the frame makes no sense, *why says what
     * (static string); the link is closed. */
    int (*header)(void *user, struct tly_link *l, const struct tly_frame *f, struct tly_landing *land,
                  const char **why);
    /* May be NULL.  So many bytes of the payload have landed, and more are to come.  Not called where payloads
     * have checksums, for what is not verified has not landed, nor by media that land bytes in any order. */
    void (*landed)(void *user, struct tly_link *l, const struct tly_frame *f, uint32_t bytes);
    /* Header and payload are there.  `data` is where it landed (NULL: dropped).  Nonzero as above. */
    int (*frame)(void *user, struct tly_link *l, const struct tly_frame *f, void *data, const char **why);
    /* The next frame to send, or false. */
    bool (*next)(void *user, struct tly_link *l, struct tly_outgoing *out);
    /* The payload of the frame with this token is read no more: its memory may be used again. */
    void (*sent)(void *user, struct tly_link *l, void *token);
    /* The connection is no more; the link must be destroyed by its user, now or later.  err: ECONNRESET ended,
     * EACCES, EPROTO, ESTALE, EAGAIN (handshake), ETIMEDOUT (silent).  why: a sentence's end. */
    void (*closed)(void *user, struct tly_link *l, int err, const char *why);
};

/* Cumulative counts that ride in every frame; kept by the user. */
struct tly_counts {
    uint64_t accepted, granted, received, stable;
};

struct tly_link_config {
    const struct tly_link_user *user_calls;
    void *user;
    struct tly_identity identity;
    const char *peer_name;           /* for messages; copied */
    int64_t silence_ns;              /* close after so long without a sign of life; 0: never */
    const struct tly_params *params; /* borrowed: which media may be used, and how; NULL: as by default */
    bool copies;                     /* for tests: to the same process as if it were another one */
    /* connecting links: */
    bool checksum;   /* payloads are checked, both ways (TALLY_CHECKSUM) */
    bool by_address; /* over the network alone, also to this machine */
    uint32_t skip;   /* so many of the media, best first, are not tried (tly_link_skip) */
    /* accepted links: before any other callback; or NULL */
    void (*created)(void *user, struct tly_link *l);
    /* accepted links: instead of `identity`, once the peer has said for which job it comes (wire/hello.h); or NULL */
    void (*choose)(void *user, const struct tly_identity *peer, struct tly_identity *me);
};

/* Start to connect to a process that can be reached at any of these endpoints.  The media are tried in their order, the
 * best first.  Non-blocking: opened() or closed() follows.  -EHOSTUNREACH: no medium is left that leads there; else the
 * last medium's error.  A sentence is in tly_error(). */
int tly_link_dial(struct tly_loop *loop, const struct tly_endpoints *to, const struct tly_link_config *c,
                  struct tly_link **out);
/* Where a process listens that is known by its address alone. */
void tly_media_at(const struct sockaddr_storage *address, struct tly_endpoints *out);
/* config.skip with which only media that are worse than this link's are tried; 0: there is none that leads to `to`. */
uint32_t tly_link_skip(const struct tly_link *l, const struct tly_endpoints *to);
/* Connections by its medium that may break before worse ones are to be tried. */
uint32_t tly_link_tries(const struct tly_link *l);
/* Bytes of this process's memory that it holds while it is open, beside its own struct. */
uint64_t tly_link_memory(const struct tly_link *l);

/* Where connections come in, whose handshake then begins. */
struct tly_listener;
struct tly_listener_config {
    struct sockaddr_storage address; /* port 0: any, within first_port..last_port if those are set */
    uint16_t first_port, last_port;
    bool by_address;                 /* over the network alone */
    const struct tly_params *params; /* borrowed; as for a link, and so is `copies` */
    bool copies;
    /* A connection came: fill the link's configuration (identity, calls).  Nonzero: drop it. */
    int (*accepting)(void *user, struct tly_link_config *c);
    void *user;
};
int tly_listen(struct tly_loop *loop, const struct tly_listener_config *c, struct tly_listener **out);
/* Have a port before there is a loop: *fd listens, and belongs to the caller until tly_listen_reserved(), which takes it
 * over also on failure. */
int tly_listener_reserve(const struct tly_listener_config *c, int *fd, uint16_t *port);
int tly_listen_reserved(struct tly_loop *loop, int fd, const struct tly_listener_config *c,
                        struct tly_listener **out);
uint16_t tly_listener_port(const struct tly_listener *l);
/* Where others can dial it.  Hosts that stand for any address are left as they are (tly_endpoints_place). */
void tly_listener_endpoints(const struct tly_listener *l, struct tly_endpoints *out);
void tly_listener_destroy(struct tly_listener *l); /* NULL is accepted */

/* For RDMA; only tests call these today.  Memory that payloads are sent from or land in: announced before its use, withdrawn
 * after it.  Any thread.  *out is NULL where no medium needs to know, which costs next to nothing. */
struct tly_memory;
int tly_memory_announce(const void *base, size_t bytes, struct tly_memory **out);
void tly_memory_withdraw(struct tly_memory *m); /* NULL is accepted */

/* Send what next() has now.  The loop does so by itself before it sleeps; this is for another thread that
 * holds the lock.  closed() may follow at once. */
void tly_link_flush(struct tly_link *l);
void tly_link_set_silence(struct tly_link *l, int64_t silence_ns);

/* Something is awaited of the peer, or nothing is; called once a tick.  Where nothing has come since the last tick the
 * peer is asked for a sign of life, which its loop gives at once.  Frames that flow anyway are as good.  False: the link has
 * ended, and closed() has been called. */
bool tly_link_await(struct tly_link *l, bool awaited);
/* For how long (ns) the peer has given none, all the while asked and with this loop running without delay; 0: it has, or was
 * not asked.  What the peer's kernel still takes off us counts as a sign of the path's life: the question is behind it.
 * *reached: the peer's kernel has answered since, so the path is well. */
int64_t tly_link_unanswered(const struct tly_link *l, bool *reached);
/* The awake clock when the peer was last heard. */
int64_t tly_link_heard_at(const struct tly_link *l);
/* For how long (ns) nothing had come when something came last, or the link ended, if that was two seconds or more and is no
 * longer ago than ten; else 0. */
int64_t tly_link_gap(const struct tly_link *l);
/* The counts that go into the next header.  `bytes`: how much has landed that the peer should hear of soon. */
void tly_link_set_counts(struct tly_link *l, const struct tly_counts *counts, uint32_t bytes);

/* Counts go with the next frame; alone once there is news of so many bytes (256 KB), or after so long (5 ms).  May
 * be called at any time, also inside next(): who knows that a frame will follow has the counts wait for it. */
void tly_link_set_pace(struct tly_link *l, uint32_t bytes, uint32_t ms);

/* The user of this token does not want the rest of its payload: drop it. */
void tly_link_sink(struct tly_link *l, const void *token);
/* What lands just now and how much of it is in place, in whole 64-byte blocks; also in closed().  NULL: nothing, or nobody
 * wants it. */
void *tly_link_landing(const struct tly_link *l, uint32_t *bytes);
/* Payloads with this token are about to go away: copy what is still to be sent, or read.  sent() does not come. */
void tly_link_detach(struct tly_link *l, const void *token);

/* Memory of the peer's in which all of a part lies, from its offset 0. */
struct tly_loan;
/* In header(): where the payload lies and may stay (landing.lent), the same for all frames of the part; or NULL. */
struct tly_loan *tly_link_loan(const struct tly_link *l);
/* Have it beyond frame(): until tly_loan_return(), also when the link is no more.  The loop's thread. */
void tly_loan_keep(struct tly_loan *loan);
void tly_loan_return(struct tly_loan *loan); /* NULL is accepted */
/* Its bytes, which stay where they are until tly_loan_drop(), any thread; NULL: the peer has taken them back
 * and ended the connection. */
const uint8_t *tly_loan_hold(struct tly_loan *loan);
void tly_loan_drop(struct tly_loan *loan);

const struct tly_identity *tly_link_peer(const struct tly_link *l);
/* What carries it, for reports: one of tly_media_name(). */
const char *tly_link_medium(const struct tly_link *l);
/* The i-th name that reports know, best first; NULL: there are no more. */
const char *tly_media_name(int i);
/* What it carries never leaves this machine: it crosses no network card. */
bool tly_link_is_inside(const struct tly_link *l);
/* Something that may fail on its own is between the ends: they are on different hosts, as far as addresses tell. */
bool tly_link_is_far(const struct tly_link *l);
void tly_link_rename(struct tly_link *l, const char *name);
bool tly_link_is_open(const struct tly_link *l);
/* The local or remote address; family 0: it has none. */
void tly_link_address(const struct tly_link *l, bool remote, struct sockaddr_storage *out);
uint64_t tly_link_bytes(const struct tly_link *l, bool sent);
/* Bytes that have crossed the network since the connection began, without packets' headers. */
struct tly_link_load {
    uint64_t bytes;   /* of ours that the peer's kernel has */
    uint64_t arrived; /* of the peer's that our kernel has, read or not */
    uint64_t
        busy_us; /* for which something was on its way or waited to be, and not for the peer to make room */
};
/* -ENOTSUP: nothing crosses a network, or the kernel does not say. */
int tly_link_load(const struct tly_link *l, struct tly_link_load *out);

/* Close and free.  No callback follows, and nothing lands any more.  NULL is accepted.  Safe inside callbacks of the same
 * link. */
void tly_link_destroy(struct tly_link *l);

#endif
