/* device.c - the devices that one loop uses, and which of them is behind an address.
 *
 * A loop opens a device once, with one channel for events, whose descriptor it watches.  Each connection has a completion
 * queue of its own: its size is exact, and it goes with the connection.  The event names it. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/fork.h"
#include "base/log.h"
#include "transport/address.h"
#include "transport/rdma/rdma.h"
#include "transport/tcp/tcp.h"

static int device_count; /* when the process first asked */

static void device_find(void)
{
    if (tly_verbs_load() != 0)
        return;
    struct tly_ibv_device **list = tly_verbs.get_device_list(&device_count);
    if (list)
        tly_verbs.free_device_list(list);
}

bool tly_rdma_is_there(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, device_find);
    return device_count > 0;
}

void tly_rdma_gid_text(const union tly_ibv_gid *gid, char text[64])
{
    if (!inet_ntop(AF_INET6, gid->raw, text, 64))
        text[0] = '\0';
}

/* --- events -------------------------------------------------------------------------------------- */

void tly_rdma_post(struct tly_rdma_channel *r)
{
    struct tly_rdma_device *d = r->port.device;
    tly_list_remove(&r->pending);
    tly_list_append(&d->pending, &r->pending);
    tly_loop_post(d->loop, &d->completions);
}

void tly_rdma_fail(struct tly_rdma_channel *r, int err, const char *what, const char *cause)
{
    const struct tly_channel_user *up = r->stream.base.up;
    void *user = r->stream.base.user;
    struct sockaddr_storage there = {0};
    char gid[64], peer[80];
    tly_rdma_gid_text(&r->port.gid, gid);
    snprintf(r->why, sizeof r->why, "RDMA on %s port %u, GID %s: %s (%s)",
             r->port.device->context->device->name, r->port.number, gid, what, cause);
    tly_tcp.network->address(&r->stream.base, true, &there);
    tly_address_text(&there, peer, sizeof peer);
    tly_warn("transport", "closing the connection to %s: %s", peer, r->why);
    up->enter(user);
    r->broken = true;
    up->ended(user, err, r->why);
    up->leave(user);
}

/* No event will come, or none can be read: its descriptors would wake the loop for ever. */
static void device_give_up(struct tly_rdma_device *d)
{
    tly_loop_remove(d->loop, &d->completions);
    tly_loop_remove(d->loop, &d->faults);
    while (!tly_list_empty(&d->channels)) {
        struct tly_rdma_channel *r =
            tly_list_entry(tly_list_take(&d->channels), struct tly_rdma_channel, node);
        tly_rdma_fail(r, ENODEV, "the device is gone", "pulled out, or reset by its driver");
    }
}

/* Did a call for an event fail, other than for want of one?  errno, which was 0 before, says so. */
static bool device_cannot_read(void)
{
    return errno != EAGAIN && errno != EINTR;
}

static void device_on_completions(struct tly_watch *w, uint32_t events)
{
    struct tly_rdma_device *d = tly_list_entry(w, struct tly_rdma_device, completions);
    struct tly_ibv_cq *cq;
    void *channel;
    d->references++;
    for (errno = 0; tly_verbs.get_cq_event(d->events, &cq, &channel) == 0; errno = 0) {
        struct tly_rdma_channel *r = channel;
        tly_verbs.ack_cq_events(cq, 1);
        tly_list_remove(&r->pending);
        tly_list_append(&d->pending, &r->pending);
    }
    bool gone = device_cannot_read();
    struct tly_list now = TLY_LIST_INIT(now);
    while (!tly_list_empty(&d->pending)) /* those that come meanwhile have their turn later */
        tly_list_append(&now, tly_list_take(&d->pending));
    while (!tly_list_empty(&now)) {
        struct tly_rdma_channel *r = tly_list_entry(tly_list_take(&now), struct tly_rdma_channel, pending);
        r->visit(r);
    }
    if (gone)
        device_give_up(d);
    tly_rdma_release(d);
}

/* Which channel this event ends; NULL: none.  That a queue pair has failed is noted: its completions end it. */
static struct tly_rdma_channel *device_take_event(const struct tly_ibv_async_event *e, const char *what)
{
    struct tly_rdma_channel *r;
    switch (e->event_type) {
    case TLY_IBV_EVENT_CQ_ERR:
        return e->element.cq->cq_context;
    case TLY_IBV_EVENT_QP_FATAL:
    case TLY_IBV_EVENT_QP_REQ_ERR:
    case TLY_IBV_EVENT_QP_ACCESS_ERR:
        r = e->element.qp->qp_context;
        r->fault = what;
        r->cause = e->event_type == TLY_IBV_EVENT_QP_ACCESS_ERR ? "the peer wrote where it may not"
                   : e->event_type == TLY_IBV_EVENT_QP_REQ_ERR
                       ? "the peer sent what this end does not take"
                       : "a fault of the device or its driver";
    }
    return NULL;
}

void tly_rdma_hear(struct tly_rdma_device *d)
{
    struct tly_ibv_async_event e;
    bool gone = false;
    d->references++;
    for (errno = 0; !gone && tly_verbs.get_async_event(d->context, &e) == 0; errno = 0) {
        const char *what = tly_verbs.event_type_str(e.event_type);
        struct tly_rdma_channel *r = device_take_event(&e, what);
        gone = e.event_type == TLY_IBV_EVENT_DEVICE_FATAL;
        tly_log(gone ? TALLY_LOG_WARNING : TALLY_LOG_DEBUG, "transport", "RDMA device %s: %s",
                d->context->device->name, what);
        tly_verbs.ack_async_event(&e); /* a queue that has events is not destroyed before */
        if (r)
            tly_rdma_fail(r, EIO, what, "a fault of the device or its driver");
    }
    if (gone || device_cannot_read())
        device_give_up(d);
    tly_rdma_release(d);
}

static void device_on_fault(struct tly_watch *w, uint32_t events)
{
    tly_rdma_hear(tly_list_entry(w, struct tly_rdma_device, faults));
}

/* --- opening ------------------------------------------------------------------------------------- */

static void device_watch(struct tly_rdma_device *d, struct tly_watch *w, int fd,
                         void (*ready)(struct tly_watch *w, uint32_t events))
{
    *w = (struct tly_watch){.fd = tly_fd_own(fd), .ready = ready};
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

static void device_close(struct tly_rdma_device *d)
{
    if (d->events) {
        tly_loop_remove(d->loop, &d->completions);
        tly_fd_disown(d->completions.fd);
        tly_verbs.destroy_comp_channel(d->events);
    }
    if (d->context) {
        tly_loop_remove(d->loop, &d->faults);
        tly_fd_disown(d->faults.fd);
        tly_fd_disown(d->context->cmd_fd);
        tly_verbs.close_device(d->context);
    }
    free(d);
}

void tly_rdma_release(struct tly_rdma_device *d)
{
    if (d && --d->references == 0)
        device_close(d);
}

static int device_open(struct tly_loop *loop, struct tly_ibv_device *device, struct tly_rdma_device **out)
{
    struct tly_rdma_device *d = calloc(1, sizeof *d);
    if (!d)
        return tly_fail(ENOMEM, "out of memory");
    d->loop = loop;
    d->references = 1;
    tly_list_init(&d->channels);
    tly_list_init(&d->pending);
    int err = 0;
    d->context = tly_verbs.open_device(device);
    if (d->context) {
        tly_fd_own(d->context->cmd_fd);
        device_watch(d, &d->faults, d->context->async_fd, device_on_fault);
        err = tly_loop_add(loop, &d->faults, EPOLLIN);
        d->events = tly_verbs.create_comp_channel(d->context);
    }
    if (d->events) {
        device_watch(d, &d->completions, d->events->fd, device_on_completions);
        err = err ? err : tly_loop_add(loop, &d->completions, EPOLLIN);
    } else {
        err = errno > 0 ? -errno : -EIO;
    }
    if (err) {
        device_close(d);
        return tly_fail(-err, "cannot open the RDMA device %s: %s (permissions on /dev/infiniband?)",
                        device->name, strerror(-err));
    }
    *out = d;
    return 0;
}

struct device_wanted {
    const struct tly_loop *loop;
    const char *name;
};

static bool device_is(struct tly_watch *w, const void *arg)
{
    const struct device_wanted *wanted = arg;
    if (w->ready != device_on_completions)
        return false;
    const struct tly_rdma_device *d = tly_list_entry(w, struct tly_rdma_device, completions);
    return d->loop == wanted->loop && strcmp(d->context->device->name, wanted->name) == 0;
}

/* With a reference. */
static int device_get(struct tly_loop *loop, struct tly_ibv_device *device, struct tly_rdma_device **out)
{
    const struct device_wanted wanted = {loop, device->name};
    struct tly_watch *w = tly_loop_find(loop, device_is, &wanted);
    if (!w)
        return device_open(loop, device, out);
    *out = tly_list_entry(w, struct tly_rdma_device, completions);
    (*out)->references++;
    return 0;
}

/* --- ports --------------------------------------------------------------------------------------- */

static void port_write_gid(const struct sockaddr_storage *address, union tly_ibv_gid *out)
{
    memset(out, 0, sizeof *out);
    if (address->ss_family == AF_INET6) {
        memcpy(out->raw, &((const struct sockaddr_in6 *)address)->sin6_addr, sizeof out->raw);
    } else {
        out->raw[10] = out->raw[11] = 0xff;
        memcpy(out->raw + 12, &((const struct sockaddr_in *)address)->sin_addr, 4);
    }
}

/* The entry of a table of GIDs; false: it is empty, or of another type than RoCE v2. */
static bool port_read_entry(const struct tly_rdma_port *p, int index, union tly_ibv_gid *gid)
{
    struct tly_ibv_gid_entry entry = {0};
    struct tly_ibv_context *context = p->device->context;
    if (tly_verbs.query_gid_ex) {
        if (tly_verbs.query_gid_ex(context, p->number, (uint32_t)index, &entry, 0, sizeof entry) != 0 ||
            entry.gid_type != TLY_IBV_GID_TYPE_ROCE_V2)
            return false;
        *gid = entry.gid;
        return true;
    }
    char path[400], type[16] = "";
    snprintf(path, sizeof path, "%.256s/ports/%d/gid_attrs/types/%d", context->device->ibdev_path, p->number,
             index);
    FILE *f = fopen(path, "re");
    if (f) {
        if (!fgets(type, sizeof type, f))
            type[0] = '\0';
        fclose(f);
    }
    return strncmp(type, "RoCE v2", 7) == 0 && tly_verbs.query_gid(context, p->number, index, gid) == 0;
}

/* Whether this port is to be used for `gid`; fills its index in. */
static bool port_fits(struct tly_rdma_port *p, const union tly_ibv_gid *wanted,
                      const struct tly_rdma_choice *choice)
{
    memset(&p->attr, 0, sizeof p->attr);
    if (tly_verbs.query_port(p->device->context, p->number, &p->attr) != 0 ||
        p->attr.state != TLY_IBV_PORT_ACTIVE)
        return false;
    if (choice->gid >= 0) {
        p->gid_index = (uint8_t)choice->gid;
        return tly_verbs.query_gid(p->device->context, p->number, choice->gid, &p->gid) == 0;
    }
    if (p->attr.link_layer ==
        TLY_IBV_LINK_LAYER_INFINIBAND) /* its addresses are not in the table: only by name */
        return *choice->device && tly_verbs.query_gid(p->device->context, p->number, 0, &p->gid) == 0;
    for (int i = 0; i < p->attr.gid_tbl_len && i <= UINT8_MAX; i++) {
        p->gid_index = (uint8_t)i;
        if (port_read_entry(p, i, &p->gid) && memcmp(&p->gid, wanted, sizeof *wanted) == 0)
            return true;
    }
    return false;
}

static bool device_has(struct tly_rdma_device *d, const union tly_ibv_gid *gid,
                       const struct tly_rdma_choice *choice, struct tly_rdma_port *out)
{
    struct tly_ibv_device_attr attr;
    if (tly_verbs.query_device(d->context, &attr) != 0)
        return false;
    for (uint8_t n = 1; n <= attr.phys_port_cnt; n++) {
        struct tly_rdma_port p = {.device = d, .number = n};
        if (port_fits(&p, gid, choice)) {
            *out = p;
            return true;
        }
    }
    return false;
}

int tly_rdma_find_port(struct tly_loop *loop, const struct sockaddr_storage *address,
                       const struct tly_rdma_choice *choice, struct tly_rdma_port *out)
{
    char host[80];
    int count = 0, err = tly_verbs_load();
    if (err)
        return err;
    struct tly_ibv_device **list = tly_verbs.get_device_list(&count);
    union tly_ibv_gid gid;
    port_write_gid(address, &gid);
    tly_address_host(address, host, sizeof host);
    err = tly_fail(ENODEV, "no port of %s%s is up and has a GID of RoCE v2 for %s (ibv_devinfo -v)",
                   *choice->device ? "the RDMA device " : "an RDMA device", choice->device, host);
    bool found = false;
    for (int i = 0; i < count && !found; i++) {
        struct tly_rdma_device *d = NULL;
        if (*choice->device && strcmp(list[i]->name, choice->device) != 0)
            continue;
        int failed = device_get(loop, list[i], &d);
        if (!d) {
            err = failed;
            continue;
        }
        found = device_has(d, &gid, choice, out);
        if (!found)
            tly_rdma_release(d);
    }
    if (list)
        tly_verbs.free_device_list(list);
    return found ? 0 : err;
}
