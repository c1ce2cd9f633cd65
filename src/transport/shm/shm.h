/* shm.h - payloads that are shown instead of sent, for a link between two ends on one machine (tcp/link.c over a Unix
 * socket): frames' headers go through the socket, and behind a header a reference says where its payload lies.
 *
 * Ends in one process: in the sender's memory itself.  Else: in a memfd of the sender's, into which it has been
 * copied; the descriptor went over the same socket before.
 *
 *   sender:   tly_shm_show    the payload gets a loan; a later fragment of the same part goes on with it
 *   reader:   tly_shm_resolve → a loan, whose bytes are within what the sender has;  tly_loan_hold, read, tly_loan_drop
 *             tly_loan_return → sender: tly_shm_returned, the place is free again
 *
 * What comes over the socket is believed within these bounds alone: a loan of this process must be in its table, one
 * of another's inside a segment that was mapped. */
#ifndef TLY_SHM_H
#define TLY_SHM_H

#include <sys/socket.h>
#include <sys/uio.h>

#include "transport/transport.h"

/*   0 loan's id   8 segment   12 1: of this frame alone   16 where in the segment the loan begins */
enum { TLY_REFERENCE_BYTES = 24 };

struct tly_shm;

/* For one end of a connected Unix socket; copies: as if the peer were another process. */
int tly_shm_create(int fd, bool copies, struct tly_shm **out);
/* The link ends: when this returns nobody reads our memory, nor will.  Loans that its user still has stay valid. */
void tly_shm_close(struct tly_shm *s);
bool tly_shm_is_here(const struct tly_shm *s); /* both ends are in this process */
/* Accepts NULL. */
void tly_shm_destroy(struct tly_shm *s);

/* True: `reference` goes instead of the payload. */
bool tly_shm_show(struct tly_shm *s, const struct tly_outgoing *o, uint8_t reference[TLY_REFERENCE_BYTES]);
/* Payloads with this token go away: who still reads them reads a copy from here on. */
int tly_shm_detach(struct tly_shm *s, const void *token);
void tly_shm_returned(struct tly_shm *s, uint64_t id);

/* As sendmsg() and readv(); descriptors go with the bytes. */
ssize_t tly_shm_send(struct tly_shm *s, int fd, struct msghdr *m, int flags);
ssize_t tly_shm_receive(struct tly_shm *s, int fd, const struct iovec *iov, int n);

/* The payload of this frame: *loan, with a reference that tly_shm_done() gives back, and the place in it.
 * -EPROTO with *why: it lies nowhere.  -ECONNRESET: the peer has closed meanwhile. */
int tly_shm_resolve(struct tly_shm *s, const uint8_t reference[TLY_REFERENCE_BYTES],
                    const struct tly_frame *f, struct tly_loan **loan, uint32_t *at, const char **why);
/* The frame is through. */
void tly_shm_done(struct tly_shm *s, struct tly_loan *loan, const struct tly_frame *f);
/* Of a part, not of one frame alone. */
bool tly_loan_is_whole(const struct tly_loan *loan);
/* A loan that has come back to be said to the peer; false: none. */
bool tly_shm_next_return(struct tly_shm *s, uint64_t *id);

/* The other end of a Unix socket runs as the same user; its pid, or -EACCES. */
int tly_shm_peer(int fd);

#endif
