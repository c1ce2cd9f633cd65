/* engine.h - operations in the shared memory of one machine (local.c), and the engine there (engine.c).
 *
 * The engine calls from any thread, under its own lock.  What the loop has to do of it waits under inbox.lock. */
#ifndef TLY_COMM_ENGINE_H
#define TLY_COMM_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "tally/tally.h"

struct tally_op;

/* Whom the oldest operation in shared memory waits for.  Owner: the loop. */
struct tly_watched {
    uint32_t *neighbours; /* owned: ranks of this machine; fixed once open */
    uint64_t key;         /* of an operation that is watched */
    uint32_t round;
    int64_t since, warn_after; /* awake clock; 0: there is none */
    uint64_t oldest_key;       /* of the one that was the oldest at the last tick */
    uint32_t oldest_round;
};

/* engine.c */
/* With all ranks: is shared memory the way?  Sets c->local.  -errno: the start has failed meanwhile. */
int tly_engine_open(tally_comm *c);
void tly_engine_tick(tally_comm *c);
void tly_engine_finish(tally_comm *c);

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

#endif
