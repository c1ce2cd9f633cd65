/* replica.h - what a rank has of a shared tensor (docs/why/shared.md): its last whole values, room for the next ones, and which
 * service keeps each part.
 *
 * Owner: the create until it has ended, then the tensor (names.lock); the loop, of all that operations change.  One operation of
 * the tensor is in flight at a time. */
#ifndef TLY_COMM_REPLICA_H
#define TLY_COMM_REPLICA_H

#include <stdbool.h>
#include <stdint.h>

#include "base/list.h"
#include "wire/kept.h"

struct tally_op;

struct tly_replica {
    struct tly_list node; /* comm->replicas, by key */
    uint64_t key, count;
    uint32_t round, epoch; /* of the create */
    uint8_t dtype, staleness;
    bool whole;      /* the create has ended here */
    bool awaited;    /* with the COMMIT under way: it has not ended on all ranks */
    uint32_t stayed; /* number of the epoch whose COMMIT listed the create, so no part moved; 0: none yet */
    struct tally_op *op; /* borrowed: in flight; or NULL */
    int newest;          /* the buffer that has the last whole values; values land in the other one */
    uint8_t *buffer[2];  /* owned */
    uint64_t credit;     /* so much in flight suits its parts */
    uint32_t part_count;
    struct tly_replica_part {
        uint64_t place;
        uint32_t length;
        uint16_t owner;             /* service */
        uint32_t came;              /* epoch in which it came there */
        int held;                   /* buffer with its last whole values */
        struct tly_version version; /* of these; epoch 0: there are none yet */
        uint8_t *told;              /* owned: their state; NULL: as the create left it */
        uint8_t *coming;            /* owned: the state of what lands next; NULL: not told yet */
    } * parts;                      /* owned */
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
/* The part's values, which are about to land, have this state, which is the replica's now. */
void tly_replica_expect(struct tly_replica *r, uint32_t part, uint8_t *state);
/* They have landed whole. */
void tly_replica_landed(struct tly_replica *r, uint32_t part);
/* The operation has ended.  The newest values are in one buffer. */
void tly_replica_settle(struct tly_replica *r, bool failed);

#endif
