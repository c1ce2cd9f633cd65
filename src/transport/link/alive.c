/* alive.c - is the peer alive?  Beats are given where nothing else is sent, and asked for where an answer matters. */
#include <errno.h>

#include "base/clock.h"
#include "transport/link/link.h"

/* BEAT_MS: on a connection with nothing else to send; asked for, beats come at each tick. */
enum { BEAT_MS = 1000, RECENT_S = 10 };

void tly_link_note_heard(struct tly_link *l)
{
    int64_t now = l->loop->awake;
    if (now - l->last_heard >= TLY_GAP_MS * TLY_MS) {
        l->gap = now - l->last_heard;
        l->gap_at = now;
    }
    l->last_heard = now;
    l->asked_at = 0;
    l->arrived = 0;
}

/* Bytes count as a sign of life also while they wait in the kernel for more to come (stream.c).  The first look in a silence only notes
 * how many have come. */
static void link_look_for_bytes(struct tly_link *l)
{
    struct tly_link_load load;
    if (tly_link_load(l, &load) != 0)
        return;
    bool more = l->arrived && load.arrived > l->arrived;
    if (more)
        tly_link_note_heard(l);
    l->arrived = load.arrived;
}

void tly_link_look_alive(struct tly_link *l)
{
    if (l->state < TLY_LINK_OPEN) {
        if (l->loop->awake > l->deadline)
            tly_link_end(l, ETIMEDOUT,
                         l->state == TLY_LINK_CONNECTING ? "no answer"
                         : l->state == TLY_LINK_SHAKING  ? "no answer in the handshake"
                                                         : "no frame gets through after the handshake");
    } else if (l->state == TLY_LINK_OPEN) {
        if (l->silence_ns && l->loop->awake - l->last_heard > l->silence_ns / 4)
            link_look_for_bytes(l);
        if (l->silence_ns && l->loop->awake - l->last_heard > l->silence_ns)
            tly_link_end(l, ETIMEDOUT, "silent");
        else if (l->loop->now - l->last_spoken >= BEAT_MS * TLY_MS)
            tly_link_say(l, TLY_BEAT, 0);
    }
}

/* Has the peer's kernel taken more of what we have sent, with still more behind that? */
static bool link_still_takes(struct tly_link *l)
{
    const struct tly_network *n = tly_link_via(l)->network;
    int64_t queued = n ? n->queued(l->channel) : -1;
    if (queued < 0)
        return false;
    uint64_t before = l->acked;
    l->acked = l->bytes_sent - (uint64_t)queued;
    return l->acked > before && queued > 0;
}

bool tly_link_await(struct tly_link *l, bool awaited)
{
    int64_t now = l->loop->awake;
    if (l->state != TLY_LINK_OPEN || !awaited || now - l->last_heard < TLY_TICK_MS * TLY_MS / 2) {
        l->asked_at = 0;
        return true;
    }
    link_look_for_bytes(l);
    bool takes = link_still_takes(l); /* the question is behind that */
    if (takes || !l->asked_at)
        l->asked_at = now;
    tly_link_enter(l);
    if (!tly_link_waiting(l))
        tly_link_say(l, TLY_BEAT, TLY_REQUEST);
    bool open = l->state == TLY_LINK_OPEN;
    return tly_link_leave(l) && open;
}

int64_t tly_link_unanswered(const struct tly_link *l, bool *reached)
{
    const struct tly_network *n = tly_link_via(l)->network;
    int64_t since = l->asked_at > l->loop->smooth_since ? l->asked_at : l->loop->smooth_since;
    int64_t quiet = l->asked_at && l->state == TLY_LINK_OPEN ? l->loop->awake - since : 0;
    /* Has its kernel answered at all meanwhile?  Within a machine there is nothing between us. */
    *reached = quiet && (!n || n->unanswered(l->channel) < quiet);
    return quiet;
}

int64_t tly_link_heard_at(const struct tly_link *l)
{
    return l->last_heard;
}

int64_t tly_link_gap(const struct tly_link *l)
{
    int64_t now = l->loop->awake, quiet = now - l->last_heard;
    if (quiet >= TLY_GAP_MS * TLY_MS)
        return quiet;
    return l->gap && now - l->gap_at < RECENT_S * TLY_SEC ? l->gap : 0;
}
