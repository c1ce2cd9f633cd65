/* media_test.c - services over the media that tests have: sums of several rounds are what they are over any medium, and
 * what a medium completes late is forgotten in time. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "job.h"
#include "raw.h"
#include "sum/internal.h"
#include "transport/testing/pair.h"
#include "transport/testing/testing.h"

#include <cmocka.h>

static int end(void **state)
{
    raw_end();
    return 0;
}

static uint64_t rounds_open(void)
{
    struct tly_service_facts facts;
    tly_loop_lock(&raw.loop);
    tly_service_facts(raw.service, &facts);
    tly_loop_unlock(&raw.loop);
    return facts.rounds_open;
}

/* --- a medium that completes nothing until it is told to ------------------------------------------ */

static bool held;
static const struct tly_pair_conduct how = {.moved = UINT32_MAX, .held = &held};
static struct tly_medium holding;

static int dial(const struct tly_dial *d, struct tly_channel **out)
{
    return tly_pair_dial(&holding, &how, d, out);
}

static int listen_at(const struct tly_door_config *c, struct tly_door **out)
{
    return tly_pair_listen(&holding, c, out);
}

static int begin_holding(void **state)
{
    holding = tly_late;
    holding.dial = dial;
    holding.listen = listen_at;
    held = false;
    return raw_begin_over(&holding, 2, NULL);
}

/* A rank says that it has its answer while the service's medium has not completed that.  The round ends with the
 * completion: no frame need follow. */
static void test_confirmed_before_completed(void **state)
{
    static const float data[RAW_PART / 4];
    held = true;
    for (int rank = 0; rank < 2; rank++)
        raw_post(rank, raw_push(1, RAW_PART), data, sizeof data);
    for (int rank = 0; rank < 2; rank++)
        raw_until(&raw.rank[rank].results, 1);
    for (int rank = 0; rank < 2; rank++)
        raw_settle(rank); /* the question has told of the result */
    assert_int_equal(rounds_open(), 1);
    held = false;
    tly_loop_turn(&raw.loop, 0); /* completes all */
    assert_int_equal(rounds_open(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_confirmed_before_completed, begin_holding, end),
    };
    return cmocka_run_group_tests_name("media", tests, NULL, NULL);
}
