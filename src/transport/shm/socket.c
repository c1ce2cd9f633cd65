/* socket.c - Unix sockets by abstract names: who can connect shares our kernel and network namespace, and the kernel
 * says who it is. */
#include <errno.h>
#include <sodium.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/un.h>

#include "base/error.h"
#include "base/fork.h"
#include "transport/shm/shm.h"
#include "transport/tcp/socket.h"

enum { BACKLOG = 4096 };

static socklen_t abstract(const char *name, struct sockaddr_un *a)
{
    memset(a, 0, sizeof *a);
    a->sun_family = AF_UNIX;
    strncpy(a->sun_path + 1, name, sizeof a->sun_path - 2);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(a->sun_path + 1));
}

void tly_shm_name(uint64_t incarnation, const char *host_id, char out[TLY_SHM_NAME])
{
    uint8_t hash[16];
    char text[2 * sizeof hash + 1];
    crypto_generichash(hash, sizeof hash, (const uint8_t *)(host_id ? host_id : ""),
                       host_id ? strlen(host_id) : 0, (const uint8_t *)&incarnation, sizeof incarnation);
    snprintf(out, TLY_SHM_NAME, "tally-service-%s", sodium_bin2hex(text, sizeof text, hash, sizeof hash));
}

int tly_shm_connect(struct tly_loop *loop, const char *name, const struct tly_link_config *c,
                    struct tly_link **out)
{
    struct sockaddr_un a;
    socklen_t len = abstract(name, &a);
    int fd = tly_socket_open(AF_UNIX);
    if (fd < 0)
        return tly_fail(errno, "cannot create a socket: %s", strerror(errno));
    if (connect(fd, (struct sockaddr *)&a, len) <
        0) { /* at once, or not at all: a full backlog too is an error */
        int err = errno;
        tly_fd_close(fd);
        return tly_fail(err, "cannot connect to %s: %s", name, strerror(err));
    }
    return tly_link_connect(loop, fd, true, c, out);
}

int tly_shm_listen(struct tly_loop *loop, const char *name, const struct tly_listener_config *c,
                   struct tly_listener **out)
{
    struct sockaddr_un a;
    socklen_t len = abstract(name, &a);
    int fd = tly_socket_open(AF_UNIX);
    if (fd < 0 || bind(fd, (struct sockaddr *)&a, len) < 0 || listen(fd, BACKLOG) < 0) {
        int err = errno;
        tly_fd_close(fd);
        return tly_fail(err, "cannot open a local socket: %s", strerror(err));
    }
    return tly_listener_start(loop, fd, c, out);
}
