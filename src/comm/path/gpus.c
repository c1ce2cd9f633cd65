/* gpus.c - gpus.h: the ranks of each machine agree by words in shared memory (struct tly_gpus_start).
 *
 * The first rank chooses groups.  Then ranks show their buffers to each other (src/local/gpus.c), and try what they see.  One that
 * cannot keeps the machine's others from it, because all of them take the same way. */
#include "comm/path/gpus.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "comm/comm.h"
#include "comm/path/topology.h"
#include "local/gpus.h"

enum { PATIENCE_S = 60 };

/* Until this rank of the machine has taken the step. */
static int gpus_await(tally_comm *c, uint32_t rank, uint32_t step)
{
    const struct tly_gpus_start *start = tly_gpus_start(c->local, rank);
    int64_t until = tly_now() + PATIENCE_S * TLY_SEC;
    while (atomic_load_explicit(&start->step, memory_order_acquire) < step) {
        int err = tly_comm_failed(c);
        if (err)
            return tly_fail(err, "%s", tly_comm_sentence(c));
        if (tly_now() > until)
            return tly_fail(ETIMEDOUT, "rank %u of this machine has not said what its GPU can do",
                            tly_watched_neighbours(&c->watched)[rank]);
        poll(NULL, 0, 1);
    }
    return 0;
}

static int gpus_take_step(tally_comm *c, struct tly_gpus_start *own, uint32_t step)
{
    int err = 0;
    atomic_store_explicit(&own->step, step, memory_order_release);
    for (uint32_t i = 0; i < (uint32_t)c->local_size && !err; i++)
        err = gpus_await(c, i, step);
    return err;
}

static bool gpus_all_offer(const tally_comm *c)
{
    bool offer = true;
    for (uint32_t i = 0; i < (uint32_t)c->local_size; i++)
        offer &= tly_gpus_start(c->local, i)->offer.place != 0;
    return offer;
}

/* The machine's first rank says why not. */
static bool gpus_all_can(const tally_comm *c, uint32_t each)
{
    int refuses = 0;
    bool can = true;
    for (int i = c->local_size - 1; i >= 0; i--) {
        const struct tly_gpus_start *start = tly_gpus_start(c->local, (uint32_t)i);
        can &= start->can;
        if (start->why[0])
            refuses = i;
    }
    if (!can && c->local_rank == 0)
        tly_warn("comm", "GPUs do not sum in groups of %u, and the host sums: rank %u: %s", each,
                 tly_watched_neighbours(&c->watched)[refuses],
                 tly_gpus_start(c->local, (uint32_t)refuses)->why);
    return can;
}

/* This rank's GPU is lost: fail the job, so that all ranks hear rank and call. */
static int gpus_lose(tally_comm *c)
{
    int err;
    tly_inbox_break(&c->inbox, ENODEV, tly_error());
    tly_loop_wake(&c->loop);
    while ((err = tly_comm_failed(c)) == 0)
        poll(NULL, 0, 1);
    return tly_fail(err, "%s", tly_comm_sentence(c));
}

/* This rank has tried it with this result.  Whether it can goes to the others, unless its GPU is lost.  -errno: the job fails. */
static int gpus_say(tally_comm *c, struct tly_gpus_start *own, int err, uint32_t step)
{
    if (err == -ENODEV)
        return gpus_lose(c);
    own->can = !err;
    if (err)
        snprintf(own->why, sizeof own->why, "%s", tly_error());
    return gpus_take_step(c, own, step);
}

/* -errno: the job fails. */
static int gpus_try(tally_comm *c, const struct tly_gpus_choice *choice)
{
    struct tly_gpus_start *own = tly_gpus_start(c->local, (uint32_t)c->local_rank);
    int err = gpus_say(c, own, tly_gpus_offer(c->local, choice, &own->offer), TLY_GPUS_OFFERED);
    if (err)
        return err;
    if (gpus_all_offer(c)) {
        err = gpus_say(c, own, tly_gpus_accept(c->local), TLY_GPUS_ANSWERED);
    } else {
        own->can = false;
        err = gpus_take_step(c, own, TLY_GPUS_ANSWERED);
    }
    if (err)
        return err;
    if (gpus_all_can(c, choice->each))
        tly_gpus_begin(c->local);
    else
        tly_gpus_close(c->local);
    return 0;
}

/* Groups that the user has declared; all of a group own parts. */
static bool gpus_are_declared(const tally_comm *c, struct tly_gpus_choice *out)
{
    const uint32_t each = (uint32_t)c->params.gpu_group;
    *out = (struct tly_gpus_choice){.each = each, .owners = each};
    for (int i = 0; i < c->local_size; i++)
        out->owner[i] = (uint8_t)i;
    if (!(each & (each - 1)) && (uint32_t)c->local_size % each == 0)
        return true;
    if (c->local_rank == 0)
        tly_warn("comm",
                 "GPUs do not sum in groups of %u: a group has 2, 4 or 8 ranks, and a machine's ranks are a "
                 "multiple of that",
                 each);
    return false;
}

/* How many of the machine's ranks have a GPU, and the first one that has none (0: all have). */
static int gpus_count(const tally_comm *c, int *without)
{
    int count = 0;
    *without = 0;
    for (int i = c->local_size - 1; i >= 0; i--)
        if (tly_gpus_address(c->local, (uint32_t)i)[0])
            count++;
        else
            *without = i;
    return count;
}

/* The first rank's choice.  -errno: the job fails. */
static int gpus_choose(tally_comm *c, struct tly_gpus_choice *out)
{
    struct tly_gpus_start *first = tly_gpus_start(c->local, 0);
    int without;
    if (c->local_rank == 0) {
        if (gpus_count(c, &without) == c->local_size) {
            tly_topology_choose(c, &first->choice);
        } else {
            first->choice = (struct tly_gpus_choice){.each = 1};
            snprintf(first->choice.why, sizeof first->choice.why,
                     "rank %u had no CUDA context when the job started",
                     tly_watched_neighbours(&c->watched)[without]);
        }
        atomic_store_explicit(&first->step, TLY_GPUS_CHOSEN, memory_order_release);
    }
    int err = gpus_await(c, 0, TLY_GPUS_CHOSEN);
    *out = first->choice;
    return err;
}

int tly_gpus_agree(tally_comm *c)
{
    const bool declared = c->params.gpu_group > 1;
    struct tly_gpus_choice choice;
    int without;
    if (c->params.gpu_group == 1 ||
        (!declared && !(c->local && c->local_size > 1 && gpus_count(c, &without) > 0)))
        return 0;
    if (!c->local_has_all && !tly_teams_push(&c->teams)) {
        tly_log(
            c->rank == 0 && declared ? TALLY_LOG_WARNING : TALLY_LOG_DEBUG, "comm",
            "GPUs do not sum in groups: the ranks of each machine must share memory, several on some, and "
            "be a node of the tree over ranks");
        return 0;
    }
    if (declared)
        return gpus_are_declared(c, &choice) ? gpus_try(c, &choice) : 0;
    int err = gpus_choose(c, &choice);
    return err || choice.each < 2 ? err : gpus_try(c, &choice);
}

void tly_gpus_text(const tally_comm *c, char *out, size_t size)
{
    out[0] = '\0';
    if (!c->local || c->params.gpu_group == 1)
        return;
    const struct tly_gpus_choice *choice = &tly_gpus_start(c->local, 0)->choice;
    if (tly_gpus_device(c->local))
        snprintf(out, size, ", GPUs in groups of %u", tly_gpus_each(c->local));
    else if (choice->each == 1)
        snprintf(out, size, ", GPUs one by one (%s)", choice->why);
}
