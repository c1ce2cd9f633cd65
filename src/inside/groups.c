/* groups.c - what a job carries out of a plan: groups of GPUs in a row, whose owners have equal parts. */
#include <stdio.h>
#include <string.h>

#include "inside/inside.h"

/* Are all groups of this size, each of GPUs in a row? */
static bool groups_are_rows(const struct tly_inside_way *way, int gpus, int each)
{
    for (int g = 0; g < gpus; g++)
        if (way->group[g] != g / each)
            return false;
    return gpus % each == 0;
}

/* The GPUs of a group that own parts.  How many, or 0: not with equal parts. */
static int groups_find_owners(const struct tly_inside_way *way, int first, int each, uint8_t owner[])
{
    int count = 0;
    for (int g = first; g < first + each; g++)
        if (way->share[g] > 0)
            owner[count++] = (uint8_t)g;
    for (int i = 0; i < count; i++) {
        double share = way->share[owner[i]] * count;
        if (share < 1 - 1e-9 || share > 1 + 1e-9)
            return 0;
    }
    return count;
}

/* Fill in all groups' owners, as many in each: some stand there several times.  False: no such list gives equal parts. */
static bool groups_take_owners(const struct tly_inside_way *way, int gpus, struct tly_inside_groups *out)
{
    uint8_t found[TLY_MAX_GPUS];
    for (int first = 0; first < gpus; first += out->each) {
        int count = groups_find_owners(way, first, out->each, found);
        out->owners = count > out->owners ? count : out->owners;
    }
    for (int first = 0, at = 0; first < gpus; first += out->each) {
        int count = groups_find_owners(way, first, out->each, found);
        if (!count || out->owners % count)
            return false;
        for (int i = 0; i < out->owners; i++)
            out->owner[at++] = found[i % count];
    }
    return true;
}

bool tly_inside_groups(const struct tly_inside *plan, int gpus, struct tly_inside_groups *out, char *why,
                       size_t size)
{
    const struct tly_inside_way *way = &plan->way;
    *out = (struct tly_inside_groups){.each = gpus / (way->groups ? way->groups : 1)};
    if (!gpus)
        snprintf(why, size, "there is no GPU");
    else if (way->groups >= gpus)
        snprintf(why, size, "each GPU for itself takes least time");
    else if (!groups_are_rows(way, gpus, out->each))
        snprintf(why, size, "groups are not of GPUs in a row, with as many in each");
    else if ((out->each & (out->each - 1)) || out->each > TLY_INSIDE_GROUP)
        snprintf(why, size, "a group has %d GPUs, and 2, 4 or 8 sum with the bits of the host", out->each);
    else if (way->copied > 0 || !groups_take_owners(way, gpus, out))
        snprintf(why, size, "GPUs have unequal parts");
    else
        return true;
    return false;
}
