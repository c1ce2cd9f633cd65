/* report_test.c - tally_comm_report() while no service is connected. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "comm/comm.h"
#include "comm/epoch/epoch.h"
#include "comm/path/peer.h"

#include <cmocka.h>

enum { PATIENCE_MS = 100 };

/* All connections are being made again: nobody is asked, so nobody is waited for. */
static void test_no_service_is_connected(void **state)
{
    static struct tly_peer peer;
    static struct tly_epoch epoch;
    char *json = NULL;
    tally_comm *c = calloc(1, sizeof *c);
    assert_non_null(c);
    assert_int_equal(tly_loop_init(&c->loop), 0);
    c->services = 1;
    c->peers = &peer;
    c->epoch = &epoch;
    tly_sched_init(&c->sched, 1 << 20);
    tly_peer_init(&peer, c, 0);
    assert_int_equal(tally_comm_report(c, PATIENCE_MS, &json), 0);
    assert_non_null(strstr(json, "\"operations\": 0"));
    free(json);
    tly_peer_finish(&peer);
    tly_loop_finish(&c->loop);
    free(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_no_service_is_connected)};
    return cmocka_run_group_tests_name("report", tests, NULL, NULL);
}
