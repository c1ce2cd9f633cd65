/*
 * blocks.pml - a team's sums of a reduce lie in blocks until no service will ask for them again, in Promela.
 *
 * Two machines have a carrier each.  Two operations, which the carriers begin in any order, have parts, of which each carrier sums
 * the next one once a block of the operation is free (src/comm/path/blocks.c).  A part is answered once both have pushed it, and is
 * stable once both have the answer.  A service may die: of what is not stable the substitute asks for all again.  README.md says
 * which mutants (MUTANT_...) are checked.
 *
 *   it can be given again   kill: all sums that are asked for lie in blocks
 *   no deadlock             monitor: when nothing can move any more, all parts are stable
 */
#ifndef PARTS
#define PARTS 3
#endif
#ifndef BLOCKS
#define BLOCKS 1 /* of an operation */
#endif
#ifndef KILLS
#define KILLS 1
#endif
#define CARRIERS 2
#define OPS 2
#define AT(c, o, k) (((c) * OPS + (o)) * PARTS + (k))

#define TO_SUM 0
#define SUMMED 1
#define PUSHED 2
#define ANSWERED 3
#define STABLE 4

/* Scratch of one step; never part of a state. */
hidden byte k, used;

byte state[CARRIERS * OPS * PARTS];
byte kills = KILLS;

#ifdef MUTANT_FREE_WHEN_ANSWERED
#define LIES(c, o, k) (state[AT(c, o, k)] == SUMMED || state[AT(c, o, k)] == PUSHED)
#else
#define LIES(c, o, k) (state[AT(c, o, k)] >= SUMMED && state[AT(c, o, k)] <= ANSWERED)
#endif

#define IN(c, o) ((LIES(c, o, 0) -> 1 : 0) + (LIES(c, o, 1) -> 1 : 0) + (LIES(c, o, 2) -> 1 : 0))
#if PARTS != 3 || OPS != 2
#error "IN() is of three parts, HAS_ROOM() of two operations"
#endif

#ifdef MUTANT_ONE_POOL
#define HAS_ROOM(c, o) (IN(c, 0) + IN(c, 1) < BLOCKS * OPS)
#else
#define HAS_ROOM(c, o) (IN(c, o) < BLOCKS)
#endif

#define OTHER(c) (CARRIERS - 1 - (c))
/* The next one of the operation to be summed. */
#define IS_NEXT(c, o, p) (state[AT(c, o, p)] == TO_SUM && ((p) == 0 || state[AT(c, o, (p) - 1)] != TO_SUM))

proctype carrier(byte c; byte op; byte part)
{
    /* What becomes of one part at one carrier. */
end:
    do
    :: d_step { IS_NEXT(c, op, part) && HAS_ROOM(c, op) -> state[AT(c, op, part)] = SUMMED }
    :: d_step { state[AT(c, op, part)] == SUMMED -> state[AT(c, op, part)] = PUSHED }
    :: d_step { /* the service has the other one's, too */
           state[AT(c, op, part)] == PUSHED && state[AT(OTHER(c), op, part)] >= PUSHED ->
           state[AT(c, op, part)] = ANSWERED
       }
    :: d_step { /* counts say that all have it */
           state[AT(c, op, part)] == ANSWERED && state[AT(OTHER(c), op, part)] >= ANSWERED ->
           state[AT(c, op, part)] = STABLE
       }
    od
}

/* Who has not heard that a part is stable is asked again, if the other one has not either; else it hears it now. */
proctype kill()
{
    byte c, i;
    if
    :: d_step {
           kills > 0 ->
           kills--;
           for (c : 0 .. CARRIERS - 1) {
               for (i : 0 .. OPS - 1) {
                   used = 0;
                   for (k : 0 .. PARTS - 1) {
                       if
                       :: state[AT(c, i, k)] == ANSWERED && state[AT(OTHER(c), i, k)] == STABLE -> state[AT(c, i, k)] = STABLE
                       :: state[AT(c, i, k)] >= SUMMED && state[AT(c, i, k)] <= ANSWERED && state[AT(OTHER(c), i, k)] != STABLE ->
                           used++;
                           state[AT(c, i, k)] = SUMMED
                       :: else -> skip
                       fi
                   }
                   assert(used <= BLOCKS) /* it can be given again */
               }
           }
           c = 0;
           i = 0
       }
    :: kills == 0
    fi
}

/* Nothing can move any more: is all well? */
active proctype monitor()
{
    byte i, j, p;
    atomic {
        for (i : 0 .. CARRIERS - 1) {
            for (j : 0 .. OPS - 1) {
                for (p : 0 .. PARTS - 1) {
                    run carrier(i, j, p)
                }
            }
        }
        run kill()
    }
    timeout ->
    for (i : 0 .. CARRIERS * OPS * PARTS - 1) {
        assert(state[i] == STABLE) /* no deadlock */
    }
}
