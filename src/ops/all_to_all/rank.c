/* rank.c - an all-to-all, gather or scatter, at a rank. */
#include "ops/call.h"

const struct tly_call tly_call_alltoall = {
    .function = "tally_alltoall", .collective = "all_to_all", .pieces = true, .paired = true, .moves = true};

const struct tly_call tly_call_gather = {
    .function = "tally_gather",
    .collective = "gather",
    .root = "to",
    .pieces = true,
    .paired = true,
    .moves = true};

const struct tly_call tly_call_scatter = {
    .function = "tally_scatter",
    .collective = "scatter",
    .root = "from",
    .pieces = true,
    .paired = true,
    .moves = true};
