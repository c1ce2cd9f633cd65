/* blocks.h - memory of one operation for the sums that a team's carrier has no output for (blocks.c). */
#ifndef TLY_COMM_BLOCKS_H
#define TLY_COMM_BLOCKS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct tly_segment;

/* Credits that lie in blocks: one that is summed ahead, one on its way, and two that wait for other ranks. */
enum { TLY_BLOCKS_CREDITS = 4 };

/* The taker is the holder of the engine's lock.  The loop gives. */
struct tly_blocks {
    uint8_t *memory[TLY_BLOCKS_CREDITS]; /* owned, from the pool; owner: the taker */
    uint32_t taken;                      /* how many of these there are; owner: the taker */
    uint32_t size;                       /* bytes of a block, a multiple of 64; fixed once planned */
    uint32_t each;                       /* blocks in one memory; fixed once planned */
    uint32_t left;                       /* blocks that the operation may still get; owner: the taker */
    _Atomic(uint8_t *) spare; /* the first free block, which holds the address of the next; or NULL */
    atomic_bool starved;      /* the taker has found none */
};

/* `parts` parts of at most `longest` bytes will need a block each.  It takes no memory yet. */
void tly_blocks_plan(struct tly_blocks *b, uint32_t parts, uint32_t longest, uint64_t credit);
/* A free block.  NULL and *err 0: there will be one, of which tly_blocks_give() tells.  NULL and *err -ENOMEM, with a sentence:
 * there is no memory even for one.  It may populate megabytes of the pool, under the engine's lock. */
uint8_t *tly_blocks_take(struct tly_blocks *b, struct tly_segment *pool, int *err);
/* The block is free again.  True: the taker waits for one. */
bool tly_blocks_give(struct tly_blocks *b, uint8_t *block);
/* Free the memory.  No thread may take or give a block any more. */
void tly_blocks_finish(struct tly_blocks *b);

#endif
