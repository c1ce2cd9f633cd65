/* carriers.c - which rank of each machine carries a part for its machine.
 *
 * To the services the carriers of a part are a group.  List i has one rank of each machine: the rank with place i.  A machine with
 * fewer ranks than there are lists has its ranks in several lists, in turn.
 *
 * A group has teams only if it has all ranks of each of its machines.  A machine's sum changes no bit of the group's sum if the
 * machine's ranks stand one behind the other in the group, and are a node of the tree over it. */
#include "comm/op/carriers.h"

#include <errno.h>
#include <stdlib.h>

#include "membership/roster.h"

/* Each machine of the group gets its place there, in the order in which they come, and has[] the number of its ranks. */
static void carriers_count(const struct tly_seats *s, const uint32_t *ranks, int size, struct tly_carriers *k,
                           int *has)
{
    for (uint32_t i = 0; i < s->machines; i++)
        k->machine[i] = -1;
    for (int i = 0; i < size; i++) {
        uint32_t m = s->rank[ranks[i]].machine;
        if (k->machine[m] < 0)
            k->machine[m] = k->machines++;
        has[m]++;
        k->lists = has[m] > k->lists ? has[m] : k->lists;
    }
}

static bool carriers_may_be(const struct tly_seats *s, const struct tly_carriers *k, const int *has)
{
    uint32_t whole = 0;
    for (uint32_t i = 0; i < s->ranks; i++)
        whole += has[s->rank[i].machine] > 0; /* of all ranks there */
    int named = 0;
    for (uint32_t i = 0; i < s->machines; i++)
        named += has[i];
    return k->machines > 1 && k->lists > 1 && whole == (uint32_t)named;
}

/* ranks NULL: all of the job in their order. */
static bool carriers_are_nodes(const struct tly_seats *s, const uint32_t *ranks, int size, const int *has)
{
    for (int i = 0, end; i < size; i = end) {
        uint32_t m = s->rank[ranks ? ranks[i] : (uint32_t)i].machine;
        end = i + has[m];
        for (int j = i; j < end; j++) {
            if (j >= size)
                return false;
            const struct tly_seat *at = &s->rank[ranks ? ranks[j] : (uint32_t)j];
            if (at->machine != m || at->place != (uint32_t)(j - i))
                return false;
        }
        if (!tly_roster_is_node(0, (uint32_t)size, (uint32_t)i, (uint32_t)end))
            return false;
    }
    return true;
}

/* Carriers of all machines may be the same lists as the job's, which services add up along one tree.  So a group of all ranks in
 * another order has that tree only where both have nodes. */
static bool carriers_sum(const struct tly_seats *s, const uint32_t *ranks, int size, const int *has)
{
    return carriers_are_nodes(s, ranks, size, has) &&
           ((uint32_t)size < s->ranks || carriers_are_nodes(s, NULL, size, has));
}

static int carriers_fill(const struct tly_seats *s, const uint32_t *ranks, int size, struct tly_carriers *k,
                         const int *has)
{
    k->rank = calloc((size_t)k->lists * (size_t)k->machines, sizeof *k->rank);
    k->number = calloc((size_t)k->lists, sizeof *k->number);
    if (!k->rank || !k->number)
        return -ENOMEM;
    for (int list = 0; list < k->lists; list++)
        for (int i = 0; i < size; i++) {
            const struct tly_seat *at = &s->rank[ranks[i]];
            if (at->place == (uint32_t)(list % has[at->machine]))
                k->rank[list * k->machines + k->machine[at->machine]] = ranks[i];
        }
    return 0;
}

int tly_carriers_make(const struct tly_seats *s, const uint32_t *ranks, int size, uint32_t me,
                      struct tly_carriers **out)
{
    struct tly_carriers *k = calloc(1, sizeof *k);
    int *has = calloc(s->machines, sizeof *has), err = -ENOMEM;
    *out = NULL;
    if (k)
        k->machine = calloc(s->machines, sizeof *k->machine);
    if (k && k->machine && has) {
        carriers_count(s, ranks, size, k, has);
        bool may_be = carriers_may_be(s, k, has);
        err = may_be ? carriers_fill(s, ranks, size, k, has) : 0;
        if (may_be && !err) {
            k->own = k->machine[s->rank[me].machine];
            k->sums = carriers_sum(s, ranks, size, has);
            *out = k;
            k = NULL;
        }
    }
    tly_carriers_destroy(k);
    free(has);
    return err;
}

void tly_carriers_destroy(struct tly_carriers *k)
{
    if (!k)
        return;
    free(k->machine);
    free(k->rank);
    free(k->number);
    free(k);
}

unsigned tly_carriers_with(const struct tly_carriers *k, const struct tly_seats *s, uint32_t rank,
                           uint32_t turn)
{
    unsigned first = s->rank[rank].place, step = 1, lists = (unsigned)k->lists;
    const int machine = k->machine[s->rank[rank].machine];
    while (first + step < lists && tly_carriers_list(k, first + step)[machine] != rank)
        step++;
    return first + turn % (1 + (lists - 1 - first) / step) * step;
}
