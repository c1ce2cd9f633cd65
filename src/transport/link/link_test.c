/* link_test.c - the contract of transport.h over TCP, and in memory of one and of two processes: frames arrive whole, in
 * order and where they belong, never torn inside a block, however the bytes trickle in; sink, detach, close in each state; bytes that were tampered with.
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
#include <sched.h>
#include <sodium.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"
#include "transport/address.h"
#include "transport/shm/shm.h"
#include "transport/tcp/tcp.h"
#include "transport/transport.h"

#include <cmocka.h>

/* All tests run over each; SHM: as between two processes, with copies in a segment. */
static enum medium { TCP, MEMORY, SHM } medium;

/* --- the proxy ----------------------------------------------------------------------------------- */

struct proxy {
    pthread_t thread;
    int listener;
    char where[TLY_ENDPOINT], target[TLY_ENDPOINT]; /* of endpoints: the proxy's, and that behind it */
    uint32_t largest;                               /* piece */
    int64_t flip_at, cut_at, stall_at;              /* bytes from the connector; -1: never */
};

/* What an endpoint within the machine stands for (shm/shm.c). */
static socklen_t unix_address(const char *where, struct sockaddr_un *a)
{
    *a = (struct sockaddr_un){.sun_family = AF_UNIX};
    snprintf(a->sun_path + 1, sizeof a->sun_path - 1, "tally-service-%s", where);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(a->sun_path + 1));
}

static int next_number(void)
{
    static int last;
    return ++last;
}

/* like: an endpoint of the same machine. */
static int listen_anywhere(const char *like, char where[TLY_ENDPOINT])
{
    if (medium != TCP) {
        struct sockaddr_un u;
        int un = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        snprintf(where, TLY_ENDPOINT, "%.16s%08x%08x", like, (unsigned)getpid(), (unsigned)next_number());
        socklen_t ulen = unix_address(where, &u);
        assert_int_equal(bind(un, (struct sockaddr *)&u, ulen), 0);
        assert_int_equal(listen(un, 4), 0);
        return un;
    }
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(fd, 4), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &len), 0);
    snprintf(where, TLY_ENDPOINT, "127.0.0.1:%u", ntohs(a.sin_port));
    return fd;
}

/* A descriptor that came with bytes goes on with the next of them. */
static int passed = -1;

static ssize_t receive_and_fetch(int fd, uint8_t *data, size_t len)
{
    char control[CMSG_SPACE(sizeof(int))];
    struct iovec iov = {data, len};
    struct msghdr m = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t n = recvmsg(fd, &m, MSG_CMSG_CLOEXEC);
    struct cmsghdr *c = n > 0 ? CMSG_FIRSTHDR(&m) : NULL;
    if (c && c->cmsg_type == SCM_RIGHTS)
        memcpy(&passed, CMSG_DATA(c), sizeof passed);
    return n;
}

static ssize_t pass_on(int fd, const uint8_t *data, size_t len)
{
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec iov = {(void *)data, len};
    struct msghdr m = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof passed);
    memcpy(CMSG_DATA(c), &passed, sizeof passed);
    ssize_t n = sendmsg(fd, &m, MSG_NOSIGNAL);
    close(passed);
    passed = -1;
    return n;
}

static bool send_all(int fd, const uint8_t *data, size_t len)
{
    while (len > 0) {
        ssize_t n = passed >= 0 ? pass_on(fd, data, len) : send(fd, data, len, MSG_NOSIGNAL);
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
    ssize_t n = receive_and_fetch(from, data, sizeof data);
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
    struct sockaddr_storage a;
    struct sockaddr_un u;
    tly_address_read(p->target, &a);
    socklen_t ulen = unix_address(p->target, &u);
    int near = accept(p->listener, NULL, NULL);
    int far = socket(medium == TCP ? AF_INET : AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (near >= 0 && (medium == TCP ? connect(far, (struct sockaddr *)&a, sizeof(struct sockaddr_in))
                                    : connect(far, (struct sockaddr *)&u, ulen)) == 0) {
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

enum { MOST = 80, UNTOUCHED = 0xee, PATIENCE_S = 60 };
enum where { PLACE, BLOCKS, NOWHERE, CONTROL, STAYS };

/* A frame that goes from the connector to the acceptor. */
struct parcel {
    uint8_t *payload, *place; /* owned */
    uint32_t len;
    enum where where;
    int sent, landed;
    uint32_t told; /* bytes that landed() has spoken of */
    bool detached, sunk;
    struct tly_loan *loan; /* where it stays: kept until the test returns it */
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
    bool proxied, inside;        /* inside: payloads go through the socket also in memory */
    bool garbled;                /* what comes need not be what was sent */
    bool no_loan_is_well, gives; /* no room to be shown in; the reader gives back at once */
    struct end a, b;             /* connector, acceptor */
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

/* The first frame's context is its own, and so is every second one's behind that; the others' is that of the one before. */
static uint64_t key_of(int round)
{
    return 0x1234567890abcdefull + ((uint64_t)round + 1) / 2;
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
    p->loan = tly_link_loan(l);
    assert_true(!p->loan == (medium == TCP || x.inside || p->len < 8192) || x.no_loan_is_well);
    assert_int_equal(f->key, key_of((int)f->round));
    if (e->destroy_in_header) {
        e->link = NULL;
        tly_link_destroy(l);
        return 0;
    }
    if (p->where == CONTROL)
        land->control = true;
    else if (p->where == STAYS && p->loan) {
        land->lent = true;
        tly_loan_keep(p->loan);
    } else if (p->where != NOWHERE)
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
    else if (p->len && !x.garbled && !(p->where == STAYS && p->detached))
        assert_memory_equal(data, p->payload, p->len);
    if (p->where == PLACE || (p->where == BLOCKS && !p->sunk))
        for (int i = 0; i < 64; i++)
            assert_int_equal(p->place[p->len + (uint32_t)i], UNTOUCHED);
    if (x.gives) {
        tly_loan_return(p->loan);
        p->loan = NULL;
    }
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
    *out = (struct tly_outgoing){
        .frame = {.type = TLY_PUSH,
                  .key = key_of(x.next),
                  .round = (uint32_t)x.next,
                  .length = p->len,
                  .payload = p->len},
        .payload = p->payload,
        .stays = !x.inside,
        .whole = true,
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
    struct tly_listener_config lc = {.accepting = accepting, .copies = medium == SHM};
    struct tly_endpoints at;
    assert_int_equal(tly_address_parse("127.0.0.1", 0, &lc.address), 0);
    tly_loop_lock(&x.loop);
    assert_int_equal(tly_listen(&x.loop, &lc, &x.listener), 0);
    tly_listener_endpoints(x.listener, &at);
    tly_loop_unlock(&x.loop);
    assert_int_equal(at.count, 1);
    x.proxied = proxy != NULL;
    if (proxy) {
        x.proxy = *proxy;
        snprintf(x.proxy.target, sizeof x.proxy.target, "%s", strchr(at.at[0].text, ':') + 1);
        x.proxy.listener = listen_anywhere(x.proxy.target, x.proxy.where);
        assert_int_equal(pthread_create(&x.proxy.thread, NULL, serve, &x.proxy), 0);
    }
}

static void dial(void)
{
    struct tly_endpoints to = {0};
    struct tly_link_config c = {.user_calls = &calls,
                                .user = &x.a,
                                .identity = identity(x.secret),
                                .peer_name = "b",
                                .copies = medium == SHM,
                                .checksum = summed};
    tly_loop_lock(&x.loop);
    tly_listener_endpoints(x.listener, &to);
    if (x.proxied) {
        to.count = 0;
        assert_int_equal(tly_endpoints_add(&to, tly_media[0]->scheme, x.proxy.where), 0);
    }
    assert_int_equal(tly_link_dial(&x.loop, &to, &c, &x.a.link), 0);
    assert_string_equal(tly_link_medium(x.a.link), medium == TCP ? "tcp" : medium == SHM ? "shm" : "memory");
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
    int64_t patience =
        tly_now() + PATIENCE_S * TLY_SEC; /* a byte may be a turn of its own: they say nothing */
    while (*what < value) {
        if (tly_now() > patience)
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
    assert_true(
        summed ? !told
               : told || proxy != &pieces || medium != TCP); /* nothing has landed before it is verified */
    assert_int_equal(x.a.opened, 1);
    assert_int_equal(x.b.opened, 1);
    assert_int_equal(x.a.closed + x.b.closed, 0);
    assert_int_equal(tly_link_peer(x.b.link)->rank, 3);
    assert_true(tly_link_bytes(x.a.link, true) >= tly_link_bytes(x.b.link, false));
    struct tly_link_load load = {0};
    tly_loop_lock(&x.loop);
    int err = tly_link_load(x.a.link, &load);
    tly_loop_unlock(&x.loop);
    assert_int_equal(err, medium == TCP ? 0 : -ENOTSUP); /* what stays in the machine loads no network */
    if (!err && !proxy) /* all that the other end has taken, it has acknowledged, but for the last of it */
        assert_in_range(load.bytes, tly_link_bytes(x.b.link, false) / 2, 2 * tly_link_bytes(x.b.link, false));
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

/* What the connecting end says before its first frame; the second message has the first one's context. */
enum { HELLOS = TLY_FRAME_BYTES + TLY_FRAME_LEAST + 2 * TLY_HELLO_BYTES };

/* A bit flipped anywhere in a payload or its checksum: the connection ends, the frame does not count, and what would
 * have been overwritten is as it was. */
static void test_altered_payload(void **state)
{
    enum { LEN = 1000, TOLD = TLY_FRAME_BYTES + TLY_TRAILER_BYTES };
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
        x.inside = true;
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
    x.no_loan_is_well = medium == SHM; /* a segment has 16 MB */
    for (int i = 0; i < MOST; i++)
        add(TLY_MAX_FRAGMENT, i % 2 ? BLOCKS : PLACE); /* 20 MB: more than the kernel takes at once */
    dial();
    turn_until(&x.a.opened, 1);
    tly_loop_lock(&x.loop);
    tly_link_flush(x.a.link); /* the acceptor does not read meanwhile */
    int detached = 0;
    for (int i = 0; i < x.next; i++) {
        struct parcel *p = &x.parcels[i];
        if (medium == TCP && p->sent)
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
    struct tly_endpoints to;
    char where[TLY_ENDPOINT];
    tly_listener_endpoints(x.listener, &to);
    close(listen_anywhere(tly_endpoints_where(&to, tly_media[0]->scheme), where));
    to.count = 0;
    assert_int_equal(tly_endpoints_add(&to, tly_media[0]->scheme, where), 0);
    struct tly_link_config c = {
        .user_calls = &calls, .user = &x.a, .identity = identity(7), .peer_name = "b"};
    tly_loop_lock(&x.loop);
    int err = tly_link_dial(&x.loop, &to, &c, &x.a.link);
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
    for (int at = 0; at < TLY_FRAME_BYTES + TLY_FRAME_LEAST; at++) {
        int before =
            at < TLY_FRAME_BYTES ? 1 : 2; /* in the second frame, or in the third, which has no context */
        struct proxy p = whole;
        p.flip_at = HELLOS + before * 100 + TLY_FRAME_BYTES + at;
        start(&p);
        for (int i = 0; i < 3; i++)
            add(100, BLOCKS);
        dial();
        turn_until(&x.b.closed, 1);
        assert_int_equal(x.b.err, EPROTO);
        assert_int_equal(x.arrived, before);
        assert_int_equal(x.b.headers, before);
        stop();
    }
    /* And anywhere in the handshake: nobody gets in, but for bytes of the last message that mean nothing. */
    for (int at = 0, third = HELLOS - TLY_HELLO_BYTES; at < HELLOS;
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
    enum { FRAME = TLY_FRAME_BYTES + 1000 };
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
    turn_until(&x.a.opened, 1);
    turn_until(&x.b.opened, 1);
    tly_loop_lock(&x.loop);
    tly_loop_hook(&x.loop, &asking.hook);
    tly_loop_unlock(&x.loop);
}

/* Whoever is asked for a sign of life gives one, and a beat a tick is all that it costs. */
static void test_signs_of_life(void **state)
{
    start(NULL);
    dial();
    begin_asking();
    uint64_t before = tly_link_bytes(x.a.link, true);
    turn_until(&asking.ticks, 8);
    assert_true(asking.quiet <= 2 * TLY_TICK_MS * TLY_MS);
    uint64_t beats = (tly_link_bytes(x.a.link, true) - before) / TLY_FRAME_LEAST;
    assert_in_range(beats, 2, 2 * 8);
    assert_in_range(tly_link_bytes(x.b.link, true), beats * TLY_FRAME_LEAST, UINT64_MAX);
    assert_true(tly_link_gap(x.a.link) == 0);
    stop();
}

/* ... and whoever is silent is found out, though the kernel there goes on, but only while something is awaited. */
static void test_no_sign_of_life(void **state)
{
    struct proxy p = whole;
    p.stall_at = HELLOS + 10;
    start(&p);
    dial();
    begin_asking();
    for (int i = 1; asking.quiet < 1500 * TLY_MS; i++)
        turn_until(&asking.ticks, i);
    assert_true(asking.reached);
    assert_true(asking.ticks >= 8);
    asking.awaited = false;
    turn_until(&asking.ticks, asking.ticks + 1);
    assert_true(asking.quiet == 0);
    stop();
}

/* --- in memory ----------------------------------------------------------------------------------- */

/* A payload is read where it lies for as long as its reader likes; what goes away meanwhile is read as it was. */
static void test_loans(void **state)
{
    start(NULL);
    for (int i = 0; i < 20; i++)
        add(200000 + (uint32_t)i, STAYS);
    dial();
    turn_until(&x.arrived, 20);
    assert_true(tly_link_bytes(x.a.link, true) < 20 * 400 + 2000);
    tly_loop_lock(&x.loop);
    for (int i = 0; i < 20; i++) {
        struct parcel *p = &x.parcels[i];
        uint8_t *copy = malloc(p->len);
        memcpy(copy, p->payload, p->len);
        if (i % 2)
            tly_link_detach(x.a.link, p);
        if (i % 2 || medium == SHM) { /* of two processes what has been shown is a copy already */
            memset(p->payload, 0xdd, p->len);
            free(p->payload);
            p->payload = copy;
        } else {
            assert_ptr_equal(tly_loan_hold(p->loan), p->payload); /* no copy */
            tly_loan_drop(p->loan);
            free(copy);
        }
        const uint8_t *data = tly_loan_hold(p->loan);
        assert_non_null(data);
        assert_memory_equal(data, p->payload, p->len);
        tly_loan_drop(p->loan);
    }
    /* The sender's end goes away: its memory does, its segment stays for who has it. */
    tly_link_destroy(x.a.link);
    x.a.link = NULL;
    for (int i = 0; i < 20; i++) {
        const uint8_t *data = tly_loan_hold(x.parcels[i].loan);
        if (medium == MEMORY)
            assert_null(data);
        else
            assert_memory_equal(data, x.parcels[i].payload, x.parcels[i].len);
        if (data)
            tly_loan_drop(x.parcels[i].loan);
        if (i % 3)
            tly_loan_return(x.parcels[i].loan);
    }
    tly_loop_unlock(&x.loop);
    turn_until(&x.b.closed, 1);
    for (int i = 0; i < 20; i += 3)
        tly_loan_return(x.parcels[i].loan);
    stop();
}

/* A segment of 16 MB does for any number of bytes, if its reader gives them back; and while he does not, they go
 * through the socket. */
static void test_room_comes_back(void **state)
{
    for (int gives = 0; gives < 2; gives++) {
        start(NULL);
        x.no_loan_is_well = !gives;
        x.gives = gives;
        dial();
        while (x.count < MOST) {
            for (int i = 0; i < MOST / 4; i++)
                add(TLY_MAX_FRAGMENT, STAYS);
            turn_until(&x.arrived, x.count);
        }
        bool all = tly_link_bytes(x.a.link, true) < MOST * 400 + 2000;
        assert_true(all == (gives || medium == MEMORY));
        for (int i = 0; i < MOST; i++)
            if (x.parcels[i].loan)
                tly_loan_return(x.parcels[i].loan);
        stop();
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
    for (int destroy = 0; destroy < 2 && medium == MEMORY; destroy++) {
        start(NULL);
        add(100000, STAYS);
        dial();
        turn_until(&x.arrived, 1);
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
        stop();
    }
}

/* Whatever a reference says: what comes lies in what was shown, or the connection ends. */
static void test_garbled_reference(void **state)
{
    enum { REFERENCE = 24 };
    int refused = 0;
    for (int at = 0; at < REFERENCE; at++) {
        struct proxy p = whole;
        p.flip_at = HELLOS + 2 * TLY_FRAME_BYTES + REFERENCE + at; /* in the second frame */
        start(&p);
        x.garbled = x.no_loan_is_well = true;
        for (int i = 0; i < 3; i++)
            add(100000, BLOCKS);
        dial();
        for (int i = 0; !x.b.closed && x.arrived < 3; i++) {
            assert_true(i < 60000);
            tly_loop_turn(&x.loop, 2);
        }
        refused += x.b.closed;
        assert_int_equal(x.arrived, x.b.closed ? 1 : 3);
        stop();
    }
    assert_true(refused >= (medium == MEMORY ? 8 : 9));
}

static int over_tcp(void **state)
{
    static const struct tly_medium *const only[] = {&tly_tcp, NULL};
    tly_media = only;
    medium = TCP;
    return 0;
}

static int in_memory(void **state)
{
    static const struct tly_medium *const only[] = {&tly_shm, NULL};
    tly_media = only;
    medium = MEMORY;
    return 0;
}

static int between_processes(void **state)
{
    medium = SHM;
    return 0;
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
        cmocka_unit_test(test_signs_of_life),
        cmocka_unit_test(test_no_sign_of_life),
    };
    const struct CMUnitTest local[] = {
        cmocka_unit_test(test_directly),
        cmocka_unit_test(test_in_pieces),
        cmocka_unit_test(test_byte_by_byte),
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
        cmocka_unit_test(test_signs_of_life),
        cmocka_unit_test(test_no_sign_of_life),
        cmocka_unit_test(test_loans),
        cmocka_unit_test(test_room_comes_back),
        cmocka_unit_test(test_taken_back_under_a_reader),
        cmocka_unit_test(test_garbled_reference),
    };
    if (sodium_init() < 0)
        return 1;
    return cmocka_run_group_tests_name("tcp", tests, over_tcp, NULL) +
           cmocka_run_group_tests_name("memory", local, in_memory, NULL) +
           cmocka_run_group_tests_name("shm", local, between_processes, NULL);
}
