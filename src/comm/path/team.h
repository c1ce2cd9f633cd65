/* team.h - the ranks of a machine that push large tensors together (team.c): a stage (stage.h).
 *
 * Owner: the loop, but for the engine's callbacks. */
#ifndef TLY_COMM_TEAM_H
#define TLY_COMM_TEAM_H

#include <stdbool.h>

#include "local/local.h"
#include "tally/tally.h"

struct tally_group;

/* Of a part: what the engine has of it, if this rank carries it for its team; else clear. */
struct tly_shard {
    struct tly_local_piece piece;
};

/* Fixed once open. */
struct tly_teams {
    bool on;   /* each machine's ranks push large tensors together */
    int lists; /* the most ranks that a machine has */
    struct tally_group *
        *carry; /* owned: for each of these a rank of each machine; NULL: there will be no teams */
};

/* Who would carry what, once the roster is known.  -ENOMEM, sentence set. */
int tly_team_begin_lists(tally_comm *c);
void tly_team_finish(tally_comm *c);
/* All ranks together, once all runs: can all machines' ranks share memory?  Sets c->teams.  As tally_op_wait(). */
int tly_team_agree(tally_comm *c);
/* The engine's callbacks; from any thread. */
void tly_team_summed(void *comm, struct tly_local_piece *piece);

/* May there be teams? */
static inline bool tly_teams_are_listed(const struct tly_teams *t)
{
    return t->carry != NULL;
}

/* Are there? */
static inline bool tly_teams_are_on(const struct tly_teams *t)
{
    return t->on;
}

#endif
