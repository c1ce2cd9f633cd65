/* plan_test.c - the split and the dealer hold what plan.h promises, for every n, k up to 64. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "plan/plan.h"

enum { MOST = 64, MB = 1 << 20 };

static uint64_t random_state = 88172645463325252u;
static uint64_t rnd(uint64_t limit)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state % limit;
}

static uint64_t sum_of(int count, const uint32_t *weight)
{
    uint64_t sum = 0;
    for (int i = 0; i < count; i++)
        sum += weight[i];
    return sum;
}

#define close_to(a, b) assert_true(fabs((a) - (b)) <= 1e-9 * fabs(b))

/* Eq. 1, 2 as printed, with the neighbours that plan.h names. */
static void weights_are_eq_1_and_2(void **state)
{
    uint32_t w[2 * MOST];
    for (int n = 1; n <= MOST; n++) {
        for (int k = 0; k <= MOST; k++) {
            assert_int_equal(tly_plan_weights(n, k, w), 0);
            double total = (double)sum_of(n + k, w), d = (double)n * n + (double)k * n - 2.0 * k;
            double cpu = n == 1 ? 0 : k >= n ? 1.0 / k : 2.0 * (n - 1) / d;
            double worker = n == 1 ? 1 : k >= n ? 0 : (n - k) / d;
            for (int i = 0; i < n; i++)
                close_to(w[i] / total, worker);
            for (int i = n; i < n + k; i++)
                close_to(w[i] / total, cpu);
        }
    }
    assert_int_equal(tly_plan_weights(8, 8, w), 0);
    assert_int_equal(w[8], 1);
    assert_int_equal(tly_plan_weights(4, 2, w), 0); /* 2 : 6 in lowest terms */
    assert_int_equal(w[0], 1);
    assert_int_equal(w[4], 3);
    assert_int_equal(tly_plan_weights(0, 0, w), -EINVAL);
    assert_int_equal(tly_plan_weights(-1, 3, w), -EINVAL);
    assert_int_equal(tly_plan_weights(2, -1, w), -EINVAL);
    assert_int_equal(tly_plan_weights(TLY_MAX_SERVICES, 1, w), -EINVAL);
    assert_int_equal(tly_plan_weights(1, INT32_MAX, w), -EINVAL);
}

static void shares_add_up_to_the_byte(void **state)
{
    static const uint64_t sizes[] = {0, 1, 7, 1000003, 25557032u * 4, (1ull << 40) + 1, UINT64_MAX};
    uint32_t w[2 * MOST];
    uint64_t share[2 * MOST];
    for (int n = 1; n <= MOST; n++) {
        for (int k = 0; k <= MOST; k++) {
            tly_plan_weights(n, k, w);
            uint64_t total = sum_of(n + k, w);
            for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
                tly_plan_shares(n + k, w, sizes[s], share);
                uint64_t sum = 0;
                for (int i = 0; i < n + k; i++) {
                    sum += share[i];
                    uint64_t due = (uint64_t)((unsigned __int128)sizes[s] * w[i] / total);
                    assert_true(share[i] == due || share[i] == due + 1);
                    assert_true(w[i] || !share[i]);
                }
                assert_true(sum == sizes[s]);
            }
        }
    }
}

/* What each machine moves (Eq. 3, and Eq. 4 with its n put right) takes t_opt and no longer. */
static void time_is_what_the_busiest_machine_needs(void **state)
{
    uint32_t w[2 * MOST];
    for (int n = 2; n <= MOST; n++) {
        for (int k = 0; k <= MOST; k++) {
            tly_plan_weights(n, k, w);
            double total = (double)sum_of(n + k, w), m = 1e9, b = 1.25e9, most = 0;
            for (int i = 0; i < n + k; i++) {
                double x = m * w[i] / total, moved = i < n ? m + (n - 2) * x : n * x;
                most = fmax(most, moved / b);
            }
            close_to(most, tly_plan_time(n, k, m, b));
        }
    }
}

/* An all-reduce, and a parameter server on k machines of its own: what the paper compares the plan with. */
static double time_of_all_reduce(int n, double bytes, double bandwidth)
{
    return 2.0 * (n - 1) * bytes / (n * bandwidth);
}

static double time_of_server(int n, int k, double bytes, double bandwidth)
{
    return fmax(bytes / bandwidth, n * bytes / (k * bandwidth));
}

static void time_has_the_papers_figures(void **state)
{
    assert_true(tly_plan_time(1, 0, 1e9, 1e9) == 0);
    assert_true(tly_plan_time(1, 5, 1e9, 1e9) == 0);
    close_to(tly_plan_time(8, 0, 8e9, 1e9), 14.0);
    close_to(tly_plan_time(8, 8, 8e9, 1e9), 8.0);
    close_to(tly_plan_time(8, 64, 8e9, 1e9), 8.0);
    double t = tly_plan_time(32, 16, 1, 1);
    assert_true(fabs(time_of_all_reduce(32, 1, 1) / t - 1.469) < 5e-4);
    assert_true(fabs(time_of_server(32, 16, 1, 1) / t - 1.516) < 5e-4);
    close_to(time_of_all_reduce(8, 1, 1) / tly_plan_time(8, 8, 1, 1), 1.75);
    for (int k = 0; k <= 8; k++) /* at n = 2 nothing helps */
        close_to(tly_plan_time(2, k, 1, 1), 1.0);
}

/* Deals `steps` parts and returns how far services got above and below their due, in parts of `largest`,
 * counted here and not by the dealer. */
struct distance {
    double above, below;
};

static struct distance deal(struct tly_dealer *d, int count, const uint32_t *w, int steps,
                            uint32_t (*size)(int step), uint32_t largest)
{
    static uint64_t dealt[TLY_MAX_SERVICES];
    double total = (double)sum_of(count, w);
    struct distance far = {0, 0};
    uint64_t all = 0;
    for (int i = 0; i < count; i++)
        dealt[i] = 0;
    for (int t = 0; t < steps; t++) {
        uint32_t bytes = size(t);
        int who = tly_dealer_next(d, bytes);
        assert_in_range(who, 0, count - 1);
        assert_true(w[who] > 0);
        dealt[who] += bytes;
        all += bytes;
        double unit = (double)all / total;
        for (int i = 0; i < count; i++) {
            double ahead = ((double)dealt[i] - unit * w[i]) / largest;
            far.above = ahead > far.above ? ahead : far.above;
            far.below = -ahead > far.below ? -ahead : far.below;
        }
    }
    return far;
}

static uint32_t same(int step)
{
    return MB;
}

/* Also says that no machine is above t_opt by more than a part, and that of any window, a difference of two
 * beginnings, every service has its due to within two parts. */
static void equal_parts_never_a_part_off(void **state)
{
    static struct tly_dealer d;
    uint32_t w[2 * MOST];
    for (int n = 1; n <= MOST; n++) {
        for (int k = 0; k <= MOST; k++) {
            tly_plan_weights(n, k, w);
            tly_dealer_init(&d, n, n + k, w);
            uint64_t total = sum_of(n + k, w);
            struct distance far = deal(&d, n + k, w, total < 1000 ? (int)total : 1000, same, MB);
            assert_true(far.above < 1 && far.below < 1);
        }
    }
}

/* What worker machines get together is always within a part of its due: they get theirs one by one, not all in a row. */
static void light_services_are_spread(void **state)
{
    static const int nk[][2] = {{8, 1}, {8, 4}, {8, 7}, {32, 16}, {64, 63}};
    static struct tly_dealer d;
    for (size_t c = 0; c < sizeof nk / sizeof nk[0]; c++) {
        int n = nk[c][0], k = nk[c][1], dealt = 0;
        uint32_t w[2 * MOST];
        tly_plan_weights(n, k, w);
        double due = (double)sum_of(n, w) / (double)sum_of(n + k, w);
        tly_dealer_init(&d, n, n + k, w);
        for (int t = 1; t <= 2000; t++) {
            dealt += tly_dealer_next(&d, MB) < n;
            assert_true(fabs(dealt - due * t) < 1);
        }
    }
}

static void a_period_is_exact(void **state)
{
    static const int nk[][2] = {{1, 0}, {1, 3}, {8, 0}, {8, 1}, {8, 4}, {8, 7}, {8, 8}, {8, 20}, {64, 63}};
    static struct tly_dealer d;
    for (size_t c = 0; c < sizeof nk / sizeof nk[0]; c++) {
        int count = nk[c][0] + nk[c][1];
        uint32_t w[2 * MOST], got[2 * MOST] = {0};
        tly_plan_weights(nk[c][0], nk[c][1], w);
        tly_dealer_init(&d, nk[c][0], count, w);
        for (uint64_t t = sum_of(count, w); t > 0; t--)
            got[tly_dealer_next(&d, 4096)]++;
        for (int i = 0; i < count; i++)
            assert_int_equal(got[i], w[i]);
    }
}

static uint32_t any(int step)
{
    return 1 + (uint32_t)rnd(MB);
}
static uint32_t large_or_small(int step)
{
    return rnd(2) ? MB : 1024;
}
static uint32_t over_all_scales(int step)
{
    return MB >> rnd(20);
}
static uint32_t full_then_rest(int step)
{
    return step % 7 ? MB : 1 + (uint32_t)rnd(MB);
}

static void unequal_parts_stay_near(void **state)
{
    static uint32_t (*const sizes[])(int) = {any, large_or_small, over_all_scales, full_then_rest};
    static struct tly_dealer d;
    uint32_t w[2 * MOST];
    for (int run = 0; run < 200; run++) {
        int n = 1 + (int)rnd(MOST), k = (int)rnd(MOST + 1);
        tly_plan_weights(n, k, w);
        if (run % 2)
            for (int i = 0; i < n + k; i++)
                w[i] = rnd(3) ? 1 + (uint32_t)rnd(100) : 1 + (uint32_t)rnd(100000);
        tly_dealer_init(&d, n, n + k, w);
        struct distance far = deal(&d, n + k, w, 1000, sizes[run % 4], MB);
        assert_true(far.above < (run % 2 ? 2 : 1 + 1.0 / n)); /* for certain; seen: 1.35 and 0.99 */
        assert_true(far.below < 1.25);                        /* seen: 0.99 */
    }
}

/* The beginning of a deal takes place in the middle of the sequence: windows, hence two parts. */
static void placed_windows_stay_near(void **state)
{
    static struct tly_dealer d;
    uint32_t w[2 * MOST];
    for (uint64_t hash = 0; hash < 3000; hash++) {
        int n = 1 + (int)rnd(24), k = (int)rnd(24);
        tly_plan_weights(n, k, w);
        tly_dealer_init_at(&d, n + k, w, hash);
        struct distance far = deal(&d, n + k, w, 60, hash % 2 ? same : full_then_rest, MB);
        assert_true(far.above < 2 && far.below < 2);
    }
}

/* Over hashes, the first part, and the second and the tenth, go to services by weight: a tensor of any number
 * of parts is split well on average.  Five standard deviations, so a right dealer passes for sure. */
static void placed_parts_are_distributed_by_weight(void **state)
{
    enum { HASHES = 20000, LONGEST = 10 };
    static const uint32_t uneven[] = {1, 2, 0, 3, 50, 70, 1000};
    static const int nk[][2] = {{8, 0}, {8, 1}, {8, 4}, {8, 7}, {3, 2}, {4, 4}, {7, -1}};
    static struct tly_dealer d;
    for (size_t c = 0; c < sizeof nk / sizeof nk[0]; c++) {
        int count = nk[c][1] < 0 ? nk[c][0] : nk[c][0] + nk[c][1];
        uint32_t w[16], got[LONGEST][16] = {{0}};
        tly_plan_weights(nk[c][0], nk[c][1] < 0 ? 0 : nk[c][1], w);
        for (int i = 0; nk[c][1] < 0 && i < count; i++)
            w[i] = uneven[i];
        for (uint64_t hash = 0; hash < HASHES; hash++) {
            tly_dealer_init_at(&d, count, w, hash);
            for (int t = 0; t < LONGEST; t++)
                got[t][tly_dealer_next(&d, 65536)]++;
        }
        for (int t = 0; t < LONGEST; t++) {
            for (int i = 0; i < count; i++) {
                double p = w[i] / (double)sum_of(count, w), mean = HASHES * p;
                assert_true(fabs(got[t][i] - mean) <= 5 * sqrt(mean * (1 - p)));
            }
        }
    }
}

static void placed_alike_for_a_hash(void **state)
{
    static struct tly_dealer a, b;
    uint32_t w[12];
    tly_plan_weights(8, 4, w);
    for (uint64_t hash = 0; hash < 100; hash++) {
        tly_dealer_init_at(&a, 12, w, hash);
        tly_dealer_init_at(&b, 12, w, hash);
        for (int t = 0; t < 50; t++)
            assert_int_equal(tly_dealer_next(&a, 1000), tly_dealer_next(&b, 1000));
    }
}

static uint32_t largest_part(int step)
{
    return 64 << 20;
}

/* Full house, weights as large as their type: scaled down, still right. */
static void nothing_overflows(void **state)
{
    static struct tly_dealer d;
    static uint32_t w[TLY_MAX_SERVICES];
    for (int placed = 0; placed < 2; placed++) {
        for (int i = 0; i < TLY_MAX_SERVICES; i++)
            w[i] = i % 3 ? UINT32_MAX - (uint32_t)i : 0;
        w[7] = 1;
        if (placed)
            tly_dealer_init_at(&d, TLY_MAX_SERVICES, w, 42);
        else
            tly_dealer_init(&d, TLY_MAX_SERVICES / 2, TLY_MAX_SERVICES, w);
        struct distance far = deal(&d, TLY_MAX_SERVICES, w, 3000, largest_part, 64 << 20);
        assert_true(far.above < 1.01 + placed && far.below < 1.01 + placed);
    }
}

static void empty_parts_count_too(void **state)
{
    static struct tly_dealer d;
    uint32_t w[4], got[4] = {0};
    tly_plan_weights(4, 0, w);
    tly_dealer_init(&d, 4, 4, w);
    for (int t = 0; t < 40; t++)
        got[tly_dealer_next(&d, 0)]++;
    for (int i = 0; i < 4; i++)
        assert_int_equal(got[i], 10);
}

/* What is taken from the CPU machines is the closed form's, and all of it goes to the workers. */
static void test_late(void **state)
{
    enum { N = 8, M = 128 << 20, LAG = 1 << 20 };
    uint32_t w[2 * N], late[2 * N];
    for (int k = 1; k < N; k++) {
        double all = 0, q = N * N + k * N - 2 * k, own = (N - k) / q, less = LAG / 2.0 / M;
        assert_int_equal(tly_plan_weights(N, k, w), 0);
        tly_plan_late(N, N + k, w, M, LAG, late);
        for (int i = 0; i < N + k; i++)
            all += late[i];
        for (int i = 0; i < N + k; i++) {
            double due = i < N ? own * (1 + k * less / N) : 2 * (N - 1) / q - own * less;
            assert_true(fabs(late[i] / all - due) < 2e-6);
        }
        /* Half an eighth of a short list. */
        tly_plan_late(N, N + k, w, 1000, LAG, late);
        all = 0;
        for (int i = 0; i < N + k; i++)
            all += late[i];
        assert_true(fabs(late[N] / all - (2 * (N - 1) / q - own / 16)) < 2e-6);
    }
}

/* Nothing is moved where only one kind of machine sums, nor where machines differ; who has no part in it gets none. */
static void test_not_late(void **state)
{
    const uint32_t alike[] = {3, 3, 3, 0, 0}, servers[] = {0, 0, 0, 1, 1}, differ[] = {3, 2, 3, 7, 7},
                   others_differ[] = {3, 3, 3, 7, 8}, slow[] = {9, 9, 9, 1, 1}, gone[] = {1, 1, 1, 0, 2};
    const uint32_t *const same[] = {alike, servers, differ, others_differ, slow};
    uint32_t late[5];
    for (int i = 0; i < 5; i++) {
        tly_plan_late(3, 5, same[i], 1 << 24, 1 << 16, late);
        assert_memory_equal(late, same[i], sizeof late);
    }
    tly_plan_late(3, 5, gone, 1 << 24, 1 << 16, late);
    assert_int_equal(late[3], 0);
    assert_true(late[4] > late[0] && late[4] < 2 * late[0] && late[0] == late[2]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_late),
        cmocka_unit_test(test_not_late),
        cmocka_unit_test(weights_are_eq_1_and_2),
        cmocka_unit_test(shares_add_up_to_the_byte),
        cmocka_unit_test(time_is_what_the_busiest_machine_needs),
        cmocka_unit_test(time_has_the_papers_figures),
        cmocka_unit_test(equal_parts_never_a_part_off),
        cmocka_unit_test(light_services_are_spread),
        cmocka_unit_test(a_period_is_exact),
        cmocka_unit_test(unequal_parts_stay_near),
        cmocka_unit_test(placed_windows_stay_near),
        cmocka_unit_test(placed_parts_are_distributed_by_weight),
        cmocka_unit_test(placed_alike_for_a_hash),
        cmocka_unit_test(nothing_overflows),
        cmocka_unit_test(empty_parts_count_too),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
