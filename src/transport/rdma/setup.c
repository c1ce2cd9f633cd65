/* setup.c - a channel's queue pair, from the end of the handshake to its own end.
 *
 * A proposal, 64 bytes:
 *
 *        0        4        8       12       16
 *      0 | layout | number | psn    | key    |      layout 1; number and first packet of the queue pair; key of the places
 *     16 | places          | count  | bytes  |      address, number and size of the places
 *     32 | sends  | mtu    | lid    | -      |      messages that the end takes; as verbs number MTUs
 *     48 | GID                              |
 *
 * Before an end proposes, its receives are posted; before it says that it is ready, its queue pair takes packets.  The queue
 * pair repeats a lost packet after 1 s, six times: longer than Tally waits for a silent tallyd.  Soft-RoCE takes a count of 7
 * for "for ever". */
#include <errno.h>
#include <sodium.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "transport/rdma/rdma.h"
#include "transport/tcp/tcp.h"
#include "wire/pack.h"

enum {
    LAYOUT = 1,
    PROPOSAL = 64,
    RETRY_TIMEOUT = 18, /* 4 us << 18 */
    RETRIES = 6,
    HOPS = 64,
    LINGER_MS = 100,
    PSN_MASK = 0xffffff,
};

/* --- memory -------------------------------------------------------------------------------------- */

static int setup_take_memory(struct tly_rdma_channel *r, size_t bytes, int access, struct tly_rdma_memory *m)
{
    void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED)
        return tly_fail(ENOMEM, "out of memory");
    *m = (struct tly_rdma_memory){.data = data, .bytes = bytes};
    m->mr = tly_verbs.reg_mr(r->pd, data, bytes, access);
    if (m->mr)
        return 0;
    int err = errno ? errno : ENOMEM;
    return tly_fail(err, "cannot register %zu KB of memory: %s%s", bytes >> 10, strerror(err),
                    err == ENOMEM ? " (raise the limit of locked memory: ulimit -l, LimitMEMLOCK=)" : "");
}

static void setup_give_memory(struct tly_rdma_memory *m)
{
    if (m->mr)
        tly_verbs.dereg_mr(m->mr);
    if (m->data)
        munmap(m->data, m->bytes);
    *m = (struct tly_rdma_memory){0};
}

/* --- the queue pair ------------------------------------------------------------------------------ */

static int setup_change(struct tly_rdma_channel *r, struct tly_ibv_qp_attr *a, int mask, const char *state)
{
    int err = tly_verbs.modify_qp(r->qp, a, mask);
    return err ? tly_fail(err, "cannot make a queue pair %s: %s", state, strerror(err)) : 0;
}

static int setup_make_queue(struct tly_rdma_channel *r)
{
    const struct tly_rdma_device *d = r->port.device;
    r->cq = tly_verbs.create_cq(d->context, TLY_RDMA_SENDS * 2 + TLY_RDMA_RECEIVES, r, d->events, 0);
    if (!r->cq)
        return tly_fail(errno ? errno : ENOMEM, "cannot create a completion queue: %s", strerror(errno));
    struct tly_ibv_qp_init_attr init = {
        .qp_context = r,
        .send_cq = r->cq,
        .recv_cq = r->cq,
        .cap = {.max_send_wr = 2 * TLY_RDMA_SENDS,
                .max_recv_wr = TLY_RDMA_RECEIVES,
                .max_send_sge = 1,
                .max_recv_sge = 1},
        .qp_type = TLY_IBV_QPT_RC};
    r->qp = tly_verbs.create_qp(r->pd, &init);
    if (!r->qp)
        return tly_fail(errno ? errno : ENOMEM, "cannot create a queue pair: %s", strerror(errno));
    struct tly_ibv_qp_attr a = {.qp_state = TLY_IBV_QPS_INIT,
                                .port_num = r->port.number,
                                .qp_access_flags = TLY_IBV_ACCESS_REMOTE_WRITE};
    int err =
        setup_change(r, &a,
                     TLY_IBV_QP_STATE | TLY_IBV_QP_PKEY_INDEX | TLY_IBV_QP_PORT | TLY_IBV_QP_ACCESS_FLAGS,
                     "ready to start");
    if (!err && tly_ibv_req_notify_cq(r->cq, 0) != 0)
        err = tly_fail(EIO, "cannot ask for completions");
    if (!err && tly_rdma_post_receives(r) != 0)
        err = tly_fail(EIO, "cannot post a receive");
    return err;
}

/* Everything that this end needs before the peer may send to it. */
static int setup_make(struct tly_rdma_channel *r)
{
    struct sockaddr_storage here = {0};
    tly_tcp.network->address(&r->stream.base, false, &here);
    int err = tly_rdma_find_port(r->stream.loop, &here, &r->choice, &r->port);
    if (err)
        return err;
    tly_list_append(&r->port.device->channels, &r->node);
    r->pd = tly_verbs.alloc_pd(r->port.device->context);
    if (!r->pd)
        return tly_fail(errno ? errno : ENOMEM, "cannot allocate a protection domain: %s", strerror(errno));
    err = setup_take_memory(r, TLY_RDMA_OWN_BYTES, TLY_IBV_ACCESS_LOCAL_WRITE, &r->own);
    if (!err)
        err = setup_take_memory(r, TLY_RDMA_PLACES_BYTES,
                                TLY_IBV_ACCESS_LOCAL_WRITE | TLY_IBV_ACCESS_REMOTE_WRITE, &r->places);
    return err ? err : setup_make_queue(r);
}

void tly_rdma_tear_down(struct tly_rdma_channel *r)
{
    if (r->qp && !r->broken)
        tly_rdma_drain(r, LINGER_MS * TLY_MS);
    r->broken = true;
    tly_list_remove(&r->node);
    tly_list_remove(&r->pending);
    if (r->qp)
        tly_verbs.destroy_qp(r->qp);
    if (r->cq)
        tly_verbs.destroy_cq(r->cq);
    r->qp = NULL;
    r->cq = NULL;
    setup_give_memory(&r->own);
    setup_give_memory(&r->places);
    if (r->pd)
        tly_verbs.dealloc_pd(r->pd);
    r->pd = NULL;
    tly_rdma_release(r->port.device);
    r->port.device = NULL;
}

/* --- what the link calls ------------------------------------------------------------------------- */

/* Keep the thread's sentence, and say once in a process that TCP will do. */
static int setup_fail(struct tly_rdma_channel *r, int err, const char **why)
{
    static atomic_bool told;
    snprintf(r->why, sizeof r->why, "%s", tly_error());
    *why = r->why;
    if (!atomic_exchange_explicit(&told, true, memory_order_relaxed))
        tly_log(err == -ENODEV ? TALLY_LOG_INFO : TALLY_LOG_WARNING, "transport",
                "no RDMA, TCP takes its place: %s", r->why);
    return err;
}

static int setup_propose(struct tly_channel *c, uint8_t out[TLY_SETUP_BYTES], const char **why)
{
    struct tly_rdma_channel *r = tly_rdma_of(c);
    int err = setup_make(r);
    if (err)
        return setup_fail(r, err, why);
    r->told = r->posted;
    r->psn = randombytes_random() & PSN_MASK;
    uint8_t *p = tly_put32(out, LAYOUT);
    p = tly_put32(p, r->qp->qp_num);
    p = tly_put32(p, r->psn);
    p = tly_put32(p, r->places.mr->rkey);
    p = tly_put64(p, (uint64_t)(uintptr_t)r->places.data);
    p = tly_put32(p, TLY_RDMA_PLACES);
    p = tly_put32(p, TLY_RDMA_PLACE);
    p = tly_put32(p, r->posted);
    p = tly_put32(p, (uint32_t)r->port.attr.active_mtu);
    p = tly_put32(p, r->port.attr.lid);
    p = tly_put32(p, 0);
    memcpy(p, r->port.gid.raw, sizeof r->port.gid.raw);
    return PROPOSAL;
}

static int setup_connect(struct tly_rdma_channel *r, const uint8_t *in)
{
    uint32_t mtu = tly_get32(in + 36), ours = (uint32_t)r->port.attr.active_mtu;
    struct tly_ibv_qp_attr a = {
        .qp_state = TLY_IBV_QPS_RTR,
        .path_mtu = (int)(mtu < ours ? mtu : ours),
        .dest_qp_num = tly_get32(in + 4),
        .rq_psn = tly_get32(in + 8) & PSN_MASK,
        .max_dest_rd_atomic = 1,
        .min_rnr_timer = 12,
        .ah_attr = {.dlid = (uint16_t)tly_get32(in + 40),
                    .is_global = r->port.attr.link_layer != TLY_IBV_LINK_LAYER_INFINIBAND,
                    .port_num = r->port.number,
                    .grh = {.sgid_index = r->port.gid_index,
                            .hop_limit = HOPS,
                            .traffic_class = (uint8_t)r->choice.class}}};
    memcpy(a.ah_attr.grh.dgid.raw, in + 48, sizeof a.ah_attr.grh.dgid.raw);
    int err = setup_change(r, &a,
                           TLY_IBV_QP_STATE | TLY_IBV_QP_AV | TLY_IBV_QP_PATH_MTU | TLY_IBV_QP_DEST_QPN |
                               TLY_IBV_QP_RQ_PSN | TLY_IBV_QP_MAX_DEST_RD_ATOMIC | TLY_IBV_QP_MIN_RNR_TIMER,
                           "receive");
    if (err)
        return err;
    a = (struct tly_ibv_qp_attr){.qp_state = TLY_IBV_QPS_RTS,
                                 .sq_psn = r->psn,
                                 .timeout = RETRY_TIMEOUT,
                                 .retry_cnt = RETRIES,
                                 .max_rd_atomic = 1};
    return setup_change(r, &a,
                        TLY_IBV_QP_STATE | TLY_IBV_QP_TIMEOUT | TLY_IBV_QP_RETRY_CNT | TLY_IBV_QP_RNR_RETRY |
                            TLY_IBV_QP_SQ_PSN | TLY_IBV_QP_MAX_QP_RD_ATOMIC,
                        "send");
}

static int setup_accept(struct tly_channel *c, const uint8_t *in, uint32_t bytes, const char **why)
{
    struct tly_rdma_channel *r = tly_rdma_of(c);
    uint32_t mtu = bytes == PROPOSAL ? tly_get32(in + 36) : 0;
    if (bytes != PROPOSAL || tly_get32(in) != LAYOUT || tly_get32(in + 24) != TLY_RDMA_PLACES ||
        tly_get32(in + 28) != TLY_RDMA_PLACE || tly_get32(in + 32) > TLY_RDMA_RECEIVES ||
        mtu < TLY_IBV_MTU_256 || mtu > TLY_IBV_MTU_4096) {
        *why = "the other end's RDMA is of another release of Tally";
        return -EPROTO;
    }
    r->peer_key = tly_get32(in + 12);
    r->peer_places = tly_get64(in + 16);
    r->allowed = tly_get32(in + 32);
    int err = setup_connect(r, in);
    return err ? setup_fail(r, err, why) : 0;
}

static int64_t setup_prepare(struct tly_hook *h)
{
    tly_rdma_tell(tly_list_entry(h, struct tly_rdma_channel, hook));
    return INT64_MAX;
}

static int setup_begin(struct tly_channel *c, const char **why)
{
    struct tly_rdma_channel *r = tly_rdma_of(c);
    if (r->stream.staging_from != r->stream.staging_to) {
        *why = "bytes behind the set-up of its medium";
        return -EPROTO;
    }
    r->begun = true;
    r->hook.prepare = setup_prepare;
    tly_loop_hook(r->stream.loop, &r->hook); /* behind the link's own: what it sends tells the news */
    tly_rdma_post(r);                        /* the peer may have sent something already */
    return 0;
}

const struct tly_setup tly_rdma_setup = {
    .propose = setup_propose, .accept = setup_accept, .begin = setup_begin};
