/* kind.h - kinds of operations, as facts.  Pure functions. */
#ifndef TLY_COMM_KIND_H
#define TLY_COMM_KIND_H

#include <stdbool.h>
#include <stdint.h>

#include "tally/tally.h"
#include "wire/frame.h"

/* Pieces between two ranks, whose lengths only these know. */
static inline bool tly_kind_is_exchange(uint8_t kind)
{
    return kind >= TALLY_ALLTOALL && kind <= TALLY_SCATTER;
}

static inline bool tly_kind_is_message(uint8_t kind)
{
    return kind == TALLY_MESSAGE || kind == TLY_PROBE;
}

/* Does its data cross the cards as soon as all ranks have submitted it?  A message may stand open for long before it moves. */
static inline bool tly_kind_is_planned(uint8_t kind)
{
    return kind >= TALLY_PUSH_PULL && kind <= TALLY_SCATTER && kind != TALLY_BARRIER;
}

static inline bool tly_kind_takes_shape(uint8_t kind)
{
    return kind != TALLY_REDUCE_SCATTER && !tly_kind_is_exchange(kind) && !tly_kind_is_message(kind);
}

#endif
