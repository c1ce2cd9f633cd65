/* join.c - the coordinator's part of tally_join(): in which order ranks join, and when all have.
 *
 * A rank says JOINED at once, and hears it back when it has its place.  Only then nobody waits for it any more, so who
 * has done something without it comes behind it.  It says so once more when all that it had submitted has ended.  When
 * all ranks have said both, nothing is under way that began before, and JOINED (LAST) tells them so: whatever they
 * submit next is of the time after this join.  The roster has the places, so that another coordinator goes on from
 * there; it knows of the last join, too, for a rank that did not get its word. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/error.h"
#include "membership/internal.h"

static void join_write_joined(struct tly_writer *w, uint32_t joins, uint32_t rank)
{
    tly_write32(w, joins);
    tly_write32(w, rank);
}

/* A rank is still here whose join another one's departure has made impossible. */
static void join_fail(struct tly_coordinator *c, uint32_t left)
{
    struct tly_writer w = {0};
    char sentence[64];
    snprintf(sentence, sizeof sentence, "rank %u has left the job", left);
    join_write_joined(&w, c->roster.joins, left);
    tly_write_text(&w, sentence);
    for (uint32_t i = 0; i < c->size && !w.failed; i++)
        if (c->ranks[i] && c->roster.ranks[i].joined && !c->ranks[i]->stranded) {
            c->ranks[i]->stranded = true;
            tly_coordinator_post(c->ranks[i], TLY_JOINED, TLY_MARK, w.data, w.len);
        }
    free(w.data);
}

void tly_join_look(struct tly_coordinator *c)
{
    bool all = c->size > 0, any = false;
    uint32_t last = 0, left = c->size;
    for (uint32_t i = 0; i < c->size; i++) {
        const struct tly_roster_rank *r = &c->roster.ranks[i];
        any |= r->joined > 0;
        all = all && r->joined && c->ranks[i] && c->ranks[i]->drained;
        last = r->joined > c->roster.ranks[last].joined ? i : last;
        left = r->left && left == c->size ? i : left;
    }
    if (any && left < c->size)
        join_fail(c, left);
    else if (all) {
        struct tly_writer w = {0};
        tly_roster_joined_all(&c->roster, c->roster.joins + 1, last);
        for (uint32_t i = 0; i < c->size; i++)
            c->ranks[i]->drained = false;
        join_write_joined(&w, c->roster.joins, last);
        for (struct tly_list *n = c->members.next; n != &c->members && !w.failed; n = n->next) {
            struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
            if (m->entered)
                tly_coordinator_post(m, TLY_JOINED, TLY_LAST, w.data, w.len);
        }
        if (w.failed)
            tly_coordinator_fail(c, ENOMEM, TLY_COORDINATOR_NO_MEMORY);
        free(w.data);
    }
}

int tly_join_heard(struct tly_coordinator_member *m, struct tly_reader *r, const char **why)
{
    struct tly_coordinator *c = m->c;
    uint32_t joins = tly_read32(r), drained = tly_read32(r), rank = m->info.rank;
    if (r->failed || !m->entered || rank >= c->roster.rank_count || joins > c->roster.joins) {
        *why = "a malformed join";
        return -EPROTO;
    }
    struct tly_writer w = {0};
    if (joins < c->roster.joins) { /* the coordinator that knew it complete has died before it could say so */
        join_write_joined(&w, c->roster.joins, c->roster.last_joined);
        if (!w.failed)
            tly_coordinator_post(m, TLY_JOINED, TLY_LAST, w.data, w.len);
    } else {
        m->drained = drained;
        join_write_joined(&w, joins, rank);
        /* Another coordinator may have to know the order, and would hear it from the others. */
        if (tly_roster_join(&c->roster, rank) && c->roster.standalone && !w.failed)
            tly_coordinator_post_all(c, TLY_JOINED, w.data, w.len);
        else if (!w.failed)
            tly_coordinator_post(m, TLY_JOINED, 0, w.data, w.len);
    }
    free(w.data);
    return 0;
}
