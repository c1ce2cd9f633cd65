/* failures_test.c - processes that die, stop, leave, come late, and strangers at the door of a running job.  Nothing
 * may hang, and whoever is left must be told who it was. */
#include <arpa/inet.h>
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "job.h"
#include "wire/frame.h"
#include "wire/pack.h"

#include <cmocka.h>

struct board {
    atomic_int stage, stop, child;
    atomic_int port_count;
    int ports[16];
    char name[64];
};

static struct board *new_board(void)
{
    return job_shared(sizeof(struct board));
}

enum { COUNT = 300000 };

/* One round; 0 or the operation's error, whose sentence tally_error() has. */
static int round_of(tally_comm *c, const char *name, size_t count)
{
    static float x[COUNT];
    tally_op *op;
    for (size_t i = 0; i < count; i++)
        x[i] = 1;
    int err = tally_push_pull(c, name, x, x, count, TALLY_FLOAT32, TALLY_SUM, NULL, &op);
    if (err)
        return err;
    err = tally_op_wait(op, -1);
    if (err)
        CHECK(strcmp(tally_op_error(op), tally_error()) == 0);
    for (size_t i = 0; i < count && !err; i++)
        CHECK(x[i] == (float)tally_comm_size(c));
    tally_op_free(op);
    return err;
}

/* --- somebody dies ------------------------------------------------------------------------------- */

/* Sum until that fails; then all must be told of `name`, and the communicator be over. */
static int until_failure(int rank, void *arg)
{
    struct board *b = arg;
    const char *why;
    tally_op *op = NULL;
    tally_comm *c = job_open();
    int err;
    while ((err = round_of(c, "w", COUNT)) == 0)
        atomic_fetch_add(&b->stage, 1);
    CHECK(err == -ECONNRESET);
    CHECK_HOLDS(tally_error(), b->name);
    CHECK(tally_comm_status(c, &why) == -ECONNRESET);
    CHECK_HOLDS(why, b->name);
    CHECK(tally_barrier(c, "after", NULL, &op) == -ECONNRESET && !op);
    CHECK_HOLDS(tally_error(), b->name);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_rank_killed(void **state)
{
    struct board *b = new_board();
    struct job j = {
        .ranks = 4, .tallyds = 1, .main = until_failure, .arg = b, .settings = {"TALLY_SUM_THREADS=2"}};
    strcpy(b->name, "rank 2 on");
    job_start(&j);
    job_await(&b->stage, 20);
    kill(j.rank_pid[2], SIGKILL);
    for (int i = 0; i < 4; i++)
        assert_int_equal(job_wait_rank(&j, i), i == 2 ? 128 + SIGKILL : 0);
    assert_int_not_equal(job_wait_tallyd(&j, 0), 0);
    job_log_holds(&j, JOB_MOST_RANKS, "rank 2 on");
    job_clear(&j);
}

static void test_coordinator_killed(void **state)
{
    struct board *b = new_board();
    struct job j = {.ranks = 3, .main = until_failure, .arg = b};
    char host[32] = "";
    gethostname(host, sizeof host - 1);
    snprintf(b->name, sizeof b->name, "rank 0 on %.20s", host);
    job_start(&j);
    job_await(&b->stage, 20);
    kill(j.rank_pid[0], SIGKILL);
    for (int i = 0; i < 3; i++)
        assert_int_equal(job_wait_rank(&j, i), i == 0 ? 128 + SIGKILL : 0);
    job_clear(&j);
}

/* Stopped for longer than the patience with the silent; when it goes on it must learn that it is out. */
static void test_rank_stopped(void **state)
{
    struct board *b = new_board();
    struct job j = {.ranks = 3,
                    .main = until_failure,
                    .arg = b,
                    .settings = {UNDER_SANITIZER ? "TALLY_DEAD_TIMEOUT=6" : "TALLY_DEAD_TIMEOUT=2"}};
    strcpy(b->name, "rank 1 on");
    job_start(&j);
    job_await(&b->stage, 20);
    kill(j.rank_pid[1], SIGSTOP);
    assert_int_equal(job_wait_rank(&j, 0), 0);
    assert_int_equal(job_wait_rank(&j, 2), 0);
    strcpy(b->name, "");
    kill(j.rank_pid[1], SIGCONT);
    assert_int_equal(job_wait_rank(&j, 1), 0);
    job_clear(&j);
}

/* --- somebody leaves ----------------------------------------------------------------------------- */

static int one_leaves(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    CHECK(round_of(c, "w", COUNT) == 0);
    if (rank == 2) {
        CHECK(tally_comm_close(c) == 0);
        return 0;
    }
    if (b->stage) /* also its connection has ended */
        job_sleep_ms(2000);
    for (int i = 0; i < 3; i++) {
        CHECK(round_of(c, i == 1 ? "other" : "w", i == 2 ? 0 : COUNT) == -ESHUTDOWN);
        CHECK_HOLDS(tally_error(), "rank 2 has left the job");
    }
    CHECK(tally_comm_status(c, NULL) == 0);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

/* A reason with all that must not reach a log as it is: control characters, and more than a line. */
static int one_aborts(int rank, void *arg)
{
    char reason[2000];
    const char *sentence;
    tally_comm *c = job_open();
    int err = round_of(c, "w", COUNT); /* may have come to its end with rank 1 alone */
    CHECK(err == 0 || (err == -ECONNRESET && rank != 1));
    int n = snprintf(reason, sizeof reason, "bad\ndata\033[2J\302\2332J (step 3) ");
    memset(reason + n, 'x', sizeof reason - (size_t)n);
    reason[sizeof reason - 1] = '\0';
    if (rank == 1) {
        CHECK(tally_comm_abort(c, "") == -EINVAL);
        CHECK(tally_comm_abort(c, reason) == 0);
        CHECK(tally_comm_abort(c, "once more") == -ECONNRESET);
    } else {
        CHECK(round_of(c, "w", COUNT) == -ECONNRESET);
    }
    CHECK(tally_comm_status(c, &sentence) == -ECONNRESET);
    CHECK(strncmp(sentence, "rank 1 left: bad data?[2J??2J (step 3) xxx", 42) == 0 && strlen(sentence) < 450);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_rank_aborts(void **state)
{
    static const int together[] = {0, 0, 0};
    for (int i = 0; i < 3; i++) {
        struct job j = {.ranks = 3, .tallyds = i == 2, .main = one_aborts, .machine = i ? together : NULL};
        job_start(&j);
        for (int r = 0; r < j.ranks; r++)
            if (job_wait_rank(&j, r) != 0)
                job_finish(&j); /* which prints what they said */
        job_clear(&j);
    }
}

static void test_rank_leaves(void **state)
{
    static const int together[] = {0, 0, 0};
    struct board *b = new_board();
    for (int i = 0; i < 3; i++) {
        struct job j = {
            .ranks = 3, .tallyds = i == 2, .main = one_leaves, .arg = b, .machine = i ? together : NULL};
        atomic_store(&b->stage, i);
        job_start(&j);
        job_finish(&j);
        job_clear(&j);
    }
}

enum { NAMES = 24 };

/* Rank 2 has gone, and then a tallyd has come: whatever is of it waits for nobody. */
static int one_leaves_one_comes(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    CHECK(round_of(c, "w", 10) == 0);
    if (rank < 2) {
        job_await(&b->stage, 1);
        while (tally_comm_service_count(c) < 3)
            job_sleep_ms(2);
    }
    for (int i = 0; i < NAMES && rank < 2; i++) {
        char name[8];
        snprintf(name, sizeof name, "%d", i);
        CHECK(round_of(c, name, 10) == -ESHUTDOWN);
        CHECK_HOLDS(tally_error(), "rank 2 has left the job");
    }
    CHECK(tally_comm_status(c, NULL) == 0);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_tallyd_comes_when_a_rank_has_left(void **state)
{
    static const int machine[] = {0, 1, 1}; /* rank 2 has no service, for which it would stay */
    struct board *b = new_board();
    struct job j = {.ranks = 3,
                    .main = one_leaves_one_comes,
                    .arg = b,
                    .machine = machine,
                    .settings = {"TALLY_TIMEOUT=20"}};
    job_start(&j);
    assert_int_equal(job_wait_rank(&j, 2), 0);
    j.tallyds = 1;
    job_start_tallyd(&j, 0);
    atomic_store(&b->stage, 1);
    job_finish(&j);
    job_clear(&j);
}

/* Closing with operations under way waits for those that can end. */
static int close_busy(int rank, void *arg)
{
    static float x[COUNT];
    tally_comm *c = job_open();
    tally_op *op[8];
    for (int i = 0; i < 8; i++) {
        char name[8];
        snprintf(name, sizeof name, "%d", i);
        float *mine = x + i * (COUNT / 8);
        CHECK(tally_push_pull(c, name, mine, mine, COUNT / 8, TALLY_FLOAT32, TALLY_MAX, NULL, &op[i]) == 0);
    }
    CHECK(tally_comm_close(c) == 0);
    for (int i = 0; i < 8; i++) {
        CHECK(tally_op_poll(op[i]) == 1 && tally_op_wait(op[i], -1) == 0);
        tally_op_free(op[i]);
    }
    return 0;
}

static void test_close_busy(void **state)
{
    struct job j = {.ranks = 3, .tallyds = 1, .main = close_busy};
    job_start(&j);
    job_finish(&j);
    job_clear(&j);
}

/* --- somebody is late ---------------------------------------------------------------------------- */

static int never_comes(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    CHECK(round_of(c, "early", 10) == 0);
    if (rank == 1) {
        job_await(&b->stage, 2);
        while (tally_comm_status(c, NULL) == 0)
            job_sleep_ms(10);
        CHECK(round_of(c, "w", 10) == -ETIME);
    } else {
        CHECK(round_of(c, "w", 10) == -ETIME);
        atomic_fetch_add(&b->stage, 1);
    }
    CHECK_HOLDS(tally_error(), "'w' has waited");
    CHECK_HOLDS(tally_error(), "for rank 1 (TALLY_TIMEOUT): part 1 of 1, which the service of rank ");
    CHECK_HOLDS(tally_error(), " sums, has been sent and is not answered");
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_timeout(void **state)
{
    struct job j = {
        .ranks = 3, .tallyds = 1, .main = never_comes, .arg = new_board(), .settings = {"TALLY_TIMEOUT=2"}};
    job_start(&j);
    for (int i = 0; i < 3; i++)
        assert_int_equal(job_wait_rank(&j, i), 0);
    job_clear(&j);
}

static int is_late(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    tally_op *op;
    struct tally_event e = {0};
    if (rank == 0)
        CHECK(tally_comm_watch_log(c, 1) == 0);
    if (rank == 2)
        job_await(&b->stage, 1);
    CHECK(tally_barrier(c, "slow", NULL, &op) == 0);
    if (rank == 0) {
        do
            CHECK(tally_comm_next(c, 60000, &e) == 0);
        while (e.kind != TALLY_EVENT_LOG || e.status != TALLY_LOG_WARNING);
        CHECK_HOLDS(e.text, "'slow' has waited");
        CHECK_HOLDS(e.text, "for rank 2");
        CHECK(tally_op_poll(op) == 0);
        atomic_store(&b->stage, 1);
        CHECK(tally_comm_watch_log(c, 0) == 0);
    }
    CHECK(tally_op_wait(op, -1) == 0);
    tally_op_free(op);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static void test_late_warning(void **state)
{
    struct job j = {.ranks = 3,
                    .tallyds = 1,
                    .main = is_late,
                    .arg = new_board(),
                    .settings = {"TALLY_LATE_WARNING=0.3"}};
    job_start(&j);
    job_finish(&j);
    job_log_lacks(&j, 1, "has waited"); /* one of those who wait says it, not all */
    job_clear(&j);
}

/* --- strangers ----------------------------------------------------------------------------------- */

static int until_stopped(int rank, void *arg)
{
    struct board *b = arg;
    tally_comm *c = job_open();
    if (rank == 0) {
        char *json;
        CHECK(tally_comm_report(c, 60000, &json) == 0);
        for (const char *at = json; (at = strstr(at, "\"port\": ")); at++)
            if (sscanf(at, "\"port\": %d", &b->ports[b->port_count]) == 1)
                atomic_fetch_add(&b->port_count, 1);
        free(json);
    }
    static int64_t stop[2];
    for (;;) {
        CHECK(round_of(c, "w", COUNT) == 0);
        atomic_fetch_add(&b->stage, 1);
        tally_op *op;
        stop[0] = atomic_load(&b->stop);
        CHECK(tally_push_pull(c, "stop", stop, stop, 1, TALLY_INT64, TALLY_MAX, NULL, &op) == 0);
        CHECK(tally_op_wait(op, -1) == 0);
        tally_op_free(op);
        if (stop[0])
            break;
    }
    CHECK(tally_comm_status(c, NULL) == 0);
    CHECK(tally_comm_close(c) == 0);
    return 0;
}

static int knock(int port)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons((uint16_t)port),
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    return fd;
}

static void say(int port, const void *bytes, size_t len, bool hang_up)
{
    int fd = knock(port);
    send(fd, bytes, len, MSG_NOSIGNAL);
    if (hang_up) {
        close(fd);
        return;
    }
    /* It must be closed from over there. */
    char answer[1024];
    struct timeval patience = {.tv_sec = 100};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    ssize_t n;
    while ((n = recv(fd, answer, sizeof answer, 0)) > 0)
        ;
    assert_true(n == 0 || errno == ECONNRESET);
    close(fd);
}

static void strange_things(int port, uint64_t *s)
{
    uint8_t noise[3000], frame[TLY_FRAME_BYTES + 400] = {0};
    static const uint8_t zero[TLY_FRAME_KEY_BYTES];
    for (size_t i = 0; i < sizeof noise; i++)
        noise[i] = (uint8_t)job_random(s);
    say(port, noise, sizeof noise, false);
    say(port, noise, 50, true);
    say(port,
        "GET / HTTP/1.1\r\nHost: here\r\nAccept: everything, and more of it, and yet more\r\n"
        "User-Agent: somebody who has lost the way and keeps talking for a whole header\r\n\r\n",
        160, false);
    say(port, "", 0, true);
    /* Well-made headers under the key that anybody knows: too large, of a later phase, out of sequence. */
    struct tly_context c;
    struct tly_frame f = {.type = TLY_HELLO, .payload = 0x7fffffff};
    tly_context_init(&c);
    tly_frame_encode(&f, zero, &c, frame);
    say(port, frame, TLY_FRAME_BYTES, false);
    f = (struct tly_frame){.type = TLY_PUSH, .payload = 64, .length = 64};
    tly_context_init(&c);
    tly_frame_encode(&f, zero, &c, frame);
    say(port, frame, TLY_FRAME_BYTES + 64, false);
    f = (struct tly_frame){.type = TLY_HELLO, .payload = 320, .seq = 7};
    tly_context_init(&c);
    tly_frame_encode(&f, zero, &c, frame);
    say(port, frame, TLY_FRAME_BYTES + 320, false);
    f = (struct tly_frame){.type = TLY_HELLO, .payload = 320}; /* and zeros for a greeting */
    tly_context_init(&c);
    tly_frame_encode(&f, zero, &c, frame);
    say(port, frame, TLY_FRAME_BYTES + 320, false);
    say(port, frame, TLY_FRAME_BYTES + 100, true);
    memcpy(frame + TLY_FRAME_BYTES, noise, 320);
    memcpy(frame + TLY_FRAME_BYTES, "TALLYHLO\1", 9);
    say(port, frame, TLY_FRAME_BYTES + 320, false);
}

static void test_strangers(void **state)
{
    struct board *b = new_board();
    struct job j = {
        .ranks = 2, .tallyds = 1, .main = until_stopped, .arg = b, .settings = {"TALLY_LOG=debug"}};
    uint64_t s = 4711;
    job_start(&j);
    job_await(&b->port_count, 3);
    job_await(&b->stage, 4);
    int silent[4];
    for (int i = 0; i < 4; i++)
        silent[i] = knock(i < 3 ? b->ports[i] : j.port); /* connects and says nothing */
    for (int i = 0; i < 4; i++)
        strange_things(i < 3 ? b->ports[i] : j.port, &s);
    int stage = atomic_load(&b->stage);
    job_await(&b->stage, stage + 4);
    atomic_store(&b->stop, 1);
    job_finish(&j);
    for (int i = 0; i < 4; i++)
        close(silent[i]);
    job_log_holds(&j, 0, "not Tally's protocol");
    job_log_holds(&j, 1, "not Tally's protocol");
    job_log_holds(&j, JOB_MOST_RANKS, "payload too large");
    job_log_holds(&j, 0, "did not get past the handshake");
    job_clear(&j);
}

/* --- fork, and again ----------------------------------------------------------------------------- */

static int forks_and_dies(int rank, void *arg)
{
    struct board *b = arg;
    if (rank != 0)
        return until_failure(rank, arg);
    tally_comm *c = job_open();
    CHECK(round_of(c, "w", COUNT) == 0);
    fflush(NULL);
    pid_t test = getppid(), child = fork();
    if (child == 0) {
        while (kill(test, 0) == 0) /* its parent dies before it, and it must not outlive the test */
            job_sleep_ms(50);
        _exit(0);
    }
    atomic_store(&b->child, child);
    for (;;)
        if (round_of(c, "w", COUNT) != 0)
            pause();
}

/* With a child of the dead rank alive the others notice all the same, and its port is free at once. */
static void test_killed_with_a_child(void **state)
{
    struct board *b = new_board();
    struct job j = {.ranks = 2, .main = forks_and_dies, .arg = b}, next = {.ranks = 2, .main = close_busy};
    strcpy(b->name, ", which holds the coordinator at 127.0.0.1:");
    job_start(&j);
    job_await(&b->child, 1);
    job_await(&b->stage, 4);
    kill(j.rank_pid[0], SIGKILL);
    assert_int_equal(job_wait_rank(&j, 0), 128 + SIGKILL);
    assert_int_equal(job_wait_rank(&j, 1), 0);
    next.port = j.port;
    job_start(&next);
    job_finish(&next);
    job_clear(&next);
    kill(atomic_load(&b->child), SIGKILL);
    job_clear(&j);
}

static int again_and_again(int rank, void *arg)
{
    uint64_t s = 31 * (uint64_t)rank;
    for (int i = 0; i < (UNDER_SANITIZER ? 4 : 10); i++) {
        tally_comm *c = job_open();
        CHECK(round_of(c, "w", 1000) == 0);
        CHECK(round_of(c, NULL, 1000) == 0);
        if (i == 2 && rank == 0)
            job_sleep_ms(1500); /* others may have closed long ago and stand at the door again */
        else
            job_sleep_ms((int)(job_random(&s) % 20));
        CHECK(tally_comm_close(c) == 0);
    }
    return 0;
}

static void test_open_again(void **state)
{
    static const int together[] = {0, 0, 0}, pairs[] = {0, 0, 1};
    for (int i = 0; i < 3; i++) {
        struct job j = {.ranks = 3,
                        .tallyds = i == 2,
                        .tallyd_stays = true,
                        .main = again_and_again,
                        .machine = i == 0 ? together : pairs};
        job_start(&j);
        job_finish(&j);
        if (i == 2) {
            kill(j.tallyd_pid[0], SIGTERM);
            assert_int_equal(job_wait_tallyd(&j, 0), 0);
        }
        job_clear(&j);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rank_killed),         cmocka_unit_test(test_coordinator_killed),
        cmocka_unit_test(test_rank_stopped),        cmocka_unit_test(test_rank_leaves),
        cmocka_unit_test(test_rank_aborts),         cmocka_unit_test(test_tallyd_comes_when_a_rank_has_left),
        cmocka_unit_test(test_close_busy),          cmocka_unit_test(test_timeout),
        cmocka_unit_test(test_late_warning),        cmocka_unit_test(test_strangers),
        cmocka_unit_test(test_killed_with_a_child), cmocka_unit_test(test_open_again),
    };
    return cmocka_run_group_tests_name("failures", tests, NULL, NULL);
}
