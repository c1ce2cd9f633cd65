/* socket.c - sockets with the settings that measuring has shown to matter, listeners, addresses. */
#include "transport/tcp/socket.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/error.h"
#include "base/fork.h"
#include "base/log.h"
#include "transport/tcp/strangers.h"

enum {
    /* Large enough that no peer sees a closed window and waits for the persist timer (200 ms) at the start. */
    RECEIVE_BUFFER = 4 << 20,
    /* What the kernel has cannot be overtaken: keep little there that is not yet on the wire. */
    NOT_SENT_LOW_WATER = 256 << 10,
    BACKLOG = 4096,
    ACCEPTS_A_TURN = 64,
    MOST_SHAKING = 4096,
};

static void set(int fd, int level, int name, int value)
{
    setsockopt(fd, level, name, &value, sizeof value); /* a hint that fails is no error */
}

void tly_socket_tune(int fd)
{
    set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    set(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, NOT_SENT_LOW_WATER);
    /* bbr, the default of many systems, reaches a third of cubic's goodput when many flows meet. */
    setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "cubic", 5);
}

/* Must be set before connect() and listen() to count in the window scale.  Where the system allows less
 * (net.core.rmem_max), its own tuning does better than a fixed small buffer. */
static void size_buffers(int fd)
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
        set(fd, SOL_SOCKET, SO_RCVBUF, value);
}

/* With many ranks the usual 1024 descriptors do not do.  The application's limit is left alone until then. */
static bool raise_limit(int err)
{
    struct rlimit files;
    if (err != EMFILE || getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur == files.rlim_max)
        return false;
    files.rlim_cur = files.rlim_max;
    return setrlimit(RLIMIT_NOFILE, &files) == 0;
}

int tly_socket_open(int family)
{
    int fd;
    do
        fd = tly_fd_own(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    while (fd < 0 && raise_limit(errno));
    return fd;
}

int tly_socket_connect(const struct sockaddr_storage *to, int *out)
{
    int fd = tly_socket_open(to->ss_family);
    if (fd < 0)
        return tly_fail(errno, "cannot create a socket: %s", strerror(errno));
    size_buffers(fd);
    tly_socket_tune(fd);
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

/* Owner: the loop. */
struct tly_listener {
    struct tly_loop *loop;
    struct tly_watch watch;
    struct tly_hook hook;
    struct tly_listener_config config;
    bool resting, told; /* out of descriptors or memory, or too many strangers; and that has been said */
    struct tly_strangers strangers;
    uint16_t port;
};

/* Nothing can be accepted now, and epoll would report that again and again: until the next tick it is not asked. */
static void rest(struct tly_listener *l, const char *why)
{
    if (!l->told)
        tly_warn("transport", "cannot accept connections on port %u (0: of this machine) for now: %s",
                 l->port, why);
    l->told = l->resting = true;
    tly_loop_change(l->loop, &l->watch, 0);
}

static void on_tick(struct tly_hook *h)
{
    struct tly_listener *l = tly_list_entry(h, struct tly_listener, hook);
    tly_strangers_tell(&l->strangers, l->port, l->loop->awake, false);
    if (!l->resting)
        return;
    l->resting = false;
    tly_loop_change(l->loop, &l->watch, EPOLLIN);
}

static void on_connection(struct tly_watch *w, uint32_t events)
{
    struct tly_listener *l = tly_list_entry(w, struct tly_listener, watch);
    for (int i = 0; i < ACCEPTS_A_TURN; i++) {
        if (l->strangers.shaking >= MOST_SHAKING) { /* strangers have 5 s; others wait in the backlog */
            rest(l, "too many that have not proved the secret");
            return;
        }
        struct sockaddr_storage from;
        socklen_t len = sizeof from;
        memset(&from, 0, sizeof from);
        int fd = tly_fd_own(accept4(w->fd, (struct sockaddr *)&from, &len, SOCK_NONBLOCK | SOCK_CLOEXEC));
        if (fd < 0) {
            int err = errno;
            if (raise_limit(err))
                continue;
            if (err == EMFILE || err == ENFILE || err == ENOBUFS || err == ENOMEM)
                rest(l, strerror(err));
            return; /* all else concerns one connection, or none */
        }
        char name[80];
        bool local = from.ss_family == AF_UNIX;
        if (local) {
            snprintf(name, sizeof name, "a process of this machine");
        } else {
            tly_socket_tune(fd);
            tly_address_unmap(&from);
            tly_address_text(&from, name, sizeof name);
        }
        struct tly_link_config c = {.peer_name = name, .strangers = &l->strangers};
        int err = l->config.accepting(l->config.user, &c);
        if (err) {
            tly_fd_close(fd);
        } else if (tly_link_accept(l->loop, fd, local, &c) != 0) {
            tly_fd_close(fd);
            c.user_calls->closed(c.user, NULL, ENOMEM, "out of memory"); /* accepting() counts on it */
        }
    }
}

static int bind_port(int fd, struct sockaddr_storage *a, uint16_t first, uint16_t last)
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

int tly_tcp_bind(const struct tly_listener_config *c, int *out)
{
    char text[80], holder[TLY_HOLDER];
    struct sockaddr_storage a = c->address;
    int fd = tly_socket_open(a.ss_family);
    if (fd < 0)
        return tly_fail(errno, "cannot create a socket: %s", strerror(errno));
    set(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    if (a.ss_family == AF_INET6)
        set(fd, IPPROTO_IPV6, IPV6_V6ONLY, !tly_address_is_any(&a));
    size_buffers(fd);
    if (bind_port(fd, &a, c->first_port, c->last_port) == 0 && listen(fd, BACKLOG) == 0) {
        *out = fd;
        return 0;
    }
    int err, why = errno;
    tly_address_host(&c->address, text, sizeof text);
    tly_fd_close(fd);
    if (why == EADDRINUSE && c->first_port && !tly_address_port(&c->address)) {
        err = tly_fail(why, "no port from %u to %u is free on %s (TALLY_PORTS); each process here needs one",
                       c->first_port, c->last_port, text);
    } else {
        tly_tcp_holder(why == EADDRINUSE ? tly_address_port(&c->address) : 0, holder);
        err = tly_fail(why, "cannot listen on %s port %u: %s%s", text, tly_address_port(&c->address),
                       strerror(why), holder);
    }
    return err;
}

int tly_tcp_listen(struct tly_loop *loop, const struct tly_listener_config *c, struct tly_listener **out)
{
    int fd, err = tly_tcp_bind(c, &fd);
    return err ? err : tly_listener_start(loop, fd, c, out);
}

int tly_listener_start(struct tly_loop *loop, int fd, const struct tly_listener_config *c,
                       struct tly_listener **out)
{
    struct sockaddr_storage a;
    socklen_t len = sizeof a;
    struct tly_listener *l = NULL;
    int err;
    memset(&a, 0, sizeof a);
    if (getsockname(fd, (struct sockaddr *)&a, &len) < 0 || !(l = calloc(1, sizeof *l))) {
        err = tly_fail(ENOMEM, "out of memory");
        goto fail;
    }
    *l = (struct tly_listener){
        .loop = loop, .watch = {.fd = fd, .ready = on_connection}, .hook = {.tick = on_tick}, .config = *c};
    l->port = a.ss_family == AF_UNIX ? 0 : tly_address_port(&a);
    err = tly_loop_add(loop, &l->watch, EPOLLIN);
    if (err)
        goto fail;
    tly_loop_hook(loop, &l->hook);
    *out = l;
    return 0;
fail:
    free(l);
    tly_fd_close(fd);
    return err;
}

uint16_t tly_listener_port(const struct tly_listener *l)
{
    return l->port;
}

void tly_listener_destroy(struct tly_listener *l)
{
    if (!l)
        return;
    tly_strangers_tell(&l->strangers, l->port, l->loop->awake, true);
    tly_loop_unhook(l->loop, &l->hook);
    tly_loop_remove(l->loop, &l->watch);
    tly_fd_close(l->watch.fd);
    free(l);
}

/* --- addresses ----------------------------------------------------------------------------------- */

socklen_t tly_address_len(const struct sockaddr_storage *a)
{
    return a->ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
}

uint16_t tly_address_port(const struct sockaddr_storage *a)
{
    return ntohs(a->ss_family == AF_INET6 ? ((const struct sockaddr_in6 *)a)->sin6_port
                                          : ((const struct sockaddr_in *)a)->sin_port);
}

void tly_address_set_port(struct sockaddr_storage *a, uint16_t port)
{
    if (a->ss_family == AF_INET6)
        ((struct sockaddr_in6 *)a)->sin6_port = htons(port);
    else
        ((struct sockaddr_in *)a)->sin_port = htons(port);
}

void tly_address_host(const struct sockaddr_storage *a, char *out, size_t len)
{
    bool v6 = a->ss_family == AF_INET6;
    const void *host = v6 ? (const void *)&((const struct sockaddr_in6 *)a)->sin6_addr
                          : (const void *)&((const struct sockaddr_in *)a)->sin_addr;
    if (!inet_ntop(v6 ? AF_INET6 : AF_INET, host, out, (socklen_t)len))
        snprintf(out, len, "?");
}

void tly_address_text(const struct sockaddr_storage *a, char *out, size_t len)
{
    char host[INET6_ADDRSTRLEN];
    tly_address_host(a, host, sizeof host);
    snprintf(out, len, a->ss_family == AF_INET6 ? "[%s]:%u" : "%s:%u", host, tly_address_port(a));
}

bool tly_address_is_loopback(const struct sockaddr_storage *a)
{
    if (a->ss_family == AF_INET6) {
        const struct in6_addr *i = &((const struct sockaddr_in6 *)a)->sin6_addr;
        return IN6_IS_ADDR_LOOPBACK(i) || (IN6_IS_ADDR_V4MAPPED(i) && i->s6_addr[12] == 127);
    }
    return ntohl(((const struct sockaddr_in *)a)->sin_addr.s_addr) >> 24 == 127;
}

bool tly_address_same_host(const struct sockaddr_storage *a, const struct sockaddr_storage *b)
{
    if (a->ss_family != b->ss_family)
        return false;
    if (a->ss_family == AF_INET6)
        return memcmp(&((const struct sockaddr_in6 *)a)->sin6_addr,
                      &((const struct sockaddr_in6 *)b)->sin6_addr, 16) == 0;
    return ((const struct sockaddr_in *)a)->sin_addr.s_addr ==
           ((const struct sockaddr_in *)b)->sin_addr.s_addr;
}

void tly_address_unmap(struct sockaddr_storage *a)
{
    struct sockaddr_in6 v6;
    struct sockaddr_in *v4 = (struct sockaddr_in *)a;
    memcpy(&v6, a, sizeof v6);
    if (a->ss_family != AF_INET6 || !IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr))
        return;
    memset(a, 0, sizeof *a);
    v4->sin_family = AF_INET;
    v4->sin_port = v6.sin6_port;
    memcpy(&v4->sin_addr, v6.sin6_addr.s6_addr + 12, 4);
}

void tly_address_any(struct sockaddr_storage *out)
{
    struct sockaddr_storage a = {.ss_family = AF_INET6};
    int fd = tly_socket_open(AF_INET6);
    if (fd < 0 || bind(fd, (struct sockaddr *)&a, sizeof(struct sockaddr_in6)) < 0)
        a.ss_family = AF_INET;
    if (fd >= 0)
        tly_fd_close(fd);
    *out = a;
}

bool tly_address_is_any(const struct sockaddr_storage *a)
{
    if (a->ss_family == AF_INET6)
        return IN6_IS_ADDR_UNSPECIFIED(&((const struct sockaddr_in6 *)a)->sin6_addr);
    return ((const struct sockaddr_in *)a)->sin_addr.s_addr == htonl(INADDR_ANY);
}

bool tly_address_is_link_local(const struct sockaddr_storage *a)
{
    return a->ss_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&((const struct sockaddr_in6 *)a)->sin6_addr);
}

int tly_address_parse(const char *host, uint16_t port, struct sockaddr_storage *out)
{
    struct sockaddr_storage a = {0};
    struct sockaddr_in *v4 = (struct sockaddr_in *)&a;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&a;
    if (inet_pton(AF_INET, host, &v4->sin_addr) == 1)
        a.ss_family = AF_INET;
    else if (inet_pton(AF_INET6, host, &v6->sin6_addr) == 1)
        a.ss_family = AF_INET6;
    else
        return -EINVAL;
    tly_address_set_port(&a, port);
    *out = a;
    return 0;
}
