/* listen_test.c - the coordinator's sockets before communicators are opened: one for each call, until it is taken over. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fork.h"
#include "comm/listen.h"
#include "tally/tally.h"

#include <cmocka.h>

static const char *const alone[] = {"TALLY_RANK=0/1", "TALLY_COORD=127.0.0.1", NULL};

static int listen_at(int wanted)
{
    int port = wanted;
    assert_int_equal(tally_comm_listen(alone, &port), 0);
    assert_true(port > 0 && (wanted == 0 || port == wanted));
    return port;
}

/* Could another program have it? */
static bool is_free(int port)
{
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons((uint16_t)port),
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int)), 0);
    bool got = bind(fd, (struct sockaddr *)&a, sizeof a) == 0;
    close(fd);
    return got;
}

static int close_all(void **state)
{
    return tally_comm_listen(NULL, NULL);
}

static void test_each_call_has_a_socket(void **state)
{
    int first = listen_at(0), second = listen_at(0);
    assert_int_not_equal(first, second);
    assert_false(is_free(first));
    assert_false(is_free(second));
    int fd = tly_listen_take((uint16_t)first);
    assert_true(fd >= 0);
    assert_int_equal(tly_listen_take((uint16_t)first), -1);
    assert_false(is_free(first)); /* it is ours, and open */
    tly_fd_close(fd);
    assert_true(is_free(first));
    assert_false(is_free(second));
    assert_int_equal(tally_comm_listen(NULL, NULL), 0);
    assert_true(is_free(second));
}

static void *ask_for(void *port)
{
    int wanted = *(int *)port;
    return (void *)(intptr_t)tally_comm_listen(alone, &wanted);
}

/* A thread that asks for its port again keeps it; a port that another thread holds belongs to another job. */
static void test_a_port_asked_for_again(void **state)
{
    pthread_t other;
    void *err;
    int port = listen_at(listen_at(0));
    assert_int_equal(pthread_create(&other, NULL, ask_for, &port), 0);
    pthread_join(other, &err);
    assert_int_equal((intptr_t)err, -EADDRINUSE);
    assert_false(is_free(port));
}

/* A program that only ever listens keeps no more than a few. */
static void test_the_oldest_go(void **state)
{
    int first = listen_at(0), second = listen_at(0);
    for (int i = 0; i < 15; i++)
        listen_at(0);
    assert_true(is_free(first));
    assert_false(is_free(second));
}

static void test_a_forked_child_has_none(void **state)
{
    int port = listen_at(0), status;
    pid_t child = fork();
    if (child == 0)
        _exit(tly_listen_take((uint16_t)port) != -1);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_false(is_free(port));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_each_call_has_a_socket, close_all),
        cmocka_unit_test_teardown(test_a_port_asked_for_again, close_all),
        cmocka_unit_test_teardown(test_the_oldest_go, close_all),
        cmocka_unit_test_teardown(test_a_forked_child_has_none, close_all),
    };
    return cmocka_run_group_tests_name("listen", tests, NULL, NULL);
}
