/* life.c - a link's state, from creation to its end, and what users ask of any link.
 *
 * A link may be destroyed by its user inside any of its callbacks.  So each entry from the loop or a channel counts
 * itself (enter, leave), and memory is freed when the last one leaves.  The channel is closed at once. */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "transport/address.h"
#include "transport/link/link.h"

enum {
    SHAKE_MS = 5000,
    CONNECT_MS = 10000,
    PACE_BYTES = 256 << 10, /* counts go alone after so much news, */
    PACE_MS = 5,            /* or so long, unless the user has said otherwise */
};

struct tly_link *tly_link_create(struct tly_loop *loop, const struct tly_link_config *c, bool connector)
{
    struct tly_link *l = calloc(1, sizeof *l);
    if (!l)
        return NULL;
    l->loop = loop;
    l->state = TLY_LINK_CONNECTING;
    tly_list_init(&l->hook.node);
    l->calls = c->user_calls;
    l->user = c->user;
    snprintf(l->name, sizeof l->name, "%s", c->peer_name ? c->peer_name : "?");
    tly_hello_init(&l->hello, &c->identity, connector);
    l->hello.choose = c->choose;
    l->hello.choose_user = c->user;
    tly_context_init(&l->sent);
    tly_context_init(&l->received);
    l->silence_ns = c->silence_ns;
    l->checksum = connector && c->checksum;
    l->pace_bytes = PACE_BYTES;
    l->pace_ns = PACE_MS * TLY_MS;
    l->last_heard = loop->awake;
    l->last_spoken = loop->now;
    l->deadline = loop->awake + (connector ? CONNECT_MS : SHAKE_MS) * TLY_MS;
    return l;
}

void tly_link_become(struct tly_link *l, enum tly_link_state state)
{
    assert(state == TLY_LINK_CLOSED ? l->state != TLY_LINK_CLOSED : state == l->state + 1);
    l->state = state;
}

void tly_link_enter(struct tly_link *l)
{
    l->depth++;
}

void tly_link_release(struct tly_link *l)
{
    for (uint32_t i = l->completed; i != l->made; i++)
        free(l->packet[i % TLY_PACKETS].owned);
    if (l->channel)
        l->channel->medium->destroy(l->channel);
    free(l->control);
    free(l->beside);
    free(l);
}

bool tly_link_leave(struct tly_link *l)
{
    /* Inside another callback it is not released: clang 14 forgets `depth` where a user is called. */
    if (--l->depth == 0 && l->destroyed) { /* NOLINT(clang-analyzer-unix.Malloc) */
        tly_link_release(l);
        return false;
    }
    return !l->destroyed;
}

void tly_link_end_handshake(struct tly_link *l)
{
    if (l->strangers)
        l->strangers->shaking--;
    l->strangers = NULL;
}

static void link_disconnect(struct tly_link *l)
{
    if (l->state == TLY_LINK_CLOSED)
        return;
    tly_link_end_handshake(l);
    tly_link_become(l, TLY_LINK_CLOSED);
    tly_loop_unhook(l->loop, &l->hook);
    if (l->channel)
        l->channel->medium->close(l->channel);
}

void tly_link_end(struct tly_link *l, int err, const char *why)
{
    if (l->state == TLY_LINK_CLOSED)
        return;
    if (l->strangers)
        tly_strangers_note(l->strangers, l->name, err, why, l->loop->awake);
    link_disconnect(l);
    l->calls->closed(l->user, l, err, why);
}

void tly_link_destroy(struct tly_link *l)
{
    if (!l)
        return;
    link_disconnect(l);
    l->destroyed = true;
    if (l->depth == 0)
        tly_link_release(l);
}

/* --- what users ask ------------------------------------------------------------------------------ */

void tly_link_set_silence(struct tly_link *l, int64_t silence_ns)
{
    l->silence_ns = silence_ns;
}

void tly_link_set_pace(struct tly_link *l, uint32_t bytes, uint32_t ms)
{
    l->pace_bytes = bytes;
    l->pace_ns = ms * TLY_MS;
}

void tly_link_sink(struct tly_link *l, const void *token)
{
    if (!l->in.coming || l->land.token != token)
        return;
    l->in.to = l->land.to = NULL;
    l->moves_to = NULL;
}

void *tly_link_landing(const struct tly_link *l, uint32_t *bytes)
{
    if (!l || !l->in.coming || !l->in.to)
        return NULL;
    bool beside = l->in.trailer || l->moves_to; /* what lies there, or is not verified, is not in place */
    *bytes = beside ? 0 : l->in.landed - l->in.landed % TLY_ALIGN;
    return l->land.token;
}

struct tly_loan *tly_link_loan(const struct tly_link *l)
{
    return l->loan;
}

const struct tly_identity *tly_link_peer(const struct tly_link *l)
{
    return &l->hello.peer;
}

void tly_link_rename(struct tly_link *l, const char *name)
{
    snprintf(l->name, sizeof l->name, "%s", name);
}

const char *tly_link_medium(const struct tly_link *l)
{
    return l->channel->name;
}

uint32_t tly_link_tries(const struct tly_link *l)
{
    return tly_link_via(l)->tries ? tly_link_via(l)->tries : 1;
}

uint64_t tly_link_memory(const struct tly_link *l)
{
    return tly_link_via(l)->memory;
}

bool tly_link_is_open(const struct tly_link *l)
{
    return l->state == TLY_LINK_OPEN;
}

void tly_link_address(const struct tly_link *l, bool remote, struct sockaddr_storage *out)
{
    memset(out, 0, sizeof *out);
    if (l->state != TLY_LINK_CLOSED && tly_link_via(l)->network)
        tly_link_via(l)->network->address(l->channel, remote, out);
}

bool tly_link_is_inside(const struct tly_link *l)
{
    return tly_link_via(l)->inside;
}

bool tly_link_is_far(const struct tly_link *l)
{
    struct sockaddr_storage here, there;
    tly_link_address(l, false, &here);
    tly_link_address(l, true, &there);
    return here.ss_family && !tly_address_same_host(&here, &there);
}

uint64_t tly_link_bytes(const struct tly_link *l, bool sent)
{
    return sent ? l->bytes_sent : l->bytes_received;
}

int tly_link_load(const struct tly_link *l, struct tly_link_load *out)
{
    const struct tly_network *n = tly_link_via(l)->network;
    return n && l->state == TLY_LINK_OPEN ? n->load(l->channel, out) : -ENOTSUP;
}
