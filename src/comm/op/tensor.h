/* tensor.h - tensors by their names: keys (names.c), homes, cuts (tensor.c), words (spec.c).
 *
 * Owner: names.lock, unless a field says otherwise. */
#ifndef TLY_COMM_TENSOR_H
#define TLY_COMM_TENSOR_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/op/spec.h"
#include "plan/plan.h"
#include "tally/tally.h"

/* Tensors whose parts are dealt in one sequence; names.lock. */
struct tly_list_plan {
    uint32_t users; /* tensors for which it is the latest */
    size_t count;
    struct tly_list_item {
        struct tly_tensor *tensor;
        uint64_t bytes;
        uint32_t block; /* of this list */
    } item[];
};

/* A name in use. */
struct tly_tensor {
    uint64_t key;
    uint64_t group; /* id */
    uint8_t kind, space;
    bool unnamed;     /* used once */
    uint8_t called;   /* kind of the operation, if it has no name: 0: it has one */
    bool even;        /* of an allgather without a name: all ranks give as much */
    uint32_t round;   /* next round's number */
    atomic_bool busy; /* an operation is in flight; set under names.lock, cleared by the loop (release) */
    struct tly_spec_before before;
    struct tly_list_plan *plan_list; /* the latest that names it, or NULL; shared */
    size_t item;                     /* its place in that */
    int32_t priority;                /* of its last operation; the loop's */
    struct tly_replica *replica;     /* owned: of a shared tensor, once it has been created; else NULL */
    struct tly_cut {
        uint64_t bytes,
            digest; /* size, ranges, epoch and root (one more; 0: it has none) for which it was made */
        uint32_t epoch, root;
        struct tly_cut_piece {
            uint64_t place; /* in the caller's buffer */
            uint32_t length;
            uint16_t owner; /* service */
        } * pieces;         /* owned */
        uint32_t count;
        uint64_t credit; /* so much in flight suits its parts */
    } cut, plan;         /* for the size last used; for the size agreed on in a plan */
    char name[];
};

/* names.c */
/* joins: how often all ranks have joined; messages go on over that. */
uint64_t tly_tensor_key(uint32_t joins, uint64_t group, uint32_t kind, uint32_t space, const char *name);
/* Find or make the tensor; names.lock held.  NULL: out of memory or a collision (sentence set). */
struct tly_tensor *tly_tensor_get(tally_comm *c, const struct tally_group *g, uint32_t kind, uint32_t space,
                                  const char *name);
void tly_tensor_destroy(struct tly_tensor *t);
/* It is of no plan any more. */
void tly_tensor_leave_plan(struct tly_tensor *t);
/* Does it number the messages from one rank to another? */
bool tly_tensor_is_message(const struct tly_tensor *t);

/* tensor.c */
/* The parts of an operation whose epoch is known, and their services, the same on all ranks; names.lock held.  bytes: of its
 * tensor, or 0 where only its home is asked for.  NULL: out of memory. */
const struct tly_cut *tly_tensor_cut(tally_comm *c, const struct tally_op *op, uint64_t bytes);
/* Set op->urgency.  True: the tensor is of a list that goes from its end.  In the loop; names.lock held. */
bool tly_tensor_line_up(struct tally_op *op);
/* From now on these are dealt in one sequence; names.lock held.  -ENOMEM. */
int tly_tensor_plan(tally_comm *c, uint32_t kind, uint32_t space, size_t count, const char *const names[],
                    const uint64_t bytes[]);
/* The epoch's machines, each with the ranks that it has in the operation's group, or one where these are a team; the caller frees
 * them.  NULL: out of memory. */
struct tly_plan_machine *tly_tensor_machines(const tally_comm *c, const struct tally_op *op, bool teams);

/* spec.c */
/* What users read in its place: "'w'", "push_pull no. 7", or in an ordered space "all_reduce no. 16"; names.lock held or its
 * operation in flight. */
void tly_tensor_title(const struct tly_tensor *t, char *out, size_t len);
enum { TLY_TITLE = 256 };
/* The same with the ranks of a group that has not all: "all_reduce no. 16 of ranks 0-1". */
const char *tly_op_title(const struct tally_op *op, char out[TLY_TITLE]);
/* Its title, a bar and what else ranks compare: "'w'|push_pull float32 [10, 3] sum" (sum/words.h). */
void tly_spec_text(const struct tally_op *op, char *out, size_t len);

#endif
