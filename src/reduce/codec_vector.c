/* codec_vector.c - a codec's kernels for vector instructions (fold.h), compiled once for each variant: TLY_PEAK, TLY_PACK and
 * TLY_SPLIT name the functions, TLY_VECTOR is the bytes of a vector.
 *
 * To round x to a multiple of s, add 1.5 * 2^23 * s: the neighbours of a float32 there are s apart, and the sum is rounded to
 * nearest, half to even.  The difference of the sum's bits and those of 1.5 * 2^23 * s is x / s, rounded. */
#include "reduce/fold.h"
#include "reduce/vector.h"

enum { WIDTH = TLY_VECTOR / 4, RUN = 4 * WIDTH, BLOCK = TLY_CODE_BLOCK };

/* How far ahead memory is asked for; the best for exponents of six that were tried (bench/reduce/README.md). */
enum { NEAR_BYTES = 3072, FAR_BYTES = 6144 };
typedef int8_t BYTES __attribute__((vector_size(WIDTH), aligned(1), may_alias));

/* clang-format off: a line for each instruction */
#if TLY_VECTOR == 64
INLINE SW greater(SW a, SW b)
{
    return (SW)_mm512_max_epi32((__m512i)a, (__m512i)b);
}
INLINE SW less(SW a, SW b)
{
    return (SW)_mm512_min_epi32((__m512i)a, (__m512i)b);
}
INLINE void put_bytes(unsigned char *p, SW a, SW b, SW c, SW d)
{
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)a));
    _mm_storeu_si128((__m128i *)(p + WIDTH), _mm512_cvtepi32_epi8((__m512i)b));
    _mm_storeu_si128((__m128i *)(p + 2 * WIDTH), _mm512_cvtepi32_epi8((__m512i)c));
    _mm_storeu_si128((__m128i *)(p + 3 * WIDTH), _mm512_cvtepi32_epi8((__m512i)d));
}
INLINE SW get_bytes(const unsigned char *p)
{
    return (SW)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
}
#elif TLY_VECTOR == 32
INLINE SW greater(SW a, SW b)
{
    return (SW)_mm256_max_epi32((__m256i)a, (__m256i)b);
}
INLINE SW less(SW a, SW b)
{
    return (SW)_mm256_min_epi32((__m256i)a, (__m256i)b);
}
INLINE void put_bytes(unsigned char *p, SW a, SW b, SW c, SW d)
{
    __m256i ab = _mm256_packs_epi32((__m256i)a, (__m256i)b); /* within each 128 bits */
    __m256i cd = _mm256_packs_epi32((__m256i)c, (__m256i)d);
    __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i *)p, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(ab, cd), order));
}
INLINE SW get_bytes(const unsigned char *p)
{
    return (SW)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
#else
INLINE SW greater(SW a, SW b)
{
    return (SW)vmaxq_s32((int32x4_t)a, (int32x4_t)b);
}
INLINE SW less(SW a, SW b)
{
    return (SW)vminq_s32((int32x4_t)a, (int32x4_t)b);
}
INLINE void put_bytes(unsigned char *p, SW a, SW b, SW c, SW d)
{
    int16x8_t ab = vcombine_s16(vmovn_s32((int32x4_t)a), vmovn_s32((int32x4_t)b));
    int16x8_t cd = vcombine_s16(vmovn_s32((int32x4_t)c), vmovn_s32((int32x4_t)d));
    vst1q_s8((int8_t *)p, vcombine_s8(vmovn_s16(ab), vmovn_s16(cd)));
}
INLINE SW get_bytes(const unsigned char *p)
{
    return __builtin_convertvector(*(const BYTES *)p, SW);
}
#endif
/* clang-format on */

INLINE F sum_at(const float *g, const float *e, int i)
{
    return *(const F_memory *)(g + i) + *(const F_memory *)(e + i);
}

/* Half of the lines are asked for while peaks are found, and half while codes are made, so that memory always has work. */
INLINE void ask_run(const float *p)
{
    for (int k = 0; k < RUN; k += 16)
        fetch((uintptr_t)(p + k) + FAR_BYTES, (uintptr_t)(p + k) + NEAR_BYTES);
}

INLINE uint32_t peak_loop(const float *g, const float *e, bool ahead)
{
    SW peak[4] = {{0}};
    for (int i = 0; i < TLY_CODE_BLOCK; i += RUN) {
        if (ahead)
            ask_run(g + i);
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++)
            peak[v] = greater(peak[v], (SW)sum_at(g, e, i + v * WIDTH) & 0x7fffffff);
    }
    SW most = greater(greater(peak[0], peak[1]), greater(peak[2], peak[3]));
    int32_t result = 0;
    for (int i = 0; i < WIDTH; i++)
        result = most[i] > result ? most[i] : result;
    return (uint32_t)result;
}

uint32_t TLY_PEAK(const float *g, const float *e, size_t width, bool ahead)
{
    return ahead ? peak_loop(g, e, true) : peak_loop(g, e, false);
}

/* The code of x for a digit, and what is left of it in e. */
INLINE SW code_at(const float *g, float *e, int i, F zero, SW low, SW high)
{
    F x = sum_at(g, e, i);
    SW near = less(greater((SW)(x + zero), low), high);
    *(F_memory *)(e + i) = x - ((F)near - zero);
    return near - (SW)zero;
}

/* A template: `digits` and `bits` are constants where it is called. */
INLINE void pack_loop(const struct tly_code_group *t, const float *g, float *e, unsigned char *words,
                      const int digits, const int bits, bool ahead)
{
    F zero[TLY_CODE_DIGITS];
    SW low[TLY_CODE_DIGITS], high[TLY_CODE_DIGITS];
    for (int d = 0; d < digits; d++) {
        zero[d] = (F){0} + 0x1.8p23f * t->scale[d];
        low[d] = (SW)zero[d] - t->largest;
        high[d] = (SW)zero[d] + t->largest;
    }
    for (int i = 0; i < BLOCK; i += RUN) {
        SW word[4];
        for (int d = 0; ahead && d < digits; d++)
            ask_run(e + i + d * BLOCK);
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            word[v] = (SW){0};
#pragma GCC unroll 3
            for (int d = 0; d < digits; d++)
                word[v] += code_at(g, e, i + v * WIDTH + d * BLOCK, zero[d], low[d], high[d]) << (d * bits);
        }
        if (digits < 3) {
            put_bytes(words + i, word[0], word[1], word[2], word[3]);
            continue;
        }
        for (int v = 0; v < 4; v++)
            *(HALF_memory *)(words + 2 * (i + v * WIDTH)) = squeeze((W)word[v] & 0xffff);
    }
}

INLINE void pack_any(const struct tly_code_group *t, const float *g, float *e, void *words, bool ahead)
{
    if (t->digits == 1)
        pack_loop(t, g, e, words, 1, 0, ahead);
    else if (t->digits == 2)
        pack_loop(t, g, e, words, 2, 4, ahead);
    else
        pack_loop(t, g, e, words, 3, 5, ahead);
}

void TLY_PACK(const struct tly_code_group *t, const float *g, float *e, void *words)
{
    if (t->ask)
        pack_any(t, g, e, words, true);
    else
        pack_any(t, g, e, words, false);
}

/* high and low times the scale, which is no rounding here, save a product for each element. */
INLINE void split_loop(const struct tly_code_group *t, const unsigned char *words, float *out,
                       const int digits, const int bits, bool stream)
{
    float high[TLY_CODE_DIGITS], low[TLY_CODE_DIGITS];
    for (int d = 0; d < digits; d++) {
        high[d] = t->high * t->scale[d];
        low[d] = t->low * t->scale[d];
    }
#pragma GCC unroll 4
    for (int i = 0; i < BLOCK; i += WIDTH) {
        SW word = digits < 3 ? get_bytes(words + i) : (SW)spread(*(const HALF_memory *)(words + 2 * i));
#pragma GCC unroll 3
        for (int d = 0; d < digits; d++) {
            SW digit = d == digits - 1 && digits < 3 ? word : word << (32 - bits) >> (32 - bits);
            F s = __builtin_convertvector(digit, F);
            put_whole((unsigned char *)(out + d * BLOCK + i), (W)(s * high[d] + s * low[d]), stream);
            word = (word - digit) >> bits;
        }
    }
}

INLINE void split_any(const struct tly_code_group *t, const unsigned char *words, float *out, bool stream)
{
    if (t->digits == 1)
        split_loop(t, words, out, 1, 0, stream);
    else if (t->digits == 2)
        split_loop(t, words, out, 2, 4, stream);
    else
        split_loop(t, words, out, 3, 5, stream);
}

void TLY_SPLIT(const struct tly_code_group *t, const void *words, float *out, bool stream)
{
    if (stream)
        split_any(t, words, out, true);
    else
        split_any(t, words, out, false);
}
