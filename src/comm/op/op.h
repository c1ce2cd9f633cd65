/* op.h - operations, from submission to the end.
 *
 * Owner: the submitting thread until it is in the inbox, then the loop.  `handle` and `completion` are any thread's.  handle.c
 * frees it. */
#ifndef TLY_COMM_OP_H
#define TLY_COMM_OP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/list.h"
#include "comm/op/active.h"
#include "comm/op/events.h"
#include "comm/op/handle.h"
#include "comm/op/spec.h"
#include "comm/op/tensor.h"
#include "comm/path/chain.h"
#include "comm/path/engine.h"
#include "ops/call.h"
#include "tally/tally.h"
#include "wire/frame.h"

struct tly_epoch;
struct tly_part;
struct tly_peer;

/* How far its parts have come.  Owner: op.c. */
struct tly_progress {
    uint32_t left;    /* so many parts have not landed, or wait for something else */
    uint32_t ahead;   /* so many may be queued that have not landed; 0: all */
    uint32_t queued;  /* of those in their order */
    uint64_t missing; /* bytes that have not landed */
};

/* There are so many parts to wait for; one more. */
static inline void tly_progress_begin(struct tly_progress *p, uint32_t parts)
{
    p->left = parts;
}

static inline void tly_progress_await_more(struct tly_progress *p)
{
    p->left++;
}

static inline void tly_progress_limit(struct tly_progress *p, uint32_t ahead)
{
    p->ahead = ahead;
}

/* All has landed, the last of it just now, and some of what came before waits for something else. */
static inline bool tly_progress_waits(const struct tly_progress *p)
{
    return p->missing == 0 && p->left > 1;
}

static inline uint64_t tly_progress_missing(const struct tly_progress *p)
{
    return p->missing;
}

static inline void tly_progress_miss(struct tly_progress *p, uint64_t bytes)
{
    p->missing += bytes;
}

enum { TLY_LATE_TEXT = 160 }; /* of the longest list of late ranks */

/* Since when it has waited, and for whom.  Owner: op.c. */
struct tly_wait {
    int64_t born;      /* awake clock: it came to the loop */
    int64_t submitted; /* monotonic */
    bool patient;      /* its rank stood by when it was submitted */
    bool asked;        /* home, shortly before TALLY_TIMEOUT, for whom it waits */
    char *late;        /* owned: ranks that home waits for, as it last said; or NULL */
};

static inline void tly_wait_init(struct tly_wait *w, bool patient)
{
    w->patient = patient;
}

static inline void tly_wait_finish(struct tly_wait *w)
{
    free(w->late);
}

static inline void tly_wait_begin(struct tly_wait *w)
{
    w->submitted = tly_now();
}

static inline int64_t tly_wait_since(const struct tly_wait *w)
{
    return w->submitted;
}

static inline bool tly_wait_is_patient(const struct tly_wait *w)
{
    return w->patient;
}

struct tally_op {
    struct tly_handle handle;
    struct tly_completion completion;
    tally_comm *comm;          /* borrowed; used by the loop alone, and by submission */
    struct tly_tensor *tensor; /* borrowed while in flight */
    struct tally_group *group; /* borrowed while in flight */
    struct tly_list node;      /* inbox, then comm->active.by_age */

    const struct tly_call *call; /* of `kind` */
    uint8_t kind, dtype, reduction, space;
    uint32_t root, round;
    int32_t priority;  /* the caller's */
    int32_t urgency;   /* by which its parts are queued: in a list that of its block */
    uint64_t sequence; /* order of submission */
    uint64_t count, bytes, key;
    struct tly_spec spec;
    const uint8_t *input;
    uint8_t *output;
    bool mark;    /* nothing but an error mark */
    char *reason; /* owned: of a mark, or why this rank has cancelled it */

    struct tly_epoch *epoch; /* of this round; once begun */
    struct tly_part *parts;  /* owned */
    uint32_t part_count;
    struct tly_progress progress;
    uint64_t credit;           /* its parts go out while no more than this is in flight */
    struct tly_sharing shared; /* what it has of shared memory */
    struct tly_chain chain;    /* its stages */
    struct tly_wait wait;

    bool even;        /* of an allgather: all ranks give as much, and the output is the caller's */
    bool alone;       /* its caller has no handle, and waits for nothing */
    uint64_t mailbox; /* of a message: hash of group and tag, which stands for the count in frames; else 0 */
    void *zeros;      /* owned, from the pool: input and output of a rank that stands in */
    uint32_t *
        pairs; /* owned: for each of the group where the parts for it begin and those from it; then the end */
};

/* glibc keeps free blocks of up to 1000 bytes in lists of one size each, so malloc() need not search.  Of a larger size it
 * searches and cuts, where many operations are in flight or wait to be freed. */
_Static_assert(sizeof(struct tally_op) <= 1000, "an operation is larger than malloc's small blocks");

/* The oldest in the loop's hands; the next one.  NULL: there is none. */
static inline struct tally_op *tly_op_at(const struct tly_active *a, struct tly_list *node)
{
    return node == &a->by_age ? NULL : tly_list_entry(node, struct tally_op, node);
}

static inline struct tally_op *tly_op_oldest(const struct tly_active *a)
{
    return tly_op_at(a, a->by_age.next);
}

static inline struct tally_op *tly_op_after(const struct tly_active *a, const struct tally_op *op)
{
    return tly_op_at(a, op->node.next);
}

/* handle.c */
void tly_op_unref(struct tally_op *op);
/* The operation ends: its name is free for the next one.  mark: it was an error mark, which does not take the name. */
void tly_op_forget_tensor(tally_comm *c, struct tly_tensor *t, bool mark);

/* op.c */
void tly_op_end(tally_comm *c, struct tally_op *op, int err, const char *sentence);
/* All that the loop has. */
void tly_op_end_all(tally_comm *c, int err, const char *sentence);
void tly_op_finish_all(tally_comm *c); /* once it has none */
/* What it waits for: "part 3 of 40, which tallyd 1 on ... sums, has been sent and is not answered". */
void tly_op_stage(const struct tally_op *op, char *out, size_t len);
/* The part's result is in place.  Returns the part, which may have moved and is to be settled or kept; NULL: all has failed. */
struct tly_part *tly_op_landed(tally_comm *c, struct tly_part *p);
/* A part that has landed needs to be waited for no longer. */
void tly_op_settled(tally_comm *c, struct tly_part *p);
/* Take what was submitted into the loop's hands; the lock is held. */
void tly_op_drain(tally_comm *c);
/* Go through what stages have said. */
void tly_op_drain_stages(tally_comm *c);
/* This rank takes it back, for op->reason: all ranks hear of it, unless all have begun it. */
void tly_op_cancel(tally_comm *c, struct tally_op *op);
/* Stages that are lost; then, once all else has been looked at, whether the oldest has waited for too long. */
void tly_op_tick(tally_comm *c);
void tly_op_time_out(tally_comm *c);
/* Its home waits for these ranks. */
void tly_op_set_late(struct tally_op *op, const char *ranks);
struct tally_op *tly_op_find(tally_comm *c, const struct tly_frame *f);
/* The part that a frame of this service is about, or NULL. */
struct tly_part *tly_op_find_part(struct tly_peer *peer, const struct tly_frame *f);

/* The operation has ended: wake the threads that wait for it, and announce it if that is wanted. */
void tly_op_set_done(struct tally_op *op);

/* What only this operation's call knows of it: own_bytes of its call, behind the operation. */
static inline void *tly_op_own(const struct tally_op *op)
{
    return (void *)(op + 1);
}

#endif
