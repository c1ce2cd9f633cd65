/* coordinator.c - what members say, who is missing or dead, and what becomes of the job.
 *
 * The job's state goes from GATHERING to RUNNING, and ends as FAILED or ENDED.  After each thing that has happened
 * coordinator_advance() does whatever is due now.  Only this file calls it: the others change what it looks at, and use tell.c
 * alone.
 *
 * A member is dead when its connection ends, or when it is silent for too long (coordinator_lose).  All members then get one
 * sentence.  A rank's tly_comm_fail() closes its connections first and ends its operations then, so nothing touches a buffer
 * whose operation has ended.
 *
 * All of it runs in the coordinator's loop, but for creation and end. */
#include "membership/coordinator.h"

#include <errno.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/fork.h"
#include "base/log.h"
#include "base/thread.h"
#include "membership/adapt.h"
#include "membership/change.h"
#include "membership/internal.h"
#include "membership/start.h"
#include "transport/address.h"

/* CONNECT_S: longer than members take to find out themselves what they cannot reach. */
enum {
    MISSING_EVERY_S = 10,
    CONNECT_S = 30,
    MOST_WATCHERS = 64, /* at a time */
    LEAVE_S = 5,        /* so long a coordinator apart waits for members that know that the job is over */
};

/* --- sending ------------------------------------------------------------------------------------- */

static bool coordinator_next(void *user, struct tly_link *link, struct tly_outgoing *out)
{
    struct tly_coordinator_member *m = user;
    return tly_outbox_next(&m->outbox, out, NULL);
}

/* --- gathering ----------------------------------------------------------------------------------- */

/* Not there, and has not left. */
static bool coordinator_is_missing(const struct tly_coordinator *c, uint32_t rank)
{
    return !c->ranks[rank] && !(rank < c->roster.rank_count && c->roster.ranks[rank].left);
}

static bool coordinator_all_here(const struct tly_coordinator *c)
{
    uint32_t i = 0;
    while (i < c->size && !coordinator_is_missing(c, i))
        i++;
    return c->size && i == c->size;
}

/* "2, 3, 7-9" of the ranks that are missing. */
static void coordinator_missing_text(const struct tly_coordinator *c, char *out, size_t len)
{
    size_t at = 0;
    out[0] = '\0';
    for (uint32_t i = 0; i < c->size && at + 32 < len; i++) {
        if (!coordinator_is_missing(c, i))
            continue;
        uint32_t end = i;
        while (end + 1 < c->size && coordinator_is_missing(c, end + 1))
            end++;
        at += (size_t)snprintf(out + at, len - at, end > i + 1 ? "%s%u-%u" : "%s%u", at ? ", " : "", i, end);
        if (end == i + 1)
            end = i;
        i = end;
    }
}

/* Something has happened: whatever is due now. */
static void coordinator_advance(struct tly_coordinator *c)
{
    bool all_ranks = c->state == GATHERING && coordinator_all_here(c);
    if (all_ranks && c->resuming) {
        c->state = RUNNING;
        c->wanted = true; /* whatever was under way begins anew */
        c->resumed_at = c->loop.awake;
        tly_info("join", "all %u ranks of the running job are here", c->size);
    }
    if (all_ranks && !c->resuming) {
        if (!c->complete_at)
            c->complete_at = c->loop.awake;
        if (c->tallyds_here >= c->servers)
            tly_start_prove(c);
    }
    if (c->state == PROVING) {
        bool proved = c->size > 0;
        for (uint32_t i = 0; i < c->size; i++)
            proved &= c->ranks[i]->proved;
        if (proved)
            tly_start_survey(c);
    }
    while (c->state == MEASURING && !tly_start_awaits(c))
        tly_start_go_on_measuring(c);
    if (c->state == INVITING) {
        bool begun = true;
        for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
            struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
            begun &= !m->entered || (m->begun && !m->accused_at);
        }
        if (begun) {
            c->state = RUNNING;
            if (c->wanted) {
                tly_change_start_without(c);
            } else {
                tly_coordinator_post_all(c, TLY_COMMIT, NULL, 0);
                tly_slow_forget(c);
                tly_adapt_begin(c);
            }
        }
    }
    if (c->state == RUNNING)
        tly_change_go_on(c);
    if (c->state == RUNNING)
        tly_join_look(c);
    if (c->state == RUNNING) {
        bool left = true;
        for (uint32_t i = 0; i < c->size; i++)
            left &= !c->ranks[i] || c->ranks[i]->left;
        if (left) {
            c->state = ENDED;
            c->over_at = c->loop.awake;
            tly_coordinator_post_all(c, TLY_GOODBYE, NULL, 0);
        }
    }
}

/* Does the newcomer fit those who are here?  If not, the start fails for all and each learns why. */
static bool coordinator_fits(struct tly_coordinator *c, const struct tly_coordinator_member *m)
{
    const struct tly_member_info *me = &m->info;
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        const struct tly_coordinator_member *o = tly_list_entry(n, struct tly_coordinator_member, node);
        const struct tly_member_info *other = &o->info;
        if (!o->entered || o == m || other->role != TLY_ROLE_RANK || me->role != TLY_ROLE_RANK)
            continue;
        if (other->size != me->size) {
            tly_coordinator_fail(c, EPROTO, "rank %u on %s was started for %u ranks, rank %u on %s for %u",
                                 other->rank, other->host, other->size, me->rank, me->host, me->size);
            return false;
        }
        if (other->rank == me->rank) {
            tly_coordinator_fail(c, EEXIST, "rank %u has come twice: process %u on %s and process %u on %s",
                                 me->rank, other->pid, other->host, me->pid, me->host);
            return false;
        }
        if (other->restart && me->restart && other->restart != me->restart) {
            tly_coordinator_fail(
                c, EPROTO,
                "rank %u on %s belongs to restart %u of the job, rank %u on %s to restart %u "
                "(TORCHELASTIC_RESTART_COUNT)",
                other->rank, other->host, other->restart - 1, me->rank, me->host, me->restart - 1);
            return false;
        }
        if (other->digest != me->digest) {
            tly_coordinator_fail(c, EPROTO,
                                 "the settings of rank %u on %s (%s) differ from those of rank %u on %s (%s)",
                                 me->rank, me->host, me->settings, other->rank, other->host, other->settings);
            return false;
        }
    }
    return true;
}

static void coordinator_on_member_info(struct tly_coordinator_member *m)
{
    struct tly_coordinator *c = m->c;
    char name[200];
    tly_coordinator_name(m, name, sizeof name);
    tly_link_rename(m->link, name);
    if (c->state == FAILED) {
        struct sockaddr_storage from;
        tly_link_address(m->link, true, &from);
        bool ours = m->info.rank == 0 && m->info.pid == (uint32_t)getpid() && tly_place_is_own(&from);
        if (ours) /* others have failed before this very process has joined its own coordinator */
            tly_coordinator_post_verdict(m, c->verdict_err, c->verdict);
        else
            tly_coordinator_post_verdict(m, EAGAIN,
                                         "the job's last start has not ended yet"); /* it comes again */
        return;
    }
    if ((c->state == RUNNING || c->resuming) && m->info.role == TLY_ROLE_TALLYD) {
        m->entered = m->waiting = true;
        c->tallyds_here++;
        coordinator_advance(c);
        return;
    }
    if (c->state != GATHERING || c->resuming) {
        if (m->info.role == TLY_ROLE_TALLYD)
            tly_coordinator_post_verdict(m, EAGAIN, "the job is about to start, or to end");
        else if (m->info.rank < c->size && (!c->ranks[m->info.rank] || c->ranks[m->info.rank]->left))
            tly_coordinator_post_verdict(m, EAGAIN,
                                         "the job's last start has not ended yet"); /* it comes again */
        else
            tly_coordinator_post_verdict(
                m, EEXIST, "the job is running already: give this one another TALLY_PORT, or end that one");
        return;
    }
    if (!coordinator_fits(c, m))
        return;
    if (m->info.role == TLY_ROLE_TALLYD) {
        c->tallyds_here++;
    } else {
        if (!c->size) {
            c->ranks = calloc(m->info.size, sizeof *c->ranks);
            if (!c->ranks) {
                tly_coordinator_fail(c, ENOMEM, TLY_COORDINATOR_NO_MEMORY);
                return;
            }
            tly_coordinator_await(c, m->info.size);
        }
        c->ranks[m->info.rank] = m;
        c->ranks_here++;
    }
    m->entered = true;
    coordinator_advance(c);
}

/* --- who asks ------------------------------------------------------------------------------------ */

static uint32_t coordinator_stand(const struct tly_coordinator_member *m)
{
    return m->left     ? TLY_STAND_LEFT
           : m->begun  ? TLY_STAND_CONNECTED
           : m->proved ? TLY_STAND_PROVED
                       : TLY_STAND_JOINED;
}

/* The judgement that holds now.  There is none if the job does not run or the rank that was named has left. */
static struct tly_slow coordinator_slow_now(const struct tly_coordinator *c)
{
    return c->state == RUNNING && !tly_slow_is_past(c) ? c->slow.told : (struct tly_slow){0};
}

static void coordinator_answer(struct tly_coordinator_member *watcher)
{
    const struct tly_coordinator *c = watcher->c;
    struct tly_status s = {.state = c->state,
                           .size = c->size,
                           .servers = c->servers,
                           .age_ms = (uint64_t)((c->loop.awake - c->born) / TLY_MS),
                           .changed = c->changed.last,
                           .has_roster = c->roster.rank_count > 0,
                           .roster = c->roster};
    struct tly_writer w = {0};
    s.members = calloc(c->ranks_here + c->tallyds_here + 1, sizeof *s.members);
    if (!s.members)
        return; /* the watcher gets no answer in time */
    tly_adapt_currents(c, &s.current);
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        const struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        const struct tly_member_info *info = &m->info;
        if (!m->entered)
            continue;
        struct tly_status_member *out = &s.members[s.member_count++];
        *out = (struct tly_status_member){.role = info->role,
                                          .rank = info->role == TLY_ROLE_RANK ? info->rank : TLY_NO_RANK,
                                          .pid = info->pid,
                                          .at = info->at,
                                          .stand = coordinator_stand(m)};
        memcpy(out->host, info->host, sizeof out->host);
    }
    s.slow = coordinator_slow_now(c);
    tly_status_write(&w, &s);
    if (!w.failed && w.len <= TLY_MAX_CONTROL)
        tly_coordinator_post(watcher, TLY_STATUS, 0, w.data, w.len);
    free(w.data);
    free(s.members); /* the roster is the coordinator's */
    tly_currents_finish(&s.current);
}

/* --- frames -------------------------------------------------------------------------------------- */

static int coordinator_header(void *user, struct tly_link *l, const struct tly_frame *f,
                              struct tly_landing *land, const char **why)
{
    const struct tly_coordinator_member *m = user;
    uint8_t role = tly_link_peer(l)->role;
    bool alive = f->type == TLY_BEAT || f->type == TLY_COUNTS;
    if (!tly_frame_goes(f->type, role == TLY_ROLE_RANK      ? TLY_RANK_TO_COORDINATOR
                                 : role == TLY_ROLE_WATCHER ? TLY_WATCHER_TO_COORDINATOR
                                                            : TLY_TALLYD_TO_COORDINATOR)) {
        *why = "a message that a coordinator does not take from such a member";
        return -EPROTO;
    }
    if (tly_outbox_full(&m->outbox) && !alive) {
        *why = "it keeps asking and reads no answers";
        return -EPROTO;
    }
    land->control = true;
    return 0;
}

/* Another coordinator may have to know it, and would hear it from the others. */
static void coordinator_note_left(struct tly_coordinator *c, uint32_t rank)
{
    struct tly_writer w = {0};
    c->roster.ranks[rank].left = 1;
    tly_slow_left(c);
    tly_write32(&w, rank);
    if (c->roster.standalone && !w.failed)
        tly_coordinator_post_all(c, TLY_GOODBYE, w.data, w.len);
    free(w.data);
}

/* A member says goodbye: it has ended well, or a tallyd leaves the split. */
static void coordinator_on_goodbye(struct tly_coordinator_member *m)
{
    struct tly_coordinator *c = m->c;
    m->left = true;
    if (m->entered && m->info.role == TLY_ROLE_RANK && m->info.rank < c->roster.rank_count)
        coordinator_note_left(c, m->info.rank);
    if (m->service != TLY_NO_SERVICE)
        c->roster.services[m->service].left = 1;
    if (m->service != TLY_NO_SERVICE && c->roster.services[m->service].state == TLY_SERVICE_ACTIVE) {
        c->roster.services[m->service].state = TLY_SERVICE_IDLE; /* it stays for what it has begun */
        c->wanted = true;
    }
    coordinator_advance(c);
}

/* A member says what it is: newly come, or of a job that runs and whose coordinator has died. */
static int coordinator_on_roster(struct tly_coordinator_member *m, const struct tly_frame *f,
                                 struct tly_reader *r, const char **why)
{
    if (f->flags & TLY_REQUEST) {
        m->nonce_seen = tly_read64(r);
        m->proved = true;
    } else if (m->entered || tly_member_read(r, &m->info) != 0 ||
               m->info.role != tly_link_peer(m->link)->role) {
        *why = "a member that cannot be read";
        return -EPROTO;
    } else if (!(f->flags & TLY_RESUMED)) {
        coordinator_on_member_info(m);
        return 0;
    } else if (tly_change_resumed(m, r, why) != 0) {
        return -EPROTO;
    }
    coordinator_advance(m->c);
    return 0;
}

static int coordinator_frame(void *user, struct tly_link *l, const struct tly_frame *f, void *data,
                             const char **why)
{
    struct tly_coordinator_member *m = user;
    struct tly_coordinator *c = m->c;
    struct tly_reader r = {data, f->payload, false};
    switch (f->type) {
    case TLY_ROSTER:
        return coordinator_on_roster(m, f, &r, why);
    case TLY_BEGUN:
        m->begun = true;
        if (f->payload && tly_change_concerns(m) && tly_change_begun(m, f->flags & TLY_LAST, &r, why) != 0)
            return -EPROTO;
        coordinator_advance(c);
        break;
    case TLY_COMPLAIN:
        tly_judge_complaint(m, f, &r);
        break;
    case TLY_PACE:
        if (!m->entered || m->info.role != TLY_ROLE_RANK)
            break;
        if (f->flags & TLY_MARK)
            tly_slow_heard(m, &r);
        else if (f->flags & TLY_QUIET)
            tly_adapt_heard_quiet(m, &r);
        else
            tly_adapt_heard(m, &r);
        break;
    case TLY_MEASURE: {
        struct tly_measure x;
        if (tly_measure_read(&r, &x) != 0) {
            *why = "a measurement that cannot be read";
            return -EPROTO;
        }
        tly_start_measured(m, &x);
        coordinator_advance(c);
        break;
    }
    case TLY_JOINED:
        if (tly_join_heard(m, &r, why) != 0)
            return -EPROTO;
        coordinator_advance(c);
        break;
    case TLY_GOODBYE:
        coordinator_on_goodbye(m);
        break;
    case TLY_STATUS:
        if (c->state == FAILED)
            tly_coordinator_post_verdict(m, c->verdict_err, c->verdict);
        else
            coordinator_answer(m);
        break;
    default:
        break;
    }
    return 0;
}

static void coordinator_set_known(struct tly_coordinator_member *m, bool known)
{
    m->c->known += (uint32_t)known - m->known;
    m->known = known;
    if (!m->c->known)
        tly_event_set(&m->c->quiet);
}

static void coordinator_drop(struct tly_coordinator_member *m)
{
    struct tly_coordinator *c = m->c;
    tly_list_remove(&m->node);
    c->watchers -= m->watcher;
    coordinator_set_known(m, false);
    tly_link_destroy(m->link);
    tly_outbox_finish(&m->outbox, NULL, NULL);
    tly_traffic_finish(&m->traffic);
    free(m);
}

/* A member's connection is no more, or is given up.  The member is freed. */
static void coordinator_lose(struct tly_coordinator_member *m, int err, const char *why)
{
    struct tly_coordinator *c = m->c;
    char name[200];
    tly_coordinator_name(m, name, sizeof name);
    /* A goodbye counts once the job runs; before that it leaves a hole in the roster like any other end. */
    bool lost = m->entered && (!m->left || (c->state < RUNNING && !c->resuming));
    bool is_rank = m->info.role == TLY_ROLE_RANK;
    if (m->entered && is_rank) {
        c->ranks[m->info.rank] = NULL;
        c->ranks_here--;
    }
    if (m->entered && !is_rank)
        c->tallyds_here--;
    if (m->entered && !is_rank && c->state <= RUNNING) {
        tly_change_evict(m, why);
        lost = false; /* nothing is lost with it; before the start it is simply not there */
    }
    coordinator_drop(m);
    if (lost && c->state != ENDED) {
        if (err == ETIMEDOUT)
            tly_coordinator_fail(c, ETIMEDOUT,
                                 "%s has been silent for %.0f s: taken for dead (TALLY_DEAD_TIMEOUT)", name,
                                 (double)c->dead_ns / TLY_SEC);
        else
            tly_coordinator_fail(c, ECONNRESET, "%s has died: %s", name, why);
    }
    coordinator_advance(c);
}

static void coordinator_closed(void *user, struct tly_link *l, int err, const char *why)
{
    coordinator_lose(user, err, why);
}

static void coordinator_opened(void *user, struct tly_link *l)
{
    struct tly_coordinator_member *m = user;
    m->watcher = tly_link_peer(l)->role == TLY_ROLE_WATCHER;
    m->c->watchers += m->watcher;
    coordinator_set_known(m, !m->watcher);
    if (m->c->watchers > MOST_WATCHERS)
        coordinator_drop(m); /* the watcher retries */
}

static const struct tly_link_user calls = {.opened = coordinator_opened,
                                           .header = coordinator_header,
                                           .frame = coordinator_frame,
                                           .next = coordinator_next,
                                           .closed = coordinator_closed};

static int coordinator_accepting(void *user, struct tly_link_config *config);

/* The link is created after coordinator_accepting() has returned: it is known from its first callback on. */
static void coordinator_remember(void *user, struct tly_link *l)
{
    struct tly_coordinator_member *m = user;
    m->link = l;
}

static int coordinator_accepting(void *user, struct tly_link_config *config)
{
    struct tly_coordinator *c = user;
    /* A process that comes now comes again later, to the next coordinator: it must not lose this one while it joins.
     * Inside a rank a failed one still has to tell that very rank why (coordinator_on_member_info). */
    if (c->state == ENDED || (c->state == FAILED && c->standalone))
        return -ESHUTDOWN;
    struct tly_coordinator_member *m = calloc(1, sizeof *m);
    if (!m)
        return -ENOMEM;
    m->c = c;
    m->service = TLY_NO_SERVICE;
    tly_outbox_init(&m->outbox);
    tly_list_append(&c->members, &m->node);
    coordinator_set_known(m, !c->standalone); /* one that ends with its rank would be looked for in vain */
    config->user_calls = &calls;
    config->user = m;
    config->identity = c->identity;
    config->silence_ns = c->dead_ns;
    config->created = coordinator_remember;
    return 0;
}

/* --- time ---------------------------------------------------------------------------------------- */

/* The first member that has not done what the start waits for. */
static const char *coordinator_unready(const struct tly_coordinator *c, char *out, size_t len)
{
    snprintf(out, len, "a rank or tallyd");
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        const struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        bool ready = c->state == PROVING ? m->proved || m->info.role != TLY_ROLE_RANK : m->begun;
        if (m->entered && !ready) {
            tly_coordinator_name(m, out, len);
            break;
        }
    }
    return out;
}

/* Tallyd that have gone silent and serve nobody yet: there is nothing to put them out of. */
static void coordinator_lose_silent(struct tly_coordinator *c)
{
    char why[100];
    for (struct tly_list *n = c->members.next, *next; n != &c->members && c->state <= RUNNING; n = next) {
        struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        next = n->next;
        if (tly_judge_is_silent(m, why, sizeof why) && (c->state != RUNNING || m->waiting))
            coordinator_lose(m, ETIMEDOUT, why);
    }
}

static int64_t coordinator_prepare(struct tly_hook *h)
{
    tly_coordinator_tell_last(tly_list_entry(h, struct tly_coordinator, hook));
    return INT64_MAX;
}

static void coordinator_tick(struct tly_hook *h)
{
    static const char alone[] =
        "; without a secret only processes of this machine can join: a job over several "
        "machines needs a secret (`tally secret`)";
    struct tly_coordinator *c = tly_list_entry(h, struct tly_coordinator, hook);
    int64_t now = c->loop.awake;
    char missing[512], name[200];
    tly_judge_tick(c);
    coordinator_lose_silent(c);
    tly_change_miss_services(c);
    tly_adapt_tick(c);
    coordinator_advance(c); /* these want a change, or somebody's time to be invited again has come */
    tly_slow_tick(c);
    if (c->state == MEASURING && now - c->step_at >= MEASURE_STEP_MS * TLY_MS) {
        tly_start_go_on_measuring(c);
        coordinator_advance(c);
    }
    if (c->resuming && c->state == GATHERING && now - c->waiting_since >= c->dead_ns) {
        coordinator_missing_text(c, missing, sizeof missing);
        tly_coordinator_fail(
            c, ETIMEDOUT, "rank %s has not come back to the coordinator within %.0f s (TALLY_DEAD_TIMEOUT)",
            missing, (double)c->dead_ns / TLY_SEC);
    }
    bool tell = now - c->asked_missing >= MISSING_EVERY_S * TLY_SEC;
    if (c->state == GATHERING && c->complete_at) {
        if (now - c->complete_at >= c->servers_ns) {
            tly_warn("join",
                     "only %u of %u tallyd are there after %.0f s (TALLY_SERVERS_TIMEOUT): starting without "
                     "the rest",
                     c->tallyds_here, c->servers, (double)c->servers_ns / TLY_SEC);
            tly_start_prove(c);
        } else if (tell) {
            c->asked_missing = now;
            tly_warn("join", "all ranks are there; waiting for tallyd: %u of %u have come (TALLY_SERVERS)",
                     c->tallyds_here, c->servers);
        }
    }
    if (c->state == GATHERING && !c->complete_at && c->size && !c->resuming) {
        coordinator_missing_text(c, missing, sizeof missing);
        if (now - c->waiting_since >= c->join_ns) {
            tly_coordinator_fail(
                c, ETIMEDOUT, "rank %s did not join within %.0f s (TALLY_JOIN_TIMEOUT): look at its output%s",
                missing, (double)c->join_ns / TLY_SEC, c->local_only ? alone : "");
        } else if (tell) {
            c->asked_missing = now;
            tly_warn("join", "waiting for rank %s%s", missing, c->local_only ? alone : "");
        }
    }
    /* Not from the beginning: the last rank may have come just in time, and tallyd been waited for after that. */
    if ((c->state == PROVING || c->state == INVITING) && now - c->proving_at >= CONNECT_S * TLY_SEC)
        tly_coordinator_fail(c, ETIMEDOUT,
                             "%s has not connected to all services within %d s: does a firewall shut their "
                             "ports (TALLY_PORTS)?",
                             coordinator_unready(c, name, sizeof name), CONNECT_S);
}

static void *coordinator_serve(void *arg)
{
    struct tly_coordinator *c = arg;
    tly_loop_run(&c->loop);
    return NULL;
}

int tly_coordinator_create(const struct tly_place *place, const struct tly_params *params,
                           const struct sockaddr_storage *address, int listening, bool standalone,
                           struct tly_coordinator **out)
{
    struct tly_coordinator *c = calloc(1, sizeof *c);
    int err = c ? tly_loop_init(&c->loop) : tly_fail(ENOMEM, "out of memory");
    if (err) {
        if (listening >= 0)
            tly_fd_close(listening);
        free(c);
        return err;
    }
    tly_list_init(&c->members);
    c->identity.role = TLY_ROLE_COORDINATOR;
    c->identity.rank = standalone ? TLY_NO_RANK : 0; /* in whose process it is */
    memcpy(c->identity.secret, place->secret, sizeof place->secret);
    memcpy(c->identity.job, place->job, sizeof place->job);
    do
        randombytes_buf(&c->identity.incarnation, sizeof c->identity.incarnation);
    while (!c->identity.incarnation);
    c->standalone = standalone;
    c->local_only = !place->has_secret && !place->together && !tly_place_is_loopback(place);
    c->servers = (uint32_t)params->servers;
    c->servers_ns = (int64_t)(params->servers_timeout * (double)TLY_SEC);
    c->join_ns = (int64_t)(params->join_timeout * (double)TLY_SEC);
    c->dead_ns = (int64_t)(params->dead_timeout * (double)TLY_SEC);
    c->part_bytes = params->part_bytes;
    c->window_parts = (uint32_t)params->window_parts;
    c->credit_bytes = params->credit_bytes;
    c->split = tly_roster_split_named(params->split);
    c->fixed = !params->replan || c->split != TLY_SPLIT_OPTIMAL;
    c->teams = strcmp(params->local, "on") == 0;
    c->measure = strcmp(params->measure, "off") == 0   ? MEASURE_NONE
                 : strcmp(params->measure, "all") == 0 ? MEASURE_ALL
                                                       : MEASURE_UNKNOWN;
    if (params->measured) {
        c->given = strdup(params->measured);
        c->measure = MEASURE_NONE;
    }
    c->hook.prepare = coordinator_prepare;
    c->hook.tick = coordinator_tick;
    c->born = c->loop.awake;
    tly_loop_hook(&c->loop, &c->hook);
    struct tly_listener_config listen = {
        .address = *address, .by_address = true, .accepting = coordinator_accepting, .user = c};
    err = tly_listen_reserved(&c->loop, listening, &listen, &c->listener);
    if (!err)
        err = tly_thread_start(&c->thread, "tally-coord", coordinator_serve, c);
    if (err) {
        tly_coordinator_destroy(c, 0);
        return err;
    }
    c->started = true;
    *out = c;
    return 0;
}

bool tly_coordinator_is_over(struct tly_coordinator *c)
{
    tly_loop_lock(&c->loop);
    bool over = c->over_at && (!c->known || c->loop.awake - c->over_at >= LEAVE_S * TLY_SEC);
    tly_loop_unlock(&c->loop);
    return over;
}

void tly_coordinator_facts(struct tly_coordinator *c, struct tly_coordinator_facts *out)
{
    const struct tly_roster *r = &c->roster;
    *out = (struct tly_coordinator_facts){0};
    tly_loop_lock(&c->loop);
    if (c->state == RUNNING)
        *out = (struct tly_coordinator_facts){
            .ranks = r->rank_count,
            .machines = r->machine_count,
            .services = r->service_count,
            .epoch = r->epoch,
            .changed = c->changed.last.at,
            .slow = coordinator_slow_now(c)};
    tly_loop_unlock(&c->loop);
}

uint16_t tly_coordinator_port(const struct tly_coordinator *c)
{
    return tly_listener_port(c->listener);
}

void tly_coordinator_destroy(struct tly_coordinator *c, int64_t deadline)
{
    if (!c)
        return;
    if (c->started) {
        tly_loop_lock(&c->loop);
        bool quiet = !c->known;
        if (!quiet)
            c->quiet = (struct tly_event){0};
        tly_loop_unlock(&c->loop);
        if (!quiet)
            tly_event_wait(&c->quiet, deadline);
    }
    if (c->started) {
        tly_loop_stop(&c->loop);
        pthread_join(c->thread, NULL);
    }
    while (!tly_list_empty(&c->members))
        coordinator_drop(tly_list_entry(tly_list_take(&c->members), struct tly_coordinator_member, node));
    tly_listener_destroy(c->listener);
    tly_loop_finish(&c->loop);
    tly_survey_destroy(c->survey);
    tly_adapt_finish(c);
    free(c->given);
    free(c->found);
    free(c->setbacks);
    tly_roster_finish(&c->roster);
    tly_roster_finish(&c->settled);
    tly_map_finish(&c->begun_seen);
    free(c->begun);
    free(c->host_id);
    free(c->ranks);
    free(c);
}
