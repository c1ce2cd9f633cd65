/* faults_test.c - what a connection over RDMA does when its device, its card or its peer fails, on the fake card. */
#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <sodium.h>
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_last_frames_of_a_busy_loop),
        cmocka_unit_test(test_a_socket_that_is_reset),
    };
    if (sodium_init() < 0)
        return 1;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
