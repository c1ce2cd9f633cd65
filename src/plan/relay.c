/* relay.c - who relays or sums the parts of an all-gather, a broadcast and a reduce: exact for cards that differ.  bound.c has
 * the least times with one copy a machine.
 *
 * Structure: each service has a load on its card that grows with its share x: base + slope x bytes.  At a level T a card
 * of bandwidth b therefore takes the share (T b - base) / slope.  relay_fill() finds the lowest level at which these shares add
 * up to what is to be moved.
 *
 * A machine gets r copies of each byte, R in all: one for each rank, or one where a rank carries for its whole machine.
 *
 * An all-gather or broadcast: the owner of a byte sends it out once, to the service that relays it or, if that is its own, to
 * one of the others.  The service of a machine with r copies sends each byte that it relays R - r - 1 times more.  With one
 * copy a machine nothing that a card receives depends on who relays.  So spare machines cannot help: they would send R - 1
 * copies, and no worker's card would carry less.
 *
 * A reduce: the service of a machine with r inputs receives each byte that it sums R - r times, and every input but those of
 * the root's machine goes out, or the sum does.  The root's machine receives each sum of another service once. */
#include "plan/relay.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define WHOLE (1 << 24) /* shares as integers, as in split.c */

struct relay_card {
    double bandwidth;
    double base, slope; /* bytes of the card: base + slope x; no share where slope is 0 */
    double limit;       /* bytes of share for each unit of the level that the service can add; INFINITY */
    double share;
};

static double relay_all_ranks(int count, const struct tly_plan_machine *m)
{
    double ranks = 0;
    for (int i = 0; i < count; i++)
        ranks += m[i].ranks;
    return ranks;
}

double tly_relay_bandwidth(int count, const struct tly_plan_machine *m, int i)
{
    double b = INFINITY, slowest = INFINITY;
    int sharing = 0;
    for (int j = 0; j < count; j++) {
        double known = m[j].bandwidth > 0 ? m[j].bandwidth : INFINITY;
        slowest = fmin(slowest, known);
        if (m[j].card == m[i].card) {
            b = fmin(b, known);
            sharing += m[j].ranks > 0 || j == i;
        }
    }
    b = isinf(b) ? slowest : b;
    return (isinf(b) ? 1 : b) / sharing;
}

static void relay_make_cards(int count, const struct tly_plan_machine *m, struct relay_card *card)
{
    for (int i = 0; i < count; i++)
        card[i] = (struct relay_card){.bandwidth = tly_relay_bandwidth(count, m, i), .limit = INFINITY};
}

/* Share of a card per unit of the level, once the level has passed its base. */
static double relay_speed(const struct relay_card *c)
{
    return c->slope > 0 ? fmin(c->bandwidth / c->slope, c->limit) : 0;
}

/* Shares that add up to `total` at the lowest level.  Cards whose base is above the level drop out, which lowers it, so
 * none of them comes back. */
static void relay_fill(int count, struct relay_card *card, double total)
{
    for (int i = 0; i < count; i++)
        card[i].share = relay_speed(&card[i]) > 0;
    for (bool again = true; again;) {
        double per_level = 0, level = total;
        again = false;
        for (int i = 0; i < count; i++)
            if (card[i].share > 0) {
                per_level += relay_speed(&card[i]);
                level += relay_speed(&card[i]) * card[i].base / card[i].bandwidth;
            }
        level /= per_level;
        for (int i = 0; i < count; i++)
            if (card[i].share > 0 && level <= card[i].base / card[i].bandwidth) {
                card[i].share = 0;
                again = true;
            }
        for (int i = 0; i < count && !again; i++)
            if (card[i].share > 0)
                card[i].share = relay_speed(&card[i]) * (level - card[i].base / card[i].bandwidth);
    }
}

/* Shares of 1 as weights: 0 and 1 where all that have any have the same. */
static void relay_make_weights(int count, const struct relay_card *card, uint32_t *weight)
{
    double most = 0, least = INFINITY;
    for (int i = 0; i < count; i++) {
        weight[i] = (uint32_t)(card[i].share * WHOLE + 0.5);
        if (weight[i]) {
            most = fmax(most, card[i].share);
            least = fmin(least, card[i].share);
        }
    }
    for (int i = 0; i < count && most * (1 - 1e-9) <= least; i++)
        weight[i] = weight[i] > 0;
}

static int relay_only(int count, int i, uint32_t *weight)
{
    memset(weight, 0, (size_t)count * sizeof *weight);
    weight[i] = 1;
    return 0;
}

int tly_plan_broadcast(int count, const struct tly_plan_machine *m, int root, uint32_t *weight)
{
    double ranks = relay_all_ranks(count, m);
    int others = 0, last = root;
    for (int i = 0; i < count; i++)
        if (m[i].ranks && i != root) {
            others++;
            last = i;
        }
    if (others < 2)
        return relay_only(count, last, weight);
    struct relay_card *card = malloc((size_t)count * sizeof *card);
    if (!card)
        return -ENOMEM;
    relay_make_cards(count, m, card);
    for (int i = 0; i < count; i++)
        if (m[i].ranks && i != root)
            card[i].slope = ranks - m[i].ranks - 1;
    relay_fill(count, card, 1);
    relay_make_weights(count, card, weight);
    free(card);
    return 0;
}

int tly_plan_reduce(int count, const struct tly_plan_machine *m, int root, const uint32_t *spare,
                    uint32_t *weight)
{
    double ranks = relay_all_ranks(count, m);
    if (ranks - m[root].ranks < 2)
        return relay_only(count, root, weight);
    struct relay_card *card = malloc((size_t)count * sizeof *card);
    if (!card)
        return -ENOMEM;
    relay_make_cards(count, m, card);
    for (int i = 0; i < count; i++) {
        if (!m[i].ranks && !spare[i])
            continue;
        card[i].base = i == root;
        card[i].slope = ranks - m[i].ranks - (i == root);
        if (m[i].sum_rate > 0)
            card[i].limit = m[i].sum_rate / ranks;
    }
    relay_fill(count, card, 1);
    relay_make_weights(count, card, weight);
    free(card);
    return 0;
}

/* --- all-gather ----------------------------------------------------------------------------------- */

/* How much each service relays of all; pieces of machines alike go through their own. */
static void relay_share_out(int count, const struct tly_plan_machine *m, const uint64_t *bytes,
                            struct relay_card *card, uint64_t *share)
{
    double ranks = relay_all_ranks(count, m);
    bool alone = false;
    uint64_t all = 0, dealt = 0;
    int most = 0;
    relay_make_cards(count, m, card);
    for (int i = 0; i < count; i++) {
        all += bytes[i];
        card[i].base = (double)bytes[i];
        card[i].slope = m[i].ranks ? ranks - m[i].ranks - 1 : 0;
        alone |= m[i].ranks &&
                 card[i].slope <= 0; /* two ranks, or a machine with all but one: nothing to spread */
    }
    if (!alone && all)
        relay_fill(count, card, (double)all);
    for (int i = 0; i < count; i++) {
        bool own = alone || !all || fabs(card[i].share - (double)bytes[i]) < 0.5;
        share[i] = own ? bytes[i] : (uint64_t)card[i].share;
        most = share[i] > share[most] ? i : most;
        dealt += share[i];
    }
    share[most] += all - dealt; /* what rounding has left, or has taken too much */
}

int tly_plan_all_gather(int count, const struct tly_plan_machine *m, const uint64_t *bytes, uint64_t *share)
{
    struct relay_card *card = malloc((size_t)count * sizeof *card);
    if (!card)
        return -ENOMEM;
    relay_share_out(count, m, bytes, card, share);
    free(card);
    return 0;
}

int tly_relay_init(struct tly_relay *r, int count, const struct tly_plan_machine *m, const uint64_t *bytes)
{
    uint32_t *weight = calloc((size_t)count, sizeof *weight);
    uint64_t *share = calloc((size_t)count, sizeof *share), most = 0;
    bool any = false;
    int err = weight && share ? tly_plan_all_gather(count, m, bytes, share) : -ENOMEM;
    for (int i = 0; i < count && !err; i++) {
        r->own[i] = share[i] < bytes[i] ? share[i] : bytes[i];
        r->bytes[i] = bytes[i];
        r->dealt[i] = r->kept[i] = 0;
        share[i] -= r->own[i];
        most = share[i] > most ? share[i] : most;
    }
    for (int i = 0; i < count && !err; i++) { /* what others relay, in 32 bits */
        weight[i] = most ? (uint32_t)((unsigned __int128)share[i] * UINT32_MAX / most) : 0;
        any |= weight[i] > 0;
    }
    r->spreads = any;
    if (any)
        tly_dealer_init(&r->others, count, count, weight);
    free(weight);
    free(share);
    return err;
}

int tly_relay_next(struct tly_relay *r, int from, uint32_t bytes)
{
    r->dealt[from] += bytes;
    /* Its own service has so much of what has been dealt as it is to have of all, to half a part. */
    unsigned __int128 due = (unsigned __int128)r->dealt[from] * r->own[from];
    unsigned __int128 with = (unsigned __int128)(r->kept[from] + bytes / 2) * r->bytes[from];
    if (!r->spreads || (r->own[from] && with <= due)) {
        r->kept[from] += bytes;
        return from;
    }
    return tly_dealer_next(&r->others, bytes);
}
