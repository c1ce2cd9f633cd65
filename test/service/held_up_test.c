/* held_up_test.c - what a coordinator says of ranks that take longer by themselves, and of holders by turns.
 *
 * Time goes on with what this test does, so a slow machine makes no pauses between holders. */
#include "members.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "plan/late.h"

static atomic_llong monotonic = 1000 * TLY_SEC;
static _Thread_local bool
    drives; /* the test's own thread, whose loop looks at the clock about three times a turn */

/* Instead of libc's. */
int clock_gettime(clockid_t clock, struct timespec *out)
{
    if (clock != CLOCK_MONOTONIC)
        return (int)syscall(SYS_clock_gettime, clock, out);
    long long now = drives ? atomic_fetch_add(&monotonic, TLY_MS) : atomic_load(&monotonic);
    *out = (struct timespec){now / TLY_SEC, now % TLY_SEC};
    return 0;
}

static void count_warnings(void *user, enum tally_log_level level, const char *line)
{
    atomic_fetch_add((atomic_int *)user, strstr(line, "the job is held up by ") != NULL);
}

/* Each rank says this of its last steps so often: it takes that part of them for itself, and waits for a processor in that. */
static void say_steps(int rank, double own, double waited)
{
    for (int i = 0; i < TLY_LATE_SAMPLES; i++)
        for (int j = 0; j < RANKS; j++) {
            struct tly_writer w = {0};
            double of = j == rank ? own : .1;
            tly_steps_write(&w, &(struct tly_steps){1, (uint64_t)(1e5 * of),
                                                    j == rank ? (uint64_t)(1e5 * waited) : 0, 0, 100000});
            post(&x.member[j], TLY_PACE, TLY_MARK, &w);
        }
    for (int i = 0; i < 30; i++)
        tly_loop_turn(&x.loop, 2);
}

static void test_why_a_rank_is_late(void **state)
{
    const struct member *a = &x.member[0];
    say_steps(1, .5, .05);
    turn_until(&a->judged, 1);
    assert_int_equal(a->slow.why, TLY_WHY_COMPUTES);
    assert_non_null(strstr(a->slow.what, "computes longer than the others since "));
    say_steps(1, .5, .4);
    turn_until(&a->judged, 2);
    assert_int_equal(a->slow.why, TLY_WHY_WAITS);
    assert_string_equal(a->slow.who, "rank 1 (host)");
    assert_non_null(strstr(a->slow.what, "waits for a processor longer than the others since "));
    assert_non_null(strstr(a->slow.what, ": they wait for it for 40% of a step of 0.1 s"));
    say_steps(1, .1, 0);
    turn_until(&a->judged, 3);
    assert_int_equal(a->slow.why, TLY_WHY_NOBODY);
    assert_string_equal(a->slow.who, "");
}

/* One rank after the other, until that is what is said. */
static void take_turns(void)
{
    const struct member *a = &x.member[0];
    for (int i = 0; i < 200 && a->slow.why != TLY_WHY_TURNS; i++)
        say_steps(i % 2, .5, .4);
    assert_int_equal(a->slow.why, TLY_WHY_TURNS);
    assert_string_equal(a->slow.who, "nobody alone");
    bool either = strstr(a->slow.what, "by turns rank 0 (host) and rank 1 (host) since ") ||
                  strstr(a->slow.what, "by turns rank 1 (host) and rank 0 (host) since ");
    assert_true(either);
}

/* One rank after the other, within seconds: that is one matter, and stays one, in the log and for all. */
static void test_those_who_hold_up_by_turns_are_nobody_alone(void **state)
{
    const struct member *a = &x.member[0];
    atomic_int lines = 0;
    tally_log_redirect(count_warnings, &lines);
    take_turns();
    int judged = a->judged;
    for (int i = 0; i < 6; i++)
        say_steps(i % 2, .5, .4);
    tally_log_redirect(NULL, NULL);
    assert_int_equal(a->judged, judged);
    assert_int_equal(lines, 2); /* one rank, and then both */
    report_until(&a->prepared, 1, SLOW);
    let_it_change(1); /* another split: judged anew, with what was before */
    turn_until(&a->judged, judged + 1);
    assert_int_equal(a->slow.why, TLY_WHY_NOBODY);
    say_steps(0, .5, .4);
    turn_until(&a->judged, judged + 2);
    assert_int_equal(a->slow.why, TLY_WHY_TURNS);
}

/* The tallyd's card is judged to hold the job up. */
static void name_tallyd(void)
{
    const struct member *a = &x.member[0];
    for (int i = 0; i < 200 && a->slow.why != TLY_WHY_CARD && a->slow.why != TLY_WHY_TURNS; i++)
        report_until(&a->told, a->told + 1, SLOW);
    assert_true(a->slow.why == TLY_WHY_CARD || a->slow.why == TLY_WHY_TURNS);
}

/* One tallyd after the other has the same place, and the same name.  Each is another holder. */
static void test_another_tallyd_in_the_same_place(void **state)
{
    const struct member *a = &x.member[0];
    say_steps(0, .5, .4);
    turn_until(&a->judged, 1);
    say_steps(0, .1, 0);
    turn_until(&a->judged, 2);
    name_tallyd();
    assert_string_equal(a->slow.who, "tallyd 0 (host)");
    leave(&x.member[FIRST]);
    let_it_change(1);
    let_come(GUEST, 1);
    name_tallyd();
    assert_string_equal(a->slow.who, "tallyd 0 (host)");
    leave(&x.member[GUEST]);
    let_it_change(3);
    let_come(ANOTHER, 3);
    name_tallyd();
    assert_int_equal(a->slow.why, TLY_WHY_TURNS);
    assert_non_null(strstr(a->slow.what, "by turns rank 0 (host) and tallyd 0 (host) since "));
}

int main(void)
{
    drives = true;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_another_tallyd_in_the_same_place, start_fixed, tear_down),
        cmocka_unit_test_setup_teardown(test_why_a_rank_is_late, start_apart, tear_down),
        cmocka_unit_test_setup_teardown(test_those_who_hold_up_by_turns_are_nobody_alone, start_apart,
                                        tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
