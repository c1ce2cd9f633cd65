/* fold.h - the contract between reduce.c and codec.c, which walk inputs, and the variants, which compute.
 *
 * A fold reads up to 8 rows at the same place, combines them along T and writes one row.  Rows of 16-bit
 * floats are widened to float32 as they are read, so a fold may also read or write float32 rows that hold
 * unrounded sums of theirs ("partials"); for all other formats a partial is a row of the format itself. */
#ifndef TLY_FOLD_H
#define TLY_FOLD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "reduce/reduce.h"

enum { TLY_FOLD_MAX = 8 };

/* From here on inputs and result together do not stay in the second-level cache.  Then asking for the inputs
 * ahead, and writing a result of its own around the caches, without reading its lines first, was measured to
 * pay; below that, both cost.  Builds for slow tests set a smaller one. */
#ifndef TLY_FAR_BYTES
#define TLY_FAR_BYTES (3 << 20)
#endif

/* The numbers are those of the dtypes; complex numbers are folded as their parts. */
enum tly_format {
    TLY_F32 = TALLY_FLOAT32,
    TLY_F64 = TALLY_FLOAT64,
    TLY_F16 = TALLY_FLOAT16,
    TLY_BF16 = TALLY_BFLOAT16,
    TLY_S8 = TALLY_INT8,
    TLY_U8 = TALLY_UINT8,
    TLY_S16 = TALLY_INT16,
    TLY_S32 = TALLY_INT32,
    TLY_S64 = TALLY_INT64,
    TLY_BOOL8 = TALLY_BOOL, /* only TALLY_BAND, TALLY_BOR, TALLY_BXOR */
    TLY_U16 = TALLY_UINT16,
    TLY_U32 = TALLY_UINT32,
    TLY_U64 = TALLY_UINT64,
};

/* Besides enum tally_reduction: rows of TLY_F32 or TLY_F64, an even count, whose neighbours are a complex number. */
enum { TLY_COMPLEX_PRODUCT = TLY_REDUCTION_COUNT };

/* Bytes of an element. */
static inline size_t tly_format_size(enum tly_format format)
{
    switch (format) {
    case TLY_F64:
    case TLY_S64:
    case TLY_U64:
        return 8;
    case TLY_F32:
    case TLY_S32:
    case TLY_U32:
        return 4;
    case TLY_F16:
    case TLY_BF16:
    case TLY_S16:
    case TLY_U16:
        return 2;
    default:
        return 1;
    }
}

struct tly_fold {
    enum tly_format from, to; /* equal, or one is TLY_F32 and the other a 16-bit float */
    int op;                   /* enum tally_reduction without TALLY_AVERAGE, or TLY_COMPLEX_PRODUCT */
    int n;                    /* rows, 1 .. TLY_FOLD_MAX */
    bool ask;                 /* the rows come from memory: prefetch them */
    bool stream; /* the result will not be read soon: write around the caches; the caller then fences */
    double prescale, divisor, postscale; /* as in reduce.h; 1 does nothing */
};

/* What one fold has to do for `r`; n, ask and stream are the caller's.  *count becomes the number of elements in its format, twice
 * as many for complex numbers. */
struct tly_fold tly_fold_of(const struct tly_reduction *r, size_t *count);

/* out[i] = fold over j < f->n of in[j][i], for i < count elements.  out may equal an in[j].  The
 * floating-point mode must be the default one. */
typedef void tly_fold_fn(const struct tly_fold *f, const void *const in[], void *out, size_t count);

tly_fold_fn tly_fold_scalar; /* the reference: plain C; also scales and averages integers for the others */
tly_fold_fn tly_fold_avx2;   /* and F16C */
tly_fold_fn tly_fold_avx512; /* F, BW, DQ, VL */
tly_fold_fn tly_fold_neon;

enum { TLY_NORM_LANES = 64 };

/* sum[i] = a[i] + b[i], with any NaN, and lanes[i % TLY_NORM_LANES] += |sum[i]| in order of i, for i < count, a multiple of
 * TLY_NORM_LANES.  sum may equal a or b; any alignment.  The floating-point mode must be the default one.  ask, stream: as
 * in struct tly_fold. */
typedef void tly_norm_fn(const float *a, const float *b, float *sum, size_t count,
                         float lanes[TLY_NORM_LANES], bool ask, bool stream);

tly_norm_fn tly_norm_scalar, tly_norm_avx2, tly_norm_avx512, tly_norm_neon;

enum { TLY_CODE_BLOCK = 256 }; /* elements that share a scale (codec.h) */

enum { TLY_CODE_DIGITS = 3 }; /* the most digits of a word */

/* A group of up to `digits` blocks, whose codes share words (codec.h). */
struct tly_code_group {
    size_t count; /* elements; vectors only take digits * TLY_CODE_BLOCK */
    int digits, bits, largest;
    bool ask;                       /* e comes from memory */
    float scale[TLY_CODE_DIGITS];   /* of each block */
    uint32_t peak[TLY_CODE_DIGITS]; /* of each block, to encode: bits of max |g[i] + e[i]| */
    float high, low;                /* to decode: their sum is 1 / divisor (codec.c) */
};

/* The peak of a block of `width` elements, to vectors TLY_CODE_BLOCK; 0x7f800000 or more if one of them is not finite. */
typedef uint32_t tly_code_peak_fn(const float *g, const float *e, size_t width, bool ask);

/* Encode a group: words, and e[i] = x - c * scale.  Vectors need scales of 2^-126 to 2^104 and peaks below 2^22 scales. */
typedef void tly_code_pack_fn(const struct tly_code_group *t, const float *g, float *e, void *words);

/* Decode a group: out[i] = (S * high + S * low) * scale for digits S.  Vectors need scales of 0, or 2^-80 to 2^120. */
typedef void tly_code_split_fn(const struct tly_code_group *t, const void *words, float *out, bool stream);

tly_code_peak_fn tly_code_peak_scalar, tly_code_peak_avx2, tly_code_peak_avx512, tly_code_peak_neon;
tly_code_pack_fn tly_code_pack_scalar, tly_code_pack_avx2, tly_code_pack_avx512, tly_code_pack_neon;
tly_code_split_fn tly_code_split_scalar, tly_code_split_avx2, tly_code_split_avx512, tly_code_split_neon;

struct tly_variant {
    const char *name;
    tly_fold_fn *fold;
    tly_norm_fn *norm;
    tly_code_peak_fn *peak;
    tly_code_pack_fn *pack;
    tly_code_split_fn *split;
};

/* The variant in use (tly_reduce_choose). */
const struct tly_variant *tly_reduce_kernels(void);

/* Other threads see stores around the caches in no order.  Whoever hands such a result on calls this once, at the end. */
void tly_reduce_fence(void);

#endif
