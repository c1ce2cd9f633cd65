/* inside_test.c - the numbers of BytePS §4.2, the choice for each machine of test/topo/machines, and random machines: on
 * every one the steps give every GPU the sum, and links carry what formulas of their own say. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "inside/inside.h"
#include "plan/plan.h"
#include "test/topo/machine_files.h"

#define GBIT (1e9 / 8)
#define M 1000000000.0

static struct tly_machine machine, other;
static struct tly_inside plan;

static void load(const char *name)
{
    char why[256] = "";
    if (load_machine(name, &machine, why, sizeof why) != 0)
        fail_msg("%s: %s", name, why);
}

static void near(double a, double b, double tolerance)
{
    if (!(fabs(a - b) <= tolerance * fabs(b)))
        fail_msg("%.12g is not %.12g", a, b);
}

static void checked(const char *what)
{
    char why[256] = "";
    if (tly_inside_check(&machine, &plan, why, sizeof why) != 0)
        fail_msg("%s: %s", what, why);
}

/* 8 worker machines and no CPU machine unless said: 14/8 M go over the card each way. */
static void choose(double traffic)
{
    struct tly_inside_job job = {.bytes = (uint64_t)M, .traffic = traffic};
    tly_inside_finish(&plan);
    assert_int_equal(tly_inside_plan(&machine, &job, TLY_MAY_ALL, &plan), 0);
    checked("the choice");
}

#define EIGHT_MACHINES 1.75

static double bytes_on(enum tly_inside_link_type type, int a)
{
    for (int i = 0; i < plan.links; i++)
        if (plan.link[i].type == type && plan.link[i].a == a)
            return plan.link[i].bytes;
    fail_msg("there is no such link");
    return 0;
}

/* --- the paper's formulas ----------------------------------------------------------------------------------- */

/* Eq. 8, 9: bytes on the link of a switch with l GPUs to the processor, and of a GPU to the switch, for M = 1, where the
 * share x is copied as it is. */
static double eq8(int l, double x)
{
    return l * x + (1 - x);
}

static double eq9(int l, double x)
{
    return (2.0 * l - 1) / l * (1 - x) + x;
}

/* x* of Eq. 8, 9: the share for which the longer of both takes least.
 * Eq. 8 grows with x and Eq. 9 falls: both take as long at (1 + (l-1) x) / bs = ((2l-1)/l - (l-1)/l x) / bg. */
static double best_share(int l, double gpu_rate, double switch_rate)
{
    double slope = (l - 1) * (1 / switch_rate + 1 / (l * gpu_rate));
    double x = slope > 0 ? ((2.0 * l - 1) / (l * gpu_rate) - 1 / switch_rate) / slope : 0;
    return fmin(1, fmax(0, x));
}

/* J_ca and J_ar for M = 1: CPU-assisted aggregation, and a ring over p switches of l GPUs. */
static double time_assisted(int l, double gpu_rate, double switch_rate)
{
    return fmax(eq8(l, 0) / switch_rate, eq9(l, 0) / gpu_rate);
}

static double time_ring(int p, int l, double bottleneck)
{
    return 2.0 * (p * l - 1) / (p * l * bottleneck);
}

/* --- the paper's numbers ------------------------------------------------------------------------------------ */

static void the_papers_formulas(void **state)
{
    double b = 13.1;
    near(eq8(4, 0.2), 1.6, 1e-12); /* 3 x + 1 */
    near(eq9(4, 0.2), 1.6, 1e-12); /* (7 - 3 x) / 4 */
    near(best_share(4, b, b), 0.2, 1e-12);
    double best = fmax(eq8(4, 0.2), eq9(4, 0.2)) / b;
    near(best, 0.122, 2e-3); /* s for 1 GB; the paper prints 0.129 and 0.141 */
    near(time_assisted(4, b, b), 0.134, 4e-3);
    near(time_assisted(4, b, b) / best, 1.09, 4e-3);
    double ca = time_assisted(4, 105, 105), ar = time_ring(2, 4, 80);
    near(1 - ca / ar, 1 - 80.0 / 105, 1e-12);
    near(1 - ca / ar, 0.237, 5e-3); /* 0.2381; the paper prints 23.7% */
    for (int p = 2; p < 9; p++)
        for (int l = 2; l < 9;
             l++) /* "J_ca < J_ar always holds": where the ring's copies are slower than the bus */
            assert_true(time_assisted(l, 105, 105) < time_ring(p, l, 80));
}

/* The first machine: what each link carries, and for how long. */
static void the_pcie_machine(void **state)
{
    load("pcie");
    choose(EIGHT_MACHINES);
    assert_int_equal(plan.rule, 2);
    assert_true(plan.by_rule && plan.way.base == TLY_GROUP_SWITCH && plan.way.shares == TLY_SHARE_EQUAL);
    assert_int_equal(plan.with_card, 0);
    assert_int_equal(plan.without_card, 2);
    assert_int_equal(plan.each, 4);
    for (int g = 0; g < 8; g++) {
        near(bytes_on(TLY_LINK_GPU_UP, g), 7 * M / 4, 1e-8);
        near(bytes_on(TLY_LINK_GPU_DOWN, g), 7 * M / 4, 1e-8);
    }
    for (int s = 0; s < 2; s++) {
        near(bytes_on(TLY_LINK_SWITCH_UP, s), M, 1e-8);
        near(bytes_on(TLY_LINK_SWITCH_DOWN, s), M, 1e-8);
    }
    near(bytes_on(TLY_LINK_NET_OUT, 0), 1.75 * M, 1e-8);
    near(plan.seconds, 1.75 * M / (100 * GBIT), 1e-8); /* the card is what all wait for */
    assert_int_equal(plan.link[plan.bottleneck].type, TLY_LINK_NET_OUT);
    /* x*, as Eq. 8 and 9 have it; the memory's bandwidth is not known, so it is not done, and it would not help. */
    near(plan.best_copied, 0.2, 1e-6);
    near(plan.without_copied_seconds / plan.best_copied_seconds, 1.09, 4e-3);
    near(plan.without_copied_seconds, 7.0 / 4 * M / (105 * GBIT), 1e-6);
    assert_int_equal(plan.why_copied, TLY_COPIED_NO_GAIN);
}

static void by(enum tly_inside_base base, enum tly_inside_shares shares, double traffic)
{
    struct tly_inside_way way;
    struct tly_inside_job job = {.bytes = (uint64_t)M, .traffic = traffic};
    assert_true(tly_inside_way(&machine, base, shares, false, &way));
    tly_inside_finish(&plan);
    assert_int_equal(tly_inside_try(&machine, &job, &way, &plan), 0);
    checked("a way");
}

/* Figure 14(a): what all-reduce does there, over both switches at 80 Gbit/s. */
static void figure_14_pcie(void **state)
{
    load("pcie");
    by(TLY_GROUP_ALL, TLY_SHARE_EQUAL, 0);
    near(bytes_on(TLY_LINK_SWITCH_UP, 0), 7 * M / 4, 1e-8); /* 2 (lp - 1) / lp: 7/4 */
    near(plan.seconds, time_ring(2, 4, 80 * GBIT) * M, 0.01);
    by(TLY_GROUP_ALL, TLY_SHARE_EQUAL, EIGHT_MACHINES);
    double strawman = plan.seconds;
    choose(EIGHT_MACHINES);
    assert_true(plan.seconds < strawman);
    assert_true(strawman / plan.seconds > 1.1); /* "up to 20% gain" */
}

/* Seconds on the NVLink machine with these GPUs as roots, a bit each. */
static double with_roots(unsigned roots, double traffic)
{
    struct tly_inside_way way;
    struct tly_inside_job job = {.bytes = (uint64_t)M, .traffic = traffic};
    int count = __builtin_popcount(roots);
    assert_true(tly_inside_way(&machine, TLY_GROUP_NVLINK, TLY_SHARE_EQUAL, false, &way));
    for (int g = 0; g < 8; g++)
        way.share[g] = roots >> g & 1 ? 1.0 / count : 0;
    tly_inside_finish(&plan);
    assert_int_equal(tly_inside_try(&machine, &job, &way, &plan), 0);
    checked("roots");
    return plan.seconds;
}

/* Figure 14(b): root 2 and roots 2, 3 alike, all worse, 0 worst. */
static void figure_14_nvlink(void **state)
{
    load("nvlink");
    double two = with_roots(1 << 2, EIGHT_MACHINES), both = with_roots(1 << 2 | 1 << 3, EIGHT_MACHINES);
    double all = with_roots(0xff, EIGHT_MACHINES), zero = with_roots(1, EIGHT_MACHINES);
    near(two, both, 1e-9);
    assert_true(two < all && all < zero);
    near(two, 1.75 * M / (100 * GBIT), 1e-8);             /* the card at its full rate */
    near(all, (1.75 + 2.0 / 8) * M / (105 * GBIT), 1e-8); /* P0 - CPU0 */
    near(zero, (1.75 + 1) * M / (105 * GBIT), 1e-8);
}

static void the_nvlink_machine(void **state)
{
    load("nvlink");
    choose(EIGHT_MACHINES);
    assert_int_equal(plan.rule, 1);
    assert_int_equal(plan.with_card, 1);
    assert_int_equal(plan.without_card, 3);
    assert_true(plan.by_rule && plan.way.base == TLY_GROUP_NVLINK && plan.nvlinked);
    for (int g = 0; g < 8; g++) /* in turn those that are equal: near the card, and not below its switch */
        near(plan.way.share[g] + 1, g == 2 || g == 3 ? 1.5 : 1, 1e-9);
    near(bytes_on(TLY_LINK_SWITCH_UP, 0), 1.75 * M, 1e-8); /* P0: nothing but the card */
    near(bytes_on(TLY_LINK_SWITCH_DOWN, 0), 1.75 * M, 1e-8);
    near(bytes_on(TLY_LINK_SWITCH_UP, 1), M, 1e-8);
    near(plan.seconds, 1.75 * M / (100 * GBIT), 1e-8);
    assert_int_equal(plan.why_copied, TLY_COPIED_NO_GROUPS);
}

/* Figure 13: more CPU machines help both, NVLink machines more, whose PCIe links are not in the way. */
static void figure_13(void **state)
{
    static const char *const names[] = {"pcie", "nvlink"};
    double gain[2];
    for (int i = 0; i < 2; i++) {
        double first = 0, last = INFINITY;
        struct tly_inside_way way;
        struct tly_inside_job job = {.bytes = (uint64_t)M, .traffic = EIGHT_MACHINES};
        load(names[i]);
        assert_true(tly_inside_plain(&machine, &way));
        tly_inside_finish(&plan);
        assert_int_equal(tly_inside_try(&machine, &job, &way, &plan), 0);
        checked("a plain all-reduce");
        double reduce = plan.seconds;
        for (int k = 0; k <= 8; k++) {
            double traffic = tly_plan_time(8, k, 1, 1);
            choose(traffic);
            assert_true(plan.seconds <= last * (1 + 1e-9) && plan.seconds < reduce);
            last = plan.seconds;
            first = k ? first : last;
        }
        gain[i] = first / last;
    }
    assert_true(gain[0] > 1.04 && gain[1] > gain[0]);
    near(gain[1], 1.75, 1e-6);
}

/* --- other machines ----------------------------------------------------------------------------------------- */

static void brute_force_where_the_memory_bears_it(void **state)
{
    load("pcie");
    machine.card[0].rate.bytes = 400 * GBIT;
    machine.card[0].link.bytes = 400 * GBIT;
    choose(EIGHT_MACHINES);
    assert_int_equal(plan.why_copied, TLY_COPIED_MEMORY_UNKNOWN);
    assert_true(plan.way.copied == 0);
    near(plan.seconds, 7.0 / 4 * M / (105 * GBIT), 1e-6);
    for (int i = 0; i < 2; i++)
        machine.node[i].bandwidth = (struct tly_rate){800 * GBIT, TLY_GIVEN};
    choose(EIGHT_MACHINES);
    assert_int_equal(plan.why_copied, TLY_COPIED_USED);
    near(plan.way.copied, 0.2, 1e-6);
    near(plan.seconds, 1.6 * M / (105 * GBIT), 1e-6);
    near(bytes_on(TLY_LINK_SWITCH_UP, 1), eq8(4, 0.2) * M, 1e-6);
    near(bytes_on(TLY_LINK_GPU_UP, 1), eq9(4, 0.2) * M, 1e-6);
    for (int i = 0; i < 2; i++)
        machine.node[i].bandwidth = (struct tly_rate){500 * GBIT, TLY_GIVEN};
    choose(EIGHT_MACHINES);
    assert_int_equal(plan.why_copied, TLY_COPIED_MEMORY_BOUND);
    assert_true(plan.way.copied == 0);
}

static void symmetric_with_nvlink(void **state)
{
    load("dgx1");
    choose(EIGHT_MACHINES);
    assert_true(plan.rule == 2 && plan.by_rule && plan.nvlinked && plan.with_card == 4 &&
                plan.without_card == 0);
    for (int g = 0; g < 8; g++)
        near(plan.way.share[g], 1.0 / 8, 1e-12);
    assert_true(plan.way.ring[0]); /* the cube has a ring over all */
    for (int c = 0; c < 4; c++)
        near(bytes_on(TLY_LINK_NET_OUT, c), 1.75 * M / 4, 1e-8);
    load("hgx");
    choose(EIGHT_MACHINES);
    assert_true(plan.rule == 2 && plan.nvlinked && plan.with_card == 8 && plan.without_card == 0);
    for (int c = 0; c < machine.cards; c++)
        if (machine.card[c].idle)
            assert_true(bytes_on(TLY_LINK_NET_OUT, c) == 0);
        else
            near(bytes_on(TLY_LINK_NET_OUT, c), 1.75 * M / 8, 1e-8);
    for (int i = 0; i < plan.links; i++) /* what a GPU owns goes over the card beside it */
        if (plan.link[i].type == TLY_LINK_BETWEEN)
            assert_true(plan.link[i].bytes == 0);
}

static void ports_without_switches(void **state)
{
    load("ports");
    choose(EIGHT_MACHINES);
    assert_true(plan.rule == 2 && plan.each == 1 && plan.way.base == TLY_GROUP_SINGLE);
    for (int g = 0; g < 8; g++)
        near(bytes_on(TLY_LINK_GPU_UP, g), M, 1e-8);
    load("virtual");
    choose(EIGHT_MACHINES);
    assert_true(plan.way.base == TLY_GROUP_SINGLE && machine.notes > 0);
    assert_true(bytes_on(TLY_LINK_NET_OUT, 0) > 0); /* of unknown rate, so in no time */
    assert_int_not_equal(plan.link[plan.bottleneck].type, TLY_LINK_NET_OUT);
}

static void neither_rule(void **state)
{
    /* Two pairs of NVLinks: pairs reduce, the processor adds. */
    load("workstation");
    choose(0.5);
    assert_true(plan.rule == 0 && !plan.by_rule && plan.way.base == TLY_GROUP_NVLINK && plan.way.groups == 2);
    for (int i = 0; i < plan.options; i++)
        assert_true(plan.seconds <= plan.option[i].seconds * M * (1 + 2e-3));
    /* A card at one of two switches and no NVLink: what a switch's GPUs have must leave by its link. */
    load("uneven");
    choose(EIGHT_MACHINES);
    assert_true(plan.rule == 0 && plan.with_card == 1 && plan.without_card == 1);
    near(plan.seconds, 2.75 * M / (105 * GBIT), 1e-6);
    load("nested");
    choose(EIGHT_MACHINES);
    assert_true(plan.rule == 0 && plan.way.base == TLY_GROUP_TOP);
}

static void few_gpus(void **state)
{
    load("one");
    choose(EIGHT_MACHINES);
    assert_int_equal(plan.rule, 0);
    near(bytes_on(TLY_LINK_GPU_UP, 0), M, 1e-12);
    choose(0); /* alone: there is nothing to do */
    assert_int_equal(plan.steps, 0);
    load("none");
    choose(EIGHT_MACHINES);
    assert_int_equal(plan.steps, 0);
    assert_true(plan.seconds == 0 && plan.bottleneck == -1);
}

static void slices_copy_all_they_have(void **state)
{
    load("mig");
    assert_int_equal(machine.gpus, 10);
    choose(EIGHT_MACHINES);
    assert_int_equal(plan.way.base, TLY_GROUP_SINGLE);
    near(bytes_on(TLY_LINK_SWITCH_UP, 0), 7 * M, 1e-8);
    near(bytes_on(TLY_LINK_SWITCH_DOWN, 1), 3 * M, 1e-8);
}

static void one_machine_alone(void **state)
{
    load("hgx");
    choose(0);
    for (int i = 0; i < plan.links; i++) { /* NVLink alone, and as Patarasu and Yuan have it */
        const struct tly_inside_link *l = &plan.link[i];
        bool nvswitch = l->type == TLY_LINK_NVSWITCH_TO || l->type == TLY_LINK_NVSWITCH_OF;
        if (nvswitch)
            near(l->bytes, 2 * 7.0 / 8 * M, 1e-8);
        else
            assert_true(l->bytes == 0);
    }
    load("pcie");
    choose(0);
    assert_true(plan.way.base == TLY_GROUP_SWITCH && plan.rule == 2);
}

static void choose_direct(const char *name)
{
    struct tly_inside_job job = {.bytes = (uint64_t)M, .traffic = EIGHT_MACHINES};
    load(name);
    tly_inside_finish(&plan);
    assert_int_equal(tly_inside_plan(&machine, &job, 0, &plan), 0);
    checked("direct copies");
}

static void direct_copies_alone(void **state)
{
    choose_direct("nvlink"); /* NVLinks join all pairs in each half; roots are as before */
    for (int g = 0; g < 8; g++) {
        assert_int_equal(plan.way.group[g], g / 4);
        near(1 + plan.way.share[g], g < 2 ? 1 : g < 4 ? 1.5 : 1.25, 1e-12);
    }
    near(plan.seconds, 1.75 * M / (100 * GBIT), 1e-8);
    for (int i = 0; i < plan.links; i++) { /* what a root owns comes over each of its links */
        const struct tly_inside_link *l = &plan.link[i];
        if (l->type == TLY_LINK_NVLINK && l->a / 4 == l->b / 4)
            near(1 + l->bytes, 1 + M * (plan.way.share[l->a] + plan.way.share[l->b]), 1e-8);
    }
    choose_direct("dgx1"); /* a half's GPUs do not reach the other's */
    assert_true(plan.way.base == TLY_GROUP_NVLINK && plan.way.groups == 2);
    choose_direct("pcie"); /* as many bytes as around a ring */
    assert_true(plan.by_rule && plan.way.base == TLY_GROUP_SWITCH);
    near(bytes_on(TLY_LINK_GPU_UP, 0), 7 * M / 4, 1e-8);
    choose_direct("mig");
    assert_int_equal(plan.way.base, TLY_GROUP_SINGLE);
}

static void unequal_parts_and_brute_force_are_left_out(void **state)
{
    struct tly_inside_job job = {.bytes = (uint64_t)M, .traffic = 0};
    load("pcie");
    for (int n = 0; n < machine.nodes; n++)
        machine.node[n].bandwidth = (struct tly_rate){1000 * GBIT, TLY_GIVEN};
    choose(0);
    assert_true(plan.way.copied > 0);
    tly_inside_finish(&plan);
    assert_int_equal(tly_inside_plan(&machine, &job, TLY_MAY_ALL & ~TLY_MAY_COPY, &plan), 0);
    assert_true(plan.way.copied == 0);
    load("nested");
    tly_inside_finish(&plan);
    job.traffic = EIGHT_MACHINES;
    assert_int_equal(tly_inside_plan(&machine, &job, TLY_MAY_ALL & ~TLY_MAY_WEIGH, &plan), 0);
    for (int i = 0; i < plan.options; i++)
        assert_true(plan.option[i].shares != TLY_SHARE_BALANCED);
}

static void better_places(void **state)
{
    struct tly_inside_move move[2];
    struct tly_inside_job job = {.bytes = (uint64_t)M, .traffic = EIGHT_MACHINES};
    load("uneven"); /* the card on a port of its own, as in the paper's first machine */
    choose(EIGHT_MACHINES);
    assert_true(tly_inside_better(&machine, &job, plan.seconds, move) >= 1);
    assert_true(move[0].card && move[0].to == -1);
    near(move[0].seconds, 1.75 * M / (100 * GBIT), 1e-6);
    load("pcie"); /* nothing is better than a card that is busy throughout */
    choose(EIGHT_MACHINES);
    assert_int_equal(tly_inside_better(&machine, &job, plan.seconds, move), 0);
}

/* --- random machines ---------------------------------------------------------------------------------------- */

static uint64_t seed;

static unsigned below(unsigned n)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(seed >> 33) % n;
}

static struct tly_rate some_rate(bool always)
{
    bool known = always || below(4);
    return (struct tly_rate){known ? (1 + below(400)) * GBIT : 0, known ? TLY_FOUND : TLY_UNKNOWN};
}

static void make_random(int most)
{
    memset(&machine, 0, sizeof machine);
    machine.nodes = 1 + (int)below(4);
    for (int i = 0; i < machine.nodes; i++)
        machine.node[i] = (struct tly_node){.number = i, .bandwidth = some_rate(false)};
    machine.switches = (int)below(9);
    for (int i = 0; i < machine.switches; i++) {
        int parent = i && below(3) == 0 ? (int)below((unsigned)i) : -1, deep = 1;
        for (int at = parent; at >= 0; at = machine.sw[at].parent)
            deep++;
        parent = deep > TLY_INSIDE_DEEPEST ? -1 : parent;
        machine.sw[i] = (struct tly_switch){.parent = parent, .up = some_rate(true)};
        machine.sw[i].node = parent >= 0 ? machine.sw[parent].node : (int)below((unsigned)machine.nodes);
    }
    machine.gpus = (int)below((unsigned)most + 1);
    for (int i = 0; i < machine.gpus; i++) {
        int parent = machine.switches && below(4) ? (int)below((unsigned)machine.switches) : -1;
        machine.gpu[i] = (struct tly_gpu){.parent = parent, .slice = -1, .link = some_rate(true)};
        machine.gpu[i].node = parent >= 0 ? machine.sw[parent].node : (int)below((unsigned)machine.nodes);
        machine.gpu[i].peers = below(8) ? UINT64_MAX : (uint64_t)below(1 << 16);
    }
    unsigned links = below(4);
    for (int i = 0; i < machine.gpus; i++) {
        if (links == 1)
            machine.gpu[i].nvswitch = some_rate(below(8) != 0);
        for (int j = 0; j < i && links == 2; j++)
            if (below(3) == 0)
                machine.nvlink[i][j] = machine.nvlink[j][i] = (1 + below(300)) * GBIT;
    }
    machine.cards = (int)below(5);
    for (int i = 0; i < machine.cards; i++) {
        int parent = machine.switches && below(2) ? (int)below((unsigned)machine.switches) : -1;
        machine.card[i] = (struct tly_card){
            .parent = parent, .link = some_rate(true), .rate = some_rate(false), .idle = below(6) == 0};
        machine.card[i].node = parent >= 0 ? machine.sw[parent].node : (int)below((unsigned)machine.nodes);
    }
    machine.socket = some_rate(true);
    machine.across = some_rate(true);
}

static void random_machines_sum(void **state)
{
    char why[256];
    for (int i = 0; i < 600; i++) {
        seed = (uint64_t)i;
        make_random(i % 50 == 0 ? 64 : 12);
        struct tly_inside_job job = {.bytes = 1 + below(1000000),
                                     .traffic = below(3) ? below(200) / 100.0 : 0};
        tly_inside_finish(&plan);
        assert_int_equal(tly_inside_plan(&machine, &job, TLY_MAY_ALL, &plan), 0);
        if (tly_inside_check(&machine, &plan, why, sizeof why) != 0)
            fail_msg("machine %d: %s", i, why);
        tly_inside_finish(&plan);
        assert_int_equal(tly_inside_plan(&machine, &job, below(TLY_MAY_ALL), &plan), 0);
        if (tly_inside_check(&machine, &plan, why, sizeof why) != 0)
            fail_msg("machine %d, restricted: %s", i, why);
        for (int b = 0; b < TLY_GROUP_BASES; b++) { /* and by every way, chosen or not */
            struct tly_inside_way way;
            if (!tly_inside_way(&machine, (enum tly_inside_base)b, (enum tly_inside_shares)below(3), below(2),
                                &way))
                continue;
            way.copied = below(2) ? below(101) / 100.0 : 0;
            tly_inside_finish(&plan);
            assert_int_equal(tly_inside_try(&machine, &job, &way, &plan), 0);
            if (tly_inside_check(&machine, &plan, why, sizeof why) != 0)
                fail_msg("machine %d, base %d: %s", i, b, why);
        }
    }
}

/* p switches of l GPUs at any rates: Eq. 8 and 9 on every link, at any x, and J by the slower of both. */
static void symmetric_machines_follow_the_formulas(void **state)
{
    for (int i = 0; i < 200; i++) {
        seed = 1000 + (uint64_t)i;
        int p = 2 + (int)below(4), l = 2 + (int)below(6);
        double gpu = (1 + below(300)) * GBIT, up = (1 + below(300)) * GBIT, x = below(101) / 100.0;
        memset(&machine, 0, sizeof machine);
        machine.nodes = 1;
        machine.switches = p;
        machine.gpus = p * l;
        for (int s = 0; s < p; s++)
            machine.sw[s] = (struct tly_switch){.parent = -1, .up = {up, TLY_GIVEN}};
        for (int g = 0; g < p * l; g++)
            machine.gpu[g] =
                (struct tly_gpu){.parent = g / l, .slice = -1, .link = {gpu, TLY_GIVEN}, .peers = UINT64_MAX};
        struct tly_inside_way way;
        struct tly_inside_job job = {.bytes = 840000000};
        double m = (double)job.bytes;
        assert_true(tly_inside_way(&machine, TLY_GROUP_SWITCH, TLY_SHARE_EQUAL, false, &way));
        way.copied = x;
        tly_inside_finish(&plan);
        assert_int_equal(tly_inside_try(&machine, &job, &way, &plan), 0);
        checked("a symmetric machine");
        for (int s = 0; s < p; s++)
            near(bytes_on(TLY_LINK_SWITCH_UP, s), eq8(l, x) * m, 1e-7);
        for (int g = 0; g < p * l; g++)
            near(bytes_on(TLY_LINK_GPU_DOWN, g), eq9(l, x) * m, 1e-7);
        near(plan.seconds, m * fmax(eq8(l, x) / up, eq9(l, x) / gpu), 1e-7);
        tly_inside_finish(&plan);
        assert_int_equal(tly_inside_plan(&machine, &job, TLY_MAY_ALL, &plan), 0);
        if (plan.way.base == TLY_GROUP_SWITCH) {
            near(plan.without_copied_seconds, m * time_assisted(l, gpu, up), 1e-7);
            assert_true(fabs(plan.best_copied - best_share(l, gpu, up)) < 1e-5);
        }
    }
}

/* --- the checker, and what is no machine --------------------------------------------------------------------- */

static void spoil(int which)
{
    struct tly_inside_step *s = &plan.step[plan.steps / 2];
    while (!s->links) /* nothing moves where a sum has one part */
        s++;
    switch (which) {
    case 0:
        plan.steps--; /* somebody does not get the sum */
        break;
    case 1:
        s->link[0] ^= 1; /* the wrong way along a link */
        break;
    case 2:
        plan.link[plan.bottleneck].bytes *= 1.001;
        break;
    case 3:
        plan.seconds *= 0.999;
        break;
    case 4:
        s->links--;
        break;
    case 5:
        s->end--;
        break;
    case 6:
        plan.step[0] = plan.step[1]; /* twice the same bytes, others never */
        break;
    case 7:
        s->across = !s->across;
        break;
    case 8:
        for (int i = 0; i < plan.steps; i++)
            if (plan.step[i].verb == TLY_DO_EXCHANGE)
                memmove(&plan.step[i], &plan.step[i + 1], (size_t)(--plan.steps - i) * sizeof plan.step[0]);
        break;
    default:
        plan.link[plan.bottleneck].seconds /= 2;
        break;
    }
}

static void the_checker_finds_what_is_wrong(void **state)
{
    char why[256];
    static const char *const names[] = {"pcie", "nvlink", "hgx", "workstation"};
    for (int i = 0; i < 4; i++)
        for (int which = 0; which < 10; which++) {
            load(names[i]);
            choose(EIGHT_MACHINES);
            spoil(which);
            why[0] = '\0';
            if (tly_inside_check(&machine, &plan, why, sizeof why) == 0)
                fail_msg("%s, spoilt in way %d, passes", names[i], which);
            assert_true(strlen(why) > 10);
        }
}

static int planned(uint64_t bytes, double traffic)
{
    struct tly_inside_job job = {.bytes = bytes, .traffic = traffic};
    tly_inside_finish(&plan);
    return tly_inside_plan(&machine, &job, TLY_MAY_ALL, &plan);
}

static void what_is_no_machine_is_refused(void **state)
{
    load("nested");
    other = machine;
    machine.sw[0].parent = 1;
    machine.sw[1].parent = 0;
    assert_int_equal(planned(1000, 1), -EINVAL);
    machine = other;
    machine.sw[0].parent = 0;
    assert_int_equal(planned(1000, 1), -EINVAL);
    machine = other;
    machine.gpu[3].parent = machine.switches;
    assert_int_equal(planned(1000, 1), -EINVAL);
    machine = other;
    machine.gpu[3].node = 9;
    assert_int_equal(planned(1000, 1), -EINVAL);
    machine = other;
    machine.sw[0].up.bytes = -1;
    assert_int_equal(planned(1000, 1), -EINVAL);
    machine.sw[0].up.bytes = NAN;
    assert_int_equal(planned(1000, 1), -EINVAL);
    machine = other;
    machine.nvlink[1][1] = 1;
    assert_int_equal(planned(1000, 1), -EINVAL);
    machine = other;
    machine.gpus = TLY_MAX_GPUS + 1;
    assert_int_equal(planned(1000, 1), -EINVAL);
    machine = other;
    machine.switches = 12;
    for (int i = 0; i < 12; i++)
        machine.sw[i] = (struct tly_switch){.parent = i - 1};
    machine.gpus = machine.cards = 0;
    assert_int_equal(planned(1000, 1), -E2BIG);
    machine = other;
    assert_int_equal(planned(0, 1), -EINVAL);
    assert_int_equal(planned(1000, -1), -EINVAL);
    assert_int_equal(planned(1000, NAN), -EINVAL);
    assert_int_equal(planned(1000, 1), 0);
    assert_int_equal(planned(1, 1), 0); /* one byte */
    checked("one byte");
}

static int done(void **state)
{
    tly_inside_finish(&plan);
    return 0;
}

static void not_in_jobs(const char *said, int gpus)
{
    struct tly_inside_groups groups;
    char why[160] = "";
    assert_false(tly_inside_groups(&plan, gpus, &groups, why, sizeof why));
    if (!strstr(why, said))
        fail_msg("\"%s\" does not say \"%s\"", why, said);
}

static void in_jobs(int gpus, int each, int owners, const uint8_t owner[])
{
    struct tly_inside_groups groups;
    char why[160];
    assert_true(tly_inside_groups(&plan, gpus, &groups, why, sizeof why));
    assert_int_equal(groups.each, each);
    assert_int_equal(groups.owners, owners);
    assert_memory_equal(groups.owner, owner, (size_t)(gpus / each * owners));
}

static void plan_for_jobs(double traffic)
{
    struct tly_inside_job job = {.bytes = (uint64_t)M, .traffic = traffic};
    tly_inside_finish(&plan);
    assert_int_equal(tly_inside_plan(&machine, &job, 0, &plan), 0);
}

static void what_jobs_carry_out(void **state)
{
    static const uint8_t all[] = {0, 1, 2, 3, 4, 5, 6, 7}, mixed[] = {0, 4, 1, 5, 2, 6, 3, 7},
                         far[] = {2, 3, 2, 3, 4, 5, 6, 7};
    load("pcie");
    plan_for_jobs(EIGHT_MACHINES);
    in_jobs(8, 4, 4, all);
    other = machine;
    tly_machine_pick(&other, mixed, 8,
                     &machine); /* ranks are on GPUs below one switch and the other, in turn */
    plan_for_jobs(EIGHT_MACHINES);
    not_in_jobs("in a row", 8);
    tly_machine_pick(&other, mixed, 2, &machine);
    plan_for_jobs(EIGHT_MACHINES);
    not_in_jobs("each GPU for itself", 2);
    tly_machine_pick(&other, mixed + 4, 4, &machine);
    machine.gpu[1] = machine.gpu[0]; /* 2, 2, 3, 7: three below one switch */
    plan_for_jobs(0);
    not_in_jobs("in a row", 4);
    load("nvlink");
    plan_for_jobs(0);
    in_jobs(8, 4, 4, all);
    plan_for_jobs(EIGHT_MACHINES);
    in_jobs(8, 4, 4, far);
    plan.way.share[2] = 0.6; /* of the first group's two owners */
    plan.way.share[3] = 0.4;
    not_in_jobs("unequal parts", 8);
    tly_inside_finish(&plan);
    plan = (struct tly_inside){.way = {.groups = 2, .group = {0, 0, 0, 1, 1, 1}}};
    not_in_jobs("a group has 3 GPUs", 6);
    plan = (struct tly_inside){.way = {.groups = 1}};
    not_in_jobs("a group has 16 GPUs", 16);
    not_in_jobs("no GPU", 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_jobs_carry_out),
        cmocka_unit_test(the_papers_formulas),
        cmocka_unit_test(the_pcie_machine),
        cmocka_unit_test(the_nvlink_machine),
        cmocka_unit_test(figure_14_pcie),
        cmocka_unit_test(figure_14_nvlink),
        cmocka_unit_test(figure_13),
        cmocka_unit_test(brute_force_where_the_memory_bears_it),
        cmocka_unit_test(symmetric_with_nvlink),
        cmocka_unit_test(ports_without_switches),
        cmocka_unit_test(neither_rule),
        cmocka_unit_test(few_gpus),
        cmocka_unit_test(slices_copy_all_they_have),
        cmocka_unit_test(one_machine_alone),
        cmocka_unit_test(direct_copies_alone),
        cmocka_unit_test(unequal_parts_and_brute_force_are_left_out),
        cmocka_unit_test(better_places),
        cmocka_unit_test(random_machines_sum),
        cmocka_unit_test(symmetric_machines_follow_the_formulas),
        cmocka_unit_test(the_checker_finds_what_is_wrong),
        cmocka_unit_test(what_is_no_machine_is_refused),
    };
    return cmocka_run_group_tests_name("inside", tests, NULL, done);
}
