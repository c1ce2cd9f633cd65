/* link.c - frames over a TCP connection, or a Unix socket on one machine: handshake, receive straight into place, send
 * by pull.
 *
 * Receiving: headers pass through a small stage buffer; a payload is read by readv() directly to where it
 * belongs, with the stage behind it to catch the next header in the same call.  What of a payload is in the
 * stage already is copied (at most its size).
 * Sending: next() fills a batch of frames, sendmsg() takes headers and payloads from where they lie.
 *
 * With checksums a payload is followed by its own.  What would land over something that is still needed (a result
 * over its input) lands beside it then, and moves once it has proved whole.  The acceptor does as the connector.
 *
 * On one machine (l->shm) most payloads are not sent: a reference follows the header, and header() is called when that
 * has come (take_shown).  What stays inside the machine has no checksums. */
#include <arpa/inet.h>
#include <errno.h>
#include <linux/sockios.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/uio.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/fail.h"
#include "base/fork.h"
#include "base/log.h"
#include "transport/shm/shm.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/strangers.h"
#include "transport/transport.h"

enum {
    STAGE_BYTES = 4096,
    BATCH = 32,              /* frames a sendmsg */
    BATCH_BYTES = 256 << 10, /* ... and about so many bytes */
    TURN_BYTES = 2 << 20,    /* received for one wake-up; then others have their turn */
    HANDSHAKE_NS_MS = 5000,
    CONNECT_MS = 10000,
    BEAT_MS = 1000, /* on a connection with nothing else to send; asked for, beats come at each tick */
    GAP_MS = 2000,
    RECENT_S = 10,
    PACE_BYTES = 256 << 10, /* counts go alone after so much news, */
    PACE_MS = 5,            /* or so long, unless the user has said otherwise */
};

struct outgoing {
    uint8_t header[TLY_FRAME_BYTES];
    uint32_t head; /* bytes of the header that are sent */
    const uint8_t *payload;
    uint32_t len;
    uint32_t type;
    uint32_t trailer_len; /* 0: no checksum */
    uint8_t trailer[TLY_TRAILER_BYTES];
    void *token, *owned;
    uint8_t reference[TLY_REFERENCE_BYTES]; /* instead of the payload */
};

enum state { CONNECTING, SHAKING, OPEN, CLOSED };

/* Owner: the loop. */
struct tly_link {
    struct tly_loop *loop; /* borrowed */
    struct tly_watch watch;
    struct tly_hook hook;
    const struct tly_link_user *calls;
    void *user;
    char name[128];
    enum state state;
    uint32_t events; /* what epoll watches for */
    bool destroyed;  /* by its user, inside a callback; freed when the callback has returned */
    int depth;       /* callbacks in progress */

    struct tly_hello hello;
    struct tly_shm *shm; /* owned; NULL: over TCP */

    struct tly_strangers *strangers; /* borrowed: the listener's, while this link counts as shaking there */
    int64_t deadline;                /* of the handshake, on the loop's awake clock */
    int64_t silence_ns;
    int64_t last_heard;  /* awake clock */
    int64_t asked_at;    /* awake clock: since when a sign of life is asked for in vain; 0: it is not */
    uint64_t acked;      /* bytes that the peer's kernel had confirmed by the last question */
    int64_t gap, gap_at; /* the last long time in which nothing was heard, and when that ended; awake clock */
    int64_t last_spoken; /* monotonic clock */

    uint8_t stage[STAGE_BYTES];
    uint32_t stage_from, stage_to;
    struct tly_frame in;
    struct tly_landing land;
    uint32_t follows,
        landed;       /* bytes behind the header: in.payload or a reference; how many of them are there */
    uint32_t trailer; /* bytes that follow those: a checksum, or none */
    bool landing;
    uint8_t reference[TLY_REFERENCE_BYTES]; /* what follows, if in.flags has TLY_SHOWN */
    struct tly_loan *loan;                  /* borrowed: of the frame that is being taken */
    uint32_t receive_seq;
    struct tly_context received;
    int low_water;    /* SO_RCVLOWAT now */
    uint8_t *control; /* owned: payload that has no other place */
    bool checksum;    /* what is sent has one */
    uint8_t *beside;  /* owned: where a fragment lies until it is verified; NULL until the first */
    void *verified;   /* where it belongs then; NULL: it is there already */

    struct outgoing out[BATCH];
    int out_from, out_to; /* [from, to) wait for the kernel */
    uint32_t out_done;    /* bytes of out[out_from] that it has */
    uint32_t send_seq;
    struct tly_context sent;
    bool wants_room; /* the kernel was full */

    struct tly_counts counts;
    uint32_t owed_bytes; /* landed since the peer last heard of counts */
    bool owes;
    int64_t owed_since;
    uint32_t pace_bytes;
    int64_t pace_ns;
    uint64_t bytes_sent, bytes_received;
};

static void on_ready(struct tly_watch *w, uint32_t events);
static int64_t on_prepare(struct tly_hook *h);
static void on_tick(struct tly_hook *h);
static void send_more(struct tly_link *l);

/* --- life ---------------------------------------------------------------------------------------- */

static void enter(struct tly_link *l)
{
    l->depth++;
}

static void release(struct tly_link *l)
{
    for (int i = l->out_from; i < l->out_to; i++)
        free(l->out[i].owned);
    free(l->control);
    free(l->beside);
    tly_shm_destroy(l->shm);
    free(l);
}

/* Returns false if the link is gone. */
static bool leave(struct tly_link *l)
{
    /* Inside another callback it is not released: clang 14 forgets `depth` where a user is called. */
    if (--l->depth == 0 && l->destroyed) { /* NOLINT(clang-analyzer-unix.Malloc) */
        release(l);
        return false;
    }
    return !l->destroyed;
}

static void end_handshake(struct tly_link *l)
{
    if (l->strangers)
        l->strangers->shaking--;
    l->strangers = NULL;
}

static void disconnect(struct tly_link *l)
{
    if (l->state == CLOSED)
        return;
    end_handshake(l);
    l->state = CLOSED;
    tly_loop_remove(l->loop, &l->watch);
    tly_loop_unhook(l->loop, &l->hook);
    tly_fd_close(l->watch.fd);
    l->watch.fd = -1;
    if (l->shm)
        tly_shm_close(l->shm);
}

static void end(struct tly_link *l, int err, const char *why)
{
    if (l->state == CLOSED)
        return;
    if (l->strangers)
        tly_strangers_note(l->strangers, l->name, err, why, l->loop->awake);
    disconnect(l);
    l->calls->closed(l->user, l, err, why);
}

void tly_link_destroy(struct tly_link *l)
{
    if (!l)
        return;
    disconnect(l);
    l->destroyed = true;
    if (l->depth == 0)
        release(l);
}

static struct tly_link *create(struct tly_loop *loop, int fd, const struct tly_link_config *c, bool connector)
{
    struct tly_link *l = calloc(1, sizeof *l);
    if (!l)
        return NULL;
    l->loop = loop;
    l->watch = (struct tly_watch){.fd = fd, .ready = on_ready};
    l->hook = (struct tly_hook){.prepare = on_prepare, .tick = on_tick};
    tly_list_init(&l->hook.node);
    l->calls = c->user_calls;
    l->user = c->user;
    snprintf(l->name, sizeof l->name, "%s", c->peer_name ? c->peer_name : "?");
    tly_hello_init(&l->hello, &c->identity, connector);
    l->hello.choose = c->choose;
    l->hello.choose_user = c->user;
    tly_context_init(&l->sent);
    tly_context_init(&l->received);
    l->silence_ns = c->silence_ns;
    l->pace_bytes = PACE_BYTES;
    l->pace_ns = PACE_MS * TLY_MS;
    l->low_water = 1;
    l->last_heard = loop->awake;
    l->last_spoken = loop->now;
    l->deadline = loop->awake + (connector ? CONNECT_MS : HANDSHAKE_NS_MS) * TLY_MS;
    return l;
}

static int start(struct tly_link *l, uint32_t events)
{
    l->events = events;
    int err = tly_loop_add(l->loop, &l->watch, events);
    if (!err)
        tly_loop_hook(l->loop, &l->hook);
    return err;
}

int tly_link_connect(struct tly_loop *loop, int fd, bool local, const struct tly_link_config *c,
                     struct tly_link **out)
{
    struct tly_link *l = create(loop, fd, c, true);
    int err = l ? 0 : tly_fail(ENOMEM, "out of memory");
    if (!err && local)
        err = tly_shm_create(fd, c->copies, &l->shm);
    if (!err) {
        l->checksum = c->checksum && !local;
        l->state = CONNECTING;
        err = start(l, EPOLLOUT);
    }
    if (err) {
        tly_fd_close(fd);
        if (l)
            release(l);
        return err;
    }
    *out = l;
    return 0;
}

int tly_tcp_connect(struct tly_loop *loop, const struct sockaddr_storage *to, const struct tly_link_config *c,
                    struct tly_link **out)
{
    int fd, err = tly_socket_connect(to, &fd);
    return err ? err : tly_link_connect(loop, fd, false, c, out);
}

int tly_link_accept(struct tly_loop *loop, int fd, bool local, const struct tly_link_config *c)
{
    struct tly_link *l = create(loop, fd, c, false);
    if (!l)
        return -ENOMEM;
    l->state = SHAKING;
    int err = local ? tly_shm_create(fd, c->copies, &l->shm) : 0;
    if (!err)
        err = start(l, EPOLLIN);
    if (err) {
        release(l);
        return err;
    }
    l->strangers = c->strangers;
    if (l->strangers)
        l->strangers->shaking++;
    if (c->created)
        c->created(c->user, l);
    return 0;
}

/* --- sending ------------------------------------------------------------------------------------- */

static void watch_for(struct tly_link *l, uint32_t events)
{
    if (events != l->events && l->state != CLOSED) {
        l->events = events;
        tly_loop_change(l->loop, &l->watch, events);
    }
}

static void write_checksum(uint8_t out[TLY_TRAILER_BYTES], const void *payload, uint32_t len, uint32_t seq)
{
    uint64_t sum = htole64(XXH3_64bits_withSeed(payload, len, seq));
    memcpy(out, &sum, sizeof sum);
}

static void append(struct tly_link *l, struct tly_outgoing *o)
{
    struct outgoing *slot = &l->out[l->out_to++];
    tly_fail_at(l->hello.me.role, "sends", o->frame.type);
    bool shown = l->shm && l->state == OPEN && tly_shm_show(l->shm, o, slot->reference);
    if (shown)
        o->frame.flags |= TLY_SHOWN;
    o->frame.seq = l->send_seq++;
    o->frame.accepted = (uint32_t)l->counts.accepted;
    o->frame.granted = (uint32_t)l->counts.granted;
    o->frame.received = (uint32_t)l->counts.received;
    o->frame.stable = (uint32_t)l->counts.stable;
    slot->payload = shown ? slot->reference : o->payload;
    slot->len = shown ? TLY_REFERENCE_BYTES : o->frame.payload;
    slot->type = o->frame.type;
    slot->trailer_len = 0;
    if (l->checksum && l->state == OPEN) {
        o->frame.flags |= TLY_SUMMED;
        if (slot->len) {
            write_checksum(slot->trailer, slot->payload, slot->len, o->frame.seq);
            slot->trailer_len = TLY_TRAILER_BYTES;
        }
    }
    slot->head = tly_frame_encode(&o->frame, l->hello.send_key, &l->sent, slot->header);
    slot->token = o->token;
    slot->owned = o->owned;
    l->owes = false;
    l->owed_bytes = 0;
}

static void fill(struct tly_link *l)
{
    uint32_t bytes = 0;
    while (l->state == OPEN && !l->destroyed && l->out_to < BATCH && bytes < BATCH_BYTES) {
        struct tly_outgoing o = {0};
        if (l->shm && tly_shm_next_return(l->shm, &o.frame.key))
            o.frame.type = TLY_RETURN;
        else if (!l->calls->next(l->user, l, &o))
            break;
        if (o.lost) {
            tly_warn("transport", "%s: closing the connection: out of memory", l->name);
            end(l, ENOMEM, "out of memory");
            break;
        }
        append(l, &o);
        bytes += l->out[l->out_to - 1].head + l->out[l->out_to - 1].len;
    }
}

/* The kernel has taken `n` bytes of the batch. */
static void advance(struct tly_link *l, size_t n)
{
    l->bytes_sent += n;
    while (n > 0) {
        struct outgoing *o = &l->out[l->out_from];
        uint32_t left = o->head + o->len + o->trailer_len - l->out_done;
        if (n < left) {
            l->out_done += (uint32_t)n;
            return;
        }
        n -= left;
        l->out_done = 0;
        l->out_from++;
        free(o->owned);
        o->owned = NULL;
        tly_fail_at(l->hello.me.role, "has sent", o->type);
        if (o->token)
            l->calls->sent(l->user, l, o->token);
    }
}

static ssize_t push_batch(struct tly_link *l)
{
    struct iovec iov[3 * BATCH];
    int n = 0;
    uint32_t skip = l->out_done;
    for (int i = l->out_from; i < l->out_to; i++) {
        struct outgoing *o = &l->out[i];
        if (skip < o->head)
            iov[n++] = (struct iovec){o->header + skip, o->head - skip};
        uint32_t done = skip > o->head ? skip - o->head : 0;
        if (o->len > done)
            iov[n++] = (struct iovec){(void *)(o->payload + done), o->len - done};
        if (o->trailer_len) {
            uint32_t before = o->head + o->len, past = skip > before ? skip - before : 0;
            iov[n++] = (struct iovec){o->trailer + past, o->trailer_len - past};
        }
        skip = 0;
    }
    struct msghdr m = {.msg_iov = iov, .msg_iovlen = (size_t)n};
    ssize_t r;
    do
        r = l->shm ? tly_shm_send(l->shm, l->watch.fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT)
                   : sendmsg(l->watch.fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (r < 0 && errno == EINTR);
    return r;
}

static void send_more(struct tly_link *l)
{
    if (l->state == CLOSED || l->state == CONNECTING)
        return;
    enter(l);
    for (;;) {
        if (l->out_from == l->out_to) {
            l->out_from = l->out_to = 0;
            fill(l);
            if (l->out_to == 0 || l->state == CLOSED) {
                l->wants_room = false;
                break;
            }
        }
        ssize_t n = push_batch(l);
        if (n < 0) {
            if (errno == EAGAIN || errno == EWOULDBLOCK) {
                l->wants_room = true;
                break;
            }
            end(l, ECONNRESET, strerror(errno));
            break;
        }
        l->last_spoken = l->loop->now;
        advance(l, (size_t)n);
        if (l->state == CLOSED)
            break;
    }
    if (l->state != CLOSED)
        watch_for(l, EPOLLIN | (l->wants_room ? EPOLLOUT : 0));
    leave(l);
}

void tly_link_set_silence(struct tly_link *l, int64_t silence_ns)
{
    l->silence_ns = silence_ns;
}

void tly_link_flush(struct tly_link *l)
{
    if (l->state == OPEN && !l->wants_room && l->depth == 0)
        send_more(l);
}

void tly_link_set_pace(struct tly_link *l, uint32_t bytes, uint32_t ms)
{
    l->pace_bytes = bytes;
    l->pace_ns = ms * TLY_MS;
}

void tly_link_set_counts(struct tly_link *l, const struct tly_counts *counts, uint32_t bytes)
{
    l->counts = *counts;
    l->owed_bytes = bytes < UINT32_MAX - l->owed_bytes ? l->owed_bytes + bytes : UINT32_MAX;
    if (!l->owes) {
        l->owes = true;
        l->owed_since = l->loop->now;
    }
}

static void say(struct tly_link *l, int type, uint16_t flags)
{
    if (l->out_to == BATCH)
        return; /* the frames before it tell the counts just as well */
    struct tly_outgoing o = {.frame = {.type = (uint8_t)type, .flags = flags}};
    append(l, &o);
    if (!l->wants_room)
        send_more(l);
}

/* Before the loop sleeps: frames first, then counts that went with none of them. */
static int64_t on_prepare(struct tly_hook *h)
{
    struct tly_link *l = tly_list_entry(h, struct tly_link, hook);
    if (l->state != OPEN)
        return INT64_MAX;
    enter(l);
    int64_t due = INT64_MAX;
    if (!l->wants_room)
        send_more(l);
    if (l->state == OPEN && l->owes) {
        int64_t now = tly_now();
        if (l->owed_bytes >= l->pace_bytes || now - l->owed_since >= l->pace_ns)
            say(l, TLY_COUNTS, 0);
        else
            due = l->owed_since + l->pace_ns;
    }
    leave(l);
    return due;
}

/* --- receiving ----------------------------------------------------------------------------------- */

static void start_handshake_step(struct tly_link *l)
{
    uint8_t *m = malloc(TLY_HELLO_BYTES);
    if (!m) {
        end(l, ENOMEM, "out of memory");
        return;
    }
    tly_hello_produce(&l->hello, m);
    struct tly_outgoing o = {.frame = {.type = TLY_HELLO, .payload = TLY_HELLO_BYTES},
                             .payload = m,
                             .owned = m};
    /* The proof itself goes under the zero key: append() uses send_key, which produce() may just have set. */
    uint8_t key[TLY_FRAME_KEY_BYTES];
    memcpy(key, l->hello.send_key, sizeof key);
    memset(l->hello.send_key, 0, sizeof key);
    append(l, &o);
    memcpy(l->hello.send_key, key, sizeof key);
    send_more(l);
}

static void become_open(struct tly_link *l)
{
    end_handshake(l);
    l->state = OPEN;
    l->last_heard = l->loop->awake;
    l->calls->opened(l->user, l);
}

static void on_hello(struct tly_link *l)
{
    int err = tly_hello_consume(&l->hello, l->control);
    if (err) {
        bool tell = l->hello.step == 0 || (l->hello.connector && err == -EACCES);
        if (tell && l->out_to < BATCH) {
            uint8_t *m = malloc(TLY_HELLO_BYTES);
            if (m) {
                tly_hello_refuse(&l->hello, -err, l->hello.refusal, m);
                struct tly_outgoing o = {.frame = {.type = TLY_HELLO, .payload = TLY_HELLO_BYTES},
                                         .payload = m,
                                         .owned = m};
                append(l, &o);
                send_more(l);
            }
        }
        if (l->state != CLOSED)
            end(l, -err, l->hello.refusal);
        return;
    }
    if (tly_hello_speaks(&l->hello))
        start_handshake_step(l);
    if (l->state == SHAKING && l->hello.step == 3)
        become_open(l);
}

static int begin_frame(struct tly_link *l, const char **why)
{
    static const uint8_t zero[TLY_FRAME_KEY_BYTES];
    const uint8_t *key = l->state == OPEN ? l->hello.receive_key : zero;
    const uint8_t *header = l->stage + l->stage_from;
    int err = tly_frame_decode(header, key, l->receive_seq, &l->received, &l->in, why);
    if (err)
        return err;
    l->stage_from += tly_frame_size(header);
    l->receive_seq++;
    l->landed = 0;
    l->follows = l->in.payload;
    l->trailer = 0;
    if ((l->in.flags & TLY_SUMMED) && l->state == OPEN) {
        l->checksum = true;
        l->trailer = l->in.payload ? TLY_TRAILER_BYTES : 0;
        l->in.flags &= (uint16_t)~TLY_SUMMED; /* none of the user's business */
    }
    l->land = (struct tly_landing){0};
    if (l->in.flags & TLY_SHOWN || l->in.type == TLY_RETURN) {
        if (!l->shm || l->state != OPEN || l->trailer || (l->in.type == TLY_RETURN) == (l->in.payload > 0)) {
            *why = "memory shown to nobody";
            return -EPROTO;
        }
        l->land.to = l->reference;
        l->follows = l->in.payload ? TLY_REFERENCE_BYTES : 0;
        l->landing = true;
        return 0;
    }
    if (l->state == SHAKING) {
        if (l->in.type != TLY_HELLO || l->in.payload != TLY_HELLO_BYTES) {
            *why = "no handshake";
            return -EPROTO;
        }
        l->land.control = true;
    } else {
        if (l->in.type == TLY_HELLO) {
            *why = "a second handshake";
            return -EPROTO;
        }
        err = l->calls->header(l->user, l, &l->in, &l->land, why);
        if (err)
            return err;
    }
    if (l->land.control && l->in.payload) {
        l->control = malloc(l->in.payload);
        if (!l->control) {
            *why = "out of memory";
            return -ENOMEM;
        }
        l->land.to = l->control;
    }
    l->verified = NULL;
    if (l->trailer && l->land.to && l->land.in_blocks) {
        if (!l->beside)
            l->beside = malloc(TLY_MAX_FRAGMENT);
        if (!l->beside) {
            *why = "out of memory";
            return -ENOMEM;
        }
        l->verified = l->land.to;
        l->land.to = l->beside;
        l->land.in_blocks = false; /* it moves whole */
    }
    l->landing = true;
    tly_fail_at(l->hello.me.role, "begins", l->in.type);
    return 0;
}

/* All of the payload and its trailer, which the stage has, are there.  -EPROTO: it is not what was sent. */
static int verify(struct tly_link *l, const char **why)
{
    uint8_t sum[TLY_TRAILER_BYTES];
    const uint8_t *told = l->stage + l->stage_from;
    if (!l->trailer)
        return 0;
    l->stage_from += TLY_TRAILER_BYTES;
    if (!l->land.to)
        return 0; /* nobody wants it, so nobody is misled */
    write_checksum(sum, l->land.to, l->in.payload, l->in.seq);
    if (memcmp(sum, told, sizeof sum) != 0) {
        *why = "a payload was altered on its way";
        return -EPROTO;
    }
    if (l->verified) {
        memcpy(l->verified, l->land.to, l->in.payload);
        l->land.to = l->verified;
    }
    return 0;
}

/* A payload that lies in memory of the peer's: it is copied to where it belongs, or its user reads it there. */
static int take_shown(struct tly_link *l, const char **why)
{
    struct tly_loan *loan;
    uint32_t at;
    int err = tly_shm_resolve(l->shm, l->reference, &l->in, &loan, &at, why);
    if (err)
        return err;
    l->in.flags &= (uint16_t)~TLY_SHOWN;
    l->land = (struct tly_landing){0};
    l->loan = tly_loan_is_whole(loan) ? loan : NULL;
    err = l->calls->header(l->user, l, &l->in, &l->land, why);
    l->loan = NULL;
    if (!err && l->state != CLOSED) {
        if (l->land.control) {
            l->land.to = l->control = malloc(l->in.payload);
            if (!l->control) {
                *why = "out of memory";
                err = -ENOMEM;
            }
        }
        const uint8_t *data = l->land.to || l->land.lent ? tly_loan_hold(loan) : NULL;
        if (data && l->land.to)
            memcpy(l->land.to, data + at, l->in.payload);
        else if (data)
            l->land.to = (void *)(data + at);
        if (data)
            tly_loan_drop(loan);
        else if (l->land.to || l->land.lent)
            err = -ECONNRESET;
        if (!err)
            err = l->calls->frame(l->user, l, &l->in, l->land.to, why);
    }
    tly_shm_done(l->shm, loan, &l->in);
    return err;
}

/* All of the frame is there. */
static int complete_frame(struct tly_link *l, const char **why)
{
    int err = 0;
    l->landing = false;
    tly_fail_at(l->hello.me.role, "gets", l->in.type);
    if (l->state == SHAKING)
        on_hello(l);
    else if (l->in.type == TLY_RETURN)
        tly_shm_returned(l->shm, l->in.key);
    else if (l->in.flags & TLY_SHOWN)
        err = take_shown(l, why);
    else
        err = l->calls->frame(l->user, l, &l->in, l->land.to, why);
    bool asked = l->in.type == TLY_BEAT && (l->in.flags & TLY_REQUEST);
    if (asked && !err && l->state == OPEN && !l->destroyed && l->out_from == l->out_to)
        say(l, TLY_BEAT, 0); /* else what waits to be sent is a sign of life as well */
    tly_fail_at(l->hello.me.role, "has done", l->in.type);
    free(l->control);
    l->control = NULL;
    return err;
}

/* Of the frame that the stage begins with, as far as it is there. */
static uint32_t header_bytes(const struct tly_link *l)
{
    return l->stage_to - l->stage_from < TLY_FRAME_LEAST
               ? TLY_FRAME_LEAST
               : tly_frame_size(l->stage + l->stage_from);
}

/* Use up what the stage holds.  0, or -errno with *why. */
static int eat_stage(struct tly_link *l, const char **why)
{
    while (l->state != CLOSED) {
        uint32_t have = l->stage_to - l->stage_from;
        if (!l->landing) {
            if (have < header_bytes(l))
                break;
            int err = begin_frame(l, why);
            if (err)
                return err;
            have = l->stage_to - l->stage_from;
        }
        uint32_t left = l->follows - l->landed, n = have < left ? have : left;
        if (l->land.in_blocks && l->land.to && n < left)
            n -= n % TLY_ALIGN;
        if (n && l->land.to)
            memcpy((uint8_t *)l->land.to + l->landed, l->stage + l->stage_from, n);
        l->stage_from += n;
        l->landed += n;
        if (l->landed < l->follows || l->stage_to - l->stage_from < l->trailer)
            break;
        int err = verify(l, why);
        if (!err)
            err = complete_frame(l, why);
        if (err)
            return err;
    }
    if (l->stage_from == l->stage_to) {
        l->stage_from = l->stage_to = 0;
    } else if (l->stage_from > 0) {
        memmove(l->stage, l->stage + l->stage_from, l->stage_to - l->stage_from);
        l->stage_to -= l->stage_from;
        l->stage_from = 0;
    }
    return 0;
}

static void set_low_water(struct tly_link *l, uint32_t bytes)
{
    if (l->shm || l->low_water == (int)bytes)
        return;
    l->low_water = (int)bytes;
    setsockopt(l->watch.fd, SOL_SOCKET, SO_RCVLOWAT, &l->low_water, sizeof l->low_water);
}

/* How much of `left` bytes can land now without ending inside a block, what the stage holds included.
 * 0: the connection ended; -1 with errno EAGAIN: wait. */
static ssize_t whole_blocks(struct tly_link *l, uint32_t left)
{
    for (bool ended = false;; ended = true) {
        int available = 0;
        ioctl(l->watch.fd, FIONREAD, &available);
        available += (int)l->stage_to;
        if ((uint32_t)available >= left)
            return left;
        if (available >= TLY_ALIGN)
            return available - available % TLY_ALIGN;
        if (ended)
            return 0; /* what is missing will never come */
        struct pollfd p = {.fd = l->watch.fd, .events = POLLRDHUP};
        if (poll(&p, 1, 0) <= 0)
            break;
        /* The peer has ended; the rest may have come with that, after the first look. */
    }
    errno = EAGAIN;
    return -1;
}

/* Bytes without which waking up is of no use: a block, or what is left of the header or the payload. */
static uint32_t least_wanted(const struct tly_link *l)
{
    uint32_t left = l->landing ? l->follows - l->landed + l->trailer : header_bytes(l);
    left -= l->stage_to; /* less than a block, a trailer or a header, else it would have been used up */
    return left < TLY_ALIGN ? left : TLY_ALIGN;
}

/* As readv(), and *drained says whether that was all there was. */
static ssize_t read_some(struct tly_link *l, const struct iovec *iov, int n, bool *drained)
{
    ssize_t r;
    size_t room = iov[0].iov_len + (n > 1 ? iov[1].iov_len : 0);
    do
        r = l->shm ? tly_shm_receive(l->shm, l->watch.fd, iov, n) : readv(l->watch.fd, iov, n);
    while (r < 0 && errno == EINTR);
    *drained |= r > 0 && (size_t)r < room;
    return r;
}

static ssize_t receive(struct tly_link *l, bool *drained)
{
    static _Thread_local uint8_t sink[64 << 10];
    struct iovec iov[2];
    int n = 0;
    uint32_t direct = 0;
    /* What the stage holds of a payload is less than a block: it lands with the rest of it. */
    if (l->landing && l->landed < l->follows) {
        uint32_t left = l->follows - l->landed;
        if (l->land.in_blocks && l->land.to) {
            ssize_t blocks = whole_blocks(l, left);
            if (blocks < 0 &&
                l->shm) { /* no low-water mark on a Unix socket: wait with what there is in the stage */
                iov[0] = (struct iovec){l->stage + l->stage_to, STAGE_BYTES - l->stage_to};
                ssize_t r = read_some(l, iov, 1, drained);
                l->stage_to += r > 0 ? (uint32_t)r : 0;
                return r;
            }
            if (blocks <= 0)
                return blocks;
            *drained = (uint32_t)blocks < left;
            memcpy((uint8_t *)l->land.to + l->landed, l->stage, l->stage_to);
            direct = (uint32_t)blocks;
        } else {
            direct = left;
        }
        left -= l->stage_to;
        direct -= l->stage_to;
        l->landed += l->stage_to;
        l->stage_to = 0;
        if (!l->land.to) {
            direct = left < sizeof sink ? left : (uint32_t)sizeof sink;
            iov[n++] = (struct iovec){sink, direct};
        } else {
            iov[n++] = (struct iovec){(uint8_t *)l->land.to + l->landed, direct};
        }
        if (direct < left) {
            ssize_t r = read_some(l, iov, n, drained);
            if (r > 0)
                l->landed += (uint32_t)r;
            return r;
        }
    }
    iov[n++] = (struct iovec){l->stage + l->stage_to, STAGE_BYTES - l->stage_to};
    ssize_t r = read_some(l, iov, n, drained);
    if (r <= 0)
        return r;
    uint32_t placed = (uint32_t)r < direct ? (uint32_t)r : direct;
    l->landed += placed;
    l->stage_to += (uint32_t)r - placed;
    return r;
}

static void note_heard(struct tly_link *l)
{
    int64_t now = l->loop->awake;
    if (now - l->last_heard >= GAP_MS * TLY_MS) {
        l->gap = now - l->last_heard;
        l->gap_at = now;
    }
    l->last_heard = now;
    l->asked_at = 0;
}

static void receive_more(struct tly_link *l)
{
    const char *why = NULL;
    uint32_t turn = 0;
    bool drained = false;
    enter(l);
    while (l->state != CLOSED && turn < TURN_BYTES && !drained) {
        ssize_t n = receive(l, &drained);
        if (n < 0) {
            if (errno != EAGAIN && errno != EWOULDBLOCK)
                end(l, ECONNRESET, strerror(errno));
            break;
        }
        if (n == 0) {
            end(l, ECONNRESET, l->state == OPEN ? "connection ended" : "connection ended in the handshake");
            break;
        }
        turn += (uint32_t)n;
        l->bytes_received += (uint64_t)n;
        note_heard(l);
        int err = 0;
        if (l->landing && l->landed == l->follows && !l->trailer)
            err = complete_frame(l, &why);
        else if (l->landing && l->calls->landed && l->state == OPEN && !l->trailer &&
                 !(l->in.flags & TLY_SHOWN))
            l->calls->landed(l->user, l, &l->in, l->landed);
        if (!err)
            err = eat_stage(l, &why);
        if (err == -ECONNRESET && l->state != CLOSED)
            end(l, ECONNRESET, why ? why : "connection ended");
        if (err && l->state != CLOSED) {
            if (!l->strangers) /* else it is counted */
                tly_warn("transport", "%s: closing the connection: %s", l->name, why ? why : strerror(-err));
            end(l, EPROTO, why ? why : strerror(-err));
        }
    }
    /* Nearly always a block: the mark is moved for the small ends of small messages alone. */
    if (l->state != CLOSED)
        set_low_water(l, least_wanted(l));
    leave(l);
}

static void on_connected(struct tly_link *l)
{
    int err = 0;
    socklen_t len = sizeof err;
    getsockopt(l->watch.fd, SOL_SOCKET, SO_ERROR, &err, &len);
    if (err) {
        end(l, err, strerror(err));
        return;
    }
    l->state = SHAKING;
    watch_for(l, EPOLLIN);
    start_handshake_step(l);
}

static void on_ready(struct tly_watch *w, uint32_t events)
{
    struct tly_link *l = tly_list_entry(w, struct tly_link, watch);
    enter(l);
    if (l->state == CONNECTING) {
        on_connected(l);
    } else {
        if (events & EPOLLOUT) {
            l->wants_room = false;
            send_more(l);
        }
        if (l->state != CLOSED && (events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
            receive_more(l);
    }
    leave(l);
}

static void on_tick(struct tly_hook *h)
{
    struct tly_link *l = tly_list_entry(h, struct tly_link, hook);
    enter(l);
    if (l->state == CONNECTING || l->state == SHAKING) {
        if (l->loop->awake > l->deadline)
            end(l, ETIMEDOUT, l->state == CONNECTING ? "no answer" : "no answer in the handshake");
    } else if (l->state == OPEN) {
        if (l->silence_ns && l->loop->awake - l->last_heard > l->silence_ns)
            end(l, ETIMEDOUT, "silent");
        else if (l->loop->now - l->last_spoken >= BEAT_MS * TLY_MS)
            say(l, TLY_BEAT, 0);
    }
    leave(l);
}

/* --- signs of life ------------------------------------------------------------------------------- */

/* Has the peer's kernel taken more of what we have sent, with still more behind that? */
static bool still_takes(struct tly_link *l)
{
    int queued = 0;
    if (l->shm || ioctl(l->watch.fd, SIOCOUTQ, &queued) != 0)
        return false;
    uint64_t before = l->acked;
    l->acked = l->bytes_sent - (uint64_t)queued;
    return l->acked > before && queued > 0;
}

/* Has its kernel answered at all in so many ns?  Within a machine there is nothing between us. */
static bool is_reached(const struct tly_link *l, int64_t ns)
{
    struct tcp_info info = {0};
    socklen_t len = sizeof info;
    if (l->shm || getsockopt(l->watch.fd, IPPROTO_TCP, TCP_INFO, &info, &len) != 0)
        return true;
    return info.tcpi_last_ack_recv * TLY_MS < ns;
}

bool tly_link_await(struct tly_link *l, bool awaited)
{
    int64_t now = l->loop->awake;
    if (l->state != OPEN || !awaited || now - l->last_heard < TLY_TICK_MS * TLY_MS / 2) {
        l->asked_at = 0;
        return true;
    }
    bool takes = still_takes(l); /* the question is behind that */
    if (takes || !l->asked_at)
        l->asked_at = now;
    enter(l);
    if (l->out_from == l->out_to)
        say(l, TLY_BEAT, TLY_REQUEST);
    bool open = l->state == OPEN;
    return leave(l) && open;
}

int64_t tly_link_unanswered(const struct tly_link *l, bool *reached)
{
    int64_t since = l->asked_at > l->loop->smooth_since ? l->asked_at : l->loop->smooth_since;
    int64_t quiet = l->asked_at && l->state == OPEN ? l->loop->awake - since : 0;
    *reached = quiet && is_reached(l, quiet);
    return quiet;
}

int64_t tly_link_heard_at(const struct tly_link *l)
{
    return l->last_heard;
}

int64_t tly_link_gap(const struct tly_link *l)
{
    int64_t now = l->loop->awake, quiet = now - l->last_heard;
    if (quiet >= GAP_MS * TLY_MS)
        return quiet;
    return l->gap && now - l->gap_at < RECENT_S * TLY_SEC ? l->gap : 0;
}

/* --- what users ask ------------------------------------------------------------------------------ */

void tly_link_sink(struct tly_link *l, const void *token)
{
    if (l->landing && l->land.token == token)
        l->land.to = NULL;
}

void *tly_link_landing(const struct tly_link *l, uint32_t *bytes)
{
    if (!l || !l->landing || !l->land.to)
        return NULL;
    *bytes = l->trailer ? 0 : l->landed; /* what is not verified lies beside */
    return l->land.token;
}

void tly_link_detach(struct tly_link *l, const void *token)
{
    for (int i = l->out_from; i < l->out_to; i++) {
        struct outgoing *o = &l->out[i];
        if (o->token != token)
            continue;
        o->token = NULL;
        if (o->len == 0)
            continue;
        uint8_t *copy = malloc(o->len);
        if (!copy) {
            end(l, ENOMEM, "out of memory");
            return;
        }
        memcpy(copy, o->payload, o->len);
        o->payload = o->owned = copy;
    }
    if (l->shm && l->state == OPEN && tly_shm_detach(l->shm, token) != 0)
        end(l, ENOMEM, "out of memory");
}

struct tly_loan *tly_link_loan(const struct tly_link *l)
{
    return l->loan;
}

const struct tly_identity *tly_link_peer(const struct tly_link *l)
{
    return &l->hello.peer;
}

const char *tly_link_name(const struct tly_link *l)
{
    return l->name;
}

void tly_link_rename(struct tly_link *l, const char *name)
{
    snprintf(l->name, sizeof l->name, "%s", name);
}

const char *tly_link_medium(const struct tly_link *l)
{
    return !l->shm ? "tcp" : tly_shm_is_here(l->shm) ? "memory" : "shm";
}

bool tly_link_is_open(const struct tly_link *l)
{
    return l->state == OPEN;
}

void tly_link_address(const struct tly_link *l, bool remote, struct sockaddr_storage *out)
{
    socklen_t len = sizeof *out;
    memset(out, 0, sizeof *out);
    if (remote)
        getpeername(l->watch.fd, (struct sockaddr *)out, &len);
    else
        getsockname(l->watch.fd, (struct sockaddr *)out, &len);
    tly_address_unmap(out);
}

uint64_t tly_link_bytes(const struct tly_link *l, bool sent)
{
    return sent ? l->bytes_sent : l->bytes_received;
}

int tly_link_load(const struct tly_link *l, struct tly_link_load *out)
{
    return l->shm || l->state != OPEN ? -ENOTSUP : tly_socket_load(l->watch.fd, out);
}

bool tly_link_busy(const struct tly_link *l)
{
    return l->out_from < l->out_to;
}
