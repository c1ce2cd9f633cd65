/* comm.h - the communicator: a rank's side of a job.
 *
 * tally_comm_open() (comm.c) finds this rank's place (membership/place.c), starts the coordinator in rank 0, connects to it
 * (membership/connect.c), starts a service, gets the roster, connects to all services (peer.c), and starts the thread "tally-comm".
 * The first rank of a machine keeps its service.  tally_comm_close() waits for its operations, says GOODBYE to services and
 * coordinator, and stays until all ranks have, at most 10 s.
 *
 * State has an owner.  struct tally_comm and struct tally_op hold structs by value, and only the files of one name its
 * fields (test/checks/test_owners.py).  A lock is in the struct that it guards.  ARCHITECTURE.md has the order of locks.
 *
 * The rooms: op/ has what an operation is and its life, epoch/ which service sums what and what is reported of it, path/ the
 * way of parts.  The folder's own files are what callers ask for, and what all rooms use.
 *
 * A file may use the files above it in this list, whatever their rooms, and includes only headers of which it uses
 * something (test/checks/test_layers.py):
 *
 *   inbox.c, state.c, path/post.c           what other threads have for the loop; how a communicator stands, and its
 *                                           failure; control frames
 *   op/part.c, op/carriers.c, op/group.c    the states of a part; who carries for a machine; lists of ranks
 *   op/replica.c, op/names.c                what a rank has of a shared tensor; names and keys
 *   op/spec.c, op/tensor.c                  what ranks compare; cuts
 *   op/handle.c, op/events.c                the caller's handle; the completion queue
 *   epoch/epoch.c, op/rounds.c              which service sums what; what a joined rank had submitted
 *   epoch/traffic.c, epoch/pace.c           figures for the coordinator and for users
 *   path/stages.c, path/chain.c             which stage is where; parts go from stage to stage
 *   path/topology.c, path/gpus.c            which GPUs of the machine sum in groups; they agree on it
 *   path/stager.c                           the stage of a GPU's tensors
 *   path/queue.c, path/net.c                parts wait for their turn; the last stage
 *   path/blocks.c                           memory for sums that lie in no output
 *   path/local.c, path/team.c               operations in shared memory; the stage of a machine's ranks
 *   path/parts.c, op/op.c                   parts, as operations' rooms need them; an operation's life in the loop
 *   path/moves.c                            parts of shared tensors go to other services
 *   path/keep.c, path/doubt.c, path/peer.c  results that not all ranks have; parts whose service is gone; a connection to
 *                                           a service
 *   elements.c                              sizes and norms, without a communicator
 *   options.c, listen.c, abort.c            options of other versions; the coordinator's socket; a rank that leaves
 *   submit.c, calls.c, op/joining.c         from a request to the loop; the calls of tally.h; tally_join
 *   shared.c                                the calls of tally.h for shared tensors
 *   epoch/follow.c, path/engine.c           changes of epoch; what shared memory calls
 *   epoch/report.c, comm.c                  tally_comm_report; open, close, the thread
 *
 * Two calls go upward: state.c tells comm.c of a failure through a pointer (`follows`), and src/local/ calls engine.c through
 * a table (struct tly_local_user). */
#ifndef TLY_COMM_COMM_H
#define TLY_COMM_COMM_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/list.h"
#include "base/loop.h"
#include "base/map.h"
#include "base/param.h"
#include "comm/epoch/epoch.h"
#include "comm/epoch/pace.h"
#include "comm/epoch/report.h"
#include "comm/epoch/traffic.h"
#include "comm/inbox.h"
#include "comm/op/active.h"
#include "comm/op/events.h"
#include "comm/op/group.h"
#include "comm/op/joining.h"
#include "comm/op/names.h"
#include "comm/path/chain.h"
#include "comm/path/engine.h"
#include "comm/path/keep.h"
#include "comm/path/stager.h"
#include "comm/path/team.h"
#include "comm/state.h"
#include "membership/coordinator.h"
#include "membership/member.h"
#include "membership/place.h"
#include "sched/sched.h"
#include "sum/service.h"
#include "tally/tally.h"
#include "trace/trace.h"

struct tly_epoch;
struct tly_peer;

/* The loop's thread, and the process that opened the communicator; comm.c. */
struct tly_running {
    struct tly_place place;
    pthread_t thread;
    bool started, named; /* `named`: log lines of the process have its rank */
    int home;            /* the thread's NUMA node; -1: there is only one */
    struct tly_hook hook;
};

struct tally_comm {
    struct tly_origin origin;
    struct tly_params params;
    struct tly_coordinator *coordinator;
    struct tly_service *service;
    struct tly_member member;
    struct tly_loop loop;
    struct tly_running running;

    /* fixed once open */
    int rank, size, local_rank, local_size, machine, machines;
    uint32_t part_least;    /* bytes: the longest part of no epoch is shorter */
    struct tly_peer *peers; /* room for TLY_MAX_SERVICES */

    /* changed by the loop under names.lock */
    atomic_int services;     /* places in the roster, of which some may be empty */
    struct tly_epoch *epoch; /* the newest */

    struct tly_names names;
    atomic_size_t copied; /* bytes of messages whose senders do not wait; no order with anything else */
    struct tly_inbox inbox;
    struct tly_local *local; /* owned; NULL: all goes through services.  Fixed once open, as the next */
    bool local_has_all;      /* operations of all ranks go there, too: not only groups' and teams' */
    struct tly_joining joining;
    struct tly_watched watched;
    struct tly_teams teams;

    /* owner: the loop */
    struct tly_epochs epochs;
    struct tly_keeps keeps;
    struct tly_list replicas; /* of struct tly_replica, by key; path/moves.c */
    struct tly_stagers stagers;
    struct tly_active active;
    struct tly_sched sched; /* parts, by priority, within credit and windows; in charge bytes */
    struct tly_leaving leaving;
    struct tly_reports reports;
    struct tly_pace pace;
    struct tly_own_traffic traffic;
    struct tly_trace *trace; /* owned; NULL: no timeline is wanted */

    struct tly_failure failure;
    struct tly_completions events;
};

/* state.c */
/* follows: what else a failure means. */
void tly_comm_begin(tally_comm *c, void (*follows)(tally_comm *c, int err));
/* It is open: from now on operations are waited for. */
void tly_comm_opened(tally_comm *c);
/* Seconds since. */
double tly_comm_age(const tally_comm *c);
/* Processor time (ns) that Tally's threads of this process have cost since then. */
uint64_t tly_comm_cpu(const tally_comm *c);
/* In the loop.  All ends: connections, operations, this rank's part in the job. */
void tly_comm_fail(tally_comm *c, int err, const char *sentence);
/* In the loop.  The job cannot go on.  The coordinator hears why, and says it to all; if it says nothing for `ns`, this rank
 * fails alone.  err: positive, or 0 where the coordinator may know better. */
void tly_comm_doom(tally_comm *c, int err, int64_t ns, const char *sentence);
void tly_comm_tick(tally_comm *c);
/* May it be used?  -ECHILD in a forked child, or why it has failed. */
int tly_comm_check(const tally_comm *c);
/* The first of these alone. */
int tly_comm_check_fork(const tally_comm *c);
bool tly_comm_is_forked(const tally_comm *c);
/* Nothing is under way, and nobody may still need what this rank has. */
bool tly_comm_is_idle(tally_comm *c);
/* Something has ended.  If it was the last, wake the thread that closes. */
void tly_comm_ended(tally_comm *c);
/* In the loop.  The communicator is being closed, and ends once nothing is under way.  False: nothing is,
 * or all has failed. */
bool tly_comm_drain(tally_comm *c);
/* Nothing is under way any more, or all has failed. */
void tly_comm_wait_idle(tally_comm *c, int64_t deadline);
/* In the loop.  This rank says goodbye; all have. */
void tly_comm_leave(tally_comm *c);
void tly_comm_all_left(tally_comm *c);
bool tly_comm_have_all_left(const tally_comm *c);
/* Until all have, or all has failed. */
void tly_comm_wait_left(tally_comm *c, int64_t deadline);

/* Why it has failed, positive; 0: it has not.  Pairs with the release in tly_comm_fail(): the sentence is written. */
static inline int tly_comm_failed(const tally_comm *c)
{
    return atomic_load_explicit(&c->failure.err, memory_order_acquire);
}

/* Once it has failed. */
static inline const char *tly_comm_sentence(const tally_comm *c)
{
    return c->failure.sentence;
}

/* In the loop: a failure is about to come. */
static inline bool tly_comm_is_doomed(const tally_comm *c)
{
    return c->failure.doom_at != 0;
}

/* In the loop: has this rank said goodbye? */
static inline bool tly_comm_leaves(const tally_comm *c)
{
    return c->leaving.goodbye_said;
}

/* The group of all ranks. */
static inline struct tally_group *tly_comm_all(tally_comm *c)
{
    return tly_groups_all(tly_names_groups(&c->names));
}

/* The service on a rank's own machine: what only that rank wants crosses no network card twice there. */
static inline uint16_t tly_service_of(const tally_comm *c, uint32_t rank)
{
    return (uint16_t)c->member.roster.ranks[rank].machine;
}

#endif
