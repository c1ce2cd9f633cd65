/* link_test.c - the contract of transport.h over TCP: frames arrive whole, in order and where they belong, never torn
 * inside a block, however the bytes trickle in; sink, detach, close in each state; bytes that were tampered with.
 *
 * Both ends run in one loop.  A proxy between them cuts the stream into small pieces, flips a bit, hangs up or falls
 * silent at a given byte. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sodium.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "transport/tcp/socket.h"
#include "transport/transport.h"

#include <cmocka.h>

/* --- the proxy ----------------------------------------------------------------------------------- */

struct proxy {
    pthread_t thread;
    int listener, port, target;
    uint32_t largest;                  /* piece */
    int64_t flip_at, cut_at, stall_at; /* bytes from the connector; -1: never */
};

static int listen_anywhere(int *port)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(fd, 4), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &len), 0);
    *port = ntohs(a.sin_port);
    return fd;
}

static bool send_all(int fd, const uint8_t *data, size_t len)
{
    while (len > 0) {
        ssize_t n = send(fd, data, len, MSG_NOSIGNAL);
        if (n <= 0)
            return false;
        data += n;
        len -= (size_t)n;
    }
    return true;
}

/* Forward what `from` has in pieces; false at the end of the stream. */
static bool forward(struct proxy *p, int from, int to, int64_t *at)
{
    uint8_t data[65536];
    ssize_t n = recv(from, data, sizeof data, 0);
    if (n <= 0)
        return false;
    for (ssize_t done = 0; done < n;) {
        size_t piece = 1 + randombytes_uniform(p->largest);
        if ((ssize_t)piece > n - done)
            piece = (size_t)(n - done);
        for (size_t i = 0; at && i < piece; i++) {
            if (*at == p->cut_at) {
                send_all(to, data + done, i);
                return false;
            }
            if (*at == p->stall_at) {
                send_all(to, data + done, i);
                for (;;) /* until the other side has enough of it */
                    if (recv(to, data, sizeof data, 0) <= 0)
                        return false;
            }
            if (*at == p->flip_at)
                data[done + (ssize_t)i] ^= 0x10;
            ++*at;
        }
        if (!send_all(to, data + done, piece))
            return false;
        done += (ssize_t)piece;
    }
    return true;
}

static void *serve(void *arg)
{
    struct proxy *p = arg;
    int64_t at = 0;
    int one = 1;
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons((uint16_t)p->target),
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int near = accept(p->listener, NULL, NULL), far = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (near >= 0 && connect(far, (struct sockaddr *)&a, sizeof a) == 0) {
        setsockopt(near, IPPROTO_TCP, 1 /* TCP_NODELAY */, &one, sizeof one);
        setsockopt(far, IPPROTO_TCP, 1, &one, sizeof one);
        struct pollfd fds[2] = {{.fd = near, .events = POLLIN}, {.fd = far, .events = POLLIN}};
        for (bool open = true; open;) {
            poll(fds, 2, -1);
            if (fds[0].revents)
                open = forward(p, near, far, &at);
            if (open && fds[1].revents)
                open = forward(p, far, near, NULL);
        }
    }
    if (near >= 0)
        close(near);
    close(far);
    close(p->listener);
    return NULL;
}

/* --- the two ends -------------------------------------------------------------------------------- */

enum { MOST = 80, UNTOUCHED = 0xee };
enum where { PLACE, BLOCKS, NOWHERE, CONTROL };

/* A frame that goes from the connector to the acceptor. */
struct parcel {
    uint8_t *payload, *place; /* owned */
    uint32_t len;
    enum where where;
    int sent, landed;
    uint32_t told; /* bytes that landed() has spoken of */
    bool detached, sunk;
};

struct end {
    struct tly_link *link;
    int opened, closed, headers;
    int err;
    char why[160];
    bool destroy_in_opened, destroy_in_header, destroy_in_frame;
};

static bool summed; /* payloads have checksums */

static struct fixture {
    struct tly_loop loop;
    struct tly_listener *listener;
    struct proxy proxy;
    bool proxied;
    struct end a, b; /* connector, acceptor */
    struct parcel parcels[MOST];
    int count, next, arrived;
    uint64_t accepted_seen;
    int alone; /* frames of nothing but counts */
    int64_t silence_ns;
    uint8_t secret;
} x;

static void opened(void *user, struct tly_link *l)
{
    struct end *e = user;
    e->opened++;
    assert_ptr_equal(l, e->link);
    assert_true(tly_link_is_open(l));
    if (e->destroy_in_opened) {
        e->link = NULL;
        tly_link_destroy(l);
    }
}

static int header(void *user, struct tly_link *l, const struct tly_frame *f, struct tly_landing *land,
                  const char **why)
{
    struct end *e = user;
    if (e == &x.a || f->type != TLY_PUSH)
        return 0;
    e->headers++;
    assert_int_equal(f->round, x.arrived); /* in order, and none begins before the last has ended */
    struct parcel *p = &x.parcels[f->round];
    assert_int_equal(f->payload, p->len);
    assert_int_equal(f->key, 0x1234567890abcdefull + f->round);
    if (e->destroy_in_header) {
        e->link = NULL;
        tly_link_destroy(l);
        return 0;
    }
    if (p->where == CONTROL)
        land->control = true;
    else if (p->where != NOWHERE)
        *land = (struct tly_landing){.to = p->place, .token = p, .in_blocks = p->where == BLOCKS};
    return 0;
}

/* What it says has landed is there, and it never says all. */
static void landed(void *user, struct tly_link *l, const struct tly_frame *f, uint32_t bytes)
{
    struct end *e = user;
    if (e == &x.a || f->type != TLY_PUSH)
        return;
    struct parcel *p = &x.parcels[f->round];
    assert_int_equal(f->round, x.arrived);
    assert_true(bytes >= p->told && bytes < p->len);
    if ((p->where == PLACE || p->where == BLOCKS) && !p->sunk)
        assert_memory_equal(p->place, p->payload, bytes);
    p->told = bytes;
}

static int frame(void *user, struct tly_link *l, const struct tly_frame *f, void *data, const char **why)
{
    struct end *e = user;
    if (f->type == TLY_COUNTS) {
        x.alone++;
        x.accepted_seen = f->accepted;
    }
    if (e == &x.a || f->type != TLY_PUSH)
        return 0;
    struct parcel *p = &x.parcels[f->round];
    p->landed++;
    x.arrived++;
    x.accepted_seen = f->accepted;
    if (p->where == NOWHERE || p->sunk)
        assert_null(data);
    else if (p->len)
        assert_memory_equal(data, p->payload, p->len);
    if (p->where == PLACE || (p->where == BLOCKS && !p->sunk))
        for (int i = 0; i < 64; i++)
            assert_int_equal(p->place[p->len + (uint32_t)i], UNTOUCHED);
    if (e->destroy_in_frame) {
        e->link = NULL;
        tly_link_destroy(l);
    }
    return 0;
}

static bool next(void *user, struct tly_link *l, struct tly_outgoing *out)
{
    struct end *e = user;
    if (e != &x.a || x.next == x.count)
        return false;
    struct parcel *p = &x.parcels[x.next];
    *out = (struct tly_outgoing){.frame = {.type = TLY_PUSH,
                                           .key = 0x1234567890abcdefull + (uint64_t)x.next,
                                           .round = (uint32_t)x.next,
                                           .length = p->len,
                                           .payload = p->len},
                                 .payload = p->payload,
                                 .token = p};
    x.next++;
    return true;
}

static void sent(void *user, struct tly_link *l, void *token)
{
    struct parcel *p = token;
    assert_false(p->detached);
    p->sent++;
}

static void closed(void *user, struct tly_link *l, int err, const char *why)
{
    struct end *e = user;
    e->closed++;
    e->err = err;
    strncpy(e->why, why, sizeof e->why - 1);
    tly_link_destroy(l);
    e->link = NULL;
}

static const struct tly_link_user calls = {
    .opened = opened,
    .header = header,
    .landed = landed,
    .frame = frame,
    .next = next,
    .sent = sent,
    .closed = closed};

static void created(void *user, struct tly_link *l)
{
    x.b.link = l;
}

static struct tly_identity identity(uint8_t secret)
{
    struct tly_identity id = {.role = TLY_ROLE_RANK, .rank = 3, .job = "test"};
    memset(id.secret, secret, sizeof id.secret);
    return id;
}

static int accepting(void *user, struct tly_link_config *c)
{
    c->user_calls = &calls;
    c->user = &x.b;
    c->identity = identity(7);
    c->created = created;
    c->silence_ns = x.silence_ns;
    return 0;
}

static void add(uint32_t len, enum where where)
{
    struct parcel *p = &x.parcels[x.count++];
    *p = (struct parcel){.len = len, .where = where, .payload = malloc(len + 1), .place = malloc(len + 64)};
    memset(p->place, UNTOUCHED, len + 64);
    for (uint32_t i = 0; i < len; i++)
        p->payload[i] = (uint8_t)((i * 7 + i / 64 + (uint32_t)x.count) % 200);
}

static void start(const struct proxy *proxy)
{
    memset(&x, 0, sizeof x);
    x.secret = 7;
    assert_int_equal(tly_loop_init(&x.loop), 0);
    struct tly_listener_config lc = {.accepting = accepting};
    assert_int_equal(tly_address_parse("127.0.0.1", 0, &lc.address), 0);
    tly_loop_lock(&x.loop);
    assert_int_equal(tly_tcp_listen(&x.loop, &lc, &x.listener), 0);
    tly_loop_unlock(&x.loop);
    x.proxied = proxy != NULL;
    if (proxy) {
        x.proxy = *proxy;
        x.proxy.target = tly_listener_port(x.listener);
        x.proxy.listener = listen_anywhere(&x.proxy.port);
        assert_int_equal(pthread_create(&x.proxy.thread, NULL, serve, &x.proxy), 0);
    }
}

static void dial(void)
{
    struct sockaddr_storage to;
    uint16_t port = x.proxied ? (uint16_t)x.proxy.port : tly_listener_port(x.listener);
    assert_int_equal(tly_address_parse("127.0.0.1", port, &to), 0);
    struct tly_link_config c = {.user_calls = &calls,
                                .user = &x.a,
                                .identity = identity(x.secret),
                                .peer_name = "b",
                                .checksum = summed};
    tly_loop_lock(&x.loop);
    assert_int_equal(tly_tcp_connect(&x.loop, &to, &c, &x.a.link), 0);
    tly_loop_unlock(&x.loop);
}

static void stop(void)
{
    tly_loop_lock(&x.loop);
    tly_link_destroy(x.a.link);
    tly_link_destroy(x.b.link);
    x.a.link = x.b.link = NULL;
    tly_listener_destroy(x.listener);
    tly_loop_unlock(&x.loop);
    if (x.proxied)
        pthread_join(x.proxy.thread, NULL);
    tly_loop_finish(&x.loop);
    for (int i = 0; i < x.count; i++) {
        free(x.parcels[i].payload);
        free(x.parcels[i].place);
    }
}

/* No block of what lands in blocks is ever in part there. */
static void check_blocks(void)
{
    if (x.arrived == x.count || x.parcels[x.arrived].where != BLOCKS)
        return;
    const struct parcel *p = &x.parcels[x.arrived];
    for (uint32_t at = 0; at < p->len; at += 64) {
        uint32_t n = p->len - at < 64 ? p->len - at : 64, there = 0;
        for (uint32_t i = 0; i < n; i++)
            there += p->place[at + i] != UNTOUCHED;
        if (there != 0 && there != n)
            fail_msg("%u bytes of %u: block at %u has %u of its %u bytes", p->len, p->len, at, there, n);
        if (!there)
            break; /* those behind are later */
    }
}

static void turn_until(const int *what, int value)
{
    for (int i = 0; *what < value; i++) {
        if (i > 60000)
            fail_msg("no progress: %d of %d", *what, value);
        tly_loop_turn(&x.loop, 2);
        check_blocks();
    }
}

/* --- tests --------------------------------------------------------------------------------------- */

static const struct proxy whole = {.largest = 65536, .flip_at = -1, .cut_at = -1, .stall_at = -1},
                          pieces = {.largest = 900, .flip_at = -1, .cut_at = -1, .stall_at = -1},
                          bytes = {.largest = 1, .flip_at = -1, .cut_at = -1, .stall_at = -1};

static void deliver(const struct proxy *proxy, uint32_t largest)
{
    static const uint32_t sizes[] = {0,     1,     63,    64,     65,     127,   128,  129,
                                     4030,  4031,  4096,  4097,   8192,   8255,  9000, 65535,
                                     65536, 65600, 70001, 100003, 262143, 262144};
    start(proxy);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i] <= largest)
            for (enum where w = PLACE; w <= CONTROL && x.count < MOST; w++)
                add(sizes[i], (enum where)((w + i) % 4));
    dial();
    turn_until(&x.arrived, x.count);
    bool told = false;
    for (int i = 0; i < x.count; i++) {
        assert_int_equal(x.parcels[i].sent, 1);
        assert_int_equal(x.parcels[i].landed, 1);
        told |= x.parcels[i].told > 0;
    }
    assert_true(summed ? !told : told || proxy != &pieces); /* nothing has landed before it is verified */
    assert_int_equal(x.a.opened, 1);
    assert_int_equal(x.b.opened, 1);
    assert_int_equal(x.a.closed + x.b.closed, 0);
    assert_int_equal(tly_link_peer(x.b.link)->rank, 3);
    assert_true(tly_link_bytes(x.a.link, true) >= tly_link_bytes(x.b.link, false));
    stop();
}

static void test_directly(void **state)
{
    deliver(NULL, 262144);
}

static void test_in_pieces(void **state)
{
    deliver(&whole, 262144);
    deliver(&pieces, 262144);
}

static void test_byte_by_byte(void **state)
{
    deliver(&bytes, 4097);
}

static void test_with_checksums(void **state)
{
    summed = true;
    deliver(NULL, 262144);
    deliver(&pieces, 262144);
    deliver(&bytes, 4097);
    summed = false;
}

/* A bit flipped anywhere in a payload or its checksum: the connection ends, the frame does not count, and what would
 * have been overwritten is as it was. */
static void test_altered_payload(void **state)
{
    enum {
        HELLOS = 2 * (TLY_FRAME_BYTES + TLY_HELLO_BYTES),
        LEN = 1000,
        TOLD = TLY_FRAME_BYTES + TLY_TRAILER_BYTES
    };
    for (int at = 0; at < LEN + TLY_TRAILER_BYTES; at += at < 64 || at >= LEN - 1 ? 1 : 61) {
        struct proxy p = at % 2 ? pieces : whole;
        p.flip_at = HELLOS + LEN + TOLD + TLY_FRAME_BYTES + at; /* in the second frame */
        summed = true;
        start(&p);
        for (int i = 0; i < 3; i++)
            add(LEN, at % 3 == 0 ? PLACE : at % 3 == 1 ? BLOCKS : CONTROL);
        dial();
        turn_until(&x.b.closed, 1);
        assert_int_equal(x.b.err, EPROTO);
        assert_string_equal(x.b.why, "a payload was altered on its way");
        assert_int_equal(x.arrived, 1);
        for (int i = 0; i < LEN && at % 3 == 1; i++)
            assert_int_equal(x.parcels[1].place[i], UNTOUCHED);
        stop();
    }
    summed = false;
}

/* Counts ride in the frames, and alone when there are none. */
static void test_counts(void **state)
{
    start(NULL);
    dial();
    turn_until(&x.b.opened, 1);
    turn_until(&x.a.opened, 1);
    tly_loop_lock(&x.loop);
    struct tly_counts counts = {.accepted = 0x100000005ull};
    tly_link_set_counts(x.a.link, &counts, 1);
    tly_loop_unlock(&x.loop);
    add(10, PLACE);
    tly_loop_lock(&x.loop);
    tly_link_flush(x.a.link); /* from outside of the loop */
    tly_loop_unlock(&x.loop);
    turn_until(&x.arrived, 1);
    assert_int_equal(x.accepted_seen, 5);
    stop();
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
    start(NULL);
    dial();
    turn_until(&x.b.opened, 1);
    turn_until(&x.a.opened, 1);
    tell(1, 999, 1000, HOUR_MS);
    for (int i = 0; i < 20; i++)
        tly_loop_turn(&x.loop, 1);
    assert_int_equal(x.alone, 0);
    tell(2, 1000, 1000, HOUR_MS);
    turn_until(&x.alone, 1);
    assert_int_equal(x.accepted_seen, 2);
    tell(3, 1, 1000, 1);
    turn_until(&x.alone, 2);
    assert_int_equal(x.accepted_seen, 3);
    stop();
}

/* Whoever landed does not want the rest: nothing of it is written any more, and what follows is well. */
static void test_sink(void **state)
{
    for (int where = PLACE; where <= BLOCKS; where++) {
        start(&bytes);
        add(200000, (enum where)where);
        add(100, BLOCKS);
        dial();
        while (x.parcels[0].place[0] == UNTOUCHED)
            tly_loop_turn(&x.loop, 2);
        assert_int_equal(x.arrived, 0);
        tly_loop_lock(&x.loop);
        tly_link_sink(x.b.link, &x.parcels[1]); /* of somebody else: nothing */
        tly_link_sink(x.b.link, &x.parcels[0]);
        x.parcels[0].sunk = true;
        memset(x.parcels[0].place, UNTOUCHED, 200000);
        tly_loop_unlock(&x.loop);
        turn_until(&x.arrived, 2);
        for (int i = 0; i < 200000; i++)
            assert_int_equal(x.parcels[0].place[i], UNTOUCHED);
        stop();
    }
}

/* Payloads that go away before the medium has taken them arrive as they were. */
static void test_detach(void **state)
{
    start(NULL);
    for (int i = 0; i < MOST; i++)
        add(TLY_MAX_FRAGMENT, i % 2 ? BLOCKS : PLACE); /* 20 MB: more than the kernel takes at once */
    dial();
    turn_until(&x.a.opened, 1);
    tly_loop_lock(&x.loop);
    tly_link_flush(x.a.link); /* the acceptor does not read meanwhile */
    int detached = 0;
    for (int i = 0; i < x.next; i++) {
        struct parcel *p = &x.parcels[i];
        if (p->sent)
            continue;
        uint8_t *copy = malloc(p->len);
        memcpy(copy, p->payload, p->len);
        tly_link_detach(x.a.link, p);
        p->detached = true;
        memset(p->payload, 0xdd, p->len);
        free(p->payload);
        p->payload = copy;
        detached++;
    }
    tly_loop_unlock(&x.loop);
    assert_true(detached > 0);
    turn_until(&x.arrived, MOST);
    stop();
}

static void test_destroy_in_each_state(void **state)
{
    for (int state_ = 0; state_ < 9; state_++) {
        start(&pieces);
        add(5000, BLOCKS);
        add(100000, BLOCKS);
        x.a.destroy_in_opened = state_ == 4;
        x.b.destroy_in_opened = state_ == 5;
        x.b.destroy_in_header = state_ == 6;
        x.b.destroy_in_frame = state_ == 7;
        dial();
        for (int i = 0; state_ == 1 && !x.b.link && i < 10000; i++)
            tly_loop_turn(&x.loop, 1);
        if (state_ == 2)
            turn_until(&x.a.opened, 1);
        if (state_ == 3)
            turn_until(&x.b.headers, 2);
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
                turn_until(&x.b.closed, 1);
        } else if (state_ < 8) {
            turn_until(state_ == 4 ? &x.b.closed : &x.a.closed, 1);
            assert_int_equal(state_ == 4 ? x.a.closed : x.b.closed, 0);
            assert_int_equal(x.arrived, state_ == 7);
        }
        stop();
    }
}

static void test_wrong_secret(void **state)
{
    start(NULL);
    x.secret = 8;
    dial();
    turn_until(&x.a.closed, 1);
    turn_until(&x.b.closed, 1);
    assert_int_equal(x.a.err, EACCES);
    assert_int_equal(x.a.opened + x.b.opened, 0);
    stop();
}

static void test_nobody_there(void **state)
{
    start(NULL);
    int port, fd = listen_anywhere(&port);
    close(fd);
    struct sockaddr_storage to;
    assert_int_equal(tly_address_parse("127.0.0.1", (uint16_t)port, &to), 0);
    struct tly_link_config c = {
        .user_calls = &calls, .user = &x.a, .identity = identity(7), .peer_name = "b"};
    tly_loop_lock(&x.loop);
    int err = tly_tcp_connect(&x.loop, &to, &c, &x.a.link);
    tly_loop_unlock(&x.loop);
    if (err) {
        assert_int_equal(err, -ECONNREFUSED);
    } else {
        turn_until(&x.a.closed, 1);
        assert_int_equal(x.a.err, ECONNREFUSED);
    }
    stop();
}

/* A bit flipped anywhere in a header: the connection ends, and nothing of the frame is believed. */
static void test_flipped_bits(void **state)
{
    enum { HELLOS = 2 * (TLY_FRAME_BYTES + TLY_HELLO_BYTES) };
    for (int at = 0; at < TLY_FRAME_BYTES; at++) {
        struct proxy p = whole;
        p.flip_at = HELLOS + (TLY_FRAME_BYTES + 100) + at; /* in the second frame */
        start(&p);
        add(100, BLOCKS);
        add(100, BLOCKS);
        dial();
        turn_until(&x.b.closed, 1);
        assert_int_equal(x.b.err, EPROTO);
        assert_int_equal(x.arrived, 1);
        assert_int_equal(x.b.headers, 1);
        stop();
    }
    /* And anywhere in the handshake: nobody gets in, but for bytes of the last message that mean nothing. */
    for (int at = 0, third = HELLOS / 2 + TLY_FRAME_BYTES; at < HELLOS;
         at += at >= third && at < third + 32 ? 1 : 8) {
        struct proxy p = whole;
        p.flip_at = at;
        start(&p);
        add(100, BLOCKS);
        dial();
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
        stop();
    }
}

/* The stream ends somewhere: what was whole has arrived, what was not has not. */
static void test_cut_off(void **state)
{
    enum { HELLOS = 2 * (TLY_FRAME_BYTES + TLY_HELLO_BYTES), FRAME = TLY_FRAME_BYTES + 1000 };
    static const int at[] = {1,        127,       128,   129,       128 + 63,     128 + 64,
                             128 + 65, 128 + 999, FRAME, FRAME + 1, 2 * FRAME - 1};
    for (size_t i = 0; i < sizeof at / sizeof *at; i++) {
        struct proxy p = i % 2 ? pieces : whole;
        p.cut_at = HELLOS + at[i];
        start(&p);
        for (int k = 0; k < 3; k++)
            add(1000, BLOCKS);
        dial();
        turn_until(&x.b.closed, 1);
        assert_int_equal(x.b.err, ECONNRESET);
        assert_int_equal(x.arrived, at[i] / FRAME);
        check_blocks();
        stop();
    }
    struct proxy p = whole;
    p.cut_at = 200;
    start(&p);
    dial();
    turn_until(&x.b.closed, 1);
    turn_until(&x.a.closed, 1);
    assert_int_equal(x.a.opened + x.b.opened, 0);
    stop();
}

/* Silent in the middle of a frame: for so long and no longer. */
static void test_silence(void **state)
{
    enum { HELLOS = 2 * (TLY_FRAME_BYTES + TLY_HELLO_BYTES) };
    struct proxy p = whole;
    p.stall_at = HELLOS + 500;
    start(&p);
    x.silence_ns = 600 * TLY_MS;
    add(1000, BLOCKS);
    dial();
    turn_until(&x.b.closed, 1);
    assert_int_equal(x.b.err, ETIMEDOUT);
    assert_int_equal(x.arrived, 0);
    stop();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_directly),
        cmocka_unit_test(test_in_pieces),
        cmocka_unit_test(test_byte_by_byte),
        cmocka_unit_test(test_with_checksums),
        cmocka_unit_test(test_altered_payload),
        cmocka_unit_test(test_counts),
        cmocka_unit_test(test_pace),
        cmocka_unit_test(test_sink),
        cmocka_unit_test(test_detach),
        cmocka_unit_test(test_destroy_in_each_state),
        cmocka_unit_test(test_wrong_secret),
        cmocka_unit_test(test_nobody_there),
        cmocka_unit_test(test_flipped_bits),
        cmocka_unit_test(test_cut_off),
        cmocka_unit_test(test_silence),
    };
    if (sodium_init() < 0)
        return 1;
    return cmocka_run_group_tests_name("link", tests, NULL, NULL);
}
