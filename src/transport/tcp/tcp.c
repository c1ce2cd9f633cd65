/* tcp.c - the medium that leads everywhere: one TCP connection a channel, packets as a stream (stream.c). */
#include "transport/tcp/tcp.h"

#include <errno.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/fork.h"
#include "transport/address.h"
#include "transport/door.h"
#include "transport/stream.h"

static const char *const names[] = {"tcp", NULL};

static int tcp_fd_of(const struct tly_channel *c)
{
    return tly_list_entry(c, const struct tly_stream, base)->watch.fd;
}

/* The kernel takes some bytes of each send, though it is over its limit: as many as its last packet has room for. */
static bool tcp_lift(struct tly_stream *s, size_t taken)
{
    int unsent = 0;
    if (ioctl(s->watch.fd, SIOCOUTQNSD, &unsent) < 0 || (size_t)unsent >= taken + TLY_TCP_UNSENT)
        return false;
    tly_tcp_limit_unsent(s->watch.fd, false);
    return true;
}

static void tcp_lower(struct tly_stream *s)
{
    tly_tcp_limit_unsent(s->watch.fd, true);
}

static const struct tly_stream_io io = {.lift = tcp_lift, .lower = tcp_lower};

static struct tly_channel *tcp_make(struct tly_loop *loop, int fd, bool connecting)
{
    struct tly_stream *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->base.medium = &tly_tcp;
    s->base.name = names[0];
    tly_stream_init(s, loop, fd, connecting, &io);
    return &s->base;
}

static void tcp_destroy(struct tly_channel *c)
{
    free(tly_list_entry(c, struct tly_stream, base));
}

static int tcp_dial(const struct tly_dial *d, struct tly_channel **out)
{
    struct sockaddr_storage to;
    int fd, err = tly_address_read(d->where, &to);
    if (err)
        return tly_fail(EPROTO, "'%s' is no address", d->where);
    err = tly_tcp_connect(&to, &fd);
    if (err)
        return err;
    *out = tcp_make(d->loop, fd, true);
    if (*out)
        return 0;
    tly_fd_close(fd);
    return tly_fail(ENOMEM, "out of memory");
}

static struct tly_channel *tcp_adopt(struct tly_socket_door *d, int fd, const struct sockaddr_storage *from,
                                     char name[80])
{
    tly_tcp_accept(fd, from, name);
    return tcp_make(d->loop, fd, false);
}

static int tcp_reserve(const struct tly_door_config *c, int *out, uint16_t *port)
{
    struct sockaddr_storage a;
    int fd, err = tly_tcp_bind(c, &fd);
    if (!err)
        err = tly_tcp_where(fd, &a);
    if (err)
        return err;
    *out = fd;
    *port = tly_address_port(&a);
    return 0;
}

static int tcp_listen_at(const struct tly_door_config *c, struct tly_door **out)
{
    struct sockaddr_storage a;
    char where[TLY_ENDPOINT];
    int fd = c->reserved, err = fd < 0 ? tly_tcp_bind(c, &fd) : 0;
    if (!err)
        err = tly_tcp_where(fd, &a);
    if (err)
        return err;
    tly_address_text(&a, where, sizeof where);
    return tly_socket_door_open(&tly_tcp, fd, where, tly_address_port(&a), c, tcp_adopt, out);
}

/* --- the network --------------------------------------------------------------------------------- */

static void tcp_address(const struct tly_channel *c, bool remote, struct sockaddr_storage *out)
{
    socklen_t len = sizeof *out;
    if (remote)
        getpeername(tcp_fd_of(c), (struct sockaddr *)out, &len);
    else
        getsockname(tcp_fd_of(c), (struct sockaddr *)out, &len);
    tly_address_unmap(out);
}

static int tcp_load(const struct tly_channel *c, struct tly_link_load *out)
{
    return tly_tcp_load(tcp_fd_of(c), out);
}

static int64_t tcp_queued(const struct tly_channel *c)
{
    int bytes;
    return ioctl(tcp_fd_of(c), SIOCOUTQ, &bytes) == 0 ? bytes : -1;
}

static int64_t tcp_unanswered(const struct tly_channel *c)
{
    struct tcp_info info = {0};
    socklen_t len = sizeof info;
    if (getsockopt(tcp_fd_of(c), IPPROTO_TCP, TCP_INFO, &info, &len) != 0)
        return 0;
    return info.tcpi_last_ack_recv * TLY_MS;
}

static const struct tly_network network = {
    .address = tcp_address, .load = tcp_load, .queued = tcp_queued, .unanswered = tcp_unanswered};

const struct tly_medium tly_tcp = {
    .scheme = "tcp",
    .names = names,
    .by_address = true,
    .in_order = true,
    .listen = tcp_listen_at,
    .shut = tly_socket_door_shut,
    .reserve = tcp_reserve,
    .dial = tcp_dial,
    .start = tly_stream_start,
    .send = tly_stream_send,
    .close = tly_stream_close,
    .destroy = tcp_destroy,
    .network = &network,
};
