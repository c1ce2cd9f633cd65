/* quota.h - one pool for several jobs, of which each has reserved some.
 *
 * A job's claim is what it has reserved, or what it uses if that is more.  The claims of all jobs stay within the pool's
 * limit, so what a job has reserved is always there for it, whatever the others do with the rest. */
#ifndef TLY_QUOTA_H
#define TLY_QUOTA_H

#include "sum/pool.h"

/* Owner: the house's loop. */
struct tly_budget {
    struct tly_pool pool; /* its limit: what the budget leaves, or what is reserved if that is more */
    uint64_t limit;       /* bytes */
    uint64_t elsewhere;   /* of these: what connections hold */
    uint64_t reserved;    /* by all quotas */
    uint64_t claimed;     /* the sum of their claims */
};

/* One job's.  Owner: the house's loop. */
struct tly_quota {
    struct tly_budget *budget; /* borrowed */
    uint64_t reserved, in_use, peak;
};

void tly_budget_init(struct tly_budget *b, uint64_t limit);
/* May so many bytes more be held elsewhere?  All that is held so is a quarter of the budget at most, beside what jobs claim. */
bool tly_budget_spares(const struct tly_budget *b, uint64_t bytes);
/* So many bytes are held elsewhere from now on, more (or less) than before. */
void tly_budget_hold(struct tly_budget *b, int64_t more);
/* With nothing reserved. */
void tly_quota_init(struct tly_quota *q, struct tly_budget *budget);
/* The quota is no more; nothing may be in use.  NULL budgets are accepted. */
void tly_quota_finish(struct tly_quota *q);
/* Have so many bytes reserved from now on.  True: the budget is too low for all that is reserved, and the pool's limit is
 * that as long as it is reserved.  Others may use
 * so much that claims pass the limit (tly_quota_over()): until they have given it back they get nothing more. */
bool tly_quota_reserve(struct tly_quota *q, uint64_t bytes);
/* Is this quota in use beyond what it has reserved, while all claims are past the limit? */
bool tly_quota_over(const struct tly_quota *q);
/* Bytes that may be taken now. */
uint64_t tly_quota_room(const struct tly_quota *q);
/* Bytes that this quota may have in all, if the others' claims stay as they are. */
uint64_t tly_quota_most(const struct tly_quota *q);

/* NULL: there is no room, or the system has no memory. */
void *tly_quota_take(struct tly_quota *q, uint32_t bytes);
/* The same past the limit. */
void *tly_quota_take_always(struct tly_quota *q, uint32_t bytes);
void tly_quota_give(struct tly_quota *q, void *buffer, uint32_t bytes);

#endif
