/* hello.c - fuzzes the handshake: nobody gets in without the secret, whatever he sends and in whatever order,
 * and what is kept of the peer's words is printable text.
 *
 * The input is a first byte that says which end we are (1: the connector) and whether an acceptor has several jobs (2), then
 * messages for it. */
#include "wire/hello.h"

#include <ctype.h>
#include <string.h>

#include "fuzz.h"

static void require_printable(const char *text, size_t room)
{
    size_t n = strnlen(text, room);
    require(n < room);
    for (size_t i = 0; i < n; i++)
        require(isprint((unsigned char)text[i]));
}

/* An acceptor with one job, "fuzz"; for others it has a secret that the peer does not know. */
static void choose(void *user, const struct tly_identity *peer, struct tly_identity *me)
{
    const struct tly_identity *job = user;
    require_printable(peer->job, sizeof peer->job);
    *me = *job;
    if (strcmp(peer->job, job->job) == 0)
        return;
    memcpy(me->job, peer->job, sizeof me->job);
    tly_hello_secret("another secret of sixteen bytes", me->secret);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct tly_identity me = {.role = TLY_ROLE_SERVICE, .rank = 3, .incarnation = 7, .job = "fuzz"};
    struct tly_hello h;
    uint8_t message[TLY_HELLO_BYTES];
    if (size == 0)
        return 0;
    tly_hello_secret("a secret of sixteen bytes or more", me.secret);
    tly_hello_init(&h, &me, data[0] & 1);
    h.choose = data[0] & 2 ? choose : NULL;
    h.choose_user = &me;
    data++;
    size--;
    while (h.step < 3) {
        if (tly_hello_speaks(&h)) {
            tly_hello_produce(&h, message);
            continue;
        }
        if (size < sizeof message)
            break;
        if (tly_hello_consume(&h, data) != 0) {
            require_printable(h.refusal, sizeof h.refusal);
            return 0;
        }
        require_printable(h.peer.job, sizeof h.peer.job);
        data += sizeof message;
        size -= sizeof message;
    }
    require(h.step < 3); /* the proof cannot be guessed */
    return 0;
}
