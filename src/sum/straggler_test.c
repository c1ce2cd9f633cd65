/* straggler_test.c - jobs whose ranks' times are given: who is named, for what, and who is not. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <stdlib.h>

#include "base/clock.h"
#include "sum/straggler.h"

#include <cmocka.h>

enum { MOST_RANKS = 8, PARTS = 10 };

/* Every step each rank computes, then pushes all parts one after another; the next step begins when all are there.
 * Noise: of each rank's computing, at random from 0 up to so much. */
struct setup {
    uint32_t ranks;
    double compute_ms[MOST_RANKS], push_ms[MOST_RANKS], noise_ms;
    bool here[MOST_RANKS];
    bool gradually; /* parts are ready evenly over the second half of the computing, not all at its end */
    uint32_t parts_back; /* no push before the sum so many parts earlier: a window; 0: none */
};

struct moment {
    int64_t at;
    uint32_t rank, part;
    bool end, prompt;
};

static int by_time(const void *x, const void *y)
{
    const struct moment *a = x, *b = y;
    if (a->at != b->at)
        return a->at < b->at ? -1 : 1;
    return (int)b->end - (int)a->end;
}

static double noise(const struct setup *s)
{
    return s->noise_ms * (double)rand() / RAND_MAX;
}

/* Returns how many findings there were; the last is in *out. */
static int play(const struct setup *s, int steps, struct tly_finding *out)
{
    struct tly_straggler w;
    static struct moment m[2 * MOST_RANKS * PARTS];
    int64_t start = TLY_SEC;
    int found = 0;
    assert_int_equal(tly_straggler_init(&w, s->ranks), 0);
    for (uint32_t r = 0; r < s->ranks; r++)
        w.pace[r].here = s->here[r];
    for (int step = 0; step < steps; step++) {
        double free_at[MOST_RANKS] = {0}, ends[PARTS] = {0}, compute[MOST_RANKS];
        size_t n = 0;
        for (uint32_t r = 0; r < s->ranks; r++)
            compute[r] = s->compute_ms[r] + noise(s);
        for (uint32_t part = 0; part < PARTS; part++)
            for (uint32_t r = 0; r < s->ranks; r++) {
                double ready = s->gradually ? compute[r] * (0.5 + 0.5 * (part + 1) / PARTS) : compute[r];
                double begin = ready > free_at[r] ? ready : free_at[r];
                if (s->parts_back && part >= s->parts_back && ends[part - s->parts_back] > begin)
                    begin = ends[part - s->parts_back];
                free_at[r] = begin + s->push_ms[r];
                ends[part] = ends[part] > free_at[r] ? ends[part] : free_at[r];
                m[n++] =
                    (struct moment){start + (int64_t)(begin * TLY_MS), r, part, false, begin < ready + 1};
                m[n++] = (struct moment){start + (int64_t)(free_at[r] * TLY_MS), r, part, true, false};
            }
        qsort(m, n, sizeof *m, by_time);
        int64_t opened[PARTS] = {0}, busy[PARTS][MOST_RANKS];
        for (size_t i = 0; i < n; i++) {
            uint32_t part = m[i].part;
            if (m[i].end) {
                tly_straggler_ended(&w, m[i].rank, m[i].at);
                continue;
            }
            if (!opened[part]) {
                opened[part] = m[i].at;
                found += tly_straggler_opened(&w, 77, part, m[i].at, out);
                for (uint32_t r = 0; r < s->ranks; r++)
                    busy[part][r] = tly_straggler_busy(&w, r, m[i].at);
            }
            tly_straggler_began(&w, m[i].rank, opened[part], busy[part][m[i].rank], m[i].prompt, m[i].at);
        }
        start = m[n - 1].at + TLY_MS;
    }
    tly_straggler_finish(&w);
    return found;
}

static void must_name(const struct setup *s, uint32_t rank, bool network, double least, double most)
{
    struct tly_finding f = {0};
    assert_true(play(s, 62, &f) >= 1);
    assert_int_equal(f.rank, rank);
    assert_int_equal(f.network, network);
    assert_true(f.count >= 20 && f.steps == 30);
    assert_true(f.share > least && f.share < most);
}

static void must_not_name(const struct setup *s)
{
    struct tly_finding f = {0};
    assert_int_equal(play(s, 500, &f), 0);
}

static void test_a_rank_that_computes_longer(void **state)
{
    /* 20 ms of 120 + 10 * 1 */
    must_name(&(struct setup){.ranks = 2, .compute_ms = {100, 120}, .push_ms = {1, 1}, .noise_ms = 5}, 1,
              false, 0.1, 0.2);
    must_name(&(struct setup){.ranks = 4,
                              .compute_ms = {100, 100, 140, 100},
                              .push_ms = {2, 2, 2, 2},
                              .noise_ms = 10},
              2, false, 0.15, 0.3);
    /* also where its card has the answers to the others to send while it pushes, at half of the speed */
    must_name(&(struct setup){.ranks = 3, .compute_ms = {100, 100, 140}, .push_ms = {2, 2, 4.2}}, 2, false,
              0.15, 0.3);
    /* also where one of the two is beside the service */
    must_name(&(struct setup){.ranks = 2, .compute_ms = {100, 120}, .push_ms = {.1, 1}, .here = {true}}, 1,
              false, 0.1, 0.2);
    must_name(&(struct setup){.ranks = 2, .compute_ms = {120, 100}, .push_ms = {.1, 1}, .here = {true}}, 0,
              false, 0.1, 0.2);
    must_name(
        &(struct setup){
            .ranks = 3, .compute_ms = {100, 130, 100}, .push_ms = {.1, 1, 1}, .here = {true}, .noise_ms = 5},
        1, false, 0.1, 0.3);
}

/* Each gradient a little later: the last by a fifth of the step. */
static void test_a_rank_that_computes_more_slowly_all_along(void **state)
{
    must_name(
        &(struct setup){.ranks = 3, .compute_ms = {100, 100, 140}, .push_ms = {1, 1, 1}, .gradually = true},
        2, false, 0.15, 0.35);
}

static void test_a_rank_with_a_slow_network(void **state)
{
    must_name(&(struct setup){.ranks = 3, .compute_ms = {50, 50, 50}, .push_ms = {2, 5.5, 2}, .noise_ms = 3},
              1, true, 0.2, 0.5);
    /* In its turn it has the sums of the step before late, and begins late. */
    must_name(&(struct setup){.ranks = 3, .compute_ms = {50, 50, 92}, .push_ms = {2, 2, 5.5}}, 2, true, 0.2,
              0.5);
    /* With a window the others wait after each part, and it is never far behind. */
    must_name(&(struct setup){.ranks = 3, .compute_ms = {20, 20, 20}, .push_ms = {2, 6, 2}, .parts_back = 1},
              1, true, 0.2, 0.8);
    must_name(&(struct setup){.ranks = 4,
                              .compute_ms = {20, 20, 20, 20},
                              .push_ms = {.1, 2, 2, 6},
                              .here = {true},
                              .noise_ms = 2},
              3, true, 0.2, 0.8);
}

static void test_even_ranks(void **state)
{
    for (uint32_t ranks = 1; ranks <= MOST_RANKS; ranks++) {
        struct setup s = {.ranks = ranks, .noise_ms = 60};
        for (uint32_t r = 0; r < ranks; r++) {
            s.compute_ms[r] = 100;
            s.push_ms[r] = 2;
        }
        must_not_name(&s);
        s.gradually = true;
        must_not_name(&s);
        s.parts_back = 2;
        must_not_name(&s);
    }
}

/* A rank beside the service is no measure for those who must cross a network. */
static void test_the_service_s_own_rank_is_no_measure(void **state)
{
    must_not_name(&(struct setup){.ranks = 2, .compute_ms = {5, 5}, .push_ms = {.01, 5}, .here = {true}});
    must_not_name(&(struct setup){
        .ranks = 2, .compute_ms = {5, 5}, .push_ms = {.01, 5}, .here = {true}, .parts_back = 1});
    must_not_name(
        &(struct setup){.ranks = 3, .compute_ms = {5, 6, 6}, .push_ms = {.01, 5, 5}, .here = {true}});
}

/* It began in time, and lags behind while all of it waits to be sent: that is no computing. */
static void test_what_waits_for_its_turn_is_not_late(void **state)
{
    struct tly_straggler w;
    struct tly_finding f;
    assert_int_equal(tly_straggler_init(&w, 2), 0);
    for (int step = 0; step < 500; step++)
        for (uint32_t part = 0; part < 4; part++) {
            int64_t now = TLY_SEC + step * 100 * TLY_MS + part * 10 * TLY_MS;
            assert_false(tly_straggler_opened(&w, 1, part, now, &f));
            tly_straggler_began(&w, 0, now, 0, part == 0, now);
            tly_straggler_ended(&w, 0, now + TLY_MS);
            int64_t then = now + part * 10 * TLY_MS, busy = tly_straggler_busy(&w, 1, now);
            tly_straggler_began(&w, 1, now, busy, part == 0, then);
            tly_straggler_ended(&w, 1, then + TLY_MS);
        }
    tly_straggler_finish(&w);
}

/* Rank 1 begins its steps later because it is answered later. */
static void test_who_is_answered_late_is_not_late(void **state)
{
    struct tly_straggler w;
    struct tly_finding f;
    assert_int_equal(tly_straggler_init(&w, 2), 0);
    for (int step = 0; step < 500; step++) {
        int64_t now = TLY_SEC + step * 100 * TLY_MS, before = now - 100 * TLY_MS;
        assert_false(tly_straggler_opened(&w, 1, 0, now, &f));
        tly_straggler_began(&w, 0, now, 0, true, now);
        tly_straggler_ended(&w, 0, now + TLY_MS);
        tly_straggler_answered(&w, 0, before, now - 5 * TLY_MS);
        tly_straggler_answered(&w, 1, before, now + 25 * TLY_MS);
        int64_t then = now + 30 * TLY_MS, busy = tly_straggler_busy(&w, 1, now);
        tly_straggler_began(&w, 1, now, busy, true, then);
        tly_straggler_ended(&w, 1, then + TLY_MS);
        /* An answer of this step is no excuse. */
        tly_straggler_answered(&w, 1, now, then + 2 * TLY_MS);
    }
    tly_straggler_finish(&w);
}

/* The split changes, and part 0 goes to another service: the steps are told apart by part 1 from then on. */
static void test_the_split_changes(void **state)
{
    struct tly_straggler w;
    struct tly_finding f;
    int found = 0;
    assert_int_equal(tly_straggler_init(&w, 2), 0);
    for (int step = 0; step < 45; step++) {
        int64_t now = TLY_SEC + step * 100 * TLY_MS;
        if (step == 10)
            tly_straggler_begin_anew(&w);
        found += tly_straggler_opened(&w, 1, step >= 10, now, &f);
        tly_straggler_began(&w, 0, now, 0, true, now);
        tly_straggler_ended(&w, 0, now + TLY_MS);
        int64_t busy = tly_straggler_busy(&w, 1, now);
        tly_straggler_began(&w, 1, now, busy, true, now + 40 * TLY_MS);
        tly_straggler_ended(&w, 1, now + 41 * TLY_MS);
    }
    assert_int_equal(found, 1);
    assert_true(f.rank == 1 && !f.network);
    tly_straggler_finish(&w);
}

static void test_one_fast_rank_makes_no_late_ones(void **state)
{
    must_not_name(&(struct setup){.ranks = 4, .compute_ms = {100, 150, 150, 150}, .push_ms = {1, 1, 1, 1}});
    must_not_name(&(struct setup){.ranks = 3, .compute_ms = {100, 100, 100}, .push_ms = {1, 9, 9}});
}

static void test_a_little_late_is_not_late(void **state)
{
    must_not_name(&(struct setup){.ranks = 3, .compute_ms = {5, 5, 5}, .push_ms = {3, 4, 3}});
    must_not_name(&(struct setup){.ranks = 2, .compute_ms = {100, 105}, .push_ms = {1, 1}});
    must_not_name(
        &(struct setup){.ranks = 2, .compute_ms = {.2, .9}, .push_ms = {.01, .01}}); /* below a millisecond */
}

/* Rank 1 is late in every second step. */
static void test_half_the_steps_are_too_few(void **state)
{
    struct tly_straggler w;
    struct tly_finding f;
    assert_int_equal(tly_straggler_init(&w, 2), 0);
    for (int step = 0; step < 500; step++) {
        int64_t now = TLY_SEC + step * 100 * TLY_MS;
        assert_false(tly_straggler_opened(&w, 1, 0, now, &f));
        tly_straggler_began(&w, 0, now, 0, true, now);
        tly_straggler_ended(&w, 0, now + TLY_MS);
        int64_t then = now + (step % 2 ? 50 : 1) * TLY_MS, busy = tly_straggler_busy(&w, 1, now);
        tly_straggler_began(&w, 1, now, busy, true, then);
        tly_straggler_ended(&w, 1, then + TLY_MS);
    }
    tly_straggler_finish(&w);
}

static void test_it_is_said_after_each_window(void **state)
{
    struct setup s = {.ranks = 2, .compute_ms = {100, 130}, .push_ms = {1, 1}};
    struct tly_finding f;
    assert_int_equal(play(&s, 1 + 30, &f), 1);
    assert_int_equal(play(&s, 1 + 3 * 30, &f), 3);
}

/* A tensor that was used once does not mark steps for ever. */
static void test_another_tensor_takes_over(void **state)
{
    struct tly_straggler w;
    struct tly_finding f;
    int found = 0;
    assert_int_equal(tly_straggler_init(&w, 2), 0);
    assert_false(tly_straggler_opened(&w, 5, 0, TLY_SEC, &f));
    for (int step = 0; step < 200; step++) {
        int64_t now = TLY_SEC + step * 100 * TLY_MS;
        found += tly_straggler_opened(&w, 6, 3, now, &f);
        int64_t busy = tly_straggler_busy(&w, 1, now);
        tly_straggler_began(&w, 0, now, 0, true, now);
        tly_straggler_ended(&w, 0, now + TLY_MS);
        tly_straggler_began(&w, 1, now, busy, true, now + 30 * TLY_MS);
        tly_straggler_ended(&w, 1, now + 31 * TLY_MS);
    }
    assert_true(found >= 1);
    assert_int_equal(f.rank, 1);
    tly_straggler_finish(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_rank_that_computes_longer),
        cmocka_unit_test(test_a_rank_that_computes_more_slowly_all_along),
        cmocka_unit_test(test_a_rank_with_a_slow_network),
        cmocka_unit_test(test_even_ranks),
        cmocka_unit_test(test_the_service_s_own_rank_is_no_measure),
        cmocka_unit_test(test_what_waits_for_its_turn_is_not_late),
        cmocka_unit_test(test_who_is_answered_late_is_not_late),
        cmocka_unit_test(test_the_split_changes),
        cmocka_unit_test(test_one_fast_rank_makes_no_late_ones),
        cmocka_unit_test(test_a_little_late_is_not_late),
        cmocka_unit_test(test_half_the_steps_are_too_few),
        cmocka_unit_test(test_it_is_said_after_each_window),
        cmocka_unit_test(test_another_tensor_takes_over),
    };
    srand(11);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
