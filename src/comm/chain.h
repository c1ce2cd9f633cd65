/* chain.h - parts on their way through the stages of their operation (chain.c); stage.h is what stages see.
 *
 * Owner: the loop, but for tly_chain_choose. */
#ifndef TLY_COMM_CHAIN_H
#define TLY_COMM_CHAIN_H

#include <stdbool.h>

#include "base/list.h"
#include "tally/tally.h"

struct cut;
struct part;
struct tally_op;

/* The places of stages, from the tensor outward (stage.h). */
enum stage_place { STAGE_TENSOR, STAGE_DEVICE, STAGE_TEAM, STAGE_CODEC, STAGE_NET };

/* names.lock held. */
void tly_chain_choose(tally_comm *c, struct tally_op *op);
/* In the loop; names.lock held.  Cut a whole tensor as one of its stages wants it.  1: none does; -ENOMEM. */
int tly_chain_cut(tally_comm *c, struct tally_op *op, const struct cut *cut);
/* -errno, with a sentence. */
int tly_chain_begin(tally_comm *c, struct tally_op *op);
/* Hand out all parts.  -ENOMEM. */
int tly_chain_start(tally_comm *c, struct tally_op *op);
/* The part goes on from where it is, outward.  -ENOMEM. */
int tly_chain_out(tally_comm *c, struct part *p);
/* The part goes on from where it is, inward.  True: it is back at the tensor. */
bool tly_chain_in(tally_comm *c, struct part *p);
/* The network has admitted the part. */
void tly_chain_admitted(struct part *p);
/* What stages have said since, to be gone through by the loop; over: a list for each place, as comm->over.  False:
 * nothing. */
bool tly_chain_take(tally_comm *c, struct tly_list *passed, struct tly_list *over);
/* The next operation of such a list, or NULL. */
struct tally_op *tly_chain_next(struct tly_list *over, int place);
/* This rank takes the operation back, and home will send a verdict: no stage but the network goes on with it.  A loss that
 * a stage has told and nobody has heard is forgotten, as are later ones: the verdict ends the operation. */
void tly_chain_stop(tally_comm *c, struct tally_op *op);
/* The operation ends: when this returns, nobody is at its buffers any more.  landed: all of it has. */
void tly_chain_withdraw(tally_comm *c, struct tally_op *op, bool landed);
/* What the stage that has this part does with it, or what the part waits for. */
const char *tly_chain_does(const struct part *p);
/* A stage has this part on its way inward.  A shared one does not count: it has its parts until all of them have landed. */
bool tly_chain_holds(const struct part *p);

#endif
