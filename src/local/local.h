/* local.h - operations in shared memory, without sockets and services: whole operations of ranks that share one machine, and a
 * team's work for operations of several machines.
 *
 * A team is the ranks of one machine in such an operation.  They sum their inputs part by part, or copy parts to each other.  One
 * rank, the carrier, sends a part and receives its result for all of them.
 *
 * comm/ hands an operation over at submission (tly_local_submit) and drives it while it waits (tly_local_wait).  At other times
 * the thread "tally-local" drives it.  Operations of a team come from comm/'s loop (tly_local_enter), which also says what has
 * landed.  If ranks disagree or refuse, or memory is short, all ranks give the operation back (`divert`), and it goes through the
 * service.
 *
 * A file may use the files above it in this list (test/checks/test_circles.py):
 *
 *   process.c    whether another rank still lives
 *   group.c      the ranks that take part
 *   segment.c    the memory, and the pool for tensors
 *   wake.c       whom a change is to wake, and sleeping
 *   work.c       what the ways have in common
 *   window.c     windows, through which private memory goes
 *   ferry.c      private memory that only its owner reaches
 *   eager.c      a way (way.h): of small operations
 *   fetch.c      a way: each rank takes what it needs
 *   pooled.c     a way: reductions in the pool
 *   staging.c    a way: reductions through windows
 *   team.c       a way: what a team does
 *   gpus.c       GPUs that sum in groups: buffers, steps, threads
 *   gpu_way.c    a way: of tensors on such GPUs
 *   ways.c       the list of ways, and the choice
 *   meet.c       the start: segments change hands
 *   ring.c       posts as bytes in a rank's ring
 *   posts.c      rounds, in which posts meet
 *   posts_in.c   the posts of other ranks
 *   posts_out.c  the posts of this rank
 *   alone.c      a way: one small operation, without a round
 *   divert.c     a way: back to the user, for the service
 *   drive.c      a turn of the engine
 *   wait.c       callers that wait, and the thread "tally-local"
 *   local.c      the engine's life, joining, facts
 *   carry.c      a team's operation as its user's loop sees it
 *   submit.c     operations come in, or are taken back
 *
 * control.h says what lies in shared memory; engine.h has the structures, way.h the contract of the ways; posts.h, work.h,
 * window.h and drive.h say what the files offer each other. */
#ifndef TLY_LOCAL_H
#define TLY_LOCAL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/event.h"
#include "base/list.h"
#include "local/segment.h"
#include "ops/ranges.h"

struct tly_device;
struct tly_gpus_offer;
struct tly_local;
struct tly_local_call;
struct tly_mark;

/* Where an operation's tensor is on a GPU that sums in a group (gpus.h). */
struct tly_local_gpu {
    struct tly_mark *ready; /* after which the input is there */
    uint8_t *host; /* in a team: where parts that this rank carries lie on the host, as in the tensor */
};

/* A part of a team's tensor, whoever carries it. */
struct tly_local_part {
    uint64_t place;
    uint32_t length;
    uint8_t carrier; /* its number among the machine's ranks */
};

/* A part that this rank carries.
 * All-reduce: the team's sum is made in this rank's output and pushed from there, and the result lands there.
 * Reduce, reduce-scatter: the user says where the sum is to lie, and no other rank of the team gets the result.
 * All-gather, broadcast: this rank's own data are copied to the team's other ranks, then pushed.  Data of other machines land in
 * this rank's output. */
struct tly_local_piece {
    struct tly_list node; /* in the operation's lists, and in its user's in between */
    struct tly_local_op *op;
    uint8_t *sum;   /* where a sum that is not for all is to lie; NULL: the engine asks its user (`place`) */
    uint64_t place; /* bytes from the beginning of the result */
    const uint8_t *from; /* this rank's own data for the others; NULL: a sum, or another machine's data */
    uint32_t length;
    uint32_t
        done; /* bytes of it that have been summed, or copied to the other ranks; owner: the engine's lock */
    bool ahead; /* counted in the operation's `waiting`, until its user calls tly_local_sent() */
};

enum { TLY_LOCAL_RANKS = 64 }; /* most ranks that share memory */

/* The ranks of this machine that take part in an operation. */
struct tly_local_group {
    uint64_t bits;     /* one for each of these ranks */
    uint32_t size, me; /* ranks; our place among them */
    bool agreed;       /* all its ranks have shown that they mean the same list; owner: the engine's lock */
    uint8_t rank[TLY_LOCAL_RANKS]; /* of the machine's ranks: which one has this place */
};

/* One operation of this rank.  Filled in by the caller down to the line; zeros below. */
struct tly_local_op {
    uint64_t key, spec;
    const struct tly_local_call *call; /* what is done (src/ops/local.h); NULL: only its mark is posted */
    uint32_t round;
    uint8_t number;           /* of the call, the same on all ranks; not 0 */
    uint8_t dtype, reduction; /* of tally.h */
    bool mark;                /* this rank refuses, or takes it back: the others must take the other way */
    bool patient;             /* its wait for other ranks is no reason for a warning */
    bool even; /* of a call with `gathered`: all ranks give as much, and `output` has room for that */
    struct tly_local_group *group;   /* borrowed: a group's ranks on this machine; NULL: all ranks */
    const struct tly_local_gpu *gpu; /* borrowed; NULL: the tensor is in the host's memory */
    bool stands_in;   /* this rank has joined, and takes part in a team's operation with zeros (`stand_in`) */
    uint32_t root;    /* its place in the group */
    int32_t priority; /* in a team: the urgency */
    double prescale, postscale;
    uint64_t count, bytes;
    const struct tly_ranges *ranges;  /* in a team: where in its `bytes` the elements lie; NULL: everywhere */
    const void *input;                /* not read on a rank that only receives a broadcast */
    void *output;                     /* or what `gather` says */
    int64_t first_dim;                /* for `gather` */
    const int64_t *dims;              /* borrowed: of the tensor, for the table's `gets` */
    uint32_t parts;                   /* in a team: number of all its ranks' pieces; else 0 */
    const struct tly_local_part *cut; /* borrowed: these, in the order of sums; NULL: no GPUs are to sum */
    struct tly_list
        pieces; /* in a team: this rank's pieces, in the order in which they are summed or asked for */
    uint64_t
        ahead; /* in a team: most bytes that wait to be sent, or to land, while more are prepared; 0: any */
    /* ------ the engine's; under its lock */
    struct tly_list node; /* inbox; backlog; ops by age */
    struct tly_local_round *meeting;
    void *borrowed;         /* staging in the pool; in a team the user gives it back */
    struct tly_list landed; /* pieces whose results are to be copied to the other ranks */
    uint8_t *sums;          /* the output, or what is staged in its place: the pieces lie there */
    bool held;              /* it has entered by tly_local_enter() and is not yet given back */
    bool left_behind; /* the engine's own mark, in place of one that was withdrawn before it was posted */
    bool alone;       /* no other was in flight when it was submitted */
    atomic_ullong waiting; /* bytes of its pieces that are `ahead` */
    atomic_bool diverted;  /* release, once it is the service's */
};

struct tly_local_user {
    /* The operation has ended: err is 0 or a positive errno with a sentence.  It is the user's again. */
    void (*ended)(void *user, struct tly_local_op *op, int err, const char *sentence);
    /* No rank can do the operation here.  It is the user's again. */
    void (*divert)(void *user, struct tly_local_op *op);
    /* This rank has joined, and has not submitted what another rank of its team has: submit zeros for it.  In `like` the fields
     * down to `priority`, count, bytes and parts are the other rank's.  False: nothing can stand for it.  Must not call back. */
    bool (*stand_in)(void *user, const struct tly_local_op *like);
    /* In a team: the piece may be pushed or asked for.  The sum of an all-reduce lies at op->sums + place.  The result must land
     * there; then the user calls tly_local_landed().  It does not for the rank's own data, nor for a reduce or reduce-scatter. */
    void (*summed)(void *user, struct tly_local_piece *piece);
    /* Returns where the piece's sum of a reduce or reduce-scatter is to lie.  NULL: the engine asks again after
     * tly_local_made_room(). */
    uint8_t *(*place)(void *user, struct tly_local_piece *piece);
    /* All lengths of a call with `gathered` are known.  Returns what `gathered` returns. */
    void *(*gather)(void *user, struct tly_local_op *op, const int64_t first_dims[], const uint64_t bytes[]);
    /* The job cannot go on.  From any thread; must not call back. */
    void (*broken)(void *user, int err, const char *sentence);
    /* The start waits: let the loop turn for up to `ms`.  -errno: the start is over. */
    int (*turn)(void *user, int ms);
};

struct tly_local_config {
    const struct tly_local_user *calls;
    void *user;
    uint32_t rank, ranks;    /* this rank's number among the machine's ranks, and how many these are */
    const uint32_t *numbers; /* borrowed: the job's numbers of these ranks */
    bool team;               /* there are other machines: the engine does the work of a team */
    uint64_t job;            /* its incarnation */
    const uint8_t *secret;   /* as in a struct tly_identity */
    int patience_ms;         /* longest wait for the other ranks at the start */
    const char *gpu; /* borrowed until it is open: where this rank's is on the PCI bus, "": it has none */
    int stuck_ms;    /* a rank that takes longer for a chunk counts as stopped, and the job ends */
};

/* Fill in a group of these ranks of the machine, in the order of their places.  `me` is one of them. */
void tly_local_group_make(struct tly_local_group *g, const uint32_t rank[], uint32_t size, uint32_t me);
/* The same for all ranks of the machine. */
void tly_local_group_make_all(struct tly_local_group *g, uint32_t size, uint32_t me);

/* Exchange segments with all ranks of the machine, which call this together.  *out is NULL if some rank cannot: then no rank
 * shares memory.  -errno: `turn` returned it, or the other ranks may share memory now without this one. */
int tly_local_open(const struct tly_local_config *config, struct tly_local **out);

/* The engine lives as long as it has references: those of operations' handles and of memory in its pool, too. */
void tly_local_ref(struct tly_local *l);
void tly_local_unref(struct tly_local *l);
/* Tell the others that this rank submits nothing more. */
void tly_local_leave(struct tly_local *l);
/* End the thread and all operations, with this error.  When it returns, no thread waits here, and this process touches no other
 * rank's memory any more.  NULL: nothing. */
void tly_local_stop(struct tly_local *l, int err, const char *sentence);
/* End all operations.  When it returns, nothing reads or writes their buffers.  From any thread that is not inside. */
void tly_local_fail(struct tly_local *l, int err, const char *sentence);

/* Hand an operation over, from any thread.  True: it has ended well already, without a call of ended(), and is the user's again.
 * False: its handle has a reference to the engine. */
bool tly_local_submit(struct tly_local *l, struct tly_local_op *op);
/* How many operations tly_local_submit() has ended, and their bytes. */
void tly_local_count(const struct tly_local *l, uint64_t *ops, uint64_t *bytes);
/* Begin an operation, without doing any of it in this thread.  From the user's loop, which has a reference to the engine for it. */
void tly_local_enter(struct tly_local *l, struct tly_local_op *op);
/* In a team, from the loop: the piece's result has landed. */
void tly_local_landed(struct tly_local *l, struct tly_local_piece *piece);
/* In a team, from the loop: `place` may have room now for a sum for which it had none. */
void tly_local_made_room(struct tly_local *l);
/* In a team, from the loop: a sum is on its way, or a piece that was asked for has landed, or neither will ever happen.  So another
 * piece may be prepared.  A second call for a piece does nothing. */
void tly_local_sent(struct tly_local *l, struct tly_local_piece *piece);
/* Some sums wait for other ranks before they can be sent.  While they do, the engine makes further sums without a bound. */
void tly_local_blocked(struct tly_local *l, bool blocked);
/* End an operation that has entered, if it has not ended.  When this returns, no rank reads or writes its buffers, and the other
 * ranks have its post. */
void tly_local_withdraw(struct tly_local *l, struct tly_local_op *op);
/* Without a team: this rank takes the operation back.  All ranks give it back (`divert`), unless all have submitted it: then it
 * ends by itself. */
void tly_local_take_back(struct tly_local *l, struct tly_local_op *op);
/* Drive operations until `done` is set or the monotonic clock passes `deadline` (negative: never): true.  False:
 * `op` was diverted, and its event tells of it. */
bool tly_local_wait(struct tly_local *l, struct tly_local_op *op, struct tly_event *done, int64_t deadline);
/* Wait until no operation is left. */
void tly_local_drain(struct tly_local *l, int64_t deadline);

/* This rank submits nothing more until tly_local_joined_all(), once all ranks have joined.  Where all ranks share the
 * machine its part in what it has not submitted is zeros; in a team it is asked to stand in. */
void tly_local_join(struct tly_local *l, uint64_t submitted); /* so many operations, ever */
void tly_local_joined_all(struct tly_local *l);
/* Have all operations of this rank ended? */
bool tly_local_is_idle(struct tly_local *l);

struct tly_local_late {
    uint64_t key;
    uint32_t round;
    uint32_t lowest; /* the lowest rank of the job that has submitted it and is not patient */
    char ranks[160]; /* ranks of the job that have not submitted it, as "1, 3-4"; "": all have */
};
/* 1: *out is the oldest operation; 0: there is none; -EBUSY: another thread is at work, so it is not known.  teams: count the
 * operations that a team pushes to services, too. */
int tly_local_late(struct tly_local *l, bool teams, struct tly_local_late *out);

/* A rank of the machine that has died without leaving.  -1: none is known to have, or another thread is at work. */
int tly_local_dead(struct tly_local *l);

struct tly_segment *tly_local_segment(struct tly_local *l);
/* Do the ranks reach each other's private memory?  If not, tensors are staged in the pool. */
bool tly_local_direct(const struct tly_local *l);

#endif
