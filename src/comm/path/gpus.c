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

/* A rank's answer. */
struct gpus_answer {
    bool can;
    char why[TLY_SENTENCE]; /* why not; "": because another rank cannot */
};

/* All ranks' `bytes`, one behind the other in `all`: a collective operation. */
static int gpus_exchange(tally_comm *c, const char *name, const void *own, void *all, size_t bytes)
{
    tally_op *op;
    int err = tally_allgather_into(c, name, own, all, bytes, TALLY_UINT8, NULL, &op);
    if (err)
        return err;
    err = tally_op_wait(op, -1);
    tally_op_free(op);
    return err;
}

static bool gpus_all_offer(const tally_comm *c, const struct tly_gpus_offer *all)
{
    bool offer = true;
    for (int i = 0; i < c->size; i++)
        offer &= all[i].place != 0;
    return offer;
}

/* -errno: the job fails. */
static int gpus_try(tally_comm *c, uint32_t each, struct tly_gpus_offer *all, struct gpus_answer *out)
{
    struct tly_gpus_offer own = {0};
    *out = (struct gpus_answer){.can = tly_gpus_offer(c->local, each, &own) == 0};
    if (!out->can)
        snprintf(out->why, sizeof out->why, "%s", tly_error());
    int err = gpus_exchange(c, "what GPUs show each other", &own, all, sizeof own);
    if (err || !out->can)
        return err;
    out->can = gpus_all_offer(c, all);
    if (out->can && tly_gpus_accept(c->local, all) != 0) {
        out->can = false;
        snprintf(out->why, sizeof out->why, "%s", tly_error());
    }
    return 0;
}

/* Rank 0 says why not. */
static bool gpus_all_can(const tally_comm *c, uint32_t each, const struct gpus_answer *all)
{
    int refuses = 0;
    bool can = true;
    for (int i = c->size - 1; i >= 0; i--) {
        can &= all[i].can;
        if (all[i].why[0])
            refuses = i;
    }
    if (!can && c->rank == 0)
        tly_log(TALLY_LOG_WARNING, "comm", "GPUs do not sum in groups of %u, and the host sums: rank %d: %s",
                each, refuses, all[refuses].why);
    return can;
}

static int gpus_agree(tally_comm *c, uint32_t each, struct tly_gpus_offer *offers,
                      struct gpus_answer *answers)
{
    struct gpus_answer own;
    int err = gpus_try(c, each, offers, &own);
    if (!err)
        err = gpus_exchange(c, "whether GPUs reach each other", &own, answers, sizeof own);
    if (err)
        return err;
    if (gpus_all_can(c, each, answers))
        return tly_gpus_begin(c->local);
    tly_gpus_close(c->local);
    return 0;
}

int tly_gpus_agree(tally_comm *c)
{
    const uint32_t each = (uint32_t)c->params.gpu_group;
    if (each < 2)
        return 0;
    if (!c->local_has_all || (each & (each - 1)) || (uint32_t)c->size % each) {
        tly_log(c->rank == 0 ? TALLY_LOG_WARNING : TALLY_LOG_DEBUG, "comm",
                "GPUs do not sum in groups of %u: a group has 2, 4 or 8 ranks, and a job has one machine, "
                "whose ranks are a multiple of that and share memory",
                each);
        return 0;
    }
    struct tly_gpus_offer *offers = calloc((size_t)c->size, sizeof *offers);
    struct gpus_answer *answers = calloc((size_t)c->size, sizeof *answers);
    int err = offers && answers ? gpus_agree(c, each, offers, answers) : tly_fail(ENOMEM, "out of memory");
    free(offers);
    free(answers);
    return err;
}
