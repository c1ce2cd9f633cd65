/* inside.c - chooses how the GPUs of a machine sum: BytePS's rules where they apply, else what is predicted to be fastest. */
#include "inside/inside.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "inside/work.h"

/* Another way must be so much faster than the rule's to be taken instead, and than one before it in the list. */
#define BEATS_RULE 0.01
#define BEATS_OTHER 1e-3

/* Brute-force copies must save so much; they cost the memory of the processor a lot. */
#define COPIES_SAVE 0.02

/* Ways are compared by this many bytes, so that rounding to whole bytes does not show. */
#define COMPARED (1ULL << 40)

/* --- how long a way takes ----------------------------------------------------------------------------------- */

static void inside_write_all(struct tly_inside_work *w, const struct tly_inside_way *way, uint64_t bytes)
{
    struct tly_inside_way single;
    uint64_t copied = (uint64_t)((double)bytes * way->copied + 0.5);
    for (int i = 0; i < w->out->links; i++)
        w->out->link[i].bytes = w->out->link[i].seconds = 0;
    if (copied > bytes)
        copied = bytes;
    if (copied && tly_inside_way(w->m, TLY_GROUP_SINGLE, TLY_SHARE_EQUAL, false, &single))
        tly_inside_write(w, &single, 0, copied);
    tly_inside_write(w, way, copied, bytes);
}

static double inside_longest(const struct tly_inside *out, bool bus, int *which)
{
    double most = 0;
    for (int i = 0; i < out->links; i++)
        if (out->link[i].seconds > most && (!bus || out->link[i].type <= TLY_LINK_SWITCH_DOWN)) {
            most = out->link[i].seconds;
            if (which)
                *which = i;
        }
    return most;
}

double tly_inside_seconds(struct tly_inside_work *w, const struct tly_inside_way *way)
{
    inside_write_all(w, way, COMPARED);
    return inside_longest(w->out, false, NULL) / (double)COMPARED;
}

/* The same of the PCIe links of GPUs and switches alone, as Eq. 8 and 9 have it. */
static double inside_bus_seconds(struct tly_inside_work *w, const struct tly_inside_way *way)
{
    double traffic = w->job.traffic;
    w->job.traffic = 0;
    inside_write_all(w, way, COMPARED);
    w->job.traffic = traffic;
    return inside_longest(w->out, true, NULL) / (double)COMPARED;
}

/* The x from 0 to 1 at which f, which falls and then grows, is least. */
static double inside_least(double (*f)(void *user, double x), void *user)
{
    double low = 0, high = 1;
    for (int i = 0; i < 48; i++) {
        double a = low + (high - low) / 3, b = high - (high - low) / 3;
        if (f(user, a) <= f(user, b))
            high = b;
        else
            low = a;
    }
    return (low + high) / 2;
}

struct inside_trial {
    struct tly_inside_work *w;
    struct tly_inside_way *way;
};

static double inside_with_copies(void *user, double x)
{
    struct inside_trial *t = user;
    t->way->copied = x;
    return inside_bus_seconds(t->w, t->way);
}

/* GPUs that share a switch with a card weigh x, others 1. */
static double inside_with_weight(void *user, double x)
{
    struct inside_trial *t = user;
    double weight[TLY_MAX_GPUS];
    for (int g = 0; g < t->w->m->gpus; g++)
        weight[g] = tly_inside_shares_card(t->w->m, g) ? x : 1;
    tly_inside_weigh(t->w->m, t->way, weight);
    return tly_inside_seconds(t->w, t->way);
}

/* --- what the paper asks of a machine ------------------------------------------------------------------------ */

void tly_inside_look(const struct tly_machine *m, struct tly_inside *out)
{
    bool seen[TLY_MAX_SWITCHES] = {false};
    struct tly_inside_way way;
    int size[TLY_MAX_GPUS] = {0};
    for (int g = 0; g < m->gpus; g++) {
        int top = tly_inside_top(m, m->gpu[g].parent);
        if (top >= 0 && seen[top])
            continue;
        if (top >= 0)
            seen[top] = true;
        *(out->job.traffic > 0 && tly_inside_shares_card(m, g) ? &out->with_card : &out->without_card) += 1;
    }
    tly_inside_way(m, TLY_GROUP_SWITCH, TLY_SHARE_EQUAL, false, &way);
    for (int g = 0; g < m->gpus; g++)
        size[way.group[g]]++;
    out->each = size[0];
    for (int i = 1; i < way.groups; i++)
        if (size[i] != size[0])
            out->each = 0;
    out->nvlinked = tly_inside_way(m, TLY_GROUP_NVLINK, TLY_SHARE_EQUAL, false, &way) && way.groups == 1;
    bool some = way.groups < m->gpus;
    bool uneven = out->with_card > 0 && out->without_card > 0;
    if (m->gpus > 1)
        out->rule = uneven ? (out->nvlinked ? 1 : 0) : out->nvlinked || (!some && out->each) ? 2 : 0;
}

static void inside_ruled(const struct tly_inside *out, enum tly_inside_base *base,
                         enum tly_inside_shares *shares)
{
    *base = out->nvlinked ? TLY_GROUP_NVLINK : out->each > 1 ? TLY_GROUP_SWITCH : TLY_GROUP_SINGLE;
    *shares = out->rule == 1 ? TLY_SHARE_NEAR : TLY_SHARE_EQUAL;
}

/* --- the choice --------------------------------------------------------------------------------------------- */

static bool inside_same_way(const struct tly_machine *m, const struct tly_inside_way *a,
                            const struct tly_inside_way *b)
{
    return a->groups == b->groups && memcmp(a->group, b->group, (size_t)m->gpus * sizeof *a->group) == 0 &&
           memcmp(a->share, b->share, (size_t)m->gpus * sizeof *a->share) == 0 &&
           (a->direct || (a->base == TLY_GROUP_NVLINK) == (b->base == TLY_GROUP_NVLINK));
}

/* One of the options, unless it comes to the same as one before. */
static void inside_consider(struct tly_inside_work *w, struct tly_inside_way *way,
                            struct tly_inside_way *tried)
{
    struct tly_inside *out = w->out;
    struct inside_trial t = {w, way};
    if (way->shares == TLY_SHARE_BALANCED)
        inside_with_weight(&t, inside_least(inside_with_weight, &t));
    for (int i = 0; i < out->options; i++)
        if (inside_same_way(w->m, way, &tried[i]))
            return;
    tried[out->options] = *way;
    out->option[out->options++] = (struct tly_inside_option){
        .base = way->base, .shares = way->shares, .seconds = tly_inside_seconds(w, way)};
}

static bool inside_mixed(const struct tly_machine *m)
{
    bool some = false, others = false;
    for (int g = 0; g < m->gpus; g++)
        *(tly_inside_shares_card(m, g) ? &some : &others) = true;
    return some && others;
}

int tly_inside_choose(struct tly_inside_work *w)
{
    struct tly_inside *out = w->out;
    struct tly_inside_way way,
        *tried = calloc(TLY_GROUP_BASES * TLY_SHARE_KINDS, sizeof *tried); /* as many as options */
    enum tly_inside_base base;
    enum tly_inside_shares shares;
    int best = 0, rule = -1;
    if (!tried)
        return -ENOMEM;
    tly_inside_look(w->m, out);
    inside_ruled(out, &base, &shares);
    for (int b = 0; b < TLY_GROUP_BASES; b++)
        for (int s = 0; s < TLY_SHARE_KINDS; s++) {
            bool uneven = s != TLY_SHARE_EQUAL && b != TLY_GROUP_SINGLE;
            if ((s != TLY_SHARE_EQUAL && (!uneven || w->job.traffic <= 0 || !inside_mixed(w->m))) ||
                (s == TLY_SHARE_BALANCED && !(w->may & TLY_MAY_WEIGH)) ||
                !tly_inside_way(w->m, (enum tly_inside_base)b, (enum tly_inside_shares)s,
                                !(w->may & TLY_MAY_RELAY), &way))
                continue;
            inside_consider(w, &way, tried);
        }
    for (int i = 0; i < out->options; i++) {
        if (out->option[i].base != TLY_GROUP_ALL &&
            out->option[i].seconds < out->option[best].seconds * (1 - BEATS_OTHER))
            best = i;
        if (out->rule && out->option[i].base == base && out->option[i].shares == shares)
            rule = i;
    }
    out->by_rule = rule >= 0 && out->option[best].seconds >= out->option[rule].seconds * (1 - BEATS_RULE);
    out->way = tried[out->by_rule ? rule : best];
    free(tried);
    return 0;
}

/* x*, and whether it is worth what it asks of the memory. */
static void inside_weigh_copies(struct tly_inside_work *w)
{
    struct tly_inside *out = w->out;
    struct tly_inside_way way = out->way;
    struct inside_trial t = {w, &way};
    bool known = true;
    if ((way.base != TLY_GROUP_SWITCH && way.base != TLY_GROUP_TOP) || way.groups == w->m->gpus) {
        out->why_copied = TLY_COPIED_NO_GROUPS;
        return;
    }
    out->without_copied_seconds = inside_bus_seconds(w, &way) * (double)out->job.bytes;
    out->best_copied = inside_least(inside_with_copies, &t);
    if (out->best_copied < 1e-6)
        out->best_copied = 0;
    way.copied = out->best_copied;
    out->best_copied_seconds = inside_bus_seconds(w, &way) * (double)out->job.bytes;
    for (int i = 0; i < w->m->nodes; i++)
        known &= w->m->node[i].bandwidth.source > TLY_GUESSED && w->m->node[i].bandwidth.bytes > 0;
    double before = tly_inside_seconds(w, &out->way), after = tly_inside_seconds(w, &way);
    inside_write_all(w, &way, COMPARED);
    int busiest = -1;
    inside_longest(out, false, &busiest);
    bool saves = after < before * (1 - COPIES_SAVE);
    out->why_copied =
        saves && known ? TLY_COPIED_USED
        : saves        ? TLY_COPIED_MEMORY_UNKNOWN
        : busiest >= 0 && out->link[busiest].type == TLY_LINK_MEMORY
            ? TLY_COPIED_MEMORY_BOUND
            : TLY_COPIED_NO_GAIN;
    if (out->why_copied == TLY_COPIED_USED)
        out->way.copied = out->best_copied;
}

static bool inside_has_card(const struct tly_machine *m)
{
    for (int c = 0; c < m->cards; c++)
        if (!m->card[c].idle)
            return true;
    return false;
}

struct tly_inside_work *tly_inside_begin(const struct tly_machine *m, const struct tly_inside_job *job,
                                         unsigned may, struct tly_inside *out, int *err)
{
    struct tly_inside_work *w = NULL;
    *out = (struct tly_inside){.job = *job, .bottleneck = -1};
    *err = job->bytes < 1 || job->bytes > COMPARED * 1024 || !(job->traffic >= 0) || !(job->traffic < 1e6)
               ? -EINVAL
               : tly_inside_sound(m);
    if (*err)
        return NULL;
    if (!inside_has_card(m))
        out->job.traffic = 0;
    w = calloc(1, sizeof *w);
    if (w)
        *w = (struct tly_inside_work){.m = m, .out = out, .job = out->job, .may = may};
    *err = w ? tly_inside_links(w) : -ENOMEM;
    if (*err) {
        free(w);
        w = NULL;
    }
    return w;
}

int tly_inside_write_steps(struct tly_inside_work *w)
{
    struct tly_inside *out = w->out;
    w->keep = true;
    inside_write_all(w, &out->way, out->job.bytes);
    out->seconds = inside_longest(out, false, &out->bottleneck);
    return w->err;
}

int tly_inside_plan(const struct tly_machine *m, const struct tly_inside_job *job, unsigned may,
                    struct tly_inside *out)
{
    int err;
    struct tly_inside_work *w = tly_inside_begin(m, job, may, out, &err);
    if (!err)
        err = tly_inside_choose(w);
    if (!err && (may & TLY_MAY_COPY))
        inside_weigh_copies(w);
    if (!err)
        err = tly_inside_write_steps(w);
    free(w);
    if (err)
        tly_inside_finish(out);
    return err;
}

void tly_inside_finish(struct tly_inside *out)
{
    free(out->link);
    free(out->step);
    out->link = NULL;
    out->step = NULL;
    out->links = out->steps = out->room = 0;
}
