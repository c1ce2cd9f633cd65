/* send.c - messages out.
 *
 * The link's packet is copied into memory of ours that is registered, so it is completed when it is handed over.  A message
 * waits where the peer has no receive for it, no place for its payload, or the card has 64. */
#include <errno.h>
#include <string.h>

#include "base/clock.h"
#include "transport/rdma/rdma.h"
#include "wire/pack.h"

static uint8_t *send_slot(const struct tly_rdma_channel *r, uint32_t n)
{
    return r->own.data + (size_t)(TLY_RDMA_RECEIVES + n % TLY_RDMA_SENDS) * TLY_RDMA_MESSAGE;
}

static uint8_t *send_source(const struct tly_rdma_channel *r, uint32_t place)
{
    return r->own.data + (size_t)(TLY_RDMA_RECEIVES + TLY_RDMA_SENDS) * TLY_RDMA_MESSAGE +
           (size_t)place * TLY_RDMA_PLACE;
}

/* A row of places for so many bytes, the last that is free; false: there is none. */
static bool send_find_places(const struct tly_rdma_channel *r, uint32_t len, uint32_t *first, uint32_t *mask)
{
    const uint32_t row = tly_rdma_row(len), busy = r->lent | r->writing, all = (1u << TLY_RDMA_PLACES) - 1;
    for (uint32_t i = TLY_RDMA_PLACES; i-- > 0;) {
        if (row << i & (busy | ~all))
            continue;
        *first = i;
        *mask = row << i;
        return true;
    }
    return false;
}

static bool send_has_room(const struct tly_rdma_channel *r, uint32_t reserve)
{
    return r->allowed - r->sent > reserve && r->sent - r->completed + reserve < TLY_RDMA_SENDS;
}

/* The places to tell of: none while a message waits, so that one that names a place a second time is found. */
static uint32_t send_freed(const struct tly_rdma_channel *r)
{
    return r->taken == r->came ? r->freed : 0;
}

/* The message in the next slot, of `len` bytes; with `payload` bytes that lie at the sources of the places in `mask`. */
static int send_post(struct tly_rdma_channel *r, uint32_t len, uint32_t payload, uint32_t first,
                     uint32_t mask)
{
    uint32_t slot = r->sent % TLY_RDMA_SENDS;
    struct tly_ibv_sge of_write = {(uintptr_t)send_source(r, first), payload, r->own.mr->lkey};
    struct tly_ibv_sge of_send = {(uintptr_t)send_slot(r, r->sent), len, r->own.mr->lkey};
    struct tly_ibv_send_wr send = {.wr_id = r->sent,
                                   .sg_list = &of_send,
                                   .num_sge = 1,
                                   .opcode = TLY_IBV_WR_SEND,
                                   .send_flags = TLY_IBV_SEND_SIGNALED};
    struct tly_ibv_send_wr write = {
        .wr_id = r->sent, .next = &send, .sg_list = &of_write, .num_sge = 1, .opcode = TLY_IBV_WR_RDMA_WRITE};
    struct tly_ibv_send_wr *bad;
    write.wr.rdma.remote_addr = r->peer_places + (uint64_t)first * TLY_RDMA_PLACE;
    write.wr.rdma.rkey = r->peer_key;
    int err = tly_ibv_post_send(r->qp, mask ? &write : &send, &bad);
    if (err) {
        r->broken = true;
        return -err;
    }
    if (r->sent == r->completed)
        r->busy_since = r->answered_at = tly_now();
    r->written[slot] = mask;
    r->bytes[slot] = len + payload;
    r->bytes_sent += len + payload;
    r->lent |= mask;
    r->writing |= mask;
    r->told = r->posted;
    r->freed &= ~send_freed(r);
    r->sent++;
    return 0;
}

static uint8_t *send_begin_message(struct tly_rdma_channel *r, uint32_t place)
{
    uint8_t *m = send_slot(r, r->sent);
    m = tly_put32(m, r->posted);
    m = tly_put32(m, place);
    return tly_put64(m, send_freed(r));
}

/* -EAGAIN: not now. */
static int send_packet(struct tly_rdma_channel *r, const struct tly_packet *p)
{
    uint32_t first = TLY_RDMA_NO_PLACE, mask = 0, apart = 0;
    if (r->broken)
        return -EIO;
    if (!send_has_room(r, 1))
        return -EAGAIN;
    uint32_t len = TLY_RDMA_HEAD + p->head + p->len + p->trailer_len;
    if (len > TLY_RDMA_MESSAGE) {
        if (!send_find_places(r, p->len, &first, &mask))
            return -EAGAIN;
        apart = p->len;
        len -= apart;
        memcpy(send_source(r, first), p->payload, apart);
    }
    uint8_t *m = send_begin_message(r, first);
    memcpy(m, p->header, p->head);
    m += p->head;
    if (!apart && p->len) {
        memcpy(m, p->payload, p->len);
        m += p->len;
    }
    memcpy(m, p->trailer, p->trailer_len);
    return send_post(r, len, apart, mask ? first : 0, mask);
}

int tly_rdma_send(struct tly_channel *c, struct tly_packet *packet, uint32_t n)
{
    struct tly_rdma_channel *r = tly_rdma_of(c);
    if (!r->begun)
        return tly_stream_send(c, packet, n);
    uint32_t taken = 0;
    size_t bytes = 0;
    int err = 0;
    for (; taken < n && !err; taken += !err) {
        err = send_packet(r, &packet[taken]);
        bytes += err ? 0 : packet[taken].head + packet[taken].len + packet[taken].trailer_len;
    }
    r->full = err == -EAGAIN;
    if (taken) {
        c->up->handed(c->user, taken, bytes);
        c->up->completed(c->user, taken);
    }
    return err;
}

void tly_rdma_tell(struct tly_rdma_channel *r)
{
    bool news = send_freed(r) || r->posted - r->told >= TLY_RDMA_RECEIVES / 2;
    if (!news || r->broken || !send_has_room(r, 0))
        return;
    send_begin_message(r, TLY_RDMA_NO_PLACE);
    send_post(r, TLY_RDMA_HEAD, 0, 0, 0); /* if that fails the next frame does, too */
}
