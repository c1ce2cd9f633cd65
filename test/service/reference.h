/* reference.h - what an operation must give, bit for bit: a scalar reference written from the contract alone, one
 * element at a time, that shares nothing with the library's kernels. */
#ifndef REFERENCE_H
#define REFERENCE_H

#include <stddef.h>
#include <stdint.h>

struct reference {
    int dtype, reduction; /* of tally.h */
    int ranks;
    double prescale, postscale;
    /* How sums are nested: group[i] is the group of rank i (numbered from 0 in the order of their lowest ranks);
     * one group: the tree over all ranks. */
    int groups;
    const int *group;
};

enum { REFERENCE_DTYPES = 15 };
size_t reference_element(int dtype);
/* out[i] for i < count, of inputs[rank][i]. */
void reference_reduce(const struct reference *r, const void *const inputs[], void *out, size_t count);

#endif
