/* replan_random_test.c - cards that drop, return, come and go at random in the model of a cluster (cluster.h).
 *
 * Once all carry as much as at first, and nothing changes any more, each has its share again within the longest pause between
 * two tries (docs/why/plan.md). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "test/plan/cluster.h"

enum {
    BOUND = TLY_REPLAN_MOST_INTERVAL + 100, /* samples: the pause, and the tries behind it */
    CALM = 50,                              /* samples for which it stays so */
    COURSES = 100,
    LONG_COURSES = 4000,
};

struct course {
    struct cluster c;
    unsigned random;
    uint32_t back_at[CLUSTER_MOST]; /* steps: when a tallyd that is away comes again, */
    double last[CLUSTER_MOST];      /* and what is known of its card then */
};

static int draw(struct course *x, unsigned below)
{
    x->random = x->random * 1664525u + 1013904223u;
    return (int)((x->random >> 8) % below);
}

static void begin_epoch(struct cluster *c)
{
    cluster_split(c);
    tly_replan_begin(c->r, false);
}

static void run(struct course *x, int steps)
{
    struct cluster *c = &x->c;
    for (int n = 0; n < steps; n++) {
        for (int i = c->workers; i < c->count; i++) {
            if (c->s[i].active || c->steps < x->back_at[i])
                continue;
            assert_int_equal(tly_replan_place(c->r, i, x->last[i], 0, 0, false), 0);
            c->s[i].active = true;
            begin_epoch(c);
        }
        cluster_step(c);
    }
}

static void go_away(struct course *x, int tallyd)
{
    struct cluster *c = &x->c;
    if (!c->s[tallyd].active)
        return;
    x->back_at[tallyd] = c->steps + 1 + (uint32_t)draw(x, 20);
    x->last[tallyd] = tly_replan_is_sure(c->r, tallyd) ? tly_replan_bandwidth(c->r, tallyd) : 100;
    c->s[tallyd].active = false;
    begin_epoch(c);
}

static void happen(struct course *x)
{
    struct cluster *c = &x->c;
    int tallyd = c->workers + draw(x, (unsigned)(c->count - c->workers)),
        worker = draw(x, (unsigned)c->workers);
    switch (draw(x, 10)) {
    case 0:
    case 1:
    case 2:
        c->real[tallyd] = 10 + draw(x, 60);
        break;
    case 3:
    case 4:
        c->real[tallyd] = 100;
        break;
    case 5:
        c->real[worker] = 30 + draw(x, 60);
        break;
    case 6:
        c->real[worker] = 100;
        break;
    case 7:
        go_away(x, tallyd);
        break;
    case 8:
        c->noise = .02 + .01 * draw(x, 5);
        break;
    default:
        c->process[tallyd] = c->process[tallyd] > 0 ? 0 : 20 + draw(x, 60);
    }
}

/* Each tallyd has half of the least share that one has by the best split, or more, and steps are nearly as short. */
static bool has_recovered(const struct cluster *c)
{
    for (int i = c->workers; i < c->count; i++)
        if (tly_replan_rests(c->r, i) || tly_replan_bandwidth(c->r, i) < 30)
            return false;
    return cluster_fraction(c) >= .85;
}

static void recovers(int workers, int spare, unsigned number)
{
    struct course x = {.random = number * 2654435761u + 12345};
    struct cluster *c = &x.c;
    int calm = 0, took = 0;
    cluster_start(c, workers, spare, NULL, 0);
    c->noise = .02;
    c->random = number;
    run(&x, 20 + draw(&x, 20));
    for (int left = 3 + draw(&x, 8); left; left--) {
        happen(&x);
        run(&x, 1 + draw(&x, 60));
    }
    for (int i = 0; i < c->count; i++) {
        c->real[i] = 100;
        c->process[i] = 0;
    }
    c->noise = .02;
    run(&x, 21); /* until all are back */
    for (; calm < CALM && took < BOUND + CALM; took++) {
        run(&x, 1);
        calm = has_recovered(c) ? calm + 1 : 0;
    }
    if (calm < CALM)
        fail_msg("%d + %d, course %u: %.3f of the optimum after %d samples", workers, spare, number,
                 cluster_fraction(c), took);
    cluster_finish(c);
}

static void each_card_has_its_share_again(void **state)
{
    const char *choice = getenv("TEST_LONG");
    int courses = choice && strcmp(choice, "all") == 0 ? LONG_COURSES : COURSES;
    for (int n = 0; n < courses; n++) {
        recovers(4, 2, (unsigned)n);
        if (n % 8 == 0)
            recovers(8, 4, (unsigned)n);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(each_card_has_its_share_again)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
