/* direct.c - two ends of a channel that one thread serves: each puts its bytes into the other's inbox and posts its watch, so
 * they cost no system call and no wake-up.
 *
 * The two find each other when the socket is accepted, or once the accepting end's loop lodges in the other one's: the end that
 * connects gives its socket a name.  The socket stays.  It holds what was sent before that, and it tells one end that the
 * other one has closed.  Both ends are used under the lock of the host of their loops. */
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "transport/shm/shm.h"

enum { INBOX_BYTES = 64 << 10 };

void tly_shm_name_end(int fd)
{
    /* The kernel chooses an abstract name that no other socket has.  Without one the end has no mate. */
    int err = bind(fd, &(struct sockaddr){.sa_family = AF_UNIX}, sizeof(sa_family_t));
    (void)err;
}

static bool direct_is_mate(struct tly_watch *w, const void *accepted)
{
    const struct tly_shm_channel *s = accepted;
    const struct tly_stream *stream = tly_stream_watched(w);
    struct sockaddr_un a = {0};
    socklen_t len = sizeof a;
    return stream && stream->base.medium == s->stream.base.medium &&
           getsockname(w->fd, (struct sockaddr *)&a, &len) == 0 && memcmp(&a, &s->peer, sizeof a) == 0;
}

/* The other end of an accepted channel; NULL: another thread serves it. */
static struct tly_shm_channel *direct_find_mate(const struct tly_shm_channel *s)
{
    struct tly_watch *w = tly_loop_find(s->stream.loop, direct_is_mate, s);
    struct tly_shm_channel *mate = w ? tly_shm_of(&tly_stream_watched(w)->base) : NULL;
    return mate && mate->here && !mate->inbox ? mate : NULL;
}

static void direct_join(struct tly_shm_channel *s)
{
    struct tly_shm_channel *mate = direct_find_mate(s);
    if (!mate)
        return;
    uint8_t *inbox = malloc(INBOX_BYTES), *mates = malloc(INBOX_BYTES);
    if (!inbox || !mates) { /* bytes go through the socket */
        free(inbox);
        free(mates);
        return;
    }
    s->inbox = inbox;
    mate->inbox = mates;
    s->mate = mate;
    mate->mate = s;
    s->peer.sun_family = AF_UNSPEC; /* once this mate is gone, there is none to look for */
}

void tly_shm_join(struct tly_shm_channel *s, const struct sockaddr_storage *from)
{
    memcpy(&s->peer, from, sizeof s->peer);
    if (!s->here || s->peer.sun_path[0] ||
        !s->peer.sun_path[1]) /* another process, or an end without a name */
        s->peer.sun_family = AF_UNSPEC;
    else
        direct_join(s);
}

void tly_shm_join_lodger(struct tly_shm_channel *s)
{
    if (s->mate || s->peer.sun_family != AF_UNIX || !tly_loop_lodges(s->stream.loop))
        return;
    direct_join(s);
    s->peer.sun_family = AF_UNSPEC;
}

void tly_shm_part(struct tly_shm_channel *s)
{
    if (s->mate)
        s->mate->mate = NULL; /* reads what its inbox holds, and then the end of the socket */
    s->mate = NULL;
    free(s->inbox);
    s->inbox = NULL;
    s->inbox_from = s->inbox_to = 0;
}

ssize_t tly_shm_put(struct tly_shm_channel *s, const struct msghdr *m)
{
    struct tly_shm_channel *mate = s->mate;
    size_t put = 0;
    if (mate->inbox_from > 0) {
        mate->inbox_to -= mate->inbox_from;
        memmove(mate->inbox, mate->inbox + mate->inbox_from, mate->inbox_to);
        mate->inbox_from = 0;
    }
    for (size_t i = 0; i < m->msg_iovlen; i++) {
        size_t room = INBOX_BYTES - mate->inbox_to, len = m->msg_iov[i].iov_len;
        size_t n = len < room ? len : room;
        memcpy(mate->inbox + mate->inbox_to, m->msg_iov[i].iov_base, n);
        mate->inbox_to += (uint32_t)n;
        put += n;
    }
    if (!put) {
        errno = EAGAIN;
        return -1;
    }
    tly_loop_post(mate->stream.loop, &mate->stream.watch);
    return (ssize_t)put;
}

ssize_t tly_shm_take(struct tly_shm_channel *s, const struct iovec *iov, int n)
{
    size_t taken = 0;
    for (int i = 0; i < n; i++) {
        size_t there = s->inbox_to - s->inbox_from;
        size_t bytes = iov[i].iov_len < there ? iov[i].iov_len : there;
        if (bytes)
            memcpy(iov[i].iov_base, s->inbox + s->inbox_from, bytes);
        s->inbox_from += (uint32_t)bytes;
        taken += bytes;
    }
    return (ssize_t)taken;
}
