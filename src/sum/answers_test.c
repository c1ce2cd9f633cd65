/* answers_test.c - when a rank hears that what it was sent is stable: with the next frame, or at once if it has asked. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/loop.h"
#include "sum/internal.h"
#include "sum/members.h"
#include "sum/round.h"
#include "sum/session.h"
#include "transport/link/link.h"

#include <cmocka.h>

enum { PART = 1 << 20 };

static struct tly_loop loop;
static struct tly_link link_of_rank;
static struct tly_session session;
static struct tly_job job;
static struct tly_session *by_rank[] = {&session};
static struct tly_members all = {.count = 1};
static struct tly_round *ring[2], *round_of_all;

/* One answer has gone out, and every rank has it; this one's session does not know yet. */
static int set_up(void **state)
{
    round_of_all = calloc(1, sizeof *round_of_all + sizeof(struct tly_slot));
    assert_non_null(round_of_all);
    round_of_all->who = &all;
    round_of_all->received = 1;
    round_of_all->references = 2;
    ring[0] = round_of_all;
    link_of_rank = (struct tly_link){.loop = &loop};
    session = (struct tly_session){
        .job = &job,
        .link = &link_of_rank,
        .deliveries = ring,
        .ring_room = 2,
        .delivered = 1,
        .received = 1,
        .told = 1};
    job = (struct tly_job){.loop = &loop,
                           .ranks = 1,
                           .by_rank = by_rank,
                           .mortal = true,
                           .part_bytes = PART,
                           .pace_bytes = PART};
    return 0;
}

static int tear_down(void **state)
{
    free(round_of_all);
    return 0;
}

static void test_news_may_wait(void **state)
{
    tly_answers_settle(&job);
    assert_int_equal(session.stable, 1);
    assert_true(link_of_rank.owes);
    assert_true(link_of_rank.owed_bytes < PART);
}

static void test_a_question_is_answered_once_all_is_stable(void **state)
{
    tly_answers_asked(&session);
    assert_false(link_of_rank.owes); /* it would tell nothing new */
    tly_answers_settle(&job);
    assert_int_equal(session.stable, 1);
    assert_int_equal(link_of_rank.owed_bytes, UINT32_MAX);
    assert_true(session.asked <= session.stable); /* the rank waits for nothing more */
}

/* ... though the next answer is on its way to this rank. */
static void test_a_question_is_about_what_the_rank_has(void **state)
{
    session.delivered = 2;
    tly_answers_asked(&session);
    tly_answers_settle(&job);
    assert_int_equal(session.stable, 1);
    assert_int_equal(link_of_rank.owed_bytes, UINT32_MAX);
}

static void test_a_question_behind_the_news_brings_it_on(void **state)
{
    tly_answers_settle(&job);
    tly_answers_asked(&session);
    assert_int_equal(link_of_rank.owed_bytes, UINT32_MAX);
}

/* Another operation asks before the news of the first one's end is there: each question has its answer. */
static void test_a_later_question_does_not_replace_the_first(void **state)
{
    struct tly_round *later = calloc(1, sizeof *later + sizeof(struct tly_slot));
    assert_non_null(later);
    later->who = &all;
    later->references = 2;
    ring[1] = later;
    tly_answers_asked(&session);
    session.delivered = session.told = session.received = 2;
    tly_answers_asked(&session);
    tly_answers_settle(&job);
    assert_int_equal(session.stable, 1);
    assert_int_equal(link_of_rank.owed_bytes, UINT32_MAX);
    link_of_rank.owed_bytes = 0;
    later->received = 1;
    tly_answers_settle(&job);
    assert_int_equal(session.stable, 2);
    assert_int_equal(link_of_rank.owed_bytes, UINT32_MAX);
    free(later);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_news_may_wait, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_a_question_is_answered_once_all_is_stable, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_a_question_is_about_what_the_rank_has, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_a_later_question_does_not_replace_the_first, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_a_question_behind_the_news_brings_it_on, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
