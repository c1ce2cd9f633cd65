/* local.c - the engine: who drives it, and its life.  (What goes on between the ranks is in posts.c, work in work.c.)
 *
 * Whoever holds the engine's lock drives it: the thread that submits (posts, and what is done in a moment), those
 * that wait (they do all the work that there is), and "tally-local" when nobody waits.  A rank that nobody looks
 * after says in `wanted` whom a change is to wake; one that spins is never woken.  All of it is Dekker's pattern:
 * write what you have, fence, read what the other has. */
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/fork.h"
#include "base/thread.h"
#include "local/control.h"
#include "local/process.h"
#include "tally/tally.h"
#include "topo/topo.h"

enum {
    SPIN_US = 40,      /* before a waiter sleeps */
    SPINS = 64,        /* between looks at the clock */
    PAUSES = 50,       /* before it lets others have the core, if they want it */
    NAP_MS = 1000,     /* longest sleep: nothing depends on it */
    DRAIN_MS = 5,      /* at the close, where the thread sleeps on the same bell */
    BLINK_MS = 1,      /* of who could not look, as another thread did: that one may have looked too early */
    LIGHT = 256 << 10, /* bytes that submission itself moves */
    PROMPT = 4 << 20,  /* the same where its caller will wait: longer ones are worth waking the thread */
    LITTLE = 64 << 10, /* of a result, that its user's loop copies to the others */
    LINGER_NS = 2000,  /* longest that a submission looks for the others' posts, where its caller will wait */
    MOST_WINDOWED = 8, /* rounds with windows that are looked at; then only who has one, or is elected */
    STOPPED_MS = 1000, /* who takes longer over a part is stopped, and not waited for at a failure */
};

/* --- waking -------------------------------------------------------------------------------------- */

void tly_local_ring(struct tly_local *l, uint32_t rank, uint32_t whom)
{
    struct tly_control *c = l->at[rank].control;
    atomic_fetch_add_explicit(&c->bell, 1, memory_order_seq_cst);
    syscall(SYS_futex, &c->bell, FUTEX_WAKE_BITSET, INT32_MAX, NULL, NULL, whom);
}

static void wake(struct tly_local *l, uint32_t rank)
{
    uint32_t whom =
        rank == l->me ? 0 : atomic_load_explicit(&l->at[rank].control->wanted, memory_order_relaxed);
    if (whom)
        tly_local_ring(l, rank, whom);
}

/* Something has changed that others may wait for. */
void tly_local_tell(struct tly_local *l)
{
    atomic_thread_fence(memory_order_seq_cst);
    for (uint32_t i = 0; i < l->count; i++)
        wake(l, i);
}

/* ... or this one. */
void tly_local_tell_one(struct tly_local *l, uint32_t rank)
{
    atomic_thread_fence(memory_order_seq_cst);
    wake(l, rank);
}

void tly_local_tell_sleepers(struct tly_local *l)
{
    if (atomic_load(&l->sleeping))
        tly_local_ring(l, l->me, TLY_WAKE_WAITERS);
}

static uint32_t whom_to_wake(struct tly_local *l)
{
    if (atomic_load(&l->spinning))
        return 0;
    if (atomic_load(&l->sleeping))
        return TLY_WAKE_WAITERS;
    return atomic_load(&l->in_flight) ? TLY_WAKE_THREAD : 0;
}

/* After a change of what it depends on.  Whoever writes last has seen all changes. */
static void set_wanted(struct tly_local *l)
{
    for (;;) {
        uint32_t whom = whom_to_wake(l);
        if (atomic_load_explicit(&l->own->wanted, memory_order_relaxed) != whom)
            atomic_store(&l->own->wanted, whom);
        if (whom == whom_to_wake(l))
            return;
    }
}

/* Has anybody posted what we have not read? */
static bool news(struct tly_local *l)
{
    for (uint32_t i = 0; i < l->count; i++)
        if (i != l->me &&
            tly_post_is_there(&l->at[i], atomic_load_explicit(&l->at[i].read, memory_order_relaxed)))
            return true;
    return atomic_load(&l->pending) > 0;
}

static void sleep_on_bell(struct tly_local *l, uint32_t bell, uint32_t as, int ms, int64_t deadline)
{
    int64_t until = tly_now() + ms * TLY_MS;
    if (deadline >= 0 && deadline < until)
        until = deadline;
    struct timespec t = {.tv_sec = until / TLY_SEC, .tv_nsec = until % TLY_SEC};
    syscall(SYS_futex, &l->own->bell, FUTEX_WAIT_BITSET, bell, &t, NULL, as);
}

/* --- driving ------------------------------------------------------------------------------------- */

/* How far one may go. */
struct errand {
    uint64_t light;               /* submission: it does operations of up to so many bytes; 0: all */
    const struct tly_event *done; /* a waiter: until its own is done; NULL: until somebody else looks */
    int64_t deadline;             /* of a waiter; negative: never */
};

static bool past(int64_t deadline)
{
    return deadline >= 0 && tly_now() >= deadline;
}

static bool called_off(struct tly_local *l, const struct errand *e)
{
    if (atomic_load_explicit(&l->claims, memory_order_relaxed))
        return true;
    if (e->done)
        return tly_event_is_set(e->done) || past(e->deadline);
    return !e->light && atomic_load_explicit(&l->spinning, memory_order_relaxed);
}

static uint64_t moved_bytes(const struct tly_local *l, const struct tly_round *r)
{
    uint64_t bytes = r->op->bytes;
    for (uint32_t i = 0; i < l->count && r->op->kind == TALLY_ALLGATHER; i++)
        bytes += i == l->me ? 0 : r->posts[i].bytes;
    return bytes;
}

/* Of many that go through windows, those far behind cannot get one soon.  Who has one is to give it back all the same: the
 * elected one may wait for it. */
static bool is_passed_over(const struct tly_local *l, const struct tly_round *r, int windowed)
{
    return r->windowed && windowed >= MOST_WINDOWED && !r->op->borrowed && !tly_stage_is_elected(l, r);
}

/* Whether any round has one for this rank, now, or somebody has left. */
static bool has_step(struct tly_local *l)
{
    for (uint32_t i = 0; i < l->count; i++)
        if (i != l->me && atomic_load_explicit(&l->at[i].control->left, memory_order_relaxed) > l->left[i])
            return true;
    int windowed = 0;
    for (struct tly_list *n = l->ready.next; n != &l->ready; n = n->next) {
        const struct tly_round *r = tly_list_entry(n, struct tly_round, node);
        if (is_passed_over(l, r, windowed))
            continue;
        if (tly_work_finished(r) || r->op->parts ||
            (r->windowed ? tly_stage_can(l, r, windowed == 0) : tly_work_left(r)))
            return true;
        windowed += r->windowed;
    }
    return false;
}

/* One step of the first round that has one. */
static bool step(struct tly_local *l, const struct errand *e)
{
    uint64_t before = 0; /* bytes that wait to be sent, of what is as urgent */
    int windowed = 0;    /* of those that go through windows, looked at in vain */
    for (struct tly_list *n = l->ready.next, *next; n != &l->ready; n = next) {
        struct tly_round *r = tly_list_entry(n, struct tly_round, node);
        next = n->next;
        if (is_passed_over(l, r, windowed))
            continue;
        if (tly_work_finished(r)) {
            tly_posts_finish(l, r);
            return true;
        }
        before += atomic_load_explicit(&r->op->waiting, memory_order_relaxed);
        if ((e->light && moved_bytes(l, r) > e->light) ||
            !(r->op->parts  ? tly_team_do(l, r, before)
              : r->windowed ? tly_stage_do(l, r, windowed == 0)
                            : tly_work_do(l, r))) {
            windowed += r->windowed;
            continue;
        }
        if (tly_work_finished(r))
            tly_posts_finish(l, r);
        return true;
    }
    return false;
}

static bool advance(struct tly_local *l, const struct errand *e)
{
    bool any = false, more;
    do {
        more = tly_posts_send(l);
        more |= tly_posts_read(l);
        if (atomic_load_explicit(&l->failed, memory_order_relaxed))
            return any;
        more |= step(l, e);
        any |= more;
    } while (more && !called_off(l, e));
    return any;
}

/* Who has the lock for a moment, to do something else, looks whether somebody has missed it. */
static bool try_lock(struct tly_local *l)
{
    if (pthread_mutex_trylock(&l->lock) == 0)
        return true;
    atomic_store(&l->missed, true);
    return pthread_mutex_trylock(&l->lock) == 0;
}

/* *looked: this thread itself has seen all that there is. */
static bool drive(struct tly_local *l, const struct errand *e, bool *looked)
{
    bool any = false;
    do {
        *looked = !atomic_load(&l->claims) && try_lock(l);
        if (!*looked)
            return any; /* who holds it looks at the inbox once more */
        if (!atomic_load_explicit(&l->failed, memory_order_relaxed))
            any |= advance(l, e);
        pthread_mutex_unlock(&l->lock);
    } while (atomic_load(&l->pending) > 0 && !atomic_load_explicit(&l->failed, memory_order_relaxed));
    return any;
}

/* Nobody looks any more: is there something to do all the same? */
static void hand_on(struct tly_local *l)
{
    bool busy = atomic_load(&l->in_flight) > 0;
    if (!busy || atomic_load(&l->spinning))
        return;
    if (!news(l) && pthread_mutex_trylock(&l->lock) == 0) {
        busy = has_step(l) || !tly_list_empty(&l->backlog);
        pthread_mutex_unlock(&l->lock);
        busy |= atomic_exchange(&l->missed, false);
    }
    if (busy)
        tly_local_ring(l, l->me, TLY_WAKE_THREAD);
}

/* Something lies in the inbox: whoever looks after this rank is to look. */
static void call_own(struct tly_local *l)
{
    set_wanted(l);
    uint32_t whom = atomic_load(&l->own->wanted);
    if (whom)
        tly_local_ring(l, l->me, whom);
}

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
        call_own(l);
}

/* A little is copied sooner than handed over. */
static bool spread_at_once(struct tly_local *l, struct tly_local_piece *piece)
{
    struct tly_local_op *op = piece->op;
    if ((uint64_t)piece->length * (l->count - 1) > LITTLE || atomic_load(&l->failed) ||
        pthread_mutex_trylock(&l->lock) != 0)
        return false;
    bool done = op->held && op->meeting && tly_team_spread(l, op->meeting, piece);
    if (done && tly_work_finished(op->meeting))
        tly_posts_finish(l, op->meeting);
    pthread_mutex_unlock(&l->lock);
    if (atomic_exchange(&l->missed, false) || news(l))
        call_own(l);
    return done;
}

void tly_local_landed(struct tly_local *l, struct tly_local_piece *piece)
{
    if (spread_at_once(l, piece))
        return;
    pthread_mutex_lock(&l->inbox_lock);
    tly_list_append(&l->landed, &piece->node);
    atomic_fetch_add(&l->pending, 1);
    pthread_mutex_unlock(&l->inbox_lock);
    call_own(l);
}

void tly_local_sent(struct tly_local *l, struct tly_local_piece *piece)
{
    if (!piece->ahead)
        return;
    piece->ahead = false;
    atomic_fetch_sub(&piece->op->waiting, piece->length);
    atomic_fetch_sub(&l->ahead, piece->length);
    /* Pairs with may_sum(). */
    if (!atomic_load(&l->to_wake) || atomic_fetch_sub(&l->to_wake, piece->length) > (int64_t)piece->length)
        return;
    atomic_store(&l->to_wake, 0);
    call_own(l);
}

void tly_local_blocked(struct tly_local *l, bool blocked)
{
    if (atomic_load_explicit(&l->blocked, memory_order_relaxed) == blocked)
        return;
    atomic_store(&l->blocked, blocked);
    if (blocked && atomic_exchange(&l->to_wake, 0))
        call_own(l);
}

void tly_local_withdraw(struct tly_local *l, struct tly_local_op *op)
{
    atomic_fetch_add(&l->claims, 1); /* who has the lock may have much to do */
    pthread_mutex_lock(&l->lock);
    atomic_fetch_sub(&l->claims, 1);
    if (op->held && !op->meeting &&
        !atomic_load(&l->failed)) { /* the others' rounds end when all posts have come */
        op->mark = true;
        tly_posts_send(l);
    }
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
            tly_team_give_up(l, op->meeting);
            tly_posts_let_go(l, op->meeting);
        }
        atomic_store_explicit(&op->diverted, true, memory_order_release);
        atomic_fetch_sub(&l->in_flight, 1);
    }
    pthread_mutex_unlock(&l->lock);
    tly_local_ring(l, l->me,
                   TLY_WAKE_THREAD | TLY_WAKE_WAITERS); /* to go on with what it was called off from */
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

void tly_local_join(struct tly_local *l, uint64_t submitted)
{
    atomic_fetch_add(&l->claims, 1);
    pthread_mutex_lock(&l->lock);
    atomic_fetch_sub(&l->claims, 1);
    l->joining = true;
    l->said = false;
    l->to_post = submitted;
    if (l->config.team) /* the others' posts are waited for: it may have to stand in */
        atomic_fetch_add(&l->in_flight, 1);
    if (!atomic_load(&l->failed))
        tly_posts_send(l);
    pthread_mutex_unlock(&l->lock);
    set_wanted(l);
    tly_local_ring(l, l->me, TLY_WAKE_THREAD | TLY_WAKE_WAITERS);
}

void tly_local_joined_all(struct tly_local *l)
{
    atomic_fetch_add(&l->claims, 1);
    pthread_mutex_lock(&l->lock);
    atomic_fetch_sub(&l->claims, 1);
    l->joining = false;
    pthread_mutex_unlock(&l->lock);
    if (l->config.team)
        atomic_fetch_sub(&l->in_flight, 1);
    set_wanted(l);
}

bool tly_local_is_idle(struct tly_local *l)
{
    if (pthread_mutex_trylock(&l->lock) != 0)
        return false;
    bool idle = (!l->joining || l->said) && atomic_load(&l->in_flight) == (l->joining && l->config.team);
    pthread_mutex_unlock(&l->lock);
    return idle;
}

void tly_local_rest(const struct tly_local *l, unsigned spins)
{
    if (l->crowded || spins > PAUSES)
        sched_yield();
    else
        tly_pause();
}

/* Who waits for its operations one by one comes back in a moment.  Until then the others would wake our thread for
 * each post of theirs, and that costs more than the operation.  The lock stays held: of a call of half a microsecond each
 * time that it is taken counts. */
static void linger(struct tly_local *l, const struct errand *e, bool eager)
{
    int64_t until = 0;
    for (int spins = 1; atomic_load(&l->in_flight) && !atomic_load(&l->claims); spins++) {
        if ((eager && !news(l)) || !advance(l, e))
            tly_local_rest(l, 0);
        if (spins % TLY_LOOKS)
            continue;
        int64_t now = tly_now();
        until = until ? until : now + l->linger_ns;
        if (now >= until)
            break;
    }
}

/* The operation is the engine's from here on. */
static void take(struct tly_local *l, struct tly_local_op *op)
{
    tly_local_ref(l);
    op->alone = atomic_fetch_add(&l->in_flight, 1) == 0;
}

/* Without any of what follows, where its caller will wait. */
static enum tly_alone do_alone(struct tly_local *l, struct tly_local_op *op)
{
    if (!(atomic_load_explicit(&l->prompt, memory_order_relaxed) || l->count == 1) ||
        atomic_load(&l->in_flight) || pthread_mutex_trylock(&l->lock) != 0)
        return TLY_ALONE_NOT;
    struct tly_post p;
    uint64_t at = l->tail;
    enum tly_alone done = tly_alone_do(l, op, &p);
    if (done == TLY_ALONE_POSTED) {
        take(l, op);
        tly_posts_follow(l, op, &p, at);
    }
    pthread_mutex_unlock(&l->lock);
    return done;
}

/* Past the inbox, where nobody else is at work.  True: it is taken. */
static bool submit_directly(struct tly_local *l, struct tly_local_op *op, const struct errand *e, bool prompt)
{
    if (pthread_mutex_trylock(&l->lock) != 0)
        return false;
    bool taken = !atomic_load(&l->failed) && !atomic_load(&l->pending) && tly_list_empty(&l->backlog);
    if (taken) {
        tly_list_append(&l->backlog, &op->node);
        advance(l, e);
        if (prompt)
            linger(l, e, op->bytes <= TLY_EAGER);
    }
    pthread_mutex_unlock(&l->lock);
    return taken;
}

bool tly_local_submit(struct tly_local *l, struct tly_local_op *op)
{
    bool looked;
    enum tly_alone alone = do_alone(l, op);
    if (alone == TLY_ALONE_NOT)
        take(l, op);
    bool prompt = op->alone && atomic_load_explicit(&l->prompt, memory_order_relaxed);
    const struct errand light = {.light = prompt ? PROMPT : LIGHT};
    if (alone != TLY_ALONE_NOT || submit_directly(l, op, &light, prompt)) {
        if (alone == TLY_ALONE_POSTED ||
            atomic_load(&l->pending)) /* not read yet; of who found the lock taken */
            drive(l, &light, &looked);
        if (alone == TLY_ALONE_ENDED) {
            if (atomic_load_explicit(&l->own->wanted,
                                     memory_order_relaxed)) /* for one before, whose waiter had left */
                set_wanted(l);
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
        drive(l, &light, &looked);
    }
    if (atomic_load(&l->in_flight))
        atomic_store_explicit(&l->prompt, false, memory_order_relaxed);
    set_wanted(l);
    hand_on(l);
    return false;
}

void tly_local_count(const struct tly_local *l, uint64_t *ops, uint64_t *bytes)
{
    *ops = atomic_load_explicit(&l->ended_ops, memory_order_relaxed);
    *bytes = atomic_load_explicit(&l->ended_bytes, memory_order_relaxed);
}

bool tly_local_wait(struct tly_local *l, struct tly_local_op *op, struct tly_event *done, int64_t deadline)
{
    const struct errand mine = {.done = done, .deadline = deadline};
    int64_t since = 0;
    unsigned spins = 0;
    bool diverted = false, late = false, looked;
    if (op->alone && atomic_load(&l->in_flight) == 1)
        atomic_store_explicit(&l->prompt, true, memory_order_relaxed);
    atomic_fetch_add(&l->inside, 1);
    atomic_fetch_add(&l->spinning, 1);
    set_wanted(l);
    while (!tly_event_is_set(done) && !late &&
           !(diverted = atomic_load_explicit(&op->diverted, memory_order_acquire)) &&
           !atomic_load_explicit(&l->failed, memory_order_relaxed)) {
        if (drive(l, &mine, &looked)) {
            spins = 0;
            late = past(deadline);
            continue;
        }
        tly_local_rest(l, ++spins);
        if (spins % SPINS)
            continue;
        int64_t now = tly_now();
        since = spins == SPINS ? now : since;
        late = deadline >= 0 && now >= deadline;
        if (now - since < SPIN_US * 1000 || late)
            continue;
        atomic_fetch_add(&l->sleeping, 1);
        atomic_fetch_sub(&l->spinning, 1);
        set_wanted(l);
        uint32_t bell = atomic_load(&l->own->bell);
        if (!drive(l, &mine, &looked) && !news(l) && !tly_event_is_set(done) &&
            !atomic_load_explicit(&op->diverted, memory_order_acquire) && !atomic_load(&l->failed))
            sleep_on_bell(l, bell, TLY_WAKE_WAITERS, looked ? NAP_MS : BLINK_MS, deadline);
        atomic_fetch_sub(&l->sleeping, 1);
        atomic_fetch_add(&l->spinning, 1);
        set_wanted(l);
        spins = 0;
    }
    atomic_fetch_sub(&l->spinning, 1);
    set_wanted(l);
    hand_on(l);
    diverted |= !tly_event_is_set(done) && !late; /* failed: whoever ends it sets the event */
    atomic_fetch_sub(&l->inside, 1);
    return !diverted;
}

void tly_local_drain(struct tly_local *l, int64_t deadline)
{
    static const struct errand all = {0};
    while (atomic_load(&l->in_flight) && tly_now() < deadline && !atomic_load(&l->failed)) {
        uint32_t bell = atomic_load(&l->own->bell);
        set_wanted(l);
        bool looked;
        if (!drive(l, &all, &looked) && atomic_load(&l->in_flight))
            sleep_on_bell(l, bell, TLY_WAKE_THREAD, DRAIN_MS, deadline);
    }
}

static void *run(void *arg)
{
    static const struct errand all = {0};
    struct tly_local *l = arg;
    tly_topo_place(l->home, 0);
    while (!atomic_load(&l->stopping)) {
        uint32_t bell = atomic_load(&l->own->bell);
        bool looked = true; /* while others spin, they look */
        if (!atomic_load(&l->spinning))
            drive(l, &all, &looked);
        if (!atomic_load(&l->stopping))
            sleep_on_bell(l, bell, TLY_WAKE_THREAD, looked ? NAP_MS : BLINK_MS, -1);
    }
    return NULL;
}

/* --- the end ------------------------------------------------------------------------------------- */

/* Nobody may write into our memory any more: who is just doing so gets to the end of it.  One that is stopped is not
 * waited for: when it goes on it looks at our `failed` before the next block, so at most the one that it was in the midst
 * of, in the pool or just about to be written, comes late. */
static void stop_writers(struct tly_local *l)
{
    int64_t patience = tly_now() + STOPPED_MS * TLY_MS;
    atomic_store(&l->own->failed, 1);
    atomic_thread_fence(memory_order_seq_cst); /* pairs with that in is_given_up(): then the memory changes */
    for (uint32_t i = 0; i < l->count; i++) {
        struct tly_control *other = i == l->me ? NULL : l->at[i].control;
        struct pollfd gone = {.fd = l->at[i].pidfd, .events = POLLIN};
        uint32_t at = other ? atomic_load(&other->working) : 0;
        while (other && tly_now() < patience &&
               ((at && atomic_load(&other->working) == at) ||
                (l->direct && atomic_load(&other->writing) == l->me + 1)) &&
               poll(&gone, 1, 1) <= 0)
            ;
    }
}

void tly_local_fail(struct tly_local *l, int err, const char *sentence)
{
    struct tly_list *lists[] = {&l->ops, &l->backlog, &l->inbox};
    atomic_store(&l->failed, true);
    pthread_mutex_lock(&l->lock);
    stop_writers(l);
    pthread_mutex_lock(&l->inbox_lock);
    struct tly_list all = TLY_LIST_INIT(all);
    for (int i = 0; i < 3; i++)
        while (!tly_list_empty(lists[i])) {
            struct tly_list *n = lists[i]->next;
            tly_list_remove(n);
            tly_list_append(&all, n);
        }
    while (!tly_list_empty(&l->landed))
        tly_list_remove(l->landed.next);
    atomic_store(&l->pending, 0);
    pthread_mutex_unlock(&l->inbox_lock);
    bool posted = false;
    while (!tly_list_empty(&all)) {
        struct tly_local_op *op = tly_list_entry(all.next, struct tly_local_op, node);
        posted |= op->meeting != NULL;
        if (op->meeting)
            tly_posts_let_go(l, op->meeting);
        else
            tly_list_remove(&op->node);
        tly_posts_end(l, op, err, sentence);
    }
    if (posted && atomic_load(&l->own->left)) { /* no coordinator says it: to the others we have just left */
        atomic_store_explicit(&l->own->left, 2, memory_order_release);
        tly_local_tell(l);
    }
    pthread_mutex_unlock(&l->lock);
    tly_local_tell_sleepers(l);
}

void tly_local_leave(struct tly_local *l)
{
    pthread_mutex_lock(&l->lock); /* nobody is just reading what may be written over from now on */
    atomic_store_explicit(&l->own->left, 1, memory_order_release);
    pthread_mutex_unlock(&l->lock);
    tly_local_tell(l);
}

void tly_local_stop(struct tly_local *l, int err, const char *sentence)
{
    if (!l)
        return;
    if (l->thread_started)
        tly_local_fail(l, err, sentence);
    atomic_store(&l->stopping, true);
    if (l->thread_started) {
        tly_local_ring(l, l->me, TLY_WAKE_THREAD);
        pthread_join(l->thread, NULL);
        l->thread_started = false;
    }
    while (atomic_load(&l->inside)) {
        tly_local_ring(l, l->me, TLY_WAKE_WAITERS);
        struct timespec moment = {.tv_nsec = TLY_MS};
        nanosleep(&moment, NULL);
    }
    pthread_mutex_lock(&l->lock);
    for (uint32_t i = 0; i < l->count; i++) {
        if (i != l->me) {
            tly_segment_unmap(l->at[i].base, l->at[i].bytes);
            tly_fd_close(l->at[i].pidfd);
        }
        l->at[i] = (struct tly_neighbour){.pidfd = -1};
    }
    struct tly_round *r;
    tly_map_each(&l->rounds, r)
    {
        free(r->data);
        free(r);
    }
    tly_map_finish(&l->rounds);
    l->rounds = (struct tly_map){0};
    l->count = 0;
    pthread_mutex_unlock(&l->lock);
}

void tly_local_ref(struct tly_local *l)
{
    atomic_fetch_add_explicit(&l->references, 1, memory_order_relaxed);
}

void tly_local_unref(struct tly_local *l)
{
    if (!l || atomic_fetch_sub_explicit(&l->references, 1, memory_order_acq_rel) != 1)
        return;
    while (!tly_list_empty(&l->idle)) {
        struct tly_round *r = tly_list_entry(tly_list_take(&l->idle), struct tly_round, node);
        free(r->data);
        free(r);
    }
    tly_stage_close(l);
    tly_segment_unref(l->segment);
    pthread_mutex_destroy(&l->lock);
    pthread_mutex_destroy(&l->inbox_lock);
    free(l->scratch);
    free(l);
}

/* --- facts --------------------------------------------------------------------------------------- */

static bool is_missing(const struct tly_local *l, const struct tly_round *r, uint32_t rank)
{
    return !r->posts[rank].kind && !tly_posts_lacks(l, r, rank);
}

/* "1, 3-4" of the ranks that have not posted. */
static void missing(const struct tly_local *l, const struct tly_round *r, char *out, size_t len)
{
    size_t at = 0;
    out[0] = '\0';
    for (uint32_t i = 0; i < l->count; i++) {
        uint32_t to = i;
        if (!is_missing(l, r, i))
            continue;
        while (to + 1 < l->count && is_missing(l, r, to + 1))
            to++;
        if (at + 32 < len)
            at += (size_t)(to > i ? snprintf(out + at, len - at, "%s%u-%u", at ? ", " : "", i, to)
                                  : snprintf(out + at, len - at, "%s%u", at ? ", " : "", i));
        i = to;
    }
}

int tly_local_late(struct tly_local *l, struct tly_local_late *out)
{
    if (pthread_mutex_trylock(&l->lock) != 0)
        return -EBUSY;
    bool any = !tly_list_empty(&l->ops);
    if (any) {
        const struct tly_local_op *op = tly_list_entry(l->ops.next, struct tly_local_op, node);
        const struct tly_post *posts = op->meeting->posts;
        out->key = op->key;
        out->round = op->round;
        out->lowest = 0;
        while (!posts[out->lowest].kind ||
               (posts[out->lowest].flags & TLY_POST_PATIENT && out->lowest < l->me))
            out->lowest++;
        missing(l, op->meeting, out->ranks, sizeof out->ranks);
    }
    pthread_mutex_unlock(&l->lock);
    return any;
}

int tly_local_dead(struct tly_local *l)
{
    int dead = -1;
    if (pthread_mutex_trylock(&l->lock) != 0)
        return -1;
    for (uint32_t i = 0; i < l->count && dead < 0; i++)
        if (l->at[i].pidfd >= 0 && !atomic_load(&l->at[i].control->left) && tly_process_dies(l->at[i].pidfd))
            dead = (int)i;
    pthread_mutex_unlock(&l->lock);
    return dead;
}

struct tly_segment *tly_local_segment(struct tly_local *l)
{
    return l->segment;
}

bool tly_local_direct(const struct tly_local *l)
{
    return l->direct;
}

/* --- the beginning ------------------------------------------------------------------------------- */

/* More ranks than cores?  A launcher may have bound each rank to cores of its own. */
static bool is_crowded(const struct tly_local *l)
{
    int mine = 0, all = 0;
    for (int i = 0; i < TLY_PROCESSORS / 64; i++) {
        uint64_t any = 0;
        for (uint32_t rank = 0; rank < l->count; rank++)
            any |= l->at[rank].control->processors[i];
        mine += __builtin_popcountll(l->own->processors[i]);
        all += __builtin_popcountll(any);
    }
    return (int)l->count > (mine ? tly_topo_cores() * all / mine : tly_topo_cores());
}

int tly_local_open(const struct tly_local_config *config, struct tly_local **out)
{
    struct tly_local *l = calloc(1, sizeof *l);
    *out = NULL;
    if (!l)
        return tly_fail(ENOMEM, "out of memory");
    l->references = 1;
    l->config = *config;
    l->calls = config->calls;
    l->user = config->user;
    l->me = config->rank;
    l->count = config->ranks;
    l->generation = tly_fork_generation();
    pthread_mutex_init(&l->lock, NULL);
    pthread_mutex_init(&l->inbox_lock, NULL);
    struct tly_list *lists[] = {&l->inbox, &l->landed, &l->ops, &l->backlog, &l->ready, &l->idle};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        tly_list_init(lists[i]);
    for (uint32_t i = 0; i < TLY_WORKS; i++)
        l->free_work[l->free_count++] = (uint16_t)(TLY_WORKS - 1 - i);
    for (int i = 0; i < TLY_LOCAL_RANKS; i++)
        l->at[i].pidfd = -1;
    int err = tly_local_meet(l);
    if (!err) {
        l->crowded = is_crowded(l);
        l->linger_ns = LINGER_NS;
        l->home = tly_topo_node(-1, 0);
        err = tly_thread_start(&l->thread, "tally-local", run, l);
    }
    if (!err) {
        l->thread_started = true;
        *out = l;
        return 0;
    }
    tly_local_stop(l, ESHUTDOWN, "no shared memory");
    tly_local_unref(l);
    return err == -EOPNOTSUPP ? 0 : err;
}
