/* work.h - what the ways (way.h) have in common: how data are summed, who has done how much, private memory, waiting for
 * neighbours; and what a way offers to others than the table.  All under the engine's lock. */
#ifndef TLY_LOCAL_WORK_H
#define TLY_LOCAL_WORK_H

#include "local/engine.h"
#include "ops/local.h"
#include "reduce/reduce.h"

/* --- work.c --- */

extern const uint8_t tly_work_zeros[TLY_ZEROS]; /* stands for a rank that has joined */

/* How the operation sums. */
struct tly_reduction tly_work_how(const struct tly_local *l, const struct tly_local_op *op);
/* Fill in what this rank takes of the rank with each place, of given[] bytes. */
void tly_work_takes(const struct tly_local *l, const struct tly_local_op *op, const uint64_t given[],
                    struct tly_local_take take[]);
/* Fill in the range of the result that the rank with each place gets. */
void tly_work_ranges(const struct tly_local *l, const struct tly_local_op *op,
                     struct tly_local_range range[]);
/* Bytes of that rank's output that others write.  In a team that is the whole result, or nothing. */
uint64_t tly_work_output_bytes(const struct tly_local *l, const struct tly_local_op *op, uint32_t place);

static inline bool tly_work_is_in(const struct tly_local_range *range, uint64_t at)
{
    return at - range->begin < range->bytes; /* wraps below the range */
}

/* Make the result in this rank's memory of what each rank gives, which lies at in[]. */
void tly_work_make(const struct tly_local *l, const struct tly_local_op *op, const void *const in[]);

/* Do the others find the data of the rank with this place by its post?  In a team, a rank whose data are not summed copies
 * them to the others itself. */
bool tly_work_gives(const struct tly_local_op *op, uint32_t place);

/* Where the others cannot reach this rank's private memory: have memory in the pool for it instead, with the input in it,
 * and say so in our post.  writes: they write into the output, too.  False: there is none. */
bool tly_work_lend(struct tly_local *l, struct tly_local_op *op, struct tly_post *own, bool writes);
/* The same wherever the input or output is not in the pool.  later: the input is not copied yet. */
bool tly_work_stage(struct tly_local *l, struct tly_local_op *op, struct tly_post *own, bool writes,
                    bool later);

/* Tell the user, once, that there is no room in the pool (tly_error() says why), and what happens instead. */
#define TLY_DIVERTED "such operations go through the network stack, which is slower"
void tly_work_say_full(struct tly_local *l, const char *instead);

/* Have a work entry for our post.  False: none is free. */
bool tly_work_take_entry(struct tly_local *l, struct tly_post *own);
/* The one of a rank's post. */
static inline struct tly_work *tly_work_entry(const struct tly_local *l, const struct tly_local_round *r,
                                              uint32_t rank)
{
    return &l->at[rank].control->work[r->posts[rank].work];
}
/* The round's work entry is that of the first place whose rank has posted it. */
void tly_work_share(struct tly_local *l, struct tly_local_round *r);
/* One more chunk is done: whoever counts the last one tells the others.  False: not where a rank has failed. */
bool tly_work_count(struct tly_local *l, const struct tly_local_round *r);
/* Has all of it been counted? */
bool tly_work_is_finished(const struct tly_local_round *r);

/* The round's name in `working`, the same on all ranks.  Two rounds may share a name; a rank then waits for both. */
static inline uint32_t tly_work_name(const struct tly_local_round *r)
{
    return (uint32_t)(r->id >> 32) | 1;
}

/* Wait until no neighbour works at what has this name.  A neighbour that is stopped there breaks the communicator, or this
 * rank's thread would wait for it and be taken for dead itself.  False: the job fails meanwhile. */
bool tly_work_await_others(struct tly_local *l, uint32_t at);
/* Mark the entry of our post: this rank gives the round up.  What is read of its memory from here on counts for nothing. */
void tly_work_mark(const struct tly_local *l, const struct tly_local_round *r);
/* Has a rank done so?  A way that has read the rank's memory asks behind a fence, as that in tly_work_is_given_up(). */
bool tly_work_is_marked(const struct tly_local *l, const struct tly_local_round *r, uint32_t rank);
/* A way's `give_up`, where other ranks write into this rank's memory: mark the entry, then wait.  A rank that is
 * about to write sets `working`, then looks at the marks of all ranks.  So it does not matter which ranks have begun. */
bool tly_work_give_up(struct tly_local *l, const struct tly_local_round *r);
/* Copy from or to a rank's private memory, with the care that it takes.  False: it cannot be reached any more. */
bool tly_work_read(struct tly_local *l, uint32_t rank, uint64_t from, void *to, size_t len);
bool tly_work_write(struct tly_local *l, uint32_t rank, uint64_t to, const void *from, size_t len);
/* Where this process sees a rank's input or output; NULL: in that rank's private memory. */
uint8_t *tly_work_seen(const struct tly_local *l, uint32_t rank, uint64_t at, bool pool);
/* Has the communicator of one of these ranks failed?  What was read of its memory may be something else by now. */
bool tly_work_is_given_up(const struct tly_local *l, const struct tly_local_group *g);

/* --- pooled.c --- */

/* Cut a large reduction or broadcast into chunks. */
void tly_pooled_cut(struct tly_local_round *r);

/* --- ferry.c --- */

/* A block of a team's tensor. */
struct tly_ferry_block {
    uint64_t at; /* where it begins */
    uint32_t length;
    const uint8_t *from; /* the data that all outputs are to have there; NULL: the inputs are wanted */
};

/* Have a window for other ranks' blocks.  -ENOMEM: with a sentence. */
int tly_ferry_open(struct tly_local *l);
void tly_ferry_close(struct tly_local *l);
/* Have ranks whose memory we cannot reach copy the block, cut to what a slot holds.  True: all such ranks have, or there is none.
 * False: not yet, or a rank has ended the operation; ask again when something has changed. */
bool tly_ferry_move(struct tly_local *l, const struct tly_local_round *r, struct tly_ferry_block *b);
/* Where that rank's block lies, once tly_ferry_move() is true and until it is called again.  NULL: in memory that we reach. */
uint8_t *tly_ferry_slot(struct tly_local *l, const struct tly_local_round *r, uint32_t rank, bool writes);
/* Copy what other ranks ask for.  True: there was something. */
bool tly_ferry_serve(struct tly_local *l);

/* --- team.c --- */

/* How a machine's ranks sum.  The service divides, and applies the second factor. */
struct tly_reduction tly_team_how(const struct tly_local_op *op);
/* Write into the work entry what the post lacks and a rank that stands in must know. */
void tly_team_describe(const struct tly_local_op *op, struct tly_work *w);
/* Have all ranks posted as many parts?  If not, the job fails. */
bool tly_team_is_cut_alike(struct tly_local *l, const struct tly_local_round *r);

/* Give a result to the others.  False: not now, or never. */
bool tly_team_spread(struct tly_local *l, struct tly_local_round *r, struct tly_local_piece *piece);

#endif
