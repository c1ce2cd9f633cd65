/* kind.h - what the service does with the pushes of one part, as a table of functions and facts for each kind.
 *
 * Kinds and the files that define them, in src/sum/kinds/:
 *
 *   sum    all ranks' data is reduced, range by range: all-reduce, reduce, the parts of a reduce-scatter
 *   list   what all ranks bring is put one behind the other: the first dimensions of an allgather
 *   table  what all ranks bring is compared: who gives how much to whom in an alltoall, gather or scatter
 *   root   one rank's data goes to the others: broadcast, the pieces of an allgather or alltoall, messages
 *   meet   no rank brings data: a barrier
 *   probe  one rank asks which message waits for it
 *
 * A frame's `kind` (an operation of tally.h) and whether it belongs to part 0 select the kind: kind.c has that list.
 * round.c, service.c and the others read the table and never ask which kind it is.  A kind keeps no state outside
 * the round: its functions see one round, and nothing of them outlives it.
 *
 * All functions run in the loop's thread under its lock, but advance() where `divides` is set. */
#ifndef TLY_SUM_KIND_H
#define TLY_SUM_KIND_H

#include <stdbool.h>
#include <stdint.h>

#include "wire/frame.h"

struct members;
struct round;
struct tly_job;

/* Which ranks bring data.  The others ask for the result with a request. */
enum tly_kind_givers { TLY_ALL_GIVE, TLY_ROOT_GIVES, TLY_NONE_GIVE };

/* Which groups a frame of the kind may name: any but two ranks alone, any, or two ranks alone. */
enum tly_kind_groups { TLY_LISTS, TLY_LISTS_AND_PAIRS, TLY_PAIRS };

struct tly_kind {
    const char *name;
    enum tly_kind_givers givers;
    enum tly_kind_groups groups;
    bool streams; /* the result grows with what has come from all; else it comes once all of that is whole */
    bool divides; /* advance() may run for several ranges at once, in threads of the crew */
    bool borrows; /* inputs may be read in their ranks' memory: nothing of them outlives the sum */
    bool offers;  /* a push may be an offer, which is fetched once all have come, and may answer a probe */
    bool carried; /* one rank of a machine may push for all of them */

    /* What is wrong with the frame's type and size among these ranks, as a static text; NULL: nothing. */
    const char *(*check)(const struct tly_frame *f, const struct members *who);
    /* Bytes of the result that a rank is sent, if it wants any; of TLY_NO_PEER: of the whole result. */
    uint32_t (*length)(const struct tly_frame *f, const struct members *who, uint32_t rank);
    /* Do ranks of all go on without those that have joined?  NULL: no. */
    bool (*spares)(const struct tly_frame *f);
    /* All ranks have come: may the result begin?  False: not before another offer comes.  NULL: yes. */
    bool (*may_start)(struct tly_job *job, const struct round *r);
    /* The input whose memory the result takes; NULL: none, or no function: the result has memory of its own. */
    uint8_t *(*place)(const struct round *r);
    /* Make bytes [from, to) of the result.  NULL: there is none. */
    void (*advance)(struct tly_job *job, struct round *r, uint32_t from, uint32_t to);
    /* All inputs are whole: do they fit together?  Fails the round if not (tly_verdict_decide).  NULL: they do. */
    void (*tell)(struct tly_job *job, struct round *r);
};

/* A length(): all ranks are sent as much as each brings. */
static inline uint32_t tly_kind_part_length(const struct tly_frame *f, const struct members *who,
                                            uint32_t rank)
{
    return f->length;
}

static inline bool tly_kind_gives(const struct tly_kind *k, const struct tly_frame *f, uint32_t rank)
{
    return k->givers == TLY_ALL_GIVE || (k->givers == TLY_ROOT_GIVES && rank == f->root);
}

/* The kind of a push with this header; NULL: there is none. */
const struct tly_kind *tly_kind_of(const struct tly_frame *f);

/* One more, for the operation `number` (1 to TLY_KINDS - 1): of its part 0, and of its other parts.  Before any
 * service begins.  -EEXIST, -EINVAL. */
enum { TLY_KINDS = 32 };
int tly_kind_register(uint8_t number, const struct tly_kind *first, const struct tly_kind *others);

/* kinds/NAME.c */
extern const struct tly_kind tly_kind_all_reduce, tly_kind_sum;
extern const struct tly_kind tly_kind_list;
extern const struct tly_kind tly_kind_table;
extern const struct tly_kind tly_kind_root, tly_kind_piece, tly_kind_message;
extern const struct tly_kind tly_kind_barrier, tly_kind_meet;
extern const struct tly_kind tly_kind_probe;

#endif
