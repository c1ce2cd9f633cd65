/* shm.h - payloads that are shown instead of sent, for a channel between two ends on one machine: frames' headers go through
 * a Unix socket, and behind a header a reference says where its payload lies.
 *
 * Two ends in one thread give each other these bytes without the socket (direct.c).
 *
 * Ends in one process: in the sender's memory itself.  Else: in a memfd of the sender's, into which it has been
 * copied; the descriptor went over the same socket before.
 *
 *   sender:   tly_shm_show    the payload gets a loan; a later fragment of the same part goes on with it   (lend.c)
 *   reader:   tly_shm_resolve → a loan, whose bytes are within what the sender has                         (read.c)
 *             tly_loan_return → sender: tly_shm_returned, the place is free again
 *
 * A service keeps the loan and sums from it (sum/memory.c).  A rank copies a result out of it once.  Before an operation or a
 * connection ends, its memory is taken back (tly_link_detach, tly_link_destroy), which waits for readers.
 *
 * A reference that comes over the socket must be to a loan in the table, or lie inside a segment that another process
 * has shown and that was mapped. */
#ifndef TLY_SHM_H
#define TLY_SHM_H

#include <sys/un.h>

#include "base/shared.h"
#include "transport/loan.h"
#include "transport/stream.h"

extern const struct tly_medium tly_shm;

enum { TLY_SHM_SEGMENTS = 64 };

/* Another process's segment. */
struct tly_shm_mapping {
    void *data;
    uint64_t size;
    atomic_int references; /* of the channel and of each loan; whoever drops the last one unmaps (acq_rel) */
};

/* Between ends in one process both have the same object; else each has its own. */
struct tly_shm_loan {
    struct tly_loan
        loan; /* its node: of `lent` of the sender; of `read`, then `returns`, of another process's reader */
    atomic_bool
        returned; /* by the reader (release) in one process; its sender looks when it lends again (acquire) */
    /* owner: the sender's loop */
    const void *token;
    uint64_t from; /* in the sender's segment */
    /* owner: the reader's loop, of another process's loan */
    struct tly_shm_channel *channel; /* to say that it is returned; NULL: gone */
    struct tly_shm_mapping *mapping;
};

/* Owner: the loop. */
struct tly_shm_channel {
    struct tly_stream stream;
    bool here; /* both ends are in this process */
    /* what we lend (lend.c) */
    struct tly_list lent; /* oldest first */
    uint64_t lent_ever;
    uint32_t lent_count;
    struct tly_shm_loan *going_on; /* the part whose frames are going out */
    struct tly_shared *copies;     /* owned; made when it is first needed */
    bool no_copies;                /* it could not be made */
    bool to_pass;                  /* its descriptor goes with the next message */
    /* what we read (read.c) */
    struct tly_shm_loan *coming; /* the part whose frames are coming in; a reference */
    struct tly_list read;
    struct tly_shm_mapping *seen[TLY_SHM_SEGMENTS];
    uint32_t seen_count;
    struct tly_list returns; /* what of it has been read and is to be told; references */
    /* within one thread (direct.c) */
    struct sockaddr_un peer; /* of an accepted channel: the other end's name, until it has been looked for */
    struct tly_shm_channel *mate;  /* borrowed: the other end; NULL: bytes go through the socket */
    bool drained;                  /* what it sent through the socket before has been read */
    uint8_t *inbox;                /* owned: bytes from the mate; NULL: there was never one */
    uint32_t inbox_from, inbox_to; /* what of it is not read yet */
};

static inline struct tly_shm_channel *tly_shm_of(struct tly_channel *c)
{
    return tly_list_entry(c, struct tly_shm_channel, stream.base);
}
static inline struct tly_shm_loan *tly_shm_loan_of(struct tly_loan *loan)
{
    return tly_list_entry(loan, struct tly_shm_loan, loan);
}

/* --- lend.c -------------------------------------------------------------------------------------- */

void tly_shm_lend_init(struct tly_shm_channel *s);
/* When this returns nobody reads our memory, nor will. */
void tly_shm_lend_close(struct tly_shm_channel *s);
bool tly_shm_show(struct tly_channel *c, const struct tly_outgoing *o,
                  uint8_t reference[TLY_REFERENCE_BYTES]);
/* Payloads with this token go away: a peer that still reads them reads a copy from here on. */
int tly_shm_detach(struct tly_channel *c, const void *token);
void tly_shm_returned(struct tly_channel *c, uint64_t id);
/* The loan with this id within this process, with a reference; NULL: there is none. */
struct tly_shm_loan *tly_shm_look_up(uint64_t id);
/* As sendmsg(): the segment's descriptor goes with the bytes. */
ssize_t tly_shm_send(struct tly_stream *s, struct msghdr *m, int flags);

/* --- read.c -------------------------------------------------------------------------------------- */

void tly_shm_read_init(struct tly_shm_channel *s);
/* Loans that the link's user still has stay valid. */
void tly_shm_read_close(struct tly_shm_channel *s);
int tly_shm_resolve(struct tly_channel *c, const uint8_t reference[TLY_REFERENCE_BYTES],
                    const struct tly_frame *f, struct tly_loan **loan, uint32_t *at, const char **why);
void tly_shm_done(struct tly_channel *c, struct tly_loan *loan, const struct tly_frame *f);
bool tly_shm_next_return(struct tly_channel *c, uint64_t *id);
/* As readv(): segments that come with the bytes are mapped. */
ssize_t tly_shm_receive(struct tly_stream *s, const struct iovec *iov, int n);

/* --- direct.c ------------------------------------------------------------------------------------ */

/* Give a socket that is about to connect a name by which the accepting end finds it. */
void tly_shm_name_end(int fd);
/* A channel has come over a socket with this name: if the same thread serves the other end, they are mates from here on. */
void tly_shm_join(struct tly_shm_channel *s, const struct sockaddr_storage *from);
/* The same again, once the channel's loop lodges in another one. */
void tly_shm_join_lodger(struct tly_shm_channel *s);
void tly_shm_part(struct tly_shm_channel *s);
/* As sendmsg() to the mate, and as readv(); 0: nothing is there. */
ssize_t tly_shm_put(struct tly_shm_channel *s, const struct msghdr *m);
ssize_t tly_shm_take(struct tly_shm_channel *s, const struct iovec *iov, int n);

#endif
