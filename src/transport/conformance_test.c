/* conformance_test.c - what transport.h and medium.h promise, over each medium that media.c lists, and over those for tests.
 *
 * Frames arrive whole, in order and where they belong, never torn inside a block; counts, detach, close in each state; memory is
 * announced, read until it is sent and not longer, and nothing lands after the end. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <errno.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "test/media/ends.h"
#include "test/media/testing.h"
#include "transport/link/link.h"
#include "transport/rdma/rdma.h"
#include "transport/shm/shm.h"
#include "transport/stream.h"
#include "transport/tcp/tcp.h"

#include <cmocka.h>

static void test_directly(void **state)
{
    ends_deliver(NULL, 262144);
}

/* Counts ride in the frames, and alone when there are none. */
static void test_counts(void **state)
{
    ends_start(NULL);
    ends_dial();
    ends_until(&x.b.opened, 1);
    ends_until(&x.a.opened, 1);
    tly_loop_lock(&x.loop);
    struct tly_counts counts = {.accepted = 0x100000005ull};
    tly_link_set_counts(x.a.link, &counts, 1);
    tly_loop_unlock(&x.loop);
    ends_add(10, PLACE);
    tly_loop_lock(&x.loop);
    tly_link_flush(x.a.link); /* from outside of the loop */
    tly_loop_unlock(&x.loop);
    ends_until(&x.arrived, 1);
    assert_int_equal(x.accepted_seen, 5);
    ends_stop();
}

static void tell(uint64_t accepted, uint32_t news, uint32_t pace_bytes, uint32_t pace_ms)
{
    struct tly_counts counts = {.accepted = accepted};
    tly_loop_lock(&x.loop);
    tly_link_set_pace(x.a.link, pace_bytes, pace_ms);
    tly_link_set_counts(x.a.link, &counts, news);
    tly_loop_unlock(&x.loop);
}

/* They go alone when there is enough news, or when it is old enough, and not before. */
static void test_pace(void **state)
{
    enum { HOUR_MS = 3600000 };
    ends_start(NULL);
    ends_dial();
    ends_until(&x.b.opened, 1);
    ends_until(&x.a.opened, 1);
    tell(1, 999, 1000, HOUR_MS);
    for (int i = 0; i < 20; i++)
        tly_loop_turn(&x.loop, 1);
    assert_int_equal(x.alone, 0);
    tell(2, 1000, 1000, HOUR_MS);
    ends_until(&x.alone, 1);
    assert_int_equal(x.accepted_seen, 2);
    tell(3, 1, 1000, 1);
    ends_until(&x.alone, 2);
    assert_int_equal(x.accepted_seen, 3);
    ends_stop();
}

/* Have the kernel take less of a socket's data than one packet, so that it takes a batch in parts. */
static void take_little(const struct tly_link *l)
{
    if (via->medium != &tly_tcp)
        return; /* a medium of another kind has its own limit */
    int fd = tly_list_entry(l->channel, struct tly_stream, base)->watch.fd, bytes = 16 << 10;
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes), 0);
}

/* Payloads that go away before the medium has taken them arrive as they were. */
static void test_detach(void **state)
{
    ends_start(NULL);
    x.no_loan_is_well = via->copies; /* a segment has 16 MB */
    for (int i = 0; i < MOST; i++)
        ends_add(TLY_MAX_FRAGMENT, i % 2 ? BLOCKS : PLACE); /* 20 MB: more than the kernel takes at once */
    ends_dial();
    take_little(x.a.link);
    ends_until(&x.a.opened, 1);
    tly_loop_lock(&x.loop);
    tly_link_flush(x.a.link); /* the acceptor does not read meanwhile */
    int detached = 0;
    for (int i = 0; i < x.next; i++) {
        struct parcel *p = &x.parcels[i];
        if (!via->lends && p->sent)
            continue;
        tly_link_detach(x.a.link, p);
        p->detached = true;
        memset(p->payload, 0xdd, p->len);
        tly_memory_withdraw(p->payload_memory);
        p->payload_memory = NULL;
        free(p->payload);
        p->payload = NULL;
        detached++;
    }
    tly_loop_unlock(&x.loop);
    assert_true(detached > 0);
    ends_until(&x.arrived, MOST);
    ends_stop();
}

static void test_destroy_in_each_state(void **state)
{
    for (int state_ = 0; state_ < 9; state_++) {
        ends_start(via->sockets ? &proxy_pieces : NULL);
        ends_add(5000, BLOCKS);
        ends_add(100000, BLOCKS);
        x.a.destroy_in_opened = state_ == 4;
        x.b.destroy_in_opened = state_ == 5;
        x.b.destroy_in_header = state_ == 6;
        x.b.destroy_in_frame = state_ == 7;
        ends_dial();
        for (int i = 0; state_ == 1 && !x.b.link && i < 10000; i++)
            tly_loop_turn(&x.loop, 1);
        if (state_ == 2)
            ends_until(&x.a.opened, 1);
        if (state_ == 3)
            ends_until(&x.b.headers, 2);
        struct end before_a = x.a, before_b = x.b;
        if (state_ < 4) {
            tly_loop_lock(&x.loop);
            tly_link_destroy(x.a.link);
            if (state_ != 2) {
                tly_link_destroy(x.b.link);
                x.b.link = NULL;
            }
            x.a.link = NULL;
            tly_loop_unlock(&x.loop);
            for (int i = 0; i < 20; i++)
                tly_loop_turn(&x.loop, 2);
            assert_int_equal(x.a.opened, before_a.opened); /* no callback follows */
            assert_int_equal(x.a.closed, 0);
            if (state_ == 1 || state_ == 3)
                assert_int_equal(x.b.closed + x.b.headers, before_b.closed + before_b.headers);
            if (state_ == 2)
                ends_until(&x.b.closed, 1);
        } else if (state_ < 8) {
            ends_until(state_ == 4 ? &x.b.closed : &x.a.closed, 1);
            assert_int_equal(state_ == 4 ? x.a.closed : x.b.closed, 0);
            assert_int_equal(x.arrived, state_ == 7);
        }
        ends_stop();
    }
}

static void test_wrong_secret(void **state)
{
    ends_start(NULL);
    x.secret = 8;
    ends_dial();
    ends_until(&x.a.closed, 1);
    ends_until(&x.b.closed, 1);
    assert_int_equal(x.a.err, EACCES);
    assert_int_equal(x.a.opened + x.b.opened, 0);
    ends_stop();
}

static void test_nobody_there(void **state)
{
    ends_start(NULL);
    struct tly_endpoints to;
    char where[TLY_ENDPOINT];
    tly_listener_endpoints(x.listener, &to);
    if (via->sockets || via->whole)
        close(proxy_listen(via->lends, tly_endpoints_where(&to, via->medium->scheme), where));
    else
        snprintf(where, sizeof where, "nowhere");
    to.count = 0;
    assert_int_equal(tly_endpoints_add(&to, via->medium->scheme, where), 0);
    struct tly_link_config c = {
        .user_calls = &ends_calls, .user = &x.a, .identity = ends_identity(7), .peer_name = "b"};
    tly_loop_lock(&x.loop);
    int err = tly_link_dial(&x.loop, &to, &c, &x.a.link);
    tly_loop_unlock(&x.loop);
    if (err) {
        assert_int_equal(err, -ECONNREFUSED);
    } else {
        ends_until(&x.a.closed, 1);
        assert_int_equal(x.a.err, ECONNREFUSED);
    }
    ends_stop();
}

/* At each tick the connector awaits a sign of life, and notes for how long there has been none. */
static struct asking {
    struct tly_hook hook;
    int ticks;
    int64_t quiet;
    bool reached, awaited;
} asking;

static void ask(struct tly_hook *h)
{
    asking.ticks++;
    if (!x.a.link || !tly_link_await(x.a.link, asking.awaited))
        return;
    int64_t quiet = tly_link_unanswered(x.a.link, &asking.reached);
    asking.quiet = quiet > asking.quiet || !asking.awaited ? quiet : asking.quiet;
}

static void begin_asking(void)
{
    asking = (struct asking){.hook.tick = ask, .awaited = true};
    ends_until(&x.a.opened, 1);
    ends_until(&x.b.opened, 1);
    tly_loop_lock(&x.loop);
    tly_loop_hook(&x.loop, &asking.hook);
    tly_loop_unlock(&x.loop);
}

/* Whoever is asked for a sign of life gives one, and a beat a tick is all that it costs. */
static void test_signs_of_life(void **state)
{
    ends_start(NULL);
    ends_dial();
    begin_asking();
    uint64_t before = tly_link_bytes(x.a.link, true);
    ends_until(&asking.ticks, 8);
    assert_true(asking.quiet <= 2 * TLY_TICK_MS * TLY_MS);
    uint64_t beats = (tly_link_bytes(x.a.link, true) - before) / TLY_FRAME_LEAST;
    assert_in_range(beats, 2, 2 * 8);
    assert_in_range(tly_link_bytes(x.b.link, true), beats * TLY_FRAME_LEAST, UINT64_MAX);
    assert_true(tly_link_gap(x.a.link) == 0);
    ends_stop();
}

static void test_with_checksums(void **state)
{
    ends_summed = true;
    ends_deliver(NULL, 262144);
    ends_summed = false;
}

/* However far a payload has landed: once its link is destroyed nothing of it lands any more. */
static void test_nothing_lands_after_the_end(void **state)
{
    enum { LEN = 200000, MOST_TURNS = 40 };
    int halfway = 0;
    for (int turns = 0; turns < MOST_TURNS; turns++) {
        uint8_t *before = malloc(LEN);
        ends_start(via->sockets ? &proxy_bytes : NULL);
        x.inside = true;
        ends_add(LEN, turns % 2 ? BLOCKS : PLACE);
        ends_dial();
        ends_until(&x.b.headers, 1);
        for (int i = 0; i < turns && !x.arrived; i++)
            tly_loop_turn(&x.loop, 1);
        halfway += !x.arrived;
        tly_loop_lock(&x.loop);
        tly_link_destroy(x.b.link);
        x.b.link = NULL;
        memcpy(before, x.parcels[0].place, LEN);
        memset(x.parcels[0].payload, 0xdd, turns % 3 ? 0 : LEN); /* the sender may go on as it likes */
        tly_loop_unlock(&x.loop);
        for (int i = 0; i < 20; i++)
            tly_loop_turn(&x.loop, 1);
        assert_memory_equal(x.parcels[0].place, before, LEN);
        ends_stop();
        free(before);
    }
    assert_true(halfway > 0 || via->loses || via->whole);
}

/* ... and once the sender's end is destroyed nobody reads its memory: sanitizers see it if somebody does. */
static void test_nothing_is_read_after_the_end(void **state)
{
    for (int turns = 0; turns < 20; turns++) {
        ends_start(NULL);
        x.no_loan_is_well = true;
        for (int i = 0; i < 3; i++)
            ends_add(200000, i % 2 ? BLOCKS : PLACE);
        ends_dial();
        ends_until(&x.a.opened, 1);
        for (int i = 0; i < turns; i++)
            tly_loop_turn(&x.loop, 1);
        tly_loop_lock(&x.loop);
        tly_link_destroy(x.a.link);
        x.a.link = NULL;
        for (int i = 0; i < 3; i++) {
            free(x.parcels[i].payload);
            x.parcels[i].payload = NULL;
        }
        tly_loop_unlock(&x.loop);
        ends_until(&x.b.closed, 1);
        ends_stop();
    }
}

/* --- over which media ---------------------------------------------------------------------------- */

/* What the tests may do with a medium, where that is more than with any; media that are not here are tested as well. */
static const struct ends_medium known[] = {
    {.name = "tcp", .medium = &tly_tcp, .sockets = true},
    {.name = "memory", .medium = &tly_shm, .sockets = true, .lends = true},
    {.name = "shm", .medium = &tly_shm, .sockets = true, .lends = true, .copies = true},
    {.name = "rdma", .medium = &tly_rdma, .whole = true},
};
/* The media for tests.  What has faults is another medium each time; these faults break no promise. */
static const struct tly_faults delays = {.delay = 200};
static const struct ends_medium for_tests[] = {
    {.name = "late", .medium = &tly_late},
    {.name = "null", .medium = &tly_null, .loses = true},
};
static const struct tly_medium *const wrapped[] = {&tly_tcp, &tly_late};

static const struct ends_medium *current;

static int setup(void **state)
{
    ends_use(current);
    return 0;
}

static int run(const char *name, const struct ends_medium *m)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_directly),
        cmocka_unit_test(test_with_checksums),
        cmocka_unit_test(test_counts),
        cmocka_unit_test(test_pace),
        cmocka_unit_test(test_detach),
        cmocka_unit_test(test_destroy_in_each_state),
        cmocka_unit_test(test_nothing_lands_after_the_end),
        cmocka_unit_test(test_nothing_is_read_after_the_end),
        cmocka_unit_test(test_wrong_secret),
        cmocka_unit_test(test_nobody_there),
        cmocka_unit_test(test_signs_of_life),
    };
    current = m;
    return cmocka_run_group_tests_name(name, tests, setup, NULL);
}

/* One of the library's. */
static int run_over(const struct tly_medium *m)
{
    enum { KNOWN = sizeof known / sizeof *known };
    int failed = 0, found = 0;
    for (int i = 0; i < KNOWN; i++)
        if (known[i].medium == m) {
            failed += run(known[i].name, &known[i]);
            found++;
        }
    const struct ends_medium plain = {.name = m->names[0], .medium = m, .lends = m->lending != NULL};
    return found ? failed : run(plain.name, &plain);
}

int main(void)
{
    const struct tly_medium *const *library = tly_media;
    int failed = 0;
    if (sodium_init() < 0)
        return 1;
    if (getenv("TEST_RDMA")) /* alone; 127.0.0.1 is an address of an RDMA device */
        return run_over(&tly_rdma);
    for (int i = 0; library[i]; i++)
        if (library[i] != &tly_rdma)
            failed += run_over(library[i]);
    for (size_t i = 0; i < sizeof for_tests / sizeof *for_tests; i++)
        failed += run(for_tests[i].name, &for_tests[i]);
    for (size_t i = 0; i < sizeof wrapped / sizeof *wrapped; i++) {
        const struct ends_medium m = {.name = "fault",
                                      .medium = tly_fault_wrap(wrapped[i], &delays, 1),
                                      .sockets = wrapped[i] == &tly_tcp};
        failed += run(i ? "fault around late" : "fault around tcp", &m);
    }
    return failed;
}
