/* shared.h - ranks of a job that add to shared tensors of int64, whose sums the tests know. */
#ifndef SHARED_H
#define SHARED_H

#include <stddef.h>
#include <stdint.h>

#include "tally/tally.h"

/* Await the operation and free it: its values. */
const int64_t *shared_values_of(tally_op *op);
void shared_create(tally_comm *c, const char *name, const void *values, size_t count, enum tally_dtype dtype,
                   uint32_t staleness);
const int64_t *shared_add(tally_comm *c, const char *name, const void *difference);
const int64_t *shared_read(tally_comm *c, const char *name);
/* What a rank adds to element i in each step; all of that, and the values at first, owned. */
int64_t shared_difference(int rank, int i);
int64_t *shared_differences(int rank, int count);
int64_t *shared_first(int count);
/* The values once all ranks have made all their steps. */
void shared_check(const int64_t *values, int ranks, int count, int steps);
/* End one of this process's connections to services, as a network may.  Each connection has a few losses. */
void shared_lose_a_connection(uint64_t *random);

#endif
