/* local.c - the way through shared memory: where all ranks share one machine and no tallyd sums with them, operations
 * go to src/local/ instead of the services.  (team.c: several machines.)  An operation
 * on which ranks disagree, or which one refuses, goes to the service all the same: it tells all ranks what is wrong. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "comm/internal.h"
#include "local/local.h"

enum { MEET_MS = 20000 };

static struct tally_op *op_of(struct tly_local_op *local)
{
    return tly_list_entry(local, struct tally_op, local);
}

static void finish(tally_comm *c, struct tally_op *op)
{
    tly_stamp(c->trace, TLY_AT_DONE, TLY_NO_PEER, op->key, op->round, TLY_NO_PART, (uint32_t)op->bytes);
    tly_op_forget_tensor(c, op->tensor, op->mark);
    op->tensor = NULL;
}

/* --- called by the engine, under its lock -------------------------------------------------------- */

static void ended(void *user, struct tly_local_op *local, int err, const char *sentence)
{
    tally_comm *c = user;
    struct tally_op *op = op_of(local);
    if (op->team) {
        tly_team_over(c, op, err, sentence);
        return;
    }
    if (err) {
        char text[TLY_SENTENCE], title[TLY_TITLE];
        snprintf(text, sizeof text, "%s: %s", tly_op_title(op, title), sentence);
        op->status = -err;
        op->sentence = strdup(text);
    }
    finish(c, op);
    atomic_fetch_add_explicit(&c->ops_done, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&c->bytes_done, op->bytes, memory_order_relaxed);
    tly_op_set_done(op);
    tly_op_unref(op);
}

static void divert(void *user, struct tly_local_op *local)
{
    tally_comm *c = user;
    if (op_of(local)->team)
        return; /* its home has heard of the same, and says what is wrong */
    op_of(local)->submitted = tly_now();
    pthread_mutex_lock(&c->inbox_lock);
    tly_list_append(&c->inbox, &op_of(local)->node);
    pthread_mutex_unlock(&c->inbox_lock);
    tly_loop_wake(&c->loop);
}

static void *gather(void *user, struct tly_local_op *local, const int64_t first_dims[],
                    const uint64_t bytes[])
{
    tally_comm *c = user;
    struct tally_op *op = op_of(local);
    uint64_t total = 0;
    for (int i = 0; i < c->size; i++) {
        if (__builtin_add_overflow(total, bytes[i], &total) || total > SIZE_MAX / 2)
            return NULL;
        op->first_dims[i] = first_dims[i];
    }
    op->gathered_bytes = total;
    static uint8_t nothing; /* of empty pieces the caller may have no memory */
    if (op->even)
        return op->output ? op->output : &nothing;
    op->gathered = malloc(total ? total : 1);
    return op->gathered;
}

/* The loop fails us: the engine's lock is held here, and it would be taken again. */
static void broken(void *user, int err, const char *sentence)
{
    tally_comm *c = user;
    pthread_mutex_lock(&c->inbox_lock);
    if (!c->broken_err) {
        c->broken_err = err;
        snprintf(c->broken, sizeof c->broken, "%s", sentence);
    }
    pthread_mutex_unlock(&c->inbox_lock);
    tly_loop_wake(&c->loop);
}

static int turn(void *user, int ms)
{
    tally_comm *c = user;
    tly_loop_turn(&c->loop, ms);
    int err = atomic_load(&c->failed);
    return err ? tly_fail(err, "%s", c->sentence) : 0;
}

static const struct tly_local_user calls = {
    .ended = ended,
    .divert = divert,
    .stand_in = tly_joining_stand_in,
    .summed = tly_team_summed,
    .gather = gather,
    .broken = broken,
    .turn = turn};

/* --- called by the communicator ------------------------------------------------------------------ */

int tly_comm_meet(tally_comm *c)
{
    bool all = c->machines == 1 && c->services == 1 && strcmp(c->params.local, "on") == 0;
    if (!(all || c->carry) || c->local_size > TLY_LOCAL_RANKS)
        return 0;
    uint32_t n = 0;
    c->neighbours = calloc((size_t)c->local_size, sizeof *c->neighbours);
    if (!c->neighbours)
        return tly_fail(ENOMEM, "out of memory");
    for (int i = 0; i < c->size; i++)
        if (c->member.roster.ranks[i].machine == (uint32_t)c->machine)
            c->neighbours[n++] = (uint32_t)i;
    struct tly_local_config config = {
        .calls = &calls,
        .user = c,
        .rank = (uint32_t)c->local_rank,
        .ranks = n,
        .numbers = c->neighbours,
        .team = c->machines > 1,
        .job = c->member.identity.incarnation,
        .secret = c->member.identity.secret,
        .patience_ms = MEET_MS,
        /* Waiting for that one our loop is silent, and must not be for as long as a rank may be. */
        .stuck_ms = (int)(1000 * (c->params.dead_timeout < 10 ? c->params.dead_timeout / 2 : 5))};
    int err = tly_local_open(&config, &c->local);
    if (!err && !c->local)
        tly_log(c->local_rank == 0 ? TALLY_LOG_WARNING : TALLY_LOG_DEBUG, "comm",
                "the ranks cannot share memory: %s; they go through the network stack", tly_error());
    return err;
}

bool tly_comm_is_local(const struct tally_op *op, bool ordered)
{
    /* What may meet another kind must at least be told of. */
    return op->comm->local && op->comm->machines == 1 && op->group->number == 0 && op->kind < TALLY_MESSAGE &&
           (op->kind <= TALLY_BARRIER || ordered);
}

void tly_comm_describe_local(struct tally_op *op)
{
    struct tly_local_op *l = &op->local; /* clear, as the whole operation */
    l->key = op->key;
    l->spec = op->spec;
    l->round = op->round;
    l->kind = op->kind;
    l->dtype = op->dtype;
    l->reduction = op->reduction;
    l->mark = op->mark || op->kind > TALLY_BARRIER;
    l->patient = op->patient;
    l->root = op->root;
    l->priority = op->priority;
    l->prescale = op->prescale;
    l->postscale = op->postscale;
    l->count = op->count;
    l->bytes = op->bytes;
    l->input = op->input;
    l->output = op->output;
    l->first_dim = op->ndim ? op->shape[0] : 1;
}

void tly_comm_submit_local(tally_comm *c, struct tally_op *op)
{
    tly_comm_describe_local(op);
    if (!tly_local_submit(c->local, &op->local))
        return;
    op->engine = NULL;
    finish(c, op);
    if (op->queued) {
        tly_op_set_done(op);
        tly_op_unref(op);
    } else { /* nobody has the handle yet */
        atomic_store_explicit(&op->done.state, 1, memory_order_relaxed);
        atomic_store_explicit(&op->references, 1, memory_order_relaxed);
    }
}

void tly_comm_count(const tally_comm *c, uint64_t *ops, uint64_t *bytes)
{
    *ops = *bytes = 0;
    if (c->local)
        tly_local_count(c->local, ops, bytes);
    *ops += c->ops_done;
    *bytes += c->bytes_done;
}

/* For whom the oldest operation waits.  The lowest rank that waits says it aloud. */
static void watch_oldest(tally_comm *c)
{
    struct tly_local_late l;
    struct lateness *w = &c->lateness;
    int64_t now = c->loop.awake;
    int oldest = tly_local_late(c->local, &l);
    if (oldest == 0 || atomic_load_explicit(&c->stands_by, memory_order_relaxed)) {
        w->since = 0;
        return;
    }
    if (oldest < 0)
        return;
    if (!w->since || w->key != l.key || w->round != l.round)
        *w = (struct lateness){.key = l.key,
                               .round = l.round,
                               .since = now,
                               .warn_after = (int64_t)(c->params.late_warning * (double)TLY_SEC)};
    double seconds = (double)(now - w->since) / TLY_SEC;
    bool warn = now - w->since >= w->warn_after;
    bool over = c->params.timeout > 0 && seconds >= c->params.timeout;
    if (!warn && !over)
        return;
    char title[TLY_TITLE] = "an operation";
    pthread_mutex_lock(&c->names_lock);
    const struct tensor *t = tly_map_get(&c->names, l.key);
    if (t)
        tly_tensor_title(t, title, sizeof title);
    pthread_mutex_unlock(&c->names_lock);
    if (warn) {
        w->warn_after *= 2;
        if (l.lowest == (uint32_t)c->rank && l.ranks[0])
            tly_warn("comm", "%s has waited %.0f s for rank %s", title, seconds, l.ranks);
    }
    if (over) {
        snprintf(c->doom, sizeof c->doom, "%s has waited %.0f s%s%s (TALLY_TIMEOUT)", title, seconds,
                 l.ranks[0] ? " for rank " : "", l.ranks);
        tly_member_complain(&c->member, ETIME, c->doom);
        c->doom_at = now + TLY_SEC;
    }
}

/* A rank of this machine that has died while an operation waits: its sockets tell of it only once it has given its memory
 * back, seconds later if that is much, and to a coordinator that is away they do not. */
static void look_for_dead(tally_comm *c)
{
    struct tly_local_late oldest = {0};
    bool any = tly_local_late(c->local, &oldest) > 0;
    bool stuck = any && oldest.key == c->stuck_key && oldest.round == c->stuck_round;
    c->stuck_key = oldest.key;
    c->stuck_round = oldest.round;
    int dead = stuck ? tly_local_dead(c->local) : -1;
    if (dead < 0)
        return;
    const struct tly_roster *r = &c->member.roster;
    uint32_t rank = c->neighbours[dead];
    snprintf(c->doom, sizeof c->doom, "rank %u on %s has died", rank,
             r->services[r->ranks[rank].machine].host);
    tly_member_complain(&c->member, ECONNRESET, c->doom);
    c->doom_at = c->loop.awake + TLY_SEC;
}

void tly_comm_tick_local(tally_comm *c)
{
    if (!c->local || c->doom_at || atomic_load_explicit(&c->failed, memory_order_relaxed))
        return;
    pthread_mutex_lock(&c->inbox_lock);
    int err = c->broken_err;
    pthread_mutex_unlock(&c->inbox_lock);
    if (err) {
        tly_member_complain(&c->member, err, c->broken);
        tly_comm_fail(c, err, c->broken);
        return;
    }
    tly_team_tick(c);
    look_for_dead(c);
    if (c->machines == 1 && !c->doom_at)
        watch_oldest(c); /* else the home of each does */
}

/* --- the pool ------------------------------------------------------------------------------------ */

int tally_alloc(tally_comm *c, size_t bytes, void **memory)
{
    int err = tly_comm_check(c);
    return err ? err : tly_pool_alloc(c->local ? tly_local_segment(c->local) : NULL, bytes, memory);
}

int tally_comm_has_pool(const tally_comm *c)
{
    return c->local != NULL;
}

int tally_free(void *memory)
{
    int err = memory ? tly_pool_free(memory) : 0;
    return err ? tly_fail(-err, "%p is not from tally_alloc()", memory) : 0;
}
