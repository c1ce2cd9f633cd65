/* rank.c - messages and probes, at a rank. */
#include "ops/call.h"

const struct tly_call tly_call_message = {.function = "message", .message = true};

const struct tly_call tly_call_probe = {.function = "probe", .message = true};
