/* posts.c - work requests into the rings, completions out of them. */
#include <errno.h>
#include <stdlib.h>

#include "test/rdma/fake_verbs/library.h"

enum { PURGED = 2 }; /* fake_cqe.receive */

static int posts_fill_inline(const struct fake_qp *qp, const struct tly_ibv_send_wr *wr, struct fake_slot *s)
{
    uint32_t bytes = 0;
    for (int i = 0; i < wr->num_sge; i++) {
        if (wr->sg_list[i].length > qp->cap.max_inline_data - bytes)
            return EINVAL;
        memcpy(s->bytes + bytes, (void *)(uintptr_t)wr->sg_list[i].addr, wr->sg_list[i].length);
        bytes += wr->sg_list[i].length;
    }
    s->inline_bytes = bytes;
    return 0;
}

static int posts_fill(const struct fake_qp *qp, const struct tly_ibv_send_wr *wr, struct fake_slot *s)
{
    if (wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->cap.max_send_sge ||
        wr->opcode > TLY_IBV_WR_SEND_WITH_IMM)
        return EINVAL;
    *s = (struct fake_slot){.wr_id = wr->wr_id,
                            .remote_addr = wr->wr.rdma.remote_addr,
                            .opcode = (uint32_t)wr->opcode,
                            .flags = wr->send_flags,
                            .imm = wr->imm_data,
                            .rkey = wr->wr.rdma.rkey,
                            .sges = (uint32_t)wr->num_sge};
    if (wr->send_flags & TLY_IBV_SEND_INLINE)
        return posts_fill_inline(qp, wr, s);
    for (int i = 0; i < wr->num_sge; i++)
        s->sge[i] = wr->sg_list[i];
    return 0;
}

static int posts_send(struct tly_ibv_qp *base, struct tly_ibv_send_wr *wr, struct tly_ibv_send_wr **bad)
{
    struct fake_qp *qp = (struct fake_qp *)base;
    struct fake_qp_ring *r = qp->ring;
    int err = fake_fails("post_send");
    fake_add(FAKE_SEND_POSTS, 1);
    if (!err && base->state < TLY_IBV_QPS_RTS)
        err = EINVAL;
    pthread_mutex_lock(&qp->send_lock);
    uint32_t head = atomic_load(&r->sq_head), first = head;
    for (; !err && wr; wr = wr->next) {
        if (head - atomic_load(&qp->sq_tail) >= r->sq_size)
            err = ENOMEM;
        else if (!(err = posts_fill(qp, wr, &r->slot[head % r->sq_size])))
            head++;
        if (err)
            break;
    }
    if (err)
        *bad = wr;
    atomic_store_explicit(&r->sq_head, head, memory_order_release);
    pthread_mutex_unlock(&qp->send_lock);
    fake_add(FAKE_SENDS, head - first);
    if (head != first)
        fake_ring(fake_context_of(base->context));
    return err;
}

static int posts_receive(struct tly_ibv_qp *base, struct tly_ibv_recv_wr *wr, struct tly_ibv_recv_wr **bad)
{
    struct fake_qp *qp = (struct fake_qp *)base;
    struct fake_qp_ring *r = qp->ring;
    int err = fake_fails("post_recv");
    fake_add(FAKE_RECV_POSTS, 1);
    if (!err && base->state == TLY_IBV_QPS_RESET)
        err = EINVAL;
    pthread_mutex_lock(&qp->recv_lock);
    uint32_t head = atomic_load(&r->rq_head), first = head;
    for (; !err && wr; wr = wr->next) {
        if (head - atomic_load(&qp->rq_tail) >= r->rq_size)
            err = ENOMEM;
        else if (wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->cap.max_recv_sge)
            err = EINVAL;
        if (err)
            break;
        struct fake_slot *s = &r->slot[r->sq_size + head++ % r->rq_size];
        *s = (struct fake_slot){.wr_id = wr->wr_id, .sges = (uint32_t)wr->num_sge};
        for (int i = 0; i < wr->num_sge; i++)
            s->sge[i] = wr->sg_list[i];
    }
    if (err)
        *bad = wr;
    atomic_store_explicit(&r->rq_head, head, memory_order_release);
    pthread_mutex_unlock(&qp->recv_lock);
    fake_add(FAKE_RECVS, head - first);
    if (head != first)
        fake_ring(fake_context_of(base->context)); /* of a queue pair in error they are flushed */
    return err;
}

/* Take a completion: its slot, and those before it, are free. */
static void posts_take(struct fake_context *c, const struct fake_cqe *e, struct tly_ibv_wc *out)
{
    *out = e->wc;
    pthread_mutex_lock(&c->lock);
    for (struct fake_qp *qp = c->qps; qp; qp = qp->next)
        if (qp->base.qp_num == e->wc.qp_num)
            atomic_store(e->receive ? &qp->rq_tail : &qp->sq_tail, e->slot + 1);
    pthread_mutex_unlock(&c->lock);
    if (e->wc.status != TLY_IBV_WC_SUCCESS)
        fake_add(FAKE_ERRORS, 1);
}

static int posts_poll(struct tly_ibv_cq *base, int most, struct tly_ibv_wc *out)
{
    struct fake_cq *cq = (struct fake_cq *)base;
    struct fake_cq_ring *r = cq->ring;
    int n = 0;
    if (fake_fails("poll_cq"))
        return -1;
    pthread_mutex_lock(&cq->lock);
    uint32_t tail = atomic_load(&r->tail);
    for (; n < most && tail != atomic_load_explicit(&r->head, memory_order_acquire); tail++) {
        const struct fake_cqe *e = &r->entry[tail % r->size];
        if (e->receive != PURGED)
            posts_take(fake_context_of(base->context), e, &out[n++]);
    }
    atomic_store_explicit(&r->tail, tail, memory_order_release);
    pthread_mutex_unlock(&cq->lock);
    fake_add(FAKE_POLLS, 1);
    fake_add(FAKE_COMPLETIONS, n);
    if (n)
        fake_collect(fake_context_of(base->context));
    return n;
}

static int posts_notify(struct tly_ibv_cq *cq, int solicited_only)
{
    int err = fake_fails("req_notify_cq");
    if (!err)
        atomic_store(&((struct fake_cq *)cq)->ring->armed, solicited_only ? 2 : 1);
    return err;
}

void fake_purge(struct tly_ibv_cq *base, uint32_t number)
{
    struct fake_cq *cq = (struct fake_cq *)base;
    pthread_mutex_lock(&cq->lock);
    for (uint32_t i = atomic_load(&cq->ring->tail); i != atomic_load(&cq->ring->head); i++)
        if (cq->ring->entry[i % cq->ring->size].wc.qp_num == number)
            cq->ring->entry[i % cq->ring->size].receive = PURGED;
    pthread_mutex_unlock(&cq->lock);
}

void fake_reset_qp(struct fake_qp *qp)
{
    atomic_store(&qp->sq_tail, atomic_load(&qp->ring->sq_head));
    atomic_store(&qp->rq_tail, atomic_load(&qp->ring->rq_head));
}

void fake_fill_ops(struct tly_ibv_context *c)
{
    c->ops.poll_cq = posts_poll;
    c->ops.req_notify_cq = posts_notify;
    c->ops.post_send = posts_send;
    c->ops.post_recv = posts_receive;
}

EXPORT const char *ibv_wc_status_str(int status)
{
    static const char *const names[] = {
        [TLY_IBV_WC_SUCCESS] = "success",
        [TLY_IBV_WC_LOC_LEN_ERR] = "local length error",
        [TLY_IBV_WC_LOC_QP_OP_ERR] = "local QP operation error",
        [TLY_IBV_WC_LOC_PROT_ERR] = "local protection error",
        [TLY_IBV_WC_WR_FLUSH_ERR] = "Work Request Flushed Error",
        [TLY_IBV_WC_LOC_ACCESS_ERR] = "local access error",
        [TLY_IBV_WC_REM_INV_REQ_ERR] = "remote invalid request error",
        [TLY_IBV_WC_REM_ACCESS_ERR] = "remote access error",
        [TLY_IBV_WC_REM_OP_ERR] = "remote operation error",
        [TLY_IBV_WC_RETRY_EXC_ERR] = "transport retry counter exceeded",
        [TLY_IBV_WC_RNR_RETRY_EXC_ERR] = "RNR retry counter exceeded",
        [TLY_IBV_WC_FATAL_ERR] = "fatal error",
        [TLY_IBV_WC_GENERAL_ERR] = "general error",
    };
    const char *name = status >= 0 && status <= TLY_IBV_WC_GENERAL_ERR ? names[status] : NULL;
    return name ? name : "unknown";
}

EXPORT const char *ibv_event_type_str(int type)
{
    static const char *const names[] = {
        [TLY_IBV_EVENT_CQ_ERR] = "CQ error",
        [TLY_IBV_EVENT_QP_FATAL] = "local work queue catastrophic error",
        [TLY_IBV_EVENT_QP_REQ_ERR] = "invalid request local work queue error",
        [TLY_IBV_EVENT_QP_ACCESS_ERR] = "local access violation work queue error",
        [TLY_IBV_EVENT_COMM_EST] = "communication established",
        [TLY_IBV_EVENT_DEVICE_FATAL] = "local catastrophic error",
        [TLY_IBV_EVENT_PORT_ACTIVE] = "port active",
        [TLY_IBV_EVENT_PORT_ERR] = "port error",
        [TLY_IBV_EVENT_GID_CHANGE] = "GID change",
    };
    const char *name = type >= 0 && type <= TLY_IBV_EVENT_GID_CHANGE ? names[type] : NULL;
    return name ? name : "unknown";
}
