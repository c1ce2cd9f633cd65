/*
 * change.pml - the split changes while services are evicted, in Promela.
 *
 * The coordinator plans the split anew (src/membership/adapt.c) and evicts services (src/membership/change.c).  Both begin a change of
 * epoch: PREPARE, the ranks' answers, COMMIT.  Two ranks begin the same rounds, each in an order and at a time of its own.
 * recovery.pml has the services and what becomes of parts; here are only epochs.  README.md says which mutants
 * (MUTANT_...) are checked.
 *
 *   one cut            begin: both ranks begin a round in the same epoch
 *   closed first       COMMIT: when a rank hears that a service is gone, no rank is connected to it any more
 *   few epochs         COMMIT: a rank needs MOST epochs, the new one and those of evictions at most
 *   the newest values  monitor: in the end both ranks have the newest split, without those that are gone
 *   no deadlock        monitor: when nothing can move any more, all rounds have ended
 */
#ifndef REPLANS
#define REPLANS 2
#endif
#ifndef EVICTIONS
#define EVICTIONS 1
#endif
#define MOST 1 /* with more epochs alive at some rank the split stays; Tally has 4 */
#define RANKS 2
#define ROUNDS 2 /* a BEGUN and a COMMIT have a byte for each */
#define RO(m, r) ((m) * ROUNDS + (r))
#define OTHER(m) (RANKS - 1 - (m))

mtype = { PREPARE, COMMIT, BEGUN, TRAFFIC }

#define NONE 0
#define STARTED 1
#define ENDED 2

/* Scratch of one step; never part of a state. */
hidden byte k, o, alive;

chan down[RANKS] = [2] of { mtype, byte, byte, byte, byte, byte }; /* type, number, gone, value, rounds 0 and 1 */
chan up[RANKS] = [2] of { mtype, byte, byte, byte };               /* type, number, epochs alive or round 0, round 1 */

/* A rank's. */
byte st[RANKS * ROUNDS];
byte ep[RANKS * ROUNDS];       /* epoch in which it was begun */
byte promised[RANKS * ROUNDS]; /* epoch + 1 that a COMMIT gave to a round not begun here */
byte epoch[RANKS], value[RANKS];
byte closed[RANKS]; /* to so many evicted services */
byte gone[RANKS];   /* so many are out of the rank's epoch */
bool paused[RANKS];

#define UNION(m, r) (st[RO(m, r)] == STARTED -> ep[RO(m, r)] + 1 : 0)

inline begin(m, r)
{
    ep[RO(m, r)] = (promised[RO(m, r)] > 0 -> promised[RO(m, r)] - 1 : epoch[m]);
    promised[RO(m, r)] = 0;
    assert(st[RO(OTHER(m), r)] == NONE || ep[RO(OTHER(m), r)] == ep[RO(m, r)]); /* one cut */
    st[RO(m, r)] = STARTED
}

#define NEEDS(m, r, e) ((st[RO(m, r)] == STARTED && ep[RO(m, r)] == (e)) || promised[RO(m, r)] == (e) + 1)

inline count_alive(m)
{
    alive = 1;
    for (k : 0 .. REPLANS + EVICTIONS) {
        alive = (k != epoch[m] && (NEEDS(m, 0, k) || NEEDS(m, 1, k)) -> alive + 1 : alive)
    }
}

#ifdef MUTANT_BEGIN_WHILE_PREPARED
#define MAY_BEGIN(m) true
#else
#define MAY_BEGIN(m) (!paused[m])
#endif

/* The coordinator's. */
byte replans = REPLANS, evictions = EVICTIONS;
byte report[RANKS];   /* epochs alive, by the newest sample; 0: there is none */
byte newest;          /* number of splits planned */
byte evicted;         /* number of services */
byte given;           /* the last number */
byte committed;       /* the epoch that holds */
byte preparing;       /* number of the PREPARE under way; 0: none is */
bool wanted;
byte answered[RANKS]; /* which PREPARE */
byte begun[ROUNDS];   /* epoch + 1 of the rounds of the answers */

proctype rank(byte m)
{
    byte number, zero, one;
end:
    do
    :: d_step { MAY_BEGIN(m) && st[RO(m, 0)] == NONE -> begin(m, 0) }
    :: d_step { MAY_BEGIN(m) && st[RO(m, 1)] == NONE -> begin(m, 1) }
    :: d_step { st[RO(m, 0)] == STARTED && st[RO(OTHER(m), 0)] != NONE -> st[RO(m, 0)] = ENDED }
    :: d_step { st[RO(m, 1)] == STARTED && st[RO(OTHER(m), 1)] != NONE -> st[RO(m, 1)] = ENDED }
    :: d_step {
           replans > 0 && len(up[m]) == 0 && report[m] == 0 -> /* a sample of its traffic */
           count_alive(m);
           up[m]!TRAFFIC, epoch[m], alive, 0
       }
    :: d_step {
           nfull(up[m]) && down[m]?[PREPARE, _, _, _, _, _] ->
           down[m]?PREPARE, number, closed[m], _, _, _;
           paused[m] = true;
           up[m]!BEGUN, number, UNION(m, 0), UNION(m, 1);
           number = 0
       }
    :: d_step {
           down[m]?[COMMIT, _, _, _, _, _] ->
           down[m]?COMMIT, epoch[m], gone[m], value[m], zero, one;
           paused[m] = false;
           assert(closed[0] >= gone[m] && closed[1] >= gone[m]); /* closed first */
           promised[RO(m, 0)] = (st[RO(m, 0)] == NONE -> zero : 0);
           promised[RO(m, 1)] = (st[RO(m, 1)] == NONE -> one : 0);
           count_alive(m);
           assert(alive <= MOST + 1 + gone[m]); /* few epochs */
           zero = 0;
           one = 0
       }
    od
}


#ifdef MUTANT_ANY_ANSWER
#define IS_ASKED(number) true
#else
#define IS_ASKED(number) ((number) == preparing)
#endif
#ifdef MUTANT_OLD_REPORTS
#define COUNTS(number) true
#else
#define COUNTS(number) ((number) == committed && !wanted && preparing == 0)
#endif
#ifdef MUTANT_NO_LIMIT
#define FEW(m) (report[m] > 0)
#else
#define FEW(m) (report[m] > 0 && report[m] <= MOST)
#endif

inline take_begun(r, e)
{
    assert(e == 0 || begun[r] == 0 || begun[r] == e); /* one cut */
    begun[r] = (e > 0 -> e : begun[r])
}

inline hear(m)
{
    if
    :: up[m]?[TRAFFIC, _, _, _] ->
        up[m]?TRAFFIC, k, o, _;
        report[m] = (COUNTS(k) -> o : report[m])
    :: else ->
        up[m]?BEGUN, k, o, alive;
        if
        :: IS_ASKED(k) ->
            answered[m] = preparing;
            take_begun(0, o);
            take_begun(1, alive)
        :: else
        fi
    fi
}

proctype coordinator()
{
end:
    do
    :: d_step { len(up[0]) > 0 -> hear(0) }
    :: d_step { len(up[1]) > 0 -> hear(1) }
    :: d_step { /* a tallyd is out */
           evictions > 0 ->
           evictions--;
           evicted++;
#ifdef MUTANT_EVICTION_FORGETS_THE_PLAN
           newest = value[0];
#endif
#ifdef MUTANT_NOT_PREPARED_ANEW
           wanted = (preparing == 0)
#else
           wanted = true
#endif
       }
    :: d_step { /* another split pays */
           replans > 0 && !wanted && preparing == 0 && FEW(0) && FEW(1) ->
           replans--;
           newest++;
           report[0] = 0;
           report[1] = 0;
           wanted = true
       }
    :: d_step {
           wanted && nfull(down[0]) && nfull(down[1]) ->
           wanted = false;
           given++;
           preparing = given;
           begun[0] = 0;
           begun[1] = 0;
           down[0]!PREPARE, preparing, evicted, 0, 0, 0;
           down[1]!PREPARE, preparing, evicted, 0, 0, 0
       }
    :: d_step {
           preparing > 0 && !wanted && answered[0] == preparing && answered[1] == preparing && nfull(down[0]) && nfull(down[1]) ->
           committed = preparing;
           preparing = 0;
           down[0]!COMMIT, committed, evicted, newest, begun[0], begun[1];
           down[1]!COMMIT, committed, evicted, newest, begun[0], begun[1];
           report[0] = 0;
           report[1] = 0
       }
    od
}

/* Nothing can move any more: is all well? */
active proctype monitor()
{
    byte i;
    atomic {
        run rank(0);
        run rank(1);
        run coordinator()
    }
    timeout ->
    for (i : 0 .. RANKS - 1) {
        assert(epoch[i] == committed && !paused[i]);
        assert(value[i] == REPLANS - replans && gone[i] == EVICTIONS - evictions) /* the newest values */
    }
    for (i : 0 .. RANKS * ROUNDS - 1) {
        assert(st[i] == ENDED) /* no deadlock */
    }
}
