/* queue.c - parts as tasks of the scheduling core (src/sched/), and the line of those that it has started.
 *
 * A part waits in its service's queue until the core starts it, which admits it: it goes into the line from which peer.c
 * sends.  All ranks admit their parts in one common order, and what is urgent overtakes all that is not yet admitted.
 * Credit is given back when a service has taken the bytes off the connection; it never depends on another rank. */
#include <errno.h>
#include <stdlib.h>

#include "comm/comm.h"
#include "comm/epoch/traffic.h"
#include "comm/op/group.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/path/chain.h"
#include "comm/path/peer.h"
#include "comm/path/queue.h"
#include "comm/path/team.h"
#include "local/local.h"
#include "sched/sched.h"
#include "trace/timeline.h"
#include "trace/trace.h"
#include "transport/transport.h"
#include "wire/frame.h"
#include "wire/pack.h"

/* The window counts a part's bytes, whichever way they go.  The credit counts what is handed to the card, and a request or
 * an offer brings nothing. */
static void queue_measure(struct tly_part *p)
{
    bool brings = p->input && !p->offer;
    p->task.bytes = tly_charge(p->length);
    p->task.charge = brings ? p->task.bytes : TLY_LEAST_CHARGE;
}

/* The core starts it. */
static void queue_admit(struct tly_task *task)
{
    struct tly_part *p = tly_part_of(task);
    tally_comm *c = p->op->comm;
    struct tly_peer *peer = &c->peers[p->owner];
    tly_part_change(p, PART_ADMITTED);
    p->next = NULL;
    if (!tly_chain_is_empty(&p->op->chain) && !p->mark)
        tly_chain_admitted(p);
    tly_part_stamp(p, TLY_AT_ADMITTED);
    tly_traffic_admitted(peer);
    tly_stamp(c->trace, TLY_IN_FLIGHT, TLY_NO_PEER, c->sched.in_flight, 0, 0, 0);
    if (peer->last)
        peer->last->next = p;
    else
        peer->first = p;
    peer->last = p;
}

int tly_queue_part(tally_comm *c, struct tly_part *p)
{
    struct tly_peer *peer = &c->peers[p->owner];
    const struct tally_op *op = p->op;
    int err = p->group & TLY_PAIR ? 0 : tly_group_tell(peer, p->group);
    if (err)
        return err;
    p->task = (struct tly_task){
        .order = {op->urgency, op->sequence << 32 | p->order},
        /* A list's own credit is of its epoch.  Of what is left of an older one the larger credit rules. */
        .credit = op->epoch == c->epoch || op->credit > c->epoch->credit_bytes ? op->credit : 0,
        /* The opening credit does not hold requests: a service tells little before it has something to answer. */
        .eager = !p->input,
        .start = queue_admit};
    queue_measure(p);
    err = tly_sched_ready(&peer->queue, &p->task);
    if (err)
        return err;
    tly_part_change(p, PART_QUEUED);
    p->sent = p->start;
    tly_part_stamp(p, TLY_AT_QUEUED);
    return 0;
}

void tly_queue_admit(tally_comm *c)
{
    tly_sched_run(&c->sched);
    if (tly_teams_are_listed(&c->teams) && c->local)
        tly_local_blocked(c->local, c->sched.shut);
}

void tly_queue_accepted(struct tly_peer *peer, uint64_t accepted)
{
    if (accepted <= peer->accepted)
        return;
    tly_sched_finish(&peer->queue, accepted - peer->accepted);
    peer->accepted = accepted;
    tly_traffic_accepted(peer);
    tly_stamp(peer->comm->trace, TLY_IN_FLIGHT, TLY_NO_PEER, peer->comm->sched.in_flight, 0, 0, 0);
}

/* An admitted part does not go on: what it has not sent is no longer in flight. */
static void queue_retract(tally_comm *c, struct tly_part *p)
{
    struct tly_peer *peer = &c->peers[p->owner];
    struct tly_part **at = &peer->first, *before = NULL;
    while (*at && *at != p) {
        before = *at;
        at = &(*at)->next;
    }
    if (!*at)
        return;
    *at = p->next;
    if (peer->last == p)
        peer->last = before;
    tly_sched_retract(&peer->queue, &p->task, p->sent == p->start ? 0 : p->sent);
    tly_traffic_accepted(peer);
}

static bool queue_belongs_to(struct tly_task *task, void *op)
{
    return tly_part_of(task)->op == op;
}

static bool queue_is_part(struct tly_task *task, void *part)
{
    return tly_part_of(task) == part;
}

void tly_queue_remove(struct tly_part *p)
{
    tally_comm *c = p->op->comm;
    struct tly_peer *peer = &c->peers[p->owner];
    if (p->state == PART_QUEUED)
        tly_sched_drop(&peer->queue, queue_is_part, p);
    else if (p->state == PART_ADMITTED)
        queue_retract(c, p);
    if (p->frames && peer->link)
        tly_link_detach(peer->link, p);
    p->frames = 0;
}

/* reason: to home, for all ranks; NULL: what has come of it is not needed any more. */
static void queue_cancel(tally_comm *c, struct tly_part *p, const char *reason)
{
    struct tly_frame f;
    struct tly_writer w = {0};
    tly_peer_head(p, &f);
    f.type = TLY_CANCEL;
    f.flags = reason ? TLY_MARK : 0;
    f.offset = f.payload = 0;
    if (reason)
        tly_write_text(&w, reason);
    tly_peer_post(&c->peers[p->owner], &f, w.data, w.len);
    free(w.data);
}

void tly_queue_cancel(tally_comm *c, struct tally_op *op)
{
    struct tly_part *p = &op->parts[0];
    bool admitted = p->state == PART_ADMITTED;
    if (p->state == PART_LANDED)
        return; /* all have begun it: it ends by itself */
    if (p->known) {
        if (c->peers[p->owner].open) /* else it is said when the connection is mended */
            queue_cancel(c, p, op->reason);
        return;
    }
    if (admitted)
        queue_retract(c, p);
    p->mark = true;
    p->length = 0;
    queue_measure(p);
    if (admitted && tly_queue_part(c, p) != 0)
        tly_comm_fail(c, ENOMEM, "out of memory");
}

void tly_queue_withdraw(tally_comm *c, struct tally_op *op)
{
    bool queued = false, create = op->call->kept && !op->call->apart;
    for (uint32_t i = 0; i < op->part_count; i++) {
        struct tly_part *p = &op->parts[i];
        struct tly_peer *peer = &c->peers[p->owner];
        bool over = p->state == PART_LANDED || (p->index == 0 && !op->call->kept);
        queued |= p->state == PART_QUEUED;
        if (p->state == PART_ADMITTED)
            queue_retract(c, p);
        if (peer->link) {
            tly_link_sink(peer->link, p);
            tly_link_detach(peer->link, p);
        }
        /* At home the verdict is the answer; the others must be told.  Services keep what they have of a create. */
        if (p->known && (create || !over) && peer->open)
            queue_cancel(c, p, NULL);
        tly_part_change(p, PART_IDLE);
    }
    for (int i = 0; i < c->services && queued; i++)
        tly_sched_drop(&c->peers[i].queue, queue_belongs_to, op);
}

/* The service had to drop it, or was only offered it, or its connection or service was lost. */
void tly_queue_again(tally_comm *c, struct tly_part *p, uint32_t start)
{
    if (start > p->length || (p->state == PART_QUEUED && p->start == start))
        return;
    if (p->state == PART_ADMITTED && (p->sent > p->start || p->start != start))
        queue_retract(c, p);
    else if (p->state != PART_SENT && p->state != PART_SAID)
        return; /* it will go from there anyway */
    p->offer = false;
    p->start = start;
    if (tly_queue_part(c, p) != 0)
        tly_comm_fail(c, ENOMEM, "out of memory");
}

void tly_queue_move(tally_comm *c, struct tly_part *p, uint16_t to, uint32_t came)
{
    struct tly_peer *from = &c->peers[p->owner];
    bool under_way = p->state != PART_LANDED && p->state != PART_IDLE;
    if (under_way) {
        tly_queue_remove(p);
        if (from->link) {
            tly_link_sink(from->link, p);
            tly_link_detach(from->link, p);
        }
        if (p->known && from->open) /* else it is not spoken of once the connection is mended */
            queue_cancel(c, p, NULL);
        tly_part_change(p, PART_IDLE);
        p->known = false;
        p->start = p->landed = 0;
    }
    p->owner = to;
    p->came = came;
    if (under_way && tly_queue_part(c, p) != 0)
        tly_comm_fail(c, ENOMEM, "out of memory");
}

void tly_queue_lost(struct tly_peer *p)
{
    tly_sched_close(&p->queue);
    tly_traffic_accepted(p);
    p->accepted = p->received = p->stable = 0;
    p->first = p->last = NULL;
}
