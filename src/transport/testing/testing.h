/* testing.h - media for tests.  None of them is in the library. */
#ifndef TLY_TESTING_H
#define TLY_TESTING_H

#include "transport/medium.h"

extern const struct tly_medium tly_late, tly_null;

/* What happens to packets, in thousandths of them. */
struct tly_faults {
    uint32_t delay, drop, duplicate, flip, truncate;
};
/* A medium that is `inner` with faults, which the seed repeats.  There is one at a time. */
const struct tly_medium *tly_fault_wrap(const struct tly_medium *inner, const struct tly_faults *faults,
                                        uint32_t seed);
/* How often something has happened since. */
uint32_t tly_fault_count(void);

#endif
