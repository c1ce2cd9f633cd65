/* fold_scalar.c - the reference fold, in plain C (see fold.h).
 *
 * Rows are taken 64 elements at a time: each input's piece is loaded into an accumulator row, and rows are
 * combined as a binary counter carries: after input j, as many as j + 1 has factors of two.  What is left
 * at the end is combined from the right.  That is T of reduce.h, and the inner loops vectorise. */
#include <assert.h>
#include <string.h>

#include "reduce/element.h"
#include "reduce/fold.h"

enum { WIDTH = 64, DEPTH = 4 }; /* DEPTH: rows on the way for 8 inputs, log2 8 + 1 */

/* --- the steps, for each type of accumulation: load, combine, store ------------------------------- */

#define ROW(expression) \
    for (size_t i = 0; i < width; i++) \
        a[i] = (expression); \
    break

#define FLOAT_COMBINE(T) \
    static void combine_##T(int op, T *restrict a, const T *restrict b, size_t width) \
    { \
        switch (op) { \
        case TALLY_SUM: \
            ROW(a[i] + b[i]); \
        case TALLY_PRODUCT: \
            ROW(a[i] * b[i]); \
        case TALLY_MIN: \
            ROW(b[i] < a[i] || b[i] != b[i] ? b[i] : a[i]); \
        case TALLY_MAX: \
            ROW(b[i] > a[i] || b[i] != b[i] ? b[i] : a[i]); \
        case TLY_COMPLEX_PRODUCT: \
            for (size_t i = 0; i < width; i += 2) { \
                T re = a[i] * b[i] - a[i + 1] * b[i + 1]; \
                a[i + 1] = a[i] * b[i + 1] + a[i + 1] * b[i]; \
                a[i] = re; \
            } \
        } \
    }
FLOAT_COMBINE(float)
FLOAT_COMBINE(double)

static void load_float(const struct tly_fold *f, const void *in, size_t at, float *restrict a, size_t width)
{
    const unsigned char *from = (const unsigned char *)in + at * (f->from == TLY_F32 ? 4 : 2);
    uint16_t half[WIDTH];
    if (f->from == TLY_F32)
        memcpy(a, from, width * sizeof *a);
    else
        memcpy(half, from, width * sizeof *half);
    switch (f->from) {
    case TLY_F16:
        ROW(tly_half_to_float(half[i]));
    case TLY_BF16:
        ROW(tly_bfloat_to_float(half[i]));
    default:
        break;
    }
    if (f->prescale != 1)
        for (size_t i = 0; i < width; i++)
            a[i] *= (float)f->prescale;
}

static void store_float(const struct tly_fold *f, float *restrict a, void *out, size_t at, size_t width)
{
    for (size_t i = 0; i < width; i++)
        a[i] = tly_finish_float(a[i], f->divisor, f->postscale);
    if (f->to == TLY_F32) {
        memcpy((unsigned char *)out + at * 4, a, width * 4);
        return;
    }
    uint16_t half[WIDTH];
    for (size_t i = 0; i < width; i++)
        half[i] = f->to == TLY_F16 ? tly_float_to_half(a[i]) : tly_float_to_bfloat(a[i]);
    memcpy((unsigned char *)out + at * 2, half, width * 2);
}

static void load_double(const struct tly_fold *f, const void *in, size_t at, double *restrict a, size_t width)
{
    memcpy(a, (const unsigned char *)in + at * 8, width * 8);
    if (f->prescale != 1)
        for (size_t i = 0; i < width; i++)
            a[i] *= f->prescale;
}

static void store_double(const struct tly_fold *f, double *restrict a, void *out, size_t at, size_t width)
{
    for (size_t i = 0; i < width; i++)
        a[i] = tly_finish_double(a[i], f->divisor, f->postscale);
    memcpy((unsigned char *)out + at * 8, a, width * 8);
}

/* Integers wrap: sums and products are formed in uint64_t, whose low bits are the type's. */
#define INTEGER(T) \
    static void combine_##T(int op, T *restrict a, const T *restrict b, size_t width) \
    { \
        switch (op) { \
        case TALLY_SUM: \
            ROW((T)((uint64_t)a[i] + (uint64_t)b[i])); \
        case TALLY_PRODUCT: \
            ROW((T)((uint64_t)a[i] * (uint64_t)b[i])); \
        case TALLY_MIN: \
            ROW(b[i] < a[i] ? b[i] : a[i]); \
        case TALLY_MAX: \
            ROW(b[i] > a[i] ? b[i] : a[i]); \
        case TALLY_BAND: \
            ROW((T)(a[i] & b[i])); \
        case TALLY_BOR: \
            ROW((T)(a[i] | b[i])); \
        case TALLY_BXOR: \
            ROW((T)(a[i] ^ b[i])); \
        } \
    } \
    static void load_##T(const struct tly_fold *f, const void *in, size_t at, T *restrict a, size_t width) \
    { \
        memcpy(a, (const unsigned char *)in + at * sizeof(T), width * sizeof(T)); \
        if (f->from == TLY_BOOL8) \
            for (size_t i = 0; i < width; i++) \
                a[i] = a[i] != 0; \
        if (f->prescale != 1) \
            for (size_t i = 0; i < width; i++) \
                a[i] = tly_hold_##T((double)a[i] * f->prescale); \
    } \
    static void store_##T(const struct tly_fold *f, T *restrict a, void *out, size_t at, size_t width) \
    { \
        for (size_t i = 0; i < width; i++) \
            a[i] = tly_finish_##T(a[i], f->divisor, f->postscale); \
        memcpy((unsigned char *)out + at * sizeof(T), a, width * sizeof(T)); \
    }
INTEGER(int8_t)
INTEGER(uint8_t)
INTEGER(int16_t)
INTEGER(uint16_t)
INTEGER(int32_t)
INTEGER(uint32_t)
INTEGER(int64_t)
INTEGER(uint64_t)

#define FOLD(T) \
    static void fold_##T(const struct tly_fold *f, const void *const in[], void *out, size_t count) \
    { \
        T row[DEPTH][WIDTH]; \
        for (size_t at = 0; at < count; at += WIDTH) { \
            size_t width = count - at < WIDTH ? count - at : WIDTH; \
            int top = 0; \
            for (int j = 0; j < f->n; j++) { \
                load_##T(f, in[j], at, row[top++], width); \
                for (int carry = j + 1; carry % 2 == 0; carry /= 2, top--) \
                    combine_##T(f->op, row[top - 2], row[top - 1], width); \
            } \
            for (; top > 1; top--) \
                combine_##T(f->op, row[top - 2], row[top - 1], width); \
            store_##T(f, row[0], out, at, width); \
        } \
    }
FOLD(float)
FOLD(double)
FOLD(int8_t)
FOLD(uint8_t)
FOLD(int16_t)
FOLD(uint16_t)
FOLD(int32_t)
FOLD(uint32_t)
FOLD(int64_t)
FOLD(uint64_t)

void tly_fold_scalar(const struct tly_fold *f, const void *const in[], void *out, size_t count)
{
    assert(f->n >= 1 && f->n <= TLY_FOLD_MAX);
    switch (f->from) {
    case TLY_F32:
    case TLY_F16:
    case TLY_BF16:
        fold_float(f, in, out, count);
        break;
    case TLY_F64:
        fold_double(f, in, out, count);
        break;
    case TLY_S8:
        fold_int8_t(f, in, out, count);
        break;
    case TLY_U8:
    case TLY_BOOL8:
        fold_uint8_t(f, in, out, count);
        break;
    case TLY_S16:
        fold_int16_t(f, in, out, count);
        break;
    case TLY_S32:
        fold_int32_t(f, in, out, count);
        break;
    case TLY_S64:
        fold_int64_t(f, in, out, count);
        break;
    case TLY_U16:
        fold_uint16_t(f, in, out, count);
        break;
    case TLY_U32:
        fold_uint32_t(f, in, out, count);
        break;
    case TLY_U64:
        fold_uint64_t(f, in, out, count);
        break;
    }
}

void tly_norm_scalar(const float *a, const float *b, float *sum, size_t count, float lanes[TLY_NORM_LANES],
                     bool ask, bool stream)
{
    for (size_t i = 0; i < count; i += TLY_NORM_LANES)
        for (size_t lane = 0; lane < TLY_NORM_LANES; lane++) {
            float x = a[i + lane] + b[i + lane];
            sum[i + lane] = x;
            lanes[lane] += tly_bits_float(tly_float_bits(x) & 0x7fffffff);
        }
}
