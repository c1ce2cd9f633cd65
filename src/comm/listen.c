/* listen.c - tally_comm_listen(): the coordinator's socket listens before the communicator is opened.
 *
 * A port that was tested and closed again may be another job's when the coordinator binds it.  So rank 0 binds first and
 * says the port afterwards; tally_comm_open() takes the socket over (coordinate() in comm.c).  One socket a process;
 * `lock` guards it.  A forked child does not have it. */
#include <errno.h>
#include <pthread.h>
#include <sodium.h>
#include <stdio.h>

#include "base/error.h"
#include "base/fork.h"
#include "base/loop.h"
#include "base/param.h"
#include "comm/listen.h"
#include "join/member.h"
#include "join/place.h"
#include "tally/tally.h"
#include "transport/address.h"
#include "transport/transport.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    int fd; /* -1: none */
    uint16_t port;
    unsigned generation;
} held = {.fd = -1};

static void put(int fd, uint16_t port)
{
    pthread_mutex_lock(&lock);
    if (held.fd >= 0 && held.generation == tly_fork_generation())
        tly_fd_close(held.fd);
    held.fd = fd;
    held.port = port;
    held.generation = tly_fork_generation();
    pthread_mutex_unlock(&lock);
}

int tly_listen_take(uint16_t port)
{
    int fd = -1;
    pthread_mutex_lock(&lock);
    if (held.fd >= 0 && held.port == port && held.generation == tly_fork_generation()) {
        fd = held.fd;
        held.fd = -1;
    }
    pthread_mutex_unlock(&lock);
    return fd;
}

/* Whether a coordinator answers at an address whose port another program holds: it may forward to one. */
static bool leads_to_coordinator(const struct tly_place *place, const struct tly_params *params,
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

static int bind_for(const struct tly_params *params, int wanted, int *fd, uint16_t *port)
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
    if (err != -EADDRINUSE || wanted >= 0)
        return err;
    char holder[TLY_HOLDER], sentence[TLY_SENTENCE];
    snprintf(sentence, sizeof sentence, "%s", tly_error());
    *fd = -1;
    *port = place.coord_port;
    return tly_address_holder(&to.at[0], holder) || leads_to_coordinator(&place, params, &to)
               ? 0
               : tly_fail(EADDRINUSE, "%s: end it, or set TALLY_PORT", sentence);
}

int tally_comm_listen(const char *const settings[], int *port)
{
    struct tly_params params;
    char why[TLY_SENTENCE];
    int fd = -1;
    uint16_t taken = 0;
    put(-1, 0);
    if (!port)
        return 0;
    if (*port < -1 || *port > 65535)
        return tly_fail(EINVAL, "tally_comm_listen: %d is no port", *port);
    if (sodium_init() < 0)
        return tly_fail(ENOSYS, "libsodium cannot be initialised");
    int err = tly_params_load(&params, settings, why, sizeof why);
    if (err)
        return tly_fail(-err, "%s", why);
    err = bind_for(&params, *port, &fd, &taken);
    tly_params_finish(&params);
    if (err)
        return err;
    put(fd, taken);
    *port = taken;
    return 0;
}
