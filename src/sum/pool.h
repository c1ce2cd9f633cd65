/* pool.h - memory for slots: page-aligned buffers in power-of-two classes, kept warm between rounds, bounded. */
#ifndef TLY_POOL_H
#define TLY_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { TLY_POOL_SMALLEST = 8, TLY_POOL_CLASSES = 20 }; /* 256 bytes to 128 MB */

/* For so long nothing is taken before what is kept goes back to the system: longer than a training step, which would find
 * cold pages again. */
#define TLY_POOL_REST_NS (10 * (int64_t)1000000000)

/* Owner: the service's loop. */
struct tly_pool {
    uint64_t limit; /* most bytes that may be in use */
    uint64_t in_use, peak, kept;
    bool taken;                   /* something, since the last look */
    int64_t idle_since;           /* the last look that found something taken or in use */
    void *free[TLY_POOL_CLASSES]; /* chains through the buffers' first words */
};

/* NULL if that would pass the limit or memory has run out. */
void *tly_pool_take(struct tly_pool *p, uint32_t bytes);
/* The same, but past the limit if need be. */
void *tly_pool_take_past(struct tly_pool *p, uint32_t bytes);
void tly_pool_give(struct tly_pool *p, void *buffer, uint32_t bytes);
/* Give what is kept back to the system. */
void tly_pool_trim(struct tly_pool *p);
/* To be called now and then: does so once nothing has been taken for TLY_POOL_REST_NS. */
void tly_pool_look(struct tly_pool *p, int64_t now);

#endif
