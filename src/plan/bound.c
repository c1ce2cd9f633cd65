/* bound.c - what each card carries at the least in a collective, and the least time, if each byte crosses the network once a
 * machine.
 *
 * An all-gather.  Let n machines need M bytes, of which machine j has m_j, and let card j carry b_j a second each way.
 * Machine j receives the M - m_j that it lacks, and sends its own m_j once at least.  So no way takes less than
 *   T = max over j of max(m_j, M - m_j) / b_j.
 * This holds with spare machines, too, for it counts nothing that they do.
 *
 * Relays reach T.  Card j sends m_j and n - 2 copies of the share x_j that it relays, and receives M - m_j.  For n > 2 it has
 * room for x_j = (b_j T - m_j) / (n - 2), which is not negative.  Since b_j T >= M - m_j, these add up to at least
 *   sum over j of (M - 2 m_j) / (n - 2) = M.
 * So all bytes find a relay.  For n = 2 each machine sends its m_j, and there is nothing to relay.
 *
 * A broadcast is the all-gather in which the root's machine has all: T = M / min b.
 *
 * A reduce-scatter is an all-gather backwards: each copy becomes a partial sum that goes the other way.  So it has the same T,
 * with m_j the bytes that machine j is to have.  A reduce is a broadcast backwards.
 *
 * The cards do not all send their least at once: n - 1 copies of M leave them, of which the pieces are only one.
 *
 * A service adds the n inputs of a byte in the order of ranks, and so needs them all.  Where each piece is summed on the machine
 * that wants it, machine j sends its inputs to the others' pieces, M - m_j, and receives n - 1 inputs to its own.  Pieces and
 * cards alike reach T so, too: m_j = M / n. */
#include <math.h>

#include "plan/plan.h"
#include "plan/relay.h"

/* Seconds for these loads; NAN if no bandwidth is known. */
static double bound_time(int count, const struct tly_plan_machine *m, const struct tly_plan_load *load)
{
    double t = 0;
    bool known = false;
    for (int i = 0; i < count; i++) {
        t = fmax(t, fmax(load[i].out, load[i].in) / tly_relay_bandwidth(count, m, i));
        known |= m[i].bandwidth > 0;
    }
    return known ? t : NAN;
}

/* Each machine sends the pieces of the others once, and receives so many inputs to its own. */
static double bound_load_sums(int count, const struct tly_plan_machine *m, const uint64_t *bytes,
                              double inputs, struct tly_plan_load *load)
{
    double all = 0;
    for (int i = 0; i < count; i++)
        all += m[i].ranks ? (double)bytes[i] : 0;
    for (int i = 0; i < count; i++) {
        load[i] = (struct tly_plan_load){0};
        if (m[i].ranks)
            load[i] = (struct tly_plan_load){.out = all - (double)bytes[i], .in = inputs * (double)bytes[i]};
    }
    return bound_time(count, m, load);
}

static int bound_count_machines(int count, const struct tly_plan_machine *m)
{
    int machines = 0;
    for (int i = 0; i < count; i++)
        machines += m[i].ranks > 0;
    return machines;
}

double tly_plan_least_sum(int count, const struct tly_plan_machine *m, const uint64_t *bytes,
                          struct tly_plan_load *load)
{
    return bound_load_sums(count, m, bytes, bound_count_machines(count, m) > 1, load);
}

double tly_plan_sum_where_wanted(int count, const struct tly_plan_machine *m, const uint64_t *bytes,
                                 struct tly_plan_load *load)
{
    return bound_load_sums(count, m, bytes, bound_count_machines(count, m) - 1, load);
}

double tly_plan_least_gather(int count, const struct tly_plan_machine *m, const uint64_t *bytes,
                             struct tly_plan_load *load)
{
    double t = tly_plan_least_sum(count, m, bytes, load);
    for (int i = 0; i < count; i++)
        load[i] = (struct tly_plan_load){.out = load[i].in, .in = load[i].out};
    return t;
}

double tly_plan_least_exchange(int count, const struct tly_plan_machine *m, double bytes,
                               struct tly_plan_load *load)
{
    double ranks = 0;
    for (int i = 0; i < count; i++)
        ranks += m[i].ranks;
    for (int i = 0; i < count; i++) {
        double each_way = m[i].ranks * (ranks - m[i].ranks) * bytes;
        load[i] = (struct tly_plan_load){each_way, each_way};
    }
    return bound_time(count, m, load);
}
