/* proxy.c - passes bytes on, and descriptors that come with them, as it likes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <arpa/inet.h>
#include <poll.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

#include "test/media/proxy.h"
#include "transport/address.h"

#include <cmocka.h>

const struct proxy proxy_whole = {.largest = 65536, .flip_at = -1, .cut_at = -1, .stall_at = -1},
                   proxy_pieces = {.largest = 900, .flip_at = -1, .cut_at = -1, .stall_at = -1},
                   proxy_bytes = {.largest = 1, .flip_at = -1, .cut_at = -1, .stall_at = -1};

/* What an endpoint within the machine stands for (shm/shm.c). */
static socklen_t unix_address(const char *where, struct sockaddr_un *a)
{
    *a = (struct sockaddr_un){.sun_family = AF_UNIX};
    snprintf(a->sun_path + 1, sizeof a->sun_path - 1, "tally-service-%s", where);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(a->sun_path + 1));
}

static int next_number(void)
{
    static int last;
    return ++last;
}

int proxy_listen(bool local, const char *like, char where[TLY_ENDPOINT])
{
    if (local) {
        struct sockaddr_un u;
        int un = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        snprintf(where, TLY_ENDPOINT, "%.16s%08x%08x", like, (unsigned)getpid(), (unsigned)next_number());
        socklen_t ulen = unix_address(where, &u);
        assert_int_equal(bind(un, (struct sockaddr *)&u, ulen), 0);
        assert_int_equal(listen(un, 4), 0);
        return un;
    }
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(fd, 4), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &len), 0);
    snprintf(where, TLY_ENDPOINT, "127.0.0.1:%u", ntohs(a.sin_port));
    return fd;
}

/* A descriptor that came with bytes goes on with the next of them. */
static int passed = -1;

static ssize_t receive_and_fetch(int fd, uint8_t *data, size_t len)
{
    char control[CMSG_SPACE(sizeof(int))];
    struct iovec iov = {data, len};
    struct msghdr m = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t n = recvmsg(fd, &m, MSG_CMSG_CLOEXEC);
    struct cmsghdr *c = n > 0 ? CMSG_FIRSTHDR(&m) : NULL;
    if (c && c->cmsg_type == SCM_RIGHTS)
        memcpy(&passed, CMSG_DATA(c), sizeof passed);
    return n;
}

static ssize_t pass_on(int fd, const uint8_t *data, size_t len)
{
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec iov = {(void *)data, len};
    struct msghdr m = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof passed);
    memcpy(CMSG_DATA(c), &passed, sizeof passed);
    ssize_t n = sendmsg(fd, &m, MSG_NOSIGNAL);
    close(passed);
    passed = -1;
    return n;
}

static bool send_all(int fd, const uint8_t *data, size_t len)
{
    while (len > 0) {
        ssize_t n = passed >= 0 ? pass_on(fd, data, len) : send(fd, data, len, MSG_NOSIGNAL);
        if (n <= 0)
            return false;
        data += n;
        len -= (size_t)n;
    }
    return true;
}

/* Forward what `from` has in pieces; false at the end of the stream. */
static bool forward(struct proxy *p, int from, int to, int64_t *at)
{
    uint8_t data[65536];
    ssize_t n = receive_and_fetch(from, data, sizeof data);
    if (n <= 0)
        return false;
    for (ssize_t done = 0; done < n;) {
        size_t piece = 1 + randombytes_uniform(p->largest);
        if ((ssize_t)piece > n - done)
            piece = (size_t)(n - done);
        for (size_t i = 0; at && i < piece; i++) {
            if (*at == p->cut_at) {
                send_all(to, data + done, i);
                return false;
            }
            if (*at == p->stall_at) {
                send_all(to, data + done, i);
                for (;;) /* until the other side has enough of it */
                    if (recv(to, data, sizeof data, 0) <= 0)
                        return false;
            }
            if (*at == p->flip_at)
                data[done + (ssize_t)i] ^= 0x10;
            ++*at;
        }
        if (!send_all(to, data + done, piece))
            return false;
        done += (ssize_t)piece;
    }
    return true;
}

void *proxy_serve(void *arg)
{
    struct proxy *p = arg;
    int64_t at = 0;
    int one = 1;
    struct sockaddr_storage a;
    struct sockaddr_un u;
    tly_address_read(p->target, &a);
    socklen_t ulen = unix_address(p->target, &u);
    int near = accept(p->listener, NULL, NULL);
    int far = socket(p->local ? AF_UNIX : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (near >= 0 && (!p->local ? connect(far, (struct sockaddr *)&a, sizeof(struct sockaddr_in))
                                : connect(far, (struct sockaddr *)&u, ulen)) == 0) {
        setsockopt(near, IPPROTO_TCP, 1 /* TCP_NODELAY */, &one, sizeof one);
        setsockopt(far, IPPROTO_TCP, 1, &one, sizeof one);
        struct pollfd fds[2] = {{.fd = near, .events = POLLIN}, {.fd = far, .events = POLLIN}};
        for (bool open = true; open;) {
            poll(fds, 2, -1);
            if (fds[0].revents)
                open = forward(p, near, far, &at);
            if (open && fds[1].revents)
                open = forward(p, far, near, NULL);
        }
    }
    if (near >= 0)
        close(near);
    close(far);
    close(p->listener);
    return NULL;
}
