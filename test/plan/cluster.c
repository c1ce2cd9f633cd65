/* cluster.c - the model of a cluster in cluster.h. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "test/plan/cluster.h"

const int cluster_shapes[CLUSTER_SHAPES][2] = {{4, 0}, {4, 2}, {8, 4}, {8, 1}, {3, 2}, {8, 8}};

bool cluster_is_long(size_t shape)
{
    const char *choice = getenv("TEST_LONG");
    bool all = choice && strcmp(choice, "all") == 0;
    size_t part = choice ? strtoul(choice, NULL, 10) : 0;
    return cluster_shapes[shape][0] + cluster_shapes[shape][1] > 6 && !all &&
           !(part && part % CLUSTER_SHAPES == shape);
}

static double chance(struct cluster *c)
{
    c->random = c->random * 1664525u + 1013904223u;
    return (double)(c->random >> 8) / (double)(1 << 24);
}

double cluster_normal(struct cluster *c)
{
    double sum = 0;
    for (int i = 0; i < 12; i++)
        sum += chance(c);
    return sum - 6;
}

void cluster_split(struct cluster *c)
{
    struct tly_plan_machine m[CLUSTER_MOST] = {0};
    uint32_t weight[CLUSTER_MOST];
    int n = 0, at[CLUSTER_MOST];
    for (int i = 0; i < c->count; i++) {
        c->s[i].machine.bandwidth = tly_replan_bandwidth(c->r, i);
        c->s[i].weight = 0;
        if (!c->s[i].active || tly_replan_rests(c->r, i))
            continue;
        m[n] = c->s[i].machine;
        m[n].sum_rate = tly_replan_sum_rate(c->r, i);
        m[n].card = (uint32_t)n;
        at[n++] = i;
    }
    assert_int_equal(tly_plan_split(TLY_SPLIT_OPTIMAL, n, m, weight), 0);
    for (int j = 0; j < n; j++)
        c->s[at[j]].weight = weight[j];
    tly_replan_begin(c->r, true);
}

double cluster_took(const struct cluster *c, const double *real, const uint32_t *weight)
{
    struct tly_plan_machine m[CLUSTER_MOST];
    for (int i = 0; i < c->count; i++)
        m[i] = (struct tly_plan_machine){c->s[i].machine.ranks, (uint32_t)i, real[i], c->sums[i]};
    return tly_plan_cost(c->count, m, weight, NULL);
}

double cluster_best(const struct cluster *c)
{
    struct tly_plan_machine m[CLUSTER_MOST];
    uint32_t weight[CLUSTER_MOST];
    for (int i = 0; i < c->count; i++)
        m[i] = (struct tly_plan_machine){c->s[i].machine.ranks, (uint32_t)i, c->real[i], c->sums[i]};
    assert_int_equal(tly_plan_split(TLY_SPLIT_OPTIMAL, c->count, m, weight), 0);
    return tly_plan_cost(c->count, m, weight, NULL);
}

void cluster_weights(const struct cluster *c, uint32_t *weight)
{
    for (int i = 0; i < c->count; i++)
        weight[i] = c->s[i].weight;
}

double cluster_fraction(const struct cluster *c)
{
    uint32_t weight[CLUSTER_MOST];
    cluster_weights(c, weight);
    return cluster_best(c) / cluster_took(c, c->real, weight);
}

void cluster_start(struct cluster *c, int workers, int spare, const double *said, double most)
{
    *c = (struct cluster){.workers = workers, .count = workers + spare, .hold = 1, .random = 1};
    assert_int_equal(tly_replan_create(false, &c->r), 0);
    for (int i = 0; i < c->count; i++) {
        c->real[i] = 100;
        c->s[i] = (struct tly_replan_service){
            .machine = {.ranks = i < workers, .card = (uint32_t)i}, .active = true, .spare = i >= workers};
        assert_int_equal(tly_replan_place(c->r, i, said ? said[i] : 100, most, 0, false), 0);
    }
    cluster_split(c);
    c->changes = 0;
}

void cluster_step(struct cluster *c)
{
    double *real = c->now, all = c->workers;
    uint32_t weight[CLUSTER_MOST] = {0}, total = 0;
    cluster_weights(c, weight);
    for (int i = 0; i < c->count; i++) {
        if (c->steps % c->hold == 0)
            real[i] = c->real[i] * fmax(.5, 1 + c->noise * cluster_normal(c));
        if (c->process[i] > 0)
            real[i] = fmin(real[i], c->process[i]);
        total += weight[i];
    }
    c->steps++;
    c->seconds = cluster_took(c, real, weight);
    for (int i = 0; i < c->count; i++) {
        double moved = c->s[i].machine.ranks + (all - 2 * c->s[i].machine.ranks) * weight[i] / total;
        double inputs = all * weight[i] / total;
        double used = moved / real[i] / c->seconds,
               adding = c->sums[i] > 0 ? inputs / c->sums[i] / c->seconds : 0;
        double busy = fmin(1, sqrt(used) * (1 + .02 * cluster_normal(c)));
        busy *= 1 - c->unseen[i];
        if (c->lie[i] > 0)
            busy = c->lie[i];
        /* Inputs wait for a slow process, and results do not. */
        double late = c->process[i] > 0 ? .3 * busy : 0;
        c->s[i].card = (struct tly_sight){moved / c->seconds * (1 + c->bias[i]), busy, busy - late / 2, late};
        /* Inputs that wait on the connections show only where they wait for most of the time. */
        c->s[i].sums =
            (struct tly_sight){inputs / c->seconds, adding > .9 ? adding : 0, adding > .9 ? adding : 0};
    }
    if (tly_replan_step(c->r, c->count, c->s, 1 / c->seconds)) {
        c->changes++;
        cluster_split(c);
    }
}

void cluster_run(struct cluster *c, int steps)
{
    for (int i = 0; i < steps; i++)
        cluster_step(c);
}

double cluster_settled(struct cluster *c, int within)
{
    cluster_run(c, within);
    return cluster_fraction(c);
}

void cluster_finish(struct cluster *c)
{
    tly_replan_destroy(c->r);
}

double cluster_mean(struct cluster *c, int samples)
{
    double optimum = cluster_best(c), all = 0;
    for (int i = 0; i < samples; i++) {
        cluster_step(c);
        all += optimum / c->seconds;
    }
    return all / samples;
}

void cluster_start_slow(struct cluster *c, int spare, int slow, double rate)
{
    cluster_start(c, 4, spare, NULL, 0);
    c->noise = .02;
    cluster_run(c, 30);
    for (int i = 0; i < slow; i++)
        c->real[4 + i] = rate;
}
