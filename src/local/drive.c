/* drive.c - one turn of the engine: send posts, read posts, then a step of the first round that has one.
 *
 * The thread that holds the engine's lock drives it.  A submission does small work only.  A caller that waits does all work.
 * "tally-local" does it when no caller waits.  A struct tly_errand says how far the thread may go.  Ready rounds lie in a
 * list by priority and age.
 *
 * A thread that finds the lock taken leaves its word in `missed` or in the inbox.  The holder looks there once more
 * before it goes. */
#include "local/drive.h"
#include "base/clock.h"
#include "local/posts.h"
#include "local/way.h"
#include "local/work.h"
#include "ops/local.h"

bool tly_drive_has_news(struct tly_local *l)
{
    for (uint32_t i = 0; i < l->count; i++)
        if (i != l->me &&
            tly_post_is_there(&l->at[i], atomic_load_explicit(&l->at[i].read, memory_order_relaxed)))
            return true;
    return atomic_load(&l->pending) > 0 || atomic_load(&l->own->asks);
}

static bool drive_called_off(struct tly_local *l, const struct tly_errand *e)
{
    if (atomic_load_explicit(&l->claims, memory_order_relaxed))
        return true;
    if (e->done)
        return tly_event_is_set(e->done) || tly_drive_is_past(e->deadline);
    return !e->light && atomic_load_explicit(&l->spinning, memory_order_relaxed);
}

/* Whether any round has one for this rank, now, or somebody has left. */
static bool drive_has_step(struct tly_local *l)
{
    for (uint32_t i = 0; i < l->count; i++)
        if (i != l->me && atomic_load_explicit(&l->at[i].control->left, memory_order_relaxed) > l->left[i])
            return true;
    struct tly_turn turn = {0};
    for (struct tly_list *n = l->ready.next; n != &l->ready; n = n->next) {
        const struct tly_local_round *r = tly_list_entry(n, struct tly_local_round, node);
        if (r->way->is_finished(r) || r->way->can_step(l, r, &turn))
            return true;
        turn.windowed += r->slots != 0;
    }
    return false;
}

/* One step of the first round that has one. */
static bool drive_step(struct tly_local *l, const struct tly_errand *e)
{
    struct tly_turn turn = {0};
    for (struct tly_list *n = l->ready.next; n != &l->ready; n = n->next) {
        struct tly_local_round *r = tly_list_entry(n, struct tly_local_round, node);
        bool done = r->way->is_finished(r);
        if (!done) {
            if (r->op->call->reduces) /* what waits to land keeps nothing back */
                turn.before += atomic_load_explicit(&r->op->waiting, memory_order_relaxed);
            if ((e->light && r->moved > e->light) || !r->way->step(l, r, &turn)) {
                turn.windowed += r->slots != 0;
                continue;
            }
            done = r->way->is_finished(r);
        }
        if (done)
            tly_posts_finish(l, r);
        return true;
    }
    return false;
}

bool tly_drive_advance(struct tly_local *l, const struct tly_errand *e)
{
    bool any = false, more;
    do {
        more = tly_posts_send(l);
        more |= tly_posts_read(l);
        more |= tly_ferry_serve(l);
        if (atomic_load_explicit(&l->failed, memory_order_relaxed))
            return any;
        more |= drive_step(l, e);
        any |= more;
    } while (more && !drive_called_off(l, e));
    return any;
}

/* A thread that holds the lock for something else reads `missed` before it goes. */
static bool drive_try_lock(struct tly_local *l)
{
    if (pthread_mutex_trylock(&l->lock) == 0)
        return true;
    atomic_store(&l->missed, true);
    return pthread_mutex_trylock(&l->lock) == 0;
}

bool tly_drive_try(struct tly_local *l, const struct tly_errand *e, bool *looked)
{
    bool any = false;
    do {
        *looked = !atomic_load(&l->claims) && drive_try_lock(l);
        if (!*looked)
            return any; /* who holds it looks at the inbox once more */
        if (!atomic_load_explicit(&l->failed, memory_order_relaxed))
            any |= tly_drive_advance(l, e);
        pthread_mutex_unlock(&l->lock);
    } while (atomic_load(&l->pending) > 0 && !atomic_load_explicit(&l->failed, memory_order_relaxed));
    return any;
}

void tly_drive_hand_on(struct tly_local *l)
{
    bool busy = atomic_load(&l->in_flight) > 0;
    if (!busy || atomic_load(&l->spinning))
        return;
    if (!tly_drive_has_news(l) && pthread_mutex_trylock(&l->lock) == 0) {
        busy = drive_has_step(l) || !tly_list_empty(&l->backlog);
        pthread_mutex_unlock(&l->lock);
        busy |= atomic_exchange(&l->missed, false);
    }
    if (busy)
        tly_local_ring(l, l->me, TLY_WAKE_THREAD);
}

/* A caller that waits for each operation returns soon.  Until then the other ranks would wake our thread for each of their
 * posts, which costs more than the operation.  The lock stays held: a call takes half a microsecond, and each time that
 * the lock is taken shows in it. */
void tly_drive_linger(struct tly_local *l, const struct tly_errand *e, bool eager)
{
    int64_t until = 0;
    for (int spins = 1; atomic_load(&l->in_flight) && !atomic_load(&l->claims); spins++) {
        if ((eager && !tly_drive_has_news(l)) || !tly_drive_advance(l, e))
            tly_local_rest(l, 0);
        if (spins % TLY_LOOKS)
            continue;
        int64_t now = tly_now();
        until = until ? until : now + l->linger_ns;
        if (now >= until)
            break;
    }
}
