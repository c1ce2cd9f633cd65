/* meet.c - the start: each rank proves itself to each other one of its machine, over an abstract Unix socket, and
 * their segments change hands.
 *
 * The name of the socket holds the job's incarnation, which a stranger does not know; SO_PEERCRED must name our user,
 * and a keyed hash proves the secret.  The rank with the higher number knocks.  Who cannot share memory says so, and
 * then all do without. */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <sodium.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/fork.h"
#include "local/engine.h"
#include "local/window.h"
#include "local/work.h"
#include "wire/hello.h"

enum { SLICE_MS = 5, MAGIC = 0x74616c31 };

struct greeting {
    uint32_t magic, from, to, able;
    uint64_t job, bytes, head; /* bytes of the segment; of its head: another build lays it out otherwise */
    uint8_t proof[32];
};

/* `why`: what stands first in the way of sharing memory, or "". */
struct meeting {
    struct tly_local *l;
    int64_t deadline;
    bool met[TLY_LOCAL_RANKS];
    char why[TLY_SENTENCE];
};

/* Always -EOPNOTSUPP. */
__attribute__((format(printf, 2, 3))) static int meet_cannot(struct meeting *m, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (!m->why[0])
        vsnprintf(m->why, sizeof m->why, format, args);
    va_end(args);
    return -EOPNOTSUPP;
}

static int meet_cannot_there(struct meeting *m, uint32_t rank)
{
    return meet_cannot(m, "rank %u cannot (with TALLY_LOG=debug it says why)", tly_local_number(m->l, rank));
}

static void meet_prove(const struct tly_local *l, const struct greeting *g, uint8_t out[32])
{
    tly_hello_prove(l->config.secret, g, offsetof(struct greeting, proof), out);
}

static socklen_t meet_name_of(const struct tly_local *l, uint32_t rank, struct sockaddr_un *a)
{
    memset(a, 0, sizeof *a);
    a->sun_family = AF_UNIX;
    int n = snprintf(a->sun_path + 1, sizeof a->sun_path - 1, "tally-%016llx-rank-%u",
                     (unsigned long long)l->config.job, tly_local_number(l, rank));
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

/* The other end runs as our user. */
static bool meet_is_ours(int fd, struct ucred *who)
{
    socklen_t len = sizeof *who;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, who, &len) == 0 && who->uid == geteuid();
}

static int meet_send_greeting(const struct tly_local *l, int to, uint32_t rank, bool able)
{
    struct greeting g = {.magic = MAGIC,
                         .from = l->me,
                         .to = rank,
                         .able = able,
                         .job = l->config.job,
                         .bytes = able ? tly_segment_bytes(l->segment) : 0,
                         .head = sizeof(struct tly_control)};
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec iov = {&g, sizeof g};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
    meet_prove(l, &g, g.proof);
    if (able) {
        int fd = tly_segment_fd(l->segment);
        m.msg_control = control;
        m.msg_controllen = sizeof control;
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    return sendmsg(to, &m, MSG_NOSIGNAL) == sizeof g ? 0 : -errno;
}

/* False: it has not even heard that we cannot. */
static bool meet_greet(struct meeting *m, int to, uint32_t rank)
{
    struct tly_local *l = m->l;
    int err = meet_send_greeting(l, to, rank, l->segment != NULL);
    if (!err)
        return true;
    meet_cannot(m, "rank %u cannot hand its memory to rank %u: %s", tly_local_number(l, l->me),
                tly_local_number(l, rank), strerror(-err));
    return l->segment && meet_send_greeting(l, to, rank, false) == 0;
}

/* The one descriptor of a message, or -1; a stranger's others are closed. */
static int meet_only_descriptor(struct msghdr *m)
{
    int fd = -1;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c; c = CMSG_NXTHDR(m, c))
        for (size_t at = CMSG_LEN(0); c->cmsg_type == SCM_RIGHTS && at + sizeof fd <= c->cmsg_len;
             at += sizeof fd) {
            if (fd >= 0)
                close(fd);
            memcpy(&fd, (uint8_t *)c + at, sizeof fd);
        }
    return fd;
}

/* Is what it has sent of use to us? */
static int meet_look_at(struct meeting *m, const struct greeting *g, int fd)
{
    uint32_t number = tly_local_number(m->l, g->from);
    if (!g->able)
        return meet_cannot_there(m, g->from);
    if (fd < 0)
        return meet_cannot(m, "the memory of rank %u cannot be received (ulimit -n?)", number);
    if (g->head != sizeof(struct tly_control))
        return meet_cannot(m, "rank %u has another build of Tally", number);
    if (g->bytes < g->head || !tly_segment_is_sound(fd, g->bytes))
        return meet_cannot(m, "the memory of rank %u may not be there when it is touched", number);
    return 0;
}

/* The segment of a rank, of which none has come, mapped; one of `least` to `most`.  -EAGAIN: not yet; -EOPNOTSUPP: it
 * cannot, or we cannot; -EPERM: it is none of these. */
static int meet_take_greeting(struct meeting *m, int from, uint32_t least, uint32_t most, uint32_t *rank)
{
    struct tly_local *l = m->l;
    struct greeting g;
    uint8_t proof[32];
    char control[CMSG_SPACE(sizeof(int))];
    struct iovec iov = {&g, sizeof g};
    struct msghdr h = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct ucred who;
    ssize_t n = recvmsg(from, &h, MSG_CMSG_CLOEXEC);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return -EAGAIN;
    int fd = n < 0 ? -1 : tly_fd_own(meet_only_descriptor(&h));
    int err = -EPERM;
    if (n == sizeof g && meet_is_ours(from, &who)) {
        meet_prove(l, &g, proof);
        if (sodium_memcmp(proof, g.proof, sizeof proof) == 0 && g.magic == MAGIC && g.to == l->me &&
            g.from >= least && g.from <= most && !m->met[g.from] && g.job == l->config.job)
            err = meet_look_at(m, &g, fd);
    }
    if (err != -EPERM) {
        *rank = g.from;
        m->met[g.from] = true; /* another one of it is no other rank's */
    }
    struct tly_neighbour *at = err ? NULL : &l->at[g.from];
    if (at && tly_segment_map(fd, g.bytes, &at->base) != 0) {
        err = meet_cannot(m, "%s", tly_error());
    } else if (at) {
        at->bytes = g.bytes;
        at->control = (struct tly_control *)at->base;
        at->pid = who.pid;
        at->pidfd = tly_fd_own((int)syscall(SYS_pidfd_open, who.pid, 0));
    }
    tly_fd_close(fd);
    return err;
}

static int meet_new_socket(void)
{
    struct timeval slice = {.tv_usec = SLICE_MS * 1000};
    int fd = tly_fd_own(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (fd >= 0) {
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &slice, sizeof slice); /* accept(2) heeds it too */
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &slice, sizeof slice); /* and connect(2) this */
    }
    return fd;
}

/* Until this rank has come: a moment passes. */
static int meet_go_on(struct meeting *m, int ms, uint32_t rank)
{
    if (tly_now() <= m->deadline)
        return m->l->calls->turn(m->l->user, ms);
    return meet_cannot(m, "rank %u has not come within %g s", tly_local_number(m->l, rank),
                       m->l->config.patience_ms / 1e3);
}

/* The lowest rank above ours that has not knocked. */
static uint32_t meet_awaited(const struct meeting *m)
{
    uint32_t rank = m->l->me + 1;
    while (rank < m->l->count && m->met[rank])
        rank++;
    return rank;
}

/* Our knocks and those of the higher ranks.  Somebody may say that it cannot: m->why. */
static int meet_exchange(struct meeting *m, int door)
{
    struct tly_local *l = m->l;
    int knock[TLY_LOCAL_RANKS], err = 0;
    int reserve =
        tly_fd_own(fcntl(door, F_DUPFD_CLOEXEC, 0)); /* given up where there is no descriptor left */
    uint32_t from;
    for (uint32_t i = 0; i < TLY_LOCAL_RANKS; i++)
        knock[i] = -1;
    for (uint32_t i = 0; i < l->me && !err;) {
        struct sockaddr_un a;
        socklen_t len = meet_name_of(l, i, &a);
        if (knock[i] < 0)
            knock[i] = meet_new_socket();
        if (knock[i] < 0) {
            err = meet_cannot(m, "cannot make a Unix socket: %s", strerror(errno));
            break;
        }
        if (connect(knock[i], (struct sockaddr *)&a, len) == 0) {
            struct ucred who;
            bool ours = meet_is_ours(knock[i], &who);
            if (!ours) /* anybody can take the name: a stranger is shown nothing */
                meet_cannot(m, "another user's process has taken the name of rank %u",
                            tly_local_number(l, i));
            if (!ours || !meet_greet(m, knock[i], i)) {
                tly_fd_close(knock[i]);
                knock[i] = -1;
            }
            i++;
            continue;
        }
        err = meet_go_on(m, SLICE_MS, i); /* not there yet */
    }
    while (!err && meet_awaited(m) < l->count) {
        int fd = tly_fd_own(accept4(door, NULL, NULL, SOCK_CLOEXEC));
        struct ucred who;
        if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
            int full =
                meet_cannot(m, "rank %u cannot let rank %u in: %s (ulimit -n)", tly_local_number(l, l->me),
                            tly_local_number(l, meet_awaited(m)), strerror(errno));
            err = reserve < 0 ? full : 0;
            tly_fd_close(reserve); /* who comes is let in with this one, and hears that we cannot */
            reserve = -1;
            continue;
        }
        if (fd >= 0 && meet_is_ours(fd, &who)) { /* a stranger's silence is not waited for */
            struct timeval patience = {.tv_sec = 1};
            setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
            int got = meet_take_greeting(m, fd, l->me + 1, l->count - 1, &from);
            if (got == 0 || got == -EOPNOTSUPP)
                meet_greet(m, fd, from);
        }
        tly_fd_close(fd);
        if (meet_awaited(m) < l->count)
            err = meet_go_on(m, 0, meet_awaited(m));
    }
    for (uint32_t i = 0; i < l->me && !err; i++) {
        int got;
        if (knock[i] < 0)
            continue;
        while ((got = meet_take_greeting(m, knock[i], i, i, &from)) == -EAGAIN && !err)
            err = meet_go_on(m, 0, i);
        if (got == -EPERM)
            meet_cannot(m, "rank %u has not answered as it should", tly_local_number(l, i));
    }
    for (uint32_t i = 0; i < l->me; i++)
        tly_fd_close(knock[i]);
    tly_fd_close(reserve);
    return err;
}

/* Can we read and write the others' private memory?  Seccomp, Yama and namespaces often forbid it. */
static bool meet_is_direct(const struct tly_local *l)
{
    for (uint32_t i = 0; i < l->count; i++) {
        uint64_t value = 0;
        const struct tly_control *c = l->at[i].control;
        struct iovec mine = {&value, sizeof value}, theirs = {(void *)(uintptr_t)c->probe_at, sizeof value};
        if (i == l->me)
            continue;
        if (l->at[i].pid <= 0 || l->at[i].pidfd < 0 ||
            process_vm_readv(l->at[i].pid, &mine, 1, &theirs, 1, 0) != sizeof value || value != c->probe ||
            process_vm_writev(l->at[i].pid, &mine, 1, &theirs, 1, 0) != sizeof value)
            return false;
    }
    return true;
}

/* All say how they are; the least that one can is what all do.  Who has said that it can must hear the others, or
 * fail: they may go on without it.  All have come this far, or say in their own time that they could not. */
static int meet_agree(struct meeting *m)
{
    struct tly_local *l = m->l;
    bool able = !m->why[0];
    int64_t deadline = tly_now() + 2 * l->config.patience_ms * TLY_MS;
    uint32_t all = TLY_ABLE | TLY_DIRECT;
    uint32_t mine = !able ? TLY_UNABLE : meet_is_direct(l) ? TLY_ABLE | TLY_DIRECT : TLY_ABLE;
    if (l->own)
        atomic_store_explicit(&l->own->state, mine, memory_order_release);
    for (uint32_t i = 0; able && i < l->count; i++) {
        uint32_t state;
        while (!(state = atomic_load_explicit(&l->at[i].control->state, memory_order_acquire))) {
            int err =
                tly_now() > deadline
                    ? tly_fail(ETIMEDOUT, "rank %u of this machine has not said whether it can share memory",
                               tly_local_number(l, i))
                    : l->calls->turn(l->user, SLICE_MS);
            if (err)
                return err;
        }
        all &= state;
        able = !(state & TLY_UNABLE);
        if (!able)
            meet_cannot_there(m, i);
    }
    l->direct = all & TLY_DIRECT;
    return able ? 0 : -EOPNOTSUPP;
}

/* Say which processors this rank may use, and its node, before the others look at it. */
static void meet_describe(struct tly_local *l)
{
    l->own->node = l->home;
    snprintf(l->own->gpus.address, sizeof l->own->gpus.address, "%s", l->config.gpu ? l->config.gpu : "");
    cpu_set_t mine;
    CPU_ZERO(&mine);
    sched_getaffinity(0, sizeof mine, &mine);
    for (size_t i = 0; i < TLY_PROCESSORS; i++)
        if (CPU_ISSET(i, &mine))
            l->own->processors[i / 64] |= 1ull << i % 64;
}

int tly_local_meet(struct tly_local *l)
{
    struct sockaddr_un a;
    struct meeting m = {.l = l, .deadline = tly_now() + l->config.patience_ms * TLY_MS};
    if (tly_segment_create(sizeof(struct tly_control), &l->segment) != 0)
        meet_cannot(&m, "%s", tly_error());
    int err, door = meet_new_socket();
    socklen_t len = meet_name_of(l, l->me, &a);
    if (l->segment) {
        l->own = (struct tly_control *)tly_segment_base(l->segment);
        randombytes_buf(&l->probe, sizeof l->probe);
        l->own->probe = l->probe;
        l->own->probe_at = (uint64_t)(uintptr_t)&l->probe;
        meet_describe(l);
        l->at[l->me] = (struct tly_neighbour){.control = l->own,
                                              .base = (uint8_t *)l->own,
                                              .bytes = tly_segment_bytes(l->segment),
                                              .pidfd = -1};
        l->scratch = aligned_alloc(TLY_PAGE, (size_t)l->count * TLY_BLOCK);
        if (!l->scratch)
            meet_cannot(&m, "out of memory");
        else if ((l->config.team ? tly_ferry_open : tly_windows_open)(l) != 0)
            meet_cannot(&m, "%s", tly_error());
    }
    if (door < 0 || bind(door, (struct sockaddr *)&a, len) < 0 || listen(door, TLY_LOCAL_RANKS) < 0)
        err = meet_cannot(&m, "rank %u cannot listen on a Unix socket: %s", tly_local_number(l, l->me),
                          strerror(errno));
    else
        err = meet_exchange(&m, door);
    if (!err)
        err = meet_agree(&m);
    else if (l->own) /* whoever has our segment waits for a word */
        atomic_store_explicit(&l->own->state, TLY_UNABLE, memory_order_release);
    tly_fd_close(door);
    return err == -EOPNOTSUPP ? tly_fail(EOPNOTSUPP, "%s", m.why) : err;
}
