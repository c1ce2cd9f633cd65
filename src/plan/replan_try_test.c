/* replan_try_test.c - what a replanner tries in the model of a cluster (cluster.h), and what it makes of that. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>

#include "plan/replan_work.h"
#include "test/plan/cluster.h"

/* A token bucket lets a few parts through at once, so a slow card with a share that just fits has backlogs now and then
 * alone.  Whether it carries more must be tried, but at little cost; and it is found when it does. */
static void a_slow_card_that_seems_idle_is_tried_cheaply(void **state)
{
    EACH_SHAPE(k)
    {
        struct cluster c;
        int workers = cluster_shapes[k][0], spare = cluster_shapes[k][1];
        if (spare < 2)
            continue;
        cluster_start(&c, workers, spare, NULL, 0);
        c.noise = .02;
        cluster_run(&c, 30);
        c.real[workers] = 20;
        assert_true(cluster_settled(&c, 20) >= .95);
        c.unseen[workers] = .35;
        assert_true(cluster_mean(&c, 60) >= .93);
        c.real[workers] = 100;
        assert_true(cluster_settled(&c, 200) >= .95);
        cluster_finish(&c);
    }
}

/* Two slow cards are tried at once; the one that has mended has its share again, the other keeps a small one. */
static void a_feeler_finds_out_which_of_two_cards_has_mended(void **state)
{
    struct cluster c;
    cluster_start_slow(&c, 4, 2, 20);
    cluster_run(&c, 20);
    c.unseen[4] = c.unseen[5] = .35;
    cluster_run(&c, 100);
    bool both = false;
    c.real[4] = 100;
    for (int i = 0; i < 40 && !(both && !c.r->trying); i++) {
        cluster_step(&c);
        both |= c.r->feeler && tly_replan_tries(c.r, 4) && tly_replan_tries(c.r, 5);
    }
    assert_true(both && !c.r->trying);
    for (int i = 0; i < 35; i++) {
        cluster_step(&c);
        assert_false(tly_replan_tries(c.r, 5)); /* while the other one has more to carry */
    }
    assert_true(cluster_mean(&c, 200) >= .95);
    assert_true(tly_replan_bandwidth(c.r, 4) > 80);
    assert_true(tly_replan_bandwidth(c.r, 5) < 30);
    cluster_finish(&c);
}

/* After tries in vain the next one is far off, unless the card becomes idler: then something has changed. */
static void a_try_in_vain_is_repeated_at_once_when_its_card_is_idler(void **state)
{
    struct cluster c;
    cluster_start_slow(&c, 2, 1, 20);
    cluster_run(&c, 20);
    c.unseen[4] = .35;
    for (int i = 0; i < 2000 && (c.r->trying || c.r->more.pause < 500); i++)
        cluster_step(&c);
    assert_true(c.r->more.at > c.r->samples + 400);
    assert_int_equal(c.r->interval, TLY_REPLAN_INTERVAL); /* no card went back and forth */
    c.real[4] = 100;
    cluster_run(&c, 60);
    assert_true(cluster_fraction(&c) >= .95);
    cluster_finish(&c);
}

/* A slow tallyd with a share of 6% showed backlogs for .41 of the time, and after its card's return for .36 (4 + 2 machines,
 * `pattern`).  That alone is reason enough for a feeler; a level that only varies is not. */
static void a_slow_card_that_is_a_little_idler_is_tried(void **state)
{
    struct cluster c;
    cluster_start_slow(&c, 2, 1, 20);
    cluster_run(&c, 20);
    for (int i = 0; i < 2000 && (c.r->trying || c.r->more.pause < 500); i++) {
        c.lie[4] = c.r->trying ? 0 : .41;
        cluster_step(&c);
    }
    assert_true(c.r->more.at > c.r->samples + 400);
    c.changes = 0;
    for (int i = 0; i < 400; i++) {
        c.lie[4] = i % 12 < 5 ? .37 : .42;
        cluster_step(&c);
    }
    assert_int_equal(c.changes, 0);
    c.real[4] = 100;
    for (int i = 0; i < 40; i++) {
        c.lie[4] = tly_replan_bandwidth(c.r, 4) > 30 ? 0 : .36;
        cluster_step(&c);
    }
    assert_true(cluster_fraction(&c) >= .95);
    cluster_finish(&c);
}

/* A card that others use, too, has something on its way all the time even when these have gone.  It carried more before, so it
 * is tried; where it does not mend, that costs next to nothing. */
static void a_card_that_carried_more_is_tried_though_it_seems_busy(void **state)
{
    struct cluster c;
    cluster_start_slow(&c, 2, 1, 57);
    cluster_run(&c, 40);
    c.lie[4] = .99;
    c.changes = 0;
    assert_true(cluster_mean(&c, 1000) >= .965); /* .974 without a try, for the noise */
    assert_true(c.changes <= 8);
    c.real[4] = 100;
    assert_true(cluster_settled(&c, 1600) >= .97); /* .957 without a try */
    cluster_finish(&c);
}

/* Cards measured at `measured` of the others' rate, from place `first` on; `real` is what they carry.  They have backlogs
 * nearly all the time, for their parts wait among others. */
static void start_doubtful(struct cluster *c, size_t shape, int first, int count, double measured,
                           double real)
{
    double said[CLUSTER_MOST];
    for (int i = 0; i < CLUSTER_MOST; i++)
        said[i] = i >= first && i < first + count ? measured : 100;
    cluster_start(c, cluster_shapes[shape][0], cluster_shapes[shape][1], said, 0);
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
        int last = cluster_shapes[k][0] + cluster_shapes[k][1] - 1;
        for (int wrong = 0; wrong < 2 && cluster_shapes[k][1]; wrong++) {
            struct cluster c;
            start_doubtful(&c, k, last, 1, 60, wrong ? 100 : 60);
            cluster_run(&c, 60);
            assert_true(cluster_fraction(&c) >= .98);
            cluster_run(&c, 1000);
            assert_true(c.changes <= 2);
            cluster_finish(&c);
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
        cluster_run(&c, 100);
        assert_true(cluster_fraction(&c) >= .98);
        cluster_finish(&c);
    }
}

/* A small deviation that was tried in vain says nothing of whether it was measured too low. */
static void a_small_try_leaves_a_doubtful_card_its_own(void **state)
{
    struct cluster c;
    bool tried = false;
    cluster_start(&c, 8, 4, NULL, 0);
    c.noise = .02;
    cluster_run(&c, 60);
    c.lie[9] = 1;
    c.bias[9] = -.1;
    for (int i = 0; i < 400; i++) {
        c.r->place[9].doubtful = true; /* left by a look at higher values that began no try */
        cluster_step(&c);
        tried |= c.r->trying == &c.r->fine && c.r->place[9].tried;
    }
    assert_true(tried && !c.r->trying);
    assert_int_equal(c.r->place[9].known.asked_until, 0);
    cluster_finish(&c);
}

/* The try came while other traffic still went through the card. */
static void a_card_measured_far_below_the_others_is_tried_again(void **state)
{
    struct cluster c;
    start_doubtful(&c, 1, 5, 1, 60, 60);
    cluster_run(&c, 200);
    assert_true(tly_replan_bandwidth(c.r, 5) < 65);
    c.real[5] = 100;
    assert_true(cluster_settled(&c, 2 * TLY_REPLAN_MOST_INTERVAL) >= .98);
    cluster_finish(&c);
}

/* A worker without a share sends and receives its own gradient alone, so no share hides what its card carries. */
static void a_slow_worker_without_a_share_is_not_tried(void **state)
{
    struct cluster c;
    cluster_start(&c, 4, 2, NULL, 0);
    c.noise = .02;
    cluster_run(&c, 30);
    c.real[1] = 50;
    cluster_run(&c, 60);
    assert_int_equal(c.s[1].weight, 0);
    for (int i = 4; i < 6;
         i++) { /* tallyds whose backlogs fill most samples, for steps are longer than samples */
        c.lie[i] = .89;
        c.bias[i] = 88 / c.s[i].card.rate - 1;
    }
    c.changes = 0;
    cluster_run(&c, 1000);
    assert_int_equal(c.changes, 0);
    cluster_finish(&c);
}

/* When a card begins to fall short, nobody is tried for as long as its gauge needs.  Then others are, though it still does. */
static void tries_wait_for_a_card_that_falls_short(void **state)
{
    struct cluster c;
    bool tried = false;
    cluster_start(&c, 8, 4, NULL, 0);
    cluster_run(&c, 60);
    for (int i = 0; i < c.workers; i++)
        c.unseen[i] = .55;
    cluster_run(&c, TLY_GAUGE_LONG / 3); /* not long enough for a try */
    c.lie[9] = 1;
    c.bias[9] = -.1;
    for (int n = 0; n < 300; n++) {
        cluster_step(&c);
        for (int j = 0; j < c.workers; j++)
            tried |= tly_replan_tries(c.r, j);
        assert_false(tried && n < TLY_GAUGE_LONG);
    }
    assert_true(tried);
    cluster_finish(&c);
}

/* A card that has dropped to what others carry is not one of them: it is tried again. */
static void a_card_that_dropped_to_the_others_value_returns(void **state)
{
    struct cluster c;
    double said[CLUSTER_MOST];
    for (int i = 0; i < CLUSTER_MOST; i++)
        said[i] = i == 8 ? 200 : 100;
    cluster_start(&c, 8, 4, said, 0);
    c.noise = .02;
    c.real[8] = 200;
    cluster_run(&c, 60);
    c.real[8] = 100;
    cluster_run(&c, 60);
    assert_true(tly_replan_bandwidth(c.r, 8) == tly_replan_bandwidth(c.r, 9));
    c.real[8] = 200;
    cluster_run(&c, 200);
    assert_true(tly_replan_bandwidth(c.r, 8) > 180);
    cluster_finish(&c);
}

/* Two cards that by turns seem to be slow put tries off for a while, and not for good. */
static void liars_by_turns_put_tries_off_for_a_while(void **state)
{
    struct cluster c;
    bool tried = false;
    cluster_start(&c, 8, 4, NULL, 0);
    cluster_run(&c, 60);
    for (int i = 0; i < c.workers; i++)
        c.unseen[i] = .55;
    for (int n = 0; n < 150; n++) {
        for (int i = 0; i < 2; i++) {
            bool lies = (n + 20 * i) % 40 < 24;
            c.lie[9 + i] = lies;
            c.bias[9 + i] = lies ? -.1 : 0;
        }
        cluster_step(&c);
        for (int j = 0; j < c.workers; j++)
            tried |= tly_replan_tries(c.r, j);
    }
    assert_true(tried);
    cluster_finish(&c);
}

/* Fewer than half of five cards alike that seem idler than the others are no reason to part them. */
static void few_idle_cards_among_many_alike_are_not_tried(void **state)
{
    for (int idle = 1; idle <= 2; idle++) {
        struct cluster c;
        cluster_start_slow(&c, 2, 1, 20);
        cluster_run(&c, 20);
        for (int i = 0; i < idle; i++)
            c.unseen[i] = .6;
        c.unseen[4] = .35;
        bool tried = false;
        for (int i = 0; i < 1000; i++) {
            cluster_step(&c);
            tried |= tly_replan_tries(c.r, 4);
            for (int j = 0; j < idle; j++)
                assert_true(tly_replan_bandwidth(c.r, j) == tly_replan_bandwidth(c.r, 3));
        }
        assert_true(tried);
        cluster_finish(&c);
    }
}

/* Also what was only found out in the job counts as what the card has carried. */
static void what_a_card_was_found_to_carry_is_remembered(void **state)
{
    struct cluster c;
    double said[CLUSTER_MOST] = {100, 100, 100, 100, 50, 100};
    cluster_start(&c, 4, 2, said, 0);
    c.noise = .02;
    cluster_run(&c, 300);
    assert_true(tly_replan_bandwidth(c.r, 4) > 90);
    c.real[4] = 57;
    cluster_run(&c, 40);
    assert_true(tly_replan_bandwidth(c.r, 4) < 65);
    assert_true(c.r->place[4].known.peak > 90);
    cluster_finish(&c);
}

/* Of two slow cards that are tried at once the idler one waits for the other.  It has carried no more, so it is felt again, and
 * never tried with what others carry. */
static void a_card_that_has_only_waited_is_felt_again(void **state)
{
    struct cluster c;
    cluster_start_slow(&c, 4, 2, 20);
    cluster_run(&c, 20);
    c.unseen[4] = .6;
    c.unseen[5] = .35;
    bool both = false;
    for (int i = 0; i < 400; i++) {
        cluster_step(&c);
        both |= c.r->feeler && tly_replan_tries(c.r, 4) && tly_replan_tries(c.r, 5);
        assert_true(tly_replan_bandwidth(c.r, 4) < 50 && tly_replan_bandwidth(c.r, 5) < 50);
    }
    assert_true(both);
    for (int i = 0; i < 100 && c.r->trying; i++)
        cluster_step(&c);
    assert_true(!c.r->trying);
    assert_true(cluster_fraction(&c) >= .95);
    cluster_finish(&c);
}

/* What a card carries is compared with what it carried before, so without samples there is no feeler. */
static void a_card_is_tried_only_once_it_has_been_seen(void **state)
{
    struct cluster c;
    cluster_start(&c, 4, 2, NULL, 0);
    cluster_run(&c, 30);
    c.real[4] = 20;
    for (int i = 0; i < 20 && tly_replan_bandwidth(c.r, 4) == 100; i++)
        cluster_step(&c);
    assert_true(tly_replan_bandwidth(c.r, 4) < 25);
    for (int i = 0; i < 30; i++) {
        cluster_step(&c);
        for (int j = 0; j < 3; j++) { /* goodput alone */
            struct tly_sight seen = c.s[4].card;
            c.s[4].card = (struct tly_sight){NAN, NAN, NAN};
            if (tly_replan_step(c.r, c.count, c.s, 1 / c.seconds))
                cluster_split(&c);
            c.s[4].card = seen;
        }
        assert_true(!c.r->trying || c.r->place[4].carried_before > 0);
    }
    assert_true(tly_replan_bandwidth(c.r, 4) < 30);
    c.lie[4] = .99;
    for (int i = 0; i < 1600 && !c.r->trying; i++)
        cluster_step(&c);
    assert_true(c.r->trying && c.r->place[4].carried_before > 0);
    cluster_finish(&c);
}

/* Until a feeler of one slow tallyd's card, at place 4, is under way. */
static void start_feeler(struct cluster *c)
{
    cluster_start_slow(c, 2, 1, 20);
    cluster_run(c, 20);
    c->unseen[4] = .35;
    for (int i = 0; i < 100 && !c->r->trying; i++)
        cluster_step(c);
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
            cluster_split(&c);
    assert_false(tly_replan_tries(c.r, 4));
    assert_true(tly_replan_bandwidth(c.r, 4) < tried);
    cluster_finish(&c);
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
        cluster_step(&c);
        assert_true(tly_replan_bandwidth(c.r, 4) >= tried);
    }
    assert_false(tly_replan_tries(c.r, 4) && c.r->feeler);
    cluster_finish(&c);
}

/* Until a feeler of two slow tallyds' cards, at places 4 and 5, is under way.  The value of the first is a guess. */
static void start_two_feelers(struct cluster *c)
{
    cluster_start_slow(c, 4, 2, 20);
    cluster_run(c, 20);
    c->unseen[4] = .6;
    c->unseen[5] = .35;
    for (int i = 0; i < 400 && !(tly_replan_tries(c->r, 4) && tly_replan_tries(c->r, 5)); i++) {
        c->r->place[4].card.guess |= !c->r->trying;
        cluster_step(c);
    }
    assert_true(c->r->feeler && tly_replan_tries(c->r, 4) && tly_replan_tries(c->r, 5));
}

/* What nobody knew before the feeler nobody knows after it. */
static void a_guess_that_has_only_waited_is_still_a_guess(void **state)
{
    struct cluster c;
    start_two_feelers(&c);
    for (int i = 0; i < 40 && c.r->trying; i++)
        cluster_step(&c);
    assert_true(!c.r->trying && tly_replan_bandwidth(c.r, 4) < 22);
    assert_true(c.r->place[4].card.guess && !c.r->place[5].card.guess);
    cluster_finish(&c);
}

/* One is tried in vain, and of the other nothing is seen: the feeler was in vain. */
static void a_card_that_is_not_seen_has_not_waited(void **state)
{
    struct cluster c;
    start_two_feelers(&c);
    c.s[4].card = (struct tly_sight){NAN, NAN, NAN};
    for (int i = 0; i < TLY_GOODPUTS && c.r->trying; i++)
        if (tly_replan_step(c.r, c.count, c.s, 1 / c.seconds))
            cluster_split(&c);
    assert_true(!c.r->trying && c.r->more.at > c.r->samples);
    cluster_finish(&c);
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
        cluster_step(&c);
    assert_true(c.r->place[4].felt);
    assert_true(!c.r->trying);
    cluster_finish(&c);
}

/* More sums are tried, and nothing comes of it; that the service's card is busy all the time says nothing of them. */
static void sums_tried_in_vain_have_their_limit_again(void **state)
{
    struct cluster c;
    cluster_start(&c, 4, 2, NULL, 0);
    struct tly_replan_place *p = &c.r->place[4];
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
    cluster_finish(&c);
}

/* Only a tallyd whose card has lost speed is busy all the time.  The others wait for it, and carry what they did. */
static void nobody_is_tried_while_a_card_that_has_lost_speed_is_busy(void **state)
{
    struct cluster c;
    cluster_start_slow(&c, 2, 1, 57);
    cluster_run(&c, 30);
    assert_true(tly_replan_bandwidth(c.r, 4) < 65);
    for (int i = 0; i < c.count; i++)
        c.unseen[i] = i == 4 ? 0 : .28;
    c.lie[4] = .95;
    for (int i = 0; i < 100; i++) {
        cluster_step(&c);
        for (int j = 0; j < c.count; j++)
            assert_false(j != 4 && tly_replan_tries(c.r, j));
    }
    cluster_finish(&c);
}

/* A card that is tried with more than it carries falls short, for that alone. */
static void nobody_waits_for_a_card_that_is_tried(void **state)
{
    struct cluster c;
    cluster_start(&c, 4, 2, NULL, 0);
    struct tly_replan_place *p = &c.r->place[4];
    p->before = p->card.value;
    p->card.value = 110;
    cluster_split(&c);
    p->tried = true;
    c.r->trying = &c.r->fine;
    c.r->before = 1000; /* in vain, whatever it brings */
    c.r->promised = .05;
    for (int i = 0; i < 100 && c.r->trying; i++)
        cluster_step(&c);
    assert_true(!c.r->trying);
    assert_int_equal(c.r->waits_again, 0);
    cluster_finish(&c);
}

/* Which of its samples are a little above the limit is chance. */
static void a_card_falls_short_until_it_clearly_does_not(void **state)
{
    struct cluster c;
    cluster_start(&c, 8, 4, NULL, 0);
    for (int i = 0; i < c.count; i++)
        c.s[i].card = (struct tly_sight){70, .85, .85};
    for (int i = 0; i < 40; i++) {
        double carries = i < 10 ? 93 : i < 25 ? 94.5 : 97;
        c.s[9].card = (struct tly_sight){.98 * carries, .98, .98};
        assert_false(tly_replan_step(c.r, c.count, c.s, 10));
        assert_true(c.r->place[9].known.falls_short == (i >= 4 && i < 27));
    }
    cluster_finish(&c);
}

/* A value that was raised and is not seen any more: there is nothing to compare with, so nothing is tried. */
static void a_guess_that_is_not_seen_is_not_tried(void **state)
{
    struct cluster c;
    cluster_start_slow(&c, 2, 1, 20);
    cluster_run(&c, 20);
    c.r->place[4].card.guess = true;
    tly_replan_begin(c.r, false);
    c.s[4].card = (struct tly_sight){NAN, NAN, NAN};
    for (int i = 0; i < 100; i++) {
        if (tly_replan_step(c.r, c.count, c.s, 1 / c.seconds))
            cluster_split(&c);
        assert_false(tly_replan_tries(c.r, 4));
    }
    cluster_finish(&c);
}

/* A card of 90 that is said to carry 100 has time to spare beside cards of 88 that are full, while another one is tried. */
static void a_card_is_never_tried_with_less(void **state)
{
    struct cluster c;
    static const double said[] = {88, 88, 88, 88, 40, 90};
    bool tried = false;
    cluster_start(&c, 4, 2, said, 100);
    c.r->place[5].card.guess = true;
    for (int i = 0; i < c.count; i++)
        c.s[i].card = i < 4 ? (struct tly_sight){88, .95, .95} : (struct tly_sight){i == 5 ? 70 : 30, .5, .5};
    for (int i = 0; i < 100; i++) {
        if (tly_replan_step(c.r, c.count, c.s, 10))
            cluster_split(&c);
        tried |= tly_replan_tries(c.r, 4);
        assert_true(tly_replan_bandwidth(c.r, 5) >= 90);
    }
    assert_true(tried);
    cluster_finish(&c);
}

/* A worker's card that returns is busy for most of the time and yet not the one that limits: nothing but a try can tell. */
static void a_workers_card_that_returns_has_its_share_again(void **state)
{
    EACH_SHAPE(k)
    {
        struct cluster c;
        cluster_start(&c, cluster_shapes[k][0], cluster_shapes[k][1], NULL, 0);
        c.noise = .02;
        cluster_run(&c, 30);
        c.real[1] = 50;
        cluster_run(&c, 60);
        c.real[1] = 100;
        assert_true(cluster_settled(&c, 60) >= .985);
        cluster_finish(&c);
    }
}

/* A tallyd's card drops, and the tallyd is out and comes again.  While it is tried, a worker's card is slow for a while.  Once
 * nothing changes any more, both have their shares again within 300 samples, 2 minutes of traffic. */
static void a_card_returns_while_another_change_settles(void **state)
{
    for (int n = 0; n < 60; n++) {
        struct cluster c;
        cluster_start(&c, 4, 2, NULL, 0);
        c.noise = .02;
        c.random = (unsigned)n;
        cluster_run(&c, 30 + n % 7);
        c.real[5] = 20;
        cluster_run(&c, 40);
        double last = tly_replan_bandwidth(c.r, 5);
        c.s[5].active = false;
        cluster_split(&c);
        tly_replan_begin(c.r, false);
        cluster_run(&c, 1 + n % 20);
        assert_int_equal(tly_replan_place(c.r, 5, last, 0, 0, false), 0);
        c.s[5].active = true;
        cluster_split(&c);
        tly_replan_begin(c.r, false);
        cluster_run(&c, 1 + n % 30);
        c.real[5] = 100;
        c.real[1] = 55 + 5 * (n % 6);
        c.noise = .06;
        cluster_run(&c, 20 + n);
        c.real[1] = 100;
        c.noise = .02;
        cluster_run(&c, 300);
        assert_true(tly_replan_bandwidth(c.r, 1) > 90 && tly_replan_bandwidth(c.r, 5) > 75);
        assert_true(cluster_fraction(&c) >= .9);
        cluster_finish(&c);
    }
}

static void a_declared_card_is_not_tried_beyond_that(void **state)
{
    struct cluster c;
    cluster_start(&c, 4, 2, NULL, 100);
    c.real[5] = 300;
    cluster_run(&c, 300);
    for (int i = 0; i < c.count; i++)
        assert_true(tly_replan_bandwidth(c.r, i) <= 100);
    cluster_finish(&c);
}

/* A try is under way, and gauges correct another card, for which the split stays. */
static void a_try_in_vain_is_taken_back_whatever_happens_beside_it(void **state)
{
    static const double said[] = {100, 90, 80, 70, 110, 120};
    struct cluster c;
    cluster_start(&c, 4, 2, said, 0);
    struct tly_replan_place *p = c.r->place;
    p[0].before = p[0].card.value;
    p[0].card.value = 108;
    cluster_split(&c);
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
    cluster_finish(&c);
}

/* Cards of 100 with time to spare, beside a tallyd of 2 that is busy all the time: the others are tried with 150, and the
 * tallyd, whose share would be next to nothing, is put to rest.  Nothing comes of it.  Returns when a try has begun. */
static void try_and_rest(struct cluster *c)
{
    static const double said[] = {100, 100, 100, 100, 100, 2};
    bool changed = false;
    cluster_start(c, 4, 2, said, 0);
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
    cluster_split(&c);
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
    cluster_split(&c);
    c.s[0].card = (struct tly_sight){50, 1, 1};
    for (int i = 0; i < 2 * TLY_REPLAN_INTERVAL; i++)
        if (tly_replan_step(c.r, c.count, c.s, 10))
            cluster_split(&c);
    assert_true(tly_replan_bandwidth(c.r, 0) < 60);
    assert_int_equal(c.r->interval, TLY_REPLAN_INTERVAL); /* it has not gone back and forth */
    cluster_finish(&c);
}

/* The cards carry more than was measured and less than is tried.  They are busy all the time, so their gauges tell. */
static void full_cards_tried_in_vain_say_what_they_carry(void **state)
{
    static const double said[] = {100, 100, 100, 100, 60, 60, 60, 60};
    struct cluster c;
    cluster_start(&c, 4, 4, said, 0);
    c.noise = .02;
    for (int i = 4; i < c.count; i++) {
        c.real[i] = 66;
        c.unseen[i] = .3;
    }
    for (int i = 0; i < 40 && !c.r->trying; i++)
        cluster_step(&c);
    assert_true(c.r->trying && !c.r->feeler && c.r->promised > .1);
    for (int i = 4; i < c.count; i++)
        c.unseen[i] = 0;
    for (int i = 0; i < 20; i++) {
        cluster_step(&c);
        assert_true(tly_replan_bandwidth(c.r, 4) > 61);
    }
    assert_true(tly_replan_bandwidth(c.r, 4) < 70);
    cluster_finish(&c);
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
    cluster_finish(&c);
}

/* It was declared to carry more than what was found by another coordinator, so whether it does again is tried. */
static void what_was_declared_is_tried_after_a_take_over(void **state)
{
    struct cluster c;
    cluster_start(&c, 4, 2, NULL, 100);
    c.noise = .02;
    c.real[5] = 50;
    assert_int_equal(tly_replan_place(c.r, 5, 50, 100, 0, false), 0);
    cluster_split(&c);
    c.lie[5] = .99;
    cluster_run(&c, 60);
    c.real[5] = 100;
    cluster_run(&c, 600);
    assert_true(tly_replan_bandwidth(c.r, 5) == 100);
    cluster_finish(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_slow_card_that_seems_idle_is_tried_cheaply),
        cmocka_unit_test(a_feeler_finds_out_which_of_two_cards_has_mended),
        cmocka_unit_test(a_try_in_vain_is_repeated_at_once_when_its_card_is_idler),
        cmocka_unit_test(a_slow_card_that_is_a_little_idler_is_tried),
        cmocka_unit_test(a_card_that_carried_more_is_tried_though_it_seems_busy),
        cmocka_unit_test(a_card_measured_far_below_the_others_is_tried_rarely),
        cmocka_unit_test(whatever_was_measured_far_below_the_others_is_tried),
        cmocka_unit_test(a_small_try_leaves_a_doubtful_card_its_own),
        cmocka_unit_test(a_card_measured_far_below_the_others_is_tried_again),
        cmocka_unit_test(a_slow_worker_without_a_share_is_not_tried),
        cmocka_unit_test(tries_wait_for_a_card_that_falls_short),
        cmocka_unit_test(a_card_that_dropped_to_the_others_value_returns),
        cmocka_unit_test(liars_by_turns_put_tries_off_for_a_while),
        cmocka_unit_test(few_idle_cards_among_many_alike_are_not_tried),
        cmocka_unit_test(what_a_card_was_found_to_carry_is_remembered),
        cmocka_unit_test(a_card_that_has_only_waited_is_felt_again),
        cmocka_unit_test(a_card_is_tried_only_once_it_has_been_seen),
        cmocka_unit_test(a_feeler_of_a_card_that_is_not_seen_ends),
        cmocka_unit_test(a_feeler_is_judged_by_what_is_seen),
        cmocka_unit_test(a_guess_that_has_only_waited_is_still_a_guess),
        cmocka_unit_test(a_card_that_is_not_seen_has_not_waited),
        cmocka_unit_test(a_try_waits_for_what_fell_short_in_its_feeler),
        cmocka_unit_test(sums_tried_in_vain_have_their_limit_again),
        cmocka_unit_test(nobody_is_tried_while_a_card_that_has_lost_speed_is_busy),
        cmocka_unit_test(nobody_waits_for_a_card_that_is_tried),
        cmocka_unit_test(a_card_falls_short_until_it_clearly_does_not),
        cmocka_unit_test(a_guess_that_is_not_seen_is_not_tried),
        cmocka_unit_test(a_card_is_never_tried_with_less),
        cmocka_unit_test(a_workers_card_that_returns_has_its_share_again),
        cmocka_unit_test(a_card_returns_while_another_change_settles),
        cmocka_unit_test(a_declared_card_is_not_tried_beyond_that),
        cmocka_unit_test(a_try_in_vain_is_taken_back_whatever_happens_beside_it),
        cmocka_unit_test(a_try_in_vain_wakes_a_tallyd_that_it_has_put_to_rest),
        cmocka_unit_test(full_cards_tried_in_vain_say_what_they_carry),
        cmocka_unit_test(a_try_is_not_judged_by_anothers_change),
        cmocka_unit_test(what_was_declared_is_tried_after_a_take_over),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
