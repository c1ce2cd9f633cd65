/* state_test.c - what a forked child may ask of its parent's communicator. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fork.h"
#include "comm/comm.h"
#include "comm/epoch/epoch.h"

#include <cmocka.h>

/* The names were locked at the fork, by a thread that the child does not have. */
static void test_a_forked_child_counts_services(void **state)
{
    uint64_t incarnation[] = {1, 0, 2};
    struct tly_epoch epoch = {.services = 3, .incarnation = incarnation};
    int status;
    tally_comm *c = calloc(1, sizeof *c);
    assert_non_null(c);
    tly_fd_own(-1); /* forks are counted from now on */
    tly_comm_begin(c, NULL);
    tly_names_init(&c->names);
    c->epoch = &epoch;
    assert_int_equal(tally_comm_service_count(c), 2);
    tly_names_lock(&c->names);
    pid_t child = fork();
    if (child == 0) {
        alarm(30); /* else it would wait for ever */
        _exit(tally_comm_service_count(c) != 2);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    tly_names_unlock(&c->names);
    tly_names_finish(&c->names);
    free(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_a_forked_child_counts_services)};
    return cmocka_run_group_tests_name("state", tests, NULL, NULL);
}
