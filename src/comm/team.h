/* team.h - the ranks of a machine that push large tensors together (team.c): a stage (stage.h).
 *
 * Owner: the loop, but for the engine's callbacks. */
#ifndef TLY_COMM_TEAM_H
#define TLY_COMM_TEAM_H

#include <stdbool.h>

#include "comm/part.h"
#include "local/local.h"
#include "tally/tally.h"

struct cut;

/* Who would carry what, once the roster is known.  -ENOMEM, sentence set. */
int tly_team_begin_lists(tally_comm *c);
void tly_team_finish(tally_comm *c);
/* All ranks together, once all runs: can all machines' ranks share memory?  Sets c->teams.  As tally_op_wait(). */
int tly_team_agree(tally_comm *c);
/* In the loop: the operation's parts by a cut of all its bytes; names_lock held.  -ENOMEM. */
int tly_team_cut(tally_comm *c, struct tally_op *op, const struct cut *cut);
/* The engine's callbacks; from any thread. */
void tly_team_summed(void *comm, struct tly_local_piece *piece);
void tly_team_over(struct tally_op *op, int err, const char *sentence);

static inline bool tly_team_carries(const struct part *p)
{
    return p->shard.op != NULL;
}

#endif
