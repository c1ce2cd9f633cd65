/* keep.c - results and verdicts from services that may die alone, kept until all ranks have them.
 *
 * An operation ends when all its parts have landed and are stable or copied aside (tly_keep_part, TALLY_RETAIN_BYTES,
 * TALLY_RETAIN_MEMORY).  Results from machines' own services are never kept: without tallyd nothing is copied and nothing
 * waits.  A verdict is stable after a while though a rank has not come for it.  This rank still keeps it apart
 * (keep_decided), and it moves if its service goes.
 *
 * After such a service has died this rank may be the only one that has what it has delivered.  peer->kept has the deliveries
 * that not all ranks have, in their order; the service's count `stable` settles a prefix.  Where few bytes of the operation
 * are missing the result is copied aside, so that the operation need not wait. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/list.h"
#include "comm/comm.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/path/keep.h"
#include "comm/path/peer.h"
#include "sum/pool.h"
#include "wire/frame.h"

void tly_keep_init(tally_comm *c)
{
    tly_list_init(&c->keeps.spare);
}

void tly_keep_begin(tally_comm *c)
{
    uint64_t local = (uint64_t)(c->local_size ? c->local_size : 1);
    c->keeps.copies.limit = c->params.retain_memory / local;
}

static struct tly_keep *make_keep(tally_comm *c)
{
    struct tly_keep *k;
    if (tly_list_empty(&c->keeps.spare)) {
        k = malloc(sizeof *k);
    } else {
        k = tly_list_entry(c->keeps.spare.next, struct tly_keep, node);
        tly_list_remove(&k->node);
    }
    if (k) {
        k->part = NULL;
        k->data = NULL;
        k->verdict = NULL;
        k->said = false;
        k->from = NULL;
        k->length = 0;
        tly_list_init(&k->node);
    }
    return k;
}

void tly_keep_drop(tally_comm *c, struct tly_keep *k)
{
    tly_list_remove(&k->node);
    if (k->from)
        k->from->unasked -= sizeof *k;
    tly_pool_give(&c->keeps.copies, k->data, k->length);
    free(k->verdict);
    k->verdict = NULL;
    tly_list_append(&c->keeps.spare, &k->node);
}

/* All that others may have to be told of this is elsewhere now. */
void tly_keep_settle(tally_comm *c, struct tly_keep *k)
{
    struct tly_part *p = k->part;
    tly_keep_drop(c, k);
    if (p) {
        p->keep = NULL;
        tly_op_settled(c, p);
    }
}

/* What the part's result is: of a root that has nothing to receive, its input. */
const uint8_t *tly_keep_result(const struct tly_part *p, uint32_t *length)
{
    bool root = p->result_length == 0 && p->length > 0;
    *length = root ? p->length : p->result_length;
    return root ? p->input : p->landing;
}

/* Few bytes of the operation are missing: rather than let it wait for all ranks to have this part, copy that aside. */
static bool keep_copy_aside(tally_comm *c, struct tly_keep *k, const struct tly_part *p)
{
    if (p->op->call->apart)
        return true; /* nobody else waits for it */
    if (p->quiet || p->op->call->kept ||
        tly_progress_missing(&p->op->progress) + p->bytes > c->params.retain_bytes)
        return false; /* a rank that only gives must be able to give again; a create ends once all have its values */
    const uint8_t *from = tly_keep_result(p, &k->length);
    if (!k->length)
        return true;
    k->data = tly_pool_take(&c->keeps.copies, k->length);
    if (!k->data)
        return false;
    memcpy(k->data, from, k->length);
    return true;
}

/* The next delivery of this service. */
static struct tly_keep *append_keep(struct tly_peer *p)
{
    struct tly_keep *k = make_keep(p->comm);
    if (k)
        tly_list_append(&p->kept, &k->node);
    else
        tly_comm_fail(p->comm, ENOMEM, "out of memory");
    return k;
}

bool tly_keep_part(struct tly_peer *p, struct tly_part *part)
{
    struct tly_keep *k = append_keep(p);
    if (!k)
        return false;
    tly_peer_head(part, &k->head);
    if (keep_copy_aside(p->comm, k, part)) {
        tly_op_settled(p->comm, part);
        return false;
    }
    k->part = part;
    part->keep = k;
    return true;
}

void tly_keep_verdict(struct tly_peer *p, const struct tly_part *part, int err, const char *sentence)
{
    struct tly_keep *k = append_keep(p);
    if (!k)
        return;
    tly_peer_head(part, &k->head);
    k->head.length = 0;
    k->err = err;
    k->verdict = strdup(sentence);
    if (!k->verdict)
        tly_comm_fail(p->comm, ENOMEM, "out of memory");
}

void tly_keep_unasked(struct tly_peer *p, const struct tly_frame *f)
{
    struct tly_keep *k = append_keep(p);
    if (!k)
        return;
    k->head = (struct tly_frame){.key = f->key, .round = f->round, .part = f->part};
    k->from = p;
    p->unasked += sizeof *k;
}

/* A verdict counts as stable after a while though a rank has not come for it, and may after its service has died. */
static void keep_decided(struct tly_peer *p, struct tly_keep *k)
{
    tly_list_remove(&k->node);
    tly_list_append(&p->decided, &k->node);
    if (++p->decided_count > TLY_VERDICTS) {
        tly_keep_drop(p->comm, tly_list_entry(p->decided.next, struct tly_keep, node));
        p->decided_count--;
    }
}

void tly_keep_stable(struct tly_peer *p, uint64_t stable)
{
    tally_comm *c = p->comm;
    for (; p->stable < stable && !tly_list_empty(&p->kept); p->stable++) {
        struct tly_keep *k = tly_list_entry(p->kept.next, struct tly_keep, node);
        if (k->verdict && p->mortal)
            keep_decided(p, k);
        else
            tly_keep_settle(c, k);
    }
    tly_comm_ended(c);
}

void tly_keep_drop_all(struct tly_peer *p)
{
    struct tly_list *lists[] = {&p->kept, &p->doubted, &p->decided};
    for (int i = 0; i < 3; i++)
        while (!tly_list_empty(lists[i]))
            tly_keep_drop(p->comm, tly_list_entry(lists[i]->next, struct tly_keep, node));
}

void tly_keep_finish(tally_comm *c)
{
    for (int i = 0; i < c->services; i++)
        tly_keep_drop_all(&c->peers[i]);
    while (!tly_list_empty(&c->keeps.spare))
        free(tly_list_entry(tly_list_take(&c->keeps.spare), struct tly_keep, node));
    tly_pool_trim(&c->keeps.copies);
}
