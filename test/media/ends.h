/* ends.h - the two ends of a link in one loop, for tests: parcels go from the connector to the acceptor, over any medium, and
 * each step checks what transport.h promises. */
#ifndef TLY_ENDS_H
#define TLY_ENDS_H

#include "test/media/proxy.h"
#include "transport/medium.h"

/* The medium that the tests run over. */
struct ends_medium {
    const char *name; /* that reports know */
    const struct tly_medium *medium;
    bool sockets; /* over sockets: a proxy can stand between */
    bool lends;   /* payloads that stay are shown */
    bool copies;  /* ... as to another process */
    bool loses;   /* payloads are not moved */
    bool whole;   /* a payload is in place as soon as its header is known */
};
extern const struct ends_medium *via;
void ends_use(const struct ends_medium *m);

enum { MOST = 80, UNTOUCHED = 0xee, PATIENCE_S = 60 };
enum where { PLACE, BLOCKS, NOWHERE, CONTROL, STAYS };

/* A frame that goes from the connector to the acceptor. */
struct parcel {
    uint8_t *payload, *place; /* owned */
    uint8_t *truth;           /* owned: what the payload is until it has been sent */
    struct tly_memory *payload_memory, *place_memory;
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
    uint32_t landing; /* bytes in place of what was landing when it closed */
    bool destroy_in_opened, destroy_in_header, destroy_in_frame;
};

extern bool ends_summed; /* payloads have checksums */
extern struct tly_loop
    *ends_guest; /* the acceptor's loop, which the test turns; NULL: both ends' loop is x.loop */

struct ends {
    struct tly_loop loop;
    struct tly_listener *listener;
    struct proxy proxy;
    bool proxied, inside;        /* inside: payloads go through the socket also in memory */
    bool garbled;                /* what comes need not be what was sent */
    bool no_loan_is_well, gives; /* no room to be shown in; the reader gives back at once */
    struct end a, b;             /* connector, acceptor */
    struct parcel parcels[MOST];
    int count, next, arrived, sent;
    bool withheld; /* memory is not announced */
    uint64_t accepted_seen;
    int alone; /* frames of nothing but counts */
    int64_t silence_ns;
    uint8_t secret;
};
extern struct ends x;

void ends_add(uint32_t len, enum where where);
/* proxy: between the ends; NULL: none. */
void ends_start(const struct proxy *proxy);
void ends_dial(void);
void ends_stop(void);
/* No block of what lands in blocks is ever in part there. */
void ends_check_blocks(void);
/* Turn the loop until *what has this value. */
void ends_until(const int *what, int value);
/* Parcels of all sizes up to `largest` arrive, whole, in order and where they belong. */
void ends_deliver(const struct proxy *proxy, uint32_t largest);
struct tly_identity ends_identity(uint8_t secret);
extern const struct tly_link_user ends_calls;
uint64_t ends_key(int round);

#endif
