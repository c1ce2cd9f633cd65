/* engine.h - the engine of one rank: its view of the others, its rounds and lists, and the calls that start and wake it.
 *
 * `lock` guards all that stands below it in struct tly_local, and is held while chunks are worked on.  `inbox_lock` guards
 * the two lists below it.  Above them are what stays as it is once the engine has begun, and atomics that any thread may
 * read. */
#ifndef TLY_LOCAL_ENGINE_H
#define TLY_LOCAL_ENGINE_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/map.h"
#include "local/control.h"
#include "local/local.h"

struct tly_gpus;
struct tly_way;

struct tly_neighbour {
    struct tly_control *control;
    uint8_t *base; /* mapped; ours for ourselves */
    uint64_t bytes;
    int pid, pidfd;
    _Atomic uint64_t read; /* of its ring; written under the lock */
    uint32_t joins;        /* how often it has joined, as far as that was read */
};

/* All ranks' posts of one round of a name.  Lock: the engine's. */
struct tly_local_round {
    struct tly_list node; /* ready, while there is work */
    uint64_t id;
    struct tly_local_op *op;       /* ours; NULL: not submitted yet, or ended */
    struct tly_local_group *group; /* the ranks that take part; set once this rank posts it */
    uint64_t ranks;                /* the same, as bits, from the beginning */
    uint32_t size;                 /* how many */
    bool grouped;                  /* a group's */
    uint32_t arrived;
    uint32_t joins; /* how often all ranks had joined before it */
    uint32_t lead;  /* the first place's rank of those that have posted it; set when it begins */
    bool posted, over, counted;
    bool asked;                      /* for this rank to stand in */
    bool unaided;                    /* a group's, or a team's: nothing stands for a rank that has joined */
    const struct tly_way *way;       /* once this rank posts it (way.h) */
    uint32_t slots;                  /* blocks of a window; 0: nothing goes through windows (window.h) */
    uint32_t staged, summed, copied; /* in blocks: how far this rank is; the last: with its own result */
    uint32_t to_copy; /* of a group: chunks of its result that this rank copies out of the pool */
    bool pieces;      /* of windows: each rank sums its own piece */
    uint64_t order;   /* place in rank 0's ring: of its post, or read to when a group without it posted */
    uint64_t moved;   /* bytes of the result in this rank's memory; once it has begun */
    uint32_t chunks, chunk_bytes, gen; /* of a team: its parts */
    _Atomic uint64_t
        got; /* where GPUs sum: bytes of the result that are in the tensor; written under the GPUs' lock */
    struct tly_work *work;
    uint8_t *data; /* owned: payloads, `room` each */
    uint32_t room;
    struct tly_post posts[];
};

struct tly_local {
    atomic_int references;
    struct tly_local_config config;
    const struct tly_local_user *calls;
    void *user;
    uint32_t me, count;
    struct tly_local_group all; /* the machine's ranks */
    bool direct;
    uint64_t probe;    /* what the others try to read */
    bool crowded;      /* more ranks than cores */
    bool far;          /* some ranks are on another NUMA node */
    int64_t linger_ns; /* longest that a submission looks for the others' posts, where its caller will wait */
    int home;          /* NUMA node where it was opened; -1: there is one node */
    struct tly_segment *segment;
    struct tly_control *own;
    struct tly_neighbour at[TLY_LOCAL_RANKS];
    unsigned generation;
    pthread_t thread;
    bool thread_started;

    atomic_bool stopping, failed;
    atomic_int spinning, sleeping, inside,
        in_flight;                           /* threads that look; that sleep; that wait; operations */
    atomic_int pending;                      /* in the inbox */
    _Atomic uint64_t ended_ops, ended_bytes; /* here and now; written under the lock */
    atomic_bool prompt;   /* the last operation was alone until it was waited for; a guess about the next */
    atomic_int claims;    /* threads that want the engine's lock now */
    atomic_ullong ahead;  /* bytes of all pieces that were summed and are not yet sent */
    atomic_llong to_wake; /* 0, or who was held back looks again when so many of them are sent */
    atomic_bool blocked;  /* some of them wait for other ranks */
    atomic_bool missed;   /* somebody found the engine's lock taken */

    pthread_mutex_t inbox_lock;
    struct tly_list inbox;
    struct tly_list landed; /* pieces */

    pthread_mutex_t lock; /* the engine: guards all below, and is held while chunks are worked on */
    struct tly_map rounds;
    struct tly_list ops;     /* of ours, by age */
    struct tly_list backlog; /* no room in the ring */
    struct tly_list ready;   /* rounds to work on, by priority and age */
    struct tly_list idle;    /* rounds to use again */
    uint32_t idle_count;
    uint64_t tail, room; /* of our ring: written; up to here it is known to have been read by all */
    uint16_t free_work[TLY_WORKS];
    uint32_t free_count;
    uint32_t gens[TLY_WORKS];
    uint8_t left[TLY_LOCAL_RANKS]; /* as they have said, once all that they had posted was read */
    bool lost;                     /* somebody has left */
    bool joined;                   /* somebody has joined, ever: a round may do without its post */
    bool uneven;                   /* and not all have as often */
    atomic_bool joining;           /* this rank has; written under the lock */
    bool said;                     /* it has posted that, behind */
    uint64_t own_posts, to_post;   /* so many operations of its own, of so many */
    bool unwanted;                 /* some of our posts are to be taken back */
    uint32_t doubts;               /* whose outcome we know */
    uint8_t *scratch;              /* owned: a block for each rank */
    struct {
        void *at; /* owned */
        bool is_free;
    } window[2];
    uint32_t windows; /* in use, these and others */
    bool no_more;     /* no memory for others */
    void *slots;      /* owned: in a team, the window of control.slots */
    struct {
        uint64_t owners;   /* ranks that were asked to copy this block, as bits; 0: there is none */
        uint64_t name, at; /* of our post of its round; where it begins */
        bool writes;
    } ferry;
    bool said_full;        /* the user has been told that the pool is */
    struct tly_gpus *gpus; /* owned: GPUs that sum in groups, or that were to; else NULL */
};

/* The ranks that take part in an operation. */
static inline const struct tly_local_group *tly_local_group_of(const struct tly_local *l,
                                                               const struct tly_local_op *op)
{
    return op->group ? op->group : &l->all;
}

/* The post of the rank with this place, once ours is out. */
static inline const struct tly_post *tly_local_post(const struct tly_local_round *r, uint32_t place)
{
    return &r->posts[r->group->rank[place]];
}

/* A rank's number in the job. */
static inline uint32_t tly_local_number(const struct tly_local *l, uint32_t rank)
{
    return l->config.numbers[rank];
}

/* --- meet.c --- */

/* Exchange segments with all ranks of the machine.  -EOPNOTSUPP: some rank cannot, and no rank does, with a sentence. */
int tly_local_meet(struct tly_local *l);

/* --- wake.c --- */

/* Ring a rank's bell and wake `whom` (TLY_WAKE_...) there. */
void tly_local_ring(struct tly_local *l, uint32_t rank, uint32_t whom);
/* Something has changed that other ranks may wait for, or a group's, or that one rank may wait for. */
void tly_local_tell(struct tly_local *l);
void tly_local_tell_group(struct tly_local *l, const struct tly_local_group *g);
void tly_local_tell_one(struct tly_local *l, uint32_t rank);
/* Something has changed that sleeping callers of this rank may wait for. */
void tly_local_tell_sleepers(struct tly_local *l);
/* After a change of `spinning`, `sleeping` or `in_flight`: say in `wanted` whom the others are to wake.  Of two threads
 * the one that writes last has seen both changes. */
void tly_local_set_wanted(struct tly_local *l);
/* Something lies in the inbox: wake the thread that looks after this rank. */
void tly_local_call_own(struct tly_local *l);
/* Sleep until the bell, which was at `bell`, has rung for `as` (TLY_WAKE_...), or `ms` or the deadline have passed. */
void tly_local_sleep(struct tly_local *l, uint32_t bell, uint32_t as, int ms, int64_t deadline);
/* Let others have the core, if there are fewer of them than ranks or this has been called often. */
void tly_local_rest(const struct tly_local *l, unsigned spins);

#endif
