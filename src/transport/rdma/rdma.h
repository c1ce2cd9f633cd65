/* rdma.h - frames over a reliable queue pair of an RDMA device, which two ends set up over a TCP socket.
 *
 *   device.c   the devices that one loop uses, and the port behind an address
 *   setup.c    what the ends tell each other, and the states of the queue pair
 *   send.c     messages out
 *   queue.c    completions, and messages in
 *   rdma.c     the medium: dial, door, end, load
 *
 * A message is one SEND, of at most 4 KB:
 *
 *        0        4        8
 *      | posted | place  | freed           |   then a frame's header, its payload unless it has a place, its trailer
 *
 *   posted  receives that the sender has posted, ever (modulo 2^32): how many messages it takes.  So no message meets a
 *           queue without a receive
 *   place   the first of the receiver's places in which the payload lies, or TLY_RDMA_NO_PLACE
 *   freed   the places, a bit each, that the sender has done with since its last message
 *
 * Places are memory of the receiver's that the peer's card writes: 8 of a fragment each.  A payload that does not fit
 * into a message is one WRITE into a place, or into several in a row, with the SEND behind it in the same post.  The peer
 * chooses among the places that this end has freed.  At each place's index the sender has a stretch of its own memory, out of
 * which its card reads.
 *
 * The last receive is kept for a message without a frame, which tells news when nothing else can be sent. */
#ifndef TLY_RDMA_H
#define TLY_RDMA_H

#include "transport/rdma/verbs.h"
#include "transport/stream.h"

extern const struct tly_medium tly_rdma;

enum {
    TLY_RDMA_MESSAGE = 4096, /* bytes */
    TLY_RDMA_HEAD = 16,
    TLY_RDMA_RECEIVES = 64, /* posted at each end, at most */
    TLY_RDMA_SENDS = 64,    /* messages that the card has, at most */
    TLY_RDMA_PLACES = 8,
    TLY_RDMA_PLACE = TLY_MAX_FRAGMENT, /* bytes */
    TLY_RDMA_NO_PLACE = 0xffffffff,
    TLY_RDMA_PLACES_BYTES = TLY_RDMA_PLACES * TLY_RDMA_PLACE,
    TLY_RDMA_OWN_BYTES = (TLY_RDMA_RECEIVES + TLY_RDMA_SENDS) * TLY_RDMA_MESSAGE + TLY_RDMA_PLACES_BYTES,
};

_Static_assert(TLY_RDMA_PLACES *TLY_RDMA_PLACE >= TLY_MAX_CONTROL, "the longest payload fits");

/* What the settings say; copied, for a channel may outlive them. */
struct tly_rdma_choice {
    char device[64]; /* "": the one behind the address */
    int gid;         /* -1: the one of the address */
    int class;       /* of traffic */
};

/* A device as one loop uses it.  Owner: the loop. */
struct tly_rdma_device {
    struct tly_loop *loop; /* borrowed */
    struct tly_ibv_context *context;
    struct tly_ibv_comp_channel *events;
    struct tly_watch completions, faults; /* of the descriptors of `events` and of the context */
    struct tly_list channels;
    struct tly_list pending; /* channels whose completions are to be looked at */
    uint32_t references;     /* of channels, and of the event that is being handled */
};

struct tly_rdma_port {
    struct tly_rdma_device *device; /* a reference */
    uint8_t number, gid_index;
    union tly_ibv_gid gid;
    struct tly_ibv_port_attr attr;
};

/* Memory that is registered; data NULL: none. */
struct tly_rdma_memory {
    uint8_t *data; /* mapped */
    size_t bytes;
    struct tly_ibv_mr *mr;
};

/* Owner: the loop. */
struct tly_rdma_channel {
    struct tly_stream stream; /* the socket: handshake and set-up, then it tells of the peer's end */
    struct tly_rdma_choice choice;
    struct tly_rdma_port port; /* .device NULL: not set up */
    struct tly_list node, pending;
    void (*visit)(struct tly_rdma_channel *r); /* tly_rdma_visit */
    struct tly_hook hook;
    struct tly_ibv_pd *pd; /* of this connection alone: no other one's key reaches its memory */
    struct tly_ibv_cq *cq;
    struct tly_ibv_qp *qp;
    uint32_t psn; /* of our first packet */
    bool begun;   /* packets go through the queue pair */
    bool broken;  /* it takes no more */
    const char *fault,
        *cause;    /* static: the device's word that the queue pair has failed, and why; NULL: none */
    char why[256]; /* what has failed */
    struct tly_rdma_memory own;    /* receives, sends, and what is written from: only our card uses it */
    struct tly_rdma_memory places; /* the peer's card writes here */
    /* out */
    uint64_t peer_places; /* address of the peer's, and their key */
    uint32_t peer_key;
    uint32_t sent, completed;         /* messages, ever */
    uint32_t allowed;                 /* messages that the peer takes, ever */
    uint32_t lent;                    /* places of the peer's that it has not freed */
    uint32_t writing;                 /* places of the peer's into which our card still writes */
    uint32_t written[TLY_RDMA_SENDS]; /* of each message: its places */
    uint32_t bytes[TLY_RDMA_SENDS];   /* of each message, with its payload */
    bool full;                        /* the link waits for room */
    /* in */
    uint32_t posted, told; /* receives posted, ever, and those that the peer has been told of */
    uint32_t came, taken;  /* messages, ever */
    uint32_t length[TLY_RDMA_RECEIVES];
    uint32_t freed; /* places that the peer has not been told of */
    /* for tly_network */
    uint64_t bytes_sent, bytes_completed, bytes_arrived;
    int64_t busy_ns, busy_since; /* time with messages under way; monotonic: since when there are some */
    int64_t answered_at; /* monotonic: when the card last completed one, or there was none under way */
};

static inline struct tly_rdma_channel *tly_rdma_of(struct tly_channel *c)
{
    return tly_list_entry(c, struct tly_rdma_channel, stream.base);
}

static inline bool tly_rdma_is_closed(const struct tly_rdma_channel *r)
{
    return r->stream.watch.fd < 0;
}

/* --- device.c ------------------------------------------------------------------------------------ */

/* There is a library, and it has devices. */
bool tly_rdma_is_there(void);
void tly_rdma_gid_text(const union tly_ibv_gid *gid, char text[64]);
/* The port that has this address.  -errno with a sentence. */
int tly_rdma_find_port(struct tly_loop *loop, const struct sockaddr_storage *address,
                       const struct tly_rdma_choice *choice, struct tly_rdma_port *out);
void tly_rdma_release(struct tly_rdma_device *d);
/* Have the channel's completions looked at soon. */
void tly_rdma_post(struct tly_rdma_channel *r);
/* End the channel with a sentence: where, what, and why. */
void tly_rdma_fail(struct tly_rdma_channel *r, int err, const char *what, const char *cause);
/* Take what the device says of itself and of its queues, which may end channels. */
void tly_rdma_hear(struct tly_rdma_device *d);

/* --- setup.c ------------------------------------------------------------------------------------- */

extern const struct tly_setup tly_rdma_setup;
/* Destroy the queue pair, so that neither card touches our memory any more, and then all that goes with it. */
void tly_rdma_tear_down(struct tly_rdma_channel *r);

/* --- send.c -------------------------------------------------------------------------------------- */

int tly_rdma_send(struct tly_channel *c, struct tly_packet *packet, uint32_t n);
/* Tell the peer what it must know and no frame has told it. */
void tly_rdma_tell(struct tly_rdma_channel *r);
/* The places of a payload, a bit each, at the beginning of the row. */
static inline uint32_t tly_rdma_row(uint32_t len)
{
    return (1u << (len + TLY_RDMA_PLACE - 1) / TLY_RDMA_PLACE) - 1;
}

/* --- queue.c ------------------------------------------------------------------------------------- */

/* Post all receives.  0 or errno. */
int tly_rdma_post_receives(struct tly_rdma_channel *r);
/* Take what the card has completed, and hand on what has come. */
void tly_rdma_visit(struct tly_rdma_channel *r);
/* Wait until the card has sent all, for so long at most.  If it has completed nothing for so long already, look once. */
void tly_rdma_drain(struct tly_rdma_channel *r, int64_t ns);

#endif
