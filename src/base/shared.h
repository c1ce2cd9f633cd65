/* shared.h - memory that other processes of this machine can be shown: memfds, of which one process writes.
 *
 * Nothing here can end in SIGBUS: a segment's pages are there before it is used (fallocate), and neither it nor
 * what is mapped of another process can shrink (seals).  A memfd has no name: nothing is left behind by a crash.
 * Forked children do not inherit the mapping. */
#ifndef TLY_SHARED_H
#define TLY_SHARED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tly_shared {
    uint8_t *data; /* page aligned, zeros at first */
    uint64_t size;
    int fd;
    bool huge; /* pages of 2 MB or more that were set aside for this */
};

/* At least `size` bytes, in huge pages where some are free, else in ordinary ones that the kernel may join.
 * writable: other processes may write, too; else none can, whatever it is passed.  -errno with a sentence that names
 * the limit, such as that of the cgroup. */
int tly_shared_create(uint64_t size, bool writable, struct tly_shared **out);
void tly_shared_destroy(struct tly_shared *s);

/* Map another process's segment, given by its descriptor, which may be closed then.  -EPROTO: it could shrink, or is
 * no segment. */
int tly_shared_map(int fd, bool writable, void **data, uint64_t *size);

#endif
