/* check.h - invariants that only debug and sanitizer builds check: tly_check(condition) ends the process where the condition
 * does not hold.  TLY_CHECKS is 1 in those builds, for checks that need more than a condition. */
#ifndef TLY_CHECK_H
#define TLY_CHECK_H

#include <assert.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define TLY_CHECKS 1
#endif
#endif
#if !defined(TLY_CHECKS) && \
    (!defined(__OPTIMIZE__) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__))
#define TLY_CHECKS 1
#endif
#ifndef TLY_CHECKS
#define TLY_CHECKS 0
#endif

#if TLY_CHECKS
#define tly_check(condition) assert(condition)
#else
#define tly_check(condition) ((void)sizeof(condition))
#endif

#endif
