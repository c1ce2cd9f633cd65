/* gpus.c - gpus.h: all ranks show their buffers to each other (src/local/gpus.c), and try what they see.  One that cannot
 * keeps the others from it, because all ranks of a machine take the same way. */
#include "comm/path/gpus.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/error.h"
#include "base/log.h"
#include "comm/comm.h"
#include "local/gpus.h"

/* The ranks' answers, one behind the other: a collective operation. */
static int gpus_exchange(tally_comm *c, const struct tly_gpus_offer *own, struct tly_gpus_offer *all)
{
    tally_op *op;
    int err =
        tally_allgather_into(c, "what GPUs show each other", own, all, sizeof *own, TALLY_UINT8, NULL, &op);
    if (err)
        return err;
    err = tally_op_wait(op, -1);
    tally_op_free(op);
    return err;
}

static int gpus_all_can(tally_comm *c, bool *can)
{
    uint8_t own = *can, all = 0;
    tally_op *op;
    int err =
        tally_push_pull(c, "all GPUs reach each other", &own, &all, 1, TALLY_UINT8, TALLY_MIN, NULL, &op);
    if (err)
        return err;
    err = tally_op_wait(op, -1);
    tally_op_free(op);
    *can = all;
    return err;
}

/* -errno: the job fails.  *can: this rank is ready, or tly_error() says why not. */
static int gpus_try(tally_comm *c, uint32_t each, bool *can)
{
    struct tly_gpus_offer own, *all = calloc((size_t)c->size, sizeof *all);
    char why[TLY_SENTENCE];
    if (!all)
        return tly_fail(ENOMEM, "out of memory");
    *can = tly_gpus_offer(c->local, each, &own) == 0;
    snprintf(why, sizeof why, "%s", tly_error());
    int err = gpus_exchange(c, &own, all);
    if (!err && *can) {
        *can = tly_gpus_accept(c->local, all) == 0;
        snprintf(why, sizeof why, "%s", tly_error());
    }
    free(all);
    if (!err && !*can)
        tly_fail(ENOTSUP, "%s", why);
    return err;
}

int tly_gpus_agree(tally_comm *c)
{
    const uint32_t each = (uint32_t)c->params.gpu_group;
    const int level = c->rank == 0 ? TALLY_LOG_WARNING : TALLY_LOG_DEBUG;
    char why[TLY_SENTENCE];
    bool can = false;
    if (each < 2)
        return 0;
    if (!c->local_has_all || (each & (each - 1)) || (uint32_t)c->size % each) {
        tly_log(level, "comm",
                "GPUs do not sum in groups of %u: a group has 2, 4 or 8 ranks, and the job one machine with "
                "a multiple of "
                "these, which share memory",
                each);
        return 0;
    }
    int err = gpus_try(c, each, &can);
    snprintf(why, sizeof why, "%s", can ? "another rank cannot" : tly_error());
    if (!err)
        err = gpus_all_can(c, &can);
    if (err)
        return err;
    if (can)
        return tly_gpus_begin(c->local);
    tly_log(level, "comm", "GPUs do not sum in groups of %u, and the host sums: %s", each, why);
    return 0;
}
