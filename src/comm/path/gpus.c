/* gpus.c - gpus.h: a machine's ranks show their buffers to each other (src/local/gpus.c), and try what they see.  One that cannot
 * keeps the others from it, because all ranks of a machine take the same way.  Machines decide each for itself. */
#include "comm/path/gpus.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/log.h"
#include "comm/comm.h"
#include "local/gpus.h"

/* A rank's answer. */
struct gpus_answer {
    bool can;
    char why[TLY_SENTENCE]; /* why not; "": because another rank cannot */
};

/* May the ranks of this machine be in groups of so many? */
static bool gpus_may_be(const tally_comm *c, uint32_t each)
{
    return c->local && !(each & (each - 1)) && (uint32_t)c->local_size % each == 0;
}

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

/* What this machine's ranks have put into `all`, of so many bytes each. */
static void gpus_pick(const tally_comm *c, const void *all, void *out, size_t bytes)
{
    for (int i = 0; i < c->local_size; i++)
        memcpy((uint8_t *)out + (size_t)i * bytes,
               (const uint8_t *)all + tly_watched_neighbours(&c->watched)[i] * bytes, bytes);
}

static bool gpus_all_offer(const tally_comm *c, const struct tly_gpus_offer *ours)
{
    bool offer = true;
    for (int i = 0; i < c->local_size; i++)
        offer &= ours[i].place != 0;
    return offer;
}

/* -errno: the job fails. */
static int gpus_try(tally_comm *c, uint32_t each, struct tly_gpus_offer *all, struct gpus_answer *out)
{
    struct tly_gpus_offer own = {0}, ours[TLY_LOCAL_RANKS];
    *out = (struct gpus_answer){.can = gpus_may_be(c, each) && tly_gpus_offer(c->local, each, &own) == 0};
    if (!out->can && gpus_may_be(c, each))
        snprintf(out->why, sizeof out->why, "%s", tly_error());
    int err = gpus_exchange(c, "what GPUs show each other", &own, all, sizeof own);
    if (err || !out->can)
        return err;
    gpus_pick(c, all, ours, sizeof own);
    out->can = gpus_all_offer(c, ours);
    if (out->can && tly_gpus_accept(c->local, ours) != 0) {
        out->can = false;
        snprintf(out->why, sizeof out->why, "%s", tly_error());
    }
    return 0;
}

/* The machine's first rank says why not. */
static bool gpus_all_can(const tally_comm *c, uint32_t each, const struct gpus_answer *ours)
{
    int refuses = -1;
    bool can = true;
    for (int i = c->local_size - 1; i >= 0; i--) {
        can &= ours[i].can;
        if (ours[i].why[0])
            refuses = i;
    }
    if (can || c->local_rank != 0)
        return can;
    if (refuses < 0)
        tly_warn("comm",
                 "GPUs do not sum in groups of %u: a group has 2, 4 or 8 ranks, and a machine's ranks are a "
                 "multiple of that and share memory",
                 each);
    else
        tly_warn("comm", "GPUs do not sum in groups of %u, and the host sums: rank %u: %s", each,
                 tly_watched_neighbours(&c->watched)[refuses], ours[refuses].why);
    return false;
}

static int gpus_agree(tally_comm *c, uint32_t each, struct tly_gpus_offer *offers,
                      struct gpus_answer *answers)
{
    struct gpus_answer own, ours[TLY_LOCAL_RANKS];
    int err = gpus_try(c, each, offers, &own);
    if (!err)
        err = gpus_exchange(c, "whether GPUs reach each other", &own, answers, sizeof own);
    if (err)
        return err;
    gpus_pick(c, answers, ours, sizeof own);
    if (gpus_all_can(c, each, ours))
        return tly_gpus_begin(c->local);
    tly_gpus_close(c->local);
    return 0;
}

int tly_gpus_agree(tally_comm *c)
{
    const uint32_t each = (uint32_t)c->params.gpu_group;
    if (each < 2)
        return 0;
    if (!c->local_has_all && !tly_teams_push(&c->teams)) {
        tly_log(
            c->rank == 0 ? TALLY_LOG_WARNING : TALLY_LOG_DEBUG, "comm",
            "GPUs do not sum in groups of %u: the ranks of each machine must share memory, several on some, "
            "and be a node of the tree over ranks",
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
