/* state.c - how a communicator stands: who this rank is, whether all is well, whether something is under way.
 *
 * The failure's error is set once, with release, after the sentence; any thread may look.  What else a failure means is
 * comm.c's to do (`follows`). */
#include <errno.h>
#include <stdio.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/event.h"
#include "base/fork.h"
#include "base/list.h"
#include "base/thread.h"
#include "comm/comm.h"
#include "comm/epoch/epoch.h"
#include "comm/op/active.h"
#include "comm/path/peer.h"
#include "comm/state.h"
#include "membership/member.h"
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
    bool forked = tly_comm_is_forked(c);    /* then nothing changes any more, and nobody may unlock it */
    int count = 0;
    if (!forked)
        tly_names_lock(&lockable->names);
    for (int i = 0; i < c->epoch->services; i++)
        count += c->epoch->incarnation[i] != 0;
    if (!forked)
        tly_names_unlock(&lockable->names);
    return count;
}

int tally_comm_status(const tally_comm *c, const char **sentence)
{
    int err = tly_comm_failed(c);
    if (sentence)
        *sentence = err ? c->failure.sentence : "";
    return -err;
}

void tly_comm_begin(tally_comm *c, void (*follows)(tally_comm *c, int err))
{
    c->origin = (struct tly_origin){
        .generation = tly_fork_generation(), .opener = getpid(), .cpu_before = tly_thread_cpu()};
    c->failure.follows = follows;
}

void tly_comm_opened(tally_comm *c)
{
    c->origin.opened_at = tly_now();
}

double tly_comm_age(const tally_comm *c)
{
    return (double)(tly_now() - c->origin.opened_at) / TLY_SEC;
}

uint64_t tly_comm_cpu(const tally_comm *c)
{
    return tly_thread_cpu_since(c->origin.cpu_before);
}

bool tly_comm_is_forked(const tally_comm *c)
{
    return c->origin.generation != tly_fork_generation();
}

int tly_comm_check_fork(const tally_comm *c)
{
    if (!tly_comm_is_forked(c))
        return 0;
    return tly_fail(ECHILD,
                    "the communicator was opened by process %d; a forked child must open one of its own",
                    c->origin.opener);
}

int tly_comm_check(const tally_comm *c)
{
    if (!c)
        return tly_fail(EINVAL, "the communicator is NULL: open one first");
    int err = tly_comm_check_fork(c);
    if (err)
        return err;
    err = tly_comm_failed(c);
    return err ? tly_fail(err, "%s", c->failure.sentence) : 0;
}

bool tly_comm_is_idle(tally_comm *c)
{
    bool idle = tly_active_is_empty(&c->active) && tly_inbox_is_empty(&c->inbox);
    for (int i = 0; i < c->services && idle; i++)
        idle = tly_list_empty(&c->peers[i].kept) && tly_list_empty(&c->peers[i].doubted);
    return idle;
}

void tly_comm_ended(tally_comm *c)
{
    if (c->leaving.draining && tly_comm_is_idle(c))
        tly_event_set(&c->leaving.idle);
}

bool tly_comm_drain(tally_comm *c)
{
    c->leaving.draining = true;
    return !tly_comm_failed(c) && !tly_comm_is_idle(c);
}

void tly_comm_wait_idle(tally_comm *c, int64_t deadline)
{
    tly_event_wait(&c->leaving.idle, deadline);
}

void tly_comm_leave(tally_comm *c)
{
    c->leaving.goodbye_said = true;
}

void tly_comm_all_left(tally_comm *c)
{
    tly_event_set(&c->leaving.left);
}

bool tly_comm_have_all_left(const tally_comm *c)
{
    return tly_event_is_set(&c->leaving.left);
}

void tly_comm_wait_left(tally_comm *c, int64_t deadline)
{
    tly_event_wait(&c->leaving.left, deadline);
}

void tly_comm_fail(tally_comm *c, int err, const char *sentence)
{
    struct tly_failure *f = &c->failure;
    if (tly_comm_failed(c))
        return;
    /* tally_op_wait() returns -ETIMEDOUT where the waiting has ended and the operation has not. */
    if (err == ETIMEDOUT && c->origin.opened_at)
        err = ECONNRESET;
    snprintf(f->sentence, sizeof f->sentence, "%s", sentence);
    atomic_store_explicit(&f->err, err, memory_order_release);
    f->follows(c, err);
    tly_event_set(&c->leaving.idle);
    tly_event_set(&c->leaving.left);
}

void tly_comm_doom(tally_comm *c, int err, int64_t ns, const char *sentence)
{
    struct tly_failure *f = &c->failure;
    if (!f->doom_at) {
        snprintf(f->doom, sizeof f->doom, "%s", sentence);
        f->doom_at = c->loop.awake + ns;
    }
    tly_member_complain(&c->member, err, sentence);
}

void tly_comm_tick(tally_comm *c)
{
    if (c->failure.doom_at && c->loop.awake >= c->failure.doom_at)
        tly_comm_fail(c, ECONNRESET, c->failure.doom);
}
