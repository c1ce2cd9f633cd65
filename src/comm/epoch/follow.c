/* follow.c - this rank follows the coordinator through a change of epoch: services come, and go.
 *
 *   INVITE   connect to the new services; BEGUN once all are met
 *   PREPARE  the connections to services that are gone end, nothing begins, BEGUN says which rounds are begun
 *   COMMIT   has the rounds begun elsewhere in older epochs, a promise for each, and the new roster: go on in it
 *
 * What these services had of our parts is in doubt from PREPARE on (doubt.c), and moves with COMMIT. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "base/map.h"
#include "comm/comm.h"
#include "comm/epoch/epoch.h"
#include "comm/epoch/follow.h"
#include "comm/epoch/pace.h"
#include "comm/epoch/traffic.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/op/tensor.h"
#include "comm/path/doubt.h"
#include "comm/path/keep.h"
#include "comm/path/moves.h"
#include "comm/path/peer.h"
#include "membership/member.h"
#include "membership/roster.h"
#include "sum/service.h"
#include "trace/timeline.h"
#include "trace/trace.h"
#include "wire/frame.h"

/* Drop all state of the service that had this place, which is free now or has another one. */
static void follow_vacate(tally_comm *c, uint32_t place)
{
    struct tly_peer *p = &c->peers[place];
    tly_peer_drop(p);
    tly_keep_drop_all(p);
    tly_peer_finish(p);
    *p = (struct tly_peer){0};
    tly_peer_init(p, c, place);
}

/* A new coordinator may not know the services that the last one invited. */
static void follow_vacate_uninvited(tally_comm *c)
{
    while ((uint32_t)c->services > c->member.roster.service_count)
        follow_vacate(c, (uint32_t)--c->services);
}

/* Connect to the services that are new. */
static void follow_meet(tally_comm *c)
{
    const struct tly_roster *r = &c->member.roster;
    for (uint32_t i = 0; i < r->service_count && !tly_comm_failed(c); i++) {
        const struct tly_roster_service *s = &r->services[i];
        struct tly_peer *p = &c->peers[i];
        if (s->state == TLY_SERVICE_GONE || p->incarnation == s->incarnation)
            continue;
        follow_vacate(c, i);
        if (tly_peer_connect(p) != 0)
            tly_peer_give_up(p, tly_error());
    }
}

void tly_follow_invited(void *comm)
{
    tally_comm *c = comm;
    follow_vacate_uninvited(c);
    for (uint32_t i = (uint32_t)c->services; i < c->member.roster.service_count; i++) {
        if (!c->peers[i].comm)
            tly_peer_init(&c->peers[i], c, i);
        c->services = (int)i + 1;
    }
    c->epochs.meeting = c->member.roster.epoch;
    follow_meet(c);
    tly_epoch_met(c);
}

static void follow_put_out(struct tly_peer *p)
{
    if (p->gone)
        return;
    p->gone = true;
    if (p->open)
        tly_doubt_begin(p);
    tly_peer_drop(p);
}

void tly_follow_prepare(void *comm, const struct tly_roster *next)
{
    tally_comm *c = comm;
    size_t decided = c->epochs.verdict_count < TLY_VERDICTS ? c->epochs.verdict_count : TLY_VERDICTS,
           count = decided;
    if (!c->epochs.preparing) {
        c->epochs.preparing_since = c->loop.awake;
        c->epochs.prepared = next->epoch;
        tly_stamp(c->trace, TLY_AT_PREPARED, TLY_NO_PEER, 0, c->epochs.prepared, TLY_NO_PART,
                  (uint32_t)next->part_bytes);
    }
    c->epochs.preparing = next->epoch;
    /* First of all, nothing more may land from services that are gone. */
    for (uint32_t i = 0; i < next->service_count && i < (uint32_t)c->services; i++)
        if (next->services[i].state == TLY_SERVICE_GONE)
            follow_put_out(&c->peers[i]);
    for (const struct tally_op *op = tly_op_oldest(&c->active); op; op = tly_op_after(&c->active, op))
        count++;
    count += tly_moves_prepare(c, NULL);
    struct tly_begun *begun = malloc((count + 1) * sizeof *begun);
    if (!begun) {
        tly_comm_fail(c, ENOMEM, "out of memory");
        return;
    }
    memcpy(begun, c->epochs.verdicts, decided * sizeof *begun);
    count = decided;
    for (const struct tally_op *op = tly_op_oldest(&c->active); op; op = tly_op_after(&c->active, op))
        if (!op->call->apart)
            begun[count++] = (struct tly_begun){op->key, op->round, op->epoch->number};
    size_t ended = tly_moves_prepare(c, begun + count);
    tly_member_begun(&c->member, next->epoch, begun, count + ended, ended);
    free(begun);
    tly_epoch_met(c);
}

static void follow_drop_promises(struct tly_map *m)
{
    struct tly_epoch *e;
    tly_map_each(m, e) tly_epoch_unref(e);
    tly_map_finish(m);
    *m = (struct tly_map){0};
}

/* Has this rank begun the round?  It answers no for a round whose name it has ended and forgotten.  The promise that follows is
 * dropped at the next change. */
static bool follow_has_begun(tally_comm *c, const struct tly_begun *b)
{
    struct tly_frame f = {.key = b->key, .round = b->round};
    if (tly_op_find(c, &f))
        return true;
    tly_names_lock(&c->names);
    const struct tly_tensor *t = tly_names_find(&c->names, b->key);
    bool begun = t && (int32_t)(t->round - b->round) > 0;
    tly_names_unlock(&c->names);
    if (!begun || c->local) /* it may be in the engine, which may hand it back */
        return false;
    return !tly_inbox_has(&c->inbox, b->key, b->round); /* else it is on its way */
}

void tly_follow_promised(void *comm, const struct tly_begun *b)
{
    tally_comm *c = comm;
    tly_moves_promised(c, b);
    if (follow_has_begun(c, b) || tly_map_get(&c->epochs.promising, tly_epoch_round(b->key, b->round)))
        return;
    for (struct tly_list *n = c->epochs.all.next; n != &c->epochs.all; n = n->next) {
        struct tly_epoch *e = tly_list_entry(n, struct tly_epoch, node);
        if (e->number != b->epoch)
            continue;
        if (tly_map_put(&c->epochs.promising, tly_epoch_round(b->key, b->round), e) != 0)
            tly_comm_fail(c, ENOMEM, "out of memory");
        else
            e->references++;
        return;
    }
    /* An older epoch that is forgotten here: the round has ended here, or its promise would hold the epoch. */
    if (b->epoch > c->epoch->number)
        tly_comm_fail(c, EPROTO,
                      "another rank has begun an operation by a split that this rank does not know");
}

/* An operation on a shared tensor belongs to no epoch.  It moves to the newest, so it keeps no older one. */
static void follow_move_apart(tally_comm *c)
{
    for (struct tally_op *op = tly_op_oldest(&c->active); op; op = tly_op_after(&c->active, op)) {
        if (!op->call->apart)
            continue;
        tly_epoch_unref(op->epoch);
        op->epoch = c->epoch;
        c->epoch->references++;
    }
}

void tly_follow_committed(void *comm, const struct tly_roster *roster)
{
    tally_comm *c = comm;
    if (tly_comm_failed(c))
        return;
    struct tly_map promised = c->epochs.promised;
    c->epochs.promised = c->epochs.promising;
    c->epochs.promising = (struct tly_map){0};
    follow_drop_promises(&promised);
    follow_vacate_uninvited(c);
    struct tly_epoch *before = c->epoch;
    before->references++;
    bool adopted = tly_epoch_adopt(c) == 0 && tly_pace_init(c) == 0;
    bool anew = adopted && !tly_epoch_shares_as(before, c->epoch);
    tly_epoch_unref(before);
    if (!adopted) {
        tly_comm_fail(c, ENOMEM, "out of memory");
        return;
    }
    follow_move_apart(c);
    tly_service_resize(c->service, roster);
    tly_traffic_begin(c);
    for (int i = 0; i < c->services; i++) {
        struct tly_peer *p = &c->peers[i];
        p->accused = false; /* the coordinator has forgotten who accused whom */
        /* What it had moves when it moves on all ranks.  If its coordinator died after some had prepared for that, it
         * is in still, and they take it up again as after a broken connection. */
        if (roster->services[i].state != TLY_SERVICE_GONE) {
            p->gone = false;
        } else if (p->incarnation) {
            follow_put_out(p);
            tly_epoch_lose(c, (uint32_t)i);
            tly_doubt_hand_on(c, p);
        }
    }
    tly_moves_commit(c, anew);
    for (int i = 0; i < c->services; i++) /* any may take something over, or keep what is given up */
        if (c->peers[i].open)
            tly_doubt_say(&c->peers[i], 0);
    if (c->epochs.preparing)
        tly_stamp(c->trace, TLY_AT_COMMITTED, TLY_NO_PEER, 0, c->epochs.prepared, TLY_NO_PART,
                  c->epoch->part_bytes);
    c->epochs.preparing = 0;
    tly_op_drain(c);
}

void tly_follow_tick(tally_comm *c)
{
    const struct tly_epochs *e = &c->epochs;
    if (!e->preparing || c->params.timeout <= 0 || tly_comm_is_doomed(c) ||
        (double)(c->loop.awake - e->preparing_since) / TLY_SEC < c->params.timeout)
        return;
    char why[TLY_SENTENCE];
    snprintf(
        why, sizeof why,
        "the job has waited %.0f s (TALLY_TIMEOUT) for a change of its tallyd or split: the coordinator at "
        "%.200s %s",
        c->params.timeout, c->member.coordinator,
        c->member.away ? "is gone" : "has not heard from all ranks");
    tly_comm_doom(c, ETIME, TLY_SEC, why);
}

void tly_follow_finish(tally_comm *c)
{
    follow_drop_promises(&c->epochs.promised);
    follow_drop_promises(&c->epochs.promising);
    tly_epoch_unref(c->epoch);
    c->epoch = NULL;
}
