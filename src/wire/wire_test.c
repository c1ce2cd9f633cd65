/* wire_test.c - header round trip and damage, control payloads, handshake. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <sodium.h>
#include <cmocka.h>

#include "wire/frame.h"
#include "wire/hello.h"
#include "wire/pack.h"

static const uint8_t key[16] = "0123456789abcde";

static struct tly_frame sample(void)
{
    return (struct tly_frame){
        .type = TLY_PUSH,
        .flags = TLY_LAST,
        .seq = 7,
        .epoch = 3,
        .key = 0x1122334455667788,
        .spec = ~0ull,
        .count = 1ull << 40,
        .kind = 1,
        .dtype = 2,
        .op = 3,
        .part = 9,
        .place = 1ull << 41,
        .length = 1 << 20,
        .offset = 4096,
        .payload = 1000,
        .round = 5,
        .group = 6,
        .rank = 11,
        .root = 12,
        .priority = -4,
        .prescale = 0.5,
        .postscale = -0.0,
        .accepted = 1,
        .granted = 2,
        .received = 3,
        .stable = 0xffffffff};
}

/* A direction at its beginning. */
static struct tly_context fresh(void)
{
    struct tly_context c;
    tly_context_init(&c);
    return c;
}

static void round_trip(void **state)
{
    struct tly_frame f = sample(), g;
    struct tly_context out = fresh(), in = fresh(), out_again = fresh();
    uint8_t wire[TLY_FRAME_BYTES], again[TLY_FRAME_BYTES];
    const char *why = NULL;
    assert_int_equal(tly_frame_encode(&f, key, &out, wire), TLY_FRAME_BYTES);
    assert_int_equal(tly_frame_size(wire), TLY_FRAME_BYTES);
    assert_int_equal(tly_frame_decode(wire, key, 7, &in, &g, &why), 0);
    assert_int_equal(tly_frame_encode(&g, key, &out_again, again), TLY_FRAME_BYTES);
    assert_memory_equal(wire, again, sizeof wire);
    assert_int_equal(g.place, f.place);
    assert_int_equal(g.priority, -4);
    assert_int_equal(g.stable, 0xffffffff);
}

/* Frames of which only some change the context, both ways told apart by nothing else than the length. */
static void contexts_follow(void **state)
{
    struct tly_frame f = sample(), g;
    struct tly_context out = fresh(), in = fresh();
    static const uint32_t epochs[] = {3, 3, 4, 4, 4, 3, 0, 0, 4};
    const char *why;
    for (uint32_t i = 0; i < sizeof epochs / sizeof epochs[0]; i++) {
        uint8_t wire[TLY_FRAME_BYTES];
        f.seq = i;
        f.part = 100 + i;
        f.epoch = epochs[i];
        bool same = i > 0 && epochs[i] == epochs[i - 1];
        uint32_t size = tly_frame_encode(&f, key, &out, wire);
        assert_int_equal(size, same ? TLY_FRAME_LEAST : TLY_FRAME_BYTES);
        assert_int_equal(tly_frame_size(wire), size);
        memset(wire + size, 0xa5, sizeof wire - size);
        assert_int_equal(tly_frame_decode(wire, key, i, &in, &g, &why), 0);
        assert_int_equal(g.epoch, epochs[i]);
        assert_int_equal(g.part, 100 + i);
        assert_int_equal(g.key, f.key);
        assert_int_equal(g.flags, f.flags);
        assert_float_equal(g.prescale, 0.5, 0);
    }
    struct tly_context other = fresh();
    uint8_t wire[TLY_FRAME_BYTES];
    f.seq = 9;
    assert_int_equal(tly_frame_encode(&f, key, &out, wire), TLY_FRAME_LEAST);
    assert_int_equal(tly_frame_decode(wire, key, 9, &other, &g, &why), -EPROTO);
    assert_string_equal(why, "a header was altered on its way, or comes from elsewhere");
}

static void every_flipped_bit_is_found(void **state)
{
    struct tly_frame f = sample(), g;
    struct tly_context out = fresh(), in = fresh();
    uint8_t wire[TLY_FRAME_BYTES];
    const char *why;
    for (int same = 0; same < 2; same++) {
        struct tly_context before = in;
        int size = (int)tly_frame_encode(&f, key, &out, wire);
        for (int bit = 0; bit < size * 8; bit++) {
            wire[bit / 8] ^= (uint8_t)(1 << bit % 8);
            assert_int_equal(tly_frame_decode(wire, key, 7, &in, &g, &why), -EPROTO);
            assert_memory_equal(&in, &before, sizeof in);
            wire[bit / 8] ^= (uint8_t)(1 << bit % 8);
        }
        assert_int_equal(tly_frame_decode(wire, key, 8, &in, &g, &why), -EPROTO);
        assert_string_equal(why, "a frame out of order");
        assert_int_equal(tly_frame_decode(wire, key, 7, &in, &g, &why), 0);
    }
}

/* Each type has a limit and a way to go, but for the links' own three, which no receiver sees. */
static void every_type_is_in_the_table(void **state)
{
    uint32_t to_nobody = 0;
    for (int t = TLY_HELLO; t < TLY_FRAME_TYPES; t++) {
        bool wanted = false;
        for (enum tly_frame_way w = 0; w < TLY_FRAME_WAYS; w++)
            wanted |= tly_frame_goes(t, w);
        to_nobody += !wanted;
        assert_true(wanted || t == TLY_HELLO || t == TLY_RETURN || t == TLY_SETUP);
        bool tensor = t == TLY_PUSH || t == TLY_RESULT || t == TLY_FINAL;
        assert_int_equal(tly_frame_most(t), tensor ? TLY_MAX_FRAGMENT : TLY_MAX_CONTROL);
    }
    assert_int_equal(to_nobody, 3);
    for (int t = -1; t <= 256; t += t < 0 || t >= TLY_FRAME_TYPES ? 1 : TLY_FRAME_TYPES)
        assert_false(tly_frame_is_type(t) || tly_frame_goes(t, TLY_SERVICE_TO_RANK) || tly_frame_most(t));
}

/* Watchers ask for the status of a service and of a job, and measure the way to a service.  A rank does not. */
static void watchers_have_ways_of_their_own(void **state)
{
    for (int t = TLY_HELLO; t < TLY_FRAME_TYPES; t++) {
        bool alive = t == TLY_COUNTS || t == TLY_BEAT;
        assert_int_equal(tly_frame_goes(t, TLY_WATCHER_TO_SERVICE),
                         alive || t == TLY_STATUS || t == TLY_MEASURE);
        assert_int_equal(tly_frame_goes(t, TLY_WATCHER_TO_COORDINATOR), alive || t == TLY_STATUS);
    }
    assert_false(tly_frame_goes(TLY_MEASURE, TLY_RANK_TO_SERVICE));
    assert_false(tly_frame_goes(TLY_STATUS, TLY_RANK_TO_COORDINATOR));
    assert_false(tly_frame_goes(TLY_COMPLAIN, TLY_TALLYD_TO_COORDINATOR));
    assert_false(tly_frame_goes(TLY_JOINED, TLY_TALLYD_TO_COORDINATOR));
}

static void limits_hold(void **state)
{
    struct tly_frame bad[6], g;
    for (int i = 0; i < 6; i++)
        bad[i] = sample();
    bad[0].payload = TLY_MAX_FRAGMENT + 1;
    bad[1].offset = bad[1].length;
    bad[2].type = TLY_FRAME_TYPES;
    bad[3].place = 1;
    bad[4].rank = TLY_MAX_RANKS;
    bad[5].length = TLY_MAX_PART + 1;
    for (int i = 0; i < 6; i++) {
        struct tly_context out = fresh(), in = fresh();
        uint8_t wire[TLY_FRAME_BYTES];
        const char *why;
        tly_frame_encode(&bad[i], key, &out, wire);
        assert_int_equal(tly_frame_decode(wire, key, 7, &in, &g, &why), -EPROTO);
    }
}

static void counts_wrap(void **state)
{
    assert_int_equal(tly_count_extend(0, 5), 5);
    assert_int_equal(tly_count_extend(0xfffffff0, 0x10), 0x100000010);
    assert_int_equal(tly_count_extend(0x100000010, 0xfffffff0), 0xfffffff0);
}

static void payloads_are_bounded(void **state)
{
    struct tly_writer w = {0};
    char text[8];
    tly_write32(&w, 7);
    tly_write_text(&w, "a\nb\xc2\x9b");
    tly_write_text(&w, "too long for it");
    struct tly_reader r = {w.data, w.len, false};
    assert_int_equal(tly_read32(&r), 7);
    tly_read_text(&r, text, sizeof text);
    assert_string_equal(text, "a?b\xc2?");
    tly_read_text(&r, text, sizeof text);
    assert_true(r.failed);
    assert_string_equal(text, "");
    assert_int_equal(tly_read64(&r), 0);
    free(w.data);
}

static struct tly_identity identity(int role, const char *secret, uint64_t incarnation, const char *job)
{
    struct tly_identity id = {.role = (uint8_t)role, .rank = 3, .incarnation = incarnation};
    tly_hello_secret(secret, id.secret);
    for (int i = 0; job[i]; i++)
        id.job[i] = job[i];
    return id;
}

/* Run a handshake; the first refusal, as each side sees it, is returned. */
static int shake(struct tly_identity a, struct tly_identity b, struct tly_hello *c, struct tly_hello *s)
{
    uint8_t m[TLY_HELLO_BYTES];
    tly_hello_init(c, &a, true);
    tly_hello_init(s, &b, false);
    tly_hello_produce(c, m);
    int err = tly_hello_consume(s, m);
    if (err)
        return err;
    tly_hello_produce(s, m);
    if ((err = tly_hello_consume(c, m)))
        return err;
    tly_hello_produce(c, m);
    return tly_hello_consume(s, m);
}

static void handshake(void **state)
{
    struct tly_hello c, s;
    struct tly_identity a = identity(TLY_ROLE_RANK, "sixteen bytes ok", 0, "j");
    struct tly_identity b = identity(TLY_ROLE_COORDINATOR, "sixteen bytes ok", 99, "j");
    assert_int_equal(shake(a, b, &c, &s), 0);
    assert_memory_equal(c.send_key, s.receive_key, 16);
    assert_memory_equal(c.receive_key, s.send_key, 16);
    assert_memory_not_equal(c.send_key, c.receive_key, 16);
    assert_int_equal(c.peer.incarnation, 99);
    assert_int_equal(s.peer.rank, 3);

    assert_int_equal(shake(identity(1, "another secret!!", 0, "j"), b, &c, &s), -EACCES);
    assert_int_equal(shake(identity(1, "sixteen bytes ok", 0, "k"), b, &c, &s), -ESTALE);
    assert_int_equal(shake(identity(1, "sixteen bytes ok", 98, "j"), b, &c, &s), -ESTALE);
}

static void reflection_and_replay_fail(void **state)
{
    struct tly_identity id = identity(TLY_ROLE_RANK, "sixteen bytes ok", 5, "j");
    struct tly_hello c, s, later;
    uint8_t m1[TLY_HELLO_BYTES], m2[TLY_HELLO_BYTES], m3[TLY_HELLO_BYTES];
    tly_hello_init(&c, &id, true);
    tly_hello_init(&s, &id, false);
    tly_hello_produce(&c, m1);
    tly_hello_consume(&s, m1);
    tly_hello_produce(&s, m2);
    assert_int_equal(tly_hello_consume(&c, m1), -EPROTO); /* its own words back */
    assert_int_equal(tly_hello_consume(&c, m2), 0);
    tly_hello_produce(&c, m3);
    assert_int_equal(tly_hello_consume(&s, m3), 0);
    /* The recorded messages at another connection. */
    tly_hello_init(&later, &id, false);
    assert_int_equal(tly_hello_consume(&later, m1), 0);
    tly_hello_produce(&later, m2);
    assert_int_equal(tly_hello_consume(&later, m3), -EACCES);
    /* The acceptor's MAC is no connector's. */
    uint8_t forged[TLY_HELLO_BYTES];
    __builtin_memcpy(forged, m2, sizeof forged);
    forged[8] = 3;
    tly_hello_init(&later, &id, false);
    tly_hello_consume(&later, m1);
    tly_hello_produce(&later, m2);
    __builtin_memcpy(forged + 288, m2 + 288, 32);
    assert_int_equal(tly_hello_consume(&later, forged), -EACCES);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trip),
        cmocka_unit_test(contexts_follow),
        cmocka_unit_test(every_flipped_bit_is_found),
        cmocka_unit_test(limits_hold),
        cmocka_unit_test(every_type_is_in_the_table),
        cmocka_unit_test(watchers_have_ways_of_their_own),
        cmocka_unit_test(counts_wrap),
        cmocka_unit_test(payloads_are_bounded),
        cmocka_unit_test(handshake),
        cmocka_unit_test(reflection_and_replay_fail)};
    return sodium_init() < 0 || cmocka_run_group_tests(tests, NULL, NULL);
}
