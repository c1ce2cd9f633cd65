/* verbs_test.c - ibv.h says what rdma-core's header says, and a machine without libibverbs is told so. */
#include <dlfcn.h>
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/error.h"
#include "transport/rdma/verbs.h"

#if __has_include(<infiniband/verbs.h>)
#include <infiniband/verbs.h>

/* All fields of a struct are where rdma-core has them. */
#define FIELD(type, ours, field) \
    assert_int_equal(offsetof(type tly_ibv_##ours, field), offsetof(type ibv_##ours, field)); \
    assert_int_equal(sizeof((type tly_ibv_##ours *)NULL)->field, sizeof((type ibv_##ours *)NULL)->field);
#define SIZE(type, ours) assert_int_equal(sizeof(type tly_ibv_##ours), sizeof(type ibv_##ours))
#define S1(s, f) FIELD(struct, s, f)
#define S2(s, f, ...) S1(s, f) S1(s, __VA_ARGS__)
#define S3(s, f, ...) S1(s, f) S2(s, __VA_ARGS__)
#define S4(s, f, ...) S1(s, f) S3(s, __VA_ARGS__)
#define S5(s, f, ...) S1(s, f) S4(s, __VA_ARGS__)
#define S6(s, f, ...) S1(s, f) S5(s, __VA_ARGS__)
#define S7(s, f, ...) S1(s, f) S6(s, __VA_ARGS__)
#define S8(s, f, ...) S1(s, f) S7(s, __VA_ARGS__)

static void devices_and_ports(void **state)
{
    S6(device, node_type, transport_type, name, dev_name, dev_path, ibdev_path);
    SIZE(struct, device);
    S7(device_attr, fw_ver, node_guid, sys_image_guid, max_mr_size, page_size_cap, vendor_id, vendor_part_id);
    S7(device_attr, hw_ver, max_qp, max_qp_wr, device_cap_flags, max_sge, max_sge_rd, max_cq);
    S7(device_attr, max_cqe, max_mr, max_pd, max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom, max_srq);
    S7(device_attr, max_qp_init_rd_atom, max_ee_init_rd_atom, atomic_cap, max_ee, max_rdd, max_mw, max_ah);
    S5(device_attr, max_raw_ipv6_qp, max_raw_ethy_qp, max_mcast_grp, max_mcast_qp_attach, max_fmr);
    S7(device_attr, max_total_mcast_qp_attach, max_map_per_fmr, max_srq_wr, max_srq_sge, max_pkeys,
       local_ca_ack_delay, phys_port_cnt);
    SIZE(struct, device_attr);
    S8(port_attr, state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags, max_msg_sz, bad_pkey_cntr, lid);
    S8(port_attr, qkey_viol_cntr, pkey_tbl_len, sm_lid, lmc, max_vl_num, sm_sl, subnet_timeout, flags);
    S6(port_attr, init_type_reply, active_width, active_speed, phys_state, link_layer, port_cap_flags2);
    SIZE(struct, port_attr);
    FIELD(union, gid, raw);
    FIELD(union, gid, global.subnet_prefix);
    FIELD(union, gid, global.interface_id);
    SIZE(union, gid);
    S5(gid_entry, gid, gid_index, port_num, gid_type, ndev_ifindex);
    SIZE(struct, gid_entry);
}

static void contexts_and_events(void **state)
{
    S4(context, device, ops, ops.poll_cq, ops.req_notify_cq);
    S7(context, ops.post_send, ops.post_recv, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat);
    SIZE(struct, context);
    S3(async_event, element.cq, element.qp, event_type);
    S1(async_event, element.port_num);
    SIZE(struct, async_event);
    S3(comp_channel, context, fd, refcnt);
    SIZE(struct, comp_channel);
}

static void queues_and_memory(void **state)
{
    S2(pd, context, handle);
    SIZE(struct, pd);
    S7(mr, context, pd, addr, length, handle, lkey, rkey);
    SIZE(struct, mr);
    S5(cq, context, channel, cq_context, handle, cqe);
    S4(cq, mutex, cond, comp_events_completed, async_events_completed);
    SIZE(struct, cq);
    S5(qp_cap, max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data);
    SIZE(struct, qp_cap);
    S7(qp_init_attr, qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all);
    SIZE(struct, qp_init_attr);
    S8(qp, context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num);
    S5(qp, state, qp_type, mutex, cond, events_completed);
    SIZE(struct, qp);
    S5(global_route, dgid, flow_label, sgid_index, hop_limit, traffic_class);
    SIZE(struct, global_route);
    S7(ah_attr, grh, dlid, sl, src_path_bits, static_rate, is_global, port_num);
    SIZE(struct, ah_attr);
    S8(qp_attr, qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num);
    S7(qp_attr, qp_access_flags, cap, ah_attr, alt_ah_attr, pkey_index, alt_pkey_index, en_sqd_async_notify);
    S6(qp_attr, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout);
    S5(qp_attr, retry_cnt, rnr_retry, alt_port_num, alt_timeout, rate_limit);
    SIZE(struct, qp_attr);
}

static void work(void **state)
{
    S3(sge, addr, length, lkey);
    SIZE(struct, sge);
    S7(send_wr, wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data);
    S3(send_wr, wr, wr.rdma.remote_addr, wr.rdma.rkey);
    assert_int_equal(offsetof(struct tly_ibv_send_wr, remote_srqn),
                     offsetof(struct ibv_send_wr, qp_type.xrc.remote_srqn));
    assert_int_equal(offsetof(struct tly_ibv_send_wr, unused), offsetof(struct ibv_send_wr, bind_mw));
    SIZE(struct, send_wr);
    S4(recv_wr, wr_id, next, sg_list, num_sge);
    SIZE(struct, recv_wr);
    S8(wc, wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp);
    S5(wc, wc_flags, pkey_index, slid, sl, dlid_path_bits);
    SIZE(struct, wc);
}

#define SAME(name) assert_int_equal(TLY_IBV_##name, IBV_##name)

static void constants(void **state)
{
    SAME(NODE_CA);
    SAME(TRANSPORT_IB);
    SAME(LINK_LAYER_UNSPECIFIED);
    SAME(LINK_LAYER_INFINIBAND);
    SAME(LINK_LAYER_ETHERNET);
    SAME(PORT_DOWN);
    SAME(PORT_ACTIVE);
    SAME(MTU_256);
    SAME(MTU_1024);
    SAME(MTU_4096);
    SAME(GID_TYPE_IB);
    SAME(GID_TYPE_ROCE_V1);
    SAME(GID_TYPE_ROCE_V2);
    SAME(ACCESS_LOCAL_WRITE);
    SAME(ACCESS_REMOTE_WRITE);
    SAME(ACCESS_REMOTE_READ);
    SAME(QPT_RC);
    SAME(QPS_RESET);
    SAME(QPS_INIT);
    SAME(QPS_RTR);
    SAME(QPS_RTS);
    SAME(QPS_ERR);
    SAME(QP_STATE);
    SAME(QP_ACCESS_FLAGS);
    SAME(QP_PKEY_INDEX);
    SAME(QP_PORT);
    SAME(QP_AV);
    SAME(QP_PATH_MTU);
    SAME(QP_TIMEOUT);
    SAME(QP_RETRY_CNT);
    SAME(QP_RNR_RETRY);
    SAME(QP_RQ_PSN);
    SAME(QP_MAX_QP_RD_ATOMIC);
    SAME(QP_MIN_RNR_TIMER);
    SAME(QP_SQ_PSN);
    SAME(QP_MAX_DEST_RD_ATOMIC);
    SAME(QP_DEST_QPN);
    SAME(WR_RDMA_WRITE);
    SAME(WR_RDMA_WRITE_WITH_IMM);
    SAME(WR_SEND);
    SAME(WR_SEND_WITH_IMM);
    SAME(SEND_FENCE);
    SAME(SEND_SIGNALED);
    SAME(SEND_SOLICITED);
    SAME(SEND_INLINE);
}

static void constants_of_completions_and_events(void **state)
{
    SAME(WC_SUCCESS);
    SAME(WC_LOC_LEN_ERR);
    SAME(WC_LOC_QP_OP_ERR);
    SAME(WC_LOC_PROT_ERR);
    SAME(WC_WR_FLUSH_ERR);
    SAME(WC_LOC_ACCESS_ERR);
    SAME(WC_REM_INV_REQ_ERR);
    SAME(WC_REM_ACCESS_ERR);
    SAME(WC_REM_OP_ERR);
    SAME(WC_RETRY_EXC_ERR);
    SAME(WC_RNR_RETRY_EXC_ERR);
    SAME(WC_FATAL_ERR);
    SAME(WC_GENERAL_ERR);
    SAME(WC_SEND);
    SAME(WC_RDMA_WRITE);
    SAME(WC_RECV);
    SAME(WC_RECV_RDMA_WITH_IMM);
    SAME(WC_WITH_IMM);
    SAME(EVENT_CQ_ERR);
    SAME(EVENT_QP_FATAL);
    SAME(EVENT_QP_REQ_ERR);
    SAME(EVENT_QP_ACCESS_ERR);
    SAME(EVENT_COMM_EST);
    SAME(EVENT_DEVICE_FATAL);
    SAME(EVENT_PORT_ACTIVE);
    SAME(EVENT_PORT_ERR);
    SAME(EVENT_GID_CHANGE);
}
#define WITH_HEADER(test) cmocka_unit_test(test)
#else
static void header_is_missing(void **state)
{
    print_message("skipped: <infiniband/verbs.h> is not installed (libibverbs-dev)\n");
    skip();
}
#define WITH_HEADER(test) cmocka_unit_test(header_is_missing)
#endif

/* With the library installed each function is found; a machine need not have a device. */
static void the_library(void **state)
{
    int err = tly_verbs_load();
    if (dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL)) {
        assert_int_equal(err, 0);
        assert_string_equal(tly_verbs.wc_status_str(TLY_IBV_WC_SUCCESS), "success");
        return;
    }
    assert_int_equal(err, -ENOTSUP);
    assert_non_null(strstr(tly_error(), "libibverbs.so.1"));
    assert_null(tly_verbs.reg_mr);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_library),
        WITH_HEADER(devices_and_ports),
        WITH_HEADER(contexts_and_events),
        WITH_HEADER(queues_and_memory),
        WITH_HEADER(work),
        WITH_HEADER(constants),
        WITH_HEADER(constants_of_completions_and_events),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
