/* status_test.c - a coordinator's answer comes back as it was written, and nonsense is refused. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/error.h"
#include "membership/status.h"

static struct tly_status_member members[] = {
    {.role = TLY_ROLE_RANK,
     .rank = 1,
     .pid = 77,
     .stand = TLY_STAND_PROVED,
     .at = {1, {{"tcp:10.0.0.1:4000"}}},
     .host = "one"},
    {.role = TLY_ROLE_TALLYD,
     .rank = TLY_NO_RANK,
     .pid = 78,
     .stand = TLY_STAND_JOINED,
     .at = {1, {{"tcp:[::]:4001"}}},
     .host = "two"},
};
static struct tly_roster_rank ranks[] = {{.local_rank = 0}, {.local_rank = 1}};
static struct tly_roster_service services[] = {
    {.role = TLY_ROLE_RANK,
     .rank = 0,
     .incarnation = 5,
     .weight = 1,
     .at = {1, {{"tcp:10.0.0.1:4002"}}},
     .host = "one"},
    {.role = TLY_ROLE_TALLYD, .incarnation = 6, .card = 1, .at = {1, {{"tcp:10.0.0.2:4001"}}}, .host = "two"},
};

static uint64_t current[] = {400000000, 80000000};

static struct tly_status example(void)
{
    struct tly_status s = {.state = TLY_JOB_INVITING,
                           .size = 2,
                           .servers = 3,
                           .age_ms = 1ull << 40,
                           .member_count = 2,
                           .members = members,
                           .slow = {TLY_WHY_CARD, "tallyd 0 (two)", "carries 0.1 Gbit/s"},
                           .changed = {1700000000, "12:03:11", "its share is now 6%"}};
    s.has_roster = true;
    s.roster = (struct tly_roster){
        .epoch = 1,
        .rank_count = 2,
        .machine_count = 1,
        .service_count = 2,
        .part_bytes = 4096,
        .part_least = 4096,
        .part_most = 4096,
        .window_bytes = 8192,
        .ranks = ranks,
        .services = services};
    s.current = (struct tly_currents){.epoch = 1, .count = 2, .bandwidth = current};
    return s;
}

static void there_and_back(void **state)
{
    struct tly_status s = example(), t;
    struct tly_writer w = {0};
    tly_status_write(&w, &s);
    assert_false(w.failed);
    for (size_t n = 0; n < w.len; n++) { /* cut anywhere it is refused */
        struct tly_reader r = {w.data, n, false};
        assert_int_equal(tly_status_read(&r, &t), -EPROTO);
    }
    struct tly_reader r = {w.data, w.len, false};
    assert_int_equal(tly_status_read(&r, &t), 0);
    assert_int_equal(t.state, TLY_JOB_INVITING);
    assert_int_equal(t.servers, 3);
    assert_true(t.age_ms == 1ull << 40);
    assert_int_equal(t.member_count, 2);
    assert_int_equal(t.members[0].rank, 1);
    assert_int_equal(t.members[0].stand, TLY_STAND_PROVED);
    assert_string_equal(t.members[1].at.at[0].text, "tcp:[::]:4001");
    assert_string_equal(t.members[1].host, "two");
    char slow[TLY_SENTENCE];
    tly_slow_text(&t.slow, slow, sizeof slow);
    assert_string_equal(slow, "tallyd 0 (two), which carries 0.1 Gbit/s");
    assert_string_equal(tly_slow_why(&t.slow), "card");
    const struct tly_slow turns = {TLY_WHY_TURNS, "nobody alone", "by turns rank 0 (one) and rank 1 (two)"};
    char both[TLY_SENTENCE];
    tly_slow_text(&turns, both, sizeof both);
    assert_string_equal(both, "nobody alone: by turns rank 0 (one) and rank 1 (two)");
    for (uint32_t why = TLY_WHY_NOBODY + 1; why < TLY_WHYS; why++)
        assert_true(tly_slow_why(&(struct tly_slow){.why = why})[0]);
    assert_string_equal(t.changed.what, "its share is now 6%");
    assert_string_equal(t.changed.when, "12:03:11");
    assert_true(t.changed.at == 1700000000);
    assert_true(t.has_roster);
    assert_int_equal(t.roster.ranks[1].local_rank, 1);
    assert_string_equal(t.roster.services[1].at.at[0].text, "tcp:10.0.0.2:4001");
    assert_true(tly_current(&t.current, &t.roster, 0) == 400000000);
    assert_true(tly_current(&t.current, &t.roster, 1) == 80000000);
    t.roster.services[1].bandwidth = 7;
    t.roster.epoch++; /* they are of another roster */
    assert_true(tly_current(&t.current, &t.roster, 1) == 7);
    tly_status_finish(&t);
    tly_status_finish(NULL);
    free(w.data);
}

static void refused(const struct tly_status *s)
{
    struct tly_status t;
    struct tly_writer w = {0};
    tly_status_write(&w, s);
    struct tly_reader r = {w.data, w.len, false};
    assert_int_equal(tly_status_read(&r, &t), -EPROTO);
    free(w.data);
}

static void nonsense_is_refused(void **state)
{
    struct tly_status s = example();
    s.state = TLY_JOB_ENDED + 1;
    refused(&s);
    s = example();
    s.size = 1; /* member 0 is rank 1 */
    refused(&s);
    s = example();
    s.size = 3; /* the roster has two */
    refused(&s);
    s = example();
    s.size = TLY_MAX_RANKS + 1;
    refused(&s);
    s = example();
    s.slow.why = TLY_WHYS;
    refused(&s);
    s = example();
    uint64_t too_fast[] = {1, TLY_MAX_RATE + 1};
    s.current.bandwidth = too_fast;
    refused(&s);
    uint8_t many[28] = {0}; /* four thousand million members in no bytes */
    memset(many + 20, 0xff, 4);
    struct tly_reader r = {many, sizeof many, false};
    assert_int_equal(tly_status_read(&r, &s), -EPROTO);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(there_and_back),
                                       cmocka_unit_test(nonsense_is_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
