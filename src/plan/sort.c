/* sort.c - a few figures by insertion, many by qsort. */
#include <stdlib.h>

#include "plan/sort.h"

enum { FEW = 32 };

static int sort_by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void tly_sort(double *figure, size_t count)
{
    if (count > FEW) {
        qsort(figure, count, sizeof *figure, sort_by_value);
        return;
    }
    for (size_t i = 1; i < count; i++) {
        double x = figure[i];
        size_t at = i;
        for (; at > 0 && figure[at - 1] > x; at--)
            figure[at] = figure[at - 1];
        figure[at] = x;
    }
}
