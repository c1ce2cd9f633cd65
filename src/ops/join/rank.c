/* rank.c - the handle of a rank that has joined: an operation that no frame carries (comm/op/joining.c). */
#include "ops/call.h"

const struct tly_call tly_call_join = {.function = "tally_join", .empty = true, .finds = true};
