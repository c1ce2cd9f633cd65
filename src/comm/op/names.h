/* names.h - names in use (names.c).
 *
 * Owner: the lock, which guards all of it. */
#ifndef TLY_COMM_NAMES_H
#define TLY_COMM_NAMES_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/map.h"
#include "comm/op/group.h"

struct tly_tensor;
struct tly_begun;

struct tly_names {
    pthread_mutex_t lock;
    struct tly_map tensors;   /* key -> struct tly_tensor; owned */
    struct tly_map former;    /* the same by their keys before the last join; for the timeline */
    struct tly_groups groups; /* and what is said so of groups */
    uint32_t joins;           /* how often all ranks have joined */
    uint64_t plans, sequence;
    uint64_t engine_ops; /* operations that were meant for shared memory, ever */
    bool closed;         /* no name is given any more */
};

static inline void tly_names_lock(struct tly_names *n)
{
    pthread_mutex_lock(&n->lock);
}

static inline void tly_names_unlock(struct tly_names *n)
{
    pthread_mutex_unlock(&n->lock);
}

/* With the lock held, all down to tly_names_are_closed. */
static inline struct tly_tensor *tly_names_find(const struct tly_names *n, uint64_t key)
{
    return tly_map_get(&n->tensors, key);
}

/* -ENOMEM. */
static inline int tly_names_put(struct tly_names *n, uint64_t key, struct tly_tensor *t)
{
    return tly_map_put(&n->tensors, key, t);
}

static inline size_t tly_names_count(const struct tly_names *n)
{
    return n->tensors.count;
}

static inline struct tly_groups *tly_names_groups(struct tly_names *n)
{
    return &n->groups;
}

static inline uint32_t tly_names_joins(const struct tly_names *n)
{
    return n->joins;
}

/* The place of an operation in the order of submission. */
static inline uint64_t tly_names_next(struct tly_names *n)
{
    return n->sequence++;
}

static inline uint64_t tly_names_next_plan(struct tly_names *n)
{
    return n->plans++;
}

/* An operation is meant for shared memory. */
static inline void tly_names_count_engine_op(struct tly_names *n)
{
    n->engine_ops++;
}

static inline bool tly_names_are_closed(const struct tly_names *n)
{
    return n->closed;
}

/* Once this rank has joined, without the lock: nothing more is submitted. */
static inline uint64_t tly_names_engine_ops(const struct tly_names *n)
{
    return n->engine_ops;
}

/* names.c */
void tly_names_init(struct tly_names *n);
void tly_names_finish(struct tly_names *n);
/* How often each tensor has been submitted: at most tly_names_count() entries, of which this is the number.  The lock is
 * held. */
size_t tly_names_list(const struct tly_names *n, struct tly_begun *rounds);
/* All ranks have joined, so often by now: names have new keys, and their rounds and all numbers begin anew.  former: keep
 * them by their old keys.  The lock is held.  -ENOMEM. */
int tly_names_begin_anew(struct tly_names *n, uint32_t joins, bool former);
/* From any thread, without the lock: this tensor is no more. */
void tly_names_take(struct tly_names *n, uint64_t key);
void tly_names_close(struct tly_names *n);
/* What a timeline calls it. */
void tly_names_text(struct tly_names *n, uint64_t key, char *out, size_t len);

#endif
