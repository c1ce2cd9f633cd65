/* window.c - windows: who may have one, whose turn it is, and how far each rank is. */
#include "local/window.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/copy.h"
#include "local/way.h"
#include "local/work.h"

enum {
    MOST_WINDOWS = 4,   /* of operations under way at once: more would push each other out of the cache */
    MOST_LOOKED_AT = 8, /* rounds at a turn; then only those with a window, and the elected */
};

int tly_windows_open(struct tly_local *l)
{
    for (int i = 0; i < 2; i++) {
        int err = tly_pool_borrow(l->segment, TLY_WINDOW, &l->window[i].at);
        if (err)
            return err;
        l->window[i].is_free = true;
    }
    return 0;
}

void tly_windows_close(struct tly_local *l)
{
    for (int i = 0; i < 2; i++)
        if (l->window[i].at)
            tly_pool_free(l->window[i].at);
}

/* --- election ------------------------------------------------------------------------------------ */

static uint64_t window_name_of(const struct tly_local_round *r)
{
    return (uint64_t)r->posts[0].gen << 32 | (r->posts[0].work + 1u);
}

/* Is it the one for which each rank keeps a window? */
static bool window_is_elected(const struct tly_local *l, const struct tly_local_round *r)
{
    return atomic_load_explicit(&l->at[0].control->elected, memory_order_relaxed) == window_name_of(r);
}

/* Each rank keeps a window for this one.  NULL: for none. */
static void window_elect(struct tly_local *l, const struct tly_local_round *r)
{
    atomic_store_explicit(&l->own->elected, r ? window_name_of(r) : 0, memory_order_relaxed);
    if (r)
        tly_local_tell(l);
}

/* The elected round has ended here: the next one. */
static void window_elect_next(struct tly_local *l)
{
    const struct tly_local_round *next = NULL;
    for (struct tly_list *n = l->ready.next; n != &l->ready && !next; n = n->next) {
        const struct tly_local_round *r = tly_list_entry(n, struct tly_local_round, node);
        next = r->slots ? r : NULL;
    }
    window_elect(l, next);
}

void tly_window_begin(struct tly_local *l, const struct tly_local_round *r)
{
    if (l->me == 0 && !atomic_load(&l->own->elected))
        window_elect(l, r);
}

/* --- a window ------------------------------------------------------------------------------------ */

bool tly_window_can_open(const struct tly_local *l, const struct tly_local_round *r, bool first)
{
    return r->op->borrowed ||
           ((first || l->windows < MOST_WINDOWS) && (!l->no_more || l->window[0].is_free)) ||
           (l->window[1].is_free && window_is_elected(l, r));
}

/* One of those that are there from the start; NULL: it is taken. */
static void *window_kept(struct tly_local *l, int i)
{
    if (!l->window[i].is_free)
        return NULL;
    l->window[i].is_free = false;
    return l->window[i].at;
}

bool tly_window_open(struct tly_local *l, struct tly_local_round *r)
{
    struct tly_local_op *op = r->op;
    if (op->borrowed)
        return true;
    op->borrowed = window_kept(l, 0);
    if (!op->borrowed && !l->no_more &&
        tly_pool_borrow(l->segment, (uint64_t)r->slots * r->chunk_bytes, &op->borrowed) != 0) {
        op->borrowed = NULL;
        l->no_more = true; /* until one is given back */
    }
    if (!op->borrowed && window_is_elected(l, r))
        op->borrowed = window_kept(l, 1);
    if (!op->borrowed)
        return false;
    l->windows++;
    uint64_t place = (uint64_t)((uint8_t *)op->borrowed - tly_segment_base(l->segment));
    /* `next` publishes it. */
    atomic_store_explicit(&tly_work_entry(l, r, l->me)->window, place, memory_order_relaxed);
    return true;
}

static void window_close(struct tly_local *l, struct tly_local_op *op)
{
    if (!op->borrowed)
        return;
    l->windows--;
    l->no_more = false;
    if (op->borrowed == l->window[0].at)
        l->window[0].is_free = true;
    else if (op->borrowed == l->window[1].at)
        l->window[1].is_free = true;
    else
        tly_pool_free(op->borrowed);
    op->borrowed = NULL;
}

void tly_window_let_go(struct tly_local *l, struct tly_local_round *r, struct tly_local_op *op)
{
    window_close(l, op);
    if (l->me == 0 && window_is_elected(l, r))
        window_elect_next(l);
}

bool tly_window_is_passed_over(const struct tly_local *l, const struct tly_local_round *r,
                               const struct tly_turn *turn)
{
    return turn->windowed >= MOST_LOOKED_AT && !r->op->borrowed && !window_is_elected(l, r);
}

uint8_t *tly_window_slot(const struct tly_local_round *r, uint32_t block)
{
    return (uint8_t *)r->op->borrowed + (uint64_t)(block % r->slots) * r->chunk_bytes;
}

uint8_t *tly_window_seen(const struct tly_local *l, const struct tly_local_round *r, uint32_t rank,
                         uint32_t block, uint64_t length)
{
    uint64_t window = atomic_load_explicit(&tly_work_entry(l, r, rank)->window, memory_order_relaxed);
    uint64_t place = window + (uint64_t)(block % r->slots) * r->chunk_bytes, all = l->at[rank].bytes;
    if (window >= sizeof(struct tly_control) && window <= all && place <= all && length <= all - place)
        return l->at[rank].base + place;
    char sentence[100];
    snprintf(sentence, sizeof sentence, "rank %u has written nonsense into shared memory",
             tly_local_number(l, rank));
    l->calls->broken(l->user, EPROTO, sentence);
    return NULL;
}

void tly_window_put(const struct tly_local *l, void *slot, const void *from, size_t n)
{
    if (l->far)
        tly_copy_streaming(slot, from, n);
    else
        memcpy(slot, from, n);
}

/* --- how far ranks are --------------------------------------------------------------------------- */

static uint32_t window_count_in(uint64_t value, uint32_t gen)
{
    return (uint32_t)(value >> 32) != gen ? UINT32_MAX : (uint32_t)value == UINT32_MAX ? 0 : (uint32_t)value;
}

/* acquire: the blocks are there; seq_cst: pairs with tly_work_mark(). */
uint32_t tly_window_staged_by(const struct tly_local *l, const struct tly_local_round *r, uint32_t rank)
{
    return window_count_in(atomic_load(&tly_work_entry(l, r, rank)->next), r->posts[rank].gen);
}

uint32_t tly_window_done_by(const struct tly_local *l, const struct tly_local_round *r, uint32_t rank)
{
    return window_count_in(atomic_load_explicit(&tly_work_entry(l, r, rank)->done, memory_order_acquire),
                           r->posts[rank].gen);
}

void tly_window_say_staged(const struct tly_local *l, const struct tly_local_round *r)
{
    atomic_store_explicit(&tly_work_entry(l, r, l->me)->next, (uint64_t)r->posts[l->me].gen << 32 | r->staged,
                          memory_order_release);
}

void tly_window_say_done(const struct tly_local *l, const struct tly_local_round *r, uint32_t blocks)
{
    atomic_store_explicit(&tly_work_entry(l, r, l->me)->done, (uint64_t)r->posts[l->me].gen << 32 | blocks,
                          memory_order_release);
}
