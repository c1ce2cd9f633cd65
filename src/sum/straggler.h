/* straggler.h - which rank keeps the others waiting, step after step, and why: it computes longer, or its
 * network is slow. Pure bookkeeping; times are given. */
#ifndef TLY_STRAGGLER_H
#define TLY_STRAGGLER_H

#include <stdbool.h>
#include <stdint.h>

/* What a service knows of one rank.  ns. */
struct tly_pace {
    bool here;            /* on the service's own machine: no network between */
    int64_t coming_since; /* a push is under way; 0: none */
    int64_t busy;         /* in all: how long pushes were under way */
    int64_t busy_before;  /* as it was when the step began */
    int64_t late;     /* in this step: most that a push began after the first rank's, idle all the while */
    int64_t answered; /* when it had received the last answer of an earlier step */
    uint32_t late_steps, slow_steps; /* of this window */
    double late_share, slow_share;   /* summed over those, of the step */
};

/* Owner: the service's loop. */
struct tly_straggler {
    uint32_t ranks;
    struct tly_pace *pace; /* owned */
    int64_t *sorted;       /* owned: room for a median */
    uint64_t key;          /* of the tensor whose part marks steps; */
    uint32_t part;
    bool marked;
    int64_t began, length; /* of the step; of the last one */
    uint32_t steps;        /* in this window */
    int64_t window_began;
};

struct tly_finding {
    uint32_t rank, count, steps; /* late in `count` of `steps` steps */
    bool network;                /* else it computes */
    double share;                /* of the step that it was late by, on average */
    double step_s;
};

/* -ENOMEM. */
int tly_straggler_init(struct tly_straggler *w, uint32_t ranks);
void tly_straggler_finish(struct tly_straggler *w);

/* The split has changed: the part whose rounds tell steps apart may come here no more, so begin anew with the next one. */
void tly_straggler_begin_anew(struct tly_straggler *w);

/* The first push of a round has begun.  True: this ended a step, and somebody is to be named. */
bool tly_straggler_opened(struct tly_straggler *w, uint64_t key, uint32_t part, int64_t now,
                          struct tly_finding *out);

/* How long pushes of a rank have been under way in all. */
int64_t tly_straggler_busy(const struct tly_straggler *w, uint32_t rank, int64_t now);

/* A rank's push has begun, of a round that was opened then, when the rank's pushes had been under way for `busy`.
 * prompt: it had not waited for others of its own, its network or its credit. */
void tly_straggler_began(struct tly_straggler *w, uint32_t rank, int64_t opened, int64_t busy, bool prompt,
                         int64_t now);
void tly_straggler_ended(struct tly_straggler *w, uint32_t rank, int64_t now);

/* A rank has received the answer of a round that was opened then. */
void tly_straggler_answered(struct tly_straggler *w, uint32_t rank, int64_t opened, int64_t now);

#endif
