/* rank.c - a broadcast, at a rank. */
#include "ops/call.h"

const struct tly_call tly_call_broadcast = {
    .function = "tally_broadcast", .collective = "broadcast", .root = "from", .shaped = true, .moves = true};
