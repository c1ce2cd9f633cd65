/* spec.h - what ranks compare of an operation, and call it (spec.c).
 *
 * Owner: the submitting thread, until the operation is in the inbox; then it does not change. */
#ifndef TLY_COMM_SPEC_H
#define TLY_COMM_SPEC_H

#include <stdbool.h>
#include <stdint.h>

#include "tally/tally.h"

struct tally_op;
struct tly_ranges;
struct tly_request;

enum { TLY_FEW_DIMS = 4 }; /* a tensor rarely has more */

/* The part of an operation that ranks compare, beside its kind, dtype, reduction, root and count. */
struct tly_spec {
    uint64_t hash, digest;
    double prescale, postscale;
    bool uneven; /* ranks may differ in their first dimension */
    uint32_t ndim;
    int64_t *shape; /* owned, or few_dims */
    int64_t few_dims[TLY_FEW_DIMS];
    char *note; /* owned: the caller's, or NULL */
};

/* A tensor's last operation, as ranks compared it, without the name.  Owner: names.lock. */
struct tly_spec_before {
    uint64_t count, digest, list;
    double prescale, postscale;
    int64_t shape[TLY_FEW_DIMS];
    uint32_t kind, dtype, reduction, root, ndim, even;
    uint64_t hash; /* of that and the name; 0: none */
};

static inline uint64_t tly_spec_hash(const struct tly_spec *s)
{
    return s->hash;
}

/* The digest of a list that ranks compare beside the tensor; or 0. */
static inline uint64_t tly_spec_digest(const struct tly_spec *s)
{
    return s->digest;
}

static inline double tly_spec_prescale(const struct tly_spec *s)
{
    return s->prescale;
}

static inline double tly_spec_postscale(const struct tly_spec *s)
{
    return s->postscale;
}

static inline uint32_t tly_spec_dims(const struct tly_spec *s)
{
    return s->ndim;
}

static inline const int64_t *tly_spec_shape(const struct tly_spec *s)
{
    return s->shape;
}

static inline int64_t tly_spec_dim(const struct tly_spec *s, uint32_t i)
{
    return s->shape[i];
}

/* 1, if it has none. */
static inline int64_t tly_spec_first_dim(const struct tly_spec *s)
{
    return s->ndim ? s->shape[0] : 1;
}

/* spec.c */
/* Take the specification from the caller's request and options.  -ENOMEM. */
int tly_spec_take(struct tally_op *op, const struct tly_request *r, const struct tally_options *o);
/* For a rank that stands in: take the specification of the rank that has submitted the operation. */
void tly_spec_copy(struct tly_spec *s, uint64_t hash, double prescale, double postscale, uint64_t count);
/* Its hash, once it has a name; names.lock held. */
void tly_spec_seal(struct tally_op *op);
void tly_spec_finish(struct tly_spec *s);
/* Where in the caller's buffer its elements lie; NULL: in one piece. */
const struct tly_ranges *tly_spec_ranges(const struct tally_op *op);
/* The length of the caller's buffer as far as its elements lie in it, in bytes. */
uint64_t tly_spec_span(const struct tally_op *op);

#endif
