/* team.h - the stage (stage.h) of a machine's ranks that push sums, broadcast and gather as a team (team.c).
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

/* A part's side of the engine, if this rank carries the part; else all zeros. */
struct tly_shard {
    struct tly_local_piece piece;
    uint8_t *landing; /* where a gathered result belongs: the part's own landing when it came */
};

/* Least bytes of a team's tensor: below, the roll call and the hand-overs cost more than sending twice. */
enum { TLY_TEAM_BYTES = 16 << 10 };

/* Fixed once open. */
struct tly_teams {
    bool on;                /* all machines' ranks share memory */
    bool sums;              /* teams may sum for all ranks, if they are on; the roster says so */
    bool gathers;           /* teams gather: all ranks of a machine reach each other's private memory, too */
    struct tly_seats seats; /* empty: there are no teams */
};

/* Fill in where all ranks sit, and the carriers of all ranks.  The roster is known.  -ENOMEM, sentence set. */
int tly_team_begin(tally_comm *c);
void tly_team_finish(tally_comm *c);
/* Agree with all ranks whether the ranks of every machine share memory.  Sets c->teams.  Errors are those of tally_op_wait(). */
int tly_team_agree(tally_comm *c);
/* Does the team gather this operation, if that has TLY_TEAM_BYTES or more? */
bool tly_team_gathers(const struct tally_op *op);
/* The list of carriers for part `turn` of rank `rank`'s piece.  That rank is one of them.  Returns the list's number on the wire,
 * which only means something if this rank is a carrier, too (*ours). */
uint32_t tly_team_carriers(const struct tally_op *op, uint32_t rank, uint32_t turn, bool *ours);
/* How many machines the operation's ranks are on. */
int tly_team_machines(const struct tally_op *op);
/* Give the part to the engine if this rank carries it; otherwise its state is PART_LANDED.  It lies `place` bytes behind the
 * beginning of the whole tensor or result.  first: the engine takes it before the parts that it has. */
void tly_team_share(struct tly_part *p, uint64_t place, bool first);
/* All ranks' pieces together have so many parts and bytes.  `ahead`: bytes that this rank may have asked for and not received (0:
 * any); a sum's stage sets its own. */
void tly_team_shared(struct tally_op *op, uint32_t parts, uint64_t bytes, uint64_t ahead);
/* The engine's callbacks; from any thread. */
void tly_team_summed(void *comm, struct tly_local_piece *piece);
uint8_t *tly_team_place(void *comm, struct tly_local_piece *piece);

/* May there be teams, once all ranks have agreed? */
static inline bool tly_teams_are_listed(const struct tly_teams *t)
{
    return t->seats.rank != NULL;
}

/* Where all ranks sit.  NULL: there are no teams. */
static inline const struct tly_seats *tly_teams_seats(const struct tly_teams *t)
{
    return tly_teams_are_listed(t) ? &t->seats : NULL;
}

/* Does each machine push the sum of all its ranks once? */
static inline bool tly_teams_push(const struct tly_teams *t)
{
    return t->on && t->sums;
}

#endif
