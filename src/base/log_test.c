/* log_test.c - the rank in log lines, the first communicator's and a forked child's; and where lines go. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <pthread.h>
#include <stdatomic.h>
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

static char before[200], after[200];

static void keep_in(void *user, enum tally_log_level level, const char *line)
{
    snprintf(user, sizeof before, "%s", line);
}

/* Whichever ends first, lines go where they went before it began. */
static void test_diversions(void **state)
{
    struct tly_log_diversion one, two;
    for (int first = 0; first < 2; first++) {
        tly_log_diversion_init(&one, keep_in, before);
        tly_log_diversion_init(&two, keep_in, after);
        last[0] = before[0] = after[0] = '\0';
        tly_log_divert(&one);
        tly_log_divert(&two);
        assert_string_equal(said(), "");
        assert_string_equal(before, "");
        assert_string_equal(after, "test: a line");
        after[0] = '\0';
        tly_log_end_diversion(first ? &two : &one);
        said();
        assert_string_equal(first ? before : after, "test: a line");
        assert_string_equal(first ? after : before, "");
        tly_log_end_diversion(&one);
        tly_log_end_diversion(&two);
        tly_log_end_diversion(&two); /* does no harm */
        assert_string_equal(said(), "test: a line");
    }
}

static atomic_int inside, release;

static void block(void *user, enum tally_log_level level, const char *line)
{
    atomic_store(&inside, 1);
    while (!atomic_load(&release))
        usleep(1000);
}

static void *say(void *arg)
{
    tly_info("test", "from a thread");
    return NULL;
}

/* A thread of its parent's was within a sink.  The child has no such thread, and nobody reads its copy of the queue. */
static void test_a_child_forked_within_a_sink(void **state)
{
    struct tly_log_diversion d;
    pthread_t thread;
    int status;
    tly_log_diversion_init(&d, block, NULL);
    tly_log_divert(&d);
    last[0] = '\0';
    assert_int_equal(pthread_create(&thread, NULL, say, NULL), 0);
    while (!atomic_load(&inside))
        usleep(1000);
    pid_t child = fork();
    if (child == 0) {
        alarm(30); /* else it would wait for ever */
        _exit(strcmp(said(), "test: a line") != 0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    atomic_store(&release, 1);
    pthread_join(thread, NULL);
    assert_int_equal(status, 0);
    assert_string_equal(last, "");
    tly_log_end_diversion(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_first_claim_stays),
        cmocka_unit_test(test_a_forked_child),
        cmocka_unit_test(test_diversions),
        cmocka_unit_test(test_a_child_forked_within_a_sink),
    };
    tally_log_redirect(keep, NULL);
    return cmocka_run_group_tests_name("log", tests, NULL, NULL);
}
