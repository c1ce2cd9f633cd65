/* replan_job_test.c - the split follows the network while members come and go, and coordinators take the job over. */
#include "members.h"

#include <sodium.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "membership/start.h"

/* The last line of the log with this in it. */
static struct {
    const char *with;
    char line[400];
    atomic_int level; /* -1: none yet */
} said;

static void hear(void *user, enum tally_log_level level, const char *line)
{
    if (!strstr(line, said.with))
        return;
    snprintf(said.line, sizeof said.line, "%s", line);
    atomic_store(&said.level, (int)level);
}

static void listen_for(const char *with)
{
    said.with = with;
    said.line[0] = '\0';
    said.level = -1;
    tally_log_redirect(hear, NULL);
}

static void await_line(void)
{
    for (int i = 0; i < 1000 && said.level < 0; i++)
        tly_loop_turn(&x.loop, 2);
    tally_log_redirect(NULL, NULL);
    assert_true(said.level >= 0);
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
    for (uint32_t i = 0; i < x.ranks; i++) {
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

/* --- slow sums ----------------------------------------------------------------------------------------- */

/* "HH:MM:SS" between these two; what comes behind `after` may be anything. */
static void expect_since(const char *text, const char *before, const char *after)
{
    int h, m, s, used = 0;
    size_t len = strlen(before);
    assert_true(strncmp(text, before, len) == 0);
    assert_int_equal(sscanf(text + len, "%2d:%2d:%2d%n", &h, &m, &s, &used), 3);
    assert_int_equal(used, 8);
    assert_true(strncmp(text + len + used, after, strlen(after)) == 0);
}

static double share(const struct tly_roster *r, uint32_t service)
{
    double total = 0;
    for (uint32_t i = 0; i < r->service_count; i++)
        total += r->services[i].weight;
    return r->services[service].weight / total;
}

/* The only tallyd's entry, the same in all ranks' rosters. */
static const struct tly_roster_service *tallyd(void)
{
    const struct tly_roster_service *first = &x.member[0].roster.services[x.ranks];
    for (uint32_t i = 1; i < x.ranks; i++)
        assert_true(x.member[i].roster.services[x.ranks].sum_found == first->sum_found);
    return first;
}

/* Ranks see that pushes lie at a tallyd: its sums limit it, the split follows that, and all are told. */
static void slow_down(void)
{
    char told[64];
    const struct tly_roster *r = &x.member[0].roster;
    double before = share(r, x.ranks);
    assert_true(tallyd()->sum_found == 0);
    report_until(&x.member[0].prepared, 1, HELD);
    let_it_change(1);
    assert_in_range(tallyd()->sum_found, 199999000, 200000000);
    assert_true(tallyd()->bandwidth == 800000000 && !tallyd()->rests);
    assert_true(share(r, x.ranks) < before / 2);
    snprintf(told, sizeof told, ": its share is now %.0f%% (was %.0f%%), 1 GB takes ",
             100 * share(r, x.ranks), 100 * before);
    const char *what = ask()->changed.what;
    expect_since(what, "tallyd 0 (host) adds 0.2 Gbit/s of inputs since ", told);
    expect_change(what, 0);
}

static void expect_slow_sums(const struct tly_slow *slow)
{
    assert_int_equal(slow->why, TLY_WHY_SUMS);
    assert_string_equal(slow->who, "tallyd 0 (host)");
    expect_since(slow->what, "adds 0.2 Gbit/s of inputs since ", "");
    assert_int_equal(strlen(slow->what), strlen("adds 0.2 Gbit/s of inputs since 12:03:11"));
}

/* Once its sums wait for the cards, no longer for its processors, it holds nobody up. */
static void test_a_tallyd_with_slow_sums_is_named(void **state)
{
    const struct member *a = &x.member[0];
    slow_down();
    report_until(&a->judged, 1, HELD); /* it still limits the job */
    expect_slow_sums(&a->slow);
    turn_until(&x.member[1].judged, 1);
    expect_slow_sums(&x.member[1].slow);
    expect_slow_sums(&ask()->slow);
    report_until(&a->judged, 2, FINE);
    assert_int_equal(a->slow.why, TLY_WHY_NOBODY);
}

/* A limit of its sums was found before.  Now its card is slow: that is what the change is for. */
static void test_a_slow_card_is_named_after_slow_sums(void **state)
{
    slow_down();
    report_until(&x.member[0].prepared, 2, SLOW);
    let_it_change(2);
    assert_true(tallyd()->sum_found && tallyd()->bandwidth < 200000000);
    expect_since(ask()->changed.what, "tallyd 0 (host) carries 0.16 of 0.8 Gbit/s since ",
                 ": its share is now ");
}

static int set_up_apart(void **state)
{
    int err = set_up(state);
    x.bandwidth = 800000000;
    return err;
}

/* Three ranks, for two are as fast without a tallyd. */
static void test_faster_sums_get_their_share_back(void **state)
{
    const struct member *a = &x.member[0];
    x.ranks = RANKS + 1;
    run(RANKS + 2);
    double before = share(&a->roster, x.ranks);
    slow_down();
    report_until(&a->prepared, 2, FINE);
    let_it_change(2);
    assert_true(share(&a->roster, x.ranks) > .99 * before && tallyd()->sum_found > 500000000);
    assert_non_null(strstr(ask()->changed.what, "tallyd 0 (host) adds "));
}

/* One that adds next to nothing has no share.  After a rest nothing is known of its sums. */
static void test_a_tallyd_that_hardly_adds_rests(void **state)
{
    const struct member *a = &x.member[0];
    char told[64];
    snprintf(told, sizeof told, ": it sums nothing for now (was %.0f%%), 1 GB takes ",
             100 * share(&a->roster, FIRST));
    report_until(&a->prepared, 1, STUCK);
    let_it_change(1);
    assert_true(tallyd()->sum_found == 200000);
    assert_true(tallyd()->rests && !tallyd()->weight);
    expect_since(ask()->changed.what, "tallyd 0 (host) adds 0.0002 Gbit/s of inputs since ", told);
    report_until(&a->prepared, 2, FINE);
    let_it_change(2);
    assert_true(tallyd()->sum_found == 0 && !tallyd()->rests && tallyd()->weight);
    expect_since(ask()->changed.what, "tallyd 0 (host) has rested and is tried with 0.2 Gbit/s since ",
                 ": its share is now ");
}

/* A split that is to stay does so; the tallyd is named all the same. */
static void test_slow_sums_are_named_though_the_split_stays(void **state)
{
    const struct member *a = &x.member[0];
    double before = share(&a->roster, FIRST);
    listen_for("held up by");
    report_until(&a->judged, 1, HELD);
    expect_slow_sums(&a->slow);
    await_line();
    expect_since(strstr(said.line, "tallyd 0"), "tallyd 0 (host), which adds 0.2 Gbit/s of inputs since ",
                 "; the split stays as it is (TALLY_REPLAN=0)");
    assert_int_equal(said.level, TALLY_LOG_WARNING);
    report_until(&a->judged, 2, FINE);
    assert_int_equal(a->slow.why, TLY_WHY_NOBODY);
    report_until(&a->judged, 3, SLOW); /* its sums are no limit any more, its card is */
    assert_int_equal(a->slow.why, TLY_WHY_CARD);
    expect_since(a->slow.what, "carries 0.16 of 0.8 Gbit/s since ", "");
    assert_true(tallyd()->sum_found == 0 && share(&a->roster, FIRST) == before && !a->prepared);
}

/* Inputs wait for the tallyd's process and results do not: it gets half of what it carried.  What that cost before is no
 * matter of its card's rate, so the line does not say it. */
static void test_a_tallyd_with_a_slow_process_gets_half(void **state)
{
    char told[64], end[64];
    const struct tly_roster *r = &x.member[0].roster;
    double before = share(r, FIRST);
    report_until(&x.member[0].prepared, 1, LATE);
    let_it_change(1);
    assert_in_range(tallyd()->bandwidth, 79000000, 81000000); /* 0.16 Gbit/s were carried */
    assert_true(tallyd()->tried && !tallyd()->sum_found);
    snprintf(told, sizeof told,
             " (is its processor short?): its share is now %.0f%% (was %.0f%%), 1 GB takes ",
             100 * share(r, FIRST), 100 * before);
    const char *what = ask()->changed.what;
    expect_since(what, "tallyd 0 (host) reads its inputs late since ", told);
    assert_int_equal(sscanf(strstr(what, "1 GB takes "), "1 GB takes %*f %60[^\n]", end), 1);
    assert_string_equal(end, "s");
    expect_change(what, 0);
    report_until(&x.member[0].judged, 1, LATE); /* it is late with that, too */
    assert_int_equal(x.member[0].slow.why, TLY_WHY_SUMS);
    expect_since(x.member[0].slow.what, "reads its inputs late since ", " (is its processor short?)");
}

/* --- the next coordinator ------------------------------------------------------------------------------ */

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
    listen_for("its share is now");
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

static int set_up_measured(void **state)
{
    return set_up_with("TALLY_SERVERS=1", "TALLY_MEASURED=host=800M?");
}

/* A card was measured once, and nothing confirmed it.  A tallyd that comes there again begins with the same doubt. */
static void test_a_doubtful_figure_stays_doubtful(void **state)
{
    x.bandwidth = 800000000;
    x.unknown = true;
    run(FIRST + 1);
    assert_true(tallyd()->measured && tallyd()->tried);
    leave(&x.member[FIRST]);
    let_it_change(1);
    x.host[GUEST] = x.host[FIRST];
    struct member *guest = join(GUEST);
    turn_until(&guest->invited, 1);
    const struct tly_roster_service *s = &guest->roster.services[FIRST];
    assert_true(s->incarnation == 100 + GUEST && s->bandwidth == 800000000 && s->measured && s->tried);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_guest_that_is_turned_away_leaves_its_place, start_apart,
                                        tear_down),
        cmocka_unit_test(test_a_gone_service_may_be_anywhere),
        cmocka_unit_test_setup_teardown(test_who_comes_and_goes_is_told, start_apart, tear_down),
        cmocka_unit_test_setup_teardown(test_a_tallyd_with_slow_sums_is_named, start_apart, tear_down),
        cmocka_unit_test_setup_teardown(test_a_slow_card_is_named_after_slow_sums, start_apart, tear_down),
        cmocka_unit_test_setup_teardown(test_faster_sums_get_their_share_back, set_up_apart, tear_down),
        cmocka_unit_test_setup_teardown(test_a_tallyd_that_hardly_adds_rests, start_apart, tear_down),
        cmocka_unit_test_setup_teardown(test_slow_sums_are_named_though_the_split_stays, start_fixed,
                                        tear_down),
        cmocka_unit_test_setup_teardown(test_a_tallyd_with_a_slow_process_gets_half, start_apart, tear_down),
        cmocka_unit_test_setup_teardown(test_a_tallyd_that_wakes_is_tried, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_a_split_that_is_to_stay_has_nobody_rest, set_up_fixed,
                                        tear_down),
        cmocka_unit_test_setup_teardown(test_what_was_tried_is_not_known, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_what_was_found_is_known, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_a_doubtful_figure_stays_doubtful, set_up_measured, tear_down),
    };
    if (sodium_init() < 0)
        return 1;
    return cmocka_run_group_tests_name("replan_job", tests, NULL, NULL);
}
