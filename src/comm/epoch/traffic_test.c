/* traffic_test.c - what a rank reports of its traffic, and when: beside a service that lies, a receive that stands open, no
 * traffic at all, and a kernel that does not tell. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/list.h"
#include "base/log.h"
#include "comm/comm.h"
#include "comm/epoch/epoch.h"
#include "comm/epoch/traffic.h"
#include "comm/op/op.h"
#include "comm/path/peer.h"
#include "membership/traffic.h"
#include "sched/sched.h"
#include "transport/link/link.h"
#include "wire/frame.h"

#include <cmocka.h>

static struct {
    tally_comm *c;
    struct tly_peer peer;
    struct tly_epoch epoch;
    struct tly_link link, coordinator;
    struct tly_channel channel;
    int load_err;
    int said; /* lines of the log */
    char line[400];
    struct tally_op sum, receive, barrier;
} f;

static int load(const struct tly_channel *channel, struct tly_link_load *out)
{
    *out = (struct tly_link_load){0};
    return f.load_err;
}

static const struct tly_network network = {.load = load};
static const struct tly_medium medium = {.network = &network};

static void hear(void *user, enum tally_log_level level, const char *text)
{
    f.said++;
    snprintf(f.line, sizeof f.line, "%s", text);
}

static int begin(void **state)
{
    memset(&f, 0, sizeof f);
    f.c = calloc(1, sizeof *f.c);
    assert_non_null(f.c);
    f.c->machines = 2;
    f.c->services = 1;
    f.c->peers = &f.peer;
    f.c->epoch = &f.epoch;
    tly_active_init(&f.c->active);
    tly_epochs_init(&f.c->epochs);
    tly_list_append(&f.c->epochs.all, &f.epoch.node);
    tly_outbox_init(&f.c->member.outbox);
    f.c->member.link = &f.coordinator;
    tly_sched_init(&f.c->sched, 1 << 20);
    f.channel.medium = &medium;
    f.link = (struct tly_link){.state = TLY_LINK_OPEN, .channel = &f.channel};
    tly_peer_init(&f.peer, f.c, 0);
    f.peer.link = &f.link;
    f.peer.open = true;
    f.sum.call = &tly_call_push_pull;
    f.receive.call = &tly_call_message;
    f.barrier.call = &tly_call_barrier;
    tally_log_redirect(hear, NULL);
    return 0;
}

static int end(void **state)
{
    tally_log_redirect(NULL, NULL);
    f.peer.link = NULL;
    tly_peer_finish(&f.peer);
    tly_outbox_finish(&f.c->member.outbox, NULL, NULL);
    free(f.c);
    return 0;
}

/* So much time passes, and the rank's loop turns. */
static void pass(int ms)
{
    struct tly_own_traffic *t = &f.c->traffic;
    uint64_t us = (uint64_t)ms * 1000;
    t->looked_at -= ms * TLY_MS;
    t->quiet_at -= ms * TLY_MS;
    t->seen_at -= us;
    t->active_since -= t->active_since ? us : 0;
    tly_traffic_tick(f.c);
}

/* What the coordinator is told last: the frame's flags, and the report; -1: nothing. */
static int told(struct tly_traffic *out)
{
    struct tly_outgoing o;
    int flags = -1;
    while (tly_outbox_next(&f.c->member.outbox, &o, NULL)) {
        struct tly_reader r = {o.payload, o.frame.payload, false};
        assert_int_equal(o.frame.type, TLY_PACE);
        flags = o.frame.flags;
        if (flags == 0)
            assert_int_equal(tly_traffic_read(&r, out), 0);
        else if (flags == TLY_QUIET)
            assert_int_equal(tly_read32(&r), 1); /* epochs */
        free(o.owned);
    }
    return flags;
}

/* A look, of which the service says that it has sent for so long in all. */
static void look(int ms, uint64_t sending_us)
{
    pass(ms);
    tly_traffic_answered(&f.peer, sending_us);
    tly_traffic_tick(f.c);
}

/* It says that it was always sending.  What has come is what has come. */
static void test_a_service_that_lies(void **state)
{
    struct tly_traffic t;
    tly_traffic_enters(f.c, &f.sum);
    look(500, 0);
    assert_int_equal(told(&t), -1);
    f.link.bytes_received += 1000;
    look(500, UINT64_MAX - 1);
    assert_int_equal(told(&t), 0);
    assert_int_equal(t.line[0].in.bytes, 1000);
    assert_in_range(t.period_us, 500000, 600000);
    tly_traffic_finish(&t);
    look(500, 7); /* less than before */
    assert_int_equal(told(&t), 0);
    assert_int_equal(t.line[0].in.busy_us, TLY_TRAFFIC_UNKNOWN);
    tly_traffic_finish(&t);
}

/* A receive stands open for hours, and a barrier waits: the rank is active while it sums. */
static void test_what_stands_open_is_no_traffic(void **state)
{
    struct tly_traffic t;
    tly_traffic_enters(f.c, &f.receive);
    tly_traffic_enters(f.c, &f.barrier);
    look(500, 0);
    assert_int_equal(f.peer.glances.any, false);
    for (int i = 0; i < 2; i++) {
        tly_traffic_enters(f.c, &f.sum);
        tly_traffic_enters(f.c, &f.sum);
        f.c->traffic.active_since -= 150000;
        tly_traffic_leaves(f.c, &f.sum);
        f.c->traffic.active_since -= 50000;
        tly_traffic_leaves(f.c, &f.sum);
        look(1000, 0);
    }
    assert_int_equal(told(&t), 0);
    assert_in_range(t.active_us, 200000, 300000);
    assert_in_range(t.period_us, 1000000, 1200000);
    tly_traffic_finish(&t);
}

/* A rank that takes part in nothing says so again and again, but not while it does: its report follows then. */
static void test_no_traffic(void **state)
{
    struct tly_traffic t;
    pass(0);
    pass(4500);
    assert_int_equal(told(&t), -1);
    pass(600);
    assert_int_equal(told(&t), TLY_QUIET);
    pass(300);
    assert_int_equal(told(&t), -1);
    pass(200);
    assert_int_equal(told(&t), TLY_QUIET);
    tly_traffic_enters(f.c, &f.sum);
    pass(50);
    tly_traffic_leaves(f.c, &f.sum);
    pass(400);
    assert_int_equal(told(&t), -1);
    pass(400); /* that was little */
    assert_int_equal(told(&t), TLY_QUIET);
    tly_traffic_enters(f.c, &f.sum);
    look(500, 0);
    look(500, 0);
    assert_int_equal(told(&t), 0);
    tly_traffic_finish(&t);
    look(6000, 0); /* the others are late: it waits, and is not quiet */
    assert_int_equal(told(&t), 0);
    tly_traffic_finish(&t);
}

/* Rank 0 says once that the plan cannot follow, be it for its own kernel or a service's. */
static void test_a_kernel_that_does_not_tell(void **state)
{
    tly_traffic_enters(f.c, &f.sum);
    f.load_err = -ENOTSUP;
    for (int i = 0; i < 3; i++)
        pass(1500);
    assert_int_equal(f.said, 1);
    assert_non_null(strstr(f.line, "this host"));
    f.c->traffic.is_blind = false;
    f.load_err = 0;
    snprintf(f.peer.name, sizeof f.peer.name, "tallyd 1 on c1");
    for (int i = 0; i < 3; i++)
        look(500, UINT64_MAX);
    assert_int_equal(f.said, 2);
    assert_non_null(strstr(f.line, "tallyd 1 on c1"));
    f.c->traffic.is_blind = false;
    f.c->rank = 1; /* rank 0 has seen it, too */
    look(500, UINT64_MAX);
    assert_int_equal(f.said, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_service_that_lies, begin, end),
        cmocka_unit_test_setup_teardown(test_what_stands_open_is_no_traffic, begin, end),
        cmocka_unit_test_setup_teardown(test_no_traffic, begin, end),
        cmocka_unit_test_setup_teardown(test_a_kernel_that_does_not_tell, begin, end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
