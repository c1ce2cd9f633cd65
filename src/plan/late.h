/* late.h - which rank computes longer than the others, found from how much of its steps each rank computes.
 *
 * All ranks' steps take equally long, for each waits for the slowest.  The one that computes for the largest part of
 * them keeps the others waiting.  Pure functions, no I/O; nothing here knows the time. */
#ifndef TLY_LATE_H
#define TLY_LATE_H

#include <stdint.h>

enum {
    TLY_LATE_SAMPLES = 24, /* that count */
    TLY_LATE_ENOUGH = 12   /* of each rank, before anybody is named */
};

/* What is known of one rank: a sliding window of samples. */
struct tly_own {
    uint32_t count;
    double share[TLY_LATE_SAMPLES];  /* ring: of its steps, that it computed */
    double step_s[TLY_LATE_SAMPLES]; /* ring: length of a step */
};

struct tly_lateness {
    int rank;
    double share;  /* of the time, that the others wait for it */
    double step_s; /* length of a step */
};

/* So many steps took us in all, of which the rank computed own_us.  No steps, or more than there was, is no sample. */
void tly_own_see(struct tly_own *o, uint32_t steps, uint64_t own_us, uint64_t us);

/* The rank that computes longer than the lower median of the ranks, by a tenth of the step and 1 ms.  `of` has NULL for
 * ranks that have left.  named: the rank that was found before, which must be better by more before it is not, or -1.
 * Returns 1; 0: there is none; -1: too little is known.  *out is untouched then. */
int tly_late_find(int count, const struct tly_own *const *of, int named, struct tly_lateness *out);

#endif
