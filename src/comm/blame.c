/* blame.c - what rank 0 makes of the services' findings of who keeps the others waiting.
 *
 * Each service judges for itself (src/sum/straggler.c) and says so at the end of each window of steps in which it found
 * somebody.  In what order a rank serves its connections makes a difference at one of them, and one may take what a slow
 * network delays for late pushes; so what most of them say is logged.  Their windows end within a step of each other: the
 * first word waits for the others for a little longer than that.
 *
 * Where no cause has enough of them, the one that most name is logged with the number of services that name it: `tally
 * status` shows it as well, and the log must not know less. */
#include <stdio.h>

#include "base/clock.h"
#include "base/log.h"
#include "comm/internal.h"

enum { REPEAT_S = 60, MOST_REPEAT_S = 1 << 20, LEAST_HOLD_MS = 100, MOST_HOLD_MS = 600000 };

/* Words about a rank that belong together: none is older than half a window was at the first. */
struct count {
    int network, computes, judges;
};

static bool is_fresh(const tally_comm *c, const struct word *w)
{
    return w->window > 0 && w->at >= c->blame.since - w->window / 2;
}

static struct count count(const tally_comm *c, uint32_t rank, int64_t window)
{
    struct count n = {0};
    for (int i = 0; i < c->services; i++) {
        const struct peer *p = &c->peers[i];
        bool says = is_fresh(c, &p->word);
        /* Small tensors all have their one part at home: other services see no step. */
        bool watches = c->weight[i] > 0 && p->watched_at && p->watched_at >= c->blame.since - window;
        n.judges += says || watches;
        if (says && p->word.rank == rank)
            *(p->word.network ? &n.network : &n.computes) += 1;
    }
    return n;
}

/* judges: how many services there are to say so, if `votes`, fewer than enough, do; else 0. */
static void name(tally_comm *c, uint32_t rank, bool network, int votes, int judges)
{
    struct blame *b = &c->blame;
    bool again = c->named_at && rank == c->straggler && network == b->network;
    const char *text = "";
    char share[64] = "";
    for (int i = 0; i < c->services; i++) {
        const struct word *w = &c->peers[i].word;
        if (w->rank == rank && w->network == network && is_fresh(c, w))
            text = w->text;
    }
    b->since = 0;
    if (again && c->loop.awake - c->named_at < b->repeat_s * TLY_SEC)
        return;
    if (!again && judges && c->named_at && c->loop.awake - c->named_at < REPEAT_S * TLY_SEC)
        return; /* a few see another cause than was named just now: they may take turns */
    if (judges)
        snprintf(share, sizeof share, " (%d of %d services say so)", votes, judges);
    b->repeat_s = !again ? REPEAT_S : b->repeat_s < MOST_REPEAT_S ? 2 * b->repeat_s : b->repeat_s;
    c->straggler = rank;
    b->network = network;
    c->named_at = c->loop.awake;
    tly_warn("comm", "%s%s", text, share);
}

/* Nothing that is still to come would change it. */
static bool is_clear(const struct count *n)
{
    return 2 * n->network >= n->judges || 2 * n->computes > n->judges;
}

void tly_blame_heard(struct peer *peer, uint32_t rank, bool network, int64_t window, const char *text)
{
    tally_comm *c = peer->comm;
    struct blame *b = &c->blame;
    peer->word = (struct word){.rank = rank, .network = network, .at = c->loop.awake, .window = window};
    snprintf(peer->word.text, sizeof peer->word.text, "%s", text);
    if (!b->since) {
        int64_t least = LEAST_HOLD_MS * TLY_MS, most = MOST_HOLD_MS * TLY_MS;
        int64_t hold = window / 20; /* a step and a half */
        b->since = c->loop.awake;
        b->until = c->loop.awake + (hold < least ? least : hold < most ? hold : most);
    }
    struct count n = count(c, rank, window);
    if (is_clear(&n))
        name(c, rank, 2 * n.network >= n.judges, 0, 0);
}

/* The cause that most name.  A network needs half of those that judge, and would have been clear by now; that a rank
 * computes longer needs only more than those who say that its network is slow. */
void tly_blame_settle(tally_comm *c)
{
    int most = 0, votes = 0, judges = 0;
    uint32_t who = 0;
    bool network = false;
    for (int i = 0; i < c->services && c->blame.since; i++) {
        const struct word *w = &c->peers[i].word;
        if (!is_fresh(c, w))
            continue;
        struct count n = count(c, w->rank, w->window);
        bool enough = n.computes > n.network;
        int here = w->network ? n.network : n.computes;
        /* A cause with enough words goes before one without. */
        int weight = enough ? c->services + n.computes : here;
        if (weight <= most)
            continue;
        most = weight;
        who = w->rank;
        network = !enough && w->network;
        votes = here;
        judges = enough ? 0 : n.judges;
    }
    if (most)
        name(c, who, network, votes, judges);
    c->blame.since = 0;
}

void tly_blame_tick(tally_comm *c)
{
    if (c->blame.since && c->loop.awake >= c->blame.until)
        tly_blame_settle(c);
}
