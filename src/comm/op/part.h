/* part.h - parts of operations: unit of assignment, priority and preemption.
 *
 * Owner: the loop, but for `node` and `err` (inbox.lock), and for what stage.h gives to a stage while it has the part.
 * Parts live as long as their operation. */
#ifndef TLY_COMM_PART_H
#define TLY_COMM_PART_H

#include "comm/comm.h"
#include "comm/op/op.h"
#include "comm/path/team.h"
#include "sched/sched.h"
#include "tally/tally.h"
#include "trace/trace.h"

struct tly_keep;

enum tly_part_state {
    PART_IDLE,
    PART_QUEUED,   /* in its service's heap */
    PART_ADMITTED, /* credit and window are taken; goes out in turn */
    PART_SENT,
    PART_DOUBTED, /* its service or the connection is gone: what has landed of it is to be said */
    PART_SAID,    /* that has been said; the service asks for what it needs */
    PART_LANDED,  /* the answer is in place */
};

/* Unit of assignment, priority and preemption. */
struct tly_part {
    struct tly_task task; /* while it is queued and admitted */
    struct tally_op *op;
    struct tly_keep *keep; /* landed, but the operation may not end before all ranks have it */
    struct tly_part *next; /* in its peer's line of admitted parts */
    struct tly_list node;  /* of struct tly_said; inbox.lock */
    uint8_t *landing;      /* where the result belongs */
    const uint8_t *input;  /* NULL: a request */
    uint64_t place;        /* in the tensor, or in the rank's piece of it */
    uint64_t piece;        /* between two ranks: bytes of that piece, which both must mean */
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
    uint32_t came;  /* of a shared tensor: epoch in which it came to its service; else 0 */
    bool known;     /* its service has heard of it */
    bool quiet;     /* we push it and do not want the result */
    bool offer;     /* its data goes when it is asked for */
    bool mark;      /* nothing but an error mark */
    bool scaled;    /* the input has been multiplied by prescale */
    bool homeward;  /* its result has landed */
    uint8_t stage;  /* which has it (enum tly_stage_place) */
    int16_t err;    /* of that stage, positive; inbox.lock, until the loop has taken it */
    uint32_t bytes; /* of the tensor; on the wire it may have another length */
    uint32_t
        root; /* of a team's part, which is no broadcast: ranks that it is the sum of when all have pushed, less one */
    struct tly_shard shard;
};

/* part.c */
/* Each change of a part's state. */
void tly_part_change(struct tly_part *p, enum tly_part_state to);

/* A message of so many bytes goes with its offer. */
enum { TLY_KEPT_BYTES = 64 << 10 };
/* The part has come to a moment of the timeline. */
static inline void tly_part_stamp(const struct tly_part *p, enum tly_moment stage)
{
    const struct tally_op *op = p->op;
    tly_stamp(op->comm->trace, stage, p->owner, op->key, op->round, p->index, p->length);
}

static inline struct tly_part *tly_part_of(struct tly_task *task)
{
    return tly_list_entry(task, struct tly_part, task);
}

#endif
