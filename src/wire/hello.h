/* hello.h - the handshake: both ends prove that they know the job secret before anything else is parsed,
 * and derive a key for each direction.  A state machine without I/O.
 *
 *   connector                                   acceptor
 *   HELLO 1: versions, role, rank, job, nonce ->
 *            <- HELLO 2: version, role, rank, job's incarnation, nonce, MAC("acceptor", transcript)
 *   HELLO 3: MAC("connector", transcript) ->
 *
 * MAC and keys are BLAKE2b keyed with a hash of the secret, over a label and messages 1 and 2.  The labels
 * stop reflection, the nonces replay; the incarnation keeps another start of the same job out.  Each message
 * is the payload of a HELLO frame, whose own check is under the zero key.  A connector to which message 2 does not prove
 * the secret sends a message 3 without a proof: so the acceptor, too, can say who has another one. */
#ifndef TLY_HELLO_H
#define TLY_HELLO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "wire/frame.h"

enum { TLY_HELLO_BYTES = 320, TLY_JOB_BYTES = 64, TLY_SECRET_BYTES = 32, TLY_NO_RANK = 0xffffffff };

/* A watcher does not work with whom it asks: a coordinator or a service how it stands, or a service, before the job
 * begins, how fast it hears. */
enum tly_role {
    TLY_ROLE_RANK = 1,
    TLY_ROLE_TALLYD,
    TLY_ROLE_SERVICE,
    TLY_ROLE_COORDINATOR,
    TLY_ROLE_WATCHER
};

/* Who this process is in a handshake. */
struct tly_identity {
    uint8_t secret[TLY_SECRET_BYTES]; /* tly_hello_secret(): means nothing outside of this process */
    uint8_t role;                     /* enum tly_role */
    uint32_t rank;                    /* whose process it is, or TLY_NO_RANK */
    uint64_t incarnation;             /* of the job; a connector may not know it yet: 0 */
    char job[TLY_JOB_BYTES];
};

struct tly_hello {
    struct tly_identity me;
    /* An acceptor that stands for several jobs: once message 1 has said for which the peer comes, say who is here.  For an
     * unknown job that is one whose secret nobody knows, so the peer cannot tell it from a wrong secret.  NULL: `me`. */
    void (*choose)(void *user, const struct tly_identity *peer, struct tly_identity *me);
    void *choose_user;
    bool connector;
    uint8_t step; /* messages gone both ways so far; 3: done */
    uint8_t first[TLY_HELLO_BYTES], second[TLY_HELLO_BYTES];
    struct tly_identity peer; /* no secret; believed only when done */
    uint8_t send_key[TLY_FRAME_KEY_BYTES], receive_key[TLY_FRAME_KEY_BYTES];
    char refusal[160]; /* sentence, set when produce or consume fails */
    int refusal_err;
};

/* A uniform key from any secret; NULL or "" for none (loopback only).  It is masked by random bytes of this process, in
 * a page of their own that core dumps leave out: so the copies of it in identities give nothing away. */
void tly_hello_secret(const char *text, uint8_t out[TLY_SECRET_BYTES]);

/* What only who knows the secret can say of `data`: a keyed hash, for proofs over other media. */
void tly_hello_prove(const uint8_t secret[TLY_SECRET_BYTES], const void *data, size_t len, uint8_t out[32]);

void tly_hello_init(struct tly_hello *h, const struct tly_identity *me, bool connector);

/* True if the next message is ours to send. */
static inline bool tly_hello_speaks(const struct tly_hello *h)
{
    return h->step < 3 && (h->step % 2 == 0) == h->connector;
}

void tly_hello_produce(struct tly_hello *h, uint8_t out[TLY_HELLO_BYTES]);

/* 0, or -EACCES (secret), -EPROTO (versions, garbage), -ESTALE (another job or incarnation), -EAGAIN (the
 * peer says: not now), with h->refusal a sentence.  An acceptor that refuses message 1 may send
 * tly_hello_refuse()'s message so that the connector can say why. */
int tly_hello_consume(struct tly_hello *h, const uint8_t in[TLY_HELLO_BYTES]);

/* In place of the next message, one that says no: no MAC of it is right. */
void tly_hello_refuse(const struct tly_hello *h, int err, const char *sentence, uint8_t out[TLY_HELLO_BYTES]);

#endif
