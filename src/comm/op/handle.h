/* handle.h - what the holders of an operation share: its references and its end (handle.c).
 *
 * Any thread's; who ends the operation writes all else before `done` is set. */
#ifndef TLY_COMM_HANDLE_H
#define TLY_COMM_HANDLE_H

#include <stdatomic.h>
#include <stdbool.h>

#include "base/event.h"
#include "base/fork.h"

struct tly_handle {
    atomic_int references; /* the caller's handle, the loop, the completion queue */
    unsigned generation;   /* of forks */
    struct tly_event done;
    int status;     /* 0 or -errno */
    char *sentence; /* owned; or NULL */
    int source;     /* a probe's answer, or a join's: a rank's place in the group */
};

static inline void tly_handle_init(struct tly_handle *h, int references)
{
    atomic_init(&h->references, references);
    h->generation = tly_fork_generation();
}

static inline void tly_handle_hold(struct tly_handle *h)
{
    atomic_fetch_add(&h->references, 1);
}

/* Nobody but the caller knows it any more, or yet. */
static inline void tly_handle_leave_one(struct tly_handle *h)
{
    atomic_store_explicit(&h->references, 1, memory_order_relaxed);
}

/* The same; and it has ended. */
static inline void tly_handle_end_alone(struct tly_handle *h)
{
    atomic_store_explicit(&h->done.state, 1, memory_order_relaxed);
    tly_handle_leave_one(h);
}

static inline bool tly_handle_is_done(const struct tly_handle *h)
{
    return tly_event_is_set(&h->done);
}

/* Once it is done, or to who ends it. */
static inline int tly_handle_status(const struct tly_handle *h)
{
    return h->status;
}

static inline const char *tly_handle_sentence(const struct tly_handle *h)
{
    return h->sentence ? h->sentence : "";
}

static inline void tly_handle_found(struct tly_handle *h, int source)
{
    h->source = source;
}

/* Wake the threads that wait for it. */
static inline void tly_handle_end(struct tly_handle *h)
{
    tly_event_set(&h->done);
}

/* handle.c */
/* How it ends.  err is positive, or 0; sentence: or NULL. */
void tly_handle_say(struct tly_handle *h, int err, const char *sentence);
/* -ECHILD in a forked child, with a sentence. */
int tly_handle_check_fork(const struct tly_handle *h);

#endif
