/* rank.c - a barrier, at a rank: as an all-reduce, without data. */
#include "comm/path/parts.h"
#include "ops/call.h"
#include "ops/local.h"

/* As the service's rule: the root says whether all ranks must come. */
static bool barrier_spares(uint32_t root)
{
    return !root;
}

static const struct tly_local_call barrier_local = {.givers = TLY_NONE_GIVE, .spares = barrier_spares};

const struct tly_call tly_call_barrier = {.cut = tly_parts_roll_call,
                                          .function = "tally_barrier",
                                          .empty = true,
                                          .local = &barrier_local,
                                          .collective = "barrier"};
