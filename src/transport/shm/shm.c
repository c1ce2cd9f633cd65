/* shm.c - loans of memory between the two ends of a link. */
#include "transport/shm/shm.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/error.h"
#include "base/fork.h"
#include "base/log.h"
#include "base/map.h"
#include "base/shared.h"
#include "topo/topo.h"
#include "wire/pack.h"

enum {
    LEAST_SHOWN = 8 << 10, /* less goes through the socket sooner than it is looked up and given back */
    COPIES_BYTES = 16 << 20,
    MOST_LOANS = 256,
    MOST_SEGMENTS = 64,
    MOST_PASSED = 4, /* descriptors with one message */
    PLACE_ALIGN = 4096,
};

/* Another process's segment. */
struct mapping {
    void *data;
    uint64_t size;
    atomic_int references; /* of the link and of each loan; whoever drops the last one unmaps (acq_rel) */
};

/* A stretch of memory that one end may read and the other leaves alone meanwhile.  Between ends in one process both
 * have the same object; else each has its own. */
struct tly_loan {
    struct tly_list
        node; /* of a tly_shm: `lent` of the sender; `read`, then `returns`, of another process's reader */
    atomic_int references; /* whoever drops the last one frees (acq_rel) */
    pthread_mutex_t lock;  /* guards the next four */
    pthread_cond_t idle;   /* readers has become 0 */
    uint32_t readers;
    const uint8_t *data; /* NULL: taken back */
    uint8_t *copy;       /* owned: of what its owner had to have back */
    uint64_t id;         /* the sender's */
    uint32_t length;
    bool single; /* of one frame; else of a part, whose frames share it */
    atomic_bool
        returned; /* by the reader (release) in one process; its sender looks when it lends again (acquire) */
    /* owner: the sender's loop */
    const void *token;
    uint64_t from; /* in the sender's segment */
    /* owner: the reader's loop */
    bool open;               /* more frames of the part may come */
    bool kept;               /* by the link's user */
    struct tly_shm *shm;     /* of another process: to say that it is returned; NULL: gone */
    struct mapping *mapping; /* of another process */
};

/* Owner: the link's loop. */
struct tly_shm {
    bool here; /* both ends are in this process */
    /* what we lend */
    struct tly_list lent; /* oldest first */
    uint64_t lent_ever;
    uint32_t lent_count;
    struct tly_loan *going_on; /* the part whose frames are going out */
    struct tly_shared *copies; /* owned; made when it is first needed */
    bool no_copies;            /* it could not be made */
    bool to_pass;              /* its descriptor goes with the next message */
    /* what we read */
    struct tly_loan *coming; /* the part whose frames are coming in; a reference */
    struct tly_list read;
    struct mapping *seen[MOST_SEGMENTS];
    uint32_t seen_count;
    struct tly_list returns; /* what of it has been read and is to be told; references */
};

/* The loans within this process that are not returned, by id: what comes as a number becomes a pointer only here. */
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER; /* guards the next two */
static struct tly_map table;
static uint64_t last_id;

/* Another thread may have held it when this process was forked; the loans are the parent's. */
static void in_child(void)
{
    pthread_mutex_init(&table_lock, NULL);
    table = (struct tly_map){0};
}

static void install(void)
{
    pthread_atfork(NULL, NULL, in_child);
}

/* --- loans --------------------------------------------------------------------------------------- */

static void drop_mapping(struct mapping *m)
{
    if (!m || atomic_fetch_sub_explicit(&m->references, 1, memory_order_acq_rel) != 1)
        return;
    if (m->data)
        munmap(m->data, m->size);
    free(m);
}

static void unref(struct tly_loan *loan)
{
    if (atomic_fetch_sub_explicit(&loan->references, 1, memory_order_acq_rel) != 1)
        return;
    tly_list_remove(&loan->node);
    drop_mapping(loan->mapping);
    pthread_cond_destroy(&loan->idle);
    pthread_mutex_destroy(&loan->lock);
    free(loan->copy);
    free(loan);
}

static struct tly_loan *make_loan(const uint8_t *data, uint32_t length)
{
    struct tly_loan *loan = calloc(1, sizeof *loan);
    if (!loan)
        return NULL;
    tly_list_init(&loan->node);
    atomic_init(&loan->references, 1);
    pthread_mutex_init(&loan->lock, NULL);
    pthread_cond_init(&loan->idle, NULL);
    loan->data = data;
    loan->length = length;
    return loan;
}

static int enter_table(struct tly_loan *loan)
{
    pthread_mutex_lock(&table_lock);
    loan->id = ++last_id;
    int err = tly_map_put(&table, loan->id, loan);
    pthread_mutex_unlock(&table_lock);
    return err;
}

static void leave_table(struct tly_loan *loan)
{
    pthread_mutex_lock(&table_lock);
    tly_map_take(&table, loan->id);
    if (table.count == 0) {
        tly_map_finish(&table);
        table = (struct tly_map){0};
    }
    pthread_mutex_unlock(&table_lock);
}

static struct tly_loan *look_up(uint64_t id)
{
    pthread_mutex_lock(&table_lock);
    struct tly_loan *loan = table.count ? tly_map_get(&table, id) : NULL;
    if (loan)
        atomic_fetch_add_explicit(&loan->references, 1, memory_order_relaxed);
    pthread_mutex_unlock(&table_lock);
    return loan;
}

const uint8_t *tly_loan_hold(struct tly_loan *loan)
{
    pthread_mutex_lock(&loan->lock);
    const uint8_t *data = loan->data;
    loan->readers += data != NULL;
    pthread_mutex_unlock(&loan->lock);
    return data;
}

void tly_loan_drop(struct tly_loan *loan)
{
    pthread_mutex_lock(&loan->lock);
    if (--loan->readers == 0)
        pthread_cond_broadcast(&loan->idle);
    pthread_mutex_unlock(&loan->lock);
}

/* Have it read elsewhere, or nowhere, from here on. */
static void move(struct tly_loan *loan, uint8_t *copy)
{
    pthread_mutex_lock(&loan->lock);
    while (loan->readers)
        pthread_cond_wait(&loan->idle, &loan->lock);
    if (copy)
        memcpy(copy, loan->data, loan->length);
    free(loan->copy);
    loan->data = loan->copy = copy;
    pthread_mutex_unlock(&loan->lock);
}

void tly_loan_keep(struct tly_loan *loan)
{
    loan->kept = true;
    atomic_fetch_add_explicit(&loan->references, 1, memory_order_relaxed);
}

/* Nobody here will read it any more. */
static void give_back(struct tly_loan *loan)
{
    if (!loan->mapping) {
        atomic_store_explicit(&loan->returned, true, memory_order_release);
        return;
    }
    if (!loan->shm)
        return; /* the link is no more: nobody waits for it */
    tly_list_remove(&loan->node);
    tly_list_append(&loan->shm->returns, &loan->node);
    atomic_fetch_add_explicit(&loan->references, 1, memory_order_relaxed);
}

void tly_loan_return(struct tly_loan *loan)
{
    if (!loan)
        return;
    loan->kept = false;
    if (!loan->open)
        give_back(loan);
    unref(loan);
}

/* --- life ---------------------------------------------------------------------------------------- */

int tly_shm_peer(int fd)
{
    struct ucred peer;
    socklen_t len = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) < 0)
        return -errno;
    return peer.uid == geteuid() ? peer.pid : -EACCES;
}

int tly_shm_create(int fd, bool copies, struct tly_shm **out)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    int pid = tly_shm_peer(fd);
    pthread_once(&once, install);
    if (pid < 0)
        return pid;
    struct tly_shm *s = calloc(1, sizeof *s);
    if (!s)
        return -ENOMEM;
    s->here = !copies && pid == getpid();
    tly_list_init(&s->lent);
    tly_list_init(&s->read);
    tly_list_init(&s->returns);
    *out = s;
    return 0;
}

bool tly_shm_is_here(const struct tly_shm *s)
{
    return s->here;
}

static void take_off(struct tly_shm *s, struct tly_loan *loan)
{
    tly_list_remove(&loan->node);
    s->lent_count--;
    if (s->going_on == loan)
        s->going_on = NULL;
    if (s->here)
        leave_table(loan);
}

/* The part that was coming in has no more frames. */
static void end_coming(struct tly_shm *s)
{
    struct tly_loan *loan = s->coming;
    if (!loan)
        return;
    s->coming = NULL;
    loan->open = false;
    if (!loan->kept)
        give_back(loan);
    unref(loan);
}

void tly_shm_close(struct tly_shm *s)
{
    end_coming(s);
    while (!tly_list_empty(&s->lent)) {
        struct tly_loan *loan = tly_list_entry(tly_list_take(&s->lent), struct tly_loan, node);
        take_off(s, loan);
        move(loan, NULL);
        unref(loan);
    }
    while (!tly_list_empty(&s->read)) {
        struct tly_loan *loan = tly_list_entry(s->read.next, struct tly_loan, node);
        tly_list_remove(&loan->node);
        loan->shm = NULL;
    }
    for (uint64_t id; tly_shm_next_return(s, &id);)
        ;
    for (uint32_t i = 0; i < s->seen_count; i++)
        drop_mapping(s->seen[i]);
    s->seen_count = 0;
    s->to_pass = false;
    tly_shared_destroy(s->copies); /* never used again: whoever has mapped it may still look at it */
    s->copies = NULL;
    s->no_copies = true;
}

void tly_shm_destroy(struct tly_shm *s)
{
    if (!s)
        return;
    tly_shm_close(s);
    free(s);
}

/* --- lending ------------------------------------------------------------------------------------- */

/* A place in our segment that no loan has; false: none. */
static bool find_place(const struct tly_shm *s, uint32_t length, uint64_t *from)
{
    const struct tly_list *n = &s->lent;
    uint64_t at = 0;
    do { /* first the beginning, then behind each loan in turn */
        bool taken = at > s->copies->size || length > s->copies->size - at;
        for (const struct tly_list *m = s->lent.next; m != &s->lent && !taken; m = m->next) {
            const struct tly_loan *other = tly_list_entry(m, struct tly_loan, node);
            taken = at < other->from + other->length && other->from < at + length;
        }
        if (!taken) {
            *from = at;
            return true;
        }
        n = n->next;
        const struct tly_loan *loan = tly_list_entry(n, struct tly_loan, node);
        if (n != &s->lent)
            at = (loan->from + loan->length + PLACE_ALIGN - 1) / PLACE_ALIGN * PLACE_ALIGN;
    } while (n != &s->lent);
    return false;
}

static bool make_copies(struct tly_shm *s, uint32_t length)
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

static struct tly_loan *lend(struct tly_shm *s, const struct tly_outgoing *o)
{
    const struct tly_frame *f = &o->frame;
    struct tly_loan *loan = o->whole ? make_loan((const uint8_t *)o->payload - f->offset, f->length)
                                     : make_loan(o->payload, f->payload);
    if (!loan)
        return NULL;
    loan->single = !o->whole;
    loan->token = o->token;
    if (s->here ? enter_table(loan) != 0
                : !make_copies(s, loan->length) || !find_place(s, loan->length, &loan->from)) {
        unref(loan);
        return NULL;
    }
    if (!s->here)
        loan->id = ++s->lent_ever;
    tly_list_append(&s->lent, &loan->node);
    s->lent_count++;
    return loan;
}

/* In one process the reader leaves a sign; nobody has to be told. */
static void sweep(struct tly_shm *s)
{
    for (struct tly_list *n = s->lent.next, *next; n != &s->lent; n = next) {
        next = n->next;
        struct tly_loan *loan = tly_list_entry(n, struct tly_loan, node);
        if (atomic_load_explicit(&loan->returned, memory_order_acquire)) {
            take_off(s, loan);
            unref(loan);
        }
    }
}

bool tly_shm_show(struct tly_shm *s, const struct tly_outgoing *o, uint8_t reference[TLY_REFERENCE_BYTES])
{
    const struct tly_frame *f = &o->frame;
    if (!o->stays || !f->payload || f->length < LEAST_SHOWN)
        return false;
    struct tly_loan *loan = o->whole && f->offset ? s->going_on : NULL;
    if (loan && (loan->token != o->token || loan->data + f->offset != (const uint8_t *)o->payload ||
                 loan->length != f->length))
        loan = NULL;
    if (!loan) {
        if (s->here)
            sweep(s);
        if (s->lent_count < MOST_LOANS)
            loan = lend(s, o);
        if (o->whole)
            s->going_on = loan;
    }
    if (!loan)
        return false;
    if (!s->here)
        memcpy(s->copies->data + loan->from + (o->whole ? f->offset : 0), o->payload, f->payload);
    tly_put64(reference, loan->id);
    tly_put32(reference + 8, 0); /* the one segment that we show */
    tly_put32(reference + 12, loan->single);
    tly_put64(reference + 16, loan->from);
    return true;
}

int tly_shm_detach(struct tly_shm *s, const void *token)
{
    int err = 0;
    for (struct tly_list *n = s->lent.next; n != &s->lent; n = n->next) {
        struct tly_loan *loan = tly_list_entry(n, struct tly_loan, node);
        if (loan->token != token)
            continue;
        loan->token = NULL;
        if (s->going_on == loan)
            s->going_on = NULL;
        if (!s->here || atomic_load_explicit(&loan->returned, memory_order_acquire))
            continue;
        uint8_t *copy = malloc(loan->length);
        if (!copy)
            err = -ENOMEM;
        move(loan, copy);
    }
    return err;
}

void tly_shm_returned(struct tly_shm *s, uint64_t id)
{
    for (struct tly_list *n = s->lent.next; n != &s->lent && !s->here; n = n->next) {
        struct tly_loan *loan = tly_list_entry(n, struct tly_loan, node);
        if (loan->id == id) {
            take_off(s, loan);
            unref(loan);
            return;
        }
    }
}

ssize_t tly_shm_send(struct tly_shm *s, int fd, struct msghdr *m, int flags)
{
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
    ssize_t r = sendmsg(fd, m, flags);
    if (r > 0 && passes)
        s->to_pass = false;
    return r;
}

/* --- reading ------------------------------------------------------------------------------------- */

/* A number for each descriptor, in the order in which they come, also for what cannot be mapped. */
static void take_segment(struct tly_shm *s, int fd)
{
    if (s->seen_count < MOST_SEGMENTS) {
        struct mapping *m = calloc(1, sizeof *m);
        if (m) {
            atomic_init(&m->references, 1);
            if (tly_shared_map(fd, false, &m->data, &m->size) != 0)
                m->data = NULL;
        }
        s->seen[s->seen_count++] = m;
    }
    close(fd);
}

ssize_t tly_shm_receive(struct tly_shm *s, int fd, const struct iovec *iov, int n)
{
    union {
        char bytes[CMSG_SPACE(MOST_PASSED * sizeof(int))];
        struct cmsghdr align;
    } control;
    struct msghdr m = {.msg_iov = (struct iovec *)iov,
                       .msg_iovlen = (size_t)n,
                       .msg_control = &control,
                       .msg_controllen = sizeof control};
    ssize_t r = recvmsg(fd, &m, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    for (struct cmsghdr *c = r < 0 ? NULL : CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); i++) {
            int passed;
            memcpy(&passed, CMSG_DATA(c) + i * sizeof passed, sizeof passed);
            take_segment(s, passed);
        }
    }
    return r;
}

/* A loan of another process: all of it is inside one of its segments. */
static struct tly_loan *borrow(struct tly_shm *s, const uint8_t *reference, const struct tly_frame *f)
{
    uint32_t number = tly_get32(reference + 8);
    bool single = tly_get32(reference + 12) != 0;
    uint64_t from = tly_get64(reference + 16);
    uint32_t length = single ? f->payload : f->length;
    struct mapping *m = number < s->seen_count ? s->seen[number] : NULL;
    if (!m || !m->data || length > m->size || from > m->size - length)
        return NULL;
    struct tly_loan *loan = make_loan((const uint8_t *)m->data + from, length);
    if (!loan)
        return NULL;
    loan->id = tly_get64(reference);
    loan->single = single;
    loan->mapping = m;
    atomic_fetch_add_explicit(&m->references, 1, memory_order_relaxed);
    loan->shm = s;
    tly_list_append(&s->read, &loan->node);
    return loan;
}

/* One that is coming in, or a new one; a reference. */
static int find_loan(struct tly_shm *s, const uint8_t *reference, const struct tly_frame *f,
                     struct tly_loan **out, const char **why)
{
    uint64_t id = tly_get64(reference);
    if (s->coming && s->coming->id == id) {
        *out = s->coming;
        atomic_fetch_add_explicit(&s->coming->references, 1, memory_order_relaxed);
        return 0;
    }
    struct tly_loan *loan = s->here ? look_up(id) : borrow(s, reference, f);
    if (!loan) {
        *why = s->here ? "connection ended" : "a payload outside of the memory that was shown";
        return s->here ? -ECONNRESET : -EPROTO;
    }
    if (!loan->single) {
        end_coming(s); /* parts come one after another: the one before was withdrawn */
        loan->open = true;
        s->coming = loan;
        atomic_fetch_add_explicit(&loan->references, 1, memory_order_relaxed);
    }
    *out = loan;
    return 0;
}

int tly_shm_resolve(struct tly_shm *s, const uint8_t reference[TLY_REFERENCE_BYTES],
                    const struct tly_frame *f, struct tly_loan **out, uint32_t *at, const char **why)
{
    struct tly_loan *loan;
    int err = find_loan(s, reference, f, &loan, why);
    if (err)
        return err;
    uint32_t from = loan->single ? 0 : f->offset;
    if (from > loan->length || f->payload > loan->length - from ||
        (!loan->single && f->length != loan->length)) {
        unref(loan);
        *why = "a payload that reaches past what was shown";
        return -EPROTO;
    }
    *out = loan;
    *at = from;
    return 0;
}

void tly_shm_done(struct tly_shm *s, struct tly_loan *loan, const struct tly_frame *f)
{
    if (loan->single)
        give_back(loan);
    else if (s->coming == loan && f->offset + f->payload == f->length)
        end_coming(s);
    unref(loan);
}

bool tly_loan_is_whole(const struct tly_loan *loan)
{
    return !loan->single;
}

bool tly_shm_next_return(struct tly_shm *s, uint64_t *id)
{
    if (tly_list_empty(&s->returns))
        return false;
    struct tly_loan *loan = tly_list_entry(tly_list_take(&s->returns), struct tly_loan, node);
    *id = loan->id;
    unref(loan);
    return true;
}
