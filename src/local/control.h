/* control.h - what lies at the head of each rank's segment, and the engine that works on it; shared by meet.c,
 * local.c, alone.c, posts.c, work.c, stage.c and team.c.
 *
 * A rank writes its posts into its own ring and all others read them, each at its own pace: one message to all.
 * What is small travels in the post itself; a larger tensor's post says where it lies. */
#ifndef TLY_LOCAL_CONTROL_H
#define TLY_LOCAL_CONTROL_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/map.h"
#include "local/local.h"

enum {
    TLY_RING = 256 << 10,  /* bytes, a power of two */
    TLY_EAGER = 4096,      /* most bytes in a post */
    TLY_TINY = 16,         /* most bytes in its first 64 */
    TLY_AHEAD = 256,       /* bytes of a payload that are asked for before they are read, or written */
    TLY_PROCESSORS = 1024, /* whose numbers are looked at */
    TLY_WORKS = 1 << 15, /* large operations in flight; more take the other way.  A team's wait: so many that
                              ranks which submit in opposite orders do not come to wait for each other */
    TLY_BLOCK = 128 << 10, /* bytes of private memory that are moved at once */
    TLY_ZEROS = 16 << 10,  /* bytes of what stands for a rank that has joined */
    TLY_LOOKS = 8,         /* between looks at the clock where a submission lingers */
};

enum { TLY_POST_EAGER = 1, TLY_POST_POOL_IN = 2, TLY_POST_POOL_OUT = 4, TLY_POST_SERVICE = 8 };
/* Not a call: the rank has thought of taking back the one that it has posted under this name, and does so if this has
 * TLY_POST_SERVICE. */
enum { TLY_POST_BACK = 16 };
/* Not a call, either: the rank has joined, and does not post of what it has not by now. */
enum { TLY_POST_JOINED = 64 };
/* Posted by a rank behind its TLY_POST_JOINED, but of the time before. */
enum { TLY_POST_LATE = 128 };
enum { TLY_POST_PATIENT = 32 }; /* who has posted it minds no wait for the others */

/* One rank's call.  In the ring; its payload follows, and the next post begins at a multiple of 64.  Readers look at
 * `there` of the next one: what is tiny crosses from core to core as one line of the cache. */
struct tly_post {
    uint64_t key, spec;
    union {
        struct {
            uint64_t input, output; /* place in the segment, or address in the process */
        };
        uint8_t tiny[TLY_TINY]; /* or all of the payload */
    };
    uint64_t bytes;    /* of the input */
    int64_t first_dim; /* of a team: how many parts there are; of another reduction: the priority */
    uint32_t round, gen;
    uint16_t
        work; /* of the lowest rank, in a team and of a reduction of each: the entry and its generation */
    uint8_t kind, flags;
    _Atomic uint32_t
        there; /* last, release; pairs with acquire in the readers.  Cleared before the one before */
};
_Static_assert(sizeof(struct tly_post) == 64, "posts begin at multiples of 64");

/* Who does which part of a large operation.  Generation in the upper half, a number below.  In a team each rank has one
 * for each of its operations: `next` is not 0 once its buffers are not lent any more, `done` counts results in them.  What
 * goes through windows: stage.c. */
struct tly_work {
    _Alignas(64) _Atomic uint64_t next; /* the next part to be taken */
    _Atomic uint64_t done;   /* parts (or ranks) that are done; release, pairs with acquire in finished() */
    _Atomic uint64_t window; /* its place in the segment */
    /* Of a team: what its rank's post does not say, for one that stands in.  The post publishes it. */
    struct {
        double prescale, postscale;
        uint64_t count;
        int32_t priority;
        uint8_t dtype, reduction;
    } what;
};

enum { TLY_ABLE = 1, TLY_DIRECT = 2, TLY_UNABLE = 4 }; /* control.state */
enum { TLY_WAKE_THREAD = 1, TLY_WAKE_WAITERS = 2 };    /* control.wanted, as a futex's bits */

/* Written by its owner, but for the bell, the work entries and the doubts. */
struct tly_control {
    _Alignas(64) _Atomic uint32_t wanted; /* whom to wake when something has changed; 0: somebody looks */
    _Atomic uint32_t left;    /* 1: submits nothing more; 2: and has given up what had not ended; release */
    _Atomic uint32_t stuck;   /* its ring is full: tell it when you have read */
    _Atomic uint32_t failed;  /* its private memory must not be touched any more */
    _Atomic uint32_t writing; /* 1 + the rank into whose private memory it is just writing */
    _Atomic uint32_t
        working; /* 1 + the entry of which it is just doing a part; in a team some name of the round */
    _Alignas(64) _Atomic uint32_t bell;       /* futex; anybody adds */
    _Atomic uint32_t state;                   /* of the start */
    uint64_t probe, probe_at;                 /* a number in private memory, for the others to try */
    uint64_t processors[TLY_PROCESSORS / 64]; /* that it may use, as bits; written before `state` */
    _Alignas(64) _Atomic uint32_t
        doubts; /* the lowest rank's is used: how often a rank was about to take back a post */
    _Alignas(64) _Atomic uint64_t elected; /* the lowest rank's is used: the round for which each rank keeps a
                                              window, 0: none.  (stage.c) */
    _Alignas(64) struct {
        _Alignas(
            64) _Atomic uint64_t at; /* what has been read of that rank's ring, or a little less; release */
    } read[TLY_LOCAL_RANKS];
    struct tly_work
        work[TLY_WORKS]; /* rank 0's are used; of a team, and of what goes through windows, all ranks' */
    _Alignas(64) uint8_t ring[TLY_RING];
};

struct tly_neighbour {
    struct tly_control *control;
    uint8_t *base; /* mapped; ours for ourselves */
    uint64_t bytes;
    int pid, pidfd;
    _Atomic uint64_t read; /* of its ring; written under the lock */
    uint32_t joins;        /* how often it has joined, as far as that was read */
};

/* All ranks' posts of one round of a name.  Lock: the engine's. */
struct tly_round {
    struct tly_list node; /* ready, while there is work */
    uint64_t id;
    struct tly_local_op *op; /* ours; NULL: not submitted yet, or ended */
    uint32_t arrived;
    uint32_t joins; /* how often all ranks had joined before it */
    uint32_t lead;  /* the lowest rank that has posted it; once all that will have */
    bool posted, over, counted;
    bool asked;                      /* for this rank to stand in */
    bool windowed;                   /* it goes through windows: */
    uint32_t staged, summed, copied; /* how far this rank is; the last: with its own result */
    uint64_t order;                  /* where the lowest rank's post was in its ring */
    uint32_t parts, part_bytes, gen;
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
    bool direct;
    uint64_t probe;    /* what the others try to read */
    bool crowded;      /* more ranks than cores */
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

    pthread_mutex_t lock; /* the engine: guards all below, and is held while parts are worked on */
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
    bool joining, said;            /* this rank has; it has posted that, behind */
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
};

/* meet.c */
int tly_local_meet(struct tly_local *l);

/* work.c */
/* The parts of a large reduction. */
void tly_work_cut(const struct tly_local *l, struct tly_round *r);
/* Do what there is for this rank; true: something was done.  The rest of the machine is told when it is the last. */
bool tly_work_do(struct tly_local *l, struct tly_round *r);
/* Is there any, or has it all been taken by somebody? */
bool tly_work_left(const struct tly_round *r);
/* This rank ends a round that cannot be finished and does not go through windows.  When it returns, no rank is in a part
 * of it or begins one.  False: the job fails meanwhile. */
bool tly_work_give_up(struct tly_local *l, const struct tly_round *r);
/* Until no neighbour works at what has this name.  One that is stopped there breaks the communicator, lest this rank's
 * thread wait for it and be taken for dead itself.  False: the job fails meanwhile. */
bool tly_work_await_others(struct tly_local *l, uint32_t at);
/* All posts hold their payload: the result, in this rank's memory. */
void tly_work_eager(struct tly_local *l, struct tly_round *r);

/* Of a rank's memory, with the care that it takes: false if it cannot be had any more. */
bool tly_work_read(struct tly_local *l, uint32_t rank, uint64_t from, void *to, size_t len);
bool tly_work_write(struct tly_local *l, uint32_t rank, uint64_t to, const void *from, size_t len);
/* Where this process sees a rank's input or output; NULL: in that rank's private memory. */
uint8_t *tly_work_seen(const struct tly_local *l, uint32_t rank, uint64_t at, bool pool);
struct tly_reduction tly_work_how(const struct tly_local *l, const struct tly_local_op *op);
/* Somebody's calls have ended before this was done: what was read of its memory may be something else by now. */
bool tly_work_is_given_up(const struct tly_local *l);

/* stage.c */
/* Is some rank's tensor in private memory?  All posts are there. */
bool tly_stage_suits(const struct tly_local *l, const struct tly_round *r);
/* Have memory for it, so that it does not want later.  -ENOMEM: with a sentence. */
int tly_stage_open(struct tly_local *l);
void tly_stage_close(struct tly_local *l);
/* This rank's tensor, in private memory, is about to be posted; r->posts has the post, r->op the operation. */
void tly_stage_prepare(struct tly_local *l, struct tly_round *r);
/* All posts are there. */
void tly_stage_begin(struct tly_local *l, struct tly_round *r);
/* Is it the one for which each rank keeps a window? */
bool tly_stage_is_elected(const struct tly_local *l, const struct tly_round *r);
/* A round has become ready, or this one has ended here: is another to be elected, and by this rank? */
void tly_stage_elect(struct tly_local *l, const struct tly_round *ended);
/* Do a block; `first`: no other round that goes through windows comes before it.  True: something was done. */
bool tly_stage_do(struct tly_local *l, struct tly_round *r, bool first);
/* Is there any? */
bool tly_stage_can(const struct tly_local *l, const struct tly_round *r, bool first);
/* Is what is still to be done this rank's own affair? */
bool tly_stage_is_summed(const struct tly_local *l, const struct tly_round *r);
void tly_stage_close_window(struct tly_local *l, struct tly_local_op *op);
/* This rank's window and tensor are lent no more, and nobody is at them.  False: the job fails meanwhile. */
bool tly_stage_give_up(struct tly_local *l, const struct tly_round *r);

/* team.c */
/* All posts of a team's round are there.  False: they do not fit together. */
bool tly_team_begin(struct tly_local *l, struct tly_round *r);
/* Give a result to the others, or sum a piece; `before`: so many bytes wait to be sent before it or of it.  True:
 * something was done. */
bool tly_team_do(struct tly_local *l, struct tly_round *r, uint64_t before);
/* Give a result to the others.  False: not now, or never. */
bool tly_team_spread(struct tly_local *l, struct tly_round *r, struct tly_local_piece *piece);
/* This rank's buffers are lent no more, and nobody is at them.  False: the job fails meanwhile. */
bool tly_team_give_up(struct tly_local *l, const struct tly_round *r);

/* posts.c */
/* What was submitted goes into our ring, as far as there is room.  True: something was done. */
bool tly_posts_send(struct tly_local *l);
/* What the others have posted.  True: there was something. */
bool tly_posts_read(struct tly_local *l);
/* The round is worked on to its end: our operation ends well. */
void tly_posts_finish(struct tly_local *l, struct tly_round *r);
/* Our operation is the user's again; the round stays until all posts of it have come. */
struct tly_local_op *tly_posts_let_go(struct tly_local *l, struct tly_round *r);
void tly_posts_end(struct tly_local *l, struct tly_local_op *op, int err, const char *sentence);
/* The rank has joined and has not posted this, nor will it: zeros stand for it. */
static inline bool tly_posts_lacks(const struct tly_local *l, const struct tly_round *r, uint32_t rank)
{
    return l->joined && !r->posts[rank].kind && l->at[rank].joins > r->joins && !l->config.team;
}
/* The service ends it, or says what is wrong. */
void tly_posts_hand_back(struct tly_local *l, struct tly_local_op *op);

/* For alone.c: is there room for so many bytes in our ring; a post with its payload goes there, and the others are told;
 * how far another's ring has been read; what was posted, at this place of our ring, is waited for as others are. */
bool tly_posts_has_room(struct tly_local *l, uint64_t bytes);
void tly_posts_show(struct tly_local *l, const struct tly_local_op *op, const struct tly_post *p);
void tly_posts_say_read(struct tly_local *l, uint32_t rank);
void tly_posts_follow(struct tly_local *l, struct tly_local_op *op, const struct tly_post *p, uint64_t at);
/* Does nobody think of taking a post back, whose outcome we do not know?  Asked once all posts have been seen, before
 * anything is done with them; who takes one back first says so, then looks whether all are there. */
bool tly_posts_no_doubts(const struct tly_local *l);

/* alone.c */
enum tly_alone { TLY_ALONE_NOT, TLY_ALONE_ENDED, TLY_ALONE_POSTED };
/* Do a small sum or a barrier, if nothing else is under way: post it, and look for the others' posts for a moment.
 * NOT: nothing was done.  POSTED: `p` is in our ring, where l->tail was before; the others' posts have not all come, or
 * are of something else. */
enum tly_alone tly_alone_do(struct tly_local *l, const struct tly_local_op *op, struct tly_post *p);

/* local.c */
/* Let others have the core, if there are fewer of them than ranks or this has been called often. */
void tly_local_rest(const struct tly_local *l, unsigned spins);
/* A rank's number in the job. */
static inline uint32_t tly_local_number(const struct tly_local *l, uint32_t rank)
{
    return l->config.numbers[rank];
}
void tly_local_ring(struct tly_local *l, uint32_t rank, uint32_t whom);
void tly_local_tell(struct tly_local *l);
void tly_local_tell_one(struct tly_local *l, uint32_t rank);
void tly_local_tell_sleepers(struct tly_local *l);

/* The post at this place of a ring. */
static inline struct tly_post *tly_post_at(struct tly_control *c, uint64_t at)
{
    return (struct tly_post *)(c->ring + (at & (TLY_RING - 1)));
}

static inline bool tly_post_is_there(struct tly_neighbour *n, uint64_t at)
{
    return atomic_load_explicit(&tly_post_at(n->control, at)->there, memory_order_acquire);
}

static inline bool tly_work_finished(const struct tly_round *r)
{
    if (r->windowed)
        return r->copied == r->parts;
    uint64_t v = atomic_load_explicit(&r->work->done, memory_order_acquire);
    return (uint32_t)(v >> 32) != r->gen || (uint32_t)v >= r->parts;
}

#endif
