/* steps.c - writes a way down, copy by copy, and adds up what each link carries. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "inside/work.h"

enum { MAX_CUTS = 2 * TLY_MAX_GPUS + 2 * TLY_MAX_CARDS + 2 };

/* The members of one group, and how bytes go in it (struct tly_inside_way). */
struct group {
    int count;
    bool direct, ring, nvlink;
    uint8_t order[TLY_MAX_GPUS];
};

static bool steps_on_bus(enum tly_inside_link_type type)
{
    return type <= TLY_LINK_SWITCH_DOWN;
}

/* One step, along a path. */
static void steps_emit(struct tly_inside_work *w, struct tly_inside_step s, const struct tly_inside_path *p)
{
    struct tly_inside *out = w->out;
    double slow = p->across ? w->m->across.bytes : 0;
    s.across = p->across;
    s.links = p->count;
    memcpy(s.link, p->link, (size_t)p->count * sizeof *p->link);
    for (int i = 0; i < p->count; i++) {
        struct tly_inside_link *l = &out->link[p->link[i]];
        double rate = l->rate.bytes;
        l->bytes += s.bytes;
        if (slow > 0 && slow < rate && steps_on_bus(l->type))
            rate = slow;
        if (rate > 0)
            l->seconds += s.bytes / rate;
    }
    if (!w->keep || w->err)
        return;
    if (out->steps == out->room) {
        int room = out->room ? 2 * out->room : 64;
        struct tly_inside_step *more = realloc(out->step, (size_t)room * sizeof *more);
        if (!more) {
            w->err = -ENOMEM;
            return;
        }
        out->step = more;
        out->room = room;
    }
    out->step[out->steps++] = s;
}

static struct tly_inside_step steps_make(int phase, int verb, int from_at, int from, int to_at, int to,
                                         uint64_t begin, uint64_t end)
{
    return (struct tly_inside_step){
        .phase = (uint8_t)phase,
        .verb = (uint8_t)verb,
        .from_at = (uint8_t)from_at,
        .from = (uint8_t)from,
        .to_at = (uint8_t)to_at,
        .to = (uint8_t)to,
        .begin = begin,
        .end = end,
        .bytes = (double)(end - begin)};
}

/* --- shares as bytes ---------------------------------------------------------------------------------------- */

static uint64_t steps_byte(const struct tly_inside_work *w, double share)
{
    uint64_t all = w->end - w->begin, n = (uint64_t)((double)all * share + 0.5);
    return w->begin + (n < all ? n : all);
}

/* Owners by NUMA node, and cards too, so that what a GPU owns goes over a card near it where that is possible. */
static void steps_cut(struct tly_inside_work *w)
{
    const struct tly_machine *m = w->m;
    double done[TLY_MAX_GPUS] = {0}, all = 0, gone = 0;
    for (int node = 0; node < m->nodes; node++)
        for (int g = 0; g < m->gpus; g++)
            if (m->gpu[g].node == node) {
                double *at = &done[w->way->group[g]];
                w->low[g] = steps_byte(w, *at);
                w->high[g] = steps_byte(w, *at += w->way->share[g]);
                if (w->way->share[g] > 0 && *at > 1 - 1e-9)
                    w->high[g] = w->end;
            }
    double width[TLY_MAX_CARDS];
    for (int c = 0; c < m->cards; c++) {
        const struct tly_card *card = &m->card[c];
        double rate = card->rate.bytes > 0 ? card->rate.bytes : card->link.bytes;
        width[c] = card->idle ? 0 : card->link.bytes > 0 ? fmin(rate, card->link.bytes) : rate > 0 ? rate : 1;
        all += width[c];
    }
    for (int node = 0; node < m->nodes && all > 0; node++)
        for (int c = 0; c < m->cards; c++)
            if (m->card[c].node == node) {
                w->out_low[c] = steps_byte(w, gone / all);
                gone += width[c];
                w->out_high[c] = width[c] <= 0 ? w->out_low[c]
                                 : gone >= all ? w->end
                                               : steps_byte(w, gone / all);
            }
}

/* --- phases 1 and 6: within a group ------------------------------------------------------------------------- */

static void steps_gather_group(const struct tly_inside_work *w, int group, struct group *g)
{
    *g = (struct group){.direct = w->way->direct,
                        .ring = w->way->ring[group],
                        .nvlink = w->way->base == TLY_GROUP_NVLINK};
    for (int i = 0; i < w->m->gpus; i++)
        if (w->way->group[w->way->order[i]] == group)
            g->order[g->count++] = w->way->order[i];
}

/* From parents towards the owner: hop[i] is sent on after all that came to it, so the last ones are the owner's. */
struct hop {
    uint8_t from, to;
};

static int steps_ring_hops(const struct group *g, int owner, struct hop *hop)
{
    int at = 0, n = 0;
    while (g->order[at] != owner)
        at++;
    for (int i = 1; i < g->count; i++)
        hop[n++] = (struct hop){g->order[(at + i) % g->count], g->order[(at + i + 1) % g->count]};
    return n;
}

static int steps_direct_hops(const struct group *g, int owner, struct hop *hop)
{
    int n = 0;
    for (int i = 0; i < g->count; i++)
        if (g->order[i] != owner)
            hop[n++] = (struct hop){g->order[i], (uint8_t)owner};
    return n;
}

/* The shortest ways to the owner, the farthest GPU first. */
static int steps_tree_hops(const struct tly_machine *m, const struct group *g, int owner, struct hop *hop)
{
    uint8_t found[TLY_MAX_GPUS] = {(uint8_t)owner};
    bool seen[TLY_MAX_GPUS] = {false};
    struct hop back[TLY_MAX_GPUS];
    int n = 1;
    seen[owner] = true;
    for (int at = 0; at < n; at++)
        for (int i = 0; i < g->count; i++) {
            int next = g->order[i];
            if (seen[next] || !tly_inside_nvlinked(m, found[at], next))
                continue;
            seen[next] = true;
            back[n] = (struct hop){(uint8_t)next, found[at]};
            found[n++] = (uint8_t)next;
        }
    for (int i = 1; i < n; i++)
        hop[i - 1] = back[n - i];
    return n - 1;
}

static void steps_within_groups(struct tly_inside_work *w, bool back)
{
    for (int i = 0; i < w->way->groups; i++) {
        struct group g;
        steps_gather_group(w, i, &g);
        for (int k = 0; k < g.count && g.count > 1; k++) {
            int owner = g.order[k];
            struct hop hop[TLY_MAX_GPUS];
            if (w->low[owner] == w->high[owner])
                continue;
            int n = g.direct ? steps_direct_hops(&g, owner, hop)
                    : g.ring ? steps_ring_hops(&g, owner, hop)
                             : steps_tree_hops(w->m, &g, owner, hop);
            for (int j = 0; j < n; j++) {
                struct hop h = back ? (struct hop){hop[n - 1 - j].to, hop[n - 1 - j].from} : hop[j];
                struct tly_inside_path p = {0};
                /* GPUs that copy directly do so over NVLink where they have it. */
                bool nvlink = g.direct ? tly_inside_nvlinked(w->m, h.from, h.to) : g.nvlink;
                tly_inside_gpu_to_gpu(w, h.from, h.to, nvlink, &p);
                steps_emit(w,
                           steps_make(back ? 6 : 1, back ? TLY_DO_COPY : TLY_DO_ADD, TLY_AT_GPU, h.from,
                                      TLY_AT_GPU, h.to, w->low[owner], w->high[owner]),
                           &p);
            }
        }
    }
}

/* --- phases 2 to 5: the processors' memory and the network --------------------------------------------------- */

static void steps_with_processor(struct tly_inside_work *w, bool back)
{
    for (int g = 0; g < w->m->gpus; g++) {
        int node = w->m->gpu[g].node;
        struct tly_inside_path p = {0};
        if (w->low[g] == w->high[g])
            continue;
        if (back) {
            tly_inside_memory(w, node, &p);
            tly_inside_down_gpu(w, g, &p);
            steps_emit(w, steps_make(5, TLY_DO_COPY, TLY_AT_NODE, node, TLY_AT_GPU, g, w->low[g], w->high[g]),
                       &p);
        } else {
            tly_inside_up_gpu(w, g, &p);
            tly_inside_memory(w, node, &p);
            steps_emit(w, steps_make(2, TLY_DO_COPY, TLY_AT_GPU, g, TLY_AT_SLOT, g, w->low[g], w->high[g]),
                       &p);
        }
    }
}

static int steps_compare(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Where owners or cards change, in order; returns how many. */
static int steps_all_cuts(const struct tly_inside_work *w, uint64_t *cuts)
{
    int n = 0, kept = 0;
    cuts[n++] = w->begin;
    cuts[n++] = w->end;
    for (int g = 0; g < w->m->gpus; g++) {
        cuts[n++] = w->low[g];
        cuts[n++] = w->high[g];
    }
    for (int c = 0; c < w->m->cards && w->job.traffic > 0; c++) {
        cuts[n++] = w->out_low[c];
        cuts[n++] = w->out_high[c];
    }
    qsort(cuts, (size_t)n, sizeof *cuts, steps_compare);
    for (int i = 0; i < n; i++)
        if (!kept || cuts[i] != cuts[kept - 1])
            cuts[kept++] = cuts[i];
    return kept;
}

static bool steps_owns(const struct tly_inside_work *w, int gpu, uint64_t begin, uint64_t end)
{
    return w->low[gpu] <= begin && w->high[gpu] >= end && begin < end;
}

/* Owners of these bytes at a node. */
static int steps_owners_at(const struct tly_inside_work *w, int node, uint64_t begin, uint64_t end)
{
    int n = 0;
    for (int g = 0; g < w->m->gpus; g++)
        n += w->m->gpu[g].node == node && steps_owns(w, g, begin, end);
    return n;
}

/* The node at which these bytes come together: that of their card, else one that most owners are on. */
static int steps_home_of(const struct tly_inside_work *w, uint64_t begin, uint64_t end)
{
    int best = 0, most = -1;
    for (int c = 0; c < w->m->cards && w->job.traffic > 0; c++)
        if (w->out_low[c] <= begin && w->out_high[c] >= end)
            return w->m->card[c].node;
    for (int node = 0; node < w->m->nodes; node++) {
        int n = steps_owners_at(w, node, begin, end);
        if (n > most) {
            most = n;
            best = node;
        }
    }
    return best;
}

/* At one node: the sum of what its owners sent. */
static void steps_add_at(struct tly_inside_work *w, int node, int owners, uint64_t begin, uint64_t end)
{
    bool first = true;
    for (int g = 0; g < w->m->gpus; g++) {
        struct tly_inside_path p = {0};
        if (w->m->gpu[g].node != node || !steps_owns(w, g, begin, end))
            continue;
        if (owners > 1) /* all are read, the sum is written once; of a single one nothing moves */
            tly_inside_memory(w, node, &p);
        if (owners > 1 && first)
            tly_inside_memory(w, node, &p);
        steps_emit(w,
                   steps_make(3, first ? TLY_DO_COPY : TLY_DO_ADD, TLY_AT_SLOT, g, TLY_AT_NODE, node, begin,
                              end),
                   &p);
        first = false;
    }
}

static void steps_bring_together(struct tly_inside_work *w, uint64_t begin, uint64_t end)
{
    int home = steps_home_of(w, begin, end);
    int here = steps_owners_at(w, home, begin, end);
    steps_add_at(w, home, here, begin, end);
    for (int node = 0; node < w->m->nodes; node++) {
        struct tly_inside_path p = {0};
        int owners = node == home ? 0 : steps_owners_at(w, node, begin, end);
        if (!owners)
            continue;
        steps_add_at(w, node, owners, begin, end);
        tly_inside_memory(w, node, &p);
        tly_inside_between(w, node, home, &p);
        tly_inside_memory(w, home, &p);
        if (here)
            tly_inside_memory(w, home, &p);
        steps_emit(w,
                   steps_make(3, here ? TLY_DO_ADD : TLY_DO_COPY, TLY_AT_NODE, node, TLY_AT_NODE, home, begin,
                              end),
                   &p);
        here += owners;
    }
}

static void steps_exchange(struct tly_inside_work *w)
{
    for (int c = 0; c < w->m->cards; c++) {
        int node = w->m->card[c].node;
        struct tly_inside_path p = {0};
        if (w->out_low[c] == w->out_high[c])
            continue;
        tly_inside_memory(w, node, &p);
        tly_inside_out_card(w, c, &p);
        tly_inside_memory(w, node, &p);
        struct tly_inside_step s =
            steps_make(4, TLY_DO_EXCHANGE, TLY_AT_NODE, node, TLY_AT_NODE, c, w->out_low[c], w->out_high[c]);
        s.bytes *= w->job.traffic;
        steps_emit(w, s, &p);
    }
}

static void steps_spread(struct tly_inside_work *w, uint64_t begin, uint64_t end)
{
    int home = steps_home_of(w, begin, end);
    for (int node = 0; node < w->m->nodes; node++) {
        struct tly_inside_path p = {0};
        if (node == home || !steps_owners_at(w, node, begin, end))
            continue;
        tly_inside_memory(w, home, &p);
        tly_inside_between(w, home, node, &p);
        tly_inside_memory(w, node, &p);
        steps_emit(w, steps_make(5, TLY_DO_COPY, TLY_AT_NODE, home, TLY_AT_NODE, node, begin, end), &p);
    }
}

void tly_inside_write(struct tly_inside_work *w, const struct tly_inside_way *way, uint64_t begin,
                      uint64_t end)
{
    uint64_t cuts[MAX_CUTS];
    if (begin == end || !w->m->gpus)
        return;
    w->way = way;
    w->begin = begin;
    w->end = end;
    steps_cut(w);
    steps_within_groups(w, false);
    if (way->groups > 1 || w->job.traffic > 0) {
        int n = steps_all_cuts(w, cuts);
        steps_with_processor(w, false);
        for (int i = 0; i + 1 < n; i++)
            steps_bring_together(w, cuts[i], cuts[i + 1]);
        if (w->job.traffic > 0)
            steps_exchange(w);
        for (int i = 0; i + 1 < n; i++)
            steps_spread(w, cuts[i], cuts[i + 1]);
        steps_with_processor(w, true);
    }
    steps_within_groups(w, true);
}
