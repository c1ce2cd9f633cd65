/* queue_test.c - which parts are admitted while nothing is known of what a service has accepted, and beside a task that is no
 * part. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "comm/comm.h"
#include "comm/epoch/epoch.h"
#include "comm/op/op.h"
#include "comm/op/part.h"
#include "comm/path/peer.h"
#include "comm/path/queue.h"
#include "ops/call.h"
#include "sched/sched.h"
#include "transport/link/link.h"
#include "wire/frame.h"

#include <cmocka.h>

enum { PART = 1 << 20, PARTS = 4 };

static struct {
    tally_comm *c;
    struct tly_peer peers[2];
    struct tly_epoch epoch;
    struct tally_op op;
    struct tly_part part[PARTS];
    uint8_t input[64];
} f;

static int begin(void **state)
{
    memset(&f, 0, sizeof f);
    f.c = calloc(1, sizeof *f.c);
    assert_non_null(f.c);
    f.c->peers = f.peers;
    f.c->services = 2;
    f.c->epoch = &f.epoch;
    tly_sched_init(&f.c->sched, 4 * PART);
    for (uint32_t i = 0; i < 2; i++) {
        tly_peer_init(&f.peers[i], f.c, i);
        tly_sched_open(&f.peers[i].queue, 1ull << 40);
    }
    f.op = (struct tally_op){.comm = f.c, .epoch = &f.epoch, .credit = 4 * PART};
    return 0;
}

static int end(void **state)
{
    for (int i = 0; i < 2; i++)
        tly_peer_finish(&f.peers[i]);
    free(f.c);
    return 0;
}

static void queue_part(uint32_t i, uint16_t owner, const uint8_t *input)
{
    f.part[i] = (struct tly_part){
        .op = &f.op, .order = i, .length = PART, .owner = owner, .group = TLY_PAIR, .input = input};
    assert_int_equal(tly_queue_part(f.c, &f.part[i]), 0);
}

/* Two ranks exchange parts: each gives one to the other's service and asks its own for one.  A service that has a part and no
 * request for it answers nobody, and so tells late what it has accepted.  So a request must not wait for that. */
static void test_requests_do_not_wait_for_news(void **state)
{
    for (uint32_t i = 0; i < PARTS; i++) {
        bool gives = i % 2 == 0;
        queue_part(i, gives, gives ? f.input : NULL);
    }
    tly_queue_admit(f.c);
    assert_int_equal(f.part[0].state, PART_ADMITTED);
    assert_int_equal(f.part[1].state, PART_ADMITTED);
    assert_int_equal(f.part[2].state, PART_QUEUED); /* a quarter of the credit is in flight */
    assert_int_equal(f.part[3].state, PART_QUEUED); /* asked for in turn */
    tly_queue_accepted(&f.peers[1], PART);
    tly_queue_admit(f.c);
    assert_int_equal(f.part[2].state, PART_ADMITTED);
    assert_int_equal(f.part[3].state, PART_ADMITTED);
}

/* The urgency counts, which in a planned list is not the caller's priority. */
static void test_the_most_urgent_goes_first(void **state)
{
    struct tally_op other = f.op;
    f.op.priority = 2;
    other.urgency = 1;
    other.sequence = 1;
    for (uint32_t i = 0; i < 2; i++)
        queue_part(i, 0, f.input);
    f.part[2] = (struct tly_part){.op = &other, .length = PART, .group = TLY_PAIR, .input = f.input};
    assert_int_equal(tly_queue_part(f.c, &f.part[2]), 0);
    tly_queue_admit(f.c); /* a quarter of the credit */
    assert_int_equal(f.part[2].state, PART_ADMITTED);
    assert_int_equal(f.part[0].state, PART_QUEUED);
}

static int started;

static void start(struct tly_task *task)
{
    started++;
}

/* Something else that this rank sends has a task in a queue of its own.  It waits for the credit that parts hold, goes before
 * parts that are less urgent, and holds the credit itself until it is finished. */
static void test_beside_a_task_that_is_no_part(void **state)
{
    struct tly_sched_queue queue;
    struct tly_task task = {.order = {1, 0}, .charge = 4 * PART, .start = start};
    started = 0;
    tly_sched_add(&f.c->sched, &queue);
    tly_sched_open(&queue, UINT64_MAX);
    queue_part(0, 0, f.input);
    tly_queue_admit(f.c);
    assert_int_equal(tly_sched_ready(&queue, &task), 0);
    queue_part(1, 0, f.input);
    tly_queue_admit(f.c);
    assert_int_equal(f.part[0].state, PART_ADMITTED);
    assert_int_equal(started, 0);
    tly_queue_accepted(&f.peers[0], PART);
    tly_queue_admit(f.c);
    assert_int_equal(started, 1);
    assert_int_equal(f.part[1].state, PART_QUEUED);
    tly_sched_finish(&queue, task.charge);
    tly_queue_admit(f.c);
    assert_int_equal(f.part[1].state, PART_ADMITTED);
    tly_sched_remove(&queue);
}

/* A service may answer a part that it has just asked for again.  The part's operation may end with that, and so the part
 * waits in no queue any more. */
static void test_what_has_landed_waits_no_longer(void **state)
{
    for (uint32_t i = 0; i < PARTS; i++)
        queue_part(i, 0, f.input);
    tly_queue_admit(f.c);
    assert_int_equal(f.part[0].state, PART_ADMITTED);
    assert_int_equal(f.part[3].state, PART_QUEUED);
    uint64_t in_flight = f.c->sched.in_flight;
    tly_queue_remove(&f.part[0]);
    assert_int_equal(f.c->sched.in_flight, in_flight - PART);
    tly_queue_remove(&f.part[3]);
    tly_part_change(&f.part[0], PART_LANDED);
    tly_part_change(&f.part[3], PART_LANDED);
    for (uint64_t i = 1; i < PARTS; i++) {
        tly_queue_accepted(&f.peers[0], i * PART);
        tly_queue_admit(f.c);
    }
    for (const struct tly_part *p = f.peers[0].first; p; p = p->next)
        assert_true(p == &f.part[1] || p == &f.part[2]);
    assert_false(tly_sched_waits(&f.peers[0].queue));
    assert_int_equal(f.part[0].state, PART_LANDED);
    assert_int_equal(f.part[3].state, PART_LANDED);
}

/* A service may answer before it has read all.  The operation may end with that, and its memory belong to others, while the
 * rest still waits in the link. */
static void test_what_has_landed_is_not_sent_from_its_memory(void **state)
{
    struct tly_link *link = calloc(1, sizeof *link);
    assert_non_null(link);
    link->made = 2;
    for (uint32_t i = 0; i < 2; i++) {
        queue_part(i, 0, f.input);
        link->packet[i] = (struct tly_packet){.payload = f.input, .len = sizeof f.input, .token = &f.part[i]};
        f.part[i].frames = 1;
    }
    f.peers[0].link = link;
    tly_queue_admit(f.c);
    assert_int_equal(f.part[0].state, PART_ADMITTED);
    tly_queue_remove(&f.part[0]);
    assert_int_equal(f.part[0].frames, 0);
    assert_null(link->packet[0].token);
    assert_ptr_not_equal(link->packet[0].payload, f.input);
    assert_memory_equal(link->packet[0].payload, f.input, sizeof f.input);
    assert_ptr_equal(link->packet[1].token, &f.part[1]); /* has not landed */
    assert_ptr_equal(link->packet[1].payload, f.input);
    f.peers[0].link = NULL;
    free(link->packet[0].owned);
    free(link);
}

/* The create of a shared tensor fails.  Services that have heard of a part are told, also if they have answered.  The others are not. */
static void test_a_create_is_withdrawn_where_it_is_known(void **state)
{
    f.op.call = tly_call_of(TALLY_SHARED_CREATE);
    f.op.parts = f.part;
    f.op.part_count = 2;
    for (uint16_t i = 0; i < 2; i++) {
        f.peers[i].open = true;
        queue_part(i, i, f.input);
    }
    f.part[0].known = true;
    tly_part_change(&f.part[0], PART_LANDED);
    tly_queue_withdraw(f.c, &f.op);
    assert_false(tly_list_empty(&f.peers[0].outbox.letters));
    assert_true(tly_list_empty(&f.peers[1].outbox.letters));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_requests_do_not_wait_for_news, begin, end),
        cmocka_unit_test_setup_teardown(test_the_most_urgent_goes_first, begin, end),
        cmocka_unit_test_setup_teardown(test_beside_a_task_that_is_no_part, begin, end),
        cmocka_unit_test_setup_teardown(test_what_has_landed_waits_no_longer, begin, end),
        cmocka_unit_test_setup_teardown(test_what_has_landed_is_not_sent_from_its_memory, begin, end),
        cmocka_unit_test_setup_teardown(test_a_create_is_withdrawn_where_it_is_known, begin, end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
