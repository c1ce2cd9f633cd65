/* heap_test.c - the order of what comes out, whatever was put in, taken out and filtered. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <stdlib.h>

#include "base/heap.h"

#include <cmocka.h>

enum { MOST = 500 };

struct item {
    struct tly_rank_order order;
    bool in;
};

static bool every_third(void *value, void *user)
{
    struct item *i = value;
    return i->order.sequence % 3 == *(uint64_t *)user;
}

/* The first of all that are in, by looking at each. */
static struct item *first(struct item *items, int count)
{
    struct item *best = NULL;
    for (int i = 0; i < count; i++)
        if (items[i].in && (!best || tly_before(items[i].order, best->order)))
            best = &items[i];
    return best;
}

static void test_against_a_list(void **state)
{
    srand(7);
    for (int round = 0; round < 20; round++) {
        static struct item items[MOST];
        struct tly_heap h = {0};
        int count = 0;
        size_t in = 0;
        while (count < MOST) {
            int what = rand() % 10;
            if (what < 6) {
                struct item *i = &items[count];
                *i = (struct item){.order = {rand() % 5 - 2, (uint64_t)count}, .in = true};
                count++;
                assert_int_equal(tly_heap_push(&h, i->order, i), 0);
                in++;
            } else if (what < 9) {
                struct item *want = first(items, count);
                assert_ptr_equal(tly_heap_top(&h) ? tly_heap_top(&h)->value : NULL, want);
                assert_ptr_equal(tly_heap_pop(&h), want);
                if (want) {
                    want->in = false;
                    in--;
                }
            } else if (rand() % 10 == 0) {
                uint64_t third = (uint64_t)rand() % 3;
                tly_heap_filter(&h, every_third, &third);
                for (int i = 0; i < count; i++)
                    if (items[i].in && every_third(&items[i], &third)) {
                        items[i].in = false;
                        in--;
                    }
            }
            assert_int_equal(h.count, in);
        }
        for (struct item *want; (want = first(items, count)); want->in = false)
            assert_ptr_equal(tly_heap_pop(&h), want);
        assert_null(tly_heap_pop(&h));
        assert_null(tly_heap_top(&h));
        tly_heap_finish(&h);
    }
}

static void test_priority_before_sequence(void **state)
{
    assert_true(tly_before((struct tly_rank_order){1, 9}, (struct tly_rank_order){0, 1}));
    assert_true(tly_before((struct tly_rank_order){-1, 1}, (struct tly_rank_order){-1, 2}));
    assert_false(tly_before((struct tly_rank_order){0, 1}, (struct tly_rank_order){0, 1}));
    assert_true(tly_before((struct tly_rank_order){INT32_MAX, 1}, (struct tly_rank_order){INT32_MIN, 0}));
}

static void test_reserve(void **state)
{
    struct tly_heap h = {0};
    assert_int_equal(tly_heap_reserve(&h, 100), 0);
    assert_true(h.room >= 100);
    struct tly_heap_item *items = h.items;
    for (uint64_t i = 0; i < 100; i++)
        assert_int_equal(tly_heap_push(&h, (struct tly_rank_order){0, i}, &h), 0);
    assert_ptr_equal(h.items, items); /* nothing was allocated */
    tly_heap_finish(&h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_a_list),
        cmocka_unit_test(test_priority_before_sequence),
        cmocka_unit_test(test_reserve),
    };
    return cmocka_run_group_tests_name("heap", tests, NULL, NULL);
}
