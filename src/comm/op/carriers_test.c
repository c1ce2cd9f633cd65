/* carriers_test.c - which ranks carry for their machines, of all ranks and of groups. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "comm/op/carriers.h"

enum { MOST = 16 };

/* Where the ranks of "aabb" sit. */
static struct tly_seats sit(const char *layout, struct tly_seat seat[MOST])
{
    struct tly_seats s = {.rank = seat, .ranks = (uint32_t)strlen(layout)};
    uint32_t has[MOST] = {0};
    for (uint32_t i = 0; i < s.ranks; i++) {
        uint32_t m = (uint32_t)(layout[i] - 'a');
        seat[i] = (struct tly_seat){m, has[m]++};
        s.machines = m + 1 > s.machines ? m + 1 : s.machines;
    }
    return s;
}

static int numbers(const char *group, uint32_t rank[MOST])
{
    int n = (int)strlen(group);
    for (int i = 0; i < n; i++)
        rank[i] = (uint32_t)(group[i] - '0');
    return n;
}

/* Each list has a rank of each machine, each rank is in one at least, and has those that tly_carriers_with() says, in turn. */
static void expect_sound(const struct tly_carriers *k, const struct tly_seats *s, const uint32_t *rank, int n)
{
    for (int i = 0; i < n; i++) {
        unsigned in = 0, seen = 0;
        int machine = k->machine[s->rank[rank[i]].machine];
        for (unsigned list = 0; list < (unsigned)k->lists; list++)
            in += tly_carriers_list(k, list)[machine] == rank[i];
        assert_true(in > 0);
        for (uint32_t turn = 0; turn < in; turn++) {
            unsigned list = tly_carriers_with(k, s, rank[i], turn);
            assert_int_equal(tly_carriers_list(k, list)[machine], rank[i]);
            assert_false(seen >> list & 1);
            seen |= 1u << list;
            assert_int_equal(tly_carriers_with(k, s, rank[i], turn + in), list);
        }
    }
}

static void test_who_is_a_team(void **state)
{
    static const struct {
        const char *layout, *group;
        bool teams, sums;
    } cases[] =
        {
            {"aabb", "0123", true, true},
            {"aabb", "2301", true, true},   /* machines in another order */
            {"aabb", "1023", true, false},  /* a machine's ranks in another order */
            {"aabb", "0213", true, false},  /* not neighbours */
            {"abab", "0213", true, false},  /* the job's ranks are no neighbours: its tree is another */
            {"ababcc", "0213", true, true}, /* neighbours in the group */
            {"aabb", "01", false, false},   /* one machine */
            {"aabb", "02", false, false},   /* a rank each */
            {"aabbcc", "0123", true, true}, /* two of three machines */
            {"aabbcc", "0145", true, true},
            {"aabbcc", "012", false, false},   /* not all of a machine's */
            {"aaabbb", "012345", true, false}, /* 3 is no node of T(0, 6) */
            {"aaaabbcc", "01234567", true, true},
            {"aabcc", "01234", true, false}, /* 3 and 4 are no node of T(0, 5) */
            {"aabc", "012", true, true},
            {"abcc", "1230", true, false},
            {"abcc", "230", true, true},
        };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct tly_seat seat[MOST];
        uint32_t rank[MOST];
        struct tly_seats s = sit(cases[i].layout, seat);
        struct tly_carriers *k;
        int n = numbers(cases[i].group, rank);
        assert_int_equal(tly_carriers_make(&s, rank, n, rank[0], &k), 0);
        if ((k != NULL) != cases[i].teams || (k && k->sums != cases[i].sums))
            fail_msg("%s, %s: %d %d", cases[i].layout, cases[i].group, k != NULL, k && k->sums);
        if (k)
            expect_sound(k, &s, rank, n);
        tly_carriers_destroy(k);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_who_is_a_team)};
    return cmocka_run_group_tests_name("carriers", tests, NULL, NULL);
}
