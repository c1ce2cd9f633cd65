/* doubt.c - what is in doubt: parts whose service is gone or was out of reach, and what this rank says of them.
 *
 * One exchange serves a service that is gone and a connection that broke: this rank says of each part in doubt how much
 * of its result has landed (HAVE), then that this was all (DONE).  The service asks for what it needs: input from some
 * offset on (AGAIN), the result as it has landed (AGAIN with MARK; FINAL).  Then results come as always.
 *
 * PREPARE only ends the connections to services that are gone.  Their parts move with the COMMIT that says so, on all ranks
 * alike (tly_doubt_hand_on).  If the coordinator dies between the two and the next one still has the service, the connections
 * are made again.  A connection that breaks while both ends live is made again at once.  Its counts begin at zero, HAVE and
 * DONE follow with TLY_RESUMED, and bytes of a push that had come stay in their slot.
 *
 * Parts in doubt are PART_DOUBTED, and PART_SAID once they have been said; peer->doubted has what was kept (keep.c). */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/list.h"
#include "comm/comm.h"
#include "comm/epoch/epoch.h"
#include "comm/op/group.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/path/doubt.h"
#include "comm/path/keep.h"
#include "comm/path/moves.h"
#include "comm/path/peer.h"
#include "comm/path/queue.h"
#include "sched/sched.h"
#include "transport/transport.h"
#include "wire/frame.h"
#include "wire/pack.h"

static bool doubt_is_doubted(struct tly_task *task, void *user)
{
    return tly_part_of(task)->state == PART_DOUBTED;
}

static bool doubt_task(struct tly_task *task, void *user)
{
    tly_part_change(tly_part_of(task), PART_DOUBTED);
    return true;
}

/* Parts of the operation that this service sums: what was sent of them may not have come. */
static void doubt_parts(struct tly_peer *p, struct tally_op *op, const struct tly_part *landing,
                        uint32_t bytes)
{
    for (uint32_t i = 0; i < op->part_count; i++) {
        struct tly_part *part = &op->parts[i];
        if (part->owner != p->index)
            continue;
        if (part == landing)
            part->landed += bytes;
        part->frames = 0;
        switch (part->state) {
        case PART_QUEUED:
        case PART_ADMITTED:
        case PART_SENT:
        case PART_SAID:
            if (part->known && !part->mark) {
                tly_part_change(part, PART_DOUBTED);
                if (op->call->answered && part->index == 0)
                    part->landed = 0; /* it does not land over its input: from the beginning */
            } else if (part->state != PART_QUEUED) {
                tly_part_change(part, PART_DOUBTED);
                part->known = false; /* as if it had never been sent */
            }
            break;
        default:
            break;
        }
    }
}

void tly_doubt_begin(struct tly_peer *p)
{
    tally_comm *c = p->comm;
    uint32_t bytes = 0;
    const struct tly_part *landing = tly_link_landing(p->link, &bytes);
    for (struct tally_op *op = tly_op_oldest(&c->active); op; op = tly_op_after(&c->active, op))
        doubt_parts(p, op, landing, bytes);
    tly_sched_drop(&p->queue, doubt_is_doubted, NULL);
    while (!tly_list_empty(&p->kept)) {
        struct tly_keep *k = tly_list_entry(p->kept.next, struct tly_keep, node);
        k->said = false;
        tly_list_remove(&k->node);
        tly_list_append(&p->doubted, &k->node);
    }
    tly_queue_lost(p);
}

static void doubt_post_about(struct tly_peer *p, const struct tly_frame *head, int type, uint16_t flags,
                             uint32_t offset, const struct tly_writer *w)
{
    struct tly_frame f = *head;
    f.type = (uint8_t)type;
    f.flags = flags;
    f.offset = offset;
    f.count = p->comm->epoch->number;
    f.rank = (uint32_t)p->comm->rank;
    if (!(f.group & TLY_PAIR) && tly_group_tell(p, f.group) != 0)
        tly_comm_fail(p->comm, ENOMEM, "out of memory");
    tly_peer_post(p, &f, w ? w->data : NULL, w ? w->len : 0);
}

/* Put it in its service's hands: again, if that has never heard of it, else by saying what has landed. */
static void doubt_say_part(struct tly_peer *p, struct tly_part *part)
{
    struct tly_frame head;
    if (!part->known) {
        part->start = 0;
        if (tly_queue_part(p->comm, part) != 0)
            tly_comm_fail(p->comm, ENOMEM, "out of memory");
        return;
    }
    tly_peer_head(part, &head);
    tly_part_change(part, PART_SAID);
    doubt_post_about(p, &head, TLY_HAVE,
                     (part->quiet ? TLY_QUIET : 0) | (tly_wait_is_patient(&part->op->wait) ? TLY_PATIENT : 0),
                     part->landed, NULL);
    if (part->index == 0 && part->op->reason)
        tly_queue_cancel(p->comm, part->op); /* that may have been lost, too */
}

static void doubt_say_keep(struct tly_peer *p, struct tly_keep *k, uint16_t resumed)
{
    k->said = true;
    if (k->verdict) {
        struct tly_writer w = {0};
        tly_write32(&w, (uint32_t)k->err);
        tly_write_text(&w, k->verdict);
        if (!w.failed)
            doubt_post_about(p, &k->head, TLY_HAVE, TLY_MARK | resumed, 0, &w);
        free(w.data);
        return;
    }
    doubt_post_about(p, &k->head, TLY_HAVE, TLY_LAST | resumed, k->head.length, NULL);
}

/* Nobody can be told anything by it: its operation has failed, or was none. */
static bool doubt_is_empty(const struct tly_keep *k)
{
    return !k->part && !k->data && !k->verdict && (k->from || k->head.length > 0);
}

/* All that is in doubt at this service. */
void tly_doubt_say(struct tly_peer *p, uint16_t resumed)
{
    tally_comm *c = p->comm;
    tly_moves_say(p);
    for (struct tally_op *op = tly_op_oldest(&c->active); op; op = tly_op_after(&c->active, op))
        for (uint32_t i = 0; i < op->part_count; i++)
            if (op->parts[i].owner == p->index && op->parts[i].state == PART_DOUBTED)
                doubt_say_part(p, &op->parts[i]);
    for (struct tly_list *n = p->doubted.next, *next; n != &p->doubted; n = next) {
        struct tly_keep *k = tly_list_entry(n, struct tly_keep, node);
        next = n->next;
        if (doubt_is_empty(k))
            tly_keep_drop(c, k);
        else if (!k->said || resumed)
            doubt_say_keep(p, k,
                           p->mortal ? resumed : 0); /* here it is news: it has moved from who is gone */
    }
    struct tly_frame done = {.type = TLY_DONE};
    doubt_post_about(p, &done, TLY_DONE, resumed, 0, NULL);
}

void tly_doubt_mended(struct tly_peer *p)
{
    /* What waits in the queue may need them. */
    if (tly_group_tell_all(p) != 0)
        tly_comm_fail(p->comm, ENOMEM, "out of memory");
    tly_doubt_say(p, TLY_RESUMED);
}

/* Between two ranks a part's number does not stand for itself; services that do not die alone sum these.  What a rank has of an
 * operation of its own on a shared tensor is never in doubt, for no other rank waits for it. */
static bool doubt_is_about(const struct tly_keep *k, const struct tly_frame *f)
{
    return k->head.key == f->key && k->head.round == f->round && k->head.part == f->part &&
           !(f->group & TLY_PAIR);
}

bool tly_doubt_confirmed(struct tly_peer *p, const struct tly_frame *f, bool delivered)
{
    tally_comm *c = p->comm;
    for (struct tly_list *n = p->doubted.next; n != &p->doubted; n = n->next) {
        struct tly_keep *k = tly_list_entry(n, struct tly_keep, node);
        if (!doubt_is_about(k, f))
            continue;
        if (delivered && p->mortal) { /* it has only been delivered again */
            tly_list_remove(&k->node);
            tly_list_append(&p->kept, &k->node);
        } else {
            tly_keep_settle(c, k);
            tly_comm_ended(c);
        }
        return true;
    }
    return false;
}

void tly_doubt_final(struct tly_peer *p, const struct tly_frame *f)
{
    struct tly_frame head;
    const uint8_t *data = NULL;
    uint32_t length = 0;
    for (struct tly_list *n = p->doubted.next; n != &p->doubted && !data; n = n->next) {
        struct tly_keep *k = tly_list_entry(n, struct tly_keep, node);
        if (!doubt_is_about(k, f))
            continue;
        head = k->head;
        data = k->part ? tly_keep_result(k->part, &length) : k->data;
        length = k->part ? length : k->length;
    }
    const struct tly_part *part = data ? NULL : tly_op_find_part(p, f);
    if (part) {
        tly_peer_head(part, &head);
        data = part->landing;
        length = part->landed;
    }
    if (!data)
        return; /* the operation has failed meanwhile */
    head.length = f->length;
    uint32_t end = f->offset < length ? f->offset : length, at = 0;
    do { /* at least one frame: nothing is a result too */
        uint32_t n = end - at < TLY_MAX_FRAGMENT ? end - at : TLY_MAX_FRAGMENT;
        struct tly_writer w = {.data = (uint8_t *)(data + at), .len = n};
        doubt_post_about(p, &head, TLY_FINAL, at + n == end ? TLY_LAST : 0, at, &w);
        at += n;
    } while (at < end);
}

/* What a service that is gone had goes to the substitutes. */
void tly_doubt_hand_on(tally_comm *c, struct tly_peer *from)
{
    tly_sched_drop(&from->queue, doubt_task, NULL);
    for (struct tally_op *op = tly_op_oldest(&c->active); op; op = tly_op_after(&c->active, op))
        for (uint32_t i = 0; i < op->part_count && !op->call->apart; i++)
            if (op->parts[i].owner == from->index && op->parts[i].state != PART_LANDED)
                op->parts[i].owner = tly_epoch_owner(c, op->epoch, op->key, op->parts[i].number, from->index);
    for (; !tly_list_empty(&from->decided); from->decided_count--) {
        struct tly_list *oldest = from->decided.next;
        tly_list_remove(oldest);
        tly_list_append(&from->doubted, oldest);
    }
    while (!tly_list_empty(&from->doubted)) {
        struct tly_keep *k = tly_list_entry(from->doubted.next, struct tly_keep, node);
        struct tly_peer *to = &c->peers[tly_epoch_substitute(c, k->head.key, k->head.part)];
        if (k->from) {
            tly_keep_drop(c, k);
            continue;
        }
        k->said = false;
        tly_list_remove(&k->node);
        tly_list_append(&to->doubted, &k->node);
        struct tly_part *waits = k->part;
        if (!waits)
            continue;
        waits->owner = (uint16_t)to->index;
        if (waits
                ->quiet) { /* it has nothing of the result, but can give again: as if its answer had not come */
            waits->keep = NULL;
            tly_part_change(waits, PART_DOUBTED);
            tly_progress_miss(&waits->op->progress, waits->bytes);
            k->part = NULL;
            tly_keep_drop(c, k);
        }
    }
}
