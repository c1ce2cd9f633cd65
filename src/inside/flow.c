/* flow.c - flow.h.
 *
 * Places where the plan's copies begin or end cut the gradients into intervals.  All bytes of an interval have the same owners and
 * take the same links.  Pieces of all intervals take turns, so that all owners are busy from the beginning.
 *
 * What moves at a time is a flow: a step of a GPU (order.h), a copy of an only GPU (copies.h), or a piece on the host.  There
 * a piece is added and brought to its card, exchanged, and spread to the owners' nodes.  A flow loads all links of its copies at
 * once, as a kernel does that reads peers and writes to the host.  Links are shared so that the slowest flow is as fast as it can be
 * (max-min fairness).  Whenever a flow ends, others begin and all rates are new. */
#include "inside/flow.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "device/copies.h"
#include "device/order.h"

/* What a flow does: a GPU's step, or on the host. */
_Static_assert((int)TLY_MAX_GPUS <= (int)TLY_ORDER_MEMBERS, "a machine may be one group");

enum { TOGETHER = TLY_STEPS, EXCHANGE, SPREAD, TYPES };

/* Of one interval and type of flow: a link, and the seconds for which a byte of the gradients keeps it busy. */
struct flow_load {
    int link, next; /* the next load of the same flow; -1: none */
    double seconds;
};

struct flow_interval {
    uint64_t begin, end;
    int card;                    /* that it is exchanged over; 0: none */
    uint8_t owner[TLY_MAX_GPUS]; /* a GPU, of each group */
};

struct flow_piece {
    double turn; /* place in the order, 0 to 1 */
    int interval;
    uint64_t bytes;
    int sums;   /* groups whose owner has not added it yet */
    uint8_t at; /* TOGETHER to SPREAD: what it does on the host next; TYPES: nothing more */
    bool moves; /* does it just now? */
};

/* An operation that is staged whole. */
struct flow_operation {
    uint64_t first;        /* a piece */
    uint64_t bytes, given; /* of the input: in copies that have begun */
    uint64_t passed;       /* pieces that are on the host, but for the first one: it comes last */
    struct tly_copies in;  /* a part is a piece */
};

struct flow_move {
    uint64_t piece;
    int type, actor;   /* a GPU, or a card */
    int loads;         /* the first; -1: none */
    double delay;      /* left before bytes move; it passes once nothing of its lane is before this one */
    double left, rate; /* bytes of the gradients, a second */
    bool fixed;
    bool behind; /* other work of its lane is before it */
    /* of a staged operation */
    struct flow_operation *operation; /* NULL: none */
    uint64_t staged; /* bytes that are on the host after this copy; 0: it brings results back */
};

struct flow_run {
    const struct tly_machine *m;
    const struct tly_inside *plan;
    const struct tly_flow_job *job;
    int intervals, loads, room, flows, used_links;
    uint64_t pieces, host_oldest, posted;
    struct flow_interval *interval;
    struct flow_load *load;
    int *first; /* load of a flow: by interval, type and actor */
    struct flow_piece *piece;
    struct flow_move *flow;
    struct tly_order *order; /* of each GPU */
    struct tly_order_board *board;
    struct flow_operation *operation; /* of an only GPU; NULL: there are several */
    struct tly_copies_part *part;     /* of each piece */
    struct tly_copies_lane results;
    uint64_t operations, next; /* the first of which not all input has been given */
    int copies_out;            /* under way */
    double *busy,
        *shared; /* of each link: taken by flows of fixed rate; asked for by others, for each byte a second */
    int *used;
    int under_way[TYPES][TLY_MAX_GPUS]; /* on the host */
};

/* --- what a piece loads -------------------------------------------------------------------------------------- */

static int *flow_first(const struct flow_run *r, int interval, int type, int actor)
{
    return &r->first[(interval * TYPES + type) * TLY_MAX_GPUS + actor];
}

static int flow_by_place(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static int flow_cut(struct flow_run *r)
{
    const struct tly_inside *p = r->plan;
    size_t n = 0;
    uint64_t *cut = malloc((2 * (size_t)p->steps + 2) * sizeof *cut);
    if (!cut)
        return -ENOMEM;
    cut[n++] = 0;
    cut[n++] = p->job.bytes;
    for (int i = 0; i < p->steps; i++) {
        cut[n++] = p->step[i].begin;
        cut[n++] = p->step[i].end;
    }
    qsort(cut, n, sizeof *cut, flow_by_place);
    r->interval = calloc(n, sizeof *r->interval);
    for (size_t i = 0; r->interval && i + 1 < n; i++)
        if (cut[i] < cut[i + 1])
            r->interval[r->intervals++] = (struct flow_interval){.begin = cut[i], .end = cut[i + 1]};
    free(cut);
    return r->interval ? 0 : -ENOMEM;
}

/* Which type of flow makes this copy, and whose. */
static int flow_type_of(const struct tly_inside_step *s, int *actor)
{
    static const int types[] = {0, TLY_STEP_SUM, TLY_STEP_SUM, TOGETHER, EXCHANGE, SPREAD, TLY_STEP_OUT};
    bool back = s->phase == 5 && s->to_at == TLY_AT_GPU;
    *actor = s->phase == 2 ? s->from : s->phase == 1 || s->phase == 6 || back ? s->to : 0;
    return back ? TLY_STEP_BACK : types[s->phase];
}

static int flow_add_load(struct flow_run *r, int *first, int link, double seconds)
{
    if (r->loads == r->room) {
        int room = r->room ? 2 * r->room : 1024;
        struct flow_load *more = realloc(r->load, (size_t)room * sizeof *more);
        if (!more)
            return -ENOMEM;
        r->load = more;
        r->room = room;
    }
    r->load[r->loads] = (struct flow_load){link, *first, seconds};
    *first = r->loads++;
    return 0;
}

/* One copy of the plan, for a byte of an interval. */
static int flow_add_step(struct flow_run *r, int interval, const struct tly_inside_step *s)
{
    int actor, err = 0, type = flow_type_of(s, &actor);
    struct flow_interval *in = &r->interval[interval];
    double share = s->bytes / (double)(s->end - s->begin), slow = s->across ? r->m->across.bytes : 0;
    if (type == TLY_STEP_SUM)
        in->owner[r->plan->way.group[actor]] = (uint8_t)actor;
    if (type == EXCHANGE)
        in->card = s->to;
    for (int i = 0; i < s->links && !err; i++) {
        const struct tly_inside_link *l = &r->plan->link[s->link[i]];
        double rate = l->rate.bytes;
        if (slow > 0 && slow < rate && l->type <= TLY_LINK_SWITCH_DOWN)
            rate = slow;
        if (rate > 0)
            err = flow_add_load(r, flow_first(r, interval, type, actor), s->link[i], share / rate);
    }
    return err;
}

static int flow_add_loads(struct flow_run *r)
{
    const struct tly_inside *p = r->plan;
    size_t n = (size_t)r->intervals * TYPES * TLY_MAX_GPUS;
    int err = 0;
    r->first = malloc(n * sizeof *r->first);
    if (!r->first)
        return -ENOMEM;
    for (size_t i = 0; i < n; i++)
        r->first[i] = -1;
    for (int i = 0; i < r->intervals; i++) {
        struct flow_interval *in = &r->interval[i];
        for (int g = r->m->gpus - 1; g >= 0; g--)
            in->owner[p->way.group[g]] = (uint8_t)g; /* of a GPU alone there may be no copy */
        for (int s = 0; s < p->steps && !err; s++)
            if (p->step[s].begin <= in->begin && p->step[s].end >= in->end)
                err = flow_add_step(r, i, &p->step[s]);
    }
    return err;
}

static int flow_by_turn(const void *a, const void *b)
{
    const struct flow_piece *x = a, *y = b;
    return x->turn != y->turn ? (x->turn > y->turn) - (x->turn < y->turn) : x->interval - y->interval;
}

static int flow_make_pieces(struct flow_run *r)
{
    double most = 0;
    for (int i = 0; i < r->intervals; i++)
        most += ceil((double)(r->interval[i].end - r->interval[i].begin) / (double)r->job->piece);
    if (most > TLY_FLOW_PIECES)
        return -E2BIG;
    r->piece = calloc((size_t)most + 1, sizeof *r->piece);
    if (!r->piece)
        return -ENOMEM;
    for (int i = 0; i < r->intervals; i++) {
        uint64_t all = r->interval[i].end - r->interval[i].begin, n = (all - 1) / r->job->piece + 1;
        for (uint64_t k = 0; k < n; k++)
            r->piece[r->pieces++] =
                (struct flow_piece){.turn = ((double)k + 0.5) / (double)n,
                                    .interval = i,
                                    .bytes = all * (k + 1) / n - all * k / n,
                                    .sums = r->plan->way.groups,
                                    .at = TOGETHER};
    }
    qsort(r->piece, r->pieces, sizeof *r->piece, flow_by_turn);
    return 0;
}

/* --- flows begin and end ------------------------------------------------------------------------------------- */

static int flow_place(const struct flow_run *r, int gpu)
{
    int place = 0;
    for (int g = 0; g < gpu; g++)
        place += r->plan->way.group[g] == r->plan->way.group[gpu];
    return place;
}

static int flow_set_orders(struct flow_run *r)
{
    const int gpus = r->m->gpus;
    r->order = calloc((size_t)gpus, sizeof *r->order);
    r->board = calloc((size_t)gpus, sizeof *r->board);
    if (!r->order || !r->board)
        return -ENOMEM;
    for (int g = 0; g < gpus; g++) {
        struct tly_order *o = &r->order[g];
        o->most = r->job->most;
        o->me = flow_place(r, g);
        for (int i = 0; i < gpus; i++)
            if (r->plan->way.group[i] == r->plan->way.group[g])
                o->board[o->members++] = &r->board[i];
    }
    return 0;
}

/* Cut the pieces of an only GPU into operations. */
static int flow_set_operations(struct flow_run *r)
{
    struct flow_operation *o = NULL;
    r->operation = calloc(r->pieces, sizeof *r->operation);
    r->part = calloc(r->pieces, sizeof *r->part);
    if (!r->operation || !r->part)
        return -ENOMEM;
    tly_copies_init(&r->results);
    for (uint64_t n = 0; n < r->pieces; n++) {
        const uint64_t bytes = r->piece[n].bytes;
        if (!o || (r->job->operation && o->bytes + bytes > r->job->operation)) {
            o = &r->operation[r->operations++];
            o->first = n;
            o->in.part = &r->part[n];
            tly_list_init(&o->in.node);
        }
        r->part[n] = (struct tly_copies_part){.at = o->bytes, .bytes = bytes};
        o->bytes += bytes;
        o->in.most = tly_copies_bytes(o->bytes);
        o->in.parts++;
    }
    r->posted = r->pieces;
    return 0;
}

static void flow_begin(struct flow_run *r, uint64_t piece, int type, int actor)
{
    const struct flow_piece *p = &r->piece[piece];
    r->flow[r->flows++] =
        (struct flow_move){.piece = piece,
                           .type = type,
                           .actor = actor,
                           .loads = *flow_first(r, p->interval, type, type < TLY_STEPS ? actor : 0),
                           .delay = type < TLY_STEPS ? r->job->delay : 0,
                           .left = (double)p->bytes};
}

static void flow_begin_on_host(struct flow_run *r)
{
    while (r->host_oldest < r->pieces && r->piece[r->host_oldest].at == TYPES)
        r->host_oldest++;
    for (uint64_t n = r->host_oldest; n < r->posted; n++) {
        struct flow_piece *p = &r->piece[n];
        int card = r->interval[p->interval].card;
        if (p->sums || p->moves || p->at == TYPES || r->under_way[p->at][card] == r->job->most)
            continue;
        p->moves = true;
        r->under_way[p->at][card]++;
        flow_begin(r, n, p->at, card);
    }
}

/* An only GPU's copy. */
static void flow_begin_copy(struct flow_run *r, int type, struct flow_operation *o, uint64_t at, double bytes)
{
    flow_begin(r, o->first + at, type, 0);
    r->flow[r->flows - 1].operation = o;
    r->flow[r->flows - 1].left = bytes;
}

static void flow_begin_copies(struct flow_run *r)
{
    struct tly_copies_run run;
    while (r->next < r->operations && r->copies_out < r->job->most) {
        struct flow_operation *o = &r->operation[r->next];
        const uint64_t left = o->bytes - o->given, bytes = left < o->in.most ? left : o->in.most;
        flow_begin_copy(r, TLY_STEP_SUM, o, 0, (double)bytes);
        r->flow[r->flows - 1].staged = o->given += bytes;
        r->copies_out++;
        r->next += o->given == o->bytes;
    }
    while (tly_copies_next(&r->results, &run))
        flow_begin_copy(r, TLY_STEP_BACK, tly_list_entry(run.of, struct flow_operation, in), run.first,
                        (double)run.bytes);
}

/* Pieces go on when they are on the host, the first one when all others are. */
static void flow_end_copy(struct flow_run *r, const struct flow_move *f)
{
    struct flow_operation *o = f->operation;
    if (!f->staged) {
        tly_copies_end(&r->results);
        return;
    }
    r->copies_out--;
    while (1 + o->passed < o->in.parts &&
           o->in.part[1 + o->passed].at + o->in.part[1 + o->passed].bytes <= f->staged)
        r->piece[o->first + ++o->passed].sums = 0;
    if (f->staged == o->bytes)
        r->piece[o->first].sums = 0;
}

/* A result is on the host. */
static void flow_land(struct flow_run *r, uint64_t piece)
{
    struct flow_operation *o = r->operation;
    while (piece - o->first >= o->in.parts)
        o++;
    tly_copies_landed(&r->results, &o->in, (uint32_t)(piece - o->first));
}

static void flow_begin_all(struct flow_run *r)
{
    if (r->operation) {
        flow_begin_copies(r);
        flow_begin_on_host(r);
        return;
    }
    for (int g = 0; g < r->m->gpus; g++) {
        struct tly_order *o = &r->order[g];
        uint64_t n;
        while (o->posted < r->pieces) {
            int owner = r->interval[r->piece[o->posted].interval].owner[r->plan->way.group[g]];
            if (!tly_order_post(o, flow_place(r, owner), TLY_ORDER_ALL, false))
                break;
        }
        r->posted = o->posted > r->posted ? o->posted : r->posted;
        for (int step = 0; step < TLY_STEPS; step++)
            while (tly_order_begin(o, (enum tly_order_step)step, &n))
                flow_begin(r, n, step, g);
    }
    flow_begin_on_host(r);
}

static void flow_end(struct flow_run *r, const struct flow_move *f)
{
    struct flow_piece *p = &r->piece[f->piece];
    if (f->operation) {
        flow_end_copy(r, f);
        return;
    }
    if (f->type < TLY_STEPS) {
        tly_order_end(&r->order[f->actor], (enum tly_order_step)f->type, f->piece);
        p->sums -= f->type == TLY_STEP_SUM;
        return;
    }
    r->under_way[f->type][f->actor]--;
    p->moves = false;
    p->at++;
    if (r->operation && p->at == TYPES) {
        flow_land(r, f->piece);
        return;
    }
    for (int g = 0; g < r->plan->way.groups && p->at == TYPES; g++)
        tly_order_result(&r->order[r->interval[p->interval].owner[g]], f->piece);
}

/* --- rates --------------------------------------------------------------------------------------------------- */

static bool flow_moves(const struct flow_move *f)
{
    return f->delay <= 0 && !f->fixed && !f->behind;
}

/* A lane carries its work out in order.  Each copy of OUT has a lane to itself. */
static void flow_line_up(struct flow_run *r)
{
    bool taken[TLY_STEP_OUT][TLY_MAX_GPUS] = {{false}};
    for (int i = 0; i < r->flows; i++) {
        struct flow_move *f = &r->flow[i];
        if (f->type >= TLY_STEP_OUT)
            continue;
        f->behind = taken[f->type][f->actor];
        taken[f->type][f->actor] = true;
    }
}

static void flow_ask(struct flow_run *r)
{
    for (int i = 0; i < r->used_links; i++)
        r->busy[r->used[i]] = r->shared[r->used[i]] = 0;
    r->used_links = 0;
    flow_line_up(r);
    for (int i = 0; i < r->flows; i++) {
        struct flow_move *f = &r->flow[i];
        f->rate = f->loads < 0 ? INFINITY : 0;
        f->fixed = f->loads < 0;
        for (int at = f->loads; at >= 0 && flow_moves(f); at = r->load[at].next) {
            int link = r->load[at].link;
            if (r->shared[link] <= 0)
                r->used[r->used_links++] = link;
            r->shared[link] += r->load[at].seconds;
        }
    }
}

/* The flow has this rate, and leaves the rest of its links to others. */
static void flow_fix(struct flow_run *r, struct flow_move *f, double rate)
{
    f->rate = rate;
    f->fixed = true;
    for (int at = f->loads; at >= 0; at = r->load[at].next) {
        r->busy[r->load[at].link] += rate * r->load[at].seconds;
        r->shared[r->load[at].link] -= r->load[at].seconds;
    }
}

static bool flow_uses(const struct flow_run *r, const struct flow_move *f, int link)
{
    int at = f->loads;
    while (at >= 0 && r->load[at].link != link)
        at = r->load[at].next;
    return at >= 0;
}

/* Max-min fair: again and again the link that has least for each of its flows fixes their rate. */
static void flow_set_rates(struct flow_run *r)
{
    flow_ask(r);
    for (;;) {
        int tightest = -1;
        double least = INFINITY;
        for (int i = 0; i < r->used_links; i++) {
            int link = r->used[i];
            double rate = fmax(0, 1 - r->busy[link]) / r->shared[link];
            if (r->shared[link] > 1e-18 && rate < least) {
                least = rate;
                tightest = link;
            }
        }
        if (tightest < 0)
            return;
        for (int i = 0; i < r->flows; i++)
            if (flow_moves(&r->flow[i]) && flow_uses(r, &r->flow[i], tightest))
                flow_fix(r, &r->flow[i], least);
        r->shared[tightest] = 0;
    }
}

/* The seconds until the flow ends, or begins to move.  Those behind others do neither. */
static double flow_until(const struct flow_move *f)
{
    return f->behind ? INFINITY : f->delay > 0 ? f->delay : f->left / f->rate;
}

/* Let time pass until the next flow ends, or begins to move; end those that do.  Returns the time. */
static double flow_pass(struct flow_run *r)
{
    double least = INFINITY;
    int kept = 0;
    flow_set_rates(r);
    for (int i = 0; i < r->flows; i++)
        least = fmin(least, flow_until(&r->flow[i]));
    for (int i = 0; i < r->flows; i++) {
        struct flow_move f = r->flow[i];
        bool now = flow_until(&f) <= least * (1 + 1e-9), ends = now && f.delay <= 0;
        if (!f.behind && f.delay <= 0)
            f.left -= f.rate * least;
        else if (!f.behind)
            f.delay = now ? 0 : f.delay - least;
        if (ends)
            flow_end(r, &f);
        else
            r->flow[kept++] = f;
    }
    r->flows = kept;
    return least;
}

/* --- all of it ----------------------------------------------------------------------------------------------- */

static int flow_prepare(struct flow_run *r)
{
    size_t links = (size_t)r->plan->links;
    size_t most = (size_t)r->job->most * (TLY_STEPS + TYPES) * TLY_MAX_GPUS;
    int err = flow_cut(r);
    if (!err)
        err = flow_add_loads(r);
    if (!err)
        err = flow_make_pieces(r);
    if (!err)
        err = r->m->gpus == 1 && r->intervals == 1 ? flow_set_operations(r) : flow_set_orders(r);
    r->flow = calloc(most, sizeof *r->flow);
    r->busy = calloc(links + 1, sizeof *r->busy);
    r->shared = calloc(links + 1, sizeof *r->shared);
    r->used = calloc(links + 1, sizeof *r->used);
    return err ? err : r->flow && r->busy && r->shared && r->used ? 0 : -ENOMEM;
}

static void flow_free(struct flow_run *r)
{
    free(r->interval);
    free(r->load);
    free(r->first);
    free(r->piece);
    free(r->flow);
    free(r->order);
    free(r->board);
    free(r->operation);
    free(r->part);
    free(r->busy);
    free(r->shared);
    free(r->used);
    free(r);
}

int tly_inside_flow(const struct tly_machine *m, const struct tly_inside *plan,
                    const struct tly_flow_job *job, struct tly_flow *out)
{
    *out = (struct tly_flow){0};
    if (!plan->way.direct || plan->way.copied > 0 || !job->piece || job->most < 1 ||
        job->most > TLY_FLOW_MOST)
        return -EINVAL;
    if (!m->gpus)
        return 0;
    struct flow_run *r = calloc(1, sizeof *r);
    if (!r)
        return -ENOMEM;
    r->m = m;
    r->plan = plan;
    r->job = job;
    int err = flow_prepare(r);
    if (!err)
        flow_begin_all(r);
    while (!err && r->flows) {
        out->seconds += flow_pass(r);
        flow_begin_all(r);
    }
    out->pieces = r->pieces;
    flow_free(r);
    return err;
}
