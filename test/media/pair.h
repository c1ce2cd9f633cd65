/* pair.h - what the test media `late` and `null` have in common: channels between two ends in one loop of one process.
 *
 * Packets go through a list.  How they are treated on their way is a few numbers (struct tly_pair_conduct), and where they
 * are random, a seed repeats them. */
#ifndef TLY_PAIR_H
#define TLY_PAIR_H

#include "transport/medium.h"

struct tly_pair_conduct {
    uint32_t wait;    /* turns of the loop that a packet waits before it comes, at most */
    uint32_t piece;   /* bytes of a payload that land in one piece, at most; in any order.  0: all, at once */
    uint32_t linger;  /* turns between arrival and completion, at most */
    uint32_t moved;   /* longer payloads are not moved */
    const bool *held; /* nothing is completed while it is true; NULL: it never is */
};

int tly_pair_listen(const struct tly_medium *medium, const struct tly_door_config *c, struct tly_door **out);
void tly_pair_shut(struct tly_door *d);
int tly_pair_dial(const struct tly_medium *medium, const struct tly_pair_conduct *how,
                  const struct tly_dial *d, struct tly_channel **out);
int tly_pair_start(struct tly_channel *c);
int tly_pair_send(struct tly_channel *c, struct tly_packet *packet, uint32_t n);
int tly_pair_detach(struct tly_channel *c, const void *token);
void tly_pair_close(struct tly_channel *c);
void tly_pair_destroy(struct tly_channel *c);

/* Both ends propose a text, and take nothing before they have accepted the peer's. */
extern const struct tly_setup tly_pair_setup;
/* What the dialled end does instead, if anything. */
enum tly_pair_lapse {
    TLY_PAIR_NONE,
    TLY_PAIR_CANNOT,  /* it has no proposal */
    TLY_PAIR_GARBLED, /* it proposes what no peer accepts */
    TLY_PAIR_TWICE,   /* it proposes twice */
    TLY_PAIR_HASTY,   /* it sends a frame first, */
    TLY_PAIR_EMPTY,   /* or is ready without a proposal */
};
void tly_pair_set_lapse(enum tly_pair_lapse lapse);

int tly_pair_announce(const void *base, size_t bytes, void **out);
void tly_pair_withdraw(void *announced);

/* Since the last call, of all pairs: payloads that were read from, or landed in, memory that was not announced; packets
 * and bytes of payloads that have come. */
struct tly_pair_facts {
    uint32_t unannounced, packets;
    uint64_t bytes;
};
struct tly_pair_facts tly_pair_facts(void);
void tly_pair_seed(uint32_t seed);

#endif
