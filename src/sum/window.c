/* window.c - what a rank may push, and how much the service keeps for its sake.
 *
 * The window is counted in charge bytes over one connection: `pushed` of them have begun to come, `answered` are paid for
 * by results (or were dropped, or not wanted), and up to `granted` the rank may push.  `granted` only grows:
 *
 *   granted = answered + window_bytes, and at least pushed + one part while some round lacks a push of this rank
 *
 * Without the second term two ranks that submit in different orders would wait for each other.
 *
 * A rank's burden outlives its connections.  A round burdens the rank that opened it until all ranks have come; an answer
 * burdens its rank until it is confirmed.  Past most_owed the window stays shut; past most_opened the rank may open no
 * round. */
#include "sum/internal.h"
#include "sum/members.h"
#include "sum/round.h"
#include "sum/session.h"
#include "sum/slot.h"

bool tly_window_crowded(const struct tly_session *p)
{
    return p->job->burden[p->rank].opened >= p->job->most_opened;
}

void tly_window_lift(struct tly_job *job, struct tly_round *r)
{
    if (r->opener != TLY_NO_PEER)
        job->burden[r->opener].opened--;
    r->opener = TLY_NO_PEER;
}

void tly_window_arrived(struct tly_job *job, struct tly_round *r)
{
    r->arrived++;
    /* A round that ranks only speak of takes no window: it stays a burden for as long as it is here. */
    if (tly_round_all_arrived(r) && !r->said)
        tly_window_lift(job, r);
}

void tly_window_owe(struct tly_job *job, struct tly_round *r, uint32_t rank)
{
    struct tly_answer *a = &r->answers[rank];
    if (r->slots[rank].state == SLOT_ABSENT || a->received || a->owed)
        return;
    a->owed = true;
    job->burden[rank].owed++;
}

void tly_window_confirm(struct tly_job *job, struct tly_round *r, uint32_t rank)
{
    if (!r->answers[rank].owed)
        return;
    r->answers[rank].owed = false;
    if (job->burden[rank].owed-- == job->most_owed + 1 && job->by_rank[rank])
        tly_window_grant(job->by_rank[rank]);
}

void tly_window_grant(struct tly_session *p)
{
    struct tly_job *job = p->job;
    if (job->burden[p->rank].owed > job->most_owed)
        return; /* until it confirms answers, which it can do whatever the others do */
    uint64_t granted = p->answered + job->window_bytes;
    if (p->lacking && granted < p->pushed + job->part_most)
        granted = p->pushed + job->part_most;
    if (granted > p->granted) {
        /* A rank whose next part does not fit into the window may wait for that, however little is granted. */
        bool awaited = p->granted < p->pushed + job->part_most;
        uint64_t more = granted - p->granted;
        p->granted = granted;
        tly_session_counts(p, awaited || more > UINT32_MAX ? UINT32_MAX : (uint32_t)more);
    }
}

void tly_window_grant_others(struct tly_job *job, const struct tly_session *p)
{
    for (uint32_t i = 0; i < job->ranks; i++)
        if (job->by_rank[i] && job->by_rank[i] != p)
            tly_window_grant(job->by_rank[i]);
}

void tly_window_pass(struct tly_session *p, uint32_t length)
{
    p->pushed += tly_charge(length);
    p->answered += tly_charge(length);
    tly_window_grant(p);
}

void tly_window_give_back(struct tly_job *job, uint32_t rank, struct tly_slot *slot)
{
    if (!slot->charge)
        return;
    struct tly_session *p = job->by_rank[rank];
    if (p) {
        p->answered += slot->charge;
        tly_window_grant(p);
    }
    slot->charge = 0;
}

/* The shorter the parts, the less credit ranks have, so news is counted in parts of the usual length. */
void tly_window_accept(struct tly_session *p, uint32_t bytes, uint32_t length)
{
    uint64_t most = p->job->part_bytes, news = length < most / 4 ? 4ull * bytes : bytes * most / length;
    p->accepted += bytes;
    tly_session_counts(p, (uint32_t)news);
}
