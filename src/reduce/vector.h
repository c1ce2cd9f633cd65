/* vector.h - vectors of TLY_VECTOR bytes for files that are compiled once for each variant (fold_vector.c, norm_vector.c,
 * codec_vector.c): their types, and the few steps that need an instruction by name. */
#ifndef TLY_VECTOR_H
#define TLY_VECTOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define VECTOR(T, name, bytes) \
    typedef T name __attribute__((vector_size(bytes))); \
    typedef T name##_memory __attribute__((vector_size(bytes), aligned(1), may_alias))

VECTOR(float, F, TLY_VECTOR);
VECTOR(double, D, TLY_VECTOR);
VECTOR(uint8_t, B, TLY_VECTOR);
VECTOR(int8_t, SB, TLY_VECTOR);
VECTOR(uint16_t, H, TLY_VECTOR);
VECTOR(int16_t, SH, TLY_VECTOR);
VECTOR(uint32_t, W, TLY_VECTOR);
VECTOR(int32_t, SW, TLY_VECTOR);
VECTOR(uint64_t, Q, TLY_VECTOR);
VECTOR(int64_t, SQ, TLY_VECTOR);
VECTOR(uint16_t, HALF, TLY_VECTOR / 2); /* as many 16-bit floats as F has lanes */

/* clang-format off: a line for each instruction */
#if defined __x86_64__
#include <immintrin.h>
INLINE void fetch(uintptr_t to_second, uintptr_t to_first)
{
    __asm__ volatile("prefetcht1 (%0)\n\tprefetcht0 (%1)" ::"r"(to_second), "r"(to_first));
}
#if TLY_VECTOR == 64
INLINE W spread(HALF h)
{
    return (W)_mm512_cvtepu16_epi32((__m256i)h);
}
INLINE HALF squeeze(W x)
{
    return (HALF)_mm512_cvtepi32_epi16((__m512i)x);
}
INLINE F widen(HALF h)
{
    return (F)_mm512_cvtph_ps((__m256i)h);
}
INLINE HALF narrow(F x)
{
    return (HALF)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
}
INLINE void stream_whole(void *p, W x)
{
    _mm512_stream_si512(p, (__m512i)x);
}
INLINE void stream_half(void *p, HALF h)
{
    _mm256_stream_si256(p, (__m256i)h);
}
#else
INLINE W spread(HALF h)
{
    return (W)_mm256_cvtepu16_epi32((__m128i)h);
}
INLINE HALF squeeze(W x)
{
    __m256i twice = _mm256_packus_epi32((__m256i)x, (__m256i)x); /* within each 128 bits */
    return (HALF)_mm256_castsi256_si128(_mm256_permute4x64_epi64(twice, 0x8));
}
INLINE F widen(HALF h)
{
    return (F)_mm256_cvtph_ps((__m128i)h);
}
INLINE HALF narrow(F x)
{
    return (HALF)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
}
INLINE void stream_whole(void *p, W x)
{
    _mm256_stream_si256(p, (__m256i)x);
}
INLINE void stream_half(void *p, HALF h)
{
    _mm_stream_si128(p, (__m128i)h);
}
#endif
#elif defined __aarch64__
#include <arm_neon.h>
INLINE void fetch(uintptr_t to_second, uintptr_t to_first)
{
    __asm__ volatile("prfm pldl2keep, [%0]\n\tprfm pldl1keep, [%1]" ::"r"(to_second), "r"(to_first));
}
INLINE W spread(HALF h)
{
    return (W)vmovl_u16((uint16x4_t)h);
}
INLINE HALF squeeze(W x)
{
    return (HALF)vmovn_u32((uint32x4_t)x);
}
INLINE F widen(HALF h)
{
    return (F)vcvt_f32_f16((float16x4_t)h);
}
INLINE HALF narrow(F x)
{
    return (HALF)vcvt_f16_f32((float32x4_t)x);
}
/* C has no streaming stores here. */
INLINE void stream_whole(void *p, W x)
{
    *(W_memory *)p = x;
}
INLINE void stream_half(void *p, HALF h)
{
    *(HALF_memory *)p = h;
}
#endif
/* clang-format on */

INLINE void put_whole(unsigned char *p, W v, bool stream)
{
    if (stream)
        stream_whole(p, v);
    else
        *(W_memory *)p = v;
}

INLINE void put_half(unsigned char *p, HALF v, bool stream)
{
    if (stream)
        stream_half(p, v);
    else
        *(HALF_memory *)p = v;
}

/* The hardware's prefetchers do well with a few streams, not with 8 and an output.  So for rows from memory a
 * loop goes by blocks, and before each asks, row after row, for what it will want: for the second-level cache
 * first, nearer for the first.  Measured with 8 rows of float32: 10% faster than line by line as the lines are
 * loaded, and only in this order (which a compiler would change).  Requests may point behind a row: they cannot
 * fault. */
static __attribute__((noinline, unused)) void ask(const unsigned char *const row[], int n, size_t i,
                                                  size_t count, size_t size)
{
    const size_t bytes = count * size, near = 2 * bytes, far = near + 512;
    for (int j = 0; j < n; j++)
        for (uintptr_t p = (uintptr_t)(row[j] + i * size), end = p + bytes; p < end; p += 64)
            fetch(p + far, p + near);
}

#endif
