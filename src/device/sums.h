/* sums.h - the argument of the kernels in sums.c.  Both C and, for Clang's CUDA, C++. */
#ifndef TLY_DEVICE_SUMS_H
#define TLY_DEVICE_SUMS_H

#include "reduce/fold.h"

/* out[i] = fold over j < fold.n of in[j][i], for i < count.   */
struct tly_sums {
    struct tly_fold fold; /* ask and stream are unused */
    const void *in[TLY_FOLD_MAX];
    void *out;
    uint64_t count;
};

/* F(T) for each type in which a kernel accumulates. */
#define TLY_SUMS_TYPES(F) \
    F(float) \
    F(double) \
    F(int8_t) \
    F(uint8_t) \
    F(int16_t) \
    F(uint16_t) \
    F(int32_t) \
    F(uint32_t) \
    F(int64_t) \
    F(uint64_t)

#endif
