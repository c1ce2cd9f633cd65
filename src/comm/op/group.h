/* group.h - ranks that operate among themselves (group.c).
 *
 * A group does not change, but for its counts of calls without a name, under names.lock. */
#ifndef TLY_COMM_GROUP_H
#define TLY_COMM_GROUP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/map.h"
#include "local/local.h"
#include "tally/tally.h"
#include "wire/frame.h"

struct tly_carriers;
struct tly_peer;

/* Ranks that operate among themselves, and their numbers for calls without a name. */
struct tally_group {
    tally_comm *comm;              /* borrowed */
    char *name;                    /* owned; NULL: all ranks */
    uint64_t id;                   /* hash of the name; 0: all ranks */
    uint64_t list;                 /* hash of the list */
    uint32_t number;               /* of the list, on the wire; 0: all ranks in their order */
    int rank, size;                /* our place in it */
    uint32_t *ranks;               /* owned */
    struct tly_local_group here;   /* its ranks that share memory with us; none: size 0 */
    struct tly_carriers *carriers; /* owned, but where the list is that of all ranks; NULL: it has no teams */
    uint64_t unnamed[TLY_KINDS];   /* calls without a name of each kind; under names.lock, as those below */
    uint64_t ordered[256 - TALLY_SPACE_ORDERED];
    struct tly_map
        messages; /* how many there were: hash of sender, receiver and tag -> number, as a pointer */
};

/* Ranks in the order of a group, or of a part's carriers; borrowed. */
struct tly_rank_list {
    const uint32_t *ranks;
    int size;
};

/* Do all its ranks share memory?  False of all ranks' own list. */
static inline bool tly_group_shares_memory(const struct tally_group *g)
{
    return g->number && g->here.size == (uint32_t)g->size;
}

/* All groups, under names.lock. */
struct tly_groups {
    struct tally_group all;      /* ranks */
    struct tly_map by_id;        /* id -> struct tally_group; owned */
    struct tly_rank_list *lists; /* owned array: of each number but 0 */
    uint32_t list_count;
};

static inline struct tally_group *tly_groups_all(struct tly_groups *g)
{
    return &g->all;
}

/* Calls without a name count from 0 again. */
void tly_groups_begin_anew(struct tly_groups *groups);
int tly_group_begin(tally_comm *c); /* all ranks; sentence set */
void tly_group_finish(tally_comm *c);
/* All ranks' carriers, once it is known where they sit.  -ENOMEM. */
int tly_group_have_carriers(tally_comm *c);
/* The place of a rank of the job in it. */
uint32_t tly_group_place(const struct tally_group *g, uint32_t rank);
/* "0-2, 5" */
void tly_group_text(const struct tally_group *g, char *out, size_t len);
/* The service behind `p` must know a group before its first part.  -ENOMEM. */
int tly_group_tell(struct tly_peer *p, uint32_t number);
/* ... or all that there are. */
int tly_group_tell_all(struct tly_peer *p);

#endif
