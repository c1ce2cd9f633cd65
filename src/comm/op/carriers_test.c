/* carriers_test.c - which ranks carry for their machines, of all ranks and of groups. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "comm/op/carriers.h"
#include "membership/roster.h"

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
    } cases[] = {
        {"aabb", "0123", true, true},
        {"aabb", "2301", true, true},  /* machines in another order */
        {"aabb", "1023", true, true},  /* a machine's ranks in another order */
        {"aabb", "0213", true, false}, /* not neighbours */
        {"abab", "0213", true, true},  /* neighbours in the group */
        {"ababcc", "0213", true, true},
        {"aabb", "01", false, false},   /* one machine */
        {"aabb", "02", false, false},   /* a rank each */
        {"aabbcc", "0123", true, true}, /* two of three machines */
        {"aabbcc", "0145", true, true},
        {"aabbcc", "012", true, true}, /* not all of a machine's */
        {"aaabbb", "0134", true, true},
        {"aaabbb", "01345", true, false},
        {"aaaabbbbc", "01458", true, true}, /* ((01)(45))8, and (ab)c */
        {"abbbbc", "012345", true, false},
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

/* --- the bits ------------------------------------------------------------------------------------ */

enum { LONGEST = 400 };

/* The sum of leaf[lo] to leaf[hi - 1] along the tree over so many, as text. */
static void write_sum(char leaf[][LONGEST], int lo, int hi, char out[LONGEST])
{
    char left[LONGEST], right[LONGEST];
    int half = 1;
    while (half * 2 < hi - lo)
        half *= 2;
    if (hi - lo == 1) {
        strcpy(out, leaf[lo]);
        return;
    }
    write_sum(leaf, lo, lo + half, left);
    write_sum(leaf, lo + half, hi, right);
    assert_true(snprintf(out, LONGEST, "(%s%s)", left, right) < LONGEST);
}

/* The same of nodes that have so many leaves; as services add them up. */
static void write_sum_of_nodes(char node[][LONGEST], const int *leaves, int lo, int hi, char out[LONGEST])
{
    char left[LONGEST], right[LONGEST];
    int all = 0, half = 1, at = 0, split = lo;
    if (hi - lo == 1) {
        strcpy(out, node[lo]);
        return;
    }
    for (int i = lo; i < hi; i++)
        all += leaves[i];
    while (half * 2 < all)
        half *= 2;
    while (at < half)
        at += leaves[split++];
    assert_int_equal(at, half);
    write_sum_of_nodes(node, leaves, lo, split, left);
    write_sum_of_nodes(node, leaves, split, hi, right);
    assert_true(snprintf(out, LONGEST, "(%s%s)", left, right) < LONGEST);
}

/* Of machines one behind the other. */
static bool are_nodes(const int *leaves, int machines)
{
    uint32_t all = 0, at = 0;
    for (int i = 0; i < machines; i++)
        all += (uint32_t)leaves[i];
    for (int i = 0; i < machines; at += (uint32_t)leaves[i++])
        if (!tly_roster_is_node(0, all, at, at + (uint32_t)leaves[i]))
            return false;
    return true;
}

/* Are the job's ranks, in their order, neighbours and nodes? */
static bool job_has_nodes(const struct tly_seats *s)
{
    int leaves[MOST] = {0}, machines = 0;
    for (uint32_t i = 0; i < s->ranks; i++) {
        machines += i == 0 || s->rank[i].machine != s->rank[i - 1].machine;
        leaves[machines - 1]++;
    }
    return (uint32_t)machines == s->machines && are_nodes(leaves, machines);
}

/* Teams' sums, as sum_advance() in src/ops/all_reduce/service.c adds them up. */
static void write_teams_sum(const struct tly_seats *s, const struct tly_carriers *k, const uint32_t *rank,
                            int n, char leaf[][LONGEST], char out[LONGEST])
{
    static char own[MOST][LONGEST], sum[MOST][LONGEST];
    int leaves[MOST] = {0}, ones[MOST] = {0}, carried = 0;
    for (int m = 0; m < k->machines; m++) {
        int has = 0;
        ones[m] = 1;
        for (int i = 0; i < n; i++)
            if (k->machine[s->rank[rank[i]].machine] == m)
                strcpy(own[has++], leaf[i]);
        for (uint32_t i = 0; i < s->ranks; i++)
            leaves[m] += k->machine[s->rank[i].machine] == m;
        carried += leaves[m];
        write_sum(own, 0, has, sum[m]);
    }
    bool nodes = n == carried && are_nodes(leaves, k->machines) &&
                 ((uint32_t)k->machines < s->machines || job_has_nodes(s));
    write_sum_of_nodes(sum, nodes ? leaves : ones, 0, k->machines, out);
}

static unsigned below(unsigned n)
{
    static unsigned seed = 11;
    return (unsigned)rand_r(&seed) % n;
}

/* Teams sum exactly where that changes no bit. */
static void test_the_tree(void **state)
{
    static char leaf[MOST][LONGEST];
    int sums = 0, teams = 0;
    for (int turn = 0; turn < 40000; turn++) {
        char layout[MOST + 1] = "", whole[LONGEST], carried[LONGEST];
        struct tly_seat seat[MOST];
        uint32_t rank[MOST];
        int machines = 2 + (int)below(3), ranks = machines + (int)below(9), n = 0;
        for (int i = 0; i < ranks; i++)
            layout[i] = (char)('a' + (i < machines ? i : (int)below((unsigned)machines)));
        if (turn % 2) /* a machine's ranks are neighbours */
            for (int i = 0; i < ranks; i++)
                layout[i] = (char)('a' + i * machines / ranks);
        struct tly_seats s = sit(layout, seat);
        for (int m = 0; m < machines; m++)
            for (int i = 0; i < ranks; i++)
                if (layout[i] - 'a' == (turn / 2 % 2 ? machines - 1 - m : m) && (turn % 3 == 0 || below(4)))
                    rank[n++] = (uint32_t)i;
        for (int i = 0; turn % 5 == 0 && i + 1 < n; i++)
            if (below(3) == 0) {
                uint32_t other = rank[i];
                rank[i] = rank[i + 1];
                rank[i + 1] = other;
            }
        struct tly_carriers *k = NULL;
        if (n)
            assert_int_equal(tly_carriers_make(&s, rank, n, rank[0], &k), 0);
        if (!k)
            continue;
        expect_sound(k, &s, rank, n);
        for (int i = 0; i < n; i++)
            snprintf(leaf[i], LONGEST, "%u.", rank[i]);
        write_sum(leaf, 0, n, whole);
        write_teams_sum(&s, k, rank, n, leaf, carried);
        if (k->sums != (strcmp(whole, carried) == 0))
            fail_msg("%s: %s, %s: %d", layout, whole, carried, k->sums);
        teams++;
        sums += k->sums;
        tly_carriers_destroy(k);
    }
    assert_true(teams > 10000 && sums > 2000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_who_is_a_team), cmocka_unit_test(test_the_tree)};
    return cmocka_run_group_tests_name("carriers", tests, NULL, NULL);
}
