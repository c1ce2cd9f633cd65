/* cut.c - the lengths of parts (cut.h); in the flow: partition. */
#include "plan/cut.h"

uint32_t tly_plan_part_bytes(double bandwidth)
{
    enum { STEP = 4 << 10, LEAST = 32 << 10, MOST = 512 << 10 };
    double bytes = bandwidth > 0 ? bandwidth * 0.5e-3 : MOST;
    if (bytes < LEAST)
        return LEAST;
    return bytes < MOST ? ((uint32_t)bytes + STEP / 2) / STEP * STEP : MOST;
}

uint32_t tly_plan_part_most(uint32_t unit, uint64_t memory, uint32_t ranks)
{
    enum { MOST = 512 << 10, PARTS = 16 };
    uint64_t most = MOST;
    while (most > unit && PARTS * (ranks + 1ull) * most > memory)
        most /= 2;
    return most > unit ? (uint32_t)most : unit;
}

enum { BLOCK = 64, PACKET = 60 << 10, FEW_PACKETS = 4 };

static uint32_t plan_least_part(uint32_t unit)
{
    return unit < 16 * BLOCK ? BLOCK : unit / 8 / BLOCK * BLOCK;
}

static uint64_t plan_within(uint64_t least, uint64_t bytes, uint64_t most)
{
    return bytes < least ? least : bytes < most ? bytes : most;
}

/* Shortens a part beyond the unit to whole packets, if these are few. */
static uint64_t plan_fit_packets(uint64_t bytes, uint64_t unit)
{
    bool fits = bytes > unit && bytes > PACKET && bytes < FEW_PACKETS * PACKET;
    return fits ? plan_within(unit, bytes / PACKET * PACKET, bytes) : bytes;
}

uint32_t tly_plan_broadcast_fewest(uint64_t bytes, int active)
{
    return (uint32_t)plan_within(TLY_BROADCAST_FEWEST, bytes / (uint64_t)active / PACKET, TLY_BROADCAST_MANY);
}

uint32_t tly_plan_largest_part(const struct tly_stretch *s, const struct tly_cutting *c)
{
    uint64_t bytes = s->before + s->bytes + s->behind, each = bytes / (uint64_t)c->active;
    uint64_t credit = bytes / 32 > 16 * c->unit ? bytes / 32 : 16 * c->unit;
    uint64_t least = plan_within(0, 2 * plan_least_part(c->unit), c->unit);
    uint64_t shortest = plan_within(least, each / TLY_FEW / BLOCK * BLOCK, c->unit);
    uint64_t longest = plan_within(0, each / c->fewest, credit / tly_plan_ahead(c->active, c->far));
    return (uint32_t)plan_fit_packets(plan_within(shortest, longest / BLOCK * BLOCK, c->most), c->unit);
}

uint32_t tly_plan_part(const struct tly_stretch *s, uint64_t at, const struct tly_cutting *c)
{
    uint64_t left = s->bytes - at, least = plan_least_part(c->unit);
    uint64_t done = s->before + at, to_do = left + s->behind, near = done < to_do ? done : to_do;
    uint64_t most = tly_plan_largest_part(s, c);
    uint64_t length = plan_within(least, near / (2 * (uint64_t)c->active) / BLOCK * BLOCK, most);
    return (uint32_t)(left < length + least && left <= most ? left : length);
}
