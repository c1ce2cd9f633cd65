/* rule.h - what a service does with the pushes of one part: a table of functions and facts.
 *
 * Each operation has a room, src/ops/NAME/.  Its service.c defines the rules that its parts follow:
 *
 *   all_reduce   all_reduce  the data of all ranks is reduced, range by range
 *                sum         the same without zeros for ranks that have joined: reduce, the parts of a reduce-scatter
 *   broadcast    root        the data of one rank goes to the others: also the pieces of an all-to-all, gather or scatter
 *   all_gather   list        what all ranks bring is put one behind the other: their first dimensions
 *                piece       one rank's piece goes to the others
 *   all_to_all   table       what all ranks bring is compared: how much each gives to whom
 *   message      message     as root, between two ranks; it may be offered first
 *                probe       one rank asks which message waits for it
 *   barrier      barrier     no rank brings data
 *                meet        the same, and all ranks must come: part 0 of a reduce-scatter
 *   shared       create      as root, and the service keeps the data
 *                add         one rank's data is added to what is kept, and it gets that
 *                read        the same without data
 *
 * A frame's `kind` (an operation of tally.h) and whether it belongs to part 0 select the rule: rule.c has that list.  The
 * files of src/sum/ read the table and never ask which operation it is.  A rule keeps no state outside the round: its
 * functions see one round, and nothing of them outlives it, but what shared tensors keep (sum/kept.h).
 *
 * All functions run in the loop's thread under its lock, but advance() where `divides` is set. */
#ifndef TLY_OPS_RULE_H
#define TLY_OPS_RULE_H

#include <stdbool.h>
#include <stdint.h>

#include "ops/givers.h"
#include "wire/frame.h"

struct tly_members;
struct tly_round;
struct tly_job;

/* Which groups a frame may name: any but two ranks alone, any, or two ranks alone. */
enum tly_rule_groups { TLY_LISTS, TLY_LISTS_AND_PAIRS, TLY_PAIRS };

struct tly_rule {
    const char *name;
    enum tly_givers givers; /* the other ranks ask for the result with a request */
    enum tly_rule_groups groups;
    bool streams; /* the result grows with what has come from all; else it comes once all of that is whole */
    bool divides; /* advance() may run for several ranges at once, in threads of the crew */
    bool borrows; /* inputs may be read in their ranks' memory: nothing of them outlives the sum */
    bool offers;  /* a push may be an offer, which is fetched once all have come, and may answer a probe */
    bool carried; /* one rank of a machine may push for all of them */

    /* What is wrong with the frame's type and size among these ranks, as a static text; NULL: nothing. */
    const char *(*check)(const struct tly_frame *f, const struct tly_members *who);
    /* Bytes of the result that a rank is sent, if it wants any; of TLY_NO_PEER: of the whole result. */
    uint32_t (*length)(const struct tly_frame *f, const struct tly_members *who, uint32_t rank);
    /* Do ranks of all go on without those that have joined?  NULL: no. */
    bool (*spares)(const struct tly_frame *f);
    /* All ranks have come: may the result begin?  False: not before another push comes.  NULL: yes. */
    bool (*may_start)(struct tly_job *job, const struct tly_round *r);
    /* By how many steps a rank that takes no part is too far behind for the result to begin.  NULL: no rank is. */
    uint32_t (*behind)(const struct tly_job *job, const struct tly_round *r, uint32_t rank);
    /* The input whose memory the result takes; NULL: none, or no function: the result has memory of its own. */
    uint8_t *(*place)(const struct tly_round *r);
    /* Make bytes [from, to) of the result.  NULL: there is none. */
    void (*advance)(struct tly_job *job, struct tly_round *r, uint32_t from, uint32_t to);
    /* The result is whole: keep it beyond the round.  NULL: the service keeps nothing, so after a loss it asks ranks only for what
     * another rank lacks. */
    void (*keep)(struct tly_job *job, const struct tly_round *r);
    /* All inputs are whole, or the result is to be kept and ranks may have all of it from another service: do they fit together?
     * Fails the round if not (tly_verdict_decide).  It may be asked again before the result begins.  NULL: they do. */
    void (*tell)(struct tly_job *job, struct tly_round *r);
};

/* A length(): all ranks are sent as much as each brings. */
static inline uint32_t tly_rule_part_length(const struct tly_frame *f, const struct tly_members *who,
                                            uint32_t rank)
{
    return f->length;
}

static inline bool tly_rule_gives(const struct tly_rule *rule, const struct tly_frame *f, uint32_t rank)
{
    return tly_gives(rule->givers, f->root, rank);
}

/* The rule of a push with this header; NULL: there is none. */
const struct tly_rule *tly_rule_of(const struct tly_frame *f);

/* One more, for the operation `number` (1 to TLY_KINDS - 1): of its part 0, and of its other parts.  Before any
 * service begins.  -EEXIST, -EINVAL. */
int tly_rule_register(uint8_t number, const struct tly_rule *first, const struct tly_rule *others);

/* NAME/service.c */
extern const struct tly_rule tly_rule_all_reduce, tly_rule_sum;
extern const struct tly_rule tly_rule_list;
extern const struct tly_rule tly_rule_table;
extern const struct tly_rule tly_rule_root, tly_rule_piece, tly_rule_message;
extern const struct tly_rule tly_rule_barrier, tly_rule_meet;
extern const struct tly_rule tly_rule_probe;
extern const struct tly_rule tly_rule_shared_create, tly_rule_shared_add, tly_rule_shared_read;

#endif
