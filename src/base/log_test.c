/* log_test.c - the rank in log lines: the first communicator's, and a forked child's. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/log.h"

#include <cmocka.h>

static char last[200];

static void keep(void *user, enum tally_log_level level, const char *line)
{
    snprintf(last, sizeof last, "%s", line);
}

static const char *said(void)
{
    tly_info("test", "a line");
    return last;
}

static void test_the_first_claim_stays(void **state)
{
    assert_string_equal(said(), "test: a line");
    assert_true(tly_log_claim_rank(3));
    assert_string_equal(said(), "rank 3 test: a line");
    assert_false(tly_log_claim_rank(0));
    assert_string_equal(said(), "rank 3 test: a line");
    tly_log_release_rank();
    assert_string_equal(said(), "test: a line");
    assert_true(tly_log_claim_rank(0));
    assert_string_equal(said(), "rank 0 test: a line");
    tly_log_release_rank();
}

/* Its lines are its parent's until it has a rank of its own. */
static void test_a_forked_child(void **state)
{
    int status;
    assert_true(tly_log_claim_rank(3));
    pid_t child = fork();
    if (child == 0)
        _exit(strcmp(said(), "rank 3 test: a line") != 0 || !tly_log_claim_rank(5) ||
              strcmp(said(), "rank 5 test: a line") != 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_string_equal(said(), "rank 3 test: a line");
    tly_log_release_rank();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_first_claim_stays),
        cmocka_unit_test(test_a_forked_child),
    };
    tally_log_redirect(keep, NULL);
    return cmocka_run_group_tests_name("log", tests, NULL, NULL);
}
