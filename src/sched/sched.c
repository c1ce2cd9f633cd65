/* sched.c - the scheduling core: a heap of tasks for each destination, one credit for all (see sched.h).
 *
 * Over all queues the best task with window goes, once credit lasts for it.  Nothing else overtakes it meanwhile, so all
 * ranks with the same tasks start them in one order, and no large task starves. */
#include "sched/sched.h"

void tly_sched_init(struct tly_sched *s, uint64_t credit)
{
    *s = (struct tly_sched){.credit = credit};
    tly_list_init(&s->queues);
}

static struct tly_sched_queue *sched_queue_of(struct tly_list *node)
{
    return tly_list_entry(node, struct tly_sched_queue, node);
}

static uint64_t sched_credit_of(const struct tly_sched *s, const struct tly_task *t)
{
    return t->credit ? t->credit : s->credit;
}

void tly_sched_set_credit(struct tly_sched *s, uint64_t credit)
{
    s->credit = credit;
    for (struct tly_list *n = s->queues.next; n != &s->queues; n = n->next) {
        struct tly_sched_queue *q = sched_queue_of(n);
        q->largest = credit;
        for (size_t i = 0; i < q->waiting.count; i++) {
            struct tly_task *t = q->waiting.items[i].value;
            t->credit = t->credit > credit ? t->credit : 0;
            q->largest = t->credit > q->largest ? t->credit : q->largest;
        }
    }
}

void tly_sched_add(struct tly_sched *s, struct tly_sched_queue *q)
{
    *q = (struct tly_sched_queue){.sched = s};
    tly_list_append(&s->queues, &q->node);
}

void tly_sched_remove(struct tly_sched_queue *q)
{
    if (!q->sched)
        return;
    tly_sched_close(q);
    tly_list_remove(&q->node);
    tly_heap_finish(&q->waiting);
    *q = (struct tly_sched_queue){0};
}

static bool sched_has_window(const struct tly_sched_queue *q, const struct tly_task *t)
{
    return q->pushed + t->bytes <= q->granted;
}

static bool sched_is_idle(const struct tly_sched *s)
{
    bool idle = !s->in_flight;
    for (struct tly_list *n = s->queues.next; n != &s->queues && idle; n = n->next)
        idle = !tly_sched_waits(sched_queue_of(n));
    return idle;
}

int tly_sched_ready(struct tly_sched_queue *q, struct tly_task *t)
{
    uint64_t credit = sched_credit_of(q->sched, t);
    if (sched_is_idle(q->sched))
        q->sched->opened = 0;
    if (!tly_sched_waits(q) || credit > q->largest)
        q->largest = credit;
    return tly_heap_push(&q->waiting, t->order, t);
}

static uint64_t sched_largest_credit(const struct tly_sched *s)
{
    uint64_t largest = 0;
    for (struct tly_list *n = s->queues.next; n != &s->queues; n = n->next) {
        const struct tly_sched_queue *q = sched_queue_of(n);
        if (tly_sched_waits(q) && q->largest > largest)
            largest = q->largest;
    }
    return largest;
}

/* A task larger than the credit goes alone.  The last task of what is open may reach beyond it: else a few bytes in flight
 * would hold back a task of a quarter of the credit. */
static bool sched_has_credit(const struct tly_sched *s, const struct tly_task *t, uint64_t credit)
{
    bool opens = !t->eager && s->opened < credit;
    return !s->in_flight || (s->in_flight + t->charge <= credit && (!opens || s->in_flight < s->opened));
}

/* The queue of the best task with window, or NULL.  shut: some task has none. */
static struct tly_sched_queue *sched_choose(const struct tly_sched *s, bool *shut)
{
    struct tly_sched_queue *best = NULL;
    const struct tly_heap_item *first = NULL;
    *shut = false;
    for (struct tly_list *n = s->queues.next; n != &s->queues; n = n->next) {
        struct tly_sched_queue *q = sched_queue_of(n);
        const struct tly_heap_item *top = tly_heap_top(&q->waiting);
        if (!top)
            continue;
        if (!sched_has_window(q, top->value)) {
            *shut = true;
        } else if (!first || tly_before(top->order, first->order)) {
            best = q;
            first = top;
        }
    }
    return best;
}

void tly_sched_run(struct tly_sched *s)
{
    struct tly_sched_queue *q;
    while ((q = sched_choose(s, &s->shut))) {
        struct tly_task *t = tly_heap_top(&q->waiting)->value;
        uint64_t credit = sched_largest_credit(s);
        if (!s->opened)
            s->opened = credit / 4;
        if (!sched_has_credit(s, t, credit))
            return;
        tly_heap_pop(&q->waiting);
        s->in_flight += t->charge;
        q->in_flight += t->charge;
        q->pushed += t->bytes;
        t->start(t);
    }
}

static void sched_give_back(struct tly_sched_queue *q, uint64_t bytes)
{
    bytes = bytes < q->in_flight ? bytes : q->in_flight;
    q->in_flight -= bytes;
    q->sched->in_flight -= bytes;
}

void tly_sched_finish(struct tly_sched_queue *q, uint64_t bytes)
{
    struct tly_sched *s = q->sched;
    sched_give_back(q, bytes);
    if (s->opened)
        s->opened += bytes;
}

void tly_sched_retract(struct tly_sched_queue *q, const struct tly_task *t, uint64_t sent)
{
    sched_give_back(q, t->charge - sent);
    if (!sent)
        q->pushed -= t->bytes;
}

void tly_sched_open(struct tly_sched_queue *q, uint64_t granted)
{
    q->granted = granted;
}

void tly_sched_grant(struct tly_sched_queue *q, uint64_t granted)
{
    if (granted > q->granted)
        q->granted = granted;
}

void tly_sched_close(struct tly_sched_queue *q)
{
    sched_give_back(q, q->in_flight);
    q->pushed = q->granted = 0;
}

struct condition {
    bool (*drop)(struct tly_task *t, void *user);
    void *user;
};

static bool sched_holds(void *task, void *user)
{
    const struct condition *c = user;
    return c->drop(task, c->user);
}

void tly_sched_drop(struct tly_sched_queue *q, bool (*drop)(struct tly_task *t, void *user), void *user)
{
    tly_heap_filter(&q->waiting, sched_holds, &(struct condition){drop, user});
}
