/* cut_test.c - lengths of parts, and credits, beside what cut.h promises. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "plan/cut.h"

#include <cmocka.h>

enum { PACKET = 60 << 10 };

static void test_part_bytes(void **state)
{
    assert_int_equal(tly_plan_part_bytes(0), 512 << 10);
    assert_int_equal(tly_plan_part_bytes(1), 32 << 10);
    assert_int_equal(tly_plan_part_bytes(1e9 / 8), 60 << 10);
    assert_int_equal(tly_plan_part_bytes(2.5e9 / 8), 152 << 10);
    assert_int_equal(tly_plan_part_bytes(100e9 / 8), 512 << 10);
}

/* 16 parts of each rank and a result fit in the least memory of a service, but for parts of one unit. */
static void test_part_most(void **state)
{
    enum { KB = 1 << 10 };
    assert_int_equal(tly_plan_part_most(60 * KB, UINT64_MAX, 512), 512 * KB);
    assert_int_equal(tly_plan_part_most(60 * KB, 16 * 5 * 512 * KB, 4), 512 * KB);
    assert_int_equal(tly_plan_part_most(60 * KB, 16 * 5 * 512 * KB - 1, 4), 256 * KB);
    assert_int_equal(tly_plan_part_most(60 * KB, 16 * 5 * 64 * KB, 4), 64 * KB);
    assert_int_equal(tly_plan_part_most(60 * KB, 1 << 20, 4), 60 * KB);
    assert_int_equal(tly_plan_part_most(512 * KB, 1, 4), 512 * KB);
}

/* The longest part follows the list: what nothing makes good stays below 1% by tly_plan_fewest's formula, and what stands before
 * an urgent tensor within its bound, but for lists whose parts are no longer than the unit.  It is no shorter than that. */
static void test_longest_parts(void **state)
{
    static const struct {
        uint32_t fewest;
        double lost; /* c */
    } kinds[] = {{TLY_FEW, 1 / 6.0}, {TLY_MANY, 1.3}, {TLY_BROADCAST_MANY, 1.3}, {TLY_SPARES, 2.6}};
    for (size_t i = 0; i < 2 * sizeof kinds / sizeof *kinds; i++)
        for (int active = 1; active <= 64; active *= 2)
            for (uint32_t unit = 4096; unit <= 512 << 10; unit *= 2)
                for (uint64_t bytes = 4096; bytes <= 1ull << 33; bytes *= 2) {
                    struct tly_cutting c = {unit, 512 << 10, active, i & 1, kinds[i / 2].fewest};
                    struct tly_stretch s = {.bytes = bytes};
                    uint64_t longest = tly_plan_largest_part(&s, &c);
                    double lost = kinds[i / 2].lost * active * (double)longest / (double)bytes;
                    assert_true(longest <= c.most && longest % 64 == 0);
                    assert_true(longest <= unit || lost <= 0.0105);
                    uint64_t most = bytes / (unsigned)active / c.fewest, credit = bytes / 32;
                    credit = credit > 16 * unit ? credit : 16 * unit;
                    assert_true(longest <= unit || tly_plan_ahead(active, i & 1) * longest <= credit);
                    bool packets = longest >= unit && longest >= PACKET && longest < 4 * PACKET;
                    uint64_t more = longest + (packets ? PACKET : 64);
                    assert_true(!packets || longest == unit || longest % PACKET == 0);
                    assert_true(longest == c.most || more > most ||
                                tly_plan_ahead(active, i & 1) * more > credit);
                    uint64_t few = bytes / (unsigned)active / TLY_FEW;
                    assert_true(longest <= most || longest <= few || longest <= unit / 4 + 64);
                    assert_true(longest >= unit || longest == 2 * (unit / 8) ||
                                longest + 64 > bytes / (unsigned)active / TLY_FEW);
                }
}

/* Beyond a unit parts are whole packets, if few, and no part is longer for it. */
static void test_parts_of_packets(void **state)
{
    static const struct {
        uint32_t unit, bytes, longest; /* KB; bytes: a sixteenth of the tensor */
    } cases[] = {{124, 64, 64},  {124, 62, 62},  {32, 64, 60},    {61, 64, 61},   {32, 119, 60},
                 {60, 119, 60},  {60, 120, 120}, {61, 120, 120},  {61, 119, 61},  {32, 239, 180},
                 {60, 240, 240}, {60, 243, 243}, {200, 239, 200}, {200, 199, 199}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct tly_cutting c = {cases[i].unit << 10, 512 << 10, 1, false, TLY_FEW};
        struct tly_stretch s = {.bytes = 16 * (uint64_t)cases[i].bytes << 10};
        assert_int_equal(tly_plan_largest_part(&s, &c) >> 10, cases[i].longest);
    }
}

static void test_broadcasts(void **state)
{
    assert_int_equal(tly_plan_broadcast_fewest(0, 3), 32);
    assert_int_equal(tly_plan_broadcast_fewest(3 * 40 * PACKET, 3), 40); /* each part is a packet */
    assert_int_equal(tly_plan_broadcast_fewest(1ull << 40, 3), 128);
}

/* Parts cover a tensor, keep their bounds, and at both ends of the list are a small share of what is left. */
static void check_parts(const struct tly_stretch *s, const struct tly_cutting *c)
{
    uint32_t least = c->unit / 8 < 128 ? 64 : c->unit / 8;
    uint64_t at = 0, limit = tly_plan_largest_part(s, c), far = 2 * (uint64_t)c->active * limit;
    do {
        uint64_t left = s->bytes - at, done = s->before + at, to_do = left + s->behind;
        uint32_t n = tly_plan_part(s, at, c);
        assert_true(n <= limit && n <= left);
        assert_true(n > 0 || s->bytes == 0);
        assert_true(n == left || (n % 64 == 0 && n >= least));
        assert_true(n < 2 * least || n == left ||
                    n <= (done < to_do ? done : to_do) / (2 * (unsigned)c->active));
        if (done >= far && to_do >= far)
            assert_true(n + 128 > limit || n == left);
        at += n;
    } while (at < s->bytes);
    assert_true(at == s->bytes);
}

static void test_parts(void **state)
{
    static const uint32_t units[] = {64, 4096, 98304, 524288}, fewest[] = {TLY_FEW, TLY_SPARES};
    static const uint64_t sizes[] = {0, 1, 63, 64, 4095, 4096, 100000, 1 << 20, (1 << 24) + 4, 1ull << 33};
    static const uint64_t others[] = {0, 1000, 1 << 20, 1ull << 34};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes * 4 * 16; i++)
        for (int active = 1; active <= 64; active *= 4)
            for (int j = 0; j < 2; j++) {
                struct tly_stretch s = {sizes[i >> 6], others[i >> 2 & 3], others[i >> 4 & 3]};
                struct tly_cutting c = {units[i & 3], units[i & 3] << (j == 1 ? 3 : 0), active, false,
                                        fewest[j]};
                if (s.bytes / c.unit <= 1 << 20)
                    check_parts(&s, &c);
            }
}

/* Of few services two parts each are too few for an all-reduce; all else has them. */
static void test_credit(void **state)
{
    for (int active = 1; active <= 64; active++) {
        assert_int_equal(tly_plan_credit(active, 4096), 2 * active * 4096);
        assert_int_equal(tly_plan_sum_credit(active, false, 4096, 4096),
                         (active < 6 ? 12 : 2 * active) * 4096);
        assert_int_equal(tly_plan_sum_credit(active, false, 4096, 8192),
                         (active < 6 ? 12 : 2 * active) * 4096);
        assert_int_equal(tly_plan_sum_credit(active, false, 8192, 4096),
                         (active < 3 ? 6 : 2 * active) * 8192);
        assert_int_equal(tly_plan_sum_credit(active, true, 4096, 4096),
                         (active < 4 ? 12 : 3 * active) * 4096);
    }
}

/* Ranks of one machine share its card: together they have as much on their way as one rank, or 12 units each. */
static void test_credit_of_lists(void **state)
{
    const uint64_t unit = 32 << 10;
    assert_int_equal(tly_plan_list_credit(2 << 20, 1, unit), 2 << 20);
    assert_int_equal(tly_plan_list_credit(2 << 20, 2, unit), 1 << 20);
    assert_int_equal(tly_plan_list_credit(2 << 20, 8, unit), 12 * unit);
    assert_int_equal(tly_plan_list_credit(12 * unit, 8, unit), 12 * unit);
    assert_int_equal(tly_plan_list_credit(5 * unit, 8, unit), 5 * unit);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_part_bytes),    cmocka_unit_test(test_part_most),
        cmocka_unit_test(test_longest_parts), cmocka_unit_test(test_parts_of_packets),
        cmocka_unit_test(test_broadcasts),    cmocka_unit_test(test_parts),
        cmocka_unit_test(test_credit),        cmocka_unit_test(test_credit_of_lists),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
