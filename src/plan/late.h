/* late.h - which rank keeps the others waiting by itself, and why, found from how much of its steps each rank takes.
 *
 * All ranks' steps take equally long, for each waits for the slowest.  The one that takes the largest part of them for itself
 * keeps the others waiting.  Pure functions, no I/O; nothing here knows the time. */
#ifndef TLY_LATE_H
#define TLY_LATE_H

#include <stdint.h>

enum {
    TLY_LATE_SAMPLES = 24, /* that count */
    TLY_LATE_ENOUGH = 12   /* of each rank, before anybody is named */
};

/* A rank's steps in one period: from the end of a flight to that of the next one. */
struct tly_steps {
    uint32_t count;
    uint64_t own_us;    /* of them: from the end of a flight to the last submission of the next one, */
    uint64_t waited_us; /* of that without a processor, */
    uint64_t paged_us;  /* and of the rest with memory that came from a disk */
    uint64_t us;
};

/* A rank's figures: parts of its steps, and the length of a step. */
enum tly_own_figure { TLY_OWN_SHARE, TLY_OWN_WAITED, TLY_OWN_PAGED, TLY_OWN_STEP_S, TLY_OWN_FIGURES };

/* What is known of one rank: a sliding window of samples. */
struct tly_own {
    uint32_t count;
    double ring[TLY_OWN_FIGURES][TLY_LATE_SAMPLES];
};

enum tly_late_why { TLY_LATE_COMPUTES, TLY_LATE_WAITS, TLY_LATE_PAGES };

struct tly_lateness {
    int rank;
    enum tly_late_why why;
    double share;  /* of the time, that the others wait for it */
    double step_s; /* length of a step */
};

/* Can a period be like this?  One without steps is none. */
int tly_steps_check(const struct tly_steps *s);
/* A period of the rank; one that cannot be is no sample. */
void tly_own_see(struct tly_own *o, const struct tly_steps *s);

/* The rank that takes longer than the lower median of the ranks, by a tenth of the step and 1 ms, and what most of that is.
 * `of` has NULL for ranks that have left.  named: what was found before, which must be better by more before it is not; NULL:
 * nothing.  Returns 1; 0: there is none; -1: too little is known.  *out is untouched then. */
int tly_late_find(int count, const struct tly_own *const *of, const struct tly_lateness *named,
                  struct tly_lateness *out);

#endif
