/* segment.h - a rank's shared memory: one memfd, a head (control.h) and the pool behind it.
 *
 * The file is as large as the machine's memory and empty: pages come when they are touched, so that peers map it
 * once, at the start, and no descriptor is passed later.  Nothing has a name: what a killed rank leaves is gone
 * with the last process that maps it. */
#ifndef TLY_SEGMENT_H
#define TLY_SEGMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { TLY_PAGE = 4096 };

/* Lock: its own.  Lives until the last reference and the last block of its pool are gone. */
struct tly_segment;

/* A segment of this process with `head` bytes of zeros before its pool.  -errno, sentence set. */
int tly_segment_create(size_t head, struct tly_segment **segment);
void tly_segment_ref(struct tly_segment *s);
void tly_segment_unref(struct tly_segment *s);
uint8_t *tly_segment_base(const struct tly_segment *s);
uint64_t tly_segment_bytes(const struct tly_segment *s);
int tly_segment_fd(const struct tly_segment *s);

/* Map another process's segment; the descriptor stays the caller's.  Children of a fork do not get it. */
int tly_segment_map(int fd, uint64_t bytes, uint8_t **base);
/* Has another process's memfd so many bytes, and will it keep them?  Else reading it may be a SIGBUS. */
bool tly_segment_is_sound(int fd, uint64_t bytes);
void tly_segment_unmap(uint8_t *base, uint64_t bytes);

/* Where in the pool `p` lies, or 0: not in it. */
uint64_t tly_segment_place(const struct tly_segment *s, const void *p, uint64_t bytes);

/* Page-aligned memory, from the pool of `s` or, where that is NULL or exhausted, of this process alone; there in
 * full when the call returns.  -ENOMEM: with a sentence that says which limit. */
int tly_pool_alloc(struct tly_segment *s, size_t bytes, void **out);
/* Give it back; from any thread.  -EINVAL: not from tly_pool_alloc(). */
int tly_pool_free(void *p);
/* As they are, but from the pool or not at all, and pages that were used before are kept for the next. */
int tly_pool_borrow(struct tly_segment *s, size_t bytes, void **out);

#endif
