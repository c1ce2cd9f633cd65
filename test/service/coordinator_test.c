/* coordinator_test.c - what a coordinator says to members of the test's own (members.h): of guests, complaints, and
 * a job's end. */
#include "members.h"

#include <sodium.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "job.h"
#include "transport/address.h"

/* Rank 0 has reached a guest and rank 1 has not, when another change comes in between: what they answer to that is no
 * answer to the invitation, and does not make them forget the one that was given. */
static void test_a_guest_that_only_some_ranks_have_reached(void **state)
{
    struct member *a = &x.member[0], *b = &x.member[1], *guest = join(GUEST);
    turn_until(&guest->invited, 1);
    post(guest, TLY_BEGUN, 0, NULL);
    turn_until(&a->invited, 2);
    turn_until(&b->invited, 2);
    uint32_t invitation = b->roster.epoch;
    answer(a, invitation, 0, 0, true);
    uint32_t change = let_first_leave();
    answer(a, change, 0, 0, true);
    answer(b, change, 0, 0, true);
    turn_until(&a->committed, 2);
    assert_int_equal(state_of(a, GUEST), TLY_SERVICE_IDLE);
    assert_int_equal(state_of(a, FIRST), TLY_SERVICE_IDLE);
    answer(b, invitation, 0, 0, true); /* now it has */
    turn_until(&a->prepared, 2);
    turn_until(&b->prepared, 2);
    assert_int_equal(state_of(a, GUEST), TLY_SERVICE_ACTIVE);
    answer(a, a->roster.epoch, 0, 0, true);
    answer(b, b->roster.epoch, 0, 0, true);
    turn_until(&a->committed, 3);
    turn_until(&b->committed, 3);
    turn_until(&guest->committed, 2); /* of the first change too */
    assert_int_equal(state_of(b, GUEST), TLY_SERVICE_ACTIVE);
    assert_int_equal(a->failed + b->failed, 0);
}

/* A rank leaves before it has met the guest, and will not say goodbye to it: the guest hears it with its first epoch. */
static void test_a_guest_learns_who_has_left(void **state)
{
    struct member *a = &x.member[0], *guest = join(GUEST);
    turn_until(&guest->invited, 1);
    assert_int_equal(guest->roster.ranks[1].left, 0);
    post(guest, TLY_BEGUN, 0, NULL);
    turn_until(&a->invited, 2);
    answer(a, a->roster.epoch, 0, 0, true);
    post(&x.member[1], TLY_GOODBYE, 0, NULL);
    turn_until(&a->prepared, 1);
    answer(a, a->roster.epoch, 0, 0, true);
    turn_until(&guest->committed, 1);
    assert_int_equal(state_of(guest, GUEST), TLY_SERVICE_ACTIVE);
    assert_int_equal(guest->roster.ranks[0].left, 0);
    assert_int_equal(guest->roster.ranks[1].left, 1);
}

/* A tallyd comes that others cannot reach: it is turned away, and the split follows the network as before. */
static void test_a_guest_is_turned_away(void **state)
{
    uint64_t bandwidth = x.bandwidth;
    x.apart = true;
    x.bandwidth = 0; /* it listens at a loopback address */
    struct member *guest = join(GUEST);
    turn_until(&guest->failed, 1);
    assert_non_null(strstr(guest->verdict, "tallyd 1 on host"));
    assert_non_null(strstr(guest->verdict, "cannot be reached from other machines"));
    x.bandwidth = bandwidth;
    report_until(&x.member[0].prepared, 1, SLOW);
    assert_int_equal(x.member[0].roster.service_count, FIRST + 1);
    assert_int_equal(x.member[0].failed + x.member[1].failed, 0);
}

static int set_up_without_tallyd(void **state)
{
    return set_up_with(NULL, NULL);
}

/* Two containers of one host and a machine: over the host's card go its two ranks' pushes, 2, less X for what it sums
 * itself, over the other 1 + (1 - X).  The more the host sums, the less they carry: it sums all, each container half. */
static void test_containers_of_a_host_share_its_card(void **state)
{
    x.ranks = 3;
    x.host[1] = x.host[0];
    x.contained = true;
    run(x.ranks);
    const struct tly_roster *r = &x.member[0].roster;
    assert_int_equal(r->machine_count, 3);
    assert_int_equal(r->services[1].card, 0);
    assert_int_equal(r->services[2].card, 2);
    assert_true(r->services[0].weight > 0);
    assert_int_equal(r->services[0].weight, r->services[1].weight);
    assert_int_equal(r->services[2].weight, 0);
}

/* A rank says without end what it has begun: the job ends, and the others hear why. */
static void test_begun_without_end(void **state)
{
    enum { MOST = 64 };
    uint32_t change = let_first_leave();
    for (uint32_t i = 0; !x.member[1].closed; i++) {
        assert_true(i < MOST);
        answer(&x.member[1], change, i * TLY_BEGUN_ROUNDS, TLY_BEGUN_ROUNDS, false);
        while (!x.member[1].closed && !tly_list_empty(&x.member[1].outbox.letters))
            tly_loop_turn(&x.loop, 2);
    }
    turn_until(&x.member[0].failed, 1);
    assert_non_null(strstr(x.member[0].verdict, "rank 1"));
    assert_non_null(strstr(x.member[0].verdict, "more rounds begun"));
}

/* Of one round that a rank names two have ended. */
static void test_more_ended_than_begun(void **state)
{
    answer_ended(&x.member[1], let_first_leave(), 1, 0, 1, 2, true);
    turn_until(&x.member[0].failed, 1);
    assert_non_null(strstr(x.member[0].verdict, "rank 1"));
    assert_non_null(strstr(x.member[0].verdict, "cut short"));
}

static void complain(struct member *m)
{
    struct tly_writer w = {0};
    tly_write32(&w, 0);
    tly_write_text(&w, "cannot reach it");
    tly_write64(&w, 100 + FIRST);
    assert_false(w.failed);
    post(m, TLY_COMPLAIN, 0, &w);
}

/* Only a rank can miss a service, and it is one of those that there are. */
static void test_a_complaint_of_a_tallyd(void **state)
{
    complain(&x.member[FIRST]);
    turn_until(&x.member[FIRST].closed, 1);
    turn_until(&x.member[0].prepared, 1); /* it is out, and the job goes on without it */
    answer(&x.member[0], x.member[0].roster.epoch, 0, 0, true);
    turn_until(&x.member[1].prepared, 1);
    answer(&x.member[1], x.member[1].roster.epoch, 0, 0, true);
    turn_until(&x.member[0].committed, 2);
    assert_int_equal(state_of(&x.member[0], FIRST), TLY_SERVICE_GONE);
    assert_int_equal(x.member[0].failed + x.member[1].failed, 0);
}

/* Who leaves is told to the others at once: the next coordinator hears it from them, and waits for nobody. */
static void test_the_others_hear_who_has_left(void **state)
{
    post(&x.member[1], TLY_GOODBYE, 0, NULL);
    turn_until(&x.member[0].gone, 1);
    turn_until(&x.member[FIRST].gone, 1);
    assert_int_equal(x.member[0].failed, 0);
}

static void await_over(void)
{
    for (int i = 0; !tly_coordinator_is_over(x.coordinator); i++) {
        assert_true(i < 10000);
        tly_loop_turn(&x.loop, 2);
    }
}

/* A rank dies while somebody watches and a stranger says nothing, and neither goes: it is over once those have gone that
 * were told.  The next start's ranks are not let in before. */
static void test_a_failed_job_is_over_when_its_members_have_gone(void **state)
{
    struct sockaddr_storage to;
    enter(WATCHER);
    assert_int_equal(tly_address_parse("127.0.0.1", tly_coordinator_port(x.coordinator), &to), 0);
    int stranger = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(connect(stranger, (struct sockaddr *)&to, sizeof(struct sockaddr_in)), 0);
    leave(&x.member[1]);
    turn_until(&x.member[0].failed, 1);
    assert_false(tly_coordinator_is_over(x.coordinator));
    struct member *next = knock(1);
    turn_until(&next->closed, 1);
    assert_int_equal(next->opened, 0);
    for (uint32_t i = 0; i <= FIRST; i++)
        leave(&x.member[i]);
    await_over();
    assert_int_equal(x.member[WATCHER].closed, 0);
    close(stranger);
}

/* A rank that has left comes for the next start, and has connected when the job fails.  It is told to come again, not why. */
static void test_the_next_start_does_not_fail_with_the_last(void **state)
{
    post(&x.member[1], TLY_GOODBYE, 0, NULL);
    turn_until(&x.member[0].gone, 1);
    leave(&x.member[1]);
    struct member *next = enter(1);
    leave(&x.member[0]);
    turn_until(&x.member[FIRST].failed, 1);
    announce(next);
    turn_until(&next->failed, 1);
    assert_non_null(strstr(next->verdict, "the job's last start has not ended yet"));
}

/* When it is due to be judged the job has failed: of the one accused nothing more is said. */
static void test_a_complaint_as_the_job_fails(void **state)
{
    struct member *accused = &x.member[FIRST];
    leave(&x.member[1]);
    turn_until(&accused->failed, 1);
    complain(&x.member[0]);
    for (int64_t until = tly_now() + TLY_SEC; tly_now() < until;)
        tly_loop_turn(&x.loop, 2);
    assert_int_equal(accused->failed, 1);
    assert_non_null(strstr(accused->verdict, "rank 1"));
}

/* They know that it has failed, and stay. */
static void test_a_failed_job_is_over_though_its_members_stay(void **state)
{
    leave(&x.member[1]);
    turn_until(&x.member[0].failed, 1);
    turn_until(&x.member[FIRST].failed, 1);
    await_over();
    assert_int_equal(x.member[0].closed + x.member[FIRST].closed, 0);
}

/* The second rank's time begins with the first one: a coordinator apart has stood idle for longer than it is.  Its clock
 * never goes faster than ours. */
static void await_other(const char *says)
{
    int64_t came = tly_now();
    turn_until(&x.member[0].failed, 1);
    assert_non_null(strstr(x.member[0].verdict, says));
    assert_true(tly_now() - came >= TLY_SEC);
}

static int idle_before_a_start(void **state)
{
    return set_up_with("TALLY_JOIN_TIMEOUT=2", NULL);
}

static void test_idle_before_a_start(void **state)
{
    job_sleep_ms(2500);
    join(0);
    await_other("rank 1 did not join within 2 s");
}

static int idle_before_it_takes_over(void **state)
{
    return set_up_with("TALLY_DEAD_TIMEOUT=2", NULL);
}

static void test_idle_before_it_takes_over(void **state)
{
    job_sleep_ms(2500);
    resume(0, 4, TLY_SERVICE_GONE);
    await_other("rank 1 has not come back to the coordinator within 2 s");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_guest_that_only_some_ranks_have_reached, start, tear_down),
        cmocka_unit_test_setup_teardown(test_a_guest_learns_who_has_left, start, tear_down),
        cmocka_unit_test_setup_teardown(test_a_guest_is_turned_away, start_apart, tear_down),
        cmocka_unit_test_setup_teardown(test_containers_of_a_host_share_its_card, set_up_without_tallyd,
                                        tear_down),
        cmocka_unit_test_setup_teardown(test_begun_without_end, start, tear_down),
        cmocka_unit_test_setup_teardown(test_more_ended_than_begun, start, tear_down),
        cmocka_unit_test_setup_teardown(test_a_complaint_of_a_tallyd, start, tear_down),
        cmocka_unit_test_setup_teardown(test_the_others_hear_who_has_left, start, tear_down),
        cmocka_unit_test_setup_teardown(test_a_failed_job_is_over_when_its_members_have_gone, start,
                                        tear_down),
        cmocka_unit_test_setup_teardown(test_a_failed_job_is_over_though_its_members_stay, start, tear_down),
        cmocka_unit_test_setup_teardown(test_the_next_start_does_not_fail_with_the_last, start, tear_down),
        cmocka_unit_test_setup_teardown(test_a_complaint_as_the_job_fails, start, tear_down),
        cmocka_unit_test_setup_teardown(test_idle_before_a_start, idle_before_a_start, tear_down),
        cmocka_unit_test_setup_teardown(test_idle_before_it_takes_over, idle_before_it_takes_over, tear_down),
    };
    if (sodium_init() < 0)
        return 1;
    return cmocka_run_group_tests_name("coordinator", tests, NULL, NULL);
}
