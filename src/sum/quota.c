/* quota.c - see quota.h. */
#include "sum/quota.h"

#include "base/slot.h"

static uint64_t quota_claim(const struct tly_quota *q)
{
    return q->in_use > q->reserved ? q->in_use : q->reserved;
}

static void budget_bound(struct tly_budget *b)
{
    uint64_t left = b->limit > b->elsewhere ? b->limit - b->elsewhere : 0;
    b->pool.limit = b->reserved > left ? b->reserved : left;
}

/* Set what is reserved and in use, and keep the sum of claims. */
static void quota_change(struct tly_quota *q, uint64_t reserved, uint64_t in_use)
{
    uint64_t before = quota_claim(q);
    struct tly_budget *b = q->budget;
    b->reserved = b->reserved - q->reserved + reserved;
    budget_bound(b);
    q->reserved = reserved;
    q->in_use = in_use;
    b->claimed = b->claimed - before + quota_claim(q);
    if (in_use > q->peak)
        q->peak = in_use;
}

void tly_budget_init(struct tly_budget *b, uint64_t limit)
{
    *b = (struct tly_budget){.pool = {.limit = limit}, .limit = limit};
}

bool tly_budget_spares(const struct tly_budget *b, uint64_t bytes)
{
    uint64_t held = b->elsewhere + bytes;
    return held <= b->limit / 4 && held + b->claimed <= b->limit;
}

void tly_budget_hold(struct tly_budget *b, int64_t more)
{
    b->elsewhere += (uint64_t)more;
    budget_bound(b);
}

void tly_quota_init(struct tly_quota *q, struct tly_budget *budget)
{
    *q = (struct tly_quota){.budget = budget};
}

void tly_quota_finish(struct tly_quota *q)
{
    if (q->budget)
        quota_change(q, 0, 0);
}

bool tly_quota_reserve(struct tly_quota *q, uint64_t bytes)
{
    uint64_t before = q->budget->pool.limit;
    quota_change(q, bytes, q->in_use);
    return q->budget->pool.limit > before;
}

bool tly_quota_over(const struct tly_quota *q)
{
    return q->budget->claimed > q->budget->pool.limit && q->in_use > q->reserved;
}

uint64_t tly_quota_room(const struct tly_quota *q)
{
    const struct tly_budget *b = q->budget;
    uint64_t own = quota_claim(q) - q->in_use;
    return own + (b->pool.limit > b->claimed ? b->pool.limit - b->claimed : 0);
}

uint64_t tly_quota_most(const struct tly_quota *q)
{
    uint64_t others = q->budget->claimed - quota_claim(q), limit = q->budget->pool.limit;
    return limit > others ? limit - others : 0;
}

void *tly_quota_take(struct tly_quota *q, uint32_t bytes)
{
    return tly_slot_bytes(bytes) > tly_quota_room(q) ? NULL : tly_quota_take_always(q, bytes);
}

void *tly_quota_take_always(struct tly_quota *q, uint32_t bytes)
{
    void *buffer = tly_pool_take_past(&q->budget->pool, bytes);
    if (buffer)
        quota_change(q, q->reserved, q->in_use + tly_slot_bytes(bytes));
    return buffer;
}

void tly_quota_give(struct tly_quota *q, void *buffer, uint32_t bytes)
{
    if (!buffer)
        return;
    tly_pool_give(&q->budget->pool, buffer, bytes);
    quota_change(q, q->reserved, q->in_use - tly_slot_bytes(bytes));
}
