/* queue.c - what the card has completed, and messages in.
 *
 * Receives complete in the order in which they were posted, so message n lies in receive n modulo 64.  It is handed on, and its
 * receive is posted again.  What comes while the set-up goes on waits until both ends are ready. */
#include <errno.h>
#include <string.h>

#include "base/clock.h"
#include "transport/rdma/rdma.h"
#include "wire/pack.h"

enum {
    POLLED = 16,  /* completions with one poll */
    A_VISIT = 256 /* completions; then others have their turn */
};

static const uint64_t of_receive = 1ull << 32; /* in wr_id; else it is the number of a message */

static uint8_t *queue_receive(const struct tly_rdma_channel *r, uint32_t n)
{
    return r->own.data + (size_t)(n % TLY_RDMA_RECEIVES) * TLY_RDMA_MESSAGE;
}

/* --- in ------------------------------------------------------------------------------------------ */

static int queue_post_receive(struct tly_rdma_channel *r)
{
    struct tly_ibv_sge s = {(uintptr_t)queue_receive(r, r->posted), TLY_RDMA_MESSAGE, r->own.mr->lkey};
    struct tly_ibv_recv_wr wr = {.wr_id = of_receive, .sg_list = &s, .num_sge = 1}, *bad;
    int err = tly_ibv_post_recv(r->qp, &wr, &bad);
    r->posted += !err;
    return err;
}

int tly_rdma_post_receives(struct tly_rdma_channel *r)
{
    int err = 0;
    while (!err && r->posted < TLY_RDMA_RECEIVES)
        err = queue_post_receive(r);
    return err;
}

static void queue_end(struct tly_rdma_channel *r, int err, const char *why)
{
    r->broken = true;
    r->stream.base.up->ended(r->stream.base.user, err, why);
}

/* What the peer says of its receives and of our payloads.  False: it cannot be. */
static bool queue_take_news(struct tly_rdma_channel *r, const uint8_t *m)
{
    uint32_t posted = tly_get32(m);
    uint64_t freed = tly_get64(m + 8);
    if (posted - r->sent > TLY_RDMA_RECEIVES || freed & ~(uint64_t)r->lent)
        return false;
    r->allowed = posted;
    r->lent &= ~(uint32_t)freed;
    return true;
}

/* Where the payload lies, and which places it takes; NULL: nowhere. */
static const uint8_t *queue_find_payload(const struct tly_rdma_channel *r, const uint8_t *m, uint32_t len,
                                         uint32_t head, const struct tly_arrival *in, uint32_t *mask)
{
    uint32_t place = tly_get32(m + 4), besides = TLY_RDMA_HEAD + head + in->trailer;
    *mask = 0;
    if (place == TLY_RDMA_NO_PLACE)
        return len == besides + in->follows ? m + TLY_RDMA_HEAD + head : NULL;
    if (len != besides || place >= TLY_RDMA_PLACES || !in->follows ||
        in->follows > (TLY_RDMA_PLACES - place) * (uint32_t)TLY_RDMA_PLACE)
        return NULL;
    *mask = tly_rdma_row(in->follows) << place;
    return *mask & r->freed ? NULL : r->places.data + (size_t)place * TLY_RDMA_PLACE;
}

/* The message in receive `n` has come. */
static void queue_take(struct tly_rdma_channel *r, uint32_t n)
{
    const struct tly_channel_user *up = r->stream.base.up;
    void *user = r->stream.base.user;
    const uint8_t *m = queue_receive(r, n), *header = m + TLY_RDMA_HEAD;
    uint32_t len = r->length[n % TLY_RDMA_RECEIVES], mask;
    if (len < TLY_RDMA_HEAD || !queue_take_news(r, m)) {
        queue_end(r, EPROTO, "a message of RDMA that cannot be");
        return;
    }
    r->bytes_arrived += len;
    up->heard(user, len - TLY_RDMA_HEAD);
    if (len == TLY_RDMA_HEAD || tly_rdma_is_closed(r))
        return;
    uint32_t head = len < TLY_RDMA_HEAD + TLY_FRAME_LEAST ? TLY_FRAME_BYTES : tly_frame_size(header);
    if (len < TLY_RDMA_HEAD + head) {
        queue_end(r, EPROTO, "a frame in part");
        return;
    }
    struct tly_arrival *in = up->begin(user, header);
    if (!in)
        return;
    const uint8_t *payload = queue_find_payload(r, m, len, head, in, &mask);
    if (!payload) {
        queue_end(r, EPROTO, "a payload outside of its places");
        return;
    }
    if (mask) {
        r->bytes_arrived += in->follows;
        up->heard(user, in->follows);
    }
    if (in->to && in->follows)
        memcpy(in->to, payload, in->follows);
    in->landed = in->follows;
    r->freed |= mask;
    up->arrived(user, m + len - in->trailer);
}

static void queue_hand_on(struct tly_rdma_channel *r)
{
    while (r->begun && !tly_rdma_is_closed(r) && r->taken != r->came) {
        queue_take(r, r->taken++);
        if (!tly_rdma_is_closed(r) && queue_post_receive(r) != 0)
            queue_end(r, EIO, "cannot post a receive");
    }
}

/* --- completions --------------------------------------------------------------------------------- */

static void queue_fail(struct tly_rdma_channel *r, const struct tly_ibv_wc *wc)
{
    static const struct {
        int status;
        const char *cause;
    } causes[] = {
        {TLY_IBV_WC_RETRY_EXC_ERR,
         "the peer or the way to it does not answer: cable, switch, or UDP port 4791 shut"},
        {TLY_IBV_WC_RNR_RETRY_EXC_ERR, "the peer had no receive posted"},
        {TLY_IBV_WC_REM_ACCESS_ERR, "the peer's memory is no longer there"},
        {TLY_IBV_WC_REM_INV_REQ_ERR, "the peer takes no message of this length"},
        {TLY_IBV_WC_WR_FLUSH_ERR, "the queue pair has failed before"},
    };
    const char *cause = "a fault of the device or its driver";
    if (wc->status ==
        TLY_IBV_WC_WR_FLUSH_ERR) /* a consequence: the device may have told of what came before it */
        tly_rdma_hear(r->port.device);
    if (tly_rdma_is_closed(r))
        return;
    for (size_t i = 0; i < sizeof causes / sizeof *causes; i++)
        if (causes[i].status == wc->status)
            cause = causes[i].cause;
    tly_rdma_fail(r, ECONNRESET, r->fault ? r->fault : tly_verbs.wc_status_str(wc->status),
                  r->fault ? r->cause : cause);
}

static void queue_complete_send(struct tly_rdma_channel *r)
{
    uint32_t slot = r->completed++ % TLY_RDMA_SENDS;
    r->writing &= ~r->written[slot];
    r->bytes_completed += r->bytes[slot];
    r->answered_at = tly_now();
    if (r->completed == r->sent)
        r->busy_ns += r->answered_at - r->busy_since;
}

/* How many; 0: none are there. */
static int queue_poll(struct tly_rdma_channel *r)
{
    struct tly_ibv_wc wc[POLLED];
    int n = tly_ibv_poll_cq(r->cq, POLLED, wc);
    for (int i = 0; i < n && !r->broken; i++) {
        if (wc[i].status != TLY_IBV_WC_SUCCESS)
            queue_fail(r, &wc[i]);
        else if (wc[i].wr_id & of_receive)
            r->length[r->came++ % TLY_RDMA_RECEIVES] = wc[i].byte_len;
        else
            queue_complete_send(r);
    }
    if (n < 0)
        queue_end(r, EIO, "the completion queue of RDMA has failed");
    return n;
}

void tly_rdma_visit(struct tly_rdma_channel *r)
{
    const struct tly_channel_user *up = r->stream.base.up;
    void *user = r->stream.base.user;
    bool asked = false;
    int n = 0;
    up->enter(user);
    queue_hand_on(r);
    while (!tly_rdma_is_closed(r) && n < A_VISIT) {
        int some = queue_poll(r);
        if (some == 0 && asked)
            break;
        if (some == 0) {
            asked = true;
            tly_ibv_req_notify_cq(r->cq, 0);
        }
        n += some;
        queue_hand_on(r);
    }
    if (!tly_rdma_is_closed(r) && n >= A_VISIT)
        tly_rdma_post(r);
    if (!tly_rdma_is_closed(r) && r->full) {
        r->full = false;
        up->room(user);
    }
    up->leave(user);
}

void tly_rdma_drain(struct tly_rdma_channel *r, int64_t ns)
{
    struct tly_ibv_wc wc[POLLED];
    int64_t most = tly_now() + ns, until = r->answered_at + ns;
    bool done = r->completed == r->sent;
    while (!done) {
        int n = tly_ibv_poll_cq(r->cq, POLLED, wc);
        for (int i = 0; i < n; i++) {
            done |= wc[i].status != TLY_IBV_WC_SUCCESS;
            r->completed += !(wc[i].wr_id & of_receive);
        }
        until = n > 0 ? most : until; /* the card answers: it was this end that had not looked */
        done |= n < 0 || r->completed == r->sent || tly_now() >= until;
    }
}
