/* later.c - see later.h.
 *
 * A stage keeps for each operation (tly_chain_own) memory in which it hands parts on, and for each part where its result belonged
 * before.  What is to be done waits in `items`; the thread takes any of these.
 *
 * Parts of a whole tensor lie in one memory, at their places, and so does the input of an allgather; other parts have each their
 * own. */
#include "later.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "job.h"

struct job_item {
    struct tly_part *part;
    bool back;
};

struct work {
    uint8_t *out, *in; /* owned: of a whole tensor, or, the first, of an allgather's input */
    bool prepared;     /* that is there */
    bool stopped;      /* no part comes any more */
    struct slot {
        uint8_t *landing;       /* where the result belongs */
        const uint8_t *input;   /* as it came */
        uint32_t given, wanted; /* bytes of each that the stage has to do */
        uint8_t *out, *in;      /* borrowed */
        uint8_t *own;           /* owned: the memory for both, or NULL */
    } * slot;                   /* owned: for each part */
    uint32_t slots;
};

struct later later_device = {.place = STAGE_DEVICE,
                             .fail_begin = -1,
                             .fail_out = -1,
                             .fail_in = -1,
                             .lock = PTHREAD_MUTEX_INITIALIZER,
                             .more = PTHREAD_COND_INITIALIZER,
                             .idle = PTHREAD_COND_INITIALIZER},
             later_codec = {.place = STAGE_CODEC,
                            .narrows = true,
                            .fail_begin = -1,
                            .fail_out = -1,
                            .fail_in = -1,
                            .lock = PTHREAD_MUTEX_INITIALIZER,
                            .more = PTHREAD_COND_INITIALIZER,
                            .idle = PTHREAD_COND_INITIALIZER};

static struct work *work_of(const struct later *l, struct tally_op *op)
{
    return *tly_chain_own(&op->chain, l->place);
}

static struct slot *slot_of(const struct later *l, const struct tly_part *p)
{
    struct work *w = work_of(l, p->op);
    return &w->slot[p->index];
}

/* --- the thread ---------------------------------------------------------------------------------- */

/* Does it stand for a whole piece, whose parts are not cut yet? */
static bool prepares(const struct tly_part *p)
{
    return p->index == 0 && p->op->call->pieces && p->op->bytes && p->op->part_count == 1;
}

static void go_out(struct later *l, struct tly_part *p)
{
    struct work *w = work_of(l, p->op);
    struct slot *s = slot_of(l, p);
    if (s->given && l->narrows) {
        for (uint32_t i = 0; i < s->given / 8; i++)
            ((int32_t *)(void *)s->out)[i] = (int32_t)((const int64_t *)(const void *)s->input)[i];
        p->length /= 2;
        p->result_length /= 2;
        p->dtype = TALLY_INT32;
        atomic_fetch_add(&l->changed, 1);
    } else if (prepares(p)) {
        memcpy(w->out, p->op->input, p->op->bytes);
        p->op->input = w->out;
        w->prepared = true;
    } else if (s->given) {
        memcpy(s->out, s->input, s->given);
    }
    if (s->given)
        p->input = s->out;
    if (s->wanted)
        p->landing = s->in;
    if (s->given || s->wanted)
        atomic_fetch_add(&l->out, 1);
}

static void come_in(struct later *l, struct tly_part *p)
{
    struct slot *s = slot_of(l, p);
    if (l->narrows)
        for (uint32_t i = 0; i < s->wanted / 8; i++)
            ((int64_t *)(void *)s->landing)[i] = ((const int32_t *)(const void *)s->in)[i];
    else
        memcpy(s->landing, s->in, s->wanted);
    atomic_fetch_add(&l->in, 1);
}

static bool fails(atomic_int *request, const struct tly_part *p)
{
    int wanted = (int)p->index;
    return atomic_compare_exchange_strong(request, &wanted, -1);
}

static bool may_do(const struct later *l, const struct job_item *item)
{
    int held = atomic_load(&l->held);
    bool first = item->part->index == 0;
    return held == LATER_NONE || (held != LATER_ALL && (item->back || first == (held == LATER_OTHERS)));
}

/* Any of those that may be done; l->count: none. */
static size_t choose(const struct later *l, uint64_t *s)
{
    size_t start = l->count ? (size_t)(job_random(s) % l->count) : 0;
    for (size_t i = 0; i < l->count; i++)
        if (may_do(l, &l->items[(start + i) % l->count]))
            return (start + i) % l->count;
    return l->count;
}

static void *work(void *arg)
{
    struct later *l = arg;
    uint64_t s = (uint64_t)getpid() + l->place;
    pthread_mutex_lock(&l->lock);
    for (;;) {
        size_t i;
        while ((i = choose(l, &s)) == l->count)
            pthread_cond_wait(&l->more, &l->lock);
        struct job_item item = l->items[i];
        l->items[i] = l->items[--l->count];
        l->busy = item.part->op;
        if (item.part->index < l->last)
            atomic_fetch_add(&l->disordered, 1);
        l->last = item.part->index;
        pthread_mutex_unlock(&l->lock);
        if (job_random(&s) % 16 == 0)
            job_sleep_ms(1);
        bool failed = fails(item.back ? &l->fail_in : &l->fail_out, item.part);
        if (item.back && !failed)
            come_in(l, item.part);
        else if (!failed)
            go_out(l, item.part);
        else if (!item.back)
            slot_of(l, item.part)->wanted = 0; /* it lands where it belongs */
        pthread_mutex_lock(&l->lock);
        if (failed) /* still under the lock: withdraw() waits for what is said, too */
            tly_stage_failed(item.part, EIO, "the stage fails on request");
        else
            tly_stage_passed(item.part);
        l->busy = NULL;
        pthread_cond_broadcast(&l->idle);
    }
    return NULL;
}

static void add(struct later *l, struct tly_part *p, bool back)
{
    pthread_mutex_lock(&l->lock);
    if (!l->started) {
        pthread_t thread;
        l->started = true;
        CHECK(pthread_create(&thread, NULL, work, l) == 0 && pthread_detach(thread) == 0);
    }
    if (l->count == l->room) {
        l->room = 2 * l->room + 16;
        l->items = realloc(l->items, l->room * sizeof *l->items);
        CHECK(l->items);
    }
    l->items[l->count++] = (struct job_item){p, back};
    pthread_cond_signal(&l->more);
    pthread_mutex_unlock(&l->lock);
}

void later_hold(struct later *l, enum later_hold what)
{
    pthread_mutex_lock(&l->lock);
    atomic_store(&l->held, what);
    pthread_cond_signal(&l->more);
    pthread_mutex_unlock(&l->lock);
}

/* --- the stage ----------------------------------------------------------------------------------- */

static bool suits(const struct later *l, const struct tally_op *op)
{
    if (op->mark || op->dtype != TALLY_INT64)
        return false;
    return atomic_load(&l->suits_all) || (op->kind == TALLY_PUSH_PULL && op->bytes >= LATER_LEAST);
}

static int begin(struct later *l, struct tally_op *op)
{
    atomic_fetch_add(&l->begun, 1);
    struct work *w = *tly_chain_own(&op->chain, l->place) = calloc(1, sizeof *w);
    CHECK(w && (w->slot = calloc(op->part_count, sizeof *w->slot)));
    w->slots = op->part_count;
    if (!op->call->pieces || op->kind == TALLY_ALLGATHER)
        CHECK((w->out = malloc(op->bytes + 1)) && (w->in = malloc(op->bytes + 1)));
    if (op->kind == TALLY_ALLGATHER && op->part_count > 1) {
        memcpy(w->out, op->input, op->bytes);
        w->prepared = true;
    }
    if (atomic_load(&l->fail_begin) >= 0 && atomic_fetch_sub(&l->fail_begin, 1) == 0)
        return tly_fail(EIO, "the stage cannot begin");
    return 0;
}

static int ready(struct later *l, struct tly_part *p)
{
    struct work *w = work_of(l, p->op);
    struct slot *s = slot_of(l, p);
    uint32_t given = p->input ? p->length : 0, wanted = p->result_length;
    CHECK(!w->stopped);
    if (prepares(p))
        given = wanted = 0;
    else if (!given && !wanted && atomic_load(&l->held) != LATER_FIRST)
        return 1;
    *s = (struct slot){.landing = p->landing, .input = p->input, .given = given, .wanted = wanted};
    if (!p->op->call->pieces) {
        s->out = w->out + p->place;
        s->in = w->in + p->place;
    } else if (given || wanted) {
        CHECK((s->own = malloc(given + wanted)));
        s->out = s->own;
        s->in = s->own + given;
    }
    if (w->prepared && given) {
        s->given = 0;
        p->input = w->out + p->place;
    }
    add(l, p, false);
    return 0;
}

static int more(struct later *l, struct tally_op *op)
{
    struct work *w = work_of(l, op);
    w->slot = realloc(w->slot, op->part_count * sizeof *w->slot);
    CHECK(w->slot);
    memset(w->slot + 1, 0, (op->part_count - 1) * sizeof *w->slot);
    w->slots = op->part_count;
    atomic_fetch_add(&l->recut, 1);
    return 0;
}

static bool landed(struct later *l, struct tly_part *p)
{
    CHECK(!work_of(l, p->op)->stopped);
    if (!slot_of(l, p)->wanted)
        return true;
    add(l, p, true);
    return false;
}

static void withdraw(struct later *l, struct tally_op *op, bool over)
{
    pthread_mutex_lock(&l->lock);
    for (size_t i = l->count; i-- > 0;)
        if (l->items[i].part->op == op)
            l->items[i] = l->items[--l->count];
    while (l->busy == op)
        pthread_cond_wait(&l->idle, &l->lock);
    pthread_mutex_unlock(&l->lock);
    struct work *w = work_of(l, op);
    w->stopped = true;
    if (!over)
        return;
    if (w->out) { /* whoever still reads it gets what is not there */
        memset(w->out, 0x5a, op->bytes);
        memset(w->in, 0x5a, op->bytes);
    }
    for (uint32_t i = 0; i < w->slots; i++)
        free(w->slot[i].own);
    free(w->slot);
    free(w->out);
    free(w->in);
    free(w);
    *tly_chain_own(&op->chain, l->place) = NULL;
    atomic_fetch_add(&l->ended, 1);
}

#define STAGE(name, later, may_vouch) \
    static bool name##_suits(const tally_comm *c, const struct tally_op *op) \
    { \
        return suits(&(later), op); \
    } \
    static int name##_begin(tally_comm *c, struct tally_op *op) \
    { \
        return begin(&(later), op); \
    } \
    static int name##_more(tally_comm *c, struct tally_op *op) \
    { \
        return more(&(later), op); \
    } \
    static int name##_ready(tally_comm *c, struct tly_part *p) \
    { \
        return ready(&(later), p); \
    } \
    static bool name##_landed(tally_comm *c, struct tly_part *p) \
    { \
        return landed(&(later), p); \
    } \
    static void name##_withdraw(tally_comm *c, struct tally_op *op, bool over) \
    { \
        withdraw(&(later), op, over); \
    } \
    static const struct tly_stage name = { \
        .does = "is held by a test's stage", \
        .vouches = may_vouch, \
        .suits = name##_suits, \
        .begin = name##_begin, \
        .more = name##_more, \
        .ready = name##_ready, \
        .landed = name##_landed, \
        .withdraw = name##_withdraw};

STAGE(device, later_device, true)
STAGE(codec, later_codec, false)

void later_use(bool with_device, bool with_codec)
{
    if (with_device)
        tly_stage_register(STAGE_DEVICE, &device);
    if (with_codec)
        tly_stage_register(STAGE_CODEC, &codec);
}
