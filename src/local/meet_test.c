/* meet_test.c - the start among ranks that share a machine: the first rank meets others of the test's own, who greet it as
 * they should not, and says why it does without. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sodium.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "local/engine.h"
#include "wire/hello.h"

#include <cmocka.h>

enum { PATIENCE_MS = 700, ENDLESS_MS = 600000, JOB = 0x1234 };
static const uint32_t numbers[] = {4, 5, 6}; /* of these ranks in the job */

/* As in meet.c. */
struct greeting {
    uint32_t magic, from, to, able;
    uint64_t job, bytes, head;
    uint8_t proof[32];
};

static struct {
    struct tly_local_config config;
    uint8_t secret[TLY_SECRET_BYTES];
    pthread_t thread;
    int err;
    struct tly_local *local;
    char why[TLY_SENTENCE];
    int memory;
    atomic_bool enough;
} x;

static int turn(void *user, int ms)
{
    usleep(1000 * (ms ? ms : 1));
    return atomic_load(&x.enough) ? tly_fail(ECANCELED, "enough") : 0;
}

static void broken(void *user, int err, const char *sentence)
{
}

static void *meet(void *arg)
{
    x.err = tly_local_open(&x.config, &x.local);
    snprintf(x.why, sizeof x.why, "%s", tly_error());
    return NULL;
}

/* The first of so many ranks begins. */
static void begin(uint32_t ranks, int patience_ms)
{
    static const struct tly_local_user calls = {.turn = turn, .broken = broken};
    memset(&x, 0, sizeof x);
    randombytes_buf(x.secret, sizeof x.secret);
    x.config = (struct tly_local_config){
        .calls = &calls,
        .ranks = ranks,
        .numbers = numbers,
        .job = JOB + (uint64_t)getpid(),
        .secret = x.secret,
        .patience_ms = patience_ms};
    x.memory = memfd_create("other", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_true(x.memory >= 0);
    assert_int_equal(ftruncate(x.memory, sizeof(struct tly_control)), 0);
    assert_int_equal(fcntl(x.memory, F_ADD_SEALS, F_SEAL_SHRINK), 0);
}

static void start(uint32_t ranks, int patience_ms)
{
    begin(ranks, patience_ms);
    assert_int_equal(pthread_create(&x.thread, NULL, meet, NULL), 0);
}

static struct sockaddr_un door(socklen_t *len)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int n = snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "tally-%016llx-rank-%u",
                     (unsigned long long)x.config.job, numbers[0]);
    *len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
    return a;
}

static void call(int fd)
{
    socklen_t len;
    struct sockaddr_un a = door(&len);
    for (int i = 0; connect(fd, (struct sockaddr *)&a, len) != 0; i++) {
        assert_true(i < 20000);
        usleep(1000);
    }
}

static int knock(void)
{
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    call(fd);
    return fd;
}

static struct greeting greeting_of(uint32_t from)
{
    return (struct greeting){.magic = 0x74616c31,
                             .from = from,
                             .able = 1,
                             .job = x.config.job,
                             .bytes = sizeof(struct tly_control),
                             .head = sizeof(struct tly_control)};
}

static void greet(int to, struct greeting g)
{
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec iov = {&g, sizeof g};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
    tly_hello_prove(x.secret, &g, offsetof(struct greeting, proof), g.proof);
    if (g.able) {
        m.msg_control = control;
        m.msg_controllen = sizeof control;
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof x.memory);
        memcpy(CMSG_DATA(c), &x.memory, sizeof x.memory);
    }
    assert_int_equal(sendmsg(to, &m, MSG_NOSIGNAL), sizeof g);
}

static void end_with(int err, const char *why)
{
    assert_int_equal(pthread_join(x.thread, NULL), 0);
    assert_int_equal(x.err, err);
    assert_null(x.local);
    if (!strstr(x.why, why))
        fail_msg("'%s' is not in '%s'", why, x.why);
    close(x.memory);
}

/* It goes on without, and says this. */
static void end(const char *why)
{
    end_with(0, why);
}

static void test_nobody_comes(void **state)
{
    start(2, PATIENCE_MS);
    end("rank 5 has not come within 0.7 s");
}

/* One rank greets twice: it is no other rank. */
static void test_one_comes_twice(void **state)
{
    char answer[sizeof(struct greeting)];
    start(3, ENDLESS_MS);
    int first = knock(), second = knock();
    greet(first, greeting_of(1));
    greet(second, greeting_of(1));
    assert_int_equal(recv(first, answer, sizeof answer, 0), sizeof answer);
    assert_int_equal(recv(second, answer, sizeof answer, 0), 0);
    atomic_store(&x.enough, true);
    end_with(-ECANCELED, "enough");
    close(first);
    close(second);
}

/* The other one says that it cannot, or we cannot do with what it says: at once, for there is nobody to be waited for. */
static void meet_one(struct greeting g, const char *why)
{
    int fd = knock();
    greet(fd, g);
    end(why);
    close(fd);
}

static void test_it_cannot(void **state)
{
    start(2, ENDLESS_MS);
    struct greeting g = greeting_of(1);
    g.able = 0;
    meet_one(g, "rank 5 cannot");
}

static void test_another_build(void **state)
{
    start(2, ENDLESS_MS);
    struct greeting g = greeting_of(1);
    g.head -= 64;
    meet_one(g, "rank 5 has another build of Tally");
}

static void test_more_than_there_is(void **state)
{
    start(2, ENDLESS_MS);
    struct greeting g = greeting_of(1);
    g.bytes += 1;
    meet_one(g, "the memory of rank 5 may not be there when it is touched");
}

/* It can, and does not hear that we can, too. */
static void test_it_does_not_listen(void **state)
{
    start(2, ENDLESS_MS);
    int fd = knock();
    assert_int_equal(shutdown(fd, SHUT_RD), 0);
    greet(fd, greeting_of(1));
    end("rank 4 cannot hand its memory to rank 5: ");
    close(fd);
}

static void test_name_is_taken(void **state)
{
    socklen_t len;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    begin(2, ENDLESS_MS);
    struct sockaddr_un a = door(&len);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, len), 0);
    assert_int_equal(pthread_create(&x.thread, NULL, meet, NULL), 0);
    end("rank 4 cannot listen on a Unix socket: Address already in use");
    close(fd);
}

/* Its own reason comes first, and is said to be one only if it is. */
static void test_small_files(void **state)
{
    struct rlimit all, few;
    begin(2, ENDLESS_MS);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &all), 0);
    few = (struct rlimit){1 << 20, all.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &few), 0);
    assert_int_equal(pthread_create(&x.thread, NULL, meet, NULL), 0);
    int fd = knock();
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &all), 0);
    struct greeting g = greeting_of(1);
    g.able = 0;
    greet(fd, g);
    end("a file of 64 MB is not allowed (ulimit -f)");
    close(fd);
}

/* It has some for its segment, its door and one more rank's call, and no longer for that one's memory: whoever comes hears
 * that it cannot, and does not knock in vain. */
static void test_no_descriptors(void **state)
{
    enum { MOST = 64, LEFT = 3 };
    struct rlimit all, few;
    struct timeval patience = {.tv_sec = 5};
    char answer[sizeof(struct greeting)];
    int taken[MOST], count = 0, fd;
    begin(2, 10000);
    int caller = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    assert_int_equal(setsockopt(caller, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience), 0);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &all), 0);
    few = (struct rlimit){MOST, all.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    while (count < MOST && (fd = dup(0)) >= 0)
        taken[count++] = fd;
    for (int i = 0; i < LEFT; i++)
        close(taken[--count]);
    assert_int_equal(pthread_create(&x.thread, NULL, meet, NULL), 0);
    call(caller);
    greet(caller, greeting_of(1));
    assert_int_equal(recv(caller, answer, sizeof answer, 0), sizeof answer);
    end("rank 4 cannot let rank 5 in: Too many open files (ulimit -n)");
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &all), 0);
    close(caller);
    while (count)
        close(taken[--count]);
}

/* Other users' processes come and say nothing. */
static void test_silent_strangers(void **state)
{
    enum { COUNT = 20 };
    int told[2];
    char done;
    if (geteuid() != 0)
        skip(); /* there is no other user to be */
    start(2, 10000);
    assert_int_equal(pipe(told), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        alarm(60); /* the test may fail before it is killed */
        if (setuid(65534) != 0)
            _exit(1);
        for (int i = 0; i < COUNT; i++)
            knock();
        if (write(told[1], "", 1) != 1)
            _exit(1);
        pause();
    }
    assert_int_equal(read(told[0], &done, 1), 1);
    struct greeting g = greeting_of(1);
    g.able = 0;
    meet_one(g, "rank 5 cannot");
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    close(told[0]);
    close(told[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nobody_comes),       cmocka_unit_test(test_one_comes_twice),
        cmocka_unit_test(test_it_cannot),          cmocka_unit_test(test_another_build),
        cmocka_unit_test(test_more_than_there_is), cmocka_unit_test(test_it_does_not_listen),
        cmocka_unit_test(test_name_is_taken),      cmocka_unit_test(test_small_files),
        cmocka_unit_test(test_no_descriptors),     cmocka_unit_test(test_silent_strangers),
    };
    if (sodium_init() < 0)
        return 1;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
