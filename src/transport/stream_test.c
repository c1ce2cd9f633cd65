/* stream_test.c - packets over sockets, with a proxy between the ends (test/media/proxy.h): however the bytes trickle in frames
 * arrive whole, and bytes that were tampered with, cut off or held back end the link.  Loans within a machine.  Two ends that
 * one thread serves. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <sodium.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "test/media/ends.h"
#include "transport/link/link.h"
#include "transport/shm/shm.h"
#include "transport/stream.h"
#include "transport/tcp/tcp.h"

#include <cmocka.h>

static void test_in_pieces(void **state)
{
    ends_deliver(&proxy_whole, 262144);
    ends_deliver(&proxy_pieces, 262144);
}

static void test_byte_by_byte(void **state)
{
    ends_deliver(&proxy_bytes, 4097);
}

static void test_with_checksums(void **state)
{
    ends_summed = true;
    ends_deliver(NULL, 262144);
    ends_deliver(&proxy_pieces, 262144);
    ends_deliver(&proxy_bytes, 4097);
    ends_summed = false;
}

/* What the connecting end says before its first frame; the second message has the first one's context. */
enum { HELLOS = TLY_FRAME_BYTES + TLY_FRAME_LEAST + 2 * TLY_HELLO_BYTES };

/* A bit flipped anywhere in a payload or its checksum: the connection ends, the frame does not count, and what would
 * have been overwritten is as it was. */
static void test_altered_payload(void **state)
{
    enum { LEN = 1000, TOLD = TLY_FRAME_BYTES + TLY_TRAILER_BYTES };
    for (int at = 0; at < LEN + TLY_TRAILER_BYTES; at += at < 64 || at >= LEN - 1 ? 1 : 61) {
        struct proxy p = at % 2 ? proxy_pieces : proxy_whole;
        p.flip_at = HELLOS + LEN + TOLD + TLY_FRAME_BYTES + at; /* in the second frame */
        ends_summed = true;
        ends_start(&p);
        for (int i = 0; i < 3; i++)
            ends_add(LEN, at % 3 == 0 ? PLACE : at % 3 == 1 ? BLOCKS : CONTROL);
        ends_dial();
        ends_until(&x.b.closed, 1);
        assert_int_equal(x.b.err, EPROTO);
        assert_string_equal(x.b.why, "a payload was altered on its way");
        assert_int_equal(x.arrived, 1);
        for (int i = 0; i < LEN && at % 3 == 1; i++)
            assert_int_equal(x.parcels[1].place[i], UNTOUCHED);
        ends_stop();
    }
    ends_summed = false;
}

/* Whoever landed does not want the rest: nothing of it is written any more, and what follows is well. */
static void test_sink(void **state)
{
    for (int where = PLACE; where <= BLOCKS; where++) {
        ends_start(&proxy_bytes);
        x.inside = true;
        ends_add(200000, (enum where)where);
        ends_add(100, BLOCKS);
        ends_dial();
        while (x.parcels[0].place[0] == UNTOUCHED)
            tly_loop_turn(&x.loop, 2);
        assert_int_equal(x.arrived, 0);
        tly_loop_lock(&x.loop);
        tly_link_sink(x.b.link, &x.parcels[1]); /* of somebody else: nothing */
        tly_link_sink(x.b.link, &x.parcels[0]);
        x.parcels[0].sunk = true;
        memset(x.parcels[0].place, UNTOUCHED, 200000);
        tly_loop_unlock(&x.loop);
        ends_until(&x.arrived, 2);
        for (int i = 0; i < 200000; i++)
            assert_int_equal(x.parcels[0].place[i], UNTOUCHED);
        ends_stop();
    }
}

/* A bit flipped anywhere in a header: the connection ends, and nothing of the frame is believed. */
static void test_flipped_bits(void **state)
{
    for (int at = 0; at < TLY_FRAME_BYTES + TLY_FRAME_LEAST; at++) {
        int before =
            at < TLY_FRAME_BYTES ? 1 : 2; /* in the second frame, or in the third, which has no context */
        struct proxy p = proxy_whole;
        p.flip_at = HELLOS + before * 100 + TLY_FRAME_BYTES + at;
        ends_start(&p);
        for (int i = 0; i < 3; i++)
            ends_add(100, BLOCKS);
        ends_dial();
        ends_until(&x.b.closed, 1);
        assert_int_equal(x.b.err, EPROTO);
        assert_int_equal(x.arrived, before);
        assert_int_equal(x.b.headers, before);
        ends_stop();
    }
    /* And anywhere in the handshake: nobody gets in, but for bytes of the last message that mean nothing. */
    for (int at = 0, third = HELLOS - TLY_HELLO_BYTES; at < HELLOS;
         at += at >= third && at < third + 32 ? 1 : 8) {
        struct proxy p = proxy_whole;
        p.flip_at = at;
        ends_start(&p);
        ends_add(100, BLOCKS);
        ends_dial();
        for (int i = 0; !x.b.closed && !x.arrived; i++) {
            assert_true(i < 60000);
            tly_loop_turn(&x.loop, 2);
        }
        if (x.b.opened) {
            assert_true(at >= third);
            assert_int_equal(x.arrived, 1);
            assert_int_equal(tly_link_peer(x.b.link)->rank, 3);
            assert_int_equal(tly_link_peer(x.b.link)->role, TLY_ROLE_RANK);
        } else {
            assert_int_equal(x.arrived, 0);
        }
        ends_stop();
    }
}

/* The stream ends somewhere: what was whole has arrived, what was not has not. */
static void test_cut_off(void **state)
{
    enum { FRAME = TLY_FRAME_BYTES + 1000 };
    static const int at[] = {1,        127,       128,   129,       128 + 63,     128 + 64,
                             128 + 65, 128 + 999, FRAME, FRAME + 1, 2 * FRAME - 1};
    int landings = 0;
    for (size_t i = 0; i < sizeof at / sizeof *at; i++) {
        struct proxy p = i % 2 ? proxy_pieces : proxy_whole;
        p.cut_at = HELLOS + at[i];
        ends_start(&p);
        for (int k = 0; k < 3; k++)
            ends_add(1000, i % 3 ? BLOCKS : PLACE);
        ends_dial();
        ends_until(&x.b.closed, 1);
        assert_int_equal(x.b.err, ECONNRESET);
        assert_int_equal(x.arrived, at[i] / FRAME);
        ends_check_blocks();
        /* What has landed can go on from there: no element is in part in place, and all that is said to be is. */
        int into = at[i] % FRAME - TLY_FRAME_BYTES;
        assert_true(x.b.landing % 64 == 0 && (int)x.b.landing <= (into < 0 ? 0 : into));
        if (x.b.landing)
            assert_memory_equal(x.parcels[x.arrived].place, x.parcels[x.arrived].truth, x.b.landing);
        landings += x.b.landing > 0;
        ends_stop();
    }
    assert_true(landings > 0 || via->lends); /* what is shown lands at once */
    struct proxy p = proxy_whole;
    p.cut_at = 200;
    ends_start(&p);
    ends_dial();
    ends_until(&x.b.closed, 1);
    ends_until(&x.a.closed, 1);
    assert_int_equal(x.a.opened + x.b.opened, 0);
    ends_stop();
}

/* Silent in the middle of a frame: for so long and no longer. */
static void test_silence(void **state)
{
    struct proxy p = proxy_whole;
    p.stall_at = HELLOS + 500;
    ends_start(&p);
    x.silence_ns = 600 * TLY_MS;
    ends_add(1000, BLOCKS);
    ends_dial();
    ends_until(&x.b.closed, 1);
    assert_int_equal(x.b.err, ETIMEDOUT);
    assert_int_equal(x.arrived, 0);
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

/* A peer that is silent is found out, though the kernel there goes on, but only while something is awaited. */
static void test_no_sign_of_life(void **state)
{
    struct proxy p = proxy_whole;
    p.stall_at = HELLOS + 10;
    ends_start(&p);
    ends_dial();
    begin_asking();
    for (int i = 1; asking.quiet < 1500 * TLY_MS; i++)
        ends_until(&asking.ticks, i);
    assert_true(asking.reached);
    assert_true(asking.ticks >= 8);
    asking.awaited = false;
    ends_until(&asking.ticks, asking.ticks + 1);
    assert_true(asking.quiet == 0);
    ends_stop();
}

/* The peer reads no more.  The kernel takes all of the batch that has begun, and the next one is not made. */
static void test_a_batch_is_the_kernels(void **state)
{
    enum { LEN = 250000 };
    struct proxy p = proxy_whole;
    p.stall_at = HELLOS + 500;
    ends_start(&p);
    assert_int_equal(setsockopt(x.proxy.listener, SOL_SOCKET, SO_RCVBUF, &(int){4096}, sizeof(int)), 0);
    for (int i = 0; i < 4; i++) /* two to a batch */
        ends_add(LEN, PLACE);
    ends_dial();
    ends_until(&x.sent, 2);
    for (int i = 0; i < 20; i++)
        tly_loop_turn(&x.loop, 1);
    assert_int_equal(x.sent, 2);
    assert_int_equal(x.next, 2);
    assert_int_equal(x.arrived, 0);
    ends_stop();
}

/* A stream whose kernel takes TAKEN bytes of a batch, and then breaks. */
enum { TAKEN = 100 };
static bool lifted;

static ssize_t break_if_lifted(struct tly_stream *s, struct msghdr *m, int flags)
{
    errno = EPIPE;
    return lifted ? -1 : TAKEN;
}

static bool lift(struct tly_stream *s, size_t taken)
{
    assert_int_equal(taken, TAKEN);
    lifted = true;
    return true;
}

static void lower(struct tly_stream *s)
{
    lifted = false;
    errno = 0;
}

static void test_an_error_of_a_rest(void **state)
{
    static const struct tly_stream_io io = {.send = break_if_lifted, .lift = lift, .lower = lower};
    static const uint8_t payload[1000];
    struct tly_packet packet = {.payload = payload, .head = TLY_FRAME_BYTES, .len = sizeof payload};
    struct tly_stream s = {0};
    tly_stream_init(&s, &x.loop, -1, false, &io);
    assert_int_equal(tly_stream_send(&s.base, &packet, 1), -EPIPE);
    assert_false(lifted);
}

/* --- in memory ----------------------------------------------------------------------------------- */

/* A payload is read where it lies for as long as its reader likes; what goes away meanwhile is read as it was. */
static void test_loans(void **state)
{
    ends_start(NULL);
    for (int i = 0; i < 20; i++)
        ends_add(200000 + (uint32_t)i, STAYS);
    ends_dial();
    ends_until(&x.arrived, 20);
    assert_true(tly_link_bytes(x.a.link, true) < 20 * 400 + 2000);
    tly_loop_lock(&x.loop);
    for (int i = 0; i < 20; i++) {
        struct parcel *p = &x.parcels[i];
        if (i % 2)
            tly_link_detach(x.a.link, p);
        if (i % 2 || via->copies) { /* of two processes what has been shown is a copy already */
            memset(p->payload, 0xdd, p->len);
            free(p->payload);
            p->payload = NULL;
        } else {
            assert_ptr_equal(tly_loan_hold(p->loan), p->payload); /* no copy */
            tly_loan_drop(p->loan);
        }
        const uint8_t *data = tly_loan_hold(p->loan);
        assert_non_null(data);
        assert_memory_equal(data, p->truth, p->len);
        tly_loan_drop(p->loan);
    }
    /* The sender's end goes away: its memory does, its segment stays for who has it. */
    tly_link_destroy(x.a.link);
    x.a.link = NULL;
    for (int i = 0; i < 20; i++) {
        const uint8_t *data = tly_loan_hold(x.parcels[i].loan);
        if (!via->copies)
            assert_null(data);
        else
            assert_memory_equal(data, x.parcels[i].truth, x.parcels[i].len);
        if (data)
            tly_loan_drop(x.parcels[i].loan);
        if (i % 3)
            tly_loan_return(x.parcels[i].loan);
    }
    tly_loop_unlock(&x.loop);
    ends_until(&x.b.closed, 1);
    for (int i = 0; i < 20; i += 3)
        tly_loan_return(x.parcels[i].loan);
    ends_stop();
}

/* A segment of 16 MB does for any number of bytes, if its reader gives them back; and while he does not, they go
 * through the socket. */
static void test_room_comes_back(void **state)
{
    for (int gives = 0; gives < 2; gives++) {
        ends_start(NULL);
        x.no_loan_is_well = !gives;
        x.gives = gives;
        ends_dial();
        while (x.count < MOST) {
            for (int i = 0; i < MOST / 4; i++)
                ends_add(TLY_MAX_FRAGMENT, STAYS);
            ends_until(&x.arrived, x.count);
        }
        bool all = tly_link_bytes(x.a.link, true) < MOST * 400 + 2000;
        assert_true(all == (gives || !via->copies));
        for (int i = 0; i < MOST; i++)
            if (x.parcels[i].loan)
                tly_loan_return(x.parcels[i].loan);
        ends_stop();
    }
}

struct holder {
    struct tly_loan *loan;
    atomic_int held, dropped;
};

static void *hold_for_a_while(void *arg)
{
    struct holder *h = arg;
    assert_non_null(tly_loan_hold(h->loan));
    atomic_store(&h->held, 1);
    struct timespec t = {.tv_nsec = 20 * TLY_MS};
    nanosleep(&t, NULL);
    atomic_store(&h->dropped, 1);
    tly_loan_drop(h->loan);
    return NULL;
}

/* Memory is not given back under its reader. */
static void test_taken_back_under_a_reader(void **state)
{
    for (int destroy = 0; destroy < 2 && !via->copies; destroy++) {
        ends_start(NULL);
        ends_add(100000, STAYS);
        ends_dial();
        ends_until(&x.arrived, 1);
        struct holder h = {.loan = x.parcels[0].loan};
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, hold_for_a_while, &h), 0);
        while (!atomic_load(&h.held))
            sched_yield();
        tly_loop_lock(&x.loop);
        if (destroy) {
            tly_link_destroy(x.a.link);
            x.a.link = NULL;
        } else {
            tly_link_detach(x.a.link, &x.parcels[0]);
        }
        assert_true(atomic_load(&h.dropped));
        tly_loop_unlock(&x.loop);
        pthread_join(thread, NULL);
        tly_loan_return(h.loan);
        ends_stop();
    }
}

/* Whatever a reference says: what comes lies in what was shown, or the connection ends. */
static void test_garbled_reference(void **state)
{
    enum { REFERENCE = 24 };
    int refused = 0;
    for (int at = 0; at < REFERENCE; at++) {
        struct proxy p = proxy_whole;
        p.flip_at = HELLOS + 2 * TLY_FRAME_BYTES + REFERENCE + at; /* in the second frame */
        ends_start(&p);
        x.garbled = x.no_loan_is_well = true;
        for (int i = 0; i < 3; i++)
            ends_add(100000, BLOCKS);
        ends_dial();
        for (int i = 0; !x.b.closed && x.arrived < 3; i++) {
            assert_true(i < 60000);
            tly_loop_turn(&x.loop, 2);
        }
        refused += x.b.closed;
        assert_int_equal(x.arrived, x.b.closed ? 1 : 3);
        ends_stop();
    }
    assert_true(refused >= (!via->copies ? 8 : 9));
}

static void assert_mates(void)
{
    struct tly_shm_channel *a = tly_shm_of(x.a.link->channel), *b = tly_shm_of(x.b.link->channel);
    assert_ptr_equal(a->mate, b);
    assert_ptr_equal(b->mate, a);
    assert_int_equal(b->peer.sun_family, AF_UNSPEC); /* which looks for no other one */
}

/* One thread serves both ends, so their bytes go past the socket, also more than an inbox has room for. */
static void test_past_the_socket(void **state)
{
    ends_start(NULL);
    x.inside = true;
    for (int i = 0; i < 12; i++)
        ends_add(200000, (enum where)(i % 4));
    ends_dial();
    ends_until(&x.sent, x.count);
    assert_mates();
    ends_until(&x.arrived, x.count);
    ends_stop();
}

/* What one end has put into the other's inbox arrives, though it closes at once. */
static void test_closed_behind_its_bytes(void **state)
{
    for (enum where w = PLACE; w <= CONTROL; w++) {
        ends_start(NULL);
        x.inside = true;
        ends_add(100, w);
        ends_dial();
        ends_until(&x.arrived, 1);
        assert_mates();
        ends_add(5000, w);
        ends_add(3000, w);
        tly_loop_lock(&x.loop);
        x.a.link->hook.prepare(&x.a.link->hook);
        tly_link_destroy(x.a.link);
        x.a.link = NULL;
        tly_loop_unlock(&x.loop);
        assert_int_equal(x.arrived, 1);
        ends_until(&x.b.closed, 1);
        assert_int_equal(x.arrived, 3);
        ends_stop();
    }
}

/* The ends become mates once the acceptor's loop lodges in the other one.  What lies in the socket then comes first. */
static void test_mates_since_it_lodges(void **state)
{
    struct tly_loop guest;
    assert_int_equal(tly_loop_init(&guest), 0);
    ends_guest = &guest;
    ends_start(NULL);
    x.inside = true;
    ends_add(5000, PLACE);
    ends_dial();
    while (x.arrived < 1) {
        tly_loop_turn(&x.loop, 1);
        tly_loop_turn(&guest, 1);
    }
    assert_null(tly_shm_of(x.a.link->channel)->mate);
    for (int i = 0; i < 3; i++) {
        ends_add(3000, BLOCKS);
        tly_loop_turn(&x.loop, 0); /* into the socket, which nobody reads yet */
    }
    assert_int_equal(x.arrived, 1);
    tly_loop_lock(&x.loop);
    assert_int_equal(tly_loop_lodge(&guest, &x.loop), 0);
    tly_shm_join_lodger(tly_shm_of(x.b.link->channel));
    tly_loop_unlock(&x.loop);
    assert_mates();
    for (int i = 0; i < 3; i++)
        ends_add(100000, (enum where)i);
    ends_until(&x.arrived, x.count);
    ends_until(&x.sent, x.count);
    ends_stop();
    ends_guest = NULL;
}

static int over_tcp(void **state)
{
    static const struct ends_medium m = {.name = "tcp", .medium = &tly_tcp, .sockets = true};
    ends_use(&m);
    return 0;
}

static int in_memory(void **state)
{
    static const struct ends_medium m = {
        .name = "memory", .medium = &tly_shm, .sockets = true, .lends = true};
    ends_use(&m);
    return 0;
}

static int between_processes(void **state)
{
    static const struct ends_medium m = {
        .name = "shm", .medium = &tly_shm, .sockets = true, .lends = true, .copies = true};
    ends_use(&m);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_in_pieces),
        cmocka_unit_test(test_byte_by_byte),
        cmocka_unit_test(test_with_checksums),
        cmocka_unit_test(test_altered_payload),
        cmocka_unit_test(test_sink),
        cmocka_unit_test(test_flipped_bits),
        cmocka_unit_test(test_cut_off),
        cmocka_unit_test(test_silence),
        cmocka_unit_test(test_no_sign_of_life),
        cmocka_unit_test(test_a_batch_is_the_kernels),
        cmocka_unit_test(test_an_error_of_a_rest),
    };
    const struct CMUnitTest local[] = {
        cmocka_unit_test(test_in_pieces),
        cmocka_unit_test(test_byte_by_byte),
        cmocka_unit_test(test_sink),
        cmocka_unit_test(test_flipped_bits),
        cmocka_unit_test(test_cut_off),
        cmocka_unit_test(test_silence),
        cmocka_unit_test(test_no_sign_of_life),
        cmocka_unit_test(test_loans),
        cmocka_unit_test(test_room_comes_back),
        cmocka_unit_test(test_taken_back_under_a_reader),
        cmocka_unit_test(test_garbled_reference),
    };
    const struct CMUnitTest direct[] = {
        cmocka_unit_test(test_past_the_socket),
        cmocka_unit_test(test_closed_behind_its_bytes),
        cmocka_unit_test(test_mates_since_it_lodges),
    };
    if (sodium_init() < 0)
        return 1;
    return cmocka_run_group_tests_name("tcp", tests, over_tcp, NULL) +
           cmocka_run_group_tests_name("direct", direct, in_memory, NULL) +
           cmocka_run_group_tests_name("memory", local, in_memory, NULL) +
           cmocka_run_group_tests_name("shm", local, between_processes, NULL);
}
