/* copy.h - a copy around the caches. */
#ifndef TLY_COPY_H
#define TLY_COPY_H

#include <stddef.h>

/* Copy to where a core of another socket reads next.
 *
 * A line that a core has written lies in its cache, and the other socket's read has to fetch it from there; before the core
 * can write the line again, it has to take it back.  Each way costs up to 500 ns, and prefetchers do not hide it.  What goes
 * around the caches lies in memory, which is read several lines at a time.  Any alignment; the ranges do not overlap.  Who
 * sees a release store behind the call sees all of the copy. */
void tly_copy_streaming(void *to, const void *from, size_t n);

#endif
