/* plan.h - who sums what: the optimal split (Eq. 1, 2 of BytePS) and the order in which parts go to
 * services.  Pure functions, no I/O, no global state. */
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

/* `bytes` cut by weight: share[i] is within one byte of its exact part, and all add up to `bytes`.
 * At least one weight is positive. */
void tly_plan_shares(int count, const uint32_t *weight, uint64_t bytes, uint64_t *share);

/* How many of the n + k services have a weight. */
int tly_plan_active(int n, int k);

/* Eq. 6 and its neighbours: seconds for M bytes over n worker and k CPU machines with NICs of B bytes/s,
 * full duplex.  k >= n: M/B.  n = 1: 0, nothing crosses the network. */
double tly_plan_time(int n, int k, double bytes, double bandwidth);

/* The same for what the plan is measured against: all-reduce, 2(n-1)M/(nB), and a parameter server on k
 * machines of its own, max(M/B, nM/(kB)); without any, k = 0, it never ends: INFINITY. */
double tly_plan_time_all_reduce(int n, double bytes, double bandwidth);
double tly_plan_time_server(int n, int k, double bytes, double bandwidth);

/* Deals parts to services so that every window of consecutive parts is split by weight.
 * With parts of one size a service's bytes are always within one part of its due, both ways, so that of any
 * window within two; with parts of several sizes never more than one part (of the size just dealt) above,
 * and about one of the largest below.  A service of weight 0 gets nothing.  The sequence depends on weights,
 * sizes and hash alone: all ranks deal alike.  Parts up to 64 MB. */
struct tly_dealer {
    int count;              /* services */
    const uint32_t *weight; /* borrowed */
    uint64_t total;         /* sum of weights, scaled */
    int shift;              /* weights are used << shift, or >> -shift if they are so large as to overflow */
    bool placed;            /* started by init_at */
    uint32_t largest;       /* part seen so far */
    int64_t
        credit[TLY_MAX_SERVICES]; /* service's due minus dealt, in bytes x total; if placed, plus a phase */
};

/* Start a sequence.  Weights must outlive the dealer; at least one is positive. */
void tly_dealer_init(struct tly_dealer *d, int count, const uint32_t *weight);

/* The service of the next part of `bytes` bytes (0 counts as 1).  O(services). */
int tly_dealer_next(struct tly_dealer *d, uint32_t bytes);

/* Start a sequence at a place that depends on `hash` alone, as if an unknown number of equal parts had been
 * dealt before; used for a name in no plan.  Over random hashes the first service is distributed by weight.
 * Cost O(services), not O(period). */
void tly_dealer_init_at(struct tly_dealer *d, int count, const uint32_t *weight, uint64_t hash);

#endif
