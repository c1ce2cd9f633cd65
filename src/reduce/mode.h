/* mode.h - the calling thread's floating-point mode.  The entry points of this folder save it, set the default (to nearest, subnormals
 * kept, no traps) and restore it.  In the default mode exceptions that they raise stay raised. */
#ifndef TLY_MODE_H
#define TLY_MODE_H

#if defined __x86_64__
#include <xmmintrin.h>
typedef unsigned int tly_mode;
enum { TLY_MODE = 0x1f80, TLY_MODE_RAISED = 0x3f }; /* to nearest, no FTZ, no DAZ, all traps masked; flags */
static inline tly_mode tly_mode_default(void)
{
    tly_mode saved = _mm_getcsr();
    if ((saved & ~TLY_MODE_RAISED) != TLY_MODE) /* to set it takes as long as a few sums */
        _mm_setcsr(TLY_MODE);
    return saved;
}
static inline void tly_mode_restore(tly_mode saved)
{
    if ((saved & ~TLY_MODE_RAISED) != TLY_MODE)
        _mm_setcsr(saved);
}
#elif defined __aarch64__
#include <stdint.h>
typedef uint64_t tly_mode;
static inline tly_mode tly_mode_default(void)
{
    tly_mode saved;
    __asm__ volatile("mrs %0, fpcr\n\tmsr fpcr, xzr" : "=&r"(saved)::"memory");
    return saved;
}
static inline void tly_mode_restore(tly_mode saved)
{
    __asm__ volatile("msr fpcr, %0" ::"r"(saved) : "memory");
}
#else
#include <fenv.h>
typedef fenv_t tly_mode;
static inline tly_mode tly_mode_default(void)
{
    tly_mode saved;
    fegetenv(&saved);
    fesetenv(FE_DFL_ENV);
    return saved;
}
static inline void tly_mode_restore(tly_mode saved)
{
    fesetenv(&saved);
}
#endif

#endif
