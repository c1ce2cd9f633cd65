/* later.h - stages for tests (comm/path/stage.h): each works in a thread of its own, is done with parts in another order than
 * they came in, waits and fails on request, and one of them halves what goes over the network. */
#ifndef LATER_H
#define LATER_H

#include <pthread.h>
#include <stdatomic.h>

#include "comm/path/stage.h"

enum { LATER_LEAST = 1 << 14 }; /* bytes of a tensor from which on the stages suit: int64 push_pulls */

/* What a stage leaves undone meanwhile: nothing, all, each first part on its way out, all others on their way out. */
enum later_hold { LATER_NONE, LATER_ALL, LATER_FIRST, LATER_OTHERS };

struct later {
    enum tly_stage_place place;
    bool narrows; /* int64 to int32 on the way out; else a copy */
    /* requests; -1: none */
    atomic_int fail_begin, fail_out, fail_in; /* the n-th operation from now on; part of it */
    atomic_int held;                          /* enum later_hold */
    atomic_bool suits_all;                    /* int64 of any operation and length */
    /* what it has done */
    atomic_int out, in, disordered, begun, ended, changed, recut;
    /* its own */
    pthread_mutex_t lock; /* guards the rest */
    pthread_cond_t more, idle;
    struct job_item *items;
    size_t count, room;
    _Atomic(struct tally_op *) busy; /* the thread is at this one's memory */
    uint32_t last;
    bool started;
};

/* One at the place before the team, which may fail, and one behind it, which narrows. */
extern struct later later_device, later_codec;

/* In a rank, before it opens its communicator: put these in. */
void later_use(bool device, bool codec);
void later_hold(struct later *l, enum later_hold what);

#endif
