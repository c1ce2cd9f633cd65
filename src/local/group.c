/* group.c - the ranks of a machine that take part in an operation: all of them, or those of a group.
 *
 * A rank has a place among them.  Data are summed and gathered in the order of places.  Posts lie in the order of the
 * machine's ranks, so that one can be kept whose group this rank does not know yet. */
#include <string.h>

#include "local/local.h"

void tly_local_group_make(struct tly_local_group *g, const uint32_t rank[], uint32_t size, uint32_t me)
{
    memset(g, 0, sizeof *g);
    g->size = size;
    for (uint32_t i = 0; i < size; i++) {
        g->rank[i] = (uint8_t)rank[i];
        g->bits |= 1ull << rank[i];
        g->me = rank[i] == me ? i : g->me;
    }
}

void tly_local_group_make_all(struct tly_local_group *g, uint32_t size, uint32_t me)
{
    uint32_t rank[TLY_LOCAL_RANKS];
    for (uint32_t i = 0; i < size; i++)
        rank[i] = i;
    tly_local_group_make(g, rank, size, me);
}
