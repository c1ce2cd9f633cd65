/* takeover_test.c - a coordinator takes over a job whose last one has died; its members are the test's own
 * (members.h). */
#include "members.h"

#include <sodium.h>

/* The last coordinator died between its COMMITs: rank `ahead` is in epoch 5, the other in 4, whichever comes first.  The
 * other gets the COMMIT that it lacks, with what was begun before 5 and without what was begun in it; then all change. */
static void catch_up(uint32_t first, uint32_t ahead)
{
    for (uint32_t k = 0; k < RANKS; k++) {
        uint32_t i = k ? 1 - first : first;
        resume(i, i == ahead ? 5 : 4, i == ahead ? TLY_SERVICE_GONE : TLY_SERVICE_ACTIVE);
        if (!k)
            say_all(&x.member[i]); /* let it be the first */
    }
    struct member *a = &x.member[ahead], *b = &x.member[1 - ahead];
    turn_until(&a->prepared, 1);
    turn_until(&b->prepared, 1);
    answer_in(a, a->roster.epoch, 5, 0, 3, false);
    answer_in(a, a->roster.epoch, 4, 3, 2, true);
    answer_in(b, b->roster.epoch, 4, 4, 2, true);
    turn_until(&b->committed, 1);
    assert_int_equal(b->rounds, 3);
    turn_until(&b->prepared, 2);
    turn_until(&a->prepared, 2);
    assert_int_equal(a->committed, 0);
    answer_in(a, a->roster.epoch, 5, 0, 3, true);
    answer_in(b, b->roster.epoch, 4, 4, 2, true);
    turn_until(&a->committed, 1);
    turn_until(&b->committed, 2);
    assert_int_equal(a->rounds, 5);
    assert_int_equal(a->roster.epoch, b->roster.epoch);
    assert_true(a->roster.epoch > 5);
    assert_int_equal(state_of(b, FIRST), TLY_SERVICE_GONE);
    assert_int_equal(a->failed + b->failed, 0);
}

static void test_a_rank_that_is_behind_comes_first(void **state)
{
    catch_up(0, 1);
}

static void test_a_rank_that_is_behind_comes_last(void **state)
{
    catch_up(0, 0);
}

/* The rank that is ahead names two creates that the last COMMIT listed, and which have ended since: the other gets them with that
 * COMMIT.  What the other names of an older COMMIT does not count, and counts once it has the last one. */
static void test_ended_creates_are_listed_again(void **state)
{
    struct member *a = resume(0, 5, TLY_SERVICE_GONE), *b = resume(1, 4, TLY_SERVICE_ACTIVE);
    turn_until(&a->prepared, 1);
    turn_until(&b->prepared, 1);
    answer_ended(a, a->roster.epoch, 3, 0, 3, 2, true);
    answer_ended(b, b->roster.epoch, 3, 2, 5, 3, true); /* 2 and 3, and 4 to 6 have ended */
    turn_until(&b->committed, 1);
    assert_int_equal(b->rounds, 4);
    turn_until(&b->prepared, 2);
    turn_until(&a->prepared, 2);
    answer_ended(a, a->roster.epoch, 3, 0, 3, 2, true);
    answer_ended(b, b->roster.epoch, 3, 2, 4, 1, true);
    turn_until(&a->committed, 1);
    turn_until(&b->committed, 2);
    assert_int_equal(a->rounds, 6);
    assert_int_equal(b->rounds, 6);
}

/* The next coordinator goes on with what the last one had found: tallyds that are not back yet have cards of their own, and one
 * that rests goes on resting. */
static void test_the_next_coordinator_keeps_cards_and_rests(void **state)
{
    const struct tly_roster *r = &x.member[0].roster;
    x.bandwidth = 800000000;
    x.guest_rests = true;
    resume(0, 4, TLY_SERVICE_ACTIVE);
    resume(1, 4, TLY_SERVICE_ACTIVE);
    change_all(1);
    assert_int_equal(r->services[FIRST].card, FIRST);
    assert_int_equal(r->services[GUEST].card, GUEST);
    assert_true(r->services[GUEST].rests && !r->services[GUEST].weight);
    say_all(resume(GUEST, 4, TLY_SERVICE_ACTIVE));
    say_all(resume(FIRST, 4, TLY_SERVICE_ACTIVE));
    post(&x.member[FIRST], TLY_GOODBYE, 0, NULL);
    change_all(2);
    assert_int_equal(state_of(&x.member[0], FIRST), TLY_SERVICE_IDLE);
    assert_int_equal(r->services[GUEST].card, GUEST);
    assert_true(r->services[GUEST].rests && !r->services[GUEST].weight);
}

/* All on one host, where no card matters, and a tallyd of it is not back yet: none matters still. */
static void test_the_next_coordinator_has_all_on_one_host(void **state)
{
    x.bandwidth = 800000000;
    x.host[1] = x.host[FIRST] = x.host[0];
    resume(0, 4, TLY_SERVICE_ACTIVE);
    resume(1, 4, TLY_SERVICE_ACTIVE);
    change_all(1);
    for (uint32_t i = 0; i <= FIRST; i++)
        assert_int_equal(x.member[0].roster.services[i].card, i);
}

/* One rank has said goodbye and gone before the other is back, who knows more than it did. */
static void test_a_rank_leaves_before_the_other_is_back(void **state)
{
    struct member *a = resume(0, 4, TLY_SERVICE_ACTIVE), *b;
    post(a, TLY_GOODBYE, 0, NULL);
    say_all(a);
    leave(a);
    b = resume(1, 5, TLY_SERVICE_GONE);
    turn_until(&b->prepared, 1);
    answer_in(b, b->roster.epoch, 5, 0, 0, true);
    turn_until(&b->committed, 1);
    assert_int_equal(b->roster.ranks[0].left, 1);
    assert_int_equal(b->roster.ranks[1].left, 0);
    assert_int_equal(b->failed, 0);
}

static void test_a_rank_has_left_before(void **state)
{
    struct member *b = resume_without(0, 1, 4, TLY_SERVICE_GONE);
    turn_until(&b->prepared, 1);
    assert_int_equal(b->roster.ranks[0].left, 1);
}

/* A tallyd has connected, and has not said yet which job it belongs to, as a rank of that dies or the last one leaves.  It hears
 * that once it has said it. */
static void test_a_tallyd_is_back_as_the_job_fails(void **state)
{
    resume(0, 4, TLY_SERVICE_ACTIVE);
    resume(1, 4, TLY_SERVICE_ACTIVE);
    change_all(1);
    struct member *tallyd = enter(FIRST);
    leave(&x.member[1]);
    turn_until(&x.member[0].failed, 1);
    resume(FIRST, 4, TLY_SERVICE_ACTIVE);
    turn_until(&tallyd->failed, 1);
    assert_string_equal(tallyd->verdict, x.member[0].verdict);
}

static void test_a_tallyd_is_back_as_the_job_ends(void **state)
{
    resume(0, 4, TLY_SERVICE_ACTIVE);
    resume(1, 4, TLY_SERVICE_ACTIVE);
    change_all(1);
    struct member *tallyd = enter(FIRST);
    for (uint32_t i = 0; i < RANKS; i++)
        post(&x.member[i], TLY_GOODBYE, 0, NULL);
    turn_until(&x.member[0].ended, 1);
    resume(FIRST, 4, TLY_SERVICE_ACTIVE);
    turn_until(&tallyd->ended, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_rank_that_is_behind_comes_first, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_a_rank_that_is_behind_comes_last, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_ended_creates_are_listed_again, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_the_next_coordinator_keeps_cards_and_rests, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_the_next_coordinator_has_all_on_one_host, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_a_rank_leaves_before_the_other_is_back, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_a_rank_has_left_before, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_a_tallyd_is_back_as_the_job_fails, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_a_tallyd_is_back_as_the_job_ends, set_up, tear_down),
    };
    if (sodium_init() < 0)
        return 1;
    return cmocka_run_group_tests_name("takeover", tests, NULL, NULL);
}
