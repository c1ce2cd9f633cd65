/* reduce.h - sums of n inputs along the balanced tree over ranks.  No threads, no I/O, no allocation.
 *
 * The order is part of the contract:  T(lo, hi) = x_lo for one input, else T(lo, lo + m) + T(lo + m, hi)
 * with m the largest power of two below hi - lo.  float16 and bfloat16 are added in float32 and rounded
 * once, to nearest even, subnormals kept.  Every NaN is stored as the canonical quiet NaN.  Integers wrap.
 * Min and max: NaN wins, of equal zeros the first input's stays.  Results do not depend on the variant
 * (scalar, AVX2, AVX-512, NEON), on alignment, nor on MXCSR's rounding-independent flags FTZ and DAZ: the
 * entry points save, clear and restore them. */
#ifndef TLY_REDUCE_H
#define TLY_REDUCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tally/tally.h"

enum { TLY_REDUCE_MAX_INPUTS = 4096 };

/* Types and operations beyond those of tally.h, for the kernels alone. */
enum { TLY_COMPLEX64 = 10, TLY_COMPLEX128 = 11, TLY_DTYPE_COUNT = 12 };
enum { TLY_BAND = 5, TLY_BOR = 6, TLY_BXOR = 7, TLY_REDUCTION_COUNT = 8 };

struct tly_reduction {
    uint8_t dtype;     /* enum tally_dtype or TLY_COMPLEX* */
    uint8_t op;        /* enum tally_reduction or TLY_B* */
    uint32_t divisor;  /* TALLY_AVERAGE: the result is divided by this, once; else ignored */
    double prescale;   /* 1: nothing.  Applied to each input as it is read */
    double postscale;  /* 1: nothing.  Applied to the result (after the division) as it is stored */
};

/* Bytes of an element; 0 for an unknown type. */
size_t tly_reduce_element_size(int dtype);

/* 0, or -EINVAL / -ENOTSUP with a reason (average of bool, band of floats, ...) in *why (static string). */
int tly_reduce_check(const struct tly_reduction *r, const char **why);

/* output[i] = reduction over j < n of input[j][i], for i < count.  output may equal one of the inputs or be
 * apart from all of them; any alignment.  n >= 1.  The reduction must have passed tly_reduce_check(). */
void tly_reduce(const struct tly_reduction *r, int n, const void *const input[], void *output, size_t count);

/* As tly_reduce, but leaves grouped: group g is the next group_size[g] inputs; each group is reduced by its
 * own tree (and for 16-bit types rounded once: a hop), then the tree over the groups.  Prescale at the
 * leaves, division and postscale at the end. */
void tly_reduce_grouped(const struct tly_reduction *r, int groups, const int group_size[],
                        const void *const input[], void *output, size_t count);

/* The name of the variant in use ("scalar", "avx2", "avx512", "neon") and its choice for tests:
 * 0 or -ENOTSUP where the CPU lacks it. */
const char *tly_reduce_variant(void);
int tly_reduce_choose(const char *variant);

#endif
