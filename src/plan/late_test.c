/* late_test.c - jobs whose ranks' times are given: which rank takes longer than the others by itself, and why. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "plan/late.h"

enum { MOST_RANKS = 8, REPORT_MS = 400, STEPS = 1000 };

/* In each step each rank computes, from when it has the sums of the step before, and submits.  When all have submitted the
 * network moves the sums, and each rank has them after its own time. */
struct setup {
    int ranks;
    double compute_ms[MOST_RANKS], network_ms[MOST_RANKS];
    double wait_factor[MOST_RANKS]; /* by which waiting for a processor makes computing longer; 0: not */
    double page_ms[MOST_RANKS];     /* for which memory comes from a disk in each step */
    double noise_ms;                /* of each computing, from 0 up to so much */
    double pause_ms;                /* that rank 1 computes longer by */
    int pause_every;                /* in each so-many-th step; 0: never */
    bool by_turns;                  /* one rank after the other computes longer, by noise_ms */
    bool left[MOST_RANKS];
};

static double chance(void)
{
    return (double)rand() / RAND_MAX;
}

struct rank {
    struct tly_own own;
    double has_at, reported_at, own_ms, waited_ms, paged_ms, all_ms;
    uint32_t steps;
};

/* Returns in how many steps somebody was named; the last finding is in *out. */
static int play(const struct setup *s, struct tly_lateness *out)
{
    static struct rank rank[MOST_RANKS];
    const struct tly_own *of[MOST_RANKS];
    struct tly_lateness l = {.rank = -1};
    int found = 0;
    memset(rank, 0, sizeof rank);
    srand(1);
    for (int i = 0; i < s->ranks; i++)
        of[i] = s->left[i] ? NULL : &rank[i].own;
    for (int step = 0; step < STEPS; step++) {
        double submitted[MOST_RANKS], last = 0;
        for (int i = 0; i < s->ranks; i++) {
            double more = s->by_turns ? (step % s->ranks == i) * s->noise_ms : s->noise_ms * chance();
            if (s->pause_every && i == 1 && step % s->pause_every == 0)
                more += s->pause_ms;
            double computes = s->compute_ms[i] + more;
            double waits = computes * fmax(0, s->wait_factor[i] - 1) * (.5 + chance());
            rank[i].waited_ms += waits;
            rank[i].paged_ms += s->page_ms[i];
            submitted[i] = rank[i].has_at + computes + waits + s->page_ms[i];
            last = fmax(last, submitted[i]);
        }
        for (int i = 0; i < s->ranks; i++) {
            struct rank *r = &rank[i];
            double has_at = last + s->network_ms[i];
            r->own_ms += submitted[i] - r->has_at;
            r->all_ms += has_at - r->has_at;
            r->has_at = has_at;
            r->steps++;
            if (has_at - r->reported_at < REPORT_MS)
                continue;
            tly_own_see(&r->own,
                        &(struct tly_steps){r->steps, (uint64_t)(1e3 * r->own_ms),
                                            (uint64_t)(1e3 * r->waited_ms), (uint64_t)(1e3 * r->paged_ms),
                                            (uint64_t)(1e3 * r->all_ms)});
            r->reported_at = has_at;
            r->own_ms = r->waited_ms = r->paged_ms = r->all_ms = r->steps = 0;
        }
        bool is = tly_late_find(s->ranks, of, l.rank < 0 ? NULL : &l, &l) > 0;
        l.rank = is ? l.rank : -1;
        found += is;
        if (is)
            *out = l;
    }
    return found;
}

static void must_name_for(const struct setup *s, int rank, enum tly_late_why why, double least, double most)
{
    struct tly_lateness l = {.rank = -1};
    assert_true(play(s, &l) > STEPS / 2);
    assert_int_equal(l.rank, rank);
    assert_int_equal(l.why, why);
    assert_true(l.share > least && l.share < most);
}

static void must_name(const struct setup *s, int rank, double least, double most)
{
    must_name_for(s, rank, TLY_LATE_COMPUTES, least, most);
}

static void must_not_name(const struct setup *s)
{
    struct tly_lateness l;
    assert_int_equal(play(s, &l), 0);
}

static void a_rank_that_computes_longer(void **state)
{
    /* 20 ms of 130 */
    must_name(&(struct setup){.ranks = 2, .compute_ms = {100, 120}, .network_ms = {10, 10}, .noise_ms = 5}, 1,
              .13, .18);
    must_name(&(struct setup){.ranks = 2, .compute_ms = {120, 100}, .network_ms = {10, 10}, .noise_ms = 5}, 0,
              .13, .18);
    must_name(&(struct setup){.ranks = 4,
                              .compute_ms = {100, 100, 140, 100},
                              .network_ms = {20, 20, 20, 20},
                              .noise_ms = 10},
              2, .2, .3);
    /* steps that are far longer, and far shorter, than a report */
    must_name(&(struct setup){.ranks = 3, .compute_ms = {1000, 1000, 1900}, .network_ms = {1500, 1500, 1500}},
              2, .2, .3);
    must_name(&(struct setup){.ranks = 3, .compute_ms = {40, 50, 40}, .network_ms = {1, 1, 1}}, 1, .15, .22);
    /* also behind a slow card, and where another one is behind that */
    must_name(&(struct setup){.ranks = 3, .compute_ms = {50, 50, 90}, .network_ms = {20, 20, 60}}, 2, .2,
              .35);
    must_name(&(struct setup){.ranks = 3, .compute_ms = {50, 50, 90}, .network_ms = {20, 60, 20}}, 2, .3, .4);
}

/* Each step it has its sums late and submits late, by 40 ms of 110. */
static void a_slow_card_is_no_computing(void **state)
{
    must_not_name(&(struct setup){.ranks = 2, .compute_ms = {50, 50}, .network_ms = {20, 60}, .noise_ms = 5});
    must_not_name(&(struct setup){
        .ranks = 4, .compute_ms = {50, 50, 50, 50}, .network_ms = {20, 20, 100, 20}, .noise_ms = 5});
}

static void even_ranks(void **state)
{
    for (int ranks = 1; ranks <= MOST_RANKS; ranks++) {
        struct setup s = {.ranks = ranks, .noise_ms = 60};
        for (int i = 0; i < ranks; i++) {
            s.compute_ms[i] = 100;
            s.network_ms[i] = 20;
        }
        must_not_name(&s);
        s.by_turns = true;
        must_not_name(&s);
    }
    must_not_name(&(struct setup){
        .ranks = 2, .compute_ms = {.1, 1}, .network_ms = {1, 1}}); /* half of it is no millisecond */
}

/* The others are measured by the lower median, not by the fastest. */
static void one_fast_rank_makes_no_late_ones(void **state)
{
    must_not_name(&(struct setup){
        .ranks = 4, .compute_ms = {50, 100, 100, 100}, .network_ms = {20, 20, 20, 20}, .noise_ms = 5});
}

/* A checkpoint of 3 s after each 30 steps of 0.12 s. */
static void a_pause_names_nobody(void **state)
{
    must_not_name(&(struct setup){
        .ranks = 2, .compute_ms = {100, 100}, .network_ms = {20, 20}, .pause_ms = 3000, .pause_every = 30});
}

/* A job that sums alone, as bench/goodput does: each rank takes a millisecond between two steps, and one waits for 30 more. */
static void a_rank_that_waits_for_a_processor(void **state)
{
    must_name_for(&(struct setup){.ranks = 4,
                                  .compute_ms = {1, 1, 1, 1},
                                  .network_ms = {80, 80, 80, 80},
                                  .wait_factor = {2, 1, 30, 1}},
                  2, TLY_LATE_WAITS, .15, .35);
    /* one that computes as long as the others, on a processor that others use */
    must_name_for(&(struct setup){.ranks = 2,
                                  .compute_ms = {100, 100},
                                  .network_ms = {20, 20},
                                  .wait_factor = {1.2, 2}},
                  1, TLY_LATE_WAITS, .2, .5);
    /* one that computes a little longer, too */
    must_name_for(&(struct setup){.ranks = 2,
                                  .compute_ms = {100, 110},
                                  .network_ms = {20, 20},
                                  .wait_factor = {0, 1.5}},
                  1, TLY_LATE_WAITS, .2, .5);
}

/* Where all wait alike, the one that is late computes longer, however long that takes. */
static void a_rank_that_computes_longer_on_busy_processors(void **state)
{
    for (int factor = 1; factor <= 5; factor++) {
        struct setup s = {.ranks = 3, .compute_ms = {40, 120, 40}, .network_ms = {20, 20, 20}};
        for (int i = 0; i < s.ranks; i++)
            s.wait_factor[i] = factor;
        must_name(&s, 1, .3, .75);
    }
    /* it waits a little longer, too */
    must_name(&(struct setup){.ranks = 2,
                              .compute_ms = {100, 200},
                              .network_ms = {20, 20},
                              .wait_factor = {1.1, 1.2}},
              1, .3, .6);
}

static void a_rank_whose_memory_comes_from_a_disk(void **state)
{
    struct setup s = {
        .ranks = 2, .compute_ms = {100, 100}, .network_ms = {20, 20}, .page_ms = {0, 60}, .noise_ms = 5};
    must_name_for(&s, 1, TLY_LATE_PAGES, .2, .5);
    s.page_ms[0] = 60; /* both: the other computes longer */
    s.compute_ms[0] = 160;
    must_name(&s, 0, .15, .5);
}

/* A reason that has been named gives way only to one that is clearly better. */
static void a_reason_stays(void **state)
{
    struct tly_own own[2] = {0};
    const struct tly_own *of[2] = {&own[0], &own[1]};
    struct tly_lateness l, named = {.rank = 1, .why = TLY_LATE_WAITS};
    for (int i = 0; i < TLY_LATE_ENOUGH; i++) {
        tly_own_see(&own[0], &(struct tly_steps){1, 20, 0, 0, 100});
        tly_own_see(&own[1], &(struct tly_steps){1, 60, 18, 0, 100});
    }
    for (int i = 0; i < TLY_LATE_ENOUGH; i++)
        own[1].ring[TLY_OWN_STEP_S][i] = .1;
    assert_int_equal(tly_late_find(2, of, NULL, &l), 1);
    assert_int_equal(l.why, TLY_LATE_COMPUTES);
    assert_int_equal(tly_late_find(2, of, &named, &l), 1);
    assert_int_equal(l.why, TLY_LATE_WAITS);
}

/* Its figures stay as they were, and count no more. */
static void a_rank_that_has_left_does_not_count(void **state)
{
    must_not_name(&(struct setup){
        .ranks = 3, .compute_ms = {100, 150, 100}, .network_ms = {20, 20, 20}, .left = {false, true}});
}

static void too_little_is_known(void **state)
{
    struct tly_own own[2] = {0};
    const struct tly_own *of[2] = {&own[0], &own[1]};
    struct tly_lateness l;
    const struct tly_steps tenth = {1, 10000, 0, 0, 100000}, six = {1, 60000, 0, 0, 100000};
    static const struct tly_steps nonsense[] = {
        {0, 60000, 0, 0, 100000}, {1, 0, 0, 0, 0}, {1, 60000, 0, 0, 59999}, {1, 5, 6, 0, 9}, {1, 5, 3, 3, 9}};
    for (int i = 0; i < TLY_LATE_ENOUGH; i++) {
        assert_int_equal(tly_late_find(2, of, NULL, &l), -1);
        tly_own_see(&own[0], &tenth);
        if (i)
            tly_own_see(&own[1], &six);
    }
    assert_int_equal(tly_late_find(2, of, NULL, &l), -1);
    for (size_t i = 0; i < sizeof nonsense / sizeof *nonsense; i++)
        tly_own_see(&own[1], &nonsense[i]); /* counts for nothing */
    assert_int_equal(tly_late_find(2, of, NULL, &l), -1);
    tly_own_see(&own[1], &six);
    assert_int_equal(tly_late_find(2, of, NULL, &l), 1);
    assert_int_equal(l.rank, 1);
    assert_true(fabs(l.share - .5) < 1e-9 && fabs(l.step_s - .1) < 1e-9);
    assert_int_equal(tly_late_find(2, (const struct tly_own *[]){&own[0], &own[0]}, NULL, &l), 0);
    assert_int_equal(tly_late_find(2, (const struct tly_own *[]){&own[0], NULL}, NULL, &l), -1);
    assert_int_equal(tly_late_find(0, of, NULL, &l), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_rank_that_computes_longer),
        cmocka_unit_test(a_slow_card_is_no_computing),
        cmocka_unit_test(even_ranks),
        cmocka_unit_test(one_fast_rank_makes_no_late_ones),
        cmocka_unit_test(a_pause_names_nobody),
        cmocka_unit_test(a_rank_that_waits_for_a_processor),
        cmocka_unit_test(a_rank_that_computes_longer_on_busy_processors),
        cmocka_unit_test(a_rank_whose_memory_comes_from_a_disk),
        cmocka_unit_test(a_reason_stays),
        cmocka_unit_test(a_rank_that_has_left_does_not_count),
        cmocka_unit_test(too_little_is_known),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
