/* work.h - what is done with the data of a round whose posts are all there: among ranks of one machine by work.c, through
 * windows by staging.c, by a team of several machines by team.c.  All under the engine's lock. */
#ifndef TLY_LOCAL_WORK_H
#define TLY_LOCAL_WORK_H

#include "local/engine.h"
#include "reduce/reduce.h"

/* --- work.c --- */

/* Cut a large reduction into parts. */
void tly_work_cut(const struct tly_local *l, struct tly_round *r);
/* Do a part, or what this rank has to read.  True: something was done.  Whoever does the last part tells the others. */
bool tly_work_do(struct tly_local *l, struct tly_round *r);
/* Is there a part that no rank has taken? */
bool tly_work_left(const struct tly_round *r);
/* Has all of it been done? */
static inline bool tly_work_finished(const struct tly_round *r)
{
    if (r->windowed)
        return r->copied == r->parts;
    uint64_t v = atomic_load_explicit(&r->work->done, memory_order_acquire);
    return (uint32_t)(v >> 32) != r->gen || (uint32_t)v >= r->parts;
}

/* This rank ends a round that cannot be finished and does not go through windows.  When it returns, no rank is in a part
 * of it or begins one.  False: the job fails meanwhile. */
bool tly_work_give_up(struct tly_local *l, const struct tly_round *r);
/* Wait until no neighbour works at what has this name.  A neighbour that is stopped there breaks the communicator, or this
 * rank's thread would wait for it and be taken for dead itself.  False: the job fails meanwhile. */
bool tly_work_await_others(struct tly_local *l, uint32_t at);
/* Make the result in this rank's memory of what each rank gives, which lies at in[]. */
void tly_work_make(const struct tly_local *l, const struct tly_local_op *op, const void *const in[]);
/* The same; all posts hold their payload. */
void tly_work_eager(struct tly_local *l, struct tly_round *r);

/* Copy from or to a rank's private memory, with the care that it takes.  False: it cannot be reached any more. */
bool tly_work_read(struct tly_local *l, uint32_t rank, uint64_t from, void *to, size_t len);
bool tly_work_write(struct tly_local *l, uint32_t rank, uint64_t to, const void *from, size_t len);
/* Where this process sees a rank's input or output; NULL: in that rank's private memory. */
uint8_t *tly_work_seen(const struct tly_local *l, uint32_t rank, uint64_t at, bool pool);
/* How the operation sums. */
struct tly_reduction tly_work_how(const struct tly_local *l, const struct tly_local_op *op);
/* Has some rank's communicator failed?  What was read of its memory may be something else by now. */
bool tly_work_is_given_up(const struct tly_local *l);

/* --- staging.c --- */

/* Is some rank's tensor in private memory?  All posts are there. */
bool tly_staging_suits(const struct tly_local *l, const struct tly_round *r);
/* Have memory for the first windows, so that there is no lack of it later.  -ENOMEM: with a sentence. */
int tly_staging_open(struct tly_local *l);
void tly_staging_close(struct tly_local *l);
/* This rank's tensor, in private memory, is about to be posted: put the beginning of it in.  r->posts has the post, r->op the
 * operation. */
void tly_staging_prepare(struct tly_local *l, struct tly_round *r);
/* Begin; all posts are there. */
void tly_staging_begin(struct tly_local *l, struct tly_round *r);
/* Is it the one for which each rank keeps a window? */
bool tly_staging_is_elected(const struct tly_local *l, const struct tly_round *r);
/* A round has become ready, or this one has ended here: is another to be elected, and by this rank? */
void tly_staging_elect(struct tly_local *l, const struct tly_round *ended);
/* Do a block; `first`: no other round that goes through windows comes before it.  True: something was done. */
bool tly_staging_do(struct tly_local *l, struct tly_round *r, bool first);
/* Is there a block to do? */
bool tly_staging_can(const struct tly_local *l, const struct tly_round *r, bool first);
/* Is all of it summed, so that what is left needs no other rank? */
bool tly_staging_is_summed(const struct tly_local *l, const struct tly_round *r);
void tly_staging_give_back(struct tly_local *l, struct tly_local_op *op);
/* This rank's window and tensor are lent no more, and nobody is at them.  False: the job fails meanwhile. */
bool tly_staging_give_up(struct tly_local *l, const struct tly_round *r);

/* --- team.c --- */

/* Begin; all posts of the round are there.  False: they do not fit together. */
bool tly_team_begin(struct tly_local *l, struct tly_round *r);
/* Give a result to the others, or sum a piece; `before`: so many bytes wait to be sent before it or of it.  True:
 * something was done. */
bool tly_team_do(struct tly_local *l, struct tly_round *r, uint64_t before);
/* Give a result to the others.  False: not now, or never. */
bool tly_team_spread(struct tly_local *l, struct tly_round *r, struct tly_local_piece *piece);
/* This rank's buffers are lent no more, and nobody is at them.  False: the job fails meanwhile. */
bool tly_team_give_up(struct tly_local *l, const struct tly_round *r);

#endif
