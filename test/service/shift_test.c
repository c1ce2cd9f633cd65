/* shift_test.c - an operation of the test's own, from the call to the service: each rank gets its left neighbour's tensor.
 *
 * It takes a table for the rank (struct tly_call) with a cut of its own, rules for the service, of which both are there
 * already, and for ranks that share memory one function and one line (struct tly_local_call).  No line of src/ knows it. */
#include <errno.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include "comm/comm.h"
#include "comm/op/group.h"
#include "comm/op/names.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/path/parts.h"
#include "comm/submit.h"
#include "job.h"
#include "later.h"
#include "ops/call.h"
#include "ops/local.h"
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

static void shift_takes(const struct tly_local_view *v, struct tly_local_take take[])
{
    uint32_t left = (v->me + v->ranks - 1) % v->ranks;
    take[left].bytes = v->given[left];
}

static const struct tly_local_call shift_local = {.takes = shift_takes};

static const struct tly_call shift_call = {
    .function = "tally_shift",
    .collective = "shift",
    .local = &shift_local,
    .shaped = true,
    .pieces = true,
    .moves = true,
    .own_bytes = sizeof(struct shift),
    .cut = shift_cut};

/* output: as many elements, of the left neighbour. */
static int shift(tally_comm *c, const char *name, const int64_t *input, int64_t *output, size_t count,
                 tally_op **op)
{
    struct tly_request r = {
        .name = name, .kind = SHIFT, .dtype = TALLY_INT64, .input = input, .output = output, .count = count};
    return tly_submit(c, &r, NULL, op);
}

/* --- tests --------------------------------------------------------------------------------------- */

static int64_t x[MOST], y[MOST];

static int64_t gives(int rank, size_t i)
{
    return (int64_t)i * 7 + rank * 100003;
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

/* Through the services, or with the others of one machine in shared memory. */
enum { SERVICES, SHARED, UNREACHABLE /* and none reads another one's private memory */ };

static const int one_machine[] = {0, 0, 0};

static int shift_all(int rank, void *arg)
{
    static const size_t counts[] = {0, 1, 1000, MOST};
    const int *route = arg;
    enum { ROUNDS = 3, COUNTS = sizeof counts / sizeof *counts };
    if (*route == UNREACHABLE)
        job_forbid_reaching();
    tally_comm *c = job_open();
    for (int again = 0; again < ROUNDS; again++)
        for (size_t i = 0; i < COUNTS; i++)
            shift_once(c, rank, again ? "again" : NULL, counts[i]);
    CHECK(tly_names_engine_ops(&c->names) == (*route == SERVICES ? 0 : ROUNDS * COUNTS));
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_result(void **state)
{
    static const int two_machines[] = {0, 0, 1};
    static int services = SERVICES, shared = SHARED, unreachable = UNREACHABLE;
    const struct job jobs[] = {
        {.machine = NULL, .arg = &services},
        {.machine = two_machines, .arg = &services},
        {.machine = one_machine, .arg = &services, .settings = {NULL, "TALLY_LOCAL=off"}},
        {.machine = one_machine, .arg = &shared},
        {.machine = one_machine, .arg = &unreachable}};
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++)
        job_run(&(struct job){.ranks = RANKS,
                              .machine = jobs[i].machine,
                              .main = shift_all,
                              .arg = jobs[i].arg,
                              .settings = {"TALLY_PART_BYTES=16K", jobs[i].settings[1]}});
}

static int disagree(int rank, void *arg)
{
    tally_comm *c = job_open();
    tally_op *op;
    CHECK(shift(c, "w", x, y, rank == 1 ? 20 : 10, &op) == 0);
    CHECK(tally_op_wait(op, -1) == -EINVAL);
    CHECK_HOLDS(tally_op_error(op), "tally_shift int64 [10] on ranks 0, 2");
    CHECK_HOLDS(tally_op_error(op), "[20] on rank 1");
    tally_op_free(op);
    shift_once(c, rank, "w", 10);
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

/* Each rank that has a stage prepares each part in memory of its own, in whichever way the operation goes then. */
static int shift_with_stage(int rank, void *arg)
{
    const int *only = arg;
    later_use(*only < 0 || *only == rank, false);
    atomic_store(&later_device.suits_all, true);
    tally_comm *c = job_open();
    for (int again = 0; again < 3; again++) {
        shift_once(c, rank, again ? "again" : NULL, 1000);
        shift_once(c, rank, "large", MOST);
    }
    job_barrier(c);
    CHECK(tally_comm_close(c) == 0);
    CHECK(later_device.begun == later_device.ended && !later_device.count);
    return 0;
}

static void test_stage(void **state)
{
    static int all = -1, one = 1;
    for (int i = 0; i < 4; i++)
        job_run(&(struct job){.ranks = RANKS,
                              .machine = i & 1 ? one_machine : NULL,
                              .main = shift_with_stage,
                              .arg = i & 2 ? &one : &all,
                              .settings = {"TALLY_PART_BYTES=16K"}});
}

static void test_disagreement(void **state)
{
    job_run(&(struct job){.ranks = RANKS, .main = disagree});
    job_run(&(struct job){.ranks = RANKS, .machine = one_machine, .main = disagree});
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
        cmocka_unit_test(test_stage),
        cmocka_unit_test(test_disagreement),
        cmocka_unit_test(test_register),
    };
    if (tly_call_register(SHIFT, &shift_call) != 0 ||
        tly_rule_register(SHIFT, &tly_rule_meet, &tly_rule_root) != 0)
        return 1;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
