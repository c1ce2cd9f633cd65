/* cut.h - how long parts are, and how many bytes of them a rank may have on their way.  Pure functions. */
#ifndef TLY_PLAN_CUT_H
#define TLY_PLAN_CUT_H

#include <stdbool.h>
#include <stdint.h>

/* What a network card of so many bytes/s (0: not known) moves each way in 0.5 ms, in steps of 4 KB, 32 KB to 512 KB: the
 * unit of parts, credit and windows.  The 60 KB of 1 Gbit/s just fit the largest packet that a kernel hands to a card. */
uint32_t tly_plan_part_bytes(double bandwidth);

/* A tensor's bytes, and those of a planned list before and behind it; both 0 for a tensor in no list. */
struct tly_stretch {
    uint64_t bytes, before, behind;
};

/* The longest part of any list: 512 KB, or less, down to the unit, where the least memory of a service has no room for 16 such
 * parts of each rank and as many results. */
uint32_t tly_plan_part_most(uint32_t unit, uint64_t memory, uint32_t ranks);

/* How many of a tensor's longest parts each service gets at least.  The time that nothing makes good is c n P / M of the whole,
 * for parts of P of the M bytes and n services (bench/goodput/cards.c).  It is to stay below 1%.
 * TLY_FEW: an all-reduce without CPU machines, where each card has pushes to send while results lag; c = 1/6.
 * TLY_SPARES: one with CPU machines, where a card waits for the first results and, behind the last push, for the last; c = 1.3
 * to 2.6.
 * TLY_MANY: any other operation but a broadcast; c = .5 to 1.3.
 * TLY_BROADCAST_FEWEST, TLY_BROADCAST_MANY: a broadcast, by its size (tly_plan_broadcast_fewest). */
enum tly_plan_fewest {
    TLY_FEW = 16,
    TLY_MANY = 256,
    TLY_SPARES = 512,
    TLY_BROADCAST_FEWEST = 32,
    TLY_BROADCAST_MANY = 128
};

/* The same of a broadcast of so many bytes.  A part of up to a packet loses a quarter of what c says (the same model). */
uint32_t tly_plan_broadcast_fewest(uint64_t bytes, int active);

/* How a list is cut. */
struct tly_cutting {
    uint32_t unit; /* tly_plan_part_bytes(): parts up to this long are always short enough */
    uint32_t most; /* longest part that services have memory for, at least `unit` */
    int active;    /* services with a share */
    bool far;      /* none of these is on a worker machine */
    uint32_t fewest;
};

/* The longest part of a list or tensor: as long as `fewest` and `most` allow, for a part costs the processor the same whatever
 * its length; but a credit of them is no more than 16 units (8 ms of a card of 500 Mbit/s or more) or a 32nd of the list: so
 * much stands before what is urgent.  A list that would have shorter parts than `unit` by that has as long ones as give each service
 * 16, but none shorter than a quarter of `unit`.
 * Parts of 60 to 240 KB, but the unit, have a multiple of 60: with its header that fits into the largest packets that the kernel
 * builds.  64 KB go as two packets, which wake the receiver twice. */
uint32_t tly_plan_largest_part(const struct tly_stretch *s, const struct tly_cutting *c);

/* The credit of a rank, unless the user has set it: two parts for each active service.  One is on its way while the other
 * one is summed. */
static inline uint64_t tly_plan_credit(int active, uint64_t part_bytes)
{
    return 2 * (uint64_t)active * part_bytes;
}

/* Parts of an all-reduce's credit. */
static inline uint64_t tly_plan_ahead(int active, bool far)
{
    return (far ? 3 : 2) * (uint64_t)active;
}

/* The same of an all-reduce: three parts where all services are far, for each tells only after one and a half what it has
 * accepted (job.c), and one's own at once.  12 units (6 ms) at least, or 12 parts where these are shorter, for a process may
 * wake late. */
static inline uint64_t tly_plan_sum_credit(int active, bool far, uint64_t part_bytes, uint64_t unit)
{
    uint64_t all = tly_plan_ahead(active, far) * part_bytes;
    uint64_t least = 12 * (part_bytes < unit ? part_bytes : unit);
    return all > least ? all : least;
}

/* The credit of each of a machine's lists of parts in an all-reduce.  The lists lie behind one card, so they share the credit
 * equally.  Each has at least 12 units. */
static inline uint64_t tly_plan_list_credit(uint64_t credit, unsigned lists, uint64_t unit)
{
    uint64_t each = credit / lists, least = 12 * unit < credit ? 12 * unit : credit;
    return each > least ? each : least;
}

/* Length of the part that begins at byte `at` of a tensor.  Parts are small at both ends of a list, an eighth of the unit or
 * a little more, and grow with the distance from them, so that the first results come early, the last parts do not keep
 * anybody waiting, and shares end nearly exactly: a part is at most 1 / (2 active) of what lies on either side of its
 * beginning, but for the smallest ones (guided self-scheduling, Polychronopoulos and Kuck 1987, from both ends).  A multiple
 * of 64, but for a tensor's last. */
uint32_t tly_plan_part(const struct tly_stretch *s, uint64_t at, const struct tly_cutting *c);

#endif
