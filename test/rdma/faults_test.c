/* faults_test.c - what a connection over RDMA does when its device, its card or its peer fails, on the fake card. */
#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <sodium.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "test/media/ends.h"
#include "test/rdma/fake_verbs.h"
#include "transport/link/link.h"
#include "transport/rdma/rdma.h"

#include <cmocka.h>

enum { PATIENCE_MS = PATIENCE_S * 1000 };

static const struct ends_medium rdma = {.name = "rdma", .medium = &tly_rdma, .whole = true};
static struct tly_rdma_channel *from, *to;

static void open_both(void)
{
    fake_verbs_set("");
    ends_use(&rdma);
    ends_start(NULL);
    ends_dial();
    ends_until(&x.a.opened, 1);
    ends_until(&x.b.opened, 1);
    from = tly_rdma_of(x.a.link->channel);
    to = tly_rdma_of(x.b.link->channel);
}

static void close_both(void)
{
    ends_stop();
    assert_int_equal(fake_verbs_left(), 0);
}

/* Let the card complete something of this queue, and keep the event from the loop, which has other things to do. */
static void complete_unseen(const struct tly_ibv_cq *wanted)
{
    struct tly_ibv_comp_channel *events = wanted->channel;
    struct pollfd p = {.fd = events->fd, .events = POLLIN};
    struct tly_ibv_cq *cq;
    void *user;
    do {
        assert_int_equal(poll(&p, 1, PATIENCE_MS), 1);
        assert_int_equal(tly_verbs.get_cq_event(events, &cq, &user), 0);
        tly_verbs.ack_cq_events(cq, 1);
    } while (cq != wanted);
}

static void destroy_a(void)
{
    tly_link_destroy(x.a.link);
    x.a.link = NULL;
}

static int (*poll_of_card)(struct tly_ibv_cq *cq, int n, struct tly_ibv_wc *out);

/* Returns once all that was posted is completed, however long that takes. */
static int poll_for_all(struct tly_ibv_cq *cq, int n, struct tly_ibv_wc *out)
{
    int got = 0;
    for (uint32_t left = from->sent - from->completed; left;) {
        int more = poll_of_card(cq, n - got, out + got);
        for (; more > 0; more--)
            left -= !(out[got++].wr_id >> 32); /* else it is a receive */
    }
    return got;
}

/* The loop has been busy for so long that an end has not seen its card's answers; then it closes. */
static void test_last_frames_of_a_busy_loop(void **state)
{
    open_both();
    struct tly_ibv_context *context = from->port.device->context;
    tly_loop_lock(&x.loop);
    ends_add(100, PLACE);
    tly_link_push(x.a.link);
    complete_unseen(from->cq);
    from->answered_at -= 1000 * TLY_MS;
    fake_verbs_set("delay=20000");
    ends_add(100, PLACE);
    tly_link_push(x.a.link);
    poll_of_card = context->ops.poll_cq;
    context->ops.poll_cq = poll_for_all;
    destroy_a();
    context->ops.poll_cq = poll_of_card;
    tly_loop_unlock(&x.loop);
    ends_until(&x.b.closed, 1);
    assert_int_equal(x.arrived, 2);
    close_both();
}

/* A socket that is reset hides nothing of what came through the queue pair before. */
static void test_a_socket_that_is_reset(void **state)
{
    const struct linger at_once = {.l_onoff = 1};
    open_both();
    tly_loop_lock(&x.loop);
    ends_add(100, PLACE);
    tly_link_push(x.a.link);
    complete_unseen(to->cq);
    setsockopt(from->stream.watch.fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    destroy_a();
    tly_loop_unlock(&x.loop);
    ends_until(&x.b.closed, 1);
    assert_int_equal(x.b.err, ECONNRESET);
    assert_int_equal(x.arrived, 1);
    close_both();
}

/* --- events of the device ------------------------------------------------------------------------- */

static void expect_in(const char *why, const char *part)
{
    if (!strstr(why, part))
        fail_msg("\"%s\" lacks \"%s\"", why, part);
}

static void test_a_device_that_vanishes_in_silence(void **state)
{
    open_both();
    char device[80];
    snprintf(device, sizeof device, "RDMA on %s port 1", from->port.device->context->device->name);
    fake_verbs_set("silent");
    fake_verbs_vanish();
    ends_until(&x.a.closed, 1);
    ends_until(&x.b.closed, 1);
    expect_in(x.a.why, device);
    expect_in(x.a.why, "the device is gone");
    close_both();
}

static struct tly_ibv_cq *failed_cq;

/* One event: this completion queue has failed. */
static int get_cq_err(struct tly_ibv_context *c, struct tly_ibv_async_event *out)
{
    struct tly_ibv_cq *cq = failed_cq;
    failed_cq = NULL;
    errno = EAGAIN;
    if (!cq)
        return -1;
    *out = (struct tly_ibv_async_event){.element.cq = cq, .event_type = TLY_IBV_EVENT_CQ_ERR};
    return 0;
}

static void test_a_completion_queue_that_fails(void **state)
{
    open_both();
    struct tly_rdma_device *d = from->port.device;
    const struct tly_verbs verbs = tly_verbs;
    failed_cq = to->cq;
    tly_verbs.get_async_event = get_cq_err;
    tly_loop_lock(&x.loop);
    d->faults.ready(&d->faults, EPOLLIN);
    tly_loop_unlock(&x.loop);
    tly_verbs = verbs;
    assert_int_equal(x.b.closed, 1);
    assert_int_equal(x.a.closed, 0);
    expect_in(x.b.why, "CQ error");
    ends_until(&x.a.closed, 1);
    close_both();
}

static int no_async_event(struct tly_ibv_context *c, struct tly_ibv_async_event *out)
{
    errno = EIO;
    return -1;
}

static int no_cq_event(struct tly_ibv_comp_channel *c, struct tly_ibv_cq **cq, void **user)
{
    errno = EIO;
    return -1;
}

/* A descriptor of events that can be read no more stays readable: the device is as good as gone. */
static void test_events_that_cannot_be_read(void **state)
{
    for (int which = 0; which < 2; which++) {
        open_both();
        struct tly_rdma_device *d = from->port.device;
        struct tly_watch *w = which ? &d->completions : &d->faults;
        const struct tly_verbs verbs = tly_verbs;
        tly_verbs.get_async_event = no_async_event;
        tly_verbs.get_cq_event = no_cq_event;
        tly_loop_lock(&x.loop);
        w->ready(w, EPOLLIN);
        tly_loop_unlock(&x.loop);
        tly_verbs = verbs;
        assert_int_equal(x.a.closed, 1);
        assert_int_equal(x.b.closed, 1);
        expect_in(x.a.why, "the device is gone");
        close_both();
    }
}

/* --- places --------------------------------------------------------------------------------------- */

/* The peer hears that a place is free only when no message waits that might name it once more. */
static void test_places_are_told_when_no_message_waits(void **state)
{
    open_both();
    tly_loop_lock(&x.loop);
    to->freed = 1;
    to->came++;
    tly_rdma_tell(to);
    assert_int_equal(to->freed, 1);
    to->came--;
    to->freed = 0;
    tly_loop_unlock(&x.loop);
    close_both();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_last_frames_of_a_busy_loop),
        cmocka_unit_test(test_a_socket_that_is_reset),
        cmocka_unit_test(test_a_device_that_vanishes_in_silence),
        cmocka_unit_test(test_a_completion_queue_that_fails),
        cmocka_unit_test(test_events_that_cannot_be_read),
        cmocka_unit_test(test_places_are_told_when_no_message_waits),
    };
    if (sodium_init() < 0)
        return 1;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
