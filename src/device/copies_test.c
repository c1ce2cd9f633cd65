/* copies_test.c - copies of inputs and results: how long they are, and results that land and are copied in any order. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "device/copies.h"

enum { OPERATIONS = 3, PARTS = 40, KB = 1 << 10, MB = 1 << 20 };

static uint64_t seed;

static unsigned below(unsigned n)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(seed >> 33) % n;
}

static void inputs(void **state)
{
    assert_int_equal(tly_copies_bytes(0), 64 * KB);
    assert_int_equal(tly_copies_bytes(64 * KB), 64 * KB);
    assert_int_equal(tly_copies_bytes(MB), 256 * KB);
    assert_int_equal(tly_copies_bytes(8 * MB), 768 * KB); /* 11 copies */
    assert_int_equal(tly_copies_bytes(64 * MB), 2 * MB);
    assert_true(tly_copies_bytes(1ull << 40) <= 300 * MB);
}

/* Parts of so many bytes in a row. */
static void make(struct tly_copies *c, struct tly_copies_part *part, uint32_t bytes, uint64_t most)
{
    *c = (struct tly_copies){.most = most, .parts = PARTS, .part = part};
    for (uint32_t i = 0; i < PARTS; i++)
        part[i] = (struct tly_copies_part){.at = (uint64_t)i * bytes, .bytes = bytes};
    tly_list_init(&c->node);
}

static void expect(struct tly_copies_lane *lane, const struct tly_copies *of, uint32_t first, uint32_t count)
{
    struct tly_copies_run run;
    assert_true(tly_copies_next(lane, &run));
    assert_true(run.of == of);
    assert_int_equal(run.first, first);
    assert_int_equal(run.count, count);
    assert_int_equal(run.at, of->part[first].at);
    assert_int_equal(run.bytes, count * of->part[first].bytes);
}

/* Two parts of 512 KB of an input whose copies have 768 KB: each copy costs a pause. */
static void copies_of_results_are_as_long_as_those_of_inputs(void **state)
{
    static struct tly_copies_part part[PARTS];
    struct tly_copies_lane lane;
    struct tly_copies c;
    tly_copies_init(&lane);
    make(&c, part, 512 * KB, tly_copies_bytes(8 * MB));
    for (uint32_t i = 0; i < 5; i++)
        tly_copies_landed(&lane, &c, i);
    expect(&lane, &c, 0, 2);
    expect(&lane, &c, 2, 2);
    expect(&lane, &c, 4, 1);
}

/* While the lane has enough, results join, up to the longest copy. */
static void results_join(void **state)
{
    static struct tly_copies_part part[2][PARTS];
    struct tly_copies_lane lane;
    struct tly_copies c[2];
    struct tly_copies_run run;
    tly_copies_init(&lane);
    make(&c[0], part[0], 100, 1000);
    make(&c[1], part[1], 1500, 1000); /* a part is not cut */
    for (uint32_t i = 0; i < TLY_COPIES_MOST; i++) {
        tly_copies_landed(&lane, &c[0], 2 * i);
        expect(&lane, &c[0], 2 * i, 1);
    }
    tly_copies_landed(&lane, &c[1], 1);
    tly_copies_landed(&lane, &c[1], 0);
    for (uint32_t i = 38; i > 16; i--)
        tly_copies_landed(&lane, &c[0], i);
    assert_false(tly_copies_next(&lane, &run));
    for (int i = 0; i < TLY_COPIES_MOST; i++)
        tly_copies_end(&lane);
    expect(&lane, &c[1], 0, 1); /* its results have waited for longer */
    expect(&lane, &c[1], 1, 1);
    expect(&lane, &c[0], 17, 10);
    expect(&lane, &c[0], 27, 10);
    assert_false(tly_copies_next(&lane, &run));
    tly_copies_end(&lane);
    tly_copies_landed(&lane, &c[0], 39);
    tly_copies_landed(&lane, &c[0], 0);
    expect(&lane, &c[0], 0, 1); /* not beside the others */
    tly_copies_end(&lane);
    tly_copies_drop(&c[0]);
    assert_false(tly_copies_next(&lane, &run));
}

/* What lies apart goes apart. */
static void gaps(void **state)
{
    static struct tly_copies_part part[PARTS];
    struct tly_copies_lane lane;
    struct tly_copies c;
    tly_copies_init(&lane);
    make(&c, part, 100, 1000);
    for (uint32_t i = 3; i < PARTS; i++)
        part[i].at += 64;
    for (uint32_t i = 0; i < 6; i++)
        tly_copies_landed(&lane, &c, i);
    expect(&lane, &c, 0, 3);
    expect(&lane, &c, 3, 3);
}

/* Every result is copied once, whatever the order. */
static void any_order(void **state)
{
    static struct tly_copies_part part[OPERATIONS][PARTS];
    for (seed = 1; seed < 200; seed++) {
        struct tly_copies_lane lane;
        struct tly_copies c[OPERATIONS];
        struct tly_copies_run run;
        uint8_t landed[OPERATIONS][PARTS] = {{0}}, copied[OPERATIONS][PARTS] = {{0}};
        int left = OPERATIONS * PARTS, to_land = left;
        tly_copies_init(&lane);
        for (int i = 0; i < OPERATIONS; i++)
            make(&c[i], part[i], 64, 64 * (1 + below(9)));
        while (left) {
            if (to_land && below(2)) {
                unsigned o = below(OPERATIONS), p = below(PARTS);
                while (landed[o][p])
                    (p = (p + 1) % PARTS) == 0 ? o = (o + 1) % OPERATIONS : 0;
                landed[o][p] = 1;
                to_land--;
                tly_copies_landed(&lane, &c[o], p);
            } else if (below(2) && tly_copies_next(&lane, &run)) {
                assert_true(run.count && lane.under_way <= TLY_COPIES_MOST && run.bytes <= run.of->most);
                for (uint32_t i = run.first; i < run.first + run.count; i++, left--) {
                    assert_true(landed[run.of - c][i] && !copied[run.of - c][i]);
                    copied[run.of - c][i] = 1;
                }
            } else if (lane.under_way) {
                tly_copies_end(&lane);
            }
        }
        assert_true(tly_list_empty(&lane.operations));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(inputs),       cmocka_unit_test(copies_of_results_are_as_long_as_those_of_inputs),
        cmocka_unit_test(results_join), cmocka_unit_test(gaps),
        cmocka_unit_test(any_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
