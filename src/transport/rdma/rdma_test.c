/* rdma_test.c - what the other end may do wrong over a queue pair, or to it: the connection ends, with a reason.
 *
 * It needs an RDMA device that has the address 127.0.0.1, and TEST_RDMA=1 says that there is one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "test/media/ends.h"
#include "transport/link/link.h"
#include "transport/rdma/rdma.h"
#include "wire/pack.h"

#include <cmocka.h>

static const struct ends_medium rdma = {.name = "rdma", .medium = &tly_rdma, .whole = true};

static struct tly_rdma_channel *open_both(void)
{
    ends_use(&rdma);
    ends_start(NULL);
    ends_dial();
    ends_until(&x.a.opened, 1);
    ends_until(&x.b.opened, 1);
    return tly_rdma_of(x.a.link->channel);
}

/* Post it as the end itself would.  len: of the message in m, or of what lies behind it. */
static void post(struct tly_rdma_channel *r, struct tly_ibv_send_wr *wr, const uint8_t *m, uint32_t len)
{
    uint8_t *slot = r->own.data + (size_t)TLY_RDMA_RECEIVES * TLY_RDMA_MESSAGE;
    struct tly_ibv_sge s = {(uintptr_t)slot, len, r->own.mr->lkey};
    struct tly_ibv_send_wr *bad;
    tly_loop_lock(&x.loop);
    if (m)
        memcpy(slot, m, len);
    wr->wr_id = r->sent;
    wr->sg_list = &s;
    wr->num_sge = 1;
    wr->send_flags = TLY_IBV_SEND_SIGNALED;
    r->written[r->sent % TLY_RDMA_SENDS] = r->bytes[r->sent % TLY_RDMA_SENDS] = 0;
    r->sent++;
    assert_int_equal(tly_ibv_post_send(r->qp, wr, &bad), 0);
    tly_loop_unlock(&x.loop);
}

static void send_message(struct tly_rdma_channel *r, const uint8_t *m, uint32_t len)
{
    struct tly_ibv_send_wr wr = {.opcode = TLY_IBV_WR_SEND};
    post(r, &wr, m, len);
}

static uint8_t *put_head(uint8_t *m, uint32_t posted, uint32_t place, uint64_t freed)
{
    return tly_put64(tly_put32(tly_put32(m, posted), place), freed);
}

static void expect(const char *why)
{
    ends_until(&x.b.closed, 1);
    assert_string_equal(x.b.why, why);
    ends_until(&x.a.closed, 1);
    ends_stop();
}

static void test_messages_that_cannot_be(void **state)
{
    static const char cannot[] = "a message of RDMA that cannot be";
    uint8_t m[TLY_RDMA_HEAD + 20] = {0};
    struct tly_rdma_channel *r = open_both();
    send_message(r, m, TLY_RDMA_HEAD - 1);
    expect(cannot);

    r = open_both();
    put_head(m, r->posted + TLY_RDMA_RECEIVES + 1, TLY_RDMA_NO_PLACE,
             0); /* more receives than there can be */
    send_message(r, m, TLY_RDMA_HEAD);
    expect(cannot);

    r = open_both();
    put_head(m, r->posted, TLY_RDMA_NO_PLACE, 1); /* a place that nobody has used */
    send_message(r, m, TLY_RDMA_HEAD);
    expect(cannot);

    r = open_both();
    put_head(m, r->posted, TLY_RDMA_NO_PLACE, 0);
    send_message(r, m, sizeof m);
    expect("a frame in part");
}

/* A frame of the link's, with a payload of `len` bytes that are said to lie in this place. */
static void claim(uint32_t len, uint32_t place, uint32_t extra)
{
    uint8_t m[TLY_RDMA_MESSAGE] = {0};
    struct tly_rdma_channel *r = open_both();
    struct tly_outgoing o = {.frame = {.type = TLY_BEAT, .payload = len}};
    tly_link_append(x.a.link, &o);
    const struct tly_packet *p =
        &x.a.link->packet[--x.a.link->made % TLY_PACKETS]; /* it goes this way instead */
    uint8_t *end = put_head(m, r->posted, place, 0);
    memcpy(end, p->header, p->head);
    send_message(r, m, TLY_RDMA_HEAD + p->head + extra);
    expect("a payload outside of its places");
}

static void test_places_that_are_not(void **state)
{
    claim(100, TLY_RDMA_PLACES, 0);
    claim(TLY_RDMA_PLACE + 1, TLY_RDMA_PLACES - 1, 0); /* past the last one */
    claim(0, 0, 0);                                    /* for nothing */
    claim(100, 0, 1);                                  /* with something besides */
    claim(100, TLY_RDMA_NO_PLACE, 99);                 /* in the message, but not all of it */
}

/* The card refuses: the end that does it hears why. */
static void test_the_card_refuses(void **state)
{
    struct tly_rdma_channel *r = open_both();
    struct tly_ibv_send_wr wr = {.opcode = TLY_IBV_WR_RDMA_WRITE};
    wr.wr.rdma.remote_addr = r->peer_places + (uint64_t)TLY_RDMA_PLACES * TLY_RDMA_PLACE - 8;
    wr.wr.rdma.rkey = r->peer_key;
    post(r, &wr, NULL, 9);
    ends_until(&x.a.closed, 1);
    assert_non_null(strstr(x.a.why, "RDMA on "));
    assert_non_null(
        strstr(x.a.why, "GID ::ffff:127.0.0.1: remote access error (the peer's memory is no longer there)"));
    ends_until(&x.b.closed, 1);
    ends_stop();

    r = open_both();
    wr.wr.rdma.remote_addr = r->peer_places;
    wr.wr.rdma.rkey = r->peer_key + 1;
    post(r, &wr, NULL, 8);
    ends_until(&x.a.closed, 1);
    assert_non_null(strstr(x.a.why, "remote access error"));
    ends_until(&x.b.closed, 1);
    bool says = strstr(x.b.why, "(the peer wrote where it may not)");
    if (!says && !strstr(x.b.why, "(the queue pair has failed before)")) /* Soft-RoCE has no event for it */
        fail_msg("%s", x.b.why);
    ends_stop();

    r = open_both();
    /* The key belongs to another connection through the same device: it names this end's own place. */
    wr.wr.rdma.remote_addr = (uintptr_t)r->places.data;
    wr.wr.rdma.rkey = r->places.mr->rkey;
    post(r, &wr, NULL, 8);
    ends_until(&x.a.closed, 1);
    assert_non_null(strstr(x.a.why, "remote access error"));
    ends_until(&x.b.closed, 1);
    ends_stop();

    r = open_both();
    send_message(r, NULL, TLY_RDMA_MESSAGE + 1); /* no receive is that long */
    ends_until(&x.b.closed, 1);
    ends_until(&x.a.closed, 1);
    ends_stop();
}

static void test_bytes_through_the_socket(void **state)
{
    const struct tly_rdma_channel *r = open_both();
    assert_int_equal(send(r->stream.watch.fd, "x", 1, MSG_NOSIGNAL), 1);
    expect("Protocol error");
}

/* One direction alone, far more than there are receives and places: news of both goes back without frames. */
static void test_one_direction(void **state)
{
    struct tly_rdma_channel *r = open_both();
    for (int round = 0; round < 4; round++) {
        tly_loop_lock(&x.loop);
        for (int i = 0; i < 20; i++)
            ends_add(i % 3 ? 100 : 200000, PLACE);
        tly_loop_unlock(&x.loop);
        ends_until(&x.arrived, x.count);
    }
    assert_true(r->sent > TLY_RDMA_RECEIVES);
    assert_int_equal(x.a.closed + x.b.closed, 0);
    ends_stop();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_messages_that_cannot_be), cmocka_unit_test(test_places_that_are_not),
        cmocka_unit_test(test_the_card_refuses),        cmocka_unit_test(test_bytes_through_the_socket),
        cmocka_unit_test(test_one_direction),
    };
    if (!getenv("TEST_RDMA")) {
        printf("no RDMA device is known to have the address 127.0.0.1 (TEST_RDMA)\n");
        return 0;
    }
    if (sodium_init() < 0)
        return 1;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
