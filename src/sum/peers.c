/* peers.c - sessions: the service's end of each connection, from the handshake to the end.
 *
 * A connection becomes a session in the house's lobby when the listener accepts it.  It says for which job it comes
 * (house.c), and once it has proved that job's secret it is one of the job's sessions; a rank's then is
 * job->by_rank[rank].  Before the job has begun the newest connection of each rank waits for that.  A session's end
 * leaves the rank's rounds as they are (redo.c), for the rank may come again.  Watchers have no rank: they ask for the
 * status, or measure network cards. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/event.h"
#include "base/heap.h"
#include "base/list.h"
#include "base/log.h"
#include "base/map.h"
#include "sum/internal.h"
#include "sum/members.h"
#include "sum/regain.h"
#include "sum/round.h"
#include "sum/session.h"
#include "sum/slot.h"
#include "sum/verdict.h"
#include "transport/outbox.h"
#include "transport/transport.h"

enum { MOST_WATCHERS = 64 }; /* at a time */

static void peers_drop_letter(void *job, void *verdict)
{
    tly_store_unref(job, verdict);
}

static bool peers_next(void *user, struct tly_link *link, struct tly_outgoing *out)
{
    struct tly_session *p = user;
    void *verdict;
    if (!tly_answers_reserve(p))
        tly_outbox_lose(&p->outbox);
    if (!tly_outbox_next(&p->outbox, out, &verdict))
        return tly_answers_next(p, out);
    if (verdict) {
        tly_answers_delivered(p, verdict);
        tly_store_unref(p->job, verdict);
    }
    return true;
}

/* What a session has to do with its job ends. */
static void peers_leave_job(struct tly_session *p)
{
    struct tly_job *job = p->job;
    job->watchers -= p->watcher;
    if (p->rank < job->ranks && job->by_rank[p->rank] == p) {
        job->by_rank[p->rank] = NULL;
        tly_redo_detach(p);
        tly_regain_detach(p);
    }
    tly_outbox_finish(&p->outbox, peers_drop_letter, job);
    for (; p->stable < p->delivered; p->stable++)
        tly_store_unref(job, p->deliveries[p->stable % p->ring_room]);
    if (tly_list_empty(&job->sessions))
        tly_event_set(&job->quiet);
}

void tly_peers_destroy(struct tly_session *p)
{
    if (p->proved)
        tly_facts_add_bytes(&p->job->facts, p);
    tly_link_destroy(p->link);
    tly_list_remove(&p->node);
    if (p->proved)
        peers_leave_job(p);
    tly_budget_hold(&p->house->budget, -(int64_t)p->held);
    tly_outbox_finish(&p->outbox, NULL, NULL);
    free(p->deliveries);
    tly_heap_finish(&p->ready);
    tly_map_finish(&p->groups);
    free(p);
}

void tly_peers_admit(struct tly_session *p)
{
    struct tly_job *job = p->job;
    if (p->rank >= job->ranks) {
        tly_warn("sum", "rank %u does not belong to the job: turned away", p->rank);
        tly_peers_destroy(p);
        return;
    }
    if (job->by_rank[p->rank])
        tly_peers_destroy(job->by_rank[p->rank]); /* the rank has noticed its end before us */
    p->id = ++job->sessions_seen;
    job->by_rank[p->rank] = p;
    p->granted = job->first_window; /* both ends know it from the roster */
    tly_link_set_pace(p->link, job->pace_bytes, TLY_COUNTS_MS);
    /* Its end was open a message earlier than ours: the others may have pushed already. */
    struct tly_round *r;
    tly_map_each(&job->store, r) if (tly_members_have(r->who, p->rank)) tly_slot_enter(job, r, p->rank);
}

/* The job has not begun: the newest connection of each rank will be its own. */
static void peers_drop_earlier(struct tly_job *job, uint32_t rank)
{
    for (struct tly_list *n = job->sessions.next; n != &job->sessions && rank != TLY_NO_RANK; n = n->next) {
        struct tly_session *p = tly_list_entry(n, struct tly_session, node);
        if (p->rank == rank) {
            tly_peers_destroy(p);
            return;
        }
    }
}

static bool peers_spare(void *user, struct tly_link *l, uint64_t bytes)
{
    struct tly_session *p = user;
    if (!tly_budget_spares(&p->house->budget, bytes)) {
        tly_log(TALLY_LOG_INFO, "sum",
                "no memory to spare for a connection by %s (TALLY_MEMORY): TCP takes its place",
                tly_link_medium(l));
        return false;
    }
    p->held = bytes;
    tly_budget_hold(&p->house->budget, (int64_t)bytes);
    return true;
}

static void peers_opened(void *user, struct tly_link *l)
{
    struct tly_session *p = user;
    const struct tly_identity *peer = tly_link_peer(l);
    char name[64];
    if (!p->job) { /* it has ended since the peer named it */
        tly_peers_destroy(p);
        return;
    }
    p->proved = true;
    tly_list_remove(&p->node);
    tly_list_append(&p->job->sessions, &p->node);
    tly_link_set_silence(l, p->job->dead_ns);
    p->watcher = peer->role == TLY_ROLE_WATCHER;
    if (p->watcher) {
        if (++p->job->watchers > MOST_WATCHERS)
            tly_peers_destroy(p); /* it asks again */
        return;
    }
    if (peer->rank >= TLY_MAX_RANKS) {
        tly_peers_destroy(p);
        return;
    }
    if (!p->job->ranks)
        peers_drop_earlier(p->job, peer->rank);
    p->rank = peer->rank;
    snprintf(name, sizeof name, "rank %u", p->rank);
    tly_link_rename(l, name);
    if (p->job->ranks)
        tly_peers_admit(p);
}

static void peers_closed(void *user, struct tly_link *l, int err, const char *why)
{
    struct tly_session *p = user;
    if (p->left)
        tly_answers_received(p, p->delivered);
    /* A rank that goes without a word is for the coordinator to judge. */
    tly_peers_destroy(p);
}

static void peers_sent(void *user, struct tly_link *l, void *token)
{
    tly_answers_sent(user, token);
}

static void peers_remember(void *user, struct tly_link *l)
{
    struct tly_session *p = user;
    p->link = l;
}

static const struct tly_link_user calls = {
    .opened = peers_opened,
    .spare = peers_spare,
    .header = tly_frames_header,
    .landed = tly_frames_landed,
    .frame = tly_frames_frame,
    .next = peers_next,
    .sent = peers_sent,
    .closed = peers_closed};

int tly_peers_accept(struct tly_house *house, struct tly_link_config *config)
{
    struct tly_session *p = calloc(1, sizeof *p);
    if (!p)
        return -ENOMEM;
    p->house = house;
    p->rank = TLY_NO_RANK;
    tly_outbox_init(&p->outbox);
    tly_list_append(&house->lobby, &p->node);
    config->user_calls = &calls;
    config->user = p;
    config->created = peers_remember;
    return 0;
}
