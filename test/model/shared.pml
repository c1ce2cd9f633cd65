/*
 * shared.pml - one part of a shared tensor, which a service keeps, moves from service to service, in Promela.
 *
 * Each rank adds ADDS differences, one at a time.  The service that keeps the part applies each once and answers with all that it
 * has.  COMMIT names another owner: when the owner has died, or for the sake of the split.  The ranks then tell the new owner which
 * version they hold (HAVE, DONE), and the lowest holder of the highest version gives it (FINAL).  Connections break.  A rank may
 * join.  README.md says which mutants (MUTANT_...) are checked.
 *
 *   once          take: no addition is applied twice
 *   never back    land: an answer has all that this rank has seen, and its own addition
 *   bounded       land: no rank that goes on is more than BOUND additions behind
 *   nothing lost  monitor: when nothing can move any more, all additions have ended, and the owner has them all
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef ADDS
#define ADDS 2
#endif
#ifndef KILLS
#define KILLS 1
#endif
#ifndef MOVES
#define MOVES 0
#endif
#ifndef BREAKS
#define BREAKS 0
#endif
#ifndef BOUND
#define BOUND 0 /* none */
#endif
#ifndef RESTS
#define RESTS 0
#endif
#define SERVICES 2
#define LAST 1 /* it lives as long as the job */
#if RANKS > 3 || ADDS > 2
#error "a set of additions is a byte, and so are the numbers of three ranks"
#endif

#define CN(i, s) ((i) * SERVICES + (s))
#define SI(s, i) ((s) * RANKS + (i))
#define BIT(i, r) (1 << ((i) * ADDS + (r) - 1))
/* A version: the epoch in which the part came to its owner, and how many additions this has applied. */
#define VERSION(epoch) ((epoch) * 8)
#define EPOCH_OF(version) ((version) / 8)

mtype = { PUSH, HAVE, DONE, FINAL, JOINED, RESULT, ASK };
/* type; an addition's number or an epoch; a version; additions; their numbers, two bits a rank */
chan up[RANKS * SERVICES] = [1] of { mtype, byte, byte, byte, byte };
chan down[RANKS * SERVICES] = [1] of { mtype, byte, byte, byte, byte };

/* Scratch of one step; never part of a state. */
hidden byte n, version, values, numbers, q;
hidden mtype type;

/* services */
#define NOTHING 0
#define GATHERS 1
#define HELD 2
bool alive[SERVICES];
byte state[SERVICES], since[SERVICES]; /* since: the epoch in which the part came here */
byte w[SERVICES], v[SERVICES];         /* additions applied; their version */
byte a[SERVICES * RANKS];              /* each rank's last one */
byte pends[SERVICES * RANKS];          /* pushed before the part is here */
byte due[SERVICES * RANKS];            /* to be answered */
byte had[SERVICES * RANKS];
bool said[SERVICES * RANKS];           /* DONE */
bool joined[SERVICES * RANKS];
#define NOBODY 0
#define CHOSEN 1
#define ASKED 2
byte giver[SERVICES], holder[SERVICES]; /* how far it is with its holder, and who that is */

/* ranks */
#define QUIET 0
#define SAY_HAVE 1
#define SAY_DONE 2
#define SAY_PUSH 3
byte flight[RANKS], ended[RANKS], say[RANKS];
bool gives[RANKS];  /* FINAL */
byte epoch[RANKS], own[RANKS], moved[RANKS]; /* moved: the epoch in which the part came to its owner */
byte cv[RANKS], cw[RANKS], ca[RANKS]; /* what it holds: version, values, numbers */
bool rests;
bool tell[RANKS * SERVICES];

/* coordinator */
byte newest = 1, target;
byte kills = KILLS, moves = MOVES, breaks = BREAKS;

#define ALL_SAID(s) (said[SI(s, 0)] && said[SI(s, 1)] && (RANKS == 2 || said[SI(s, RANKS - 1)]))
#define ALL_IN(e) (epoch[0] == (e) && epoch[1] == (e) && epoch[RANKS - 1] == (e))
#define RESTING(i) (rests && (i) == RANKS - 1)

/* Nobody that goes on is too far behind. */
#if BOUND > 0 && !defined(MUTANT_ANSWERED_AT_ONCE)
#ifdef MUTANT_JOINED_IS_AWAITED
#define NEAR(s, j, r) (a[SI(s, j)] + BOUND >= (r))
#else
#define NEAR(s, j, r) (joined[SI(s, j)] || a[SI(s, j)] + BOUND >= (r))
#endif
#define MAY_ANSWER(s, r) (NEAR(s, 0, r) && NEAR(s, 1, r) && NEAR(s, RANKS - 1, r))
#else
#define MAY_ANSWER(s, r) true
#endif

inline take(s, i, r)
{
    assert(r <= a[SI(s, i)] + 1);
#ifdef MUTANT_APPLIED_AGAIN
    if
    :: true ->
#else
    if
    :: r == a[SI(s, i)] + 1 ->
#endif
        assert(!(w[s] & BIT(i, r))); /* once */
        w[s] = w[s] | BIT(i, r);
        a[SI(s, i)] = r;
        v[s]++
    :: else
    fi;
    due[SI(s, i)] = r
}

/* The part is said to come here in this epoch. */
inline gather(s, e)
{
#ifdef MUTANT_OLD_STATE
    if
    :: e > since[s] && state[s] != HELD ->
#else
    if
    :: e > since[s] ->
#endif
        state[s] = GATHERS;
        since[s] = e;
        giver[s] = NOBODY;
        for (q : 0 .. RANKS - 1) {
            pends[SI(s, q)] = 0;
            due[SI(s, q)] = 0;
            had[SI(s, q)] = 0;
            said[SI(s, q)] = false
        }
        q = 0
    :: else
    fi
}

/* The lowest holder of the highest version. */
inline choose(s)
{
    holder[s] = 0;
    for (q : 0 .. RANKS - 1) {
#ifdef MUTANT_ANY_HOLDER
        skip
#else
        if
        :: had[SI(s, q)] > had[SI(s, holder[s])] -> holder[s] = q
        :: else
        fi
#endif
    }
    q = 0
}

inline take_final(s)
{
    state[s] = HELD;
    giver[s] = NOBODY;
    w[s] = values;
    v[s] = VERSION(since[s]);
    for (q : 0 .. RANKS - 1) {
#ifdef MUTANT_NUMBERS_ARE_GUESSED
        a[SI(s, q)] = (pends[SI(s, q)] > 0 -> pends[SI(s, q)] - 1 : (numbers >> (2 * q)) & 3);
#else
        a[SI(s, q)] = (numbers >> (2 * q)) & 3;
#endif
        had[SI(s, q)] = 0;
        said[SI(s, q)] = false;
        if
        :: pends[SI(s, q)] > 0 -> take(s, q, pends[SI(s, q)])
        :: else
        fi;
        pends[SI(s, q)] = 0
    }
    q = 0
}

/* How much of rank j's is among the values. */
#define HAS(set, j) (((set) & BIT(j, 1) -> 1 : 0) + ((set) & BIT(j, ADDS) -> ADDS - 1 : 0))
#if BOUND > 0
#define IS_NEAR(set, j, r) (RESTING(j) || HAS(set, j) + BOUND >= (r))
#else
#define IS_NEAR(set, j, r) true
#endif

inline land(i)
{
    assert((values & cw[i]) == cw[i] && (values & BIT(i, n))); /* never back */
    assert(IS_NEAR(values, 0, n) && IS_NEAR(values, 1, n) && IS_NEAR(values, RANKS - 1, n)); /* bounded */
    cv[i] = version;
    cw[i] = values;
    ca[i] = numbers;
#ifdef MUTANT_KEPT_WHILE_IN_FLIGHT
    cv[i] = 0;
    cw[i] = 0;
    ca[i] = 0;
#endif
    ended[i] = n;
    flight[i] = 0
}

#ifdef MUTANT_LANDED_FROM_THE_OLD_OWNER
#define LANDS(i, s) (n == flight[i])
#else
#ifdef MUTANT_LANDED_FROM_BEFORE
#define LANDS(i, s) (n == flight[i] && s == own[i])
#else
#define LANDS(i, s) (n == flight[i] && s == own[i] && EPOCH_OF(version) == moved[i])
#endif
#endif

#ifdef MUTANT_SOME_HAVE_SAID
#define MAY_ASK(s) (said[SI(s, 0)] || said[SI(s, 1)])
#else
#define MAY_ASK(s) ALL_SAID(s)
#endif

#ifdef MUTANT_OLD_WORDS
#define COUNTS(s, e) true
#else
#define COUNTS(s, e) ((e) == since[s])
#endif

/* Between rank i and service s: each step is a frame sent or a frame received. */
proctype connection(byte i, s)
{
end:
    do
    /* rank -> service */
    :: d_step {
           own[i] == s && say[i] == SAY_HAVE && nfull(up[CN(i, s)]) ->
           up[CN(i, s)]!HAVE, moved[i], cv[i], 0, 0;
           say[i] = SAY_DONE
       }
    :: d_step {
           own[i] == s && say[i] == SAY_DONE && nfull(up[CN(i, s)]) ->
           up[CN(i, s)]!DONE, moved[i], 0, 0, 0;
           say[i] = (flight[i] > 0 -> SAY_PUSH : QUIET)
       }
    :: d_step {
           own[i] == s && say[i] == SAY_PUSH && nfull(up[CN(i, s)]) ->
           up[CN(i, s)]!PUSH, flight[i], 0, 0, 0;
           say[i] = QUIET
       }
    :: d_step {
           own[i] == s && gives[i] && nfull(up[CN(i, s)]) ->
           up[CN(i, s)]!FINAL, moved[i], 0, cw[i], ca[i];
           gives[i] = false
       }
#if RESTS > 0
    :: d_step {
           alive[s] && tell[CN(i, s)] && nfull(up[CN(i, s)]) ->
           up[CN(i, s)]!JOINED, 0, 0, 0, 0;
           tell[CN(i, s)] = false
       }
#endif
    /* the service reads */
    :: d_step {
           alive[s] && len(up[CN(i, s)]) > 0 ->
           up[CN(i, s)]?type, n, version, values, numbers;
           if
           :: type == PUSH ->
               if
               :: state[s] == HELD -> take(s, i, n)
               :: else -> pends[SI(s, i)] = n
               fi
           :: type == HAVE ->
               gather(s, n);
               if
               :: state[s] == GATHERS && COUNTS(s, n) -> had[SI(s, i)] = version
               :: else
               fi
           :: type == DONE ->
               if
               :: state[s] == GATHERS && COUNTS(s, n) -> said[SI(s, i)] = true
               :: else
               fi
           :: type == FINAL ->
               if
               :: state[s] == GATHERS && n == since[s] -> take_final(s)
               :: else
               fi
#if RESTS > 0
           :: type == JOINED -> joined[SI(s, i)] = true
#endif
           fi
       }
    /* service -> rank */
    :: d_step {
           alive[s] && state[s] == HELD && due[SI(s, i)] > 0 && MAY_ANSWER(s, due[SI(s, i)]) && nfull(down[CN(i, s)]) ->
           down[CN(i, s)]!RESULT, due[SI(s, i)], v[s], w[s],
               (a[SI(s, 0)] | (a[SI(s, 1)] << 2) | (RANKS > 2 -> a[SI(s, RANKS - 1)] << 4 : 0));
           due[SI(s, i)] = 0
       }
    :: d_step {
           alive[s] && i == 0 && state[s] == GATHERS && MAY_ASK(s) && giver[s] == NOBODY ->
           choose(s);
           giver[s] = CHOSEN
       }
    :: d_step {
           alive[s] && state[s] == GATHERS && giver[s] == CHOSEN && holder[s] == i && nfull(down[CN(i, s)]) ->
           down[CN(i, s)]!ASK, since[s], 0, 0, 0;
           giver[s] = ASKED
       }
    /* the rank reads; also what a service sent before it died */
    :: d_step {
           len(down[CN(i, s)]) > 0 ->
           down[CN(i, s)]?type, n, version, values, numbers;
           if
           :: type == RESULT && LANDS(i, s) -> land(i)
           :: type == ASK && s == own[i] && n == moved[i] -> gives[i] = true
           :: else
           fi
       }
    od
}

proctype rank(byte i)
{
end:
    do
    :: d_step {
           flight[i] == 0 && ended[i] < ADDS && !RESTING(i) ->
           flight[i] = ended[i] + 1;
           say[i] = (say[i] == QUIET -> SAY_PUSH : say[i])
       }
#if RESTS > 0
    :: d_step {
           i == RANKS - 1 && flight[i] == 0 && ended[i] < ADDS && !rests ->
           rests = true;
           for (q : 0 .. LAST) {
               tell[CN(i, q)] = true
           }
           q = 0
       }
#endif
    :: d_step { /* COMMIT */
           epoch[i] < newest ->
           epoch[i] = newest;
           own[i] = target;
           moved[i] = newest;
           gives[i] = false;
           say[i] = SAY_HAVE
       }
    od
}

proctype coordinator()
{
end:
    do
    :: d_step {
           ALL_IN(newest) && !alive[target] -> /* a substitute is a machine's own service */
           target = LAST;
           newest++
       }
    :: d_step {
           ALL_IN(newest) && moves > 0 && alive[0] ->
           moves--;
           target = LAST - target;
           newest++
       }
    od
}

proctype adversary()
{
    byte i, s;
end:
    do
    :: d_step { kills > 0 -> kills--; alive[0] = false }
#if BREAKS > 0
    :: breaks > 0 ->
       atomic {
           if
           :: s = 0
           :: s = LAST
           fi;
           if
           :: i = 0
           :: i = RANKS - 1
           fi;
           d_step {
               breaks--;
               if
               :: alive[s] ->
                   if
                   :: len(up[CN(i, s)]) > 0 -> up[CN(i, s)]?_, _, _, _, _
                   :: len(up[CN(i, s)]) == 0
                   fi;
                   if
                   :: len(down[CN(i, s)]) > 0 -> down[CN(i, s)]?_, _, _, _, _
                   :: len(down[CN(i, s)]) == 0
                   fi;
                   due[SI(s, i)] = 0;
#ifndef MUTANT_ASKED_ONCE
                   if
                   :: giver[s] == ASKED && holder[s] == i -> giver[s] = CHOSEN
                   :: else
                   fi;
#endif
#if RESTS > 0
                   tell[CN(i, s)] = tell[CN(i, s)] || RESTING(i);
#endif
                   if
#ifdef MUTANT_NOT_PUSHED_AGAIN
                   :: own[i] == s && say[i] != QUIET -> say[i] = SAY_HAVE
#else
                   :: own[i] == s -> say[i] = SAY_HAVE; gives[i] = false /* and push again what is in flight */
#endif
                   :: else
                   fi
               :: else
               fi
           }
           i = 0;
           s = 0
       }
#endif
    od
}

#define EXPECTED(i) ((ended[i] >= 1 -> BIT(i, 1) : 0) | (ended[i] >= ADDS -> BIT(i, ADDS) : 0))

/* Nothing can move any more: is all well? */
active proctype monitor()
{
    byte i, s;
    d_step {
        for (i : 0 .. LAST) {
            alive[i] = true
        }
        state[0] = HELD;
        since[0] = 1;
        v[0] = VERSION(1);
        for (i : 0 .. RANKS - 1) {
            epoch[i] = 1;
            moved[i] = 1;
            cv[i] = VERSION(1)
        }
        i = 0
    }
    atomic {
        for (i : 0 .. RANKS - 1) {
            run rank(i);
            for (s : 0 .. LAST) {
                run connection(i, s)
            }
        }
        run coordinator();
        run adversary();
        s = 0
    }
    timeout ->
    for (i : 0 .. RANKS - 1) {
        assert(flight[i] == 0 && (ended[i] == ADDS || RESTING(i))) /* no deadlock */
    }
    assert(state[target] == HELD);
    for (i : 0 .. RANKS - 1) {
        assert((w[target] & EXPECTED(i)) == EXPECTED(i)) /* nothing lost */
    }
}
