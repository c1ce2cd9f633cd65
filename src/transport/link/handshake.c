/* handshake.c - HELLO: both ends prove the secret, and the link is open (wire/hello.h has the messages). */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

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
    tly_link_end_handshake(l);
    tly_link_become(l, TLY_LINK_OPEN);
    l->last_heard = l->loop->awake;
    l->calls->opened(l->user, l);
}

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
        handshake_become_open(l);
}
