/* window.h - windows: memory in a rank's segment through which its private tensor goes, block by block.
 *
 * Other processes' private memory is reached through the kernel only, which copies at a fraction of the speed of a core that
 * copies what it has in its cache.  So a rank puts blocks of its tensor into slots of its window, where the others read and
 * write them.
 *
 * A rank has memory for some windows only, and a round with a window here may wait for a rank where it has none.  So that
 * ranks never wait for each other in a circle, the lowest one elects one round after the other, each once the one before
 * has ended there (what is then left of that elsewhere needs no window), and each rank keeps a window for the elected.
 *
 * All under the engine's lock. */
#ifndef TLY_LOCAL_WINDOW_H
#define TLY_LOCAL_WINDOW_H

#include "local/engine.h"

struct tly_turn;

enum {
    TLY_WINDOW = 512 << 10
}; /* bytes at most: with what it comes from and goes to it stays in the second cache */

/* Have memory for the first windows, so that there is no lack of it later.  -ENOMEM: with a sentence. */
int tly_windows_open(struct tly_local *l);
void tly_windows_close(struct tly_local *l);

/* A round with windows begins: it may be elected. */
void tly_window_begin(struct tly_local *l, const struct tly_local_round *r);
/* A way's `let_go`: the round has left its operation.  Give the window back, and elect the next round. */
void tly_window_let_go(struct tly_local *l, struct tly_local_round *r, struct tly_local_op *op);

/* May this rank have a window for the round, or has it one?  first: no round with windows is before it. */
bool tly_window_can_open(const struct tly_local *l, const struct tly_local_round *r, bool first);
/* Have one, with r->slots blocks.  False: not now. */
bool tly_window_open(struct tly_local *l, struct tly_local_round *r);
/* Of many rounds, those far behind cannot get a window soon, and are not looked at.  One that has a window is to give it back
 * all the same: the elected one may wait for it. */
bool tly_window_is_passed_over(const struct tly_local *l, const struct tly_local_round *r,
                               const struct tly_turn *turn);

/* The slot of a block of this rank's own. */
uint8_t *tly_window_slot(const struct tly_local_round *r, uint32_t block);
/* Where this process sees the slot of a rank's block, with room for `length`.  NULL: it says what cannot be, and the job
 * fails. */
uint8_t *tly_window_seen(const struct tly_local *l, const struct tly_local_round *r, uint32_t rank,
                         uint32_t block, uint64_t length);

/* Copy to a slot, from which another rank reads. */
void tly_window_put(const struct tly_local *l, void *slot, const void *from, size_t n);

/* --- how far ranks are ---
 *
 * The rank's work entry says it, in blocks: `next` those that it has put in, `done` those that it is done with.  Only the
 * rank itself writes them.  A rank that has given the round up (tly_work_mark) has put in none. */

/* UINT32_MAX: it uses its entry for something else, so it has ended the round, and well. */
uint32_t tly_window_staged_by(const struct tly_local *l, const struct tly_local_round *r, uint32_t rank);
uint32_t tly_window_done_by(const struct tly_local *l, const struct tly_local_round *r, uint32_t rank);
/* Publish r->staged, or a number of blocks that this rank is done with. */
void tly_window_say_staged(const struct tly_local *l, const struct tly_local_round *r);
void tly_window_say_done(const struct tly_local *l, const struct tly_local_round *r, uint32_t blocks);

#endif
