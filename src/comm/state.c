/* state.c - how a communicator stands: who this rank is, whether all is well, whether something is under way.
 *
 * `failed` is set once, with release, after the sentence; any thread may look.  What else a failure means is comm.c's to do
 * (comm->failing). */
#include <errno.h>
#include <stdio.h>

#include "base/error.h"
#include "base/event.h"
#include "base/fork.h"
#include "base/list.h"
#include "comm/comm.h"
#include "comm/epoch.h"
#include "comm/peer.h"
#include "tally/tally.h"

const char *tally_version(void)
{
    return TALLY_VERSION;
}

const char *tally_error(void)
{
    return tly_error();
}

int tally_comm_rank(const tally_comm *c)
{
    return c->rank;
}
int tally_comm_size(const tally_comm *c)
{
    return c->size;
}
int tally_comm_local_rank(const tally_comm *c)
{
    return c->local_rank;
}
int tally_comm_local_size(const tally_comm *c)
{
    return c->local_size;
}
int tally_comm_machine(const tally_comm *c)
{
    return c->machine;
}
int tally_comm_machine_count(const tally_comm *c)
{
    return c->machines;
}
int tally_comm_service_count(const tally_comm *c)
{
    tally_comm *lockable = (tally_comm *)c; /* the lock is no part of what its caller sees */
    int count = 0;
    pthread_mutex_lock(&lockable->names_lock);
    for (int i = 0; i < c->epoch->services; i++)
        count += c->epoch->incarnation[i] != 0;
    pthread_mutex_unlock(&lockable->names_lock);
    return count;
}

int tally_comm_status(const tally_comm *c, const char **sentence)
{
    /* Pairs with the release in tly_comm_fail(): the sentence is written. */
    int err = atomic_load_explicit(&c->failed, memory_order_acquire);
    if (sentence)
        *sentence = err ? c->sentence : "";
    return -err;
}

int tly_comm_check(const tally_comm *c)
{
    if (c->generation != tly_fork_generation())
        return tly_fail(ECHILD,
                        "the communicator was opened by process %d; a forked child must open one of its own",
                        c->opener);
    int err = atomic_load_explicit(&c->failed, memory_order_acquire);
    return err ? tly_fail(err, "%s", c->sentence) : 0;
}

bool tly_comm_is_idle(tally_comm *c)
{
    pthread_mutex_lock(&c->inbox_lock);
    bool idle = tly_list_empty(&c->active_ops) && tly_list_empty(&c->inbox);
    pthread_mutex_unlock(&c->inbox_lock);
    for (int i = 0; i < c->services && idle; i++)
        idle = tly_list_empty(&c->peers[i].kept) && tly_list_empty(&c->peers[i].doubted);
    return idle;
}

void tly_comm_ended(tally_comm *c)
{
    if (c->draining && tly_comm_is_idle(c))
        tly_event_set(&c->idle);
}

void tly_comm_fail(tally_comm *c, int err, const char *sentence)
{
    if (atomic_load_explicit(&c->failed, memory_order_relaxed))
        return;
    /* To who waits for an operation -ETIMEDOUT means that the waiting has ended, not the operation. */
    if (err == ETIMEDOUT && c->opened_at)
        err = ECONNRESET;
    snprintf(c->sentence, sizeof c->sentence, "%s", sentence);
    atomic_store_explicit(&c->failed, err, memory_order_release);
    c->failing(c, err);
}
