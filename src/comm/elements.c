/* elements.c - the calls of tally.h about elements of memory, for which no communicator is needed. */
#include <errno.h>

#include "base/error.h"
#include "reduce/reduce.h"
#include "tally/tally.h"

size_t tally_dtype_size(enum tally_dtype dtype)
{
    return tly_reduce_element_size((int)dtype);
}

int tally_add_norms(const float *a, const float *b, float *sum, size_t count, size_t chunk, float *norms)
{
    if (!chunk)
        return tly_fail(EINVAL, "chunk is 0: pass the elements of a chunk");
    if (count && (!a || !b || !sum || !norms))
        return tly_fail(EINVAL, "a NULL pointer for %zu elements: pass the address of their memory", count);
    tly_reduce_add_norms(a, b, sum, count, chunk, norms);
    return 0;
}
