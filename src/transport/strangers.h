/* strangers.h - counts the connections at a listener that end before they have proved the secret. */
#ifndef TLY_STRANGERS_H
#define TLY_STRANGERS_H

#include <stdbool.h>
#include <stdint.h>

/* Owner: the loop. */
struct tly_strangers {
    uint32_t shaking; /* connections whose handshake is under way */
    /* since the last line: */
    uint32_t failed; /* connections that ended in the handshake, */
    uint32_t odd;    /* of them, those that had another secret or did not speak Tally's protocol */
    bool told;       /* one of them with another secret has been named */
    int64_t since;   /* awake clock: when the first of them ended */
    char last[256];  /* the last of them, and why it ended */
};

/* A connection has ended in the handshake, with this errno and reason.  A first one with another secret is named at once:
 * it may be a rank that the job waits for. */
void tly_strangers_note(struct tly_strangers *s, const char *name, int err, const char *why, int64_t now);

/* One line for all that have been noted, a minute after the first of them (at_once: now).  port: the listener's; 0: a local socket. */
void tly_strangers_tell(struct tly_strangers *s, uint16_t port, int64_t now, bool at_once);

#endif
