/* change.c - from one epoch to the next, and a job whose coordinator has died.
 *
 *   a tallyd comes      change_invite_more → INVITE: all ranks connect to it (tly_follow_invited in comm/epoch/follow.c) and say BEGUN
 *   a service goes      judge.c: it dies, is silent for 5 s, leaves (GOODBYE), cannot be reached by a rank, or gives no sign of
 *                       life for 1.5 s while ranks wait (COMPLAIN) → tly_change_evict
 *   the change          change_prepare → PREPARE: the ranks begin nothing new and say which rounds they have begun (BEGUN).
 *                       change_commit → COMMIT: the new roster, and all rounds that any rank has begun.  These stay in their epoch
 *   parts in doubt      comm/path/doubt.c hands them to the substitute: HAVE, DONE → sum/redo.c → AGAIN, FINAL
 *
 * Whatever changes meanwhile begins a new PREPARE.  A change costs a round trip and changes no bits.  None begins while some
 * rank still needs four older epochs.
 *
 * A tallyd that some rank cannot reach is evicted.  Before the first COMMIT the job starts without it
 * (tly_change_start_without).  It stays connected to the coordinator, which invites it again after a back-off (setback.c).  An
 * evicted service is void: both sides close its connections, and it comes back with a new incarnation.
 *
 * A coordinator in a process of its own may die.  Members look for the next one (member.c) and tell it the roster, from which
 * it goes on (tly_change_resumed).  Rounds do not wait for it.  Changes do, and so do rounds that need a change.  A coordinator
 * that dies between the COMMITs of one change leaves ranks in different epochs.  The next one asks all what they have begun,
 * and gives the others the COMMIT that they lack (change_catch_up). */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "membership/adapt.h"
#include "membership/change.h"
#include "membership/internal.h"
#include "membership/start.h"

enum {
    MOST_BEGUN = 1 << 18, /* rounds of one rank's in one change: far more than operations under way */
};

bool tly_change_concerns(const struct tly_coordinator_member *m)
{
    return m->entered && !m->left && m->info.role == TLY_ROLE_RANK;
}

/* To whom: */
enum whom {
    RANKS,  /* that have not left */
    ALL,    /* these, and the tallyd that serve */
    BEHIND, /* ranks that have not heard of the epoch in which others are */
};

static bool change_is_behind(const struct tly_coordinator_member *m)
{
    return tly_change_concerns(m) && m->committed < m->c->committed;
}

static void change_post_roster(struct tly_coordinator *c, int type, uint16_t flags, struct tly_writer *w,
                               enum whom whom)
{
    if (w->failed || w->len > TLY_MAX_CONTROL) {
        tly_coordinator_fail(c, ENOMEM, TLY_COORDINATOR_NO_MEMORY);
        return;
    }
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        if (whom == BEHIND
                ? change_is_behind(m)
                : tly_change_concerns(m) || (whom == ALL && m->entered && m->service != TLY_NO_SERVICE))
            tly_coordinator_post(m, type, flags, w->data, w->len);
    }
}

static bool change_all_answered(const struct tly_coordinator *c, uint32_t number)
{
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        const struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        if (tly_change_concerns(m) && m->answered != number && m->met != number)
            return false;
    }
    return true;
}

/* The lowest place that nobody has, or room behind the last one; -E2BIG, -ENOMEM. */
static int change_find_place(struct tly_coordinator *c, uint32_t *place)
{
    struct tly_roster *r = &c->roster;
    uint32_t i = r->machine_count;
    while (i < r->service_count && r->services[i].state != TLY_SERVICE_GONE)
        i++;
    if (i == TLY_MAX_MACHINES)
        return -E2BIG;
    if (i == r->service_count) {
        void *services = realloc(r->services, (i + 1) * sizeof *r->services);
        if (services)
            r->services = services;
        void *ids = realloc(c->host_id, (i + 1) * sizeof *c->host_id);
        if (ids)
            c->host_id = ids;
        if (!services || !ids)
            return -ENOMEM;
    }
    *place = i;
    return 0;
}

/* A tallyd ends: one that comes there again begins with what its card was seen to carry. */
static void change_remember_host(struct tly_coordinator *c, uint32_t service)
{
    const char *host_id = c->host_id[service];
    uint64_t last = tly_adapt_sure(c, service);
    if (!last || host_id[0] == TLY_HOST_AWAY)
        return;
    struct tly_found_host *f = tly_start_found(c, host_id, true);
    if (f) /* else one there begins with what it says */
        f->last = last;
}

/* Put a guest into this place.  If others cannot reach it (-EINVAL) the place stays as it was.  f: as tly_start_found(). */
static int change_put_in(struct tly_coordinator *c, uint32_t place, const struct tly_coordinator_member *m,
                         const struct tly_found_host *f)
{
    struct tly_roster_service *s = &c->roster.services[place], before = {0};
    char host_id[64] = "";
    if (place < c->roster.service_count) {
        before = *s;
        memcpy(host_id, c->host_id[place], sizeof host_id);
    }
    tly_start_add(c, &c->roster, place, &m->info);
    s->measured = m->measured;
    s->tried = m->once;
    s->state = TLY_SERVICE_IDLE;
    if (f && f->last && !c->fixed) {
        s->bandwidth = m->measured || f->last < s->said ? f->last : s->said;
        s->tried = false; /* what was seen confirms it */
    }
    int err = tly_start_place(c, &c->roster, place);
    if (err) {
        *s = before;
        memcpy(c->host_id[place], host_id, sizeof host_id);
    }
    return err;
}

/* Those who came since the last time. */
static void change_invite_more(struct tly_coordinator *c)
{
    bool any = false;
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        if (!m->waiting || !tly_setback_is_over(c, m))
            continue;
        m->waiting = false;
        uint32_t at;
        const struct tly_found_host *f = tly_start_found(c, m->info.host_id, false);
        if (!m->info.bandwidth) {
            m->info.bandwidth = f ? f->bandwidth : 0;
            m->once = f && f->once;
            m->measured = true; /* or not known */
        }
        int err = change_find_place(c, &at);
        if (!err)
            err = change_put_in(c, at, m, f);
        if (err) {
            tly_coordinator_post_verdict(m, -err,
                                         err == -EINVAL ? tly_error()
                                         : err == -ENOMEM
                                             ? TLY_COORDINATOR_NO_MEMORY
                                             : "the job has as many tallyd as the coordinator has room for");
            continue;
        }
        if (at == c->roster.service_count)
            c->roster.service_count++; /* a guest that is turned away takes no place */
        m->service = at;
        m->invited = any = true;
    }
    if (!any)
        return;
    c->invitation = c->roster.epoch = ++c->number;
    c->invited_at = c->loop.awake;
    struct tly_writer w = {0};
    tly_roster_write(&w, &c->roster);
    change_post_roster(c, TLY_INVITE, 0, &w, RANKS);
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        if (m->invited && !w.failed)
            tly_coordinator_post(m, TLY_INVITE, 0, w.data, w.len);
    }
    free(w.data);
}

static void change_prepare(struct tly_coordinator *c)
{
    struct tly_writer w = {0};
    c->wanted = false;
    c->preparing = c->roster.epoch = ++c->number;
    c->begun_count = 0;
    tly_map_finish(&c->begun_seen);
    c->begun_seen = (struct tly_map){0};
    tly_roster_write(&w, &c->roster);
    change_post_roster(c, TLY_PREPARE, 0, &w, RANKS);
    free(w.data);
}

/* All that anybody has begun, then the roster. */
static void change_post_commit(struct tly_coordinator *c, const struct tly_roster *roster, enum whom whom)
{
    size_t at = 0;
    do {
        struct tly_writer w = {0};
        size_t n = c->begun_count - at < TLY_BEGUN_ROUNDS ? c->begun_count - at : TLY_BEGUN_ROUNDS;
        tly_write32(&w, (uint32_t)n);
        for (size_t end = at + n; at < end; at++) {
            tly_write64(&w, c->begun[at].key);
            tly_write32(&w, c->begun[at].round);
            tly_write32(&w, c->begun[at].epoch);
        }
        bool last = at == c->begun_count;
        if (last)
            tly_roster_write(&w, roster);
        change_post_roster(c, TLY_COMMIT, last ? TLY_LAST : 0, &w, last || whom == BEHIND ? whom : RANKS);
        free(w.data);
    } while (at < c->begun_count);
}

static bool change_any_behind(const struct tly_coordinator *c)
{
    for (uint32_t i = 0; i < c->size; i++)
        if (c->ranks[i] && change_is_behind(c->ranks[i]))
            return true;
    return false;
}

/* The last coordinator died between its COMMITs, and this one has heard from all what they have begun: those who did not
 * get theirs get it now.  What nobody who is behind has begun in the epochs before began in the new one.  Then the change
 * that was under way begins anew, for they go on in between. */
static void change_catch_up(struct tly_coordinator *c)
{
    size_t count = 0;
    for (size_t i = 0; i < c->begun_count; i++)
        if (c->begun[i].epoch < c->committed)
            c->begun[count++] = c->begun[i];
    c->begun_count = count;
    change_post_commit(c, &c->settled, BEHIND);
    for (uint32_t i = 0; i < c->size; i++)
        if (c->ranks[i])
            c->ranks[i]->committed = c->committed;
    change_prepare(c);
}

static void change_commit(struct tly_coordinator *c)
{
    tly_start_find_cards(c, &c->roster);
    tly_adapt_apply(c);
    tly_adapt_tell_gone(c);
    int err = tly_roster_split(&c->roster, c->split);
    if (err) {
        tly_coordinator_fail(c, -err,
                             err == -ENOENT
                                 ? "TALLY_SPLIT=server leaves the sums to tallyd, and the last with "
                                   "memory for them is gone: start more, or set TALLY_SPLIT=optimal"
                                 : TLY_COORDINATOR_NO_MEMORY);
        return;
    }
    if (tly_start_fit_parts(c, &c->roster))
        tly_roster_split(&c->roster, c->split);
    c->roster.epoch = c->preparing;
    c->preparing = 0;
    change_post_commit(c, &c->roster, ALL);
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        m->accuses = 0;
    }
    tly_adapt_tell_come(c);
    tly_adapt_begin(c);
    tly_slow_forget(c); /* it may tell the members: of the whole change */
}

void tly_change_start_without(struct tly_coordinator *c)
{
    c->wanted = false;
    c->preparing = ++c->number;
    change_commit(c);                         /* nobody has begun anything, */
    c->changed = (struct tly_last_change){0}; /* and no split held that this one has changed */
}

#define CUT_SHORT "a list of begun rounds that is cut short"

/* A rank's answer to INVITE or PREPARE. */
int tly_change_begun(struct tly_coordinator_member *m, bool last, struct tly_reader *r, const char **why)
{
    struct tly_coordinator *c = m->c;
    uint32_t number = tly_read32(r), count = tly_read32(r), ended = tly_read32(r);
    if (r->failed || ended > count) {
        *why = CUT_SHORT;
        return -EPROTO;
    }
    m->said = m->saying == number ? m->said : 0;
    m->saying = number;
    if (count > MOST_BEGUN - m->said) {
        *why = "more rounds begun than a rank may have";
        return -EPROTO;
    }
    m->said += count;
    for (uint32_t i = 0; i < count && number == c->preparing && !r->failed; i++) {
        struct tly_begun b = {.key = tly_read64(r)};
        b.round = tly_read32(r);
        b.epoch = tly_read32(r);
        uint64_t id = (b.key ^ b.round) * 0x9e3779b97f4a7c15ull;
        if (r->failed || tly_map_get(&c->begun_seen, id))
            continue; /* two rounds of one hash: such a hash is that of one in 10^9 jobs */
        if (count - i <= ended && change_is_behind(m))
            continue; /* listed by an older COMMIT than the one that this rank is to get */
        if (c->begun_count == c->begun_room) {
            size_t room = c->begun_room ? 2 * c->begun_room : 64;
            void *more = realloc(c->begun, room * sizeof *c->begun);
            if (more) {
                c->begun = more;
                c->begun_room = room;
            }
        }
        if (c->begun_count == c->begun_room || tly_map_put(&c->begun_seen, id, c) != 0) {
            tly_coordinator_fail(c, ENOMEM, TLY_COORDINATOR_NO_MEMORY);
            return 0;
        }
        c->begun[c->begun_count++] = b;
    }
    if (r->failed) {
        *why = CUT_SHORT;
        return -EPROTO;
    }
    if (last && number == c->preparing)
        m->answered = number;
    else if (last && number == c->invitation)
        m->met = number; /* others answer what holds no more */
    return 0;
}

/* All ranks have met those who were invited. */
static void change_welcome(struct tly_coordinator *c)
{
    bool any = false;
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        if (!m->invited)
            continue;
        char name[200];
        m->invited = false;
        m->welcome = any = true;
        tly_setback_forget(c, m);
        c->roster.services[m->service].state = TLY_SERVICE_ACTIVE;
        tly_service_name(&c->roster, m->service, name, sizeof name);
        tly_warn("join", "%s is in; the job goes on with it", name); /* as loud as that it is out */
        tly_start_warn_memory(&c->roster, m->service);
    }
    c->invitation = 0;
    c->wanted |= any;
}

static bool change_guests_ready(const struct tly_coordinator *c)
{
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        const struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        if (m->invited && !m->begun)
            return false;
    }
    return true;
}

/* Whatever is due next. */
void tly_change_go_on(struct tly_coordinator *c)
{
    if (c->invitation && change_guests_ready(c) && change_all_answered(c, c->invitation))
        change_welcome(c);
    if (c->wanted)
        change_prepare(c);
    if (c->preparing && change_all_answered(c, c->preparing) && change_any_behind(c))
        change_catch_up(c);
    else if (c->preparing && change_all_answered(c, c->preparing))
        change_commit(c);
    if (c->state == RUNNING && !c->preparing && !c->invitation)
        change_invite_more(c);
}

/* said_before: the log has the same already. */
static void change_strike_out(struct tly_coordinator *c, uint32_t service, bool left, bool said_before,
                              const char *why)
{
    char name[200];
    tly_service_name(&c->roster, service, name, sizeof name);
    if (left)
        tly_warn("join", "%s has left; the job goes on without it", name);
    else
        tly_log(said_before ? TALLY_LOG_DEBUG : TALLY_LOG_WARNING, "join",
                "%s is out: %s; the job goes on without it", name, why);
    change_remember_host(c, service);
    c->roster.services[service].state = TLY_SERVICE_GONE;
    c->wanted = true;
}

/* A tallyd is out: the job goes on without it. */
void tly_change_evict(struct tly_coordinator_member *m, const char *why)
{
    if (m->service == TLY_NO_SERVICE || m->c->roster.services[m->service].state == TLY_SERVICE_GONE)
        return;
    change_strike_out(m->c, m->service, m->left, m->said_before, why);
    m->service = TLY_NO_SERVICE;
    m->invited = false;
}

/* --- a job whose coordinator has died ------------------------------------------------------------- */

struct tly_coordinator_member *tly_change_find_tallyd(const struct tly_coordinator *c, uint64_t incarnation)
{
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        if (m->service != TLY_NO_SERVICE && m->info.incarnation == incarnation)
            return m;
    }
    return NULL;
}

/* Its place in the roster if it serves; else the count of services. */
static uint32_t change_find_serving(const struct tly_coordinator *c, uint64_t incarnation)
{
    uint32_t at = 0;
    while (at < c->roster.service_count && (c->roster.services[at].incarnation != incarnation ||
                                            c->roster.services[at].state != TLY_SERVICE_ACTIVE))
        at++;
    return at;
}

/* Somebody who shares this service's card has come back: all behind it are on his host. */
static void change_know_host(struct tly_coordinator *c, uint32_t service, const char host_id[64])
{
    char was[64];
    memcpy(was, c->host_id[service], sizeof was);
    for (uint32_t i = 0; i < c->roster.service_count; i++)
        if (was[0] == TLY_HOST_AWAY && strcmp(c->host_id[i], was) == 0)
            memcpy(c->host_id[i], host_id, sizeof c->host_id[i]);
}

/* A member of a job that goes on without a coordinator has come. */
static void change_take_back(struct tly_coordinator_member *m)
{
    struct tly_coordinator *c = m->c;
    bool is_rank = m->info.role == TLY_ROLE_RANK;
    uint32_t at = change_find_serving(c, m->info.incarnation);
    bool known = at < c->roster.service_count;
    if (known)
        change_know_host(c, at, m->info.host_id);
    if (!is_rank)
        m->service = known ? at : TLY_NO_SERVICE;
    if (!is_rank && !known)
        tly_coordinator_post_verdict(m, EAGAIN, "the job goes on without this tallyd");
    m->entered = is_rank || known;
}

/* A guest comes again.  A tallyd that has said goodbye may be gone by now. */
static void change_forget_idle(struct tly_roster *r, bool leavers)
{
    for (uint32_t i = r->machine_count; i < r->service_count; i++)
        if (r->services[i].state == TLY_SERVICE_IDLE && (leavers || !r->services[i].left))
            r->services[i].state = TLY_SERVICE_GONE;
}

/* Nobody so far was in so new an epoch: what its member knows is what the coordinator knows.  Ranks that are behind get the COMMIT that
 * this member got, unless it has been invited to meet a guest since, whom they may not know. */
static int change_take_newest(struct tly_coordinator *c, struct tly_roster *roster, uint32_t committed)
{
    struct tly_writer w = {0};
    struct tly_roster settled = {0};
    uint32_t number =
        roster->epoch + 1000;       /* those that were given and nobody remembers must not come again */
    if (roster->epoch != committed) /* it has been invited to meet guests since */
        change_forget_idle(roster, false);
    roster->epoch = committed;
    for (uint32_t i = 0; i < c->roster.rank_count; i++)
        roster->ranks[i].left |= c->roster.ranks[i].left; /* who has said so to us */
    if (c->roster.rank_count)
        tly_roster_merge_joins(roster, &c->roster);
    char(*ids)[64] = calloc(roster->service_count, sizeof *ids);
    for (uint32_t i = 0; ids && i < roster->service_count; i++)
        snprintf(ids[i], sizeof ids[i], "%c%u", TLY_HOST_AWAY, roster->services[i].card);
    tly_roster_write(&w, roster);
    struct tly_reader r = {w.data, w.len, false};
    int err = !ids || w.failed ? -ENOMEM : tly_roster_read(&r, &settled);
    free(w.data);
    if (err) {
        free(ids);
        return err;
    }
    change_forget_idle(roster, true);
    free(c->host_id);
    tly_roster_finish(&c->settled);
    tly_roster_finish(&c->roster);
    c->host_id = ids;
    c->settled = settled;
    c->roster = *roster;
    *roster = (struct tly_roster){0};
    c->committed = committed;
    c->number = number > c->number ? number : c->number;
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        if (!m->entered || m->waiting)
            continue;
        change_take_back(m);
        c->tallyds_here -= !m->entered;
    }
    return 0;
}

/* The first member of a job that runs, and whose coordinator has died. */
static int change_adopt(struct tly_coordinator *c, struct tly_roster *roster, uint64_t incarnation,
                        uint32_t committed)
{
    uint32_t size = roster->rank_count;
    c->ranks = calloc(size, sizeof *c->ranks);
    int err = c->ranks ? change_take_newest(c, roster, committed) : -ENOMEM;
    if (err)
        return err;
    tly_coordinator_await(c, size);
    c->identity.incarnation = incarnation;
    c->resuming = true;
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        m->waiting = m->entered && m->info.role == TLY_ROLE_TALLYD;
    }
    return 0;
}

/* A member of a job that runs.  What changes were under way is forgotten: a tallyd that had been invited comes again. */
int tly_change_resumed(struct tly_coordinator_member *m, struct tly_reader *r, const char **why)
{
    struct tly_coordinator *c = m->c;
    struct tly_roster roster;
    uint64_t incarnation = tly_read64(r);
    uint32_t committed = tly_read32(r);
    bool is_rank = m->info.role == TLY_ROLE_RANK;
    char name[200];
    if (tly_roster_read(r, &roster) != 0) {
        *why = "a roster that cannot be read";
        return -EPROTO;
    }
    uint32_t size = roster.rank_count;
    tly_coordinator_name(m, name, sizeof name);
    tly_link_rename(m->link, name);
    bool first = c->state == GATHERING && !c->resuming && !c->size;
    int err = first ? change_adopt(c, &roster, incarnation, committed) : 0;
    bool fits_here = (c->resuming || c->state >= RUNNING) && c->identity.incarnation == incarnation &&
                     size == c->size && !(is_rank && (m->info.rank >= c->size || c->ranks[m->info.rank]));
    if (!err && !first && fits_here && c->state == GATHERING && committed > c->committed)
        err = change_take_newest(c, &roster, committed);
    for (uint32_t i = 0; !err && fits_here && i < roster.rank_count; i++)
        c->roster.ranks[i].left |= roster.ranks[i].left;
    if (!err && !first && fits_here)
        tly_roster_merge_joins(&c->roster, &roster);
    if (err) {
        tly_coordinator_fail(c, ENOMEM, TLY_COORDINATOR_NO_MEMORY);
    } else if (!fits_here) {
        tly_coordinator_post_verdict(m, ESTALE, "there is another start of the job by now");
    } else if (c->state == FAILED) { /* it was connecting as the others were told */
        tly_coordinator_post_verdict(m, c->verdict_err, c->verdict);
    } else if (c->state == ENDED) {
        tly_coordinator_post(m, TLY_GOODBYE, 0, NULL, 0);
    } else {
        change_take_back(m);
        m->committed = committed;
        if (is_rank) {
            c->ranks[m->info.rank] = m;
            c->ranks_here++;
        } else if (m->entered) {
            c->tallyds_here++;
        }
        m->begun = m->proved = true;
    }
    tly_roster_finish(&roster);
    return 0;
}

/* Services of a job that was taken over, which have not come back. */
void tly_change_miss_services(struct tly_coordinator *c)
{
    if (!c->resumed_at || c->state != RUNNING || c->loop.awake - c->resumed_at < TALLYD_SILENCE_S * TLY_SEC)
        return;
    c->resumed_at = 0;
    for (uint32_t i = c->roster.machine_count; i < c->roster.service_count; i++)
        if (c->roster.services[i].state == TLY_SERVICE_ACTIVE &&
            !tly_change_find_tallyd(c, c->roster.services[i].incarnation))
            change_strike_out(c, i, false, false, "it has not come back to the coordinator");
}
