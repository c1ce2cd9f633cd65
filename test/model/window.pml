/*
 * window.pml - a service's window grows and shrinks while ranks push, in Promela.
 *
 * Two ranks push the same parts to one service, each in an order of its own, the next one only if it fits into what is
 * granted.  A round is answered once both have pushed it.  The service changes its window at any moment, within what the
 * roster allows, and connections break.  What is granted never falls: a smaller window is reached by withholding grants until
 * answered + window >= granted (src/sum/window.c).  README.md says which mutants (MUTANT_...) are checked.
 *
 *   never more than granted   arrive: no rank pushes beyond what the service has granted
 *   it shrinks                grant: what is granted and unanswered grows to the window at most, and each answer makes it
 *                             less while it is above that; but a rank that others wait for may push one part
 *   no deadlock               monitor: when nothing can move any more, all rounds have been answered
 */
#ifndef PARTS
#define PARTS 4
#endif
#ifndef CHANGES
#define CHANGES 2 /* of the window */
#endif
#ifndef BREAKS
#define BREAKS 0 /* connections that end; another one follows at once */
#endif
#define RANKS 2
#define MOST 2  /* of the longest part; others are shorter */
#define FIRST 4 /* the window with which each connection begins, as the roster says */
#define RP(r, k) ((r) * PARTS + (k))
#define SIZE(k) (1 + (k) % MOST)
#define NTH(r, n) ((r) == 0 -> (n) : PARTS - 1 - (n)) /* which part a rank pushes n-th */

#define TO_PUSH 0
#define UNDERWAY 1
#define HERE 2     /* the service has it, */
#define PAID 3     /* or has had it over a connection that is no more: it takes no window of this one */
#define ANSWERED 4

/* Scratch of one step; never part of a state. */
hidden byte k, o, before;

byte state[RANKS * PARTS];
byte window = FIRST; /* the service's, now */
byte changes = CHANGES, breaks = BREAKS;
chan up[RANKS] = [2] of { byte };
/* Of each connection: cumulative sizes, as each end counts them. */
byte pushed[RANKS], known[RANKS];             /* the rank: sent, and granted as far as it has heard */
byte came[RANKS], answered[RANKS], granted[RANKS]; /* the service */

#define OTHER(r) (RANKS - 1 - (r))

/* Does some round that the other rank has pushed lack this one? */
inline lacks(r)
{
    o = 0;
    for (k : 0 .. PARTS - 1) {
        o = o || ((state[RP(OTHER(r), k)] == HERE || state[RP(OTHER(r), k)] == PAID) &&
                  (state[RP(r, k)] == TO_PUSH || state[RP(r, k)] == UNDERWAY))
    }
}

/* before: what was granted and unanswered; less: by how much that must be less now if it is above the window. */
inline grant(r, less)
{
#ifdef MUTANT_KEEP_GRANTING
    granted[r] = granted[r] + less;
#endif
#ifdef MUTANT_REVOKE
    granted[r] = answered[r] + window;
#endif
    granted[r] = (granted[r] < answered[r] + window -> answered[r] + window : granted[r]);
    lacks(r);
#ifndef MUTANT_LET_WAIT
    granted[r] = (o == 1 && granted[r] < came[r] + MOST -> came[r] + MOST : granted[r]);
#endif
    assert(granted[r] - answered[r] <= window || (o == 1 && granted[r] == came[r] + MOST) ||
           granted[r] - answered[r] == before - less) /* it shrinks */
}

inline answer_if_all(part)
{
    if
    :: state[RP(0, part)] >= HERE && state[RP(1, part)] >= HERE ->
        for (q : 0 .. RANKS - 1) {
            before = granted[q] - answered[q];
            if
            :: state[RP(q, part)] == HERE ->
                answered[q] = answered[q] + SIZE(part);
                state[RP(q, part)] = ANSWERED;
                grant(q, SIZE(part))
            :: else -> state[RP(q, part)] = ANSWERED
            fi
        }
    :: else -> /* the other one is waited for */
        before = granted[OTHER(r)] - answered[OTHER(r)];
        grant(OTHER(r), 0)
    fi
}

inline begin_connection(r)
{
    do
    :: len(up[r]) > 0 -> up[r]?_
    :: else -> break
    od;
    for (k : 0 .. PARTS - 1) {
        state[RP(r, k)] = (state[RP(r, k)] == UNDERWAY -> TO_PUSH : (state[RP(r, k)] == HERE -> PAID : state[RP(r, k)]))
    }
    pushed[r] = 0;
    known[r] = FIRST;
    came[r] = 0;
    answered[r] = 0;
#ifdef MUTANT_BEGIN_AT_NEWEST
    granted[r] = window;
#else
    granted[r] = FIRST;
#endif
    before = granted[r];
    grant(r, 0)
}

/* The first part that it has not sent; PARTS: there is none. */
#define OPEN(r, n) (state[RP(r, NTH(r, n))] == TO_PUSH)
#define NEXT(r) (OPEN(r, 0) -> NTH(r, 0) : (OPEN(r, 1) -> NTH(r, 1) : (OPEN(r, 2) -> NTH(r, 2) : (OPEN(r, 3) -> NTH(r, 3) : PARTS))))
#if PARTS != 4
#error "NEXT() is of four parts"
#endif

proctype rank(byte r)
{
    byte part, q;
end:
    do
    :: d_step { /* push the next one */
           NEXT(r) < PARTS && nfull(up[r]) && pushed[r] + SIZE(NEXT(r)) <= known[r] ->
           part = NEXT(r);
           pushed[r] = pushed[r] + SIZE(part);
           state[RP(r, part)] = UNDERWAY;
           up[r]!part;
           part = 0
       }
    :: d_step { /* the service reads it */
           len(up[r]) > 0 ->
           up[r]?part;
           came[r] = came[r] + SIZE(part);
           assert(came[r] <= granted[r]); /* never more than granted */
           state[RP(r, part)] = HERE;
           before = granted[r] - answered[r];
           grant(r, 0);
           answer_if_all(part);
           part = 0;
           q = 0
       }
    :: d_step { known[r] < granted[r] -> known[r] = granted[r] } /* COUNTS */
    :: d_step {
           breaks > 0 ->
           breaks--;
           begin_connection(r)
       }
    od
}

/* Memory gets short, or is there again. */
proctype service()
{
    byte q;
end:
    do
    :: changes > 0 ->
       atomic {
           changes--;
           if
           :: window = MOST
           :: window = FIRST - 1
           :: window = FIRST + 2
           fi;
           d_step {
               for (q : 0 .. RANKS - 1) {
                   before = granted[q] - answered[q];
                   grant(q, 0)
               }
               q = 0
           }
       }
    od
}

/* Nothing can move any more: is all well? */
active proctype monitor()
{
    byte i;
    d_step {
        for (i : 0 .. RANKS - 1) {
            known[i] = FIRST;
            granted[i] = FIRST
        }
        i = 0
    }
    atomic {
        run rank(0);
        run rank(1);
        run service()
    }
    timeout ->
    for (i : 0 .. RANKS * PARTS - 1) {
        assert(state[i] == ANSWERED) /* no deadlock */
    }
}
