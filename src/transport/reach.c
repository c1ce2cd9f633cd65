/* reach.c - what of a machine answers: its port, another port, or nothing.
 *
 * It tells a process that is not there from a firewall and from a machine that is not there.  A port at which nothing
 * listens is answered by a reset, so a port that stays silent, or cannot be reached, while another one of the same
 * machine answers, is shut by a firewall.  The two other ports are ssh's, which is mostly open, and discard's, at which
 * mostly nothing listens.  No ICMP: that needs privileges. */
#include <errno.h>
#include <poll.h>

#include "base/clock.h"
#include "base/fork.h"
#include "transport/address.h"
#include "transport/socket.h"

enum { PORTS = 3 };

/* Attempt i has ended with `err`, 0: it is connected.  What the port itself, attempt 0, says counts most. */
static void reach_take(struct pollfd *p, int i, int err, enum tly_reach *found)
{
    bool answered = err == 0 || err == ECONNREFUSED;
    if (answered && i == 0)
        *found = err ? TLY_REACH_NO_LISTENER : TLY_REACH_PORT;
    else if (answered && *found == TLY_REACH_NOTHING)
        *found = TLY_REACH_OTHER_PORT;
    tly_fd_close(p[i].fd);
    p[i].fd = -1; /* poll() passes over it */
}

enum tly_reach tly_address_reach(const struct sockaddr_storage *to, int timeout_ms)
{
    const uint16_t ports[PORTS] = {tly_address_port(to), 22, 9};
    struct pollfd p[PORTS];
    enum tly_reach found = TLY_REACH_NOTHING;
    int64_t deadline = tly_now() + timeout_ms * TLY_MS;
    for (int i = 0; i < PORTS; i++) {
        struct sockaddr_storage a = *to;
        tly_address_set_port(&a, ports[i]);
        p[i] = (struct pollfd){.fd = tly_socket_open(a.ss_family), .events = POLLOUT};
        if (p[i].fd >= 0 && connect(p[i].fd, (struct sockaddr *)&a, tly_address_len(&a)) < 0 &&
            errno != EINPROGRESS)
            reach_take(p, i, errno, &found);
    }
    while (found != TLY_REACH_PORT && found != TLY_REACH_NO_LISTENER && tly_now() < deadline) {
        if (p[0].fd < 0 && (found || (p[1].fd < 0 && p[2].fd < 0)))
            break;
        poll(p, PORTS, (int)((deadline - tly_now()) / TLY_MS) + 1);
        for (int i = 0; i < PORTS; i++) {
            int err = 0;
            socklen_t len = sizeof err;
            if (p[i].fd >= 0 && p[i].revents && getsockopt(p[i].fd, SOL_SOCKET, SO_ERROR, &err, &len) == 0)
                reach_take(p, i, err, &found);
        }
    }
    for (int i = 0; i < PORTS; i++)
        if (p[i].fd >= 0)
            tly_fd_close(p[i].fd);
    return found;
}
