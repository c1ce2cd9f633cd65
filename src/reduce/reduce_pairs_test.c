/* reduce_pairs_test.c - sum, min and max of all 2^32 pairs of float16 and of bfloat16.
 *
 * One row of the table at a time: the first input is one value over and over, the second all values in turn.
 * The expected row comes from simple loops that the compiler vectorises and that round in another way than
 * the kernels do.  The scalar variant, too slow for all rows, is given every 64th, from a different one each
 * for sum, min and max; the others get them all.
 *
 * All rows take a minute.  TEST_LONG=all runs them, TEST_LONG=3/16 the third of sixteen parts, and without it the first
 * of sixteen parts runs.  Without optimisation or with sanitizers it is a sample. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "reduce/reduce.h"

/* Not under TSan: what chooses a clone runs before the sanitizer is ready. */
#if defined __x86_64__ && defined __GNUC__ && !defined __clang__ && !defined __SANITIZE_THREAD__
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif

#if defined TLY_SAMPLE
enum { STEP = TLY_SAMPLE };
#elif !defined __OPTIMIZE__ || defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
enum { STEP = 63 };
#else
enum { STEP = 1 };
#endif

enum { ALL = 65536 };

static uint16_t every[ALL], same[ALL], want[ALL], got[ALL];
/* Of each value of the type: the value, its place in their order, both zeros at 0, and whether it is none. */
static float wide[ALL];
static int16_t order[ALL];
static uint16_t is_nan[ALL];

static float bits_float(uint32_t u)
{
    float x;
    memcpy(&x, &u, 4);
    return x;
}

static uint32_t float_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

/* Exact by arithmetic on normal numbers: fraction times power of two. */
static float widen_half(unsigned h)
{
    unsigned exponent = h >> 10 & 31, fraction = h & 1023;
    float x = exponent == 31  ? (fraction ? bits_float(0x7fc00000) : bits_float(0x7f800000))
              : exponent == 0 ? (float)fraction * 0x1p-24f
                              : (float)(1024 + fraction) * bits_float((exponent - 25 + 127) << 23);
    return h & 0x8000 ? -x : x;
}

/* The hardware rounds: adding 2^13 times the power of two at or below |x| leaves 11 of its 24 bits, and below
 * 2^-14 the multiples of 2^-24. */
CLONES static void sum_halves(float a)
{
    for (int b = 0; b < ALL; b++) {
        float x = a + wide[b];
        uint32_t u = float_bits(x), sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
        uint32_t power = rest & 0x7f800000;
        power = power < 0x38800000 ? 0x38800000 : power > 0x47800000 ? 0x47800000 : power;
        float big = bits_float(power + (13 << 23));
        float rounded = (bits_float(rest > 0x47800000 ? 0x47800000 : rest) + big) - big;
        uint32_t r = float_bits(rounded);
        uint32_t small = (uint32_t)(int32_t)(rounded * 0x1p24f > 1024 ? 1024 : rounded * 0x1p24f);
        uint32_t half = r >= 0x47800000 ? 0x7c00 : r < 0x38800000 ? small : (r >> 13) - (112 << 10);
        want[b] = (uint16_t)(rest > 0x7f800000 ? 0x7e00 : sign | half);
    }
}

CLONES static void sum_bfloats(float a)
{
    for (int b = 0; b < ALL; b++) {
        float x = a + wide[b];
        uint32_t u = float_bits(x), keep = u >> 16, lost = u & 0xffff;
        uint32_t up = lost > 0x8000 || (lost == 0x8000 && keep % 2 == 1);
        want[b] = (uint16_t)(x != x ? 0x7fc0 : keep + up);
    }
}

CLONES static void pick(uint16_t a, uint16_t nan, int least)
{
    int16_t place = least ? order[a] : (int16_t)-order[a], sign = least ? 1 : -1;
    for (int b = 0; b < ALL; b++) {
        uint16_t number = (int16_t)(order[b] * sign) < place ? every[b] : a;
        want[b] = is_nan[b] ? nan : number;
    }
    if (is_nan[a])
        for (int b = 0; b < ALL; b++)
            want[b] = nan;
}

/* Whether row `a` is in the part that runs.  The parts mix rows, so that each has values of all kinds. */
static int is_chosen(unsigned a)
{
    unsigned part = 1, parts = 16;
    const char *choice = getenv("TEST_LONG");
    if (choice && strcmp(choice, "all") == 0)
        parts = 1;
    else if (choice && sscanf(choice, "%u/%u", &part, &parts) != 2)
        part = 1, parts = 16;
    return ((uint32_t)a * 2654435761u >> 16) % parts == part - 1;
}

static void run_pairs(int dtype)
{
    static const char *const variants[] = {"avx512", "avx2", "neon", "scalar"};
    static const uint8_t ops[] = {TALLY_SUM, TALLY_MIN, TALLY_MAX};
    unsigned infinity = dtype == TALLY_FLOAT16 ? 0x7c00 : 0x7f80;
    unsigned nan = dtype == TALLY_FLOAT16 ? 0x7e00 : 0x7fc0;
    const void *in[] = {same, every};

    for (unsigned b = 0; b < ALL; b++) {
        every[b] = (uint16_t)b;
        order[b] = (int16_t)(b & 0x8000 ? -(int)(b & 0x7fff) : (int)b);
        is_nan[b] = (b & 0x7fff) > infinity;
        wide[b] = dtype == TALLY_FLOAT16 ? widen_half(b) : bits_float(b << 16);
    }
    for (unsigned a = 0; a < ALL; a += STEP) {
        if (STEP == 1 && !is_chosen(a))
            continue;
        for (unsigned b = 0; b < ALL; b++)
            same[b] = (uint16_t)a;
        for (unsigned k = 0; k < 3; k++) {
            struct tly_reduction r = {(uint8_t)dtype, ops[k], 1, 1, 1};
            if (ops[k] != TALLY_SUM)
                pick((uint16_t)a, (uint16_t)nan, ops[k] == TALLY_MIN);
            else if (dtype == TALLY_FLOAT16)
                sum_halves(wide[a]);
            else
                sum_bfloats(wide[a]);
            for (unsigned v = 0; v < sizeof variants / sizeof *variants; v++) {
                if (!strcmp(variants[v], "scalar") ? a % 64 != k * 21 : tly_reduce_choose(variants[v]) != 0)
                    continue;
                tly_reduce_choose(variants[v]);
                tly_reduce(&r, 2, in, got, ALL);
                if (memcmp(got, want, sizeof got) == 0)
                    continue;
                for (unsigned b = 0; b < ALL; b++)
                    if (got[b] != want[b])
                        fail_msg("%s, operation %d of type %d: %#x and %#x give %#x, not %#x", variants[v],
                                 r.op, dtype, a, b, got[b], want[b]);
            }
        }
    }
    tly_reduce_choose(NULL);
}

static void test_float16(void **state)
{
    run_pairs(TALLY_FLOAT16);
}

static void test_bfloat16(void **state)
{
    run_pairs(TALLY_BFLOAT16);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_float16), cmocka_unit_test(test_bfloat16)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
