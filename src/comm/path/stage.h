/* stage.h - the stages of an operation: what its parts go through between a tensor and the network, and on the way back.
 *
 *     tensor ──▶ device ──▶ engine | team ──▶ codec ──▶ net ──▶ service
 *     tensor ◀── device ◀── engine | team ◀── codec ◀── net ◀── service
 *
 * Each place of the chain has one stage or none (stages.c).  An operation has the stages that suit it, and the network in
 * any case.  It keeps its chain until it ends.  The loop moves parts from stage to stage (chain.c); op.c says when.  A stage
 * may do its work in a thread of its own and be done with parts in any order.
 *
 * Where all ranks share one machine, the engine (src/local/) ends the chain: the parts turn back there.  If the engine diverts
 * the operation, they go on to the network.  Other ranks need not have the same stages before it.  An operation that has none
 * goes to the engine without a chain (`alone`), and to the stages behind it only if the engine diverts it.
 *
 * A part between `ready` and the moment at which the stage is done with it is the stage's, and so are five of its fields:
 * `input`, `landing`, `length`, `result_length` and `dtype`.  A stage that puts other data in the part's place (compressed,
 * in other memory) sets them to its own, and remembers where the part's result belonged before.  They stay so until the
 * operation ends, since a service may ask for the input again or for the result as it has landed.
 *
 * A shared stage works on whole tensors.  So the stages before it keep all inputs of an operation in one memory, each part at its
 * `place`, and all results in one memory.  All inputs are there before part 0.  Operations of pieces differ.  An allgather keeps
 * its input in one memory, and its results anywhere.  The others keep both anywhere: if they have a stage, the engine does not
 * take them.  A team copies a reduce-scatter's input, and an allgather's result, through one memory.
 *
 * Messages and probes have no stages.  Part 0 of an operation of pieces (tly_call.pieces) is no part of the tensor: it is a
 * roll call, and passes by all stages but a shared one.  What a rank gives itself is copied when the operation is cut, and
 * passes by them, too.
 *
 * If an allgather's pieces are unlike, they are cut when the answer to part 0 is here.  All ranks have part 0 then, so no stage
 * vouches any more.  There part 0 stands for this rank's whole piece on its way out: a stage is done with it once it has
 * prepared all of op->input, and it may set op->input to memory of its own.  `more` says that the other parts are cut.
 *
 * Failures: `begin` may fail.  A stage that `vouches` may also fail later on the way out: part 0 sets out once all other
 * parts are through it, so that this rank can take the operation back, and home tells all ranks.  A stage behind a shared one
 * cannot vouch, since the machine's other ranks wait for part 0: if it fails, the job does.  There are two exceptions.  While
 * part 0 is still in a stage, the operation alone is taken back.  Once this rank has taken it back, home's verdict comes.
 * A stage that fails on the way in, or after `more`, fails its own rank's operation, once all parts are through.  The part goes
 * on as it is. */
#ifndef TLY_COMM_STAGE_H
#define TLY_COMM_STAGE_H

#include <stdbool.h>

#include "comm/op/op.h"
#include "comm/op/part.h"

struct tly_cut;

struct tly_stage {
    const char *
        does; /* for users, of a part that it has, either way: "waits for its turn, or for other ranks of this machine" */
    bool vouches;
    /* The ranks of a machine go through it together.  The others wait for part 0, so no stage behind it vouches.  It has parts on
     * their way inward until all of them have landed. */
    bool shared;
    /* In the submitting thread (or where the engine diverts it), names.lock held, as the next: has it a share in this operation?
     * Changes nothing. */
    bool (*suits)(const tally_comm *c, const struct tally_op *op);
    /* It has one.  The operation has its key and round, and is submitted for certain: note in it, or of it, what must be known
     * by now.  Or NULL. */
    void (*take)(tally_comm *c, struct tally_op *op);
    /* ... and no stage before this one has: do the whole operation without a chain.  NULL: the chain begins here. */
    void (*alone)(tally_comm *c, struct tally_op *op);
    /* In the loop, as all below; names.lock held.  Cut a whole tensor, by a cut of all its bytes.  -ENOMEM.  NULL: it is cut as
     * without this stage. */
    int (*cut)(tally_comm *c, struct tally_op *op, const struct tly_cut *cut);
    /* The operation's parts are cut.  -errno, with a sentence (tly_error). */
    int (*begin)(tally_comm *c, struct tally_op *op);
    /* The other parts have been cut: op->parts has moved, and has more of them.  -ENOMEM: the communicator fails.  Or NULL. */
    int (*more)(tally_comm *c, struct tally_op *op);
    /* The part's input is there, or it asks for another rank's data (`input` is NULL).  1: this stage is done with it; 0: it
     * will be (tly_stage_passed); -ENOMEM: the communicator fails. */
    int (*ready)(tally_comm *c, struct tly_part *p);
    /* The network has admitted a part with its data, which this stage has handed on.  This may come after a withdrawal.  Or
     * NULL. */
    void (*admitted)(struct tly_part *p);
    /* The part's result is where this stage wanted it.  True: it is also where it belonged before; false: it will be. */
    bool (*landed)(tally_comm *c, struct tly_part *p);
    /* The part has landed, and no service will ask for anything of it.  Part 0 may be told twice: also once all parts are back at
     * the tensor.  Or NULL. */
    void (*settled)(struct tly_part *p);
    /* It has part 0, and this rank takes the operation back.  True: it asks the other ranks, and says that the parts have passed,
     * or that it is over.  False: it has said that.  NULL: the operation can be taken back at once. */
    bool (*take_back)(tally_comm *c, struct tally_op *op);
    /* When this returns, nobody is at the operation's buffers for this stage, and the stage says nothing more of its parts
     * (a team does, which is not heard).  No part comes any more, on either way.
     * over: the operation ends, and nobody needs the stage's memory either.  Else this rank takes it back, and what the
     * stage has handed on may still be read; over follows. */
    void (*withdraw)(tally_comm *c, struct tally_op *op, bool over);
};

/* stages.c */
/* The stage at each place, or NULL. */
extern const struct tly_stage *tly_stages[STAGE_NET + 1];
/* At which places between the tensor and the network there is one: a bit for each. */
extern unsigned tly_stages_between;
static inline const struct tly_stage *tly_stage_at(int place)
{
    return tly_stages[place];
}
/* Is there any before it? */
bool tly_stage_follows(int place);
/* Put a stage at a place, in the stead of the one there, before any communicator is opened. */
void tly_stage_register(enum tly_stage_place place, const struct tly_stage *s);

/* chain.c, for stages, from any thread */
/* Done with the part, in the direction in which it came. */
void tly_stage_passed(struct tly_part *p);
/* ... or it cannot be done.  err is positive. */
void tly_stage_failed(struct tly_part *p, int err, const char *sentence);
/* In the loop, in `ready`: the part's result is where this stage wants it, and the part turns back here. */
void tly_stage_turned(struct tly_part *p);
/* All parts that have not come back from this stage have. */
void tly_stage_over(struct tally_op *op, enum tly_stage_place place);
/* The stage cannot go on with the operation.  It ends with this, unless its home says more within a while. */
void tly_stage_lost(struct tally_op *op, int err, const char *sentence);

extern const struct tly_stage tly_stage_device, tly_stage_engine, tly_stage_team, tly_stage_net;

#endif
