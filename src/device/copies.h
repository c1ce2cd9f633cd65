/* copies.h - which bytes of an operation a GPU copies at a time, to the host and back (copies.c).
 *
 * It is for operations whose whole tensor is staged in memory of the host (comm/path/stager.c).  The input goes out in several
 * copies, so that its first parts are summed, and come back, while its last ones go out.  Results come back in the order in which
 * they land.  Those that wait for the lane meanwhile go in one copy as far as they are neighbours.
 *
 * Pure: what a copy does is the caller's business, as are locks. */
#ifndef TLY_DEVICE_COPIES_H
#define TLY_DEVICE_COPIES_H

#include <stdbool.h>
#include <stdint.h>

#include "base/list.h"

/* Bytes of each copy of an input of so many bytes, but for the last one: a multiple of 64 KB. */
uint64_t tly_copies_bytes(uint64_t input);

/* Results' copies that a lane is given at a time. */
enum { TLY_COPIES_MOST = 4 };

/* A part of an operation's result, in bytes of the tensor. */
struct tly_copies_part {
    uint64_t at;
    uint64_t bytes;
    bool waits; /* it has landed, and no copy has been given; owner: copies.c */
};

/* An operation's results.  The caller sets the first three fields, and initialises the node. */
struct tly_copies {
    uint64_t most; /* bytes of the input's copies; one of results takes parts until it has as many */
    uint32_t parts;
    struct tly_copies_part *part; /* borrowed: in the tensor's order */
    struct tly_list node;         /* in the lane, while results wait; owner: copies.c, as the next */
    uint32_t waiting;
};

/* A lane in which results are copied: operations in the order in which their results began to wait. */
struct tly_copies_lane {
    struct tly_list operations;
    int under_way; /* copies */
};

/* A copy of parts in a row. */
struct tly_copies_run {
    struct tly_copies *of;
    uint32_t first, count;
    uint64_t at, bytes;
};

void tly_copies_init(struct tly_copies_lane *lane);
/* The part's result has landed. */
void tly_copies_landed(struct tly_copies_lane *lane, struct tly_copies *c, uint32_t part);
/* Begin the next copy.  False: no result waits, or enough copies are under way. */
bool tly_copies_next(struct tly_copies_lane *lane, struct tly_copies_run *out);
/* A copy has ended, or could not be given. */
void tly_copies_end(struct tly_copies_lane *lane);
/* Forget the results that wait. */
void tly_copies_drop(struct tly_copies *c);

#endif
