/* ranges.h - a list of ranges of a buffer, in elements (struct tally_range): ascending and disjoint. */
#ifndef TLY_OPS_RANGES_H
#define TLY_OPS_RANGES_H

#include <stddef.h>

#include "tally/tally.h"

/* count 0: there is no list. */
struct tly_ranges {
    struct tally_range *list;
    size_t count;
};

#endif
