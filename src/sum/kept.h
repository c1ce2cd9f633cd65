/* kept.h - what a service keeps of shared tensors between rounds: a table of their parts.  docs/why/shared.md says what ranks and
 * services make of it.  Owner: the loop. */
#ifndef TLY_SUM_KEPT_H
#define TLY_SUM_KEPT_H

#include <stdbool.h>
#include <stdint.h>

#include "sum/round.h"

struct tly_frame;
struct tly_job;

/* One part.  Allocated with an entry for each rank of the job behind it. */
struct tly_kept {
    uint64_t key;
    uint32_t part;
    uint32_t length;  /* bytes */
    uint32_t created; /* round of the create */
    uint8_t dtype;
    uint8_t staleness; /* additions that a rank may be ahead of another; 0: no limit */
    uint64_t version;  /* additions applied */
    uint8_t *values;   /* owned, from the job's quota */
    struct tly_kept_rank {
        struct tly_round *open; /* its last operation, until that is complete; NULL: it is.  Borrowed */
        uint32_t last;          /* round of its last operation that was applied */
        uint32_t clock;         /* its additions since the create, or since all ranks last joined */
    } rank[];
};

/* The round is the last operation of its rank on the part, until it is complete. */
static inline void tly_kept_open(struct tly_kept *s, struct tly_round *r)
{
    s->rank[r->head.rank].open = r;
    r->kept = s;
}

static inline void tly_kept_close(struct tly_round *r)
{
    r->kept->rank[r->head.rank].open = NULL;
    r->kept = NULL;
}

/* The part that a frame is about; NULL: it is not kept here. */
struct tly_kept *tly_kept_find(const struct tly_job *job, const struct tly_frame *f);
/* Keep the part that the frame of a create describes.  What an earlier create of that name has left goes.  Its values are not set.
 * NULL: there is no memory. */
struct tly_kept *tly_kept_make(struct tly_job *job, const struct tly_frame *f);
/* Bytes that may still be reserved for parts. */
uint64_t tly_kept_room(const struct tly_job *job);
/* By how many additions the rank is farther behind than the staleness allows, for one after which its rank's clock is `clock`. */
uint32_t tly_kept_behind(const struct tly_job *job, const struct tly_kept *s, uint32_t rank, uint32_t clock);
/* All ranks have joined: they begin level. */
void tly_kept_level(struct tly_job *job);
void tly_kept_finish(struct tly_job *job);

#endif
