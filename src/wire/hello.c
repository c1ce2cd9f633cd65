/* hello.c - proof of the secret, both ways.
 *
 * Message, 320 bytes:
 *     0 "TALLYHLO"   8 step, role, lowest, highest version   12 refusal (errno)   16 rank
 *    24 incarnation  32 job[64]   96 release[32]   128 nonce[32]   160 sentence[128]   288 MAC[32]
 * The MAC of message 2 covers message 1 and message 2 up to the MAC; that of message 3 the same, under
 * another label.
 *
 * The secret is masked in memory.  Every connection's identity has a copy of the key made of it: the key XOR random bytes
 * of one page that is locked and left out of core dumps.  The key is put together on the stack for a MAC and cleared.  A
 * library cannot make a process undumpable, and identities in such pages would spread this one matter over all their
 * holders.  Keys of connections stay as they are: they are void when the connection ends. */
#include "wire/hello.h"

#include <errno.h>
#include <pthread.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>

#include "wire/pack.h"

enum {
    at_step = 8,
    at_refusal = 12,
    at_rank = 16,
    at_incarnation = 24,
    at_job = 32,
    at_release = 96,
    at_nonce = 128,
    at_sentence = 160,
    at_mac = 288
};

static uint8_t *mask; /* from sodium_malloc(): locked if that may be, in no core dump, never freed */

static void hello_make_mask(void)
{
    mask = sodium_init() < 0 ? NULL : sodium_malloc(TLY_SECRET_BYTES); /* it must have been called before */
    if (mask)
        randombytes_buf(mask, TLY_SECRET_BYTES);
}

/* Masks and unmasks.  Without memory for a mask the secret stays as it is. */
static void hello_apply_mask(const uint8_t in[TLY_SECRET_BYTES], uint8_t out[TLY_SECRET_BYTES])
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, hello_make_mask);
    for (int i = 0; i < TLY_SECRET_BYTES; i++)
        out[i] = in[i] ^ (mask ? mask[i] : 0);
}

void tly_hello_secret(const char *text, uint8_t out[TLY_SECRET_BYTES])
{
    static const char salt[] = "tally job secret 1";
    uint8_t key[TLY_SECRET_BYTES];
    crypto_generichash(key, TLY_SECRET_BYTES, (const uint8_t *)(text ? text : ""), text ? strlen(text) : 0,
                       (const uint8_t *)salt, sizeof salt - 1);
    hello_apply_mask(key, out);
    sodium_memzero(key, sizeof key);
}

void tly_hello_prove(const uint8_t secret[TLY_SECRET_BYTES], const void *data, size_t len, uint8_t out[32])
{
    uint8_t key[TLY_SECRET_BYTES];
    hello_apply_mask(secret, key);
    crypto_generichash(out, 32, data, len, key, sizeof key);
    sodium_memzero(key, sizeof key);
}

void tly_hello_init(struct tly_hello *h, const struct tly_identity *me, bool connector)
{
    memset(h, 0, sizeof *h);
    h->me = *me;
    h->connector = connector;
}

static void hello_mac(const struct tly_hello *h, const char *label, uint8_t *out, size_t len)
{
    crypto_generichash_state s;
    uint8_t key[TLY_SECRET_BYTES];
    hello_apply_mask(h->me.secret, key);
    crypto_generichash_init(&s, key, TLY_SECRET_BYTES, len);
    sodium_memzero(key, sizeof key);
    crypto_generichash_update(&s, (const uint8_t *)label, strlen(label) + 1);
    crypto_generichash_update(&s, h->first, TLY_HELLO_BYTES);
    crypto_generichash_update(&s, h->second, at_mac);
    crypto_generichash_final(&s, out, len);
    sodium_memzero(&s, sizeof s); /* it holds the key */
}

static void hello_derive(struct tly_hello *h)
{
    hello_mac(h, "to acceptor", h->connector ? h->send_key : h->receive_key, TLY_FRAME_KEY_BYTES);
    hello_mac(h, "to connector", h->connector ? h->receive_key : h->send_key, TLY_FRAME_KEY_BYTES);
}

static void hello_write_identity(const struct tly_hello *h, int step, uint8_t *out)
{
    memset(out, 0, TLY_HELLO_BYTES);
    memcpy(out, "TALLYHLO", 8);
    out[at_step] = (uint8_t)step;
    out[at_step + 1] = h->me.role;
    out[at_step + 2] = TLY_PROTOCOL_LOWEST;
    out[at_step + 3] = TLY_PROTOCOL_HIGHEST;
    tly_put32(out + at_rank, h->me.rank);
    tly_put64(out + at_incarnation, h->me.incarnation);
    memcpy(out + at_job, h->me.job, TLY_JOB_BYTES);
    memcpy(out + at_release, TALLY_VERSION, sizeof TALLY_VERSION);
    randombytes_buf(out + at_nonce, 32);
}

void tly_hello_produce(struct tly_hello *h, uint8_t out[TLY_HELLO_BYTES])
{
    hello_write_identity(h, h->step + 1, out);
    if (h->step == 0) {
        memcpy(h->first, out, TLY_HELLO_BYTES);
    } else if (h->step == 1) {
        memcpy(h->second, out, TLY_HELLO_BYTES);
        hello_mac(h, "acceptor", out + at_mac, 32);
    } else {
        hello_mac(h, "connector", out + at_mac, 32);
        hello_derive(h);
    }
    h->step++;
}

void tly_hello_refuse(const struct tly_hello *h, int err, const char *sentence, uint8_t out[TLY_HELLO_BYTES])
{
    hello_write_identity(h, h->step + 2, out);
    tly_put32(out + at_refusal, (uint32_t)err);
    snprintf((char *)out + at_sentence, 128, "%s", sentence);
}

static int hello_refuse(struct tly_hello *h, int err, const char *sentence)
{
    snprintf(h->refusal, sizeof h->refusal, "%s", sentence);
    h->refusal_err = err;
    return -err;
}

/* A text field of a message, cleaned. */
static void hello_read_field(const uint8_t *in, size_t size, char *out)
{
    size_t n = strnlen((const char *)in, size - 1);
    for (size_t i = 0; i < n; i++)
        out[i] = in[i] >= 32 && in[i] < 127 ? (char)in[i] : '?';
    out[n] = '\0';
}

static int hello_read_identity(struct tly_hello *h, const uint8_t *in)
{
    char release[32], job[TLY_JOB_BYTES] = "", text[160];
    hello_read_field(in + at_release, sizeof release, release);
    hello_read_field(in + at_job, sizeof job, job);
    if (in[at_step + 2] > TLY_PROTOCOL_HIGHEST || in[at_step + 3] < TLY_PROTOCOL_LOWEST) {
        snprintf(text, sizeof text,
                 "the peer speaks protocol %d to %d (Tally %s), this is %d to %d (Tally %s)", in[at_step + 2],
                 in[at_step + 3], release, TLY_PROTOCOL_LOWEST, TLY_PROTOCOL_HIGHEST, TALLY_VERSION);
        return hello_refuse(h, EPROTO, text);
    }
    h->peer.role = in[at_step + 1];
    h->peer.rank = tly_get32(in + at_rank);
    h->peer.incarnation = tly_get64(in + at_incarnation);
    memcpy(h->peer.job, job, sizeof job);
    return 0;
}

static int hello_check_job(struct tly_hello *h)
{
    char text[160];
    /* A tallyd that serves whichever job comes names none. */
    if (h->me.job[0] && h->peer.job[0] && strcmp(h->me.job, h->peer.job) != 0) {
        snprintf(text, sizeof text, "job '%.40s' here, job '%.40s' there (TALLY_JOB)", h->me.job,
                 h->peer.job);
        return hello_refuse(h, ESTALE, text);
    }
    if (h->me.incarnation && h->peer.incarnation && h->me.incarnation != h->peer.incarnation)
        return hello_refuse(h, ESTALE, "another start of the job");
    return 0;
}

int tly_hello_consume(struct tly_hello *h, const uint8_t in[TLY_HELLO_BYTES])
{
    uint8_t expected[32];
    if (memcmp(in, "TALLYHLO", 8) != 0 || in[at_step] != h->step + 1)
        return hello_refuse(h, EPROTO, "not a handshake of Tally");
    /* Messages 1 and 2, which the MACs cover, say who the peer is.  Message 3 adds nothing to that. */
    int err = h->step < 2 ? hello_read_identity(h, in) : 0;
    if (err)
        return err;
    if (h->step == 0) {
        memcpy(h->first, in, TLY_HELLO_BYTES);
        if (h->choose) /* then a peer must prove the secret before it is told what differs */
            h->choose(h->choose_user, &h->peer, &h->me);
        else
            err = hello_check_job(h);
    } else if (h->step == 1) {
        int refused = (int)tly_get32(in + at_refusal);
        if (refused) {
            char text[160];
            hello_read_field(in + at_sentence, 128, text);
            return hello_refuse(
                h, refused == EAGAIN || refused == EPROTO || refused == ESTALE ? refused : EACCES, text);
        }
        memcpy(h->second, in, TLY_HELLO_BYTES);
        hello_mac(h, "acceptor", expected, 32);
        if (sodium_memcmp(expected, in + at_mac, 32) != 0)
            return hello_refuse(h, EACCES, "the job secret differs (TALLY_SECRET_FILE, TALLY_SECRET)");
        err = hello_check_job(h);
    } else {
        hello_mac(h, "connector", expected, 32);
        if (sodium_memcmp(expected, in + at_mac, 32) != 0)
            return hello_refuse(h, EACCES, "the job secret differs (TALLY_SECRET_FILE, TALLY_SECRET)");
        err = h->choose ? hello_check_job(h) : 0;
        hello_derive(h);
    }
    if (!err)
        h->step++;
    return err;
}
