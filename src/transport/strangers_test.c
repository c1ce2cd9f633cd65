/* strangers_test.c - how often strangers at a port are told of. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "tally/tally.h"
#include "transport/strangers.h"

static int lines;
static char last[512];
static enum tally_log_level last_level;

static void take(void *user, enum tally_log_level level, const char *line)
{
    if (level == TALLY_LOG_DEBUG)
        return;
    lines++;
    last_level = level;
    snprintf(last, sizeof last, "%s", line);
}

static int set_up(void **state)
{
    lines = 0;
    tally_log_redirect(take, NULL);
    return 0;
}

static int tear_down(void **state)
{
    tally_log_redirect(NULL, NULL);
    return 0;
}

/* A scanner that knocks ten times a second for three minutes: three lines. */
static void test_a_line_a_minute(void **state)
{
    struct tly_strangers s = {.shaking = 7};
    for (int i = 0; i < 1800; i++) {
        int64_t now = TLY_SEC + i * TLY_SEC / 10;
        tly_strangers_tell(&s, 29777, now, false);
        tly_strangers_note(&s, "10.0.0.9:1234", EPROTO, "no handshake", now);
    }
    assert_int_equal(lines, 2);
    assert_non_null(strstr(last, "port 29777"));
    assert_non_null(strstr(last, "600 connections"));
    assert_non_null(strstr(last, "600 with another secret or protocol"));
    assert_non_null(strstr(last, "the last was 10.0.0.9:1234: no handshake"));
    assert_int_equal(last_level, TALLY_LOG_WARNING);
    tly_strangers_tell(&s, 29777, TLY_SEC + 180 * TLY_SEC, true);
    assert_int_equal(lines, 3);
    tly_strangers_tell(&s, 29777, TLY_SEC + 400 * TLY_SEC, true);
    assert_int_equal(lines, 3); /* nothing has come since */
    assert_int_equal(s.shaking, 7);
}

/* A health check that only connects is no cause for a warning. */
static void test_knocking_alone_is_no_warning(void **state)
{
    struct tly_strangers s = {0};
    tly_strangers_note(&s, "10.0.0.9:1", ECONNRESET, "connection ended in the handshake", TLY_SEC);
    assert_int_equal(lines, 0);
    tly_strangers_tell(&s, 1, 62 * TLY_SEC, false);
    assert_int_equal(lines, 1);
    assert_int_equal(last_level, TALLY_LOG_INFO);
    assert_non_null(strstr(last, "1 connection in"));
}

/* Another secret is told at once, by name, once a minute; alone it needs no second line. */
static void test_another_secret_is_told_at_once(void **state)
{
    struct tly_strangers s = {0};
    tly_strangers_note(&s, "10.0.0.9:1", EACCES, "the job secret differs", TLY_SEC);
    assert_int_equal(lines, 1);
    assert_non_null(strstr(last, "10.0.0.9:1 was not let in: the job secret differs"));
    tly_strangers_tell(&s, 1, 62 * TLY_SEC, false);
    assert_int_equal(lines, 1);
    for (int i = 0; i < 20; i++)
        tly_strangers_note(&s, "10.0.0.9:2", EACCES, "the job secret differs", 63 * TLY_SEC);
    assert_int_equal(lines, 2);
    tly_strangers_tell(&s, 1, 200 * TLY_SEC, false);
    assert_int_equal(lines, 3);
    assert_non_null(strstr(last, "20 connections"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_line_a_minute, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_knocking_alone_is_no_warning, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_another_secret_is_told_at_once, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
