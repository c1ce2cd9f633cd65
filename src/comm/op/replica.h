/* replica.h - what a rank has of a shared tensor (docs/why/shared.md): its last whole values, room for the next ones, and which
 * service keeps each part.
 *
 * Owner: the create until it has ended, then the tensor (names.lock).  Operations of the tensor, of which one is in flight, hold
 * its buffers: the loop. */
#ifndef TLY_COMM_REPLICA_H
#define TLY_COMM_REPLICA_H

#include <stdbool.h>
#include <stdint.h>

struct tly_replica {
    uint64_t count;
    uint8_t dtype;
    int newest;         /* the buffer that has the last whole values; values land in the other one */
    uint8_t *buffer[2]; /* owned */
    uint64_t credit;    /* so much in flight suits its parts */
    uint32_t part_count;
    struct tly_replica_part {
        uint64_t place;
        uint32_t length;
        uint16_t owner; /* service */
    } * parts;          /* owned */
};

/* What an operation of a shared tensor has of its own (tly_op_own).  Owner: the loop, once it has been submitted. */
struct tly_shared_op {
    struct tly_replica *made; /* owned: of a create, until it has ended */
    const uint8_t *values;    /* the buffer in which its values land; borrowed from the replica */
};

/* replica.c */
/* Of `count` elements, of `bytes` in all; without parts.  NULL: out of memory. */
struct tly_replica *tly_replica_make(uint64_t count, uint64_t bytes, uint8_t dtype);
void tly_replica_destroy(struct tly_replica *r);
/* Does this service keep a part of it?  NULL: no. */
bool tly_replica_is_at(const struct tly_replica *r, uint32_t service);

#endif
