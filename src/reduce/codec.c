/* codec.c - walks a tensor in groups of blocks (codec.h) and hands whole groups to the CPU's kernels (fold.h).
 *
 * The plain kernels also take what is out of the ordinary: a short last group, and groups with unusual scales or values. */
#include "reduce/codec.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "reduce/element.h"
#include "reduce/fold.h"
#include "reduce/mode.h"

enum { BLOCK = TLY_CODE_BLOCK, GROUP = TLY_CODE_DIGITS * BLOCK, INFINITE = 0x7f800000 /* infinity's bits */ };

/* --- the kernels in plain C ---------------------------------------------------------------------------- */

uint32_t tly_code_peak_scalar(const float *g, const float *e, size_t width, bool ask)
{
    uint32_t peak = 0;
    for (size_t i = 0; i < width; i++) {
        uint32_t u = tly_float_bits(g[i] + e[i]) & 0x7fffffff;
        peak = u > peak ? u : peak;
    }
    return peak;
}

static void codec_encode_block(const float *g, float *e, size_t width, float scale, int largest,
                               int8_t *codes)
{
    const float inverse = scale == 0 ? 0 : 1 / scale, most = (float)largest, whole = 0x1.8p23f;
    for (size_t i = 0; i < width; i++) {
        float x = g[i] + e[i], q = x * inverse;
        float held = q > most ? most : q < -most ? -most : q;
        int c = (int)((held + whole) - whole); /* to nearest, half to even */
        c = fabsf(q) < 0x1p24f ? c : 0;
        e[i] = x - (float)c * scale;
        codes[i] = (int8_t)c;
    }
}

static size_t codec_least(size_t a, size_t b)
{
    return a < b ? a : b;
}

static size_t codec_group_words(const struct tly_code_group *t)
{
    return (t->count + (size_t)t->digits - 1) / (size_t)t->digits;
}

void tly_code_pack_scalar(const struct tly_code_group *t, const float *g, float *e, void *words)
{
    int8_t codes[GROUP + TLY_CODE_DIGITS] = {0};
    const size_t n = codec_group_words(t);
    for (size_t at = 0; at < t->count; at += BLOCK)
        if (t->peak[at / BLOCK] < INFINITE)
            codec_encode_block(g + at, e + at, codec_least(t->count - at, BLOCK), t->scale[at / BLOCK],
                               t->largest, codes + at);
    for (size_t j = 0; j < n; j++) {
        int16_t word = 0;
        for (int d = t->digits; d-- > 0;)
            word = (int16_t)(word * (1 << t->bits) + codes[j + (size_t)d * n]);
        if (t->digits == TLY_CODE_DIGITS)
            memcpy((unsigned char *)words + j * sizeof word, &word, sizeof word);
        else
            ((int8_t *)words)[j] = (int8_t)word;
    }
}

/* Digits are signed: the lowest is the word's low bits, of which the top one counts negative. */
void tly_code_split_scalar(const struct tly_code_group *t, const void *words, float *out, bool stream)
{
    const size_t n = codec_group_words(t);
    const int half = 1 << (t->bits - 1), mask = (1 << t->bits) - 1;
    for (size_t j = 0; j < n; j++) {
        int16_t word;
        if (t->digits == TLY_CODE_DIGITS)
            memcpy(&word, (const unsigned char *)words + j * sizeof word, sizeof word);
        else
            word = (int16_t)((const int8_t *)words)[j];
        for (size_t i = j; i < t->count; i += n) {
            int digit = ((word + half) & mask) - half;
            float s = (float)digit;
            word = (int16_t)((word - digit) >> t->bits);
            out[i] = (s * t->high + s * t->low) * t->scale[i / BLOCK];
        }
    }
}

/* --- codecs ------------------------------------------------------------------------------------------- */

static int codec_refuse(int error, const char *reason, const char **why)
{
    *why = reason;
    return error;
}

int tly_codec_find(int codec, uint32_t ranks, struct tly_codec *c, const char **why)
{
    if (codec != TALLY_CODEC_INT8 && codec != TALLY_CODEC_INT4)
        return codec_refuse(-EINVAL, "unknown codec: pass TALLY_CODEC_INT8 or TALLY_CODEC_INT4", why);
    if (ranks == 0)
        return codec_refuse(-EINVAL, "0 ranks: pass the number of ranks of the operation", why);
    if (codec == TALLY_CODEC_INT8 && ranks > 127)
        return codec_refuse(-ENOTSUP, "the int8 codec is for up to 127 ranks", why);
    if (codec == TALLY_CODEC_INT4 && ranks > 15)
        return codec_refuse(-ENOTSUP, "the int4 codec is for up to 15 ranks: use the int8 codec", why);
    int n = (int)ranks;
    *c = codec == TALLY_CODEC_INT8 ? (struct tly_codec){TALLY_INT8, 1, 8, 127 / n}
         : n <= 7                  ? (struct tly_codec){TALLY_INT8, 2, 4, 7 / n}
                                   : (struct tly_codec){TALLY_INT16, 3, 5, 15 / n};
    return 0;
}

size_t tly_codec_words(const struct tly_codec *c, size_t count)
{
    return count / (size_t)c->digits + (count % (size_t)c->digits != 0);
}

/* s of codec.h; 0 where nothing is sent. */
static float codec_scale(uint8_t exponent)
{
    return exponent <= TLY_CODE_MOST ? tly_bits_float((uint32_t)exponent << 23) : 0;
}

/* The next exponent for a peak's bits.  For positive floats a and b the difference of their bits, divided by 2^23 and rounded up,
 * is the least k with b * 2^k >= a. */
static uint8_t codec_exponent(uint32_t peak, int largest)
{
    if (peak >= INFINITE)
        return TLY_CODE_NOT_FINITE;
    if (peak == 0)
        return 0;
    int32_t apart = (int32_t)peak - (int32_t)tly_float_bits((float)largest);
    int32_t b = 127 + ((apart + 0x7fffff) >> 23);
    return (uint8_t)(b < 1 ? 1 : b > TLY_CODE_MOST ? TLY_CODE_MOST : b);
}

/* --- exponents and encoding ---------------------------------------------------------------------------- */

static uint32_t codec_peak(const float *g, const float *e, size_t width, bool ask)
{
    return (width == BLOCK ? tly_reduce_kernels()->peak : tly_code_peak_scalar)(g, e, width, ask);
}

static bool codec_is_far(size_t count)
{
    return count * 2 * sizeof(float) >= TLY_FAR_BYTES;
}

void tly_codec_exponents(const struct tly_codec *c, const float *g, const float *e, size_t count,
                         uint8_t *next)
{
    const bool ask = codec_is_far(count);
    tly_mode saved = tly_mode_default();
    for (size_t at = 0; at < count; at += BLOCK)
        *next++ = codec_exponent(codec_peak(g + at, e + at, codec_least(count - at, BLOCK), ask), c->largest);
    tly_mode_restore(saved);
}

static struct tly_code_group codec_group(const struct tly_codec *c)
{
    return (struct tly_code_group){.digits = c->digits, .bits = c->bits, .largest = c->largest};
}

void tly_codec_encode(const struct tly_codec *c, const float *g, float *e, size_t count,
                      const uint8_t *exponents, void *words, uint8_t *next)
{
    const size_t whole = (size_t)c->digits * BLOCK, size = tly_reduce_element_size(c->dtype);
    const bool ask = codec_is_far(count);
    struct tly_code_group t = codec_group(c);
    t.ask = ask;
    unsigned char *to = words;
    tly_mode saved = tly_mode_default();
    for (size_t at = 0; at < count; at += whole) {
        t.count = codec_least(count - at, whole);
        bool usual = t.count == whole;
        for (size_t i = 0, b = 0; i < t.count; i += BLOCK, b++) {
            t.peak[b] = codec_peak(g + at + i, e + at + i, codec_least(t.count - i, BLOCK), ask);
            t.scale[b] = codec_scale(*exponents++);
            usual &=
                t.scale[b] != 0 && t.scale[b] <= 0x1p104f && tly_bits_float(t.peak[b]) < 0x1p22f * t.scale[b];
            if (next)
                *next++ = codec_exponent(t.peak[b], c->largest);
        }
        (usual ? tly_reduce_kernels()->pack : tly_code_pack_scalar)(&t, g + at, e + at, to);
        to += codec_group_words(&t) * size;
    }
    tly_mode_restore(saved);
}

/* --- decoding ----------------------------------------------------------------------------------------- */

/* How to divide integers of 8 bits without a division.  1 / divisor is high + low, high of 16 bits.  Times such an integer high is
 * exact, and the error of the sum is below 2^-38 of it.  A quotient is at least 2^-32 of itself away from where rounding turns,
 * so it is rounded as by a division. */
static void codec_divide_by(struct tly_code_group *t, uint32_t divisor)
{
    double exact = 1.0 / divisor;
    t->high = tly_bits_float(tly_float_bits((float)exact) & 0xffffff00);
    t->low = (float)(exact - (double)t->high);
}

static void codec_fill(float *out, size_t count, float value)
{
    for (size_t i = 0; i < count; i++)
        out[i] = value;
}

void tly_codec_decode(const struct tly_codec *c, const void *words, const uint8_t *exponents,
                      const uint8_t *next, size_t count, uint32_t divisor, float *out)
{
    const size_t whole = (size_t)c->digits * BLOCK, size = tly_reduce_element_size(c->dtype);
    const bool stream = count * sizeof *out >= TLY_FAR_BYTES && (uintptr_t)out % 64 == 0;
    const unsigned char *from = words;
    struct tly_code_group t = codec_group(c);
    tly_mode saved = tly_mode_default();
    codec_divide_by(&t, divisor);
    for (size_t at = 0; at < count; at += whole) {
        t.count = codec_least(count - at, whole);
        bool usual = t.count == whole;
        for (size_t i = 0, b = 0; i < t.count; i += BLOCK, b++) {
            t.scale[b] = codec_scale(*exponents++);
            usual &= t.scale[b] == 0 || t.scale[b] >= 0x1p-80f;
        }
        (usual ? tly_reduce_kernels()->split : tly_code_split_scalar)(&t, from, out + at, stream);
        for (size_t i = 0; next && i < t.count; i += BLOCK)
            if (*next++ > TLY_CODE_MOST)
                codec_fill(out + at + i, codec_least(t.count - i, BLOCK), tly_bits_float(0x7fc00000));
        from += codec_group_words(&t) * size;
    }
    if (stream)
        tly_reduce_fence();
    tly_mode_restore(saved);
}
