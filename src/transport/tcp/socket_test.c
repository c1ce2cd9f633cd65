/* socket_test.c - two that want to listen on one port at the same moment: one of them gets it, every time.  And what the
 * kernel says that a connection has sent. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <arpa/inet.h>
#include <errno.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "transport/tcp/tcp.h"

#include <cmocka.h>

enum { ROUNDS = 5000, BOTH = 2 };

static struct {
    struct sockaddr_storage address; /* without a port */
    uint16_t port; /* that both want, as a range of one: then nobody looks for its holder, which takes long */
    atomic_int ready[ROUNDS], taken[ROUNDS], refused[ROUNDS];
} x;

static void *take(void *arg)
{
    struct tly_door_config c = {.address = &x.address, .first_port = x.port, .last_port = x.port};
    for (int i = 0; i < ROUNDS; i++) {
        int fd = -1;
        atomic_fetch_add(&x.ready[i], 1);
        while (atomic_load(&x.ready[i]) < BOTH) /* without a sleep, so that they begin within a microsecond */
            sched_yield();
        int err = tly_tcp_bind(&c, &fd);
        atomic_fetch_add(err == 0 ? &x.taken[i] : &x.refused[i], 1);
        while (atomic_load(&x.taken[i]) + atomic_load(&x.refused[i]) < BOTH)
            sched_yield();
        if (err == 0)
            close(fd);
        else if (err != -EADDRINUSE)
            return arg;
    }
    return NULL;
}

static void test_one_of_two_gets_the_port(void **state)
{
    struct sockaddr_in *a = (struct sockaddr_in *)&x.address;
    socklen_t len = sizeof *a;
    pthread_t thread[BOTH];
    /* Stays bound, so that nobody else is given the port.  Who sets SO_REUSEADDR may listen there. */
    int holder = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    a->sin_family = AF_INET;
    a->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    assert_true(holder >= 0 && bind(holder, (struct sockaddr *)a, sizeof *a) == 0);
    assert_int_equal(getsockname(holder, (struct sockaddr *)a, &len), 0);
    assert_int_equal(setsockopt(holder, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int)), 0);
    x.port = ntohs(a->sin_port);
    a->sin_port = 0;
    for (int k = 0; k < BOTH; k++)
        assert_int_equal(pthread_create(&thread[k], NULL, take, thread), 0);
    for (int k = 0; k < BOTH; k++) {
        void *wrong;
        pthread_join(thread[k], &wrong);
        assert_null(wrong);
    }
    for (int i = 0; i < ROUNDS; i++)
        assert_int_equal(atomic_load(&x.taken[i]), 1);
    close(holder);
}

/* With segments so short that their headers would be an eighth more. */
static void test_a_load_is_without_headers(void **state)
{
    enum { SEGMENT = 536, BYTES = 64 * 1024 };
    static char data[BYTES];
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    int segment = SEGMENT, unacknowledged = 1;
    int door = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int out = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(setsockopt(out, IPPROTO_TCP, TCP_MAXSEG, &segment, sizeof segment), 0);
    assert_int_equal(bind(door, (struct sockaddr *)&a, len), 0);
    assert_int_equal(listen(door, 1), 0);
    assert_int_equal(getsockname(door, (struct sockaddr *)&a, &len), 0);
    assert_int_equal(connect(out, (struct sockaddr *)&a, len), 0);
    int in = accept4(door, NULL, NULL, SOCK_CLOEXEC);
    assert_true(in >= 0);
    assert_int_equal(send(out, data, BYTES, 0), BYTES);
    struct tly_link_load load = {0};
    while (load.arrived < BYTES) { /* nobody has read it yet */
        sched_yield();
        assert_int_equal(tly_tcp_load(in, &load), 0);
    }
    assert_int_equal(load.arrived, BYTES);
    assert_int_equal(recv(in, data, BYTES, MSG_WAITALL), BYTES);
    while (unacknowledged) {
        sched_yield();
        assert_int_equal(ioctl(out, SIOCOUTQ, &unacknowledged), 0);
    }
    assert_int_equal(tly_tcp_load(out, &load), 0);
    assert_in_range(load.bytes, BYTES, BYTES + 1); /* the kernel may count the SYN */
    close(in);
    close(out);
    close(door);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_one_of_two_gets_the_port),
                                       cmocka_unit_test(test_a_load_is_without_headers)};
    return cmocka_run_group_tests_name("socket", tests, NULL, NULL);
}
