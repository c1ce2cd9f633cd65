/* tensor_test.c - by which priority a list's tensors are queued, and summed by a team. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/comm.h"
#include "comm/epoch/epoch.h"
#include "comm/op/op.h"
#include "comm/op/tensor.h"
#include "comm/path/peer.h"
#include "comm/path/stage.h"
#include "ops/call.h"

#include <cmocka.h>

enum { MOST = 64 };

static tally_comm *c;
static char text[MOST][8];
static const char *names[MOST];
static bool backwards; /* the list of the last one submitted */

static int begin(void **state)
{
    c = calloc(1, sizeof *c);
    assert_non_null(c);
    for (int i = 0; i < MOST; i++) {
        snprintf(text[i], sizeof text[i], "t%d", i);
        names[i] = text[i];
    }
    return 0;
}

static int end(void **state)
{
    tly_names_finish(&c->names);
    free(c);
    return 0;
}

/* Submits this tensor.  Returns its urgency. */
static int32_t submit(int i, int32_t priority)
{
    struct tally_op op = {.tensor = tly_tensor_get(c, tly_comm_all(c), TALLY_PUSH_PULL, 0, names[i]),
                          .priority = priority};
    assert_non_null(op.tensor);
    backwards = tly_tensor_line_up(&op);
    return op.urgency;
}

static void plan(int count, const uint64_t bytes[])
{
    assert_int_equal(tly_tensor_plan(c, TALLY_PUSH_PULL, 0, (size_t)count, names, bytes), 0);
}

/* From the second step on all priorities are known. */
static void test_a_block_has_one_urgency(void **state)
{
    uint64_t bytes[MOST];
    for (int i = 0; i < MOST; i++)
        bytes[i] = 1000;
    plan(MOST, bytes);
    for (int i = 0; i < MOST; i++)
        submit(i, i + 1);
    for (int i = 0; i < MOST; i++) /* sixteen blocks of four */
        assert_int_equal(submit(i, i + 1), i / 4 * 4 + 4);
    assert_true(backwards);
}

static void test_a_large_tensor_is_a_block(void **state)
{
    /* The first one is half of the list; each of the next two begins in another sixteenth. */
    static const uint64_t bytes[] = {8000, 1000, 6000, 500, 500};
    plan(5, bytes);
    for (int step = 0; step < 2; step++)
        for (int i = 0; i < 5; i++) {
            int32_t urgency = submit(i, i - 10);
            if (step)
                assert_int_equal(urgency, i < 3 ? i - 10 : -6); /* the last two lie in one */
        }
}

/* Their sum is no number of bytes, and neither is it anybody's memory. */
static void test_sizes_without_bounds(void **state)
{
    static const uint64_t bytes[] = {UINT64_MAX, UINT64_MAX, 1};
    plan(3, bytes);
    for (int step = 0; step < 2; step++)
        for (int i = 0; i < 3; i++)
            assert_int_equal(submit(i, i + 1), i + 1);
}

/* What a rank refuses has the priority that it had before. */
static void test_a_refusal_says_nothing_of_priorities(void **state)
{
    static const uint64_t bytes[] = {10, 10, 1000};
    plan(3, bytes);
    for (int i = 0; i < 3; i++)
        submit(i, i - 3);
    struct tally_op mark = {.tensor = tly_tensor_get(c, tly_comm_all(c), TALLY_PUSH_PULL, 0, names[0]),
                            .mark = true};
    assert_true(tly_tensor_line_up(&mark));
    assert_int_equal(submit(1, -2), -1);
}

static void test_a_team_sums_by_urgency(void **state)
{
    static const uint64_t bytes[] = {10, 10, 1000};
    struct tly_cut_piece piece = {.length = 10};
    struct tly_cut cut = {.pieces = &piece, .count = 1};
    struct tly_carriers carriers = {
        .lists = 1, .machines = 1, .rank = &(uint32_t){0}, .number = &(uint32_t){0}};
    struct tally_group all = {.carriers = &carriers, .size = 1};
    uint64_t incarnation = 0;
    struct tly_epoch epoch = {.services = 1, .incarnation = &incarnation};
    struct tly_peer peer = {0};
    plan(3, bytes);
    for (int i = 0; i < 3; i++)
        submit(i, i - 3);
    c->peers = &peer;
    struct tally_op op = {.comm = c,
                          .call = &tly_call_push_pull,
                          .group = &all,
                          .tensor = tly_tensor_get(c, tly_comm_all(c), TALLY_PUSH_PULL, 0, names[0]),
                          .priority = -3,
                          .epoch = &epoch};
    tly_list_init(&op.shared.op.pieces);
    assert_int_equal(tly_stage_team.cut(c, &op, &cut), 0);
    assert_int_equal(op.urgency, -1);
    assert_int_equal(op.shared.op.priority, -1);
    free(op.parts);
}

/* Machines have as much on their way, however many ranks they have. */
static void test_a_carrier_has_the_credit_of_its_lists(void **state)
{
    static const uint64_t bytes[] = {10};
    static uint32_t ranks[] = {0, 2, 1,
                               2, 0, 2}; /* of two machines: the rank of the second is in all lists */
    static uint32_t numbers[] = {1, 2, 3};
    struct tly_cut_piece piece = {.length = 10};
    struct tly_cut cut = {.pieces = &piece, .count = 1, .credit = 90};
    struct tly_carriers carriers = {.lists = 3, .machines = 2, .rank = ranks, .number = numbers};
    struct tally_group all = {.carriers = &carriers, .size = 3};
    uint64_t incarnation = 0;
    struct tly_epoch epoch = {.services = 1, .incarnation = &incarnation, .part_bytes = 1};
    struct tly_peer peer = {0};
    plan(1, bytes);
    c->peers = &peer;
    for (int told = 0; told < 2; told++) {
        struct tally_op op = {.comm = c,
                              .call = &tly_call_push_pull,
                              .group = &all,
                              .tensor = tly_tensor_get(c, tly_comm_all(c), TALLY_PUSH_PULL, 0, names[0]),
                              .epoch = &epoch};
        c->params.credit_bytes = told ? 90 : 0;
        tly_list_init(&op.shared.op.pieces);
        assert_int_equal(tly_stage_team.cut(c, &op, &cut), 0);
        assert_int_equal(op.credit, told ? 90 : 60); /* two of three lists */
        free(op.parts);
    }
    c->params.credit_bytes = 0;
}

static void test_no_list_and_no_order_change_nothing(void **state)
{
    static const uint64_t bytes[] = {10, 10, 0, 10}, none[] = {0, 0};
    assert_int_equal(submit(9, 7), 7); /* in no list */
    plan(4, bytes);
    for (int step = 0; step < 2; step++)
        for (int i = 0; i < 4; i++)
            assert_int_equal(submit(i, 3), 3); /* all alike */
    for (int i = 0; i < 4; i++)
        submit(i, -i);
    for (int i = 0; i < 4; i++)
        assert_int_equal(submit(i, -i), -i); /* forwards: as in the caller's order */
    assert_false(backwards);
    plan(2, none);
    submit(0, 1);
    submit(1, 2);
    assert_int_equal(submit(0, 1), 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_block_has_one_urgency, begin, end),
        cmocka_unit_test_setup_teardown(test_a_large_tensor_is_a_block, begin, end),
        cmocka_unit_test_setup_teardown(test_sizes_without_bounds, begin, end),
        cmocka_unit_test_setup_teardown(test_a_refusal_says_nothing_of_priorities, begin, end),
        cmocka_unit_test_setup_teardown(test_a_team_sums_by_urgency, begin, end),
        cmocka_unit_test_setup_teardown(test_a_carrier_has_the_credit_of_its_lists, begin, end),
        cmocka_unit_test_setup_teardown(test_no_list_and_no_order_change_nothing, begin, end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
