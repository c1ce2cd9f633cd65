/* bound_test.c - the bounds of collectives against all ways in which bytes can go: for small jobs each unit is sent along each
 * tree over the machines, spare ones among them, and no choice of trees beats the bound or carries less on a card. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>

#include "plan/plan.h"

enum { MOST = 5, MOST_TREES = 1024, RUNS = 400 };

typedef struct tly_plan_machine machine;

static uint64_t random_state = 88172645463325252u;
static uint64_t rnd(uint64_t limit)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state % limit;
}

/* Copies of a unit that each machine sends and receives on its way from its owner to all worker machines. */
struct tree {
    int out[MOST], in[MOST];
};

struct job {
    int count, n, order[MOST]; /* machines, those with ranks; which these are */
    machine m[MOST];
    uint64_t bytes[MOST], all;
    struct tree trees[MOST][MOST_TREES]; /* of each owner */
    int tree_count[MOST];
};

/* Does each machine that receives get it from the owner in the end, and does no spare machine receive it for nothing? */
static bool is_tree(const struct job *j, int owner, const int *parent, struct tree *t)
{
    *t = (struct tree){0};
    for (int i = 0; i < j->count; i++) {
        int at = i;
        for (int steps = 0; steps < j->count && at >= 0 && at != owner; steps++)
            at = parent[at];
        if (at != owner && (at >= 0 || j->m[i].ranks || at != parent[i]))
            return false;
        if (i != owner && parent[i] >= 0) {
            t->in[i]++;
            t->out[parent[i]]++;
        }
    }
    for (int i = 0; i < j->count; i++)
        if (i != owner && !j->m[i].ranks && t->in[i] && !t->out[i])
            return false;
    return true;
}

/* All choices of whom each machine but the owner gets a unit from; -1: a spare machine does not. */
static void list_trees(struct job *j, int owner)
{
    int parent[MOST] = {0}, choices = 1;
    for (int i = 0; i < j->count; i++)
        choices *= j->count + 1;
    j->tree_count[owner] = 0;
    for (int choice = 0; choice < choices; choice++) {
        int rest = choice;
        bool possible = true;
        for (int i = 0; i < j->count; i++, rest /= j->count + 1) {
            parent[i] = rest % (j->count + 1) - 1;
            possible &= parent[i] != i && (i == owner ? parent[i] == -1 : parent[i] >= 0 || !j->m[i].ranks);
        }
        struct tree t;
        if (possible && is_tree(j, owner, parent, &t)) {
            assert_true(j->tree_count[owner] < MOST_TREES);
            j->trees[owner][j->tree_count[owner]++] = t;
        }
    }
}

/* Worker and spare machines in any order, cards of any speed, few units in pieces of any size; or one machine has them all. */
static void any(struct job *j, bool rooted)
{
    static const int units[] = {0, 9, 9, 6, 4, 3};
    j->count = 1 + (int)rnd(MOST);
    j->n = 1 + (int)rnd((uint64_t)j->count);
    int left = j->n;
    for (int i = 0, w = 0; i < j->count; i++) {
        bool works = rnd((uint64_t)(j->count - i)) < (uint64_t)left;
        left -= works;
        j->m[i] = (machine){.ranks = works ? 1 + (uint32_t)rnd(3) : 0,
                            .card = (uint32_t)i,
                            .bandwidth = 1 + (double)rnd(4)};
        j->bytes[i] = 0;
        if (works)
            j->order[w++] = i;
    }
    j->all = 1 + rnd((uint64_t)units[j->count]);
    int root = j->order[rnd((uint64_t)j->n)];
    for (uint64_t u = 0; u < j->all; u++)
        j->bytes[rooted ? root : j->order[rnd((uint64_t)j->n)]]++;
    for (int i = 0; i < j->n; i++)
        list_trees(j, j->order[i]);
}

/* The least time of all choices of trees for the units from number `unit` on, where cards carry `load` already.  Units of
 * one owner are alike, so that their trees' numbers do not fall. */
static double least_time(const struct job *j, uint64_t unit, int tree, const struct tree *load, double best)
{
    double t = 0;
    for (int i = 0; i < j->count; i++)
        t = fmax(t, (load->out[i] > load->in[i] ? load->out[i] : load->in[i]) / j->m[i].bandwidth);
    if (unit == j->all || t >= best)
        return fmin(t, best);
    int owner = 0;
    uint64_t before = 0;
    while (before + j->bytes[owner] <= unit)
        before += j->bytes[owner++];
    for (int i = unit > before ? tree : 0; i < j->tree_count[owner]; i++) {
        struct tree with = *load;
        for (int at = 0; at < j->count; at++) {
            with.out[at] += j->trees[owner][i].out[at];
            with.in[at] += j->trees[owner][i].in[at];
        }
        best = least_time(j, unit + 1, i, &with, best);
    }
    return best;
}

/* The least that machine i sends and receives: of each unit by itself. */
static struct tly_plan_load least_load(const struct job *j, int i)
{
    struct tly_plan_load sum = {0};
    for (int owner = 0; owner < j->count; owner++) {
        struct tree least = {.out = {MOST}, .in = {MOST}};
        for (int t = 0; t < j->tree_count[owner] && j->bytes[owner]; t++) {
            const struct tree *tree = &j->trees[owner][t];
            least.out[0] = tree->out[i] < least.out[0] ? tree->out[i] : least.out[0];
            least.in[0] = tree->in[i] < least.in[0] ? tree->in[i] : least.in[0];
        }
        sum.out += (double)j->bytes[owner] * least.out[0];
        sum.in += (double)j->bytes[owner] * least.in[0];
    }
    return sum;
}

/* Along a tree a unit is copied on its way out, or partial sums of it are added on their way in. */
static void no_trees_beat_the_bounds(void **state)
{
    static struct job j;
    static const struct tree nothing;
    int exact = 0;
    for (int run = 0; run < RUNS; run++) {
        struct tly_plan_load copies[MOST], sums[MOST];
        any(&j, run % 4 == 0);
        double t = tly_plan_least_gather(j.count, j.m, j.bytes, copies), slowest = INFINITY;
        assert_true(tly_plan_least_sum(j.count, j.m, j.bytes, sums) == t);
        for (int i = 0; i < j.count; i++) {
            struct tly_plan_load least = least_load(&j, i);
            assert_true(copies[i].out == least.out && copies[i].in == least.in);
            assert_true(sums[i].out == least.in && sums[i].in == least.out);
            slowest = j.m[i].ranks ? fmin(slowest, j.m[i].bandwidth) : slowest;
        }
        double found = least_time(&j, 0, 0, &nothing, INFINITY);
        /* Units are whole, so a card may carry up to n - 2 copies of one unit more than with fractions. */
        double rounded = t + (j.n > 2 ? j.n - 2 : 0) / slowest;
        if (found < t * (1 - 1e-12) || found > rounded * (1 + 1e-12))
            fail_msg("run %d, %d machines, %d with ranks: %.9g, the bound is %.9g", run, j.count, j.n, found,
                     t);
        exact += fabs(found - t) < 1e-9;
    }
    assert_in_range(exact, RUNS / 2, RUNS);
}

/* Each rank gives each rank a unit; and each machine's inputs to a piece go where it is wanted. */
static void what_crosses_unrelayed(void **state)
{
    static struct job j;
    for (int run = 0; run < RUNS; run++) {
        any(&j, run % 4 == 0);
        struct tly_plan_load all_to_all[MOST], sums[MOST];
        double t[2] = {tly_plan_least_exchange(j.count, j.m, 3, all_to_all),
                       tly_plan_sum_where_wanted(j.count, j.m, j.bytes, sums)};
        double out[2][MOST] = {0}, in[2][MOST] = {0}, least[2] = {0};
        for (int from = 0; from < j.count; from++)
            for (int to = 0; to < j.count; to++)
                if (from != to && j.m[from].ranks && j.m[to].ranks) {
                    double each[2] = {3.0 * j.m[from].ranks * j.m[to].ranks, (double)j.bytes[to]};
                    for (int what = 0; what < 2; what++) {
                        out[what][from] += each[what];
                        in[what][to] += each[what];
                    }
                }
        for (int i = 0; i < j.count; i++) {
            assert_true(all_to_all[i].out == out[0][i] && all_to_all[i].in == in[0][i]);
            assert_true(sums[i].out == out[1][i] && sums[i].in == in[1][i]);
            for (int what = 0; what < 2; what++)
                least[what] = fmax(least[what], fmax(out[what][i], in[what][i]) / j.m[i].bandwidth);
        }
        assert_true(t[0] == least[0] && t[1] == least[1]);
    }
}

/* The least of the busiest card, where each unit from number `unit` on is summed by some service, which gets all machines'
 * inputs and sends the sum to where it is wanted. */
static int least_busy(const struct job *j, uint64_t unit, int service, const struct tree *load, int best)
{
    int busy = 0, owner = 0;
    for (int i = 0; i < j->count; i++)
        busy = load->out[i] > busy ? load->out[i] : load->in[i] > busy ? load->in[i] : busy;
    if (unit == j->all || busy >= best)
        return busy < best ? busy : best;
    uint64_t before = 0;
    while (before + j->bytes[owner] <= unit)
        before += j->bytes[owner++];
    for (int at = unit > before ? service : 0; at < j->count; at++) {
        struct tree with = *load;
        for (int i = 0; i < j->count; i++)
            if (j->m[i].ranks && i != at) {
                with.out[i]++;
                with.in[at]++;
            }
        with.out[at] += at != owner;
        with.in[owner] += at != owner;
        best = least_busy(j, unit + 1, at, &with, best);
    }
    return best;
}

/* On equal cards a service that adds in the order of ranks reaches the bound of a reduce-scatter, for any pieces, if parts of
 * large pieces are summed on other machines.  Where they are wanted takes up to n - 1 times as long. */
static void sums_in_order_reach_the_bound_of_equal_cards(void **state)
{
    static struct job j;
    static const struct tree nothing;
    int exact = 0, worse = 0;
    for (int run = 0; run < RUNS; run++) {
        struct tly_plan_load load[MOST];
        any(&j, false);
        for (int i = 0; i < j.count; i++)
            j.m[i].bandwidth = 1;
        double t = tly_plan_least_sum(j.count, j.m, j.bytes, load);
        double wanted = tly_plan_sum_where_wanted(j.count, j.m, j.bytes, load);
        int found = least_busy(&j, 0, 0, &nothing, 1000);
        assert_true(found >= t && found <= wanted);
        assert_true(found <= t + (j.n > 2 ? j.n - 2 : 0)); /* whole units */
        exact += found == t;
        worse += found < wanted;
    }
    assert_in_range(exact, RUNS / 2, RUNS);
    assert_in_range(worse, RUNS / 10, RUNS);
}

/* The table of layouts of eight ranks with a piece of 1 each, on cards of 1. */
static void layouts(void **state)
{
    struct tly_plan_load load[4];
    machine m[4] = {{.ranks = 4, .card = 0, .bandwidth = 1},
                    {.ranks = 2, .card = 1, .bandwidth = 1},
                    {.ranks = 2, .card = 2, .bandwidth = 1},
                    {.card = 3, .bandwidth = 1}};
    assert_true(tly_plan_least_gather(4, m, (uint64_t[]){4, 2, 2, 0}, load) == 6);
    assert_true(load[0].out == 4 && load[0].in == 4 && load[1].in == 6 && load[3].out == 0);
    assert_true(tly_plan_sum_where_wanted(4, m, (uint64_t[]){4, 2, 2, 0}, load) == 8);
    assert_true(tly_plan_least_gather(4, m, (uint64_t[]){8, 0, 0, 0}, load) == 8);
    assert_true(tly_plan_least_exchange(4, m, 1, load) == 16);
    m[1].ranks = m[2].ranks = 0; /* one machine has all ranks */
    assert_true(tly_plan_least_sum(4, m, (uint64_t[]){8, 0, 0, 0}, load) == 0);
    assert_true(tly_plan_sum_where_wanted(4, m, (uint64_t[]){8, 0, 0, 0}, load) == 0);
    m[1].ranks = 4;
    m[1].card = 0; /* two containers behind one card, each with half of it */
    assert_true(tly_plan_least_gather(4, m, (uint64_t[]){4, 4, 0, 0}, load) == 8);
    m[1].card = 1;
    m[1].bandwidth = 0; /* as slow as the slowest that is known */
    assert_true(tly_plan_least_gather(4, m, (uint64_t[]){4, 4, 0, 0}, load) == 4);
    m[0].bandwidth = m[2].bandwidth = m[3].bandwidth = 0;
    assert_true(isnan(tly_plan_least_gather(4, m, (uint64_t[]){4, 4, 0, 0}, load)));
    assert_true(load[1].in == 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_trees_beat_the_bounds),
        cmocka_unit_test(what_crosses_unrelayed),
        cmocka_unit_test(sums_in_order_reach_the_bound_of_equal_cards),
        cmocka_unit_test(layouts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
