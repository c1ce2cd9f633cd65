/* wait.c - the threads that drive until something has happened: a caller that waits, the close, and "tally-local".
 *
 * A caller spins for SPIN_US and drives meanwhile.  Then it sleeps on the rank's bell.  "tally-local" sleeps on the same
 * bell and drives while no caller spins.
 *
 * None of them holds the engine's lock when it calls in here. */
#include "base/clock.h"
#include "local/drive.h"
#include "topo/topo.h"

enum {
    SPIN_US = 40,  /* before a waiter sleeps */
    SPINS = 64,    /* between looks at the clock */
    NAP_MS = 1000, /* longest sleep: nothing depends on it */
    DRAIN_MS = 5,  /* at the close, where the thread sleeps on the same bell */
    BLINK_MS = 1,  /* of who could not look, as another thread did: that one may have looked too early */
};

bool tly_local_wait(struct tly_local *l, struct tly_local_op *op, struct tly_event *done, int64_t deadline)
{
    const struct tly_errand mine = {.done = done, .deadline = deadline};
    int64_t since = 0;
    unsigned spins = 0;
    bool diverted = false, late = false, looked;
    if (op->alone && atomic_load(&l->in_flight) == 1)
        atomic_store_explicit(&l->prompt, true, memory_order_relaxed);
    atomic_fetch_add(&l->inside, 1);
    atomic_fetch_add(&l->spinning, 1);
    tly_local_set_wanted(l);
    while (!tly_event_is_set(done) && !late &&
           !(diverted = atomic_load_explicit(&op->diverted, memory_order_acquire)) &&
           !atomic_load_explicit(&l->failed, memory_order_relaxed)) {
        if (tly_drive_try(l, &mine, &looked)) {
            spins = 0;
            late = tly_drive_is_past(deadline);
            continue;
        }
        tly_local_rest(l, ++spins);
        if (spins % SPINS)
            continue;
        int64_t now = tly_now();
        since = spins == SPINS ? now : since;
        late = deadline >= 0 && now >= deadline;
        if (now - since < SPIN_US * 1000 || late)
            continue;
        atomic_fetch_add(&l->sleeping, 1);
        atomic_fetch_sub(&l->spinning, 1);
        tly_local_set_wanted(l);
        uint32_t bell = atomic_load(&l->own->bell);
        if (!tly_drive_try(l, &mine, &looked) && !tly_drive_has_news(l) && !tly_event_is_set(done) &&
            !atomic_load_explicit(&op->diverted, memory_order_acquire) && !atomic_load(&l->failed))
            tly_local_sleep(l, bell, TLY_WAKE_WAITERS, looked ? NAP_MS : BLINK_MS, deadline);
        atomic_fetch_sub(&l->sleeping, 1);
        atomic_fetch_add(&l->spinning, 1);
        tly_local_set_wanted(l);
        spins = 0;
        late = tly_drive_is_past(deadline); /* a caller that waits in slices need not spin behind each */
    }
    atomic_fetch_sub(&l->spinning, 1);
    tly_local_set_wanted(l);
    tly_drive_hand_on(l);
    diverted |= !tly_event_is_set(done) && !late; /* failed: whoever ends it sets the event */
    atomic_fetch_sub(&l->inside, 1);
    return !diverted;
}

/* A team's rank that joins counts as an operation (tly_local_join). */
static bool wait_for_more(struct tly_local *l)
{
    return atomic_load(&l->in_flight) > (atomic_load(&l->joining) && l->config.team);
}

void tly_local_drain(struct tly_local *l, int64_t deadline)
{
    static const struct tly_errand all = {0};
    while (wait_for_more(l) && tly_now() < deadline && !atomic_load(&l->failed)) {
        uint32_t bell = atomic_load(&l->own->bell);
        tly_local_set_wanted(l);
        bool looked;
        if (!tly_drive_try(l, &all, &looked) && wait_for_more(l))
            tly_local_sleep(l, bell, TLY_WAKE_THREAD, DRAIN_MS, deadline);
    }
}

void *tly_drive_thread(void *arg)
{
    static const struct tly_errand all = {0};
    struct tly_local *l = arg;
    tly_topo_place(l->home, 0);
    while (!atomic_load(&l->stopping)) {
        uint32_t bell = atomic_load(&l->own->bell);
        bool looked = true; /* while others spin, they look */
        if (!atomic_load(&l->spinning))
            tly_drive_try(l, &all, &looked);
        if (!atomic_load(&l->stopping))
            tly_local_sleep(l, bell, TLY_WAKE_THREAD, looked ? NAP_MS : BLINK_MS, -1);
    }
    return NULL;
}
