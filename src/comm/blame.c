/* blame.c - what rank 0 makes of the services' findings of who keeps the others waiting.
 *
 * Each service judges for itself (src/sum/straggler.c) and says so at the end of each window of steps in which it found
 * somebody.  In what order a rank serves its connections makes a difference at one of them, and one may take what a slow
 * network delays for late pushes; so what most of them say is said.  Their windows end within a step of each other: the
 * first word waits for the others for a little longer than that. */
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

static void name(tally_comm *c, uint32_t rank, bool network)
{
    struct blame *b = &c->blame;
    bool again = c->named_at && rank == c->straggler;
    const char *text = "";
    for (int i = 0; i < c->services; i++) {
        const struct word *w = &c->peers[i].word;
        if (w->rank == rank && w->network == network && is_fresh(c, w))
            text = w->text;
    }
    b->since = 0;
    if (again && c->loop.awake - c->named_at < b->repeat_s * TLY_SEC)
        return;
    b->repeat_s = !again ? REPEAT_S : b->repeat_s < MOST_REPEAT_S ? 2 * b->repeat_s : b->repeat_s;
    c->straggler = rank;
    c->named_at = c->loop.awake;
    tly_warn("comm", "%s", text);
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
        name(c, rank, 2 * n.network >= n.judges);
}

/* Whom most name; of a network only if half of those say it that judge. */
void tly_blame_settle(tally_comm *c)
{
    int most = 0;
    uint32_t who = 0;
    for (int i = 0; i < c->services && c->blame.since; i++) {
        const struct word *w = &c->peers[i].word;
        struct count n = is_fresh(c, w) ? count(c, w->rank, w->window) : (struct count){0};
        if (n.computes > n.network && n.computes > most) {
            most = n.computes;
            who = w->rank;
        }
    }
    if (most)
        name(c, who, false); /* a network would have been clear */
    c->blame.since = 0;
}

void tly_blame_tick(tally_comm *c)
{
    if (c->blame.since && c->loop.awake >= c->blame.until)
        tly_blame_settle(c);
}
