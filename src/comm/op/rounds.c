/* rounds.c - how often this rank had submitted each tensor when it joined (joining.c), listed once and told to services.
 *
 * Every service hears the list once on each connection (JOINED).  In rounds that are not in it the service has zeros for
 * this rank.  After a join the same frame says that the join is past.  Owner: the loop. */
#include <errno.h>
#include <stdlib.h>

#include "base/list.h"
#include "comm/comm.h"
#include "comm/op/joining.h"
#include "comm/path/keep.h"
#include "comm/path/peer.h"
#include "membership/roster.h"
#include "wire/frame.h"
#include "wire/pack.h"

enum { ENTRIES = 80000 }; /* of a tensor, in one frame */

static size_t rounds_count_keeps(tally_comm *c, struct tly_begun *out)
{
    size_t count = 0;
    for (int i = 0; i < c->services; i++) {
        struct tly_list *lists[] = {&c->peers[i].kept, &c->peers[i].doubted, &c->peers[i].decided};
        for (int j = 0; j < 3; j++)
            for (struct tly_list *n = lists[j]->next; n != lists[j]; n = n->next, count++) {
                const struct tly_keep *k = tly_list_entry(n, struct tly_keep, node);
                if (out)
                    out[count] = (struct tly_begun){k->head.key, k->head.round + 1, 0};
            }
    }
    return count;
}

int tly_rounds_list(tally_comm *c)
{
    struct tly_joining *j = &c->joining;
    free(j->rounds);
    j->count = 0;
    j->rounds = malloc((tly_names_count(&c->names) + rounds_count_keeps(c, NULL) + 1) * sizeof *j->rounds);
    if (!j->rounds)
        return -ENOMEM;
    j->count = rounds_count_keeps(c, j->rounds);
    j->count += tly_names_list(&c->names, j->rounds + j->count);
    return 0;
}

void tly_rounds_tell(struct tly_peer *p)
{
    const struct tly_joining *j = &p->comm->joining;
    const uint32_t joins = tly_names_joins(&p->comm->names);
    size_t at = 0;
    bool on = j->op && j->placed;
    if ((!on && !joins) || !p->open)
        return;
    do {
        struct tly_frame f = {.type = TLY_JOINED, .rank = (uint32_t)p->comm->rank};
        struct tly_writer w = {0};
        size_t left = on ? j->count - at : 0;
        uint32_t n = left < ENTRIES ? (uint32_t)left : ENTRIES;
        f.flags = n == left ? TLY_LAST : 0;
        tly_write32(&w, joins);
        tly_write32(&w, on);
        tly_write32(&w, n);
        for (uint32_t i = 0; i < n; i++, at++) {
            tly_write64(&w, j->rounds[at].key);
            tly_write32(&w, j->rounds[at].round);
        }
        if (w.failed)
            tly_comm_fail(p->comm, ENOMEM, "out of memory");
        else
            tly_peer_post(p, &f, w.data, w.len);
        free(w.data);
    } while (on && at < j->count);
}
