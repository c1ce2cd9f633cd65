/* state.h - how a communicator stands (state.c; what others call is in comm.h).
 *
 * Any thread reads `err`, and the sentence once `err` is set.  Owner of all else: the loop, or fixed
 * once open. */
#ifndef TLY_COMM_STATE_H
#define TLY_COMM_STATE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/event.h"
#include "tally/tally.h"

/* The process that opened the communicator, and the time. */
struct tly_origin {
    unsigned generation; /* of forks */
    int opener;          /* pid */
    int64_t opened_at;   /* 0: it is being opened */
    uint64_t cpu_before; /* ns that Tally's threads of this process had cost when it began to open */
};

struct tly_failure {
    atomic_int err; /* positive; 0: all is well.  Set (release) after the sentence */
    char sentence[TLY_SENTENCE];
    void (*follows)(tally_comm *c, int err); /* comm.c: tell others, end connections and operations */
    int64_t doom_at; /* awake clock: a loss fails us then, if nobody explains it better; 0: there is none */
    char doom[TLY_SENTENCE];
};

/* This rank's end.  Owner: the loop; any thread waits for the events. */
struct tly_leaving {
    bool draining;         /* `idle` is wanted */
    bool goodbye_said;     /* by this rank */
    struct tly_event idle; /* nothing is under way any more, or all has failed */
    struct tly_event left; /* all ranks have said goodbye, or all has failed */
};

#endif
