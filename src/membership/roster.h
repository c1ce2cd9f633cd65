/* roster.h - who takes part: members as they describe themselves, and the epoch that the coordinator makes of
 * them.  Encoding and grouping; no I/O. */
#ifndef TLY_ROSTER_H
#define TLY_ROSTER_H

#include <stdbool.h>
#include <stdint.h>

#include "plan/plan.h"
#include "transport/endpoint.h"
#include "wire/hello.h"
#include "wire/pack.h"

enum {
    TLY_MAX_MACHINES = 1024,
    TLY_BEGUN_ROUNDS = 40000, /* in one frame of BEGUN or COMMIT */
};
#define TLY_NO_SERVICE UINT32_MAX
/* bit/s */
#define TLY_MAX_RATE 1000000000000000ull

/* What a process says of itself when it joins. */
struct tly_member_info {
    uint32_t role; /* TLY_ROLE_RANK or TLY_ROLE_TALLYD */
    uint32_t rank, size;
    uint32_t restart; /* + 1; 0: none */
    uint32_t pid;
    uint64_t netns, digest, nonce, incarnation;
    uint64_t bandwidth;                   /* of its network card each way, bit/s; 0: not known */
    uint64_t sum_rate;                    /* of inputs that its service adds, bit/s; 0: no limit */
    uint64_t memory;                      /* that its service may take, bytes; 0: not known */
    struct tly_endpoints at;              /* of its summation service */
    char host[64], host_id[64], door[64]; /* door: abstract Unix socket that proves the machine */
    char settings[256];                   /* the agreed ones, for messages */
};

void tly_member_write(struct tly_writer *w, const struct tly_member_info *m);
int tly_member_read(struct tly_reader *r, struct tly_member_info *m); /* -EPROTO */

struct tly_roster_rank {
    uint32_t machine, local_rank;
    uint32_t left; /* 1: it has said goodbye, which a service that comes later does not hear from it */
    uint32_t
        joined; /* its place among the ranks that have joined, from 1, in the order in which they did; 0: it has not */
};

enum tly_service_state {
    TLY_SERVICE_ACTIVE,
    TLY_SERVICE_IDLE, /* has no share: it is about to join or to leave */
    TLY_SERVICE_GONE  /* its place may be taken by another */
};

struct tly_roster_service {
    uint32_t role;  /* TLY_ROLE_RANK: embedded; TLY_ROLE_TALLYD */
    uint32_t state; /* enum tly_service_state; an embedded one is always active */
    uint32_t rank;  /* embedded: its rank */
    uint64_t incarnation;
    uint64_t bandwidth; /* bit/s that the plan goes by; 0: not known */
    uint64_t said;      /* as its member has said or, `measured`, as was found at the start; 0: not known */
    uint32_t measured;  /* 1: else it is declared, and what the plan goes by is never more */
    uint32_t tried;     /* 1: `bandwidth` is tried, assumed or measured once, and nothing confirms it yet */
    uint64_t sum_rate, memory; /* as its member has said */
    uint64_t sum_found;        /* of inputs that it adds, bit/s, as its ranks have seen; 0: no limit */
    uint32_t rests;            /* 1: so slow that it has no share for a while */
    uint32_t card;   /* the first service behind the same network card: its own index or a lower one */
    uint32_t weight; /* its share of all bytes, over the sum of weights */
    uint32_t left;   /* 1: a tallyd that has said goodbye */
    struct tly_endpoints at;
    char host[64];
};

/* All that an epoch consists of.  Services 0..machines-1 are the machines' own, then the tallyd. */
struct tly_roster {
    uint32_t epoch;
    uint32_t rank_count, machine_count, service_count;
    uint32_t standalone;            /* the coordinator is a process of its own: its death is not the job's */
    uint32_t teams;                 /* 1: the ranks of a machine push large tensors once, as a team */
    uint32_t joins, last_joined;    /* how often all ranks have joined; the last of them the last time */
    uint64_t part_bytes;            /* unit of parts, credit and windows in this epoch (plan/cut.h) */
    uint64_t part_least, part_most; /* the least unit and the longest part of any epoch */
    uint64_t window_bytes;          /* with which each connection begins */
    uint32_t window_fixed;          /* 1: it stays so, for somebody has set it */
    struct tly_roster_rank *ranks;  /* owned */
    struct tly_roster_service *services; /* owned */
};

/* A round that some rank has begun, and the epoch in which. */
struct tly_begun {
    uint64_t key;
    uint32_t round, epoch;
};

void tly_roster_finish(struct tly_roster *r);

/* The rank has joined, behind all that have before it.  False: it had already. */
bool tly_roster_join(struct tly_roster *r, uint32_t rank);
/* All ranks have joined for the `joins`-th time, and rank `last` was the last. */
void tly_roster_joined_all(struct tly_roster *r, uint32_t joins, uint32_t last);
/* Take over what `from` knows of joins beyond `to`; both are of one job. */
void tly_roster_merge_joins(struct tly_roster *to, const struct tly_roster *from);

void tly_roster_write(struct tly_writer *w, const struct tly_roster *r);
/* -EPROTO, -ENOMEM; *r untouched then. */
int tly_roster_read(struct tly_reader *rd, struct tly_roster *r);

/* Group ranks into machines: same[i] is the lowest rank on the machine of rank i.  Machines are numbered in
 * the order of their lowest ranks, local ranks in the order of ranks.  r->ranks has room for n. */
void tly_roster_group(struct tly_roster *r, uint32_t n, const uint32_t *same);

/* Set the weights of all active services by their bandwidths, cards and ranks; the others get 0.  Returns what
 * tly_plan_split() does (plan/plan.h). */
int tly_roster_split(struct tly_roster *r, enum tly_split split);

/* How many cards may carry more than the plan goes by, which nothing confirms yet, and the host of the first one. */
uint32_t tly_roster_doubtful(const struct tly_roster *r, const char **host);

/* How many of the active CPU machines bring nothing (tly_plan_spare). */
uint32_t tly_roster_spare(const struct tly_roster *r, enum tly_split split);

/* TALLY_SPLIT */
enum tly_split tly_roster_split_named(const char *name);

/* How many services have a weight. */
uint32_t tly_roster_active(const struct tly_roster *r);

/* Bytes that a rank may have at a service unanswered: twice the credit that it has for such parts, or the service's share of
 * TLY_WINDOWS_PARTS, up to TLY_MOST_SHARE.  Ranks push in different orders, because they make gradients at different times.
 * A part that one rank pushes early stays until the others push it.  memory: bytes that the service has for so many ranks.
 * Up to half of it is empty, because slots are powers of two. */
enum { TLY_WINDOWS_PARTS = 512, TLY_MOST_SHARE = 32 << 20 };
uint64_t tly_roster_window(int active, uint64_t part_bytes, uint64_t memory, uint32_t ranks);

/* The services as the plan sees them, rates in bytes/s; `machine` has room for service_count. */
void tly_roster_machines(const struct tly_roster *r, struct tly_plan_machine *machine);
/* Bandwidth of the cards, bytes/s: the mean by what crosses each, so that a slow card that has little to do counts for
 * little.  0: none is known. */
double tly_roster_usual(const struct tly_roster *r);
/* Bytes that a part of each rank and a result take at a service. */
uint64_t tly_roster_least_memory(const struct tly_roster *r);
/* Has this service no memory for that?  The ranks' own take what they need. */
bool tly_roster_lacks_memory(const struct tly_roster *r, uint32_t service);
/* May this service have a share?  Not one that rests, is not active, or lacks memory. */
bool tly_roster_shares(const struct tly_roster *r, uint32_t service);

/* How sums are nested (docs/why/reduce.md): sizes of the groups of leaves, and order[] the ranks in the order
 * of leaves.  If each machine's ranks are a node of the balanced tree over ranks: one group of all ranks in
 * their order ("flat", return true); else a group for each machine.  16-bit types, which are rounded once, are flat
 * only with one rank a machine.  group_size and order have room for rank_count; *groups is set. */
bool tly_roster_tree(const struct tly_roster *r, bool sixteen_bit, int *groups, int *group_size,
                     uint32_t *order);

/* Is [from, to) a node of the tree over [lo, hi)? */
bool tly_roster_is_node(uint32_t lo, uint32_t hi, uint32_t from, uint32_t to);

/* Are there several machines, one or more of them with several ranks?  Then each machine may push the sum of its ranks.  No bit
 * changes: that sum is a node of the tree over ranks, or else sums go along the tree over machines without teams, too. */
bool tly_roster_suits_teams(const struct tly_roster *r);

/* "rank 3 on host" / "tallyd 1 on host (address:port)", for messages. */
void tly_service_name(const struct tly_roster *r, uint32_t service, char *out, size_t len);

#endif
