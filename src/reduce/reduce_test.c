/* reduce_test.c - the reductions against a plain recursive reference of the tree, for every variant that
 * this CPU can run.
 *
 * The reference below is written from the contract in reduce.h and shares no code with the kernels: it
 * takes one element at a time, in the widest type of its kind, and rounds to 16 bits by searching the
 * nearest representable value. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "reduce/fold.h"
#include "reduce/reduce.h"

/* The floating-point mode, and modes that change sums: FTZ and DAZ, rounding up, both. */
#if defined __x86_64__
#include <xmmintrin.h>
static const uint64_t modes[] = {0x9fc0, 0x1f80 | 0x4000, 0x9fc0 | 0x4000};
static uint64_t get_mode(void)
{
    return _mm_getcsr();
}
static void set_mode(uint64_t mode)
{
    _mm_setcsr((unsigned)mode);
}
#elif defined __aarch64__
static const uint64_t modes[] = {1 << 24, 1 << 22, 1 << 24 | 1 << 22};
static uint64_t get_mode(void)
{
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static void set_mode(uint64_t mode)
{
    __asm__ volatile("msr fpcr, %0" ::"r"(mode));
}
#else
static const uint64_t modes[] = {0};
static uint64_t get_mode(void)
{
    return 0;
}
static void set_mode(uint64_t mode)
{
}
#endif

/* --- random numbers: xorshift*, the seed is printed with a failure --------------------------------- */

static uint64_t seed = 88172645463325252u;

static uint64_t random64(void)
{
    seed ^= seed >> 12;
    seed ^= seed << 25;
    seed ^= seed >> 27;
    return seed * 2685821657736338717u;
}

static size_t below(size_t n)
{
    return (size_t)(random64() >> 11) % n;
}

/* --- the reference ---------------------------------------------------------------------------------- */

/* A value on its way: f for float32 and 16-bit floats, d for float64, i for the rest (uint64 by its bits). */
union value {
    float f;
    double d;
    int64_t i;
};

static bool is_complex(int dtype)
{
    return dtype == TALLY_COMPLEX64 || dtype == TALLY_COMPLEX128;
}

static bool is_integer(int dtype)
{
    return (dtype >= TALLY_INT8 && dtype <= TALLY_INT64) || (dtype >= TALLY_UINT16 && dtype <= TALLY_UINT64);
}

static double to_double(int dtype, int64_t i)
{
    return dtype == TALLY_UINT64 ? (double)(uint64_t)i : (double)i;
}

static bool is_less(int dtype, int64_t a, int64_t b)
{
    return dtype == TALLY_UINT64 ? (uint64_t)a < (uint64_t)b : a < b;
}

/* Magnitude of the 16-bit float with bits `h` (sign apart), exactly; infinity is what comes next. */
static double magnitude(int dtype, unsigned h)
{
    int fraction_bits = dtype == TALLY_FLOAT16 ? 10 : 7, bias = dtype == TALLY_FLOAT16 ? 15 : 127;
    int exponent = (int)(h >> fraction_bits), fraction = (int)(h & ((1u << fraction_bits) - 1));
    if (exponent == 0)
        return ldexp(fraction, 1 - bias - fraction_bits);
    return ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
}

static unsigned infinity_of(int dtype)
{
    return dtype == TALLY_FLOAT16 ? 0x7c00 : 0x7f80;
}

static float widen(int dtype, uint16_t h)
{
    unsigned rest = h & 0x7fff, infinity = infinity_of(dtype);
    double x = rest > infinity ? NAN : rest == infinity ? INFINITY : magnitude(dtype, rest);
    return (float)(h & 0x8000 ? -x : x);
}

/* The nearest 16-bit float: the last one not above |x|, or the next; of equal distances the even one. */
static uint16_t narrow(int dtype, float value)
{
    double x = fabs((double)value);
    unsigned sign = signbit(value) ? 0x8000 : 0, infinity = infinity_of(dtype);
    if (isnan(value))
        return dtype == TALLY_FLOAT16 ? 0x7e00 : 0x7fc0;
    if (isinf(value))
        return (uint16_t)(sign | infinity);
    unsigned lo = 0, hi = infinity;
    while (hi - lo > 1) {
        unsigned middle = (lo + hi) / 2;
        if (magnitude(dtype, middle) <= x)
            lo = middle;
        else
            hi = middle;
    }
    double down = x - magnitude(dtype, lo), up = magnitude(dtype, hi) - x;
    return (uint16_t)(sign | (down < up || (down == up && lo % 2 == 0) ? lo : hi));
}

static bool is_16bit_float(int dtype)
{
    return dtype == TALLY_FLOAT16 || dtype == TALLY_BFLOAT16;
}

static bool is_float(int dtype)
{
    return dtype == TALLY_FLOAT32 || is_16bit_float(dtype);
}

static void range(int dtype, double *low, double *high, int64_t *most)
{
    switch (dtype) {
    case TALLY_INT8:
        *low = -128, *high = 128, *most = INT8_MAX;
        break;
    case TALLY_UINT8:
        *low = 0, *high = 256, *most = UINT8_MAX;
        break;
    case TALLY_INT16:
        *low = -32768, *high = 32768, *most = INT16_MAX;
        break;
    case TALLY_INT32:
        *low = INT32_MIN, *high = 0x1p31, *most = INT32_MAX;
        break;
    case TALLY_UINT16:
        *low = 0, *high = 65536, *most = UINT16_MAX;
        break;
    case TALLY_UINT32:
        *low = 0, *high = 0x1p32, *most = UINT32_MAX;
        break;
    case TALLY_UINT64:
        *low = 0, *high = 0x1p64, *most = -1; /* its bits */
        break;
    default:
        *low = -0x1p63, *high = 0x1p63, *most = INT64_MAX;
        break;
    }
}

static int64_t hold(int dtype, double x)
{
    double low, high;
    int64_t most;
    range(dtype, &low, &high, &most);
    if (dtype == TALLY_UINT64 && x >= low && x < high)
        return (int64_t)(uint64_t)x;
    return x < low ? (int64_t)low : x >= high ? most : (int64_t)x;
}

static int64_t wrap(int dtype, uint64_t x)
{
    switch (dtype) {
    case TALLY_INT8:
        return (int8_t)x;
    case TALLY_UINT8:
        return (uint8_t)x;
    case TALLY_INT16:
        return (int16_t)x;
    case TALLY_INT32:
        return (int32_t)x;
    case TALLY_UINT16:
        return (uint16_t)x;
    case TALLY_UINT32:
        return (uint32_t)x;
    default:
        return (int64_t)x;
    }
}

static union value read_leaf(const struct tly_reduction *r, const unsigned char *at, bool scale)
{
    union value v = {.i = 0};
    uint16_t half;
    int8_t i8;
    int16_t i16;
    int32_t i32;
    switch (r->dtype) {
    case TALLY_FLOAT32:
        memcpy(&v.f, at, 4);
        break;
    case TALLY_FLOAT64:
        memcpy(&v.d, at, 8);
        break;
    case TALLY_FLOAT16:
    case TALLY_BFLOAT16:
        memcpy(&half, at, 2), v.f = widen(r->dtype, half);
        break;
    case TALLY_INT8:
        memcpy(&i8, at, 1), v.i = i8;
        break;
    case TALLY_UINT8:
        v.i = *at;
        break;
    case TALLY_INT16:
        memcpy(&i16, at, 2), v.i = i16;
        break;
    case TALLY_INT32:
        memcpy(&i32, at, 4), v.i = i32;
        break;
    case TALLY_INT64:
    case TALLY_UINT64:
        memcpy(&v.i, at, 8);
        break;
    case TALLY_UINT16:
        memcpy(&v.i, at, 2); /* little-endian, as all that Tally runs on */
        break;
    case TALLY_UINT32:
        memcpy(&v.i, at, 4);
        break;
    case TALLY_BOOL:
        v.i = *at ? 1 : 0;
        break;
    }
    if (scale && r->prescale != 1) {
        if (is_float(r->dtype))
            v.f = v.f * (float)r->prescale;
        else if (r->dtype == TALLY_FLOAT64)
            v.d = v.d * r->prescale;
        else
            v.i = hold(r->dtype, to_double(r->dtype, v.i) * r->prescale);
    }
    return v;
}

#define EXTREME(x, y, better) (isnan(x) ? (x) : isnan(y) ? (y) : (y)better(x) ? (y) : (x))

static union value combine(const struct tly_reduction *r, union value a, union value b)
{
    union value v = a;
    bool sum = r->op == TALLY_SUM || r->op == TALLY_AVERAGE;
    if (is_float(r->dtype)) {
        v.f = sum                      ? a.f + b.f
              : r->op == TALLY_PRODUCT ? a.f * b.f
              : r->op == TALLY_MIN     ? EXTREME(a.f, b.f, <)
                                       : EXTREME(a.f, b.f, >);
    } else if (r->dtype == TALLY_FLOAT64) {
        v.d = sum                      ? a.d + b.d
              : r->op == TALLY_PRODUCT ? a.d * b.d
              : r->op == TALLY_MIN     ? EXTREME(a.d, b.d, <)
                                       : EXTREME(a.d, b.d, >);
    } else if (r->dtype == TALLY_BOOL) {
        v.i = r->op == TALLY_SUM || r->op == TALLY_MAX || r->op == TALLY_BOR ? (a.i || b.i)
              : r->op == TALLY_BXOR                                          ? a.i != b.i
                                                                             : (a.i && b.i);
    } else {
        uint64_t x = (uint64_t)a.i, y = (uint64_t)b.i;
        v.i = sum                      ? wrap(r->dtype, x + y)
              : r->op == TALLY_PRODUCT ? wrap(r->dtype, x * y)
              : r->op == TALLY_MIN     ? (is_less(r->dtype, b.i, a.i) ? b.i : a.i)
              : r->op == TALLY_MAX     ? (is_less(r->dtype, a.i, b.i) ? b.i : a.i)
              : r->op == TALLY_BAND    ? (a.i & b.i)
              : r->op == TALLY_BOR     ? (a.i | b.i)
                                       : (a.i ^ b.i);
    }
    return v;
}

static void write_result(const struct tly_reduction *r, union value v, bool finish, unsigned char *at)
{
    uint32_t divisor = finish && r->op == TALLY_AVERAGE ? r->divisor : 1;
    double postscale = finish ? r->postscale : 1;
    uint16_t half;
    if (is_float(r->dtype)) {
        if (divisor != 1)
            v.f = v.f / (float)divisor;
        if (postscale != 1)
            v.f = v.f * (float)postscale;
        if (isnan(v.f))
            memcpy(&v.f, &(uint32_t){0x7fc00000}, 4);
        if (is_16bit_float(r->dtype))
            half = narrow(r->dtype, v.f), memcpy(at, &half, 2);
        else
            memcpy(at, &v.f, 4);
        return;
    }
    if (r->dtype == TALLY_FLOAT64) {
        if (divisor != 1)
            v.d = v.d / divisor;
        if (postscale != 1)
            v.d = v.d * postscale;
        if (isnan(v.d))
            memcpy(&v.d, &(uint64_t){0x7ff8000000000000}, 8);
    } else if (postscale != 1)
        v.i = hold(r->dtype, to_double(r->dtype, v.i) / divisor * postscale);
    else if (divisor != 1)
        v.i = r->dtype == TALLY_UINT64 ? (int64_t)((uint64_t)v.i / divisor) : v.i / (int64_t)divisor;
    memcpy(at, &v, tly_reduce_element_size(r->dtype)); /* little-endian, as all that Tally runs on */
}

static int split(int n)
{
    int m = 1;
    while (m * 2 < n)
        m *= 2;
    return m;
}

static union value tree(const struct tly_reduction *r, int lo, int hi, const unsigned char *const in[],
                        size_t at, bool scale)
{
    if (hi - lo <= 1)
        return read_leaf(r, in[lo] + at, scale);
    int m = split(hi - lo);
    return combine(r, tree(r, lo, lo + m, in, at, scale), tree(r, lo + m, hi, in, at, scale));
}

/* The product of complex numbers by the tree; `r` is of their halves' type. */
static void product(const struct tly_reduction *r, int lo, int hi, const unsigned char *const in[], size_t at,
                    bool scale, union value v[2])
{
    size_t half = tly_reduce_element_size(r->dtype);
    if (hi - lo <= 1) {
        v[0] = read_leaf(r, in[lo] + at, scale);
        v[1] = read_leaf(r, in[lo] + at + half, scale);
        return;
    }
    union value a[2], b[2];
    int m = split(hi - lo);
    product(r, lo, lo + m, in, at, scale, a);
    product(r, lo + m, hi, in, at, scale, b);
    if (r->dtype == TALLY_FLOAT32) {
        float ac = a[0].f * b[0].f, bd = a[1].f * b[1].f, ad = a[0].f * b[1].f, bc = a[1].f * b[0].f;
        v[0].f = ac - bd, v[1].f = ad + bc;
    } else {
        double ac = a[0].d * b[0].d, bd = a[1].d * b[1].d, ad = a[0].d * b[1].d, bc = a[1].d * b[0].d;
        v[0].d = ac - bd, v[1].d = ad + bc;
    }
}

static void write_product(const struct tly_reduction *r, int lo, int hi, const unsigned char *const in[],
                          size_t at, bool leaves, bool finish, unsigned char *out)
{
    union value v[2];
    product(r, lo, hi, in, at, leaves, v);
    write_result(r, v[0], finish, out);
    write_result(r, v[1], finish, out + tly_reduce_element_size(r->dtype));
}

static void reference_products(const struct tly_reduction *r, int n, int groups, const int group_size[],
                               const unsigned char *const in[], unsigned char *out, size_t count)
{
    size_t size = 2 * tly_reduce_element_size(r->dtype);
    for (size_t at = 0; at < count * size; at += size) {
        if (groups == 0) {
            write_product(r, 0, n, in, at, true, true, out + at);
            continue;
        }
        unsigned char hop[64][16];
        const unsigned char *hops[64];
        for (int g = 0, lo = 0; g < groups; lo += group_size[g++]) {
            write_product(r, lo, lo + group_size[g], in, at, true, false, hop[g]);
            hops[g] = hop[g];
        }
        write_product(r, 0, groups, hops, 0, false, true, out + at);
    }
}

/* groups 0: not grouped. */
static void reference(const struct tly_reduction *given, int n, int groups, const int group_size[],
                      const void *const input[], unsigned char *out, size_t count)
{
    struct tly_reduction r = *given;
    const unsigned char *const *in = (const unsigned char *const *)input;
    if (is_complex(r.dtype)) {
        r.dtype = r.dtype == TALLY_COMPLEX64 ? TALLY_FLOAT32 : TALLY_FLOAT64;
        if (r.op == TALLY_PRODUCT) {
            reference_products(&r, n, groups, group_size, in, out, count);
            return;
        }
        count *= 2;
    }
    size_t size = tly_reduce_element_size(r.dtype);
    for (size_t i = 0; i < count; i++) {
        if (groups == 0) {
            write_result(&r, tree(&r, 0, n, in, i * size, true), true, out + i * size);
            continue;
        }
        unsigned char hop[64][8];
        const unsigned char *hops[64];
        for (int g = 0, lo = 0; g < groups; lo += group_size[g++]) {
            write_result(&r, tree(&r, lo, lo + group_size[g], in, i * size, true), false, hop[g]);
            hops[g] = hop[g];
        }
        write_result(&r, tree(&r, 0, groups, hops, 0, false), true, out + i * size);
    }
}

/* --- inputs ------------------------------------------------------------------------------------------- */

/* Random bits, ordinary numbers and what breaks kernels: NaN, infinity, zero, subnormals, ends of ranges. */
static void fill(int dtype, unsigned char *at, size_t count)
{
    if (is_complex(dtype)) {
        dtype = dtype == TALLY_COMPLEX64 ? TALLY_FLOAT32 : TALLY_FLOAT64;
        count *= 2;
    }
    static const uint16_t odd16[] = {0,      0x8000, 1,      0x8001, 0x7c00, 0xfc00, 0x7e00,
                                     0x7c01, 0xfe01, 0x7f80, 0xff80, 0x7fc0, 0x7f81, 0x3c00,
                                     0x3f80, 0x7bff, 0x7f7f, 0x0400, 0x0080};
    static const uint32_t odd32[] = {0,          0x80000000, 1,          0x80000001, 0x7f800000,
                                     0xff800000, 0x7fc00000, 0x7f800001, 0xffc12345, 0x3f800000,
                                     0x7f7fffff, 0x00800000, 0x007fffff};
    static const uint64_t odd64[] = {
        0,
        1ull << 63,
        1,
        0x7ff0000000000000,
        0xfff0000000000000,
        0x7ff8000000000000,
        0x7ff0000000000001,
        0x0010000000000000,
        0x7fefffffffffffff,
        0x3ff0000000000000,
        0x000fffffffffffff};
    size_t size = tly_reduce_element_size(dtype);
    int style = (int)below(4);
    for (size_t i = 0; i < count; i++, at += size) {
        uint64_t bits = random64() >> 3;
        float f = (float)((double)(int64_t)(random64() >> 20) / 0x1p40 - 2.0);
        double d = f * 1.000000001;
        if (style == 0 && below(4) == 0) {
            bits = size == 2   ? odd16[below(sizeof odd16 / 2)]
                   : size == 4 ? odd32[below(sizeof odd32 / 4)]
                   : size == 8 ? odd64[below(sizeof odd64 / 8)]
                               : below(2) * 255;
        } else if (style == 1 && below(2) == 0) /* subnormals and their neighbours */
            bits &= size == 2 ? 0x83ff : size == 4 ? 0x80ffffff : size == 8 ? 0x801fffffffffffff : 1;
        else if (style >= 2 && is_16bit_float(dtype))
            bits = narrow(dtype, f);
        else if (style >= 2 && dtype == TALLY_FLOAT32)
            memcpy(&bits, &f, 4);
        else if (style >= 2 && dtype == TALLY_FLOAT64)
            memcpy(&bits, &d, 8);
        memcpy(at, &bits, size);
    }
}

static const char *const dtype_name[] = {"float32",   "float64",    "float16", "bfloat16", "int8",
                                         "uint8",     "int16",      "int32",   "int64",    "bool",
                                         "complex64", "complex128", "uint16",  "uint32",   "uint64"};
static const char *const op_name[] = {"sum", "average", "min", "max", "product", "band", "bor", "bxor"};

/* --- tests: each runs for every variant ----------------------------------------------------------------- */

/* An emulated processor gets a share of what is random. */
#if defined TLY_SAMPLE
enum { SHARE = 5 };
#else
enum { SHARE = 1 };
#endif

enum { MOST = 33, SPAN = 1 << 15 };
static unsigned char *memory[MOST + 1]; /* inputs and an output, SPAN bytes each */

static void check_case(const struct tly_reduction *r, int n, int groups, const int group_size[], size_t count)
{
    size_t size = tly_reduce_element_size(r->dtype), bytes = count * size;
    const void *in[MOST];
    unsigned char *want = malloc(bytes + 1);
    uint64_t start = seed;
    for (int j = 0; j < n; j++) {
        unsigned char *at = memory[j] + below(2) * below(130);
        fill(r->dtype, at, count);
        in[j] = at;
    }
    bool in_place = below(3) == 0;
    unsigned char *out =
        in_place ? (unsigned char *)in[below((size_t)n)] : memory[MOST] + 64 + below(2) * below(66);
    unsigned char guard[64];
    memcpy(guard, out + bytes, sizeof guard);
    reference(r, n, groups, group_size, in, want, count);
    if (groups)
        tly_reduce_grouped(r, groups, group_size, in, out, count);
    else
        tly_reduce(r, n, in, out, count);
    for (size_t i = 0; i < bytes; i++)
        if (out[i] != want[i])
            fail_msg(
                "%s: %s of %s, n %d, groups %d, %zu elements, %s, divisor %u, factors %g, %g: element %zu "
                "differs (seed %llu)",
                tly_reduce_variant(), op_name[r->op], dtype_name[r->dtype], n, groups, count,
                in_place ? "in place" : "apart", r->divisor, r->prescale, r->postscale, i / size,
                (unsigned long long)start);
    assert_memory_equal(guard, out + bytes, sizeof guard);
    free(want);
}

static const double factors[] = {1, 1, 1, 0.5, -3, 1.0 / 3, 1e-3, 0x1p-30, 1e30, 0};

static void random_reduction(struct tly_reduction *r, int n)
{
    *r = (struct tly_reduction){0};
    do {
        r->dtype = (uint8_t)below(TLY_DTYPE_COUNT);
        r->op = (uint8_t)(below(3) ? below(2) : below(TLY_REDUCTION_COUNT));
        r->divisor = below(2) ? (uint32_t)n : 1 + (uint32_t)(random64() >> (32 + below(32)) >> 1);
        r->prescale = below(2) ? 1 : factors[below(10)];
        r->postscale = below(2) ? 1 : factors[below(10)];
    } while (tly_reduce_check(r, NULL) != 0);
}

static size_t random_count(int dtype)
{
    size_t most = (SPAN - 300) / tly_reduce_element_size(dtype);
    return below(3) ? below(150) : below(most < 1500 ? most : 1500);
}

/* Every type, operation and n, one size with a tail each. */
static void test_all(void **state)
{
    for (int dtype = 0; dtype < TLY_DTYPE_COUNT; dtype++)
        for (int op = 0; op < TLY_REDUCTION_COUNT; op++) {
            struct tly_reduction r = {(uint8_t)dtype, (uint8_t)op, 1, 1, 1};
            if (tly_reduce_check(&r, NULL) == 0)
                for (int n = 1; n <= MOST; n += n < 10 ? 1 : SHARE) {
                    r.divisor = (uint32_t)n;
                    check_case(&r, n, 0, NULL, 67 + below(40));
                }
        }
}

static void test_random(void **state)
{
    for (int i = 0; i < 1500 / SHARE; i++) {
        struct tly_reduction r;
        int n = 1 + (int)below(MOST);
        random_reduction(&r, n);
        check_case(&r, n, 0, NULL, random_count(r.dtype));
    }
}

static void test_grouped(void **state)
{
    for (int i = 0; i < 700 / SHARE; i++) {
        struct tly_reduction r;
        int group_size[MOST], groups = 0, n = 0;
        int most = 1 + (int)below(9);
        do
            n += group_size[groups++] = 1 + (int)below((size_t)most);
        while (n + most < MOST && below(10));
        random_reduction(&r, n);
        check_case(&r, n, groups, group_size, random_count(r.dtype));
    }
}

/* Subtrees summed first, at any cut into powers of two, give the bits of one call for all. */
static void test_partials(void **state)
{
    enum { COUNT = 333 };
    unsigned char *partial[MOST], *want = memory[MOST], *got = malloc(COUNT * 16);
    for (int j = 0; j < MOST; j++)
        assert_non_null(partial[j] = malloc(COUNT * 16 + 64));
    assert_non_null(got);
    for (int i = 0; i < 400 / SHARE; i++) {
        struct tly_reduction whole, lower, upper;
        const void *in[MOST], *parts[MOST];
        int n = 1 + (int)below(MOST), group = 1 << below(6), groups = 0;
        size_t count = below(COUNT);
        uint64_t start = seed;
        random_reduction(&whole, n);
        lower = upper = whole;
        lower.to_partial = upper.from_partials = true;
        for (int j = 0; j < n; j++) {
            fill(whole.dtype, memory[j], count);
            in[j] = memory[j];
        }
        for (int lo = 0; lo < n; lo += group, groups++) {
            unsigned char *row = partial[groups] + below(2) * below(64);
            tly_reduce(&lower, n - lo < group ? n - lo : group, in + lo, row, count);
            parts[groups] = row;
        }
        tly_reduce(&upper, groups, parts, got, count);
        reference(&whole, n, 0, NULL, in, want, count);
        if (memcmp(got, want, count * tly_reduce_element_size(whole.dtype)) != 0)
            fail_msg("%s: %s of %s, n %d in groups of %d, %zu elements differ (seed %llu)",
                     tly_reduce_variant(), op_name[whole.op], dtype_name[whole.dtype], n, group, count,
                     (unsigned long long)start);
    }
    for (int j = 0; j < MOST; j++)
        free(partial[j]);
    free(got);
}

/* The walk's three levels: float32, whose sums depend on the order, of up to 4096 inputs. */
static void test_many_inputs(void **state)
{
    static const int many[] = {63, 64, 65, 100, 511, 512, 513, 1000, 4095, 4096};
    enum { COUNT = 19 };
    float *x = malloc(sizeof *x * TLY_REDUCE_MAX_INPUTS * COUNT), want[COUNT], got[COUNT];
    const void **in = malloc(sizeof *in * TLY_REDUCE_MAX_INPUTS);
    struct tly_reduction r = {TALLY_FLOAT32, TALLY_AVERAGE, 7, 0.7, 3};
    for (int j = 0; j < TLY_REDUCE_MAX_INPUTS; j++) {
        in[j] = x + j * COUNT;
        for (int i = 0; i < COUNT; i++)
            x[j * COUNT + i] = (float)((double)(int64_t)random64() / 0x1p62);
    }
    for (size_t k = 0; k < sizeof many / sizeof *many; k++) {
        reference(&r, many[k], 0, NULL, in, (unsigned char *)want, COUNT);
        tly_reduce(&r, many[k], in, got, COUNT);
        assert_memory_equal(want, got, sizeof want);
    }
    free(x);
    free(in);
}

/* Results so large that they are written around the caches: aligned, behind by elements, and by a byte. */
static void test_large(void **state)
{
    static const struct tly_reduction kinds[] = {
        {TALLY_FLOAT32, TALLY_SUM, 1, 1, 1},       {TALLY_FLOAT64, TALLY_SUM, 1, 1, 1},
        {TALLY_FLOAT16, TALLY_SUM, 1, 1, 1},       {TALLY_BFLOAT16, TALLY_SUM, 1, 1, 1},
        {TALLY_INT8, TALLY_SUM, 1, 1, 1},          {TALLY_UINT32, TALLY_MAX, 1, 1, 1},
        {TALLY_COMPLEX64, TALLY_PRODUCT, 1, 1, 1}, {TALLY_COMPLEX128, TALLY_PRODUCT, 1, 1, 1},
        {TALLY_COMPLEX64, TALLY_SUM, 1, 1, 1},
    };
    enum { N = 3, BYTES = TLY_FAR_BYTES / (N + 1) + 4096, KINDS = sizeof kinds / sizeof *kinds };
    unsigned char *arena = malloc((N + 2) * (BYTES + 256));
    assert_non_null(arena);
    for (int k = 0; k < 2 * KINDS; k++) {
        if (SHARE > 1 && k % 2 == 1) /* each kind in one of the two ways, for KINDS is odd */
            continue;
        struct tly_reduction r = kinds[k % KINDS];
        size_t size = tly_reduce_element_size(r.dtype), count = BYTES / size - (size_t)k;
        const void *in[N];
        for (int j = 0; j < N; j++) {
            unsigned char *at = arena + (size_t)j * (BYTES + 256);
            fill(r.dtype, at, count);
            in[j] = at;
        }
        unsigned char *want = arena + N * (BYTES + 256), *out = want + BYTES + 256;
        size_t offset = (size_t)k * size / (is_complex(r.dtype) ? 2 : 1); /* also in the middle of a number */
        out += -(uintptr_t)out % 64 + (k < KINDS ? offset : 1);
        reference(&r, N, 0, NULL, in, want, count);
        out[count * size] = 0xa5;
        tly_reduce(&r, N, in, out, count);
        assert_memory_equal(out, want, count * size);
        assert_int_equal(out[count * size], 0xa5);
    }
    free(arena);
}

/* The caller's FTZ and DAZ (and rounding mode) change nothing and are there afterwards. */
static void test_float_mode(void **state)
{
    static const uint8_t types[] = {TALLY_FLOAT32, TALLY_FLOAT64, TALLY_FLOAT16, TALLY_BFLOAT16};
    static const uint8_t ops[] = {TALLY_SUM, TALLY_AVERAGE, TALLY_MIN, TALLY_PRODUCT};
    for (size_t m = 0; m < sizeof modes / sizeof *modes; m++)
        for (size_t k = 0; k < 16; k++) {
            struct tly_reduction r = {types[k % 4], ops[k / 4], 3, 1, 0.3};
            enum { N = 3, COUNT = 300 };
            const void *in[N];
            unsigned char want[COUNT * 8];
            size_t size = tly_reduce_element_size(r.dtype);
            for (int j = 0; j < N; j++) {
                in[j] = memory[j];
                for (size_t i = 0; i < COUNT; i++) {
                    uint64_t bits = random64() & (size == 2   ? 0x80ff
                                                  : size == 4 ? 0x80ffffff
                                                              : 0x801fffffffffffff);
                    memcpy(memory[j] + i * size, &bits, size);
                }
            }
            reference(&r, N, 0, NULL, in, want, COUNT);
            uint64_t saved = get_mode();
            set_mode(modes[m]);
            tly_reduce(&r, N, in, memory[MOST], COUNT);
            uint64_t after = get_mode();
            set_mode(saved);
            assert_int_equal(after, modes[m]);
            assert_memory_equal(memory[MOST], want, COUNT * size);
        }
}

static void test_check(void **state)
{
    const char *why = NULL;
    struct tly_reduction good = {TALLY_FLOAT32, TALLY_AVERAGE, 4, 1, 1}, r = good;
    assert_int_equal(tly_reduce_check(&r, &why), 0);
    assert_null(why);
    r.dtype = TLY_DTYPE_COUNT;
    assert_int_equal(tly_reduce_check(&r, &why), -EINVAL);
    assert_non_null(why);
    r = good, r.op = TLY_REDUCTION_COUNT;
    assert_int_equal(tly_reduce_check(&r, NULL), -EINVAL);
    r = good, r.divisor = 0;
    assert_int_equal(tly_reduce_check(&r, &why), -EINVAL);
    r.op = TALLY_SUM;
    assert_int_equal(tly_reduce_check(&r, &why), 0);
    r = good, r.prescale = NAN;
    assert_int_equal(tly_reduce_check(&r, &why), -EINVAL);
    r = good, r.postscale = INFINITY;
    assert_int_equal(tly_reduce_check(&r, &why), -EINVAL);
    for (uint8_t dtype = 0; dtype < TLY_DTYPE_COUNT; dtype++)
        for (uint8_t op = 0; op < TLY_REDUCTION_COUNT; op++) {
            bool bitwise = op >= TALLY_BAND, extreme = op == TALLY_MIN || op == TALLY_MAX;
            bool fine = is_integer(dtype) || (dtype == TALLY_BOOL && op != TALLY_AVERAGE) ||
                        (is_complex(dtype) && !bitwise && !extreme) || (dtype <= TALLY_BFLOAT16 && !bitwise);
            r = (struct tly_reduction){dtype, op, 2, 1, 1};
            assert_int_equal(tly_reduce_check(&r, &why), fine ? 0 : -ENOTSUP);
        }
    r = (struct tly_reduction){TALLY_BOOL, TALLY_SUM, 1, 2, 1};
    assert_int_equal(tly_reduce_check(&r, &why), -ENOTSUP);
    r = (struct tly_reduction){TALLY_COMPLEX64, TALLY_MIN, 1, 1, 1};
    assert_int_equal(tly_reduce_check(&r, &why), -ENOTSUP);
    assert_int_equal(strcmp(why, "complex numbers have no minimum"), 0);
    r.op = TALLY_MAX;
    assert_int_equal(tly_reduce_check(&r, &why), -ENOTSUP);
    assert_int_equal(strcmp(why, "complex numbers have no maximum"), 0);
    assert_int_equal(tly_reduce_element_size(TLY_DTYPE_COUNT), 0);
    assert_int_equal(tly_reduce_element_size(-1), 0);
    assert_int_equal(tly_reduce_element_size(TALLY_COMPLEX128), 16);
}

/* A few values written out by hand. */
static void test_by_hand(void **state)
{
    struct tly_reduction r = {TALLY_FLOAT32, TALLY_SUM, 1, 1, 1};
    float a = 0x1p24f, one = 1, y;
    const void *in[] = {&a, &one, &one, &one, &one}; /* (2^24 + 1) + (1 + 1), then + 1: ties to even */
    tly_reduce(&r, 5, in, &y, 1);
    assert_true(y == 0x1p24f + 4);
    uint16_t h[3] = {0x7bff, 0x7bff, 0xfbff}, g; /* float16: 65504 + 65504 - 65504 does not overflow inside */
    const void *halves[] = {h, h + 1, h + 2};
    r.dtype = TALLY_FLOAT16;
    tly_reduce(&r, 3, halves, &g, 1);
    assert_int_equal(g, 0x7bff);
    int group_size[] = {2, 1}; /* but does at a hop */
    tly_reduce_grouped(&r, 2, group_size, halves, &g, 1);
    assert_int_equal(g, 0x7c00);
    int8_t i[] = {100, 100, -7}, s;
    const void *bytes[] = {i, i + 1, i + 2};
    r = (struct tly_reduction){TALLY_INT8, TALLY_AVERAGE, 2, 1, 1};
    tly_reduce(&r, 2, bytes, &s, 1);
    assert_int_equal(s, -28);
    tly_reduce(&r, 1, bytes + 2, &s, 1);
    assert_int_equal(s, -3);
    r.prescale = 0.5; /* 50 + 50 */
    r.op = TALLY_SUM;
    tly_reduce(&r, 2, bytes, &s, 1);
    assert_int_equal(s, 100);
    uint64_t big[] = {UINT64_MAX, 7}, largest;
    const void *unsigned_ones[] = {big, big + 1};
    r = (struct tly_reduction){TALLY_UINT64, TALLY_MAX, 1, 1, 1};
    tly_reduce(&r, 2, unsigned_ones, &largest, 1);
    assert_true(largest == UINT64_MAX);
    r = (struct tly_reduction){TALLY_UINT64, TALLY_AVERAGE, 2, 1, 1};
    tly_reduce(&r, 1, unsigned_ones, &largest, 1);
    assert_true(largest == UINT64_MAX / 2);
    float complex_ones[] = {1, 2, 3, 4}, turned[2]; /* (1 + 2i) (3 + 4i) */
    const void *factor[] = {complex_ones, complex_ones + 2};
    r = (struct tly_reduction){TALLY_COMPLEX64, TALLY_PRODUCT, 1, 1, 1};
    tly_reduce(&r, 2, factor, turned, 1);
    assert_true(turned[0] == -5 && turned[1] == 10);
    float zero[] = {-0.0f, 0.0f};
    const void *zeros[] = {zero, zero + 1};
    r = (struct tly_reduction){TALLY_FLOAT32, TALLY_MAX, 1, 1, 1};
    tly_reduce(&r, 2, zeros, &y, 1);
    assert_true(signbit(y));
}

static int set_up(void **state)
{
    for (int j = 0; j <= MOST; j++)
        if (!(memory[j] = aligned_alloc(64, SPAN)))
            return -1;
    return 0;
}

static int tear_down(void **state)
{
    for (int j = 0; j <= MOST; j++)
        free(memory[j]);
    return tly_reduce_choose(NULL);
}

int main(void)
{
    static const char *const variants[] = {"scalar", "avx2", "avx512", "neon"};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_check),       cmocka_unit_test(test_by_hand), cmocka_unit_test(test_all),
        cmocka_unit_test(test_random),      cmocka_unit_test(test_grouped), cmocka_unit_test(test_partials),
        cmocka_unit_test(test_many_inputs), cmocka_unit_test(test_large),   cmocka_unit_test(test_float_mode),
    };
    int failed = 0;
    for (size_t v = 0; v < sizeof variants / sizeof *variants; v++)
        if (tly_reduce_choose(variants[v]) == 0)
            failed += cmocka_run_group_tests_name(variants[v], tests, set_up, tear_down);
    return failed;
}
