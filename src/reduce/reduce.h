/* reduce.h - sums of n inputs along the balanced tree over ranks.  No threads, no I/O, no allocation.
 *
 * Where it sits: sum/ calls it when all contributions of a block have arrived, and a machine with several
 * ranks calls it before it pushes.
 *
 * The order is part of the contract:  T(lo, hi) = x_lo for one input, else T(lo, lo + m) + T(lo + m, hi)
 * with m the largest power of two below hi - lo.  float16 and bfloat16 are added in float32 and rounded
 * once, to nearest even, subnormals kept.  Every NaN is stored as the canonical quiet NaN (float32
 * 0x7fc00000, float64 0x7ff8000000000000, float16 0x7e00, bfloat16 0x7fc0).  Integers wrap.  Min and max:
 * NaN wins, of equal zeros the first input's stays.  Booleans that are not 0 or 1 are read as 1.
 *
 * Complex numbers are pairs of floats: a sum adds, a factor multiplies and a NaN is replaced in each half for
 * itself.  The product is (a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re), each operation rounded.
 *
 * Factors.  Floats: each input is multiplied by (float)prescale as it is read, the result divided by the
 * divisor, multiplied by (float)postscale and only then rounded to 16 bits where it must be; all in float32,
 * in float64 for float64.  Integers: a prescaled input is
 * trunc(x * prescale), in float64 and held to the type's range; a result is divided as an integer, toward
 * zero, and with a postscale it is trunc((double)sum / divisor * postscale), held to the range too.  A
 * factor of 1 does nothing.
 *
 * Results do not depend on the variant (scalar, AVX2, AVX-512, NEON), on alignment, nor on the calling
 * thread's floating-point mode (FTZ, DAZ, rounding, traps): the entry points save it, set the default and
 * restore it.  In the default mode exceptions that a sum raises stay raised, as where the caller adds.
 *
 * How it is fast.  Adding each input to an accumulator as it arrives reads two and writes one for every
 * input; here all n are read once and the result is written once: (n + 1) / (3n - 1) of the traffic.  A fold
 * adds up to 8 inputs in registers, depth first (fold.h).  More are taken in blocks that the first-level
 * cache holds: T over n > 8 inputs is T over the sums of groups of 8, 64 or 512 neighbours, because m is
 * then a multiple of the group, so a block's groups are folded into scratch rows on the stack, in the type
 * of accumulation, and the rows folded in turn. */
#ifndef TLY_REDUCE_H
#define TLY_REDUCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tally/tally.h"

enum { TLY_REDUCE_MAX_INPUTS = 4096 };

enum { TLY_DTYPE_COUNT = 15, TLY_REDUCTION_COUNT = 8 };

struct tly_reduction {
    uint8_t dtype;      /* enum tally_dtype */
    uint8_t op;         /* enum tally_reduction */
    uint32_t divisor;   /* TALLY_AVERAGE: the result is divided by this, once; else ignored */
    double prescale;    /* 1: nothing.  Applied to each input as it is read */
    double postscale;   /* 1: nothing.  Applied to the result (after the division) as it is stored */
    bool to_partial;    /* the result is a subtree's, to be summed on: neither divided, scaled nor rounded */
    bool from_partials; /* the inputs are such results: prescaled already */
};

/* Bytes of an element; 0 for an unknown type. */
size_t tly_reduce_element_size(int dtype);

/* 0, or -EINVAL (unknown type or operation, divisor 0, a factor that is not finite) or -ENOTSUP (the
 * operation or a factor means nothing for the type: average of bool, and of floats ...) with a reason in
 * *why (static string; why may be NULL). */
int tly_reduce_check(const struct tly_reduction *r, const char **why);

/* output[i] = reduction over j < n of input[j][i], for i < count elements.  output may equal one or more of
 * the inputs or be apart from all of them; any alignment.  1 <= n <= TLY_REDUCE_MAX_INPUTS.  The reduction
 * must have passed tly_reduce_check().  Uses up to 100 KB of stack.
 *
 * Subtrees.  Cut the inputs into groups of 2^k neighbours, of which only the last may be smaller, reduce each
 * to_partial, and then these from_partials: the bits are those of one call for all.  A partial of a 16-bit float
 * is a float32, else it has the type itself.  Where partials are larger than elements, the output must be apart
 * from the inputs. */
void tly_reduce(const struct tly_reduction *r, int n, const void *const input[], void *output, size_t count);

/* As tly_reduce, but leaves grouped: group g is the next group_size[g] inputs, 1 or more; each group is
 * reduced by its own tree (and for 16-bit types rounded once: a hop), then the tree over the groups.
 * Prescale at the leaves, division and postscale at the end.  A group of one that is prescaled is rounded,
 * too.  Neither takes nor makes partials. */
void tly_reduce_grouped(const struct tly_reduction *r, int groups, const int group_size[],
                        const void *const input[], void *output, size_t count);

/* sum[i] = a[i] + b[i] for i < count, and norms[k] = the L1 norm of the sum's chunk k: of its elements k * chunk to
 * (k + 1) * chunk - 1, of which the last chunk may have fewer.  One pass over the memory.  sum may equal a or b, or is apart from
 * both; any alignment.  chunk > 0.
 *
 * The order is part of the contract: lane j of 64 adds |sum[i]| of the chunk's elements j, j + 64, ... in turn; then lane
 * j < w adds lane j + w, for w = 32, 16, ... 1. */
void tly_reduce_add_norms(const float *a, const float *b, float *sum, size_t count, size_t chunk,
                          float *norms);

/* As tly_reduce from_partials, but input j is the sum of the next leaves[j] leaves of the tree, which are one of its nodes:
 * a single leaf, or all that T(lo, hi) adds for some lo and hi.  The bits are those of one call for all leaves, of which
 * there are at most TLY_REDUCE_MAX_INPUTS. */
void tly_reduce_nodes(const struct tly_reduction *r, int n, const int leaves[], const void *const input[],
                      void *output, size_t count);

/* The name of the variant in use ("scalar", "avx2", "avx512", "neon"), by default the CPU's best, and its
 * choice for tests (NULL: the best): 0 or -ENOTSUP where the CPU or the build lacks it. */
const char *tly_reduce_variant(void);
int tly_reduce_choose(const char *variant);

#endif
