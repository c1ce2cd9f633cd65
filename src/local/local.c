/* local.c - the engine's life: it begins, the rank joins or leaves, the engine fails or stops; and facts about it.
 *
 * tly_local_open() has meet.c exchange the segments and starts the thread "tally-local".  A failure ends all operations
 * and waits until no other rank touches our memory.  After tly_local_stop() this rank touches nobody's.  The structure
 * itself lives as long as references to it.
 *
 * Any thread that is not inside may call these; where one takes the engine's lock, local.h says what it waits for. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/fork.h"
#include "base/thread.h"
#include "local/drive.h"
#include "local/gpus.h"
#include "local/posts.h"
#include "local/process.h"
#include "local/window.h"
#include "local/work.h"
#include "topo/topo.h"

enum {
    LINGER_NS = 2000,  /* longest that a submission looks for the others' posts, where its caller will wait */
    STOPPED_MS = 1000, /* who takes longer over a chunk is stopped, and not waited for at a failure */
};

/* --- the beginning ------------------------------------------------------------------------------ */

/* More ranks than cores?  A launcher may have bound each rank to cores of its own. */
static bool local_is_crowded(const struct tly_local *l)
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

/* Does any rank of the machine run on another NUMA node? */
static bool local_is_far(const struct tly_local *l)
{
    bool far = false;
    for (uint32_t rank = 0; rank < l->count; rank++)
        far |= l->at[rank].control->node != l->home;
    return far;
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
    tly_local_group_make_all(&l->all, l->count, l->me);
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
    l->home = tly_topo_node(-1, 0);
    int err = tly_local_meet(l);
    if (!err) {
        l->crowded = local_is_crowded(l);
        l->far = local_is_far(l);
        l->linger_ns = LINGER_NS;
        err = tly_thread_start(&l->thread, "tally-local", tly_drive_thread, l);
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

/* --- joining ------------------------------------------------------------------------------------ */

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
    tly_local_set_wanted(l);
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
    tly_local_set_wanted(l);
}

bool tly_local_is_idle(struct tly_local *l)
{
    if (pthread_mutex_trylock(&l->lock) != 0)
        return false;
    bool idle = (!l->joining || l->said) && atomic_load(&l->in_flight) == (l->joining && l->config.team);
    pthread_mutex_unlock(&l->lock);
    return idle;
}

/* --- the end ------------------------------------------------------------------------------------ */

/* Nobody may write into our memory any more: who is just doing so gets to the end of it.  One that is stopped is not
 * waited for: when it goes on it looks at our `failed` before the next block, so at most the one that it was in the midst
 * of, in the pool or just about to be written, comes late. */
static void local_stop_writers(struct tly_local *l)
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
    tly_gpus_stop(l);
    local_stop_writers(l);
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
    tly_gpus_close(l);
    pthread_mutex_lock(&l->lock);
    for (uint32_t i = 0; i < l->count; i++) {
        if (i != l->me) {
            tly_segment_unmap(l->at[i].base, l->at[i].bytes);
            tly_fd_close(l->at[i].pidfd);
        }
        l->at[i] = (struct tly_neighbour){.pidfd = -1};
    }
    struct tly_local_round *r;
    tly_map_each(&l->rounds, r)
    {
        free(r->data);
        free(r);
    }
    tly_map_finish(&l->rounds);
    l->rounds = (struct tly_map){0};
    l->count = l->all.size = 0;
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
        struct tly_local_round *r = tly_list_entry(tly_list_take(&l->idle), struct tly_local_round, node);
        free(r->data);
        free(r);
    }
    tly_windows_close(l);
    tly_ferry_close(l);
    tly_segment_unref(l->segment);
    pthread_mutex_destroy(&l->lock);
    pthread_mutex_destroy(&l->inbox_lock);
    free(l->scratch);
    free(l);
}

/* --- facts -------------------------------------------------------------------------------------- */

static bool local_is_missing(const struct tly_local *l, const struct tly_local_round *r, uint32_t rank)
{
    return r->ranks >> rank & 1 && !r->posts[rank].call && !tly_posts_lacks(l, r, rank);
}

/* "1, 3-4", as the job counts, of the ranks that have not posted. */
static void local_missing(const struct tly_local *l, const struct tly_local_round *r, char *out, size_t len)
{
    size_t at = 0;
    out[0] = '\0';
    for (uint32_t i = 0; i < l->count; i++) {
        uint32_t to = i, first = tly_local_number(l, i), last = first;
        if (!local_is_missing(l, r, i))
            continue;
        while (to + 1 < l->count && local_is_missing(l, r, to + 1) && tly_local_number(l, to + 1) == last + 1)
            last = tly_local_number(l, ++to);
        if (at + 32 < len)
            at += (size_t)(last > first ? snprintf(out + at, len - at, "%s%u-%u", at ? ", " : "", first, last)
                                        : snprintf(out + at, len - at, "%s%u", at ? ", " : "", first));
        i = to;
    }
}

/* NULL: there is none. */
static const struct tly_local_op *local_oldest(const struct tly_local *l, bool teams)
{
    for (const struct tly_list *n = l->ops.next; n != &l->ops; n = n->next) {
        const struct tly_local_op *op = tly_list_entry(n, struct tly_local_op, node);
        if (teams || !op->parts)
            return op;
    }
    return NULL;
}

int tly_local_late(struct tly_local *l, bool teams, struct tly_local_late *out)
{
    if (pthread_mutex_trylock(&l->lock) != 0)
        return -EBUSY;
    const struct tly_local_op *op = local_oldest(l, teams);
    if (op) {
        const struct tly_post *posts = op->meeting->posts;
        uint32_t lowest = 0;
        while (!posts[lowest].call || (posts[lowest].flags & TLY_POST_PATIENT && lowest < l->me))
            lowest++;
        out->key = op->key;
        out->round = op->round;
        out->lowest = tly_local_number(l, lowest);
        local_missing(l, op->meeting, out->ranks, sizeof out->ranks);
    }
    pthread_mutex_unlock(&l->lock);
    return op != NULL;
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

void tly_local_count(const struct tly_local *l, uint64_t *ops, uint64_t *bytes)
{
    *ops = atomic_load_explicit(&l->ended_ops, memory_order_relaxed);
    *bytes = atomic_load_explicit(&l->ended_bytes, memory_order_relaxed);
}

struct tly_segment *tly_local_segment(struct tly_local *l)
{
    return l->segment;
}

bool tly_local_direct(const struct tly_local *l)
{
    return l->direct;
}
