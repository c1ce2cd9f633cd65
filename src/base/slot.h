/* slot.h - how much memory an input or a result takes at a service: a power of two, so that what one leaves suits the next. */
#ifndef TLY_SLOT_H
#define TLY_SLOT_H

#include <stdint.h>

enum { TLY_LEAST_SLOT = 256 };

/* bytes: up to 2^63. */
static inline uint64_t tly_slot_bytes(uint64_t bytes)
{
    uint64_t slot = TLY_LEAST_SLOT;
    while (slot < bytes)
        slot *= 2;
    return slot;
}

#endif
