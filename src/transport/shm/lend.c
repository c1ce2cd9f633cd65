/* lend.c - payloads that are shown to the other end: each in a loan, in place or in our segment.
 *
 * lent: the loans that have not come back, oldest first.  Within a process the reader marks a loan as returned, and the
 * sender looks when it lends again; another process says so in a frame (TLY_RETURN). */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "base/log.h"
#include "base/map.h"
#include "topo/topo.h"
#include "transport/shm/shm.h"
#include "wire/pack.h"

enum {
    LEAST_SHOWN = 8 << 10, /* less goes through the socket sooner than it is looked up and given back */
    COPIES_BYTES = 16 << 20,
    MOST_LOANS = 256,
    PLACE_ALIGN = 4096,
};

/* The loans within this process that are not returned, by id: what comes as a number becomes a pointer only here. */
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER; /* guards the next two */
static struct tly_map table;
static uint64_t last_id;

/* Another thread may have held it when this process was forked; the loans are the parent's. */
static void lend_in_child(void)
{
    pthread_mutex_init(&table_lock, NULL);
    table = (struct tly_map){0};
}

static void lend_install(void)
{
    pthread_atfork(NULL, NULL, lend_in_child);
}

static struct tly_shm_loan *lend_entry(const struct tly_list *node)
{
    return tly_list_entry(node, struct tly_shm_loan, loan.node);
}

/* Within a process: the sender will look. */
static void lend_mark(struct tly_loan *loan)
{
    atomic_store_explicit(&tly_shm_loan_of(loan)->returned, true, memory_order_release);
}

static int lend_enter_table(struct tly_shm_loan *loan)
{
    pthread_mutex_lock(&table_lock);
    loan->loan.id = ++last_id;
    int err = tly_map_put(&table, loan->loan.id, loan);
    pthread_mutex_unlock(&table_lock);
    return err;
}

static void lend_leave_table(struct tly_shm_loan *loan)
{
    pthread_mutex_lock(&table_lock);
    tly_map_take(&table, loan->loan.id);
    if (table.count == 0) {
        tly_map_finish(&table);
        table = (struct tly_map){0};
    }
    pthread_mutex_unlock(&table_lock);
}

struct tly_shm_loan *tly_shm_look_up(uint64_t id)
{
    pthread_mutex_lock(&table_lock);
    struct tly_shm_loan *loan = table.count ? tly_map_get(&table, id) : NULL;
    if (loan)
        tly_loan_ref(&loan->loan);
    pthread_mutex_unlock(&table_lock);
    return loan;
}

void tly_shm_lend_init(struct tly_shm_channel *s)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, lend_install);
    tly_list_init(&s->lent);
}

static void lend_take_off(struct tly_shm_channel *s, struct tly_shm_loan *loan)
{
    tly_list_remove(&loan->loan.node);
    s->lent_count--;
    if (s->going_on == loan)
        s->going_on = NULL;
    if (s->here)
        lend_leave_table(loan);
}

void tly_shm_lend_close(struct tly_shm_channel *s)
{
    while (!tly_list_empty(&s->lent)) {
        struct tly_shm_loan *l = lend_entry(tly_list_take(&s->lent));
        lend_take_off(s, l);
        tly_loan_move(&l->loan, NULL);
        tly_loan_unref(&l->loan);
    }
    s->to_pass = false;
    tly_shared_destroy(s->copies); /* never used again: a peer that has mapped it may still look at it */
    s->copies = NULL;
    s->no_copies = true;
}

/* --- lending ------------------------------------------------------------------------------------- */

/* A place in our segment that no loan has; false: none. */
static bool lend_find_place(const struct tly_shm_channel *s, uint32_t length, uint64_t *from)
{
    const struct tly_list *n = &s->lent;
    uint64_t at = 0;
    do { /* first the beginning, then behind each loan in turn */
        bool taken = at > s->copies->size || length > s->copies->size - at;
        for (const struct tly_list *m = s->lent.next; m != &s->lent && !taken; m = m->next) {
            const struct tly_shm_loan *other = lend_entry(m);
            taken = at < other->from + other->loan.length && other->from < at + length;
        }
        if (!taken) {
            *from = at;
            return true;
        }
        n = n->next;
        const struct tly_shm_loan *loan = lend_entry(n);
        if (n != &s->lent)
            at = (loan->from + loan->loan.length + PLACE_ALIGN - 1) / PLACE_ALIGN * PLACE_ALIGN;
    } while (n != &s->lent);
    return false;
}

static bool lend_make_copies(struct tly_shm_channel *s, uint32_t length)
{
    if (s->copies || s->no_copies)
        return s->copies != NULL;
    uint64_t size = 4ull * length > COPIES_BYTES ? 4ull * length : COPIES_BYTES;
    /* Beyond its limit the cgroup has somebody killed; 16 MB of it are others'. */
    int err = tly_topo_memory("").room < size + COPIES_BYTES
                  ? tly_fail(ENOMEM, "the cgroup's limit leaves no %llu MB of memory to share",
                             (unsigned long long)size >> 20)
                  : tly_shared_create(size, false, &s->copies);
    if (err) {
        tly_log(TALLY_LOG_WARNING, "transport", "%s: payloads go through a socket", tly_error());
        s->no_copies = true;
    }
    s->to_pass = !s->no_copies;
    return s->to_pass;
}

static struct tly_shm_loan *lend_payload(struct tly_shm_channel *s, const struct tly_outgoing *o)
{
    const struct tly_frame *f = &o->frame;
    const uint8_t *from = (const uint8_t *)o->payload - (o->whole ? f->offset : 0);
    struct tly_loan *made =
        tly_loan_create(sizeof(struct tly_shm_loan), from, o->whole ? f->length : f->payload);
    if (!made)
        return NULL;
    struct tly_shm_loan *loan = tly_shm_loan_of(made);
    made->single = !o->whole;
    made->give_back = lend_mark;
    loan->token = o->token;
    if (s->here ? lend_enter_table(loan) != 0
                : !lend_make_copies(s, loan->loan.length) ||
                      !lend_find_place(s, loan->loan.length, &loan->from)) {
        tly_loan_unref(&loan->loan);
        return NULL;
    }
    if (!s->here)
        loan->loan.id = ++s->lent_ever;
    tly_list_append(&s->lent, &loan->loan.node);
    s->lent_count++;
    return loan;
}

/* In one process the reader leaves a sign; nobody has to be told. */
static void lend_sweep(struct tly_shm_channel *s)
{
    for (struct tly_list *n = s->lent.next, *next; n != &s->lent; n = next) {
        next = n->next;
        struct tly_shm_loan *loan = lend_entry(n);
        if (atomic_load_explicit(&loan->returned, memory_order_acquire)) {
            lend_take_off(s, loan);
            tly_loan_unref(&loan->loan);
        }
    }
}

bool tly_shm_show(struct tly_channel *c, const struct tly_outgoing *o, uint8_t reference[TLY_REFERENCE_BYTES])
{
    struct tly_shm_channel *s = tly_shm_of(c);
    const struct tly_frame *f = &o->frame;
    if (!o->stays || !f->payload || f->length < LEAST_SHOWN)
        return false;
    struct tly_shm_loan *loan = o->whole && f->offset ? s->going_on : NULL;
    if (loan && (loan->token != o->token || loan->loan.data + f->offset != (const uint8_t *)o->payload ||
                 loan->loan.length != f->length))
        loan = NULL;
    if (!loan) {
        if (s->here)
            lend_sweep(s);
        if (s->lent_count < MOST_LOANS)
            loan = lend_payload(s, o);
        if (o->whole)
            s->going_on = loan;
    }
    if (!loan)
        return false;
    if (!s->here)
        memcpy(s->copies->data + loan->from + (o->whole ? f->offset : 0), o->payload, f->payload);
    tly_put64(reference, loan->loan.id);
    tly_put32(reference + 8, 0); /* the one segment that we show */
    tly_put32(reference + 12, loan->loan.single);
    tly_put64(reference + 16, loan->from);
    return true;
}

int tly_shm_detach(struct tly_channel *c, const void *token)
{
    struct tly_shm_channel *s = tly_shm_of(c);
    int err = 0;
    for (struct tly_list *n = s->lent.next; n != &s->lent; n = n->next) {
        struct tly_shm_loan *loan = lend_entry(n);
        if (loan->token != token)
            continue;
        loan->token = NULL;
        if (s->going_on == loan)
            s->going_on = NULL;
        if (!s->here || atomic_load_explicit(&loan->returned, memory_order_acquire))
            continue;
        uint8_t *copy = malloc(loan->loan.length);
        if (!copy)
            err = -ENOMEM;
        tly_loan_move(&loan->loan, copy);
    }
    return err;
}

void tly_shm_returned(struct tly_channel *c, uint64_t id)
{
    struct tly_shm_channel *s = tly_shm_of(c);
    for (struct tly_list *n = s->lent.next; n != &s->lent && !s->here; n = n->next) {
        struct tly_shm_loan *loan = lend_entry(n);
        if (loan->loan.id == id) {
            lend_take_off(s, loan);
            tly_loan_unref(&loan->loan);
            return;
        }
    }
}

ssize_t tly_shm_send(struct tly_stream *stream, struct msghdr *m, int flags)
{
    struct tly_shm_channel *s = tly_shm_of(&stream->base);
    tly_shm_join_lodger(s);
    if (s->mate)
        return tly_shm_put(s, m);
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {0};
    bool passes = s->to_pass;
    if (passes) {
        m->msg_control = &control;
        m->msg_controllen = CMSG_SPACE(sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &s->copies->fd, sizeof(int));
    }
    ssize_t r = sendmsg(stream->watch.fd, m, flags);
    if (r > 0 && passes)
        s->to_pass = false;
    return r;
}
