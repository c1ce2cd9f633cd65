/* frame.c - encode, check and decode the header. */
#include "wire/frame.h"

#include <errno.h>
#include <sodium.h>
#include <string.h>

#include "wire/pack.h"

static const uint32_t magic = 0x594c4154; /* "TALY" */

_Static_assert(crypto_shorthash_KEYBYTES == TLY_FRAME_KEY_BYTES, "SipHash-2-4 key");
_Static_assert(crypto_shorthash_BYTES == 8, "SipHash-2-4 output");

void tly_frame_encode(const struct tly_frame *f, const uint8_t key[TLY_FRAME_KEY_BYTES],
                      uint8_t out[TLY_FRAME_BYTES])
{
    uint8_t *p = out;
    p = tly_put32(p, magic);
    *p++ = TLY_PROTOCOL_HIGHEST;
    *p++ = f->type;
    p = tly_put16(p, f->flags);
    p = tly_put32(p, f->seq);
    p = tly_put32(p, f->epoch);
    p = tly_put64(p, f->key);
    p = tly_put64(p, f->spec);
    p = tly_put64(p, f->count);
    *p++ = f->kind;
    *p++ = f->dtype;
    *p++ = f->op;
    *p++ = 0;
    p = tly_put32(p, f->part);
    p = tly_put64(p, f->place);
    p = tly_put32(p, f->length);
    p = tly_put32(p, f->offset);
    p = tly_put32(p, f->payload);
    p = tly_put32(p, f->round);
    p = tly_put32(p, f->group);
    p = tly_put32(p, f->rank);
    p = tly_put32(p, f->root);
    p = tly_put32(p, (uint32_t)f->priority);
    p = tly_put_double(p, f->prescale);
    p = tly_put_double(p, f->postscale);
    p = tly_put32(p, f->accepted);
    p = tly_put32(p, f->granted);
    p = tly_put32(p, f->received);
    p = tly_put32(p, f->stable);
    crypto_shorthash(p, out, TLY_FRAME_BYTES - 8, key);
}

static bool carries_tensor(int type)
{
    return type == TLY_PUSH || type == TLY_RESULT || type == TLY_FINAL;
}

static const char *out_of_limits(const struct tly_frame *f)
{
    if (f->type < TLY_HELLO || f->type >= TLY_FRAME_TYPES)
        return "unknown frame type";
    if (f->payload > (carries_tensor(f->type) ? TLY_MAX_FRAGMENT : TLY_MAX_CONTROL))
        return "payload too large";
    if (f->length > TLY_MAX_PART)
        return "part too large";
    if (f->place % TLY_ALIGN)
        return "part at an odd place";
    if (carries_tensor(f->type) && !(f->flags & TLY_MARK)) {
        if (f->offset % TLY_ALIGN && f->offset != f->length)
            return "fragment at an odd offset";
        if (f->offset > f->length || f->payload > f->length - f->offset)
            return "fragment reaches past its part";
    }
    if (f->rank >= TLY_MAX_RANKS || f->root >= TLY_MAX_RANKS)
        return "no such rank";
    return NULL;
}

int tly_frame_decode(const uint8_t in[TLY_FRAME_BYTES], const uint8_t key[TLY_FRAME_KEY_BYTES], uint32_t seq,
                     struct tly_frame *f, const char **why)
{
    uint8_t check[8];
    if (tly_get32(in) != magic) {
        *why = "not Tally's protocol";
        return -EPROTO;
    }
    if (in[4] < TLY_PROTOCOL_LOWEST || in[4] > TLY_PROTOCOL_HIGHEST) {
        *why = "another version of the protocol";
        return -EPROTO;
    }
    crypto_shorthash(check, in, TLY_FRAME_BYTES - 8, key);
    if (sodium_memcmp(check, in + TLY_FRAME_BYTES - 8, 8) != 0) {
        *why = "header check failed";
        return -EPROTO;
    }
    struct tly_frame g = {
        .type = in[5],
        .flags = tly_get16(in + 6),
        .seq = tly_get32(in + 8),
        .epoch = tly_get32(in + 12),
        .key = tly_get64(in + 16),
        .spec = tly_get64(in + 24),
        .count = tly_get64(in + 32),
        .kind = in[40],
        .dtype = in[41],
        .op = in[42],
        .part = tly_get32(in + 44),
        .place = tly_get64(in + 48),
        .length = tly_get32(in + 56),
        .offset = tly_get32(in + 60),
        .payload = tly_get32(in + 64),
        .round = tly_get32(in + 68),
        .group = tly_get32(in + 72),
        .rank = tly_get32(in + 76),
        .root = tly_get32(in + 80),
        .priority = (int32_t)tly_get32(in + 84),
        .prescale = tly_get_double(in + 88),
        .postscale = tly_get_double(in + 96),
        .accepted = tly_get32(in + 104),
        .granted = tly_get32(in + 108),
        .received = tly_get32(in + 112),
        .stable = tly_get32(in + 116),
    };
    if (g.seq != seq) {
        *why = "frame out of sequence";
        return -EPROTO;
    }
    const char *limit = out_of_limits(&g);
    if (limit) {
        *why = limit;
        return -EPROTO;
    }
    *f = g;
    return 0;
}

const char *tly_frame_type_name(int type)
{
    static const char *const names[TLY_FRAME_TYPES] = {
        "?",      "HELLO",  "ROSTER",  "INVITE", "PREPARE", "BEGUN",  "COMMIT", "COMPLAIN", "PUSH",
        "RESULT", "SPEC",   "VERDICT", "CANCEL", "AGAIN",   "HAVE",   "DONE",   "FINAL",    "COUNTS",
        "BEAT",   "STATUS", "GOODBYE", "PACE",   "GROUP",   "RETURN", "MEASURE"};
    return type > 0 && type < TLY_FRAME_TYPES ? names[type] : names[0];
}
