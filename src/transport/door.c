/* door.c - accepts what connects to a listening socket, a few at a time, and rests where nothing can be accepted. */
#include "transport/door.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

#include "base/error.h"
#include "base/fork.h"
#include "base/log.h"
#include "transport/socket.h"

enum { ACCEPTS_A_TURN = 64, MOST_SHAKING = 4096 };

/* Nothing can be accepted now, and epoll would report that again and again: until the next tick it is not asked. */
static void door_rest(struct tly_socket_door *d, const char *why)
{
    if (!d->told)
        tly_warn("transport", "cannot accept connections on port %u (0: of this machine) for now: %s",
                 d->base.port, why);
    d->told = d->resting = true;
    tly_loop_change(d->loop, &d->watch, 0);
}

static void door_on_tick(struct tly_hook *h)
{
    struct tly_socket_door *d = tly_list_entry(h, struct tly_socket_door, hook);
    tly_strangers_tell(&d->base.strangers, d->base.port, d->loop->awake, false);
    if (!d->resting)
        return;
    d->resting = false;
    tly_loop_change(d->loop, &d->watch, EPOLLIN);
}

/* False: there are no more for now. */
static bool door_accept_one(struct tly_socket_door *d)
{
    struct sockaddr_storage from;
    socklen_t len = sizeof from;
    char name[80];
    if (d->base.strangers.shaking >= MOST_SHAKING) { /* strangers have 5 s; others wait in the backlog */
        door_rest(d, "too many that have not proved the secret");
        return false;
    }
    memset(&from, 0, sizeof from);
    int fd = tly_fd_own(accept4(d->watch.fd, (struct sockaddr *)&from, &len, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd < 0) {
        int err = errno;
        if (tly_socket_raise_limit(err))
            return true;
        if (err == EMFILE || err == ENFILE || err == ENOBUFS || err == ENOMEM)
            door_rest(d, strerror(err));
        return false; /* all else concerns one connection, or none */
    }
    struct tly_channel *c = d->adopt(d, fd, &from, name);
    if (c)
        d->config.accepted(d->config.user, &d->base, c, name);
    else
        tly_fd_close(fd);
    return true;
}

static void door_on_connection(struct tly_watch *w, uint32_t events)
{
    struct tly_socket_door *d = tly_list_entry(w, struct tly_socket_door, watch);
    for (int i = 0; i < ACCEPTS_A_TURN && door_accept_one(d); i++)
        ;
}

int tly_socket_door_open(const struct tly_medium *medium, int fd, const char *where, uint16_t port,
                         const struct tly_door_config *c,
                         struct tly_channel *(*adopt)(struct tly_socket_door *d, int fd,
                                                      const struct sockaddr_storage *from, char name[80]),
                         struct tly_door **out)
{
    struct tly_socket_door *d = calloc(1, sizeof *d);
    int err = d ? 0 : tly_fail(ENOMEM, "out of memory");
    if (!err) {
        *d = (struct tly_socket_door){.base = {.medium = medium, .port = port},
                                      .loop = c->loop,
                                      .watch = {.fd = fd, .ready = door_on_connection},
                                      .hook = {.tick = door_on_tick},
                                      .config = *c,
                                      .adopt = adopt};
        snprintf(d->base.where, sizeof d->base.where, "%s", where);
        err = tly_loop_add(c->loop, &d->watch, EPOLLIN);
    }
    if (err) {
        free(d);
        tly_fd_close(fd);
        return err;
    }
    tly_loop_hook(c->loop, &d->hook);
    *out = &d->base;
    return 0;
}

void tly_socket_door_shut(struct tly_door *door)
{
    struct tly_socket_door *d = tly_list_entry(door, struct tly_socket_door, base);
    tly_strangers_tell(&d->base.strangers, d->base.port, d->loop->awake, true);
    tly_loop_unhook(d->loop, &d->hook);
    tly_loop_remove(d->loop, &d->watch);
    tly_fd_close(d->watch.fd);
    free(d);
}
