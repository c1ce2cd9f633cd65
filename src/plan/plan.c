/* plan.c - the optimal split and the dealer; in the flow between partition and queue (assign). */
#include "plan/plan.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

static uint32_t plan_divisor(uint32_t a, uint32_t b)
{
    while (b) {
        uint32_t r = a % b;
        a = b;
        b = r;
    }
    return a;
}

int tly_plan_weights(int n, int k, uint32_t *weight)
{
    if (n < 1 || k < 0 || n > TLY_MAX_SERVICES || k > TLY_MAX_SERVICES - n)
        return -EINVAL;
    uint32_t worker = 1, cpu = 0;
    if (n > 1 && k >= n) {
        worker = 0;
        cpu = 1;
    } else if (n > 1 && k > 0) {
        worker = (uint32_t)(n - k);
        cpu = 2 * (uint32_t)(n - 1);
        uint32_t g = plan_divisor(worker, cpu);
        worker /= g;
        cpu /= g;
    }
    for (int i = 0; i < n + k; i++)
        weight[i] = i < n ? worker : cpu;
    return 0;
}

/* --- a list's weights ---------------------------------------------------------------------------- */

/* The weight of all of these that have one; 0: of none, or not of all the same. */
static uint32_t plan_common(int count, const uint32_t *weight)
{
    uint32_t one = 0;
    for (int i = 0; i < count; i++) {
        if (one && weight[i] && weight[i] != one)
            return 0;
        one = weight[i] ? weight[i] : one;
    }
    return one;
}

void tly_plan_late(int machines, int count, const uint32_t *weight, uint64_t bytes, uint64_t lag,
                   uint32_t *out)
{
    enum { BITS = 16, FINE = 22 };
    uint64_t n = 0, k = 0;
    uint64_t worker = plan_common(machines, weight), other = plan_common(count - machines, weight + machines);
    for (int i = 0; i < count; i++) {
        out[i] = weight[i];
        n += i < machines && weight[i];
        k += i >= machines && weight[i];
    }
    if (!worker || !other || n < (uint64_t)machines || k >= n || worker * 2 * (n - 1) != other * (n - k))
        return; /* not Eq. 1, 2 */
    /* D / 2, in 2^-BITS of the list.  Both shares are n 2^BITS times a machine's weight. */
    uint64_t half = bytes / 8 > lag ? (lag << BITS) / bytes / 2 : 1 << (BITS - 4);
    uint64_t shares[] = {worker * ((n << BITS) + k * half), n * ((other << BITS) - worker * half)};
    while (shares[0] >> FINE || shares[1] >> FINE) {
        shares[0] >>= 1;
        shares[1] >>= 1;
    }
    for (int i = 0; i < count; i++)
        if (weight[i])
            out[i] = (uint32_t)shares[i >= machines];
}

/* --- the dealer --------------------------------------------------------------------------------
 *
 * Tijdeman's rule for the chairman assignment problem (the same as earliest-deadline-first of proportionate
 * fair scheduling).  Every part of s bytes raises each service's credit by its share of s, and lowers that of
 * the service that gets it by s.  Eligible is who would still have had credit left for a byte of it, so nobody
 * is ever a whole part ahead; somebody always is, since after the raise the credits add up to s > 0.  Of the
 * eligible, the one goes first whose credit would reach a whole part soonest, so with equal parts nobody is
 * ever a whole part behind.  (Smooth weighted round-robin, which takes the largest credit, keeps the first
 * half of this only: light services fall several parts behind together.)
 *
 * A list's parts are dealt twice: to the worker machines' side or to the CPU machines', and there to a service.  Credits
 * of services that are alike reach a whole part together: dealt all at once, all worker machines, whose shares are small,
 * had a part each in a row, and then none for a long time, in which the CPU machines were sent more than their cards
 * carry.  That waited in queues, and results with it. */

/* Sums of shares up to this keep credits (a few parts of 64 MB x total) far inside 64 bits. */
#define MAX_TOTAL (1ull << 28)

/* Weights, shifted to the right if they are so large as to overflow, are the shares. */
void tly_dealer_init(struct tly_dealer *d, int machines, int count, const uint32_t *weight)
{
    assert(count > 0 && count <= TLY_MAX_SERVICES && machines >= 0 && machines <= count);
    d->machines = machines;
    d->count = count;
    d->placed = false;
    d->largest = 0;
    memset(d->credit, 0, (size_t)count * sizeof d->credit[0]);
    memset(d->side_credit, 0, sizeof d->side_credit);
    for (int shift = 0;; shift++) {
        uint64_t side[2] = {0};
        for (int i = 0; i < count; i++) {
            d->share[i] = weight[i] && !(weight[i] >> shift) ? 1 : weight[i] >> shift;
            side[i >= machines] += d->share[i];
        }
        d->total = side[0] + side[1];
        assert(d->total > 0);
        if (d->total <= MAX_TOTAL) {
            d->side[0] = (uint32_t)side[0];
            d->side[1] = (uint32_t)side[1];
            return;
        }
    }
}

/* The i-th number of splitmix64 from `seed`, cut to [0, limit). */
static uint64_t plan_draw(uint64_t seed, int i, uint64_t limit)
{
    uint64_t x = seed + ((uint64_t)i + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    x ^= x >> 31;
    return (uint64_t)((unsigned __int128)x * limit >> 64);
}

/* A place in an endless sequence, seen from one of its parts: that part's service is drawn by weight, and
 * every other service stands anywhere between its last part and its next, all equally likely.  So seen, the
 * part after it, and each later one, is distributed by weight too.  (A start at random credits under the
 * rule above would keep light services short for a long while, for their credit is high on average.)
 * Without the rule of eligibility only differences of credit over weight count; a service's bytes stay within
 * half a part of its due, give or take the sum of all phases, which its small share makes small.  Phases spread the
 * services by themselves: there are no sides. */
void tly_dealer_init_at(struct tly_dealer *d, int count, const uint32_t *weight, uint64_t hash)
{
    tly_dealer_init(d, count, count, weight);
    d->placed = true;
    while (d->total * 2 <= MAX_TOTAL) { /* so fine that no two phases are equal: none wins by its number */
        for (int i = 0; i < count; i++)
            d->share[i] *= 2;
        d->total *= 2;
    }
    int first = 0;
    for (uint64_t slot = plan_draw(hash, count, d->total); slot >= d->share[first]; first++)
        slot -= d->share[first];
    for (int i = 0; i < count; i++)
        d->credit[i] = (int64_t)plan_draw(hash, i, d->total);
    d->credit[first] = (int64_t)d->total;
}

/* The one of `count` that gets the next part; the shares add up to `total`. */
static int plan_seat(const struct tly_dealer *d, int count, const uint32_t *share, uint64_t total,
                     int64_t *credit, uint32_t bytes)
{
    const int64_t whole = (int64_t)(d->largest * total);
    int best = -1;
    int64_t best_left = 0;
    for (int i = 0; i < count; i++) {
        credit[i] += (int64_t)((uint64_t)share[i] * bytes);
        if (!share[i] || (credit[i] <= 0 && !d->placed))
            continue;
        /* It takes left / share bytes more until the credit is a whole part; compared by cross-multiplication. */
        int64_t left = whole - credit[i];
        if (best < 0 || (__int128)left * share[best] < (__int128)best_left * share[i]) {
            best = i;
            best_left = left;
        }
    }
    credit[best] -= (int64_t)(bytes * total);
    return best;
}

int tly_dealer_next(struct tly_dealer *d, uint32_t bytes)
{
    if (!bytes)
        bytes = 1;
    if (d->placed && !d->largest) /* the first part: its size turns the phases into bytes */
        for (int i = 0; i < d->count; i++)
            d->credit[i] *= bytes;
    if (bytes > d->largest)
        d->largest = bytes;
    if (d->placed)
        return plan_seat(d, d->count, d->share, d->total, d->credit, bytes);
    int side = plan_seat(d, 2, d->side, d->total, d->side_credit, bytes), from = side ? d->machines : 0;
    int count = side ? d->count - d->machines : d->machines;
    return from + plan_seat(d, count, d->share + from, d->side[side], d->credit + from, bytes);
}
