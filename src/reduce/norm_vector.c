/* norm_vector.c - sums with norms for vector instructions (tly_norm_fn in fold.h), compiled once for each variant: TLY_NORM
 * names the function, TLY_VECTOR is the bytes of a vector. */
#include "reduce/fold.h"
#include "reduce/vector.h"

enum { WIDTH = TLY_VECTOR / 4, VECTORS = TLY_NORM_LANES / WIDTH };

/* A template: `ahead` and `stream` are constants where it is called.  Blocks are of 256 bytes, which was measured to be 5%
 * faster than 512 at 16 MB. */
INLINE void norm_loop(const float *a, const float *b, float *sum, size_t count, float lanes[TLY_NORM_LANES],
                      bool ahead, bool stream)
{
    const unsigned char *const row[] = {(const unsigned char *)a, (const unsigned char *)b};
    F lane[VECTORS];
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; v++)
        lane[v] = *(const F_memory *)(lanes + v * WIDTH);
    for (size_t i = 0; i < count; i += TLY_NORM_LANES) {
        if (ahead)
            ask(row, 2, i, TLY_NORM_LANES, sizeof *a);
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; v++) {
            size_t at = i + (size_t)v * WIDTH;
            F x = *(const F_memory *)(a + at) + *(const F_memory *)(b + at);
            put_whole((unsigned char *)(sum + at), (W)x, stream);
            lane[v] += (F)((W)x & 0x7fffffffu);
        }
    }
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; v++)
        *(F_memory *)(lanes + v * WIDTH) = lane[v];
}

void TLY_NORM(const float *a, const float *b, float *sum, size_t count, float lanes[TLY_NORM_LANES],
              bool ahead, bool stream)
{
    if (stream && (uintptr_t)sum % TLY_VECTOR == 0)
        norm_loop(a, b, sum, count, lanes, true, true);
    else if (ahead)
        norm_loop(a, b, sum, count, lanes, true, false);
    else
        norm_loop(a, b, sum, count, lanes, false, false);
}
