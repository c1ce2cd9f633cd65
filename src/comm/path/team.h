/* team.h - the ranks of a machine that push large tensors, or gather, together (team.c): a stage (stage.h).
 *
 * Owner: the loop, but for the engine's callbacks. */
#ifndef TLY_COMM_TEAM_H
#define TLY_COMM_TEAM_H

#include <stdbool.h>

#include "comm/op/carriers.h"
#include "local/local.h"
#include "tally/tally.h"

struct tally_op;
struct tly_part;

/* Of a part: what the engine has of it, if this rank carries it for its team; else clear. */
struct tly_shard {
    struct tly_local_piece piece;
    uint8_t *landing; /* of a gathering: where the result belongs, as the part came */
};

/* Below this, the roll call and the hand-overs cost more than sending twice. */
enum { TLY_TEAM_BYTES = 16 << 10 };

/* Fixed once open. */
struct tly_teams {
    bool on;                /* all machines' ranks share memory */
    bool sums;              /* if they do, they push large tensors together, which changes no sum */
    bool gathers;           /* they gather together: they reach one another's private memory, too */
    struct tly_seats seats; /* none: there will be no teams */
};

/* Who carries what, once the roster is known.  -ENOMEM, sentence set. */
int tly_team_begin(tally_comm *c);
void tly_team_finish(tally_comm *c);
/* All ranks together, once all runs: can all machines' ranks share memory?  Sets c->teams.  As tally_op_wait(). */
int tly_team_agree(tally_comm *c);
/* Does the machine's team gather this, if it has TLY_TEAM_BYTES or more? */
bool tly_team_gathers(const struct tally_op *op);
/* Parts of rank `rank`'s piece have, one after the other, these carriers: a rank of each machine, of which that rank is one.
 * Returns the number of their list, if this rank is one, too (*ours).  turn: the part's number in the piece. */
uint32_t tly_team_carriers(const struct tally_op *op, uint32_t rank, uint32_t turn, bool *ours);
/* Machines that take part. */
int tly_team_machines(const struct tally_op *op);
/* The part is `place` bytes behind the result's begin.  What this rank does not carry has landed.  first: before those that were
 * shared before. */
void tly_team_share(struct tly_part *p, uint64_t place, bool first);
/* So many parts are cut, of a result of so many bytes.  Of what this rank carries so many bytes may be asked for that have
 * not landed. */
void tly_team_shared(struct tally_op *op, uint32_t parts, uint64_t bytes, uint64_t ahead);
/* The engine's callbacks; from any thread. */
void tly_team_summed(void *comm, struct tly_local_piece *piece);
uint8_t *tly_team_place(void *comm, struct tly_local_piece *piece);

/* May there be teams? */
static inline bool tly_teams_are_listed(const struct tly_teams *t)
{
    return t->seats.rank != NULL;
}

/* NULL: there will be none. */
static inline const struct tly_seats *tly_teams_seats(const struct tly_teams *t)
{
    return tly_teams_are_listed(t) ? &t->seats : NULL;
}

/* Does each machine push a sum once? */
static inline bool tly_teams_push(const struct tly_teams *t)
{
    return t->on && t->sums;
}

#endif
