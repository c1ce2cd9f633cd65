/* rank.c - a barrier, at a rank. */
#include "ops/call.h"

const struct tly_call tly_call_barrier = {
    .function = "tally_barrier", .collective = "barrier", .shaped = true};
