/* ways.c - the small set of ways that are compared: who is in a group, and how much each of it owns. */
#include <string.h>

#include "inside/work.h"

enum { MAX_TRIES = 5000 };

/* --- groups ------------------------------------------------------------------------------------------------- */

static bool ways_linked(const struct tly_machine *m, enum tly_inside_base base, int a, int b)
{
    const struct tly_gpu *x = &m->gpu[a], *y = &m->gpu[b];
    bool peers = (x->peers >> b & 1) && (y->peers >> a & 1);
    switch (base) {
    case TLY_GROUP_NVLINK:
        return tly_inside_nvlinked(m, a, b);
    case TLY_GROUP_SWITCH:
        return peers && x->parent >= 0 && x->parent == y->parent;
    case TLY_GROUP_TOP:
        return peers && x->parent >= 0 && tly_inside_top(m, x->parent) == tly_inside_top(m, y->parent);
    case TLY_GROUP_ALL:
        return peers;
    default:
        return false;
    }
}

/* Does the GPU belong to the group of these?  If that is direct, it reaches them all, else one. */
static bool ways_joins(const struct tly_machine *m, const struct tly_inside_way *way, const uint8_t *found,
                       int n, int gpu)
{
    int linked = 0;
    for (int i = 0; i < n; i++)
        linked += ways_linked(m, way->base, found[i], gpu);
    return linked >= (way->direct ? n : 1);
}

/* Groups are numbered by the first GPU of each. */
static void ways_find_groups(const struct tly_machine *m, struct tly_inside_way *way)
{
    bool seen[TLY_MAX_GPUS] = {false};
    for (int first = 0; first < m->gpus; first++) {
        uint8_t found[TLY_MAX_GPUS] = {(uint8_t)first};
        int n = 1;
        if (seen[first])
            continue;
        seen[first] = true;
        for (int before = 0; before < n;) {
            before = n;
            for (int i = first + 1; i < m->gpus; i++)
                if (!seen[i] && ways_joins(m, way, found, n, i)) {
                    seen[i] = true;
                    found[n++] = (uint8_t)i;
                }
        }
        for (int i = 0; i < n; i++)
            way->group[found[i]] = (uint8_t)way->groups;
        way->groups++;
    }
}

/* Over PCIe each must reach each. */
static bool ways_all_linked(const struct tly_machine *m, const struct tly_inside_way *way)
{
    for (int a = 0; a < m->gpus && way->base != TLY_GROUP_NVLINK; a++)
        for (int b = 0; b < m->gpus; b++)
            if (a != b && way->group[a] == way->group[b] && !ways_linked(m, way->base, a, b))
                return false;
    return true;
}

/* --- the order within a group ------------------------------------------------------------------------------- */

/* A ring by NVLinks, the widest first: tries on behind order[at - 1]. */
static bool ways_close_ring(const struct tly_machine *m, uint8_t *order, int count, int at, int *tries)
{
    if (at == count)
        return tly_inside_nvlinked(m, order[at - 1], order[0]);
    uint8_t rest[TLY_MAX_GPUS];
    int n = count - at, last = order[at - 1];
    memcpy(rest, order + at, (size_t)n);
    for (int i = 1; i < n; i++) /* by width; those of one width stay in their order */
        for (int j = i; j > 0 && m->nvlink[last][rest[j]] > m->nvlink[last][rest[j - 1]]; j--) {
            uint8_t t = rest[j];
            rest[j] = rest[j - 1];
            rest[j - 1] = t;
        }
    for (int i = 0; i<n && * tries> 0; i++) {
        if (!tly_inside_nvlinked(m, last, rest[i]))
            continue;
        --*tries;
        order[at] = rest[i];
        for (int j = 0, k = at + 1; j < n; j++)
            if (j != i)
                order[k++] = rest[j];
        if (ways_close_ring(m, order, count, at + 1, tries))
            return true;
    }
    memcpy(order + at, rest, (size_t)n);
    return false;
}

/* Over PCIe neighbours are those below one switch, so that as little as possible leaves it. */
static bool ways_before(const struct tly_machine *m, int a, int b)
{
    const struct tly_gpu *x = &m->gpu[a], *y = &m->gpu[b];
    int above_x = tly_inside_top(m, x->parent), above_y = tly_inside_top(m, y->parent);
    if (x->node != y->node)
        return x->node < y->node;
    if (above_x != above_y)
        return above_x < above_y;
    return x->parent != y->parent ? x->parent < y->parent : a < b;
}

static void ways_set_order(const struct tly_machine *m, struct tly_inside_way *way)
{
    int at = 0;
    for (int group = 0; group < way->groups; group++) {
        int first = at, tries = MAX_TRIES;
        for (int g = 0; g < m->gpus; g++) {
            if (way->group[g] != group)
                continue;
            int to = at++;
            for (; way->base != TLY_GROUP_NVLINK && to > first && ways_before(m, g, way->order[to - 1]); to--)
                way->order[to] = way->order[to - 1];
            way->order[to] = (uint8_t)g;
        }
        way->ring[group] = way->base != TLY_GROUP_NVLINK || at - first < 3 ||
                           ways_close_ring(m, way->order + first, at - first, 1, &tries);
    }
}

/* --- shares ------------------------------------------------------------------------------------------------- */

bool tly_inside_shares_card(const struct tly_machine *m, int gpu)
{
    int top = tly_inside_top(m, m->gpu[gpu].parent);
    for (int c = 0; c < m->cards && top >= 0; c++)
        if (!m->card[c].idle && tly_inside_top(m, m->card[c].parent) == top)
            return true;
    return false;
}

static bool ways_near_card(const struct tly_machine *m, int gpu)
{
    for (int c = 0; c < m->cards; c++)
        if (!m->card[c].idle && m->card[c].node == m->gpu[gpu].node)
            return true;
    return false;
}

void tly_inside_weigh(const struct tly_machine *m, struct tly_inside_way *way, const double *weight)
{
    double sum[TLY_MAX_GPUS] = {0};
    int count[TLY_MAX_GPUS] = {0};
    for (int g = 0; g < m->gpus; g++) {
        sum[way->group[g]] += weight[g];
        count[way->group[g]]++;
    }
    for (int g = 0; g < m->gpus; g++) {
        int in = way->group[g];
        way->share[g] = sum[in] > 0 ? weight[g] / sum[in] : 1.0 / count[in];
    }
}

/* Without those that share a switch with a card, and of the others with those near one, in each group where any are left. */
static void ways_leave_out(const struct tly_machine *m, struct tly_inside_way *way, bool near)
{
    double weight[TLY_MAX_GPUS] = {0};
    bool any[TLY_MAX_GPUS] = {false};
    for (int g = 0; g < m->gpus; g++)
        weight[g] = !tly_inside_shares_card(m, g);
    for (int g = 0; g < m->gpus; g++)
        any[way->group[g]] |= weight[g] > 0 && ways_near_card(m, g);
    for (int g = 0; g < m->gpus && near; g++)
        if (any[way->group[g]] && !ways_near_card(m, g))
            weight[g] = 0;
    tly_inside_weigh(m, way, weight);
}

bool tly_inside_way(const struct tly_machine *m, enum tly_inside_base base, enum tly_inside_shares shares,
                    bool direct, struct tly_inside_way *way)
{
    double equal[TLY_MAX_GPUS] = {0};
    *way = (struct tly_inside_way){.base = base, .shares = shares, .direct = direct};
    ways_find_groups(m, way);
    ways_set_order(m, way);
    for (int g = 0; g < m->gpus; g++)
        equal[g] = 1;
    tly_inside_weigh(m, way, equal);
    if (shares == TLY_SHARE_NEAR || shares == TLY_SHARE_FAR)
        ways_leave_out(m, way, shares == TLY_SHARE_NEAR);
    return (base == TLY_GROUP_SINGLE || way->groups < m->gpus) && ways_all_linked(m, way);
}
