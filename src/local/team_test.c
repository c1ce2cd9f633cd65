/* team_test.c - pieces are summed while not much that was summed waits to be sent. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "local/way.h"
#include "local/window.h"
#include "local/work.h"
#include "ops/call.h"
#include "tally/tally.h"

#include <cmocka.h>

enum { PIECES = 6, COUNT = 25, PIECE = COUNT * 4 };

static int summed;

static void on_summed(void *user, struct tly_local_piece *piece)
{
    summed++;
}

/* One rank's team of itself, and an operation of so many pieces. */
static struct fixture {
    struct tly_local l;
    struct tly_control control;
    struct tly_local_op op;
    struct tly_local_piece piece[PIECES];
    struct tly_local_round *round;
    float in[PIECES * COUNT], out[PIECES * COUNT];
} f;

static int begin(void **state)
{
    static const struct tly_local_user calls = {.summed = on_summed};
    memset(&f, 0, sizeof f);
    summed = 0;
    f.l.count = 1;
    tly_local_group_make_all(&f.l.all, 1, 0);
    f.l.calls = &calls;
    f.l.own = f.l.at[0].control = &f.control;
    f.l.in_flight = 1;
    f.op = (struct tly_local_op){.call = tly_call_push_pull.local,
                                 .dtype = TALLY_FLOAT32,
                                 .reduction = TALLY_SUM,
                                 .prescale = 1,
                                 .postscale = 1,
                                 .parts = PIECES,
                                 .sums = (uint8_t *)f.out};
    tly_list_init(&f.op.pieces);
    tly_list_init(&f.op.landed);
    for (int i = 0; i < PIECES; i++) {
        f.piece[i] = (struct tly_local_piece){.op = &f.op, .place = (uint64_t)i * PIECE, .length = PIECE};
        tly_list_append(&f.op.pieces, &f.piece[i].node);
    }
    for (int i = 0; i < PIECES * COUNT; i++)
        f.in[i] = (float)i;
    f.round = calloc(1, sizeof *f.round + sizeof *f.round->posts);
    if (!f.round)
        return -1;
    f.round->op = &f.op;
    f.round->group = &f.l.all;
    f.round->ranks = f.l.all.bits;
    f.round->size = f.l.all.size;
    f.round->posts[0] = (struct tly_post){
        .input = (uint64_t)(uintptr_t)f.in, .output = (uint64_t)(uintptr_t)f.out, .first_dim = PIECES};
    return tly_way_team.begin(&f.l, f.round) == TLY_BEGUN ? 0 : -1;
}

static int end(void **state)
{
    free(f.round);
    return 0;
}

static bool step(uint64_t before)
{
    return tly_way_team.step(&f.l, f.round, &(struct tly_turn){.before = before});
}

static int sum_all_that_may(uint64_t before)
{
    while (step(before + f.op.waiting))
        ;
    return summed;
}

static void test_no_bound(void **state)
{
    assert_int_equal(sum_all_that_may(0), PIECES);
    assert_memory_equal(f.out, f.in, sizeof f.in);
}

/* Four at most; then the thread is woken once half of that is sent, and not before. */
static void test_ahead(void **state)
{
    f.op.ahead = 4 * PIECE;
    assert_int_equal(sum_all_that_may(0), 4);
    tly_local_sent(&f.l, &f.piece[0]);
    tly_local_sent(&f.l, &f.piece[0]); /* again: its service was lost */
    assert_int_equal(f.l.ahead, 3 * PIECE);
    tly_local_sent(&f.l, &f.piece[1]);
    assert_int_equal(f.control.bell, 0);
    tly_local_sent(&f.l, &f.piece[2]);
    assert_int_equal(f.control.bell, 1);
    assert_int_equal(sum_all_that_may(0), PIECES);
    for (int i = 0; i < PIECES; i++) /* also those that were never summed, where an operation ends early */
        tly_local_sent(&f.l, &f.piece[i]);
    assert_int_equal(f.control.bell, 1);
    assert_int_equal(f.l.ahead, 0);
    assert_int_equal(f.op.waiting, 0);
}

/* What waits of more urgent operations counts; it is sent before who waits for it goes to sleep, or wakes him. */
static void test_before(void **state)
{
    struct tly_local_op other = {.call = f.op.call, .ahead = 1};
    struct tly_local_piece first = {.op = &other, .length = 2 * PIECE, .ahead = true};
    f.op.ahead = 2 * PIECE;
    f.l.ahead = other.waiting = 2 * PIECE;
    assert_int_equal(sum_all_that_may(2 * PIECE), 0);
    tly_local_sent(&f.l, &first);
    assert_int_equal(f.control.bell, 1);
    assert_int_equal(sum_all_that_may(0), 2);
    f.l.ahead = f.op.waiting = 0; /* meanwhile, of what was looked at before that */
    assert_true(step(2 * PIECE));
}

/* Nothing is held back while what waits cannot be sent, for that may wait for what is held back. */
static void test_blocked(void **state)
{
    f.op.ahead = PIECE;
    assert_int_equal(sum_all_that_may(0), 1);
    tly_local_blocked(&f.l, true);
    assert_int_equal(f.control.bell, 1);
    assert_true(step(f.op.waiting));
    tly_local_blocked(&f.l, true);
    tly_local_blocked(&f.l, false);
    assert_int_equal(f.control.bell, 1);
    assert_int_equal(sum_all_that_may(0), 2);
}

/* An all-gather asks for pieces until so many bytes have not landed, whatever else waits.  At half of that the thread is woken. */
static void test_asked_for(void **state)
{
    f.op.call = tly_call_allgather.local;
    f.op.ahead = 4 * PIECE;
    f.op.borrowed = f.out; /* staged: what is copied back must have this rank's own data */
    f.piece[1].from = (uint8_t *)f.in + PIECE;
    for (int i = 1; i <= 4; i++) {
        assert_true(step(100 * PIECE));
        assert_int_equal(summed, i);
    }
    assert_false(step(0));
    assert_int_equal(f.l.ahead, 0);
    assert_memory_equal(f.out + COUNT, f.in + COUNT, PIECE);
    tly_local_sent(&f.l, &f.piece[0]);
    assert_int_equal(f.control.bell, 0);
    tly_local_sent(&f.l, &f.piece[1]);
    tly_local_sent(&f.l, &f.piece[1]);
    assert_int_equal(f.control.bell, 1);
    assert_true(step(0));
    assert_true(step(0));
    assert_int_equal(summed, PIECES);
}

/* However little may be summed ahead, one piece may. */
static void test_large_pieces(void **state)
{
    f.op.ahead = 1;
    for (int i = 0; i < PIECES; i++) {
        assert_int_equal(sum_all_that_may(0), i + 1);
        tly_local_sent(&f.l, &f.piece[i]);
        assert_int_equal(f.control.bell, i + 1 < PIECES ? i + 1 : i);
    }
    assert_memory_equal(f.out, f.in, sizeof f.in);
}

/* The owner copies blocks of its operation, and refuses what is none. */
static void test_asked_of_the_owner(void **state)
{
    enum { BYTES = sizeof f.in, BLOCK = 32 };
    static const struct {
        struct tly_ask ask;
        bool done;
    } asks[] = {
        {{.at = 0, .length = BLOCK, .gen = 3}, true},
        {{.at = BYTES - BLOCK, .length = BLOCK, .gen = 3}, true},
        {{.at = BLOCK, .length = BLOCK, .gen = 3, .writes = true}, true},
        {{.at = BYTES - BLOCK + 1, .length = BLOCK, .gen = 3}, false},
        {{.at = BYTES - BLOCK + 1, .length = BLOCK, .gen = 3, .writes = true}, false},
        {{.at = UINT64_MAX - 8, .length = BLOCK, .gen = 3}, false},
        {{.at = 0, .length = TLY_WINDOW + 1, .gen = 3}, false},
        {{.at = 0, .length = BLOCK, .gen = 2}, false}, /* it has ended */
        {{.at = 0, .length = BLOCK, .gen = 3, .work = 7}, false},
    };
    uint8_t *slots = calloc(1, TLY_WINDOW);
    assert_non_null(slots);
    f.l.slots = slots;
    f.op.bytes = BYTES;
    f.op.input = f.in;
    f.op.output = f.out;
    f.op.meeting = f.round;
    f.round->posts[0].gen = 3;
    tly_list_init(&f.l.ops);
    tly_list_append(&f.l.ops, &f.op.node);
    assert_false(tly_ferry_serve(&f.l));
    for (size_t i = 0; i < sizeof asks / sizeof *asks; i++) {
        const struct tly_ask *ask = &asks[i].ask;
        memset(f.out, 0, sizeof f.out);
        memset(slots, 7, BLOCK);
        f.control.ask[0] = *ask;
        f.control.asks = 1 | 1ull << 40; /* there is no such rank */
        assert_true(tly_ferry_serve(&f.l));
        assert_int_equal(f.control.asks & 1, 0);
        assert_int_equal(f.control.ask[0].done, asks[i].done);
        if (asks[i].done && !ask->writes)
            assert_memory_equal(slots, (uint8_t *)f.in + ask->at, BLOCK);
        if (asks[i].done && ask->writes)
            assert_memory_equal((uint8_t *)f.out + ask->at, slots, BLOCK);
        for (size_t at = 0; at < BYTES && !(asks[i].done && ask->writes); at++)
            assert_int_equal(((uint8_t *)f.out)[at], 0);
    }
    f.op.call = tly_call_reduce_scatter.local; /* no result is another rank's to write */
    f.control.ask[0] = asks[2].ask;
    f.control.asks = 1;
    assert_true(tly_ferry_serve(&f.l));
    assert_false(f.control.ask[0].done);
    free(slots);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_no_bound, begin, end),
        cmocka_unit_test_setup_teardown(test_ahead, begin, end),
        cmocka_unit_test_setup_teardown(test_before, begin, end),
        cmocka_unit_test_setup_teardown(test_blocked, begin, end),
        cmocka_unit_test_setup_teardown(test_asked_for, begin, end),
        cmocka_unit_test_setup_teardown(test_large_pieces, begin, end),
        cmocka_unit_test_setup_teardown(test_asked_of_the_owner, begin, end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
