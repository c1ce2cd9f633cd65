/* ways_test.c - which way a round goes, by its operation and the posts that are there. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "local/way.h"
#include "ops/call.h"

#include <cmocka.h>

enum { RANKS = 3, ME = 1, EAGER = TLY_POST_EAGER, POOLED = TLY_POST_POOL_IN | TLY_POST_POOL_OUT };

static struct fixture {
    struct tly_local l;
    struct tly_control control;
    struct tly_local_op op;
    struct tly_local_round *round;
} f;

/* An operation of rank 1, of which it alone has posted, with these flags. */
static void post(const struct tly_call *call, uint8_t flags)
{
    f.l = (struct tly_local){.me = ME, .count = RANKS, .at[0].control = &f.control};
    tly_local_group_make_all(&f.l.all, RANKS, ME);
    f.op = (struct tly_local_op){.call = call->local, .bytes = 100};
    memset(f.round, 0, sizeof *f.round + RANKS * sizeof *f.round->posts);
    f.round->op = &f.op;
    f.round->group = &f.l.all;
    f.round->ranks = f.l.all.bits;
    f.round->size = f.l.all.size;
    f.round->posts[ME] = (struct tly_post){.call = 1, .spec = 7, .flags = flags};
    f.round->arrived = 1;
}

static void others_post(uint8_t first, uint8_t last)
{
    f.round->posts[0] = (struct tly_post){.call = 1, .spec = 7, .flags = first};
    f.round->posts[2] = (struct tly_post){.call = 1, .spec = 7, .flags = last};
    f.round->arrived = RANKS;
}

/* Rank 0 has joined, rank 2 has posted. */
static void first_joins(uint8_t last)
{
    f.round->posts[2] = (struct tly_post){.call = 1, .spec = 7, .flags = last};
    f.round->arrived = RANKS - 1;
    f.l.joined = true;
    f.l.at[0].joins = 1;
}

static const char *way(void)
{
    f.round->way = tly_way_expected(&f.l, f.round);
    return tly_way_chosen(&f.l, f.round, true)->name;
}

static void test_reductions(void **state)
{
    post(&tly_call_push_pull, EAGER);
    assert_string_equal(way(), "eager");
    others_post(EAGER, EAGER);
    assert_string_equal(way(), "eager");
    post(&tly_call_push_pull, POOLED);
    assert_string_equal(way(), "pooled");
    others_post(POOLED, POOLED);
    assert_string_equal(way(), "pooled");
    others_post(POOLED, TLY_POST_POOL_IN);
    assert_string_equal(way(), "staging");
    post(&tly_call_push_pull, 0);
    assert_string_equal(way(), "staging");
    others_post(POOLED, POOLED);
    assert_string_equal(way(), "staging");
    f.op.parts = 5;
    assert_string_equal(way(), "team");
}

static void test_ranges_of_reductions(void **state)
{
    const struct tly_call *const calls[] = {&tly_call_reduce, &tly_call_reduce_scatter};
    for (size_t i = 0; i < 2; i++) {
        post(calls[i], EAGER);
        others_post(EAGER, EAGER);
        assert_string_equal(way(), "eager");
        post(calls[i], POOLED);
        others_post(POOLED, POOLED);
        assert_string_equal(way(), "pooled");
        others_post(POOLED, 0);
        assert_string_equal(way(), "staging");
        post(calls[i], EAGER); /* zeros stand for nobody */
        first_joins(EAGER);
        assert_string_equal(way(), "divert");
    }
}

static void test_others(void **state)
{
    post(&tly_call_barrier, EAGER);
    assert_string_equal(way(), "eager");
    post(&tly_call_broadcast, EAGER);
    assert_string_equal(way(), "eager");
    post(&tly_call_broadcast, 0);
    others_post(POOLED, 0);
    assert_string_equal(way(), "fetch");
    post(&tly_call_broadcast, POOLED);
    others_post(POOLED, TLY_POST_POOL_IN);
    assert_string_equal(way(), "fetch");
    others_post(POOLED, POOLED);
    assert_string_equal(way(), "pooled");
    post(&tly_call_allgather, POOLED);
    others_post(POOLED, POOLED);
    assert_string_equal(way(), "fetch");
    post(&tly_call_allgather, EAGER); /* others may give more */
    others_post(EAGER, POOLED);
    assert_string_equal(way(), "fetch");
}

/* Before our post is shown, the others' do not count. */
static void test_own_post(void **state)
{
    post(&tly_call_push_pull, POOLED);
    others_post(0, EAGER | TLY_POST_SERVICE);
    assert_string_equal(tly_way_expected(&f.l, f.round)->name, "pooled");
    post(&tly_call_push_pull, 0);
    first_joins(0);
    assert_string_equal(tly_way_expected(&f.l, f.round)->name, "staging");
}

/* One post is enough, whichever way it would be otherwise. */
static void test_refused(void **state)
{
    static const uint8_t flags[] = {EAGER, POOLED, 0};
    for (size_t i = 0; i < sizeof flags; i++) {
        post(&tly_call_push_pull, flags[i]);
        f.round->posts[2] = (struct tly_post){.call = 1, .spec = 7, .flags = flags[i] | TLY_POST_SERVICE};
        assert_string_equal(way(), "divert");
        f.round->posts[2].flags = flags[i];
        assert_string_not_equal(way(), "divert");
        f.round->posts[2].spec = 8;
        assert_string_equal(way(), "divert");
    }
    post(&tly_call_push_pull, EAGER | TLY_POST_SERVICE);
    f.op.call = NULL; /* a mark of an operation that shared memory cannot do */
    assert_string_equal(way(), "divert");
}

/* Zeros stand for a rank that has joined, in posts and in the pool. */
static void test_joined(void **state)
{
    post(&tly_call_push_pull, EAGER);
    first_joins(EAGER);
    assert_string_equal(way(), "eager");
    post(&tly_call_push_pull, POOLED);
    first_joins(POOLED);
    assert_string_equal(way(), "pooled");
    post(&tly_call_push_pull, POOLED);
    first_joins(0);
    assert_string_equal(way(), "divert");
    post(&tly_call_broadcast, EAGER);
    first_joins(EAGER);
    assert_string_equal(way(), "divert");
    post(&tly_call_barrier, EAGER);
    first_joins(EAGER);
    assert_string_equal(way(), "eager");
    f.op.root = 1; /* all ranks must come */
    assert_string_equal(way(), "divert");
    f.l.doubts = 1; /* of a post whose fate is not known */
    assert_string_equal(way(), "eager");
}

static int begin(void **state)
{
    f.round = calloc(1, sizeof *f.round + RANKS * sizeof *f.round->posts);
    return f.round ? 0 : -1;
}

static int end(void **state)
{
    free(f.round);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reductions), cmocka_unit_test(test_ranges_of_reductions),
        cmocka_unit_test(test_others),     cmocka_unit_test(test_own_post),
        cmocka_unit_test(test_refused),    cmocka_unit_test(test_joined),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
