/* codec_test.c - codecs, of all variants, against plain loops in double that follow codec.h: ranks encode, their words are summed
 * as integers, and the sum is decoded. */
#include <errno.h>
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "reduce/codec.h"
#include "reduce/fold.h"

#if defined __x86_64__
#include <xmmintrin.h>
#endif

enum {
    BLOCK = TALLY_CODEC_BLOCK,
    MARGIN = 16,
    MOST = TLY_FAR_BYTES / 4 + 3 * BLOCK + 77, /* elements that are asked for and streamed */
    MOST_BLOCKS = MOST / BLOCK + 1,
    LONGEST = 600,
    GUARD = 0x5a,
};

static const char *const variants[] = {"scalar", "avx2", "avx512", "neon"};
enum { VARIANTS = sizeof variants / sizeof *variants };

/* Each row of the table of tally.h, at the ends and inside. */
static const struct {
    int codec;
    uint32_t ranks;
    int largest, digits, base;
} cases[] = {
    {TALLY_CODEC_INT8, 1, 127, 1, 0}, {TALLY_CODEC_INT8, 2, 63, 1, 0},  {TALLY_CODEC_INT8, 3, 42, 1, 0},
    {TALLY_CODEC_INT8, 4, 31, 1, 0},  {TALLY_CODEC_INT8, 8, 15, 1, 0},  {TALLY_CODEC_INT8, 15, 8, 1, 0},
    {TALLY_CODEC_INT8, 127, 1, 1, 0}, {TALLY_CODEC_INT4, 1, 7, 2, 16},  {TALLY_CODEC_INT4, 2, 3, 2, 16},
    {TALLY_CODEC_INT4, 3, 2, 2, 16},  {TALLY_CODEC_INT4, 4, 1, 2, 16},  {TALLY_CODEC_INT4, 7, 1, 2, 16},
    {TALLY_CODEC_INT4, 8, 1, 3, 32},  {TALLY_CODEC_INT4, 15, 1, 3, 32},
};
enum { CASES = sizeof cases / sizeof *cases };

static struct tly_codec found(int k)
{
    struct tly_codec c;
    const char *why;
    assert_int_equal(tly_codec_find(cases[k].codec, cases[k].ranks, &c, &why), 0);
    return c;
}

static uint64_t random_state = 1;

static uint32_t random_bits(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

static float from_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* How values are made. */
enum { ORDINARY, SMALL, SPARSE, HALVES, DENORMAL, WIDE, SPECIAL, ANY, ZEROS, STYLES };

static float value(int style)
{
    uint32_t u = random_bits();
    float ordinary = (float)(int32_t)u * 0x1p-31f;
    switch (style) {
    case SMALL:
        return ordinary * 1e-6f;
    case SPARSE:
        return u % 50 ? 0 : ordinary;
    case HALVES: /* half a scale apart, so that ties come up */
        return (float)((int32_t)(u >> 16) % 300 - 150) * 0.5f;
    case DENORMAL:
        return from_bits(u & 0x80ffffff);
    case WIDE: /* any exponent */
        return from_bits(u % 0xff000000);
    case SPECIAL:
        return u % 997 ? ordinary : from_bits(u & 1 ? 0x7f800000 : u & 2 ? 0xff800000 : 0x7f812345);
    case ANY:
        return from_bits(u);
    case ZEROS:
        return u & 1 ? 0.0f : -0.0f;
    default:
        return ordinary;
    }
}

/* --- the reference -------------------------------------------------------------------------------------- */

static double plain_scale(uint8_t exponent)
{
    return exponent >= 1 && exponent <= 247 ? ldexp(1, exponent - 127) : 0;
}

static float sum_of(float g, float e)
{
    volatile float x = g + e;
    return x;
}

static bool plain_finite(const float *g, const float *e, size_t width)
{
    for (size_t i = 0; i < width; i++)
        if (!isfinite(sum_of(g[i], e[i])))
            return false;
    return true;
}

static uint8_t plain_exponent(const float *g, const float *e, size_t width, int largest)
{
    double peak = 0;
    if (!plain_finite(g, e, width))
        return 255;
    for (size_t i = 0; i < width; i++)
        peak = fmax(peak, fabs((double)sum_of(g[i], e[i])));
    if (peak == 0)
        return 0;
    for (int b = 1; b < 247; b++)
        if (largest * ldexp(1, b - 127) >= peak)
            return (uint8_t)b;
    return 247;
}

static int plain_code(float x, double scale, int largest)
{
    double q = scale == 0 ? 0 : (double)x / scale, c = nearbyint(q);
    if (fabs(q) >= 0x1p24)
        return 0;
    return (int)(c > largest ? largest : c < -largest ? -largest : c);
}

/* --- one tensor on all ranks ------------------------------------------------------------------------------ */

static float gradient[MOST + MARGIN], error[MOST + MARGIN], output[MOST + MARGIN];
static float want_error[MOST];
static int sum[MOST + BLOCK]; /* of the codes of each element */
static int32_t word_sum[MOST];
static unsigned char words[2 * MOST + MARGIN];
static uint8_t exponents[MOST_BLOCKS + 1], next[MOST_BLOCKS + 1], want_next[MOST_BLOCKS],
    all_next[MOST_BLOCKS];

static long word_at(const struct tly_codec *c, const unsigned char *p, size_t j)
{
    int16_t wide;
    if (c->dtype == TALLY_INT8)
        return ((const int8_t *)p)[j];
    memcpy(&wide, p + 2 * j, sizeof wide);
    return wide;
}

/* Check the words of one rank against its codes, by the definition. */
static void check_words(const struct tly_codec *c, int base, const int8_t *codes, size_t count,
                        const unsigned char *p)
{
    size_t j = 0, whole = (size_t)c->digits * BLOCK;
    for (size_t at = 0; at < count; at += whole) {
        size_t n = count - at < whole ? count - at : whole;
        size_t group = (n + (size_t)c->digits - 1) / (size_t)c->digits;
        for (size_t k = 0; k < group; k++, j++) {
            long want = 0, factor = 1;
            for (int d = 0; d < c->digits; d++, factor *= base)
                want += k + (size_t)d * group < n ? codes[at + k + (size_t)d * group] * factor : 0;
            assert_int_equal(word_at(c, p, j), want);
            word_sum[j] += (int32_t)want;
        }
    }
    assert_int_equal(j, tly_codec_words(c, count));
}

/* One rank encodes; its codes join the sums. */
static void encode_rank(const struct tly_codec *c, int base, float *g, float *e, size_t count, size_t shift)
{
    static int8_t codes[MOST];
    size_t blocks = (count + BLOCK - 1) / BLOCK;
    size_t bytes = tly_codec_words(c, count) * (c->dtype == TALLY_INT16 ? 2 : 1);
    unsigned char *p = words + shift;
    for (size_t b = 0; b < blocks; b++) {
        size_t at = b * BLOCK, width = count - at < BLOCK ? count - at : BLOCK;
        bool finite = plain_finite(g + at, e + at, width);
        double scale = plain_scale(exponents[b]);
        want_next[b] = plain_exponent(g + at, e + at, width, c->largest);
        for (size_t i = at; i < at + width; i++) {
            float x = sum_of(g[i], e[i]);
            codes[i] = (int8_t)(finite ? plain_code(x, scale, c->largest) : 0);
            want_error[i] = finite ? (float)((double)x - codes[i] * scale) : e[i];
            if (finite)
                assert_true((double)want_error[i] + codes[i] * scale == (double)x);
            sum[i] += codes[i];
        }
    }
    memset(next, GUARD, sizeof next);
    tly_codec_exponents(c, g, e, count, next);
    assert_memory_equal(next, want_next, blocks);
    assert_int_equal(next[blocks], GUARD);
    memset(next, GUARD, sizeof next);
    memset(words, GUARD, sizeof words);
    float behind = e[count];
    tly_codec_encode(c, g, e, count, exponents, p, next);
    assert_memory_equal(e, want_error, count * sizeof *e);
    assert_memory_equal(&e[count], &behind, sizeof behind);
    assert_memory_equal(next, want_next, blocks);
    assert_int_equal(next[blocks], GUARD);
    assert_int_equal(p[bytes], GUARD);
    assert_int_equal(shift ? p[-1] : GUARD, GUARD);
    check_words(c, base, codes, count, p);
    for (size_t b = 0; b < blocks; b++)
        all_next[b] = next[b] > all_next[b] ? next[b] : all_next[b];
}

/* Decode word_sum and compare with the sums of codes. */
static void decode_sums(const struct tly_codec *c, size_t count, size_t shift, uint32_t divisor, bool judge)
{
    size_t blocks = (count + BLOCK - 1) / BLOCK, n = tly_codec_words(c, count);
    float *to = output + shift;
    for (size_t j = 0; j < n; j++) {
        int16_t wide = (int16_t)word_sum[j];
        if (c->dtype == TALLY_INT16)
            memcpy(words + shift + 2 * j, &wide, sizeof wide);
        else
            words[shift + j] = (unsigned char)wide;
        assert_int_equal(c->dtype == TALLY_INT16 ? wide : (int8_t)wide, word_sum[j]); /* it fits */
    }
    to[count] = 77;
    tly_codec_decode(c, words + shift, exponents, judge ? all_next : NULL, count, divisor, to);
    assert_true(to[count] == 77);
    for (size_t b = 0; b < blocks; b++)
        for (size_t i = b * BLOCK; i < count && i < (b + 1) * BLOCK; i++) {
            volatile float quotient = (float)sum[i] / (float)divisor;
            float want = quotient * (float)plain_scale(exponents[b]);
            want = judge && all_next[b] == 255 ? from_bits(0x7fc00000) : want;
            assert_memory_equal(&to[i], &want, sizeof want);
        }
}

/* Two steps on all ranks: the second takes the exponents that the first agreed on, and values `growth` times as large. */
static void check(int k, int style, float growth, size_t count, size_t shift)
{
    struct tly_codec c = found(k);
    size_t blocks = (count + BLOCK - 1) / BLOCK;
    float *g = gradient + shift, *e = error + shift * 3 % MARGIN;
    for (int step = 0; step < 2; step++) {
        if (step == 0)
            for (size_t b = 0; b < blocks; b++)
                exponents[b] = (uint8_t)(b % 3 ? 120 + random_bits() % 8 : random_bits());
        else
            memcpy(exponents, all_next, blocks);
        memset(sum, 0, (count + BLOCK) * sizeof *sum);
        memset(word_sum, 0, count * sizeof *word_sum);
        memset(all_next, 0, sizeof all_next);
        for (uint32_t rank = 0; rank < cases[k].ranks; rank++) {
            for (size_t i = 0; i < count; i++) {
                g[i] = value(style) * (step ? growth : 1);
                e[i] = isfinite(e[i]) && !step ? value(rank % 2 ? ZEROS : style) : value(ORDINARY);
            }
            encode_rank(&c, cases[k].base, g, e, count, shift);
        }
        decode_sums(&c, count, shift, cases[k].ranks, true);
        decode_sums(&c, count, shift, 1, false);
    }
}

static void test_lengths(void **state)
{
    for (int v = 0; v < VARIANTS; v++) {
        if (tly_reduce_choose(variants[v]) != 0)
            continue;
        for (int k = 0; k < CASES; k++) {
            size_t step = cases[k].ranks > 15 ? 97 : cases[k].ranks > 4 ? 13 : 1;
            for (size_t count = 0; count <= LONGEST; count += step)
                check(k, ORDINARY, 1, count, random_bits() % MARGIN);
        }
    }
    tly_reduce_choose(NULL);
}

static void test_values(void **state)
{
    static const size_t counts[] = {1, 255, 256, 257, 1536, 2000};
    static const float growths[] = {1, 1e6f, 1e-6f, 1e30f};
    for (int v = 0; v < VARIANTS; v++) {
        if (tly_reduce_choose(variants[v]) != 0)
            continue;
        for (int k = 0; k < CASES; k++)
            for (int style = 0; style < STYLES; style++)
                for (size_t i = 0; i < sizeof counts / sizeof *counts && cases[k].ranks <= 15; i++)
                    check(k, style, growths[random_bits() % 4], counts[i], random_bits() % MARGIN);
    }
    tly_reduce_choose(NULL);
}

/* Tensors from memory, whose words are asked for and whose results are streamed. */
static void test_far(void **state)
{
    for (int v = 0; v < VARIANTS; v++) {
        if (tly_reduce_choose(variants[v]) != 0)
            continue;
        for (int k = 0; k < CASES; k++)
            if (cases[k].ranks == 1 || cases[k].ranks == 8)
                check(k, SPECIAL, 1, MOST, random_bits() % 2 * 5);
    }
    tly_reduce_choose(NULL);
}

/* --- the ends of ranges ----------------------------------------------------------------------------------- */

static size_t add_corner(float *to, size_t n, double x)
{
    for (int sign = -1; sign <= 1 && fabs(x) <= (double)FLT_MAX; sign += 2) {
        float f = (float)(sign * x);
        to[n++] = f;
        to[n++] = nextafterf(f, sign * INFINITY);
        to[n++] = nextafterf(f, 0);
    }
    return n;
}

/* Around all multiples of half a scale, the limits of what is sent, and the ends of float32; at the ends of the scales and of what
 * vectors do.  `most`: in scales, of the elements that are taken. */
static void check_corners(int k, uint8_t exponent, double most)
{
    struct tly_codec c = found(k);
    static float corner[8192];
    double scale = exponent ? ldexp(1, exponent - 127) : 1;
    size_t n = 0, taken = 0;
    for (int half = 0; half <= 2 * c.largest + 5; half++)
        n = add_corner(corner, n, half * 0.5 * scale);
    for (int power = 8; power <= 26; power++)
        n = add_corner(corner, n, ldexp(scale, power));
    n = add_corner(corner, n, (double)FLT_MAX);
    n = add_corner(corner, n, (double)FLT_MIN);
    n = add_corner(corner, n, 0x1p-149);
    for (size_t i = 0; i < n; i++)
        if (isfinite(corner[i]) && fabs((double)corner[i]) < most * scale)
            gradient[taken++] = corner[i];
    memset(error, 0, taken * sizeof *error);
    memset(exponents, exponent, sizeof exponents);
    memset(sum, 0, taken * sizeof *sum);
    memset(word_sum, 0, taken * sizeof *word_sum);
    memset(all_next, 0, sizeof all_next);
    encode_rank(&c, cases[k].base, gradient, error, taken, 0);
    decode_sums(&c, taken, 0, 1, true);
}

static void test_corners(void **state)
{
    static const uint8_t at[] = {0,   1,   2,   3,   24,  100, 126, 127, 128, 222, 223, 224,
                                 230, 231, 232, 233, 245, 246, 247, 248, 249, 254, 255};
    for (int v = 0; v < VARIANTS; v++) {
        if (tly_reduce_choose(variants[v]) != 0)
            continue;
        for (int k = 0; k < CASES; k++)
            for (size_t i = 0; i < sizeof at; i++) {
                check_corners(k, at[i], 0x1p22); /* vectors take these */
                check_corners(k, at[i], 0x1p23);
                check_corners(k, at[i], INFINITY);
            }
    }
    tly_reduce_choose(NULL);
}

/* The exponent of each peak near a power of two, or near one times L. */
static void test_exponents(void **state)
{
    for (int k = 0; k < CASES; k++) {
        struct tly_codec c = found(k);
        for (int power = -149; power <= 127; power++)
            for (int times = 0; times < 2; times++)
                for (int step = -1; step <= 1; step++) {
                    double peak = ldexp(times ? c.largest : 1, power);
                    float x = peak > (double)FLT_MAX ? FLT_MAX : (float)peak, zero = 0;
                    uint8_t b;
                    x = step < 0 ? nextafterf(x, 0) : step > 0 ? nextafterf(x, INFINITY) : x;
                    tly_codec_exponents(&c, &x, &zero, 1, &b);
                    assert_int_equal(b, plain_exponent(&x, &zero, 1, c.largest));
                }
    }
}

/* All sums by all divisors. */
static void test_division(void **state)
{
    struct tly_codec c = found(0);
    memset(exponents, 127, sizeof exponents);
    for (int v = 0; v < VARIANTS; v++) {
        if (tly_reduce_choose(variants[v]) != 0)
            continue;
        for (int s = -127; s <= 127; s++)
            word_sum[s + 127] = sum[s + 127] = s;
        for (uint32_t divisor = 1; divisor <= 127; divisor++)
            for (int exponent = 1; exponent <= 247; exponent += 41) {
                memset(exponents, exponent, sizeof exponents);
                decode_sums(&c, 255, divisor % MARGIN, divisor, false);
            }
    }
    tly_reduce_choose(NULL);
}

/* A rank that gives its words back to its error has x again. */
static void test_give_back(void **state)
{
    enum { COUNT = 1000 };
    static float x[COUNT], g[COUNT], e[COUNT], sent[COUNT];
    for (int k = 0; k < CASES; k++) {
        struct tly_codec c = found(k);
        memset(exponents, 125, sizeof exponents);
        for (int i = 0; i < COUNT; i++) {
            g[i] = value(ORDINARY);
            e[i] = value(SMALL);
            x[i] = sum_of(g[i], e[i]);
        }
        tly_codec_encode(&c, g, e, COUNT, exponents, words, NULL);
        tly_codec_decode(&c, words, exponents, NULL, COUNT, 1, sent);
        for (int i = 0; i < COUNT; i++)
            assert_true(e[i] + sent[i] == x[i]);
    }
}

/* A thread that flushes subnormals to zero and rounds up gets the same, and stays so. */
static void test_mode(void **state)
{
#if defined __x86_64__
    struct tly_codec c = found(2);
    static float g[BLOCK], e[2][BLOCK], out[2][BLOCK];
    static int8_t codes[2][BLOCK];
    uint8_t exponent = 1;
    for (int i = 0; i < BLOCK; i++)
        g[i] = from_bits(random_bits() & 0x83ffffff);
    unsigned saved = _mm_getcsr(), after[2];
    for (int strange = 0; strange < 2; strange++) {
        _mm_setcsr(strange ? saved | 0x8040 | 0x4000 : saved);
        tly_codec_encode(&c, g, e[strange], BLOCK, &exponent, codes[strange], NULL);
        tly_codec_decode(&c, codes[strange], &exponent, NULL, BLOCK, 3, out[strange]);
        after[strange] = _mm_getcsr();
    }
    _mm_setcsr(saved);
    assert_memory_equal(codes[0], codes[1], sizeof *codes);
    assert_memory_equal(e[0], e[1], sizeof *e);
    assert_memory_equal(out[0], out[1], sizeof *out);
    assert_int_equal(after[1] & 0xc040, 0xc040);
#else
    skip();
#endif
}

static void test_refusals(void **state)
{
    struct tly_codec c;
    const char *why;
    assert_int_equal(tly_codec_find(7, 2, &c, &why), -EINVAL);
    assert_int_equal(tly_codec_find(TALLY_CODEC_INT8, 0, &c, &why), -EINVAL);
    assert_int_equal(tly_codec_find(TALLY_CODEC_INT8, 128, &c, &why), -ENOTSUP);
    assert_int_equal(tly_codec_find(TALLY_CODEC_INT4, 16, &c, &why), -ENOTSUP);
    assert_non_null(strstr(why, "int8"));
    for (int k = 0; k < CASES; k++) {
        c = found(k);
        assert_int_equal(c.largest, cases[k].largest);
        assert_int_equal(c.digits, cases[k].digits);
        assert_int_equal(c.digits == 1 ? 0 : 1 << c.bits, cases[k].base);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lengths),   cmocka_unit_test(test_values),    cmocka_unit_test(test_far),
        cmocka_unit_test(test_corners),   cmocka_unit_test(test_exponents), cmocka_unit_test(test_division),
        cmocka_unit_test(test_give_back), cmocka_unit_test(test_mode),      cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
