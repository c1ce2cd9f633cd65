/* roster_test.c - encoding, grouping into machines, and which tree a layout is summed along. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "membership/roster.h"

enum { MOST = 16 };

/* machine_of[i] for n ranks. */
static void group(struct tly_roster *r, struct tly_roster_rank *room, const int *machine_of, uint32_t n)
{
    uint32_t same[MOST];
    for (uint32_t i = 0; i < n; i++)
        for (same[i] = 0; machine_of[same[i]] != machine_of[i];)
            same[i]++;
    memset(r, 0, sizeof *r);
    r->ranks = room;
    tly_roster_group(r, n, same);
}

static void machines_are_numbered_by_their_lowest_rank(void **state)
{
    struct tly_roster_rank room[MOST];
    struct tly_roster r;
    group(&r, room, (const int[]){5, 2, 5, 2, 9}, 5);
    assert_int_equal(r.machine_count, 3);
    static const struct tly_roster_rank expected[] = {{0, 0, 0}, {1, 0, 0}, {0, 1, 0}, {1, 1, 0}, {2, 0, 0}};
    assert_memory_equal(room, expected, sizeof expected);
}

static void trees(void **state)
{
    static const struct {
        const char *layout; /* a letter a rank: its machine */
        bool flat, flat16;
        const char *order; /* of leaves when not flat */
        bool teams;
    } cases[] = {
        {"a", true, true, NULL, false},
        {"abcdefgh", true, true, NULL, false},
        {"aaaaaaaa", true, false, "01234567", false},
        {"aabbccdd", true, false, "01234567", true},
        {"aaaabbbb", true, false, "01234567", true},
        {"aaaabbcc", true, false, "01234567", true}, /* nodes of the ranks' tree: a + (b + c), */
        {"aabbcccc", true, false, "01234567", true}, /* and (a + b) + c */
        {"aaabbb", false, false, "012345", true},    /* 2 x 3: 3 is no node of T(0, 6) */
        {"abab", false, false, "0213", true},        /* not neighbours */
        {"aab", true, false, "012", true},
        {"abb", false, false, "012", true}, /* T(0, 3) is (0 + 1) + 2 */
        {"abbc", false, false, "0123", true},
        {"aabbc", true, false, "01234", true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct tly_roster_rank room[MOST];
        struct tly_roster r;
        int machine_of[MOST], groups, sizes[MOST], total = 0;
        uint32_t order[MOST], n = (uint32_t)strlen(cases[i].layout);
        for (uint32_t j = 0; j < n; j++)
            machine_of[j] = cases[i].layout[j];
        group(&r, room, machine_of, n);
        assert_int_equal(tly_roster_tree(&r, false, &groups, sizes, order), cases[i].flat);
        assert_int_equal(groups, cases[i].flat ? 1 : (int)r.machine_count);
        assert_int_equal(tly_roster_tree(&r, true, &groups, sizes, order), cases[i].flat16);
        assert_int_equal(groups, cases[i].flat16 ? 1 : (int)r.machine_count);
        for (int g = 0; g < groups; g++)
            total += sizes[g];
        assert_int_equal(total, n);
        for (uint32_t j = 0; j < n; j++)
            assert_int_equal(order[j], cases[i].order ? (uint32_t)(cases[i].order[j] - '0') : j);
        assert_int_equal(tly_roster_suits_teams(&r), cases[i].teams);
    }
}

static void fill(struct tly_roster *r)
{
    *r = (struct tly_roster){.epoch = 1,
                             .rank_count = 3,
                             .machine_count = 2,
                             .service_count = 3,
                             .part_bytes = 1 << 20,
                             .part_least = 1 << 16,
                             .part_most = 2 << 20,
                             .window_bytes = 4 << 20};
    r->ranks = calloc(3, sizeof *r->ranks);
    r->services = calloc(3, sizeof *r->services);
    r->ranks[1].local_rank = 1;
    r->ranks[2].machine = 1;
    r->ranks[2].left = 1;
    r->services[2].left = 1;
    for (uint32_t i = 0; i < 3; i++) {
        r->services[i].role = i < 2 ? TLY_ROLE_RANK : TLY_ROLE_TALLYD;
        r->services[i].rank = i == 1 ? 2 : 0;
        r->services[i].bandwidth = 1000000000ull * i;
        r->services[i].card = i < 2 ? i : 1;
        r->services[i].weight = i + 1;
        char where[40];
        snprintf(where, sizeof where, "10.0.0.%u:%u", i, 1000 + i);
        tly_endpoints_add(&r->services[i].at, "tcp", where);
        tly_endpoints_add(&r->services[i].at, "near", "by");
    }
}

static void round_trip_and_every_truncation(void **state)
{
    struct tly_roster r, back;
    struct tly_writer w = {0};
    fill(&r);
    tly_roster_write(&w, &r);
    struct tly_reader rd = {w.data, w.len, false};
    assert_int_equal(tly_roster_read(&rd, &back), 0);
    assert_int_equal(back.rank_count, 3);
    assert_int_equal(back.ranks[2].machine, 1);
    assert_true(back.ranks[2].left && !back.ranks[1].left);
    assert_memory_equal(&back.services[2].at, &r.services[2].at, sizeof r.services[2].at);
    assert_true(back.services[2].bandwidth == 2000000000ull && back.services[2].card == 1);
    assert_int_equal(back.services[2].weight, 3);
    assert_true(back.services[2].left && !back.services[1].left);
    tly_roster_finish(&back);
    for (size_t n = 0; n < w.len; n++) {
        struct tly_reader cut = {w.data, n, false};
        assert_int_equal(tly_roster_read(&cut, &back), -EPROTO);
    }
    free(w.data);
    tly_roster_finish(&r);
}

static void nonsense_is_refused(void **state)
{
    for (int i = 0; i < 14; i++) {
        struct tly_roster r, back;
        struct tly_writer w = {0};
        fill(&r);
        switch (i) {
        case 0:
            r.ranks[0].machine = 2;
            break;
        case 1:
            r.services[0].rank = 3;
            break;
        case 2:
            r.services[2].role = TLY_ROLE_RANK;
            break;
        case 3:
            r.part_bytes = 100;
            break;
        case 4:
            r.window_bytes = r.part_most - 64;
            break;
        case 5:
            snprintf(r.services[1].at.at[0].text, TLY_ENDPOINT, "no scheme");
            break;
        case 6:
            r.services[1].bandwidth = TLY_MAX_RATE + 1;
            break;
        case 7:
            r.services[1].sum_rate = TLY_MAX_RATE + 1;
            break;
        case 8:
            r.services[1].card = 2;
            break;
        case 9: /* 2 behind 1's card, and that behind 0's */
            r.services[1].card = 0;
            break;
        case 10:
            r.services[0].weight = r.services[1].weight = r.services[2].weight = 0;
            break;
        case 11:
            r.ranks[1].left = 2;
            break;
        case 12:
            r.services[2].left = 2;
            break;
        case 13:
            r.epoch = 0;
            break;
        }
        tly_roster_write(&w, &r);
        struct tly_reader rd = {w.data, w.len, false};
        int err = tly_roster_read(&rd, &back);
        assert_int_equal(err,
                         i == 13 ? 0 : -EPROTO); /* the last one shows that the rest is what is refused */
        if (!err)
            tly_roster_finish(&back);
        free(w.data);
        tly_roster_finish(&r);
    }
}

/* What a service's memory has room for limits it like a sum rate, and only where it has less than its card brings. */
static void little_memory_sums_little(void **state)
{
    enum { MB = 1 << 20, MANY = 1 << 30 };
    struct tly_roster_rank ranks[3] = {{.machine = 0}, {.machine = 1}, {.machine = 2}};
    struct tly_roster_service services[4];
    struct tly_roster r = {.rank_count = 3,
                           .machine_count = 3,
                           .service_count = 4,
                           .part_bytes = MB,
                           .ranks = ranks,
                           .services = services};
    struct tly_plan_machine m[4];
    for (uint32_t i = 0; i < 4; i++) /* a part takes a second */
        services[i] = (struct tly_roster_service){.bandwidth = 8 * MB, .card = i, .memory = MANY};
    tly_roster_machines(&r, m);
    for (int i = 0; i < 4; i++)
        assert_true(m[i].sum_rate == 0);
    assert_int_equal(tly_roster_split(&r, TLY_SPLIT_OPTIMAL), 0);
    assert_true(services[0].weight == 1 && services[3].weight == 2); /* Eq. 1, 2 */
    services[3].memory =
        19 * MB / 8; /* an input stays for 19 s, and half of the memory is taken to be empty */
    tly_roster_machines(&r, m);
    assert_true(m[3].sum_rate == MB / 16.0 && m[0].sum_rate == 0);
    assert_int_equal(tly_roster_split(&r, TLY_SPLIT_OPTIMAL), 0);
    assert_true(services[3].weight > 0 && services[3].weight < services[0].weight / 4);
    services[3].sum_rate = 8 * 1000; /* the lower of the two */
    tly_roster_machines(&r, m);
    assert_true(m[3].sum_rate == 1000);
    services[3].sum_rate = 0;
    for (int i = 0; i < 4; i++)
        services[i].bandwidth = 0; /* nobody knows how fast it comes */
    tly_roster_machines(&r, m);
    assert_true(m[3].sum_rate == 0);
}

/* Slots are powers of two, so parts of 60 KB take as much as parts of 64 KB. */
static void a_tallyd_without_memory_for_a_part_of_each_rank_has_no_share(void **state)
{
    enum { KB = 1 << 10 };
    struct tly_roster_rank ranks[3] = {{.machine = 0}, {.machine = 1}, {.machine = 2}};
    struct tly_roster_service services[4] = {
        {.card = 0, .memory = 1}, {.card = 1}, {.card = 2}, {.role = TLY_ROLE_TALLYD, .card = 3}};
    struct tly_roster r = {.rank_count = 3,
                           .machine_count = 3,
                           .service_count = 4,
                           .part_bytes = 4 * KB,
                           .part_most = 60 * KB,
                           .ranks = ranks,
                           .services = services};
    for (int i = 0; i < 3; i++) {
        bool lacks = i == 0;
        services[3].memory = i == 2 ? 0 : 256 * KB - lacks; /* 0: as much as it needs */
        assert_true(tly_roster_lacks_memory(&r, 3) == lacks);
        assert_int_equal(tly_roster_split(&r, TLY_SPLIT_OPTIMAL), 0);
        assert_true((services[3].weight == 0) == lacks && services[0].weight > 0);
    }
}

static void a_window_is_a_share_of_many_parts_as_far_as_memory_lasts(void **state)
{
    enum { KB = 1 << 10, MB = 1 << 20 };
    assert_int_equal(tly_roster_window(4, 32 * KB, UINT64_MAX, 4), 512 / 4 * 32 * KB);
    assert_int_equal(tly_roster_window(4, 512 * KB, UINT64_MAX, 4), 32 * MB);
    assert_int_equal(tly_roster_window(64, 512 * KB, UINT64_MAX, 4),
                     2 * 2 * 64 * 512 * KB); /* twice the credit */
    assert_int_equal(tly_roster_window(4, 32 * KB, 10 * MB, 4), MB);
    assert_int_equal(tly_roster_window(4, 32 * KB, 0, 4), 0);
    assert_int_equal(tly_roster_window(0, 32 * KB, UINT64_MAX, 4), 512 * 32 * KB);
}

/* Two machines, one with two ranks, and a tallyd that shares the card of the second. */
static void weights_come_from_ranks_cards_and_bandwidths(void **state)
{
    struct tly_roster r;
    struct tly_plan_machine m[3];
    uint32_t due[3];
    fill(&r);
    r.services[0].bandwidth = 8000;
    r.services[2].sum_rate = 16000;
    tly_roster_machines(&r, m);
    assert_true(m[0].ranks == 2 && m[1].ranks == 1 && m[2].ranks == 0);
    assert_true(m[0].card == 0 && m[1].card == 1 && m[2].card == 1);
    assert_true(m[0].bandwidth == 1000 && m[2].sum_rate == 2000 && m[0].sum_rate == 0);
    for (int split = TLY_SPLIT_OPTIMAL; split <= TLY_SPLIT_SERVER; split++) {
        assert_int_equal(tly_plan_split(split, 3, m, due), 0);
        assert_int_equal(tly_roster_split(&r, split), 0);
        uint32_t active = 0;
        for (int i = 0; i < 3; i++) {
            assert_int_equal(r.services[i].weight, due[i]);
            active += due[i] > 0;
        }
        assert_int_equal(tly_roster_active(&r), active);
    }
    r.teams = 1; /* a machine's ranks push once */
    tly_roster_machines(&r, m);
    assert_true(m[0].ranks == 1 && m[1].ranks == 1 && m[2].ranks == 0);
    r.service_count = 2;
    assert_int_equal(tly_roster_split(&r, TLY_SPLIT_SERVER), -ENOENT);
    tly_roster_finish(&r);
}

static void members(void **state)
{
    struct tly_member_info m = {.role = TLY_ROLE_RANK,
                                .rank = 1,
                                .size = 2,
                                .at = {1, {{"tcp:10.0.0.1:5"}}},
                                .nonce = 7,
                                .bandwidth = TLY_MAX_RATE},
                           back;
    struct tly_writer w = {0};
    snprintf(m.host, sizeof m.host, "h");
    tly_member_write(&w, &m);
    struct tly_reader rd = {w.data, w.len, false};
    assert_int_equal(tly_member_read(&rd, &back), 0);
    assert_memory_equal(&m, &back, sizeof m);
    for (size_t n = 0; n < w.len; n++) {
        struct tly_reader cut = {w.data, n, false};
        assert_int_equal(tly_member_read(&cut, &back), -EPROTO);
    }
    free(w.data);
    w = (struct tly_writer){0};
    m.bandwidth = TLY_MAX_RATE + 1;
    tly_member_write(&w, &m);
    rd = (struct tly_reader){w.data, w.len, false};
    assert_int_equal(tly_member_read(&rd, &back), -EPROTO);
    free(w.data);
    w = (struct tly_writer){0};
    m.bandwidth = 0;
    m.rank = 2; /* of 2 */
    tly_member_write(&w, &m);
    rd = (struct tly_reader){w.data, w.len, false};
    assert_int_equal(tly_member_read(&rd, &back), -EPROTO);
    free(w.data);
}

static void joins_keep_their_order(void **state)
{
    struct tly_roster_rank a_ranks[3] = {{0}}, b_ranks[3] = {{0}};
    struct tly_roster a = {.rank_count = 3, .ranks = a_ranks}, b = {.rank_count = 3, .ranks = b_ranks};
    assert_true(tly_roster_join(&a, 2));
    assert_true(tly_roster_join(&a, 0));
    assert_false(tly_roster_join(&a, 2));
    assert_int_equal(a_ranks[2].joined, 1);
    assert_int_equal(a_ranks[0].joined, 2);
    /* Another coordinator hears of it from several members, in any order. */
    tly_roster_merge_joins(&b, &a);
    assert_int_equal(b_ranks[0].joined, 2);
    assert_true(tly_roster_join(&b, 1));
    assert_int_equal(b_ranks[1].joined, 3);
    tly_roster_joined_all(&b, 1, 1);
    assert_int_equal(b_ranks[0].joined + b_ranks[1].joined + b_ranks[2].joined, 0);
    tly_roster_merge_joins(&b, &a); /* which is past */
    assert_int_equal(b_ranks[2].joined, 0);
    tly_roster_merge_joins(&a, &b);
    assert_int_equal(a.joins, 1);
    assert_int_equal(a.last_joined, 1);
    assert_int_equal(a_ranks[2].joined, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(machines_are_numbered_by_their_lowest_rank),
        cmocka_unit_test(trees),
        cmocka_unit_test(round_trip_and_every_truncation),
        cmocka_unit_test(nonsense_is_refused),
        cmocka_unit_test(little_memory_sums_little),
        cmocka_unit_test(a_tallyd_without_memory_for_a_part_of_each_rank_has_no_share),
        cmocka_unit_test(a_window_is_a_share_of_many_parts_as_far_as_memory_lasts),
        cmocka_unit_test(weights_come_from_ranks_cards_and_bandwidths),
        cmocka_unit_test(members),
        cmocka_unit_test(joins_keep_their_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
