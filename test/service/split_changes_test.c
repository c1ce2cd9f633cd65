/* split_changes_test.c - a coordinator changes the split by what members of the test's own (members.h) report
 * of their traffic, and tells them. */
#include "members.h"

#include <sodium.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "job.h"

static uint32_t weight_of(const struct member *teller, uint32_t member)
{
    return teller->roster.services[member].weight * 1000ull /
           (teller->roster.services[0].weight + teller->roster.services[1].weight +
            teller->roster.services[FIRST].weight);
}

static int start_fixed_to_tallyd(void **state)
{
    return start_apart_with("TALLY_SPLIT=server");
}

/* Nobody comes or goes, and yet there is another epoch: in it the tallyd has the share that suits its card. */
static void test_a_slow_card_changes_the_split(void **state)
{
    struct member *a = &x.member[0], *b = &x.member[1];
    assert_int_equal(weight_of(a, FIRST), 500);
    for (int i = 0; i < 50; i++)
        report(a, a->roster.epoch + 7, SLOW); /* of an epoch that there is not */
    report_until(&a->prepared, 1, SLOW);
    turn_until(&b->prepared, 1);
    uint32_t change = a->roster.epoch;
    answer(a, change, 0, 0, true);
    answer(b, change, 0, 0, true);
    turn_until(&a->committed, 2);
    turn_until(&b->committed, 2);
    turn_until(&x.member[FIRST].committed, 2);
    assert_in_range(weight_of(a, FIRST), 50, 150);
    assert_in_range(a->roster.services[FIRST].bandwidth, 140000000, 180000000);
    assert_true(a->roster.services[FIRST].said == 800000000 && !a->roster.services[FIRST].measured);
    assert_true(a->roster.services[0].bandwidth == 800000000);
    assert_int_equal(a->failed + b->failed, 0);
}

/* As loud as the last line about a change of the split. */
static void listen_to_log(void *user, enum tally_log_level level, const char *line)
{
    if (strstr(line, "its share is now"))
        atomic_store((atomic_int *)user, (int)level);
}

static int loudness(void)
{
    atomic_int level = -1;
    tally_log_redirect(listen_to_log, &level);
    report_until(&x.member[0].prepared, 1, SLOW);
    let_it_change(1);
    for (int i = 0; i < 1000 && level < 0; i++)
        tly_loop_turn(&x.loop, 2);
    tally_log_redirect(NULL, NULL);
    return level;
}

static void test_a_declared_card_is_corrected_with_a_warning(void **state)
{
    assert_int_equal(loudness(), TALLY_LOG_WARNING);
}

static void test_a_measured_card_is_corrected_without_one(void **state)
{
    assert_int_equal(loudness(), TALLY_LOG_INFO);
}

/* A slow tallyd dies, and another comes on its host: it begins with what was last seen of that card, not with what it says. */
static void test_a_slow_tallyd_comes_back(void **state)
{
    struct member *a = &x.member[0];
    x.host[GUEST] = x.host[FIRST];
    report_until(&a->prepared, 1, SLOW);
    for (uint32_t i = 0; i < RANKS; i++) {
        turn_until(&x.member[i].prepared, 1);
        answer(&x.member[i], x.member[i].roster.epoch, 0, 0, true);
    }
    turn_until(&a->committed, 2);
    leave(&x.member[FIRST]);
    for (uint32_t i = 0; i < RANKS; i++) {
        turn_until(&x.member[i].prepared, 2);
        answer(&x.member[i], x.member[i].roster.epoch, 0, 0, true);
    }
    turn_until(&a->committed, 3);
    struct member *guest = join(GUEST);
    turn_until(&guest->invited, 1);
    assert_int_equal(guest->roster.services[FIRST].incarnation, 100 + GUEST);
    assert_in_range(guest->roster.services[FIRST].bandwidth, 140000000, 180000000);
    assert_true(guest->roster.services[FIRST].said == 800000000);
}

/* A tallyd comes on the host of the first one; so many changes there were before. */
static void let_come_beside(uint32_t number, int changes)
{
    x.host[number] = x.host[FIRST];
    let_come(number, changes);
}

/* Two tallyds behind one slow card, of which the first goes. */
static void test_what_a_card_carries_outlives_its_first_service(void **state)
{
    const struct tly_roster *r = &x.member[0].roster;
    let_come_beside(GUEST, 0);
    assert_int_equal(r->services[GUEST].card, FIRST);
    report_until(&x.member[0].prepared, 2, SLOW);
    let_it_change(2);
    assert_in_range(r->services[GUEST].bandwidth, 140000000, 180000000);
    leave(&x.member[FIRST]);
    let_it_change(3);
    assert_int_equal(r->services[GUEST].card, GUEST);
    assert_in_range(r->services[GUEST].bandwidth, 140000000, 180000000);
}

/* What holds the job up is judged anew in each epoch; its card is slow since it has become so. */
static void test_a_card_is_slow_since_it_has_become_so(void **state)
{
    const struct member *a = &x.member[0];
    report_until(&a->prepared, 1, SLOW);
    let_it_change(1);
    report_until(&a->judged, 1, SLOW);
    struct tly_slow before = a->slow;
    assert_int_equal(before.why, TLY_WHY_CARD);
    job_sleep_ms(1100); /* by a clock of seconds it is later now */
    let_come_beside(GUEST, 1);
    turn_until(&a->judged, 2); /* nobody, at first */
    report_until(&a->judged, 3, SLOW);
    assert_string_equal(a->slow.what, before.what);
}

/* The first goes, the card becomes slow, and another tallyd takes the first one's place. */
static void test_what_a_card_carries_holds_for_another_first_service(void **state)
{
    const struct tly_roster *r = &x.member[0].roster;
    let_come_beside(GUEST, 0);
    leave(&x.member[FIRST]);
    let_it_change(2);
    report_until(&x.member[0].prepared, 3, SLOW);
    let_it_change(3);
    assert_in_range(r->services[GUEST].bandwidth, 140000000, 180000000);
    let_come_beside(ANOTHER, 3);
    assert_int_equal(r->services[GUEST].card, FIRST);
    assert_in_range(r->services[GUEST].bandwidth, 140000000, 180000000);
    assert_in_range(r->services[FIRST].bandwidth, 140000000, 180000000);
    assert_true(r->services[FIRST].said == 800000000);
}

/* Somebody goes while that change is under way: it begins anew, and the one that is made has both. */
static void test_a_tallyd_leaves_while_the_split_changes(void **state)
{
    struct member *a = &x.member[0], *b = &x.member[1];
    report_until(&a->prepared, 1, SLOW);
    turn_until(&b->prepared, 1);
    answer(a, a->roster.epoch, 0, 0, true);
    uint32_t change = let_first_leave();
    answer(a, change, 0, 0, true);
    answer(b, change, 0, 0, true);
    turn_until(&a->committed, 2);
    turn_until(&b->committed, 2);
    assert_int_equal(state_of(a, FIRST), TLY_SERVICE_IDLE);
    assert_int_equal(weight_of(a, FIRST), 0);
    assert_int_equal(a->failed + b->failed, 0);
}

enum phase { PREPARED, HALF_ANSWERED, COMMITTED };

/* A change of the split has come so far. */
static void change_until(enum phase phase)
{
    struct member *a = &x.member[0], *b = &x.member[1];
    report_until(&a->prepared, 1, SLOW);
    turn_until(&b->prepared, 1);
    if (phase == PREPARED)
        return;
    answer(a, a->roster.epoch, 0, 0, true);
    if (phase == HALF_ANSWERED)
        return;
    answer(b, b->roster.epoch, 0, 0, true);
    turn_until(&a->committed, 2);
    turn_until(&b->committed, 2);
}

/* In whatever phase the tallyd dies: PREPARE comes anew, no earlier answer counts, and COMMIT is without it. */
static void tallyd_dies(enum phase phase)
{
    struct member *a = &x.member[0], *b = &x.member[1];
    change_until(phase);
    int committed = a->committed;
    uint32_t before = a->roster.epoch;
    leave(&x.member[FIRST]);
    turn_until(&a->prepared, 2);
    turn_until(&b->prepared, 2);
    assert_true(a->roster.epoch > before);
    answer(b, b->roster.epoch, 0, 0, true);
    if (phase != COMMITTED)
        answer(a, before, 0, 0, true);
    for (int i = 0; i < 20; i++)
        tly_loop_turn(&x.loop, 2);
    assert_int_equal(b->committed, committed); /* if a has answered, it was to the PREPARE before */
    answer(a, a->roster.epoch, 0, 0, true);
    turn_until(&a->committed, committed + 1);
    turn_until(&b->committed, committed + 1);
    assert_int_equal(state_of(a, FIRST), TLY_SERVICE_GONE);
    assert_int_equal(weight_of(a, FIRST), 0);
    assert_int_equal(a->failed + b->failed, 0);
}

static void test_a_tallyd_dies_when_the_split_is_prepared(void **state)
{
    tallyd_dies(PREPARED);
}

static void test_a_tallyd_dies_when_a_rank_has_answered(void **state)
{
    tallyd_dies(HALF_ANSWERED);
}

static void test_a_tallyd_dies_when_the_split_has_changed(void **state)
{
    tallyd_dies(COMMITTED);
}

static void rank_dies(enum phase phase)
{
    change_until(phase);
    leave(&x.member[1]);
    turn_until(&x.member[0].failed, 1);
    assert_non_null(strstr(x.member[0].verdict, "rank 1"));
}

static void test_a_rank_dies_when_the_split_is_prepared(void **state)
{
    rank_dies(PREPARED);
}

static void test_a_rank_dies_when_another_has_answered(void **state)
{
    rank_dies(HALF_ANSWERED);
}

static void test_a_rank_dies_when_the_split_has_changed(void **state)
{
    rank_dies(COMMITTED);
}

/* All members name the same holder, whether or not the split follows. */
static void test_a_split_that_stays(void **state)
{
    report_until(&x.member[0].judged, 1, SLOW);
    assert_int_equal(x.member[0].slow.why, TLY_WHY_CARD);
    assert_non_null(strstr(x.member[0].slow.who, "tallyd 0 ("));
    assert_non_null(strstr(x.member[0].slow.what, " of 0.8 Gbit/s since "));
    for (uint32_t i = 0; i <= FIRST; i++) { /* what its card carries is told beside what the split goes by */
        const struct member *m = &x.member[i];
        turn_until(&m->judged, 1);
        assert_true(m->roster.services[FIRST].bandwidth == 800000000);
        assert_in_range(tly_current(&m->current, &m->roster, FIRST), 140000000, 180000000);
        assert_true(tly_current(&m->current, &m->roster, 0) == 800000000);
    }
    const struct tly_status *status = ask();
    assert_true(status->roster.services[FIRST].bandwidth == 800000000);
    assert_true(status->roster.services[FIRST].said == 800000000);
    assert_in_range(tly_current(&status->current, &status->roster, FIRST), 140000000, 180000000);
    report_until(&x.member[0].judged, 2, FINE); /* and when nobody does any more */
    assert_int_equal(x.member[0].slow.why, TLY_WHY_NOBODY);
    assert_int_equal(x.member[0].prepared, 0);
}

static const char *const settings[] = {"(TALLY_REPLAN=0)", "(TALLY_SPLIT)"};

static void listen_for_setting(void *user, enum tally_log_level level, const char *line)
{
    for (int i = 0; i < 2 && strstr(line, "; the split stays as it is "); i++)
        if (strstr(line, settings[i]))
            atomic_store((atomic_int *)user, i);
}

/* Which of the settings the warning about a slow card names; -1: none. */
static int named_setting(enum seen seen)
{
    atomic_int named = -1;
    tally_log_redirect(listen_for_setting, &named);
    report_until(&x.member[0].judged, 1, seen);
    for (int i = 0; i < 1000 && named < 0; i++)
        tly_loop_turn(&x.loop, 2);
    tally_log_redirect(NULL, NULL);
    return named;
}

static void test_the_warning_names_replan(void **state)
{
    assert_int_equal(named_setting(SLOW), 0);
}

static void test_the_warning_names_split(void **state)
{
    assert_int_equal(named_setting(ALONE), 1);
}

/* Then a tallyd that comes back begins as the first one did: the split could not follow if its card is better now. */
static void test_a_tallyd_comes_back_to_a_split_that_stays(void **state)
{
    struct member *a = &x.member[0];
    x.host[GUEST] = x.host[FIRST];
    report_until(&a->judged, 1, SLOW);
    leave(&x.member[FIRST]);
    for (uint32_t i = 0; i < RANKS; i++) {
        turn_until(&x.member[i].prepared, 1);
        answer(&x.member[i], x.member[i].roster.epoch, 0, 0, true);
    }
    turn_until(&a->committed, 2);
    struct member *guest = join(GUEST);
    turn_until(&guest->invited, 1);
    assert_true(guest->roster.services[FIRST].bandwidth == 800000000);
}

static void turn_on(void)
{
    for (int i = 0; i < 30; i++)
        tly_loop_turn(&x.loop, 2);
}

/* Impossible reports count for nothing, and end nothing.  Each kind comes again and again beside rank 0's good reports, with which
 * it would make a sample: enough of those would change the split. */
static void test_an_impossible_report(void **state)
{
    enum { NONSENSE = 8, TIMES = 20 };
    struct member *a = &x.member[0], *b = &x.member[1];
    for (int i = 0; i < NONSENSE * TIMES; i++) {
        int kind = i / TIMES;
        struct tly_traffic_line line[GUEST + 1] = {0};
        struct tly_traffic t = sight(b, SLOW, line);
        struct tly_writer w = {0};
        line[0].out.bytes = kind == 0 ? UINT64_MAX / 16 : 0;
        line[0].held_us = kind == 1 ? UINT32_MAX : 0;
        t.active_us = kind == 2 ? 0 : t.active_us;
        t.moved = kind == 3 ? UINT64_MAX : t.moved;
        t.count += kind == 4; /* of another number of services */
        t.count -= kind == 5;
        if (kind == 7) { /* of a microsecond, in which any backlog is one all the time */
            t.active_us = t.period_us = 1;
            t.moved = 0;
            line[0] = (struct tly_traffic_line){0};
            line[FIRST] = (struct tly_traffic_line){{0, 9}, {0, 9}, 0};
        }
        tly_traffic_write(&w, &t);
        w.len -= kind == 6;
        post(b, TLY_PACE, 0, &w);
        report(a, a->roster.epoch, SLOW);
        turn_on();
        if (b->closed + a->failed + a->prepared)
            fail_msg("by nonsense of kind %d", kind);
    }
    report_until(&a->prepared, 1, SLOW); /* and it is heard again once it makes sense */
}

static void say_quiet(struct member *m, uint32_t epochs)
{
    struct tly_writer w = {0};
    tly_write32(&w, epochs);
    post(m, TLY_PACE, TLY_QUIET, &w);
}

/* In each sample rank 0 reports, and rank 1 reports or says that it is quiet: until the split changes, or for 20 samples. */
static void sample(uint32_t epochs, bool quiet, uint32_t epochs_of_other)
{
    struct member *a = &x.member[0], *b = &x.member[1];
    for (int i = 0; i < 20 && !a->prepared; i++) {
        report_in(a, a->roster.epoch, epochs, SLOW);
        turn_on();
        if (quiet)
            say_quiet(b, epochs_of_other);
        else
            report_in(b, a->roster.epoch, epochs_of_other, SLOW);
        turn_on();
    }
}

static void count_crowds(void *user, enum tally_log_level level, const char *line)
{
    const char *about = "rank 1 has operations under way that began before the last 4 changes of the split";
    atomic_fetch_add((atomic_int *)user, strstr(line, about) != NULL);
}

/* While a rank needs four older epochs the split stays, whatever is seen.  If that lasts it is said, once. */
static void test_no_change_while_four_older_epochs_live(void **state)
{
    const struct member *a = &x.member[0];
    atomic_int lines = 0;
    tally_log_redirect(count_crowds, &lines);
    sample(5, false, 1);
    for (int i = 0; i < 4; i++)
        sample(1, true, 5); /* also one without traffic */
    tally_log_redirect(NULL, NULL);
    assert_int_equal(lines, 1);
    assert_int_equal(a->prepared, 0);
    sample(4, true, 4);
    assert_int_equal(a->prepared, 1);
}

/* A rank counts as quiet only if it says how many epochs it needs. */
static void test_an_impossible_word_of_quiet(void **state)
{
    const struct member *a = &x.member[0];
    struct member *b = &x.member[1];
    for (int i = 0; i < 20; i++) {
        struct tly_writer w = {0};
        report(&x.member[0], a->roster.epoch, SLOW);
        turn_on();
        tly_write64(&w, 1);
        post(b, TLY_PACE, TLY_QUIET, &w);
        post(b, TLY_PACE, TLY_QUIET, NULL);
        say_quiet(b, 0);
        turn_on();
    }
    assert_int_equal(b->closed + a->failed + a->prepared, 0);
    sample(1, true, 1);
    assert_int_equal(a->prepared, 1);
}

/* All ranks answer the second PREPARE; the first one was never answered. */
static void answer_all(void)
{
    for (uint32_t i = 0; i < RANKS; i++) {
        turn_until(&x.member[i].prepared, 2);
        answer(&x.member[i], x.member[i].roster.epoch, 0, 0, true);
    }
}

/* A tallyd dies while another one joins, and somebody held the job up: members hear once what has changed, and all of it. */
static void test_one_change_is_told_once(void **state)
{
    struct member *a = &x.member[0];
    report_until(&a->judged, 1, SLOW);
    struct member *guest = join(GUEST);
    turn_until(&guest->invited, 1);
    post(guest, TLY_BEGUN, 0, NULL);
    for (uint32_t i = 0; i < RANKS; i++) {
        turn_until(&x.member[i].invited, 2);
        answer(&x.member[i], x.member[i].roster.epoch, 0, 0, true);
    }
    turn_until(&a->prepared, 1);
    leave(&x.member[FIRST]);
    turn_until(&a->prepared, 2);
    int told = a->told;
    answer_all();
    turn_until(&a->told, told + 1);
    turn_on();
    turn_on();
    assert_int_equal(a->told, told + 1);
    assert_non_null(strstr(a->change.what, "tallyd 0 (host) is out: its share was "));
    assert_non_null(strstr(a->change.what, "; tallyd 1 (host) has joined: its share is "));
}

/* A tallyd says goodbye, and its connection ends before COMMIT: it has left all the same. */
static void test_who_says_goodbye_has_left(void **state)
{
    struct member *a = &x.member[0];
    post(&x.member[FIRST], TLY_GOODBYE, 0, NULL);
    turn_until(&a->prepared, 1);
    leave(&x.member[FIRST]);
    turn_until(&a->prepared, 2);
    answer_all();
    turn_until(&a->told, 1);
    assert_string_equal(a->change.what, "tallyd 0 (host) has left: its share was 50%");
}

/* The tallyd dies before the job runs: no split has changed. */
static void test_a_start_is_no_change(void **state)
{
    struct member *a = &x.member[0];
    x.bandwidth = 800000000;
    for (uint32_t i = 0; i < FIRST + 1; i++)
        join(i);
    for (uint32_t i = 0; i < RANKS; i++)
        turn_until(&x.member[i].invited, 1);
    turn_until(&x.member[FIRST].invited, 1);
    leave(&x.member[FIRST]);
    for (uint32_t i = 0; i < RANKS; i++)
        post(&x.member[i], TLY_BEGUN, 0, NULL);
    turn_until(&a->committed, 1);
    turn_on();
    assert_true(ask()->changed.at == 0);
    assert_int_equal(a->told, 0);
}

/* A rank that has joined has nothing to report, and the split follows what the others see. */
static void test_a_rank_that_has_joined_reports_no_more(void **state)
{
    struct tly_writer w = {0};
    tly_write32(&w, 0);
    tly_write32(&w, 1);
    post(&x.member[1], TLY_JOINED, 0, &w);
    some_report_until(1, &x.member[0].prepared, 1, SLOW);
    assert_int_equal(x.member[0].failed + x.member[1].failed, 0);
}

/* A rank that takes part in nothing says so, and the split follows what the others see.  Samples wait for one that has said so
 * before they began: its operations may have begun since. */
static void test_a_rank_without_traffic_holds_no_sample_up(void **state)
{
    struct member *a = &x.member[0], *b = &x.member[1];
    say_quiet(b, 1);
    turn_on();
    for (int i = 0; i < 20; i++) {
        report(a, a->roster.epoch, SLOW);
        turn_on();
    }
    assert_int_equal(a->prepared, 0);
    for (int i = 0; i < 200 && !a->prepared; i++) {
        report(a, a->roster.epoch, SLOW);
        turn_on();
        say_quiet(b, 1);
    }
    assert_int_equal(a->prepared, 1);
    assert_int_equal(a->failed + b->failed, 0);
}

/* Nobody stands out, and all cards carry half: the split stays, and all hear what it is. */
static void test_all_cards_carry_half(void **state)
{
    report_until(&x.member[0].judged, 1, HALF);
    assert_int_equal(x.member[0].slow.why, TLY_WHY_ALL_CARDS);
    assert_int_equal(x.member[0].prepared, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_slow_card_changes_the_split, start_apart, tear_down),
        cmocka_unit_test_setup_teardown(test_a_declared_card_is_corrected_with_a_warning, start_apart,
                                        tear_down),
        cmocka_unit_test_setup_teardown(test_a_measured_card_is_corrected_without_one, start_measured,
                                        tear_down),
        cmocka_unit_test_setup_teardown(test_a_tallyd_leaves_while_the_split_changes, start_apart, tear_down),
        cmocka_unit_test_setup_teardown(test_a_tallyd_dies_when_the_split_is_prepared, start_apart,
                                        tear_down),
        cmocka_unit_test_setup_teardown(test_a_tallyd_dies_when_a_rank_has_answered, start_apart, tear_down),
        cmocka_unit_test_setup_teardown(test_a_tallyd_dies_when_the_split_has_changed, start_apart,
                                        tear_down),
        cmocka_unit_test_setup_teardown(test_a_rank_dies_when_the_split_is_prepared, start_apart, tear_down),
        cmocka_unit_test_setup_teardown(test_a_rank_dies_when_another_has_answered, start_apart, tear_down),
        cmocka_unit_test_setup_teardown(test_a_rank_dies_when_the_split_has_changed, start_apart, tear_down),
        cmocka_unit_test_setup_teardown(test_a_slow_tallyd_comes_back, start_apart, tear_down),
        cmocka_unit_test_setup_teardown(test_what_a_card_carries_outlives_its_first_service, start_apart,
                                        tear_down),
        cmocka_unit_test_setup_teardown(test_what_a_card_carries_holds_for_another_first_service, start_apart,
                                        tear_down),
        cmocka_unit_test_setup_teardown(test_a_card_is_slow_since_it_has_become_so, start_apart, tear_down),
        cmocka_unit_test_setup_teardown(test_a_split_that_stays, start_fixed, tear_down),
        cmocka_unit_test_setup_teardown(test_the_warning_names_replan, start_fixed, tear_down),
        cmocka_unit_test_setup_teardown(test_the_warning_names_split, start_fixed_to_tallyd, tear_down),
        cmocka_unit_test_setup_teardown(test_a_tallyd_comes_back_to_a_split_that_stays, start_fixed,
                                        tear_down),
        cmocka_unit_test_setup_teardown(test_all_cards_carry_half, start_apart, tear_down),
        cmocka_unit_test_setup_teardown(test_an_impossible_report, start_apart, tear_down),
        cmocka_unit_test_setup_teardown(test_no_change_while_four_older_epochs_live, start_apart, tear_down),
        cmocka_unit_test_setup_teardown(test_one_change_is_told_once, start_fixed, tear_down),
        cmocka_unit_test_setup_teardown(test_who_says_goodbye_has_left, start_apart, tear_down),
        cmocka_unit_test_setup_teardown(test_a_start_is_no_change, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_an_impossible_word_of_quiet, start_apart, tear_down),
        cmocka_unit_test_setup_teardown(test_a_rank_that_has_joined_reports_no_more, start_apart, tear_down),
        cmocka_unit_test_setup_teardown(test_a_rank_without_traffic_holds_no_sample_up, start_apart,
                                        tear_down),
    };
    if (sodium_init() < 0)
        return 1;
    return cmocka_run_group_tests_name("split_changes", tests, NULL, NULL);
}
