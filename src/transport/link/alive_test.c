/* alive_test.c - what counts as a sign of life: frames, and bytes that wait in the kernel for more to come. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include "base/clock.h"
#include "transport/link/link.h"

#include <cmocka.h>

enum { SILENCE_MS = 1000 };

static struct {
    struct tly_loop loop;
    struct tly_channel channel;
    uint64_t arrived; /* bytes that the kernel has */
    int closed;
} x;

static int load(const struct tly_channel *c, struct tly_link_load *out)
{
    out->arrived = x.arrived;
    return 0;
}

static int64_t nothing_queued(const struct tly_channel *c)
{
    return 0;
}

static int64_t answered_just_now(const struct tly_channel *c)
{
    return 0;
}

static int send_all(struct tly_channel *c, struct tly_packet *packet, uint32_t n)
{
    c->up->handed(c->user, n, TLY_FRAME_BYTES);
    c->up->completed(c->user, n);
    return 0;
}

static void close_channel(struct tly_channel *c)
{
}

static int start(struct tly_channel *c)
{
    return 0;
}

static void on_closed(void *user, struct tly_link *l, int err, const char *why)
{
    x.closed++;
}

static bool on_next(void *user, struct tly_link *l, struct tly_outgoing *out)
{
    return false;
}

static const struct tly_network network = {
    .load = load, .queued = nothing_queued, .unanswered = answered_just_now};
static const struct tly_medium medium = {
    .start = start, .send = send_all, .close = close_channel, .destroy = close_channel, .network = &network};
static const struct tly_link_user user = {.closed = on_closed, .next = on_next};

static struct tly_link *open_link(void)
{
    struct tly_link_config config = {.user_calls = &user, .silence_ns = SILENCE_MS * TLY_MS};
    x.closed = 0;
    x.arrived = 1000;
    assert_int_equal(tly_loop_init(&x.loop), 0);
    x.channel = (struct tly_channel){.medium = &medium};
    struct tly_link *l = tly_link_create(&x.loop, &config, false);
    assert_non_null(l);
    assert_int_equal(tly_link_start(l, &x.channel, NULL), 0);
    while (l->state != TLY_LINK_OPEN)
        tly_link_become(l, l->state + 1);
    return l;
}

static void close_link(struct tly_link *l)
{
    tly_link_destroy(l);
    tly_loop_finish(&x.loop);
}

/* Time passes in ticks; in each, so many bytes come, too few to wake anybody. */
static void pass(struct tly_link *l, int ticks, uint64_t bytes)
{
    for (int i = 0; i < ticks && !x.closed; i++) {
        x.loop.awake += TLY_TICK_MS * TLY_MS;
        x.loop.now += TLY_TICK_MS * TLY_MS;
        x.arrived += bytes;
        tly_link_look_alive(l);
    }
}

static void test_a_trickle_is_no_silence(void **state)
{
    struct tly_link *l = open_link();
    pass(l, 100, 1);
    assert_int_equal(x.closed, 0);
    pass(l, 100, 0);
    assert_int_equal(x.closed, 1);
    close_link(l);
}

static void test_bytes_of_before_are_no_sign_of_life(void **state)
{
    struct tly_link *l = open_link();
    pass(l, SILENCE_MS / TLY_TICK_MS + 1, 0);
    assert_int_equal(x.closed, 1);
    close_link(l);
}

/* A tallyd that is asked for a sign of life answers behind its payload, which trickles. */
static void test_a_trickle_answers_a_question(void **state)
{
    struct tly_link *l = open_link();
    bool reached;
    for (int i = 0; i < 100; i++) {
        pass(l, 1, 1);
        assert_true(tly_link_await(l, true));
        assert_true(tly_link_unanswered(l, &reached) <= 2 * TLY_TICK_MS * TLY_MS);
    }
    for (int i = 0; i < 4; i++) {
        pass(l, 1, 0);
        assert_true(tly_link_await(l, true));
    }
    assert_true(tly_link_unanswered(l, &reached) >= 2 * TLY_TICK_MS * TLY_MS);
    close_link(l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_a_trickle_is_no_silence),
                                       cmocka_unit_test(test_bytes_of_before_are_no_sign_of_life),
                                       cmocka_unit_test(test_a_trickle_answers_a_question)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
