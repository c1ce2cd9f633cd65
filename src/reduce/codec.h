/* codec.h - float32 gradients as small integers whose sum over ranks fits its word, with error feedback.  No threads, no I/O,
 * no allocation.
 *
 * Where it sits: tally_encode(), tally_decode() and tally_exponents() of tally.h.  Words go through an ordinary integer sum.
 *
 * A block is 256 neighbours; the last may be shorter.  It has an exponent, a byte b that is equal on all ranks: its scale s is
 * 2^(b - 127) for b = 1 .. 247.  With any other b nothing is sent.  For each element x = g + e, rounded once to float32:
 *
 *     c = x / s rounded to an integer, half to even, and held to -L .. L; 0 if |x| >= 2^24 * s
 *     e = x - c * s
 *
 * An element that is not finite makes all codes of its block 0 and leaves the block's e as it is.
 *
 * No rounding.  e is exact, so e + c * s = x bit for bit.  Let u be the distance of x's neighbours in float32.  |x| < 2^24 * s
 * means u <= s.  x is a multiple of u, and so is c * s, because u and s are powers of two; so is x - c * s.  It is no larger than
 * |x|, because c = 0 would give |x|, rounding finds the nearest, and a held c has the sign of x and is nearer to 0.  A multiple of
 * u up to |x| is a float32.  With c = 0, e is x.  c * s is finite: c has 7 bits and s is at most 2^120.
 *
 * A block's next exponent is the least b of 1 .. 247 with L * s >= max |x|, 0 if all x are 0, 255 if one is not finite.  So the
 * largest of the ranks' bytes is the exponent of the largest |x| of any rank.
 *
 * Words.  A group is as many blocks as a word has digits D.  Of its n elements, word j of W = n / D, rounded up, has those
 * at j, j + W and j + 2W as its digits, the first the lowest: the sum of c * base^digit.  A tensor has count / D words, rounded up.
 *
 * Bits do not depend on the variant, on alignment nor on the thread's floating-point mode. */
#ifndef TLY_CODEC_H
#define TLY_CODEC_H

#include <stddef.h>
#include <stdint.h>

#include "tally/tally.h"

enum { TLY_CODE_MOST = 247, TLY_CODE_NOT_FINITE = 255 }; /* exponents */

/* How a codec codes for a number of ranks. */
struct tly_codec {
    enum tally_dtype dtype; /* of a word: TALLY_INT8 or TALLY_INT16 */
    int digits;             /* of a word */
    int bits;               /* of a digit: its base is 2^bits */
    int largest;            /* L: the largest code */
};

/* 0, or -EINVAL or -ENOTSUP with a reason in *why (static string). */
int tly_codec_find(int codec, uint32_t ranks, struct tly_codec *c, const char **why);

size_t tly_codec_words(const struct tly_codec *c, size_t count);

/* The next exponent of each block of g + e. */
void tly_codec_exponents(const struct tly_codec *c, const float *g, const float *e, size_t count,
                         uint8_t *next);

/* Encode.  words: any alignment.  next: as tly_codec_exponents, of the g + e that is encoded; may be NULL. */
void tly_codec_encode(const struct tly_codec *c, const float *g, float *e, size_t count,
                      const uint8_t *exponents, void *words, uint8_t *next);

/* out = S / divisor, rounded, times s, for digits S of the words: S times s at divisor 1.  s is 0 where nothing was sent.  Where
 * next, which may be NULL, is above TLY_CODE_MOST, the block becomes NaN.  1 <= divisor <= 127. */
void tly_codec_decode(const struct tly_codec *c, const void *words, const uint8_t *exponents,
                      const uint8_t *next, size_t count, uint32_t divisor, float *out);

#endif
