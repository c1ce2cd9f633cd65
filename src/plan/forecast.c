/* forecast.c - how long a plan takes by the papers' formulas, and how many bytes it gives to each; for the command alone. */
#include <assert.h>
#include <math.h>

#include "plan/plan.h"

void tly_plan_shares(int count, const uint32_t *weight, uint64_t bytes, uint64_t *share)
{
    uint64_t total = 0, below = 0, dealt = 0;
    for (int i = 0; i < count; i++)
        total += weight[i];
    assert(total > 0);
    for (int i = 0; i < count; i++) {
        below += weight[i];
        uint64_t edge = (uint64_t)((unsigned __int128)bytes * below / total);
        share[i] = edge - dealt;
        dealt = edge;
    }
}

double tly_plan_time(int n, int k, double bytes, double bandwidth)
{
    if (n <= 1)
        return 0;
    if (k >= n)
        return bytes / bandwidth;
    double dn = n, dk = k;
    return 2 * dn * (dn - 1) * bytes / ((dn * dn + dk * dn - 2 * dk) * bandwidth);
}

double tly_plan_cost_all_reduce(int count, const struct tly_plan_machine *m)
{
    double all = 0, slowest = INFINITY, sums = 0;
    int cards = 0;
    for (int i = 0; i < count; i++) {
        all += m[i].ranks;
        if (m[i].sum_rate > 0)
            sums = fmax(sums, m[i].ranks / m[i].sum_rate);
        double ranks = 0, bandwidth = INFINITY;
        for (int j = i; j < count && m[i].card == (uint32_t)i; j++)
            if (m[j].card == (uint32_t)i) {
                ranks += m[j].ranks;
                bandwidth = m[j].bandwidth > 0 ? fmin(bandwidth, m[j].bandwidth) : bandwidth;
            }
        if (ranks == 0)
            continue;
        if (isinf(bandwidth))
            return NAN;
        slowest = fmin(slowest, bandwidth);
        cards++;
    }
    return fmax(sums, cards < 2 ? 0 : 2 * (all - 1) / all / slowest);
}
