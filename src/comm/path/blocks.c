/* blocks.c - memory for the sums of one operation that lie in no rank's output: equal blocks, had a credit at a time.
 *
 * An operation has no block until it sums its first part.  It gets a credit's worth of blocks when a part finds none free, up to
 * four credits.  So operations that wait for their turn hold no memory, and one that need not wait for other ranks holds little.
 *
 * Where memory is short an operation makes do with what it has, for its blocks come back.  One block is enough: all ranks go
 * through an operation's parts in the same order, and no operation waits for another one's block (test/model/blocks.pml).  Once the
 * pool is full, blocks come from this process's own memory.
 *
 * The free blocks are a stack.  Only one thread at a time takes from it, so its top cannot go and come back in the meantime. */
#include "comm/path/blocks.h"

#include <errno.h>
#include <string.h>

#include "local/segment.h"

void tly_blocks_plan(struct tly_blocks *b, uint32_t parts, uint32_t longest, uint64_t credit)
{
    b->size = longest > 64 ? (longest + 63) / 64 * 64 : 64;
    uint64_t most = 1 + TLY_BLOCKS_CREDITS * credit / b->size;
    b->left = parts < most ? parts : (uint32_t)most;
    b->each = (b->left + TLY_BLOCKS_CREDITS - 1) / TLY_BLOCKS_CREDITS;
}

static void blocks_push(struct tly_blocks *b, uint8_t *block)
{
    uint8_t *next = atomic_load(&b->spare);
    do
        memcpy(block, &next, sizeof next);
    while (!atomic_compare_exchange_weak(&b->spare, &next, block));
}

static uint8_t *blocks_pop(struct tly_blocks *b)
{
    uint8_t *top = atomic_load(&b->spare), *next;
    do {
        if (!top)
            return NULL;
        memcpy(&next, top, sizeof next);
    } while (!atomic_compare_exchange_weak(&b->spare, &top, next));
    return top;
}

static int blocks_allocate(struct tly_segment *pool, uint64_t bytes, uint8_t **out)
{
    void *at;
    int err = tly_pool_borrow(pool, bytes, &at);
    if (err)
        err = tly_pool_alloc(NULL, bytes, &at);
    *out = err ? NULL : at;
    return err;
}

/* Get another credit's worth, or the first block alone.  -ENOMEM: there is none, and no block that will come back. */
static int blocks_grow(struct tly_blocks *b, struct tly_segment *pool)
{
    uint32_t count = b->left < b->each ? b->left : b->each;
    uint8_t **memory = &b->memory[b->taken];
    if (!count || b->taken == TLY_BLOCKS_CREDITS)
        return 0;
    int err = blocks_allocate(pool, (uint64_t)count * b->size, memory);
    if (err && b->taken) {
        b->left = 0;
        return 0;
    }
    if (err && count > 1) {
        count = 1;
        err = blocks_allocate(pool, b->size, memory);
    }
    if (err)
        return err;
    b->taken++;
    b->left -= count;
    while (count-- > 0)
        blocks_push(b, *memory + (uint64_t)count * b->size);
    return 0;
}

uint8_t *tly_blocks_take(struct tly_blocks *b, struct tly_segment *pool, int *err)
{
    uint8_t *block = blocks_pop(b);
    *err = block ? 0 : blocks_grow(b, pool);
    if (block || *err)
        return block;
    atomic_store(&b->starved, true); /* then look: tly_blocks_give() sees that, or we see its block */
    block = blocks_pop(b);
    if (block)
        atomic_store(&b->starved, false);
    return block;
}

bool tly_blocks_give(struct tly_blocks *b, uint8_t *block)
{
    blocks_push(b, block);
    return atomic_exchange(&b->starved, false);
}

void tly_blocks_finish(struct tly_blocks *b)
{
    for (uint32_t i = 0; i < b->taken; i++)
        tly_pool_free(b->memory[i]);
    *b = (struct tly_blocks){0};
}
