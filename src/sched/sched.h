/* sched.h - the scheduling core: which task starts next, by priority, as far as credit and windows last.
 *
 * This is the Core of ByteScheduler (SOSP 2019, Algorithm 1):
 *
 *   CommTask, SubCommTask   struct tly_task: a part of a tensor, or any other communication of so many bytes
 *   READY, enqueue          tly_sched_ready
 *   SCHEDULE, start         tly_sched_run, which calls each task's `start`
 *   FINISH, notify_finish   tly_sched_finish
 *   credit                  `credit` less `in_flight`, in bytes
 *
 * The paper's tasks go to one network.  Here each destination has a queue of its own, with a window: the bytes that it
 * accepts for now.  A task whose window is full is passed over, and the next one goes.  The credit is one for all queues.
 *
 * The core does no I/O, takes no lock and knows no clock.  A scheduler, its queues and their tasks belong to one thread,
 * or to the holder of one lock; `start` runs there, too.  Tasks of different users may share a scheduler. */
#ifndef TLY_SCHED_H
#define TLY_SCHED_H

#include <stdbool.h>
#include <stdint.h>

#include "base/heap.h"
#include "base/list.h"

/* Owned by its user, who keeps it in place until it has started or has been taken out. */
struct tly_task {
    struct tly_rank_order order; /* priority; among equals, lower sequence first */
    uint64_t bytes;              /* taken of its queue's window */
    uint64_t charge;             /* bytes taken of the credit */
    uint64_t credit;             /* most bytes in flight with it, or more (`largest`); 0: the scheduler's */
    bool eager;                  /* has the whole credit at once (`opened`) */
    /* The task goes now.  It may call all functions below but tly_sched_run. */
    void (*start)(struct tly_task *task);
};

/* The tasks for one destination. */
struct tly_sched_queue {
    struct tly_sched *sched; /* borrowed */
    struct tly_list node;    /* sched->queues */
    struct tly_heap waiting; /* of tasks */
    uint64_t pushed;         /* bytes of all started tasks since the window was opened */
    uint64_t granted;        /* of these, the destination accepts so many in all; 0: closed */
    uint64_t in_flight;      /* its share of sched->in_flight */
    /* The largest credit of a task since nothing waited here.  While something waits here all tasks have it.  If a more urgent
     * task with less waited until so little is in flight, some links would idle while others still carried the rest. */
    uint64_t largest;
};

struct tly_sched {
    struct tly_list queues;
    uint64_t credit; /* most bytes in flight, for tasks without a credit of their own, which may be larger */
    uint64_t in_flight; /* bytes started and not finished */
    /* Bytes of the credit that are open; 0: the next task begins a burst.  A burst opens with a quarter, and each finished
     * byte opens another one.  So all destinations get their first tasks soon.  The last task of what is open may reach
     * beyond it.  A burst ends when nothing is in flight and nothing waits. */
    uint64_t opened;
    bool shut; /* at the end of the last run some task waited for its window */
};

void tly_sched_init(struct tly_sched *s, uint64_t credit);
/* Another credit holds from now on.  Waiting tasks lose their own, but for larger ones, which their bytes may need. */
void tly_sched_set_credit(struct tly_sched *s, uint64_t credit);

/* A queue begins with a closed window. */
void tly_sched_add(struct tly_sched *s, struct tly_sched_queue *q);
/* Close and forget it, with the tasks that wait in it.  Also harmless on one that is all zero. */
void tly_sched_remove(struct tly_sched_queue *q);

/* The destination accepts bytes from now on, `granted` at first; UINT64_MAX: it has no window. */
void tly_sched_open(struct tly_sched_queue *q, uint64_t granted);
/* It accepts `granted` bytes in all.  Never fewer than before. */
void tly_sched_grant(struct tly_sched_queue *q, uint64_t granted);
/* The destination is gone, and all that was in flight there: none of that may be finished or retracted any more.  Waiting
 * tasks stay. */
void tly_sched_close(struct tly_sched_queue *q);

/* The task waits for its turn.  -ENOMEM. */
int tly_sched_ready(struct tly_sched_queue *q, struct tly_task *t);
static inline bool tly_sched_waits(const struct tly_sched_queue *q)
{
    return q->waiting.count > 0;
}
/* Take out each waiting task for which `drop` is true. */
void tly_sched_drop(struct tly_sched_queue *q, bool (*drop)(struct tly_task *t, void *user), void *user);
/* Start all that may start. */
void tly_sched_run(struct tly_sched *s);
/* The destination has taken `bytes` of what was started: a task's whole charge, or any part of it. */
void tly_sched_finish(struct tly_sched_queue *q, uint64_t bytes);
/* A started task goes no further.  Of its charge `sent` bytes are still to be finished; 0: the destination has never heard
 * of it, and so its window is given back, too. */
void tly_sched_retract(struct tly_sched_queue *q, const struct tly_task *t, uint64_t sent);

#endif
