/* inbox.h - what other threads have for the loop (inbox.c).
 *
 * Owner: the lock, which guards all of it. */
#ifndef TLY_COMM_INBOX_H
#define TLY_COMM_INBOX_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/list.h"
#include "comm/path/chain.h"

struct tly_inbox {
    pthread_mutex_t lock;
    struct tly_list ops;    /* submitted, and handed back by the engine */
    struct tly_list wanted; /* stand-ins that the engine has asked for (joining.c) */
    int broken; /* another thread has found that the job cannot go on, and the loop is to say so; 0: none has */
    char reason[TLY_SENTENCE]; /* why; fixed once that is set */
    struct tly_said said;      /* by stages (chain.c) */
};

static inline void tly_inbox_lock(struct tly_inbox *i)
{
    pthread_mutex_lock(&i->lock);
}

static inline void tly_inbox_unlock(struct tly_inbox *i)
{
    pthread_mutex_unlock(&i->lock);
}

static inline struct tly_said *tly_inbox_said(struct tly_inbox *i)
{
    return &i->said;
}

/* An operation by its node.  From any thread, without the lock, as all below. */
static inline void tly_inbox_put(struct tly_inbox *i, struct tly_list *op)
{
    tly_inbox_lock(i);
    tly_list_append(&i->ops, op);
    tly_inbox_unlock(i);
}

/* Take out all operations.  False: there are none. */
static inline bool tly_inbox_take(struct tly_inbox *i, struct tly_list *ops)
{
    tly_inbox_lock(i);
    bool any = !tly_list_empty(&i->ops);
    if (any) {
        *ops = i->ops;
        ops->next->prev = ops->prev->next = ops;
        tly_list_init(&i->ops);
    }
    tly_inbox_unlock(i);
    return any;
}

void tly_inbox_init(struct tly_inbox *i);
void tly_inbox_finish(struct tly_inbox *i);
/* Is there no operation? */
bool tly_inbox_is_empty(struct tly_inbox *i);
/* Is there the one of this round? */
bool tly_inbox_has(struct tly_inbox *i, uint64_t key, uint32_t round);
/* The engine wants a stand-in, by its node. */
void tly_inbox_want(struct tly_inbox *i, struct tly_list *wanted);
/* ... and still wants all of these. */
void tly_inbox_want_again(struct tly_inbox *i, struct tly_list *all);
/* The next one, taken out, or NULL. */
struct tly_list *tly_inbox_wanted(struct tly_inbox *i);
/* The job cannot go on.  The first reason holds. */
void tly_inbox_break(struct tly_inbox *i, int err, const char *reason);
/* Why: err and *reason; or 0. */
int tly_inbox_broken(struct tly_inbox *i, const char **reason);

#endif
