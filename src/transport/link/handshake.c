/* handshake.c - HELLO: both ends prove the secret (wire/hello.h has the messages).  Then the link is open, or the medium is set up
 * first:
 *
 *   each end:  SETUP, the medium's proposal ->     once the handshake is over
 *              SETUP, empty: ready ->              once the medium has accepted the peer's proposal
 *              SETUP, empty ->                     by the new way, once both ends are ready
 *
 * An end that has heard all three opens the link, so it is known that frames get through.  SETUP with MARK and a
 * sentence says that an end cannot go on. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"
#include "transport/link/link.h"

static void handshake_send_hello(struct tly_link *l, uint8_t *message)
{
    struct tly_outgoing o = {.frame = {.type = TLY_HELLO, .payload = TLY_HELLO_BYTES},
                             .payload = message,
                             .owned = message};
    tly_link_append(l, &o);
}

void tly_link_shake(struct tly_link *l)
{
    uint8_t *m = malloc(TLY_HELLO_BYTES);
    if (!m) {
        tly_link_end(l, ENOMEM, "out of memory");
        return;
    }
    tly_hello_produce(&l->hello, m);
    /* The proof itself goes under the zero key: tly_link_append() uses send_key, which tly_hello_produce() may just have set. */
    uint8_t key[TLY_FRAME_KEY_BYTES];
    memcpy(key, l->hello.send_key, sizeof key);
    memset(l->hello.send_key, 0, sizeof key);
    handshake_send_hello(l, m);
    memcpy(l->hello.send_key, key, sizeof key);
    tly_link_push(l);
}

static void handshake_become_open(struct tly_link *l)
{
    tly_link_become(l, TLY_LINK_OPEN);
    l->last_heard = l->loop->awake;
    l->calls->opened(l->user, l);
}

/* --- the medium's set-up ------------------------------------------------------------------------- */

static void setup_send(struct tly_link *l, const void *data, int bytes, uint16_t flags)
{
    uint8_t *copy = bytes ? malloc((size_t)bytes) : NULL;
    if (tly_link_is_full(l) || (bytes && !copy)) {
        free(copy);
        tly_link_end(l, ENOMEM, "out of memory");
        return;
    }
    if (bytes)
        memcpy(copy, data, (size_t)bytes);
    struct tly_outgoing o = {.frame = {.type = TLY_SETUP, .flags = flags, .payload = (uint32_t)bytes},
                             .payload = copy,
                             .owned = copy};
    tly_link_append(l, &o);
    tly_link_push(l);
    /* A fresh socket has room for so little.  What stays behind would later go the new way. */
    if (l->state != TLY_LINK_CLOSED && tly_link_waiting(l))
        tly_link_end(l, ENOBUFS, "no room for the set-up of its medium");
}

/* This end cannot go on: tell the peer, and end. */
static void setup_refuse(struct tly_link *l, int err, const char *why)
{
    if (!why)
        why = strerror(-err);
    setup_send(l, why, (int)strnlen(why, TLY_SETUP_BYTES), TLY_MARK);
    tly_link_end(l, -err, why);
}

static void setup_propose(struct tly_link *l)
{
    uint8_t proposal[TLY_SETUP_BYTES];
    const char *why = NULL;
    uint64_t bytes = tly_link_memory(l);
    if (bytes && l->calls->spare && !l->calls->spare(l->user, l, bytes)) {
        setup_refuse(l, -ENOMEM, "no memory to spare for its medium (TALLY_MEMORY)");
        return;
    }
    int n = tly_link_via(l)->setup->propose(l->channel, proposal, &why);
    if (l->state == TLY_LINK_CLOSED)
        return;
    if (n < 0)
        setup_refuse(l, n, why);
    else
        setup_send(l, proposal, n, 0);
}

static void setup_accept(struct tly_link *l)
{
    const char *why = NULL;
    int err = tly_link_via(l)->setup->accept(l->channel, l->control, l->frame.payload, &why);
    if (err)
        setup_refuse(l, err, why);
    else
        setup_send(l, NULL, 0, 0);
}

/* The peer cannot go on, and says why. */
static void setup_take_refusal(struct tly_link *l)
{
    size_t n = l->frame.payload < sizeof l->hello.refusal ? l->frame.payload : sizeof l->hello.refusal - 1;
    memcpy(l->hello.refusal, l->control, n);
    l->hello.refusal[n] = '\0';
    tly_text_clean(l->hello.refusal);
    tly_link_end(l, ENOTSUP, l->hello.refusal);
}

int tly_link_on_setup(struct tly_link *l, const char **why)
{
    bool proposal = l->frame.payload > 0, refusal = proposal && l->frame.flags & TLY_MARK;
    if (refusal) {
        setup_take_refusal(l);
        return 0;
    }
    if (proposal != (l->setups == 0)) {
        *why = proposal ? "the set-up of its medium twice" : "ready without a set-up of its medium";
        return -EPROTO;
    }
    int err = 0;
    switch (l->setups++) {
    case 0:
        setup_accept(l);
        break;
    case 1:
        err = tly_link_via(l)->setup->begin(l->channel, why);
        if (!err)
            setup_send(l, NULL, 0, 0);
        break;
    default:
        handshake_become_open(l);
    }
    return err;
}

static void handshake_end(struct tly_link *l)
{
    tly_link_end_handshake(l);
    tly_link_become(l, TLY_LINK_SETTING_UP);
    if (tly_link_via(l)->setup)
        setup_propose(l);
    else
        handshake_become_open(l);
}

/* --- HELLO --------------------------------------------------------------------------------------- */

/* Say why, where the peer may know it, and end. */
static void handshake_refuse(struct tly_link *l, int err)
{
    bool tell = l->hello.step == 0 || (l->hello.connector && err == -EACCES);
    uint8_t *m = tell && !tly_link_is_full(l) ? malloc(TLY_HELLO_BYTES) : NULL;
    if (m) {
        tly_hello_refuse(&l->hello, -err, l->hello.refusal, m);
        handshake_send_hello(l, m);
        tly_link_push(l);
    }
    tly_link_end(l, -err, l->hello.refusal);
}

void tly_link_on_hello(struct tly_link *l)
{
    int err = tly_hello_consume(&l->hello, l->control);
    if (err) {
        handshake_refuse(l, err);
        return;
    }
    if (tly_hello_speaks(&l->hello))
        tly_link_shake(l);
    if (l->state == TLY_LINK_SHAKING && l->hello.step == 3)
        handshake_end(l);
}
