/* graph.c - the links of a machine, and the ways that bytes take over them. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "inside/work.h"

/* --- is it a machine ---------------------------------------------------------------------------------------- */

static bool graph_good_rate(struct tly_rate r)
{
    return isfinite(r.bytes) && r.bytes >= 0;
}

static bool graph_good_place(const struct tly_machine *m, int parent, int node)
{
    return parent >= -1 && parent < m->switches && node >= 0 && node < m->nodes;
}

static int graph_sound_tree(const struct tly_machine *m)
{
    for (int i = 0; i < m->switches; i++)
        if (!graph_good_place(m, m->sw[i].parent, m->sw[i].node) || !graph_good_rate(m->sw[i].up))
            return -EINVAL;
    for (int i = 0; i < m->switches; i++) {
        int deep = 1, at = m->sw[i].parent;
        for (; at >= 0 && deep <= m->switches; at = m->sw[at].parent, deep++)
            if (m->sw[at].node != m->sw[i].node)
                return -EINVAL;
        if (at >= 0) /* around in a circle */
            return -EINVAL;
        if (deep > TLY_INSIDE_DEEPEST)
            return -E2BIG;
    }
    return 0;
}

int tly_inside_sound(const struct tly_machine *m)
{
    bool counts =
        m->nodes >= 1 && m->nodes <= TLY_MAX_NODES && m->switches >= 0 && m->switches <= TLY_MAX_SWITCHES &&
        m->gpus >= 0 && m->gpus <= TLY_MAX_GPUS && m->cards >= 0 && m->cards <= TLY_MAX_CARDS;
    if (!counts || !graph_good_rate(m->socket) || !graph_good_rate(m->across))
        return -EINVAL;
    for (int i = 0; i < m->gpus; i++) {
        const struct tly_gpu *g = &m->gpu[i];
        if (!graph_good_place(m, g->parent, g->node) || !graph_good_rate(g->link) ||
            !graph_good_rate(g->nvswitch))
            return -EINVAL;
        if (g->parent >= 0 && m->sw[g->parent].node != g->node)
            return -EINVAL;
        for (int j = 0; j < m->gpus; j++)
            if (!isfinite(m->nvlink[i][j]) || m->nvlink[i][j] < 0 || (i == j && m->nvlink[i][j] > 0))
                return -EINVAL;
    }
    for (int i = 0; i < m->cards; i++) {
        const struct tly_card *c = &m->card[i];
        if (!graph_good_place(m, c->parent, c->node) || !graph_good_rate(c->link) ||
            !graph_good_rate(c->rate) || (c->parent >= 0 && m->sw[c->parent].node != c->node))
            return -EINVAL;
    }
    for (int i = 0; i < m->nodes; i++)
        if (!graph_good_rate(m->node[i].bandwidth))
            return -EINVAL;
    return graph_sound_tree(m);
}

/* --- the table of links ------------------------------------------------------------------------------------- */

static void graph_add(struct tly_inside *out, enum tly_inside_link_type type, int a, int b,
                      struct tly_rate rate)
{
    out->link[out->links++] = (struct tly_inside_link){.type = type, .a = a, .b = b, .rate = rate};
}

static int graph_count_nvlinks(const struct tly_machine *m)
{
    int n = 0;
    for (int i = 0; i < m->gpus; i++)
        for (int j = 0; j < m->gpus; j++)
            n += m->nvlink[i][j] > 0;
    return n;
}

int tly_inside_links(struct tly_inside_work *w)
{
    const struct tly_machine *m = w->m;
    struct tly_inside *out = w->out;
    int room = 2 * m->gpus + 2 * m->switches + 4 * m->cards + m->nodes * m->nodes + m->nodes + 2 * m->gpus +
               graph_count_nvlinks(m);
    out->links = 0;
    out->link = calloc((size_t)room, sizeof *out->link);
    if (!out->link)
        return -ENOMEM;
    for (int i = 0; i < m->gpus; i++) {
        graph_add(out, TLY_LINK_GPU_UP, i, 0, m->gpu[i].link);
        graph_add(out, TLY_LINK_GPU_DOWN, i, 0, m->gpu[i].link);
    }
    w->switch_at = out->links;
    for (int i = 0; i < m->switches; i++) {
        graph_add(out, TLY_LINK_SWITCH_UP, i, 0, m->sw[i].up);
        graph_add(out, TLY_LINK_SWITCH_DOWN, i, 0, m->sw[i].up);
    }
    w->card_at = out->links;
    for (int i = 0; i < m->cards; i++) {
        graph_add(out, TLY_LINK_CARD_UP, i, 0, m->card[i].link);
        graph_add(out, TLY_LINK_CARD_DOWN, i, 0, m->card[i].link);
        graph_add(out, TLY_LINK_NET_OUT, i, 0, m->card[i].rate);
        graph_add(out, TLY_LINK_NET_IN, i, 0, m->card[i].rate);
    }
    w->between_at = out->links;
    for (int i = 0; i < m->nodes; i++)
        for (int j = 0; j < m->nodes; j++)
            graph_add(out, TLY_LINK_BETWEEN, i, j, m->socket);
    w->memory_at = out->links;
    for (int i = 0; i < m->nodes; i++)
        graph_add(out, TLY_LINK_MEMORY, i, 0, m->node[i].bandwidth);
    w->nvswitch_at = out->links;
    for (int i = 0; i < m->gpus; i++) {
        graph_add(out, TLY_LINK_NVSWITCH_TO, i, 0, m->gpu[i].nvswitch);
        graph_add(out, TLY_LINK_NVSWITCH_OF, i, 0, m->gpu[i].nvswitch);
    }
    for (int i = 0; i < m->gpus; i++)
        for (int j = 0; j < m->gpus; j++)
            if (m->nvlink[i][j] > 0) {
                w->nvlink[i][j] = (uint16_t)out->links;
                graph_add(out, TLY_LINK_NVLINK, i, j, (struct tly_rate){m->nvlink[i][j], m->nvlink_source});
            }
    return 0;
}

/* --- paths -------------------------------------------------------------------------------------------------- */

static void graph_put(struct tly_inside_path *p, int link)
{
    p->link[p->count++] = (uint16_t)link;
}

int tly_inside_top(const struct tly_machine *m, int parent)
{
    while (parent >= 0 && m->sw[parent].parent >= 0)
        parent = m->sw[parent].parent;
    return parent;
}

/* From switch `s` up to below `stop`. */
static void graph_up(const struct tly_inside_work *w, int s, int stop, struct tly_inside_path *p)
{
    for (; s != stop; s = w->m->sw[s].parent)
        graph_put(p, w->switch_at + 2 * s);
}

static void graph_down(const struct tly_inside_work *w, int s, int stop, struct tly_inside_path *p)
{
    if (s == stop)
        return;
    graph_down(w, w->m->sw[s].parent, stop, p);
    graph_put(p, w->switch_at + 2 * s + 1);
}

void tly_inside_up_gpu(const struct tly_inside_work *w, int gpu, struct tly_inside_path *p)
{
    graph_put(p, 2 * gpu);
    graph_up(w, w->m->gpu[gpu].parent, -1, p);
}

void tly_inside_down_gpu(const struct tly_inside_work *w, int gpu, struct tly_inside_path *p)
{
    graph_down(w, w->m->gpu[gpu].parent, -1, p);
    graph_put(p, 2 * gpu + 1);
}

void tly_inside_out_card(const struct tly_inside_work *w, int card, struct tly_inside_path *p)
{
    int at = w->card_at + 4 * card;
    graph_down(w, w->m->card[card].parent, -1, p);
    graph_put(p, at + 1);
    graph_put(p, at + 2);
    graph_put(p, at + 3);
    graph_put(p, at);
    graph_up(w, w->m->card[card].parent, -1, p);
}

void tly_inside_memory(const struct tly_inside_work *w, int node, struct tly_inside_path *p)
{
    graph_put(p, w->memory_at + node);
}

void tly_inside_between(const struct tly_inside_work *w, int from, int to, struct tly_inside_path *p)
{
    graph_put(p, w->between_at + from * w->m->nodes + to);
}

/* The lowest switch above both; -1: none. */
static int graph_meet(const struct tly_machine *m, int a, int b)
{
    for (; a >= 0; a = m->sw[a].parent)
        for (int at = b; at >= 0; at = m->sw[at].parent)
            if (at == a)
                return a;
    return -1;
}

bool tly_inside_nvlinked(const struct tly_machine *m, int a, int b)
{
    return m->nvlink[a][b] > 0 || (m->gpu[a].nvswitch.bytes > 0 && m->gpu[b].nvswitch.bytes > 0);
}

bool tly_inside_gpu_to_gpu(const struct tly_inside_work *w, int from, int to, bool nvlink,
                           struct tly_inside_path *p)
{
    const struct tly_machine *m = w->m;
    const struct tly_gpu *a = &m->gpu[from], *b = &m->gpu[to];
    if (nvlink && m->nvlink[from][to] > 0) {
        graph_put(p, w->nvlink[from][to]);
        return true;
    }
    if (nvlink) {
        graph_put(p, w->nvswitch_at + 2 * from);
        graph_put(p, w->nvswitch_at + 2 * to + 1);
        return tly_inside_nvlinked(m, from, to);
    }
    int top = graph_meet(m, a->parent, b->parent);
    graph_put(p, 2 * from);
    graph_up(w, a->parent, top, p);
    if (top < 0 && a->node != b->node)
        tly_inside_between(w, a->node, b->node, p);
    graph_down(w, b->parent, top, p);
    graph_put(p, 2 * to + 1);
    p->across = top < 0;
    return true;
}
