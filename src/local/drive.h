/* drive.h - driving the engine: who may, how far, and the thread that does when nobody else does. */
#ifndef TLY_LOCAL_DRIVE_H
#define TLY_LOCAL_DRIVE_H

#include "base/clock.h"
#include "base/event.h"
#include "local/engine.h"

/* How far one may go. */
struct tly_errand {
    uint64_t light;               /* submission: it does operations of up to so many bytes; 0: all */
    const struct tly_event *done; /* a waiter: until its own is done; NULL: until somebody else looks */
    int64_t deadline;             /* of a waiter; negative: never */
};

static inline bool tly_drive_is_past(int64_t deadline)
{
    return deadline >= 0 && tly_now() >= deadline;
}

/* --- drive.c --- */

/* Has any rank posted what we have not read, or asked for a block, or does something lie in the inbox? */
bool tly_drive_has_news(struct tly_local *l);
/* Do what there is, under the engine's lock, until nothing more can be done or the errand is called off.  True: something
 * was done. */
bool tly_drive_advance(struct tly_local *l, const struct tly_errand *e);
/* The same, if the lock is free.  *looked: this thread itself has seen all that there is. */
bool tly_drive_try(struct tly_local *l, const struct tly_errand *e, bool *looked);
/* This thread looks no more: wake "tally-local" if nobody else looks and there is something to do. */
void tly_drive_hand_on(struct tly_local *l);
/* Look for the others' posts for a moment more, under the engine's lock; `eager`: the operation's data travel in them. */
void tly_drive_linger(struct tly_local *l, const struct tly_errand *e, bool eager);

/* --- wait.c --- */

/* The thread "tally-local", until `stopping`.  `local`: a struct tly_local. */
void *tly_drive_thread(void *local);

#endif
