/* verbs.h - libibverbs, opened at run time: a table of its functions.
 *
 * tly_verbs_load() opens the library once in a process and fills tly_verbs, which is constant from then on.  Posts,
 * polls and requests to be woken are no symbols of the library: a device's provider fills them into context->ops.
 *
 * The functions keep the library's ways.  Those that return a pointer return NULL and set errno.  Those that return int
 * return 0, or a positive errno; get_cq_event, get_async_event, query_gid and close_device return -1 instead and set
 * errno.  The library has its own locks, so any thread may call. */
#ifndef TLY_RDMA_VERBS_H
#define TLY_RDMA_VERBS_H

#include "transport/rdma/ibv.h"

/* F(name, symbol, its version, result, arguments) */
#define TLY_VERBS(F) \
    F(fork_init, ibv_fork_init, "IBVERBS_1.1", int, (void)) \
    F(get_device_list, ibv_get_device_list, "IBVERBS_1.1", struct tly_ibv_device **, (int *count)) \
    F(free_device_list, ibv_free_device_list, "IBVERBS_1.1", void, (struct tly_ibv_device **)) \
    F(open_device, ibv_open_device, "IBVERBS_1.1", struct tly_ibv_context *, (struct tly_ibv_device *)) \
    F(close_device, ibv_close_device, "IBVERBS_1.1", int, (struct tly_ibv_context *)) \
    F(query_device, ibv_query_device, "IBVERBS_1.1", int, \
      (struct tly_ibv_context *, struct tly_ibv_device_attr *)) \
    F(query_port, ibv_query_port, "IBVERBS_1.1", int, \
      (struct tly_ibv_context *, uint8_t port, struct tly_ibv_port_attr *)) \
    F(query_gid, ibv_query_gid, "IBVERBS_1.1", int, \
      (struct tly_ibv_context *, uint8_t port, int index, union tly_ibv_gid *)) \
    F(get_async_event, ibv_get_async_event, "IBVERBS_1.1", int, \
      (struct tly_ibv_context *, struct tly_ibv_async_event *)) \
    F(ack_async_event, ibv_ack_async_event, "IBVERBS_1.1", void, (struct tly_ibv_async_event *)) \
    F(alloc_pd, ibv_alloc_pd, "IBVERBS_1.1", struct tly_ibv_pd *, (struct tly_ibv_context *)) \
    F(dealloc_pd, ibv_dealloc_pd, "IBVERBS_1.1", int, (struct tly_ibv_pd *)) \
    F(reg_mr, ibv_reg_mr, "IBVERBS_1.1", struct tly_ibv_mr *, \
      (struct tly_ibv_pd *, void *at, size_t bytes, int access)) \
    F(dereg_mr, ibv_dereg_mr, "IBVERBS_1.1", int, (struct tly_ibv_mr *)) \
    F(create_comp_channel, ibv_create_comp_channel, "IBVERBS_1.0", struct tly_ibv_comp_channel *, \
      (struct tly_ibv_context *)) \
    F(destroy_comp_channel, ibv_destroy_comp_channel, "IBVERBS_1.0", int, (struct tly_ibv_comp_channel *)) \
    F(create_cq, ibv_create_cq, "IBVERBS_1.1", struct tly_ibv_cq *, \
      (struct tly_ibv_context *, int entries, void *cq_context, struct tly_ibv_comp_channel *, int vector)) \
    F(destroy_cq, ibv_destroy_cq, "IBVERBS_1.1", int, (struct tly_ibv_cq *)) \
    F(get_cq_event, ibv_get_cq_event, "IBVERBS_1.1", int, \
      (struct tly_ibv_comp_channel *, struct tly_ibv_cq **, void **cq_context)) \
    F(ack_cq_events, ibv_ack_cq_events, "IBVERBS_1.1", void, (struct tly_ibv_cq *, unsigned events)) \
    F(create_qp, ibv_create_qp, "IBVERBS_1.1", struct tly_ibv_qp *, \
      (struct tly_ibv_pd *, struct tly_ibv_qp_init_attr *)) \
    F(modify_qp, ibv_modify_qp, "IBVERBS_1.1", int, \
      (struct tly_ibv_qp *, struct tly_ibv_qp_attr *, int mask)) \
    F(destroy_qp, ibv_destroy_qp, "IBVERBS_1.1", int, (struct tly_ibv_qp *)) \
    F(wc_status_str, ibv_wc_status_str, "IBVERBS_1.1", const char *, (int status)) \
    F(event_type_str, ibv_event_type_str, "IBVERBS_1.1", const char *, (int type)) \
    F(query_gid_ex, _ibv_query_gid_ex, TLY_VERBS_OPTIONAL, int, \
      (struct tly_ibv_context *, uint32_t port, uint32_t index, struct tly_ibv_gid_entry *, uint32_t flags, \
       size_t entry_bytes))

/* Instead of a version: NULL if the library lacks it. */
#define TLY_VERBS_OPTIONAL NULL

struct tly_verbs {
#define TLY_VERBS_FIELD(name, symbol, version, result, arguments) result(*name) arguments;
    TLY_VERBS(TLY_VERBS_FIELD)
#undef TLY_VERBS_FIELD
};

extern struct tly_verbs tly_verbs;

/* Fill tly_verbs; may be called often.  Has the library prepare for forks, before any other verb is called.
 * -ENOTSUP with a sentence: there is no library that Tally can use. */
int tly_verbs_load(void);

/* 0 or errno; *bad is the first that was not taken, and with it all behind it. */
static inline int tly_ibv_post_send(struct tly_ibv_qp *qp, struct tly_ibv_send_wr *wr,
                                    struct tly_ibv_send_wr **bad)
{
    return qp->context->ops.post_send(qp, wr, bad);
}

static inline int tly_ibv_post_recv(struct tly_ibv_qp *qp, struct tly_ibv_recv_wr *wr,
                                    struct tly_ibv_recv_wr **bad)
{
    return qp->context->ops.post_recv(qp, wr, bad);
}

/* How many have been taken, or negative. */
static inline int tly_ibv_poll_cq(struct tly_ibv_cq *cq, int most, struct tly_ibv_wc *out)
{
    return cq->context->ops.poll_cq(cq, most, out);
}

/* The next completion writes an event into cq->channel, once.  Poll once more behind this: what came before is silent. */
static inline int tly_ibv_req_notify_cq(struct tly_ibv_cq *cq, int solicited_only)
{
    return cq->context->ops.req_notify_cq(cq, solicited_only);
}

#endif
