/* carry.c - a team's operation as its user's loop sees it: it enters, its pieces land and are sent, it is withdrawn.
 *
 * Operations that enter and parts that land go through the inbox to the thread that drives.  A small result is the exception: the loop
 * copies it to the other ranks itself.  `waiting`, `ahead` and `to_wake` count the bytes that have been summed and not yet
 * been sent, so team.c sums no more than the loop can soon send.  `waiting` of an all-gather counts what was asked for and has
 * not landed.  To withdraw an operation the loop takes the engine's
 * lock.
 *
 * Only the holder of the communicator's loop calls these.  It also brings in, and withdraws, what has gone through a stage
 * before where all ranks share the machine. */
#include <errno.h>
#include <stdlib.h>

#include "local/drive.h"
#include "local/posts.h"
#include "local/way.h"
#include "local/work.h"
#include "ops/local.h"

enum { LITTLE = 64 << 10 }; /* of a result, that its user's loop copies to the others */

void tly_local_enter(struct tly_local *l, struct tly_local_op *op)
{
    atomic_fetch_add(&l->in_flight, 1);
    pthread_mutex_lock(&l->inbox_lock);
    bool over = atomic_load(&l->failed); /* then its user ends it */
    op->held = !over;
    if (!over) {
        tly_list_append(&l->inbox, &op->node);
        atomic_fetch_add(&l->pending, 1);
    }
    pthread_mutex_unlock(&l->inbox_lock);
    if (over)
        atomic_fetch_sub(&l->in_flight, 1);
    else
        tly_local_call_own(l);
}

/* A little is copied sooner than handed over. */
static bool carry_spread_at_once(struct tly_local *l, struct tly_local_piece *piece)
{
    struct tly_local_op *op = piece->op;
    if ((uint64_t)piece->length * (tly_local_group_of(l, op)->size - 1) > LITTLE || atomic_load(&l->failed) ||
        pthread_mutex_trylock(&l->lock) != 0)
        return false;
    bool done = op->held && op->meeting && op->meeting->way == &tly_way_team &&
                tly_team_spread(l, op->meeting, piece);
    if (done && op->meeting->way->is_finished(op->meeting))
        tly_posts_finish(l, op->meeting);
    pthread_mutex_unlock(&l->lock);
    if (atomic_exchange(&l->missed, false) || tly_drive_has_news(l))
        tly_local_call_own(l);
    return done;
}

void tly_local_landed(struct tly_local *l, struct tly_local_piece *piece)
{
    if (carry_spread_at_once(l, piece))
        return;
    pthread_mutex_lock(&l->inbox_lock);
    tly_list_append(&l->landed, &piece->node);
    atomic_fetch_add(&l->pending, 1);
    pthread_mutex_unlock(&l->inbox_lock);
    tly_local_call_own(l);
}

void tly_local_made_room(struct tly_local *l)
{
    tly_local_call_own(l);
}

void tly_local_sent(struct tly_local *l, struct tly_local_piece *piece)
{
    if (!piece->ahead)
        return;
    struct tly_local_op *op = piece->op;
    piece->ahead = false;
    uint64_t waited = atomic_fetch_sub(&op->waiting, piece->length), half = op->ahead / 2;
    if (!op->call->reduces) { /* pairs with team_may_ask() */
        if (waited > half && waited - piece->length <= half)
            tly_local_call_own(l);
        return;
    }
    atomic_fetch_sub(&l->ahead, piece->length);
    /* Pairs with team_may_sum(). */
    if (!atomic_load(&l->to_wake) || atomic_fetch_sub(&l->to_wake, piece->length) > (int64_t)piece->length)
        return;
    atomic_store(&l->to_wake, 0);
    tly_local_call_own(l);
}

void tly_local_blocked(struct tly_local *l, bool blocked)
{
    if (atomic_load_explicit(&l->blocked, memory_order_relaxed) == blocked)
        return;
    atomic_store(&l->blocked, blocked);
    if (blocked && atomic_exchange(&l->to_wake, 0))
        tly_local_call_own(l);
}

/* An operation without room in our ring goes back to its user, and a mark waits for room in its place. */
static void carry_leave_mark(struct tly_local *l, const struct tly_local_op *op)
{
    struct tly_local_op *mark = malloc(sizeof *mark);
    if (!mark) {
        l->calls->broken(l->user, ENOMEM, "out of memory");
        return;
    }
    *mark = (struct tly_local_op){
        .key = op->key,
        .spec = op->spec,
        .round = op->round,
        .number = op->number,
        .group = op->group,
        .patient = op->patient,
        .mark = true,
        .stands_in = op->stands_in,
        .left_behind = true};
    tly_list_append(op->node.next, &mark->node);
    atomic_fetch_add(&l->in_flight, 1);
}

/* The others' rounds end when all posts have come, and this rank has joined once all that it has submitted is posted. */
static void carry_post_mark(struct tly_local *l, struct tly_local_op *op)
{
    if (!op->held || op->meeting || atomic_load(&l->failed) || atomic_load(&l->own->left))
        return;
    op->mark = true;
    tly_posts_send(l);
    if (op->held && !op->meeting)
        carry_leave_mark(l, op);
}

void tly_local_withdraw(struct tly_local *l, struct tly_local_op *op)
{
    atomic_fetch_add(&l->claims, 1); /* who has the lock may have much to do */
    pthread_mutex_lock(&l->lock);
    atomic_fetch_sub(&l->claims, 1);
    carry_post_mark(l, op);
    pthread_mutex_lock(&l->inbox_lock);
    for (struct tly_list *n = l->landed.next, *next; n != &l->landed; n = next) {
        next = n->next;
        if (tly_list_entry(n, struct tly_local_piece, node)->op == op)
            tly_list_remove(n);
    }
    if (op->held && !op->meeting)
        tly_list_remove(&op->node);
    pthread_mutex_unlock(&l->inbox_lock);
    if (op->held) {
        op->held = false;
        if (op->meeting) {
            tly_posts_give_up(l, op->meeting);
            tly_posts_let_go(l, op->meeting);
        }
        atomic_store_explicit(&op->diverted, true, memory_order_release);
        atomic_fetch_sub(&l->in_flight, 1);
    }
    pthread_mutex_unlock(&l->lock);
    tly_local_ring(l, l->me,
                   TLY_WAKE_THREAD | TLY_WAKE_WAITERS); /* to go on with what it was called off from */
}
