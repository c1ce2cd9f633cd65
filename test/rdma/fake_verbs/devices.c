/* devices.c - devices, one for each interface that has an address, their GIDs, contexts and async events. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netpacket/packet.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "test/rdma/fake_verbs/library.h"

static pthread_mutex_t devices_lock = PTHREAD_MUTEX_INITIALIZER; /* guards references and the next two */
static struct fake_context *contexts;
static int listed; /* devices in lists */

/* --- devices ---------------------------------------------------------------------------------------------------- */

static int devices_mtu(const char *interface)
{
    struct ifreq r = {0};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    snprintf(r.ifr_name, sizeof r.ifr_name, "%s", interface);
    int mtu = fd >= 0 && ioctl(fd, SIOCGIFMTU, &r) == 0 ? r.ifr_mtu : 1500;
    if (fd >= 0)
        close(fd);
    for (int of = TLY_IBV_MTU_4096; of > TLY_IBV_MTU_256; of--)
        if (128 << of <= mtu - 60) /* headers of RoCE v2 over IPv6 */
            return of;
    return TLY_IBV_MTU_256;
}

/* As on most cards, each address has two entries: RoCE v1, and v2 behind it. */
static void devices_add_gid(struct fake_device *d, const uint8_t raw[16], uint32_t interface)
{
    for (int type = TLY_IBV_GID_TYPE_ROCE_V1; type <= TLY_IBV_GID_TYPE_ROCE_V2 && d->gids < FAKE_GIDS;
         type++) {
        struct tly_ibv_gid_entry *e = &d->gid[d->gids];
        *e = (struct tly_ibv_gid_entry){
            .gid_index = d->gids++, .port_num = 1, .gid_type = (uint32_t)type, .ndev_ifindex = interface};
        memcpy(e->gid.raw, raw, 16);
    }
}

static void devices_add_address(struct fake_device *d, const struct sockaddr *a, uint32_t interface)
{
    uint8_t raw[16] = {[10] = 0xff, [11] = 0xff};
    if (a->sa_family == AF_INET)
        memcpy(raw + 12, &((const struct sockaddr_in *)a)->sin_addr, 4);
    else
        memcpy(raw, &((const struct sockaddr_in6 *)a)->sin6_addr, 16);
    for (uint32_t i = 0; i < d->gids; i++)
        if (memcmp(d->gid[i].gid.raw, raw, 16) == 0)
            return;
    devices_add_gid(d, raw, interface);
}

/* fe80:: and what IPv6 makes of the MAC. */
static void devices_own_gid(const uint8_t mac[6], uint8_t out[16])
{
    const uint8_t raw[16] = {0xfe, 0x80, [8] = mac[0] ^ 2, mac[1], mac[2],
                             0xff, 0xfe, mac[3],           mac[4], mac[5]};
    memcpy(out, raw, 16);
}

static struct fake_device *devices_make(const struct ifaddrs *list, const char *interface, int number)
{
    struct fake_device *d = calloc(1, sizeof *d);
    uint32_t index = if_nametoindex(interface);
    uint8_t own[16], mac[6] = {0};
    if (!d)
        fake_die("out of memory");
    for (const struct ifaddrs *a = list; a; a = a->ifa_next)
        if (a->ifa_addr && a->ifa_addr->sa_family == AF_PACKET && strcmp(a->ifa_name, interface) == 0)
            memcpy(mac, ((struct sockaddr_ll *)a->ifa_addr)->sll_addr, 6);
    devices_own_gid(mac, own);
    memcpy(&d->guid, own + 8, 8);
    d->base.node_type = TLY_IBV_NODE_CA;
    snprintf(d->base.name, sizeof d->base.name, "fake%d", number);
    snprintf(d->base.dev_name, sizeof d->base.dev_name, "uverbs%d", number);
    snprintf(d->base.dev_path, sizeof d->base.dev_path, "/sys/class/infiniband_verbs/uverbs%d", number);
    snprintf(d->base.ibdev_path, sizeof d->base.ibdev_path, "/sys/class/infiniband/fake%d", number);
    d->mtu = devices_mtu(interface);
    if (fake_settings()->infiniband) {
        d->lid = (uint16_t)(number + 1);
        d->mtu = TLY_IBV_MTU_4096;
        d->gids = 1;
        d->gid[0] = (struct tly_ibv_gid_entry){.port_num = 1, .gid_type = TLY_IBV_GID_TYPE_IB};
        own[15] ^= (uint8_t)number;
        memcpy(d->gid[0].gid.raw, own, 16);
        return d;
    }
    devices_add_gid(d, own, index);
    for (const struct ifaddrs *a = list; a; a = a->ifa_next)
        if (a->ifa_addr && strcmp(a->ifa_name, interface) == 0 &&
            (a->ifa_addr->sa_family == AF_INET || a->ifa_addr->sa_family == AF_INET6))
            devices_add_address(d, a->ifa_addr, index);
    return d;
}

static bool devices_has_address(const struct ifaddrs *list, const char *interface)
{
    for (const struct ifaddrs *a = list; a; a = a->ifa_next)
        if (a->ifa_addr && (a->ifa_flags & IFF_UP) && strcmp(a->ifa_name, interface) == 0 &&
            (a->ifa_addr->sa_family == AF_INET || a->ifa_addr->sa_family == AF_INET6))
            return true;
    return false;
}

EXPORT struct tly_ibv_device **ibv_get_device_list(int *count)
{
    struct ifaddrs *list = NULL;
    struct if_nameindex *names = if_nameindex();
    int n = 0, code = fake_fails("ibv_get_device_list");
    struct tly_ibv_device **out = calloc((size_t)fake_settings()->devices + 1, sizeof *out);
    if (code || !out || !names || getifaddrs(&list) != 0) {
        errno = code ? code : errno;
        if_freenameindex(names);
        free(out);
        return NULL;
    }
    for (const struct if_nameindex *i = names; i->if_index && n < fake_settings()->devices; i++)
        if (devices_has_address(list, i->if_name)) {
            struct fake_device *d = devices_make(list, i->if_name, n);
            d->references = 1;
            out[n++] = &d->base;
        }
    pthread_mutex_lock(&devices_lock);
    listed += n;
    pthread_mutex_unlock(&devices_lock);
    freeifaddrs(list);
    if_freenameindex(names);
    if (count)
        *count = n;
    return out;
}

static void devices_release(struct fake_device *d)
{
    if (--d->references == 0)
        free(d);
}

EXPORT void ibv_free_device_list(struct tly_ibv_device **list)
{
    pthread_mutex_lock(&devices_lock);
    for (struct tly_ibv_device **d = list; *d; d++, listed--)
        devices_release((struct fake_device *)*d);
    pthread_mutex_unlock(&devices_lock);
    free(list);
}

EXPORT const char *ibv_get_device_name(struct tly_ibv_device *d)
{
    return d->name;
}

EXPORT uint64_t ibv_get_device_guid(struct tly_ibv_device *d)
{
    return ((struct fake_device *)d)->guid;
}

/* --- contexts --------------------------------------------------------------------------------------------------- */

static void devices_say_hello(struct fake_context *c, int page, int events)
{
    const struct fake_device *d = c->device;
    struct fake_request q = {.type = FAKE_HELLO,
                             .faults = fake_settings()->faults,
                             .infiniband = fake_settings()->infiniband,
                             .lid = d->lid,
                             .at = (uintptr_t)c->page, /* may it be read? */
                             .gids = d->gids};
    struct fake_reply reply;
    memcpy(q.gid, d->gid, sizeof q.gid);
    int err;
    do { /* the card may just have ended */
        if (c->base.cmd_fd >= 0)
            close(c->base.cmd_fd);
        c->base.cmd_fd = fake_connect();
        err = fake_call(c, &q, (int[]){page, c->bell, events}, 3, &reply);
    } while (err == EPIPE);
    if (err)
        fake_die("the card cannot serve this process: %s", strerror(err));
}

static void devices_free(struct fake_context *c)
{
    munmap(c->page, sizeof *c->page);
    close(c->base.cmd_fd);
    close(c->base.async_fd);
    close(c->bell);
    pthread_mutex_destroy(&c->call_lock);
    pthread_mutex_destroy(&c->lock);
    pthread_mutex_destroy(&c->base.mutex);
    free(c);
}

EXPORT struct tly_ibv_context *ibv_open_device(struct tly_ibv_device *device)
{
    struct fake_context *c = calloc(1, sizeof *c);
    int events[2], page = memfd_create("fake_verbs", MFD_CLOEXEC), code = fake_fails("ibv_open_device");
    if (code || !c || page < 0 || ftruncate(page, sizeof *c->page) != 0 || pipe2(events, O_CLOEXEC) != 0) {
        errno = code ? code : errno;
        free(c);
        close(page);
        return NULL;
    }
    c->page = mmap(NULL, sizeof *c->page, PROT_READ | PROT_WRITE, MAP_SHARED, page, 0);
    c->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (c->page == MAP_FAILED || c->bell < 0)
        fake_die("no page for a context: %s", strerror(errno));
    c->device = (struct fake_device *)device;
    c->base.device = device;
    c->base.cmd_fd = -1;
    c->base.async_fd = events[0];
    c->base.num_comp_vectors = 2;
    pthread_mutex_init(&c->base.mutex, NULL);
    pthread_mutex_init(&c->call_lock, NULL);
    pthread_mutex_init(&c->lock, NULL);
    fake_fill_ops(&c->base);
    devices_say_hello(c, page, events[1]);
    close(page);
    close(events[1]);
    pthread_mutex_lock(&devices_lock);
    c->device->references++;
    c->next = contexts;
    contexts = c;
    pthread_mutex_unlock(&devices_lock);
    return &c->base;
}

EXPORT int ibv_close_device(struct tly_ibv_context *context)
{
    struct fake_context *c = fake_context_of(context), **at = &contexts;
    if (c->pds || c->mrs || c->channels || c->cqs || c->qps)
        fake_die("a device is closed with objects: %d PDs, %d MRs, %d channels%s%s", c->pds, c->mrs,
                 c->channels, c->cqs ? ", CQs" : "", c->qps ? ", QPs" : "");
    fake_collect(c);
    pthread_mutex_lock(&devices_lock);
    while (*at != c)
        at = &(*at)->next;
    *at = c->next;
    devices_release(c->device);
    pthread_mutex_unlock(&devices_lock);
    devices_free(c);
    return 0;
}

EXPORT int ibv_query_device(struct tly_ibv_context *c, struct tly_ibv_device_attr *out)
{
    const struct fake_device *d = fake_context_of(c)->device;
    int code = fake_fails("ibv_query_device");
    *out = (struct tly_ibv_device_attr){
        .fw_ver = "1.0",
        .node_guid = d->guid,
        .sys_image_guid = d->guid,
        .max_mr_size = UINT64_MAX,
        .page_size_cap = 0xfffff000,
        .max_qp = 1 << 16,
        .max_qp_wr = fake_settings()->wr,
        .max_sge = FAKE_SGES,
        .max_sge_rd = FAKE_SGES,
        .max_cq = 1 << 16,
        .max_cqe = fake_settings()->cqe,
        .max_mr = 1 << 20,
        .max_pd = 1 << 16,
        .max_qp_rd_atom = 16,
        .max_res_rd_atom = 1 << 20,
        .max_qp_init_rd_atom = 16,
        .max_pkeys = 1,
        .local_ca_ack_delay = 15,
        .phys_port_cnt = 1,
    };
    return code;
}

EXPORT int ibv_query_port(struct tly_ibv_context *context, uint8_t port, struct tly_ibv_port_attr *out)
{
    const struct fake_context *c = fake_context_of(context);
    int code = fake_fails("ibv_query_port");
    if (code || port != 1)
        return code ? code : EINVAL;
    bool down = atomic_load(&c->page->down);
    struct tly_ibv_port_attr a = {
        .state = down ? TLY_IBV_PORT_DOWN : TLY_IBV_PORT_ACTIVE,
        .max_mtu = TLY_IBV_MTU_4096,
        .active_mtu = c->device->mtu,
        .gid_tbl_len = FAKE_GIDS,
        .max_msg_sz = FAKE_MOST_MESSAGE,
        .pkey_tbl_len = 1,
        .lid = c->device->lid,
        .active_width = 2,
        .active_speed = 32,
        .phys_state = down ? 3 : 5,
        .link_layer = c->device->lid ? TLY_IBV_LINK_LAYER_INFINIBAND : TLY_IBV_LINK_LAYER_ETHERNET,
    };
    memcpy(out, &a, offsetof(struct tly_ibv_port_attr, port_cap_flags2)); /* as the library's 1.1 */
    return 0;
}

EXPORT int ibv_query_gid(struct tly_ibv_context *c, uint8_t port, int index, union tly_ibv_gid *out)
{
    int code = fake_fails("ibv_query_gid");
    if (code || port != 1 || index < 0 || index >= FAKE_GIDS) {
        errno = code ? code : EINVAL;
        return -1;
    }
    *out = fake_context_of(c)->device->gid[index].gid;
    return 0;
}

EXPORT int _ibv_query_gid_ex(struct tly_ibv_context *context, uint32_t port, uint32_t index,
                             struct tly_ibv_gid_entry *out, uint32_t flags, size_t bytes)
{
    const struct fake_device *d = fake_context_of(context)->device;
    int code = fake_fails("_ibv_query_gid_ex");
    if (code || port != 1 || flags || bytes < sizeof *out || index >= FAKE_GIDS)
        return code ? code : EINVAL;
    if (index >= d->gids)
        return ENODATA;
    *out = d->gid[index];
    return 0;
}

EXPORT int ibv_fork_init(void)
{
    int code = fake_fails("ibv_fork_init");
    return !code && fake_own_count(FAKE_REGISTRATIONS) ? EINVAL : code; /* too late */
}

/* --- async events ----------------------------------------------------------------------------------------------- */

static bool devices_event_of(struct fake_context *c, const struct fake_event *e,
                             struct tly_ibv_async_event *out)
{
    bool found = false;
    out->event_type = (int)e->type;
    pthread_mutex_lock(&c->lock);
    switch (e->type) {
    case TLY_IBV_EVENT_CQ_ERR:
        for (struct fake_cq *cq = c->cqs; cq && !found; cq = cq->next)
            if ((found = cq->base.handle == e->handle))
                out->element.cq = &cq->base;
        break;
    case TLY_IBV_EVENT_QP_FATAL:
    case TLY_IBV_EVENT_QP_REQ_ERR:
    case TLY_IBV_EVENT_QP_ACCESS_ERR:
    case TLY_IBV_EVENT_COMM_EST:
        for (struct fake_qp *qp = c->qps; qp && !found; qp = qp->next)
            if ((found = qp->base.qp_num == e->handle)) {
                out->element.qp = &qp->base;
                qp->got_events++;
            }
        break;
    default:
        out->element.port_num = 1;
        found = true;
    }
    pthread_mutex_unlock(&c->lock);
    return found;
}

EXPORT int ibv_get_async_event(struct tly_ibv_context *c, struct tly_ibv_async_event *out)
{
    struct fake_event e;
    do /* events of what was destroyed have gone with it */
        if (read(c->async_fd, &e, sizeof e) != sizeof e)
            return -1;
    while (!devices_event_of(fake_context_of(c), &e, out));
    return 0;
}

EXPORT void ibv_ack_async_event(struct tly_ibv_async_event *e)
{
    switch (e->event_type) {
    case TLY_IBV_EVENT_QP_FATAL:
    case TLY_IBV_EVENT_QP_REQ_ERR:
    case TLY_IBV_EVENT_QP_ACCESS_ERR:
    case TLY_IBV_EVENT_COMM_EST:
        e->element.qp->events_completed++;
        break;
    case TLY_IBV_EVENT_CQ_ERR:
        e->element.cq->async_events_completed++;
    }
}

/* --- for tests --------------------------------------------------------------------------------------------------- */

void fake_collect(struct fake_context *c)
{
    pthread_mutex_lock(&c->lock);
    uint64_t bytes = atomic_load(&c->page->bytes), rnrs = atomic_load(&c->page->rnrs);
    fake_add(FAKE_BYTES, (int64_t)(bytes - c->seen_bytes));
    fake_add(FAKE_RNRS, (int64_t)(rnrs - c->seen_rnrs));
    c->seen_bytes = bytes;
    c->seen_rnrs = rnrs;
    pthread_mutex_unlock(&c->lock);
}

/* Send a request of each context. */
static void devices_ask_all(struct fake_request *q)
{
    pthread_mutex_lock(&devices_lock);
    for (struct fake_context *c = contexts; c; c = c->next)
        fake_call(c, q, NULL, 0, NULL);
    pthread_mutex_unlock(&devices_lock);
}

EXPORT uint64_t fake_verbs_count(enum fake_verbs_count which)
{
    pthread_mutex_lock(&devices_lock);
    for (struct fake_context *c = contexts; c; c = c->next)
        fake_collect(c);
    pthread_mutex_unlock(&devices_lock);
    return fake_own_count(which);
}

EXPORT int fake_verbs_left(void)
{
    pthread_mutex_lock(&devices_lock);
    int left = listed;
    for (struct fake_context *c = contexts; c; c = c->next) {
        pthread_mutex_lock(&c->lock);
        left += 1 + c->pds + c->mrs + c->channels;
        for (struct fake_cq *cq = c->cqs; cq; cq = cq->next)
            left++;
        for (struct fake_qp *qp = c->qps; qp; qp = qp->next)
            left++;
        pthread_mutex_unlock(&c->lock);
    }
    pthread_mutex_unlock(&devices_lock);
    return left;
}

EXPORT void fake_verbs_set(const char *words)
{
    fake_take_words(words);
    devices_ask_all(&(struct fake_request){.type = FAKE_FAULTS, .faults = fake_settings()->faults});
}

EXPORT void fake_verbs_vanish(void)
{
    devices_ask_all(&(struct fake_request){.type = FAKE_VANISH});
}

EXPORT void fake_verbs_link(int up)
{
    devices_ask_all(&(struct fake_request){.type = FAKE_LINK, .mask = up});
}
