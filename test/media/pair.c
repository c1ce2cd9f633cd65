/* pair.c - packets between two ends in one loop, which land late and in any order.
 *
 * flights: the packets that were handed over and are not completed, in their order.  Each turn of the loop takes the
 * first one that has not arrived a step further:
 *   WAITING   its turns pass
 *   LANDING   the receiver has said where it belongs; pieces of it land
 *   ARRIVED   it lingers, and is completed when those before it are
 * Payloads are read when they land, not when they are handed over, as a network card does. */
#include "test/media/pair.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "transport/link/link.h"

struct door {
    struct tly_door base;
    struct tly_door_config config;
    struct tly_list node;
};

enum stage { WAITING, LANDING, ARRIVED };

struct flight {
    struct tly_list node;
    struct tly_packet packet; /* as it was handed over; its payload is the link's */
    enum stage stage;
    uint32_t turns;
    uint8_t *bounce; /* owned: of a payload that was taken away */
    uint32_t *order; /* owned: of its pieces */
    uint32_t pieces, done;
};

struct pair {
    struct tly_channel base;
    struct tly_loop *loop;
    const struct tly_pair_conduct *how;
    struct tly_hook hook;
    struct pair *peer; /* NULL: not yet, or it has ended */
    char where[TLY_ENDPOINT];
    bool dialled, met, closed;
    bool accepted, begun; /* of its set-up */
    struct tly_list flights;
    struct tly_arrival *in; /* of the peer's flight that lands */
};

/* Doors and announced memory of the process. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards all below */
static struct tly_list doors = {&doors, &doors}, announced = {&announced, &announced};
static uint32_t last_door, state = 1;
static enum tly_pair_lapse lapse;
static struct tly_pair_facts facts;

struct stretch {
    struct tly_list node;
    const uint8_t *base;
    size_t bytes;
};

/* xorshift32; below `below`. */
static uint32_t draw(uint32_t below)
{
    pthread_mutex_lock(&lock);
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    uint32_t r = state;
    pthread_mutex_unlock(&lock);
    return below ? r % below : 0;
}

void tly_pair_seed(uint32_t seed)
{
    state = seed * 2654435761u | 1;
}

struct tly_pair_facts tly_pair_facts(void)
{
    pthread_mutex_lock(&lock);
    struct tly_pair_facts f = facts;
    facts = (struct tly_pair_facts){0};
    pthread_mutex_unlock(&lock);
    return f;
}

/* --- memory -------------------------------------------------------------------------------------- */

int tly_pair_announce(const void *base, size_t bytes, void **out)
{
    struct stretch *s = malloc(sizeof *s);
    if (!s)
        return -ENOMEM;
    *s = (struct stretch){.base = base, .bytes = bytes};
    pthread_mutex_lock(&lock);
    tly_list_append(&announced, &s->node);
    pthread_mutex_unlock(&lock);
    *out = s;
    return 0;
}

void tly_pair_withdraw(void *what)
{
    struct stretch *s = what;
    pthread_mutex_lock(&lock);
    tly_list_remove(&s->node);
    pthread_mutex_unlock(&lock);
    free(s);
}

static void check_announced(const uint8_t *p, size_t len)
{
    bool found = false;
    pthread_mutex_lock(&lock);
    for (const struct tly_list *n = announced.next; n != &announced && !found; n = n->next) {
        const struct stretch *s = tly_list_entry(n, struct stretch, node);
        found = p >= s->base && len <= s->bytes && (size_t)(p - s->base) <= s->bytes - len;
    }
    facts.unannounced += !found;
    pthread_mutex_unlock(&lock);
}

/* --- flights ------------------------------------------------------------------------------------- */

static struct pair *pair_of(struct tly_channel *c)
{
    return tly_list_entry(c, struct pair, base);
}

static void drop_first(struct pair *p)
{
    struct flight *f = tly_list_entry(tly_list_take(&p->flights), struct flight, node);
    free(f->bounce);
    free(f->order);
    free(f);
}

/* The pieces in which a payload lands, shuffled. */
static int cut(struct flight *f, uint32_t piece)
{
    f->pieces = piece ? (f->packet.len + piece - 1) / piece : f->packet.len > 0;
    f->done = 0;
    free(f->order);
    f->order = calloc(f->pieces + 1, sizeof *f->order);
    if (!f->order)
        return -ENOMEM;
    for (uint32_t i = 0; i < f->pieces; i++) {
        uint32_t j = draw(i + 1);
        f->order[i] = f->order[j];
        f->order[j] = i;
    }
    return 0;
}

/* Some of the pieces land. */
static void land(const struct pair *p, struct flight *f, uint8_t *to)
{
    uint32_t some = p->how->piece ? 1 + draw(f->pieces) : f->pieces;
    uint32_t piece = p->how->piece ? p->how->piece : f->packet.len;
    const uint8_t *from = f->bounce ? f->bounce : f->packet.payload;
    for (; some && f->done < f->pieces; some--, f->done++) {
        uint32_t at = f->order[f->done] * piece;
        uint32_t n = f->packet.len - at < piece ? f->packet.len - at : piece;
        if (to && f->packet.len <= p->how->moved)
            memcpy(to + at, from + at, n);
    }
}

/* The packet is about to come. */
static void wait(struct pair *p, struct flight *f)
{
    if (f->turns > 0)
        f->turns--;
    if (f->turns > 0)
        return;
    struct pair *to = p->peer;
    to->base.up->heard(to->base.user, f->packet.head + f->packet.len);
    if (to->closed)
        return;
    to->in = to->base.up->begin(to->base.user, f->packet.header);
    if (!to->in)
        return;
    if (to->in->follows != f->packet.len || to->in->trailer != f->packet.trailer_len) {
        to->base.up->ended(to->base.user, EPROTO, "a packet came in part");
        return;
    }
    f->stage = LANDING;
    if (to->in->to && to->in->users)
        check_announced(to->in->to, f->packet.len);
    if (cut(f, p->how->piece) != 0)
        to->base.up->ended(to->base.user, ENOMEM, "out of memory");
}

static void go_on_landing(struct pair *p, struct flight *f)
{
    struct pair *to = p->peer;
    land(p, f, to->in->to);
    if (f->done < f->pieces)
        return;
    f->stage = ARRIVED;
    f->turns = draw(p->how->linger + 1);
    to->in->landed = to->in->follows;
    to->in = NULL;
    pthread_mutex_lock(&lock);
    facts.packets++;
    facts.bytes += f->packet.len;
    pthread_mutex_unlock(&lock);
    to->base.up->arrived(to->base.user, f->packet.trailer);
}

/* One step of the first flight that has not arrived; false: there is none. */
static bool step(struct pair *p)
{
    struct pair *to = p->peer;
    struct flight *f = NULL;
    for (struct tly_list *n = p->flights.next; n != &p->flights && !f; n = n->next) {
        f = tly_list_entry(n, struct flight, node);
        f = f->stage == ARRIVED ? NULL : f;
    }
    if (!f || !to || !to->base.up)
        return false;
    to->base.up->enter(to->base.user);
    if (f->stage == WAITING)
        wait(p, f);
    if (p->peer == to && !to->closed && f->stage == LANDING)
        go_on_landing(p, f);
    to->base.up->leave(to->base.user);
    return true;
}

static void complete(struct pair *p)
{
    while (!p->closed && !(p->how->held && *p->how->held) && !tly_list_empty(&p->flights)) {
        struct flight *f = tly_list_entry(p->flights.next, struct flight, node);
        if (f->stage != ARRIVED || f->turns-- > 0)
            return;
        drop_first(p);
        p->base.up->completed(p->base.user, 1);
    }
}

/* --- life ---------------------------------------------------------------------------------------- */

static struct pair *create(const struct tly_medium *medium, const struct tly_pair_conduct *how,
                           struct tly_loop *loop)
{
    struct pair *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->base = (struct tly_channel){.medium = medium, .name = medium->names[0]};
    p->loop = loop;
    p->how = how;
    tly_list_init(&p->flights);
    tly_list_init(&p->hook.node);
    return p;
}

static struct door *find_door(const char *where, const struct tly_loop *loop)
{
    struct door *found = NULL;
    pthread_mutex_lock(&lock);
    for (struct tly_list *n = doors.next; n != &doors && !found; n = n->next) {
        struct door *d = tly_list_entry(n, struct door, node);
        found = strcmp(d->base.where, where) == 0 && d->config.loop == loop ? d : NULL;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static void meet(struct pair *p)
{
    struct door *d = find_door(p->where, p->loop);
    struct pair *other = d ? create(p->base.medium, p->how, p->loop) : NULL;
    p->met = true;
    if (!other) {
        p->base.up->ended(p->base.user, d ? ENOMEM : ECONNREFUSED, d ? "out of memory" : "nobody is there");
        return;
    }
    other->met = true;
    other->peer = p;
    p->peer = other;
    d->config.accepted(d->config.user, &d->base, &other->base, "the other end");
    if (p->peer && !p->closed)
        p->base.up->connected(p->base.user);
}

static int64_t prepare(struct tly_hook *h)
{
    struct pair *p = tly_list_entry(h, struct pair, hook);
    const struct tly_channel_user *up = p->base.up;
    void *user = p->base.user;
    up->enter(user);
    if (!p->met)
        meet(p);
    if (!p->closed && !p->peer)
        up->ended(user, ECONNRESET, NULL);
    bool busy = !p->closed && step(p);
    complete(p);
    busy |= !p->closed && !tly_list_empty(&p->flights);
    up->leave(user);
    return busy ? tly_now() : INT64_MAX;
}

int tly_pair_start(struct tly_channel *c)
{
    struct pair *p = pair_of(c);
    p->hook.prepare = prepare;
    p->hook.tick = NULL;
    tly_loop_hook(p->loop, &p->hook);
    return 0;
}

/* --- set-up -------------------------------------------------------------------------------------- */

static const char proposal[] = "a pair";

void tly_pair_set_lapse(enum tly_pair_lapse l)
{
    lapse = l;
}

/* A frame that the link would not send now. */
static void send_early(struct tly_link *l, int type, const char *payload)
{
    struct tly_outgoing o = {.frame = {.type = (uint8_t)type, .payload = (uint32_t)strlen(payload)},
                             .payload = payload};
    tly_link_append(l, &o);
}

static int propose(struct tly_channel *c, uint8_t out[TLY_SETUP_BYTES], const char **why)
{
    const struct pair *p = pair_of(c);
    enum tly_pair_lapse does = p->dialled ? lapse : TLY_PAIR_NONE;
    if (does == TLY_PAIR_CANNOT) {
        *why = "a pair is too much";
        return -ENOMEM;
    }
    if (does == TLY_PAIR_TWICE || does == TLY_PAIR_EMPTY)
        send_early(c->user, TLY_SETUP, does == TLY_PAIR_TWICE ? proposal : "");
    if (does == TLY_PAIR_HASTY)
        send_early(c->user, TLY_BEAT, "");
    memcpy(out, proposal, strlen(proposal));
    out[0] = does == TLY_PAIR_GARBLED ? 'b' : proposal[0];
    return (int)strlen(proposal);
}

static int accept_proposal(struct tly_channel *c, const uint8_t *in, uint32_t bytes, const char **why)
{
    struct pair *p = pair_of(c);
    if (bytes != strlen(proposal) || memcmp(in, proposal, bytes) != 0) {
        *why = "no pair";
        return -EPROTO;
    }
    p->accepted = true;
    return 0;
}

static int begin_new_way(struct tly_channel *c, const char **why)
{
    struct pair *p = pair_of(c);
    if (!p->accepted || p->begun || !p->peer->accepted)
        abort(); /* the link asks in this order, and once */
    p->begun = true;
    return 0;
}

const struct tly_setup tly_pair_setup = {
    .propose = propose, .accept = accept_proposal, .begin = begin_new_way};

int tly_pair_dial(const struct tly_medium *medium, const struct tly_pair_conduct *how,
                  const struct tly_dial *d, struct tly_channel **out)
{
    if (!find_door(d->where, d->loop))
        return tly_fail(ECONNREFUSED, "nobody is at %s", d->where);
    struct pair *p = create(medium, how, d->loop);
    if (!p)
        return tly_fail(ENOMEM, "out of memory");
    snprintf(p->where, sizeof p->where, "%s", d->where);
    p->dialled = true;
    *out = &p->base;
    return 0;
}

int tly_pair_send(struct tly_channel *c, struct tly_packet *packet, uint32_t n)
{
    struct pair *p = pair_of(c);
    for (uint32_t i = 0; i < n; i++) {
        struct flight *f = calloc(1, sizeof *f);
        if (!f)
            return -ENOMEM;
        f->packet = packet[i];
        if (f->packet.payload == packet[i].reference)
            f->packet.payload = f->packet.reference;
        f->turns = 1 + draw(p->how->wait + 1);
        if (f->packet.token && f->packet.len)
            check_announced(f->packet.payload, f->packet.len);
        tly_list_append(&p->flights, &f->node);
        c->up->handed(c->user, 1, (size_t)f->packet.head + f->packet.len + f->packet.trailer_len);
    }
    tly_loop_wake(p->loop);
    return 0;
}

int tly_pair_detach(struct tly_channel *c, const void *token)
{
    struct pair *p = pair_of(c);
    for (struct tly_list *n = p->flights.next; n != &p->flights; n = n->next) {
        struct flight *f = tly_list_entry(n, struct flight, node);
        if (f->packet.token != token || f->bounce || !f->packet.len)
            continue;
        f->bounce = malloc(f->packet.len);
        if (!f->bounce)
            return -ENOMEM;
        memcpy(f->bounce, f->packet.payload, f->packet.len);
        f->packet.payload = f->bounce;
    }
    return 0;
}

void tly_pair_close(struct tly_channel *c)
{
    struct pair *p = pair_of(c);
    if (p->closed)
        return;
    p->closed = true;
    tly_loop_unhook(p->loop, &p->hook);
    if (p->peer) {
        p->peer->peer = NULL;
        p->peer->in = NULL;
        tly_loop_wake(p->loop);
    }
    p->peer = NULL;
    while (!tly_list_empty(&p->flights))
        drop_first(p);
}

void tly_pair_destroy(struct tly_channel *c)
{
    free(pair_of(c));
}

/* --- doors --------------------------------------------------------------------------------------- */

int tly_pair_listen(const struct tly_medium *medium, const struct tly_door_config *c, struct tly_door **out)
{
    struct door *d = calloc(1, sizeof *d);
    if (!d)
        return tly_fail(ENOMEM, "out of memory");
    d->base.medium = medium;
    d->config = *c;
    pthread_mutex_lock(&lock);
    snprintf(d->base.where, sizeof d->base.where, "%u", ++last_door);
    tly_list_append(&doors, &d->node);
    pthread_mutex_unlock(&lock);
    *out = &d->base;
    return 0;
}

void tly_pair_shut(struct tly_door *door)
{
    struct door *d = tly_list_entry(door, struct door, base);
    pthread_mutex_lock(&lock);
    tly_list_remove(&d->node);
    pthread_mutex_unlock(&lock);
    free(d);
}
