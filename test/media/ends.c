/* ends.c - the two ends: what they are asked by their link, and what they check. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "test/media/ends.h"
#include "transport/address.h"
#include "transport/tcp/tcp.h"

#include <cmocka.h>

const struct ends_medium *via;
bool ends_summed;
struct tly_loop *ends_guest;
struct ends x;

void ends_use(const struct ends_medium *m)
{
    static const struct tly_medium *only[2];
    only[0] = m->medium;
    tly_media = only;
    via = m;
}

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
uint64_t ends_key(int round)
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
    assert_true(!p->loan == (!via->lends || x.inside || p->len < 8192) || x.no_loan_is_well);
    assert_int_equal(f->key, ends_key((int)f->round));
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
    if ((p->where == PLACE || p->where == BLOCKS) && !p->sunk && !via->loses)
        assert_memory_equal(p->place, p->truth, bytes);
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
    else if (p->len && !x.garbled && !via->loses && !(p->where == STAYS && p->detached))
        assert_memory_equal(data, p->truth, p->len);
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
                  .key = ends_key(x.next),
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
    x.sent++;
    if (!via->lends || x.inside)
        memset(p->payload, 0xcd, p->len); /* nobody reads it any more */
}

static void closed(void *user, struct tly_link *l, int err, const char *why)
{
    struct end *e = user;
    e->closed++;
    e->err = err;
    strncpy(e->why, why, sizeof e->why - 1);
    tly_link_landing(l, &e->landing);
    tly_link_destroy(l);
    e->link = NULL;
}

const struct tly_link_user ends_calls = {
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

struct tly_identity ends_identity(uint8_t secret)
{
    struct tly_identity id = {.role = TLY_ROLE_RANK, .rank = 3, .job = "test"};
    memset(id.secret, secret, sizeof id.secret);
    return id;
}

static int accepting(void *user, struct tly_link_config *c)
{
    c->user_calls = &ends_calls;
    c->user = &x.b;
    c->identity = ends_identity(7);
    c->created = created;
    c->silence_ns = x.silence_ns;
    return 0;
}

/* Bytes that repeat themselves after PERIOD only.  A sanitizer looks at each that is written singly. */
static void fill(uint8_t *bytes, uint32_t len, uint32_t salt)
{
    enum { PERIOD = 64 * 200 };
    for (uint32_t i = 0; i < len && i < PERIOD; i++)
        bytes[i] = (uint8_t)((i * 7 + i / 64 + salt) % 200);
    for (uint32_t i = PERIOD; i < len; i += PERIOD)
        memcpy(bytes + i, bytes, len - i < PERIOD ? len - i : PERIOD);
}

void ends_add(uint32_t len, enum where where)
{
    struct parcel *p = &x.parcels[x.count++];
    *p = (struct parcel){.len = len,
                         .where = where,
                         .payload = malloc(len + 1),
                         .truth = malloc(len + 1),
                         .place = malloc(len + 64)};
    memset(p->place, UNTOUCHED, len + 64);
    fill(p->truth, len, (uint32_t)x.count);
    memcpy(p->payload, p->truth, len);
    if (!x.withheld) {
        assert_int_equal(tly_memory_announce(p->payload, len + 1, &p->payload_memory), 0);
        assert_int_equal(tly_memory_announce(p->place, len + 64, &p->place_memory), 0);
    }
}

void ends_start(const struct proxy *proxy)
{
    memset(&x, 0, sizeof x);
    x.secret = 7;
    assert_int_equal(tly_loop_init(&x.loop), 0);
    struct tly_listener_config lc = {.accepting = accepting, .copies = via->copies};
    struct tly_endpoints at;
    assert_int_equal(tly_address_parse("127.0.0.1", 0, &lc.address), 0);
    tly_loop_lock(&x.loop);
    assert_int_equal(tly_listen(ends_guest ? ends_guest : &x.loop, &lc, &x.listener), 0);
    tly_listener_endpoints(x.listener, &at);
    tly_loop_unlock(&x.loop);
    assert_true(at.count >= 1);
    x.proxied = proxy != NULL;
    if (proxy) {
        x.proxy = *proxy;
        x.proxy.local = via->lends;
        snprintf(x.proxy.target, sizeof x.proxy.target, "%s", strchr(at.at[0].text, ':') + 1);
        x.proxy.listener = proxy_listen(x.proxy.local, x.proxy.target, x.proxy.where);
        assert_int_equal(pthread_create(&x.proxy.thread, NULL, proxy_serve, &x.proxy), 0);
    }
}

void ends_dial(void)
{
    struct tly_endpoints to = {0};
    struct tly_link_config c = {.user_calls = &ends_calls,
                                .user = &x.a,
                                .identity = ends_identity(x.secret),
                                .peer_name = "b",
                                .copies = via->copies,
                                .checksum = ends_summed};
    tly_loop_lock(&x.loop);
    tly_listener_endpoints(x.listener, &to);
    if (x.proxied) {
        to.count = 0;
        assert_int_equal(tly_endpoints_add(&to, via->medium->scheme, x.proxy.where), 0);
    }
    assert_int_equal(tly_link_dial(&x.loop, &to, &c, &x.a.link), 0);
    assert_string_equal(tly_link_medium(x.a.link), via->name);
    tly_loop_unlock(&x.loop);
}

void ends_stop(void)
{
    tly_loop_lock(&x.loop);
    tly_link_destroy(x.a.link);
    tly_link_destroy(x.b.link);
    x.a.link = x.b.link = NULL;
    tly_listener_destroy(x.listener);
    tly_loop_unlock(&x.loop);
    if (x.proxied)
        pthread_join(x.proxy.thread, NULL);
    if (ends_guest)
        tly_loop_finish(ends_guest);
    tly_loop_finish(&x.loop);
    for (int i = 0; i < x.count; i++) {
        tly_memory_withdraw(x.parcels[i].payload_memory);
        tly_memory_withdraw(x.parcels[i].place_memory);
        free(x.parcels[i].payload);
        free(x.parcels[i].truth);
        free(x.parcels[i].place);
    }
}

/* No block of what lands in blocks is ever in part there. */
void ends_check_blocks(void)
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

void ends_until(const int *what, int value)
{
    int64_t patience =
        tly_now() + PATIENCE_S * TLY_SEC; /* a byte may be a turn of its own: they say nothing */
    while (*what < value) {
        if (tly_now() > patience)
            fail_msg("no progress: %d of %d", *what, value);
        tly_loop_turn(&x.loop, 2);
        ends_check_blocks();
    }
}

void ends_deliver(const struct proxy *proxy, uint32_t largest)
{
    static const uint32_t sizes[] = {0,     1,     63,    64,     65,     127,   128,  129,
                                     4030,  4031,  4096,  4097,   8192,   8255,  9000, 65535,
                                     65536, 65600, 70001, 100003, 262143, 262144};
    ends_start(proxy);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i] <= largest)
            for (enum where w = PLACE; w <= CONTROL && x.count < MOST; w++)
                ends_add(sizes[i], (enum where)((w + i) % 4));
    ends_dial();
    ends_until(&x.arrived, x.count);
    ends_until(&x.sent, x.count);
    bool told = false;
    for (int i = 0; i < x.count; i++) {
        assert_int_equal(x.parcels[i].sent, 1);
        assert_int_equal(x.parcels[i].landed, 1);
        told |= x.parcels[i].told > 0;
    }
    /* Nothing has landed before it is verified.  Inside a machine there are no checksums. */
    assert_true(ends_summed ? !told || via->medium->inside
                            : told || proxy != &proxy_pieces || via->medium != &tly_tcp);
    assert_int_equal(x.a.opened, 1);
    assert_int_equal(x.b.opened, 1);
    assert_int_equal(x.a.closed + x.b.closed, 0);
    assert_int_equal(tly_link_peer(x.b.link)->rank, 3);
    assert_true(tly_link_bytes(x.a.link, true) >= tly_link_bytes(x.b.link, false));
    struct tly_link_load load = {0};
    tly_loop_lock(&x.loop);
    int err = tly_link_load(x.a.link, &load);
    tly_loop_unlock(&x.loop);
    assert_int_equal(err,
                     via->medium->network ? 0 : -ENOTSUP); /* what stays in the machine loads no network */
    if (!err && !proxy) /* all that the other end has taken, it has acknowledged, but for the last of it */
        assert_in_range(load.bytes, tly_link_bytes(x.b.link, false) / 2, 2 * tly_link_bytes(x.b.link, false));
    ends_stop();
}
