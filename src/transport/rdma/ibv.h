/* ibv.h - the structs and constants of libibverbs that Tally uses.
 *
 * They are those of <infiniband/verbs.h> of rdma-core, field by field, under tly_ibv_ instead of ibv_, so that Tally builds
 * without that header and a test can include both (verbs_test.c compares them).  Constants begin with TLY_IBV_ instead of
 * IBV_.  Fields that Tally does not use stay, because they give the others their offsets. */
#ifndef TLY_RDMA_IBV_H
#define TLY_RDMA_IBV_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

enum { TLY_IBV_NODE_CA = 1, TLY_IBV_TRANSPORT_IB = 0 };
enum { TLY_IBV_LINK_LAYER_UNSPECIFIED, TLY_IBV_LINK_LAYER_INFINIBAND, TLY_IBV_LINK_LAYER_ETHERNET };
enum { TLY_IBV_PORT_DOWN = 1, TLY_IBV_PORT_ACTIVE = 4 };
enum { TLY_IBV_MTU_256 = 1, TLY_IBV_MTU_1024 = 3, TLY_IBV_MTU_4096 = 5 }; /* 128 << mtu bytes */
enum { TLY_IBV_GID_TYPE_IB, TLY_IBV_GID_TYPE_ROCE_V1, TLY_IBV_GID_TYPE_ROCE_V2 };
enum { TLY_IBV_ACCESS_LOCAL_WRITE = 1, TLY_IBV_ACCESS_REMOTE_WRITE = 2, TLY_IBV_ACCESS_REMOTE_READ = 4 };
enum { TLY_IBV_QPT_RC = 2 };

enum { TLY_IBV_QPS_RESET, TLY_IBV_QPS_INIT, TLY_IBV_QPS_RTR, TLY_IBV_QPS_RTS, TLY_IBV_QPS_ERR = 6 };
/* The fields of struct tly_ibv_qp_attr that are given. */
enum { TLY_IBV_QP_STATE = 1 << 0, TLY_IBV_QP_ACCESS_FLAGS = 1 << 3, TLY_IBV_QP_PKEY_INDEX = 1 << 4 };
enum { TLY_IBV_QP_PORT = 1 << 5, TLY_IBV_QP_AV = 1 << 7, TLY_IBV_QP_PATH_MTU = 1 << 8 };
enum { TLY_IBV_QP_TIMEOUT = 1 << 9, TLY_IBV_QP_RETRY_CNT = 1 << 10, TLY_IBV_QP_RNR_RETRY = 1 << 11 };
enum {
    TLY_IBV_QP_RQ_PSN = 1 << 12,
    TLY_IBV_QP_MAX_QP_RD_ATOMIC = 1 << 13,
    TLY_IBV_QP_MIN_RNR_TIMER = 1 << 15
};
enum { TLY_IBV_QP_SQ_PSN = 1 << 16, TLY_IBV_QP_MAX_DEST_RD_ATOMIC = 1 << 17, TLY_IBV_QP_DEST_QPN = 1 << 20 };

enum { TLY_IBV_WR_RDMA_WRITE, TLY_IBV_WR_RDMA_WRITE_WITH_IMM, TLY_IBV_WR_SEND, TLY_IBV_WR_SEND_WITH_IMM };
enum {
    TLY_IBV_SEND_FENCE = 1,
    TLY_IBV_SEND_SIGNALED = 2,
    TLY_IBV_SEND_SOLICITED = 4,
    TLY_IBV_SEND_INLINE = 8
};

/* The status of a completion.  After an error all of its fields but wr_id, status, qp_num and vendor_err are undefined. */
enum { TLY_IBV_WC_SUCCESS, TLY_IBV_WC_LOC_LEN_ERR, TLY_IBV_WC_LOC_QP_OP_ERR, TLY_IBV_WC_LOC_PROT_ERR = 4 };
enum { TLY_IBV_WC_WR_FLUSH_ERR = 5, TLY_IBV_WC_LOC_ACCESS_ERR = 8, TLY_IBV_WC_REM_INV_REQ_ERR = 9 };
enum { TLY_IBV_WC_REM_ACCESS_ERR = 10, TLY_IBV_WC_REM_OP_ERR = 11, TLY_IBV_WC_RETRY_EXC_ERR = 12 };
enum { TLY_IBV_WC_RNR_RETRY_EXC_ERR = 13, TLY_IBV_WC_FATAL_ERR = 19, TLY_IBV_WC_GENERAL_ERR = 21 };
/* Its opcode, and a flag. */
enum { TLY_IBV_WC_SEND, TLY_IBV_WC_RDMA_WRITE, TLY_IBV_WC_RECV = 128, TLY_IBV_WC_RECV_RDMA_WITH_IMM = 129 };
enum { TLY_IBV_WC_WITH_IMM = 2 };

enum { TLY_IBV_EVENT_CQ_ERR, TLY_IBV_EVENT_QP_FATAL, TLY_IBV_EVENT_QP_REQ_ERR, TLY_IBV_EVENT_QP_ACCESS_ERR };
enum { TLY_IBV_EVENT_COMM_EST = 4, TLY_IBV_EVENT_DEVICE_FATAL = 8, TLY_IBV_EVENT_PORT_ACTIVE = 9 };
enum { TLY_IBV_EVENT_PORT_ERR = 10, TLY_IBV_EVENT_GID_CHANGE = 18 };

union tly_ibv_gid {
    uint8_t raw[16];
    struct {
        uint64_t subnet_prefix, interface_id; /* in network order */
    } global;
};

struct tly_ibv_gid_entry {
    union tly_ibv_gid gid;
    uint32_t gid_index, port_num, gid_type, ndev_ifindex;
};

struct tly_ibv_device {
    void *unused[2];
    int node_type, transport_type;
    char name[64], dev_name[64], dev_path[256], ibdev_path[256];
};

struct tly_ibv_device_attr {
    char fw_ver[64];
    uint64_t node_guid, sys_image_guid; /* in network order */
    uint64_t max_mr_size, page_size_cap;
    uint32_t vendor_id, vendor_part_id, hw_ver;
    int max_qp, max_qp_wr;
    unsigned device_cap_flags;
    int max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom;
    int max_qp_init_rd_atom, max_ee_init_rd_atom, atomic_cap, max_ee, max_rdd, max_mw, max_raw_ipv6_qp;
    int max_raw_ethy_qp, max_mcast_grp, max_mcast_qp_attach, max_total_mcast_qp_attach, max_ah, max_fmr;
    int max_map_per_fmr, max_srq, max_srq_wr, max_srq_sge;
    uint16_t max_pkeys;
    uint8_t local_ca_ack_delay, phys_port_cnt;
};

/* The library fills all but the last field; clear the struct before. */
struct tly_ibv_port_attr {
    int state, max_mtu, active_mtu, gid_tbl_len;
    uint32_t port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr;
    uint16_t pkey_tbl_len, lid, sm_lid;
    uint8_t lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width, active_speed, phys_state;
    uint8_t link_layer, flags;
    uint16_t port_cap_flags2;
};

struct tly_ibv_pd {
    struct tly_ibv_context *context;
    uint32_t handle;
};

struct tly_ibv_mr {
    struct tly_ibv_context *context;
    struct tly_ibv_pd *pd;
    void *addr;
    size_t length;
    uint32_t handle, lkey, rkey;
};

struct tly_ibv_comp_channel {
    struct tly_ibv_context *context;
    int fd, refcnt;
};

struct tly_ibv_cq {
    struct tly_ibv_context *context;
    struct tly_ibv_comp_channel *channel;
    void *cq_context;
    uint32_t handle;
    int cqe;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    uint32_t comp_events_completed, async_events_completed;
};

struct tly_ibv_qp_cap {
    uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
};

struct tly_ibv_qp_init_attr {
    void *qp_context;
    struct tly_ibv_cq *send_cq, *recv_cq;
    void *srq;
    struct tly_ibv_qp_cap cap; /* what was given at least, when create_qp has returned */
    int qp_type, sq_sig_all;
};

struct tly_ibv_qp {
    struct tly_ibv_context *context;
    void *qp_context;
    struct tly_ibv_pd *pd;
    struct tly_ibv_cq *send_cq, *recv_cq;
    void *srq;
    uint32_t handle, qp_num;
    int state, qp_type;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    uint32_t events_completed;
};

struct tly_ibv_global_route {
    union tly_ibv_gid dgid;
    uint32_t flow_label;
    uint8_t sgid_index, hop_limit, traffic_class;
};

struct tly_ibv_ah_attr {
    struct tly_ibv_global_route grh;
    uint16_t dlid;
    uint8_t sl, src_path_bits, static_rate, is_global, port_num;
};

struct tly_ibv_qp_attr {
    int qp_state, cur_qp_state, path_mtu, path_mig_state;
    uint32_t qkey, rq_psn, sq_psn, dest_qp_num;
    unsigned qp_access_flags;
    struct tly_ibv_qp_cap cap;
    struct tly_ibv_ah_attr ah_attr, alt_ah_attr;
    uint16_t pkey_index, alt_pkey_index;
    uint8_t en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num;
    uint8_t timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout;
    uint32_t rate_limit;
};

struct tly_ibv_sge {
    uint64_t addr;
    uint32_t length, lkey;
};

struct tly_ibv_send_wr {
    uint64_t wr_id;
    struct tly_ibv_send_wr *next;
    struct tly_ibv_sge *sg_list;
    int num_sge, opcode;
    unsigned send_flags;
    uint32_t imm_data; /* in network order */
    union {
        struct {
            uint64_t remote_addr;
            uint32_t rkey;
        } rdma;
        uint64_t atomic[4];
    } wr;
    uint32_t remote_srqn;
    uint64_t unused[6];
};

struct tly_ibv_recv_wr {
    uint64_t wr_id;
    struct tly_ibv_recv_wr *next;
    struct tly_ibv_sge *sg_list;
    int num_sge;
};

struct tly_ibv_wc {
    uint64_t wr_id;
    int status, opcode;
    uint32_t vendor_err, byte_len, imm_data, qp_num, src_qp;
    unsigned wc_flags;
    uint16_t pkey_index, slid;
    uint8_t sl, dlid_path_bits;
};

struct tly_ibv_async_event {
    union {
        struct tly_ibv_cq *cq;
        struct tly_ibv_qp *qp;
        int port_num;
    } element;
    int event_type;
};

struct tly_ibv_context {
    struct tly_ibv_device *device;
    struct {
        void *unused_1[11];
        int (*poll_cq)(struct tly_ibv_cq *cq, int n, struct tly_ibv_wc *out);
        int (*req_notify_cq)(struct tly_ibv_cq *cq, int solicited_only);
        void *unused_2[12];
        int (*post_send)(struct tly_ibv_qp *qp, struct tly_ibv_send_wr *wr, struct tly_ibv_send_wr **bad);
        int (*post_recv)(struct tly_ibv_qp *qp, struct tly_ibv_recv_wr *wr, struct tly_ibv_recv_wr **bad);
        void *unused_3[5];
    } ops; /* filled by the device's provider */
    int cmd_fd, async_fd, num_comp_vectors;
    pthread_mutex_t mutex;
    void *abi_compat;
};

#endif
