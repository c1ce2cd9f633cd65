/* calls.c - what clients ask the fake card. */
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include "test/rdma/fake_card/card.h"

void card_event(struct card_client *c, int type, uint32_t handle)
{
    struct fake_event e = {.type = (uint32_t)type, .handle = handle};
    if (write(c->events, &e, sizeof e) != sizeof e)
        return; /* nobody reads them, and the pipe is full */
}

void card_vanish(struct card_client *c)
{
    if (c->vanished)
        return;
    c->vanished = true;
    atomic_store(&c->page->vanished, 1);
    for (struct card_qp *q = c->qps; q; q = q->next)
        card_fail_qp(q);
    card_event(c, TLY_IBV_EVENT_DEVICE_FATAL, 0);
}

/* --- clients ---------------------------------------------------------------------------------------------------- */

static int calls_hello(struct card_client *c, const struct fake_request *q, int fds[3])
{
    uint32_t word;
    struct iovec to = {&word, sizeof word}, from = {(void *)(uintptr_t)q->at, sizeof word};
    c->page = mmap(NULL, sizeof *c->page, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
    c->bell = fds[1];
    c->events = fds[2];
    fds[1] = fds[2] = -1;
    if (c->page == MAP_FAILED)
        return errno;
    c->faults = q->faults;
    c->random = q->faults.seed;
    c->infiniband = q->infiniband;
    c->lid = q->lid;
    c->gids = q->gids;
    memcpy(c->gid, q->gid, sizeof c->gid);
    atomic_store(&c->page->down, q->faults.down);
    return process_vm_readv(c->pid, &to, 1, &from, 1, 0) == sizeof word ? 0 : errno;
}

static int calls_link(struct card_client *c, bool up)
{
    if (atomic_exchange(&c->page->down, !up) == up)
        card_event(c, up ? TLY_IBV_EVENT_PORT_ACTIVE : TLY_IBV_EVENT_PORT_ERR, 1);
    return 0;
}

/* --- PDs, MRs and channels -------------------------------------------------------------------------------------- */

static int calls_alloc_pd(struct card_client *c, struct fake_reply *out)
{
    struct card_pd *pd = calloc(1, sizeof *pd);
    if (!pd)
        return ENOMEM;
    out->handle = pd->handle = card_handle();
    pd->next = c->pds;
    c->pds = pd;
    return 0;
}

static struct card_pd *calls_pd(struct card_client *c, uint32_t handle)
{
    struct card_pd *pd = c->pds;
    while (pd && pd->handle != handle)
        pd = pd->next;
    return pd;
}

static int calls_dealloc_pd(struct card_client *c, uint32_t handle)
{
    struct card_pd *pd = calls_pd(c, handle);
    if (!pd)
        return EINVAL;
    for (struct card_mr *m = c->mrs; m; m = m->next)
        if (m->pd == handle)
            return EBUSY;
    for (struct card_qp *q = c->qps; q; q = q->next)
        if (q->pd == handle)
            return EBUSY;
    CARD_UNLINK(c->pds, pd);
    free(pd);
    return 0;
}

static int calls_reg_mr(struct card_client *c, const struct fake_request *q, struct fake_reply *out)
{
    struct card_mr *m = calls_pd(c, q->pd) ? calloc(1, sizeof *m) : NULL;
    if (!m)
        return EINVAL;
    *m = (struct card_mr){.handle = card_handle(),
                          .pd = q->pd,
                          .access = q->access,
                          .at = q->at,
                          .bytes = q->bytes,
                          .next = c->mrs};
    m->key = m->handle << 8 | (uint8_t)(m->handle * 37 + 11); /* no key is near another one */
    c->mrs = m;
    out->handle = m->handle;
    out->key = m->key;
    return 0;
}

static int calls_dereg_mr(struct card_client *c, uint32_t handle)
{
    struct card_mr *m = c->mrs;
    while (m && m->handle != handle)
        m = m->next;
    if (!m)
        return EINVAL;
    CARD_UNLINK(c->mrs, m);
    free(m);
    return 0;
}

static int calls_create_channel(struct card_client *c, int *fd, struct fake_reply *out)
{
    struct card_channel *h = calloc(1, sizeof *h);
    if (!h)
        return ENOMEM;
    *h = (struct card_channel){.handle = card_handle(), .fd = *fd, .next = c->channels};
    *fd = -1;
    c->channels = h;
    out->handle = h->handle;
    return 0;
}

static int calls_destroy_channel(struct card_client *c, uint32_t handle)
{
    struct card_channel *h = c->channels;
    while (h && h->handle != handle)
        h = h->next;
    if (!h)
        return EINVAL;
    CARD_UNLINK(c->channels, h);
    close(h->fd);
    free(h);
    return 0;
}

/* --- CQs and QPs ------------------------------------------------------------------------------------------------ */

static struct card_cq *calls_cq(struct card_client *c, uint32_t handle)
{
    struct card_cq *cq = c->cqs;
    while (cq && cq->handle != handle)
        cq = cq->next;
    return cq;
}

static struct card_qp *calls_qp(struct card_client *c, uint32_t number)
{
    struct card_qp *q = c->qps;
    while (q && q->number != number)
        q = q->next;
    return q;
}

static void *calls_map(const struct fake_request *q, int fd)
{
    void *at = mmap(NULL, q->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return at == MAP_FAILED ? NULL : at;
}

static int calls_create_cq(struct card_client *c, const struct fake_request *q, int fd,
                           struct fake_reply *out)
{
    struct card_cq *cq = calloc(1, sizeof *cq);
    struct card_channel *h = c->channels;
    while (h && h->handle != q->channel)
        h = h->next;
    if (!cq || !(cq->ring = calls_map(q, fd)) || (q->channel && !h)) {
        free(cq);
        return EINVAL;
    }
    cq->mapped = q->bytes;
    cq->client = c;
    cq->channel = h;
    cq->handle = out->handle = card_handle();
    cq->next = c->cqs;
    c->cqs = cq;
    return 0;
}

static int calls_destroy_cq(struct card_client *c, uint32_t handle)
{
    struct card_cq *cq = calls_cq(c, handle);
    if (!cq)
        return EINVAL;
    CARD_UNLINK(c->cqs, cq);
    munmap(cq->ring, cq->mapped);
    free(cq);
    return 0;
}

static int calls_create_qp(struct card_client *c, const struct fake_request *q, int fd,
                           struct fake_reply *out)
{
    struct card_cq *send_cq = calls_cq(c, q->send_cq), *recv_cq = calls_cq(c, q->recv_cq);
    struct card_qp *qp = calls_pd(c, q->pd) && send_cq && recv_cq ? calloc(1, sizeof *qp) : NULL;
    if (!qp || !(qp->ring = calls_map(q, fd))) {
        free(qp);
        return EINVAL;
    }
    qp->mapped = q->bytes;
    qp->client = c;
    qp->pd = q->pd;
    qp->sig_all = q->sig_all;
    qp->send_cq = send_cq;
    qp->recv_cq = recv_cq;
    qp->number = out->handle = card_handle();
    qp->next = c->qps;
    c->qps = qp;
    return 0;
}

static int calls_destroy_qp(struct card_client *c, uint32_t number)
{
    struct card_qp *q = calls_qp(c, number);
    if (!q)
        return EINVAL;
    CARD_UNLINK(c->qps, q);
    munmap(q->ring, q->mapped);
    free(q);
    return 0;
}

void card_finish(struct card_client *c)
{
    while (c->qps)
        calls_destroy_qp(c, c->qps->number);
    while (c->cqs)
        calls_destroy_cq(c, c->cqs->handle);
    while (c->channels)
        calls_destroy_channel(c, c->channels->handle);
    while (c->mrs)
        calls_dereg_mr(c, c->mrs->handle);
    while (c->pds)
        calls_dealloc_pd(c, c->pds->handle);
    if (c->page)
        munmap(c->page, sizeof *c->page);
    close(c->bell);
    close(c->events);
}

/* --- requests --------------------------------------------------------------------------------------------------- */

/* What a device that has vanished still does: the kernel itself cleans up. */
static bool calls_cleans_up(uint32_t type)
{
    return type == FAKE_DESTROY_QP || type == FAKE_DESTROY_CQ || type == FAKE_DESTROY_CHANNEL ||
           type == FAKE_DEREG_MR || type == FAKE_DEALLOC_PD || type == FAKE_FAULTS || type == FAKE_VANISH;
}

static int calls_answer(struct card_client *c, const struct fake_request *q, int fds[3],
                        struct fake_reply *out)
{
    struct card_qp *qp;
    if (c->vanished && !calls_cleans_up(q->type))
        return EIO;
    switch (q->type) {
    case FAKE_HELLO:
        return calls_hello(c, q, fds);
    case FAKE_FAULTS:
        c->faults = q->faults;
        c->random = q->faults.seed;
        c->works = 0;
        return 0;
    case FAKE_VANISH:
        card_vanish(c);
        return 0;
    case FAKE_LINK:
        return calls_link(c, q->mask);
    case FAKE_ALLOC_PD:
        return calls_alloc_pd(c, out);
    case FAKE_DEALLOC_PD:
        return calls_dealloc_pd(c, q->handle);
    case FAKE_REG_MR:
        return calls_reg_mr(c, q, out);
    case FAKE_DEREG_MR:
        return calls_dereg_mr(c, q->handle);
    case FAKE_CREATE_CHANNEL:
        return calls_create_channel(c, &fds[0], out);
    case FAKE_DESTROY_CHANNEL:
        return calls_destroy_channel(c, q->handle);
    case FAKE_CREATE_CQ:
        return calls_create_cq(c, q, fds[0], out);
    case FAKE_DESTROY_CQ:
        return calls_destroy_cq(c, q->handle);
    case FAKE_CREATE_QP:
        return calls_create_qp(c, q, fds[0], out);
    case FAKE_MODIFY_QP:
        qp = calls_qp(c, q->number);
        return qp ? card_modify(qp, &q->attr, q->mask) : EINVAL;
    case FAKE_DESTROY_QP:
        return calls_destroy_qp(c, q->handle);
    }
    return ENOSYS;
}

int card_answer(struct card_client *c, const struct fake_request *q, int fds[3], struct fake_reply *out)
{
    int err = calls_answer(c, q, fds, out);
    for (int i = 0; i < 3; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    return err;
}
