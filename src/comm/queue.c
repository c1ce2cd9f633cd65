/* queue.c - which part goes next.
 *
 * Each service has a heap of waiting parts.  Over all of them the best part whose service has window is
 * admitted, as long as credit lasts: so all ranks send their parts in one common order, and what is urgent
 * overtakes all that is not yet admitted.  Credit is given back when a service has taken the bytes off the
 * connection; it never depends on another rank. */
#include <errno.h>
#include <stdlib.h>

#include "comm/internal.h"

static bool is_idle(tally_comm *c)
{
    bool idle = c->in_flight == 0;
    for (int i = 0; i < c->services && idle; i++)
        idle = !tly_heap_top(&c->peers[i].waiting);
    return idle;
}

int tly_queue_part(tally_comm *c, struct part *p)
{
    struct tly_rank_order order = {p->op->priority, p->op->sequence << 32 | p->order};
    if (is_idle(c))
        c->opened = 0;
    int err = p->group & TLY_PAIR ? 0 : tly_group_tell(&c->peers[p->owner], p->group);
    if (!err)
        err = tly_heap_push(&c->peers[p->owner].waiting, order, p);
    if (!err) {
        p->state = PART_QUEUED;
        p->sent = p->start;
        tly_part_stamp(p, TLY_AT_QUEUED);
    }
    return err;
}

void tly_queue_admit(tally_comm *c)
{
    for (;;) {
        struct peer *best = NULL;
        struct tly_heap_item *best_top = NULL;
        bool shut = false;
        for (int i = 0; i < c->services; i++) {
            struct peer *peer = &c->peers[i];
            struct tly_heap_item *top = tly_heap_top(&peer->waiting);
            if (!top)
                continue;
            if (!peer->open || peer->pushed + tly_cost(top->value) > peer->granted) {
                shut = true; /* no window: the next one goes */
                continue;
            }
            if (!best || tly_before(top->order, best_top->order)) {
                best = peer;
                best_top = top;
            }
        }
        if (c->carry && c->local)
            tly_local_blocked(c->local, shut);
        if (!best)
            return;
        const struct part *first = best_top->value;
        /* A list's own credit is of its epoch; of what is left of an older one the newest credit rules. */
        uint64_t cost = tly_weight(first);
        uint64_t credit = first->op->epoch == c->epoch ? first->op->credit : c->credit_bytes;
        if (!c->opened)
            c->opened = credit / 4;
        /* The opening credit does not hold requests: a service tells little before it has something to answer. */
        bool opens = first->input && c->opened < credit;
        if (c->in_flight && c->in_flight + cost > (opens ? c->opened : credit))
            return;
        struct part *p = tly_heap_pop(&best->waiting);
        c->in_flight += cost;
        best->in_flight += cost;
        best->pushed += tly_cost(p);
        p->state = PART_ADMITTED;
        p->next = NULL;
        if (tly_team_carries(p))
            tly_local_sent(p->op->engine, &p->shard);
        tly_part_stamp(p, TLY_AT_ADMITTED);
        tly_traffic_admitted(best);
        tly_stamp(c->trace, TLY_IN_FLIGHT, TLY_NO_PEER, c->in_flight, 0, 0, 0);
        if (best->last)
            best->last->next = p;
        else
            best->first = p;
        best->last = p;
    }
}

/* So much of what is in flight there is so no longer. */
static void land(struct peer *peer, uint64_t bytes)
{
    tally_comm *c = peer->comm;
    bytes = bytes < peer->in_flight ? bytes : peer->in_flight;
    peer->in_flight -= bytes;
    c->in_flight -= bytes;
    tly_traffic_accepted(peer);
}

void tly_queue_accepted(struct peer *peer, uint64_t accepted)
{
    if (accepted <= peer->accepted)
        return;
    uint64_t more = accepted - peer->accepted;
    tally_comm *c = peer->comm;
    land(peer, more);
    c->opened = c->opened + more < c->credit_bytes ? c->opened + more : c->credit_bytes;
    peer->accepted = accepted;
    tly_stamp(c->trace, TLY_IN_FLIGHT, TLY_NO_PEER, c->in_flight, 0, 0, 0);
}

/* An admitted part does not go on: what it has not sent is no longer in flight. */
static void retract(tally_comm *c, struct part *p)
{
    struct peer *peer = &c->peers[p->owner];
    struct part **at = &peer->first, *before = NULL;
    while (*at && *at != p) {
        before = *at;
        at = &(*at)->next;
    }
    if (!*at)
        return;
    *at = p->next;
    if (peer->last == p)
        peer->last = before;
    if (p->sent == p->start) {
        land(peer, tly_weight(p));
        peer->pushed -= tly_cost(p); /* the service has never heard of it */
    } else {
        land(peer, tly_weight(p) - p->sent);
    }
}

static bool belongs_to(void *value, void *op)
{
    return ((struct part *)value)->op == op;
}

/* reason: to home, for all ranks; NULL: what has come of it is not needed any more. */
static void cancel(tally_comm *c, struct part *p, const char *reason)
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
    struct part *p = &op->parts[0];
    bool admitted = p->state == PART_ADMITTED;
    if (p->state == PART_LANDED)
        return; /* all have begun it: it ends by itself */
    if (p->known) {
        if (c->peers[p->owner].open) /* else it is said when the connection is mended */
            cancel(c, p, op->reason);
        return;
    }
    if (admitted)
        retract(c, p);
    p->mark = true;
    p->length = 0;
    if (admitted && tly_queue_part(c, p) != 0)
        tly_comm_fail(c, ENOMEM, "out of memory");
}

void tly_queue_withdraw(tally_comm *c, struct tally_op *op)
{
    bool queued = false;
    for (uint32_t i = 0; i < op->part_count; i++) {
        struct part *p = &op->parts[i];
        struct peer *peer = &c->peers[p->owner];
        queued |= p->state == PART_QUEUED;
        if (p->state == PART_ADMITTED)
            retract(c, p);
        if (peer->link) {
            tly_link_sink(peer->link, p);
            tly_link_detach(peer->link, p);
        }
        /* At home the verdict is the answer; the others must be told. */
        if (p->known && p->state != PART_LANDED && p->index != 0 && peer->open)
            cancel(c, p, NULL);
        p->state = PART_IDLE;
    }
    for (int i = 0; i < c->services && queued; i++)
        tly_heap_filter(&c->peers[i].waiting, belongs_to, op);
}

/* The service had to drop it, or was only offered it, or its connection or service was lost. */
void tly_queue_again(tally_comm *c, struct part *p, uint32_t start)
{
    if (start > p->length || (p->state == PART_QUEUED && p->start == start))
        return;
    if (p->state == PART_ADMITTED && (p->sent > p->start || p->start != start))
        retract(c, p);
    else if (p->state != PART_SENT && p->state != PART_SAID)
        return; /* it will go from there anyway */
    p->offer = false;
    p->start = start;
    if (tly_queue_part(c, p) != 0)
        tly_comm_fail(c, ENOMEM, "out of memory");
}

void tly_queue_lost(struct peer *p)
{
    land(p, p->in_flight);
    p->pushed = p->accepted = p->received = p->stable = 0;
    p->first = p->last = NULL;
}
