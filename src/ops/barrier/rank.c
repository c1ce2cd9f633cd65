/* rank.c - a barrier, at a rank. */
#include "comm/parts.h"
#include "ops/call.h"

const struct tly_call tly_call_barrier = {.cut = tly_parts_roll_call,
                                          .function = "tally_barrier",
                                          .empty = true,
                                          .shared = true,
                                          .collective = "barrier"};
