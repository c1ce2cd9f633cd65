/* internal.h - what the files of the communication service share.
 *
 *   comm.c    open, close, the thread                  tensor.c  names, keys, specs, parts and their services
 *   calls.c   the calls of tally.h that submit        peer.c    one service: parts out, results in
 *   submit.c  from a request to the loop              parts.c   which parts an operation has
 *   op.c      operations in the loop                  handle.c  the caller's handle of an operation
 *   group.c   ranks that operate among themselves
 *   queue.c   parts as tasks of the scheduling core; the line of started parts
 *   epoch.c   which service sums which part           follow.c  changes of epoch
 *   keep.c    results that not all ranks have         doubt.c   parts whose service is gone, or was out of reach
 *   state.c   how a communicator stands               post.c    control frames to services, headers of parts
 *   events.c  the completion queue                    report.c  tally_comm_report
 *   local.c   operations in shared memory, and its pool
 *   engine.c  the engine in shared memory, and what it calls
 *   team.c    the ranks of a machine that push once, where there are several machines
 *   pace.c    predicted and reached speed, and who holds it up
 *   traffic.c what is seen of the connections, for the coordinator
 *   rounds.c  how often each tensor had been submitted when this rank joined
 *   joining.c this rank has no more input, and waits for the others
 */
#ifndef TLY_COMM_INTERNAL_H
#define TLY_COMM_INTERNAL_H

#include <stdatomic.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/event.h"
#include "base/fork.h"
#include "base/heap.h"
#include "base/list.h"
#include "base/map.h"
#include "base/param.h"
#include "join/coordinator.h"
#include "join/member.h"
#include "join/place.h"
#include "local/local.h"
#include "plan/plan.h"
#include "sched/sched.h"
#include "sum/pool.h"
#include "sum/service.h"
#include "tally/tally.h"
#include "trace/trace.h"
#include "transport/outbox.h"
#include "transport/transport.h"

enum { TLY_FEW_DIMS = 4 }; /* a tensor rarely has more */
enum {
    TLY_VERDICTS = 8192
}; /* of so many rounds that have failed the epoch is remembered, and of each tallyd's why */

enum part_state {
    PART_IDLE,
    PART_QUEUED,   /* in its service's heap */
    PART_ADMITTED, /* credit and window are taken; goes out in turn */
    PART_SENT,
    PART_DOUBTED, /* its service or the connection is gone: what has landed of it is to be said */
    PART_SAID,    /* that has been said; the service asks for what it needs */
    PART_LANDED,  /* the answer is in place */
};

/* What decides which service sums a part, the same on all ranks.  References: operations, promised rounds, and the
 * communicator, of the newest. */
struct epoch {
    struct tly_list node; /* comm->epochs */
    uint32_t number, references;
    int services, sharing; /* sharing: services with a share */
    uint32_t part_bytes;   /* longest part */
    uint64_t credit_bytes;
    uint64_t *incarnation;            /* owned: of each service; 0: none has this place */
    uint32_t *weight;                 /* owned */
    struct tly_plan_machine *machine; /* owned: of each service, with the ranks that push from it */
    uint32_t *listed;                 /* owned: of the list that was dealt last (tly_plan_late); the loop's */
};

/* Something that a service has delivered which may die alone: kept until all ranks have it (the service's `stable`),
 * since after the service's death this rank may be the only one that has it. */
struct keep {
    struct tly_list node; /* peer->kept, in the order of delivery; peer->doubted, after the service has gone;
                        * peer->decided */
    struct part *part;    /* whose operation waits for this; NULL: it does not */
    struct tly_frame head;
    uint8_t *data; /* copy, from comm->copies; NULL: the data are in the tensor, or there are none any more */
    uint32_t length;
    char *verdict; /* owned: it was one */
    int err;
    bool said;         /* among the doubted: the service has been told */
    struct peer *from; /* who gave it, if nothing here has waited for it; else NULL */
};

/* Tensors whose parts are dealt in one sequence; names_lock. */
struct plan {
    uint32_t users; /* tensors for which it is the latest */
    size_t count;
    struct planned {
        struct tensor *tensor;
        uint64_t bytes;
    } item[];
};

/* Unit of assignment, priority and preemption. */
struct part {
    struct tly_task task; /* while it is queued and admitted */
    struct tally_op *op;
    struct keep *keep;    /* landed, but the operation may not end before all ranks have it */
    struct part *next;    /* in its peer's line of admitted parts */
    struct tly_list node; /* comm->passed; inbox_lock */
    uint8_t *landing;     /* where the result belongs */
    const uint8_t *input; /* NULL: a request */
    uint64_t place;       /* in the tensor, or in the rank's piece of it */
    uint64_t piece;       /* between two ranks: bytes of that piece, which both must mean */
    uint32_t index, length, result_length;
    uint32_t order;  /* among the parts of its operation, as they are sent */
    uint32_t number; /* on the wire, as the two below; between two ranks each pair has numbers of its own */
    uint32_t group;
    uint32_t start;        /* of what is to be pushed; 0 but for what was asked for again */
    uint32_t sent, landed; /* bytes */
    uint32_t frames;       /* given to the link and not yet taken by the kernel */
    uint16_t owner;        /* service */
    uint8_t dtype;
    uint8_t state;
    bool known;     /* its service has heard of it */
    bool quiet;     /* we push it and do not want the result */
    bool offer;     /* its data goes when it is asked for */
    bool mark;      /* nothing but an error mark */
    bool scaled;    /* the input has been multiplied by prescale */
    bool homeward;  /* its result has landed */
    uint8_t stage;  /* which has it (enum stage_place) */
    int16_t err;    /* of that stage, positive; inbox_lock, until the loop has taken it */
    uint32_t bytes; /* of the tensor; on the wire it may have another length */
    uint32_t
        root; /* of a team's part, which is no broadcast: ranks that it is the sum of when all have pushed, less one */
    struct tly_local_piece shard; /* of a team's part that this rank carries */
};

/* Ranks that operate among themselves, and their numbers for calls without a name. */
struct tally_group {
    tally_comm *comm; /* borrowed */
    char *name;       /* owned; NULL: all ranks */
    uint64_t id;      /* hash of the name; 0: all ranks */
    uint64_t list;    /* hash of the list */
    uint32_t number;  /* of the list, on the wire; 0: all ranks in their order */
    int rank, size;   /* our place in it */
    uint32_t *ranks;  /* owned */
    uint64_t
        unnamed[TALLY_SCATTER + 1]; /* calls without a name of each kind; under names_lock, as those below */
    uint64_t ordered[256 - TALLY_SPACE_ORDERED];
    struct tly_map
        messages; /* how many there were: hash of sender, receiver and tag -> number, as a pointer */
};

/* A name in use. */
struct tensor {
    uint64_t key;
    uint64_t group; /* id */
    uint8_t kind, space;
    bool unnamed;     /* used once */
    uint8_t called;   /* kind of the operation, if it has no name: 0: it has one */
    bool even;        /* of an allgather without a name: all ranks give as much */
    uint32_t round;   /* next round's number */
    atomic_bool busy; /* an operation is in flight; set under names_lock, cleared by the loop (release) */
    struct spec {     /* what the ranks compare, but for the name */
        uint64_t count, digest, list;
        double prescale, postscale;
        int64_t shape[TLY_FEW_DIMS];
        uint32_t kind, dtype, reduction, root, ndim, even;
    } spec;                 /* of the last operation, */
    uint64_t spec_hash;     /* and the name's with it; 0: none */
    struct plan *plan_list; /* the latest that names it, or NULL; shared */
    int32_t priority;       /* of its last operation; the loop's */
    struct cut {
        uint64_t bytes; /* size, epoch and root (one more; 0: it has none) for which it was made */
        uint32_t epoch, root;
        struct piece {
            uint32_t length;
            uint16_t owner; /* service */
        } * pieces;         /* owned */
        uint32_t count;
        uint64_t credit; /* so much in flight suits its parts */
    } cut, plan;         /* for the size last used; for the size agreed on in a plan */
    char name[];
};

/* The places of stages, from the tensor outward (stage.h). */
enum stage_place { STAGE_TENSOR, STAGE_DEVICE, STAGE_TEAM, STAGE_CODEC, STAGE_NET };

struct tally_op {
    atomic_int references; /* the caller's handle, the loop, the completion queue */
    struct tly_event done;
    int status;                    /* written before `done` is set */
    char *sentence;                /* owned; likewise */
    unsigned generation;           /* of forks */
    tally_comm *comm;              /* borrowed; used by the loop alone, and by submission */
    struct tensor *tensor;         /* borrowed while in flight */
    struct tally_group *group;     /* borrowed likewise */
    struct tly_list node;          /* inbox, then comm->active_ops */
    struct tly_list event;         /* completion queue */
    atomic_bool queued, announced; /* its end is wanted on the completion queue; and is there */
    void *tag;

    uint8_t kind, dtype, reduction, space;
    uint32_t root, round;
    int32_t priority;
    uint64_t sequence; /* order of submission */
    double prescale, postscale;
    uint64_t count, bytes, key, spec, digest;
    uint32_t ndim;
    int64_t *shape; /* owned, or few_dims */
    int64_t few_dims[TLY_FEW_DIMS];
    char *note; /* owned: the caller's, or NULL */
    const uint8_t *input;
    uint8_t *output;
    bool mark;    /* nothing but an error mark */
    char *reason; /* owned: of a mark, or why this rank has cancelled it */

    struct epoch *epoch; /* of this round; once begun */
    struct part *parts;  /* owned */
    uint32_t part_count, parts_left;
    uint32_t ahead;            /* so many parts may be queued that have not landed; 0: all */
    uint32_t queued_parts;     /* of those in their order */
    uint64_t credit;           /* its parts go out while no more than this is in flight */
    uint64_t missing;          /* bytes that have not landed */
    struct tly_local *engine;  /* owned reference, if it goes through shared memory; else NULL */
    struct tly_local_op local; /* likewise, and if its team pushes it */
    bool team;                 /* the ranks of each machine push it together */
    bool entered;              /* ... and the engine has it */
    atomic_bool spread;        /* ... and has ended it well; no order with anything else */
    uint8_t chain;             /* stages between the tensor and the network: a bit for each place (stage.h) */
    bool begun;                /* these have begun it */
    uint8_t voucher, over_at;  /* of these: the last that vouches, or 0; which is over with it */
    uint32_t due, away;        /* parts that the voucher has yet to pass; that are not back at the tensor */
    void *own[STAGE_NET];      /* each stage's own */
    struct tly_list over;      /* comm->over; inbox_lock, as the next two */
    int lost_err;              /* of a stage that cannot go on; counts unless home soon says more */
    char lost[80];
    int64_t lost_at;   /* since when that is known; awake clock, 0: it is not */
    int64_t born;      /* awake clock */
    int64_t submitted; /* monotonic */
    char late[160];    /* ranks that home waits for, as it last said */
    bool asked;        /* home, shortly before TALLY_TIMEOUT, for whom it waits */
    bool patient;      /* its rank stood by when it was submitted */

    /* allgather */
    int64_t first_dim;   /* ours, as it goes out */
    int64_t *first_dims; /* owned: all ranks' */
    uint8_t *gathered;   /* owned */
    uint64_t gathered_bytes;
    bool listed; /* the list has come, or is not needed */
    bool even;   /* all ranks give as much, and the output is the caller's */

    /* messages */
    uint32_t from, to;
    uint64_t mailbox; /* hash of group and tag */
    uint8_t *copy;    /* owned: of what is sent, so that the sender need not wait */
    void *zeros;      /* owned, from the pool: input and output of a rank that stands in */
    int64_t found;    /* a probe's answer: a rank, */
    int source;       /* and its place in the group */

    /* an alltoall and its kin */
    int64_t *table; /* owned: elements for each of the group, then from each */
    uint32_t *
        pairs; /* owned: for each of the group where the parts for it begin and those from it; then the end */
};

/* What has gone over a connection since it began. */
struct glance {
    struct tly_link_load out, in; /* pushes; results, as the service has said */
    uint64_t received;            /* bytes that have come over the connection */
    uint64_t held_us;             /* something was handed over and not accepted */
};

/* The connection to one summation service.  Owner: the loop. */
struct peer {
    tally_comm *comm;
    uint32_t index;
    struct tly_link *link;
    char name[200];
    struct tly_sched_queue queue; /* of parts; its window, in charge bytes */
    struct part *first, *last;    /* admitted */
    struct tly_outbox outbox;
    uint64_t accepted;       /* of what was handed over */
    uint64_t received;       /* results landed */
    uint32_t told;           /* groups' lists that it knows */
    uint64_t stable;         /* of those, all ranks have */
    struct tly_list kept;    /* of keeps: results [stable, received) */
    struct tly_list doubted; /* of keeps: to be said, or said, to a service that may know of them */
    struct tly_list
        decided; /* of keeps: verdicts, for a rank that comes for one after this service has died */
    uint32_t decided_count;
    bool open;
    uint32_t skip;                         /* media that are not tried now: they have not connected, */
    uint32_t skip_ever;                    /* or an open connection by one was lost (tly_link_skip) */
    bool mortal;                           /* may die alone: a tallyd */
    uint64_t unasked;                      /* bytes of keeps from it for which nothing here has waited */
    bool known;                            /* has been open before */
    bool gone;                             /* out of the job */
    bool accused;                          /* the coordinator has been told that it cannot be reached */
    int losses;                            /* of the connection, lately */
    int64_t dialled_at, lost_at, retry_at; /* awake clock */
    uint64_t incarnation;
    bool reported; /* answer to tally_comm_report */
    uint64_t report[7];
    uint64_t held_us, held_since; /* monotonic, us; 0: nothing is in flight there */
    struct glance seen, before;   /* the last glance and the one before */
    bool glanced, answered;       /* `seen` is one, and has the service's answer; */
    bool comparable;              /* so has `before`, on the same connection */
};

/* How fast the job goes.  Owner: the loop; the first two are fixed in an epoch. */
struct pace {
    struct tly_plan_machine *machine; /* owned: of each service */
    double predicted;                 /* seconds for a byte of a large push_pull; 0: no telling */
    int64_t since;                    /* monotonic: the flight's begin */
    uint64_t flight;                  /* its bytes */
    bool counts;                      /* as far as it has come */
    uint64_t bytes;                   /* of all flights that count, and so on */
    int64_t ns;
    int pauses; /* flights in a row that took several times as long as usual */
};

/* What is told to the coordinator.  Owner: the loop; times are monotonic. */
struct traffic {
    uint64_t active_us, active_since; /* for how long operations were under way in all; 0: none is */
    uint64_t moved;                   /* bytes of parts that have landed */
    uint64_t active_seen, active_before, moved_seen, moved_before; /* at the last glances */
    uint64_t seen_at, before_at;                                   /* when these were, us */
    int64_t looked_at, asked_at; /* asked_at: services' answers are awaited; 0: not */
    bool begun;                  /* there are two glances of this epoch */
    uint64_t submitted,
        over;     /* us: the newest operation; the end of the last flight, 0: of one that does not count */
    bool patient; /* the flight has an operation whose rank minds no wait */
    struct tly_steps steps; /* since the coordinator was told last, */
    int64_t told_at;
};

/* tally_join().  Owner: the loop, unless it says otherwise. */
struct joining {
    atomic_bool on;           /* this rank has joined; set and cleared under names_lock too */
    uint32_t joins;           /* how often all ranks have; names_lock too */
    struct tally_op *op;      /* until it ends; NULL: this rank has not joined, or never will be done */
    struct tly_begun *rounds; /* owned: how often each tensor had been submitted by then, its epoch unused */
    size_t count;
    bool placed; /* among those that join: from now on nobody waits for this rank */
    bool drained,
        complete; /* that nothing of ours is under way has been said; all ranks have joined, and `last` last */
    uint32_t last;
    struct tly_map former;  /* tensors by their keys before the last join; for the timeline */
    struct tly_list wanted; /* stand-ins that the engine has asked for; inbox_lock */
};

/* The oldest operation in shared memory.  Owner: the loop. */
struct lateness {
    uint64_t key;
    uint32_t round;
    int64_t since, warn_after; /* awake clock; 0: there is none */
};

struct tally_comm {
    unsigned generation; /* of forks */
    int opener;          /* pid */
    struct tly_params params;
    struct tly_place place;
    struct tly_coordinator *coordinator;
    struct tly_service *service;
    struct tly_member member;
    struct tly_loop loop;
    pthread_t thread;
    bool thread_started;
    int home; /* the thread's NUMA node; -1: there is only one */

    /* fixed once open */
    int rank, size, local_rank, local_size, machine, machines;
    uint32_t part_least; /* bytes: the longest part of no epoch is shorter */
    struct peer *peers;  /* room for TLY_MAX_SERVICES */

    /* changed by the loop under names_lock */
    atomic_int services; /* places in the roster, of which some may be empty */
    uint32_t *weight;    /* the newest epoch's */
    int sharing;         /* services with a share */
    struct epoch *epoch; /* the newest */

    pthread_mutex_t names_lock; /* guards the next seven, and what is said so of groups */
    struct tly_map names;       /* key -> struct tensor */
    struct tally_group all;
    struct tly_map groups;      /* id -> struct tally_group; owned */
    struct tally_group **lists; /* owned array: a group for each number but 0 */
    uint32_t list_count;
    uint64_t plans, sequence;
    uint64_t engine_ops;  /* operations that were meant for shared memory, ever */
    atomic_size_t copied; /* bytes of messages whose senders do not wait; no order with anything else */
    atomic_bool
        stands_by; /* this rank has joined: its operations wait as long as the others live; no order with anything else */
    bool closing;

    pthread_mutex_t inbox_lock; /* guards the next three */
    struct tly_list inbox;      /* operations on their way to the loop */
    int broken_err;             /* the engine cannot go on: the loop is to say so; 0: it can */
    char broken[TLY_SENTENCE];

    struct tly_local *local; /* owned; NULL: all goes through services.  Fixed once open */
    struct joining joining;
    struct lateness lateness;
    uint64_t stuck_key; /* of the operation in shared memory that was the oldest at the last tick */
    uint32_t stuck_round;

    uint32_t *neighbours; /* owned: ranks of this machine; fixed once open */

    bool teams; /* each machine's ranks push large tensors together; fixed once open, as the next two */
    int lists_of_teams;           /* the most ranks that a machine has */
    struct tally_group **carry;   /* owned: for each of these a rank of each machine */
    struct tly_list passed, over; /* parts and operations of which stages have said something; inbox_lock */
    atomic_bool stages_say;       /* these are not empty; set (release) after, under inbox_lock */

    /* owner: the loop */
    struct tly_hook hook;
    struct tly_list epochs;
    /* Ring: the last rounds that ended here by a verdict.  Others may begin them yet. */
    struct tly_begun verdicts[TLY_VERDICTS];
    uint64_t verdict_count;
    struct tly_map promising; /* as they come with COMMIT */
    struct tly_map
        promised; /* rounds begun elsewhere in an older epoch, not here: hash of key and round -> epoch */
    uint32_t preparing;      /* the epoch that is being agreed on: nothing new begins; 0: none */
    int64_t preparing_since; /* awake clock */
    uint32_t prepared;       /* the epoch that was asked for first, since the last COMMIT */
    int64_t stood_by;        /* likewise: when it last did; no operation has waited for longer */
    uint32_t meeting;        /* the invitation to be answered once all services are met; 0: none */
    struct tly_pool copies;
    struct tly_list spare_keeps;
    struct tly_map active;      /* key -> struct tally_op */
    struct tly_list active_ops; /* by age */
    struct tly_sched sched;     /* parts, by priority, within credit and windows; in charge bytes */
    struct tly_event idle;      /* set when the last operation has ended while closing */
    bool draining;              /* closing: `idle` is wanted */
    struct tly_event left;      /* all ranks have said goodbye */
    bool goodbye_said;
    int64_t doom_at; /* awake clock: a lost service fails us then, if nobody explains it better */
    char doom[TLY_SENTENCE];
    uint32_t reports_missing;
    struct tly_event *report_done;
    _Atomic uint64_t ops_done, bytes_done; /* the loop's and the engine's */
    int64_t opened_at;
    struct pace pace;
    struct traffic traffic;
    struct tly_trace *trace; /* owned; NULL: no timeline is wanted */

    /* failure; `failed` is set (release) after the sentence */
    void (*failing)(tally_comm *c, int err); /* comm.c: end connections and operations */
    atomic_int failed;
    char sentence[TLY_SENTENCE];

    pthread_mutex_t events_lock; /* guards the next six */
    pthread_cond_t events_more;
    struct tly_list events; /* ended operations */
    struct tly_list logs;
    uint32_t log_count;
    bool events_closed, watching, log_ended;
    int events_waiting; /* threads inside tally_comm_next() */
};

/* state.c */
/* In the loop.  All ends: connections, operations, this rank's part in the job. */
void tly_comm_fail(tally_comm *c, int err, const char *sentence);
/* May it be used?  -ECHILD in a forked child, or why it has failed. */
int tly_comm_check(const tally_comm *c);
/* Nothing is under way, and nobody may still need what this rank has. */
bool tly_comm_is_idle(tally_comm *c);
/* Something has ended: wake who closes, if it was the last. */
void tly_comm_ended(tally_comm *c);

/* tensor.c */
/* joins: how often all ranks have joined; messages go on over that. */
uint64_t tly_tensor_key(uint32_t joins, uint64_t group, uint32_t kind, uint32_t space, const char *name);
/* All ranks have joined: names have new keys, and their rounds begin anew.  names_lock held.  -ENOMEM. */
int tly_tensor_rekey(tally_comm *c);
/* Find or make the tensor; names_lock held.  NULL: out of memory or a collision (sentence set). */
struct tensor *tly_tensor_get(tally_comm *c, const struct tally_group *g, uint32_t kind, uint32_t space,
                              const char *name);
/* The parts of an operation whose epoch is known, and their services, the same on all ranks; names_lock held.  bytes: of its
 * tensor, or 0 where only its home is asked for.  NULL: out of memory. */
const struct cut *tly_tensor_cut(tally_comm *c, const struct tally_op *op, uint64_t bytes);
/* From now on these are dealt in one sequence; names_lock held.  -ENOMEM. */
/* Is this operation's tensor of a list that goes from its end?  In the loop; names_lock held. */
bool tly_tensor_goes_backwards(const struct tally_op *op);
int tly_tensor_plan(tally_comm *c, uint32_t space, size_t count, const char *const names[],
                    const uint64_t bytes[]);
void tly_tensor_destroy(struct tensor *t);
/* The epoch's machines, each with the ranks that it has in the operation's group; the caller frees them.  NULL: out of
 * memory. */
struct tly_plan_machine *tly_tensor_machines(const tally_comm *c, const struct tally_op *op);
uint64_t tly_spec_hash(const struct tally_op *op);
/* What users read in its place: "'w'", "push_pull no. 7", or in an ordered space "all_reduce no. 16"; names_lock held or its
 * operation in flight. */
void tly_tensor_title(const struct tensor *t, char *out, size_t len);
enum { TLY_TITLE = 256 };
/* The same with the ranks of a group that has not all: "all_reduce no. 16 of ranks 0-1". */
const char *tly_op_title(const struct tally_op *op, char out[TLY_TITLE]);
/* Its title, a bar and what else ranks compare: "'w'|push_pull float32 [10, 3] sum" (sum/words.h). */
void tly_spec_text(const struct tally_op *op, char *out, size_t len);

/* group.c */
int tly_group_begin(tally_comm *c); /* all ranks; sentence set */
void tly_group_finish(tally_comm *c);
/* Give a list of ranks its number; names_lock held, or nobody else there yet.  -ENOMEM. */
int tly_group_number(tally_comm *c, struct tally_group *g);
/* "0-2, 5" */
void tly_group_text(const struct tally_group *g, char *out, size_t len);
/* The service behind `p` must know a group before its first part.  -ENOMEM. */
int tly_group_tell(struct peer *p, uint32_t number);

/* engine.c */
/* With all ranks: is shared memory the way?  Sets c->local.  -errno: the start has failed meanwhile. */
int tly_engine_open(tally_comm *c);
void tly_engine_tick(tally_comm *c);

/* local.c */
/* Does it go through shared memory?  ordered: it may meet operations of other kinds. */
bool tly_comm_is_local(const struct tally_op *op, bool ordered);
/* Fill in op->local down to the engine's own. */
void tly_comm_describe_local(struct tally_op *op);
void tly_comm_submit_local(tally_comm *c, struct tally_op *op);
/* The engine has ended it.  From any thread. */
void tly_comm_end_local(tally_comm *c, struct tally_op *op, int err, const char *sentence);
/* Operations that have ended, and their bytes. */
void tly_comm_count(const tally_comm *c, uint64_t *ops, uint64_t *bytes);

/* team.c */
/* Who would carry what, once the roster is known.  -ENOMEM, sentence set. */
int tly_team_begin_lists(tally_comm *c);
void tly_team_finish(tally_comm *c);
/* All ranks together, once all runs: can all machines' ranks share memory?  Sets c->teams.  As tally_op_wait(). */
int tly_team_agree(tally_comm *c);
/* In the loop: the operation's parts by a cut of all its bytes; names_lock held.  -ENOMEM. */
int tly_team_cut(tally_comm *c, struct tally_op *op, const struct cut *cut);
/* The engine's callbacks; from any thread. */
void tly_team_summed(void *comm, struct tly_local_piece *piece);
void tly_team_over(struct tally_op *op, int err, const char *sentence);
static inline bool tly_team_carries(const struct part *p)
{
    return p->shard.op != NULL;
}

/* parts.c */
/* A message of so many bytes goes with its offer. */
enum { TLY_KEPT_BYTES = 64 << 10 };
/* Cut an operation whose epoch is known: what is known of it by now.  -errno. */
int tly_parts_make(tally_comm *c, struct tally_op *op);
/* All first dimensions of a gathered tensor are known: cut each rank's piece, each part a broadcast from its owner.
 * -EOVERFLOW, -ENOMEM. */
int tly_parts_gather(tally_comm *c, struct tally_op *op);
/* The service on a rank's own machine: what only that rank wants crosses no network card twice there. */
static inline uint16_t tly_service_of(const tally_comm *c, uint32_t rank)
{
    return (uint16_t)c->member.roster.ranks[rank].machine;
}

/* handle.c */
void tly_op_unref(struct tally_op *op);
/* The operation ends: its name is free for the next one.  mark: it was an error mark, which does not take the name. */
void tly_op_forget_tensor(tally_comm *c, struct tensor *t, bool mark);

/* op.c */
void tly_op_end(tally_comm *c, struct tally_op *op, int err, const char *sentence);
/* What it waits for: "part 3 of 40, which tallyd 1 on ... sums, has been sent and is not answered". */
void tly_op_stage(const struct tally_op *op, char *out, size_t len);
/* The part's result is in place.  Returns the part, which may have moved and is to be settled or kept; NULL: all has failed. */
struct part *tly_op_landed(tally_comm *c, struct part *p);
/* A part that has landed needs to be waited for no longer. */
void tly_op_settled(tally_comm *c, struct part *p);
/* Take what was submitted into the loop's hands; the lock is held. */
void tly_op_drain(tally_comm *c);
/* Go through what stages have said. */
void tly_op_drain_stages(tally_comm *c);
/* This rank takes it back, for op->reason: all ranks hear of it, unless all have begun it. */
void tly_op_cancel(tally_comm *c, struct tally_op *op);
void tly_op_tick(tally_comm *c);
struct tally_op *tly_op_find(tally_comm *c, const struct tly_frame *f);
/* The part that a frame of this service is about, or NULL. */
struct part *tly_op_find_part(struct peer *peer, const struct tly_frame *f);

/* calls.c */
int tly_op_submit_barrier(tally_comm *c, const char *name, uint64_t digest, tally_op **op);

/* submit.c */
/* A handle of no tensor, which neither the loop nor a queue has.  NULL: out of memory. */
struct tally_op *tly_op_make(tally_comm *c, uint8_t kind, const struct tally_options *options);
/* Such a one ends; err is positive, or 0. */
void tly_op_finish(struct tally_op *op, int err, const char *sentence);

/* rounds.c */
/* List how often each tensor has been submitted, and results that are kept: a service that takes another's place may
 * still be told of an operation without a name that has ended.  names_lock held.  -ENOMEM. */
int tly_rounds_list(tally_comm *c);
/* A connection has been made, or this rank has joined or goes on: its service may have to know. */
void tly_rounds_tell(struct peer *p);

/* joining.c */
/* The callbacks of the member. */
void tly_joining_placed(void *comm);
void tly_joining_over(void *comm, uint32_t joins, uint32_t last, int err, const char *sentence);
/* The engine's callback; from any thread. */
void tly_joining_stand_in(void *comm, const struct tly_local_op *like);
/* In the loop, before each sleep, while this rank has joined: is it done?  When to look again, or INT64_MAX. */
int64_t tly_joining_look(tally_comm *c);
/* The communicator fails, or is closed. */
void tly_joining_end(tally_comm *c, int err, const char *sentence);
void tly_joining_finish(tally_comm *c);

/* queue.c */
int tly_queue_part(tally_comm *c, struct part *p);
void tly_queue_admit(tally_comm *c);
/* Take the parts of an operation that has failed out of all queues; tell services to forget them. */
void tly_queue_withdraw(tally_comm *c, struct tally_op *op);
/* This rank takes back what it has begun: its home says the reason to all, unless all have begun it. */
void tly_queue_cancel(tally_comm *c, struct tally_op *op);
/* The service wants the part from its byte `start` on. */
void tly_queue_again(tally_comm *c, struct part *p, uint32_t start);
/* The connection is no more: nothing is in flight there. */
void tly_queue_lost(struct peer *p);
void tly_queue_accepted(struct peer *peer, uint64_t accepted);

/* post.c */
/* Send a control frame to the service; out of memory: the communicator fails. */
void tly_peer_post(struct peer *p, const struct tly_frame *f, const void *data, size_t len);
/* The header of a push of this part, from which those of all other frames about it are made. */
void tly_peer_head(const struct part *p, struct tly_frame *f);

/* peer.c */
void tly_peer_init(struct peer *p, tally_comm *c, uint32_t index);
/* To the service of this place in the newest roster. */
/* The socket of tally_comm_listen(), if it is at this port and this process's; the caller's from here on.  Else -1. */
int tly_listen_take(uint16_t port);
int tly_peer_connect(struct peer *p);
/* A service of an invitation has been met or is gone: answer the invitation once none is missing. */
void tly_peer_met(tally_comm *c);
/* The service cannot be reached: tell the coordinator, which decides for all.  why: a sentence's end. */
void tly_peer_give_up(struct peer *p, const char *why);
/* Forget the connection; nothing follows. */
void tly_peer_drop(struct peer *p);
/* Try again, or give up, where the connection is lost. */
void tly_peer_tick(struct peer *p);
/* Ask an operation's home for whom it waits; the answer goes to op->late. */
void tly_peer_ask_late(struct peer *p, const struct tally_op *op);
void tly_peer_finish(struct peer *p);

/* events.c */
void tly_events_init(tally_comm *c);
void tly_events_finish(tally_comm *c);
void tly_events_close(tally_comm *c);
/* The operation has ended: wake who waits for it, and announce it if that is wanted. */
void tly_op_set_done(struct tally_op *op);

/* pace.c */
int tly_pace_init(tally_comm *c); /* of each epoch, once its weights are known; -ENOMEM, sentence set */
void tly_pace_finish(tally_comm *c);
/* An operation has been put into active_ops, has been taken out. */
void tly_pace_enters(tally_comm *c, const struct tally_op *op);
void tly_pace_leaves(tally_comm *c, const struct tally_op *op);
/* Seconds for a byte over the flights that count; 0: too few. */
double tly_pace_reached(const tally_comm *c);
/* "; at best ..." for the line at the start, "; large tensors at ..." for that at the end; or "". */
void tly_pace_foretell(const tally_comm *c, char *out, size_t len);
void tly_pace_sum_up(const tally_comm *c, char *out, size_t len);

/* traffic.c */
/* Another epoch holds: what is seen from now on is compared with nothing before. */
void tly_traffic_begin(tally_comm *c);
/* An operation has been put into active_ops; the last has been taken out. */
void tly_traffic_enters(tally_comm *c, const struct tally_op *op);
void tly_traffic_leaves(tally_comm *c);
/* Something is in flight to this service; something is so no longer. */
void tly_traffic_admitted(struct peer *p);
void tly_traffic_accepted(struct peer *p);
/* The service says what it has sent us. */
void tly_traffic_answered(struct peer *p, const struct tly_link_load *in);
void tly_traffic_tick(tally_comm *c);

/* The part has come to a stage of the timeline. */
static inline void tly_part_stamp(const struct part *p, enum tly_stage stage)
{
    const struct tally_op *op = p->op;
    tly_stamp(op->comm->trace, stage, p->owner, op->key, op->round, p->index, p->length);
}

/* Pieces between two ranks, whose lengths only these know. */
static inline bool tly_kind_is_exchange(uint8_t kind)
{
    return kind >= TALLY_ALLTOALL && kind <= TALLY_SCATTER;
}

static inline bool tly_kind_is_message(uint8_t kind)
{
    return kind == TALLY_MESSAGE || kind == TLY_PROBE;
}

static inline bool tly_kind_takes_shape(uint8_t kind)
{
    return kind != TALLY_REDUCE_SCATTER && !tly_kind_is_exchange(kind) && !tly_kind_is_message(kind);
}

static inline bool tly_op_is_sum(const struct tally_op *op)
{
    return op->kind == TALLY_PUSH_PULL || op->kind == TALLY_REDUCE || op->kind == TALLY_REDUCE_SCATTER;
}

static inline struct part *tly_part_of(struct tly_task *task)
{
    return tly_list_entry(task, struct part, task);
}

#endif
