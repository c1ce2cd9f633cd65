/* rank.c - an all-gather, at a rank. */
#include "ops/call.h"

const struct tly_call tly_call_allgather = {
    .function = "tally_allgather", .collective = "all_gather", .shaped = true, .pieces = true, .moves = true};
