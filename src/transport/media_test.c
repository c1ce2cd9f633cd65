/* media_test.c - what only some media do, and which of them is taken: memory that must be announced, faults that are found,
 * what links cost without a medium, the order in which media are tried. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <arpa/inet.h>
#include <errno.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "test/media/ends.h"
#include "test/media/pair.h"
#include "test/media/testing.h"
#include "transport/link/link.h"
#include "transport/tcp/tcp.h"

#include <cmocka.h>

static const struct ends_medium late = {.name = "late", .medium = &tly_late},
                                null = {.name = "null", .medium = &tly_null, .loses = true},
                                tcp = {.name = "tcp", .medium = &tly_tcp, .sockets = true};

static void open_both(void)
{
    ends_dial();
    ends_until(&x.a.opened, 1);
    ends_until(&x.b.opened, 1);
}

/* Memory that nobody has announced is found out. */
static void test_unannounced_memory(void **state)
{
    ends_use(&late);
    tly_pair_facts();
    ends_start(NULL);
    x.withheld = true;
    ends_add(1000, PLACE);
    ends_add(1000, NOWHERE);
    ends_dial();
    ends_until(&x.arrived, 2);
    assert_int_equal(tly_pair_facts().unannounced, 3); /* two are read, one lands */
    ends_stop();
}

/* A set-up that fails ends both links before they are open. */
static void test_setup(void **state)
{
    static const char ended[] = "connection ended while its medium was set up";
    static const struct {
        enum tly_pair_lapse lapse;
        const char *a, *b; /* what each end's user hears */
    } lapses[] = {
        {TLY_PAIR_CANNOT, "a pair is too much", "connection ended in the handshake"},
        {TLY_PAIR_GARBLED, ended, "no pair"},
        {TLY_PAIR_TWICE, ended, "the set-up of its medium twice"},
        {TLY_PAIR_HASTY, ended, "a frame before the medium is set up"},
        {TLY_PAIR_EMPTY, ended, "ready without a set-up of its medium"},
    };
    for (size_t i = 0; i < sizeof lapses / sizeof *lapses; i++) {
        ends_use(&late);
        tly_pair_set_lapse(lapses[i].lapse);
        ends_start(NULL);
        ends_add(100, PLACE);
        ends_dial();
        ends_until(&x.a.closed, 1);
        ends_until(&x.b.closed, 1);
        assert_int_equal(x.a.opened + x.b.opened + x.arrived, 0);
        assert_string_equal(x.a.why, lapses[i].a);
        assert_string_equal(x.b.why, lapses[i].b);
        ends_stop();
    }
    tly_pair_set_lapse(TLY_PAIR_NONE);
}

static int cannot_propose(struct tly_channel *c, uint8_t out[TLY_SETUP_BYTES], const char **why)
{
    *why = "no card here\x1b";
    return -ENODEV;
}

static int propose_something(struct tly_channel *c, uint8_t out[TLY_SETUP_BYTES], const char **why)
{
    out[0] = 1;
    return 1;
}

/* Over a socket the peer hears why this end cannot go on. */
static void test_setup_is_refused_in_words(void **state)
{
    static const struct tly_setup cannot = {.propose = cannot_propose}, can = {.propose = propose_something};
    struct tly_medium of_a = tly_tcp, of_b = tly_tcp;
    of_a.setup = &cannot;
    of_b.setup = &can;
    ends_use(&tcp);
    ends_start(NULL);
    ends_dial();
    while (!x.b.link)
        tly_loop_turn(&x.loop, 1);
    x.a.link->channel->medium = &of_a; /* before the handshake is over */
    x.b.link->channel->medium = &of_b;
    ends_until(&x.a.closed, 1);
    ends_until(&x.b.closed, 1);
    assert_string_equal(x.a.why, "no card here\x1b");
    assert_string_equal(x.b.why, "no card here?");
    assert_int_equal(x.a.err, ENODEV);
    assert_int_equal(x.b.err, ENOTSUP);
    ends_stop();
}

static int spares;

static bool spare_nothing(void *user, struct tly_link *l, uint64_t bytes)
{
    spares++;
    assert_int_equal(bytes, 1000);
    return false;
}

/* An end without memory to spare says so before its medium takes any. */
static void test_setup_without_memory(void **state)
{
    static const struct tly_setup can = {.propose = propose_something};
    struct tly_medium of_both = tly_tcp;
    struct tly_link_user calls = ends_calls;
    of_both.setup = &can;
    of_both.memory = 1000;
    calls.spare = spare_nothing;
    ends_use(&tcp);
    ends_start(NULL);
    ends_dial();
    while (!x.b.link)
        tly_loop_turn(&x.loop, 1);
    assert_int_equal(spares, 0); /* the peer has proved nothing yet */
    x.a.link->channel->medium = x.b.link->channel->medium = &of_both;
    x.b.link->calls = &calls;
    ends_until(&x.a.closed, 1);
    ends_until(&x.b.closed, 1);
    assert_int_equal(spares, 1);
    assert_string_equal(x.a.why, "no memory to spare for its medium (TALLY_MEMORY)");
    assert_int_equal(x.a.err, ENOTSUP);
    assert_int_equal(x.b.err, ENOMEM);
    ends_stop();
}

/* Where there is nothing to set up, words on it are no frame. */
static void test_setup_out_of_place(void **state)
{
    ends_use(&tcp);
    ends_start(NULL);
    open_both();
    struct tly_outgoing o = {.frame = {.type = TLY_SETUP}};
    tly_loop_lock(&x.loop);
    tly_link_append(x.a.link, &o);
    tly_link_push(x.a.link);
    tly_loop_unlock(&x.loop);
    ends_until(&x.b.closed, 1);
    assert_string_equal(x.b.why, "a second handshake");
    ends_stop();
}

/* Nothing is moved, and all is counted. */
static void test_null(void **state)
{
    uint64_t bytes = 0;
    ends_use(&null);
    ends_start(NULL);
    open_both();
    tly_pair_facts();
    tly_loop_lock(&x.loop);
    for (int i = 0; i < 20; i++) {
        ends_add(2000 + (uint32_t)i, i % 2 ? PLACE : BLOCKS);
        bytes += 2000 + (uint64_t)i;
    }
    tly_loop_unlock(&x.loop);
    ends_until(&x.arrived, 20);
    struct tly_pair_facts f = tly_pair_facts();
    assert_true(f.bytes == bytes && f.packets >= 20);
    for (int i = 0; i < 20; i++)
        for (int k = 0; k < 2000; k++)
            assert_int_equal(x.parcels[i].place[k], UNTOUCHED);
    ends_stop();
}

/* --- faults -------------------------------------------------------------------------------------- */

/* Whatever happens on the way: what arrives is whole, in order and where it belongs (test/media/ends.c looks), and either
 * all of it does or the link ends.  Returns how many links have ended. */
static int suffer(const struct tly_medium *inner, const struct tly_faults *faults)
{
    enum { SEEDS = 12, PARCELS = 24 };
    int ended = 0;
    uint32_t happened = 0;
    ends_summed = true;
    for (uint32_t seed = 1; seed <= SEEDS; seed++) {
        static struct ends_medium m = {.name = "fault"};
        m.medium = tly_fault_wrap(inner, faults, seed);
        ends_use(&m);
        ends_start(NULL);
        x.silence_ns = 2 * TLY_SEC;
        for (uint32_t i = 0; i < PARCELS; i++)
            ends_add(i * 977, (enum where)(i % 4));
        ends_dial();
        x.a.link->deadline = x.loop.awake + x.silence_ns; /* a HELLO may be lost */
        while (x.arrived < PARCELS && !x.a.closed && !x.b.closed)
            tly_loop_turn(&x.loop, 2);
        ended += x.arrived < PARCELS;
        happened += tly_fault_count();
        ends_stop();
    }
    ends_summed = false;
    assert_true(happened > 0);
    return ended;
}

static void test_faults(void **state)
{
    static const struct tly_faults all[] = {
        {.drop = 50}, {.duplicate = 50}, {.flip = 50}, {.truncate = 50}, {100, 20, 20, 20, 20}};
    static const struct tly_medium *const inner[] = {&tly_tcp, &tly_late};
    static const struct tly_faults delays = {.delay = 300};
    for (int i = 0; i < 2; i++) {
        tly_pair_facts();
        assert_int_equal(suffer(inner[i], &delays), 0); /* late is not wrong */
        assert_int_equal(tly_pair_facts().unannounced, 0);
        for (size_t k = 0; k < sizeof all / sizeof *all; k++)
            assert_true(suffer(inner[i], &all[k]) > 0);
    }
}

/* --- which medium -------------------------------------------------------------------------------- */

static struct tly_link *try_to(const struct tly_endpoints *to, uint32_t skip, bool by_address, int *err)
{
    struct tly_link *l = NULL;
    struct tly_link_config c = {.user_calls = &ends_calls,
                                .user = &x.a,
                                .identity = ends_identity(7),
                                .peer_name = "b",
                                .skip = skip,
                                .by_address = by_address};
    tly_loop_lock(&x.loop);
    *err = tly_link_dial(&x.loop, to, &c, &l);
    tly_loop_unlock(&x.loop);
    return l;
}

static void test_the_best_that_connects(void **state)
{
    static const struct tly_medium *const two[] = {&tly_late, &tly_tcp, NULL};
    struct tly_endpoints to, stale = {0};
    int err;
    ends_use(&tcp);
    tly_media = two;
    ends_start(NULL);
    tly_listener_endpoints(x.listener, &to);
    assert_int_equal(to.count, 2);
    assert_string_equal(tly_media_name(0), "late");
    assert_string_equal(tly_media_name(1), "tcp");
    assert_null(tly_media_name(2));

    struct tly_link *l = try_to(&to, 0, false, &err);
    assert_string_equal(tly_link_medium(l), "late");
    uint32_t worse = tly_link_skip(l, &to);
    assert_int_equal(worse, 1);
    tly_link_destroy(l);
    l = try_to(&to, worse, false, &err);
    assert_string_equal(tly_link_medium(l), "tcp");
    assert_int_equal(tly_link_skip(l, &to), 0);
    tly_link_destroy(l);
    l = try_to(&to, 0, true, &err); /* over the network alone */
    assert_string_equal(tly_link_medium(l), "tcp");
    tly_link_destroy(l);

    assert_int_equal(tly_endpoints_add(&stale, "late", "nowhere"), 0); /* it does not connect: the next one */
    assert_int_equal(tly_endpoints_add(&stale, "tcp", tly_endpoints_where(&to, "tcp")), 0);
    l = try_to(&stale, 0, false, &err);
    assert_string_equal(tly_link_medium(l), "tcp");
    tly_link_destroy(l);
    stale.count = 1;
    assert_null(try_to(&stale, 0, false, &err));
    assert_int_equal(err, -ECONNREFUSED);
    snprintf(stale.at[0].text, TLY_ENDPOINT, "unheard:of");
    assert_null(try_to(&stale, 0, false, &err));
    assert_int_equal(err, -EHOSTUNREACH);
    ends_stop();
}

static void test_endpoints(void **state)
{
    struct tly_endpoints e = {0}, back;
    struct sockaddr_storage a, host;
    char text[TLY_HOST_TEXT];
    assert_int_equal(tly_endpoints_add(&e, "near", "by"), 0);
    assert_false(tly_endpoints_address(&e, &a));
    assert_int_equal(tly_endpoints_host(&e, text), 0);
    assert_string_equal(text, "");
    assert_int_equal(tly_endpoints_add(&e, "tcp", "[::]:4001"), 0);
    assert_int_equal(tly_endpoints_host(&e, text), 4001);
    assert_string_equal(text, "::");
    assert_int_equal(tly_endpoints_add(&e, "far", "10.0.0.1:5"), 0);

    struct tly_writer w = {0};
    tly_endpoints_write(&w, &e);
    for (size_t n = 0; n <= w.len; n++) {
        struct tly_reader r = {w.data, n, false};
        assert_int_equal(tly_endpoints_read(&r, &back), n < w.len ? -EPROTO : 0);
    }
    assert_memory_equal(&back, &e, sizeof e);
    free(w.data);

    assert_true(tly_endpoints_address(&e, &a));
    memset(&host, 0, sizeof host);
    host.ss_family = AF_INET;
    ((struct sockaddr_in *)&host)->sin_addr.s_addr = htonl(0x0a000007);
    tly_endpoints_place(&e, &host);
    assert_string_equal(tly_endpoints_where(&e, "near"), "by");
    assert_string_equal(tly_endpoints_where(&e, "tcp"), "10.0.0.7:4001");
    assert_string_equal(tly_endpoints_where(&e, "far"), "10.0.0.7:5");
    assert_null(tly_endpoints_where(&e, "fa"));
    assert_int_equal(tly_endpoints_add(&e, "one", "more"), 0);
    assert_int_equal(tly_endpoints_add(&e, "too", "many"), -ENOSPC);

    static const char *const odd[] = {"", "tcp", "tcp:", ":by", "Tcp:by", "tcp:a b"};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        struct tly_writer bad = {0};
        tly_write32(&bad, 1);
        tly_write_text(&bad, odd[i]);
        struct tly_reader r = {bad.data, bad.len, false};
        assert_int_equal(tly_endpoints_read(&r, &back), -EPROTO);
        free(bad.data);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unannounced_memory),
        cmocka_unit_test(test_setup),
        cmocka_unit_test(test_setup_is_refused_in_words),
        cmocka_unit_test(test_setup_without_memory),
        cmocka_unit_test(test_setup_out_of_place),
        cmocka_unit_test(test_null),
        cmocka_unit_test(test_faults),
        cmocka_unit_test(test_the_best_that_connects),
        cmocka_unit_test(test_endpoints),
    };
    if (sodium_init() < 0)
        return 1;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
