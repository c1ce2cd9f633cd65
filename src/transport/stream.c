/* stream.c - packets over a stream socket.
 *
 * Receiving: headers pass through a staging buffer of 4 KB.  readv() reads a payload directly to where it belongs, with the
 * staging buffer behind it to catch the next header in the same call.  Bytes of a payload that are in the staging buffer already are copied.
 * Behind a frame longer than the staging buffer another long one is likely, so only a header's bytes go there.
 * Sending: sendmsg() takes a batch's headers and payloads from where they lie.  The kernel then has a copy, so a packet
 * that is handed over is also completed.
 *
 * A socket takes little ahead of what it has sent, so a batch is often cut short.  If the kernel had room when that began, its
 * rest follows all the same: nothing can overtake it, and each wait for room would cost a wake-up.  The next batch is made once
 * there is room again.
 *
 * Wake-ups.  A wake-up costs more than the packet for which it comes.  SO_RCVLOWAT has epoll sleep until the rest of a
 * payload has come, or 64 KB of it.
 *
 * Whole blocks.  A result lands over the input.  A part that is some bytes result and some bytes input must not be torn
 * inside an element.  So FIONREAD says how many bytes are there, and a multiple of 64 is read.  With less than a block
 * there, SO_RCVLOWAT has epoll sleep until a block has come, and poll() is asked for POLLRDHUP: else a peer that dies inside
 * a block would never be noticed.  A staging buffer instead would cost a copy of everything. */
#include "transport/stream.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>

#include "base/fork.h"

enum {
    TURN_BYTES = 2 << 20, /* received for one wake-up; then others have their turn */
    WAKE_BYTES =
        64 << 10, /* of a payload, worth a wake-up: a service sums in steps of that (SEGMENT in sum/job.c) */
};

static void stream_on_ready(struct tly_watch *w, uint32_t events);

static struct tly_stream *stream_of(struct tly_channel *c)
{
    return tly_list_entry(c, struct tly_stream, base);
}

void tly_stream_init(struct tly_stream *s, struct tly_loop *loop, int fd, bool connecting,
                     const struct tly_stream_io *io)
{
    s->loop = loop;
    s->watch = (struct tly_watch){.fd = fd, .ready = stream_on_ready};
    s->io = io;
    s->connecting = connecting;
    s->low_water = io->receive ? 0 : 1;
}

struct tly_stream *tly_stream_watched(struct tly_watch *w)
{
    return w->ready == stream_on_ready ? tly_list_entry(w, struct tly_stream, watch) : NULL;
}

int tly_stream_start(struct tly_channel *c)
{
    struct tly_stream *s = stream_of(c);
    s->events = s->connecting ? EPOLLOUT : EPOLLIN;
    return tly_loop_add(s->loop, &s->watch, s->events);
}

void tly_stream_close(struct tly_channel *c)
{
    struct tly_stream *s = stream_of(c);
    if (s->watch.fd < 0)
        return;
    tly_loop_remove(s->loop, &s->watch);
    tly_fd_close(s->watch.fd);
    s->watch.fd = -1;
}

static bool stream_is_closed(const struct tly_stream *s)
{
    return s->watch.fd < 0;
}

static void stream_watch_for(struct tly_stream *s, uint32_t events)
{
    if (events == s->events || stream_is_closed(s))
        return;
    s->events = events;
    tly_loop_change(s->loop, &s->watch, events);
}

/* --- sending ------------------------------------------------------------------------------------- */

/* Send a batch without its first `skip` bytes.  Returns the bytes taken, or a negative errno. */
static ssize_t stream_send_batch(struct tly_stream *s, const struct tly_packet *packet, uint32_t count,
                                 size_t skip)
{
    struct iovec iov[3 * TLY_STREAM_BATCH];
    int n = 0;
    for (uint32_t i = 0; i < count; i++) {
        const struct tly_packet *p = &packet[i];
        const struct iovec pieces[] = {{(void *)p->header, p->head},
                                       {(void *)p->payload, p->len},
                                       {(void *)p->trailer, p->trailer_len}};
        for (int k = 0; k < 3; k++) {
            size_t past = skip < pieces[k].iov_len ? skip : pieces[k].iov_len;
            skip -= past;
            if (past < pieces[k].iov_len)
                iov[n++] = (struct iovec){(uint8_t *)pieces[k].iov_base + past, pieces[k].iov_len - past};
        }
    }
    struct msghdr m = {.msg_iov = iov, .msg_iovlen = (size_t)n};
    ssize_t r;
    do
        r = s->io->send ? s->io->send(s, &m, MSG_NOSIGNAL | MSG_DONTWAIT)
                        : sendmsg(s->watch.fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (r < 0 && errno == EINTR);
    return r < 0 ? -errno : r;
}

/* The kernel gets the rest of a batch of which it has just taken some: nothing overtakes that, wherever it waits.
 * Returns the bytes taken now, or a negative errno. */
static ssize_t stream_send_rest(struct tly_stream *s, const struct tly_packet *packet, uint32_t count,
                                size_t taken)
{
    if (!s->io->lift || !s->io->lift(s, taken))
        return 0;
    ssize_t r = stream_send_batch(s, packet, count, s->done + taken);
    s->io->lower(s);
    return r == -EAGAIN ? 0 : r;
}

static int stream_await_room(struct tly_stream *s)
{
    s->full = true;
    stream_watch_for(s, EPOLLIN | EPOLLOUT);
    return -EAGAIN;
}

int tly_stream_send(struct tly_channel *c, struct tly_packet *packet, uint32_t n)
{
    struct tly_stream *s = stream_of(c);
    if (n > TLY_STREAM_BATCH)
        n = TLY_STREAM_BATCH;
    if (s->full)
        return stream_await_room(s);
    size_t bytes = 0;
    for (uint32_t i = 0; i < n; i++)
        bytes += packet[i].head + packet[i].len + packet[i].trailer_len;
    ssize_t r = stream_send_batch(s, packet, n, s->done);
    if (r == -EAGAIN)
        return stream_await_room(s);
    if (r < 0)
        return (int)r;
    bool cut = s->done + (size_t)r < bytes;
    if (cut) {
        ssize_t rest = stream_send_rest(s, packet, n, (size_t)r);
        if (rest < 0)
            return (int)rest;
        r += rest;
    }
    uint32_t whole = 0;
    size_t left = (size_t)r + s->done;
    for (; whole < n; whole++) {
        size_t len = packet[whole].head + packet[whole].len + packet[whole].trailer_len;
        if (left < len)
            break;
        left -= len;
    }
    s->done = (uint32_t)left;
    c->up->handed(c->user, whole, (size_t)r);
    if (whole)
        c->up->completed(c->user, whole);
    return cut ? stream_await_room(s) : 0;
}

/* --- receiving ----------------------------------------------------------------------------------- */

/* Bytes of the header of the frame at the beginning of the staging buffer, as far as it is there. */
static uint32_t stream_header_bytes(const struct tly_stream *s)
{
    return s->staging_to - s->staging_from < TLY_FRAME_LEAST
               ? TLY_FRAME_LEAST
               : tly_frame_size(s->staging + s->staging_from);
}

/* All of the frame but its trailer has landed, and the staging buffer has that. */
static void stream_finish_frame(struct tly_stream *s)
{
    const uint8_t *trailer = s->staging + s->staging_from;
    s->staging_from += s->in->trailer;
    s->in = NULL;
    s->base.up->arrived(s->base.user, trailer);
}

/* Use up what the staging buffer holds. */
static void stream_eat_staging(struct tly_stream *s)
{
    while (!stream_is_closed(s)) {
        uint32_t have = s->staging_to - s->staging_from;
        if (!s->in) {
            uint32_t head = stream_header_bytes(s);
            if (have < head)
                break;
            s->staging_from += head;
            s->in = s->base.up->begin(s->base.user, s->staging + s->staging_from - head);
            if (!s->in)
                return;
            s->long_frames = s->in->follows > TLY_STAGING_BYTES;
            have = s->staging_to - s->staging_from;
        }
        struct tly_arrival *in = s->in;
        uint32_t left = in->follows - in->landed, n = have < left ? have : left;
        if (in->in_blocks && in->to && n < left)
            n -= n % TLY_ALIGN;
        if (n && in->to)
            memcpy((uint8_t *)in->to + in->landed, s->staging + s->staging_from, n);
        s->staging_from += n;
        in->landed += n;
        if (in->landed < in->follows || s->staging_to - s->staging_from < in->trailer)
            break;
        stream_finish_frame(s);
    }
    if (s->staging_from == s->staging_to) {
        s->staging_from = s->staging_to = 0;
    } else if (s->staging_from > 0) {
        memmove(s->staging, s->staging + s->staging_from, s->staging_to - s->staging_from);
        s->staging_to -= s->staging_from;
        s->staging_from = 0;
    }
}

static void stream_set_low_water(struct tly_stream *s, uint32_t bytes)
{
    if (!s->low_water || s->low_water == (int)bytes)
        return;
    s->low_water = (int)bytes;
    setsockopt(s->watch.fd, SOL_SOCKET, SO_RCVLOWAT, &s->low_water, sizeof s->low_water);
}

/* How much of `left` bytes can land now without ending inside a block, what the staging buffer holds included.
 * 0: the connection ended; -1 with errno EAGAIN: wait. */
static ssize_t stream_whole_blocks(struct tly_stream *s, uint32_t left)
{
    for (bool ended = false;; ended = true) {
        int available = 0;
        ioctl(s->watch.fd, FIONREAD, &available);
        available += (int)s->staging_to;
        if ((uint32_t)available >= left)
            return left;
        if (available >= TLY_ALIGN)
            return available - available % TLY_ALIGN;
        if (ended)
            return 0; /* what is missing will never come */
        struct pollfd p = {.fd = s->watch.fd, .events = POLLRDHUP};
        if (poll(&p, 1, 0) <= 0)
            break;
        /* The peer has ended; the rest may have come with that, after the first look. */
    }
    errno = EAGAIN;
    return -1;
}

/* Bytes without which waking up is of little use: what is left of the header or the payload, up to a block, or up to
 * WAKE_BYTES of what somebody waits for. */
static uint32_t stream_least_wanted(const struct tly_stream *s)
{
    uint32_t left = s->in ? s->in->follows - s->in->landed + s->in->trailer : stream_header_bytes(s);
    left -= s->staging_to; /* less than a block, a trailer or a header, else it would have been used up */
    uint32_t most = s->in && s->in->to ? WAKE_BYTES : TLY_ALIGN;
    return left < most ? left : most;
}

/* As readv(), and *drained says whether that was all there was. */
static ssize_t stream_read_some(struct tly_stream *s, const struct iovec *iov, int n, bool *drained)
{
    ssize_t r;
    size_t room = iov[0].iov_len + (n > 1 ? iov[1].iov_len : 0);
    do
        r = s->io->receive ? s->io->receive(s, iov, n) : readv(s->watch.fd, iov, n);
    while (r < 0 && errno == EINTR);
    *drained |= r > 0 && (size_t)r < room;
    return r;
}

/* Into the staging buffer, behind `n` buffers for `direct` bytes of the payload. */
static ssize_t stream_receive_staged(struct tly_stream *s, struct iovec *iov, int n, uint32_t direct,
                                     bool *drained)
{
    bool for_header = !s->in || n > 0;
    uint32_t most = s->long_frames && for_header ? TLY_FRAME_BYTES : TLY_STAGING_BYTES;
    iov[n++] = (struct iovec){s->staging + s->staging_to, most - s->staging_to};
    ssize_t r = stream_read_some(s, iov, n, drained);
    if (r <= 0)
        return r;
    uint32_t placed = (uint32_t)r < direct ? (uint32_t)r : direct;
    if (s->in)
        s->in->landed += placed;
    s->staging_to += (uint32_t)r - placed;
    return r;
}

static ssize_t stream_receive(struct tly_stream *s, bool *drained)
{
    static _Thread_local uint8_t sink[64 << 10];
    struct tly_arrival *in = s->in;
    struct iovec iov[2];
    if (!in || in->landed == in->follows)
        return stream_receive_staged(s, iov, 0, 0, drained);
    /* What the staging buffer holds of a payload is less than a block: it lands with the rest of it. */
    uint32_t left = in->follows - in->landed, direct = left;
    if (in->in_blocks && in->to) {
        if (!s->low_water) /* no mark on this socket: a block waits in the staging buffer */
            return stream_receive_staged(s, iov, 0, 0, drained);
        ssize_t blocks = stream_whole_blocks(s, left);
        if (blocks <= 0)
            return blocks;
        *drained = (uint32_t)blocks < left;
        memcpy((uint8_t *)in->to + in->landed, s->staging, s->staging_to);
        direct = (uint32_t)blocks;
    }
    left -= s->staging_to;
    direct -= s->staging_to;
    in->landed += s->staging_to;
    s->staging_to = 0;
    if (in->to) {
        iov[0] = (struct iovec){(uint8_t *)in->to + in->landed, direct};
    } else {
        direct = left < sizeof sink ? left : (uint32_t)sizeof sink;
        iov[0] = (struct iovec){sink, direct};
    }
    if (direct == left)
        return stream_receive_staged(s, iov, 1, direct, drained);
    ssize_t r = stream_read_some(s, iov, 1, drained);
    if (r > 0)
        in->landed += (uint32_t)r;
    return r;
}

static void stream_receive_more(struct tly_stream *s)
{
    const struct tly_channel_user *up = s->base.up;
    uint32_t turn = 0;
    bool drained = false;
    while (!stream_is_closed(s) && turn < TURN_BYTES && !drained) {
        ssize_t n = stream_receive(s, &drained);
        if (n <= 0) {
            if (n == 0)
                up->ended(s->base.user, ECONNRESET, NULL);
            else if (errno != EAGAIN && errno != EWOULDBLOCK)
                up->ended(s->base.user, ECONNRESET, strerror(errno));
            break;
        }
        turn += (uint32_t)n;
        up->heard(s->base.user, (size_t)n);
        if (s->in && s->in->landed == s->in->follows && !s->in->trailer)
            stream_finish_frame(s);
        else if (s->in)
            up->progress(s->base.user);
        stream_eat_staging(s);
    }
    if (!stream_is_closed(s))
        stream_set_low_water(s, stream_least_wanted(s));
}

static void stream_on_connected(struct tly_stream *s)
{
    int err = 0;
    socklen_t len = sizeof err;
    getsockopt(s->watch.fd, SOL_SOCKET, SO_ERROR, &err, &len);
    if (err) {
        s->base.up->ended(s->base.user, err, strerror(err));
        return;
    }
    s->connecting = false;
    stream_watch_for(s, EPOLLIN);
    s->base.up->connected(s->base.user);
}

static void stream_on_ready(struct tly_watch *w, uint32_t events)
{
    struct tly_stream *s = tly_list_entry(w, struct tly_stream, watch);
    const struct tly_channel_user *up = s->base.up;
    void *user = s->base.user;
    up->enter(user);
    if (s->connecting) {
        stream_on_connected(s);
    } else if (events & EPOLLOUT) {
        s->full = false;
        up->room(user);
        stream_watch_for(s, EPOLLIN | (s->full ? EPOLLOUT : 0));
    }
    if (!stream_is_closed(s) && (events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
        stream_receive_more(s);
    up->leave(user);
}
