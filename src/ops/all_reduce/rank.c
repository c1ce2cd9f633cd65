/* rank.c - sums, at a rank: all-reduce, reduce, reduce-scatter. */
#include "ops/call.h"

const struct tly_call tly_call_push_pull = {
    .function = "tally_push_pull",
    .collective = "all_reduce",
    .reduces = true,
    .shaped = true,
    .moves = true};

const struct tly_call tly_call_reduce = {
    .function = "tally_reduce",
    .collective = "reduce",
    .root = "to",
    .reduces = true,
    .shaped = true,
    .moves = true};

const struct tly_call tly_call_reduce_scatter = {
    .function = "tally_reduce_scatter",
    .collective = "reduce_scatter",
    .reduces = true,
    .pieces = true,
    .moves = true};
