/* call.c - requests to the card over a socket, and its start. */
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "test/rdma/fake_verbs/library.h"

enum { MOST_TRIES = 5000 };

extern char **environ;

/* Beside the library: "DIR/fake_card". */
static void call_card(char *out, size_t size)
{
    Dl_info info;
    if (!dladdr((void *)call_card, &info))
        fake_die("dladdr: %s", dlerror());
    const char *slash = strrchr(info.dli_fname, '/');
    int length = slash ? (int)(slash - info.dli_fname) : 1;
    snprintf(out, size, "%.*s/fake_card", length, slash ? info.dli_fname : ".");
}

static void call_where(const char *card, char out[108])
{
    uint64_t hash = 14695981039346656037u;
    for (const char *at = card; *at; at++)
        hash = (hash ^ (uint8_t)*at) * 1099511628211u;
    if (*fake_settings()->fabric)
        snprintf(out, 108, "%s", fake_settings()->fabric);
    else
        snprintf(out, 108, "@tally/fake_verbs/%d/%016llx", (int)getuid(), (unsigned long long)hash);
}

/* It goes on in the background once it listens, or another one does. */
static void call_start(char *card, char *where)
{
    char *argv[] = {card, where, (char *)fake_settings()->log, NULL};
    posix_spawnattr_t attributes;
    sigset_t none, all;
    pid_t pid;
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setsigdefault(&attributes, &all);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    int err = posix_spawn(&pid, card, NULL, &attributes, argv, environ);
    posix_spawnattr_destroy(&attributes);
    if (err)
        fake_die("cannot start %s: %s", card, strerror(err));
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
        ;
}

int fake_connect(void)
{
    char card[512], where[108];
    struct sockaddr_un to;
    call_card(card, sizeof card);
    call_where(card, where);
    socklen_t length = fake_address(where, &to);
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY); /* the card reads and writes our memory */
    for (int i = 0; i < MOST_TRIES; i++) {
        int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        if (fd < 0)
            fake_die("socket: %s", strerror(errno));
        if (connect(fd, (struct sockaddr *)&to, length) == 0)
            return fd;
        close(fd);
        call_start(card, where);
        if (i)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    fake_die("no card listens at %s", where);
}

static bool call_send(int fd, struct fake_request *q, const int *fds, int count)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(3 * sizeof *fds)];
    } control;
    struct iovec iov = {q, sizeof *q};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
    ssize_t sent;
    if (count) {
        m.msg_control = control.bytes;
        m.msg_controllen = CMSG_SPACE((size_t)count * sizeof *fds);
        memset(control.bytes, 0, sizeof control.bytes);
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN((size_t)count * sizeof *fds);
        memcpy(CMSG_DATA(c), fds, (size_t)count * sizeof *fds);
    }
    while ((sent = sendmsg(fd, &m, MSG_NOSIGNAL)) < 0 && errno == EINTR)
        ;
    return sent == sizeof *q;
}

int fake_call(struct fake_context *c, struct fake_request *q, const int *fds, int count,
              struct fake_reply *out)
{
    struct fake_reply reply = {.err = EPIPE};
    ssize_t got = -1;
    pthread_mutex_lock(&c->call_lock);
    if (call_send(c->base.cmd_fd, q, fds, count))
        while ((got = recv(c->base.cmd_fd, &reply, sizeof reply, 0)) < 0 && errno == EINTR)
            ;
    pthread_mutex_unlock(&c->call_lock);
    if (got != sizeof reply && q->type != FAKE_HELLO)
        fake_die("the card has ended; log=FILE says why");
    if (got != sizeof reply)
        return EPIPE;
    if (out)
        *out = reply;
    return reply.err;
}

void fake_ring(struct fake_context *c)
{
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load(&c->page->asleep) && atomic_exchange(&c->page->asleep, 0))
        eventfd_write(c->bell, 1);
}
