/* epoch.c - which service sums which part while services come and go, and what becomes of parts whose service is gone or
 * was out of reach.
 *
 * A round stays in the epoch in which the first rank began it; all others learn that with COMMIT.  In its epoch a part
 * was dealt to one service.  If that is gone, one of the machines' own services takes its place, chosen by the part's
 * name: these do not die alone, so a part changes its service at most once.
 *
 * One exchange serves a service that is gone and a connection that broke: this rank says of each part in doubt how much
 * of its result has landed (HAVE), then that this was all (DONE).  The service asks for what it needs: input from some
 * offset on (AGAIN), the result as it has landed (AGAIN with MARK; FINAL).  Then results come as always. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "comm/internal.h"

static uint64_t mix(uint64_t x)
{
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdull;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ull;
    return x ^ x >> 33;
}

static uint64_t round_id(uint64_t key, uint32_t round)
{
    return mix(key ^ mix(round + 1));
}

/* --- epochs -------------------------------------------------------------------------------------- */

void tly_epoch_unref(struct epoch *e)
{
    if (!e || --e->references)
        return;
    tly_list_remove(&e->node);
    free(e->incarnation);
    free(e->weight);
    free(e->machine);
    free(e->listed);
    free(e);
}

/* The newest roster holds from now on.  -ENOMEM. */
static int adopt(tally_comm *c)
{
    const struct tly_roster *r = &c->member.roster;
    struct epoch *e = calloc(1, sizeof *e);
    if (!e)
        return -ENOMEM;
    e->number = r->epoch;
    e->references = 1;
    e->services = (int)r->service_count;
    e->sharing = (int)tly_roster_active(r);
    e->part_bytes = (uint32_t)r->part_bytes;
    e->credit_bytes =
        c->params.credit_bytes ? c->params.credit_bytes : 2ull * (unsigned)e->sharing * e->part_bytes;
    e->incarnation = calloc(r->service_count, sizeof *e->incarnation);
    e->weight = calloc(r->service_count, sizeof *e->weight);
    e->machine = calloc(r->service_count, sizeof *e->machine);
    e->listed = calloc(r->service_count, sizeof *e->listed);
    tly_list_init(&e->node);
    if (!e->incarnation || !e->weight || !e->machine || !e->listed) {
        tly_epoch_unref(e);
        return -ENOMEM;
    }
    tly_roster_machines(r, e->machine);
    for (uint32_t i = 0; i < r->service_count; i++) {
        bool gone = r->services[i].state == TLY_SERVICE_GONE;
        e->incarnation[i] = gone ? 0 : r->services[i].incarnation;
        e->weight[i] = e->listed[i] = r->services[i].weight;
    }
    tly_list_append(&c->epochs, &e->node);
    struct epoch *before = c->epoch;
    pthread_mutex_lock(&c->names_lock);
    c->epoch = e;
    c->weight = e->weight;
    c->sharing = e->sharing;
    c->credit_bytes = e->credit_bytes;
    pthread_mutex_unlock(&c->names_lock);
    tly_epoch_unref(before);
    return 0;
}

int tly_epoch_init(tally_comm *c)
{
    uint64_t local = (uint64_t)(c->local_size ? c->local_size : 1);
    c->copies.limit = c->params.retain_memory / local;
    return adopt(c) ? tly_fail(ENOMEM, "out of memory") : 0;
}

struct epoch *tly_epoch_begin(tally_comm *c, uint64_t key, uint32_t round)
{
    struct epoch *e = c->promised.count ? tly_map_take(&c->promised, round_id(key, round)) : NULL;
    if (e)
        return e; /* with the promise's reference */
    c->epoch->references++;
    return c->epoch;
}

uint16_t tly_epoch_owner(tally_comm *c, const struct epoch *e, uint64_t key, uint32_t part, uint16_t dealt)
{
    /* Until a COMMIT says so, who is about to be put out is not: a coordinator that dies may have told some alone. */
    if (c->peers[dealt].incarnation == e->incarnation[dealt])
        return dealt;
    return (uint16_t)(mix(key + part) % (unsigned)c->machines);
}

/* --- keeps --------------------------------------------------------------------------------------- */

static struct keep *make_keep(tally_comm *c)
{
    struct keep *k;
    if (tly_list_empty(&c->spare_keeps)) {
        k = malloc(sizeof *k);
    } else {
        k = tly_list_entry(c->spare_keeps.next, struct keep, node);
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

static void drop_keep(tally_comm *c, struct keep *k)
{
    tly_list_remove(&k->node);
    if (k->from)
        k->from->unasked -= sizeof *k;
    tly_pool_give(&c->copies, k->data, k->length);
    free(k->verdict);
    k->verdict = NULL;
    tly_list_append(&c->spare_keeps, &k->node);
}

/* All that others may have to be told of this is elsewhere now. */
static void settle(tally_comm *c, struct keep *k)
{
    struct part *p = k->part;
    drop_keep(c, k);
    if (p) {
        p->keep = NULL;
        tly_op_settled(c, p);
    }
}

/* What the part's result is: of a root that has nothing to receive, its input. */
static const uint8_t *result_of(const struct part *p, uint32_t *length)
{
    bool root = p->result_length == 0 && p->length > 0;
    *length = root ? p->length : p->result_length;
    return root ? p->input : p->landing;
}

/* Few bytes of the operation are missing: rather than let it wait for all ranks to have this part, copy that aside. */
static bool copy_aside(tally_comm *c, struct keep *k, const struct part *p)
{
    if (p->quiet || p->op->missing + p->length > c->params.retain_bytes)
        return false; /* who only gives must be able to give again */
    const uint8_t *from = result_of(p, &k->length);
    if (!k->length)
        return true;
    k->data = tly_pool_take(&c->copies, k->length);
    if (!k->data)
        return false;
    memcpy(k->data, from, k->length);
    return true;
}

/* The next delivery of this service. */
static struct keep *append_keep(struct peer *p)
{
    struct keep *k = make_keep(p->comm);
    if (k)
        tly_list_append(&p->kept, &k->node);
    else
        tly_comm_fail(p->comm, ENOMEM, "out of memory");
    return k;
}

void tly_epoch_keep(struct peer *p, struct part *part)
{
    struct keep *k = append_keep(p);
    if (!k)
        return;
    tly_peer_head(part, &k->head);
    if (copy_aside(p->comm, k, part)) {
        tly_op_settled(p->comm, part);
    } else {
        k->part = part;
        part->keep = k;
    }
}

void tly_epoch_keep_verdict(struct peer *p, const struct tally_op *op, int err, const char *sentence)
{
    struct keep *k = append_keep(p);
    if (!k)
        return;
    tly_peer_head(&op->parts[0], &k->head);
    k->head.length = 0;
    k->err = err;
    k->verdict = strdup(sentence);
    if (!k->verdict)
        tly_comm_fail(p->comm, ENOMEM, "out of memory");
}

void tly_epoch_keep_unasked(struct peer *p, const struct tly_frame *f)
{
    struct keep *k = append_keep(p);
    if (!k)
        return;
    k->head = (struct tly_frame){.key = f->key, .round = f->round, .part = f->part};
    k->from = p;
    p->unasked += sizeof *k;
}

/* A verdict counts as stable after a while though a rank has not come for it, and may after its service has died. */
static void keep_decided(struct peer *p, struct keep *k)
{
    tly_list_remove(&k->node);
    tly_list_append(&p->decided, &k->node);
    if (++p->decided_count > TLY_VERDICTS) {
        drop_keep(p->comm, tly_list_entry(p->decided.next, struct keep, node));
        p->decided_count--;
    }
}

void tly_epoch_stable(struct peer *p, uint64_t stable)
{
    tally_comm *c = p->comm;
    for (; p->stable < stable && !tly_list_empty(&p->kept); p->stable++) {
        struct keep *k = tly_list_entry(p->kept.next, struct keep, node);
        if (k->verdict && p->mortal)
            keep_decided(p, k);
        else
            settle(c, k);
    }
    tly_comm_ended(c);
}

void tly_epoch_forget(struct tally_op *op)
{
    for (uint32_t i = 0; i < op->part_count; i++)
        if (op->parts[i].keep) {
            op->parts[i].keep->part = NULL;
            op->parts[i].keep = NULL;
        }
}

/* --- what is in doubt ---------------------------------------------------------------------------- */

static bool is_doubted(void *value, void *user)
{
    return ((struct part *)value)->state == PART_DOUBTED;
}

/* Parts of the operation that this service sums: what was sent of them may not have come. */
static void doubt_parts(struct peer *p, struct tally_op *op, const struct part *landing, uint32_t bytes)
{
    for (uint32_t i = 0; i < op->part_count; i++) {
        struct part *part = &op->parts[i];
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
                part->state = PART_DOUBTED;
                if (op->kind == TALLY_ALLGATHER && part->index == 0)
                    part->landed = 0; /* it does not land over its input: from the beginning */
            } else if (part->state != PART_QUEUED) {
                part->state = PART_DOUBTED;
                part->known = false; /* as if it had never been sent */
            }
            break;
        default:
            break;
        }
    }
}

void tly_epoch_doubt(struct peer *p)
{
    tally_comm *c = p->comm;
    uint32_t bytes = 0;
    const struct part *landing = tly_link_landing(p->link, &bytes);
    for (struct tly_list *n = c->active_ops.next; n != &c->active_ops; n = n->next)
        doubt_parts(p, tly_list_entry(n, struct tally_op, node), landing, bytes);
    tly_heap_filter(&p->waiting, is_doubted, NULL);
    while (!tly_list_empty(&p->kept)) {
        struct keep *k = tly_list_entry(p->kept.next, struct keep, node);
        k->said = false;
        tly_list_remove(&k->node);
        tly_list_append(&p->doubted, &k->node);
    }
    tly_queue_lost(p);
}

static void post_about(struct peer *p, const struct tly_frame *head, int type, uint16_t flags,
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
static void say_part(struct peer *p, struct part *part)
{
    struct tly_frame head;
    if (!part->known) {
        part->start = 0;
        if (tly_queue_part(p->comm, part) != 0)
            tly_comm_fail(p->comm, ENOMEM, "out of memory");
        return;
    }
    tly_peer_head(part, &head);
    part->state = PART_SAID;
    post_about(p, &head, TLY_HAVE, (part->quiet ? TLY_QUIET : 0) | (part->op->patient ? TLY_PATIENT : 0),
               part->landed, NULL);
    if (part->index == 0 && part->op->reason)
        tly_queue_cancel(p->comm, part->op); /* that may have been lost, too */
}

static void say_keep(struct peer *p, struct keep *k, uint16_t resumed)
{
    k->said = true;
    if (k->verdict) {
        struct tly_writer w = {0};
        tly_write32(&w, (uint32_t)k->err);
        tly_write_text(&w, k->verdict);
        if (!w.failed)
            post_about(p, &k->head, TLY_HAVE, TLY_MARK | resumed, 0, &w);
        free(w.data);
        return;
    }
    post_about(p, &k->head, TLY_HAVE, TLY_LAST | resumed, k->head.length, NULL);
}

/* Nobody can be told anything by it: its operation has failed, or was none. */
static bool is_empty(const struct keep *k)
{
    return !k->part && !k->data && !k->verdict && (k->from || k->head.length > 0);
}

/* All that is in doubt at this service. */
static void say_all(struct peer *p, uint16_t resumed)
{
    tally_comm *c = p->comm;
    for (struct tly_list *n = c->active_ops.next; n != &c->active_ops; n = n->next) {
        struct tally_op *op = tly_list_entry(n, struct tally_op, node);
        for (uint32_t i = 0; i < op->part_count; i++)
            if (op->parts[i].owner == p->index && op->parts[i].state == PART_DOUBTED)
                say_part(p, &op->parts[i]);
    }
    for (struct tly_list *n = p->doubted.next, *next; n != &p->doubted; n = next) {
        struct keep *k = tly_list_entry(n, struct keep, node);
        next = n->next;
        if (is_empty(k))
            drop_keep(c, k);
        else if (!k->said || resumed)
            say_keep(p, k, p->mortal ? resumed : 0); /* here it is news: it has moved from who is gone */
    }
    struct tly_frame done = {.type = TLY_DONE};
    post_about(p, &done, TLY_DONE, resumed, 0, NULL);
}

void tly_epoch_mended(struct peer *p)
{
    /* What waits in the queue may need them. */
    uint32_t lists;
    pthread_mutex_lock(&p->comm->names_lock);
    lists = p->comm->list_count;
    pthread_mutex_unlock(&p->comm->names_lock);
    if (tly_group_tell(p, lists) != 0)
        tly_comm_fail(p->comm, ENOMEM, "out of memory");
    say_all(p, TLY_RESUMED);
}

/* Only between two ranks a part's number does not stand for itself; these are summed by services that do not die alone. */
static bool is_about(const struct keep *k, const struct tly_frame *f)
{
    return k->head.key == f->key && k->head.round == f->round && k->head.part == f->part &&
           !(f->group & TLY_PAIR);
}

bool tly_epoch_confirmed(struct peer *p, const struct tly_frame *f, bool delivered)
{
    tally_comm *c = p->comm;
    for (struct tly_list *n = p->doubted.next; n != &p->doubted; n = n->next) {
        struct keep *k = tly_list_entry(n, struct keep, node);
        if (!is_about(k, f))
            continue;
        if (delivered && p->mortal) { /* it has only been delivered again */
            tly_list_remove(&k->node);
            tly_list_append(&p->kept, &k->node);
        } else {
            settle(c, k);
            tly_comm_ended(c);
        }
        return true;
    }
    return false;
}

void tly_epoch_final(struct peer *p, const struct tly_frame *f)
{
    struct tly_frame head;
    const uint8_t *data = NULL;
    uint32_t length = 0;
    for (struct tly_list *n = p->doubted.next; n != &p->doubted && !data; n = n->next) {
        struct keep *k = tly_list_entry(n, struct keep, node);
        if (!is_about(k, f))
            continue;
        head = k->head;
        data = k->part ? result_of(k->part, &length) : k->data;
        length = k->part ? length : k->length;
    }
    const struct part *part = data ? NULL : tly_peer_find(p, f);
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
        post_about(p, &head, TLY_FINAL, at + n == end ? TLY_LAST : 0, at, &w);
        at += n;
    } while (at < end);
}

/* --- changes ------------------------------------------------------------------------------------- */

static void drop_keeps(struct peer *p)
{
    struct tly_list *lists[] = {&p->kept, &p->doubted, &p->decided};
    for (int i = 0; i < 3; i++)
        while (!tly_list_empty(lists[i]))
            drop_keep(p->comm, tly_list_entry(lists[i]->next, struct keep, node));
}

/* Nothing stays of who had this place: it is another's now, or nobody's. */
static void vacate(struct peer *p)
{
    tly_peer_drop(p);
    drop_keeps(p);
    tly_peer_finish(p);
    tally_comm *c = p->comm;
    uint32_t index = p->index;
    *p = (struct peer){.reported = true}; /* nobody waits for that */
    tly_peer_init(p, c, index);
}

/* A new coordinator may never have heard of those whom the last one invited. */
static void vacate_uninvited(tally_comm *c)
{
    while ((uint32_t)c->services > c->member.roster.service_count)
        vacate(&c->peers[--c->services]);
}

/* Connect to who is new. */
static void meet(tally_comm *c)
{
    const struct tly_roster *r = &c->member.roster;
    for (uint32_t i = 0; i < r->service_count && !atomic_load(&c->failed); i++) {
        const struct tly_roster_service *s = &r->services[i];
        struct peer *p = &c->peers[i];
        if (s->state == TLY_SERVICE_GONE || p->incarnation == s->incarnation)
            continue;
        vacate(p);
        if (tly_peer_connect(p) != 0)
            tly_peer_give_up(p, tly_error());
    }
}

void tly_epoch_met(tally_comm *c)
{
    if (!c->meeting)
        return;
    for (int i = 0; i < c->services; i++)
        if (!c->peers[i].open && !c->peers[i].gone && !c->peers[i].known && c->peers[i].incarnation)
            return;
    tly_member_begun(&c->member, c->meeting, NULL, 0);
    c->meeting = 0;
}

void tly_epoch_invited(void *comm)
{
    tally_comm *c = comm;
    vacate_uninvited(c);
    for (uint32_t i = (uint32_t)c->services; i < c->member.roster.service_count; i++) {
        tly_peer_init(&c->peers[i], c, i);
        c->services = (int)i + 1;
    }
    c->meeting = c->member.roster.epoch;
    meet(c);
    tly_epoch_met(c);
}

static void put_out(struct peer *p)
{
    if (p->gone)
        return;
    p->gone = true;
    if (p->open)
        tly_epoch_doubt(p);
    tly_peer_drop(p);
}

void tly_epoch_decided(tally_comm *c, const struct tally_op *op)
{
    c->verdicts[c->verdict_count++ % TLY_VERDICTS] =
        (struct tly_begun){op->key, op->round, op->epoch->number};
}

void tly_epoch_prepare(void *comm, const struct tly_roster *next)
{
    tally_comm *c = comm;
    size_t decided = c->verdict_count < TLY_VERDICTS ? c->verdict_count : TLY_VERDICTS, count = decided;
    if (!c->preparing) {
        c->preparing_since = c->loop.awake;
        c->prepared = next->epoch;
        tly_stamp(c->trace, TLY_AT_PREPARED, TLY_NO_PEER, 0, c->prepared, TLY_NO_PART,
                  (uint32_t)next->part_bytes);
    }
    c->preparing = next->epoch;
    /* First nothing more may land from who is gone. */
    for (uint32_t i = 0; i < next->service_count && i < (uint32_t)c->services; i++)
        if (next->services[i].state == TLY_SERVICE_GONE)
            put_out(&c->peers[i]);
    for (struct tly_list *n = c->active_ops.next; n != &c->active_ops; n = n->next)
        count++;
    struct tly_begun *begun = malloc((count + 1) * sizeof *begun);
    if (!begun) {
        tly_comm_fail(c, ENOMEM, "out of memory");
        return;
    }
    memcpy(begun, c->verdicts, decided * sizeof *begun);
    count = decided;
    for (struct tly_list *n = c->active_ops.next; n != &c->active_ops; n = n->next) {
        const struct tally_op *op = tly_list_entry(n, struct tally_op, node);
        begun[count++] = (struct tly_begun){op->key, op->round, op->epoch->number};
    }
    tly_member_begun(&c->member, next->epoch, begun, count);
    free(begun);
    tly_epoch_met(c);
}

static void drop_promises(struct tly_map *m)
{
    struct epoch *e;
    tly_map_each(m, e) tly_epoch_unref(e);
    tly_map_finish(m);
    *m = (struct tly_map){0};
}

/* Has this rank begun the round?  A name that it does not know may be that of one that it has ended and forgotten: a
 * promise too many is dropped at the next change. */
static bool has_begun(tally_comm *c, const struct tly_begun *b)
{
    bool begun = false;
    struct tly_frame f = {.key = b->key, .round = b->round};
    if (tly_op_find(c, &f))
        return true;
    pthread_mutex_lock(&c->names_lock);
    const struct tensor *t = tly_map_get(&c->names, b->key);
    begun = t && (int32_t)(t->round - b->round) > 0;
    pthread_mutex_unlock(&c->names_lock);
    if (!begun || (c->local && c->machines == 1)) /* it may be in the engine, which may hand it back */
        return false;
    pthread_mutex_lock(&c->inbox_lock); /* it may be on its way */
    for (struct tly_list *n = c->inbox.next; n != &c->inbox && begun; n = n->next) {
        const struct tally_op *op = tly_list_entry(n, struct tally_op, node);
        begun = op->key != b->key || op->round != b->round;
    }
    pthread_mutex_unlock(&c->inbox_lock);
    return begun;
}

void tly_epoch_promised(void *comm, const struct tly_begun *b)
{
    tally_comm *c = comm;
    if (has_begun(c, b) || tly_map_get(&c->promising, round_id(b->key, b->round)))
        return;
    for (struct tly_list *n = c->epochs.next; n != &c->epochs; n = n->next) {
        struct epoch *e = tly_list_entry(n, struct epoch, node);
        if (e->number != b->epoch)
            continue;
        if (tly_map_put(&c->promising, round_id(b->key, b->round), e) != 0)
            tly_comm_fail(c, ENOMEM, "out of memory");
        else
            e->references++;
        return;
    }
    /* An older epoch that is forgotten here: the round has ended here, or its promise would hold the epoch. */
    if (b->epoch > c->epoch->number)
        tly_comm_fail(c, EPROTO, "a round was begun in an epoch that this rank does not know");
}

/* What a service that is gone had goes to the substitutes. */
static void hand_on(tally_comm *c, struct peer *from)
{
    struct part *part;
    while ((part = tly_heap_pop(&from->waiting)))
        part->state = PART_DOUBTED;
    for (struct tly_list *n = c->active_ops.next; n != &c->active_ops; n = n->next) {
        struct tally_op *op = tly_list_entry(n, struct tally_op, node);
        for (uint32_t i = 0; i < op->part_count; i++)
            if (op->parts[i].owner == from->index && op->parts[i].state != PART_LANDED)
                op->parts[i].owner = tly_epoch_owner(c, op->epoch, op->key, op->parts[i].number, from->index);
    }
    for (; !tly_list_empty(&from->decided); from->decided_count--) {
        struct tly_list *oldest = from->decided.next;
        tly_list_remove(oldest);
        tly_list_append(&from->doubted, oldest);
    }
    while (!tly_list_empty(&from->doubted)) {
        struct keep *k = tly_list_entry(from->doubted.next, struct keep, node);
        struct peer *to = &c->peers[mix(k->head.key + k->head.part) % (unsigned)c->machines];
        if (k->from) {
            drop_keep(c, k);
            continue;
        }
        k->said = false;
        tly_list_remove(&k->node);
        tly_list_append(&to->doubted, &k->node);
        struct part *waits = k->part;
        if (!waits)
            continue;
        waits->owner = (uint16_t)to->index;
        if (waits
                ->quiet) { /* it has nothing of the result, but can give again: as if its answer had not come */
            waits->keep = NULL;
            waits->state = PART_DOUBTED;
            waits->op->missing += waits->length;
            k->part = NULL;
            drop_keep(c, k);
        }
    }
}

void tly_epoch_committed(void *comm, const struct tly_roster *roster)
{
    tally_comm *c = comm;
    if (atomic_load(&c->failed))
        return;
    struct tly_map promised = c->promised;
    c->promised = c->promising;
    c->promising = (struct tly_map){0};
    drop_promises(&promised);
    vacate_uninvited(c);
    if (adopt(c) != 0 || tly_pace_init(c) != 0) {
        tly_comm_fail(c, ENOMEM, "out of memory");
        return;
    }
    tly_service_resize(c->service, roster);
    tly_traffic_begin(c);
    for (int i = 0; i < c->services; i++) {
        struct peer *p = &c->peers[i];
        p->accused = false; /* the coordinator has forgotten who accused whom */
        /* What it had moves when it moves on all ranks.  If its coordinator died after some had prepared for that, it
         * is in still, and they take it up again as after a broken connection. */
        if (roster->services[i].state != TLY_SERVICE_GONE) {
            p->gone = false;
        } else if (p->incarnation) {
            put_out(p);
            p->incarnation = 0;
            hand_on(c, p);
        }
    }
    for (int i = 0; i < c->machines; i++)
        if (c->peers[i].open)
            say_all(&c->peers[i], 0);
    if (c->preparing)
        tly_stamp(c->trace, TLY_AT_COMMITTED, TLY_NO_PEER, 0, c->prepared, TLY_NO_PART, c->epoch->part_bytes);
    c->preparing = 0;
    tly_op_drain(c);
}

void tly_epoch_finish(tally_comm *c)
{
    drop_promises(&c->promised);
    drop_promises(&c->promising);
    for (int i = 0; i < c->services; i++)
        drop_keeps(&c->peers[i]);
    while (!tly_list_empty(&c->spare_keeps))
        free(tly_list_entry(tly_list_take(&c->spare_keeps), struct keep, node));
    tly_pool_trim(&c->copies);
    tly_epoch_unref(c->epoch);
    c->epoch = NULL;
}
