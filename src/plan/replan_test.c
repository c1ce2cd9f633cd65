/* replan_test.c - a replanner in a model of a cluster: cards that drop, return, lie and wander.  The model knows
 * no time but samples. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "plan/replan_work.h"

enum { MOST = 24 };

/* --- a model of a cluster --------------------------------------------------------------------------- */

/* In each step what crosses a card takes as long as the plan's formula says of its true rate; the longest is the step.  A
 * card is backlogged for about the square root of the part of the step for which it is busy, as measured on the emulated
 * cluster: 0.4 where it is busy for 0.24, 0.58 and 0.75 for 0.45. */
struct cluster {
    int workers, count;
    double real[MOST], sums[MOST]; /* true rates; of sums 0: no limit */
    double noise;                  /* of all cards' rates, drawn anew for each step, */
    uint32_t hold;                 /* or for so many */
    double now[MOST];              /* true rates of this step */
    double bias[MOST];             /* what a gauge adds to the rate that it sees, always */
    double lie[MOST];              /* it claims this backlog; 0: the truth */
    double unseen[MOST];           /* part of its backlog that does not show */
    struct tly_replan *r;
    struct tly_replan_service s[MOST];
    uint32_t changes, steps;
    double seconds; /* of the last step */
    unsigned random;
};

static double chance(struct cluster *c)
{
    c->random = c->random * 1664525u + 1013904223u;
    return (double)(c->random >> 8) / (double)(1 << 24);
}

static double normal(struct cluster *c)
{
    double sum = 0;
    for (int i = 0; i < 12; i++)
        sum += chance(c);
    return sum - 6;
}

/* The split that the roster would have by what the replanner says. */
static void split(struct cluster *c)
{
    struct tly_plan_machine m[MOST] = {0};
    uint32_t weight[MOST];
    int n = 0, at[MOST];
    for (int i = 0; i < c->count; i++) {
        c->s[i].machine.bandwidth = tly_replan_bandwidth(c->r, i);
        c->s[i].weight = 0;
        if (!c->s[i].active || tly_replan_rests(c->r, i))
            continue;
        m[n] = c->s[i].machine;
        m[n].sum_rate = tly_replan_sum_rate(c->r, i);
        m[n].card = (uint32_t)n;
        at[n++] = i;
    }
    assert_int_equal(tly_plan_split(TLY_SPLIT_OPTIMAL, n, m, weight), 0);
    for (int j = 0; j < n; j++)
        c->s[at[j]].weight = weight[j];
    tly_replan_begin(c->r, true);
}

/* What a step takes by the true rates and a split. */
static double took(const struct cluster *c, const double *real, const uint32_t *weight)
{
    struct tly_plan_machine m[MOST];
    for (int i = 0; i < c->count; i++)
        m[i] = (struct tly_plan_machine){c->s[i].machine.ranks, (uint32_t)i, real[i], c->sums[i]};
    return tly_plan_cost(c->count, m, weight, NULL);
}

static double best(const struct cluster *c)
{
    struct tly_plan_machine m[MOST];
    uint32_t weight[MOST];
    for (int i = 0; i < c->count; i++)
        m[i] = (struct tly_plan_machine){c->s[i].machine.ranks, (uint32_t)i, c->real[i], c->sums[i]};
    assert_int_equal(tly_plan_split(TLY_SPLIT_OPTIMAL, c->count, m, weight), 0);
    return tly_plan_cost(c->count, m, weight, NULL);
}

static void weights(const struct cluster *c, uint32_t *weight)
{
    for (int i = 0; i < c->count; i++)
        weight[i] = c->s[i].weight;
}

/* What part of the optimum the split that there is now reaches, by the true rates. */
static double fraction(const struct cluster *c)
{
    uint32_t weight[MOST];
    weights(c, weight);
    return best(c) / took(c, c->real, weight);
}

static void start(struct cluster *c, int workers, int spare, const double *said, double most)
{
    *c = (struct cluster){.workers = workers, .count = workers + spare, .hold = 1, .random = 1};
    assert_int_equal(tly_replan_create(false, &c->r), 0);
    for (int i = 0; i < c->count; i++) {
        c->real[i] = 100;
        c->s[i] = (struct tly_replan_service){
            .machine = {.ranks = i < workers, .card = (uint32_t)i}, .active = true, .spare = i >= workers};
        assert_int_equal(tly_replan_place(c->r, i, said ? said[i] : 100, most, 0, false), 0);
    }
    split(c);
    c->changes = 0;
}

static void step(struct cluster *c)
{
    double *real = c->now, all = c->workers;
    uint32_t weight[MOST], total = 0;
    weights(c, weight);
    for (int i = 0; i < c->count; i++) {
        if (c->steps % c->hold == 0)
            real[i] = c->real[i] * fmax(.5, 1 + c->noise * normal(c));
        total += weight[i];
    }
    c->steps++;
    c->seconds = took(c, real, weight);
    for (int i = 0; i < c->count; i++) {
        double moved = c->s[i].machine.ranks + (all - 2 * c->s[i].machine.ranks) * weight[i] / total;
        double inputs = all * weight[i] / total;
        double used = moved / real[i] / c->seconds,
               adding = c->sums[i] > 0 ? inputs / c->sums[i] / c->seconds : 0;
        double busy = fmin(1, sqrt(used) * (1 + .02 * normal(c)));
        busy *= 1 - c->unseen[i];
        if (c->lie[i] > 0)
            busy = c->lie[i];
        c->s[i].card = (struct tly_sight){moved / c->seconds * (1 + c->bias[i]), busy, busy};
        /* What is not taken off the connections shows as such only where it lies there for most of the time. */
        c->s[i].sums =
            (struct tly_sight){inputs / c->seconds, adding > .9 ? adding : 0, adding > .9 ? adding : 0};
    }
    if (tly_replan_step(c->r, c->count, c->s, 1 / c->seconds)) {
        c->changes++;
        split(c);
    }
}

static void run(struct cluster *c, int steps)
{
    for (int i = 0; i < steps; i++)
        step(c);
}

/* Of the optimum, at worst, in the last `count` of some steps more. */
static double settled(struct cluster *c, int within)
{
    run(c, within);
    return fraction(c);
}

static void finish(struct cluster *c)
{
    tly_replan_destroy(c->r);
}

static const int shapes[][2] = {{4, 0}, {4, 2}, {8, 4}, {8, 1}, {3, 2}, {8, 8}};
#define EACH_SHAPE(shape) for (size_t shape = 0; shape < sizeof shapes / sizeof *shapes; shape++)

/* Thousands of steps take a second for each machine of the shape: one of the large shapes runs with each part of the long
 * tests, and all with TEST_LONG=all. */
static bool is_long(size_t shape)
{
    const char *choice = getenv("TEST_LONG");
    bool all = choice && strcmp(choice, "all") == 0;
    size_t part = choice ? strtoul(choice, NULL, 10) : 0, count = sizeof shapes / sizeof *shapes;
    return shapes[shape][0] + shapes[shape][1] > 6 && !all && !(part && part % count == shape);
}

static void a_tallyd_drops_and_returns(void **state)
{
    EACH_SHAPE(k)
    {
        struct cluster c;
        int workers = shapes[k][0], spare = shapes[k][1];
        if (!spare)
            continue;
        start(&c, workers, spare, NULL, 0);
        c.noise = .02;
        run(&c, 50);
        assert_int_equal(c.changes, 0);
        c.real[workers] = 20;
        assert_true(settled(&c, 20) >= .95);
        run(&c, 100);
        c.real[workers] = 100;
        assert_true(settled(&c, 40) >= .95);
        /* It is like the others again, to the last bit, or nearly so. */
        finish(&c);
    }
}

/* The mean fraction of the optimum in some samples. */
static double mean(struct cluster *c, int samples)
{
    double optimum = best(c), all = 0;
    for (int i = 0; i < samples; i++) {
        step(c);
        all += optimum / c->seconds;
    }
    return all / samples;
}

/* A token bucket lets a few parts through at once, so a slow card with a share that just fits has backlogs now and then
 * alone.  Whether it carries more must be tried, but at little cost; and it is found when it does. */
static void a_slow_card_that_seems_idle_is_tried_cheaply(void **state)
{
    EACH_SHAPE(k)
    {
        struct cluster c;
        int workers = shapes[k][0], spare = shapes[k][1];
        if (spare < 2)
            continue;
        start(&c, workers, spare, NULL, 0);
        c.noise = .02;
        run(&c, 30);
        c.real[workers] = 20;
        assert_true(settled(&c, 20) >= .95);
        c.unseen[workers] = .35;
        assert_true(mean(&c, 60) >= .93);
        c.real[workers] = 100;
        assert_true(settled(&c, 200) >= .95);
        finish(&c);
    }
}

/* Four workers and some tallyds that are known, after which the first `slow` of the tallyds drop to `rate`. */
static void start_slow(struct cluster *c, int spare, int slow, double rate)
{
    start(c, 4, spare, NULL, 0);
    c->noise = .02;
    run(c, 30);
    for (int i = 0; i < slow; i++)
        c->real[4 + i] = rate;
}

/* Two slow cards are tried at once; the one that has mended has its share again, the other keeps a small one. */
static void a_feeler_finds_out_which_of_two_cards_has_mended(void **state)
{
    struct cluster c;
    start_slow(&c, 4, 2, 20);
    run(&c, 20);
    c.unseen[4] = c.unseen[5] = .35;
    run(&c, 100);
    bool both = false;
    c.real[4] = 100;
    for (int i = 0; i < 40 && !(both && !c.r->trying); i++) {
        step(&c);
        both |= c.r->feeler && tly_replan_tries(c.r, 4) && tly_replan_tries(c.r, 5);
    }
    assert_true(both && !c.r->trying);
    for (int i = 0; i < 35; i++) {
        step(&c);
        assert_false(tly_replan_tries(c.r, 5)); /* while the other one has more to carry */
    }
    assert_true(mean(&c, 200) >= .95);
    assert_true(tly_replan_bandwidth(c.r, 4) > 80);
    assert_true(tly_replan_bandwidth(c.r, 5) < 30);
    finish(&c);
}

/* After tries in vain the next one is far off, unless the card becomes idler: then something has changed. */
static void a_try_in_vain_is_repeated_at_once_when_its_card_is_idler(void **state)
{
    struct cluster c;
    start_slow(&c, 2, 1, 20);
    run(&c, 20);
    c.unseen[4] = .35;
    for (int i = 0; i < 2000 && (c.r->trying || c.r->more.pause < 500); i++)
        step(&c);
    assert_true(c.r->more.at > c.r->samples + 400);
    assert_int_equal(c.r->interval, TLY_REPLAN_INTERVAL); /* no card went back and forth */
    c.real[4] = 100;
    run(&c, 60);
    assert_true(fraction(&c) >= .95);
    finish(&c);
}

/* A slow tallyd with a share of 6% showed backlogs for .41 of the time, and after its card's return for .36 (4 + 2 machines,
 * `pattern`).  That alone is reason enough for a feeler; a level that only varies is not. */
static void a_slow_card_that_is_a_little_idler_is_tried(void **state)
{
    struct cluster c;
    start_slow(&c, 2, 1, 20);
    run(&c, 20);
    for (int i = 0; i < 2000 && (c.r->trying || c.r->more.pause < 500); i++) {
        c.lie[4] = c.r->trying ? 0 : .41;
        step(&c);
    }
    assert_true(c.r->more.at > c.r->samples + 400);
    c.changes = 0;
    for (int i = 0; i < 400; i++) {
        c.lie[4] = i % 12 < 5 ? .37 : .42;
        step(&c);
    }
    assert_int_equal(c.changes, 0);
    c.real[4] = 100;
    for (int i = 0; i < 40; i++) {
        c.lie[4] = tly_replan_bandwidth(c.r, 4) > 30 ? 0 : .36;
        step(&c);
    }
    assert_true(fraction(&c) >= .95);
    finish(&c);
}

/* A card that others use, too, has something on its way all the time even when these have gone.  It carried more before, so it
 * is tried; where it does not mend, that costs next to nothing. */
static void a_card_that_carried_more_is_tried_though_it_seems_busy(void **state)
{
    struct cluster c;
    start_slow(&c, 2, 1, 57);
    run(&c, 40);
    c.lie[4] = .99;
    c.changes = 0;
    assert_true(mean(&c, 1000) >= .965); /* .974 without a try, for the noise */
    assert_true(c.changes <= 8);
    c.real[4] = 100;
    assert_true(settled(&c, 1600) >= .97); /* .957 without a try */
    finish(&c);
}

/* Cards measured at `measured` of the others' rate, from place `first` on; `real` is what they carry.  They have backlogs
 * nearly all the time, for their parts wait among others. */
static void start_doubtful(struct cluster *c, size_t shape, int first, int count, double measured,
                           double real)
{
    double said[MOST];
    for (int i = 0; i < MOST; i++)
        said[i] = i >= first && i < first + count ? measured : 100;
    start(c, shapes[shape][0], shapes[shape][1], said, 0);
    c->noise = .02;
    for (int i = first; i < first + count; i++) {
        c->real[i] = real;
        c->lie[i] = .93;
    }
}

/* A card that was measured too low is tried with what the others carry; if that was in vain it stays as it was measured, for a
 * long time. */
static void a_card_measured_far_below_the_others_is_tried_rarely(void **state)
{
    EACH_SHAPE(k)
    {
        int last = shapes[k][0] + shapes[k][1] - 1;
        for (int wrong = 0; wrong < 2 && shapes[k][1]; wrong++) {
            struct cluster c;
            start_doubtful(&c, k, last, 1, 60, wrong ? 100 : 60);
            run(&c, 60);
            assert_true(fraction(&c) >= .98);
            run(&c, 1000);
            assert_true(c.changes <= 2);
            finish(&c);
        }
    }
}

static void whatever_was_measured_far_below_the_others_is_tried(void **state)
{
    static const struct {
        size_t shape;
        int first, count;
        double measured;
    } all[] = {
        {1, 4, 2, 60}, /* both tallyds of 4 + 2 */
        {2, 9, 2, 60}, /* two of four */
        {1, 5, 1, 82}, /* a little below */
        {0, 2, 1, 70}, /* a worker's card that has a share */
    };
    for (size_t k = 0; k < sizeof all / sizeof *all; k++) {
        struct cluster c;
        start_doubtful(&c, all[k].shape, all[k].first, all[k].count, all[k].measured, 100);
        run(&c, 100);
        assert_true(fraction(&c) >= .98);
        finish(&c);
    }
}

/* A small deviation that was tried in vain says nothing of whether it was measured too low. */
static void a_small_try_leaves_a_doubtful_card_its_own(void **state)
{
    struct cluster c;
    bool tried = false;
    start(&c, 8, 4, NULL, 0);
    c.noise = .02;
    run(&c, 60);
    c.lie[9] = 1;
    c.bias[9] = -.1;
    for (int i = 0; i < 400; i++) {
        c.r->place[9].doubtful = true; /* left by a look at higher values that began no try */
        step(&c);
        tried |= c.r->trying == &c.r->fine && c.r->place[9].tried;
    }
    assert_true(tried && !c.r->trying);
    assert_int_equal(c.r->place[9].known.asked_until, 0);
    finish(&c);
}

/* The try came while other traffic still went through the card. */
static void a_card_measured_far_below_the_others_is_tried_again(void **state)
{
    struct cluster c;
    start_doubtful(&c, 1, 5, 1, 60, 60);
    run(&c, 200);
    assert_true(tly_replan_bandwidth(c.r, 5) < 65);
    c.real[5] = 100;
    assert_true(settled(&c, 2 * TLY_REPLAN_MOST_INTERVAL) >= .98);
    finish(&c);
}

/* A worker without a share sends and receives its own gradient alone, so no share hides what its card carries. */
static void a_slow_worker_without_a_share_is_not_tried(void **state)
{
    struct cluster c;
    start(&c, 4, 2, NULL, 0);
    c.noise = .02;
    run(&c, 30);
    c.real[1] = 50;
    run(&c, 60);
    assert_int_equal(c.s[1].weight, 0);
    for (int i = 4; i < 6;
         i++) { /* tallyds whose backlogs fill most samples, for steps are longer than samples */
        c.lie[i] = .89;
        c.bias[i] = 88 / c.s[i].card.rate - 1;
    }
    c.changes = 0;
    run(&c, 1000);
    assert_int_equal(c.changes, 0);
    finish(&c);
}

/* A tallyd that has become a little slower holds all others up.  They are idle for that alone and are not tried meanwhile.  It
 * is busier than the other tallyds, so it is parted from them. */
static void a_card_a_little_slower_than_its_like_is_found(void **state)
{
    struct cluster c;
    start(&c, 8, 4, NULL, 0);
    c.noise = .02;
    run(&c, 60);
    c.real[9] = 89;
    for (int i = 0; i < c.workers; i++)
        c.unseen[i] = .35;
    for (int i = 0; i < 3 * TLY_GAUGE_LONG; i++) {
        step(&c);
        for (int j = 0; j < c.workers; j++)
            assert_false(tly_replan_tries(c.r, j));
        if (tly_replan_bandwidth(c.r, 9) < 95)
            break;
    }
    run(&c, 2 * TLY_GOODPUTS); /* the try is judged, and stays */
    assert_true(fabs(tly_replan_bandwidth(c.r, 9) - 89) < 4);
    assert_true(tly_replan_bandwidth(c.r, 8) == 100);
    assert_true(fraction(&c) >= .985);
    c.real[9] = 100;
    assert_true(settled(&c, 200) >= .985);
    finish(&c);
}

/* When a card begins to fall short, nobody is tried for as long as its gauge needs.  Then others are, though it still does. */
static void tries_wait_for_a_card_that_falls_short(void **state)
{
    struct cluster c;
    bool tried = false;
    start(&c, 8, 4, NULL, 0);
    run(&c, 60);
    c.lie[9] = 1;
    c.bias[9] = -.1;
    for (int i = 0; i < c.workers; i++)
        c.unseen[i] = .5;
    for (int n = 0; n < 300; n++) {
        step(&c);
        for (int j = 0; j < c.workers; j++)
            tried |= tly_replan_tries(c.r, j);
        assert_false(tried && n < TLY_GAUGE_LONG);
    }
    assert_true(tried);
    finish(&c);
}

/* Where workers have too much to do, tallyds have their backlogs, and are not slower for that. */
static void a_card_less_busy_than_slow_ones_is_not_slower(void **state)
{
    struct cluster c;
    double said[MOST];
    for (int i = 0; i < MOST; i++)
        said[i] = i < 8 ? 170 : 100;
    start(&c, 8, 4, said, 0);
    for (int i = 0; i < c.workers; i++)
        c.lie[i] = 1;
    for (int i = c.workers; i < c.count; i++)
        c.lie[i] = .9;
    for (int i = 0; i < 20; i++) {
        step(&c);
        for (int j = c.workers; j < c.count; j++)
            assert_true(tly_replan_bandwidth(c.r, j) == 100);
    }
    assert_true(fraction(&c) >= .95);
    finish(&c);
}

/* A card that has dropped to what others carry is not one of them: it is tried again. */
static void a_card_that_dropped_to_the_others_value_returns(void **state)
{
    struct cluster c;
    double said[MOST];
    for (int i = 0; i < MOST; i++)
        said[i] = i == 8 ? 200 : 100;
    start(&c, 8, 4, said, 0);
    c.noise = .02;
    c.real[8] = 200;
    run(&c, 60);
    c.real[8] = 100;
    run(&c, 60);
    assert_true(tly_replan_bandwidth(c.r, 8) == tly_replan_bandwidth(c.r, 9));
    c.real[8] = 200;
    run(&c, 200);
    assert_true(tly_replan_bandwidth(c.r, 8) > 180);
    finish(&c);
}

/* A card that seems to be slow all the time keeps others from no change of their own. */
static void a_liar_hides_no_slow_card(void **state)
{
    struct cluster c;
    start(&c, 8, 4, NULL, 0);
    c.noise = .02;
    run(&c, 60);
    c.lie[9] = 1;
    c.bias[9] = -.2;
    run(&c, 200);
    c.real[1] = 50;
    c.unseen[1] = .08;
    assert_true(settled(&c, 30) >= .9);
    assert_true(tly_replan_bandwidth(c.r, 1) < 60);
    finish(&c);
}

/* A card of another value hides none either, once a try has refuted that it is slow. */
static void a_refuted_card_hides_no_slow_card(void **state)
{
    struct cluster c;
    double said[MOST];
    for (int i = 0; i < MOST; i++)
        said[i] = i < 8 ? 100 : 60;
    start(&c, 8, 4, said, 0);
    c.r->place[9].known.refuted = 50;
    c.r->place[9].known.refuted_until = 5000;
    for (int i = 0; i < c.count; i++)
        c.s[i].card = (struct tly_sight){i < 8 ? 70 : 50, .85, .85};
    c.s[9].card = (struct tly_sight){49, .98, .98};
    c.s[1].card = (struct tly_sight){77, .9, .9};
    for (int i = 0; i < 40; i++)
        if (tly_replan_step(c.r, c.count, c.s, 10))
            split(&c);
    assert_true(tly_replan_bandwidth(c.r, 9) == 60);
    assert_true(tly_replan_bandwidth(c.r, 1) < 90);
    finish(&c);
}

/* Two cards that by turns seem to be slow put tries off for a while, and not for good. */
static void liars_by_turns_put_tries_off_for_a_while(void **state)
{
    struct cluster c;
    bool tried = false;
    start(&c, 8, 4, NULL, 0);
    run(&c, 60);
    for (int i = 0; i < c.workers; i++)
        c.unseen[i] = .5;
    for (int n = 0; n < 150; n++) {
        for (int i = 0; i < 2; i++) {
            bool lies = (n + 20 * i) % 40 < 24;
            c.lie[9 + i] = lies;
            c.bias[9 + i] = lies ? -.1 : 0;
        }
        step(&c);
        for (int j = 0; j < c.workers; j++)
            tried |= tly_replan_tries(c.r, j);
    }
    assert_true(tried);
    finish(&c);
}

/* Fewer than half of five cards alike that seem idler than the others are no reason to part them. */
static void few_idle_cards_among_many_alike_are_not_tried(void **state)
{
    for (int idle = 1; idle <= 2; idle++) {
        struct cluster c;
        start_slow(&c, 2, 1, 20);
        run(&c, 20);
        for (int i = 0; i < idle; i++)
            c.unseen[i] = .6;
        c.unseen[4] = .35;
        bool tried = false;
        for (int i = 0; i < 1000; i++) {
            step(&c);
            tried |= tly_replan_tries(c.r, 4);
            for (int j = 0; j < idle; j++)
                assert_true(tly_replan_bandwidth(c.r, j) == tly_replan_bandwidth(c.r, 3));
        }
        assert_true(tried);
        finish(&c);
    }
}

/* Also what was only found out in the job counts as what the card has carried. */
static void what_a_card_was_found_to_carry_is_remembered(void **state)
{
    struct cluster c;
    double said[MOST] = {100, 100, 100, 100, 50, 100};
    start(&c, 4, 2, said, 0);
    c.noise = .02;
    run(&c, 300);
    assert_true(tly_replan_bandwidth(c.r, 4) > 90);
    c.real[4] = 57;
    run(&c, 40);
    assert_true(tly_replan_bandwidth(c.r, 4) < 65);
    assert_true(c.r->place[4].known.peak > 90);
    finish(&c);
}

/* Of two slow cards that are tried at once the idler one waits for the other.  It has carried no more, so it is felt again, and
 * never tried with what others carry. */
static void a_card_that_has_only_waited_is_felt_again(void **state)
{
    struct cluster c;
    start_slow(&c, 4, 2, 20);
    run(&c, 20);
    c.unseen[4] = .6;
    c.unseen[5] = .35;
    bool both = false;
    for (int i = 0; i < 400; i++) {
        step(&c);
        both |= c.r->feeler && tly_replan_tries(c.r, 4) && tly_replan_tries(c.r, 5);
        assert_true(tly_replan_bandwidth(c.r, 4) < 50 && tly_replan_bandwidth(c.r, 5) < 50);
    }
    assert_true(both);
    for (int i = 0; i < 100 && c.r->trying; i++)
        step(&c);
    assert_true(!c.r->trying);
    assert_true(fraction(&c) >= .95);
    finish(&c);
}

/* What a card carries is compared with what it carried before, so without samples there is no feeler. */
static void a_card_is_tried_only_once_it_has_been_seen(void **state)
{
    struct cluster c;
    start(&c, 4, 2, NULL, 0);
    run(&c, 30);
    c.real[4] = 20;
    for (int i = 0; i < 20 && tly_replan_bandwidth(c.r, 4) == 100; i++)
        step(&c);
    assert_true(tly_replan_bandwidth(c.r, 4) < 25);
    for (int i = 0; i < 30; i++) {
        step(&c);
        for (int j = 0; j < 3; j++) { /* goodput alone */
            struct tly_sight seen = c.s[4].card;
            c.s[4].card = (struct tly_sight){NAN, NAN, NAN};
            if (tly_replan_step(c.r, c.count, c.s, 1 / c.seconds))
                split(&c);
            c.s[4].card = seen;
        }
        assert_true(!c.r->trying || c.r->place[4].carried_before > 0);
    }
    assert_true(tly_replan_bandwidth(c.r, 4) < 30);
    c.lie[4] = .99;
    for (int i = 0; i < 1600 && !c.r->trying; i++)
        step(&c);
    assert_true(c.r->trying && c.r->place[4].carried_before > 0);
    finish(&c);
}

/* Until a feeler of one slow tallyd's card, at place 4, is under way. */
static void start_feeler(struct cluster *c)
{
    start_slow(c, 2, 1, 20);
    run(c, 20);
    c->unseen[4] = .35;
    for (int i = 0; i < 100 && !c->r->trying; i++)
        step(c);
    assert_true(c->r->trying && c->r->feeler && tly_replan_tries(c->r, 4));
}

/* A card of which no rank sees anything any more: the feeler ends all the same, and leaves what was before. */
static void a_feeler_of_a_card_that_is_not_seen_ends(void **state)
{
    struct cluster c;
    start_feeler(&c);
    double tried = tly_replan_bandwidth(c.r, 4);
    c.s[4].card = (struct tly_sight){NAN, NAN, NAN};
    for (int i = 0; i < TLY_GOODPUTS; i++)
        if (tly_replan_step(c.r, c.count, c.s, 1 / c.seconds))
            split(&c);
    assert_false(tly_replan_tries(c.r, 4));
    assert_true(tly_replan_bandwidth(c.r, 4) < tried);
    finish(&c);
}

/* It was not seen for some samples: the feeler waits for it. */
static void a_feeler_is_judged_by_what_is_seen(void **state)
{
    struct cluster c;
    start_feeler(&c);
    double tried = tly_replan_bandwidth(c.r, 4);
    c.real[4] = 100;
    c.s[4].card = (struct tly_sight){NAN, NAN, NAN};
    for (int i = 0; i < 2 * TLY_GAUGE_SHORT; i++)
        assert_false(tly_replan_step(c.r, c.count, c.s, 1 / c.seconds));
    assert_true(tly_replan_tries(c.r, 4));
    for (int i = 0; i < TLY_GAUGE_SHORT; i++) {
        step(&c);
        assert_true(tly_replan_bandwidth(c.r, 4) >= tried);
    }
    assert_false(tly_replan_tries(c.r, 4) && c.r->feeler);
    finish(&c);
}

/* Until a feeler of two slow tallyds' cards, at places 4 and 5, is under way.  The value of the first is a guess. */
static void start_two_feelers(struct cluster *c)
{
    start_slow(c, 4, 2, 20);
    run(c, 20);
    c->unseen[4] = .6;
    c->unseen[5] = .35;
    for (int i = 0; i < 400 && !(tly_replan_tries(c->r, 4) && tly_replan_tries(c->r, 5)); i++) {
        c->r->place[4].card.guess |= !c->r->trying;
        step(c);
    }
    assert_true(c->r->feeler && tly_replan_tries(c->r, 4) && tly_replan_tries(c->r, 5));
}

/* What nobody knew before the feeler nobody knows after it. */
static void a_guess_that_has_only_waited_is_still_a_guess(void **state)
{
    struct cluster c;
    start_two_feelers(&c);
    for (int i = 0; i < 40 && c.r->trying; i++)
        step(&c);
    assert_true(!c.r->trying && tly_replan_bandwidth(c.r, 4) < 22);
    assert_true(c.r->place[4].card.guess && !c.r->place[5].card.guess);
    finish(&c);
}

/* One is tried in vain, and of the other nothing is seen: the feeler was in vain. */
static void a_card_that_is_not_seen_has_not_waited(void **state)
{
    struct cluster c;
    start_two_feelers(&c);
    c.s[4].card = (struct tly_sight){NAN, NAN, NAN};
    for (int i = 0; i < TLY_GOODPUTS && c.r->trying; i++)
        if (tly_replan_step(c.r, c.count, c.s, 1 / c.seconds))
            split(&c);
    assert_true(!c.r->trying && c.r->more.at > c.r->samples);
    finish(&c);
}

/* A worker's card has begun to fall short in a feeler: that one comes true, and the next try waits all the same. */
static void a_try_waits_for_what_fell_short_in_its_feeler(void **state)
{
    struct cluster c;
    start_feeler(&c);
    c.real[4] = 100;
    c.real[1] = 96;
    c.bias[1] = -.07;
    c.lie[1] = .98;
    c.r->waits_again = 0;
    for (int i = 0; i < 40 && c.r->feeler && c.r->trying; i++)
        step(&c);
    assert_true(c.r->place[4].felt);
    assert_true(!c.r->trying);
    finish(&c);
}

/* More sums are tried, and nothing comes of it; that the service's card is busy all the time says nothing of them. */
static void sums_tried_in_vain_have_their_limit_again(void **state)
{
    struct cluster c;
    start(&c, 4, 2, NULL, 0);
    struct place *p = &c.r->place[4];
    p->before = p->card.value;
    p->before_sums = 50;
    p->tried = true;
    c.r->trying = &c.r->more;
    c.r->before = 10;
    c.r->promised = .2;
    for (int i = 0; i < c.count; i++)
        c.s[i].card = (struct tly_sight){99, .99, .99};
    for (int i = 0; i < TLY_GOODPUTS && c.r->trying; i++)
        tly_replan_step(c.r, c.count, c.s, 10);
    assert_true(!c.r->trying && tly_replan_sum_rate(c.r, 4) == 50);
    finish(&c);
}

/* A card that is tried with more than it carries falls short, for that alone. */
static void nobody_waits_for_a_card_that_is_tried(void **state)
{
    struct cluster c;
    start(&c, 4, 2, NULL, 0);
    struct place *p = &c.r->place[4];
    p->before = p->card.value;
    p->card.value = 110;
    split(&c);
    p->tried = true;
    c.r->trying = &c.r->fine;
    c.r->before = 1000; /* in vain, whatever it brings */
    c.r->promised = .05;
    for (int i = 0; i < 100 && c.r->trying; i++)
        step(&c);
    assert_true(!c.r->trying);
    assert_int_equal(c.r->waits_again, 0);
    finish(&c);
}

/* Which of its samples are a little above the limit is chance. */
static void a_card_falls_short_until_it_clearly_does_not(void **state)
{
    struct cluster c;
    start(&c, 8, 4, NULL, 0);
    for (int i = 0; i < c.count; i++)
        c.s[i].card = (struct tly_sight){70, .85, .85};
    for (int i = 0; i < 40; i++) {
        double carries = i < 10 ? 93 : i < 25 ? 94.5 : 97;
        c.s[9].card = (struct tly_sight){.98 * carries, .98, .98};
        assert_false(tly_replan_step(c.r, c.count, c.s, 10));
        assert_true(c.r->place[9].known.falls_short == (i >= 4 && i < 27));
    }
    finish(&c);
}

/* A value that was raised and is not seen any more: there is nothing to compare with, so nothing is tried. */
static void a_guess_that_is_not_seen_is_not_tried(void **state)
{
    struct cluster c;
    start_slow(&c, 2, 1, 20);
    run(&c, 20);
    c.r->place[4].card.guess = true;
    tly_replan_begin(c.r, false);
    c.s[4].card = (struct tly_sight){NAN, NAN, NAN};
    for (int i = 0; i < 100; i++) {
        if (tly_replan_step(c.r, c.count, c.s, 1 / c.seconds))
            split(&c);
        assert_false(tly_replan_tries(c.r, 4));
    }
    finish(&c);
}

/* A card of 90 that is said to carry 100 has time to spare beside cards of 88 that are full, while another one is tried. */
static void a_card_is_never_tried_with_less(void **state)
{
    struct cluster c;
    static const double said[] = {88, 88, 88, 88, 40, 90};
    bool tried = false;
    start(&c, 4, 2, said, 100);
    c.r->place[5].card.guess = true;
    for (int i = 0; i < c.count; i++)
        c.s[i].card = i < 4 ? (struct tly_sight){88, .95, .95} : (struct tly_sight){i == 5 ? 70 : 30, .5, .5};
    for (int i = 0; i < 100; i++) {
        if (tly_replan_step(c.r, c.count, c.s, 10))
            split(&c);
        tried |= tly_replan_tries(c.r, 4);
        assert_true(tly_replan_bandwidth(c.r, 5) >= 90);
    }
    assert_true(tried);
    finish(&c);
}

static void a_workers_card_halves(void **state)
{
    EACH_SHAPE(k)
    {
        struct cluster c;
        start(&c, shapes[k][0], shapes[k][1], NULL, 0);
        c.noise = .02;
        run(&c, 30);
        c.real[1] = 50;
        assert_true(settled(&c, 20) >= .95);
        run(&c, 30);
        c.real[1] = 100;
        assert_true(settled(&c, 20) >= .95);
        finish(&c);
    }
}

/* A worker's card that returns is busy for most of the time and yet not the one that limits: nothing but a try can tell. */
static void a_workers_card_that_returns_has_its_share_again(void **state)
{
    EACH_SHAPE(k)
    {
        struct cluster c;
        start(&c, shapes[k][0], shapes[k][1], NULL, 0);
        c.noise = .02;
        run(&c, 30);
        c.real[1] = 50;
        run(&c, 60);
        c.real[1] = 100;
        assert_true(settled(&c, 60) >= .985);
        finish(&c);
    }
}

static void a_wrong_start_mends(void **state)
{
    EACH_SHAPE(k)
    {
        for (int wrong = 0; wrong < shapes[k][0] + shapes[k][1]; wrong++) {
            struct cluster c;
            double said[MOST];
            for (int i = 0; i < MOST; i++)
                said[i] = i == wrong ? 60 : 100;
            start(&c, shapes[k][0], shapes[k][1], said, 0);
            c.noise = .02;
            assert_true(settled(&c, 40) >= .95);
            finish(&c);
            said[wrong] = 180;
            start(&c, shapes[k][0], shapes[k][1], said, 0);
            c.noise = .02;
            assert_true(settled(&c, 25) >= .95);
            finish(&c);
        }
    }
}

/* All cards but one were measured too low.  Bursts look fast, but no card is tried with more than the one that was measured
 * right. */
static void cards_measured_too_low_come_up_to_the_right_one(void **state)
{
    EACH_SHAPE(k)
    {
        for (int right = 0; right < shapes[k][0] + shapes[k][1]; right++) {
            struct cluster c;
            double said[MOST];
            for (int i = 0; i < MOST; i++)
                said[i] = i == right ? 100 : 60;
            start(&c, shapes[k][0], shapes[k][1], said, 0);
            c.noise = .02;
            for (int i = 0; i < c.count; i++)
                c.unseen[i] = i == right ? 0 : .4; /* what it carried while a backlog showed seems more */
            for (int n = 0; n < 8; n++) {
                step(&c);
                for (int i = 0; i < c.count; i++)
                    assert_true(tly_replan_bandwidth(c.r, i) <= 106); /* 100 and noise */
            }
            for (int i = 0; i < c.count; i++)
                c.unseen[i] = 0;
            assert_true(settled(&c, 20) >= .95);
            finish(&c);
        }
    }
}

/* All cards but one were raised above what they carry.  Only tallyds are full and say so.  Workers follow them, so nobody is
 * parted. */
static void guesses_follow_the_full_cards_of_their_value(void **state)
{
    struct cluster c;
    double said[MOST];
    for (int i = 0; i < MOST; i++)
        said[i] = i == 9 ? 100 : 120;
    start(&c, 8, 4, said, 0);
    c.noise = .02;
    for (int i = 0; i < c.count; i++) {
        c.r->place[i].card.guess = i != 9;
        c.unseen[i] = i < c.workers ? .15 : 0;
    }
    run(&c, 200);
    assert_true(c.changes <= 1);
    assert_true(fraction(&c) >= .985);
    for (int i = 0; i < c.workers; i++)
        assert_true(tly_replan_bandwidth(c.r, i) == tly_replan_bandwidth(c.r, 8));
    finish(&c);
}

/* Workers' values are guesses still, while the tallyds', which are the same, are known.  Three of four tallyds drop, and no
 * worker goes with them. */
static void guesses_do_not_follow_known_cards_that_drop(void **state)
{
    struct cluster c;
    start(&c, 8, 4, NULL, 0);
    c.noise = .02;
    for (int i = 0; i < c.workers; i++) {
        c.unseen[i] = .15;
        c.r->place[i].card.guess = true;
    }
    run(&c, 60);
    for (int i = 8; i < 11; i++)
        c.real[i] = 50;
    run(&c, 30);
    for (int i = 0; i < c.workers; i++)
        assert_true(tly_replan_bandwidth(c.r, i) > 90);
    assert_true(tly_replan_bandwidth(c.r, 8) < 60);
    finish(&c);
}

static void nothing_known_becomes_known(void **state)
{
    static const double nothing[MOST];
    struct cluster c;
    start(&c, 4, 2, nothing, 0);
    c.real[5] = 30;
    assert_true(settled(&c, 60) >= .95);
    finish(&c);
    start(&c, 4, 2, nothing, 0);
    c.noise = .05;
    run(&c, 500);
    assert_true(c.changes <= 1);
    assert_true(fraction(&c) >= .97);
    finish(&c);
}

/* Whatever the noise, machines alike keep the exact weights of Eq. 1 and 2, and the split stays. */
static void a_steady_cluster_stays(void **state)
{
    EACH_SHAPE(k)
    {
        for (unsigned seed = 1; seed <= 5; seed++) {
            struct cluster c;
            uint32_t exact[MOST];
            start(&c, shapes[k][0], shapes[k][1], NULL, seed % 2 ? 0 : 100);
            c.random = seed;
            c.noise = .05;
            run(&c, 1000);
            assert_true(c.changes <= 2);
            tly_plan_weights(shapes[k][0], shapes[k][1], exact);
            for (int i = 0; i < c.count && c.changes == 0; i++)
                assert_int_equal(c.s[i].weight, exact[i]);
            finish(&c);
        }
    }
}

/* Gauges err, and always the same way, where processors are short; and noise lasts for longer than a sample.  Of what they say
 * little is tried, and what was in vain is not tried again.  2,000 samples are 1,000 steps of 0.8 s. */
static void gauges_that_err_change_little(void **state)
{
    enum { SEEDS = 10 };
    EACH_SHAPE(k)
    {
        uint32_t all = 0;
        double reached = 0;
        if (is_long(k))
            continue;
        for (unsigned seed = 1; seed <= SEEDS; seed++) {
            struct cluster c;
            start(&c, shapes[k][0], shapes[k][1], NULL, 0);
            c.random = seed * 7919;
            c.noise = .05;
            c.hold = 3;
            for (int i = 0; i < c.count; i++)
                c.bias[i] = .03 * normal(&c);
            run(&c, 2000);
            all += c.changes;
            reached += fraction(&c);
            finish(&c);
        }
        assert_true(all <= 2 * SEEDS);
        assert_true(reached >= .99 * SEEDS);
    }
}

/* Between two machines no split gains anything, so what is known of their cards changes quietly. */
static void quiet_corrections_delay_no_change(void **state)
{
    const double said[] = {100, 80};
    struct cluster c;
    start(&c, 2, 0, said, 0);
    for (int i = 0; i < 20; i++) {
        c.real[1] = i % 2 ? 80 : 72;
        run(&c, 2 * TLY_GAUGE_LONG);
        assert_true(fabs(tly_replan_bandwidth(c.r, 1) - c.real[1]) < 4);
    }
    assert_int_equal(c.changes, 0);
    assert_int_equal(c.r->interval, TLY_REPLAN_INTERVAL);
    finish(&c);
}

/* As seen on the emulated cluster (4 + 2 at 500 Mbit/s).  Cards carry 2% more than was measured at first, then 5% less,
 * differently in each second.  Workers' backlogs show for 0.9 of the time and tallyds' for all of it.  So workers seem to
 * carry 5% more than they do, and tallyds what they do: no reason to part them. */
static void backlogs_that_do_not_show_part_nobody(void **state)
{
    enum { SEEDS = 10 };
    EACH_SHAPE(k)
    {
        uint32_t all = 0;
        if (is_long(k))
            continue;
        for (unsigned seed = 1; seed <= SEEDS; seed++) {
            struct cluster c;
            start(&c, shapes[k][0], shapes[k][1], NULL, 0);
            c.random = seed * 7919;
            c.noise = .05;
            c.hold = 3;
            for (int i = 0; i < c.workers; i++)
                c.unseen[i] = .1;
            for (int i = 0; i < c.count; i++)
                c.real[i] = 102;
            run(&c, 12);
            for (int i = 0; i < c.count; i++)
                c.real[i] = 95;
            run(&c, 2000);
            all += c.changes;
            finish(&c);
        }
        assert_true(all <= 2 * SEEDS);
    }
}

static void all_cards_alike_change_together(void **state)
{
    struct cluster c;
    uint32_t exact[MOST];
    start(&c, 4, 2, NULL, 0);
    c.noise = .02;
    run(&c, 20);
    for (int i = 0; i < c.count; i++)
        c.real[i] = 50;
    run(&c, 100);
    tly_plan_weights(4, 2, exact);
    for (int i = 0; i < c.count; i++)
        assert_int_equal((uint64_t)c.s[i].weight * exact[0], (uint64_t)c.s[0].weight * exact[i]);
    finish(&c);
}

static void a_declared_card_is_not_tried_beyond_that(void **state)
{
    struct cluster c;
    start(&c, 4, 2, NULL, 100);
    c.real[5] = 300;
    run(&c, 300);
    for (int i = 0; i < c.count; i++)
        assert_true(tly_replan_bandwidth(c.r, i) <= 100);
    finish(&c);
}

/* A service that claims never to be backlogged, or always: the others' job goes on at what it can do without that one. */
static void a_liar_stops_nobody(void **state)
{
    for (int way = 0; way < 2; way++) {
        struct cluster c;
        uint32_t changes, without[MOST];
        start(&c, 4, 2, NULL, 0);
        c.noise = .02;
        c.lie[5] = way ? 1 : .01;
        run(&c, 300);
        changes = c.changes;
        struct cluster other;
        start(&other, 4, 1, NULL, 0);
        weights(&other, without);
        double alone = took(&other, other.real, without);
        uint32_t weight[MOST];
        weights(&c, weight);
        assert_true(took(&c, c.real, weight) < 1.05 * alone);
        run(&c, 1000);
        assert_true(c.changes - changes < 40);
        finish(&other);
        finish(&c);
    }
}

static void a_tallyd_with_next_to_nothing_rests_and_is_tried_again(void **state)
{
    struct cluster c;
    start(&c, 4, 2, NULL, 0);
    c.real[5] = .5;
    run(&c, 60);
    assert_int_equal(c.s[5].weight, 0);
    assert_true(tly_replan_rests(c.r, 5));
    c.real[5] = 100;
    run(&c, 1600);
    assert_false(tly_replan_rests(c.r, 5));
    assert_true(fraction(&c) >= .95);
    finish(&c);
}

/* A try is under way, and gauges correct another card, for which the split stays. */
static void a_try_in_vain_is_taken_back_whatever_happens_beside_it(void **state)
{
    static const double said[] = {100, 90, 80, 70, 110, 120};
    struct cluster c;
    start(&c, 4, 2, said, 0);
    struct place *p = c.r->place;
    p[0].before = p[0].card.value;
    p[0].card.value = 108;
    split(&c);
    p[0].tried = true;
    c.r->trying = &c.r->fine;
    c.r->before = 10;
    c.r->promised = .05;
    bool changed = false;
    for (int i = 0; i < TLY_GOODPUTS + 1 && !changed; i++) {
        for (int k = 0; k < c.count; k++)
            c.s[k].card = (struct tly_sight){.8 * said[k], .7, .7};
        c.s[2].card = (struct tly_sight){84.5, .9, .9};
        changed = tly_replan_step(c.r, c.count, c.s, 10);
    }
    assert_true(changed);
    assert_true(tly_replan_bandwidth(c.r, 2) > 80);
    assert_true(tly_replan_bandwidth(c.r, 0) == 100);
    finish(&c);
}

/* Cards of 100 with time to spare, beside a tallyd of 2 that is busy all the time: the others are tried with 150, and the
 * tallyd, whose share would be next to nothing, is put to rest.  Nothing comes of it.  Returns when a try has begun. */
static void try_and_rest(struct cluster *c)
{
    static const double said[] = {100, 100, 100, 100, 100, 2};
    bool changed = false;
    start(c, 4, 2, said, 0);
    for (int i = 0; i < c->count; i++)
        c->s[i].card = (struct tly_sight){i == 5 ? 2 : 50, i == 5 ? 1 : .6, i == 5 ? 1 : .6};
    for (int i = 0; i < 40 && !changed; i++)
        changed = tly_replan_step(c->r, c->count, c->s, 10);
    assert_true(changed && c->r->trying);
    assert_true(tly_replan_bandwidth(c->r, 0) == 150);
    assert_true(!tly_replan_is_sure(c->r, 0) && tly_replan_is_sure(c->r, 5));
    assert_true(tly_replan_tries(c->r, 0) && !tly_replan_tries(c->r, 5));
    assert_true(tly_replan_rests(c->r, 5));
    assert_true(c->r->place[5].rest_for == 2 * c->r->place[5].rest_left);
}

static void a_try_in_vain_wakes_a_tallyd_that_it_has_put_to_rest(void **state)
{
    struct cluster c;
    bool changed = false;
    try_and_rest(&c);
    split(&c);
    c.r->place[0].known.refuted = 93; /* a small deviation, tried before */
    c.r->place[0].known.refuted_until = 5000;
    for (int i = 0; i < 40 && !changed; i++)
        changed = tly_replan_step(c.r, c.count, c.s, 10);
    assert_true(changed);
    assert_true(tly_replan_bandwidth(c.r, 0) == 100 && tly_replan_bandwidth(c.r, 5) == 2);
    assert_true(tly_replan_is_sure(c.r, 0));
    assert_false(tly_replan_rests(c.r, 5));
    assert_true(c.r->place[5].rest_for == c.r->place[5].rest_left);
    assert_true(c.r->place[0].known.peak == 100);
    assert_true(c.r->place[0].known.refuted == 93 && c.r->place[0].known.refuted_until == 5000);
    split(&c);
    c.s[0].card = (struct tly_sight){50, 1, 1};
    for (int i = 0; i < 2 * TLY_REPLAN_INTERVAL; i++)
        if (tly_replan_step(c.r, c.count, c.s, 10))
            split(&c);
    assert_true(tly_replan_bandwidth(c.r, 0) < 60);
    assert_int_equal(c.r->interval, TLY_REPLAN_INTERVAL); /* it has not gone back and forth */
    finish(&c);
}

/* The cards carry more than was measured and less than is tried.  They are busy all the time, so their gauges tell. */
static void full_cards_tried_in_vain_say_what_they_carry(void **state)
{
    static const double said[] = {100, 100, 100, 100, 60, 60, 60, 60};
    struct cluster c;
    start(&c, 4, 4, said, 0);
    c.noise = .02;
    for (int i = 4; i < c.count; i++) {
        c.real[i] = 66;
        c.unseen[i] = .3;
    }
    for (int i = 0; i < 40 && !c.r->trying; i++)
        step(&c);
    assert_true(c.r->trying && !c.r->feeler && c.r->promised > .1);
    for (int i = 4; i < c.count; i++)
        c.unseen[i] = 0;
    for (int i = 0; i < 20; i++) {
        step(&c);
        assert_true(tly_replan_bandwidth(c.r, 4) > 61);
    }
    assert_true(tly_replan_bandwidth(c.r, 4) < 70);
    finish(&c);
}

/* A tallyd leaves with the change by which a try begins: that less comes says nothing of the try. */
static void a_try_is_not_judged_by_anothers_change(void **state)
{
    struct cluster c;
    bool changed = false;
    try_and_rest(&c);
    c.s[4].active = false;
    tly_replan_begin(c.r, false);
    for (int i = 0; i < 40 && !changed; i++)
        changed = tly_replan_step(c.r, c.count, c.s, 5);
    assert_true(tly_replan_bandwidth(c.r, 0) >= 150);
    finish(&c);
}

/* Two tallyds behind one card, of which the first has no share, for it rests or has no memory: the card is followed by what the
 * second one carries, and keeps its value when the first one wakes. */
static void a_card_is_followed_though_its_first_service_has_no_share(void **state)
{
    for (int rests = 0; rests < 2; rests++) {
        struct cluster c;
        uint32_t changes = 0;
        start(&c, 4, 2, NULL, 0);
        c.s[5].machine.card = 4;
        c.s[4].active = rests;
        assert_int_equal(tly_replan_place(c.r, 4, 100, 0, 0, rests), 0);
        for (int i = 0; i < c.count; i++) {
            c.s[i].card = (struct tly_sight){60, .6, .6};
            c.s[i].weight = i == 4 ? 0 : i < 4 ? 2 : 6;
        }
        c.s[4].card = (struct tly_sight){20, 1, 1};
        c.s[5].card = (struct tly_sight){NAN, NAN, NAN};
        for (int i = 0; i < 30; i++)
            changes += tly_replan_step(c.r, c.count, c.s, 10);
        assert_true(changes > 0);
        assert_true(tly_replan_bandwidth(c.r, 4) == 20);
        for (int i = 0; i < 100 && rests && tly_replan_rests(c.r, 4); i++) {
            tly_replan_begin(c.r, true);
            tly_replan_step(c.r, c.count, c.s, 10);
        }
        assert_false(tly_replan_rests(c.r, 4));
        assert_true(tly_replan_bandwidth(c.r, 4) == 20);
        finish(&c);
    }
}

/* Behind a card whose first service has no memory the second one wakes: a quarter of what others carry is not what it does. */
static void a_card_is_not_sure_after_any_rest_behind_it(void **state)
{
    struct cluster c;
    start(&c, 4, 2, NULL, 0);
    c.s[5].machine.card = 4;
    c.s[4].active = false;
    assert_int_equal(tly_replan_place(c.r, 5, 100, 0, 0, true), 0);
    for (int i = 0; i < c.count; i++)
        c.s[i].card = i < 4 ? (struct tly_sight){60, .6, .6} : (struct tly_sight){NAN, NAN, NAN};
    assert_true(tly_replan_is_sure(c.r, 4));
    for (int i = 0; i < 100 && tly_replan_rests(c.r, 5); i++)
        tly_replan_step(c.r, c.count, c.s, 10);
    assert_true(tly_replan_bandwidth(c.r, 4) == 25);
    assert_false(tly_replan_is_sure(c.r, 4));
    c.r->place[4].known.peak = 5;
    c.s[4].card = (struct tly_sight){5, .95, .95};
    for (int i = 0; i < TLY_GAUGE_SHORT; i++)
        tly_replan_step(c.r, c.count, c.s, 10);
    assert_true(tly_replan_is_sure(c.r, 4));
    assert_true(tly_replan_bandwidth(c.r, 4) < 6 && c.r->place[4].known.peak == 5);
    tly_replan_begin(c.r, true);
    assert_true(tly_replan_is_sure(c.r, 4));
    finish(&c);
}

/* Samples that cannot be, of one card, of all, of sums, or of goodput: what is known stays finite, and what is true is followed
 * afterwards. */
static void nonsense_is_survived(void **state)
{
    static const double bad[] = {0, INFINITY, -INFINITY, NAN, -1, -0., 1e300, 5e-324};
    enum { BAD = sizeof bad / sizeof *bad };
    for (int kind = 0; kind < 5 * BAD; kind++) {
        struct cluster c;
        double x = bad[kind % BAD];
        start(&c, 4, 2, NULL, 0);
        run(&c, 10);
        for (int i = 0; i < 100; i++) {
            double goodput = 10;
            for (int k = 0; k < c.count; k++) {
                c.s[k].card = (struct tly_sight){60, .6, .6};
                c.s[k].sums = (struct tly_sight){10, 0, 0};
            }
            switch (kind / BAD) {
            case 0:
                c.s[5].card.rate = x;
                break;
            case 1:
                for (int k = 0; k < c.count; k++)
                    c.s[k].card.busy = c.s[k].card.both = x;
                break;
            case 2:
                c.s[5].sums = (struct tly_sight){x, x, x};
                break;
            case 3:
                goodput = x;
                break;
            default:
                for (int k = 0; k < c.count; k++)
                    c.s[k].card = c.s[k].sums = (struct tly_sight){x, 1, 1};
            }
            if (tly_replan_step(c.r, c.count, c.s, goodput))
                split(&c);
            tly_replan_standout(c.r, c.count, c.s, -1);
            for (int k = 0; k < c.count; k++) {
                assert_true(isfinite(tly_replan_bandwidth(c.r, k)) && tly_replan_bandwidth(c.r, k) > 0);
                assert_true(isfinite(tly_replan_sum_rate(c.r, k)) && tly_replan_sum_rate(c.r, k) >= 0);
            }
        }
        c.real[5] = 20;
        run(&c, 800);
        assert_true(fraction(&c) >= .9);
        finish(&c);
    }
}

/* It rests, is awake for long, and rests again: no longer than the first time. */
static void a_tallyd_awake_for_long_rests_briefly(void **state)
{
    struct cluster c;
    uint32_t first = 0;
    start(&c, 4, 2, NULL, 0);
    for (int time = 0; time < 3; time++) {
        c.real[5] = .5;
        for (int i = 0; i < 100 && !tly_replan_rests(c.r, 5); i++)
            step(&c);
        assert_true(tly_replan_rests(c.r, 5));
        first = time ? first : c.r->place[5].rest_left;
        assert_int_equal(c.r->place[5].rest_left, first);
        c.real[5] = 100;
        run(&c, 1600);
        assert_false(tly_replan_rests(c.r, 5));
    }
    finish(&c);
}

/* Whatever gauges say meanwhile, the interval halves once in four times the time within which a change back is a reversal. */
static void calm_shortens_the_interval_step_by_step(void **state)
{
    for (int noisy = 0; noisy < 2; noisy++) {
        struct cluster c;
        start(&c, 4, 2, NULL, 0);
        c.noise = noisy ? .05 : 0;
        c.r->interval = 80;
        run(&c, 4 * 160 - 2);
        assert_int_equal(c.r->interval, 80);
        run(&c, 4);
        assert_int_equal(c.r->interval, 40);
        run(&c, 4 * 80 - 4);
        assert_int_equal(c.r->interval, 40);
        run(&c, 8);
        assert_int_equal(c.r->interval, 20);
        run(&c, 1000);
        assert_int_equal(c.r->interval, TLY_REPLAN_INTERVAL);
        assert_int_equal(c.changes, 0);
        finish(&c);
    }
}

static void sums_that_are_slow_are_found_and_found_again(void **state)
{
    struct cluster c;
    start(&c, 4, 2, NULL, 0);
    c.noise = .02;
    c.sums[5] = 30;
    run(&c, 25);
    assert_true(fraction(&c) >= .95);
    assert_true(tly_replan_sum_rate(c.r, 5) > 25 && tly_replan_sum_rate(c.r, 5) < 36);
    c.sums[5] = 0;
    run(&c, 300);
    assert_true(fraction(&c) >= .95);
    finish(&c);
}

/* All cards wander, in each step by 1%, between a half and the whole.  The split that machines alike have reaches less. */
static void a_random_walk_is_followed(void **state)
{
    enum { STEPS = 2000, WALKS = 6 };
    double sum = 0, without = 0;
    for (unsigned seed = 1; seed <= WALKS; seed++) {
        struct cluster c;
        uint32_t exact[MOST];
        start(&c, 8, 4, NULL, 0);
        tly_plan_weights(8, 4, exact);
        c.random = seed;
        c.noise = .02;
        for (int i = 0; i < STEPS; i++) {
            for (int j = 0; j < c.count; j++)
                c.real[j] = fmin(100, fmax(50, c.real[j] * (1 + .01 * normal(&c))));
            step(&c);
            sum += fraction(&c);
            without += best(&c) / took(&c, c.real, exact);
        }
        finish(&c);
    }
    assert_true(sum / STEPS / WALKS >= .82);
    assert_true(sum > 1.06 * without);
}

/* It goes back and forth with every other change of the split: that is followed ever more slowly. */
static void a_flapping_card_is_followed_slowly(void **state)
{
    struct cluster c;
    start(&c, 4, 2, NULL, 0);
    for (int i = 0; i < 2000; i++) {
        c.real[5] = i / 12 % 2 ? 100 : 20;
        step(&c);
    }
    assert_true(c.changes < 70);
    finish(&c);
}

static void sums_that_flap_are_followed_slowly(void **state)
{
    struct cluster c;
    start(&c, 4, 2, NULL, 0);
    for (int i = 0; i < 2000; i++) {
        c.sums[5] = i / 12 % 2 ? 0 : 30;
        step(&c);
    }
    assert_true(c.changes < 20); /* 167 if it were followed each time */
    finish(&c);
}

/* A tried card that carries nothing at all confirms nothing. */
static void a_card_that_carries_nothing_confirms_no_value(void **state)
{
    struct tly_gauge g;
    tly_gauge_init(&g, 150, 0);
    for (int i = 0; i < TLY_GAUGE_LONG; i++)
        tly_gauge_see(&g, &(struct tly_sight){0, 1, 1});
    assert_false(tly_gauge_confirms(&g, .04));
}

/* It was declared to carry more than what was found by another coordinator, so whether it does again is tried. */
static void what_was_declared_is_tried_after_a_take_over(void **state)
{
    struct cluster c;
    start(&c, 4, 2, NULL, 100);
    c.noise = .02;
    c.real[5] = 50;
    assert_int_equal(tly_replan_place(c.r, 5, 50, 100, 0, false), 0);
    split(&c);
    c.lie[5] = .99;
    run(&c, 60);
    c.real[5] = 100;
    run(&c, 600);
    assert_true(tly_replan_bandwidth(c.r, 5) == 100);
    finish(&c);
}

/* 30 s of samples of 0.4 s each way: what knowing it would save is a tenth at most. */
static void a_slow_pattern_is_followed(void **state)
{
    struct cluster c;
    double is = 0, could = 0;
    start(&c, 4, 2, NULL, 0);
    c.noise = .02;
    for (int i = 0; i < 3000; i++) {
        c.real[5] = i / 75 % 2 ? 100 : 20;
        /* The step goes on for a sample: what it moves is the inverse of its time. */
        is += fraction(&c) / best(&c);
        could += 1 / best(&c);
        step(&c);
    }
    assert_true(is / could >= .9);
    finish(&c);
}

/* --- who holds all up --------------------------------------------------------------------------------- */

/* A split that stays, by cards of 100 each.  Each card carries this rate, for that part of the time. */
static int stands_out(int count, const double *rate, const double *busy, int named)
{
    struct tly_replan_service s[MOST] = {0};
    struct tly_replan *r;
    assert_int_equal(tly_replan_create(true, &r), 0);
    for (int i = 0; i < count; i++) {
        s[i] = (struct tly_replan_service){.machine = {.ranks = 1, .card = (uint32_t)i, .bandwidth = 100},
                                           .active = true,
                                           .weight = 1,
                                           .card = {rate[i] * busy[i], busy[i], busy[i]}};
        assert_int_equal(tly_replan_place(r, i, 100, 100, 0, false), 0);
    }
    for (int i = 0; i < 2 * TLY_GAUGE_LONG; i++)
        assert_false(tly_replan_step(r, count, s, 1));
    int who = tly_replan_standout(r, count, s, named);
    tly_replan_destroy(r);
    return who;
}

static void the_slowest_card_holds_all_up(void **state)
{
    static const double even[] = {100, 100, 100, 100}, one[] = {100, 100, 25, 100},
                        two[] = {100, 28, 25, 100}, all[] = {25, 25, 25, 25}, worse[] = {100, 25, 10, 100};
    static const double idle[] = {.5, .5, .5, .5}, alone[] = {.5, .5, 1, .5}, both[] = {.5, 1, 1, .5},
                        busy[] = {1, 1, 1, 1}, nearly[] = {.5, 1, .9, .5};
    assert_int_equal(stands_out(4, even, idle, -1), -1);
    assert_int_equal(stands_out(4, even, busy, -1), -1); /* all is as it should be */
    assert_int_equal(stands_out(4, one, alone, -1), 2);
    assert_int_equal(stands_out(4, one, busy, -1), 2);
    assert_int_equal(stands_out(4, two, both, -1), 2);
    assert_int_equal(stands_out(4, two, both, 1),
                     1); /* it has been named, and the other is not clearly worse */
    assert_int_equal(stands_out(4, worse, both, 1), 2);
    assert_int_equal(stands_out(4, all, busy, -1), -1); /* nobody can tell */
    assert_int_equal(stands_out(2, all, busy, -1), -1);
    assert_int_equal(stands_out(4, two, nearly, -1), 1); /* as it limits the other one */
    assert_int_equal(stands_out(4, two, nearly, 2), 1);
    assert_int_equal(stands_out(4, one, nearly, -1),
                     2); /* a busier card that is not slow hides no slow one */
    assert_int_equal(stands_out(4, one, nearly, 2), 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_tallyd_drops_and_returns),
        cmocka_unit_test(a_slow_card_that_seems_idle_is_tried_cheaply),
        cmocka_unit_test(a_feeler_of_a_card_that_is_not_seen_ends),
        cmocka_unit_test(a_feeler_is_judged_by_what_is_seen),
        cmocka_unit_test(a_guess_that_has_only_waited_is_still_a_guess),
        cmocka_unit_test(a_card_that_is_not_seen_has_not_waited),
        cmocka_unit_test(a_try_waits_for_what_fell_short_in_its_feeler),
        cmocka_unit_test(sums_tried_in_vain_have_their_limit_again),
        cmocka_unit_test(nobody_waits_for_a_card_that_is_tried),
        cmocka_unit_test(a_card_falls_short_until_it_clearly_does_not),
        cmocka_unit_test(a_guess_that_is_not_seen_is_not_tried),
        cmocka_unit_test(a_card_is_never_tried_with_less),
        cmocka_unit_test(a_feeler_finds_out_which_of_two_cards_has_mended),
        cmocka_unit_test(a_slow_card_that_is_a_little_idler_is_tried),
        cmocka_unit_test(a_card_that_carried_more_is_tried_though_it_seems_busy),
        cmocka_unit_test(a_card_measured_far_below_the_others_is_tried_rarely),
        cmocka_unit_test(whatever_was_measured_far_below_the_others_is_tried),
        cmocka_unit_test(a_card_measured_far_below_the_others_is_tried_again),
        cmocka_unit_test(a_small_try_leaves_a_doubtful_card_its_own),
        cmocka_unit_test(a_slow_worker_without_a_share_is_not_tried),
        cmocka_unit_test(a_card_a_little_slower_than_its_like_is_found),
        cmocka_unit_test(tries_wait_for_a_card_that_falls_short),
        cmocka_unit_test(a_card_less_busy_than_slow_ones_is_not_slower),
        cmocka_unit_test(a_card_that_dropped_to_the_others_value_returns),
        cmocka_unit_test(a_liar_hides_no_slow_card),
        cmocka_unit_test(a_refuted_card_hides_no_slow_card),
        cmocka_unit_test(liars_by_turns_put_tries_off_for_a_while),
        cmocka_unit_test(few_idle_cards_among_many_alike_are_not_tried),
        cmocka_unit_test(a_card_is_tried_only_once_it_has_been_seen),
        cmocka_unit_test(what_a_card_was_found_to_carry_is_remembered),
        cmocka_unit_test(a_card_that_has_only_waited_is_felt_again),
        cmocka_unit_test(a_try_in_vain_is_repeated_at_once_when_its_card_is_idler),
        cmocka_unit_test(a_workers_card_halves),
        cmocka_unit_test(a_workers_card_that_returns_has_its_share_again),
        cmocka_unit_test(a_wrong_start_mends),
        cmocka_unit_test(cards_measured_too_low_come_up_to_the_right_one),
        cmocka_unit_test(guesses_follow_the_full_cards_of_their_value),
        cmocka_unit_test(guesses_do_not_follow_known_cards_that_drop),
        cmocka_unit_test(nothing_known_becomes_known),
        cmocka_unit_test(a_steady_cluster_stays),
        cmocka_unit_test(gauges_that_err_change_little),
        cmocka_unit_test(backlogs_that_do_not_show_part_nobody),
        cmocka_unit_test(all_cards_alike_change_together),
        cmocka_unit_test(a_declared_card_is_not_tried_beyond_that),
        cmocka_unit_test(a_liar_stops_nobody),
        cmocka_unit_test(a_tallyd_with_next_to_nothing_rests_and_is_tried_again),
        cmocka_unit_test(a_try_in_vain_is_taken_back_whatever_happens_beside_it),
        cmocka_unit_test(a_try_in_vain_wakes_a_tallyd_that_it_has_put_to_rest),
        cmocka_unit_test(full_cards_tried_in_vain_say_what_they_carry),
        cmocka_unit_test(a_try_is_not_judged_by_anothers_change),
        cmocka_unit_test(a_card_is_followed_though_its_first_service_has_no_share),
        cmocka_unit_test(a_card_is_not_sure_after_any_rest_behind_it),
        cmocka_unit_test(nonsense_is_survived),
        cmocka_unit_test(a_tallyd_awake_for_long_rests_briefly),
        cmocka_unit_test(quiet_corrections_delay_no_change),
        cmocka_unit_test(calm_shortens_the_interval_step_by_step),
        cmocka_unit_test(sums_that_are_slow_are_found_and_found_again),
        cmocka_unit_test(a_random_walk_is_followed),
        cmocka_unit_test(a_flapping_card_is_followed_slowly),
        cmocka_unit_test(sums_that_flap_are_followed_slowly),
        cmocka_unit_test(what_was_declared_is_tried_after_a_take_over),
        cmocka_unit_test(a_card_that_carries_nothing_confirms_no_value),
        cmocka_unit_test(a_slow_pattern_is_followed),
        cmocka_unit_test(the_slowest_card_holds_all_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
