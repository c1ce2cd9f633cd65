/*
 * shared.pml - one part of a shared tensor, which a service keeps, moves from service to service, in Promela.
 *
 * Each rank adds ADDS differences, one at a time.  The service that keeps the part applies each once and answers with all that it
 * has.  COMMIT may name another owner: when the owner has died, or for the sake of the split.  With each COMMIT a rank names the part
 * to its owner, with the version that it holds (HAVE), and says to both services that this is all (DONE).  Once all ranks have named
 * a version, a new owner asks the lowest holder of the highest one (AGAIN), which gives it (FINAL).  A service drops the part once all ranks have given it up.
 * Connections break.  A rank may join, leave, or take back an addition that it has not pushed.  README.md says which mutants
 * (MUTANT_...) are checked.
 *
 *   once          take: no addition is applied twice
 *   one at a time take, pend: an operation comes only once the rank's last one here is answered or void
 *   known         a push comes to a service that has the part, or expects it
 *   never back    land: an answer has all that this rank has seen, and its own addition
 *   bounded       land: no rank that goes on is more than BOUND additions behind
 *   nothing lost  monitor: when nothing can move any more, all additions have ended, the owner has them all, and no other service has
 *                 the part
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
#ifndef STAYS
#define STAYS 0 /* COMMITs that do not move the part */
#endif
#ifndef SKIPS
#define SKIPS 0 /* additions that a rank takes back before it has pushed them: they failed elsewhere */
#endif
#ifndef LEAVES
#define LEAVES 0 /* rank 0 leaves the job */
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

mtype = { PUSH, HAVE, DONE, FINAL, JOINED, RESULT, AGAIN };
/* type; an addition's number; an epoch, or a version; additions; ranks' last numbers, and their clocks, two bits a rank */
chan up[RANKS * SERVICES] = [1] of { mtype, byte, byte, byte, byte, byte };
chan down[RANKS * SERVICES] = [1] of { mtype, byte, byte, byte, byte, byte };

/* Scratch of one step; never part of a state. */
hidden byte n, version, values, numbers, clocks, q;
hidden mtype type;

/* services */
#define NOTHING 0
#define GATHERS 1
#define HELD 2
bool alive[SERVICES];
byte state[SERVICES], since[SERVICES]; /* since: the epoch in which the part came here */
byte w[SERVICES], v[SERVICES];         /* additions applied; their version */
byte a[SERVICES * RANKS];              /* each rank's last one */
byte clock[SERVICES * RANKS];          /* how many of each rank's it has applied */
byte pends[SERVICES * RANKS];          /* pushed before the part is here */
byte due[SERVICES * RANKS];            /* to be answered */
byte had[SERVICES * RANKS];
bool said[SERVICES * RANKS];           /* DONE, since it gathers */
bool named[SERVICES * RANKS];          /* HAVE came before the DONE that is to come */
bool gave_up[SERVICES * RANKS];
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
#define NEVER 0
#define BEFORE 1 /* to another service, or over another connection */
#define PUSHED 2
byte flight[RANKS], ended[RANKS], say[RANKS], pushed[RANKS];
byte skipped; /* additions that were taken back */
bool gives[RANKS];  /* FINAL */
byte epoch[RANKS], own[RANKS], moved[RANKS]; /* moved: the epoch in which the part came to its owner */
byte cv[RANKS], cw[RANKS], ca[RANKS], cc[RANKS]; /* what it holds: version, values, numbers, clocks */
bool quits[RANKS * SERVICES]; /* DONE, to a service that keeps nothing for it */
bool rests, gone; /* the last rank has joined; the first one has left */
bool tell[RANKS * SERVICES];

/* coordinator */
byte newest = 1, target;
byte kills = KILLS, moves = MOVES, breaks = BREAKS, stays = STAYS, skips = SKIPS;

#define LEFT(i) (gone && (i) == 0)
#define HAS_SAID(s, i) (LEFT(i) || (said[SI(s, i)] && had[SI(s, i)] > 0))
#define ALL_SAID(s) (HAS_SAID(s, 0) && HAS_SAID(s, 1) && HAS_SAID(s, RANKS - 1))
#define UP(s, i) (LEFT(i) || gave_up[SI(s, i)])
#ifdef MUTANT_GIVEN_UP_BY_ONE
#define IS_GIVEN_UP(s) (UP(s, 0) || UP(s, 1) || UP(s, RANKS - 1))
#else
#define IS_GIVEN_UP(s) (UP(s, 0) && UP(s, 1) && UP(s, RANKS - 1))
#endif
#define ALL_IN(e) ((LEFT(0) || epoch[0] == (e)) && epoch[1] == (e) && epoch[RANKS - 1] == (e))
#define RESTING(i) (rests && (i) == RANKS - 1)

/* Nobody that goes on is too far behind. */
#if BOUND > 0 && !defined(MUTANT_ANSWERED_AT_ONCE)
#ifdef MUTANT_JOINED_IS_AWAITED
#define NEAR(s, j, i) (clock[SI(s, j)] + BOUND >= clock[SI(s, i)])
#else
#define NEAR(s, j, i) (joined[SI(s, j)] || clock[SI(s, j)] + BOUND >= clock[SI(s, i)])
#endif
#define MAY_ANSWER(s, i) (NEAR(s, 0, i) && NEAR(s, 1, i) && NEAR(s, RANKS - 1, i))
#else
#define MAY_ANSWER(s, i) true
#endif

/* The part came here in the epoch that the push or the word names, or the rank takes it back. */
#ifdef MUTANT_OLD_PUSHES
#define IS_NEW(s, e) true
#else
#define IS_NEW(s, e) ((e) == since[s])
#endif

#ifdef MUTANT_NEXT_NUMBER_ONLY
#define IS_FRESH(s, i, r) ((r) == a[SI(s, i)] + 1)
#else
#define IS_FRESH(s, i, r) ((r) > a[SI(s, i)])
#endif

inline take(s, i, r)
{
    assert(due[SI(s, i)] == 0 || due[SI(s, i)] == r); /* one at a time */
#ifdef MUTANT_APPLIED_AGAIN
    if
    :: true ->
#else
    if
    :: IS_FRESH(s, i, r) ->
#endif
        assert(!(w[s] & BIT(i, r))); /* once */
        w[s] = w[s] | BIT(i, r);
        a[SI(s, i)] = r;
        clock[SI(s, i)]++;
        v[s]++
    :: else
    fi;
    due[SI(s, i)] = r
}

inline pend(s, i, r)
{
    assert(pends[SI(s, i)] == 0 || pends[SI(s, i)] == r); /* one at a time */
    pends[SI(s, i)] = r
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
            said[SI(s, q)] = false;
            named[SI(s, q)] = false;
            gave_up[SI(s, q)] = false
        }
        q = 0
    :: else
    fi
}

inline give_up(s, i)
{
    gave_up[SI(s, i)] = gave_up[SI(s, i)] || !named[SI(s, i)];
    named[SI(s, i)] = false
}

inline drop_given_up(s)
{
    if
    :: state[s] != NOTHING && IS_GIVEN_UP(s) ->
        state[s] = NOTHING;
        giver[s] = NOBODY;
        w[s] = 0;
        v[s] = 0;
        for (q : 0 .. RANKS - 1) {
            a[SI(s, q)] = 0;
            clock[SI(s, q)] = 0;
            pends[SI(s, q)] = 0;
            due[SI(s, q)] = 0;
            had[SI(s, q)] = 0;
            said[SI(s, q)] = false;
            gave_up[SI(s, q)] = false
        }
        q = 0
    :: else
    fi
}

/* The lowest holder of the highest version. */
inline choose(s)
{
    holder[s] = (gone -> 1 : 0);
    for (q : 0 .. RANKS - 1) {
#ifdef MUTANT_ANY_HOLDER
        skip
#else
        if
        :: !LEFT(q) && had[SI(s, q)] > had[SI(s, holder[s])] -> holder[s] = q
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
#ifdef MUTANT_CLOCKS_STAY
        clock[SI(s, q)] = 0;
#else
        clock[SI(s, q)] = (clocks >> (2 * q)) & 3;
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
#define IS_NEAR(set, j, i) (RESTING(j) || HAS(set, j) + BOUND >= HAS(set, i))
#else
#define IS_NEAR(set, j, i) true
#endif

inline land(i)
{
    assert((values & cw[i]) == cw[i] && (values & BIT(i, n))); /* never back */
    assert(IS_NEAR(values, 0, i) && IS_NEAR(values, 1, i) && IS_NEAR(values, RANKS - 1, i)); /* bounded */
    cv[i] = version;
    cw[i] = values;
    ca[i] = numbers;
    cc[i] = clocks;
#ifdef MUTANT_KEPT_WHILE_IN_FLIGHT
    cv[i] = 0;
    cw[i] = 0;
    ca[i] = 0;
    cc[i] = 0;
#endif
    ended[i] = n;
    flight[i] = 0;
    pushed[i] = NEVER
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
#define MAY_ASK(s) (HAS_SAID(s, 0) || HAS_SAID(s, 1))
#else
#define MAY_ASK(s) ALL_SAID(s)
#endif

/* What it sends of its ranks' numbers or clocks. */
#define ALL_OF(x, s) (x[SI(s, 0)] | (x[SI(s, 1)] << 2) | (RANKS > 2 -> x[SI(s, RANKS - 1)] << 4 : 0))

/* Between rank i and service s: each step is a frame sent or a frame received. */
proctype connection(byte i, s)
{
end:
    do
    /* rank -> service */
    :: d_step {
           own[i] == s && say[i] == SAY_HAVE && nfull(up[CN(i, s)]) ->
           up[CN(i, s)]!HAVE, moved[i], cv[i], 0, 0, 0;
           say[i] = SAY_DONE
       }
    :: d_step {
           own[i] == s && say[i] == SAY_DONE && nfull(up[CN(i, s)]) ->
           up[CN(i, s)]!DONE, epoch[i], 0, 0, 0, 0;
           say[i] = (flight[i] > 0 && pushed[i] != PUSHED -> SAY_PUSH : QUIET)
       }
    :: d_step {
           own[i] != s && quits[CN(i, s)] && nfull(up[CN(i, s)]) ->
           up[CN(i, s)]!DONE, epoch[i], 0, 0, 0, 0;
           quits[CN(i, s)] = false
       }
    :: d_step {
           own[i] == s && say[i] == SAY_PUSH && nfull(up[CN(i, s)]) ->
           up[CN(i, s)]!PUSH, flight[i], moved[i], 0, 0, 0;
           pushed[i] = PUSHED;
           say[i] = QUIET
       }
    :: d_step {
           own[i] == s && gives[i] && nfull(up[CN(i, s)]) ->
           up[CN(i, s)]!FINAL, moved[i], 0, cw[i], ca[i], cc[i];
           gives[i] = false
       }
#if RESTS > 0
    :: d_step {
           alive[s] && tell[CN(i, s)] && nfull(up[CN(i, s)]) ->
           up[CN(i, s)]!JOINED, 0, 0, 0, 0, 0;
           tell[CN(i, s)] = false
       }
#endif
    /* the service reads */
    :: d_step {
           alive[s] && len(up[CN(i, s)]) > 0 ->
           up[CN(i, s)]?type, n, version, values, numbers, clocks;
           if
           :: type == PUSH ->
               assert(state[s] != NOTHING); /* known */
               if
               :: IS_NEW(s, version) && state[s] == HELD -> take(s, i, n)
               :: IS_NEW(s, version) && state[s] == GATHERS -> pend(s, i, n)
               :: else
               fi
           :: type == HAVE ->
               gather(s, n);
               if
#ifdef MUTANT_OLD_WORDS
               :: state[s] == GATHERS -> had[SI(s, i)] = version; named[SI(s, i)] = true
#else
               :: n == since[s] -> had[SI(s, i)] = (state[s] == GATHERS -> version : 0); named[SI(s, i)] = true
#endif
               :: else
               fi
           :: type == DONE ->
               if
#ifdef MUTANT_OLD_WORDS
               :: true -> said[SI(s, i)] = (state[s] == GATHERS); give_up(s, i); drop_given_up(s)
#else
               :: n >= since[s] -> said[SI(s, i)] = (state[s] == GATHERS); give_up(s, i); drop_given_up(s)
#endif
               :: else -> named[SI(s, i)] = false
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
           alive[s] && state[s] == HELD && due[SI(s, i)] > 0 && MAY_ANSWER(s, i) && nfull(down[CN(i, s)]) ->
           down[CN(i, s)]!RESULT, due[SI(s, i)], v[s], w[s], ALL_OF(a, s), ALL_OF(clock, s);
           due[SI(s, i)] = 0
       }
    :: d_step {
           alive[s] && i == 1 && state[s] == GATHERS && MAY_ASK(s) && giver[s] == NOBODY ->
           choose(s);
           giver[s] = CHOSEN
       }
    :: d_step {
           alive[s] && state[s] == GATHERS && giver[s] == CHOSEN && holder[s] == i && nfull(down[CN(i, s)]) ->
           down[CN(i, s)]!AGAIN, since[s], 0, 0, 0, 0;
           giver[s] = ASKED
       }
    /* the rank reads; also what a service sent before it died */
    :: d_step {
           len(down[CN(i, s)]) > 0 ->
           down[CN(i, s)]?type, n, version, values, numbers, clocks;
           if
           :: type == RESULT && LANDS(i, s) -> land(i)
           :: type == AGAIN && s == own[i] && n == moved[i] && cv[i] > 0 -> gives[i] = true
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
           flight[i] == 0 && ended[i] < ADDS && !RESTING(i) && !LEFT(i) ->
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
#if SKIPS > 0
    :: d_step { /* the operation has failed at another part's service before this part was pushed */
           skips > 0 && flight[i] > 0 && pushed[i] == NEVER ->
           skips--;
           skipped = skipped | BIT(i, flight[i]);
           ended[i] = flight[i];
           flight[i] = 0;
           say[i] = (say[i] == SAY_PUSH -> QUIET : say[i])
       }
#endif
#if LEAVES > 0
    :: d_step {
           i == 0 && flight[i] == 0 && ended[i] == ADDS && !gone ->
           gone = true;
           say[i] = QUIET;
           gives[i] = false;
           for (q : 0 .. LAST) {
               quits[CN(i, q)] = false;
               if
               :: giver[q] != NOBODY && holder[q] == i -> giver[q] = NOBODY
               :: else
               fi;
               drop_given_up(q)
           }
           q = 0
       }
#endif
    :: d_step { /* COMMIT; the words that belong to the last one are said */
           epoch[i] < newest && !LEFT(i) && ((say[i] != SAY_HAVE && say[i] != SAY_DONE) || !alive[own[i]]) ->
           epoch[i] = newest;
           if
           :: own[i] != target ->
               quits[CN(i, own[i])] = alive[own[i]];
               quits[CN(i, target)] = false;
               own[i] = target;
               moved[i] = newest;
               gives[i] = false;
               pushed[i] = (pushed[i] == NEVER -> NEVER : BEFORE)
           :: else -> skip
           fi;
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
#if STAYS > 0
    :: d_step {
           ALL_IN(newest) && stays > 0 ->
           stays--;
           newest++
       }
#endif
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
                   :: len(up[CN(i, s)]) > 0 -> up[CN(i, s)]?_, _, _, _, _, _
                   :: len(up[CN(i, s)]) == 0
                   fi;
                   if
                   :: len(down[CN(i, s)]) > 0 -> down[CN(i, s)]?_, _, _, _, _, _
                   :: len(down[CN(i, s)]) == 0
                   fi;
                   due[SI(s, i)] = 0; /* the rank speaks first */
                   pends[SI(s, i)] = 0;
                   said[SI(s, i)] = false;
                   named[SI(s, i)] = false;
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
                   :: LEFT(i)
                   :: !LEFT(i) && own[i] == s ->
                       say[i] = SAY_HAVE;
                       gives[i] = false;
#ifndef MUTANT_NOT_PUSHED_AGAIN
                       pushed[i] = (pushed[i] == NEVER -> NEVER : BEFORE) /* and push again what is in flight */
#else
                       skip
#endif
                   :: !LEFT(i) && own[i] != s -> quits[CN(i, s)] = (epoch[i] > 1)
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

/* What a rank that has left has seen alone may be lost. */
#define EXPECTED(i) (LEFT(i) -> 0 : ((ended[i] >= 1 -> BIT(i, 1) : 0) | (ended[i] >= ADDS -> BIT(i, ADDS) : 0)) & ~skipped)

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
#ifdef MUTANT_CREATE_ENDS_FOR_EACH_RANK
            cv[i] = (i == 0 -> VERSION(1) : 0)
#else
            cv[i] = VERSION(1) /* the create has ended, so all have its values */
#endif
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
    assert(!alive[LAST - target] || state[LAST - target] == NOTHING);
    for (i : 0 .. RANKS - 1) {
        assert((w[target] & EXPECTED(i)) == EXPECTED(i)) /* nothing lost */
    }
}
