/* sort.h - sort a few figures in place, the least first. */
#ifndef TLY_SORT_H
#define TLY_SORT_H

#include <stddef.h>

/* None of them is NAN.  Gauges take medians of 24 samples or fewer at each step: these are sorted by insertion. */
void tly_sort(double *figure, size_t count);

#endif
