/* way.h - the ways that an operation can go among the ranks of one machine: one contract (struct tly_way) and one table
 * (ways.c, in which the first way that suits is taken).
 *
 *   alone     in the rings, before there is a round       a small operation that is the only one under way
 *   divert    it is given back, for the service           ranks disagree, or one refuses or has no memory for it
 *   gpu       GPUs sum in groups                           some rank's tensor is on such a GPU
 *   eager     each rank makes its result at once          all data came in the posts
 *   team      carriers sum pieces or copy them to others  there are several machines, each with a team
 *   staging   block by block through windows (window.h)   it reduces, and some rank's tensor is private memory
 *   pooled    each chunk by whoever is free                it reduces or is a broadcast, and all tensors are in the pool
 *   fetch     each rank takes from the others             all else
 *
 * A round has a way (round->way) from the moment at which this rank posts it.  Once all posts are there the way is chosen
 * for good: all ranks choose the same one.  The round begins, and a step follows the other until it is finished.
 *
 * All under the engine's lock. */
#ifndef TLY_LOCAL_WAY_H
#define TLY_LOCAL_WAY_H

#include "local/engine.h"

enum tly_at_once { TLY_AT_ONCE_NOT, TLY_AT_ONCE_ENDED, TLY_AT_ONCE_POSTED };

enum tly_local_begun {
    TLY_BEGUN,       /* steps will follow */
    TLY_BEGUN_ENDED, /* all of it is done */
    TLY_BEGUN_NEVER, /* it cannot be: the job has been told why (`broken`) */
};

/* A look through the ready rounds. */
struct tly_turn {
    uint64_t before; /* bytes that wait to be sent, of this round and of those before it */
    int windowed;    /* rounds with windows before it */
};

struct tly_way {
    const char *name;

    /* Do it in the thread that submits, which will wait for it, without a round.  NOT: nothing was done.  POSTED: `p` is in
     * our ring, where l->tail was before; the others' posts have not all come, or are of something else.  NULL: it takes a
     * round. */
    enum tly_at_once (*at_once)(struct tly_local *l, const struct tly_local_op *op, struct tly_post *p);

    /* Does the round go this way?  all: by the posts that are there; all ranks say the same once no other will come.  Else by
     * our own alone, before that is shown. */
    bool (*suits)(const struct tly_local *l, const struct tly_local_round *r, bool all);
    /* Our post is about to be shown, and may still be changed: lend the others what they are to reach.  False: there is no
     * memory for that, and all ranks give the operation back.  NULL: there is nothing to prepare. */
    bool (*prepare)(struct tly_local *l, struct tly_local_round *r);
    /* All posts are there, and sound.  NULL: the operation is given back on all ranks. */
    enum tly_local_begun (*begin)(struct tly_local *l, struct tly_local_round *r);
    /* Do one thing.  True: something was done. */
    bool (*step)(struct tly_local *l, struct tly_local_round *r, const struct tly_turn *turn);
    /* Is there something to do? */
    bool (*can_step)(const struct tly_local *l, const struct tly_local_round *r, const struct tly_turn *turn);
    bool (*is_finished)(const struct tly_local_round *r);
    /* Does what is left of it need no other rank?  NULL: once it is finished. */
    bool (*needs_none)(const struct tly_local *l, const struct tly_local_round *r);
    /* It is finished: put the result into the caller's memory.  NULL: it is there. */
    void (*finish)(const struct tly_local *l, const struct tly_local_round *r);
    /* It ends before it is finished.  When this returns, nobody is at this rank's memory for it, nor will be.  False: the
     * job fails meanwhile.  NULL: nobody can be. */
    bool (*give_up)(struct tly_local *l, const struct tly_local_round *r);
    /* The operation has left the round: give back what it has borrowed.  NULL: that goes back to the pool,
     * but for a team's, which stays until its user gives it back. */
    void (*let_go)(struct tly_local *l, struct tly_local_round *r, struct tly_local_op *op);
};

/* --- ways.c --- */

/* Do it at once, if a way can. */
enum tly_at_once tly_way_at_once(struct tly_local *l, const struct tly_local_op *op, struct tly_post *p);
/* The way that the round will go by our own post, which is about to be shown. */
const struct tly_way *tly_way_expected(const struct tly_local *l, const struct tly_local_round *r);
/* The way that it goes by all posts that are there.  complete: no other will come.  NULL: that depends on those to come. */
const struct tly_way *tly_way_chosen(const struct tly_local *l, const struct tly_local_round *r,
                                     bool complete);

extern const struct tly_way tly_way_alone, tly_way_divert, tly_way_gpu, tly_way_eager, tly_way_team,
    tly_way_staging, tly_way_pooled, tly_way_fetch;

#endif
