/* reference.c - the reductions' definition, one element at a time.  Runs in the default floating-point mode. */
#include "reference.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "tally/tally.h"

enum { MOST = 64 };

size_t reference_element(int dtype)
{
    static const size_t bytes[] = {4, 8, 2, 2, 1, 1, 2, 4, 8, 1, 8, 16, 2, 4, 8};
    return bytes[dtype];
}

/* --- 16 bits ------------------------------------------------------------------------------------- */

static float from_bits(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static uint32_t to_bits(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

static float half_to_float(uint16_t h)
{
    int sign = h >> 15, exponent = h >> 10 & 31, fraction = h & 1023;
    double magnitude = exponent == 0    ? ldexp(fraction, -24)
                       : exponent == 31 ? (fraction ? (double)NAN : (double)INFINITY)
                                        : ldexp(1024 + fraction, exponent - 25);
    return (float)(sign ? -magnitude : magnitude);
}

/* To nearest, ties to even: in units of the last place at that size, which ldexp() makes exact. */
static uint16_t float_to_half(float f)
{
    if (f != f)
        return 0x7e00;
    uint16_t sign = signbit(f) ? 0x8000 : 0;
    double x = fabs((double)f);
    if (x >= 65520)
        return sign | 0x7c00;
    int exponent;
    frexp(x, &exponent); /* x = 0.5..1 * 2^exponent */
    if (x == 0 || exponent < -13)
        return sign | (uint16_t)nearbyint(
                          ldexp(x, 24)); /* subnormal; 1024 is the smallest normal one, as it should */
    double units = nearbyint(ldexp(x, 11 - exponent)); /* 1024..2048 */
    return (uint16_t)(sign | (((uint32_t)(exponent + 13) << 10) + (uint32_t)units));
}

static uint16_t float_to_bfloat(float f)
{
    if (f != f)
        return 0x7fc0;
    uint32_t bits = to_bits(f), low = bits & 0xffff, high = bits >> 16;
    if (low > 0x8000 || (low == 0x8000 && (high & 1)))
        high++;
    return (uint16_t)high;
}

/* --- one element --------------------------------------------------------------------------------- */

/* A value on its way: of the three, the one that the type is summed in. */
union value {
    float f;
    double d;
    int64_t i;
};

static bool is_float(int dtype)
{
    return dtype == TALLY_FLOAT32 || dtype == TALLY_FLOAT16 || dtype == TALLY_BFLOAT16;
}

static bool is_unsigned(int dtype)
{
    return dtype == TALLY_UINT8 || (dtype >= TALLY_UINT16 && dtype <= TALLY_UINT64);
}

/* Of all types but uint64. */
static void limits(int dtype, int64_t *lo, int64_t *hi)
{
    int bits = (int)reference_element(dtype) * 8 - !is_unsigned(dtype);
    *hi = (int64_t)((1ull << bits) - 1);
    *lo = is_unsigned(dtype) ? 0 : -*hi - 1;
}

static double to_double(int dtype, int64_t i)
{
    return dtype == TALLY_UINT64 ? (double)(uint64_t)i : (double)i;
}

static bool is_less(int dtype, int64_t a, int64_t b)
{
    return dtype == TALLY_UINT64 ? (uint64_t)a < (uint64_t)b : a < b;
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

/* trunc(x), held to the type's range. */
static int64_t hold(int dtype, double x)
{
    int64_t lo, hi;
    if (x != x)
        return 0;
    if (dtype == TALLY_UINT64)
        return x <= 0 ? 0 : x >= 0x1p64 ? -1 : (int64_t)(uint64_t)x;
    limits(dtype, &lo, &hi);
    if (x <= (double)lo)
        return lo;
    if (x >= (double)hi)
        return hi;
    return (int64_t)x;
}

static union value load(const struct reference *r, const void *input, size_t i)
{
    union value v = {0};
    const uint8_t *p = (const uint8_t *)input + i * reference_element(r->dtype);
    uint16_t h;
    switch (r->dtype) {
    case TALLY_FLOAT32:
        memcpy(&v.f, p, 4);
        break;
    case TALLY_FLOAT64:
        memcpy(&v.d, p, 8);
        break;
    case TALLY_FLOAT16:
        memcpy(&h, p, 2);
        v.f = half_to_float(h);
        break;
    case TALLY_BFLOAT16:
        memcpy(&h, p, 2);
        v.f = from_bits((uint32_t)h << 16);
        break;
    case TALLY_BOOL:
        v.i = *p != 0;
        return v;
    default: {
        uint64_t x = 0;
        memcpy(&x, p, reference_element(r->dtype));
        v.i = wrap(r->dtype, x);
    }
    }
    if (r->prescale == 1)
        return v;
    if (is_float(r->dtype))
        v.f *= (float)r->prescale;
    else if (r->dtype == TALLY_FLOAT64)
        v.d *= r->prescale;
    else
        v.i = hold(r->dtype, to_double(r->dtype, v.i) * r->prescale);
    return v;
}

static union value add(const struct reference *r, union value a, union value b)
{
    union value v = {0};
    int how = r->reduction == TALLY_AVERAGE ? TALLY_SUM : r->reduction;
    if (r->dtype == TALLY_BOOL) {
        v.i = how == TALLY_SUM || how == TALLY_MAX ? (a.i | b.i) : (a.i & b.i);
    } else if (is_float(r->dtype)) {
        if (how == TALLY_SUM)
            v.f = a.f + b.f;
        else if (how == TALLY_PRODUCT)
            v.f = a.f * b.f;
        else if (a.f != a.f || b.f != b.f)
            v.f = NAN;
        else if (how == TALLY_MIN)
            v.f = b.f < a.f ? b.f : a.f;
        else
            v.f = b.f > a.f ? b.f : a.f;
    } else if (r->dtype == TALLY_FLOAT64) {
        if (how == TALLY_SUM)
            v.d = a.d + b.d;
        else if (how == TALLY_PRODUCT)
            v.d = a.d * b.d;
        else if (a.d != a.d || b.d != b.d)
            v.d = (double)NAN;
        else if (how == TALLY_MIN)
            v.d = b.d < a.d ? b.d : a.d;
        else
            v.d = b.d > a.d ? b.d : a.d;
    } else if (how == TALLY_SUM) {
        v.i = wrap(r->dtype, (uint64_t)a.i + (uint64_t)b.i);
    } else if (how == TALLY_PRODUCT) {
        v.i = wrap(r->dtype, (uint64_t)a.i * (uint64_t)b.i);
    } else if (how == TALLY_MIN) {
        v.i = is_less(r->dtype, b.i, a.i) ? b.i : a.i;
    } else if (how == TALLY_MAX) {
        v.i = is_less(r->dtype, a.i, b.i) ? b.i : a.i;
    } else {
        v.i = how == TALLY_BAND ? a.i & b.i : how == TALLY_BOR ? a.i | b.i : a.i ^ b.i;
    }
    return v;
}

/* T(lo, hi) */
static union value tree(const struct reference *r, const union value *x, int lo, int hi)
{
    if (hi - lo == 1)
        return x[lo];
    int m = 1;
    while (2 * m < hi - lo)
        m *= 2;
    return add(r, tree(r, x, lo, lo + m), tree(r, x, lo + m, hi));
}

static void store(const struct reference *r, union value v, void *out, size_t i)
{
    uint8_t *p = (uint8_t *)out + i * reference_element(r->dtype);
    bool average = r->reduction == TALLY_AVERAGE;
    uint16_t h;
    if (is_float(r->dtype)) {
        if (average)
            v.f /= (float)r->ranks;
        if (r->postscale != 1)
            v.f *= (float)r->postscale;
        uint32_t bits = v.f != v.f ? 0x7fc00000 : to_bits(v.f);
        if (r->dtype == TALLY_FLOAT32) {
            memcpy(p, &bits, 4);
        } else {
            h = r->dtype == TALLY_FLOAT16 ? float_to_half(v.f) : float_to_bfloat(v.f);
            memcpy(p, &h, 2);
        }
    } else if (r->dtype == TALLY_FLOAT64) {
        if (average)
            v.d /= r->ranks;
        if (r->postscale != 1)
            v.d *= r->postscale;
        uint64_t bits = 0x7ff8000000000000ull;
        if (v.d == v.d)
            memcpy(&bits, &v.d, 8);
        memcpy(p, &bits, 8);
    } else {
        if (r->postscale != 1)
            v.i = hold(r->dtype, to_double(r->dtype, v.i) / (average ? r->ranks : 1) * r->postscale);
        else if (average && r->dtype == TALLY_UINT64)
            v.i = (int64_t)((uint64_t)v.i / (uint64_t)r->ranks);
        else if (average)
            v.i /= r->ranks;
        memcpy(p, &v.i, reference_element(r->dtype)); /* little-endian */
    }
}

/* A machine's own sum travels in the tensor's type. */
static union value hop(const struct reference *r, union value v)
{
    if (r->dtype == TALLY_FLOAT16)
        v.f = half_to_float(float_to_half(v.f));
    if (r->dtype == TALLY_BFLOAT16)
        v.f = from_bits((uint32_t)float_to_bfloat(v.f) << 16);
    return v;
}

/* One number of a real type, or half a complex one, in a sum. */
static void reduce_one(const struct reference *r, const void *const inputs[], void *out, size_t i)
{
    union value x[MOST], top[MOST];
    for (int g = 0; g < r->groups; g++) {
        int n = 0;
        for (int rank = 0; rank < r->ranks; rank++)
            if (r->groups == 1 || r->group[rank] == g)
                x[n++] = load(r, inputs[rank], i);
        top[g] = tree(r, x, 0, n);
        if (r->groups > 1)
            top[g] = hop(r, top[g]);
    }
    store(r, tree(r, top, 0, r->groups), out, i);
}

struct complex_value {
    union value re, im;
};

static struct complex_value multiply(int half, struct complex_value a, struct complex_value b)
{
    struct complex_value v = {{0}, {0}};
    if (half == TALLY_FLOAT32) {
        float ac = a.re.f * b.re.f, bd = a.im.f * b.im.f, ad = a.re.f * b.im.f, bc = a.im.f * b.re.f;
        v.re.f = ac - bd, v.im.f = ad + bc;
    } else {
        double ac = a.re.d * b.re.d, bd = a.im.d * b.im.d, ad = a.re.d * b.im.d, bc = a.im.d * b.re.d;
        v.re.d = ac - bd, v.im.d = ad + bc;
    }
    return v;
}

static struct complex_value product(int half, const struct complex_value *x, int lo, int hi)
{
    if (hi - lo == 1)
        return x[lo];
    int m = 1;
    while (2 * m < hi - lo)
        m *= 2;
    return multiply(half, product(half, x, lo, lo + m), product(half, x, lo + m, hi));
}

/* Of complex numbers; `r` is of their halves' type. */
static void multiply_one(const struct reference *r, const void *const inputs[], void *out, size_t i)
{
    struct complex_value x[MOST], top[MOST];
    for (int g = 0; g < r->groups; g++) {
        int n = 0;
        for (int rank = 0; rank < r->ranks; rank++)
            if (r->groups == 1 || r->group[rank] == g) {
                x[n].re = load(r, inputs[rank], 2 * i);
                x[n++].im = load(r, inputs[rank], 2 * i + 1);
            }
        top[g] = product(r->dtype, x, 0, n);
    }
    struct complex_value v = product(r->dtype, top, 0, r->groups);
    store(r, v.re, out, 2 * i);
    store(r, v.im, out, 2 * i + 1);
}

void reference_reduce(const struct reference *given, const void *const inputs[], void *out, size_t count)
{
    struct reference r = *given;
    bool complex = r.dtype == TALLY_COMPLEX64 || r.dtype == TALLY_COMPLEX128;
    if (complex)
        r.dtype = r.dtype == TALLY_COMPLEX64 ? TALLY_FLOAT32 : TALLY_FLOAT64;
    if (complex && r.reduction != TALLY_PRODUCT)
        count *= 2;
    for (size_t i = 0; i < count; i++)
        if (complex && r.reduction == TALLY_PRODUCT)
            multiply_one(&r, inputs, out, i);
        else
            reduce_one(&r, inputs, out, i);
}
