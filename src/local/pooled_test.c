/* pooled_test.c - a rank takes its memory back from a round in the pool that it has not begun and another rank has. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "local/way.h"
#include "local/work.h"
#include "ops/call.h"
#include "tally/tally.h"

#include <cmocka.h>

enum { RANKS = 2, COUNT = 16 << 10, LEAVES = 0, STAYS = 1 };

/* Each rank's engine, with its own view of the one round. */
static struct rank {
    struct tly_local l;
    struct tly_local_op op;
    struct tly_local_round *round;
} rank[RANKS];

static struct segment {
    struct tly_control control;
    float tensor[COUNT];
} segment[RANKS];

static int broken;

static void on_broken(void *user, int err, const char *sentence)
{
    broken = err;
}

static void open_rank(uint32_t me, const struct tly_local_call *call, uint32_t root)
{
    static const struct tly_local_user calls = {.broken = on_broken};
    static const uint32_t numbers[RANKS] = {0, 1};
    struct tly_local *l = &rank[me].l;
    l->me = me;
    l->count = RANKS;
    l->calls = &calls;
    l->config.numbers = numbers;
    l->config.stuck_ms = 20;
    l->free_work[l->free_count++] = (uint16_t)(7 + me);
    for (uint32_t i = 0; i < RANKS; i++)
        l->at[i] = (struct tly_neighbour){.control = &segment[i].control,
                                          .base = (uint8_t *)&segment[i],
                                          .bytes = sizeof *segment,
                                          .pidfd = -1};
    l->own = l->at[me].control;
    tly_list_init(&l->ready);
    tly_local_group_make_all(&l->all, RANKS, me);
    rank[me].op = (struct tly_local_op){
        .call = call,
        .dtype = TALLY_FLOAT32,
        .reduction = TALLY_SUM,
        .prescale = 1,
        .postscale = 1,
        .root = root,
        .count = COUNT,
        .bytes = sizeof segment->tensor,
        .input = segment[me].tensor,
        .output = segment[me].tensor};
}

/* All ranks have posted tensors in the pool.  The one that stays has read both posts. */
static void post(const struct tly_local_call *call, uint32_t root)
{
    memset(rank, 0, sizeof rank);
    memset(segment, 0, sizeof segment);
    broken = 0;
    for (uint32_t i = 0; i < RANKS; i++) {
        open_rank(i, call, root);
        struct tly_local_round *r = calloc(1, sizeof *r + RANKS * sizeof *r->posts);
        assert_non_null(r);
        rank[i].round = r;
        r->id = 0x123456789abcdef;
        r->op = &rank[i].op;
        r->group = &rank[i].l.all;
        r->ranks = r->group->bits;
        r->size = RANKS;
        r->way = &tly_way_pooled;
        r->posts[i] = (struct tly_post){.call = 1,
                                        .bytes = sizeof segment->tensor,
                                        .input = offsetof(struct segment, tensor),
                                        .output = offsetof(struct segment, tensor),
                                        .flags = TLY_POST_POOL_IN | TLY_POST_POOL_OUT};
        assert_true(tly_way_pooled.prepare(&rank[i].l, r));
        for (int at = 0; at < COUNT; at++)
            segment[i].tensor[at] = (float)(i + 1);
    }
    rank[STAYS].round->posts[LEAVES] = rank[LEAVES].round->posts[LEAVES];
}

static bool gives_up(void)
{
    return tly_way_pooled.give_up(&rank[LEAVES].l, rank[LEAVES].round);
}

/* Has the rank that stays got anywhere? */
static bool goes_on(const struct tly_way *way)
{
    struct tly_turn turn = {0};
    struct tly_local *l = &rank[STAYS].l;
    struct tly_local_round *r = rank[STAYS].round;
    bool can = way->can_step(l, r, &turn);
    return way->step(l, r, &turn) || can;
}

static void drop(void)
{
    for (int i = 0; i < RANKS; i++)
        free(rank[i].round);
}

static void test_nobody_writes(void **state)
{
    const struct tly_local_call *const calls[] = {tly_call_push_pull.local, tly_call_broadcast.local};
    for (int i = 0; i < 4; i++) {
        bool late = i / 2; /* the other one begins behind that */
        post(calls[i % 2], STAYS);
        if (late)
            assert_true(gives_up());
        assert_int_equal(tly_way_pooled.begin(&rank[STAYS].l, rank[STAYS].round), TLY_BEGUN);
        if (!late)
            assert_true(gives_up());
        assert_false(goes_on(&tly_way_pooled));
        for (int at = 0; at < COUNT; at++)
            assert_true(segment[LEAVES].tensor[at] == LEAVES + 1);
        drop();
    }
}

/* The rank that stays has its tensor elsewhere, so all take the root's data from the root. */
static void test_what_is_read_counts_for_nothing(void **state)
{
    post(tly_call_broadcast.local, LEAVES);
    assert_true(gives_up());
    struct tly_local_round *r = rank[STAYS].round;
    r->way = &tly_way_fetch;
    r->posts[STAYS].bytes = 0;
    assert_int_equal(tly_way_fetch.begin(&rank[STAYS].l, r), TLY_BEGUN);
    uint32_t before = r->copied;
    tly_way_fetch.step(&rank[STAYS].l, r, &(struct tly_turn){0});
    assert_int_equal(r->copied, before);
    drop();
}

/* A rank that has begun may be at a chunk. */
static void test_waits_for_one_that_writes(void **state)
{
    post(tly_call_broadcast.local, STAYS);
    atomic_store(&segment[STAYS].control.working, tly_work_name(rank[STAYS].round));
    assert_false(gives_up());
    assert_int_not_equal(broken, 0);
    drop();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nobody_writes),
        cmocka_unit_test(test_what_is_read_counts_for_nothing),
        cmocka_unit_test(test_waits_for_one_that_writes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
