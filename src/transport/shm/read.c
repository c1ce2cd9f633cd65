/* read.c - payloads that the other end shows: a reference becomes a loan, and what has been read is given back. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "transport/shm/shm.h"
#include "wire/pack.h"

enum { MOST_PASSED = 4 }; /* descriptors with one message */

void tly_shm_read_init(struct tly_shm_channel *s)
{
    tly_list_init(&s->read);
    tly_list_init(&s->returns);
}

static void shm_read_drop_mapping(struct tly_shm_mapping *m)
{
    if (!m || atomic_fetch_sub_explicit(&m->references, 1, memory_order_acq_rel) != 1)
        return;
    if (m->data)
        munmap(m->data, m->size);
    free(m);
}

/* Give back another process's loan: that process is told. */
static void shm_read_give_back(struct tly_loan *loan)
{
    struct tly_shm_channel *s = tly_shm_loan_of(loan)->channel;
    if (!s)
        return; /* the connection is no more: nobody waits for it */
    tly_list_remove(&loan->node);
    tly_list_append(&s->returns, &loan->node);
    tly_loan_ref(loan);
}

static void shm_read_finish(struct tly_loan *loan)
{
    shm_read_drop_mapping(tly_shm_loan_of(loan)->mapping);
}

/* The part that was coming in has no more frames. */
static void shm_read_end_coming(struct tly_shm_channel *s)
{
    struct tly_shm_loan *l = s->coming;
    if (!l)
        return;
    s->coming = NULL;
    tly_loan_end(&l->loan);
    tly_loan_unref(&l->loan);
}

void tly_shm_read_close(struct tly_shm_channel *s)
{
    shm_read_end_coming(s);
    while (!tly_list_empty(&s->read)) {
        struct tly_loan *loan = tly_list_entry(s->read.next, struct tly_loan, node);
        tly_list_remove(&loan->node);
        tly_shm_loan_of(loan)->channel = NULL;
    }
    for (uint64_t id; tly_shm_next_return(&s->stream.base, &id);)
        ;
    for (uint32_t i = 0; i < s->seen_count; i++)
        shm_read_drop_mapping(s->seen[i]);
    s->seen_count = 0;
}

/* A number for each descriptor, in the order in which they come, also for what cannot be mapped. */
static void shm_read_take_segment(struct tly_shm_channel *s, int fd)
{
    if (s->seen_count < TLY_SHM_SEGMENTS) {
        struct tly_shm_mapping *m = calloc(1, sizeof *m);
        if (m) {
            atomic_init(&m->references, 1);
            if (tly_shared_map(fd, false, &m->data, &m->size) != 0)
                m->data = NULL;
        }
        s->seen[s->seen_count++] = m;
    }
    close(fd);
}

ssize_t tly_shm_receive(struct tly_stream *stream, const struct iovec *iov, int n)
{
    struct tly_shm_channel *s = tly_shm_of(&stream->base);
    union {
        char bytes[CMSG_SPACE(MOST_PASSED * sizeof(int))];
        struct cmsghdr align;
    } control;
    struct msghdr m = {.msg_iov = (struct iovec *)iov,
                       .msg_iovlen = (size_t)n,
                       .msg_control = &control,
                       .msg_controllen = sizeof control};
    ssize_t r = s->drained ? tly_shm_take(s, iov, n) : 0;
    if (r > 0)
        return r;
    r = recvmsg(stream->watch.fd, &m, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (r <= 0 && s->inbox) {
        /* The mate has sent nothing through the socket since it became one. */
        s->drained = true;
        ssize_t taken = tly_shm_take(s, iov, n);
        return taken ? taken : r;
    }
    if (r > 0 && s->inbox)
        tly_loop_post(stream->loop, &stream->watch); /* the inbox comes behind that */
    for (struct cmsghdr *c = r < 0 ? NULL : CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); i++) {
            int passed;
            memcpy(&passed, CMSG_DATA(c) + i * sizeof passed, sizeof passed);
            shm_read_take_segment(s, passed);
        }
    }
    return r;
}

/* A loan of another process: all of it is inside one of its segments. */
static struct tly_shm_loan *shm_read_borrow(struct tly_shm_channel *s, const uint8_t *reference,
                                            const struct tly_frame *f)
{
    uint32_t number = tly_get32(reference + 8);
    bool single = tly_get32(reference + 12) != 0;
    uint64_t from = tly_get64(reference + 16);
    uint32_t length = single ? f->payload : f->length;
    struct tly_shm_mapping *m = number < s->seen_count ? s->seen[number] : NULL;
    if (!m || !m->data || length > m->size || from > m->size - length)
        return NULL;
    struct tly_loan *loan =
        tly_loan_create(sizeof(struct tly_shm_loan), (const uint8_t *)m->data + from, length);
    if (!loan)
        return NULL;
    struct tly_shm_loan *l = tly_shm_loan_of(loan);
    loan->id = tly_get64(reference);
    loan->single = single;
    loan->give_back = shm_read_give_back;
    loan->finish = shm_read_finish;
    l->mapping = m;
    atomic_fetch_add_explicit(&m->references, 1, memory_order_relaxed);
    l->channel = s;
    tly_list_append(&s->read, &loan->node);
    return l;
}

/* One that is coming in, or a new one; a reference. */
static int shm_read_find_loan(struct tly_shm_channel *s, const uint8_t *reference, const struct tly_frame *f,
                              struct tly_shm_loan **out, const char **why)
{
    uint64_t id = tly_get64(reference);
    if (s->coming && s->coming->loan.id == id) {
        *out = s->coming;
        tly_loan_ref(&s->coming->loan);
        return 0;
    }
    struct tly_shm_loan *l = s->here ? tly_shm_look_up(id) : shm_read_borrow(s, reference, f);
    if (!l) {
        *why = s->here ? "connection ended" : "a payload outside of the memory that was shown";
        return s->here ? -ECONNRESET : -EPROTO;
    }
    if (!l->loan.single) {
        shm_read_end_coming(s); /* parts come one after another: the one before was withdrawn */
        l->loan.open = true;
        s->coming = l;
        tly_loan_ref(&l->loan);
    }
    *out = l;
    return 0;
}

int tly_shm_resolve(struct tly_channel *c, const uint8_t reference[TLY_REFERENCE_BYTES],
                    const struct tly_frame *f, struct tly_loan **out, uint32_t *at, const char **why)
{
    struct tly_shm_loan *l;
    int err = shm_read_find_loan(tly_shm_of(c), reference, f, &l, why);
    if (err)
        return err;
    struct tly_loan *loan = &l->loan;
    uint32_t from = loan->single ? 0 : f->offset;
    if (from > loan->length || f->payload > loan->length - from ||
        (!loan->single && f->length != loan->length)) {
        tly_loan_unref(loan);
        *why = "a payload that reaches past what was shown";
        return -EPROTO;
    }
    *out = loan;
    *at = from;
    return 0;
}

void tly_shm_done(struct tly_channel *c, struct tly_loan *loan, const struct tly_frame *f)
{
    struct tly_shm_channel *s = tly_shm_of(c);
    if (loan->single)
        tly_loan_end(loan);
    else if (s->coming == tly_shm_loan_of(loan) && f->offset + f->payload == f->length)
        shm_read_end_coming(s);
    tly_loan_unref(loan);
}

bool tly_shm_next_return(struct tly_channel *c, uint64_t *id)
{
    struct tly_shm_channel *s = tly_shm_of(c);
    if (tly_list_empty(&s->returns))
        return false;
    struct tly_loan *loan = tly_list_entry(tly_list_take(&s->returns), struct tly_loan, node);
    *id = loan->id;
    tly_loan_unref(loan);
    return true;
}
