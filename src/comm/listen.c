/* listen.c - tally_comm_listen(): the coordinator's socket listens before the communicator is opened.
 *
 * A port that was tested and closed again may be another job's when the coordinator binds it.  So rank 0 binds first and
 * says the port afterwards; tally_comm_open() takes the socket over (comm_coordinate() in comm.c).  Threads may be rank 0 of jobs
 * of their own, so each call has a socket of its own.  `lock` guards the list of those that no communicator has taken over.
 * A forked child does not have them. */
#include <errno.h>
#include <pthread.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "base/fork.h"
#include "base/loop.h"
#include "base/param.h"
#include "comm/listen.h"
#include "membership/member.h"
#include "membership/place.h"
#include "tally/tally.h"
#include "transport/address.h"
#include "transport/transport.h"

enum { MOST = 16 }; /* sockets; one more closes the first of them */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct listening {
    int fd;
    uint16_t port;
    pid_t thread; /* that called */
} held[MOST];     /* in the order of their calls */
static unsigned count;

/* Another thread may have held the lock when this process was forked; the sockets are closed there. */
static void listen_in_child(void)
{
    pthread_mutex_init(&lock, NULL);
    count = 0;
}

static void listen_install(void)
{
    pthread_atfork(NULL, NULL, listen_in_child);
}

static void listen_take_lock(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, listen_install);
    pthread_mutex_lock(&lock);
}

/* Take one out of the list.  Returns its socket.  Under the lock. */
static int listen_remove(unsigned i)
{
    int fd = held[i].fd;
    memmove(&held[i], &held[i + 1], (--count - i) * sizeof *held);
    return fd;
}

static void listen_add(int fd, uint16_t port)
{
    listen_take_lock();
    if (count == MOST)
        tly_fd_close(listen_remove(0));
    held[count++] = (struct listening){fd, port, gettid()};
    pthread_mutex_unlock(&lock);
}

static void listen_close_all(void)
{
    listen_take_lock();
    while (count)
        tly_fd_close(listen_remove(0));
    pthread_mutex_unlock(&lock);
}

/* Does this thread hold the port by an earlier call? */
static bool listen_has(int port)
{
    bool found = false;
    listen_take_lock();
    for (unsigned i = 0; i < count; i++)
        found |= held[i].port == port && held[i].thread == gettid();
    pthread_mutex_unlock(&lock);
    return found;
}

int tly_listen_take(uint16_t port)
{
    int fd = -1;
    listen_take_lock();
    for (unsigned i = 0; i < count && fd < 0; i++)
        if (held[i].port == port)
            fd = listen_remove(i);
    pthread_mutex_unlock(&lock);
    return fd;
}

/* Whether a coordinator answers at an address whose port another program holds: it may forward to one. */
static bool listen_leads_to_coordinator(const struct tly_place *place, const struct tly_params *params,
                                        const struct tly_addresses *to)
{
    struct tly_loop loop;
    struct tly_member m;
    int err = tly_loop_init(&loop);
    if (err)
        return false;
    tly_member_init(&m, &loop, place, params, true);
    m.to = *to;
    err = tly_member_connect(&m, TLY_HELD_S);
    tly_loop_lock(&loop);
    tly_member_finish(&m);
    tly_loop_unlock(&loop);
    tly_loop_finish(&loop);
    return !err || err == -EACCES || err == -ESTALE; /* one that refuses says more to tally_comm_open() */
}

static int listen_bind_for(const struct tly_params *params, int wanted, int *fd, uint16_t *port)
{
    struct tly_place place;
    struct tly_addresses to;
    struct tly_listener_config listen = {0};
    int err = tly_place_find(&place, params, true);
    if (err)
        return err;
    if (place.rank != 0)
        return tly_fail(EINVAL, "rank %u does not listen for the job: rank 0 does", place.rank);
    if (wanted >= 0)
        place.coord_port = (uint16_t)wanted;
    err = tly_place_resolve(&place, &to);
    if (err)
        return err;
    if (!tly_place_take_own(&place, &to, &listen.address))
        return tly_fail(EADDRNOTAVAIL, "%s (%s) is no address of this machine", place.coord_host,
                        place.coord_from);
    err = tly_listener_reserve(&listen, fd, port);
    if (err == -EADDRINUSE && wanted > 0 && listen_has(wanted)) {
        *port = (uint16_t)wanted;
        return 0;
    }
    if (err != -EADDRINUSE || wanted >= 0)
        return err;
    char holder[TLY_HOLDER], sentence[TLY_SENTENCE];
    snprintf(sentence, sizeof sentence, "%s", tly_error());
    *fd = -1;
    *port = place.coord_port;
    return tly_address_holder(&to.at[0], holder) || listen_leads_to_coordinator(&place, params, &to)
               ? 0
               : tly_fail(EADDRINUSE, "%s: end it, or set TALLY_PORT", sentence);
}

int tally_comm_listen(const char *const settings[], int *port)
{
    struct tly_params params;
    char why[TLY_SENTENCE];
    int fd = -1;
    uint16_t taken = 0;
    if (!port) {
        listen_close_all();
        return 0;
    }
    if (*port < -1 || *port > 65535)
        return tly_fail(EINVAL, "tally_comm_listen: %d is no port", *port);
    if (sodium_init() < 0)
        return tly_fail(ENOSYS, "libsodium cannot be initialised");
    int err = tly_params_load(&params, settings, why, sizeof why);
    if (err)
        return tly_fail(-err, "%s", why);
    err = listen_bind_for(&params, *port, &fd, &taken);
    tly_params_finish(&params);
    if (err)
        return err;
    if (fd >= 0)
        listen_add(fd, taken);
    *port = taken;
    return 0;
}
