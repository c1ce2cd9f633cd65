/* posts_test.c - what other processes have written into their rings is checked before it is used. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "local/posts.h"
#include "local/way.h"
#include "ops/call.h"

#include <cmocka.h>

enum { RANKS = 4, ME = 1, OTHER = 2, PAIR = 1 << ME | 1 << OTHER };

static struct fixture {
    struct tly_local l;
    struct tly_local_op op;
    struct tly_local_group pair;
    int err;
    char sentence[100];
} f;

static void on_broken(void *user, int err, const char *sentence)
{
    f.err = err;
    strncpy(f.sentence, sentence, sizeof f.sentence - 1);
}

static int begin(void **state)
{
    static const struct tly_local_user calls = {.broken = on_broken};
    static const uint32_t numbers[RANKS] = {10, 11, 12, 13};
    memset(&f, 0, sizeof f);
    f.l = (struct tly_local){.me = ME, .count = RANKS, .calls = &calls, .config.numbers = numbers};
    tly_local_group_make_all(&f.l.all, RANKS, ME);
    tly_local_group_make(&f.pair, (const uint32_t[]){ME, OTHER}, 2, ME);
    tly_list_init(&f.l.ops);
    tly_list_init(&f.l.idle);
    for (int i = 0; i < RANKS; i++) {
        f.l.at[i].bytes = sizeof(struct tly_control) + 4096;
        f.l.at[i].control = aligned_alloc(64, f.l.at[i].bytes);
        if (!f.l.at[i].control)
            return -1;
        memset(f.l.at[i].control, 0, f.l.at[i].bytes);
    }
    f.l.own = f.l.at[ME].control;
    return 0;
}

static int end(void **state)
{
    struct tly_local_round *r;
    tly_map_each(&f.l.rounds, r) free(r);
    tly_map_finish(&f.l.rounds);
    for (int i = 0; i < RANKS; i++)
        free(f.l.at[i].control);
    return 0;
}

/* Rank 2 has written this at the beginning of its ring, for the ranks with these bits; 0: for all. */
static void other_posts(struct tly_post p, uint64_t ranks)
{
    struct tly_control *c = f.l.at[OTHER].control;
    memcpy(tly_post_at(c, sizeof p), &ranks, sizeof ranks);
    p.there = ranks ? TLY_POST_GROUP : TLY_POST_ALL;
    *tly_post_at(c, 0) = p;
}

static void expect_blamed(void)
{
    tly_posts_read(&f.l);
    assert_int_equal(f.err, EPROTO);
    assert_string_equal(f.sentence, "rank 12 has posted a malformed operation");
    assert_int_equal(f.l.rounds.count, 0);
}

static void test_group_without_this_rank(void **state)
{
    other_posts((struct tly_post){.call = 1, .bytes = 100, .flags = TLY_POST_EAGER}, 1 << OTHER | 1);
    assert_true(tly_posts_read(&f.l));
    assert_int_equal(f.err, 0);
    assert_int_equal(f.l.rounds.count, 0);
    assert_int_equal(f.l.at[OTHER].read, tly_posts_length(true, 100));
}

static void test_too_long(void **state)
{
    other_posts((struct tly_post){.call = 1, .bytes = UINT64_MAX - 200, .flags = TLY_POST_EAGER},
                1 << OTHER | 1);
    expect_blamed();
}

static void test_group_without_its_rank(void **state)
{
    other_posts((struct tly_post){.call = 1, .bytes = 8, .flags = TLY_POST_EAGER}, 1 << 3 | 1);
    expect_blamed();
}

static void test_group_with_a_rank_elsewhere(void **state)
{
    other_posts((struct tly_post){.call = 1, .bytes = 8, .flags = TLY_POST_EAGER}, 1 << OTHER | 1 << RANKS);
    expect_blamed();
}

static void test_group_of_no_ranks(void **state)
{
    other_posts((struct tly_post){.call = 1, .bytes = 8, .flags = TLY_POST_EAGER}, 1);
    memset(tly_post_at(f.l.at[OTHER].control, sizeof(struct tly_post)), 0, sizeof(uint64_t));
    expect_blamed();
}

/* A group sums in the pool alone. */
static void test_reduction_out_of_the_pool(void **state)
{
    f.op = (struct tly_local_op){
        .call = tly_call_push_pull.local, .key = 5, .spec = 7, .bytes = 64, .group = &f.pair};
    other_posts((struct tly_post){.call = 1, .key = 5, .spec = 7, .bytes = 64}, PAIR);
    struct tly_post own = {.call = 1,
                           .key = 5,
                           .spec = 7,
                           .bytes = 64,
                           .input = sizeof(struct tly_control),
                           .output = sizeof(struct tly_control),
                           .flags = TLY_POST_POOL_IN | TLY_POST_POOL_OUT};
    struct tly_local_round *r = tly_posts_round(&f.l, 5, 0, PAIR, 0);
    assert_non_null(r);
    r->op = &f.op;
    r->group = &f.pair;
    r->posted = true;
    r->arrived = 1;
    r->posts[ME] = own;
    r->way = tly_way_expected(&f.l, r);
    assert_ptr_equal(r->way, &tly_way_pooled);
    tly_posts_read(&f.l);
    assert_int_equal(f.err, EPROTO);
    assert_string_equal(f.sentence, "rank 12 has posted a malformed operation");
}

/* Nobody has the operation any more once it is handed back. */
static void on_divert(void *user, struct tly_local_op *op)
{
    memset(op, 0, sizeof *op);
}

static void test_ends_while_it_is_taken_back(void **state)
{
    static const struct tly_local_user calls = {.broken = on_broken, .divert = on_divert};
    f.l.calls = &calls;
    f.l.unwanted = true;
    tly_list_init(&f.l.inbox);
    tly_list_init(&f.l.backlog);
    f.op = (struct tly_local_op){
        .call = tly_call_push_pull.local, .key = 5, .spec = 7, .number = 1, .group = &f.pair, .mark = true};
    other_posts((struct tly_post){.call = 1, .key = 5, .spec = 8, .flags = TLY_POST_EAGER}, PAIR);
    struct tly_local_round *r = tly_posts_round(&f.l, 5, 0, PAIR, 0);
    assert_non_null(r);
    r->op = &f.op;
    f.op.meeting = r;
    r->group = &f.pair;
    r->posted = true;
    r->arrived = 1;
    r->posts[ME] = (struct tly_post){.call = 1, .key = 5, .spec = 7, .flags = TLY_POST_EAGER};
    r->way = tly_way_expected(&f.l, r);
    tly_list_append(&f.l.ops, &f.op.node);
    tly_posts_send(&f.l);
    assert_true(tly_list_empty(&f.l.ops));
    const struct tly_post *back = tly_post_at(f.l.own, 0);
    assert_int_equal(back->flags, TLY_POST_BACK);
    assert_int_equal(back->there, TLY_POST_GROUP); /* its group's ranks look for that */
    while (!tly_list_empty(&f.l.idle))
        free(tly_list_entry(tly_list_take(&f.l.idle), struct tly_local_round, node));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_group_without_this_rank, begin, end),
        cmocka_unit_test_setup_teardown(test_too_long, begin, end),
        cmocka_unit_test_setup_teardown(test_group_without_its_rank, begin, end),
        cmocka_unit_test_setup_teardown(test_group_with_a_rank_elsewhere, begin, end),
        cmocka_unit_test_setup_teardown(test_group_of_no_ranks, begin, end),
        cmocka_unit_test_setup_teardown(test_reduction_out_of_the_pool, begin, end),
        cmocka_unit_test_setup_teardown(test_ends_while_it_is_taken_back, begin, end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
