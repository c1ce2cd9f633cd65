/* carriers.c - which rank of each machine carries a part for its machine.
 *
 * To the services the carriers of a part are a group.  A machine's ranks have places, in the order of the group.  List i has of each
 * machine the rank with place i; where there are fewer ranks than lists they are in several.
 *
 * A team's sums change no bit of the group's if two things hold.  The group's ranks on each machine stand one behind the other, and
 * are a node of the tree over the group.  And the services, which know a list of carriers alone, add up machines along the tree that
 * is left if each node is a leaf.  That is the tree over machines, each counted once, or with all its ranks if the sum is of all ranks
 * that the machines have (src/ops/all_reduce/service.c). */
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

static bool carriers_may_be(const struct tly_carriers *k)
{
    return k->machines > 1 && k->lists > 1;
}

/* Does each machine have one node of the tree over all?  Then size[] is how many ranks each has, in their order.  ranks NULL: all of
 * the job in their order. */
static bool carriers_are_nodes(const struct tly_seats *s, const uint32_t *ranks, uint32_t count,
                               const int *has, uint32_t size[])
{
    uint32_t machines = 0;
    for (uint32_t i = 0, end; i < count; i = end) {
        uint32_t m = s->rank[ranks ? ranks[i] : i].machine;
        end = i + (uint32_t)has[m];
        for (uint32_t j = i; j < end; j++)
            if (j >= count || s->rank[ranks ? ranks[j] : j].machine != m)
                return false;
        if (!tly_roster_is_node(0, count, i, end))
            return false;
        size[machines++] = end - i;
    }
    return true;
}

/* In two trees each of `machines` is a node, with so many leaves: are the trees the same above them? */
static bool carriers_same_tree(const uint32_t *a, const uint32_t *b, uint32_t machines)
{
    const uint32_t *const trees[2] = {a, b};
    uint32_t split[2] = {0, 0};
    if (machines < 2)
        return true;
    for (int i = 0; i < 2; i++) {
        uint32_t leaves = 0, half = 1, at = 0;
        for (uint32_t m = 0; m < machines; m++)
            leaves += trees[i][m];
        while (half * 2 < leaves)
            half *= 2;
        while (at < half)
            at += trees[i][split[i]++];
    }
    return split[0] == split[1] && carriers_same_tree(a, b, split[0]) &&
           carriers_same_tree(a + split[0], b + split[0], machines - split[0]);
}

/* The leaves of each machine in the tree along which services sum, where the group has size[] ranks there. */
static void carriers_leaves(const struct tly_seats *s, const struct tly_carriers *k, const int *all,
                            const uint32_t size[], uint32_t spare[], uint32_t leaves[])
{
    uint32_t count = 0, has = 0, at = 0;
    for (uint32_t m = 0; m < s->machines; m++) {
        has += k->machine[m] >= 0 ? (uint32_t)all[m] : 0;
        if (k->machine[m] >= 0)
            leaves[k->machine[m]] = (uint32_t)all[m];
    }
    for (int i = 0; i < k->machines; i++)
        count += size[i];
    bool nodes = count == has &&
                 ((uint32_t)k->machines < s->machines || carriers_are_nodes(s, NULL, s->ranks, all, spare));
    for (int i = 0; i < k->machines; at += leaves[i++])
        nodes = nodes && tly_roster_is_node(0, has, at, at + leaves[i]);
    for (int i = 0; i < k->machines && !nodes; i++)
        leaves[i] = 1;
}

/* -ENOMEM. */
static int carriers_find_sums(const struct tly_seats *s, const uint32_t *ranks, int count,
                              struct tly_carriers *k, const int *has)
{
    int *all = calloc(s->machines, sizeof *all);
    uint32_t *sizes = calloc(s->machines, 3 * sizeof *sizes);
    if (all && sizes) {
        uint32_t *leaves = sizes + s->machines, *spare = leaves + s->machines;
        for (uint32_t i = 0; i < s->ranks; i++)
            all[s->rank[i].machine]++;
        k->sums = carriers_are_nodes(s, ranks, (uint32_t)count, has, sizes);
        if (k->sums) {
            carriers_leaves(s, k, all, sizes, spare, leaves);
            k->sums = carriers_same_tree(sizes, leaves, (uint32_t)k->machines);
        }
    }
    int err = all && sizes ? 0 : -ENOMEM;
    free(all);
    free(sizes);
    return err;
}

/* has[]: of each machine the number of the group's ranks. */
static int carriers_fill(const struct tly_seats *s, const uint32_t *ranks, int size, struct tly_carriers *k,
                         const int *has)
{
    int *placed = calloc(s->machines, sizeof *placed);
    k->rank = calloc((size_t)k->lists * (size_t)k->machines, sizeof *k->rank);
    k->number = calloc((size_t)k->lists, sizeof *k->number);
    if (!placed || !k->rank || !k->number) {
        free(placed);
        return -ENOMEM;
    }
    for (int i = 0; i < size; i++) {
        uint32_t m = s->rank[ranks[i]].machine;
        for (int list = placed[m]++; list < k->lists; list += has[m])
            k->rank[list * k->machines + k->machine[m]] = ranks[i];
    }
    free(placed);
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
        bool may_be = carriers_may_be(k);
        err = may_be ? carriers_fill(s, ranks, size, k, has) : 0;
        if (may_be && !err)
            err = carriers_find_sums(s, ranks, size, k, has);
        if (may_be && !err) {
            k->own = k->machine[s->rank[me].machine];
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
    const int machine = k->machine[s->rank[rank].machine];
    unsigned first = 0, step = 1, lists = (unsigned)k->lists;
    while (tly_carriers_list(k, first)[machine] != rank)
        first++;
    while (first + step < lists && tly_carriers_list(k, first + step)[machine] != rank)
        step++;
    return first + turn % (1 + (lists - 1 - first) / step) * step;
}
