/* card.c - the fake card's loop, and the processes that use it. */
#include "test/rdma/fake_card/card.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

enum { FIRST_CLIENT_MS = 10000, NEXT_CLIENT_MS = 300, MOST_EVENTS = 16 };

struct card_client *card_clients;
static int poller, door;
static bool card_used;

uint64_t card_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

uint32_t card_handle(void)
{
    static uint32_t last = 0x11; /* of 24 bits: queue pairs' numbers, too */
    last = last == 0xffffff ? 0x12 : last + 1;
    return last;
}

/* --- clients ---------------------------------------------------------------------------------------------------- */

/* What the loop waits for is a client's socket, or its bell: the address and one. */
static void card_watch(int fd, void *what, int bell)
{
    struct epoll_event e = {.events = EPOLLIN, .data.u64 = (uintptr_t)what + (uintptr_t)bell};
    if (epoll_ctl(poller, EPOLL_CTL_ADD, fd, &e) != 0)
        perror("epoll_ctl");
}

static void card_accept(void)
{
    int sock = accept4(door, NULL, NULL, SOCK_CLOEXEC);
    struct ucred peer;
    socklen_t size = sizeof peer;
    if (sock < 0)
        return;
    struct card_client *c = calloc(1, sizeof *c);
    if (!c || getsockopt(sock, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
        close(sock);
        free(c);
        return;
    }
    card_used = true;
    c->sock = sock;
    c->pid = peer.pid;
    c->bell = c->events = -1;
    c->next = card_clients;
    card_clients = c;
    card_watch(sock, c, 0);
}

static void card_leave(struct card_client *c)
{
    CARD_UNLINK(card_clients, c);
    close(c->sock);
    card_finish(c);
    free(c);
}

/* False: it has left. */
static bool card_serve(struct card_client *c)
{
    static struct fake_request q;
    struct fake_reply reply = {0};
    int fds[3] = {-1, -1, -1};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof fds)];
    } control;
    struct iovec iov = {&q, sizeof q};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = control.bytes,
                       .msg_controllen = sizeof control.bytes};
    ssize_t got = recvmsg(c->sock, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return true;
    if (got != sizeof q) {
        card_leave(c);
        return false;
    }
    struct cmsghdr *h = CMSG_FIRSTHDR(&m);
    if (h)
        memcpy(fds, CMSG_DATA(h), h->cmsg_len - CMSG_LEN(0));
    bool first = c->bell < 0;
    reply.err = card_answer(c, &q, fds, &reply);
    if (first && c->bell >= 0)
        card_watch(c->bell, c, 1);
    while (send(c->sock, &reply, sizeof reply, MSG_NOSIGNAL) < 0 && errno == EINTR)
        ;
    return true;
}

/* --- the loop ----------------------------------------------------------------------------------------------------- */

/* One work request of each queue pair.  False: there is nothing to do before *wake. */
static bool card_work_all(uint64_t *wake)
{
    bool busy = false;
    for (struct card_client *c = card_clients; c; c = c->next)
        for (struct card_qp *q = c->qps; q; q = q->next)
            busy |= card_work(q, wake);
    return busy;
}

static void card_set_asleep(uint32_t asleep)
{
    for (struct card_client *c = card_clients; c; c = c->next)
        if (c->page)
            atomic_store(&c->page->asleep, asleep);
    atomic_thread_fence(memory_order_seq_cst);
}

static void card_handle_events(int timeout_ms)
{
    struct epoll_event events[MOST_EVENTS];
    int n = epoll_wait(poller, events, MOST_EVENTS, timeout_ms);
    if (n == 0 && !card_clients)
        _exit(0);
    for (int i = 0; i < n; i++) {
        struct card_client *c = (void *)(uintptr_t)(events[i].data.u64 & ~1ull);
        eventfd_t rung;
        if (!c)
            card_accept();
        else if (events[i].data.u64 & 1)
            eventfd_read(c->bell, &rung);
        else if (!card_serve(c))
            return; /* another event may be of the client that has left */
    }
}

static void card_run(void)
{
    for (;;) {
        uint64_t wake = UINT64_MAX;
        bool busy = card_work_all(&wake);
        if (!busy) {
            card_set_asleep(1);
            busy = card_work_all(&wake);
        }
        uint64_t now = card_now();
        int ms = busy                 ? 0
                 : !card_used         ? FIRST_CLIENT_MS
                 : !card_clients      ? NEXT_CLIENT_MS
                 : wake == UINT64_MAX ? -1
                 : wake <= now        ? 0
                                      : (int)((wake - now) / 1000000 + 1);
        card_handle_events(ms);
        card_set_asleep(0);
    }
}

/* --- the start ---------------------------------------------------------------------------------------------------- */

static int card_listen(const char *where)
{
    struct sockaddr_un at;
    socklen_t length = fake_address(where, &at);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (bind(fd, (struct sockaddr *)&at, length) != 0) {
        int other = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        if (*where == '@' || connect(other, (struct sockaddr *)&at, length) == 0)
            return -1;
        unlink(where); /* of a card that was killed */
        close(other);
        if (bind(fd, (struct sockaddr *)&at, length) != 0)
            return -1;
    }
    return listen(fd, 64) == 0 ? fd : -1;
}

/* fake_card WHERE LOG */
int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    close_range(3, ~0u, 0);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGINT, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    door = card_listen(argv[1]);
    if (door < 0)
        return 0; /* another one listens */
    if (fork() != 0)
        _exit(0);
    setsid();
    int null = open("/dev/null", O_RDWR);
    int log = *argv[2] ? open(argv[2], O_WRONLY | O_CREAT | O_APPEND, 0600) : null;
    dup2(null, 0);
    dup2(null, 1);
    dup2(log, 2);
    if (chdir("/") != 0)
        return 1;
    poller = epoll_create1(EPOLL_CLOEXEC);
    card_watch(door, NULL, 0);
    card_run();
}
