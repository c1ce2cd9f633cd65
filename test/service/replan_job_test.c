/* replan_job_test.c - the split follows the network while members come and go, and coordinators take the job over. */
#include "members.h"

#include <sodium.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "join/start.h"

/* A tallyd comes on a host of its own; so many changes there were before. */
static struct member *let_come(uint32_t number, int changes)
{
    struct member *guest = join(number);
    turn_until(&guest->invited, 1);
    post(guest, TLY_BEGUN, 0, NULL);
    for (uint32_t i = 0; i < RANKS; i++) {
        turn_until(&x.member[i].invited, number - FIRST + 1);
        answer(&x.member[i], x.member[i].roster.epoch, 0, 0, true);
    }
    let_it_change(changes + 1);
    return guest;
}

/* A tallyd has died, and one that nobody can reach comes: the place stays as it was, and the split follows the network. */
static void test_a_guest_that_is_turned_away_leaves_its_place(void **state)
{
    struct member *a = &x.member[0];
    uint64_t bandwidth = x.bandwidth;
    let_come(GUEST, 0);
    leave(&x.member[FIRST]);
    let_it_change(2);
    struct tly_roster_service before = a->roster.services[FIRST];
    x.apart = true;
    x.bandwidth = 0; /* it listens at a loopback address */
    turn_until(&join(ANOTHER)->failed, 1);
    x.bandwidth = bandwidth;
    report_until(&a->prepared, 3, SLOW);
    let_it_change(3);
    const struct tly_roster_service *after = &a->roster.services[FIRST];
    assert_int_equal(after->incarnation, before.incarnation);
    assert_memory_equal(&after->at, &before.at, sizeof before.at);
    assert_non_null(strstr(ask()->changed.what, "tallyd 1 (host) carries 0.16 of 0.8 Gbit/s since "));
}

/* Where a service is that is gone matters to nobody. */
static void test_a_gone_service_may_be_anywhere(void **state)
{
    struct tly_roster_service s[FIRST + 1] = {{.rank = 0}, {.rank = 1}, {.role = TLY_ROLE_TALLYD}};
    struct tly_roster r = {.machine_count = RANKS, .service_count = FIRST + 1, .services = s};
    for (uint32_t i = 0; i <= FIRST; i++)
        tly_endpoints_add(&s[i].at, "tcp", i < FIRST ? "10.0.0.1:1" : "127.0.0.1:1");
    assert_false(tly_start_crosses_cards(&r));
    s[FIRST].state = TLY_SERVICE_GONE;
    assert_true(tly_start_crosses_cards(&r));
}

/* --- who comes and goes ------------------------------------------------------------------------------- */

/* The last change of the split, as `tally status` and all members have it. */
static void expect_change(const char *text, uint64_t since)
{
    const struct tly_change *told = &ask()->changed;
    assert_string_equal(told->what, text);
    assert_true(told->at >= since && told->at <= (uint64_t)time(NULL) && strlen(told->when) == 8);
    for (uint32_t i = 0; i < RANKS; i++) {
        const struct member *m = &x.member[i];
        for (int turn = 0; turn < 1000 && strcmp(m->change.what, text) != 0; turn++)
            tly_loop_turn(&x.loop, 2);
        assert_string_equal(m->change.what, text);
        assert_true(m->change.at == told->at);
    }
}

static void test_who_comes_and_goes_is_told(void **state)
{
    uint64_t began = (uint64_t)time(NULL);
    assert_true(ask()->changed.at == 0);
    let_come(GUEST, 0);
    expect_change("tallyd 1 (host) has joined: its share is 50%", began);
    post(&x.member[FIRST], TLY_GOODBYE, 0, NULL);
    let_it_change(2);
    expect_change("tallyd 0 (host) has left: its share was 50%", began);
    leave(&x.member[GUEST]);
    let_it_change(3);
    expect_change("tallyd 1 (host) is out: its share was 50%", began);
}

/* --- the next coordinator ------------------------------------------------------------------------------ */

/* The last line about a tallyd's share. */
static struct {
    char line[400];
    atomic_int level; /* -1: none yet */
} said;

static void listen_for_share(void *user, enum tally_log_level level, const char *line)
{
    if (!strstr(line, "its share is now"))
        return;
    snprintf(said.line, sizeof said.line, "%s", line);
    atomic_store(&said.level, (int)level);
}

static void await_line(void)
{
    for (int i = 0; i < 1000 && said.level < 0; i++)
        tly_loop_turn(&x.loop, 2);
    tally_log_redirect(NULL, NULL);
}

static void take_over(bool rests, uint32_t other)
{
    x.bandwidth = 800000000;
    x.guest_rests = rests;
    x.other = other;
    for (uint32_t i = 0; i < (rests ? GUEST : FIRST) + 1; i++)
        say_all(resume(i, 4, TLY_SERVICE_ACTIVE));
    change_all(1);
}

/* What a tallyd that has rested is tried with is a guess: the line says so, and warns of nothing. */
static void test_a_tallyd_that_wakes_is_tried(void **state)
{
    struct member *a = &x.member[0];
    x.found = 10000000;
    take_over(true, GUEST);
    assert_true(a->roster.services[GUEST].rests);
    said.level = -1;
    tally_log_redirect(listen_for_share, NULL);
    report_until(&a->prepared, 2, FINE);
    change_all(2);
    await_line();
    assert_non_null(strstr(said.line, "tallyd 1 (host) has rested and is tried with 0.2 Gbit/s since "));
    assert_int_equal(said.level, TALLY_LOG_INFO);
    assert_true(!a->roster.services[GUEST].rests && a->roster.services[GUEST].tried);
}

/* The next coordinator's split is to stay: it begins with what was said, and nobody rests for good. */
static void test_a_split_that_is_to_stay_has_nobody_rest(void **state)
{
    const struct tly_roster_service *s;
    x.found = 10000000;
    take_over(true, GUEST);
    s = &x.member[0].roster.services[GUEST];
    assert_true(s->bandwidth == 800000000 && !s->sum_found && !s->rests && s->weight);
}

static int set_up_fixed(void **state)
{
    return set_up_with("TALLY_REPLAN=0", NULL);
}

/* The last coordinator died while it tried a card with less than is said: the next one does not know that it carries no more.
 * A tallyd that comes there again begins with what it says. */
static void begin_again(uint64_t bandwidth)
{
    take_over(false, FIRST);
    leave(&x.member[FIRST]);
    change_all(2);
    x.host[GUEST] = x.host[FIRST];
    struct member *guest = join(GUEST);
    turn_until(&guest->invited, 1);
    assert_true(guest->roster.services[FIRST].bandwidth == bandwidth);
}

static void test_what_was_tried_is_not_known(void **state)
{
    x.tried = 600000000;
    begin_again(800000000);
}

static void test_what_was_found_is_known(void **state)
{
    x.found = 600000000;
    begin_again(600000000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_guest_that_is_turned_away_leaves_its_place, start_apart,
                                        tear_down),
        cmocka_unit_test(test_a_gone_service_may_be_anywhere),
        cmocka_unit_test_setup_teardown(test_who_comes_and_goes_is_told, start_apart, tear_down),
        cmocka_unit_test_setup_teardown(test_a_tallyd_that_wakes_is_tried, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_a_split_that_is_to_stay_has_nobody_rest, set_up_fixed,
                                        tear_down),
        cmocka_unit_test_setup_teardown(test_what_was_tried_is_not_known, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_what_was_found_is_known, set_up, tear_down),
    };
    if (sodium_init() < 0)
        return 1;
    return cmocka_run_group_tests_name("replan_job", tests, NULL, NULL);
}
