/* socket.c - TCP sockets: settings, connecting, listening. */
#include <errno.h>
#include <limits.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "base/fork.h"
#include "transport/address.h"
#include "transport/socket.h"
#include "transport/tcp/tcp.h"

enum {
    /* Large enough that no peer sees a closed window and waits for the persist timer (200 ms) at the start. */
    RECEIVE_BUFFER = 4 << 20,
    BACKLOG = 4096,
    LISTEN_TRIES = 8,
    LISTEN_PAUSE_US = 50, /* before the second try; doubles */
};

static void socket_set(int fd, int level, int name, int value)
{
    setsockopt(fd, level, name, &value, sizeof value); /* a hint that fails is no error */
}

void tly_tcp_limit_unsent(int fd, bool limited)
{
    socket_set(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, limited ? TLY_TCP_UNSENT : INT_MAX);
}

static void socket_tune(int fd)
{
    socket_set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    tly_tcp_limit_unsent(fd, true);
    /* bbr, the default of many systems, reaches a third of cubic's goodput when many flows meet. */
    setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "cubic", 5);
}

/* Must be set before connect() and listen() to count in the window scale.  Where the system allows less
 * (net.core.rmem_max), its own tuning does better than a fixed small buffer. */
static void socket_size_buffers(int fd)
{
    int value = RECEIVE_BUFFER;
    if (setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &value, sizeof value) == 0)
        return;
    unsigned long long most = 0;
    FILE *f = fopen("/proc/sys/net/core/rmem_max", "re");
    if (f) {
        if (fscanf(f, "%llu", &most) != 1)
            most = 0;
        fclose(f);
    }
    if (most >= RECEIVE_BUFFER)
        socket_set(fd, SOL_SOCKET, SO_RCVBUF, value);
}

int tly_tcp_connect(const struct sockaddr_storage *to, int *out)
{
    int fd = tly_socket_open(to->ss_family);
    if (fd < 0)
        return tly_fail(errno, "cannot create a socket: %s", strerror(errno));
    socket_size_buffers(fd);
    socket_tune(fd);
    if (connect(fd, (const struct sockaddr *)to, tly_address_len(to)) < 0 && errno != EINPROGRESS) {
        int err = errno;
        char text[80];
        tly_address_text(to, text, sizeof text);
        tly_fd_close(fd);
        return tly_fail(err, "cannot connect to %s: %s", text, strerror(err));
    }
    *out = fd;
    return 0;
}

static int socket_bind_port(int fd, struct sockaddr_storage *a, uint16_t first, uint16_t last)
{
    if (tly_address_port(a) || !first)
        return bind(fd, (struct sockaddr *)a, tly_address_len(a));
    /* Start somewhere in the range, so that the processes of a machine do not all try the same one. */
    unsigned span = (unsigned)(last - first) + 1, from = (unsigned)getpid() % span;
    for (unsigned i = 0; i < span; i++) {
        tly_address_set_port(a, (uint16_t)(first + (from + i) % span));
        if (bind(fd, (struct sockaddr *)a, tly_address_len(a)) == 0)
            return 0;
        if (errno != EADDRINUSE)
            return -1;
    }
    errno = EADDRINUSE;
    return -1;
}

/* 0 with *out listening at *a, of which a port of 0 is chosen; else what went wrong.  EAGAIN: bind() let it, listen() not. */
static int socket_listen_at(const struct tly_door_config *c, struct sockaddr_storage *a, int *out)
{
    int fd = tly_socket_open(a->ss_family);
    if (fd < 0)
        return errno;
    socket_set(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    if (a->ss_family == AF_INET6)
        socket_set(fd, IPPROTO_IPV6, IPV6_V6ONLY, !tly_address_is_any(a));
    socket_size_buffers(fd);
    int err = socket_bind_port(fd, a, c->first_port, c->last_port) ? errno : 0;
    if (err) {
        tly_fd_close(fd);
        return err;
    }
    if (listen(fd, BACKLOG) < 0) {
        err = errno == EADDRINUSE ? EAGAIN : errno;
        tly_fd_close(fd);
        return err;
    }
    *out = fd;
    return 0;
}

/* Linux refuses both of two sockets that begin to listen on one port at the same moment.  So who was let bind, but not
 * listen, tries again after a time of its own: bind() refuses then if the other one listens. */
static int socket_listen_alone(const struct tly_door_config *c, struct sockaddr_storage *a, int *out)
{
    int err = EAGAIN;
    for (int i = 0; i < LISTEN_TRIES && err == EAGAIN; i++) {
        if (i > 0)
            usleep(1 + randombytes_uniform(LISTEN_PAUSE_US << i));
        *a = *c->address;
        err = socket_listen_at(c, a, out);
    }
    return err == EAGAIN ? EADDRINUSE : err;
}

int tly_tcp_bind(const struct tly_door_config *c, int *out)
{
    char text[80], holder[TLY_HOLDER];
    struct sockaddr_storage a;
    int why = socket_listen_alone(c, &a, out);
    if (!why)
        return 0;
    tly_address_host(c->address, text, sizeof text);
    if (why == EADDRINUSE && c->first_port && !tly_address_port(c->address))
        return tly_fail(why, "no port from %u to %u is free on %s (TALLY_PORTS); each process here needs one",
                        c->first_port, c->last_port, text);
    holder[0] = '\0';
    if (why == EADDRINUSE)
        tly_address_holder(c->address, holder);
    return tly_fail(why, "cannot listen on %s port %u: %s%s", text, tly_address_port(c->address),
                    strerror(why), holder);
}

int tly_tcp_where(int fd, struct sockaddr_storage *out)
{
    socklen_t len = sizeof *out;
    memset(out, 0, sizeof *out);
    if (getsockname(fd, (struct sockaddr *)out, &len) == 0)
        return 0;
    int err = tly_fail(errno, "cannot tell the port that was taken");
    tly_fd_close(fd);
    return err;
}

void tly_tcp_accept(int fd, const struct sockaddr_storage *from, char name[80])
{
    struct sockaddr_storage a = *from;
    socket_tune(fd);
    tly_address_unmap(&a);
    tly_address_text(&a, name, 80);
}
