/* carriers.h - which rank of each machine carries a part for its machine (carriers.c).  Pure functions; what they make does not
 * change. */
#ifndef TLY_COMM_CARRIERS_H
#define TLY_COMM_CARRIERS_H

#include <stdbool.h>
#include <stdint.h>

/* A rank's machine, and its place among that machine's ranks, which are in the order of their numbers. */
struct tly_seat {
    uint32_t machine, place;
};

/* Where all ranks of the job sit. */
struct tly_seats {
    struct tly_seat *rank; /* owned */
    uint32_t ranks, machines;
};

/* The lists of a group: each has a rank of each machine, and each rank is in some list. */
struct tly_carriers {
    int lists;    /* the most ranks that a machine has */
    int machines; /* that the group's ranks are on */
    int own;      /* place of this rank's machine among them */
    bool sums;    /* teams' sums, as services add them up, have the bits of the tree over the group's ranks */
    int *machine; /* owned: for each machine of the job, its place among the group's, or -1 */
    uint32_t *rank;   /* owned: the lists, one behind the other */
    uint32_t *number; /* owned: each list's number on the wire; of those with this rank alone */
};

/* Make the carriers of a group of these ranks, to which `me` belongs.  *out NULL: the group has no teams, because its ranks share
 * one machine, or each has a machine to itself.  -ENOMEM. */
int tly_carriers_make(const struct tly_seats *s, const uint32_t *ranks, int size, uint32_t me,
                      struct tly_carriers **out);
void tly_carriers_destroy(struct tly_carriers *k);

static inline const uint32_t *tly_carriers_list(const struct tly_carriers *k, unsigned list)
{
    return k->rank + list * (unsigned)k->machines;
}

static inline bool tly_carriers_have(const struct tly_carriers *k, unsigned list, uint32_t me)
{
    return tly_carriers_list(k, list)[k->own] == me;
}

/* How many lists have `me`. */
static inline unsigned tly_carriers_lists_of(const struct tly_carriers *k, uint32_t me)
{
    unsigned count = 0;
    for (unsigned list = 0; list < (unsigned)k->lists; list++)
        count += tly_carriers_have(k, list, me);
    return count;
}

/* The turn-th of the lists that have this rank. */
unsigned tly_carriers_with(const struct tly_carriers *k, const struct tly_seats *s, uint32_t rank,
                           uint32_t turn);

#endif
