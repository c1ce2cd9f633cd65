/* queues.c - completions, and the states of queue pairs. */
#include <errno.h>
#include <unistd.h>

#include "test/rdma/fake_card/card.h"

/* --- completions ------------------------------------------------------------------------------------------------ */

static void queues_overrun(struct card_cq *cq)
{
    cq->overrun = true;
    card_event(cq->client, TLY_IBV_EVENT_CQ_ERR, cq->handle);
    for (struct card_qp *q = cq->client->qps; q; q = q->next)
        if (q->send_cq == cq || q->recv_cq == cq)
            card_fail_qp(q);
}

void card_complete(struct card_cq *cq, const struct fake_cqe *e, bool solicited)
{
    struct fake_cq_ring *r = cq->ring;
    uint32_t head = atomic_load(&r->head);
    if (cq->overrun)
        return;
    if (head - atomic_load_explicit(&r->tail, memory_order_acquire) >= r->size) {
        queues_overrun(cq);
        return;
    }
    struct fake_cqe *to = &r->entry[head % r->size];
    *to = *e;
    if (e->wc.status != TLY_IBV_WC_SUCCESS) { /* undefined, so: */
        to->wc.opcode = 0x7eadbeef;
        to->wc.byte_len = to->wc.imm_data = to->wc.wc_flags = 0x7eadbeef;
        solicited = true;
    }
    atomic_store_explicit(&r->head, head + 1, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    uint32_t armed = atomic_load(&r->armed);
    if (!armed || (armed == 2 && !solicited) || !atomic_exchange(&r->armed, 0) || !cq->channel)
        return;
    struct fake_event event = {.handle = cq->handle};
    if (write(cq->channel->fd, &event, sizeof event) != sizeof event)
        return; /* its process has died and left the pipe to a child, or reads no events */
}

/* --- states ----------------------------------------------------------------------------------------------------- */

void card_fail_qp(struct card_qp *q)
{
    if (q->state != TLY_IBV_QPS_RESET)
        q->state = TLY_IBV_QPS_ERR;
}

static void queues_reset(struct card_qp *q)
{
    q->state = TLY_IBV_QPS_RESET;
    q->sq_at = atomic_load(&q->ring->sq_head);
    q->rq_at = atomic_load(&q->ring->rq_head);
    q->begun = q->done = q->heard = false;
}

enum {
    STATE = TLY_IBV_QP_STATE,
    INIT_WANTS = STATE | TLY_IBV_QP_PKEY_INDEX | TLY_IBV_QP_PORT | TLY_IBV_QP_ACCESS_FLAGS,
    RTR_WANTS = STATE | TLY_IBV_QP_AV | TLY_IBV_QP_PATH_MTU | TLY_IBV_QP_DEST_QPN | TLY_IBV_QP_RQ_PSN |
                TLY_IBV_QP_MAX_DEST_RD_ATOMIC | TLY_IBV_QP_MIN_RNR_TIMER,
    RTS_WANTS = STATE | TLY_IBV_QP_TIMEOUT | TLY_IBV_QP_RETRY_CNT | TLY_IBV_QP_RNR_RETRY | TLY_IBV_QP_SQ_PSN |
                TLY_IBV_QP_MAX_QP_RD_ATOMIC,
};

/* Transitions of a reliable connection: what each must be given, and what it may be given. */
static bool queues_may_go(int from, int to, int mask)
{
    static const struct {
        int from, to, must, may;
    } rows[] = {
        {TLY_IBV_QPS_RESET, TLY_IBV_QPS_INIT, INIT_WANTS, 0},
        {TLY_IBV_QPS_INIT, TLY_IBV_QPS_INIT, 0, INIT_WANTS},
        {TLY_IBV_QPS_INIT, TLY_IBV_QPS_RTR, RTR_WANTS, TLY_IBV_QP_ACCESS_FLAGS | TLY_IBV_QP_PKEY_INDEX},
        {TLY_IBV_QPS_RTR, TLY_IBV_QPS_RTS, RTS_WANTS, TLY_IBV_QP_ACCESS_FLAGS | TLY_IBV_QP_MIN_RNR_TIMER},
        {TLY_IBV_QPS_RTS, TLY_IBV_QPS_RTS, 0, STATE | TLY_IBV_QP_ACCESS_FLAGS | TLY_IBV_QP_MIN_RNR_TIMER},
    };
    if ((to == TLY_IBV_QPS_ERR || to == TLY_IBV_QPS_RESET) && (mask & STATE))
        return mask == STATE;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i].from == from && rows[i].to == to)
            return (mask & rows[i].must) == rows[i].must && !(mask & ~(rows[i].must | rows[i].may));
    return false;
}

static bool queues_address_is_good(const struct card_client *c, const struct tly_ibv_ah_attr *a)
{
    if (a->port_num != 1 || (!c->infiniband && !a->is_global))
        return false;
    return a->is_global ? a->grh.sgid_index < c->gids : a->dlid != 0;
}

static int queues_check(const struct card_client *c, const struct tly_ibv_qp_attr *a, int mask)
{
    bool bad =
        ((mask & TLY_IBV_QP_PORT) && a->port_num != 1) ||
        ((mask & TLY_IBV_QP_PKEY_INDEX) && a->pkey_index != 0) ||
        ((mask & TLY_IBV_QP_PATH_MTU) && (a->path_mtu < TLY_IBV_MTU_256 || a->path_mtu > TLY_IBV_MTU_4096)) ||
        ((mask & TLY_IBV_QP_AV) && !queues_address_is_good(c, &a->ah_attr)) ||
        ((mask & TLY_IBV_QP_MAX_DEST_RD_ATOMIC) && a->max_dest_rd_atomic > 16) ||
        ((mask & TLY_IBV_QP_MAX_QP_RD_ATOMIC) && a->max_rd_atomic > 16) ||
        ((mask & TLY_IBV_QP_MIN_RNR_TIMER) && a->min_rnr_timer > 31) ||
        ((mask & TLY_IBV_QP_TIMEOUT) && a->timeout > 31) ||
        ((mask & TLY_IBV_QP_RETRY_CNT) && a->retry_cnt > 7) ||
        ((mask & TLY_IBV_QP_RNR_RETRY) && a->rnr_retry > 7);
    return bad ? EINVAL : 0;
}

int card_modify(struct card_qp *q, const struct tly_ibv_qp_attr *a, int mask)
{
    struct tly_ibv_qp_attr *to = &q->attr;
    int state = mask & STATE ? a->qp_state : q->state;
    if (!queues_may_go(q->state, state, mask) || queues_check(q->client, a, mask))
        return EINVAL;
#define TAKE(flag, field) \
    if (mask & TLY_IBV_QP_##flag) \
    to->field = a->field
    TAKE(ACCESS_FLAGS, qp_access_flags);
    TAKE(AV, ah_attr);
    TAKE(PATH_MTU, path_mtu);
    TAKE(DEST_QPN, dest_qp_num);
    TAKE(RQ_PSN, rq_psn);
    TAKE(SQ_PSN, sq_psn);
    TAKE(MIN_RNR_TIMER, min_rnr_timer);
    TAKE(TIMEOUT, timeout);
    TAKE(RETRY_CNT, retry_cnt);
    TAKE(RNR_RETRY, rnr_retry);
#undef TAKE
    if (state == TLY_IBV_QPS_RESET)
        queues_reset(q);
    else if (state == TLY_IBV_QPS_ERR)
        card_fail_qp(q);
    else
        q->state = state;
    return 0;
}

/* --- the other end ---------------------------------------------------------------------------------------------- */

/* Do packets of `from` reach `to`?  Each packet names both GIDs, or both LIDs. */
static bool queues_reaches(const struct card_qp *from, const struct card_qp *to)
{
    const struct tly_ibv_ah_attr *a = &from->attr.ah_attr, *b = &to->attr.ah_attr;
    const struct card_client *c = from->client, *d = to->client;
    if (c->infiniband != d->infiniband || a->is_global != b->is_global)
        return false;
    if (!a->is_global)
        return a->dlid == d->lid && b->dlid == c->lid;
    const struct tly_ibv_gid_entry *mine = &c->gid[a->grh.sgid_index], *other = &d->gid[b->grh.sgid_index];
    return mine->gid_type == other->gid_type && memcmp(a->grh.dgid.raw, other->gid.raw, 16) == 0 &&
           memcmp(b->grh.dgid.raw, mine->gid.raw, 16) == 0;
}

struct card_qp *card_peer(const struct card_qp *q)
{
    for (struct card_client *c = card_clients; c; c = c->next)
        for (struct card_qp *p = c->qps; p; p = p->next)
            if (p->number == q->attr.dest_qp_num) {
                bool answers = (p->state == TLY_IBV_QPS_RTR || p->state == TLY_IBV_QPS_RTS) &&
                               p->attr.dest_qp_num == q->number && queues_reaches(q, p) &&
                               ((p->attr.rq_psn ^ q->attr.sq_psn) & 0xffffff) == 0 && !c->vanished &&
                               !atomic_load(&c->page->down) && !atomic_load(&q->client->page->down);
                return answers ? p : NULL;
            }
    return NULL;
}
