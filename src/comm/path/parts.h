/* parts.h - how an operation is cut into parts (parts.c), and what the operations' rooms need for that.  Owner: the loop. */
#ifndef TLY_COMM_PARTS_H
#define TLY_COMM_PARTS_H

#include <stdint.h>

#include "tally/tally.h"

struct tally_op;

/* Cut an operation whose epoch is known: what is known of it by now.  -errno. */
int tly_parts_make(tally_comm *c, struct tally_op *op);

/* Part 0 alone, which each rank pushes empty: its home sees that all have come.  -ENOMEM. */
int tly_parts_roll_call(tally_comm *c, struct tally_op *op);
/* The parts of the tensor, each of which all ranks push and want.  If a stage cuts it otherwise, that one's parts.
 * -ENOMEM. */
int tly_parts_whole(tally_comm *c, struct tally_op *op);
/* What each rank gives each other rank, through the receiver's machine, behind part 0.  table: elements for each rank of the
 * group, then from each; NULL: each gives its whole input to all.  -ENOMEM, -EINVAL with a sentence. */
int tly_parts_exchange(tally_comm *c, struct tally_op *op, const int64_t *table);
/* Room for `more` parts behind part 0.  -ENOMEM, -EINVAL with a sentence. */
int tly_parts_more(struct tally_op *op, uint64_t more);

/* Length of the parts of so many pieces, which are `bytes` together: as in a tensor of that length over as many services
 * (struct tly_cutting).  The same on all ranks.  The operation gets a credit that suits them. */
uint32_t tly_parts_choose(struct tally_op *op, uint64_t bytes, int pieces);
/* How many parts of that length so many bytes have. */
uint32_t tly_parts_count(uint64_t bytes, uint32_t part);
/* Length of the part that begins at byte `at` of so many. */
uint32_t tly_parts_length(uint64_t at, uint64_t bytes, uint32_t part);

#endif
