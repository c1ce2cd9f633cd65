/*
 * recovery.pml - what becomes of a part when its service dies: retention, redo and epochs, in Promela.
 *
 * Machines push a tensor of one part, round after round, in place, to services of which all but the last may die,
 * be suspected while they live, or lose a connection.  A part has L blocks, each of them input of a round or its
 * result; a service asserts that what it adds is input of that round and nothing else, so the sum needs no numbers.
 * The coordinator orders the changes.  README.md says which sizes and which mutants (the macros that begin with MUTANT) are checked.
 *
 *   never a wrong sum     the assertions about values in take_push and take_final
 *   one cut               begin_round: all machines cut a round's parts alike
 *   no double use         take_result: each block lands once;  take_have: a machine is in once
 *   no loss, no deadlock  monitor: when nothing can move any more, every round has ended on every machine
 *   nothing left behind   monitor: ... and no service holds anything
 */
#ifndef MACHINES
#define MACHINES 2
#endif
#ifndef ROUNDS
#define ROUNDS 2 /* at most 2: a union travels as two bytes */
#endif
#ifndef L
#define L 2
#endif
#ifndef KILLS
#define KILLS 1 /* services that die */
#endif
#ifndef SUSPECTS
#define SUSPECTS 0 /* services that are evicted although they live, and send on to whoever still listens */
#endif
#ifndef BREAKS
#define BREAKS 0 /* connections that end while both ends live */
#endif
#ifndef JOINS
#define JOINS 0 /* 1: the split changes: service 1 has all of it, service 0 nothing; one comes, and one goes, or is slow */
#endif
#ifndef RESTS
#define RESTS 0 /* 1: the last machine runs out of input at any moment (tally_join), and begins no more rounds */
#endif
#ifndef LOSSES
#define LOSSES 0 /* coordinators that die in the midst of their COMMITs; another takes the place */
#endif
#ifndef POOL
#define POOL 1 /* results that a machine may keep aside */
#endif
#define SERVICES 3
#define LAST (SERVICES - 1) /* lives as long as the job: inside a rank */

#define INPUT(r) (2 * (r) + 1)
#define RESULT_OF(r) (2 * (r) + 2)
#define MR(m, r) ((m) * ROUNDS + (r))
#define SR(s, r) ((s) * ROUNDS + (r))
#define SRM(s, r, m) (((s) * ROUNDS + (r)) * MACHINES + (m))
#define MB(m, b) ((m) * L + (b))
#define CN(m, s) ((m) * SERVICES + (s))
#define HAS(set, s) ((((set) >> (s)) & 1) == 1)

mtype = { PUSH, HAVE, DONE, FINAL, RECEIVED, JOINED, RESULT, AGAIN, ASK, STABLE, PREPARE, COMMIT }

/* Scratch of one step; never part of a state. */
hidden byte k, o, b, q, frame_value, frame_flag;
hidden mtype frame;

/* --- the network -------------------------------------------------------------------------------- */

chan up[MACHINES * SERVICES] = [1] of { byte, mtype, byte, byte };   /* round, type, block or length, value */
chan down[MACHINES * SERVICES] = [1] of { byte, mtype, byte, byte }; /* round, type, block or length, flag */
bool open[MACHINES * SERVICES];
bool alive[SERVICES];
bool suspected[SERVICES];
byte kills = KILLS, suspects = SUSPECTS, breaks = BREAKS, joins = JOINS, losses = LOSSES;

inline flush(c)
{
    do
    :: len(up[c]) > 0 -> up[c]?_, _, _, _
    :: len(down[c]) > 0 -> down[c]?_, _, _, _
    :: len(up[c]) == 0 && len(down[c]) == 0 -> break
    od
}

/* --- services: what they know of a part ---------------------------------------------------------- */

#define FREE 0
#define GATHER 1 /* not all machines are in */
#define GO 2     /* all are: [0, base) comes from the holder, the rest is summed */
#define STEADY 3 /* all machines have the result; they are being told */

#define OUT 0
#define IN_PUSH 1
#define IN_HAVE 2
#define IN_DONE 3

byte phase[SERVICES * ROUNDS];
byte base[SERVICES * ROUNDS];
byte hold[SERVICES * ROUNDS];           /* how much of [0, base) has come as FINAL */
byte holder[SERVICES * ROUNDS];         /* who brings it: machine + 1; 0 if nobody lacks it */
byte in[SERVICES * ROUNDS * MACHINES];
byte have[SERVICES * ROUNDS * MACHINES];
byte got[SERVICES * ROUNDS * MACHINES]; /* input is here up to this block */
byte sent[SERVICES * ROUNDS * MACHINES];
bool rcvd[SERVICES * ROUNDS * MACHINES];
bool cut[SERVICES * ROUNDS * MACHINES]; /* the connection broke, and the machine has not spoken since */
byte wish[SERVICES * ROUNDS * MACHINES];/* 1: AGAIN is to be sent; 2: ASK */
bool said[SERVICES * ROUNDS * MACHINES];/* STABLE has been sent */

#if RESTS > 0
bool rests;                     /* the last machine has joined, */
byte took;                      /* and had begun so many rounds by then */
bool tell[SERVICES];            /* the service is still to hear so over this connection; */
byte knows[SERVICES];           /* took + 1, once it has */
#ifdef MUTANT_JOINED_TAKES_PART_IN_NOTHING
#define SITS_OUT(s, r) (knows[s] > 0)
#else
#define SITS_OUT(s, r) (knows[s] > 0 && (r) >= knows[s] - 1)
#endif
/* Zeros stand for it: it never pushes, and is owed nothing. */
#define ZERO(s, r, m) ((m) == MACHINES - 1 && in[SRM(s, r, m)] == OUT && SITS_OUT(s, r))
#ifdef MUTANT_JOINED_IS_AWAITED
#define OWED_NOTHING(s, r, m) false
#else
#define OWED_NOTHING(s, r, m) ZERO(s, r, m)
#endif
#else
#define ZERO(s, r, m) false
#define OWED_NOTHING(s, r, m) false
#endif

#define HERE(s, r, m, p) (got[SRM(s, r, m)] > (p) || ZERO(s, r, m))
#define SUMMED(s, r, p) (HERE(s, r, 0, p) && HERE(s, r, MACHINES / 2, p) && HERE(s, r, MACHINES - 1, p))
/* Over a new connection the machine speaks first: what it holds has changed since the service heard of it. */
#ifdef MUTANT_SERVICE_FIRST
#define MAY_SPEAK(s, r, m) true
#else
#define MAY_SPEAK(s, r, m) (!cut[SRM(s, r, m)])
#endif
#define AVAILABLE(s, r, p) \
    ((p) < L && (((p) < base[SR(s, r)] && (p) < hold[SR(s, r)]) || ((p) >= base[SR(s, r)] && SUMMED(s, r, p))))

inline forget(s, r)
{
    phase[SR(s, r)] = FREE;
    base[SR(s, r)] = 0;
    hold[SR(s, r)] = 0;
    holder[SR(s, r)] = 0;
    for (k : 0 .. MACHINES - 1) {
        in[SRM(s, r, k)] = OUT;
        have[SRM(s, r, k)] = 0;
        got[SRM(s, r, k)] = 0;
        sent[SRM(s, r, k)] = 0;
        rcvd[SRM(s, r, k)] = false;
        cut[SRM(s, r, k)] = false;
        wish[SRM(s, r, k)] = 0;
        said[SRM(s, r, k)] = false
    }
}

inline forget_if_told(s, r)
{
    o = 1;
    for (k : 0 .. MACHINES - 1) {
        o = o && said[SRM(s, r, k)]
    }
    if
    :: o == 1 -> forget(s, r)
    :: else
    fi
}

inline steady_if_all(s, r)
{
    o = 1;
    for (k : 0 .. MACHINES - 1) {
#ifdef MUTANT_DROP_EARLY
        o = o && sent[SRM(s, r, k)] == L
#else
        o = o && (rcvd[SRM(s, r, k)] || OWED_NOTHING(s, r, k))
#endif
    }
    if
    :: o == 1 ->
        phase[SR(s, r)] = STEADY;
        for (k : 0 .. MACHINES - 1) {
            wish[SRM(s, r, k)] = 0;
            said[SRM(s, r, k)] = (in[SRM(s, r, k)] == IN_DONE || OWED_NOTHING(s, r, k))
        }
        forget_if_told(s, r)
    :: else
    fi
}

/* All machines are in: how much is result already, and who brings it to those that lack it? */
inline go_if_all(s, r)
{
    o = 1;
    q = 0;
    for (k : 0 .. MACHINES - 1) {
        o = o && (in[SRM(s, r, k)] != OUT || ZERO(s, r, k));
        if
        :: in[SRM(s, r, k)] == IN_DONE -> q = L
        :: in[SRM(s, r, k)] == IN_HAVE && have[SRM(s, r, k)] > q -> q = have[SRM(s, r, k)]
        :: else
        fi
    }
    if
    :: o == 1 ->
        /* Zeros only for who has never begun it. */
        assert(!ZERO(s, r, MACHINES - 1) || st[MR(MACHINES - 1, r)] == 0);
        phase[SR(s, r)] = GO;
        base[SR(s, r)] = q;
        o = 0;
        b = 0;
        for (k : 0 .. MACHINES - 1) {
            if
            :: in[SRM(s, r, k)] == IN_HAVE && have[SRM(s, r, k)] == q && b == 0 -> b = k + 1
            :: in[SRM(s, r, k)] != IN_DONE && have[SRM(s, r, k)] < q && !OWED_NOTHING(s, r, k) -> o = 1
            :: else
            fi
        }
        assert(o == 0 || b != 0); /* who lacks something must find one who has it */
        holder[SR(s, r)] = (o == 1 -> b : 0);
        for (k : 0 .. MACHINES - 1) {
            wish[SRM(s, r, k)] = 0;
            if
            :: in[SRM(s, r, k)] == IN_DONE ->
                got[SRM(s, r, k)] = L;
                sent[SRM(s, r, k)] = L;
                rcvd[SRM(s, r, k)] = true
            :: in[SRM(s, r, k)] == IN_HAVE ->
                got[SRM(s, r, k)] = (got[SRM(s, r, k)] < q -> q : got[SRM(s, r, k)]);
                sent[SRM(s, r, k)] = have[SRM(s, r, k)];
                rcvd[SRM(s, r, k)] = (have[SRM(s, r, k)] == L);
                wish[SRM(s, r, k)] = (q < L || holder[SR(s, r)] == k + 1 -> 1 : 0)
            :: else
            fi;
            have[SRM(s, r, k)] = 0
        }
        steady_if_all(s, r)
    :: else
    fi
}

/* A HAVE tells of a part's past.  Who is not in may have finished the part and forgotten it: he is asked. */
inline ask_missing(s, r)
{
#ifdef MUTANT_NOBODY_ASKED
    skip
#else
    o = 0;
    for (k : 0 .. MACHINES - 1) {
        o = o || in[SRM(s, r, k)] == IN_HAVE
    }
    if
    :: o ->
        for (k : 0 .. MACHINES - 1) {
            wish[SRM(s, r, k)] = (in[SRM(s, r, k)] == OUT && !ZERO(s, r, k) -> 2 : 0)
        }
    :: else
    fi
#endif
}

inline take_push(s, r, m)
{
    assert(phase[SR(s, r)] != STEADY);
    phase[SR(s, r)] = (phase[SR(s, r)] == FREE -> GATHER : phase[SR(s, r)]);
    wish[SRM(s, r, m)] = 0;
    if
    :: cut[SRM(s, r, m)] ->
        cut[SRM(s, r, m)] = false;
        sent[SRM(s, r, m)] = 0
    :: else
    fi;
    if
    :: b < got[SRM(s, r, m)] /* here already: into the sink */
    :: else ->
        assert(b == got[SRM(s, r, m)]);
        assert(frame_value == INPUT(r)); /* never a wrong sum */
        got[SRM(s, r, m)]++
    fi;
    if
    :: in[SRM(s, r, m)] == OUT -> in[SRM(s, r, m)] = IN_PUSH
    :: else
    fi;
    if
    :: phase[SR(s, r)] == GATHER -> go_if_all(s, r)
    :: else
    fi
}

inline take_have(s, r, m)
{
    if
    :: phase[SR(s, r)] == FREE || phase[SR(s, r)] == GATHER ->
        assert(in[SRM(s, r, m)] == OUT || cut[SRM(s, r, m)]); /* no machine is in twice */
        phase[SR(s, r)] = GATHER;
        in[SRM(s, r, m)] = IN_HAVE;
        have[SRM(s, r, m)] = b;
        cut[SRM(s, r, m)] = false;
        ask_missing(s, r);
        go_if_all(s, r)
    :: else -> /* the part goes on over a new connection */
        assert(cut[SRM(s, r, m)]);
        cut[SRM(s, r, m)] = false;
        sent[SRM(s, r, m)] = b;
        rcvd[SRM(s, r, m)] = (b == L);
        said[SRM(s, r, m)] = false;
        wish[SRM(s, r, m)] = (got[SRM(s, r, m)] < L || (holder[SR(s, r)] == m + 1 && hold[SR(s, r)] < base[SR(s, r)]) -> 1 : 0);
        if
        :: phase[SR(s, r)] == GO -> steady_if_all(s, r)
        :: else
        fi
    fi
}

/* DONE answers a question; where nobody waits for the answer any more it says nothing. */
inline take_done(s, r, m)
{
#ifdef MUTANT_NOBODY_ASKED
    phase[SR(s, r)] = (phase[SR(s, r)] == FREE -> GATHER : phase[SR(s, r)]);
#endif
    if
    :: phase[SR(s, r)] == GATHER && in[SRM(s, r, m)] == OUT ->
        in[SRM(s, r, m)] = IN_DONE;
        go_if_all(s, r)
    :: else
    fi
}

inline take_final(s, r)
{
    if
    :: phase[SR(s, r)] == GO && b == hold[SR(s, r)] && b < base[SR(s, r)] ->
        assert(frame_value == RESULT_OF(r)); /* never a wrong sum */
        hold[SR(s, r)]++
    :: else /* here already */
    fi
}

#if RESTS > 0
inline take_joined(s)
{
    knows[s] = b + 1;
    for (q : 0 .. ROUNDS - 1) {
        if
        :: SITS_OUT(s, q) -> wish[SRM(s, q, MACHINES - 1)] = 0
        :: else
        fi
    }
    frame_value = ROUNDS;
    do
    :: frame_value > 0 ->
        frame_value--;
        if
        :: phase[SR(s, frame_value)] == GATHER -> go_if_all(s, frame_value)
        :: else
        fi
    :: else -> break
    od
}
#endif

/* --- machines ------------------------------------------------------------------------------------ */

#define NONE 0   /* not begun */
#define BEGUN 1  /* the operation is in flight, its buffer is mem */
#define LANDED 2 /* the operation has ended, the application may use mem; others may still need the result */
#define KNOWN 3  /* known stable: all machines have it */

#define QUIET 0
#define SAY_PUSH 1
#define SAY_HAVE 2
#define SAY_DONE 3

byte mem[MACHINES * L];
byte cur[MACHINES];
byte st[MACHINES * ROUNDS];
byte h[MACHINES * ROUNDS];          /* blocks [0, h) of the part are result, [h, L) input */
byte say[MACHINES * ROUNDS];        /* what the owner must be told next */
byte at[MACHINES * ROUNDS];         /* next block to push */
byte fin[MACHINES * ROUNDS];        /* next block to send as FINAL ... */
byte fin_end[MACHINES * ROUNDS];    /* ... up to here */
byte owner[MACHINES * ROUNDS];
byte ep[MACHINES * ROUNDS];         /* epoch in which it was begun */
byte fixed[MACHINES * ROUNDS];      /* epoch + 1 that a union gave to a round not begun here */
bool told[MACHINES * ROUNDS];       /* the owner knows that it is here whole */
bool aside[MACHINES * ROUNDS];      /* a copy of the result is kept */
bool perishable[MACHINES * ROUNDS]; /* some of it came from a service that can die alone */
byte copies[MACHINES];
byte epoch[MACHINES];
byte dead[MACHINES];                /* services, by the last COMMIT */
byte commits[MACHINES];             /* how many it has heard */
bool paused[MACHINES];

/* The first living service of the epoch's fixed permutation. */
inline find_owner(e, d)
{
#if JOINS > 0
    o = (e == 1 && !HAS(d, 1) -> 1 : (e == 0 && !HAS(d, 0) -> 0 : LAST))
#else
    o = (!HAS(d, 0) -> 0 : (!HAS(d, 1) -> 1 : LAST))
#endif
}

/* A service to which nobody listens is void: it drops all, and the model need not carry it along. */
inline close_to(m, s)
{
    flush(CN(m, s));
    open[CN(m, s)] = false;
    o = 1;
    for (k : 0 .. MACHINES - 1) {
        o = o && !open[CN(k, s)]
    }
    if
    :: o == 1 ->
        for (b : 0 .. ROUNDS - 1) {
            forget(s, b)
        }
    :: else
    fi
}

/* Whatever is not known stable is in doubt when its owner, or the connection to it, is new. */
inline begin_doubt(m, r)
{
    fin[MR(m, r)] = 0;
    fin_end[MR(m, r)] = 0;
    told[MR(m, r)] = false;
    at[MR(m, r)] = 0;
#ifdef MUTANT_PUSH_RESULTS
    say[MR(m, r)] = (st[MR(m, r)] == BEGUN -> SAY_PUSH : SAY_HAVE)
#else
    say[MR(m, r)] = SAY_HAVE
#endif
}

/* Where the parts of a round are cut: each epoch has its own size of parts. */
#ifdef MUTANT_CUT_BY_NEWEST
byte cut_by[MACHINES * ROUNDS];
#define CUT_BY(m, r) cut_by[MR(m, r)]
#else
#define CUT_BY(m, r) ep[MR(m, r)]
#endif

inline begin_round(m)
{
    q = cur[m];
    for (b : 0 .. L - 1) {
        mem[MB(m, b)] = INPUT(q)
    }
    ep[MR(m, q)] = epoch[m];
#ifndef MUTANT_NO_UNION
    ep[MR(m, q)] = (fixed[MR(m, q)] > 0 -> fixed[MR(m, q)] - 1 : epoch[m]);
#endif
    fixed[MR(m, q)] = 0;
#ifdef MUTANT_CUT_BY_NEWEST
    cut_by[MR(m, q)] = epoch[m];
#endif
    for (b : 0 .. MACHINES - 1) {
        assert(st[MR(b, q)] == NONE || CUT_BY(b, q) == CUT_BY(m, q)) /* all cut a round alike */
    }
    find_owner(ep[MR(m, q)], dead[m]);
    owner[MR(m, q)] = o;
    st[MR(m, q)] = BEGUN;
    say[MR(m, q)] = SAY_PUSH
}

inline take_result(m, s, r)
{
    assert(st[MR(m, r)] == BEGUN && b == h[MR(m, r)]); /* each block lands once, while the operation lasts */
    mem[MB(m, b)] = RESULT_OF(r);
    h[MR(m, r)]++;
    perishable[MR(m, r)] = perishable[MR(m, r)] || s != LAST;
    /* What the service has sums of need not be pushed again. */
    if
    :: say[MR(m, r)] == SAY_PUSH && at[MR(m, r)] < h[MR(m, r)] -> at[MR(m, r)] = h[MR(m, r)]
    :: else
    fi;
    if
    :: say[MR(m, r)] == SAY_PUSH && at[MR(m, r)] == L -> say[MR(m, r)] = QUIET; at[MR(m, r)] = 0
    :: else
    fi
}

inline take_stable(m, r)
{
    assert(h[MR(m, r)] == L);
    cur[m] = (st[MR(m, r)] == BEGUN -> cur[m] + 1 : cur[m]);
    copies[m] = (aside[MR(m, r)] -> copies[m] - 1 : copies[m]);
    aside[MR(m, r)] = false;
    st[MR(m, r)] = KNOWN;
    perishable[MR(m, r)] = false;
    fin[MR(m, r)] = 0;
    fin_end[MR(m, r)] = 0;
    told[MR(m, r)] = false;
    say[MR(m, r)] = QUIET;
    at[MR(m, r)] = 0
}

/* An operation ends when its part is stable, copied, or came from a service that lives as long as the job. */
#ifdef MUTANT_NO_COPY
#define MAY_LEAVE(m, r) true
#define KEEPS(m, r) false
#else
#ifdef MUTANT_JUDGE_BY_OWNER
#define KEEPS(m, r) (owner[MR(m, r)] != LAST)
#else
#define KEEPS(m, r) (perishable[MR(m, r)])
#endif
#define MAY_LEAVE(m, r) (!KEEPS(m, r) || copies[m] < POOL)
#endif

/* Round r between machine m and service s: each step is a frame sent or a frame received. */
proctype part(byte m, s, r)
{
end:
    do
    /* machine -> service */
    :: d_step {
           open[CN(m, s)] && owner[MR(m, r)] == s && say[MR(m, r)] == SAY_PUSH && nfull(up[CN(m, s)]) ->
           up[CN(m, s)]!r, PUSH, at[MR(m, r)], mem[MB(m, at[MR(m, r)])];
           at[MR(m, r)]++;
           if
           :: at[MR(m, r)] == L -> say[MR(m, r)] = QUIET; at[MR(m, r)] = 0
           :: else
           fi
       }
    :: d_step {
           open[CN(m, s)] && owner[MR(m, r)] == s && say[MR(m, r)] == SAY_HAVE && nfull(up[CN(m, s)]) ->
           up[CN(m, s)]!r, HAVE, h[MR(m, r)], 0;
           told[MR(m, r)] = (h[MR(m, r)] == L);
           say[MR(m, r)] = QUIET
       }
    :: d_step {
           open[CN(m, s)] && owner[MR(m, r)] == s && say[MR(m, r)] == SAY_DONE && nfull(up[CN(m, s)]) ->
           up[CN(m, s)]!r, DONE, 0, 0;
           say[MR(m, r)] = QUIET
       }
    :: d_step {
           open[CN(m, s)] && owner[MR(m, r)] == s && fin[MR(m, r)] < fin_end[MR(m, r)] && nfull(up[CN(m, s)]) ->
           up[CN(m, s)]!r, FINAL, fin[MR(m, r)], (aside[MR(m, r)] -> RESULT_OF(r) : mem[MB(m, fin[MR(m, r)])]);
           fin[MR(m, r)]++
       }
    :: d_step {
           open[CN(m, s)] && owner[MR(m, r)] == s && h[MR(m, r)] == L && !told[MR(m, r)] &&
               (st[MR(m, r)] == BEGUN || st[MR(m, r)] == LANDED) && say[MR(m, r)] != SAY_HAVE &&
               nfull(up[CN(m, s)]) ->
           up[CN(m, s)]!r, RECEIVED, 0, 0;
           told[MR(m, r)] = true
       }
#if RESTS > 0
    :: d_step {
           r == 0 && m == MACHINES - 1 && open[CN(m, s)] && tell[s] && nfull(up[CN(m, s)]) ->
           up[CN(m, s)]!0, JOINED, took, 0;
           tell[s] = false
       }
#endif
    /* the service reads */
    :: d_step {
           alive[s] && open[CN(m, s)] && up[CN(m, s)]?[eval(r), _, _, _] ->
           up[CN(m, s)]?_, frame, b, frame_value;
           if
           :: frame == PUSH -> take_push(s, r, m)
           :: frame == HAVE -> take_have(s, r, m)
           :: frame == DONE -> take_done(s, r, m)
           :: frame == FINAL -> take_final(s, r)
#if RESTS > 0
           :: frame == JOINED -> take_joined(s)
#endif
           :: else -> /* RECEIVED */
               if
               :: phase[SR(s, r)] == GO ->
                   rcvd[SRM(s, r, m)] = true;
                   steady_if_all(s, r)
               :: else
               fi
           fi
       }
    /* service -> machine */
    :: d_step {
           alive[s] && open[CN(m, s)] && phase[SR(s, r)] == GO && !cut[SRM(s, r, m)] &&
               in[SRM(s, r, m)] != IN_DONE && !ZERO(s, r, m) && sent[SRM(s, r, m)] < L && AVAILABLE(s, r, sent[SRM(s, r, m)]) &&
               nfull(down[CN(m, s)]) ->
           down[CN(m, s)]!r, RESULT, sent[SRM(s, r, m)], 0;
           sent[SRM(s, r, m)]++;
#ifdef MUTANT_DROP_EARLY
           steady_if_all(s, r)
#endif
       }
    :: d_step {
           alive[s] && open[CN(m, s)] && wish[SRM(s, r, m)] == 1 && MAY_SPEAK(s, r, m) &&
           nfull(down[CN(m, s)]) ->
           down[CN(m, s)]!r, AGAIN, got[SRM(s, r, m)], (holder[SR(s, r)] == m + 1 -> base[SR(s, r)] : 0);
           wish[SRM(s, r, m)] = 0
       }
    :: d_step {
           alive[s] && open[CN(m, s)] && wish[SRM(s, r, m)] == 2 && nfull(down[CN(m, s)]) ->
           down[CN(m, s)]!r, ASK, 0, 0;
           wish[SRM(s, r, m)] = 0
       }
    :: d_step {
           alive[s] && open[CN(m, s)] && phase[SR(s, r)] == STEADY && !cut[SRM(s, r, m)] && !said[SRM(s, r, m)] &&
               nfull(down[CN(m, s)]) ->
           down[CN(m, s)]!r, STABLE, 0, 0;
           said[SRM(s, r, m)] = true;
           forget_if_told(s, r)
       }
    /* the machine reads; also what a service sent before it died */
    :: d_step {
           open[CN(m, s)] && down[CN(m, s)]?[eval(r), _, _, _] ->
           down[CN(m, s)]?_, frame, b, frame_flag;
           if
           :: frame == RESULT -> take_result(m, s, r)
           :: frame == STABLE -> take_stable(m, r)
           :: frame == AGAIN ->
               if
               :: b < L -> say[MR(m, r)] = SAY_PUSH; at[MR(m, r)] = b
               :: else
               fi;
               fin[MR(m, r)] = 0;
               fin_end[MR(m, r)] = frame_flag
           :: else -> /* ASK */
               if
               :: st[MR(m, r)] == KNOWN -> say[MR(m, r)] = SAY_DONE; owner[MR(m, r)] = s
               :: else /* what it has begun it will tell of without being asked */
               fi
           fi
       }
    od
}

byte uni[ROUNDS]; /* coordinator: epoch + 1 of rounds that a machine reports as begun and not stable */
byte reports;
chan orders[MACHINES] = [2] of { mtype, byte, byte, byte, byte }; /* type, dead, epoch, union of rounds 0, 1 */

#if RESTS > 0
#define RESTED rests
#else
#define RESTED false
#endif

proctype machine(byte m)
{
end:
    do
    :: d_step {
           cur[m] < ROUNDS && !paused[m] && st[MR(m, cur[m])] == NONE && !(RESTED && m == MACHINES - 1) ->
           begin_round(m)
       }
#if RESTS > 0
    :: d_step {
           m == MACHINES - 1 && !rests && cur[m] < ROUNDS ->
           rests = true;
           took = cur[m] + (st[MR(m, cur[m])] == NONE -> 0 : 1);
           for (q : 0 .. LAST) {
               tell[q] = true
           }
           q = 0
       }
#endif
    /* The operation ends.  Its buffer is the application's again. */
    :: d_step {
           cur[m] < ROUNDS && st[MR(m, cur[m])] == BEGUN && h[MR(m, cur[m])] == L && MAY_LEAVE(m, cur[m]) ->
           if
           :: KEEPS(m, cur[m]) -> aside[MR(m, cur[m])] = true; copies[m]++
           :: else
           fi;
           st[MR(m, cur[m])] = LANDED;
           cur[m]++
       }
#ifdef MUTANT_CLOSE_LATE
    :: d_step {
           HAS(dead[m], 0) && open[CN(m, 0)] -> close_to(m, 0)
       }
    :: d_step {
           HAS(dead[m], 1) && open[CN(m, 1)] -> close_to(m, 1)
       }
#endif
    :: d_step {
           orders[m]?[PREPARE, _, _, _, _] ->
           orders[m]?_, frame_value, _, _, _;
           paused[m] = true;
#ifndef MUTANT_CLOSE_LATE
           for (q : 0 .. LAST) {
               if
               :: HAS(frame_value, q) -> close_to(m, q)
               :: else
               fi
           }
#endif
           for (q : 0 .. ROUNDS - 1) {
               if
               :: st[MR(m, q)] == BEGUN || st[MR(m, q)] == LANDED ->
                   assert(uni[q] == 0 || uni[q] == ep[MR(m, q)] + 1);
                   uni[q] = ep[MR(m, q)] + 1
               :: else
               fi
           }
           reports++
       }
    :: d_step {
           orders[m]?[COMMIT, _, _, _, _] ->
           orders[m]?_, dead[m], epoch[m], frame_value, frame_flag;
           paused[m] = false;
           commits[m]++;
           for (q : 0 .. ROUNDS - 1) {
               if
               :: st[MR(m, q)] == NONE -> fixed[MR(m, q)] = (q == 0 -> frame_value : frame_flag)
               :: st[MR(m, q)] == BEGUN || st[MR(m, q)] == LANDED ->
                   find_owner(ep[MR(m, q)], dead[m]);
                   if
                   :: owner[MR(m, q)] != o -> owner[MR(m, q)] = o; begin_doubt(m, q)
                   :: else
                   fi
               :: else -> /* KNOWN */
                   skip;
#ifdef MUTANT_NOBODY_ASKED
                   find_owner(ep[MR(m, q)], dead[m]);
                   if
                   :: owner[MR(m, q)] != o && (q == 0 -> frame_value : frame_flag) > 0 ->
                       owner[MR(m, q)] = o;
                       say[MR(m, q)] = SAY_DONE
                   :: else
                   fi
#endif
               fi
           }
           q = 0 /* a d_step must not end in a loop */
       }
    od
}

#if LOSSES > 0 && MACHINES > 2
#error "LOSSES: of two machines only"
#endif
#define AHEAD (commits[MACHINES - 1] > commits[0] -> MACHINES - 1 : 0)

proctype coordinator()
{
    byte gone = 0, i = 0, number, union0, union1;
    bool anew = false; /* another coordinator: it does not know what the last one was about to do */
    bool deferred = false;
end:
    do
    :: ((!alive[0] || suspected[0]) && !HAS(gone, 0)) || ((!alive[1] || suspected[1]) && !HAS(gone, 1)) ||
       joins > 0 || anew ->
prepare:
       skip;
       d_step {
           gone = (!alive[0] || suspected[0] -> 1 : 0) | (!alive[1] || suspected[1] -> 2 : 0);
           anew = false;
           reports = 0;
           uni[0] = 0;
           uni[ROUNDS - 1] = 0
       }
       do
       :: i < MACHINES -> orders[i]!PREPARE, gone, 0, 0, 0; i++
       :: else -> break
       od;
       i = 0;
       reports == MACHINES;
#if LOSSES > 0
       if
       :: commits[0] != commits[MACHINES - 1] -> /* first those who are behind; they go on before all are asked again */
           i = (AHEAD == 0 -> MACHINES - 1 : 0);
           orders[i]!COMMIT, dead[AHEAD], epoch[AHEAD], uni[0], uni[ROUNDS - 1];
           i = 0;
#ifdef MUTANT_NOT_ASKED_AGAIN
           commits[0] == commits[MACHINES - 1]
#else
           goto prepare
#endif
       :: else
       fi;
#endif
       if
       :: number = epoch[0] + joins; joins = 0
#if LOSSES > 0
       :: losses > 0 && !deferred -> number = epoch[0]; deferred = true /* who joins comes in the next change */
#endif
       fi;
       union0 = uni[0];
       union1 = uni[ROUNDS - 1];
       do
       :: i < MACHINES -> orders[i]!COMMIT, gone, number, union0, union1; i++
#if LOSSES > 0
       :: losses > 0 && i < MACHINES ->
           losses--;
           anew = true;
           do /* what was on its way may be lost */
           :: orders[0]?_, _, _, _, _
           :: orders[MACHINES - 1]?_, _, _, _, _
           :: break
           od;
           i = MACHINES
#endif
       :: i == MACHINES -> break
       od;
       i = 0
    od
}

/* Death, suspicion and broken connections, at any moment. */
proctype adversary()
{
    byte s, m;
end:
    do
    :: kills > 0 ->
       atomic {
           kills--;
           if
           :: alive[0] -> s = 0
           :: alive[1] -> s = 1
           :: !alive[0] && !alive[1]
           fi;
           d_step {
               alive[s] = false;
               for (b : 0 .. ROUNDS - 1) {
                   forget(s, b)
               }
               b = 0
           }
           s = 0
       }
    :: suspects > 0 ->
       atomic {
           suspects--;
           if
           :: suspected[0] = true
           :: suspected[1] = true
           fi
       }
    :: breaks > 0 ->
       atomic {
           breaks--;
           if
           :: s = 0
           :: s = 1
           :: s = LAST
           fi;
           if
           :: m = 0
           :: m = MACHINES - 1
           fi;
           d_step {
               if
               :: alive[s] && open[CN(m, s)] ->
                   flush(CN(m, s));
#if RESTS > 0 && !defined(MUTANT_JOINED_SAID_ONCE)
                   tell[s] = tell[s] || (rests && m == MACHINES - 1); /* it may have been lost */
#endif
                   for (q : 0 .. ROUNDS - 1) {
                       /* the service's end */
                       if
                       :: in[SRM(s, q, m)] != OUT && in[SRM(s, q, m)] != IN_DONE && phase[SR(s, q)] != FREE ->
                           cut[SRM(s, q, m)] = true;
                           wish[SRM(s, q, m)] = 0
                       :: in[SRM(s, q, m)] == OUT && phase[SR(s, q)] == GATHER -> ask_missing(s, q)
                       :: else
                       fi;
                       /* the machine's */
                       if
                       :: (st[MR(m, q)] == BEGUN || st[MR(m, q)] == LANDED) && owner[MR(m, q)] == s ->
#ifdef MUTANT_HAVE_BEFORE_COMMIT
                           find_owner(ep[MR(m, q)], dead[m] | (1 << s));
                           owner[MR(m, q)] = o;
#endif
                           begin_doubt(m, q);
                           say[MR(m, q)] = (h[MR(m, q)] == 0 -> SAY_PUSH : SAY_HAVE)
                       :: st[MR(m, q)] == KNOWN && owner[MR(m, q)] == s -> say[MR(m, q)] = QUIET
                       :: else
                       fi
                   }
               :: else
               fi
           }
           s = 0;
           m = 0
       }
    od
}

/* Nothing can move any more: is all well? */
active proctype monitor()
{
    byte i;
    d_step {
        for (i : 0 .. SERVICES - 1) {
            alive[i] = true
        }
        for (i : 0 .. MACHINES * SERVICES - 1) {
            open[i] = true
        }
        i = 0
    }
    atomic {
        byte m, s, r;
        for (m : 0 .. MACHINES - 1) {
            run machine(m);
            for (s : 0 .. LAST) {
                for (r : 0 .. ROUNDS - 1) {
                    run part(m, s, r)
                }
            }
        }
        run coordinator();
        run adversary();
        m = 0;
        s = 0;
        r = 0
    }
    timeout ->
    for (i : 0 .. MACHINES * ROUNDS - 1) {
#if RESTS > 0
        assert(st[i] == KNOWN || (rests && i >= MR(MACHINES - 1, took))) /* no loss, no deadlock */
#else
        assert(st[i] == KNOWN) /* no loss, no deadlock */
#endif
    }
    for (i : 0 .. SERVICES * ROUNDS - 1) {
        assert(phase[i] == FREE) /* nothing left behind */
    }
}
