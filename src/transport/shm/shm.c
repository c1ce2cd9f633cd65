/* shm.c - the medium within a machine: Unix sockets by abstract names, and payloads that are shown (shm.h).
 *
 * A peer that can connect shares our kernel and network namespace, and the kernel says which user and process it is.  An endpoint
 * is 16 digits of a hash of TALLY_HOST_ID, so that machines that are emulated on one stay apart, and 16 random ones. */
#include "transport/shm/shm.h"

#include <errno.h>
#include <sodium.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/error.h"
#include "base/fork.h"
#include "transport/door.h"
#include "transport/socket.h"

enum { BACKLOG = 4096, HALF = 16 };

static const char *const names[] = {"memory", "shm", NULL};
static const struct tly_stream_io io = {.send = tly_shm_send, .receive = tly_shm_receive};

/* --- names --------------------------------------------------------------------------------------- */

/* The digits that all processes of this machine have in common. */
static void shm_name_machine(const struct tly_params *params, char out[HALF + 1])
{
    uint8_t hash[crypto_generichash_BYTES_MIN];
    const char *id = params && params->host_id ? params->host_id : "";
    crypto_generichash(hash, sizeof hash, (const uint8_t *)id, strlen(id), NULL, 0);
    sodium_bin2hex(out, HALF + 1, hash, HALF / 2);
}

static socklen_t shm_abstract(const char *where, struct sockaddr_un *a)
{
    memset(a, 0, sizeof *a);
    a->sun_family = AF_UNIX;
    snprintf(a->sun_path + 1, sizeof a->sun_path - 1, "tally-service-%s", where);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(a->sun_path + 1));
}

/* The other end of a Unix socket runs as the same user; its pid, or -EACCES. */
static int shm_peer_of(int fd)
{
    struct ucred peer;
    socklen_t len = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) < 0)
        return -errno;
    return peer.uid == geteuid() ? peer.pid : -EACCES;
}

/* --- channels ------------------------------------------------------------------------------------ */

static int shm_make(struct tly_loop *loop, int fd, bool connecting, struct tly_channel **out)
{
    int pid = shm_peer_of(fd);
    if (pid < 0)
        return pid;
    struct tly_shm_channel *s = calloc(1, sizeof *s);
    if (!s)
        return -ENOMEM;
    s->here = pid == getpid();
    s->stream.base.medium = &tly_shm;
    s->stream.base.name = names[s->here ? 0 : 1];
    tly_stream_init(&s->stream, loop, fd, connecting, &io);
    tly_shm_lend_init(s);
    tly_shm_read_init(s);
    *out = &s->stream.base;
    return 0;
}

/* As if the peer were another process. */
static void shm_pretend(struct tly_channel *c)
{
    tly_shm_of(c)->here = false;
    c->name = names[1];
}

static int shm_dial(const struct tly_dial *d, struct tly_channel **out)
{
    struct sockaddr_un a;
    char machine[HALF + 1];
    shm_name_machine(d->params, machine);
    if (strncmp(d->where, machine, HALF) != 0)
        return tly_fail(ECONNREFUSED, "%s is on another machine", d->where);
    socklen_t len = shm_abstract(d->where, &a);
    int fd = tly_socket_open(AF_UNIX);
    if (fd < 0)
        return tly_fail(errno, "cannot create a socket: %s", strerror(errno));
    tly_shm_name_end(fd);
    /* At once, or not at all: a full backlog too is an error. */
    int err = connect(fd, (struct sockaddr *)&a, len) < 0 ? -errno : shm_make(d->loop, fd, true, out);
    if (err) {
        tly_fd_close(fd);
        return tly_fail(-err, "cannot connect to %s: %s", d->where, strerror(-err));
    }
    if (d->copies)
        shm_pretend(*out);
    return 0;
}

static void shm_close_channel(struct tly_channel *c)
{
    struct tly_shm_channel *s = tly_shm_of(c);
    tly_stream_close(c);
    tly_shm_part(s);
    tly_shm_read_close(s);
    tly_shm_lend_close(s);
}

static void shm_destroy(struct tly_channel *c)
{
    free(tly_shm_of(c));
}

/* --- the door ------------------------------------------------------------------------------------ */

static struct tly_channel *shm_adopt(struct tly_socket_door *d, int fd, const struct sockaddr_storage *from,
                                     char name[80])
{
    struct tly_channel *c = NULL;
    snprintf(name, 80, "a process of this machine");
    if (shm_make(d->loop, fd, false, &c) != 0)
        return NULL;
    if (d->config.copies)
        shm_pretend(c);
    else
        tly_shm_join(tly_shm_of(c), from);
    return c;
}

static int shm_listen_at(const struct tly_door_config *c, struct tly_door **out)
{
    struct sockaddr_un a;
    char where[TLY_ENDPOINT];
    uint64_t random;
    randombytes_buf(&random, sizeof random);
    shm_name_machine(c->params, where);
    snprintf(where + HALF, sizeof where - HALF, "%016llx", (unsigned long long)random);
    socklen_t len = shm_abstract(where, &a);
    int fd = tly_socket_open(AF_UNIX);
    if (fd < 0 || bind(fd, (struct sockaddr *)&a, len) < 0 || listen(fd, BACKLOG) < 0) {
        int err = errno;
        tly_fd_close(fd);
        return tly_fail(err, "cannot open a local socket: %s", strerror(err));
    }
    return tly_socket_door_open(&tly_shm, fd, where, 0, c, shm_adopt, out);
}

static bool shm_allowed(const struct tly_params *params)
{
    return params->shm;
}

static const struct tly_lending lending = {.show = tly_shm_show,
                                           .resolve = tly_shm_resolve,
                                           .done = tly_shm_done,
                                           .next_return = tly_shm_next_return,
                                           .returned = tly_shm_returned};

const struct tly_medium tly_shm = {
    .scheme = "shm",
    .names = names,
    .in_order = true,
    .inside = true,
    .allowed = shm_allowed,
    .listen = shm_listen_at,
    .shut = tly_socket_door_shut,
    .dial = shm_dial,
    .start = tly_stream_start,
    .send = tly_stream_send,
    .close = shm_close_channel,
    .destroy = shm_destroy,
    .detach = tly_shm_detach,
    .lending = &lending,
};
