/* members.h - lists of ranks: who takes part in a round.  Owner: the loop. */
#ifndef TLY_SUM_MEMBERS_H
#define TLY_SUM_MEMBERS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/list.h"

struct tly_session;
struct tly_frame;
struct tly_job;
struct tly_roster;

/* The nesting of a sum. */
struct tly_member_tree {
    int groups;
    int *group_size; /* owned */
    uint32_t *order; /* owned: rank of each leaf */
};

/* The ranks that take part in a round.  One list is one object, which lives as long as the job. */
struct tly_members {
    struct tly_list node;      /* in job->lists */
    struct tly_members *alike; /* the next list with the same hash */
    uint32_t count;
    uint32_t carried;               /* ranks on its machines; 0: two of its ranks share a machine */
    bool nodes;                     /* each of its machines is a node of the tree over these ranks */
    uint32_t *rank;                 /* owned: in the group's order */
    struct tly_member_tree tree[2]; /* [1] for 16-bit types */
};

/* members.c */
/* The ranks for which a frame's group stands on this connection; NULL: unknown, or its rank is not among them. */
const struct tly_members *tly_members_of(struct tly_session *p, uint32_t group);
/* GROUP has come.  -EPROTO with *why: it is no list, or one too many; -ENOMEM. */
int tly_members_learn(struct tly_session *p, const struct tly_frame *f, const void *data, const char **why);
int tly_members_begin(struct tly_job *job, const struct tly_roster *roster);
void tly_members_finish(struct tly_job *job);
bool tly_members_have(const struct tly_members *m, uint32_t rank);
/* The ranks of both, as a list that counts among this rank's; NULL: out of memory, or one too many. */
const struct tly_members *tly_members_unite(struct tly_session *p, const struct tly_members *a,
                                            const struct tly_members *b);

#endif
