/* element.h - single elements: conversions of 16-bit floats to float32 and back and of float64 to integers, and how a sum ends.
 *
 * Pure functions, which fold_scalar.c and the kernels of a GPU (device/sums.c) share, so that their bits are the same.  It is
 * both C and, for Clang's CUDA, C++. */
#ifndef TLY_ELEMENT_H
#define TLY_ELEMENT_H

#include <stdint.h>

#ifdef __CUDA__
#define TLY_ELEMENT static inline __attribute__((device))
#else
#define TLY_ELEMENT static inline
#endif

TLY_ELEMENT uint32_t tly_float_bits(float x)
{
    uint32_t u;
    __builtin_memcpy(&u, &x, sizeof u);
    return u;
}

TLY_ELEMENT float tly_bits_float(uint32_t u)
{
    float x;
    __builtin_memcpy(&x, &u, sizeof x);
    return x;
}

/* The conversions compute all cases and then choose, so that the compiler can vectorise them. */
TLY_ELEMENT float tly_half_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13;
    uint32_t normal = rest + (112 << 23); /* the exponent's bias goes from 15 to 127 */
    uint32_t subnormal = tly_float_bits(tly_bits_float(rest | 113 << 23) - 0x1p-14f);
    uint32_t finite = rest < 1 << 23 ? subnormal : normal;
    return tly_bits_float(sign | (rest >= 31 << 23 ? rest | 0x7f800000 : finite));
}

TLY_ELEMENT uint16_t tly_float_to_half(float x)
{
    uint32_t u = tly_float_bits(x), sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
    uint32_t normal = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
    /* Below 2^-14: in a sum with 0.5 the last bit is worth 2^-24, the smallest subnormal. */
    uint32_t subnormal = tly_float_bits(tly_bits_float(rest) + 0.5f) - 0x3f000000;
    uint32_t half = sign | (rest < 0x38800000 ? subnormal : rest >= 0x477ff000 ? 0x7c00 : normal);
    return (uint16_t)(rest > 0x7f800000 ? 0x7e00 : half);
}

TLY_ELEMENT float tly_bfloat_to_float(uint16_t b)
{
    return tly_bits_float((uint32_t)b << 16);
}

TLY_ELEMENT uint16_t tly_float_to_bfloat(float x)
{
    uint32_t u = tly_float_bits(x);
    return x != x ? 0x7fc0 : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/* The end of a sum: divided and scaled, for which 1 does nothing, and the canonical NaN for any. */
TLY_ELEMENT float tly_finish_float(float x, double divisor, double postscale)
{
    if (divisor != 1)
        x /= (float)divisor;
    if (postscale != 1)
        x *= (float)postscale;
    return x != x ? tly_bits_float(0x7fc00000) : x;
}

TLY_ELEMENT double tly_finish_double(double x, double divisor, double postscale)
{
    const uint64_t canonical = 0x7ff8000000000000;
    double nan;
    __builtin_memcpy(&nan, &canonical, sizeof nan);
    if (divisor != 1)
        x /= divisor;
    if (postscale != 1)
        x *= postscale;
    return x != x ? nan : x;
}

/* A float64 is held to [low, high).  HIGH is the power of two above the type's largest value MOST, and float64 has it exactly.
 * WIDE has all values of the type and its sign. */
#define TLY_INTEGER(T, WIDE, LOW, HIGH, MOST) \
    TLY_ELEMENT T tly_hold_##T(double x) \
    { \
        return x < (LOW) ? (T)(LOW) : x >= (HIGH) ? (MOST) : (T)x; \
    } \
    TLY_ELEMENT T tly_finish_##T(T x, double divisor, double postscale) \
    { \
        if (postscale != 1) \
            return tly_hold_##T((double)x / divisor * postscale); \
        return divisor != 1 ? (T)((WIDE)x / (WIDE)divisor) : x; \
    }
TLY_INTEGER(int8_t, int64_t, -0x1p7, 0x1p7, INT8_MAX)
TLY_INTEGER(uint8_t, uint64_t, 0.0, 0x1p8, UINT8_MAX)
TLY_INTEGER(int16_t, int64_t, -0x1p15, 0x1p15, INT16_MAX)
TLY_INTEGER(uint16_t, uint64_t, 0.0, 0x1p16, UINT16_MAX)
TLY_INTEGER(int32_t, int64_t, -0x1p31, 0x1p31, INT32_MAX)
TLY_INTEGER(uint32_t, uint64_t, 0.0, 0x1p32, UINT32_MAX)
TLY_INTEGER(int64_t, int64_t, -0x1p63, 0x1p63, INT64_MAX)
TLY_INTEGER(uint64_t, uint64_t, 0.0, 0x1p64, UINT64_MAX)

#endif
