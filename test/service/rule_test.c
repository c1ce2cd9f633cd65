/* rule_test.c - a rule of the test's own: what it takes to add an operation, without a line elsewhere in src/. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include "job.h"
#include "ops/rule.h"
#include "raw.h"
#include "sum/internal.h"
#include "sum/round.h"
#include "sum/verdict.h"

#include <cmocka.h>

/* --- the rule: exclusive or of all ranks' bytes, and a verdict where they cancel out --------------- */

enum { XOR = TLY_KINDS - 1, LENGTH = RAW_PART };

static const char *check_xor(const struct tly_frame *f, const struct tly_members *who)
{
    return f->length % 8 ? "not a multiple of 8 bytes" : NULL;
}

static void advance_xor(struct tly_job *job, struct tly_round *r, uint32_t from, uint32_t to)
{
    for (uint32_t at = from; at < to; at++) {
        uint8_t all = 0;
        for (uint32_t i = 0; i < r->who->count; i++)
            all ^= r->slots[r->who->rank[i]].data[at];
        r->result[at] = all;
    }
}

static void tell_xor(struct tly_job *job, struct tly_round *r)
{
    bool equal = r->who->count == 2;
    for (uint32_t at = 0; at < r->head.length && equal; at++)
        equal = r->slots[0].data[at] == r->slots[1].data[at];
    if (equal)
        tly_verdict_decide(job, r, EINVAL, "nothing is left");
}

static const struct tly_rule xor
    = {.name = "xor",
       .check = check_xor,
       .length = tly_rule_part_length,
       .advance = advance_xor,
       .tell = tell_xor};

/* --- tests --------------------------------------------------------------------------------------- */

static struct tly_frame push(uint64_t key, uint32_t length)
{
    struct tly_frame f = raw_push(key, length);
    f.kind = XOR;
    f.dtype = TALLY_UINT8;
    return f;
}

static int begin(void **state)
{
    return raw_begin(2, NULL);
}

static int end(void **state)
{
    raw_end();
    return 0;
}

static void test_result(void **state)
{
    static uint8_t data[2][LENGTH];
    for (int i = 0; i < LENGTH; i++) {
        data[0][i] = (uint8_t)i;
        data[1][i] = (uint8_t)(i >> 8 | 1);
    }
    for (int rank = 0; rank < 2; rank++)
        raw_post(rank, push(1, LENGTH), data[rank], LENGTH);
    for (int rank = 0; rank < 2; rank++) {
        raw_until(&raw.rank[rank].results, 1);
        for (int i = 0; i < LENGTH; i++)
            assert_int_equal(raw.rank[rank].result[i], data[0][i] ^ data[1][i]);
    }
}

static void test_verdict(void **state)
{
    static const uint8_t data[64] = {1, 2, 3};
    for (int rank = 0; rank < 2; rank++)
        raw_post(rank, push(1, sizeof data), data, sizeof data);
    for (int rank = 0; rank < 2; rank++)
        raw_until(&raw.rank[rank].verdicts, 1);
    assert_int_equal(raw.rank[0].results + raw.rank[1].results, 0);
}

static void test_size(void **state)
{
    static const uint8_t data[12];
    raw_post(0, push(1, sizeof data), data, sizeof data);
    raw_until(&raw.rank[0].closed, 1);
}

static void test_unknown(void **state)
{
    static const uint8_t data[8];
    struct tly_frame f = push(1, sizeof data);
    f.kind = XOR - 1;
    raw_post(0, f, data, sizeof data);
    raw_until(&raw.rank[0].closed, 1);
}

static void test_register(void **state)
{
    assert_int_equal(tly_rule_register(XOR, &xor, &xor), -EEXIST);
    assert_int_equal(tly_rule_register(TALLY_PUSH_PULL, &xor, &xor), -EEXIST);
    assert_int_equal(tly_rule_register(0, &xor, &xor), -EINVAL);
    assert_int_equal(tly_rule_register(TLY_KINDS, &xor, &xor), -EINVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_result, begin, end),
        cmocka_unit_test_setup_teardown(test_verdict, begin, end),
        cmocka_unit_test_setup_teardown(test_size, begin, end),
        cmocka_unit_test_setup_teardown(test_unknown, begin, end),
        cmocka_unit_test(test_register),
    };
    if (tly_rule_register(XOR, &xor, &xor) != 0)
        return 1;
    return cmocka_run_group_tests_name("kind", tests, NULL, NULL);
}
