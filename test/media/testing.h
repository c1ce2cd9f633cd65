/* testing.h - media for tests.  None of them is in the library. */
#ifndef TLY_TESTING_H
#define TLY_TESTING_H

#include "transport/medium.h"

extern const struct tly_medium tly_late, tly_null;

struct tly_faults {
    uint32_t delay, drop, duplicate, flip, truncate; /* in thousandths of the packets */
    uint32_t spared; /* the first packets of each channel: nothing happens to them */
    uint32_t most;   /* times that anything happens; 0: no limit */
    bool apart;      /* not by address, though the inner medium is: only what may use any medium takes it */
};
/* A medium that is `inner` with faults, which the seed repeats.  There is one at a time. */
const struct tly_medium *tly_fault_wrap(const struct tly_medium *inner, const struct tly_faults *faults,
                                        uint32_t seed);
/* How often something has happened since. */
uint32_t tly_fault_count(void);

#endif
