/* chain_test.c - what stages say of an operation at the same time, and what users hear of a part that a stage has. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "comm/comm.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/path/chain.h"
#include "comm/path/peer.h"
#include "comm/path/stage.h"
#include "ops/call.h"

#include <cmocka.h>

enum { PARTS = 3 };

static int nothing(tally_comm *c, struct tally_op *op)
{
    return 0;
}

static void withdraw(tally_comm *c, struct tally_op *op, bool over)
{
}

static const struct tly_stage idle = {.does = "is held by a test", .begin = nothing, .withdraw = withdraw};

static const struct tly_call whole = {.function = "of the test's"};

static struct {
    tally_comm *c;
    struct tly_peer peer;
    struct tally_op op;
    struct tly_part parts[PARTS];
} f;

static int begin(void **state)
{
    memset(&f, 0, sizeof f);
    f.c = calloc(1, sizeof *f.c);
    assert_non_null(f.c);
    assert_int_equal(tly_loop_init(&f.c->loop), 0);
    tly_inbox_init(&f.c->inbox);
    tly_chain_init(&f.c->inbox.said);
    f.c->peers = &f.peer;
    strcpy(f.peer.name, "a service");
    f.op = (struct tally_op){.comm = f.c,
                             .call = &whole,
                             .parts = f.parts,
                             .part_count = PARTS,
                             .chain.stages = 1 << STAGE_DEVICE | 1 << STAGE_CODEC};
    for (int i = 0; i < PARTS; i++)
        f.parts[i].op = &f.op;
    assert_int_equal(tly_chain_begin(f.c, &f.op), 0);
    return 0;
}

static int end(void **state)
{
    tly_loop_finish(&f.c->loop);
    tly_inbox_finish(&f.c->inbox);
    free(f.c);
    return 0;
}

/* Each is heard, and heard once. */
static void test_two_stages_end_at_once(void **state)
{
    struct tly_list passed, over[STAGE_NET];
    tly_stage_over(&f.op, STAGE_DEVICE);
    tly_stage_over(&f.op, STAGE_CODEC);
    tly_stage_lost(&f.op, 5, "one is lost");
    tly_stage_lost(&f.op, 6, "another one is lost");
    assert_true(tly_chain_take(f.c, &passed, over));
    tly_stage_lost(&f.op, 7, "and another one");
    assert_ptr_equal(tly_chain_next(over, STAGE_CODEC), &f.op);
    assert_ptr_equal(tly_chain_next(over, STAGE_DEVICE), &f.op);
    assert_ptr_equal(tly_chain_next(over, STAGE_TENSOR), &f.op);
    for (int at = 0; at < STAGE_NET; at++)
        assert_null(tly_chain_next(over, at));
    assert_int_equal(f.op.chain.lost_err, 5);
    assert_string_equal(f.op.chain.lost, "one is lost");
    assert_false(tly_chain_take(f.c, &passed, over));
}

/* The end of an operation takes back all that stages have said of it. */
static void test_the_end_takes_back_what_was_said(void **state)
{
    struct tly_list passed, over[STAGE_NET];
    tly_stage_over(&f.op, STAGE_DEVICE);
    tly_stage_lost(&f.op, 5, "one is lost");
    tly_stage_passed(&f.parts[1]);
    assert_true(tly_chain_take(f.c, &passed, over));
    tly_stage_over(&f.op, STAGE_CODEC);
    tly_chain_stop(f.c, &f.op);
    assert_true(tly_list_empty(&passed));
    for (int at = 0; at < STAGE_NET; at++)
        assert_null(tly_chain_next(over, at));
    assert_true(tly_chain_take(f.c, &passed, over)); /* of nothing */
    assert_true(tly_list_empty(&passed));
    assert_null(tly_chain_next(over, STAGE_CODEC));
}

static const char *words(void)
{
    static char text[300];
    tly_op_stage(&f.op, text, sizeof text);
    return text;
}

static void test_words_for_what_a_stage_has(void **state)
{
    f.parts[0].stage = STAGE_CODEC;
    assert_string_equal(words(), "part 1 of 3, which a service sums, is held by a test");
    f.parts[0].stage = STAGE_TENSOR;
    assert_string_equal(words(),
                        "part 1 of 3, which a service sums, waits until all other parts can be sent");
    for (int i = 0; i < PARTS; i++)
        f.parts[i].state = PART_LANDED;
    f.parts[1].homeward = true;
    f.parts[1].stage = STAGE_DEVICE;
    assert_string_equal(words(), "part 2 of 3, which a service sums, has been summed and is held by a test");
    f.parts[1].stage = STAGE_TEAM;
    assert_string_equal(
        words(),
        "other ranks of this machine have sent or asked for their parts of it, which are not answered");
    f.op.chain.stages = 0;
    f.parts[1].state = PART_IDLE;
    f.parts[1].stage = STAGE_TENSOR;
    assert_string_equal(words(),
                        "part 2 of 3, which a service sums, waits until earlier parts have been summed");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_two_stages_end_at_once, begin, end),
        cmocka_unit_test_setup_teardown(test_the_end_takes_back_what_was_said, begin, end),
        cmocka_unit_test_setup_teardown(test_words_for_what_a_stage_has, begin, end),
    };
    tly_stage_register(STAGE_DEVICE, &idle);
    tly_stage_register(STAGE_CODEC, &idle);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
