/* submit.c - how operations among the ranks of one machine come in, and how one is taken back.
 *
 * A submission tries three ways.  A small operation that is alone is done at once (alone.c).  If the engine's lock is
 * free, the operation goes past the inbox, and this thread drives for a moment.  Else it goes into the inbox, and the
 * holder of the lock finds it there.
 *
 * Any thread may submit.  A team's operations come in by carry.c. */
#include "local/drive.h"
#include "local/posts.h"
#include "local/way.h"

enum {
    LIGHT = 256 << 10, /* bytes that submission itself moves */
    PROMPT = 4 << 20,  /* the same where its caller will wait: longer ones are worth waking the thread */
};

/* The operation is the engine's from here on. */
static void submit_take(struct tly_local *l, struct tly_local_op *op)
{
    tly_local_ref(l);
    op->alone = atomic_fetch_add(&l->in_flight, 1) == 0;
}

/* Without any of what follows, where its caller will wait. */
static enum tly_at_once submit_at_once(struct tly_local *l, struct tly_local_op *op)
{
    if (!(atomic_load_explicit(&l->prompt, memory_order_relaxed) || l->count == 1) ||
        atomic_load(&l->in_flight) || pthread_mutex_trylock(&l->lock) != 0)
        return TLY_AT_ONCE_NOT;
    struct tly_post p;
    uint64_t at = l->tail;
    enum tly_at_once done = tly_way_at_once(l, op, &p);
    if (done == TLY_AT_ONCE_POSTED) {
        submit_take(l, op);
        tly_posts_follow(l, op, &p, at);
    }
    pthread_mutex_unlock(&l->lock);
    return done;
}

/* Past the inbox, where nobody else is at work.  True: it is taken. */
static bool submit_directly(struct tly_local *l, struct tly_local_op *op, const struct tly_errand *e,
                            bool prompt)
{
    if (pthread_mutex_trylock(&l->lock) != 0)
        return false;
    bool taken = !atomic_load(&l->failed) && !atomic_load(&l->pending) && tly_list_empty(&l->backlog);
    if (taken) {
        tly_list_append(&l->backlog, &op->node);
        tly_drive_advance(l, e);
        if (prompt)
            tly_drive_linger(l, e, op->bytes <= TLY_EAGER);
    }
    pthread_mutex_unlock(&l->lock);
    return taken;
}

bool tly_local_submit(struct tly_local *l, struct tly_local_op *op)
{
    bool looked;
    enum tly_at_once done = submit_at_once(l, op);
    if (done == TLY_AT_ONCE_NOT)
        submit_take(l, op);
    bool prompt = op->alone && atomic_load_explicit(&l->prompt, memory_order_relaxed);
    const struct tly_errand light = {.light = prompt ? PROMPT : LIGHT};
    if (done != TLY_AT_ONCE_NOT || submit_directly(l, op, &light, prompt)) {
        if (done == TLY_AT_ONCE_POSTED ||
            atomic_load(&l->pending)) /* not read yet; of who found the lock taken */
            tly_drive_try(l, &light, &looked);
        if (done == TLY_AT_ONCE_ENDED) {
            if (atomic_load_explicit(&l->own->wanted,
                                     memory_order_relaxed)) /* for one before, whose waiter had left */
                tly_local_set_wanted(l);
            return true;
        }
    } else {
        pthread_mutex_lock(&l->inbox_lock);
        bool over = atomic_load(&l->failed); /* set before the failure empties the inbox */
        if (!over) {
            tly_list_append(&l->inbox, &op->node);
            atomic_fetch_add(&l->pending, 1);
        }
        pthread_mutex_unlock(&l->inbox_lock);
        if (over) {
            tly_posts_hand_back(l, op);
            return false;
        }
        tly_drive_try(l, &light, &looked);
    }
    if (atomic_load(&l->in_flight))
        atomic_store_explicit(&l->prompt, false, memory_order_relaxed);
    tly_local_set_wanted(l);
    tly_drive_hand_on(l);
    return false;
}

void tly_local_take_back(struct tly_local *l, struct tly_local_op *op)
{
    atomic_fetch_add(&l->claims, 1);
    pthread_mutex_lock(&l->lock);
    atomic_fetch_sub(&l->claims, 1);
    op->mark = true; /* if it is not posted yet */
    l->unwanted |= op->meeting != NULL;
    if (!atomic_load(&l->failed)) {
        tly_posts_send(l);
        tly_local_ring(l, l->me,
                       TLY_WAKE_THREAD | TLY_WAKE_WAITERS); /* to go on with what it was called off from */
    }
    pthread_mutex_unlock(&l->lock);
}
