/* out.c - frames out, through a ring of packets.
 *
 *   completed          handed            made
 *       |  the medium's  |  wait for it   |      numbers that only grow; the ring has packet n at n % TLY_PACKETS
 *
 * Packets are made only when none waits, so that what is urgent is chosen as late as possible: next() asks the user, a
 * number and the counts are filled in, and the header is signed.  A payload is sent from where it lies, and the user
 * hears of it when the medium has completed the packet. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <assert.h>
#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/fail.h"
#include "base/log.h"
#include "transport/link/link.h"

void tly_link_checksum(uint8_t out[TLY_TRAILER_BYTES], const void *payload, uint32_t len, uint32_t seq)
{
    uint64_t sum = htole64(XXH3_64bits_withSeed(payload, len, seq));
    memcpy(out, &sum, sizeof sum);
}

void tly_link_append(struct tly_link *l, struct tly_outgoing *o)
{
    const struct tly_lending *lending = tly_link_via(l)->lending;
    bool open = l->state == TLY_LINK_OPEN;
    assert(!tly_link_is_full(l));
    struct tly_packet *p = &l->packet[l->made++ % TLY_PACKETS];
    tly_fail_at(l->hello.me.role, "sends", o->frame.type);
    bool shown = lending && open && lending->show(l->channel, o, p->reference);
    if (shown)
        o->frame.flags |= TLY_SHOWN;
    o->frame.seq = l->send_seq++;
    o->frame.accepted = (uint32_t)l->counts.accepted;
    o->frame.granted = (uint32_t)l->counts.granted;
    o->frame.received = (uint32_t)l->counts.received;
    o->frame.stable = (uint32_t)l->counts.stable;
    p->payload = shown ? p->reference : o->payload;
    p->len = shown ? TLY_REFERENCE_BYTES : o->frame.payload;
    p->type = o->frame.type;
    p->trailer_len = 0;
    if (l->checksum && open && !tly_link_via(l)->inside) {
        o->frame.flags |= TLY_SUMMED;
        if (p->len) {
            tly_link_checksum(p->trailer, p->payload, p->len, o->frame.seq);
            p->trailer_len = TLY_TRAILER_BYTES;
        }
    }
    p->head = tly_frame_encode(&o->frame, l->hello.send_key, &l->sent, p->header);
    p->token = o->token;
    p->owned = o->owned;
    l->owes = false;
    l->owed_bytes = 0;
}

static void link_out_fill(struct tly_link *l)
{
    const struct tly_lending *lending = tly_link_via(l)->lending;
    uint32_t bytes = 0;
    while (l->state == TLY_LINK_OPEN && !l->destroyed && !tly_link_is_full(l) && bytes < TLY_BATCH_BYTES) {
        struct tly_outgoing o = {0};
        if (lending && lending->next_return(l->channel, &o.frame.key))
            o.frame.type = TLY_RETURN;
        else if (!l->calls->next(l->user, l, &o))
            break;
        if (o.lost) {
            tly_warn("transport", "closing the connection to %s: out of memory", l->name);
            tly_link_end(l, ENOMEM, "out of memory");
            break;
        }
        tly_link_append(l, &o);
        const struct tly_packet *p = &l->packet[(l->made - 1) % TLY_PACKETS];
        bytes += p->head + p->len;
    }
}

void tly_link_on_handed(struct tly_link *l, uint32_t packets, size_t bytes)
{
    assert(packets <= tly_link_waiting(l));
    l->bytes_sent += bytes;
    l->handed += packets;
    l->last_spoken = l->loop->now;
}

void tly_link_on_completed(struct tly_link *l, uint32_t packets)
{
    assert(packets <= l->handed - l->completed);
    for (uint32_t i = 0; i < packets; i++) {
        struct tly_packet *p = &l->packet[l->completed++ % TLY_PACKETS];
        void *token = p->token;
        free(p->owned);
        p->owned = NULL;
        p->token = NULL;
        tly_fail_at(l->hello.me.role, "has sent", p->type);
        if (token && !l->destroyed)
            l->calls->sent(l->user, l, token);
    }
}

void tly_link_push(struct tly_link *l)
{
    if (l->state == TLY_LINK_CLOSED || l->state == TLY_LINK_CONNECTING)
        return;
    tly_link_enter(l);
    while (l->state != TLY_LINK_CLOSED) {
        if (!tly_link_waiting(l)) {
            if (l->completed == l->handed)
                l->completed = l->handed = l->made = 0; /* so that a batch lies in one piece */
            link_out_fill(l);
            if (!tly_link_waiting(l) || l->state == TLY_LINK_CLOSED) {
                l->wants_room = false;
                break;
            }
        }
        uint32_t at = l->handed % TLY_PACKETS, n = tly_link_waiting(l);
        if (n > TLY_PACKETS - at)
            n = TLY_PACKETS - at;
        int err = tly_link_via(l)->send(l->channel, &l->packet[at], n);
        if (err == -EAGAIN) {
            l->wants_room = true;
            break;
        }
        if (err)
            tly_link_end(l, ECONNRESET, strerror(-err));
    }
    tly_link_leave(l);
}

void tly_link_flush(struct tly_link *l)
{
    if (l->state == TLY_LINK_OPEN && !l->wants_room && l->depth == 0)
        tly_link_push(l);
}

void tly_link_set_counts(struct tly_link *l, const struct tly_counts *counts, uint32_t bytes)
{
    l->counts = *counts;
    l->owed_bytes = bytes < UINT32_MAX - l->owed_bytes ? l->owed_bytes + bytes : UINT32_MAX;
    if (!l->owes) {
        l->owes = true;
        l->owed_since = l->loop->now;
    }
}

void tly_link_say(struct tly_link *l, int type, uint16_t flags)
{
    if (tly_link_is_full(l))
        return;
    struct tly_outgoing o = {.frame = {.type = (uint8_t)type, .flags = flags}};
    tly_link_append(l, &o);
    if (!l->wants_room)
        tly_link_push(l);
}

int64_t tly_link_send_counts(struct tly_link *l)
{
    if (l->state != TLY_LINK_OPEN || !l->owes)
        return INT64_MAX;
    int64_t now = tly_now();
    if (l->owed_bytes < l->pace_bytes && now - l->owed_since < l->pace_ns)
        return l->owed_since + l->pace_ns;
    tly_link_say(l, TLY_COUNTS, 0);
    return INT64_MAX;
}

/* A packet that waits gets a copy of its payload.  Packets that the medium has are the medium's to see to. */
void tly_link_detach(struct tly_link *l, const void *token)
{
    for (uint32_t i = l->completed; i != l->made; i++) {
        struct tly_packet *p = &l->packet[i % TLY_PACKETS];
        bool waits = i - l->completed >= l->handed - l->completed;
        if (p->token != token)
            continue;
        p->token = NULL;
        if (!waits || p->len == 0)
            continue;
        uint8_t *copy = malloc(p->len);
        if (!copy) {
            tly_link_end(l, ENOMEM, "out of memory");
            return;
        }
        memcpy(copy, p->payload, p->len);
        p->payload = p->owned = copy;
    }
    if (l->state == TLY_LINK_OPEN && tly_link_via(l)->detach &&
        tly_link_via(l)->detach(l->channel, token) != 0)
        tly_link_end(l, ENOMEM, "out of memory");
}
