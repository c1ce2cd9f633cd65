/* check.c - replays the steps of a plan on the machine: does every GPU end with the sum, and do links carry what is said?
 *
 * Takes nothing from what makes plans but the struct: ends of links, routes and sums are worked out here anew. */
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "inside/inside.h"

/* Vertices of the graph, by number. */
enum { GPU = 0, SWITCH = 100, NODE = 300, CARD = 400, NETWORK = 500, NVSWITCH = 501, NOWHERE = -1 };

struct replay {
    const struct tly_machine *m;
    const struct tly_inside *plan;
    double *bytes, *seconds; /* of each link */
    char *why;
    size_t size;
};

static int check_wrong(struct replay *r, const char *format, ...) __attribute__((format(printf, 2, 3)));

static int check_wrong(struct replay *r, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(r->why, r->size, format, args);
    va_end(args);
    return -EINVAL;
}

/* --- the graph ---------------------------------------------------------------------------------------------- */

static int check_above(int parent, int node)
{
    return parent >= 0 ? SWITCH + parent : NODE + node;
}

static void check_ends(const struct tly_machine *m, const struct tly_inside_link *l, int *from, int *to)
{
    int a = l->a, way[2] = {NOWHERE, NOWHERE};
    switch (l->type) {
    case TLY_LINK_GPU_UP:
    case TLY_LINK_GPU_DOWN:
        way[0] = GPU + a;
        way[1] = check_above(m->gpu[a].parent, m->gpu[a].node);
        break;
    case TLY_LINK_SWITCH_UP:
    case TLY_LINK_SWITCH_DOWN:
        way[0] = SWITCH + a;
        way[1] = check_above(m->sw[a].parent, m->sw[a].node);
        break;
    case TLY_LINK_CARD_UP:
    case TLY_LINK_CARD_DOWN:
        way[0] = CARD + a;
        way[1] = check_above(m->card[a].parent, m->card[a].node);
        break;
    case TLY_LINK_NET_OUT:
    case TLY_LINK_NET_IN:
        way[0] = CARD + a;
        way[1] = NETWORK;
        break;
    case TLY_LINK_BETWEEN:
        way[0] = NODE + a;
        way[1] = NODE + l->b;
        break;
    case TLY_LINK_MEMORY:
        way[0] = way[1] = NODE + a;
        break;
    case TLY_LINK_NVLINK:
        way[0] = GPU + a;
        way[1] = GPU + l->b;
        break;
    default:
        way[0] = GPU + a;
        way[1] = NVSWITCH;
        break;
    }
    bool back =
        l->type == TLY_LINK_GPU_DOWN || l->type == TLY_LINK_SWITCH_DOWN || l->type == TLY_LINK_CARD_DOWN ||
        l->type == TLY_LINK_NET_IN || l->type == TLY_LINK_NVSWITCH_OF;
    *from = way[back];
    *to = way[!back];
}

/* What the machine says that a link carries. */
static double check_rate_of(const struct tly_machine *m, const struct tly_inside_link *l)
{
    switch (l->type) {
    case TLY_LINK_GPU_UP:
    case TLY_LINK_GPU_DOWN:
        return m->gpu[l->a].link.bytes;
    case TLY_LINK_SWITCH_UP:
    case TLY_LINK_SWITCH_DOWN:
        return m->sw[l->a].up.bytes;
    case TLY_LINK_CARD_UP:
    case TLY_LINK_CARD_DOWN:
        return m->card[l->a].link.bytes;
    case TLY_LINK_NET_OUT:
    case TLY_LINK_NET_IN:
        return m->card[l->a].rate.bytes;
    case TLY_LINK_BETWEEN:
        return m->socket.bytes;
    case TLY_LINK_MEMORY:
        return m->node[l->a].bandwidth.bytes;
    case TLY_LINK_NVLINK:
        return m->nvlink[l->a][l->b];
    default:
        return m->gpu[l->a].nvswitch.bytes;
    }
}

static int check_place(const struct tly_machine *m, int at, int which)
{
    return at == TLY_AT_GPU ? GPU + which : at == TLY_AT_SLOT ? NODE + m->gpu[which].node : NODE + which;
}

/* --- one step's way ----------------------------------------------------------------------------------------- */

/* Below which switches is a place: they are marked. */
static void check_mark(const struct tly_machine *m, int parent, bool *below)
{
    for (; parent >= 0; parent = m->sw[parent].parent)
        below[parent] = true;
}

/* Do two GPUs have no switch in common? */
static bool check_apart(const struct tly_machine *m, int a, int b)
{
    bool below[TLY_MAX_SWITCHES] = {false};
    check_mark(m, m->gpu[a].parent, below);
    for (int at = m->gpu[b].parent; at >= 0; at = m->sw[at].parent)
        if (below[at])
            return false;
    return true;
}

static int check_walk(struct replay *r, int number, const struct tly_inside_step *s)
{
    const struct tly_machine *m = r->m;
    int at = check_place(m, s->from_at, s->from), to = check_place(m, s->to_at, s->to), card = NOWHERE;
    bool bus = false, out = false, back = false;
    if (s->begin >= s->end || s->end > r->plan->job.bytes)
        return check_wrong(r, "step %d: no bytes, or more than there are", number);
    if (s->verb == TLY_DO_EXCHANGE) {
        card = CARD + s->to;
        to = at;
    }
    double bytes = (double)(s->end - s->begin) * (card == NOWHERE ? 1 : r->plan->job.traffic);
    if (fabs(bytes - s->bytes) > 1e-9 * bytes)
        return check_wrong(r, "step %d: %.0f bytes on each link in place of %.0f", number, s->bytes, bytes);
    for (int i = 0; i < s->links; i++) {
        const struct tly_inside_link *l = &r->plan->link[s->link[i]];
        int from, next;
        if (s->link[i] >= r->plan->links)
            return check_wrong(r, "step %d: there is no link %d", number, s->link[i]);
        check_ends(m, l, &from, &next);
        if (from != at)
            return check_wrong(r, "step %d: link %d begins elsewhere", number, i);
        bus |= l->type == TLY_LINK_GPU_UP;
        out |= l->type == TLY_LINK_NET_OUT && at == card;
        back |= l->type == TLY_LINK_NET_IN && next == card;
        at = next;
    }
    if (at != to)
        return check_wrong(r, "step %d: it does not end where it should", number);
    if (card != NOWHERE && (!out || !back))
        return check_wrong(r, "step %d: it does not go out and back by its card", number);
    bool gpus = s->from_at == TLY_AT_GPU && s->to_at == TLY_AT_GPU;
    bool slow = gpus && bus && check_apart(m, s->from, s->to);
    if (slow != s->across)
        return check_wrong(r, "step %d: whether it leaves its switch is not so", number);
    for (int i = 0; i < s->links; i++) {
        const struct tly_inside_link *l = &r->plan->link[s->link[i]];
        double rate = check_rate_of(m, l);
        bool of_bus = l->type <= TLY_LINK_SWITCH_DOWN;
        if (slow && of_bus && m->across.bytes > 0 && m->across.bytes < rate)
            rate = m->across.bytes;
        r->bytes[s->link[i]] += bytes;
        r->seconds[s->link[i]] += rate > 0 ? bytes / rate : 0;
    }
    return 0;
}

/* --- whose bytes are where ---------------------------------------------------------------------------------- */

struct lies {
    uint64_t whose; /* a bit for each GPU */
    bool whole;     /* exchanged with the network */
};

struct ledger {
    struct lies gpu[TLY_MAX_GPUS], slot[TLY_MAX_GPUS], node[TLY_MAX_NODES];
    int exchanged;
};

static struct lies *check_lies_at(struct ledger *l, int at, int which)
{
    return at == TLY_AT_GPU ? &l->gpu[which] : at == TLY_AT_SLOT ? &l->slot[which] : &l->node[which];
}

static int check_apply(struct replay *r, int number, const struct tly_inside_step *s, struct ledger *l,
                       uint64_t all)
{
    struct lies *from = check_lies_at(l, s->from_at, s->from);
    if (s->verb == TLY_DO_EXCHANGE) {
        if (from->whose != all || from->whole)
            return check_wrong(r, "step %d: what goes out is not the machine's sum", number);
        from->whole = true;
        l->exchanged++;
        return 0;
    }
    struct lies *to = check_lies_at(l, s->to_at, s->to);
    if (!from->whose)
        return check_wrong(r, "step %d: there is nothing to copy", number);
    if (s->verb == TLY_DO_COPY) {
        *to = *from;
        return 0;
    }
    if ((to->whose & from->whose) || to->whole || from->whole)
        return check_wrong(r, "step %d: somebody's bytes are added twice", number);
    to->whose |= from->whose;
    return 0;
}

static int check_account(struct replay *r, uint64_t begin, uint64_t end)
{
    const struct tly_inside *plan = r->plan;
    struct ledger l = {0};
    uint64_t all = r->m->gpus == 64 ? UINT64_MAX : (1ULL << r->m->gpus) - 1;
    bool network = plan->job.traffic > 0 && r->m->gpus > 0;
    for (int g = 0; g < r->m->gpus; g++)
        l.gpu[g].whose = 1ULL << g;
    for (int i = 0; i < plan->steps; i++) {
        const struct tly_inside_step *s = &plan->step[i];
        int err = s->begin <= begin && s->end >= end ? check_apply(r, i, s, &l, all) : 0;
        if (err)
            return err;
    }
    if (l.exchanged != network)
        return check_wrong(r, "bytes from %llu on go %d times over the network", (unsigned long long)begin,
                           l.exchanged);
    for (int g = 0; g < r->m->gpus; g++)
        if (l.gpu[g].whose != all || l.gpu[g].whole != network)
            return check_wrong(r, "GPU %d does not end with the sum of the bytes from %llu on", g,
                               (unsigned long long)begin);
    return 0;
}

static int check_by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Range by range, between all places where a step begins or ends. */
static int check_account_all(struct replay *r)
{
    const struct tly_inside *plan = r->plan;
    size_t n = 0, count = 2 * (size_t)plan->steps + 2;
    int err = 0;
    uint64_t *cut = malloc(count * sizeof *cut);
    if (!cut)
        return check_wrong(r, "out of memory");
    cut[n++] = 0;
    cut[n++] = plan->job.bytes;
    for (int i = 0; i < plan->steps; i++) {
        cut[n++] = plan->step[i].begin;
        cut[n++] = plan->step[i].end;
    }
    qsort(cut, n, sizeof *cut, check_by_value);
    for (size_t i = 0; i + 1 < n && !err; i++)
        if (cut[i] < cut[i + 1])
            err = check_account(r, cut[i], cut[i + 1]);
    free(cut);
    return err;
}

static bool check_close_to(double a, double b)
{
    return fabs(a - b) <= 1e-9 * fmax(fabs(a), fabs(b));
}

static int check_compare_loads(struct replay *r)
{
    for (int i = 0; i < r->plan->links; i++) {
        const struct tly_inside_link *l = &r->plan->link[i];
        if (!check_close_to(r->bytes[i], l->bytes))
            return check_wrong(r, "link %d carries %.0f bytes, the plan says %.0f", i, r->bytes[i], l->bytes);
        if (!check_close_to(r->seconds[i], l->seconds))
            return check_wrong(r, "link %d is busy for %g s, the plan says %g", i, r->seconds[i], l->seconds);
        if (r->seconds[i] > r->plan->seconds * (1 + 1e-9))
            return check_wrong(r, "link %d is busy for longer than the plan takes", i);
    }
    return 0;
}

int tly_inside_check(const struct tly_machine *m, const struct tly_inside *plan, char *why, size_t size)
{
    struct replay r = {.m = m, .plan = plan, .why = why, .size = size};
    int err = 0;
    r.bytes = calloc(2 * (size_t)plan->links + 1, sizeof *r.bytes);
    if (!r.bytes)
        return check_wrong(&r, "out of memory");
    r.seconds = r.bytes + plan->links;
    for (int i = 0; i < plan->steps && !err; i++)
        err = check_walk(&r, i, &plan->step[i]);
    if (!err)
        err = check_account_all(&r);
    if (!err)
        err = check_compare_loads(&r);
    free(r.bytes);
    return err;
}
