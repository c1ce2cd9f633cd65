/* nodes_test.c - sums whose inputs are nodes of the tree: the bits are those of the tree over all leaves, whatever the
 * nodes, for every variant that this CPU can run.
 *
 * The reference adds two rows at a time, as T of reduce.h says; reduce_test.c holds such sums to arithmetic. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "reduce/reduce.h"

/* An emulated processor gets a share of what is random. */
#if defined TLY_SAMPLE
enum { SHARE = 5 };
#else
enum { SHARE = 1 };
#endif

enum { MOST = 40, LONGEST = 1500 * 16 };

static uint64_t seed;

/* xorshift* */
static size_t below(size_t n)
{
    seed ^= seed >> 12;
    seed ^= seed << 25;
    seed ^= seed >> 27;
    return (size_t)(seed * 2685821657736338717u >> 11) % n;
}

static int split(int n)
{
    int m = 1;
    while (m * 2 < n)
        m *= 2;
    return m;
}

/* T(lo, hi) as a partial; out is apart from the inputs. */
static void sum_pairs(const struct tly_reduction *whole, int lo, int hi, const void *const in[], size_t count,
                      unsigned char *out)
{
    struct tly_reduction r = *whole;
    size_t bytes = count * 16;
    r.to_partial = true;
    if (hi - lo == 1) {
        tly_reduce(&r, 1, in + lo, out, count);
        return;
    }
    int m = split(hi - lo);
    unsigned char *room = malloc(2 * bytes + 1);
    const void *two[] = {room, room + bytes};
    assert_non_null(room);
    sum_pairs(whole, lo, lo + m, in, count, room);
    sum_pairs(whole, lo + m, hi, in, count, room + bytes);
    r.from_partials = true;
    tly_reduce(&r, 2, two, out, count);
    free(room);
}

/* Sizes of nodes that T(lo, hi) is cut into; the larger `deep`, the smaller they are. */
static int cut(int lo, int hi, size_t deep, int *sizes)
{
    if (hi - lo < 2 || below(deep + 1) == 0) {
        *sizes = hi - lo;
        return 1;
    }
    int m = split(hi - lo), left = cut(lo, lo + m, deep, sizes);
    return left + cut(lo + m, hi, deep, sizes + left);
}

static void fill(const struct tly_reduction *r, void *at, size_t count)
{
    size_t bytes = count * tly_reduce_element_size(r->dtype);
    for (size_t i = 0; i < bytes; i += 4) {
        float f = (float)((double)below(1 << 20) / 0x1p18 - 2);
        uint32_t bits = (uint32_t)below(1ull << 32);
        if (r->dtype == TALLY_FLOAT32 || r->dtype == TALLY_COMPLEX64)
            memcpy(&bits, &f, 4);
        memcpy((char *)at + i, &bits, bytes - i < 4 ? bytes - i : 4);
    }
}

/* Reduce each node, and these; compare with the tree over all leaves. */
static void check(const struct tly_reduction *whole, int n, int nodes, const int *sizes, size_t count,
                  bool in_place)
{
    struct tly_reduction lower = *whole, upper = *whole;
    const void **in = malloc((size_t)n * sizeof *in), **parts = malloc((size_t)nodes * sizeof *parts);
    size_t size = tly_reduce_element_size(whole->dtype), stride = count * 16 + 64;
    unsigned char *x = malloc((size_t)n * stride), *sums = malloc((size_t)nodes * stride),
                  *got = malloc(stride), *want = malloc(stride), *row = malloc(stride), *out = got;
    uint64_t start = seed;
    assert_true(in && parts && x && sums && got && want && row);
    lower.to_partial = upper.from_partials = true;
    for (int j = 0; j < n; j++) {
        unsigned char *at = x + (size_t)j * stride + below(2) * below(64);
        fill(whole, at, count);
        in[j] = at;
    }
    for (int j = 0, lo = 0; j < nodes; lo += sizes[j++]) {
        unsigned char *at = sums + (size_t)j * stride + below(2) * below(64);
        tly_reduce(&lower, sizes[j], in + lo, at, count);
        parts[j] = at;
        if (in_place && below((size_t)nodes) == 0)
            out = at;
    }
    sum_pairs(whole, 0, n, in, count, row);
    tly_reduce(&upper, 1, (const void *[]){row}, want, count);
    got[count * size] = 0xa5;
    tly_reduce_nodes(&upper, nodes, sizes, parts, out, count);
    if (memcmp(out, want, count * size) != 0)
        fail_msg("%s: operation %d of type %d, %d leaves in %d nodes, %zu elements differ (seed %llu)",
                 tly_reduce_variant(), whole->op, whole->dtype, n, nodes, count, (unsigned long long)start);
    assert_int_equal(got[count * size], 0xa5);
    free(in);
    free(parts);
    free(x);
    free(sums);
    free(got);
    free(want);
    free(row);
}

static void test_layouts(void **state)
{
    static const int layouts[][8] = {{4, 2, 2},       {2, 2, 4},    {4, 2, 1, 1}, {1, 1, 2}, {2, 1, 1},
                                     {8, 8, 4, 2, 1}, {2, 2, 2, 1}, {4, 3},       {5},       {1, 1, 1, 1, 4}};
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++)
        for (int dtype = 0; dtype < TLY_DTYPE_COUNT; dtype++)
            for (int op = 0; op < TLY_REDUCTION_COUNT; op++) {
                int n = 0, nodes = 0;
                while (nodes < 8 && layouts[i][nodes])
                    n += layouts[i][nodes++];
                struct tly_reduction r = {(uint8_t)dtype, (uint8_t)op, (uint32_t)n, 1, 1};
                if (tly_reduce_check(&r, NULL) == 0)
                    check(&r, n, nodes, layouts[i], 77, false);
            }
}

static void test_random(void **state)
{
    for (int i = 0; i < 600 / SHARE; i++) {
        struct tly_reduction r = {0};
        int n = 1 + (int)below(MOST), sizes[MOST], nodes = cut(0, n, 1 + below(9), sizes);
        do {
            r.dtype = (uint8_t)below(TLY_DTYPE_COUNT);
            r.op = (uint8_t)below(TLY_REDUCTION_COUNT);
            r.divisor = (uint32_t)n;
            r.prescale = below(2) ? 1 : 1.0 / 3;
            r.postscale = below(2) ? 1 : -3;
        } while (tly_reduce_check(&r, NULL) != 0);
        bool partials_fit = r.dtype != TALLY_FLOAT16 && r.dtype != TALLY_BFLOAT16;
        size_t longest = LONGEST / tly_reduce_element_size(r.dtype);
        check(&r, n, nodes, sizes, below(below(3) ? 150 : longest), partials_fit);
    }
}

/* Up to 4096 leaves, in nodes that lie in each other as deep as they can, or take as many rows as they can. */
static void test_many(void **state)
{
    enum { ALL = TLY_REDUCE_MAX_INPUTS, COUNT = 260 };
    static const struct tly_reduction r = {TALLY_FLOAT32, TALLY_AVERAGE, 7, 1, 3};
    static int sizes[ALL];
    int nodes = 0;
    for (int left = ALL; left > 1; left /= 2)
        sizes[nodes++] = left / 2;
    sizes[nodes++] = 1;
    check(&r, ALL, nodes, sizes, COUNT, false);
    nodes = 0;
    for (int left = ALL; left > 0; left -= 8) { /* rows of 512, of 64, of 8 and of 2 */
        sizes[nodes++] = 2;
        for (int i = 0; i < 6; i++)
            sizes[nodes++] = 1;
    }
    check(&r, ALL, nodes, sizes, COUNT, false);
    for (int i = 0; i < 10 / SHARE; i++) {
        int n = 2 + (int)below(ALL - 1);
        check(&r, n, cut(0, n, 1 + below(30), sizes), sizes, 1 + below(COUNT), true);
    }
}

int main(void)
{
    static const char *const variants[] = {"scalar", "avx2", "avx512", "neon"};
    int failed = 0;
    for (size_t v = 0; v < sizeof variants / sizeof *variants; v++) {
        const struct CMUnitTest tests[] = {
            cmocka_unit_test(test_layouts),
            cmocka_unit_test(test_random),
            cmocka_unit_test(test_many),
        };
        if (tly_reduce_choose(variants[v]) == 0)
            failed += cmocka_run_group_tests_name(variants[v], tests, NULL, NULL);
    }
    return failed;
}
