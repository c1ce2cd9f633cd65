/* queue_test.c - what is admitted while nothing is known of what a service has accepted. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "comm/epoch.h"
#include "comm/internal.h"

#include <cmocka.h>

enum { PART = 1 << 20 };

enum { PARTS = 6 };

/* A communicator of two services with a credit of four parts, and parts that are queued: for `gives` a part of ours for service 1,
 * else a request to service 0. */
struct queue {
    tally_comm *comm;
    struct epoch epoch;
    struct peer peers[2];
    struct tally_op op;
    struct part part[PARTS];
};

static int set_up(void **state)
{
    static const uint8_t input[64];
    struct queue *q = calloc(1, sizeof *q);
    *state = q;
    assert_non_null(q);
    tally_comm *c = q->comm = calloc(1, sizeof *c);
    assert_non_null(c);
    c->peers = q->peers;
    c->services = 2;
    c->epoch = &q->epoch;
    c->credit_bytes = 4 * PART;
    q->op = (struct tally_op){.comm = c, .epoch = &q->epoch, .credit = 4 * PART};
    for (int i = 0; i < 2; i++) {
        q->peers[i].comm = c;
        q->peers[i].open = true;
        q->peers[i].granted = 1ull << 40;
    }
    for (uint32_t i = 0; i < PARTS; i++)
        q->part[i] = (struct part){
            .op = &q->op, .order = i, .length = PART, .owner = 1, .group = TLY_PAIR, .input = input};
    return 0;
}

static int tear_down(void **state)
{
    struct queue *q = *state;
    for (int i = 0; i < 2; i++)
        tly_heap_finish(&q->peers[i].waiting);
    free(q->comm);
    free(q);
    return 0;
}

static void queue(struct queue *q, uint32_t parts)
{
    for (uint32_t i = 0; i < parts; i++)
        assert_int_equal(tly_queue_part(q->comm, &q->part[i]), 0);
    tly_queue_admit(q->comm);
}

static uint32_t admitted(const struct queue *q)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < PARTS; i++)
        n += q->part[i].state == PART_ADMITTED;
    return n;
}

/* Two ranks exchange parts: each gives one to the other's service and asks its own for one.  A service that has a part and no
 * request for it answers nobody, and so tells late what it has accepted.  So a request must not wait for that. */
static void test_requests_do_not_wait_for_news(void **state)
{
    struct queue *q = *state;
    struct part *part = q->part;
    for (uint32_t i = 1; i < 4; i += 2) {
        part[i].owner = 0;
        part[i].input = NULL;
    }
    queue(q, 4);
    assert_int_equal(part[0].state, PART_ADMITTED);
    assert_int_equal(part[1].state, PART_ADMITTED);
    assert_int_equal(part[2].state, PART_QUEUED); /* a quarter of the credit is in flight */
    assert_int_equal(part[3].state, PART_QUEUED); /* asked for in turn */
    tly_queue_accepted(&q->peers[1], PART);
    tly_queue_admit(q->comm);
    assert_int_equal(part[2].state, PART_ADMITTED);
    assert_int_equal(part[3].state, PART_ADMITTED);
}

/* A part is a quarter of the credit here, so nothing is in flight when it has been accepted.  The next must not begin anew. */
static void test_the_credit_opens_though_nothing_is_in_flight_for_a_moment(void **state)
{
    struct queue *q = *state;
    queue(q, PARTS);
    assert_int_equal(admitted(q), 1);
    tly_queue_accepted(&q->peers[1], PART);
    tly_queue_admit(q->comm);
    assert_int_equal(admitted(q), 1 + 2);
    tly_queue_accepted(&q->peers[1], 3 * PART);
    tly_queue_admit(q->comm);
    assert_int_equal(admitted(q), PARTS);
}

/* A burst after a pause begins with a quarter again. */
static void test_the_credit_opens_anew_after_a_pause(void **state)
{
    struct queue *q = *state;
    queue(q, 1);
    tly_queue_accepted(&q->peers[1], PART);
    for (uint32_t i = 0; i < PARTS; i++)
        q->part[i].state = PART_IDLE;
    queue(q, PARTS);
    assert_int_equal(admitted(q), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_requests_do_not_wait_for_news, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_the_credit_opens_though_nothing_is_in_flight_for_a_moment,
                                        set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_the_credit_opens_anew_after_a_pause, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
