/* fault.c - a test medium around another one: packets are late, get lost, come twice, altered or in part.
 *
 * A packet that is handed over is copied, perhaps twice, altered, or not at all, and is completed at once.  The copies wait
 * in a list until the inner channel has completed them. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "test/media/testing.h"

enum { MOST_WAITING = 64, LONGEST_WAIT = 8, THOUSAND = 1000 };

struct copy {
    struct tly_list node;
    struct tly_packet packet;
    uint8_t payload[];
};

struct faulty {
    struct tly_channel base;
    struct tly_channel *inner; /* owned */
    struct tly_loop *loop;
    struct tly_hook hook;
    struct tly_list copies; /* handed to the inner channel, then those that wait */
    uint32_t handed, waiting;
    uint32_t seen;  /* packets, ever */
    uint32_t turns; /* in which nothing is sent */
    bool refused, closed;
};

struct faulty_door {
    struct tly_door base;
    struct tly_door *inner; /* owned */
    struct tly_door_config config;
};

static struct tly_medium fault;
static const struct tly_medium *around;
static struct tly_faults chance;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards all below: a process has several loops */
static uint32_t state, count;

/* Lock held. */
static uint32_t draw_locked(uint32_t below)
{
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state % below;
}

static uint32_t draw(uint32_t below)
{
    pthread_mutex_lock(&lock);
    uint32_t r = draw_locked(below);
    pthread_mutex_unlock(&lock);
    return r;
}

static bool happens(const struct faulty *f, uint32_t thousandths)
{
    if (f->seen <= chance.spared)
        return false;
    pthread_mutex_lock(&lock);
    bool does = draw_locked(THOUSAND) < thousandths && (!chance.most || count < chance.most);
    count += does;
    pthread_mutex_unlock(&lock);
    return does;
}

uint32_t tly_fault_count(void)
{
    pthread_mutex_lock(&lock);
    uint32_t n = count;
    pthread_mutex_unlock(&lock);
    return n;
}

static struct faulty *faulty_of(struct tly_channel *c)
{
    return tly_list_entry(c, struct faulty, base);
}

/* --- packets ------------------------------------------------------------------------------------- */

static int add_copy(struct faulty *f, const struct tly_packet *p)
{
    struct copy *c = malloc(sizeof *c + p->len);
    if (!c)
        return -ENOMEM;
    tly_list_init(&c->node);
    c->packet = *p;
    if (p->len)
        memcpy(c->payload, p->payload, p->len);
    c->packet.payload = c->payload;
    c->packet.token = c->packet.owned = NULL;
    if (happens(f, chance.flip)) {
        uint32_t at = draw(p->head + p->len), bit = 1u << draw(8);
        if (at < p->head)
            c->packet.header[at] ^= (uint8_t)bit;
        else
            c->payload[at - p->head] ^= (uint8_t)bit;
    }
    if (p->len && happens(f, chance.truncate))
        c->packet.len = draw(p->len);
    tly_list_append(&f->copies, &c->node);
    f->waiting++;
    return 0;
}

static void drop_copy(struct faulty *f)
{
    free(tly_list_entry(tly_list_take(&f->copies), struct copy, node));
}

/* Have the inner channel take what waits, one after the other. */
static int pump(struct faulty *f)
{
    int err = 0;
    while (!f->closed && !err && f->waiting && !f->turns) {
        struct tly_list *n = f->copies.next;
        for (uint32_t i = 0; i < f->handed; i++)
            n = n->next;
        err = around->send(f->inner, &tly_list_entry(n, struct copy, node)->packet, 1);
        if (!err && happens(f, chance.delay))
            f->turns = 1 + draw(LONGEST_WAIT);
    }
    return err == -EAGAIN ? 0 : err;
}

static int send_packets(struct tly_channel *c, struct tly_packet *packet, uint32_t n)
{
    struct faulty *f = faulty_of(c);
    if (f->waiting >= MOST_WAITING) {
        f->refused = true;
        return -EAGAIN;
    }
    for (uint32_t i = 0; i < n && !f->closed; i++) {
        size_t bytes = (size_t)packet[i].head + packet[i].len + packet[i].trailer_len;
        f->seen++;
        uint32_t times = happens(f, chance.drop) ? 0 : happens(f, chance.duplicate) ? 2 : 1;
        for (; times; times--)
            if (add_copy(f, &packet[i]) != 0)
                return -ENOMEM;
        c->up->handed(c->user, 1, bytes);
        c->up->completed(c->user, 1);
    }
    return f->closed ? 0 : pump(f);
}

static int64_t prepare(struct tly_hook *h)
{
    struct faulty *f = tly_list_entry(h, struct faulty, hook);
    const struct tly_channel_user *up = f->base.up;
    void *user = f->base.user;
    up->enter(user);
    if (f->turns)
        f->turns--;
    int err = pump(f);
    if (err && !f->closed)
        up->ended(user, -err, strerror(-err));
    if (!f->closed && f->refused && f->waiting < MOST_WAITING) {
        f->refused = false;
        up->room(user);
    }
    int64_t due = !f->closed && f->turns ? tly_now() : INT64_MAX;
    up->leave(user);
    return due;
}

/* --- what the inner channel calls ---------------------------------------------------------------- */

static void on_enter(void *user)
{
    const struct faulty *f = user;
    f->base.up->enter(f->base.user);
}

static void on_leave(void *user)
{
    const struct faulty *f = user;
    f->base.up->leave(f->base.user);
}

static void on_connected(void *user)
{
    const struct faulty *f = user;
    f->base.up->connected(f->base.user);
}

static void on_ended(void *user, int err, const char *why)
{
    const struct faulty *f = user;
    f->base.up->ended(f->base.user, err, why);
}

static void on_room(void *user)
{
    pump(user);
}

static void on_handed(void *user, uint32_t packets, size_t bytes)
{
    struct faulty *f = user;
    f->handed += packets;
    f->waiting -= packets;
}

static void on_completed(void *user, uint32_t packets)
{
    struct faulty *f = user;
    for (; packets; packets--, f->handed--)
        drop_copy(f);
}

static void on_heard(void *user, size_t bytes)
{
    const struct faulty *f = user;
    f->base.up->heard(f->base.user, bytes);
}

static struct tly_arrival *on_begin(void *user, const uint8_t *header)
{
    const struct faulty *f = user;
    return f->base.up->begin(f->base.user, header);
}

static void on_progress(void *user)
{
    const struct faulty *f = user;
    f->base.up->progress(f->base.user);
}

static void on_arrived(void *user, const uint8_t *trailer)
{
    const struct faulty *f = user;
    f->base.up->arrived(f->base.user, trailer);
}

static const struct tly_channel_user inside = {
    .enter = on_enter,
    .leave = on_leave,
    .connected = on_connected,
    .ended = on_ended,
    .room = on_room,
    .handed = on_handed,
    .completed = on_completed,
    .heard = on_heard,
    .begin = on_begin,
    .progress = on_progress,
    .arrived = on_arrived,
};

/* --- life ---------------------------------------------------------------------------------------- */

static struct tly_channel *wrap(struct tly_channel *inner, struct tly_loop *loop)
{
    struct faulty *f = calloc(1, sizeof *f);
    if (!f)
        return NULL;
    f->base = (struct tly_channel){.medium = &fault, .name = fault.names[0]};
    f->inner = inner;
    f->loop = loop;
    f->hook.prepare = prepare;
    tly_list_init(&f->hook.node);
    tly_list_init(&f->copies);
    inner->up = &inside;
    inner->user = f;
    return &f->base;
}

static int dial(const struct tly_dial *d, struct tly_channel **out)
{
    struct tly_channel *inner;
    int err = around->dial(d, &inner);
    if (err)
        return err;
    *out = wrap(inner, d->loop);
    if (*out)
        return 0;
    around->close(inner);
    around->destroy(inner);
    return -ENOMEM;
}

static int start(struct tly_channel *c)
{
    struct faulty *f = faulty_of(c);
    int err = around->start(f->inner);
    if (!err)
        tly_loop_hook(f->loop, &f->hook);
    return err;
}

static void close_channel(struct tly_channel *c)
{
    struct faulty *f = faulty_of(c);
    if (f->closed)
        return;
    f->closed = true;
    tly_loop_unhook(f->loop, &f->hook);
    around->close(f->inner);
}

static void destroy(struct tly_channel *c)
{
    struct faulty *f = faulty_of(c);
    around->destroy(f->inner);
    while (!tly_list_empty(&f->copies))
        drop_copy(f);
    free(f);
}

static void accepted(void *user, struct tly_door *inner, struct tly_channel *c, const char *name)
{
    struct faulty_door *d = user;
    struct tly_channel *faulty = wrap(c, d->config.loop);
    if (faulty) {
        d->config.accepted(d->config.user, &d->base, faulty, name);
    } else {
        around->close(c);
        around->destroy(c);
    }
}

static int listen_at(const struct tly_door_config *c, struct tly_door **out)
{
    struct faulty_door *d = calloc(1, sizeof *d);
    if (!d)
        return -ENOMEM;
    struct tly_door_config config = *c;
    config.accepted = accepted;
    config.user = d;
    int err = around->listen(&config, &d->inner);
    if (err) {
        free(d);
        return err;
    }
    d->base.medium = &fault;
    d->base.port = d->inner->port;
    memcpy(d->base.where, d->inner->where, sizeof d->base.where);
    d->config = *c;
    *out = &d->base;
    return 0;
}

static void shut(struct tly_door *door)
{
    struct faulty_door *d = tly_list_entry(door, struct faulty_door, base);
    around->shut(d->inner);
    free(d);
}

/* --- the inner medium's set-up ------------------------------------------------------------------- */

static int propose_inside(struct tly_channel *c, uint8_t out[TLY_SETUP_BYTES], const char **why)
{
    return around->setup->propose(faulty_of(c)->inner, out, why);
}

static int accept_inside(struct tly_channel *c, const uint8_t *in, uint32_t bytes, const char **why)
{
    return around->setup->accept(faulty_of(c)->inner, in, bytes, why);
}

static int begin_inside(struct tly_channel *c, const char **why)
{
    return around->setup->begin(faulty_of(c)->inner, why);
}

static const struct tly_setup setup_inside = {
    .propose = propose_inside, .accept = accept_inside, .begin = begin_inside};

const struct tly_medium *tly_fault_wrap(const struct tly_medium *inner, const struct tly_faults *faults,
                                        uint32_t seed)
{
    static const char *const names[] = {"fault", NULL};
    around = inner;
    chance = *faults;
    state = seed * 2654435761u | 1;
    count = 0;
    fault = (struct tly_medium){
        .scheme = "fault",
        .names = names,
        .by_address = inner->by_address && !faults->apart,
        .in_order = inner->in_order,
        .listen = listen_at,
        .shut = shut,
        .dial = dial,
        .start = start,
        .send = send_packets,
        .close = close_channel,
        .destroy = destroy,
        .setup = inner->setup ? &setup_inside : NULL,
        .announce = inner->announce,
        .withdraw = inner->withdraw};
    return &fault;
}
