/* plan.h - who sums what: the optimal split (Eq. 1, 2 of BytePS for machines alike, the general problem for all
 * others) and the order in which parts go to services.  Pure functions, no I/O, no global state. */
#ifndef TLY_PLAN_H
#define TLY_PLAN_H

#include <stdbool.h>
#include <stdint.h>

enum { TLY_MAX_SERVICES = 1024 };

/* Integer weights of the services: 0..n-1 are those of the n worker machines, n..n+k-1 the k CPU machines'.
 * A service's share of all bytes is weight / sum of weights, reduced to lowest terms.  Eq. 1, 2:
 *   k = 0: all 1.   0 < k < n: worker n-k, CPU 2(n-1).   k >= n: worker 0, CPU 1.
 *   n = 1: the worker machine's own service has all the weight, whatever k is.
 * weight has room for n + k.  Returns 0, or -EINVAL for n < 1, k < 0 or n + k > TLY_MAX_SERVICES. */
int tly_plan_weights(int n, int k, uint32_t *weight);

/* --- machines that differ (split.c) -----------------------------------------------------------------
 *
 * A machine runs one service.  Rates are in bytes/s, or in any unit as long as all are in the same; times come
 * out for one unit of gradients.
 *
 * What crosses a network card, each way, for one unit of gradients: let r of all R ranks and services with the
 * share X be behind it.  Ranks push what is summed elsewhere, r (1 - X); services send results to the other
 * ranks, (R - r) X; traffic between those behind one card does not cross it.  Together r + (R - 2r) X: with one
 * rank 1 + (n - 2) x (Eq. 3), without any n x (Eq. 4).  Where more than half of the ranks are behind one card,
 * it carries the less the more its services sum. */
struct tly_plan_machine {
    uint32_t ranks;   /* that push from it; 0: a CPU machine */
    uint32_t card;    /* the first machine behind the same network card: its own index, or a lower one */
    double bandwidth; /* of that card each way; 0: not known.  Of machines that share one the lowest counts */
    double sum_rate;  /* of inputs that its service adds, R for each byte of its share; 0: no limit */
};

enum tly_split {
    TLY_SPLIT_OPTIMAL,    /* all, for the least time */
    TLY_SPLIT_ALL_REDUCE, /* machines with ranks, in equal shares: all-reduce's traffic */
    TLY_SPLIT_SERVER,     /* machines without, in equal shares: a parameter server */
};

/* Weights of the services, as tly_plan_weights() gives them if all machines with ranks are alike and all
 * without are, with a card of its own each and one bandwidth for all; else such that the shares minimise
 *   T = max over cards (r + (R - 2r) X) / bandwidth, over services R x / sum_rate;
 * shares are good to 2^-24.  Of the splits that do so it is the one in which also those who have time to spare
 * are busy for the shortest time.  A machine whose bandwidth is not known is taken to be as fast as the slowest
 * that is known.  0; -EINVAL for no machine or more than TLY_MAX_SERVICES, no rank, a card that is not the first
 * of its machines, a rate that is negative or not finite; -ENOENT if TLY_SPLIT_SERVER finds no machine. */
int tly_plan_split(enum tly_split split, int count, const struct tly_plan_machine *machine, uint32_t *weight);

/* T of the split by these weights, for one unit of gradients; NAN if a bandwidth is not known.  *busiest (may be
 * NULL) is a machine that takes so long. */
double tly_plan_cost(int count, const struct tly_plan_machine *machine, const uint32_t *weight, int *busiest);

/* What crosses the card of machine i each way, for one unit of gradients. */
double tly_plan_traffic(int count, const struct tly_plan_machine *machine, const uint32_t *weight, int i);

/* How many of the machines without ranks bring nothing: without them, those of least weight, the split takes at most 1%
 * longer.  A bandwidth that is not known counts as in tly_plan_split().  0 also for what that refuses, or without memory. */
int tly_plan_spare(enum tly_split split, int count, const struct tly_plan_machine *machine);

/* --- forecasts of the command (forecast.c) ------------------------------------------------------------- */

/* `bytes` cut by weight: share[i] is within one byte of its exact part, and all add up to `bytes`.
 * At least one weight is positive. */
void tly_plan_shares(int count, const uint32_t *weight, uint64_t bytes, uint64_t *share);

/* Eq. 6 and its neighbours: seconds for M bytes over n worker and k CPU machines with NICs of B bytes/s,
 * full duplex.  k >= n: M/B.  n = 1: 0, nothing crosses the network. */
double tly_plan_time(int n, int k, double bytes, double bandwidth);

/* A ring through all ranks, card by card: 2(R-1)/R over the slowest card that has ranks, 0 if that is the only one; or,
 * where that takes longer, r / sum_rate: each rank adds the R inputs of its R-th.  NAN if a bandwidth is not known. */
double tly_plan_cost_all_reduce(int count, const struct tly_plan_machine *machine);

/* --- cards that do not say their speed (measure.c) --------------------------------------------------- */

enum { TLY_MEASURE_GROUP = 8 }; /* most cards in one group */

/* How many times cards are divided into groups until each that is `wanted` has stood in the middle of one, 0 to 8: 0 if
 * there are no two cards or none is wanted; 1 if there are two. */
int tly_plan_measure_turns(int count, const bool *wanted);

/* The groups of a turn, 0 to turns - 1: middle[i] is the card in the middle of i's group, i if it is that
 * itself, -1 if i has a rest.  All others of a group stream to its middle, and it to them: so it shows what it carries,
 * up to what the others carry together.  rate[i] is what is known so far, 0: nothing.  The fastest are dealt first, and
 * no more than are enough where the middle one's is known: what is sent to a slow card in vain, because more leaves the
 * middle one than arrives, is lacking for the others.  At most TLY_MAX_SERVICES cards. */
#define TLY_MEASURE_ENOUGH 1.5
void tly_plan_measure_groups(int count, const bool *wanted, const double *rate, int turn, int *middle);

/* Cards that are alike have measured a little differently: neighbours within 15%, from the slowest to at most 1.4 times
 * that, get the rate of their middle one, or one that is known of another card within 15% of it.  (Classes of cards are
 * 1.6 times apart and more.)  Rates that are not measured, or 0, stay.  Any unit.  -ENOMEM, and nothing is changed. */
#define TLY_MEASURE_NEXT 1.15
#define TLY_MEASURE_SPAN 1.4
#define TLY_MEASURE_SAME_AS_KNOWN 0.15
int tly_plan_measure_settle(int count, const bool *measured, double *rate);

/* --- parts and their order -------------------------------------------------------------------------- */

/* Weights for a list of so many bytes: of all alike they differ from the endless list's, because a CPU machine has nothing
 * to send before the first sums, and nothing to receive behind the last pushes, while a worker machine's card has the other
 * direction's traffic.  Results lag `lag` bytes, D, behind what is pushed.  A CPU machine's card out is idle for D; a
 * worker's, of the share m, at the end for the part of D that pushes would have had, D (1 - m) / (1 + (n - 2) m).  All end
 * together if by Eq. 1, 2 each CPU machine sums m D / 2 bytes less, and each worker k/n of that more.  D is about two parts
 * for each service, measured (tly_plan_credit): it waits in the queues of the rank's card and the service's.  It counts as at
 * most an eighth of the list.  Weights that are not those of Eq. 1, 2 for 0 < k < n are given as they are.  0 to
 * machines - 1 are the workers'. */
void tly_plan_late(int machines, int count, const uint32_t *weight, uint64_t bytes, uint64_t lag,
                   uint32_t *out);

/* Deals parts to services so that every window of consecutive parts is split by weight.
 * With parts of one size and weights as tly_plan_weights() has them a service's bytes are always within one part of its
 * due, both ways, so that of any window within two, and so are those of all worker machines together; with parts of several
 * sizes and any weights never two parts (of the largest) above, and about one below.  A service of weight 0 gets nothing.
 * The sequence depends on weights, sizes and hash alone: all ranks deal alike.  Parts up to 64 MB. */
struct tly_dealer {
    int machines, count; /* services of worker machines, and all */
    bool placed;         /* started by init_at */
    uint32_t largest;    /* part seen so far */
    uint64_t total;      /* sum of shares */
    uint32_t side[2];    /* its halves, of worker machines and of CPU machines */
    int64_t side_credit[2];
    uint32_t share[TLY_MAX_SERVICES];
    /* A service's due of what its side got, minus what it got, in bytes x the side's shares; if placed, of all, plus a
     * phase. */
    int64_t credit[TLY_MAX_SERVICES];
};

/* Start a sequence.  0 to machines - 1 are worker machines' services; at least one weight is positive. */
void tly_dealer_init(struct tly_dealer *d, int machines, int count, const uint32_t *weight);

/* The service of the next part of `bytes` bytes (0 counts as 1).  O(services). */
int tly_dealer_next(struct tly_dealer *d, uint32_t bytes);

/* Start a sequence at a place that depends on `hash` alone, as if an unknown number of equal parts had been
 * dealt before; used for a name in no plan.  Over random hashes the first service is distributed by weight.
 * Cost O(services), not O(period). */
void tly_dealer_init_at(struct tly_dealer *d, int count, const uint32_t *weight, uint64_t hash);

/* A part that stays with its service between operations. */
struct tly_plan_kept {
    uint32_t length; /* bytes */
    uint16_t owner;  /* its service */
};

/* Shares have changed: give parts other owners, and move no more bytes than the shares differ.  Services of weight 0 give up all.
 * The result depends on the arguments alone: all ranks deal alike.  At least one weight is positive.  -ENOMEM.  (redeal.c) */
int tly_plan_redeal(int services, const uint32_t *weight, uint32_t count, struct tly_plan_kept *part);

/* --- collectives that are no all-reduce (relay.c) ------------------------------------------------------
 *
 * Of a machine, `ranks` counts the copies that it gets, or the inputs that it gives: one for each rank of the group, or 1
 * where one rank carries for its whole machine.  0 is a spare machine.  Cards are full duplex.  Machines behind one card
 * count as machines with an equal part of it each. */

/* Weights of the services that relay a broadcast's parts.  T = M / min b is reached.  With three machines or more the
 * root's own service has no share, for its card would send 1 + (R - 2) x; spare machines have none in any case.  0;
 * -ENOMEM. */
int tly_plan_broadcast(int count, const struct tly_plan_machine *machine, int root, uint32_t *weight);

/* Weights of the services that sum a reduce's parts.  With one rank a machine and equal cards T = M / b: the root's own service, whose card already
 * receives all sums, has no share.  spare[i] > 0: a machine without ranks may sum.  0; -ENOMEM. */
int tly_plan_reduce(int count, const struct tly_plan_machine *machine, int root, const uint32_t *spare,
                    uint32_t *weight);

/* How an all-gather's bytes are shared out: share[i] of them goes through service i.  bytes[i]: pieces of machine i's ranks.
 * T = max max(m, M - m) / b over the machines with ranks is reached, and cards with time to spare are equally busy.  Pieces
 * and cards that are alike go through their own service.  0; -ENOMEM. */
int tly_plan_all_gather(int count, const struct tly_plan_machine *machine, const uint64_t *bytes,
                        uint64_t *share);

/* Deals an all-gather's parts by tly_plan_all_gather(): of each machine's piece its own service relays what both have, and
 * the rest goes to the services whose share is larger than their machine's piece. */
struct tly_relay {
    bool spreads; /* some parts go through another machine's service */
    uint64_t bytes[TLY_MAX_SERVICES],
        own[TLY_MAX_SERVICES]; /* of each machine's piece: all; what its service relays */
    uint64_t dealt[TLY_MAX_SERVICES], kept[TLY_MAX_SERVICES]; /* the same of what has been dealt */
    struct tly_dealer others;
};
int tly_relay_init(struct tly_relay *r, int count, const struct tly_plan_machine *machine,
                   const uint64_t *bytes); /* -ENOMEM */

/* The service that relays the next part, of `bytes` bytes, of a piece of machine `from`.  O(services). */
int tly_relay_next(struct tly_relay *r, int from, uint32_t bytes);

/* --- bounds of these (bound.c) --------------------------------------------------------------------------- */

/* Bytes that a card carries each way. */
struct tly_plan_load {
    double out, in;
};

/* The least that each card carries, and the least seconds, if each byte crosses the network once a machine, whatever `ranks`
 * says.  Some way takes no longer, but the cards need not all carry their least in it.  bytes[i] are those of machine i: pieces
 * that its ranks give to an all-gather (of a broadcast the root's machine has all), or get from a reduce-scatter (of a reduce
 * the root's machine gets all).  NAN if no bandwidth is known. */
double tly_plan_least_gather(int count, const struct tly_plan_machine *machine, const uint64_t *bytes,
                             struct tly_plan_load *load);
double tly_plan_least_sum(int count, const struct tly_plan_machine *machine, const uint64_t *bytes,
                          struct tly_plan_load *load);

/* What cards carry, and the seconds, where each piece of a reduce-scatter is summed on the machine that wants it. */
double tly_plan_sum_where_wanted(int count, const struct tly_plan_machine *machine, const uint64_t *bytes,
                                 struct tly_plan_load *load);

/* The least of an all-to-all, in which each of a machine's `ranks` gives each other rank so many bytes: nothing goes twice. */
double tly_plan_least_exchange(int count, const struct tly_plan_machine *machine, double bytes,
                               struct tly_plan_load *load);

#endif
