/* pair.c - queue pairs for tests. */
#include "test/rdma/pair.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "base/error.h"

enum { PATIENCE_MS = 60000, PSN = 0x123456 };

static bool end_is_wanted(const struct tly_ibv_device *d, int which)
{
    const char *names = getenv("TEST_RDMA_DEVICE"), *comma = names ? strchr(names, ',') : NULL;
    if (!names)
        return true;
    const char *name = which && comma ? comma + 1 : names;
    size_t length = strcspn(name, ",");
    return strlen(d->name) == length && strncmp(d->name, name, length) == 0;
}

static struct tly_ibv_context *end_open_device(int which, struct tly_ibv_port_attr *port)
{
    int count;
    struct tly_ibv_device **list = tly_verbs.get_device_list(&count);
    struct tly_ibv_context *found = NULL;
    assert_non_null(list);
    for (int i = 0; i < count && !found; i++) {
        if (!end_is_wanted(list[i], which))
            continue;
        struct tly_ibv_context *c = tly_verbs.open_device(list[i]);
        memset(port, 0, sizeof *port);
        assert_non_null(c);
        assert_int_equal(tly_verbs.query_port(c, 1, port), 0);
        if (port->state == TLY_IBV_PORT_ACTIVE)
            found = c;
        else
            tly_verbs.close_device(c);
    }
    tly_verbs.free_device_list(list);
    return found;
}

/* RoCE v2 and IPv4, else any. */
static void end_choose_gid(struct end *e, const struct tly_ibv_port_attr *port)
{
    static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};
    e->gid_index = 0;
    for (int i = 0; i < port->gid_tbl_len; i++) {
        struct tly_ibv_gid_entry g;
        if (tly_verbs.query_gid_ex &&
            tly_verbs.query_gid_ex(e->context, 1, (uint32_t)i, &g, 0, sizeof g) == 0 &&
            g.gid_type == TLY_IBV_GID_TYPE_ROCE_V2 && memcmp(g.gid.raw, mapped, sizeof mapped) == 0)
            e->gid_index = i;
    }
    assert_int_equal(tly_verbs.query_gid(e->context, 1, e->gid_index, &e->own.gid), 0);
}

void end_open(struct end *e, int which)
{
    struct tly_ibv_port_attr port;
    *e = (struct end){.cqe = 4 * END_WR, .timeout = 14, .retries = 6, .rnr_retries = 7, .rnr_timer = 1};
    if (tly_verbs_load() != 0)
        fail_msg("%s", tly_error());
    e->context = end_open_device(which, &port);
    assert_non_null(e->context);
    end_choose_gid(e, &port);
    e->memory = mmap(NULL, END_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(e->memory, MAP_FAILED);
    e->pd = tly_verbs.alloc_pd(e->context);
    assert_non_null(e->pd);
    e->mr = tly_verbs.reg_mr(e->pd, e->memory, END_BYTES,
                             TLY_IBV_ACCESS_LOCAL_WRITE | TLY_IBV_ACCESS_REMOTE_WRITE);
    assert_non_null(e->mr);
    e->channel = tly_verbs.create_comp_channel(e->context);
    assert_non_null(e->channel);
    assert_int_equal(fcntl(e->channel->fd, F_SETFL, O_NONBLOCK), 0);
    e->own.key = e->mr->rkey;
    e->own.at = (uintptr_t)e->memory;
    e->own.lid = port.lid;
    e->own.mtu = port.active_mtu;
    e->own.psn = PSN;
}

void end_init(struct end *e)
{
    struct tly_ibv_qp_attr a = {.qp_state = TLY_IBV_QPS_INIT,
                                .port_num = 1,
                                .qp_access_flags = TLY_IBV_ACCESS_REMOTE_WRITE};
    e->cq = tly_verbs.create_cq(e->context, e->cqe, e, e->channel, 0);
    assert_non_null(e->cq);
    struct tly_ibv_qp_init_attr init = {
        .send_cq = e->cq,
        .recv_cq = e->cq,
        .cap = {.max_send_wr = END_WR,
                .max_recv_wr = END_WR,
                .max_send_sge = 2,
                .max_recv_sge = 2,
                .max_inline_data = END_INLINE},
        .qp_type = TLY_IBV_QPT_RC,
    };
    e->qp = tly_verbs.create_qp(e->pd, &init);
    assert_non_null(e->qp);
    assert_in_range(init.cap.max_send_wr, END_WR, UINT32_MAX);
    e->own.number = e->qp->qp_num;
    assert_int_equal(tly_verbs.modify_qp(e->qp, &a,
                                         TLY_IBV_QP_STATE | TLY_IBV_QP_PKEY_INDEX | TLY_IBV_QP_PORT |
                                             TLY_IBV_QP_ACCESS_FLAGS),
                     0);
}

void end_connect(struct end *e, const struct end_address *to)
{
    struct tly_ibv_qp_attr a = {
        .qp_state = TLY_IBV_QPS_RTR,
        .path_mtu = to->mtu < e->own.mtu ? to->mtu : e->own.mtu,
        .dest_qp_num = to->number,
        .rq_psn = to->psn,
        .max_dest_rd_atomic = 1,
        .min_rnr_timer = (uint8_t)e->rnr_timer,
        .ah_attr = {.grh = {.dgid = to->gid, .sgid_index = (uint8_t)e->gid_index, .hop_limit = 64},
                    .dlid = to->lid,
                    .is_global = !to->lid,
                    .port_num = 1},
    };
    assert_int_equal(tly_verbs.modify_qp(e->qp, &a,
                                         TLY_IBV_QP_STATE | TLY_IBV_QP_AV | TLY_IBV_QP_PATH_MTU |
                                             TLY_IBV_QP_DEST_QPN | TLY_IBV_QP_RQ_PSN |
                                             TLY_IBV_QP_MAX_DEST_RD_ATOMIC | TLY_IBV_QP_MIN_RNR_TIMER),
                     0);
    a = (struct tly_ibv_qp_attr){.qp_state = TLY_IBV_QPS_RTS,
                                 .sq_psn = e->own.psn,
                                 .timeout = (uint8_t)e->timeout,
                                 .retry_cnt = (uint8_t)e->retries,
                                 .rnr_retry = (uint8_t)e->rnr_retries,
                                 .max_rd_atomic = 1};
    assert_int_equal(tly_verbs.modify_qp(e->qp, &a,
                                         TLY_IBV_QP_STATE | TLY_IBV_QP_TIMEOUT | TLY_IBV_QP_RETRY_CNT |
                                             TLY_IBV_QP_RNR_RETRY | TLY_IBV_QP_SQ_PSN |
                                             TLY_IBV_QP_MAX_QP_RD_ATOMIC),
                     0);
}

void ends_open(struct end e[2])
{
    for (int i = 0; i < 2; i++) {
        end_open(&e[i], i);
        end_init(&e[i]);
    }
    end_connect(&e[0], &e[1].own);
    end_connect(&e[1], &e[0].own);
}

void end_destroy_qp(struct end *e)
{
    assert_int_equal(tly_verbs.destroy_qp(e->qp), 0);
    e->qp = NULL;
}

void end_close(struct end *e)
{
    if (e->qp)
        end_destroy_qp(e);
    if (e->cq)
        assert_int_equal(tly_verbs.destroy_cq(e->cq), 0);
    assert_int_equal(tly_verbs.destroy_comp_channel(e->channel), 0);
    assert_int_equal(tly_verbs.dereg_mr(e->mr), 0);
    assert_int_equal(tly_verbs.dealloc_pd(e->pd), 0);
    assert_int_equal(tly_verbs.close_device(e->context), 0);
    munmap(e->memory, END_BYTES);
}

void ends_close(struct end e[2])
{
    end_close(&e[0]);
    end_close(&e[1]);
}

int end_modify(struct end *e, int state)
{
    struct tly_ibv_qp_attr a = {.qp_state = state};
    return tly_verbs.modify_qp(e->qp, &a, TLY_IBV_QP_STATE);
}

/* --- work ------------------------------------------------------------------------------------------------------- */

struct tly_ibv_sge end_sge(const struct end *e, size_t at, uint32_t bytes)
{
    return (struct tly_ibv_sge){.addr = (uintptr_t)e->memory + at, .length = bytes, .lkey = e->mr->lkey};
}

void end_receive(struct end *e, uint64_t id, size_t at, uint32_t bytes)
{
    struct tly_ibv_sge sge = end_sge(e, at, bytes);
    struct tly_ibv_recv_wr wr = {.wr_id = id, .sg_list = &sge, .num_sge = 1}, *bad;
    assert_int_equal(tly_ibv_post_recv(e->qp, &wr, &bad), 0);
}

int end_send(struct end *e, uint64_t id, size_t at, uint32_t bytes, unsigned flags)
{
    struct tly_ibv_sge sge = end_sge(e, at, bytes);
    struct tly_ibv_send_wr
        wr = {.wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = TLY_IBV_WR_SEND, .send_flags = flags},
        *bad;
    return tly_ibv_post_send(e->qp, &wr, &bad);
}

int end_write(struct end *e, uint64_t id, size_t at, uint32_t bytes, const struct end_address *to,
              size_t there, unsigned flags)
{
    struct tly_ibv_sge sge = end_sge(e, at, bytes);
    struct tly_ibv_send_wr wr = {.wr_id = id,
                                 .sg_list = &sge,
                                 .num_sge = 1,
                                 .opcode = TLY_IBV_WR_RDMA_WRITE,
                                 .send_flags = flags,
                                 .wr.rdma = {.remote_addr = to->at + there, .rkey = to->key}},
                           *bad;
    return tly_ibv_post_send(e->qp, &wr, &bad);
}

bool end_poll(struct end *e, struct tly_ibv_wc *out)
{
    int n = tly_ibv_poll_cq(e->cq, 1, out);
    assert_in_range(n, 0, 1);
    return n;
}

struct tly_ibv_wc end_wait(struct end *e)
{
    struct tly_ibv_wc wc;
    struct pollfd p = {.fd = e->channel->fd, .events = POLLIN};
    while (!end_poll(e, &wc)) {
        struct tly_ibv_cq *cq;
        void *user;
        assert_int_equal(tly_ibv_req_notify_cq(e->cq, 0), 0);
        if (end_poll(e, &wc))
            break;
        if (poll(&p, 1, PATIENCE_MS) != 1)
            fail_msg("no completion has come");
        while (tly_verbs.get_cq_event(e->channel, &cq, &user) == 0) {
            assert_ptr_equal(cq, e->cq);
            assert_ptr_equal(user, e);
            tly_verbs.ack_cq_events(cq, 1);
        }
    }
    return wc;
}

void end_expect(struct end *e, uint64_t id, int status)
{
    struct tly_ibv_wc wc = end_wait(e);
    if (wc.status != status || wc.wr_id != id)
        fail_msg("work request %d ended with \"%s\", not %d with \"%s\"", (int)wc.wr_id,
                 tly_verbs.wc_status_str(wc.status), (int)id, tly_verbs.wc_status_str(status));
    assert_int_equal(wc.qp_num, e->own.number);
}

int end_event(struct end *e)
{
    struct tly_ibv_async_event event;
    struct pollfd p = {.fd = e->context->async_fd, .events = POLLIN};
    if (poll(&p, 1, PATIENCE_MS) != 1)
        fail_msg("no event has come");
    assert_int_equal(tly_verbs.get_async_event(e->context, &event), 0);
    tly_verbs.ack_async_event(&event);
    return event.event_type;
}
