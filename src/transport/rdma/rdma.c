/* rdma.c - the medium of RDMA: a channel begins as a TCP socket to a port of its own, over which the handshake goes.
 *
 * The socket stays: it tells at once that the peer has ended.  The card does so only after its retries. */
#include "transport/rdma/rdma.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/fork.h"
#include "transport/address.h"
#include "transport/door.h"
#include "transport/tcp/tcp.h"

static const char *const names[] = {"rdma", NULL};

/* From the socket.  Once packets go through the queue pair nothing may come but its end or its reset, and what came before
 * that is taken first. */
static ssize_t rdma_receive(struct tly_stream *s, const struct iovec *iov, int n)
{
    struct tly_rdma_channel *r = tly_rdma_of(&s->base);
    ssize_t got = readv(s->watch.fd, iov, n);
    int err = errno;
    if (!r->begun || (got < 0 && err != ECONNRESET))
        return got;
    errno = EPROTO;
    if (got > 0)
        return -1;
    tly_rdma_visit(r);
    r->broken = true;
    errno = err;
    return got;
}

static const struct tly_stream_io io = {.receive = rdma_receive};

static struct tly_channel *rdma_make(struct tly_loop *loop, int fd, bool connecting,
                                     const struct tly_params *params)
{
    struct tly_rdma_channel *r = calloc(1, sizeof *r);
    if (!r)
        return NULL;
    r->stream.base.medium = &tly_rdma;
    r->stream.base.name = names[0];
    r->visit = tly_rdma_visit;
    r->choice.gid = -1;
    if (params) {
        snprintf(r->choice.device, sizeof r->choice.device, "%s",
                 params->rdma_device ? params->rdma_device : "");
        r->choice.gid = (int)params->rdma_gid;
        r->choice.class = (int)params->rdma_class;
    }
    tly_list_init(&r->node);
    tly_list_init(&r->pending);
    tly_list_init(&r->hook.node);
    tly_stream_init(&r->stream, loop, fd, connecting, &io);
    return &r->stream.base;
}

static int rdma_dial(const struct tly_dial *d, struct tly_channel **out)
{
    struct sockaddr_storage to;
    int fd;
    if (!tly_rdma_is_there())
        return tly_fail(ENODEV, "this machine has no RDMA device");
    if (tly_address_read(d->where, &to) != 0)
        return tly_fail(EPROTO, "'%s' is no address", d->where);
    int err = tly_tcp_connect(&to, &fd);
    if (err)
        return err;
    *out = rdma_make(d->loop, fd, true, d->params);
    if (*out)
        return 0;
    tly_fd_close(fd);
    return tly_fail(ENOMEM, "out of memory");
}

static void rdma_close(struct tly_channel *c)
{
    struct tly_rdma_channel *r = tly_rdma_of(c);
    if (tly_rdma_is_closed(r))
        return;
    if (r->begun)
        tly_loop_unhook(r->stream.loop, &r->hook);
    tly_rdma_tear_down(r); /* what the card has is sent before the peer sees the end of the socket */
    tly_stream_close(c);
}

static void rdma_destroy(struct tly_channel *c)
{
    free(tly_rdma_of(c));
}

/* --- the door ------------------------------------------------------------------------------------ */

static struct tly_channel *rdma_adopt(struct tly_socket_door *d, int fd, const struct sockaddr_storage *from,
                                      char name[80])
{
    tly_tcp_accept(fd, from, name);
    return rdma_make(d->loop, fd, false, d->config.params);
}

static int rdma_listen_at(const struct tly_door_config *c, struct tly_door **out)
{
    struct sockaddr_storage at = *c->address;
    struct tly_door_config config = *c;
    char where[TLY_ENDPOINT];
    int fd;
    if (!tly_rdma_is_there())
        return tly_fail(ENODEV, "this machine has no RDMA device");
    tly_address_set_port(&at, 0); /* TCP has the one that was asked for */
    config.address = &at;
    int err = tly_tcp_bind(&config, &fd);
    if (!err)
        err = tly_tcp_where(fd, &at);
    if (err)
        return err;
    tly_address_text(&at, where, sizeof where);
    return tly_socket_door_open(&tly_rdma, fd, where, tly_address_port(&at), c, rdma_adopt, out);
}

static bool rdma_allowed(const struct tly_params *params)
{
    return params->rdma && tly_rdma_is_there();
}

/* --- the network --------------------------------------------------------------------------------- */

static void rdma_address(const struct tly_channel *c, bool remote, struct sockaddr_storage *out)
{
    tly_tcp.network->address(c, remote, out);
}

static const struct tly_rdma_channel *rdma_seen(const struct tly_channel *c)
{
    return tly_list_entry(c, const struct tly_rdma_channel, stream.base);
}

static int rdma_load(const struct tly_channel *c, struct tly_link_load *out)
{
    const struct tly_rdma_channel *r = rdma_seen(c);
    int64_t busy = r->busy_ns + (r->sent != r->completed ? tly_now() - r->busy_since : 0);
    out->bytes = r->bytes_completed;
    out->arrived = r->bytes_arrived;
    out->busy_us = (uint64_t)busy / 1000;
    return 0;
}

static int64_t rdma_queued(const struct tly_channel *c)
{
    const struct tly_rdma_channel *r = rdma_seen(c);
    return (int64_t)(r->bytes_sent - r->bytes_completed);
}

static int64_t rdma_unanswered(const struct tly_channel *c)
{
    const struct tly_rdma_channel *r = rdma_seen(c);
    return r->sent != r->completed ? tly_now() - r->answered_at : 0;
}

static const struct tly_network network = {
    .address = rdma_address, .load = rdma_load, .queued = rdma_queued, .unanswered = rdma_unanswered};

const struct tly_medium tly_rdma = {
    .scheme = "rdma",
    .names = names,
    .in_order = true,
    .memory = TLY_RDMA_OWN_BYTES + TLY_RDMA_PLACES_BYTES,
    .tries = 3,
    .allowed = rdma_allowed,
    .listen = rdma_listen_at,
    .shut = tly_socket_door_shut,
    .dial = rdma_dial,
    .start = tly_stream_start,
    .send = tly_rdma_send,
    .close = rdma_close,
    .destroy = rdma_destroy,
    .setup = &tly_rdma_setup,
    .network = &network,
};
