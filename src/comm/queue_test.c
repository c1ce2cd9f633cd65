/* queue_test.c - what is admitted while nothing is known of what a service has accepted. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "comm/epoch.h"
#include "comm/internal.h"

#include <cmocka.h>

enum { PART = 1 << 20 };

/* Two ranks exchange parts: each gives one to the other's service and asks its own for one.  A service that has a part and no
 * request for it answers nobody, and so tells late what it has accepted.  So a request must not wait for that. */
static void test_requests_do_not_wait_for_news(void **state)
{
    static struct peer peers[2];
    static struct epoch epoch;
    static const uint8_t input[64];
    tally_comm *c = calloc(1, sizeof *c);
    assert_non_null(c);
    c->peers = peers;
    c->services = 2;
    c->epoch = &epoch;
    c->credit_bytes = 4 * PART;
    struct tally_op op = {.comm = c, .epoch = &epoch, .credit = 4 * PART};
    struct part part[4];
    for (uint32_t i = 0; i < 4; i++) {
        bool gives = i % 2 == 0;
        part[i] = (struct part){.op = &op,
                                .order = i,
                                .length = PART,
                                .owner = gives,
                                .group = TLY_PAIR,
                                .input = gives ? input : NULL};
        peers[part[i].owner].comm = c;
        peers[part[i].owner].open = true;
        peers[part[i].owner].granted = 1ull << 40;
        assert_int_equal(tly_queue_part(c, &part[i]), 0);
    }
    tly_queue_admit(c);
    assert_int_equal(part[0].state, PART_ADMITTED);
    assert_int_equal(part[1].state, PART_ADMITTED);
    assert_int_equal(part[2].state, PART_QUEUED); /* a quarter of the credit is in flight */
    assert_int_equal(part[3].state, PART_QUEUED); /* asked for in turn */
    tly_queue_accepted(&peers[1], PART);
    tly_queue_admit(c);
    assert_int_equal(part[2].state, PART_ADMITTED);
    assert_int_equal(part[3].state, PART_ADMITTED);
    for (int i = 0; i < 2; i++)
        tly_heap_finish(&peers[i].waiting);
    free(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_requests_do_not_wait_for_news)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
