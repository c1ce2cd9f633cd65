/* engine.h - operations in the shared memory of one machine (local.c), and the engine there (engine.c).
 *
 * The engine calls from any thread, under its own lock.  What the loop has to do of it waits under inbox.lock. */
#ifndef TLY_COMM_ENGINE_H
#define TLY_COMM_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/event.h"
#include "comm/path/blocks.h"
#include "local/local.h"
#include "tally/tally.h"

struct tally_op;

/* The functions that the engine calls for an operation; from any thread, under the engine's lock. */
struct tly_engine_user {
    bool
        direct; /* the submitting thread hands it over, and its caller drives the engine; else the loop does all */
    void (*ended)(struct tally_op *op, int err, const char *sentence);
    void (*diverted)(struct tally_op *op);
};

/* What an operation has of shared memory.  The fields are those of this header, engine.c, local.c and team.c.  Owner: the
 * submitting thread until the operation is handed over, then the engine; of a stage's the loop. */
struct tly_sharing {
    struct tly_local *engine; /* owned reference; NULL: it goes another way */
    const struct tly_engine_user *user;
    struct tly_local_op op;
    bool entered; /* a stage has given it to the engine */
    uint32_t
        coming; /* parts that have not come; the last enters an all-gather whose list is here; 0: part 0 does */
    bool mute; /* ... as a mark, of which nothing is to be heard */
    uint8_t *
        result; /* owned: of pieces, where a stage has a memory for each: a gathering's result, another's input; else NULL */
    struct tly_blocks blocks;   /* a team's sums that have no output to lie in */
    struct tly_local_part *cut; /* owned: the parts that GPUs sum, on the rank that lists them; else NULL */
};

/* It goes to the engine, which gets the reference when it gets the operation. */
static inline void tly_sharing_take(struct tly_sharing *s, struct tly_local *engine,
                                    const struct tly_engine_user *user)
{
    s->engine = engine;
    s->user = user;
}

static inline bool tly_sharing_is_direct(const struct tly_sharing *s)
{
    return s->engine && s->user->direct;
}

static inline void tly_sharing_wait(struct tly_sharing *s, struct tly_event *done, int64_t deadline)
{
    tly_local_wait(s->engine, &s->op, done, deadline);
}

static inline void tly_sharing_take_back(struct tly_sharing *s)
{
    tly_local_take_back(s->engine, &s->op);
}

/* This rank has joined, and does it for another one's sake. */
static inline void tly_sharing_stand_in(struct tly_sharing *s)
{
    s->op.stands_in = true;
}

static inline void tly_sharing_release(struct tly_sharing *s)
{
    tly_local_unref(s->engine);
}

/* Whom the oldest operation in shared memory waits for.  Owner: the loop. */
struct tly_watched {
    uint32_t *neighbours; /* owned: ranks of this machine; fixed once open */
    uint64_t key;         /* of an operation that is watched */
    uint32_t round;
    int64_t since, warn_after; /* awake clock; 0: there is none */
    uint64_t oldest_key;       /* of the one that was the oldest at the last tick */
    uint32_t oldest_round;
};

/* The ranks of this machine, in their order. */
static inline const uint32_t *tly_watched_neighbours(const struct tly_watched *w)
{
    return w->neighbours;
}

/* engine.c */
/* With all ranks: is shared memory the way?  Sets c->local and c->local_has_all.  -errno: the start has failed meanwhile. */
int tly_engine_open(tally_comm *c);
void tly_engine_tick(tally_comm *c);
void tly_engine_finish(tally_comm *c);

/* local.c */
/* Fill in what the engine is to know of it. */
void tly_comm_describe_local(struct tally_op *op);
/* In the submitting thread, without a lock: hand it over. */
void tly_comm_submit_local(tally_comm *c, struct tally_op *op);
/* Operations that have ended, and their bytes. */
void tly_comm_count(const tally_comm *c, uint64_t *ops, uint64_t *bytes);

#endif
