/* flow_test.c - plans in virtual time: what formulas give for simple machines, and the machines of test/topo/machines. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "inside/flow.h"
#include "test/topo/machine_files.h"

static struct tly_machine machine;
static struct tly_inside plan;

static void choose(const char *name, uint64_t bytes, double traffic)
{
    char why[256] = "";
    struct tly_inside_job job = {.bytes = bytes, .traffic = traffic};
    if (name && load_machine(name, &machine, why, sizeof why) != 0)
        fail_msg("%s: %s", name, why);
    tly_inside_finish(&plan);
    assert_int_equal(tly_inside_plan(&machine, &job, 0, &plan), 0);
}

static double flow(uint64_t piece, double delay, int most)
{
    struct tly_flow_job job = {.piece = piece, .delay = delay, .most = most};
    struct tly_flow f;
    assert_int_equal(tly_inside_flow(&machine, &plan, &job, &f), 0);
    return f.seconds;
}

static void near(double a, double b)
{
    if (!(fabs(a - b) <= 1e-6 * b))
        fail_msg("%.12g is not %.12g", a, b);
}

/* GPUs with a port each: to the host and, once all are there, back. */
static void make_ports(int gpus)
{
    memset(&machine, 0, sizeof machine);
    machine.nodes = 1;
    machine.gpus = gpus;
    for (int i = 0; i < gpus; i++)
        machine.gpu[i] = (struct tly_gpu){.parent = -1, .slice = -1, .link = {1e9, TLY_GIVEN}};
}

static void formulas(void **state)
{
    make_ports(2);
    choose(NULL, 1000000, 0);
    near(plan.seconds, 1e-3);
    near(flow(1000000, 0, 1), 2e-3);               /* one piece: there and back */
    near(flow(100000, 0, 1), 1e-3 + 1e-4);         /* ten pieces: both ways at the same time */
    near(flow(1000000, 1e-3, 1), 2e-3 + 4 * 1e-3); /* in, sum, back, out */
    near(flow(100000, 1e-4, 1), 10 * 2e-4 + 4e-4); /* a step at a time: each has its delay */
    machine.gpu[1].link.bytes = 5e8;               /* the slower one holds up both */
    choose(NULL, 1000000, 0);
    near(flow(100000, 0, 1), 2e-3 + 2e-4);
}

/* Pieces share a link fairly, and no link carries more than it can. */
static void a_switch_between(void **state)
{
    make_ports(4);
    machine.switches = 1;
    machine.sw[0] = (struct tly_switch){.parent = -1, .up = {2e9, TLY_GIVEN}};
    for (int i = 0; i < 4; i++)
        machine.gpu[i].parent = 0;
    choose(NULL, 1000000, 0);
    near(plan.seconds, 2e-3); /* four over a link of two */
    near(flow(100000, 0, 1), 2e-3 + 2e-4);
}

/* An only GPU's input goes out in four copies, and the result comes in as one.  Each has its delay once that before it has ended. */
static void copies_of_a_lane_wait_for_each_other(void **state)
{
    const double delay = 1e-4;
    make_ports(1);
    machine.cards = 1;
    machine.card[0] = (struct tly_card){.parent = -1, .rate = {1e15, TLY_GIVEN}};
    choose(NULL, 1 << 20, 1);
    near(flow(1 << 20, delay, 4), 2 * (1 << 20) * 1e-9 + 5 * delay);
}

/* The share of the forecast at 25 MB, in operations of 8 MB. */
static double flow_of_one(uint64_t piece)
{
    struct tly_flow_job job = {.piece = piece, .operation = 8 << 20, .delay = 2e-6, .most = 4};
    struct tly_flow f;
    assert_int_equal(tly_inside_flow(&machine, &plan, &job, &f), 0);
    return plan.seconds / f.seconds;
}

/* A machine alone (its network takes no time), and beside another one, over PCIe and 100 Gbit/s.  If operations were one piece each,
 * of a quarter, the last quarter would begin to come in when all had gone out: 5 / 4 of the forecast. */
static void one_gpu_copies_both_ways(void **state)
{
    const double pcie = 105e9 / 8, network = 100e9 / 8;
    for (int machines = 1; machines <= 2; machines++) {
        make_ports(1);
        machine.gpu[0].link.bytes = pcie;
        machine.cards = 1;
        machine.card[0] =
            (struct tly_card){.parent = -1, .rate = {machines == 1 ? 1e15 : network, TLY_GIVEN}};
        choose(NULL, 25 << 20, 1);
        near(plan.seconds, (25 << 20) / (machines == 1 ? pcie : network));
        double whole = flow_of_one(8 << 20), share = flow_of_one(512 << 10), fine = flow_of_one(256 << 10);
        print_message("25 MB, %d: %.1f%% of the forecast, %.1f%%, whole %.1f%%\n", machines, 100 * share,
                      100 * fine, 100 * whole);
        assert_true(whole <= 0.8 && share >= 0.85 && fine >= 0.9 && fine <= 1);
    }
}

/* 100 MB on the paper's two machines, and one with NVSwitches: 8 worker machines, and pieces as jobs have them (local/gpus.c).  Pauses
 * of the bus cost little over PCIe and NVLinks. */
static void near_the_forecast(void **state)
{
    static const char *const names[] = {"pcie", "nvlink", "hgx"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        choose(names[i], 100000000, 1.75);
        double share = plan.seconds / flow(256 << 10, 0, 4), paused = plan.seconds / flow(256 << 10, 2e-6, 4);
        print_message("%s: %.1f%% of the forecast, %.1f%%\n", names[i], 100 * share, 100 * paused);
        assert_true(share >= 0.95 && share <= 1);
        assert_true(paused >= (i < 2 ? 0.95 : 0.8));
    }
}

static void every_machine_ends(void **state)
{
    static const char *const names[] = {"dgx1", "hgx",  "mig",   "nested", "none",        "nvlink",
                                        "one",  "pcie", "ports", "uneven", "workstation", "virtual"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        for (int alone = 0; alone < 2; alone++) {
            choose(names[i], 10000001, alone ? 0 : 1.75);
            double time = flow(1 << 20, 1e-6, 4);
            assert_true(time >= plan.seconds && time < 3 * plan.seconds + 1e-2);
        }
}

static void what_is_refused(void **state)
{
    struct tly_inside_job job = {.bytes = 100000000};
    struct tly_flow_job small = {.piece = 1, .most = 1}, none = {.piece = 0, .most = 1},
                        ok = {.piece = 1 << 20, .most = 1};
    struct tly_flow f;
    choose("pcie", 100000000, 0);
    assert_int_equal(tly_inside_flow(&machine, &plan, &small, &f), -E2BIG);
    assert_int_equal(tly_inside_flow(&machine, &plan, &none, &f), -EINVAL);
    tly_inside_finish(&plan);
    assert_int_equal(tly_inside_plan(&machine, &job, TLY_MAY_ALL, &plan), 0);
    assert_int_equal(tly_inside_flow(&machine, &plan, &ok, &f), -EINVAL); /* around rings */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(formulas),
        cmocka_unit_test(a_switch_between),
        cmocka_unit_test(copies_of_a_lane_wait_for_each_other),
        cmocka_unit_test(one_gpu_copies_both_ways),
        cmocka_unit_test(near_the_forecast),
        cmocka_unit_test(every_machine_ends),
        cmocka_unit_test(what_is_refused),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    tly_inside_finish(&plan);
    return failed;
}
