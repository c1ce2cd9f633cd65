/* proof.c - passing a memfd over an abstract Unix socket. */
#include "membership/proof.h"

#include <errno.h>
#include <fcntl.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/error.h"
#include "base/fork.h"

static socklen_t proof_abstract(const char *name, struct sockaddr_un *a)
{
    memset(a, 0, sizeof *a);
    a->sun_family = AF_UNIX;
    strncpy(a->sun_path + 1, name, sizeof a->sun_path - 2);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(a->sun_path + 1));
}

static void proof_pass(int to, int fd)
{
    char byte = 0, control[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec iov = {&byte, 1};
    struct msghdr m = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(c), &fd, sizeof fd);
    sendmsg(to, &m, MSG_NOSIGNAL | MSG_DONTWAIT); /* who does not get it is another machine */
}

static void proof_on_knock(struct tly_watch *w, uint32_t events)
{
    struct tly_proof_door *d = tly_list_entry(w, struct tly_proof_door, watch);
    int fd = accept4(w->fd, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0)
        return;
    struct ucred peer;
    socklen_t len = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) == 0 && peer.uid == geteuid())
        proof_pass(fd, d->memfd);
    close(fd);
}

int tly_proof_open(struct tly_proof_door *d, struct tly_loop *loop)
{
    struct sockaddr_un a;
    uint64_t random[2];
    int err;
    randombytes_buf(random, sizeof random);
    randombytes_buf(&d->nonce, sizeof d->nonce);
    d->loop = loop;
    d->watch = (struct tly_watch){.fd = -1, .ready = proof_on_knock};
    snprintf(d->name, sizeof d->name, "tally-%016llx%016llx", (unsigned long long)random[0],
             (unsigned long long)random[1]);
    d->memfd = tly_fd_own(memfd_create("tally-door", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (d->memfd < 0 || write(d->memfd, &d->nonce, sizeof d->nonce) != sizeof d->nonce ||
        fcntl(d->memfd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW) < 0)
        goto fail;
    d->watch.fd = tly_fd_own(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    socklen_t len = proof_abstract(d->name, &a);
    if (d->watch.fd < 0 || bind(d->watch.fd, (struct sockaddr *)&a, len) < 0 || listen(d->watch.fd, 1024) < 0)
        goto fail;
    err = tly_loop_add(loop, &d->watch, EPOLLIN);
    if (!err)
        return 0;
    tly_proof_close(d);
    return err;
fail:
    err = tly_fail(errno, "cannot open a local socket: %s", strerror(errno));
    tly_proof_close(d);
    return err;
}

void tly_proof_close(struct tly_proof_door *d)
{
    if (!d || !d->loop)
        return;
    if (d->watch.fd >= 0) {
        tly_loop_remove(d->loop, &d->watch);
        tly_fd_close(d->watch.fd);
    }
    if (d->memfd >= 0)
        tly_fd_close(d->memfd);
    d->loop = NULL;
}

int tly_proof_knock(const char *name, uint64_t *nonce)
{
    struct sockaddr_un a;
    struct timeval patience = {.tv_sec = 2};
    char byte, control[CMSG_SPACE(sizeof(int))];
    struct iovec iov = {&byte, 1};
    struct msghdr m = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    int memfd = -1, err = -ENOENT;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    socklen_t len = proof_abstract(name, &a);
    if (connect(fd, (struct sockaddr *)&a, len) == 0 && recvmsg(fd, &m, MSG_CMSG_CLOEXEC) == 1) {
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS &&
            c->cmsg_len == CMSG_LEN(sizeof memfd))
            memcpy(&memfd, CMSG_DATA(c), sizeof memfd);
    }
    uint64_t value;
    if (memfd >= 0 && pread(memfd, &value, sizeof value, 0) == sizeof value) {
        *nonce = value;
        err = 0;
    }
    if (memfd >= 0)
        close(memfd);
    close(fd);
    return err;
}
