/* media.c - lists the media and chooses one of them: the best that both ends have and that connects.
 *
 * A roster lists endpoints of each service, one for each medium.  tly_link_dial() tries the media in the order of the list
 * below: shared memory within a machine, else RDMA, else TCP. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/fork.h"
#include "base/log.h"
#include "transport/address.h"
#include "transport/link/link.h"

/* The media, best first: MEDIUM(x) is the constant tly_x in the folder x/.  meson.build reads these lines, too. */
#define MEDIA \
    MEDIUM(shm) \
    MEDIUM(rdma) \
    MEDIUM(tcp)

#define MEDIUM(name) extern const struct tly_medium tly_##name;
MEDIA
#undef MEDIUM
#define MEDIUM(name) &tly_##name,
static const struct tly_medium *const media[] = {MEDIA NULL};
const struct tly_medium *const *tly_media = media;

enum { MOST_DOORS = TLY_MOST_ENDPOINTS };

const char *tly_media_name(int i)
{
    for (const struct tly_medium *const *m = tly_media; *m; m++)
        for (const char *const *name = (*m)->names; *name; name++)
            if (i-- == 0)
                return *name;
    return NULL;
}

void tly_media_at(const struct sockaddr_storage *address, struct tly_endpoints *out)
{
    char where[80];
    tly_address_text(address, where, sizeof where);
    *out = (struct tly_endpoints){0};
    for (const struct tly_medium *const *m = tly_media; *m; m++)
        if ((*m)->by_address)
            tly_endpoints_add(out, (*m)->scheme, where);
}

static bool media_may_use(const struct tly_medium *m, const struct tly_params *params, bool by_address)
{
    return (m->by_address || !by_address) && (!params || !m->allowed || m->allowed(params));
}

/* --- dialling ------------------------------------------------------------------------------------ */

static int media_dial_by(const struct tly_medium *m, struct tly_link *l, const struct tly_dial *d)
{
    struct tly_channel *c;
    int err = m->dial(d, &c);
    return err ? err : tly_link_start(l, c, NULL);
}

int tly_link_dial(struct tly_loop *loop, const struct tly_endpoints *to, const struct tly_link_config *c,
                  struct tly_link **out)
{
    int err = tly_fail(EHOSTUNREACH, "no way leads there");
    for (uint32_t i = 0; tly_media[i]; i++) {
        const struct tly_medium *m = tly_media[i];
        struct tly_dial d = {.loop = loop,
                             .where = tly_endpoints_where(to, m->scheme),
                             .params = c->params,
                             .copies = c->copies};
        if (i < c->skip || !d.where || !media_may_use(m, c->params, c->by_address))
            continue;
        struct tly_link *l = tly_link_create(loop, c, true);
        if (!l)
            return tly_fail(ENOMEM, "out of memory");
        err = media_dial_by(m, l, &d);
        if (!err) {
            *out = l;
            return 0;
        }
        tly_link_release(l);
    }
    return err;
}

uint32_t tly_link_skip(const struct tly_link *l, const struct tly_endpoints *to)
{
    uint32_t skip = 0;
    while (tly_media[skip] && tly_media[skip] != l->channel->medium)
        skip++;
    for (uint32_t i = skip + 1; tly_media[skip] && tly_media[i]; i++)
        if (tly_endpoints_where(to, tly_media[i]->scheme))
            return skip + 1;
    return 0;
}

/* --- listening ----------------------------------------------------------------------------------- */

/* Owner: the loop. */
struct tly_listener {
    struct tly_loop *loop;
    struct tly_listener_config config;
    struct tly_door *door[MOST_DOORS];
    uint32_t count;
};

/* A channel has come through a door: a link of the user's goes on with it. */
static void media_accepted(void *user, struct tly_door *d, struct tly_channel *channel, const char *name)
{
    const struct tly_listener *l = user;
    struct tly_link_config c = {.peer_name = name};
    int err = l->config.accepting(l->config.user, &c);
    if (err) {
        channel->medium->close(channel);
        channel->medium->destroy(channel);
        return;
    }
    struct tly_link *link = tly_link_create(l->loop, &c, false);
    err = link ? tly_link_start(link, channel, &d->strangers) : -ENOMEM;
    if (!err) {
        if (c.created)
            c.created(c.user, link);
        return;
    }
    if (link) {
        tly_link_release(link);
    } else {
        channel->medium->close(channel);
        channel->medium->destroy(channel);
    }
    c.user_calls->closed(c.user, NULL, ENOMEM, "out of memory"); /* accepting() counts on it */
}

static struct tly_door_config media_door_config(const struct tly_listener_config *c)
{
    return (struct tly_door_config){.address = &c->address,
                                    .first_port = c->first_port,
                                    .last_port = c->last_port,
                                    .reserved = -1,
                                    .params = c->params,
                                    .copies = c->copies};
}

/* Without a door that can be found by its address there is no listener; others come by that one where another cannot be opened. */
static int media_open_door(struct tly_listener *l, const struct tly_medium *m, int *reserved)
{
    struct tly_door_config d = media_door_config(&l->config);
    d.loop = l->loop;
    d.accepted = media_accepted;
    d.user = l;
    if (m->reserve) {
        d.reserved = *reserved;
        *reserved = -1;
    }
    int err = m->listen(&d, &l->door[l->count]);
    l->count += !err;
    if (err && !m->by_address) {
        tly_debug("transport", "no way by %s: %s", m->scheme, tly_error());
        return 0;
    }
    return err;
}

int tly_listen_reserved(struct tly_loop *loop, int fd, const struct tly_listener_config *c,
                        struct tly_listener **out)
{
    struct tly_listener *l = calloc(1, sizeof *l);
    int err = l ? 0 : tly_fail(ENOMEM, "out of memory");
    if (l) {
        l->loop = loop;
        l->config = *c;
    }
    for (uint32_t i = 0; !err && tly_media[i] && l->count < MOST_DOORS; i++)
        if (media_may_use(tly_media[i], c->params, c->by_address))
            err = media_open_door(l, tly_media[i], &fd);
    if (fd >= 0)
        tly_fd_close(fd);
    if (err) {
        tly_listener_destroy(l);
        return err;
    }
    *out = l;
    return 0;
}

int tly_listen(struct tly_loop *loop, const struct tly_listener_config *c, struct tly_listener **out)
{
    return tly_listen_reserved(loop, -1, c, out);
}

int tly_listener_reserve(const struct tly_listener_config *c, int *fd, uint16_t *port)
{
    struct tly_door_config d = media_door_config(c);
    for (uint32_t i = 0; tly_media[i]; i++)
        if (tly_media[i]->reserve)
            return tly_media[i]->reserve(&d, fd, port);
    return tly_fail(ENOTSUP, "no port can be reserved");
}

uint16_t tly_listener_port(const struct tly_listener *l)
{
    for (uint32_t i = 0; i < l->count; i++)
        if (l->door[i]->medium->by_address)
            return l->door[i]->port;
    return 0;
}

void tly_listener_endpoints(const struct tly_listener *l, struct tly_endpoints *out)
{
    *out = (struct tly_endpoints){0};
    for (int by_address = 1; by_address >= 0;
         by_address--) /* the first with an address names the host and its port */
        for (uint32_t i = 0; i < l->count; i++)
            if (l->door[i]->medium->by_address == by_address)
                tly_endpoints_add(out, l->door[i]->medium->scheme, l->door[i]->where);
}

void tly_listener_destroy(struct tly_listener *l)
{
    if (!l)
        return;
    for (uint32_t i = 0; i < l->count; i++)
        l->door[i]->medium->shut(l->door[i]);
    free(l);
}
