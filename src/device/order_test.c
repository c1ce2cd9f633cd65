/* order_test.c - GPUs of a group in every order: steps end at random, and each slot's contents are followed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "device/order.h"

enum { MOST_MEMBERS = 8, MOST = 4, PIECES = 400 };

/* What lies in a slot. */
enum contents { NOTHING, GRADIENTS, RESULT, HALF_WRITTEN };
struct slot {
    enum contents what;
    uint64_t piece;
    int readers;
};

struct gpu {
    struct tly_order order;
    struct slot slot[TLY_ORDER_SLOTS];
    struct {
        enum tly_order_step step;
        uint64_t piece;
    } under_way[TLY_STEPS * MOST];
    int steps;
    uint64_t outs; /* pieces whose result is where it belongs */
};

static struct gpu gpus[MOST_MEMBERS];
static struct tly_order_board boards[MOST_MEMBERS];
static int members, owner[PIECES], on_host[PIECES], hosted;
static unsigned steps[PIECES];
static uint64_t seed;

static unsigned below(unsigned n)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(seed >> 33) % n;
}

static struct slot *slot_of(int gpu, uint64_t piece)
{
    return &gpus[gpu].slot[piece % TLY_ORDER_SLOTS];
}

/* Nobody may be at memory that is written, and what is read must be there. */
static void write_slot(int gpu, uint64_t piece, enum contents before)
{
    struct slot *s = slot_of(gpu, piece);
    if (s->readers || s->what == HALF_WRITTEN || (before && (s->what != before || s->piece != piece)))
        fail_msg("GPU %d overwrites piece %d with piece %d", gpu, (int)s->piece, (int)piece);
    s->what = HALF_WRITTEN;
}

static void read_slot(int gpu, uint64_t piece, enum contents what)
{
    struct slot *s = slot_of(gpu, piece);
    if (s->what != what || s->piece != piece)
        fail_msg("piece %d is not in GPU %d's slot", (int)piece, gpu);
    s->readers++;
}

static void begins(int gpu, enum tly_order_step step, uint64_t piece)
{
    switch (step) {
    case TLY_STEP_IN:
        write_slot(gpu, piece, NOTHING);
        break;
    case TLY_STEP_SUM:
        assert_int_equal(owner[piece], gpu);
        for (int i = 0; i < members; i++)
            read_slot(i, piece, GRADIENTS);
        break;
    case TLY_STEP_BACK:
        assert_int_equal(owner[piece], gpu);
        assert_int_equal(on_host[piece], 2);
        write_slot(gpu, piece, steps[piece] == TLY_ORDER_ALL ? GRADIENTS : NOTHING);
        break;
    default:
        read_slot(owner[piece], piece, RESULT);
    }
}

static void ends(int gpu, enum tly_order_step step, uint64_t piece)
{
    struct slot *s = slot_of(gpu, piece);
    switch (step) {
    case TLY_STEP_IN:
        *s = (struct slot){GRADIENTS, piece, 0};
        break;
    case TLY_STEP_SUM:
        for (int i = 0; i < members; i++)
            slot_of(i, piece)->readers--;
        on_host[piece] = 1;
        hosted++;
        break;
    case TLY_STEP_BACK:
        *s = (struct slot){RESULT, piece, 0};
        break;
    default:
        slot_of(owner[piece], piece)->readers--;
        gpus[gpu].outs++;
    }
    tly_order_end(&gpus[gpu].order, step, piece);
}

static bool post_and_begin(struct gpu *g, int me)
{
    struct tly_order *o = &g->order;
    enum tly_order_step step = (enum tly_order_step)below(TLY_STEPS);
    uint64_t piece;
    bool posted = o->posted < PIECES && below(2) &&
                  tly_order_post(o, owner[o->posted], steps[o->posted],
                                 steps[o->posted] == TLY_ORDER_OUTWARD && owner[o->posted] == me);
    if (!tly_order_begin(o, step, &piece))
        return posted;
    begins(me, step, piece);
    g->under_way[g->steps].step = step;
    g->under_way[g->steps++].piece = piece;
    int of_kind = 0;
    for (int i = 0; i < g->steps; i++)
        of_kind += g->under_way[i].step == step;
    assert_true(of_kind <= o->most);
    return true;
}

static bool end_one(struct gpu *g, int me)
{
    if (!g->steps)
        return false;
    int i = (int)below((unsigned)g->steps);
    ends(me, g->under_way[i].step, g->under_way[i].piece);
    g->under_way[i] = g->under_way[--g->steps];
    return true;
}

static bool host_may_end(uint64_t n)
{
    return on_host[n] == 1 && gpus[owner[n]].order.posted > n;
}

/* The host is done with some sum, in any order. */
static bool end_on_host(void)
{
    uint64_t n = below(PIECES), end = n + PIECES;
    while (n < end && !host_may_end(n % PIECES))
        n++;
    if (n == end)
        return false;
    on_host[n % PIECES] = 2;
    tly_order_result(&gpus[owner[n % PIECES]].order, n % PIECES);
    return true;
}

static void run(void)
{
    memset(gpus, 0, sizeof gpus);
    memset(boards, 0, sizeof boards);
    memset(on_host, 0, sizeof on_host);
    members = 1 + (int)below(MOST_MEMBERS);
    int results = 0;
    for (int i = 0; i < PIECES; i++) {
        static const unsigned kinds[] = {TLY_ORDER_ALL, TLY_ORDER_OUTWARD, TLY_ORDER_INWARD};
        owner[i] = (int)below((unsigned)members);
        steps[i] = kinds[below(3)];
        on_host[i] = steps[i] == TLY_ORDER_INWARD; /* from elsewhere */
        results += steps[i] != TLY_ORDER_OUTWARD;
    }
    for (int i = 0; i < members; i++) {
        struct tly_order *o = &gpus[i].order;
        *o = (struct tly_order){.members = members, .me = i, .most = 1 + (int)below(MOST)};
        for (int j = 0; j < members; j++)
            o->board[j] = &boards[j];
    }
    int idle = 0, slow = (int)below((unsigned)members);
    while (idle < 10000) {
        int me = below(8) ? (int)below((unsigned)members) : slow;
        bool moved = me == slow && below(4) ? false
                     : below(3)             ? post_and_begin(&gpus[me], me)
                     : below(2)             ? end_one(&gpus[me], me)
                                            : end_on_host();
        idle = moved ? 0 : idle + 1;
    }
    for (int i = 0; i < members; i++) {
        assert_int_equal(gpus[i].outs, results);
        for (int n = 0; n < TLY_ORDER_SLOTS; n++) /* all slots are free */
            assert_true(tly_order_post(&gpus[i].order, 0, TLY_ORDER_ALL, false));
    }
}

static void every_order_sums_all_pieces(void **state)
{
    for (int i = 0; i < 60; i++) {
        seed = (uint64_t)i;
        run();
    }
}

/* A GPU that does not take its results holds up the others only where they need its slots. */
static void a_slow_gpu(void **state)
{
    uint64_t piece;
    memset(boards, 0, sizeof boards);
    struct tly_order a = {.members = 2, .me = 0, .most = 1, .board = {&boards[0], &boards[1]}}, b = a;
    b.me = 1;
    for (uint64_t n = 0; n < TLY_ORDER_SLOTS; n++) {
        assert_true(tly_order_post(&a, 0, TLY_ORDER_ALL, false) &&
                    tly_order_post(&b, 0, TLY_ORDER_ALL, false));
        assert_false(tly_order_begin(&a, TLY_STEP_SUM, &piece));
        assert_true(tly_order_begin(&a, TLY_STEP_IN, &piece) && piece == n);
        tly_order_end(&a, TLY_STEP_IN, n);
        assert_false(tly_order_begin(&a, TLY_STEP_SUM, &piece)); /* without the other's */
        assert_true(tly_order_begin(&b, TLY_STEP_IN, &piece));
        assert_false(tly_order_begin(&b, TLY_STEP_IN, &piece)); /* each once */
        tly_order_end(&b, TLY_STEP_IN, n);
        assert_false(tly_order_begin(&b, TLY_STEP_SUM, &piece)); /* not its own */
        assert_true(tly_order_begin(&a, TLY_STEP_SUM, &piece));
        assert_false(tly_order_begin(&a, TLY_STEP_BACK, &piece));
        tly_order_end(&a, TLY_STEP_SUM, n);
        tly_order_result(&a, n);
        assert_true(tly_order_begin(&a, TLY_STEP_BACK, &piece));
        assert_true(n || !tly_order_begin(&b, TLY_STEP_OUT, &piece));
        tly_order_end(&a, TLY_STEP_BACK, n);
        assert_true(tly_order_begin(&a, TLY_STEP_OUT, &piece));
        tly_order_end(&a, TLY_STEP_OUT, n);
    }
    assert_false(tly_order_post(&a, 1, TLY_ORDER_ALL, false));
    assert_true(tly_order_begin(&b, TLY_STEP_OUT, &piece) && piece == 0);
    assert_false(tly_order_post(&a, 1, TLY_ORDER_ALL, false));
    tly_order_end(&b, TLY_STEP_OUT, 0);
    assert_true(tly_order_post(&a, 1, TLY_ORDER_ALL, false) && tly_order_post(&b, 1, TLY_ORDER_ALL, false));
    assert_false(tly_order_post(&a, 1, TLY_ORDER_ALL, false));
    assert_true(tly_order_begin(&a, TLY_STEP_IN, &piece) && piece == TLY_ORDER_SLOTS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_order_sums_all_pieces),
        cmocka_unit_test(a_slow_gpu),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
