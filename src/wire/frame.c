/* frame.c - encode, check and decode the header. */
#include "wire/frame.h"

#include <errno.h>
#include <sodium.h>
#include <string.h>

#include "wire/pack.h"

static const uint32_t magic = 0x594c4154; /* "TALY" */

_Static_assert(crypto_shorthash_KEYBYTES == TLY_FRAME_KEY_BYTES, "SipHash-2-4 key");
_Static_assert(crypto_shorthash_BYTES == 8, "SipHash-2-4 output");

enum { FLAGS_AT = 6, CHECK_AT = 56, CHECK_BYTES = 8, CONTEXT_AT = TLY_FRAME_LEAST };

_Static_assert(CHECK_AT + CHECK_BYTES == CONTEXT_AT, "the check is the last of what is always sent");

void tly_context_init(struct tly_context *c)
{
    memset(c->bytes, 0xff, sizeof c->bytes); /* no frame says so: there is no such rank */
}

/* Of a whole header in which the check is 0. */
static void frame_write_check(uint8_t check[CHECK_BYTES], const uint8_t header[TLY_FRAME_BYTES],
                              const uint8_t key[TLY_FRAME_KEY_BYTES])
{
    crypto_shorthash(check, header, TLY_FRAME_BYTES, key);
}

uint32_t tly_frame_encode(const struct tly_frame *f, const uint8_t key[TLY_FRAME_KEY_BYTES],
                          struct tly_context *last, uint8_t out[TLY_FRAME_BYTES])
{
    uint8_t *p = out + CONTEXT_AT, check[CHECK_BYTES];
    p = tly_put64(p, f->key);
    p = tly_put64(p, f->spec);
    p = tly_put64(p, f->count);
    p = tly_put32(p, f->epoch);
    *p++ = f->kind;
    *p++ = f->dtype;
    *p++ = f->op;
    *p++ = 0;
    p = tly_put32(p, f->group);
    p = tly_put32(p, f->rank);
    p = tly_put32(p, f->root);
    p = tly_put32(p, (uint32_t)f->priority);
    p = tly_put_double(p, f->prescale);
    tly_put_double(p, f->postscale);
    bool same = memcmp(last->bytes, out + CONTEXT_AT, sizeof last->bytes) == 0;
    memcpy(last->bytes, out + CONTEXT_AT, sizeof last->bytes);
    p = tly_put32(out, magic);
    *p++ = TLY_PROTOCOL_HIGHEST;
    *p++ = f->type;
    p = tly_put16(p, same ? f->flags | TLY_SAME : f->flags);
    p = tly_put32(p, f->seq);
    p = tly_put32(p, f->part);
    p = tly_put64(p, f->place);
    p = tly_put32(p, f->length);
    p = tly_put32(p, f->offset);
    p = tly_put32(p, f->payload);
    p = tly_put32(p, f->round);
    p = tly_put32(p, f->accepted);
    p = tly_put32(p, f->granted);
    p = tly_put32(p, f->received);
    p = tly_put32(p, f->stable);
    memset(p, 0, CHECK_BYTES);
    frame_write_check(check, out, key);
    memcpy(p, check, CHECK_BYTES);
    return same ? TLY_FRAME_LEAST : TLY_FRAME_BYTES;
}

uint32_t tly_frame_size(const uint8_t in[TLY_FRAME_LEAST])
{
    return tly_get16(in + FLAGS_AT) & TLY_SAME ? TLY_FRAME_LEAST : TLY_FRAME_BYTES;
}

static bool frame_carries_tensor(int type)
{
    return type == TLY_PUSH || type == TLY_RESULT || type == TLY_FINAL;
}

static const char *frame_out_of_limits(const struct tly_frame *f)
{
    if (!tly_frame_is_type(f->type))
        return "unknown frame type";
    if (f->payload > tly_frame_most(f->type))
        return "payload too large";
    if (f->length > TLY_MAX_PART)
        return "part too large";
    if (f->place % TLY_ALIGN)
        return "part at an odd place";
    if (frame_carries_tensor(f->type) && !(f->flags & TLY_MARK)) {
        if (f->offset % TLY_ALIGN && f->offset != f->length)
            return "fragment at an odd offset";
        if (f->offset > f->length || f->payload > f->length - f->offset)
            return "fragment reaches past its part";
    }
    if (f->rank >= TLY_MAX_RANKS || f->root >= TLY_MAX_RANKS)
        return "no such rank";
    return NULL;
}

int tly_frame_decode(const uint8_t *in, const uint8_t key[TLY_FRAME_KEY_BYTES], uint32_t seq,
                     struct tly_context *last, struct tly_frame *f, const char **why)
{
    uint8_t check[CHECK_BYTES], header[TLY_FRAME_BYTES] = {0};
    const uint8_t *context = tly_frame_size(in) == TLY_FRAME_LEAST ? last->bytes : in + CONTEXT_AT;
    if (tly_get32(in) != magic) {
        *why = "not Tally's protocol";
        return -EPROTO;
    }
    if (in[4] < TLY_PROTOCOL_LOWEST || in[4] > TLY_PROTOCOL_HIGHEST) {
        *why = "another version of the protocol";
        return -EPROTO;
    }
    memcpy(header, in, CHECK_AT);
    memcpy(header + CONTEXT_AT, context, sizeof last->bytes);
    frame_write_check(check, header, key);
    if (sodium_memcmp(check, in + CHECK_AT, CHECK_BYTES) != 0) {
        *why = "a header was altered on its way, or comes from elsewhere";
        return -EPROTO;
    }
    struct tly_frame g = {
        .type = in[5],
        .flags = tly_get16(in + FLAGS_AT) & (uint16_t)~TLY_SAME,
        .seq = tly_get32(in + 8),
        .part = tly_get32(in + 12),
        .place = tly_get64(in + 16),
        .length = tly_get32(in + 24),
        .offset = tly_get32(in + 28),
        .payload = tly_get32(in + 32),
        .round = tly_get32(in + 36),
        .accepted = tly_get32(in + 40),
        .granted = tly_get32(in + 44),
        .received = tly_get32(in + 48),
        .stable = tly_get32(in + 52),
        .key = tly_get64(context),
        .spec = tly_get64(context + 8),
        .count = tly_get64(context + 16),
        .epoch = tly_get32(context + 24),
        .kind = context[28],
        .dtype = context[29],
        .op = context[30],
        .group = tly_get32(context + 32),
        .rank = tly_get32(context + 36),
        .root = tly_get32(context + 40),
        .priority = (int32_t)tly_get32(context + 44),
        .prescale = tly_get_double(context + 48),
        .postscale = tly_get_double(context + 56),
    };
    if (g.seq != seq) {
        *why = "a frame out of order";
        return -EPROTO;
    }
    const char *limit = frame_out_of_limits(&g);
    if (limit) {
        *why = limit;
        return -EPROTO;
    }
    memcpy(last->bytes, header + CONTEXT_AT, sizeof last->bytes);
    *f = g;
    return 0;
}
