/* kept.h - what a service keeps of shared tensors between rounds: a table of their parts.  docs/why/shared.md says how ranks and
 * services use it.  Owner: the loop. */
#ifndef TLY_SUM_KEPT_H
#define TLY_SUM_KEPT_H

#include <stdbool.h>
#include <stdint.h>

#include "sum/round.h"
#include "wire/kept.h"

struct tly_frame;
struct tly_job;

enum tly_kept_state {
    KEPT_HELD,    /* the values are here */
    KEPT_GATHERS, /* memory for the values is here; they come from a rank or with the create's end (regain.c) */
    KEPT_NO_MEMORY /* the values would come in the same way, and there is no memory for them */
};

/* One part.  Allocated with an entry for each rank of the job behind it. */
struct tly_kept {
    uint64_t key;
    uint32_t part;
    uint32_t length;  /* bytes */
    uint32_t created; /* round of the create */
    uint8_t dtype;
    uint8_t staleness; /* additions that a rank may be ahead of another; 0: no limit */
    enum tly_kept_state state;
    struct tly_version version; /* epoch: in which the part came here; count: additions applied since */
    uint32_t joins;             /* how often all ranks had joined when clocks began at 0 */
    uint8_t *values;            /* owned, from the job's quota; NULL: there is no memory */
    uint32_t giver;             /* rank that has been asked for the values; TLY_NO_PEER: none */
    uint8_t *coming;            /* owned: state of the values that the giver sends; NULL: not come yet */
    uint32_t filled;            /* bytes that have come from the giver */
    struct tly_kept_rank {
        struct tly_round *open; /* borrowed: its last operation; NULL: that is complete */
        uint32_t last;          /* round of its last operation that was applied */
        uint32_t clock;         /* its additions since the create, or since all ranks last joined */
        struct tly_version had; /* the version that it has named in this epoch; epoch 0: none */
        bool named;             /* it has, or may have, named the part since it last said DONE */
        bool gave_up; /* it has said DONE and not named the part, or the part's create has failed (CANCEL) */
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
/* Keep the part that the frame of a create describes, and drop what an earlier create of that name has left.  The part is
 * KEPT_GATHERS until the create has ended (tly_regain_created).  NULL: there is no memory. */
struct tly_kept *tly_kept_make(struct tly_job *job, const struct tly_frame *f);
/* The same for a part that comes here with this epoch's COMMIT.  Without memory for its values it is KEPT_NO_MEMORY.  NULL: there
 * is none for the table either, or the table is full. */
struct tly_kept *tly_kept_expect(struct tly_job *job, const struct tly_frame *f);
/* The part comes here (again) with this epoch: what was here of it is void. */
void tly_kept_gather(struct tly_job *job, struct tly_kept *s, uint32_t epoch);
/* Try again to get memory for its values.  False: there is none. */
bool tly_kept_has_memory(struct tly_job *job, struct tly_kept *s);
/* Forget the rank that has been asked for the values, and what has come from it. */
void tly_kept_forget_giver(struct tly_job *job, struct tly_kept *s);
void tly_kept_drop(struct tly_job *job, struct tly_kept *s);
/* Write the part's state to `out`, tly_state_bytes() long; take such a state over. */
void tly_kept_write(const struct tly_job *job, const struct tly_kept *s, uint8_t *out);
void tly_kept_read(const struct tly_job *job, struct tly_kept *s, const uint8_t *in);
/* Bytes that may still be reserved for parts. */
uint64_t tly_kept_room(const struct tly_job *job);
/* How many additions `rank` must still make before one that has brought its own rank's clock to `clock` may be answered. */
uint32_t tly_kept_behind(const struct tly_job *job, const struct tly_kept *s, uint32_t rank, uint32_t clock);
/* All ranks have joined, for the `joins`-th time: clocks begin at 0. */
void tly_kept_level(struct tly_job *job, uint32_t joins);
/* For tests: append the part, its version and what has been done to it to a file (TALLY_SHARED_LOG). */
void tly_kept_log(const struct tly_job *job, const struct tly_kept *s, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void tly_kept_finish(struct tly_job *job);

#endif
