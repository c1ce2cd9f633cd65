/* work.c - carries out work requests, those of a queue pair in their order.
 *
 * A request begins, perhaps late; it takes effect at the other end, perhaps in pieces or after retries; its completion comes,
 * perhaps late.  Only then the next one begins. */
#include "test/rdma/fake_card/card.h"

enum { RETRY_NS = 1000000, AGAIN = -1 };

/* --- what is random --------------------------------------------------------------------------------------------- */

static uint64_t work_delay(struct card_client *c)
{
    return c->faults.delay_us ? card_now() + fake_random(&c->random) % (c->faults.delay_us * 1000) : 0;
}

/* --- completions ------------------------------------------------------------------------------------------------ */

static struct fake_slot *work_send_slot(const struct card_qp *q)
{
    return &q->ring->slot[q->sq_at % q->ring->sq_size];
}

static struct fake_slot *work_receive_slot(const struct card_qp *q)
{
    return &q->ring->slot[q->ring->sq_size + q->rq_at % q->ring->rq_size];
}

static bool work_has_sends(const struct card_qp *q)
{
    return q->sq_at != atomic_load_explicit(&q->ring->sq_head, memory_order_acquire);
}

static bool work_has_receives(const struct card_qp *q)
{
    return q->rq_at != atomic_load_explicit(&q->ring->rq_head, memory_order_acquire);
}

static void work_end_send(struct card_qp *q, int status)
{
    const struct fake_slot *s = work_send_slot(q);
    bool writes = s->opcode == TLY_IBV_WR_RDMA_WRITE || s->opcode == TLY_IBV_WR_RDMA_WRITE_WITH_IMM;
    struct fake_cqe e = {.slot = q->sq_at,
                         .wc = {.wr_id = s->wr_id,
                                .status = status,
                                .opcode = writes ? TLY_IBV_WC_RDMA_WRITE : TLY_IBV_WC_SEND,
                                .qp_num = q->number}};
    bool told = status != TLY_IBV_WC_SUCCESS || q->sig_all || (s->flags & TLY_IBV_SEND_SIGNALED);
    q->sq_at++;
    q->begun = q->done = false;
    if (told)
        card_complete(q->send_cq, &e, false);
    if (status != TLY_IBV_WC_SUCCESS)
        card_fail_qp(q);
}

/* `with`: the send that it receives, of so many bytes; NULL: none. */
static void work_end_receive(struct card_qp *q, int status, const struct fake_slot *with, uint32_t bytes)
{
    struct fake_cqe e = {.slot = q->rq_at,
                         .receive = 1,
                         .wc = {.wr_id = work_receive_slot(q)->wr_id, .status = status, .qp_num = q->number}};
    bool solicited = with && (with->flags & TLY_IBV_SEND_SOLICITED);
    if (with) {
        bool writes = with->opcode == TLY_IBV_WR_RDMA_WRITE_WITH_IMM;
        e.wc.opcode = writes ? TLY_IBV_WC_RECV_RDMA_WITH_IMM : TLY_IBV_WC_RECV;
        e.wc.byte_len = bytes;
        e.wc.src_qp = q->attr.dest_qp_num;
        if (writes || with->opcode == TLY_IBV_WR_SEND_WITH_IMM) {
            e.wc.wc_flags = TLY_IBV_WC_WITH_IMM;
            e.wc.imm_data = with->imm;
        }
    }
    q->rq_at++;
    card_complete(q->recv_cq, &e, solicited);
    if (status != TLY_IBV_WC_SUCCESS)
        card_fail_qp(q);
}

/* A queue pair in error completes every request with a flush error. */
static bool work_flush(struct card_qp *q)
{
    bool any = false;
    if (q->client->vanished && q->client->faults.silent)
        return false;
    for (; work_has_sends(q); any = true)
        work_end_send(q, TLY_IBV_WC_WR_FLUSH_ERR);
    for (; work_has_receives(q); any = true)
        work_end_receive(q, TLY_IBV_WC_WR_FLUSH_ERR, NULL, 0);
    return any;
}

/* --- at the other end ------------------------------------------------------------------------------------------- */

/* The other end does not answer: retry until the time-outs are used up. */
static int work_retry(struct card_qp *q)
{
    uint64_t now = card_now();
    if (!q->patience && q->attr.timeout)
        q->patience = now + (4096ull << q->attr.timeout) * (q->attr.retry_cnt + 1u);
    if (q->attr.timeout && now >= q->patience)
        return TLY_IBV_WC_RETRY_EXC_ERR;
    q->ready_at = now + RETRY_NS;
    return AGAIN;
}

/* Its receiver is not ready: wait as long as that says, as often as we may. */
static int work_wait_for_receive(struct card_qp *q, const struct card_qp *peer)
{
    static const uint32_t in_10_us[32] = {
        65536, 1,   2,   3,   4,    6,    8,    12,   16,   24,   32,   48,    64,    96,    128,   192,
        256,   384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152};
    atomic_fetch_add(&q->client->page->rnrs, 1);
    if (q->attr.rnr_retry != 7 && q->rnr_retries-- == 0)
        return TLY_IBV_WC_RNR_RETRY_EXC_ERR;
    q->ready_at = card_now() + in_10_us[peer->attr.min_rnr_timer] * 10000ull;
    return AGAIN;
}

/* The peer refuses, and is in error itself. */
static int work_refuse(struct card_qp *peer, int status)
{
    if (status == TLY_IBV_WC_REM_ACCESS_ERR)
        card_event(peer->client, TLY_IBV_EVENT_QP_ACCESS_ERR, peer->number);
    card_fail_qp(peer);
    return status;
}

static int work_write(struct card_qp *q, const struct fake_slot *s, struct card_qp *peer,
                      const struct card_extent *from)
{
    struct card_extent to;
    uint64_t pieces = q->client->faults.pieces;
    if (!card_find_remote(peer, s->remote_addr, from->length, s->rkey, &to))
        return work_refuse(peer, TLY_IBV_WC_REM_ACCESS_ERR);
    uint32_t n = from->length - q->offset;
    if (pieces && n > pieces)
        n = (uint32_t)pieces;
    int status = card_move(from, q->offset, &to, q->offset, n);
    if (status == TLY_IBV_WC_REM_OP_ERR)
        work_refuse(peer, status);
    q->offset += n;
    return status == TLY_IBV_WC_SUCCESS && q->offset < from->length ? AGAIN : status;
}

static int work_send(struct card_qp *q, const struct fake_slot *s, struct card_qp *peer,
                     const struct card_extent *from)
{
    struct card_extent to;
    if (!card_find(peer, work_receive_slot(peer), TLY_IBV_ACCESS_LOCAL_WRITE, &to)) {
        work_end_receive(peer, TLY_IBV_WC_LOC_PROT_ERR, NULL, 0);
        return TLY_IBV_WC_REM_OP_ERR;
    }
    if (to.length < from->length) {
        work_end_receive(peer, TLY_IBV_WC_LOC_LEN_ERR, NULL, 0);
        return TLY_IBV_WC_REM_INV_REQ_ERR;
    }
    int status = card_move(from, 0, &to, 0, from->length);
    if (status == TLY_IBV_WC_SUCCESS)
        work_end_receive(peer, status, s, from->length);
    else if (status == TLY_IBV_WC_REM_OP_ERR)
        work_end_receive(peer, TLY_IBV_WC_LOC_PROT_ERR, NULL, 0);
    return status;
}

/* The status, or AGAIN: at q->ready_at. */
static int work_carry_out(struct card_qp *q)
{
    const struct fake_slot *s = work_send_slot(q);
    struct card_extent from;
    if (!card_find(q, s, 0, &from))
        return TLY_IBV_WC_LOC_PROT_ERR;
    if (from.length > FAKE_MOST_MESSAGE)
        return TLY_IBV_WC_LOC_LEN_ERR;
    struct card_qp *peer = q->lost ? NULL : card_peer(q);
    if (!peer)
        return work_retry(q);
    q->patience = 0;
    if (!peer->heard && peer->state == TLY_IBV_QPS_RTR)
        card_event(peer->client, TLY_IBV_EVENT_COMM_EST, peer->number);
    peer->heard = true;
    if (q->attr.path_mtu > peer->attr.path_mtu && from.length > 128u << peer->attr.path_mtu)
        return work_refuse(peer, TLY_IBV_WC_REM_INV_REQ_ERR);
    if (s->opcode != TLY_IBV_WR_RDMA_WRITE && !work_has_receives(peer))
        return work_wait_for_receive(q, peer);
    int status;
    if (s->opcode == TLY_IBV_WR_SEND || s->opcode == TLY_IBV_WR_SEND_WITH_IMM) {
        status = work_send(q, s, peer, &from);
    } else {
        status = work_write(q, s, peer, &from);
        if (status == TLY_IBV_WC_SUCCESS && s->opcode == TLY_IBV_WR_RDMA_WRITE_WITH_IMM)
            work_end_receive(peer, status, s, from.length);
    }
    if (status == TLY_IBV_WC_SUCCESS)
        atomic_fetch_add(&q->client->page->bytes, from.length);
    return status;
}

/* --- in order ----------------------------------------------------------------------------------------------------- */

static void work_begin(struct card_qp *q)
{
    struct card_client *c = q->client;
    c->works++;
    q->begun = true;
    q->done = false;
    q->offset = 0;
    q->patience = 0;
    q->rnr_retries = q->attr.rnr_retry;
    q->lost = (c->faults.lost && c->works == c->faults.lost) ||
              (c->faults.random && fake_random(&c->random) % (100 * c->faults.random) == 0);
    q->ready_at = work_delay(c);
    if (c->faults.vanish && c->works == c->faults.vanish)
        card_vanish(c);
}

/* Is it too early?  Then it is known until when. */
static bool work_is_early(const struct card_qp *q, uint64_t *wake)
{
    if (!q->ready_at || q->ready_at <= card_now())
        return false;
    if (q->ready_at < *wake)
        *wake = q->ready_at;
    return true;
}

bool card_work(struct card_qp *q, uint64_t *wake)
{
    if (q->state == TLY_IBV_QPS_ERR)
        return work_flush(q);
    if (q->state != TLY_IBV_QPS_RTS || !work_has_sends(q))
        return false;
    if (!q->begun)
        work_begin(q);
    if (q->state == TLY_IBV_QPS_ERR) /* the device has vanished */
        return true;
    if (work_is_early(q, wake))
        return false;
    if (!q->done) {
        q->ready_at = 0;
        q->status = work_carry_out(q);
        if (q->status == AGAIN)
            return !work_is_early(q, wake);
        q->done = true;
        q->ready_at = work_delay(q->client);
        if (work_is_early(q, wake))
            return false;
    }
    work_end_send(q, q->status);
    return true;
}
