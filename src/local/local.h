/* local.h - operations among ranks that all share one machine, through shared memory: no socket, no service; and
 * what the ranks of one machine of several do of an operation of all, as a team: they sum their inputs part by part,
 * one of them carries each part's sum to its service, and the result is given to the others.
 *
 * Where it sits: comm/ hands an operation over at submission (tly_local_submit) and drives it while it waits
 * (tly_local_wait); else the thread "tally-local" does.  Of a team's operation comm/'s loop hands in what it cuts
 * (tly_local_enter) and what has landed.  What cannot be done here, because ranks disagree or
 * refuse or memory is short, is given back (`divert`) on all ranks, and takes the way through the service.
 *
 * A file may use the files above it in this list (test/checks/test_circles.py):
 *
 *   process.c    whether another rank still lives
 *   group.c      the ranks that take part
 *   segment.c    the memory, and the pool for tensors
 *   wake.c       whom a change is to wake, and sleeping
 *   work.c       what the ways have in common
 *   eager.c      a way (way.h): of small operations
 *   fetch.c      a way: each rank takes what it needs
 *   pooled.c     a way: reductions in the pool
 *   staging.c    a way: reductions through windows
 *   team.c       a way: what a team does
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
 * control.h says what lies in shared memory; engine.h has the structures, way.h the contract of the ways; posts.h, work.h
 * and drive.h say what the files offer each other. */
#ifndef TLY_LOCAL_H
#define TLY_LOCAL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/event.h"
#include "base/list.h"
#include "local/segment.h"
#include "ops/ranges.h"

struct tly_local;
struct tly_local_call;

/* A part that this rank carries.  Of a sum for all ranks: its team's sum comes to lie in the rank's output, is pushed from there,
 * and its result lands there.  Of another sum: its user says where it is to lie, and what comes of it concerns no neighbour.
 * Else: the rank's own data go to the team's others before they are pushed; what other machines give lands in the rank's
 * output. */
struct tly_local_piece {
    struct tly_list node; /* of the operation's lists; of who holds it between these */
    struct tly_local_op *op;
    uint8_t *sum;   /* where a sum that is not for all is to lie; NULL: the engine asks its user (`place`) */
    uint64_t place; /* in the result */
    const uint8_t *from; /* this rank's own data, of a gathering; NULL: they come from elsewhere */
    uint32_t length;
    bool
        ahead; /* its user has it, and has not said that it is sent, or, of a gathering, that it has landed */
};

enum { TLY_LOCAL_RANKS = 64 }; /* most */

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
    uint8_t number;           /* by which the ranks' users know the call; not 0 */
    uint8_t dtype, reduction; /* of tally.h */
    bool mark;                /* this rank refuses, or takes it back: the others must take the other way */
    bool patient;             /* it minds no wait for the others */
    struct tly_local_group *group; /* borrowed: of a group, its ranks on this machine; NULL: all ranks */
    bool stands_in;   /* of a team: this rank has joined, and does it for another one's sake (`stand_in`) */
    uint32_t root;    /* its place in the group */
    int32_t priority; /* of a team: the urgency */
    double prescale, postscale;
    uint64_t count, bytes;
    const struct tly_ranges *ranges; /* of a team: where in its `bytes` the elements lie; NULL: everywhere */
    const void *input;               /* not looked at by who only receives a broadcast */
    void *output;                    /* or what `gather` says */
    int64_t first_dim;               /* for `gather` */
    const int64_t *dims;             /* borrowed: of the tensor, for the table's `gets` */
    uint32_t parts;                  /* of a team: all its ranks' pieces; else 0 */
    struct tly_list
        pieces; /* likewise, if this is not 0: those of this rank, in the order in which they are summed */
    uint64_t
        ahead; /* likewise: bytes that may wait to be sent while more are summed, or to land while more are asked for; 0: any */
    /* ------ the engine's; under its lock */
    struct tly_list node; /* inbox; backlog; ops by age */
    struct tly_local_round *meeting;
    void *borrowed;         /* staging in the pool; a team's stays until its user gives it back */
    struct tly_list landed; /* pieces whose results are to be given to the others */
    uint8_t *sums;          /* where the pieces lie: the output, or staged */
    bool held;              /* it has entered by tly_local_enter() and is not yet given back */
    bool left_behind; /* the engine's own mark, in place of one that was withdrawn before it was posted */
    bool alone;       /* no other was in flight when it was submitted */
    atomic_ullong waiting; /* bytes of its pieces that are `ahead` */
    atomic_bool diverted;  /* release, once it is the service's */
};

struct tly_local_user {
    /* It has ended: err is 0 or a positive errno with a sentence.  The operation is the user's again. */
    void (*ended)(void *user, struct tly_local_op *op, int err, const char *sentence);
    /* It cannot be done here, on no rank.  The operation is the user's again. */
    void (*divert)(void *user, struct tly_local_op *op);
    /* This rank has joined, and another one of its team has submitted this, which it has not: zeros are wanted in its
     * name.  Down to `priority`, and count and bytes and parts, as that one means it.  False: nothing can stand for it.
     * Must not call back. */
    bool (*stand_in)(void *user, const struct tly_local_op *like);
    /* Of a team: the piece may be pushed or asked for.  A sum for all lies at op->sums + place.  The result has to land there; then
     * the user calls tly_local_landed(), but not for the rank's own data, nor for a sum that is not for all. */
    void (*summed)(void *user, struct tly_local_piece *piece);
    /* Where is the piece's sum, which is not for all, to lie?  NULL: the engine asks again after tly_local_made_room(). */
    uint8_t *(*place)(void *user, struct tly_local_piece *piece);
    /* All lengths are known, of a call whose `gathered` it has.  Returns what that does. */
    void *(*gather)(void *user, struct tly_local_op *op, const int64_t first_dims[], const uint64_t bytes[]);
    /* The job cannot go on.  From any thread; must not call back. */
    void (*broken)(void *user, int err, const char *sentence);
    /* Asked while the start waits: let the loop turn for up to so long; -errno if the start is over. */
    int (*turn)(void *user, int ms);
};

struct tly_local_config {
    const struct tly_local_user *calls;
    void *user;
    uint32_t rank, ranks;    /* of the machine's */
    const uint32_t *numbers; /* borrowed: of these ranks, in the job */
    bool team;               /* there are other machines: it does its share of what all ranks do */
    uint64_t job;            /* its incarnation */
    const uint8_t *secret;   /* as in a struct tly_identity */
    int patience_ms;         /* for the others at the start */
    int stuck_ms;            /* who takes longer over a chunk is stopped, and ends the job */
};

/* These of the machine's ranks, in the order of their places; `me` is one. */
void tly_local_group_make(struct tly_local_group *g, const uint32_t rank[], uint32_t size, uint32_t me);
/* All of the machine's. */
void tly_local_group_make_all(struct tly_local_group *g, uint32_t size, uint32_t me);

/* Exchange segments with all ranks, which call it together.  *out is NULL if this or another rank cannot: then all
 * do without.  -errno if `turn` has said so, or if the others may share memory now without this one. */
int tly_local_open(const struct tly_local_config *config, struct tly_local **out);

/* Let go of it.  It lives as long as references: of operations' handles and of pool memory. */
void tly_local_ref(struct tly_local *l);
void tly_local_unref(struct tly_local *l);
/* Tell the others that this rank submits nothing more. */
void tly_local_leave(struct tly_local *l);
/* End the thread, end all operations with this error, and touch nobody's memory any more; threads that wait are
 * gone when it returns.  NULL: nothing. */
void tly_local_stop(struct tly_local *l, int err, const char *sentence);
/* End all operations: nothing reads or writes their buffers when it returns.  From any thread that is not inside. */
void tly_local_fail(struct tly_local *l, int err, const char *sentence);

/* From any thread.  True: it has ended well here and now, which ended() is not called for, and is the user's again.
 * False: its handle has a reference to the engine. */
bool tly_local_submit(struct tly_local *l, struct tly_local_op *op);
/* Those that have ended here and now, and their bytes. */
void tly_local_count(const struct tly_local *l, uint64_t *ops, uint64_t *bytes);
/* From its user's loop, which has a reference for it: begin, without doing any of it in this thread. */
void tly_local_enter(struct tly_local *l, struct tly_local_op *op);
/* Of a team, likewise: a piece has landed. */
void tly_local_landed(struct tly_local *l, struct tly_local_piece *piece);
/* The same: a piece for whose sum there was no place may have one now. */
void tly_local_made_room(struct tly_local *l);
/* The same, one call at a time: a piece that was summed is on its way, or one that was asked for has landed, or will never be: there is room for another.
 * Nothing if that has been said. */
void tly_local_sent(struct tly_local *l, struct tly_local_piece *piece);
/* Some of what waits to be sent waits for other ranks: meanwhile nothing is held back for its sake. */
void tly_local_blocked(struct tly_local *l, bool blocked);
/* Of what has entered: end it whatever it has come to, if it has not ended: nobody reads or writes its buffers when this
 * returns, and the other ranks have its post. */
void tly_local_withdraw(struct tly_local *l, struct tly_local_op *op);
/* Not of a team: this rank wants it no more.  It is given back (`divert`) on all ranks, unless all have submitted it: then
 * it ends by itself. */
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
/* Has all ended that this rank had submitted? */
bool tly_local_is_idle(struct tly_local *l);

struct tly_local_late {
    uint64_t key;
    uint32_t round;
    uint32_t lowest; /* rank of the job that has submitted it and minds the wait */
    char ranks[160]; /* of the job, that have not, as "1, 3-4"; "": all have */
};
/* 1: the oldest operation; 0: there is none; -EBUSY: somebody is just at work, and it may be any.  teams: also of those that
 * their team pushes to services. */
int tly_local_late(struct tly_local *l, bool teams, struct tly_local_late *out);

/* A rank, of the machine's, that has died and not left before; -1: none is seen to have, or somebody is just at work. */
int tly_local_dead(struct tly_local *l);

struct tly_segment *tly_local_segment(struct tly_local *l);
/* Between processes' private memory directly, or staged in the pool. */
bool tly_local_direct(const struct tly_local *l);

#endif
