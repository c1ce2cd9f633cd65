/* sums.c - the kernels: the sum of up to 8 inputs along the tree over ranks, with the bits of reduce/fold_scalar.c.
 *
 * Clang makes PTX of this file (scripts/ptx.sh), which is committed as sums_ptx.inc and loaded by cuda.c.  There it is C++, and
 * the threads of a kernel share the elements.  Elsewhere it is C, and one thread does all: so the fake driver of the tests runs
 * it.
 *
 * Kernel tly_sums_T accumulates in type T.  Other reductions than sums are left to the host. */
#include "device/sums.h"
#include "reduce/element.h"

#ifdef __CUDA__
#define KERNEL extern "C" __attribute__((global))
#define THREADS ((uint64_t)__nvvm_read_ptx_sreg_ntid_x())
#define FIRST (__nvvm_read_ptx_sreg_ctaid_x() * THREADS + __nvvm_read_ptx_sreg_tid_x())
#define STRIDE (__nvvm_read_ptx_sreg_nctaid_x() * THREADS)
#else
#define KERNEL __attribute__((visibility("default")))
#define FIRST 0
#define STRIDE 1
#endif

/* --- floats -------------------------------------------------------------------------------------------- */

TLY_ELEMENT float load_float(const struct tly_fold *f, const void *in, uint64_t i)
{
    float x = f->from == TLY_F32   ? ((const float *)in)[i]
              : f->from == TLY_F16 ? tly_half_to_float(((const uint16_t *)in)[i])
                                   : tly_bfloat_to_float(((const uint16_t *)in)[i]);
    return f->prescale != 1 ? x * (float)f->prescale : x;
}

TLY_ELEMENT void store_float(const struct tly_fold *f, float x, void *out, uint64_t i)
{
    x = tly_finish_float(x, f->divisor, f->postscale);
    if (f->to == TLY_F32)
        ((float *)out)[i] = x;
    else
        ((uint16_t *)out)[i] = f->to == TLY_F16 ? tly_float_to_half(x) : tly_float_to_bfloat(x);
}

TLY_ELEMENT double load_double(const struct tly_fold *f, const void *in, uint64_t i)
{
    double x = ((const double *)in)[i];
    return f->prescale != 1 ? x * f->prescale : x;
}

TLY_ELEMENT void store_double(const struct tly_fold *f, double x, void *out, uint64_t i)
{
    ((double *)out)[i] = tly_finish_double(x, f->divisor, f->postscale);
}

#define ADD_FLOAT(T) \
    TLY_ELEMENT T add_##T(const struct tly_fold *f, T a, T b) \
    { \
        (void)f; \
        return a + b; \
    }
ADD_FLOAT(float)
ADD_FLOAT(double)

/* --- integers, and booleans, whose sum is an or ------------------------------------------------------------ */

#define INTEGER(T) \
    TLY_ELEMENT T load_##T(const struct tly_fold *f, const void *in, uint64_t i) \
    { \
        T x = ((const T *)in)[i]; \
        if (f->from == TLY_BOOL8) \
            x = x != 0; \
        return f->prescale != 1 ? tly_hold_##T((double)x * f->prescale) : x; \
    } \
    TLY_ELEMENT T add_##T(const struct tly_fold *f, T a, T b) \
    { \
        return f->from == TLY_BOOL8 ? (T)(a | b) : (T)((uint64_t)a + (uint64_t)b); \
    } \
    TLY_ELEMENT void store_##T(const struct tly_fold *f, T x, void *out, uint64_t i) \
    { \
        ((T *)out)[i] = tly_finish_##T(x, f->divisor, f->postscale); \
    }
INTEGER(int8_t)
INTEGER(uint8_t)
INTEGER(int16_t)
INTEGER(uint16_t)
INTEGER(int32_t)
INTEGER(uint32_t)
INTEGER(int64_t)
INTEGER(uint64_t)

/* --- the kernels ------------------------------------------------------------------------------------------ */

/* The inner loops have constant bounds: Clang unrolls them, and x stays in registers. */
#define SUMS(T) \
    KERNEL void tly_sums_##T(struct tly_sums s) \
    { \
        for (uint64_t i = FIRST; i < s.count; i += STRIDE) { \
            T x[TLY_FOLD_MAX]; \
            for (int j = 0; j < TLY_FOLD_MAX; j++) \
                if (j < s.fold.n) \
                    x[j] = load_##T(&s.fold, s.in[j], i); \
            for (int step = 1; step < TLY_FOLD_MAX; step *= 2) \
                for (int j = 0; j + step < TLY_FOLD_MAX; j += 2 * step) \
                    if (j + step < s.fold.n) \
                        x[j] = add_##T(&s.fold, x[j], x[j + step]); \
            store_##T(&s.fold, x[0], s.out, i); \
        } \
    }
TLY_SUMS_TYPES(SUMS)
