/* crew.h - threads that sum, so that the service's loop can go on with the network.  Small sums are not worth
 * the hand-over and stay in the loop. */
#ifndef TLY_CREW_H
#define TLY_CREW_H

#include <pthread.h>
#include <stdbool.h>

#include "base/list.h"
#include "base/loop.h"

/* Work for one thread: `work` runs there, `done` afterwards in the loop. */
struct tly_crew_task {
    struct tly_list node;
    void (*work)(struct tly_crew_task *t);
    void (*done)(struct tly_crew_task *t);
};

struct tly_crew {
    struct tly_loop *loop; /* borrowed */
    struct tly_hook hook;
    int threads;
    pthread_t *thread;    /* owned array */
    pthread_mutex_t lock; /* guards the rest */
    pthread_cond_t more;
    struct tly_list todo, finished;
    struct tly_crew_task **running; /* owned array: of each thread; NULL: none */
    pthread_cond_t ended;           /* a task, while somebody waits for that */
    bool stop, awaited;
};

/* threads may be 0: then nothing is started and nothing may be posted.  home: the NUMA node of the memory that is
 * to be summed, as in tly_topo_place(). */
int tly_crew_start(struct tly_crew *c, struct tly_loop *loop, int threads, int home);
/* Ends the threads; tasks not begun are dropped. */
void tly_crew_stop(struct tly_crew *c);
/* In the loop.  Forget the tasks for which `is` holds: what runs of them is waited for, and their done() does not come. */
void tly_crew_cancel(struct tly_crew *c, bool (*is)(const struct tly_crew_task *t, const void *arg),
                     const void *arg);
/* In the loop. */
void tly_crew_post(struct tly_crew *c, struct tly_crew_task *t);

#endif
