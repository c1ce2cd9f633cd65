/* norm_vector.c - sums with norms for vector instructions (tly_norm_fn in fold.h), compiled once for each variant: TLY_NORM
 * names the function, TLY_VECTOR is the bytes of a vector. */
#include "reduce/fold.h"

typedef float F __attribute__((vector_size(TLY_VECTOR)));
typedef float F_memory __attribute__((vector_size(TLY_VECTOR), aligned(1), may_alias));
typedef uint32_t W __attribute__((vector_size(TLY_VECTOR)));

enum { WIDTH = TLY_VECTOR / 4, VECTORS = TLY_NORM_LANES / WIDTH };

void TLY_NORM(const float *a, const float *b, float *sum, size_t count, float lanes[TLY_NORM_LANES])
{
    F lane[VECTORS];
    for (int v = 0; v < VECTORS; v++)
        lane[v] = *(const F_memory *)(lanes + v * WIDTH);
    for (size_t i = 0; i < count; i += TLY_NORM_LANES)
        for (int v = 0; v < VECTORS; v++) {
            size_t at = i + (size_t)v * WIDTH;
            F x = *(const F_memory *)(a + at) + *(const F_memory *)(b + at);
            /* NOLINTNEXTLINE(misc-redundant-expression): only a NaN differs from itself */
            W nan = (W)(x != x);
            W bits = ((W)x & ~nan) | (nan & 0x7fc00000u);
            *(F_memory *)(sum + at) = (F)bits;
            lane[v] += (F)(bits & 0x7fffffffu);
        }
    for (int v = 0; v < VECTORS; v++)
        *(F_memory *)(lanes + v * WIDTH) = lane[v];
}
