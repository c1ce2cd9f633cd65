/* stream.h - packets over a connected stream socket, for media that use one: what comes is received straight into place.
 *
 * The medium makes the socket and puts the struct first in its channel; start, send and close of struct tly_medium are
 * tly_stream_start, tly_stream_send and, alone or as a part, tly_stream_close. */
#ifndef TLY_STREAM_H
#define TLY_STREAM_H

#include <sys/types.h>
#include <sys/uio.h>

#include "transport/medium.h"

enum { TLY_STAGING_BYTES = 4096, TLY_STREAM_BATCH = 32 }; /* packets with one sendmsg() */

struct tly_stream;

/* What a medium does in its own way; each may be NULL. */
struct tly_stream_io {
    /* As sendmsg() and readv(), where the medium has more to say with the bytes. */
    ssize_t (*send)(struct tly_stream *s, struct msghdr *m, int flags);
    ssize_t (*receive)(struct tly_stream *s, const struct iovec *iov, int n);
    /* The kernel has just taken so many bytes of a batch, and no more.  True: it had room for a batch, and takes what else
     * there is until lower(). */
    bool (*lift)(struct tly_stream *s, size_t taken);
    void (*lower)(struct tly_stream *s);
};

/* Owner: the loop. */
struct tly_stream {
    struct tly_channel base;
    struct tly_loop *loop;  /* borrowed */
    struct tly_watch watch; /* of the socket, owned; -1: closed */
    const struct tly_stream_io *io;
    bool connecting;
    uint32_t events; /* what epoll watches for */
    /* in */
    uint8_t staging[TLY_STAGING_BYTES];
    uint32_t staging_from, staging_to;
    struct tly_arrival *in; /* borrowed: the frame that comes; NULL: a header is next */
    bool long_frames;       /* the last payload exceeds the staging buffer */
    int low_water;          /* SO_RCVLOWAT now; 0: the socket has none */
    /* out */
    uint32_t done; /* bytes of the next packet that the kernel has */
    bool full;     /* the kernel has no room */
};

/* Over a socket that is connecting (dialled) or connected.  The socket belongs to the stream from tly_stream_start() on.
 * io: borrowed. */
void tly_stream_init(struct tly_stream *s, struct tly_loop *loop, int fd, bool connecting,
                     const struct tly_stream_io *io);
/* The stream to which this watch belongs; NULL: to something else. */
struct tly_stream *tly_stream_watched(struct tly_watch *w);
int tly_stream_start(struct tly_channel *c);
int tly_stream_send(struct tly_channel *c, struct tly_packet *packet, uint32_t n);
void tly_stream_close(struct tly_channel *c);

#endif
