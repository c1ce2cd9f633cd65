/* norms_test.c - sums with norms, of all variants, against plain loops in the order of the contract. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "reduce/fold.h"
#include "reduce/reduce.h"

#if defined __x86_64__
#include <xmmintrin.h>
#endif

enum {
    MOST = 5000,
    MARGIN = 16,
    FAR = TLY_FAR_BYTES / 8 + 77
}; /* FAR: elements that are asked for and streamed */

static const char *const variants[] = {"scalar", "avx2", "avx512", "neon"};

static uint64_t random_state = 1;

static uint32_t random_bits(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

static float from_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static float plain_norm(const float *x, size_t count)
{
    float lane[64] = {0};
    for (size_t i = 0; i < count; i++)
        lane[i % 64] += fabsf(x[i]);
    for (int w = 32; w; w /= 2)
        for (int j = 0; j < w; j++)
            lane[j] += lane[j + w];
    return isnan(lane[0]) ? from_bits(0x7fc00000) : lane[0];
}

/* How the values are made: ordinary ones; any bits; ordinary ones with a NaN or an infinity now and then. */
enum { ORDINARY, ANY, SPECIAL };

static float value(int how)
{
    uint32_t u = random_bits();
    if (how == ANY)
        return from_bits(u);
    if (how == SPECIAL && u % 301 < 3)
        return from_bits(u % 2 ? 0x7f812345 : u % 4 ? 0x7f800000 : 0xff800000);
    return (float)((double)(int32_t)u / 1e7);
}

static void check(int how, size_t count, size_t chunk, size_t shift, int place)
{
    _Alignas(64) static float a[FAR + MARGIN], b[FAR + MARGIN], apart[FAR + MARGIN], want[FAR];
    static float norms[MOST + 1], want_norms[MOST];
    float *x = a + shift, *y = b + (shift * 3) % MARGIN;
    float *sum = place == 0 ? apart + (shift * 7) % MARGIN : place == 1 ? x : y;
    for (size_t i = 0; i < count; i++) {
        x[i] = value(how);
        y[i] = value(how);
        want[i] = x[i] + y[i];
        want[i] = isnan(want[i]) ? from_bits(0x7fc00000) : want[i];
    }
    size_t chunks = (count + chunk - 1) / chunk;
    for (size_t k = 0; k < chunks; k++)
        want_norms[k] = plain_norm(want + k * chunk, count - k * chunk < chunk ? count - k * chunk : chunk);
    float behind = sum[count];
    norms[chunks] = 77;
    tly_reduce_add_norms(x, y, sum, count, chunk, norms);
    assert_memory_equal(sum, want, count * sizeof *sum);
    assert_memory_equal(norms, want_norms, chunks * sizeof *norms);
    assert_memory_equal(&sum[count], &behind, sizeof behind);
    assert_true(norms[chunks] == 77);
}

static void test_bits(void **state)
{
    static const size_t counts[] = {0, 1, 63, 64, 65, 127, 128, 1000, 4096, MOST};
    static const size_t chunks[] = {1, 7, 64, 100, 1024, MOST, 1 << 20};
    for (size_t v = 0; v < sizeof variants / sizeof *variants; v++) {
        if (tly_reduce_choose(variants[v]) != 0)
            continue;
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
            for (size_t j = 0; j < sizeof chunks / sizeof *chunks; j++)
                for (int how = ORDINARY; how <= SPECIAL; how++)
                    check(how, counts[i], chunks[j], random_bits() % MARGIN, (int)(random_bits() % 3));
        for (int place = 0; place < 3; place++) {
            check(SPECIAL, FAR, 32768, 0, place);
            check(SPECIAL, FAR, 10001, 1, place);
        }
    }
    tly_reduce_choose(NULL);
}

/* A thread that flushes subnormals to zero gets them all the same, and stays so. */
static void test_mode(void **state)
{
#if defined __x86_64__
    float tiny = from_bits(3), sum = 0, norm = 0, zero = 0;
    unsigned saved = _mm_getcsr();
    _mm_setcsr(saved | 0x8040);
    tly_reduce_add_norms(&tiny, &zero, &sum, 1, 1, &norm);
    unsigned after = _mm_getcsr();
    _mm_setcsr(saved);
    assert_memory_equal(&sum, &tiny, sizeof sum);
    assert_memory_equal(&norm, &tiny, sizeof norm);
    assert_int_equal(after & 0x8040, 0x8040);
#else
    skip();
#endif
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bits), cmocka_unit_test(test_mode)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
