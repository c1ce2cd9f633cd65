/* epoch.c - epochs, as a rank knows them: which service sums which part of a round.
 *
 * A round stays in the epoch in which the first rank began it; all others learn that with COMMIT (follow.c).  In its epoch a
 * part was dealt to one service.  If that is gone, one of the machines' own services takes its place, chosen by the part's
 * name: these do not die alone, so a part changes its service at most once.
 *
 * A round that has ended for the others by a verdict stays in its epoch, too: its home keeps the verdict (tly_epoch_decided).
 * An epoch is kept as long as operations or promised rounds need it.
 *
 * Weights, parts and plans, the size of parts and the credit belong to the epoch.  Sizes stay between part_least and part_most,
 * which the first roster fixes, so no rank's verdict depends on the moment of asking.  The newest credit governs all parts.  A
 * window belongs to its service (job_set_sizes in sum/job.c) and follows the counts that the service grants. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/list.h"
#include "base/map.h"
#include "comm/comm.h"
#include "comm/epoch/epoch.h"
#include "comm/op/op.h"
#include "comm/path/peer.h"
#include "membership/member.h"
#include "membership/roster.h"
#include "plan/cut.h"
#include "plan/plan.h"
#include "sched/sched.h"

uint64_t tly_epoch_round(uint64_t key, uint32_t round)
{
    return tly_map_mix(key ^ tly_map_mix(round + 1));
}

void tly_epoch_unref(struct tly_epoch *e)
{
    if (!e || --e->references)
        return;
    tly_list_remove(&e->node);
    free(e->incarnation);
    free(e->left);
    free(e->weight);
    free(e->machine);
    free(e->listed);
    free(e);
}

void tly_epochs_init(struct tly_epochs *e)
{
    tly_list_init(&e->all);
}

uint32_t tly_epochs_count(const struct tly_epochs *e)
{
    uint32_t n = 0;
    for (const struct tly_list *at = e->all.next; at != &e->all; at = at->next)
        n++;
    return n;
}

void tly_epoch_met(tally_comm *c)
{
    struct tly_epochs *e = &c->epochs;
    if (!e->meeting)
        return;
    for (int i = 0; i < c->services; i++)
        if (!c->peers[i].open && !c->peers[i].gone && !c->peers[i].known && c->peers[i].incarnation)
            return;
    tly_member_begun(&c->member, e->meeting, NULL, 0, 0);
    e->meeting = 0;
}

/* The newest roster holds from now on.  -ENOMEM. */
int tly_epoch_adopt(tally_comm *c)
{
    const struct tly_roster *r = &c->member.roster;
    struct tly_epoch *e = calloc(1, sizeof *e);
    if (!e)
        return -ENOMEM;
    e->number = r->epoch;
    e->references = 1;
    e->services = (int)r->service_count;
    e->sharing = (int)tly_roster_active(r);
    e->far = e->sharing > 0;
    for (uint32_t i = 0; i < r->service_count; i++) {
        bool shares = r->services[i].weight > 0, spare = i >= r->machine_count;
        e->spares |= shares && spare;
        e->far &= !shares || spare;
    }
    e->part_bytes = (uint32_t)r->part_bytes;
    e->part_most = (uint32_t)r->part_most;
    e->credit_bytes = c->params.credit_bytes
                          ? c->params.credit_bytes
                          : tly_plan_sum_credit(e->sharing, e->far, e->part_bytes, e->part_bytes);
    e->incarnation = calloc(r->service_count, sizeof *e->incarnation);
    e->left = calloc(r->service_count, sizeof *e->left);
    e->weight = calloc(r->service_count, sizeof *e->weight);
    e->machine = calloc(r->service_count, sizeof *e->machine);
    e->listed = calloc(r->service_count, sizeof *e->listed);
    tly_list_init(&e->node);
    if (!e->incarnation || !e->left || !e->weight || !e->machine || !e->listed) {
        tly_epoch_unref(e);
        return -ENOMEM;
    }
    tly_roster_machines(r, e->machine);
    for (uint32_t i = 0; i < r->service_count; i++) {
        bool gone = r->services[i].state == TLY_SERVICE_GONE;
        e->incarnation[i] = gone ? 0 : r->services[i].incarnation;
        e->weight[i] = e->listed[i] = r->services[i].weight;
    }
    tly_list_append(&c->epochs.all, &e->node);
    struct tly_epoch *before = c->epoch;
    tly_names_lock(&c->names);
    c->epoch = e;
    tly_names_unlock(&c->names);
    tly_sched_set_credit(&c->sched, e->credit_bytes);
    tly_epoch_unref(before);
    return 0;
}

int tly_epoch_init(tally_comm *c)
{
    return tly_epoch_adopt(c) ? tly_fail(ENOMEM, "out of memory") : 0;
}

struct tly_epoch *tly_epoch_begin(tally_comm *c, uint64_t key, uint32_t round)
{
    struct tly_map *promised = &c->epochs.promised;
    struct tly_epoch *e = promised->count ? tly_map_take(promised, tly_epoch_round(key, round)) : NULL;
    if (e)
        return e; /* with the promise's reference */
    c->epoch->references++;
    return c->epoch;
}

uint16_t tly_epoch_substitute(const tally_comm *c, uint64_t key, uint32_t part)
{
    return (uint16_t)(tly_map_mix(key + part) % (unsigned)c->machines);
}

uint16_t tly_epoch_owner(tally_comm *c, const struct tly_epoch *e, uint64_t key, uint32_t part,
                         uint16_t dealt)
{
    /* A service stays in the epoch until COMMIT removes it.  A coordinator that dies may have told only some ranks of
     * PREPARE. */
    if (c->peers[dealt].incarnation == e->incarnation[dealt])
        return dealt;
    return tly_epoch_substitute(c, key, part);
}

uint32_t tly_epoch_came(const struct tly_epoch *e, uint16_t dealt)
{
    return e->left[dealt] ? e->left[dealt] : e->number;
}

void tly_epoch_lose(tally_comm *c, uint32_t service)
{
    for (struct tly_list *n = c->epochs.all.next; n != &c->epochs.all; n = n->next) {
        struct tly_epoch *e = tly_list_entry(n, struct tly_epoch, node);
        if (service < (uint32_t)e->services && e->incarnation[service] == c->peers[service].incarnation)
            e->left[service] = c->epoch->number;
    }
    c->peers[service].incarnation = 0;
}

bool tly_epoch_shares_as(const struct tly_epoch *a, const struct tly_epoch *b)
{
    for (int i = 0; i < a->services || i < b->services; i++)
        if ((i < a->services ? a->weight[i] : 0) != (i < b->services ? b->weight[i] : 0))
            return false;
    return true;
}

void tly_epoch_decided(tally_comm *c, const struct tally_op *op)
{
    struct tly_epochs *e = &c->epochs;
    e->verdicts[e->verdict_count++ % TLY_VERDICTS] =
        (struct tly_begun){op->key, op->round, op->epoch->number};
}
