/* keep_test.c - what a rank keeps of a tallyd's results is counted in bytes where no operation waited for them. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/list.h"
#include "comm/comm.h"
#include "comm/path/keep.h"
#include "comm/path/peer.h"
#include "wire/frame.h"

#include <cmocka.h>

static void test_unasked(void **state)
{
    static struct tly_peer peer;
    tally_comm *c = calloc(1, sizeof *c);
    struct tly_frame f = {.type = TLY_RESULT, .length = 64};
    assert_non_null(c);
    c->peers = &peer;
    c->services = 1;
    tly_keep_init(c);
    tly_active_init(&c->active);
    peer = (struct tly_peer){.comm = c, .mortal = true};
    tly_list_init(&peer.kept);
    tly_list_init(&peer.doubted);
    tly_list_init(&peer.decided);
    for (uint32_t i = 1; i <= 1000; i++) {
        f.key = i;
        tly_keep_unasked(&peer, &f);
        assert_int_equal(peer.unasked, i * sizeof(struct tly_keep));
    }
    tly_keep_stable(&peer, 999);
    assert_int_equal(peer.unasked, sizeof(struct tly_keep));
    tly_keep_finish(c);
    assert_int_equal(peer.unasked, 0);
    free(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_unasked)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
