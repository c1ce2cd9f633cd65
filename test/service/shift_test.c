/* shift_test.c - an operation of the test's own, from the call to the service: each rank gets its left neighbour's tensor.
 *
 * It takes a table for the rank (struct tly_call) with a cut of its own, and rules for the service, of which both are there
 * already.  No line of src/ knows it. */
#include <errno.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include "comm/comm.h"
#include "comm/group.h"
#include "comm/op.h"
#include "comm/part.h"
#include "comm/parts.h"
#include "comm/submit.h"
#include "job.h"
#include "ops/call.h"
#include "ops/rule.h"

#include <cmocka.h>

enum { SHIFT = TLY_KINDS - 2, RANKS = 3, MOST = 100000 };

/* --- the operation ------------------------------------------------------------------------------- */

struct shift {
    int64_t table[2 * RANKS];
};

static int shift_cut(tally_comm *c, struct tally_op *op)
{
    struct shift *own = tly_op_own(op);
    int n = op->group->size, me = op->group->rank;
    int err = tly_parts_roll_call(c, op);
    if (err)
        return err;
    own->table[(me + 1) % n] = own->table[n + (me + n - 1) % n] = (int64_t)op->count;
    return tly_parts_exchange(c, op, own->table);
}

static const struct tly_call shift_call = {
    .function = "tally_shift",
    .shaped = true,
    .pieces = true,
    .moves = true,
    .own_bytes = sizeof(struct shift),
    .cut = shift_cut};

/* output: as many elements, of the left neighbour. */
static int shift(tally_comm *c, const char *name, const int32_t *input, int32_t *output, size_t count,
                 tally_op **op)
{
    struct tly_request r = {
        .name = name, .kind = SHIFT, .dtype = TALLY_INT32, .input = input, .output = output, .count = count};
    return tly_submit(c, &r, NULL, op);
}

/* --- tests --------------------------------------------------------------------------------------- */

static int32_t x[MOST], y[MOST];

static int32_t gives(int rank, size_t i)
{
    return (int32_t)i * 7 + rank * 100003;
}

static void shift_once(tally_comm *c, int rank, const char *name, size_t count)
{
    tally_op *op;
    for (size_t i = 0; i < count; i++)
        x[i] = gives(rank, i), y[i] = -1;
    CHECK(shift(c, name, x, y, count, &op) == 0);
    CHECK(tally_op_wait(op, -1) == 0);
    for (size_t i = 0; i < count; i++)
        CHECK(y[i] == gives((rank + RANKS - 1) % RANKS, i));
    tally_op_free(op);
}

static int shift_all(int rank, void *arg)
{
    static const size_t counts[] = {0, 1, 1000, MOST};
    tally_comm *c = job_open();
    for (int again = 0; again < 2; again++)
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
            shift_once(c, rank, again ? "again" : NULL, counts[i]);
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_result(void **state)
{
    static const int two[] = {0, 0, 1}, one[] = {0, 0, 0};
    const struct job jobs[] = {{.machine = NULL}, {.machine = two}, {.machine = one}};
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++)
        job_run(&(struct job){.ranks = RANKS,
                              .machine = jobs[i].machine,
                              .main = shift_all,
                              .settings = {"TALLY_PART_BYTES=16K"}});
}

static int disagree(int rank, void *arg)
{
    tally_comm *c = job_open();
    tally_op *op;
    CHECK(shift(c, "w", x, y, rank == 1 ? 20 : 10, &op) == 0);
    CHECK(tally_op_wait(op, -1) == -EINVAL);
    CHECK_HOLDS(tally_op_error(op), "tally_shift int32 [10] on ranks 0, 2");
    CHECK_HOLDS(tally_op_error(op), "[20] on rank 1");
    tally_op_free(op);
    shift_once(c, rank, "w", 10);
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_disagreement(void **state)
{
    job_run(&(struct job){.ranks = RANKS, .main = disagree});
}

static void test_register(void **state)
{
    assert_int_equal(tly_call_register(SHIFT, &shift_call), -EEXIST);
    assert_int_equal(tly_call_register(TALLY_PUSH_PULL, &shift_call), -EEXIST);
    assert_int_equal(tly_call_register(0, &shift_call), -EINVAL);
    assert_int_equal(tly_call_register(TLY_KINDS, &shift_call), -EINVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_result),
        cmocka_unit_test(test_disagreement),
        cmocka_unit_test(test_register),
    };
    if (tly_call_register(SHIFT, &shift_call) != 0 ||
        tly_rule_register(SHIFT, &tly_rule_meet, &tly_rule_root) != 0)
        return 1;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
