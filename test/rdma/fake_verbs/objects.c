/* objects.c - PDs, MRs, completion channels, CQs and QPs: the library's side. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "test/rdma/fake_verbs/library.h"

/* A request to create, to which `fd` (-1: none) goes along.  Returns 0 or errno, which it also sets. */
static int objects_create(struct fake_context *c, const char *call, struct fake_request *q, int fd,
                          struct fake_reply *out)
{
    errno = fake_fails(call);
    if (!errno)
        errno = fake_call(c, q, &fd, fd >= 0, out);
    return errno;
}

/* A request to destroy.  The kernel destroys objects of a device that has vanished, too. */
static int objects_destroy(struct fake_context *c, const char *call, uint32_t type, uint32_t handle)
{
    int code = fake_fails(call);
    return code ? code : fake_call(c, &(struct fake_request){.type = type, .handle = handle}, NULL, 0, NULL);
}

/* A ring in shared memory, with a descriptor for the card. */
static void *objects_ring(size_t bytes, int *fd)
{
    *fd = memfd_create("fake_ring", MFD_CLOEXEC);
    if (*fd < 0 || ftruncate(*fd, (off_t)bytes) != 0)
        fake_die("no ring: %s", strerror(errno));
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    if (at == MAP_FAILED)
        fake_die("no ring: %s", strerror(errno));
    return at;
}

static void objects_add(struct fake_context *c, int *counter, int n)
{
    pthread_mutex_lock(&c->lock);
    *counter += n;
    pthread_mutex_unlock(&c->lock);
}

/* --- PDs and MRs ------------------------------------------------------------------------------------------------ */

EXPORT struct tly_ibv_pd *ibv_alloc_pd(struct tly_ibv_context *context)
{
    struct fake_context *c = fake_context_of(context);
    struct fake_request q = {.type = FAKE_ALLOC_PD};
    struct fake_reply reply;
    struct tly_ibv_pd *pd = calloc(1, sizeof *pd);
    if (!pd || objects_create(c, "ibv_alloc_pd", &q, -1, &reply) != 0) {
        free(pd);
        return NULL;
    }
    *pd = (struct tly_ibv_pd){.context = context, .handle = reply.handle};
    objects_add(c, &c->pds, 1);
    return pd;
}

EXPORT int ibv_dealloc_pd(struct tly_ibv_pd *pd)
{
    struct fake_context *c = fake_context_of(pd->context);
    int err = objects_destroy(c, "ibv_dealloc_pd", FAKE_DEALLOC_PD, pd->handle);
    if (err)
        return err;
    objects_add(c, &c->pds, -1);
    free(pd);
    return 0;
}

static uint64_t objects_pages(const void *at, size_t bytes)
{
    uint64_t first = (uintptr_t)at & ~4095ull, end = ((uintptr_t)at + bytes + 4095) & ~4095ull;
    return end - first;
}

/* Are all pages there?  The kernel pins them. */
static bool objects_mapped(const void *at, size_t bytes)
{
    char *first = (char *)((uintptr_t)at & ~4095ull);
    unsigned char there[1024];
    for (uint64_t left = objects_pages(at, bytes); left;) {
        uint64_t n = left < 1024 * 4096 ? left : 1024 * 4096;
        if (mincore(first, n, there) != 0)
            return false;
        first += n;
        left -= n;
    }
    return true;
}

static void objects_let_fork(const struct tly_ibv_mr *mr, int advice)
{
    void *first = (void *)((uintptr_t)mr->addr & ~4095ull);
    if (fake_settings()->dontfork && madvise(first, objects_pages(mr->addr, mr->length), advice) != 0)
        fake_die("madvise: %s", strerror(errno));
}

EXPORT struct tly_ibv_mr *ibv_reg_mr(struct tly_ibv_pd *pd, void *at, size_t bytes, int access)
{
    struct fake_context *c = fake_context_of(pd->context);
    struct fake_request q = {
        .type = FAKE_REG_MR, .pd = pd->handle, .at = (uintptr_t)at, .bytes = bytes, .access = access};
    struct fake_reply reply;
    uint64_t pages = objects_pages(at, bytes);
    struct tly_ibv_mr *mr = calloc(1, sizeof *mr);
    errno = !mr                                                       ? ENOMEM
            : !bytes || (access & ~15)                                ? EINVAL
            : (access & 10) && !(access & TLY_IBV_ACCESS_LOCAL_WRITE) ? EINVAL /* remote writes, atomics */
            : !objects_mapped(at, bytes)                              ? EFAULT
            : fake_own_count(FAKE_REGISTERED) + pages > fake_settings()->memlock
                ? ENOMEM
                : 0;
    if (errno || objects_create(c, "ibv_reg_mr", &q, -1, &reply) != 0) {
        free(mr);
        return NULL;
    }
    *mr = (struct tly_ibv_mr){.context = pd->context,
                              .pd = pd,
                              .addr = at,
                              .length = bytes,
                              .handle = reply.handle,
                              .lkey = reply.key,
                              .rkey = access & TLY_IBV_ACCESS_REMOTE_WRITE ? reply.key : 0};
    objects_let_fork(mr, MADV_DONTFORK);
    objects_add(c, &c->mrs, 1);
    fake_add(FAKE_REGISTERED, (int64_t)pages);
    fake_add(FAKE_REGISTRATIONS, 1);
    return mr;
}

EXPORT int ibv_dereg_mr(struct tly_ibv_mr *mr)
{
    struct fake_context *c = fake_context_of(mr->context);
    int err = objects_destroy(c, "ibv_dereg_mr", FAKE_DEREG_MR, mr->handle);
    if (err)
        return err;
    objects_let_fork(mr, MADV_DOFORK);
    objects_add(c, &c->mrs, -1);
    fake_add(FAKE_REGISTERED, -(int64_t)objects_pages(mr->addr, mr->length));
    free(mr);
    return 0;
}

/* --- channels and CQs ------------------------------------------------------------------------------------------- */

EXPORT struct tly_ibv_comp_channel *ibv_create_comp_channel(struct tly_ibv_context *context)
{
    struct fake_context *c = fake_context_of(context);
    struct fake_request q = {.type = FAKE_CREATE_CHANNEL};
    struct fake_reply reply;
    struct fake_channel *h = calloc(1, sizeof *h);
    int ends[2];
    if (!h || pipe2(ends, O_CLOEXEC) != 0) {
        free(h);
        return NULL;
    }
    int err = objects_create(c, "ibv_create_comp_channel", &q, ends[1], &reply);
    close(ends[1]);
    if (err) {
        close(ends[0]);
        free(h);
        errno = err;
        return NULL;
    }
    h->base = (struct tly_ibv_comp_channel){.context = context, .fd = ends[0]};
    h->handle = reply.handle;
    objects_add(c, &c->channels, 1);
    return &h->base;
}

EXPORT int ibv_destroy_comp_channel(struct tly_ibv_comp_channel *channel)
{
    struct fake_context *c = fake_context_of(channel->context);
    struct fake_channel *h = (struct fake_channel *)channel;
    int err = channel->refcnt
                  ? EBUSY
                  : objects_destroy(c, "ibv_destroy_comp_channel", FAKE_DESTROY_CHANNEL, h->handle);
    if (err)
        return err;
    objects_add(c, &c->channels, -1);
    close(channel->fd);
    free(h);
    return 0;
}

EXPORT struct tly_ibv_cq *ibv_create_cq(struct tly_ibv_context *context, int entries, void *cq_context,
                                        struct tly_ibv_comp_channel *channel, int vector)
{
    struct fake_context *c = fake_context_of(context);
    struct fake_request q = {.type = FAKE_CREATE_CQ};
    struct fake_reply reply;
    if (entries < 1 || entries > fake_settings()->cqe || vector < 0 || vector >= context->num_comp_vectors) {
        errno = EINVAL;
        return NULL;
    }
    struct fake_cq *cq = calloc(1, sizeof *cq);
    int fd;
    if (!cq)
        return NULL;
    cq->mapped = sizeof *cq->ring + (size_t)entries * sizeof *cq->ring->entry;
    cq->ring = objects_ring(cq->mapped, &fd);
    cq->ring->size = (uint32_t)entries;
    q.channel = channel ? ((struct fake_channel *)channel)->handle : 0;
    q.bytes = cq->mapped;
    int err = objects_create(c, "ibv_create_cq", &q, fd, &reply);
    close(fd);
    if (err) {
        munmap(cq->ring, cq->mapped);
        free(cq);
        errno = err;
        return NULL;
    }
    cq->base = (struct tly_ibv_cq){.context = context,
                                   .channel = channel,
                                   .cq_context = cq_context,
                                   .handle = reply.handle,
                                   .cqe = entries};
    pthread_mutex_init(&cq->lock, NULL);
    pthread_mutex_lock(&c->lock);
    if (channel)
        channel->refcnt++;
    cq->next = c->cqs;
    c->cqs = cq;
    pthread_mutex_unlock(&c->lock);
    return &cq->base;
}

EXPORT int ibv_destroy_cq(struct tly_ibv_cq *base)
{
    struct fake_context *c = fake_context_of(base->context);
    struct fake_cq *cq = (struct fake_cq *)base, **at = &c->cqs;
    int err = cq->users ? EBUSY : objects_destroy(c, "ibv_destroy_cq", FAKE_DESTROY_CQ, base->handle);
    if (err)
        return err;
    if (cq->got_events != base->comp_events_completed)
        fake_die("ibv_destroy_cq would wait for ever: %u of %u events are acknowledged",
                 base->comp_events_completed, cq->got_events);
    pthread_mutex_lock(&c->lock);
    if (base->channel)
        base->channel->refcnt--;
    while (*at != cq)
        at = &(*at)->next;
    *at = cq->next;
    pthread_mutex_unlock(&c->lock);
    pthread_mutex_destroy(&cq->lock);
    munmap(cq->ring, cq->mapped);
    free(cq);
    return 0;
}

EXPORT int ibv_get_cq_event(struct tly_ibv_comp_channel *channel, struct tly_ibv_cq **out, void **cq_context)
{
    struct fake_context *c = fake_context_of(channel->context);
    struct fake_event e;
    bool found = false;
    while (!found) { /* events of a CQ that was destroyed have gone with it */
        if (read(channel->fd, &e, sizeof e) != sizeof e)
            return -1;
        pthread_mutex_lock(&c->lock);
        for (struct fake_cq *cq = c->cqs; cq && !found; cq = cq->next)
            if ((found = cq->base.handle == e.handle)) {
                cq->got_events++;
                *out = &cq->base;
                *cq_context = cq->base.cq_context;
            }
        pthread_mutex_unlock(&c->lock);
    }
    fake_add(FAKE_WAKES, 1);
    return 0;
}

EXPORT void ibv_ack_cq_events(struct tly_ibv_cq *cq, unsigned events)
{
    struct fake_context *c = fake_context_of(cq->context);
    pthread_mutex_lock(&c->lock);
    cq->comp_events_completed += events;
    if (cq->comp_events_completed > ((struct fake_cq *)cq)->got_events)
        fake_die("more events are acknowledged than have been got");
    pthread_mutex_unlock(&c->lock);
}

/* --- QPs -------------------------------------------------------------------------------------------------------- */

static int objects_check_qp(const struct tly_ibv_pd *pd, const struct tly_ibv_qp_init_attr *a)
{
    const struct fake_settings *s = fake_settings();
    bool good = a->qp_type == TLY_IBV_QPT_RC && !a->srq && a->send_cq && a->recv_cq &&
                a->send_cq->context == pd->context && a->recv_cq->context == pd->context &&
                a->cap.max_send_wr <= (uint32_t)s->wr && a->cap.max_recv_wr <= (uint32_t)s->wr &&
                a->cap.max_send_sge <= FAKE_SGES && a->cap.max_recv_sge <= FAKE_SGES &&
                a->cap.max_inline_data <= (uint32_t)s->inline_bytes;
    return good ? 0 : EINVAL;
}

static void objects_use_cqs(struct fake_qp *qp, int n)
{
    ((struct fake_cq *)qp->base.send_cq)->users += n;
    ((struct fake_cq *)qp->base.recv_cq)->users += n;
}

EXPORT struct tly_ibv_qp *ibv_create_qp(struct tly_ibv_pd *pd, struct tly_ibv_qp_init_attr *a)
{
    struct fake_context *c = fake_context_of(pd->context);
    struct fake_reply reply;
    int fd;
    errno = objects_check_qp(pd, a);
    struct fake_qp *qp = errno ? NULL : calloc(1, sizeof *qp);
    if (!qp)
        return NULL;
    size_t slots = (size_t)a->cap.max_send_wr + a->cap.max_recv_wr;
    qp->mapped = sizeof *qp->ring + slots * sizeof *qp->ring->slot;
    qp->ring = objects_ring(qp->mapped, &fd);
    qp->ring->sq_size = a->cap.max_send_wr;
    qp->ring->rq_size = a->cap.max_recv_wr;
    struct fake_request q = {.type = FAKE_CREATE_QP,
                             .pd = pd->handle,
                             .send_cq = a->send_cq->handle,
                             .recv_cq = a->recv_cq->handle,
                             .sig_all = a->sq_sig_all,
                             .bytes = qp->mapped};
    int err = objects_create(c, "ibv_create_qp", &q, fd, &reply);
    close(fd);
    if (err) {
        munmap(qp->ring, qp->mapped);
        free(qp);
        errno = err;
        return NULL;
    }
    qp->base = (struct tly_ibv_qp){
        .context = pd->context,
        .qp_context = a->qp_context,
        .pd = pd,
        .send_cq = a->send_cq,
        .recv_cq = a->recv_cq,
        .handle = reply.handle,
        .qp_num = reply.handle,
        .qp_type = a->qp_type};
    qp->cap = a->cap;
    pthread_mutex_init(&qp->send_lock, NULL);
    pthread_mutex_init(&qp->recv_lock, NULL);
    pthread_mutex_lock(&c->lock);
    objects_use_cqs(qp, 1);
    qp->next = c->qps;
    c->qps = qp;
    pthread_mutex_unlock(&c->lock);
    return &qp->base;
}

EXPORT int ibv_modify_qp(struct tly_ibv_qp *qp, struct tly_ibv_qp_attr *a, int mask)
{
    struct fake_request q = {.type = FAKE_MODIFY_QP, .number = qp->qp_num, .mask = mask, .attr = *a};
    int err = fake_fails("ibv_modify_qp");
    if (!err && (mask & TLY_IBV_QP_PATH_MTU) && a->path_mtu > fake_context_of(qp->context)->device->mtu)
        err = EINVAL;
    if (!err)
        err = fake_call(fake_context_of(qp->context), &q, NULL, 0, NULL);
    if (!err && (mask & TLY_IBV_QP_STATE))
        qp->state = a->qp_state;
    if (!err && (mask & TLY_IBV_QP_STATE) && a->qp_state == TLY_IBV_QPS_RESET)
        fake_reset_qp((struct fake_qp *)qp);
    return err;
}

EXPORT int ibv_destroy_qp(struct tly_ibv_qp *base)
{
    struct fake_context *c = fake_context_of(base->context);
    struct fake_qp *qp = (struct fake_qp *)base, **at = &c->qps;
    int err = objects_destroy(c, "ibv_destroy_qp", FAKE_DESTROY_QP, base->qp_num);
    if (err)
        return err;
    if (qp->got_events != base->events_completed)
        fake_die("ibv_destroy_qp would wait for ever: %u of %u events are acknowledged",
                 base->events_completed, qp->got_events);
    if (fake_settings()->faults.purge) {
        fake_purge(base->send_cq, base->qp_num);
        fake_purge(base->recv_cq, base->qp_num);
    }
    pthread_mutex_lock(&c->lock);
    objects_use_cqs(qp, -1);
    while (*at != qp)
        at = &(*at)->next;
    *at = qp->next;
    pthread_mutex_unlock(&c->lock);
    pthread_mutex_destroy(&qp->send_lock);
    pthread_mutex_destroy(&qp->recv_lock);
    munmap(qp->ring, qp->mapped);
    free(qp);
    return 0;
}
